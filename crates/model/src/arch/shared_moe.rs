//! The mixture of DeepSeek and GLM: routed experts, chosen with a bias and from the best groups only, plus shared
//! experts for every token; the first layers are dense.

use super::keys::{
    D_FF_EXPERT, Dims, EXPERT_GATING, EXPERT_NORM, EXPERT_SCALE, Key, Keys, MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH, key,
};
use super::parts::{self, Stack};
use crate::Error;
use crate::plan::build::Builder;
use crate::plan::{Buf, Gate, GroupScore, Groups, Op, Router, Rows, Score};

const N_DENSE: Key = key("leading_dense_block_count", &["first_k_dense_replace"]);
const N_SHARED: Key = key("expert_shared_count", &["n_shared_experts"]);
const N_GROUP: Key = key("expert_group_count", &["n_group"]);
const N_GROUP_USED: Key = key("expert_group_used_count", &["topk_group"]);
const SCORE: Key = key("", &["scoring_func"]);
const METHOD: Key = key("", &["topk_method"]);

/// Added to the sum of the weights before they are divided by it, as in the original code.
const SUM_EPS: f32 = 1e-20;

/// Dimensions and rules of the mixture.
pub(super) struct SharedMoe {
    n_expert: usize,
    n_used: usize,
    d_ff: usize,
    /// Width of all shared experts together; 0 when there are none.
    d_ff_shared: usize,
    /// Layers before the first that has experts.
    n_dense: usize,
    d_ff_dense: usize,
    router: Router,
}

/// Values of the model's original code for keys that a file lacks.
pub(super) struct Defaults {
    pub score: Score,
    pub renormalise: bool,
    /// In a folder; GGUF files without the key have no dense layers.
    pub n_dense: usize,
}

impl SharedMoe {
    pub fn new(keys: Keys, defaults: Defaults) -> Result<Self, Error> {
        let n_expert = keys.some_experts()?;
        let d_ff = keys.count(D_FF_EXPERT, MAX_WIDTH)?;
        let d_ff_shared = keys.count_or_zero(N_SHARED, MAX_EXPERTS)? * d_ff;
        let n_dense = match keys.name(N_DENSE) {
            Some(name) if keys.has(&name) => keys.count_or_zero(N_DENSE, MAX_LAYERS)?,
            _ if keys.is_folder() => defaults.n_dense,
            _ => 0,
        };
        // Absent and 0 both mean 1, as in other readers of these files.
        let scale = keys.not_negative(EXPERT_SCALE, 1.0)? as f32;
        // GGUF files have the key when it is true.
        let renormalise = keys.opt_bool(EXPERT_NORM)?.unwrap_or(keys.is_folder() && defaults.renormalise);
        let score = score(keys, defaults.score)?;
        Ok(Self {
            n_expert,
            n_used: keys.n_used(n_expert)?,
            d_ff,
            d_ff_shared,
            n_dense,
            d_ff_dense: if n_dense > 0 { keys.d_ff()? } else { 0 },
            router: Router {
                score,
                bias: None, // a tensor of each layer
                groups: groups(keys, n_expert, score)?,
                renormalise: renormalise.then_some(SUM_EPS),
                scale: if scale == 0.0 { 1.0 } else { scale },
                expert_scale: None,
            },
        })
    }

    /// `x += mlp(norm(x))`, dense or with experts.
    pub fn layer(&self, b: &mut Builder, dims: &Dims, layer: usize, x: Buf) -> Result<(), Error> {
        if layer < self.n_dense {
            return parts::feed_forward(b, dims, self.d_ff_dense, layer, x);
        }
        let Self { n_expert, n_used, d_ff, d_ff_shared, .. } = *self;
        let d_model = dims.d_model;
        let h = parts::norm(b, dims, layer, "ffn_norm", x, "f")?;
        let logits = parts::linear(b, layer, "ffn_gate_inp", h, [n_expert, d_model], "router")?;
        let bias = b.opt_vector(&format!("blk.{layer}.exp_probs_b.bias"), n_expert)?;
        let ids = b.ids("ids", Rows::Tokens, n_used);
        let weights = b.buf("weights", Rows::Tokens, n_used);
        b.push(Op::Route { logits, router: Router { bias, ..self.router }, n_used, ids, weights });
        let y = parts::stack(b, dims, Stack::plain(n_expert, d_ff), layer, h, (ids, n_used))?;
        if d_ff_shared > 0 {
            let y = parts::mlp(b, dims, parts::SHARED, (d_ff_shared, Gate::Silu), layer, h, "shared")?;
            b.push(Op::Add { x, y });
        }
        b.push(Op::Combine { x, add: true, y, weights, norm: None });
        Ok(())
    }
}

/// GGUF numbers the scores (1 is softmax, 2 sigmoid), config.json names them.
fn score(keys: Keys, default: Score) -> Result<Score, Error> {
    match keys.opt_count(EXPERT_GATING, u32::MAX as usize)? {
        Some(1) => return Ok(Score::Softmax),
        Some(2) => return Ok(Score::Sigmoid),
        Some(n) => return Err(keys.error(EXPERT_GATING, format!("is {n}, 1 (softmax) or 2 (sigmoid) wanted"))),
        None => {}
    }
    match keys.opt_str(SCORE)? {
        Some("softmax") => Ok(Score::Softmax),
        Some("sigmoid") => Ok(Score::Sigmoid),
        Some(other) => {
            let what = format!("is {}, softmax or sigmoid wanted", crate::error::printable(other));
            Err(keys.error(SCORE, what))
        }
        None => Ok(default),
    }
}

/// Softmax scores go with DeepSeek-V2's rule, a group is worth its best; sigmoid scores with V3's, the sum of its two
/// best.
fn groups(keys: Keys, n_expert: usize, score: Score) -> Result<Option<Groups>, Error> {
    let n_group = keys.opt_count(N_GROUP, MAX_EXPERTS)?.unwrap_or(1);
    let greedy = match keys.opt_str(METHOD)? {
        Some("greedy") => true,
        None | Some("group_limited_greedy" | "noaux_tc") => false,
        Some(other) => {
            let what =
                format!("is {}, greedy, group_limited_greedy or noaux_tc wanted", crate::error::printable(other));
            return Err(keys.error(METHOD, what));
        }
    };
    let n_used = keys.opt_count(N_GROUP_USED, MAX_EXPERTS)?.unwrap_or(n_group);
    if greedy || n_used >= n_group {
        return Ok(None);
    }
    if !n_expert.is_multiple_of(n_group) {
        return Err(keys.error(N_GROUP, format!("is {n_group}, which does not divide {n_expert} experts")));
    }
    let score = if score == Score::Softmax { GroupScore::Max } else { GroupScore::TopTwo };
    Ok(Some(Groups { n_group, n_used, score }))
}
