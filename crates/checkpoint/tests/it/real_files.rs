//! Files that other programs wrote: the embedded model, and the golden fixtures where they are present.

use std::fs;
use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, Kind, Value, ValueKind};
use quant::WeightType;

use crate::fixtures;

fn at(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Each tensor must have the bytes its shape needs, and be found by its name. Those of repacked weights are computed.
fn check_tensors(model: &Checkpoint) {
    model.hold_repacked().unwrap();
    for tensor in model.tensors() {
        let (row, outer) = tensor.shape.split_last().unwrap();
        let wanted = tensor.dtype.plane_bytes(*row).unwrap().times(outer.iter().product()).unwrap();
        let found = (tensor.total_bytes(), model.planes(tensor).len());
        assert_eq!(found, (wanted.total(), wanted), "{}", tensor.name);
        assert_eq!(model.tensor(&tensor.name), Some(tensor));
    }
}

#[test]
fn embedded_model() {
    let model = checkpoint::open(&at("../../models/fable-29m-a10m-q4_k_m.gguf")).unwrap();
    let meta = model.meta();
    assert_eq!(meta.str("general.architecture").unwrap(), "qwen3moe");
    assert_eq!(meta.u32("qwen3moe.embedding_length").unwrap(), 256);
    assert!(!meta.bool("tokenizer.ggml.add_bos_token").unwrap());
    assert!(meta.f32("qwen3moe.rope.freq_base").unwrap() >= 10_000.0);

    let tokens = meta.strings("tokenizer.ggml.tokens").unwrap();
    assert_eq!((tokens.len(), tokens.iter().len()), (8192, 8192));
    assert_eq!(meta.i32s("tokenizer.ggml.token_type").unwrap().len(), 8192);
    assert_eq!(meta.strings("tokenizer.ggml.merges").unwrap().len(), 7933);
    assert!(tokens.iter().all(|token| !token.is_empty()));

    assert_eq!(model.tensors().len(), 98);
    for (name, shape, dtype) in [
        ("output_norm.weight", vec![256], WeightType::F32),
        ("token_embd.weight", vec![8192, 256], WeightType::Q6_K),
        ("blk.0.attn_k.weight", vec![128, 256], WeightType::Q4_K),
    ] {
        let tensor = model.tensor(name).unwrap();
        assert_eq!((&tensor.shape, tensor.dtype), (&shape, dtype), "{name}");
    }
    check_tensors(&model);
    assert!(model.data_bytes() < model.files()[0].size());
}

/// Folders of models that other programs wrote: the tiny ones in the tree, and larger ones where they are present.
fn models() -> Vec<PathBuf> {
    let more = fixtures::more("../shared/fixtures/models");
    let roots = [fixtures::root("crates/conformance/tests/data")].into_iter().chain(more);
    let folders = roots.flat_map(|root| fs::read_dir(root).unwrap()).map(|entry| entry.unwrap().path());
    folders.filter(|path| path.is_dir()).collect()
}

#[test]
fn golden_fixtures() {
    let mut n_file = 0;
    for folder in models() {
        for file in fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "gguf") {
                continue;
            }
            n_file += 1;
            let model = checkpoint::open(&path).unwrap();
            assert!(!model.tensors().is_empty(), "{}", path.display());
            check_tensors(&model);
            let arch = model.meta().str("general.architecture").unwrap();
            let d_model = model.meta().u32(&format!("{arch}.embedding_length")).unwrap() as usize;
            assert_eq!(model.tensor("token_embd.weight").unwrap().shape[1], d_model);
            let tokens = model.meta().get("tokenizer.ggml.tokens").map(Value::kind);
            // Tiny models of random weights have none.
            assert!(tokens.is_none_or(|kind| kind == ValueKind::Array), "{}", path.display());
        }
    }
    assert!(n_file > 20, "{n_file} files");
}

/// MLX folders: every tensor can be read, and the embedding equals the GGUF file's up to rounding.
#[test]
fn mlx_fixtures() {
    let mut n_folder = 0;
    for folder in models() {
        let names = ["mlx-8bit", "mlx-mixed48"].map(|name| folder.join(name));
        let Some(mlx) = names.iter().find(|path| path.exists()) else { continue };
        n_folder += 1;
        let model = checkpoint::open(mlx).unwrap();
        assert_eq!((model.kind(), model.unreadable()), (Kind::Mlx, &[][..]));
        let table = model.tensors().iter().find(|t| t.name.ends_with("embed_tokens.weight")).unwrap();
        let d_model = model.meta().u32("hidden_size").unwrap() as usize;
        assert_eq!(table.shape, [model.meta().u32("vocab_size").unwrap() as usize, d_model], "{}", folder.display());
        assert_eq!(model.side_file("tokenizer.json").unwrap().is_some(), mlx.join("tokenizer.json").exists());

        let gguf = checkpoint::open(&folder.join("model-bf16.gguf")).unwrap();
        let exact = gguf.tensor("token_embd.weight").unwrap();
        let (mut a, mut b) = (vec![0.0; d_model], vec![0.0; d_model]);
        let (mut error, mut size) = (0.0, 0.0);
        for i in 0..table.shape[0] {
            let row = |dtype: WeightType| dtype.plane_bytes(d_model).unwrap();
            quant::decode_row(table.dtype, model.planes(table).row(row(table.dtype), i), &mut a);
            quant::decode_row(exact.dtype, gguf.planes(exact).row(row(exact.dtype), i), &mut b);
            error += a.iter().zip(&b).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
            size += b.iter().map(|b| b * b).sum::<f32>();
        }
        assert!((error / size).sqrt() < 0.01, "{}: {}", folder.display(), (error / size).sqrt());
    }
    assert!(n_folder > 0);
}
