//! Code books as super-blocks of unsigned bytes, and the panels of types that are unpacked row by row.

use std::arch::x86_64::*;

use quant::types::layout::SuperBlock;

use super::super::grid::{Coded, Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs};
use super::large::{Large, Tq1, Tq2};
use super::panel_words::{Headers, PanelLarge, put, transpose4};
use super::transpose8;

#[inline]
#[target_feature(enable = "avx2")]
fn vector(w: [u64; 4]) -> __m256i {
    _mm256_setr_epi64x(w[0].cast_signed(), w[1].cast_signed(), w[2].cast_signed(), w[3].cast_signed())
}

/// All bits of byte `i` for bit `i`.
#[inline]
#[target_feature(enable = "avx2")]
fn spread(bits: u32) -> __m256i {
    let eights = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
    let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits.cast_signed()), eights);
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
    _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit)
}

impl<T: Coded> Large for T {
    const LAYOUT: SuperBlock = <T as Coded>::LAYOUT;
    const FACTOR: f32 = <T as Coded>::FACTOR;
    const BITS: usize = if <T as Coded>::OFFSET < 64 { 5 } else { 7 };
    const OFFSET: i16 = <T as Coded>::OFFSET;
    const PANEL_OFFSET: i16 = if <T as Coded>::OFFSET < 64 { <T as Coded>::OFFSET } else { 128 };
    const WIDE_SCALES: bool = false;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn group(p: *const u8, j: usize) -> __m256i {
        // SAFETY: the promise of the trait.
        let (q, bits) = unsafe { T::parts(p, j) };
        let (q, minus) = (vector(q), spread(bits));
        let offset = _mm256_set1_epi8(<T as Coded>::OFFSET as i8);
        let q = if T::ADDS {
            _mm256_add_epi8(q, _mm256_or_si256(minus, _mm256_set1_epi8(1)))
        } else {
            _mm256_sub_epi8(_mm256_xor_si256(q, minus), minus)
        };
        _mm256_add_epi8(q, offset)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scales(p: *const u8) -> __m128i {
        // SAFETY: the promise of the trait.
        let [low, high] = unsafe { <T as Coded>::scales(p) };
        _mm_set_epi64x(high.cast_signed(), low.cast_signed())
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn d(p: *const u8) -> u16 {
        // SAFETY: the promise of the trait.
        unsafe { <T as Coded>::d(p) }
    }
}

/// A panel's words from [`Large::group`], row by row: looking entries up takes longer than transposing them.
///
/// # Safety
/// As [`PanelLarge`].
macro_rules! row_by_row {
    ($($t:ident)*) => {
        $(impl PanelLarge for $t {
            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn headers(p: &[*const u8; 8]) -> Headers {
                // SAFETY: the promise of the trait.
                unsafe { headers::<$t>(p) }
            }
            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn groups(p: &[*const u8; 8], to: *mut __m256i) {
                for j in 0..8 {
                    // SAFETY: as above.
                    unsafe {
                        for (i, word) in words::<$t>(p, j).into_iter().enumerate() {
                            put(to, j, i, word);
                        }
                    }
                }
            }
        })*
    };
}

row_by_row!(Iq2Xxs Iq2Xs Iq2S Iq3Xxs Iq3S Iq1S Iq1M Tq1 Tq2);

/// # Safety
/// As [`PanelLarge::headers`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn headers<T: Large>(p: &[*const u8; 8]) -> Headers {
    // SAFETY: the caller's promise.
    unsafe {
        let scales = transpose4(array!(4, |i| _mm256_set_m128i(T::scales(p[i + 4]), T::scales(p[i]))));
        let bits = array!(8, |i| T::d(p[i]).cast_signed());
        let bits = _mm_setr_epi16(bits[0], bits[1], bits[2], bits[3], bits[4], bits[5], bits[6], bits[7]);
        let d = _mm256_mul_ps(_mm256_cvtph_ps(bits), _mm256_set1_ps(T::FACTOR));
        Headers { scales, mins: [_mm256_setzero_si256(); 4], d: [d; 2] }
    }
}

/// The words of 32-group `j` of eight blocks, a lane a block, with the offset of a panel.
///
/// # Safety
/// `p` points to readable blocks of type `T`, and the machine has AVX2, FMA and F16C.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(in super::super) unsafe fn words<T: Large>(p: &[*const u8; 8], j: usize) -> [__m256i; 8] {
    let more = _mm256_set1_epi8((T::PANEL_OFFSET - T::OFFSET) as i8);
    // SAFETY: the caller's promise.
    transpose8(array!(8, |i| _mm256_add_epi8(unsafe { T::group(p[i], j) }, more)))
}
