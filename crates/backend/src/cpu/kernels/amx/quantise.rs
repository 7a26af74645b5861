//! The quantisers of AVX2 and AVX-512, and the bytes of integers that have more than eight bits.

use std::arch::x86_64::*;

use super::super::acts::RowPtr;
use super::super::panel::CHUNK;
use super::super::{avx2, avx512};

/// Stores the bytes of 32 integers `256·high + low`: of `v` the low ones, of `above` the high ones.
///
/// # Safety
/// Both addresses are writable for 32 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn store(v: __m512i, above: __m512i, low: *mut u8, high: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe {
        _mm256_storeu_si256(low.cast(), _mm512_cvtepi16_epi8(v));
        _mm256_storeu_si256(high.cast(), _mm512_cvtepi16_epi8(_mm512_srai_epi16::<8>(above)));
    }
}

/// Where the low and the high bytes of value `at` of a row of `k` are.
fn digits(row: &RowPtr, k: usize, at: usize) -> (*mut u8, *mut u8) {
    let first = at / CHUNK * CHUNK;
    let low = row.digits.wrapping_add(2 * first + at % CHUNK);
    (low, low.wrapping_add((k - first).min(CHUNK)))
}

/// # Safety
/// See [`super::super::variants::QuantiseFn`].
#[target_feature(enable = "avx512f,avx512bw,avx2,fma")]
pub(in super::super) unsafe fn block32(x: &[f32], row: &RowPtr) {
    // SAFETY: the caller's promise; the row has twice as many digits as values.
    unsafe {
        avx2::quantise::block32(x, row);
        for at in (0..x.len()).step_by(32) {
            let v = _mm512_loadu_si512(row.q.add(2 * at).cast());
            let (low, high) = digits(row, x.len(), at);
            store(v, v, low, high);
        }
    }
}

/// # Safety
/// See [`super::super::variants::QuantiseFn`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma")]
pub(in super::super) unsafe fn block256(x: &[f32], row: &RowPtr) {
    // SAFETY: the caller's promise; the digits take the place of the wide form.
    unsafe {
        avx512::quantise::block256(x, row);
        for at in (0..x.len()).step_by(32) {
            let u = _mm512_set1_epi16(i16::from(*row.u.add(at / 32)));
            let v = _mm512_mullo_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256(row.q.add(at).cast())), u);
            // The low byte has a sign, for which the high one makes up.
            let above = _mm512_add_epi16(v, _mm512_set1_epi16(128));
            let (low, high) = digits(row, x.len(), at);
            store(v, above, low, high);
        }
    }
}
