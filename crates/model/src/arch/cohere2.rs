//! Command R7B and Command A: attention and feed-forward both take the input after one layer norm, neighbors of a head
//! are rotated in layers that see a window and nothing in the others, a factor is on the logits.

use checkpoint::Checkpoint;

use super::keys::{Key, Keys, key};
use super::parts::{self, Attention, Head};
use super::windows::{Unnamed, windows};
use crate::Error;
use crate::plan::build::Builder;
use crate::plan::{Gate, Op, Plan, RopePairing};

const ARCH: &str = "cohere2";

const EPS: Key = key("attention.layer_norm_epsilon", &["layer_norm_eps"]);
const LOGIT_SCALE: Key = key("logit_scale", &["logit_scale"]);

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, &[]);
    let (dims, d_ff) = (keys.dims_by(EPS)?, keys.d_ff()?);
    let rope = keys.rope(dims.d_k, RopePairing::Interleaved)?;
    let windows = windows(&keys, dims.n_layer, Unnamed::ButEvery(4))?;
    let head = Head { scale: keys.opt_positive(LOGIT_SCALE)?.map(|scale| scale as f32), ..Head::PLAIN };

    let mut b = Builder::new(keys.names(), ARCH, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let plain = Attention::plain(b.rope(rope), dims.d_k);
    let x = parts::embed(&mut b, &dims)?;
    for (layer, window) in windows.into_iter().enumerate() {
        b.layer(Some(layer as u32));
        let rope = plain.rope.map(|rope| rope.filter(|_| window.is_some()));
        let centered = parts::center(&mut b, &dims, x);
        let h = parts::norm(&mut b, &dims, layer, "attn_norm", centered, "h")?;
        let o = parts::attend(&mut b, &dims, Attention { rope, window, ..plain }, layer, h)?;
        b.push(Op::Add { x, y: o });
        let y = parts::mlp(&mut b, &dims, parts::FFN, (d_ff, Gate::Silu), layer, h, "y")?;
        b.push(Op::Add { x, y });
    }
    b.layer(None);
    let centered = parts::center(&mut b, &dims, x);
    parts::head_with(b, &dims, head, centered)
}
