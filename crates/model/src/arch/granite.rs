//! Granite 3 and 4, dense and with experts: Llama's layers with four factors, on the embedding, the scores, what each
//! part of a layer adds, and the logits. Granite 4 H has Mamba-2 in place of attention in most layers, and rotates
//! nothing.

use checkpoint::Checkpoint;

use super::keys::{Dims, Key, Keys, MAX_WIDTH, MoeDims, key};
use super::mamba2::Mamba2;
use super::parts::{self, Attention, Head};
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{Buf, Gate, Op, Plan};

const HYBRID: &str = "granitehybrid";

const EMBEDDING_SCALE: Key = key("embedding_scale", &["embedding_multiplier"]);
const SCORE_SCALE: Key = key("attention.scale", &["attention_multiplier"]);
const RESIDUAL_SCALE: Key = key("residual_scale", &["residual_multiplier"]);
const LOGIT_DIVISOR: Key = key("logit_scale", &["logits_scaling"]);
const D_FF_SHARED: Key = key("expert_shared_feed_forward_length", &["shared_intermediate_size"]);

/// Whether q and k are rotated, in a folder by a name.
const ROTATES: Key = key("rope.scaling.finetuned", &[]);
const POSITIONS: Key = key("", &["position_embedding_type"]);

const ALIASES: &[Alias] = &[
    ("ffn_gate_inp", &["block_sparse_moe.router.layer"]),
    ("ffn_gate_exps", &["block_sparse_moe.input_linear[0/2]", "block_sparse_moe.switch_mlp.gate_proj"]),
    ("ffn_up_exps", &["block_sparse_moe.input_linear[1/2]", "block_sparse_moe.switch_mlp.up_proj"]),
    ("ffn_down_exps", &["block_sparse_moe.output_linear", "block_sparse_moe.switch_mlp.down_proj"]),
    ("ffn_gate_shexp", &["shared_mlp.input_linear[0/2]"]),
    ("ffn_up_shexp", &["shared_mlp.input_linear[1/2]"]),
    ("ffn_down_shexp", &["shared_mlp.output_linear"]),
    ("ffn_gate", &["mlp.gate_proj", "shared_mlp.input_linear[0/2]"]),
    ("ffn_up", &["mlp.up_proj", "shared_mlp.input_linear[1/2]"]),
    ("ffn_down", &["mlp.down_proj", "shared_mlp.output_linear"]),
    ("ssm_in", &["mamba.in_proj"]),
    ("ssm_conv1d", &["mamba.conv1d"]),
    ("ssm_a", &["mamba.A_log"]),
    ("ssm_d", &["mamba.D"]),
    ("ssm_dt.bias", &["mamba.dt_bias"]),
    ("ssm_norm", &["mamba.norm"]),
    ("ssm_out", &["mamba.out_proj"]),
];

pub(super) fn build_dense(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    build(checkpoint, "granite")
}

pub(super) fn build_moe(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    build(checkpoint, "granitemoe")
}

pub(super) fn build_hybrid(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    build(checkpoint, HYBRID)
}

fn build(checkpoint: &Checkpoint, arch: &str) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let factor = |key| Ok::<_, Error>(keys.opt_positive(key)?.unwrap_or(1.0) as f32);
    let dims = Dims { residual: factor(RESIDUAL_SCALE)?, ..keys.dims()? };
    let moe = keys.n_expert()?.map(|n_expert| keys.moe(n_expert, true)).transpose()?;
    let d_ff = if moe.is_none() { keys.d_ff()? } else { keys.count_or_zero(D_FF_SHARED, MAX_WIDTH)? };
    let has_mamba = (0..dims.n_layer).any(|layer| keys.names().has(&format!("blk.{layer}.ssm_in.weight")));
    let mamba = has_mamba.then(|| Mamba2::new(&keys)).transpose()?;
    let is_rotated = match (arch == HYBRID, keys.is_folder()) {
        (false, _) => true,
        (true, true) => keys.opt_str(POSITIONS)? == Some("rope"),
        (true, false) => keys.opt_bool(ROTATES)?.unwrap_or(true),
    };
    let rope = keys.rope(dims.d_k, keys.llama_pairing())?;
    let head = Head { scale: Some(1.0 / factor(LOGIT_DIVISOR)?), ..Head::PLAIN };

    let mut b = Builder::new(keys.names(), arch, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    let plain = match is_rotated {
        true => Attention::plain(b.rope(rope), dims.d_k),
        false => Attention::unrotated(dims.d_k),
    };
    // The original code has 1 where a folder says nothing, readers of GGUF files the usual scale.
    let scale = keys.opt_positive(SCORE_SCALE)?.or(keys.is_folder().then_some(1.0));
    let attn = Attention { scale: scale.map_or(plain.scale, |scale| scale as f32), ..plain };
    let x = parts::embed_scaled(&mut b, &dims, factor(EMBEDDING_SCALE)?)?;
    for layer in 0..dims.n_layer {
        b.layer(Some(layer as u32));
        match &mamba {
            Some(mamba) if Mamba2::is_in(&b, layer) => {
                let h = parts::norm(&mut b, &dims, layer, "attn_norm", x, "h")?;
                let y = mamba.mix(&mut b, &dims, layer, h, true)?;
                parts::add(&mut b, &dims, layer, "post_attention_norm", x, y)?;
            }
            _ => parts::attention(&mut b, &dims, attn, layer, x)?,
        }
        match &moe {
            Some(moe) => experts(&mut b, &dims, moe, d_ff, layer, x)?,
            None => parts::feed_forward(&mut b, &dims, d_ff, layer, x)?,
        }
    }
    parts::head_with(b, &dims, head, x)
}

/// `x += residual · (Σ experts(norm(x)) + shared(norm(x)))`, by a softmax over the chosen experts.
fn experts(b: &mut Builder, dims: &Dims, moe: &MoeDims, d_ff_shared: usize, layer: usize, x: Buf) -> Result<(), Error> {
    let h = parts::norm(b, dims, layer, "ffn_norm", x, "f")?;
    let (y, weights) = parts::routed(b, dims, moe, layer, h)?;
    if d_ff_shared > 0 {
        let y = parts::mlp(b, dims, parts::SHARED, (d_ff_shared, Gate::Silu), layer, h, "shared")?;
        parts::add(b, dims, layer, "post_ffw_norm", x, y)?;
    }
    b.push(Op::Combine { x, add: true, y, weights, norm: None });
    Ok(())
}
