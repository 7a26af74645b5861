//! The matrix-matrix micro-kernels: a panel of 16 rows times up to four columns.
//!
//! Lanes are rows. Eight rows are two registers; a word of them meets, in one `sdot`, the four activations that a lane of
//! the column's register holds. Eight accumulators for four columns, as many for the sums of a sub-group, two registers of
//! the panel and four of activations leave a third of NEON's registers to scales.

use std::arch::aarch64::*;

use quant::WeightType;
use quant::act::ActKind;

use super::super::ColPtr;
use super::super::panel::{Panel, ROWS};
use super::super::variants::TileFn;
use super::{Split, split};

/// Columns at a time.
const COLS: usize = 4;

/// The sums of eight rows and C columns.
type Sums<const C: usize> = [[int32x4_t; 2]; C];

/// The tile function of a type.
pub(in super::super) fn tile(t: WeightType) -> TileFn {
    match (t.act(), t.has_min()) {
        (ActKind::Byte32, false) => small::<false, false>,
        (ActKind::Byte32, true) => small::<false, true>,
        (ActKind::Block32, false) => small::<true, false>,
        (ActKind::Block32, true) => small::<true, true>,
        (ActKind::Block256, _) => match t {
            WeightType::Q2_K => large::<16, true>,
            WeightType::Q3_K | WeightType::Q6_K => large::<16, false>,
            WeightType::IQ4_XS => large::<32, false>,
            _ => large::<32, true>,
        },
        (ActKind::F32, _) => unreachable!("floats have no integer panel"),
    }
}

/// Calls `$f` for as many columns as there are.
macro_rules! columns {
    ($f:ident::<$($arg:ident),*>, $cols:expr, $acc:expr, |$c:ident, $a:ident| ($($call:expr),*)) => {
        for ($c, $a) in $cols.chunks(COLS).zip($acc.chunks_mut(COLS)) {
            // SAFETY: the caller's promise, for each of the columns.
            unsafe {
                match $c.len() {
                    1 => $f::<1, $($arg),*>($($call),*),
                    2 => $f::<2, $($arg),*>($($call),*),
                    3 => $f::<3, $($arg),*>($($call),*),
                    _ => $f::<COLS, $($arg),*>($($call),*),
                }
            }
        }
    };
}

/// # Safety
/// See [`TileFn`]; activations are 16-bit integers where `WORDS`, bytes otherwise.
#[target_feature(enable = "neon,dotprod")]
unsafe fn small<const WORDS: bool, const MIN: bool>(
    panel: &Panel,
    blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    columns!(small_group::<WORDS, MIN>, cols, acc, |cols, acc| (panel, blocks, chunk, cols, acc));
}

/// # Safety
/// See [`TileFn`]; `SUB` values share a sub-scale and a minimum.
#[target_feature(enable = "neon,dotprod")]
unsafe fn large<const SUB: usize, const MIN: bool>(
    panel: &Panel,
    _: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    columns!(large_group::<SUB, MIN>, cols, acc, |cols, acc| (panel, chunk, cols, acc));
}

/// `acc` plus the products of four words of a row each with word `LANE` of `x`. The intrinsic is not stable in Rust yet.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot_lane<const LANE: usize>(mut acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: one instruction on registers, which the machine has.
    unsafe {
        std::arch::asm!(
            "sdot {0:v}.4s, {1:v}.16b, {2:v}.4b[{3}]",
            inout(vreg) acc, in(vreg) w, in(vreg) x, const LANE,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    acc
}

/// Adds the products of 16 values of eight rows, whose first words are at `w`, and C columns.
///
/// # Safety
/// `w` is readable for four words of 16 rows, but for the last of eight other rows.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn sixteen<const C: usize>(sums: &mut Sums<C>, w: *const i8, x: &[int8x16_t; C]) {
    macro_rules! words {
        ($($i:literal)*) => {
            $(
                // SAFETY: the caller's promise.
                let word = unsafe { [vld1q_s8(w.add(4 * ROWS * $i)), vld1q_s8(w.add(4 * ROWS * $i + 16))] };
                for c in 0..C {
                    sums[c][0] = sdot_lane::<$i>(sums[c][0], word[0], x[c]);
                    sums[c][1] = sdot_lane::<$i>(sums[c][1], word[1], x[c]);
                }
            )*
        };
    }
    words!(0 1 2 3);
}

/// `y += scale · dx · sum` for eight rows.
///
/// # Safety
/// `scale` and `y` have eight places.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn add(y: *mut f32, scale: *const f32, dx: f32, sum: [int32x4_t; 2]) {
    for i in 0..2 {
        // SAFETY: the caller's promise.
        unsafe {
            let d = vmulq_n_f32(vld1q_f32(scale.add(4 * i)), dx);
            vst1q_f32(y.add(4 * i), vfmaq_f32(vld1q_f32(y.add(4 * i)), d, vcvtq_f32_s32(sum[i])));
        }
    }
}

/// # Safety
/// As [`small`], with C columns.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn small_group<const C: usize, const WORDS: bool, const MIN: bool>(
    panel: &Panel,
    blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    let zero = [[vdupq_n_s32(0); 2]; C];
    for r in [0, 8] {
        for b in 0..blocks {
            let at = chunk / 32 + b;
            let w = panel.neon.q[4 * (8 * b * ROWS + r)..].as_ptr();
            // SAFETY: the panel and the columns have the block; `acc` has C columns.
            unsafe {
                let sum: [i32; C] = std::array::from_fn(|c| *cols[c].row.sums.cast::<i32>().add(at));
                let (mut low, mut high) = (zero, zero);
                for half in 0..2 {
                    let w = w.add(16 * ROWS * half);
                    if WORDS {
                        let x: [Split; C] =
                            std::array::from_fn(|c| split(cols[c].row.q.cast::<i16>().add(32 * at + 16 * half)));
                        sixteen(&mut high, w, &std::array::from_fn(|c| x[c].high));
                        sixteen(&mut low, w, &std::array::from_fn(|c| x[c].low));
                    } else {
                        let x = std::array::from_fn(|c| vld1q_s8(cols[c].row.q.cast::<i8>().add(32 * at + 16 * half)));
                        sixteen(&mut low, w, &x);
                    }
                }
                for c in 0..C {
                    let mut isum = low[c];
                    for i in 0..2 {
                        if WORDS {
                            let sums = vld1q_s32(panel.neon.sums[b].as_ptr().add(r + 4 * i));
                            isum[i] = vaddq_s32(vmlaq_n_s32(low[c][i], high[c][i], 256), sums);
                        }
                        if WORDS && MIN {
                            // Integers of eight bits without a sign: the panel has them less 128.
                            isum[i] = vaddq_s32(isum[i], vdupq_n_s32(128 * sum[c]));
                        }
                    }
                    let (y, dx) = (acc[c].as_mut_ptr().add(r), *cols[c].row.d.add(at));
                    add(y, panel.d[b].as_ptr().add(r), dx, isum);
                    if MIN {
                        add(y, panel.m[b].as_ptr().add(r), dx, [vdupq_n_s32(sum[c]); 2]);
                    }
                }
            }
        }
    }
}

/// # Safety
/// As [`large`], with C columns.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn large_group<const C: usize, const SUB: usize, const MIN: bool>(
    panel: &Panel,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
) {
    let zero = [[vdupq_n_s32(0); 2]; C];
    for r in [0, 8] {
        let w = panel.neon.q[4 * r..].as_ptr();
        let numbers = |table: &[[i32; ROWS]; 16], g: usize| {
            // SAFETY: a row of the table has 16 places.
            unsafe { [vld1q_s32(table[g].as_ptr().add(r)), vld1q_s32(table[g].as_ptr().add(r + 4))] }
        };
        // SAFETY: the panel and the columns have the block; `acc` has C columns.
        unsafe {
            let mut isum = zero;
            for j in 0..8 {
                let group = |sums: &mut Sums<C>, half: usize| {
                    let at = chunk + 32 * j + 16 * half;
                    let x = std::array::from_fn(|c| vld1q_s8(cols[c].row.q.cast::<i8>().add(at)));
                    sixteen(sums, w.add((8 * j + 4 * half) * 4 * ROWS), &x);
                };
                let mut dot = zero;
                group(&mut dot, 0);
                if SUB == 32 {
                    group(&mut dot, 1);
                    let s = numbers(&panel.neon.scales, j);
                    dot = dot.map(|dot| [vmulq_s32(dot[0], s[0]), vmulq_s32(dot[1], s[1])]);
                } else {
                    let s = numbers(&panel.neon.scales, 2 * j);
                    dot = dot.map(|dot| [vmulq_s32(dot[0], s[0]), vmulq_s32(dot[1], s[1])]);
                    let mut second = zero;
                    group(&mut second, 1);
                    let s = numbers(&panel.neon.scales, 2 * j + 1);
                    for c in 0..C {
                        dot[c] = [vmlaq_s32(dot[c][0], second[c][0], s[0]), vmlaq_s32(dot[c][1], second[c][1], s[1])];
                    }
                }
                for c in 0..C {
                    let u = vdupq_n_s32(i32::from(*cols[c].row.u.add(chunk / 32 + j)));
                    isum[c] = [vmlaq_s32(isum[c][0], dot[c][0], u), vmlaq_s32(isum[c][1], dot[c][1], u)];
                }
            }
            let mut msum = zero;
            if MIN {
                for g in 0..256 / SUB {
                    let m = numbers(&panel.neon.mins, g);
                    for c in 0..C {
                        let sums = cols[c].row.sums.cast::<i16>().add((chunk + SUB * g) / 16);
                        let sum = i32::from(*sums) + if SUB == 32 { i32::from(*sums.add(1)) } else { 0 };
                        msum[c] = [vmlaq_n_s32(msum[c][0], m[0], sum), vmlaq_n_s32(msum[c][1], m[1], sum)];
                    }
                }
            }
            for c in 0..C {
                let (y, dx) = (acc[c].as_mut_ptr().add(r), *cols[c].row.d.add(chunk / 256));
                add(y, panel.d[0].as_ptr().add(r), dx, isum[c]);
                if MIN {
                    add(y, panel.m[0].as_ptr().add(r), dx, msum[c]);
                }
            }
        }
    }
}
