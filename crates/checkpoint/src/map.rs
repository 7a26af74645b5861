//! Reference-counted bytes: a mapped file, the program's own data, or a buffer.
//!
//! The only file of this crate with unsafe code. It does not know what the bytes mean.
#![allow(unsafe_code)]

use std::fs;
use std::io;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;

/// Shared read-only bytes; cloning copies no data.
#[derive(Clone)]
pub(crate) enum Bytes {
    Mapped(Arc<Mmap>),
    Static(&'static [u8]),
    /// Without the first few bytes, see [`Bytes::owned`].
    Owned(Arc<Vec<u8>>, usize),
}

/// Every model file begins at a multiple of this many bytes, so that tensors are as aligned as their offsets.
pub(crate) const BASE_ALIGNMENT: usize = 64;

impl Bytes {
    /// Maps a regular file. Reads nothing yet.
    pub(crate) fn map(path: &Path) -> io::Result<Self> {
        // Checked before opening, because opening a pipe waits for a writer.
        if !fs::metadata(path)?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let file = fs::File::open(path)?;
        // SAFETY: the map is private and read-only, and only ever seen as `&[u8]`, for which every bit pattern is
        // valid. Its bytes must not change while it lives: this process never writes to a model file, and `Checkpoint`
        // documents that replacing one under a running engine may kill the process. No length or offset is read from
        // the map twice, so a change cannot invalidate a checked bound.
        let map = unsafe { Mmap::map(&file)? };
        ask_for_large_pages(&map);
        Ok(Self::Mapped(Arc::new(map)))
    }

    /// A buffer, moved until it is as aligned as a mapped file.
    pub(crate) fn owned(mut bytes: Vec<u8>) -> Self {
        if bytes.as_ptr().addr().is_multiple_of(BASE_ALIGNMENT) {
            return Self::Owned(Arc::new(bytes), 0);
        }
        let len = bytes.len();
        bytes.reserve_exact(BASE_ALIGNMENT); // may move the buffer, so the address is read again
        let addr = bytes.as_ptr().addr();
        let skip = addr.next_multiple_of(BASE_ALIGNMENT) - addr;
        bytes.resize(len + skip, 0);
        bytes.copy_within(..len, skip);
        Self::Owned(Arc::new(bytes), skip)
    }
}

/// Requests pages of 2 MB for what is read from the disk from now on, where kernel and file system support them; pages
/// already in the page cache stay as they are.
///
/// Weights are streamed, and small pages cost address translations and scattered memory: one core read 18 GB/s from a
/// file in small pages and 28 GB/s from the same file in large ones (AMD EPYC 9004 under KVM, Linux 6.18, ext4).
fn ask_for_large_pages(map: &Mmap) {
    #[cfg(target_os = "linux")]
    // A kernel that refuses leaves small pages, which work as well.
    let _ = map.advise(memmap2::Advice::HugePage);
    #[cfg(not(target_os = "linux"))]
    let _ = map;
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Static(bytes) => bytes,
            Self::Owned(bytes, skip) => &bytes[*skip..],
        }
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}

/// A range of [`Bytes`] that keeps them alive.
#[derive(Clone)]
pub(crate) struct Slice {
    bytes: Bytes,
    range: Range<usize>,
}

impl Slice {
    /// `range` lies inside `bytes`: the cursor that made it has checked it.
    pub(crate) fn new(bytes: &Bytes, range: Range<usize>) -> Self {
        debug_assert!(range.start <= range.end && range.end <= bytes.len());
        Self { bytes: bytes.clone(), range }
    }

    /// A slice that owns its bytes.
    pub(crate) fn owned(bytes: Vec<u8>) -> Self {
        let range = 0..bytes.len();
        Self { bytes: Bytes::Owned(Arc::new(bytes), 0), range }
    }
}

impl Deref for Slice {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.range.clone()]
    }
}
