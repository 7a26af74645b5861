//! Fuzzing of everything that reads what strangers write: `fuzz TARGET|all --seconds N --seed S`.
//!
//! Inputs are mutated from a corpus by their structure: JSON as values, GGUF as keys and tensors, the rest as words and
//! bytes. Each runs in a process with a limit on its address space, which is watched from here: a panic, a signal, too
//! much time of the processor or too much resident memory is a find, and is written to a file that `fuzz TARGET --file
//! PATH` runs again. What is reported about an input stands for coverage: accepted inputs, and those refused in words
//! that nobody has seen yet, are changed further. So a stable compiler is enough, and the same seed makes the same
//! inputs as long as outcomes are the same.
//!
//! Targets of the server send their inputs to `moebius serve`, which must lie beside this program.

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod child;
mod mutate;
mod server;
mod targets;

use std::collections::{BTreeMap, HashSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use child::{Child, Verdict};
use mutate::{Dictionary, Random};
use targets::{TARGETS, Target};

/// Longest input, in bytes.
const MAX_INPUT_BYTES: usize = 256 << 10;
/// Inputs of either kind that are kept beside the seeds: accepted ones, and refused ones with words of their own.
const MAX_KEPT: usize = 2_000;

struct Options {
    targets: Vec<&'static Target>,
    seconds: u64,
    seed: u64,
    file: Option<PathBuf>,
    out: PathBuf,
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [mode, name] = args.as_slice()
        && mode == "--child"
        && let Some(target) = TARGETS.iter().find(|t| t.name == name)
    {
        return child::serve(target);
    }
    match options(&args).and_then(|options| run(&options)) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(n) => {
            say(&format!("{n} finds"));
            ExitCode::FAILURE
        }
        Err(why) => {
            say(&why);
            ExitCode::FAILURE
        }
    }
}

fn options(args: &[String]) -> Result<Options, String> {
    let names = TARGETS.iter().map(|t| t.name).collect::<Vec<_>>().join("|");
    let usage = || format!("usage: fuzz {names}|all [--seconds N] [--seed S] [--out FOLDER] | fuzz TARGET --file PATH");
    let out = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/fuzz");
    let mut options = Options { targets: Vec::new(), seconds: 60, seed: 1, file: None, out };
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
        let number = |text: &String| text.parse().map_err(|_| format!("{arg}: {text:?} is no number"));
        match arg.as_str() {
            "--seconds" => options.seconds = number(value()?)?,
            "--seed" => options.seed = number(value()?)?,
            "--file" => options.file = Some(value()?.into()),
            "--out" => options.out = value()?.into(),
            name => {
                options.targets.extend(TARGETS.iter().filter(|t| t.name == name || name == "all" && t.name != "canary"))
            }
        }
    }
    if options.targets.is_empty() { Err(usage()) } else { Ok(options) }
}

/// Runs the targets one after the other; returns how many inputs were found that break a promise.
fn run(options: &Options) -> Result<usize, String> {
    let mut n_finds = 0;
    for target in &options.targets {
        n_finds += match &options.file {
            Some(path) => {
                let input = std::fs::read(path).map_err(|e| format!("read {}: {e}", path.display()))?;
                let verdict = Runner::start(target)?.run(&input)?;
                say(&format!("{}: {verdict}", path.display()));
                usize::from(verdict.is_find())
            }
            None => fuzz(target, options)?,
        };
    }
    Ok(n_finds)
}

/// What runs inputs: a process of this program, or a server.
enum Runner {
    Child(Child),
    Server(server::Server),
}

impl Runner {
    fn start(target: &'static Target) -> Result<Runner, String> {
        match target.run {
            Some(_) => Child::start(target).map(Runner::Child),
            None => server::Server::start().map(Runner::Server),
        }
    }

    fn run(&mut self, input: &[u8]) -> Result<Verdict, String> {
        match self {
            Runner::Child(child) => child.run(input),
            Runner::Server(server) => server.run(input),
        }
    }
}

fn fuzz(target: &'static Target, options: &Options) -> Result<usize, String> {
    let mut accepted = targets::corpus(target)?;
    let mut refused: Vec<Vec<u8>> = Vec::new();
    let dictionary = Dictionary::of(&accepted);
    let n_seeds = accepted.len();
    let mut random = Random::new(options.seed ^ (target.name.len() as u64) << 32);
    let mut seen: HashSet<String> = HashSet::new();
    let mut outcomes: BTreeMap<&'static str, u64> = BTreeMap::new();
    let mut runner = Runner::start(target)?;
    let (begin, length) = (Instant::now(), Duration::from_secs(options.seconds));
    let (mut n, mut n_finds) = (0usize, 0);
    while begin.elapsed() < length {
        // The seeds as they are, then what becomes of them.
        let input = match accepted.get(n).filter(|_| n < n_seeds) {
            Some(seed) => seed.clone(),
            // Most refused inputs lead to others that are refused for the same reason.
            None => {
                let from = if refused.is_empty() || random.below(4) > 0 { &accepted } else { &refused };
                mutate::mutate(from, &dictionary, &mut random, MAX_INPUT_BYTES)
            }
        };
        n += 1;
        let verdict = runner.run(&input)?;
        *outcomes.entry(verdict.kind()).or_default() += 1;
        let signature = verdict.signature();
        let is_new = seen.insert(signature);
        if verdict.is_find() {
            runner = Runner::start(target)?;
            // One file for each kind of find.
            if is_new {
                n_finds += 1;
                let path = save(&options.out, target, &input)?;
                say(&format!("{}: {verdict}\n  fuzz {} --file {}", target.name, target.name, path.display()));
            }
        } else if verdict.kind() == "accepted" {
            keep(&mut accepted, n_seeds, input, &mut random);
        } else if is_new {
            keep(&mut refused, 0, input, &mut random);
        }
    }
    let rate = n as f64 / begin.elapsed().as_secs_f64();
    let kinds: Vec<String> = outcomes.iter().map(|(kind, n)| format!("{n} {kind}")).collect();
    let new = seen.len();
    say(&format!(
        "{:<10} seed {} {:>4.0} s: {n} inputs ({rate:.1}/s) from {n_seeds} seeds, {new} outcomes, {n_finds} finds; \
         {}",
        target.name,
        options.seed,
        begin.elapsed().as_secs_f64(),
        kinds.join(", ")
    ));
    Ok(n_finds)
}

/// Keeps an input, in the place of another but the first `n_seeds` where there are enough.
fn keep(inputs: &mut Vec<Vec<u8>>, n_seeds: usize, input: Vec<u8>, random: &mut Random) {
    match inputs.len() < n_seeds + MAX_KEPT {
        true => inputs.push(input),
        false => inputs[n_seeds + random.below(MAX_KEPT)] = input,
    }
}

fn save(folder: &Path, target: &Target, input: &[u8]) -> Result<PathBuf, String> {
    let path = folder.join(format!("{}-{:016x}", target.name, mutate::hash(input)));
    let saved = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&path, input));
    saved.map(|()| path.clone()).map_err(|e| format!("write {}: {e}", path.display()))
}

/// A line for who runs this. A line that nobody can read is no reason to stop.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}
