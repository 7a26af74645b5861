//! Ling 3.0 (`bailing_hybrid`): most layers are Kimi's delta nets with bounded decays and full-rank gates, one of a
//! group is latent attention whose heads have gates; dense layers first, then DeepSeek's experts.

use checkpoint::Checkpoint;

use super::deepseek2;
use super::keys::{Key, Keys, MAX_HEAD_WIDTH, key};
use super::kimi_linear::{Kda, MAX_CONV_WIDTH};
use super::parts;
use super::shared_moe::{Defaults, SharedMoe, Unsaid};
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{Plan, Read, Score};

const CONV_WIDTH: Key = key("ssm.conv_kernel", &["short_conv_kernel_size"]);
const D_HEAD: Key = key("kda.head_dim", &["head_dim"]);
const IS_BOUNDED: Key = key("kda.safe_gate", &["kda_safe_gate"]);
const BOUND: Key = key("kda.gate_lower_bound", &["kda_lower_bound"]);
const GATES: Key = key("", &["gated_attention_proj_granularity_type"]);
/// Sections of a rotary embedding, in files of models that see.
const SECTIONS: Key = key("rope.dimension_sections", &["mrope_section", "rope_parameters.mrope_section"]);

const ALIASES: &[Alias] = &[
    ("token_embd", &["word_embeddings"]),
    ("attn_q", &["attention.q_proj"]),
    ("attn_k", &["attention.k_proj"]),
    ("attn_v", &["attention.v_proj"]),
    ("attn_output", &["attention.dense", "attention.o_proj"]),
    ("attn_gate", &["attention.g_proj"]),
    ("attn_q_a", &["attention.q_a_proj"]),
    ("attn_q_a_norm", &["attention.q_a_layernorm"]),
    ("attn_q_b", &["attention.q_b_proj"]),
    ("attn_kv_a_mqa", &["attention.kv_a_proj_with_mqa"]),
    ("attn_kv_a_norm", &["attention.kv_a_layernorm"]),
    ("attn_kv_b", &["attention.kv_b_proj"]),
    ("attn_k_b", &["attention.embed_q"]),
    ("attn_v_b", &["attention.unembed_out"]),
    ("ssm_conv1d_q", &["attention.q_conv1d"]),
    ("ssm_conv1d_k", &["attention.k_conv1d"]),
    ("ssm_conv1d_v", &["attention.v_conv1d"]),
    ("ssm_f_a", &["attention.f_proj"]),
    ("ssm_g_a", &["attention.g_proj"]),
    ("ssm_beta", &["attention.b_proj"]),
    ("ssm_a", &["attention.A_log"]),
    ("ssm_dt.bias", &["attention.dt_bias"]),
    ("ssm_norm", &["attention.o_norm"]),
    ("exp_probs_b.bias", &["mlp.gate.expert_bias"]),
];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    if let Some(kind) = keys.opt_str(GATES)?.filter(|&kind| kind != "head_wise") {
        return Err(keys.error(GATES, format!("is {}, expected head_wise", crate::error::printable(kind))));
    }
    if keys.name(SECTIONS).is_some_and(|name| keys.has(&name)) {
        return Err(keys.error(SECTIONS, "is of a model that sees, which is unsupported".into()));
    }
    let (dims, latent) = deepseek2::unrotated(keys)?;
    let defaults = Defaults { score: Score::Sigmoid, renormalise: true, n_dense: None };
    let moe = SharedMoe::with(keys, defaults, Unsaid { scale: 2.5, groups: [8, 4] })?;
    let names = keys.names();
    // Some configs give the width of all shared experts, some of one: the tensors say which.
    let shared = (0..dims.n_layer).find_map(|layer| names.tensor(&format!("blk.{layer}.ffn_gate_shexp.weight")));
    let moe = moe.shared(shared.and_then(|info| info.shape.first().copied()).unwrap_or(0));
    let (decay, bound) = decays(keys)?;
    let kda = Kda {
        n_head: dims.n_head,
        d_head: keys.count(D_HEAD, MAX_HEAD_WIDTH)?,
        conv_width: keys.opt_count(CONV_WIDTH, MAX_CONV_WIDTH)?.unwrap_or(4),
        decay,
        bound,
        is_full: true,
    };

    let mut b = Builder::new(names, "bailingmoe3", dims.n_vocab, dims.d_model, dims.n_ctx_train);
    b.skip_layers_from(dims.n_layer);
    let mut latent = latent.turning(keys, &mut b)?;
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

/// The stored form of decay rates, and the least logarithm of a decay. GGUF files keep rates without a sign, and have
/// bounded decays alone.
fn decays(keys: Keys) -> Result<(Read, Option<f32>), Error> {
    if !keys.opt_bool(IS_BOUNDED)?.unwrap_or(true) {
        return match keys.is_folder() {
            true => Ok((Read::NegExp, None)),
            false => Err(keys.error(IS_BOUNDED, "is false, expected bounded decays".into())),
        };
    }
    let name = keys.name(BOUND).unwrap_or_default();
    let bound = match keys.number(&name)? {
        Some(bound) => bound as f32,
        None if keys.is_folder() => -5.0,
        None => return Err(keys.error(BOUND, "is missing".into())),
    };
    if !(bound.is_finite() && bound < 0.0) {
        return Err(keys.error(BOUND, format!("is {bound}, expected less than 0")));
    }
    Ok((if keys.is_folder() { Read::Exp } else { Read::Plain }, Some(bound)))
}
