//! `config.json` out of a GGUF file's keys, as mlx-lm's models read it. What they cannot compute is refused: a folder
//! that loads must give the file's logits.

use anyhow::{Context, Result, bail, ensure};
use checkpoint::{Checkpoint, Metadata};
use model::plan::Plan;
use serde_json::{Map, Value, json};

use super::form::MlxForm;
use super::tensors::Shape;
use crate::convert::weights::Delta;
use crate::out;

/// What Llama 3.1 and its successors scale by: turns over the old context below which a frequency is divided in full,
/// and above which it stays.
const LLAMA3: (f64, f64) = (1.0, 4.0);
/// The old context of those models, where no frequency says another.
const LLAMA3_CONTEXT: f64 = 8192.0;
/// How far divisors of frequencies may be from those of a rule.
const NEAR: f64 = 1e-5;

/// A config in the making.
struct Config<'a> {
    checkpoint: &'a Checkpoint,
    meta: &'a Metadata,
    plan: &'a Plan,
    arch: &'a str,
    form: &'static MlxForm,
    n_layer: usize,
    out: Map<String, Value>,
}

/// Returns the config, and the numbers that the order of rows depends on.
///
/// # Errors
/// A key is missing or of another type, or says what mlx-lm's model does not compute.
pub fn config(checkpoint: &Checkpoint, plan: &Plan, form: &'static MlxForm) -> Result<(Map<String, Value>, Shape)> {
    let meta = checkpoint.meta();
    let arch = meta.str("general.architecture")?;
    let count = |key: &str| Ok::<_, anyhow::Error>(meta.opt_u32(&format!("{arch}.{key}"))?.unwrap_or(0) as usize);
    let n_layer = count("block_count")?.saturating_sub(count("nextn_predict_layers")?);
    let mut config = Config { checkpoint, meta, plan, arch, form, n_layer, out: Map::new() };
    let shape = config.shape()?;
    config.all(&shape)?;
    Ok((config.out, shape))
}

impl Config<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch)
    }

    fn put(&mut self, name: &str, value: impl Into<Value>) {
        self.out.insert(name.into(), value.into());
    }

    fn count(&self, name: &str) -> Result<Option<u32>> {
        Ok(self.meta.opt_u32(&self.key(name))?)
    }

    fn need(&self, name: &str) -> Result<u32> {
        Ok(self.meta.u32(&self.key(name))?)
    }

    fn number(&self, name: &str) -> Result<Option<f32>> {
        Ok(self.meta.opt_f32(&self.key(name))?)
    }

    /// Returns an error about a key that mlx-lm's model has no use for.
    fn refuse(&self, name: &str, what: impl std::fmt::Display) -> anyhow::Error {
        let key = self.key(name);
        anyhow::anyhow!("failed to convert {}: {key} {what}", self.checkpoint.name())
    }

    fn has(&self, tensor: &str) -> bool {
        self.checkpoint.tensor(tensor).is_some()
    }

    /// Returns whether layers have a tensor: all, none, or an error.
    fn all_have(&self, tensor: &str, layers: std::ops::Range<usize>) -> Result<bool> {
        let n = layers.clone().filter(|layer| self.has(&format!("blk.{layer}.{tensor}"))).count();
        ensure!(
            n == 0 || n == layers.len(),
            "failed to convert {}: {n} of {} layers have {tensor}, and mlx-lm's {} has it in all or none",
            self.checkpoint.name(),
            layers.len(),
            self.form.model_type
        );
        Ok(n > 0)
    }

    fn shape(&self) -> Result<Shape> {
        let count = |name: &str| Ok::<_, anyhow::Error>(self.count(name)?.unwrap_or(0) as usize);
        let n_head = count("attention.head_count")?;
        let delta = match count("ssm.time_step_rank")? {
            0 => None,
            n_v => {
                let n_k = count("ssm.group_count")?;
                let is_whole = n_k > 0 && n_v.is_multiple_of(n_k);
                ensure!(is_whole, self.refuse("ssm.group_count", format!("is {n_k}, which does not divide {n_v}")));
                Some(Delta { n_k, n_v, d_k: count("ssm.state_size")?, d_v: count("ssm.inner_size")? / n_v })
            }
        };
        let latent = match self.count("attention.kv_lora_rank")? {
            None => None,
            Some(_) => {
                // Older files have the widths of plain heads.
                let of = |name: &str, older: &str| match self.count(name)? {
                    Some(n) => Ok(n),
                    None => self.need(older),
                };
                let d_k = of("attention.key_length_mla", "attention.key_length")?;
                let d_v = of("attention.value_length_mla", "attention.value_length")?;
                let d_nope = d_k.checked_sub(self.need("rope.dimension_count")?);
                let d_nope = d_nope.context("heads are narrower than what is rotated of them")?;
                Some((d_nope as usize, d_v as usize))
            }
        };
        let n_kv = match self.meta.get(&self.key("attention.head_count_kv")) {
            Some(checkpoint::Value::Numbers(_)) | None => n_head,
            Some(_) => count("attention.head_count_kv")?,
        };
        Ok(Shape { n_layer: self.n_layer, n_head, n_kv, delta, latent })
    }

    fn all(&mut self, shape: &Shape) -> Result<()> {
        let form = self.form;
        self.put("model_type", form.model_type);
        self.put("architectures", json!([form.class]));
        let d_model = self.need("embedding_length")?;
        self.put("hidden_size", d_model);
        self.put("num_hidden_layers", self.n_layer);
        self.put("num_attention_heads", shape.n_head);
        self.put("rms_norm_eps", self.meta.f32(&self.key("attention.layer_norm_rms_epsilon"))?);
        self.put("max_position_embeddings", self.need("context_length")?);
        let shared = "attention.shared_kv_layers";
        let is_small = self.count(shared)?.is_some_and(|n| n > 0);
        ensure!(!is_small, self.refuse(shared, "is above 0: folders of Gemma 4 E2B and E4B are not written"));
        let d_ff = self.count("feed_forward_length")?.or(self.count("expert_feed_forward_length")?);
        self.put("intermediate_size", json!(d_ff));
        self.put("vocab_size", self.plan.n_vocab);
        self.put("tie_word_embeddings", form.is_tied && !self.has("output.weight"));
        self.put("hidden_act", if self.arch.starts_with("gemma") { "gelu_pytorch_tanh" } else { "silu" });
        self.put("torch_dtype", "bfloat16");
        self.put("attention_bias", false);
        for key in form.biases(self.checkpoint, self.n_layer)? {
            self.put(key, true);
        }
        if !["deepseek2", "gemma4"].contains(&self.arch) {
            self.heads(shape, d_model)?;
        }
        self.positions()?;
        self.windows()?;
        match self.arch {
            "llama" | "qwen3moe" => self.experts()?,
            "qwen3next" | "qwen35" | "qwen35moe" => self.delta(shape)?,
            "deepseek2" => self.deepseek(shape)?,
            "glm4moe" => self.glm()?,
            "gemma3" => self.gemma3(shape, d_model)?,
            "gemma4" => self.gemma4()?,
            "gpt-oss" => {
                self.put("num_local_experts", self.need("expert_count")?);
                self.put("num_experts_per_tok", self.need("expert_used_count")?);
                self.put("intermediate_size", self.need("expert_feed_forward_length")?);
            }
            _ => {}
        }
        for name in ["bos_token_id", "eos_token_id", "padding_token_id"] {
            if let Some(id) = self.meta.opt_u32(&format!("tokenizer.ggml.{name}"))? {
                self.put(if name == "padding_token_id" { "pad_token_id" } else { name }, id);
            }
        }
        Ok(())
    }

    /// Heads of one width.
    fn heads(&mut self, shape: &Shape, d_model: u32) -> Result<()> {
        let own = d_model.checked_div(shape.n_head as u32);
        let d_head = self.count("attention.key_length")?.or(own).context("the file has no heads")?;
        let d_v = self.count("attention.value_length")?.or(own);
        ensure!(d_v == Some(d_head), self.refuse("attention.value_length", format!("is not that of keys, {d_head}")));
        let is_known = self.form.has_head_dim || u64::from(d_head) * shape.n_head as u64 == u64::from(d_model);
        ensure!(is_known, self.refuse("attention.key_length", format!("is {d_head}, not a head's share of {d_model}")));
        if let Some(scale) = self.number("attention.scale")?.filter(|scale| *scale > 0.0) {
            let own = 1.0 / (d_head as f32).sqrt();
            ensure!((scale - own).abs() < 1e-6, self.refuse("attention.scale", format!("is {scale}, not {own}")));
        }
        self.put("num_key_value_heads", shape.n_kv);
        self.put("head_dim", d_head);
        let rotary = self.count("rope.dimension_count")?.unwrap_or(d_head);
        let is_known = self.form.is_partial || rotary == d_head || self.arch == "gemma4";
        ensure!(is_known, self.refuse("rope.dimension_count", format!("is {rotary}, heads are {d_head} wide")));
        if self.form.is_partial {
            let share = f64::from(rotary) / f64::from(d_head);
            ensure!((share * f64::from(d_head)) as u32 == rotary, "{rotary} of {d_head} is no share");
            self.put("partial_rotary_factor", share);
        }
        Ok(())
    }

    /// The rotary embedding.
    fn positions(&mut self) -> Result<()> {
        let base = self.number("rope.freq_base")?.unwrap_or(10000.0);
        self.put("rope_theta", base);
        let factor = match self.number("rope.scaling.factor")?.filter(|factor| *factor != 0.0) {
            Some(factor) => factor,
            None => self.number("rope.scale_linear")?.filter(|factor| *factor != 0.0).unwrap_or(1.0),
        };
        let kind = match self.meta.opt_str(&self.key("rope.scaling.type"))? {
            None | Some("linear") if factor == 1.0 => None,
            None => Some("linear"),
            Some("none") => None,
            Some(kind) => Some(kind),
        };
        let mut scaling = match kind {
            Some("yarn") => Some(self.yarn(factor)?),
            Some(kind) => Some(json!({"rope_type": kind, "factor": factor})),
            None => None,
        };
        if self.has("rope_freqs.weight") {
            ensure!(kind.is_none(), self.refuse("rope.scaling.type", "is set alongside rope_freqs.weight"));
            scaling = match self.arch {
                // Whose layers have rotary embeddings of two kinds.
                "gemma4" => None,
                _ => Some(self.llama3(f64::from(base))?),
            };
        }
        if let Some(Value::Object(scaling)) = &mut scaling {
            let kind = scaling["rope_type"].as_str().unwrap_or_default().to_string();
            ensure!(
                self.form.scaling.contains(&kind.as_str()),
                "failed to convert {}: its positions are scaled ({kind}), which mlx-lm's {} does not do",
                self.checkpoint.name(),
                self.form.model_type
            );
            scaling.insert("type".into(), json!(kind));
        } else if self.form.model_type == "deepseek_v2" {
            // mlx-lm's model wants a rule; with a factor of 1 it changes nothing.
            scaling = Some(json!({"type": "yarn", "rope_type": "yarn", "factor": 1.0}));
        }
        if let Some(scaling) = scaling {
            self.put("rope_scaling", scaling);
        } else if self.arch == "glm4moe" {
            self.put("rope_scaling", Value::Null);
        }
        Ok(())
    }

    fn yarn(&self, factor: f32) -> Result<Value> {
        for name in ["rope.scaling.yarn_ext_factor", "rope.scaling.attn_factor"] {
            if let Some(x) = self.number(name)?.filter(|x| *x != 1.0) {
                return Err(self.refuse(name, format!("is {x}, and mlx-lm takes 1")));
            }
        }
        let n_ctx = match self.count("rope.scaling.original_context_length")? {
            Some(n) => n,
            None => self.need("context_length")?,
        };
        let mut scaling = json!({
            "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": n_ctx,
            "beta_fast": self.number("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
            "beta_slow": self.number("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
        });
        match self.number("rope.scaling.yarn_log_multiplier")?.filter(|x| *x != 0.0) {
            None => {}
            Some(x) if self.arch == "deepseek2" => {
                // Files hold a tenth, and the models have both numbers equal.
                let mscale = f64::from(x / 0.1);
                scaling["mscale"] = json!(mscale);
                scaling["mscale_all_dim"] = json!(mscale);
            }
            Some(x) => return Err(self.refuse("rope.scaling.yarn_log_multiplier", format!("is {x}, expected 0"))),
        }
        Ok(scaling)
    }

    fn divisors(&self) -> Result<Vec<f32>> {
        let info = self.checkpoint.tensor("rope_freqs.weight").context("rope_freqs.weight is missing")?;
        let mut bytes = vec![0; info.len];
        self.checkpoint.read(&info.extents(), &mut bytes)?;
        let mut divisors = vec![0.0; info.shape.iter().product()];
        quant::decode_row(info.dtype, &bytes[..], &mut divisors);
        Ok(divisors)
    }

    /// Returns the rule of Llama 3.1 that some divisors of frequencies come from.
    fn llama3(&self, base: f64) -> Result<Value> {
        let divisors: Vec<f64> = self.divisors()?.into_iter().map(f64::from).collect();
        let factor = divisors.last().copied().unwrap_or(1.0);
        let rule = llama3(base, &divisors).with_context(|| {
            format!(
                "failed to convert {}: rope_freqs.weight has divisors that are not Llama 3.1's, and config.json has no \
                 other form",
                self.checkpoint.name()
            )
        })?;
        let (low, high) = LLAMA3;
        Ok(json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": rule,
        }))
    }

    /// Windows of layers, where mlx-lm's model looks at them; a line where it does not.
    fn windows(&mut self) -> Result<()> {
        let windows: Vec<Option<usize>> = self.plan.caches.iter().map(|cache| cache.window).collect();
        let kind = |window: &Option<usize>| if window.is_some() { "sliding_attention" } else { "full_attention" };
        let kinds: Vec<&str> = windows.iter().map(kind).collect();
        let window = windows.iter().copied().flatten().next();
        match self.form.model_type {
            "gemma4_text" => self.put("layer_types", kinds.clone()),
            "gpt_oss" => {
                ensure!(
                    kinds.contains(&"full_attention") && window.is_some(),
                    self.refuse(
                        "attention.sliding_window",
                        "is not that of some layers and not of others, as mlx-lm wants"
                    )
                );
                self.put("layer_types", kinds.clone());
            }
            "gemma3_text" => {
                let fits =
                    |every: &usize| (1..).zip(&kinds).all(|(i, kind)| (i % every == 0) == kind.starts_with("full"));
                let every = (1..=self.n_layer).find(fits);
                let every = every.with_context(|| {
                    self.refuse(
                        "attention.sliding_window_pattern",
                        "is not that every n-th layer sees everything, as mlx-lm takes it",
                    )
                })?;
                self.put("sliding_window_pattern", every);
            }
            _ => {}
        }
        let Some(window) = window else { return Ok(()) };
        self.put("sliding_window", window);
        if !self.form.has_windows {
            if self.form.model_type != "mistral" {
                self.put("use_sliding_window", true);
                self.put("layer_types", kinds);
            }
            out::note!(
                "moebius: layers see a window of {window} positions, and mlx-lm's {} has none: after as many \
                 positions its results differ",
                self.form.model_type
            );
        }
        Ok(())
    }

    /// A router's weights are those of a softmax, as they are: no key says otherwise.
    fn experts(&mut self) -> Result<()> {
        let Some(n_expert) = self.count("expert_count")?.filter(|&n| n > 0) else { return Ok(()) };
        if let Some(scale) = self.number("expert_weights_scale")?.filter(|scale| *scale != 0.0 && *scale != 1.0) {
            return Err(self.refuse("expert_weights_scale", format!("is {scale}, and mlx-lm takes 1")));
        }
        let renormalise = self.meta.opt_bool(&self.key("expert_weights_norm"))?.unwrap_or(true);
        self.put("num_experts_per_tok", self.need("expert_used_count")?);
        if self.form.model_type == "mixtral" {
            ensure!(renormalise, self.refuse("expert_weights_norm", "is false, and mlx-lm takes true"));
            self.put("num_local_experts", n_expert);
            return Ok(());
        }
        self.all_have("ffn_gate_inp.weight", 0..self.n_layer)?;
        self.put("num_experts", n_expert);
        let d_ff = self.count("expert_feed_forward_length")?.or(self.count("feed_forward_length")?);
        self.put("moe_intermediate_size", json!(d_ff));
        self.put("norm_topk_prob", renormalise);
        self.put("decoder_sparse_step", 1);
        self.put("mlp_only_layers", json!([]));
        Ok(())
    }

    fn delta(&mut self, shape: &Shape) -> Result<()> {
        let Delta { n_k, n_v, d_k, d_v } =
            shape.delta.context("failed to convert a delta net: the file has no heads")?;
        self.experts()?;
        if let Some(n) = self.count("expert_shared_feed_forward_length")? {
            self.put("shared_expert_intermediate_size", n);
        }
        self.put("linear_num_key_heads", n_k);
        self.put("linear_num_value_heads", n_v);
        self.put("linear_key_head_dim", d_k);
        self.put("linear_value_head_dim", d_v);
        self.put("linear_conv_kernel_dim", self.need("ssm.conv_kernel")?);
        let attends = |layer: usize| !self.has(&format!("blk.{layer}.ssm_a"));
        let every = (0..self.n_layer).find(|&layer| attends(layer)).map(|layer| layer + 1);
        let fits = |every: usize| (0..self.n_layer).all(|layer| attends(layer) == ((layer + 1) % every == 0));
        let every = every.filter(|&every| fits(every)).with_context(|| {
            format!(
                "failed to convert {}: its attention layers are not every n-th, and mlx-lm's {} has no other order",
                self.checkpoint.name(),
                self.form.model_type
            )
        })?;
        self.put("full_attention_interval", every);
        if self.form.model_type == "qwen3_next" {
            return Ok(());
        }
        let mut rope = json!({
            "rope_type": "default", "rope_theta": self.out["rope_theta"],
            "partial_rotary_factor": self.out["partial_rotary_factor"],
        });
        let sections = self.meta.opt_i32s(&self.key("rope.dimension_sections"))?;
        if let Some(sections) = sections.filter(|sections| sections.len() >= 3) {
            rope["mrope_section"] = json!(sections[..3]);
        }
        self.put("rope_parameters", rope);
        Ok(())
    }

    /// The mixture of DeepSeek and GLM.
    fn shared_moe(&mut self) -> Result<()> {
        let n_dense = self.count("leading_dense_block_count")?.unwrap_or(0);
        self.put("first_k_dense_replace", n_dense);
        self.put("n_routed_experts", self.need("expert_count")?);
        self.put("num_experts_per_tok", self.need("expert_used_count")?);
        self.put("moe_intermediate_size", self.need("expert_feed_forward_length")?);
        let n_shared = self.count("expert_shared_count")?.filter(|&n| n > 0);
        self.put("n_shared_experts", json!(n_shared));
        let scale = self.number("expert_weights_scale")?.filter(|scale| *scale != 0.0).unwrap_or(1.0);
        self.put("routed_scaling_factor", scale);
        let renormalise = self.meta.opt_bool(&self.key("expert_weights_norm"))?.unwrap_or(false);
        self.put("norm_topk_prob", renormalise);
        let n_group = self.count("expert_group_count")?.unwrap_or(1);
        let n_used = self.count("expert_group_used_count")?.unwrap_or(n_group);
        // Where all groups are used there are none.
        let (n_group, n_used) = if n_used >= n_group { (1, 1) } else { (n_group, n_used) };
        self.put("n_group", n_group);
        self.put("topk_group", n_used);
        self.put("moe_layer_freq", 1);
        let layers = n_dense as usize..self.n_layer;
        let has_bias = self.all_have("exp_probs_b.bias", layers)?;
        let (score, method) = match self.form.model_type {
            "deepseek_v2" => {
                ensure!(
                    !renormalise,
                    self.refuse("expert_weights_norm", "is true, and mlx-lm's deepseek_v2 takes false")
                );
                ensure!(
                    !has_bias,
                    "failed to convert tensor exp_probs_b.bias: mlx-lm's deepseek_v2 has no such tensor"
                );
                ("softmax", if n_group > 1 { "group_limited_greedy" } else { "greedy" })
            }
            other => {
                ensure!(
                    has_bias,
                    "failed to convert tensor exp_probs_b.bias: it is missing, and mlx-lm's {other} has it"
                );
                let gating = self.count("expert_gating_func")?.unwrap_or(2);
                ensure!(gating == 2, self.refuse("expert_gating_func", format!("is {gating}, expected 2 (sigmoid)")));
                ("sigmoid", "noaux_tc")
            }
        };
        self.put("scoring_func", score);
        self.put("topk_method", method);
        Ok(())
    }

    fn deepseek(&mut self, shape: &Shape) -> Result<()> {
        let (d_nope, d_v) =
            shape.latent.context("failed to convert latent attention: the file has no widths of heads")?;
        self.put("num_key_value_heads", shape.n_head);
        self.put("qk_nope_head_dim", d_nope);
        self.put("qk_rope_head_dim", self.need("rope.dimension_count")?);
        self.put("v_head_dim", d_v);
        self.put("kv_lora_rank", self.need("attention.kv_lora_rank")?);
        let d_q = self.count("attention.q_lora_rank")?.filter(|&d| d > 0);
        self.put("q_lora_rank", json!(d_q));
        self.put("rope_interleave", true);
        self.shared_moe()
    }

    fn glm(&mut self) -> Result<()> {
        let has_norm = self.all_have("attn_q_norm.weight", 0..self.n_layer)?;
        self.put("use_qk_norm", has_norm);
        self.shared_moe()
    }

    fn gemma3(&mut self, shape: &Shape, d_model: u32) -> Result<()> {
        for name in ["final_logit_softcapping", "attn_logit_softcapping"] {
            if let Some(cap) = self.number(name)?.filter(|cap| *cap > 0.0) {
                return Err(self.refuse(name, format!("is {cap}, and mlx-lm's gemma3_text has none")));
            }
        }
        // As this engine reads GGUF files, which have no key for it.
        let width = match self.n_layer {
            62 => d_model / shape.n_head as u32,
            _ => self.out["head_dim"].as_u64().unwrap_or_default() as u32,
        };
        self.put("query_pre_attn_scalar", width);
        let local = self.number("rope.freq_base_swa")?.unwrap_or(10000.0);
        self.put("rope_local_base_freq", local);
        Ok(())
    }

    fn gemma4(&mut self) -> Result<()> {
        let caches = &self.plan.caches;
        let of = |windowed: bool| caches.iter().find(|cache| cache.window.is_some() == windowed);
        let first = of(true).or(of(false)).context("the file has no layers with attention")?;
        let (windowed, full) = (of(true).unwrap_or(first), of(false).unwrap_or(first));
        let is_like = |cache: &model::plan::CacheDecl| {
            let like = if cache.window.is_some() { windowed } else { full };
            (cache.n_kv, cache.d_k, cache.d_v) == (like.n_kv, like.d_k, like.d_k)
        };
        ensure!(
            caches.iter().all(is_like),
            self.refuse("attention.head_count_kv", "is not the same in all layers of a kind")
        );
        let full_layers = || (0..self.n_layer).filter(|&layer| caches[layer].window.is_none());
        let own_v = |layer: usize| self.has(&format!("blk.{layer}.attn_v.weight"));
        let n_own = full_layers().filter(|&layer| own_v(layer)).count();
        ensure!(
            n_own == 0 || n_own == full_layers().count(),
            "failed to convert {}: {n_own} layers without a window have attn_v.weight, expected all or none",
            self.checkpoint.name()
        );
        let shares = n_own == 0;
        ensure!(
            shares || windowed.n_kv == full.n_kv,
            self.refuse("attention.head_count_kv", "differs between layers that have values of their own")
        );
        let bare = (0..self.n_layer).find(|&layer| caches[layer].window.is_some() && !own_v(layer));
        if let Some(layer) = bare {
            bail!("failed to convert tensor blk.{layer}.attn_v.weight: it is missing, and mlx-lm's gemma4_text has it");
        }
        let rotary = self.count("rope.dimension_count_swa")?.unwrap_or(windowed.d_k as u32) as usize;
        let is_whole = rotary == windowed.d_k;
        ensure!(is_whole, self.refuse("rope.dimension_count_swa", format!("is {rotary}, expected {}", windowed.d_k)));
        let share = self.turning(full.d_k)?;
        let base = self.out["rope_theta"].clone();
        let local = self.number("rope.freq_base_swa")?.unwrap_or(10000.0);
        self.out.remove("rope_theta");
        for (name, n) in [
            ("num_key_value_heads", windowed.n_kv),
            ("num_global_key_value_heads", full.n_kv),
            ("head_dim", windowed.d_k),
            ("global_head_dim", full.d_k),
        ] {
            self.put(name, n);
        }
        self.put("attention_k_eq_v", shares);
        self.put(
            "rope_parameters",
            json!({
                "full_attention": {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": share},
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            }),
        );
        for name in ["hidden_size_per_layer_input", "num_kv_shared_layers"] {
            self.put(name, 0);
        }
        self.put("use_double_wide_mlp", false);
        let cap = self.number("final_logit_softcapping")?.filter(|cap| *cap > 0.0);
        self.put("final_logit_softcapping", json!(cap));
        let n_expert = self.count("expert_count")?.filter(|&n| n > 0);
        self.put("enable_moe_block", n_expert.is_some());
        if let Some(n) = n_expert {
            self.put("num_experts", n);
            self.put("top_k_experts", self.need("expert_used_count")?);
            self.put("moe_intermediate_size", self.need("expert_feed_forward_length")?);
        }
        Ok(())
    }

    /// Returns the share of the pairs of Gemma 4's heads that turn: the divisors of the others are next to infinite.
    fn turning(&self, d_head: usize) -> Result<f64> {
        if !self.has("rope_freqs.weight") {
            return Ok(1.0);
        }
        let divisors = self.divisors()?;
        let n = divisors.iter().take_while(|&&d| d == 1.0).count();
        ensure!(
            divisors.iter().skip(n).all(|&d| d >= 1e20),
            "failed to convert {}: rope_freqs.weight has divisors that config.json has no form for",
            self.checkpoint.name()
        );
        Ok((2 * n) as f64 / d_head as f64)
    }
}

/// Returns the old context by which Llama 3.1's rule gives these divisors; `None` where none does.
fn llama3(base: f64, divisors: &[f64]) -> Option<u64> {
    let (low, high) = LLAMA3;
    let n = 2 * divisors.len();
    let factor = *divisors.last()?;
    let frequency = |i: usize| base.powf(-2.0 * i as f64 / n as f64);
    let kept = |context: f64, i: usize| {
        let turns = context * frequency(i) / std::f64::consts::TAU;
        ((turns - low) / (high - low)).clamp(0.0, 1.0)
    };
    // A divisor between the ends of the ramp says where the ramp lies.
    let between = (0..divisors.len()).find(|&i| divisors[i] > 1.0 + NEAR && divisors[i] < factor * (1.0 - NEAR));
    let context = match between {
        None => LLAMA3_CONTEXT,
        Some(i) => {
            let kept = (1.0 / divisors[i] - 1.0 / factor) / (1.0 - 1.0 / factor);
            (std::f64::consts::TAU * (kept * (high - low) + low) / frequency(i)).round()
        }
    };
    let gives = |i: usize| {
        let kept = kept(context, i);
        1.0 / (kept + (1.0 - kept) / factor)
    };
    let fits = (0..divisors.len()).all(|i| (gives(i) - divisors[i]).abs() <= NEAR * divisors[i]);
    (fits && factor > 1.0).then_some(context as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_say_which_rule_they_come_from() {
        for (base, n, factor, context) in
            [(500_000.0, 64, 8.0, 8192), (500_000.0, 32, 32.0, 8192), (10000.0, 16, 4.0, 64)]
        {
            let divisor = |i: usize| {
                let wavelength = std::f64::consts::TAU * f64::powf(base, i as f64 / n as f64);
                let (long, short) = (context as f64 / LLAMA3.0, context as f64 / LLAMA3.1);
                let smooth = (context as f64 / wavelength - LLAMA3.0) / (LLAMA3.1 - LLAMA3.0);
                match () {
                    () if wavelength < short => 1.0,
                    () if wavelength > long => factor,
                    () => 1.0 / ((1.0 - smooth) / factor + smooth),
                }
            };
            // As files have them.
            let mut divisors: Vec<f64> = (0..n).map(|i| f64::from(divisor(i) as f32)).collect();
            assert_eq!(llama3(base, &divisors), Some(context), "{base} {n} {factor}");
            divisors[n / 2] *= 1.01;
            assert_eq!(llama3(base, &divisors), None);
        }
    }
}
