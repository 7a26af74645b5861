//! The panel for [`super::tile`]: 16 rows by up to 256 values of any type, as signed bytes.

use std::arch::aarch64::*;

use quant::WeightType;

use super::super::RowSet;
use super::super::panel::{CHUNK, Panel, ROWS, UnpackFn};
use super::super::prefetch::{Hint, prefetch};
use super::super::types::of_type;
use super::large::Large;
use super::planar::{Plane, Scale};
use super::products::Products;
use super::small::{Ints, Small};
use super::{halves4, hsum4, sdot};

/// The integers of a panel; its float scales stand beside them in [`Panel`].
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(in super::super) struct Bytes {
    /// `[CHUNK/N][ROWS][N]`: N values of a row make a word ([`Products::WORD`]), the words of some rows a register.
    pub q: [i8; ROWS * CHUNK],
    /// Sub-scales of the 16-groups or 32-groups of a super-block, in the layout of [`Products::put_scales`]; unused
    /// where [`Large::FOLD`] multiplies them into the integers.
    pub scales: [[i32; 2 * ROWS]; 16],
    /// Of a super-block, minimum of each 16-group, `[16/N][ROWS][N]`.
    pub mins: [i8; ROWS * 16],
    /// 128 times the sum of the integers that are multiplied with 16 bits: of each 32-block, or of the minimums. For
    /// products that are [`Products::LESS`].
    pub sums: [[i32; ROWS]; 8],
}

impl Bytes {
    pub const ZERO: Bytes =
        Bytes { q: [0; ROWS * CHUNK], scales: [[0; 2 * ROWS]; 16], mins: [0; ROWS * 16], sums: [[0; ROWS]; 8] };
}

/// The unpacker of a type.
pub(in super::super) fn unpack<M: Products>(t: WeightType) -> UnpackFn {
    of_type!(t, small, large, planar, M)
}

/// Stores 16 values of four rows, those from `r` on, into `to`, which has 16 values of all rows.
#[inline]
#[target_feature(enable = "neon")]
fn put<M: Products>(to: &mut [i8], r: usize, w: [int8x16_t; 4]) {
    let mut store = |word: usize, r: usize, v: int8x16_t| {
        let at = (word * ROWS + r) * M::WORD;
        // SAFETY: slicing has checked that there are 16 bytes.
        unsafe { vst1q_s8(to[at..at + 16].as_mut_ptr(), v) }
    };
    if M::WORD == 8 {
        for i in [0, 2] {
            let (a, b) = (vreinterpretq_s64_s8(w[i]), vreinterpretq_s64_s8(w[i + 1]));
            store(0, r + i, vreinterpretq_s8_s64(vzip1q_s64(a, b)));
            store(1, r + i, vreinterpretq_s8_s64(vzip2q_s64(a, b)));
        }
    } else {
        let w = array!(4, |i| vreinterpretq_s32_s8(w[i]));
        let (a, b) = (vzip1q_s32(w[0], w[2]), vzip2q_s32(w[0], w[2]));
        let (c, d) = (vzip1q_s32(w[1], w[3]), vzip2q_s32(w[1], w[3]));
        let words = [vzip1q_s32(a, c), vzip2q_s32(a, c), vzip1q_s32(b, d), vzip2q_s32(b, d)];
        for (i, w) in words.into_iter().enumerate() {
            store(i, r, vreinterpretq_s8_s32(w));
        }
    }
}

/// Stores 32-group `j` of four rows, the rows from `r` on.
#[inline]
#[target_feature(enable = "neon")]
fn put_group<M: Products>(to: &mut Bytes, j: usize, r: usize, w: [[int8x16_t; 2]; 4]) {
    for half in 0..2 {
        put::<M>(&mut to.q[(2 * j + half) * 16 * ROWS..], r, array!(4, |i| w[i][half]));
    }
}

#[inline]
#[target_feature(enable = "neon")]
fn put4<T: Copy>(to: &mut [T; ROWS], r: usize, v: [T; 4]) {
    to[r..r + 4].copy_from_slice(&v);
}

#[inline]
#[target_feature(enable = "neon")]
fn floats(v: float32x4_t) -> [f32; 4] {
    let mut out = [0.0; 4];
    // SAFETY: there are four places.
    unsafe { vst1q_f32(out.as_mut_ptr(), v) };
    out
}

#[inline]
#[target_feature(enable = "neon")]
fn ints(v: int32x4_t) -> [i32; 4] {
    let mut out = [0; 4];
    // SAFETY: there are four places.
    unsafe { vst1q_s32(out.as_mut_ptr(), v) };
    out
}

/// The integers of block `b` of the panel, of rows `r` to `r + 4`.
///
/// # Safety
/// `p` points to them.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn block<T: Ints, M: Products>(to: &mut Bytes, b: usize, r: usize, p: &[*const u8; 4]) {
    let w = array!(4, |i| {
        // SAFETY: the caller's promise.
        let w = unsafe { T::get(p[i]) };
        let w = if T::EVEN_ODD { [vzip1q_s8(w[0], w[1]), vzip2q_s8(w[0], w[1])] } else { w };
        // Unsigned bytes keep their offset: without it they do not fit signed bytes.
        if T::OFFSET == 0 || T::WORDS { w } else { w.map(|w| vsubq_s8(w, vdupq_n_s8(T::OFFSET as i8))) }
    });
    if T::WORDS && M::LESS {
        let one = vdupq_n_s8(1);
        let sums = hsum4(array!(4, |i| sdot(sdot(vdupq_n_s32(0), w[i][0], one), w[i][1], one)));
        put4(&mut to.sums[b], r, ints(vshlq_n_s32::<7>(sums)));
    }
    put_group::<M>(to, b, r, w);
}

/// # Safety
/// See [`UnpackFn`]; the set is of type `T`.
#[target_feature(enable = "neon,dotprod")]
unsafe fn small<T: Small, M: Products>(set: &RowSet, chunk: usize, blocks: usize, panel: &mut Panel) {
    for r in (0..ROWS).step_by(4) {
        let mut p: [*const u8; 4] = std::array::from_fn(|i| set.row(r + i).wrapping_add(chunk / 32 * T::BYTES));
        for row in p {
            prefetch(row.wrapping_add(ROWS * set.bytes.q), blocks * T::BYTES, Hint::Once);
        }
        for b in 0..blocks {
            // SAFETY: the rows have the block; the last `add` ends at most at the row's end.
            unsafe {
                block::<T, M>(&mut panel.neon, b, r, &p);
                put4(&mut panel.d[b], r, floats(T::scales(&p)));
                if let Some(at) = T::MIN {
                    put4(&mut panel.m[b], r, floats(halves4(&p, at)));
                }
                p = p.map(|p| p.add(T::BYTES));
            }
        }
    }
}

/// # Safety
/// See [`UnpackFn`]; the set's integers are `Q`, its scales `S`, and it has biases where `MIN`.
#[target_feature(enable = "neon,dotprod")]
unsafe fn planar<Q: Plane, S: Scale, const MIN: bool, M: Products>(
    set: &RowSet,
    chunk: usize,
    blocks: usize,
    panel: &mut Panel,
) {
    let per_group = set.dtype.block_len() / 32; // blocks
    for r in (0..ROWS).step_by(4) {
        let mut p: [*const u8; 4] = std::array::from_fn(|i| set.row(r + i).wrapping_add(chunk / 32 * Q::BYTES));
        for row in p {
            prefetch(row.wrapping_add(ROWS * set.bytes.q), blocks * Q::BYTES, Hint::Once);
        }
        for b in 0..blocks {
            let at = (chunk / 32 + b) / per_group * S::BYTES;
            // SAFETY: the rows have the block and its group; the last `add` ends at most at the row's end.
            unsafe {
                block::<Q, M>(&mut panel.neon, b, r, &p);
                let scales: [*const u8; 4] = std::array::from_fn(|i| set.scales(r + i).add(at));
                put4(&mut panel.d[b], r, floats(S::four(&scales)));
                if MIN {
                    let biases: [*const u8; 4] = std::array::from_fn(|i| set.biases(r + i).add(at));
                    put4(&mut panel.m[b], r, floats(S::four(&biases)));
                }
                p = p.map(|p| p.add(Q::BYTES));
            }
        }
    }
}

/// Widens the first `to.len()` sub-scales of each of four rows, the rows from `r` on.
///
/// # Safety
/// The machine has the instruction set of `M`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn widen<M: Products>(to: &mut [[i32; 2 * ROWS]], r: usize, v: [int8x16_t; 4]) {
    let (a, b) = (vzip1q_s8(v[0], v[2]), vzip1q_s8(v[1], v[3]));
    let (c, d) = (vzip2q_s8(v[0], v[2]), vzip2q_s8(v[1], v[3]));
    let rows = [vzip1q_s8(a, b), vzip2q_s8(a, b), vzip1q_s8(c, d), vzip2q_s8(c, d)];
    for (to, v) in to.chunks_exact_mut(4).zip(rows) {
        let (low, high) = (vmovl_s8(vget_low_s8(v)), vmovl_high_s8(v));
        let numbers =
            [vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)];
        for (to, numbers) in to.iter_mut().zip(numbers) {
            // SAFETY: the caller's promise.
            unsafe { M::put_scales(to, r, numbers) }
        }
    }
}

/// # Safety
/// See [`UnpackFn`]; the set is of type `T`.
#[target_feature(enable = "neon,dotprod")]
unsafe fn large<T: Large, M: Products>(set: &RowSet, chunk: usize, _: usize, panel: &mut Panel) {
    let (groups, to) = (256 / T::SUB, &mut panel.neon);
    for r in (0..ROWS).step_by(4) {
        let p: [*const u8; 4] = std::array::from_fn(|i| set.row(r + i).wrapping_add(chunk / 256 * T::BYTES));
        for row in p {
            prefetch(row.wrapping_add(ROWS * set.bytes.q), T::BYTES, Hint::Once);
        }
        // SAFETY: the rows have the block.
        unsafe {
            let scales = array!(4, |i| T::scales(p[i]));
            let fold = array!(4, |i| if T::FOLD < 0 { vnegq_s8(scales[i]) } else { scales[i] });
            macro_rules! groups {
                ($($j:literal)*) => {
                    $(
                        let w = array!(4, |i| {
                            let w = T::group(p[i], $j);
                            let offset = vdupq_n_s8(T::OFFSET as i8);
                            let w = if T::OFFSET == 0 { w } else { w.map(|w| vsubq_s8(w, offset)) };
                            if T::FOLD == 0 {
                                w
                            } else {
                                [
                                    vmulq_s8(w[0], vdupq_laneq_s8::<{ 2 * $j }>(fold[i])),
                                    vmulq_s8(w[1], vdupq_laneq_s8::<{ 2 * $j + 1 }>(fold[i])),
                                ]
                            }
                        });
                        put_group::<M>(to, $j, r, w);
                    )*
                };
            }
            groups!(0 1 2 3 4 5 6 7);
            if T::FOLD == 0 {
                widen::<M>(&mut to.scales[..groups], r, scales);
            }
            put4(&mut panel.d[0], r, floats(T::d(&p)));
            if let Some(at) = T::DMIN {
                let mins = array!(4, |i| {
                    let mins = vreinterpretq_s8_u8(T::mins(p[i]));
                    if T::SUB == 32 { vzip1q_s8(mins, mins) } else { mins }
                });
                put::<M>(&mut to.mins, r, mins);
                if M::LESS {
                    let sums = hsum4(array!(4, |i| sdot(vdupq_n_s32(0), mins[i], vdupq_n_s8(1))));
                    put4(&mut to.sums[0], r, ints(vshlq_n_s32::<7>(sums)));
                }
                put4(&mut panel.m[0], r, floats(vnegq_f32(halves4(&p, at))));
            }
        }
    }
}
