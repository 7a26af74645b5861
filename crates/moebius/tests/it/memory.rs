//! `--memory` is a promise: the process stays below it, and what was accounted for is what it takes.

#![cfg(target_os = "linux")] // reads the peak of a process from /proc

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
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

/// Returns the megabytes that the error of a limit too small names.
fn least(args: &[&str]) -> usize {
    let output = with_memory(args, 1);
    assert!(!output.status.success());
    let error = String::from_utf8(output.stderr).unwrap();
    let (_, rest) = error.split_once("needs at least ").unwrap_or_else(|| panic!("{error}"));
    rest.split_once("M (").unwrap().0.parse().unwrap()
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

/// A position of the embedded model takes 1920 bytes less in blocks of 8 bits than in f16.
#[test]
fn blocks_take_half_of_the_cache() {
    let of = |cache: &str| {
        least(&["plan", "--copy-weights", "none", "--ctx", "65536", "--batch", "32", "--cache-type", cache])
    };
    let [halves, blocks, values] = ["f16", "q8_0", "k=f16,v=q8_0"].map(of);
    assert!((125..128).contains(&(halves - blocks)), "{halves} MB, {blocks} MB");
    assert!((62..65).contains(&(halves - values)), "{halves} MB, {values} MB");
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
        // How much of the program's own file is resident at the start depends on the pages that cache it, of up to 2
        // MB, and differs from one run to the next.
        let promised = least(&args) + 3;
        let (_, peak) = watched(&args, promised);
        let promised = promised * 1_000_000;
        println!("{n_token} tokens, copies {copies}: {peak} of {promised} bytes");
        assert!(peak <= promised, "copies {copies}: {peak} of {promised} bytes");
        assert!(peak >= promised / 100 * 95, "copies {copies}: {peak} of {promised} bytes");
    }
}

/// With experts that are read from disk the promise is kept as well, and the text is the same.
#[test]
fn a_promise_is_kept_with_streamed_experts() {
    let names = ["fox", "bear", "owl", "rabbit", "mouse", "cat", "dog", "frog"];
    let text: Vec<String> = (0..70).map(|i| format!("The {} met the {}.", names[i % 8], names[i / 8 % 8])).collect();
    let folder = tempfile::tempdir().unwrap();
    let prompt = folder.path().join("prompt.txt");
    fs::write(&prompt, text.join(" ")).unwrap();
    let size = ["--ctx", "768", "--batch", "512", "--cache-type", "f32", "--temperature", "0"];
    let args = [&["run", "--raw", "--ignore-eos", "-n", "64", "-f", prompt.to_str().unwrap()][..], &size].concat();
    let whole = moebius(&args).output().unwrap();
    assert!(whole.status.success(), "{}", String::from_utf8_lossy(&whole.stderr));
    let least = least(&args);
    for more in [3, 5, 8] {
        let promised = least + more;
        let (output, peak) = watched(&args, promised);
        let notes = String::from_utf8(output.stderr).unwrap();
        assert!(notes.contains("of 128 experts"), "{notes}");
        assert_eq!(output.stdout, whole.stdout, "{promised}M");
        println!("{peak} of {promised}M: {notes}");
        let promised = promised * 1_000_000;
        assert!(peak <= promised, "{peak} of {promised} bytes: {notes}");
        // The reserve, and the part of the context and the step that the prompt leaves.
        assert!(peak + 10_000_000 >= promised, "{peak} of {promised} bytes: {notes}");
    }
}

/// Recorded routes predict what is in memory, the more the larger the budget.
#[test]
fn recorded_routes_predict_hit_rates() {
    let folder = tempfile::tempdir().unwrap();
    let routes = folder.path().join("routes.jsonl");
    let routes = routes.to_str().unwrap();
    let output = moebius(&["bench", "-p", "0", "-n", "40", "-r", "1", "--trace-experts", routes]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let size = ["plan", "--routes", routes, "--ctx", "256", "--batch", "64"];
    let output = with_memory(&size, least(&size) + 2);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let rates: Vec<f64> = text
        .lines()
        .filter_map(|line| {
            line.split_once("% ")?.1.split_once("of a token's")?.0.trim().strip_suffix('%').map(str::to_string)
        })
        .filter_map(|rate| rate.trim().parse().ok())
        .collect();
    println!("{text}");
    assert_eq!(text.matches("of a token's experts in memory").count(), 13, "{text}");
    assert!(rates.windows(2).all(|pair| pair[0] <= pair[1] + 3.0), "{rates:?}");
    assert!(text.contains("100%: "), "{text}");
    // A file of another kind, and a budget that streams nothing.
    fs::write(folder.path().join("routes.jsonl"), "{}\n").unwrap();
    assert!(!with_memory(&size, least(&size) + 2).status.success());
    assert!(!with_memory(&size, 4000).status.success());
}

/// Eight clients with long and short prompts at once take no more than 3% over the promise, with streamed experts and
/// with all weights mapped.
#[test]
fn a_server_under_eight_clients_keeps_its_promise() {
    let serve = ["serve", "--port", "0", "--backend", "cpu", "--threads", "2", "--parallel", "8", "--ctx", "512"];
    let serve = [&serve[..], &["--log-level", "error"]].concat();
    let least = least(&serve);
    for megabytes in [least + 2, least + 30] {
        let mut child = moebius(&serve);
        child.args(["--memory", &format!("{megabytes}M")]).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = child.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().rsplit_once("http://").unwrap_or_else(|| panic!("{megabytes}M: {line}")).1;
        let ask = |i: usize| {
            let text = "a fox and a house ".repeat([1, 4, 16, 60][i % 4]);
            let body = format!(
                "{{\"prompt\": \"{i} {text}\", \"max_tokens\": {}, \"ignore_eos\": true}}",
                [48, 24, 16, 8][i % 4]
            );
            let mut stream = TcpStream::connect(address).unwrap();
            let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
            write!(stream, "{head}Connection: close\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert!(answer.starts_with("HTTP/1.1 200"), "{megabytes}M, client {i}: {answer}");
        };
        std::thread::scope(|scope| {
            (0..8).for_each(|client| {
                scope.spawn(move || ask(client));
            });
        });
        let peak = peak_bytes(child.id()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        println!("{megabytes}M: {:.1} MB", peak as f64 / 1e6);
        assert!(peak as f64 <= 1.03e6 * megabytes as f64, "{megabytes}M: {peak} bytes");
    }
}

/// Runs to the end within a promise, which must work; returns the peak too.
fn watched(args: &[&str], megabytes: usize) -> (Output, usize) {
    let mut child = moebius(args);
    child.args(["--memory", &format!("{megabytes}M")]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = child.spawn().unwrap();
    let mut peak = 0;
    while child.try_wait().unwrap().is_none() {
        // The memory is taken long before the end, so that no late peak is missed.
        peak = peak.max(peak_bytes(child.id()).unwrap_or(0));
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    (output, peak)
}

/// Most memory that a process has had resident.
fn peak_bytes(process: u32) -> Option<usize> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<usize>().ok()? * 1024)
}
