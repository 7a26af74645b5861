//! The micro-kernel of byte panels with super-blocks: 16 rows times up to [`GROUP`] columns.
//!
//! Lanes are rows, a word holds four values of one. Four activations are broadcast, `vpmaddubsw` multiplies them with the
//! words of eight rows, and the pairs of products of a 16-group (a 32-group where they fit) are added up as 16-bit
//! integers. Only then come the sub-scale of the weights, which makes one 32-bit sum of a pair, and that of the activations.
//! Zen 4 does two multiplications a cycle and somewhat more than three operations in all: 64 multiply-adds a cycle are the
//! ceiling, twice that of 16-bit integers.

use std::arch::x86_64::*;
use std::array;

use quant::WeightType;

use super::super::ColPtr;
use super::super::panel::{Panel, ROWS, offset, scale_len};
use super::super::variants::TileFn;
use super::opaque;
use super::tile::pairs;

/// Most columns of a group.
const GROUP: usize = 4;

/// The tile function of a type of super-blocks.
pub(super) fn tile(t: WeightType) -> TileFn {
    macro_rules! types {
        ($($t:ident)*) => {
            match t {
                $(WeightType::$t => columns::<
                    { offset(WeightType::$t) },
                    { scale_len(WeightType::$t) },
                    { sum_len(WeightType::$t) },
                    { matches!(WeightType::$t, WeightType::Q2_K | WeightType::Q4_K | WeightType::Q5_K) },
                >,)*
                _ => unreachable!("{t} has no panel of bytes"),
            }
        };
    }
    types!(Q2_K Q3_K Q4_K Q5_K Q6_K)
}

/// Values whose products are added up before the sub-scale. Every word has two sums of half of them: `16·15·127` and
/// `8·31·127` do not overflow, nor do those of 16 whose offset is taken off, `8·32·127`.
const fn sum_len(t: WeightType) -> usize {
    if matches!(t, WeightType::Q4_K) { 32 } else { 16 }
}

/// # Safety
/// See [`TileFn`]; the panel is one super-block of such a type.
#[target_feature(enable = "avx2,fma")]
unsafe fn columns<const OFFSET: u8, const SCALE: usize, const SUM: usize, const MIN: bool>(
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
                1 => group::<1, OFFSET, SCALE, SUM, MIN>(panel, chunk, cols, acc),
                2 => group::<2, OFFSET, SCALE, SUM, MIN>(panel, chunk, cols, acc),
                3 => group::<3, OFFSET, SCALE, SUM, MIN>(panel, chunk, cols, acc),
                _ => group::<GROUP, OFFSET, SCALE, SUM, MIN>(panel, chunk, cols, acc),
            }
        }
    }
}

/// Two registers, eight rows each, of every column.
type Sums<const C: usize> = [[__m256i; 2]; C];

/// Sub-scales of the activations. What is aligned like this aligns the stack: sums that find no register do not lie across
/// cache lines, which made the kernels half as fast.
#[repr(C, align(64))]
struct U<const C: usize>([[i32; 8]; C]);

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

/// # Safety
/// As [`columns`], with C columns.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn group<const C: usize, const OFFSET: u8, const SCALE: usize, const SUM: usize, const MIN: bool>(
    panel: &Panel,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    let zero = [[_mm256_setzero_si256(); 2]; C];
    // SAFETY: the panel and the columns have the super-block; `acc` has C columns.
    unsafe {
        let mut u = U([[0; 8]; C]);
        let u = &mut *opaque((&raw mut u).cast()).cast_mut().cast::<U<C>>();
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
            for first in (0..32).step_by(SUM) {
                let mut pairs = zero;
                if OFFSET != 0 {
                    for c in 0..C {
                        let mut s = _mm256_set1_epi32(start[c].add(2 * j + first / 16).read_unaligned());
                        if OFFSET == 4 {
                            s = _mm256_srai_epi16::<3>(s);
                        }
                        pairs[c] = [s; 2];
                    }
                }
                let (w, x) = (w.add(first / 2), array::from_fn(|c| x[c].add(first / 4)));
                if SUM == 16 {
                    products::<C, 4>(w, x, &mut pairs);
                } else {
                    products::<C, 8>(w, x, &mut pairs);
                }
                let scales = panel.scales[2 * j + if SCALE == 16 { first / 16 } else { 0 }].as_ptr();
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
        for c in 0..C {
            let dx = _mm256_broadcast_ss(&*cols[c].row.d.add(chunk / 256));
            for h in 0..2 {
                let d = _mm256_mul_ps(_mm256_load_ps(panel.d[0].as_ptr().add(8 * h)), dx);
                let at = acc[c].as_mut_ptr().add(8 * h);
                _mm256_storeu_ps(at, _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(isum[c][h]), _mm256_loadu_ps(at)));
            }
        }
        if MIN {
            let sums = array::from_fn(|c| cols[c].row.sums.cast::<i16>().add(chunk / 16).cast_const().cast());
            let mut msum = zero;
            pairs::<C>(panel.mins.as_ptr().cast(), sums, 8, &mut msum);
            for c in 0..C {
                let dx = _mm256_broadcast_ss(&*cols[c].row.d.add(chunk / 256));
                for h in 0..2 {
                    let m = _mm256_mul_ps(_mm256_load_ps(panel.m[0].as_ptr().add(8 * h)), dx);
                    let at = acc[c].as_mut_ptr().add(8 * h);
                    _mm256_storeu_ps(at, _mm256_fmadd_ps(m, _mm256_cvtepi32_ps(msum[c][h]), _mm256_loadu_ps(at)));
                }
            }
        }
    }
}
