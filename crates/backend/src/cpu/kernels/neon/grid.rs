//! Code books and ternary digits as super-blocks of signed bytes.

use std::arch::aarch64::*;

use super::super::grid::Coded;
use super::large::{Large, two_bits};
use super::{halves4, load128};

/// Two words as sixteen bytes.
#[inline]
#[target_feature(enable = "neon")]
fn bytes(low: u64, high: u64) -> int8x16_t {
    vcombine_s8(vcreate_s8(low), vcreate_s8(high))
}

impl<T: Coded> Large for T {
    const BYTES: usize = <T as Coded>::BYTES;
    const D: usize = <T as Coded>::D;
    const DMIN: Option<usize> = None;
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

pub(in super::super) struct Tq1;
pub(in super::super) struct Tq2;

/// Digit of base three that bytes begin with, as a fraction of 256, less one.
#[inline]
#[target_feature(enable = "neon")]
fn first_digit(v: uint8x16_t) -> int8x16_t {
    let above = vaddq_u8(vcgeq_u8(v, vdupq_n_u8(86)), vcgeq_u8(v, vdupq_n_u8(171)));
    // A comparison that holds is -1.
    vsubq_s8(vdupq_n_s8(-1), vreinterpretq_s8_u8(above))
}

impl Large for Tq1 {
    const BYTES: usize = 54;
    const D: usize = 52;
    const DMIN: Option<usize> = None;
    const SUB: usize = 16;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn group(p: *const u8, j: usize) -> [int8x16_t; 2] {
        const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
        array!(2, |half| {
            // SAFETY: the promise of the trait.
            first_digit(unsafe {
                match (j, half) {
                    (0..5, _) => vmulq_u8(load128(p.add(16 * half)), vdupq_n_u8(POWERS[j])),
                    (7, 1) => {
                        let last = vdupq_n_u32(p.add(48).cast::<u32>().read_unaligned());
                        let powers = bytes(0x0303_0303_0101_0101, 0x1b1b_1b1b_0909_0909);
                        vmulq_u8(vreinterpretq_u8_u32(last), vreinterpretq_u8_s8(powers))
                    }
                    _ => vmulq_u8(load128(p.add(32)), vdupq_n_u8(POWERS[2 * (j - 5) + half])),
                }
            })
        })
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn scales(_: *const u8) -> int8x16_t {
        vdupq_n_s8(1)
    }
}

impl Large for Tq2 {
    const BYTES: usize = 66;
    const D: usize = 64;
    const DMIN: Option<usize> = None;
    const SUB: usize = 16;

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn group(p: *const u8, j: usize) -> [int8x16_t; 2] {
        array!(2, |half| {
            // SAFETY: the promise of the trait.
            let q = vandq_u8(unsafe { two_bits(p, j, half) }, vdupq_n_u8(3));
            vsubq_s8(vreinterpretq_s8_u8(q), vdupq_n_s8(1))
        })
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn scales(_: *const u8) -> int8x16_t {
        vdupq_n_s8(1)
    }
}
