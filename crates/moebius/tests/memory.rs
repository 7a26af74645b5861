//! `--memory` is a promise: the process stays below it, and what was accounted for is what it takes.

#![cfg(target_os = "linux")] // reads the peak of a process from /proc
#![allow(clippy::unwrap_used)] // a test may panic in its helpers too

use std::fs;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// The embedded model as a file, so that its weights are mapped.
const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/fable-29m-a10m-q4_k_m.gguf");

fn moebius(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moebius"));
    command.args(args).args(["-m", MODEL]);
    command.env("MOEBIUS_CONFIG", "");
    command
}

fn with_memory(args: &[&str], megabytes: usize) -> Output {
    moebius(args).args(["--memory", &format!("{megabytes}M")]).output().unwrap()
}

/// Megabytes that the error of a promise too small says would do.
fn least(args: &[&str]) -> usize {
    let output = with_memory(args, 1);
    assert!(!output.status.success());
    let error = String::from_utf8(output.stderr).unwrap();
    let (_, rest) = error.split_once("the least that works is ").unwrap_or_else(|| panic!("{error}"));
    rest.split_once("M:").unwrap().0.parse().unwrap()
}

/// What the error says works does work, and much less does not.
#[test]
fn the_least_that_works_works() {
    for args in [
        // Said, as what pays depends on the memory that is free at the time.
        &["plan", "--copy-weights", "none"][..],
        &["plan", "--copy-weights", "none", "--ctx", "4096"],
        &["plan", "--copy-weights", "none", "--ctx", "65536", "--cache-type", "f32"],
        &["plan", "--ctx", "4096", "--copy-weights", "all"],
    ] {
        let least = least(args);
        // What the process has resident when it decides differs by some pages from run to run.
        let output = with_memory(args, least + 1);
        assert!(output.status.success(), "{args:?} {least}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(!with_memory(args, least - 2).status.success(), "{args:?} {least}");
    }
}

/// Context shrinks to fit, and what was asked for does not.
#[test]
fn the_context_shrinks_to_fit() {
    let context = |memory: usize| {
        let output = with_memory(&["plan", "--cache-type", "f32", "--batch", "32"], memory);
        let text = String::from_utf8(output.stdout).unwrap();
        let (_, rest) = text.split_once("a context of ").unwrap_or_else(|| panic!("{text}"));
        rest.split_once(' ').unwrap().0.parse::<usize>().unwrap()
    };
    let least = least(&["plan", "--cache-type", "f32", "--batch", "32"]);
    let contexts = [least + 1, least + 4, least + 100].map(context);
    assert!(contexts[0] < contexts[1] && contexts[1] < contexts[2], "{contexts:?}");
    assert_eq!(contexts[2], 1024, "what the model was trained for");
}

/// A prompt that fills the context in one step touches everything that was accounted for.
#[test]
fn a_promise_is_kept() {
    let names = ["fox", "bear", "owl", "rabbit", "mouse", "cat", "dog", "frog"];
    let name = |i: usize| names[i * i % 31 % names.len()];
    let text: Vec<String> = (0..1300).map(|i| format!("The {} met the {}.", name(i), name(i / 8 + 3))).collect();
    let folder = tempfile::tempdir().unwrap();
    let prompt = folder.path().join("prompt.txt");
    fs::write(&prompt, text.join(" ")).unwrap();
    let prompt = prompt.to_str().unwrap();
    // As long as the prompt and an answer of two.
    let tokens = moebius(&["tokenize", "--json", "-f", prompt]).output().unwrap().stdout;
    let n_token = serde_json::from_slice::<Vec<u32>>(&tokens).unwrap().len();
    assert!(n_token > 7000, "{n_token}");
    let ctx = (n_token + 2).to_string();
    for copies in ["none", "all"] {
        let size = ["--ctx", &ctx, "--batch", &ctx, "--cache-type", "f32", "--copy-weights", copies];
        let args = [&["run", "--raw", "--ignore-eos", "-n", "2", "-f", prompt][..], &size].concat();
        let promised = least(&args) + 1;
        let mut child = moebius(&args);
        child.args(["--memory", &format!("{promised}M")]).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = child.spawn().unwrap();
        let mut peak = 0;
        while child.try_wait().unwrap().is_none() {
            // The memory is taken long before the end, so that no late peak is missed.
            peak = peak.max(peak_bytes(child.id()).unwrap_or(0));
            std::thread::sleep(Duration::from_millis(5));
        }
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let promised = promised * 1_000_000;
        println!("{n_token} tokens, copies {copies}: {peak} of {promised} bytes");
        assert!(peak <= promised, "copies {copies}: {peak} of {promised} bytes");
        // How much of the program's own file is resident at the start depends on the pages that cache it, of up to 2
        // MB.
        assert!(peak >= promised / 100 * 96, "copies {copies}: {peak} of {promised} bytes");
    }
}

/// Most memory that a process has had resident.
fn peak_bytes(process: u32) -> Option<usize> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<usize>().ok()? * 1024)
}
