//! GGUF, versions 2 and 3, little endian.
//!
//! Layout (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>): magic, version, count of tensors, count of
//! keys; the keys with their values; name, shape, type and offset of each tensor; padding; the tensors' bytes. Shapes
//! are stored fastest axis first, offsets count from the end of the padding.

mod cursor;
mod read;
mod scaled;
mod split;
mod write;

pub use write::{Stream, Writer};

use std::path::Path;

use crate::bytes::{BASE_ALIGNMENT, Bytes};
use crate::{Checkpoint, Error, File, Kind, Open};

const MAGIC: [u8; 4] = *b"GGUF";
/// Key that sets the alignment of tensor offsets, a u32.
const ALIGNMENT_KEY: &str = "general.alignment";
const DEFAULT_ALIGNMENT: usize = 32;
/// Alignments that are accepted, all powers of two.
const ALIGNMENTS: std::ops::RangeInclusive<usize> = 8..=1 << 20;
/// Maximum length of a key, in bytes.
const MAX_KEY: usize = 65535;
/// Maximum length of a tensor name, in bytes.
const MAX_NAME: usize = 64;
/// Maximum number of axes of a tensor.
const MAX_AXES: usize = 4;
/// Longest header, in bytes; those of the largest vocabularies have some 20 MB.
const MAX_HEADER: usize = 256 << 20;
/// How deep arrays may nest; an array of numbers has depth 1.
const MAX_DEPTH: usize = 4;

/// Opens a file, and with it all other parts when it is one of a split model.
pub(crate) fn open(path: &Path, open: Open) -> Result<Checkpoint, Error> {
    let name = path.display().to_string();
    match split::Place::of(path) {
        Some(place) if place.count > 1 => split::open(name, path, &place, open),
        _ => whole(name, file(path)?, open),
    }
}

/// Opens a model in one piece of memory.
pub(crate) fn from_bytes(name: &str, bytes: Bytes) -> Result<Checkpoint, Error> {
    if !bytes.as_ptr().addr().is_multiple_of(BASE_ALIGNMENT) {
        return Err(Error::file(name, format!("begins at an address that is no multiple of {BASE_ALIGNMENT}")));
    }
    whole(name.into(), File::memory(name.into(), bytes), Open::default())
}

fn whole(name: String, file: File, open: Open) -> Result<Checkpoint, Error> {
    let part = read::header(&name, &file, 0)?;
    split::check_whole(&name, &part.meta)?;
    let read::Part { meta, tensors, unreadable } = part;
    let (files, tensors) = scaled::join(vec![file], tensors)?;
    Checkpoint::assemble(name, Kind::Gguf, open, files, meta, tensors, unreadable, None)
}

fn file(path: &Path) -> Result<File, Error> {
    File::open(path).map_err(|source| Error::Io { file: path.display().to_string(), source })
}
