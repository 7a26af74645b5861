//! LFM2 and LFM2.5, dense and with experts: most layers are short convolutions between two gates, the others attention
//! with normalized q and k (arXiv 2511.23404).

use checkpoint::Checkpoint;

use super::keys::{Dims, Key, Keys, key};
use super::parts::{self, Attention, QkNorm, linear};
use super::shared_moe::{Defaults, SharedMoe};
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{Buf, GateFactor, Op, Plan, RopePairing, Rows, Score, StateDecl};

const EPS: Key = key("attention.layer_norm_rms_epsilon", &["norm_eps"]);
const CONV_WIDTH: Key = key("shortconv.l_cache", &["conv_L_cache"]);

const MAX_CONV_WIDTH: usize = 64;

/// Added to the sum of the weights of experts before they are divided by it.
const SUM_EPS: f32 = 1e-6;

const ALIASES: &[Alias] = &[
    ("output_norm", &["=token_embd_norm", "embedding_norm"]),
    ("attn_norm", &["operator_norm"]),
    ("ffn_norm", &["ffn_norm"]),
    ("shortconv.in_proj", &["conv.in_proj"]),
    ("shortconv.conv", &["conv.conv"]),
    ("shortconv.out_proj", &["conv.out_proj"]),
    ("attn_q_norm", &["self_attn.q_layernorm"]),
    ("attn_k_norm", &["self_attn.k_layernorm"]),
    ("attn_output", &["self_attn.out_proj"]),
    ("ffn_gate", &["feed_forward.w1", "feed_forward.gate_proj"]),
    ("ffn_up", &["feed_forward.w3", "feed_forward.up_proj"]),
    ("ffn_down", &["feed_forward.w2", "feed_forward.down_proj"]),
    ("ffn_gate_inp", &["feed_forward.gate"]),
    ("exp_probs_b.bias", &["feed_forward.expert_bias"]),
    ("ffn_gate_exps", &["feed_forward.experts.*.w1", "feed_forward.switch_mlp.gate_proj"]),
    ("ffn_up_exps", &["feed_forward.experts.*.w3", "feed_forward.switch_mlp.up_proj"]),
    ("ffn_down_exps", &["feed_forward.experts.*.w2", "feed_forward.switch_mlp.down_proj"]),
];

pub(super) fn build_dense(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    build(Keys::new(checkpoint, ALIASES), "lfm2", None)
}

pub(super) fn build_moe(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let moe = SharedMoe::new(keys, Defaults { score: Score::Sigmoid, renormalise: true, n_dense: None })?;
    // GGUF files have no key for it.
    let moe = if keys.is_folder() { moe } else { moe.renormalised() };
    build(keys, "lfm2moe", Some(moe.sum_eps(SUM_EPS)))
}

fn build(keys: Keys, arch: &str, moe: Option<SharedMoe>) -> Result<Plan, Error> {
    let dims = keys.dims_by(EPS)?;
    let conv_width = keys.count(CONV_WIDTH, MAX_CONV_WIDTH)?;
    let rope = keys.rope(dims.d_k, RopePairing::Half)?;

    let mut b = Builder::new(keys.names(), arch, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let attn = Attention { qk_norm: Some(QkNorm::HEADS), ..Attention::plain(b.rope(rope), dims.d_k) };
    let x = parts::embed(&mut b, &dims)?;
    for layer in 0..dims.n_layer {
        b.layer(Some(layer as u32));
        match b.has(&format!("blk.{layer}.shortconv.conv.weight")) {
            true => short_conv(&mut b, &dims, conv_width, layer, x)?,
            false => parts::attention(&mut b, &dims, attn, layer, x)?,
        }
        match &moe {
            Some(moe) => moe.layer(&mut b, &dims, layer, x)?,
            None => {
                // Folders say the width before it is rounded.
                let rows = b.n_rows(&format!("blk.{layer}.ffn_gate.weight"));
                let d_ff = rows.map_or_else(|| keys.d_ff(), Ok)?;
                parts::feed_forward(&mut b, &dims, d_ff, layer, x)?;
            }
        }
    }
    parts::head(b, &dims, x)
}

/// `x += out(c ⊙ conv(b ⊙ v))`, where one product of `norm(x)` makes b, c and v.
fn short_conv(b: &mut Builder, dims: &Dims, width: usize, layer: usize, x: Buf) -> Result<(), Error> {
    let d = dims.d_model;
    let h = parts::norm(b, dims, layer, "attn_norm", x, "h")?;
    let all = linear(b, layer, "shortconv.in_proj", h, [3 * d, d], "bcv")?;
    let [before, after, v] = ["b", "c", "v"].map(|name| b.buf(name, Rows::Tokens, d));
    b.push(Op::SplitHeads { x: all, n_head: 1, parts: vec![(d, before), (d, after), (d, v)] });
    b.push(Op::GateBy { x: v, gate: before, factor: GateFactor::Plain });
    let w = b.weight(&format!("blk.{layer}.shortconv.conv.weight"), &[d, width])?;
    let bias = b.opt_vector(&format!("blk.{layer}.shortconv.conv.bias"), d)?;
    let state = b.state(StateDecl { what: "conv", n: (width - 1) * d });
    let conv = b.buf("conv", Rows::Tokens, d);
    b.push(Op::CausalConv { x: v, w, bias, silu: false, state, out: conv });
    b.push(Op::GateBy { x: conv, gate: after, factor: GateFactor::Plain });
    let y = linear(b, layer, "shortconv.out_proj", conv, [d, d], "y")?;
    b.push(Op::Add { x, y });
    Ok(())
}
