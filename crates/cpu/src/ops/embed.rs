//! `embed`, `embed_place`, `input` and `select`: rows by index.

use model::plan::InputMode;

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

/// `out[t,:] = dequant(table[place[t][axis],:])`.
pub fn embed_place(run: &mut Run, table: &Mat, axis: usize, out: View) {
    let places = &run.step.places;
    over_rows(run.pool, places.len(), 4 * out.width, |_, rows| {
        for t in rows {
            // SAFETY: ranges of rows are disjoint between chunks.
            let row = unsafe { out.row_mut(t) };
            quant::decode_row(table.dtype, table.row(places[t][axis] as usize), row);
        }
    });
}

/// Rows that the step is given, the numbers from `first` on: in place of those of `x`, or added to them.
pub fn input(run: &mut Run, x: View, first: usize, mode: InputMode) {
    let given = &run.batch.given;
    let Some(d_input) = given.rows.len().checked_div(given.tokens.len()) else { return };
    over_rows(run.pool, given.tokens.len(), x.width, |_, rows| {
        for g in rows {
            let row = &given.rows[g * d_input + first..][..x.width];
            // SAFETY: the tokens of rows that are given differ, and the batch was checked.
            let x = unsafe { x.row_mut(given.tokens[g] as usize) };
            match mode {
                InputMode::All | InputMode::Replace => x.copy_from_slice(row),
                InputMode::Add => x.iter_mut().zip(row).for_each(|(x, given)| *x += given),
            }
        }
    });
}

/// `out[r] = x[row[r]]`, and the rows that follow where `out` is wider.
pub fn select(run: &mut Run, x: View, out: View) {
    for (r, &t) in run.batch.rows.iter().enumerate() {
        // SAFETY: only the caller's thread works here, and x and out are different buffers.
        let out = unsafe { out.row_mut(r) };
        for (i, out) in out.chunks_exact_mut(x.width).enumerate() {
            // SAFETY: as above; the batch was checked to have these rows.
            out.copy_from_slice(unsafe { x.row(t as usize + i) });
        }
    }
}
