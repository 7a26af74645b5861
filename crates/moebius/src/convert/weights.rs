//! The tensors of a GGUF file from those of a folder, under the names and in the layouts of llama.cpp's converter
//! (`conversion/`, <https://github.com/ggml-org/llama.cpp>).
//!
//! What a folder's tensors are for is read off the model's plan, whose weights have GGUF's names and say where their
//! rows lie. What GGUF files keep in another form is put right here: the order of rows and heads, what is fused, what
//! is transposed.

use std::collections::{HashMap, HashSet};

use anyhow::{Context, Result, bail, ensure};
use checkpoint::Checkpoint;
use model::names::Names;
use model::plan::{Plan, Read, Source, WeightDecl};
use quant::WeightType;

use super::recipe::{Order, Recipe, Segment, Transposed};
use crate::quantize::mix;
use crate::quantize::source::Tensor;

/// Tensors and how they are made.
pub type Recipes = Vec<(Tensor, Recipe)>;

/// What the layouts depend on.
pub struct Shape {
    pub arch: &'static str,
    pub n_head: usize,
    /// Heads of k and of v of delta nets, and their widths.
    pub delta: Option<Delta>,
    /// Factor on normalized heads of q, where those of q and k have norms without weights.
    pub qk_scale: Option<f32>,
    /// Factors of folders that files have in their matrices.
    pub scales: Vec<Scaled>,
}

/// Factors on rows of the tensors of this name in every layer: each up to a row, which it excludes.
pub struct Scaled {
    pub stem: &'static str,
    pub rows: Vec<(usize, f32)>,
}

/// Heads of a delta net.
#[derive(Clone, Copy)]
pub struct Delta {
    pub n_k: usize,
    pub n_v: usize,
    pub d_k: usize,
    pub d_v: usize,
}

/// Finds tensors of the folder by name.
pub struct Finder<'a> {
    checkpoint: &'a Checkpoint,
    by_name: HashMap<&'a str, usize>,
}

impl<'a> Finder<'a> {
    pub fn new(checkpoint: &'a Checkpoint) -> Self {
        let tensors = checkpoint.tensors().iter().enumerate().map(|(i, t)| (t.name.as_str(), i));
        Self { checkpoint, by_name: tensors.collect() }
    }

    pub fn find(&self, name: &str) -> Result<usize> {
        let found = self.by_name.get(name).copied();
        found.with_context(|| format!("failed to read {}: tensor {name} is missing", self.checkpoint.name()))
    }

    fn dtype(&self, from: usize) -> WeightType {
        self.checkpoint.tensors()[from].dtype
    }

    fn shape(&self, from: usize) -> &[usize] {
        &self.checkpoint.tensors()[from].shape
    }

    /// Returns whether the folder has the tensor in its own form: GPTQ's or AWQ's codes, 8-bit floats.
    fn is_repacked(&self, from: usize) -> bool {
        self.checkpoint.files()[self.checkpoint.tensors()[from].file].is_repacked()
    }

    /// Returns a tensor out of some segments, its type as the folder has it, where the new file may have that.
    pub fn tensor(
        &self,
        name: &str,
        shape: &[usize],
        unit: usize,
        segments: Vec<Segment>,
        read: Read,
    ) -> (Tensor, Recipe) {
        let origin = self.dtype(segments[0].from);
        let same = segments.iter().all(|segment| self.dtype(segment.from) == origin);
        let is_float = |t| matches!(t, WeightType::F32 | WeightType::F16 | WeightType::BF16);
        let is_matrix = mix::may_change(&mix::Tensor { name, shape, dtype: origin });
        let dtype = match origin {
            WeightType::MXFP4_PLANAR if same && is_matrix => WeightType::MXFP4,
            origin if same && is_matrix && is_float(origin) && read == Read::Plain => origin,
            _ => WeightType::F32,
        };
        let tensor = Tensor { name: name.into(), shape: shape.into(), dtype };
        // Unpacked to f32, of which bf16 holds nearly all.
        let origin = if self.is_repacked(segments[0].from) { WeightType::BF16 } else { origin };
        let recipe = Recipe {
            dtype,
            origin,
            unit,
            segments,
            rows: Order::Same,
            columns: Order::Same,
            transposed: None,
            read,
            scales: Vec::new(),
            constant: None,
        };
        (tensor, recipe.lay_out())
    }

    /// Returns the rows of a weight of the plan.
    pub fn weight(&self, decl: &WeightDecl, name: &str) -> Result<(Tensor, Recipe)> {
        let unit = decl.shape.last().copied().unwrap_or(1);
        let n_rows = decl.shape.iter().product::<usize>() / unit;
        let segments = match &decl.source {
            Source::Tensor(tensor) => vec![Segment::new(self.find(tensor)?, 0, 1, n_rows)],
            Source::Slabs(slabs) => {
                let n = n_rows / slabs.len();
                let segment =
                    |slab: &model::plan::Slab| Ok(Segment::new(self.find(&slab.tensor)?, slab.first_row, 1, n));
                slabs.iter().map(segment).collect::<Result<_>>()?
            }
        };
        Ok(self.tensor(name, &decl.shape, unit, segments, decl.read))
    }
}

/// Architectures whose GGUF files have the pairs of a rotary embedding side by side, and their folders half a head
/// apart.
const PAIRED: &[&str] =
    &["llama", "arcee", "mistral3", "smollm3", "granite", "granitemoe", "granitehybrid", "muse-glimmer"];

/// Architectures with Mamba-2, whose vectors have a second axis in GGUF files.
const MAMBA: &[&str] = &["granitehybrid", "nemotron_h", "nemotron_h_moe", "falcon-h1"];

/// Returns the tensors of a model by its plan.
///
/// # Errors
/// The folder has a form that GGUF files of the architecture have not.
pub fn of_plan(checkpoint: &Checkpoint, plan: &Plan, shape: &Shape) -> Result<Recipes> {
    let finder = Finder::new(checkpoint);
    let mut out = Recipes::new();
    let by_name: HashMap<&str, &WeightDecl> = plan.weights.iter().map(|decl| (decl.name.as_str(), decl)).collect();
    for decl in &plan.weights {
        let (layer, rest) = match decl.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((layer, rest)) => (format!("blk.{layer}."), rest),
            None => (String::new(), decl.name.as_str()),
        };
        let (stem, kind) = rest.split_once('.').unwrap_or((rest, ""));
        let plain = || finder.weight(decl, &decl.name);
        match (shape.arch, stem) {
            (arch, "attn_q" | "attn_k") if PAIRED.contains(&arch) => {
                let (tensor, recipe) = plain()?;
                let n_rows = decl.shape[0];
                let n_head = match stem {
                    "attn_q" => shape.n_head,
                    _ => by_name.get(format!("{layer}attn_q.weight").as_str()).map_or(1, |q| {
                        // Heads of k are as wide as those of q.
                        (n_rows * shape.n_head).checked_div(q.shape[0]).unwrap_or(1)
                    }),
                };
                ensure!(
                    n_head > 0 && n_rows.is_multiple_of(2 * n_head),
                    "failed to convert tensor {}: its rows are no heads",
                    decl.name
                );
                let d_head = n_rows / n_head;
                out.push(reordered(tensor, recipe, kind, Order::Pairs { d_head }));
                if let Some(scale) = shape.qk_scale {
                    // q and k are normalized without weights; readers of GGUF find the scale of q in them.
                    let w = if stem == "attn_q" { scale } else { 1.0 };
                    out.push(constant(&format!("{layer}{stem}_norm.weight"), vec![w; d_head]));
                }
            }
            ("qwen3next" | "qwen35" | "qwen35moe" | "glm4moe" | "seed_oss", "ffn_norm") => {
                out.push(finder.weight(decl, &format!("{layer}post_attention_norm.weight"))?);
            }
            (arch, "ssm_a" | "ssm_d" | "ssm_norm") if MAMBA.contains(&arch) => {
                let (mut tensor, recipe) = plain()?;
                match stem {
                    "ssm_norm" => {
                        tensor.shape = vec![1; 2 - decl.shape.len()].into_iter().chain(decl.shape.clone()).collect()
                    }
                    _ => tensor.shape = vec![decl.shape[0], 1],
                }
                out.push((tensor, recipe));
            }
            ("kimi-linear" | "bailingmoe3", "ssm_a" | "ssm_conv1d_q" | "ssm_conv1d_k" | "ssm_conv1d_v") => {
                let (mut tensor, recipe) = plain()?;
                tensor.shape.insert(1, 1);
                out.push((tensor, recipe));
            }
            ("falcon-h1", "ffn_norm") => out.push(finder.weight(decl, &format!("{layer}ffn_norm"))?),
            // What llama.cpp calls it, after the layers as it is.
            ("lfm2" | "lfm2moe", "output_norm") => out.push(finder.weight(decl, "token_embd_norm.weight")?),
            ("hy_v3", "exp_probs_b") => out.push(finder.weight(decl, &format!("{layer}exp_probs_b"))?),
            ("qwen3next", "ssm_in") => out.extend(unmixed(&finder, decl, &layer, delta(shape)?)?),
            ("qwen35" | "qwen35moe", _) => {
                let (tensor, recipe) = plain()?;
                let order = |first: usize, width: usize| {
                    let Delta { n_k, n_v, .. } = delta(shape)?;
                    Ok::<_, anyhow::Error>(Order::Tiled { first, n: n_k, per: n_v / n_k, width })
                };
                match stem {
                    "ssm_in" | "ssm_ba" => {
                        bail!("failed to convert tensor {}: GGUF's {} has no such matrix", decl.name, shape.arch)
                    }
                    "attn_qkv" | "ssm_conv1d" => {
                        let Delta { n_k, d_k, d_v, .. } = delta(shape)?;
                        out.push(reordered(tensor, recipe, kind, order(2 * n_k * d_k, d_v)?));
                    }
                    "attn_gate" => out.push(reordered(tensor, recipe, kind, order(0, delta(shape)?.d_v)?)),
                    "ssm_alpha" | "ssm_beta" => out.push(reordered(tensor, recipe, kind, order(0, 1)?)),
                    "ssm_a" | "ssm_dt" => out.push(reordered(tensor, recipe, "bias", order(0, 1)?)),
                    "ssm_out" => {
                        let columns = order(0, delta(shape)?.d_v)?;
                        // Values of a block cannot move by themselves.
                        let dtype = if tensor.dtype.block_len() > 1 { WeightType::F32 } else { tensor.dtype };
                        out.push((Tensor { dtype, ..tensor }, Recipe { columns, dtype, ..recipe }));
                    }
                    _ => out.push((tensor, recipe)),
                }
            }
            ("deepseek2" | "deepseek32" | "glm-dsa" | "mistral4" | "kimi-linear" | "bailingmoe3", "attn_kv_b") => {
                let &[n_head, rows, d_latent] = decl.shape.as_slice() else { bail!("{} is no stack", decl.name) };
                let is_k = decl.name.ends_with("[0/2]");
                let name = format!("{layer}{}.weight", if is_k { "attn_k_b" } else { "attn_v_b" });
                let (mut tensor, mut recipe) = finder.weight(decl, &name)?;
                if is_k {
                    tensor.shape = vec![n_head, d_latent, rows];
                    recipe.transposed = Some(Transposed { rows, first: 0, step: 1, n: d_latent });
                }
                out.push((tensor, recipe));
            }
            // All parts of one tensor, which stays one.
            (_, "attn_qkv") if kind.starts_with("weight[") => {
                let Source::Slabs(slabs) = &decl.source else { bail!("{} is no part of a tensor", decl.name) };
                if kind.starts_with("weight[0/") {
                    let from = finder.find(&slabs[0].tensor)?;
                    let shape = finder.shape(from).to_vec();
                    let &[n, k] = shape.as_slice() else { bail!("{} is no part of a matrix", decl.name) };
                    let rows = vec![Segment::new(from, 0, 1, n)];
                    out.push(finder.tensor(&format!("{layer}attn_qkv.weight"), &shape, k, rows, Read::Plain));
                }
            }
            ("gemma4", "ffn_gate_exps") | ("glm4" | "phi3", "ffn_gate") if kind == "weight" => {
                let (up, both) = match stem {
                    "ffn_gate" => ("ffn_up", "ffn_up"),
                    _ => ("ffn_up_exps", "ffn_gate_up_exps"),
                };
                let name = format!("{layer}{up}.weight");
                let up =
                    by_name.get(name.as_str()).with_context(|| format!("failed to convert {name}: it is missing"))?;
                let mut shape = decl.shape.clone();
                let [.., n, k] = shape.as_mut_slice() else { bail!("{} is no matrix", decl.name) };
                let (gate, up) = (each(finder.weight(decl, "")?.1, *n), each(finder.weight(up, "")?.1, *n));
                let segments = gate.into_iter().zip(up).flat_map(|(gate, up)| [gate, up]).collect();
                let k = *k;
                *n *= 2;
                out.push(finder.tensor(&format!("{layer}{both}.weight"), &shape, k, segments, Read::Plain));
            }
            ("gemma4", "ffn_up_exps") | ("glm4" | "phi3", "ffn_up") if kind == "weight" => {}
            _ => out.push(plain()?),
        }
    }
    for Scaled { stem, rows } in &shape.scales {
        for (tensor, recipe) in &mut out {
            let name = tensor.name.split_once("blk.").and_then(|(_, rest)| rest.split_once('.'));
            let name = name.map_or(tensor.name.as_str(), |(_, rest)| rest);
            if name.strip_suffix(".weight") == Some(stem) {
                (tensor.dtype, recipe.dtype, recipe.scales) = (WeightType::F32, WeightType::F32, rows.clone());
            }
        }
    }
    Ok(out)
}

/// Returns the matrices of a stack, a segment each.
fn each(recipe: Recipe, n: usize) -> Vec<Segment> {
    let of =
        |segment: Segment| (0..segment.n / n).map(move |i| Segment { row: segment.row + i * n, n, ..segment.clone() });
    recipe.segments.into_iter().flat_map(of).collect()
}

fn delta(shape: &Shape) -> Result<Delta> {
    shape.delta.context("failed to convert a delta net: the config has no heads for it")
}

/// Rows in another order; the numbers of a vector are rows of one.
fn reordered(tensor: Tensor, mut recipe: Recipe, kind: &str, rows: Order) -> (Tensor, Recipe) {
    if kind != "weight" {
        for segment in &mut recipe.segments {
            (segment.row, segment.n) = (segment.row * recipe.unit, segment.n * recipe.unit);
        }
        recipe.unit = 1;
    }
    (tensor, Recipe { rows, ..recipe }.lay_out())
}

/// Returns the rows of q, k, v and z of Qwen3-Next, which its folders keep head by head.
fn unmixed(finder: &Finder, decl: &WeightDecl, layer: &str, delta: Delta) -> Result<Recipes> {
    let Delta { n_k, n_v, d_k, d_v } = delta;
    let Source::Tensor(name) = &decl.source else { bail!("failed to convert tensor {}: it is in pieces", decl.name) };
    let (from, unit, wide) = (finder.find(name)?, decl.shape[1], n_v / n_k * d_v);
    let rows = |first: usize, n: usize| {
        (0..n_k).map(move |head| Segment::new(from, head * (2 * d_k + 2 * wide) + first, 1, n))
    };
    let qkv: Vec<Segment> = rows(0, d_k).chain(rows(d_k, d_k)).chain(rows(2 * d_k, wide)).collect();
    let z: Vec<Segment> = rows(2 * d_k + wide, wide).collect();
    let (n_qkv, n_z) = (n_k * (2 * d_k + wide), n_k * wide);
    Ok(vec![
        finder.tensor(&format!("{layer}attn_qkv.weight"), &[n_qkv, unit], unit, qkv, Read::Plain),
        finder.tensor(&format!("{layer}attn_gate.weight"), &[n_z, unit], unit, z, Read::Plain),
    ])
}

/// Tensors of gpt-oss by layer: GGUF's name, the folder's, and its axes.
const GPT_OSS: &[(&str, &str, usize)] = &[
    ("attn_norm.weight", "input_layernorm.weight", 1),
    ("post_attention_norm.weight", "post_attention_layernorm.weight", 1),
    ("attn_q.weight", "self_attn.q_proj.weight", 2),
    ("attn_q.bias", "self_attn.q_proj.bias", 1),
    ("attn_k.weight", "self_attn.k_proj.weight", 2),
    ("attn_k.bias", "self_attn.k_proj.bias", 1),
    ("attn_v.weight", "self_attn.v_proj.weight", 2),
    ("attn_v.bias", "self_attn.v_proj.bias", 1),
    ("attn_output.weight", "self_attn.o_proj.weight", 2),
    ("attn_output.bias", "self_attn.o_proj.bias", 1),
    ("attn_sinks.weight", "self_attn.sinks", 1),
    ("ffn_gate_inp.weight", "mlp.router.weight", 2),
    ("ffn_gate_inp.bias", "mlp.router.bias", 1),
    ("ffn_down_exps.bias", "mlp.experts.down_proj_bias", 2),
];

/// Returns whether a folder is gpt-oss in its original form, of which no plan can be made: gate and up interleaved row
/// by row.
pub fn is_interleaved(checkpoint: &Checkpoint) -> bool {
    checkpoint.tensors().iter().any(|t| t.name.ends_with("mlp.experts.gate_up_proj"))
}

/// Returns the tensors of gpt-oss in its original form, as published (MXFP4) or unpacked.
///
/// # Errors
/// A tensor is missing, has another shape, or is not known.
pub fn of_gpt_oss(checkpoint: &Checkpoint, n_layer: usize) -> Result<Recipes> {
    let finder = Finder::new(checkpoint);
    let mut out = Recipes::new();
    let mut used = HashSet::new();
    let mut plain = |gguf: &str, name: &str, n_axes: usize| {
        let from = finder.find(name)?;
        let shape = finder.shape(from).to_vec();
        ensure!(
            shape.len() == n_axes,
            "failed to convert tensor {name}: it has shape {shape:?}, expected {n_axes} axes"
        );
        used.insert(from);
        let unit = shape[n_axes - 1];
        let segments = vec![Segment::new(from, 0, 1, shape.iter().product::<usize>() / unit)];
        Ok::<_, anyhow::Error>(finder.tensor(gguf, &shape, unit, segments, Read::Plain))
    };
    out.push(plain("token_embd.weight", "model.embed_tokens.weight", 2)?);
    out.push(plain("output_norm.weight", "model.norm.weight", 1)?);
    if finder.by_name.contains_key("lm_head.weight") {
        out.push(plain("output.weight", "lm_head.weight", 2)?);
    }
    for layer in 0..n_layer {
        let (blk, theirs) = (format!("blk.{layer}."), format!("model.layers.{layer}."));
        for &(gguf, name, n_axes) in GPT_OSS {
            out.push(plain(&format!("{blk}{gguf}"), &format!("{theirs}{name}"), n_axes)?);
        }
    }
    for layer in 0..n_layer {
        let (blk, theirs) = (format!("blk.{layer}."), format!("model.layers.{layer}.mlp.experts."));
        for (name, gguf) in [("gate_up_proj", &["ffn_gate_exps", "ffn_up_exps"][..]), ("down_proj", &["ffn_down_exps"])]
        {
            let name = format!("{theirs}{name}");
            let from = finder.find(&name)?;
            used.insert(from);
            let &[n_expert, rows, columns] = finder.shape(from) else {
                bail!("failed to convert tensor {name}: it has shape {:?}, expected three axes", finder.shape(from));
            };
            let step = gguf.len();
            for (first, gguf) in gguf.iter().enumerate() {
                let gguf = format!("{blk}{gguf}.weight");
                // Packed experts are matrices as they are used, others are transposed.
                if finder.dtype(from).block_len() > 1 {
                    ensure!(rows.is_multiple_of(step), "failed to convert tensor {name}: {rows} rows are no pairs");
                    let n = rows / step;
                    let segment = |i: usize| Segment::new(from, i * rows + first, step, n);
                    let segments = (0..n_expert).map(segment).collect();
                    out.push(finder.tensor(&gguf, &[n_expert, n, columns], columns, segments, Read::Plain));
                } else {
                    ensure!(
                        columns.is_multiple_of(step),
                        "failed to convert tensor {name}: {columns} columns are no pairs"
                    );
                    let n = columns / step;
                    let all = vec![Segment::new(from, 0, 1, n_expert * rows)];
                    let (tensor, mut recipe) = finder.tensor(&gguf, &[n_expert, n, rows], columns, all, Read::Plain);
                    recipe.transposed = Some(Transposed { rows, first, step, n });
                    out.push((tensor, recipe));
                }
            }
        }
        let name = format!("{theirs}gate_up_proj_bias");
        let from = finder.find(&name)?;
        used.insert(from);
        let &[n_expert, both] = finder.shape(from) else { bail!("failed to convert tensor {name}: expected two axes") };
        ensure!(both.is_multiple_of(2), "failed to convert tensor {name}: {both} numbers are no pairs");
        for (first, gguf) in ["ffn_gate_exps", "ffn_up_exps"].into_iter().enumerate() {
            let segment = |i: usize| Segment::new(from, i * both + first, 2, both / 2);
            let segments = (0..n_expert).map(segment).collect();
            let gguf = format!("{blk}{gguf}.bias");
            out.push(finder.tensor(&gguf, &[n_expert, both / 2], 1, segments, Read::Plain));
        }
    }
    let is_unused = |(name, from): &(&&str, &usize)| !used.contains(*from) && !Names::is_other_modality(name);
    if let Some((name, _)) = finder.by_name.iter().find(is_unused) {
        bail!("failed to convert tensor {name}: gpt-oss has no use for it");
    }
    Ok(out)
}

/// Returns a vector that no tensor of the folder has.
pub fn constant(name: &str, values: Vec<f32>) -> (Tensor, Recipe) {
    let tensor = Tensor { name: name.into(), shape: vec![values.len()], dtype: WeightType::F32 };
    let recipe = Recipe {
        dtype: WeightType::F32,
        origin: WeightType::F32,
        unit: values.len(),
        segments: Vec::new(),
        rows: Order::Same,
        columns: Order::Same,
        transposed: None,
        read: Read::Plain,
        scales: Vec::new(),
        constant: Some(values),
    };
    (tensor, recipe)
}
