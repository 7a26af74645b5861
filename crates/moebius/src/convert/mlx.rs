//! GGUF files as the folders that mlx-lm loads: `config.json`, `tokenizer.json`, and safetensors in the names and
//! layouts of its models (<https://github.com/ml-explore/mlx-lm>). Matrices are bf16, or affine as MLX defines it.
//!
//! A file's matrices are written one after the other, a row at a time; what is held is the planes of scales and biases
//! of one of them.

use std::fs;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use checkpoint::{Checkpoint, TensorInfo};
use engine::tokenizer;
use indicatif::ProgressBar;
use quant::{Affine, PlanesBuf, ScaleType, WeightType};
use serde_json::{Map, Value, json};

use super::recipe::Order;
use crate::quantize::mix;
use crate::quantize::source::unchanged;
use crate::{machine, out};

/// Size of a file of weights that is not passed where tensors can be kept apart.
const SHARD: usize = 5_000_000_000;
/// Group where nobody says another: MLX's own.
const GROUP: usize = 64;

/// GGUF's names inside a layer, and mlx-lm's.
const NAMES: &[(&str, &str)] = &[
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

/// Where Mixtral differs.
const MIXTRAL: &[(&str, &str)] = &[
    ("ffn_gate_inp", "block_sparse_moe.gate"),
    ("ffn_gate_exps", "block_sparse_moe.switch_mlp.gate_proj"),
    ("ffn_up_exps", "block_sparse_moe.switch_mlp.up_proj"),
    ("ffn_down_exps", "block_sparse_moe.switch_mlp.down_proj"),
];

/// A tensor of the folder.
struct Out<'a> {
    info: &'a TensorInfo,
    /// Its module, and `weight` or `bias`.
    module: String,
    kind: String,
    dtype: WeightType,
    /// The order of its rows, or of the numbers of a vector.
    order: Order,
}

/// An entry of a safetensors header.
struct Entry {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    len: usize,
}

impl Out<'_> {
    fn n_cols(&self) -> usize {
        self.info.shape.last().copied().unwrap_or(1)
    }

    fn n_rows(&self) -> usize {
        self.info.shape.iter().product::<usize>() / self.n_cols()
    }

    /// What it is in the file: one tensor, or three planes.
    fn entries(&self) -> Result<Vec<Entry>> {
        let each = self.dtype.plane_bytes(self.n_cols()).context("groups do not divide its rows")?;
        let name = |kind: &str| format!("{}.{kind}", self.module);
        let shape = |last: usize| [&self.info.shape[..self.info.shape.len() - 1], &[last]].concat();
        let entry = |kind: &str, dtype, last: usize, row: usize| Entry {
            name: name(kind),
            dtype,
            shape: shape(last),
            len: row * self.n_rows(),
        };
        Ok(match self.dtype {
            WeightType::Affine(_) => vec![
                entry("weight", "U32", each.q / 4, each.q),
                entry("scales", "BF16", each.scales / 2, each.scales),
                entry("biases", "BF16", each.biases / 2, each.biases),
            ],
            dtype => {
                let name = match dtype {
                    WeightType::F32 => "F32",
                    WeightType::F16 => "F16",
                    _ => "BF16",
                };
                vec![entry(&self.kind, name, self.n_cols(), each.q)]
            }
        })
    }

    /// Writes its planes one after the other.
    fn write(&self, checkpoint: &Checkpoint, out: &mut impl Write, bar: &ProgressBar) -> Result<()> {
        let (n_rows, n_cols) = (self.n_rows(), self.n_cols());
        let each = self.info.dtype.row_bytes(n_cols).context("blocks do not divide its rows")?;
        let planes = self.dtype.plane_bytes(n_cols).context("groups do not divide its rows")?;
        let mut bytes = vec![0; each];
        let (mut values, mut row) = (vec![0.0; n_cols], PlanesBuf::new(planes));
        let (mut scales, mut biases) = (Vec::new(), Vec::new());
        for i in 0..n_rows {
            let at = if self.kind == "bias" { i } else { self.order.source(i) };
            checkpoint.files()[self.info.file].read_at(self.info.offset + at * each, &mut bytes)?;
            quant::decode_row(self.info.dtype, &bytes[..], &mut values);
            if self.kind == "bias" {
                let old = values.clone();
                values.iter_mut().enumerate().for_each(|(i, value)| *value = old[self.order.source(i)]);
            }
            if let Some(i) = values.iter().position(|v| !v.is_finite()) {
                bail!("convert tensor {}: value {i} of a row is {}", self.info.name, values[i]);
            }
            quant::encode_row(self.dtype, &values, row.get_mut());
            out.write_all(&row.q)?;
            scales.extend_from_slice(&row.scales);
            biases.extend_from_slice(&row.biases);
            bar.inc(n_cols as u64);
        }
        out.write_all(&scales)?;
        Ok(out.write_all(&biases)?)
    }
}

/// Writes the folder.
///
/// # Errors
/// The architecture has no form here, the file cannot be read, or the folder is there already.
pub fn convert(checkpoint: Checkpoint, path: &Path, bits: Option<u8>, group: Option<usize>) -> Result<()> {
    let group = group.unwrap_or(GROUP);
    let affine = bits.map(|bits| {
        let affine = Affine::new(usize::from(bits), group, ScaleType::BF16);
        affine.with_context(|| format!("convert to mlx: {bits} bits in groups of {group} are no type of MLX's"))
    });
    let affine = affine.transpose()?;
    if let Some(other) = checkpoint.unreadable().first() {
        bail!("read {}: tensor {} is of type {}: {}", checkpoint.name(), other.name, other.dtype, other.why);
    }
    let is_joined = |t: &&TensorInfo| checkpoint.files()[t.file].is_repacked();
    if let Some(tensor) = checkpoint.tensors().iter().find(is_joined) {
        bail!("read {}: tensor {} is NVFP4 with a scale of its own, which MLX has not", checkpoint.name(), tensor.name);
    }
    // What can be planned has the shapes that it should.
    model::build(&checkpoint)?;
    let mut config = config(&checkpoint)?;
    let outs = tensors(&checkpoint, affine)?;
    if let Some(bits) = bits {
        let quantization = json!({"group_size": group, "bits": bits, "mode": "affine"});
        config.insert("quantization".into(), quantization.clone());
        config.insert("quantization_config".into(), quantization);
    }
    let texts = match checkpoint.meta().get("tokenizer.ggml.model") {
        Some(_) => Some(tokenizer::folder_texts(checkpoint.meta())?),
        None => {
            out::note!("moebius: {} has no tokenizer, and neither will the folder", checkpoint.name());
            None
        }
    };
    let template = checkpoint.meta().opt_str("tokenizer.chat_template")?;
    let bar = machine::weights_progress(outs.iter().map(|t| t.info.shape.iter().product::<usize>() as u64).sum())?;
    out::folder(path, |folder| {
        let write = |name: &str, text: &str| {
            fs::write(folder.join(name), text).with_context(|| format!("write {}", folder.join(name).display()))
        };
        write("config.json", &serde_json::to_string_pretty(&Value::Object(config))?)?;
        if let Some((tokenizer, mut settings)) = texts {
            if let Some(template) = template {
                settings.insert("chat_template".into(), json!(template));
                write("chat_template.jinja", template)?;
            }
            write("tokenizer.json", &serde_json::to_string(&tokenizer)?)?;
            write("tokenizer_config.json", &serde_json::to_string_pretty(&Value::Object(settings))?)?;
        }
        weights(&checkpoint, &outs, folder, &bar)
    })?;
    bar.finish_and_clear();
    unchanged(&checkpoint)
}

/// Writes the weights in as many files as their size wants, and the index of more than one.
fn weights(checkpoint: &Checkpoint, outs: &[Out], folder: &Path, bar: &ProgressBar) -> Result<()> {
    let mut shards: Vec<Vec<&Out>> = vec![Vec::new()];
    let (mut in_shard, mut total) = (0, 0);
    for one in outs {
        let len = one.entries()?.iter().map(|entry| entry.len).sum::<usize>();
        if in_shard > 0 && in_shard + len > SHARD {
            shards.push(Vec::new());
            in_shard = 0;
        }
        (in_shard, total) = (in_shard + len, total + len);
        shards.last_mut().into_iter().for_each(|shard| shard.push(one));
    }
    let mut index = Map::new();
    let n = shards.len();
    for (i, shard) in shards.iter().enumerate() {
        let name = match n {
            1 => "model.safetensors".to_string(),
            _ => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
        };
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!({"format": "mlx"}));
        let mut at = 0;
        for entry in shard.iter().map(|one| one.entries()).collect::<Result<Vec<_>>>()?.into_iter().flatten() {
            let Entry { name: tensor, dtype, shape, len } = entry;
            header.insert(tensor.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [at, at + len]}));
            index.insert(tensor, json!(name));
            at += len;
        }
        let mut header = serde_json::to_vec(&Value::Object(header))?;
        // Some readers want the numbers aligned.
        header.resize(header.len().next_multiple_of(8), b' ');
        let path = folder.join(&name);
        let file = fs::File::create(&path).with_context(|| format!("create {}", path.display()))?;
        let mut out = BufWriter::new(file);
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        shard.iter().try_for_each(|one| one.write(checkpoint, &mut out, bar))?;
        let file = out.into_inner().map_err(std::io::IntoInnerError::into_error);
        file.and_then(|file| file.sync_all()).with_context(|| format!("write {}", path.display()))?;
    }
    let index = json!({"metadata": {"total_size": total}, "weight_map": index});
    let path = folder.join("model.safetensors.index.json");
    fs::write(&path, serde_json::to_string_pretty(&index)?).with_context(|| format!("write {}", path.display()))
}

/// The tensors of the folder, in the file's order.
fn tensors(checkpoint: &Checkpoint, affine: Option<Affine>) -> Result<Vec<Out<'_>>> {
    let meta = checkpoint.meta();
    let arch = meta.str("general.architecture")?;
    let count = |key: &str| Ok::<_, anyhow::Error>(meta.opt_u32(&format!("{arch}.{key}"))?);
    let n_head = count("attention.head_count")?.unwrap_or(1) as usize;
    let n_kv = count("attention.head_count_kv")?.unwrap_or(n_head as u32) as usize;
    let is_mixtral = arch == "llama" && count("expert_count")?.unwrap_or(0) > 0;
    let mut outs = Vec::new();
    for info in checkpoint.tensors() {
        let (layer, rest) = match info.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((layer, rest)) => (Some(layer), rest),
            None => (None, info.name.as_str()),
        };
        let (stem, kind) = rest.rsplit_once('.').unwrap_or((rest, "weight"));
        let own = MIXTRAL.iter().filter(|_| is_mixtral).chain(NAMES).find(|(name, _)| *name == stem);
        let module = match (layer, stem, own) {
            (None, "token_embd", _) => "model.embed_tokens".to_string(),
            (None, "output_norm", _) => "model.norm".into(),
            (None, "output", _) => "lm_head".into(),
            (Some(layer), _, Some((_, name))) => format!("model.layers.{layer}.{name}"),
            _ => bail!("convert tensor {}: MLX's form of {arch} has no such tensor", info.name),
        };
        let is_matrix = mix::may_change(&mix::Tensor { name: &info.name, shape: &info.shape, dtype: info.dtype });
        let n_cols = info.shape.last().copied().unwrap_or(1);
        let dtype = match affine {
            Some(affine) if is_matrix && n_cols.is_multiple_of(affine.group()) => WeightType::Affine(affine),
            _ if is_matrix && info.dtype == WeightType::F16 => WeightType::F16,
            _ if is_matrix => WeightType::BF16,
            _ => exact(checkpoint, info)?,
        };
        let heads = match stem {
            "attn_q" if arch == "llama" => Some(n_head),
            "attn_k" if arch == "llama" => Some(n_kv),
            _ => None,
        };
        let n = if kind == "bias" { n_cols } else { info.shape[0] };
        let order = match heads {
            None => Order::Same,
            Some(heads) => {
                ensure!(n.is_multiple_of(2 * heads), "convert tensor {}: its rows are no heads", info.name);
                Order::Unpaired { d_head: n / heads }
            }
        };
        outs.push(Out { info, module, kind: kind.into(), dtype, order });
    }
    Ok(outs)
}

/// The smallest float type that holds a vector, or a router, as it is.
fn exact(checkpoint: &Checkpoint, info: &TensorInfo) -> Result<WeightType> {
    let mut bytes = vec![0; info.len];
    checkpoint.read(&info.extents(), &mut bytes)?;
    let mut values = vec![0.0; info.shape.iter().product()];
    quant::decode_row(info.dtype, &bytes[..], &mut values);
    let fits = values.iter().all(|v| v.to_bits() & 0xffff == 0);
    Ok(if fits { WeightType::BF16 } else { WeightType::F32 })
}

/// `config.json` of a file's keys.
fn config(checkpoint: &Checkpoint) -> Result<Map<String, Value>> {
    let meta = checkpoint.meta();
    let arch = meta.str("general.architecture")?;
    let is_moe = meta.opt_u32(&format!("{arch}.expert_count"))?.unwrap_or(0) > 0;
    let (model_type, class) = match (arch, is_moe) {
        ("llama", false) => ("llama", "LlamaForCausalLM"),
        ("llama", true) => ("mixtral", "MixtralForCausalLM"),
        ("qwen2", false) => ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", false) => ("qwen3", "Qwen3ForCausalLM"),
        ("qwen3moe", true) => ("qwen3_moe", "Qwen3MoeForCausalLM"),
        _ => bail!(
            "convert {}: MLX folders are written for llama, qwen2, qwen3 and qwen3moe, not for {arch}",
            checkpoint.name()
        ),
    };
    ensure!(
        checkpoint.tensor("rope_freqs.weight").is_none(),
        "convert {}: it has rope_freqs.weight, whose divisors config.json has no form for",
        checkpoint.name()
    );
    let key = |name: &str| format!("{arch}.{name}");
    let count = |name: &str| Ok::<_, anyhow::Error>(meta.opt_u32(&key(name))?);
    let mut config = Map::new();
    let mut put = |name: &str, value: Value| _ = config.insert(name.into(), value);
    put("model_type", json!(model_type));
    put("architectures", json!([class]));
    let n_head = meta.u32(&key("attention.head_count"))?;
    let d_model = meta.u32(&key("embedding_length"))?;
    put("hidden_size", json!(d_model));
    put("num_hidden_layers", json!(meta.u32(&key("block_count"))?));
    put("num_attention_heads", json!(n_head));
    put("num_key_value_heads", json!(count("attention.head_count_kv")?.unwrap_or(n_head)));
    let d_head = count("attention.key_length")?.or(d_model.checked_div(n_head));
    put("head_dim", json!(d_head));
    put("rms_norm_eps", json!(meta.f32(&key("attention.layer_norm_rms_epsilon"))?));
    put("rope_theta", json!(meta.opt_f32(&key("rope.freq_base"))?.unwrap_or(10000.0)));
    put("max_position_embeddings", json!(meta.u32(&key("context_length"))?));
    let d_ff = count("feed_forward_length")?.or(count("expert_feed_forward_length")?);
    put("intermediate_size", json!(d_ff));
    let table = checkpoint.tensor("token_embd.weight").context("the file has no embedding")?;
    put("vocab_size", json!(table.shape[0]));
    put("tie_word_embeddings", json!(checkpoint.tensor("output.weight").is_none()));
    put("hidden_act", json!("silu"));
    put("attention_bias", json!(checkpoint.tensor("blk.0.attn_q.bias").is_some()));
    put("torch_dtype", json!("bfloat16"));
    if is_moe {
        put("num_experts_per_tok", json!(count("expert_used_count")?));
        let experts = if model_type == "mixtral" { "num_local_experts" } else { "num_experts" };
        put(experts, json!(count("expert_count")?));
        if model_type == "qwen3_moe" {
            put("moe_intermediate_size", json!(count("expert_feed_forward_length")?.or(d_ff)));
            put("norm_topk_prob", json!(meta.opt_bool(&key("expert_weights_norm"))?.unwrap_or(true)));
            put("decoder_sparse_step", json!(1));
            put("mlp_only_layers", json!([]));
        }
    }
    if let Some(kind) = meta.opt_str(&key("rope.scaling.type"))?.filter(|kind| *kind != "none") {
        let factor = meta.opt_f32(&key("rope.scaling.factor"))?.unwrap_or(1.0);
        let n_ctx = count("rope.scaling.original_context_length")?;
        let mut scaling = Map::new();
        scaling.insert("rope_type".into(), json!(kind));
        scaling.insert("type".into(), json!(kind));
        scaling.insert("factor".into(), json!(factor));
        n_ctx.into_iter().for_each(|n| _ = scaling.insert("original_max_position_embeddings".into(), json!(n)));
        put("rope_scaling", Value::Object(scaling));
    }
    for name in ["bos_token_id", "eos_token_id"] {
        if let Some(id) = meta.opt_u32(&format!("tokenizer.ggml.{name}"))? {
            put(name, json!(id));
        }
    }
    Ok(config)
}
