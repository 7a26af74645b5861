//! Qwen2 and Qwen2.5, dense: biases on q, k and v. Qwen3, dense (0.6B to 32B), and Qwen3-MoE (30B-A3B, 235B-A22B,
//! Coder): QK-norm; the softmax router is renormalised over the chosen experts. All have half-split rope.

use checkpoint::Checkpoint;

use super::keys::Keys;
use super::parts::{self, Attention};
use super::windows::{Unnamed, windows};
use crate::Error;
use crate::plan::build::Builder;
use crate::plan::{Plan, RopePairing};

/// A generation of the family.
struct Generation {
    arch: &'static str,
    qk_norm: bool,
    experts: bool,
}

pub(super) fn build_2(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    build(checkpoint, Generation { arch: "qwen2", qk_norm: false, experts: false })
}

pub(super) fn build_3(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    build(checkpoint, Generation { arch: "qwen3", qk_norm: true, experts: false })
}

pub(super) fn build_3_moe(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    build(checkpoint, Generation { arch: "qwen3moe", qk_norm: true, experts: true })
}

fn build(checkpoint: &Checkpoint, Generation { arch, qk_norm, experts }: Generation) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, &[]);
    let dims = keys.dims()?;
    let moe = if experts { Some(keys.moe(keys.some_experts()?, true)?) } else { None };
    let d_ff = if experts { 0 } else { keys.d_ff()? };
    let rope = keys.rope(dims.d_k, RopePairing::Half)?;
    let windows = windows(&keys, dims.n_layer, Unnamed::Unknown)?;

    let mut b = Builder::new(keys.names(), arch, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let (rope, scale) = (b.rope(rope), 1.0 / (dims.d_k as f32).sqrt());
    let x = parts::embed(&mut b, &dims)?;
    for (layer, window) in windows.into_iter().enumerate() {
        b.layer(Some(layer as u32));
        parts::attention(&mut b, &dims, Attention { rope, qk_norm, scale, window, sinks: false }, layer, x)?;
        match &moe {
            Some(moe) => parts::experts(&mut b, &dims, moe, layer, x)?,
            None => parts::feed_forward(&mut b, &dims, d_ff, layer, x)?,
        }
    }
    parts::head(b, &dims, x)
}
