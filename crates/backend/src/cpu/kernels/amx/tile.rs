//! The micro-kernels: a panel of 16 rows times columns, whose sums go through memory to AVX-512 for their scales. The
//! products of a group of columns run while the sums of the group before get theirs.

use std::arch::x86_64::*;

use super::super::ColPtr;
use super::super::panel::{Panel, ROWS};
use super::Columns;
use super::session::tile;

/// 16 columns (or both bytes of eight) by 16 rows.
type C = [[i32; ROWS]; 16];

/// `A` of values `at ..` of a unit.
macro_rules! load_a {
    ($t:literal, $columns:ident, $unit:expr, $at:expr) => {
        tile!(load $t, $columns.bytes.as_ptr().cast::<u8>().add($unit * super::UNIT + $at), 256)
    };
}

/// `B` of values `at ..` of a panel.
macro_rules! load_b {
    ($t:literal, $bytes:expr, $at:expr) => {
        tile!(load $t, $bytes.as_ptr().add($at * ROWS), 64)
    };
}

/// Super-blocks of weights of `BYTES` bytes, `low + 2^SHIFT·high`; with a shift of 8 the high one has a sign.
///
/// # Safety
/// See [`super::TileFn`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn large<const BYTES: usize, const SHIFT: u32, const MIN: bool>(
    panel: &Panel,
    columns: &mut Columns,
    _blocks: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
    next: &mut dyn FnMut(usize),
) {
    let groups = cols.len().div_ceil(16);
    let scale = |columns: &Columns, i: usize, part: usize, acc: &mut [[f32; ROWS]]| {
        let is_pair = acc.len() > 16 * i + 8;
        let end = acc.len().min(16 * i + 4 * part + 4);
        for c in (16 * i + 4 * part).min(end)..end {
            // SAFETY: the panel is a super-block, of which the columns have their scales.
            unsafe { scale_large::<BYTES, SHIFT, MIN>(panel, columns, is_pair, c, &mut acc[c]) }
        }
    };
    for i in 0..groups {
        let (unit, is_pair, to) = (2 * i, cols.len() > 16 * i + 8, columns.c[0].as_mut_ptr());
        // SAFETY: the session has set the tiles up, and all of them are in the arrays. Sums are stored after those of
        // the group before have got their scales.
        unsafe {
            tile!(zero 0 1 2 3);
            for part in 0..4 {
                let at = 64 * part;
                // Four `C`: unit by unit the products with the low and the high bytes of the weights. Of one unit alone
                // two are for the even quarters, two for the odd ones.
                if is_pair {
                    load_a!(4, columns, unit, at);
                    load_b!(6, panel.bytes, at);
                    tile!(add "su" 0, 4, 6);
                    load_a!(5, columns, unit + 1, at);
                    tile!(add "su" 2, 5, 6);
                    if BYTES == 2 {
                        load_b!(7, panel.high, at);
                        if SHIFT == 8 {
                            tile!(add "ss" 1, 4, 7);
                            tile!(add "ss" 3, 5, 7);
                        } else {
                            tile!(add "su" 1, 4, 7);
                            tile!(add "su" 3, 5, 7);
                        }
                    }
                } else if part % 2 == 0 {
                    load_a!(4, columns, unit, at);
                    load_b!(6, panel.bytes, at);
                    tile!(add "su" 0, 4, 6);
                    if BYTES == 2 {
                        load_b!(7, panel.high, at);
                        if SHIFT == 8 {
                            tile!(add "ss" 1, 4, 7);
                        } else {
                            tile!(add "su" 1, 4, 7);
                        }
                    }
                } else {
                    load_a!(5, columns, unit, at);
                    load_b!(6, panel.bytes, at);
                    tile!(add "su" 2, 5, 6);
                    if BYTES == 2 {
                        load_b!(7, panel.high, at);
                        if SHIFT == 8 {
                            tile!(add "ss" 3, 5, 7);
                        } else {
                            tile!(add "su" 3, 5, 7);
                        }
                    }
                }
                if i == 0 {
                    next(part);
                } else {
                    scale(columns, i - 1, part, acc);
                }
            }
            tile!(store 0, to);
            tile!(store 2, to.add(2));
            if BYTES == 2 {
                tile!(store 1, to.add(1));
                tile!(store 3, to.add(3));
            }
            if MIN {
                tile!(zero 0 1);
                load_b!(6, panel.min_bytes, 0);
                tile!(load 4, columns.group_sums[unit].as_ptr(), 16);
                tile!(add "su" 0, 4, 6);
                tile!(store 0, to.add(4));
                if is_pair {
                    tile!(load 5, columns.group_sums[unit + 1].as_ptr(), 16);
                    tile!(add "su" 1, 5, 6);
                    tile!(store 1, to.add(5));
                }
            }
        }
    }
    for part in 0..4 {
        scale(columns, groups - 1, part, acc);
    }
}

/// Applies the scales of a super-block to the sums of column `c`, and adds the minimums.
///
/// # Safety
/// As [`large`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn scale_large<const BYTES: usize, const SHIFT: u32, const MIN: bool>(
    panel: &Panel,
    columns: &Columns,
    is_pair: bool,
    c: usize,
    acc: &mut [f32; ROWS],
) {
    let sums = &columns.c[0];
    let (half, row) = (c % 16 / 8, c % 8);
    let sum = |pair: usize| {
        let sum = digits(&sums[2 * pair], row);
        match BYTES {
            2 => _mm512_add_epi32(sum, _mm512_slli_epi32::<SHIFT>(digits(&sums[2 * pair + 1], row))),
            _ => sum,
        }
    };
    let isum = if is_pair { sum(half) } else { _mm512_add_epi32(sum(0), sum(1)) };
    // SAFETY: all arrays have 16 values.
    unsafe {
        let dx = _mm512_set1_ps(columns.scale[c]);
        let d = _mm512_mul_ps(_mm512_loadu_ps(panel.d[0].as_ptr()), dx);
        let mut y = _mm512_fmadd_ps(d, _mm512_cvtepi32_ps(isum), _mm512_loadu_ps(acc.as_ptr()));
        if MIN {
            let m = _mm512_mul_ps(_mm512_loadu_ps(panel.m[0].as_ptr()), dx);
            y = _mm512_fmadd_ps(m, _mm512_cvtepi32_ps(digits(&sums[4 + half], row)), y);
        }
        _mm512_storeu_ps(acc.as_mut_ptr(), y);
    }
}

/// `low + 256·high` of a column whose low and high bytes are rows `row` and `8 + row`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn digits(of: &C, row: usize) -> __m512i {
    _mm512_add_epi32(load(&of[row]), _mm512_slli_epi32::<8>(load(&of[8 + row])))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn load(of: &[i32; ROWS]) -> __m512i {
    // SAFETY: the array has 64 bytes.
    unsafe { _mm512_loadu_si512(of.as_ptr().cast()) }
}

/// 32-blocks with activations of 8 bits; `SIGNED` says whether the panel's bytes have a sign.
///
/// # Safety
/// See [`super::TileFn`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn bytes<const SIGNED: bool, const MIN: bool>(
    panel: &Panel,
    columns: &mut Columns,
    blocks: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
    next: &mut dyn FnMut(usize),
) {
    macro_rules! product {
        ($c:literal, $a:literal, $b:literal, $unit:expr, $block:expr, $to:expr) => {
            tile!(zero $c);
            load_a!($a, columns, $unit, 32 * $block);
            load_b!($b, panel.bytes, 32 * $block);
            if SIGNED {
                tile!(add "ss" $c, $a, $b);
            } else {
                tile!(add "su" $c, $a, $b);
            }
            tile!(store $c, $to.add($block));
        };
    }
    let groups = cols.len().div_ceil(16);
    let scale = |columns: &Columns, i: usize, part: usize, acc: &mut [[f32; ROWS]]| {
        let end = acc.len().min(16 * i + 4 * part + 4);
        for c in (16 * i + 4 * part).min(end)..end {
            let sums = |b: usize| load(&columns.c[i % 2][b][c % 16]);
            // SAFETY: the panel and the columns have the blocks.
            unsafe { scale_small::<MIN>(panel, columns, (0, blocks), c, sums, &mut acc[c]) }
        }
    };
    for i in 0..groups {
        let to = columns.c[i % 2].as_mut_ptr();
        for part in 0..4 {
            // SAFETY: the session has set the tiles up, and all of them are in the arrays, in which eight blocks have
            // room: the neighbour of a last block is one of an older panel.
            unsafe {
                if 2 * part < blocks {
                    product!(0, 4, 6, i, 2 * part, to);
                    product!(1, 5, 7, i, 2 * part + 1, to);
                }
            }
            if i == 0 {
                next(part);
            } else {
                scale(columns, i - 1, part, acc);
            }
        }
    }
    for part in 0..4 {
        scale(columns, groups - 1, part, acc);
    }
}

/// 32-blocks with activations of 16 bits; `SIGNED` says whether the panel's bytes have a sign.
///
/// # Safety
/// See [`super::TileFn`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn wide<const SIGNED: bool, const MIN: bool>(
    panel: &Panel,
    columns: &mut Columns,
    blocks: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
    next: &mut dyn FnMut(usize),
) {
    // Sums of half a panel, four blocks with two products each, fill a place.
    let steps = cols.len().div_ceil(16) * 2;
    let scale = |columns: &Columns, i: usize, part: usize, acc: &mut [[f32; ROWS]]| {
        let end = acc.len().min(i / 2 * 16 + 4 * part + 4);
        let (from, to) = (i % 2 * 4, blocks.min(i % 2 * 4 + 4));
        for c in (i / 2 * 16 + 4 * part).min(end)..end {
            let sums = |b: usize| {
                let pair = &columns.c[i % 2][2 * (b - from)..][..2];
                _mm512_add_epi32(load(&pair[0][c % 16]), _mm512_slli_epi32::<8>(load(&pair[1][c % 16])))
            };
            // SAFETY: the panel and the columns have the blocks.
            unsafe { scale_small::<MIN>(panel, columns, (from, to), c, sums, &mut acc[c]) }
        }
    };
    for i in 0..steps {
        let (unit, to) = (i / 2 * 2, columns.c[i % 2].as_mut_ptr());
        for part in 0..4 {
            let b = i % 2 * 4 + part;
            // SAFETY: as in `bytes`.
            unsafe {
                if b < blocks {
                    tile!(zero 0 1);
                    load_b!(6, panel.bytes, 32 * b);
                    load_a!(4, columns, unit, 32 * b);
                    load_a!(5, columns, unit + 1, 32 * b);
                    if SIGNED {
                        tile!(add "us" 0, 4, 6);
                        tile!(add "ss" 1, 5, 6);
                    } else {
                        tile!(add "uu" 0, 4, 6);
                        tile!(add "su" 1, 5, 6);
                    }
                    tile!(store 0, to.add(2 * part));
                    tile!(store 1, to.add(2 * part + 1));
                }
            }
            if i == 0 {
                next(part);
            } else {
                scale(columns, i - 1, part, acc);
            }
        }
    }
    for part in 0..4 {
        scale(columns, steps - 1, part, acc);
    }
}

/// Applies the scales of blocks `from .. to` to the sums of column `c`, in the order of blocks.
///
/// # Safety
/// As [`bytes`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn scale_small<const MIN: bool>(
    panel: &Panel,
    columns: &Columns,
    (from, to): (usize, usize),
    c: usize,
    sums: impl Fn(usize) -> __m512i,
    acc: &mut [f32; ROWS],
) {
    let (dx, xsums) = (&columns.d[c], &columns.sums[c]);
    // SAFETY: all arrays have 16 values, and at most eight blocks are in use.
    unsafe {
        let mut y = _mm512_loadu_ps(acc.as_ptr());
        for b in from..to {
            let d = _mm512_set1_ps(*dx.get_unchecked(b));
            let scale = _mm512_mul_ps(_mm512_loadu_ps(panel.d.get_unchecked(b).as_ptr()), d);
            y = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sums(b)), y);
            if MIN {
                let scale = _mm512_mul_ps(_mm512_loadu_ps(panel.m.get_unchecked(b).as_ptr()), d);
                y = _mm512_fmadd_ps(scale, _mm512_set1_ps(*xsums.get_unchecked(b)), y);
            }
        }
        _mm512_storeu_ps(acc.as_mut_ptr(), y);
    }
}
