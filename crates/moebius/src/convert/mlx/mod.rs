//! GGUF files as the folders that mlx-lm loads: `config.json`, `tokenizer.json`, and safetensors in the names and
//! layouts of its models (<https://github.com/ml-explore/mlx-lm>). Matrices are bf16, or affine as MLX defines it.
//!
//! A file's matrices are written one after the other, a row at a time; what is held is the planes of scales and biases
//! of one of them.

mod config;
mod form;
mod tensors;

use std::fs;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use checkpoint::Checkpoint;
use engine::tokenizer::{self, FolderTexts};
use indicatif::ProgressBar;
use quant::{Affine, ScaleType};
use serde_json::{Map, Value, json};

use crate::quantize::source::unchanged;
use crate::{machine, out};
use form::MlxForm;
use tensors::{Entry, Out};

/// Size of a file of weights that is not passed where tensors can be kept apart.
const SHARD: usize = 5_000_000_000;
/// Group where nobody says another: MLX's own.
const GROUP: usize = 64;

/// Writes the folder.
///
/// # Errors
/// The architecture has no form here, the file cannot be read, or the folder is there already.
pub fn convert(checkpoint: Checkpoint, path: &Path, bits: Option<u8>, group: Option<usize>) -> Result<()> {
    let group = group.unwrap_or(GROUP);
    let affine = bits.map(|bits| {
        let affine = Affine::new(usize::from(bits), group, ScaleType::BF16);
        affine
            .with_context(|| format!("failed to convert to mlx: {bits} bits in groups of {group} are no type of MLX's"))
    });
    let affine = affine.transpose()?;
    if let Some(other) = checkpoint.unreadable().first() {
        bail!("failed to read {}: tensor {} is of type {}: {}", checkpoint.name(), other.name, other.dtype, other.why);
    }
    // What can be planned has the shapes that it should.
    let plan = model::build(&checkpoint)?.into_plan();
    let form = MlxForm::of(&checkpoint)?;
    let (mut config, shape) = config::config(&checkpoint, &plan, form)?;
    let outs = tensors::all(&checkpoint, form, &shape, affine)?;
    let mxfp4 = outs.iter().any(|out| out.mode() == Some("mxfp4"));
    let quantization = match bits {
        Some(bits) => Some(json!({"group_size": group, "bits": bits, "mode": "affine"})),
        None if mxfp4 => Some(json!({"group_size": 32, "bits": 4, "mode": "mxfp4"})),
        None => None,
    };
    if let Some(quantization) = quantization {
        config.insert("quantization".into(), quantization.clone());
        config.insert("quantization_config".into(), quantization);
    }
    let texts = match checkpoint.meta().get("tokenizer.ggml.model") {
        Some(_) => Some(tokenizer::folder_texts(checkpoint.meta())?),
        None => {
            out::note!("moebius: {} has no tokenizer, and neither will the folder", checkpoint.name());
            None
        }
    };
    // mlx-lm stops at these alone.
    match texts.as_ref().map(|texts| texts.ends.as_slice()) {
        None | Some([]) => {}
        Some([end]) => _ = config.insert("eos_token_id".into(), json!(end)),
        Some(ends) => _ = config.insert("eos_token_id".into(), json!(ends)),
    }
    let template = checkpoint.meta().opt_str("tokenizer.chat_template")?;
    let bar = machine::weights_progress(outs.iter().map(|out| out.n_values() as u64).sum())?;
    out::folder(path, |folder| {
        let write = |name: &str, text: &str| {
            fs::write(folder.join(name), text)
                .with_context(|| format!("failed to write {}", folder.join(name).display()))
        };
        write("config.json", &serde_json::to_string_pretty(&Value::Object(config))?)?;
        if let Some(FolderTexts { tokenizer, config: mut settings, .. }) = texts {
            if let Some(template) = template {
                settings.insert("chat_template".into(), json!(template));
                write("chat_template.jinja", template)?;
            }
            write("tokenizer.json", &serde_json::to_string(&tokenizer)?)?;
            write("tokenizer_config.json", &serde_json::to_string_pretty(&Value::Object(settings))?)?;
        }
        weights(&checkpoint, &outs, folder, &bar)?;
        // What was written must be a model.
        model::build(&checkpoint::open(folder)?).map(drop).context("failed to read the new folder")
    })?;
    bar.finish_and_clear();
    unchanged(&checkpoint)
}

/// Writes the weights in as many files as their size wants, and the index of more than one.
fn weights(checkpoint: &Checkpoint, outs: &[Out], folder: &Path, bar: &ProgressBar) -> Result<()> {
    let mut shards: Vec<Vec<&Out>> = vec![Vec::new()];
    let (mut in_shard, mut total) = (0, 0);
    for one in outs {
        let len = one.entries()?.iter().map(|entry| entry.len).sum::<usize>();
        if in_shard > 0 && in_shard + len > SHARD {
            shards.push(Vec::new());
            in_shard = 0;
        }
        (in_shard, total) = (in_shard + len, total + len);
        shards.last_mut().into_iter().for_each(|shard| shard.push(one));
    }
    let mut index = Map::new();
    let n = shards.len();
    for (i, shard) in shards.iter().enumerate() {
        let name = match n {
            1 => "model.safetensors".to_string(),
            _ => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
        };
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!({"format": "mlx"}));
        let mut at = 0;
        for entry in shard.iter().map(|one| one.entries()).collect::<Result<Vec<_>>>()?.into_iter().flatten() {
            let Entry { name: tensor, dtype, shape, len } = entry;
            header.insert(tensor.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [at, at + len]}));
            index.insert(tensor, json!(name));
            at += len;
        }
        let mut header = serde_json::to_vec(&Value::Object(header))?;
        // Some readers want the numbers aligned.
        header.resize(header.len().next_multiple_of(8), b' ');
        let path = folder.join(&name);
        let file = fs::File::create(&path).with_context(|| format!("failed to create {}", path.display()))?;
        let mut out = BufWriter::new(file);
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        shard.iter().try_for_each(|one| one.write(checkpoint, &mut out, |n| bar.inc(n)))?;
        let file = out.into_inner().map_err(std::io::IntoInnerError::into_error);
        file.and_then(|file| file.sync_all()).with_context(|| format!("failed to write {}", path.display()))?;
    }
    let index = json!({"metadata": {"total_size": total}, "weight_map": index});
    let path = folder.join("model.safetensors.index.json");
    fs::write(&path, serde_json::to_string_pretty(&index)?)
        .with_context(|| format!("failed to write {}", path.display()))
}
