//! Mellum 2: Qwen3-MoE with windows, and another rotary embedding for the layers that have them.

use checkpoint::Checkpoint;

use super::keys::{Keys, Unsaid};
use super::parts::{self, Attention, QkNorm};
use super::windows::{Unnamed, windows};
use crate::Error;
use crate::plan::build::Builder;
use crate::plan::{Plan, RopePairing};

const ARCH: &str = "mellum";

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, &[]);
    let dims = keys.dims()?;
    let moe = keys.moe(keys.some_experts()?, true)?;
    let windows = windows(&keys, dims.n_layer, Unnamed::Unknown)?;
    let full = keys.rope_of(Some("full_attention"), dims.d_k, RopePairing::Half)?;
    let windowed = keys.rope_windowed(dims.d_k, RopePairing::Half, Unsaid::AsRest)?;

    let mut b = Builder::new(keys.names(), ARCH, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let (full, windowed) = (b.rope(full), b.rope(windowed));
    let x = parts::embed(&mut b, &dims)?;
    for (layer, window) in windows.into_iter().enumerate() {
        b.layer(Some(layer as u32));
        let rope = if window.is_some() { windowed } else { full };
        let attn = Attention { qk_norm: Some(QkNorm::HEADS), window, ..Attention::plain(rope, dims.d_k) };
        parts::attention(&mut b, &dims, attn, layer, x)?;
        parts::experts(&mut b, &dims, &moe, layer, x)?;
    }
    parts::head(b, &dims, x)
}
