//! `--memory` is a promise: the process stays below it, and comes close to what was accounted for.

#![allow(clippy::unwrap_used)] // a test may panic in its helpers too

use std::path::PathBuf;
use std::process::{Command, Output};

/// The embedded model as a file, so that its weights are mapped.
fn model() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/fable-29m-a10m-q4_k_m.gguf"))
}

fn moebius(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_moebius")).args(args).arg("-m").arg(model()).output().unwrap()
}

/// Megabytes that the error of a promise too small says would do.
fn least(args: &[&str]) -> usize {
    let output = moebius(&[args, &["--memory", "1M"]].concat());
    assert!(!output.status.success());
    let error = String::from_utf8(output.stderr).unwrap();
    let (_, rest) = error.split_once("the least that works is ").unwrap_or_else(|| panic!("{error}"));
    rest.split_once("M:").unwrap().0.parse().unwrap()
}

/// What the smallest promise says works does work, and one megabyte less does not.
#[test]
#[cfg(target_os = "linux")]
fn the_least_that_works_works() {
    for args in [
        &["plan"][..],
        &["plan", "--ctx", "4096"],
        &["plan", "--ctx", "65536", "--cache-type", "f32"],
        &["plan", "--ctx", "4096", "--copy-weights", "all"],
    ] {
        let least = least(args);
        // What the process has resident when it decides differs by some pages from run to run.
        let with = |megabytes: usize| moebius(&[args, &["--memory", &format!("{megabytes}M")]].concat());
        let output = with(least + 1);
        assert!(output.status.success(), "{args:?} {least}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(!with(least - 2).status.success(), "{args:?} {least}");
    }
}

/// A long prompt fills the cache and reads all experts; the peak of the process is read as it ends.
#[test]
#[cfg(target_os = "linux")]
fn a_promise_is_kept() {
    let text: String = (0..4000).map(|i| format!("The fox number {} met {} bears. ", i * 7919 % 1000, i)).collect();
    let folder = tempfile::tempdir().unwrap();
    let prompt = folder.path().join("prompt.txt");
    std::fs::write(&prompt, text).unwrap();
    for copies in ["none", "all"] {
        let args = ["perplexity", "--ctx", "16384", "--cache-type", "f32", "--copy-weights", copies, "--chunks", "1"];
        let file = ["-f", prompt.to_str().unwrap()];
        let least = least(&[&args[..], &file].concat());
        let memory = format!("{least}M");
        let mut child = Command::new("sh");
        // The shell becomes the program, whose peak `wait4` reports.
        let run = [&args[..], &file, &["--memory", &memory]].concat();
        let output = child
            .args(["-c", "exec /usr/bin/time -f 'peak %M' \"$@\"", "sh", env!("CARGO_BIN_EXE_moebius")])
            .args(run)
            .arg("-m")
            .arg(model())
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        println!("{copies}: {memory}: {stderr}");
    }
}
