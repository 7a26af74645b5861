//! Matrix-vector products: up to 16 rows times one column.
//!
//! Types of 32-blocks and planes are here: rows are taken eight at a time, so that the horizontal sums are shared and a
//! lane of the f32 accumulator is a row; the law wants one multiply-add per block and row, in the order of blocks.
//! Super-blocks are in [`large_vec`].

use std::arch::x86_64::*;

use quant::WeightType;

use super::super::panel::ROWS;
use super::super::prefetch::{Far, Hint, Near, once, prefetch};
use super::super::types::of_type;
use super::super::variants::OneFn;
use super::super::{ActsShared, ColPtr, RowSet};
use super::large::Large;
use super::planar::{Groups, Ints, Scale};
use super::small::{Products, Small};
use super::{hide, keep_order, large_vec, row_octets, store_octet};

/// The kernels of one instruction set: the same source, compiled with its features. With VNNI super-blocks multiply
/// pairs and add them in one instruction.
macro_rules! kernels {
    ($one:ident, $small:ident, $large:ident, $planar:ident, $features:literal, $vnni:literal) => {
        /// The one-column kernel of a type.
        pub(in super::super) fn $one(t: WeightType) -> OneFn {
            of_type!(t, $small, $large, $planar)
        }

        /// # Safety
        /// See [`OneFn`]; the set is of type `T`.
        #[target_feature(enable = $features)]
        unsafe fn $small<T: Small>(set: &RowSet, _acts: &ActsShared, col: &ColPtr, out: &mut [f32; ROWS]) {
            // SAFETY: the caller's promise.
            unsafe { small::<T>(set, col, out) }
        }

        /// # Safety
        /// See [`OneFn`]; the set is of type `T`.
        #[target_feature(enable = $features)]
        unsafe fn $large<T: Large>(set: &RowSet, _acts: &ActsShared, col: &ColPtr, out: &mut [f32; ROWS]) {
            // SAFETY: the caller's promise.
            unsafe { large_vec::product::<T, $vnni>(set, col, out) }
        }

        /// # Safety
        /// See [`OneFn`]; the set's integers are `Q`, its scales `S`, and it has biases where `MIN`.
        #[target_feature(enable = $features)]
        unsafe fn $planar<Q: Ints, S: Scale, const MIN: bool>(
            set: &RowSet,
            _acts: &ActsShared,
            col: &ColPtr,
            out: &mut [f32; ROWS],
        ) {
            let group = set.dtype.block_len();
            for (first, step) in row_octets(set.n) {
                // SAFETY: the caller's promise.
                unsafe { store_octet(out, first, step, planar::<Q, S, MIN>(set, first, step, group, col)) }
            }
        }
    };
}

kernels!(one, small_avx2, large_avx2, planar_avx2, "avx2,fma,f16c", false);
kernels!(
    one_avx512,
    small_avx512,
    large_avx512,
    planar_avx512,
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni",
    true
);

/// # Safety
/// See [`OneFn`]; the set is of type `T`.
#[inline(always)]
unsafe fn small<T: Small>(set: &RowSet, col: &ColPtr, out: &mut [f32; ROWS]) {
    for (first, step) in row_octets(set.n) {
        let (row, stride) = (set.row(first), step * set.bytes.q);
        let (near, far) = (Near::new(row, 8, set.bytes.q), Far::new(set, 8).address(first * set.bytes.q));
        // SAFETY: block b lies inside every row and the column; the machine has the instructions.
        unsafe {
            let mut acc = _mm256_setzero_ps();
            for b in 0..set.k / 32 {
                if T::X > 32 {
                    prefetch(far.wrapping_add(8 * T::BYTES * b), 8 * T::BYTES, Hint::L2);
                } else {
                    near.prefetch(8 * T::BYTES * b, 8 * T::BYTES);
                }
                let p = hide(row.add(T::BYTES * b));
                let p = array!(8, |i| p.add(i * stride));
                let Products { isum, d, m } = T::products(&p, col.row.q.add(T::X * b));
                acc = add_block(acc, (isum, T::OFFSET), d, T::MIN.then_some(m), col, b);
            }
            store_octet(out, first, step, acc);
        }
    }
}

/// `acc + d·dx·isum + m·dx·Σx` for block `b` of the column, a lane a row; an offset comes off `isum` first.
///
/// # Safety
/// The column has the block; the machine has AVX2 and FMA.
#[inline(always)]
unsafe fn add_block(
    mut acc: __m256,
    (mut isum, offset): (__m256i, i32),
    d: __m256,
    m: Option<__m256>,
    col: &ColPtr,
    b: usize,
) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        let dx = _mm256_broadcast_ss(&*col.row.d.add(b));
        let sum = _mm256_set1_epi32(*col.row.sums.cast::<i32>().add(b));
        if offset != 0 {
            isum = _mm256_sub_epi32(isum, _mm256_mullo_epi32(keep_order(sum), _mm256_set1_epi32(offset)));
        }
        acc = _mm256_fmadd_ps(_mm256_mul_ps(d, dx), _mm256_cvtepi32_ps(isum), acc);
        if let Some(m) = m {
            acc = _mm256_fmadd_ps(_mm256_mul_ps(m, dx), _mm256_cvtepi32_ps(sum), acc);
        }
        acc
    }
}

/// The products of one of [`row_octets`], a lane a row, in groups of `group` values.
///
/// # Safety
/// See [`OneFn`]; the set has these rows, its integers are `Q`, its scales `S`, and it has biases where `MIN`.
#[inline(always)]
unsafe fn planar<Q: Ints, S: Scale, const MIN: bool>(
    set: &RowSet,
    first: usize,
    step: usize,
    group: usize,
    col: &ColPtr,
) -> __m256 {
    let bytes = 4 * Q::BITS;
    let (row, scales, biases) = (set.row(first), set.scales(first), set.biases(first));
    let (near, far) = (Near::new(row, 8, set.bytes.q), Far::new(set, 8).address(first * set.bytes.q));
    let (n_groups, per_group) = (set.k / group, group / 32); // blocks
    let (mut b, hint) = (0, once());
    // SAFETY: the caller's promise: groups and blocks lie inside every row and the column.
    unsafe {
        let rows = |p: *const u8, bytes: usize| array!(8, |r| p.wrapping_add(r * step * bytes));
        let mut acc = _mm256_setzero_ps();
        let mut groups = Groups::new();
        for start in (0..n_groups).step_by(8) {
            let n = (n_groups - start).min(8);
            // New row addresses for every eight groups: sixteen running pointers would live in memory.
            let (d, m) = (hide(scales.wrapping_add(start * S::BYTES)), hide(biases.wrapping_add(start * S::BYTES)));
            groups.load::<S, MIN>(rows(d, set.bytes.scales), rows(m, set.bytes.biases), n);
            for g in 0..n {
                // Prefetches the planes of the next eight rows a line at a time: all at once they stall the stream of
                // integers.
                if g % (64 / (8 * S::BYTES)) == 0 {
                    for (plane, bytes) in [(scales, set.bytes.scales), (biases, set.bytes.biases)] {
                        prefetch(plane.wrapping_add(8 * (bytes + (start + g) * S::BYTES)), 64, hint);
                    }
                }
                let (d, m) = (groups.d[g], groups.m[g]);
                for _ in 0..per_group {
                    if Q::BITS == 8 {
                        prefetch(far.wrapping_add(8 * bytes * b), 8 * bytes, Hint::L2);
                    } else {
                        near.prefetch(8 * bytes * b, 8 * bytes);
                    }
                    let p = hide(row.add(bytes * b));
                    let isum = Q::sums(&rows(p, set.bytes.q), &col.row, b);
                    acc = add_block(acc, (isum, Q::OFFSET), d, MIN.then_some(m), col, b);
                    b += 1;
                }
            }
        }
        acc
    }
}
