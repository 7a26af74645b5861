//! Activation quantisers; the rule is in [`quant::act`], operation by operation.

use std::arch::aarch64::*;

use quant::act::empty_scale;

use super::super::acts::RowPtr;

/// # Safety
/// `x` is readable for 32 values.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn load32(x: *const f32) -> [float32x4_t; 8] {
    // SAFETY: the caller's promise.
    unsafe { array!(8, |i| vld1q_f32(x.add(4 * i))) }
}

/// Magnitudes as integers, whose maximum also sees NaN and inf, of 32 values in four lanes.
#[inline]
#[target_feature(enable = "neon")]
fn amax32(x: &[float32x4_t; 8]) -> uint32x4_t {
    let m = array!(8, |i| vreinterpretq_u32_f32(vabsq_f32(x[i])));
    let m = array!(4, |i| vmaxq_u32(m[i], m[i + 4]));
    vmaxq_u32(vmaxq_u32(m[0], m[1]), vmaxq_u32(m[2], m[3]))
}

/// The maximum of four integers, read as f32.
#[inline]
#[target_feature(enable = "neon")]
fn largest(x: uint32x4_t) -> f32 {
    f32::from_bits(vmaxvq_u32(x))
}

/// `clamp(rte(x · inv), -limit, limit)` of eight values. A finite product exceeds the limit by rounding only; narrowing
/// saturates.
#[inline]
#[target_feature(enable = "neon")]
fn round(a: float32x4_t, b: float32x4_t, inv: float32x4_t, limit: i16) -> int16x8_t {
    let a = vqmovn_s32(vcvtnq_s32_f32(vmulq_f32(a, inv)));
    let q = vqmovn_high_s32(a, vcvtnq_s32_f32(vmulq_f32(b, inv)));
    vmaxq_s16(vminq_s16(q, vdupq_n_s16(limit)), vdupq_n_s16(-limit))
}

/// Sixteen bytes of as many small numbers.
#[inline]
#[target_feature(enable = "neon")]
fn bytes(a: int16x8_t, b: int16x8_t) -> int8x16_t {
    vmovn_high_s16(vmovn_s16(a), b)
}

/// Quantises to 32-blocks of words.
///
/// # Safety
/// See [`super::super::variants::QuantiseFn`].
#[target_feature(enable = "neon")]
pub(in super::super) unsafe fn block32(x: &[f32], row: &RowPtr) {
    for b in 0..x.len() / 32 {
        // SAFETY: the row has sections for x.len() values, of which this is block b.
        unsafe {
            let v = load32(x.as_ptr().add(32 * b));
            let amax = largest(amax32(&v));
            let q = row.q.cast::<i16>().add(32 * b);
            let (d, sum) = (row.d.add(b), row.sums.cast::<i32>().add(b));
            if let Some(scale) = empty_scale(amax) {
                (*d, *sum) = (scale, 0);
                q.write_bytes(0, 32);
                continue;
            }
            let inv = vdupq_n_f32(32767.0 / amax);
            *d = amax / 32767.0;
            let mut total = vdupq_n_s32(0);
            for i in 0..4 {
                let r = round(v[2 * i], v[2 * i + 1], inv, 32767);
                total = vpadalq_s16(total, r);
                vst1q_s16(q.add(8 * i), r);
            }
            *sum = vaddvq_s32(total);
        }
    }
}

/// Quantises to 32-blocks of bytes.
///
/// # Safety
/// See [`super::super::variants::QuantiseFn`].
#[target_feature(enable = "neon")]
pub(in super::super) unsafe fn byte32(x: &[f32], row: &RowPtr) {
    for b in 0..x.len() / 32 {
        // SAFETY: the row has sections for x.len() values, of which this is block b.
        unsafe {
            let v = load32(x.as_ptr().add(32 * b));
            let amax = largest(amax32(&v));
            let q = row.q.cast::<i8>().add(32 * b);
            let (d, sum) = (row.d.add(b), row.sums.cast::<i32>().add(b));
            if let Some(scale) = empty_scale(amax) {
                (*d, *sum) = (scale, 0);
                q.write_bytes(0, 32);
                continue;
            }
            let inv = vdupq_n_f32(127.0 / amax);
            *d = amax / 127.0;
            let r = array!(4, |i| round(v[2 * i], v[2 * i + 1], inv, 127));
            vst1q_s8(q, bytes(r[0], r[1]));
            vst1q_s8(q.add(16), bytes(r[2], r[3]));
            *sum = i32::from(vaddvq_s16(vaddq_s16(vaddq_s16(r[0], r[1]), vaddq_s16(r[2], r[3]))));
        }
    }
}

/// Quantises to 256-blocks.
///
/// # Safety
/// See [`super::super::variants::QuantiseFn`].
#[target_feature(enable = "neon")]
pub(in super::super) unsafe fn block256(x: &[f32], row: &RowPtr) {
    for b in 0..x.len() / 256 {
        // SAFETY: the row has sections for x.len() values, of which this is super-block b.
        unsafe {
            let x = x.as_ptr().add(256 * b);
            let groups = array!(8, |j| amax32(&load32(x.add(32 * j))));
            let mut all = groups[0];
            for group in groups {
                all = vmaxq_u32(all, group);
            }
            let amax = largest(all);
            let q = row.q.cast::<i8>().add(256 * b);
            let (u, d, sums) = (row.u.add(8 * b), row.d.add(b), row.sums.cast::<i16>().add(16 * b));
            if let Some(scale) = empty_scale(amax) {
                *d = scale;
                q.write_bytes(0, 256);
                sums.write_bytes(0, 16);
                u.write_bytes(1, 8);
                continue;
            }
            let scale = amax / 1905.0;
            let ratio = 15.0 / amax;
            *d = scale;
            for j in 0..8 {
                let uj = (largest(groups[j]) * ratio).ceil().clamp(1.0, 15.0);
                let inv = vdupq_n_f32(1.0 / (scale * uj));
                *u.add(j) = uj as u8;
                let v = load32(x.add(32 * j));
                for i in 0..2 {
                    let (r, s) = (round(v[4 * i], v[4 * i + 1], inv, 127), round(v[4 * i + 2], v[4 * i + 3], inv, 127));
                    vst1q_s8(q.add(32 * j + 16 * i), bytes(r, s));
                    *sums.add(2 * j + i) = uj as i16 * vaddvq_s16(vaddq_s16(r, s));
                }
            }
        }
    }
}
