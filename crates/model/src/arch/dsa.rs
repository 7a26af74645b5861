//! The indexer of DeepSeek's sparse attention (DeepSeek-V3.2, arXiv 2512.02556; GLM-5): a token sees the `n` positions
//! that a few light heads rank best, by separate keys in a separate cache.
//!
//! The original code turns queries and keys by a Hadamard matrix and scales scores and head weights. Neither changes
//! which positions are best.

use checkpoint::{Value, ValueKind};

use super::keys::{Key, Keys, MAX_HEAD_WIDTH, MAX_HEADS, MAX_LAYERS, N_CTX_TRAIN, key};
use super::parts;
use crate::Error;
use crate::plan::build::Builder;
use crate::plan::{Buf, CacheDecl, Op, Rope, RopeDecl, RopePairing, Rows};

const N_HEAD: Key = key("attention.indexer.head_count", &["index_n_heads"]);
const D_HEAD: Key = key("attention.indexer.key_length", &["index_head_dim"]);
const N_CHOSEN: Key = key("attention.indexer.top_k", &["index_topk"]);
const INTERLEAVE: Key = key("", &["indexer_rope_interleave"]);
/// Layers that choose by themselves, a flag each; folders have words, or letters.
const TYPES: Key = key("attention.indexer.types", &["indexer_types", "index_topk_pattern"]);
/// Where nothing lists them, one layer in this number chooses.
const EVERY: Key = key("", &["index_topk_freq"]);
/// The layer, counted from 1, up to which all do.
const FIRST: Key = key("", &["index_skip_topk_offset"]);

/// Most positions that a token may choose.
const MAX_CHOSEN: usize = 1 << 16;
/// GGUF files with this context are of GLM-5.2, of which early ones do not list the layers.
const CTX_OF_SHARING: usize = 1 << 20;
/// Of the norm of keys, fixed in the original code.
const EPS: f32 = 1e-6;

/// What the families do differently.
#[derive(Clone, Copy)]
pub(super) struct Family {
    /// Index heads rotate neighboring dims, where files do not say it.
    pub is_interleaved: bool,
    /// Layers may see the positions that an earlier one chose.
    pub shares: bool,
}

/// The indexers of a model, written layer after layer.
pub(super) struct Indexer {
    n_head: usize,
    d_head: usize,
    n_chosen: usize,
    /// Layers that choose, `[n_layer]`.
    own: Vec<bool>,
    /// Of the first dims of a head.
    rope: Rope,
    /// Of the last layer that chose.
    chosen: Option<Buf>,
}

impl Indexer {
    /// Reads the keys of a model whose heads rotate by `rope`, as those of the indexer do with their own pairing.
    pub fn new(
        b: &mut Builder,
        keys: &Keys,
        family: Family,
        n_layer: usize,
        (rope, decl): (Rope, &RopeDecl),
    ) -> Result<Indexer, Error> {
        let pairing = match keys.opt_bool(INTERLEAVE)?.unwrap_or(family.is_interleaved) {
            true => RopePairing::Interleaved,
            false => RopePairing::Half,
        };
        let own = if family.shares { own_layers(keys, n_layer)? } else { vec![true; n_layer] };
        Ok(Indexer {
            n_head: keys.count(N_HEAD, MAX_HEADS)?,
            d_head: keys.count(D_HEAD, MAX_HEAD_WIDTH)?,
            n_chosen: keys.count(N_CHOSEN, MAX_CHOSEN)?,
            own,
            rope: if pairing == decl.pairing { rope } else { b.rope(RopeDecl { pairing, ..decl.clone() }) },
            chosen: None,
        })
    }

    /// Returns the positions that a layer sees, u32 `[T, n_chosen]`, by its normed input and the normed latent of its
    /// queries with their widths; or those of an earlier layer.
    pub fn choose(
        &mut self,
        b: &mut Builder,
        layer: usize,
        (h, d_model): (Buf, usize),
        (low, d_q): (Buf, usize),
    ) -> Result<Buf, Error> {
        let Indexer { n_head, d_head, n_chosen, rope, .. } = *self;
        let name = |name: &str| format!("blk.{layer}.indexer.{name}");
        if let (false, Some(chosen)) = (self.own[layer], self.chosen) {
            // Files may keep what the layer has no use for.
            for tensor in ["attn_q_b.weight", "attn_k.weight", "k_norm.weight", "k_norm.bias", "proj.weight"] {
                b.skip(&name(tensor));
            }
            return Ok(chosen);
        }
        let q = parts::linear(b, layer, "indexer.attn_q_b", low, [n_head * d_head, d_q], "index_q")?;
        let k = parts::linear(b, layer, "indexer.attn_k", h, [d_head, d_model], "index_k_raw")?;
        let weights = parts::linear(b, layer, "indexer.proj", h, [n_head, d_model], "index_weights")?;
        let k = b.layer_norm(k, &name("k_norm"), EPS, "index_k")?;
        b.push(Op::Rope { x: q, rope, n_head, d_head });
        b.push(Op::Rope { x: k, rope, n_head: 1, d_head });
        let cache = b.cache(CacheDecl { n_kv: 1, d_k: d_head, d_v: d_head, v_in_k: true, window: None });
        b.push(Op::KvAppend { cache, k, v: None });
        let out = b.ids("chosen", Rows::Tokens, n_chosen);
        b.push(Op::Choose { cache, q, weights, out });
        self.chosen = Some(out);
        Ok(out)
    }
}

/// Which layers choose; the first does.
fn own_layers(keys: &Keys, n_layer: usize) -> Result<Vec<bool>, Error> {
    let name = keys.name(TYPES).unwrap_or_default();
    let word = |layer: usize, word: &[u8]| match word {
        b"full" | b"F" => Ok(true),
        b"shared" | b"S" => Ok(false),
        _ => Err(keys.error(TYPES, format!("has no known word for layer {layer}, expected full or shared"))),
    };
    let own = match keys.meta().get(&name) {
        Some(Value::Strings(words)) => words.iter().enumerate().map(|(i, w)| word(i, w)).collect::<Result<_, _>>()?,
        Some(Value::Numbers(list)) if list.element() == ValueKind::Bool => keys.meta().bools(&name)?,
        Some(Value::Numbers(_)) => keys.meta().u32s(&name)?.into_iter().map(|n| n != 0).collect(),
        Some(_) => {
            let letters = keys.meta().str(&name)?.as_bytes().chunks(1);
            letters.enumerate().map(|(i, letter)| word(i, letter)).collect::<Result<_, _>>()?
        }
        None => {
            let is_sharing = !keys.is_folder() && keys.count(N_CTX_TRAIN, usize::MAX)? >= CTX_OF_SHARING;
            let (every, first) = if is_sharing { (4, 3) } else { (1, 2) };
            let every = keys.opt_count(EVERY, MAX_LAYERS)?.unwrap_or(every);
            let first = keys.opt_count(FIRST, MAX_LAYERS)?.unwrap_or(first);
            (0..n_layer).map(|layer| (layer + 1).saturating_sub(first).is_multiple_of(every)).collect()
        }
    };
    let own = keys.of_layers(&name, "layers", own, n_layer)?;
    match own.first() {
        Some(true) => Ok(own),
        _ => Err(keys.error(TYPES, "has no indexer in the first layer, which has no earlier choice".into())),
    }
}
