//! The panel for [`super::tile`]: 16 rows by up to 256 values of any type, as signed bytes.

use std::arch::aarch64::*;

use quant::{ScaleType, WeightType};

use super::super::panel::{CHUNK, Panel, ROWS, UnpackFn};
use super::super::{RowSet, prefetch};
use super::large::{Iq4Xs, Large, Q2K, Q3K, Q4K, Q5K, Q6K};
use super::planar::{BF16, Bits, E8m0, F16, F32, Fp4, Plane, Scale, of_plane};
use super::small::{Ints, Iq4Nl, Mxfp4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Small};
use super::{array, halves4, hsum4, sdot};

/// The integers of a panel; its float scales stand beside them in [`Panel`].
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(in super::super) struct Bytes {
    /// `[CHUNK/4][ROWS][4]`: four values of a row make a word, the words of four rows a register.
    pub q: [i8; ROWS * CHUNK],
    /// Of a super-block, sub-scale of each 16-group or 32-group.
    pub scales: [[i32; ROWS]; 16],
    /// Of a super-block, minimum of each 16-group or 32-group.
    pub mins: [[i32; ROWS]; 16],
    /// Of 32-blocks that meet 16-bit activations, 128 times the sum of each.
    pub sums: [[i32; ROWS]; 8],
}

impl Bytes {
    pub const ZERO: Bytes =
        Bytes { q: [0; ROWS * CHUNK], scales: [[0; ROWS]; 16], mins: [[0; ROWS]; 16], sums: [[0; ROWS]; 8] };
}

/// The unpacker of a type.
pub(in super::super) fn unpack(t: WeightType) -> UnpackFn {
    match t {
        WeightType::Q4_0 => small::<Q4_0>,
        WeightType::Q4_1 => small::<Q4_1>,
        WeightType::Q5_0 => small::<Q5_0>,
        WeightType::Q5_1 => small::<Q5_1>,
        WeightType::Q8_0 => small::<Q8_0>,
        WeightType::IQ4_NL => small::<Iq4Nl>,
        WeightType::MXFP4 => small::<Mxfp4>,
        WeightType::Q2_K => large::<Q2K>,
        WeightType::Q3_K => large::<Q3K>,
        WeightType::Q4_K => large::<Q4K>,
        WeightType::Q5_K => large::<Q5K>,
        WeightType::Q6_K => large::<Q6K>,
        WeightType::IQ4_XS => large::<Iq4Xs>,
        WeightType::MXFP4_PLANAR | WeightType::Affine(_) => of_plane!(t, planar),
        WeightType::F32 | WeightType::F16 | WeightType::BF16 => unreachable!("floats have no integer panel"),
    }
}

/// Stores 32 values of four rows from word `word` and row `r` on.
#[inline]
#[target_feature(enable = "neon")]
fn put(to: &mut Bytes, word: usize, r: usize, w: [[int8x16_t; 2]; 4]) {
    for half in 0..2 {
        let w = array!(4, |i| vreinterpretq_s32_s8(w[i][half]));
        let (a, b) = (vzip1q_s32(w[0], w[2]), vzip2q_s32(w[0], w[2]));
        let (c, d) = (vzip1q_s32(w[1], w[3]), vzip2q_s32(w[1], w[3]));
        let words = [vzip1q_s32(a, c), vzip2q_s32(a, c), vzip1q_s32(b, d), vzip2q_s32(b, d)];
        for (i, w) in words.into_iter().enumerate() {
            let at = ((word + 4 * half + i) * ROWS + r) * 4;
            // SAFETY: slicing has checked that there are 16 bytes.
            unsafe { vst1q_s8(to.q[at..at + 16].as_mut_ptr(), vreinterpretq_s8_s32(w)) }
        }
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
unsafe fn block<T: Ints>(to: &mut Bytes, b: usize, r: usize, p: &[*const u8; 4]) {
    let w = array!(4, |i| {
        // SAFETY: the caller's promise.
        let w = unsafe { T::get(p[i]) };
        let w = if T::EVEN_ODD { [vzip1q_s8(w[0], w[1]), vzip2q_s8(w[0], w[1])] } else { w };
        // Unsigned bytes keep their offset: they have no other form.
        if T::OFFSET == 0 || T::WORDS { w } else { w.map(|w| vsubq_s8(w, vdupq_n_s8(T::OFFSET as i8))) }
    });
    if T::WORDS {
        let one = vdupq_n_s8(1);
        let sums = hsum4(array!(4, |i| sdot(sdot(vdupq_n_s32(0), w[i][0], one), w[i][1], one)));
        put4(&mut to.sums[b], r, ints(vshlq_n_s32::<7>(sums)));
    }
    put(to, 8 * b, r, w);
}

/// # Safety
/// See [`UnpackFn`]; the set is of type `T`.
#[target_feature(enable = "neon,dotprod")]
unsafe fn small<T: Small>(set: &RowSet, chunk: usize, blocks: usize, panel: &mut Panel) {
    for r in (0..ROWS).step_by(4) {
        let mut p: [*const u8; 4] = std::array::from_fn(|i| set.row(r + i).wrapping_add(chunk / 32 * T::BYTES));
        for row in p {
            prefetch(row.wrapping_add(ROWS * set.bytes.q), blocks * T::BYTES);
        }
        for b in 0..blocks {
            // SAFETY: the rows have the block; the last `add` ends at most at the row's end.
            unsafe {
                block::<T>(&mut panel.neon, b, r, &p);
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
unsafe fn planar<Q: Plane, S: Scale, const MIN: bool>(set: &RowSet, chunk: usize, blocks: usize, panel: &mut Panel) {
    let per_group = set.dtype.block_len() / 32; // blocks
    for r in (0..ROWS).step_by(4) {
        let mut p: [*const u8; 4] = std::array::from_fn(|i| set.row(r + i).wrapping_add(chunk / 32 * Q::BYTES));
        for row in p {
            prefetch(row.wrapping_add(ROWS * set.bytes.q), blocks * Q::BYTES);
        }
        for b in 0..blocks {
            let at = (chunk / 32 + b) / per_group * S::BYTES;
            // SAFETY: the rows have the block and its group; the last `add` ends at most at the row's end.
            unsafe {
                block::<Q>(&mut panel.neon, b, r, &p);
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

/// Widens the first `to.len()` bytes of each of four rows, number `g` of the rows to `to[g][r..r + 4]`.
#[inline]
#[target_feature(enable = "neon")]
fn widen(to: &mut [[i32; ROWS]], r: usize, v: [int8x16_t; 4]) {
    let (a, b) = (vzip1q_s8(v[0], v[2]), vzip1q_s8(v[1], v[3]));
    let (c, d) = (vzip2q_s8(v[0], v[2]), vzip2q_s8(v[1], v[3]));
    let rows = [vzip1q_s8(a, b), vzip2q_s8(a, b), vzip1q_s8(c, d), vzip2q_s8(c, d)];
    for (to, v) in to.chunks_exact_mut(4).zip(rows) {
        let (low, high) = (vmovl_s8(vget_low_s8(v)), vmovl_high_s8(v));
        put4(&mut to[0], r, ints(vmovl_s16(vget_low_s16(low))));
        put4(&mut to[1], r, ints(vmovl_high_s16(low)));
        put4(&mut to[2], r, ints(vmovl_s16(vget_low_s16(high))));
        put4(&mut to[3], r, ints(vmovl_high_s16(high)));
    }
}

/// # Safety
/// See [`UnpackFn`]; the set is of type `T`.
#[target_feature(enable = "neon,dotprod")]
unsafe fn large<T: Large>(set: &RowSet, chunk: usize, _: usize, panel: &mut Panel) {
    let (groups, to) = (256 / T::SUB, &mut panel.neon);
    for r in (0..ROWS).step_by(4) {
        let p: [*const u8; 4] = std::array::from_fn(|i| set.row(r + i).wrapping_add(chunk / 256 * T::BYTES));
        for row in p {
            prefetch(row.wrapping_add(ROWS * set.bytes.q), T::BYTES);
        }
        // SAFETY: the rows have the block.
        unsafe {
            macro_rules! groups {
                ($($j:literal)*) => {
                    $(
                        let w = array!(4, |i| {
                            let w = T::group(p[i], $j);
                            if T::OFFSET == 0 { w } else { w.map(|w| vsubq_s8(w, vdupq_n_s8(T::OFFSET as i8))) }
                        });
                        put(to, 8 * $j, r, w);
                    )*
                };
            }
            groups!(0 1 2 3 4 5 6 7);
            widen(&mut to.scales[..groups], r, array!(4, |i| T::scales(p[i])));
            put4(&mut panel.d[0], r, floats(halves4(&p, T::D)));
            if let Some(at) = T::DMIN {
                widen(&mut to.mins[..groups], r, array!(4, |i| vreinterpretq_s8_u8(T::mins(p[i]))));
                put4(&mut panel.m[0], r, floats(vnegq_f32(halves4(&p, at))));
            }
        }
    }
}
