//! Phi-3.5-MoE and Phi-mini-MoE: layer norms and biases, LongRoPE whose factors the file gives, experts in every layer
//! whose weights are shares among experts of about the same logit (SparseMixer, arXiv 2409.12136).
//!
//! The long divisors serve contexts beyond the first training's length, as in the publisher's code and in Phi-3. Other
//! readers of GGUF files weigh experts by a softmax over the chosen two.

use checkpoint::Checkpoint;

use super::keys::{Key, Keys, ROPE_LONG, ROPE_SHORT, key};
use super::llama::MIXTRAL;
use super::parts::{self, Attention, Head, Stack};
use super::windows::{Unnamed, windows};
use crate::Error;
use crate::error::printable;
use crate::plan::build::Builder;
use crate::plan::{Op, Plan, RopePairing, Router, Rows, Score};

const JITTER: Key = key("router_jitter_noise", &["router_jitter_noise"]);
const SCALING: Key = key("", &["rope_parameters.rope_type", "rope_scaling.type", "rope_scaling.rope_type"]);
/// Factors on cosine and sine up to the first training's length, and beyond.
const FACTORS: [Key; 2] = [
    key("", &["rope_parameters.short_mscale", "rope_scaling.short_mscale"]),
    key("", &["rope_parameters.long_mscale", "rope_scaling.long_mscale"]),
];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, MIXTRAL);
    let dims = keys.dims()?;
    let n_expert = keys.some_experts()?;
    let (n_used, d_ff) = (keys.n_used(n_expert)?, keys.d_ff()?);
    let score = Score::Sparse { margin: (2.0 * keys.not_negative(JITTER, 0.01)?) as f32 };
    let router = Router { score, ..Router::softmax(false, 1.0) };
    let (mut rope, mut long) = keys.long_rope(dims.d_k, RopePairing::Half)?;
    match keys.opt_str(SCALING)? {
        None | Some("default") => {}
        Some("longrope" | "su") => {
            let tables = [Some(&mut rope), long.as_mut().map(|(_, rope)| rope)];
            for (key, rope) in FACTORS.into_iter().zip(tables) {
                let factor = keys.opt_positive(key)?.ok_or_else(|| keys.error(key, "is missing".into()))?;
                rope.into_iter().for_each(|rope| rope.factor = factor as f32);
            }
        }
        Some(other) => {
            return Err(keys.error(SCALING, format!("is {}, expected longrope", printable(other))));
        }
    }
    // A window as long as the context is none.
    let windows = windows(&keys, dims.n_layer, Unnamed::All)?;
    let window = |layer: usize| windows[layer].filter(|&n| n < dims.n_ctx_train);

    let mut b = Builder::new(keys.names(), "phimoe", dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let plain = Attention::plain(b.long_rope(rope, long), dims.d_k);
    b.skip(ROPE_SHORT).skip(ROPE_LONG);
    let x = parts::embed(&mut b, &dims)?;
    for layer in 0..dims.n_layer {
        b.layer(Some(layer as u32));
        let h = b.layer_norm(x, &format!("blk.{layer}.attn_norm"), dims.eps, "h")?;
        let o = parts::attend(&mut b, &dims, Attention { window: window(layer), ..plain }, layer, h)?;
        b.push(Op::Add { x, y: o });
        let h = b.layer_norm(x, &format!("blk.{layer}.ffn_norm"), dims.eps, "f")?;
        let logits = parts::linear(&mut b, layer, "ffn_gate_inp", h, [n_expert, dims.d_model], "router")?;
        let (ids, weights) = (b.ids("ids", Rows::Tokens, n_used), b.buf("weights", Rows::Tokens, n_used));
        b.push(Op::Route { logits, router, n_used, ids, weights });
        let y = parts::stack(&mut b, &dims, Stack::plain(n_expert, d_ff), layer, h, (ids, n_used))?;
        b.push(Op::Combine { x, add: true, y, weights, norm: None });
    }
    b.layer(None);
    let centered = parts::center(&mut b, &dims, x);
    parts::head_with(b, &dims, Head { bias: true, ..Head::PLAIN }, centered)
}
