//! The metadata of a GGUF file from a folder's `config.json`, under the keys of llama.cpp's converter
//! (`conversion/base.py` and its kin, <https://github.com/ggml-org/llama.cpp>).

use anyhow::{Context, Result, bail, ensure};
use checkpoint::{Metadata, Value};
use model::arch::unsaid_rope;
use model::plan::Plan;

use super::states::{self, STATES};

/// Where config.json keeps the keys of the rotary embedding, first places first.
const ROPE_SECTIONS: [&str; 4] = ["rope_parameters.full_attention.", "rope_parameters.", "rope_scaling.", ""];
/// Numbers of a router's scoring function.
const SOFTMAX: u32 = 1;
pub(super) const SIGMOID: u32 = 2;

/// GGUF's architecture of a folder's model type.
///
/// # Errors
/// It has none.
pub fn architecture(config: &Metadata) -> Result<&'static str> {
    let model_type = model::arch::model_type(config)?.map_or_else(|| config.str("model_type"), Ok)?;
    Ok(match model_type {
        // GGUF has one architecture for all.
        "deepseek_v2" | "glm4_moe_lite" => "deepseek2",
        "nemotron_h" if !states::has_experts(config) => "nemotron_h",
        "granitemoehybrid" if !states::has_mamba(config) => {
            ensure!(
                config.opt_str("position_embedding_type")? == Some("rope"),
                "failed to convert {}: position_embedding_type is not rope, and no layer is Mamba",
                config.file()
            );
            if config.opt_u32("num_local_experts")?.unwrap_or(0) > 0 { "granitemoe" } else { "granite" }
        }
        _ => {
            let arch = model::arch::ARCHS.iter().find(|arch| arch.folder.contains(&model_type));
            let name = arch.and_then(|arch| arch.gguf.first().copied());
            name.with_context(|| {
                format!("failed to convert {}: model_type {model_type} is unsupported", config.file())
            })?
        }
    })
}

/// Keys of a new file, and the config that they are read from.
pub struct Keys<'a> {
    pub config: &'a Metadata,
    pub(super) arch: &'static str,
    out: Vec<(String, Value)>,
}

impl<'a> Keys<'a> {
    pub fn new(config: &'a Metadata, arch: &'static str) -> Self {
        Self { config, arch, out: Vec::new() }
    }

    /// Returns a count, by the first of its names that the config has. Some configs list it for every layer, the same.
    pub fn count(&self, names: &[&str]) -> Result<Option<u32>> {
        let Some(name) = names.iter().find(|name| self.config.get(name).is_some()) else { return Ok(None) };
        let Some(Value::Numbers(list)) = self.config.get(name) else { return Ok(self.config.opt_u32(name)?) };
        let list = if list.is_empty() { Vec::new() } else { self.config.u32s(name)? };
        ensure!(
            list.iter().all(|n| n == &list[0]),
            "failed to convert {}: {name} differs between layers",
            self.config.file()
        );
        Ok(list.first().copied())
    }

    pub(super) fn need(&self, names: &[&str]) -> Result<u32> {
        Ok(self.count(names)?.map_or_else(|| self.config.u32(names[0]), Ok)?)
    }

    /// Returns the place of a key of the rotary embedding.
    fn rope(&self, name: &str) -> Option<String> {
        let places = ROPE_SECTIONS.iter().map(|section| format!("{section}{name}"));
        places.into_iter().find(|place| self.config.get(place).is_some())
    }

    pub(super) fn rope_number(&self, name: &str) -> Result<Option<f32>> {
        Ok(self.rope(name).map_or(Ok(None), |place| self.config.opt_f32(&place))?)
    }

    /// Returns what scales the rotary embedding.
    pub fn rope_type(&self) -> Result<Option<&'a str>> {
        let place = self.rope("rope_type").or_else(|| self.rope("type"));
        Ok(place.map_or(Ok(None), |place| self.config.opt_str(&place))?)
    }

    pub(super) fn add(&mut self, key: &str, value: impl Into<Value>) {
        self.out.push((format!("{}.{key}", self.arch), value.into()));
    }

    /// Adds a count where the config has it.
    pub(super) fn pass(&mut self, key: &str, names: &[&str]) -> Result<()> {
        if let Some(n) = self.count(names)? {
            self.add(key, n);
        }
        Ok(())
    }

    /// Width of a head.
    pub fn d_head(&self) -> Result<u32> {
        match self.count(&["head_dim", "attention_head_dim"])? {
            Some(d) => Ok(d),
            None => {
                let (d_model, n_head) = (self.need(&["hidden_size"])?, self.need(&["num_attention_heads"])?);
                d_model.checked_div(n_head).context("num_attention_heads is 0")
            }
        }
    }

    /// Returns the layers, or one of every kind of them, that see a window; `None` where the config names none.
    fn windowed(&self) -> Result<Option<Vec<bool>>> {
        if let Some(kinds) = self.config.opt_u32s("hybrid_layer_pattern")? {
            return Ok(Some(kinds.into_iter().map(|kind| kind != 0).collect()));
        }
        let Some(Value::Strings(types)) = self.config.get("layer_types") else { return Ok(None) };
        Ok(Some(types.iter().map(|name| name == b"sliding_attention").collect()))
    }

    /// Returns all keys of the architecture, in a file with `n_further` layers after the last that draft. What configs
    /// say in several ways, or not at all, is read off the plan, which gpt-oss alone has none of.
    ///
    /// # Errors
    /// A key is missing, is of another type, or says what GGUF files cannot.
    pub fn all(mut self, n_further: u32, plan: Option<&Plan>) -> Result<Vec<(String, Value)>> {
        let n_layer = self.need(&["num_hidden_layers"])?;
        self.add("block_count", n_layer.checked_add(n_further).context("the model has too many layers")?);
        if n_further > 0 {
            self.add("nextn_predict_layers", n_further);
        }
        self.pass("context_length", &["max_position_embeddings", "model_max_length"])?;
        let d_model = self.need(&["hidden_size"])?;
        self.add("embedding_length", d_model);
        if !["lfm2", "nemotron_h", "nemotron_h_moe"].contains(&self.arch) && !self.is_double_wide()? {
            self.pass("feed_forward_length", &["intermediate_size_mlp", "intermediate_size"])?;
        }
        let n_head = self.need(&["num_attention_heads"])?;
        let by_layer = ["laguna", "step35"].contains(&self.arch);
        if !by_layer {
            self.add("attention.head_count", n_head);
        }
        let (eps_key, eps_name) = match self.arch {
            "cohere2" => ("attention.layer_norm_epsilon", "layer_norm_eps"),
            "lfm2" | "lfm2moe" => ("attention.layer_norm_rms_epsilon", "norm_eps"),
            "nemotron_h" | "nemotron_h_moe" => ("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
            _ => ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
        };
        let eps = self.config.opt_f32("layernorm_epsilon")?.map_or_else(|| self.config.f32(eps_name), Ok)?;
        self.add(eps_key, eps);
        self.rope_keys()?;
        self.pass("expert_count", &["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])?;
        let used = ["num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k", "moe_top_k"];
        self.pass("expert_used_count", &used)?;
        let own_heads =
            ["deepseek2", "deepseek32", "glm-dsa", "mistral4", "gemma4", "mimo2", "kimi-linear", "bailingmoe3"]
                .contains(&self.arch);
        if by_layer {
            let d_head = self.d_head()?;
            self.add("attention.key_length", d_head);
            self.add("attention.value_length", d_head);
        } else if !own_heads {
            let n_kv = self.count(&["num_key_value_heads"])?.unwrap_or(n_head);
            match plan.filter(|_| STATES.contains(&self.arch)) {
                Some(plan) => {
                    self.add("attention.head_count_kv", states::by_layer(plan, n_layer, n_kv, &["attn_output"]))
                }
                None => self.add("attention.head_count_kv", n_kv),
            }
            let d_head = self.d_head()?;
            self.add("attention.key_length", d_head);
            self.add("attention.value_length", d_head);
        }
        match self.arch {
            "llama" | "arcee" => self.llama()?,
            "mistral3" => {
                self.llama()?;
                self.temperature()?;
                if let Some(scale) = self.rope_number("mscale_all_dim")? {
                    self.add("rope.scaling.yarn_log_multiplier", scale);
                }
            }
            "llama4" => self.llama4(n_layer)?,
            "qwen2" | "qwen3" => self.plain_attention(n_layer)?,
            "cohere2" => self.cohere(n_layer)?,
            "smollm3" => self.smollm3(n_layer)?,
            "granite" | "granitemoe" => self.granite()?,
            "olmo2" => self.olmo(n_layer)?,
            "seed_oss" => {}
            "phi3" | "phimoe" => {
                self.rotary(1.0)?;
                let window = self.count(&["sliding_window"])?.unwrap_or(0);
                self.add("attention.sliding_window", window);
                // Files without the key have the usual one.
                if let Some(jitter) = self.config.opt_f32("router_jitter_noise")?.filter(|&jitter| jitter != 0.01) {
                    self.add("router_jitter_noise", jitter);
                }
            }
            "glm4" => self.rotary(0.5)?,
            "qwen3moe" => {
                self.plain_attention(n_layer)?;
                self.experts()?;
            }
            "qwen3next" | "qwen35" | "qwen35moe" => self.delta_nets(n_further)?,
            "lfm2" | "lfm2moe" => self.lfm(plan)?,
            "granitehybrid" => {
                self.granite()?;
                self.mamba(plan)?;
                let rotates = self.config.opt_str("position_embedding_type")? == Some("rope");
                self.add("rope.scaling.finetuned", rotates);
            }
            "jamba" => self.jamba(plan)?,
            "kimi-linear" => self.kimi_linear(plan, n_layer)?,
            "bailingmoe3" => self.bailing(plan, n_layer)?,
            "nemotron_h" | "nemotron_h_moe" => self.nemotron(plan, n_layer)?,
            "falcon-h1" => {
                let is =
                    |name: &str, unsaid: bool| Ok::<_, anyhow::Error>(self.config.opt_bool(name)?.unwrap_or(unsaid));
                ensure!(
                    !(is("mamba_rms_norm", false)? && is("mamba_norm_before_gate", true)?),
                    "failed to convert {}: mamba_norm_before_gate is true, and readers of GGUF have the gate first",
                    self.config.file()
                );
                self.pass("vocab_size", &["vocab_size"])?;
                self.mamba(plan)?;
            }
            "deepseek2" | "mistral4" => self.deepseek()?,
            "deepseek32" | "glm-dsa" => {
                self.deepseek()?;
                self.indexer(plan, n_layer)?;
            }
            "glm4moe" => self.glm()?,
            "ernie4_5" | "olmoe" => {}
            "ernie4_5-moe" => self.ernie_moe()?,
            "minimax-01" => self.lightning(plan, n_layer)?,
            "minimax-m2" => {
                self.pass("rope.dimension_count", &["rotary_dim"])?;
                self.pass("expert_feed_forward_length", &["intermediate_size"])?;
                self.add("expert_gating_func", SIGMOID);
            }
            "dots1" => {
                let n_dense = self.count(&["first_k_dense_replace"])?.unwrap_or(0);
                self.add("leading_dense_block_count", n_dense);
                self.router(SIGMOID, false)?;
            }
            "hunyuan-moe" => self.shared_expert()?,
            "hy_v3" => {
                self.shared_expert()?;
                self.add("expert_gating_func", SIGMOID);
                self.weights("router_scaling_factor", "route_norm", true)?;
            }
            "afmoe" => {
                ensure!(
                    self.config.opt_bool("mup_enabled")?.unwrap_or(false),
                    "failed to convert {}: mup_enabled is false, and readers of GGUF scale the embedding",
                    self.config.file()
                );
                self.shared_expert()?;
                self.pass("leading_dense_block_count", &["num_dense_layers"])?;
                self.add("expert_gating_func", SIGMOID);
                self.weights("route_scale", "route_norm", true)?;
                self.windows()?;
            }
            "laguna" => self.laguna(n_layer)?,
            "step35" => self.step(n_layer)?,
            "mimo2" => self.mimo(n_layer)?,
            "muse-glimmer" => {
                self.windows()?;
                self.number("final_logit_softcapping", "final_logit_softcapping")?;
                self.number("logit_scale", "output_multiplier")?;
            }
            "qwen3vl" | "qwen3vlmoe" => self.qwen_vl()?,
            "mellum" => {
                self.experts()?;
                self.windows()?;
            }
            "gemma3" => self.gemma3(n_layer)?,
            "gemma4" => self.gemma4(n_layer)?,
            "gpt-oss" => {
                self.pass("attention.sliding_window", &["sliding_window"])?;
                self.pass("expert_feed_forward_length", &["intermediate_size"])?;
            }
            other => bail!("failed to convert architecture {other}: it is unsupported"),
        }
        Ok(self.out)
    }

    /// Returns the rotary base of layers with a window where they have their own, or of the rest. Some configs list it
    /// for every layer.
    fn base(&self, windowed: bool) -> Result<Option<f32>> {
        if let Some(Value::Numbers(_)) = self.config.get("rope_theta") {
            let bases = self.config.f32s("rope_theta")?;
            let layers = self.windowed()?.unwrap_or_default();
            let layer = layers.iter().position(|&is| is == windowed);
            return Ok(layer.and_then(|layer| bases.get(layer).copied()));
        }
        if !windowed {
            return self.rope_number("rope_theta");
        }
        let own = ["rope_parameters.sliding_attention.rope_theta", "rope_local_base_freq", "swa_rope_theta"];
        let own = own.into_iter().find(|name| self.config.get(name).is_some());
        Ok(own.map_or(Ok(None), |name| self.config.opt_f32(name))?)
    }

    fn rope_keys(&mut self) -> Result<()> {
        let (unsaid, _) = unsaid_rope(self.config.str("model_type")?);
        // Readers of GGUF files take 10000.
        let unsaid = (unsaid != 10_000.0).then_some(unsaid as f32);
        if let Some(base) = self.base(false)?.or(unsaid) {
            let base = match (self.rope_type()?, self.rope_number("alpha")?) {
                (Some("dynamic"), Some(alpha)) => {
                    let d_head = f64::from(self.d_head()?);
                    (f64::from(base) * f64::from(alpha).powf(d_head / (d_head - 2.0))) as f32
                }
                _ => base,
            };
            self.add("rope.freq_base", base);
        }
        if let Some(base) = self.base(true)? {
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
                if let Some(own) = self.rope_number("attention_factor")? {
                    // Readers multiply the usual one by it.
                    self.add("rope.scaling.attn_factor", own / (0.1 * factor.ln() + 1.0));
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
            (Some("dynamic"), _) => self.add("rope.scaling.type", "none"),
            (Some("longrope" | "su"), _) => self.long_rope()?,
            // llama3 becomes the tensor of divisors; so does proportional.
            (None | Some("default" | "mrope" | "llama3" | "proportional"), _) => {}
            (Some(other), _) => bail!("failed to convert {}: rope_type {other} is unsupported", self.config.file()),
        }
        Ok(())
    }

    /// Keys of LongRoPE, whose lists are tensors ([`Keys::long_factors`]).
    fn long_rope(&mut self) -> Result<()> {
        let n_ctx = self.need(&["max_position_embeddings"])?;
        let n_orig = match self.rope("original_max_position_embeddings") {
            Some(place) => self.config.u32(&place)?,
            None => n_ctx,
        };
        let stretch = self.rope_number("factor")?.map_or(f64::from(n_ctx) / f64::from(n_orig.max(1)), f64::from);
        let factor = match self.arch {
            "phimoe" => self.rope_number("short_mscale")?,
            _ => self.rope_number("attention_factor")?,
        };
        ensure!(
            self.arch != "phimoe" || factor == self.rope_number("long_mscale")?,
            "failed to convert {}: short_mscale and long_mscale differ, and GGUF's phimoe has one factor",
            self.config.file()
        );
        let factor = factor.unwrap_or(model::rope::long_rope_factor(stretch, n_orig as usize) as f32);
        self.add("rope.scaling.original_context_length", n_orig);
        self.add("rope.scaling.attn_factor", factor);
        Ok(())
    }

    /// Returns the two lists of LongRoPE's divisors, which GGUF keeps in tensors.
    pub fn long_factors(&self) -> Result<Vec<(&'static str, Vec<f32>)>> {
        let lists = [("rope_factors_long.weight", "long_factor"), ("rope_factors_short.weight", "short_factor")];
        let there = lists.into_iter().filter_map(|(tensor, name)| Some((tensor, self.rope(name)?)));
        there.map(|(tensor, place)| Ok((tensor, self.config.f32s(&place)?))).collect()
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

    fn smollm3(&mut self, n_layer: u32) -> Result<()> {
        self.plain_attention(n_layer)?;
        self.pass("vocab_size", &["vocab_size"])?;
        let d_head = self.d_head()?;
        self.add("rope.dimension_count", d_head);
        let rotated: Vec<bool> = match self.config.get("no_rope_layers") {
            Some(_) => self.config.u32s("no_rope_layers")?.into_iter().map(|n| n != 0).collect(),
            None => {
                let every = self.count(&["no_rope_layer_interval"])?.filter(|&n| n > 0).unwrap_or(4);
                (0..n_layer).map(|layer| (layer + 1) % every != 0).collect()
            }
        };
        if rotated.iter().enumerate().any(|(layer, &is)| is != ((layer + 1) % 4 != 0)) {
            self.add("attention.rope_pattern", rotated);
            crate::out::note!(
                "moebius: layers that rotate are not three of four, the one rule llama.cpp has for smollm3"
            );
        }
        Ok(())
    }

    fn cohere(&mut self, n_layer: u32) -> Result<()> {
        self.llama()?;
        self.add("rope.scaling.type", "none");
        let scale = self.config.opt_f32("logit_scale")?.unwrap_or(1.0);
        self.add("logit_scale", scale);
        let every = self.count(&["sliding_window_pattern"])?.filter(|&n| n > 0).unwrap_or(4);
        let windowed = match self.windowed()? {
            Some(windowed) => windowed,
            None => (0..n_layer).map(|layer| layer % every != every - 1).collect(),
        };
        self.add("attention.sliding_window_pattern", windowed);
        Ok(())
    }

    fn granite(&mut self) -> Result<()> {
        self.pass("vocab_size", &["vocab_size"])?;
        let d_head = self.d_head()?;
        self.add("rope.dimension_count", d_head);
        for (key, name) in [
            ("attention.scale", "attention_multiplier"),
            ("embedding_scale", "embedding_multiplier"),
            ("residual_scale", "residual_multiplier"),
            ("logit_scale", "logits_scaling"),
        ] {
            let factor = self.config.opt_f32(name)?.unwrap_or(1.0);
            self.add(key, factor);
        }
        self.pass("expert_shared_feed_forward_length", &["shared_intermediate_size"])
    }

    fn olmo(&mut self, n_layer: u32) -> Result<()> {
        let Some(window) = self.count(&["sliding_window"])?.filter(|&n| n > 0) else { return Ok(()) };
        self.add("attention.sliding_window", window);
        let usual = || (0..n_layer).map(|layer| layer % 4 != 3).collect();
        let windowed = self.windowed()?.unwrap_or_else(usual);
        self.add("attention.sliding_window_pattern", windowed);
        Ok(())
    }

    /// Readers that follow llama.cpp take a chunk of 8192, all but every fourth layer, and the usual growth.
    fn llama4(&mut self, n_layer: u32) -> Result<()> {
        self.pass("expert_feed_forward_length", &["intermediate_size"])?;
        self.pass("interleave_moe_layer_step", &["interleave_moe_layer_step"])?;
        self.pass("attention.sliding_window", &["attention_chunk_size"])?;
        if let Some(rotated) = self.config.opt_u32s("no_rope_layers")?.filter(|list| list.len() == n_layer as usize) {
            self.add("attention.sliding_window_pattern", rotated.into_iter().map(|is| is != 0).collect::<Vec<bool>>());
        }
        self.number("attention.temperature_scale", "attn_scale")?;
        self.pass("attention.temperature_length", &["floor_scale"])
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

    /// The window, and the layers that have it.
    fn windows(&mut self) -> Result<()> {
        self.pass("attention.sliding_window", &["sliding_window"])?;
        if let Some(windowed) = self.windowed()? {
            self.add("attention.sliding_window_pattern", windowed);
        }
        Ok(())
    }

    /// Widths of experts, of which the shared ones are one.
    fn shared_expert(&mut self) -> Result<()> {
        let d_ff = self.need(&["moe_intermediate_size"])?;
        let names = ["num_shared_experts", "num_shared_expert", "moe_num_shared_experts"];
        let n_shared = self.count(&names)?.unwrap_or(1);
        self.add("expert_feed_forward_length", d_ff);
        self.add("expert_shared_count", n_shared);
        let d_ff = d_ff.checked_mul(n_shared).context("shared experts are too wide")?;
        self.add("expert_shared_feed_forward_length", d_ff);
        Ok(())
    }

    /// What is done to the weights of experts; `renormalise` is what the model's code takes where the config says
    /// nothing.
    pub(super) fn weights(&mut self, scale: &str, norm: &str, renormalise: bool) -> Result<()> {
        if let Some(scale) = self.config.opt_f32(scale)? {
            self.add("expert_weights_scale", scale);
        }
        if self.config.opt_bool(norm)?.unwrap_or(renormalise) {
            self.add("expert_weights_norm", true);
        }
        Ok(())
    }

    /// Adds a number where the config has it.
    pub(super) fn number(&mut self, key: &str, name: &str) -> Result<()> {
        if let Some(x) = self.config.opt_f32(name)? {
            self.add(key, x);
        }
        Ok(())
    }

    /// Layers before the first of this kind in `mlp_layer_types`.
    fn n_dense(&self) -> u32 {
        match self.config.get("mlp_layer_types") {
            Some(Value::Strings(types)) => types.iter().take_while(|name| *name == b"dense").count() as u32,
            _ => 0,
        }
    }

    /// Returns a number for every layer, one for those with a window and one for the rest.
    fn by_window(&self, n_layer: u32, full: u32, windowed: u32) -> Result<Vec<u32>> {
        let layers = self.windowed()?.unwrap_or_default();
        ensure!(
            layers.len() >= n_layer as usize,
            "failed to convert {}: layer_types is missing or too short",
            self.config.file()
        );
        Ok(layers.iter().take(n_layer as usize).map(|&is| if is { windowed } else { full }).collect())
    }

    fn laguna(&mut self, n_layer: u32) -> Result<()> {
        let heads = match self.config.opt_u32s("num_attention_heads_per_layer")? {
            Some(heads) => heads,
            None => vec![self.need(&["num_attention_heads"])?; n_layer as usize],
        };
        self.add("attention.head_count", heads);
        self.pass("attention.head_count_kv", &["num_key_value_heads"])?;
        self.pass("vocab_size", &["vocab_size"])?;
        let share = |kind: &str| self.config.opt_f32(&format!("rope_parameters.{kind}.partial_rotary_factor"));
        let (full, windowed) = (share("full_attention")?, share("sliding_attention")?);
        let d_head = self.d_head()? as f32;
        self.add("rope.dimension_count", (full.unwrap_or(1.0) * d_head) as u32);
        self.add("rope.dimension_count_swa", (windowed.unwrap_or(1.0) * d_head) as u32);
        self.windows()?;
        self.experts()?;
        self.add("leading_dense_block_count", self.n_dense());
        self.add("expert_gating_func", SIGMOID);
        self.weights("moe_routed_scaling_factor", "norm_topk_prob", true)?;
        if let Some(cap) = self.config.opt_f32("moe_router_logit_softcapping")?.filter(|&cap| cap > 0.0) {
            self.add("router_logit_softcapping", cap);
        }
        Ok(())
    }

    fn step(&mut self, n_layer: u32) -> Result<()> {
        let (heads, kv) = (self.need(&["num_attention_heads"])?, self.need(&["num_attention_groups"])?);
        let own = |name: &str, or: u32| Ok::<_, anyhow::Error>(self.count(&[name])?.unwrap_or(or));
        let own_heads = own("attention_other_setting.num_attention_heads", heads)?;
        let own_kv = own("attention_other_setting.num_attention_groups", kv)?;
        self.add("attention.head_count", self.by_window(n_layer, heads, own_heads)?);
        self.add("attention.head_count_kv", self.by_window(n_layer, kv, own_kv)?);
        self.pass("attention.sliding_window", &["sliding_window"])?;
        let windowed: Vec<bool> = self.by_window(n_layer, 0, 1)?.into_iter().map(|is| is == 1).collect();
        self.add("attention.sliding_window_pattern", windowed);
        self.pass("expert_feed_forward_length", &["moe_intermediate_size"])?;
        self.pass("expert_shared_feed_forward_length", &["share_expert_dim"])?;
        self.weights("moe_router_scaling_factor", "norm_expert_weight", true)?;
        self.add("expert_gating_func", SIGMOID);
        let first = self.config.opt_str("moe_layers_enum")?.and_then(|list| list.split(',').next());
        let n_dense = first.and_then(|layer| layer.trim().parse().ok()).unwrap_or_else(|| self.n_dense());
        self.add("leading_dense_block_count", n_dense);
        self.add("moe_every_n_layers", 1u32);
        for (key, name) in [("swiglu_clamp_exp", "swiglu_limits"), ("swiglu_clamp_shexp", "swiglu_limits_shared")] {
            let limit = |layer: u32| Ok(self.config.opt_f32(&format!("{name}.{layer}"))?.unwrap_or(0.0));
            let mut limits = match self.config.get(name) {
                Some(Value::Numbers(_)) => self.config.f32s(name)?,
                // Some of them are `null`.
                _ => (0..n_layer).map(limit).collect::<Result<Vec<f32>>>()?,
            };
            limits.resize(n_layer as usize, 0.0);
            if limits.iter().any(|&limit| limit != 0.0) {
                self.add(key, limits);
            }
        }
        Ok(())
    }

    fn mimo(&mut self, n_layer: u32) -> Result<()> {
        let kv = self.need(&["num_key_value_heads"])?;
        let own_kv = self.count(&["swa_num_key_value_heads"])?.unwrap_or(kv);
        self.add("attention.head_count_kv", self.by_window(n_layer, kv, own_kv)?);
        let d_head = self.d_head()?;
        self.add("attention.key_length", d_head);
        self.pass("attention.value_length", &["v_head_dim"])?;
        self.number("attention.value_scale", "attention_value_scale")?;
        let window = match self.count(&["sliding_window_size"])? {
            // It counts the earlier positions alone.
            Some(n) => n.checked_add(1).context("the window is too long")?,
            None => self.need(&["sliding_window"])?,
        };
        self.add("attention.sliding_window", window);
        self.add("attention.sliding_window_pattern", self.by_window(n_layer, 0, 1)?);
        self.pass("expert_feed_forward_length", &["moe_intermediate_size"])?;
        self.add("expert_gating_func", SIGMOID);
        self.weights("routed_scaling_factor", "norm_topk_prob", true)?;
        self.rotary(1.0)
    }

    fn ernie_moe(&mut self) -> Result<()> {
        self.shared_expert()?;
        let step = self.count(&["moe_layer_interval"])?.unwrap_or(1);
        self.add("interleave_moe_layer_step", step);
        let n_dense = self.count(&["moe_layer_start_index"])?.unwrap_or(1);
        self.add("leading_dense_block_count", n_dense);
        Ok(())
    }

    fn qwen_vl(&mut self) -> Result<()> {
        let n_stacked = match self.config.get("vision_config.deepstack_visual_indexes") {
            Some(Value::Numbers(list)) => list.len() as u32,
            _ => 0,
        };
        self.add("n_deepstack_layers", n_stacked);
        self.sections(vec![24, 20, 20])?;
        if self.arch == "qwen3vlmoe" {
            self.experts()?;
        }
        Ok(())
    }

    /// Pairs of a head that turn by time, height and width of an image; `unsaid` is what the model's own code takes
    /// where the config says nothing.
    fn sections(&mut self, unsaid: Vec<i32>) -> Result<()> {
        let found = self.rope("mrope_section").map_or(Ok(None), |place| self.config.opt_i32s(&place))?;
        let mut sections = found.unwrap_or(unsaid);
        sections.resize(4, 0);
        self.add("rope.dimension_sections", sections);
        Ok(())
    }

    fn experts(&mut self) -> Result<()> {
        self.pass("expert_feed_forward_length", &["moe_intermediate_size"])?;
        self.pass("expert_shared_feed_forward_length", &["shared_expert_intermediate_size"])
    }

    /// `share` of a head is rotated where the config says nothing.
    fn rotary(&mut self, share: f32) -> Result<()> {
        let share = self.rope_number("partial_rotary_factor")?.unwrap_or(share);
        let n = (share * self.d_head()? as f32) as u32;
        self.add("rope.dimension_count", n);
        Ok(())
    }

    fn delta_nets(&mut self, n_further: u32) -> Result<()> {
        self.experts()?;
        if self.arch != "qwen3next" {
            self.sections(vec![11, 11, 10])?;
        }
        let n_v = self.need(&["linear_num_value_heads"])?;
        let d_v = self.need(&["linear_value_head_dim"])?;
        self.pass("ssm.conv_kernel", &["linear_conv_kernel_dim"])?;
        self.pass("ssm.state_size", &["linear_key_head_dim"])?;
        self.pass("ssm.group_count", &["linear_num_key_heads"])?;
        self.add("ssm.time_step_rank", n_v);
        self.add("ssm.inner_size", n_v.checked_mul(d_v).context("heads of v are too wide")?);
        if let Some(Value::Strings(types)) = self.config.get("layer_types") {
            let further = (0..n_further).map(|_| false);
            let recurrent: Vec<bool> = types.iter().map(|name| name == b"linear_attention").chain(further).collect();
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
            Some("sigmoid" | "noaux_tc") => SIGMOID,
            Some(other) => bail!("failed to convert {}: scoring_func {other} is unsupported", self.config.file()),
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

    /// What makes queries grow with their position.
    fn temperature(&mut self) -> Result<()> {
        if let Some(beta) = self.rope_number("llama_4_scaling_beta")?.filter(|&beta| beta != 0.0) {
            self.add("attention.temperature_scale", beta);
            let place = self.rope("original_max_position_embeddings").context("the context before YaRN is missing")?;
            let n = self.config.u32(&place)?;
            self.add("attention.temperature_length", n);
        }
        Ok(())
    }

    fn deepseek(&mut self) -> Result<()> {
        let (score, renormalise, n_dense) = match model::arch::model_type(self.config)?.unwrap_or_default() {
            "deepseek_v2" => (SOFTMAX, false, 0),
            "mistral4" => (SOFTMAX, true, 0),
            "glm4_moe_lite" => (SIGMOID, true, 1),
            _ => (SIGMOID, true, 3),
        };
        ensure!(
            self.config.opt_bool("rope_interleave")?.unwrap_or(true),
            "failed to convert {}: rope_interleave is false, which GGUF's deepseek2 has no form for",
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
        let n_dense = self.count(&["first_k_dense_replace"])?.unwrap_or(n_dense);
        self.add("leading_dense_block_count", n_dense);
        self.router(score, renormalise)?;
        self.temperature()?;
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
                "failed to convert {}: query_pre_attn_scalar is {width}, and readers of GGUF take {known}",
                self.config.file()
            );
        }
        if let Some(cap) = self.config.opt_f32("final_logit_softcapping")? {
            self.add("final_logit_softcapping", cap);
        }
        ensure!(
            self.config.opt_f32("attn_logit_softcapping")?.is_none(),
            "failed to convert {}: attn_logit_softcapping is set, and GGUF's gemma3 has none",
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

    /// Returns what newer configs say of single layers.
    fn of_layer(&self, layer: usize, key: &str) -> Result<Option<u32>> {
        Ok(self.config.opt_u32(&format!("per_layer_config.{layer}.{key}"))?)
    }

    /// Returns whether Gemma 4's layers without a cache have a feed-forward of twice the width.
    fn is_double_wide(&self) -> Result<bool> {
        Ok(self.arch == "gemma4" && self.config.opt_bool("use_double_wide_mlp")?.unwrap_or(false))
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
        let n_shared = self.count(&["num_kv_shared_layers"])?.unwrap_or(0);
        self.add("attention.shared_kv_layers", n_shared);
        let d_layer = self.count(&["hidden_size_per_layer_input"])?.unwrap_or(0);
        self.add("embedding_length_per_layer_input", d_layer);
        if self.is_double_wide()? {
            let d_ff = self.need(&["intermediate_size"])?;
            let wide = d_ff.checked_mul(2).context("intermediate_size is too large")?;
            let n_own = n_layer.saturating_sub(n_shared);
            let widths = (0..n_layer).map(|layer| if layer < n_own { d_ff } else { wide } as i32).collect::<Vec<_>>();
            self.add("feed_forward_length", widths);
        }
        if let Some(cap) = self.config.opt_f32("final_logit_softcapping")? {
            self.add("final_logit_softcapping", cap);
        }
        self.pass("expert_feed_forward_length", &["moe_intermediate_size"])
    }

    /// Divisors of the rotary frequencies, which GGUF keeps in a tensor; `n_turning` and `n` pairs of Gemma 4's heads.
    pub fn divisors(&self, plan: Option<&Plan>) -> Result<Option<Vec<f32>>> {
        let Some(rope) = plan.and_then(|plan| plan.ropes.first()) else { return Ok(None) };
        match self.rope_type()? {
            Some("llama3") => {
                let base = f64::from(self.base(false)?.unwrap_or(10000.0));
                let n = 2 * rope.inv_freq.len();
                let plain = |i: usize| base.powf(-2.0 * i as f64 / n as f64);
                let mut divisors: Vec<f32> =
                    rope.inv_freq.iter().enumerate().map(|(i, freq)| (plain(i) / freq) as f32).collect();
                if self.arch == "step35" {
                    // As long as the layers need that rotate whole heads, and leave alone.
                    divisors.resize(divisors.len().max(self.d_head()? as usize / 2), 1.0);
                }
                Ok(Some(divisors))
            }
            Some("proportional") => Ok(Some(turning(&rope.inv_freq))),
            // Gemma 4's own rule, which a folder need not name.
            None if rope.inv_freq.contains(&0.0) => Ok(Some(turning(&rope.inv_freq))),
            _ => Ok(None),
        }
    }
}

/// Divisors of frequencies, some of which are 0: pairs that do not turn are turned by next to nothing.
fn turning(inv_freq: &[f64]) -> Vec<f32> {
    inv_freq.iter().map(|&freq| if freq > 0.0 { 1.0 } else { 1e30 }).collect()
}
