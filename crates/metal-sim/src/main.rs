//! `metal-sim check FILE`, `metal-sim run FILE KERNEL`: kernels by hand, and `metal-sim costs`: the table of what
//! products cost. The crate's README shows them.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use backend::metal::gpu::{Cmd, Gpu, List, Span, Unit, Use};
use metal_sim::clang::Clang;
use metal_sim::{Options, Sim};

const USAGE: &str = "metal-sim costs
metal-sim check FILE [-I FOLDER].. [-D NAME=VALUE]..
metal-sim run FILE KERNEL --groups X,Y,Z --threads N [-I FOLDER].. [-D NAME=VALUE]..
    SLOT=r:NUMBERS SLOT=u:NUMBERS SLOT=w:BYTES SLOT=p:NUMBERS ..";

fn main() -> ExitCode {
    match run(std::env::args().skip(1).collect()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("metal-sim: {why:#}");
            ExitCode::FAILURE
        }
    }
}

/// The arguments, apart.
#[derive(Default)]
struct Args {
    words: Vec<String>,
    includes: Vec<PathBuf>,
    defines: Vec<(String, String)>,
    groups: [u32; 3],
    threads: u32,
}

fn parse(args: Vec<String>) -> Result<Args> {
    let mut found = Args { groups: [1; 3], threads: 64, ..Args::default() };
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        let mut value = || args.next().with_context(|| format!("{arg} wants a value"));
        match arg.as_str() {
            "-I" => found.includes.push(value()?.into()),
            "-D" => {
                let define = value()?;
                let (name, value) = define.split_once('=').unwrap_or((&define, "1"));
                found.defines.push((name.into(), value.into()));
            }
            "--groups" => {
                let value = value()?;
                for (to, n) in found.groups.iter_mut().zip(value.split(',')) {
                    *to = n.parse().with_context(|| format!("--groups {value}"))?;
                }
            }
            "--threads" => found.threads = value()?.parse().context("--threads")?,
            _ => found.words.push(arg),
        }
    }
    Ok(found)
}

fn run(args: Vec<String>) -> Result<()> {
    let args = parse(args)?;
    match args.words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["costs"] => {
            print!("{}", metal_sim::costs::table()?);
            Ok(())
        }
        ["check", file] => check(file.as_ref(), &args),
        ["run", file, kernel, ref slots @ ..] => dispatch(file.as_ref(), kernel, slots, &args),
        _ => bail!("{USAGE}"),
    }
}

/// A file with its definitions and headers as one string.
fn source(file: &Path, args: &Args) -> Result<String> {
    let text = std::fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
    let mut source = String::from("#include <metal_stdlib>\nusing namespace metal;\n");
    args.defines.iter().for_each(|(name, value)| source.push_str(&format!("#define {name} {value}\n")));
    source.push_str(&format!("#line 1 \"{}\"\n{text}", file.display()));
    Clang::find()?.preprocess(&source, &args.includes)
}

fn check(file: &Path, args: &Args) -> Result<()> {
    let source = source(file, args)?;
    Clang::find()?.kernels(&source, &Options::default().cache, false)?;
    let kernels = metal_sim::rewrite::rewrite(&source)?.kernels;
    println!("{}: {}", file.display(), kernels.join(", "));
    Ok(())
}

fn dispatch(file: &Path, kernel: &str, slots: &[&str], args: &Args) -> Result<()> {
    let mut sim = Sim::new(Options::default())?;
    // The name lives as long as the program, which runs one kernel.
    let kernel: &'static str = Box::leak(kernel.to_string().into_boxed_str());
    let pipe = sim.build(&[Unit { name: kernel.into(), source: source(file, args)?, kernel }])?[0];
    let mut list = List::default();
    list.cmds.push(Cmd::Pipe(pipe));
    let mut written = Vec::new();
    for slot in slots {
        let (number, what) = slot.split_once('=').context(USAGE)?;
        let number: u8 = number.parse().with_context(|| format!("slot {number}"))?;
        let (kind, value) = what.split_once(':').context(USAGE)?;
        if kind == "w" {
            let len: u64 = value.parse().with_context(|| format!("bytes {value}"))?;
            let span = Span { buf: sim.alloc(len, "a slot")?, at: 0, len };
            list.cmds.push(Cmd::Bind { slot: number, span, used: Use::Write });
            written.push((number, span));
            continue;
        }
        let words = words(value)?;
        if kind == "p" {
            list.params(number, &words);
            continue;
        }
        let used = match kind {
            "r" => Use::Read,
            "u" => Use::Update,
            _ => bail!("{kind} is none of r, w, u and p"),
        };
        let span = Span { buf: sim.alloc(4 * words.len() as u64, "a slot")?, at: 0, len: 4 * words.len() as u64 };
        sim.write(span, &words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>())?;
        list.cmds.push(Cmd::Bind { slot: number, span, used });
        if used == Use::Update {
            written.push((number, span));
        }
    }
    list.cmds.push(Cmd::Groups { grid: args.groups, threads: args.threads });
    let ticket = sim.submit(&list)?;
    sim.wait(ticket, Duration::from_secs(60))?;
    for (slot, span) in written {
        let mut bytes = vec![0; span.len as usize];
        sim.read(span, &mut bytes)?;
        let numbers = bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word).to_string());
        println!("slot {slot}: {}", numbers.collect::<Vec<_>>().join(" "));
    }
    Ok(())
}

/// Numbers of 32 bits: floats where they have a point, else integers.
fn words(text: &str) -> Result<Vec<u32>> {
    let word = |text: &str| {
        if text.contains('.') {
            return text.parse::<f32>().map(f32::to_bits).with_context(|| format!("number {text}"));
        }
        text.parse::<i64>().map(|n| n as u32).with_context(|| format!("number {text}"))
    };
    let words: Vec<u32> = text.split(',').map(word).collect::<Result<_>>()?;
    ensure!(!words.is_empty(), "no numbers");
    Ok(words)
}
