//! Shared read-only bytes in memory: the program's own data, or a buffer. Knows nothing of what the bytes mean.

use std::ops::{Deref, Range};
use std::sync::Arc;

/// Shared read-only bytes; cloning copies no data.
#[derive(Clone)]
pub(crate) enum Bytes {
    Static(&'static [u8]),
    /// Without the first few bytes, see [`Bytes::aligned`].
    Owned(Arc<Vec<u8>>, usize),
}

/// Every model in memory begins at a multiple of this many bytes, so that tensors are as aligned as in a mapped file.
pub(crate) const BASE_ALIGNMENT: usize = 64;

impl Bytes {
    /// Returns a buffer, wherever it lies.
    pub(crate) fn owned(bytes: Vec<u8>) -> Self {
        Self::Owned(Arc::new(bytes), 0)
    }

    /// Returns a buffer, moved to a multiple of [`BASE_ALIGNMENT`].
    pub(crate) fn aligned(mut bytes: Vec<u8>) -> Self {
        if bytes.as_ptr().addr().is_multiple_of(BASE_ALIGNMENT) {
            return Self::owned(bytes);
        }
        let len = bytes.len();
        bytes.reserve_exact(BASE_ALIGNMENT); // may move the buffer, so the address is taken again
        let addr = bytes.as_ptr().addr();
        let skip = addr.next_multiple_of(BASE_ALIGNMENT) - addr;
        bytes.resize(len + skip, 0);
        bytes.copy_within(..len, skip);
        Self::Owned(Arc::new(bytes), skip)
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
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
    /// `range` lies inside `bytes`: the cursor that made it has taken these bytes.
    pub(crate) fn new(bytes: &Bytes, range: Range<usize>) -> Self {
        debug_assert!(range.start <= range.end && range.end <= bytes.len());
        Self { bytes: bytes.clone(), range }
    }

    /// Returns a copy of a slice.
    pub(crate) fn owned(bytes: Vec<u8>) -> Self {
        let range = 0..bytes.len();
        Self { bytes: Bytes::owned(bytes), range }
    }
}

impl Deref for Slice {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.range.clone()]
    }
}
