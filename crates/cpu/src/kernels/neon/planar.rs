//! The formats of MLX files, whose scales and biases lie in separate planes. [`quant::types::planar`] draws the
//! layouts.

use std::arch::aarch64::*;

use quant::types::iq::E2M1_DOUBLED;

use super::super::bit_stream::BitStream;
use super::small::{Ints, e8m0_halves, look_up, nibbles, signed};
use super::{halves4, load128, word16, word32};

/// Integers of a plane.
pub(super) trait Plane: Ints {
    /// Bytes of 32 integers.
    const BYTES: usize;
}

pub(super) struct Bits<const B: usize>;
pub(super) struct Fp4;

impl Ints for Bits<8> {
    const WORDS: bool = true;
    const OFFSET: i32 = -128;
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn get(p: *const u8) -> [int8x16_t; 2] {
        // SAFETY: the promise of the trait.
        let v = unsafe { [load128(p), load128(p.add(16))] };
        signed(v.map(|v| veorq_u8(v, vdupq_n_u8(0x80))))
    }
}

impl Ints for Bits<4> {
    const EVEN_ODD: bool = true;
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn get(p: *const u8) -> [int8x16_t; 2] {
        // SAFETY: the promise of the trait.
        signed(nibbles(unsafe { load128(p) }))
    }
}

impl Ints for Fp4 {
    const EVEN_ODD: bool = true;
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn get(p: *const u8) -> [int8x16_t; 2] {
        // SAFETY: the promise of the trait.
        look_up(&E2M1_DOUBLED, nibbles(unsafe { load128(p) }))
    }
}

impl Plane for Bits<8> {
    const BYTES: usize = 32;
}
impl Plane for Bits<4> {
    const BYTES: usize = 16;
}
impl Plane for Fp4 {
    const BYTES: usize = 16;
}

/// Both halves of 32 values of `B` bits, in order, from the bytes of each.
#[inline]
#[target_feature(enable = "neon")]
fn stream<const B: i32>(v: [uint8x16_t; 2], s: &BitStream) -> [int8x16_t; 2] {
    let half = |i: usize| {
        // SAFETY: both tables have 16 bytes a half.
        let (bytes, shift) = unsafe { (vld1q_u8(s.bytes[i].as_ptr()), vld1q_s16(s.shift[i].as_ptr())) };
        let t = vshlq_u16(vreinterpretq_u16_u8(vqtbl1q_u8(v[i], bytes)), shift);
        let t = vreinterpretq_u8_u16(vsliq_n_u16::<8>(t, vshrq_n_u16::<B>(t)));
        vandq_u8(t, vdupq_n_u8((1 << B) - 1))
    };
    signed([half(0), half(1)])
}

/// # Safety
/// `p` is readable for eight bytes.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn load64(p: *const u8) -> uint8x16_t {
    // SAFETY: the caller's promise.
    vcombine_u8(unsafe { vld1_u8(p) }, vdup_n_u8(0))
}

macro_rules! stream {
    ($bits:literal, |$p:ident| $load:expr) => {
        impl Ints for Bits<$bits> {
            #[inline]
            #[target_feature(enable = "neon")]
            unsafe fn get($p: *const u8) -> [int8x16_t; 2] {
                static STREAM: BitStream = BitStream::right($bits);
                // SAFETY: the promise of the trait; no load ends past the bytes of the values.
                stream::<$bits>(unsafe { $load }, &STREAM)
            }
        }
        impl Plane for Bits<$bits> {
            const BYTES: usize = 4 * $bits;
        }
    };
}

stream!(2, |p| [load64(p), load64(p)]);
stream!(3, |p| [load64(p), load64(p.add(BitStream::upper(3)))]);
stream!(5, |p| [load128(p), load128(p.add(BitStream::upper(5)))]);
stream!(6, |p| [load128(p), load128(p.add(BitStream::upper(6)))]);

/// The layout of numbers in the planes of scales and biases.
///
/// # Safety
/// Of its method: the number is readable at every address, and the machine has NEON.
pub(super) trait Scale {
    /// Bytes of a number.
    const BYTES: usize;
    /// The number at each of four addresses.
    unsafe fn four(p: &[*const u8; 4]) -> float32x4_t;
}

pub(super) struct F16;
pub(super) struct BF16;
pub(super) struct F32;
pub(super) struct E8m0;

impl Scale for F16 {
    const BYTES: usize = 2;
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn four(p: &[*const u8; 4]) -> float32x4_t {
        // SAFETY: the promise of the trait.
        unsafe { halves4(p, 0) }
    }
}

impl Scale for BF16 {
    const BYTES: usize = 2;
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn four(p: &[*const u8; 4]) -> float32x4_t {
        // SAFETY: the promise of the trait.
        let h = |i: usize| unsafe { word16(p[i]) };
        let bits = vcreate_u16(h(0) | h(1) << 16 | h(2) << 32 | h(3) << 48);
        vreinterpretq_f32_u32(vshll_n_u16::<16>(bits))
    }
}

impl Scale for F32 {
    const BYTES: usize = 4;
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn four(p: &[*const u8; 4]) -> float32x4_t {
        // SAFETY: the promise of the trait.
        let w = |i: usize| unsafe { word32(p[i]) };
        vreinterpretq_f32_u64(vcombine_u64(vcreate_u64(w(0) | w(1) << 32), vcreate_u64(w(2) | w(3) << 32)))
    }
}

impl Scale for E8m0 {
    const BYTES: usize = 1;
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn four(p: &[*const u8; 4]) -> float32x4_t {
        // SAFETY: the promise of the trait.
        e8m0_halves(unsafe { [*p[0], *p[1], *p[2], *p[3]] })
    }
}
