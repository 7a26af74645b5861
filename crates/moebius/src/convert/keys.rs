//! The metadata of a GGUF file from a folder's `config.json`, under the keys of llama.cpp's converter
//! (`conversion/base.py` and its kin, <https://github.com/ggml-org/llama.cpp>).

use anyhow::{Context, Result, bail, ensure};
use checkpoint::{Metadata, Value};

/// Where config.json keeps the keys of the rotary embedding, first places first.
const ROPE_SECTIONS: [&str; 4] = ["rope_parameters.full_attention.", "rope_parameters.", "rope_scaling.", ""];
/// Numbers of a router's scoring function.
const SOFTMAX: u32 = 1;
const SIGMOID: u32 = 2;

/// GGUF's architecture of a folder's model type.
///
/// # Errors
/// It has none.
pub fn architecture(config: &Metadata) -> Result<&'static str> {
    let model_type = config.str("model_type")?;
    Ok(match model_type {
        // GGUF has one architecture for both.
        "deepseek_v2" => "deepseek2",
        _ => {
            let arch = model::arch::ARCHS.iter().find(|arch| arch.folder.contains(&model_type));
            let name = arch.and_then(|arch| arch.gguf.first().copied());
            name.with_context(|| format!("convert {}: model_type {model_type} is not supported", config.file()))?
        }
    })
}

/// Keys of a new file, and the config that they are read from.
pub struct Keys<'a> {
    pub config: &'a Metadata,
    arch: &'static str,
    out: Vec<(String, Value)>,
}

impl<'a> Keys<'a> {
    pub fn new(config: &'a Metadata, arch: &'static str) -> Self {
        Self { config, arch, out: Vec::new() }
    }

    /// A count, by the first of its names that the config has.
    pub fn count(&self, names: &[&str]) -> Result<Option<u32>> {
        let found = names.iter().find(|name| self.config.get(name).is_some());
        Ok(found.map_or(Ok(None), |name| self.config.opt_u32(name))?)
    }

    fn need(&self, names: &[&str]) -> Result<u32> {
        Ok(self.count(names)?.map_or_else(|| self.config.u32(names[0]), Ok)?)
    }

    /// The place of a key of the rotary embedding.
    fn rope(&self, name: &str) -> Option<String> {
        let places = ROPE_SECTIONS.iter().map(|section| format!("{section}{name}"));
        places.into_iter().find(|place| self.config.get(place).is_some())
    }

    fn rope_number(&self, name: &str) -> Result<Option<f32>> {
        Ok(self.rope(name).map_or(Ok(None), |place| self.config.opt_f32(&place))?)
    }

    /// What scales the rotary embedding.
    pub fn rope_type(&self) -> Result<Option<&'a str>> {
        let place = self.rope("rope_type").or_else(|| self.rope("type"));
        Ok(place.map_or(Ok(None), |place| self.config.opt_str(&place))?)
    }

    fn add(&mut self, key: &str, value: impl Into<Value>) {
        self.out.push((format!("{}.{key}", self.arch), value.into()));
    }

    /// Adds a count where the config has it.
    fn pass(&mut self, key: &str, names: &[&str]) -> Result<()> {
        if let Some(n) = self.count(names)? {
            self.add(key, n);
        }
        Ok(())
    }

    /// Width of a head.
    pub fn d_head(&self) -> Result<u32> {
        match self.count(&["head_dim"])? {
            Some(d) => Ok(d),
            None => {
                let (d_model, n_head) = (self.need(&["hidden_size"])?, self.need(&["num_attention_heads"])?);
                d_model.checked_div(n_head).context("num_attention_heads is 0")
            }
        }
    }

    /// The layers, or one of every kind of them, that see a window; `None` where the config names none.
    fn windowed(&self) -> Result<Option<Vec<bool>>> {
        let Some(Value::Strings(types)) = self.config.get("layer_types") else { return Ok(None) };
        Ok(Some(types.iter().map(|name| name == b"sliding_attention").collect()))
    }

    /// All keys of the architecture.
    ///
    /// # Errors
    /// A key is missing, is of another type, or says what GGUF files cannot.
    pub fn all(mut self) -> Result<Vec<(String, Value)>> {
        let n_layer = self.need(&["num_hidden_layers"])?;
        self.add("block_count", n_layer);
        self.pass("context_length", &["max_position_embeddings"])?;
        let d_model = self.need(&["hidden_size"])?;
        self.add("embedding_length", d_model);
        self.pass("feed_forward_length", &["intermediate_size"])?;
        let n_head = self.need(&["num_attention_heads"])?;
        self.add("attention.head_count", n_head);
        let eps = self.config.f32("rms_norm_eps")?;
        self.add("attention.layer_norm_rms_epsilon", eps);
        self.rope_keys()?;
        self.pass("expert_count", &["num_experts", "num_local_experts", "n_routed_experts"])?;
        self.pass("expert_used_count", &["num_experts_per_tok", "top_k_experts"])?;
        let own_heads = ["deepseek2", "gemma4"].contains(&self.arch);
        if !own_heads {
            let n_kv = self.count(&["num_key_value_heads"])?.unwrap_or(n_head);
            self.add("attention.head_count_kv", n_kv);
            let d_head = self.d_head()?;
            self.add("attention.key_length", d_head);
            self.add("attention.value_length", d_head);
        }
        match self.arch {
            "llama" => self.llama()?,
            "qwen2" | "qwen3" => self.plain_attention(n_layer)?,
            "qwen3moe" => {
                self.plain_attention(n_layer)?;
                self.experts()?;
            }
            "qwen3next" | "qwen35" | "qwen35moe" => self.delta_nets()?,
            "deepseek2" => self.deepseek()?,
            "glm4moe" => self.glm()?,
            "gemma3" => self.gemma3(n_layer)?,
            "gemma4" => self.gemma4(n_layer)?,
            "gpt-oss" => {
                self.pass("attention.sliding_window", &["sliding_window"])?;
                self.pass("expert_feed_forward_length", &["intermediate_size"])?;
            }
            other => bail!("convert architecture {other}: it is not supported"),
        }
        Ok(self.out)
    }

    fn rope_keys(&mut self) -> Result<()> {
        if let Some(base) = self.rope_number("rope_theta")? {
            self.add("rope.freq_base", base);
        }
        let local = ["rope_parameters.sliding_attention.rope_theta", "rope_local_base_freq"];
        if let Some(name) = local.into_iter().find(|name| self.config.get(name).is_some()) {
            let base = self.config.f32(name)?;
            self.add("rope.freq_base_swa", base);
        }
        let factor = self.rope_number("factor")?;
        match (self.rope_type()?, factor) {
            (Some("linear"), Some(factor)) => {
                self.add("rope.scaling.type", "linear");
                self.add("rope.scaling.factor", factor);
            }
            (Some("yarn"), Some(factor)) => {
                self.add("rope.scaling.type", "yarn");
                self.add("rope.scaling.factor", factor);
                if let Some(place) = self.rope("original_max_position_embeddings") {
                    let n = self.config.u32(&place)?;
                    self.add("rope.scaling.original_context_length", n);
                }
                for (key, name) in [
                    ("rope.scaling.yarn_ext_factor", "extrapolation_factor"),
                    ("rope.scaling.yarn_beta_fast", "beta_fast"),
                    ("rope.scaling.yarn_beta_slow", "beta_slow"),
                ] {
                    if let Some(x) = self.rope_number(name)? {
                        self.add(key, x);
                    }
                }
            }
            // llama3 becomes the tensor of divisors; so does proportional.
            (None | Some("default" | "mrope" | "llama3" | "proportional"), _) => {}
            (Some(other), _) => bail!("convert {}: rope_type {other} is not supported", self.config.file()),
        }
        Ok(())
    }

    fn llama(&mut self) -> Result<()> {
        self.pass("vocab_size", &["vocab_size"])?;
        let d_head = self.d_head()?;
        self.add("rope.dimension_count", d_head);
        if let Some(window) = self.count(&["sliding_window"])?.filter(|&n| n > 0) {
            // Readers that know no window for this architecture see everything, which is the same up to its length.
            self.add("attention.sliding_window", window);
        }
        Ok(())
    }

    /// Windows, which Qwen's configs switch on for the layers behind some. llama.cpp knows none for this family: behind
    /// the window's length it computes something else.
    fn plain_attention(&mut self, n_layer: u32) -> Result<()> {
        let window = self.count(&["sliding_window"])?.filter(|&n| n > 0);
        let uses = self.config.opt_bool("use_sliding_window")?.unwrap_or(false);
        let Some(window) = window.filter(|_| uses) else { return Ok(()) };
        let windowed = match self.windowed()? {
            Some(windowed) => windowed,
            None => {
                let first = self.count(&["max_window_layers"])?.unwrap_or(0);
                (0..n_layer).map(|layer| layer >= first).collect()
            }
        };
        if windowed.contains(&true) {
            self.add("attention.sliding_window", window);
            self.add("attention.sliding_window_pattern", windowed);
            crate::out::note!(
                "moebius: layers see a window of {window} positions; llama.cpp has none for {}",
                self.arch
            );
        }
        Ok(())
    }

    fn experts(&mut self) -> Result<()> {
        self.pass("expert_feed_forward_length", &["moe_intermediate_size"])?;
        self.pass("expert_shared_feed_forward_length", &["shared_expert_intermediate_size"])
    }

    fn rotary(&mut self, share: f32) -> Result<()> {
        let share = self.rope_number("partial_rotary_factor")?.unwrap_or(share);
        let n = (share * self.d_head()? as f32) as u32;
        self.add("rope.dimension_count", n);
        Ok(())
    }

    fn delta_nets(&mut self) -> Result<()> {
        self.experts()?;
        if self.arch != "qwen3next" {
            let found = self.rope("mrope_section").map_or(Ok(None), |place| self.config.opt_i32s(&place))?;
            // What the models' own code takes where the config says nothing.
            let mut sections = found.unwrap_or_else(|| vec![11, 11, 10]);
            sections.resize(4, 0);
            self.add("rope.dimension_sections", sections);
        }
        let n_v = self.need(&["linear_num_value_heads"])?;
        let d_v = self.need(&["linear_value_head_dim"])?;
        self.pass("ssm.conv_kernel", &["linear_conv_kernel_dim"])?;
        self.pass("ssm.state_size", &["linear_key_head_dim"])?;
        self.pass("ssm.group_count", &["linear_num_key_heads"])?;
        self.add("ssm.time_step_rank", n_v);
        self.add("ssm.inner_size", n_v.checked_mul(d_v).context("heads of v are too wide")?);
        if let Some(Value::Strings(types)) = self.config.get("layer_types") {
            let recurrent: Vec<bool> = types.iter().map(|name| name == b"linear_attention").collect();
            self.add("attention.recurrent_layers", recurrent);
        }
        let interval = self.count(&["full_attention_interval"])?.unwrap_or(4);
        self.add("full_attention_interval", interval);
        self.rotary(0.25)
    }

    /// The router of DeepSeek and GLM; `score` is what the model's code takes where the config says nothing.
    fn router(&mut self, score: u32, renormalise: bool) -> Result<()> {
        self.pass("expert_group_count", &["n_group"])?;
        self.pass("expert_group_used_count", &["topk_group"])?;
        let score = match self.config.opt_str("scoring_func")? {
            None => score,
            Some("softmax") => SOFTMAX,
            Some("sigmoid") => SIGMOID,
            Some(other) => bail!("convert {}: scoring_func {other} is not supported", self.config.file()),
        };
        self.add("expert_gating_func", score);
        self.pass("expert_feed_forward_length", &["moe_intermediate_size"])?;
        let shared = self.count(&["n_shared_experts"])?.unwrap_or(0);
        self.add("expert_shared_count", shared);
        if let Some(scale) = self.config.opt_f32("routed_scaling_factor")? {
            self.add("expert_weights_scale", scale);
        }
        if self.config.opt_bool("norm_topk_prob")?.unwrap_or(renormalise) {
            self.add("expert_weights_norm", true);
        }
        Ok(())
    }

    fn deepseek(&mut self) -> Result<()> {
        let is_v2 = self.config.str("model_type")? == "deepseek_v2";
        ensure!(
            self.config.opt_bool("rope_interleave")?.unwrap_or(true),
            "convert {}: rope_interleave is false, which GGUF's deepseek2 has no form for",
            self.config.file()
        );
        let d_latent = self.need(&["kv_lora_rank"])?;
        let (d_nope, d_pe) = (self.need(&["qk_nope_head_dim"])?, self.need(&["qk_rope_head_dim"])?);
        // The cache holds one latent for all heads.
        self.add("attention.head_count_kv", 1u32);
        let sum = |a: u32, b: u32| a.checked_add(b).context("heads are too wide");
        self.add("attention.key_length", sum(d_latent, d_pe)?);
        self.add("attention.value_length", d_latent);
        self.add("attention.key_length_mla", sum(d_nope, d_pe)?);
        self.pass("attention.value_length_mla", &["v_head_dim"])?;
        self.pass("attention.q_lora_rank", &["q_lora_rank"])?;
        self.add("attention.kv_lora_rank", d_latent);
        self.add("rope.dimension_count", d_pe);
        self.pass("vocab_size", &["vocab_size"])?;
        let n_dense = self.count(&["first_k_dense_replace"])?.unwrap_or(if is_v2 { 0 } else { 3 });
        self.add("leading_dense_block_count", n_dense);
        self.router(if is_v2 { SOFTMAX } else { SIGMOID }, !is_v2)?;
        if let Some(scale) = self.rope_number("mscale_all_dim")? {
            // A tenth, for reasons of its history: llama.cpp, pull request 17945.
            self.add("rope.scaling.yarn_log_multiplier", 0.1 * scale);
        }
        Ok(())
    }

    fn glm(&mut self) -> Result<()> {
        self.rotary(0.5)?;
        let n_dense = self.count(&["first_k_dense_replace"])?.unwrap_or(1);
        self.add("leading_dense_block_count", n_dense);
        self.router(SIGMOID, true)
    }

    fn gemma3(&mut self, n_layer: u32) -> Result<()> {
        if let Some(width) = self.count(&["query_pre_attn_scalar"])? {
            let d_head = self.d_head()?;
            let n_head = self.need(&["num_attention_heads"])?;
            // GGUF's readers know the one exception by its layers.
            let known = if n_layer == 62 { self.need(&["hidden_size"])? / n_head.max(1) } else { d_head };
            ensure!(
                width == known,
                "convert {}: query_pre_attn_scalar is {width}, and readers of GGUF take {known}",
                self.config.file()
            );
        }
        if let Some(cap) = self.config.opt_f32("final_logit_softcapping")? {
            self.add("final_logit_softcapping", cap);
        }
        ensure!(
            self.config.opt_f32("attn_logit_softcapping")?.is_none(),
            "convert {}: attn_logit_softcapping is set, and GGUF's gemma3 has none",
            self.config.file()
        );
        self.pass("attention.sliding_window", &["sliding_window"])?;
        let every = self.count(&["sliding_window_pattern"])?.filter(|&n| n > 0);
        let by_number = every.map(|n| (0..n_layer).map(|layer| layer % n != n - 1).collect());
        if let Some(windowed) = self.windowed()?.or(by_number) {
            // Readers know the usual pattern: all but every sixth.
            if windowed.iter().enumerate().any(|(layer, &is)| is != (layer % 6 != 5)) {
                self.add("attention.sliding_window_pattern", windowed);
            }
        }
        Ok(())
    }

    /// What newer configs say of single layers.
    fn of_layer(&self, layer: usize, key: &str) -> Result<Option<u32>> {
        Ok(self.config.opt_u32(&format!("per_layer_config.{layer}.{key}"))?)
    }

    fn gemma4(&mut self, n_layer: u32) -> Result<()> {
        let windowed = match self.windowed()? {
            Some(windowed) => windowed,
            None => (0..n_layer).map(|layer| layer % 6 != 5).collect(),
        };
        let d_windowed = self.d_head()?;
        let full = windowed.iter().position(|&is| !is);
        let own = |key: &str| full.map_or(Ok(None), |layer| self.of_layer(layer, key));
        let d_full = match own("head_dim")? {
            Some(d) => d,
            None => self.count(&["global_head_dim"])?.unwrap_or(d_windowed),
        };
        let n_kv = self.need(&["num_key_value_heads"])?;
        let shares = self.config.opt_bool("attention_k_eq_v")?.unwrap_or(true);
        let n_kv_full = match own("num_key_value_heads")? {
            Some(n) => n,
            None if shares => self.count(&["num_global_key_value_heads"])?.unwrap_or(n_kv),
            None => n_kv,
        };
        let heads = windowed.iter().map(|&is| if is { n_kv } else { n_kv_full } as i32).collect::<Vec<_>>();
        self.add("attention.head_count_kv", heads);
        self.add("attention.key_length", d_full);
        self.add("attention.value_length", d_full);
        self.add("attention.key_length_swa", d_windowed);
        self.add("attention.value_length_swa", d_windowed);
        self.add("rope.dimension_count", d_full);
        let share = self.config.opt_f32("rope_parameters.sliding_attention.partial_rotary_factor")?.unwrap_or(1.0);
        self.add("rope.dimension_count_swa", (share * d_windowed as f32) as u32);
        self.pass("attention.sliding_window", &["sliding_window"])?;
        self.add("attention.sliding_window_pattern", windowed);
        self.add("attention.shared_kv_layers", 0u32);
        self.add("embedding_length_per_layer_input", 0u32);
        if let Some(cap) = self.config.opt_f32("final_logit_softcapping")? {
            self.add("final_logit_softcapping", cap);
        }
        self.pass("expert_feed_forward_length", &["moe_intermediate_size"])
    }

    /// Divisors of the rotary frequencies, which GGUF keeps in a tensor; `n_turning` and `n` pairs of Gemma 4's heads.
    pub fn divisors(&self, plan: Option<&model::plan::Plan>) -> Result<Option<Vec<f32>>> {
        let Some(rope) = plan.and_then(|plan| plan.ropes.first()) else { return Ok(None) };
        match self.rope_type()? {
            Some("llama3") => {
                let base = f64::from(self.rope_number("rope_theta")?.unwrap_or(10000.0));
                let n = 2 * rope.inv_freq.len();
                let plain = |i: usize| base.powf(-2.0 * i as f64 / n as f64);
                Ok(Some(rope.inv_freq.iter().enumerate().map(|(i, freq)| (plain(i) / freq) as f32).collect()))
            }
            Some("proportional") => {
                // Pairs that do not turn are turned by next to nothing.
                Ok(Some(rope.inv_freq.iter().map(|&freq| if freq > 0.0 { 1.0 } else { 1e30 }).collect()))
            }
            _ => Ok(None),
        }
    }
}
