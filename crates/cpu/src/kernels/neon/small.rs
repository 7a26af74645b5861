//! 32-block formats: how their bytes become 32 signed bytes, scales and minimums. [`quant::types::legacy`] and
//! [`quant::types::iq`] draw the layouts.

use std::arch::aarch64::*;

use quant::types::iq::{E2M1_DOUBLED, IQ4_VALUES};

use super::{halves4, load128, word32};

/// The layout of 32 integers.
///
/// # Safety
/// Of its method: `p` points to a readable block of the format (of planes: to the bytes of 32 integers), and the
/// machine has NEON.
pub(super) trait Ints {
    /// Activations are 16-bit integers, not bytes.
    const WORDS: bool = false;
    /// [`Ints::get`] gives values 0, 2 .. 30 and 1, 3 .. 31, not the first half and the second.
    const EVEN_ODD: bool = false;
    /// Offset added to every integer of [`Ints::get`], so that it fits a signed byte.
    const OFFSET: i32 = 0;
    /// The integers, plus [`Ints::OFFSET`].
    unsafe fn get(p: *const u8) -> [int8x16_t; 2];
}

/// A 32-block format.
///
/// # Safety
/// Of its method: `p` points to readable blocks of the format, and the machine has NEON.
pub(super) trait Small: Ints {
    /// Bytes of a block.
    const BYTES: usize;
    /// Byte of the f16 minimum, when there is one.
    const MIN: Option<usize>;
    /// The scales of four blocks.
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn scales(p: &[*const u8; 4]) -> float32x4_t {
        // SAFETY: the promise of the trait.
        unsafe { halves4(p, 0) }
    }
}

pub(super) struct Q4_0;
pub(super) struct Q4_1;
pub(super) struct Q5_0;
pub(super) struct Q5_1;
pub(super) struct Q8_0;
pub(super) struct Iq4Nl;
pub(super) struct Mxfp4;

/// The low nibbles of 16 bytes and the high nibbles.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn nibbles(v: uint8x16_t) -> [uint8x16_t; 2] {
    [vandq_u8(v, vdupq_n_u8(15)), vshrq_n_u8::<4>(v)]
}

/// Sixteen values by the codes of [`nibbles`].
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn look_up(values: &[i8; 16], codes: [uint8x16_t; 2]) -> [int8x16_t; 2] {
    // SAFETY: the table has 16 bytes.
    let values = unsafe { vld1q_s8(values.as_ptr()) };
    [vqtbl1q_s8(values, codes[0]), vqtbl1q_s8(values, codes[1])]
}

#[inline]
#[target_feature(enable = "neon")]
pub(super) fn signed(v: [uint8x16_t; 2]) -> [int8x16_t; 2] {
    [vreinterpretq_s8_u8(v[0]), vreinterpretq_s8_u8(v[1])]
}

/// Five-bit integers with 16 taken off: where the fifth bit, in the word at `fifth`, is clear, ones fill the bits above
/// the low four at `p`.
///
/// # Safety
/// Sixteen bytes are readable at `p`, four at `fifth`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn five_bits(p: *const u8, fifth: *const u8) -> [int8x16_t; 2] {
    const SPREAD: [u8; 32] =
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3];
    // SAFETY: the caller's promise; the table has 32 bytes.
    unsafe {
        let unset = vreinterpretq_u8_u32(vdupq_n_u32(!word32(fifth) as u32));
        let bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
        let ones = |half: usize| vtstq_u8(vqtbl1q_u8(unset, load128(SPREAD.as_ptr().add(16 * half))), bit);
        let v = load128(p);
        signed([vsliq_n_u8::<4>(v, ones(0)), vsliq_n_u8::<4>(vshrq_n_u8::<4>(v), ones(1))])
    }
}

/// `2^(e - 128)` of four bytes, as [`quant::types::iq::e8m0_half`] has it.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn e8m0_halves(e: [u8; 4]) -> float32x4_t {
    let e = vcreate_u8(u64::from(u32::from_le_bytes(e)));
    let e = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(e))));
    // A power of two from e = 2 on, subnormal below.
    let one = vdupq_n_s32(1);
    let normal = vshlq_n_s32::<23>(vsubq_s32(e, one));
    let tiny = vshlq_s32(vdupq_n_s32(0x0020_0000), e);
    vreinterpretq_f32_s32(vbslq_s32(vcgtq_s32(e, one), normal, tiny))
}

/// One format: its block, and the expression for its integers.
macro_rules! small {
    ($t:ident, $bytes:literal, $min:expr, offset $offset:literal, |$p:ident| $e:expr
     $(, words $words:literal)? $(, scales $scales:item)?) => {
        impl Ints for $t {
            const OFFSET: i32 = $offset;
            $(const WORDS: bool = $words;)?
            #[inline]
            #[target_feature(enable = "neon")]
            unsafe fn get($p: *const u8) -> [int8x16_t; 2] {
                // SAFETY: the promise of the trait: the whole block is readable.
                unsafe { $e }
            }
        }
        impl Small for $t {
            const BYTES: usize = $bytes;
            const MIN: Option<usize> = $min;
            $($scales)?
        }
    };
}

small!(Q4_0, 18, None, offset 8, |p| signed(nibbles(load128(p.add(2)))));
small!(Q4_1, 20, Some(2), offset 0, |p| signed(nibbles(load128(p.add(4)))));
small!(Q5_0, 22, None, offset 0, |p| five_bits(p.add(6), p.add(2)));
small!(Q5_1, 24, Some(2), offset - 16, |p| five_bits(p.add(8), p.add(4)));
small!(Q8_0, 34, None, offset 0, |p| signed([load128(p.add(2)), load128(p.add(18))]), words true);
small!(Iq4Nl, 18, None, offset 0, |p| look_up(&IQ4_VALUES, nibbles(load128(p.add(2)))));
small!(
    Mxfp4,
    17,
    None,
    offset 0,
    |p| look_up(&E2M1_DOUBLED, nibbles(load128(p.add(1)))),
    scales #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn scales(p: &[*const u8; 4]) -> float32x4_t {
        // SAFETY: the promise of the trait.
        e8m0_halves(unsafe { [*p[0], *p[1], *p[2], *p[3]] })
    }
);
