//! Where the files of a model folder come from: a folder on disk, or buffers in memory.
//!
//! Knows file names and sizes, but not what the files contain.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::bytes::{Bytes, Slice};
use crate::error::mistaken;
use crate::{Error, File};

/// Maximum size of a file that is read as text; the largest `tokenizer.json` in use have some 35 MB.
const MAX_TEXT: usize = 256 << 20;

/// A model folder.
#[derive(Debug)]
pub(crate) enum Folder {
    Disk(PathBuf),
    /// The folder's name in messages, and its files.
    Memory(PathBuf, HashMap<String, Bytes>),
}

impl Folder {
    /// Returns the path of one of its files, which need not exist.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        let (Self::Disk(folder) | Self::Memory(folder, _)) = self;
        folder.join(name)
    }

    /// Returns what messages call one of its files.
    pub(crate) fn name(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// Returns a file, open; `None` when there is none of that name.
    pub(crate) fn file(&self, name: &str) -> Result<Option<File>, Error> {
        match self {
            Self::Memory(_, files) => Ok(files.get(name).map(|bytes| File::memory(self.path(name), bytes.clone()))),
            Self::Disk(_) => self.found(name, File::open(&self.path(name))),
        }
    }

    /// Reads a text file; `None` when there is none of that name. It is not mapped, so that no process can change a
    /// text while it is parsed.
    pub(crate) fn text(&self, name: &str) -> Result<Option<Slice>, Error> {
        let text = match self {
            Self::Memory(_, files) => files.get(name).map(|bytes| Slice::new(bytes, 0..bytes.len())),
            Self::Disk(_) => self.found(name, read(&self.path(name)))?.map(Slice::owned),
        };
        match text.as_deref().is_some_and(|text| text.starts_with(b"version https://git-lfs")) {
            true => Err(Error::file(&self.name(name), format!("holds no text{}", mistaken(b"vers")))),
            false => Ok(text),
        }
    }

    fn found<T>(&self, name: &str, result: io::Result<T>) -> Result<Option<T>, Error> {
        match result {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Io { file: self.name(name), source }),
        }
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
    // Checked before opening, because opening a pipe waits for a writer.
    if !fs::metadata(path)?.is_file() {
        return Err(invalid("not a regular file".into()));
    }
    let mut bytes = Vec::new();
    // One byte more than allowed, to detect a file that grows meanwhile.
    fs::File::open(path)?.take(MAX_TEXT as u64 + 1).read_to_end(&mut bytes)?;
    match bytes.len() > MAX_TEXT {
        true => Err(invalid(format!("holds more than {MAX_TEXT} bytes of text"))),
        false => Ok(bytes),
    }
}
