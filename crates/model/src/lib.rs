//! Plans: what a model computes, op by op, over named tensors and virtual buffers. No device, no IO.
//!
//! [`build`] is the entry point: a checkpoint's header becomes a [`plan::ValidPlan`] of plain ops, written by the
//! architecture's file ([`arch`]). Backends lower it with the passes that help them ([`plan::passes`]).
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod arch;
mod error;
pub mod names;
pub mod plan;
pub mod rope;

pub use error::Error;

use checkpoint::Checkpoint;

/// Builds the plan of a checkpoint: the architecture's plain ops, validated and not fused.
///
/// Reads the header only.
///
/// # Errors
/// When the architecture is not supported, or when a key or tensor is missing, absurd or contradicts another.
pub fn build(checkpoint: &Checkpoint) -> Result<plan::ValidPlan, Error> {
    arch::build(checkpoint)
}
