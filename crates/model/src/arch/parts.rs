//! The parts that architectures share, as plain ops: embedding, attention, feed-forward, experts, head.
//!
//! Tensor names are GGUF's: `blk.LAYER.NAME.weight`.

use super::keys::{Dims, MoeDims};
use crate::Error;
use crate::plan::build::Builder;
use crate::plan::{Buf, CacheDecl, ExpertBiases, Gate, Op, Plan, Read, Rope, Router, Rows, Weight};

/// Divisors of the rotary frequencies; they are in the rope's table already when ops run.
pub(super) const ROPE_FREQS: &str = "rope_freqs.weight";

/// What differs between attention layers.
#[derive(Clone, Copy)]
pub(super) struct Attention {
    pub rope: Rope,
    /// Whether q and k heads are normalised before they are rotated.
    pub qk_norm: bool,
    /// Factor on the scores.
    pub scale: f32,
    /// Sees only the last so many positions, itself included.
    pub window: Option<usize>,
    /// Whether every head has a score that nothing is behind (gpt-oss).
    pub sinks: bool,
}

/// The experts of a layer, apart from what chooses them.
#[derive(Clone, Copy)]
pub(super) struct Stack {
    pub n_expert: usize,
    pub d_ff: usize,
    pub act: Gate,
    /// Whether every product has a bias.
    pub biases: bool,
}

/// `x = table[id]`.
pub(super) fn embed(b: &mut Builder, dims: &Dims) -> Result<Buf, Error> {
    embed_scaled(b, dims, 1.0)
}

/// `x = table[id] · scale`.
pub(super) fn embed_scaled(b: &mut Builder, dims: &Dims, scale: f32) -> Result<Buf, Error> {
    let table = b.weight("token_embd.weight", &[dims.n_vocab, dims.d_model])?;
    let x = b.buf("x", Rows::Tokens, dims.d_model);
    b.push(Op::Embed { table, scale, out: x });
    Ok(x)
}

/// `x += attention(norm(x))`.
pub(super) fn attention(b: &mut Builder, dims: &Dims, how: Attention, layer: usize, x: Buf) -> Result<(), Error> {
    let Dims { d_model, n_head, n_kv, d_k, d_v, eps, .. } = *dims;
    let norm = b.vector(&format!("blk.{layer}.attn_norm.weight"), d_model)?;
    let h = b.rms_norm(x, norm, eps, "h");
    let q = linear(b, layer, "attn_q", h, [n_head * d_k, d_model], "q")?;
    let k = linear(b, layer, "attn_k", h, [n_kv * d_k, d_model], "k")?;
    let v = linear(b, layer, "attn_v", h, [n_kv * d_v, d_model], "v")?;
    if how.qk_norm {
        for (x, name, n_head) in [(q, "attn_q_norm", n_head), (k, "attn_k_norm", n_kv)] {
            let w = b.vector(&format!("blk.{layer}.{name}.weight"), d_k)?;
            b.push(Op::HeadNorm { x, w: Some(w), eps, n_head, d_head: d_k });
        }
    }
    for (x, n_head) in [(q, n_head), (k, n_kv)] {
        b.push(Op::Rope { x, rope: how.rope, n_head, d_head: d_k });
    }
    let cache = b.cache(CacheDecl { n_kv, d_k, d_v, v_in_k: false, window: how.window });
    b.push(Op::KvAppend { cache, k, v: Some(v) });
    let sinks = match how.sinks {
        true => Some(b.vector(&format!("blk.{layer}.attn_sinks.weight"), n_head)?),
        false => None,
    };
    let a = b.buf("a", Rows::Tokens, n_head * d_v);
    let Attention { scale, window, .. } = how;
    b.push(Op::Attention { cache, q, n_head, scale, window, softcap: None, sinks, out: a });
    let o = linear(b, layer, "attn_output", a, [d_model, n_head * d_v], "o")?;
    b.push(Op::Add { x, y: o });
    Ok(())
}

/// `x += down(silu(gate(norm(x))) ⊙ up(norm(x)))`.
pub(super) fn feed_forward(b: &mut Builder, dims: &Dims, d_ff: usize, layer: usize, x: Buf) -> Result<(), Error> {
    let norm = b.vector(&format!("blk.{layer}.ffn_norm.weight"), dims.d_model)?;
    let h = b.rms_norm(x, norm, dims.eps, "f");
    let y = mlp(b, dims, (d_ff, Gate::Silu), layer, h, "y")?;
    b.push(Op::Add { x, y });
    Ok(())
}

/// `out = down(act(gate(h)) ⊙ up(h))`.
pub(super) fn mlp(
    b: &mut Builder,
    dims: &Dims,
    (d_ff, act): (usize, Gate),
    layer: usize,
    h: Buf,
    out: &str,
) -> Result<Buf, Error> {
    let gate = linear(b, layer, "ffn_gate", h, [d_ff, dims.d_model], "gate")?;
    let up = linear(b, layer, "ffn_up", h, [d_ff, dims.d_model], "up")?;
    let hidden = b.buf("act", Rows::Tokens, d_ff);
    b.push(Op::GatedAct { gate, up, act, out: hidden });
    linear(b, layer, "ffn_down", hidden, [dims.d_model, d_ff], out)
}

/// `x += Σ experts(norm(x))`.
pub(super) fn experts(b: &mut Builder, dims: &Dims, moe: &MoeDims, layer: usize, x: Buf) -> Result<(), Error> {
    let MoeDims { n_expert, n_used, d_ff, renormalise, scale } = *moe;
    let d_model = dims.d_model;
    let norm = b.vector(&format!("blk.{layer}.ffn_norm.weight"), d_model)?;
    let h = b.rms_norm(x, norm, dims.eps, "f");
    let logits = linear(b, layer, "ffn_gate_inp", h, [n_expert, d_model], "router")?;
    let ids = b.ids("ids", Rows::Tokens, n_used);
    let weights = b.buf("weights", Rows::Tokens, n_used);
    b.push(Op::Route { logits, router: Router::softmax(renormalise, scale), n_used, ids, weights });
    let how = Stack { n_expert, d_ff, act: Gate::Silu, biases: false };
    let y = stack(b, dims, how, layer, h, (ids, n_used))?;
    b.push(Op::Combine { x, add: true, y, weights, norm: None });
    Ok(())
}

/// `y[t, s] = expert ids[t, s] of h[t]`, for `n_used` experts a token.
pub(super) fn stack(
    b: &mut Builder,
    dims: &Dims,
    how: Stack,
    layer: usize,
    h: Buf,
    (ids, n_used): (Buf, usize),
) -> Result<Buf, Error> {
    let Stack { n_expert, d_ff, act, biases } = how;
    let d_model = dims.d_model;
    let mut weight = |name: &str, shape: &[usize]| b.weight(&format!("blk.{layer}.{name}"), shape);
    let gate = weight("ffn_gate_exps.weight", &[n_expert, d_ff, d_model])?;
    let up = weight("ffn_up_exps.weight", &[n_expert, d_ff, d_model])?;
    let down = weight("ffn_down_exps.weight", &[n_expert, d_model, d_ff])?;
    let biases = match biases {
        true => Some(ExpertBiases {
            gate: weight("ffn_gate_exps.bias", &[n_expert, d_ff])?,
            up: weight("ffn_up_exps.bias", &[n_expert, d_ff])?,
            down: weight("ffn_down_exps.bias", &[n_expert, d_model])?,
        }),
        false => None,
    };
    let hidden = b.buf("hidden", Rows::Slots(n_used), d_ff);
    let y = b.buf("y", Rows::Slots(n_used), d_model);
    b.push(Op::Experts { x: h, ids, gate, up, down, biases, act, hidden, out: y });
    Ok(y)
}

/// How the logits come out of the residual stream.
#[derive(Clone, Copy)]
pub(super) struct Head {
    /// How the last norm is stored.
    pub norm: Read,
    /// `softcap · tanh(logit / softcap)`.
    pub softcap: Option<f32>,
}

/// Logits of the asked rows; a file without `output.weight` uses the table of embeddings again.
pub(super) fn head(b: Builder, dims: &Dims, x: Buf) -> Result<Plan, Error> {
    head_with(b, dims, Head { norm: Read::Plain, softcap: None }, x)
}

/// As [`head`], with what differs.
pub(super) fn head_with(mut b: Builder, dims: &Dims, how: Head, x: Buf) -> Result<Plan, Error> {
    b.layer(None);
    let last = b.buf("last", Rows::Outputs, dims.d_model);
    b.push(Op::Select { x, out: last });
    let norm = b.vector_read("output_norm.weight", dims.d_model, how.norm)?;
    let h = b.rms_norm(last, norm, dims.eps, "final");
    let output = if b.has("output.weight") { "output.weight" } else { "token_embd.weight" };
    let w = b.weight(output, &[dims.n_vocab, dims.d_model])?;
    let bias = b.opt_vector("output.bias", dims.n_vocab)?;
    let logits = b.linear(h, w, bias, "logits");
    if let Some(cap) = how.softcap {
        b.push(Op::Softcap { x: logits, cap });
    }
    // Older converters also wrote each layer's rotary table, which the keys give as well.
    b.finish(logits, |name| {
        name == ROPE_FREQS || name.ends_with(".attn_rot_embd") || name.ends_with(".rot_embd.weight")
    })
}

/// `out = x·wᵀ` with `blk.LAYER.NAME.weight` of shape `[n, k]`, and its bias where the file has one.
pub(super) fn linear(
    b: &mut Builder,
    layer: usize,
    name: &str,
    x: Buf,
    shape: [usize; 2],
    out: &str,
) -> Result<Buf, Error> {
    let w: Weight = b.weight(&format!("blk.{layer}.{name}.weight"), &shape)?;
    let bias = b.opt_vector(&format!("blk.{layer}.{name}.bias"), shape[0])?;
    Ok(b.linear(x, w, bias, out))
}
