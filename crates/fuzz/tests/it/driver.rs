//! The driver finds what it is there to find, and says so.

use std::path::Path;
use std::process::Command;

/// Runs an input of a target: whether it is a find, and what was said.
fn run(target: &str, input: &[u8]) -> (bool, String) {
    let path = std::env::temp_dir().join(format!("fuzz-{}-{target}-{}", std::process::id(), input.len()));
    std::fs::write(&path, input).expect("write");
    let mut command = Command::new(env!("CARGO_BIN_EXE_fuzz"));
    let output = command.args([target, "--file"]).arg(&path).output().expect("start");
    std::fs::remove_file(&path).expect("remove");
    (!output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn what_breaks_a_promise_is_found() {
    let cases = [
        ("nothing", "accepted", false),
        ("panic", "panics", true),
        ("panic in a thread", "panics", true),
        ("abort", "deaths", true),
        ("slow", "slow", cfg!(target_os = "linux")),
        ("large", "large", cfg!(target_os = "linux")),
        ("endless", "deaths", true),
    ];
    for (input, kind, is_find) in cases {
        let (found, said) = run("canary", input.as_bytes());
        assert_eq!(found, is_find, "{input}: {said}");
        assert!(!is_find || said.contains(&format!(": {kind}: ")), "{input}: {said}");
    }
}

/// Every target that needs no server takes a seed and something that is none.
#[test]
fn targets_take_anything() {
    for (target, input, expected) in [
        ("gguf", "GGUF", "refused"),
        ("folder", "{}\n%%\n{}", "refused"),
        ("tokenizer", "[]", "refused"),
        ("template", "{{ messages | length }}", "accepted: ok"),
        ("template", "{{ raise_exception('no') }}", "refused"),
        ("gbnf", "root ::= \"a\" root?", "accepted: ok"),
        ("gbnf", include_str!("../../corpus/gbnf/parentheses"), "refused: its rules, written out, nest deeper"),
        ("gbnf", include_str!("../../corpus/gbnf/chain"), "refused: its rules, written out, nest deeper"),
        ("gbnf", include_str!("../../corpus/gbnf/doubling"), "refused: its rules, written out, have more"),
    ] {
        let (found, said) = run(target, input.as_bytes());
        assert!(!found && said.contains(expected), "{target}: {said}");
    }
}

/// Encoders are opened for the models that they belong to, and so are those in a model's own files.
#[test]
fn encoders_are_used() {
    for encoder in ["mmproj-gemma4", "mmproj-qwen3vl"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/gguf").join(encoder);
        let (found, said) = run("gguf", &std::fs::read(path).expect("an encoder"));
        assert!(!found && said.contains("accepted: ok") && said.contains(" patches"), "{encoder}: {said}");
    }
}

/// A run ends with a line of figures, and an unknown target with the usage.
#[test]
fn a_run_reports_what_it_did() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fuzz"));
    let output = command.args(["folder", "--seconds", "1", "--seed", "7"]).output().expect("start");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("seed 7") && said.contains(" 0 finds"), "{said}");
    let output = Command::new(env!("CARGO_BIN_EXE_fuzz")).arg("nothing").output().expect("start");
    assert!(!output.status.success() && String::from_utf8_lossy(&output.stdout).contains("usage: fuzz gguf|"));
}
