//! The micro-kernel of panels of bytes with 32-blocks: 16 rows times up to four columns.
//!
//! As that of super-blocks ([`mod@super::bytes`]): lanes are rows, a word holds four values of one, and `vpmaddubsw` multiplies it
//! with four activations. Every word has two sums of half of the products, which stay 16 bits wide for as many words as
//! the largest integer of the type lets them; then one multiplication with ones makes them a 32-bit sum. The block's scale
//! is a float, so that every 32 values cost a conversion and a fused multiply-add.

use std::arch::x86_64::*;

use quant::WeightType;

use super::super::ColPtr;
use super::super::panel::{Panel, ROWS, most, offset};
use super::super::variants::TileFn;
use super::{opaque, whole};

/// The tile function of a type of 32-blocks whose panel is bytes.
pub(super) fn tile(t: WeightType) -> TileFn {
    macro_rules! types {
        ($($t:ident)*) => {
            match t {
                $(WeightType::$t => columns::<
                    { words(most(WeightType::$t)) },
                    { offset(WeightType::$t) },
                    { matches!(WeightType::$t, WeightType::Q4_1 | WeightType::Q5_1) },
                >,)*
                _ => match words(most(t)) {
                    8 => columns::<8, 0, true>,
                    4 => columns::<4, 0, true>,
                    _ => columns::<2, 0, true>,
                }
            }
        };
    }
    types!(Q4_0 Q4_1 Q5_0 Q5_1 IQ4_NL MXFP4 MXFP4_PLANAR)
}

/// Words whose products 16 bits can hold: two of each go to a sum. 0 where not even one can be held.
const fn words(most: u8) -> usize {
    match i16::MAX as usize / (2 * 127 * most as usize) {
        0 => 0,
        1 => 1,
        2..4 => 2,
        4..8 => 4,
        _ => 8,
    }
}

/// # Safety
/// See [`TileFn`]; the panel is 32-blocks of such a type.
#[target_feature(enable = "avx2,fma")]
unsafe fn columns<const WORDS: usize, const OFFSET: u8, const MIN: bool>(
    panel: &Panel,
    blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    for (cols, acc) in cols.chunks(4).zip(acc.chunks_mut(4)) {
        let acc = acc.as_mut_ptr().cast();
        // SAFETY: the caller's promise, for each of the columns.
        unsafe {
            match cols.len() {
                1 => group::<1, WORDS, OFFSET, MIN>(panel, blocks, chunk, cols, acc),
                2 => group::<2, WORDS, OFFSET, MIN>(panel, blocks, chunk, cols, acc),
                3 => group::<3, WORDS, OFFSET, MIN>(panel, blocks, chunk, cols, acc),
                _ => group::<4, WORDS, OFFSET, MIN>(panel, blocks, chunk, cols, acc),
            }
        }
    }
}

/// `R` registers, eight rows each, of every column.
type Sums<const C: usize, const R: usize> = [[__m256i; R]; C];

/// Register `r` of every column.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn half<const C: usize, const R: usize>(sums: Sums<C, R>, r: usize) -> [__m256i; C] {
    let mut half = [_mm256_setzero_si256(); C];
    for c in 0..C {
        half[c] = sums[c][r];
    }
    half
}

/// 32-bit sums over a block.
///
/// # Safety
/// `w` is readable for `R` registers of eight words (aligned), one word two registers after the other, every `x` for
/// eight words; sums of `WORDS` words fit.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn sums<const C: usize, const R: usize, const WORDS: usize>(w: *const u8, x: [*const i32; C]) -> Sums<C, R> {
    let mut isum = [[_mm256_setzero_si256(); R]; C];
    for first in (0..8).step_by(WORDS) {
        let mut pairs = [[_mm256_setzero_si256(); R]; C];
        for i in first..first + WORDS {
            // SAFETY: the caller's promise. Unless it is hidden where the words come from, the compiler loads all of them
            // first, into spill slots, and goes column by column.
            unsafe {
                let w = opaque(w.add(64 * i));
                let mut word = [_mm256_setzero_si256(); R];
                for r in 0..R {
                    word[r] = _mm256_load_si256(w.add(32 * r).cast());
                }
                for c in 0..C {
                    let x = _mm256_set1_epi32(x[c].add(i).read_unaligned());
                    for r in 0..R {
                        pairs[c][r] = whole(_mm256_add_epi16(pairs[c][r], _mm256_maddubs_epi16(word[r], x)));
                    }
                }
            }
        }
        for c in 0..C {
            for r in 0..R {
                let sum = _mm256_madd_epi16(pairs[c][r], _mm256_set1_epi16(1));
                isum[c][r] = _mm256_add_epi32(isum[c][r], sum);
            }
        }
    }
    isum
}

/// 32-bit sums over a block of bytes that may be 255. Two products of such bytes are too much for 16 bits; the halves of
/// a byte go their own ways.
///
/// # Safety
/// As [`sums`], with one register.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn by_halves<const C: usize>(w: *const u8, x: [*const i32; C]) -> [__m256i; C] {
    let nibble = _mm256_set1_epi8(15);
    let mut low = [_mm256_setzero_si256(); C];
    let mut high = low;
    for i in 0..8 {
        // SAFETY: the caller's promise.
        unsafe {
            let w = _mm256_load_si256(opaque(w.add(64 * i)).cast());
            let (w_low, w_high) = (_mm256_and_si256(w, nibble), _mm256_and_si256(_mm256_srli_epi16::<4>(w), nibble));
            for c in 0..C {
                let x = _mm256_set1_epi32(x[c].add(i).read_unaligned());
                low[c] = whole(_mm256_add_epi16(low[c], _mm256_maddubs_epi16(w_low, x)));
                high[c] = whole(_mm256_add_epi16(high[c], _mm256_maddubs_epi16(w_high, x)));
            }
        }
    }
    for c in 0..C {
        let high = _mm256_madd_epi16(high[c], _mm256_set1_epi16(16));
        low[c] = _mm256_add_epi32(_mm256_madd_epi16(low[c], _mm256_set1_epi16(1)), high);
    }
    low
}

/// # Safety
/// As [`columns`], with C columns.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn group<const C: usize, const WORDS: usize, const OFFSET: u8, const MIN: bool>(
    panel: &Panel,
    blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: *mut f32,
) {
    for b in 0..blocks {
        let block = chunk / 32 + b;
        // SAFETY: the panel and the columns have the block; `acc` has C columns.
        unsafe {
            let mut x = [std::ptr::null::<i32>(); C];
            for c in 0..C {
                x[c] = cols.get_unchecked(c).row.q.add(32 * block).cast_const().cast();
            }
            let w = panel.bytes.as_ptr().add(32 * ROWS * b);
            // Sums of 32 bits beside those of 16 leave registers for half of the rows.
            if WORDS == 8 {
                let isum = sums::<C, 2, 8>(w, x);
                for h in 0..2 {
                    add::<C, OFFSET, MIN>(panel, b, h, half(isum, h), block, cols, acc);
                }
            } else {
                for h in 0..2 {
                    let w = w.add(32 * h);
                    let isum = match WORDS {
                        0 => by_halves(w, x),
                        2 => half(sums::<C, 1, 2>(w, x), 0),
                        _ => half(sums::<C, 1, 4>(w, x), 0),
                    };
                    add::<C, OFFSET, MIN>(panel, b, h, isum, block, cols, acc);
                }
            }
        }
    }
}

/// Adds the products of block `b` of the panel, which is block `block` of the columns, to the results of half `h` of the rows.
///
/// # Safety
/// As [`group`].
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add<const C: usize, const OFFSET: u8, const MIN: bool>(
    panel: &Panel,
    b: usize,
    h: usize,
    isum: [__m256i; C],
    block: usize,
    cols: &[ColPtr],
    acc: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let d = _mm256_load_ps(panel.d[b].as_ptr().add(8 * h));
        let m = if MIN { _mm256_load_ps(panel.m[b].as_ptr().add(8 * h)) } else { d };
        for c in 0..C {
            let row = &cols.get_unchecked(c).row;
            let dx = _mm256_broadcast_ss(&*row.d.add(block));
            let xsum = _mm256_set1_epi32(*row.sums.cast::<i32>().add(block));
            let mut isum = isum[c];
            if OFFSET != 0 {
                isum = _mm256_sub_epi32(isum, _mm256_mullo_epi32(xsum, _mm256_set1_epi32(i32::from(OFFSET))));
            }
            let at = acc.add(ROWS * c + 8 * h);
            let mut y = _mm256_fmadd_ps(_mm256_mul_ps(d, dx), _mm256_cvtepi32_ps(isum), _mm256_loadu_ps(at));
            if MIN {
                y = _mm256_fmadd_ps(_mm256_mul_ps(m, dx), _mm256_cvtepi32_ps(xsum), y);
            }
            _mm256_storeu_ps(at, y);
        }
    }
}
