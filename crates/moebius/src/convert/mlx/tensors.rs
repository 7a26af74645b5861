//! The tensors of a folder that mlx-lm loads, out of those of a GGUF file: what each is called, in which order its rows
//! lie there, and what stands in one tensor here and in several there.

use std::collections::HashMap;

use anyhow::{Context, Result, bail, ensure};
use checkpoint::{Checkpoint, TensorInfo};
use model::plan::Read;
use quant::{Affine, PlanesBuf, WeightType};

use super::form::MlxForm;
use crate::convert::recipe::{Cache, Order, Recipe, Segment, Transposed};
use crate::convert::weights::Delta;
use crate::quantize::mix;

/// Values that are read at a time, in whole rows.
const PIECE: usize = 1 << 16;

/// A tensor of the folder.
pub struct Out {
    name: String,
    shape: Vec<usize>,
    dtype: WeightType,
    /// Values of a row.
    n_cols: usize,
    n_rows: usize,
    /// Rows of the tensor, so many of each in turn.
    parts: Vec<(Recipe, usize)>,
    stored: Stored,
}

/// How numbers are stored that GGUF files hold as they are used.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stored {
    Plain,
    /// Less the 1 that is added again.
    LessOne,
    /// As logarithms of their opposites.
    Log,
}

/// An entry of a safetensors header.
pub struct Entry {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub len: usize,
}

impl Stored {
    fn apply(self, values: &mut [f32]) {
        values.iter_mut().for_each(|v| match self {
            Self::Plain => {}
            Self::LessOne => *v -= 1.0,
            Self::Log => *v = (-*v).ln(),
        });
    }

    /// Returns the number as it is used.
    fn undone(self, value: f32) -> f32 {
        match self {
            Self::Plain => value,
            Self::LessOne => 1.0 + value,
            Self::Log => -value.exp(),
        }
    }

    /// Returns whether what is read back of `new` is `old`, but for what two libraries compute of a logarithm.
    fn holds(self, new: f32, old: f32) -> bool {
        let near = if self == Self::Log { 1e-6 * old.abs() } else { 0.0 };
        (self.undone(new) - old).abs() <= near
    }
}

impl Out {
    pub fn n_values(&self) -> usize {
        self.n_rows * self.n_cols
    }

    /// MLX's name for its type, where it is quantized.
    pub fn mode(&self) -> Option<&'static str> {
        match self.dtype {
            WeightType::Affine(_) => Some("affine"),
            WeightType::MXFP4_PLANAR => Some("mxfp4"),
            _ => None,
        }
    }

    /// Returns what it is in the file: one tensor, or its planes.
    pub fn entries(&self) -> Result<Vec<Entry>> {
        let each = self.dtype.plane_bytes(self.n_cols).context("groups do not divide its rows")?;
        let module = self.name.strip_suffix(".weight").unwrap_or(&self.name);
        let name = |kind: &str| format!("{module}.{kind}");
        let shape = |last: usize| [&self.shape[..self.shape.len() - 1], &[last]].concat();
        let plane = |kind: &str, dtype, last: usize, row: usize| Entry {
            name: name(kind),
            dtype,
            shape: shape(last),
            len: row * self.n_rows,
        };
        Ok(match self.dtype {
            WeightType::Affine(_) => vec![
                plane("weight", "U32", each.q / 4, each.q),
                plane("scales", "BF16", each.scales / 2, each.scales),
                plane("biases", "BF16", each.biases / 2, each.biases),
            ],
            WeightType::MXFP4_PLANAR => {
                vec![plane("weight", "U32", each.q / 4, each.q), plane("scales", "U8", each.scales, each.scales)]
            }
            dtype => {
                let dtype = match dtype {
                    WeightType::F32 => "F32",
                    WeightType::F16 => "F16",
                    _ => "BF16",
                };
                let (name, shape) = (self.name.clone(), self.shape.clone());
                vec![Entry { name, dtype, shape, len: each.q * self.n_rows }]
            }
        })
    }

    /// Calls `take` with the rows as they are stored, some at a time.
    fn rows(&self, checkpoint: &Checkpoint, mut take: impl FnMut(&[f32]) -> Result<()>) -> Result<()> {
        let (cache, mut bytes) = (Cache::default(), Vec::new());
        let turn: usize = self.parts.iter().map(|(_, n)| n).sum();
        for first in (0..self.n_rows).step_by(turn) {
            for (id, (recipe, n)) in self.parts.iter().enumerate() {
                let start = first / turn * n;
                let most = (PIECE / self.n_cols).max(1);
                for from in (start..start + n).step_by(most) {
                    let to = (from + most).min(start + n);
                    recipe.read(checkpoint, &cache, id, from * self.n_cols..to * self.n_cols, &mut bytes)?;
                    let mut values: Vec<f32> =
                        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap_or_default())).collect();
                    self.stored.apply(&mut values);
                    if let Some(i) = values.iter().position(|v| !v.is_finite()) {
                        bail!(
                            "failed to convert to tensor {}: value {} of a row is {}",
                            self.name,
                            i % self.n_cols,
                            values[i]
                        );
                    }
                    take(&values)?;
                }
            }
        }
        Ok(())
    }

    /// Writes its planes one after the other; `wrote` hears how many values are done.
    pub fn write(
        &self,
        checkpoint: &Checkpoint,
        out: &mut impl std::io::Write,
        mut wrote: impl FnMut(u64),
    ) -> Result<()> {
        let planes = self.dtype.plane_bytes(self.n_cols).context("groups do not divide its rows")?;
        let (mut row, mut back) = (PlanesBuf::new(planes), vec![0.0; self.n_cols]);
        let (mut scales, mut biases) = (Vec::new(), Vec::new());
        self.rows(checkpoint, |values| {
            for values in values.chunks_exact(self.n_cols) {
                quant::encode_row(self.dtype, values, row.get_mut());
                if self.dtype == WeightType::MXFP4_PLANAR {
                    quant::decode_row(self.dtype, row.get(), &mut back);
                    ensure!(back == values, "failed to convert to tensor {}: a row is not what MXFP4 holds", self.name);
                }
                out.write_all(&row.q)?;
                scales.extend_from_slice(&row.scales);
                biases.extend_from_slice(&row.biases);
            }
            wrote(values.len() as u64);
            Ok(())
        })?;
        out.write_all(&scales)?;
        Ok(out.write_all(&biases)?)
    }

    /// Returns the smallest float type that holds a vector, or a router, as it is.
    fn exact(&self, checkpoint: &Checkpoint) -> Result<WeightType> {
        let mut fits = true;
        self.rows(checkpoint, |values| {
            let mut short = vec![0; 2 * values.len()];
            quant::encode_row(WeightType::BF16, values, short.as_mut_slice());
            let mut back = vec![0.0; values.len()];
            quant::decode_row(WeightType::BF16, short.as_slice(), &mut back);
            fits &= back.iter().zip(values).all(|(&new, &old)| self.stored.holds(new, self.stored.undone(old)));
            Ok(())
        })?;
        Ok(if fits { WeightType::BF16 } else { WeightType::F32 })
    }
}

/// Numbers that orders of rows depend on.
pub struct Shape {
    pub n_layer: usize,
    pub n_head: usize,
    pub n_kv: usize,
    /// Heads of k and v of delta nets and their widths.
    pub delta: Option<Delta>,
    /// Widths of a head of latent attention: the key's part without rotation, the value.
    pub latent: Option<(usize, usize)>,
}

/// Makes the tensors of a folder.
struct Maker<'a> {
    checkpoint: &'a Checkpoint,
    form: &'static MlxForm,
    shape: &'a Shape,
    affine: Option<Affine>,
    by_name: HashMap<&'a str, usize>,
    outs: Vec<Out>,
}

/// Returns the tensors of the folder, in the file's order.
///
/// # Errors
/// A tensor has no place there, or rows that are no heads.
pub fn all(checkpoint: &Checkpoint, form: &'static MlxForm, shape: &Shape, affine: Option<Affine>) -> Result<Vec<Out>> {
    let by_name = checkpoint.tensors().iter().enumerate().map(|(i, t)| (t.name.as_str(), i)).collect();
    let mut maker = Maker { checkpoint, form, shape, affine, by_name, outs: Vec::new() };
    for (from, info) in checkpoint.tensors().iter().enumerate() {
        maker.tensor(from, info)?;
    }
    if !form.is_tied && checkpoint.tensor("output.weight").is_none() {
        let from = maker.find("token_embd.weight")?;
        let recipe = maker.recipe(from);
        maker.plain("lm_head.weight".into(), from, recipe)?;
    }
    Ok(maker.outs)
}

impl Maker<'_> {
    fn find(&self, name: &str) -> Result<usize> {
        let found = self.by_name.get(name).copied();
        found.with_context(|| format!("failed to convert tensor {name}: it is missing"))
    }

    fn tensor(&mut self, from: usize, info: &TensorInfo) -> Result<()> {
        let recipe = self.recipe(from);
        let Some((layer, rest)) = info.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
            let name = match info.name.as_str() {
                "token_embd.weight" => "model.embed_tokens.weight",
                "output_norm.weight" => "model.norm.weight",
                "output.weight" => "lm_head.weight",
                // Its numbers are in the config.
                "rope_freqs.weight" => return Ok(()),
                other => {
                    bail!("failed to convert tensor {other}: mlx-lm's {} has no such tensor", self.form.model_type)
                }
            };
            return self.plain(name.into(), from, recipe);
        };
        // Layers that predict further tokens are left out.
        if layer.parse::<usize>().is_ok_and(|layer| layer >= self.shape.n_layer) {
            return Ok(());
        }
        let within = |name: &str| format!("model.layers.{layer}.{name}");
        match (self.form.model_type, rest) {
            (_, "ffn_gate_up_exps.weight") => {
                for (i, part) in ["ffn_gate_exps.weight", "ffn_up_exps.weight"].into_iter().enumerate() {
                    let name = self.name(&info.name, part)?;
                    self.half(within(&name), from, i)?;
                }
                return Ok(());
            }
            ("deepseek_v3", "attn_k_b.weight") => return self.plain(within("self_attn.embed_q.weight"), from, recipe),
            ("deepseek_v3", "attn_v_b.weight") => {
                return self.plain(within("self_attn.unembed_out.weight"), from, recipe);
            }
            ("deepseek_v3", "attn_kv_b.weight") => return self.both_of_latent(from, &within),
            ("deepseek_v2", "attn_k_b.weight") => {
                let v = self.find(&format!("blk.{layer}.attn_v_b.weight"))?;
                return self.one_of_latent(within("self_attn.kv_b_proj.weight"), from, v);
            }
            ("deepseek_v2", "attn_v_b.weight") => return Ok(()),
            ("deepseek_v2", "attn_kv_b.weight") => {
                return self.plain(within("self_attn.kv_b_proj.weight"), from, recipe);
            }
            ("qwen3_next", "attn_qkv.weight") => {
                let z = self.find(&format!("blk.{layer}.attn_gate.weight"))?;
                return self.mixed(within("linear_attn.in_proj_qkvz.weight"), from, z);
            }
            ("qwen3_next", "attn_gate.weight") => return Ok(()),
            _ => {}
        }
        let name = within(&self.name(&info.name, rest)?);
        let recipe = self.ordered(from, rest, recipe)?;
        self.plain(name, from, recipe)
    }

    /// mlx-lm's name inside a layer.
    fn name(&self, tensor: &str, rest: &str) -> Result<String> {
        let name = self.form.name(rest);
        name.with_context(|| {
            format!("failed to convert tensor {tensor}: mlx-lm's {} has no such tensor", self.form.model_type)
        })
    }

    fn info(&self, from: usize) -> &TensorInfo {
        &self.checkpoint.tensors()[from]
    }

    /// Returns all rows as they lie.
    fn recipe(&self, from: usize) -> Recipe {
        let shape = &self.info(from).shape;
        let unit = shape.last().copied().unwrap_or(1);
        let n = shape.iter().product::<usize>() / unit;
        self.segments(unit, vec![Segment::new(from, 0, 1, n)])
    }

    fn segments(&self, unit: usize, segments: Vec<Segment>) -> Recipe {
        let recipe = Recipe {
            dtype: WeightType::F32,
            origin: WeightType::F32,
            unit,
            segments,
            rows: Order::Same,
            columns: Order::Same,
            transposed: None,
            read: Read::Plain,
            scales: Vec::new(),
            constant: None,
        };
        recipe.lay_out()
    }

    /// Returns the same with the heads' rows and columns as folders have them.
    fn ordered(&self, from: usize, rest: &str, mut recipe: Recipe) -> Result<Recipe> {
        let (info, form) = (self.info(from), self.form.model_type);
        let (stem, kind) = rest.rsplit_once('.').unwrap_or((rest, "vector"));
        let is_llama = ["llama", "mistral", "mixtral"].contains(&form);
        let order = match (stem, self.shape.delta) {
            ("attn_q" | "attn_k", _) if is_llama => {
                let n_head = if stem == "attn_q" { self.shape.n_head } else { self.shape.n_kv };
                let n = info.shape[0];
                ensure!(
                    n_head > 0 && n.is_multiple_of(2 * n_head),
                    "failed to convert tensor {}: its rows are no heads",
                    info.name
                );
                Order::Unpaired { d_head: n / n_head }
            }
            (_, Some(Delta { n_k, n_v, d_k, d_v })) if form.starts_with("qwen3_5") => {
                let tiled = |first: usize, width: usize| Order::Tiled { first, n: n_v / n_k, per: n_k, width };
                match stem {
                    "attn_qkv" | "ssm_conv1d" => tiled(2 * n_k * d_k, d_v),
                    "attn_gate" => tiled(0, d_v),
                    "ssm_alpha" | "ssm_beta" | "ssm_a" | "ssm_dt" => tiled(0, 1),
                    "ssm_out" => {
                        recipe.columns = tiled(0, d_v);
                        Order::Same
                    }
                    _ => Order::Same,
                }
            }
            _ => Order::Same,
        };
        if order != Order::Same && kind != "weight" {
            // The numbers of a vector are rows of one.
            recipe = self.segments(1, vec![Segment::new(from, 0, 1, info.shape.iter().product())]);
        }
        Ok(Recipe { rows: order, ..recipe })
    }

    /// A tensor by one recipe.
    fn plain(&mut self, name: String, from: usize, recipe: Recipe) -> Result<()> {
        let info = self.info(from);
        let (gguf, shape) = (info.name.clone(), info.shape.clone());
        let shape = match gguf.rsplit('.').nth(1) {
            // A convolution has an axis for the channels of a group.
            Some("ssm_conv1d") => [&shape[..], &[1]].concat(),
            Some("ffn_gate_inp_shexp") if shape.len() == 1 => vec![1, shape[0]],
            _ => shape,
        };
        let n = recipe.segments.iter().map(|segment| segment.n).sum();
        self.push(name, from, shape, vec![(recipe, n)])
    }

    /// Half of the rows of each expert.
    fn half(&mut self, name: String, from: usize, i: usize) -> Result<()> {
        let info = self.info(from);
        let &[n_expert, both, k] = info.shape.as_slice() else {
            bail!("failed to convert tensor {}: it is not a stack", info.name)
        };
        ensure!(both.is_multiple_of(2), "failed to convert tensor {}: {both} rows are no pairs", info.name);
        let n = both / 2;
        let segments = (0..n_expert).map(|expert| Segment::new(from, expert * both + i * n, 1, n)).collect();
        let recipe = self.segments(k, segments);
        self.push(name, from, vec![n_expert, n, k], vec![(recipe, n_expert * n)])
    }

    fn latent(&self) -> Result<(usize, usize)> {
        self.shape.latent.context("failed to convert latent attention: the file says no widths of heads")
    }

    /// The two tensors of latent attention out of one, whose heads have keys above values.
    fn both_of_latent(&mut self, from: usize, within: &dyn Fn(&str) -> String) -> Result<()> {
        let ((d_nope, d_v), n_head) = (self.latent()?, self.shape.n_head);
        let d_latent = self.info(from).shape.last().copied().unwrap_or(1);
        let rows = |first: usize, n: usize| {
            (0..n_head).map(move |head| Segment::new(from, head * (d_nope + d_v) + first, 1, n)).collect()
        };
        let mut k = self.segments(d_latent, rows(0, d_nope));
        k.transposed = Some(Transposed { rows: d_nope, first: 0, step: 1, n: d_latent });
        let name = within("self_attn.embed_q.weight");
        self.push(name, from, vec![n_head, d_latent, d_nope], vec![(k, n_head * d_latent)])?;
        let v = self.segments(d_latent, rows(d_nope, d_v));
        let name = within("self_attn.unembed_out.weight");
        self.push(name, from, vec![n_head, d_v, d_latent], vec![(v, n_head * d_v)])
    }

    /// One tensor out of the two of latent attention.
    fn one_of_latent(&mut self, name: String, k: usize, v: usize) -> Result<()> {
        let ((d_nope, d_v), n_head) = (self.latent()?, self.shape.n_head);
        let d_latent = self.info(v).shape.last().copied().unwrap_or(1);
        let mut keys = self.segments(d_nope, vec![Segment::new(k, 0, 1, n_head * d_latent)]);
        keys.transposed = Some(Transposed { rows: d_latent, first: 0, step: 1, n: d_nope });
        let values = self.segments(d_latent, vec![Segment::new(v, 0, 1, n_head * d_v)]);
        self.push(name, k, vec![n_head * (d_nope + d_v), d_latent], vec![(keys, d_nope), (values, d_v)])
    }

    /// The rows of q, k, v and z, head by head of k.
    fn mixed(&mut self, name: String, qkv: usize, z: usize) -> Result<()> {
        let Delta { n_k, n_v, d_k, d_v } =
            self.shape.delta.context("failed to convert a delta net: the file has no heads")?;
        let (wide, d_model) = (n_v / n_k * d_v, self.info(qkv).shape.last().copied().unwrap_or(1));
        let head = |head: usize| {
            [
                Segment::new(qkv, head * d_k, 1, d_k),
                Segment::new(qkv, (n_k + head) * d_k, 1, d_k),
                Segment::new(qkv, 2 * n_k * d_k + head * wide, 1, wide),
                Segment::new(z, head * wide, 1, wide),
            ]
        };
        let recipe = self.segments(d_model, (0..n_k).flat_map(head).collect());
        let n_rows = n_k * (2 * d_k + 2 * wide);
        self.push(name, qkv, vec![n_rows, d_model], vec![(recipe, n_rows)])
    }

    /// A tensor, its type by its shape and by the file's.
    fn push(&mut self, name: String, from: usize, shape: Vec<usize>, parts: Vec<(Recipe, usize)>) -> Result<()> {
        let info = self.info(from);
        let n_cols = parts[0].0.transposed.map_or(parts[0].0.unit, |t| t.rows);
        let stored = match self.form.model_type {
            "gemma3_text" if name.ends_with("norm.weight") => Stored::LessOne,
            _ if name.ends_with("A_log") => Stored::Log,
            _ => Stored::Plain,
        };
        let is_matrix = mix::may_change(&mix::Tensor { name: &info.name, shape: &shape, dtype: info.dtype });
        let dtype = match self.affine {
            Some(affine) if is_matrix && n_cols.is_multiple_of(affine.group()) => WeightType::Affine(affine),
            None if is_matrix && info.dtype == WeightType::MXFP4 => WeightType::MXFP4_PLANAR,
            _ if is_matrix && info.dtype == WeightType::F16 => WeightType::F16,
            _ => WeightType::BF16,
        };
        let n_rows = shape.iter().product::<usize>() / n_cols;
        let mut out = Out { name, shape, dtype, n_cols, n_rows, parts, stored };
        if !is_matrix {
            out.dtype = out.exact(self.checkpoint)?;
        }
        self.outs.push(out);
        Ok(())
    }
}
