//! The keys of GGUF files of models with recurrent states besides Qwen's delta nets.

use anyhow::{Context, Result, ensure};
use model::plan::Plan;

use super::keys::{Keys, SIGMOID};
use super::states::{by_layer, mamba};

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

    /// Heads of latent attention, in models some layers of which have such.
    fn latent_heads(&mut self, plan: Option<&Plan>, n_layer: u32) -> Result<()> {
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
        Ok(())
    }

    pub(super) fn bailing(&mut self, plan: Option<&Plan>, n_layer: u32) -> Result<()> {
        let plan = plan.context("the model has no plan")?;
        let is = |name: &str| Ok::<_, anyhow::Error>(self.config.opt_bool(name)?);
        ensure!(
            is("kda_safe_gate")?.unwrap_or(true),
            "failed to convert {}: kda_safe_gate is false, and readers of GGUF bound decays",
            self.config.file()
        );
        let has_experts = by_layer(plan, n_layer, 1, &["ffn_gate_inp"]);
        let n_dense = has_experts.iter().take_while(|&&n| n == 0).count();
        ensure!(
            has_experts[n_dense..].iter().all(|&n| n == 1),
            "failed to convert {}: mlp_layer_types has dense layers after others, which GGUF's {} has not",
            self.config.file(),
            self.arch
        );
        self.latent_heads(Some(plan), n_layer)?;
        self.pass("attention.q_lora_rank", &["q_lora_rank"])?;
        self.pass("vocab_size", &["vocab_size"])?;
        let conv_width = self.count(&["short_conv_kernel_size"])?.unwrap_or(4);
        self.add("ssm.conv_kernel", conv_width);
        self.pass("kda.head_dim", &["head_dim"])?;
        self.add("kda.safe_gate", true);
        let bound = self.config.opt_f32("kda_lower_bound")?.unwrap_or(-5.0);
        self.add("kda.gate_lower_bound", bound);
        if let Some(scale) = self.rope_number("mscale_all_dim")? {
            // As GGUF's deepseek2 has it.
            self.add("rope.scaling.yarn_log_multiplier", 0.1 * scale);
        }
        self.add("leading_dense_block_count", n_dense as u32);
        self.pass("expert_feed_forward_length", &["moe_intermediate_size"])?;
        let shared = plan.weights.iter().find(|w| w.name.ends_with(".ffn_gate_shexp.weight"));
        self.add("expert_shared_feed_forward_length", shared.map_or(0, |w| w.shape[0] as u32));
        let n_shared = self.count(&["num_shared_experts", "n_shared_experts"])?.unwrap_or(1);
        self.add("expert_shared_count", n_shared);
        let n_group = self.count(&["n_group", "num_expert_group"])?.unwrap_or(8);
        self.add("expert_group_count", n_group);
        let n_open = self.count(&["topk_group"])?.unwrap_or(4);
        self.add("expert_group_used_count", n_open);
        self.add("expert_gating_func", SIGMOID);
        let scale = self.config.opt_f32("routed_scaling_factor")?.unwrap_or(2.5);
        self.add("expert_weights_scale", scale);
        let divides = is("norm_topk_prob")?.or(is("moe_renormalize")?).unwrap_or(true);
        self.add("expert_weights_norm", divides);
        Ok(())
    }

    pub(super) fn kimi_linear(&mut self, plan: Option<&Plan>, n_layer: u32) -> Result<()> {
        self.latent_heads(plan, n_layer)?;
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

    /// As Mamba-2's, but that a step size is made of as many numbers as the rank says.
    pub(super) fn jamba(&mut self, plan: Option<&Plan>) -> Result<()> {
        let plan = plan.context("the model has no plan")?;
        let (heads, width) = mamba(plan)?;
        let dt = plan.weights.iter().find(|w| w.name.ends_with(".ssm_dt.weight")).context("no layer is Mamba")?;
        self.pass("vocab_size", &["vocab_size"])?;
        self.add("ssm.conv_kernel", width as u32);
        self.add("ssm.state_size", heads.d_k as u32);
        self.add("ssm.inner_size", heads.n_v_head as u32);
        self.add("ssm.time_step_rank", dt.shape[1] as u32);
        Ok(())
    }

    /// As llama.cpp's converter writes it, with the layers of lightning attention, which its reader knows.
    pub(super) fn lightning(&mut self, plan: Option<&Plan>, n_layer: u32) -> Result<()> {
        let plan = plan.context("the model has no plan")?;
        let factor = |part: &str, of: &str| {
            let published = format!("layernorm_{}_{of}", part.replace("attn", "attention"));
            let found = self.config.opt_f32(&format!("{part}_{of}_factor"))?.or(self.config.opt_f32(&published)?);
            Ok::<_, anyhow::Error>(found.unwrap_or(1.0))
        };
        let alpha = factor("mlp", "alpha")?;
        for part in ["full_attn", "linear_attn", "mlp"] {
            ensure!(
                factor(part, "alpha")? == alpha && factor(part, "beta")? == 1.0,
                "failed to convert {}: residual factors differ, and GGUF's {} has one for all",
                self.config.file(),
                self.arch
            );
        }
        self.add("residual_scale", alpha);
        let rotary = plan.ropes.first().map_or(0, |rope| 2 * rope.inv_freq.len() as u32);
        self.add("rope.dimension_count", rotary);
        let recurrent = by_layer(plan, n_layer, 1, &["attn_norm_2"]).into_iter().map(|n| n == 1);
        self.add("attention.recurrent_layers", recurrent.collect::<Vec<bool>>());
        Ok(())
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
