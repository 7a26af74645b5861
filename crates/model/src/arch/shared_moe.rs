//! The mixture of DeepSeek, GLM and most others since: routed experts, chosen with a bias and from the best groups
//! only, plus shared experts for every token; some layers, mostly the first, are dense.

use super::keys::{
    Dims, EXPERT_GATING, EXPERT_NORM, EXPERT_SCALE, Key, Keys, MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH, N_LAYER, key,
};
use super::parts::{self, Attention, QkNorm, Stack};
use crate::Error;
use crate::plan::build::Builder;
use crate::plan::{Buf, Gate, GroupScore, Groups, Op, Plan, RopePairing, Router, Rows, Score};

const N_DENSE: Key = key("leading_dense_block_count", &["first_k_dense_replace"]);
const N_SHARED: Key = key(
    "expert_shared_count",
    &["n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"],
);
/// Of all shared experts together; as many routed ones where a file does not say it.
const D_FF_SHARED: Key = key(
    "expert_shared_feed_forward_length",
    &["shared_expert_intermediate_size", "share_expert_dim", "moe_shared_expert_intermediate_size"],
);
const N_GROUP: Key = key("expert_group_count", &["n_group", "num_expert_group"]);
const N_GROUP_USED: Key = key("expert_group_used_count", &["topk_group"]);
const SCORE: Key =
    key("", &["scoring_func", "score_func", "score_function", "moe_router_activation", "moe_router_activation_func"]);
const METHOD: Key = key("", &["topk_method"]);
const SOFTCAP: Key = key("router_logit_softcapping", &["moe_router_logit_softcapping"]);

/// Added to the sum of the weights before they are divided by it, as in the original code.
const SUM_EPS: f32 = 1e-20;

/// Dimensions and rules of the mixture.
#[derive(Clone, Copy)]
pub(super) struct SharedMoe {
    n_expert: usize,
    n_used: usize,
    d_ff: usize,
    /// Width of all shared experts together; 0 when there are none.
    d_ff_shared: usize,
    /// Layers before the first that has experts; `None`: those that have a router have experts.
    n_dense: Option<usize>,
    d_ff_dense: usize,
    router: Router,
    /// `softcap · tanh(logit / softcap)` on the router's logits.
    softcap: Option<f32>,
    /// Activations of the routed and of the shared experts, the latter also that of dense layers.
    act: [Gate; 2],
    /// Experts square what they rectify, without a gate (Nemotron 3).
    is_squared: bool,
    /// Width of what the routed experts take and give, where that is not the model's (Nemotron 3 Super).
    d_latent: Option<usize>,
}

/// Values of the model's original code for keys that a file lacks.
pub(super) struct Defaults {
    pub score: Score,
    pub renormalise: bool,
    /// In a folder; GGUF files without the key have no dense layers. `None`: no file needs the key, since the layers
    /// that have a router have experts.
    pub n_dense: Option<usize>,
}

/// What the original code takes where a folder says nothing of the scale of weights, and of groups, all and open.
#[derive(Clone, Copy)]
pub(super) struct Unsaid {
    pub scale: f64,
    pub groups: [usize; 2],
}

impl SharedMoe {
    pub fn new(keys: Keys, defaults: Defaults) -> Result<Self, Error> {
        Self::with(keys, defaults, Unsaid { scale: 1.0, groups: [1, usize::MAX] })
    }

    pub fn with(keys: Keys, defaults: Defaults, unsaid: Unsaid) -> Result<Self, Error> {
        let unsaid = if keys.is_folder() { unsaid } else { Unsaid { scale: 1.0, groups: [1, usize::MAX] } };
        let n_expert = keys.some_experts()?;
        let d_ff = keys.d_ff_expert()?;
        let d_ff_shared = match keys.count_or_zero(D_FF_SHARED, MAX_WIDTH)? {
            0 => keys.count_or_zero(N_SHARED, MAX_EXPERTS)? * d_ff,
            d_ff => d_ff,
        };
        let n_dense = match (defaults.n_dense, keys.name(N_DENSE)) {
            (None, _) => None,
            (_, Some(name)) if keys.has(&name) => Some(keys.count_or_zero(N_DENSE, MAX_LAYERS)?),
            (n_dense, _) if keys.is_folder() => n_dense,
            _ => Some(0),
        };
        let has_dense = match n_dense {
            Some(n_dense) => n_dense > 0,
            None => {
                let n_layer = keys.trunk(keys.count(N_LAYER, MAX_LAYERS)?)?;
                (0..n_layer).any(|layer| !keys.names().has(&router(layer)))
            }
        };
        // Absent and 0 both mean 1, as in other readers of these files.
        let scale = keys.not_negative(EXPERT_SCALE, unsaid.scale)? as f32;
        // GGUF files have the key when it is true.
        let renormalise = keys.opt_bool(EXPERT_NORM)?.unwrap_or(keys.is_folder() && defaults.renormalise);
        let score = score(keys, defaults.score)?;
        Ok(Self {
            n_expert,
            n_used: keys.n_used(n_expert)?,
            d_ff,
            d_ff_shared,
            n_dense,
            d_ff_dense: if has_dense { keys.d_ff()? } else { 0 },
            softcap: Some(keys.not_negative(SOFTCAP, 0.0)? as f32).filter(|&cap| cap > 0.0),
            act: [Gate::Silu; 2],
            is_squared: false,
            d_latent: None,
            router: Router {
                score,
                bias: None, // a tensor of each layer
                groups: groups(keys, n_expert, score, unsaid.groups)?,
                renormalise: renormalise.then_some(SUM_EPS),
                scale: if scale == 0.0 { 1.0 } else { scale },
                expert_scale: None,
                local: None,
            },
        })
    }

    /// Returns a model of plain attention, with heads of q and k normalized by `qk_norm`, and this mixture.
    pub fn model(&self, keys: Keys, arch: &str, pairing: RopePairing, qk_norm: Option<QkNorm>) -> Result<Plan, Error> {
        let mut dims = keys.dims()?;
        dims.n_layer = keys.trunk(dims.n_layer)?;
        let rope = keys.rope(dims.d_k, pairing)?;

        let mut b = Builder::new(keys.names(), arch, dims.n_vocab, dims.d_model, dims.n_ctx_train);
        b.skip_layers_from(dims.n_layer);
        let attn = Attention { qk_norm, ..Attention::plain(b.rope(rope), dims.d_k) };
        let x = parts::embed(&mut b, &dims)?;
        for layer in 0..dims.n_layer {
            b.layer(Some(layer as u32));
            parts::attention(&mut b, &dims, attn, layer, x)?;
            self.layer(&mut b, &dims, layer, x)?;
        }
        parts::head(b, &dims, x)
    }

    /// The weights are divided by their sum, whatever a file says.
    pub fn renormalised(mut self) -> Self {
        self.router.renormalise = Some(SUM_EPS);
        self
    }

    /// The same with shared experts of this width together.
    pub fn shared(self, d_ff_shared: usize) -> Self {
        Self { d_ff_shared, ..self }
    }

    /// The same with another epsilon on the sum that weights are divided by.
    pub fn sum_eps(mut self, eps: f32) -> Self {
        self.router.renormalise = self.router.renormalise.map(|_| eps);
        self
    }

    /// The same with other activations, of the routed experts and of the rest.
    pub fn activated(self, act: [Gate; 2]) -> Self {
        Self { act, ..self }
    }

    /// The same with experts that square what they rectify, the routed ones between two products with `latent` numbers
    /// where there are such.
    pub fn squared(self, d_latent: Option<usize>) -> Self {
        Self { is_squared: true, act: [Gate::Relu; 2], d_latent, ..self }
    }

    /// `x += mlp(norm(x))`, dense or with experts, with a norm in front of the sum where the model has such.
    pub fn layer(&self, b: &mut Builder, dims: &Dims, layer: usize, x: Buf) -> Result<(), Error> {
        let is_dense = self.n_dense.map_or_else(|| !b.has(&router(layer)), |n_dense| layer < n_dense);
        if is_dense {
            return parts::feed_forward_by(b, dims, (self.d_ff_dense, self.act[1]), layer, x);
        }
        let h = parts::norm(b, dims, layer, "ffn_norm", x, "f")?;
        self.mix(b, dims, layer, (x, h))
    }

    /// `x += experts(h)`, with a norm in front of the sum where the model has such.
    pub fn mix(&self, b: &mut Builder, dims: &Dims, layer: usize, (x, h): (Buf, Buf)) -> Result<(), Error> {
        let Self { n_expert, n_used, d_ff, d_ff_shared, act: [act, act_shared], is_squared, .. } = *self;
        let d_model = dims.d_model;
        let logits = parts::linear(b, layer, "ffn_gate_inp", h, [n_expert, d_model], "router")?;
        if let Some(cap) = self.softcap {
            b.push(Op::Softcap { x: logits, cap });
        }
        let bias = b.opt_vector(&format!("blk.{layer}.exp_probs_b.bias"), n_expert)?;
        let ids = b.ids("ids", Rows::Tokens, n_used);
        let weights = b.buf("weights", Rows::Tokens, n_used);
        b.push(Op::Route { logits, router: Router { bias, ..self.router }, n_used, ids, weights });
        let stack = Stack { act, ungated: is_squared, ..Stack::plain(n_expert, d_ff) };
        let (inner, routed) = match self.d_latent {
            None => (*dims, h),
            Some(d) => {
                let h = parts::linear(b, layer, "ffn_latent_down", h, [d, d_model], "latent")?;
                (Dims { d_model: d, ..*dims }, h)
            }
        };
        let y = parts::stack(b, &inner, stack, layer, routed, (ids, n_used))?;
        // What is normalized before it is added has a separate buffer.
        let sum = if dims.post_norm.is_some() { b.buf("sum", Rows::Tokens, d_model) } else { x };
        let shared = match d_ff_shared {
            0 => None,
            d_ff if is_squared => {
                Some(parts::squared(b, dims, ["ffn_up_shexp", "ffn_down_shexp"], d_ff, layer, h, "shared")?)
            }
            d_ff => Some(parts::mlp(b, dims, parts::SHARED, (d_ff, act_shared), layer, h, "shared")?),
        };
        if sum != x {
            b.push(Op::Combine { x: sum, add: false, y, weights, norm: None });
            shared.into_iter().for_each(|y| b.push(Op::Add { x: sum, y }));
            return parts::add(b, dims, layer, "post_ffw_norm", x, sum);
        }
        shared.into_iter().for_each(|y| b.push(Op::Add { x, y }));
        match self.d_latent {
            None => b.push(Op::Combine { x, add: true, y, weights, norm: None }),
            Some(d) => {
                let sum = b.buf("latent_sum", Rows::Tokens, d);
                b.push(Op::Combine { x: sum, add: false, y, weights, norm: None });
                let y = parts::linear(b, layer, "ffn_latent_up", sum, [d_model, d], "routed")?;
                b.push(Op::Add { x, y });
            }
        }
        Ok(())
    }
}

/// Name of a layer's router.
fn router(layer: usize) -> String {
    format!("blk.{layer}.ffn_gate_inp.weight")
}

/// GGUF numbers the scores (1 is softmax, 2 sigmoid), config.json names them.
fn score(keys: Keys, default: Score) -> Result<Score, Error> {
    match keys.opt_count(EXPERT_GATING, u32::MAX as usize)? {
        Some(1) => return Ok(Score::Softmax),
        Some(2) => return Ok(Score::Sigmoid),
        Some(n) => return Err(keys.error(EXPERT_GATING, format!("is {n}, expected 1 (softmax) or 2 (sigmoid)"))),
        None => {}
    }
    match keys.opt_str(SCORE)? {
        Some("softmax") => Ok(Score::Softmax),
        // dots.llm1 names the method of the choice here.
        Some("sigmoid" | "noaux_tc") => Ok(Score::Sigmoid),
        Some(other) => {
            let what = format!("is {}, expected softmax or sigmoid", crate::error::printable(other));
            Err(keys.error(SCORE, what))
        }
        None => Ok(default),
    }
}

/// Softmax scores go with DeepSeek-V2's rule, a group is worth its best; sigmoid scores with V3's, the sum of its two
/// best.
fn groups(keys: Keys, n_expert: usize, score: Score, unsaid: [usize; 2]) -> Result<Option<Groups>, Error> {
    let n_group = keys.opt_count(N_GROUP, MAX_EXPERTS)?.unwrap_or(unsaid[0]);
    let greedy = match keys.opt_str(METHOD)? {
        Some("greedy") => true,
        None | Some("group_limited_greedy" | "noaux_tc") => false,
        Some(other) => {
            let what =
                format!("is {}, expected greedy, group_limited_greedy or noaux_tc", crate::error::printable(other));
            return Err(keys.error(METHOD, what));
        }
    };
    let n_used = keys.opt_count(N_GROUP_USED, MAX_EXPERTS)?.unwrap_or(unsaid[1]);
    if greedy || n_used >= n_group {
        return Ok(None);
    }
    if !n_expert.is_multiple_of(n_group) {
        return Err(keys.error(N_GROUP, format!("is {n_group}, which does not divide {n_expert} experts")));
    }
    let score = if score == Score::Softmax { GroupScore::Max } else { GroupScore::TopTwo };
    Ok(Some(Groups { n_group, n_used, score }))
}
