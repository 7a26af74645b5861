//! Arcee's Trinity: layers with a window are rotated, those without are not; a gate for each number that attention puts
//! out; norms before and after attention and feed-forward; a sigmoid router with a bias, and shared experts.

use checkpoint::Checkpoint;

use super::keys::{Key, Keys, key};
use super::parts::{self, Attention, QkNorm};
use super::shared_moe::{Defaults, SharedMoe};
use super::windows::{Unnamed, windows};
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{GateFactor, Plan, RopePairing, Score};

const ARCH: &str = "afmoe";

/// Whether embeddings are scaled by the root of their width. Those of GGUF files are.
const SCALES: Key = key("", &["mup_enabled"]);

const ALIASES: &[Alias] = &[
    ("post_attention_norm", &["post_attention_layernorm"]),
    ("ffn_norm", &["pre_mlp_layernorm"]),
    ("post_ffw_norm", &["post_mlp_layernorm"]),
    ("attn_gate", &["self_attn.gate_proj"]),
    ("ffn_gate_inp", &["mlp.router.gate"]),
    ("exp_probs_b.bias", &["mlp.expert_bias"]),
];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let mut dims = keys.dims()?;
    dims.post_norm = Some(dims.eps);
    let defaults = Defaults { score: Score::Sigmoid, renormalise: true, n_dense: None };
    let moe = SharedMoe::new(keys, defaults)?.renormalised();
    let windows = windows(&keys, dims.n_layer, Unnamed::ButEvery(4))?;
    let rope = keys.rope(dims.d_k, RopePairing::Half)?;
    let is_scaled = keys.opt_bool(SCALES)?.unwrap_or(!keys.is_folder());

    let mut b = Builder::new(keys.names(), ARCH, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let rope = b.rope(rope);
    let scale = if is_scaled { (dims.d_model as f32).sqrt() } else { 1.0 };
    let x = parts::embed_scaled(&mut b, &dims, scale)?;
    for (layer, window) in windows.into_iter().enumerate() {
        b.layer(Some(layer as u32));
        let attn = Attention {
            rope: [window.map(|_| rope); 2],
            qk_norm: Some(QkNorm::HEADS),
            window,
            gate: Some(GateFactor::Sigmoid),
            ..Attention::plain(rope, dims.d_k)
        };
        parts::attention(&mut b, &dims, attn, layer, x)?;
        moe.layer(&mut b, &dims, layer, x)?;
    }
    parts::head(b, &dims, x)
}
