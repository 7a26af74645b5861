//! Reads little-endian fields off the front of untrusted bytes. Knows nothing of GGUF.

/// Result of a read; the error omits the file's name.
pub(super) type Parsed<T> = Result<T, String>;

/// A position in the first bytes of a file, checked before every step.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    file_bytes: usize, // at least bytes.len()
    pos: usize,
    is_short: bool,
}

impl<'a> Cursor<'a> {
    /// Reads `bytes`, with which a file of `file_bytes` bytes begins.
    pub(super) fn new(bytes: &'a [u8], file_bytes: usize) -> Self {
        Self { bytes, file_bytes, pos: 0, is_short: false }
    }

    /// Returns whether a read failed only because `bytes` are not the whole file: it may succeed with more of them.
    pub(super) fn is_short(&self) -> bool {
        self.is_short
    }

    /// Bytes taken so far.
    pub(super) fn pos(&self) -> usize {
        self.pos
    }

    /// Length of the file.
    pub(super) fn file_bytes(&self) -> usize {
        self.file_bytes
    }

    /// Bytes of the file behind those taken.
    fn left(&self) -> usize {
        self.file_bytes - self.pos
    }

    /// Most things of at least `min_bytes` each that can follow in the bytes at hand: what may be allocated for them.
    pub(super) fn at_hand(&self, min_bytes: usize) -> usize {
        (self.bytes.len() - self.pos) / min_bytes
    }

    /// Takes `len` bytes; `what` names them in the error.
    pub(super) fn take(&mut self, len: usize, what: &str) -> Parsed<&'a [u8]> {
        if len > self.left() {
            return Err(format!("{what} at byte {} needs {len} bytes, {} are left in the file", self.pos, self.left()));
        }
        let Some(taken) = self.bytes[self.pos..].get(..len) else {
            self.is_short = true;
            return Err(format!("{what} at byte {} is beyond the available bytes", self.pos));
        };
        self.pos += len;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Parsed<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N, what)?);
        Ok(out)
    }

    pub(super) fn u32(&mut self, what: &str) -> Parsed<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Parsed<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// Reads the count of items of at least `min_bytes` each; fails when the remaining bytes cannot hold that many.
    pub(super) fn count(&mut self, what: &str, min_bytes: usize) -> Parsed<usize> {
        let count = self.u64(what)?;
        self.fits(count, min_bytes).ok_or_else(|| {
            format!(
                "{what} is {count}, of at least {min_bytes} bytes each, but {} bytes are left in the file",
                self.left()
            )
        })
    }

    fn fits(&self, count: u64, min_bytes: usize) -> Option<usize> {
        let count = usize::try_from(count).ok()?;
        (count.checked_mul(min_bytes)? <= self.left()).then_some(count)
    }

    /// Reads a text: its length as u64, then its bytes. A vocabulary has some 300,000 of them, so the error is made in
    /// a separate function.
    #[inline]
    pub(super) fn text(&mut self, what: &str) -> Parsed<&'a [u8]> {
        if let Some((len, rest)) = self.bytes[self.pos..].split_first_chunk()
            && let Ok(len) = usize::try_from(u64::from_le_bytes(*len))
            && let Some(text) = rest.get(..len)
        {
            self.pos += 8 + len;
            return Ok(text);
        }
        Err(self.short_text(what))
    }

    #[cold]
    fn short_text(&mut self, what: &str) -> String {
        let start = self.pos;
        match self.u64(what) {
            Ok(len) => {
                self.is_short = len <= self.left() as u64;
                format!("{what} at byte {start} is {len} bytes long, {} are left in the file", self.left())
            }
            Err(what) => what,
        }
    }
}
