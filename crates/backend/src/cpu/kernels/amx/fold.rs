//! From the words of a panel of AVX-512 to one of AMX: signed bytes of 32-blocks, and two bytes of super-blocks, whose
//! sub-scales are multiplied in.

use std::arch::x86_64::*;

use super::super::RowSet;
use super::super::avx512::{self, Put};
use super::super::panel::{Panel, ROWS};

/// Takes the offset off the bytes of 32-blocks.
///
/// # Safety
/// See [`super::FoldFn`].
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn offset<const OFFSET: u8>(panel: &mut Panel, blocks: usize) {
    for word in panel.bytes.as_chunks_mut::<{ 4 * ROWS }>().0.iter_mut().take(8 * blocks) {
        let at = word.as_mut_ptr().cast();
        // SAFETY: a word of 16 rows has 64 bytes.
        unsafe {
            _mm512_storeu_si512(at, _mm512_sub_epi8(_mm512_loadu_si512(at), _mm512_set1_epi8(OFFSET.cast_signed())))
        }
    }
}

/// Unpacks quarter `part` of a super-block into the bytes of `P`, and its minimums.
///
/// # Safety
/// See [`avx512::PartFn`]; the rows are of type `T`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn part<T: avx512::Groups, P: Put>(set: &RowSet, chunk: usize, part: usize, panel: &mut Panel) {
    // SAFETY: the caller's promise.
    unsafe { avx512::part::<T, P>(set, chunk, part, panel) };
    if part == 0 && T::DMIN.is_some() {
        mins(panel);
    }
}

/// Minimums in pairs of 16 bits to words of bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn mins(panel: &mut Panel) {
    for i in 0..4 {
        // SAFETY: the pairs of 16 rows and their words have 64 bytes.
        unsafe {
            let pair = |i: usize| _mm512_loadu_si512(panel.mins[i].as_ptr().cast());
            let close = |v| _mm512_or_si512(v, _mm512_srli_epi32::<8>(v));
            let low = _mm512_and_si512(close(pair(2 * i)), _mm512_set1_epi32(0xffff));
            let word = _mm512_or_si512(low, _mm512_slli_epi32::<16>(close(pair(2 * i + 1))));
            _mm512_storeu_si512(panel.min_bytes.as_mut_ptr().add(4 * ROWS * i).cast(), word);
        }
    }
}

/// The sub-scale of word `i` of 32-group `j`, twice a row. It is at the even 16-group where `WIDE`.
///
/// # Safety
/// `j` and `i` are below 8.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn scale<const WIDE: bool>(panel: &Panel, j: usize, i: usize) -> __m512i {
    let g = 2 * j + if WIDE { 0 } else { i / 4 };
    // SAFETY: the caller's promise; the group has 64 bytes.
    unsafe { _mm512_loadu_si512(panel.scales.as_ptr().add(g).cast()) }
}

/// Writes a word of the low bytes and one of the high ones.
///
/// # Safety
/// `j` and `i` are below 8.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn store(panel: &mut Panel, j: usize, i: usize, low: __m512i, high: Option<__m512i>) {
    let at = (8 * j + i) * 4 * ROWS;
    // SAFETY: the caller's promise; both have 64 words of 64 bytes.
    unsafe {
        _mm512_storeu_si512(panel.bytes.as_mut_ptr().add(at).cast(), low);
        if let Some(high) = high {
            _mm512_storeu_si512(panel.high.as_mut_ptr().add(at).cast(), high);
        }
    }
}

/// Q2_K: `sc·q` is at most 45.
pub(super) struct SmallScales;

impl Put for SmallScales {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn put(panel: &mut Panel, j: usize, i: usize, word: __m512i) {
        // Both bytes of 16 bits at once: neither product carries.
        // SAFETY: the promise of the trait.
        unsafe { store(panel, j, i, _mm512_mullo_epi16(word, scale::<false>(panel, j, i)), None) }
    }
}

/// Q4_K and Q5_K: `sc = 8·high + low`, so that `high·q` and `low·q` are at most 7·31, and `sc·q = 8·(high·q) + low·q`.
pub(super) struct SplitScales;

impl Put for SplitScales {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn put(panel: &mut Panel, j: usize, i: usize, word: __m512i) {
        // SAFETY: the promise of the trait.
        unsafe {
            let sc = scale::<true>(panel, j, i);
            let (low, high) = (_mm512_and_si512(sc, _mm512_set1_epi16(7)), _mm512_srli_epi16::<3>(sc));
            store(panel, j, i, _mm512_mullo_epi16(word, low), Some(_mm512_mullo_epi16(word, high)));
        }
    }
}

/// Types with signed sub-scales, of 32-groups where `WIDE`: `sc·(q - OFFSET)`, at most 4096, as a signed high byte and
/// an unsigned low byte.
pub(super) struct SplitProducts<const WIDE: bool, const OFFSET: i16>;

impl<const WIDE: bool, const OFFSET: i16> Put for SplitProducts<WIDE, OFFSET> {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn put(panel: &mut Panel, j: usize, i: usize, word: __m512i) {
        // SAFETY: the promise of the trait.
        unsafe {
            let (sc, low) = (scale::<WIDE>(panel, j, i), _mm512_set1_epi16(0xff));
            let off = _mm512_mullo_epi16(sc, _mm512_set1_epi16(OFFSET));
            let even = _mm512_sub_epi16(_mm512_maddubs_epi16(word, _mm512_and_si512(sc, low)), off);
            let odd = _mm512_sub_epi16(_mm512_maddubs_epi16(word, _mm512_slli_epi16::<8>(sc)), off);
            // Bits of the second operand where `low` has ones, of the third elsewhere.
            let lows = _mm512_ternarylogic_epi32::<0xca>(low, even, _mm512_slli_epi16::<8>(odd));
            let highs = _mm512_ternarylogic_epi32::<0xca>(low, _mm512_srli_epi16::<8>(even), odd);
            store(panel, j, i, lows, Some(highs));
        }
    }
}
