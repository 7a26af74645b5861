//! Whole models against golden logits: every backend, every file, one table of tolerances.
//!
//! A model is a folder with `model-TYPE.gguf` files, perhaps `mlx-NAME` and `hf` folders, and `golden.safetensors`: `tokens`
//! [n], `logits` [n, n_vocab] for the bf16 file and the `hf` folder, `logits_TYPE` and `logits_mlx` for the others,
//! `greedy` [16] after the prompt on bf16. The error is the RMS of the difference over the standard deviation of the
//! exact logits. `tests/data/README.md` lists the files in git.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use backend::cpu::{CacheType, Cpu, Isa};
use backend::cuda::Cuda;
use backend::reference::Reference;
use backend::{Backend, Batch, Fault, Limits, PAGE, Program, Tables};
use checkpoint::Checkpoint;
use model::plan::{Plan, RopePairing, ValidPlan, passes};
use model::rope::{self, Scaling, Yarn};
use quant::act::ActKind;
use safetensors::{Dtype, SafeTensors};

/// A backend and the most that its logits may be off.
struct Tolerance {
    backend: &'static dyn Backend,
    /// For bf16 files, whose weights are exact.
    bf16: f64,
    /// For quantised files.
    quantised: Quantised,
    /// How far the logits of a step may be from those of the same tokens cut into other steps; 0 wants the same bits.
    cut: f64,
}

/// The most that logits of a quantised file may be off.
enum Quantised {
    /// This much: for backends that compute in f32.
    AtMost(f64),
    /// As much as llama.cpp is, which quantises activations too; the folder's card has the figure for each file. Where
    /// there is none, [`BYTES`] for types that meet activations of 8 bits and bf16's tolerance for the others.
    LlamaCpp,
}

/// The most that 8-bit activations may cost: llama.cpp is off by 0.011 to 0.038 on files of such types.
const BYTES: f64 = 3e-2;

/// Quantised files whose worst eighth of rows the CPU's figure leaves out: a router of random weights has near ties, and a token
/// that goes to other experts is as far off as any other token. In these files that befalls one to three of 40 or 48 tokens
/// (of llama.cpp's, one in the first file), which are off by up to 0.37; the next row after them is off by 0.01 to 0.06.
const FLIPS: &[(&str, &str)] = &[
    ("gemma4moe", "q4_k_m"),
    ("gemma4moe", "iq4_nl"),
    ("glm4moe", "q4_0"),
    ("deepseekv3", "q5_1"),
    ("gemma4", "q4_1"),
];

/// The reference, the CPU on the best instruction set (the others give the same bits: `cpu_law`), and a GPU where there is
/// one.
fn backends() -> Vec<Tolerance> {
    let cpu: &'static Cpu =
        Box::leak(Box::new(Cpu { isa: Isa::best(), threads: 2, cache: CacheType::F16, ..Cpu::default() }));
    let mut all = vec![
        Tolerance { backend: &Reference, bf16: 1e-5, quantised: Quantised::AtMost(1e-4), cut: 0.0 },
        Tolerance { backend: cpu, bf16: 2e-3, quantised: Quantised::LlamaCpp, cut: 0.0 },
    ];
    match backend::cuda::devices() {
        Ok(found) if found.devices.first().is_some_and(|device| device.unusable.is_none()) => {
            let cubins = Some(std::env::temp_dir().join("moebius-test-cubins"));
            let kernels = std::env::var_os("MOEBIUS_KERNELS").map(Into::into);
            let cuda: &'static Cuda = Box::leak(Box::new(Cuda { device: 0, cache: CacheType::F16, cubins, kernels }));
            // Products of many rows round activations to bf16; kernels for few rows round to 8 bits or not at all, and a near
            // tie may then go to other experts.
            all.push(Tolerance { backend: cuda, bf16: 2e-2, quantised: Quantised::LlamaCpp, cut: BYTES });
        }
        Ok(found) => println!("skipped cuda: {found:?}"),
        Err(why) => println!("skipped cuda: {why}"),
    }
    // One backend by itself: on a machine with a GPU the others have been run elsewhere.
    if let Ok(name) = std::env::var("MOEBIUS_BACKEND") {
        all.retain(|one| one.backend.name() == name);
        assert!(!all.is_empty(), "no backend {name} here");
    }
    all
}

/// Architectures whose fixtures are run.
const MODELS: &[&str] =
    &["deepseekv3", "gemma4moe", "glm4moe", "gptoss", "llama", "qwen3", "qwen3moe", "qwen3next", "qwen35moe"];

/// Arrays of a golden file.
struct Golden(Vec<u8>);

impl Golden {
    fn bytes(&self, name: &str, dtype: Dtype) -> Vec<[u8; 4]> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let view = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(view.dtype(), dtype, "{name}");
        view.data().as_chunks().0.to_vec()
    }

    fn u32s(&self, name: &str) -> Vec<u32> {
        self.bytes(name, Dtype::I32).into_iter().map(u32::from_le_bytes).collect()
    }

    fn f32s(&self, name: &str) -> Vec<f32> {
        self.bytes(name, Dtype::F32).into_iter().map(f32::from_le_bytes).collect()
    }
}

/// A compiled model with room for two sequences, each with its own pages.
struct Session {
    program: Box<dyn Program>,
    pages: [Vec<u32>; 2],
    n_past: [usize; 2],
}

impl Session {
    fn new(backend: &dyn Backend, plan: &Plan, checkpoint: Checkpoint, max_positions: usize) -> Self {
        // Pages in an order that a table read the wrong way round would not survive.
        let n_pages = 2 * max_positions.div_ceil(PAGE) as u32;
        let pages = [0, 1].map(|first| (first..n_pages).step_by(2).rev().collect());
        let n = 2 * max_positions;
        let limits = Limits {
            max_tokens: n,
            max_outputs: n,
            n_pages: n_pages as usize,
            max_positions,
            n_window_pages: n_pages as usize,
            n_states: 2,
        };
        let plan = ValidPlan::new(plan.clone()).unwrap();
        let program = backend.compile(&plan, Arc::new(checkpoint), limits).unwrap();
        Self { program, pages, n_past: [0; 2] }
    }

    /// Appends tokens to the two sequences (none, to leave one out) and returns the logits of all of them, and faults.
    fn step_both(&mut self, tokens: [&[u32]; 2]) -> (Vec<f32>, Vec<Fault>) {
        let mut batch = Batch::default();
        for (i, tokens) in tokens.into_iter().enumerate().filter(|(_, tokens)| !tokens.is_empty()) {
            let pages = &self.pages[i];
            let tables = Tables { pages, window_pages: pages, state: i as u32, ..Tables::default() };
            batch.push(tokens, self.n_past[i], tables, 0..tokens.len());
            self.n_past[i] += tokens.len();
        }
        let out = self.program.step(&batch).unwrap();
        (out.logits.to_vec(), out.faults.to_vec())
    }

    /// Appends tokens to the first sequence and returns the logits of all of them.
    fn step(&mut self, tokens: &[u32]) -> Vec<f32> {
        let (logits, faults) = self.step_both([tokens, &[]]);
        assert_eq!(faults, []);
        logits
    }

    /// The likeliest tokens after those whose logits a step gave.
    fn greedy(&mut self, logits: &[f32], n: usize) -> Vec<u32> {
        let mut greedy = vec![argmax(&logits[logits.len() - self.program.n_vocab()..])];
        while greedy.len() < n {
            greedy.push(argmax(&self.step(&greedy[greedy.len() - 1..])));
        }
        greedy
    }
}

fn argmax(row: &[f32]) -> u32 {
    // Ties to the lower id.
    (0..row.len()).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as u32
}

/// RMS error over the standard deviation of the exact values. NaN never passes a comparison with it.
fn relative_rms(found: &[f32], exact: &[f32]) -> f64 {
    relative_rms_of_rows(found, exact, exact.len(), 0)
}

/// The same without the `n_left_out` rows that are furthest off.
fn relative_rms_of_rows(found: &[f32], exact: &[f32], width: usize, n_left_out: usize) -> f64 {
    assert_eq!(found.len(), exact.len());
    let n = exact.len() as f64;
    let mean = exact.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
    let variance = exact.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
    let rows = found.chunks_exact(width).zip(exact.chunks_exact(width));
    let error =
        |(a, b): (&[f32], &[f32])| a.iter().zip(b).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum::<f64>();
    let mut errors: Vec<f64> = rows.map(error).collect();
    errors.sort_by(f64::total_cmp);
    let kept = &errors[..errors.len() - n_left_out];
    // NaN stands behind all numbers in this order, and counts even where it would be left out.
    let nan = errors.last().filter(|e| e.is_nan());
    let error = nan.copied().unwrap_or(kept.iter().sum::<f64>() / (kept.len() * width) as f64);
    (error / variance).sqrt()
}

/// One of the files of a folder.
struct File {
    path: PathBuf,
    /// What it is called in the test's output: its type, `mlx` or `hf`.
    label: String,
    /// The array of exact logits.
    array: String,
}

impl File {
    /// The files of a folder: `model-TYPE.gguf`, `mlx-NAME/`, `hf/`.
    fn all(folder: &Path) -> Vec<File> {
        let file = |entry: std::io::Result<std::fs::DirEntry>| {
            let path = entry.unwrap().path();
            let name = path.file_name()?.to_str()?;
            let label = match name.strip_prefix("model-").and_then(|name| name.strip_suffix(".gguf")) {
                Some(ty) => ty.to_string(),
                None if name.starts_with("mlx-") => "mlx".into(),
                None if name == "hf" => "hf".into(),
                None => return None,
            };
            let is_exact = matches!(&*label, "bf16" | "hf");
            let array = if is_exact { "logits".into() } else { format!("logits_{label}") };
            Some(File { path, label, array })
        };
        let mut files: Vec<File> = std::fs::read_dir(folder).unwrap().filter_map(file).collect();
        files.sort_by(|a, b| a.path.cmp(&b.path));
        files
    }

    fn open(&self) -> Checkpoint {
        checkpoint::open(&self.path).unwrap()
    }
}

/// What a folder's card says of llama.cpp on a quantised file.
fn llama_cpp_error(folder: &Path, ty: &str) -> Option<f64> {
    let card = std::fs::read(folder.join("card.json")).ok()?;
    let card: serde_json::Value = serde_json::from_slice(&card).unwrap();
    let key = format!("llama.cpp on model-{ty}.gguf itself (quantised activations) vs exact {ty} answer");
    card["agreement"][&key]["rel_rms"].as_f64()
}

/// Whether no matrix of a file meets 8-bit activations.
fn is_wide(checkpoint: &Checkpoint) -> bool {
    checkpoint.tensors().iter().all(|t| matches!(t.dtype.act(), ActKind::F32 | ActKind::Block32))
}

/// Runs every file of a folder on every backend.
fn check(folder: &Path) {
    let golden = Golden(std::fs::read(folder.join("golden.safetensors")).unwrap());
    let tokens = golden.u32s("tokens");
    let name = folder.file_name().unwrap().to_string_lossy();
    let files = File::all(folder);
    assert!(files.iter().any(|file| file.label == "bf16"), "{name} has no bf16 file");
    for Tolerance { backend, bf16, quantised, cut } in backends() {
        for file in &files {
            let File { label, array, .. } = file;
            let tolerance = match (array.as_str(), &quantised) {
                ("logits", _) => bf16,
                (_, Quantised::AtMost(most)) => *most,
                (_, Quantised::LlamaCpp) => {
                    llama_cpp_error(folder, label).unwrap_or(if is_wide(&file.open()) { bf16 } else { BYTES })
                }
            };
            let exact = golden.f32s(array);
            let plan = backend.lower(model::build(&file.open()).unwrap()).unwrap();
            let mut session = Session::new(backend, &plan, file.open(), tokens.len() + 16);
            let logits = session.step(&tokens);
            let may_flip = matches!(quantised, Quantised::LlamaCpp) && FLIPS.contains(&(&*name, label.as_str()));
            let n_left_out = if may_flip { tokens.len() / 8 } else { 0 };
            let error = relative_rms_of_rows(&logits, &exact, plan.n_vocab, n_left_out);
            println!("{name:<10} {label:<8} {:<10} {error:.2e} (at most {tolerance:.2e})", backend.name());
            assert!(error <= tolerance, "{name} {label} {}: {error:e} > {tolerance:e}", backend.name());
            cut_and_crowded(backend, &plan, file.open(), &tokens, &logits, cut);

            if array == "logits" {
                assert_eq!(session.greedy(&logits, 16), golden.u32s("greedy"), "{name} {label} {}", backend.name());
            }
        }
    }
}

/// The same bits (or as near as `cut` says), however the prompt is cut into steps and whatever runs beside it.
fn cut_and_crowded(
    backend: &dyn Backend,
    plan: &Plan,
    checkpoint: Checkpoint,
    tokens: &[u32],
    whole: &[f32],
    cut: f64,
) {
    let mut session = Session::new(backend, plan, checkpoint, tokens.len());
    let mut logits = Vec::new();
    for (i, chunk) in tokens.chunks(7).enumerate() {
        let beside = &tokens[..(3 * i) % 5];
        let beside = if session.n_past[1] + beside.len() > tokens.len() { &[] } else { beside };
        let (both, faults) = session.step_both([chunk, beside]);
        assert_eq!(faults, []);
        logits.extend_from_slice(&both[..chunk.len() * plan.n_vocab]);
    }
    if cut > 0.0 {
        // A row in eight may have gone to other experts.
        let error = relative_rms_of_rows(&logits, whole, plan.n_vocab, tokens.len() / 8);
        println!("  cut and crowded: {error:.2e}");
        assert!(error <= cut, "{} in chunks of 7 is off by {error:e}, more than {cut:e}", backend.name());
        return;
    }
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert!(bits(&logits) == bits(whole), "{} in chunks of 7 gives other bits than whole", backend.name());
}

/// The plan with all passes applied, whatever backend runs it.
fn fused(checkpoint: &Checkpoint) -> Result<ValidPlan, model::Error> {
    model::build(checkpoint)?.rewrite(passes::fuse)
}

fn manifest_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn shared_fixtures() {
    let root = manifest_dir().join("../../../shared/fixtures/models");
    if !root.is_dir() {
        println!("skipped: {} is absent", root.display());
        return;
    }
    MODELS.iter().for_each(|name| check(&root.join(name)));
}

/// gpt-oss's published configuration does not round the ends of YaRN's ramp; GGUF files cannot say so.
#[test]
fn yarn_without_truncation() {
    let folder = manifest_dir().join("../../../shared/fixtures/models/gptoss");
    if !folder.is_dir() {
        println!("skipped: {} is absent", folder.display());
        return;
    }
    let golden = Golden(std::fs::read(folder.join("golden.safetensors")).unwrap());
    let (tokens, exact) = (golden.u32s("tokens"), golden.f32s("logits_rope_untruncated"));
    let open = || checkpoint::open(&folder.join("model-bf16.gguf")).unwrap();
    let mut plan = fused(&open()).unwrap().into_plan();
    let truncated = plan.ropes[0].clone();
    let yarn = Yarn {
        factor: 4.0,
        n_ctx_orig: 1024,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: false,
        ext_factor: 1.0,
        attn_factor: 1.0,
        mscale: 1.0,
        log_multiplier: 0.0,
        attention_factor: None,
    };
    plan.ropes[0] = rope::table(64, 150_000.0, None, Scaling::Yarn(yarn), RopePairing::Half);
    assert_ne!(plan.ropes[0].inv_freq, truncated.inv_freq);
    for Tolerance { backend, bf16, .. } in backends() {
        let logits = Session::new(backend, &plan, open(), tokens.len()).step(&tokens);
        let error = relative_rms(&logits, &exact);
        assert!(error <= bf16, "{}: {error:e} > {bf16:e}", backend.name());
    }
}

/// Tiny models in git, made by `tools/make_tiny_models.py`.
const TINY: &[&str] = &["llama", "qwen3", "qwen3moe", "mixtral"];

/// Tiny models in git with answers to a thousand tokens, made by `tools/make_tiny_models.py`, `tools/make_tiny_latent.py` and
/// `tools/make_tiny_windowed.py`.
const TINY_LONG: &[&str] =
    &["qwen3next", "qwen35", "deepseekv2", "deepseekv3", "glm4moe", "gemma3", "gemma4", "gptoss", "qwen2"];

#[test]
fn tiny_models() {
    TINY.iter().chain(TINY_LONG).for_each(|name| check(&manifest_dir().join("tests/data").join(name)));
}

/// Every hundredth row of a thousand tokens: several segments of attention, windows that lie in later ones, and positions
/// past the context before YaRN.
#[test]
fn a_thousand_tokens() {
    for name in TINY_LONG {
        let folder = manifest_dir().join("tests/data").join(name);
        let golden = Golden(std::fs::read(folder.join("golden.safetensors")).unwrap());
        let (tokens, exact) = (golden.u32s("long_tokens"), golden.f32s("long_logits"));
        for Tolerance { backend, bf16, .. } in backends() {
            let open = || checkpoint::open(&folder.join("model-bf16.gguf")).unwrap();
            let plan = fused(&open()).unwrap();
            let mut session = Session::new(backend, &plan, open(), tokens.len());
            let mut logits = Vec::new();
            for chunk in tokens.chunks(100) {
                let all = session.step(chunk);
                logits.extend_from_slice(&all[all.len() - plan.n_vocab..]);
            }
            let error = relative_rms(&logits, &exact);
            println!("{name:<10} {:<10} {error:.2e} (at most {bf16:.2e})", backend.name());
            assert!(error <= bf16, "{name} {}: {error:e} > {bf16:e}", backend.name());
        }
    }
}

/// Tiny models in git that hold every weight type between them, made by `tools/make_tiny_models.py`. Beside each stands
/// the most that the CPU may be off: bf16's tolerance for floats, llama.cpp's error on the same file where activations
/// have 8 bits, half of it where there are super-blocks; and how many of the greedy answers it gives, which are all until a
/// token goes to other experts. No greedy margin in these files is below 0.1.
#[test]
fn every_weight_type() {
    let folder = manifest_dir().join("tests/data/types");
    let models = [
        ("llama-blocks32", 1.1e-2, 16),
        ("qwen3-float", 2e-3, 16),
        ("qwen3moe-blocks32", 1.8e-2, 16),
        ("qwen3moe-blocks256", 1.9e-2, 5),
    ];
    for (name, cpu, same) in models {
        let golden = Golden(std::fs::read(folder.join(format!("{name}.golden.safetensors"))).unwrap());
        let tokens = golden.u32s("tokens");
        let open = || checkpoint::open(&folder.join(format!("{name}.gguf"))).unwrap();
        let plan = fused(&open()).unwrap();
        for Tolerance { backend, bf16, quantised, cut } in backends() {
            let tolerance = match quantised {
                Quantised::AtMost(_) => bf16,
                // Where products round activations to bf16, that counts beside quantised weights too.
                Quantised::LlamaCpp => bf16.max(cpu),
            };
            let mut session = Session::new(backend, &plan, open(), tokens.len() + 16);
            let logits = session.step(&tokens);
            let error = relative_rms(&logits, &golden.f32s("logits"));
            println!("{name:<19} {:<10} {error:.2e} (at most {tolerance:.2e})", backend.name());
            assert!(error <= tolerance, "{name} {}: {error:e} > {tolerance:e}", backend.name());
            let (greedy, want) = (session.greedy(&logits, 16), golden.u32s("greedy"));
            let same = if matches!(quantised, Quantised::AtMost(_)) { 16 } else { same };
            assert_eq!(greedy[..same], want[..same], "{name} {}", backend.name());
            cut_and_crowded(backend, &plan, open(), &tokens, &logits, cut);
        }
    }
}

/// Fusing changes no bit of what the reference computes.
#[test]
fn fused_plans_compute_the_same() {
    for name in TINY.iter().chain(TINY_LONG) {
        let folder = manifest_dir().join("tests/data").join(name);
        let tokens = Golden(std::fs::read(folder.join("golden.safetensors")).unwrap()).u32s("tokens");
        let open = || checkpoint::open(&folder.join("model-bf16.gguf")).unwrap();
        let (plain, fused) = (model::build(&open()).unwrap(), fused(&open()).unwrap());
        assert!(fused.ops.len() < plain.ops.len(), "{name}");
        let [plain, fused] =
            [plain, fused].map(|plan| Session::new(&Reference, &plan, open(), tokens.len()).step(&tokens));
        assert!(plain.iter().all(|x| x.is_finite()) && plain == fused, "{name}");
    }
}

/// A token whose embedding is NaN loses its own sequence and no other.
#[test]
fn a_nan_at_the_router_is_the_fault_of_its_sequence() {
    const BAD: u32 = 5;
    let path = manifest_dir().join("tests/data/qwen3moe/model-bf16.gguf");
    let clean = checkpoint::open(&path).unwrap();
    let plan = fused(&clean).unwrap();
    let table = clean.tensor("token_embd.weight").unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    let row = 2 * plan.d_model; // bf16
    bytes[table.offset + BAD as usize * row..][..row].fill(0xFF);
    for Tolerance { backend, cut, .. } in backends() {
        let broken = checkpoint::from_bytes("broken", bytes.clone()).unwrap();
        let mut session = Session::new(backend, &plan, broken, 64);
        let (good, bad) = ([1, 2, 3, 4], [6, 7, BAD, 8]);
        let (logits, faults) = session.step_both([&good, &bad]);
        assert_eq!(faults, [Fault { chunk: 1, layer: 0, token: 6 }], "{}", backend.name());
        let alone = Session::new(backend, &plan, checkpoint::open(&path).unwrap(), 64).step(&good);
        if cut > 0.0 {
            assert!(relative_rms(&logits[..alone.len()], &alone) <= cut, "{}", backend.name());
        } else {
            assert_eq!(logits[..alone.len()], alone, "{}", backend.name());
        }
    }
}
