//! GLM-4.5 and 4.6, and their Air sizes: biases on q, k and v, QK-norm in the large ones, half of each head rotated,
//! DeepSeek's mixture with a sigmoid router.

use checkpoint::Checkpoint;

use super::keys::Keys;
use super::parts::{self, Attention, Head, QkNorm};
use super::shared_moe::{Defaults, SharedMoe};
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{Buf, Plan, RopePairing, Score};

const ARCH: &str = "glm4moe";

/// GGUF files call the norm in front of the experts by its place behind attention.
const ALIASES: &[Alias] = &[("ffn_norm", &["=post_attention_norm"])];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    write(checkpoint, false)
}

pub(super) fn build_drafting(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    write(checkpoint, true)
}

fn write(checkpoint: &Checkpoint, drafts: bool) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let mut dims = keys.dims()?;
    dims.n_layer = keys.trunk(dims.n_layer)?;
    let moe = SharedMoe::new(keys, Defaults { score: Score::Sigmoid, renormalise: true, n_dense: Some(1) })?;
    let rope = keys.rope(dims.d_k, RopePairing::Half)?;

    let mut b = Builder::new(keys.names(), ARCH, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    b.skip_layers_from(dims.n_layer);
    let rope = b.rope(rope);
    let x = parts::embed(&mut b, &dims)?;
    let decoder = |b: &mut Builder, layer: usize, x: Buf| {
        let qk_norm = b.has(&format!("blk.{layer}.attn_q_norm.weight")).then_some(QkNorm::HEADS);
        let attn = Attention { qk_norm, ..Attention::plain(rope, dims.d_k) };
        parts::attention(b, &dims, attn, layer, x)?;
        moe.layer(b, &dims, layer, x)
    };
    for layer in 0..dims.n_layer {
        b.layer(Some(layer as u32));
        decoder(&mut b, layer, x)?;
    }
    match drafts {
        true => parts::head_and_drafts(b, &dims, Head::PLAIN, x, decoder),
        false => parts::head(b, &dims, x),
    }
}
