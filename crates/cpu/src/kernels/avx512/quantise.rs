//! AVX2's quantiser of super-blocks, and what the panels of pairs start from.

use std::arch::x86_64::*;

use super::super::acts::RowPtr;
use super::super::avx2;

/// # Safety
/// See [`super::super::variants::QuantiseFn`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma")]
pub(in super::super) unsafe fn block256(x: &[f32], row: &RowPtr) {
    // SAFETY: the caller's promise; the row has two parts for every 16 values.
    unsafe {
        avx2::quantise::block256(x, row);
        for at in (0..x.len()).step_by(64) {
            let q = _mm512_loadu_si512(row.q.add(at).cast());
            let words = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(32), q);
            // Words 0 and 2 of every four, and 1 and 3; twice.
            let parts = _mm512_add_epi32(words, _mm512_shuffle_epi32::<0x4e>(words));
            let parts = _mm512_sub_epi32(_mm512_setzero_si512(), parts);
            let parts = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 0, 2, 4, 6), parts);
            _mm256_storeu_si256(row.parts.add(at / 8).cast(), _mm512_castsi512_si256(parts));
        }
    }
}
