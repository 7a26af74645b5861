//! A whole file mapped read-only, guarded against faults by [`crate::fault`].

use std::fs;
use std::io;
use std::ops::Deref;

use memmap2::Mmap;

use crate::fault::Watch;

/// A mapped file.
pub(crate) struct Mapping {
    // Dropped before the map, so that the handler never touches memory that is no longer ours.
    watch: Watch,
    map: Mmap,
}

impl Mapping {
    /// Maps a file. Reads nothing yet.
    ///
    /// # Errors
    /// The operating system refuses, or the file is no longer `len` bytes long.
    pub(crate) fn new(file: &fs::File, len: usize) -> io::Result<Self> {
        // SAFETY: the map is private, read-only and only ever seen as `&[u8]`, for which every bit pattern is valid.
        // Its bytes should not change while it lives: this process never writes to a model file. Another process can;
        // no length or offset is taken from the map, so a change gives wrong numbers and never an access out of
        // bounds. A file that is cut becomes zeros (`fault`) and an error of `Checkpoint::intact`.
        let map = unsafe { Mmap::map(file)? };
        if map.len() != len {
            return Err(io::Error::other(format!("holds {} bytes now, {len} when it was opened", map.len())));
        }
        request_large_pages(&map);
        // SAFETY: the range is this map, read-only, and lives until `watch` is dropped.
        let watch = unsafe { Watch::new(map.as_ptr().addr(), map.len())? };
        Ok(Self { watch, map })
    }

    /// Offset of the first byte that could not be read, if there was one.
    pub(crate) fn fault(&self) -> Option<usize> {
        self.watch.fault()
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

impl std::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes mapped", self.len())
    }
}

/// Requests that what is read from the disk from now on is cached and mapped in pages of 2 MB, where kernel and file
/// system can; what the page cache already holds stays as it is.
///
/// Weights are streamed, and a stream of small pages waits for translations and for scattered memory: one core read
/// 18 GB/s from a file in small pages and 28 GB/s from the same file in large ones (AMD EPYC 9004 under KVM, Linux
/// 6.18, ext4).
fn request_large_pages(map: &Mmap) {
    #[cfg(target_os = "linux")]
    // A kernel that refuses leaves small pages, which work as well.
    let _ = map.advise(memmap2::Advice::HugePage);
    #[cfg(not(target_os = "linux"))]
    let _ = map;
}

/// Bytes of a page of memory.
pub(crate) fn page_bytes() -> usize {
    #[cfg(unix)]
    // SAFETY: asks for a number.
    return usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
    #[cfg(not(unix))]
    4096
}
