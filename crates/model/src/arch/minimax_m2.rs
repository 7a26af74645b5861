//! MiniMax-M2 to M2.7: q and k normalized over all heads at once, a part of each head rotated, experts in every layer
//! chosen by a sigmoid router with a bias.

use checkpoint::Checkpoint;

use super::keys::Keys;
use super::parts::QkNorm;
use super::shared_moe::{Defaults, SharedMoe};
use crate::Error;
use crate::names::Alias;
use crate::plan::{Plan, RopePairing, Score};

const ALIASES: &[Alias] = &[
    ("ffn_gate_inp", &["block_sparse_moe.gate"]),
    ("exp_probs_b.bias", &["block_sparse_moe.e_score_correction_bias"]),
    ("ffn_gate_exps", &["block_sparse_moe.switch_mlp.gate_proj", "block_sparse_moe.experts.*.w1"]),
    ("ffn_up_exps", &["block_sparse_moe.switch_mlp.up_proj", "block_sparse_moe.experts.*.w3"]),
    ("ffn_down_exps", &["block_sparse_moe.switch_mlp.down_proj", "block_sparse_moe.experts.*.w2"]),
];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let defaults = Defaults { score: Score::Sigmoid, renormalise: true, n_dense: Some(0) };
    let moe = SharedMoe::new(keys, defaults)?.renormalised();
    moe.model(keys, "minimax-m2", RopePairing::Half, Some(QkNorm::WHOLE))
}
