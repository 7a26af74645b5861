//! From a file name to something that runs: checkpoint, plan, program, engine.

mod drafting;
mod sequence;
mod session;
mod setup;
mod sight;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use checkpoint::Checkpoint;
use engine::folder;
use engine::template::ChatTemplate;
use engine::tokenizer::Tokenizer;
use model::arch::Stretch;
use model::plan::{Plan, ValidPlan};

pub use self::drafting::Drafting;
pub use self::sequence::{Sequence, Traced, Wanted};
pub use self::session::{Session, Whole, start, start_prepared, start_with};
pub use self::setup::{EngineSetup, Prepared};
pub use self::sight::{EncoderRoom, Eyes, Shown, Sight, image_file};
use crate::args::DraftArg;
use crate::{embedded, input};

/// An open model: its header, and what it computes.
pub struct Model {
    pub checkpoint: Arc<Checkpoint>,
    /// As the architecture wrote it; a backend lowers it.
    pub plan: ValidPlan,
    pub embedded: bool,
    /// A chat template in place of its own.
    pub template: Option<String>,
    /// Its image encoder, where its plan has places for features.
    pub sight: Option<Sight>,
    /// Why an encoder that was found next to it is not its own.
    pub unseen: Option<String>,
}

impl Model {
    /// Returns the same, with the chat template of a file where one is named.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn with_template(self, file: Option<&Path>) -> Result<Model> {
        let template = file.map(input::text).transpose()?;
        Ok(Model { template: template.or(self.template), ..self })
    }

    /// Returns the same with a longer context, where one is asked for.
    ///
    /// # Errors
    /// The model's positions cannot be scaled so.
    pub fn stretched(mut self, stretch: Option<Stretch>) -> Result<Model> {
        let Some(stretch) = stretch else { return Ok(self) };
        let checkpoint =
            Arc::get_mut(&mut self.checkpoint).context("failed to scale positions: the model is in use")?;
        self.plan = model::stretch(checkpoint, stretch)?;
        Ok(self)
    }

    /// Returns the same, with the head that drafts further tokens where those are to come from it.
    ///
    /// # Errors
    /// The model has no such head and is to have one.
    pub fn drafting(self, draft: DraftArg) -> Result<Model> {
        if !matches!(draft, DraftArg::Auto | DraftArg::Mtp) {
            return Ok(self);
        }
        let mut plan = model::build_drafting(&self.checkpoint)?;
        ensure!(
            plan.draft.is_some() || draft == DraftArg::Auto,
            "failed to draft tokens: {} has no layer for multi-token prediction",
            self.checkpoint.name()
        );
        if let Some(sight) = &self.sight {
            plan = sight.place(&self.checkpoint, plan)?;
        }
        Ok(Model { plan, ..self })
    }
}

/// Opens the file named, or the embedded model. Reads headers only.
pub fn open(path: Option<&Path>) -> Result<Model> {
    let checkpoint = Arc::new(embedded::open(path)?);
    ensure_model(&checkpoint)?;
    let plan = model::build(&checkpoint)?;
    Ok(Model { checkpoint, plan, embedded: path.is_none(), template: None, sight: None, unseen: None })
}

/// Refuses GGUF files of other kinds than models, by what they say of themselves.
///
/// # Errors
/// What the file is.
pub fn ensure_model(checkpoint: &Checkpoint) -> Result<()> {
    let kind = checkpoint.meta().opt_str("general.type").ok().flatten().unwrap_or("model");
    let what = match kind {
        "imatrix" => "an importance matrix (for quantize --imatrix)",
        "adapter" => "an adapter, which must be merged into its model first",
        "mmproj" => "the image encoder of a model",
        "vocab" => "a vocabulary without weights",
        _ => return Ok(()),
    };
    bail!("failed to open {}: it is {what}, not a model", checkpoint.name())
}

/// Returns the model's own chat template, if it has one.
pub fn template(checkpoint: &Checkpoint, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>> {
    let Some(source) = folder::chat_template(checkpoint)? else { return Ok(None) };
    Ok(Some(compile_template(&source, tokenizer)?))
}

/// Returns a template for the model of this tokenizer.
fn compile_template(source: &str, tokenizer: &Tokenizer) -> Result<ChatTemplate> {
    let token = |id: Option<u32>| {
        let bytes = id.and_then(|id| tokenizer.token_bytes(id)).unwrap_or_default();
        String::from_utf8_lossy(bytes).into_owned()
    };
    Ok(ChatTemplate::new(source, &token(tokenizer.bos()), &token(tokenizer.eos()))?)
}

/// Parameters of all tensors.
pub fn n_params(checkpoint: &Checkpoint) -> u64 {
    checkpoint.tensors().iter().map(|t| t.shape.iter().map(|&d| d as u64).product::<u64>()).sum()
}

/// `qwen3moe Q4_K_M`-like: architecture and type, behind the embedded model's name.
pub fn describe(checkpoint: &Checkpoint, plan: &Plan, embedded: bool) -> String {
    let kind = format!("{} {}", plan.arch, file_type(checkpoint));
    if embedded { format!("{} {kind}", embedded::NAME) } else { kind }
}

/// Returns how a file is quantized: what it says of itself (`general.file_type`, numbered as `llama_ftype` in
/// llama.cpp's llama.h), else the weight type that most bytes are in.
pub fn file_type(checkpoint: &Checkpoint) -> String {
    #[rustfmt::skip]
    const NAMES: [&str; 39] = [
        "F32", "F16", "Q4_0", "Q4_1", "", "", "", "Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S",
        "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ2_XXS", "IQ2_XS", "Q2_K_S", "IQ3_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL",
        "IQ3_S", "IQ3_M", "IQ2_S", "IQ2_M", "IQ4_XS", "IQ1_M", "BF16", "", "", "", "TQ1_0", "TQ2_0", "MXFP4",
    ];
    let said = checkpoint.meta().get("general.file_type").and_then(|value| value.to_int());
    let said = said.and_then(|n| NAMES.get(usize::try_from(n).ok()?)).filter(|name| !name.is_empty());
    if let Some(name) = said {
        return name.to_string();
    }
    let mut bytes = BTreeMap::new();
    for tensor in checkpoint.tensors() {
        *bytes.entry(tensor.dtype).or_insert(0usize) += tensor.total_bytes();
    }
    bytes.iter().max_by_key(|(_, bytes)| **bytes).map_or(String::new(), |(dtype, _)| dtype.name().to_string())
}

#[cfg(test)]
mod tests {
    use backend::Backend;
    use cpu::Cpu;

    use super::*;

    #[test]
    fn what_the_cpu_runs_is_the_fused_plan() {
        let plain = open(None).unwrap().plan;
        let fused = Cpu::default().lower(plain.clone()).unwrap();
        assert!(fused.ops.len() < plain.ops.len(), "{} ops of {}", fused.ops.len(), plain.ops.len());
    }
}
