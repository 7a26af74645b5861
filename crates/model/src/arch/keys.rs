//! The keys of an architecture, read with bounds: what leaves this file is safe to multiply and allocate.

use checkpoint::{Checkpoint, Metadata};

use crate::Error;
use crate::plan::{RopeDecl, RopePairing};
use crate::rope::{self, Scaling, Yarn};

const MAX_LAYERS: usize = 1024;
const MAX_WIDTH: usize = 1 << 20; // d_model, d_ff
const MAX_HEADS: usize = 1 << 12;
const MAX_HEAD_WIDTH: usize = 1 << 12;
const MAX_CONTEXT: usize = 1 << 24;
const MAX_EXPERTS: usize = crate::plan::validate::MAX_EXPERTS;
const MAX_USED: usize = crate::plan::validate::MAX_USED;

/// Keys under the prefix of an architecture.
pub(super) struct Keys<'a> {
    checkpoint: &'a Checkpoint,
    arch: &'static str,
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
    pub fn new(checkpoint: &'a Checkpoint, arch: &'static str) -> Self {
        Self { checkpoint, arch }
    }

    fn meta(&self) -> &'a Metadata {
        self.checkpoint.meta()
    }

    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    pub fn error(&self, key: &str, what: String) -> Error {
        Error::Key { file: self.checkpoint.name().into(), key: self.name(key), what }
    }

    /// A count from 1 to `max`.
    pub fn count(&self, key: &str, max: usize) -> Result<usize, Error> {
        self.in_range(key, self.meta().u64(&self.name(key))?, max)
    }

    /// A count from 1 to `max`, or nothing.
    pub fn opt_count(&self, key: &str, max: usize) -> Result<Option<usize>, Error> {
        self.meta().opt_u64(&self.name(key))?.map(|n| self.in_range(key, n, max)).transpose()
    }

    fn in_range(&self, key: &str, n: u64, max: usize) -> Result<usize, Error> {
        match usize::try_from(n) {
            Ok(n) if (1..=max).contains(&n) => Ok(n),
            _ => Err(self.error(key, format!("is {n}, 1 to {max} wanted"))),
        }
    }

    /// A number above 0, or nothing.
    pub fn opt_positive(&self, key: &str) -> Result<Option<f64>, Error> {
        let Some(x) = self.meta().opt_f32(&self.name(key))? else { return Ok(None) };
        match x > 0.0 {
            true => Ok(Some(f64::from(x))),
            false => Err(self.error(key, format!("is {x}, more than 0 wanted"))),
        }
    }

    /// A number that is 0 or more, with a default.
    fn not_negative(&self, key: &str, default: f64) -> Result<f64, Error> {
        match self.meta().opt_f32(&self.name(key))? {
            Some(x) if x < 0.0 => Err(self.error(key, format!("is {x}, 0 or more wanted"))),
            Some(x) => Ok(f64::from(x)),
            None => Ok(default),
        }
    }

    pub fn dims(&self) -> Result<Dims, Error> {
        let d_model = self.count("embedding_length", MAX_WIDTH)?;
        let n_head = self.count("attention.head_count", MAX_HEADS)?;
        let n_kv = self.opt_count("attention.head_count_kv", MAX_HEADS)?.unwrap_or(n_head);
        if !n_head.is_multiple_of(n_kv) {
            let what = format!("is {n_kv}, which does not divide {} {n_head}", self.name("attention.head_count"));
            return Err(self.error("attention.head_count_kv", what));
        }
        let d_head = |key| match self.opt_count(key, MAX_HEAD_WIDTH)? {
            Some(d) => Ok(d),
            None if d_model.is_multiple_of(n_head) && d_model / n_head <= MAX_HEAD_WIDTH => Ok(d_model / n_head),
            None => Err(self.error(key, format!("is missing, and {n_head} heads cannot share a width of {d_model}"))),
        };
        let eps_key = "attention.layer_norm_rms_epsilon";
        let eps = self.meta().f32(&self.name(eps_key))?;
        if !(0.0..=1.0).contains(&eps) {
            return Err(self.error(eps_key, format!("is {eps}, 0 to 1 wanted")));
        }
        Ok(Dims {
            n_layer: self.count("block_count", MAX_LAYERS)?,
            n_vocab: self.n_vocab()?,
            n_ctx_train: self.count("context_length", MAX_CONTEXT)?,
            d_model,
            n_head,
            n_kv,
            d_k: d_head("attention.key_length")?,
            d_v: d_head("attention.value_length")?,
            eps,
        })
    }

    /// The vocabulary is as large as the table of embeddings; a key that says otherwise is an error.
    fn n_vocab(&self) -> Result<usize, Error> {
        let table = self.checkpoint.tensor("token_embd.weight").map(|t| (t.shape.as_slice(), t.shape.len()));
        let Some((&[n_vocab, _], _)) = table else {
            let file = self.checkpoint.name().into();
            let what = match table {
                Some((shape, _)) => format!("has shape {shape:?}, two axes wanted"),
                None => "is missing".into(),
            };
            return Err(Error::Tensor { file, tensor: "token_embd.weight".into(), what });
        };
        if n_vocab > u32::MAX as usize / 2 {
            let file = self.checkpoint.name().into();
            let what = format!("has {n_vocab} rows, at most {} wanted", u32::MAX / 2);
            return Err(Error::Tensor { file, tensor: "token_embd.weight".into(), what });
        }
        match self.opt_count("vocab_size", usize::MAX)? {
            Some(n) if n != n_vocab => {
                Err(self.error("vocab_size", format!("is {n}, token_embd.weight has {n_vocab} rows")))
            }
            _ => Ok(n_vocab),
        }
    }

    pub fn d_ff(&self) -> Result<usize, Error> {
        self.count("feed_forward_length", MAX_WIDTH)
    }

    /// `None` when the model has no experts.
    pub fn n_expert(&self) -> Result<Option<usize>, Error> {
        match self.meta().opt_u64(&self.name("expert_count"))? {
            None | Some(0) => Ok(None),
            Some(n) => self.in_range("expert_count", n, MAX_EXPERTS).map(Some),
        }
    }

    pub fn moe(&self, n_expert: usize) -> Result<MoeDims, Error> {
        let n_used = self.count("expert_used_count", MAX_USED)?;
        if n_used > n_expert {
            let what = format!("is {n_used}, {} is {n_expert}", self.name("expert_count"));
            return Err(self.error("expert_used_count", what));
        }
        // Absent and 0 both mean 1, as other readers of these files take it.
        let scale = self.not_negative("expert_weights_scale", 1.0)? as f32;
        // The number of the gating function in files: 1 is softmax over all experts.
        let gating = self.meta().opt_u32(&self.name("expert_gating_func"))?;
        if gating.is_some_and(|g| g > 1) {
            let what = format!("is {}, 1 (softmax) wanted", gating.unwrap_or_default());
            return Err(self.error("expert_gating_func", what));
        }
        Ok(MoeDims {
            n_expert,
            n_used,
            d_ff: match self.opt_count("expert_feed_forward_length", MAX_WIDTH)? {
                Some(d_ff) => d_ff,
                None => self.d_ff()?,
            },
            renormalise: self.meta().opt_bool(&self.name("expert_weights_norm"))?.unwrap_or(true),
            scale: if scale == 0.0 { 1.0 } else { scale },
        })
    }

    /// The rotary embedding of the file: base, scaling rule, and the divisors in `rope_freqs.weight`.
    pub fn rope(&self, dims: &Dims, pairing: RopePairing) -> Result<RopeDecl, Error> {
        let rotary = self.opt_count("rope.dimension_count", MAX_HEAD_WIDTH)?.unwrap_or(dims.d_k);
        if rotary > dims.d_k || !rotary.is_multiple_of(2) {
            let what = format!("is {rotary}, an even number up to the head width {} wanted", dims.d_k);
            return Err(self.error("rope.dimension_count", what));
        }
        let base = self.opt_positive("rope.freq_base")?.unwrap_or(10000.0);
        if base <= 1.0 {
            return Err(self.error("rope.freq_base", format!("is {base}, more than 1 wanted")));
        }
        let scaling = self.scaling(dims.n_ctx_train)?;
        let divisors = self.rope_divisors(rotary)?;
        Ok(rope::table(rotary, base, divisors.as_deref(), scaling, pairing))
    }

    fn scaling(&self, n_ctx_train: usize) -> Result<Scaling, Error> {
        // 0 stands for "none" in some files, and an older key says the same as the newer.
        let factor = match self.not_negative("rope.scaling.factor", 0.0)? {
            0.0 => self.not_negative("rope.scale_linear", 0.0)?,
            factor => factor,
        };
        let factor = if factor == 0.0 { 1.0 } else { factor };
        match self.meta().opt_str(&self.name("rope.scaling.type"))? {
            Some("none") => Ok(Scaling::None),
            None | Some("linear") => Ok(if factor == 1.0 { Scaling::None } else { Scaling::Linear { factor } }),
            Some("yarn") => Ok(Scaling::Yarn(Yarn {
                factor,
                n_ctx_orig: self.opt_count("rope.scaling.original_context_length", MAX_CONTEXT)?.unwrap_or(n_ctx_train),
                beta_fast: self.opt_positive("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: self.opt_positive("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                ext_factor: self.not_negative("rope.scaling.yarn_ext_factor", 1.0)?,
                attn_factor: self.opt_positive("rope.scaling.attn_factor")?.unwrap_or(1.0),
                log_multiplier: self.not_negative("rope.scaling.yarn_log_multiplier", 0.0)?,
            })),
            Some(other) => {
                let what = format!("is {}, one of none, linear, yarn wanted", crate::error::printable(other));
                Err(self.error("rope.scaling.type", what))
            }
        }
    }

    /// `rope_freqs.weight`, `[rotary / 2]` f32: the one tensor whose numbers the plan itself needs.
    fn rope_divisors(&self, rotary: usize) -> Result<Option<Vec<f32>>, Error> {
        const NAME: &str = super::parts::ROPE_FREQS;
        let Some(info) = self.checkpoint.tensor(NAME) else { return Ok(None) };
        let error = |what| Error::Tensor { file: self.checkpoint.name().into(), tensor: NAME.into(), what };
        if info.dtype != quant::WeightType::F32 || info.shape != [rotary / 2] {
            let what = format!("is {} {:?}, f32 [{}] wanted", info.dtype, info.shape, rotary / 2);
            return Err(error(what));
        }
        let mut divisors = vec![0.0; rotary / 2];
        quant::decode_row(info.dtype, self.checkpoint.bytes(info), &mut divisors);
        match divisors.iter().find(|&&d| !(d.is_finite() && d > 0.0)) {
            Some(d) => Err(error(format!("divides a frequency by {d}, more than 0 wanted"))),
            None => Ok(Some(divisors)),
        }
    }
}
