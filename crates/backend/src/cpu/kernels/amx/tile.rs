//! The micro-kernels: a panel of 16 rows times columns, whose sums go through memory to AVX-512 for their scales. The
//! products of a group of columns run while the sums of the group before get theirs.

use std::arch::x86_64::*;

use super::super::ColPtr;
use super::super::avx512;
use super::super::panel::{CHUNK, Panel, ROWS};
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
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    let groups = cols.len().div_ceil(16);
    for i in 0..=groups {
        // SAFETY: the caller's promise; the panel and the columns hold a super-block.
        unsafe {
            if i < groups {
                products::<BYTES, SHIFT>(panel, columns, 2 * i, cols.len() > 16 * i + 8, i % 2);
            }
            if i > 0 {
                let (first, end) = (16 * (i - 1), cols.len().min(16 * i));
                let is_pair = end > first + 8;
                for half in 0..if is_pair { 2 } else { 1 } {
                    let (first, end) = (first + 8 * half, end.min(first + 8 * half + 8));
                    let c = if is_pair {
                        sums::<BYTES, SHIFT>([&columns.c[(i - 1) % 2][2 * half], &columns.c[(i - 1) % 2][2 * half + 1]])
                    } else {
                        let c = &columns.c[(i - 1) % 2];
                        let (even, odd) = (sums::<BYTES, SHIFT>([&c[0], &c[1]]), sums::<BYTES, SHIFT>([&c[2], &c[3]]));
                        array!(8, |c| _mm512_add_epi32(even[c], odd[c]))
                    };
                    finish::<MIN>(panel, chunk, c, &cols[first..end], &mut acc[first..end]);
                }
            }
        }
    }
}

/// The products of the units `unit` and, of a pair, `unit + 1`: four `C`, unit by unit the low and the high bytes of the
/// weights. Of one unit alone two are for the even quarters of the super-block, two for the odd ones.
///
/// # Safety
/// As [`large`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn products<const BYTES: usize, const SHIFT: u32>(
    panel: &Panel,
    columns: &mut Columns,
    unit: usize,
    is_pair: bool,
    to: usize,
) {
    // SAFETY: the caller's promise: all loads are in the arrays.
    unsafe {
        tile!(zero 0 1 2 3);
        if is_pair {
            for at in (0..CHUNK).step_by(64) {
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
            }
        } else {
            for at in (0..CHUNK).step_by(128) {
                load_a!(4, columns, unit, at);
                load_b!(6, panel.bytes, at);
                tile!(add "su" 0, 4, 6);
                load_a!(5, columns, unit, at + 64);
                load_b!(7, panel.bytes, at + 64);
                tile!(add "su" 2, 5, 7);
                if BYTES == 2 {
                    load_b!(6, panel.high, at);
                    load_b!(7, panel.high, at + 64);
                    if SHIFT == 8 {
                        tile!(add "ss" 1, 4, 6);
                        tile!(add "ss" 3, 5, 7);
                    } else {
                        tile!(add "su" 1, 4, 6);
                        tile!(add "su" 3, 5, 7);
                    }
                }
            }
        }
        let c = columns.c[to].as_mut_ptr();
        tile!(store 0, c);
        tile!(store 2, c.add(2));
        if BYTES == 2 {
            tile!(store 1, c.add(1));
            tile!(store 3, c.add(3));
        }
    }
}

/// The sums of eight columns from those of their bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn sums<const BYTES: usize, const SHIFT: u32>([low, high]: [&C; 2]) -> [__m512i; 8] {
    array!(8, |c| {
        let sum = digits(low, c);
        if BYTES == 2 { _mm512_add_epi32(sum, _mm512_slli_epi32::<SHIFT>(digits(high, c))) } else { sum }
    })
}

/// `low + 256·high` of column `c`, whose low and high bytes are rows `c` and `8 + c`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn digits(of: &C, c: usize) -> __m512i {
    _mm512_add_epi32(load(&of[c]), _mm512_slli_epi32::<8>(load(&of[8 + c])))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn load(of: &[i32; ROWS]) -> __m512i {
    // SAFETY: the array has 64 bytes.
    unsafe { _mm512_loadu_si512(of.as_ptr().cast()) }
}

/// Applies the scales of a super-block to the sums of up to eight columns, and adds the minimums.
///
/// # Safety
/// As [`large`]; `acc` is as long as `cols`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn finish<const MIN: bool>(
    panel: &Panel,
    chunk: usize,
    isum: [__m512i; 8],
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    // SAFETY: the caller's promise.
    unsafe {
        if cols.len() == 8 {
            avx512::add_scaled(panel, chunk, isum, MIN, cols, acc);
        } else {
            for (i, isum) in isum.into_iter().enumerate().take(cols.len()) {
                avx512::add_scaled(panel, chunk, [isum], MIN, &cols[i..i + 1], &mut acc[i..i + 1]);
            }
        }
    }
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
    _chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
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
    for i in 0..=groups {
        // SAFETY: the caller's promise: all loads are in the arrays, and `C` has room for eight blocks. The last block
        // of an odd number has a neighbour of an older panel.
        unsafe {
            if i < groups {
                let to = columns.c[i % 2].as_mut_ptr();
                for b in (0..blocks).step_by(2) {
                    product!(0, 4, 6, i, b, to);
                    product!(1, 5, 7, i, b + 1, to);
                }
            }
            if i > 0 {
                let (first, end) = (16 * (i - 1), cols.len().min(16 * i));
                let sums = |b: usize, c: usize| load(&columns.c[(i - 1) % 2][b][c]);
                scale::<MIN>(panel, columns, 0, blocks, first, sums, &mut acc[first..end]);
            }
        }
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
    _chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    // Four blocks at a time.
    let steps = cols.len().div_ceil(16) * 2;
    for i in 0..=steps {
        // SAFETY: as in `bytes`.
        unsafe {
            if i < steps {
                let to = columns.c[i % 2].as_mut_ptr();
                for b in 0..blocks.saturating_sub(i % 2 * 4).min(4) {
                    let (unit, at) = (i / 2 * 2, 32 * (i % 2 * 4 + b));
                    tile!(zero 0 1);
                    load_b!(6, panel.bytes, at);
                    load_a!(4, columns, unit, at);
                    load_a!(5, columns, unit + 1, at);
                    if SIGNED {
                        tile!(add "us" 0, 4, 6);
                        tile!(add "ss" 1, 5, 6);
                    } else {
                        tile!(add "uu" 0, 4, 6);
                        tile!(add "su" 1, 5, 6);
                    }
                    tile!(store 0, to.add(2 * b));
                    tile!(store 1, to.add(2 * b + 1));
                }
            }
            if i > 0 {
                let i = i - 1;
                let (first, end) = (i / 2 * 16, cols.len().min(i / 2 * 16 + 16));
                let (from, to) = (i % 2 * 4, blocks.min(i % 2 * 4 + 4));
                let c = &columns.c[i % 2];
                let sums = |b: usize, col: usize| {
                    let high = _mm512_slli_epi32::<8>(load(&c[2 * (b - from) + 1][col]));
                    _mm512_add_epi32(load(&c[2 * (b - from)][col]), high)
                };
                scale::<MIN>(panel, columns, from, to, first, sums, &mut acc[first..end]);
            }
        }
    }
}

/// Applies the scales of blocks `from .. to` to the sums of columns `first ..`, in the order of blocks.
///
/// # Safety
/// As [`bytes`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn scale<const MIN: bool>(
    panel: &Panel,
    columns: &Columns,
    from: usize,
    to: usize,
    first: usize,
    sums: impl Fn(usize, usize) -> __m512i,
    acc: &mut [[f32; ROWS]],
) {
    for (c, acc) in acc.iter_mut().enumerate() {
        let (dx, xsums) = (&columns.d[first + c], &columns.sums[first + c]);
        // SAFETY: all arrays have 16 values, and at most eight blocks are in use.
        unsafe {
            let mut y = _mm512_loadu_ps(acc.as_ptr());
            for b in from..to {
                let d = _mm512_set1_ps(*dx.get_unchecked(b));
                let scale = _mm512_mul_ps(_mm512_loadu_ps(panel.d.get_unchecked(b).as_ptr()), d);
                y = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sums(b, c)), y);
                if MIN {
                    let scale = _mm512_mul_ps(_mm512_loadu_ps(panel.m.get_unchecked(b).as_ptr()), d);
                    y = _mm512_fmadd_ps(scale, _mm512_set1_ps(*xsums.get_unchecked(b)), y);
                }
            }
            _mm512_storeu_ps(acc.as_mut_ptr(), y);
        }
    }
}
