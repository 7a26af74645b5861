//! Prompt caches in a folder, over restarts of a server (`--cache-dir`).
#![cfg(unix)]

use std::path::Path;
use std::process::Command;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::fixtures;
use crate::serve::Server;

/// What a server that keeps prompts in `folder` answers, its prompt's tokens, and how many of them were there already.
fn stored(folder: &Path, more: &[&str], body: &serde_json::Value) -> (serde_json::Value, u64, u64) {
    let path = folder.to_str().expect("UTF-8");
    let more = [&["--cache-dir", path, "--ctx", "1024"], more].concat();
    let command = Command::new(env!("CARGO_BIN_EXE_moebius"));
    let errors = std::fs::File::create(folder.join("log")).expect("log");
    let mut server = Server::start_as(command, &more, errors.into());
    let answer = server.post("/v1/chat/completions", &body.to_string());
    server.terminate();
    assert!(server.exit().success());
    let (_, body) = answer.split_once("\r\n\r\n").expect("a body");
    let (start, end) = (body.find('{').expect("an object"), body.rfind('}').expect("its end"));
    let value: serde_json::Value = serde_json::from_str(&body[start..=end]).unwrap_or_else(|_| panic!("{answer}"));
    let usage = &value["usage"];
    let number = |value: &serde_json::Value| value.as_u64().expect("a number");
    (
        value["choices"].clone(),
        number(&usage["prompt_tokens"]),
        number(&usage["prompt_tokens_details"]["cached_tokens"]),
    )
}

/// Prompts with images are found again by what the images show.
#[test]
fn images_survive_a_restart() {
    let folder = tempfile::tempdir().expect("folder");
    let data = fixtures::root("crates/conformance/tests/data/images/qwen3_vl_moe");
    let model = data.join("hf");
    let ask = |name: &str| {
        let image = STANDARD.encode(std::fs::read(data.join(format!("images/{name}.png"))).expect("image"));
        let url = serde_json::json!({"url": format!("data:image/png;base64,{image}")});
        let text = "What is on this picture? ".repeat(4);
        let parts = serde_json::json!([{"type": "image_url", "image_url": url}, {"type": "text", "text": text}]);
        let body = serde_json::json!({
            "messages": [{"role": "user", "content": parts}], "max_tokens": 8, "temperature": 0, "logprobs": true,
        });
        stored(folder.path(), &["-m", model.to_str().expect("UTF-8")], &body)
    };
    let (first, n_prompt, cached) = ask("odd");
    assert_eq!(cached, 0);
    let (second, _, cached) = ask("odd");
    assert_eq!(second, first);
    assert_eq!(cached, (n_prompt - 1) / 32 * 32, "of {n_prompt}");
    let (other, _, cached) = ask("rgba");
    assert_ne!(other, first);
    assert_eq!(cached, 0);
}

/// What a server has computed of prompts is there for the next one, answers to the bit the same; not for another cache
/// type. Damaged files cost a warning.
#[test]
fn prompts_survive_a_restart() {
    let folder = tempfile::tempdir().expect("folder");
    let log = folder.path().join("log");
    let ask = |more: &[&str]| {
        let words: Vec<String> = (0..120).map(|i| format!("word {i}")).collect();
        let body = serde_json::json!({
            "messages": [{"role": "user", "content": words.join(", ")}], "max_tokens": 40, "temperature": 0.8,
            "seed": 7, "logprobs": true, "ignore_eos": true,
        });
        stored(folder.path(), more, &body)
    };
    let (first, n_prompt, cached) = ask(&[]);
    assert_eq!(cached, 0);
    let (second, _, cached) = ask(&[]);
    assert_eq!(second, first);
    assert_eq!(cached, (n_prompt - 1) / 32 * 32, "of {n_prompt}");
    for other in ["f32", "q8_0", "k=f16,v=q8_0"] {
        let (_, _, cached) = ask(&["--cache-type", other]);
        assert_eq!(cached, 0, "{other}");
    }
    let (blocks, _, cached) = ask(&["--cache-type", "q8_0"]);
    assert_eq!(cached, (n_prompt - 1) / 32 * 32, "of {n_prompt}");
    assert_eq!(ask(&["--cache-type", "q8_0", "--isa", "scalar"]).0, blocks);
    for entry in folder.path().read_dir().expect("folder").flatten().filter(|entry| entry.path().is_dir()) {
        for file in entry.path().read_dir().expect("folder").flatten() {
            let file = std::fs::OpenOptions::new().write(true).open(file.path()).expect("file");
            file.set_len(99).expect("cut");
        }
    }
    let (third, _, cached) = ask(&[]);
    assert_eq!((third, cached), (first.clone(), 0));
    let said = std::fs::read_to_string(&log).expect("log");
    assert!(said.contains("ignoring a stored prompt cache"), "{said}");
    // What was damaged was written again.
    let (fourth, _, cached) = ask(&[]);
    assert_eq!((fourth, cached), (first, (n_prompt - 1) / 32 * 32));
}
