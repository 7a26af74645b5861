//! `moebius perplexity`: how surprised the model is by a text.
//!
//! The method is llama-perplexity's, so that figures compare: the text's tokens are cut into windows of `ctx` (512 when
//! left out); each window is computed from an empty cache; the tokens of its second half are scored, given everything
//! before them in the window; a begin-of-text token, where the model wants one, takes the place of each window's first
//! token. The error is the standard error of the mean negative log-likelihood, carried over to the perplexity.

use anyhow::{Result, ensure};
use engine::tokenizer::{Encode, Tokenizer};
use indicatif::ProgressStyle;
use serde_json::json;

use crate::args::PerplexityArgs;
use crate::compare::Windows;
use crate::load::{self, Sequence};
use crate::routes::{self, Writer};
use crate::{compare, input, machine, out};

pub fn run(args: &PerplexityArgs) -> Result<()> {
    let model = load::open(args.model.path()?.as_deref())?.stretched(args.engine.step.rope_scaling)?;
    let tokenizer = Tokenizer::load(&model.checkpoint)?;
    let text = input::text(&args.file)?;
    let tokens = tokenizer.encode(&text, Encode { add_special: true, parse_special: false });
    let n_ctx = args.engine.ctx.unwrap_or(512);
    ensure!(n_ctx >= 4, "--ctx must be at least 4, it is {n_ctx}");
    ensure!(
        tokens.len() >= 2 * n_ctx,
        "failed to measure perplexity: the text has {} tokens, at least two windows of {n_ctx} are required (--ctx \
         makes them shorter)",
        tokens.len()
    );
    let mut windows = Windows::new(tokens, &tokenizer, n_ctx, args.chunks);
    let (n_windows, first_scored) = (windows.len(), windows.first_scored());

    let mut sequence = Sequence::start(&model, &args.engine, n_ctx)?;
    let bar = machine::progress(Some(n_windows as u64));
    bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} windows, {eta} left, perplexity {msg}")?);
    let mut nlls = Vec::with_capacity(n_windows * (n_ctx / 2));
    let routers = sequence.routers().to_vec();
    let mut measure = |mut writer: Option<&mut Writer<'_>>| {
        for window in windows.iter() {
            sequence.rewind();
            // The last position's logits foretell a token of the next window: they are not scored.
            let mut score = |position: usize, row: &[f32]| {
                if position + 1 < n_ctx {
                    nlls.push(compare::nll(row, window[position + 1]));
                }
            };
            match &mut writer {
                Some(writer) => writer.feed(&mut sequence, window, first_scored, score)?,
                None => sequence.feed_from(window, first_scored, |position, row| {
                    score(position, row);
                    Ok(())
                })?,
            }
            bar.set_message(format!("{:.4}", compare::mean_and_deviation(&nlls).0.exp()));
            bar.inc(1);
        }
        anyhow::Ok(())
    };
    match &args.trace_experts {
        Some(path) => {
            out::remove_unfinished_when_interrupted()?;
            routes::write(path, &routers, |writer| measure(Some(writer)))?
        }
        None => measure(None)?,
    }
    bar.finish_and_clear();

    let (mean, deviation) = compare::mean_and_deviation(&nlls);
    let perplexity = mean.exp();
    let error = perplexity * deviation / (nlls.len() as f64).sqrt();
    if args.json {
        let result = json!({
            "perplexity": perplexity, "error": error, "nll": mean,
            "tokens": nlls.len(), "windows": n_windows, "ctx": n_ctx,
        });
        out::json_line(&result)
    } else {
        out::say!("perplexity {perplexity:.4} +/- {error:.5} ({} tokens in {n_windows} windows of {n_ctx})", nlls.len())
    }
}
