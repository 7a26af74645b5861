//! The Metal backend on a simulated GPU: whole models against the reference, in every order of threads, with failures
//! on demand, and with mistakes planted in kernels and lists, each of which must be found. Skips where there is no
//! clang.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use backend::cpu::CacheType;
use backend::metal::gpu::{Buf, Caps, Cmd, Gpu, GpuError, List, Mapped, Pipe, Span, Ticket, Times, Unit};
use backend::metal::outline::{Line, Outline};
use backend::metal::{Metal, Off, Tuning};
use backend::reference::Reference;
use backend::{Backend, CompileError, Limits, Tables};
use common::backends::{self, scheduled, schedules, simulated, wide};
use common::{BAD, N_VOCAB, PLAIN, Session, Shape, fixtures, hand_on, model, tokens};
use metal_sim::{Call, Fault, Moment, Options, Schedule, Sim, Stats};
use model::plan::{DeltaHeads, Gate, Plan, RopePairing, Sharing, ValidPlan};
use quant::WeightType::{self, *};

/// RMS of the difference over the standard deviation of the exact values. NaN never passes a comparison with it.
fn relative(found: &[f32], exact: &[f32]) -> f64 {
    assert_eq!(found.len(), exact.len());
    let n = exact.len() as f64;
    let mean = exact.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
    let variance = exact.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
    let error = found.iter().zip(exact).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum::<f64>() / n;
    (error / variance).sqrt()
}

/// A prompt over two pages, then chunks and single tokens of several sequences beside it.
fn run(backend: &dyn Backend, model: &(Plan, Arc<checkpoint::Checkpoint>)) -> Vec<f32> {
    let mut session = Session::new(backend, model, 64);
    let (a, b, c) = (tokens(37, 1), tokens(9, 2), tokens(3, 3));
    let mut all = session.step(&[(0, &a)]).to_vec();
    all.extend_from_slice(session.step(&[(1, &b[..7]), (0, &a[..1])]));
    all.extend_from_slice(session.step(&[(2, &c), (1, &b[7..])]));
    all.extend_from_slice(session.step(&[(0, &c[..1]), (1, &c[1..2]), (2, &a[..1])]));
    all
}

/// Shapes of one layer that holds most ops.
const SHAPES: [Shape; 5] = [
    PLAIN,
    Shape {
        n_head: 6,
        n_kv: 2,
        d_k: 40,
        d_v: 24,
        window: Some(20),
        sinks: true,
        types: [F32, BF16, F16, F32, BF16],
        ..PLAIN
    },
    Shape {
        n_kv: 1,
        pairing: RopePairing::Interleaved,
        softcap: Some(4.0),
        act: Gate::GeluTanh,
        n_expert: 19,
        n_used: 5,
        d_ff: 33,
        fused: false,
        ..PLAIN
    },
    Shape {
        window: Some(40),
        forgets: true,
        biases: true,
        act: Gate::ClampedSwiglu { alpha: 1.702, limit: 7.0 },
        d_ff: 64,
        types: [Q8_0, Q4_0, Q8_0, Q5_1, Q4_0],
        ..PLAIN
    },
    Shape { delta: Some((4, DELTA)), ..PLAIN },
];

/// Heads of a delta rule that no tile divides.
const DELTA: DeltaHeads = DeltaHeads { n_k_head: 2, n_v_head: 4, d_k: 20, d_v: 13, sharing: Sharing::Grouped };

/// Short floats, which lie in files that are repacked.
const SHORT: [Shape; 2] = [
    Shape { d_model: 128, d_ff: 128, types: [F8_E4M3; 5], ..PLAIN },
    Shape { types: [NVFP4_SCALED, NVFP4, NVFP4_SCALED, NVFP4, NVFP4_SCALED], d_ff: 64, biases: true, ..PLAIN },
];

#[test]
fn random_models_agree_with_the_reference() {
    let Some(metal) = simulated(CacheType::F32, Options::default()) else { return };
    for (i, shape) in SHAPES.into_iter().chain(SHORT).enumerate() {
        let model = model(shape);
        let exact = run(&Reference, &model);
        // The forms of products for large matrices, and for one shape those that all others fall back to.
        for tuning in [FINE, Tuning { is_plain: true, ..FINE }].into_iter().take(1 + usize::from(i == 0)) {
            let error = relative(&run(&Metal { tuning, ..metal.clone() }, &model), &exact);
            assert!(error <= 2e-5, "off by {error:e}: {tuning:?} {shape:?}");
        }
    }
}

/// A quantised file of every architecture, and all types of 32- and 256-blocks between the last three.
const FILES: &[&str] = &[
    "deepseekv2/model-q8_0.gguf",
    "deepseekv3/model-q5_1.gguf",
    "gemma3/model-q5_0.gguf",
    "gemma4/model-q4_1.gguf",
    "glm4moe/model-q4_0.gguf",
    "gptoss/model-mxfp4.gguf",
    "llama/model-q5_1.gguf",
    "mixtral/model-q4_1.gguf",
    "qwen2/model-q4_0.gguf",
    "qwen3/model-q8_0.gguf",
    "qwen35/model-q8_0.gguf",
    "qwen3moe/model-q4_0.gguf",
    "qwen3next/model-q8_0.gguf",
    "types/llama-blocks32.gguf",
    "types/qwen3moe-blocks32.gguf",
    "types/qwen3moe-blocks256.gguf",
];

/// Where a file's golden logits are, and what the array is called.
fn golden_of(path: &Path) -> (PathBuf, String) {
    let name = path.file_name().unwrap().to_str().unwrap();
    let beside = path.with_file_name("golden.safetensors");
    match name.strip_prefix("model-").and_then(|name| name.strip_suffix(".gguf")) {
        Some("bf16") => (beside, "logits".into()),
        Some(label) => (beside, format!("logits_{label}")),
        None if name == "hf" => (beside, "logits".into()),
        None if name.starts_with("mlx-") => (beside, "logits_mlx".into()),
        None => (path.with_extension("golden.safetensors"), "logits".into()),
    }
}

/// The files whose golden logits are run: a quantised one of each architecture; where there is time the exact ones,
/// folders and all types too.
fn golden_files() -> Vec<String> {
    if !wide() {
        // All types have met every op in `tests/ops` already.
        return FILES.iter().filter(|file| !file.starts_with("types/")).map(|file| file.to_string()).collect();
    }
    let mut files = vec!["types/qwen3-float.gguf".to_string()];
    for file in FILES {
        files.push(file.to_string());
        let Some((folder, _)) = file.split_once("/model-") else { continue };
        let others = ["model-bf16.gguf", "hf", "mlx-8bit"].map(|name| format!("{folder}/{name}"));
        files.extend(others.into_iter().filter(|file| data().join(file).exists()));
    }
    // Larger models, where they are; an absolute path stays as it is.
    let more = fixtures::more("../shared/fixtures/models").map(|root| {
        let inside = |folder: &Path| std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let folders = inside(&root).filter(|path| path.is_dir());
        let all = folders.flat_map(|folder| inside(&folder).collect::<Vec<_>>());
        let is_model = |path: &PathBuf| path.is_dir() || path.extension().is_some_and(|end| end == "gguf");
        let mut all: Vec<String> = all.filter(is_model).map(|path| path.to_str().unwrap().to_string()).collect();
        all.sort();
        all
    });
    files.extend(more.into_iter().flatten());
    files
}

/// Models of the tree.
fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

#[test]
fn golden_logits_of_whole_models() {
    let Some(metal) = simulated(CacheType::F32, Options::default()) else { return };
    let metal = Metal { tuning: Tuning { part: FINE.part, ..metal.tuning }, ..metal };
    // Weights are read where their files are mapped; cut prompts are run on copies.
    let seen = Arc::new(Mutex::new(Seen::default()));
    let mapped = Metal { maps_weights: true, ..planted(Plant::None, &seen) };
    for file in golden_files() {
        let begin = Instant::now();
        let (golden, array) = golden_of(&data().join(&file));
        let most = if array == "logits" && !file.starts_with("types/") { 1e-5 } else { 1e-4 };
        let golden = std::fs::read(golden).unwrap();
        let golden = safetensors::SafeTensors::deserialize(&golden).unwrap();
        let words = |name: &str| golden.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec();
        let tokens: Vec<u32> = words("tokens").into_iter().map(u32::from_le_bytes).collect();
        let exact: Vec<f32> = words(&array).into_iter().map(f32::from_le_bytes).collect();
        let model = of_file(&metal, &file);
        let whole = |metal: &Metal| Session::new(metal, &model, tokens.len()).step(&[(0, &tokens)]).to_vec();
        let first = whole(&mapped);
        let error = relative(&first, &exact);
        println!("{file}: {error:.2e}, {:.1?}", begin.elapsed());
        assert!(error <= most, "{file}: off by {error:e}, at most {most:e}");
        for &schedule in &schedules()[1..] {
            let begin = Instant::now();
            let other = simulated(CacheType::F32, scheduled(schedule)).unwrap();
            let found = whole(&Metal { tuning: mapped.tuning, maps_weights: true, ..other });
            assert_eq!(bits(&found), bits(&first), "{file}, {schedule:?}");
            println!("{file}, {schedule:?}: the same bits, {:.1?}", begin.elapsed());
        }
        // Cut anywhere, the same to rounding: products of many rows add up in another order. Without those, the same
        // bits.
        let cut = |metal: &Metal, n: usize| -> Vec<f32> {
            let mut session = Session::new(metal, &model, tokens.len());
            tokens.chunks(n).flat_map(|chunk| session.step(&[(0, chunk)]).to_vec()).collect()
        };
        // Pages, window pages, latent caches and recurrent states.
        let is_cut = ["qwen3moe", "gemma3", "deepseekv2", "qwen3next"].iter().any(|arch| file.starts_with(arch));
        if is_cut || wide() {
            let sevens = cut(&metal, 7);
            let error = relative(&sevens, &first);
            assert!(error <= 2e-5, "{file} in chunks of 7: {error:e}");
            assert_eq!(bits(&cut(&metal, 5)), bits(&sevens), "{file} in chunks of 5");
        }
        assert!(std::mem::take(&mut seen.lock().unwrap().n_mapped) > 0, "{file} has no aligned matrix");
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// The smallest model that has every form of dispatch.
const SMALL: Shape =
    Shape { d_model: 32, n_head: 2, n_kv: 1, d_k: 16, d_v: 16, n_expert: 5, n_used: 2, d_ff: 16, ..PLAIN };

/// A prompt and a step of two sequences.
fn short(metal: &Metal, model: &(Plan, Arc<checkpoint::Checkpoint>)) -> Vec<f32> {
    let mut session = Session::new(metal, model, 64);
    let a = tokens(35, 1);
    let mut all = session.step(&[(0, &a[..34])]).to_vec();
    all.extend_from_slice(session.step(&[(1, &a[..2]), (0, &a[34..])]));
    all
}

#[test]
fn no_order_of_threads_or_dispatches_changes_a_bit() {
    let Some(metal) = simulated(CacheType::F16, Options::default()) else { return };
    let metal = Metal { tuning: FINE, ..metal };
    let model = model(SMALL);
    let wanted = bits(&short(&metal, &model));
    for (i, schedule) in Schedule::ALL.into_iter().enumerate() {
        let moment = [Moment::Submit, Moment::Wait][i % 2];
        let options = Options { schedule, moment, seed: 7 + i as u32, threads: 128, ..Options::default() };
        let metal = Metal { tuning: FINE, ..simulated(CacheType::F16, options).unwrap() };
        assert_eq!(bits(&short(&metal, &model)), wanted, "{schedule:?} {moment:?}");
    }
}

#[test]
fn sums_in_other_orders_and_coarse_functions_stay_near() {
    let Some(metal) = simulated(CacheType::F32, Options::default()) else { return };
    let model = model(SMALL);
    let wanted = short(&metal, &model);
    // The last has no threads for tiles.
    for (sum_order, ulp, threads) in [(1, 0, 256), (2, 0, 256), (0, 4, 256), (0, 0, 64)] {
        let options = Options { sum_order, ulp, threads, ..Options::default() };
        let metal = simulated(CacheType::F32, options).unwrap();
        let error = relative(&short(&metal, &model), &wanted);
        // Other numbers, and not far off.
        assert!(0.0 < error && error < 1e-5, "order {sum_order}, {ulp} units in the last place: {error:e}");
    }
}

/// Small matrices take the forms of large ones, short contexts those of long ones.
const FINE: Tuning = Tuning { is_plain: false, many: 8, off: Off::NONE, part: 32 };

/// A GPU with a mistake planted in it, or with none, and what it has seen.
struct Watched {
    sim: Sim,
    seen: Arc<Mutex<Seen>>,
    plant: Plant,
    /// Dispatches and barriers of the lists before.
    before: (usize, usize),
    /// Names of the units of pipes.
    names: Vec<String>,
}

/// What outlives a GPU.
#[derive(Clone, Debug, Default)]
struct Seen {
    stats: Stats,
    sources: Vec<String>,
    /// Names of the units of all dispatches so far, and numbers of barriers before them.
    dispatched: Vec<(String, usize)>,
    /// Buffers of mapped files.
    n_mapped: usize,
}

/// A mistake.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Plant {
    #[default]
    None,
    /// The n-th barrier of a kernel source is gone, or has no memory flag.
    KernelBarrier { unit: usize, n: usize, gone: bool },
    /// The n-th barrier of the list is gone.
    ListBarrier(usize),
    /// The grid of the n-th dispatch lacks its last threadgroups along its longest axis.
    Fewer(usize),
    /// The first two spans of the n-th dispatch change places.
    Swap(usize),
    /// The parameters of the n-th dispatch lack their last word.
    ShortParams(usize),
    /// The n-th dispatch is missing.
    Missing(usize),
    /// The n-th dispatch runs twice.
    Twice(usize),
}

/// Where the n-th barrier of a source is.
fn nth_barrier(source: &str, n: usize) -> Option<(usize, usize)> {
    let begin = source.match_indices("_barrier(mem_flags::").nth(n)?.0;
    let begin = source[..begin].rfind(|c: char| !c.is_alphanumeric()).unwrap() + 1;
    Some((begin, begin + source[begin..].find(';')?))
}

impl Plant {
    /// Whether there was something to change.
    fn in_units(self, units: &mut [Unit]) -> bool {
        let Plant::KernelBarrier { unit, n, gone } = self else { return true };
        let source = &mut units[unit].source;
        let Some((begin, end)) = nth_barrier(source, n) else { return false };
        let call = source[begin..end].to_string();
        let weak = call.replace("mem_threadgroup", "mem_none");
        source.replace_range(begin..end, if gone { "" } else { &weak });
        true
    }

    /// Changes a list, if it is the one; `before` counts dispatches and barriers of those before it.
    fn in_list(self, list: &mut List, before: (usize, usize)) {
        let (dispatches, barriers) = list.counts();
        let is_in = |n: usize, before: usize, here: usize| (before..before + here).contains(&n);
        let plant = match self {
            Plant::ListBarrier(n) if is_in(n, before.1, barriers) => Plant::ListBarrier(n - before.1),
            Plant::Fewer(n) if is_in(n, before.0, dispatches) => Plant::Fewer(n - before.0),
            Plant::Swap(n) if is_in(n, before.0, dispatches) => Plant::Swap(n - before.0),
            Plant::ShortParams(n) if is_in(n, before.0, dispatches) => Plant::ShortParams(n - before.0),
            Plant::Missing(n) if is_in(n, before.0, dispatches) => Plant::Missing(n - before.0),
            Plant::Twice(n) if is_in(n, before.0, dispatches) => Plant::Twice(n - before.0),
            _ => return,
        };
        let nth = |is_meant: fn(&Cmd) -> bool, n: usize| {
            let found = list.cmds.iter().enumerate().filter(|(_, cmd)| is_meant(cmd)).nth(n);
            found.map(|(at, _)| at).unwrap()
        };
        let dispatch = |n| {
            let end = nth(|cmd| matches!(cmd, Cmd::Groups { .. }), n);
            (nth(|cmd| matches!(cmd, Cmd::Pipe(_)), n), end)
        };
        match plant {
            Plant::None | Plant::KernelBarrier { .. } => {}
            Plant::ListBarrier(n) => drop(list.cmds.remove(nth(|cmd| *cmd == Cmd::Barrier, n))),
            Plant::Fewer(n) => {
                let end = dispatch(n).1;
                if let Cmd::Groups { grid, threads } = &mut list.cmds[end] {
                    // Of the slots of experts' tiles some may be left over.
                    let n = if *threads == 128 && grid[1] > 4 { 3 } else { 1 };
                    let longest = grid.iter_mut().max_by_key(|n| **n).unwrap();
                    *longest -= n;
                }
            }
            Plant::Swap(n) => {
                let (begin, end) = dispatch(n);
                let binds: Vec<usize> = (begin..end).filter(|&i| matches!(list.cmds[i], Cmd::Bind { .. })).collect();
                let (Some(&a), Some(&b)) = (binds.first(), binds.get(1)) else {
                    // One span alone: its slot moves.
                    if let Cmd::Bind { slot, .. } = &mut list.cmds[binds[0]] {
                        *slot += 1;
                    }
                    return;
                };
                let [Cmd::Bind { span: x, used: u, .. }, Cmd::Bind { span: y, used: v, .. }] =
                    list.cmds.get_disjoint_mut([a, b]).unwrap()
                else {
                    unreachable!()
                };
                std::mem::swap(x, y);
                std::mem::swap(u, v);
            }
            Plant::ShortParams(n) => {
                let (begin, end) = dispatch(n);
                for cmd in &mut list.cmds[begin..end] {
                    if let Cmd::Bytes { len, .. } = cmd {
                        *len -= 4;
                    }
                }
            }
            Plant::Missing(n) => {
                let (begin, end) = dispatch(n);
                list.cmds.drain(begin..=end);
            }
            Plant::Twice(n) => {
                let (begin, end) = dispatch(n);
                let again = list.cmds[begin..=end].to_vec();
                list.cmds.splice(begin..begin, again);
            }
        }
    }
}

impl Gpu for Watched {
    hand_on!(sim: caps alloc write read threads wait);
    fn map(&mut self, mapped: &Mapped) -> Result<Option<Buf>, GpuError> {
        let buf = self.sim.map(mapped)?;
        self.seen.lock().unwrap().n_mapped += usize::from(buf.is_some());
        Ok(buf)
    }
    fn build(&mut self, units: &[Unit]) -> Result<Vec<Pipe>, GpuError> {
        let mut units = units.to_vec();
        assert!(self.plant.in_units(&mut units));
        self.seen.lock().unwrap().sources = units.iter().map(|unit| unit.source.clone()).collect();
        self.names.extend(units.iter().map(|unit| unit.name.clone()));
        self.sim.build(&units)
    }
    fn submit(&mut self, list: &List) -> Result<Ticket, GpuError> {
        let mut list = list.clone();
        let (dispatches, barriers) = list.counts();
        let mut n_barriers = self.before.1;
        let pipes = list.cmds.iter().filter_map(|cmd| {
            n_barriers += usize::from(*cmd == Cmd::Barrier);
            match cmd {
                Cmd::Pipe(pipe) => Some((self.names[pipe.0 as usize].clone(), n_barriers)),
                _ => None,
            }
        });
        self.seen.lock().unwrap().dispatched.extend(pipes);
        self.plant.in_list(&mut list, self.before);
        self.before = (self.before.0 + dispatches, self.before.1 + barriers);
        let ticket = self.sim.submit(&list);
        self.seen.lock().unwrap().stats = self.sim.stats();
        ticket
    }
}

/// A simulated GPU with a mistake.
fn planted(plant: Plant, seen: &Arc<Mutex<Seen>>) -> Metal {
    let seen = Arc::clone(seen);
    let open = move || {
        let sim = Sim::new(Options::default()).unwrap();
        Ok(Box::new(Watched { sim, seen: Arc::clone(&seen), plant, before: (0, 0), names: Vec::new() }) as Box<dyn Gpu>)
    };
    Metal { open: Arc::new(open), cache: CacheType::F32, maps_weights: false, tuning: FINE }
}

/// Dispatches and barriers of a step are pinned: more of either cost time on every token. No barrier is needless.
#[test]
fn dispatches_and_barriers_of_a_step() {
    if simulated(CacheType::F32, Options::default()).is_none() {
        return;
    }
    for (name, shape, dispatches, barriers) in
        [("fused", SMALL, 25, 19), ("plain", Shape { fused: false, ..SMALL }, 31, 24)]
    {
        let seen = Arc::new(Mutex::new(Seen::default()));
        Session::new(&planted(Plant::None, &seen), &model(shape), 32).step(&[(0, &tokens(2, 1))]);
        let wanted = Stats { lists: 2, dispatches, barriers, needless_barriers: 0 };
        assert_eq!(seen.lock().unwrap().stats, wanted, "{name}");
    }
}

/// A delta rule before attention.
const SMALL_DELTA: Shape = Shape { delta: Some((3, DeltaHeads { d_k: 12, d_v: 11, ..DELTA })), ..SMALL };

/// What a prompt and a token behind it give with a mistake in them: the error, or the logits of both. The prompt has
/// the forms for many rows, the token those for one.
fn with(
    plant: Plant,
    tuning: Tuning,
    model: &(Plan, Arc<checkpoint::Checkpoint>),
    seen: &Arc<Mutex<Seen>>,
) -> Result<Vec<f32>, String> {
    let mut session =
        Session::compile(&Metal { tuning, ..planted(plant, seen) }, model, 64, 64).map_err(|e| e.to_string())?;
    let (prompt, pages) = (tokens(36, 1), session.pages[0].clone());
    let mut all = Vec::new();
    for range in [0..35, 35..36] {
        session.batch.clear();
        let tables = Tables { pages: &pages, window_pages: &[0, 1], ..Tables::default() };
        session.batch.push(&prompt[range.clone()], range.start, tables, 0..range.len());
        all.extend_from_slice(session.program.step(&session.batch).map_err(|e| e.to_string())?.logits);
    }
    Ok(all)
}

/// Every barrier, grid and binding of a step is needed, and the simulator says so when one is wrong.
#[test]
fn every_planted_mistake_is_found() {
    if simulated(CacheType::F32, Options::default()).is_none() {
        return;
    }
    fn is_tiled_attention(source: &str) -> bool {
        source.contains("kernel void attention_tiles(")
    }
    // A token's attention is by itself here, and in parts below.
    let whole = Tuning { part: 512, ..FINE };
    planted_mistakes(whole, &model(SMALL), |i, _| i < 25, |source| !is_tiled_attention(source));
    // Of the second model, the dispatches that the first does not have.
    planted_mistakes(whole, &model(SMALL_DELTA), |i, _| i < 18, |_| false);
    // Values that are staged in more than one piece.
    planted_mistakes(whole, &model(Shape { d_k: 72, d_v: 72, ..SMALL }), |_, _| false, is_tiled_attention);
}

/// The same of dispatches that do several ops, in models of files: latent attention, experts with one beside them,
/// norms that follow each other, delta rules with what comes before and behind them.
#[test]
fn every_mistake_planted_in_joined_dispatches_is_found() {
    if simulated(CacheType::F32, Options::default()).is_none() {
        return;
    }
    const JOINED: [&str; 7] =
        ["latent_in", "norms", "delta_in", "delta_net", "delta_chunks", "head_linear_t", "attention_merge"];
    let metal = recorder(&Arc::default());
    for file in ["deepseekv3/model-q5_1.gguf", "gemma4/model-q4_1.gguf", "qwen3next/model-q8_0.gguf"] {
        let mut known = Vec::new();
        let is_meant = |_, name: &str| {
            let kernel = name.split(' ').next().unwrap();
            let is_joined =
                JOINED.contains(&kernel) || ["SHARED=1", "SHARED=2", "SPLIT=1"].iter().any(|part| name.contains(part));
            let is_new = is_joined && !known.iter().any(|other| other == name);
            known.extend(is_new.then(|| name.to_string()));
            is_new
        };
        let is_joined = |source: &str| {
            JOINED.iter().any(|kernel| source.contains(&format!("kernel void {kernel}(")))
                || source.contains("#define SPLIT 1")
        };
        planted_mistakes(FINE, &of_file(&metal, file), is_meant, is_joined);
    }
}

/// What a kernel's barriers depend on: all that it is compiled for but for weights and the shapes of products.
fn form(source: &str) -> String {
    let none = ["WEIGHT", "PLANES", "N_PARTS", "BIAS", "ROWS", "COLUMNS", "WIDE_X", "ACT", "HAS_"];
    let defines = source.lines().skip(2).take_while(|line| line.starts_with("#define "));
    let kernel = source.lines().find(|line| line.starts_with("kernel void ")).unwrap();
    let own = defines.filter(|line| none.iter().all(|name| !line["#define ".len()..].starts_with(name)));
    [kernel].into_iter().chain(own).collect::<Vec<_>>().join(" ")
}

/// Plants mistakes in the dispatches of a prompt and of a token that are meant, by their number and the name of their
/// unit; in the barriers before them; and in the barriers of kernels whose sources are meant, of each form once.
fn planted_mistakes(
    tuning: Tuning,
    model: &(Plan, Arc<checkpoint::Checkpoint>),
    mut is_meant: impl FnMut(usize, &str) -> bool,
    is_source: impl Fn(&str) -> bool,
) {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let exact = bits(&with(Plant::None, tuning, model, &seen).unwrap());
    let Seen { sources, dispatched, .. } = seen.lock().unwrap().clone();
    let mut plants = Vec::new();
    let mut before = 0;
    for (n, (name, n_barriers)) in dispatched.iter().enumerate() {
        let is_behind = *n_barriers > before;
        before = *n_barriers;
        if !is_meant(n, name) {
            continue;
        }
        plants.extend([Plant::Fewer(n), Plant::ShortParams(n), Plant::Missing(n)]);
        if n % 3 == 0 {
            plants.extend([Plant::Swap(n), Plant::Twice(n)]);
        }
        plants.extend(is_behind.then(|| Plant::ListBarrier(n_barriers - 1)));
    }
    // The model's router has no groups of experts: the first barrier of `route` is the only one that it reaches.
    let mut forms = Vec::new();
    for (unit, source) in sources.iter().enumerate().filter(|(_, source)| is_source(source)) {
        if forms.contains(&form(source)) {
            continue;
        }
        forms.push(form(source));
        // Barriers of products are in their tiles or transposed forms, and the sum without a norm has none.
        let is_without = ["TILED 0", "TRANSPOSED 0", "NORM 0"].iter().any(|d| source.contains(&format!("#define {d}")));
        // In a delta rule's tiles the first is of the form without a norm, and those of a simdgroup wait for what is
        // not finite: `tests/ops` plants mistakes there.
        let is_elsewhere = |n: usize| {
            let (begin, _) = nth_barrier(source, n).unwrap();
            source.contains("kernel void delta_chunks(") && (n == 0 || source[begin..].starts_with("simdgroup_"))
        };
        let is_reached =
            |n: &usize| !is_without && (!source.contains("kernel void route(") || *n == 0) && !is_elsewhere(*n);
        for n in (0..).take_while(|&n| nth_barrier(source, n).is_some()).filter(is_reached) {
            plants.extend([true, false].map(|gone| Plant::KernelBarrier { unit, n, gone }));
        }
    }
    let next = AtomicUsize::new(0);
    let missed = Mutex::new(Vec::new());
    let work = || {
        while let Some(&plant) = plants.get(next.fetch_add(1, Relaxed)) {
            match with(plant, tuning, model, &Arc::default()) {
                Ok(logits) if bits(&logits) == exact => missed.lock().unwrap().push(plant),
                Ok(_) => println!("{plant:?}: other logits"),
                Err(why) => println!("{plant:?}: {}", why.lines().next().unwrap_or_default()),
            }
        }
    };
    std::thread::scope(|scope| [scope.spawn(work), scope.spawn(work)].map(|thread| thread.join().unwrap()));
    println!("{} mistakes", plants.len());
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "{} of {} not found: {missed:?}", missed.len(), plants.len());
}

/// A GPU that fails at any call gives an error that says so, and nothing runs after it.
#[test]
fn a_gpu_that_fails_is_an_error() {
    if simulated(CacheType::F32, Options::default()).is_none() {
        return;
    }
    let model = model(SMALL);
    // A step is two lists and a wait: how many steps succeed before.
    for (call, after, n_steps) in [
        (Call::Alloc, 0, 0),
        (Call::Alloc, 2, 0),
        (Call::Build, 0, 0),
        (Call::Build, 9, 0),
        (Call::Submit, 0, 0),
        (Call::Submit, 1, 0),
        (Call::Submit, 2, 1),
        (Call::Wait, 0, 0),
        (Call::Wait, 1, 1),
    ] {
        let options = Options { fault: Some(Fault { call, after }), ..Options::default() };
        let metal = simulated(CacheType::F32, options).unwrap();
        let session = Session::compile(&metal, &model, 32, 32);
        let is_while_compiling = matches!(call, Call::Alloc | Call::Build);
        let mut session = match session {
            Err(CompileError::Memory { .. }) if call == Call::Alloc => continue,
            Err(CompileError::Unsupported { .. }) if call == Call::Build => continue,
            Err(other) => panic!("{call:?} {after}: {other}"),
            Ok(_) if is_while_compiling => panic!("{call:?} {after}: it compiles"),
            Ok(session) => session,
        };
        let (prompt, pages) = (tokens(3, 1), session.pages[0].clone());
        session.batch.push(&prompt, 0, Tables { pages: &pages, ..Tables::default() }, 0..3);
        for _ in 0..n_steps {
            session.program.step(&session.batch).unwrap();
        }
        assert!(!session.program.is_lost());
        for _ in 0..2 {
            let failed = session.program.step(&session.batch).expect_err("it failed, and stays so");
            assert!(failed.to_string().contains("as it was told to be"), "{failed}");
            assert!(session.program.is_lost());
        }
    }
}

/// What a GPU cannot do is refused with the two numbers.
#[test]
fn small_gpus_are_refused() {
    let model = model(SMALL);
    for (options, why) in [
        (Options { family: 5, ..Options::default() }, "family 5"),
        (Options { threads: 32, ..Options::default() }, "32 threads"),
    ] {
        let Some(metal) = simulated(CacheType::F32, options) else { return };
        let refused = Session::compile(&metal, &model, 32, 32).map(drop).unwrap_err();
        assert!(refused.to_string().contains(why), "{refused}");
    }
    let metal = simulated(CacheType::F32, Options { max_buffer: 1 << 14, ..Options::default() }).unwrap();
    assert!(matches!(Session::compile(&metal, &model, 32, 32).map(drop), Err(CompileError::Memory { .. })));
}

/// A router that sees NaN ends its own sequence only.
#[test]
fn a_sequence_of_nan_ends_alone() {
    let Some(metal) = simulated(CacheType::F32, Options::default()) else { return };
    let model = model(SMALL);
    let (a, b) = (tokens(4, 1), [1, BAD, 2]);
    let mut exact = Session::new(&Reference, &model, 32);
    let mut found = Session::new(&metal, &model, 32);
    let exact = exact.step_with_faults(&[(0, &a), (1, &b)]);
    let found = found.step_with_faults(&[(0, &a), (1, &b)]);
    assert_eq!((found.faults, found.faults.len()), (exact.faults, 1));
    let n = a.len() * N_VOCAB;
    assert!(relative(&found.logits[..n], &exact.logits[..n]) < 2e-5);
}

/// What a program takes of the GPU's memory is what its footprint says, but for gaps between pieces.
#[test]
fn the_footprint_is_what_compiling_allocates() {
    /// Adds up what is allocated.
    struct Counting(Sim, Arc<AtomicU64>);
    impl Gpu for Counting {
        hand_on!(0: caps map write read submit wait);
        fn alloc(&mut self, bytes: u64, what: &'static str) -> Result<Buf, GpuError> {
            self.1.fetch_add(bytes, Relaxed);
            self.0.alloc(bytes, what)
        }
        fn build(&mut self, units: &[Unit]) -> Result<Vec<Pipe>, GpuError> {
            Ok((0..units.len() as u32).map(Pipe).collect())
        }
        fn threads(&self, _pipe: Pipe) -> u32 {
            1024
        }
    }
    if simulated(CacheType::F32, Options::default()).is_none() {
        return;
    }
    let small = Limits {
        max_tokens: 8,
        max_outputs: 2,
        n_pages: 8,
        max_positions: 256,
        n_window_pages: 6,
        n_states: 2,
        max_draft: 0,
    };
    for shape in SHAPES {
        for limits in [small, Limits { max_tokens: 100, n_pages: 60, max_positions: 1000, ..small }] {
            for cache in [CacheType::F16, CacheType::F32] {
                let allocated = Arc::new(AtomicU64::new(0));
                let count = Arc::clone(&allocated);
                let open = move || {
                    let sim = Sim::new(Options::default()).unwrap();
                    Ok(Box::new(Counting(sim, Arc::clone(&count))) as Box<dyn Gpu>)
                };
                let metal = Metal { open: Arc::new(open), cache, maps_weights: false, tuning: FINE };
                let (plan, checkpoint) = model(shape);
                let plan = ValidPlan::new(plan).unwrap();
                let said = metal.footprint(&plan, limits).allocated() as u64;
                drop(metal.compile(&plan, checkpoint, limits).unwrap());
                let allocated = allocated.load(Relaxed);
                // A gap behind each weight and cache, the least size of a buffer.
                assert!(
                    allocated.abs_diff(said) < 16 << 10,
                    "{allocated} allocated, {said} said: {shape:?} {limits:?}"
                );
            }
        }
    }
}

/// A GPU that runs nothing and keeps what it is told.
struct Recorder {
    caps: Caps,
    told: Arc<Mutex<Told>>,
    n_bufs: u32,
}

/// What a [`Recorder`] was told.
#[derive(Default)]
struct Told {
    /// Sources by the names of their units.
    sources: BTreeMap<String, String>,
    /// Dispatches and barriers of all lists.
    counts: (usize, usize),
}

/// The backend on a recorder.
fn recorder(told: &Arc<Mutex<Told>>) -> Metal {
    let (told, caps) = (Arc::clone(told), Caps { name: "recorder".into(), family: 7, max_buffer: 1 << 40 });
    let open = move || {
        let (caps, told) = (caps.clone(), Arc::clone(&told));
        Ok(Box::new(Recorder { caps, told, n_bufs: 0 }) as Box<dyn Gpu>)
    };
    Metal { open: Arc::new(open), cache: CacheType::F16, maps_weights: false, tuning: FINE }
}

/// The plan of a file of the tree, and the file.
fn of_file(metal: &Metal, file: &str) -> (Plan, Arc<checkpoint::Checkpoint>) {
    let path = data().join(file);
    let open = || checkpoint::open(&path).unwrap_or_else(|e| panic!("{file}: {e}"));
    (metal.lower(model::build(&open()).unwrap()).unwrap().into_plan(), Arc::new(open()))
}

impl Gpu for Recorder {
    fn caps(&self) -> &Caps {
        &self.caps
    }
    fn alloc(&mut self, _bytes: u64, _what: &'static str) -> Result<Buf, GpuError> {
        self.n_bufs += 1;
        Ok(Buf(self.n_bufs - 1))
    }
    fn map(&mut self, _mapped: &Mapped) -> Result<Option<Buf>, GpuError> {
        Ok(None)
    }
    fn write(&mut self, _to: Span, _bytes: &[u8]) -> Result<(), GpuError> {
        Ok(())
    }
    fn read(&mut self, _from: Span, _out: &mut [u8]) -> Result<(), GpuError> {
        Err(GpuError::Lost("nothing is computed".into()))
    }
    fn build(&mut self, units: &[Unit]) -> Result<Vec<Pipe>, GpuError> {
        let sources = &mut self.told.lock().unwrap().sources;
        sources.extend(units.iter().map(|unit| (unit.name.clone(), unit.source.clone())));
        Ok((0..units.len() as u32).map(Pipe).collect())
    }
    fn threads(&self, _pipe: Pipe) -> u32 {
        1024
    }
    fn submit(&mut self, list: &List) -> Result<Ticket, GpuError> {
        let ((dispatches, barriers), told) = (list.counts(), &mut *self.told.lock().unwrap());
        told.counts = (told.counts.0 + dispatches, told.counts.1 + barriers);
        Ok(Ticket(1))
    }
    fn wait(&mut self, _ticket: Ticket, _limit: Duration) -> Result<Times, GpuError> {
        Err(GpuError::Lost("nothing is computed".into()))
    }
}

/// Writes the source of every kernel, for every weight type and every model of the tree, to the folder that
/// `MOEBIUS_METAL_SOURCES` names: what Apple's compiler is to be tried on.
#[test]
fn sources_for_another_compiler() {
    let told = Arc::default();
    let metal = recorder(&told);
    for cache in [CacheType::F16, CacheType::F32] {
        let metal = Metal { cache, ..metal.clone() };
        SHAPES.iter().for_each(|shape| drop(Session::new(&metal, &model(*shape), 64)));
    }
    for t in WeightType::ALL {
        let n = t.block_len().max(64);
        let shape = Shape { d_model: n, d_k: n, d_v: n, d_ff: n, types: [t; 5], ..PLAIN };
        drop(Session::new(&metal, &model(shape), 64));
    }
    for file in FILES {
        drop(Session::new(&metal, &of_file(&metal, file), 64));
    }
    let sources = &told.lock().unwrap().sources;
    assert!(sources.len() > WeightType::ALL.len());
    if let Some(folder) = std::env::var_os("MOEBIUS_METAL_SOURCES") {
        std::fs::create_dir_all(&folder).unwrap();
        for (i, (name, source)) in sources.iter().enumerate() {
            std::fs::write(Path::new(&folder).join(format!("{i:04}.metal")), format!("// {name}\n{source}")).unwrap();
        }
    }
}

/// Dispatches and barriers of a token of each architecture, layer by layer, as `moebius plan` has them without a GPU
/// and as a program sends them. They are pinned: more of either cost time on every token.
#[test]
fn dispatches_of_every_architecture() {
    // Of each layer; of the whole, which has an embedding before them and logits behind. The first layer has a norm of
    // its own before it, and the last one selects rows, twice or three times. Else a layer of attention and experts is
    // 10, with a gate 11, a delta rule and experts 10, latent attention and experts 11, 13 with a latent query.
    type Counts = (usize, usize);
    const WANTED: &[(&str, &[Counts], Counts)] = &[
        ("deepseekv2/model-q8_0.gguf", &[(11, 10), (12, 11), (14, 12)], (39, 34)),
        ("deepseekv3/model-q5_1.gguf", &[(12, 12), (15, 14)], (29, 27)),
        ("gemma3/model-q5_0.gguf", &[(9, 9), (8, 8), (10, 9)], (29, 27)),
        ("gemma4/model-q4_1.gguf", &[(14, 11), (13, 10), (16, 12)], (46, 35)),
        ("glm4moe/model-q4_0.gguf", &[(9, 9), (12, 11)], (23, 21)),
        ("gptoss/model-mxfp4.gguf", &[(11, 11), (12, 11)], (25, 23)),
        ("llama/model-q5_1.gguf", &[(9, 9), (10, 9)], (21, 19)),
        ("mixtral/model-q4_1.gguf", &[(11, 11), (12, 11)], (25, 23)),
        ("qwen2/model-q4_0.gguf", &[(9, 9), (10, 9)], (21, 19)),
        ("qwen3/model-q8_0.gguf", &[(9, 9), (10, 9)], (21, 19)),
        ("qwen35/model-q8_0.gguf", &[(10, 10), (12, 10)], (24, 21)),
        ("qwen3moe/model-q4_0.gguf", &[(11, 11), (12, 11)], (25, 23)),
        ("qwen3next/model-q8_0.gguf", &[(11, 11), (14, 12)], (27, 24)),
    ];
    let told: Arc<Mutex<Told>> = Arc::default();
    let metal = recorder(&told);
    let mut found = Vec::new();
    for file in FILES.iter().filter(|file| !file.starts_with("types")) {
        let (plan, checkpoint) = of_file(&metal, file);
        let n_layers = plan.layers.iter().flatten().max().unwrap() + 1;
        let mut session = Session::new(&metal, &(plan.clone(), Arc::clone(&checkpoint)), 64);
        let limits = session.program.limits();
        told.lock().unwrap().counts = (0, 0);
        let pages = session.pages[0].clone();
        session.batch.push(&[1], 0, Tables { pages: &pages, window_pages: &[0], ..Tables::default() }, 0..1);
        assert!(session.program.step(&session.batch).is_err(), "a recorder computes nothing");
        let sent = told.lock().unwrap().counts;
        let lines = Outline::new(&metal, &plan, &checkpoint, limits).unwrap().step(1, 1, 0);
        let counts = |is_meant: &dyn Fn(&Line) -> bool| {
            let lines = lines.iter().filter(|line| is_meant(line));
            lines.fold((0, 0), |(n, barriers), line| (n + 1, barriers + usize::from(line.is_behind)))
        };
        let whole = counts(&|_| true);
        // The end of the first list stands for a barrier.
        assert_eq!(sent, (whole.0, whole.1 - 1), "{file}");
        let bytes: u64 = lines.iter().map(|line| line.bytes).sum();
        let all = plan.bytes_per_token() as u64;
        assert!(bytes <= all && bytes * 100 > all * 80, "{file}: {bytes} bytes of {all}, vectors left out");
        if file.starts_with("qwen3moe") {
            // Behind more positions than a part has, attention is two dispatches.
            let mut outline = Outline::new(&metal, &plan, &checkpoint, limits).unwrap();
            let counts = |depth| outline.step(1, 1, depth).iter().filter(|line| line.op == "attention").count();
            assert_eq!([30, 31, 32, 60].map(counts), [2, 2, 4, 4], "two layers");
        }
        let layers: Vec<Counts> = (0..n_layers).map(|layer| counts(&|line| line.layer == Some(layer))).collect();
        found.push((*file, layers, whole));
    }
    let wanted: Vec<_> = WANTED.iter().map(|&(file, layers, whole)| (file, layers.to_vec(), whole)).collect();
    assert_eq!(found, wanted, "file; dispatches and barriers of each layer; of the whole");
}

/// The test at the first start passes on the simulator, and names the form that a changed kernel breaks.
#[test]
fn the_self_test_finds_a_broken_form() {
    if simulated(CacheType::F32, Options::default()).is_none() {
        return;
    }
    let (plan, _) = model(Shape { types: [Q4_0, F16, Q6_K, F32, Q8_0], d_model: 256, d_ff: 256, ..SMALL });
    let only = Plan { caches: Vec::new(), states: Vec::new(), ops: Vec::new(), layers: Vec::new(), ..plan };
    let broken = |from, to| rewritten("linear", from, to).self_test(&only);
    assert_eq!(broken("", "").unwrap(), (FINE, Vec::new()));
    let (tuning, wrong) = broken("+ 4 * (i % 8)) = y;", "+ 4 * (i % 8)) = y + y;").unwrap();
    assert!(!wrong.is_empty() && wrong.iter().all(|why| why.contains("in tiles")), "{wrong:?}");
    assert_eq!(tuning, Tuning { is_plain: true, ..FINE });
    let plain = broken("first + i < row.n) sum += v[i]", "first + i + 1 < row.n) sum += v[i]").unwrap_err();
    assert!(plain.to_string().contains("plain"), "{plain}");
}

/// Every other kind of kernel is tried too: a wrong one is named, its plain kernels take its place, and a plan then
/// gives the right answer; where these are wrong as well the GPU is refused.
#[test]
fn the_self_test_finds_broken_kernels_of_every_kind() {
    if simulated(CacheType::F32, Options::default()).is_none() {
        return;
    }
    let shapes = [SMALL, SMALL_DELTA].map(|shape| model(Shape { types: [F32; 5], ..shape }));
    let off = Off::NONE;
    // The model, the kernel and what is changed in it; the kind that is named, and what is turned off.
    let cases = [
        (0, "attention_tiles", "a.scale", "a.scale * 1.5f", "attention: off by", Off { attention: true, ..off }),
        (
            0,
            "heads",
            "row[second] = x * s + y * c;",
            "row[second] = x * s - y * c;",
            "attention: ",
            Off { attention: true, ..off },
        ),
        (
            0,
            "experts_sum",
            "beside[j]) + all[j];",
            "beside[j]) - all[j];",
            "experts: off by",
            Off { experts: true, ..off },
        ),
        (0, "expert_groups", "", "", "", off),
        (0, "norms", "x0[at + i] = v;", "x0[at + i] = v + 1.0f;", "norms: off by", Off { norms: true, ..off }),
        (1, "delta_in", "sigmoid(sum)", "sigmoid(sum) * 1.1f", "delta rules: off by", Off { delta: true, ..off }),
    ];
    for (i, kernel, from, to, why, off) in cases {
        let metal = rewritten(kernel, from, to);
        let (tuning, said) = metal.self_test(&shapes[i].0).unwrap();
        assert_eq!(tuning, Tuning { off, ..FINE }, "{kernel}: {said:?}");
        assert_eq!(said.len(), usize::from(!why.is_empty()), "{kernel}: {said:?}");
        assert!(said.iter().all(|line| line.starts_with(why) && line.ends_with("plain kernels are used instead")));
        let error =
            relative(&short(&Metal { tuning, ..metal }, &shapes[i]), &short(&rewritten("", "", ""), &shapes[i]));
        assert!(error < 1e-5, "{kernel}: off by {error:e} with plain kernels");
    }
    // The plain kernel itself.
    let refused = rewritten("attention", "s *= a.scale;", "s *= 1.5f * a.scale;").self_test(&shapes[0].0).unwrap_err();
    assert!(refused.to_string().contains("attention, with plain kernels: off by"), "{refused}");
    let latent = rewritten("latent_in", "cache + page", "cache + 0 * page")
        .self_test(&of_file(&recorder(&Arc::default()), "deepseekv3/model-q5_1.gguf").0);
    let (tuning, said) = latent.unwrap();
    assert_eq!(tuning, Tuning { off: Off { latent: true, ..off }, ..FINE }, "{said:?}");
}

/// The backend on a simulated GPU of which one kernel is changed.
fn rewritten(kernel: &'static str, from: &'static str, to: &'static str) -> Metal {
    Metal { tuning: FINE, ..backends::rewritten(Options::default(), kernel, from, to) }
}

/// The tables of what kernels cost say what the simulator counts.
#[test]
fn the_tables_of_costs_are_counted() {
    if simulated(CacheType::F32, Options::default()).is_none() {
        return;
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels/metal/README.md");
    let page = std::fs::read_to_string(path).unwrap();
    let found = [metal_sim::costs::table().unwrap(), metal_sim::works::table().unwrap()];
    let is_fresh = metal_sim::costs::marked(&page).eq(&found);
    let found = found.join("\n");
    assert!(is_fresh, "kernels/metal/README.md is stale; `cargo run -p metal-sim -- costs` prints:\n{found}");
}
