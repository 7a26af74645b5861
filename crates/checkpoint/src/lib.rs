//! Model files: one [`Checkpoint`] for every file kind, headers read and validated, weights mapped and untouched.
//!
//! A checkpoint is a GGUF file (or the parts of one) or a folder of `config.json` and safetensors files, as Hugging
//! Face and MLX write them. Files are hostile input: every length, offset, type and count is checked against the bytes
//! present before it is used. A header makes this crate allocate at most a small multiple of the header's own size, so
//! false counts cost nothing. This crate does not know what a tensor is for.
#![deny(unsafe_code)]

mod error;
mod folder;
pub mod gguf;
mod map;
mod meta;
mod value;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::{Path, PathBuf};

pub use error::Error;
pub use meta::Metadata;
pub use value::{Numbers, Strings, Text, Value, ValueKind};

use error::printable;
use map::Bytes;
use quant::{Planes, WeightType};

/// Extent of a tensor, as the header states and the checks have proved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name in the file, e.g. `blk.0.attn_q.weight`; 1 to 64 bytes in GGUF, to 256 in a folder.
    pub name: String,
    /// Shape, slowest axis first (GGUF stores it the other way round); 1 to 4 axes, none of them 0. Axes of length 1
    /// are kept as in the file. Of packed weights, the shape of the values, not of the words.
    pub shape: Vec<usize>,
    /// Weight type.
    pub dtype: WeightType,
    /// Which of the checkpoint's files.
    pub file: usize,
    /// First byte in that file.
    pub offset: usize,
    /// Length in bytes; always `rows · dtype.row_bytes(last axis)`. Excludes the planes of scales and biases.
    pub len: usize,
    /// Extent of the scales of a type in planes.
    pub scales: Option<Extent>,
    /// Extent of the biases of such a type, when it has any.
    pub biases: Option<Extent>,
}

impl TensorInfo {
    /// Length of all its planes, in bytes.
    pub fn total_bytes(&self) -> usize {
        // No overflow: the planes do not overlap, and all files are mapped at the same time.
        let planes = [&self.scales, &self.biases].into_iter().flatten();
        self.len + planes.map(|plane| plane.len).sum::<usize>()
    }
}

/// A plane of a tensor; it may be in another file than the packed values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Which of the checkpoint's files.
    pub file: usize,
    /// First byte in that file.
    pub offset: usize,
    /// Length in bytes.
    pub len: usize,
}

/// A tensor of an unsupported type. Only reading it is an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// Name in the file.
    pub name: String,
    /// Type, as the file's format names it.
    pub dtype: String,
    /// Shape, slowest axis first, as far as known.
    pub shape: Vec<usize>,
    /// Which of the checkpoint's files.
    pub file: usize,
    /// The reason, in words that follow the tensor's name.
    pub why: String,
}

/// What kind of files a checkpoint was opened from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A GGUF file, or the parts of one.
    Gguf,
    /// A folder that MLX wrote, quantised or not.
    Mlx,
    /// A folder of safetensors files as Hugging Face's libraries write them.
    Hf,
}

impl Kind {
    /// Its name for display.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gguf => "GGUF",
            Self::Mlx => "MLX folder",
            Self::Hf => "safetensors folder",
        }
    }
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

/// A model file (or set of files), open: the metadata, the list of tensors, and their mapped bytes.
///
/// The files stay mapped as long as the checkpoint lives. If another program truncates one of them meanwhile, the
/// operating system kills this process at the next read: no engine that maps its weights can prevent that.
#[derive(Debug)]
pub struct Checkpoint {
    name: String,
    kind: Kind,
    files: Vec<File>,
    meta: Metadata,
    tensors: Vec<TensorInfo>,
    unreadable: Vec<Unreadable>,
    by_name: HashMap<String, Place>,
    folder: Option<folder::Folder>,
}

/// Index of the tensor of a name.
#[derive(Clone, Copy, Debug)]
enum Place {
    Tensor(usize),
    Unreadable(usize),
}

/// Opens a model: a GGUF file, or a folder of `config.json` and safetensors files. Any one part of a split GGUF model
/// (`NAME-00001-of-00003.gguf`) opens the whole model; so do `config.json`, the safetensors files and their index for
/// their folder.
///
/// Reads headers only, whatever the size of the weights.
///
/// # Errors
/// When a file cannot be read, or anything in its header contradicts itself or the file's length.
pub fn open(path: &Path) -> Result<Checkpoint, Error> {
    match folder::of(path) {
        Some(folder) => folder::open(folder),
        None => gguf::open(path),
    }
}

/// Opens a model that is built into the program; `name` is its name in errors.
///
/// # Errors
/// As [`open`], and when the bytes do not begin at a multiple of 64: tensors must be as aligned as in a mapped file.
pub fn from_static(name: &str, bytes: &'static [u8]) -> Result<Checkpoint, Error> {
    gguf::from_bytes(name, Bytes::Static(bytes))
}

/// Opens a model in memory, from [`gguf::Writer`] say; `name` is its name in errors.
///
/// # Errors
/// As [`open`].
pub fn from_bytes(name: &str, bytes: Vec<u8>) -> Result<Checkpoint, Error> {
    gguf::from_bytes(name, Bytes::owned(bytes))
}

/// Opens a model folder in memory, from the names and bytes of its files; `name` is the folder's name in errors.
///
/// # Errors
/// As [`open`].
pub fn from_files(name: &str, files: Vec<(&str, Vec<u8>)>) -> Result<Checkpoint, Error> {
    folder::from_files(name, files)
}

impl Checkpoint {
    /// Builds a checkpoint; `files` and `tensors` come checked, each tensor inside its file.
    fn assemble(
        name: String,
        kind: Kind,
        files: Vec<File>,
        meta: Metadata,
        tensors: Vec<TensorInfo>,
        unreadable: Vec<Unreadable>,
        folder: Option<folder::Folder>,
    ) -> Result<Self, Error> {
        let mut by_name = HashMap::with_capacity(tensors.len() + unreadable.len());
        let places = tensors.iter().enumerate().map(|(i, t)| (&t.name, t.file, Place::Tensor(i)));
        let others = unreadable.iter().enumerate().map(|(i, t)| (&t.name, t.file, Place::Unreadable(i)));
        for (tensor, here, place) in places.chain(others) {
            match by_name.entry(tensor.clone()) {
                Entry::Vacant(slot) => slot.insert(place),
                Entry::Occupied(first) => {
                    let there = match *first.get() {
                        Place::Tensor(i) => tensors[i].file,
                        Place::Unreadable(i) => unreadable[i].file,
                    };
                    let what = match here == there {
                        true => "is in the file twice".to_string(),
                        false => format!("is in {} too", files[there].path.display()),
                    };
                    return Err(Error::tensor(&files[here].path.to_string_lossy(), tensor, what));
                }
            };
        }
        Ok(Self { name, kind, files, meta, tensors, unreadable, by_name, folder })
    }

    /// The model's name in messages: the path it was opened at, or the name it was given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What kind of files it was opened from.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The files that hold tensors, in the order of [`TensorInfo::file`].
    pub fn files(&self) -> &[File] {
        &self.files
    }

    /// The path of the first file; for a model in memory, its name.
    pub fn path(&self) -> &Path {
        self.files[0].path()
    }

    /// Metadata: of a split model, that of its first part; of a folder, `config.json` with the keys of inner objects
    /// joined by dots (`rope_parameters.rope_theta`), `null` being absent. The keys of `text_config` are at the top
    /// level as well, unless one of that name exists there.
    pub fn meta(&self) -> &Metadata {
        &self.meta
    }

    /// All tensors that can be read, in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensors that cannot be read, in file order: integers, types that this engine does not know, and the like.
    pub fn unreadable(&self) -> &[Unreadable] {
        &self.unreadable
    }

    /// The tensor of that name, if readable.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.find(name).ok().flatten()
    }

    /// The tensor of that name; `None` when there is none.
    ///
    /// # Errors
    /// When the tensor exists and cannot be read.
    pub fn find(&self, name: &str) -> Result<Option<&TensorInfo>, Error> {
        match self.by_name.get(name) {
            None => Ok(None),
            Some(&Place::Tensor(i)) => Ok(Some(&self.tensors[i])),
            Some(&Place::Unreadable(i)) => {
                let Unreadable { name, file, why, .. } = &self.unreadable[i];
                let file = self.files[*file].path.to_string_lossy();
                Err(Error::Unreadable { file: file.into(), tensor: printable(name.as_bytes()), why: why.clone() })
            }
        }
    }

    /// Whether there is a tensor of that name, readable or not.
    pub fn has(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// A text file of a model folder, `tokenizer.json` say; `None` when there is none, and for GGUF, whose texts are in
    /// the metadata. `name` is a plain file name.
    ///
    /// # Errors
    /// When `name` is a path, or the file cannot be read, is larger than 256 MiB or is not UTF-8.
    pub fn side_file(&self, name: &str) -> Result<Option<SideFile>, Error> {
        let Some(folder) = &self.folder else { return Ok(None) };
        let Some(bytes) = folder::side_file(folder, name)? else { return Ok(None) };
        match std::str::from_utf8(&bytes) {
            Ok(_) => Ok(Some(SideFile { name: folder.name(name), text: Text(bytes) })),
            Err(error) => Err(Error::file(&folder.name(name), format!("is not UTF-8 at byte {}", error.valid_up_to()))),
        }
    }

    /// The bytes of one of this checkpoint's tensors: rows of `dtype.row_bytes(last axis)`, last axis fastest; of a
    /// type in planes, the plane of packed values.
    ///
    /// They begin at any address: at a multiple of 8 (usually 32) in GGUF files, but anywhere in safetensors files,
    /// whose header MLX does not pad. Numbers wider than a byte must be read unaligned.
    ///
    /// # Panics
    /// When `tensor` comes from another checkpoint and does not lie inside these files.
    pub fn bytes(&self, tensor: &TensorInfo) -> &[u8] {
        &self.files[tensor.file].bytes[tensor.offset..][..tensor.len]
    }

    /// All planes of one of this checkpoint's tensors, as [`Checkpoint::bytes`] describes them: rows one after the
    /// other.
    ///
    /// # Panics
    /// When `tensor` comes from another checkpoint and does not lie inside these files.
    pub fn planes(&self, tensor: &TensorInfo) -> Planes<'_> {
        let plane = |extent: &Option<Extent>| match extent {
            Some(Extent { file, offset, len }) => &self.files[*file].bytes[*offset..][..*len],
            None => &[],
        };
        Planes { q: self.bytes(tensor), scales: plane(&tensor.scales), biases: plane(&tensor.biases) }
    }

    /// Length of all readable tensors together, in bytes.
    pub fn data_bytes(&self) -> usize {
        // No overflow: the tensors of a file do not overlap, and all files are mapped at the same time.
        self.tensors.iter().map(TensorInfo::total_bytes).sum()
    }
}

/// A text of a model folder.
#[derive(Clone, Debug)]
pub struct SideFile {
    name: String,
    text: Text,
}

impl SideFile {
    /// The path, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The text.
    pub fn text(&self) -> &str {
        // `side_file` has checked it.
        self.text.as_str().unwrap_or_default()
    }
}
