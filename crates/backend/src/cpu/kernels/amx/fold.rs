//! From a panel of AVX-512 to one of AMX: signed bytes of 32-blocks, and two bytes of super-blocks, whose sub-scales are
//! multiplied in.

use std::arch::x86_64::*;

use super::super::panel::{Panel, ROWS};

/// The word of 16 rows with index `i` of `bytes`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn word(bytes: &[u8], i: usize) -> __m512i {
    let word = &bytes[i * 4 * ROWS..][..4 * ROWS];
    // SAFETY: the slice has 64 bytes.
    unsafe { _mm512_loadu_si512(word.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn put(bytes: &mut [u8], i: usize, v: __m512i) {
    let word = &mut bytes[i * 4 * ROWS..][..4 * ROWS];
    // SAFETY: the slice has 64 bytes.
    unsafe { _mm512_storeu_si512(word.as_mut_ptr().cast(), v) }
}

/// The sub-scales of 16-group `g`, twice a row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn scales(panel: &Panel, g: usize) -> __m512i {
    // SAFETY: the group has 64 bytes.
    unsafe { _mm512_loadu_si512(panel.scales[g].as_ptr().cast()) }
}

/// Takes the offset off the bytes of 32-blocks.
///
/// # Safety
/// See [`super::FoldFn`].
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn offset<const OFFSET: u8>(panel: &mut Panel, blocks: usize) {
    for i in 0..8 * blocks {
        let v = _mm512_sub_epi8(word(&panel.bytes, i), _mm512_set1_epi8(OFFSET.cast_signed()));
        put(&mut panel.bytes, i, v);
    }
}

/// Q2_K: `sc·q` is at most 45.
///
/// # Safety
/// See [`super::FoldFn`].
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn small_scales(panel: &mut Panel, _blocks: usize) {
    for g in 0..16 {
        let sc = scales(panel, g);
        for i in 4 * g..4 * g + 4 {
            // Both bytes of 16 bits at once: neither product carries.
            let v = _mm512_mullo_epi16(word(&panel.bytes, i), sc);
            put(&mut panel.bytes, i, v);
        }
    }
}

/// Q4_K and Q5_K: `sc = 8·high + low`, so that `high·q` and `low·q` are at most 7·31, and `sc·q = 8·(high·q) + low·q`.
///
/// # Safety
/// See [`super::FoldFn`].
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn split_scales(panel: &mut Panel, _blocks: usize) {
    for j in 0..8 {
        let sc = scales(panel, 2 * j);
        let (low, high) = (_mm512_and_si512(sc, _mm512_set1_epi16(7)), _mm512_srli_epi16::<3>(sc));
        for i in 8 * j..8 * j + 8 {
            let v = word(&panel.bytes, i);
            put(&mut panel.bytes, i, _mm512_mullo_epi16(v, low));
            put(&mut panel.high, i, _mm512_mullo_epi16(v, high));
        }
    }
}

/// Types with signed sub-scales for every `GROUP` values: `sc·(q - OFFSET)`, at most 4096, as a signed high byte and an
/// unsigned low byte.
///
/// # Safety
/// See [`super::FoldFn`].
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn split_products<const GROUP: usize, const OFFSET: i16>(panel: &mut Panel, _blocks: usize) {
    let low = _mm512_set1_epi16(0xff);
    for first in (0..64).step_by(GROUP / 4) {
        let sc = scales(panel, first / 4);
        let off = _mm512_mullo_epi16(sc, _mm512_set1_epi16(OFFSET));
        let (even, odd) = (_mm512_and_si512(sc, low), _mm512_slli_epi16::<8>(sc));
        for i in first..first + GROUP / 4 {
            let v = word(&panel.bytes, i);
            let even = _mm512_sub_epi16(_mm512_maddubs_epi16(v, even), off);
            let odd = _mm512_sub_epi16(_mm512_maddubs_epi16(v, odd), off);
            // Bits of the first where `low` has ones, of the second elsewhere.
            let (a, b) = (even, _mm512_slli_epi16::<8>(odd));
            put(&mut panel.bytes, i, _mm512_ternarylogic_epi32::<0xca>(low, a, b));
            let (a, b) = (_mm512_srli_epi16::<8>(even), odd);
            put(&mut panel.high, i, _mm512_ternarylogic_epi32::<0xca>(low, a, b));
        }
    }
}
