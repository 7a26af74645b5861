//! The parts that architectures share, as plain ops: embedding, attention, feed-forward, experts, head.
//!
//! Tensor names are GGUF's: `blk.LAYER.NAME.weight`.

use super::keys::{Dims, Keys, MoeDims, ROPE_FREQS};
use crate::Error;
use crate::plan::build::Builder;
use crate::plan::{
    Buf, Cache, CacheDecl, ExpertBiases, Gate, GateFactor, Op, Plan, Read, Rope, RopePairing, Router, Rows, Weight,
};

/// An attention layer.
#[derive(Clone, Copy)]
pub(super) struct Attention {
    /// Of q and of k; neither is rotated without.
    pub rope: [Option<Rope>; 2],
    pub qk_norm: Option<QkNorm>,
    /// Factor on the scores.
    pub scale: f32,
    /// Positions that a query sees, the last of which is its own; all of them without a window.
    pub window: Option<usize>,
    /// The positions since the last multiple of the window instead.
    pub chunked: bool,
    /// Attention sinks: one extra logit per head, without a value (gpt-oss).
    pub sinks: bool,
    /// What a product of the layer's input, `attn_gate`, becomes a factor of the sums by: one number a head, or one for
    /// each of its numbers, as wide as the matrix is.
    pub gate: Option<GateFactor>,
    /// Factor on the values.
    pub value_scale: Option<f32>,
    /// The cache, where layers share one: those of whole texts do.
    pub cache: Option<Cache>,
}

impl Attention {
    /// `softmax(q·kᵀ / √d_k)·v` with rotated q and k.
    pub fn plain(rope: Rope, d_k: usize) -> Self {
        Self { rope: [Some(rope); 2], ..Self::unrotated(d_k) }
    }

    /// The same with q and k as they are.
    pub fn unrotated(d_k: usize) -> Self {
        let scale = 1.0 / (d_k as f32).sqrt();
        let (qk_norm, gate, value_scale, cache) = (None, None, None, None);
        Self { rope: [None; 2], qk_norm, scale, window: None, chunked: false, sinks: false, gate, value_scale, cache }
    }
}

/// How q and k are normalized.
#[derive(Clone, Copy)]
pub(super) struct QkNorm {
    /// All heads at once, not each by itself.
    pub is_whole: bool,
    /// After the rotation, not before it.
    pub is_late: bool,
    /// By `attn_q_norm` and `attn_k_norm`.
    pub has_weights: bool,
}

impl QkNorm {
    /// Each head before its rotation.
    pub const HEADS: QkNorm = QkNorm { is_whole: false, is_late: false, has_weights: true };
    /// All heads at once, before their rotation.
    pub const WHOLE: QkNorm = QkNorm { is_whole: true, ..QkNorm::HEADS };
    /// Each head after its rotation.
    pub const LATE: QkNorm = QkNorm { is_late: true, ..QkNorm::HEADS };
}

/// The experts of a layer, without their router.
#[derive(Clone, Copy)]
pub(super) struct Stack {
    pub n_expert: usize,
    pub d_ff: usize,
    pub act: Gate,
    /// Without gates: the activation is that of `up` times itself.
    pub ungated: bool,
    /// Every product has a bias.
    pub biases: bool,
}

impl Stack {
    /// `down(silu(gate(h)) ⊙ up(h))` without biases.
    pub fn plain(n_expert: usize, d_ff: usize) -> Stack {
        Stack { n_expert, d_ff, act: Gate::Silu, ungated: false, biases: false }
    }
}

/// Returns a model of plain attention and dense feed-forward in every layer.
pub(super) fn dense_model(keys: Keys, arch: &str, dims: Dims, pairing: RopePairing) -> Result<Plan, Error> {
    let d_ff = keys.d_ff()?;
    let rope = keys.rope(dims.d_k, pairing)?;

    let mut b = Builder::new(keys.names(), arch, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let attn = Attention::plain(b.rope(rope), dims.d_k);
    let x = embed(&mut b, &dims)?;
    for layer in 0..dims.n_layer {
        b.layer(Some(layer as u32));
        attention(&mut b, &dims, attn, layer, x)?;
        feed_forward(&mut b, &dims, d_ff, layer, x)?;
    }
    head(b, &dims, x)
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

/// `x += attention(norm(x))`, with a norm in front of the sum where the model has such.
pub(super) fn attention(b: &mut Builder, dims: &Dims, attn: Attention, layer: usize, x: Buf) -> Result<(), Error> {
    let h = pre_norm(b, dims, layer, "attn_norm", x, "h")?;
    let o = attend(b, dims, attn, layer, h)?;
    add(b, dims, layer, "post_attention_norm", x, o)
}

/// `attention(h)`.
pub(super) fn attend(b: &mut Builder, dims: &Dims, attn: Attention, layer: usize, h: Buf) -> Result<Buf, Error> {
    let Dims { d_model, n_head, n_kv, d_k, d_v, .. } = *dims;
    let [q, k, v] = qkv(b, layer, h, [n_head * d_k, n_kv * d_k, n_kv * d_v], d_model)?;
    let mut qk = [q, k];
    let gate = match attn.gate {
        Some(factor) => {
            let is_by_head = b.n_rows(&format!("blk.{layer}.attn_gate.weight")) == Some(n_head);
            let width = if is_by_head { n_head } else { n_head * d_v };
            Some((linear(b, layer, "attn_gate", h, [width, d_model], "g")?, factor))
        }
        None => None,
    };
    if let Some(norm) = attn.qk_norm.filter(|norm| !norm.is_late) {
        qk = qk_norm(b, dims, norm, layer, qk)?;
    }
    for (i, n_head) in [n_head, n_kv].into_iter().enumerate() {
        if let Some(rope) = attn.rope[i] {
            b.push(Op::Rope { x: qk[i], rope, n_head, d_head: d_k });
        }
    }
    if let Some(norm) = attn.qk_norm.filter(|norm| norm.is_late) {
        qk = qk_norm(b, dims, norm, layer, qk)?;
    }
    if let Some(scale) = attn.value_scale {
        b.push(Op::Scale { x: v, scale });
    }
    let [q, k] = qk;
    let own = CacheDecl { n_kv, d_k, d_v, v_in_k: false, window: attn.window };
    let cache = attn.cache.unwrap_or_else(|| b.cache(own));
    b.push(Op::KvAppend { cache, k, v: Some(v) });
    let sinks = match attn.sinks {
        true => Some(b.vector(&format!("blk.{layer}.attn_sinks.weight"), n_head)?),
        false => None,
    };
    let a = b.buf("a", Rows::Tokens, n_head * d_v);
    let Attention { scale, window, chunked, .. } = attn;
    let (softcap, chosen) = (None, None);
    b.push(Op::Attention { cache, q, n_head, scale, window, chunked, softcap, chosen, sinks, out: a });
    if let Some((gate, factor)) = gate {
        b.push(Op::GateBy { x: a, gate, factor });
    }
    linear(b, layer, "attn_output", a, [d_model, n_head * d_v], "o")
}

/// The products of attention's input: three matrices, or one above the other in one tensor.
fn qkv(b: &mut Builder, layer: usize, h: Buf, rows: [usize; 3], d_model: usize) -> Result<[Buf; 3], Error> {
    let fused = format!("blk.{layer}.attn_qkv.weight");
    let mut out = [h; 3];
    for (i, name) in ["q", "k", "v"].into_iter().enumerate() {
        out[i] = match b.has(&fused) {
            true => {
                let w = b.part(&fused, &rows, i, d_model)?;
                b.linear(h, w, None, name)
            }
            false => linear(b, layer, &format!("attn_{name}"), h, [rows[i], d_model], name)?,
        };
    }
    Ok(out)
}

/// Normalizes q and k.
fn qk_norm(b: &mut Builder, dims: &Dims, norm: QkNorm, layer: usize, qk: [Buf; 2]) -> Result<[Buf; 2], Error> {
    let Dims { n_head, n_kv, d_k, eps, .. } = *dims;
    let mut out = qk;
    for (i, (name, n_head)) in [("attn_q_norm", n_head), ("attn_k_norm", n_kv)].into_iter().enumerate() {
        let (n_head, d_head) = if norm.is_whole { (1, n_head * d_k) } else { (n_head, d_k) };
        let name = format!("blk.{layer}.{name}.weight");
        let w = norm.has_weights.then(|| b.vector_read(&name, d_head, dims.norm)).transpose()?;
        match w.filter(|_| norm.is_whole) {
            Some(w) => out[i] = b.rms_norm(qk[i], w, eps, ["q_normed", "k_normed"][i]),
            None => b.push(Op::HeadNorm { x: qk[i], w, eps, n_head, d_head }),
        }
    }
    Ok(out)
}

/// `x += y`, or `x += norm(y)` by the tensor `name` where the model has norms after attention and feed-forward, times
/// the model's factor.
pub(super) fn add(b: &mut Builder, dims: &Dims, layer: usize, name: &str, x: Buf, y: Buf) -> Result<(), Error> {
    let y = match dims.post_norm {
        Some(eps) => {
            let w = b.vector_read(&format!("blk.{layer}.{name}.weight"), dims.d_model, dims.norm)?;
            b.rms_norm(y, w, eps, &format!("{name}ed"))
        }
        None => y,
    };
    if dims.residual != 1.0 {
        b.push(Op::Scale { x: y, scale: dims.residual });
    }
    b.push(Op::Add { x, y });
    Ok(())
}

/// `x += down(silu(gate(norm(x))) ⊙ up(norm(x)))`, with a norm in front of the sum where the model has such.
pub(super) fn feed_forward(b: &mut Builder, dims: &Dims, d_ff: usize, layer: usize, x: Buf) -> Result<(), Error> {
    feed_forward_by(b, dims, (d_ff, Gate::Silu), layer, x)
}

/// As [`feed_forward`], with another activation.
pub(super) fn feed_forward_by(
    b: &mut Builder,
    dims: &Dims,
    d_ff: (usize, Gate),
    layer: usize,
    x: Buf,
) -> Result<(), Error> {
    let h = pre_norm(b, dims, layer, "ffn_norm", x, "f")?;
    let y = mlp(b, dims, FFN, d_ff, layer, h, "y")?;
    add(b, dims, layer, "post_ffw_norm", x, y)
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

/// `out = down(max(up(h), 0)²)` by the tensors `names`.
pub(super) fn squared(
    b: &mut Builder,
    dims: &Dims,
    [up, down]: [&str; 2],
    d_ff: usize,
    layer: usize,
    h: Buf,
    out: &str,
) -> Result<Buf, Error> {
    let up = linear(b, layer, up, h, [d_ff, dims.d_model], "up")?;
    let hidden = b.buf("act", Rows::Tokens, d_ff);
    b.push(Op::GatedAct { gate: up, up, act: Gate::Relu, out: hidden });
    linear(b, layer, down, hidden, [dims.d_model, d_ff], out)
}

/// `x += Σ experts(norm(x))`.
pub(super) fn experts(b: &mut Builder, dims: &Dims, moe: &MoeDims, layer: usize, x: Buf) -> Result<(), Error> {
    let h = norm(b, dims, layer, "ffn_norm", x, "f")?;
    let (y, weights) = routed(b, dims, moe, layer, h)?;
    b.push(Op::Combine { x, add: true, y, weights, norm: None });
    Ok(())
}

/// What the experts chosen by a softmax make of `h`, and their weights, times the model's factor.
pub(super) fn routed(b: &mut Builder, dims: &Dims, moe: &MoeDims, layer: usize, h: Buf) -> Result<(Buf, Buf), Error> {
    let MoeDims { n_expert, n_used, d_ff, renormalise, scale } = *moe;
    let logits = linear(b, layer, "ffn_gate_inp", h, [n_expert, dims.d_model], "router")?;
    let ids = b.ids("ids", Rows::Tokens, n_used);
    let weights = b.buf("weights", Rows::Tokens, n_used);
    let router = Router::softmax(renormalise, scale * dims.residual);
    b.push(Op::Route { logits, router, n_used, ids, weights });
    let y = stack(b, dims, Stack::plain(n_expert, d_ff), layer, h, (ids, n_used))?;
    Ok((y, weights))
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
    let Stack { n_expert, d_ff, act, ungated, biases } = stack;
    let d_model = dims.d_model;
    let mut weight = |name: &str, shape: &[usize]| b.weight(&format!("blk.{layer}.{name}"), shape);
    let gate = if ungated { "ffn_up_exps.weight" } else { "ffn_gate_exps.weight" };
    let gate = weight(gate, &[n_expert, d_ff, d_model])?;
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

/// The matrices that sentence-transformers has after the pooling, on every row: `dense_2`, then `dense_3`, where the
/// file has them.
pub(super) fn dense_modules(b: &mut Builder, mut x: Buf) -> Result<Buf, Error> {
    for name in ["dense_2", "dense_3"] {
        if let Some(n) = b.n_rows(&format!("{name}.weight")) {
            let w = b.weight(&format!("{name}.weight"), &[n, b.shape(x).1])?;
            let bias = b.opt_vector(&format!("{name}.bias"), n)?;
            x = b.linear(x, w, bias, name);
        }
    }
    Ok(x)
}

/// The last norm and the logits.
#[derive(Clone, Copy)]
pub(super) struct Head {
    /// The stored form of the last norm.
    pub norm: Read,
    /// Factor on the logits.
    pub scale: Option<f32>,
    /// `softcap · tanh(logit / softcap)`, after the factor.
    pub softcap: Option<f32>,
    /// Whether the last norm has a bias.
    pub bias: bool,
}

impl Head {
    /// A plain norm, and the logits as they are.
    pub const PLAIN: Head = Head { norm: Read::Plain, scale: None, softcap: None, bias: false };
}

/// Logits of the batch's rows; a file without `output.weight` ties them to the table of embeddings.
pub(super) fn head(b: Builder, dims: &Dims, x: Buf) -> Result<Plan, Error> {
    head_with(b, dims, Head::PLAIN, x)
}

/// As [`head`], with another norm, a factor or a softcap.
pub(super) fn head_with(mut b: Builder, dims: &Dims, head: Head, x: Buf) -> Result<Plan, Error> {
    b.layer(None);
    let last = select(&mut b, dims, x, "last");
    let norm = b.vector_read("output_norm.weight", dims.d_model, head.norm)?;
    let h = b.rms_norm(last, norm, dims.eps, "final");
    if head.bias {
        let w = b.vector("output_norm.bias", dims.d_model)?;
        b.push(Op::AddBias { x: h, w });
    }
    let logits = logits(&mut b, dims, head, h)?;
    finish(b, logits)
}

/// `x - mean(x)`, the first half of a layer norm.
pub(super) fn center(b: &mut Builder, dims: &Dims, x: Buf) -> Buf {
    let out = b.buf("centered", Rows::Tokens, dims.d_model);
    b.push(Op::Center { x, out });
    out
}

/// As [`head_with`], followed by the draft head of layer `dims.n_layer`, where the file has one; `layer` writes the
/// decoder layer in it.
///
/// `x = eh_proj · (norm(table[id]) ‖ norm(hidden))` enters that layer, and a norm and the output matrix follow.
/// Embedding and output matrix are the model's where the file has no others for it.
pub(super) fn head_and_drafts(
    mut b: Builder,
    dims: &Dims,
    head: Head,
    x: Buf,
    layer: impl FnOnce(&mut Builder, usize, Buf) -> Result<(), Error>,
) -> Result<Plan, Error> {
    let (n, d) = (dims.n_layer, dims.d_model);
    let name = |name: &str| format!("blk.{n}.nextn.{name}.weight");
    if !b.has(&name("eh_proj")) {
        return head_with(b, dims, head, x);
    }
    b.layer(None).skip_layers_from(n + 1);
    let norm = b.vector_read("output_norm.weight", d, head.norm)?;
    let all = b.rms_norm(x, norm, dims.eps, "final");
    let last = select(&mut b, dims, all, "last");
    let out = logits(&mut b, dims, head, last)?;

    let hidden = b.layer(Some(n as u32)).start_draft(out, all);
    let own = |b: &Builder, own: String, models: &str| if b.has(&own) { own } else { models.into() };
    let table = own(&b, name("embed_tokens"), "token_embd.weight");
    let table = b.weight(&table, &[dims.n_vocab, d])?;
    let e = b.buf("e", Rows::Tokens, d);
    b.push(Op::Embed { table, scale: 1.0, out: e });
    let [e, h] = [(e, "enorm"), (hidden, "hnorm")].map(|(x, norm)| {
        let w = b.vector_read(&name(norm), d, head.norm)?;
        Ok::<_, Error>(b.rms_norm(x, w, dims.eps, norm))
    });
    let eh = b.buf("eh", Rows::Tokens, 2 * d);
    b.push(Op::JoinHeads { parts: vec![(d, e?), (d, h?)], n_head: 1, out: eh });
    let x = linear(&mut b, n, "nextn.eh_proj", eh, [d, 2 * d], "x")?;
    layer(&mut b, n, x)?;
    let last = select(&mut b, dims, x, "last");
    let norm = own(&b, name("shared_head_norm"), "output_norm.weight");
    let norm = b.vector_read(&norm, d, head.norm)?;
    let h = b.rms_norm(last, norm, dims.eps, "final");
    let logits = match b.has(&name("shared_head_head")) {
        true => linear(&mut b, n, "nextn.shared_head_head", h, [dims.n_vocab, d], "logits")?,
        false => logits(&mut b, dims, head, h)?,
    };
    finish(b, logits)
}

/// The batch's rows.
pub(super) fn select(b: &mut Builder, dims: &Dims, x: Buf, out: &str) -> Buf {
    let out = b.buf(out, Rows::Outputs, dims.d_model);
    b.push(Op::Select { x, out });
    out
}

/// Logits of rows after the last norm.
fn logits(b: &mut Builder, dims: &Dims, head: Head, h: Buf) -> Result<Buf, Error> {
    let output = if b.has("output.weight") { "output.weight" } else { "token_embd.weight" };
    let w = b.weight(output, &[dims.n_vocab, dims.d_model])?;
    let bias = b.opt_vector("output.bias", dims.n_vocab)?;
    let logits = b.linear(h, w, bias, "logits");
    if let Some(scale) = head.scale {
        b.push(Op::Scale { x: logits, scale });
    }
    if let Some(cap) = head.softcap {
        b.push(Op::Softcap { x: logits, cap });
    }
    Ok(logits)
}

fn finish(b: Builder, logits: Buf) -> Result<Plan, Error> {
    // Older converters also wrote each layer's rotary table, which the keys give as well.
    b.finish(logits, |name| {
        name == ROPE_FREQS || name.ends_with(".attn_rot_embd") || name.ends_with(".rot_embd.weight")
    })
}

/// `norm(x)` by `blk.LAYER.NAME.weight`.
pub(super) fn norm(b: &mut Builder, dims: &Dims, layer: usize, name: &str, x: Buf, out: &str) -> Result<Buf, Error> {
    norm_read(b, dims, dims.norm, layer, name, x, out)
}

/// As [`norm`]; `x` itself where the model has no norm in front of attention and feed-forward.
fn pre_norm(b: &mut Builder, dims: &Dims, layer: usize, name: &str, x: Buf, out: &str) -> Result<Buf, Error> {
    if dims.pre_norm { norm(b, dims, layer, name, x, out) } else { Ok(x) }
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
