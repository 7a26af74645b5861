//! MiMo-V2-Flash: keys are wider than values, which are scaled; layers with a window have sinks, other key-value heads
//! and another rotary base; experts chosen by a sigmoid router with a bias.

use checkpoint::Checkpoint;

use super::keys::{Dims, Key, Keys, MAX_HEAD_WIDTH, MAX_HEADS, MAX_LAYERS, N_HEAD, N_KV, N_LAYER, Unsaid, key};
use super::parts::{self, Attention};
use super::shared_moe::{Defaults, SharedMoe};
use super::windows::{Unnamed, windows};
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{Plan, RopePairing, Score};

const ARCH: &str = "mimo2";

const N_KV_WINDOWED: Key = key("", &["swa_num_key_value_heads", "num_key_value_heads"]);
const VALUE_SCALE: Key = key("attention.value_scale", &["attention_value_scale"]);
const EARLIER: &str = "sliding_window_size";
/// Keys of layers with a window that must say the same as those of the rest.
const SAME: &[(Key, &str)] = &[
    (key("", &["swa_num_attention_heads"]), "num_attention_heads"),
    (key("", &["swa_head_dim"]), "head_dim"),
    (key("", &["swa_v_head_dim"]), "v_head_dim"),
];

const ALIASES: &[Alias] = &[("attn_sinks.weight", &["self_attn.attention_sink_bias"])];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    for &(key, other) in SAME {
        let (Some(n), Some(same)) = (keys.opt_count(key, MAX_HEAD_WIDTH)?, keys.meta().opt_u64(other)?) else {
            continue;
        };
        if n as u64 != same {
            return Err(keys.error(key, format!("is {n}, {other} is {same}, expected the same")));
        }
    }
    let n_layer = keys.trunk(keys.count(N_LAYER, MAX_LAYERS)?)?;
    let mut windows = windows(&keys, n_layer, Unnamed::Unknown)?;
    if keys.is_folder() && keys.has(EARLIER) {
        // This key counts the earlier positions alone.
        windows.iter_mut().flatten().for_each(|window| *window += 1);
    }
    let n_head = keys.count(N_HEAD, MAX_HEADS)?;
    let n_kv = match keys.is_folder() {
        true => {
            let (full, windowed) = (keys.count(N_KV, MAX_HEADS)?, keys.count(N_KV_WINDOWED, MAX_HEADS)?);
            windows.iter().map(|window| if window.is_some() { windowed } else { full }).collect()
        }
        false => keys.counts(N_KV, n_layer, MAX_HEADS)?,
    };
    let layers = n_kv.into_iter().map(|n_kv| keys.dims_of(n_head, n_kv)).collect::<Result<Vec<Dims>, _>>()?;
    let dims = layers[0];
    let defaults = Defaults { score: Score::Sigmoid, renormalise: true, n_dense: None };
    let moe = SharedMoe::new(keys, defaults)?.renormalised();
    let full = keys.rope_of(Some("full_attention"), dims.d_k, RopePairing::Half)?;
    let windowed = keys.rope_windowed(dims.d_k, RopePairing::Half, Unsaid::AsRest)?;
    let value_scale = keys.opt_positive(VALUE_SCALE)?.map(|scale| scale as f32);

    let mut b = Builder::new(keys.names(), ARCH, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    b.skip_layers_from(n_layer);
    let (full, windowed) = (b.rope(full), b.rope(windowed));
    let x = parts::embed(&mut b, &dims)?;
    for (layer, (dims, window)) in layers.iter().zip(windows).enumerate() {
        b.layer(Some(layer as u32));
        let attn = Attention {
            window,
            sinks: b.has(&format!("blk.{layer}.attn_sinks.weight")),
            value_scale,
            ..Attention::plain(if window.is_some() { windowed } else { full }, dims.d_k)
        };
        parts::attention(&mut b, dims, attn, layer, x)?;
        moe.layer(&mut b, dims, layer, x)?;
    }
    parts::head(b, &dims, x)
}
