//! Panel unpackers: 16 rows of any quantised format to words of four values, of bytes or of 16-bit integers.
//!
//! Rows are transposed as words of four bytes, which is all that super-blocks need. Of 32-blocks even and odd bytes of a
//! word then become two pairs, which is half the shuffles of transposing pairs of i16.

use std::arch::x86_64::*;

use quant::WeightType;

use super::super::panel::{Panel, ROWS, UnpackFn, offset};
use super::super::{RowSet, prefetch_second};
use super::large::{Iq4Xs, Large, Q2K, Q3K, Q4K, Q5K, Q6K};
use super::small::{Iq4Nl, Mxfp4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Small};
use super::{array, halves8, planar, transpose8};

/// The unpacker of a type.
pub(in super::super) fn unpack(t: WeightType) -> UnpackFn {
    match t {
        WeightType::Q4_0 => small::<Q4_0>,
        WeightType::Q4_1 => small::<Q4_1>,
        WeightType::Q5_0 => small::<Q5_0>,
        WeightType::Q5_1 => small::<Q5_1>,
        WeightType::Q8_0 => small::<Q8_0>,
        WeightType::IQ4_NL => small::<Iq4Nl>,
        WeightType::MXFP4 => small::<Mxfp4>,
        WeightType::Q2_K => large::<Q2K>,
        WeightType::Q3_K => large::<Q3K>,
        WeightType::Q4_K => large::<Q4K>,
        WeightType::Q5_K => large::<Q5K>,
        WeightType::Q6_K => large::<Q6K>,
        WeightType::IQ4_XS => large::<Iq4Xs>,
        WeightType::MXFP4_PLANAR | WeightType::Affine(_) => planar::unpack(t),
        WeightType::F32 | WeightType::F16 | WeightType::BF16 => unreachable!("floats have no integer panel"),
    }
}

/// Even bytes of every 16 bits, with their sign.
#[inline]
#[target_feature(enable = "avx2")]
fn even(x: __m256i) -> __m256i {
    _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x))
}

/// Odd bytes of every 16 bits, with their sign.
#[inline]
#[target_feature(enable = "avx2")]
fn odd(x: __m256i) -> __m256i {
    _mm256_srai_epi16::<8>(x)
}

/// Where pair `pair` of the eight rows from `r` on lies.
///
/// # Safety
/// The pair is one of the panel's.
#[inline]
pub(super) unsafe fn at(panel: &mut Panel, pair: usize, r: usize) -> *mut __m256i {
    // SAFETY: the caller's promise.
    unsafe { panel.w.as_mut_ptr().add((pair * ROWS + r) * 2).cast() }
}

/// Where word `word` of the eight rows from `r` on lies.
///
/// # Safety
/// The word is one of the panel's.
#[inline]
pub(super) unsafe fn word_at(panel: &mut Panel, word: usize, r: usize) -> *mut __m256i {
    // SAFETY: the caller's promise.
    unsafe { panel.bytes.as_mut_ptr().add((word * ROWS + r) * 4).cast() }
}

/// # Safety
/// See [`UnpackFn`]; the rows are of type `T`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn small<T: Small>(set: &RowSet, chunk: usize, blocks: usize, panel: &mut Panel) {
    let rows: [*const u8; ROWS] = std::array::from_fn(|r| set.row(r).wrapping_add(chunk / 32 * T::BYTES));
    for row in rows {
        prefetch_second(row.wrapping_add(ROWS * set.bytes.q), blocks * T::BYTES);
    }
    for r in [0, 8] {
        for b in 0..blocks {
            // SAFETY: the rows have `blocks` blocks, at most eight, as the panel has pairs and scales for.
            unsafe {
                let p: [*const u8; 8] = std::array::from_fn(|i| rows[r + i].add(b * T::BYTES));
                let words = transpose8(array!(8, |i| T::bytes(p[i])));
                for (i, w) in words.into_iter().enumerate() {
                    if T::X == 32 {
                        let w = _mm256_add_epi8(w, _mm256_set1_epi8(offset(set.dtype).cast_signed()));
                        _mm256_store_si256(word_at(panel, 8 * b + i, r), w);
                    } else {
                        _mm256_store_si256(at(panel, 16 * b + 2 * i, r), even(w));
                        _mm256_store_si256(at(panel, 16 * b + 2 * i + 1, r), odd(w));
                    }
                }
                _mm256_storeu_ps(panel.d[b].as_mut_ptr().add(r), T::scales(&p));
                if let Some(m) = T::MIN {
                    _mm256_storeu_ps(panel.m[b].as_mut_ptr().add(r), halves8(&p, m));
                }
            }
        }
    }
}

/// # Safety
/// See [`UnpackFn`]; the rows are of type `T`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn large<T: Large>(set: &RowSet, chunk: usize, _blocks: usize, panel: &mut Panel) {
    let rows: [*const u8; ROWS] = std::array::from_fn(|r| set.row(r).wrapping_add(chunk / 256 * T::BYTES));
    for row in rows {
        prefetch_second(row.wrapping_add(ROWS * set.bytes.q), T::BYTES);
    }
    for r in [0, 8] {
        // SAFETY: every row has a block of type T; the panel has 128 pairs, eight of which are pairs of minimums.
        unsafe {
            let p: [*const u8; 8] = std::array::from_fn(|i| rows[r + i]);
            // Words 0..4 of a row are its scales, 4..8 its minimums.
            let heads = transpose8(array!(8, |i| _mm256_set_m128i(T::mins(p[i]), T::scales(p[i]))));
            // Sub-scale of each 16-group, twice in the row's word.
            for g in (0..16).step_by(if T::WIDE_SCALES { 2 } else { 1 }) {
                let byte = (g % 4) as i32;
                let pick = _mm256_set1_epi32(0x0080_0080 | byte << 8 | byte << 24);
                // The byte stands in the upper half of both i16; shifting it down gives it its sign.
                let pick = _mm256_add_epi32(pick, word_base());
                let scale = _mm256_srai_epi16::<8>(_mm256_shuffle_epi8(heads[g / 4], pick));
                _mm256_store_si256(panel.scales[g].as_mut_ptr().add(r).cast(), scale);
            }
            macro_rules! groups {
                ($($j:literal)*) => {
                    $(
                        let words = transpose8(array!(8, |i| T::group(p[i], $j)));
                        for (i, mut w) in words.into_iter().enumerate() {
                            if !T::UNSIGNED {
                                w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
                            }
                            _mm256_store_si256(word_at(panel, 8 * $j + i, r), w);
                        }
                    )*
                };
            }
            groups!(0 1 2 3 4 5 6 7);
            _mm256_storeu_ps(panel.d[0].as_mut_ptr().add(r), halves8(&p, T::D));
            if let Some(m) = T::DMIN {
                let m = _mm256_xor_ps(halves8(&p, m), _mm256_set1_ps(-0.0));
                _mm256_storeu_ps(panel.m[0].as_mut_ptr().add(r), m);
                for g in 0..8 {
                    let byte = (g % 2 * 2) as i32;
                    let pick = _mm256_set1_epi32(0x8000_8000u32 as i32 | byte | (byte + 1) << 16);
                    let pick = _mm256_add_epi32(pick, word_base_low());
                    let pair = _mm256_shuffle_epi8(heads[4 + g / 2], pick);
                    _mm256_storeu_si256(panel.mins[g].as_mut_ptr().add(r).cast(), pair);
                }
            }
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
