//! The matrices of a plan where the kernels read them: in their mapped files, or copied to memory of the program.
//!
//! Linux keeps a file in the pages in which it was first cached, and many file systems know small ones only; memory of
//! a process has pages of 2 MB where it asks. [`backend::residency`] says what is copied; this module copies it, before
//! any op is bound. Copies are read by calls, so that they touch no mapped page.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use checkpoint::{Checkpoint, Extent, Extents};
use model::plan::{Plan, Weight, WeightDecl};
use quant::Planes;

use super::pool::Pool;
use backend::residency::Residencies;
use backend::{CompileError, weights};
use sys::arena::Arena;

/// Every plane of a copy begins on a cache line.
const ALIGN: usize = 64;
/// Bytes that a thread copies at a time.
const PIECE: usize = 2 << 20;

/// The copies of a program, and where the rest lies.
pub struct Matrices<'a> {
    plan: &'a Plan,
    checkpoint: &'a Checkpoint,
    /// The copied matrices of each weight, `[weights][n_stack]`, as offsets into `arena`; empty where a weight is
    /// mapped.
    copies: Vec<Vec<Copy>>,
    arena: Arena,
}

/// The planes of a copied matrix.
#[derive(Clone)]
struct Copy {
    q: Range<usize>,
    scales: Range<usize>,
    biases: Range<usize>,
}

/// A part of a plane and where it goes.
struct Piece {
    from: Extent,
    to: *mut u8,
}

// SAFETY: an address; the code that writes there states why it may.
unsafe impl Sync for Piece {}

/// Bytes that the copy of a plane takes.
fn plane_bytes(len: usize) -> usize {
    len.checked_next_multiple_of(ALIGN).unwrap_or(usize::MAX)
}

/// Bytes that the copy of a matrix, or of a stack of them, takes.
pub fn bytes_of(decl: &WeightDecl) -> usize {
    let n_stack = if decl.shape.len() > 2 { decl.shape[0] } else { 1 };
    let k = decl.shape.last().copied().unwrap_or(0);
    let n_rows = decl.n_values().checked_div(k.saturating_mul(n_stack)).unwrap_or(0); // of one matrix
    let Some(len) = decl.dtype.plane_bytes(k).and_then(|row| row.times(n_rows)) else { return usize::MAX };
    let matrix = [len.q, len.scales, len.biases].into_iter().map(plane_bytes).fold(0, usize::saturating_add);
    matrix.saturating_mul(n_stack)
}

impl<'a> Matrices<'a> {
    /// Copies what `residencies` say, with all threads of the pool.
    ///
    /// # Errors
    /// The checkpoint does not hold what the plan wants or cannot be read, or there is no memory.
    pub fn new(
        plan: &'a Plan,
        checkpoint: &'a Checkpoint,
        residencies: &Residencies,
        pool: &mut Pool,
    ) -> Result<Self, CompileError> {
        let mut copies = vec![Vec::new(); plan.weights.len()];
        let (mut sources, mut total) = (Vec::new(), 0usize);
        for w in residencies.copied_matrices() {
            for extents in weights::matrix_extents(checkpoint, plan.weight(w))? {
                let mut place = |len: usize| {
                    let begin = total;
                    total = total.saturating_add(plane_bytes(len));
                    begin..begin.saturating_add(len)
                };
                let len = extents.len();
                let copy = Copy { q: place(len.q), scales: place(len.scales), biases: place(len.biases) };
                sources.push((extents, copy.clone()));
                copies[w.0 as usize].push(copy);
            }
        }
        let arena = Arena::new("copies of weights", total)?;
        let pieces: Vec<Piece> = sources.iter().flat_map(|(from, to)| pieces(from, to, &arena)).collect();
        let failed = Mutex::new(None);
        pool.run(pieces.len(), &|_, i| {
            let Piece { from, to } = &pieces[i];
            // SAFETY: pieces are disjoint parts of the arena, which is zeroed and not shared yet.
            let out = unsafe { std::slice::from_raw_parts_mut(*to, from.len) };
            if let Err(error) = checkpoint.files()[from.file].read_at(from.offset, out) {
                failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        });
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error.into()),
            None => Ok(Self { plan, checkpoint, copies, arena }),
        }
    }

    /// The rows of each matrix of a weight, where they lie. The bytes of copies live as long as the arena that
    /// [`Matrices::into_arena`] returns.
    ///
    /// # Errors
    /// As [`weights::matrices`].
    pub fn planes(&self, w: Weight) -> Result<Vec<Planes<'_>>, CompileError> {
        match &self.copies[w.0 as usize][..] {
            [] => weights::matrices(self.checkpoint, self.plan.weight(w)),
            copies => Ok(copies.iter().map(|copy| self.copied(copy)).collect()),
        }
    }

    fn copied(&self, copy: &Copy) -> Planes<'_> {
        // SAFETY: the arena holds all copies, which `new` has written, and is written to no more.
        let plane = |range: &Range<usize>| unsafe {
            std::slice::from_raw_parts(self.arena.ptr().add(range.start).cast_const(), range.len())
        };
        Planes { q: plane(&copy.q), scales: plane(&copy.scales), biases: plane(&copy.biases) }
    }

    /// The memory of the copies, which the caller keeps as long as it uses them.
    pub fn into_arena(self) -> Arena {
        self.arena
    }
}

/// Cuts the planes of a matrix into pieces of work.
fn pieces(from: &Extents, to: &Copy, arena: &Arena) -> Vec<Piece> {
    let planes = [(Some(&from.q), &to.q), (from.scales.as_ref(), &to.scales), (from.biases.as_ref(), &to.biases)];
    let planes = planes.into_iter().filter_map(|(from, to)| Some((from?, to.start)));
    let cut = |(from, to): (&Extent, usize)| {
        let piece = |i: usize| Piece {
            from: Extent { file: from.file, offset: from.offset + i, len: PIECE.min(from.len - i) },
            to: arena.ptr().wrapping_add(to + i),
        };
        (0..from.len).step_by(PIECE).map(piece).collect::<Vec<_>>()
    };
    planes.flat_map(cut).collect()
}
