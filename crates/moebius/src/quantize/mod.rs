//! From weights, of a GGUF file or of a model folder (`convert`), to a GGUF file of other types: what `moebius
//! quantize` and `moebius convert` do.
//!
//! Tensors are cut into pieces of [`PIECE`] values, which threads decode and encode in any order and which are written
//! in the file's order, each as soon as those before it are. A piece depends on nothing but its own values, so the
//! file is the same whatever the number of threads, and memory does not grow with the model.

pub mod budget;
pub mod importance;
pub mod mix;
mod parallel;
pub mod search;
pub mod source;

use std::collections::HashSet;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use checkpoint::Value;
use checkpoint::gguf::Writer;
use indicatif::ProgressBar;
use quant::WeightType;

use crate::out;
use importance::Importance;
use source::{Source, Tensor};

/// Values that a thread takes at a time: a multiple of every block.
const PIECE: usize = 1 << 16;
/// `general.quantization_version`: that of the block layouts that llama.cpp has had since May 2023.
const QUANTIZATION_VERSION: u32 = 2;
/// Bytes of a scale of a matrix of NVFP4, in a tensor of its own.
const SCALE_BYTES: usize = 4;
/// What tensors are aligned to in files that say nothing else.
const ALIGNMENT: usize = 32;
/// Keys that speak of the old file.
const DROPPED: [&str; 6] = [
    "general.file_type",
    "general.quantization_version",
    "general.alignment",
    "split.no",
    "split.count",
    "split.tensors.count",
];

/// A tensor of the new file.
#[derive(Clone, Debug)]
pub struct Target {
    pub dtype: WeightType,
    /// Importance of each column, `[n_mat, n_cols]`.
    pub importance: Option<Vec<f32>>,
    /// Whether the model normalizes the products.
    pub is_normalised: bool,
}

/// What is to be written.
pub struct Job<'a> {
    pub source: &'a dyn Source,
    /// One for each of the source's tensors.
    pub targets: Vec<Target>,
    /// `general.file_type`.
    pub file_type: u32,
    /// Keys that are added.
    pub keys: Vec<(String, Value)>,
    pub threads: usize,
}

/// Squared errors of a tensor against what it was, both sums by importance where that is known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loss {
    /// Sum of the squares of the values.
    pub power: f64,
    /// Sum of the squared errors.
    pub error: f64,
}

impl Loss {
    /// That of values `y` which stand for `x`, by importance unless there is none.
    fn of(x: &[f32], y: &[f32], importance: &[f32]) -> Loss {
        let (power, error) = quant::square_sums(x, y, importance);
        Loss { power, error }
    }

    /// Root mean square of the error over that of the values.
    pub fn relative(self) -> f64 {
        if self.power > 0.0 { (self.error / self.power).sqrt() } else { 0.0 }
    }

    fn add(&mut self, other: Loss) {
        self.power += other.power;
        self.error += other.error;
    }
}

impl Job<'_> {
    /// Checks what can be known before a byte is read.
    ///
    /// # Errors
    /// A tensor is quantized and would be quantized anew, which needs `allow_requantize`.
    pub fn check(&self, allow_requantize: bool) -> Result<()> {
        for (i, (tensor, target)) in self.source.tensors().iter().zip(&self.targets).enumerate() {
            let origin = self.source.origin(i);
            // What was unpacked on the way may become a float.
            let is_loss = origin == tensor.dtype || target.dtype.block_len() > 1;
            let is_again = origin.block_len() > 1 && tensor.dtype != target.dtype && is_loss;
            ensure!(
                allow_requantize || !is_again,
                "quantize tensor {}: it is {} already, and quantizing it anew loses more than doing so from the \
                 original weights; --allow-requantize does it all the same",
                tensor.name,
                origin
            );
        }
        Ok(())
    }

    /// Writes the file, whole or not at all; the losses of the tensors.
    ///
    /// # Errors
    /// A tensor cannot be read or encoded, or the file cannot be written.
    pub fn write(&self, path: &Path, bar: &ProgressBar) -> Result<Vec<Loss>> {
        let mut losses = Vec::new();
        out::file(path, |out| {
            let wrote = self.stream(out, bar).map(|found| losses = found);
            wrote.map_err(|error| std::io::Error::other(out::chain(&error)))
        })?;
        Ok(losses)
    }

    /// Writes the file where nothing is yet; the losses of the tensors. An error leaves what was written.
    ///
    /// # Errors
    /// As [`Job::write`].
    pub fn write_in_place(&self, path: &Path, bar: &ProgressBar) -> Result<Vec<Loss>> {
        let at = || format!("failed to write {}", path.display());
        let mut out = std::io::BufWriter::new(std::fs::File::create_new(path).with_context(at)?);
        let losses = self.stream(&mut out, bar).with_context(at)?;
        std::io::Write::flush(&mut out).with_context(at)?;
        Ok(losses)
    }

    /// Bytes of the file.
    ///
    /// # Errors
    /// As [`Job::write`] where metadata or shapes cannot be written.
    pub fn file_bytes(&self) -> Result<usize> {
        let mut header = Vec::new();
        drop(self.header().start(&mut header)?);
        let bytes = |(i, tensor): (usize, &Tensor)| {
            let dtype = self.targets[i].dtype;
            let bytes = tensor.bytes_as(dtype).and_then(|bytes| bytes.checked_next_multiple_of(ALIGNMENT));
            let scales = (self.n_scales(i) * SCALE_BYTES).next_multiple_of(ALIGNMENT);
            Ok(bytes.with_context(|| format!("failed to size tensor {} as {dtype}", tensor.name))? + scales)
        };
        let tensors = self.source.tensors().iter().enumerate().map(bytes).sum::<Result<usize>>()?;
        Ok(header.len() + tensors)
    }

    /// Bytes of tensor `i` in the new file, those of its scales too.
    ///
    /// # Errors
    /// Blocks of its type do not divide its rows.
    pub fn bytes(&self, i: usize) -> Result<usize> {
        let (tensor, dtype) = (&self.source.tensors()[i], self.targets[i].dtype);
        let bytes = tensor.bytes_as(dtype).with_context(|| format!("failed to size tensor {}", tensor.name))?;
        Ok(bytes + self.n_scales(i) * SCALE_BYTES)
    }

    /// Scales that tensor `i` has in a tensor of their own: one for each matrix that becomes NVFP4. [`mix::choose`]
    /// chooses that for none whose scales have no name.
    fn n_scales(&self, i: usize) -> usize {
        let tensor = &self.source.tensors()[i];
        let becomes = self.targets[i].dtype == WeightType::NVFP4 && tensor.dtype != WeightType::NVFP4;
        if becomes { tensor.n_mat() } else { 0 }
    }

    fn header(&self) -> Writer<'static> {
        let mut writer = Writer::new();
        for (key, value) in self.source.meta().iter().filter(|(key, _)| !DROPPED.contains(key)) {
            if !self.keys.iter().any(|(own, _)| own == key) {
                writer.meta(key, value.clone());
            }
        }
        writer.meta("general.quantization_version", QUANTIZATION_VERSION);
        writer.meta("general.file_type", self.file_type);
        self.keys.iter().for_each(|(key, value)| _ = writer.meta(key, value.clone()));
        for (i, (tensor, target)) in self.source.tensors().iter().zip(&self.targets).enumerate() {
            writer.announce(&tensor.name, &tensor.shape, target.dtype);
            if let (n @ 1.., Some(name)) = (self.n_scales(i), mix::scale_name(&tensor.name)) {
                writer.announce(&name, &[n], WeightType::F32);
            }
        }
        writer
    }

    fn stream(&self, out: &mut dyn std::io::Write, bar: &ProgressBar) -> Result<Vec<Loss>> {
        let mut stream = self.header().start(out)?;
        let n_pieces = |i: usize| self.source.tensors()[i].len().div_ceil(PIECE);
        let scales = (0..self.targets.len()).map(|i| self.scales(i)).collect::<Result<Vec<_>>>()?;
        // Threads go on with the next tensor while the last pieces of one are written.
        let all: Vec<(usize, usize)> =
            (0..self.targets.len()).flat_map(|i| (0..n_pieces(i)).map(move |piece| (i, piece))).collect();
        let mut losses = vec![Loss::default(); self.targets.len()];
        let work = |at: usize, room: &mut Room| self.piece(all[at].0, all[at].1, &scales[all[at].0], room);
        parallel::in_order(self.threads, all.len(), work, |at, (bytes, lost)| {
            let (i, piece) = all[at];
            stream.write(&bytes)?;
            losses[i].add(lost);
            let len = self.source.tensors()[i].len();
            bar.inc((len - piece * PIECE).min(PIECE) as u64);
            if (piece + 1) * PIECE >= len && !scales[i].is_empty() {
                stream.write(&scales[i].iter().flat_map(|scale| scale.to_le_bytes()).collect::<Vec<u8>>())?;
            }
            Ok(())
        })?;
        stream.finish()?;
        self.source.is_whole()?;
        Ok(losses)
    }

    /// Returns the scales of tensor `i`, which take a pass over its values; none where it has none.
    fn scales(&self, i: usize) -> Result<Vec<f32>> {
        let mut max = vec![0.0f32; self.n_scales(i)];
        if max.is_empty() {
            return Ok(Vec::new());
        }
        let len = self.source.tensors()[i].len();
        let n_values = len / max.len();
        let of_piece = |piece: usize, room: &mut Room| {
            let range = piece * PIECE..len.min((piece + 1) * PIECE);
            source::values(self.source, i, range.clone(), &mut room.bytes, &mut room.values)?;
            // The largest of each matrix that the piece has a part of.
            let mut max: Vec<(usize, f32)> = Vec::new();
            let mut at = range.start;
            while at < range.end {
                let (matrix, end) = (at / n_values, range.end.min((at / n_values + 1) * n_values));
                let part = &room.values[at - range.start..end - range.start];
                max.push((matrix, part.iter().fold(0.0, |max, x| max.max(x.abs()))));
                at = end;
            }
            Ok(max)
        };
        parallel::in_order(self.threads, len.div_ceil(PIECE), of_piece, |_, found| {
            found.into_iter().for_each(|(matrix, of_part)| max[matrix] = max[matrix].max(of_part));
            Ok(())
        })?;
        Ok(max.into_iter().map(quant::nvfp4_scale).collect())
    }

    fn piece(&self, i: usize, piece: usize, scales: &[f32], room: &mut Room) -> Result<(Vec<u8>, Loss)> {
        let (tensor, target) = (&self.source.tensors()[i], &self.targets[i]);
        let range = piece * PIECE..tensor.len().min((piece + 1) * PIECE);
        if tensor.dtype == target.dtype {
            let mut bytes = Vec::new();
            self.source.read(i, range, &mut bytes)?;
            return Ok((bytes, Loss::default()));
        }
        self.encode_piece(i, target, piece, scales, room)
    }

    /// Decodes a piece of tensor `i` and encodes it, over the scale of its matrix where there are scales.
    fn encode_piece(
        &self,
        i: usize,
        target: &Target,
        piece: usize,
        scales: &[f32],
        room: &mut Room,
    ) -> Result<(Vec<u8>, Loss)> {
        let tensor = &self.source.tensors()[i];
        let range = piece * PIECE..tensor.len().min((piece + 1) * PIECE);
        source::values(self.source, i, range.clone(), &mut room.bytes, &mut room.values)?;
        let mut bytes = Vec::new();
        let scale_of = |i: usize| scales[i * scales.len() / tensor.len()];
        room.scaled.clear();
        if !scales.is_empty() {
            room.scaled.extend(range.clone().zip(&room.values).map(|(i, x)| x / scale_of(i)));
        }
        let loss = encode(tensor, target, range, &scale_of, room, &mut bytes)?;
        Ok((bytes, loss))
    }
}

/// What a thread keeps from piece to piece.
#[derive(Default)]
struct Room {
    bytes: Vec<u8>,
    values: Vec<f32>,
    /// The values over the scale of their matrix; empty where matrices have none.
    scaled: Vec<f32>,
    importance: Vec<f32>,
    decoded: Vec<f32>,
}

/// Encodes the values of a range of a tensor, which are in the room.
fn encode(
    tensor: &Tensor,
    target: &Target,
    range: std::ops::Range<usize>,
    scale_of: &dyn Fn(usize) -> f32,
    room: &mut Room,
    bytes: &mut Vec<u8>,
) -> Result<Loss> {
    let is_scaled = !room.scaled.is_empty();
    let x = if is_scaled { &room.scaled } else { &room.values };
    let n_bytes = target.dtype.row_bytes(x.len()).with_context(|| {
        format!(
            "failed to encode tensor {}: blocks of {} do not divide {} columns",
            tensor.name,
            target.dtype,
            tensor.n_cols()
        )
    })?;
    bytes.resize(n_bytes, 0);
    room.importance.clear();
    if let Some(importance) = &target.importance
        && target.dtype.block_len() > 1
    {
        let n_cols = tensor.n_cols();
        let rows_a_matrix = tensor.shape.get(tensor.shape.len().wrapping_sub(2)).copied().unwrap_or(1);
        let mut at = range.start;
        // A row, or what the range has of it, at a time.
        while at < range.end {
            let end = range.end.min((at / n_cols + 1) * n_cols);
            let of_matrix = &importance[at / (n_cols * rows_a_matrix) * n_cols..][..n_cols];
            room.importance.extend_from_slice(&of_matrix[at % n_cols..][..end - at]);
            at = end;
        }
    }
    let importance = Some(room.importance.as_slice()).filter(|importance| !importance.is_empty());
    let usage = quant::RowUse { importance, is_normalised: target.is_normalised };
    quant::encode_row_for(target.dtype, x, &usage, bytes.as_mut_slice());
    // Every value is written over.
    room.decoded.resize(x.len(), 0.0);
    quant::decode_row(target.dtype, &bytes[..], &mut room.decoded);
    if is_scaled {
        room.decoded.iter_mut().zip(range.clone()).for_each(|(y, i)| *y *= scale_of(i));
    }
    let x = &room.values;
    if !source::are_finite(&room.decoded) {
        let i = room.decoded.iter().position(|y| !y.is_finite()).unwrap_or(0);
        let at = range.start + i;
        anyhow::bail!(
            "failed to encode tensor {}: value {at} is {}, which {} cannot hold",
            tensor.name,
            x[i],
            target.dtype
        );
    }
    Ok(Loss::of(x, &room.decoded, &room.importance))
}

/// Checks that no matrix gets a type that wants importances, where there are none.
///
/// # Errors
/// One does; names it and the way to importances.
pub fn check_without_importance(source: &dyn Source, file: &mix::FileType, targets: &[Target]) -> Result<()> {
    for (tensor, target) in source.tensors().iter().zip(targets).filter(|(tensor, _)| mix::may_change(&tensor.in_mix()))
    {
        ensure!(
            tensor.dtype == target.dtype || !mix::needs_importance(file, &tensor.name, target.dtype),
            "quantize tensor {} to {}: so few bits want importances, which say what columns matter; \
             `moebius imatrix` sums them up and `moebius quantize --imatrix FILE` takes them",
            tensor.name,
            target.dtype
        );
    }
    Ok(())
}

/// Returns the targets of a source's tensors: types by the mix, importances where a file has them.
///
/// # Errors
/// See [`mix::choose`] and [`Importance::of`].
pub fn targets(
    source: &dyn Source,
    file: &mix::FileType,
    overrides: &[mix::Override],
    importance: Option<&Importance>,
) -> Result<Vec<Target>> {
    let tensors: Vec<mix::Tensor> = source.tensors().iter().map(Tensor::in_mix).collect();
    let types = mix::choose(file, source.meta(), &tensors, overrides, importance.is_some())?;
    let names: HashSet<&str> = source.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
    let target = |(tensor, dtype): (&Tensor, WeightType)| {
        let importance = match importance {
            Some(file) if mix::may_change(&tensor.in_mix()) => file.of(&tensor.name, &tensor.shape)?,
            _ => None,
        };
        Ok(Target { dtype, importance, is_normalised: is_normalised(&tensor.name, &names) })
    };
    source.tensors().iter().zip(types).map(target).collect()
}

/// Returns whether a model of these tensors normalizes what the named matrix gives, before it is added to anything: the
/// output of attention in Gemma. (That of its feed-forward networks is normalized too, but scaled without a loss of
/// length: Gemma-3-270M in IQ2_XXS has a KL of 0.709 with them there and of 0.720 without.)
fn is_normalised(name: &str, names: &HashSet<&str>) -> bool {
    let Some(layer) = name.strip_suffix(".attn_output.weight") else { return false };
    let has = |norm: &str| names.contains(format!("{layer}.{norm}.weight").as_str());
    // Alone, `post_attention_norm` is what other models call the norm of the feed-forward network's input.
    has("post_attention_norm") && has("ffn_norm")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_normalised_follows_from_the_norms_of_the_layer() {
        let names = HashSet::from([
            "blk.3.post_attention_norm.weight",
            "blk.3.ffn_norm.weight",
            "blk.4.ffn_norm.weight",
            // Qwen3-Next's norm of the feed-forward network's input.
            "blk.5.post_attention_norm.weight",
        ]);
        let normalised = |name: &str| is_normalised(name, &names);
        assert!(normalised("blk.3.attn_output.weight"));
        for name in [
            "blk.3.attn_q.weight",
            "blk.3.ffn_down.weight",
            "blk.3.attn_output.bias",
            "blk.4.attn_output.weight",
            "blk.5.attn_output.weight",
            "blk.30.attn_output.weight",
            "attn_output.weight",
            "output.weight",
        ] {
            assert!(!normalised(name), "{name}");
        }
    }
}
