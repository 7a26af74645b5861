//! The micro-kernels: a panel of 16 rows, one register a pair or a word of bytes, times up to twelve columns.
//!
//! As in AVX2, but one instruction multiplies, adds and broadcasts the activations: `vpdpwssd` for pairs of 16-bit
//! integers, `vpdpbusd` for words of bytes, whose sums have 32 bits. Even and odd registers of the panel have their own
//! sums, so that few columns too have enough of them to hide the latency: 24 registers of 32.

use std::arch::x86_64::*;

use quant::WeightType;
use quant::act::ActKind;

use super::super::ColPtr;
use super::super::panel::{Panel, ROWS, offset};
use super::super::types::of_super_block;
use super::super::variants::TileFn;
use super::formats::Large;

/// Maximum of columns in a group.
const GROUP: usize = 12;

/// The tile function of a type.
pub(in super::super) fn tile(t: WeightType) -> TileFn {
    match (t.act(), offset(t), t.has_min()) {
        (ActKind::Byte32, 16, _) => small_columns::<true, 16, false>,
        (ActKind::Byte32, 128, _) => small_columns::<true, 128, false>,
        (ActKind::Byte32, ..) => small_columns::<true, 0, true>,
        (ActKind::Block32, _, true) => small_columns::<false, 0, true>,
        (ActKind::Block32, _, false) => small_columns::<false, 0, false>,
        (ActKind::Block256, ..) => of_super_block!(t, large_columns),
        (ActKind::F32, ..) => unreachable!("floats have no integer panel"),
    }
}

/// Evaluates `$call` for groups of columns, whose number it finds in `$c`.
macro_rules! groups {
    ($cols:ident, $acc:ident, $c:ident => $call:expr) => {
        groups!(@ $cols, $acc, $c, $call, 1 2 3 4 5 6 7 8 9 10 11)
    };
    (@ $cols:ident, $acc:ident, $c:ident, $call:expr, $($n:literal)*) => {
        for ($cols, $acc) in $cols.chunks(GROUP).zip($acc.chunks_mut(GROUP)) {
            match $cols.len() {
                $($n => {
                    const $c: usize = $n;
                    $call
                })*
                _ => {
                    const $c: usize = GROUP;
                    $call
                }
            }
        }
    };
}

/// # Safety
/// See [`TileFn`]; the type has 32-blocks, and `BYTES` says which form the panel has.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn small_columns<const BYTES: bool, const OFFSET: u8, const MIN: bool>(
    panel: &Panel,
    blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    // SAFETY: the caller's promise, for each of the columns.
    groups!(cols, acc, C => unsafe { small::<C, BYTES, OFFSET, MIN>(panel, blocks, chunk, cols, acc) });
}

/// # Safety
/// See [`TileFn`]; the panel is one super-block of such a type.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn large_columns<T: Large>(
    panel: &Panel,
    _blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    // SAFETY: the caller's promise, for each of the columns.
    groups!(cols, acc, C => unsafe { large::<C, T>(panel, chunk, cols, acc) });
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

/// Sums over `WORDS` words of bytes of the products of C columns with 16 rows, added to `start`.
///
/// # Safety
/// `w` is readable for `WORDS` words of 16 rows (aligned), every `x` for `WORDS` words; `WORDS` is even.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn words<const C: usize, const WORDS: usize>(
    w: *const __m512i,
    x: [*const i32; C],
    start: [__m512i; C],
) -> [__m512i; C] {
    let mut even = start;
    let mut odd = [_mm512_setzero_si512(); C];
    for i in (0..WORDS).step_by(2) {
        // SAFETY: the caller's promise.
        unsafe {
            let (w0, w1) = (_mm512_load_si512(w.add(i)), _mm512_load_si512(w.add(i + 1)));
            for c in 0..C {
                even[c] = _mm512_dpbusd_epi32(even[c], w0, _mm512_set1_epi32(x[c].add(i).read_unaligned()));
                odd[c] = _mm512_dpbusd_epi32(odd[c], w1, _mm512_set1_epi32(x[c].add(i + 1).read_unaligned()));
            }
        }
    }
    for c in 0..C {
        even[c] = _mm512_add_epi32(even[c], odd[c]);
    }
    even
}

/// `acc + d·dx·isum`, for C columns.
///
/// # Safety
/// Every column has super-block or block `block`, and `acc` has C columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn add<const C: usize>(
    d: &[f32; ROWS],
    isum: [__m512i; C],
    block: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    for c in 0..C {
        // SAFETY: the caller's promise; both arrays have 16 values.
        unsafe {
            let d = _mm512_mul_ps(_mm512_loadu_ps(d.as_ptr()), _mm512_set1_ps(*cols[c].row.d.add(block)));
            let at = acc[c].as_mut_ptr();
            _mm512_storeu_ps(at, _mm512_fmadd_ps(d, _mm512_cvtepi32_ps(isum[c]), _mm512_loadu_ps(at)));
        }
    }
}

/// # Safety
/// As [`small_columns`], with C columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn small<const C: usize, const BYTES: bool, const OFFSET: u8, const MIN: bool>(
    panel: &Panel,
    blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    for b in 0..blocks {
        let block = chunk / 32 + b;
        // SAFETY: the panel and the columns have the block; `acc` has C columns.
        unsafe {
            let (mut x, mut sums) = ([std::ptr::null::<i32>(); C], [_mm512_setzero_si512(); C]);
            let mut start = sums;
            for c in 0..C {
                let row = &cols[c].row;
                let sum = *row.sums.cast::<i32>().add(block);
                sums[c] = _mm512_set1_epi32(sum);
                if BYTES {
                    x[c] = row.q.add(32 * block).cast_const().cast();
                    start[c] = _mm512_set1_epi32(-i32::from(OFFSET) * sum);
                } else {
                    x[c] = row.wide.add(32 * block).cast_const().cast();
                }
            }
            let isum = if BYTES {
                words::<C, 8>(panel.bytes.as_ptr().add(32 * ROWS * b).cast(), x, start)
            } else {
                pairs(panel.w.as_ptr().add(32 * ROWS * b).cast(), x, 16)
            };
            add(&panel.d[b], isum, block, cols, acc);
            if MIN {
                add(&panel.m[b], sums, block, cols, acc);
            }
        }
    }
}

/// # Safety
/// As [`large_columns`], with C columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn large<const C: usize, T: Large>(panel: &Panel, chunk: usize, cols: &[ColPtr], acc: &mut [[f32; ROWS]]) {
    let zero = [_mm512_setzero_si512(); C];
    let groups = if T::WIDE_SCALES { 2 } else { 1 }; // 16-groups of a sub-scale
    let mut isum = zero;
    for g in (0..16).step_by(groups) {
        let mut start = zero;
        let mut x = [std::ptr::null::<i32>(); C];
        // SAFETY: the panel and the columns have the super-block.
        unsafe {
            for c in 0..C {
                x[c] = cols[c].row.q.add(chunk + 16 * g).cast_const().cast();
                for g in g..g + groups {
                    if T::PANEL_OFFSET != 0 {
                        // Both sums of a 16-group are `-32·Σ q`; here the offset is that of the type.
                        let times = _mm512_set1_epi16(if T::PANEL_OFFSET < 32 { 1 } else { T::PANEL_OFFSET / 32 });
                        let pair = cols[c].row.start.add(chunk / 8 + 2 * g).cast::<i32>().read_unaligned();
                        start[c] = _mm512_dpwssd_epi32(start[c], _mm512_set1_epi32(pair), times);
                    }
                }
                start[c] = match T::PANEL_OFFSET {
                    4 => _mm512_srai_epi32::<3>(start[c]),
                    16 => _mm512_srai_epi32::<1>(start[c]),
                    _ => start[c],
                };
            }
            let w = panel.bytes.as_ptr().add(16 * ROWS * g).cast();
            let sum = if T::WIDE_SCALES { words::<C, 8>(w, x, start) } else { words::<C, 4>(w, x, start) };
            let scale = _mm512_load_si512(panel.scales[g].as_ptr().cast());
            for c in 0..C {
                // The upper half of `u` is zero, so that the sum of pairs is a product of 16 bits. A product of 32
                // bits takes two instructions.
                let u = _mm512_set1_epi32(i32::from(*cols[c].row.u.add((chunk + 16 * g) / 32)));
                isum[c] = _mm512_add_epi32(isum[c], _mm512_mullo_epi32(sum[c], _mm512_madd_epi16(scale, u)));
            }
        }
    }
    // SAFETY: as above; `acc` has C columns.
    unsafe { add_scaled(panel, chunk, isum, T::DMIN.is_some(), cols, acc) }
}

/// Applies the scales of a super-block to the sums of C columns, and adds the minimums where there are any.
///
/// # Safety
/// The panel is the super-block that begins at value `chunk`, which every column has; `acc` has C columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn add_scaled<const C: usize>(
    panel: &Panel,
    chunk: usize,
    isum: [__m512i; C],
    has_min: bool,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    // SAFETY: the caller's promise.
    unsafe {
        add(&panel.d[0], isum, chunk / 256, cols, acc);
        if has_min {
            let mut sums = [std::ptr::null::<i32>(); C];
            for c in 0..C {
                sums[c] = cols[c].row.sums.cast::<i16>().add(chunk / 16).cast_const().cast();
            }
            let msum = pairs(panel.mins.as_ptr().cast(), sums, 8);
            add(&panel.m[0], msum, chunk / 256, cols, acc);
        }
    }
}
