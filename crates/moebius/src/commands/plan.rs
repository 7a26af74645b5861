//! `moebius plan`: the ops that the engine will run, the placement of buffers, and the memory they need.

use std::sync::Arc;

use anyhow::{Result, anyhow, ensure};
use backend::experts::layout::Layer;
use backend::experts::simulate::{Predicted, disk_bandwidth, predict, predict_uniform};
use backend::residency::Residency;
use backend::{Backend, Kinds, PAGE, Part, RouterInfo};
use cpu::read_bandwidth;
use gpu::cuda::hot::{Shape, simulate};
use gpu::cuda::outline::{Card, Launched, Line, Outline};
use gpu::cuda::split::{self, Split};
use gpu::cuda::{self, CudaParts};
use gpu::metal::{self, Metal};
use model::plan::{Op, Plan};

use crate::args::{BackendKind, DraftArg, EngineArgs, PlanArgs};
use crate::device::{Chosen, Device, Prefer};
use crate::load::{self, EngineSetup, Model, Prepared};
use crate::machine;
use crate::memory::{self, Budget, Fit, Units, Wish};
use crate::out::say;
use crate::predict::Rates;
use crate::routes::Trace;

pub fn run(args: &PlanArgs) -> Result<()> {
    let model = load::open(args.model.path()?.as_deref())?.stretched(args.engine.step.rope_scaling)?;
    let is_cpu = matches!(args.engine.backend, None | Some(BackendKind::Cpu | BackendKind::Reference));
    ensure!(is_cpu || args.draft.draft == DraftArg::Off, "--draft of `moebius plan` requires --backend cpu");
    if args.engine.backend == Some(BackendKind::Cuda) {
        return run_cuda(args, &model);
    }
    if args.engine.backend == Some(BackendKind::Metal) {
        return run_metal(args, &model);
    }
    ensure!(args.sm.is_none() && args.cubins.is_none(), "--sm and --cubins require --backend cuda");
    let setup = EngineSetup { draft: args.draft.clone(), ..EngineSetup::of(&args.engine, Prefer::Cpu)? };
    let model = model.drafting(setup.head())?;
    let prepared = setup.prepare(&model.checkpoint, model.plan.clone())?;
    say!("{}", if args.unfused { &*model.plan } else { &*prepared.plan })?;
    print_memory(&prepared, model.checkpoint.name())?;
    print_streaming(args, &model, &prepared)?;
    say!("a decoded token reads {} of weights", machine::bytes(prepared.plan.bytes_per_token() as u64))
}

/// The plan on a GPU, which need not be there: what a step launches, layer by layer.
fn run_cuda(args: &PlanArgs, model: &Model) -> Result<()> {
    let ordinal = args.engine.device.unwrap_or(0);
    let card = match args.sm {
        Some(arch) => Card::of(arch).ok_or_else(|| {
            anyhow!("--sm {arch} is unsupported: without a device, 80, 86, 89, 90, 100 and 120 are supported")
        })?,
        None => cuda::card(ordinal)
            .map_err(|why| anyhow!("failed to plan for CUDA device {ordinal}: {why} (--sm 90 needs no device)"))?,
    };
    // Limits are those of a machine with all the memory that is wanted.
    let device = Device { ordinal, ..Device::named(Chosen::Cuda) };
    let setup = EngineSetup { device, ..EngineSetup::of(&cpu(args), Prefer::Cpu)? };
    setup.check_cache(&model.plan)?;
    let placed = setup.split(&model.checkpoint, &model.plan)?;
    let cuda = placed.as_ref().map_or_else(|| setup.cuda(), |(cuda, ..)| cuda.clone());
    let parts = setup.cuda_parts();
    let (plan, checkpoint) = match &parts {
        Some(parts) => parts.first(&model.plan, &model.checkpoint)?,
        None => (cuda.lower(model.plan.clone())?, Arc::clone(&model.checkpoint)),
    };
    let all = Budget::Free(None);
    let fit = memory::fit(&cuda, &plan, &Wish { sequences: 64, ..setup.wish() }, all)?;
    let outline = Outline::new(&cuda, &plan, &checkpoint, fit.limits, card)?;
    if let Some(folder) = &args.cubins {
        let n = cuda::compile_ahead(&outline, card.arch, folder)
            .map_err(|why| anyhow!("failed to compile kernels: {why}"))?;
        return say!("{n} modules for compute capability {} in {}", card.arch, folder.display());
    }
    say!("{}", if args.unfused { &*model.plan } else { &*plan })?;
    let (budget, fit) = match placed {
        Some((_, _, budget, fit)) => (budget, fit),
        None => (all, memory::fit(&cuda, &plan, &setup.wish(), all)?),
    };
    let units = Units::of(&cuda, &plan, 0);
    print_footprint(&fit, &units, &plan, model.checkpoint.name(), None)?;
    print_budget(budget, "the driver", "of GPU memory")?;
    print_split(args, &plan, &cuda.split(&plan), &fit)?;
    if let Some(parts) = &parts {
        print_traffic(parts, &plan, fit.limits.max_tokens)?;
    }
    say!("launches for one token on compute capability {}.{}", card.arch / 10, card.arch % 10)?;
    let one = outline.step(1, 1, 1)?;
    let is_same = |a: &Line, b: &Line| (&a.name, a.bytes, &a.launches) == (&b.name, b.bytes, &b.launches);
    for (name, lines) in by_layer(one.iter().map(|line| (line.layer, line)), is_same) {
        let n: usize = lines.iter().map(|line| line.launches.len()).sum();
        let bytes = lines.iter().map(|line| line.bytes).sum::<usize>();
        let launches = if n == 1 { "launch" } else { "launches" };
        say!("  {name}: {n} {launches}, {} of weights", machine::bytes(bytes as u64))?;
        for line in lines {
            for (i, launch) in line.launches.iter().enumerate() {
                let Launched { kernel, blocks, threads, shared } = launch;
                let (what, bytes) = match i {
                    0 => (line.name.as_str(), machine::bytes(line.bytes as u64)),
                    _ => ("", String::new()),
                };
                let bytes = if line.bytes == 0 { String::new() } else { bytes };
                say!("    {kernel:<22} {blocks:>6} x {threads:>4}  {shared:>6} B shared  {bytes:>8}  {what}")?;
            }
        }
    }
    say!("together")?;
    let total = machine::bytes(plan.bytes_per_token() as u64);
    say!("  a token: {} launches, {total} of weights", launches(&one))?;
    for n in [8, 32] {
        say!("  a token of each of {n} sequences: {} launches", launches(&outline.step(n, 1, 1)?))?;
    }
    let n = fit.limits.max_tokens;
    say!("  a prompt of {n} tokens: {} launches", launches(&outline.step(1, n, 1)?))
}

/// What several GPUs send each other.
fn print_traffic(parts: &CudaParts, plan: &Plan, n_tokens: usize) -> Result<()> {
    let n = parts.devices.len();
    say!(
        "above: device {} of {n}; each has its share of experts, heads and caches, and all of the rest",
        parts.devices[0]
    )?;
    for (what, n_tokens, n_outputs) in [("a token", 1, 1), ("a prompt", n_tokens, 1)] {
        let cuda::Traffic { sums, bytes } = cuda::traffic(plan, n_tokens, n_outputs);
        let bytes = machine::bytes((bytes * (n - 1)) as u64);
        say!("  {what} of {n_tokens}: {sums} sums over the devices, {bytes} that each sends")?;
    }
    Ok(())
}

/// The plan on an Apple GPU, which need not be there: what a step dispatches, layer by layer.
fn run_metal(args: &PlanArgs, model: &Model) -> Result<()> {
    ensure!(args.sm.is_none() && args.cubins.is_none(), "--sm and --cubins require --backend cuda");
    // Limits are those of a machine with all the memory that is wanted.
    let setup = EngineSetup { device: Device::named(Chosen::Metal), ..EngineSetup::of(&cpu(args), Prefer::Cpu)? };
    setup.check_cache(&model.plan)?;
    let metal = Metal::system(setup.step.cache_type, true);
    let plan = metal.lower(model.plan.clone())?;
    let fit = memory::fit(&metal, &plan, &setup.wish(), Budget::Free(None))?;
    let mut outline = metal::outline::Outline::new(&metal, &plan, &model.checkpoint, fit.limits)?;
    say!("{}", if args.unfused { &*model.plan } else { &*plan })?;
    print_footprint(&fit, &Units::of(&metal, &plan, 0), &plan, model.checkpoint.name(), None)?;
    say!("dispatches for one token on Apple GPUs from M1 on; | is a barrier before one (never run on a Mac)")?;
    let counts = |lines: &[&metal::outline::Line]| {
        let barriers = lines.iter().filter(|line| line.is_behind).count();
        let plural = |n: usize| if n == 1 { "" } else { "s" };
        let (n, bytes) = (lines.len(), lines.iter().map(|line| line.bytes).sum::<u64>());
        let bytes = machine::bytes(bytes);
        format!(
            "{n} dispatch{}, {barriers} barrier{}, {bytes} of weights",
            if n == 1 { "" } else { "es" },
            plural(barriers)
        )
    };
    let one = outline.step(1, 1, 0);
    for (name, lines) in by_layer(one.iter().map(|line| (line.layer, line)), |a, b| a.is_alike(b)) {
        say!("  {name}: {}", counts(&lines))?;
        for line in lines {
            let metal::outline::Line { kernel, groups, threads, bytes, is_behind, op, .. } = line;
            let bytes = if *bytes == 0 { String::new() } else { machine::bytes(*bytes) };
            let mark = if *is_behind { '|' } else { ' ' };
            say!("  {mark} {kernel:<22} {groups:>6} x {threads:>4}  {bytes:>8}  {op}")?;
        }
    }
    say!("together")?;
    say!("  a token: {}", counts(&one.iter().collect::<Vec<_>>()))?;
    let depth = fit.limits.max_positions - 1;
    let lines = outline.step(1, 1, depth);
    let barriers = lines.iter().filter(|line| line.is_behind).count();
    say!("  a token after {depth}: {} dispatches, {barriers} barriers", lines.len())?;
    for n in [4, 8, 32] {
        let lines = outline.step(n, 1, 0);
        let barriers = lines.iter().filter(|line| line.is_behind).count();
        say!("  a token of each of {n} sequences: {} dispatches, {barriers} barriers", lines.len())?;
    }
    let (n, lines) = (fit.limits.max_tokens, outline.step(1, fit.limits.max_tokens, 0));
    let barriers = lines.iter().filter(|line| line.is_behind).count();
    say!("  a prompt of {n} tokens: {} dispatches, {barriers} barriers", lines.len())
}

/// Lines in groups of a layer, in order; equal layers that follow each other are one group. Returns the groups' names
/// and the lines of their first layers.
fn by_layer<'a, L>(
    lines: impl Iterator<Item = (Option<u32>, &'a L)>,
    is_same: impl Fn(&L, &L) -> bool,
) -> Vec<(String, Vec<&'a L>)> {
    // Lines of two layers may stand side by side. What is of no layer stands before the first or behind the last.
    let (mut groups, mut last) = (std::collections::BTreeMap::<u32, Vec<&L>>::new(), None);
    for (layer, line) in lines {
        last = last.max(layer);
        let key = layer.map_or(if last.is_none() { 0 } else { u32::MAX }, |layer| layer.saturating_add(1));
        groups.entry(key).or_default().push(line);
    }
    let is_layer = |key: u32| key != 0 && key != u32::MAX;
    let groups: Vec<(u32, Vec<&L>)> = groups.into_iter().collect();
    let is_equal = |a: &(u32, Vec<&L>), b: &(u32, Vec<&L>)| {
        let alike = a.1.len() == b.1.len() && a.1.iter().zip(&b.1).all(|(a, b)| is_same(a, b));
        is_layer(a.0) && is_layer(b.0) && alike
    };
    let named = groups.chunk_by(is_equal).map(|same| {
        let (first, last) = (same[0].0, same[same.len() - 1].0);
        let name = match first {
            _ if !is_layer(first) => "outside layers".into(),
            _ if first == last => format!("layer {}", first - 1),
            _ => format!("layers {} to {}, each", first - 1, last - 1),
        };
        (name, same[0].1.clone())
    });
    named.collect()
}

fn launches(lines: &[Line]) -> usize {
    lines.iter().map(|line| line.launches.len()).sum()
}

/// Returns the same settings, with a backend that needs no device.
fn cpu(args: &PlanArgs) -> EngineArgs {
    EngineArgs { backend: Some(BackendKind::Cpu), ..args.engine.clone() }
}

/// What to expect of experts that are streamed, from what the disk and the memory of this machine give.
fn print_streaming(args: &PlanArgs, model: &Model, prepared: &Prepared) -> Result<()> {
    let Prepared { plan, layout, .. } = prepared;
    if layout.layers.is_empty() {
        ensure!(args.routes.is_none(), "--routes requires streamed experts: choose a smaller --memory");
        return Ok(());
    }
    let threads = args.engine.threads.unwrap_or_else(machine::cores);
    let disk = match args.disk_speed {
        Some(speed) => speed as f64,
        None => disk_bandwidth(&model.checkpoint, plan, layout)?,
    };
    let memory = args.memory_speed.map_or_else(|| read_bandwidth(threads), |speed| Ok(speed as f64))?;
    let shown = |n: f64| machine::bytes(n as u64);
    say!("streaming")?;
    let (disk_shown, memory_shown) = (shown(disk), shown(memory));
    let from = |speed: Option<usize>, measured: String| speed.map_or(measured, |_| "as said".to_string());
    let disk_from = from(args.disk_speed, "measured with the reads of single experts".into());
    let memory_from = from(args.memory_speed, format!("measured with {threads} threads"));
    say!("  {:<12} {disk_shown:>8}/s  {disk_from}", "disk")?;
    say!("  {:<12} {memory_shown:>8}/s  {memory_from}", "memory")?;
    let print = |name: &str, Predicted { hit_rate, bytes }| {
        // Reads and computing overlap at best; this is without.
        let seconds = bytes / disk.max(1.0) + plan.bytes_per_token() as f64 / memory.max(1.0);
        let (hits, read, rate) = (hit_rate * 100.0, shown(bytes), 1.0 / seconds);
        say!("  {name:<12} {hits:>8.1}%   of a token's experts in memory, {read} read from disk, {rate:.2} tok/s")
    };
    print("if uniform", predict_uniform(layout))?;
    let Some(path) = &args.routes else { return Ok(()) };
    let router = |layer: &Layer| RouterInfo { layer: 0, n_expert: layer.n_expert, n_used: layer.n_used };
    let routers: Vec<RouterInfo> = layout.layers.iter().map(router).collect();
    let trace = Trace::read(path, &routers)?;
    print("as recorded", predict(layout, &trace.tokens))?;
    say!("  by the share of the experts that slabs hold, as recorded in {} tokens:", trace.tokens.len())?;
    for percent in [5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100] {
        let layout = layout.resized(layout.full_bytes() / 100 * percent);
        let name = format!("{percent}%: {}", machine::bytes(layout.slab_bytes() as u64));
        print(&name, predict(&layout, &trace.tokens))?;
    }
    Ok(())
}

/// What to expect of experts that stay in host memory, from what memory gives.
fn print_split(args: &PlanArgs, plan: &Plan, split: &Split, fit: &Fit) -> Result<()> {
    let n_host = split.host().count();
    if n_host == 0 {
        return Ok(());
    }
    let threads = args.engine.threads.unwrap_or_else(machine::cores);
    let rates = Rates::measure(args.engine.device.unwrap_or(0), threads, args.memory_speed)?;
    let shown = |n: f64| machine::bytes(n as u64);
    let [on_device, on_host] = split.bytes().map(|n| shown(n as f64));
    let dense = shown(fit.dense_bytes(split) as f64);
    let all = split.layers().len();
    say!("placement")?;
    say!("  {:<12} {dense:>10}  weights that every token reads", "GPU")?;
    say!("  {:<12} {on_device:>10}  routed experts of {} of {all} layers", "GPU", all - n_host)?;
    say!("  {:<12} {on_host:>10}  routed experts of {n_host} layers", "host")?;
    let from = if rates.is_gpu_known { "by its clock and width" } else { "assumed" };
    say!("  {:<12} {:>8}/s  {from}", "GPU", shown(rates.gpu))?;
    let from = args.memory_speed.map_or_else(|| format!("measured with {threads} threads"), |_| "as said".into());
    say!("  {:<12} {:>8}/s  {from}", "host", shown(rates.host))?;
    say!("  {:<12} {:>8}/s  assumed", "link", shown(rates.link))?;
    let (rate, bytes) = rates.shared(plan, split);
    let [read_gpu, read_host] = bytes.map(|n| shown(n as f64));
    say!(
        "  {:<12} {rate:>10.1}  tok/s at best: a token reads {read_gpu} on the GPU, {read_host} on the host",
        "answers"
    )?;
    say!("  {:<12} {:>10.1}  tok/s at best on the CPU alone", "", rates.alone(plan))?;
    let tokens = fit.limits.max_tokens;
    let rate = rates.prompt(split, tokens);
    say!("  {:<12} {rate:>10.0}  tok/s at best: the link carries {on_host} for {tokens} tokens", "prompts")?;
    let Some(path) = &args.routes else { return Ok(()) };
    let shape = |layer: &split::Layer, share: f64| match plan.ops[layer.op] {
        Op::Experts { gate, ids, .. } => {
            let (n_expert, n_used) = (plan.weight(gate).shape[0], plan.buf(ids).width);
            Shape { n_expert, n_used, n_slots: (n_expert as f64 * share) as usize }
        }
        _ => Shape { n_expert: 0, n_used: 0, n_slots: 0 },
    };
    let shapes = |share: f64| split.layers().iter().map(|layer| shape(layer, share)).collect::<Vec<_>>();
    let router = |shape: &Shape| RouterInfo { layer: 0, n_expert: shape.n_expert, n_used: shape.n_used };
    let routers: Vec<RouterInfo> = shapes(0.0).iter().map(router).collect();
    let trace = Trace::read(path, &routers)?;
    say!("  by the share of the experts on the GPU, as recorded in {} tokens:", trace.tokens.len())?;
    let host = plan.bytes_per_token().min(split.token_bytes().iter().sum());
    let dense = plan.bytes_per_token() - host;
    for percent in [5, 10, 20, 30, 40, 50, 60, 70, 80, 90] {
        let share = f64::from(percent) / 100.0;
        let hit = simulate(&shapes(share), &trace.tokens, 2);
        // The GPU computes beside the host.
        let seconds = |hit: f64, n: usize| {
            let [gpu, host] = [hit, 1.0 - hit].map(|share| share * host as f64);
            dense as f64 / rates.gpu + f64::max(gpu / rates.gpu, host / rates.host.max(1.0)) + rates.handovers(n)
        };
        let fixed = 1.0 / (seconds(share, all - all * percent as usize / 100) + share * host as f64 / rates.gpu);
        let [pairs, bytes] = [hit * 100.0, split.bytes().iter().sum::<usize>() as f64 * share];
        say!(
            "  {:<12} {:>10.1}  tok/s at best with single experts by use, {pairs:.1}% of the pairs on the GPU; {fixed:.1} \
             with whole layers",
            format!("{percent}%: {}", shown(bytes)),
            1.0 / seconds(hit, all)
        )?;
    }
    Ok(())
}

/// What the program takes, part by part.
fn print_memory(prepared: &Prepared, file: &str) -> Result<()> {
    let Prepared { backend, plan, budget, fit, .. } = prepared;
    print_footprint(fit, &Units::of(&**backend, plan, 0), plan, file, Some(prepared))?;
    let drafting = prepared.draft.as_ref().map_or(0, |draft| draft.bytes);
    if drafting > 0 {
        say!("  {:<12} {:>10}  for as many positions", "draft model", shown(drafting))?;
    }
    let budget = match *budget {
        Budget::Promise { bytes, overhead } => Budget::Promise { bytes, overhead: overhead.saturating_sub(drafting) },
        free => free,
    };
    print_budget(budget, "the rest of the process", "--memory")
}

/// What there is for it; `rest`: what else takes of it, `name`: of what is promised.
fn print_budget(budget: Budget, rest: &str, name: &str) -> Result<()> {
    match budget {
        Budget::Promise { bytes, overhead } => {
            say!("  {:<12} {:>10}  {rest}", "overhead", shown(overhead))?;
            say!("  {:<12} {:>10}  {name}", "promised", shown(bytes))?;
        }
        Budget::Free(Some(free)) => say!("  {:<12} {:>10}  after a margin", "free now", shown(free))?,
        Budget::Free(None) => {}
    }
    Ok(())
}

fn shown(n: usize) -> String {
    machine::bytes(n as u64)
}

/// What a program of these limits takes, part by part. `streamed`: what is prepared, with the slabs of experts.
fn print_footprint(fit: &Fit, units: &Units, plan: &Plan, file: &str, streamed: Option<&Prepared>) -> Result<()> {
    let limits = &fit.limits;
    say!("memory ({})", fit.footprint.device)?;
    for &(part, bytes) in fit.footprint.parts() {
        let (name, note) = match part {
            Part::Weights(kind, Residency::Mapped) => (kind.name(), format!("mapped from {file}, read when touched")),
            Part::Weights(kind, Residency::Copied) => (kind.name(), "copied; vectors as f32".into()),
            Part::Weights(_, Residency::Streamed) => {
                let (n, all) = streamed.map_or((0, 0), |p| (p.layout.n_slabs(), p.layout.n_experts()));
                ("experts", format!("{n} of {all} in slabs, the others are read from {file} when needed"))
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
    say!("  {:<12} {:>10}  a context of {} positions", "together", shown(fit.footprint.total()), limits.max_positions)
}
