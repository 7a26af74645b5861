//! Model folders as sources of GGUF files, and GGUF files as sources of MLX folders: what `moebius convert` does, and
//! `moebius quantize` with a folder.
//!
//! A folder shows itself as the tensors and keys that its GGUF file will have (`keys.rs`, `weights.rs`); what is read
//! of it goes through [`recipe::Recipe`], a piece at a time, so that memory does not grow with the model. The way back
//! is `mlx/`.

mod dsa;
mod encoder;
mod keys;
pub mod mlx;
mod recipe;
mod recurrent;
mod states;
mod weights;

use std::ops::Range;

use anyhow::{Context, Result, bail, ensure};
use checkpoint::{Checkpoint, Kind, Metadata, Value};
use engine::tokenizer::{Tokenizer, sentencepiece_keys};
use model::names::Names;
use quant::WeightType;

use crate::out;
use crate::quantize::source::{Source, Tensor, unchanged};
use keys::Keys;
use recipe::{Cache, Recipe};
use weights::{Delta, Shape};

/// A model folder as the GGUF file that it becomes.
pub struct Folder {
    checkpoint: Checkpoint,
    meta: Metadata,
    tensors: Vec<Tensor>,
    recipes: Vec<Recipe>,
    cache: Cache,
}

impl Folder {
    /// Takes an open folder; `pre` names the way its tokenizer cuts words where that cannot be found.
    ///
    /// # Errors
    /// It is no folder of a model that can be converted; the sentence says what it lacks.
    pub fn new(checkpoint: Checkpoint, pre: Option<&str>) -> Result<Folder> {
        ensure!(checkpoint.kind() != Kind::Gguf, "failed to convert {}: it is a GGUF file already", checkpoint.name());
        let config = checkpoint.meta();
        let arch = keys::architecture(config)?;
        refuse_packed(&checkpoint)?;
        let keys = Keys::new(config, arch);
        let n_layer = config.u32("num_hidden_layers")? as usize;
        ensure!(
            n_layer <= 1024,
            "failed to convert {}: it has {n_layer} layers, at most 1024 are allowed",
            checkpoint.name()
        );
        let (mut divisors, mut n_further, mut plan) = (None, 0, None);
        let made = if arch == "gpt-oss" && weights::is_interleaved(&checkpoint) {
            weights::of_gpt_oss(&checkpoint, n_layer)?
        } else {
            let plan = &*plan.insert(model::build_drafting(&checkpoint)?.into_plan());
            ensure!(!plan.whole, "failed to convert {}: encoders of texts are not converted", checkpoint.name());
            n_further = u32::from(plan.draft.is_some());
            divisors = keys.divisors(Some(plan))?;
            let count = |name: &str| Ok::<_, anyhow::Error>(keys.count(&[name])?.unwrap_or(0) as usize);
            let delta = Delta {
                n_k: count("linear_num_key_heads")?,
                n_v: count("linear_num_value_heads")?,
                d_k: count("linear_key_head_dim")?,
                d_v: count("linear_value_head_dim")?,
            };
            let shape = Shape {
                arch,
                n_head: count("num_attention_heads")?,
                delta: Some(delta).filter(|delta| delta.n_k > 0 && delta.d_v > 0),
                qk_scale: config.opt_f32("qk_scale_factor")?,
                scales: if arch == "falcon-h1" { states::falcon_scales(config, plan)? } else { Vec::new() },
            };
            weights::of_plan(&checkpoint, plan, &shape)?
        };
        let constants = divisors.map(|values| ("rope_freqs.weight", values)).into_iter().chain(keys.long_factors()?);
        let made = made.into_iter().chain(constants.map(|(name, values)| weights::constant(name, values)));
        let (tensors, recipes): (Vec<Tensor>, Vec<Recipe>) = made.unzip();
        let table = tensors.iter().find(|t| t.name == "token_embd.weight").context("the folder has no embedding")?;
        let n_vocab = table.shape[0];
        let mut entries = vec![
            ("general.architecture".to_string(), Value::from(arch)),
            ("general.type".into(), "model".into()),
            ("general.name".into(), name(&checkpoint).as_str().into()),
        ];
        entries.extend(sampling(&checkpoint)?);
        entries.extend(keys.all(n_further, plan.as_ref())?);
        entries.extend(vocabulary(&checkpoint, n_vocab, arch, pre)?);
        let meta = Metadata::new(checkpoint.name(), entries)?;
        Ok(Folder { checkpoint, meta, tensors, recipes, cache: Cache::default() })
    }

    /// Returns whether the folder has an image encoder.
    pub fn has_encoder(&self) -> bool {
        self.checkpoint.tensors().iter().any(|tensor| Names::is_of_encoder(&tensor.name))
    }

    /// Returns the float type that most of its matrices have: what it becomes where no one chooses.
    pub fn float_type(&self) -> WeightType {
        let n_values = |dtype: WeightType| {
            let of = |(t, r): &(&Tensor, &Recipe)| r.origin == dtype && t.shape.len() > 1 && t.dtype == dtype;
            self.tensors.iter().zip(&self.recipes).filter(of).map(|(t, _)| t.len()).sum::<usize>()
        };
        // The last of equals: bf16 where no matrix is a float.
        [WeightType::F32, WeightType::F16, WeightType::BF16]
            .into_iter()
            .max_by_key(|&t| n_values(t))
            .unwrap_or(WeightType::BF16)
    }
}

impl Source for Folder {
    fn meta(&self) -> &Metadata {
        &self.meta
    }

    fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    fn origin(&self, tensor: usize) -> WeightType {
        self.recipes[tensor].origin
    }

    fn read(&self, tensor: usize, range: Range<usize>, out: &mut Vec<u8>) -> Result<()> {
        let read = self.recipes[tensor].read(&self.checkpoint, &self.cache, tensor, range, out);
        read.with_context(|| format!("failed to convert tensor {}", self.tensors[tensor].name))
    }

    fn is_whole(&self) -> Result<()> {
        unchanged(&self.checkpoint)
    }
}

/// Refuses weights in a form that is not read by the key of the config that says so, where one does.
fn refuse_packed(checkpoint: &Checkpoint) -> Result<()> {
    let (config, name) = (checkpoint.meta(), checkpoint.name());
    let key = |name: &str| format!("quantization_config.{name}");
    let Some(method) = config.opt_str(&key("quant_method"))? else { return Ok(()) };
    let mut others = checkpoint.unreadable().iter().filter(|other| !Names::is_other_modality(&other.name));
    let Some(other) = others.next() else { return Ok(()) };
    let known = ["gptq", "awq", "fp8", "mxfp4"];
    if !known.iter().any(|known| method.eq_ignore_ascii_case(known)) {
        let format = config.opt_str(&key("format"))?.map(|format| format!(", format {format}")).unwrap_or_default();
        bail!(
            "failed to convert {name}: quantization_config.quant_method is {method}{format}; supported are {} and \
             compressed-tensors' pack-quantized (4 bits) and float-quantized (8 bits) (tensor {} is of type {})",
            known.join(", "),
            other.name,
            other.dtype
        );
    }
    let is_whole = method.eq_ignore_ascii_case("fp8") && config.get(&key("weight_block_size")).is_none();
    ensure!(
        !is_whole || !other.dtype.starts_with("F8"),
        "failed to convert {name}: quantization_config.weight_block_size is missing, which FP8 requires (tensor \
         {})",
        other.name
    );
    Ok(())
}

/// Returns the model's name: that of its folder, or of its repository where the folder is a revision in a cache.
fn name(checkpoint: &Checkpoint) -> String {
    let path = std::path::absolute(checkpoint.name()).unwrap_or_default();
    let part = |path: &std::path::Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let repository = path.ancestors().find_map(|path| part(path)?.strip_prefix("models--").map(str::to_string));
    let repository = repository.and_then(|name| name.rsplit_once("--").map(|(_, name)| name.to_string()));
    repository.or_else(|| part(&path)).unwrap_or_else(|| "model".into())
}

/// Returns what the folder recommends for sampling, under llama.cpp's keys.
fn sampling(checkpoint: &Checkpoint) -> Result<Vec<(String, Value)>> {
    let found = engine::folder::sampling(checkpoint)?;
    let mut keys: Vec<(String, Value)> = Vec::new();
    let mut add = |key: &str, value: Option<Value>| {
        value.into_iter().for_each(|value| keys.push((format!("general.sampling.{key}"), value)));
    };
    add("top_k", found.top_k.and_then(|k| i32::try_from(k).ok()).map(Value::from));
    add("top_p", found.top_p.map(Value::from));
    add("min_p", found.min_p.map(Value::from));
    add("temp", found.temperature.map(Value::from));
    add("penalty_repeat", found.repetition_penalty.map(Value::from));
    Ok(keys)
}

/// Returns the tokenizer and the chat template. A folder without tokenizer makes a file without.
fn vocabulary(checkpoint: &Checkpoint, n_vocab: usize, arch: &str, pre: Option<&str>) -> Result<Vec<(String, Value)>> {
    let has = |name: &str| matches!(checkpoint.side_file(name), Ok(Some(_)));
    let mut keys = if has("tokenizer.json") || has("tiktoken.model") {
        Tokenizer::load(checkpoint)?.to_gguf(n_vocab, arch == "gemma4", pre)?
    } else if let Some(keys) = sentencepiece_keys(checkpoint, Some(n_vocab))? {
        keys
    } else {
        out::note!("moebius: {} has no tokenizer, and neither will the new file", checkpoint.name());
        return Ok(Vec::new());
    };
    if let Some(template) = engine::folder::chat_template(checkpoint)? {
        keys.push(("tokenizer.chat_template".into(), template.as_str().into()));
    }
    Ok(keys)
}
