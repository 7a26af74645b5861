//! Plans: what a model computes, op by op, over named tensors and virtual buffers. No device, no IO.
//!
//! [`build`] is the entry point: a checkpoint's header becomes a [`plan::ValidPlan`] of plain ops, written by the
//! architecture's file ([`arch`]). Backends lower it with the passes that help them ([`plan::passes`]).
//!
//! ```text
//! Checkpoint ─ arch::build ─ Plan ─ validate ─ ValidPlan ─ rewrite(passes) ─ ValidPlan ─ a backend
//! ```
//!
//! ```
//! use model::plan::passes;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let checkpoint = checkpoint::open("../../models/fable-29m-a10m-q4_k_m.gguf".as_ref())?;
//! let plan = model::build(&checkpoint)?;
//! assert_eq!((plan.arch.as_str(), plan.n_vocab, plan.caches.len()), ("qwen3moe", 8192, 8));
//! let n_ops = plan.ops.len();
//! assert!(plan.rewrite(passes::fuse)?.ops.len() < n_ops);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod arch;
mod error;
pub mod names;
pub mod plan;
pub mod rope;
pub mod vision;

pub use error::Error;

use checkpoint::Checkpoint;

/// Builds the plan of a checkpoint: the architecture's plain ops, validated and not fused.
///
/// Reads the header only.
///
/// # Errors
/// When the architecture is not supported, or when a key or tensor is missing, absurd or contradicts another.
pub fn build(checkpoint: &Checkpoint) -> Result<plan::ValidPlan, Error> {
    arch::build(checkpoint, false)
}

/// Gives a checkpoint a longer context than it was trained for: plans that are built of it scale positions so.
///
/// # Errors
/// When the file scales positions in a way that this cannot replace, or the model has no rotary embedding to scale; the
/// checkpoint may be changed then.
pub fn stretch(checkpoint: &mut Checkpoint, stretch: arch::Stretch) -> Result<plan::ValidPlan, Error> {
    let before = build(checkpoint)?;
    arch::stretch(checkpoint, stretch)?;
    let after = build(checkpoint)?;
    match before.ropes == after.ropes && after.long_ropes.is_none() {
        true => Err(Error::Key {
            file: checkpoint.name().into(),
            key: "rope.scaling.type".into(),
            what: format!("cannot become {}: the model has no rotary embedding that it changes", stretch.rule.name()),
        }),
        false => Ok(after),
    }
}

/// As [`build`], with the head that drafts further tokens ([`plan::Plan::draft`]) where the checkpoint has one.
///
/// # Errors
/// As [`build`].
pub fn build_drafting(checkpoint: &Checkpoint) -> Result<plan::ValidPlan, Error> {
    arch::build(checkpoint, true)
}
