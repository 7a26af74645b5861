//! Arcee's AFM (4.5B): Llama's layers, whose feed-forward squares what it rectifies and has no gate.

use checkpoint::Checkpoint;

use super::keys::{Dims, Keys};
use super::parts::{self, Attention};
use crate::Error;
use crate::plan::build::Builder;
use crate::plan::{Buf, Gate, Op, Plan, Rows};

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
        feed_forward(&mut b, &dims, d_ff, layer, x)?;
    }
    parts::head(b, &dims, x)
}

/// `x += down(max(up(norm(x)), 0)²)`.
fn feed_forward(b: &mut Builder, dims: &Dims, d_ff: usize, layer: usize, x: Buf) -> Result<(), Error> {
    let h = parts::norm(b, dims, layer, "ffn_norm", x, "f")?;
    let up = parts::linear(b, layer, "ffn_up", h, [d_ff, dims.d_model], "up")?;
    let hidden = b.buf("act", Rows::Tokens, d_ff);
    b.push(Op::GatedAct { gate: up, up, act: Gate::Relu, out: hidden });
    let y = parts::linear(b, layer, "ffn_down", hidden, [dims.d_model, d_ff], "y")?;
    b.push(Op::Add { x, y });
    Ok(())
}
