//! Model files: one [`Checkpoint`] for every file kind, headers read and validated, weights mapped and untouched.
//!
//! A checkpoint is a GGUF file (or the parts of one) or a folder of `config.json` and safetensors files, as Hugging
//! Face and MLX write them. Files are hostile input: every length, offset, type and count is checked against the bytes
//! present before it is used. A header makes this crate allocate at most a small multiple of the header's own size, so
//! false counts cost nothing. This crate does not know what a tensor is for.
//!
//! ```text
//! path ─ open ─ headers ─ checks ─ Checkpoint ─ meta    keys and values
//!                                             ├ tensors names, shapes, types, places
//!                                             └ planes  mapped bytes, read when touched
//! ```
//!
//! ```
//! use checkpoint::gguf::Writer;
//! use quant::WeightType;
//!
//! # fn main() -> Result<(), checkpoint::Error> {
//! let values: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0].iter().flat_map(|x| x.to_le_bytes()).collect();
//! let mut file = Vec::new();
//! Writer::new().meta("general.name", "tiny").tensor("w", &[2, 2], WeightType::F32, &values).write(&mut file)?;
//!
//! let checkpoint = checkpoint::from_bytes("tiny", file)?;
//! assert_eq!(checkpoint.meta().str("general.name")?, "tiny");
//! let w = checkpoint.tensor("w").expect("it was written");
//! assert_eq!((w.shape.as_slice(), checkpoint.planes(w).q), ([2, 2].as_slice(), values.as_slice()));
//! # Ok(())
//! # }
//! ```
#![deny(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod bytes;
mod direct;
mod error;
#[allow(unsafe_code)]
mod fault;
mod file;
mod folder;
pub mod gguf;
#[allow(unsafe_code)]
mod map;
mod meta;
mod pages;
mod python_json;
mod repacked;
mod value;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::path::Path;

pub use direct::{BLOCK, Direct};
pub use error::{Error, visible};
pub use file::{File, Identity, Pages, page_bytes};
pub use meta::Metadata;
pub use pages::{ResidentFiles, resident_files};
pub use python_json::replace_numbers;
/// How sentence-transformers pools the states of tokens.
pub const POOLING: &str = "1_Pooling/config.json";
/// Modules of sentence-transformers that are a matrix, in the order in which they follow the pooling. The tensors of
/// `2_Dense/model.safetensors` have the module's name in front: `2_Dense.linear.weight`.
pub const DENSE: [&str; 2] = ["2_Dense", "3_Dense"];
/// The files inside folders of a model folder: settings and weights of modules of sentence-transformers.
pub const INNER_FILES: [&str; 5] =
    [POOLING, "2_Dense/config.json", "2_Dense/model.safetensors", "3_Dense/config.json", "3_Dense/model.safetensors"];

pub use value::{Numbers, Strings, Text, Value, ValueKind};

use bytes::Bytes;
use error::printable;
use quant::{PlaneBytes, Planes, WeightType};

/// Extent of a tensor, as the header states and the checks have proved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name in the file, e.g. `blk.0.attn_q.weight`; 1 to 64 bytes in GGUF, to 256 in a folder.
    pub name: String,
    /// Shape, slowest axis first (GGUF stores it the other way round); 1 to 5 axes, none of them 0. Axes of length 1
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
    /// Returns where its planes lie.
    pub fn extents(&self) -> Extents {
        let Self { file, offset, len, scales, biases, .. } = self;
        Extents {
            q: Extent { file: *file, offset: *offset, len: *len },
            scales: scales.clone(),
            biases: biases.clone(),
        }
    }

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

impl Extent {
    /// Returns its part from byte `from` to byte `to`.
    fn part(&self, from: usize, to: usize) -> Self {
        Self { file: self.file, offset: self.offset + from, len: to - from }
    }
}

/// Where rows of a tensor lie, in every plane that its type has: what [`Planes`] is in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Extents {
    pub q: Extent,
    pub scales: Option<Extent>,
    pub biases: Option<Extent>,
}

impl Extents {
    /// The planes that are there, packed values first.
    pub fn iter(&self) -> impl Iterator<Item = &Extent> {
        [Some(&self.q), self.scales.as_ref(), self.biases.as_ref()].into_iter().flatten()
    }

    /// Bytes in each plane.
    pub fn len(&self) -> PlaneBytes {
        let len = |plane: &Option<Extent>| plane.as_ref().map_or(0, |plane| plane.len);
        PlaneBytes { q: self.q.len, scales: len(&self.scales), biases: len(&self.biases) }
    }

    /// Returns whether no plane holds a byte.
    pub fn is_empty(&self) -> bool {
        self.len() == PlaneBytes::default()
    }

    /// Rows `rows` of these, which are `each` long; `None` when they end past a plane.
    pub fn rows(&self, each: PlaneBytes, rows: Range<usize>) -> Option<Self> {
        let (from, to, len) = (each.times(rows.start)?, each.times(rows.end)?, self.len());
        let fits = rows.start <= rows.end && to.q <= len.q && to.scales <= len.scales && to.biases <= len.biases;
        fits.then(|| Self {
            q: self.q.part(from.q, to.q),
            scales: self.scales.as_ref().map(|plane| plane.part(from.scales, to.scales)),
            biases: self.biases.as_ref().map(|plane| plane.part(from.biases, to.biases)),
        })
    }
}

/// A tensor of a type that this engine does not compute with. Only reading it is an error.
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
    /// A folder that MLX wrote, quantized or not.
    Mlx,
    /// A folder of safetensors files as Hugging Face's libraries write them.
    Hf,
}

impl Kind {
    /// Returns its name for display.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gguf => "GGUF",
            Self::Mlx => "MLX folder",
            Self::Hf => "safetensors folder",
        }
    }
}

/// A model file (or set of files), open: the metadata, the list of tensors, and their bytes.
///
/// The files stay open, and mapped unless [`Open`] says otherwise, as long as the checkpoint lives. Another program
/// that cuts one of them meanwhile makes its weights zeros, and [`Checkpoint::intact`] an error.
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

/// How a model on disk is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Open {
    /// Whether the files are mapped, so that [`Checkpoint::planes`] has the weights' bytes. Without, they are read on
    /// demand, by [`File::read_at`] and [`Checkpoint::read`].
    pub map: bool,
    /// Whether weights that have to be repacked and that no type for it holds exactly (codes in reordered groups)
    /// become F32, as converters want them; otherwise F16.
    pub exact: bool,
}

impl Default for Open {
    /// Mapped, in half precision where the exact form would take twice the memory.
    fn default() -> Self {
        Self { map: true, exact: false }
    }
}

/// Opens a model, mapped: a GGUF file, or a folder of `config.json` and safetensors files. Any one part of a split
/// GGUF model (`NAME-00001-of-00003.gguf`) opens the whole model, and so do `config.json`, the safetensors files and
/// their index for the folder they stand in.
///
/// Reads headers only, whatever the size of the weights.
///
/// # Errors
/// When a file cannot be read, or anything in its header contradicts itself or the file's length.
pub fn open(path: &Path) -> Result<Checkpoint, Error> {
    open_with(path, Open::default())
}

/// Opens a model as [`open`] does, mapped or not.
///
/// # Errors
/// As [`open`].
pub fn open_with(path: &Path, open: Open) -> Result<Checkpoint, Error> {
    match folder::of(path) {
        Some(folder) => folder::open(folder, open),
        None => gguf::open(path, open),
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
    gguf::from_bytes(name, Bytes::aligned(bytes))
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
        open: Open,
        mut files: Vec<File>,
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
                        false => format!("is in {} too", files[there].path().display()),
                    };
                    return Err(Error::tensor(&files[here].path().to_string_lossy(), tensor, what));
                }
            };
        }
        if open.map {
            files.iter_mut().try_for_each(File::map)?;
        }
        Ok(Self { name, kind, files, meta, tensors, unreadable, by_name, folder })
    }

    /// Returns the same model with some columns of its tensors as separate tensors: for each the tensor, the columns
    /// and the new name. Their bytes are computed when they are read; side files are left out.
    ///
    /// # Errors
    /// There is no such tensor, the columns are not whole blocks of its type, or a file cannot be opened again.
    pub fn with_columns<'a>(&self, cuts: impl Iterator<Item = (&'a str, Range<usize>, String)>) -> Result<Self, Error> {
        let mut matrices = Vec::new();
        let mut shapes = Vec::new();
        for (tensor, columns, name) in cuts {
            let bad = |what: String| Error::tensor(&self.path().to_string_lossy(), tensor, what);
            let info = self.find(tensor)?.ok_or_else(|| bad("is not there".into()))?;
            let (of, outer) = info.shape.split_last().ok_or_else(|| bad("has no axes".into()))?;
            let block = info.dtype.block_len();
            let whole = |column: usize| column.is_multiple_of(block);
            if columns.is_empty() || columns.end > *of || !whole(columns.start) || !whole(columns.len()) {
                return Err(bad(format!("has {of} columns in blocks of {block}, not {columns:?}")));
            }
            shapes.push([outer, &[columns.len()]].concat());
            matrices.push(repacked::Matrix {
                name,
                shape: [outer.iter().product(), columns.len()],
                form: repacked::Form::Columns(repacked::Columns {
                    planes: info.extents(),
                    dtype: info.dtype,
                    of: *of,
                    first: columns.start,
                }),
                parts: vec![tensor.into()],
            });
        }
        let mut files = self.files.iter().map(File::again).collect::<Result<Vec<_>, _>>()?;
        let (computed, more) = repacked::Repacked::new(matrices, &files, files.len(), false)?;
        files.push(File::computed(self.path().to_path_buf(), computed));
        let more = more.into_iter().zip(shapes).map(|(info, shape)| TensorInfo { shape, ..info });
        let tensors = self.tensors.iter().cloned().chain(more).collect();
        let open = Open { map: self.files.iter().any(|file| file.pages().is_some()), exact: false };
        let (name, meta, unreadable) = (self.name.clone(), self.meta.clone(), self.unreadable.clone());
        Self::assemble(name, self.kind, open, files, meta, tensors, unreadable, None)
    }

    /// Returns the model's name in messages: the path it was opened at, or the name it was given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns what kind of files it was opened from.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the files that hold tensors, in the order of [`TensorInfo::file`].
    pub fn files(&self) -> &[File] {
        &self.files
    }

    /// Returns the path of the first file; for a model in memory, its name.
    pub fn path(&self) -> &Path {
        self.files[0].path()
    }

    /// Metadata: of a split model, that of its first part; of a folder, `config.json` with the keys of inner objects
    /// joined by dots (`rope_parameters.rope_theta`), `null` being absent. The keys of `text_config` are at the top
    /// level as well, unless one of that name exists there.
    pub fn meta(&self) -> &Metadata {
        &self.meta
    }

    /// Returns the metadata, for what a user says in place of the file.
    pub fn meta_mut(&mut self) -> &mut Metadata {
        &mut self.meta
    }

    /// Returns all tensors that can be read, in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Returns the tensors that cannot be read, in file order: integers, types that this engine does not know, and the
    /// like.
    pub fn unreadable(&self) -> &[Unreadable] {
        &self.unreadable
    }

    /// Returns the tensor of that name, if readable.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.find(name).ok().flatten()
    }

    /// Returns the tensor of that name; `None` when there is none.
    ///
    /// # Errors
    /// When the tensor exists and cannot be read.
    pub fn find(&self, name: &str) -> Result<Option<&TensorInfo>, Error> {
        match self.by_name.get(name) {
            None => Ok(None),
            Some(&Place::Tensor(i)) => Ok(Some(&self.tensors[i])),
            Some(&Place::Unreadable(i)) => {
                let Unreadable { name, file, why, .. } = &self.unreadable[i];
                let file = self.files[*file].path().to_string_lossy();
                Err(Error::Unreadable { file: file.into(), tensor: printable(name.as_bytes()), why: why.clone() })
            }
        }
    }

    /// Returns whether there is a tensor of that name, readable or not.
    pub fn has(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// Returns a text file of a model folder, `tokenizer.json` say; `None` when there is none, and for GGUF, whose
    /// texts are in the metadata. `name` is a plain file name.
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

    /// Any other file of a model folder: its name in messages, and its bytes. As [`Checkpoint::side_file`] otherwise.
    ///
    /// # Errors
    /// When `name` is a path, or the file cannot be read or is larger than 256 MiB.
    pub fn side_bytes(&self, name: &str) -> Result<Option<(String, Vec<u8>)>, Error> {
        let Some(folder) = &self.folder else { return Ok(None) };
        Ok(folder::side_bytes(folder, name)?.map(|bytes| (folder.name(name), bytes)))
    }

    /// Computes the bytes of all repacked weights ([`File::is_repacked`]) and keeps them as long as the checkpoint
    /// lives, so that [`Checkpoint::planes`] has them: for those who copy no weights.
    ///
    /// # Errors
    /// There is no memory for them, or the files they are computed from cannot be read.
    pub fn hold_repacked(&self) -> Result<(), Error> {
        self.files.iter().try_for_each(File::hold)
    }

    /// Returns whether the bytes of all tensors are in memory or in mapped files: whether [`Checkpoint::planes`] may be
    /// called.
    pub fn is_mapped(&self) -> bool {
        self.files.iter().all(|file| file.bytes().is_some())
    }

    /// Returns whether the weights are mapped in small pages while this process can have memory in pages of 2 MB:
    /// copies would be read faster. Reads a byte of some large tensors, as only what was read is mapped. `false` where
    /// the system does not say, and for files that are not mapped.
    pub fn is_mapped_in_small_pages(&self) -> bool {
        let is_mapped = self.files.iter().all(|file| file.pages().is_some() || file.is_repacked());
        is_mapped
            && pages::are_small(self.tensors.iter().filter_map(|tensor| Some(self.planes_at(&tensor.extents())?.q)))
    }

    /// Whether everything that was read from mapped files so far was there.
    ///
    /// A page of a mapped file that cannot be read, because another program has cut the file or because the disk
    /// failed, reads as zeros instead of ending the process, and so does everything behind it. Whoever computes with
    /// mapped bytes asks here afterwards, and throws away what was computed if this is an error. It stays one: the
    /// file must be opened anew. A check costs a load per file.
    ///
    /// A cut inside the last page that is left, and bytes that another program writes, cannot be seen this way: those
    /// are what [`File::is_unchanged`] is for.
    ///
    /// # Errors
    /// Names the first file that could not be read.
    pub fn intact(&self) -> Result<(), Error> {
        self.files.iter().try_for_each(File::intact)
    }

    /// Returns the bytes of one of this checkpoint's tensors: rows of `dtype.row_bytes(last axis)`, last axis fastest;
    /// of a type in planes, the plane of packed values.
    ///
    /// They begin at any address: at a multiple of 8 (usually 32) in GGUF files, but anywhere in safetensors files,
    /// whose header MLX does not pad. Numbers wider than a byte must be read unaligned.
    ///
    /// # Panics
    /// When `tensor` comes from another checkpoint and does not lie inside these files.
    pub fn bytes(&self, tensor: &TensorInfo) -> &[u8] {
        self.planes(tensor).q
    }

    /// Returns all planes of one of this checkpoint's tensors, as [`Checkpoint::bytes`] describes them: rows one after
    /// the other.
    ///
    /// # Panics
    /// When `tensor` comes from another checkpoint and does not lie inside these files.
    pub fn planes(&self, tensor: &TensorInfo) -> Planes<'_> {
        self.planes_at(&tensor.extents()).expect("the tensor is of this checkpoint, which is mapped")
    }

    /// Returns the bytes at some extents; `None` when the files are not mapped or the extents end past them.
    pub fn planes_at(&self, extents: &Extents) -> Option<Planes<'_>> {
        let plane = |plane: &Option<Extent>| plane.as_ref().map_or(Some(&[][..]), |plane| self.bytes_at(plane));
        Some(Planes { q: self.bytes_at(&extents.q)?, scales: plane(&extents.scales)?, biases: plane(&extents.biases)? })
    }

    fn bytes_at(&self, extent: &Extent) -> Option<&[u8]> {
        self.files.get(extent.file)?.bytes()?.get(extent.offset..)?.get(..extent.len)
    }

    /// Reads the bytes at some extents into memory of the caller's, one plane after the other as [`Extents::iter`] has
    /// them, whether the files are mapped or not.
    ///
    /// # Errors
    /// A file cannot be read there any more.
    ///
    /// # Panics
    /// When `out` is not [`Extents::len`] long, or the extents are of another checkpoint.
    pub fn read(&self, extents: &Extents, mut out: &mut [u8]) -> Result<(), Error> {
        assert_eq!(out.len(), extents.len().total(), "room for all planes");
        for plane in extents.iter() {
            let (here, rest) = out.split_at_mut(plane.len);
            self.files[plane.file].read_at(plane.offset, here)?;
            out = rest;
        }
        Ok(())
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
    /// Returns the path, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the text.
    pub fn text(&self) -> &str {
        // `side_file` has checked it.
        self.text.as_str().unwrap_or_default()
    }
}
