//! Kimi Linear (arXiv 2510.26692): three of four layers are delta nets whose keys decay number by number, the others
//! latent attention without rotation; a dense feed-forward first, then DeepSeek's experts.

use checkpoint::Checkpoint;

use super::deepseek2;
use super::keys::{Dims, Key, Keys, MAX_HEAD_WIDTH, MAX_HEADS, key};
use super::parts::{self, linear};
use super::shared_moe::{Defaults, SharedMoe};
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{Buf, DeltaHeads, DeltaRule, GateFactor, Op, Plan, Read, Rows, Score, Sharing, StateDecl};

const CONV_WIDTH: Key = key("ssm.conv_kernel", &["linear_attn_config.short_conv_kernel_size"]);
const D_HEAD: Key = key("kda.head_dim", &["linear_attn_config.head_dim"]);
const N_HEAD: Key = key("attention.head_count", &["linear_attn_config.num_heads"]);

pub(super) const MAX_CONV_WIDTH: usize = 64;

/// Added to the sum of squares of a head of q or k before it is brought to length 1; fixed in the original code.
const QK_EPS: f32 = 1e-6;

const ALIASES: &[Alias] = &[
    ("attn_kv_a_mqa", &["self_attn.kv_a_proj_with_mqa"]),
    ("attn_kv_a_norm", &["self_attn.kv_a_layernorm"]),
    ("attn_kv_b", &["self_attn.kv_b_proj"]),
    ("attn_k_b", &["self_attn.embed_q"]),
    ("attn_v_b", &["self_attn.unembed_out"]),
    ("ssm_conv1d_q", &["self_attn.q_conv1d", "self_attn.q_conv.conv"]),
    ("ssm_conv1d_k", &["self_attn.k_conv1d", "self_attn.k_conv.conv"]),
    ("ssm_conv1d_v", &["self_attn.v_conv1d", "self_attn.v_conv.conv"]),
    ("ssm_f_a", &["self_attn.f_a_proj"]),
    ("ssm_f_b", &["self_attn.f_b_proj"]),
    ("ssm_g_a", &["self_attn.g_a_proj"]),
    ("ssm_g_b", &["self_attn.g_b_proj"]),
    ("ssm_beta", &["self_attn.b_proj"]),
    ("ssm_a", &["self_attn.A_log"]),
    ("ssm_dt.bias", &["self_attn.dt_bias"]),
    ("ssm_norm", &["self_attn.o_norm"]),
    ("ffn_gate_inp", &["block_sparse_moe.gate"]),
    ("exp_probs_b.bias", &["block_sparse_moe.gate.e_score_correction_bias", "mlp.e_score_correction_bias"]),
    ("ffn_gate_exps", &["block_sparse_moe.experts.*.w1"]),
    ("ffn_up_exps", &["block_sparse_moe.experts.*.w3"]),
    ("ffn_down_exps", &["block_sparse_moe.experts.*.w2"]),
    ("ffn_gate_shexp", &["block_sparse_moe.shared_experts.gate_proj"]),
    ("ffn_up_shexp", &["block_sparse_moe.shared_experts.up_proj"]),
    ("ffn_down_shexp", &["block_sparse_moe.shared_experts.down_proj"]),
];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let (dims, mut latent) = deepseek2::unrotated(keys)?;
    let moe = SharedMoe::new(keys, Defaults { score: Score::Sigmoid, renormalise: true, n_dense: None })?;
    // GGUF files have no key for it.
    let moe = if keys.is_folder() { moe } else { moe.renormalised() };
    let kda = Kda {
        n_head: keys.count(N_HEAD, MAX_HEADS)?,
        d_head: keys.count(D_HEAD, MAX_HEAD_WIDTH)?,
        conv_width: keys.count(CONV_WIDTH, MAX_CONV_WIDTH)?,
        decay: if keys.is_folder() { Read::NegExp } else { Read::Plain },
        bound: None,
        is_full: false,
    };

    let mut b = Builder::new(keys.names(), "kimi-linear", dims.n_vocab, dims.d_model, dims.n_ctx_train);
    b.skip_layers_from(dims.n_layer);
    let x = parts::embed(&mut b, &dims)?;
    for layer in 0..dims.n_layer {
        b.layer(Some(layer as u32));
        match b.has(&format!("blk.{layer}.ssm_conv1d_q.weight")) {
            true => kda.mix(&mut b, &dims, layer, x)?,
            false => deepseek2::attention(&mut b, &dims, &mut latent, layer, x)?,
        }
        moe.layer(&mut b, &dims, layer, x)?;
    }
    parts::head(b, &dims, x)
}

/// Kimi's delta nets (KDA), with heads of one width.
#[derive(Clone, Copy)]
pub(super) struct Kda {
    pub n_head: usize,
    pub d_head: usize,
    pub conv_width: usize,
    /// The stored form of decay rates.
    pub decay: Read,
    /// The least logarithm of a decay, where decays are bounded.
    pub bound: Option<f32>,
    /// Decays and gate come by one matrix each, not through a few numbers.
    pub is_full: bool,
}

impl Kda {
    /// `x += out(norm(delta_net(norm(x))) ⊙ σ(gate))`.
    pub fn mix(&self, b: &mut Builder, dims: &Dims, layer: usize, x: Buf) -> Result<(), Error> {
        let &Kda { n_head, d_head, conv_width, .. } = self;
        let (row, d_model) = (n_head * d_head, dims.d_model);
        let name = |name: &str| format!("blk.{layer}.{name}");
        let h = parts::norm(b, dims, layer, "attn_norm", x, "h")?;
        let mut qkv = [h; 3];
        for (out, part) in qkv.iter_mut().zip(["q", "k", "v"]) {
            let x = linear(b, layer, &format!("attn_{part}"), h, [row, d_model], part)?;
            let w = b.weight(&name(&format!("ssm_conv1d_{part}.weight")), &[row, conv_width])?;
            let state = b.state(StateDecl { what: "conv", n: (conv_width - 1) * row });
            *out = b.buf(&format!("conv_{part}"), Rows::Tokens, row);
            b.push(Op::CausalConv { x, w, bias: None, silu: true, state, out: *out });
        }
        let [q, k, v] = qkv;
        // To length 1, which is the root of the mean square by that of d_head; q is also scaled as in attention.
        let d = d_head as f32;
        for (x, scale) in [(q, 1.0 / d), (k, 1.0 / d.sqrt())] {
            b.push(Op::HeadNorm { x, w: None, eps: QK_EPS / d, n_head, d_head });
            b.push(Op::Scale { x, scale });
        }

        let a = self.product(b, dims, layer, h, "f")?;
        let rate = linear(b, layer, "ssm_beta", h, [n_head, d_model], "b")?;
        let a_log = b.vector_read(&name("ssm_a"), n_head, self.decay)?;
        let dt_bias = b.vector(&name("ssm_dt.bias"), row)?;
        let (g, beta) = (b.buf("g", Rows::Tokens, row), b.buf("beta", Rows::Tokens, n_head));
        b.push(Op::DecayBeta { a, b: Some(rate), a_log, dt_bias, bound: self.bound, g_out: g, beta_out: beta });
        let (sharing, rule) = (Sharing::Grouped, DeltaRule::Delta);
        let heads = DeltaHeads { n_k_head: n_head, n_v_head: n_head, d_k: d_head, d_v: d_head, sharing, rule };
        let state = b.state(StateDecl { what: "delta", n: row * d_head });
        let o = b.buf("o", Rows::Tokens, row);
        b.push(Op::DeltaNet { q, k, v, g, beta, skip: None, state, heads, out: o });

        let w = Some(b.vector(&name("ssm_norm.weight"), d_head)?);
        b.push(Op::HeadNorm { x: o, w, eps: dims.eps, n_head, d_head });
        let gate = self.product(b, dims, layer, h, "g")?;
        b.push(Op::GateBy { x: o, gate, factor: GateFactor::Sigmoid });
        let y = linear(b, layer, "attn_output", o, [d_model, row], "y")?;
        b.push(Op::Add { x, y });
        Ok(())
    }

    /// What decays (`f`) or the gate (`g`) are made of.
    fn product(&self, b: &mut Builder, dims: &Dims, layer: usize, h: Buf, of: &str) -> Result<Buf, Error> {
        let (row, out) = (self.n_head * self.d_head, if of == "g" { "z" } else { of });
        let first = format!("ssm_{of}_a");
        if self.is_full {
            return linear(b, layer, &first, h, [row, dims.d_model], out);
        }
        let few = linear(b, layer, &first, h, [self.d_head, dims.d_model], &format!("{of}_few"))?;
        linear(b, layer, &format!("ssm_{of}_b"), few, [row, self.d_head], out)
    }
}
