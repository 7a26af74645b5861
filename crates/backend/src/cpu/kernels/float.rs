//! F32, F16 and BF16 weights on 16 virtual lanes: one source for every instruction set.
//!
//! One column: four rows at a time share the loads of the activations. Many columns: rows are widened to f32 once and
//! meet the columns in small groups, so that every load serves several multiply-adds.

use crate::cpu::isa::on_isa;
use crate::cpu::lanes::Lanes;

use super::panel::ROWS;
use super::{AHEAD, ColPtr, RowSet, prefetch};

/// Rows that the many-column kernels hold as f32 at a time: a tile.
pub(super) const FLOAT_ROWS: usize = ROWS;
/// Rows and columns whose sums are in registers at a time: 12 of AVX2's 16.
const PAIR: usize = 2;
const FLOAT_COLS: usize = 3;

/// How 16 weights become f32.
trait Weights {
    const BYTES: usize;
    /// # Safety
    /// `p` is readable for 16 weights.
    unsafe fn load<L: Lanes>(p: *const u8) -> L;
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
    unsafe fn get(p: *const u8) -> f32 {
        // SAFETY: the caller's promise.
        f32::from_bits(u32::from(unsafe { p.cast::<u16>().read_unaligned() }) << 16)
    }
}

/// Dot products of R rows of weights with C rows of activations, all of k values.
#[inline(always)]
unsafe fn dots<L: Lanes, W: Weights, const R: usize, const C: usize>(
    w: [*const u8; R],
    x: [*const f32; C],
    k: usize,
    ahead: Option<*const u8>,
) -> [[f32; C]; R] {
    let mut acc = [[L::splat(0.0); C]; R];
    let full = k / 16 * 16;
    let mut i = 0;
    while i < full {
        if let Some(ahead) = ahead {
            prefetch(ahead.wrapping_add(R * i * W::BYTES), R * 16 * W::BYTES);
        }
        // SAFETY: i + 16 <= k.
        unsafe {
            let mut xs = [L::splat(0.0); C];
            for c in 0..C {
                xs[c] = L::load(x[c].add(i));
            }
            for r in 0..R {
                let wr: L = W::load(w[r].add(i * W::BYTES));
                for c in 0..C {
                    acc[r][c] = wr.fma(xs[c], acc[r][c]);
                }
            }
        }
        i += 16;
    }
    let mut out = [[0.0; C]; R];
    for r in 0..R {
        for c in 0..C {
            out[r][c] = if full == k {
                acc[r][c].tree_sum()
            } else {
                let mut lanes = acc[r][c].to_array();
                for i in full..k {
                    // SAFETY: i < k.
                    let (w, x) = unsafe { (W::get(w[r].add(i * W::BYTES)), *x[c].add(i)) };
                    lanes[i - full] = w.mul_add(x, lanes[i - full]);
                }
                quant::dot::tree_sum(&lanes)
            };
        }
    }
    out
}

#[inline(always)]
unsafe fn one<L: Lanes, W: Weights>(set: &RowSet, col: &ColPtr, out: &mut [f32; ROWS]) {
    for r in (0..set.n).step_by(4) {
        let rows: [*const u8; 4] = std::array::from_fn(|i| set.row(r + i));
        let ahead = rows[0].wrapping_add(AHEAD.max(4 * set.bytes.q));
        // SAFETY: the caller's promise about rows and column.
        let y = unsafe { dots::<L, W, 4, 1>(rows, [col.row.q.cast()], set.k, Some(ahead)) };
        for i in 0..4 {
            out[r + i] = y[i][0];
        }
    }
}

#[inline(always)]
unsafe fn many<L: Lanes, W: Weights>(set: &RowSet, cols: &[ColPtr], acc: &mut [[f32; ROWS]], floats: &mut [f32]) {
    let mut rows = [std::ptr::null(); ROWS];
    for r in 0..ROWS {
        rows[r] = set.row(r);
        if W::BYTES != 4 && r < set.n {
            let wide = &mut floats[r * set.k..][..set.k];
            // SAFETY: the row has k weights.
            unsafe { widen::<L, W>(rows[r], wide) };
        }
    }
    if W::BYTES != 4 {
        for r in 0..ROWS {
            rows[r] = floats[r.min(set.n - 1) * set.k..].as_ptr().cast();
        }
    }
    // Columns outside: three of them stay in the first-level cache while all rows pass.
    let mut c = 0;
    while c < cols.len() {
        let n = (cols.len() - c).min(FLOAT_COLS);
        for r in (0..set.n).step_by(PAIR) {
            // SAFETY: the caller's promise about rows and columns; widened rows have k values.
            unsafe {
                match n {
                    1 => group::<L, 1>([rows[r], rows[r + 1]], &cols[c..], set.k, &mut acc[c..], r),
                    2 => group::<L, 2>([rows[r], rows[r + 1]], &cols[c..], set.k, &mut acc[c..], r),
                    _ => group::<L, 3>([rows[r], rows[r + 1]], &cols[c..], set.k, &mut acc[c..], r),
                }
            }
        }
        c += n;
    }
}

/// # Safety
/// `row` is readable for as many weights as `wide` is long.
#[inline(always)]
unsafe fn widen<L: Lanes, W: Weights>(row: *const u8, wide: &mut [f32]) {
    let full = wide.len() / 16 * 16;
    // SAFETY: the caller's promise; every index is below the length.
    unsafe {
        for i in (0..full).step_by(16) {
            W::load::<L>(row.add(i * W::BYTES)).store(wide.as_mut_ptr().add(i));
        }
        for i in full..wide.len() {
            wide[i] = W::get(row.add(i * W::BYTES));
        }
    }
}

#[inline(always)]
unsafe fn group<L: Lanes, const C: usize>(
    rows: [*const u8; PAIR],
    cols: &[ColPtr],
    k: usize,
    acc: &mut [[f32; ROWS]],
    r: usize,
) {
    let x: [*const f32; C] = std::array::from_fn(|c| cols[c].row.q.cast_const().cast());
    // SAFETY: the caller's promise.
    let y = unsafe { dots::<L, F32, PAIR, C>(rows, x, k, None) };
    for c in 0..C {
        for i in 0..PAIR {
            acc[c][r + i] = y[i][c];
        }
    }
}

/// The kernels of one type as plain functions of an instruction set.
macro_rules! kernels {
    ($w:ident, $one:ident, $many:ident, $one_lanes:ident, $many_lanes:ident) => {
        #[inline(always)]
        fn $one_lanes<L: Lanes>(set: &RowSet, col: &ColPtr, out: &mut [f32; ROWS]) {
            // SAFETY: `Kernels` compared the shapes before it made the set and the column.
            unsafe { one::<L, $w>(set, col, out) }
        }
        #[inline(always)]
        fn $many_lanes<L: Lanes>(set: &RowSet, cols: &[ColPtr], acc: &mut [[f32; ROWS]], floats: &mut [f32]) {
            // SAFETY: as above.
            unsafe { many::<L, $w>(set, cols, acc, floats) }
        }
        on_isa! {
            /// One column.
            pub(super) fn $one(set: &RowSet, col: &ColPtr, out: &mut [f32; ROWS]) = $one_lanes
        }
        on_isa! {
            /// Many columns.
            pub(super) fn $many(set: &RowSet, cols: &[ColPtr], acc: &mut [[f32; ROWS]], floats: &mut [f32]) = $many_lanes
        }
    };
}

kernels!(F32, one_f32, many_f32, one_f32_lanes, many_f32_lanes);
kernels!(F16, one_f16, many_f16, one_f16_lanes, many_f16_lanes);
kernels!(BF16, one_bf16, many_bf16, one_bf16_lanes, many_bf16_lanes);
