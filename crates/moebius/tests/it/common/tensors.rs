//! What tests of conversions ask of files and folders.

use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, Value};

use super::{as_text, stdout};

pub const DATA: &str = "crates/conformance/tests/data";
/// Keys that speak of the file and not of the model, and those that one of the two may leave out.
const NOT_COMPARED: [&str; 6] = [
    "general.file_type",
    "general.quantization_version",
    "general.name",
    "general.size_label",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.add_bos_token",
];

/// The values of a tensor.
pub fn values(model: &Checkpoint, name: &str) -> Vec<f32> {
    let info = model.tensor(name).unwrap_or_else(|| panic!("{}: {name} is missing", model.name()));
    let mut out = vec![0.0; info.shape.iter().product()];
    quant::decode_row(info.dtype, model.planes(info), &mut out);
    out
}

pub fn squeezed(shape: &[usize]) -> Vec<usize> {
    shape.iter().copied().filter(|&n| n != 1).collect()
}

/// Asserts that a file has the tensors of another, value for value; decay rates and divisors, which two libraries
/// compute, nearly so.
pub fn same_tensors(new: &Checkpoint, old: &Checkpoint) {
    // Layers that predict further tokens are left out.
    let n_layer = new.meta().iter().find(|(key, _)| key.ends_with(".block_count")).and_then(|(_, v)| v.to_int());
    let is_ours = |name: &str| {
        let layer = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<i128>().ok());
        layer.is_none_or(|layer| Some(layer) < n_layer)
    };
    let names = |model: &Checkpoint| {
        let mut names: Vec<String> = model.tensors().iter().map(|t| t.name.clone()).filter(|n| is_ours(n)).collect();
        names.sort();
        names
    };
    assert_eq!(names(new), names(old), "{}", old.name());
    for info in old.tensors().iter().filter(|t| is_ours(&t.name)) {
        let ours = new.tensor(&info.name).expect("tensor");
        assert_eq!(squeezed(&ours.shape), squeezed(&info.shape), "{} {}", old.name(), info.name);
        assert_eq!(ours.dtype, info.dtype, "{} {}", old.name(), info.name);
        let (a, b) = (values(new, &info.name), values(old, &info.name));
        let near = info.name.ends_with("ssm_a") || info.name == "rope_freqs.weight";
        let is_same = |(a, b): (&f32, &f32)| a == b || near && (a - b).abs() <= 1e-5 * b.abs();
        let differ = a.iter().zip(&b).position(|pair| !is_same(pair));
        assert_eq!(differ, None, "{} {}", old.name(), info.name);
    }
}

/// Asserts that a file says what another says, where it says it.
pub fn same_keys(new: &Checkpoint, old: &Checkpoint, skipped: &[&str]) {
    let number = |value: &Value| match value {
        Value::F32(v) => Some(f64::from(*v)),
        value => value.to_int().map(|v| v as f64),
    };
    for (key, value) in old.meta().iter().filter(|(key, _)| !NOT_COMPARED.contains(key) && !skipped.contains(key)) {
        // Heads that turn in whole need not say so.
        let is_whole =
            |key: &str| key.strip_suffix("rope.dimension_count").map(|arch| format!("{arch}attention.key_length"));
        let Some(ours) = new.meta().get(key) else {
            let whole = is_whole(key).and_then(|key| new.meta().get(&key).cloned());
            assert_eq!(whole.as_ref(), Some(value), "{}: {key} is missing", old.name());
            continue;
        };
        match (number(ours), number(value)) {
            (Some(a), Some(b)) => assert!((a - b).abs() <= 1e-6 * b.abs(), "{} {key}: {a} {b}", old.name()),
            _ => assert_eq!(ours, value, "{} {key}", old.name()),
        }
    }
}

/// What is there after a command that must leave nothing.
pub fn files(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = std::fs::read_dir(folder).expect("folder").map(|e| e.expect("entry").path()).collect();
    all.sort();
    all
}

/// How far a model's logits are from golden ones, on the reference backend.
pub fn far(model: &Path, golden: &Path) -> f64 {
    let line = ["logits", "-m", as_text(model), "--golden", as_text(golden), "--backend", "reference", "--json"];
    let report: serde_json::Value = serde_json::from_str(&stdout(&line)).expect("JSON");
    report["rms_over_std"].as_f64().expect("rms_over_std")
}
