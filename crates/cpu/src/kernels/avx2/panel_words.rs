//! The formats' part of a panel: blocks of eight rows become words of four integers, a lane a row. [`quant::types`]
//! draws the layouts.
//!
//! Rows are transposed while they are packed: words of 4-bit integers take half the shuffles of bytes, those of 2 bits
//! a quarter. A format then decodes eight rows at once.

use std::arch::x86_64::*;

use quant::WeightType;
use quant::types::iq::{E2M1_DOUBLED, IQ4_VALUES};

use super::super::panel::offset;
use super::large::{Iq4Xs, Large, Q2K, Q3K, Q4K, Q5K, Q6K};
use super::small::{Iq4Nl, Mxfp4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Small, load_e8m0x8, look_up, with_offset};
use super::{both, load64, load128};

/// The four words at each of eight addresses, `[word]`, a lane an address.
///
/// # Safety
/// Sixteen bytes are readable at every address.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn words4(p: &[*const u8; 8], at: usize) -> [__m256i; 4] {
    // SAFETY: the caller's promise.
    transpose4(array!(4, |i| unsafe { _mm256_set_m128i(load128(p[i + 4].add(at)), load128(p[i].add(at))) }))
}

/// The words of four registers whose halves are addresses `i` and `i + 4`, `[word]`, a lane an address.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn transpose4(t: [__m256i; 4]) -> [__m256i; 4] {
    let (a, b) = (_mm256_unpacklo_epi32(t[0], t[1]), _mm256_unpacklo_epi32(t[2], t[3]));
    let (c, d) = (_mm256_unpackhi_epi32(t[0], t[1]), _mm256_unpackhi_epi32(t[2], t[3]));
    [_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b), _mm256_unpacklo_epi64(c, d), _mm256_unpackhi_epi64(c, d)]
}

/// The two words at each of eight addresses.
///
/// # Safety
/// Eight bytes are readable at every address.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn words2(p: &[*const u8; 8], at: usize) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    let t = array!(4, |i| unsafe {
        let (i, j) = (i % 2 * 2 + i / 2 * 4, i % 2 * 2 + i / 2 * 4 + 1);
        _mm_unpacklo_epi64(load64(p[i].add(at)), load64(p[j].add(at)))
    });
    let (a, b) = (_mm256_set_m128i(t[2], t[0]), _mm256_set_m128i(t[3], t[1]));
    let (a, b) = (_mm256_castsi256_ps(a), _mm256_castsi256_ps(b));
    [_mm256_castps_si256(_mm256_shuffle_ps::<0x88>(a, b)), _mm256_castps_si256(_mm256_shuffle_ps::<0xdd>(a, b))]
}

/// The word at each of eight addresses.
///
/// # Safety
/// Four bytes are readable at every address.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn word(p: &[*const u8; 8], at: usize) -> __m256i {
    // SAFETY: the caller's promise.
    let w = |i: usize| unsafe { p[i].add(at).cast::<i32>().read_unaligned() };
    _mm256_setr_epi32(w(0), w(1), w(2), w(3), w(4), w(5), w(6), w(7))
}

/// The f16 in the lower halves of eight words, and those in the upper halves.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn f16_pairs(words: __m256i) -> [__m256; 2] {
    let low = _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
    let packed = _mm256_packus_epi32(low, _mm256_srli_epi32::<16>(words));
    let packed = _mm256_permute4x64_epi64::<0xd8>(packed);
    [_mm256_cvtph_ps(_mm256_castsi256_si128(packed)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(packed))]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn low(v: __m256i) -> __m256i {
    _mm256_and_si256(v, _mm256_set1_epi8(15))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn high(v: __m256i) -> __m256i {
    low(_mm256_srli_epi16::<4>(v))
}

pub(in super::super) const IQ4_WITH_OFFSET: [i8; 16] = with_offset(IQ4_VALUES, offset(WeightType::IQ4_NL));
pub(super) const E2M1_WITH_OFFSET: [i8; 16] = with_offset(E2M1_DOUBLED, offset(WeightType::MXFP4));

/// A 32-block format.
///
/// # Safety
/// `p` points to eight readable blocks of the format, and the machine has AVX2, FMA and F16C.
pub(super) trait PanelSmall: Small {
    /// The integers in the order and with the offset of the panel, the scales, and the minimums where there are any.
    unsafe fn block(p: &[*const u8; 8]) -> ([__m256i; 8], [__m256; 2]);
}

/// One format: the integers of values 0 .. 16 and 16 .. 32 from the low and the high nibbles of its bytes.
macro_rules! nibbles {
    ($t:ident, at $at:literal, |$codes:ident| $e:expr) => {
        impl PanelSmall for $t {
            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn block(p: &[*const u8; 8]) -> ([__m256i; 8], [__m256; 2]) {
                // SAFETY: the promise of the trait.
                let (w, head) = unsafe { (words4(p, $at), word(p, 0)) };
                let integers = array!(8, |i| {
                    let $codes = if i < 4 { low(w[i]) } else { high(w[i - 4]) };
                    $e
                });
                (integers, f16_pairs(head))
            }
        }
    };
}

nibbles!(Q4_0, at 2, |codes| _mm256_add_epi8(codes, _mm256_set1_epi8(8)));
nibbles!(Q4_1, at 4, |codes| codes);
nibbles!(Iq4Nl, at 2, |codes| look_up(&IQ4_WITH_OFFSET, codes));

impl PanelSmall for Mxfp4 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn block(p: &[*const u8; 8]) -> ([__m256i; 8], [__m256; 2]) {
        // SAFETY: the promise of the trait.
        let (w, scales) = unsafe { (words4(p, 1), load_e8m0x8(p)) };
        let integers = array!(8, |i| look_up(&E2M1_WITH_OFFSET, if i < 4 { low(w[i]) } else { high(w[i - 4]) }));
        (integers, [scales; 2])
    }
}

/// Nibbles with a fifth bit: bit `v` of the word `fifth` is that of value `v`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn five_bits(w: [__m256i; 4], fifth: __m256i) -> [__m256i; 8] {
    array!(8, |i| {
        // The fifth bits of a word's four values are in one byte.
        let spread = _mm256_set1_epi32((i as i32 / 2) * 0x0101_0101);
        let lane = both(_mm_setr_epi32(0, 0x0404_0404, 0x0808_0808, 0x0c0c_0c0c));
        let bits = _mm256_shuffle_epi8(fifth, _mm256_add_epi8(spread, lane));
        let bit = _mm256_set1_epi32(if i.is_multiple_of(2) { 0x0804_0201 } else { 0x8040_2010u32.cast_signed() });
        let set = _mm256_cmpeq_epi8(_mm256_and_si256(bits, bit), bit);
        let codes = if i < 4 { low(w[i]) } else { high(w[i - 4]) };
        _mm256_or_si256(codes, _mm256_and_si256(set, _mm256_set1_epi8(16)))
    })
}

impl PanelSmall for Q5_0 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn block(p: &[*const u8; 8]) -> ([__m256i; 8], [__m256; 2]) {
        // SAFETY: the promise of the trait.
        let (w, [a, b]) = unsafe { (words4(p, 6), words2(p, 0)) };
        let fifth = _mm256_or_si256(_mm256_srli_epi32::<16>(a), _mm256_slli_epi32::<16>(b));
        (five_bits(w, fifth), f16_pairs(a))
    }
}

impl PanelSmall for Q5_1 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn block(p: &[*const u8; 8]) -> ([__m256i; 8], [__m256; 2]) {
        // SAFETY: the promise of the trait.
        let (w, [head, fifth]) = unsafe { (words4(p, 8), words2(p, 0)) };
        (five_bits(w, fifth), f16_pairs(head))
    }
}

impl PanelSmall for Q8_0 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn block(p: &[*const u8; 8]) -> ([__m256i; 8], [__m256; 2]) {
        // SAFETY: the promise of the trait.
        let (a, b, head) = unsafe { (words4(p, 2), words4(p, 18), word(p, 0)) };
        ([a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]], f16_pairs(head))
    }
}

/// Scales and minimums of eight super-blocks.
pub(in super::super) struct Headers {
    /// Sub-scales of 32-groups where they are wide, else of 16-groups: signed bytes, four to a word.
    pub scales: [__m256i; 4],
    /// Minimums in the same order, unsigned bytes.
    pub mins: [__m256i; 4],
    /// The scale, and the scale of the minimums.
    pub d: [__m256; 2],
}

/// A super-block format.
///
/// # Safety
/// Of both methods: `p` points to eight readable blocks of the format, `to` has room for a panel, and the machine has
/// AVX2, FMA and F16C.
pub(in super::super) trait PanelLarge: Large {
    /// The scales and minimums.
    unsafe fn headers(p: &[*const u8; 8]) -> Headers;
    /// Writes the words of the 32-groups in the order and with the offset of the panel, whose first word is `to`.
    unsafe fn groups(p: &[*const u8; 8], to: *mut __m256i);
}

/// Writes word `i` of group `j`. The words of the panel's other eight rows are in between.
///
/// # Safety
/// `to` has room for a panel.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn put(to: *mut __m256i, j: usize, i: usize, word: __m256i) {
    // SAFETY: the caller's promise.
    unsafe { _mm256_store_si256(to.add(2 * (8 * j + i)), word) }
}

/// Moves bit `from` of every byte to bit `to` and keeps the bits of `mask`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn move_bits(v: __m256i, from: usize, to: usize, mask: i8) -> __m256i {
    let v = match (from <= to, from.abs_diff(to) as i32) {
        (true, n) => _mm256_sll_epi16(v, _mm_cvtsi32_si128(n)),
        (_, n) => _mm256_srl_epi16(v, _mm_cvtsi32_si128(n)),
    };
    _mm256_and_si256(v, _mm256_set1_epi8(mask))
}

/// Sub-scales and minimums of Q4_K and Q5_K from the first four words.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn scale_min([d, a, b, c]: [__m256i; 4]) -> ([__m256i; 4], Option<[__m256i; 4]>, [__m256; 2]) {
    let (six, top) = (_mm256_set1_epi8(0x3f), _mm256_set1_epi8(0x30));
    let above = |v| _mm256_and_si256(_mm256_srli_epi16::<2>(v), top);
    let zero = _mm256_setzero_si256();
    let scales = [_mm256_and_si256(a, six), _mm256_or_si256(low(c), above(a)), zero, zero];
    let mins = [_mm256_and_si256(b, six), _mm256_or_si256(high(c), above(b)), zero, zero];
    (scales, Some(mins), f16_pairs(d))
}

/// The scale at the end of a block, twice.
///
/// # Safety
/// The f16 is readable at every address, and so are the two bytes before it.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn last(p: &[*const u8; 8], at: usize) -> [__m256; 2] {
    // SAFETY: the caller's promise.
    [f16_pairs(unsafe { word(p, at - 2) })[1]; 2]
}

/// No minimums.
const NONE: Option<[__m256i; 4]> = None;

/// Sub-scales of eight blocks of IQ4_XS: low halves from a byte for two, the high two bits of four from a byte.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn iq4_xs_scales(head: __m256i, four: __m256i) -> [__m256i; 4] {
    let lane = both(_mm_setr_epi32(0, 0x0404_0404, 0x0808_0808, 0x0c0c_0c0c));
    let bytes = |v, at: i32| _mm256_shuffle_epi8(v, _mm256_add_epi8(_mm256_set1_epi32(at), lane));
    let only = |v, mask: u32| _mm256_and_si256(v, _mm256_set1_epi32(mask.cast_signed()));
    let mut scales = [_mm256_setzero_si256(); 4];
    for (i, scales) in scales.iter_mut().take(2).enumerate() {
        let l = bytes(four, if i == 0 { 0x0101_0000 } else { 0x0303_0202 });
        let l = _mm256_or_si256(only(l, 0x000f_000f), only(_mm256_srli_epi16::<4>(l), 0x0f00_0f00));
        let h = bytes(head, if i == 0 { 0x0202_0202 } else { 0x0303_0303 });
        let even = _mm256_or_si256(only(_mm256_slli_epi32::<4>(h), 0x30), only(h, 0x30_0000));
        let odd =
            _mm256_or_si256(only(_mm256_slli_epi32::<2>(h), 0x3000), only(_mm256_srli_epi32::<2>(h), 0x3000_0000));
        let both_halves = _mm256_or_si256(l, _mm256_or_si256(even, odd));
        *scales = _mm256_sub_epi8(both_halves, _mm256_set1_epi8(32));
    }
    scales
}

/// One format: the expressions for its parts.
macro_rules! super_words {
    ($t:ident, headers |$p:ident| $headers:expr, groups |$q:ident, $to:ident| $groups:expr) => {
        impl PanelLarge for $t {
            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn headers($p: &[*const u8; 8]) -> Headers {
                let none = [_mm256_setzero_si256(); 4];
                // SAFETY: the promise of the trait: whole blocks are readable.
                unsafe {
                    let (scales, mins, d) = $headers;
                    Headers { scales, mins: mins.unwrap_or(none), d }
                }
            }
            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn groups($q: &[*const u8; 8], $to: *mut __m256i) {
                // SAFETY: as above.
                unsafe { $groups }
            }
        }
    };
}

super_words!(
    Q2K,
    headers | p | {
        let both = words4(p, 0);
        (array!(4, |i| low(both[i])), Some(array!(4, |i| high(both[i]))), f16_pairs(word(p, 80)))
    },
    groups | p,
    to | for part in 0..4 {
        let (n, half) = (part / 2, part % 2);
        let w = words4(p, 16 + 32 * n + 16 * half);
        for i in 0..4 {
            for j in 0..4 {
                put(to, 4 * n + j, 4 * half + i, move_bits(w[i], 2 * j, 0, 3));
            }
        }
    }
);

super_words!(
    Q3K,
    headers | p | {
        let ([a, b], c) = (words2(p, 96), word(p, 104));
        let low = [low(a), low(b), high(a), high(b)];
        let scales =
            array!(4, |i| _mm256_sub_epi8(_mm256_or_si256(low[i], move_bits(c, 2 * i, 4, 0x30)), _mm256_set1_epi8(32)));
        (scales, NONE, last(p, 108))
    },
    groups | p,
    to | for half in 0..2 {
        let h = words4(p, 16 * half);
        for n in 0..2 {
            let w = words4(p, 32 + 32 * n + 16 * half);
            for i in 0..4 {
                for j in 0..4 {
                    let word = _mm256_or_si256(move_bits(w[i], 2 * j, 0, 3), move_bits(h[i], 4 * n + j, 2, 4));
                    put(to, 4 * n + j, 4 * half + i, word);
                }
            }
        }
    }
);

super_words!(
    Q4K,
    headers | p | scale_min(words4(p, 0)),
    groups | p,
    to | for part in 0..8 {
        let (n, half) = (part / 2, part % 2);
        let w = words4(p, 16 + 32 * n + 16 * half);
        for i in 0..4 {
            put(to, 2 * n, 4 * half + i, low(w[i]));
            put(to, 2 * n + 1, 4 * half + i, high(w[i]));
        }
    }
);

super_words!(
    Q5K,
    headers | p | scale_min(words4(p, 0)),
    groups | p,
    to | for half in 0..2 {
        let h = words4(p, 16 + 16 * half);
        for n in 0..4 {
            let w = words4(p, 48 + 32 * n + 16 * half);
            for i in 0..4 {
                let fifth = |j: usize| move_bits(h[i], j, 4, 16);
                put(to, 2 * n, 4 * half + i, _mm256_or_si256(low(w[i]), fifth(2 * n)));
                put(to, 2 * n + 1, 4 * half + i, _mm256_or_si256(high(w[i]), fifth(2 * n + 1)));
            }
        }
    }
);

super_words!(
    Q6K,
    headers | p | (words4(p, 192), NONE, last(p, 208)),
    groups | p,
    to | for part in 0..4 {
        let (n, half) = (part / 2, part % 2);
        let at = 64 * n + 16 * half;
        let (a, b, h) = (words4(p, at), words4(p, at + 32), words4(p, 128 + 32 * n + 16 * half));
        for i in 0..4 {
            let top = |j: usize| move_bits(h[i], 2 * j, 4, 48);
            put(to, 4 * n, 4 * half + i, _mm256_or_si256(low(a[i]), top(0)));
            put(to, 4 * n + 1, 4 * half + i, _mm256_or_si256(low(b[i]), top(1)));
            put(to, 4 * n + 2, 4 * half + i, _mm256_or_si256(high(a[i]), top(2)));
            put(to, 4 * n + 3, 4 * half + i, _mm256_or_si256(high(b[i]), top(3)));
        }
    }
);

super_words!(
    Iq4Xs,
    headers | p | {
        let [head, four] = words2(p, 0);
        (iq4_xs_scales(head, four), NONE, f16_pairs(head))
    },
    groups | p,
    to | for j in 0..8 {
        let w = words4(p, 8 + 16 * j);
        for i in 0..4 {
            put(to, j, i, look_up(&IQ4_WITH_OFFSET, low(w[i])));
            put(to, j, 4 + i, look_up(&IQ4_WITH_OFFSET, high(w[i])));
        }
    }
);
