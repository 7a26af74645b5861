//! `split_heads` and `join_heads`: copies between rows of whole heads and rows of parts of heads.

use super::super::mem::{View, over_rows};
use super::super::program::Run;

/// Part `i` gets the next `parts[i].0` numbers of each head of `x`.
pub fn split_heads(run: &mut Run, x: View, parts: &[(usize, View)]) {
    each_head(run, x, parts, |head, part| part.copy_from_slice(head));
}

/// `out` gets the heads of all parts side by side.
pub fn join_heads(run: &mut Run, parts: &[(usize, View)], out: View) {
    each_head(run, out, parts, |head, part| head.copy_from_slice(part));
}

/// Calls `copy` with every head's slice of `whole` and its part.
fn each_head(run: &mut Run, whole: View, parts: &[(usize, View)], copy: impl Fn(&mut [f32], &mut [f32]) + Sync) {
    let d_head: usize = parts.iter().map(|(width, _)| width).sum();
    over_rows(run.pool, run.step.rows(whole.rows), whole.width, |_, rows| {
        for r in rows {
            // SAFETY: rows are disjoint between chunks; the validator keeps the written buffers apart from all others,
            // and two parts that are only read may be the same buffer, one slice of which lives at a time.
            let whole = unsafe { whole.row_mut(r) };
            let mut first = 0;
            for &(width, part) in parts {
                // SAFETY: as above.
                let part = unsafe { part.row_mut(r) };
                let heads = whole.chunks_exact_mut(d_head).map(|head| &mut head[first..first + width]);
                heads.zip(part.chunks_exact_mut(width)).for_each(|(head, part)| copy(head, part));
                first += width;
            }
        }
    });
}
