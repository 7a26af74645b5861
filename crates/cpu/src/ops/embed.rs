//! `embed` and `select`: rows by index.

use super::super::mem::{View, over_rows};
use super::super::program::{Mat, Run};

/// `out[t,:] = dequant(table[id[t],:]) · scale`.
pub fn embed(run: &mut Run, table: &Mat, scale: f32, out: View) {
    let tokens = &run.batch.tokens;
    over_rows(run.pool, tokens.len(), 4 * out.width, |_, rows| {
        for t in rows {
            // SAFETY: ranges of rows are disjoint between chunks.
            let row = unsafe { out.row_mut(t) };
            quant::decode_row(table.dtype, table.row(tokens[t] as usize), row);
            if scale != 1.0 {
                row.iter_mut().for_each(|v| *v *= scale);
            }
        }
    });
}

/// `out[r] = x[row[r]]`.
pub fn select(run: &mut Run, x: View, out: View) {
    for (r, &t) in run.batch.rows.iter().enumerate() {
        // SAFETY: only the caller's thread works here, and x and out are different buffers.
        unsafe { out.row_mut(r).copy_from_slice(x.row(t as usize)) };
    }
}
