//! Plans: what a model computes, op by op, over named tensors and virtual buffers. No device, no IO.
//!
//! [`build`] is the door: a checkpoint's header becomes a fused, validated [`plan::Plan`]. The way there is
//! [`arch::build`] (one file an architecture, plain ops), then [`plan::passes::fuse`].
#![forbid(unsafe_code)]

pub mod arch;
mod error;
pub mod names;
pub mod plan;
pub mod rope;

pub use error::Error;

use checkpoint::Checkpoint;

/// Builds the plan that backends run: the architecture's plain ops, fused and validated.
///
/// Reads the header only. Fails when the architecture is not supported, or when a key or tensor is missing, absurd or
/// contradicts another.
pub fn build(checkpoint: &Checkpoint) -> Result<plan::Plan, Error> {
    let mut plan = arch::build(checkpoint)?;
    plan::passes::fuse(&mut plan);
    plan::validate::validate(&plan)?;
    Ok(plan)
}
