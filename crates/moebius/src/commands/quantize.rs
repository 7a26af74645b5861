//! `moebius quantize`: a GGUF file of smaller types, from a GGUF file or a model folder.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use checkpoint::{Kind, Value};
use indicatif::ProgressStyle;
use serde_json::json;

use super::compare;
use crate::args::{EngineArgs, QuantizeArgs, StepArgs};
use crate::convert::Folder;
use crate::device::Prefer;
use crate::load::{self, EngineSetup, Sequence};
use crate::out::say;
use crate::quantize::budget::{self, Ladders};
use crate::quantize::importance::Importance;
use crate::quantize::mix::{self, FileType};
use crate::quantize::search::{self, Trial};
use crate::quantize::source::{Gguf, Source, Tensor};
use crate::quantize::{Job, Loss, check_without_importance, targets};
use crate::{machine, out};

pub fn run(args: &QuantizeArgs) -> Result<()> {
    let has_text = args.file.is_some() || args.chunks.is_some() || args.ctx.is_some() || args.backend.is_some();
    // clap asks for no option that another one rules out.
    ensure!(args.target_kl.is_some() || !has_text, "--file, --chunks, --ctx and --backend require --target-kl");
    let named = args.dtype.as_deref().or(args.last.as_deref()).map(mix::file_type).transpose()?;
    let source = open(&args.input)?;
    let importance = args.imatrix.as_deref().map(Importance::read).transpose()?;
    let threads = machine::threads(args.threads)?;
    // Without a name the types are found; what the rules keep is kept all the same.
    let file = named.map_or_else(|| mix::file_type("Q4_0"), Ok)?;
    let targets = targets(&*source, file, &args.tensor, importance.as_ref())?;
    let keys = importance.as_ref().map(keys).unwrap_or_default();
    // A dry run shows the sizes first.
    let mut refused = match importance {
        None => check_without_importance(&*source, file, &targets),
        Some(_) => Ok(()),
    };
    if !args.dry_run {
        std::mem::replace(&mut refused, Ok(()))?;
    }
    let mut job = Job { source: &*source, targets, file_type: file.id, keys, threads };
    if !args.dry_run {
        job.check(args.allow_requantize)?;
    }
    let mut file = file;
    if let (Some(target), Some(output)) = (args.target_kl, &args.output) {
        return target_kl(args, job, target, output, importance.as_ref());
    }
    if let Some(max_bytes) = args.target_size {
        ladders(args, &job)?.fit(&mut job, max_bytes)?;
        file = budget::file_type(&job);
        job.file_type = file.id;
    }
    let Some(output) = args.output.as_deref().filter(|_| !args.dry_run) else {
        report(&job, file, None, &[], args.json)?;
        return refused.and_then(|()| job.check(args.allow_requantize));
    };
    job.check(args.allow_requantize)?;
    if let Some(file) = &importance {
        note_missing(&job, file);
    }
    check_output(args, output)?;
    out::remove_unfinished_when_interrupted()?;
    let bar = machine::weights_progress(job.source.tensors().iter().map(|t| t.len() as u64).sum())?;
    let losses = job.write(output, &bar)?;
    bar.finish_and_clear();
    report(&job, file, Some(&losses), &[], args.json)
}

fn check_output(args: &QuantizeArgs, output: &Path) -> Result<()> {
    ensure!(!is_same(&args.input, output), "failed to write {}: it is the input file", output.display());
    Ok(())
}

/// Measures what the types cost the matrices whose types are free.
fn ladders(args: &QuantizeArgs, job: &Job) -> Result<Ladders> {
    let is_fixed = |t: &Tensor| !mix::may_change(&t.in_mix()) || args.tensor.iter().any(|one| one.matches(&t.name));
    let fixed: Vec<bool> = job.source.tensors().iter().map(is_fixed).collect();
    let bar = machine::progress(None);
    bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} matrices measured, {eta} left")?);
    let ladders = Ladders::measure(job, &fixed, &bar)?;
    bar.finish_and_clear();
    Ok(ladders)
}

/// Writes the smallest file whose mean KL is within the target.
fn target_kl(
    args: &QuantizeArgs,
    mut job: Job,
    target: f64,
    output: &Path,
    importance: Option<&Importance>,
) -> Result<()> {
    check_output(args, output)?;
    let text = args.file.as_deref().context("--target-kl requires -f TEXT")?;
    let n_ctx = args.ctx.unwrap_or(compare::DEFAULT_CTX);
    let base = load::open(Some(&args.input))?;
    let mut windows = compare::windows(&base, text, n_ctx, args.chunks)?;
    let (threads, backend) = (args.threads, args.backend);
    let engine = EngineArgs { threads, ctx: args.ctx, backend, device: None, step: StepArgs::default() };
    let setup = EngineSetup::of(&engine, Prefer::Cpu)?;
    let n_batch = setup.device.kind.batch(&engine.step);
    let mut ours = Sequence::start_with(&base, &setup, n_ctx)?;

    out::remove_unfinished_when_interrupted()?;
    let mut trials = Vec::new();
    let mut found = None;
    out::chosen(output, |folder| {
        let (tried, best) = (folder.join("tried.gguf"), folder.join("best.gguf"));
        let ladders = ladders(args, &job)?;
        ladders.fit(&mut job, usize::MAX)?;
        job.check(args.allow_requantize)?;
        importance.iter().for_each(|file| note_missing(&job, file));
        let most = job.file_bytes()?;
        let least = ladders.least(&mut job)?;
        search::smallest(least..=most, target, |size, above| {
            ladders.fit(&mut job, size)?;
            let bytes = job.file_bytes()?;
            if bytes <= above {
                return Ok(None);
            }
            job.check(args.allow_requantize)?;
            job.file_type = budget::file_type(&job).id;
            let bar = machine::weights_progress(job.source.tensors().iter().map(|t| t.len() as u64).sum())?;
            let losses = job.write_in_place(&tried, &bar)?;
            bar.finish_and_clear();
            // The model is closed again before its file moves.
            let kl = {
                let model = load::open(Some(&tried))?;
                let mut theirs = Sequence::start_with(&model, &setup, n_ctx)?;
                compare::measure(&mut ours, &mut theirs, &mut windows, n_batch)?.kl_mean()
            };
            trials.push(Trial { bytes, kl });
            if !args.json {
                say!("{}: mean KL {kl:.6}", machine::bytes(bytes as u64))?;
            }
            if kl <= target {
                std::fs::rename(&tried, &best).with_context(|| format!("failed to write {}", best.display()))?;
                found = Some((job.targets.clone(), job.file_type, losses));
            } else {
                std::fs::remove_file(&tried).with_context(|| format!("failed to remove {}", tried.display()))?;
            }
            Ok(Some(Trial { bytes, kl }))
        })?;
        Ok(best)
    })?;
    let (targets, file_type, losses) = found.context("failed to reach a KL: no file was tried")?;
    let job = Job { targets, file_type, ..job };
    report(&job, budget::file_type(&job), Some(&losses), &trials, args.json)
}

/// Opens what is quantized.
fn open(path: &Path) -> Result<Box<dyn Source>> {
    let checkpoint = checkpoint::open_with(&crate::find::resolve(path)?, checkpoint::Open { map: false, exact: true })?;
    load::ensure_model(&checkpoint)?;
    Ok(match checkpoint.kind() {
        Kind::Gguf => Box::new(Gguf::new(checkpoint)?),
        Kind::Mlx | Kind::Hf => Box::new(Folder::new(checkpoint, None)?),
    })
}

pub(super) fn is_same(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// Returns what the new file says of the importances, under llama.cpp's keys.
fn keys(importance: &Importance) -> Vec<(String, Value)> {
    let name = |path: &str| Path::new(path).file_name().map_or(path.into(), |name| name.to_string_lossy().into_owned());
    let mut keys: Vec<(String, Value)> = vec![
        ("quantize.imatrix.file".into(), name(&importance.file).as_str().into()),
        ("quantize.imatrix.entries_count".into(), (importance.len() as u32).into()),
    ];
    if let Some(dataset) = importance.datasets.first() {
        keys.push(("quantize.imatrix.dataset".into(), name(dataset).as_str().into()));
    }
    if importance.n_chunks > 0 {
        keys.push(("quantize.imatrix.chunks_count".into(), importance.n_chunks.into()));
    }
    keys
}

/// Says which matrices are quantized without importances all the same.
fn note_missing(job: &Job, importance: &Importance) {
    let is_missing = |(tensor, target): &(&Tensor, &crate::quantize::Target)| {
        tensor.dtype != target.dtype && target.dtype.block_len() > 1 && target.importance.is_none()
    };
    let missing: Vec<&str> =
        job.source.tensors().iter().zip(&job.targets).filter(is_missing).map(|(t, _)| t.name.as_str()).collect();
    if !missing.is_empty() {
        let (n, some) = (missing.len(), missing[..missing.len().min(3)].join(", "));
        out::note!("moebius: {} has no importances for {n} matrices ({some}, ..)", importance.file);
    }
}

/// Sums over the tensors that go from one type to another.
#[derive(Default)]
struct TypeRow {
    n: usize,
    before: u64,
    after: u64,
    loss: Loss,
}

/// Prints sizes by type, and the losses of a file that was written; in JSON the files that were tried for it too.
pub(super) fn report(job: &Job, file: &FileType, losses: Option<&[Loss]>, trials: &[Trial], json: bool) -> Result<()> {
    let mut rows: BTreeMap<(String, String), TypeRow> = BTreeMap::new();
    let (mut before, mut after, mut n_values) = (0, 0, 0);
    for (i, (tensor, target)) in job.source.tensors().iter().zip(&job.targets).enumerate() {
        let bytes = |dtype| tensor.bytes_as(dtype).with_context(|| format!("failed to size tensor {}", tensor.name));
        let row = rows.entry((tensor.dtype.to_string(), target.dtype.to_string())).or_default();
        row.n += 1;
        row.before += bytes(tensor.dtype)? as u64;
        row.after += job.bytes(i)? as u64;
        if let Some(losses) = losses {
            row.loss.power += losses[i].power;
            row.loss.error += losses[i].error;
        }
        n_values += tensor.len();
    }
    for row in rows.values() {
        before += row.before;
        after += row.after;
    }
    let bits = 8.0 * after as f64 / n_values as f64;
    if json {
        let row = |((from, to), row): (&(String, String), &TypeRow)| {
            let error = losses.map(|_| row.loss.relative());
            json!({"from": from, "to": to, "tensors": row.n, "bytes": row.after, "bytes_before": row.before, "error": error})
        };
        let rows: Vec<_> = rows.iter().map(row).collect();
        let mut found = json!({
            "type": file.name, "bytes": after, "bytes_before": before, "bits_per_weight": bits, "types": rows,
        });
        if !trials.is_empty() {
            found["trials"] = json!(trials);
        }
        return out::json_line(&found);
    }
    for ((from, to), row) in &rows {
        let error = match losses {
            Some(_) if from != to => format!(", error {:.4}", row.loss.relative()),
            _ => String::new(),
        };
        let sizes = match from == to {
            true => machine::bytes(row.after),
            false => format!("{} to {}", machine::bytes(row.before), machine::bytes(row.after)),
        };
        let change = if from == to { format!("{to}, kept") } else { format!("{from} to {to}") };
        say!("{change:<18} {:>4} tensors, {sizes}{error}", row.n)?;
    }
    let growth = if after > before { ", larger than the input" } else { "" };
    say!("{}: {} to {}, {bits:.2} bits a weight{growth}", file.name, machine::bytes(before), machine::bytes(after))
}
