//! SmolLM3: Llama's layers, every fourth of which rotates neither q nor k.

use checkpoint::Checkpoint;

use super::keys::Keys;
use super::parts::{self, Attention};
use super::windows::{Unnamed, windows};
use crate::Error;
use crate::plan::Plan;
use crate::plan::build::Builder;

const ARCH: &str = "smollm3";

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, &[]);
    let (dims, d_ff) = (keys.dims()?, keys.d_ff()?);
    let rope = keys.rope(dims.d_k, keys.llama_pairing())?;
    let rotated = keys.rotated(dims.n_layer, 4)?;
    let windows = windows(&keys, dims.n_layer, Unnamed::Unknown)?;

    let mut b = Builder::new(keys.names(), ARCH, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let plain = Attention::plain(b.rope(rope), dims.d_k);
    let x = parts::embed(&mut b, &dims)?;
    for (layer, window) in windows.into_iter().enumerate() {
        b.layer(Some(layer as u32));
        let rope = plain.rope.map(|rope| rope.filter(|_| rotated[layer]));
        parts::attention(&mut b, &dims, Attention { rope, window, ..plain }, layer, x)?;
        parts::feed_forward(&mut b, &dims, d_ff, layer, x)?;
    }
    parts::head(b, &dims, x)
}
