//! MiniMax-Text-01 and M1 (arXiv 2501.08313): lightning attention (arXiv 2401.04658) in most layers, softmax attention
//! in the others, Mixtral's experts in all. The residual is what a norm gives, and each part of a layer has two
//! factors: `x = alpha · h + beta · part(h)` with `h = norm(x)`.
//!
//! Lightning attention is a decaying sum as Mamba-2 is, but no token changes its decays: they are numbers of head and
//! layer, which no file has to hold. Folders of transformers keep them in tables, which are passed over.

use checkpoint::Checkpoint;

use super::keys::{Dims, Key, Keys, MAX_CONTEXT, MoeDims, key};
use super::parts::{self, Attention, linear};
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{Buf, DeltaHeads, DeltaRule, GateFactor, Op, Plan, RopePairing, Rows, Sharing, StateDecl};

/// `model_type` of transformers' own form, whose code turns whole heads whatever `rotary_dim` says. The publisher's
/// turns that many dims.
const WHOLE_HEADS: &str = "minimax";

const MODEL_TYPE: Key = key("", &["model_type"]);
const POST_NORM: Key = key("", &["postnorm"]);
const WINDOW: Key = key("", &["sliding_window"]);
/// Factors on the residual and on what is added to it. GGUF files have one of the former for all parts.
const FULL: [Key; 2] = [
    key("residual_scale", &["full_attn_alpha_factor", "layernorm_full_attention_alpha"]),
    key("", &["full_attn_beta_factor", "layernorm_full_attention_beta"]),
];
const LIGHTNING: [Key; 2] = [
    key("residual_scale", &["linear_attn_alpha_factor", "layernorm_linear_attention_alpha"]),
    key("", &["linear_attn_beta_factor", "layernorm_linear_attention_beta"]),
];
const EXPERTS: [Key; 2] = [
    key("residual_scale", &["mlp_alpha_factor", "layernorm_mlp_alpha"]),
    key("", &["mlp_beta_factor", "layernorm_mlp_beta"]),
];

/// Of the norm in lightning attention; fixed in the original code.
const EPS: f32 = 1e-6;

/// Tables of decays that transformers saves.
const TABLES: [&str; 4] = ["slope_rate.weight", "query_decay.weight", "key_decay.weight", "diagonal_decay.weight"];

const ALIASES: &[Alias] = &[
    ("attn_qkv", &["self_attn.qkv_proj"]),
    ("attn_gate", &["self_attn.output_gate"]),
    ("attn_norm_2", &["self_attn.norm"]),
    ("attn_output", &["self_attn.o_proj", "self_attn.out_proj"]),
    ("ffn_gate_inp", &["block_sparse_moe.gate"]),
    ("ffn_gate_exps", &["block_sparse_moe.switch_mlp.gate_proj", "block_sparse_moe.experts.*.w1"]),
    ("ffn_up_exps", &["block_sparse_moe.switch_mlp.up_proj", "block_sparse_moe.experts.*.w3"]),
    ("ffn_down_exps", &["block_sparse_moe.switch_mlp.down_proj", "block_sparse_moe.experts.*.w2"]),
    (TABLES[0], &["self_attn.slope_rate"]),
    (TABLES[1], &["self_attn.query_decay"]),
    (TABLES[2], &["self_attn.key_decay"]),
    (TABLES[3], &["self_attn.diagonal_decay"]),
];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let dims = keys.dims()?;
    if keys.opt_bool(POST_NORM)? == Some(false) {
        return Err(keys.error(POST_NORM, "is false, expected residuals after the norms".into()));
    }
    if let Some(n) = keys.opt_count(WINDOW, MAX_CONTEXT)? {
        return Err(keys.error(WINDOW, format!("is {n}, expected none")));
    }
    let [full, lightning, experts] = [factors(keys, FULL)?, factors(keys, LIGHTNING)?, factors(keys, EXPERTS)?];
    let n_expert = keys.some_experts()?;
    let n_used = keys.n_used(n_expert)?;
    let moe = MoeDims { n_expert, n_used, d_ff: keys.d_ff()?, renormalise: true, scale: experts[1] };
    let rope = match keys.opt_str(MODEL_TYPE)? {
        Some(WHOLE_HEADS) => keys.rope_whole(dims.d_k, RopePairing::Half, keys.scaling(dims.d_k)?)?,
        _ => keys.rope(dims.d_k, RopePairing::Half)?,
    };

    let mut b = Builder::new(keys.names(), "minimax-01", dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let attn = Attention::plain(b.rope(rope), dims.d_k);
    let mut x = parts::embed(&mut b, &dims)?;
    for layer in 0..dims.n_layer {
        b.layer(Some(layer as u32));
        let h = parts::norm(&mut b, &dims, layer, "attn_norm", x, "h")?;
        let (y, [alpha, beta]) = match b.has(&format!("blk.{layer}.attn_norm_2.weight")) {
            true => (mix(&mut b, &dims, layer, h)?, lightning),
            false => (parts::attend(&mut b, &dims, attn, layer, h)?, full),
        };
        b.push(Op::Scale { x: h, scale: alpha });
        if beta != 1.0 {
            b.push(Op::Scale { x: y, scale: beta });
        }
        b.push(Op::Add { x: h, y });

        x = parts::norm(&mut b, &dims, layer, "ffn_norm", h, "f")?;
        let (y, weights) = parts::routed(&mut b, &dims, &moe, layer, x)?;
        b.push(Op::Scale { x, scale: experts[0] });
        b.push(Op::Combine { x, add: true, y, weights, norm: None });
    }
    parts::head(b, &dims, x)
}

/// The factors of one part; those that a folder does not name are 1.
fn factors(keys: Keys, [alpha, beta]: [Key; 2]) -> Result<[f32; 2], Error> {
    let found = keys.opt_positive(alpha)?;
    if found.is_none() && !keys.is_folder() {
        return Err(keys.error(alpha, "is missing".into()));
    }
    Ok([found.unwrap_or(1.0) as f32, keys.opt_positive(beta)?.unwrap_or(1.0) as f32])
}

/// `out(norm(sum(silu(qkv(h)))) ⊙ σ(gate(h)))`.
fn mix(b: &mut Builder, dims: &Dims, layer: usize, h: Buf) -> Result<Buf, Error> {
    let &Dims { d_model, n_head, d_k: d, .. } = dims;
    let row = n_head * d;
    for table in TABLES {
        b.skip(&format!("blk.{layer}.{table}"));
    }
    let gate = linear(b, layer, "attn_qkv", h, [3 * row, d_model], "qkv_gate")?;
    let qkv = b.buf("qkv", Rows::Tokens, 3 * row);
    b.push(Op::SplitHeads { x: gate, n_head: 1, parts: vec![(3 * row, qkv)] });
    b.push(Op::GateBy { x: qkv, gate, factor: GateFactor::Sigmoid });
    let [q, k, v] = ["q", "k", "v"].map(|name| b.buf(name, Rows::Tokens, row));
    b.push(Op::SplitHeads { x: qkv, n_head, parts: vec![(d, q), (d, k), (d, v)] });

    let [g, beta] = ["g", "beta"].map(|name| b.buf(name, Rows::Tokens, n_head));
    b.push(Op::Constant { values: decays(dims, layer), out: g });
    b.push(Op::Constant { values: vec![1.0; n_head], out: beta });
    let (sharing, rule) = (Sharing::Grouped, DeltaRule::Sum);
    let heads = DeltaHeads { n_k_head: n_head, n_v_head: n_head, d_k: d, d_v: d, sharing, rule };
    let state = b.state(StateDecl { what: "sum", n: row * d });
    let o = b.buf("sum", Rows::Tokens, row);
    b.push(Op::DeltaNet { q, k, v, g, beta, skip: None, state, heads, out: o });

    let w = b.vector(&format!("blk.{layer}.attn_norm_2.weight"), row)?;
    let normed = b.rms_norm(o, w, EPS, "normed");
    let gate = linear(b, layer, "attn_gate", h, [row, d_model], "z")?;
    b.push(Op::GateBy { x: normed, gate, factor: GateFactor::Sigmoid });
    linear(b, layer, "attn_output", normed, [d_model, row], "o")
}

/// The decay of each head: `exp(-slope)` with ALiBi's slopes (arXiv 2108.12409), which fall to almost nothing in the
/// last layer.
fn decays(dims: &Dims, layer: usize) -> Vec<f32> {
    let n_head = dims.n_head as f64;
    let factor = 1.0 - layer as f64 / ((dims.n_layer - 1) as f64 + 1e-5) + 1e-5;
    let slope = |head: usize| libm::exp2(-8.0 * (head + 1) as f64 / n_head) * factor;
    (0..dims.n_head).map(|head| libm::exp(-slope(head)) as f32).collect()
}
