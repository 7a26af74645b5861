//! A second handle of a model file whose reads bypass the system's cache, where system and file system can: for weights
//! that the caller caches by itself.

use std::fs;
use std::io;

use crate::Error;
use crate::file::{File, Identity};

/// What offsets, lengths and addresses of direct reads are multiples of, in bytes: no smaller than the blocks of any
/// disk in use.
pub const BLOCK: usize = 4096;

#[cfg(not(windows))]
type Handle = fs::File;
/// Its reads do not wait for each other.
#[cfg(windows)]
type Handle = sys::windows::Unbuffered;

/// A file, opened for direct reads.
#[derive(Debug)]
pub struct Direct {
    file: Handle,
    name: String,
}

impl Direct {
    /// Returns a second handle of `file`; `None` where the system or the file system has no direct reads, and for a
    /// model in memory.
    pub fn open(file: &File) -> Option<Self> {
        let (held, identity) = file.on_disk()?;
        let file_direct = reopen(held)?;
        #[cfg(windows)]
        let same = Identity::of(file_direct.file());
        #[cfg(not(windows))]
        let same = Identity::of(&file_direct);
        let same = same.is_ok_and(|now| now == identity);
        same.then(|| Self { file: file_direct, name: file.path().display().to_string() })
    }

    /// Reads `len` bytes from byte `offset` on, to `room[offset % BLOCK..]`. The bytes of `room` around them are
    /// overwritten.
    ///
    /// # Errors
    /// The file ends before, or the disk fails.
    ///
    /// # Panics
    /// When `room` does not begin at a multiple of [`BLOCK`], or ends before the last block that holds a byte.
    pub fn read_at(&self, offset: usize, len: usize, room: &mut [u8]) -> Result<(), Error> {
        let (from, wanted) = (offset / BLOCK * BLOCK, offset % BLOCK + len);
        assert!(room.as_ptr().addr().is_multiple_of(BLOCK), "room for a direct read begins inside a block");
        let room = &mut room[..wanted.next_multiple_of(BLOCK)];
        read_blocks(&self.file, from, wanted, room).map_err(|source| Error::Read { file: self.name.clone(), source })
    }
}

/// Reads until `wanted` bytes are in `room`. A read that ends inside a block has met the end of the file.
fn read_blocks(file: &Handle, from: usize, wanted: usize, room: &mut [u8]) -> io::Result<()> {
    let mut held = 0;
    while held < wanted {
        match read_at(file, &mut room[held..], (from + held) as u64) {
            Ok(n) if held + n < wanted && (n == 0 || !n.is_multiple_of(BLOCK)) => {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            Ok(n) => held += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(unix)]
fn read_at(file: &Handle, out: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, out, offset)
}

#[cfg(windows)]
fn read_at(file: &Handle, out: &mut [u8], offset: u64) -> io::Result<usize> {
    file.read_at(out, offset)
}

#[cfg(not(any(unix, windows)))]
fn read_at(_: &Handle, _: &mut [u8], _: u64) -> io::Result<usize> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Returns the file that is open, whatever its name stands for by now.
#[cfg(target_os = "linux")]
fn reopen(file: &fs::File) -> Option<Handle> {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).ok()
}

#[cfg(windows)]
fn reopen(file: &fs::File) -> Option<Handle> {
    Handle::open(file).ok()
}

#[cfg(not(any(target_os = "linux", windows)))]
fn reopen(_: &fs::File) -> Option<Handle> {
    None
}
