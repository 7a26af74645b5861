//! What GGUF files say of models with recurrent states besides delta nets: short convolutions (LFM2) and Mamba-2
//! (Granite 4 H, Nemotron-H, Falcon-H1).

use anyhow::{Context, Result, ensure};
use checkpoint::{Metadata, Value};
use model::plan::{DeltaHeads, Op, Plan};

use super::keys::{Keys, SIGMOID};
use super::weights::Scaled;

/// Architectures whose files list the heads of keys by layer, 0 where it has no attention.
pub const STATES: &[&str] = &["lfm2", "lfm2moe", "granitehybrid", "nemotron_h", "nemotron_h_moe"];

/// Returns whether some layers of a Nemotron-H have experts, of which it has two ways to say it.
pub fn has_experts(config: &Metadata) -> bool {
    match (config.opt_str("hybrid_override_pattern"), config.get("layers_block_type")) {
        (Ok(Some(pattern)), _) => pattern.contains('E'),
        (_, Some(Value::Strings(types))) => types.iter().any(|name| name == b"moe"),
        _ => false,
    }
}

/// Returns whether some layers of a Granite are Mamba-2.
pub fn has_mamba(config: &Metadata) -> bool {
    matches!(config.get("layer_types"), Some(Value::Strings(types)) if types.iter().any(|name| name == b"mamba"))
}

/// `n` for each layer with one of these tensors, 0 for the others.
pub fn by_layer(plan: &Plan, n_layer: u32, n: u32, stems: &[&str]) -> Vec<u32> {
    let has = |name: String| plan.weights.iter().any(|w| w.name == name);
    let is_there = |layer| stems.iter().any(|stem| has(format!("blk.{layer}.{stem}.weight")));
    (0..n_layer).map(|layer| if is_there(layer) { n } else { 0 }).collect()
}

/// Heads of the first Mamba-2 layer, which are those of all, and the width of its convolution.
fn mamba(plan: &Plan) -> Result<(DeltaHeads, usize)> {
    let heads = plan.ops.iter().find_map(|op| match op {
        Op::DeltaNet { heads, .. } => Some(*heads),
        _ => None,
    });
    let width = plan.ops.iter().find_map(|op| match op {
        Op::CausalConv { w, .. } => plan.weight(*w).shape.last().copied(),
        _ => None,
    });
    heads.zip(width).context("the model has no Mamba-2 layer")
}

impl Keys<'_> {
    pub(super) fn lfm(&mut self, plan: Option<&Plan>) -> Result<()> {
        self.pass("vocab_size", &["vocab_size"])?;
        self.pass("shortconv.l_cache", &["conv_L_cache"])?;
        if self.arch == "lfm2" {
            // Configs of dense models say the width before it is rounded.
            let w = plan.and_then(|plan| plan.weights.iter().find(|w| w.name == "blk.0.ffn_gate.weight"));
            let w = w.context("the first layer has no feed-forward")?;
            self.add("feed_forward_length", w.shape[0] as u32);
            return Ok(());
        }
        ensure!(
            self.config.opt_bool("norm_topk_prob")?.unwrap_or(true),
            "failed to convert {}: norm_topk_prob is false, and readers of GGUF divide by the sum",
            self.config.file()
        );
        self.pass("expert_feed_forward_length", &["moe_intermediate_size"])?;
        self.pass("leading_dense_block_count", &["num_dense_layers"])?;
        self.add("expert_gating_func", SIGMOID);
        self.weights("routed_scaling_factor", "norm_topk_prob", true)
    }

    pub(super) fn mamba(&mut self, plan: Option<&Plan>) -> Result<()> {
        let (heads, width) = mamba(plan.context("the model has no plan")?)?;
        self.add("ssm.conv_kernel", width as u32);
        self.add("ssm.state_size", heads.d_k as u32);
        self.add("ssm.group_count", heads.n_k_head as u32);
        self.add("ssm.time_step_rank", heads.n_v_head as u32);
        self.add("ssm.inner_size", (heads.n_v_head * heads.d_v) as u32);
        Ok(())
    }

    pub(super) fn kimi_linear(&mut self, plan: Option<&Plan>, n_layer: u32) -> Result<()> {
        let count = |name: &str| Ok::<_, anyhow::Error>(self.config.u32(name)?);
        let (d_latent, d_pe) = (count("kv_lora_rank")?, count("qk_rope_head_dim")?);
        let d_nope = count("qk_nope_head_dim")?;
        let sum = |a: u32, b: u32| a.checked_add(b).context("heads are too wide");
        let (key_length, key_length_mla) = (sum(d_latent, d_pe)?, sum(d_nope, d_pe)?);
        // The cache holds one latent for all heads, in layers that have a cache.
        let n_kv = plan.map(|plan| by_layer(plan, n_layer, 1, &["attn_kv_a_mqa"])).unwrap_or_default();
        self.add("attention.head_count_kv", n_kv);
        self.add("attention.key_length", key_length);
        self.add("attention.value_length", d_latent);
        self.add("attention.key_length_mla", key_length_mla);
        self.pass("attention.value_length_mla", &["v_head_dim"])?;
        self.add("attention.kv_lora_rank", d_latent);
        self.add("rope.dimension_count", d_pe);
        self.pass("ssm.conv_kernel", &["linear_attn_config.short_conv_kernel_size"])?;
        self.pass("kda.head_dim", &["linear_attn_config.head_dim"])?;
        ensure!(
            self.config.opt_bool("moe_renormalize")?.unwrap_or(true),
            "failed to convert {}: moe_renormalize is false, and readers of GGUF divide by the sum",
            self.config.file()
        );
        self.pass("vocab_size", &["vocab_size"])?;
        self.pass("expert_feed_forward_length", &["moe_intermediate_size"])?;
        self.pass("expert_shared_count", &["num_shared_experts"])?;
        self.pass("leading_dense_block_count", &["first_k_dense_replace"])?;
        self.pass("expert_group_count", &["num_expert_group"])?;
        self.pass("expert_group_used_count", &["topk_group"])?;
        self.add("expert_gating_func", SIGMOID);
        self.weights("routed_scaling_factor", "moe_renormalize", true)
    }

    pub(super) fn nemotron(&mut self, plan: Option<&Plan>, n_layer: u32) -> Result<()> {
        self.mamba(plan)?;
        self.pass("vocab_size", &["vocab_size"])?;
        let d_ff =
            self.need(&[if self.arch == "nemotron_h" { "intermediate_size" } else { "moe_intermediate_size" }])?;
        let widths = plan.map(|plan| by_layer(plan, n_layer, d_ff, &["ffn_up", "ffn_up_exps"]));
        self.add("feed_forward_length", widths.unwrap_or_default());
        if self.arch == "nemotron_h" {
            return Ok(());
        }
        self.add("expert_feed_forward_length", d_ff);
        self.pass("expert_shared_feed_forward_length", &["moe_shared_expert_intermediate_size"])?;
        self.pass("expert_shared_count", &["n_shared_experts"])?;
        self.pass("expert_group_count", &["n_group"])?;
        self.pass("expert_group_used_count", &["topk_group"])?;
        self.pass("moe_latent_size", &["moe_latent_size"])?;
        self.weights("routed_scaling_factor", "norm_topk_prob", true)
    }
}

/// Returns the factors of a Falcon-H1, by the tensors that take them in.
///
/// # Errors
/// Its output is its embedding, whose factors differ.
pub fn falcon_scales(config: &Metadata, plan: &Plan) -> Result<Vec<Scaled>> {
    let factor = |name: &str| Ok::<_, anyhow::Error>(config.opt_f32(name)?.unwrap_or(1.0));
    let list = |name: &str, n: usize| match config.get(name) {
        Some(_) => {
            let list = config.f32s(name)?;
            ensure!(list.len() == n, "failed to convert {}: {name} has {} numbers", config.file(), list.len());
            Ok(list)
        }
        None => Ok(vec![1.0; n]),
    };
    let (embed, output) = (factor("embedding_multiplier")?, factor("lm_head_multiplier")?);
    ensure!(
        embed == output || plan.weights.iter().any(|w| w.name == "output.weight"),
        "failed to convert {}: its output matrix is its embedding, and their factors differ",
        config.file()
    );
    let (mlp, ssm) = (list("mlp_multipliers", 2)?, list("ssm_multipliers", 5)?);
    let (attn_in, ssm_in) = (factor("attention_in_multiplier")?, factor("ssm_in_multiplier")?);
    let (heads, _) = mamba(plan)?;
    let (inner, k_row) = (heads.n_v_head * heads.d_v, heads.n_k_head * heads.d_k);
    let mut end = 0;
    let rows = [inner, inner, k_row, k_row, heads.n_v_head].into_iter().zip(ssm).map(|(n, scale)| {
        end += n;
        (end, scale * ssm_in)
    });
    let whole = |stem, scale| Scaled { stem, rows: vec![(usize::MAX, scale)] };
    let all = vec![
        Scaled { stem: "ssm_in", rows: rows.collect() },
        whole("ssm_out", factor("ssm_out_multiplier")?),
        whole("token_embd", embed),
        whole("output", output),
        whole("attn_q", attn_in),
        whole("attn_k", attn_in * factor("key_multiplier")?),
        whole("attn_v", attn_in),
        whole("attn_output", factor("attention_out_multiplier")?),
        whole("ffn_gate", mlp[0]),
        whole("ffn_down", mlp[1]),
    ];
    Ok(all.into_iter().filter(|scaled| scaled.rows.iter().any(|(_, scale)| *scale != 1.0)).collect())
}
