//! What mlx-lm's models are called, and their modules: a table for each architecture, found by a GGUF file's keys and
//! tensors. Knows no numbers.

use anyhow::{Result, bail, ensure};
use checkpoint::Checkpoint;

/// A name inside a layer: GGUF's without `.weight` or `.bias`, which is then the same here; or GGUF's with it, and then
/// this one is complete.
type Name = (&'static str, &'static str);

/// How mlx-lm's model of an architecture is made.
pub struct MlxForm {
    pub model_type: &'static str,
    pub class: &'static str,
    /// Its own names, which go before the common ones.
    names: &'static [Name],
    /// Modules that have biases, all or none of each group: then this key of the config is true. Without a key they
    /// must have them.
    pub biases: &'static [(&'static [&'static str], Option<&'static str>)],
    /// The forms that its positions can be scaled in.
    pub scaling: &'static [&'static str],
    /// Whether a part of a head may be rotated.
    pub is_partial: bool,
    /// Whether heads may be of another width than their share of the residual stream.
    pub has_head_dim: bool,
    /// Whether logits can come from the embedding.
    pub is_tied: bool,
    /// Whether it looks at windows.
    pub has_windows: bool,
}

const COMMON: &[Name] = &[
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_exps", "mlp.switch_mlp.gate_proj"),
    ("ffn_up_exps", "mlp.switch_mlp.up_proj"),
    ("ffn_down_exps", "mlp.switch_mlp.down_proj"),
];

const MIXTRAL: &[Name] = &[
    ("ffn_gate_inp", "block_sparse_moe.gate"),
    ("ffn_gate_exps", "block_sparse_moe.switch_mlp.gate_proj"),
    ("ffn_up_exps", "block_sparse_moe.switch_mlp.up_proj"),
    ("ffn_down_exps", "block_sparse_moe.switch_mlp.down_proj"),
];

const GATED_DELTA: &[Name] = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_ba", "linear_attn.in_proj_ba"),
    ("ssm_beta", "linear_attn.in_proj_b"),
    ("ssm_alpha", "linear_attn.in_proj_a"),
    ("ssm_conv1d", "linear_attn.conv1d"),
    ("ssm_a", "linear_attn.A_log"),
    ("ssm_dt.bias", "linear_attn.dt_bias"),
    ("ssm_norm", "linear_attn.norm"),
    ("ssm_out", "linear_attn.out_proj"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
];

const SHARED_EXPERTS: &[Name] = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
    ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
    ("attn_q_a", "self_attn.q_a_proj"),
    ("attn_q_a_norm", "self_attn.q_a_layernorm"),
    ("attn_q_b", "self_attn.q_b_proj"),
    ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
];

const GEMMA: &[Name] = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
    ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
    ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
    ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
    ("layer_output_scale.weight", "layer_scalar"),
    ("ffn_gate_inp", "router.proj"),
    ("ffn_gate_inp.scale", "router.scale"),
    ("ffn_down_exps.scale", "router.per_expert_scale"),
    ("ffn_gate_exps", "experts.switch_glu.gate_proj"),
    ("ffn_up_exps", "experts.switch_glu.up_proj"),
    ("ffn_down_exps", "experts.switch_glu.down_proj"),
];

const GPT_OSS: &[Name] = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("attn_sinks.weight", "self_attn.sinks"),
    ("ffn_gate_inp", "mlp.router"),
    ("ffn_gate_exps", "mlp.experts.gate_proj"),
    ("ffn_up_exps", "mlp.experts.up_proj"),
    ("ffn_down_exps", "mlp.experts.down_proj"),
];

const QKV: &[&str] = &["attn_q", "attn_k", "attn_v"];
const QKVO: &[&str] = &["attn_q", "attn_k", "attn_v", "attn_output"];
const FFN: &[&str] = &["ffn_gate", "ffn_up", "ffn_down"];
const OSS: &[&str] =
    &["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"];
const ATTENTION_BIAS: Option<&str> = Some("attention_bias");

/// A model without anything particular.
const PLAIN: MlxForm = MlxForm {
    model_type: "",
    class: "",
    names: &[],
    biases: &[],
    scaling: &[],
    is_partial: false,
    has_head_dim: true,
    is_tied: true,
    has_windows: false,
};

const DELTA: MlxForm = MlxForm { names: GATED_DELTA, biases: &[(QKVO, ATTENTION_BIAS)], is_partial: true, ..PLAIN };

const DEEPSEEK: MlxForm =
    MlxForm { names: SHARED_EXPERTS, scaling: &["yarn"], is_partial: true, is_tied: false, ..PLAIN };

/// Forms with the architecture that GGUF has for them.
#[rustfmt::skip]
const FORMS: &[(&str, MlxForm)] = &[
    ("llama", MlxForm { model_type: "llama", class: "LlamaForCausalLM", scaling: &["linear", "yarn", "llama3"],
        biases: &[(QKVO, ATTENTION_BIAS), (FFN, Some("mlp_bias"))], ..PLAIN }),
    ("llama", MlxForm { model_type: "mistral", class: "MistralForCausalLM", scaling: &["linear", "yarn", "llama3"],
        ..PLAIN }),
    ("llama", MlxForm { model_type: "mixtral", class: "MixtralForCausalLM", names: MIXTRAL, has_head_dim: false,
        ..PLAIN }),
    ("qwen2", MlxForm { model_type: "qwen2", class: "Qwen2ForCausalLM", scaling: &["linear", "yarn"],
        biases: &[(QKV, None)], has_head_dim: false, ..PLAIN }),
    ("qwen3", MlxForm { model_type: "qwen3", class: "Qwen3ForCausalLM", scaling: &["linear", "yarn"], ..PLAIN }),
    ("qwen3moe", MlxForm { model_type: "qwen3_moe", class: "Qwen3MoeForCausalLM", ..PLAIN }),
    ("qwen3next", MlxForm { model_type: "qwen3_next", class: "Qwen3NextForCausalLM", scaling: &["linear", "yarn"],
        ..DELTA }),
    ("qwen35", MlxForm { model_type: "qwen3_5", class: "Qwen3_5ForConditionalGeneration", ..DELTA }),
    ("qwen35moe", MlxForm { model_type: "qwen3_5_moe", class: "Qwen3_5MoeForConditionalGeneration", ..DELTA }),
    ("deepseek2", MlxForm { model_type: "deepseek_v3", class: "DeepseekV3ForCausalLM", ..DEEPSEEK }),
    ("deepseek2", MlxForm { model_type: "deepseek_v2", class: "DeepseekV2ForCausalLM", ..DEEPSEEK }),
    ("glm4moe", MlxForm { model_type: "glm4_moe", class: "Glm4MoeForCausalLM", names: SHARED_EXPERTS,
        biases: &[(QKV, ATTENTION_BIAS)], is_partial: true, ..PLAIN }),
    ("gemma3", MlxForm { model_type: "gemma3_text", class: "Gemma3ForCausalLM", names: GEMMA, scaling: &["linear"],
        has_windows: true, ..PLAIN }),
    ("gemma4", MlxForm { model_type: "gemma4_text", class: "Gemma4ForCausalLM", names: GEMMA,
        scaling: &["proportional"], has_windows: true, ..PLAIN }),
    ("gpt-oss", MlxForm { model_type: "gpt_oss", class: "GptOssForCausalLM", names: GPT_OSS, scaling: &["linear", "yarn"],
        biases: &[(OSS, None)], is_tied: false, has_windows: true, ..PLAIN }),
];

impl MlxForm {
    /// Returns the form of a file's model.
    ///
    /// # Errors
    /// mlx-lm has none.
    pub fn of(checkpoint: &Checkpoint) -> Result<&'static MlxForm> {
        let meta = checkpoint.meta();
        let arch = meta.str("general.architecture")?;
        let count = |key: &str| Ok::<_, anyhow::Error>(meta.opt_u32(&format!("{arch}.{key}"))?.unwrap_or(0));
        let model_type = match arch {
            "llama" if count("expert_count")? > 0 => "mixtral",
            "llama" if count("attention.sliding_window")? > 0 => "mistral",
            "llama" => "llama",
            // Softmax scores, which old files do not name, are V2's.
            "deepseek2" => match count("expert_gating_func")? {
                2 => "deepseek_v3",
                0 if checkpoint.tensors().iter().any(|t| t.name.ends_with("exp_probs_b.bias")) => "deepseek_v3",
                _ => "deepseek_v2",
            },
            _ => "",
        };
        let is =
            |(of, form): &&(&str, MlxForm)| *of == arch && (model_type.is_empty() || form.model_type == model_type);
        match FORMS.iter().find(is) {
            Some((_, form)) => Ok(form),
            None => {
                let mut known: Vec<&str> = FORMS.iter().map(|(arch, _)| *arch).collect();
                known.dedup();
                bail!(
                    "failed to convert {}: MLX folders are written for {}, not for {arch}",
                    checkpoint.name(),
                    known.join(", ")
                )
            }
        }
    }

    /// Returns the name of a tensor of a layer, GGUF's inside the layer given.
    pub fn name(&self, rest: &str) -> Option<String> {
        let find = |wanted: &str| self.names.iter().chain(COMMON).find(|(gguf, _)| *gguf == wanted);
        if let Some((_, name)) = find(rest) {
            return Some((*name).into());
        }
        let (stem, kind) = rest.rsplit_once('.')?;
        find(stem).map(|(_, name)| format!("{name}.{kind}"))
    }

    /// Returns the keys of groups of biases that the file has.
    ///
    /// # Errors
    /// A bias that mlx-lm's model has not, or has where the file has none.
    pub fn biases(&self, checkpoint: &Checkpoint, n_layer: usize) -> Result<Vec<&'static str>> {
        let has = |layer: usize, module: &str, kind: &str| {
            checkpoint.tensor(&format!("blk.{layer}.{module}.{kind}")).is_some()
        };
        let mut keys = Vec::new();
        for (modules, key) in self.biases {
            let all = || (0..n_layer).flat_map(|layer| modules.iter().map(move |module| (layer, *module)));
            let all = || all().filter(|(layer, module)| has(*layer, module, "weight"));
            let any = all().any(|(layer, module)| has(layer, module, "bias"));
            if key.is_some() && !any {
                continue;
            }
            if let Some((layer, module)) = all().find(|(layer, module)| !has(*layer, module, "bias")) {
                bail!(
                    "failed to convert tensor blk.{layer}.{module}.bias: it is missing, and mlx-lm's {} has it",
                    self.model_type
                );
            }
            keys.extend(*key);
        }
        for tensor in checkpoint.tensors() {
            let inner = tensor.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).map(|(_, rest)| rest);
            let Some(module) = inner.and_then(|rest| rest.strip_suffix(".bias")) else { continue };
            let is_known = ["ssm_dt", "exp_probs_b"].contains(&module)
                || self.biases.iter().any(|(modules, _)| modules.contains(&module));
            ensure!(
                is_known,
                "failed to convert tensor {}: mlx-lm's {} has no such bias",
                tensor.name,
                self.model_type
            );
        }
        Ok(keys)
    }
}
