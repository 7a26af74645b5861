//! The family of Qwen3-Next and Qwen3.5: most layers are gated delta nets, every fourth is attention with an output
//! gate, and the routed experts have a shared expert beside them, scaled by a learned sigmoid gate.
//!
//! Files differ in the projections that they fuse, in the order of the heads of v, and in how they store norms
//! and decay rates. The layer after the last, which drafts, is one of attention. Towers for images are left out: text
//! alone has one position in every section of its rotary embedding, which makes that the plain one.

use checkpoint::{Checkpoint, Kind};

use super::keys::{D_FF, Dims, Key, Keys, MAX_HEAD_WIDTH, MAX_HEADS, MAX_WIDTH, MoeDims, key};
use super::parts::{self, Head, Stack, linear};
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{
    Buf, CacheDecl, DeltaHeads, DeltaRule, Gate, GateFactor, Op, Plan, Read, Rope, RopePairing, Router, Rows, Sharing,
    StateDecl,
};

const CONV_WIDTH: Key = key("ssm.conv_kernel", &["linear_conv_kernel_dim"]);
const DELTA_D_K: Key = key("ssm.state_size", &["linear_key_head_dim"]);
const DELTA_N_K: Key = key("ssm.group_count", &["linear_num_key_heads"]);
const DELTA_N_V: Key = key("ssm.time_step_rank", &["linear_num_value_heads"]);
const DELTA_D_V: Key = key("", &["linear_value_head_dim"]);
const DELTA_V_ROW: Key = key("ssm.inner_size", &[]);
const D_FF_SHARED: Key = key("expert_shared_feed_forward_length", &["shared_expert_intermediate_size"]);

const MAX_CONV_WIDTH: usize = 64;

/// Added to the sum of squares of a head of q or k before it is brought to length 1; fixed in the original code.
const QK_EPS: f32 = 1e-6;

const ALIASES: &[Alias] = &[
    ("ffn_norm", &["=post_attention_norm"]),
    ("attn_qkv", &["linear_attn.in_proj_qkv"]),
    ("attn_gate", &["linear_attn.in_proj_z"]),
    ("ssm_in", &["linear_attn.in_proj_qkvz"]),
    ("ssm_ba", &["linear_attn.in_proj_ba"]),
    ("ssm_alpha", &["linear_attn.in_proj_a"]),
    ("ssm_beta", &["linear_attn.in_proj_b"]),
    ("ssm_conv1d", &["linear_attn.conv1d"]),
    ("ssm_a", &["linear_attn.A_log"]),
    ("ssm_dt.bias", &["linear_attn.dt_bias"]),
    ("ssm_norm", &["linear_attn.norm"]),
    ("ssm_out", &["linear_attn.out_proj"]),
];

/// A model of the family.
struct Model {
    dims: Dims,
    heads: DeltaHeads,
    conv_width: usize,
    rope: Rope,
    moe: Option<Moe>,
    /// The stored form of norms, but for those inside a delta net.
    norm: Read,
    /// The stored form of decay rates.
    decay: Read,
}

/// Routed experts and the shared one.
struct Moe {
    dims: MoeDims,
    d_ff_shared: usize,
}

/// Writes the plan. `gguf` is the order of the heads of v in GGUF files; folders keep the original one.
pub(super) fn build(checkpoint: &Checkpoint, arch: &str, gguf: Sharing, drafts: bool) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let mut dims = keys.dims()?;
    dims.n_layer = keys.trunk(dims.n_layer)?;
    let moe = match keys.n_expert()? {
        Some(n_expert) => {
            Some(Moe { dims: keys.moe(n_expert, true)?, d_ff_shared: keys.count(D_FF_SHARED, MAX_WIDTH)? })
        }
        None => None,
    };
    let sharing = if keys.is_folder() { Sharing::Grouped } else { gguf };
    let heads = delta_heads(&keys, sharing)?;
    let rope = keys.rope(dims.d_k, RopePairing::Half)?;

    let names = keys.names().further_from(dims.n_layer);
    let mut b = Builder::new(names, arch, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    b.skip_layers_from(dims.n_layer);
    let model = Model {
        conv_width: keys.count(CONV_WIDTH, MAX_CONV_WIDTH)?,
        rope: b.rope(rope),
        // Only the original files keep norms centred on zero; all folders keep decay rates as logarithms.
        norm: if checkpoint.kind() == Kind::Hf { Read::OnePlus } else { Read::Plain },
        decay: if keys.is_folder() { Read::NegExp } else { Read::Plain },
        dims,
        heads,
        moe,
    };
    let x = parts::embed(&mut b, &model.dims)?;
    for layer in 0..model.dims.n_layer {
        b.layer(Some(layer as u32));
        match b.has(&format!("blk.{layer}.ssm_a")) {
            true => model.delta_net(&mut b, layer, x)?,
            false => model.attention(&mut b, layer, x)?,
        }
        model.mix(&mut b, keys, layer, x)?;
    }
    let head = Head { norm: model.norm, ..Head::PLAIN };
    match drafts {
        true => parts::head_and_drafts(b, &model.dims, head, x, |b, layer, x| {
            model.attention(b, layer, x)?;
            model.mix(b, keys, layer, x)
        }),
        false => parts::head_with(b, &model.dims, head, x),
    }
}

fn delta_heads(keys: &Keys, sharing: Sharing) -> Result<DeltaHeads, Error> {
    let n_k_head = keys.count(DELTA_N_K, MAX_HEADS)?;
    let n_v_head = keys.count(DELTA_N_V, MAX_HEADS)?;
    if !n_v_head.is_multiple_of(n_k_head) {
        let name = keys.name(DELTA_N_K).unwrap_or_default();
        return Err(keys.error(DELTA_N_V, format!("is {n_v_head}, {name} {n_k_head} does not divide it")));
    }
    let d_v = match keys.is_folder() {
        true => keys.count(DELTA_D_V, MAX_HEAD_WIDTH)?,
        false => {
            let row = keys.count(DELTA_V_ROW, MAX_WIDTH)?;
            if !row.is_multiple_of(n_v_head) || row / n_v_head > MAX_HEAD_WIDTH {
                let what = format!("is {row}, expected {n_v_head} heads of up to {MAX_HEAD_WIDTH}");
                return Err(keys.error(DELTA_V_ROW, what));
            }
            row / n_v_head
        }
    };
    let d_k = keys.count(DELTA_D_K, MAX_HEAD_WIDTH)?;
    Ok(DeltaHeads { n_k_head, n_v_head, d_k, d_v, sharing, rule: DeltaRule::Delta })
}

impl Model {
    /// `norm(x)` by `blk.LAYER.NAME.weight`.
    fn norm(&self, b: &mut Builder, layer: usize, name: &str, x: Buf, out: &str) -> Result<Buf, Error> {
        parts::norm_read(b, &self.dims, self.norm, layer, name, x, out)
    }

    /// `x += delta_net(norm(x))`.
    fn delta_net(&self, b: &mut Builder, layer: usize, x: Buf) -> Result<(), Error> {
        let DeltaHeads { n_k_head, n_v_head, d_k, d_v, .. } = self.heads;
        let (k_row, v_row) = (n_k_head * d_k, n_v_head * d_v);
        let row = 2 * k_row + v_row;
        let name = |name: &str| format!("blk.{layer}.{name}");
        let h = self.norm(b, layer, "attn_norm", x, "h")?;
        let (qkv, z) = self.qkvz(b, layer, h)?;
        let (rate, decay) = self.rate_and_decay(b, layer, h)?;

        let w = b.weight(&name("ssm_conv1d.weight"), &[row, self.conv_width])?;
        let state = b.state(StateDecl { what: "conv", n: (self.conv_width - 1) * row });
        let conv = b.buf("conv", Rows::Tokens, row);
        b.push(Op::CausalConv { x: qkv, w, bias: None, silu: true, state, out: conv });
        let [q, k, v] = [("q", k_row), ("k", k_row), ("v", v_row)].map(|(name, n)| b.buf(name, Rows::Tokens, n));
        b.push(Op::SplitHeads { x: conv, n_head: 1, parts: vec![(k_row, q), (k_row, k), (v_row, v)] });
        // To length 1, which is the root of the mean square by that of d_k; q is also scaled as in attention.
        let d = d_k as f32;
        for (x, scale) in [(q, 1.0 / d), (k, 1.0 / d.sqrt())] {
            b.push(Op::HeadNorm { x, w: None, eps: QK_EPS / d, n_head: n_k_head, d_head: d_k });
            b.push(Op::Scale { x, scale });
        }

        let a_log = b.vector_read(&name("ssm_a"), n_v_head, self.decay)?;
        let dt_bias = b.vector(&name("ssm_dt.bias"), n_v_head)?;
        let [g, beta] = ["g", "beta"].map(|name| b.buf(name, Rows::Tokens, n_v_head));
        b.push(Op::DecayBeta { a: decay, b: Some(rate), a_log, dt_bias, bound: None, g_out: g, beta_out: beta });
        let state = b.state(StateDecl { what: "delta", n: v_row * d_k });
        let o = b.buf("o", Rows::Tokens, v_row);
        b.push(Op::DeltaNet { q, k, v, g, beta, skip: None, state, heads: self.heads, out: o });
        let w = b.vector(&name("ssm_norm.weight"), d_v)?;
        let eps = self.dims.eps;
        b.push(Op::GatedNorm { x: o, gate: z, w, gate_first: false, eps, n_head: n_v_head, d_head: d_v });
        let y = linear(b, layer, "ssm_out", o, [self.dims.d_model, v_row], "y")?;
        b.push(Op::Add { x, y });
        Ok(())
    }

    /// q, k and v side by side, and the output's gate. Where one matrix makes all four, its rows are sorted by the
    /// heads of k: q, k, then v and gate of the heads that share them.
    fn qkvz(&self, b: &mut Builder, layer: usize, h: Buf) -> Result<(Buf, Buf), Error> {
        let DeltaHeads { n_k_head, n_v_head, d_k, d_v, .. } = self.heads;
        let (d_model, k_row, v_row) = (self.dims.d_model, n_k_head * d_k, n_v_head * d_v);
        if !b.has(&format!("blk.{layer}.ssm_in.weight")) {
            let qkv = linear(b, layer, "attn_qkv", h, [2 * k_row + v_row, d_model], "qkv")?;
            return Ok((qkv, linear(b, layer, "attn_gate", h, [v_row, d_model], "z")?));
        }
        let mixed = linear(b, layer, "ssm_in", h, [2 * k_row + 2 * v_row, d_model], "qkvz")?;
        let widths = [("mixed.q", d_k), ("mixed.k", d_k), ("mixed.v", v_row / n_k_head), ("z", v_row / n_k_head)];
        let [q, k, v, z] = widths.map(|(name, width)| (width, b.buf(name, Rows::Tokens, n_k_head * width)));
        b.push(Op::SplitHeads { x: mixed, n_head: n_k_head, parts: vec![q, k, v, z] });
        let qkv = b.buf("qkv", Rows::Tokens, 2 * k_row + v_row);
        let parts = [q, k, v].map(|(width, part)| (n_k_head * width, part)).to_vec();
        b.push(Op::JoinHeads { parts, n_head: 1, out: qkv });
        Ok((qkv, z.1))
    }

    /// Inputs of the rates and the decays. Where one matrix makes both, its rows are sorted by the heads of k.
    fn rate_and_decay(&self, b: &mut Builder, layer: usize, h: Buf) -> Result<(Buf, Buf), Error> {
        let DeltaHeads { n_k_head, n_v_head, .. } = self.heads;
        let d_model = self.dims.d_model;
        if !b.has(&format!("blk.{layer}.ssm_ba.weight")) {
            let rate = linear(b, layer, "ssm_beta", h, [n_v_head, d_model], "b")?;
            return Ok((rate, linear(b, layer, "ssm_alpha", h, [n_v_head, d_model], "a")?));
        }
        let mixed = linear(b, layer, "ssm_ba", h, [2 * n_v_head, d_model], "ba")?;
        let [rate, decay] = ["b", "a"].map(|name| b.buf(name, Rows::Tokens, n_v_head));
        let width = n_v_head / n_k_head;
        b.push(Op::SplitHeads { x: mixed, n_head: n_k_head, parts: vec![(width, rate), (width, decay)] });
        Ok((rate, decay))
    }

    /// `x += attention(norm(x)) ⊙ σ(gate)`; every head of q has its gate beside it.
    fn attention(&self, b: &mut Builder, layer: usize, x: Buf) -> Result<(), Error> {
        let Dims { d_model, n_head, n_kv, d_k, d_v, eps, .. } = self.dims;
        let h = self.norm(b, layer, "attn_norm", x, "h")?;
        let qg = linear(b, layer, "attn_q", h, [n_head * (d_k + d_v), d_model], "qg")?;
        let k = linear(b, layer, "attn_k", h, [n_kv * d_k, d_model], "k")?;
        let v = linear(b, layer, "attn_v", h, [n_kv * d_v, d_model], "v")?;
        let (q, gate) = (b.buf("q", Rows::Tokens, n_head * d_k), b.buf("gate", Rows::Tokens, n_head * d_v));
        b.push(Op::SplitHeads { x: qg, n_head, parts: vec![(d_k, q), (d_v, gate)] });
        for (x, name, n_head) in [(q, "attn_q_norm", n_head), (k, "attn_k_norm", n_kv)] {
            let w = b.vector_read(&format!("blk.{layer}.{name}.weight"), d_k, self.norm)?;
            b.push(Op::HeadNorm { x, w: Some(w), eps, n_head, d_head: d_k });
            b.push(Op::Rope { x, rope: self.rope, n_head, d_head: d_k });
        }
        let cache = b.cache(CacheDecl { n_kv, d_k, d_v, v_in_k: false, window: None });
        b.push(Op::KvAppend { cache, k, v: Some(v) });
        let a = b.buf("a", Rows::Tokens, n_head * d_v);
        let scale = 1.0 / (d_k as f32).sqrt();
        b.push(Op::Attention {
            cache,
            q,
            n_head,
            scale,
            window: None,
            chunked: false,
            softcap: None,
            chosen: None,
            sinks: None,
            out: a,
        });
        b.push(Op::GateBy { x: a, gate, factor: GateFactor::Sigmoid });
        let o = linear(b, layer, "attn_output", a, [d_model, n_head * d_v], "o")?;
        b.push(Op::Add { x, y: o });
        Ok(())
    }

    /// What follows attention or a delta net: experts, or a dense feed-forward.
    fn mix(&self, b: &mut Builder, keys: Keys, layer: usize, x: Buf) -> Result<(), Error> {
        match &self.moe {
            Some(moe) if b.has(&format!("blk.{layer}.ffn_gate_inp.weight")) => self.experts(b, moe, layer, x),
            _ => self.feed_forward(b, keys.count(D_FF, MAX_WIDTH)?, layer, x),
        }
    }

    /// `x += Σ experts(norm(x)) + shared(norm(x)) · σ(gate)`.
    fn experts(&self, b: &mut Builder, moe: &Moe, layer: usize, x: Buf) -> Result<(), Error> {
        let MoeDims { n_expert, n_used, d_ff, renormalise, scale } = moe.dims;
        let d_model = self.dims.d_model;
        let h = self.norm(b, layer, "ffn_norm", x, "f")?;
        let logits = linear(b, layer, "ffn_gate_inp", h, [n_expert, d_model], "router")?;
        let share = linear(b, layer, "ffn_gate_inp_shexp", h, [1, d_model], "share")?;
        let ids = b.ids("ids", Rows::Tokens, n_used);
        let weights = b.buf("weights", Rows::Tokens, n_used);
        b.push(Op::Route { logits, router: Router::softmax(renormalise, scale), n_used, ids, weights });
        let y = parts::stack(b, &self.dims, Stack::plain(n_expert, d_ff), layer, h, (ids, n_used))?;
        b.push(Op::Combine { x, add: true, y, weights, norm: None });
        let y = parts::mlp(b, &self.dims, parts::SHARED, (moe.d_ff_shared, Gate::Silu), layer, h, "shared")?;
        b.push(Op::GateBy { x: y, gate: share, factor: GateFactor::Sigmoid });
        b.push(Op::Add { x, y });
        Ok(())
    }

    /// `x += mlp(norm(x))`.
    fn feed_forward(&self, b: &mut Builder, d_ff: usize, layer: usize, x: Buf) -> Result<(), Error> {
        let h = self.norm(b, layer, "ffn_norm", x, "f")?;
        let y = parts::mlp(b, &self.dims, parts::FFN, (d_ff, Gate::Silu), layer, h, "shared")?;
        b.push(Op::Add { x, y });
        Ok(())
    }
}
