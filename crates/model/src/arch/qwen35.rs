//! Qwen3.5 and 3.6, dense and with experts: as Qwen3-Next, with projections apart. Converters to GGUF sort the heads of
//! v anew, so that heads that share a key no longer stand together.

use checkpoint::Checkpoint;

use super::gated_delta;
use crate::Error;
use crate::plan::{Plan, Sharing};

pub(super) fn build_dense(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    gated_delta::build(checkpoint, "qwen35", Sharing::Tiled, false)
}

pub(super) fn build_dense_drafting(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    gated_delta::build(checkpoint, "qwen35", Sharing::Tiled, true)
}

pub(super) fn build_moe(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    gated_delta::build(checkpoint, "qwen35moe", Sharing::Tiled, false)
}

pub(super) fn build_moe_drafting(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    gated_delta::build(checkpoint, "qwen35moe", Sharing::Tiled, true)
}
