//! `rope`: rotates pairs of each head's first dims by angles that depend on the position.

use model::plan::{N_AXES, RopeDecl, RopePairing, Rows};

use super::super::mem::{View, over_rows};
use super::super::pool::Pool;
use super::super::program::Run;
use backend::CompileError;
use backend::rope::Angles;
use sys::arena::zeroed;

/// Cosines and sines of the step's tokens for one rotary embedding, made once a step.
pub struct RopeTable {
    angles: Angles,
    rows: Vec<f32>, // [max_tokens, 2, n_pairs]: cosines, then sines
}

impl RopeTable {
    /// Bytes that [`RopeTable::new`] allocates.
    pub fn bytes(decl: &RopeDecl, max_tokens: usize) -> usize {
        let half = decl.inv_freq.len();
        max_tokens.saturating_mul(2 * half * 4).saturating_add(half * 8)
    }

    /// A table for steps of up to `max_tokens` tokens.
    pub fn new(decl: &RopeDecl, max_tokens: usize) -> Result<RopeTable, CompileError> {
        let angles = Angles::new(decl);
        let rows = zeroed("rotary angles", max_tokens.saturating_mul(2 * angles.n_pairs()))?;
        Ok(RopeTable { angles, rows })
    }

    /// Fills the rows of tokens at these positions.
    pub fn fill(&mut self, pool: &mut Pool, places: &[[u32; N_AXES]]) {
        let half = self.angles.n_pairs();
        // SAFETY: the rows lie in `self.rows`, which is borrowed for the whole call.
        let table = unsafe { View::new(self.rows.as_mut_ptr(), Rows::Tokens, 2 * half) };
        let angles = &self.angles;
        over_rows(pool, places.len(), 64 * half, |_, rows| {
            for t in rows {
                // SAFETY: rows are disjoint between chunks.
                let (cos, sin) = unsafe { table.row_mut(t) }.split_at_mut(half);
                angles.fill_at(places[t], cos, sin);
            }
        });
    }
}

/// Rotates `x` in place.
pub fn rope(run: &mut Run, x: View, table: &RopeTable, d_head: usize) {
    let half = table.angles.n_pairs();
    over_rows(run.pool, run.step.rows(x.rows), 2 * x.width, |_, rows| {
        for t in rows {
            let (cos, sin) = table.rows[t * 2 * half..(t + 1) * 2 * half].split_at(half);
            // SAFETY: rows are disjoint between chunks.
            for head in unsafe { x.row_mut(t) }.chunks_exact_mut(d_head) {
                match table.angles.pairing {
                    RopePairing::Half => rotate_half(&mut head[..2 * half], cos, sin),
                    RopePairing::Interleaved => rotate_interleaved(&mut head[..2 * half], cos, sin),
                }
            }
        }
    });
}

fn rotate_half(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (a, b) = x.split_at_mut(cos.len());
    for (((a, b), c), s) in a.iter_mut().zip(b).zip(cos).zip(sin) {
        (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
    }
}

fn rotate_interleaved(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    for ((pair, c), s) in x.chunks_exact_mut(2).zip(cos).zip(sin) {
        let (a, b) = (pair[0], pair[1]);
        (pair[0], pair[1]) = (a * c - b * s, b * c + a * s);
    }
}
