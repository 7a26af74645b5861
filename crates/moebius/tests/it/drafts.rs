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
    for backend in ["cuda", "metal"] {
        let told = error(&["run", "-p", "x", "--draft", as_text(&other), "--backend", backend]);
        let has_none = told.contains("failed to use") || told.contains("macOS");
        assert!(told.contains("--draft FILE requires --backend cpu") || has_none, "{told}");
    }
    let told = error(&["run", "-p", "x", "--draft", "mtp"]);
    assert!(told.contains("has no layer for multi-token prediction"), "{told}");
    let told = error(&["run", "-p", "x", "--draft", "mtp", "--backend", "metal"]);
    assert!(told.contains("no layer for multi-token prediction") || told.contains("--backend cpu"), "{told}");
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
