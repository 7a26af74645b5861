//! Models that see: an encoder turns the patches of an image into features, rows that stand for embeddings in the text
//! model's plan.
//!
//! An encoder is a separate plan, one file a family, whose steps are whole images. [`Vision`] also says how an image
//! is cut into the rows that the encoder is given, and what tokens of images are in the text model. Reads no pixel.

mod gemma4;
mod qwen;

use checkpoint::{Checkpoint, Metadata};

use crate::Error;
use crate::names::{Found, Names};
use crate::plan::{Buf, InputMode, N_AXES, Op, Plan, Read, ValidPlan, WeightDecl};

/// What a model that sees has besides its text model.
#[derive(Clone, Debug)]
pub struct Vision {
    /// From rows of patches to features: `logits` are rows of [`Vision::d_features`] numbers.
    pub encoder: ValidPlan,
    /// What a patch is.
    pub patches: Patches,
    /// The learned positions that are added to patches.
    pub positions: Positions,
    /// How images are scaled to a size that patches divide.
    pub sizing: Sizing,
    /// Mean and standard deviation of a channel's numbers, 0 to 1, where neither file nor folder says it.
    pub mean_std: [f32; 2],
    /// What a number `v` of an image, 0 to 1, becomes last: `v · 2 - 1` where set.
    pub is_centered: bool,
    /// Where features are in a prompt.
    pub tokens: ImageTokens,
    /// Axes of a feature's position in the text model.
    pub places: Places,
    /// Whether a feature's token sees the later ones of its image ([`Plan::sees_spans`]).
    pub sees_image: bool,
}

/// Patches of an image, in the order that an encoder is given: those of a feature one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patches {
    /// Pixels of a side.
    pub side: usize,
    /// Patches of a side of a feature.
    pub merge: usize,
    /// Order of a patch's numbers.
    pub order: PixelOrder,
    /// Width of the learned positions, which follow a patch's numbers in its row.
    pub d_position: usize,
}

/// Order of the numbers of a patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PixelOrder {
    /// `[channel, frame, y, x]`: an image is a film of this many equal frames.
    Channels {
        /// Frames.
        n_frames: usize,
    },
    /// `[y, x, channel]`, as often as there are frames.
    Pixels {
        /// Frames.
        n_frames: usize,
    },
}

/// Learned positions of patches.
#[derive(Clone, Debug, PartialEq)]
pub enum Positions {
    /// A square of rows, interpolated between its corners to the image's grid.
    Interpolated {
        /// `[side · side, d_position]`.
        table: WeightDecl,
        /// Rows of a side.
        side: usize,
    },
    /// The sum of a row for x and a row for y.
    ByAxis {
        /// `[2 · n, d_position]`: the rows for x, then those for y.
        table: WeightDecl,
        /// Rows of an axis.
        n: usize,
    },
}

/// Sizes that images are scaled to; both sides are multiples of a feature's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizing {
    /// The nearest such size with an area in bounds (Qwen2-VL).
    Area {
        /// Least number of pixels.
        min: usize,
        /// Maximum number of pixels.
        max: usize,
    },
    /// The largest such size that has no more than this many features (Gemma 4).
    Features {
        /// Maximum number of features.
        max: usize,
    },
}

/// Tokens of images in a prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageTokens {
    /// The token in whose place each feature is, by its id where the file says it.
    pub feature: Option<u32>,
    /// The same by its text, for files that have no id.
    pub feature_text: &'static str,
    /// Texts of the tokens in front of an image and after it.
    pub around: [&'static str; 2],
    /// The ids of these, where the file says them.
    pub around_ids: [Option<u32>; 2],
    /// The token that stands for a feature where a model looks up more than its embedding.
    pub filler: Option<u32>,
}

/// Positions of an image's features in rotary embeddings of the text model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Places {
    /// Time, height and width are axes; what follows the image has the position after its longer side (arXiv
    /// 2409.12191).
    Grid,
    /// One after the other, as text.
    Line,
}

impl Vision {
    /// Width of the features of an image: those that stand for embeddings, and those added in layers.
    pub fn d_features(&self) -> usize {
        self.encoder.n_vocab
    }

    /// Numbers of a patch.
    pub fn n_pixels(&self) -> usize {
        let Patches { side, order, .. } = self.patches;
        let (PixelOrder::Channels { n_frames } | PixelOrder::Pixels { n_frames }) = order;
        3 * n_frames * side * side
    }
}

/// Returns the text model's plan with places for features, and the encoder. `None` where the model has no encoder, in
/// its own files or in `encoder`, a file of an encoder alone.
///
/// # Errors
/// When keys or tensors of the encoder are missing, absurd or contradict others, or its family is not supported.
pub fn open(
    text: &Checkpoint,
    plan: &ValidPlan,
    encoder: Option<&Checkpoint>,
) -> Result<Option<(ValidPlan, Vision)>, Error> {
    let source = encoder.unwrap_or(text);
    if !source.tensors().iter().any(|info| Names::is_of_encoder(&info.name)) {
        return Ok(None);
    }
    let keys = Keys { meta: source.meta(), file: source.name(), is_folder: source.meta().get("model_type").is_some() };
    let (vision, sections) = match plan.arch.as_str() {
        "qwen3vl" | "qwen3vlmoe" | "qwen35" | "qwen35moe" => {
            let vision = qwen::build(source, &keys, text, plan)?;
            (vision, Some(sections(text, plan)?))
        }
        "gemma4" => (gemma4::build(source, &keys, text, plan)?, None),
        _ => return Ok(None),
    };
    let seeing = seeing(plan, vision.d_features(), sections)?;
    Ok(Some((seeing, vision)))
}

/// Returns the plan of a text model that is given features: they replace the embeddings of their tokens, and what is
/// further in their rows is added after the first layers, `d_model` numbers each.
fn seeing(plan: &ValidPlan, d_features: usize, sections: Option<[usize; N_AXES]>) -> Result<ValidPlan, Error> {
    let mut plan = plan.clone().into_plan();
    let d = plan.d_model;
    let wrong = |what: &str| Error::Plan(format!("features of {d_features} numbers for {d}: {what}"));
    if d_features == 0 || !d_features.is_multiple_of(d) {
        return Err(wrong("the encoder is another model's"));
    }
    let embed = |op: &Op| matches!(*op, Op::Embed { out, .. } if plan.buf(out).width == d);
    let at = plan.ops.iter().position(embed).ok_or_else(|| wrong("no op embeds tokens"))?;
    let Op::Embed { out: x, .. } = plan.ops[at] else { return Err(wrong("no op embeds tokens")) };
    insert(&mut plan, at + 1, x, 0, InputMode::Replace);
    for layer in 0..d_features / d - 1 {
        let last = plan.layers.iter().rposition(|&of| of == Some(layer as u32));
        let at = last.ok_or_else(|| wrong("fewer layers than features to add"))? + 1;
        insert(&mut plan, at, x, (layer + 1) * d, InputMode::Add);
    }
    if let Some(sections) = sections {
        for rope in &mut plan.ropes {
            rope.axes = interleaved(rope.inv_freq.len(), sections);
        }
    }
    ValidPlan::new(plan)
}

fn insert(plan: &mut Plan, at: usize, x: Buf, first: usize, mode: InputMode) {
    let layer = plan.layers[at - 1];
    plan.ops.insert(at, Op::Input { x, first, mode });
    plan.layers.insert(at, layer);
}

/// Axes of `n` pairs, alternating: height and width for as many pairs as their sections have, and time for the rest:
/// the interleaved form of Qwen3-VL (`apply_interleaved_mrope` in its code).
fn interleaved(n: usize, [_, height, width]: [usize; N_AXES]) -> Vec<u8> {
    let axis = |i: usize| match i % 3 {
        1 if i < 3 * height => 1,
        2 if i < 3 * width => 2,
        _ => 0,
    };
    (0..n).map(axis).collect()
}

/// Pairs of a text model's rotary embedding for time, height and width.
fn sections(text: &Checkpoint, plan: &Plan) -> Result<[usize; N_AXES], Error> {
    const FOLDER: [&str; 4] = [
        "text_config.rope_parameters.mrope_section",
        "text_config.rope_scaling.mrope_section",
        "rope_parameters.mrope_section",
        "rope_scaling.mrope_section",
    ];
    let gguf = format!("{}.rope.dimension_sections", plan.arch);
    let name = std::iter::once(gguf.as_str()).chain(FOLDER).find(|name| text.meta().get(name).is_some());
    let n_pairs = plan.ropes.first().map_or(0, |rope| rope.inv_freq.len());
    let error = |key: &str, what: String| Error::Key { file: text.name().into(), key: key.into(), what };
    let Some(name) = name else {
        return Err(error(&gguf, "is missing: images have positions on several axes".into()));
    };
    let found = text.meta().u32s(name)?;
    match *found.as_slice() {
        [t, h, w] | [t, h, w, 0] if [t, h, w].iter().all(|&n| n as usize <= n_pairs) => {
            Ok([t, h, w].map(|n| n as usize))
        }
        _ => Err(error(name, format!("is {found:?}, expected three counts of up to {n_pairs} pairs"))),
    }
}

/// Keys of an encoder: `clip.vision.` in GGUF files (llama.cpp's `clip-impl.h`), `vision_config.` in folders.
struct Keys<'a> {
    meta: &'a Metadata,
    file: &'a str,
    is_folder: bool,
}

impl Keys<'_> {
    fn name(&self, gguf: &str, folder: &str) -> String {
        if self.is_folder { format!("vision_config.{folder}") } else { format!("clip.{gguf}") }
    }

    fn error(&self, key: &str, what: String) -> Error {
        Error::Key { file: self.file.into(), key: key.into(), what }
    }

    /// A count from 1 to `max`.
    fn count(&self, gguf: &str, folder: &str, max: usize) -> Result<usize, Error> {
        let name = self.name(gguf, folder);
        let n = self.meta.u64(&name)?;
        match usize::try_from(n) {
            Ok(n) if (1..=max).contains(&n) => Ok(n),
            _ => Err(self.error(&name, format!("is {n}, expected 1 to {max}"))),
        }
    }

    fn opt_count(&self, gguf: &str, folder: &str, max: usize) -> Result<Option<usize>, Error> {
        let is_there = self.meta.get(&self.name(gguf, folder)).is_some();
        is_there.then(|| self.count(gguf, folder, max)).transpose()
    }

    /// A number above 0.
    fn positive(&self, gguf: &str, folder: &str, default: f32) -> Result<f32, Error> {
        let name = self.name(gguf, folder);
        match self.meta.opt_f32(&name)?.unwrap_or(default) {
            n if n > 0.0 => Ok(n),
            n => Err(self.error(&name, format!("is {n}, expected more than 0"))),
        }
    }
}

/// An id of a token in a folder's config.json.
fn token(text: &Checkpoint, key: &str) -> Result<Option<u32>, Error> {
    Ok(text.meta().opt_u32(key)?)
}

/// A table that the host reads, by its name in the encoder.
fn table(names: &Names, name: &str, shape: &[usize]) -> Result<WeightDecl, Error> {
    let Found { dtype, source, is_repacked } = names.find(name, shape)?;
    let d = shape.last().copied().unwrap_or(1);
    let shape = vec![shape.iter().product::<usize>() / d.max(1), d];
    Ok(WeightDecl { name: name.into(), dtype, shape, source, read: Read::Plain, is_repacked })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the original code has them for Qwen3-VL: 24, 20 and 20 pairs.
    #[test]
    fn sections_interleave_until_they_end() {
        let axes = interleaved(64, [24, 20, 20]);
        assert_eq!(axes[..7], [0, 1, 2, 0, 1, 2, 0]);
        assert_eq!(axes[57..], [0, 1, 2, 0, 0, 0, 0]);
        assert_eq!([0, 1, 2].map(|axis| axes.iter().filter(|&&a| a == axis).count()), [24, 20, 20]);
    }
}
