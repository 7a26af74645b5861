//! Super-block formats: how their bytes become eight groups of 32 bytes, sub-scales and minimums. [`quant::types::k`]
//! and [`quant::types::iq`] draw the layouts.
//!
//! Sub-scales are packed too tightly for vectors of 16 bytes: they are unpacked in general registers, which the
//! products leave idle.

use std::arch::aarch64::*;

use quant::types::iq::IQ4_VALUES;
use quant::types::layout::{self, SuperBlock};

use super::{halves4, load128, word16, word32, word64};

/// A super-block format.
///
/// # Safety
/// Of every method: `p` points to a readable block of the format, and the machine has NEON.
pub(in super::super) trait Large {
    /// Where a block has its parts.
    const LAYOUT: SuperBlock;
    /// Bytes of a block.
    const BYTES: usize = Self::LAYOUT.bytes;
    /// Byte of the f16 scale of the minimums, when there is one.
    const DMIN: Option<usize> = Self::LAYOUT.dmin;
    /// Values that share a sub-scale, and a minimum: 16 or 32.
    const SUB: usize = Self::LAYOUT.sub;
    /// Offset added to every integer of [`Large::group`], so that none is negative; 0 when they are signed.
    const OFFSET: i32 = 0;
    /// The sign, 1 or -1, with which the products of integers and sub-scales fit signed bytes; 0 when they do not fit.
    const FOLD: i8 = 0;
    /// The integers of 32-group `j`, plus [`Large::OFFSET`], in order. `j` is a constant, and the compiler merges loads
    /// that groups share.
    unsafe fn group(p: *const u8, j: usize) -> [int8x16_t; 2];
    /// The sub-scales, signed bytes: 16 of them, or 8 in the first eight bytes.
    unsafe fn scales(p: *const u8) -> int8x16_t;
    /// The scales of four blocks.
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn d(p: &[*const u8; 4]) -> float32x4_t {
        // SAFETY: the promise of the trait.
        unsafe { halves4(p, Self::LAYOUT.d) }
    }
    /// The minimums, unsigned bytes, as many as sub-scales.
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn mins(p: *const u8) -> uint8x16_t {
        let _ = p;
        vdupq_n_u8(0)
    }
}

pub(in super::super) struct Q2K;
pub(in super::super) struct Q3K;
pub(in super::super) struct Q4K;
pub(in super::super) struct Q5K;
pub(in super::super) struct Q6K;
pub(in super::super) struct Iq4Xs;
pub(in super::super) struct Tq1;
pub(in super::super) struct Tq2;

/// `v >> $n` in every byte.
macro_rules! shr {
    ($v:expr, 0) => {
        $v
    };
    ($v:expr, $n:literal) => {
        vshrq_n_u8::<$n>($v)
    };
}

/// The lower `$n` bits of every byte of `$low`, above them the bits of `$high`; of these the lower `$keep` in all.
macro_rules! join {
    ($low:expr, $n:literal, $high:expr, $keep:literal) => {
        vandq_u8(vsliq_n_u8::<$n>($low, $high), vdupq_n_u8((1 << $keep) - 1))
    };
}

/// Two-bit fields: 32 bytes hold four groups. The bits above are left to the caller to mask.
///
/// # Safety
/// 64 bytes are readable at `p`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn two_bits(p: *const u8, j: usize, half: usize) -> uint8x16_t {
    // SAFETY: the caller's promise.
    let v = unsafe { load128(p.add(j / 4 * 32 + 16 * half)) };
    match j % 4 {
        0 => v,
        1 => shr!(v, 2),
        2 => shr!(v, 4),
        _ => shr!(v, 6),
    }
}

/// Four-bit fields: 32 bytes hold two groups. The bits above are left to the caller to mask.
///
/// # Safety
/// 128 bytes are readable at `p`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn four_bits(p: *const u8, j: usize, half: usize) -> uint8x16_t {
    // SAFETY: the caller's promise.
    let v = unsafe { load128(p.add(j / 2 * 32 + 16 * half)) };
    if j.is_multiple_of(2) { v } else { shr!(v, 4) }
}

/// Eight bytes at `v >> n`, in the first half of a vector.
#[inline]
#[target_feature(enable = "neon")]
fn eight(v: u64) -> uint8x16_t {
    vreinterpretq_u8_u64(vsetq_lane_u64::<0>(v, vdupq_n_u64(0)))
}

/// Eight 6-bit numbers of Q4_K and Q5_K: four in the words at `p`, the lower four bits of the other four in `low`,
/// their upper two bits above the first four.
///
/// # Safety
/// `p` is readable for four bytes.
#[inline]
unsafe fn six_bits(p: *const u8, low: u64) -> u64 {
    // SAFETY: the caller's promise.
    let first = unsafe { word32(p) };
    first & 0x3f3f_3f3f | (low & 0x0f0f_0f0f | first >> 2 & 0x3030_3030) << 32
}

/// One format: its block, and the expressions for its parts; `group` is one half of a group.
macro_rules! large {
    ($t:ident, $layout:ident, offset $offset:literal, $(fold $fold:literal,)?
     group |$p:ident, $j:ident, $half:ident| $group:expr, scales |$p2:ident| $scales:expr
     $(, mins |$p3:ident| $mins:expr)?) => {
        impl Large for $t {
            const LAYOUT: SuperBlock = layout::$layout;
            const OFFSET: i32 = $offset;
            $(const FOLD: i8 = $fold;)?
            #[inline]
            #[target_feature(enable = "neon")]
            unsafe fn group($p: *const u8, $j: usize) -> [int8x16_t; 2] {
                // SAFETY: the promise of the trait: the whole block is readable.
                let half = |$half: usize| vreinterpretq_s8_u8(unsafe { $group });
                [half(0), half(1)]
            }
            #[inline]
            #[target_feature(enable = "neon")]
            #[allow(unused_unsafe, reason = "scales of one read nothing")]
            unsafe fn scales($p2: *const u8) -> int8x16_t {
                // SAFETY: as above.
                vreinterpretq_s8_u8(unsafe { $scales })
            }
            $(
                #[inline]
                #[target_feature(enable = "neon")]
                unsafe fn mins($p3: *const u8) -> uint8x16_t {
                    // SAFETY: as above.
                    unsafe { $mins }
                }
            )?
        }
    };
}

large!(
    Q2K, Q2_K, offset 0, fold 1,
    group |p, j, half| {
        let v = two_bits(p.add(16), j, half);
        if j % 4 == 3 { v } else { vandq_u8(v, vdupq_n_u8(3)) }
    },
    scales |p| vandq_u8(load128(p), vdupq_n_u8(15)),
    mins |p| vshrq_n_u8::<4>(load128(p))
);

large!(
    Q3K, Q3_K, offset 4, fold - 1,
    group |p, j, half| {
        let (q, h) = (two_bits(p.add(32), j, half), load128(p.add(16 * half)));
        match j {
            0 => join!(q, 2, h, 3),
            1 => join!(q, 2, shr!(h, 1), 3),
            2 => join!(q, 2, shr!(h, 2), 3),
            3 => join!(q, 2, shr!(h, 3), 3),
            4 => join!(q, 2, shr!(h, 4), 3),
            5 => join!(q, 2, shr!(h, 5), 3),
            6 => join!(q, 2, shr!(h, 6), 3),
            // Neither has bits above.
            _ => vsliq_n_u8::<2>(q, shr!(h, 7)),
        }
    },
    scales |p| {
        // Sixteen low halves from eight bytes; two high bits each from four bytes.
        let (low, high) = (word64(p.add(96)), word32(p.add(104)));
        let high = |n: u64| (high >> n & 0x0303_0303 | (high >> (n + 2) & 0x0303_0303) << 32) << 4;
        let of = |low: u64, high: u64| vcreate_u8(low & 0x0f0f_0f0f_0f0f_0f0f | high);
        vsubq_u8(vcombine_u8(of(low, high(0)), of(low >> 4, high(4))), vdupq_n_u8(32))
    }
);

large!(
    Q4K, Q4_K, offset 0,
    group |p, j, half| {
        let v = four_bits(p.add(16), j, half);
        if j % 2 == 1 { v } else { vandq_u8(v, vdupq_n_u8(15)) }
    },
    scales |p| eight(six_bits(p.add(4), word32(p.add(12)))),
    mins |p| eight(six_bits(p.add(8), word32(p.add(12)) >> 4))
);

large!(
    Q5K, Q5_K, offset 0,
    group |p, j, half| {
        let (q, h) = (four_bits(p.add(48), j, half), load128(p.add(16 + 16 * half)));
        match j {
            0 => join!(q, 4, h, 5),
            1 => join!(q, 4, shr!(h, 1), 5),
            2 => join!(q, 4, shr!(h, 2), 5),
            3 => join!(q, 4, shr!(h, 3), 5),
            4 => join!(q, 4, shr!(h, 4), 5),
            5 => join!(q, 4, shr!(h, 5), 5),
            6 => join!(q, 4, shr!(h, 6), 5),
            _ => vsliq_n_u8::<4>(q, shr!(h, 7)),
        }
    },
    scales |p| eight(six_bits(p.add(4), word32(p.add(12)))),
    mins |p| eight(six_bits(p.add(8), word32(p.add(12)) >> 4))
);

large!(
    Q6K, Q6_K, offset 32,
    group |p, j, half| {
        let low = load128(p.add(64 * (j / 4) + 32 * (j % 2) + 16 * half));
        let high = load128(p.add(128 + 32 * (j / 4) + 16 * half));
        match j % 4 {
            0 => join!(low, 4, high, 6),
            1 => join!(low, 4, shr!(high, 2), 6),
            2 => join!(shr!(low, 4), 4, shr!(high, 4), 6),
            _ => vsliq_n_u8::<4>(shr!(low, 4), shr!(high, 6)),
        }
    },
    scales |p| load128(p.add(192))
);

large!(
    Iq4Xs, IQ4_XS, offset 0,
    group |p, j, half| {
        let values = load128(IQ4_VALUES.as_ptr().cast());
        let v = load128(p.add(8 + 16 * j));
        vqtbl1q_u8(values, if half == 1 { shr!(v, 4) } else { vandq_u8(v, vdupq_n_u8(15)) })
    },
    scales |p| {
        // Eight low halves from four bytes, high bits from sixteen bits, two a scale: byte j of both comes from bits 4j
        // and 2j.
        let (low, high) = (word32(p.add(4)), word16(p.add(2)));
        let low = (low & 0xffff) | (low & 0xffff_0000) << 16;
        let low = (low & 0x0000_00ff_0000_00ff) | (low & 0x0000_ff00_0000_ff00) << 8;
        let low = (low & 0x000f_000f_000f_000f) | (low & 0x00f0_00f0_00f0_00f0) << 4;
        let high = (high & 0xff) | (high & 0xff00) << 24;
        let high = (high & 0x0000_000f_0000_000f) | (high & 0x0000_00f0_0000_00f0) << 12;
        let high = (high & 0x0003_0003_0003_0003) | (high & 0x000c_000c_000c_000c) << 6;
        vsubq_u8(eight(low | high << 4), vdupq_n_u8(32))
    }
);

/// Digit of base three that bytes begin with, as a fraction of 256, less one.
#[inline]
#[target_feature(enable = "neon")]
fn first_digit(v: uint8x16_t) -> uint8x16_t {
    let above = vaddq_u8(vcgeq_u8(v, vdupq_n_u8(86)), vcgeq_u8(v, vdupq_n_u8(171)));
    // A comparison that holds is -1.
    vsubq_u8(vdupq_n_u8(255), above)
}

large!(
    Tq1, TQ1_0, offset 0,
    group |p, j, half| {
        const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
        first_digit(match (j, half) {
            (0..5, _) => vmulq_u8(load128(p.add(16 * half)), vdupq_n_u8(POWERS[j])),
            (7, 1) => {
                let last = vdupq_n_u32(p.add(48).cast::<u32>().read_unaligned());
                let powers = vcombine_u8(vcreate_u8(0x0303_0303_0101_0101), vcreate_u8(0x1b1b_1b1b_0909_0909));
                vmulq_u8(vreinterpretq_u8_u32(last), powers)
            }
            _ => vmulq_u8(load128(p.add(32)), vdupq_n_u8(POWERS[2 * (j - 5) + half])),
        })
    },
    scales |_p| vdupq_n_u8(1)
);

large!(
    Tq2, TQ2_0, offset 0,
    group |p, j, half| vsubq_u8(vandq_u8(two_bits(p, j, half), vdupq_n_u8(3)), vdupq_n_u8(1)),
    scales |_p| vdupq_n_u8(1)
);
