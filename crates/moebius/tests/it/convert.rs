//! `convert` end to end: folders of every architecture beside the GGUF files that were made of the same weights.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use checkpoint::Checkpoint;
use quant::{Planes, WeightType};
use safetensors::tensor::{Dtype, TensorView};

use crate::common::tensors::{DATA, far, files, same_keys, same_tensors, squeezed, values};
use crate::common::{as_text, error, stdout};
use crate::fixtures;

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

/// Folders as their publishers store them, which have no file made by others: the new file gives the answers of the
/// original code.
#[test]
fn published_folders_become_files_with_the_same_answers() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let mut n = 0;
    for entry in std::fs::read_dir(fixtures::root(DATA).join("published")).expect("data") {
        let data = entry.expect("entry").path();
        let out = folder.path().join("out.gguf");
        stdout(&["convert", as_text(&data.join("hf")), as_text(&out)]);
        let golden = data.join("golden.safetensors");
        let report =
            stdout(&["logits", "-m", as_text(&out), "--golden", as_text(&golden), "--backend", "reference", "--json"]);
        let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
        let error = report["rms_over_std"].as_f64().expect("rms_over_std");
        assert!(error < 1e-5, "{}: {error}", data.display());
        n += 1;
    }
    assert!(n >= 20, "{n} families");
}

/// Files of MiniMax-Text-01 have one residual factor, folders one of each part.
#[test]
fn residual_factors_that_differ_are_not_converted() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let hf = fixtures::root(DATA).join("published/minimax/hf");
    let config = std::fs::read_to_string(hf.join("config.json")).expect("config");
    let out = folder.path().join("out.gguf");
    std::fs::copy(hf.join("model.safetensors"), folder.path().join("model.safetensors")).expect("weights");
    for (key, value) in [("full_attn_alpha_factor", "1.75"), ("mlp_beta_factor", "1.0")] {
        let (old, new) = (format!("\"{key}\": {value}"), format!("\"{key}\": 2.5"));
        assert!(config.contains(&old), "{old}");
        std::fs::write(folder.path().join("config.json"), config.replace(&old, &new)).expect("config");
        let why = error(&["convert", as_text(folder.path()), as_text(&out)]);
        assert!(why.contains("residual factors differ") && !out.exists(), "{key}: {why}");
    }
}

/// A file of EmbeddingGemma would be one of Gemma 3, which sees no later tokens.
#[test]
fn encoders_of_texts_are_not_converted() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let out = folder.path().join("out.gguf");
    for name in ["bert", "xlmr", "gemma_embedding", "modern_bert"] {
        let hf = fixtures::root(DATA).join("encoders").join(name).join("hf");
        let why = error(&["convert", as_text(&hf), as_text(&out)]);
        let said = why.contains("encoders of texts are not converted") || why.contains("is unsupported");
        assert!(said && !out.exists(), "{name}: {why}");
    }
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
        // 8-bit floats run in groups of 128 columns.
        let is_float = data.to_string_lossy().contains("-fp8");
        let is_as_wanted = match q.dtype {
            WeightType::Affine(affine) => affine.bits() == 4 && !is_reordered && !is_float,
            WeightType::F8_E4M3 => is_float && q.shape[1] == 128,
            WeightType::F32 => is_float && q.shape[1] == 64,
            other => other == WeightType::F16 && is_reordered,
        };
        assert!(is_as_wanted, "{}: {}", data.display(), q.dtype);
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
    assert!(n >= 11, "{n} folders");
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
    let name = |part: &str| format!("model.layers.0.self_attn.q_proj.{part}");
    let (q, zeros, scale) = (name("qweight"), name("weight_zero_point"), name("weight_scale"));
    let column_1 = |name: &str, group: i32| {
        let (name, bytes) = (name.to_string(), group.to_le_bytes());
        move |parts: &mut Parts| parts.get_mut(&name).unwrap().bytes[4..8].copy_from_slice(&bytes)
    };
    let without = |name: &str| {
        let name = name.to_string();
        move |parts: &mut Parts| drop(parts.remove(&name))
    };
    let turned = |name: &str| {
        let name = name.to_string();
        move |parts: &mut Parts| parts.get_mut(&name).unwrap().shape.reverse()
    };
    let same = |_: &mut Parts| {};
    damaged(
        "llama-gptq-act",
        &[
            (&same, ("\"bits\": 4", "\"bits\": 8"), "bits 8"),
            (&same, ("\"checkpoint_format\": \"gptq\"", "\"checkpoint_format\": \"marlin\""), "marlin"),
            (&same, ("\"group_size\": 32", "\"group_size\": 0"), "groups of 0"),
            (&same, ("\"group_size\": 32", "\"group_size\": 16"), "groups of 16"),
            (&without(&name("qzeros")), ("", ""), "qzeros"),
            (&without(&name("scales")), ("", ""), "scales"),
            (&column_1(&name("g_idx"), 2), ("", ""), "column 1 of it is in group 2, there are 2"),
            (&column_1(&name("g_idx"), -1), ("", ""), "group -1"),
            (&turned(&q), ("", ""), "qweight"),
        ],
    );
    damaged(
        "llama-compressed-act",
        &[
            (
                &same,
                ("\"num_bits\": 4", "\"num_bits\": 8"),
                "quant_method is compressed-tensors, format pack-quantized",
            ),
            (&same, ("\"pack-quantized\"", "\"marlin-24\""), "quant_method is compressed-tensors, format marlin-24"),
            (&same, ("\"group_size\": 32", "\"group_size\": 16"), "groups of 16"),
            (&without(&scale), ("", ""), "has no model.layers.0.self_attn.q_proj.weight_scale alongside it"),
            (&turned(&scale), ("", ""), "weight_packed: is I32 [64, 8], its scales are BF16 [2, 64]"),
            (&turned(&zeros), ("", ""), "its model.layers.0.self_attn.q_proj.weight_zero_point I32 [2, 8]"),
            (&column_1(&name("weight_g_idx"), 2), ("", ""), "column 1 of it is in group 2, there are 2"),
            (&turned(&name("weight_packed")), ("", ""), "weight_packed"),
        ],
    );
    damaged(
        "qwen3moe-compressed-fp8-block",
        &[
            (
                &same,
                ("\"num_bits\": 8", "\"num_bits\": 4"),
                "quant_method is compressed-tensors, format float-quantized",
            ),
            (&without(&scale), ("", ""), "has no model.layers.0.self_attn.q_proj.weight_scale alongside it"),
            (
                &same,
                ("\"block_structure\": [", "\"block_structure\": [1, "),
                "quant_method is compressed-tensors, format float-quantized",
            ),
        ],
    );
}

/// The tensors of a folder.
type Parts = BTreeMap<String, Part>;
/// A change of a folder's tensors, one of its config, and what is said of it.
type Damage<'a> = (&'a dyn Fn(&mut Parts), (&'a str, &'a str), &'a str);

/// Asserts that a packed folder that is damaged in any of these ways is refused, and nothing written.
fn damaged(folder_name: &str, cases: &[Damage]) {
    let folder = tempfile::tempdir().expect("temporary folder");
    let data = fixtures::root("crates/moebius/tests/data/packed").join(folder_name);
    let (bad, out) = (folder.path().join("bad"), folder.path().join("out.gguf"));
    let bytes = std::fs::read(data.join("model.safetensors")).expect("weights");
    let config = std::fs::read_to_string(data.join("config.json")).expect("config");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let whole = || -> Parts {
        let part = |(name, view): (&str, TensorView<'_>)| {
            let part = Part { dtype: view.dtype(), shape: view.shape().to_vec(), bytes: view.data().to_vec() };
            (name.to_string(), part)
        };
        file.iter().map(part).collect()
    };
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
            r#"{"quant_method": "compressed-tensors", "format": "naive-quantized"}"#,
            "quantization_config.quant_method is compressed-tensors, format naive-quantized",
        ),
        (
            r#"{"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups":
                {"a": {"weights": {"num_bits": 8, "type": "int"}}}}"#,
            "quantization_config.quant_method is compressed-tensors, format float-quantized",
        ),
        (r#"{"quant_method": "bitsandbytes", "load_in_8bit": true}"#, "bitsandbytes; supported are gptq, awq"),
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
        assert!(said.starts_with("moebius: ") && said.contains(part), "{}: {said}", path.display());
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
