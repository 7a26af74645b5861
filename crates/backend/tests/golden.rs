//! Whole models against golden logits: every backend, every file, one table of tolerances.
//!
//! A model is a folder with `model-TYPE.gguf` files and `golden.safetensors`: `tokens` [n], `logits` [n, n_vocab] for
//! the bf16 file, `logits_TYPE` for the others, `greedy` [16] after the prompt on bf16. The error is the RMS of the
//! difference over the standard deviation of the exact logits.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use backend::reference::Reference;
use backend::{Backend, Batch, Limits, PAGE, Program};
use checkpoint::Checkpoint;
use safetensors::{Dtype, SafeTensors};

/// A backend and the most that its logits may be off.
struct Tolerance {
    backend: &'static dyn Backend,
    /// For bf16 files, whose weights are exact.
    bf16: f64,
    /// For quantised files.
    quantised: f64,
}

const BACKENDS: &[Tolerance] = &[Tolerance { backend: &Reference, bf16: 1e-5, quantised: 1e-4 }];

/// Architectures whose fixtures are run.
const MODELS: &[&str] = &["llama", "qwen3", "qwen3moe"];

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

/// A model compiled for one sequence.
struct Session {
    program: Box<dyn Program>,
    pages: Vec<u32>,
    n_past: usize,
}

impl Session {
    fn new(backend: &dyn Backend, checkpoint: Checkpoint, max_positions: usize) -> Self {
        let plan = model::build(&checkpoint).unwrap();
        // Pages in an order that a table read the wrong way round would not survive.
        let n_pages = max_positions.div_ceil(PAGE);
        let pages = (0..n_pages as u32).rev().collect();
        let limits = Limits { max_tokens: max_positions, max_outputs: max_positions, n_pages, max_positions };
        let program = backend.compile(&plan, Arc::new(checkpoint), limits).unwrap();
        Self { program, pages, n_past: 0 }
    }

    /// Appends tokens and returns the logits of all of them.
    fn step(&mut self, tokens: &[u32]) -> Vec<f32> {
        let mut batch = Batch::default();
        batch.push(tokens, self.n_past, &self.pages, 0..tokens.len());
        self.n_past += tokens.len();
        let out = self.program.step(&batch).unwrap();
        assert_eq!(out.faults, []);
        out.logits.to_vec()
    }
}

fn argmax(row: &[f32]) -> u32 {
    // Ties to the lower id.
    (0..row.len()).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as u32
}

/// RMS error over the standard deviation of the exact values. NaN never passes a comparison with it.
fn relative_rms(found: &[f32], exact: &[f32]) -> f64 {
    assert_eq!(found.len(), exact.len());
    let n = exact.len() as f64;
    let mean = exact.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
    let variance = exact.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
    let error = found.iter().zip(exact).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum::<f64>() / n;
    (error / variance).sqrt()
}

/// Types of the `model-TYPE.gguf` files of a folder.
fn types(folder: &Path) -> Vec<String> {
    let mut types: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .filter_map(|entry| {
            let name = entry.unwrap().file_name().into_string().unwrap();
            Some(name.strip_prefix("model-")?.strip_suffix(".gguf")?.to_string())
        })
        .collect();
    types.sort();
    types
}

/// Runs every file of a folder on every backend.
fn check(folder: &Path) {
    let golden = Golden(std::fs::read(folder.join("golden.safetensors")).unwrap());
    let tokens = golden.u32s("tokens");
    let name = folder.file_name().unwrap().to_string_lossy();
    let types = types(folder);
    assert!(types.contains(&"bf16".to_string()), "{name}: {types:?}");
    for Tolerance { backend, bf16, quantised } in BACKENDS {
        for ty in &types {
            let (array, tolerance) = match ty.as_str() {
                "bf16" => ("logits".to_string(), bf16),
                _ => (format!("logits_{ty}"), quantised),
            };
            let exact = golden.f32s(&array);
            let open = || checkpoint::open(&folder.join(format!("model-{ty}.gguf"))).unwrap();
            let mut session = Session::new(*backend, open(), tokens.len() + 16);
            let logits = session.step(&tokens);
            let error = relative_rms(&logits, &exact);
            println!("{name:<10} {ty:<8} {:<10} {error:.2e} (at most {tolerance:.0e})", backend.name());
            assert!(error <= *tolerance, "{name} {ty} {}: {error:e} > {tolerance:e}", backend.name());

            if ty == "bf16" {
                let n_vocab = session.program.n_vocab();
                let mut next = argmax(&logits[logits.len() - n_vocab..]);
                let mut greedy = vec![next];
                while greedy.len() < 16 {
                    next = argmax(&session.step(&[next]));
                    greedy.push(next);
                }
                assert_eq!(greedy, golden.u32s("greedy"), "{name} {}", backend.name());
            }
        }
    }
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
