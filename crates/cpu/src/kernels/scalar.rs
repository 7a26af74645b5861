//! Plain Rust: every product through the reference's own functions, for machines without vector kernels.

use quant::WeightType;
use quant::act::{self, ActKind};
use quant::dot::dot_row;

use super::acts::RowPtr;
use super::panel::{CHUNK, Panel, ROWS, byte_at, offset, scale_len};
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

/// Panel of 16-bit integers times columns.
///
/// # Safety
/// See [`super::variants::TileFn`].
unsafe fn small(panel: &Panel, blocks: usize, chunk: usize, cols: &[ColPtr], acc: &mut [[f32; ROWS]], has_min: bool) {
    for (col, acc) in cols.iter().zip(acc) {
        for b in 0..blocks {
            // SAFETY: the column has the blocks from value `chunk` on.
            let (x, dx, sum) = unsafe {
                let (block, row) = (chunk / 32 + b, &col.row);
                let x = std::slice::from_raw_parts(row.wide.add(32 * block), 32);
                (x, *row.d.add(block), *row.sums.cast::<i32>().add(block))
            };
            for r in 0..ROWS {
                let w = |i: usize| panel.w[((16 * b + i / 2) * ROWS + r) * 2 + i % 2];
                let isum: i32 = (0..32).map(|i| i32::from(x[i]) * i32::from(w(i))).sum();
                acc[r] = (panel.d[b][r] * dx).mul_add(isum as f32, acc[r]);
                if has_min {
                    acc[r] = (panel.m[b][r] * dx).mul_add(sum as f32, acc[r]);
                }
            }
        }
    }
}

/// Panel of bytes with 32-blocks times columns.
///
/// # Safety
/// See [`super::variants::TileFn`].
unsafe fn bytes<const OFFSET: u8, const MIN: bool>(
    panel: &Panel,
    blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    for (col, acc) in cols.iter().zip(acc) {
        for b in 0..blocks {
            // SAFETY: the column has the blocks from value `chunk` on.
            let (x, dx, sum) = unsafe {
                let (block, row) = (chunk / 32 + b, &col.row);
                (&*row.q.add(32 * block).cast::<[i8; 32]>(), *row.d.add(block), *row.sums.cast::<i32>().add(block))
            };
            for r in 0..ROWS {
                let w = |i: usize| i32::from(panel.bytes[byte_at(32 * b + i, r)]) - i32::from(OFFSET);
                let isum: i32 = (0..32).map(|i| i32::from(x[i]) * w(i)).sum();
                acc[r] = (panel.d[b][r] * dx).mul_add(isum as f32, acc[r]);
                if MIN {
                    acc[r] = (panel.m[b][r] * dx).mul_add(sum as f32, acc[r]);
                }
            }
        }
    }
}

/// Panel of super-blocks times columns.
///
/// # Safety
/// See [`super::variants::TileFn`].
unsafe fn large(panel: &Panel, chunk: usize, cols: &[ColPtr], acc: &mut [[f32; ROWS]], t: WeightType) {
    let group = scale_len(t);
    for (col, acc) in cols.iter().zip(acc) {
        // SAFETY: the column has the super-block that begins at value `chunk`.
        let (x, u, sums, dx) = unsafe {
            let row = &col.row;
            (
                &*row.q.add(chunk).cast::<[i8; CHUNK]>(),
                &*row.u.add(chunk / 32).cast::<[u8; 8]>(),
                &*row.sums.cast::<i16>().add(chunk / 16).cast::<[i16; 16]>(),
                *row.d.add(chunk / 256),
            )
        };
        for r in 0..ROWS {
            let w = |i: usize| i32::from(panel.bytes[byte_at(i, r)]) - i32::from(offset(t));
            let mut isum = 0;
            for first in (0..CHUNK).step_by(group) {
                let sum: i32 = (first..first + group).map(|i| w(i) * i32::from(x[i])).sum();
                isum += i32::from(u[first / 32]) * i32::from(panel.scales[first / 16][r][0]) * sum;
            }
            acc[r] = (panel.d[0][r] * dx).mul_add(isum as f32, acc[r]);
            if t.has_min() {
                let msum: i32 = (0..16).map(|g| i32::from(sums[g]) * i32::from(panel.mins[g / 2][r][g % 2])).sum();
                acc[r] = (panel.m[0][r] * dx).mul_add(msum as f32, acc[r]);
            }
        }
    }
}

/// The tile function of a type.
pub(super) fn tile_fn(t: WeightType) -> TileFn {
    macro_rules! large {
        ($($t:ident)*) => {
            match t {
                // SAFETY: the contract of `TileFn` is that of `large`, and that of `small`.
                $(WeightType::$t => |p, _, at, cols, acc| unsafe { large(p, at, cols, acc, WeightType::$t) },)*
                t if t.act() == ActKind::Byte32 => match offset(t) {
                    16 => bytes::<16, false>,
                    128 => bytes::<128, false>,
                    _ => bytes::<0, true>,
                },
                // SAFETY: as above.
                t if t.has_min() => |p, b, at, cols, acc| unsafe { small(p, b, at, cols, acc, true) },
                // SAFETY: as above.
                _ => |p, b, at, cols, acc| unsafe { small(p, b, at, cols, acc, false) },
            }
        };
    }
    large!(Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ1_S IQ1_M TQ1_0 TQ2_0)
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
        wide(q, |_| 1, std::slice::from_raw_parts_mut(row.wide, n));
    }
}

/// The wide form of `q`, times `times(j)` for 32-group `j`.
fn wide<Q: Copy + Into<i16>>(q: &[Q], times: impl Fn(usize) -> i16, to: &mut [i16]) {
    for (i, (w, q)) in to.chunks_exact_mut(4).zip(q.chunks_exact(4)).enumerate() {
        w.copy_from_slice(&[q[0], q[2], q[1], q[3]].map(|q| q.into() * times(i / 8)));
    }
}

/// Quantises to 32-blocks of bytes and writes the starts and the wide form.
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
        starts(q, -16, std::slice::from_raw_parts_mut(row.start, n / 8));
        wide(q, |_| 1, std::slice::from_raw_parts_mut(row.wide, n));
    }
}

/// Quantises to 256-blocks and writes the starts and the wide form.
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
        starts(q, -32, std::slice::from_raw_parts_mut(row.start, n / 8));
        wide(q, |j| i16::from(u[j]), std::slice::from_raw_parts_mut(row.wide, n));
    }
}

/// The starts of the sums of 16-groups.
fn starts(q: &[i8], times: i16, start: &mut [i16]) {
    for (i, start) in start.iter_mut().enumerate() {
        let q = &q[i / 2 * 16..][..16];
        *start = times * (0..16).filter(|v| v % 4 / 2 == i % 2).map(|v| i16::from(q[v])).sum::<i16>();
    }
}
