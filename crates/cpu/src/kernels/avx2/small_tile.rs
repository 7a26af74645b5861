//! The micro-kernel of panels of bytes with 32-blocks: 16 rows times up to four columns.
//!
//! As that of super-blocks ([`super::large_tile`]): lanes are rows, a word holds four values of one, and `vpmaddubsw`
//! multiplies it with four activations. The products of a word make two 16-bit sums, which run over as many words as
//! the integers of the type allow; one multiplication with ones then makes them a 32-bit sum. The block's scale is a
//! float, so that every 32 values cost a conversion and a fused multiply-add.
//!
//! A block of unsigned five-bit integers would overflow, `16·31·127`, and signed ones do not, `16·16·127`. A sum may
//! wrap on the way as long as its result fits: it starts from the term that takes 16 off every weight.

use std::arch::x86_64::*;

use quant::WeightType;

use super::super::ColPtr;
use super::super::panel::{Panel, ROWS, max_byte};
use super::super::variants::TileFn;
use super::keep_order;

/// The tile function of a type of 32-blocks whose panel is bytes.
pub(super) fn tile(t: WeightType) -> TileFn {
    match (t.has_min(), max_byte(t)) {
        (false, _) => columns::<16, false>,
        (true, ..16) => columns::<0, true>,
        (true, ..32) => columns::<16, true>,
        (true, _) => columns::<32, true>,
    }
}

/// `OFF` is the offset that the 16-bit sums take off the bytes: 0 for bytes up to 15, 16 up to 31; 32 up to 63, and
/// then a sum runs over half a block.
///
/// # Safety
/// See [`TileFn`]; the panel is 32-blocks of such a type.
#[target_feature(enable = "avx2,fma")]
unsafe fn columns<const OFF: u8, const MIN: bool>(
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
                1 => group::<1, OFF, MIN>(panel, blocks, chunk, cols, acc),
                2 => group::<2, OFF, MIN>(panel, blocks, chunk, cols, acc),
                3 => group::<3, OFF, MIN>(panel, blocks, chunk, cols, acc),
                _ => group::<4, OFF, MIN>(panel, blocks, chunk, cols, acc),
            }
        }
    }
}

/// Two registers, eight rows each, of every column.
type Sums<const C: usize> = [[__m256i; 2]; C];

/// Register `r` of every column.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn half<const C: usize>(sums: Sums<C>, r: usize) -> [__m256i; C] {
    let mut half = [_mm256_setzero_si256(); C];
    for c in 0..C {
        half[c] = sums[c][r];
    }
    half
}

/// 16-bit sums over `WORDS` words, added to `start`.
///
/// # Safety
/// `w` is readable for `WORDS` words of 16 rows (aligned), every `x` for `WORDS` words.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn products<const C: usize, const WORDS: usize>(
    w: *const u8,
    x: [*const i32; C],
    start: [__m256i; C],
) -> Sums<C> {
    let mut sums = [[_mm256_setzero_si256(); 2]; C];
    for c in 0..C {
        sums[c] = [start[c]; 2];
    }
    for i in 0..WORDS {
        // SAFETY: the caller's promise.
        unsafe {
            let mut word = [_mm256_setzero_si256(); 2];
            for r in 0..2 {
                word[r] = _mm256_load_si256(w.add(64 * i + 32 * r).cast());
            }
            for c in 0..C {
                let x = _mm256_set1_epi32(x[c].add(i).read_unaligned());
                for r in 0..2 {
                    sums[c][r] = keep_order(_mm256_add_epi16(sums[c][r], _mm256_maddubs_epi16(word[r], x)));
                }
            }
        }
    }
    sums
}

/// Pairs of 16-bit sums as 32-bit sums.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn widen<const C: usize>(mut sums: Sums<C>) -> Sums<C> {
    for c in 0..C {
        for r in 0..2 {
            sums[c][r] = _mm256_madd_epi16(sums[c][r], _mm256_set1_epi16(1));
        }
    }
    sums
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn plus<const C: usize>(mut a: Sums<C>, b: Sums<C>) -> Sums<C> {
    for c in 0..C {
        for r in 0..2 {
            a[c][r] = _mm256_add_epi32(a[c][r], b[c][r]);
        }
    }
    a
}

/// # Safety
/// As [`columns`], with C columns.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn group<const C: usize, const OFF: u8, const MIN: bool>(
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
            // -16 times the sums of the activations of each half of the block.
            let mut start = [[_mm256_setzero_si256(); C]; 2];
            for c in 0..C {
                let row = &cols.get_unchecked(c).row;
                x[c] = row.q.add(32 * block).cast_const().cast();
                if OFF != 0 {
                    let of = row.start.add(4 * block).cast::<i32>();
                    start[0][c] = _mm256_set1_epi32(of.read_unaligned());
                    start[1][c] = _mm256_set1_epi32(of.add(1).read_unaligned());
                }
            }
            let w = panel.bytes.as_ptr().add(32 * ROWS * b);
            let isum = if OFF == 32 {
                let first = widen(products::<C, 4>(w, x, sum([start[0]; 2])));
                for c in 0..C {
                    x[c] = x[c].add(4);
                }
                plus(first, widen(products::<C, 4>(w.add(4 * 64), x, sum([start[1]; 2]))))
            } else {
                widen(products::<C, 8>(w, x, sum(start)))
            };
            for h in 0..2 {
                add::<C, OFF, MIN>(panel, b, h, half(isum, h), block, cols, acc);
            }
        }
    }
}

/// Both numbers of every column as one.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn sum<const C: usize>([mut a, b]: [[__m256i; C]; 2]) -> [__m256i; C] {
    for c in 0..C {
        a[c] = _mm256_add_epi16(a[c], b[c]);
    }
    a
}

/// Adds the products of block `b` of the panel, which is block `block` of the columns, to the results of half `h` of
/// the rows.
///
/// # Safety
/// As [`group`].
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add<const C: usize, const OFF: u8, const MIN: bool>(
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
            let mut isum = isum[c];
            let at = acc.add(ROWS * c + 8 * h);
            let mut y = _mm256_loadu_ps(at);
            if MIN {
                let xsum = _mm256_set1_epi32(*row.sums.cast::<i32>().add(block));
                if OFF != 0 {
                    // The bytes of a type with minimums are its integers.
                    isum = _mm256_add_epi32(isum, _mm256_mullo_epi32(xsum, _mm256_set1_epi32(i32::from(OFF))));
                }
                y = _mm256_fmadd_ps(_mm256_mul_ps(d, dx), _mm256_cvtepi32_ps(isum), y);
                y = _mm256_fmadd_ps(_mm256_mul_ps(m, dx), _mm256_cvtepi32_ps(xsum), y);
            } else {
                y = _mm256_fmadd_ps(_mm256_mul_ps(d, dx), _mm256_cvtepi32_ps(isum), y);
            }
            _mm256_storeu_ps(at, y);
        }
    }
}
