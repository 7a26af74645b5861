//! Architectures: one file each, found by the name in `general.architecture`.
//!
//! An architecture reads its keys, looks up its tensors and writes plain ops; fusing is the passes' work. It knows no
//! device, and nothing of what its tensors hold.

mod keys;
mod llama;
mod parts;
mod qwen3;
mod qwen3moe;

use checkpoint::Checkpoint;

use crate::Error;
use crate::error::printable;
use crate::plan::Plan;

/// What turns a checkpoint's header into plain ops.
pub type Build = fn(&Checkpoint) -> Result<Plan, Error>;

/// Architectures by the name that GGUF files carry.
pub const ARCHS: &[(&str, Build)] = &[("llama", llama::build), ("qwen3", qwen3::build), ("qwen3moe", qwen3moe::build)];

/// Builds the plain plan of a checkpoint, unfused and validated. Fails as [`crate::build`] does.
pub fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let arch = checkpoint.meta().str("general.architecture")?;
    match ARCHS.iter().find(|(name, _)| *name == arch) {
        Some((_, build)) => build(checkpoint),
        None => Err(Error::Architecture {
            file: checkpoint.name().into(),
            arch: printable(arch),
            supported: ARCHS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", "),
        }),
    }
}
