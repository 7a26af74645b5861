//! The panel of super-blocks: 16 rows at a time, in quarters. Scales
//! come from AVX2's code.

use std::arch::x86_64::*;

use quant::WeightType;

use super::super::RowSet;
use super::super::avx2::{self, headers, prefetch_next_rows};
use super::super::panel::{Panel, ROWS, UnpackFn};
use super::super::types::of_super_block;
use super::formats;
use formats::{IQ4_WITH_OFFSET, Iq4Xs, PanelLarge, Q2K, Q3K, Q4K, Q5K, Q6K};
use formats::{Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, Tq1, Tq2};

/// Where the words of a panel go.
pub(super) trait Put {
    /// Words come in pairs: the register of an even word has it and the next one of half of the rows (see
    /// [`Paired`]), that of an odd word those of the other half.
    const PAIRED: bool = false;
    /// Takes word `i` of 32-group `j` of 16 rows, in the order and with the offset of the panel.
    ///
    /// # Safety
    /// The panel has the scales of the super-block, `j` and `i` are below 8, and the machine has AVX-512.
    unsafe fn put(panel: &mut Panel, j: usize, i: usize, word: __m512i);
}

/// The bytes as they are.
struct Plain;

impl Put for Plain {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn put(panel: &mut Panel, j: usize, i: usize, word: __m512i) {
        // SAFETY: the panel has 64 words of 64 bytes.
        unsafe { _mm512_store_si512(panel.bytes.as_mut_ptr().add((8 * j + i) * 4 * ROWS).cast(), word) }
    }
}

/// The bytes as they are, an even word of a row beside the next one: a register has two words of rows 0, 1, 4, 5, 8, 9,
/// 12 and 13, the next one those of the others. So the sums of both, packed to 16 bits, are pairs in the order of rows.
pub(super) struct Paired;

impl Put for Paired {
    const PAIRED: bool = true;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn put(panel: &mut Panel, j: usize, i: usize, word: __m512i) {
        // SAFETY: the promise of the trait.
        unsafe { Plain::put(panel, j, i, word) }
    }
}

/// The unpacker of a type of super-blocks.
pub(in super::super) fn unpack(t: WeightType) -> UnpackFn {
    of_super_block!(t, whole)
}

/// # Safety
/// See [`UnpackFn`]; the rows are of type `T`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn whole<T: Groups>(set: &RowSet, chunk: usize, _blocks: usize, panel: &mut Panel) {
    prefetch_next_rows(set, chunk / 256 * T::BYTES, T::BYTES);
    for i in 0..4 {
        // SAFETY: the caller's promise.
        unsafe {
            if T::PAIRED {
                part::<T, Paired>(set, chunk, i, panel);
            } else {
                part::<T, Plain>(set, chunk, i, panel);
            }
        }
    }
}

/// Unpacks quarter `i` of a super-block; the first has the scales too.
///
/// # Safety
/// See [`UnpackFn`]; the rows are of type `T`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn part<T: Groups, P: Put>(set: &RowSet, chunk: usize, i: usize, panel: &mut Panel) {
    let at = chunk / 256 * T::BYTES;
    let rows: [*const u8; ROWS] = std::array::from_fn(|r| set.row(r).wrapping_add(at));
    // SAFETY: every row has a block of type T.
    unsafe {
        if i == 0 {
            for r in [0, 8] {
                headers::<T>(&std::array::from_fn(|i| rows[r + i]), r, panel);
            }
        }
        T::part::<P>(&rows, i, panel);
    }
}

/// A super-block format.
pub(super) trait Groups: PanelLarge {
    /// The products of AVX-512 take [`Paired`] words: the sums over half of the words of a sub-scale have 16 bits.
    const PAIRED: bool;

    /// Puts quarter `part` of the words of 16 blocks.
    ///
    /// # Safety
    /// `p` points to readable blocks of the format, and the machine has AVX-512; see [`Put::put`].
    unsafe fn part<P: Put>(p: &[*const u8; ROWS], part: usize, panel: &mut Panel);
}

/// The four words at each of 16 addresses, `[word]`, a lane an address; or the two pairs of words, as `P` takes them.
///
/// # Safety
/// Sixteen bytes are readable at every address.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn words4<P: Put>(p: &[*const u8; ROWS], at: usize) -> [__m512i; 4] {
    let t = array!(4, |i| {
        // SAFETY: the caller's promise.
        let load = |r: usize| unsafe { _mm_loadu_si128(p[r].add(at).cast()) };
        let t = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(load(i)), load(i + 4));
        _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(t, load(i + 8)), load(i + 12))
    });
    if P::PAIRED {
        let (a, b) = (_mm512_unpacklo_epi64(t[0], t[1]), _mm512_unpacklo_epi64(t[2], t[3]));
        return [a, b, _mm512_unpackhi_epi64(t[0], t[1]), _mm512_unpackhi_epi64(t[2], t[3])];
    }
    let (a, b) = (_mm512_unpacklo_epi32(t[0], t[1]), _mm512_unpacklo_epi32(t[2], t[3]));
    let (c, d) = (_mm512_unpackhi_epi32(t[0], t[1]), _mm512_unpackhi_epi32(t[2], t[3]));
    [_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b), _mm512_unpacklo_epi64(c, d), _mm512_unpackhi_epi64(c, d)]
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn low(v: __m512i) -> __m512i {
    _mm512_and_si512(v, _mm512_set1_epi8(15))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn high(v: __m512i) -> __m512i {
    low(_mm512_srli_epi16::<4>(v))
}

/// Moves bit `from` of every byte to bit `to` and keeps the bits of `mask`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn move_bits(v: __m512i, from: usize, to: usize, mask: i8) -> __m512i {
    let v = match (from <= to, _mm_cvtsi32_si128(from.abs_diff(to) as i32)) {
        (true, n) => _mm512_sll_epi16(v, n),
        (_, n) => _mm512_srl_epi16(v, n),
    };
    _mm512_and_si512(v, _mm512_set1_epi8(mask))
}

/// One format: the expression that puts a quarter of its words where `P` says.
macro_rules! groups {
    ($t:ident, $paired:literal, |$p:ident, $part:ident, $panel:ident| $e:expr) => {
        impl Groups for $t {
            const PAIRED: bool = $paired;
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            unsafe fn part<P: Put>($p: &[*const u8; ROWS], part: usize, $panel: &mut Panel) {
                // SAFETY: the promise of the trait: whole blocks are readable.
                unsafe {
                    match part {
                        0 => {
                            let $part = 0;
                            $e
                        }
                        1 => {
                            let $part = 1;
                            $e
                        }
                        2 => {
                            let $part = 2;
                            $e
                        }
                        _ => {
                            let $part = 3;
                            $e
                        }
                    }
                }
            }
        }
    };
}

groups!(Q2K, true, |p, part, panel| {
    let (n, half) = (part / 2, part % 2);
    let w = words4::<P>(p, 16 + 32 * n + 16 * half);
    for i in 0..4 {
        for j in 0..4 {
            P::put(panel, 4 * n + j, 4 * half + i, move_bits(w[i], 2 * j, 0, 3));
        }
    }
});

groups!(Q3K, true, |p, part, panel| {
    let (n, half) = (part / 2, part % 2);
    let (h, w) = (words4::<P>(p, 16 * half), words4::<P>(p, 32 + 32 * n + 16 * half));
    for i in 0..4 {
        for j in 0..4 {
            let word = _mm512_or_si512(move_bits(w[i], 2 * j, 0, 3), move_bits(h[i], 4 * n + j, 2, 4));
            P::put(panel, 4 * n + j, 4 * half + i, word);
        }
    }
});

groups!(Q4K, true, |p, part, panel| {
    for half in 0..2 {
        let w = words4::<P>(p, 16 + 32 * part + 16 * half);
        for i in 0..4 {
            P::put(panel, 2 * part, 4 * half + i, low(w[i]));
            P::put(panel, 2 * part + 1, 4 * half + i, high(w[i]));
        }
    }
});

groups!(Q5K, true, |p, part, panel| {
    for half in 0..2 {
        let (h, w) = (words4::<P>(p, 16 + 16 * half), words4::<P>(p, 48 + 32 * part + 16 * half));
        for i in 0..4 {
            P::put(panel, 2 * part, 4 * half + i, _mm512_or_si512(low(w[i]), move_bits(h[i], 2 * part, 4, 16)));
            P::put(
                panel,
                2 * part + 1,
                4 * half + i,
                _mm512_or_si512(high(w[i]), move_bits(h[i], 2 * part + 1, 4, 16)),
            );
        }
    }
});

groups!(Q6K, true, |p, part, panel| {
    let (n, half) = (part / 2, part % 2);
    let at = 64 * n + 16 * half;
    let (a, b, h) = (words4::<P>(p, at), words4::<P>(p, at + 32), words4::<P>(p, 128 + 32 * n + 16 * half));
    for i in 0..4 {
        P::put(panel, 4 * n, 4 * half + i, _mm512_or_si512(low(a[i]), move_bits(h[i], 0, 4, 48)));
        P::put(panel, 4 * n + 1, 4 * half + i, _mm512_or_si512(low(b[i]), move_bits(h[i], 2, 4, 48)));
        P::put(panel, 4 * n + 2, 4 * half + i, _mm512_or_si512(high(a[i]), move_bits(h[i], 4, 4, 48)));
        P::put(panel, 4 * n + 3, 4 * half + i, _mm512_or_si512(high(b[i]), move_bits(h[i], 6, 4, 48)));
    }
});

groups!(Iq4Xs, false, |p, part, panel| {
    let table = _mm512_broadcast_i32x4(_mm_loadu_si128(IQ4_WITH_OFFSET.as_ptr().cast()));
    for j in 2 * part..2 * part + 2 {
        let w = words4::<P>(p, 8 + 16 * j);
        for i in 0..4 {
            P::put(panel, j, i, _mm512_shuffle_epi8(table, low(w[i])));
            P::put(panel, j, 4 + i, _mm512_shuffle_epi8(table, high(w[i])));
        }
    }
});

/// Formats whose words come from AVX2's code, eight rows at a time.
macro_rules! two_halves {
    ($($t:ident)*) => {
        $(groups!($t, false, |p, part, panel| {
            let (low, high): ([*const u8; 8], _) = (array!(8, |r| p[r]), array!(8, |r| p[r + 8]));
            for j in 2 * part..2 * part + 2 {
                let (low, high) = (avx2::words::<$t>(&low, j), avx2::words::<$t>(&high, j));
                for i in 0..8 {
                    let word = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low[i]), high[i]);
                    P::put(panel, j, i, word);
                }
            }
        });)*
    };
}

two_halves!(Iq2Xxs Iq2Xs Iq2S Iq3Xxs Iq3S Iq1S Iq1M Tq1 Tq2);
