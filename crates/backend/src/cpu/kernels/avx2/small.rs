//! 32-block formats: how their bytes become 32 signed bytes, scales and minimums. The layouts are drawn in
//! [`quant::types::legacy`] and [`quant::types::iq`].

use std::arch::x86_64::*;

use quant::types::iq::{E2M1_DOUBLED, IQ4_VALUES};

use super::{both, halves8, load128, load256, whole};

/// A 32-block format. `p` always points to a block, all of which is readable; the machine has AVX2, FMA and F16C.
#[allow(clippy::missing_safety_doc)]
pub(in super::super) trait Small {
    /// Bytes of a block.
    const BYTES: usize;
    /// Where the f16 minimum lies, when there is one.
    const MIN: Option<usize>;
    /// The integers of the block in order, less [`Small::OFFSET`].
    unsafe fn bytes(p: *const u8) -> __m256i;
    /// What the integers of [`Small::dot`] have too much.
    const OFFSET: i32 = 0;
    /// `Σ (q + OFFSET)·x` in eight partial sums; `x` is readable for 32 values.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn dot(p: *const u8, x: [__m256i; 2]) -> __m256i {
        // SAFETY: the promise of the trait.
        let b = unsafe { Self::bytes(p) };
        let lo = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(b));
        let hi = _mm256_cvtepi8_epi16(_mm256_extracti128_si256::<1>(b));
        _mm256_add_epi32(_mm256_madd_epi16(lo, x[0]), _mm256_madd_epi16(hi, x[1]))
    }
    /// The scales of eight blocks.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scales(p: &[*const u8; 8]) -> __m256 {
        // SAFETY: the promise of the trait.
        unsafe { halves8(p, 0) }
    }
}

/// The low halves of 16 bytes, then the high halves.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn nibbles(p: *const u8) -> __m256i {
    // SAFETY: the caller's promise: 16 bytes.
    let v = unsafe { load128(p) };
    let v = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(v), _mm_srli_epi16::<4>(v));
    _mm256_and_si256(v, _mm256_set1_epi8(15))
}

/// Sums of products of the halves of 16 bytes, which are not moved apart: cheaper than through [`nibbles`].
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn nibble_dot(p: *const u8, x: [__m256i; 2]) -> __m256i {
    // SAFETY: the caller's promise: 16 bytes.
    let v = whole(_mm256_cvtepu8_epi16(unsafe { load128(p) }));
    let lo = _mm256_and_si256(v, _mm256_set1_epi16(15));
    let hi = _mm256_srli_epi16::<4>(v);
    _mm256_add_epi32(_mm256_madd_epi16(lo, x[0]), _mm256_madd_epi16(hi, x[1]))
}

/// Bit `i` of the word at `p`, at the place of bit 4 of byte `i`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn fifth(p: *const u8) -> __m256i {
    // SAFETY: the caller's promise: 4 bytes.
    let word = _mm256_set1_epi32(unsafe { p.cast::<i32>().read_unaligned() });
    let spread = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201u64 as i64);
    let set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(word, spread), bit), bit);
    _mm256_and_si256(set, _mm256_set1_epi8(16))
}

#[inline]
#[target_feature(enable = "avx2")]
unsafe fn table(values: &[i8; 16], codes: __m256i) -> __m256i {
    // SAFETY: the table has 16 bytes.
    _mm256_shuffle_epi8(both(unsafe { load128(values.as_ptr().cast()) }), codes)
}

pub(in super::super) struct Q4_0;
pub(in super::super) struct Q4_1;
pub(in super::super) struct Q5_0;
pub(in super::super) struct Q5_1;
pub(in super::super) struct Q8_0;
pub(in super::super) struct Iq4Nl;
pub(in super::super) struct Mxfp4;

/// One format: its block, and the expression for its bytes.
macro_rules! small {
    ($t:ident, $bytes:literal, $min:expr, |$p:ident| $e:expr $(, $more:item)*) => {
        impl Small for $t {
            const BYTES: usize = $bytes;
            const MIN: Option<usize> = $min;
            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn bytes($p: *const u8) -> __m256i {
                // SAFETY: the promise of the trait: the whole block is readable.
                unsafe { $e }
            }
            $($more)*
        }
    };
}

small!(
    Q4_0,
    18,
    None,
    |p| _mm256_sub_epi8(nibbles(p.add(2)), _mm256_set1_epi8(8)),
    const OFFSET: i32 = 8;,
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn dot(p: *const u8, x: [__m256i; 2]) -> __m256i {
        // SAFETY: the promise of the trait.
        unsafe { nibble_dot(p.add(2), x) }
    }
);
small!(
    Q4_1,
    20,
    Some(2),
    |p| nibbles(p.add(4)),
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn dot(p: *const u8, x: [__m256i; 2]) -> __m256i {
        // SAFETY: the promise of the trait.
        unsafe { nibble_dot(p.add(4), x) }
    }
);
small!(Q5_0, 22, None, |p| _mm256_sub_epi8(_mm256_or_si256(nibbles(p.add(6)), fifth(p.add(2))), _mm256_set1_epi8(16)));
small!(Q5_1, 24, Some(2), |p| _mm256_or_si256(nibbles(p.add(8)), fifth(p.add(4))));
small!(Q8_0, 34, None, |p| load256(p.add(2)));
small!(Iq4Nl, 18, None, |p| table(&IQ4_VALUES, nibbles(p.add(2))));
small!(
    Mxfp4,
    17,
    None,
    |p| table(&E2M1_DOUBLED, nibbles(p.add(1))),
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scales(p: &[*const u8; 8]) -> __m256 {
        // SAFETY: the promise of the trait.
        e8m0_halves(u64::from_le_bytes(std::array::from_fn(|i| unsafe { *p[i] })))
    }
);

/// [`quant::types::iq::e8m0_half`] of eight bytes.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn e8m0_halves(e: u64) -> __m256 {
    let e = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(e as i64));
    // 2^(e - 128): a power of two from e = 2 on, subnormal below.
    let one = _mm256_set1_epi32(1);
    let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(e, one));
    let tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), e);
    _mm256_castsi256_ps(_mm256_blendv_epi8(tiny, normal, _mm256_cmpgt_epi32(e, one)))
}
