//! GLM-4.5 and 4.6, and their Air sizes: biases on q, k and v, QK-norm in the large ones, half of each head rotated,
//! DeepSeek's mixture with a sigmoid router.

use checkpoint::Checkpoint;

use super::keys::Keys;
use super::parts::{self, Attention};
use super::shared_moe::{Defaults, SharedMoe};
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{Plan, RopePairing, Score};

const ARCH: &str = "glm4moe";

/// GGUF files call the norm in front of the experts by its place behind attention.
const ALIASES: &[Alias] = &[("ffn_norm", &["=post_attention_norm"])];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let mut dims = keys.dims()?;
    dims.n_layer = keys.trunk(dims.n_layer)?;
    let moe = SharedMoe::new(keys, Defaults { score: Score::Sigmoid, renormalise: true, n_dense: 1 })?;
    let rope = keys.rope(dims.d_k, RopePairing::Half)?;

    let mut b = Builder::new(keys.names(), ARCH, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    b.skip_layers_from(dims.n_layer);
    let rope = b.rope(rope);
    let x = parts::embed(&mut b, &dims)?;
    for layer in 0..dims.n_layer {
        b.layer(Some(layer as u32));
        let qk_norm = b.has(&format!("blk.{layer}.attn_q_norm.weight"));
        let scale = 1.0 / (dims.d_k as f32).sqrt();
        let attn = Attention { rope, qk_norm, scale, window: None, sinks: false };
        parts::attention(&mut b, &dims, attn, layer, x)?;
        moe.layer(&mut b, &dims, layer, x)?;
    }
    parts::head(b, &dims, x)
}
