//! Tencent's mixtures, which have a shared expert. Hunyuan-A13B: heads of q and k normalized after their rotation, a
//! stretched rotary base, softmax scores. Hy3: normalized before it, sigmoid scores with a bias for the choice.

use checkpoint::Checkpoint;

use super::keys::Keys;
use super::parts::QkNorm;
use super::shared_moe::{Defaults, SharedMoe};
use crate::Error;
use crate::names::Alias;
use crate::plan::{Plan, RopePairing, Score};

const ALIASES: &[Alias] = &[
    ("attn_q_norm", &["self_attn.query_layernorm"]),
    ("attn_k_norm", &["self_attn.key_layernorm"]),
    ("ffn_gate_inp", &["mlp.gate.wg", "mlp.router.gate"]),
    ("exp_probs_b.bias", &["mlp.expert_bias", "=exp_probs_b"]),
    ("ffn_gate_shexp", &["mlp.shared_mlp.gate_proj"]),
    ("ffn_up_shexp", &["mlp.shared_mlp.up_proj"]),
    ("ffn_down_shexp", &["mlp.shared_mlp.down_proj"]),
];

pub(super) fn build_v1(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let defaults = Defaults { score: Score::Softmax, renormalise: true, n_dense: None };
    let moe = SharedMoe::new(keys, defaults)?.renormalised();
    moe.model(keys, "hunyuan-moe", RopePairing::Half, Some(QkNorm::LATE))
}

pub(super) fn build_v3(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let defaults = Defaults { score: Score::Sigmoid, renormalise: true, n_dense: None };
    SharedMoe::new(keys, defaults)?.model(keys, "hy_v3", RopePairing::Half, Some(QkNorm::HEADS))
}
