//! The matrix-matrix micro-kernel: a panel of 16 rows, one register a pair, times up to twelve columns.
//!
//! As in AVX2, but `vpdpwssd` multiplies, adds and broadcasts the activations in one instruction. Even and odd pairs have
//! their own sums, so that few columns too have enough of them to hide the latency: 24 registers of 32.

use std::arch::x86_64::*;

use quant::WeightType;

use super::super::ColPtr;
use super::super::panel::{Panel, ROWS};
use super::super::variants::TileFn;

/// The minimums of a format.
const NONE: u8 = 0;
const SMALL: u8 = 1;
const LARGE: u8 = 2;

/// Most columns of a group.
const GROUP: usize = 12;

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
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn columns<const PAIRS: usize, const MIN: u8>(
    panel: &Panel,
    blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    for (cols, acc) in cols.chunks(GROUP).zip(acc.chunks_mut(GROUP)) {
        macro_rules! groups {
            ($($c:literal)*) => {
                // SAFETY: the caller's promise, for each of the columns.
                unsafe {
                    match cols.len() {
                        $($c => group::<$c, PAIRS, MIN>(panel, blocks, chunk, cols, acc),)*
                        _ => group::<GROUP, PAIRS, MIN>(panel, blocks, chunk, cols, acc),
                    }
                }
            };
        }
        groups!(1 2 3 4 5 6 7 8 9 10 11);
    }
}

/// Sums over pairs of the products of C columns with 16 rows.
///
/// # Safety
/// `w` is readable for `n` pairs of 16 rows (aligned), every `x` for `n` pairs; `n` is even.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn pairs<const C: usize>(w: *const __m512i, x: [*const i32; C], n: usize) -> [__m512i; C] {
    let mut even = [_mm512_setzero_si512(); C];
    let mut odd = [_mm512_setzero_si512(); C];
    for i in (0..n).step_by(2) {
        // SAFETY: the caller's promise.
        unsafe {
            let (w0, w1) = (_mm512_load_si512(w.add(i)), _mm512_load_si512(w.add(i + 1)));
            for c in 0..C {
                even[c] = _mm512_dpwssd_epi32(even[c], w0, _mm512_set1_epi32(x[c].add(i).read_unaligned()));
                odd[c] = _mm512_dpwssd_epi32(odd[c], w1, _mm512_set1_epi32(x[c].add(i + 1).read_unaligned()));
            }
        }
    }
    for c in 0..C {
        even[c] = _mm512_add_epi32(even[c], odd[c]);
    }
    even
}

/// # Safety
/// As [`columns`], with C columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn group<const C: usize, const PAIRS: usize, const MIN: u8>(
    panel: &Panel,
    blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    for b in 0..blocks {
        let first = chunk + 2 * PAIRS * b;
        // SAFETY: the panel and the columns have the block; `acc` has C columns.
        unsafe {
            let mut x = [std::ptr::null::<i32>(); C];
            for c in 0..C {
                x[c] = cols[c].row.wide.add(first).cast_const().cast();
            }
            let isum = pairs(panel.w.as_ptr().add(2 * ROWS * PAIRS * b).cast(), x, PAIRS);
            let mut msum = [_mm512_setzero_si512(); C];
            if MIN == SMALL {
                for c in 0..C {
                    msum[c] = _mm512_set1_epi32(*cols[c].row.sums.cast::<i32>().add(first / 32));
                }
            } else if MIN == LARGE {
                for c in 0..C {
                    x[c] = cols[c].row.sums.cast::<i16>().add(first / 16).cast_const().cast();
                }
                msum = pairs(panel.mins.as_ptr().cast(), x, 8);
            }
            let (d, m) = (_mm512_load_ps(panel.d[b].as_ptr()), _mm512_load_ps(panel.m[b].as_ptr()));
            for c in 0..C {
                let dx = _mm512_set1_ps(*cols[c].row.d.add(first / (2 * PAIRS)));
                let at = acc[c].as_mut_ptr();
                let mut y = _mm512_fmadd_ps(_mm512_mul_ps(d, dx), _mm512_cvtepi32_ps(isum[c]), _mm512_loadu_ps(at));
                if MIN != NONE {
                    y = _mm512_fmadd_ps(_mm512_mul_ps(m, dx), _mm512_cvtepi32_ps(msum[c]), y);
                }
                _mm512_storeu_ps(at, y);
            }
        }
    }
}
