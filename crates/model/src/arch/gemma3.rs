//! Gemma 3, text (270M to 27B): norms before and after attention and feed-forward, five layers with a window for each
//! without, two rotary bases, a scaled embedding.
//!
//! Folders store the norms centred on zero; converters to GGUF add the 1.

use checkpoint::Checkpoint;

use super::keys::{Dims, Key, Keys, Unsaid, key};
use super::parts::{self, Head};
use super::windows::{Unnamed, both_ways, windows};
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{Buf, Cache, CacheDecl, Gate, Op, Plan, Read, Rope, RopePairing, Rows};

const ARCH: &str = "gemma3";

/// Tokens see later ones too: a model that makes vectors of texts.
const BOTH_WAYS: Key = key("", &["use_bidirectional_attention"]);
const SCALE_WIDTH: Key = key("", &["query_pre_attn_scalar"]);
const SOFTCAP: Key = key("attn_logit_softcapping", &["attn_logit_softcapping"]);
pub(super) const FINAL_SOFTCAP: Key = key("final_logit_softcapping", &["final_logit_softcapping"]);

const ALIASES: &[Alias] = &[
    ("post_attention_norm", &["post_attention_layernorm"]),
    ("ffn_norm", &["pre_feedforward_layernorm"]),
    ("post_ffw_norm", &["post_feedforward_layernorm"]),
    ("dense_2", &["2_Dense.linear"]),
    ("dense_3", &["3_Dense.linear"]),
];

/// The attention of a layer.
struct Attention {
    cache: Cache,
    rope: Rope,
    scale: f32,
    window: Option<usize>,
    softcap: Option<f32>,
}

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    if keys.opt_bool(BOTH_WAYS)? == Some(true) {
        return build_embedding(checkpoint);
    }
    let (b, dims, x) = layers(&keys, ARCH, false)?;
    let softcap = keys.opt_positive(FINAL_SOFTCAP)?.map(|cap| cap as f32);
    parts::head_with(b, &dims, Head { norm: stored(&keys), softcap, ..Head::PLAIN }, x)
}

/// EmbeddingGemma (arXiv 2509.20354): tokens see each other, and the rows go through two matrices, which
/// sentence-transformers has after the mean. The mean of products is the product of the mean.
pub(super) fn build_embedding(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let (mut b, dims, x) = layers(&keys, "gemma-embedding", true)?;
    b.layer(None);
    let rows = parts::select(&mut b, &dims, x, "last");
    let norm = b.vector_read("output_norm.weight", dims.d_model, stored(&keys))?;
    let rows = b.rms_norm(rows, norm, dims.eps, "final");
    let out = parts::dense_modules(&mut b, rows)?;
    // Files may keep the matrix of logits.
    b.finish(out, |name| name == "output.weight")
}

/// The stored form of norms.
fn stored(keys: &Keys) -> Read {
    if keys.is_folder() { Read::OnePlus } else { Read::Plain }
}

/// Everything before the last norm; `whole` where tokens see each other.
fn layers<'a>(keys: &Keys<'a>, arch: &str, whole: bool) -> Result<(Builder<'a>, Dims, Buf), Error> {
    let dims = keys.dims()?;
    let d_ff = keys.d_ff()?;
    let windows = windows(keys, dims.n_layer, Unnamed::ButEvery(6))?;
    let rope = keys.rope_of(Some("full_attention"), dims.d_k, RopePairing::Half)?;
    let rope_windowed = keys.rope_windowed(dims.d_k, RopePairing::Half, Unsaid::Gemma)?;
    let scale_width = match keys.opt_positive(SCALE_WIDTH)? {
        Some(width) => width,
        // GGUF has no key for it. In the 27B `query_pre_attn_scalar` is d_model / n_head = 168, not d_k = 128 (its
        // config.json); the 62 layers tell it from the other sizes, the same guess as llama.cpp's
        // (src/llama-model.cpp). A model of another depth that was made from the 27B gets a wrong scale here: its
        // folder has the key.
        None if dims.n_layer == 62 && !whole => (dims.d_model / dims.n_head) as f64,
        None => dims.d_k as f64,
    };
    let softcap = keys.opt_positive(SOFTCAP)?;
    let norm = stored(keys);

    let mut b = Builder::new(keys.names(), arch, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let (rope, rope_windowed) = (b.rope(rope), b.rope(rope_windowed));
    let Dims { n_kv, d_k, d_v, .. } = dims;
    let cache = |window| CacheDecl { n_kv, d_k, d_v, v_in_k: false, window };
    let shared = whole.then(|| b.whole().cache(cache(None)));
    let x = parts::embed_scaled(&mut b, &dims, (dims.d_model as f32).sqrt())?;
    for (layer, window) in windows.into_iter().enumerate() {
        b.layer(Some(layer as u32));
        let attn = Attention {
            cache: shared.unwrap_or_else(|| b.cache(cache(window))),
            rope: if window.is_some() { rope_windowed } else { rope },
            scale: 1.0 / scale_width.sqrt() as f32,
            window: if whole { window.map(both_ways) } else { window },
            softcap: softcap.map(|cap| cap as f32),
        };
        attention(&mut b, &dims, norm, attn, layer, x)?;
        let h = parts::norm_read(&mut b, &dims, norm, layer, "ffn_norm", x, "f")?;
        let y = parts::mlp(&mut b, &dims, parts::FFN, (d_ff, Gate::GeluTanh), layer, h, "y")?;
        let y = parts::norm_read(&mut b, &dims, norm, layer, "post_ffw_norm", y, "y_normed")?;
        b.push(Op::Add { x, y });
    }
    Ok((b, dims, x))
}

/// `x += norm(attention(norm(x)))`.
fn attention(b: &mut Builder, dims: &Dims, norm: Read, attn: Attention, layer: usize, x: Buf) -> Result<(), Error> {
    let Dims { d_model, n_head, n_kv, d_k, d_v, eps, .. } = *dims;
    let h = parts::norm_read(b, dims, norm, layer, "attn_norm", x, "h")?;
    let q = parts::linear(b, layer, "attn_q", h, [n_head * d_k, d_model], "q")?;
    let k = parts::linear(b, layer, "attn_k", h, [n_kv * d_k, d_model], "k")?;
    let v = parts::linear(b, layer, "attn_v", h, [n_kv * d_v, d_model], "v")?;
    for (x, name, n_head) in [(q, "attn_q_norm", n_head), (k, "attn_k_norm", n_kv)] {
        let w = b.vector_read(&format!("blk.{layer}.{name}.weight"), d_k, norm)?;
        b.push(Op::HeadNorm { x, w: Some(w), eps, n_head, d_head: d_k });
    }
    for (x, n_head) in [(q, n_head), (k, n_kv)] {
        b.push(Op::Rope { x, rope: attn.rope, n_head, d_head: d_k });
    }
    let Attention { cache, scale, window, softcap, .. } = attn;
    b.push(Op::KvAppend { cache, k, v: Some(v) });
    let a = b.buf("a", Rows::Tokens, n_head * d_v);
    let (chunked, chosen, sinks) = (false, None, None);
    b.push(Op::Attention { cache, q, n_head, scale, window, chunked, softcap, chosen, sinks, out: a });
    let o = parts::linear(b, layer, "attn_output", a, [d_model, n_head * d_v], "o")?;
    let o = parts::norm_read(b, dims, norm, layer, "post_attention_norm", o, "o_normed")?;
    b.push(Op::Add { x, y: o });
    Ok(())
}
