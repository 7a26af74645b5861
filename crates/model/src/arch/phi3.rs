//! Phi-3, 3.5 and 4, dense: q, k and v in one tensor, gate and up in another, a window in every layer where the file
//! gives one. Those of 128k positions have two lists of divisors for the rotary frequencies: one for contexts of the
//! first training's length, and one for longer ones.

use checkpoint::Checkpoint;

use super::keys::{Keys, ROPE_LONG, ROPE_SHORT};
use super::parts::{self, Attention};
use super::windows::{Unnamed, windows};
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{Plan, RopePairing};

const ARCH: &str = "phi3";

const ALIASES: &[Alias] = &[
    ("attn_qkv", &["self_attn.qkv_proj"]),
    ("ffn_gate", &["=ffn_up[0/2]", "mlp.gate_up_proj[0/2]"]),
    ("ffn_up", &["=ffn_up[1/2]", "mlp.gate_up_proj[1/2]"]),
];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let (dims, d_ff) = (keys.dims()?, keys.d_ff()?);
    let (rope, long) = keys.long_rope(dims.d_k, RopePairing::Half)?;
    let windows = windows(&keys, dims.n_layer, Unnamed::All)?;

    let mut b = Builder::new(keys.names(), ARCH, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let plain = Attention::plain(b.long_rope(rope, long), dims.d_k);
    b.skip(ROPE_SHORT).skip(ROPE_LONG);
    let x = parts::embed(&mut b, &dims)?;
    for (layer, window) in windows.into_iter().enumerate() {
        b.layer(Some(layer as u32));
        parts::attention(&mut b, &dims, Attention { window, ..plain }, layer, x)?;
        parts::feed_forward(&mut b, &dims, d_ff, layer, x)?;
    }
    parts::head(b, &dims, x)
}
