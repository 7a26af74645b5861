//! Model files: one [`Checkpoint`] whatever the file kind, headers read and validated, weights mapped and untouched.
//!
//! Files are hostile input: every length, offset, type and count is checked against the bytes that are there before
//! it is used. What a header makes this crate allocate is bounded by a small multiple of the header's own size, so a
//! file that lies about its counts costs nothing. This crate knows nothing of what a tensor is for.
#![deny(unsafe_code)]

mod error;
pub mod gguf;
mod map;
mod meta;
mod value;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::{Path, PathBuf};

pub use error::Error;
pub use meta::Metadata;
pub use value::{Kind, Numbers, Strings, Text, Value};

use map::Bytes;
use quant::WeightType;

/// Where a tensor lies, as the header says and the checks have proved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name in the file, e.g. `blk.0.attn_q.weight`; 1 to 64 bytes.
    pub name: String,
    /// Shape, slowest axis first (GGUF stores it the other way round); 1 to 4 axes, none of them 0. Axes of length 1
    /// stand as they do in the file.
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

/// One file of a checkpoint, mapped.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    bytes: Bytes,
}

impl File {
    /// The path it was opened at; for a model in memory, its name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size in bytes, header included.
    pub fn size(&self) -> usize {
        self.bytes.len()
    }
}

/// A model file (or set of files), open: the metadata, the list of tensors, and their bytes where they lie.
///
/// The files stay mapped as long as the checkpoint lives. Another program that truncates one of them meanwhile makes
/// the operating system stop this process at the next read: no engine that maps its weights can prevent that.
#[derive(Debug)]
pub struct Checkpoint {
    name: String,
    files: Vec<File>,
    meta: Metadata,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
}

/// Opens a model file. Any one part of a split model (`NAME-00001-of-00003.gguf`) opens the whole model.
///
/// Reads headers only, whatever the size of the weights. Fails with [`Error`] when the file cannot be read or anything
/// in its header contradicts itself or the file's length.
pub fn open(path: &Path) -> Result<Checkpoint, Error> {
    gguf::open(path)
}

/// Opens a model that is built into the program; `name` stands for it in errors. Fails as [`open`] does, and when the
/// bytes do not begin at a multiple of 64: tensors must lie as aligned as in a mapped file.
pub fn from_static(name: &str, bytes: &'static [u8]) -> Result<Checkpoint, Error> {
    gguf::from_bytes(name, Bytes::Static(bytes))
}

/// Opens a model that was made in memory, by [`gguf::Writer`] say; `name` stands for it in errors. Fails as [`open`]
/// does.
pub fn from_bytes(name: &str, bytes: Vec<u8>) -> Result<Checkpoint, Error> {
    gguf::from_bytes(name, Bytes::owned(bytes))
}

impl Checkpoint {
    /// Puts the parts of a model together; `files` and `tensors` come checked, each tensor inside its file.
    fn assemble(name: String, files: Vec<File>, meta: Metadata, tensors: Vec<TensorInfo>) -> Result<Self, Error> {
        let mut by_name = HashMap::with_capacity(tensors.len());
        for (i, tensor) in tensors.iter().enumerate() {
            match by_name.entry(tensor.name.clone()) {
                Entry::Vacant(slot) => slot.insert(i),
                Entry::Occupied(first) => {
                    let (here, there) = (tensor.file, tensors[*first.get()].file);
                    let what = match here == there {
                        true => "stands twice in the file".to_string(),
                        false => format!("stands in {} too", files[there].path.display()),
                    };
                    return Err(Error::tensor(&files[here].path.to_string_lossy(), &tensor.name, what));
                }
            };
        }
        Ok(Self { name, files, meta, tensors, by_name })
    }

    /// What the model is called in messages: the path it was opened at, or the name it was given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The files, in the order that [`TensorInfo::file`] counts.
    pub fn files(&self) -> &[File] {
        &self.files
    }

    /// The path of the first file; for a model in memory, its name.
    pub fn path(&self) -> &Path {
        self.files[0].path()
    }

    /// Metadata: of a split model, that of its first part.
    pub fn meta(&self) -> &Metadata {
        &self.meta
    }

    /// All tensors, in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&i| &self.tensors[i])
    }

    /// The bytes of one of this checkpoint's tensors: rows of `dtype.row_bytes(last axis)`, last axis fastest. They
    /// begin at an address that is a multiple of 8 at least, of 32 in a usual file.
    ///
    /// # Panics
    /// When `tensor` comes from elsewhere and does not lie inside these files.
    pub fn bytes(&self, tensor: &TensorInfo) -> &[u8] {
        &self.files[tensor.file].bytes[tensor.offset..][..tensor.len]
    }

    /// Length of all tensors together, in bytes.
    pub fn data_bytes(&self) -> usize {
        // No overflow: the tensors of a file do not overlap, and all files are mapped at the same time.
        self.tensors.iter().map(|tensor| tensor.len).sum()
    }
}
