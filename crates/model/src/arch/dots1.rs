//! dots.llm1: heads of q and k normalized, DeepSeek's mixture with a sigmoid router.

use checkpoint::Checkpoint;

use super::keys::Keys;
use super::parts::QkNorm;
use super::shared_moe::{Defaults, SharedMoe};
use crate::Error;
use crate::plan::{Plan, RopePairing, Score};

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, &[]);
    let defaults = Defaults { score: Score::Sigmoid, renormalise: false, n_dense: Some(0) };
    SharedMoe::new(keys, defaults)?.model(keys, "dots1", RopePairing::Half, Some(QkNorm::HEADS))
}
