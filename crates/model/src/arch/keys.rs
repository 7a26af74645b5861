//! The keys of an architecture, read with bounds: their values are safe to multiply and allocate.
//!
//! A quantity is a [`Key`], which knows GGUF's name and config.json's names for it, so that an architecture reads both
//! kinds of file with the same lines.

use checkpoint::{Checkpoint, Metadata, Value};

use super::parts::ROPE_FREQS;
use crate::Error;
use crate::names::{Alias, Names};
use crate::plan::{RopeDecl, RopePairing};
use crate::rope::{self, Scaling, Yarn};

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

/// A [`Key`] on one line.
pub(super) const fn key(gguf: &'static str, folder: &'static [&'static str]) -> Key {
    Key { gguf, folder }
}

pub(super) const N_LAYER: Key = key("block_count", &["num_hidden_layers"]);
pub(super) const N_CTX_TRAIN: Key = key("context_length", &["max_position_embeddings"]);
pub(super) const D_MODEL: Key = key("embedding_length", &["hidden_size"]);
pub(super) const N_VOCAB: Key = key("vocab_size", &["vocab_size"]);
pub(super) const N_HEAD: Key = key("attention.head_count", &["num_attention_heads"]);
pub(super) const N_KV: Key = key("attention.head_count_kv", &["num_key_value_heads"]);
pub(super) const D_K: Key = key("attention.key_length", &["head_dim"]);
pub(super) const D_V: Key = key("attention.value_length", &["head_dim"]);
pub(super) const EPS: Key = key("attention.layer_norm_rms_epsilon", &["rms_norm_eps"]);
pub(super) const ATTENTION_SCALE: Key = key("attention.scale", &[]);
pub(super) const D_FF: Key = key("feed_forward_length", &["intermediate_size"]);
pub(super) const N_EXPERT: Key = key("expert_count", &["num_experts", "num_local_experts", "n_routed_experts"]);
pub(super) const N_USED: Key = key("expert_used_count", &["num_experts_per_tok", "top_k_experts"]);
pub(super) const D_FF_EXPERT: Key = key("expert_feed_forward_length", &["moe_intermediate_size"]);
pub(super) const EXPERT_SCALE: Key = key("expert_weights_scale", &["routed_scaling_factor"]);
pub(super) const EXPERT_NORM: Key = key("expert_weights_norm", &["norm_topk_prob"]);
pub(super) const EXPERT_GATING: Key = key("expert_gating_func", &[]);
pub(super) const ROTARY: Key = key("rope.dimension_count", &[]);
const N_NEXT: Key = key("nextn_predict_layers", &[]);
const ROTARY_SHARE: Key = key("", &["partial_rotary_factor"]);
const ROPE_BASE: Key = key("rope.freq_base", &["rope_theta"]);
const SCALING: Key = key("rope.scaling.type", &["rope_type", "type"]);
const FACTOR: Key = key("rope.scaling.factor", &["factor"]);
const FACTOR_LINEAR: Key = key("rope.scale_linear", &[]);
const N_CTX_ORIG: Key = key("rope.scaling.original_context_length", &["original_max_position_embeddings"]);
const BETA_FAST: Key = key("rope.scaling.yarn_beta_fast", &["beta_fast"]);
const BETA_SLOW: Key = key("rope.scaling.yarn_beta_slow", &["beta_slow"]);
const EXT_FACTOR: Key = key("rope.scaling.yarn_ext_factor", &[]);
const ATTN_FACTOR: Key = key("rope.scaling.attn_factor", &[]);
const ATTENTION_FACTOR: Key = key("", &["attention_factor"]);
const LOG_MULTIPLIER: Key = key("rope.scaling.yarn_log_multiplier", &["mscale_all_dim"]);
const MSCALE: Key = key("", &["mscale"]);
const TRUNCATE: Key = key("", &["truncate"]);
const ROPE_BASE_WINDOWED: Key = key("rope.freq_base_swa", &["rope_local_base_freq"]);
const ROTARY_WINDOWED: Key = key("rope.dimension_count_swa", &[]);
const LOW_FREQ: Key = key("", &["low_freq_factor"]);
const HIGH_FREQ: Key = key("", &["high_freq_factor"]);

/// Where config.json keeps the keys of the one rotary embedding of a model, first places first.
const ROPE_SECTIONS: &[&str] = &["rope_parameters.", "rope_scaling.", ""];

/// The keys of a checkpoint.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a> {
    names: Names<'a>,
    /// GGUF's architecture, the prefix of its keys; `None` for a folder.
    gguf: Option<&'a str>,
}

/// Dimensions that every transformer here has.
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
    /// The keys of a checkpoint, and its tensors under GGUF's names; `aliases` are the architecture's own.
    pub fn new(checkpoint: &'a Checkpoint, aliases: &'static [Alias]) -> Self {
        let gguf = checkpoint.meta().opt_str("general.architecture").ok().flatten();
        Self { names: Names::new(checkpoint, aliases), gguf }
    }

    /// The tensors.
    pub fn names(&self) -> Names<'a> {
        self.names
    }

    /// Whether the checkpoint is a folder with a config.json.
    pub fn is_folder(&self) -> bool {
        self.gguf.is_none()
    }

    /// The metadata, for keys of no usual form.
    pub fn meta(&self) -> &'a Metadata {
        self.names.checkpoint().meta()
    }

    /// The key's name in this file: of several names the one that is there, else the first. `None` where this kind of
    /// file has no such key.
    pub fn name(&self, key: Key) -> Option<String> {
        self.name_in(&[""], key)
    }

    /// As [`Keys::name`], in a folder behind one of these prefixes, tried in turn.
    fn name_in(&self, sections: &[&str], key: Key) -> Option<String> {
        if let Some(arch) = self.gguf {
            return (!key.gguf.is_empty()).then(|| format!("{arch}.{}", key.gguf));
        }
        let mut names =
            sections.iter().flat_map(|section| key.folder.iter().map(move |name| format!("{section}{name}")));
        let first = names.clone().next();
        names.find(|name| self.meta().get(name).is_some()).or(first)
    }

    /// An error about a key.
    pub fn error(&self, key: Key, what: String) -> Error {
        self.error_at(self.name(key).unwrap_or_else(|| key.gguf.into()), what)
    }

    fn error_at(&self, key: String, what: String) -> Error {
        Error::Key { file: self.names.checkpoint().name().into(), key, what }
    }

    /// A count from 1 to `max`.
    pub fn count(&self, key: Key, max: usize) -> Result<usize, Error> {
        let name = self.name(key).unwrap_or_else(|| key.gguf.into());
        self.in_range(&name, self.meta().u64(&name)?, max)
    }

    /// A count from 1 to `max`, or nothing.
    pub fn opt_count(&self, key: Key, max: usize) -> Result<Option<usize>, Error> {
        let Some(name) = self.name(key) else { return Ok(None) };
        self.meta().opt_u64(&name)?.map(|n| self.in_range(&name, n, max)).transpose()
    }

    /// A count from 0 to `max`, 0 when absent.
    pub fn count_or_zero(&self, key: Key, max: usize) -> Result<usize, Error> {
        let Some(name) = self.name(key) else { return Ok(0) };
        match self.meta().opt_u64(&name)? {
            None | Some(0) => Ok(0),
            Some(n) => self.in_range(&name, n, max),
        }
    }

    /// A count of a key in full, from 1 to `max`.
    pub fn in_range(&self, name: &str, n: u64, max: usize) -> Result<usize, Error> {
        match usize::try_from(n) {
            Ok(n) if (1..=max).contains(&n) => Ok(n),
            _ => Err(self.error_at(name.into(), format!("is {n}, 1 to {max} wanted"))),
        }
    }

    /// Counts from 1 to `max`, one a layer; a file may give one for all.
    pub fn counts(&self, key: Key, n_layer: usize, max: usize) -> Result<Vec<usize>, Error> {
        let name = self.name(key).unwrap_or_else(|| key.gguf.into());
        if !matches!(self.meta().get(&name), Some(Value::Numbers(_))) {
            return Ok(vec![self.count(key, max)?; n_layer]);
        }
        let counts = self.meta().u32s(&name)?;
        if counts.len() != n_layer {
            return Err(self.error_at(name, format!("has {} numbers, the model has {n_layer} layers", counts.len())));
        }
        counts.into_iter().map(|n| self.in_range(&name, n.into(), max)).collect()
    }

    /// Whether the file has this key, by its name in the file.
    pub fn has(&self, name: &str) -> bool {
        self.meta().get(name).is_some()
    }

    /// A text, or nothing.
    pub fn opt_str(&self, key: Key) -> Result<Option<&'a str>, Error> {
        let Some(name) = self.name(key) else { return Ok(None) };
        Ok(self.meta().opt_str(&name)?)
    }

    /// A flag, or nothing.
    pub fn opt_bool(&self, key: Key) -> Result<Option<bool>, Error> {
        let Some(name) = self.name(key) else { return Ok(None) };
        Ok(self.meta().opt_bool(&name)?)
    }

    /// A number above 0, or nothing.
    pub fn opt_positive(&self, key: Key) -> Result<Option<f64>, Error> {
        self.name(key).map_or(Ok(None), |name| self.opt_positive_at(&name))
    }

    fn opt_positive_at(&self, name: &str) -> Result<Option<f64>, Error> {
        match self.number(name)? {
            Some(x) if x <= 0.0 => Err(self.error_at(name.into(), format!("is {x}, more than 0 wanted"))),
            x => Ok(x),
        }
    }

    /// A number that is 0 or more, with a default.
    pub fn not_negative(&self, key: Key, default: f64) -> Result<f64, Error> {
        self.name(key).map_or(Ok(default), |name| self.not_negative_at(&name, default))
    }

    fn not_negative_at(&self, name: &str, default: f64) -> Result<f64, Error> {
        match self.number(name)? {
            Some(x) if x < 0.0 => Err(self.error_at(name.into(), format!("is {x}, 0 or more wanted"))),
            x => Ok(x.unwrap_or(default)),
        }
    }

    /// A finite number. JSON writes whole numbers as integers.
    fn number(&self, name: &str) -> Result<Option<f64>, Error> {
        if self.is_folder()
            && let Ok(n) = self.meta().opt_i32(name)
        {
            return Ok(n.map(f64::from));
        }
        Ok(self.meta().opt_f32(name)?.map(f64::from))
    }

    /// The dimensions of a plain transformer.
    pub fn dims(&self) -> Result<Dims, Error> {
        let d_model = self.count(D_MODEL, MAX_WIDTH)?;
        let n_head = self.count(N_HEAD, MAX_HEADS)?;
        let n_kv = self.opt_count(N_KV, MAX_HEADS)?.unwrap_or(n_head);
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
            eps: self.eps(EPS)?,
        })
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

    /// What a norm adds to the mean square.
    pub fn eps(&self, key: Key) -> Result<f32, Error> {
        let name = self.name(key).unwrap_or_default();
        let eps = self.meta().f32(&name)?;
        match (0.0..=1.0).contains(&eps) {
            true => Ok(eps),
            false => Err(self.error_at(name, format!("is {eps}, 0 to 1 wanted"))),
        }
    }

    /// The vocabulary is as large as the table of embeddings; a key that says otherwise is an error.
    pub fn n_vocab(&self) -> Result<usize, Error> {
        const NAME: &str = "token_embd.weight";
        let Some(table) = self.names.tensor(NAME) else { return Err(self.names.error(NAME, "is missing".into())) };
        let &[n_vocab, _] = table.shape.as_slice() else {
            return Err(self.names.error(NAME, format!("has shape {:?}, two axes wanted", table.shape)));
        };
        if n_vocab > u32::MAX as usize / 2 {
            return Err(self.names.error(NAME, format!("has {n_vocab} rows, at most {} wanted", u32::MAX / 2)));
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
        self.n_expert()?.ok_or_else(|| self.error(N_EXPERT, "is missing or 0, 1 or more wanted".into()))
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
            return Err(self.error(EXPERT_GATING, format!("is {gating}, 1 (softmax) wanted")));
        }
        Ok(MoeDims {
            n_expert,
            n_used,
            d_ff: self.d_ff_expert()?,
            renormalise: self.opt_bool(EXPERT_NORM)?.unwrap_or(renormalise),
            scale: if scale == 0.0 { 1.0 } else { scale },
        })
    }

    /// The rotary embedding of heads `d_head` wide: base, scaling rule, and the divisors in `rope_freqs.weight`.
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

    /// The scaling rule of the one rotary embedding of a model, over heads `d_head` wide.
    pub fn scaling(&self, d_head: usize) -> Result<Scaling, Error> {
        RopeKeys { keys: *self, sections: ROPE_SECTIONS }.scaling(d_head)
    }

    /// As [`Keys::rope`], with another scaling rule than the file's keys say by themselves.
    pub fn rope_scaled(&self, d_head: usize, pairing: RopePairing, scaling: Scaling) -> Result<RopeDecl, Error> {
        self.table(&RopeKeys { keys: *self, sections: ROPE_SECTIONS }, d_head, pairing, scaling)
    }

    fn table(&self, keys: &RopeKeys, d_head: usize, pairing: RopePairing, scaling: Scaling) -> Result<RopeDecl, Error> {
        let rotary = match scaling {
            Scaling::Proportional { .. } => d_head,
            _ => keys.rotary(ROTARY, d_head)?,
        };
        let base = keys.base(ROPE_BASE)?.unwrap_or(10000.0);
        let divisors = self.rope_divisors(rotary)?;
        Ok(rope::table(rotary, base, divisors.as_deref(), scaling, pairing))
    }

    /// The rotary embedding of layers that see a window, where it is another than that of the rest (Gemma): its own
    /// base, and only the scaling of its own entry in config.json.
    pub fn rope_windowed(&self, d_head: usize, pairing: RopePairing) -> Result<RopeDecl, Error> {
        let keys = RopeKeys { keys: *self, sections: &["rope_parameters.sliding_attention."] };
        let whole = RopeKeys { keys: *self, sections: &[""] };
        let rotary = keys.rotary(ROTARY_WINDOWED, d_head)?;
        let (own, scaling) = match self.is_folder() {
            true => (keys.base(ROPE_BASE)?, keys.scaling(d_head)?),
            false => (None, Scaling::None),
        };
        let base = match own {
            Some(base) => base,
            None => whole.base(ROPE_BASE_WINDOWED)?.unwrap_or(10000.0),
        };
        Ok(rope::table(rotary, base, None, scaling, pairing))
    }

    /// `rope_freqs.weight`, `[rotary / 2]` f32: the one tensor whose numbers the plan itself needs.
    fn rope_divisors(&self, rotary: usize) -> Result<Option<Vec<f32>>, Error> {
        let checkpoint = self.names.checkpoint();
        let Some(info) = checkpoint.tensor(ROPE_FREQS) else { return Ok(None) };
        if info.dtype != quant::WeightType::F32 || info.shape != [rotary / 2] {
            let what = format!("is {} {:?}, f32 [{}] wanted", info.dtype, info.shape, rotary / 2);
            return Err(self.names.error(ROPE_FREQS, what));
        }
        let mut bytes = vec![0; info.len];
        checkpoint.read(&info.extents(), &mut bytes)?;
        let mut divisors = vec![0.0; rotary / 2];
        quant::decode_row(info.dtype, &bytes, &mut divisors);
        match divisors.iter().find(|&&d| !(d.is_finite() && d > 0.0)) {
            Some(d) => Err(self.names.error(ROPE_FREQS, format!("divides a frequency by {d}, more than 0 wanted"))),
            None => Ok(Some(divisors)),
        }
    }
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

    /// What the angles' speed falls off by; more than 1.
    fn base(&self, key: Key) -> Result<Option<f64>, Error> {
        match self.opt_positive(key)? {
            Some(base) if base <= 1.0 => Err(self.error(key, format!("is {base}, it must be more than 1"))),
            base => Ok(base),
        }
    }

    /// How many dims of a head are rotated: a number in GGUF, a share in config.json.
    fn rotary(&self, count: Key, d_head: usize) -> Result<usize, Error> {
        let (key, rotary) = match self.opt_positive(ROTARY_SHARE)? {
            Some(share) => (ROTARY_SHARE, (share * d_head as f64) as usize),
            None => (count, self.keys.opt_count(count, MAX_HEAD_WIDTH)?.unwrap_or(d_head)),
        };
        if rotary == 0 || rotary > d_head || !rotary.is_multiple_of(2) {
            let what = format!("is {rotary}, an even number up to the head width {d_head} wanted");
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
        let kind = match self.name(SCALING) {
            Some(name) => self.keys.meta().opt_str(&name)?,
            None => None,
        };
        match kind {
            // mrope places images; text has the same position in every section.
            Some("none" | "default" | "mrope") => Ok(Scaling::None),
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
                let what = format!("is {}, one of none, linear, yarn wanted", crate::error::printable(other));
                Err(self.error(SCALING, what))
            }
        }
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
