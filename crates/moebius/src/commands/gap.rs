//! `moebius bench --gap`: what a long prompt costs those who share an engine with it.
//!
//! Answers run; a long prompt is submitted, and a short one shortly after. Measured are the gaps between the answers'
//! tokens until the long prompt is computed, and the times to the first tokens of both.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use backend::PAGE;
use engine::sampler::SamplerParams;
use engine::scheduler::{EventKind, Events, Request, RequestId};
use serde::Serialize;

use crate::args::BenchFormat;
use crate::load::{self, EngineSetup, Whole};
use crate::out::{self, say};
use crate::{machine, version};

/// Tokens of the short prompt, and time after which it follows the long one.
const SHORT: usize = 32;
const LATER: Duration = Duration::from_millis(500);
/// Tokens of each answer before the long prompt, in which the engine finds out what steps cost.
const BEFORE: usize = 32;

/// What was measured with one model.
#[derive(Debug, Serialize)]
pub struct GapRow {
    model: String,
    backend: String,
    threads: usize,
    n_prompt: usize,
    /// Answers that run.
    n_parallel: usize,
    /// Between the tokens of an answer, in milliseconds.
    gap_p50_ms: f64,
    gap_p99_ms: f64,
    gap_max_ms: f64,
    /// The longest without a prompt.
    quiet_p99_ms: f64,
    /// From the short prompt to its first token, and from the long one to its.
    short_first_token_ms: f64,
    long_first_token_ms: f64,
    build_commit: &'static str,
    cpu_info: String,
}

/// Measures one model with a prompt of `n_prompt` tokens next to `parallel` answers.
pub fn measure(path: Option<&Path>, setup: &EngineSetup, n_prompt: u32, parallel: usize) -> Result<GapRow> {
    let n_prompt = n_prompt as usize;
    // An answer has a token a step, and a prompt takes fewer steps than it has tokens.
    let setup = EngineSetup {
        ctx: Some((n_prompt + SHORT + BEFORE).next_multiple_of(PAGE) + 2 * PAGE),
        sequences: parallel + 2,
        ..setup.clone()
    };
    let model = load::open(path)?.stretched(setup.step.rope_scaling)?;
    Whole::refuse(Whole::of(&model.plan))?;
    let mut session = load::start_with(model, &setup)?;
    let (n_vocab, engine) = (session.n_vocab, &mut session.engine);
    let mut numbers = 0..;
    let mut next = |n: usize, n_gen: usize| request(text(n_vocab, numbers.next().unwrap_or(0), n), n_gen, 0.0);
    let mut line = Timeline::default();
    // Weights are read, and the engine knows its machine.
    engine.submit(next(n_prompt.min(1024), 1))?;
    while engine.has_work() {
        line.step(engine)?;
    }
    let answers = (0..parallel).map(|_| engine.submit(next(SHORT, usize::MAX))).collect::<Result<Vec<_>, _>>()?;
    while answers.iter().any(|id| line.tokens.get(id).is_none_or(|times| times.len() < BEFORE)) {
        line.step(engine)?;
    }
    let start = Instant::now();
    let mut quiet = line.gaps(&answers, None);
    let long = engine.submit(next(n_prompt, 1))?;
    while start.elapsed() < LATER {
        line.step(engine)?;
    }
    let short_start = Instant::now();
    let short = engine.submit(next(SHORT, 1))?;
    while !(line.tokens.contains_key(&long) && line.tokens.contains_key(&short)) {
        line.step(engine)?;
    }
    let mut gaps = line.gaps(&answers, Some(start));
    let first = |id: RequestId, since: Instant| line.tokens[&id][0].saturating_duration_since(since);
    Ok(GapRow {
        gap_p50_ms: quantile(&mut gaps, 0.5),
        gap_p99_ms: quantile(&mut gaps, 0.99),
        gap_max_ms: quantile(&mut gaps, 1.0),
        quiet_p99_ms: quantile(&mut quiet, 0.99),
        short_first_token_ms: ms(first(short, short_start)),
        long_first_token_ms: ms(first(long, start)),
        model: session.description.clone(),
        backend: session.backend.clone(),
        threads: machine::threads(setup.threads)?,
        n_prompt,
        n_parallel: parallel,
        build_commit: version::COMMIT,
        cpu_info: machine::processor(),
    })
}

/// When each token of each request came.
#[derive(Default)]
struct Timeline {
    events: Events,
    tokens: HashMap<RequestId, Vec<Instant>>,
}

impl Timeline {
    fn step(&mut self, engine: &mut engine::scheduler::Engine) -> Result<()> {
        self.events.clear();
        engine.step(&mut self.events)?;
        let now = Instant::now();
        for event in self.events.iter() {
            match event.kind {
                EventKind::Token { .. } => self.tokens.entry(event.id).or_default().push(now),
                EventKind::Failed(error) => bail!("{error}"),
                _ => {}
            }
        }
        Ok(())
    }

    /// Gaps between the tokens of these requests, in milliseconds: those that end after `since`.
    fn gaps(&self, of: &[RequestId], since: Option<Instant>) -> Vec<f64> {
        let times = of.iter().filter_map(|id| self.tokens.get(id));
        let pairs = times.flat_map(|times| times.windows(2));
        pairs.filter(|pair| since.is_none_or(|since| pair[1] > since)).map(|pair| ms(pair[1] - pair[0])).collect()
    }
}

/// Returns the value below which this share of them is.
fn quantile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    values.get((last as f64 * share).ceil() as usize).copied().unwrap_or(0.0)
}

/// Text number `number`: a fixed scatter of ids, so that routing and embedding rows do not repeat.
pub(super) fn text(n_vocab: usize, number: u64, len: usize) -> Vec<u32> {
    let n_vocab = n_vocab as u64;
    let id =
        |i: u64| (i.wrapping_mul(2_654_435_761).wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a)) >> 7) % n_vocab;
    (0..len as u64).map(|i| id(i) as u32).collect()
}

pub(super) fn request(tokens: Vec<u32>, n_gen: usize, temperature: f32) -> Request {
    let mut request = Request::new(tokens);
    request.max_new_tokens = n_gen;
    request.ignore_eos = true;
    let greedy = SamplerParams::greedy();
    let random = SamplerParams { temperature, top_p: 1.0, min_p: 0.0, ..SamplerParams::default() };
    request.sampling = if temperature > 0.0 { random } else { greedy };
    request
}

/// Returns the middle value.
pub(super) fn median(values: &mut [f64]) -> f64 {
    quantile(values, 0.5)
}

/// Milliseconds, to the microsecond.
pub(super) fn ms(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e3
}

/// Prints rows as they come.
pub struct Table {
    format: BenchFormat,
    rows: usize,
}

impl Table {
    pub fn new(format: BenchFormat) -> Table {
        Table { format, rows: 0 }
    }

    /// Prints a row: of a table, or an object a line.
    pub fn print(&mut self, row: &GapRow) -> Result<()> {
        if self.format != BenchFormat::Md {
            return out::json_line(row);
        }
        if self.rows == 0 {
            say!(
                "| model | backend | thr | prompt | answers | gap p50 | p99 | max | alone p99 | short first | long first |"
            )?;
            say!("|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")?;
        }
        self.rows += 1;
        let shown = |ms: f64| if ms < 1000.0 { format!("{ms:.0} ms") } else { format!("{:.1} s", ms / 1e3) };
        let [p50, p99, max, quiet, short, long] = [
            row.gap_p50_ms,
            row.gap_p99_ms,
            row.gap_max_ms,
            row.quiet_p99_ms,
            row.short_first_token_ms,
            row.long_first_token_ms,
        ]
        .map(shown);
        let GapRow { model, backend, threads, n_prompt, n_parallel, .. } = row;
        say!(
            "| {model} | {backend} | {threads} | {n_prompt} | {n_parallel} | {p50} | {p99} | {max} | {quiet} | {short} \
             | {long} |"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_sorted_values() {
        let mut values: Vec<f64> = (0..=100).rev().map(f64::from).collect();
        assert_eq!([0.5, 0.99, 1.0].map(|share| quantile(&mut values, share)), [50.0, 99.0, 100.0]);
        assert_eq!(quantile(&mut [], 0.5), 0.0);
    }
}
