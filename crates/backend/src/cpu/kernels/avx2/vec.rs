//! Matrix-vector products: up to 16 rows times one column.
//!
//! 32-blocks are here: rows are taken eight at a time, so that the horizontal sums are shared and a lane of the f32
//! accumulator is a row, as the law wants one multiply-add a block and row, in the order of blocks. Super-blocks are in
//! [`mod@walk`], types in planes in [`mod@planar`].

use std::arch::x86_64::*;

use quant::WeightType;

use super::super::panel::ROWS;
use super::super::prefetch::{Far, Hint, Near, prefetch};
use super::super::variants::OneFn;
use super::super::{ActsShared, ColPtr, RowSet};
use super::large::{Iq4Xs, Large, Q2K, Q3K, Q4K, Q5K, Q6K};
use super::small::{Iq4Nl, Mxfp4, Products, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Small};
use super::{array, eights, in_turn, opaque, planar, put_eight, walk};

/// The kernels of one instruction set: the same source, compiled with its features. With VNNI the compiler turns a
/// product of pairs and an addition into `vpdpwssd`.
macro_rules! kernels {
    ($one:ident, $small:ident, $large:ident, $planar:path, $features:literal, $vnni:literal) => {
        /// The one-column kernel of a type.
        pub(in super::super) fn $one(t: WeightType) -> OneFn {
            match t {
                WeightType::Q4_0 => $small::<Q4_0>,
                WeightType::Q4_1 => $small::<Q4_1>,
                WeightType::Q5_0 => $small::<Q5_0>,
                WeightType::Q5_1 => $small::<Q5_1>,
                WeightType::Q8_0 => $small::<Q8_0>,
                WeightType::IQ4_NL => $small::<Iq4Nl>,
                WeightType::MXFP4 => $small::<Mxfp4>,
                WeightType::Q2_K => $large::<Q2K>,
                WeightType::Q3_K => $large::<Q3K>,
                WeightType::Q4_K => $large::<Q4K>,
                WeightType::Q5_K => $large::<Q5K>,
                WeightType::Q6_K => $large::<Q6K>,
                WeightType::IQ4_XS => $large::<Iq4Xs>,
                WeightType::MXFP4_PLANAR | WeightType::Affine(_) => $planar(t),
                WeightType::F32 | WeightType::F16 | WeightType::BF16 => unreachable!("floats have their own kernels"),
            }
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
            unsafe { walk::product::<T, $vnni>(set, col, out) }
        }
    };
}

kernels!(one, small_avx2, large_avx2, planar::one, "avx2,fma,f16c", false);
kernels!(
    one_avx512,
    small_avx512,
    large_avx512,
    planar::one_avx512,
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni",
    true
);

/// # Safety
/// See [`OneFn`]; the set is of type `T`.
#[inline(always)]
unsafe fn small<T: Small>(set: &RowSet, col: &ColPtr, out: &mut [f32; ROWS]) {
    for (first, step) in eights(set.n) {
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
                let p = opaque(row.add(T::BYTES * b));
                let p = array!(8, |i| p.add(i * stride));
                let Products { mut isum, d, m } = T::products(&p, col.row.q.add(T::X * b));
                let dx = _mm256_broadcast_ss(&*col.row.d.add(b));
                let sum = _mm256_set1_epi32(*col.row.sums.cast::<i32>().add(b));
                if T::OFFSET != 0 {
                    isum = _mm256_sub_epi32(isum, _mm256_mullo_epi32(in_turn(sum), _mm256_set1_epi32(T::OFFSET)));
                }
                acc = _mm256_fmadd_ps(_mm256_mul_ps(d, dx), _mm256_cvtepi32_ps(isum), acc);
                if T::MIN {
                    acc = _mm256_fmadd_ps(_mm256_mul_ps(m, dx), _mm256_cvtepi32_ps(sum), acc);
                }
            }
            put_eight(out, first, step, acc);
        }
    }
}
