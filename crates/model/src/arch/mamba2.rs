//! Mamba-2 (Dao, Gu: "Transformers are SSMs", arXiv 2405.21060), which Nemotron-H, Granite 4 H and Falcon-H1 have
//! between or next to their attention layers: a convolution, then linear attention with decay, whose q, k and v are the
//! paper's C, B and x.

use super::keys::{Dims, Key, Keys, MAX_HEAD_WIDTH, MAX_HEADS, MAX_WIDTH, key};
use super::parts::linear;
use crate::Error;
use crate::plan::build::Builder;
use crate::plan::{Buf, DeltaHeads, DeltaRule, Gate, Op, Read, Rows, Sharing, StateDecl};

const CONV_WIDTH: Key = key("ssm.conv_kernel", &["conv_kernel", "mamba_d_conv"]);
const D_STATE: Key = key("ssm.state_size", &["ssm_state_size", "mamba_d_state"]);
const N_GROUP: Key = key("ssm.group_count", &["n_groups", "mamba_n_groups"]);
const N_HEAD: Key = key("ssm.time_step_rank", &["mamba_num_heads", "mamba_n_heads"]);
/// The least and the most that a step size may be.
const STEP_LIMIT: Key = key("", &["time_step_limit"]);

const MAX_CONV_WIDTH: usize = 64;

/// The layers of a model.
#[derive(Clone, Copy)]
pub(super) struct Mamba2 {
    conv_width: usize,
    d_state: usize,
    n_group: usize,
    n_head: usize,
    /// The stored form of decay rates.
    decay: Read,
    /// Whether files keep a norm of groups as one vector.
    is_folder: bool,
    /// Factors on z, x, B, C and the step size (Falcon-H1), in front of what is made of them.
    scales: [f32; 5],
}

impl Mamba2 {
    pub fn new(keys: &Keys) -> Result<Self, Error> {
        let (n_group, n_head) = (keys.count(N_GROUP, MAX_HEADS)?, keys.count(N_HEAD, MAX_HEADS)?);
        if !n_head.is_multiple_of(n_group) {
            let heads = keys.name(N_HEAD).unwrap_or_default();
            return Err(keys.error(N_GROUP, format!("is {n_group}, which does not divide {heads} {n_head}")));
        }
        if let Some(name) = keys.name(STEP_LIMIT).filter(|name| keys.has(name)) {
            let limits = keys.meta().f32s(&name)?;
            if limits != [0.0, f32::INFINITY] {
                return Err(keys.error(STEP_LIMIT, format!("is {limits:?}, expected no limits: [0, Infinity]")));
            }
        }
        Ok(Self {
            conv_width: keys.count(CONV_WIDTH, MAX_CONV_WIDTH)?,
            d_state: keys.count(D_STATE, MAX_HEAD_WIDTH)?,
            n_group,
            n_head,
            decay: if keys.is_folder() { Read::NegExp } else { Read::Plain },
            is_folder: keys.is_folder(),
            scales: [1.0; 5],
        })
    }

    /// The same with factors on z, x, B, C and the step size.
    pub fn scaled(self, scales: [f32; 5]) -> Self {
        Self { scales, ..self }
    }

    /// Returns whether the layer has one.
    pub fn is_in(b: &Builder, layer: usize) -> bool {
        b.has(&format!("blk.{layer}.ssm_in.weight"))
    }

    /// Width of all heads of v, by the rows of the first product: z, x, B, C and the step sizes. Configs say it in
    /// three ways.
    fn inner(&self, b: &Builder, layer: usize) -> Result<usize, Error> {
        let name = format!("blk.{layer}.ssm_in.weight");
        let rest = self.n_group * self.d_state * 2 + self.n_head;
        let rows = b.n_rows(&name).unwrap_or(0);
        match rows.checked_sub(rest).map(|n| n / 2) {
            Some(n) if n > 0 && n <= MAX_WIDTH && rows == 2 * n + rest && n.is_multiple_of(self.n_head) => Ok(n),
            _ => {
                let what = format!("has {rows} rows, expected {rest} and twice a multiple of {}", self.n_head);
                Err(b.error(&name, what))
            }
        }
    }

    /// `out(norm(sum(conv(h)) ⊙ silu(z)))`, the norm where the file has one, before the gate where `gate_first` is
    /// false.
    pub fn mix(&self, b: &mut Builder, dims: &Dims, layer: usize, h: Buf, gate_first: bool) -> Result<Buf, Error> {
        let &Self { conv_width, d_state, n_group, n_head, scales, .. } = self;
        let name = |name: &str| format!("blk.{layer}.{name}");
        let (inner, k_row) = (self.inner(b, layer)?, n_group * d_state);
        let conv_row = inner + 2 * k_row;
        let all = linear(b, layer, "ssm_in", h, [inner + conv_row + n_head, dims.d_model], "zxbcdt")?;
        let (z, dt) = (b.buf("z", Rows::Tokens, inner), b.buf("dt", Rows::Tokens, n_head));
        let xbc = b.buf("xbc", Rows::Tokens, conv_row);
        if scales == [1.0; 5] {
            let parts = vec![(inner, z), (conv_row, xbc), (n_head, dt)];
            b.push(Op::SplitHeads { x: all, n_head: 1, parts });
        } else {
            let widths = [("x", inner), ("b", k_row), ("c", k_row)];
            let inputs = widths.map(|(name, n)| (n, b.buf(name, Rows::Tokens, n)));
            let parts = [&[(inner, z)], &inputs[..], &[(n_head, dt)]].concat();
            b.push(Op::SplitHeads { x: all, n_head: 1, parts: parts.clone() });
            for ((_, x), scale) in parts.into_iter().zip(scales) {
                b.push(Op::Scale { x, scale });
            }
            b.push(Op::JoinHeads { parts: inputs.to_vec(), n_head: 1, out: xbc });
        }

        let w = b.weight(&name("ssm_conv1d.weight"), &[conv_row, conv_width])?;
        let bias = b.opt_vector(&name("ssm_conv1d.bias"), conv_row)?;
        let state = b.state(StateDecl { what: "conv", n: (conv_width - 1) * conv_row });
        let conv = b.buf("conv", Rows::Tokens, conv_row);
        b.push(Op::CausalConv { x: xbc, w, bias, silu: true, state, out: conv });
        let [v, k, q] = [("v", inner), ("k", k_row), ("q", k_row)].map(|(name, n)| b.buf(name, Rows::Tokens, n));
        b.push(Op::SplitHeads { x: conv, n_head: 1, parts: vec![(inner, v), (k_row, k), (k_row, q)] });

        let a_log = b.vector_read(&name("ssm_a"), n_head, self.decay)?;
        let dt_bias = b.vector(&name("ssm_dt.bias"), n_head)?;
        let [g, beta] = ["g", "beta"].map(|name| b.buf(name, Rows::Tokens, n_head));
        b.push(Op::DecayBeta { a: dt, b: None, a_log, dt_bias, bound: None, g_out: g, beta_out: beta });
        let skip = Some(b.vector(&name("ssm_d"), n_head)?);
        let (sharing, rule) = (Sharing::Grouped, DeltaRule::Sum);
        let heads =
            DeltaHeads { n_k_head: n_group, n_v_head: n_head, d_k: d_state, d_v: inner / n_head, sharing, rule };
        let state = b.state(StateDecl { what: "sum", n: inner * d_state });
        let o = b.buf("o", Rows::Tokens, inner);
        b.push(Op::DeltaNet { q, k, v, g, beta, skip, state, heads, out: o });

        let y = match b.has(&name("ssm_norm.weight")) {
            true => {
                let d_head = inner / n_group;
                let w = self.norm(b, &name("ssm_norm.weight"), n_group, d_head)?;
                b.push(Op::GatedNorm { x: o, gate: z, w, gate_first, eps: dims.eps, n_head: n_group, d_head });
                o
            }
            false => {
                let y = b.buf("gated", Rows::Tokens, inner);
                b.push(Op::GatedAct { gate: z, up: o, act: Gate::Silu, out: y });
                y
            }
        };
        linear(b, layer, "ssm_out", y, [dims.d_model, inner], "y")
    }

    /// Weights of each group's norm, of which folders make one vector.
    fn norm(&self, b: &mut Builder, name: &str, n_group: usize, d_head: usize) -> Result<crate::plan::Weight, Error> {
        match (n_group, self.is_folder) {
            (1, _) => b.vector(name, d_head),
            (_, true) => b.rows_of_vector(name, [n_group, d_head]),
            (_, false) => b.weight(name, &[n_group, d_head]),
        }
    }
}
