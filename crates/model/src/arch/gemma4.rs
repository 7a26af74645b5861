//! Gemma 4, text: layers with a window and layers without differ in head width, key-value heads and rope; every layer
//! has a dense feed-forward, and experts with separate norms and a router where the model has experts.
//!
//! Values are normalized without weights, and are the raw keys where a layer has no projection for them. In the small
//! models (E2B, E4B) every layer also adds a separate embedding of the token, and the last layers attend over the cache
//! of an earlier one, with a feed-forward of twice the width in E2B.

use checkpoint::Checkpoint;

use super::gemma3::FINAL_SOFTCAP;
use super::keys::{
    D_FF, D_MODEL, Dims, EPS, Key, Keys, MAX_CONTEXT, MAX_HEAD_WIDTH, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, N_CTX_TRAIN,
    N_HEAD, N_KV, N_LAYER, Unsaid, key,
};
use super::parts::{self, Head, Stack};
use super::windows::{Unnamed, windows};
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{Buf, Cache, CacheDecl, Gate, Op, Plan, Read, Rope, RopePairing, Router, Rows};
use crate::rope::Scaling;

const ARCH: &str = "gemma4";

const D_HEAD: Key = key("attention.key_length", &["global_head_dim", "head_dim"]);
const D_HEAD_WINDOWED: Key = key("attention.key_length_swa", &["head_dim"]);
const N_KV_FULL: Key = key("", &["num_global_key_value_heads", "num_key_value_heads"]);
/// Without it the key above holds for no layer.
const K_IS_V: Key = key("", &["attention_k_eq_v"]);
const HAS_EXPERTS: Key = key("", &["enable_moe_block"]);
const PER_LAYER_INPUT: Key = key("embedding_length_per_layer_input", &["hidden_size_per_layer_input"]);
/// Layers at the end that have no cache.
const SHARED_KV: Key = key("attention.shared_kv_layers", &["num_kv_shared_layers"]);
/// Whether these have a feed-forward of twice the width.
const DOUBLE_WIDE: Key = key("", &["use_double_wide_mlp"]);

/// Where a folder says how layers without a window rotate.
const ROPE_SAID: [&str; 3] = [
    "rope_parameters.full_attention.rope_type",
    "rope_parameters.full_attention.rope_theta",
    "rope_parameters.rope_type",
];

const ALIASES: &[Alias] = &[
    ("post_attention_norm", &["post_attention_layernorm"]),
    ("ffn_norm", &["pre_feedforward_layernorm"]),
    ("post_ffw_norm", &["post_feedforward_layernorm"]),
    ("post_ffw_norm_1", &["post_feedforward_layernorm_1"]),
    ("pre_ffw_norm_2", &["pre_feedforward_layernorm_2"]),
    ("post_ffw_norm_2", &["post_feedforward_layernorm_2"]),
    ("layer_output_scale.weight", &["layer_scalar"]),
    ("per_layer_token_embd", &["embed_tokens_per_layer"]),
    ("per_layer_model_proj", &["per_layer_model_projection"]),
    ("per_layer_proj_norm", &["per_layer_projection_norm"]),
    ("inp_gate", &["per_layer_input_gate"]),
    ("proj", &["per_layer_projection"]),
    ("post_norm", &["post_per_layer_input_norm"]),
    ("ffn_gate_inp", &["router.proj"]),
    ("ffn_gate_inp.scale", &["router.scale"]),
    ("ffn_down_exps.scale", &["router.per_expert_scale"]),
    ("ffn_gate_exps", &["experts.switch_glu.gate_proj", "experts.gate_up_proj[0/2]"]),
    ("ffn_up_exps", &["experts.switch_glu.up_proj", "experts.gate_up_proj[1/2]"]),
    ("ffn_down_exps", &["experts.switch_glu.down_proj", "experts.down_proj"]),
];

/// A layer's attention; key-value heads and head width differ between layers.
#[derive(Clone, Copy)]
struct Attention {
    n_head: usize,
    n_kv: usize,
    d_head: usize,
    rope: Rope,
    window: Option<usize>,
    /// The cache of an earlier layer, which this one attends over.
    shared: Option<Cache>,
}

/// What a layer attends over.
#[derive(Clone, Copy)]
enum Kv {
    /// Its own keys and values.
    Own([Buf; 2]),
    /// The cache of an earlier layer.
    Shared(Cache),
}

/// The experts beside the dense feed-forward.
#[derive(Clone, Copy)]
struct Experts {
    stack: Stack,
    n_used: usize,
}

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let windows = windows(&keys, keys.count(N_LAYER, MAX_LAYERS)?, Unnamed::ButEvery(6))?;
    let dims = dims(&keys, &windows)?;
    let n_kv = n_kv(&keys, &dims, &windows)?;
    let d_windowed = keys.opt_count(D_HEAD_WINDOWED, MAX_HEAD_WIDTH)?.unwrap_or(dims.d_k);
    let rope = match ROPE_SAID.iter().any(|key| keys.has(key)) || !keys.is_folder() {
        true => keys.rope_of(Some("full_attention"), dims.d_k, RopePairing::Half)?,
        // What the family's own code takes where config.json says nothing.
        false => {
            let scaling = Scaling::Proportional { n_turning: dims.d_k / 4 / 2, factor: 1.0 };
            keys.rope_scaled(dims.d_k, RopePairing::Half, scaling)?
        }
    };
    let rope_windowed = keys.rope_windowed(d_windowed, RopePairing::Half, Unsaid::Gemma)?;
    let experts = experts(&keys)?;
    let n_own = n_own_caches(&keys, &windows)?;
    let d_ff = match keys.opt_bool(DOUBLE_WIDE)? {
        Some(true) => (0..dims.n_layer).map(|layer| Ok(keys.d_ff()? * if layer < n_own { 1 } else { 2 })).collect(),
        _ => keys.counts(D_FF, dims.n_layer, 2 * MAX_WIDTH),
    }?;
    let d_layer = keys.count_or_zero(PER_LAYER_INPUT, MAX_WIDTH)?;
    let softcap = keys.opt_positive(FINAL_SOFTCAP)?.map(|cap| cap as f32);

    let mut b = Builder::new(keys.names(), ARCH, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let (rope, rope_windowed) = (b.rope(rope), b.rope(rope_windowed));
    let x = parts::embed_scaled(&mut b, &dims, (dims.d_model as f32).sqrt())?;
    let inputs = if d_layer > 0 { layer_inputs(&mut b, &dims, d_layer, x)? } else { Vec::new() };
    // The last caches of layers without a window and with one.
    let mut last = [None; 2];
    for (layer, (window, n_kv)) in windows.into_iter().zip(n_kv).enumerate() {
        b.layer(Some(layer as u32));
        let (rope, d_head) = if window.is_some() { (rope_windowed, d_windowed) } else { (rope, dims.d_k) };
        let last = &mut last[usize::from(window.is_some())];
        let shared = last.filter(|_| layer >= n_own);
        let attn = Attention { n_head: dims.n_head, n_kv, d_head, rope, window, shared };
        *last = Some(attention(&mut b, &dims, attn, layer, x)?);
        feed_forward(&mut b, &dims, d_ff[layer], experts, layer, x)?;
        if let Some(&input) = inputs.get(layer) {
            add_input(&mut b, &dims, (input, d_layer), layer, x)?;
        }
        if b.has(&format!("blk.{layer}.layer_output_scale.weight")) {
            let w = b.vector(&format!("blk.{layer}.layer_output_scale.weight"), 1)?;
            b.push(Op::ScaleBy { x, w });
        }
    }
    parts::head_with(b, &dims, Head { softcap, ..Head::PLAIN }, x)
}

/// Returns the dimensions of the model; head widths and key-value heads are those of layers without a window.
fn dims(keys: &Keys, windows: &[Option<usize>]) -> Result<Dims, Error> {
    let d_head = match of_full_layers(keys, windows, "head_dim", MAX_HEAD_WIDTH)? {
        Some(d_head) => d_head,
        None => keys.count(D_HEAD, MAX_HEAD_WIDTH)?,
    };
    Ok(Dims {
        n_layer: windows.len(),
        n_vocab: keys.n_vocab()?,
        n_ctx_train: keys.count(N_CTX_TRAIN, MAX_CONTEXT)?,
        d_model: keys.count(D_MODEL, MAX_WIDTH)?,
        n_head: keys.count(N_HEAD, MAX_HEADS)?,
        n_kv: 1,
        d_k: d_head,
        d_v: d_head,
        eps: keys.eps(EPS)?,
        norm: Read::Plain,
        pre_norm: true,
        post_norm: None,
        residual: 1.0,
    })
}

/// Returns what newer folders say of single layers, `per_layer_config.LAYER.KEY`, of those without a window, which must
/// agree.
fn of_full_layers(keys: &Keys, windows: &[Option<usize>], key: &str, max: usize) -> Result<Option<usize>, Error> {
    let mut found = None;
    for layer in (0..windows.len()).filter(|&layer| keys.is_folder() && windows[layer].is_none()) {
        let name = format!("per_layer_config.{layer}.{key}");
        let Some(n) = keys.meta().opt_u64(&name)? else { continue };
        let n = keys.in_range(&name, n, max)?;
        if *found.get_or_insert(n) != n {
            return Err(keys.error(D_HEAD, format!("is {n} in layer {layer} by {name}, other layers have another")));
        }
    }
    Ok(found)
}

/// Key-value heads of every layer: GGUF lists them, config.json has a number for each kind of layer.
fn n_kv(keys: &Keys, dims: &Dims, windows: &[Option<usize>]) -> Result<Vec<usize>, Error> {
    let n_kv = match keys.is_folder() {
        false => keys.counts(N_KV, dims.n_layer, MAX_HEADS)?,
        true => {
            let windowed = keys.count(N_KV, MAX_HEADS)?;
            let own = keys.opt_bool(K_IS_V)?.unwrap_or(true);
            let full = match of_full_layers(keys, windows, "num_key_value_heads", MAX_HEADS)? {
                Some(full) => full,
                None if own => keys.count(N_KV_FULL, MAX_HEADS)?,
                None => windowed,
            };
            windows.iter().map(|window| if window.is_some() { windowed } else { full }).collect()
        }
    };
    match n_kv.iter().find(|&&n| !dims.n_head.is_multiple_of(n)) {
        Some(n) => Err(keys.error(N_KV, format!("is {n}, which does not divide {} heads", dims.n_head))),
        None => Ok(n_kv),
    }
}

fn experts(keys: &Keys) -> Result<Option<Experts>, Error> {
    if keys.opt_bool(HAS_EXPERTS)? == Some(false) {
        return Ok(None);
    }
    let Some(n_expert) = keys.n_expert()? else { return Ok(None) };
    let stack = Stack { act: Gate::GeluTanh, ..Stack::plain(n_expert, keys.d_ff_expert()?) };
    Ok(Some(Experts { stack, n_used: keys.n_used(n_expert)? }))
}

/// Layers that have a cache; those after them, of either kind, attend over the last cache of their kind.
fn n_own_caches(keys: &Keys, windows: &[Option<usize>]) -> Result<usize, Error> {
    let n_shared = keys.count_or_zero(SHARED_KV, MAX_LAYERS)?;
    let n_own = windows.len().saturating_sub(n_shared);
    let (own, shared) = windows.split_at(n_own);
    match shared.iter().find(|window| !own.iter().any(|own| own.is_some() == window.is_some())) {
        None => Ok(n_own),
        Some(_) => {
            let what =
                format!("is {n_shared} of {} layers, which leaves a kind of them without a cache", windows.len());
            Err(keys.error(SHARED_KV, what))
        }
    }
}

/// What every layer adds of the token: `(norm(x·wᵀ / √d_model) + table[id]·√d_layer) / √2`, cut into layers.
fn layer_inputs(b: &mut Builder, dims: &Dims, d_layer: usize, x: Buf) -> Result<Vec<Buf>, Error> {
    let Dims { n_layer, n_vocab, d_model, eps, .. } = *dims;
    let width = n_layer * d_layer;
    let table = b.weight("per_layer_token_embd.weight", &[n_vocab, width])?;
    let y = b.buf("token_inputs", Rows::Tokens, width);
    b.push(Op::Embed { table, scale: (d_layer as f32).sqrt(), out: y });
    let w = b.weight("per_layer_model_proj.weight", &[width, d_model])?;
    let inputs = b.linear(x, w, None, "inputs");
    b.push(Op::Scale { x: inputs, scale: 1.0 / (d_model as f32).sqrt() });
    let w = Some(b.vector("per_layer_proj_norm.weight", d_layer)?);
    b.push(Op::HeadNorm { x: inputs, w, eps, n_head: n_layer, d_head: d_layer });
    b.push(Op::Add { x: inputs, y });
    b.push(Op::Scale { x: inputs, scale: std::f32::consts::FRAC_1_SQRT_2 });
    let each: Vec<Buf> = (0..n_layer).map(|layer| b.buf(&format!("input.{layer}"), Rows::Tokens, d_layer)).collect();
    let parts = each.iter().map(|&input| (d_layer, input)).collect();
    b.push(Op::SplitHeads { x: inputs, n_head: 1, parts });
    Ok(each)
}

/// `x += norm(proj(gelu(gate(x)) ⊙ input))`.
fn add_input(b: &mut Builder, dims: &Dims, (input, d_layer): (Buf, usize), layer: usize, x: Buf) -> Result<(), Error> {
    let gate = parts::linear(b, layer, "inp_gate", x, [d_layer, dims.d_model], "input_gate")?;
    let gated = b.buf("input_gated", Rows::Tokens, d_layer);
    b.push(Op::GatedAct { gate, up: input, act: Gate::GeluTanh, out: gated });
    let y = parts::linear(b, layer, "proj", gated, [dims.d_model, d_layer], "input_proj")?;
    let y = parts::norm(b, dims, layer, "post_norm", y, "input_normed")?;
    b.push(Op::Add { x, y });
    Ok(())
}

/// `x += norm(attention(norm(x)))`; the scores are not scaled, q and k are normalized instead. Returns the cache.
fn attention(b: &mut Builder, dims: &Dims, attn: Attention, layer: usize, x: Buf) -> Result<Cache, Error> {
    let Attention { n_head, n_kv, d_head, rope, window, shared } = attn;
    let d_model = dims.d_model;
    let h = parts::norm(b, dims, layer, "attn_norm", x, "h")?;
    let q = parts::linear(b, layer, "attn_q", h, [n_head * d_head, d_model], "q")?;
    let kv = match shared {
        None => Kv::Own(keys_and_values(b, dims, attn, layer, h)?),
        Some(cache) => {
            // Files may have them all the same.
            for name in ["attn_k", "attn_v", "attn_k_norm"] {
                b.skip(&format!("blk.{layer}.{name}.weight"));
            }
            Kv::Shared(cache)
        }
    };
    let mut normed = vec![(q, Some("attn_q_norm"), n_head)];
    if let Kv::Own([k, v]) = kv {
        normed.extend([(k, Some("attn_k_norm"), n_kv), (v, None, n_kv)]);
    }
    for (x, name, n_head) in normed {
        let w = name.map(|name| b.vector(&format!("blk.{layer}.{name}.weight"), d_head)).transpose()?;
        b.push(Op::HeadNorm { x, w, eps: dims.eps, n_head, d_head });
    }
    b.push(Op::Rope { x: q, rope, n_head, d_head });
    let cache = match kv {
        Kv::Shared(cache) => cache,
        Kv::Own([k, v]) => {
            b.push(Op::Rope { x: k, rope, n_head: n_kv, d_head });
            let cache = b.cache(CacheDecl { n_kv, d_k: d_head, d_v: d_head, v_in_k: false, window });
            b.push(Op::KvAppend { cache, k, v: Some(v) });
            cache
        }
    };
    let a = b.buf("a", Rows::Tokens, n_head * d_head);
    let (chunked, softcap, chosen, sinks) = (false, None, None, None);
    b.push(Op::Attention { cache, q, n_head, scale: 1.0, window, chunked, softcap, chosen, sinks, out: a });
    let o = parts::linear(b, layer, "attn_output", a, [d_model, n_head * d_head], "o")?;
    let o = parts::norm(b, dims, layer, "post_attention_norm", o, "o_normed")?;
    b.push(Op::Add { x, y: o });
    Ok(cache)
}

/// Keys and values of a layer; without a projection for them, values are the keys before their norm and rotation.
fn keys_and_values(b: &mut Builder, dims: &Dims, attn: Attention, layer: usize, h: Buf) -> Result<[Buf; 2], Error> {
    let Attention { n_kv, d_head, .. } = attn;
    let shape = [n_kv * d_head, dims.d_model];
    let k = parts::linear(b, layer, "attn_k", h, shape, "k")?;
    if b.has(&format!("blk.{layer}.attn_v.weight")) {
        return Ok([k, parts::linear(b, layer, "attn_v", h, shape, "v")?]);
    }
    let v = b.buf("v", Rows::Tokens, shape[0]);
    b.push(Op::SplitHeads { x: k, n_head: n_kv, parts: vec![(d_head, v)] });
    Ok([k, v])
}

/// `x += norm(norm(mlp(norm(x))) + norm(experts(norm(x))))`; without experts `x += norm(mlp(norm(x)))`.
fn feed_forward(
    b: &mut Builder,
    dims: &Dims,
    d_ff: usize,
    experts: Option<Experts>,
    layer: usize,
    x: Buf,
) -> Result<(), Error> {
    let h = parts::norm(b, dims, layer, "ffn_norm", x, "f")?;
    let mut y = parts::mlp(b, dims, parts::FFN, (d_ff, Gate::GeluTanh), layer, h, "mlp")?;
    if let Some(experts) = experts {
        y = parts::norm(b, dims, layer, "post_ffw_norm_1", y, "mlp_normed")?;
        let routed = routed(b, dims, experts, layer, x)?;
        b.push(Op::Add { x: y, y: routed });
    }
    let y = parts::norm(b, dims, layer, "post_ffw_norm", y, "y_normed")?;
    b.push(Op::Add { x, y });
    Ok(())
}

/// `norm(Σ experts(norm(x)))`, by a router over a separate norm of `x`.
fn routed(
    b: &mut Builder,
    dims: &Dims,
    Experts { stack, n_used }: Experts,
    layer: usize,
    x: Buf,
) -> Result<Buf, Error> {
    let (n_expert, d_model) = (stack.n_expert, dims.d_model);
    // The router's own scale is the weight of its norm; the constant factor goes over the few logits.
    let w = b.vector(&format!("blk.{layer}.ffn_gate_inp.scale"), d_model)?;
    let h = b.rms_norm(x, w, dims.eps, "r");
    let logits = parts::linear(b, layer, "ffn_gate_inp", h, [n_expert, d_model], "router")?;
    b.push(Op::Scale { x: logits, scale: 1.0 / (d_model as f32).sqrt() });
    let ids = b.ids("ids", Rows::Tokens, n_used);
    let weights = b.buf("weights", Rows::Tokens, n_used);
    let expert_scale = Some(b.vector(&format!("blk.{layer}.ffn_down_exps.scale"), n_expert)?);
    let router = Router { expert_scale, ..Router::softmax(true, 1.0) };
    b.push(Op::Route { logits, router, n_used, ids, weights });
    let h = parts::norm(b, dims, layer, "pre_ffw_norm_2", x, "e")?;
    let y = parts::stack(b, dims, stack, layer, h, (ids, n_used))?;
    let sum = b.buf("sum", Rows::Tokens, d_model);
    b.push(Op::Combine { x: sum, add: false, y, weights, norm: None });
    parts::norm(b, dims, layer, "post_ffw_norm_2", sum, "sum_normed")
}
