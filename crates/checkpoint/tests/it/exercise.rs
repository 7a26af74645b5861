//! What the fuzz target `gguf` (`crates/fuzz`) and its quick form under `cargo test` do with an input.

#![allow(clippy::unwrap_used)] // a panic is how both report

use checkpoint::Value;
use checkpoint::gguf::Writer;
use quant::WeightType;

/// Opens the bytes as a model, which may fail; when it does not, reads all that the model holds, writes it, and reads
/// that again, which may not fail.
pub fn exercise(file: Vec<u8>) {
    let model = match checkpoint::from_bytes("fuzz.gguf", file) {
        Ok(model) => model,
        Err(error) => return assert!(error.to_string().contains("fuzz.gguf")),
    };
    if let Err(error) = model.hold_repacked() {
        return assert!(error.to_string().contains("fuzz.gguf"), "{error}");
    }
    let mut copy = Writer::new();
    for (key, value) in model.meta().iter() {
        let _ = (value.to_string(), value.describe(), model.meta().u32s(key), model.meta().f32s(key));
        match (key, value) {
            ("general.alignment", Value::U32(alignment)) => copy.alignment(*alignment),
            _ => copy.meta(key, value.clone()),
        };
    }
    // A file has no type for weights that were joined with their scales.
    let (joined, stored): (Vec<_>, Vec<_>) = model.tensors().iter().partition(|t| model.files()[t.file].is_repacked());
    for tensor in joined {
        assert_eq!(model.planes(tensor).len().total(), tensor.total_bytes());
    }
    for tensor in &stored {
        copy.tensor(&tensor.name, &tensor.shape, tensor.dtype, model.bytes(tensor));
    }
    let mut file = Vec::new();
    copy.write(&mut file).unwrap();
    let again = checkpoint::from_bytes("again", file).unwrap();
    assert_eq!(again.meta().iter().len(), model.meta().iter().len());
    assert_eq!(again.tensors().len(), stored.len());
    for (a, b) in again.tensors().iter().zip(stored) {
        assert_eq!((&a.name, &a.shape, a.dtype), (&b.name, &b.shape, b.dtype));
        assert_eq!(again.bytes(a), model.bytes(b));
    }
}

/// A valid file with every kind of entry.
pub fn valid() -> Vec<u8> {
    let mut writer = Writer::new();
    writer.alignment(8).meta("flag", true).meta("wide", -3i64).meta("text", "four").meta("double", 0.5);
    writer.meta("numbers", vec![1.0f32, -2.0]).meta("flags", vec![true, false]).meta("tokens", vec!["a", "", "ccc"]);
    writer.meta("nested", Value::Nested(vec![vec![1u8].into(), vec!["x"].into()]));
    writer.tensor("a", &[2, 8], WeightType::F32, vec![1; 64]).tensor("b", &[3, 32], WeightType::Q8_0, vec![2; 3 * 34]);
    writer.tensor("c.weight", &[2, 64], WeightType::NVFP4, vec![3; 2 * 36]).tensor(
        "c.scale",
        &[1],
        WeightType::F32,
        2.0f32.to_le_bytes().to_vec(),
    );
    let mut file = Vec::new();
    writer.write(&mut file).unwrap();
    file
}
