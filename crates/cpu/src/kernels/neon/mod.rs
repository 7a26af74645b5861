//! Kernels for NEON with the dot products of bytes (`sdot`), and their matrix products where the machine has them
//! (`smmla`).
//!
//! A format is described once, in [`small`] (32-blocks), [`planar`] (32-blocks in planes) or [`large`] (super-blocks):
//! how its bytes become registers of signed bytes, scales and minimums. The matrix-vector kernels ([`mod@vec`]) and the
//! panel ([`mod@panel`]) are generic over formats; [`mod@tile`] multiplies panels by the instructions of [`products`].
//! `types.rs` beside this module is the table of types.

mod grid;
mod large;
mod panel;
mod planar;
mod products;
pub(super) mod quantise;
mod small;
mod tile;
mod vec;

/// The formats under the names of `types.rs`.
mod formats {
    pub(super) use super::super::grid::{Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs};
    pub(super) use super::large::{Iq4Xs, Q2K, Q3K, Q4K, Q5K, Q6K, Tq1, Tq2};
    pub(super) use super::planar::{BF16, Bits, E8m0, F16, F32, Fp4};
    pub(super) use super::small::{Iq4Nl, Mxfp4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
}

use std::arch::aarch64::*;

pub(super) use panel::{Bytes, unpack};
pub(super) use products::{Products, Sdot, Smmla};
pub(super) use tile::tile;
pub(super) use vec::one;

/// `acc` plus the products of bytes, four neighbours to a lane. The intrinsic is not stable in Rust yet.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot(mut acc: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: one instruction on registers, which the machine has.
    unsafe {
        std::arch::asm!(
            "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inout(vreg) acc, in(vreg) a, in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    acc
}

/// Sixteen 16-bit activations for products of bytes: `256·high + low + 128`.
struct Split {
    high: int8x16_t,
    low: int8x16_t,
}

/// # Safety
/// `x` is readable for 16 values.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn split(x: *const i16) -> Split {
    // SAFETY: the caller's promise.
    let x = unsafe { vld2q_s8(x.cast()) };
    Split { high: x.1, low: veorq_s8(x.0, vdupq_n_s8(-128)) }
}

/// Adds up the lanes of four vectors: lane `i` of the result is the sum of vector `i`.
#[inline]
#[target_feature(enable = "neon")]
fn hsum4(a: [int32x4_t; 4]) -> int32x4_t {
    vpaddq_s32(vpaddq_s32(a[0], a[1]), vpaddq_s32(a[2], a[3]))
}

/// # Safety
/// `p` is readable for 16 bytes.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn load128(p: *const u8) -> uint8x16_t {
    // SAFETY: the caller's promise.
    unsafe { vld1q_u8(p) }
}

/// # Safety
/// `p` is readable for eight bytes.
#[inline]
unsafe fn word64(p: *const u8) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { p.cast::<u64>().read_unaligned() }
}

/// # Safety
/// `p` is readable for four bytes.
#[inline]
unsafe fn word32(p: *const u8) -> u64 {
    // SAFETY: the caller's promise.
    u64::from(unsafe { p.cast::<u32>().read_unaligned() })
}

/// # Safety
/// `p` is readable for two bytes.
#[inline]
unsafe fn word16(p: *const u8) -> u64 {
    // SAFETY: the caller's promise.
    u64::from(unsafe { p.cast::<u16>().read_unaligned() })
}

/// The f16 at byte `at` of each of four blocks, as f32.
///
/// They are joined in a general register: loads into lanes would take a vector operation each.
///
/// # Safety
/// The two bytes are readable in every block.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn halves4(p: &[*const u8; 4], at: usize) -> float32x4_t {
    // SAFETY: the caller's promise.
    let h = |i: usize| unsafe { word16(p[i].add(at)) };
    vcvt_f32_f16(vreinterpret_f16_u64(vcreate_u64(h(0) | h(1) << 16 | h(2) << 32 | h(3) << 48)))
}
