//! The parts that architectures share, as plain ops: embedding, attention, feed-forward, experts, head.
//!
//! Tensor names are GGUF's: `blk.LAYER.NAME.weight`.

use super::keys::{Dims, MoeDims};
use crate::Error;
use crate::plan::build::Builder;
use crate::plan::{Buf, CacheDecl, ExpertBiases, Gate, Op, Plan, Read, Rope, Router, Rows, Weight};

/// Divisors of the rotary frequencies, which the rope's table includes.
pub(super) const ROPE_FREQS: &str = "rope_freqs.weight";

/// An attention layer.
#[derive(Clone, Copy)]
pub(super) struct Attention {
    pub rope: Rope,
    /// Normalise the heads of q and k before their rotation.
    pub qk_norm: bool,
    /// Factor on the scores.
    pub scale: f32,
    /// Positions that a query sees, the last of which is its own; all of them without a window.
    pub window: Option<usize>,
    /// Attention sinks: one extra logit per head, without a value (gpt-oss).
    pub sinks: bool,
}

/// The experts of a layer, without their router.
#[derive(Clone, Copy)]
pub(super) struct Stack {
    pub n_expert: usize,
    pub d_ff: usize,
    pub act: Gate,
    /// Every product has a bias.
    pub biases: bool,
}

impl Stack {
    /// `down(silu(gate(h)) ⊙ up(h))` without biases.
    pub fn plain(n_expert: usize, d_ff: usize) -> Stack {
        Stack { n_expert, d_ff, act: Gate::Silu, biases: false }
    }
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
pub(super) fn attention(b: &mut Builder, dims: &Dims, attn: Attention, layer: usize, x: Buf) -> Result<(), Error> {
    let Dims { d_model, n_head, n_kv, d_k, d_v, eps, .. } = *dims;
    let h = norm(b, dims, layer, "attn_norm", x, "h")?;
    let q = linear(b, layer, "attn_q", h, [n_head * d_k, d_model], "q")?;
    let k = linear(b, layer, "attn_k", h, [n_kv * d_k, d_model], "k")?;
    let v = linear(b, layer, "attn_v", h, [n_kv * d_v, d_model], "v")?;
    if attn.qk_norm {
        for (x, name, n_head) in [(q, "attn_q_norm", n_head), (k, "attn_k_norm", n_kv)] {
            let w = b.vector(&format!("blk.{layer}.{name}.weight"), d_k)?;
            b.push(Op::HeadNorm { x, w: Some(w), eps, n_head, d_head: d_k });
        }
    }
    for (x, n_head) in [(q, n_head), (k, n_kv)] {
        b.push(Op::Rope { x, rope: attn.rope, n_head, d_head: d_k });
    }
    let cache = b.cache(CacheDecl { n_kv, d_k, d_v, v_in_k: false, window: attn.window });
    b.push(Op::KvAppend { cache, k, v: Some(v) });
    let sinks = match attn.sinks {
        true => Some(b.vector(&format!("blk.{layer}.attn_sinks.weight"), n_head)?),
        false => None,
    };
    let a = b.buf("a", Rows::Tokens, n_head * d_v);
    let Attention { scale, window, .. } = attn;
    b.push(Op::Attention { cache, q, n_head, scale, window, softcap: None, sinks, out: a });
    let o = linear(b, layer, "attn_output", a, [d_model, n_head * d_v], "o")?;
    b.push(Op::Add { x, y: o });
    Ok(())
}

/// `x += down(silu(gate(norm(x))) ⊙ up(norm(x)))`.
pub(super) fn feed_forward(b: &mut Builder, dims: &Dims, d_ff: usize, layer: usize, x: Buf) -> Result<(), Error> {
    let h = norm(b, dims, layer, "ffn_norm", x, "f")?;
    let y = mlp(b, dims, FFN, (d_ff, Gate::Silu), layer, h, "y")?;
    b.push(Op::Add { x, y });
    Ok(())
}

/// Gate, up and down of the dense feed-forward, and of shared experts.
pub(super) const FFN: [&str; 3] = ["ffn_gate", "ffn_up", "ffn_down"];
pub(super) const SHARED: [&str; 3] = ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"];

/// `out = down(act(gate(h)) ⊙ up(h))` by the tensors `names`.
pub(super) fn mlp(
    b: &mut Builder,
    dims: &Dims,
    names: [&str; 3],
    (d_ff, act): (usize, Gate),
    layer: usize,
    h: Buf,
    out: &str,
) -> Result<Buf, Error> {
    let [gate, up, down] = names;
    let gate = linear(b, layer, gate, h, [d_ff, dims.d_model], "gate")?;
    let up = linear(b, layer, up, h, [d_ff, dims.d_model], "up")?;
    let hidden = b.buf("act", Rows::Tokens, d_ff);
    b.push(Op::GatedAct { gate, up, act, out: hidden });
    linear(b, layer, down, hidden, [dims.d_model, d_ff], out)
}

/// `x += Σ experts(norm(x))`.
pub(super) fn experts(b: &mut Builder, dims: &Dims, moe: &MoeDims, layer: usize, x: Buf) -> Result<(), Error> {
    let MoeDims { n_expert, n_used, d_ff, renormalise, scale } = *moe;
    let h = norm(b, dims, layer, "ffn_norm", x, "f")?;
    let logits = linear(b, layer, "ffn_gate_inp", h, [n_expert, dims.d_model], "router")?;
    let ids = b.ids("ids", Rows::Tokens, n_used);
    let weights = b.buf("weights", Rows::Tokens, n_used);
    b.push(Op::Route { logits, router: Router::softmax(renormalise, scale), n_used, ids, weights });
    let y = stack(b, dims, Stack::plain(n_expert, d_ff), layer, h, (ids, n_used))?;
    b.push(Op::Combine { x, add: true, y, weights, norm: None });
    Ok(())
}

/// `y[t, s] = expert ids[t, s] of h[t]`, for `n_used` experts a token.
pub(super) fn stack(
    b: &mut Builder,
    dims: &Dims,
    stack: Stack,
    layer: usize,
    h: Buf,
    (ids, n_used): (Buf, usize),
) -> Result<Buf, Error> {
    let Stack { n_expert, d_ff, act, biases } = stack;
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

/// The last norm and the logits.
#[derive(Clone, Copy)]
pub(super) struct Head {
    /// The stored form of the last norm.
    pub norm: Read,
    /// `softcap · tanh(logit / softcap)`.
    pub softcap: Option<f32>,
}

/// Logits of the batch's rows; a file without `output.weight` ties them to the table of embeddings.
pub(super) fn head(b: Builder, dims: &Dims, x: Buf) -> Result<Plan, Error> {
    head_with(b, dims, Head { norm: Read::Plain, softcap: None }, x)
}

/// As [`head`], with another norm or a softcap.
pub(super) fn head_with(mut b: Builder, dims: &Dims, head: Head, x: Buf) -> Result<Plan, Error> {
    b.layer(None);
    let last = b.buf("last", Rows::Outputs, dims.d_model);
    b.push(Op::Select { x, out: last });
    let norm = b.vector_read("output_norm.weight", dims.d_model, head.norm)?;
    let h = b.rms_norm(last, norm, dims.eps, "final");
    let output = if b.has("output.weight") { "output.weight" } else { "token_embd.weight" };
    let w = b.weight(output, &[dims.n_vocab, dims.d_model])?;
    let bias = b.opt_vector("output.bias", dims.n_vocab)?;
    let logits = b.linear(h, w, bias, "logits");
    if let Some(cap) = head.softcap {
        b.push(Op::Softcap { x: logits, cap });
    }
    // Older converters also wrote each layer's rotary table, which the keys give as well.
    b.finish(logits, |name| {
        name == ROPE_FREQS || name.ends_with(".attn_rot_embd") || name.ends_with(".rot_embd.weight")
    })
}

/// `norm(x)` by `blk.LAYER.NAME.weight`.
pub(super) fn norm(b: &mut Builder, dims: &Dims, layer: usize, name: &str, x: Buf, out: &str) -> Result<Buf, Error> {
    norm_read(b, dims, Read::Plain, layer, name, x, out)
}

/// As [`norm`], by a vector that is stored in another form.
pub(super) fn norm_read(
    b: &mut Builder,
    dims: &Dims,
    read: Read,
    layer: usize,
    name: &str,
    x: Buf,
    out: &str,
) -> Result<Buf, Error> {
    let w = b.vector_read(&format!("blk.{layer}.{name}.weight"), dims.d_model, read)?;
    Ok(b.rms_norm(x, w, dims.eps, out))
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
