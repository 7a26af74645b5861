//! The keys of an architecture, read with bounds: their values are safe to multiply and allocate.
//!
//! A quantity is a [`Key`], which knows GGUF's name and config.json's names for it, so that an architecture reads both
//! kinds of file with the same lines.

use checkpoint::{Checkpoint, Metadata, Value, ValueKind};

use crate::Error;
use crate::names::{Alias, Names};
use crate::plan::{Growth, Read, RopeDecl, RopePairing};
use crate::rope::{self, Scaling, Yarn};

/// Divisors of the rotary frequencies, which the rope's table includes.
pub(super) const ROPE_FREQS: &str = "rope_freqs.weight";
/// LongRoPE's, for contexts up to the length of the first training and for longer ones.
pub(super) const ROPE_SHORT: &str = "rope_factors_short.weight";
pub(super) const ROPE_LONG: &str = "rope_factors_long.weight";

pub(super) const MAX_LAYERS: usize = 1024;
pub(super) const MAX_WIDTH: usize = 1 << 20; // d_model, d_ff
pub(super) const MAX_HEADS: usize = 1 << 12;
pub(super) const MAX_HEAD_WIDTH: usize = 1 << 12;
pub(super) const MAX_CONTEXT: usize = 1 << 24;
pub(super) const MAX_EXPERTS: usize = crate::plan::validate::MAX_EXPERTS;
pub(super) const MAX_USED: usize = crate::plan::validate::MAX_USED;

/// A quantity, by the names that files give it.
#[derive(Clone, Copy)]
pub(super) struct Key {
    /// GGUF's name behind the prefix of the architecture; empty when GGUF has none.
    pub gguf: &'static str,
    /// config.json's names, most usual first.
    pub folder: &'static [&'static str],
}

/// Returns a [`Key`] on one line.
pub(super) const fn key(gguf: &'static str, folder: &'static [&'static str]) -> Key {
    Key { gguf, folder }
}

pub(super) const N_LAYER: Key = key("block_count", &["num_hidden_layers", "n_layer"]);
pub(super) const N_CTX_TRAIN: Key =
    key("context_length", &["max_position_embeddings", "model_max_length", "n_positions"]);
pub(super) const D_MODEL: Key = key("embedding_length", &["hidden_size", "n_embd"]);
pub(super) const N_VOCAB: Key = key("vocab_size", &["vocab_size"]);
pub(super) const N_HEAD: Key = key("attention.head_count", &["num_attention_heads", "n_head"]);
pub(super) const N_KV: Key = key("attention.head_count_kv", &["num_key_value_heads", "num_attention_groups"]);
pub(super) const D_K: Key = key("attention.key_length", &["head_dim", "attention_head_dim"]);
pub(super) const D_V: Key = key("attention.value_length", &["v_head_dim", "head_dim", "attention_head_dim"]);
pub(super) const EPS: Key = key("attention.layer_norm_rms_epsilon", &["rms_norm_eps", "layernorm_epsilon"]);
pub(super) const ATTENTION_SCALE: Key = key("attention.scale", &[]);
pub(super) const D_FF: Key = key("feed_forward_length", &["intermediate_size", "n_inner"]);
pub(super) const N_EXPERT: Key =
    key("expert_count", &["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"]);
pub(super) const N_USED: Key = key(
    "expert_used_count",
    &["num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k", "moe_top_k"],
);
pub(super) const D_FF_EXPERT: Key = key("expert_feed_forward_length", &["moe_intermediate_size"]);
pub(super) const EXPERT_SCALE: Key = key(
    "expert_weights_scale",
    &[
        "routed_scaling_factor",
        "router_scaling_factor",
        "moe_routed_scaling_factor",
        "moe_router_scaling_factor",
        "route_scale",
    ],
);
pub(super) const EXPERT_NORM: Key =
    key("expert_weights_norm", &["norm_topk_prob", "route_norm", "norm_expert_weight", "moe_renormalize"]);
pub(super) const EXPERT_GATING: Key = key("expert_gating_func", &[]);
pub(super) const ROTARY: Key = key("rope.dimension_count", &["rotary_dim"]);
const N_NEXT: Key = key("nextn_predict_layers", &[]);
/// Of config.json, which does not count them among the layers.
const N_NEXT_BEHIND: Key = key("nextn_predict_layers", &["num_nextn_predict_layers"]);
const ROTARY_SHARE: Key = key("", &["partial_rotary_factor"]);
const ROPE_BASE: Key = key("rope.freq_base", &["rope_theta", "global_rope_theta", "rotary_emb_base"]);
pub(super) const SCALING: Key = key("rope.scaling.type", &["rope_type", "type"]);
pub(super) const FACTOR: Key = key("rope.scaling.factor", &["factor"]);
const FACTOR_LINEAR: Key = key("rope.scale_linear", &[]);
pub(super) const N_CTX_ORIG: Key = key("rope.scaling.original_context_length", &["original_max_position_embeddings"]);
const BETA_FAST: Key = key("rope.scaling.yarn_beta_fast", &["beta_fast"]);
const BETA_SLOW: Key = key("rope.scaling.yarn_beta_slow", &["beta_slow"]);
const EXT_FACTOR: Key = key("rope.scaling.yarn_ext_factor", &[]);
const ATTN_FACTOR: Key = key("rope.scaling.attn_factor", &[]);
const ATTENTION_FACTOR: Key = key("rope.scaling.yarn_attn_factor", &["attention_factor"]);
const LOG_MULTIPLIER: Key = key("rope.scaling.yarn_log_multiplier", &["mscale_all_dim"]);
const MSCALE: Key = key("", &["mscale"]);
const TRUNCATE: Key = key("", &["truncate"]);
/// Step's, a number a layer.
const ROPE_BASES: Key = key("rope.freq_base", &["rope_theta"]);
const ROTARY_SHARES: Key = key("", &["partial_rotary_factors"]);
const ROPE_BASE_WINDOWED: Key =
    key("rope.freq_base_swa", &["rope_local_base_freq", "swa_rope_theta", "local_rope_theta"]);
/// A scale of queries that grows with the position, and the positions of one scale where they are not the context
/// before YaRN.
const TEMPERATURE: Key = key("attention.temperature_scale", &["llama_4_scaling_beta"]);
const TEMPERATURE_LENGTH: Key = key("attention.temperature_length", &[]);
/// Hunyuan's: the base is multiplied by its power.
const ROPE_ALPHA: Key = key("", &["alpha"]);
const ROTARY_WINDOWED: Key = key("rope.dimension_count_swa", &[]);
const SHORT_FACTORS: Key = key("", &["short_factor"]);
const LONG_FACTORS: Key = key("", &["long_factor"]);
/// Layers that rotate q and k, one flag each.
const ROTATED: Key = key("attention.rope_pattern", &["no_rope_layers"]);
/// Every n-th layer does not.
const UNROTATED_EVERY: Key = key("", &["no_rope_layer_interval"]);
const LOW_FREQ: Key = key("", &["low_freq_factor"]);
const HIGH_FREQ: Key = key("", &["high_freq_factor"]);

/// Where config.json keeps the keys of the one rotary embedding of a model, first places first.
pub(super) const ROPE_SECTIONS: &[&str] = &["rope_parameters.", "rope_scaling.", ""];

/// Base and rotated share of a head in the original code of folders, by `model_type`, where they are not 10000 and 1.
#[rustfmt::skip]
const UNSAID_ROPE: &[(&[&str], f64, f64)] = &[
    (&["mixtral", "minimax", "minimax_text_01", "minimax_m1", "phimoe", "lfm2", "lfm2_moe", "gemma3", "gemma3_text",
        "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"],
        1e6, 1.0),
    (&["gpt_oss"], 150_000.0, 1.0),
    (&["bailing_hybrid"], 6e6, 1.0),
    (&["olmo3"], 500_000.0, 1.0),
    (&["modernbert"], 160_000.0, 1.0),
    (&["nomic_bert"], 1000.0, 1.0),
    (&["smollm3"], 2e6, 1.0),
    (&["glm4", "glm4_moe"], 10_000.0, 0.5),
    (&["qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"], 10_000.0, 0.25),
];

/// Returns the base of a rotary embedding and the rotated share of a head that the original code of this `model_type`
/// takes where a folder says nothing of them.
pub fn unsaid_rope(model_type: &str) -> (f64, f64) {
    let found = UNSAID_ROPE.iter().find(|(names, ..)| names.contains(&model_type));
    found.map_or((10_000.0, 1.0), |&(_, base, share)| (base, share))
}

/// The keys of a checkpoint.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a> {
    names: Names<'a>,
    /// GGUF's architecture, the prefix of its keys; `None` for a folder.
    gguf: Option<&'a str>,
    /// See [`unsaid_rope`].
    unsaid_rope: (f64, f64),
}

/// Dimensions that every transformer here has.
#[derive(Clone, Copy)]
pub(super) struct Dims {
    pub n_layer: usize,
    pub n_vocab: usize,
    pub n_ctx_train: usize,
    pub d_model: usize,
    pub n_head: usize,
    pub n_kv: usize,
    pub d_k: usize,
    pub d_v: usize,
    pub eps: f32,
    /// The stored form of a layer's norms.
    pub norm: Read,
    /// Whether attention and feed-forward begin with a norm.
    pub pre_norm: bool,
    /// Epsilon of the norms after attention and feed-forward, where the model has such.
    pub post_norm: Option<f32>,
    /// Factor on what attention and feed-forward add (Granite).
    pub residual: f32,
}

/// Dimensions of a mixture of experts.
pub(super) struct MoeDims {
    pub n_expert: usize,
    pub n_used: usize,
    pub d_ff: usize,
    pub renormalise: bool,
    pub scale: f32,
}

impl<'a> Keys<'a> {
    /// Returns the keys of a checkpoint, and its tensors under GGUF's names; `aliases` are the architecture's own.
    pub fn new(checkpoint: &'a Checkpoint, aliases: &'static [Alias]) -> Self {
        let gguf = checkpoint.meta().opt_str("general.architecture").ok().flatten();
        let model_type = checkpoint.meta().opt_str("model_type").ok().flatten().filter(|_| gguf.is_none());
        Self { names: Names::new(checkpoint, aliases), gguf, unsaid_rope: unsaid_rope(model_type.unwrap_or_default()) }
    }

    /// Returns the tensors.
    pub fn names(&self) -> Names<'a> {
        self.names
    }

    /// Returns whether the checkpoint is a folder with a config.json.
    pub fn is_folder(&self) -> bool {
        self.gguf.is_none()
    }

    /// Returns the metadata, for keys of no usual form.
    pub fn meta(&self) -> &'a Metadata {
        self.names.checkpoint().meta()
    }

    /// Returns the key's name in this file: of several names the one that is there, else the first. `None` where this
    /// kind of file has no such key.
    pub fn name(&self, key: Key) -> Option<String> {
        self.name_in(&[""], key)
    }

    /// As [`Keys::name`], in a folder behind one of these prefixes, tried in turn.
    pub(super) fn name_in(&self, sections: &[&str], key: Key) -> Option<String> {
        if let Some(arch) = self.gguf {
            return (!key.gguf.is_empty()).then(|| format!("{arch}.{}", key.gguf));
        }
        let mut names =
            sections.iter().flat_map(|section| key.folder.iter().map(move |name| format!("{section}{name}")));
        let first = names.clone().next();
        names.find(|name| self.meta().get(name).is_some()).or(first)
    }

    /// Returns an error about a key.
    pub fn error(&self, key: Key, what: String) -> Error {
        self.error_at(self.name(key).unwrap_or_else(|| key.gguf.into()), what)
    }

    pub(super) fn error_at(&self, key: String, what: String) -> Error {
        Error::Key { file: self.names.checkpoint().name().into(), key, what }
    }

    /// Returns a count from 1 to `max`.
    pub fn count(&self, key: Key, max: usize) -> Result<usize, Error> {
        let name = self.name(key).unwrap_or_else(|| key.gguf.into());
        match self.same(&name)? {
            Some(n) => self.in_range(&name, n, max),
            None => self.in_range(&name, self.meta().u64(&name)?, max),
        }
    }

    /// Returns a count from 1 to `max`, or nothing.
    pub fn opt_count(&self, key: Key, max: usize) -> Result<Option<usize>, Error> {
        let Some(name) = self.name(key) else { return Ok(None) };
        self.same(&name)?.map(|n| self.in_range(&name, n, max)).transpose()
    }

    /// Returns a count from 0 to `max`, 0 when absent.
    pub fn count_or_zero(&self, key: Key, max: usize) -> Result<usize, Error> {
        let Some(name) = self.name(key) else { return Ok(0) };
        match self.same(&name)? {
            None | Some(0) => Ok(0),
            Some(n) => self.in_range(&name, n, max),
        }
    }

    /// Returns a number that a file may also list for every layer, the same for all but those with 0, which have no
    /// part of that kind.
    fn same(&self, name: &str) -> Result<Option<u64>, Error> {
        let meta = self.meta();
        let list = match meta.get(name) {
            Some(Value::Numbers(list)) if !list.is_empty() => meta.u32s(name)?,
            _ => return Ok(meta.opt_u64(name)?),
        };
        let first = list.iter().find(|&&n| n != 0).copied().unwrap_or(0);
        match list.iter().find(|&&n| n != first && n != 0) {
            None => Ok(Some(first.into())),
            Some(n) => Err(self.error_at(name.into(), format!("has {first} and {n}, expected one number"))),
        }
    }

    /// Returns a count of a key in full, from 1 to `max`.
    pub fn in_range(&self, name: &str, n: u64, max: usize) -> Result<usize, Error> {
        match usize::try_from(n) {
            Ok(n) if (1..=max).contains(&n) => Ok(n),
            _ => Err(self.error_at(name.into(), format!("is {n}, expected 1 to {max}"))),
        }
    }

    /// Counts from 1 to `max`, one a layer; a file may give one for all.
    pub fn counts(&self, key: Key, n_layer: usize, max: usize) -> Result<Vec<usize>, Error> {
        let name = self.name(key).unwrap_or_else(|| key.gguf.into());
        if !matches!(self.meta().get(&name), Some(Value::Numbers(_))) {
            return Ok(vec![self.count(key, max)?; n_layer]);
        }
        let counts = self.of_layers(&name, "numbers", self.meta().u32s(&name)?, n_layer)?;
        counts.into_iter().map(|n| self.in_range(&name, n.into(), max)).collect()
    }

    /// Returns the entries of the model's own layers out of a list that may go on with those of the layers that predict
    /// further tokens; `what` they are.
    pub fn of_layers<T>(&self, name: &str, what: &str, mut list: Vec<T>, n_layer: usize) -> Result<Vec<T>, Error> {
        let n_next = self.count_or_zero(N_NEXT_BEHIND, MAX_LAYERS)?;
        if list.len() != n_layer && list.len() != n_layer + n_next {
            let layers = if what == "layers" { "" } else { " layers" };
            let what = format!("has {} {what}, the model has {n_layer}{layers}", list.len());
            return Err(self.error_at(name.into(), what));
        }
        list.truncate(n_layer);
        Ok(list)
    }

    /// Returns a number a layer, 0 where a list has none for it.
    pub fn numbers(&self, key: Key, n_layer: usize) -> Result<Option<Vec<f64>>, Error> {
        let Some(name) = self.name(key) else { return Ok(None) };
        match self.meta().get(&name) {
            Some(Value::Numbers(_)) => {
                let list = self.of_layers(&name, "numbers", self.meta().f32s(&name)?, n_layer)?;
                match list.iter().find(|x| !x.is_finite()) {
                    Some(x) => Err(self.error_at(name, format!("has {x}, expected numbers"))),
                    None => Ok(Some(list.into_iter().map(f64::from).collect())),
                }
            }
            // A list with `null` in it is a key for each other number.
            None if self.is_folder() => {
                let of = |layer: usize| self.number(&format!("{name}.{layer}"));
                let list = (0..n_layer).map(of).collect::<Result<Vec<_>, _>>()?;
                let is_there = list.iter().any(Option::is_some);
                Ok(is_there.then(|| list.into_iter().map(Option::unwrap_or_default).collect()))
            }
            None => Ok(None),
            Some(_) => Ok(self.number(&name)?.map(|x| vec![x; n_layer])),
        }
    }

    /// Returns whether the file has this key, by its name in the file.
    pub fn has(&self, name: &str) -> bool {
        self.meta().get(name).is_some()
    }

    /// Returns a text, or nothing.
    pub fn opt_str(&self, key: Key) -> Result<Option<&'a str>, Error> {
        let Some(name) = self.name(key) else { return Ok(None) };
        Ok(self.meta().opt_str(&name)?)
    }

    /// Returns a flag, or nothing.
    pub fn opt_bool(&self, key: Key) -> Result<Option<bool>, Error> {
        let Some(name) = self.name(key) else { return Ok(None) };
        Ok(self.meta().opt_bool(&name)?)
    }

    /// Returns a number above 0, or nothing.
    pub fn opt_positive(&self, key: Key) -> Result<Option<f64>, Error> {
        self.name(key).map_or(Ok(None), |name| self.opt_positive_at(&name))
    }

    fn opt_positive_at(&self, name: &str) -> Result<Option<f64>, Error> {
        match self.number(name)? {
            Some(x) if x <= 0.0 => Err(self.error_at(name.into(), format!("is {x}, expected more than 0"))),
            x => Ok(x),
        }
    }

    /// Returns a number that is 0 or more, with a default.
    pub fn not_negative(&self, key: Key, default: f64) -> Result<f64, Error> {
        self.name(key).map_or(Ok(default), |name| self.not_negative_at(&name, default))
    }

    fn not_negative_at(&self, name: &str, default: f64) -> Result<f64, Error> {
        match self.number(name)? {
            Some(x) if x < 0.0 => Err(self.error_at(name.into(), format!("is {x}, expected 0 or more"))),
            x => Ok(x.unwrap_or(default)),
        }
    }

    /// Returns a finite number of a folder by its name in config.json; GGUF files have none.
    pub fn factor(&self, name: &str) -> Result<Option<f32>, Error> {
        if self.is_folder() { Ok(self.number(name)?.map(|x| x as f32)) } else { Ok(None) }
    }

    /// Returns `N` finite numbers of a folder by the name of their list; GGUF files have none.
    pub fn factors<const N: usize>(&self, name: &str) -> Result<Option<[f32; N]>, Error> {
        if !self.is_folder() || !self.has(name) {
            return Ok(None);
        }
        let list = self.meta().f32s(name)?;
        match <[f32; N]>::try_from(list.as_slice()) {
            Ok(factors) if factors.iter().all(|x| x.is_finite()) => Ok(Some(factors)),
            _ => Err(self.error_at(name.into(), format!("has {} numbers, expected {N} finite ones", list.len()))),
        }
    }

    /// Returns a finite number. JSON writes whole numbers as integers.
    pub fn number(&self, name: &str) -> Result<Option<f64>, Error> {
        if self.is_folder()
            && let Ok(n) = self.meta().opt_i32(name)
        {
            return Ok(n.map(f64::from));
        }
        Ok(self.meta().opt_f32(name)?.map(f64::from))
    }

    /// Returns the dimensions of a plain transformer.
    pub fn dims(&self) -> Result<Dims, Error> {
        self.dims_by(EPS)
    }

    /// As [`Keys::dims`], of a layer with these heads.
    pub fn dims_of(&self, n_head: usize, n_kv: usize) -> Result<Dims, Error> {
        self.dims_with(n_head, n_kv, EPS)
    }

    /// As [`Keys::dims`], of a model whose norms have their epsilon elsewhere.
    pub fn dims_by(&self, eps: Key) -> Result<Dims, Error> {
        let n_head = self.count(N_HEAD, MAX_HEADS)?;
        self.dims_with(n_head, self.opt_count(N_KV, MAX_HEADS)?.unwrap_or(n_head), eps)
    }

    fn dims_with(&self, n_head: usize, n_kv: usize, eps: Key) -> Result<Dims, Error> {
        let d_model = self.count(D_MODEL, MAX_WIDTH)?;
        if !n_head.is_multiple_of(n_kv) {
            let heads = self.name(N_HEAD).unwrap_or_default();
            return Err(self.error(N_KV, format!("is {n_kv}, which does not divide {heads} {n_head}")));
        }
        let d_head = |key| match self.opt_count(key, MAX_HEAD_WIDTH)? {
            Some(d) => Ok(d),
            None if d_model.is_multiple_of(n_head) && d_model / n_head <= MAX_HEAD_WIDTH => Ok(d_model / n_head),
            None => Err(self.error(key, format!("is missing, and {n_head} heads cannot share a width of {d_model}"))),
        };
        Ok(Dims {
            n_layer: self.count(N_LAYER, MAX_LAYERS)?,
            n_vocab: self.n_vocab()?,
            n_ctx_train: self.count(N_CTX_TRAIN, MAX_CONTEXT)?,
            d_model,
            n_head,
            n_kv,
            d_k: d_head(D_K)?,
            d_v: d_head(D_V)?,
            eps: self.eps(eps)?,
            norm: Read::Plain,
            pre_norm: true,
            post_norm: None,
            residual: 1.0,
        })
    }

    /// Returns how converters of Llama's kin pair the dims of a head: they permute the rows of q and k, so that pairs
    /// stand next to each other in GGUF files. Folders keep the halves of a head.
    pub fn llama_pairing(&self) -> RopePairing {
        if self.is_folder() { RopePairing::Half } else { RopePairing::Interleaved }
    }

    /// Returns whether each layer rotates q and k; every `every`-th does not where the file says nothing.
    pub fn rotated(&self, n_layer: usize, every: usize) -> Result<Vec<bool>, Error> {
        let name = self.name(ROTATED).unwrap_or_default();
        match self.meta().get(&name) {
            None => {
                let every = self.opt_count(UNROTATED_EVERY, MAX_LAYERS)?.unwrap_or(every);
                Ok((0..n_layer).map(|layer| (layer + 1) % every != 0).collect())
            }
            Some(Value::Numbers(list)) if list.element() == ValueKind::Bool => {
                self.of_layers(&name, "layers", self.meta().bools(&name)?, n_layer)
            }
            Some(_) => {
                let flags = self.meta().u32s(&name)?.into_iter().map(|n| n != 0).collect();
                self.of_layers(&name, "layers", flags, n_layer)
            }
        }
    }

    /// Layers of the model itself. The `n_layer` of GGUF includes those behind them that predict further tokens, that
    /// of config.json does not.
    pub fn trunk(&self, n_layer: usize) -> Result<usize, Error> {
        let n_next = self.count_or_zero(N_NEXT, MAX_LAYERS)?;
        match n_layer.checked_sub(n_next) {
            Some(trunk) if trunk > 0 => Ok(trunk),
            _ => Err(self.error(N_NEXT, format!("is {n_next}, the model has {n_layer} layers with those"))),
        }
    }

    /// Returns what a norm adds to the mean square.
    pub fn eps(&self, key: Key) -> Result<f32, Error> {
        let name = self.name(key).unwrap_or_default();
        let eps = self.meta().f32(&name)?;
        match (0.0..=1.0).contains(&eps) {
            true => Ok(eps),
            false => Err(self.error_at(name, format!("is {eps}, expected 0 to 1"))),
        }
    }

    /// Returns the vocabulary is as large as the table of embeddings; a key that says otherwise is an error.
    pub fn n_vocab(&self) -> Result<usize, Error> {
        const NAME: &str = "token_embd.weight";
        let Some(table) = self.names.tensor(NAME) else { return Err(self.names.error(NAME, "is missing".into())) };
        let &[n_vocab, _] = table.shape.as_slice() else {
            return Err(self.names.error(NAME, format!("has shape {:?}, expected two axes", table.shape)));
        };
        if n_vocab > u32::MAX as usize / 2 {
            return Err(self.names.error(NAME, format!("has {n_vocab} rows, expected at most {}", u32::MAX / 2)));
        }
        match self.opt_count(N_VOCAB, usize::MAX)? {
            Some(n) if n != n_vocab => Err(self.error(N_VOCAB, format!("is {n}, {} has {n_vocab} rows", table.name))),
            _ => Ok(n_vocab),
        }
    }

    /// Width of a dense feed-forward layer.
    pub fn d_ff(&self) -> Result<usize, Error> {
        self.count(D_FF, MAX_WIDTH)
    }

    /// Width of an expert, which files without experts of two kinds may give as that of a dense layer.
    pub fn d_ff_expert(&self) -> Result<usize, Error> {
        match self.opt_count(D_FF_EXPERT, MAX_WIDTH)? {
            Some(d_ff) => Ok(d_ff),
            None => self.d_ff(),
        }
    }

    /// `None` when the model has no experts.
    pub fn n_expert(&self) -> Result<Option<usize>, Error> {
        Ok(Some(self.count_or_zero(N_EXPERT, MAX_EXPERTS)?).filter(|&n| n > 0))
    }

    /// Experts, of a model that must have them.
    pub fn some_experts(&self) -> Result<usize, Error> {
        self.n_expert()?.ok_or_else(|| self.error(N_EXPERT, "is missing or 0, expected 1 or more".into()))
    }

    /// Experts that a token uses, of `n_expert`.
    pub fn n_used(&self, n_expert: usize) -> Result<usize, Error> {
        let n_used = self.count(N_USED, MAX_USED)?;
        if n_used > n_expert {
            let experts = self.name(N_EXPERT).unwrap_or_default();
            return Err(self.error(N_USED, format!("is {n_used}, {experts} is {n_expert}")));
        }
        Ok(n_used)
    }

    /// Experts behind a softmax router. `renormalise` is the rule of the original model code where the file says
    /// nothing.
    pub fn moe(&self, n_expert: usize, renormalise: bool) -> Result<MoeDims, Error> {
        let n_used = self.n_used(n_expert)?;
        // Absent and 0 both mean 1, as other readers of these files take it.
        let scale = self.not_negative(EXPERT_SCALE, 1.0)? as f32;
        // The number of the gating function in files: 1 is softmax over all experts.
        let gating = self.name(EXPERT_GATING).map_or(Ok(None), |name| self.meta().opt_u32(&name))?;
        if let Some(gating @ 2..) = gating {
            return Err(self.error(EXPERT_GATING, format!("is {gating}, expected 1 (softmax)")));
        }
        Ok(MoeDims {
            n_expert,
            n_used,
            d_ff: self.d_ff_expert()?,
            renormalise: self.opt_bool(EXPERT_NORM)?.unwrap_or(renormalise),
            scale: if scale == 0.0 { 1.0 } else { scale },
        })
    }

    /// Returns the rotary embedding of heads `d_head` wide: base, scaling rule, and the divisors in
    /// `rope_freqs.weight`.
    pub fn rope(&self, d_head: usize, pairing: RopePairing) -> Result<RopeDecl, Error> {
        self.rope_of(None, d_head, pairing)
    }

    /// As [`Keys::rope`]; `layers` is the type of layers that have their own entry in config.json's `rope_parameters`.
    pub fn rope_of(&self, layers: Option<&str>, d_head: usize, pairing: RopePairing) -> Result<RopeDecl, Error> {
        let own = layers.map(|layers| format!("rope_parameters.{layers}.")).unwrap_or_default();
        let sections: &[&str] = &[&own, "rope_parameters.", "rope_scaling.", ""];
        let sections = if own.is_empty() { &sections[1..] } else { sections };
        let keys = RopeKeys { keys: *self, sections };
        self.table(&keys, d_head, pairing, keys.scaling(d_head)?)
    }

    /// Returns the scaling rule of the one rotary embedding of a model, over heads `d_head` wide.
    pub fn scaling(&self, d_head: usize) -> Result<Scaling, Error> {
        RopeKeys { keys: *self, sections: ROPE_SECTIONS }.scaling(d_head)
    }

    /// As [`Keys::rope`], with another scaling rule than the file's keys say by themselves.
    pub fn rope_scaled(&self, d_head: usize, pairing: RopePairing, scaling: Scaling) -> Result<RopeDecl, Error> {
        self.table(&RopeKeys { keys: *self, sections: ROPE_SECTIONS }, d_head, pairing, scaling)
    }

    /// The same of dims that all turn, whatever share of a head the file names.
    pub fn rope_whole(&self, d: usize, pairing: RopePairing, scaling: Scaling) -> Result<RopeDecl, Error> {
        if !d.is_multiple_of(2) {
            return Err(self.error(ROTARY, format!("would be {d}, expected an even number")));
        }
        let base = RopeKeys { keys: *self, sections: ROPE_SECTIONS }.base(ROPE_BASE)?.unwrap_or(self.unsaid_rope.0);
        Ok(rope::table(d, base, None, scaling, pairing))
    }

    /// Returns the context before and the factor of dynamic NTK scaling, where the file has it; `alpha` is not it.
    pub fn dynamic(&self) -> Result<Option<(usize, f64)>, Error> {
        let keys = RopeKeys { keys: *self, sections: ROPE_SECTIONS };
        if keys.kind()? != Some("dynamic") || keys.opt_positive(ROPE_ALPHA)?.is_some() {
            return Ok(None);
        }
        let factor = keys.not_negative(FACTOR, 0.0)?;
        Ok(if factor > 1.0 { Some((keys.n_ctx_orig()?, factor)) } else { None })
    }

    /// Returns what scales queries `d_head` wide by their position, where something does.
    pub fn growth(&self, d_head: usize) -> Result<Option<RopeDecl>, Error> {
        let keys = RopeKeys { keys: *self, sections: ROPE_SECTIONS };
        let beta = keys.not_negative(TEMPERATURE, 0.0)? as f32;
        if beta == 0.0 {
            return Ok(None);
        }
        let step = match self.opt_count(TEMPERATURE_LENGTH, MAX_CONTEXT)? {
            Some(n) => n,
            None => keys.n_ctx_orig()?,
        };
        match rope::growing(Growth { beta, step: step as u32, offset: 0 }, d_head) {
            Some(rope) => Ok(Some(rope)),
            None => Err(keys.error(TEMPERATURE, format!("is {beta}, and heads of {d_head} cannot grow"))),
        }
    }

    /// Returns `rope` with the growth of queries by their position, where something makes them grow.
    pub fn growing(&self, rope: &RopeDecl, d_head: usize) -> Result<Option<RopeDecl>, Error> {
        let Some(RopeDecl { growth, .. }) = self.growth(d_head)? else { return Ok(None) };
        match 2 * rope.inv_freq.len() == d_head {
            true => Ok(Some(RopeDecl { growth, ..rope.clone() })),
            false => Err(self.error(TEMPERATURE, "is set, and a part of each head is not rotated".into())),
        }
    }

    fn table(&self, keys: &RopeKeys, d_head: usize, pairing: RopePairing, scaling: Scaling) -> Result<RopeDecl, Error> {
        let rotary = match scaling {
            Scaling::Proportional { .. } => d_head,
            _ => keys.rotary(ROTARY, d_head)?,
        };
        let base = keys.base(ROPE_BASE)?.unwrap_or(self.unsaid_rope.0) * keys.stretch(rotary)?;
        let divisors = self.rope_divisors(ROPE_FREQS, rotary)?;
        Ok(rope::table(rotary, base, divisors.as_deref(), scaling, pairing))
    }

    /// Returns the rotary embeddings of LongRoPE (arXiv 2402.13753): that of contexts up to the length of the first
    /// training, and this length with that of longer ones. The latter is `None` for models without LongRoPE.
    pub fn long_rope(
        &self,
        d_head: usize,
        pairing: RopePairing,
    ) -> Result<(RopeDecl, Option<(usize, RopeDecl)>), Error> {
        let keys = RopeKeys { keys: *self, sections: ROPE_SECTIONS };
        let rotary = keys.rotary(ROTARY, d_head)?;
        let lists = match self.is_folder() {
            true if !matches!(keys.kind()?, Some("longrope" | "su")) => None,
            true => Some((keys.factors(SHORT_FACTORS, rotary / 2)?, keys.factors(LONG_FACTORS, rotary / 2)?)),
            false => self.rope_divisors(ROPE_SHORT, rotary)?.zip(self.rope_divisors(ROPE_LONG, rotary)?),
        };
        let Some((short, long)) = lists else { return Ok((self.rope(d_head, pairing)?, None)) };
        let base = keys.base(ROPE_BASE)?.unwrap_or(self.unsaid_rope.0);
        let n_ctx = keys.n_ctx_orig()?;
        let factor = match keys.opt_positive(if self.is_folder() { ATTENTION_FACTOR } else { ATTN_FACTOR })? {
            Some(factor) => factor,
            None if self.is_folder() => {
                let stretch = match keys.not_negative(FACTOR, 0.0)? {
                    0.0 => self.count(N_CTX_TRAIN, MAX_CONTEXT)? as f64 / n_ctx as f64,
                    factor => factor,
                };
                rope::long_rope_factor(stretch, n_ctx)
            }
            None => 1.0,
        };
        let table = |divisors: &[f32]| RopeDecl {
            factor: factor as f32,
            ..rope::table(rotary, base, Some(divisors), Scaling::None, pairing)
        };
        Ok((table(&short), Some((n_ctx, table(&long)))))
    }

    /// Returns the rotary embedding of layers that see a window, where it is another than that of the rest: its own
    /// base, and only its own scaling entry in config.json. What a file does not say of them is as `unsaid` has it.
    pub fn rope_windowed(&self, d_head: usize, pairing: RopePairing, unsaid: Unsaid) -> Result<RopeDecl, Error> {
        const OWN: &str = "rope_parameters.sliding_attention.";
        let keys = RopeKeys { keys: *self, sections: &[OWN] };
        let rest = RopeKeys { keys: *self, sections: &[OWN, "rope_parameters.", "rope_scaling.", ""] };
        let rotary = match unsaid {
            Unsaid::Gemma => keys.rotary(ROTARY_WINDOWED, d_head)?,
            Unsaid::AsRest if self.is_folder() || self.opt_count(ROTARY_WINDOWED, d_head)?.is_none() => {
                rest.rotary(ROTARY, d_head)?
            }
            Unsaid::AsRest => rest.rotary(ROTARY_WINDOWED, d_head)?,
        };
        let (own, scaling) = match self.is_folder() {
            true => (keys.base(ROPE_BASE)?, keys.scaling(d_head)?),
            false => (None, Scaling::None),
        };
        let own =
            own.map_or_else(|| RopeKeys { keys: *self, sections: &[""] }.base(ROPE_BASE_WINDOWED), |b| Ok(Some(b)));
        let base = match (own?, unsaid) {
            (Some(base), _) => base,
            (None, Unsaid::Gemma) => 10000.0,
            (None, Unsaid::AsRest) => rest.base(ROPE_BASE)?.unwrap_or(self.unsaid_rope.0),
        };
        Ok(rope::table(rotary, base, None, scaling, pairing))
    }

    /// Returns the rotary embedding of layers with a window, or of those without, which alone are scaled. Folders list
    /// base and share of the head for every layer; in GGUF files the share is `share`.
    pub fn rope_by_layer(
        &self,
        windows: &[Option<usize>],
        windowed: bool,
        d_head: usize,
        pairing: RopePairing,
        share: f64,
    ) -> Result<RopeDecl, Error> {
        let kind = if windowed { "sliding_attention" } else { "full_attention" };
        let layer = windows.iter().position(|window| window.is_some() == windowed);
        let own = self.has(&format!("rope_parameters.{kind}.rope_theta"));
        let (base, share) = match (layer, self.is_folder()) {
            (Some(layer), true) if !own => {
                let of = |key| Ok::<_, Error>(self.numbers(key, windows.len())?.map(|list| list[layer]));
                (of(ROPE_BASES)?, of(ROTARY_SHARES)?.unwrap_or(1.0))
            }
            (_, true) => {
                return match windowed {
                    true => self.rope_windowed(d_head, pairing, Unsaid::AsRest),
                    false => self.rope_of(Some(kind), d_head, pairing),
                };
            }
            (_, false) => {
                let keys = RopeKeys { keys: *self, sections: &[""] };
                let own = if windowed { keys.base(ROPE_BASE_WINDOWED)? } else { None };
                (own.map_or_else(|| keys.base(ROPE_BASE), |base| Ok(Some(base)))?, share)
            }
        };
        let base = base.unwrap_or(10000.0);
        let rotary = (share * d_head as f64) as usize;
        if !(base > 1.0 && rotary > 0 && rotary <= d_head && rotary.is_multiple_of(2)) {
            let what = format!("rotates {rotary} dims of heads of {d_head} by {base}");
            return Err(self.error(ROPE_BASES, what));
        }
        if windowed {
            return Ok(rope::table(rotary, base, None, Scaling::None, pairing));
        }
        Ok(rope::table(
            rotary,
            base,
            self.rope_divisors(ROPE_FREQS, rotary)?.as_deref(),
            self.scaling(rotary)?,
            pairing,
        ))
    }

    /// `rope_freqs.weight`, `[rotary / 2]` f32, which ones may follow: the one tensor whose numbers the plan
    /// itself needs.
    fn rope_divisors(&self, name: &str, rotary: usize) -> Result<Option<Vec<f32>>, Error> {
        let checkpoint = self.names.checkpoint();
        let Some(info) = checkpoint.tensor(name) else { return Ok(None) };
        let n = match info.shape.as_slice() {
            &[n] if info.dtype == quant::WeightType::F32 && (rotary / 2..=MAX_HEAD_WIDTH).contains(&n) => n,
            _ => {
                let what = format!("is {} {:?}, expected f32 [{}]", info.dtype, info.shape, rotary / 2);
                return Err(self.names.error(name, what));
            }
        };
        let mut bytes = vec![0; info.len];
        checkpoint.read(&info.extents(), &mut bytes)?;
        let mut divisors = vec![0.0; n];
        quant::decode_row(info.dtype, &bytes, &mut divisors);
        if let Some(d) = divisors.iter().find(|&&d| !(d.is_finite() && d > 0.0)) {
            return Err(self.names.error(name, format!("divides a frequency by {d}, expected more than 0")));
        }
        if divisors[rotary / 2..].iter().any(|&d| d != 1.0) {
            let what = format!("has {n} divisors, the heads have {} pairs", rotary / 2);
            return Err(self.names.error(name, what));
        }
        divisors.truncate(rotary / 2);
        Ok(Some(divisors))
    }
}

/// What layers with a window take for keys of their rotary embedding that a file lacks.
#[derive(Clone, Copy, Debug)]
pub(super) enum Unsaid {
    /// Gemma's: base 10000, and the whole head is rotated.
    Gemma,
    /// What the other layers have, but for their scaling.
    AsRest,
}

/// The keys of one rotary embedding, which config.json keeps in one of several sections.
struct RopeKeys<'a> {
    keys: Keys<'a>,
    sections: &'a [&'a str],
}

impl RopeKeys<'_> {
    fn name(&self, key: Key) -> Option<String> {
        self.keys.name_in(self.sections, key)
    }

    fn error(&self, key: Key, what: String) -> Error {
        self.keys.error_at(self.name(key).unwrap_or_default(), what)
    }

    fn opt_positive(&self, key: Key) -> Result<Option<f64>, Error> {
        self.name(key).map_or(Ok(None), |name| self.keys.opt_positive_at(&name))
    }

    fn not_negative(&self, key: Key, default: f64) -> Result<f64, Error> {
        self.name(key).map_or(Ok(default), |name| self.keys.not_negative_at(&name, default))
    }

    /// Returns what the angles' speed falls off by; more than 1.
    fn base(&self, key: Key) -> Result<Option<f64>, Error> {
        match self.opt_positive(key)? {
            Some(base) if base <= 1.0 => Err(self.error(key, format!("is {base}, it must be more than 1"))),
            base => Ok(base),
        }
    }

    /// Returns the rule that scales positions.
    fn kind(&self) -> Result<Option<&str>, Error> {
        Ok(self.name(SCALING).map_or(Ok(None), |name| self.keys.meta().opt_str(&name))?)
    }

    /// Returns what the base is multiplied by: Hunyuan stretches it by `alpha`, at any length.
    fn stretch(&self, rotary: usize) -> Result<f64, Error> {
        match (self.kind()?, self.opt_positive(ROPE_ALPHA)?) {
            (Some("dynamic"), Some(alpha)) if rotary > 2 => Ok(libm::pow(alpha, rotary as f64 / (rotary - 2) as f64)),
            _ => Ok(1.0),
        }
    }

    /// Returns how many dims of a head are rotated: a number in GGUF, a share in config.json.
    fn rotary(&self, count: Key, d_head: usize) -> Result<usize, Error> {
        let (key, rotary) = match self.opt_positive(ROTARY_SHARE)? {
            Some(share) => (ROTARY_SHARE, (share * d_head as f64) as usize),
            None => {
                let unsaid = (self.keys.unsaid_rope.1 * d_head as f64) as usize;
                (count, self.keys.opt_count(count, MAX_HEAD_WIDTH)?.unwrap_or(unsaid))
            }
        };
        if rotary == 0 || rotary > d_head || !rotary.is_multiple_of(2) {
            let what = format!("is {rotary}, expected an even number up to the head width {d_head}");
            return Err(self.error(key, what));
        }
        Ok(rotary)
    }

    fn scaling(&self, d_head: usize) -> Result<Scaling, Error> {
        // 0 means "none" in some files, and an older key says the same as the newer.
        let factor = match self.not_negative(FACTOR, 0.0)? {
            0.0 => self.not_negative(FACTOR_LINEAR, 0.0)?,
            factor => factor,
        };
        let factor = if factor == 0.0 { 1.0 } else { factor };
        match self.kind()? {
            // mrope places images; text has the same position in every section.
            Some("none" | "default" | "mrope") => Ok(Scaling::None),
            // With `alpha` the base says it all. Without, contexts beyond the first have another table.
            Some("dynamic") => Ok(Scaling::None),
            None | Some("linear") => Ok(if factor == 1.0 { Scaling::None } else { Scaling::Linear { factor } }),
            Some("proportional") => {
                let share = self.opt_positive(ROTARY_SHARE)?.unwrap_or(1.0);
                Ok(Scaling::Proportional { n_turning: (share * d_head as f64) as usize / 2, factor })
            }
            Some("yarn") => Ok(Scaling::Yarn(self.yarn(factor)?)),
            Some("llama3") => Ok(Scaling::Llama3 {
                factor,
                low: self.opt_positive(LOW_FREQ)?.unwrap_or(1.0),
                high: self.opt_positive(HIGH_FREQ)?.unwrap_or(4.0),
                n_ctx_orig: self.n_ctx_orig()?,
            }),
            Some(other) => {
                let what = format!("is {}, expected one of none, linear, yarn", crate::error::printable(other));
                Err(self.error(SCALING, what))
            }
        }
    }

    /// Returns divisors of `n` frequencies.
    fn factors(&self, key: Key, n: usize) -> Result<Vec<f32>, Error> {
        let factors = self.keys.meta().f32s(&self.name(key).unwrap_or_default())?;
        if factors.len() != n || factors.iter().any(|&d| !(d.is_finite() && d > 0.0)) {
            return Err(self.error(key, format!("has {} numbers, expected {n} above 0", factors.len())));
        }
        Ok(factors)
    }

    fn n_ctx_orig(&self) -> Result<usize, Error> {
        let Some(name) = self.name(N_CTX_ORIG) else { return self.keys.count(N_CTX_TRAIN, MAX_CONTEXT) };
        match self.keys.meta().opt_u64(&name)? {
            Some(n) => self.keys.in_range(&name, n, MAX_CONTEXT),
            None => self.keys.count(N_CTX_TRAIN, MAX_CONTEXT),
        }
    }

    fn yarn(&self, factor: f64) -> Result<Yarn, Error> {
        Ok(Yarn {
            factor,
            n_ctx_orig: self.n_ctx_orig()?,
            beta_fast: self.opt_positive(BETA_FAST)?.unwrap_or(32.0),
            beta_slow: self.opt_positive(BETA_SLOW)?.unwrap_or(1.0),
            // GGUF has no key for it, and its writers' own code truncates.
            truncate: self.name(TRUNCATE).map_or(Ok(None), |name| self.keys.meta().opt_bool(&name))?.unwrap_or(true),
            ext_factor: self.not_negative(EXT_FACTOR, 1.0)?,
            attn_factor: self.opt_positive(ATTN_FACTOR)?.unwrap_or(1.0),
            mscale: self.opt_positive(MSCALE)?.unwrap_or(1.0),
            log_multiplier: self.not_negative(LOG_MULTIPLIER, 0.0)?,
            attention_factor: self.opt_positive(ATTENTION_FACTOR)?,
        })
    }
}
