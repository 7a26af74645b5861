//! Activation quantisers; the rule is in [`quant::act`], operation by operation.

use std::arch::aarch64::*;

use quant::act::AMAX_MIN;

use super::super::acts::RowPtr;
use super::array;

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

/// The largest of four integers, read as f32.
#[inline]
#[target_feature(enable = "neon")]
fn largest(x: uint32x4_t) -> f32 {
    f32::from_bits(vmaxvq_u32(x))
}

/// `clamp(rte(x · inv), -limit, limit)` of eight values. A finite product lies near the limit at most, so that narrowing,
/// which saturates, never meets a number that is far from it.
#[inline]
#[target_feature(enable = "neon")]
fn round(a: float32x4_t, b: float32x4_t, inv: float32x4_t, limit: i16) -> int16x8_t {
    let a = vqmovn_s32(vcvtnq_s32_f32(vmulq_f32(a, inv)));
    let q = vqmovn_high_s32(a, vcvtnq_s32_f32(vmulq_f32(b, inv)));
    vmaxq_s16(vminq_s16(q, vdupq_n_s16(limit)), vdupq_n_s16(-limit))
}

/// Order 0, 2, 1, 3 in every group of four i16.
#[inline]
#[target_feature(enable = "neon")]
fn wide_order(x: int16x8_t) -> int16x8_t {
    const ORDER: [u8; 16] = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15];
    // SAFETY: the table has 16 bytes.
    let order = unsafe { vld1q_u8(ORDER.as_ptr()) };
    vreinterpretq_s16_u8(vqtbl1q_u8(vreinterpretq_u8_s16(x), order))
}

fn empty(amax: f32) -> Option<f32> {
    if !amax.is_finite() {
        Some(f32::NAN)
    } else if amax < AMAX_MIN {
        Some(0.0)
    } else {
        None
    }
}

/// Quantises to 32-blocks and writes the wide form.
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
            let (q, wide) = (row.q.cast::<i16>().add(32 * b), row.wide.add(32 * b));
            let (d, sum) = (row.d.add(b), row.sums.cast::<i32>().add(b));
            if let Some(scale) = empty(amax) {
                (*d, *sum) = (scale, 0);
                q.write_bytes(0, 32);
                wide.write_bytes(0, 32);
                continue;
            }
            let inv = vdupq_n_f32(32767.0 / amax);
            *d = amax / 32767.0;
            let r = array!(4, |i| round(v[2 * i], v[2 * i + 1], inv, 32767));
            let mut total = vdupq_n_s32(0);
            for i in 0..4 {
                total = vpadalq_s16(total, r[i]);
                vst1q_s16(q.add(8 * i), r[i]);
                vst1q_s16(wide.add(8 * i), wide_order(r[i]));
            }
            *sum = vaddvq_s32(total);
        }
    }
}

/// Quantises to 256-blocks and writes the wide form.
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
            let (q, wide) = (row.q.cast::<i8>().add(256 * b), row.wide.add(256 * b));
            let (u, d, sums) = (row.u.add(8 * b), row.d.add(b), row.sums.cast::<i16>().add(16 * b));
            if let Some(scale) = empty(amax) {
                *d = scale;
                q.write_bytes(0, 256);
                wide.write_bytes(0, 256);
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
                let r = array!(4, |i| round(v[2 * i], v[2 * i + 1], inv, 127));
                for i in 0..2 {
                    let bytes = vcombine_s8(vmovn_s16(r[2 * i]), vmovn_s16(r[2 * i + 1]));
                    vst1q_s8(q.add(32 * j + 16 * i), bytes);
                    *sums.add(2 * j + i) = uj as i16 * vaddvq_s16(vaddq_s16(r[2 * i], r[2 * i + 1]));
                }
                for i in 0..4 {
                    vst1q_s16(wide.add(32 * j + 8 * i), wide_order(vmulq_n_s16(r[i], uj as i16)));
                }
            }
        }
    }
}
