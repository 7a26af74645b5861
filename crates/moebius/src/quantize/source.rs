//! Where the weights of a new file come from: a GGUF file, or whatever else shows itself as one.

use std::ops::Range;

use anyhow::{Context, Result, bail, ensure};
use checkpoint::{Checkpoint, Kind, Metadata, TensorInfo};
use quant::{PlanesBuf, WeightType};

/// A tensor under its name in GGUF files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    pub name: String,
    /// Shape, slowest axis first.
    pub shape: Vec<usize>,
    pub dtype: WeightType,
}

impl Tensor {
    /// Returns what chooses its type wants to know.
    pub fn in_mix(&self) -> super::mix::Tensor<'_> {
        super::mix::Tensor { name: &self.name, shape: &self.shape, dtype: self.dtype }
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Matrices: those of a stack, or one.
    pub fn n_mat(&self) -> usize {
        self.shape[..self.shape.len().saturating_sub(2)].iter().product()
    }

    /// Values of a row, the fastest axis.
    pub fn n_cols(&self) -> usize {
        self.shape[self.shape.len() - 1]
    }

    /// Bytes that it takes as `dtype`; `None` when blocks do not divide its rows.
    pub fn bytes_as(&self, dtype: WeightType) -> Option<usize> {
        dtype.row_bytes(self.n_cols())?.checked_mul(self.len() / self.n_cols())
    }
}

/// Metadata and tensors in GGUF's names. Reads from any thread.
pub trait Source: Sync {
    /// Returns the metadata.
    fn meta(&self) -> &Metadata;

    /// Returns the tensors, in the order of the new file.
    fn tensors(&self) -> &[Tensor];

    /// Returns the type that a tensor had where it comes from: not the one it is read as where it is unpacked or
    /// computed.
    fn origin(&self, tensor: usize) -> WeightType {
        self.tensors()[tensor].dtype
    }

    /// Reads the encoded values `range` of a tensor, which are whole blocks, into `out`.
    ///
    /// # Errors
    /// They cannot be read.
    fn read(&self, tensor: usize, range: Range<usize>, out: &mut Vec<u8>) -> Result<()>;

    /// Checks that nobody has written to what was read.
    ///
    /// # Errors
    /// Somebody has.
    fn is_whole(&self) -> Result<()>;
}

/// A GGUF file, or the parts of one.
pub struct Gguf {
    checkpoint: Checkpoint,
    tensors: Vec<Tensor>,
}

impl Gguf {
    /// Takes an open file.
    ///
    /// # Errors
    /// It is no GGUF file, or has tensors of types that are not read.
    pub fn new(checkpoint: Checkpoint) -> Result<Gguf> {
        let name = checkpoint.name();
        ensure!(
            checkpoint.kind() == Kind::Gguf,
            "failed to read {name}: it is a {}, expected a GGUF file",
            checkpoint.kind().name()
        );
        if let Some(tensor) = checkpoint.unreadable().first() {
            bail!("failed to read {name}: tensor {} is of type {}: {}", tensor.name, tensor.dtype, tensor.why);
        }
        ensure!(!checkpoint.tensors().is_empty(), "failed to read {name}: it holds no tensors");
        let tensor = |t: &TensorInfo| {
            // Scales in tensors of their own are of no type that a new file may have.
            let dtype = if t.dtype == WeightType::NVFP4_SCALED { WeightType::F32 } else { t.dtype };
            Tensor { name: t.name.clone(), shape: t.shape.clone(), dtype }
        };
        let tensors = checkpoint.tensors().iter().map(tensor).collect();
        Ok(Gguf { checkpoint, tensors })
    }
}

impl Gguf {
    /// Values of NVFP4 with a scale of its matrix, as f32.
    fn read_scaled(&self, info: &TensorInfo, range: Range<usize>, out: &mut Vec<u8>) -> Result<()> {
        let each = info.dtype.block_len();
        let blocks = range.start / each..range.end.div_ceil(each);
        let one = info.dtype.plane_bytes(each).context("failed to size a block")?;
        let mut planes = PlanesBuf::new(one.times(blocks.len()).context("failed to size blocks")?);
        let file = &self.checkpoint.files()[info.file];
        let scales = info.scales.as_ref().context("failed to find the scales")?.offset;
        file.read_at(info.offset + blocks.start * one.q, &mut planes.q)?;
        file.read_at(scales + blocks.start * one.scales, &mut planes.scales)?;
        let mut values = vec![0.0; blocks.len() * each];
        quant::decode_row(info.dtype, planes.get(), &mut values);
        out.clear();
        out.extend(values[range.start - blocks.start * each..][..range.len()].iter().flat_map(|v| v.to_le_bytes()));
        Ok(())
    }
}

impl Source for Gguf {
    fn meta(&self) -> &Metadata {
        self.checkpoint.meta()
    }

    fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    fn origin(&self, tensor: usize) -> WeightType {
        self.checkpoint.tensors()[tensor].dtype
    }

    fn read(&self, tensor: usize, range: Range<usize>, out: &mut Vec<u8>) -> Result<()> {
        let info = &self.checkpoint.tensors()[tensor];
        if info.dtype == WeightType::NVFP4_SCALED {
            return self.read_scaled(info, range, out);
        }
        let bytes = |n: usize| n / info.dtype.block_len() * info.dtype.block_bytes();
        // Every byte is written over.
        out.resize(bytes(range.len()), 0);
        Ok(self.checkpoint.files()[info.file].read_at(info.offset + bytes(range.start), out)?)
    }

    fn is_whole(&self) -> Result<()> {
        unchanged(&self.checkpoint)
    }
}

/// Says so where a file was written to since it was opened.
///
/// # Errors
/// It was, or cannot be looked at.
pub fn unchanged(checkpoint: &Checkpoint) -> Result<()> {
    for file in checkpoint.files() {
        ensure!(file.is_unchanged()?, "failed to read {}: it was written to meanwhile", file.path().display());
    }
    Ok(())
}

/// Decodes the values `range` of a tensor into `out`; `bytes` is room for their encoded form.
///
/// # Errors
/// They cannot be read, or one is NaN or infinite.
pub fn values(
    source: &dyn Source,
    tensor: usize,
    range: Range<usize>,
    bytes: &mut Vec<u8>,
    out: &mut Vec<f32>,
) -> Result<()> {
    let info = &source.tensors()[tensor];
    source.read(tensor, range.clone(), bytes)?;
    // Every value is written over.
    out.resize(range.len(), 0.0);
    quant::decode_row(info.dtype, &bytes[..], out);
    if are_finite(out) {
        return Ok(());
    }
    let i = out.iter().position(|v| !v.is_finite()).unwrap_or(0);
    Err(anyhow::anyhow!("value {} is {}", range.start + i, out[i]))
        .with_context(|| format!("failed to encode tensor {}", info.name))
}

/// Returns whether no value is NaN or infinite. The largest magnitude says so, as bits, which is found by vectors.
pub fn are_finite(values: &[f32]) -> bool {
    values.iter().map(|v| v.to_bits() & 0x7fff_ffff).max().is_none_or(|largest| largest < f32::INFINITY.to_bits())
}
