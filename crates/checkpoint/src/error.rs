//! The error of this crate, and how names from files are escaped for messages.

use std::io;

/// Why a model file cannot be opened, read or written. Each is a whole sentence.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum Error {
    /// The operating system refused.
    #[error("failed to open {file}: {source}")]
    Io { file: String, source: io::Error },
    /// The operating system refused to read bytes that were there when the file was opened.
    #[error("failed to read {file}: {source}")]
    Read { file: String, source: io::Error },
    /// A mapped file could not be read where it was used, and was taken for zeros there.
    #[error("failed to read {file} at byte {offset}: {why}")]
    Lost { file: String, offset: usize, why: String },
    /// The file as a whole is not one we read.
    #[error("failed to open {file}: {what}")]
    File { file: String, what: String },
    /// A metadata entry of the file is broken.
    #[error("failed to open {file}: key {key}: {what}")]
    Key { file: String, key: String, what: String },
    /// A tensor's entry is broken or contradicts the file's length.
    #[error("failed to open {file}: tensor {tensor}: {what}")]
    Tensor { file: String, tensor: String, what: String },
    /// The file is valid, but the requested tensor is of an unsupported kind.
    #[error("failed to read {file}: tensor {tensor}: {why}")]
    Unreadable { file: String, tensor: String, why: String },
    /// The file is valid, but lacks a key that the model needs.
    #[error("failed to read {file}: key {key}: missing, expected {wanted}")]
    Missing { file: String, key: String, wanted: &'static str },
    /// The file is valid, but a key holds something other than what the model needs.
    #[error("failed to read {file}: key {key}: found {found}, expected {wanted}")]
    WrongType { file: String, key: String, wanted: &'static str, found: String },
    /// What a writer was given does not make a valid file.
    #[error("failed to write GGUF: {what}")]
    Unwritable { what: String },
    /// The sink of a writer refused.
    #[error("failed to write GGUF: {source}")]
    Write { source: io::Error },
}

impl Error {
    pub(crate) fn file(file: &str, what: impl Into<String>) -> Self {
        Self::File { file: file.into(), what: what.into() }
    }

    pub(crate) fn key(file: &str, key: &str, what: impl Into<String>) -> Self {
        Self::Key { file: file.into(), key: printable(key.as_bytes()), what: what.into() }
    }

    pub(crate) fn tensor(file: &str, tensor: &str, what: impl Into<String>) -> Self {
        Self::Tensor { file: file.into(), tensor: printable(tensor.as_bytes()), what: what.into() }
    }
}

/// Text of which nothing is hidden: control characters, marks of direction and all others that do not print are escaped
/// as Rust writes them, quotes and backslashes stay. For text out of files on its way to a terminal.
pub fn visible(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            ' '..='~' => out.push(c),
            _ => {
                // Behind a letter, so that combining marks stay as they are.
                let mut pair = [b'a', 0, 0, 0, 0];
                let len = c.encode_utf8(&mut pair[1..]).len();
                let pair = std::str::from_utf8(&pair[..1 + len]).unwrap_or_default();
                out.extend(pair.escape_debug().skip(1));
            }
        }
    }
    out
}

/// Returns what a file is whose first bytes are those of what is often stored in a model's place; empty otherwise.
pub(crate) fn mistaken(head: &[u8]) -> &'static str {
    match head.first_chunk().map(|head: &[u8; 4]| head.to_ascii_lowercase()).as_deref() {
        Some(b"vers") => " (it is a pointer of Git LFS: `git lfs pull` fetches the file)",
        Some(b"<!do" | b"<htm") => " (it is a web page: the download went wrong)",
        _ => "",
    }
}

/// Text from a file, for a message: visible, cut to a line.
pub(crate) fn printable(bytes: &[u8]) -> String {
    const LIMIT: usize = 80;
    let head = &bytes[..bytes.len().min(4 * LIMIT)];
    let text = String::from_utf8_lossy(head);
    let mut out = visible(&text.chars().take(LIMIT).collect::<String>());
    if head.len() < bytes.len() || text.chars().nth(LIMIT).is_some() {
        out.push('…');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_hidden() {
        let text = "\u{1b}[31m\u{7}\r\n\t\0\u{7f}\u{9b}\u{85}\u{ad}\u{61c}\u{200b}\u{200f}\u{2028}\u{202e}\u{2066}\u{feff}\u{e0041}";
        let shown = visible(text);
        assert!(shown.bytes().all(|b| (b' '..=b'~').contains(&b)), "{shown:?}");
        let plain = "a \"b\" 'c' \\ é e\u{301} 日本 😀 §";
        assert_eq!(visible(plain), plain);
        assert_eq!(printable("\u{202e}x".repeat(100).as_bytes()).chars().last(), Some('…'));
    }
}
