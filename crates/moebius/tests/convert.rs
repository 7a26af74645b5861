//! `convert` end to end: folders of every architecture beside the GGUF files that were made of the same weights.

mod common;
#[path = "../../../tests/fixtures.rs"]
mod fixtures;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, Value};
use common::{as_text, error, stdout};
use quant::{Planes, WeightType};
use safetensors::tensor::{Dtype, TensorView};

const DATA: &str = "crates/backend/tests/data";
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
fn values(model: &Checkpoint, name: &str) -> Vec<f32> {
    let info = model.tensor(name).unwrap_or_else(|| panic!("{}: {name} is missing", model.name()));
    let mut out = vec![0.0; info.shape.iter().product()];
    quant::decode_row(info.dtype, model.planes(info), &mut out);
    out
}

fn squeezed(shape: &[usize]) -> Vec<usize> {
    shape.iter().copied().filter(|&n| n != 1).collect()
}

/// Asserts that a file has the tensors of another, value for value; decay rates and divisors, which two libraries
/// compute, nearly so.
fn same_tensors(new: &Checkpoint, old: &Checkpoint) {
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
fn same_keys(new: &Checkpoint, old: &Checkpoint, skipped: &[&str]) {
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

#[test]
fn folders_of_every_architecture_become_the_files_made_of_the_same_weights() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let mut n = 0;
    for entry in std::fs::read_dir(fixtures::root(DATA)).expect("data") {
        let data = entry.expect("entry").path();
        if !data.join("hf").exists() || !data.join("model-bf16.gguf").exists() {
            continue;
        }
        let out = folder.path().join("out.gguf");
        stdout(&["convert", as_text(&data.join("hf")), as_text(&out)]);
        let (new, old) =
            (checkpoint::open(&out).expect("new"), checkpoint::open(&data.join("model-bf16.gguf")).expect("old"));
        let is_v2 = data.ends_with("deepseekv2");
        same_tensors(&new, &old);
        // What the scripts that made the old files write in another way.
        let skipped: &[&str] = if is_v2 { &["deepseek2.expert_gating_func"] } else { &[] };
        let nextn = [
            "deepseek2.block_count",
            "glm4moe.block_count",
            "glm4moe.nextn_predict_layers",
            "deepseek2.nextn_predict_layers",
        ];
        same_keys(&new, &old, &[skipped, &nextn].concat());
        let golden = data.join("golden.safetensors");
        let report =
            stdout(&["logits", "-m", as_text(&out), "--golden", as_text(&golden), "--backend", "reference", "--json"]);
        let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
        let error = report["rms_over_std"].as_f64().expect("rms_over_std");
        assert!(error < 2e-3, "{}: {error}", data.display());
        n += 1;
    }
    assert!(n >= 12, "{n} architectures");
}

/// The tokenizer's keys, and the values that mlx unpacks.
#[test]
fn mlx_folders_keep_values_tokenizer_and_template() {
    let Some(models) = fixtures::more("../shared/fixtures/models") else { return };
    let folder = tempfile::tempdir().expect("temporary folder");
    for entry in std::fs::read_dir(models).expect("models") {
        let data = entry.expect("entry").path();
        let mlx = data.join("mlx-mixed48");
        if !mlx.exists() {
            continue;
        }
        let out = folder.path().join("out.gguf");
        stdout(&["convert", as_text(&mlx), as_text(&out), "--type", "F32"]);
        let (new, old) =
            (checkpoint::open(&out).expect("new"), checkpoint::open(&data.join("model-bf16.gguf")).expect("old"));
        // GLM's converter gives roles to tokens by their names; rows of those configs lack them.
        let roles = [
            "tokenizer.ggml.bos_token_id",
            "tokenizer.ggml.unknown_token_id",
            "tokenizer.ggml.eom_token_id",
            "tokenizer.ggml.eot_token_id",
            "glm4moe.nextn_predict_layers",
        ];
        let skipped: &[&str] = if data.ends_with("glm4moe") { &roles } else { &[] };
        same_keys(&new, &old, skipped);
        let names = |model: &Checkpoint| {
            let mut all: Vec<_> = model.tensors().iter().map(|t| (t.name.clone(), squeezed(&t.shape))).collect();
            all.sort();
            all
        };
        assert_eq!(names(&new), names(&old), "{}", data.display());
        let golden = data.join("golden.safetensors");
        let line = [
            "logits",
            "-m",
            as_text(&out),
            "--golden",
            as_text(&golden),
            "--array",
            "logits_mlx",
            "--backend",
            "reference",
            "--json",
        ];
        let report: serde_json::Value = serde_json::from_str(&stdout(&line)).expect("JSON");
        let error = report["rms_over_std"].as_f64().expect("rms_over_std");
        assert!(error < 2e-3, "{}: {error}", data.display());
        // The same ids by the folder and by the file.
        let probe = folder.path().join("text");
        std::fs::write(&probe, "Hello  world, don't 12345 \n\n x<|im_end|>yes 日本語 \t end").expect("write");
        let ids = |model: &Path| stdout(&["tokenize", "-m", as_text(model), "-f", as_text(&probe), "--json"]);
        assert_eq!(ids(&out), ids(&mlx), "{}", data.display());
    }
}

/// A tensor for a safetensors file.
struct Part {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn write_folder(folder: &Path, config: &str, parts: &BTreeMap<String, Part>) {
    std::fs::create_dir_all(folder).expect("folder");
    std::fs::write(folder.join("config.json"), config).expect("config");
    let views = parts.iter().map(|(name, part)| {
        (name.clone(), TensorView::new(part.dtype, part.shape.clone(), &part.bytes).expect("view"))
    });
    let bytes = safetensors::serialize(views.collect::<Vec<_>>(), None).expect("serialize");
    std::fs::write(folder.join("model.safetensors"), bytes).expect("weights");
}

fn bf16(values: &[f32]) -> Vec<u8> {
    let mut out = vec![0; 2 * values.len()];
    quant::encode_row(WeightType::BF16, values, out.as_mut_slice());
    out
}

/// The tensors of a folder in its own types.
fn parts(folder: &Path) -> BTreeMap<String, Part> {
    let model = checkpoint::open(folder).expect("folder");
    let part = |t: &checkpoint::TensorInfo| {
        let part = Part { dtype: Dtype::BF16, shape: t.shape.clone(), bytes: bf16(&values(&model, &t.name)) };
        (t.name.clone(), part)
    };
    model.tensors().iter().map(part).collect()
}

#[test]
fn eight_bit_floats_are_unpacked_by_their_blocks() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let from = fixtures::root(DATA).join("qwen3/hf");
    let mut parts = parts(&from);
    let block = 24;
    let mut wanted = BTreeMap::new();
    for name in parts.keys().cloned().collect::<Vec<_>>() {
        if !name.contains("_proj.weight") {
            continue;
        }
        let shape = parts[&name].shape.clone();
        let [rows, columns] = shape[..] else { panic!("{shape:?}") };
        let codes: Vec<u8> = (0..rows * columns).map(|i| (i * 31 % 127) as u8 | (i as u8 & 1) << 7).collect();
        let grid = [rows.div_ceil(block), columns.div_ceil(block)];
        let scales: Vec<f32> = (0..grid[0] * grid[1]).map(|i| 0.001 * (1 + i) as f32).collect();
        // By the definition: sign, exponent with bias 7, three bits of mantissa.
        let value = |code: u8| {
            let (e, m) = (i32::from(code >> 3 & 15), f64::from(code & 7));
            let size = if e == 0 { m / 8.0 * 2f64.powi(-6) } else { (1.0 + m / 8.0) * 2f64.powi(e - 7) };
            if code > 127 { -size } else { size }
        };
        let at = |i: usize| scales[i / columns / block * grid[1] + i % columns / block];
        let decoded: Vec<f32> = (0..codes.len()).map(|i| value(codes[i]) as f32 * at(i)).collect();
        wanted.insert(name.clone(), decoded);
        let bytes = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        parts.insert(format!("{name}_scale_inv"), Part { dtype: Dtype::F32, shape: grid.to_vec(), bytes });
        parts.insert(name, Part { dtype: Dtype::F8_E4M3, shape, bytes: codes });
    }
    let config = std::fs::read_to_string(from.join("config.json")).expect("config");
    let tail = format!(
        ", \"quantization_config\": {{\"quant_method\": \"fp8\", \"weight_block_size\": [{block}, {block}]}}}}"
    );
    let config = config.trim_end().strip_suffix('}').expect("object").to_string() + &tail;
    let (fp8, out) = (folder.path().join("fp8"), folder.path().join("out.gguf"));
    write_folder(&fp8, &config, &parts);
    stdout(&["convert", as_text(&fp8), as_text(&out), "--type", "F32"]);
    let new = checkpoint::open(&out).expect("new");
    assert_eq!(values(&new, "blk.1.attn_output.weight"), wanted["model.layers.1.self_attn.o_proj.weight"]);
    assert_eq!(values(&new, "blk.0.ffn_down.weight"), wanted["model.layers.0.mlp.down_proj.weight"]);
    assert_eq!(
        new.tensors().len(),
        checkpoint::open(&fixtures::root(DATA).join("qwen3/model-bf16.gguf")).expect("old").tensors().len()
    );

    // A folder is quantized in one pass, to the bytes of two.
    let (once, twice) = (folder.path().join("once.gguf"), folder.path().join("twice.gguf"));
    stdout(&["quantize", as_text(&fp8), as_text(&once), "--type", "Q4_0"]);
    stdout(&["quantize", as_text(&out), as_text(&twice), "--type", "Q4_0"]);
    let (once, twice) = (checkpoint::open(&once).expect("once"), checkpoint::open(&twice).expect("twice"));
    for info in twice.tensors() {
        let other = once.tensor(&info.name).expect("tensor");
        assert_eq!((other.dtype, once.bytes(other)), (info.dtype, twice.bytes(info)), "{}", info.name);
    }
}

/// A mixture of experts in 8-bit floats, as it was published and converted to F32: the same bits on the CPU, whose
/// lanes meet the same numbers either way.
#[test]
fn eight_bit_floats_run_as_they_are() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let (fp8, out, golden) = (folder.path().join("fp8"), folder.path().join("out.gguf"), folder.path().join("golden"));
    let (n_vocab, d_model, d_ff, n_expert, d_head) = (48, 256, 128, 4, 32);
    let config = serde_json::json!({
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": n_vocab,
        "hidden_size": d_model, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": d_head, "intermediate_size": d_ff, "moe_intermediate_size": d_ff, "num_experts": n_expert,
        "num_experts_per_tok": 2, "norm_topk_prob": true, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": false,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    });
    let mut state = 7u64;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 40) as f32 / 2f32.powi(23) - 1.0
    };
    let mut parts = BTreeMap::new();
    let mut plain = |name: &str, shape: &[usize], parts: &mut BTreeMap<String, Part>| {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| 1.0 + next()).collect();
        parts.insert(name.into(), Part { dtype: Dtype::BF16, shape: shape.to_vec(), bytes: bf16(&values) });
    };
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        plain(name, &[n_vocab, d_model], &mut parts);
    }
    plain("model.norm.weight", &[d_model], &mut parts);
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    for name in ["input_layernorm", "post_attention_layernorm"] {
        plain(&layer(name), &[d_model], &mut parts);
    }
    for name in ["self_attn.q_norm", "self_attn.k_norm"] {
        plain(&layer(name), &[d_head], &mut parts);
    }
    plain(&layer("mlp.gate"), &[n_expert, d_model], &mut parts);
    let attention = [("q", [128, d_model]), ("k", [64, d_model]), ("v", [64, d_model]), ("o", [d_model, 128])];
    let attention = attention.map(|(name, shape)| (format!("self_attn.{name}_proj"), shape));
    let experts = (0..n_expert).flat_map(|i| {
        let of = [("gate", [d_ff, d_model]), ("up", [d_ff, d_model]), ("down", [d_model, d_ff])];
        of.map(|(name, shape)| (format!("mlp.experts.{i}.{name}_proj"), shape))
    });
    for (seed, (name, [rows, columns])) in attention.into_iter().chain(experts).enumerate() {
        // All numbers but NaN; some blocks are cut.
        let code = |i: usize| ((i * 31 + seed * 7) % 127) as u8 >> 1 | ((i * i / 3 + seed) as u8 & 1) << 7;
        let grid = [rows.div_ceil(128), columns.div_ceil(128)];
        let scales = (0..grid[0] * grid[1]).flat_map(|i| (0.004 + 0.003 * (i + seed) as f32).to_le_bytes()).collect();
        let (shape, bytes) = (vec![rows, columns], (0..rows * columns).map(code).collect());
        parts.insert(layer(&name), Part { dtype: Dtype::F8_E4M3, shape, bytes });
        let scales = Part { dtype: Dtype::F32, shape: grid.to_vec(), bytes: scales };
        parts.insert(format!("{}_scale_inv", layer(&name)), scales);
    }
    write_folder(&fp8, &config.to_string(), &parts);
    let loaded = checkpoint::open(&fp8).expect("folder");
    let down = loaded.tensor(&layer("mlp.experts.1.down_proj")).expect("an expert");
    assert_eq!((down.dtype, down.total_bytes()), (WeightType::F8_E4M3, d_model * (d_ff + 4)));

    stdout(&["convert", as_text(&fp8), as_text(&out), "--type", "F32"]);
    let golden = as_text(&golden);
    stdout(&["logits", "-m", as_text(&out), "--tokens", "1,5,3,17,30,2,9", "-o", golden, "-t", "1"]);
    for flags in [&["-t", "1"][..], &["-t", "2", "-b", "3"], &["--backend", "reference"]] {
        let all = [&["logits", "-m", as_text(&fp8), "--golden", golden, "--json"], flags].concat();
        let agreement: serde_json::Value = serde_json::from_str(&stdout(&all)).expect("json");
        let far = agreement["rms_over_std"].as_f64().expect("a number");
        // The reference keeps its cache in f32.
        let most = if flags.len() == 2 && flags[0] == "--backend" { 2e-3 } else { 0.0 };
        assert!(far <= most, "{far} with {flags:?}");
    }
}

/// NVFP4 with scales of matrices and of experts, as llama.cpp's converter writes it, beside the same numbers in F32:
/// the same bits on the CPU. What is no scale of its matrix is an error that names it.
#[test]
fn nvfp4_with_scales_of_matrices_runs() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let old = checkpoint::open(&fixtures::root(DATA).join("qwen3moe/model-bf16.gguf")).expect("model");
    let path = |name: &str| folder.path().join(name);
    let write = |name: &str, n_scale: &dyn Fn(usize) -> usize| {
        let (mut scaled, mut dense) = (checkpoint::gguf::Writer::new(), checkpoint::gguf::Writer::new());
        old.meta().iter().for_each(|(key, value)| {
            scaled.meta(key, value.clone());
            dense.meta(key, value.clone());
        });
        let mut n = 0;
        for info in old.tensors() {
            let (numbers, columns) = (values(&old, &info.name), *info.shape.last().expect("axes"));
            let module = info.name.strip_suffix(".weight").filter(|m| m.contains("attn_") || m.contains("_exps"));
            let Some(module) = module.filter(|_| info.shape.len() > 1 && columns % 64 == 0) else {
                scaled.tensor(&info.name, &info.shape, info.dtype, old.bytes(info).to_vec());
                dense.tensor(&info.name, &info.shape, info.dtype, old.bytes(info).to_vec());
                continue;
            };
            let n_matrix = if info.shape.len() == 3 { info.shape[0] } else { 1 };
            let scales: Vec<f32> = (0..n_matrix).map(|i| 3e-4 * (1 + (n + i) % 5) as f32).collect();
            let (mut blocks, mut decoded) = (Vec::new(), Vec::new());
            for (i, row) in numbers.chunks_exact(columns).enumerate() {
                let scale = scales[i * n_matrix / (numbers.len() / columns)];
                let row: Vec<f32> = row.iter().map(|x| x / scale).collect();
                let mut bytes = vec![0; columns / 64 * 36];
                quant::encode_row(WeightType::NVFP4, &row, bytes.as_mut_slice());
                let mut back = vec![0.0; columns];
                quant::decode_row(WeightType::NVFP4, &bytes, &mut back);
                blocks.extend(bytes);
                decoded.extend(back.into_iter().flat_map(|x| (x * scale).to_le_bytes()));
            }
            let bytes: Vec<u8> = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
            let bytes: Vec<u8> = bytes.into_iter().cycle().take(4 * n_scale(n_matrix)).collect();
            scaled.tensor(&info.name, &info.shape, WeightType::NVFP4, blocks);
            scaled.tensor(&format!("{module}.scale"), &[n_scale(n_matrix)], WeightType::F32, bytes);
            scaled.tensor(&format!("{module}.input_scale"), &[1], WeightType::F32, vec![0; 4]);
            dense.tensor(&info.name, &info.shape, WeightType::F32, decoded);
            n += 1;
        }
        assert!(n >= 8, "{n} matrices");
        for (writer, name) in [(scaled, name), (dense, "dense.gguf")] {
            let mut file = Vec::new();
            writer.write(&mut file).expect("a file");
            std::fs::write(path(name), file).expect("write");
        }
    };
    write("scaled.gguf", &|n| n);
    let (golden, scaled) = (path("golden"), path("scaled.gguf"));
    let tokens = "1,5,3,17,30,2,9";
    stdout(&["logits", "-m", as_text(&path("dense.gguf")), "--tokens", tokens, "-o", as_text(&golden), "-t", "1"]);
    for flags in [&["-t", "1"][..], &["-t", "2", "-b", "3"]] {
        let all = [&["logits", "-m", as_text(&scaled), "--golden", as_text(&golden), "--json"], flags].concat();
        let agreement: serde_json::Value = serde_json::from_str(&stdout(&all)).expect("json");
        assert_eq!(agreement["rms_over_std"].as_f64(), Some(0.0), "{flags:?}");
    }
    let said = error(&["quantize", as_text(&scaled), as_text(&path("out.gguf")), "--type", "Q8_0"]);
    assert!(said.contains("is nvfp4_scaled already"), "{said}");
    // In a folder their values are bf16, or codes of what they are.
    for (flags, most) in [(&["--to", "mlx"][..], 5e-3), (&["--bits", "8", "--group-size", "32"], 0.1)] {
        let mlx = path(&format!("mlx{most}"));
        stdout(&[&["convert", as_text(&scaled), as_text(&mlx)], flags].concat());
        let found = far(&mlx, &golden);
        assert!(found < most, "{found} with {flags:?}");
    }
    write("odd.gguf", &|n| n + 1);
    let said = error(&["convert", as_text(&path("odd.gguf")), as_text(&path("no")), "--to", "mlx"]);
    assert!(said.contains(".scale: is f32") && !path("no").exists(), "{said}");
    let said = error(&["logits", "-m", as_text(&path("odd.gguf")), "--tokens", tokens]);
    assert!(said.contains(".scale: is f32"), "{said}");
}

/// Folders of tools/make_packed.py: 4-bit weights as GPTQ and AWQ publish them, and the same values as floats.
#[test]
fn packed_weights_become_their_exact_values() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let (out, dense) = (folder.path().join("out.gguf"), folder.path().join("dense.gguf"));
    let mut n = 0;
    for entry in std::fs::read_dir(fixtures::root("crates/moebius/tests/data/packed")).expect("data") {
        let data = entry.expect("entry").path();
        let beside = data.with_file_name(format!("{}-dense", data.file_name().unwrap().to_string_lossy()));
        if !beside.exists() {
            continue;
        }
        for dtype in ["F32", "BF16"] {
            stdout(&["convert", as_text(&data), as_text(&out), "--type", dtype]);
            stdout(&["convert", as_text(&beside), as_text(&dense), "--type", dtype]);
            same_tensors(&checkpoint::open(&out).expect("new"), &checkpoint::open(&dense).expect("dense"));
        }
        // The folder itself, by the definition: in order, codes, scales and zeros are an affine type, which is exact.
        let golden = folder.path().join("golden.safetensors");
        stdout(&["convert", as_text(&beside), as_text(&dense), "--type", "F32"]);
        let [dense, golden] = [&dense, &golden].map(|path| as_text(path));
        stdout(&["logits", "-m", dense, "--tokens", "1,5,3,17,30,2,9", "-o", golden, "--backend", "reference"]);
        let is_reordered = data.to_string_lossy().ends_with("-act");
        let direct = |flags: &[&str]| {
            let all = [&["logits", "-m", as_text(&data), "--golden", golden, "--json"], flags].concat();
            let agreement: serde_json::Value = serde_json::from_str(&stdout(&all)).expect("json");
            agreement["rms_over_std"].as_f64().expect("a number")
        };
        let far = direct(&["--backend", "reference"]);
        assert!(far < if is_reordered { 1e-3 } else { 2e-6 }, "{}: {far}", data.display());
        for flags in [&["-t", "1"][..], &["-t", "2", "-b", "2"], &["-t", "2", "--copy-weights", "all"]] {
            let far = direct(flags);
            assert!(far < if is_reordered { 1e-3 } else { 0.03 }, "{}: {far} with {flags:?}", data.display());
        }
        let loaded = checkpoint::open(&data).expect("folder");
        let q = loaded.tensor("model.layers.0.self_attn.q_proj.weight").expect("q");
        assert_eq!(matches!(q.dtype, WeightType::Affine(a) if a.bits() == 4), !is_reordered, "{}", q.dtype);
        loaded.hold_repacked().expect("memory");
        let exact = if is_reordered { 2f32.powi(-11) } else { 0.0 };
        let (ours, theirs) = (values(&loaded, &q.name), values(&checkpoint::open(&beside).expect("dense"), &q.name));
        for (a, b) in ours.iter().zip(&theirs) {
            assert!((a - b).abs() <= exact * b.abs(), "{}: {a} for {b}", data.display());
        }
        // Half precision holds what scales are in; it is what comes of itself, unless other matrices are of another.
        stdout(&["convert", as_text(&data), as_text(&out)]);
        stdout(&["quantize", as_text(&data), as_text(&out), "--type", "Q8_0"]);
        let info = |name: &str| checkpoint::open(&out).expect("new").tensor(name).expect("tensor").dtype;
        assert_eq!(info("blk.0.attn_q.weight"), WeightType::Q8_0, "{}", data.display());
        n += 1;
    }
    assert!(n >= 5, "{n} folders");
}

/// SentencePiece's own file beside the weights: the same ids by the folder and by the file.
#[test]
fn sentencepiece_files_become_keys() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let data = fixtures::root("crates/moebius/tests/data/packed/llama-gptq-v2-dense");
    let (hf, out, probe) = (folder.path().join("hf"), folder.path().join("out.gguf"), folder.path().join("text"));
    let config = std::fs::read_to_string(data.join("config.json")).expect("config");
    let mut parts = parts(&data);
    let write = |parts: &BTreeMap<String, Part>, n_vocab: usize| {
        write_folder(&hf, &config.replace("\"vocab_size\": 32", &format!("\"vocab_size\": {n_vocab}")), parts);
        std::fs::copy(fixtures::root("crates/engine/tests/data/spm.model"), hf.join("tokenizer.model")).expect("copy");
    };
    write(&parts, 32);
    let said = error(&["convert", as_text(&hf), as_text(&out)]);
    assert!(said.contains("it has 700 tokens, the model 32"), "{said}");
    assert!(!out.exists());
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        let values: Vec<f32> = (0..704 * 64).map(|i| (i % 7) as f32 / 8.0).collect();
        parts.insert(name.into(), Part { dtype: Dtype::BF16, shape: vec![704, 64], bytes: bf16(&values) });
    }
    write(&parts, 704);
    stdout(&["convert", as_text(&hf), as_text(&out)]);
    std::fs::write(&probe, "Hello  world, don't 12345 \n\n [INST]x</s> 日本語 \t the Licence").expect("write");
    let ids = |model: &Path| stdout(&["tokenize", "-m", as_text(model), "-f", as_text(&probe), "--json"]);
    assert_eq!(ids(&out), ids(&hf));
    let new = checkpoint::open(&out).expect("new");
    assert_eq!(new.meta().str("tokenizer.ggml.model").expect("model"), "llama");
    assert_eq!(new.meta().strings("tokenizer.ggml.tokens").expect("tokens").iter().nth(703), Some(&b"[PAD703]"[..]));
}

#[test]
fn damaged_packed_weights_are_named() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let data = fixtures::root("crates/moebius/tests/data/packed/llama-gptq-act");
    let (bad, out) = (folder.path().join("bad"), folder.path().join("out.gguf"));
    let bytes = std::fs::read(data.join("model.safetensors")).expect("weights");
    let config = std::fs::read_to_string(data.join("config.json")).expect("config");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let whole = || -> BTreeMap<String, Part> {
        let part = |(name, view): (&str, TensorView<'_>)| {
            let part = Part { dtype: view.dtype(), shape: view.shape().to_vec(), bytes: view.data().to_vec() };
            (name.to_string(), part)
        };
        file.iter().map(part).collect()
    };
    let module = "model.layers.0.self_attn.q_proj";
    let name = |part: &str| format!("{module}.{part}");
    type Change<'a> = &'a dyn Fn(&mut BTreeMap<String, Part>);
    let cases: [(Change, (&str, &str), &str); 9] = [
        (&|_| {}, ("\"bits\": 4", "\"bits\": 8"), "bits 8"),
        (&|_| {}, ("\"checkpoint_format\": \"gptq\"", "\"checkpoint_format\": \"marlin\""), "marlin"),
        (&|_| {}, ("\"group_size\": 32", "\"group_size\": 0"), "groups of 0"),
        (&|_| {}, ("\"group_size\": 32", "\"group_size\": 16"), "groups of 16"),
        (&|parts| drop(parts.remove(&name("qzeros"))), ("", ""), "qzeros"),
        (&|parts| drop(parts.remove(&name("scales"))), ("", ""), "scales"),
        (
            &|parts| parts.get_mut(&name("g_idx")).unwrap().bytes[4..8].copy_from_slice(&2i32.to_le_bytes()),
            ("", ""),
            "column 1 of it is in group 2, there are 2",
        ),
        (
            &|parts| parts.get_mut(&name("g_idx")).unwrap().bytes[..4].copy_from_slice(&(-1i32).to_le_bytes()),
            ("", ""),
            "group -1",
        ),
        (&|parts| parts.get_mut(&name("qweight")).unwrap().shape.reverse(), ("", ""), "qweight"),
    ];
    for (change, (from, to), says) in cases {
        let mut parts = whole();
        change(&mut parts);
        assert!(config.contains(from), "{from}");
        write_folder(&bad, &if from.is_empty() { config.clone() } else { config.replace(from, to) }, &parts);
        let said = error(&["convert", as_text(&bad), as_text(&out), "--type", "F16"]);
        assert!(said.contains(says), "{says}: {said}");
        assert!(!out.exists(), "{says}");
    }
}

/// Forms that are not read are refused by the key of the config that names them.
#[test]
fn other_forms_of_weights_are_refused_by_their_key() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let from = fixtures::root(DATA).join("qwen3/hf");
    let (bad, out) = (folder.path().join("bad"), folder.path().join("out.gguf"));
    let mut parts = parts(&from);
    let name = "model.layers.0.self_attn.o_proj.weight";
    let shape = parts[name].shape.clone();
    let n = shape.iter().product::<usize>();
    // 8-bit floats with a scale a row, as compressed-tensors has them, and with one for the whole.
    parts.insert(name.into(), Part { dtype: Dtype::F8_E4M3, shape: shape.clone(), bytes: vec![0x38; n] });
    let scales = vec![0; 2 * shape[0]];
    parts.insert(format!("{name}_scale"), Part { dtype: Dtype::BF16, shape: vec![shape[0], 1], bytes: scales });
    let config = std::fs::read_to_string(from.join("config.json")).expect("config");
    let cases = [
        (
            r#"{"quant_method": "compressed-tensors", "format": "float-quantized"}"#,
            "quantization_config.quant_method is compressed-tensors, format float-quantized",
        ),
        (r#"{"quant_method": "bitsandbytes", "load_in_8bit": true}"#, "quant_method is bitsandbytes, gptq, awq"),
        (
            r#"{"quant_method": "fp8", "activation_scheme": "static"}"#,
            "quantization_config.weight_block_size is missing",
        ),
    ];
    for (quantization, says) in cases {
        let tail = format!(", \"quantization_config\": {quantization}}}");
        let config = config.trim_end().strip_suffix('}').expect("object").to_string() + &tail;
        write_folder(&bad, &config, &parts);
        let said = error(&["convert", as_text(&bad), as_text(&out)]);
        assert!(said.contains(says) && said.contains(name), "{says}: {said}");
        assert!(!out.exists(), "{says}");
    }
}

/// gpt-oss as it was published: gate and up in turn, unpacked and transposed or in MXFP4.
#[test]
fn gpt_oss_is_taken_apart() {
    let folder = tempfile::tempdir().expect("temporary folder");
    for (file, packed) in [("model-bf16.gguf", false), ("model-mxfp4.gguf", true)] {
        let old = checkpoint::open(&fixtures::root(DATA).join("gptoss").join(file)).expect("gpt-oss");
        let count = |key: &str| old.meta().u32(&format!("gpt-oss.{key}")).expect("key");
        let mut parts = BTreeMap::new();
        let plain = |name: &str| {
            let shape = old.tensor(name).expect("tensor").shape.clone();
            Part { dtype: Dtype::F32, shape, bytes: values(&old, name).iter().flat_map(|v| v.to_le_bytes()).collect() }
        };
        for (ours, theirs) in
            [("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")]
        {
            parts.insert(format!("{theirs}.weight"), plain(&format!("{ours}.weight")));
        }
        for layer in 0..count("block_count") {
            let theirs = |name: &str| format!("model.layers.{layer}.{name}");
            let ours = |name: &str| format!("blk.{layer}.{name}");
            for (a, b) in [("attn_norm", "input_layernorm"), ("post_attention_norm", "post_attention_layernorm")] {
                parts.insert(theirs(&format!("{b}.weight")), plain(&ours(&format!("{a}.weight"))));
            }
            for (a, b) in [
                ("attn_q", "self_attn.q_proj"),
                ("attn_k", "self_attn.k_proj"),
                ("attn_v", "self_attn.v_proj"),
                ("attn_output", "self_attn.o_proj"),
                ("ffn_gate_inp", "mlp.router"),
            ] {
                for kind in ["weight", "bias"] {
                    parts.insert(theirs(&format!("{b}.{kind}")), plain(&ours(&format!("{a}.{kind}"))));
                }
            }
            parts.insert(theirs("self_attn.sinks"), plain(&ours("attn_sinks.weight")));
            parts.insert(theirs("mlp.experts.down_proj_bias"), plain(&ours("ffn_down_exps.bias")));
            let in_turn =
                |a: Vec<f32>, b: Vec<f32>| a.into_iter().zip(b).flat_map(|(a, b)| [a, b]).collect::<Vec<f32>>();
            let bias = in_turn(values(&old, &ours("ffn_gate_exps.bias")), values(&old, &ours("ffn_up_exps.bias")));
            let [n_expert, n, k] = old.tensor(&ours("ffn_gate_exps.weight")).expect("gate").shape[..] else { panic!() };
            let bytes = bias.iter().flat_map(|v| v.to_le_bytes()).collect();
            parts.insert(
                theirs("mlp.experts.gate_up_proj_bias"),
                Part { dtype: Dtype::F32, shape: vec![n_expert, 2 * n], bytes },
            );
            let rows = |name: &str| values(&old, &ours(name));
            let row = |all: &[f32], i: usize, k: usize| all[i * k..][..k].to_vec();
            let (gate, up) = (rows("ffn_gate_exps.weight"), rows("ffn_up_exps.weight"));
            let both: Vec<f32> = (0..n_expert * n).flat_map(|i| [row(&gate, i, k), row(&up, i, k)].concat()).collect();
            let [_, down_n, down_k] = old.tensor(&ours("ffn_down_exps.weight")).expect("down").shape[..] else {
                panic!()
            };
            for (name, all, n, k) in
                [("gate_up_proj", both, 2 * n, k), ("down_proj", rows("ffn_down_exps.weight"), down_n, down_k)]
            {
                let name = theirs(&format!("mlp.experts.{name}"));
                if packed {
                    let mut q = vec![0; all.len() / 2];
                    let mut scales = vec![0; all.len() / 32];
                    let planes = quant::PlanesMut { q: &mut q, scales: &mut scales, biases: &mut [] };
                    quant::encode_row(WeightType::MXFP4_PLANAR, &all, planes);
                    let mut back = vec![0.0; all.len()];
                    quant::decode_row(
                        WeightType::MXFP4_PLANAR,
                        Planes { q: &q, scales: &scales, biases: &[] },
                        &mut back,
                    );
                    assert_eq!(back, all, "values of MXFP4 are packed as they were");
                    parts.insert(
                        format!("{name}_blocks"),
                        Part { dtype: Dtype::U8, shape: vec![n_expert, n, k / 32, 16], bytes: q },
                    );
                    parts.insert(
                        format!("{name}_scales"),
                        Part { dtype: Dtype::U8, shape: vec![n_expert, n, k / 32], bytes: scales },
                    );
                } else {
                    let at = |i: usize| all[i / (n * k) * n * k + i % n * k + i / n % k];
                    let transposed: Vec<f32> = (0..all.len()).map(at).collect();
                    parts.insert(
                        name,
                        Part { dtype: Dtype::BF16, shape: vec![n_expert, k, n], bytes: bf16(&transposed) },
                    );
                }
            }
        }
        let config = serde_json::json!({
            "model_type": "gpt_oss",
            "num_hidden_layers": count("block_count"),
            "hidden_size": count("embedding_length"),
            "intermediate_size": count("feed_forward_length"),
            "num_attention_heads": count("attention.head_count"),
            "num_key_value_heads": count("attention.head_count_kv"),
            "head_dim": count("attention.key_length"),
            "num_local_experts": count("expert_count"),
            "num_experts_per_tok": count("expert_used_count"),
            "sliding_window": count("attention.sliding_window"),
            "max_position_embeddings": count("context_length"),
            "rms_norm_eps": 1e-5,
        });
        let (hf, out) = (folder.path().join("hf"), folder.path().join("out.gguf"));
        write_folder(&hf, &config.to_string(), &parts);
        stdout(&["convert", as_text(&hf), as_text(&out), "--type", "F32"]);
        let new = checkpoint::open(&out).expect("new");
        for info in old.tensors() {
            assert_eq!(values(&new, &info.name), values(&old, &info.name), "{file} {}", info.name);
            let dtype = new.tensor(&info.name).expect("tensor").dtype;
            let stays = packed && info.name.ends_with("_exps.weight");
            assert_eq!(dtype == WeightType::MXFP4, stays, "{file} {}", info.name);
        }
        assert_eq!(new.tensors().len(), old.tensors().len());
        std::fs::remove_dir_all(&hf).expect("remove");
    }
}

/// The folders that mlx-lm 0.32.2 loaded and computed these models' golden logits from, by `tools/mlx_agree.py`.
const MLX: [&str; 11] = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3moe",
    "qwen3next",
    "deepseekv2",
    "deepseekv3",
    "glm4moe",
    "gemma3",
    "gemma4",
    "gptoss",
];

/// How far a model's logits are from golden ones, on the reference backend.
fn far(model: &Path, golden: &Path) -> f64 {
    let line = ["logits", "-m", as_text(model), "--golden", as_text(golden), "--backend", "reference", "--json"];
    let report: serde_json::Value = serde_json::from_str(&stdout(&line)).expect("JSON");
    report["rms_over_std"].as_f64().expect("rms_over_std")
}

/// What a folder holds: its config, and its tensors with their types and shapes.
fn listing(folder: &Path) -> String {
    let mut out = std::fs::read_to_string(folder.join("config.json")).expect("config");
    let bytes = std::fs::read(folder.join("model.safetensors")).expect("weights");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let mut lines: Vec<String> =
        file.iter().map(|(name, view)| format!("\n{name} {:?} {:?}", view.dtype(), view.shape())).collect();
    lines.sort();
    out.extend(lines);
    out + "\n"
}

/// GGUF to MLX and back: the same values and logits, and the config, names and shapes that mlx-lm has loaded; with few
/// bits, near ones.
#[test]
fn mlx_folders_hold_what_the_file_held() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let at = |name: &str| folder.path().join(name);
    for name in MLX {
        let data = fixtures::root(DATA).join(name);
        let (from, golden) = (data.join("model-bf16.gguf"), data.join("golden.safetensors"));
        let (mlx, back, eight) = (at(&format!("{name}-mlx")), at("back.gguf"), at(&format!("{name}-8bit")));
        stdout(&["convert", as_text(&from), as_text(&mlx), "--to", "mlx"]);
        assert_eq!(checkpoint::open(&mlx).expect("mlx").kind(), checkpoint::Kind::Mlx);
        let wanted = fixtures::root("crates/moebius/tests/data/mlx").join(format!("{name}.txt"));
        expect_test::expect_file![wanted].assert_eq(&listing(&mlx));
        let found = far(&mlx, &golden);
        assert!(found < 1e-5, "{name}: {found}");
        stdout(&["convert", as_text(&mlx), as_text(&back)]);
        let (new, old) = (checkpoint::open(&back).expect("back"), checkpoint::open(&from).expect("from"));
        same_tensors(&new, &old);
        // Layers that predict further tokens are left out.
        let further = ["block_count", "nextn_predict_layers"]
            .map(|key| ["deepseek2", "glm4moe"].map(|arch| format!("{arch}.{key}")))
            .concat();
        same_keys(&new, &old, &further.iter().map(String::as_str).collect::<Vec<_>>());
        stdout(&["convert", as_text(&from), as_text(&eight), "--bits", "8", "--group-size", "32"]);
        let found = far(&eight, &golden);
        assert!(found > 1e-5 && found < 0.3, "{name}: {found}");
        // Nothing is written over, and nothing but the folders is left.
        assert!(error(&["convert", as_text(&from), as_text(&mlx), "--to", "mlx"]).contains("already"));
    }
    assert!(files(folder.path()).iter().all(|path| !as_text(path).contains(".part")));
}

/// The tokenizer that the folder gets cuts as the file's does.
#[test]
fn mlx_folders_cut_texts_as_the_file_does() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let at = |name: &str| folder.path().join(name);
    let from = fixtures::root(DATA).join("types/qwen3moe-blocks32.gguf");
    let (mlx, probe) = (at("tokens"), at("text"));
    stdout(&["convert", as_text(&from), as_text(&mlx), "--bits", "4", "--group-size", "32"]);
    std::fs::write(&probe, "then an end, in the hand; don't 12345<|endoftext|>the\n").expect("write");
    let ids = |model: &Path| stdout(&["tokenize", "-m", as_text(model), "-f", as_text(&probe), "--json"]);
    assert_eq!(ids(&mlx), ids(&from));
}

/// A tensor of a file that is written: name, shape and bytes, which keep their type.
type Kept = (String, Vec<usize>, Vec<u8>);

/// Changes a GGUF file: its keys, and its tensors, of which those that become nothing are left out.
fn changed(
    from: &Path,
    to: &Path,
    keys: &[(&str, Option<Value>)],
    keep: impl Fn(&str, &[usize], &[u8]) -> Option<Kept>,
) {
    let old = checkpoint::open(from).expect("model");
    let mut writer = checkpoint::gguf::Writer::new();
    for (key, value) in old.meta().iter().filter(|(key, _)| keys.iter().all(|(other, _)| other != key)) {
        writer.meta(key, value.clone());
    }
    for (key, value) in keys {
        if let Some(value) = value {
            writer.meta(key, value.clone());
        }
    }
    for info in old.tensors() {
        if let Some((name, shape, bytes)) = keep(&info.name, &info.shape, old.bytes(info)) {
            writer.tensor(&name, &shape, info.dtype, bytes);
        }
    }
    let mut file = Vec::new();
    writer.write(&mut file).expect("a file");
    std::fs::write(to, file).expect("write");
}

/// Asserts that a file and its MLX folder give the same logits, and that the folder is as mlx-lm has loaded it.
fn same_as_its_folder(from: &Path, name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("temporary folder");
    let (mlx, golden) = (folder.path().join("mlx"), folder.path().join("golden.safetensors"));
    let tokens: Vec<String> = (0..40).map(|i| (i * 37 % 96).to_string()).collect();
    let write = ["--tokens", &tokens.join(","), "-o", as_text(&golden), "--backend", "reference"];
    stdout(&[&["logits", "-m", as_text(from)][..], &write].concat());
    stdout(&["convert", as_text(from), as_text(&mlx), "--to", "mlx"]);
    let found = far(&mlx, &golden);
    assert!(found < 1e-5, "{name}: {found}");
    let wanted = fixtures::root("crates/moebius/tests/data/mlx").join(format!("{name}.txt"));
    expect_test::expect_file![wanted].assert_eq(&listing(&mlx));
    folder
}

/// Qwen3.5, whose heads of v GGUF files have in another order. mlx-lm wants attention in every n-th layer, so the
/// layers of the small model change places; then there are no golden logits, but those of the file.
#[test]
fn mlx_folders_of_delta_nets_have_their_heads_in_order() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let at = |name: &str| folder.path().join(name);
    let from = fixtures::root(DATA).join("qwen35/model-bf16.gguf");
    let said = error(&["convert", as_text(&from), as_text(&at("no")), "--to", "mlx"]);
    assert!(said.contains("attention are not every n-th"), "{said}");
    let (swapped, back) = (at("swapped.gguf"), at("back.gguf"));
    changed(&from, &swapped, &[], |name, shape, bytes| {
        let name = match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some(("0", rest)) => format!("blk.1.{rest}"),
            Some((_, rest)) => format!("blk.0.{rest}"),
            None => name.into(),
        };
        Some((name, shape.to_vec(), bytes.to_vec()))
    });
    let made = same_as_its_folder(&swapped, "qwen35");
    stdout(&["convert", as_text(&made.path().join("mlx")), as_text(&back)]);
    same_tensors(&checkpoint::open(&back).expect("back"), &checkpoint::open(&swapped).expect("swapped"));
}

/// Mistral, whose window mlx-lm does not see; the folder says it all the same.
#[test]
fn mlx_folders_of_mistral() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("mistral.gguf");
    let keys = [("llama.attention.sliding_window", Some(Value::from(64u32)))];
    changed(&fixtures::root(DATA).join("llama/model-bf16.gguf"), &path, &keys, |name, shape, bytes| {
        let is_his = !name.ends_with(".bias") && name != "rope_freqs.weight";
        is_his.then(|| (name.to_string(), shape.to_vec(), bytes.to_vec()))
    });
    same_as_its_folder(&path, "mistral");
}

/// Mixtral, whose heads share the residual stream's width in mlx-lm: the small model, which has wider ones, is refused,
/// and half of its heads are not.
#[test]
fn mlx_folders_of_mixtral() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let half = folder.path().join("half.gguf");
    let from = fixtures::root(DATA).join("mixtral/model-bf16.gguf");
    let said = error(&["convert", as_text(&from), as_text(&folder.path().join("no")), "--to", "mlx"]);
    assert!(said.contains("not a head's share of 64"), "{said}");
    let old = checkpoint::open(&from).expect("model");
    let count = |key: &str| old.meta().u32(&format!("llama.attention.{key}")).expect("a count");
    let heads = ["head_count", "head_count_kv"].map(|key| (key, Some(Value::from(count(key) / 2))));
    let heads = heads.map(|(key, value)| (format!("llama.attention.{key}"), value));
    let heads = heads.iter().map(|(key, value)| (key.as_str(), value.clone()));
    // It has no scaled positions there either.
    let plain = ["llama.rope.scaling.type", "llama.rope.scaling.factor"].map(|key| (key, None));
    let keys: Vec<(&str, Option<Value>)> = heads.chain(plain).collect();
    changed(&from, &half, &keys, |name, shape, bytes| {
        let stem = name.split('.').nth(2).unwrap_or_default();
        let (shape, bytes) = match stem {
            "attn_q" | "attn_k" | "attn_v" => (vec![shape[0] / 2, shape[1]], bytes[..bytes.len() / 2].to_vec()),
            "attn_output" => {
                let row = bytes.len() / shape[0];
                (
                    vec![shape[0], shape[1] / 2],
                    bytes.chunks(row).flat_map(|row| &row[..row.len() / 2]).copied().collect(),
                )
            }
            _ => (shape.to_vec(), bytes.to_vec()),
        };
        Some((name.into(), shape, bytes))
    });
    same_as_its_folder(&half, "mixtral");
}

/// MXFP4 stays what it is where nobody wants another type.
#[test]
fn mlx_folders_keep_mxfp4() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let (mlx, affine) = (folder.path().join("mlx"), folder.path().join("affine"));
    let from = fixtures::root(DATA).join("gptoss/model-mxfp4.gguf");
    let name = "model.layers.0.mlp.experts.gate_proj.weight";
    stdout(&["convert", as_text(&from), as_text(&mlx), "--to", "mlx"]);
    let (new, old) = (checkpoint::open(&mlx).expect("folder"), checkpoint::open(&from).expect("file"));
    assert_eq!(new.tensor(name).expect("experts").dtype, WeightType::MXFP4_PLANAR);
    assert_eq!(values(&new, name), values(&old, "blk.0.ffn_gate_exps.weight"));
    stdout(&["convert", as_text(&from), as_text(&affine), "--bits", "4", "--group-size", "32"]);
    let new = checkpoint::open(&affine).expect("folder");
    assert!(matches!(new.tensor(name).expect("experts").dtype, WeightType::Affine(_)));
}

/// SentencePiece's vocabularies become a `tokenizer.json` with the same ids.
#[test]
fn mlx_folders_have_tokenizers_of_sentencepiece() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let at = |name: &str| folder.path().join(name);
    let vocabulary = checkpoint::open(&fixtures::root("crates/engine/tests/data/spm.gguf")).expect("vocabulary");
    let keys: Vec<(&str, Option<Value>)> = vocabulary
        .meta()
        .iter()
        .filter(|(key, _)| key.starts_with("tokenizer."))
        .map(|(key, value)| (key, Some(value.clone())))
        .collect();
    let (from, mlx, probe) = (at("spm.gguf"), at("mlx"), at("text"));
    // 700 tokens, for a model of 96: the table of embeddings is written several times.
    changed(&fixtures::root(DATA).join("qwen3/model-bf16.gguf"), &from, &keys, |name, shape, bytes| {
        let is_table = ["token_embd.weight", "output.weight"].contains(&name);
        let n = if is_table { 700 } else { shape[0] };
        let len = bytes.len() / shape[0] * n;
        let shape = [&[n], &shape[1..]].concat();
        Some((name.into(), shape, bytes.iter().copied().cycle().take(len).collect()))
    });
    stdout(&["convert", as_text(&from), as_text(&mlx), "--to", "mlx"]);
    let text = "Hello  world, don't 12345 \n\n [INST]x</s> 日本語 \t the Licence<s>   a";
    std::fs::write(&probe, text).expect("write");
    for flags in [&[][..], &["--add-special", "--parse-special"]] {
        let ids = |model: &Path| {
            stdout(&[&["tokenize", "-m", as_text(model), "-f", as_text(&probe), "--json"], flags].concat())
        };
        assert_eq!(ids(&mlx), ids(&from), "{flags:?}");
    }
}

/// What mlx-lm's models do not compute is refused before anything is made, by the key or tensor that says it.
#[test]
fn what_mlx_has_no_form_for_is_refused_by_name() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let at = |name: &str| folder.path().join(name);
    let path = at("changed.gguf");
    let f32s = |value: f32| Some(Value::F32(value));
    type Keys<'a> = &'a [(&'a str, Option<Value>)];
    let cases: [(&str, Keys, &str, &str); 12] = [
        ("llama", &[("llama.rope.freq_base", f32s(9000.0))], "", "rope_freqs.weight has divisors"),
        ("llama", &[], "blk.1.attn_k.bias", "blk.1.attn_k.bias: it is missing"),
        ("llama", &[("llama.attention.scale", f32s(0.5))], "", "llama.attention.scale is 0.5"),
        ("mixtral", &[], "", "llama.attention.key_length is 32"),
        ("qwen3moe", &[("qwen3moe.expert_weights_scale", f32s(2.0))], "", "expert_weights_scale is 2"),
        (
            "qwen3moe",
            &[("qwen3moe.rope.scaling.type", Some("yarn".into())), ("qwen3moe.rope.scaling.factor", f32s(4.0))],
            "",
            "scaled (yarn), which mlx-lm's qwen3_moe does not do",
        ),
        ("qwen2", &[("qwen2.attention.head_count", Some(Value::from(6u32)))], "", "blk.0.attn_q"),
        ("gemma3", &[("gemma3.final_logit_softcapping", f32s(30.0))], "", "final_logit_softcapping is 30"),
        (
            "gemma3",
            &[("gemma3.attention.sliding_window_pattern", Some(vec![false, true, true].into()))],
            "",
            "sliding_window_pattern is not",
        ),
        (
            "deepseekv2",
            &[("deepseek2.expert_weights_norm", Some(Value::from(true)))],
            "",
            "expert_weights_norm is true",
        ),
        ("deepseekv3", &[], "blk.1.exp_probs_b.bias", "exp_probs_b.bias: it is missing"),
        ("gptoss", &[("gpt-oss.attention.sliding_window", Some(Value::from(0u32)))], "", "sliding_window"),
    ];
    for (name, keys, without, says) in cases {
        let from = fixtures::root(DATA).join(name).join("model-bf16.gguf");
        changed(&from, &path, keys, |name, shape, bytes| {
            (name != without).then(|| (name.to_string(), shape.to_vec(), bytes.to_vec()))
        });
        let said = error(&["convert", as_text(&path), as_text(&at("no")), "--to", "mlx"]);
        assert!(said.contains(says), "{name}, {says}: {said}");
        assert_eq!(files(folder.path()), std::slice::from_ref(&path), "{says}");
    }
}

/// What is there after a command that must leave nothing.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = std::fs::read_dir(folder).expect("folder").map(|e| e.expect("entry").path()).collect();
    all.sort();
    all
}

#[test]
fn damaged_folders_end_in_a_sentence_and_leave_nothing() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let at = |name: &str| folder.path().join(name);
    let good = fixtures::root(DATA).join("qwen3moe/hf");
    let (config, weights) = (
        std::fs::read_to_string(good.join("config.json")).expect("config"),
        std::fs::read(good.join("model.safetensors")).expect("weights"),
    );
    let case = |name: &str, config: &str, weights: &[u8]| {
        let path = at(name);
        std::fs::create_dir_all(&path).expect("folder");
        std::fs::write(path.join("config.json"), config).expect("config");
        std::fs::write(path.join("model.safetensors"), weights).expect("weights");
        path
    };
    let out = at("out.gguf");
    let cases: [(PathBuf, &str); 8] = [
        (case("cut", &config, &weights[..weights.len() - 100]), "model.safetensors"),
        (case("no-json", "{", &weights), "config.json"),
        (case("unknown", &config.replace("qwen3_moe", "gpt_7"), &weights), "gpt_7"),
        (case("layers", &config.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3"), &weights), "blk.2"),
        (
            case("many", &config.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 4000000000"), &weights),
            "layers",
        ),
        (
            case("heads", &config.replace("\"num_attention_heads\": 4", "\"num_attention_heads\": 0"), &weights),
            "num_attention_heads",
        ),
        (at("missing"), "missing"),
        (fixtures::root(DATA).join("qwen3moe/model-bf16.gguf"), "already"),
    ];
    let before = files(folder.path());
    for (path, part) in &cases {
        let said = error(&["convert", as_text(path), as_text(&out), "--to", "gguf"]);
        assert!(said.starts_with("moebius: failed to ") && said.contains(part), "{}: {said}", path.display());
        assert!(!said.contains("panicked"), "{said}");
        assert_eq!(files(folder.path()), before, "{}", path.display());
    }
    // A tokenizer that does not fit its model, and the old file that stays.
    let path = case("tokens", &config, &weights);
    std::fs::write(
        path.join("tokenizer.json"),
        r#"{"model": {"type": "BPE", "vocab": {"a": 0, "b": 400}, "merges": []}}"#,
    )
    .expect("write");
    std::fs::write(&out, "the old file").expect("write");
    let said = error(&["convert", as_text(&path), as_text(&out)]);
    assert!(said.contains("401 tokens, the model 96"), "{said}");
    assert_eq!(std::fs::read(&out).expect("read"), b"the old file");
}
