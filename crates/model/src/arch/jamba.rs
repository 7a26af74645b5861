//! Jamba (arXiv 2403.19887): Mamba-1 in most layers, attention without rotation in the others, experts in some.
//!
//! Mamba-1 (arXiv 2312.00752) is linear attention with decay, as Mamba-2 is: a channel is a head of v one number wide,
//! all heads share the paper's C and B as q and k, and every number of a head's state has a decay.

use checkpoint::Checkpoint;

use super::keys::{Dims, Key, Keys, MAX_HEAD_WIDTH, MAX_WIDTH, MoeDims, key};
use super::kimi_linear::MAX_CONV_WIDTH;
use super::parts::{self, Attention, linear};
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{Buf, DeltaHeads, DeltaRule, Gate, Op, Plan, Read, Rows, Sharing, StateDecl};

const CONV_WIDTH: Key = key("ssm.conv_kernel", &["mamba_d_conv"]);
const D_STATE: Key = key("ssm.state_size", &["mamba_d_state"]);
/// Numbers that step sizes are made of.
const RANK: Key = key("ssm.time_step_rank", &["mamba_dt_rank"]);
const EXPAND: Key = key("", &["mamba_expand"]);
const INNER: Key = key("ssm.inner_size", &[]);

const ALIASES: &[Alias] = &[
    ("output_norm", &["final_layernorm"]),
    ("ffn_norm", &["pre_ff_layernorm"]),
    ("ssm_in", &["mamba.in_proj"]),
    ("ssm_conv1d", &["mamba.conv1d"]),
    ("ssm_x", &["mamba.x_proj"]),
    ("ssm_dt_norm", &["mamba.dt_layernorm"]),
    ("ssm_b_norm", &["mamba.b_layernorm"]),
    ("ssm_c_norm", &["mamba.c_layernorm"]),
    ("ssm_dt", &["mamba.dt_proj"]),
    ("ssm_a", &["mamba.A_log"]),
    ("ssm_d", &["mamba.D"]),
    ("ssm_out", &["mamba.out_proj"]),
    ("ffn_gate", &["feed_forward.gate_proj"]),
    ("ffn_up", &["feed_forward.up_proj"]),
    ("ffn_down", &["feed_forward.down_proj"]),
    ("ffn_gate_inp", &["feed_forward.router"]),
    ("ffn_gate_exps", &["feed_forward.switch_mlp.gate_proj", "feed_forward.experts.*.gate_proj"]),
    ("ffn_up_exps", &["feed_forward.switch_mlp.up_proj", "feed_forward.experts.*.up_proj"]),
    ("ffn_down_exps", &["feed_forward.switch_mlp.down_proj", "feed_forward.experts.*.down_proj"]),
];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let (dims, d_ff) = (keys.dims()?, keys.d_ff()?);
    let mamba = Mamba1::new(keys, dims.d_model)?;

    let mut b = Builder::new(keys.names(), "jamba", dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let attn = Attention::unrotated(dims.d_k);
    let x = parts::embed(&mut b, &dims)?;
    for layer in 0..dims.n_layer {
        b.layer(Some(layer as u32));
        match b.has(&format!("blk.{layer}.ssm_in.weight")) {
            true => mamba.mix(&mut b, &dims, layer, x)?,
            false => parts::attention(&mut b, &dims, attn, layer, x)?,
        }
        match b.has(&format!("blk.{layer}.ffn_gate_inp.weight")) {
            true => {
                let n_expert = keys.some_experts()?;
                let n_used = keys.n_used(n_expert)?;
                let moe = MoeDims { n_expert, n_used, d_ff, renormalise: false, scale: 1.0 };
                parts::experts(&mut b, &dims, &moe, layer, x)?;
            }
            false => parts::feed_forward(&mut b, &dims, d_ff, layer, x)?,
        }
    }
    parts::head(b, &dims, x)
}

/// The widths of Mamba-1.
struct Mamba1 {
    conv_width: usize,
    d_state: usize,
    rank: usize,
    /// Channels.
    inner: usize,
    /// The stored form of decay rates.
    decay: Read,
}

impl Mamba1 {
    fn new(keys: Keys, d_model: usize) -> Result<Self, Error> {
        let inner = match keys.is_folder() {
            true => keys.opt_count(EXPAND, MAX_WIDTH)?.unwrap_or(2).saturating_mul(d_model),
            false => keys.count(INNER, MAX_WIDTH)?,
        };
        if inner > MAX_WIDTH {
            return Err(keys.error(EXPAND, format!("makes {inner} channels, expected at most {MAX_WIDTH}")));
        }
        let is_auto = keys.is_folder() && matches!(keys.opt_str(RANK), Ok(None | Some("auto")));
        Ok(Self {
            conv_width: keys.opt_count(CONV_WIDTH, MAX_CONV_WIDTH)?.unwrap_or(4),
            d_state: keys.opt_count(D_STATE, MAX_HEAD_WIDTH)?.unwrap_or(16),
            rank: if is_auto { d_model.div_ceil(16) } else { keys.count(RANK, MAX_WIDTH)? },
            inner,
            decay: if keys.is_folder() { Read::NegExp } else { Read::Plain },
        })
    }

    /// `x += out(sum(conv(norm(x))) ⊙ silu(z))`.
    fn mix(&self, b: &mut Builder, dims: &Dims, layer: usize, x: Buf) -> Result<(), Error> {
        let &Self { conv_width, d_state, rank, inner, decay } = self;
        let name = |name: &str| format!("blk.{layer}.{name}");
        let h = parts::norm(b, dims, layer, "attn_norm", x, "h")?;
        let xz = linear(b, layer, "ssm_in", h, [2 * inner, dims.d_model], "xz")?;
        let [v, z] = ["v_in", "z"].map(|name| b.buf(name, Rows::Tokens, inner));
        b.push(Op::SplitHeads { x: xz, n_head: 1, parts: vec![(inner, v), (inner, z)] });
        let w = b.weight(&name("ssm_conv1d.weight"), &[inner, conv_width])?;
        let bias = b.opt_vector(&name("ssm_conv1d.bias"), inner)?;
        let state = b.state(StateDecl { what: "conv", n: (conv_width - 1) * inner });
        let conv = b.buf("v", Rows::Tokens, inner);
        b.push(Op::CausalConv { x: v, w, bias, silu: true, state, out: conv });

        let all = linear(b, layer, "ssm_x", conv, [rank + 2 * d_state, inner], "dtbc")?;
        let parts = [("ssm_dt_norm", rank), ("ssm_b_norm", d_state), ("ssm_c_norm", d_state)];
        let split = parts.map(|(name, n)| (n, b.buf(name, Rows::Tokens, n)));
        b.push(Op::SplitHeads { x: all, n_head: 1, parts: split.to_vec() });
        let mut normed = [conv; 3];
        for (((norm, n), (_, x)), (out, to)) in
            parts.into_iter().zip(split).zip(["dt", "k", "q"].iter().zip(&mut normed))
        {
            let w = b.vector(&name(&format!("{norm}.weight")), n)?;
            *to = b.rms_norm(x, w, dims.eps, out);
        }
        let [dt, k, q] = normed;
        // Its bias goes into the step size.
        let w = b.weight(&name("ssm_dt.weight"), &[inner, rank])?;
        let a = b.linear(dt, w, None, "a");
        let a_log = b.rates(&name("ssm_a"), [inner, d_state], decay)?;
        let dt_bias = b.vector(&name("ssm_dt.bias"), inner)?;
        let (g, beta) = (b.buf("g", Rows::Tokens, inner * d_state), b.buf("beta", Rows::Tokens, inner));
        b.push(Op::DecayBeta { a, b: None, a_log, dt_bias, bound: None, g_out: g, beta_out: beta });
        let skip = Some(b.vector(&name("ssm_d"), inner)?);
        let (sharing, rule) = (Sharing::Grouped, DeltaRule::Sum);
        let heads = DeltaHeads { n_k_head: 1, n_v_head: inner, d_k: d_state, d_v: 1, sharing, rule };
        let state = b.state(StateDecl { what: "sum", n: inner * d_state });
        let o = b.buf("o", Rows::Tokens, inner);
        b.push(Op::DeltaNet { q, k, v: conv, g, beta, skip, state, heads, out: o });
        let gated = b.buf("gated", Rows::Tokens, inner);
        b.push(Op::GatedAct { gate: z, up: o, act: Gate::Silu, out: gated });
        let y = linear(b, layer, "ssm_out", gated, [dims.d_model, inner], "y")?;
        b.push(Op::Add { x, y });
        Ok(())
    }
}
