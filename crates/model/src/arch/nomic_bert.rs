//! Nomic's BERT (arXiv 2402.01613): an encoder of whole texts like BERT, with rotated queries and keys in place of a
//! table of positions, a gated feed-forward, and biases in norms alone.
//!
//! Folders have the names and keys of the first code or those of transformers.

use checkpoint::Checkpoint;

use super::bert::add_segments;
use super::keys::{Dims, Key, Keys, MAX_CONTEXT, MAX_LAYERS, key};
use super::parts::{self, Attention, FFN};
use crate::Error;
use crate::error::printable;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{CacheDecl, Gate, Op, Plan, RopePairing};

const EPS: Key = key("attention.layer_norm_epsilon", &["layer_norm_eps", "layer_norm_epsilon"]);
/// The first code stretches the rotations of texts longer than this.
const N_CTX_FIRST: Key = key("", &["max_trained_positions"]);
const ACT: Key = key("", &["hidden_act", "activation_function"]);
const EXPERTS_EVERY: Key = key("moe_every_n_layers", &["moe_every_n_layers"]);
/// What the first code can do and no such model does.
const OTHERS: [Key; 3] =
    [key("", &["prenorm"]), key("attention.causal", &["causal"]), key("", &["rotary_emb_interleaved"])];
const ROTARY_SHARE: Key = key("", &["rotary_emb_fraction"]);

const ALIASES: &[Alias] = &[
    ("token_embd", &["embeddings.word_embeddings"]),
    ("token_types", &["embeddings.token_type_embeddings"]),
    ("token_embd_norm", &["emb_ln", "embeddings.LayerNorm"]),
    ("attn_qkv", &["encoder.layers.#.attn.Wqkv"]),
    ("attn_output", &["encoder.layers.#.attn.out_proj"]),
    ("attn_output_norm", &["encoder.layers.#.norm1", "post_attention_layernorm"]),
    ("ffn_up", &["encoder.layers.#.mlp.fc11"]),
    ("ffn_gate", &["encoder.layers.#.mlp.fc12"]),
    ("ffn_down", &["encoder.layers.#.mlp.fc2"]),
    ("layer_output_norm", &["encoder.layers.#.norm2", "post_mlp_layernorm"]),
];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    plain(&keys)?;
    let mut dims = keys.dims_by(EPS)?;
    if let Some(n) = keys.opt_count(N_CTX_FIRST, MAX_CONTEXT)? {
        dims.n_ctx_train = dims.n_ctx_train.min(n);
    }
    let d_ff = keys.d_ff()?;
    let rope = keys.rope(dims.d_k, RopePairing::Half)?;

    let mut b = Builder::new(keys.names(), "nomic-bert", dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let rope = b.rope(rope);
    let Dims { n_kv, d_k, d_v, eps, .. } = dims;
    let cache = b.whole().cache(CacheDecl { n_kv, d_k, d_v, v_in_k: false, window: None });
    let x = parts::embed(&mut b, &dims)?;
    add_segments(&mut b, dims.d_model, x)?;
    let mut x = b.layer_norm(x, "token_embd_norm", eps, "normed")?;
    for layer in 0..dims.n_layer {
        b.layer(Some(layer as u32));
        let attn = Attention { cache: Some(cache), ..Attention::plain(rope, d_k) };
        let y = parts::attend(&mut b, &dims, attn, layer, x)?;
        b.push(Op::Add { x, y });
        x = b.layer_norm(x, &format!("blk.{layer}.attn_output_norm"), eps, "normed")?;
        let y = parts::mlp(&mut b, &dims, FFN, (d_ff, Gate::Silu), layer, x, "y")?;
        b.push(Op::Add { x, y });
        x = b.layer_norm(x, &format!("blk.{layer}.layer_output_norm"), eps, "normed")?;
    }
    b.layer(None);
    let rows = parts::select(&mut b, &dims, x, "rows");
    // Embeddings are pooled without the layers that were trained to tell sentences and words.
    b.finish(rows, |name| ["pooler.", "cls.", "bert.pooler."].iter().any(|part| name.starts_with(part)))
}

/// Refuses what other models of the first code have.
fn plain(keys: &Keys) -> Result<(), Error> {
    if keys.count_or_zero(EXPERTS_EVERY, MAX_LAYERS)? != 0 {
        return Err(keys.error(EXPERTS_EVERY, "is set, and experts of encoders are not supported".into()));
    }
    for key in OTHERS {
        if keys.opt_bool(key)? == Some(true) {
            return Err(keys.error(key, "is true, expected false".into()));
        }
    }
    if let Some(share) = keys.opt_positive(ROTARY_SHARE)?.filter(|&share| share != 1.0) {
        return Err(keys.error(ROTARY_SHARE, format!("is {share}, expected 1")));
    }
    match keys.opt_str(ACT)? {
        None | Some("swiglu" | "silu") => Ok(()),
        Some(other) => Err(keys.error(ACT, format!("is {}, expected swiglu", printable(other)))),
    }
}
