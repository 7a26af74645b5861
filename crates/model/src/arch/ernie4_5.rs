//! ERNIE 4.5, dense and with experts: neighbors of a head are rotated, in folders and GGUF files alike; a softmax
//! router whose bias is for the choice only, and shared experts.

use checkpoint::Checkpoint;

use super::keys::Keys;
use super::parts;
use super::shared_moe::{Defaults, SharedMoe};
use crate::Error;
use crate::names::Alias;
use crate::plan::{Plan, RopePairing, Score};

const ALIASES: &[Alias] = &[("exp_probs_b.bias", &["mlp.moe_statics.e_score_correction_bias"])];

pub(super) fn build_dense(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, &[]);
    parts::dense_model(keys, "ernie4_5", keys.dims()?, RopePairing::Interleaved)
}

pub(super) fn build_moe(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let defaults = Defaults { score: Score::Softmax, renormalise: true, n_dense: None };
    let moe = SharedMoe::new(keys, defaults)?.renormalised();
    moe.model(keys, "ernie4_5-moe", RopePairing::Interleaved, None)
}
