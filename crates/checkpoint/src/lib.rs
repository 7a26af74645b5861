//! Model files: one [`Checkpoint`] whatever the file kind, headers read and validated, weights mapped and untouched.
//!
//! Files are hostile input: every length, offset, type and count is checked against the bytes that are there before
//! it is used. This crate knows nothing of what a tensor is for.

use quant::WeightType;

/// Where a tensor lies, as the header says and the checks have proved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name in the file, e.g. `blk.0.attn_q.weight`.
    pub name: String,
    /// Shape, slowest axis first (GGUF stores it the other way round); 1 to 4 axes.
    pub shape: Vec<usize>,
    /// Weight type.
    pub dtype: WeightType,
    /// Which of the checkpoint's files.
    pub file: usize,
    /// First byte in that file.
    pub offset: usize,
    /// Length in bytes; always `rows · dtype.row_bytes(last axis)`.
    pub len: usize,
}

/// A model file (or set of files), open.
#[derive(Debug)]
pub struct Checkpoint {}
