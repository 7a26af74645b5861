//! Integer sums of a 32-block: eight rows of bytes times one column of bytes.
//!
//! `vpmaddubsw` multiplies unsigned weights with signed activations and adds neighbours in 16 bits. Sums stay 16 bits
//! wide, and those of several rows share a register, as long as they fit. `MAX` is the largest integer of a type;
//! activations are at most 127, so that the sum of `n` products fits when `n · MAX · 127 <= 32767`.

use std::arch::x86_64::*;

use super::{both, hsum4_halves, load128, load256};

/// Whether the sum of `n` products fits 16 bits.
const fn fits(n: i32, max: i32) -> bool {
    n * max * 127 <= i16::MAX as i32
}

/// Values 0 .. 16 of a block of activations in both halves, and values 16 .. 32.
///
/// # Safety
/// `x` is readable for 32 bytes; the machine has AVX2.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn halves(x: *const u8) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    unsafe { [both(load128(x)), both(load128(x.add(16)))] }
}

/// Even values of a block of activations in both halves, and odd ones.
///
/// # Safety
/// As [`halves`].
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn even_odd(x: *const u8) -> [__m256i; 2] {
    let apart = both(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    // SAFETY: the caller's promise.
    let x = _mm256_shuffle_epi8(unsafe { load256(x) }, apart);
    [_mm256_permute4x64_epi64::<0x88>(x), _mm256_permute4x64_epi64::<0xdd>(x)]
}

/// Products of a pair of registers, added up to 16 bits where four of them fit, else to 32 bits. Signed weights take
/// the sign of the activations, whose magnitudes serve all rows.
#[inline]
#[target_feature(enable = "avx2")]
fn products<const MAX: i32, const SIGNED: bool>(w: [__m256i; 2], x: [__m256i; 2]) -> __m256i {
    let p = array!(2, |i| if SIGNED {
        _mm256_maddubs_epi16(_mm256_abs_epi8(x[i]), _mm256_sign_epi8(w[i], x[i]))
    } else {
        _mm256_maddubs_epi16(w[i], x[i])
    });
    if fits(4, MAX) { _mm256_add_epi16(p[0], p[1]) } else { _mm256_add_epi32(ones(p[0]), ones(p[1])) }
}

/// Adds neighbours of 16 bits.
#[inline]
#[target_feature(enable = "avx2")]
fn ones(p: __m256i) -> __m256i {
    _mm256_madd_epi16(p, _mm256_set1_epi16(1))
}

/// Sums of eight rows, a lane a row. `w(i)` is a pair of registers that have row `i` in their low halves and row
/// `i + 4` in their high halves, as `x` has the column in both.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn of_halves<const MAX: i32, const SIGNED: bool>(w: [[__m256i; 2]; 4], x: [__m256i; 2]) -> __m256i {
    let p = array!(4, |i| products::<MAX, SIGNED>(w[i], x));
    if fits(16, MAX) {
        // Pairs of a row's sums, a row after the other.
        let pair = |a, b| _mm256_add_epi16(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let (t, u) = (pair(p[0], p[1]), pair(p[2], p[3]));
        ones(_mm256_add_epi16(_mm256_unpacklo_epi64(t, u), _mm256_unpackhi_epi64(t, u)))
    } else if fits(8, MAX) {
        let pair = |a, b| ones(_mm256_add_epi16(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)));
        let (t, u) = (pair(p[0], p[1]), pair(p[2], p[3]));
        _mm256_add_epi32(_mm256_unpacklo_epi64(t, u), _mm256_unpackhi_epi64(t, u))
    } else if fits(4, MAX) {
        hsum4_halves(array!(4, |i| ones(p[i])))
    } else {
        hsum4_halves(p)
    }
}
