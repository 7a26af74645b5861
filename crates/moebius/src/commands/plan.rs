//! `moebius plan`: the ops that the engine will run, the placement of buffers, and the memory they need.

use anyhow::Result;
use backend::residency::Residency;
use backend::{Kinds, PAGE, Part};

use crate::args::PlanArgs;
use crate::load::{self, EngineSetup, Prepared};
use crate::machine;
use crate::memory::{Budget, Units};
use crate::out::say;

pub fn run(args: &PlanArgs) -> Result<()> {
    let model = load::open(args.model.model.as_deref())?;
    let setup = EngineSetup::from(&args.engine);
    let prepared = setup.prepare(&model.checkpoint, model.plan.clone())?;
    say!("{}", if args.unfused { &*model.plan } else { &*prepared.plan })?;
    print_memory(&prepared, model.checkpoint.name())?;
    say!("a decoded token reads {} of weights", machine::bytes(prepared.plan.bytes_per_token() as u64))
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
