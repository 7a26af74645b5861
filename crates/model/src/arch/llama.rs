//! Llama and what shares its shape (Mistral, SmolLM, Mixtral): interleaved rope, biases and experts where the file has
//! them. Converters permute the rows of q and k, so that the pairs of a head stand next to each other.

use checkpoint::Checkpoint;

use super::keys::Keys;
use super::parts::{self, Attention};
use crate::Error;
use crate::plan::build::Builder;
use crate::plan::{Plan, RopePairing};

const ARCH: &str = "llama";

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ARCH);
    let dims = keys.dims()?;
    let moe = keys.n_expert()?.map(|n_expert| keys.moe(n_expert)).transpose()?;
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
    let rope = keys.rope(&dims, RopePairing::Interleaved)?;
    let scale = keys.opt_positive("attention.scale")?.map(|scale| scale as f32);

    let mut b = Builder::new(checkpoint, ARCH, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let scale = scale.unwrap_or(1.0 / (dims.d_k as f32).sqrt());
    let how = Attention { rope: b.rope(rope), qk_norm: false, scale };
    let x = parts::embed(&mut b, &dims)?;
    for layer in 0..dims.n_layer {
        b.layer(Some(layer as u32));
        parts::attention(&mut b, &dims, how, layer, x)?;
        match &moe {
            Some(moe) => parts::experts(&mut b, &dims, moe, layer, x)?,
            None => parts::feed_forward(&mut b, &dims, d_ff, layer, x)?,
        }
    }
    parts::head(b, &dims, x)
}
