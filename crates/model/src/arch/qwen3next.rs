//! Qwen3-Next (80B-A3B): gated delta nets and gated attention, 512 experts and a shared one.

use checkpoint::Checkpoint;

use super::gated_delta;
use crate::Error;
use crate::plan::{Plan, Sharing};

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    gated_delta::build(checkpoint, "qwen3next", Sharing::Grouped, false)
}

pub(super) fn build_drafting(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    gated_delta::build(checkpoint, "qwen3next", Sharing::Grouped, true)
}
