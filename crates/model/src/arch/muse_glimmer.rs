//! Meta's Muse Glimmer, dense, text: embeddings and heads of q and k normalized without weights; layers with a window
//! are rotated, those without are not; a gate for each number that attention puts out; norms before and after attention
//! and feed-forward; scaled and capped logits.
//!
//! Folders store the norms of layers centred on zero; converters to GGUF add the 1, permute the rows of q and k for
//! neighbors of a head, and write the scale of the scores as the weights of q's norm.

use checkpoint::Checkpoint;

use super::gemma3::FINAL_SOFTCAP;
use super::keys::{Key, Keys, key};
use super::parts::{self, Attention, Head, QkNorm};
use super::windows::{Unnamed, windows};
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{GateFactor, Op, Plan, Read, RopePairing};

const ARCH: &str = "muse-glimmer";

const QK_SCALE: Key = key("", &["qk_scale_factor"]);
const LOGIT_SCALE: Key = key("logit_scale", &["output_multiplier"]);
const POST_EPS: Key = key("", &["post_norm_eps"]);

const ALIASES: &[Alias] = &[
    ("post_attention_norm", &["post_attention_layernorm"]),
    ("ffn_norm", &["pre_feedforward_layernorm"]),
    ("post_ffw_norm", &["post_feedforward_layernorm"]),
    ("attn_gate", &["self_attn.gate_proj"]),
];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let is_folder = keys.is_folder();
    let mut dims = keys.dims()?;
    dims.norm = if is_folder { Read::OnePlus } else { Read::Plain };
    dims.post_norm = Some(keys.opt_positive(POST_EPS)?.unwrap_or(1e-8) as f32);
    let d_ff = keys.d_ff()?;
    let windows = windows(&keys, dims.n_layer, Unnamed::ButEvery(4))?;
    let rope = keys.rope(dims.d_k, if is_folder { RopePairing::Half } else { RopePairing::Interleaved })?;
    let qk_scale = keys.opt_positive(QK_SCALE)?.unwrap_or(1.0) as f32;
    let logit_scale = keys.opt_positive(LOGIT_SCALE)?.map(|scale| scale as f32);
    let softcap = keys.opt_positive(FINAL_SOFTCAP)?.map(|cap| cap as f32);

    let mut b = Builder::new(keys.names(), ARCH, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let rope = b.rope(rope);
    let x = parts::embed(&mut b, &dims)?;
    b.push(Op::HeadNorm { x, w: None, eps: dims.eps, n_head: 1, d_head: dims.d_model });
    for (layer, window) in windows.into_iter().enumerate() {
        b.layer(Some(layer as u32));
        let plain = Attention::plain(rope, dims.d_k);
        let attn = Attention {
            rope: [window.map(|_| rope); 2],
            // The weights of a GGUF file are no norm's, and have no other form.
            qk_norm: Some(QkNorm { has_weights: !is_folder, ..QkNorm::HEADS }),
            scale: plain.scale * qk_scale,
            window,
            gate: Some(GateFactor::Sigmoid),
            ..plain
        };
        parts::attention(&mut b, &dims, attn, layer, x)?;
        parts::feed_forward(&mut b, &dims, d_ff, layer, x)?;
    }
    parts::head_with(b, &dims, Head { scale: logit_scale, softcap, ..Head::PLAIN }, x)
}
