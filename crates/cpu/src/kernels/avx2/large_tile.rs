//! The micro-kernel of byte panels with super-blocks: 16 rows times up to [`GROUP`] columns.
//!
//! Lanes are rows, a word holds four values of one. Four activations are broadcast, `vpmaddubsw` multiplies them with
//! the words of eight rows, and the pairs of products of a 16-group (a 32-group where they fit) are added up as 16-bit
//! integers. The sub-scale of the weights then makes one 32-bit sum of a pair, and that of the activations comes last.
//! Zen 4 does two multiplications a cycle and somewhat more than three operations in all: the upper bound is 64
//! multiply-adds a cycle, twice that of 16-bit integers.

use std::arch::x86_64::*;
use std::array;

use super::super::ColPtr;
use super::super::panel::{Panel, ROWS};
use super::hide;
use super::large::Large;
use super::tile::pairs;

/// Maximum of columns in a group.
const GROUP: usize = 4;

/// Values whose products are added up in 16 bits before the sub-scale, 16 or 32. A word of `n` values has two sums of
/// half of their products, `n/2 · max · 127`; an offset of the weights is taken off first.
const fn sum_len<T: Large>() -> usize {
    let fits = 16 * ((1 << T::BITS) - 1) * 127 <= i16::MAX as usize;
    if T::WIDE_SCALES && fits { 32 } else { 16 }
}

/// # Safety
/// See [`super::super::variants::TileFn`]; the panel is one super-block of the type, which is [`Large::UNSIGNED`].
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn columns<T: Large>(
    panel: &Panel,
    _blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    for (cols, acc) in cols.chunks(GROUP).zip(acc.chunks_mut(GROUP)) {
        // SAFETY: the caller's promise, for each of the columns.
        unsafe {
            match cols.len() {
                1 => group::<1, T>(panel, chunk, cols, acc),
                2 => group::<2, T>(panel, chunk, cols, acc),
                3 => group::<3, T>(panel, chunk, cols, acc),
                _ => group::<GROUP, T>(panel, chunk, cols, acc),
            }
        }
    }
}

/// Two registers, eight rows each, of every column.
type Sums<const C: usize> = [[__m256i; 2]; C];

/// Sub-scales of the activations. The alignment is the stack's too: spilled sums that straddle cache lines made the
/// kernels half as fast.
#[repr(C, align(64))]
struct SubScales<const C: usize>([[i32; 8]; C]);

/// Adds to 16-bit `sums` the products of `WORDS` words of 16 rows with as many of every column.
///
/// # Safety
/// `w` is readable for `WORDS` words of 16 rows (aligned), every `x` for `WORDS` words.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn products<const C: usize, const WORDS: usize>(w: *const __m256i, x: [*const i32; C], sums: &mut Sums<C>) {
    for i in 0..WORDS {
        // SAFETY: the caller's promise.
        unsafe {
            let (w0, w1) = (_mm256_load_si256(w.add(2 * i)), _mm256_load_si256(w.add(2 * i + 1)));
            for c in 0..C {
                let x = _mm256_set1_epi32(x[c].add(i).read_unaligned());
                sums[c][0] = _mm256_add_epi16(sums[c][0], _mm256_maddubs_epi16(w0, x));
                sums[c][1] = _mm256_add_epi16(sums[c][1], _mm256_maddubs_epi16(w1, x));
            }
        }
    }
}

/// The products of words of a 32-group from value `first` of the columns on, in 16-bit sums. They start from the
/// term that takes the weights' offset off, one for 16 values.
///
/// # Safety
/// `w` is readable for [`sum_len`] values of 16 rows, every `x` for as many, every `start` for their start.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn short_sums<const C: usize, T: Large>(
    w: *const __m256i,
    x: [*const i32; C],
    start: [*const i32; C],
) -> Sums<C> {
    let mut sums = [[_mm256_setzero_si256(); 2]; C];
    // SAFETY: the caller's promise.
    unsafe {
        if T::OFFSET != 0 {
            for c in 0..C {
                let mut s = _mm256_set1_epi32(start[c].read_unaligned());
                // They are `-32·Σ q`.
                s = match T::OFFSET {
                    4 => _mm256_srai_epi16::<3>(s),
                    16 => _mm256_srai_epi16::<1>(s),
                    _ => s,
                };
                sums[c] = [s; 2];
            }
        }
        if sum_len::<T>() == 16 {
            products::<C, 4>(w, x, &mut sums);
        } else {
            products::<C, 8>(w, x, &mut sums);
        }
    }
    sums
}

/// `acc + scale·dx·sums` for C columns.
///
/// # Safety
/// Every column has super-block `block`, and `acc` has C columns.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add<const C: usize>(
    scale: &[f32; ROWS],
    sums: Sums<C>,
    block: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    // SAFETY: the caller's promise; the panel's arrays are aligned.
    unsafe {
        for c in 0..C {
            let dx = _mm256_broadcast_ss(&*cols[c].row.d.add(block));
            for h in 0..2 {
                let d = _mm256_mul_ps(_mm256_load_ps(scale.as_ptr().add(8 * h)), dx);
                let at = acc[c].as_mut_ptr().add(8 * h);
                _mm256_storeu_ps(at, _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(sums[c][h]), _mm256_loadu_ps(at)));
            }
        }
    }
}

/// # Safety
/// As [`columns`], with C columns.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn group<const C: usize, T: Large>(panel: &Panel, chunk: usize, cols: &[ColPtr], acc: &mut [[f32; ROWS]]) {
    let zero = [[_mm256_setzero_si256(); 2]; C];
    // SAFETY: the panel and the columns have the super-block; `acc` has C columns.
    unsafe {
        let mut u = SubScales([[0; 8]; C]);
        let u = &mut *hide((&raw mut u).cast()).cast_mut().cast::<SubScales<C>>();
        let mut x = [std::ptr::null::<i32>(); C];
        let mut start = [std::ptr::null::<i32>(); C];
        for c in 0..C {
            let row = &cols[c].row;
            let eight = _mm256_cvtepu8_epi32(_mm_loadl_epi64(row.u.add(chunk / 32).cast()));
            _mm256_store_si256(u.0[c].as_mut_ptr().cast(), eight);
            x[c] = row.q.add(chunk).cast_const().cast();
            start[c] = row.start.add(chunk / 8).cast_const().cast();
        }
        let mut w = panel.bytes.as_ptr().cast::<__m256i>();
        let mut isum = zero;
        for j in 0..8 {
            let mut sum = zero;
            for first in (0..32).step_by(sum_len::<T>()) {
                let x = array::from_fn(|c| x[c].add(first / 4));
                let start = array::from_fn(|c| start[c].add(2 * j + first / 16));
                let pairs = short_sums::<C, T>(w.add(first / 2), x, start);
                let scales = panel.scales[2 * j + if T::WIDE_SCALES { 0 } else { first / 16 }].as_ptr();
                for h in 0..2 {
                    let scale = _mm256_load_si256(scales.cast::<__m256i>().add(h));
                    for c in 0..C {
                        sum[c][h] = _mm256_add_epi32(sum[c][h], _mm256_madd_epi16(pairs[c][h], scale));
                    }
                }
            }
            for c in 0..C {
                let u = _mm256_set1_epi32(u.0[c][j]);
                for h in 0..2 {
                    isum[c][h] = _mm256_add_epi32(isum[c][h], _mm256_mullo_epi32(sum[c][h], u));
                }
            }
            w = w.add(16);
            x = array::from_fn(|c| x[c].add(8));
        }
        add(&panel.d[0], isum, chunk / 256, cols, acc);
        if T::DMIN.is_some() {
            let sums = array::from_fn(|c| cols[c].row.sums.cast::<i16>().add(chunk / 16).cast_const().cast());
            let mut msum = zero;
            pairs::<C>(panel.mins.as_ptr().cast(), sums, 8, &mut msum);
            add(&panel.m[0], msum, chunk / 256, cols, acc);
        }
    }
}
