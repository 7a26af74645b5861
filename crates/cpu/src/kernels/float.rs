//! Weights whose values are exact in f32 (F32, F16, BF16, 8-bit floats, NVFP4) on 16 virtual lanes: one source for
//! every instruction set.
//!
//! One column: four rows at a time share the loads of the activations. Many columns: a span of four rows, or of eight
//! where a register has all sixteen lanes, is widened to f32 once and meets all columns, three at a time and one part
//! of the lanes after the other, so that the sums fill the registers and every load serves several multiply-adds.

use quant::types::small_float;

use crate::isa::on_isa;
use crate::lanes::{Lanes, Part};

use super::panel::ROWS;
use super::prefetch::{NEAR, Near, once, prefetch};
use super::{COLS, ColPtr, RowSet};

/// Columns whose sums are in registers at a time, with four rows: 12 of AVX2's 16; three hold activations, one a
/// weight. With eight rows, 24 of AVX-512's 32: activations come from the second cache, and each load serves twice as
/// many.
const TILE_COLS: usize = 3;
/// Values of a span; a multiple of 16.
const SPAN: usize = 512;

/// Where a row lies: its numbers or codes, and its scales where the type has a plane of them.
#[derive(Clone, Copy)]
struct Row {
    q: *const u8,
    scales: *const u8,
}

impl Row {
    /// The f32 in the plane of scales that `GROUP` weights share.
    ///
    /// # Safety
    /// The row has such a plane and is readable for weight `i`.
    #[inline(always)]
    unsafe fn scale<const GROUP: usize>(self, i: usize) -> f32 {
        // SAFETY: the plane has a scale for each group.
        unsafe { self.scales.add(i / GROUP * 4).cast::<f32>().read_unaligned() }
    }
}

/// Conversion of weights to f32.
trait Weights {
    /// Bytes of 16 weights, rounded up: what is prefetched.
    const BYTES: usize;
    /// Weights `i` to `i + 16`, `i` a multiple of 16.
    ///
    /// # Safety
    /// The row is readable for these.
    unsafe fn load<L: Lanes>(row: Row, i: usize) -> L;
    /// Weights from `i` on, `i` a multiple of the lanes of the part.
    ///
    /// # Safety
    /// The row is readable for as many as the part has lanes.
    unsafe fn read<P: Part>(row: Row, i: usize) -> P;
    /// # Safety
    /// The row is readable for weight `i`.
    unsafe fn get(row: Row, i: usize) -> f32;
}

struct F32;
struct F16;
struct BF16;
struct F8;
struct Nvfp4;
struct Nvfp4Scaled;

impl Weights for F32 {
    const BYTES: usize = 64;
    #[inline(always)]
    unsafe fn load<L: Lanes>(row: Row, i: usize) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load(row.q.add(4 * i).cast()) }
    }
    #[inline(always)]
    unsafe fn read<P: Part>(row: Row, i: usize) -> P {
        // SAFETY: the caller's promise.
        unsafe { P::read(row.q.add(4 * i).cast()) }
    }
    #[inline(always)]
    unsafe fn get(row: Row, i: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { row.q.add(4 * i).cast::<f32>().read_unaligned() }
    }
}

impl Weights for F16 {
    const BYTES: usize = 32;
    #[inline(always)]
    unsafe fn load<L: Lanes>(row: Row, i: usize) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load_f16(row.q.add(2 * i).cast()) }
    }
    #[inline(always)]
    unsafe fn read<P: Part>(row: Row, i: usize) -> P {
        // SAFETY: the caller's promise.
        unsafe { P::read_f16(row.q.add(2 * i).cast()) }
    }
    #[inline(always)]
    unsafe fn get(row: Row, i: usize) -> f32 {
        // SAFETY: the caller's promise.
        half::f16::from_bits(unsafe { row.q.add(2 * i).cast::<u16>().read_unaligned() }).to_f32_const()
    }
}

impl Weights for BF16 {
    const BYTES: usize = 32;
    #[inline(always)]
    unsafe fn load<L: Lanes>(row: Row, i: usize) -> L {
        // SAFETY: the caller's promise.
        let bits = unsafe { row.q.add(2 * i).cast::<[u16; 16]>().read_unaligned() };
        let mut wide = [0.0f32; 16];
        for i in 0..16 {
            wide[i] = f32::from_bits(u32::from(bits[i]) << 16);
        }
        // SAFETY: the array has 16 values.
        unsafe { L::load(wide.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn read<P: Part>(row: Row, i: usize) -> P {
        // SAFETY: the caller's promise.
        unsafe { P::read_bf16(row.q.add(2 * i).cast()) }
    }
    #[inline(always)]
    unsafe fn get(row: Row, i: usize) -> f32 {
        // SAFETY: the caller's promise.
        f32::from_bits(u32::from(unsafe { row.q.add(2 * i).cast::<u16>().read_unaligned() }) << 16)
    }
}

/// Short floats become halves by their bits; the difference of the exponents' biases is a power of two, and the scale
/// rounds once.
impl F8 {
    /// 2^8: the bias of a half is 15, that of E4M3 is 7.
    const STEP: f32 = 256.0;

    /// # Safety
    /// The row is readable for weight `i`.
    #[inline(always)]
    unsafe fn scale(row: Row, i: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { row.scale::<{ small_float::F8_GROUP }>(i) }
    }

    /// The halves of 16 codes, of which the first `n` count.
    ///
    /// # Safety
    /// The row is readable for weights `i` to `i + n`.
    #[inline(always)]
    unsafe fn halves(row: Row, i: usize, n: usize) -> [u16; 16] {
        let mut bits = [0u16; 16];
        for (j, bits) in bits.iter_mut().enumerate().take(n) {
            // SAFETY: the caller's promise.
            let code = u16::from(unsafe { *row.q.add(i + j) });
            let half = (code & 0x7f) << 7 | (code & 0x80) << 8;
            // The one code above the others is NaN.
            *bits = if code & 0x7f == 0x7f { 0x7e00 } else { half };
        }
        bits
    }
}

impl Weights for F8 {
    const BYTES: usize = 16;
    #[inline(always)]
    unsafe fn load<L: Lanes>(row: Row, i: usize) -> L {
        // SAFETY: the caller's promise; the array has 16 values.
        unsafe {
            let bits = Self::halves(row, i, 16);
            scaled_lanes::<L>(&bits, Self::STEP, Self::scale(row, i))
        }
    }
    #[inline(always)]
    unsafe fn read<P: Part>(row: Row, i: usize) -> P {
        // SAFETY: the caller's promise; the array has 16 values.
        unsafe {
            let bits = Self::halves(row, i, P::LEN);
            scaled::<P>(&bits, Self::STEP, Self::scale(row, i))
        }
    }
    #[inline(always)]
    unsafe fn get(row: Row, i: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { small_float::load_e4m3(*row.q.add(i)) * Self::scale(row, i) }
    }
}

impl Nvfp4 {
    /// 2^14: the bias of a half is 15, that of E2M1 is 1.
    const STEP: f32 = 16384.0;

    /// # Safety
    /// The row is readable for weight `i`.
    #[inline(always)]
    unsafe fn scale(row: Row, i: usize) -> f32 {
        // SAFETY: a block begins with the scales of its four runs.
        let code = unsafe { *row.q.add(i / 64 * 36 + i % 64 / 16) };
        small_float::UE4M3[usize::from(code)]
    }

    /// The halves of the run of 16 that begins at weight `i`.
    ///
    /// # Safety
    /// The row is readable for these weights.
    #[inline(always)]
    unsafe fn halves(row: Row, i: usize) -> [u16; 16] {
        // SAFETY: the caller's promise; a run has eight bytes, which lie behind the scales.
        let codes = unsafe { row.q.add(i / 64 * 36 + 4 + i % 64 / 2).cast::<[u8; 8]>().read_unaligned() };
        let mut bits = [0u16; 16];
        for j in 0..8 {
            let (low, high) = (u16::from(codes[j] & 15), u16::from(codes[j] >> 4));
            bits[j] = (low & 7) << 9 | (low & 8) << 12;
            bits[j + 8] = (high & 7) << 9 | (high & 8) << 12;
        }
        bits
    }
}

impl Weights for Nvfp4 {
    const BYTES: usize = 9;
    #[inline(always)]
    unsafe fn load<L: Lanes>(row: Row, i: usize) -> L {
        // SAFETY: the caller's promise; the array has 16 values.
        unsafe {
            let bits = Self::halves(row, i);
            scaled_lanes::<L>(&bits, Self::STEP, Self::scale(row, i))
        }
    }
    #[inline(always)]
    unsafe fn read<P: Part>(row: Row, i: usize) -> P {
        // SAFETY: the caller's promise; a part lies inside a run, whose array has 16 values.
        unsafe {
            let bits = Self::halves(row, i / 16 * 16);
            scaled::<P>(&bits[i % 16..], Self::STEP, Self::scale(row, i))
        }
    }
    #[inline(always)]
    unsafe fn get(row: Row, i: usize) -> f32 {
        // SAFETY: the caller's promise.
        let bits = unsafe { Self::halves(row, i / 16 * 16)[i % 16] };
        // SAFETY: as above.
        half::f16::from_bits(bits).to_f32_const() * Self::STEP * unsafe { Self::scale(row, i) }
    }
}

/// The values of NVFP4, each times the scale of its matrix.
impl Nvfp4Scaled {
    /// # Safety
    /// The row is readable for weight `i`.
    #[inline(always)]
    unsafe fn scale(row: Row, i: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { row.scale::<64>(i) }
    }
}

impl Weights for Nvfp4Scaled {
    const BYTES: usize = 9;
    #[inline(always)]
    unsafe fn load<L: Lanes>(row: Row, i: usize) -> L {
        // SAFETY: the caller's promise.
        unsafe { Nvfp4::load::<L>(row, i).mul(L::splat(Self::scale(row, i))) }
    }
    #[inline(always)]
    unsafe fn read<P: Part>(row: Row, i: usize) -> P {
        // SAFETY: the caller's promise; the arrays have 16 values. Adding -0 changes no number.
        unsafe {
            let scale = P::read([Self::scale(row, i); 16].as_ptr());
            Nvfp4::read::<P>(row, i).multiply_add(scale, P::read([-0.0f32; 16].as_ptr()))
        }
    }
    #[inline(always)]
    unsafe fn get(row: Row, i: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { Nvfp4::get(row, i) * Self::scale(row, i) }
    }
}

/// Halves, times a power of two and a scale, each product rounded.
#[inline(always)]
fn scaled_lanes<L: Lanes>(bits: &[u16; 16], step: f32, scale: f32) -> L {
    // SAFETY: the array has 16 values.
    unsafe { L::load_f16(bits.as_ptr()) }.mul(L::splat(step)).mul(L::splat(scale))
}

/// A part of halves, as [`scaled_lanes`].
///
/// # Safety
/// `bits` has as many values as the part has lanes.
#[inline(always)]
unsafe fn scaled<P: Part>(bits: &[u16], step: f32, scale: f32) -> P {
    const ZEROS: [f32; 16] = [-0.0; 16];
    // SAFETY: the arrays have 16 values, the caller's as many as the part.
    unsafe {
        let zero = P::read(ZEROS.as_ptr());
        let all = |v: f32| P::read([v; 16].as_ptr());
        // Adding -0 changes no number.
        P::read_f16(bits.as_ptr()).multiply_add(all(step), zero).multiply_add(all(scale), zero)
    }
}

fn row(set: &RowSet, r: usize) -> Row {
    Row { q: set.row(r), scales: set.scales(r) }
}

/// Adds the tail of a row, `k % 16` products, to the first lanes and sums all sixteen.
///
/// # Safety
/// `w` and `x` are readable for `k` values.
#[inline(always)]
unsafe fn finish<L: Lanes, W: Weights>(mut lanes: [f32; 16], w: Row, x: *const f32, k: usize) -> f32 {
    let full = k / 16 * 16;
    for i in full..k {
        // SAFETY: i < k.
        let (w, x) = unsafe { (W::get(w, i), *x.add(i)) };
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
        let rows: [Row; 4] = std::array::from_fn(|i| row(set, first + i));
        let next = rows[0].q.wrapping_add(NEAR.max(4 * set.bytes.q));
        let mut acc = [L::splat(0.0); 4];
        for i in (0..set.k / 16 * 16).step_by(16) {
            prefetch(next.wrapping_add(i / 4 * W::BYTES), 4 * W::BYTES, hint);
            // SAFETY: i + 16 <= k.
            unsafe {
                let x = L::load(x.add(i));
                for r in 0..4 {
                    acc[r] = W::load::<L>(rows[r], i).fma(x, acc[r]);
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
    // SAFETY: the caller's promise.
    unsafe {
        match L::Part::LEN {
            16 => many_rows::<L, W, 8>(set, cols, acc),
            _ => many_rows::<L, W, 4>(set, cols, acc),
        }
    }
}

/// R rows at a time, which divide [`ROWS`].
///
/// # Safety
/// See [`super::variants::FloatFn`].
#[inline(always)]
unsafe fn many_rows<L: Lanes, W: Weights, const R: usize>(set: &RowSet, cols: &[ColPtr], acc: &mut [[f32; ROWS]]) {
    let near = Near::new(set.row(0), ROWS, set.bytes.q);
    let full = set.k / 16 * 16;
    let mut wide = [[0.0f32; SPAN]; R];
    let mut sums = [[[0.0f32; 16]; R]; COLS];
    for first in (0..set.n).step_by(R) {
        let rows: [Row; R] = std::array::from_fn(|i| row(set, first + i));
        for sums in &mut sums[..cols.len()] {
            *sums = [[0.0; 16]; R];
        }
        for k in (0..full).step_by(SPAN) {
            let n = (full - k).min(SPAN);
            near.prefetch((first * set.k + R * k) * W::BYTES / 16, R * n * W::BYTES / 16);
            for r in 0..R {
                // SAFETY: rows have n values from k on, a span has room for them.
                unsafe { widen::<L::Part, W>(rows[r], k, &mut wide[r][..n]) }
            }
            for (cols, sums) in cols.chunks(TILE_COLS).zip(sums.chunks_mut(TILE_COLS)) {
                // SAFETY: the caller's promise about columns; the spans have n values.
                unsafe {
                    match cols.len() {
                        1 => group::<L, R, 1>(&wide, cols, k, n, sums),
                        2 => group::<L, R, 2>(&wide, cols, k, n, sums),
                        _ => group::<L, R, TILE_COLS>(&wide, cols, k, n, sums),
                    }
                }
            }
        }
        for (c, col) in cols.iter().enumerate() {
            for r in 0..R {
                // SAFETY: the row and the column have k values.
                acc[c][first + r] =
                    unsafe { finish::<L, W>(sums[c][r], rows[r], col.row.q.cast_const().cast(), set.k) };
            }
        }
    }
}

/// # Safety
/// `row` is readable for as many weights from `k` on as `wide` is long, a multiple of 16.
#[inline(always)]
unsafe fn widen<P: Part, W: Weights>(row: Row, k: usize, wide: &mut [f32]) {
    for i in (0..wide.len()).step_by(P::LEN) {
        // SAFETY: the caller's promise; `i + LEN` is at most the length.
        unsafe { W::read::<P>(row, k + i).write(wide.as_mut_ptr().add(i)) }
    }
}

/// A span of n values from value k on of R rows and C columns.
///
/// # Safety
/// There are C columns and as many places in `sums`; columns have the values.
#[inline(always)]
unsafe fn group<L: Lanes, const R: usize, const C: usize>(
    wide: &[[f32; SPAN]; R],
    cols: &[ColPtr],
    k: usize,
    n: usize,
    sums: &mut [[[f32; 16]; R]],
) {
    let x: [*const f32; C] = std::array::from_fn(|c| cols[c].row.q.cast_const().cast::<f32>().wrapping_add(k));
    for part in (0..16).step_by(L::Part::LEN) {
        // SAFETY: the caller's promise; n is at most a span.
        unsafe { tile::<L::Part, R, C>(wide, x, n, part, sums) }
    }
}

/// Adds to the lanes from `part` on of `sums` the products of n values, a multiple of 16.
///
/// # Safety
/// Columns are readable for n values, at most a span; `sums` has C columns.
#[inline(always)]
unsafe fn tile<P: Part, const R: usize, const C: usize>(
    wide: &[[f32; SPAN]; R],
    x: [*const f32; C],
    n: usize,
    part: usize,
    sums: &mut [[[f32; 16]; R]],
) {
    // SAFETY: `part + P::LEN` is at most 16, `i + 16` at most n.
    unsafe {
        let mut acc = [[P::read(sums[0][0].as_ptr()); C]; R];
        for r in 0..R {
            for c in 0..C {
                acc[r][c] = P::read(sums[c][r].as_ptr().add(part));
            }
        }
        for i in (part..n).step_by(16) {
            let mut xs = [acc[0][0]; C];
            for c in 0..C {
                xs[c] = P::read(x[c].add(i));
            }
            for r in 0..R {
                let w = P::read(wide[r].as_ptr().add(i));
                for c in 0..C {
                    acc[r][c] = w.multiply_add(xs[c], acc[r][c]);
                }
            }
        }
        for r in 0..R {
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
kernels!(F8, one_f8, many_f8, one_f8_lanes, many_f8_lanes);
kernels!(Nvfp4, one_nvfp4, many_nvfp4, one_nvfp4_lanes, many_nvfp4_lanes);
kernels!(Nvfp4Scaled, one_nvfp4_scaled, many_nvfp4_scaled, one_nvfp4_scaled_lanes, many_nvfp4_scaled_lanes);
