//! Llama and models of its shape (Mistral, SmolLM, Mixtral): biases and experts where the file has them. Converters
//! to GGUF permute the rows of q and k, so that the pairs of a head stand next to each other; folders keep the halves
//! of a head.

use checkpoint::Checkpoint;

use super::keys::{ATTENTION_SCALE, Keys};
use super::parts::{self, Attention};
use super::windows::{Unnamed, windows};
use crate::Error;
use crate::names::Alias;
use crate::plan::Plan;
use crate::plan::build::Builder;

/// Mixtral's modules.
pub(super) const MIXTRAL: &[Alias] = &[
    ("ffn_gate_inp", &["block_sparse_moe.gate"]),
    ("ffn_gate_exps", &["block_sparse_moe.switch_mlp.gate_proj", "block_sparse_moe.experts.*.w1"]),
    ("ffn_up_exps", &["block_sparse_moe.switch_mlp.up_proj", "block_sparse_moe.experts.*.w3"]),
    ("ffn_down_exps", &["block_sparse_moe.switch_mlp.down_proj", "block_sparse_moe.experts.*.w2"]),
];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    build_as(checkpoint, "llama")
}

/// Ministral 3, Mistral Small 3.1 and later: queries grow with the position where the file says so.
pub(super) fn build_mistral3(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    build_as(checkpoint, "mistral3")
}

fn build_as(checkpoint: &Checkpoint, arch: &str) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, MIXTRAL);
    let dims = keys.dims()?;
    let moe = keys.n_expert()?.map(|n_expert| keys.moe(n_expert, true)).transpose()?;
    if moe.is_some() && checkpoint.tensor("blk.0.ffn_gate.0.weight").is_some() {
        return Err(Error::Tensor {
            file: checkpoint.name().into(),
            tensor: "blk.0.ffn_gate.0.weight".into(),
            what: "this file keeps each expert in a tensor of its own, a form given up in 2024; \
                   convert the model again for blk.0.ffn_gate_exps.weight"
                .into(),
        });
    }
    let d_ff = if moe.is_none() { keys.d_ff()? } else { 0 };
    let rope = keys.rope(dims.d_k, keys.llama_pairing())?;
    let growing = keys.growing(&rope, dims.d_k)?;
    let windows = windows(&keys, dims.n_layer, Unnamed::All)?;
    let scale = keys.opt_positive(ATTENTION_SCALE)?.map(|scale| scale as f32);

    let mut b = Builder::new(keys.names(), arch, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let rope = b.rope(rope);
    let plain = Attention::plain(rope, dims.d_k);
    let scale = scale.unwrap_or(plain.scale);
    let growing = growing.map_or(rope, |growing| b.rope(growing));
    let x = parts::embed(&mut b, &dims)?;
    for layer in 0..dims.n_layer {
        b.layer(Some(layer as u32));
        let rope = [Some(growing), Some(rope)];
        let attn = Attention { rope, scale, window: windows[layer], ..plain };
        parts::attention(&mut b, &dims, attn, layer, x)?;
        match &moe {
            Some(moe) => parts::experts(&mut b, &dims, moe, layer, x)?,
            None => parts::feed_forward(&mut b, &dims, d_ff, layer, x)?,
        }
    }
    parts::head(b, &dims, x)
}
