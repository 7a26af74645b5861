//! `moebius compare`: what a model lost against another of the same vocabulary, on a text.
//!
//! The windows are those of `moebius perplexity`, and so of llama-perplexity: of each the second half is scored. Both
//! models compute the same piece of a window one after the other, so that memory holds the rows of one piece.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use engine::tokenizer::{Decode, Encode, Tokenizer};
use indicatif::ProgressStyle;
use serde::Serialize;

use crate::args::CompareArgs;
use crate::compare::{Windows, mean_and_deviation, nll, row_distance};
use crate::device::{Chosen, Device, Prefer};
use crate::load::{self, EngineSetup, Model, Sequence};
use crate::out::say;
use crate::{input, machine, out};

/// Tokens of a window where nothing else is said.
pub(super) const DEFAULT_CTX: usize = 512;
/// Logits of the base model that are held at a time.
const MAX_LOGITS: usize = 16 << 20;

pub fn run(args: &CompareArgs) -> Result<()> {
    let [base_path, other_path] = args.models.as_slice() else {
        anyhow::bail!("compare requires two models: -m BASE -m OTHER");
    };
    let base = load::open(Some(base_path))?.stretched(args.engine.step.rope_scaling)?;
    let other = load::open(Some(other_path))?.stretched(args.engine.step.rope_scaling)?;
    let n_ctx = args.engine.ctx.unwrap_or(DEFAULT_CTX);
    let mut windows = windows(&base, &args.file, n_ctx, args.chunks)?;
    let n_windows = windows.len();
    let tokenizer = ensure_like(&base, &other)?;

    let mut setup = EngineSetup::of(&args.engine, Prefer::Cpu)?;
    let other_device = match args.other_backend {
        Some(_) => Device::choose(args.other_backend, Prefer::Cpu, args.engine.device, None)?,
        None => setup.device.clone(),
    };
    let mut other_setup = EngineSetup { device: other_device, ..setup.clone() };
    if let Some(cache) = args.other_cache_type {
        other_setup.step.cache_type = cache;
    }
    // A GPU's memory is for the side that has the GPU.
    let is_cuda = [&setup, &other_setup].map(|setup| setup.device.kind == Chosen::Cuda);
    for (setup, is_cuda, other) in [(&mut setup, is_cuda[0], is_cuda[1]), (&mut other_setup, is_cuda[1], is_cuda[0])] {
        if other && !is_cuda {
            setup.step.gpu_memory = None;
        }
    }
    let mut ours = Sequence::start_with(&base, &setup, n_ctx).with_context(|| start(base_path))?;
    let mut theirs = Sequence::start_with(&other, &other_setup, n_ctx).with_context(|| start(other_path))?;
    let n_vocab = ours.n_vocab();
    ensure!(
        n_vocab == theirs.n_vocab(),
        "failed to compare models: {} has {n_vocab} tokens, {} has {}",
        base_path.display(),
        other_path.display(),
        theirs.n_vocab()
    );
    let found = measure(&mut ours, &mut theirs, &mut windows, setup.device.kind.batch(&args.engine.step))?;
    let report = found.report(&tokenizer, n_windows, n_ctx);
    if args.json { out::json_line(&report) } else { report.print() }
}

/// Returns the base's tokenizer. Refuses models whose tokens are others; a few names may differ, which fine-tuning
/// gives to spare tokens.
fn ensure_like(base: &Model, other: &Model) -> Result<Tokenizer> {
    let a = Tokenizer::load(&base.checkpoint)?;
    // Where it has no tokenizer, there is nothing to compare.
    let Ok(b) = Tokenizer::load(&other.checkpoint) else { return Ok(a) };
    let n_vocab = a.n_vocab().min(b.n_vocab());
    let n_other = (0..n_vocab as u32).filter(|&id| a.token_bytes(id) != b.token_bytes(id)).count();
    ensure!(
        n_other <= n_vocab / 100,
        "failed to compare models: {n_other} of {n_vocab} tokens are others in {} than in {}",
        other.checkpoint.name(),
        base.checkpoint.name()
    );
    Ok(a)
}

/// Returns the windows of a text, of which there is at least one.
pub(super) fn windows(base: &Model, file: &Path, n_ctx: usize, max: Option<usize>) -> Result<Windows> {
    let tokenizer = Tokenizer::load(&base.checkpoint)?;
    let tokens = tokenizer.encode(&input::text(file)?, Encode { add_special: true, parse_special: false });
    ensure!(n_ctx >= 4, "--ctx must be at least 4, it is {n_ctx}");
    ensure!(max != Some(0), "--chunks must be at least 1");
    let windows = Windows::new(tokens, &tokenizer, n_ctx, max);
    ensure!(
        windows.len() > 0,
        "failed to compare models: the text has {} tokens, at least {n_ctx} are required (--ctx makes windows shorter)",
        windows.n_tokens()
    );
    Ok(windows)
}

/// Computes the windows with both models, in steps of at most `n_batch` tokens.
pub(super) fn measure(
    ours: &mut Sequence,
    theirs: &mut Sequence,
    windows: &mut Windows,
    n_batch: usize,
) -> Result<Comparison> {
    let (n_vocab, first_scored) = (ours.n_vocab(), windows.first_scored());
    let piece = (MAX_LOGITS / n_vocab).clamp(1, n_batch);
    let bar = machine::progress(Some(windows.len() as u64));
    bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} windows, {eta} left, mean KL {msg}")?);
    let mut found = Comparison::default();
    let mut held = Vec::new();
    for (i, window) in windows.iter().enumerate() {
        ours.rewind();
        theirs.rewind();
        for (n, chunk) in window.chunks(piece).enumerate() {
            held.clear();
            ours.feed_from(chunk, first_scored, |_, row| {
                held.extend_from_slice(row);
                Ok(())
            })?;
            let first = (n * piece).max(first_scored);
            theirs.feed_from(chunk, first_scored, |position, row| {
                let base = &held[(position - first) * n_vocab..][..n_vocab];
                found.add((i, position), base, row, window.get(position + 1).copied());
                Ok(())
            })?;
        }
        bar.set_message(format!("{:.6}", found.kl_mean()));
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(found)
}

fn start(path: &Path) -> String {
    format!("failed to start {}", path.display())
}

/// What was found position by position.
#[derive(Default)]
pub(super) struct Comparison {
    kl: Vec<f64>,
    /// The largest KL, its window and position, and the text's token after that.
    worst: Option<(f64, (usize, usize), Option<u32>)>,
    n_same_top: usize,
    /// Negative log-likelihoods of the text by both models.
    nll: [Vec<f64>; 2],
}

impl Comparison {
    /// Takes a row of both models, of a window and a position in it; `next` is the text's token after it, where the
    /// window has one.
    fn add(&mut self, at: (usize, usize), base: &[f32], other: &[f32], next: Option<u32>) {
        let (kl, is_same) = row_distance(other, base);
        if self.worst.is_none_or(|(worst, ..)| kl.total_cmp(&worst).is_gt()) {
            self.worst = Some((kl, at, next));
        }
        self.kl.push(kl);
        self.n_same_top += usize::from(is_same);
        if let Some(next) = next {
            self.nll[0].push(nll(base, next));
            self.nll[1].push(nll(other, next));
        }
    }

    /// Mean KL of the other model from the base, in nats.
    pub(super) fn kl_mean(&self) -> f64 {
        mean_and_deviation(&self.kl).0
    }

    fn report(mut self, tokenizer: &Tokenizer, windows: usize, ctx: usize) -> Report {
        let n = self.kl.len() as f64;
        let of_mean = |values: &[f64]| {
            let (mean, deviation) = mean_and_deviation(values);
            Estimate { value: mean, error: deviation / (values.len() as f64).sqrt() }
        };
        let perplexity = |values: &[f64]| {
            let Estimate { value, error } = of_mean(values);
            Estimate { value: value.exp(), error: value.exp() * error }
        };
        let differences: Vec<f64> = self.nll[0].iter().zip(&self.nll[1]).map(|(a, b)| b - a).collect();
        let kl_mean = of_mean(&self.kl);
        self.kl.sort_by(f64::total_cmp);
        let quantile = |share: f64| self.kl[((n - 1.0) * share).round() as usize];
        let same_top = self.n_same_top as f64 / n;
        Report {
            kl_mean,
            kl_median: quantile(0.5),
            kl_99: quantile(0.99),
            kl_max: quantile(1.0),
            worst: self.worst.map(|(_, (window, position), next)| Place {
                window: window + 1,
                position: position + 1,
                token: next.map(|id| tokenizer.decode_as(&[id], Decode { continues: true, ..Decode::default() })),
            }),
            same_top: Estimate { value: same_top, error: (same_top * (1.0 - same_top) / n).sqrt() },
            perplexity_base: perplexity(&self.nll[0]),
            perplexity: perplexity(&self.nll[1]),
            perplexity_ratio: perplexity(&differences),
            positions: self.kl.len(),
            windows,
            ctx,
        }
    }
}

/// A mean and its standard error.
#[derive(Clone, Copy, Debug, Serialize)]
struct Estimate {
    value: f64,
    error: f64,
}

/// A token of the text that the models predict.
#[derive(Debug, Serialize)]
struct Place {
    /// Its window, from 1 on.
    window: usize,
    /// Number of tokens before it in the window.
    position: usize,
    /// Its text; none after the window's last token.
    token: Option<String>,
}

/// What is printed. KL is that of the other model from the base, in nats.
#[derive(Debug, Serialize)]
struct Report {
    kl_mean: Estimate,
    kl_median: f64,
    kl_99: f64,
    kl_max: f64,
    /// Where the worst is.
    worst: Option<Place>,
    /// Share of positions at which both find the same token likeliest.
    same_top: Estimate,
    perplexity_base: Estimate,
    perplexity: Estimate,
    /// The other's perplexity over the base's; its error knows that both read the same text.
    perplexity_ratio: Estimate,
    positions: usize,
    windows: usize,
    ctx: usize,
}

impl Report {
    fn print(&self) -> Result<()> {
        let line = |name: &str, e: Estimate| say!("{name:<17} {:.6} +/- {:.6}", e.value, e.error);
        line("KL mean", self.kl_mean)?;
        say!("KL median         {:.6}", self.kl_median)?;
        say!("KL 99%            {:.6}", self.kl_99)?;
        let worst = self.worst.as_ref().map(|Place { window, position, token }| {
            let token = token.as_ref().map_or("the end".into(), |text| format!("{text:?}"));
            format!(" at {token}, window {window}, position {position}")
        });
        say!("KL worst          {:.6}{}", self.kl_max, worst.unwrap_or_default())?;
        line("same top token", self.same_top)?;
        line("perplexity base", self.perplexity_base)?;
        line("perplexity", self.perplexity)?;
        line("perplexity ratio", self.perplexity_ratio)?;
        say!("{} positions in {} windows of {}", self.positions, self.windows, self.ctx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_means_and_errors() {
        let mut found = Comparison::default();
        // Both rows are two tokens; the other's second logit moves.
        for i in 0..101 {
            found.add((3, i), &[0.0, 1.0], &[0.0, 1.0 - 0.02 * i as f32], (i < 100).then_some(1));
        }
        let model = load::open(None).unwrap();
        let tokenizer = Tokenizer::load(&model.checkpoint).unwrap();
        let report = found.report(&tokenizer, 1, 202);
        let worst = report.worst.as_ref().unwrap();
        assert_eq!((worst.window, worst.position, &worst.token), (4, 101, &None));
        let kl = |second: f64| {
            let p = 1.0 / (1.0 + (-1.0f64).exp());
            let q = 1.0 / (1.0 + (-second).exp());
            p * (p / q).ln() + (1.0 - p) * ((1.0 - p) / (1.0 - q)).ln()
        };
        let is_near = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a} is not {b}");
        is_near(report.kl_median, kl(0.0));
        is_near(report.kl_99, kl(-0.98));
        is_near(report.kl_max, kl(-1.0));
        is_near(report.same_top.value, 50.0 / 101.0);
        is_near(report.perplexity_base.value, 1.0 + (-1.0f64).exp());
        is_near(report.perplexity_base.error, 0.0);
        is_near(report.perplexity.value, report.perplexity_base.value * report.perplexity_ratio.value);
    }
}
