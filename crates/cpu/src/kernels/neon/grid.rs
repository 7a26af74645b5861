//! Code books as super-blocks of signed bytes.

use std::arch::aarch64::*;

use quant::types::layout::SuperBlock;

use super::super::grid::Coded;
use super::halves4;
use super::large::Large;

/// Two words as sixteen bytes.
#[inline]
#[target_feature(enable = "neon")]
fn bytes(low: u64, high: u64) -> int8x16_t {
    vcombine_s8(vcreate_s8(low), vcreate_s8(high))
}

impl<T: Coded> Large for T {
    const LAYOUT: SuperBlock = <T as Coded>::LAYOUT;
    const SUB: usize = 16;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn group(p: *const u8, j: usize) -> [int8x16_t; 2] {
        // SAFETY: the promise of the trait.
        let (q, bits) = unsafe { T::parts(p, j) };
        array!(2, |half| {
            let q = bytes(q[2 * half], q[2 * half + 1]);
            let eights = [vdup_n_u8((bits >> (16 * half)) as u8), vdup_n_u8((bits >> (16 * half + 8)) as u8)];
            let bit = vcreate_u8(0x8040_2010_0804_0201);
            let minus = vtstq_u8(vcombine_u8(eights[0], eights[1]), vcombine_u8(bit, bit));
            let minus = vreinterpretq_s8_u8(minus);
            if T::ADDS { vaddq_s8(q, vorrq_s8(minus, vdupq_n_s8(1))) } else { vsubq_s8(veorq_s8(q, minus), minus) }
        })
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn scales(p: *const u8) -> int8x16_t {
        // SAFETY: the promise of the trait.
        let [low, high] = unsafe { <T as Coded>::scales(p) };
        bytes(low, high)
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn d(p: &[*const u8; 4]) -> float32x4_t {
        // SAFETY: the promise of the trait.
        let bits = p.map(|p| unsafe { <T as Coded>::d(p) });
        // SAFETY: four numbers, one behind the other.
        let d = unsafe { halves4(&array!(4, |i| bits.as_ptr().add(i).cast()), 0) };
        vmulq_n_f32(d, T::FACTOR)
    }
}
