//! Matrix-vector products: up to 16 rows times one column.
//!
//! Rows are taken four or eight at a time, so that the horizontal sums are shared and a lane of the f32 accumulator is a
//! row: the law wants one multiply-add a block and row, in the order of blocks.

use std::arch::x86_64::*;

use quant::WeightType;

use super::super::panel::ROWS;
use super::super::variants::OneFn;
use super::super::{ActsShared, Ahead, ColPtr, RowSet, Stream};
use super::large::{Iq4Xs, Large, Q2K, Q3K, Q4K, Q5K, Q6K};
use super::small::{Iq4Nl, Mxfp4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Small};
use super::{array, both, eights, halves4, halves8, hsum4, load64, load256, opaque, planar, put_eight};

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
            unsafe { large::<T, $vnni>(set, col, out) }
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
        let ahead = Ahead::new(row, 8, set.bytes.q);
        // SAFETY: block b lies inside every row and the column; the machine has the instructions.
        unsafe {
            let mut acc = _mm256_setzero_ps();
            for b in 0..set.k / 32 {
                ahead.ask(8 * T::BYTES * b, 8 * T::BYTES);
                let p = opaque(row.add(T::BYTES * b));
                let p = array!(8, |i| p.add(i * stride));
                let mut isum = T::sums(&p, col.row.q.add(T::X * b));
                let d = _mm256_broadcast_ss(&*col.row.d.add(b));
                let sum = _mm256_set1_epi32(*col.row.sums.cast::<i32>().add(b));
                if T::OFFSET != 0 {
                    isum = _mm256_sub_epi32(isum, _mm256_mullo_epi32(sum, _mm256_set1_epi32(T::OFFSET)));
                }
                acc = _mm256_fmadd_ps(_mm256_mul_ps(T::scales(&p), d), _mm256_cvtepi32_ps(isum), acc);
                if let Some(at) = T::MIN {
                    acc = _mm256_fmadd_ps(_mm256_mul_ps(halves8(&p, at), d), _mm256_cvtepi32_ps(sum), acc);
                }
            }
            put_eight(out, first, step, acc);
        }
    }
}

/// A super-block of activations.
#[derive(Clone, Copy)]
struct X {
    /// 256 bytes.
    q: *const u8,
    /// Sub-scales, i16, the same in both halves.
    u: __m256i,
    /// Sums of the sixteen 16-groups.
    sums: __m256i,
    /// [`WORDS`].
    words: &'static [[u16; 16]; 8],
}

/// Shuffles that broadcast word `j` of each half to the whole half.
static WORDS: [[u16; 16]; 8] =
    [[0x0100; 16], [0x0302; 16], [0x0504; 16], [0x0706; 16], [0x0908; 16], [0x0b0a; 16], [0x0d0c; 16], [0x0f0e; 16]];

/// `acc + Σ` of the products of pairs.
#[inline(always)]
unsafe fn add_pairs<const VNNI: bool>(acc: __m256i, a: __m256i, b: __m256i) -> __m256i {
    // SAFETY: the machine has VNNI where the caller says so, and AVX2 always.
    unsafe { if VNNI { _mm256_dpwssd_epi32(acc, a, b) } else { _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)) } }
}

/// Integer dot product and minimums of a super-block, each in eight partial sums.
///
/// # Safety
/// `p` points to a block of type `T`, `x` to activations; the machine has the features.
#[inline(always)]
unsafe fn block<T: Large, const VNNI: bool>(p: *const u8, x: &X) -> (__m256i, __m256i) {
    // SAFETY: the caller's promise; x holds 256 bytes.
    unsafe {
        let (scales, mins, xq) = (T::scales(p), T::mins(p), opaque(x.q));
        // Even 16-groups to the low half, odd ones to the high half, as the 16-groups lie in a 32-group's register.
        let order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
        let s = _mm256_mullo_epi16(_mm256_cvtepi8_epi16(_mm_shuffle_epi8(scales, order)), x.u);
        let mut acc = _mm256_setzero_si256();
        if T::OFFSET != 0 {
            let off = _mm256_mullo_epi16(_mm256_cvtepi8_epi16(scales), _mm256_set1_epi16(-T::OFFSET));
            acc = _mm256_madd_epi16(off, x.sums);
        }
        macro_rules! groups {
            ($($j:literal)*) => {
                $(
                    let (group, q) = (T::group(p, $j), load256(xq.add(32 * $j)));
                    let pairs = if T::UNSIGNED {
                        _mm256_maddubs_epi16(group, q)
                    } else {
                        _mm256_maddubs_epi16(_mm256_abs_epi8(group), _mm256_sign_epi8(q, group))
                    };
                    let scale = _mm256_shuffle_epi8(s, load256(x.words[$j].as_ptr().cast()));
                    acc = add_pairs::<VNNI>(acc, pairs, scale);
                )*
            };
        }
        groups!(0 1 2 3 4 5 6 7);
        (acc, _mm256_madd_epi16(_mm256_cvtepu8_epi16(mins), x.sums))
    }
}

/// # Safety
/// See [`OneFn`]; the set is of type `T`.
#[inline(always)]
unsafe fn large<T: Large, const VNNI: bool>(set: &RowSet, col: &ColPtr, out: &mut [f32; ROWS]) {
    // Hidden from the compiler, which would make two shuffles of one whose pattern it knows.
    let words = std::hint::black_box(&WORDS);
    let stream = Stream::new(set, 4);
    for first in (0..set.n).step_by(4) {
        let mut p: [*const u8; 4] = std::array::from_fn(|i| set.row(first + i));
        // SAFETY: the machine has the instructions, as below.
        let mut acc = unsafe { _mm_setzero_ps() };
        for b in 0..set.k / 256 {
            stream.ask(first * set.bytes.q + 4 * T::BYTES * b, 4 * T::BYTES);
            // SAFETY: block b lies inside every row and the column; the last `add` ends at most at the row's end.
            unsafe {
                let x = X {
                    q: col.row.q.add(256 * b),
                    u: both(_mm_cvtepu8_epi16(load64(col.row.u.add(8 * b)))),
                    sums: load256(col.row.sums.add(32 * b)),
                    words,
                };
                let sums = array!(4, |i| block::<T, VNNI>(p[i], &x));
                let d = _mm_broadcast_ss(&*col.row.d.add(b));
                let isum = _mm_cvtepi32_ps(hsum4(array!(4, |i| sums[i].0)));
                acc = _mm_fmadd_ps(_mm_mul_ps(halves4(&p, T::D), d), isum, acc);
                if let Some(at) = T::DMIN {
                    let msum = _mm_cvtepi32_ps(hsum4(array!(4, |i| sums[i].1)));
                    acc = _mm_fnmadd_ps(_mm_mul_ps(halves4(&p, at), d), msum, acc);
                }
                p = p.map(|p| p.add(T::BYTES));
            }
        }
        // SAFETY: `out` has ROWS places, `first` is at most 12.
        unsafe { _mm_storeu_ps(out.as_mut_ptr().add(first), acc) };
    }
}
