//! `moebius bench`: prompt and decode speed, in llama-bench's rows, beside the upper bound by memory bandwidth.
//!
//! Every figure comes through the engine, as a user's request would: random tokens, greedy unless a temperature is
//! given. The context before the measured tokens is computed once and found by the prefix cache; the measured tokens
//! differ between repetitions.

use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use backend::{CacheType, OpTime, PAGE};
use engine::scheduler::{EventKind, Events, Stats, Usage};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::gap::{self, request, text};
use super::sight;
use crate::answer::{Interrupt, drafts_summary, generate, streamed_summary};
use crate::args::{BenchArgs, BenchFormat, CopyArg, DraftArg};
use crate::compare::mean_and_deviation;
use crate::device::{self, Chosen, Device, Prefer};
use crate::load::{self, EngineSetup, Session, Whole};
use crate::machine::{self, Bandwidth};
use crate::out::{self, Out, note, say};
use crate::routes::Trace;
use crate::{find, version};

/// One line of the table.
#[derive(Debug, Serialize)]
struct BenchRow {
    model: String,
    size_bytes: u64,
    n_params: u64,
    backend: String,
    threads: usize,
    /// `pp512`, `tg128`, with `x8` behind them for sequences that decode together, and `@ d4096` at a depth.
    test: String,
    n_prompt: usize,
    n_gen: usize,
    depth: usize,
    n_parallel: usize,
    /// Tokens per second of each repetition.
    samples: Vec<f64>,
    tokens_per_second: f64,
    deviation: f64,
    /// Decode of one sequence only: weights and cache read for one token, at the middle of the measured span.
    bytes_per_token: Option<u64>,
    /// Likewise: those bytes times the tokens per second.
    gb_per_second: Option<f64>,
    /// Likewise: share of the read bandwidth of as many threads, measured before and after each repetition.
    bandwidth_share: Option<f64>,
    /// From opening the file to a program that can run.
    load_ms: f64,
    peak_resident_bytes: Option<usize>,
    /// The same and more, under llama-bench's names.
    #[serde(flatten)]
    llama: LlamaBench,
}

/// The keys of llama-bench's JSON that have a meaning here, for programs that read those.
#[derive(Debug, Serialize)]
struct LlamaBench {
    build_commit: &'static str,
    build_version: &'static str,
    cpu_info: String,
    backends: String,
    model_filename: String,
    model_type: String,
    model_size: u64,
    model_n_params: u64,
    n_batch: usize,
    n_ubatch: usize,
    n_threads: usize,
    type_k: &'static str,
    type_v: &'static str,
    use_mmap: bool,
    n_depth: usize,
    /// When the row was printed, UTC.
    test_time: String,
    avg_ns: u64,
    stddev_ns: u64,
    avg_ts: f64,
    stddev_ts: f64,
    samples_ns: Vec<u64>,
    samples_ts: Vec<f64>,
}

pub fn run(args: &BenchArgs) -> Result<()> {
    ensure!(args.repetitions > 0, "--repetitions must be at least 1");
    let flag = device::of_cpu(&args.step).or((!args.threads.is_empty()).then_some("--threads"));
    let device = Device::choose(args.backend, Prefer::Gpu, args.step.first_device(args.device)?, flag)?;
    let batch = device.kind.batch(&args.step);
    ensure!(args.parallel.iter().all(|n| (1..=batch).contains(n)), "--parallel must be between 1 and {batch}");
    let named = if args.named.is_empty() { &args.model } else { &args.named };
    let named = named.iter().map(|path| find::resolve_or_pull(path, args.pull)).collect::<Result<Vec<_>>>()?;
    if named.is_empty() {
        note!("{}", crate::embedded::notice());
    }
    let models: Vec<Option<&Path>> = match named.as_slice() {
        [] => vec![None],
        models => models.iter().map(|path| Some(path.as_path())).collect(),
    };
    let threads = if args.threads.is_empty() { vec![machine::cores()] } else { args.threads.clone() };
    let bar = machine::progress(None);
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}") {
        bar.set_style(style);
    }
    if let Some(image) = &args.image {
        let setup = EngineSetup { threads: Some(threads[0]), ..EngineSetup::on(device, args.step) };
        return models
            .iter()
            .enumerate()
            .try_for_each(|(i, path)| sight::print(args.output, i == 0, &sight::measure(*path, &setup, args, image)?));
    }
    if let Some(n_prompt) = args.gap {
        let parallel = args.parallel.iter().copied().max().unwrap_or(1);
        let step_time = args.step_time.map(|ms| Duration::from_millis(ms.into()));
        let draft = args.draft.clone();
        let setup = EngineSetup { threads: Some(threads[0]), step_time, draft, ..EngineSetup::on(device, args.step) };
        let mut table = gap::Table::new(args.output);
        return models.iter().try_for_each(|path| table.print(&gap::measure(*path, &setup, n_prompt, parallel)?));
    }
    let tests = tests(args);
    let mut runner =
        Runner { args, bar, interrupt: Interrupt::install()?, table: BenchTable::new(args.output), trace: None };
    for (path, &threads) in models.iter().flat_map(|path| threads.iter().map(move |threads| (*path, threads))) {
        let opened = runner.open(path, &setup(args, &device, threads))?;
        if runner.measure(opened, threads, path, &tests)? == Pace::Interrupted {
            return Ok(());
        }
    }
    runner.bar.finish_and_clear();
    if let (Some(path), Some(trace)) = (&args.trace_experts, &runner.trace) {
        trace.write(path)?;
    }
    runner.table.finish()
}

/// Returns all tests of a model, in the order of the table.
fn tests(args: &BenchArgs) -> Vec<Test> {
    let mut tests = Vec::new();
    for &depth in &args.depth {
        let prompts = args.n_prompt.iter().filter(|&&n| n > 0).map(|&n| (n, 0, 1));
        let gens = args.n_gen.iter().filter(|&&n| n > 0);
        let gens = gens.flat_map(|&n| args.parallel.iter().map(move |&parallel| (0, n, parallel)));
        let both = args.pg.iter().map(|&(n_prompt, n_gen)| (n_prompt, n_gen, 1));
        let all = prompts.chain(gens).chain(both);
        tests.extend(all.map(|(n_prompt, n_gen, parallel)| Test { n_prompt, n_gen, depth, parallel }));
    }
    tests
}

/// Returns the settings of an engine with room for the largest test.
fn setup(args: &BenchArgs, device: &Device, threads: usize) -> EngineSetup {
    let both = args.pg.iter().map(|(n_prompt, n_gen)| n_prompt + n_gen);
    let longest = args.n_prompt.iter().chain(&args.n_gen).copied().chain(both).max().unwrap_or(0);
    let deepest = args.depth.iter().max().copied().unwrap_or(0);
    let parallel = args.parallel.iter().max().copied().unwrap_or(1);
    let start = steps_to_start(parallel, device.kind.batch(&args.step));
    EngineSetup {
        threads: Some(threads),
        // Whole pages, and one more: a sequence starts when a page beyond those it needs is free. A step may give a
        // token more than it has drafts.
        ctx: Some(((longest + start + 2) * args.tokens_per_step() + deepest).next_multiple_of(PAGE) + PAGE),
        draft: args.draft.clone(),
        // Off without a context to find: it copies recurrent states.
        prefix_cache: deepest > 0,
        sequences: parallel,
        ..EngineSetup::on(device.clone(), args.step)
    }
}

/// Whether measuring goes on.
#[derive(PartialEq, Eq)]
enum Pace {
    Done,
    Interrupted,
}

/// A model that is ready to be measured.
struct Opened {
    session: Session,
    load_ms: f64,
    bandwidth: Bandwidth,
}

/// Everything that outlives the models of a run: what is asked, and where results go.
struct Runner<'a> {
    args: &'a BenchArgs,
    bar: ProgressBar,
    interrupt: Interrupt,
    table: BenchTable,
    trace: Option<Trace>,
}

impl Runner<'_> {
    /// Opens a model and notes what it is, and how fast the host's memory is if that limits it.
    fn open(&mut self, path: Option<&Path>, setup: &EngineSetup) -> Result<Opened> {
        let start = Instant::now();
        let model = load::open(path)?.stretched(setup.step.rope_scaling)?;
        Whole::refuse(Whole::of(&model.plan))?;
        let mut session = load::start_with(model, setup)?;
        session.engine.set_interrupt(self.interrupt.flag());
        self.bar.suspend(|| session.placement.iter().for_each(|placement| note!("{placement}")));
        if self.args.trace_experts.is_some() {
            self.trace.get_or_insert_with(|| Trace::new(session.engine.routers()));
        }
        let load_ms = start.elapsed().as_secs_f64() * 1e3;
        let threads = machine::threads(setup.threads)?;
        let mut bandwidth = Bandwidth::new(threads);
        if session.device.is_host() {
            self.bar.set_message(format!("measuring the read bandwidth of {threads} threads"));
            self.bar.tick();
            bandwidth.measure()?;
            self.bar.suspend(|| {
                note!("{}: {threads} threads read {:.1} GB/s", machine::processor(), bandwidth.take() / 1e9);
            });
        }
        self.bar.suspend(|| {
            let (n, size) = (machine::count(session.n_params), machine::bytes(session.size_bytes));
            note!("{}: {n} parameters, {size}, ready in {load_ms:.1} ms", name(path, &session));
        });
        Ok(Opened { session, load_ms, bandwidth })
    }

    /// Runs the tests on a model and prints a row for each.
    fn measure(&mut self, opened: Opened, threads: usize, path: Option<&Path>, tests: &[Test]) -> Result<Pace> {
        let Runner { args, bar, interrupt, table, trace } = self;
        let Opened { session, load_ms, mut bandwidth } = opened;
        let on_cpu = session.device.is_host();
        let (interrupt, trace, unused, temperature) = (&*interrupt, trace.as_mut(), DEPTHS, args.temp);
        let mut bench = Bench { session, threads, interrupt, unused, is_traced: false, trace, temperature };
        for test in tests {
            bar.set_message(format!("{} with {threads} threads", test.name()));
            bar.tick();
            bench.warm_up(test)?;
            let before = bench.session.engine.stats();
            // Decoding is compared with what the memory gives before, between and after the repetitions.
            let is_bound = test.n_gen > 0 && on_cpu;
            if is_bound {
                bandwidth.measure()?;
            }
            let mut samples = Vec::with_capacity(args.repetitions);
            for _ in 0..args.repetitions {
                samples.push(bench.measure(test)?);
                bar.tick();
                if interrupt.is_set() {
                    return Ok(Pace::Interrupted);
                }
                if is_bound {
                    bandwidth.measure()?;
                }
            }
            let run = RunFacts { args, path, threads, load_ms };
            table.print(&row(&bench.session, test, &run, &mut bandwidth, &samples))?;
            bar.suspend(|| note_work(&before, &bench.session.engine.stats()));
            if args.verbose {
                bench.print_times(test)?;
            }
        }
        Ok(Pace::Done)
    }
}

/// Returns what a model is called in notes: its file, where there is one.
fn name(path: Option<&Path>, session: &Session) -> String {
    let file = path.and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    file.unwrap_or_else(|| session.description.clone())
}

/// What drafts and streaming did between two moments.
fn note_work(before: &Stats, after: &Stats) {
    let [drafted, accepted] = [after.drafted - before.drafted, after.accepted - before.accepted];
    drafts_summary(&Stats { drafted, accepted, ..*after }).iter().for_each(|line| note!("{line}"));
    if let (Some(from), Some(to)) = (before.streamed, after.streamed) {
        note!("{}", streamed_summary(&to.since(from), after.tokens - before.tokens));
    }
}

/// Upper bound on the steps until every sequence has produced a token, given cached prompts.
fn steps_to_start(parallel: usize, batch: usize) -> usize {
    (parallel * PAGE).div_ceil(batch.saturating_sub(parallel).max(1))
}

/// One thing to measure: a prompt, a generation, or one behind the other, after `depth` tokens of context.
struct Test {
    n_prompt: usize,
    n_gen: usize,
    depth: usize,
    /// Sequences that decode together.
    parallel: usize,
}

impl Test {
    /// Returns whether steps have one token.
    fn is_single(&self) -> bool {
        self.n_gen > 0 && self.n_prompt == 0 && self.parallel == 1
    }

    fn name(&self) -> String {
        let mut name = match (self.n_prompt, self.n_gen) {
            (n_prompt, 0) => format!("pp{n_prompt}"),
            (0, n_gen) => format!("tg{n_gen}"),
            (n_prompt, n_gen) => format!("pp{n_prompt}+tg{n_gen}"),
        };
        if self.parallel > 1 {
            name += &format!(" x{}", self.parallel);
        }
        if self.depth > 0 {
            name += &format!(" @ d{}", self.depth);
        }
        name
    }
}

/// Texts below this number are the contexts before the measured tokens of each sequence, the same in every repetition.
const DEPTHS: u64 = 1 << 16;

/// Sequences that do not fit together are not measured.
const TOO_MANY: &str = "failed to measure: memory cannot hold the caches of all sequences (--parallel)";

/// A measurement: tokens and time.
struct Measured {
    tokens: usize,
    time: Duration,
}

impl Measured {
    /// Tokens per second.
    fn rate(&self) -> f64 {
        self.tokens as f64 / self.time.as_secs_f64()
    }
}

/// An engine under measurement.
struct Bench<'a> {
    session: Session,
    threads: usize,
    interrupt: &'a Interrupt,
    /// Number of the next unused text.
    unused: u64,
    /// Whether ops are timed during a measurement.
    is_traced: bool,
    /// What decoded tokens chose, where that is wanted.
    trace: Option<&'a mut Trace>,
    /// Of decoded tokens.
    temperature: f32,
}

impl Bench<'_> {
    /// Touches the weights and computes the context before the measured tokens.
    fn warm_up(&mut self, test: &Test) -> Result<()> {
        if test.depth > 0 {
            // By itself, so that the cache can be resumed where it ends.
            for sequence in 0..test.parallel as u64 {
                self.request(self.text(sequence, test.depth), 1)?;
            }
        }
        self.measure(test).map(drop)
    }

    fn measure(&mut self, test: &Test) -> Result<Measured> {
        if test.n_prompt > 0 { self.prompt(test) } else { self.decode(test) }
    }

    /// Measures a prompt: its time runs from its first step to its first token, and on through `n_gen` steps after it.
    fn prompt(&mut self, test: &Test) -> Result<Measured> {
        let mut tokens = self.text(0, test.depth);
        tokens.extend(self.text(self.unused, test.n_prompt));
        self.unused += 1;
        self.session.engine.trace_times(self.is_traced);
        let usage = self.request(tokens, 1 + test.n_gen)?;
        // The part of the depth that the cache has not, less than a page, was computed as well.
        let tokens = usage.prompt_tokens - usage.cached_tokens + test.n_gen;
        Ok(Measured { tokens, time: usage.timings.prompt + usage.timings.decode })
    }

    /// Returns a generation's time runs from when the last of its sequences has its first token, which comes out of the
    /// prompt: `n_gen` steps.
    fn decode(&mut self, test: &Test) -> Result<Measured> {
        let n_steps = test.n_gen + steps_to_start(test.parallel, self.session.limits.max_tokens) + 2;
        let n_gen = n_steps * (1 + self.session.limits.max_draft);
        let preemptions = self.session.engine.stats().preemptions;
        let mut ids = Vec::with_capacity(test.parallel);
        for i in 0..test.parallel as u64 {
            let mut request = request(self.text(i, test.depth.max(1)), n_gen, self.temperature);
            request.routing = self.trace.is_some();
            ids.push(self.session.engine.submit(request)?);
        }
        let measured = self.time_steps(test);
        self.session.engine.trace_times(false);
        ids.iter().for_each(|&id| _ = self.session.engine.cancel(id));
        let mut events = Events::new();
        while self.session.engine.step(&mut events)? {
            events.clear();
        }
        ensure!(self.session.engine.stats().preemptions == preemptions, TOO_MANY);
        measured
    }

    fn time_steps(&mut self, test: &Test) -> Result<Measured> {
        let mut events = Events::new();
        let mut tokens = 0;
        // As many tokens as sequences in one step: all have begun.
        while tokens < test.parallel && !self.interrupt.is_set() {
            tokens = self.step(&mut events)?;
        }
        self.session.engine.trace_times(self.is_traced);
        let (start, mut tokens) = (Instant::now(), 0);
        for _ in 0..test.n_gen {
            tokens += self.step(&mut events)?;
            if self.interrupt.is_set() {
                break;
            }
        }
        Ok(Measured { tokens, time: start.elapsed() })
    }

    /// Measures once more with timed ops, and prints their times.
    fn print_times(&mut self, test: &Test) -> Result<()> {
        self.is_traced = true;
        let measured = self.measure(test);
        self.is_traced = false;
        self.session.engine.trace_times(false);
        let total = measured?.time.as_secs_f64();
        let mut rows = self.session.engine.times().to_vec();
        let outside = (total - rows.iter().map(|row| row.time.as_secs_f64()).sum::<f64>()).max(0.0);
        let serial = rows.iter().map(|row| row.serial.as_secs_f64()).sum::<f64>() + outside;
        let launches = rows.iter().map(|row| row.launches).sum::<u64>();
        let steps = rows.iter().map(|row| row.steps).max().unwrap_or(0).max(1) as f64;
        rows.sort_by_key(|row| std::cmp::Reverse(row.time));
        rows.push(OpTime {
            name: "outside the steps".into(),
            time: Duration::from_secs_f64(outside),
            serial: Duration::from_secs_f64(outside),
            ..OpTime::default()
        });
        let us = |time: f64| format!("{:.1}", time / steps * 1e6);
        note!(
            "{:<50} {:>8} {:>10} {:>6} {:>9} {:>5} {:>6}",
            "a step",
            "launches",
            "us",
            "",
            "us serial",
            "busy",
            "GB/s"
        );
        for row in &rows {
            let time = row.time.as_secs_f64();
            // A step of several tokens reads more experts than one token does, unless they choose the same.
            let rate = row.bytes as f64 * steps / time / 1e9;
            // Of all threads, and of the time in which more than one could work.
            let parallel = (row.time.saturating_sub(row.serial)).as_secs_f64() * self.threads as f64;
            let busy = row.busy.as_secs_f64() / parallel * 100.0;
            note!(
                "{:<50} {:>8.1} {:>10} {:>5.1}% {:>9} {:>5} {:>6}",
                row.name,
                row.launches as f64 / steps,
                us(time),
                time / total * 100.0,
                us(row.serial.as_secs_f64()),
                if row.busy.is_zero() { String::new() } else { format!("{busy:.0}%") },
                if row.bytes > 0 && test.is_single() { format!("{rate:.1}") } else { String::new() },
            );
        }
        let launches = launches as f64 / steps;
        note!("{:<50} {launches:>8.1} {:>10} {:>6} {:>9}", "total", us(total), "", us(serial));
        if let Some(files) = checkpoint::resident_files() {
            let [files, large] = [files.bytes, files.in_large_pages].map(|n| machine::bytes(n as u64));
            note!("{large} of {files} of mapped files are in pages of 2 MB");
        }
        Ok(())
    }

    /// Runs a step; returns the number of tokens it produced.
    fn step(&mut self, events: &mut Events) -> Result<usize> {
        events.clear();
        // Answers are longer than the measured span: they end early only when sequences do not fit together.
        ensure!(self.session.engine.step(events)?, TOO_MANY);
        let mut tokens = 0;
        for event in events.iter() {
            match event.kind {
                EventKind::Token { routing, .. } => {
                    tokens += 1;
                    if let (Some(trace), Some(ids)) = (&mut self.trace, routing) {
                        trace.tokens.push(ids.to_vec());
                    }
                }
                EventKind::Failed(error) => return Err(error.clone().into()),
                EventKind::Done { .. } | EventKind::Embedding(_) | EventKind::Prompt { .. } => {}
            }
        }
        Ok(tokens)
    }

    fn text(&self, number: u64, len: usize) -> Vec<u32> {
        text(self.session.n_vocab, number, len)
    }

    fn request(&mut self, tokens: Vec<u32>, n_gen: usize) -> Result<Usage> {
        Ok(generate(&mut self.session.engine, request(tokens, n_gen, self.temperature), self.interrupt, |_| Ok(()))?
            .usage)
    }
}

/// Three decimals: no measurement knows more.
fn short(x: f64) -> f64 {
    (x * 1e3).round() / 1e3
}

/// What rows share.
struct RunFacts<'a> {
    args: &'a BenchArgs,
    path: Option<&'a Path>,
    threads: usize,
    load_ms: f64,
}

fn row(s: &Session, test: &Test, run: &RunFacts<'_>, bandwidth: &mut Bandwidth, samples: &[Measured]) -> BenchRow {
    let rates: Vec<f64> = samples.iter().map(|sample| short(sample.rate())).collect();
    let (tokens_per_second, deviation) = mean_and_deviation(&rates);
    let (tokens_per_second, deviation) = (short(tokens_per_second), short(deviation));
    // A step with drafts has more than one token.
    let bytes_per_token = (test.is_single() && s.limits.max_draft == 0).then(|| {
        let context = test.depth as u64 + test.n_gen as u64 / 2;
        s.weight_bytes_per_token + s.units.read_per_token(context)
    });
    let rate = bytes_per_token.map(|bytes| bytes as f64 * tokens_per_second);
    BenchRow {
        model: s.description.clone(),
        size_bytes: s.size_bytes,
        n_params: s.n_params,
        backend: s.backend.clone(),
        threads: run.threads,
        test: format!("{}{}", test.name(), drafts_name(test, run.args)),
        n_prompt: test.n_prompt,
        n_gen: test.n_gen,
        depth: test.depth,
        n_parallel: test.parallel,
        tokens_per_second,
        deviation,
        bytes_per_token,
        gb_per_second: rate.map(|rate| short(rate / 1e9)),
        bandwidth_share: rate.map(|rate| rate / bandwidth.take()).filter(|share| share.is_finite()).map(short),
        load_ms: short(run.load_ms),
        peak_resident_bytes: bandwidth.peak_resident(),
        llama: llama(s, test, run, samples, (tokens_per_second, deviation)),
        samples: rates,
    }
}

/// What a generation's name says of drafts: ` mtp3`.
fn drafts_name(test: &Test, args: &BenchArgs) -> String {
    match (test.n_gen, &args.draft.draft) {
        (0, _) | (_, DraftArg::Off) => String::new(),
        (_, DraftArg::Auto) => format!(" auto{}", args.draft.n_max()),
        (_, DraftArg::Ngram) => format!(" ngram{}", args.draft.n_max()),
        (_, DraftArg::Mtp) => format!(" mtp{}", args.draft.n_max()),
        (_, DraftArg::Model(_)) => format!(" model{}", args.draft.n_max()),
    }
}

fn llama(
    s: &Session,
    test: &Test,
    run: &RunFacts<'_>,
    samples: &[Measured],
    (avg_ts, stddev_ts): (f64, f64),
) -> LlamaBench {
    let samples_ns: Vec<u64> = samples.iter().map(|s| u64::try_from(s.time.as_nanos()).unwrap_or(u64::MAX)).collect();
    let (avg_ns, stddev_ns) = mean_and_deviation(&samples_ns.iter().map(|&ns| ns as f64).collect::<Vec<_>>());
    let step = &run.args.step;
    let cache = match s.device {
        Chosen::Reference if !step.cache_type.has_blocks() => CacheType::F32,
        _ => step.cache_type,
    };
    let now = jiff::Timestamp::now();
    LlamaBench {
        build_commit: version::COMMIT,
        build_version: version::NUMBER,
        cpu_info: machine::processor(),
        backends: s.backend.clone(),
        model_filename: run.path.map_or_else(|| "(embedded)".into(), |path| path.display().to_string()),
        model_type: s.short_name(),
        model_size: s.size_bytes,
        model_n_params: s.n_params,
        n_batch: s.device.batch(step),
        n_ubatch: s.device.batch(step),
        n_threads: run.threads,
        type_k: cache.k.name(),
        type_v: cache.v.name(),
        use_mmap: step.copy_weights != CopyArg::All,
        n_depth: test.depth,
        test_time: jiff::Timestamp::from_second(now.as_second()).unwrap_or(now).to_string(),
        avg_ns: avg_ns as u64,
        stddev_ns: stddev_ns as u64,
        avg_ts,
        stddev_ts,
        samples_ns,
        samples_ts: samples.iter().map(|sample| short(sample.rate())).collect(),
    }
}

/// Prints rows as they come.
struct BenchTable {
    format: BenchFormat,
    rows: usize,
}

impl BenchTable {
    fn new(format: BenchFormat) -> BenchTable {
        BenchTable { format, rows: 0 }
    }

    fn print(&mut self, row: &BenchRow) -> Result<()> {
        let first = self.rows == 0;
        self.rows += 1;
        match self.format {
            BenchFormat::Md => {
                if first {
                    let titles = ["model", "size", "backend", "thr", "test", "t/s", "B/token", "bw"];
                    say!("{}", line(titles.map(String::from)))?;
                    let right = [false, true, false, true, true, true, true, true];
                    let dashes =
                        |i: usize| format!("{}{}", "-".repeat(WIDTHS[i] - 1), if right[i] { ":" } else { "-" });
                    say!("{}", line(std::array::from_fn(dashes)))?;
                }
                say!("{}", markdown(row))?;
            }
            BenchFormat::Json => {
                let json = out::json(&serde_json::to_string(row)?);
                write!(Out::lock(), "{}{json}", if first { "[\n" } else { ",\n" })?;
            }
            BenchFormat::Jsonl => out::json_line(row)?,
            BenchFormat::Csv => {
                if first {
                    say!(
                        "model,size_bytes,n_params,backend,threads,test,n_prompt,n_gen,depth,n_parallel,tokens_per_second,deviation,bytes_per_token,\
                         gb_per_second,bandwidth_share,load_ms,peak_resident_bytes,build_commit,cpu_info,model_filename,\
                         test_time"
                    )?;
                }
                say!("{}", csv(row))?;
            }
        }
        Ok(())
    }

    fn finish(&self) -> Result<()> {
        match self.format {
            BenchFormat::Json => say!("{}", if self.rows == 0 { "[]" } else { "\n]" }),
            BenchFormat::Md => say!("\nmoebius {} on {}", version::short(), machine::processor()),
            BenchFormat::Jsonl | BenchFormat::Csv => Ok(()),
        }
    }
}

/// Columns of the table: a row takes 100 characters.
const WIDTHS: [usize; 8] = [17, 7, 10, 3, 14, 13, 7, 4];

/// Returns a line of the table; names to the left, numbers to the right.
fn line(cells: [String; 8]) -> String {
    let [model, size, backend, threads, test, rate, bytes, share] = cells;
    let [a, b, c, d, e, f, g, h] = WIDTHS;
    format!(
        "| {model:<a$} | {size:>b$} | {backend:<c$} | {threads:>d$} | {test:>e$} | {rate:>f$} | {bytes:>g$} | {share:>h$} |"
    )
}

fn markdown(row: &BenchRow) -> String {
    let dash = || "-".to_string();
    let decimals = match row.tokens_per_second {
        1000.0.. => 0,
        100.0.. => 1,
        _ => 2,
    };
    line([
        row.llama.model_type.clone(),
        machine::bytes(row.size_bytes),
        row.backend.clone(),
        row.threads.to_string(),
        row.test.clone(),
        format!("{:.decimals$} ± {:.decimals$}", row.tokens_per_second, row.deviation),
        row.bytes_per_token.map_or_else(dash, machine::bytes),
        row.bandwidth_share.map_or_else(dash, |v| format!("{:.0}%", v * 100.0)),
    ])
}

/// Returns a text as a field of CSV.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "\"\""))
}

fn csv(row: &BenchRow) -> String {
    let option = |v: Option<f64>| v.map_or_else(String::new, |v| v.to_string());
    [
        quoted(&row.model),
        row.size_bytes.to_string(),
        row.n_params.to_string(),
        row.backend.clone(),
        row.threads.to_string(),
        row.test.clone(),
        row.n_prompt.to_string(),
        row.n_gen.to_string(),
        row.depth.to_string(),
        row.n_parallel.to_string(),
        row.tokens_per_second.to_string(),
        row.deviation.to_string(),
        option(row.bytes_per_token.map(|v| v as f64)),
        option(row.gb_per_second),
        option(row.bandwidth_share),
        row.load_ms.to_string(),
        option(row.peak_resident_bytes.map(|v| v as f64)),
        row.llama.build_commit.into(),
        quoted(&row.llama.cpu_info),
        quoted(&row.llama.model_filename),
        row.llama.test_time.clone(),
    ]
    .join(",")
}
