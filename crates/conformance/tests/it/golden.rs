//! Whole models against golden logits: every backend, every file, one table of tolerances.
//!
//! A model is a folder with `model-TYPE.gguf` files, `mlx-NAME` and `hf` folders, and `golden.safetensors`:
//! `tokens` [n], `logits` [n, n_vocab] for the bf16 file and the `hf` folder, `logits_TYPE` and `logits_mlx` for the
//! others, `greedy` [16] after the prompt on bf16. The error is the RMS of the difference over the standard deviation
//! of the exact logits. `tests/data/README.md` lists the files in git.
use std::path::{Path, PathBuf};
use std::sync::Arc;

use backend::reference::{Reference, Rounded};
use backend::{Backend, CacheType, Fault};
use checkpoint::Checkpoint;
use conformance::backends::{self, Logits, Quantized, Row};
use conformance::{Session, fixtures};
use model::plan::{Op, Plan, RopePairing, ValidPlan, passes};
use model::rope::{self, Scaling, Yarn};
use quant::act::ActKind;
use safetensors::{Dtype, SafeTensors};

/// Quantized files whose worst eighth of rows the CPU's figure leaves out: a router of random weights has near ties,
/// and a token that goes to other experts is as far off as any other token. In these files that befalls one to three of
/// 40 or 48 tokens (of llama.cpp's, one in the first file), which are off by up to 0.37; the next row after them is off
/// by 0.01 to 0.06.
const FLIPS: &[(&str, &str)] = &[
    ("gemma4moe", "q4_k_m"),
    ("gemma4moe", "iq4_nl"),
    ("glm4moe", "q4_0"),
    ("deepseekv3", "q5_1"),
    ("gemma4", "q4_1"),
];

/// Files of which CUDA, whose activations of prompts are rounded to bf16, sends some rows to other experts: with them the
/// error is 0.04 to 0.09.
const NEAR_TIES: &[(&str, &str)] =
    &[("llama4", "hf"), ("hunyuan_v1_moe", "hf"), ("mixtral", "q4_1"), ("deepseekv2", "q8_0"), ("deepseekv3", "q5_1")];

/// Models whose scores are so large that keys in half precision cost more than the table has for them: Muse Glimmer
/// normalizes q and k and multiplies by 3.87, Gemma 4 normalizes them and does not scale. In PhiMoE an expert's weight
/// jumps where another comes near. Backends are held to a reference that rounds its cache as they do.
const STEEP: &[&str] = &["muse_glimmer", "gemma4_e2b", "gemma4_unified", "phimoe"];

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

/// A compiled model with room for two sequences.
fn session(backend: &dyn Backend, plan: &Plan, checkpoint: Checkpoint, max_positions: usize) -> Session {
    Session::with(backend, &(plan.clone(), Arc::new(checkpoint)), max_positions, 2 * max_positions)
}

/// The likeliest tokens after those whose logits a step gave.
fn greedy(session: &mut Session, logits: &[f32], n: usize) -> Vec<u32> {
    let mut greedy = vec![argmax(&logits[logits.len() - session.program.n_vocab()..])];
    while greedy.len() < n {
        let last = greedy[greedy.len() - 1];
        greedy.push(argmax(session.step(&[(0, &[last])])));
    }
    greedy
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
    // NaN sorts behind all numbers, and counts even where it would be left out.
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

/// What a folder's card says of llama.cpp on a quantized file.
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
    assert!(files.iter().any(|file| file.array == "logits"), "{name} has neither a bf16 file nor a folder");
    for (Row { name: row, backend, cut, .. }, Logits { bf16, quantized }) in backends::golden() {
        let backend = &*backend;
        for file in &files {
            let File { label, array, .. } = file;
            let tolerance = match (array.as_str(), &quantized) {
                ("logits", _) => bf16,
                (_, Quantized::AtMost(most)) => *most,
                (_, Quantized::LlamaCpp { bytes }) => {
                    llama_cpp_error(folder, label).unwrap_or(if is_wide(&file.open()) { bf16 } else { *bytes })
                }
            };
            let exact = match STEEP.contains(&&*name) && !matches!(quantized, Quantized::AtMost(_)) {
                true => {
                    let half = Rounded(CacheType::F16);
                    let plan = lowered(&half, &file.open());
                    session(&half, &plan, file.open(), tokens.len()).step(&[(0, &tokens)]).to_vec()
                }
                false => golden.f32s(array),
            };
            // Activations rounded to bf16, as GPUs have them, are as far off there in their way.
            let tolerance = if STEEP.contains(&&*name) && cut > 0.0 { 2.0 * tolerance } else { tolerance };
            let plan = backend.lower(model::build(&file.open()).unwrap()).unwrap();
            // Where a prompt's activations are rounded, positions that rank nearly alike may take each other's place.
            let chooses = cut > 0.0 && plan.ops.iter().any(|op| matches!(op, Op::Choose { .. }));
            let mut started = session(backend, &plan, file.open(), tokens.len() + 16);
            let logits = started.step(&[(0, &tokens)]).to_vec();
            // Where bits depend on the cut of a prompt, any file may have near ties; those of CUDA are known.
            let file_name = (&*name, label.as_str());
            let is_listed = match backend.name() {
                "cuda" => NEAR_TIES.contains(&file_name),
                _ => cut > 0.0 || FLIPS.contains(&file_name),
            };
            let may_flip = matches!(quantized, Quantized::LlamaCpp { .. }) && is_listed;
            let n_left_out = if may_flip || chooses { tokens.len() / 8 } else { 0 };
            let error = relative_rms_of_rows(&logits, &exact, plan.n_vocab, n_left_out);
            let all = relative_rms_of_rows(&logits, &exact, plan.n_vocab, 0);
            println!("{name:<10} {label:<8} {row:<22} {error:.2e} (at most {tolerance:.2e}), of all rows {all:.2e}");
            assert!(error <= tolerance, "{name} {label} {row}: {error:e} > {tolerance:e}");
            // Such rows differ by their cut, too.
            let cut = if STEEP.contains(&&*name) { 2.0 * cut } else { cut };
            cut_and_crowded((backend, cut), &plan, file.open(), &tokens, &logits);

            if array == "logits" {
                // Token by token they are not rounded.
                let logits = match chooses {
                    true => {
                        started = session(backend, &plan, file.open(), tokens.len() + 16);
                        tokens.iter().flat_map(|&token| started.step(&[(0, &[token])]).to_vec()).collect()
                    }
                    false => logits,
                };
                assert!(!chooses || relative_rms_of_rows(&logits, &exact, plan.n_vocab, 0) <= 1e-3, "{name} {row}");
                assert_eq!(greedy(&mut started, &logits, 16), golden.u32s("greedy"), "{name} {label} {row}");
            }
        }
    }
}

/// The same logits, however the prompt is cut into steps and whatever runs beside it: to the bit where the table
/// demands it.
fn cut_and_crowded(
    (backend, cut): (&dyn Backend, f64),
    plan: &Plan,
    checkpoint: Checkpoint,
    tokens: &[u32],
    whole: &[f32],
) {
    let mut session = session(backend, plan, checkpoint, tokens.len());
    let mut logits = Vec::new();
    for (i, chunk) in tokens.chunks(7).enumerate() {
        let beside = &tokens[..(3 * i) % 5];
        let beside = if session.n_past[1] + beside.len() > tokens.len() { &[] } else { beside };
        let parts: [(usize, &[u32]); 2] = [(0, chunk), (1, beside)];
        let both = session.step(if beside.is_empty() { &parts[..1] } else { &parts });
        logits.extend_from_slice(&both[..chunk.len() * plan.n_vocab]);
    }
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    // Where bits may differ, one row in eight may have gone to other experts.
    let error = || relative_rms_of_rows(&logits, whole, plan.n_vocab, tokens.len() / 8);
    let (off, near) = if cut == 0.0 { (0.0, bits(&logits) == bits(whole)) } else { (error(), error() <= cut) };
    assert!(near, "{} in chunks of 7 gives other logits than whole: {off:.2e}", backend.name());
}

/// The plan as a backend runs it.
fn lowered(backend: &dyn Backend, checkpoint: &Checkpoint) -> ValidPlan {
    backend.lower(model::build(checkpoint).unwrap()).unwrap()
}

/// The plan with all passes applied, whatever backend runs it.
fn fused(checkpoint: &Checkpoint) -> Result<ValidPlan, model::Error> {
    model::build(checkpoint)?.rewrite(passes::fuse)
}

fn manifest_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap().to_string_lossy().into_owned()
}

/// Families as they are published, in git: folders alone, made by `tools/tiny/published.py`. `MOEBIUS_FAMILIES` names
/// those to check: on a GPU the kernels of all take long to compile, and processes can share them.
#[test]
fn published_families() {
    let root = manifest_dir().join("tests/data/published");
    let mut folders: Vec<PathBuf> = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert!(folders.len() >= 20, "{} families", folders.len());
    if let Ok(names) = std::env::var("MOEBIUS_FAMILIES") {
        let known: Vec<String> = folders.iter().map(|folder| file_name(folder)).collect();
        names.split_whitespace().for_each(|name| assert!(known.iter().any(|n| n == name), "there is no family {name}"));
        folders.retain(|folder| names.split_whitespace().any(|name| name == file_name(folder)));
    }
    folders.iter().for_each(|folder| check(folder));
}

/// Larger models of these families.
#[test]
fn shared_families() {
    let Some(root) = fixtures::more("../shared/fixtures/models2") else { return };
    let published = manifest_dir().join("tests/data/published");
    let names = std::fs::read_dir(published).unwrap().map(|entry| file_name(&entry.unwrap().path()));
    let more = ["deepseek_v32_dense", "glm_moe_dsa", "glm_moe_dsa_dense"].map(String::from);
    let folders = names.chain(more).map(|name| root.join(name));
    let there: Vec<PathBuf> = folders.filter(|folder| folder.exists()).collect();
    assert!(there.len() >= 35, "{} families", there.len());
    there.iter().for_each(|folder| check(folder));
}

/// Larger models than those in the tree ([`tiny_models`]), of the same architectures and types.
#[test]
fn shared_fixtures() {
    let Some(root) = fixtures::more("../shared/fixtures/models") else { return };
    MODELS.iter().for_each(|name| check(&root.join(name)));
}

/// gpt-oss's published configuration does not round the ends of YaRN's ramp; GGUF files cannot say so. (The
/// tables themselves are tested in `model::rope`.)
#[test]
fn yarn_without_truncation() {
    let Some(folder) = fixtures::more("../shared/fixtures/models/gptoss") else { return };
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
    for (Row { name, backend, .. }, Logits { bf16, .. }) in backends::golden() {
        let logits = session(&*backend, &plan, open(), tokens.len()).step(&[(0, &tokens)]).to_vec();
        let error = relative_rms(&logits, &exact);
        assert!(error <= bf16, "{name}: {error:e} > {bf16:e}");
    }
}

/// Tiny models in git, made by `tools/tiny`.
const TINY: &[&str] = &["llama", "qwen3", "qwen3moe", "mixtral"];

/// Tiny models in git with answers to a thousand tokens.
const TINY_LONG: &[&str] =
    &["qwen3next", "qwen35", "deepseekv2", "deepseekv3", "glm4moe", "gemma3", "gemma4", "gptoss", "qwen2"];

/// Tiny models in git with a layer that drafts.
pub const TINY_DRAFTING: &[&str] = &["qwen35_mtp", "deepseekv3_mtp"];

#[test]
fn tiny_models() {
    TINY.iter().chain(TINY_LONG).for_each(|name| check(&manifest_dir().join("tests/data").join(name)));
}

/// Every hundredth row of a thousand tokens: several segments of attention, windows that lie in later ones, and
/// positions past the context before YaRN.
#[test]
fn a_thousand_tokens() {
    for name in TINY_LONG {
        let folder = manifest_dir().join("tests/data").join(name);
        let golden = Golden(std::fs::read(folder.join("golden.safetensors")).unwrap());
        let (tokens, exact) = (golden.u32s("long_tokens"), golden.f32s("long_logits"));
        for (Row { name: row, backend, .. }, Logits { bf16, .. }) in backends::golden() {
            // The bf16 file, or the folder where there is none.
            let file = File::all(&folder).into_iter().rfind(|file| file.array == "logits").unwrap();
            let plan = lowered(&*backend, &file.open());
            let mut session = session(&*backend, &plan, file.open(), tokens.len());
            let mut logits = Vec::new();
            for chunk in tokens.chunks(100) {
                let all = session.step(&[(0, chunk)]);
                logits.extend_from_slice(&all[all.len() - plan.n_vocab..]);
            }
            let error = relative_rms(&logits, &exact);
            println!("{name:<10} {row:<22} {error:.2e} (at most {bf16:.2e})");
            assert!(error <= bf16, "{name} {row}: {error:e} > {bf16:e}");
        }
    }
}

/// Tiny models in git that hold every weight type between them, made by `tools/tiny`. Next to each is
/// the most that a backend with quantized activations may be off: bf16's tolerance for floats, llama.cpp's error on the
/// same file where activations have 8 bits, half of it where there are super-blocks; and how many of the greedy answers
/// it gives, which are all until a token goes to other experts. No greedy margin in these files is below 0.1.
#[test]
fn every_weight_type() {
    let folder = manifest_dir().join("tests/data/types");
    let models = [
        ("llama-blocks32", 1.1e-2, 16),
        ("qwen3-float", 2e-3, 16),
        ("qwen3moe-blocks32", 1.8e-2, 16),
        ("qwen3moe-blocks256", 1.9e-2, 5),
    ];
    for (name, quantizes, same) in models {
        let golden = Golden(std::fs::read(folder.join(format!("{name}.golden.safetensors"))).unwrap());
        let tokens = golden.u32s("tokens");
        let open = || checkpoint::open(&folder.join(format!("{name}.gguf"))).unwrap();
        for (Row { name: row, backend, cut, .. }, Logits { bf16, quantized }) in backends::golden() {
            let plan = lowered(&*backend, &open());
            let tolerance = match quantized {
                Quantized::AtMost(_) => bf16,
                // What bf16 costs counts next to quantized weights too.
                Quantized::LlamaCpp { .. } => bf16.max(quantizes),
            };
            let mut session = session(&*backend, &plan, open(), tokens.len() + 16);
            let logits = session.step(&[(0, &tokens)]).to_vec();
            let error = relative_rms(&logits, &golden.f32s("logits"));
            println!("{name:<19} {row:<22} {error:.2e} (at most {tolerance:.2e})");
            assert!(error <= tolerance, "{name} {row}: {error:e} > {tolerance:e}");
            let (greedy, want) = (greedy(&mut session, &logits, 16), golden.u32s("greedy"));
            let same = if matches!(quantized, Quantized::AtMost(_)) { 16 } else { same };
            assert_eq!(greedy[..same], want[..same], "{name} {row}");
            cut_and_crowded((&*backend, cut), &plan, open(), &tokens, &logits);
        }
    }
}

/// Mixtures of experts in FP8 (a folder) and NVFP4 (a GGUF file with scales of experts), made by
/// `tools/tiny/floats.py`: as near as bf16 files, since their numbers meet plain activations.
#[test]
fn published_floats_of_eight_and_four_bits() {
    let folder = manifest_dir().join("tests/data/floats");
    let files =
        [("qwen3moe-fp8", "qwen3moe-fp8", "f8_e4m3"), ("qwen3moe-nvfp4.gguf", "qwen3moe-nvfp4", "nvfp4_scaled")];
    for (file, name, dtype) in files {
        let golden = Golden(std::fs::read(folder.join(format!("{name}.golden.safetensors"))).unwrap());
        let tokens = golden.u32s("tokens");
        let open = || checkpoint::open(&folder.join(file)).unwrap();
        let n_coded = open().tensors().iter().filter(|tensor| tensor.dtype.name() == dtype).count();
        assert!(n_coded >= 7, "{name}: {n_coded} matrices in {dtype}");
        for (Row { name: row, backend, cut, .. }, Logits { bf16, .. }) in backends::golden() {
            let plan = lowered(&*backend, &open());
            let mut session = session(&*backend, &plan, open(), tokens.len() + 16);
            let logits = session.step(&[(0, &tokens)]).to_vec();
            let error = relative_rms(&logits, &golden.f32s("logits"));
            println!("{name:<19} {row:<22} {error:.2e} (at most {bf16:.2e})");
            assert!(error <= bf16, "{name} {row}: {error:e} > {bf16:e}");
            assert_eq!(greedy(&mut session, &logits, 16), golden.u32s("greedy"), "{name} {row}");
            cut_and_crowded((&*backend, cut), &plan, open(), &tokens, &logits);
        }
    }
}

/// Models with a layer that drafts, in git and larger ones.
fn drafting_models() -> Vec<PathBuf> {
    let tiny = TINY_DRAFTING.iter().map(|name| manifest_dir().join("tests/data").join(name));
    let more = fixtures::more("../shared/fixtures/models2").into_iter();
    let names = ["qwen35moe_mtp", "qwen35_mtp", "deepseekv3_mtp", "glm4moe_mtp"];
    tiny.chain(more.flat_map(|root| names.map(|name| root.join(name)))).collect()
}

/// What the draft head says of the token after the next, and of the one after that where it drafted the one between;
/// the model next to it computes what it does without, to the bit where the table demands it.
#[test]
fn heads_that_draft() {
    for folder in drafting_models() {
        let golden = Golden(std::fs::read(folder.join("golden.safetensors")).unwrap());
        let tokens = golden.u32s("tokens");
        let name = folder.file_name().unwrap().to_string_lossy();
        for file in File::all(&folder).iter().filter(|file| file.array == "logits") {
            for (Row { name: row, backend, cut, .. }, Logits { bf16, .. }) in backends::golden() {
                let plan = backend.lower(model::build_drafting(&file.open()).unwrap()).unwrap();
                assert!(plan.draft.is_some(), "{name}");
                let mut drafting = session(&*backend, &plan, file.open(), tokens.len() + 2);
                for (n, array) in [(1, "mtp_logits"), (2, "mtp_logits_2")] {
                    let logits = drafting.drafts(&tokens, n, 5);
                    let error = relative_rms(&logits, &golden.f32s(array));
                    println!("{name:<15} {:<5} {array:<13} {row:<22} {error:.2e} (at most {bf16:.2e})", file.label);
                    assert!(error <= bf16, "{name} {row} {array}: {error:e} > {bf16:e}");
                    drafting.n_past[0] = 0;
                }
                let one = drafting.drafts(&tokens, 1, usize::MAX);
                drafting.n_past[0] = 0;
                let same = if cut == 0.0 { one == drafting.drafts(&tokens, 1, 1) } else { true };
                assert!(same, "{name} {row}: rows one by one and all at once differ");
                let plain = lowered(&*backend, &file.open());
                let plain = session(&*backend, &plain, file.open(), tokens.len()).step(&[(0, &tokens)]).to_vec();
                let with = session(&*backend, &plan, file.open(), tokens.len()).step(&[(0, &tokens)]).to_vec();
                let error = relative_rms(&with, &plain);
                assert!(if cut == 0.0 { with == plain } else { error <= cut }, "{name} {row}: {error:e}");
            }
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
            [plain, fused].map(|plan| session(&Reference, &plan, open(), tokens.len()).step(&[(0, &tokens)]).to_vec());
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
    for (Row { name, backend, cut, .. }, _) in backends::golden() {
        let broken = checkpoint::from_bytes("broken", bytes.clone()).unwrap();
        let mut company = session(&*backend, &plan, broken, 64);
        let (good, bad) = ([1, 2, 3, 4], [6, 7, BAD, 8]);
        let out = company.step_with_faults(&[(0, &good), (1, &bad)]);
        assert_eq!(out.faults, [Fault { chunk: 1, layer: 0, token: 6 }], "{name}");
        let mut alone = session(&*backend, &plan, checkpoint::open(&path).unwrap(), 64);
        let alone = alone.step(&[(0, &good)]);
        let beside = &out.logits[..alone.len()];
        assert!(if cut == 0.0 { beside == alone } else { relative_rms(beside, alone) <= cut }, "{name}");
    }
}
