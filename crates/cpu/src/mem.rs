//! Views through which workers write disjoint rows of a program's memory.

use std::cell::UnsafeCell;
use std::ops::Range;

use model::plan::Rows;

use super::pool::Pool;

/// A buffer of the plan in the arena: `[rows, width]` of 4-byte elements.
#[derive(Clone, Copy, Debug)]
pub struct View {
    ptr: *mut f32,
    pub rows: Rows,
    pub width: usize,
}

// SAFETY: a View is an address; each access states its own promise.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl View {
    /// # Safety
    /// `ptr` points to the buffer's memory, long enough for the limits of the program, for as long as the view is used.
    pub unsafe fn new(ptr: *mut f32, rows: Rows, width: usize) -> View {
        View { ptr, rows, width }
    }

    /// The first `rows` rows, for reading.
    ///
    /// # Safety
    /// `rows` is within the limits, and no code writes them while the slice lives.
    pub unsafe fn read<'a>(&self, rows: usize) -> &'a [f32] {
        // SAFETY: the caller's promise; the memory starts zeroed, so it is initialised.
        unsafe { std::slice::from_raw_parts(self.ptr, rows * self.width) }
    }

    /// The same numbers with each of `n` heads as a row.
    pub fn by_heads(self, n: usize) -> View {
        View { width: self.width / n, ..self }
    }

    /// Row `r`, for reading.
    ///
    /// # Safety
    /// As [`View::read`].
    pub unsafe fn row<'a>(&self, r: usize) -> &'a [f32] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.ptr.add(r * self.width), self.width) }
    }

    /// Row `r`, for writing.
    ///
    /// # Safety
    /// `r` is within the limits, and no other code reads or writes the row while the slice lives.
    pub unsafe fn row_mut<'a>(&self, r: usize) -> &'a mut [f32] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(r * self.width), self.width) }
    }

    /// The first `rows` rows, for writing.
    ///
    /// # Safety
    /// As [`View::row_mut`], for these rows.
    pub unsafe fn rows_mut<'a>(&self, rows: usize) -> &'a mut [f32] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, rows * self.width) }
    }

    /// Elements `range` of row `r`, for writing.
    ///
    /// # Safety
    /// As [`View::row_mut`], for these elements; `range` is within the width.
    pub unsafe fn part_mut<'a>(&self, r: usize, range: Range<usize>) -> &'a mut [f32] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(r * self.width + range.start), range.len()) }
    }

    /// Row `r` of a buffer of expert ids, for writing.
    ///
    /// # Safety
    /// As [`View::row_mut`].
    pub unsafe fn ids_mut<'a>(&self, r: usize) -> &'a mut [u32] {
        // SAFETY: the caller's promise; every bit pattern is a u32.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(r * self.width).cast(), self.width) }
    }

    /// The first `rows` rows of a buffer of expert ids.
    ///
    /// # Safety
    /// As [`View::read`].
    pub unsafe fn ids<'a>(&self, rows: usize) -> &'a [u32] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.ptr.cast(), rows * self.width) }
    }

    /// First element.
    pub fn ptr(&self) -> *mut f32 {
        self.ptr
    }
}

/// One value for each worker.
pub struct PerWorker<T>(Vec<UnsafeCell<T>>);

// SAFETY: a worker index is used by one thread at a time (see `get`).
unsafe impl<T: Send> Sync for PerWorker<T> {}

impl<T> PerWorker<T> {
    /// `make()` for each of `workers`, or its error.
    pub fn new<E>(workers: usize, mut make: impl FnMut() -> Result<T, E>) -> Result<PerWorker<T>, E> {
        Ok(PerWorker((0..workers).map(|_| make().map(UnsafeCell::new)).collect::<Result<_, E>>()?))
    }

    /// The value of `worker`.
    ///
    /// # Safety
    /// Called inside a chunk with the chunk's own worker index, and the reference does not outlive the chunk.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn get(&self, worker: usize) -> &mut T {
        // SAFETY: chunks that run at once have different workers (`Pool::run`).
        unsafe { &mut *self.0[worker].get() }
    }
}

/// Elements of work below which waking another thread costs more than it saves.
const GRAIN: usize = 16 << 10;

/// Pieces to cut `work` elements into: at least 1, and at most four per thread.
pub fn pieces(pool: &Pool, work: usize) -> usize {
    (work / GRAIN).clamp(1, 4 * pool.threads())
}

/// Runs `f(worker, rows)` over ranges that cover `0..n_rows`, cut so that a range has at least [`GRAIN`] elements of
/// work.
pub fn over_rows(pool: &mut Pool, n_rows: usize, row_work: usize, f: impl Fn(usize, Range<usize>) + Sync) {
    let n_chunks = pieces(pool, n_rows.saturating_mul(row_work)).min(n_rows);
    pool.run(n_chunks, &|worker, i| f(worker, i * n_rows / n_chunks..(i + 1) * n_rows / n_chunks));
}
