//! Poolside's Laguna: heads differ in number between layers with a window and layers without, which have separate
//! rotary embeddings; attention's output is multiplied by softplus gates, a number a head or each its own; a sigmoid
//! router with a bias, and a shared expert.

use checkpoint::Checkpoint;

use super::keys::{Dims, Key, Keys, MAX_HEADS, MAX_LAYERS, N_KV, N_LAYER, Unsaid, key};
use super::parts::{self, Attention, QkNorm};
use super::shared_moe::{Defaults, SharedMoe};
use super::windows::{Unnamed, windows};
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{GateFactor, Plan, RopePairing, Score};

const ARCH: &str = "laguna";

const N_HEADS: Key = key("attention.head_count", &["num_attention_heads_per_layer", "num_attention_heads"]);
const WEIGHS_INPUT: Key = key("", &["moe_apply_router_weight_on_input"]);

const ALIASES: &[Alias] =
    &[("attn_gate", &["self_attn.g_proj"]), ("exp_probs_b.bias", &["mlp.experts.e_score_correction_bias"])];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    if keys.opt_bool(WEIGHS_INPUT)? == Some(true) {
        return Err(keys.error(WEIGHS_INPUT, "is true: weights on the input of experts are not known".into()));
    }
    let n_layer = keys.count(N_LAYER, MAX_LAYERS)?;
    let (heads, kv) = (keys.counts(N_HEADS, n_layer, MAX_HEADS)?, keys.counts(N_KV, n_layer, MAX_HEADS)?);
    let layers = heads.into_iter().zip(kv).map(|(n, n_kv)| keys.dims_of(n, n_kv)).collect::<Result<Vec<Dims>, _>>()?;
    let dims = layers[0];
    let defaults = Defaults { score: Score::Sigmoid, renormalise: true, n_dense: None };
    let moe = SharedMoe::new(keys, defaults)?.renormalised();
    let windows = windows(&keys, n_layer, Unnamed::ButFirstOf(4))?;
    let full = keys.rope_of(Some("full_attention"), dims.d_k, RopePairing::Half)?;
    let windowed = keys.rope_windowed(dims.d_k, RopePairing::Half, Unsaid::AsRest)?;

    let mut b = Builder::new(keys.names(), ARCH, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let (full, windowed) = (b.rope(full), b.rope(windowed));
    let x = parts::embed(&mut b, &dims)?;
    for (layer, (dims, window)) in layers.iter().zip(windows).enumerate() {
        b.layer(Some(layer as u32));
        let attn = Attention {
            qk_norm: Some(QkNorm::HEADS),
            window,
            gate: Some(GateFactor::Softplus),
            ..Attention::plain(if window.is_some() { windowed } else { full }, dims.d_k)
        };
        parts::attention(&mut b, dims, attn, layer, x)?;
        moe.layer(&mut b, dims, layer, x)?;
    }
    parts::head(b, &dims, x)
}
