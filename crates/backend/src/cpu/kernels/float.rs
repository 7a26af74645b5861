//! F32, F16 and BF16 weights on 16 virtual lanes: one source for every instruction set.
//!
//! One column: four rows at a time share the loads of the activations. Many columns: a span of four rows is widened to
//! f32 once and meets all columns, three at a time and one part of the sixteen lanes after the other, so that the sums
//! fill the registers and every load serves several multiply-adds.

use crate::cpu::isa::on_isa;
use crate::cpu::lanes::{Lanes, Part};

use super::panel::ROWS;
use super::prefetch::{NEAR, Near, once, prefetch};
use super::{COLS, ColPtr, RowSet};

/// Rows and columns whose sums are in registers at a time: 12 of AVX2's 16; three hold activations, one a weight.
const TILE_ROWS: usize = 4;
const TILE_COLS: usize = 3;
/// Values of a span; a multiple of 16.
const SPAN: usize = 512;

/// Conversion of weights to f32.
trait Weights {
    /// Bytes of a weight.
    const BYTES: usize;
    /// # Safety
    /// `p` is readable for 16 weights.
    unsafe fn load<L: Lanes>(p: *const u8) -> L;
    /// # Safety
    /// `p` is readable for as many weights as the part has lanes.
    unsafe fn read<P: Part>(p: *const u8) -> P;
    /// # Safety
    /// `p` is readable for one weight.
    unsafe fn get(p: *const u8) -> f32;
}

struct F32;
struct F16;
struct BF16;

impl Weights for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load(p.cast()) }
    }
    #[inline(always)]
    unsafe fn read<P: Part>(p: *const u8) -> P {
        // SAFETY: the caller's promise.
        unsafe { P::read(p.cast()) }
    }
    #[inline(always)]
    unsafe fn get(p: *const u8) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<f32>().read_unaligned() }
    }
}

impl Weights for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load_f16(p.cast()) }
    }
    #[inline(always)]
    unsafe fn read<P: Part>(p: *const u8) -> P {
        // SAFETY: the caller's promise.
        unsafe { P::read_f16(p.cast()) }
    }
    #[inline(always)]
    unsafe fn get(p: *const u8) -> f32 {
        // SAFETY: the caller's promise.
        half::f16::from_bits(unsafe { p.cast::<u16>().read_unaligned() }).to_f32_const()
    }
}

impl Weights for BF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L {
        // SAFETY: the caller's promise.
        let bits = unsafe { p.cast::<[u16; 16]>().read_unaligned() };
        let mut wide = [0.0f32; 16];
        for i in 0..16 {
            wide[i] = f32::from_bits(u32::from(bits[i]) << 16);
        }
        // SAFETY: the array has 16 values.
        unsafe { L::load(wide.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn read<P: Part>(p: *const u8) -> P {
        // SAFETY: the caller's promise.
        unsafe { P::read_bf16(p.cast()) }
    }
    #[inline(always)]
    unsafe fn get(p: *const u8) -> f32 {
        // SAFETY: the caller's promise.
        f32::from_bits(u32::from(unsafe { p.cast::<u16>().read_unaligned() }) << 16)
    }
}

/// Adds the tail of a row, `k % 16` products, to the first lanes and sums all sixteen.
///
/// # Safety
/// `w` and `x` are readable for `k` values.
#[inline(always)]
unsafe fn finish<L: Lanes, W: Weights>(mut lanes: [f32; 16], w: *const u8, x: *const f32, k: usize) -> f32 {
    let full = k / 16 * 16;
    for i in full..k {
        // SAFETY: i < k.
        let (w, x) = unsafe { (W::get(w.add(i * W::BYTES)), *x.add(i)) };
        lanes[i - full] = w.mul_add(x, lanes[i - full]);
    }
    // SAFETY: the array has 16 values.
    unsafe { L::load(lanes.as_ptr()).tree_sum() }
}

/// # Safety
/// See [`super::variants::OneFn`].
#[inline(always)]
unsafe fn one<L: Lanes, W: Weights>(set: &RowSet, col: &ColPtr, out: &mut [f32; ROWS]) {
    let (x, hint): (*const f32, _) = (col.row.q.cast_const().cast(), once());
    for first in (0..set.n).step_by(4) {
        let rows: [*const u8; 4] = std::array::from_fn(|i| set.row(first + i));
        let next = rows[0].wrapping_add(NEAR.max(4 * set.bytes.q));
        let mut acc = [L::splat(0.0); 4];
        for i in (0..set.k / 16 * 16).step_by(16) {
            prefetch(next.wrapping_add(4 * i * W::BYTES), 64 * W::BYTES, hint);
            // SAFETY: i + 16 <= k.
            unsafe {
                let x = L::load(x.add(i));
                for r in 0..4 {
                    acc[r] = W::load::<L>(rows[r].add(i * W::BYTES)).fma(x, acc[r]);
                }
            }
        }
        for r in 0..4 {
            // SAFETY: the caller's promise about rows and column.
            out[first + r] = unsafe { finish::<L, W>(acc[r].to_array(), rows[r], x, set.k) };
        }
    }
}

/// # Safety
/// See [`super::variants::FloatFn`].
#[inline(always)]
unsafe fn many<L: Lanes, W: Weights>(set: &RowSet, cols: &[ColPtr], acc: &mut [[f32; ROWS]]) {
    let near = Near::new(set.row(0), ROWS, set.bytes.q);
    let full = set.k / 16 * 16;
    let mut wide = [[0.0f32; SPAN]; TILE_ROWS];
    let mut sums = [[[0.0f32; 16]; TILE_ROWS]; COLS];
    for first in (0..set.n).step_by(TILE_ROWS) {
        let rows: [*const u8; TILE_ROWS] = std::array::from_fn(|i| set.row(first + i));
        for sums in &mut sums[..cols.len()] {
            *sums = [[0.0; 16]; TILE_ROWS];
        }
        for k in (0..full).step_by(SPAN) {
            let n = (full - k).min(SPAN);
            near.prefetch((first * set.k + TILE_ROWS * k) * W::BYTES, TILE_ROWS * n * W::BYTES);
            for r in 0..TILE_ROWS {
                // SAFETY: rows have n values from k on, a span has room for them.
                unsafe { widen::<L::Part, W>(rows[r].add(k * W::BYTES), &mut wide[r][..n]) }
            }
            for (cols, sums) in cols.chunks(TILE_COLS).zip(sums.chunks_mut(TILE_COLS)) {
                // SAFETY: the caller's promise about columns; the spans have n values.
                unsafe {
                    match cols.len() {
                        1 => group::<L, 1>(&wide, cols, k, n, sums),
                        2 => group::<L, 2>(&wide, cols, k, n, sums),
                        _ => group::<L, TILE_COLS>(&wide, cols, k, n, sums),
                    }
                }
            }
        }
        for (c, col) in cols.iter().enumerate() {
            for r in 0..TILE_ROWS {
                // SAFETY: the row and the column have k values.
                acc[c][first + r] =
                    unsafe { finish::<L, W>(sums[c][r], rows[r], col.row.q.cast_const().cast(), set.k) };
            }
        }
    }
}

/// # Safety
/// `row` is readable for as many weights as `wide` is long, a multiple of 16.
#[inline(always)]
unsafe fn widen<P: Part, W: Weights>(row: *const u8, wide: &mut [f32]) {
    for i in (0..wide.len()).step_by(P::LEN) {
        // SAFETY: the caller's promise; `i + LEN` is at most the length.
        unsafe { W::read::<P>(row.add(i * W::BYTES)).write(wide.as_mut_ptr().add(i)) }
    }
}

/// A span of n values from value k on of four rows and C columns.
///
/// # Safety
/// There are C columns and as many places in `sums`; columns have the values.
#[inline(always)]
unsafe fn group<L: Lanes, const C: usize>(
    wide: &[[f32; SPAN]; TILE_ROWS],
    cols: &[ColPtr],
    k: usize,
    n: usize,
    sums: &mut [[[f32; 16]; TILE_ROWS]],
) {
    let x: [*const f32; C] = std::array::from_fn(|c| cols[c].row.q.cast_const().cast::<f32>().wrapping_add(k));
    for part in (0..16).step_by(L::Part::LEN) {
        // SAFETY: the caller's promise; n is at most a span.
        unsafe { tile::<L::Part, C>(wide, x, n, part, sums) }
    }
}

/// Adds to the lanes from `part` on of `sums` the products of n values, a multiple of 16.
///
/// # Safety
/// Columns are readable for n values, at most a span; `sums` has C columns.
#[inline(always)]
unsafe fn tile<P: Part, const C: usize>(
    wide: &[[f32; SPAN]; TILE_ROWS],
    x: [*const f32; C],
    n: usize,
    part: usize,
    sums: &mut [[[f32; 16]; TILE_ROWS]],
) {
    // SAFETY: `part + P::LEN` is at most 16, `i + 16` at most n.
    unsafe {
        let mut acc = [[P::read(sums[0][0].as_ptr()); C]; TILE_ROWS];
        for r in 0..TILE_ROWS {
            for c in 0..C {
                acc[r][c] = P::read(sums[c][r].as_ptr().add(part));
            }
        }
        for i in (part..n).step_by(16) {
            let mut xs = [acc[0][0]; C];
            for c in 0..C {
                xs[c] = P::read(x[c].add(i));
            }
            for r in 0..TILE_ROWS {
                let w = P::read(wide[r].as_ptr().add(i));
                for c in 0..C {
                    acc[r][c] = w.multiply_add(xs[c], acc[r][c]);
                }
            }
        }
        for r in 0..TILE_ROWS {
            for c in 0..C {
                acc[r][c].write(sums[c][r].as_mut_ptr().add(part));
            }
        }
    }
}

/// The kernels of one type as functions of an instruction set.
macro_rules! kernels {
    ($w:ident, $one:ident, $many:ident, $one_lanes:ident, $many_lanes:ident) => {
        /// # Safety
        /// See [`super::variants::OneFn`]; the set is of the type.
        #[inline(always)]
        unsafe fn $one_lanes<L: Lanes>(set: &RowSet, col: &ColPtr, out: &mut [f32; ROWS]) {
            // SAFETY: the caller's promise.
            unsafe { one::<L, $w>(set, col, out) }
        }
        /// # Safety
        /// See [`super::variants::FloatFn`]; the set is of the type.
        #[inline(always)]
        unsafe fn $many_lanes<L: Lanes>(set: &RowSet, cols: &[ColPtr], acc: &mut [[f32; ROWS]]) {
            // SAFETY: the caller's promise.
            unsafe { many::<L, $w>(set, cols, acc) }
        }
        on_isa! {
            /// One column.
            ///
            /// # Safety
            /// See [`super::variants::OneFn`]; the set is of the type.
            pub(super) unsafe fn $one(set: &RowSet, col: &ColPtr, out: &mut [f32; ROWS]) = $one_lanes
        }
        on_isa! {
            /// Many columns.
            ///
            /// # Safety
            /// See [`super::variants::FloatFn`]; the set is of the type.
            pub(super) unsafe fn $many(set: &RowSet, cols: &[ColPtr], acc: &mut [[f32; ROWS]]) = $many_lanes
        }
    };
}

kernels!(F32, one_f32, many_f32, one_f32_lanes, many_f32_lanes);
kernels!(F16, one_f16, many_f16, one_f16_lanes, many_f16_lanes);
kernels!(BF16, one_bf16, many_bf16, one_bf16_lanes, many_bf16_lanes);
