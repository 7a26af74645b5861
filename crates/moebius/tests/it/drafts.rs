//! Drafts by the command: files of models with a layer for multi-token prediction, and what is told of it.

use std::path::{Path, PathBuf};

use crate::common::{as_text, error, moebius, stdout};
use crate::fixtures;

/// Folders of such models: small ones in git, and larger ones, which have a tokenizer.
fn folders() -> Vec<PathBuf> {
    let root = fixtures::root("crates/conformance/tests/data");
    let tiny = TINY.iter().map(|name| root.join(name));
    let names = ["qwen35moe_mtp", "qwen35_mtp", "deepseekv3_mtp", "glm4moe_mtp"];
    let more =
        fixtures::more("../shared/fixtures/models2").into_iter().flat_map(|root| names.map(|name| root.join(name)));
    tiny.chain(more).collect()
}

const TINY: &[&str] = &["qwen35_mtp", "deepseekv3_mtp"];

/// How far logits are off by the reference, and how many rows there are.
fn agreement(model: &Path, golden: &Path, array: &str) -> (f64, u64) {
    let line = [
        "logits",
        "-m",
        as_text(model),
        "--golden",
        as_text(golden),
        "--array",
        array,
        "--backend",
        "reference",
        "--json",
    ];
    let report: serde_json::Value = serde_json::from_str(&stdout(&line)).expect("JSON");
    (report["rms_over_std"].as_f64().expect("rms_over_std"), report["positions"].as_u64().expect("positions"))
}

/// The layer is in the file that `convert` makes, and in the one that `quantize` makes of that.
#[test]
fn converted_and_quantized_files_keep_the_layer() {
    let out = tempfile::tempdir().expect("temporary folder");
    for folder in folders() {
        let (golden, hf) = (folder.join("golden.safetensors"), folder.join("hf"));
        let (gguf, small) = (out.path().join("out.gguf"), out.path().join("small.gguf"));
        stdout(&["convert", as_text(&hf), as_text(&gguf)]);
        for model in [&hf, &gguf] {
            let rows = |array| agreement(model, &golden, array);
            let n = rows("logits").1;
            for array in ["logits", "mtp_logits", "mtp_logits_2"] {
                let (error, n_rows) = rows(array);
                assert!(error < 1e-5, "{} {array}: {error:e}", model.display());
                assert_eq!(n_rows, if array == "logits" { n } else { n - 1 });
            }
        }
        stdout(&["quantize", as_text(&gguf), as_text(&small), "Q8_0"]);
        let [whole, small_one] = [&gguf, &small].map(|path| checkpoint::open(path).expect("opens"));
        let names = |file: &checkpoint::Checkpoint| file.tensors().iter().map(|t| t.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&whole), names(&small_one));
        assert!(names(&small_one).iter().any(|name| name.ends_with("nextn.eh_proj.weight")), "{}", folder.display());
        let error = agreement(&small, &golden, "mtp_logits").0;
        assert!(error < 0.5, "{}: {error}", folder.display());
    }
}

/// The same words with any drafts, greedy and with a seed.
#[test]
fn drafts_change_no_word() {
    for folder in folders().iter().filter(|folder| folder.join("hf/tokenizer.json").exists()) {
        let model = folder.join("hf");
        for sampling in [&["--temp", "0"][..], &["--temp", "0.9", "--seed", "5"]] {
            let run = |draft: &[&str]| {
                let line =
                    ["run", "--raw", "-p", "ab abc ab abc ab", "-n", "60", "--ignore-eos", "-m", as_text(&model)];
                let out = moebius(&[&line, sampling, draft].concat());
                let [text, told] = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
                assert!(out.status.success(), "{told}");
                (text, told.contains("drafts: "))
            };
            let plain = run(&[]);
            assert!(!plain.1 && plain.0.len() > 20, "{plain:?}");
            let drafts = [
                &["--draft", "mtp"][..],
                &["--draft", "mtp", "--draft-tokens", "1"],
                &["--draft", "ngram"],
                &["--draft", "auto"],
            ];
            for draft in drafts {
                let (text, is_told) = run(draft);
                assert_eq!(text, plain.0, "{} {draft:?}", folder.display());
                assert!(is_told || draft[1] == "ngram");
            }
        }
    }
}

/// The embedded model's file, and quantizations of it that are often right and hardly ever.
fn quantized(folder: &Path) -> [PathBuf; 3] {
    let whole = fixtures::root("models/fable-29m-a10m-q4_k_m.gguf");
    let small = ["Q3_K_S", "TQ1_0"].map(|kind| {
        let file = folder.join(format!("{kind}.gguf"));
        stdout(&["quantize", "--allow-requantize", as_text(&whole), as_text(&file), kind]);
        file
    });
    let [right, wrong] = small;
    [whole, right, wrong]
}

/// How many drafts of a run there were, and how many were right.
fn counted(told: &str) -> (f64, f64) {
    let Some((_, drafts)) = told.split_once("drafts: ").filter(|(_, rest)| rest.contains("accepted")) else {
        return (0.0, 0.0);
    };
    let numbers: Vec<f64> =
        drafts.split(|c: char| !c.is_ascii_digit() && c != '.').filter_map(|n| n.parse().ok()).collect();
    (numbers[1], numbers[0] * numbers[1] / 100.0)
}

/// Another model drafts: the same words, greedy, with a seed, and by a schema, whatever it is right about.
#[test]
fn another_model_drafts() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let [whole, right, wrong] = quantized(folder.path());
    let schema = r#"{"type":"object","properties":{"name":{"type":"string","maxLength":20}},"required":["name"]}"#;
    for sampling in [&["--temp", "0"][..], &["--temp", "0.9", "--seed", "5"], &["--temp", "0", "--json-schema", schema]]
    {
        let run = |draft: &[&str]| {
            let line = ["run", "-p", "Tell me a story about a fox.", "-n", "90", "-m", as_text(&whole)];
            let out = moebius(&[&line, sampling, draft].concat());
            let [text, told] = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
            assert!(out.status.success(), "{told}");
            (text, told)
        };
        let plain = run(&[]);
        assert!(plain.0.len() > 10 && !plain.1.contains("accepted"), "{plain:?}");
        for (file, is_right) in [(&right, true), (&wrong, false)] {
            for n in [&[][..], &["--draft-tokens", "1"], &["--draft-tokens", "4"]] {
                let (text, told) = run(&[&["--draft", as_text(file)], n].concat());
                assert_eq!(text, plain.0, "{sampling:?} {n:?}");
                let (drafted, accepted) = counted(&told);
                let is_greedy = sampling.len() == 2;
                assert!(!is_greedy || n.is_empty() || drafted > 20.0, "{told}");
                assert!(!is_greedy || n.is_empty() || (accepted > drafted / 2.0) == is_right, "{n:?}: {told}");
            }
        }
    }
}

/// What a draft model takes is told, planned and counted.
#[test]
fn a_draft_model_counts() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let [whole, small, _] = quantized(folder.path());
    let planned = |draft: &[&str]| stdout(&[&["plan", "-m", as_text(&whole), "--memory", "400M"], draft].concat());
    let (with, without) = (planned(&["--draft", as_text(&small)]), planned(&[]));
    assert!(with.contains("draft model") && !without.contains("draft model"), "{with}");
    let positions = |plan: &str| {
        let (before, _) = plan.split_once("  a context of").expect("a context");
        let line = plan[before.len()..].lines().next().expect("a line");
        line.split_whitespace().find_map(|word| word.parse::<usize>().ok()).expect("positions")
    };
    assert!(positions(&with) <= positions(&without));
    let line = ["run", "-p", "x", "-n", "2", "-m", as_text(&whole), "--draft", as_text(&small)];
    let out = moebius(&[&line[..], &["--memory", "400M"]].concat());
    let told = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && told.contains("draft model: ") && told.contains("Q3_K_S.gguf"), "{told}");
    let told = error(&[&line[..], &["--memory", "30M"]].concat());
    assert!(told.contains("--memory"), "{told}");
}

/// A folder with a layer that drafts and an image encoder of noise.
fn seeing(folder: &Path) -> PathBuf {
    let (from, to) = (fixtures::root("crates/conformance/tests/data/qwen35_mtp/hf"), folder.join("hf"));
    std::fs::create_dir(&to).expect("folder");
    for entry in std::fs::read_dir(from).expect("hf").flatten() {
        std::fs::copy(entry.path(), to.join(entry.file_name())).expect("copy");
    }
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(to.join("config.json")).expect("config")).expect("JSON");
    config["vision_config"] = serde_json::json!({
        "depth": 1, "hidden_size": 32, "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "intermediate_size": 24,
        "num_heads": 2, "num_position_embeddings": 16, "out_hidden_size": 32, "patch_size": 8, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "deepstack_visual_indexes": [],
    });
    std::fs::write(to.join("config.json"), config.to_string()).expect("write");
    let size = serde_json::json!({"size": {"shortest_edge": 2304, "longest_edge": 16384}});
    std::fs::write(to.join("preprocessor_config.json"), size.to_string()).expect("write");
    let of_block = ["norm1", "norm2", "attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2"];
    let rows = [(32, 0), (32, 0), (96, 32), (32, 32), (24, 32), (32, 24)];
    let block = of_block.iter().zip(rows).map(|(name, shape)| (format!("blocks.0.{name}"), shape));
    let merger = [("merger.norm", (32, 0)), ("merger.linear_fc1", (128, 128)), ("merger.linear_fc2", (32, 128))];
    let merger = merger.into_iter().map(|(name, shape)| (name.to_string(), shape));
    let mut parts: Vec<(String, Vec<usize>)> = vec![
        ("patch_embed.proj.weight".into(), vec![32, 3, 2, 8, 8]),
        ("patch_embed.proj.bias".into(), vec![32]),
        ("pos_embed.weight".into(), vec![16, 32]),
    ];
    for (name, (n, k)) in block.chain(merger) {
        parts.push((format!("{name}.weight"), if k == 0 { vec![n] } else { vec![n, k] }));
        parts.push((format!("{name}.bias"), vec![n]));
    }
    let mut seed = 1u32;
    let mut noise = |n: usize| -> Vec<u8> {
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (f64::from(seed) / f64::from(u32::MAX) - 0.5) as f32
        };
        (0..n).flat_map(|_| next().to_le_bytes()).collect()
    };
    let numbers: Vec<Vec<u8>> = parts.iter().map(|(_, shape)| noise(shape.iter().product())).collect();
    let weights = std::fs::read(to.join("model.safetensors")).expect("weights");
    let weights = safetensors::SafeTensors::deserialize(&weights).expect("safetensors");
    let view = |shape: &[usize], bytes| {
        safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.to_vec(), bytes).expect("a tensor")
    };
    let of_encoder = parts.iter().zip(&numbers);
    let of_encoder = of_encoder.map(|((name, shape), bytes)| (format!("model.visual.{name}"), view(shape, bytes)));
    let all: Vec<_> = weights.tensors().into_iter().chain(of_encoder).collect();
    let bytes = safetensors::serialize(all, None).expect("serialize");
    std::fs::write(to.join("model.safetensors"), bytes).expect("write");
    to
}

/// The same words after an image, whatever drafts them; the head does.
#[test]
fn drafts_change_no_word_after_images() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let model = seeing(folder.path());
    let image = |name: &str| fixtures::root(&format!("crates/conformance/tests/data/images/gemma4/images/{name}.png"));
    let (odd, rgba) = (image("odd"), image("rgba"));
    let mut texts = Vec::new();
    for images in [&[&odd][..], &[&rgba, &odd]] {
        let run = |draft: &[&str]| {
            let line = ["run", "--raw", "-p", "ab abc ab abc ab", "-n", "60", "--ignore-eos", "--temp", "0", "-m"];
            let shown = images.iter().flat_map(|image| ["--image", as_text(image)]).collect::<Vec<_>>();
            let out = moebius(&[&line[..], &[as_text(&model)], &shown[..], draft].concat());
            let [text, told] = [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
            assert!(out.status.success(), "{told}");
            (text, told.contains("drafts: "))
        };
        let plain = run(&[]);
        assert!(!plain.1 && plain.0.len() > 20, "{plain:?}");
        for draft in [&["--draft", "mtp"][..], &["--draft", "mtp", "--draft-tokens", "2"], &["--draft", "ngram"]] {
            let (text, is_told) = run(draft);
            assert_eq!(text, plain.0, "{draft:?}");
            assert!(is_told || draft[1] == "ngram", "{draft:?}");
        }
        texts.push(plain.0);
    }
    assert_ne!(texts[0], texts[1]);
}

#[test]
fn what_cannot_draft_says_so() {
    let other = fixtures::root("crates/conformance/tests/data/qwen3/model-bf16.gguf");
    let of_other_tokens = fixtures::root("crates/conformance/tests/data/qwen35_mtp/hf");
    for (draft, part) in [
        (as_text(&other), "tokens of"),
        (as_text(&of_other_tokens), r#"its vocabulary is another: token 0 is "\0" there and "!" in"#),
        ("no-such-model.gguf", "failed to open the draft model"),
    ] {
        let told = error(&["run", "-p", "x", "--draft", draft, "--backend", "cpu"]);
        assert!(told.contains(part), "{told}");
    }
    let told = error(&["run", "-p", "x", "--draft", as_text(&other), "--backend", "cuda"]);
    assert!(told.contains("tokens of") || told.contains("failed to use"), "{told}");
    let told = error(&["run", "-p", "x", "--draft", "mtp"]);
    assert!(told.contains("has no layer for multi-token prediction"), "{told}");
    let told = error(&["run", "-p", "x", "--draft", "mtp", "--draft-tokens", "17"]);
    assert!(told.contains("17 is not in 1..=16"), "{told}");
    let golden = fixtures::root("crates/conformance/tests/data/qwen3/golden.safetensors");
    let model = fixtures::root("crates/conformance/tests/data/qwen3/model-bf16.gguf");
    let told = error(&["logits", "-m", as_text(&model), "--golden", as_text(&golden), "--array", "mtp_logits"]);
    assert!(told.contains("no layer for multi-token prediction"), "{told}");
}

/// Drafts of the text itself, on the embedded model.
#[test]
fn repeated_texts_are_drafted() {
    let line = ["run", "--raw", "-p", "The fox said. The fox said. The fox said. The fox", "-n", "40", "--temp", "0"];
    let plain = moebius(&line);
    for draft in [&["--draft", "ngram", "--draft-tokens", "4"][..], &["--draft", "auto"]] {
        let drafted = moebius(&[&line[..], draft].concat());
        assert!(plain.status.success() && drafted.status.success());
        assert_eq!(plain.stdout, drafted.stdout);
    }
}
