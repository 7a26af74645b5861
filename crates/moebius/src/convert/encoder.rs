//! The image encoder of a folder as an mmproj file: tensors and keys as llama.cpp's converter writes them with
//! `--mmproj` (`conversion/`, <https://github.com/ggml-org/llama.cpp>).
//!
//! The tensors are those of the encoder's plan, which has GGUF's names. Keys that only Moebius reads keep what the file
//! would lose otherwise: bounds of an image's size, and whether its tokens see each other.

use anyhow::{Context, Result, bail, ensure};
use checkpoint::{Checkpoint, Metadata, Value};
use engine::images::Processor;
use model::plan::{Read, Source, WeightDecl};
use model::vision::{self, PixelOrder, Positions, Vision};
use quant::WeightType;

use super::recipe::{Cache, Recipe, Segment, Transposed};
use super::weights::{Finder, Recipes};
use super::{Folder, name};
use crate::quantize::Target;
use crate::quantize::source::Tensor;

/// `vision.image_size` of Gemma 4, whose images have no fixed size: llama.cpp's number.
const ANY_SIZE: u32 = 224;

impl Folder {
    /// Takes an open folder; its image encoder becomes the file.
    ///
    /// # Errors
    /// It has no encoder that can be converted; the sentence says what it lacks.
    pub fn encoder(checkpoint: Checkpoint) -> Result<Folder> {
        let at = || format!("failed to convert the image encoder of {}", checkpoint.name());
        let text = model::build(&checkpoint)?;
        let (_, vision) = vision::open(&checkpoint, &text, None)?.with_context(|| format!("{}: it has none", at()))?;
        let (tensors, recipes) = tensors(&checkpoint, &vision)?.into_iter().unzip();
        let mut entries = vec![
            ("general.architecture".to_string(), Value::from("clip")),
            ("general.type".into(), "mmproj".into()),
            ("general.name".into(), name(&checkpoint).as_str().into()),
            ("clip.has_vision_encoder".into(), true.into()),
        ];
        entries.extend(Processor::open(&checkpoint, &vision, usize::MAX)?.keys(&checkpoint)?);
        entries.extend(keys(&checkpoint, &vision, text.d_model)?);
        let meta = Metadata::new(checkpoint.name(), entries)?;
        Ok(Folder { checkpoint, meta, tensors, recipes, cache: Cache::default() })
    }

    /// Returns the targets of an encoder's tensors in a file of a float type.
    ///
    /// # Errors
    /// The type is no float.
    pub fn encoder_targets(&self, of_file: WeightType) -> Result<Vec<Target>> {
        ensure!(
            of_file.block_len() == 1,
            "failed to convert the image encoder of {}: --type is {of_file}, expected F32, F16 or BF16",
            self.checkpoint.name()
        );
        let target = |tensor: &Tensor| {
            let is_vector = tensor.shape.len() < 2 || !tensor.name.ends_with(".weight");
            let dtype = match tensor.name.as_str() {
                name if name.starts_with("v.patch_embd.weight") && of_file == WeightType::F16 => of_file,
                name if is_vector || name.contains("_embd.") => WeightType::F32,
                _ => of_file,
            };
            Target { dtype, importance: None, is_normalised: false }
        };
        Ok(self.tensors.iter().map(target).collect())
    }
}

/// Layers of the encoder whose features are added in the text model, in the folder's order.
fn deepstack(checkpoint: &Checkpoint) -> Result<Vec<u32>> {
    Ok(checkpoint.meta().opt_u32s("vision_config.deepstack_visual_indexes")?.unwrap_or_default())
}

fn tensors(checkpoint: &Checkpoint, vision: &Vision) -> Result<Recipes> {
    let finder = Finder::new(checkpoint);
    let tapped = deepstack(checkpoint)?;
    let mut out = Recipes::new();
    for decl in &vision.encoder.weights {
        let plain = WeightDecl { read: Read::Plain, ..decl.clone() };
        if decl.name == "v.patch_embd.weight" {
            out.extend(patches(&finder, decl, vision)?);
            continue;
        }
        // Folders number them by their order, GGUF files by their layer.
        let renamed = decl.name.strip_prefix("v.deepstack.").and_then(|rest| {
            let (i, rest) = rest.split_once('.')?;
            Some(format!("v.deepstack.{}.{rest}", tapped.get(i.parse::<usize>().ok()?)?))
        });
        out.push(finder.weight(&plain, renamed.as_deref().unwrap_or(&decl.name))?);
    }
    let (Positions::Interpolated { table, .. } | Positions::ByAxis { table, .. }) = &vision.positions;
    let (mut tensor, recipe) = finder.weight(table, &table.name)?;
    if let Positions::ByAxis { n, .. } = vision.positions {
        tensor.shape = vec![2, n, table.shape[1]];
    }
    out.push((tensor, recipe));
    Ok(out)
}

/// Returns the matrix of patches as the convolutions of GGUF files, `[d, channel, y, x]`: one for each frame.
fn patches(finder: &Finder, decl: &WeightDecl, vision: &Vision) -> Result<Recipes> {
    let at = || format!("failed to convert tensor {}", decl.name);
    let Source::Tensor(from) = &decl.source else { bail!("{}: it is in pieces", at()) };
    let (from, d, side) = (finder.find(from)?, decl.shape[0], vision.patches.side);
    let (PixelOrder::Channels { n_frames } | PixelOrder::Pixels { n_frames }) = vision.patches.order;
    ensure!(n_frames <= 2, "{}: it takes {n_frames} frames, at most 2 are allowed", at());
    let (shape, plane) = ([d, 3, side, side], side * side);
    let of_frame = |frame: usize| {
        let name = ["v.patch_embd.weight", "v.patch_embd.weight.1"][frame];
        match vision.patches.order {
            PixelOrder::Channels { .. } => {
                let planes = vec![Segment::new(from, frame, n_frames, 3 * d)];
                finder.tensor(name, &shape, plane, planes, Read::Plain)
            }
            PixelOrder::Pixels { .. } => {
                let pixels = |row: usize| Segment::new(from, (row * n_frames + frame) * plane, 1, plane);
                let (tensor, recipe) = finder.tensor(name, &shape, 3, (0..d).map(pixels).collect(), Read::Plain);
                let transposed = Some(Transposed { rows: plane, first: 0, step: 1, n: 3 });
                (tensor, Recipe { transposed, ..recipe })
            }
        }
    };
    Ok((0..n_frames).map(of_frame).collect())
}

/// Returns the keys of an encoder, for a text model of width `d_model`.
fn keys(checkpoint: &Checkpoint, vision: &Vision, d_model: usize) -> Result<Vec<(String, Value)>> {
    let config = checkpoint.meta();
    let mut keys: Vec<(String, Value)> = Vec::new();
    let mut add = |key: &str, value: Value| keys.push((format!("clip.{key}"), value));
    let count = |name: &str| config.u32(&format!("vision_config.{name}"));
    let vision_f32 = |name: &str| config.opt_f32(&format!("vision_config.{name}"));
    let (merge, side) = (vision.patches.merge as u32, vision.patches.side as u32);
    add("vision.projection_dim", (d_model as u32).into());
    add("vision.patch_size", side.into());
    add("vision.embedding_length", count("hidden_size")?.into());
    add("vision.feed_forward_length", count("intermediate_size")?.into());
    match vision.positions {
        Positions::Interpolated { side: n, .. } => {
            let act = config.opt_str("vision_config.hidden_act")?;
            ensure!(
                act != Some("gelu"),
                "failed to convert {}: vision_config.hidden_act is gelu, expected its form by tanh, the one of GGUF \
                 files",
                checkpoint.name()
            );
            let n_layer = count("depth")?;
            let tapped = deepstack(checkpoint)?;
            let eps = config.opt_f32("text_config.rms_norm_eps")?.or(config.opt_f32("rms_norm_eps")?).unwrap_or(1e-6);
            add("projector_type", "qwen3vl_merger".into());
            add("use_gelu", true.into());
            add("vision.image_size", (n as u32 * side).into());
            add("vision.block_count", n_layer.into());
            add("vision.attention.head_count", count("num_heads")?.into());
            add("vision.attention.layer_norm_epsilon", eps.into());
            add("vision.spatial_merge_size", merge.into());
            add(
                "vision.is_deepstack_layers",
                (0..n_layer).map(|layer| tapped.contains(&layer)).collect::<Vec<_>>().into(),
            );
        }
        Positions::ByAxis { .. } => {
            let base = vision_f32("rope_parameters.rope_theta")?.unwrap_or(100.0);
            ensure!(
                base == 100.0,
                "failed to convert {}: vision_config.rope_parameters.rope_theta is {base}, expected 100, the one of \
                 GGUF files",
                checkpoint.name()
            );
            let n_head = count("num_attention_heads")?;
            add("vision.projector_type", "gemma4v".into());
            add("vision.image_size", ANY_SIZE.into());
            add("vision.block_count", count("num_hidden_layers")?.into());
            add("vision.attention.head_count", n_head.into());
            add("vision.attention.layer_norm_epsilon", vision_f32("rms_norm_eps")?.unwrap_or(1e-6).into());
            add("vision.projector.scale_factor", merge.into());
            let usual = count("hidden_size")?.checked_div(n_head);
            if let Some(d_head) = config.opt_u32("vision_config.head_dim")?.filter(|&d_head| Some(d_head) != usual) {
                add("vision.attention.head_dim", d_head.into());
            }
            add("vision.is_causal", (!vision.sees_image).into());
        }
    }
    Ok(keys)
}
