//! The panel: 16 rows of any quantised format as words of four values, of bytes or of 16-bit integers.
//!
//! Rows are transposed as words of four bytes, which is all that super-blocks need. Of 32-blocks even and odd bytes of
//! a word then become two pairs: half the shuffles of transposing pairs of i16.

use std::arch::x86_64::*;

use quant::WeightType;

use super::super::RowSet;
use super::super::panel::{Panel, ROWS, UnpackFn};
use super::super::prefetch::{Hint, prefetch};
use super::super::types::of_type;
use super::panel_words::{Headers, PanelLarge, PanelSmall};
use super::planar::{Groups, Ints, Scale};

/// Form of a panel: 16-bit integers where activations have 16 bits or the type has bytes up to 255, for which the
/// products of AVX2 have no room.
const PAIRS: u8 = 0;
/// Form of a panel: 16-bit integers where activations have 16 bits, else bytes.
const BYTES: u8 = 1;

/// The unpacker of a type for AVX2.
pub(in super::super) fn unpack(t: WeightType) -> UnpackFn {
    of_type!(t, small, large, planar, PAIRS)
}

/// The unpacker of a type for products of all bytes with all bytes.
pub(in super::super) fn unpack_bytes(t: WeightType) -> UnpackFn {
    of_type!(t, small, large, planar, BYTES)
}

/// Prefetches `bytes` bytes from `at` on of the rows that follow those of the set. Out of line: the compiler would
/// unroll it.
#[inline(never)]
pub(in super::super) fn prefetch_next_rows(set: &RowSet, at: usize, bytes: usize) {
    let first = set.planes.q.as_ptr().wrapping_add(ROWS * set.bytes.q + at);
    for r in 0..ROWS {
        let row = first.wrapping_add(r * set.bytes.q);
        prefetch(row, bytes, Hint::L2);
    }
}

/// Even bytes of every 16 bits, with their sign.
#[inline]
#[target_feature(enable = "avx2")]
fn even(x: __m256i) -> __m256i {
    _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x))
}

/// Takes the offset of 128 off bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn signed(x: __m256i) -> __m256i {
    _mm256_xor_si256(x, _mm256_set1_epi8(-128))
}

/// Odd bytes of every 16 bits, with their sign.
#[inline]
#[target_feature(enable = "avx2")]
fn odd(x: __m256i) -> __m256i {
    _mm256_srai_epi16::<8>(x)
}

/// The address of pair `pair` of the eight rows from `r` on.
///
/// # Safety
/// The pair is one of the panel's.
#[inline]
unsafe fn pair_at(panel: &mut Panel, pair: usize, r: usize) -> *mut __m256i {
    // SAFETY: the caller's promise.
    unsafe { panel.w.as_mut_ptr().add((pair * ROWS + r) * 2).cast() }
}

/// The address of word `word` of the eight rows from `r` on.
///
/// # Safety
/// The word is one of the panel's.
#[inline]
unsafe fn word_at(panel: &mut Panel, word: usize, r: usize) -> *mut __m256i {
    // SAFETY: the caller's promise.
    unsafe { panel.bytes.as_mut_ptr().add((word * ROWS + r) * 4).cast() }
}

/// # Safety
/// See [`UnpackFn`]; the rows are of type `T`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn small<T: PanelSmall, const FORM: u8>(set: &RowSet, chunk: usize, blocks: usize, panel: &mut Panel) {
    let rows: [*const u8; ROWS] = std::array::from_fn(|r| set.row(r).wrapping_add(chunk / 32 * T::BYTES));
    prefetch_next_rows(set, chunk / 32 * T::BYTES, blocks * T::BYTES);
    for r in [0, 8] {
        for b in 0..blocks {
            // SAFETY: the rows have `blocks` blocks, at most eight, as the panel has pairs and scales for.
            unsafe {
                let p: [*const u8; 8] = std::array::from_fn(|i| rows[r + i].add(b * T::BYTES));
                let (words, [d, m]) = T::block(&p);
                for (i, w) in words.into_iter().enumerate() {
                    // 16-bit activations meet 16-bit integers.
                    if T::X == 32 && !(FORM == PAIRS && T::SIGNED) {
                        _mm256_store_si256(word_at(panel, 8 * b + i, r), w);
                    } else {
                        let w = if T::X == 32 { signed(w) } else { w };
                        _mm256_store_si256(pair_at(panel, 16 * b + 2 * i, r), even(w));
                        _mm256_store_si256(pair_at(panel, 16 * b + 2 * i + 1, r), odd(w));
                    }
                }
                _mm256_storeu_ps(panel.d[b].as_mut_ptr().add(r), d);
                if T::MIN {
                    _mm256_storeu_ps(panel.m[b].as_mut_ptr().add(r), m);
                }
            }
        }
    }
}

/// # Safety
/// See [`UnpackFn`]; the rows are of type `T`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn large<T: PanelLarge, const FORM: u8>(set: &RowSet, chunk: usize, _blocks: usize, panel: &mut Panel) {
    let rows: [*const u8; ROWS] = std::array::from_fn(|r| set.row(r).wrapping_add(chunk / 256 * T::BYTES));
    prefetch_next_rows(set, chunk / 256 * T::BYTES, T::BYTES);
    for r in [0, 8] {
        // SAFETY: every row has a block of type T; the panel has 128 pairs, eight of which are pairs of minimums.
        unsafe {
            let p: [*const u8; 8] = std::array::from_fn(|i| rows[r + i]);
            headers::<T>(&p, r, panel);
            T::groups(&p, word_at(panel, 0, r));
            if FORM == PAIRS && T::PANEL_OFFSET == 128 {
                widen(panel, r, if T::WIDE_SCALES { 8 } else { 4 });
            }
        }
    }
}

/// Writes the scales, sub-scales and minimums of the eight super-blocks `p`, the panel's rows from `r` on.
///
/// # Safety
/// `p` points to readable blocks of type `T`, `r` is 0 or 8, and the machine has AVX2, FMA and F16C.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(in super::super) unsafe fn headers<T: PanelLarge>(p: &[*const u8; 8], r: usize, panel: &mut Panel) {
    // SAFETY: the caller's promise; the panel has 16 rows of each.
    unsafe {
        let Headers { scales, mins, d: [d, m] } = T::headers(p);
        for g in (0..16).step_by(if T::WIDE_SCALES { 2 } else { 1 }) {
            let place = if T::WIDE_SCALES { g / 2 } else { g };
            let byte = (place % 4) as i32;
            // The byte goes to the upper half of both i16; an arithmetic shift extends its sign.
            let pick = _mm256_set1_epi32(0x0080_0080 | byte << 8 | byte << 24);
            let pick = _mm256_add_epi32(pick, word_base());
            let scale = _mm256_srai_epi16::<8>(_mm256_shuffle_epi8(scales[place / 4], pick));
            _mm256_store_si256(panel.scales[g].as_mut_ptr().add(r).cast(), scale);
        }
        _mm256_storeu_ps(panel.d[0].as_mut_ptr().add(r), d);
        if T::DMIN.is_some() {
            _mm256_storeu_ps(panel.m[0].as_mut_ptr().add(r), _mm256_xor_ps(m, _mm256_set1_ps(-0.0)));
            for g in 0..8 {
                let first = if T::WIDE_SCALES { g } else { 2 * g };
                let (a, b) = ((first % 4) as i32, if T::WIDE_SCALES { first % 4 } else { first % 4 + 1 } as i32);
                let pick = _mm256_set1_epi32(0x8000_8000u32 as i32 | a | b << 16);
                let pick = _mm256_add_epi32(pick, word_base_low());
                let pair = _mm256_shuffle_epi8(mins[first / 4], pick);
                _mm256_storeu_si256(panel.mins[g].as_mut_ptr().add(r).cast(), pair);
            }
        }
    }
}

/// # Safety
/// See [`UnpackFn`]; the set's integers are `Q`, its scales `S`, and it has biases where `MIN`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn planar<Q: Ints, S: Scale, const MIN: bool, const FORM: u8>(
    set: &RowSet,
    chunk: usize,
    blocks: usize,
    panel: &mut Panel,
) {
    let (bytes, group) = (4 * Q::BITS, set.dtype.block_len());
    prefetch_next_rows(set, chunk / 32 * bytes, blocks * bytes);
    for r in [0, 8] {
        let q: [*const u8; 8] = std::array::from_fn(|i| set.row(r + i));
        let skip = chunk / group * S::BYTES;
        let scales = std::array::from_fn(|i| set.scales(r + i).wrapping_add(skip));
        let biases = std::array::from_fn(|i| set.biases(r + i).wrapping_add(skip));
        // SAFETY: the rows have the blocks and their groups, the panel has pairs and scales for eight blocks.
        unsafe {
            let mut groups = Groups::new();
            groups.load::<S, MIN>(scales, biases, 32 * blocks / group);
            for b in 0..blocks {
                let p = q.map(|p| p.add((chunk / 32 + b) * bytes));
                for (i, w) in Q::words(&p).into_iter().enumerate() {
                    if Q::BITS < 8 {
                        _mm256_store_si256(word_at(panel, 8 * b + i, r), w);
                    } else {
                        let even = _mm256_and_si256(w, _mm256_set1_epi16(0xff));
                        _mm256_store_si256(pair_at(panel, 16 * b + 2 * i, r), even);
                        _mm256_store_si256(pair_at(panel, 16 * b + 2 * i + 1, r), _mm256_srli_epi16::<8>(w));
                    }
                }
                let g = 32 * b / group;
                _mm256_storeu_ps(panel.d[b].as_mut_ptr().add(r), groups.d[g]);
                if MIN {
                    _mm256_storeu_ps(panel.m[b].as_mut_ptr().add(r), groups.m[g]);
                }
            }
        }
    }
}

/// Turns the words of the eight rows from `r` on, whose bytes have an offset of 128, into 16-bit integers times
/// sub-scales, of which `group` words share one, 4 or 8.
///
/// # Safety
/// `r` is 0 or 8.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn widen(panel: &mut Panel, r: usize, group: usize) {
    for word in 0..64 {
        // SAFETY: the panel has 64 words of a row, 128 pairs and a sub-scale of each group.
        unsafe {
            let scale = _mm256_load_si256(panel.scales[word / group * group / 4].as_ptr().add(r).cast());
            let scale = _mm256_slli_epi16::<8>(scale);
            let w = signed(_mm256_load_si256(word_at(panel, word, r)));
            // Byte and sub-scale are both in the upper half, and so is their product.
            let (even, odd) = (_mm256_slli_epi16::<8>(w), _mm256_and_si256(w, _mm256_set1_epi16(-256)));
            _mm256_store_si256(pair_at(panel, 2 * word, r), _mm256_mulhi_epi16(even, scale));
            _mm256_store_si256(pair_at(panel, 2 * word + 1, r), _mm256_mulhi_epi16(odd, scale));
        }
    }
}

/// Four times the index of a word in its half, in bytes 1 and 3 of the word.
#[inline]
#[target_feature(enable = "avx2")]
fn word_base() -> __m256i {
    let b = |i: i32| i << 10 | i << 26;
    _mm256_setr_epi32(b(0), b(1), b(2), b(3), b(0), b(1), b(2), b(3))
}

/// Four times the index of a word in its half, in bytes 0 and 2 of the word.
#[inline]
#[target_feature(enable = "avx2")]
fn word_base_low() -> __m256i {
    let b = |i: i32| i << 2 | i << 18;
    _mm256_setr_epi32(b(0), b(1), b(2), b(3), b(0), b(1), b(2), b(3))
}
