//! Nemotron-H, Nemotron Nano 2 and Nemotron 3: every layer is one of Mamba-2, attention without rotation, a
//! feed-forward that squares what it rectifies, or experts of that kind (arXiv 2504.03624). The Super size has its
//! routed experts between two products, in fewer numbers.

use checkpoint::Checkpoint;

use super::keys::{Key, Keys, MAX_WIDTH, key};
use super::mamba2::Mamba2;
use super::parts::{self, Attention};
use super::shared_moe::{Defaults, SharedMoe};
use crate::Error;
use crate::names::Alias;
use crate::plan::build::Builder;
use crate::plan::{Op, Plan, Score};

const EPS: Key = key("attention.layer_norm_rms_epsilon", &["layer_norm_epsilon", "norm_eps", "rms_norm_eps"]);
const D_LATENT: Key = key("moe_latent_size", &["moe_latent_size"]);

const ALIASES: &[Alias] = &[
    ("token_embd", &["embeddings"]),
    ("output_norm", &["norm_f"]),
    ("attn_norm", &["norm"]),
    ("attn_q", &["mixer.q_proj"]),
    ("attn_k", &["mixer.k_proj"]),
    ("attn_v", &["mixer.v_proj"]),
    ("attn_output", &["mixer.o_proj"]),
    ("ssm_in", &["mixer.in_proj"]),
    ("ssm_conv1d", &["mixer.conv1d"]),
    ("ssm_a", &["mixer.A_log"]),
    ("ssm_d", &["mixer.D"]),
    ("ssm_dt.bias", &["mixer.dt_bias"]),
    ("ssm_norm", &["mixer.norm"]),
    ("ssm_out", &["mixer.out_proj"]),
    ("ffn_up", &["mixer.up_proj"]),
    ("ffn_down", &["mixer.down_proj"]),
    ("ffn_gate_inp", &["mixer.gate"]),
    ("exp_probs_b.bias", &["mixer.gate.e_score_correction_bias"]),
    ("ffn_up_exps", &["mixer.experts.*.up_proj", "mixer.switch_mlp.fc1", "mixer.experts.up_proj"]),
    ("ffn_down_exps", &["mixer.experts.*.down_proj", "mixer.switch_mlp.fc2", "mixer.experts.down_proj"]),
    ("ffn_up_shexp", &["mixer.shared_experts.up_proj"]),
    ("ffn_down_shexp", &["mixer.shared_experts.down_proj"]),
    ("ffn_latent_down", &["mixer.fc1_latent_proj"]),
    ("ffn_latent_up", &["mixer.fc2_latent_proj"]),
];

pub(super) fn build(checkpoint: &Checkpoint) -> Result<Plan, Error> {
    let keys = Keys::new(checkpoint, ALIASES);
    let mut dims = keys.dims_by(EPS)?;
    dims.n_layer = keys.trunk(dims.n_layer)?;
    let mamba = Mamba2::new(&keys)?;
    let has_experts = (0..dims.n_layer).any(|layer| keys.names().has(&format!("blk.{layer}.ffn_gate_inp.weight")));
    let defaults = Defaults { score: Score::Sigmoid, renormalise: true, n_dense: None };
    let d_latent = keys.opt_count(D_LATENT, MAX_WIDTH)?;
    let moe = has_experts.then(|| SharedMoe::new(keys, defaults)).transpose()?.map(|moe| moe.squared(d_latent));
    let arch = if has_experts { "nemotron_h_moe" } else { "nemotron_h" };

    let mut b = Builder::new(keys.names(), arch, dims.n_vocab, dims.d_model, dims.n_ctx_train);
    b.skip_layers_from(dims.n_layer);
    let attn = Attention::unrotated(dims.d_k);
    let x = parts::embed(&mut b, &dims)?;
    for layer in 0..dims.n_layer {
        b.layer(Some(layer as u32));
        let has = |name: &str| b.has(&format!("blk.{layer}.{name}.weight"));
        let (attends, is_routed) = (has("attn_q") || has("attn_qkv"), has("ffn_gate_inp"));
        let h = parts::norm(&mut b, &dims, layer, "attn_norm", x, "h")?;
        let y = match &moe {
            Some(moe) if is_routed => {
                moe.mix(&mut b, &dims, layer, (x, h))?;
                continue;
            }
            _ if Mamba2::is_in(&b, layer) => mamba.mix(&mut b, &dims, layer, h, true)?,
            _ if attends => parts::attend(&mut b, &dims, attn, layer, h)?,
            _ => parts::squared(&mut b, &dims, ["ffn_up", "ffn_down"], keys.d_ff()?, layer, h, "y")?,
        };
        b.push(Op::Add { x, y });
    }
    parts::head(b, &dims, x)
}
