//! Qwen2 and Qwen2.5, dense: biases on q, k and v. Qwen3, dense (0.6B to 32B), and Qwen3-MoE (30B-A3B, 235B-A22B,
//! Coder): QK-norm; the softmax router is renormalized over the chosen experts. All have half-split rope. Qwen3-VL,
//! text: the same; its rotary sections for images have one position in text. OLMoE: q and k normalized whole, weights
//! of experts as they are.

use checkpoint::Checkpoint;

use super::keys::{Key, Keys, key};
use super::parts::{self, Attention, QkNorm};
use super::windows::{Unnamed, windows};
use crate::Error;
use crate::plan::build::Builder;
use crate::plan::{Plan, RopePairing};

/// OLMoE's, which no published file has.
const CLIP_QKV: Key = key("attention.clamp_kqv", &["clip_qkv"]);

/// A generation of the family.
struct Generation {
    arch: &'static str,
    qk_norm: Option<QkNorm>,
    /// Whether weights of experts are divided by their sum where a file does not say it; `None`: it has no experts.
    experts: Option<bool>,
}

pub(super) fn build_2(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    build(checkpoint, Generation { arch: "qwen2", qk_norm: None, experts: None })
}

pub(super) fn build_3(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    build(checkpoint, Generation { arch: "qwen3", qk_norm: Some(QkNorm::HEADS), experts: None })
}

pub(super) fn build_3_moe(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    build(checkpoint, Generation { arch: "qwen3moe", qk_norm: Some(QkNorm::HEADS), experts: Some(true) })
}

pub(super) fn build_3_vl(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    build(checkpoint, Generation { arch: "qwen3vl", qk_norm: Some(QkNorm::HEADS), experts: None })
}

pub(super) fn build_3_vl_moe(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    build(checkpoint, Generation { arch: "qwen3vlmoe", qk_norm: Some(QkNorm::HEADS), experts: Some(true) })
}

pub(super) fn build_olmoe(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, &[]);
    if let Some(limit) = keys.opt_positive(CLIP_QKV)? {
        return Err(keys.error(CLIP_QKV, format!("is {limit}, expected none: q, k and v cannot be clipped")));
    }
    build(checkpoint, Generation { arch: "olmoe", qk_norm: Some(QkNorm::WHOLE), experts: Some(false) })
}

fn build(checkpoint: &Checkpoint, Generation { arch, qk_norm, experts }: Generation) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, &[]);
    let dims = keys.dims()?;
    let moe = experts.map(|renormalise| keys.moe(keys.some_experts()?, renormalise)).transpose()?;
    let d_ff = if moe.is_some() { 0 } else { keys.d_ff()? };
    let rope = keys.rope(dims.d_k, RopePairing::Half)?;
    let windows = windows(&keys, dims.n_layer, Unnamed::Unknown)?;

    let mut b = Builder::new(keys.names(), arch, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let rope = b.rope(rope);
    let x = parts::embed(&mut b, &dims)?;
    for (layer, window) in windows.into_iter().enumerate() {
        b.layer(Some(layer as u32));
        let attn = Attention { qk_norm, window, ..Attention::plain(rope, dims.d_k) };
        parts::attention(&mut b, &dims, attn, layer, x)?;
        match &moe {
            Some(moe) => parts::experts(&mut b, &dims, moe, layer, x)?,
            None => parts::feed_forward(&mut b, &dims, d_ff, layer, x)?,
        }
    }
    parts::head(b, &dims, x)
}
