//! `moebius imatrix`: which columns of the matrices a text makes use of, for `moebius quantize`.
//!
//! The text's tokens are cut into windows, each computed from an empty cache; the squares of what every matrix is
//! multiplied with are summed column by column, for each expert by itself. The first windows are computed once more
//! where there are experts that no token reached: tokens are then forced through those.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, ensure};
use backend::InputTrace;
use checkpoint::gguf::Writer;
use engine::tokenizer::{Encode, Tokenizer};
use indicatif::ProgressStyle;
use quant::WeightType;
use serde_json::json;

use crate::args::ImatrixArgs;
use crate::compare::Windows;
use crate::load::{self, Sequence};
use crate::out::say;
use crate::quantize::importance::Sums;
use crate::{compare, input, machine, out};

/// Tokens that an unreached expert is given, where the text has as many: then its own sums outweigh what `quantize`
/// adds of the other experts' by four.
const FORCED_TOKENS: u64 = 64;

pub fn run(args: &ImatrixArgs) -> Result<()> {
    let model = load::open(args.model.path()?.as_deref())?.stretched(args.engine.step.rope_scaling)?;
    let tokenizer = Tokenizer::load(&model.checkpoint)?;
    let text = input::text(&args.file)?;
    let tokens = tokenizer.encode(&text, Encode { add_special: true, parse_special: args.parse_special });
    ensure!(
        tokens.len() >= 2,
        "failed to compute importances: the text has {} tokens, at least 2 are required",
        tokens.len()
    );
    let n_ctx = args.engine.ctx.unwrap_or(512).min(tokens.len());
    let mut windows = Windows::new(tokens, &tokenizer, n_ctx, args.chunks);
    let (n_windows, first_scored) = (windows.len(), windows.first_scored());
    ensure!(n_windows > 0, "--chunks must be at least 1");
    out::remove_unfinished_when_interrupted()?;

    let mut sequence = Sequence::start_summing(&model, &args.engine, n_ctx)?;
    let bar = machine::progress(Some(n_windows as u64));
    bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} windows, {eta} left, perplexity {msg}")?);
    let mut nlls = Vec::new();
    for window in windows.iter() {
        sequence.rewind();
        sequence.feed(window, |position, row| {
            // As perplexity is measured: of the second half.
            if position >= first_scored && position + 1 < n_ctx {
                nlls.push(compare::nll(row, window[position + 1]));
            }
            Ok(())
        })?;
        bar.set_message(format!("{:.4}", compare::mean_and_deviation(&nlls).0.exp()));
        bar.inc(1);
    }
    let n_forced = force(&mut sequence, &mut windows)?;
    bar.finish_and_clear();

    let sums: BTreeMap<String, (Sums, usize)> = sequence.inputs(&model.checkpoint)?;
    let passes = Passes { n_windows, n_forced, n_ctx };
    write(&args.out, &args.file, &sums, passes)?;
    report(&sums, passes, &args.out, args.json)
}

/// What was computed.
#[derive(Clone, Copy)]
struct Passes {
    n_windows: usize,
    /// Windows that were computed once more, for experts that no token reached.
    n_forced: usize,
    n_ctx: usize,
}

/// Forces tokens through experts that none has reached, until every such expert has its share or all windows were used;
/// of a text that is too short for one token each, windows are used again. The number of windows.
fn force(sequence: &mut Sequence, windows: &mut Windows) -> Result<usize> {
    sequence.trace_inputs(InputTrace::Unreached);
    let mut n = 0;
    loop {
        let is_again = n > 0;
        for window in windows.iter() {
            match sequence.fewest_forced() {
                None => return Ok(n),
                Some(fewest) if fewest >= FORCED_TOKENS || is_again && fewest > 0 => return Ok(n),
                Some(_) => {}
            }
            sequence.rewind();
            sequence.feed(window, |_, _| Ok(()))?;
            n += 1;
        }
    }
}

/// Writes llama.cpp's GGUF form.
fn write(path: &Path, text: &Path, sums: &BTreeMap<String, (Sums, usize)>, passes: Passes) -> Result<()> {
    let mut writer = Writer::new();
    writer.meta("general.type", "imatrix");
    writer.meta("imatrix.datasets", vec![text.to_string_lossy().as_ref()]);
    writer.meta("imatrix.chunk_count", passes.n_windows as u32);
    writer.meta("imatrix.chunk_size", passes.n_ctx as u32);
    if passes.n_forced > 0 {
        writer.meta("moebius.imatrix.forced_chunk_count", passes.n_forced as u32);
    }
    let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    for (name, (sums, n_cols)) in sums {
        let n_mat = sums.counts.len();
        writer.tensor(&format!("{name}.in_sum2"), &[n_mat, *n_cols], WeightType::F32, bytes(&sums.squares));
        writer.tensor(&format!("{name}.counts"), &[n_mat, 1], WeightType::F32, bytes(&sums.counts));
        if sums.forced.iter().any(|&n| n > 0.0) {
            writer.tensor(&format!("{name}.forced"), &[n_mat, 1], WeightType::F32, bytes(&sums.forced));
        }
    }
    let mut file = Vec::new();
    writer.write(&mut file)?;
    out::file(path, |out| out.write_all(&file))
}

/// Says how many tokens reached each expert, and which were forced.
fn report(sums: &BTreeMap<String, (Sums, usize)>, passes: Passes, path: &Path, json: bool) -> Result<()> {
    // Gate, up and down of a layer see the same tokens: one stands for all.
    let stacks: Vec<(&String, &Sums)> = sums
        .iter()
        .filter(|(name, (sums, _))| sums.counts.len() > 1 && name.contains("ffn_down_exps"))
        .map(|(name, (sums, _))| (name, sums))
        .collect();
    let n_tokens = passes.n_windows * passes.n_ctx;
    let unreached = |sums: &Sums| -> Vec<usize> { (0..sums.counts.len()).filter(|&e| sums.is_unreached(e)).collect() };
    if json {
        let stack = |(name, sums): &(&String, &Sums)| {
            let never = unreached(sums);
            json!({"name": name, "tokens": sums.counts, "forced": sums.forced, "unreached": never})
        };
        return out::json_line(&json!({
            "file": path.display().to_string(), "tokens": n_tokens, "matrices": sums.len(),
            "forced_tokens": passes.n_forced * passes.n_ctx, "experts": stacks.iter().map(stack).collect::<Vec<_>>(),
        }));
    }
    let (mut n_unreached, mut n_experts) = (0, 0);
    for (name, sums) in &stacks {
        let never = unreached(sums);
        let tokens = (0..sums.counts.len()).map(|e| sums.counts[e] - sums.forced[e]);
        let fewest = tokens.filter(|&n| n > 0.0).fold(f32::INFINITY, f32::min);
        let reached = format!("{name:<32} {} experts, fewest tokens {fewest}", sums.counts.len());
        let forced = |&e: &usize| format!("{e} ({})", sums.forced[e]);
        match never.as_slice() {
            [] => say!("{reached}")?,
            never => say!(
                "{reached}, unreached (forced tokens): {}",
                never.iter().map(forced).collect::<Vec<_>>().join(" ")
            )?,
        }
        (n_unreached, n_experts) = (n_unreached + never.len(), n_experts + sums.counts.len());
    }
    if n_unreached > 0 {
        let n_forced = passes.n_forced * passes.n_ctx;
        say!("{n_unreached} of {n_experts} experts were never reached: {n_forced} tokens were forced through them")?;
    }
    say!("{}: {} matrices, {n_tokens} tokens", path.display(), sums.len())
}
