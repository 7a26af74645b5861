//! Weights in memory of the program's own, for where the file that holds them is mapped in small pages.
//!
//! Linux keeps a file in the pages in which it was first cached, and many file systems know small ones only; memory of a
//! process can be had in pages of 2 MB. Who starts a program says what is worth the memory; this module moves it.

use super::mem::Arena;
use super::pool::Pool;
use super::program::{Mat, OpStep};
use crate::CompileError;

/// Weights that a program copies when it is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copied {
    /// None: all are read where they are mapped.
    Nothing,
    /// Those that every token goes through: no experts, and no embeddings, of which a token reads a row.
    Dense,
    /// Those and the experts.
    All,
}

/// Copies begin on cache lines.
const ALIGN: usize = 64;
/// Bytes that a thread copies at a time.
const PIECE: usize = 2 << 20;

/// A part of a plane and where it goes.
struct Piece {
    from: *const u8,
    to: *mut u8,
    len: usize,
}

// SAFETY: addresses; who copies states the promise.
unsafe impl Sync for Piece {}

impl Copied {
    /// The matrices of an op that are copied.
    fn of(self, op: &mut OpStep) -> Vec<&mut Mat> {
        match (self, op) {
            (Copied::Nothing, _) => Vec::new(),
            (_, OpStep::Linear { parts, .. }) => parts.iter_mut().map(|part| &mut part.w).collect(),
            (_, OpStep::GatedLinear { gate, up, .. }) => vec![gate, up],
            (_, OpStep::HeadLinear { w, .. }) => vec![w],
            (Copied::All, OpStep::Experts { mats, .. }) => vec![&mut mats.gate, &mut mats.up, &mut mats.down],
            (Copied::Dense, OpStep::Experts { .. }) => Vec::new(),
            (_, OpStep::Embed { .. }) => Vec::new(),
            // Vectors are decoded when a plan is compiled.
            (
                _,
                OpStep::RmsNorm { .. }
                | OpStep::HeadNorm { .. }
                | OpStep::Rope { .. }
                | OpStep::SplitHeads { .. }
                | OpStep::JoinHeads { .. }
                | OpStep::GatedAct { .. }
                | OpStep::Add { .. }
                | OpStep::KvAppend { .. }
                | OpStep::Attention(_)
                | OpStep::CausalConv(_)
                | OpStep::DeltaNet(_)
                | OpStep::Route { .. }
                | OpStep::Combine { .. }
                | OpStep::Select { .. }
                | OpStep::Scale { .. }
                | OpStep::Softcap { .. }
                | OpStep::SigmoidGate { .. }
                | OpStep::DecayBeta(_)
                | OpStep::GatedNorm { .. },
            ) => Vec::new(),
        }
    }

    /// Puts what `f` gives in place of every plane that is copied.
    fn replace(self, ops: &mut [OpStep], mut f: impl FnMut(*const [u8]) -> *const [u8]) {
        ops.iter_mut().flat_map(|op| self.of(op)).for_each(|mat| mat.replace(&mut f));
    }

    /// Moves the weights of `ops` to memory that is returned, if there are any to move.
    ///
    /// # Safety
    /// The planes of all matrices are readable, and the ops are not used once the memory is gone.
    ///
    /// # Errors
    /// When the memory cannot be had; the ops are as they were then.
    pub unsafe fn copy(self, ops: &mut [OpStep], pool: &mut Pool) -> Result<Option<Arena>, CompileError> {
        let mut bytes = 0usize;
        self.replace(ops, |plane| {
            bytes = bytes.saturating_add(plane.len().next_multiple_of(ALIGN));
            plane
        });
        if bytes == 0 {
            return Ok(None);
        }
        let arena = Arena::new("copies of weights", bytes)?;
        let (mut pieces, mut at) = (Vec::new(), 0);
        self.replace(ops, |plane| {
            // SAFETY: the arena has room for all planes, each on cache lines of its own.
            let to = unsafe { arena.ptr().add(at) };
            at += plane.len().next_multiple_of(ALIGN);
            pieces.extend((0..plane.len()).step_by(PIECE).map(|i| Piece {
                from: plane.cast::<u8>().wrapping_add(i),
                to: to.wrapping_add(i),
                len: PIECE.min(plane.len() - i),
            }));
            std::ptr::slice_from_raw_parts(to, plane.len())
        });
        pool.run(pieces.len(), &|_, i| {
            let Piece { from, to, len } = pieces[i];
            // SAFETY: readable by the caller's promise; pieces are disjoint parts of the arena, which nobody else uses yet.
            unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
        });
        Ok(Some(arena))
    }
}
