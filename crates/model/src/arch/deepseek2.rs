//! DeepSeek-V2 (and Lite), V3, R1, V3.1, and models of their shape: Cogito-V2, Kimi-K2 to K2.7, Moonlight,
//! GLM-4.7-Flash, Mistral Small 4 (softmax scores, queries that grow with the position), and with sparse attention
//! DeepSeek-V3.2 and GLM-5 to 5.2 ([`super::dsa`]).
//!
//! Multi-head latent attention in its absorbed form (arXiv 2405.04434): the cache holds a latent and one rotated key a
//! position. A head's key is `W_uk·latent`, so its score is `(W_ukᵀ·q)·latent`; its value is `W_uv·latent`, which is
//! taken after the sum over positions.

use checkpoint::Checkpoint;

use super::dsa::{Family, Indexer};
use super::keys::{
    D_K, D_MODEL, D_V, Dims, EPS, Key, Keys, MAX_CONTEXT, MAX_HEAD_WIDTH, MAX_HEADS, MAX_LAYERS, MAX_WIDTH,
    N_CTX_TRAIN, N_HEAD, N_LAYER, key,
};
use super::parts::{self, Head};
use super::shared_moe::{Defaults, SharedMoe};
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{Buf, CacheDecl, GateFactor, Op, Plan, Read, Rope, RopePairing, Rows, Score, Weight};
use crate::rope::Scaling;

const ALIASES: &[Alias] = &[
    ("attn_q_a", &["self_attn.q_a_proj"]),
    ("attn_q_a_norm", &["self_attn.q_a_layernorm"]),
    ("attn_q_b", &["self_attn.q_b_proj"]),
    ("attn_kv_a_mqa", &["self_attn.kv_a_proj_with_mqa"]),
    ("attn_kv_a_norm", &["self_attn.kv_a_layernorm"]),
    ("attn_kv_b", &["self_attn.kv_b_proj"]),
    ("attn_k_b", &["self_attn.embed_q"]),
    ("attn_v_b", &["self_attn.unembed_out"]),
    ("indexer.attn_q_b", &["self_attn.indexer.wq_b"]),
    ("indexer.attn_k", &["self_attn.indexer.wk"]),
    ("indexer.k_norm", &["self_attn.indexer.k_norm"]),
    ("indexer.proj", &["self_attn.indexer.weights_proj"]),
];

const D_Q_LATENT: Key = key("attention.q_lora_rank", &["q_lora_rank"]);
const D_LATENT: Key = key("attention.kv_lora_rank", &["kv_lora_rank"]);
const D_K_HEAD: Key = key("attention.key_length_mla", &[]);
const D_V_HEAD: Key = key("attention.value_length_mla", &["v_head_dim"]);
const D_NOPE: Key = key("", &["qk_nope_head_dim"]);
const D_PE: Key = key("rope.dimension_count", &["qk_rope_head_dim"]);
const INTERLEAVE: Key = key("", &["rope_interleave"]);

/// The original code builds the norms of the latents without the model's epsilon.
const LATENT_EPS: f32 = 1e-6;

/// DeepSeek-V2.
pub(super) fn build_v2(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    build(
        checkpoint,
        "deepseek2",
        Defaults { score: Score::Softmax, renormalise: false, n_dense: Some(0) },
        None,
        false,
    )
}

/// GLM-4.7-Flash.
pub(super) fn build_glm(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    build(checkpoint, "deepseek2", Defaults { score: Score::Sigmoid, renormalise: true, n_dense: Some(1) }, None, false)
}

/// Mistral Small 4.
pub(super) fn build_mistral(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    build(checkpoint, "mistral4", Defaults { score: Score::Softmax, renormalise: true, n_dense: Some(0) }, None, false)
}

/// DeepSeek-V3.2.
pub(super) fn build_v32(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    sparse(checkpoint, "deepseek32", Family { is_interleaved: false, shares: false })
}

/// GLM-5 to 5.2.
pub(super) fn build_glm5(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    sparse(checkpoint, "glm-dsa", Family { is_interleaved: true, shares: true })
}

fn sparse(checkpoint: &Checkpoint, arch: &str, family: Family) -> Result<Plan, Error> {
    let defaults = Defaults { score: Score::Sigmoid, renormalise: true, n_dense: Some(3) };
    build(checkpoint, arch, defaults, Some(family), false)
}

/// DeepSeek-V3 and its successors, and GGUF files of both.
pub(super) fn build_v3(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    v3(checkpoint, false)
}

pub(super) fn build_v3_drafting(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    v3(checkpoint, true)
}

fn v3(checkpoint: &Checkpoint, drafts: bool) -> Result<Plan, Error> {
    // A bias for choosing came with sigmoid scores; old GGUF files of V2 say nothing.
    let keys = Keys::new(checkpoint, ALIASES);
    let n_layer = keys.count(N_LAYER, MAX_LAYERS)?;
    let has_bias = keys.names().has(&format!("blk.{}.exp_probs_b.bias", n_layer - 1));
    let score = if keys.is_folder() || has_bias { Score::Sigmoid } else { Score::Softmax };
    build(checkpoint, "deepseek2", Defaults { score, renormalise: true, n_dense: Some(3) }, None, drafts)
}

/// Widths of latent attention.
pub(super) struct Latent {
    /// Of the query's latent; `None` when queries come straight from the residual stream.
    d_q: Option<usize>,
    d_latent: usize,
    /// Of the part of a head's key that is not rotated, and of the one that is.
    d_nope: usize,
    d_pe: usize,
    /// Of a head's value.
    d_v: usize,
    /// Nothing is rotated without.
    rope: Option<Rope>,
    /// What scales queries by their position.
    growth: Option<Rope>,
    scale: f32,
    /// What chooses the positions that a token sees.
    indexer: Option<Indexer>,
    /// Whether a product of the input, `attn_gate`, becomes a sigmoid factor of each head's sums.
    gated: bool,
}

impl Latent {
    /// Neighbors of a key's part all turn, by the base and the scaling that the file has; heads have gates.
    pub fn turning(self, keys: Keys, b: &mut Builder) -> Result<Latent, Error> {
        let scaling = scaling(keys, self.d_pe)?;
        let rope = Some(b.rope(keys.rope_whole(self.d_pe, RopePairing::Interleaved, scaling)?));
        Ok(Latent { rope, scale: self.scale(scaling), gated: true, ..self })
    }

    /// Factor on the scores.
    fn scale(&self, scaling: Scaling) -> f32 {
        let stretched = if let Scaling::Yarn(yarn) = scaling { yarn.score_factor() } else { 1.0 };
        (stretched / ((self.d_nope + self.d_pe) as f64).sqrt()) as f32
    }
}

fn build(
    checkpoint: &Checkpoint,
    arch: &str,
    defaults: Defaults,
    sparse: Option<Family>,
    drafts: bool,
) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let (dims, latent) = unrotated(keys)?;
    let d_pe = latent.d_pe;
    let moe = SharedMoe::new(keys, defaults)?;
    let scaling = scaling(keys, d_pe)?;
    let pairing = match keys.opt_bool(INTERLEAVE)? {
        Some(false) => RopePairing::Half,
        _ => RopePairing::Interleaved,
    };
    let decl = keys.rope_scaled(d_pe, pairing, scaling)?;
    if sparse.is_some() && latent.d_q.is_none() {
        return Err(keys.error(D_Q_LATENT, "is missing, and positions are chosen by queries' latents".into()));
    }
    let growth = keys.growth(dims.d_k)?;
    let scale = latent.scale(scaling);

    let mut b = Builder::new(keys.names(), arch, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    b.skip_layers_from(dims.n_layer);
    let (rope, growth) = (b.rope(decl.clone()), growth.map(|growth| b.rope(growth)));
    let indexer = sparse.map(|family| Indexer::new(&mut b, &keys, family, dims.n_layer, (rope, &decl))).transpose()?;
    let mut latent = Latent { rope: Some(rope), growth, scale, indexer, ..latent };
    let x = parts::embed(&mut b, &dims)?;
    let mut decoder = |b: &mut Builder, layer: usize, x: Buf| {
        attention(b, &dims, &mut latent, layer, x)?;
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

/// The dimensions of a model with latent attention that rotates nothing.
pub(super) fn unrotated(keys: Keys) -> Result<(Dims, Latent), Error> {
    let (d_nope, d_pe, d_v) = head_widths(keys)?;
    let d_latent = keys.count(D_LATENT, MAX_HEAD_WIDTH)?;
    let dims = Dims {
        n_layer: keys.trunk(keys.count(N_LAYER, MAX_LAYERS)?)?,
        n_vocab: keys.n_vocab()?,
        n_ctx_train: keys.count(N_CTX_TRAIN, MAX_CONTEXT)?,
        d_model: keys.count(D_MODEL, MAX_WIDTH)?,
        n_head: keys.count(N_HEAD, MAX_HEADS)?,
        n_kv: 1,
        d_k: d_latent + d_pe,
        d_v: d_latent,
        eps: keys.eps(EPS)?,
        norm: Read::Plain,
        pre_norm: true,
        post_norm: None,
        residual: 1.0,
    };
    let d_q = Some(keys.count_or_zero(D_Q_LATENT, MAX_WIDTH)?).filter(|&d| d > 0);
    let scale = (1.0 / ((d_nope + d_pe) as f64).sqrt()) as f32;
    Ok((
        dims,
        Latent { d_q, d_latent, d_nope, d_pe, d_v, rope: None, growth: None, scale, indexer: None, gated: false },
    ))
}

/// Widths of a head: key without and with rotation, value. GGUF files from before the latent cache have them as those
/// of plain heads.
fn head_widths(keys: Keys) -> Result<(usize, usize, usize), Error> {
    let d_pe = keys.count(D_PE, MAX_HEAD_WIDTH)?;
    if keys.is_folder() {
        return Ok((keys.count(D_NOPE, MAX_HEAD_WIDTH)?, d_pe, keys.count(D_V_HEAD, MAX_HEAD_WIDTH)?));
    }
    let count = |key, plain| match keys.opt_count(key, MAX_HEAD_WIDTH)? {
        Some(d) => Ok(d),
        None => keys.count(plain, MAX_HEAD_WIDTH),
    };
    let (d_k, d_v) = (count(D_K_HEAD, D_K)?, count(D_V_HEAD, D_V)?);
    match d_k.checked_sub(d_pe) {
        Some(d_nope) if d_nope > 0 => Ok((d_nope, d_pe, d_v)),
        _ => Err(keys.error(D_PE, format!("is {d_pe} of heads of {d_k}"))),
    }
}

/// Returns the file's scaling rule as the original code has it.
fn scaling(keys: Keys, d_pe: usize) -> Result<Scaling, Error> {
    Ok(match keys.scaling(d_pe)? {
        Scaling::Yarn(mut yarn) if !keys.is_folder() => {
            // Files of this architecture hold a tenth of mscale_all_dim, and no mscale: the models have them equal.
            yarn.log_multiplier = f64::from(yarn.log_multiplier as f32 / 0.1);
            yarn.mscale = if yarn.log_multiplier == 0.0 { 1.0 } else { yarn.log_multiplier };
            Scaling::Yarn(yarn)
        }
        scaling => scaling,
    })
}

/// `x += attention(norm(x))`.
pub(super) fn attention(b: &mut Builder, dims: &Dims, latent: &mut Latent, layer: usize, x: Buf) -> Result<(), Error> {
    let Dims { d_model, n_head, d_k, eps, .. } = *dims;
    let Latent { d_latent, d_nope, d_pe, d_v, rope, scale, .. } = *latent;
    let t = Rows::Tokens;
    let norm = b.vector(&format!("blk.{layer}.attn_norm.weight"), d_model)?;
    let h = b.rms_norm(x, norm, eps, "h");

    // The two projections that read `h` stand beside each other, so that passes join them.
    let (d_q, name) = latent.d_q.map_or((n_head * (d_nope + d_pe), "attn_q"), |d_q| (d_q, "attn_q_a"));
    let q = parts::linear(b, layer, name, h, [d_q, d_model], "q")?;
    let kv = parts::linear(b, layer, "attn_kv_a_mqa", h, [d_k, d_model], "kv")?;

    let (mut q, mut chosen) = (q, None);
    if latent.d_q.is_some() {
        let norm = b.vector(&format!("blk.{layer}.attn_q_a_norm.weight"), d_q)?;
        let low = b.rms_norm(q, norm, LATENT_EPS, "q_norm");
        q = parts::linear(b, layer, "attn_q_b", low, [n_head * (d_nope + d_pe), d_q], "q_heads")?;
        if let Some(indexer) = &mut latent.indexer {
            chosen = Some(indexer.choose(b, layer, (h, d_model), (low, d_q))?);
        }
    }
    let (q_nope, q_pe) = (b.buf("q_nope", t, n_head * d_nope), b.buf("q_pe", t, n_head * d_pe));
    b.push(Op::SplitHeads { x: q, n_head, parts: vec![(d_nope, q_nope), (d_pe, q_pe)] });

    let (c, k_pe) = (b.buf("c", t, d_latent), b.buf("k_pe", t, d_pe));
    b.push(Op::SplitHeads { x: kv, n_head: 1, parts: vec![(d_latent, c), (d_pe, k_pe)] });
    let norm = b.vector(&format!("blk.{layer}.attn_kv_a_norm.weight"), d_latent)?;
    let c = b.rms_norm(c, norm, LATENT_EPS, "latent");

    if let Some(rope) = rope {
        b.push(Op::Rope { x: q_pe, rope, n_head, d_head: d_pe });
        b.push(Op::Rope { x: k_pe, rope, n_head: 1, d_head: d_pe });
    }
    let (w_uk, transposed, w_uv) = head_matrices(b, dims, latent, layer)?;
    let q_latent = b.buf("q_latent", t, n_head * d_latent);
    b.push(Op::HeadLinear { x: q_nope, w: w_uk, transposed, out: q_latent });
    let (q, k) = (b.buf("qs", t, n_head * d_k), b.buf("k", t, d_k));
    b.push(Op::JoinHeads { parts: vec![(d_latent, q_latent), (d_pe, q_pe)], n_head, out: q });
    b.push(Op::JoinHeads { parts: vec![(d_latent, c), (d_pe, k_pe)], n_head: 1, out: k });

    let cache = b.cache(CacheDecl { n_kv: 1, d_k, d_v: d_latent, v_in_k: true, window: None });
    b.push(Op::KvAppend { cache, k, v: None });
    if let Some(rope) = latent.growth {
        b.push(Op::Rope { x: q, rope, n_head, d_head: d_k });
    }
    let o_latent = b.buf("o_latent", t, n_head * d_latent);
    b.push(Op::Attention {
        cache,
        q,
        n_head,
        scale,
        window: None,
        chunked: false,
        softcap: None,
        chosen,
        sinks: None,
        out: o_latent,
    });
    let a = b.buf("a", t, n_head * d_v);
    b.push(Op::HeadLinear { x: o_latent, w: w_uv, transposed: false, out: a });
    if latent.gated {
        let gate = parts::linear(b, layer, "attn_gate", h, [n_head, d_model], "g")?;
        b.push(Op::GateBy { x: a, gate, factor: GateFactor::Sigmoid });
    }
    let y = parts::linear(b, layer, "attn_output", a, [d_model, n_head * d_v], "o")?;
    b.push(Op::Add { x, y });
    Ok(())
}

/// `W_uk`, whether it is stored transposed, and `W_uv`: in two tensors, or head by head in one. Some
/// converters wrote both forms; then the whole one is not read.
fn head_matrices(b: &mut Builder, dims: &Dims, latent: &Latent, layer: usize) -> Result<(Weight, bool, Weight), Error> {
    let Latent { d_latent, d_nope, d_v, .. } = *latent;
    let n_head = dims.n_head;
    let whole = format!("blk.{layer}.attn_kv_b.weight");
    let split = format!("blk.{layer}.attn_k_b.weight");
    if b.has(&split) || !b.has(&whole) {
        b.skip(&whole);
        let w_uk = b.weight(&split, &[n_head, d_latent, d_nope])?;
        let w_uv = b.weight(&format!("blk.{layer}.attn_v_b.weight"), &[n_head, d_v, d_latent])?;
        return Ok((w_uk, false, w_uv));
    }
    let rows = [d_nope, d_v];
    let w_uk = b.head_rows(&whole, n_head, &rows, 0, d_latent)?;
    let w_uv = b.head_rows(&whole, n_head, &rows, 1, d_latent)?;
    Ok((w_uk, true, w_uv))
}
