//! `moebius logits`: the logits of a token sequence, written to a file or compared with golden ones.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use engine::images::Pictures;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use crate::args::{DraftArg, LogitsArgs};
use crate::compare::{self, Agreement};
use crate::device::Prefer;
use crate::load::{self, EngineSetup, Model, Sequence};
use crate::out::say;
use crate::{input, out};

pub fn run(args: &LogitsArgs) -> Result<()> {
    let n_draft = args.golden.as_ref().map_or(0, |_| draft_of(&args.array));
    let draft = if n_draft > 0 { DraftArg::Mtp } else { DraftArg::Off };
    let model = load::open(args.model.path()?.as_deref())?.stretched(args.engine.step.rope_scaling)?.drafting(draft)?;
    if !args.image.is_empty() {
        return images(args, model);
    }
    let golden = args.golden.as_deref().map(|path| Golden::read(path, &args.array)).transpose()?;
    let tokens = golden.as_ref().map_or(&args.tokens, |golden| &golden.tokens);
    ensure!(!tokens.is_empty(), "failed to compute logits: no tokens were given");
    let greedy = golden.as_ref().map_or(&[][..], |golden| &golden.greedy);

    let mut sequence = Sequence::start(&model, &args.engine, tokens.len() + greedy.len().max(n_draft))?;
    let n_vocab = sequence.n_vocab();
    let mut logits = Vec::with_capacity(tokens.len() * n_vocab);
    let mut take = |row: &[f32]| {
        logits.extend_from_slice(row);
        Ok(())
    };
    match n_draft {
        0 => sequence.feed(tokens, |_, row| take(row))?,
        n => sequence.drafts(tokens, n, take)?,
    }
    if let Some(out) = &args.out {
        out::remove_unfinished_when_interrupted()?;
        write(out, tokens, &logits, n_vocab)?;
    }
    let Some(golden) = &golden else {
        if args.out.is_none() {
            print_last(&logits, n_vocab, args.json)?;
        }
        return Ok(());
    };
    ensure!(
        golden.logits.len() == logits.len(),
        "failed to compare with {}: it holds {} numbers, but {} rows of a vocabulary of {n_vocab} have {}",
        args.array,
        golden.logits.len(),
        logits.len() / n_vocab,
        logits.len()
    );
    let mut agreement = compare::logits(&logits, &golden.logits, n_vocab);
    if !greedy.is_empty() {
        agreement.greedy_agree = Some(follow(&mut sequence, &logits[logits.len() - n_vocab..], greedy)?);
    }
    print(&agreement, args.json)
}

/// As [`run`], for a prompt with images, or for their features.
fn images(args: &LogitsArgs, model: Model) -> Result<()> {
    let setup = EngineSetup::of(&args.engine, Prefer::Cpu)?;
    let mut model = model.seeing(&args.sight)?;
    let arch = model.plan.arch.clone();
    let why = model.unseen.as_deref().unwrap_or("it sees none");
    let sight = model.sight.take().with_context(|| format!("failed to show images to {arch}: {why}"))?;
    let mut encoder = sight.encoder(&setup, setup.device.kind)?;
    let features: Vec<_> =
        args.image.iter().map(|path| Ok(encoder.see(&load::image_file(path)?)?)).collect::<Result<_>>()?;
    let (kind, name) = args.array.split_once('.').unwrap_or((&args.array, ""));
    let golden = args.golden.as_deref().context("failed to compare images: there are no golden arrays (--golden)")?;
    let d = model.plan.d_model;
    let part = match kind {
        "features" => Some(0),
        _ => kind.strip_prefix("deepstack_").and_then(|n| n.parse::<usize>().ok()).map(|n| n + 1),
    };
    if let Some(part) = part {
        let golden = Golden::rows(golden, &args.array)?;
        let d_features = encoder.vision().d_features();
        ensure!((part + 1) * d <= d_features, "failed to compare {}: features have {d_features} numbers", args.array);
        let all = features.iter().flat_map(|features| features.rows.chunks_exact(d_features));
        let rows: Vec<f32> = all.flat_map(|row| &row[part * d..][..d]).copied().collect();
        return compared(&args.array, &rows, &golden, d, args.json);
    }
    let (tokens, logits) = Golden::prompt(golden, &args.array, &format!("tokens.{name}"))?;
    let feature = encoder.vision().tokens.feature.context("failed to find the token of images in config.json")?;
    let pictures = Pictures::place(encoder.vision(), feature, &tokens, features)?;
    let mut sequence = Sequence::start_with(&model, &setup, tokens.len())?;
    sequence.show(pictures)?;
    let mut found = Vec::new();
    sequence.feed(&tokens, |_, row| {
        found.extend_from_slice(row);
        Ok(())
    })?;
    compared(&args.array, &found, &logits, sequence.n_vocab(), args.json)
}

/// Prints how far rows of `width` numbers are from golden ones.
fn compared(array: &str, found: &[f32], golden: &[f32], width: usize, json: bool) -> Result<()> {
    let (n, wanted) = (found.len(), golden.len());
    ensure!(n == wanted, "failed to compare with {array}: it holds {wanted} numbers, but the model gives {n}");
    print(&compare::logits(found, golden, width), json)
}

/// Which draft of the draft head an array's rows are of, by its name (`mtp_logits`, `mtp_logits_2`); 0 for the model's.
fn draft_of(array: &str) -> usize {
    match array.strip_prefix("mtp_logits") {
        Some("") => 1,
        Some(rest) => rest.strip_prefix('_').and_then(|n| n.parse().ok()).filter(|n| (1..=64).contains(n)).unwrap_or(0),
        None => 0,
    }
}

/// Share of the golden greedy continuation that ours follows from its start.
fn follow(sequence: &mut Sequence, last: &[f32], greedy: &[u32]) -> Result<f64> {
    let mut next = compare::argmax(last) as u32;
    let mut same = 0;
    while same < greedy.len() && next == greedy[same] {
        same += 1;
        if same < greedy.len() {
            sequence.feed(&[next], |_, row| {
                next = compare::argmax(row) as u32;
                Ok(())
            })?;
        }
    }
    Ok(same as f64 / greedy.len() as f64)
}

fn print(agreement: &Agreement, json: bool) -> Result<()> {
    if json {
        return out::json_line(agreement);
    }
    say!("positions       {}", agreement.positions)?;
    say!("rms error / std {:.3e}", agreement.rms_over_std)?;
    say!("argmax agree    {:.4}", agreement.argmax_agree)?;
    say!("KL mean, max    {:.3e} {:.3e}", agreement.kl_mean, agreement.kl_max)?;
    if let Some(greedy) = agreement.greedy_agree {
        say!("greedy agree    {greedy:.4}")?;
    }
    Ok(())
}

/// With neither a file nor golden logits: the best ten tokens after the sequence.
fn print_last(logits: &[f32], n_vocab: usize, json: bool) -> Result<()> {
    let row = &logits[logits.len() - n_vocab..];
    let mut order: Vec<usize> = (0..n_vocab).collect();
    order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
    order.truncate(10);
    if json {
        let top: Vec<_> = order.iter().map(|&id| serde_json::json!({"id": id, "logit": row[id]})).collect();
        say!("{}", serde_json::to_string(&top)?)?;
    } else {
        for id in order {
            say!("{id:>8}  {:.5}", row[id])?;
        }
    }
    Ok(())
}

fn write(path: &Path, tokens: &[u32], logits: &[f32], n_vocab: usize) -> Result<()> {
    let ids: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
    let views: HashMap<&str, TensorView<'_>> = HashMap::from([
        ("tokens", TensorView::new(Dtype::I32, vec![ids.len()], bytemuck::cast_slice(&ids))?),
        ("logits", TensorView::new(Dtype::F32, vec![logits.len() / n_vocab, n_vocab], bytemuck::cast_slice(logits))?),
    ]);
    let bytes = safetensors::serialize(views, None).with_context(|| format!("failed to write {}", path.display()))?;
    out::file(path, |out| out.write_all(&bytes))
}

/// The arrays of a golden file that matter here.
struct Golden {
    tokens: Vec<u32>,
    logits: Vec<f32>,
    /// Greedy continuation; only beside the array `logits`, whose continuation it is.
    greedy: Vec<u32>,
}

impl Golden {
    /// An array by itself.
    fn rows(path: &Path, array: &str) -> Result<Vec<f32>> {
        let bytes = input::bytes(path)?;
        let file = SafeTensors::deserialize(&bytes).with_context(|| format!("failed to read {}", path.display()))?;
        let view = file.tensor(array).with_context(|| format!("failed to find array {array}"))?;
        ensure!(view.dtype() == Dtype::F32, "failed to read array {array}: it is {:?}, expected F32", view.dtype());
        let (words, _) = view.data().as_chunks::<4>();
        Ok(words.iter().map(|w| f32::from_le_bytes(*w)).collect())
    }

    /// The logits of a prompt, and its tokens.
    fn prompt(path: &Path, array: &str, tokens: &str) -> Result<(Vec<u32>, Vec<f32>)> {
        let bytes = input::bytes(path)?;
        let file = SafeTensors::deserialize(&bytes).with_context(|| format!("failed to read {}", path.display()))?;
        let view = file.tensor(tokens).with_context(|| format!("failed to find array {tokens}"))?;
        ensure!(view.dtype() == Dtype::I32, "failed to read array {tokens}: it is {:?}, expected I32", view.dtype());
        let (words, _) = view.data().as_chunks::<4>();
        let ids = words.iter().map(|w| u32::try_from(i32::from_le_bytes(*w)).context("failed to read a token id"));
        Ok((ids.collect::<Result<_>>()?, Golden::rows(path, array)?))
    }

    fn read(path: &Path, array: &str) -> Result<Golden> {
        let bytes = input::bytes(path)?;
        let file = SafeTensors::deserialize(&bytes).with_context(|| format!("failed to read {}", path.display()))?;
        let names = || file.names().iter().map(|n| n.to_string()).collect::<Vec<_>>().join(", ");
        let ids = |name: &str| -> Result<Vec<u32>> {
            let view = file.tensor(name).with_context(|| format!("failed to find array {name} among {}", names()))?;
            if view.dtype() != Dtype::I32 {
                bail!("failed to read array {name}: it is {:?}, expected I32", view.dtype());
            }
            let (words, _) = view.data().as_chunks::<4>();
            words
                .iter()
                .map(|w| u32::try_from(i32::from_le_bytes(*w)).context("failed to read a negative token id"))
                .collect()
        };
        let view = file.tensor(array).with_context(|| format!("failed to find array {array} among {}", names()))?;
        if view.dtype() != Dtype::F32 {
            bail!("failed to read array {array}: it is {:?}, expected F32", view.dtype());
        }
        let (words, _) = view.data().as_chunks::<4>();
        let logits = words.iter().map(|w| f32::from_le_bytes(*w)).collect();
        let greedy = if array == "logits" && file.tensor("greedy").is_ok() { ids("greedy")? } else { Vec::new() };
        Ok(Golden { tokens: ids("tokens")?, logits, greedy })
    }
}
