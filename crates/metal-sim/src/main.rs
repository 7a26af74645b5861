//! `metal-sim check FILE`, `metal-sim run FILE KERNEL`: kernels by hand. The crate's README shows both.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use gpu::commands::{Cmd, Gpu, List, Span, Unit, Use};
use metal_sim::clang::Clang;
use metal_sim::{Options, Schedule, Sim};

const USAGE: &str = "usage:
  metal-sim check FILE [-I FOLDER].. [-D NAME=VALUE]..
      compiles a file of Metal and names its kernels
  metal-sim run FILE KERNEL [--groups X,Y,Z] [--threads N] [--schedule ORDER]
      [-I FOLDER].. [-D NAME=VALUE].. SLOT=KIND:VALUE..
      runs one kernel, checks every access and prints what it wrote

SLOT=KIND:VALUE binds [[buffer(SLOT)]]:
  0=r:1.5,2,3   numbers that are read        1=u:0,0   numbers that are updated
  2=w:12        12 bytes that are written    3=p:2,7   parameters, of 32 bits each
  4=z:4096      4096 bytes of zeros that are read
Numbers with a point are floats, others integers of 32 bits.
ORDER is one of forward, reverse, random, ahead, lockstep, preempt.";

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
    schedule: Option<Schedule>,
    wants_help: bool,
}

fn parse(args: Vec<String>) -> Result<Args> {
    let mut found = Args { groups: [1; 3], threads: 64, ..Args::default() };
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        let mut value = || args.next().with_context(|| format!("{arg} wants a value; metal-sim --help shows all"));
        match arg.as_str() {
            "-I" => found.includes.push(value()?.into()),
            "-D" => {
                let define = value()?;
                let (name, value) = define.split_once('=').unwrap_or((&define, "1"));
                found.defines.push((name.into(), value.into()));
            }
            "--groups" => {
                let value = value()?;
                ensure!(value.split(',').count() <= 3, "--groups {value}: at most three numbers are wanted");
                for (to, n) in found.groups.iter_mut().zip(value.split(',')) {
                    *to = n.parse().with_context(|| format!("--groups {value}: {n} is no number of threadgroups"))?;
                }
            }
            "--threads" => {
                let value = value()?;
                found.threads = value.parse().with_context(|| format!("--threads {value}: a number is wanted"))?;
            }
            "--schedule" => {
                let value = value()?;
                let order = Schedule::ALL.into_iter().find(|order| format!("{order:?}").to_lowercase() == value);
                found.schedule = Some(order.with_context(|| format!("--schedule {value}: no such order\n{USAGE}"))?);
            }
            "-h" | "--help" => found.wants_help = true,
            _ if arg.starts_with('-') => bail!("{arg}: no such option\n{USAGE}"),
            _ => found.words.push(arg),
        }
    }
    Ok(found)
}

fn run(args: Vec<String>) -> Result<()> {
    let args = parse(args)?;
    if args.wants_help {
        println!("{USAGE}");
        return Ok(());
    }
    match args.words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
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
    Clang::find()?.kernels(&[&source], &Options::default().cache).remove(0)?;
    let kernels = metal_sim::rewrite::rewrite(&source)?.kernels;
    println!("{}: {}", file.display(), kernels.join(", "));
    Ok(())
}

fn dispatch(file: &Path, kernel: &str, slots: &[&str], args: &Args) -> Result<()> {
    let schedule = args.schedule.unwrap_or(Schedule::Forward);
    let mut sim = Sim::new(Options { schedule, ..Options::default() })?;
    let source = source(file, args)?;
    let kernels = metal_sim::rewrite::rewrite(&source)?.kernels;
    let is_there = kernels.iter().any(|name| name == kernel);
    ensure!(is_there, "{} has no kernel {kernel}; it has {}", file.display(), kernels.join(", "));
    // The name lives as long as the program, which runs one kernel.
    let kernel: &'static str = Box::leak(kernel.to_string().into_boxed_str());
    let pipe = sim.build(&[Unit { name: kernel.into(), source, kernel }])?[0];
    let mut list = List::default();
    list.cmds.push(Cmd::Pipe(pipe));
    let mut written = Vec::new();
    for slot in slots {
        if let Some(span) = bind(&mut sim, &mut list, slot)? {
            written.push(span);
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

/// Binds `SLOT=KIND:VALUE`; the slot and the span where the kernel writes to it.
fn bind(sim: &mut Sim, list: &mut List, text: &str) -> Result<Option<(u8, Span)>> {
    let form = || format!("{text}: SLOT=KIND:VALUE is wanted, as 0=r:1.5,2; metal-sim --help shows all");
    let (slot, bound) = text.split_once('=').with_context(form)?;
    let slot: u8 = slot.parse().with_context(|| format!("{text}: {slot} is no number of a slot"))?;
    let (kind, value) = bound.split_once(':').with_context(form)?;
    let size = || value.parse::<u64>().with_context(|| format!("{text}: {value} is no number of bytes"));
    let (used, bytes) = match kind {
        "p" => {
            list.params(slot, &words(value).with_context(|| text.to_string())?);
            return Ok(None);
        }
        "w" => (Use::Write, None),
        "z" => (Use::Read, Some(vec![0; size()? as usize])),
        "r" | "u" => {
            let words = words(value).with_context(|| text.to_string())?;
            let used = if kind == "r" { Use::Read } else { Use::Update };
            (used, Some(words.iter().flat_map(|word| word.to_le_bytes()).collect()))
        }
        _ => bail!("{text}: {kind} is none of r, u, w, z and p"),
    };
    let len = bytes.as_ref().map_or_else(size, |bytes: &Vec<u8>| Ok(bytes.len() as u64))?;
    let span = Span { buf: sim.alloc(len, "a slot")?, at: 0, len };
    if let Some(bytes) = bytes {
        sim.write(span, &bytes)?;
    }
    list.cmds.push(Cmd::Bind { slot, span, used });
    Ok((used != Use::Read).then_some((slot, span)))
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
