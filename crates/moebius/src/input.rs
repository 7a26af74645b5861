//! Files that the program reads: texts that a user names, stdin, settings, and files of caches. All within bounds.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

/// Longest text read, in bytes.
const MAX_TEXT_BYTES: u64 = 64 << 20;
/// How long a pipe on stdin may say nothing before the user is told.
const SILENT_TIME: Duration = Duration::from_secs(3);
/// How long a pipe may keep its text back.
const PIPE_TIME: Duration = Duration::from_secs(10);

/// Returns a text file; `-` is a file of that name.
///
/// # Errors
/// It cannot be read, is not UTF-8, or is longer than 64 MiB.
pub fn text(path: &Path) -> Result<String> {
    let name = || format!("failed to read {}", path.display());
    limited(File::open(path).with_context(name)?, MAX_TEXT_BYTES).with_context(name)
}

/// Returns the bytes of a file that a user names.
///
/// # Errors
/// It cannot be read, or is longer.
pub fn bytes_up_to(path: &Path, max_bytes: u64) -> Result<Vec<u8>> {
    let name = || format!("failed to read {}", path.display());
    limited_bytes(File::open(path).with_context(name)?, max_bytes).with_context(name)
}

/// Returns a short file that a user names, such as one of keys. A pipe may be one, but does not hold the program up for long.
///
/// # Errors
/// It cannot be read, is not UTF-8, has more than `max_bytes`, or is a pipe through which nothing comes.
pub fn short(path: &Path, max_bytes: u64) -> io::Result<String> {
    text_of(Unhurried { file: open(path)?, end: Instant::now() + PIPE_TIME }, max_bytes)
}

/// Returns a short file that the program finds by itself, such as one of a cache. Nothing is read of any kind but a
/// regular one.
///
/// # Errors
/// It cannot be read, is not UTF-8, is no regular file, or has more than `max_bytes`.
pub fn found(path: &Path, max_bytes: u64) -> io::Result<String> {
    text_of(open_regular(path)?, max_bytes)
}

/// Opens a regular file to read it.
///
/// # Errors
/// It cannot be opened, or is of another kind.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let file = open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file")),
    }
}

/// Opens a file to read it, and does not wait for the other end of a pipe.
fn open(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, rustix::fs::OFlags::NONBLOCK.bits().cast_signed());
    options.open(path)
}

/// A file that may be a pipe, which is read until a moment.
struct Unhurried {
    file: File,
    end: Instant,
}

impl Read for Unhurried {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.file.read(buf) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < self.end => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(io::Error::new(io::ErrorKind::TimedOut, "nothing comes through it"));
                }
                read => return read,
            }
        }
    }
}

/// Returns the text of a short file.
fn text_of(from: impl Read, max_bytes: u64) -> io::Result<String> {
    let bad = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
    let mut bytes = Vec::new();
    from.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        return Err(bad(format!("it has more than {max_bytes} bytes")));
    }
    String::from_utf8(bytes).map_err(|e| bad(format!("it is not UTF-8 at byte {}", e.utf8_error().valid_up_to())))
}

/// Returns what comes through stdin, up to its end.
///
/// # Errors
/// As [`text`].
pub fn stdin() -> Result<String> {
    limited(io::stdin().lock(), MAX_TEXT_BYTES).context("failed to read stdin")
}

/// Returns what comes through stdin next to a prompt that is there already; none from a terminal, or where stdin is
/// neither a file nor a pipe. Says so where a pipe says nothing for a while: it may be one that is never closed.
///
/// # Errors
/// As [`text`].
pub fn piped() -> Result<Option<String>> {
    if io::stdin().is_terminal() || !is_file_or_pipe() {
        return Ok(None);
    }
    let (done, waits) = std::sync::mpsc::channel::<()>();
    // Without a thread the user is not told.
    let _ = std::thread::Builder::new().spawn(move || {
        if waits.recv_timeout(SILENT_TIME) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            crate::out::note!("moebius: reading stdin, which follows the prompt; < /dev/null leaves it out");
        }
    });
    let text = stdin();
    drop(done);
    text.map(Some)
}

/// Returns whether stdin is something that has an end.
#[cfg(unix)]
fn is_file_or_pipe() -> bool {
    let kind = rustix::fs::fstat(io::stdin()).map(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode));
    kind.is_ok_and(|kind| matches!(kind, rustix::fs::FileType::RegularFile | rustix::fs::FileType::Fifo))
}

#[cfg(windows)]
fn is_file_or_pipe() -> bool {
    sys::windows::is_file_or_pipe(&io::stdin())
}

#[cfg(not(any(unix, windows)))]
fn is_file_or_pipe() -> bool {
    true
}

/// Returns the bytes of a regular file, however many; of anything else as many as a text may have.
///
/// # Errors
/// It cannot be read, or is too long.
pub fn bytes(path: &Path) -> Result<Vec<u8>> {
    let name = || format!("failed to read {}", path.display());
    let file = File::open(path).with_context(name)?;
    let is_file = file.metadata().with_context(name)?.is_file();
    limited_bytes(file, if is_file { u64::MAX - 1 } else { MAX_TEXT_BYTES }).with_context(name)
}

fn limited(from: impl Read, limit: u64) -> Result<String> {
    let mut bytes = limited_bytes(from, limit)?;
    ensure!(!bytes.starts_with(b"\xff\xfe"), "it is UTF-16, as PowerShell writes; save it as UTF-8");
    // The mark of UTF-8 that programs on Windows put in front is no text.
    if bytes.starts_with(b"\xef\xbb\xbf") {
        bytes.drain(..3);
    }
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        anyhow::anyhow!("it is not UTF-8 at byte {at}")
    })
}

fn limited_bytes(from: impl Read, limit: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(limit + 1).read_to_end(&mut bytes)?;
    ensure!(bytes.len() as u64 <= limit, "it has more than {} MiB, the maximum for a text", limit >> 20);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_bounded() {
        assert_eq!(limited(&b"abc"[..], 3).unwrap(), "abc");
        assert!(limited(&b"abcd"[..], 3).is_err());
        let error = limited(&b"ab\xff"[..], 3).unwrap_err().to_string();
        assert_eq!(error, "it is not UTF-8 at byte 2");
        assert_eq!(limited(&b"\xef\xbb\xbfab"[..], 5).unwrap(), "ab");
        assert!(limited(&b"\xff\xfea\0"[..], 4).unwrap_err().to_string().contains("UTF-16"));
    }

    /// What has no end, and what never begins.
    #[cfg(unix)]
    #[test]
    fn devices_and_pipes_hold_nothing_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let why = |read: io::Result<String>| read.unwrap_err().to_string();
        std::fs::write(&path, "text").unwrap();
        assert_eq!([short(&path, 4).unwrap(), found(&path, 4).unwrap()], ["text", "text"]);
        assert_eq!(why(short(&path, 3)), "it has more than 3 bytes");
        assert_eq!(why(found(&path, 3)), "it has more than 3 bytes");
        let zero = folder.path().join("zero");
        std::os::unix::fs::symlink("/dev/zero", &zero).unwrap();
        assert_eq!(why(short(&zero, 1 << 20)), "it has more than 1048576 bytes");
        assert_eq!(why(found(&zero, 1 << 20)), "it is no regular file");
        assert_eq!(why(found(folder.path(), 9)), "it is no regular file");
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        assert_eq!(why(found(&pipe, 9)), "it is no regular file");
        assert_eq!(short(&pipe, 9).unwrap(), "");
        // A writer that takes its time, as a shell's `<(..)` may.
        let to = pipe.clone();
        let writer = std::thread::spawn(move || {
            let mut file = File::options().read(true).write(true).open(to).unwrap();
            std::thread::sleep(Duration::from_millis(100));
            io::Write::write_all(&mut file, b"late").unwrap();
            std::thread::sleep(Duration::from_millis(100));
        });
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(short(&pipe, 9).unwrap(), "late");
        writer.join().unwrap();
    }
}
