//! The matrix-matrix micro-kernel: a panel of 16 rows times up to six columns.
//!
//! Lanes are rows. A pair of activations is broadcast, `vpmaddwd` multiplies it with the pair of every row, and the sums
//! stay in i32 registers over a block: 6 columns × 2 registers, 2 of the panel, 1 broadcast. Zen 4 does two `vpmaddwd`
//! and four additions a cycle, so that 32 multiply-adds a cycle are the ceiling.

use std::arch::x86_64::*;

use quant::WeightType;

use super::super::ColPtr;
use super::super::panel::{Panel, ROWS};
use super::super::variants::TileFn;

/// The minimums of a format.
const NONE: u8 = 0;
const SMALL: u8 = 1;
const LARGE: u8 = 2;

/// The tile function of a type.
pub(in super::super) fn tile(t: WeightType) -> TileFn {
    match (t.act().block_len(), t.has_min()) {
        (32, false) => columns::<16, NONE>,
        (32, true) => columns::<16, SMALL>,
        (_, false) => columns::<128, NONE>,
        (_, true) => columns::<128, LARGE>,
    }
}

/// # Safety
/// See [`TileFn`]; blocks have `PAIRS` pairs.
#[target_feature(enable = "avx2,fma")]
unsafe fn columns<const PAIRS: usize, const MIN: u8>(
    panel: &Panel,
    blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    for (cols, acc) in cols.chunks(6).zip(acc.chunks_mut(6)) {
        // SAFETY: the caller's promise, for each of the columns.
        unsafe {
            match cols.len() {
                1 => group::<1, PAIRS, MIN>(panel, blocks, chunk, cols, acc),
                2 => group::<2, PAIRS, MIN>(panel, blocks, chunk, cols, acc),
                3 => group::<3, PAIRS, MIN>(panel, blocks, chunk, cols, acc),
                4 => group::<4, PAIRS, MIN>(panel, blocks, chunk, cols, acc),
                5 => group::<5, PAIRS, MIN>(panel, blocks, chunk, cols, acc),
                _ => group::<6, PAIRS, MIN>(panel, blocks, chunk, cols, acc),
            }
        }
    }
}

/// Adds pairs of activations times pairs of 16 rows to the sums of C columns.
///
/// # Safety
/// `w` is readable for `n` pairs of 16 rows (aligned), every `x` for `n` pairs.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn pairs<const C: usize>(w: *const __m256i, x: [*const i32; C], n: usize, sum: &mut [[__m256i; 2]; C]) {
    for i in 0..n {
        // SAFETY: the caller's promise.
        unsafe {
            let (w0, w1) = (_mm256_load_si256(w.add(2 * i)), _mm256_load_si256(w.add(2 * i + 1)));
            for c in 0..C {
                let x = _mm256_set1_epi32(x[c].add(i).read_unaligned());
                sum[c][0] = _mm256_add_epi32(sum[c][0], _mm256_madd_epi16(w0, x));
                sum[c][1] = _mm256_add_epi32(sum[c][1], _mm256_madd_epi16(w1, x));
            }
        }
    }
}

/// # Safety
/// As [`columns`], with C columns.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn group<const C: usize, const PAIRS: usize, const MIN: u8>(
    panel: &Panel,
    blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    let zero = [[_mm256_setzero_si256(); 2]; C];
    for b in 0..blocks {
        let first = chunk + 2 * PAIRS * b;
        // SAFETY: the panel and the columns have the block; `acc` has C columns.
        unsafe {
            let x: [*const i32; C] = std::array::from_fn(|c| cols[c].row.wide.add(first).cast_const().cast());
            let mut sum = zero;
            pairs(panel.w.as_ptr().add(2 * ROWS * PAIRS * b).cast(), x, PAIRS, &mut sum);
            for c in 0..C {
                let dx = _mm256_broadcast_ss(&*cols[c].row.d.add(first / (2 * PAIRS)));
                for h in 0..2 {
                    let d = _mm256_mul_ps(_mm256_load_ps(panel.d[b].as_ptr().add(8 * h)), dx);
                    let at = acc[c].as_mut_ptr().add(8 * h);
                    let mut y = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(sum[c][h]), _mm256_loadu_ps(at));
                    if MIN == SMALL {
                        let m = _mm256_mul_ps(_mm256_load_ps(panel.m[b].as_ptr().add(8 * h)), dx);
                        let s = _mm256_set1_epi32(*cols[c].row.sums.cast::<i32>().add(first / 32));
                        y = _mm256_fmadd_ps(m, _mm256_cvtepi32_ps(s), y);
                    }
                    _mm256_storeu_ps(at, y);
                }
            }
            if MIN == LARGE {
                let sums: [*const i32; C] =
                    std::array::from_fn(|c| cols[c].row.sums.cast::<i16>().add(first / 16).cast_const().cast());
                let mut sum = zero;
                pairs(panel.mins.as_ptr().cast(), sums, 8, &mut sum);
                for c in 0..C {
                    let dx = _mm256_broadcast_ss(&*cols[c].row.d.add(first / (2 * PAIRS)));
                    for h in 0..2 {
                        let m = _mm256_mul_ps(_mm256_load_ps(panel.m[b].as_ptr().add(8 * h)), dx);
                        let at = acc[c].as_mut_ptr().add(8 * h);
                        let y = _mm256_fmadd_ps(m, _mm256_cvtepi32_ps(sum[c][h]), _mm256_loadu_ps(at));
                        _mm256_storeu_ps(at, y);
                    }
                }
            }
        }
    }
}
