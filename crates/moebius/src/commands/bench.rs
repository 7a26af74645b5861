//! `moebius bench`: prompt and decode speed, in llama-bench's rows, with what the memory allows beside them.
//!
//! Every figure comes through the engine, as a user's request would: random tokens, greedy, no prefix cache between repetitions.

use std::time::Instant;

use anyhow::{Result, ensure};
use engine::sampler::SamplerParams;
use engine::scheduler::{Request, Usage};
use serde::Serialize;

use crate::answer::{Interrupt, generate};
use crate::args::{BackendKind, BenchArgs, BenchFormat};
use crate::compare::mean_and_deviation;
use crate::load::{self, EngineSetup, Session};
use crate::machine::{self, Bandwidth};

/// One line of the table.
#[derive(Debug, Serialize)]
struct Row {
    model: String,
    size_bytes: u64,
    n_params: u64,
    backend: String,
    threads: usize,
    /// `pp512`, `tg128`, with `@ d4096` behind them at a depth.
    test: String,
    n_prompt: usize,
    n_gen: usize,
    depth: usize,
    /// Tokens a second of each repetition.
    samples: Vec<f64>,
    tokens_per_second: f64,
    deviation: f64,
    /// Decode only: weights and cache read for one token, at the middle of the measured span.
    bytes_per_token: Option<u64>,
    /// Decode only: those bytes times the tokens a second.
    gb_per_second: Option<f64>,
    /// Decode only: share of the read bandwidth of as many threads, measured before and after each repetition.
    bandwidth_share: Option<f64>,
    /// From opening the file to a program that can run.
    load_ms: f64,
    peak_resident_bytes: Option<usize>,
}

pub fn run(args: &BenchArgs) -> Result<()> {
    ensure!(args.repetitions > 0, "bench: 0 repetitions measure nothing");
    let threads = if args.threads.is_empty() { vec![machine::cores()] } else { args.threads.clone() };
    let bar = machine::progress(None);
    let interrupt = Interrupt::install()?;
    let mut table = Table::new(args.output);
    for &threads in &threads {
        bar.set_message(format!("measuring the read bandwidth of {threads} threads"));
        bar.tick();
        let mut bandwidth = Bandwidth::new(threads);
        bandwidth.measure()?;
        bar.suspend(|| {
            eprintln!("{}: {threads} threads read {:.1} GB/s", machine::processor(), bandwidth.take() / 1e9);
        });
        let longest = args.n_prompt.iter().chain(&args.n_gen).max().copied().unwrap_or(0);
        let deepest = args.depth.iter().max().copied().unwrap_or(0);
        let start = Instant::now();
        let model = load::open(args.model.model.as_deref())?;
        let setup = EngineSetup {
            threads: Some(threads),
            ctx: Some(longest + deepest + 2),
            backend: BackendKind::Cpu,
            step: args.step,
            prefix_cache: false,
            sequences: 1,
            cache_tokens: None,
        };
        let mut session = load::start_with(model, &setup)?;
        let load_ms = start.elapsed().as_secs_f64() * 1e3;
        for &depth in &args.depth {
            let prompts = args.n_prompt.iter().filter(|&&n| n > 0).map(|&n| (n, 0));
            let gens = args.n_gen.iter().filter(|&&n| n > 0).map(|&n| (0, n));
            for (n_prompt, n_gen) in prompts.chain(gens) {
                let test = Test { n_prompt, n_gen, depth };
                bar.set_message(format!("{} with {threads} threads", test.name()));
                bar.tick();
                let mut samples = Vec::with_capacity(args.repetitions);
                test.measure(&mut session, &interrupt)?; // warm-up: touches the weights
                if n_gen > 0 {
                    bandwidth.measure()?;
                }
                for _ in 0..args.repetitions {
                    samples.push(test.measure(&mut session, &interrupt)?);
                    bar.tick();
                    if interrupt.is_set() {
                        return Ok(());
                    }
                    if n_gen > 0 {
                        bandwidth.measure()?;
                    }
                }
                table.print(&row(&session, &test, threads, &mut bandwidth, load_ms, samples))?;
                if args.verbose && n_gen > 0 && depth == 0 {
                    test.print_times(&mut session, &interrupt)?;
                }
            }
        }
    }
    bar.finish_and_clear();
    table.finish();
    Ok(())
}

/// One thing to measure: a prompt or a generation, after `depth` tokens of context.
struct Test {
    n_prompt: usize,
    n_gen: usize,
    depth: usize,
}

impl Test {
    fn name(&self) -> String {
        let name = if self.n_prompt > 0 { format!("pp{}", self.n_prompt) } else { format!("tg{}", self.n_gen) };
        if self.depth > 0 { format!("{name} @ d{}", self.depth) } else { name }
    }

    /// Tokens a second.
    ///
    /// A prompt's time runs from its first step to its first token; at a depth, the time of the depth alone is subtracted. A
    /// generation's time runs from the first token, which comes out of the prompt, to the last: `n_gen` steps.
    fn measure(&self, session: &mut Session, interrupt: &Interrupt) -> Result<f64> {
        if self.n_prompt > 0 {
            let before = match self.depth {
                0 => 0.0,
                depth => self.request(session, interrupt, depth, 1)?.timings.prompt.as_secs_f64(),
            };
            let usage = self.request(session, interrupt, self.depth + self.n_prompt, 1)?;
            Ok(self.n_prompt as f64 / (usage.timings.prompt.as_secs_f64() - before))
        } else {
            let usage = self.request(session, interrupt, self.depth.max(1), self.n_gen + 1)?;
            Ok((usage.generated - 1) as f64 / usage.timings.decode.as_secs_f64())
        }
    }

    /// Decodes once more with a clock between the ops, and prints what they took.
    fn print_times(&self, session: &mut Session, interrupt: &Interrupt) -> Result<()> {
        session.engine.trace_times(true);
        let usage = self.request(session, interrupt, 1, self.n_gen + 1)?;
        session.engine.trace_times(false);
        let steps = usage.generated as f64;
        let total = (usage.timings.prompt + usage.timings.decode).as_secs_f64();
        let mut rows = session.engine.times().to_vec();
        let outside = total - rows.iter().map(|row| row.time.as_secs_f64()).sum::<f64>();
        rows.sort_by_key(|row| std::cmp::Reverse(row.time));
        let us = |seconds: f64| format!("{:.1}", seconds / steps * 1e6);
        eprintln!("{:<50} {:>7} {:>9} {:>6} {:>9} {:>6}", "a token", "regions", "us", "", "us alone", "GB/s");
        for row in &rows {
            let time = row.time.as_secs_f64();
            eprintln!(
                "{:<50} {:>7.1} {:>9} {:>5.1}% {:>9} {:>6}",
                row.name,
                row.regions as f64 / steps,
                us(time),
                time / total * 100.0,
                us(row.alone.as_secs_f64()),
                if row.bytes > 0 { format!("{:.1}", row.bytes as f64 * steps / time / 1e9) } else { String::new() },
            );
        }
        let alone = rows.iter().map(|row| row.alone.as_secs_f64()).sum::<f64>() + outside;
        let regions = rows.iter().map(|row| row.regions).sum::<u64>() as f64 / steps;
        eprintln!(
            "{:<50} {:>7} {:>9} {:>5.1}% {:>9}",
            "outside the steps",
            "",
            us(outside),
            outside / total * 100.0,
            us(outside)
        );
        eprintln!("{:<50} {regions:>7.1} {:>9} {:>6} {:>9}", "in all", us(total), "", us(alone));
        Ok(())
    }

    fn request(&self, session: &mut Session, interrupt: &Interrupt, n_prompt: usize, n_gen: usize) -> Result<Usage> {
        let n_vocab = session.n_vocab as u64;
        // Any fixed scatter of ids does: routing and embedding rows should not repeat.
        let tokens = (0..n_prompt as u64).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) % n_vocab).map(|id| id as u32);
        let mut request = Request::new(tokens.collect());
        request.max_new_tokens = n_gen;
        request.ignore_eos = true;
        request.sampling = SamplerParams::greedy();
        let answer = generate(&mut session.engine, request, interrupt, |_| Ok(()))?;
        Ok(answer.usage)
    }
}

fn row(s: &Session, test: &Test, threads: usize, bandwidth: &mut Bandwidth, load_ms: f64, samples: Vec<f64>) -> Row {
    let (tokens_per_second, deviation) = mean_and_deviation(&samples);
    let bytes_per_token = (test.n_gen > 0).then(|| {
        let context = test.depth as u64 + test.n_gen as u64 / 2;
        s.weight_bytes_per_token + s.cache.read_per_token(context)
    });
    let rate = bytes_per_token.map(|bytes| bytes as f64 * tokens_per_second);
    Row {
        model: s.description.clone(),
        size_bytes: s.size_bytes,
        n_params: s.n_params,
        backend: s.backend.clone(),
        threads,
        test: test.name(),
        n_prompt: test.n_prompt,
        n_gen: test.n_gen,
        depth: test.depth,
        samples,
        tokens_per_second,
        deviation,
        bytes_per_token,
        gb_per_second: rate.map(|rate| rate / 1e9),
        bandwidth_share: rate.map(|rate| rate / bandwidth.take()),
        load_ms,
        peak_resident_bytes: bandwidth.peak_resident(),
    }
}

/// Prints rows as they come.
struct Table {
    format: BenchFormat,
    rows: usize,
}

impl Table {
    fn new(format: BenchFormat) -> Table {
        Table { format, rows: 0 }
    }

    fn print(&mut self, row: &Row) -> Result<()> {
        let first = self.rows == 0;
        self.rows += 1;
        match self.format {
            BenchFormat::Md => {
                if first {
                    println!(
                        "| {:<30} | {:>9} | {:>8} | {:<10} | {:>7} | {:>15} | {:>18} | {:>8} | {:>6} | {:>5} | {:>8} | {:>8} |",
                        "model",
                        "size",
                        "params",
                        "backend",
                        "threads",
                        "test",
                        "t/s",
                        "B/token",
                        "GB/s",
                        "of bw",
                        "peak RSS",
                        "load"
                    );
                    println!(
                        "| {:-<30} | {:->8}: | {:->7}: | {:-<10} | {:->6}: | {:->14}: | {:->17}: | {:->7}: | {:->5}: | {:->4}: | {:->7}: | {:->7}: |",
                        "", "", "", "", "", "", "", "", "", "", "", ""
                    );
                }
                println!("{}", markdown(row));
            }
            BenchFormat::Json => print!("{}{}", if first { "[\n" } else { ",\n" }, serde_json::to_string(row)?),
            BenchFormat::Jsonl => println!("{}", serde_json::to_string(row)?),
            BenchFormat::Csv => {
                if first {
                    println!(
                        "model,size_bytes,n_params,backend,threads,test,n_prompt,n_gen,depth,tokens_per_second,deviation,bytes_per_token,gb_per_second,bandwidth_share,load_ms,peak_resident_bytes"
                    );
                }
                println!("{}", csv(row));
            }
        }
        Ok(())
    }

    fn finish(&self) {
        if self.format == BenchFormat::Json {
            println!("{}", if self.rows == 0 { "[]" } else { "\n]" });
        }
    }
}

fn markdown(row: &Row) -> String {
    let dash = || "-".to_string();
    format!(
        "| {:<30} | {:>9} | {:>8} | {:<10} | {:>7} | {:>15} | {:>18} | {:>8} | {:>6} | {:>5} | {:>8} | {:>8} |",
        row.model,
        machine::bytes(row.size_bytes),
        params(row.n_params),
        row.backend,
        row.threads,
        row.test,
        format!("{:.2} ± {:.2}", row.tokens_per_second, row.deviation),
        row.bytes_per_token.map_or_else(dash, machine::bytes),
        row.gb_per_second.map_or_else(dash, |v| format!("{v:.1}")),
        row.bandwidth_share.map_or_else(dash, |v| format!("{:.0}%", v * 100.0)),
        row.peak_resident_bytes.map_or_else(dash, |v| machine::bytes(v as u64)),
        format!("{:.1} ms", row.load_ms),
    )
}

fn csv(row: &Row) -> String {
    let option = |v: Option<f64>| v.map_or_else(String::new, |v| v.to_string());
    [
        format!("\"{}\"", row.model.replace('"', "\"\"")),
        row.size_bytes.to_string(),
        row.n_params.to_string(),
        row.backend.clone(),
        row.threads.to_string(),
        row.test.clone(),
        row.n_prompt.to_string(),
        row.n_gen.to_string(),
        row.depth.to_string(),
        row.tokens_per_second.to_string(),
        row.deviation.to_string(),
        option(row.bytes_per_token.map(|v| v as f64)),
        option(row.gb_per_second),
        option(row.bandwidth_share),
        row.load_ms.to_string(),
        option(row.peak_resident_bytes.map(|v| v as f64)),
    ]
    .join(",")
}

fn params(n: u64) -> String {
    match n {
        0..1_000_000_000 => format!("{:.2} M", n as f64 / 1e6),
        _ => format!("{:.2} B", n as f64 / 1e9),
    }
}
