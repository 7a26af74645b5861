//! Where things lie in a GPU's memory: pieces side by side in few buffers, none larger than the GPU allows.

use super::{Buf, Gpu, GpuError, Span};

/// Alignment of every piece, in bytes.
const ALIGN: u64 = 256;

/// Pieces of one purpose, laid out before anything is allocated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Buffer, first byte and length of each piece.
    pieces: Vec<(usize, u64, u64)>,
    /// Length of each buffer.
    buffers: Vec<u64>,
}

impl Layout {
    /// Adds a piece and returns its number. One that no buffer can hold gets a buffer of its own, which will fail.
    pub fn add(&mut self, len: usize, max_buffer: u64) -> usize {
        let len = len as u64;
        let fits = |used: &u64| used.checked_add(len).is_some_and(|end| end <= max_buffer);
        if !self.buffers.last().is_some_and(fits) {
            self.buffers.push(0);
        }
        let buffer = self.buffers.len() - 1;
        let used = &mut self.buffers[buffer];
        self.pieces.push((buffer, *used, len));
        *used = used.saturating_add(len).checked_next_multiple_of(ALIGN).unwrap_or(u64::MAX);
        self.pieces.len() - 1
    }

    /// Bytes of a piece with the gap behind it.
    pub fn len(&self, piece: usize) -> usize {
        usize::try_from(self.pieces[piece].2.saturating_add(ALIGN - 1) / ALIGN * ALIGN).unwrap_or(usize::MAX)
    }

    /// Bytes of all buffers.
    pub fn bytes(&self) -> usize {
        self.buffers.iter().fold(0, |sum: usize, &len| sum.saturating_add(usize::try_from(len).unwrap_or(usize::MAX)))
    }

    /// Allocates the buffers and returns where each piece is.
    pub fn allocate(&self, gpu: &mut dyn Gpu, what: &'static str) -> Result<Vec<Span>, GpuError> {
        let sizes = self.buffers.iter().map(|&len| len.max(ALIGN));
        let bufs: Vec<Buf> = sizes.map(|len| gpu.alloc(len, what)).collect::<Result<_, _>>()?;
        Ok(self.pieces.iter().map(|&(buffer, at, len)| Span { buf: bufs[buffer], at, len }).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_lie_apart_in_buffers_of_the_largest_size() {
        let mut layout = Layout::default();
        let lens = [1000, 24, 0, 3000, 1, 4096, 5000];
        let pieces: Vec<usize> = lens.iter().map(|&len| layout.add(len, 4096)).collect();
        assert_eq!(pieces, [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(layout.buffers, [1280, 3328, 4096, 5120]);
        for (i, &(buffer, at, len)) in layout.pieces.iter().enumerate() {
            assert_eq!(len as usize, lens[i]);
            assert!(at % ALIGN == 0 && at + len <= layout.buffers[buffer]);
            let apart = |&(other, from, n): &(usize, u64, u64)| other != buffer || from + n <= at || at + len <= from;
            assert!(layout.pieces[..i].iter().all(apart), "{i}");
        }
        assert_eq!(layout.bytes(), 1280 + 3328 + 4096 + 5120);
    }
}
