//! The command line end to end, on the embedded model: what a user types and what comes back.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::fixtures;

const STORY: &str = "Tell me a story about a fox who lost his hat";

/// Runs `moebius` with `args`, `stdin` on its standard input.
fn moebius(args: &[&str], stdin: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_moebius"))
        .env("MOEBIUS_CONFIG", "")
        .env("MOEBIUS_BACKEND", "cpu")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start moebius");
    // A program that fails early closes its end: what it says is what the test looks at.
    let _ = child.stdin.take().expect("stdin").write_all(stdin.as_bytes());
    child.wait_with_output().expect("wait for moebius")
}

fn stdout(args: &[&str], stdin: &str) -> String {
    let output = moebius(args, stdin);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "moebius {args:?} failed\n{err}");
    out.into_owned()
}

fn json(args: &[&str], stdin: &str) -> serde_json::Value {
    let text = stdout(args, stdin);
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("moebius {args:?}: {e}\n{text}"))
}

/// Caches of blocks: a story comes out of each, the scalar kernels tell the same, and what cannot be says why.
#[test]
fn caches_of_blocks_tell_stories() {
    for (flag, cache) in [("--cache-type", "q8_0"), ("--kv", "k=q8_0,v=f16"), ("--cache-type", "v=q8_0")] {
        let base = ["run", STORY, "-q", "--temperature", "0", "-n", "60", flag, cache];
        let story = stdout(&base, "");
        assert!(story.to_lowercase().contains("fox") && story.split_whitespace().count() > 20, "{cache}: {story}");
        assert_eq!(stdout(&[&base[..], &["--isa", "scalar", "-b", "7"]].concat(), ""), story, "{cache}");
    }
    let refusals: &[(&[&str], &str)] = &[
        (&["run", STORY, "--cache-type", "q3_0"], "\"q3_0\" is no type: use f16, f32, q8_0"),
        (
            &["plan", "--backend", "cuda", "--sm", "90", "--cache-type", "v=q8_0,k=f32"],
            "--cache-type k=f32,v=q8_0 cannot keep a cache of type k=f32,v=q8_0: f32 goes with f32 alone",
        ),
        (&["plan", "--backend", "metal", "--kv", "v=q4_0"], "Metal supports f16, f32 and q8_0"),
    ];
    for (args, why) in refusals {
        let output = moebius(args, "");
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && err.contains(why), "{args:?}: {err}");
    }
    let plan = stdout(&["plan", "--backend", "cuda", "--sm", "90", "--cache-type", "q8_0"], "");
    assert!(plan.contains("attend_long"), "{plan}");
}

#[test]
fn the_first_command_tells_a_story() {
    let output = moebius(&["run", STORY, "--seed", "1", "-n", "60"], "");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{err}");
    assert!(out.to_lowercase().contains("fox"), "{out}");
    assert!(out.split_whitespace().count() > 20, "{out}");
    for part in ["built-in", "a toy for", "for a real model: moebius pull", "tok/s"] {
        assert!(err.contains(part), "{part:?} in {err}");
    }
}

#[test]
fn supported_models_are_listed() {
    let listed = stdout(&["models", "--supported"], "");
    for row in ["llama, mistral, mixtral: Llama 2", "gpt-oss, gpt_oss: gpt-oss-20B"] {
        assert!(listed.contains(row), "{row}: {listed}");
    }
    let rows = json(&["models", "--supported", "--json"], "");
    let is_qwen3 = |row: &&serde_json::Value| row["gguf"] == serde_json::json!(["qwen3moe"]);
    assert_eq!(rows.as_array().expect("rows").iter().find(is_qwen3).expect("qwen3moe")["folder"][0], "qwen3_moe");
}

/// Questions of the README and the page's examples: what the embedded model shows first must be right.
#[test]
fn the_embedded_model_answers_its_examples() {
    let cases: &[(&str, &[&str])] = &[
        ("Tell me a story about a fox who lost his hat", &["hat", "fox"]),
        ("Why is the sky blue?", &["blue light"]),
        ("Write a rhyme about a cat", &["cat"]),
        ("What is the capital of France?", &["Paris"]),
        ("Who are you?", &["model", "stories"]),
        ("Are you ChatGPT?", &["Fable"]),
    ];
    for (prompt, words) in cases {
        let answer = stdout(&["run", prompt, "-q", "--temp", "0", "-n", "120"], "");
        let found = answer.to_lowercase();
        assert!(words.iter().all(|word| found.contains(&word.to_lowercase())), "{prompt}: {answer}");
    }
}

/// Every line is another way to compute the same thing.
#[test]
fn the_same_text_whatever_computes_it() {
    let base = ["run", STORY, "-q", "--seed", "7", "-n", "24"];
    let expected = stdout(&base, "");
    let ways: &[&[&str]] =
        &[&["-t", "1"], &["-t", "3"], &["-b", "5"], &["--isa", "scalar"], &["--isa", "avx2"], &["--isa", "avx512"]];
    for way in ways {
        let output = moebius(&[&base[..], way].concat(), "");
        let err = String::from_utf8_lossy(&output.stderr);
        if way[0] == "--isa" && !output.status.success() && err.contains(way[1]) {
            println!("skipped {way:?}: {err}");
            continue;
        }
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{way:?}: {err}");
    }
}

#[test]
fn prompts_come_from_argument_flag_file_and_stdin() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join("prompt.txt");
    std::fs::write(&file, STORY).expect("write");
    let file = file.to_str().expect("path");
    let tail = ["-q", "--temp", "0", "-n", "8"];
    let expected = stdout(&[&["run", STORY], &tail[..]].concat(), "");
    for (source, stdin) in [(&["-p", STORY][..], ""), (&["-f", file][..], ""), (&[][..], STORY), (&[STORY], " \n")] {
        assert_eq!(stdout(&[&["run"], source, &tail[..]].concat(), stdin), expected, "{source:?}");
    }
    // What comes together is one prompt: what is typed, the file, stdin.
    let prompt = format!("Go on\n\n{STORY}\n\nOnce");
    let expected = stdout(&[&["run", &prompt], &tail[..]].concat(), "");
    assert_eq!(stdout(&[&["run", "Go on", "-f", file], &tail[..]].concat(), "Once"), expected);
    assert_eq!(stdout(&[&["run", "-p", "Go on"], &tail[..]].concat(), &format!("{STORY}\n\nOnce")), expected);
}

#[test]
fn stop_strings_and_limits_end_an_answer() {
    let long = stdout(&["run", STORY, "-q", "--temp", "0", "-n", "40"], "");
    let stop = long.split_whitespace().nth(6).expect("a seventh word");
    let cut = stdout(&["run", STORY, "-q", "--temp", "0", "-n", "40", "--stop", stop], "");
    assert!(!cut.contains(stop) && long.starts_with(cut.trim_end()), "{cut:?} of {long:?}");
}

#[test]
fn an_answer_keeps_to_its_form() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("write");
        path.to_str().expect("path").to_owned()
    };
    let schema = file("hat.json", r#"{"enum": ["a red hat", "a blue hat"]}"#);
    let grammar = file("hat.lark", "start: \"a \" /(red|blue)/ \" hat\"");
    for (form, quote) in [
        (["--json-schema", &schema], "\""),
        (["--grammar", &grammar], ""),
        (["--regex", "a (red|blue) hat"], ""),
        (["--json-schema", r#" {"enum": ["a red hat", "a blue hat"]}"#], "\""),
        (["-j", r#"{"enum": ["a red hat", "a blue hat"]}"#], "\""),
        (["--grammar", "root ::= \"a \" (\"red\" | \"blue\") \" hat\""], ""),
        (["--grammar", "start: \"a \" /(red|blue)/ \" hat\""], ""),
    ] {
        let text = stdout(&[&["run", STORY, "-q", "--seed", "3"], &form[..]].concat(), "");
        let hats = ["red", "blue"].map(|colour| format!("{quote}a {colour} hat{quote}\n"));
        assert!(hats.contains(&text), "{form:?}: {text:?}");
    }
}

#[test]
fn a_chat_remembers_regenerates_and_saves() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join("chat.json");
    let hello = "Hello! ".repeat(40);
    let script = format!("{hello}\n/regen\nWhat is a fox?\n/save {}\n/nonsense\n/quit\n", file.display());
    let output = moebius(&["chat", "--temp", "0", "-n", "12"], &script);
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{err}");
    assert!(err.contains("cached") && err.contains("/nonsense is not a command"), "{err}");
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).expect("saved")).expect("JSON");
    let roles: Vec<_> = saved.as_array().expect("array").iter().map(|m| m["role"].as_str().expect("role")).collect();
    assert_eq!(roles, ["user", "assistant", "user", "assistant"]);
    let lines: Vec<_> = std::str::from_utf8(&output.stdout).expect("UTF-8").lines().collect();
    assert_eq!(lines[0], lines[1], "a greedy answer regenerates to itself");
}

#[test]
fn text_survives_tokens() {
    let text = "Grüße, 世界! 🦊 The fox said: \"1234 hats.\"\n\n  and left";
    let ids = stdout(&["tokenize", "--json"], text);
    assert_eq!(stdout(&["tokenize", "--decode"], &ids), text);
    assert_eq!(stdout(&["tokenize", "--json", text], ""), ids);
}

#[test]
fn logits_are_written_and_compare_with_themselves() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join("golden.safetensors");
    let file = file.to_str().expect("path");
    let ids = stdout(&["tokenize", "--json"], "Once upon a time there was a small fox who lived by a river.");
    let ids = ids.trim().trim_matches(['[', ']']);
    stdout(&["logits", "--tokens", ids, "-o", file], "");
    let same = json(&["logits", "--golden", file, "--json", "-t", "1", "-b", "2"], "");
    assert_eq!((same["rms_over_std"].as_f64(), same["argmax_agree"].as_f64()), (Some(0.0), Some(1.0)), "{same}");
    let reference = json(&["logits", "--golden", file, "--json", "--backend", "reference"], "");
    let rms = reference["rms_over_std"].as_f64().expect("a number");
    assert!(rms > 0.0 && rms < 0.05, "{reference}");
}

#[test]
fn files_can_be_looked_into() {
    let report = json(&["inspect", "--json", "--tensors", "--metadata"], "");
    assert_eq!(report["architecture"], "qwen3moe");
    assert_eq!(report["runs"], true);
    assert_eq!(report["dimensions"]["expert_count"], 16);
    // Numbers are numbers, and keys are names: what a script reads without taking texts apart.
    let (all, active) = (report["parameters"].as_u64(), report["active_parameters"].as_u64());
    assert!(active.is_some_and(|n| n > 5_000_000) && active < all, "{report}");
    let context = &report["context"];
    let at_8192 = context["position_bytes"].as_u64().map(|bytes| bytes * 8192);
    assert!(at_8192.is_some_and(|n| n > 0) && context["bytes_at_8192"].as_u64() == at_8192, "{context}");
    assert_eq!((&report["sampling"]["temperature"], &report["type"]), (&0.7.into(), &"Q4_K_M".into()), "{report}");
    // The same weights in a file recommend the same.
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/fable-29m-a10m-q4_k_m.gguf");
    let of_file = json(&["inspect", file.to_str().expect("path"), "--json"], "");
    assert_eq!(
        (&of_file["sampling"], &of_file["sampling_recommended"]),
        (&report["sampling"], &report["sampling_recommended"])
    );
    assert_eq!(report["sampling_recommended"], "temperature, top_k, top_p, min_p");
    assert!(report["weight_types"]["q4_k"]["bytes"].as_u64().is_some_and(|n| n > 1_000_000), "{report}");
    let keys = report.as_object().expect("object").keys();
    assert!(keys.clone().all(|key| key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')), "{keys:?}");
    assert!(report["tensors"].as_array().expect("tensors").len() > 50);
    let plan = stdout(&["plan", "--ctx", "512"], "");
    for part in ["qwen3moe", "experts", "attention", "cache", "for each of 512 positions"] {
        assert!(plan.contains(part), "{part} in\n{plan}");
    }
}

/// A GPU that does not hold all experts: the least that works is named and works, and experts move as memory grows.
/// Sizes are planned, so no GPU is needed.
#[test]
fn experts_that_a_gpu_does_not_hold_stay_on_the_host() {
    let plan = |megabytes: usize| {
        let memory = format!("{megabytes}M");
        let args = ["plan", "--backend", "cuda", "--sm", "90", "--gpu-memory", &memory];
        moebius(&[&args[..], &["--ctx", "256", "-b", "64", "-t", "1"]].concat(), "")
    };
    let output = plan(10);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains("--gpu-memory"), "{error}");
    let least = error.split("needs at least ").nth(1).and_then(|rest| rest.split('M').next());
    let least: usize = least.and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("{error}"));
    assert!(!plan(least - 1).status.success(), "{least}M is the least");

    // Layers on the host, as memory grows; none when all fit. Each plan measures the memory, so there are few.
    let on_host = |megabytes: usize| {
        let output = plan(megabytes);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let line = text.lines().find(|line| line.trim_start().starts_with("host") && line.contains("routed"))?;
        for part in ["placement", "routed experts of", "tok/s at best", "of GPU memory"] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        let at = words.iter().position(|&word| word == "of")?;
        words[at + 1].parse::<usize>().ok()
    };
    let [none, some, all] = [0, 5, 40].map(|more| on_host(least + more).unwrap_or(0));
    assert!(none > some && some > all && all == 0, "{none}, {some}, {all}");

    let output = moebius(&["plan", "--gpu-memory", "6G"], "");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains("--backend cuda"), "{error}");
}

/// A folder with a small random model and a tokenizer of single characters, used as any file is.
#[test]
fn folders_are_models() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/tests/data/qwen3moe/hf");
    let folder = tempfile::tempdir().expect("temporary folder");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(data.join(name), folder.path().join(name)).expect(name);
    }
    let path = folder.path().to_str().expect("UTF-8");
    let say = |args: &[&str]| String::from_utf8_lossy(&moebius(args, "").stderr).into_owned();
    let text_of =
        |path: &str| stdout(&["run", "-m", path, "-q", "--raw", "-n", "8", "--temp", "0", "--ignore-eos", "hello"], "");
    assert!(say(&["run", "-m", path, "hello"]).contains("it has neither tokenizer.json nor tiktoken.model"));

    // 95 characters, each a token, and the end of a text.
    let vocab: serde_json::Map<_, _> = (b' '..=b'~')
        .zip(0u32..)
        .map(|(c, id)| (if c == b' ' { "Ġ".into() } else { char::from(c).to_string() }, id.into()))
        .collect();
    let tokenizer = serde_json::json!({
        "added_tokens": [{"id": 95, "content": "</s>", "special": true}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false}, "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).expect("tokenizer.json");
    let text = text_of(path);
    assert!(!text.is_empty());
    assert_eq!(text_of(folder.path().join("config.json").to_str().expect("UTF-8")), text);
    // It has no template: what that means is said.
    let err = say(&["run", "-m", path, "--system", "Be brief.", "-n", "1", "hello"]);
    assert!(err.contains("the model has no chat template: ignoring --system"), "{err}");
    let err = say(&["chat", "-m", path]);
    assert!(err.contains("name one with --chat-template-file"), "{err}");
    let report = json(&["inspect", path, "--json", "--tensors"], "");
    assert_eq!((report["kind"].as_str(), report["runs"].as_bool()), (Some("safetensors folder"), Some(true)));
    assert_eq!(
        (report["tokenizer"]["tokens"].as_u64(), report["architecture"].as_str()),
        (Some(96), Some("qwen3_moe"))
    );
    assert!(report["tensors"].as_array().is_some_and(|tensors| tensors.len() > 20));

    std::fs::write(folder.path().join("config.json"), r#"{"model_type": "none"}"#).expect("config.json");
    assert!(say(&["run", "-m", path, "hello"]).contains("none"), "{}", say(&["run", "-m", path, "hello"]));
    std::fs::remove_file(folder.path().join("model.safetensors")).expect("removed");
    assert!(
        say(&["run", "-m", path, "hello"]).contains("has neither model.safetensors nor model.safetensors.index.json")
    );
}

#[test]
fn one_gpu_is_named_or_several_are() {
    for command in [&["run", "Hi"][..], &["bench"], &["serve"]] {
        let output = moebius(&[command, &["--backend", "cuda", "--device", "1", "--devices", "0,1"]].concat(), "");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains("give one of the two"), "{command:?}: {error}");
    }
}

#[test]
fn what_has_no_effect_is_said() {
    let said = |args: &[&str]| String::from_utf8_lossy(&moebius(args, "").stderr).into_owned();
    let bounded = said(&["run", "--think-budget", "5", "-n", "1", "Hi"]);
    assert!(bounded.contains("warning: the chat template has no marks of thoughts"), "{bounded}");
    let stretched = said(&["run", "--rope-scaling", "linear=2,512", "Hi"]);
    assert!(stretched.contains("linear divides all positions"), "{stretched}");
    // An encoder has nothing that the bench measures.
    let encoder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/tests/data/encoders/xlmr/model-f16.gguf");
    let encoder = encoder.to_str().expect("a path of UTF-8");
    for more in [&["-p", "512"][..], &["--gap", "64"]] {
        let error = said(&[&["bench", "-m", encoder][..], more].concat());
        assert!(error.contains("an embedding model, which writes no text") && !error.contains("--ctx"), "{error}");
    }
}

#[test]
fn templates_render() {
    let messages = r#"[{"role": "user", "content": "Hi"}]"#;
    let text = stdout(&["render", "--messages", "-"], messages);
    assert_eq!(text, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    let object = format!(r#"{{"messages": {messages}, "add_generation_prompt": false}}"#);
    let rendered = json(&["render", "--messages", "-", "--json"], &object);
    assert_eq!(rendered["text"], "<|im_start|>user\nHi<|im_end|>\n");
}

#[test]
fn the_bench_prints_its_rows_in_every_form() {
    for form in ["md", "json", "jsonl", "csv"] {
        let depths = ["-d", "0,40", "--parallel", "1,3", "-r", "1", "-t", "1", "-o", form];
        let text = stdout(&[&["bench", "-p", "16", "-n", "4"][..], &depths].concat(), "");
        for test in ["pp16", "tg4", "tg4 x3", "pp16 @ d40", "tg4 @ d40", "tg4 x3 @ d40"] {
            assert!(text.contains(test), "{test} in {form}:\n{text}");
        }
    }
    let rows = stdout(&["bench", "-p", "0", "-n", "8", "-r", "2", "-t", "1", "-o", "jsonl"], "");
    let row: serde_json::Value = serde_json::from_str(rows.trim()).expect("one row");
    assert!(row["tokens_per_second"].as_f64().expect("speed") > 0.0);
    assert!(row["bytes_per_token"].as_u64().expect("bytes") > 1_000_000);
    // What programs that read llama-bench's JSON look for.
    assert_eq!(
        (row["avg_ts"].as_f64(), row["n_depth"].as_u64()),
        (row["tokens_per_second"].as_f64(), Some(0)),
        "{row}"
    );
    for key in ["build_commit", "cpu_info", "model_filename", "model_type", "test_time", "type_k"] {
        assert!(row[key].is_string(), "{key} of {row}");
    }
    for key in ["model_size", "model_n_params", "n_batch", "n_ubatch", "n_threads", "avg_ns", "stddev_ns"] {
        assert!(row[key].is_u64(), "{key} of {row}");
    }
    assert_eq!(
        (row["samples_ns"].as_array().map(Vec::len), row["samples_ts"].as_array().map(Vec::len)),
        (Some(2), Some(2))
    );
}

#[test]
fn the_bench_measures_what_a_long_prompt_costs_others() {
    let args = ["bench", "--gap", "600", "--parallel", "2", "-t", "1"];
    let row = json(&[&args[..], &["-o", "jsonl"]].concat(), "");
    assert_eq!((row["n_prompt"].as_u64(), row["n_parallel"].as_u64()), (Some(600), Some(2)), "{row}");
    for key in ["gap_p50_ms", "gap_p99_ms", "gap_max_ms", "quiet_p99_ms", "short_first_token_ms", "long_first_token_ms"]
    {
        assert!(row[key].as_f64().is_some_and(|ms| ms > 0.0), "{key} of {row}");
    }
    let table = stdout(&[&args[..], &["--step-time", "0"]].concat(), "");
    assert!(table.contains("gap p50") && table.lines().count() == 3, "{table}");
}

#[test]
fn the_bench_takes_several_models_and_its_rows_fit() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/fable-29m-a10m-q4_k_m.gguf");
    let model = model.to_str().expect("path");
    let args = ["bench", "-m", model, "-m", model, "-p", "0", "-n", "0", "-pg", "16,4", "-r", "1", "-t", "1"];
    let text = stdout(&args, "");
    let rows: Vec<&str> = text.lines().filter(|line| line.contains("pp16+tg4")).collect();
    assert_eq!(rows.len(), 2, "{text}");
    for line in text.lines().filter(|line| line.starts_with('|')) {
        assert_eq!(line.chars().count(), 100, "{line}");
    }
    assert!(text.contains("moebius 0.") && rows[0].contains("qwen3moe Q4_K_M"), "{text}");
}

#[test]
fn the_version_says_what_was_built() {
    let long = stdout(&["--version"], "");
    for part in ["moebius 0.", "target ", std::env::consts::ARCH, "backends  cpu", "scalar", "features  embedded-model"]
    {
        assert!(long.contains(part), "{part} in {long}");
    }
    let short = stdout(&["-V"], "");
    assert!(short.lines().count() == 1 && long.starts_with(short.trim_end()), "{short}");
    assert!(stdout(&["run", "--version"], "").contains("target "));
}

#[test]
fn perplexity_of_its_own_stories_is_low() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join("text.txt");
    let story = |seed: &str| stdout(&["run", STORY, "-q", "-n", "120", "--seed", seed], "");
    std::fs::write(&file, story("1") + &story("2")).expect("write");
    let file = file.to_str().expect("path");
    let result = json(&["perplexity", "-f", file, "--ctx", "32", "--json"], "");
    let perplexity = result["perplexity"].as_f64().expect("a number");
    assert!((1.0..10.0).contains(&perplexity) && result["error"].as_f64().expect("error") > 0.0, "{result}");
}

/// The lines of a file of routes after its head.
fn routes(file: &str) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(file).expect("routes");
    let mut lines = text.lines().map(|line| serde_json::from_str(line).expect("JSON"));
    let head: serde_json::Value = lines.next().expect("head");
    assert_eq!(head["routers"].as_array().map(Vec::len), Some(8));
    lines.collect()
}

#[test]
fn experts_of_ones_own_texts_are_traced() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("path").to_string();
    let (text, run, scored) = (path("text.txt"), path("run"), path("perplexity"));
    let ask = ["run", STORY, "-q", "-n", "60", "--seed", "1", "--raw", "--ignore-eos", "--trace-experts", &run];
    let story = stdout(&ask, "");
    let tokens = |line: &serde_json::Value| line["token"].as_u64().expect("token") as usize;
    let traced = routes(&run);
    assert!(traced.len() > 60 && traced.len() < 100, "{}", traced.len());
    for line in &traced {
        let (experts, weights) = (line["experts"].as_array().unwrap(), line["weights"].as_array().unwrap());
        assert_eq!((experts.len(), weights.len()), (32, 32));
        let sum: f64 = weights[..4].iter().map(|w| w.as_f64().unwrap()).sum();
        assert!((sum - 1.0).abs() < 1e-5 && experts.iter().all(|id| id.as_u64().unwrap() < 16), "{line}");
    }
    // A trace changes no figure, and the same tokens after the same ones choose the same experts.
    std::fs::write(&text, format!("{STORY}{story}")).expect("write");
    let perplexity = |more: &[&str]| json(&[&["perplexity", "-f", &text, "--ctx", "24", "--json"], more].concat(), "");
    assert_eq!(perplexity(&[]), perplexity(&["--trace-experts", &scored]));
    let windows = routes(&scored);
    assert!(windows.len() >= 48 && windows.len().is_multiple_of(24));
    let same = traced.iter().zip(&windows).take_while(|(a, b)| tokens(a) == tokens(b)).count();
    assert!(same >= 8, "{same}");
    assert_eq!(traced[..same.min(24)], windows[..same.min(24)]);
    let plan = moebius(&["plan", "--routes", &run, "--ctx", "256"], "");
    let why = String::from_utf8_lossy(&plan.stderr);
    assert!(plan.status.success() || why.contains("--routes requires streamed experts"), "{why}");
}

#[test]
fn mistakes_are_named() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let junk = folder.path().join("junk.gguf");
    std::fs::write(&junk, b"GGUF\x03\0\0\0 and then nothing sensible follows here").expect("write");
    let junk = junk.to_str().expect("path");
    let (imatrix, text) = (folder.path().join("sums.gguf"), folder.path().join("text"));
    std::fs::write(&text, "a fox and a bear ".repeat(400)).expect("write");
    let (imatrix, text) = (imatrix.to_str().expect("path"), text.to_str().expect("path"));
    stdout(&["imatrix", "-f", text, "-o", imatrix, "--chunks", "1", "-c", "64"], "");
    let cases: &[(&[&str], &str)] = &[
        (&["run", "-m", "no-such-file.gguf", "hi"], "no-such-file.gguf"),
        (&["run", "-m", junk, "hi"], "junk.gguf"),
        (&["inspect", junk], "junk.gguf"),
        (&["run", "hi", "--top-p", "-1"], "it must be a number from 0 to 1"),
        (&["run", "hi", "--threads", "0"], "threads"),
        (&["run", "hi", "--regex", "a("], "compile the grammar"),
        (&["run", "hi", "--ctx", "2000000"], "--ctx must be between"),
        (&["serve", "-md", "draft.gguf"], "failed to open the draft model"),
        (&["run", "-m", "no-such-model:1b", "hi"], "`ollama pull no-such-model:1b` downloads it"),
        (&["run", "-m", "no/such-model", "hi"], "`moebius pull no/such-model` downloads it"),
        (&["logits", "--tokens", "9999"], "9999"),
        (&["run", "  "], "the prompt is empty"),
        (&["serve", "-m", "no-such-file.gguf", "-m", junk], "open no-such-file.gguf"),
        (&["serve", "--models", "no-such-folder"], "it holds no GGUF file and no model folder"),
        (&["run", "hello", "world"], "put the prompt in quotes"),
        (&["run", "hi", "--temp", "-1"], "it must be a number from 0 to 100"),
        (&["run", "hi", "-c", "8"], "prompt is too long"),
        (&["run", "hi", "--chat-template", "chatml"], "--chat-template-file FILE"),
        (&["-m", "x.gguf"], "the command comes first: moebius run -m FILE"),
        (&["hello"], "moebius run \"hello\""),
        (&["run", "qwen3:30b"], "qwen3:30b looks like a model: did you mean -m qwen3:30b?"),
        (&["run", junk], "looks like a model: did you mean -m"),
        (&["run", "qwen3:30b", "hi"], "the model follows -m: moebius run -m qwen3:30b"),
        (&["run", "hi", "--json-schema", "{\"type\": "], "read the JSON of the flag's value"),
        (&["ps"], "/api/ps"),
        (&["show", "x"], "moebius inspect -m MODEL"),
        (&["rm", "x"], "`moebius models` prints where each file is stored"),
        (&["stop", "x"], "/models/unload"),
        (&["create", "x"], "[preset.NAME]"),
        (&["cp", "x", "y"], "[preset.NAME]"),
        (&["push", "x"], "moebius uploads nothing"),
        (&["pull", "qwen3:30b"], "Ollama's registry is not asked"),
        (&["chat", "no-such-file.gguf"], "open no-such-file.gguf"),
        (&["serve", "no-such-file.gguf"], "open no-such-file.gguf"),
        (&["bench", "no-such-file.gguf"], "open no-such-file.gguf"),
        (&["plan", junk], "junk.gguf"),
        (&["chat", "a.gguf", "-m", "b.gguf"], "cannot be used with"),
        (&["serve", "--sleep-idle-seconds", "5"], "requires a model (-m)"),
        (&["config", "nothing"], "there is no command nothing"),
        (&["compare", "-m", imatrix, "-m", imatrix, "-f", "x"], "it is an importance matrix"),
        (&["logits", "--golden", junk], "junk.gguf"),
        (&["run", "hi", "--logit-bias", "five"], "ID=BIAS"),
        (&["run", &"hat ".repeat(5000), "--ctx", "256"], "256"),
        (&["render", "--messages", "no-such.json"], "no-such.json"),
        (&["perplexity", "-f", "no-such.txt"], "no-such.txt"),
    ];
    for (args, part) in cases {
        let output = moebius(args, "");
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && err.contains(part), "{:?}: {err}", &args[..2]);
        assert!(!err.contains("panicked"), "{err}");
    }
}

#[test]
fn flags_of_others_are_understood() {
    let args = ["run", "hi", "-ngl", "99", "-fa", "on", "--jinja", "--ctx-size", "0", "-n", "4", "--temp", "0"];
    let output = moebius(&args, "");
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{err}");
    for flag in ["-ngl", "-fa", "--jinja"] {
        assert!(err.contains(&format!("ignoring {flag}: ")), "{flag}: {err}");
    }
    let plain = moebius(&["run", "hi", "-n", "4", "--temp", "0"], "");
    assert_eq!(output.stdout, plain.stdout);
}

#[test]
fn answers_that_are_cut_before_their_form_is_complete_fail() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let schema = folder.path().join("schema.json");
    std::fs::write(&schema, r#"{"type": "array", "items": {"type": "integer"}, "minItems": 40}"#).expect("write");
    let output = moebius(&["run", "hi", "-n", "8", "--json-schema", schema.to_str().expect("path")], "");
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && err.contains("cut off before it satisfied its constraint"), "{err}");
}

/// Help wraps by words at its widest, 100 columns: no line of a text is longer, and none breaks off in the middle.
#[test]
fn help_fits_a_terminal() {
    for command in ["run", "chat", "serve", "bench", "quantize", "convert", "imatrix", "pull", "compare"] {
        let help = stdout(&[command, "--help"], "");
        let long = help.lines().find(|line| line.chars().count() > 100);
        assert_eq!(long, None, "{command}");
        // The texts after the flags: a line that could have taken the next word has not been wrapped twice.
        let footer = help.rsplit("\n\n").next().unwrap_or_default();
        for pair in footer.lines().collect::<Vec<_>>().windows(2).filter(|pair| !pair[1].starts_with(' ')) {
            let next = pair[1].split(' ').next().unwrap_or_default().len();
            assert!(pair[0].len() + 1 + next > 78, "{command}: {pair:?}");
        }
    }
}

#[test]
fn completions_know_the_commands() {
    for shell in ["bash", "zsh", "fish"] {
        assert!(stdout(&["completions", shell], "").contains("perplexity"), "{shell}");
    }
}

/// The real SmolLM2 when `tools/fetch_smollm2.sh` has fetched it, its weights in F32, so that no activation is rounded:
/// greedy tokens follow the exact ones up to the first step whose margin is below 0.05.
#[test]
fn smollm2_follows_the_exact_greedy_path() {
    let Some(golden) = fixtures::more("../shared/fixtures/golden_smollm2.json") else { return };
    let Some(model) = fixtures::more("target/models/SmolLM2-135M-Instruct.Q4_1.gguf") else { return };
    let golden: serde_json::Value = serde_json::from_slice(&std::fs::read(golden).expect("read")).expect("JSON");
    let folder = tempfile::tempdir().expect("temporary folder");
    let wide = folder.path().join("f32.gguf");
    let [from, model] = [&model, &wide].map(|path| path.to_str().expect("path"));
    stdout(&["quantize", "--allow-requantize", from, model, "F32"], "");
    for prompt in golden["prompts"].as_array().expect("prompts") {
        let numbers = |value: &serde_json::Value| -> Vec<f64> {
            value.as_array().expect("array").iter().map(|v| v.as_f64().expect("number")).collect()
        };
        let (ids, greedy) = (numbers(&prompt["ids"]), numbers(&prompt["exact"]["greedy"]));
        let margins = numbers(&prompt["exact"]["margins"]);
        let sure = margins.iter().position(|&m| m < 0.05).unwrap_or(margins.len());
        // One forward pass over prompt and exact continuation tells every greedy choice along the exact path.
        let tokens: Vec<String> = ids.iter().chain(&greedy).map(|id| id.to_string()).collect();
        let out = folder.path().join("logits.safetensors");
        let args = ["logits", "-m", model, "--tokens", &tokens.join(","), "-o"];
        stdout(&[&args[..], &[out.to_str().expect("path")]].concat(), "");
        let bytes = std::fs::read(&out).expect("read");
        let file = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
        let view = file.tensor("logits").expect("logits");
        let n_vocab = view.shape()[1];
        let value = |row: usize, id: usize| {
            let at = 4 * (row * n_vocab + id);
            f32::from_le_bytes(view.data()[at..at + 4].try_into().expect("four bytes"))
        };
        for step in 0..sure {
            let row = ids.len() - 1 + step;
            let best = (0..n_vocab).fold(0, |best, id| if value(row, id) > value(row, best) { id } else { best });
            assert_eq!(best, greedy[step] as usize, "{}: step {step} of {sure}", prompt["prompt"]);
        }
        println!("{}: {sure} of {} steps, all equal", prompt["prompt"], greedy.len());
    }
}

/// What a process that tries grammars says, and the schema that took all memory and did not end: here it ends by
/// itself.
#[test]
fn costly_grammars_are_ended() {
    let said = |schema: serde_json::Value| {
        let message = serde_json::json!({"grammar": {"grammars": [{"json_schema": schema}]}, "marks": ["<|end|>"]});
        let output = moebius(&["try-grammar"], &message.to_string());
        String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_string()
    };
    let pattern = |c: char| serde_json::json!({"type": "string", "pattern": format!(".*{c}.*")});
    assert_eq!(said(pattern('a')), "ok");
    assert_eq!(said(serde_json::json!({"type": "integer", "minimum": 5, "maximum": 4})), "unsatisfiable");
    assert_eq!(said(serde_json::json!({"type": "strange"})), "rule");
    if cfg!(unix) {
        let all: Vec<_> = ('a'..='z').map(pattern).collect();
        assert_eq!(said(serde_json::json!({"allOf": all})), "");
    }
}

/// Control characters, marks of direction and others that cannot be seen, as a file may hold them.
const HIDDEN: &str = "\u{1b}]0;x\u{7}\r\u{9b}31m\u{202e}\u{200b}\u{e0041}";

fn shows_all(what: &str, bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let hidden: Vec<char> =
        text.chars().filter(|&c| c != '\n' && HIDDEN.contains(c) && (c.is_control() || !c.is_ascii())).collect();
    assert!(hidden.is_empty(), "{what} shows {hidden:?}: {text:?}");
}

/// What a file says reaches the terminal as text, wherever in it it stands.
#[test]
fn nothing_out_of_a_file_is_hidden() {
    use checkpoint::gguf::Writer;
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("path").to_owned();
    let name = |text: &str| format!("{text}{HIDDEN}");
    let (arch, key) = (name("arch"), name("key"));
    let (dimension, tensor) = (format!("{arch}.{key}"), name("t"));
    for arch in [arch.as_str(), "qwen3moe"] {
        let mut file = Writer::new();
        file.meta("general.architecture", arch).meta("general.name", name("name").as_str());
        for key in [dimension.as_str(), &key, "qwen3moe.context_length", "tokenizer.ggml.model", "tokenizer.ggml.pre"] {
            file.meta(key, name("value").as_str());
        }
        file.tensor(&tensor, &[1], quant::WeightType::F32, vec![0; 4]);
        let mut bytes = Vec::new();
        file.write(&mut bytes).expect("written");
        std::fs::write(path("model.gguf"), bytes).expect("write");
        std::fs::create_dir_all(path("hf")).expect("folder");
        let config = serde_json::json!({"model_type": arch, "quantization": {key.as_str(): 1}, key.as_str(): 3});
        std::fs::write(path("hf/config.json"), config.to_string()).expect("write");
        let data =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/tests/data/qwen3moe/hf/model.safetensors");
        std::fs::copy(data, path("hf/model.safetensors")).expect("copied");
        for model in [path("model.gguf"), path("hf")] {
            let ways: [&[&str]; 5] = [
                &["inspect", &model, "--metadata", "--tensors"],
                &["inspect", &model, "--metadata", "--tensors", "--json"],
                &["run", "-m", &model, "hi"],
                &["plan", "-m", &model],
                &["tokenize", "-m", &model],
            ];
            for args in ways {
                let output = moebius(args, "");
                shows_all(&format!("{args:?}"), &output.stdout);
                shows_all(&format!("{args:?}"), &output.stderr);
            }
        }
    }
    std::fs::write(path("t.jinja"), format!("{{{{ raise_exception('no{HIDDEN}') }}}}")).expect("write");
    let output = moebius(&["render", "--messages", "-", "--template", &path("t.jinja")], "[]");
    assert!(!output.status.success());
    shows_all("raise_exception", &output.stderr);
}

/// Commands that write to stdout, with something to write.
const WRITERS: &[&[&str]] = &[
    &["run", "hi", "-n", "3"],
    &["inspect", "--tensors", "--metadata"],
    &["inspect", "--json"],
    &["plan"],
    &["bench", "-p", "4", "-n", "0", "-r", "1", "-t", "1"],
    &["bench", "-p", "4", "-n", "0", "-r", "1", "-t", "1", "-o", "json"],
    &["logits", "--tokens", "1,2"],
    &["logits", "--tokens", "1,2", "--json"],
    &["tokenize", "-f", "Cargo.toml"],
    &["tokenize", "-f", "Cargo.toml", "--json"],
    &["render", "--messages", "-"],
    &["completions", "bash"],
    &["devices"],
    &["--help"],
    &["--version"],
];
const MESSAGES: &str = "[{\"role\": \"user\", \"content\": \"Hi\"}]";

/// A reader that has seen enough is no error; a full disk is one, with a sentence. Nobody who reads notes is neither.
#[test]
fn closed_and_full_streams_end_in_order() {
    let run = |args: &[&str], stdout: Stdio, stderr: Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_moebius"));
        command.env("MOEBIUS_CONFIG", "");
        let mut child = command.args(args).stdin(Stdio::piped()).stdout(stdout).stderr(stderr).spawn().expect("start");
        // Nobody reads from here on.
        drop(child.stdout.take());
        let _ = child.stdin.take().expect("stdin").write_all(MESSAGES.as_bytes());
        let output = child.wait_with_output().expect("wait");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let full = || Stdio::from(std::fs::File::options().write(true).open("/dev/full").expect("a full device"));
    for args in WRITERS {
        let (code, err) = run(args, Stdio::piped(), Stdio::piped());
        assert!(code == Some(0) && !err.contains("panicked") && !err.contains("failed to"), "{args:?}: {code:?} {err}");
        if cfg!(target_os = "linux") {
            let (code, err) = run(args, full(), Stdio::piped());
            let said = err.matches("moebius: failed to write to stdout: No space left on device").count();
            assert!(code == Some(1) && said == 1 && !err.contains("panicked"), "{args:?}: {code:?} {err}");
            let (code, _) = run(args, Stdio::null(), full());
            assert_eq!(code, Some(0), "{args:?} without notes");
        }
    }
}

/// An output file keeps what is at its name: links, pipes, permissions; and nothing else is left beside it.
#[cfg(unix)]
#[test]
fn output_files_are_what_the_user_made_them() {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = |name: &str| folder.path().join(name);
    let logits = |out: &str| {
        let command = format!("umask 027; exec {} logits --tokens 1,2 -o {out}", env!("CARGO_BIN_EXE_moebius"));
        Command::new("sh").args(["-c", &command]).current_dir(folder.path()).output().expect("start")
    };
    let mode = |name: &str| std::fs::metadata(path(name)).expect("there").permissions().mode() & 0o777;
    assert!(logits("new").status.success());
    assert_eq!(mode("new"), 0o640, "as the umask says");
    let whole = std::fs::read(path("new")).expect("read");

    std::fs::write(path("old"), "old").expect("write");
    std::fs::set_permissions(path("old"), std::fs::Permissions::from_mode(0o600)).expect("mode");
    symlink("old", path("link")).expect("link");
    symlink("later", path("loose")).expect("link");
    for (out, target) in [("link", "old"), ("loose", "later")] {
        assert!(logits(out).status.success(), "{out}");
        assert!(path(out).is_symlink(), "{out}");
        assert_eq!(std::fs::read(path(target)).expect("read"), whole, "{out}");
    }
    assert_eq!(mode("old"), 0o600);

    assert!(Command::new("mkfifo").arg(path("pipe")).status().expect("mkfifo").success());
    let reader = std::thread::spawn({
        let pipe = path("pipe");
        move || std::fs::read(pipe).expect("read")
    });
    let output = logits("pipe");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(reader.join().expect("read"), whole);
    assert!(std::fs::metadata(path("pipe")).expect("there").file_type().is_fifo());

    let output = logits("no/such/folder");
    assert!(String::from_utf8_lossy(&output.stderr).contains("failed to write no/such/folder: No such file"));
    let mut names: Vec<_> =
        std::fs::read_dir(folder.path()).expect("read").map(|e| e.expect("entry").file_name()).collect();
    names.sort();
    assert_eq!(names, ["later", "link", "loose", "new", "old", "pipe"]);
}

/// What a user names as a text may be anything.
#[cfg(unix)]
#[test]
fn texts_are_read_within_bounds() {
    let zero = "/dev/zero";
    let ways: [&[&str]; 7] = [
        &["tokenize", "-f", zero],
        &["run", "-f", zero],
        &["run", "hi", "--json-schema", zero],
        &["run", "hi", "--grammar", zero],
        &["render", "--messages", zero],
        &["perplexity", "-f", zero],
        &["logits", "--golden", zero],
    ];
    for args in ways {
        let output = moebius(args, "");
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(err.contains("failed to read /dev/zero: it has more than 64 MiB"), "{args:?}: {err}");
    }
}

/// An error says what it says once.
#[test]
fn errors_do_not_repeat_themselves() {
    let cases: [(&[&str], &str); 5] = [
        (
            &["run", "-m", "nope.gguf", "hi"],
            "moebius: failed to open nope.gguf: No such file or directory (os error 2)\n",
        ),
        (&["run", "-m", "/dev/null", "hi"], "moebius: failed to open /dev/null: not a regular file\n"),
        (&["run", "hi", "-q", "-t", "0"], "moebius: --threads must be between 1 and 1024\n"),
        (&["render", "--messages", "nope"], "moebius: failed to read nope: No such file or directory (os error 2)\n"),
        (&["tokenize", "--decode"], "moebius: failed to read token id \"abc\": invalid digit found in string\n"),
    ];
    for (args, expected) in cases {
        let output = moebius(args, "abc");
        assert_eq!(String::from_utf8_lossy(&output.stderr), expected, "{args:?}");
        assert_eq!(output.status.code(), Some(1));
    }
}

#[test]
fn a_context_beyond_training_is_warned_of() {
    let say = |ctx: &str| moebius(&["run", "hi", "-n", "1", "-c", ctx], "").stderr;
    let (beyond, within) = (say("4096"), say("512"));
    let warning = "the context of 4096 is beyond the 1024 that the model was trained with";
    assert!(String::from_utf8_lossy(&beyond).contains(warning), "{}", String::from_utf8_lossy(&beyond));
    assert!(!String::from_utf8_lossy(&within).contains("is beyond the"), "{}", String::from_utf8_lossy(&within));
    let many = moebius(&["run", "hi", "-q", "-n", "1", "-t", "1000"], "");
    let err = String::from_utf8_lossy(&many.stderr);
    assert!(
        many.status.success() && err.contains("1000 threads on ") && err.contains("slower than one a core"),
        "{err}"
    );
}

/// On a terminal the bench says what it measures, in a line that holds no empty bar.
#[cfg(target_os = "linux")]
#[test]
fn the_bench_tells_its_progress() {
    let command = format!("{} bench -p 0 -n 4 -r 2 -t 1", env!("CARGO_BIN_EXE_moebius"));
    // A terminal of its own.
    let mut script = Command::new("script");
    script.args(["-qec", &command, "/dev/null"]).env("MOEBIUS_CONFIG", "").env("TERM", "xterm").stdin(Stdio::null());
    let Ok(output) = script.output() else { return fixtures::skip("script, which util-linux has") };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("tg4 with 1 threads") && !text.contains("0/0"), "{text}");
}

#[test]
fn flags_come_from_variables_and_a_file() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join("moebius/config.toml");
    std::fs::create_dir_all(folder.path().join("moebius")).expect("folder");
    std::fs::write(&file, "[run]\nn-predict = 3\nquiet = true\n").expect("write");
    let run = |more: &[&str], variables: &[(&str, &str)]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_moebius"));
        command.args(["run", "hi", "--temp", "0", "--ignore-eos"]).args(more);
        command.env_remove("MOEBIUS_CONFIG").env("XDG_CONFIG_HOME", folder.path());
        let output = command.envs(variables.iter().copied()).output().expect("run");
        (String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let words = |n: &str| stdout(&["run", "hi", "--temp", "0", "--ignore-eos", "-q", "-n", n], "");
    assert_eq!(run(&[], &[]), (words("3"), String::new()));
    assert_eq!(run(&[], &[("MOEBIUS_N_PREDICT", "2")]).0, words("2"));
    assert_eq!(run(&["-n", "1"], &[("MOEBIUS_N_PREDICT", "2")]).0, words("1"));
    let (_, err) = run(&[], &[("MOEBIUS_CTX", "many"), ("MOEBIUS_CONFIG", "")]);
    assert!(err.contains("invalid value 'many' for '--ctx <N>'"), "{err}");
    assert!(err.contains("the value is that of the variable MOEBIUS_CTX"), "{err}");
    let (_, err) = run(&[], &[("MOEBIUS_THREAD", "1"), ("MOEBIUS_NO_SKIP", "1")]);
    assert_eq!(err, "moebius: warning: the variable MOEBIUS_THREAD is no setting; MOEBIUS_THREADS is one\n");
    // What counts, and where it comes from.
    let mut command = Command::new(env!("CARGO_BIN_EXE_moebius"));
    command.args(["config", "run", "--json"]).env_remove("MOEBIUS_CONFIG").env("XDG_CONFIG_HOME", folder.path());
    let shown = command.env("MOEBIUS_CTX", "99").output().expect("run").stdout;
    let shown: serde_json::Value = serde_json::from_slice(&shown).expect("JSON");
    let of = |flag: &str| shown["settings"].as_array().expect("rows").iter().find(|row| row["flag"] == flag).cloned();
    let source = |flag: &str| of(flag).map(|row| format!("{} {}", row["value"], row["source"])).unwrap_or_default();
    assert_eq!(source("--ctx"), "\"99\" \"MOEBIUS_CTX\"", "{shown}");
    assert!(
        source("--n-predict").starts_with("\"3\" ") && source("--n-predict").ends_with("config.toml:2\""),
        "{shown}"
    );
    assert!(source("--quiet").starts_with("\"true\" "), "{shown}");
    assert_eq!((source("--cache-type"), source("--raw")), ("\"f16\" \"default\"".into(), String::new()), "{shown}");
    std::fs::write(&file, "[run]\n\nn-predicted = 3\n").expect("write");
    let (_, err) = run(&[], &[]);
    assert!(err.contains("config.toml:3: moebius run has no flag --n-predicted"), "{err}");
}
