//! Texts that a user names: files and stdin, read within bounds.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use anyhow::{Context, Result, ensure};

/// Longest text read, in bytes.
const MAX_TEXT_BYTES: u64 = 64 << 20;

/// A text file; `-` is a file of that name.
///
/// # Errors
/// It cannot be read, is not UTF-8, or is longer than 64 MiB.
pub fn text(path: &Path) -> Result<String> {
    let name = || format!("read {}", path.display());
    limited(File::open(path).with_context(name)?, MAX_TEXT_BYTES).with_context(name)
}

/// What comes through stdin, up to its end.
///
/// # Errors
/// As [`text`].
pub fn stdin() -> Result<String> {
    limited(io::stdin().lock(), MAX_TEXT_BYTES).context("read stdin")
}

/// The bytes of a regular file, however many; of anything else as many as a text may have.
///
/// # Errors
/// It cannot be read, or is too long.
pub fn bytes(path: &Path) -> Result<Vec<u8>> {
    let name = || format!("read {}", path.display());
    let file = File::open(path).with_context(name)?;
    let is_file = file.metadata().with_context(name)?.is_file();
    limited_bytes(file, if is_file { u64::MAX - 1 } else { MAX_TEXT_BYTES }).with_context(name)
}

fn limited(from: impl Read, limit: u64) -> Result<String> {
    String::from_utf8(limited_bytes(from, limit)?).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        anyhow::anyhow!("it is not UTF-8 at byte {at}")
    })
}

fn limited_bytes(from: impl Read, limit: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(limit + 1).read_to_end(&mut bytes)?;
    ensure!(bytes.len() as u64 <= limit, "it has more than {} MiB, which is the longest text", limit >> 20);
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
    }
}
