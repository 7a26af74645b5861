//! The matrix-matrix micro-kernels: a panel of 16 rows times up to four columns, eight rows at a time.
//!
//! Eight accumulators for four columns, as many for the sums of a sub-group, up to four registers of the panel and as
//! many of activations leave a quarter of NEON's registers to scales. The instructions are those of [`Products`].

use std::arch::aarch64::*;

use quant::WeightType;
use quant::act::ActKind;

use super::super::ColPtr;
use super::super::acts::RowPtr;
use super::super::panel::{Panel, ROWS};
use super::super::variants::TileFn;
use super::large::{Large, Q2K, Q3K};
use super::products::{COLS, Products, Sums, ZERO};

/// The tile function of a type.
pub(in super::super) fn tile<M: Products>(t: WeightType) -> TileFn {
    match (t.act(), t.has_min()) {
        (ActKind::Byte32, false) => small::<M, false, false>,
        (ActKind::Byte32, true) => small::<M, false, true>,
        (ActKind::Block32, false) => small::<M, true, false>,
        (ActKind::Block32, true) => small::<M, true, true>,
        (ActKind::Block256, _) => match t {
            WeightType::Q2_K => large::<M, { Q2K::FOLD }, 16, true>,
            WeightType::Q3_K => large::<M, { Q3K::FOLD }, 16, false>,
            WeightType::IQ4_XS => large::<M, 0, 32, false>,
            WeightType::Q4_K | WeightType::Q5_K => large::<M, 0, 32, true>,
            _ => large::<M, 0, 16, false>,
        },
        (ActKind::F32, _) => unreachable!("floats have no integer panel"),
    }
}

/// Runs `of[n - 1]` for groups of n columns.
///
/// # Safety
/// See [`TileFn`], of each of the functions.
#[inline]
unsafe fn groups(
    of: [TileFn; COLS],
    panel: &Panel,
    blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    for (cols, acc) in cols.chunks(COLS).zip(acc.chunks_mut(COLS)) {
        // SAFETY: the caller's promise, for these columns.
        unsafe { of[cols.len() - 1](panel, blocks, chunk, cols, acc) }
    }
}

/// Activations are 16-bit integers where `WORDS`, bytes otherwise.
///
/// # Safety
/// See [`TileFn`].
unsafe fn small<M: Products, const WORDS: bool, const MIN: bool>(
    panel: &Panel,
    blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    let of: [TileFn; COLS] = [
        small_group::<M, 1, WORDS, MIN>,
        small_group::<M, 2, WORDS, MIN>,
        small_group::<M, 3, WORDS, MIN>,
        small_group::<M, 4, WORDS, MIN>,
    ];
    // SAFETY: the caller's promise.
    unsafe { groups(of, panel, blocks, chunk, cols, acc) }
}

/// `SUB` values share a sub-scale, unless those are in the integers already ([`Large::FOLD`]).
///
/// # Safety
/// See [`TileFn`].
unsafe fn large<M: Products, const FOLD: i8, const SUB: usize, const MIN: bool>(
    panel: &Panel,
    blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    let of: [TileFn; COLS] = [
        large_group::<M, 1, FOLD, SUB, MIN>,
        large_group::<M, 2, FOLD, SUB, MIN>,
        large_group::<M, 3, FOLD, SUB, MIN>,
        large_group::<M, 4, FOLD, SUB, MIN>,
    ];
    // SAFETY: the caller's promise.
    unsafe { groups(of, panel, blocks, chunk, cols, acc) }
}

/// The results of eight rows and four columns.
type Results = [[float32x4_t; 2]; COLS];

/// Loads those of the rows from `r` on.
///
/// # Safety
/// `r` is 0 or 8.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn load<const C: usize>(acc: &[[f32; ROWS]; C], r: usize) -> Results {
    let mut y = [[vdupq_n_f32(0.0); 2]; COLS];
    for c in 0..C {
        // SAFETY: the caller's promise.
        y[c] = unsafe { floats(&acc[c], r) };
    }
    y
}

/// Stores what [`load`] loaded.
///
/// # Safety
/// `r` is 0 or 8.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn store<const C: usize>(acc: &mut [[f32; ROWS]; C], r: usize, y: Results) {
    for c in 0..C {
        // SAFETY: the caller's promise.
        unsafe {
            vst1q_f32(acc[c].as_mut_ptr().add(r), y[c][0]);
            vst1q_f32(acc[c].as_mut_ptr().add(r + 4), y[c][1]);
        }
    }
}

/// Eight of 16 numbers, from `r` on.
///
/// # Safety
/// `r` is 0 or 8.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn floats(from: &[f32; ROWS], r: usize) -> [float32x4_t; 2] {
    // SAFETY: the caller's promise.
    unsafe { array!(2, |i| vld1q_f32(from.as_ptr().add(r + 4 * i))) }
}

/// `y + scale · dx · sum`, for eight rows.
#[inline]
#[target_feature(enable = "neon")]
fn add(y: [float32x4_t; 2], scale: [float32x4_t; 2], dx: f32, sum: [int32x4_t; 2]) -> [float32x4_t; 2] {
    array!(2, |i| vfmaq_f32(y[i], vmulq_n_f32(scale[i], dx), vcvtq_f32_s32(sum[i])))
}

/// Sums of products of N times 16 bytes with activations of 16 bits, a register four rows of a column; `sums` has 128
/// times the sum of the bytes of every row.
///
/// # Safety
/// As [`Products::words`]; `r` is 0 or 8.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn words<M: Products, const C: usize, const N: usize>(
    w: *const i8,
    x: &[*const i16; COLS],
    sums: &[i32; ROWS],
    r: usize,
) -> Sums {
    // SAFETY: the caller's promise.
    unsafe {
        let rows = M::to_rows(M::words::<C, N>(w, x));
        if !M::LESS {
            return rows;
        }
        array!(4, |c| array!(2, |i| vaddq_s32(rows[c][i], vld1q_s32(sums.as_ptr().add(r + 4 * i)))))
    }
}

/// Columns and results of a group of C columns, with copies behind the last column.
fn of_columns<'a, const C: usize>(
    cols: &[ColPtr],
    acc: &'a mut [[f32; ROWS]],
) -> ([RowPtr; COLS], &'a mut [[f32; ROWS]; C]) {
    let acc = acc.first_chunk_mut().expect("a group has as many results as columns");
    (std::array::from_fn(|c| cols[c.min(C - 1)].row), acc)
}

/// # Safety
/// As [`small`], with C columns.
#[target_feature(enable = "neon,dotprod")]
unsafe fn small_group<M: Products, const C: usize, const WORDS: bool, const MIN: bool>(
    panel: &Panel,
    blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    let (x, acc) = of_columns::<C>(cols, acc);
    for r in [0, 8] {
        // SAFETY: the panel and the columns have the blocks.
        unsafe {
            let mut y = load(acc, r);
            for b in 0..blocks {
                let at = chunk / 32 + b;
                let w = panel.neon.q.as_ptr().add(32 * ROWS * b + M::WORD * r);
                let isum = if WORDS {
                    let x = x.map(|x| x.q.cast::<i16>().cast_const().add(32 * at));
                    words::<M, C, 2>(w, &x, &panel.neon.sums[b], r)
                } else {
                    let (mut sums, x) = (ZERO, x.map(|x| x.q.cast::<i8>().cast_const().add(32 * at)));
                    M::bytes::<C>(&mut sums, w, &x);
                    M::bytes::<C>(&mut sums, w.add(16 * ROWS), &x.map(|x| x.add(16)));
                    M::to_rows(sums)
                };
                let (d, m) = (floats(&panel.d[b], r), floats(&panel.m[b], r));
                for c in 0..C {
                    let (dx, sum) = (*x[c].d.add(at), *x[c].sums.cast::<i32>().add(at));
                    // The panel has unsigned integers of eight bits with 128 taken off.
                    let less = vdupq_n_s32(if WORDS && MIN { 128 * sum } else { 0 });
                    y[c] = add(y[c], d, dx, array!(2, |i| vaddq_s32(isum[c][i], less)));
                    if MIN {
                        y[c] = array!(2, |i| vfmaq_n_f32(y[c][i], vmulq_n_f32(m[i], dx), sum as f32));
                    }
                }
            }
            store(acc, r, y);
        }
    }
}

/// # Safety
/// As [`large`], with C columns.
#[target_feature(enable = "neon,dotprod")]
unsafe fn large_group<M: Products, const C: usize, const FOLD: i8, const SUB: usize, const MIN: bool>(
    panel: &Panel,
    _: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    let (x, acc) = of_columns::<C>(cols, acc);
    for r in [0, 8] {
        // SAFETY: the panel and the columns have the super-block.
        unsafe {
            let w = panel.neon.q.as_ptr().add(M::WORD * r);
            let u = array!(4, |c| vld1_u8(x[c].u.add(chunk / 32)));
            let u = array!(2, |p| vcombine_u8(u[2 * p], u[2 * p + 1]));
            let mut isum = ZERO;
            for j in 0..8 {
                let sixteen = |sums: &mut Sums, half: usize| {
                    let at = 32 * j + 16 * half;
                    let x = x.map(|x| x.q.cast::<i8>().cast_const().add(chunk + at));
                    M::bytes::<C>(sums, w.add(at * ROWS), &x);
                };
                let regs = C.next_multiple_of(M::SHARE);
                let mut dot = ZERO;
                sixteen(&mut dot, 0);
                if FOLD != 0 || SUB == 32 {
                    sixteen(&mut dot, 1);
                }
                if FOLD == 0 {
                    let s = M::scales(&panel.neon.scales[32 * j / SUB], r);
                    for c in 0..regs {
                        dot[c] = array!(2, |i| vmulq_s32(dot[c][i], s[c % 2][i]));
                    }
                }
                if FOLD == 0 && SUB == 16 {
                    let mut second = ZERO;
                    sixteen(&mut second, 1);
                    let s = M::scales(&panel.neon.scales[2 * j + 1], r);
                    for c in 0..regs {
                        dot[c] = array!(2, |i| vmlaq_s32(dot[c][i], second[c][i], s[c % 2][i]));
                    }
                }
                let u = M::by_column(u, j);
                for c in 0..regs {
                    isum[c] = array!(2, |i| vmlaq_s32(isum[c][i], dot[c][i], u[c]));
                }
            }
            let mut isum = M::to_rows(isum);
            if FOLD < 0 {
                isum = array!(4, |c| array!(2, |i| vnegq_s32(isum[c][i])));
            }
            let (mut y, d) = (load(acc, r), floats(&panel.d[0], r));
            for c in 0..C {
                y[c] = add(y[c], d, *x[c].d.add(chunk / 256), isum[c]);
            }
            if MIN {
                // Sums of 16 activations are activations of 16 bits, and minimums their weights.
                let sums = x.map(|x| x.sums.cast::<i16>().cast_const().add(chunk / 16));
                let w = panel.neon.mins.as_ptr().add(M::WORD * r);
                let (msum, m) = (words::<M, C, 1>(w, &sums, &panel.neon.sums[0], r), floats(&panel.m[0], r));
                for c in 0..C {
                    y[c] = add(y[c], m, *x[c].d.add(chunk / 256), msum[c]);
                }
            }
            store(acc, r, y);
        }
    }
}
