//! One file of a model: on disk, mapped or not, or a buffer that stands for one. Knows nothing of what is in it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use crate::Error;
use crate::bytes::Bytes;
use crate::map::{self, Mapping};

/// One file of a checkpoint.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    data: Data,
}

/// Bytes that are on no disk: they are computed from other files when they are read.
pub(crate) trait Computed: std::fmt::Debug + Send + Sync {
    /// Size in bytes.
    fn size(&self) -> usize;

    /// Computes the bytes from `offset` on; `None` where they end before `out` does.
    fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<Option<()>, Error>;

    /// Whether the files that they are computed from are as they were.
    fn is_unchanged(&self) -> Result<bool, Error>;
}

#[derive(Debug)]
enum Data {
    Disk {
        file: fs::File,
        identity: Identity,
        map: Option<Mapping>,
    },
    Memory(Bytes),
    /// What is held of it: nothing, or all its bytes.
    Computed(Arc<dyn Computed>, OnceLock<Bytes>),
}

/// Which file was opened, and in what state: equal as long as nobody has written to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The file system it is on; 0 where the system has no such number.
    pub device: u64,
    /// Its number there; 0 where the system has no such number.
    pub inode: u64,
    /// Size in bytes.
    pub size: usize,
    /// When it was written last, where the system knows.
    pub modified: Option<SystemTime>,
}

impl Identity {
    pub(crate) fn of(file: &fs::File) -> io::Result<Self> {
        let meta = file.metadata()?;
        #[cfg(unix)]
        let (device, inode) = (std::os::unix::fs::MetadataExt::dev(&meta), std::os::unix::fs::MetadataExt::ino(&meta));
        #[cfg(windows)]
        let (device, inode) = sys::windows::identity(file)?;
        #[cfg(not(any(unix, windows)))]
        let (device, inode) = (0, 0);
        let size = usize::try_from(meta.len()).map_err(io::Error::other)?;
        Ok(Self { device, inode, size, modified: meta.modified().ok() })
    }
}

/// Where a mapped file lies in memory, in whole pages: what a device needs that shares the memory instead of copying.
///
/// The bytes of the last page behind the end of the file are zeros. The pages are read-only and stay as long as the
/// checkpoint lives; when the file cannot be read, they become zeros ([`crate::Checkpoint::intact`]) as far as this
/// process reads them. What a device does with pages that the system cannot read in is up to its driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// First byte of the file, a multiple of [`page_bytes`].
    pub base: NonNull<u8>,
    /// Length in bytes, a multiple of [`page_bytes`].
    pub len: usize,
}

/// Bytes of a page of memory: what the base and the length of [`Pages`] are multiples of.
pub fn page_bytes() -> usize {
    map::page_bytes()
}

impl File {
    /// Opens a regular file and reads nothing.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        // Asked before opening, because opening a pipe waits for a writer.
        if !fs::metadata(path)?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let file = fs::File::open(path)?;
        let identity = Identity::of(&file)?;
        Ok(Self { path: path.into(), data: Data::Disk { file, identity, map: None } })
    }

    /// Returns a buffer that stands for a file.
    pub(crate) fn memory(path: PathBuf, bytes: Bytes) -> Self {
        Self { path, data: Data::Memory(bytes) }
    }

    /// Returns a file whose bytes are computed when they are read; `path` stands for it in messages.
    pub(crate) fn computed(path: PathBuf, data: impl Computed + 'static) -> Self {
        Self { path, data: Data::Computed(Arc::new(data), OnceLock::new()) }
    }

    /// Returns a second handle of the same file, not mapped.
    pub(crate) fn again(&self) -> Result<Self, Error> {
        let data = match &self.data {
            Data::Disk { file, identity, .. } => {
                let file = file.try_clone();
                let file = file.map_err(|source| Error::Io { file: self.path.display().to_string(), source })?;
                Data::Disk { file, identity: *identity, map: None }
            }
            Data::Memory(bytes) => Data::Memory(bytes.clone()),
            Data::Computed(data, _) => Data::Computed(Arc::clone(data), OnceLock::new()),
        };
        Ok(Self { path: self.path.clone(), data })
    }

    /// Returns whether it is on no disk, because its bytes are computed from other files when they are read: weights
    /// of it are in the form of a weight type, and as they were published they are not.
    pub fn is_repacked(&self) -> bool {
        matches!(self.data, Data::Computed(..))
    }

    /// Computes all bytes of a repacked file and keeps them, so that [`File::bytes`] has them.
    pub(crate) fn hold(&self) -> Result<(), Error> {
        let Data::Computed(data, held) = &self.data else { return Ok(()) };
        if held.get().is_some() {
            return Ok(());
        }
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(data.size()).map_err(|_| self.io(io::ErrorKind::OutOfMemory.into()))?;
        bytes.resize(data.size(), 0);
        self.read_at(0, &mut bytes)?;
        // Where another thread was first, its bytes are the same.
        let _ = held.set(Bytes::aligned(bytes));
        Ok(())
    }

    /// Maps the file, if it is one on disk. Reads nothing yet.
    pub(crate) fn map(&mut self) -> Result<(), Error> {
        if let Data::Disk { file, identity, map } = &mut self.data {
            let mapping = Mapping::new(file, identity.size);
            *map = Some(mapping.map_err(|source| Error::Io { file: self.path.display().to_string(), source })?);
        }
        Ok(())
    }

    /// Returns the path it was opened at; for a model in memory, its name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size in bytes when it was opened, header included.
    pub fn size(&self) -> usize {
        match &self.data {
            Data::Disk { identity, .. } => identity.size,
            Data::Memory(bytes) => bytes.len(),
            Data::Computed(data, _) => data.size(),
        }
    }

    /// Returns which file it is; `None` for a model in memory, and for a repacked file.
    pub fn identity(&self) -> Option<Identity> {
        match &self.data {
            Data::Disk { identity, .. } => Some(*identity),
            Data::Memory(_) | Data::Computed(..) => None,
        }
    }

    /// Returns whether no one has written to the file since it was opened, as far as size and time of modification
    /// tell. A file that was replaced by another of its name is unchanged: the one that is open is still there.
    ///
    /// # Errors
    /// The system does not say.
    pub fn is_unchanged(&self) -> Result<bool, Error> {
        match &self.data {
            Data::Disk { file, identity, .. } => Identity::of(file).map(|now| now == *identity).map_err(|e| self.io(e)),
            Data::Memory(_) => Ok(true),
            Data::Computed(data, _) => data.is_unchanged(),
        }
    }

    /// Reads `out.len()` bytes from byte `offset` on, whether the file is mapped or not, through the operating system's
    /// cache.
    ///
    /// # Errors
    /// The file ends before, or the disk fails.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<(), Error> {
        match &self.data {
            Data::Disk { file, .. } => read_exact_at(file, offset, out).map_err(|source| self.io(source)),
            Data::Memory(bytes) => match bytes.get(offset..).and_then(|rest| rest.get(..out.len())) {
                Some(held) => {
                    out.copy_from_slice(held);
                    Ok(())
                }
                None => Err(self.io(io::ErrorKind::UnexpectedEof.into())),
            },
            Data::Computed(data, _) => match data.read_at(offset, out)? {
                Some(()) => Ok(()),
                None => Err(self.io(io::ErrorKind::UnexpectedEof.into())),
            },
        }
    }

    /// Returns all bytes, where they are in memory; `None` for a file that was opened without mapping, and for a
    /// repacked one that is not held ([`crate::Checkpoint::hold_repacked`]).
    pub fn bytes(&self) -> Option<&[u8]> {
        match &self.data {
            Data::Disk { map, .. } => map.as_deref(),
            Data::Memory(bytes) => Some(bytes),
            Data::Computed(_, held) => held.get().map(|bytes| &bytes[..]),
        }
    }

    /// Returns the pages of a mapped file; `None` for one that is not mapped, and for a model in memory.
    pub fn pages(&self) -> Option<Pages> {
        match &self.data {
            Data::Disk { map: Some(map), .. } => {
                Some(Pages { base: NonNull::from(&map[..]).cast(), len: map.len().next_multiple_of(page_bytes()) })
            }
            _ => None,
        }
    }

    /// Whether everything that was read from the mapping so far was there; see [`crate::Checkpoint::intact`].
    ///
    /// # Errors
    /// [`Error::Lost`] when it was not.
    pub fn intact(&self) -> Result<(), Error> {
        let Data::Disk { file, identity, map: Some(map) } = &self.data else { return Ok(()) };
        let Some(offset) = map.fault() else { return Ok(()) };
        let size = identity.size;
        let why = match Identity::of(file) {
            Ok(now) if now.size < size => format!("the file was cut from {size} to {} bytes while in use", now.size),
            _ => "the system could not read it".to_string(),
        };
        Err(Error::Lost { file: self.path.display().to_string(), offset, why })
    }

    /// Returns the open file and its state when it was opened, of one on disk.
    pub(crate) fn on_disk(&self) -> Option<(&fs::File, Identity)> {
        match &self.data {
            Data::Disk { file, identity, .. } => Some((file, *identity)),
            Data::Memory(_) | Data::Computed(..) => None,
        }
    }

    /// Returns the first `len` bytes, copied unless they are in memory: more where they are, fewer where the file ends.
    pub(crate) fn head(&self, len: usize) -> Result<Bytes, Error> {
        if let Data::Memory(bytes) = &self.data {
            return Ok(bytes.clone());
        }
        let len = len.min(self.size());
        let mut head = Vec::new();
        head.try_reserve_exact(len).map_err(|_| self.io(io::ErrorKind::OutOfMemory.into()))?;
        head.resize(len, 0);
        self.read_at(0, &mut head)?;
        Ok(Bytes::owned(head))
    }

    fn io(&self, source: io::Error) -> Error {
        Error::Read { file: self.path.display().to_string(), source }
    }
}

#[cfg(unix)]
fn read_exact_at(file: &fs::File, offset: usize, out: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset as u64)
}

#[cfg(windows)]
fn read_exact_at(file: &fs::File, mut offset: usize, mut out: &mut [u8]) -> io::Result<()> {
    while !out.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, out, offset as u64)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => (offset, out) = (offset + n, &mut out[n..]),
        }
    }
    Ok(())
}
