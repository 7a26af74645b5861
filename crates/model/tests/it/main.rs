//! Tests over headers made here.
#![allow(clippy::unwrap_used)]

mod costs;
mod gated_delta;
mod header;
mod latent;
mod names;
mod plans;
mod readme;
mod refusals;
mod rules;
mod windowed;

use checkpoint::Checkpoint;
use model::plan::{ValidPlan, passes};

/// The plan with all passes applied, as the CPU lowers it.
fn fused(checkpoint: &Checkpoint) -> Result<ValidPlan, model::Error> {
    model::build(checkpoint)?.rewrite(passes::fuse)
}
