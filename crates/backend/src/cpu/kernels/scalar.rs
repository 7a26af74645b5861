//! Plain Rust: every product through the reference's own functions. It is what runs on unknown machines, and for one
//! column of the types that have no vector kernel.

use quant::WeightType;
use quant::act;
use quant::dot::dot_row;

use super::acts::RowPtr;
use super::panel::{Panel, ROWS};
use super::variants::TileFn;
use super::{ActsShared, ColPtr, RowSet};

/// One column of any type.
///
/// # Safety
/// See [`super::variants::OneFn`].
pub(super) unsafe fn one(set: &RowSet, acts: &ActsShared, col: &ColPtr, out: &mut [f32; ROWS]) {
    let x = acts.row(col.act);
    for (r, out) in out.iter_mut().enumerate().take(set.n) {
        *out = dot_row(set.dtype, set.planes.row(set.bytes, r), x);
    }
}

/// Panel times columns.
///
/// # Safety
/// See [`super::variants::TileFn`].
pub(super) unsafe fn tile(
    panel: &Panel,
    blocks: usize,
    block_len: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
    has_min: bool,
) {
    for (col, acc) in cols.iter().zip(acc) {
        // SAFETY: the column has the blocks from value `chunk` on.
        let (x, sums) = unsafe {
            let x = std::slice::from_raw_parts(col.row.wide.add(chunk), blocks * block_len);
            let sums = if block_len == 32 {
                Sums::Small(std::slice::from_raw_parts(col.row.sums.cast::<i32>().add(chunk / 32), blocks))
            } else {
                Sums::Large(&*col.row.sums.cast::<i16>().add(chunk / 16).cast::<[i16; 16]>())
            };
            (x, sums)
        };
        for b in 0..blocks {
            // SAFETY: as above.
            let dx = unsafe { *col.row.d.add(chunk / block_len + b) };
            for r in 0..ROWS {
                let mut isum = 0i32;
                for i in b * block_len..(b + 1) * block_len {
                    isum += i32::from(x[i]) * i32::from(panel.w[(i / 2 * ROWS + r) * 2 + i % 2]);
                }
                acc[r] = (panel.d[b][r] * dx).mul_add(isum as f32, acc[r]);
                if has_min {
                    let msum = match sums {
                        Sums::Small(s) => s[b],
                        Sums::Large(s) => {
                            (0..16).map(|g| i32::from(s[g]) * i32::from(panel.mins[g / 2][r][g % 2])).sum()
                        }
                    };
                    acc[r] = (panel.m[b][r] * dx).mul_add(msum as f32, acc[r]);
                }
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Sums<'a> {
    Small(&'a [i32]),
    Large(&'a [i16; 16]),
}

/// The tile function of a type.
pub(super) fn tile_fn(t: WeightType) -> TileFn {
    match (t.act().block_len(), t.has_min()) {
        // SAFETY: the contract of `TileFn` is that of `tile`.
        (32, false) => |p, b, at, cols, acc| unsafe { tile(p, b, 32, at, cols, acc, false) },
        // SAFETY: as above.
        (32, true) => |p, b, at, cols, acc| unsafe { tile(p, b, 32, at, cols, acc, true) },
        // SAFETY: as above.
        (_, false) => |p, b, at, cols, acc| unsafe { tile(p, b, 256, at, cols, acc, false) },
        // SAFETY: as above.
        (_, true) => |p, b, at, cols, acc| unsafe { tile(p, b, 256, at, cols, acc, true) },
    }
}

/// Copies a row.
///
/// # Safety
/// See [`super::variants::QuantiseFn`].
pub(super) unsafe fn float(x: &[f32], row: &RowPtr) {
    // SAFETY: the row holds as many values as `x`.
    unsafe { std::ptr::copy_nonoverlapping(x.as_ptr(), row.q.cast(), x.len()) }
}

/// Quantises to 32-blocks and writes the wide form.
///
/// # Safety
/// See [`super::variants::QuantiseFn`].
pub(super) unsafe fn block32(x: &[f32], row: &RowPtr) {
    let n = x.len();
    // SAFETY: the sections of the row are as long as `reshape` made them for n values.
    unsafe {
        let q = std::slice::from_raw_parts_mut(row.q.cast::<i16>(), n);
        let d = std::slice::from_raw_parts_mut(row.d, n / 32);
        let sums = std::slice::from_raw_parts_mut(row.sums.cast::<i32>(), n / 32);
        act::quantise32(x, q, d, sums);
        let wide = std::slice::from_raw_parts_mut(row.wide, n);
        for (w, q) in wide.chunks_exact_mut(4).zip(q.chunks_exact(4)) {
            w.copy_from_slice(&[q[0], q[2], q[1], q[3]]);
        }
    }
}

/// Quantises to 32-blocks of bytes and writes the wide form.
///
/// # Safety
/// See [`super::variants::QuantiseFn`].
pub(super) unsafe fn byte32(x: &[f32], row: &RowPtr) {
    let n = x.len();
    // SAFETY: as in `block32`.
    unsafe {
        let q = std::slice::from_raw_parts_mut(row.q.cast::<i8>(), n);
        let d = std::slice::from_raw_parts_mut(row.d, n / 32);
        let sums = std::slice::from_raw_parts_mut(row.sums.cast::<i32>(), n / 32);
        act::quantise_byte32(x, q, d, sums);
        let wide = std::slice::from_raw_parts_mut(row.wide, n);
        for (w, q) in wide.chunks_exact_mut(4).zip(q.chunks_exact(4)) {
            w.copy_from_slice(&[q[0], q[2], q[1], q[3]].map(i16::from));
        }
    }
}

/// Quantises to 256-blocks and writes the wide form.
///
/// # Safety
/// See [`super::variants::QuantiseFn`].
pub(super) unsafe fn block256(x: &[f32], row: &RowPtr) {
    let n = x.len();
    // SAFETY: as in `block32`.
    unsafe {
        let q = std::slice::from_raw_parts_mut(row.q.cast::<i8>(), n);
        let u = std::slice::from_raw_parts_mut(row.u, n / 32);
        let d = std::slice::from_raw_parts_mut(row.d, n / 256);
        let sums = std::slice::from_raw_parts_mut(row.sums.cast::<i16>(), n / 16);
        act::quantise256(x, q, u, d, sums);
        let wide = std::slice::from_raw_parts_mut(row.wide, n);
        for (i, (w, q)) in wide.chunks_exact_mut(4).zip(q.chunks_exact(4)).enumerate() {
            let u = i16::from(u[i / 8]);
            w.copy_from_slice(&[q[0], q[2], q[1], q[3]].map(|q| u * i16::from(q)));
        }
    }
}
