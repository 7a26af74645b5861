//! Matrix-vector products: up to 16 rows times one column.
//!
//! Rows are taken four at a time, so that the horizontal sums are shared and a lane of the f32 accumulator is a row:
//! the law wants one multiply-add per block and row, in the order of blocks.

use std::arch::aarch64::*;

use quant::WeightType;

use super::super::panel::ROWS;
use super::super::prefetch::{Far, Hint, Near, prefetch};
use super::super::types::of_type;
use super::super::variants::OneFn;
use super::super::{ActsShared, ColPtr, RowSet};
use super::large::Large;
use super::planar::{Plane, Scale};
use super::small::{Ints, Small};
use super::{halves4, hsum4, sdot, split};

/// The one-column kernel of a type.
pub(in super::super) fn one(t: WeightType) -> OneFn {
    of_type!(t, small, large, planar)
}

/// `Σ q·x` of block `b` of a column with 32 integers of each of four rows, a lane a row.
///
/// # Safety
/// `p` points to the integers, the column has the block.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn dot4<T: Ints>(p: &[*const u8; 4], col: &ColPtr, b: usize) -> int32x4_t {
    let zero = vdupq_n_s32(0);
    // SAFETY: the caller's promise.
    unsafe {
        let isum = if T::WORDS {
            let x = col.row.q.cast::<i16>().add(32 * b);
            let (x, y, one) = (split(x), split(x.add(16)), vdupq_n_s8(1));
            hsum4(array!(4, |i| {
                let w = T::get(p[i]);
                // 256·Σ q·high + 128·Σ q + Σ q·low.
                let high = vshlq_n_s32::<1>(sdot(sdot(zero, w[0], x.high), w[1], y.high));
                let one = vshlq_n_s32::<7>(sdot(sdot(high, w[0], one), w[1], one));
                sdot(sdot(one, w[0], x.low), w[1], y.low)
            }))
        } else {
            let x = col.row.q.cast::<i8>().add(32 * b);
            let x = if T::EVEN_ODD {
                let x = vld2q_s8(x);
                [x.0, x.1]
            } else {
                [vld1q_s8(x), vld1q_s8(x.add(16))]
            };
            hsum4(array!(4, |i| {
                let w = T::get(p[i]);
                sdot(sdot(zero, w[0], x[0]), w[1], x[1])
            }))
        };
        if T::OFFSET == 0 {
            return isum;
        }
        vsubq_s32(isum, vdupq_n_s32(T::OFFSET * *col.row.sums.cast::<i32>().add(b)))
    }
}

/// # Safety
/// See [`OneFn`]; the set is of type `T`.
#[target_feature(enable = "neon,dotprod")]
unsafe fn small<T: Small>(set: &RowSet, _acts: &ActsShared, col: &ColPtr, out: &mut [f32; ROWS]) {
    for first in (0..set.n).step_by(4) {
        let mut p: [*const u8; 4] = std::array::from_fn(|i| set.row(first + i));
        let near = Near::new(p[0], 4, set.bytes.q);
        let mut acc = vdupq_n_f32(0.0);
        for b in 0..set.k / 32 {
            near.prefetch(4 * T::BYTES * b, 4 * T::BYTES);
            // SAFETY: block b lies inside every row and the column; the last `add` ends at most at the row's end.
            unsafe {
                let isum = dot4::<T>(&p, col, b);
                let d = vld1q_dup_f32(col.row.d.add(b));
                acc = vfmaq_f32(acc, vmulq_f32(T::scales(&p), d), vcvtq_f32_s32(isum));
                if let Some(at) = T::MIN {
                    let sum = *col.row.sums.cast::<i32>().add(b) as f32;
                    acc = vfmaq_n_f32(acc, vmulq_f32(halves4(&p, at), d), sum);
                }
                p = p.map(|p| p.add(T::BYTES));
            }
        }
        // SAFETY: `out` has ROWS places, `first` is at most 12.
        unsafe { vst1q_f32(out.as_mut_ptr().add(first), acc) };
    }
}

/// # Safety
/// See [`OneFn`]; the set's integers are `Q`, its scales `S`, and it has biases where `MIN`.
#[target_feature(enable = "neon,dotprod")]
unsafe fn planar<Q: Plane, S: Scale, const MIN: bool>(
    set: &RowSet,
    _acts: &ActsShared,
    col: &ColPtr,
    out: &mut [f32; ROWS],
) {
    let per_group = set.dtype.block_len() / 32; // blocks
    for first in (0..set.n).step_by(4) {
        let mut p: [*const u8; 4] = std::array::from_fn(|i| set.row(first + i));
        let mut scales: [*const u8; 4] = std::array::from_fn(|i| set.scales(first + i));
        let mut biases: [*const u8; 4] = std::array::from_fn(|i| set.biases(first + i));
        let near = Near::new(p[0], 4, set.bytes.q);
        let mut acc = vdupq_n_f32(0.0);
        for group in 0..set.k / set.dtype.block_len() {
            // Prefetches the planes of the next four rows, a line at a time.
            if group % (64 / (4 * S::BYTES)) == 0 {
                for (plane, bytes) in [(scales[0], set.bytes.scales), (biases[0], set.bytes.biases)] {
                    prefetch(plane.wrapping_add(4 * bytes + 3 * group * S::BYTES), 64, Hint::Once);
                }
            }
            // SAFETY: groups and blocks lie inside every row and the column; the last `add` ends at most at the row's
            // end.
            unsafe {
                let d = S::four(&scales);
                let m = if MIN { S::four(&biases) } else { d };
                for b in group * per_group..(group + 1) * per_group {
                    near.prefetch(4 * Q::BYTES * b, 4 * Q::BYTES);
                    let isum = dot4::<Q>(&p, col, b);
                    let dx = vld1q_dup_f32(col.row.d.add(b));
                    acc = vfmaq_f32(acc, vmulq_f32(d, dx), vcvtq_f32_s32(isum));
                    if MIN {
                        let sum = *col.row.sums.cast::<i32>().add(b) as f32;
                        acc = vfmaq_n_f32(acc, vmulq_f32(m, dx), sum);
                    }
                    p = p.map(|p| p.add(Q::BYTES));
                }
                scales = scales.map(|p| p.add(S::BYTES));
                if MIN {
                    biases = biases.map(|p| p.add(S::BYTES));
                }
            }
        }
        // SAFETY: as in `small`.
        unsafe { vst1q_f32(out.as_mut_ptr().add(first), acc) };
    }
}

/// A super-block of activations.
#[derive(Clone, Copy)]
struct X {
    /// 256 bytes.
    q: *const u8,
    /// Sub-scales.
    u: int16x8_t,
    /// Sums of the sixteen 16-groups.
    sums: [int16x8_t; 2],
}

/// Integer dot product and minimums of a super-block, each in four partial sums.
///
/// The four lanes of a sub-group's products are multiplied with its scale: one operation, as many as a horizontal sum
/// first would take, and without its latency.
///
/// # Safety
/// `p` points to a block of type `T`, `x` to activations.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn block<T: Large>(p: *const u8, x: &X) -> (int32x4_t, int32x4_t) {
    // SAFETY: the caller's promise; x holds 256 bytes.
    unsafe {
        let (scales, mins) = (T::scales(p), T::mins(p));
        let wide = [vmovl_s8(vget_low_s8(scales)), vmovl_high_s8(scales)];
        let zero = vdupq_n_s32(0);
        let (mut acc, mut msum) = (zero, zero);
        if T::OFFSET != 0 {
            for i in 0..2 {
                acc = vmlal_s16(acc, vget_low_s16(wide[i]), vget_low_s16(x.sums[i]));
                acc = vmlal_high_s16(acc, wide[i], x.sums[i]);
            }
            acc = vmulq_n_s32(acc, -T::OFFSET);
        }
        macro_rules! load {
            ($j:literal) => {{
                let q = x.q.cast::<i8>().add(32 * $j);
                [vld1q_s8(q), vld1q_s8(q.add(16))]
            }};
        }
        if T::SUB == 32 {
            let s = vmulq_s16(wide[0], x.u);
            let s = [vmovl_s16(vget_low_s16(s)), vmovl_high_s16(s)];
            macro_rules! groups {
                ($($j:literal)*) => {
                    $(
                        let (w, q) = (T::group(p, $j), load!($j));
                        let dot = sdot(sdot(zero, w[0], q[0]), w[1], q[1]);
                        acc = vmlaq_laneq_s32::<{ $j % 4 }>(acc, dot, s[$j / 4]);
                    )*
                };
            }
            groups!(0 1 2 3 4 5 6 7);
            if T::DMIN.is_some() {
                let mins = vmovl_u8(vget_low_u8(mins));
                let mins = [vmovl_u16(vget_low_u16(mins)), vmovl_high_u16(mins)].map(|m| vreinterpretq_s32_u32(m));
                msum = vmulq_s32(mins[0], vpaddlq_s16(x.sums[0]));
                msum = vmlaq_s32(msum, mins[1], vpaddlq_s16(x.sums[1]));
            }
        } else {
            let s = [vmulq_s16(wide[0], vzip1q_s16(x.u, x.u)), vmulq_s16(wide[1], vzip2q_s16(x.u, x.u))];
            let s = [
                vmovl_s16(vget_low_s16(s[0])),
                vmovl_high_s16(s[0]),
                vmovl_s16(vget_low_s16(s[1])),
                vmovl_high_s16(s[1]),
            ];
            macro_rules! groups {
                ($($j:literal)*) => {
                    $(
                        let (w, q) = (T::group(p, $j), load!($j));
                        acc = vmlaq_laneq_s32::<{ $j % 2 * 2 }>(acc, sdot(zero, w[0], q[0]), s[$j / 2]);
                        acc = vmlaq_laneq_s32::<{ $j % 2 * 2 + 1 }>(acc, sdot(zero, w[1], q[1]), s[$j / 2]);
                    )*
                };
            }
            groups!(0 1 2 3 4 5 6 7);
            if T::DMIN.is_some() {
                let mins = [vmovl_u8(vget_low_u8(mins)), vmovl_high_u8(mins)].map(|m| vreinterpretq_s16_u16(m));
                for i in 0..2 {
                    msum = vmlal_s16(msum, vget_low_s16(mins[i]), vget_low_s16(x.sums[i]));
                    msum = vmlal_high_s16(msum, mins[i], x.sums[i]);
                }
            }
        }
        (acc, msum)
    }
}

/// # Safety
/// See [`OneFn`]; the set is of type `T`.
#[target_feature(enable = "neon,dotprod")]
unsafe fn large<T: Large>(set: &RowSet, _acts: &ActsShared, col: &ColPtr, out: &mut [f32; ROWS]) {
    let far = Far::new(set, 4);
    for first in (0..set.n).step_by(4) {
        let mut p: [*const u8; 4] = std::array::from_fn(|i| set.row(first + i));
        let mut acc = vdupq_n_f32(0.0);
        for b in 0..set.k / 256 {
            prefetch(far.address(first * set.bytes.q + 4 * T::BYTES * b), 4 * T::BYTES, Hint::L2);
            // SAFETY: block b lies inside every row and the column; the last `add` ends at most at the row's end.
            unsafe {
                let sums = col.row.sums.cast::<i16>().add(16 * b);
                let x = X {
                    q: col.row.q.add(256 * b),
                    u: vreinterpretq_s16_u16(vmovl_u8(vld1_u8(col.row.u.add(8 * b)))),
                    sums: [vld1q_s16(sums), vld1q_s16(sums.add(8))],
                };
                let sums = array!(4, |i| block::<T>(p[i], &x));
                let d = vld1q_dup_f32(col.row.d.add(b));
                let isum = vcvtq_f32_s32(hsum4(array!(4, |i| sums[i].0)));
                acc = vfmaq_f32(acc, vmulq_f32(T::d(&p), d), isum);
                if let Some(at) = T::DMIN {
                    let msum = vcvtq_f32_s32(hsum4(array!(4, |i| sums[i].1)));
                    acc = vfmsq_f32(acc, vmulq_f32(halves4(&p, at), d), msum);
                }
                p = p.map(|p| p.add(T::BYTES));
            }
        }
        // SAFETY: `out` has ROWS places, `first` is at most 12.
        unsafe { vst1q_f32(out.as_mut_ptr().add(first), acc) };
    }
}
