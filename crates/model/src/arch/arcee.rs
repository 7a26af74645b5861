//! Arcee's AFM (4.5B): Llama's layers, whose feed-forward squares what it rectifies and has no gate.

use checkpoint::Checkpoint;

use super::keys::Keys;
use super::parts::{self, Attention};
use crate::Error;
use crate::plan::build::Builder;
use crate::plan::{Op, Plan};

const ARCH: &str = "arcee";

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, &[]);
    let (dims, d_ff) = (keys.dims()?, keys.d_ff()?);
    let rope = keys.rope(dims.d_k, keys.llama_pairing())?;

    let mut b = Builder::new(keys.names(), ARCH, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let attn = Attention::plain(b.rope(rope), dims.d_k);
    let x = parts::embed(&mut b, &dims)?;
    for layer in 0..dims.n_layer {
        b.layer(Some(layer as u32));
        parts::attention(&mut b, &dims, attn, layer, x)?;
        let h = parts::norm(&mut b, &dims, layer, "ffn_norm", x, "f")?;
        let y = parts::squared(&mut b, &dims, ["ffn_up", "ffn_down"], d_ff, layer, h, "y")?;
        b.push(Op::Add { x, y });
    }
    parts::head(b, &dims, x)
}
