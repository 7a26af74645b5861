//! Qwen3, dense (0.6B to 32B): QK-norm, half-split rope.

use checkpoint::Checkpoint;

use super::keys::Keys;
use super::parts::{self, Attention};
use super::windows::{Unnamed, windows};
use crate::Error;
use crate::plan::build::Builder;
use crate::plan::{Plan, RopePairing};

const ARCH: &str = "qwen3";

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, &[]);
    let dims = keys.dims()?;
    let d_ff = keys.d_ff()?;
    let rope = keys.rope(dims.d_k, RopePairing::Half)?;
    let windows = windows(&keys, dims.n_layer, Unnamed::Unknown)?;

    let mut b = Builder::new(keys.names(), ARCH, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let (rope, scale) = (b.rope(rope), 1.0 / (dims.d_k as f32).sqrt());
    let x = parts::embed(&mut b, &dims)?;
    for layer in 0..dims.n_layer {
        b.layer(Some(layer as u32));
        let how = Attention { rope, qk_norm: true, scale, window: windows[layer], sinks: false };
        parts::attention(&mut b, &dims, how, layer, x)?;
        parts::feed_forward(&mut b, &dims, d_ff, layer, x)?;
    }
    parts::head(b, &dims, x)
}
