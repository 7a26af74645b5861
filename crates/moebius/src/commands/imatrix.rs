//! `moebius imatrix`: which columns of the matrices a text makes use of, for `moebius quantize`.
//!
//! The text's tokens are cut into windows, each computed from an empty cache; the squares of what every matrix is
//! multiplied with are summed column by column, for each expert by itself.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, ensure};
use checkpoint::gguf::Writer;
use engine::tokenizer::{Encode, Tokenizer};
use indicatif::ProgressStyle;
use quant::WeightType;
use serde_json::json;

use crate::args::{BackendKind, ImatrixArgs};
use crate::compare::Windows;
use crate::load::{self, Sequence};
use crate::out::say;
use crate::quantize::importance::Sums;
use crate::{compare, input, machine, out};

pub fn run(args: &ImatrixArgs) -> Result<()> {
    ensure!(
        matches!(args.engine.backend, None | Some(BackendKind::Cpu)),
        "sum inputs: only the CPU backend does (--backend cpu)"
    );
    let model = load::open(args.model.model.as_deref())?;
    let tokenizer = Tokenizer::load(&model.checkpoint)?;
    let text = input::text(&args.file)?;
    let tokens = tokenizer.encode(&text, Encode { add_special: true, parse_special: args.parse_special });
    ensure!(tokens.len() >= 2, "sum inputs: the text has {} tokens, 2 or more wanted", tokens.len());
    let n_ctx = args.engine.ctx.unwrap_or(512).min(tokens.len());
    let mut windows = Windows::new(tokens, &tokenizer, n_ctx, args.chunks);
    let (n_windows, first_scored) = (windows.len(), windows.first_scored());
    ensure!(n_windows > 0, "sum inputs: --chunks 0 leaves nothing to compute");
    out::remove_unfinished_when_interrupted()?;

    let mut sequence = Sequence::start(&model, &args.engine, n_ctx)?;
    sequence.trace_inputs();
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
    bar.finish_and_clear();

    let sums: BTreeMap<String, (Sums, usize)> = sequence.inputs(&model.checkpoint)?;
    write(&args.out, &args.file, &sums, n_windows, n_ctx)?;
    report(&sums, n_windows * n_ctx, &args.out, args.json)
}

/// Writes llama.cpp's GGUF form.
fn write(
    path: &Path,
    text: &Path,
    sums: &BTreeMap<String, (Sums, usize)>,
    n_windows: usize,
    n_ctx: usize,
) -> Result<()> {
    let mut writer = Writer::new();
    writer.meta("general.type", "imatrix");
    writer.meta("imatrix.datasets", vec![text.to_string_lossy().as_ref()]);
    writer.meta("imatrix.chunk_count", n_windows as u32);
    writer.meta("imatrix.chunk_size", n_ctx as u32);
    let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    for (name, (sums, n_cols)) in sums {
        let n_mat = sums.counts.len();
        writer.tensor(&format!("{name}.in_sum2"), &[n_mat, *n_cols], WeightType::F32, bytes(&sums.squares));
        writer.tensor(&format!("{name}.counts"), &[n_mat, 1], WeightType::F32, bytes(&sums.counts));
    }
    let mut file = Vec::new();
    writer.write(&mut file)?;
    out::file(path, |out| out.write_all(&file))
}

/// Says how many tokens reached each expert.
fn report(sums: &BTreeMap<String, (Sums, usize)>, n_tokens: usize, path: &Path, json: bool) -> Result<()> {
    // Gate, up and down of a layer see the same tokens: one stands for all.
    let stacks: Vec<(&String, &Sums)> = sums
        .iter()
        .filter(|(name, (sums, _))| sums.counts.len() > 1 && name.contains("ffn_down_exps"))
        .map(|(name, (sums, _))| (name, sums))
        .collect();
    let unreached = |sums: &Sums| -> Vec<usize> {
        sums.counts.iter().enumerate().filter(|(_, n)| **n == 0.0).map(|(expert, _)| expert).collect()
    };
    if json {
        let stack = |(name, sums): &(&String, &Sums)| json!({"name": name, "tokens": sums.counts, "unreached": unreached(sums)});
        return out::json_line(&json!({
            "file": path.display().to_string(), "tokens": n_tokens, "matrices": sums.len(),
            "experts": stacks.iter().map(stack).collect::<Vec<_>>(),
        }));
    }
    for (name, sums) in &stacks {
        let fewest = sums.counts.iter().copied().fold(f32::INFINITY, f32::min);
        let never = unreached(sums);
        let list: Vec<String> = never.iter().map(usize::to_string).collect();
        match never.len() {
            0 => say!("{name:<32} {} experts, fewest tokens {fewest}", sums.counts.len())?,
            n => say!("{name:<32} {} experts, {n} never reached: {}", sums.counts.len(), list.join(" "))?,
        }
    }
    let (n, all): (usize, usize) =
        stacks.iter().fold((0, 0), |(n, all), (_, sums)| (n + unreached(sums).len(), all + sums.counts.len()));
    if n > 0 {
        say!(
            "{n} of {all} experts were never reached: quantize takes the mean of their layer's others; more text helps"
        )?;
    }
    say!("{}: {} matrices, {n_tokens} tokens", path.display(), sums.len())
}
