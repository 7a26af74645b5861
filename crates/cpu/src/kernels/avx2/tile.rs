//! Panels times columns, and the micro-kernel of panels of 16-bit integers: 16 rows times up to four columns. Those of
//! bytes are in [`small_tile`] and [`super::large_tile`].
//!
//! Lanes are rows. A pair of activations is broadcast, `vpmaddwd` multiplies it with the pair of every row, and the
//! sums stay in i32 registers over a block: 4 columns × 2 registers, 2 of the panel, 1 broadcast. Zen 4 does two
//! `vpmaddwd` and four additions a cycle: the upper bound is 32 multiply-adds a cycle.

use std::arch::x86_64::*;

use quant::WeightType;
use quant::act::ActKind;

use super::super::ColPtr;
use super::super::panel::{Panel, ROWS, offset};
use super::super::types::of_super_block;
use super::super::variants::TileFn;
use super::large_tile::columns as super_block;
use super::{keep_order, small_tile};

/// The tile function of a type.
pub(in super::super) fn tile(t: WeightType) -> TileFn {
    let byte_panel = offset(t) < 128;
    match (t.act(), t.has_min()) {
        (ActKind::Byte32, _) if byte_panel => small_tile::tile(t),
        (ActKind::Block32 | ActKind::Byte32, true) => columns::<32, true>,
        (ActKind::Block32 | ActKind::Byte32, false) => columns::<32, false>,
        (ActKind::Block256, _) if byte_panel => of_super_block!(t, super_block),
        (ActKind::Block256, _) => columns::<256, false>,
        (ActKind::F32, _) => unreachable!("floats have no integer panel"),
    }
}

/// # Safety
/// See [`TileFn`]; the panel is 16-bit integers, in blocks of `BLOCK`.
#[target_feature(enable = "avx2,fma")]
unsafe fn columns<const BLOCK: usize, const MIN: bool>(
    panel: &Panel,
    blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    for (cols, acc) in cols.chunks(4).zip(acc.chunks_mut(4)) {
        // SAFETY: the caller's promise, for each of the columns.
        unsafe {
            match cols.len() {
                1 => group::<1, BLOCK, MIN>(panel, blocks, chunk, cols, acc),
                2 => group::<2, BLOCK, MIN>(panel, blocks, chunk, cols, acc),
                3 => group::<3, BLOCK, MIN>(panel, blocks, chunk, cols, acc),
                _ => group::<4, BLOCK, MIN>(panel, blocks, chunk, cols, acc),
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
pub(super) unsafe fn pairs<const C: usize>(
    w: *const __m256i,
    x: [*const i32; C],
    n: usize,
    sum: &mut [[__m256i; 2]; C],
) {
    for i in (0..n).step_by(4) {
        macro_rules! four {
            ($($j:literal)*) => {
                $(
                    // SAFETY: the caller's promise.
                    unsafe {
                        let w = w.add(2 * (i + $j));
                        let (w0, w1) = (_mm256_load_si256(w), _mm256_load_si256(w.add(1)));
                        for c in 0..C {
                            let x = _mm256_set1_epi32(x[c].add(i + $j).read_unaligned());
                            sum[c][0] = keep_order(_mm256_add_epi32(sum[c][0], _mm256_madd_epi16(w0, x)));
                            sum[c][1] = keep_order(_mm256_add_epi32(sum[c][1], _mm256_madd_epi16(w1, x)));
                        }
                    }
                )*
            };
        }
        four!(0 1 2 3);
    }
}

/// # Safety
/// As [`columns`], with C columns.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn group<const C: usize, const BLOCK: usize, const MIN: bool>(
    panel: &Panel,
    blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    for b in 0..blocks {
        let block = chunk / BLOCK + b;
        // SAFETY: the panel and the columns have the block; `acc` has C columns.
        unsafe {
            let x: [*const i32; C] = std::array::from_fn(|c| cols[c].row.wide.add(BLOCK * block).cast_const().cast());
            let mut sum = [[_mm256_setzero_si256(); 2]; C];
            pairs(panel.w.as_ptr().add(ROWS * BLOCK * b).cast(), x, BLOCK / 2, &mut sum);
            for c in 0..C {
                let dx = _mm256_broadcast_ss(&*cols[c].row.d.add(block));
                for h in 0..2 {
                    let d = _mm256_mul_ps(_mm256_load_ps(panel.d[b].as_ptr().add(8 * h)), dx);
                    let at = acc[c].as_mut_ptr().add(8 * h);
                    let mut y = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(sum[c][h]), _mm256_loadu_ps(at));
                    if MIN {
                        let m = _mm256_mul_ps(_mm256_load_ps(panel.m[b].as_ptr().add(8 * h)), dx);
                        let s = _mm256_set1_epi32(*cols[c].row.sums.cast::<i32>().add(block));
                        y = _mm256_fmadd_ps(m, _mm256_cvtepi32_ps(s), y);
                    }
                    _mm256_storeu_ps(at, y);
                }
            }
        }
    }
}
