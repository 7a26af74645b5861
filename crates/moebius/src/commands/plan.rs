//! `moebius plan`: the ops that the engine will run, the placement of buffers, and the memory they need.

use anyhow::{Result, ensure};
use backend::cpu::read_bandwidth;
use backend::experts::layout::Layer;
use backend::experts::simulate::{self, Predicted};
use backend::residency::Residency;
use backend::{Kinds, PAGE, Part, RouterInfo};

use crate::args::PlanArgs;
use crate::load::{self, EngineSetup, Model, Prepared};
use crate::machine;
use crate::memory::{Budget, Units};
use crate::out::say;
use crate::routes::Trace;

pub fn run(args: &PlanArgs) -> Result<()> {
    let model = load::open(args.model.model.as_deref())?;
    let setup = EngineSetup::from(&args.engine);
    let prepared = setup.prepare(&model.checkpoint, model.plan.clone())?;
    say!("{}", if args.unfused { &*model.plan } else { &*prepared.plan })?;
    print_memory(&prepared, model.checkpoint.name())?;
    print_streaming(args, &model, &prepared)?;
    say!("a decoded token reads {} of weights", machine::bytes(prepared.plan.bytes_per_token() as u64))
}

/// What to expect of experts that are streamed, from what the disk and the memory of this machine give.
fn print_streaming(args: &PlanArgs, model: &Model, prepared: &Prepared) -> Result<()> {
    let Prepared { plan, layout, .. } = prepared;
    if layout.layers.is_empty() {
        ensure!(args.routes.is_none(), "predict from routes: no expert is streamed; name a smaller --memory");
        return Ok(());
    }
    let threads = args.engine.threads.unwrap_or_else(machine::cores);
    let (disk, memory) = (simulate::disk_bandwidth(&model.checkpoint, plan, layout)?, read_bandwidth(threads)?);
    let shown = |n: f64| machine::bytes(n as u64);
    say!("streaming")?;
    let (disk_shown, memory_shown) = (shown(disk), shown(memory));
    say!("  {:<12} {disk_shown:>8}/s  measured with the reads of single experts", "disk")?;
    say!("  {:<12} {memory_shown:>8}/s  measured with {threads} threads", "memory")?;
    let print = |name: &str, Predicted { hit_rate, bytes }| {
        // Reads and computing overlap at best; this is without.
        let seconds = bytes / disk.max(1.0) + plan.bytes_per_token() as f64 / memory.max(1.0);
        let (hits, read, rate) = (hit_rate * 100.0, shown(bytes), 1.0 / seconds);
        say!("  {name:<12} {hits:>8.1}%   of a token's experts in memory, {read} read from disk, {rate:.2} tok/s")
    };
    print("if uniform", simulate::predict_uniform(layout))?;
    let Some(path) = &args.routes else { return Ok(()) };
    let router = |layer: &Layer| RouterInfo { layer: 0, n_expert: layer.n_expert, n_used: layer.n_used };
    let routers: Vec<RouterInfo> = layout.layers.iter().map(router).collect();
    let trace = Trace::read(path, &routers)?;
    print("as recorded", simulate::predict(layout, &trace.tokens))?;
    say!("  by the share of the experts that slabs hold, as recorded in {} tokens:", trace.tokens.len())?;
    for percent in [5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100] {
        let layout = layout.resized(layout.full_bytes() / 100 * percent);
        let name = format!("{percent}%: {}", machine::bytes(layout.slab_bytes() as u64));
        print(&name, simulate::predict(&layout, &trace.tokens))?;
    }
    Ok(())
}

/// What the program takes, part by part.
fn print_memory(prepared: &Prepared, file: &str) -> Result<()> {
    let Prepared { backend, plan, budget, fit, .. } = prepared;
    let (limits, units) = (&fit.limits, Units::of(&**backend, plan));
    let shown = |n: usize| machine::bytes(n as u64);
    say!("memory ({})", fit.footprint.device)?;
    for &(part, bytes) in fit.footprint.parts() {
        let (name, note) = match part {
            Part::Weights(kind, Residency::Mapped) => (kind.name(), format!("mapped from {file}, read when touched")),
            Part::Weights(kind, Residency::Copied) => (kind.name(), "copied; vectors as f32".into()),
            Part::Weights(_, Residency::Streamed) => {
                let (n, all) = (prepared.layout.n_slabs(), prepared.layout.n_experts());
                ("experts", format!("{n} of {all} in slabs, the others are read from {file} when they are wanted"))
            }
            Part::Cache => {
                let (page, n) = (units.page / PAGE, limits.n_pages * PAGE);
                (part.name(), format!("{} for each of {n} positions", shown(page)))
            }
            Part::Windows => {
                let window = Kinds::of(plan).window.unwrap_or(0);
                let (page, n) = (units.window_page / PAGE, limits.n_window_pages * PAGE);
                let rest = "checkpoints and chunks take the rest";
                (part.name(), format!("{} for each of {n} positions; a sequence keeps {window}, {rest}", shown(page)))
            }
            Part::States => {
                let others = limits.n_states - 1;
                (part.name(), format!("{} for the sequence and each of {others} checkpoints", shown(units.state)))
            }
            Part::Activations | Part::Inputs | Part::Scratch => {
                (part.name(), format!("for {} tokens in a step", limits.max_tokens))
            }
            Part::Workers => (part.name(), "of all threads".into()),
        };
        say!("  {name:<12} {:>10}  {note}", shown(bytes))?;
    }
    say!("  {:<12} {:>10}  a context of {} positions", "together", shown(fit.footprint.total()), limits.max_positions)?;
    match *budget {
        Budget::Promise { bytes, overhead } => {
            say!("  {:<12} {:>10}  the rest of the process", "overhead", shown(overhead))?;
            say!("  {:<12} {:>10}  --memory", "promised", shown(bytes))?;
        }
        Budget::Free(Some(free)) => say!("  {:<12} {:>10}  after a margin", "free now", shown(free))?,
        Budget::Free(None) => {}
    }
    Ok(())
}
