//! Step-3.5 and 3.7 Flash, text: heads differ in number between layers with a window and layers without, of which the
//! latter rotate half of each head; a sigmoid gate a head; a sigmoid router with a bias and a shared expert, clamped in
//! the last layers.
//!
//! Folders store the norms centred on zero; converters to GGUF add the 1.

use checkpoint::Checkpoint;

use super::keys::{Dims, Key, Keys, MAX_HEADS, MAX_LAYERS, N_HEAD, N_KV, N_LAYER, key};
use super::parts::{self, Attention, Head, QkNorm};
use super::shared_moe::{Defaults, SharedMoe};
use super::windows::{Unnamed, windows};
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{Gate, GateFactor, Plan, Read, RopePairing, Score};

const ARCH: &str = "step35";

const N_HEAD_WINDOWED: Key = key("", &["attention_other_setting.num_attention_heads", "num_attention_heads"]);
const N_KV_WINDOWED: Key = key("", &["attention_other_setting.num_attention_groups", "num_attention_groups"]);
const LIMITS: Key = key("swiglu_clamp_exp", &["swiglu_limits"]);
const LIMITS_SHARED: Key = key("swiglu_clamp_shexp", &["swiglu_limits_shared"]);

const ALIASES: &[Alias] = &[
    ("attn_gate", &["self_attn.g_proj"]),
    ("ffn_gate_inp", &["moe.gate"]),
    ("exp_probs_b.bias", &["moe.router_bias"]),
    ("ffn_gate_exps", &["moe.gate_proj"]),
    ("ffn_up_exps", &["moe.up_proj"]),
    ("ffn_down_exps", &["moe.down_proj"]),
    ("ffn_gate_shexp", &["share_expert.gate_proj"]),
    ("ffn_up_shexp", &["share_expert.up_proj"]),
    ("ffn_down_shexp", &["share_expert.down_proj"]),
];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let n_layer = keys.trunk(keys.count(N_LAYER, MAX_LAYERS)?)?;
    let windows = windows(&keys, n_layer, Unnamed::Unknown)?;
    let layers = layers(&keys, &windows)?;
    let dims = layers[0];
    let defaults = Defaults { score: Score::Sigmoid, renormalise: true, n_dense: None };
    let moe = SharedMoe::new(keys, defaults)?.renormalised();
    let (limits, shared) = (gates(&keys, LIMITS, n_layer)?, gates(&keys, LIMITS_SHARED, n_layer)?);
    let full = keys.rope_by_layer(&windows, false, dims.d_k, RopePairing::Half, 0.5)?;
    let windowed = keys.rope_by_layer(&windows, true, dims.d_k, RopePairing::Half, 1.0)?;

    let mut b = Builder::new(keys.names(), ARCH, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    b.skip_layers_from(n_layer);
    let (full, windowed) = (b.rope(full), b.rope(windowed));
    let x = parts::embed(&mut b, &dims)?;
    for (layer, (dims, window)) in layers.iter().zip(windows).enumerate() {
        b.layer(Some(layer as u32));
        let has = |name: &str| b.has(&format!("blk.{layer}.{name}.weight"));
        let attn = Attention {
            qk_norm: has("attn_q_norm").then_some(QkNorm::HEADS),
            window,
            gate: has("attn_gate").then_some(GateFactor::Sigmoid),
            ..Attention::plain(if window.is_some() { windowed } else { full }, dims.d_k)
        };
        parts::attention(&mut b, dims, attn, layer, x)?;
        moe.activated([limits[layer], shared[layer]]).layer(&mut b, dims, layer, x)?;
    }
    parts::head_with(b, &dims, Head { norm: dims.norm, ..Head::PLAIN }, x)
}

/// Dimensions of every layer: GGUF lists the heads, config.json has a number for each kind of layer.
fn layers(keys: &Keys, windows: &[Option<usize>]) -> Result<Vec<Dims>, Error> {
    let of = |key: Key, windowed: Key| match keys.is_folder() {
        true => {
            let (full, windowed) = (keys.count(key, MAX_HEADS)?, keys.count(windowed, MAX_HEADS)?);
            Ok(windows.iter().map(|window| if window.is_some() { windowed } else { full }).collect())
        }
        false => keys.counts(key, windows.len(), MAX_HEADS),
    };
    let (n_head, n_kv): (Vec<usize>, Vec<usize>) = (of(N_HEAD, N_HEAD_WINDOWED)?, of(N_KV, N_KV_WINDOWED)?);
    let norm = if keys.is_folder() { Read::OnePlus } else { Read::Plain };
    let dims = |(n_head, n_kv)| Ok(Dims { norm, ..keys.dims_of(n_head, n_kv)? });
    n_head.into_iter().zip(n_kv).map(dims).collect()
}

/// Activations of every layer by the limits that a file lists, of which 0 is none.
fn gates(keys: &Keys, key: Key, n_layer: usize) -> Result<Vec<Gate>, Error> {
    let limits = keys.numbers(key, n_layer)?.unwrap_or_else(|| vec![0.0; n_layer]);
    let gate = |limit: f64| if limit > 0.0 { Gate::ClampedSilu { limit: limit as f32 } } else { Gate::Silu };
    Ok(limits.into_iter().map(gate).collect())
}
