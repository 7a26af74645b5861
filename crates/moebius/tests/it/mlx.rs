//! `convert --to mlx` end to end: GGUF files as the folders that mlx-lm loads.

use std::path::Path;

use checkpoint::Value;
use quant::WeightType;

use crate::common::tensors::{DATA, far, files, same_keys, same_tensors, values};
use crate::common::{as_text, error, stdout};
use crate::fixtures;

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

/// mlx-lm stops at the ids of `eos_token_id` alone: all at which the file's answers end stand there, its EOS first; a
/// single one is no list.
#[test]
fn mlx_folders_name_every_token_that_ends_an_answer() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let at = |name: &str| folder.path().join(name);
    let from = fixtures::root(DATA).join("types/qwen3moe-blocks32.gguf");
    let of_file = checkpoint::open(&from).expect("file").meta().u32("tokenizer.ggml.eos_token_id").expect("EOS");
    let cases: [(&[(&str, u32)], serde_json::Value); 3] = [
        (&[("eos", 7), ("eot", 5), ("eom", 9)], serde_json::json!([7, 5, 9, of_file])),
        (&[("eos", 7)], serde_json::json!([7, of_file])),
        (&[("eos", of_file)], serde_json::json!(of_file)),
    ];
    for (i, (keys, wanted)) in cases.into_iter().enumerate() {
        let (path, mlx) = (at(&format!("{i}.gguf")), at(&format!("{i}")));
        let keys: Vec<(String, Option<Value>)> =
            keys.iter().map(|(name, id)| (format!("tokenizer.ggml.{name}_token_id"), Some((*id).into()))).collect();
        let keys: Vec<_> = keys.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
        changed(&from, &path, &keys, |name, shape, bytes| Some((name.into(), shape.to_vec(), bytes.to_vec())));
        stdout(&["convert", as_text(&path), as_text(&mlx), "--bits", "4", "--group-size", "32"]);
        let config = std::fs::read(mlx.join("config.json")).expect("config");
        let config: serde_json::Value = serde_json::from_slice(&config).expect("JSON");
        assert_eq!(config["eos_token_id"], wanted, "{keys:?}");
        // The folder's answers end where the file's do.
        let ends = |path: &Path| {
            let model = checkpoint::open(path).expect("model");
            engine::tokenizer::Tokenizer::load(&model).expect("tokenizer").ends_of_generation().to_vec()
        };
        assert_eq!(ends(&mlx), ends(&path), "{keys:?}");
    }
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
    assert!(said.contains("attention layers are not every n-th"), "{said}");
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

/// Layers of Gemma 4 E2B and E4B share caches, and have embeddings per layer.
#[test]
fn mlx_folders_of_small_gemma_are_refused() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let at = |name: &str| folder.path().join(name);
    let from = fixtures::root(DATA).join("published/gemma4_e2b/hf");
    stdout(&["convert", as_text(&from), as_text(&at("small.gguf"))]);
    let said = error(&["convert", as_text(&at("small.gguf")), as_text(&at("no")), "--to", "mlx"]);
    assert!(said.contains("attention.shared_kv_layers is above 0"), "{said}");
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
