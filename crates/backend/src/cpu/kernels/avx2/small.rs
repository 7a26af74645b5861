//! 32-block formats: how their bytes become integers, scales and minimums. The layouts are drawn in
//! [`quant::types::legacy`] and [`quant::types::iq`].

use std::arch::x86_64::*;

use quant::types::iq::{E2M1_DOUBLED, IQ4_VALUES};

use super::{array, both, halves8, hsum8, load128, load256, sums};

/// A 32-block format. `p` always points to a block, all of which is readable; the machine has AVX2, FMA and F16C.
#[allow(clippy::missing_safety_doc)]
pub(in super::super) trait Small {
    /// Bytes of a block.
    const BYTES: usize;
    /// Where the f16 minimum lies, when there is one.
    const MIN: Option<usize>;
    /// Bytes of a block of activations.
    const X: usize = 32;
    /// What the integers of [`Small::sums`] have too much.
    const OFFSET: i32;
    /// `Σ (q + OFFSET)·x` of eight blocks, a lane a block; `x` is readable for a block of activations.
    unsafe fn sums(p: &[*const u8; 8], x: *const u8) -> __m256i;
    /// The scales of eight blocks.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scales(p: &[*const u8; 8]) -> __m256 {
        // SAFETY: the promise of the trait.
        unsafe { halves8(p, 0) }
    }
}

/// The low halves of 16 bytes at each of two places, then the high halves.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn nibbles_of_two(p: *const u8, q: *const u8) -> [__m256i; 2] {
    // SAFETY: the caller's promise: 16 bytes each.
    let v = unsafe { _mm256_set_m128i(load128(q), load128(p)) };
    let mask = _mm256_set1_epi8(15);
    [_mm256_and_si256(v, mask), _mm256_and_si256(_mm256_srli_epi16::<4>(v), mask)]
}

/// Bits 0 .. 16 of the words at two places, each at the place of bit 4 of a byte, then bits 16 .. 32.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn fifth_of_two(p: *const u8, q: *const u8) -> [__m256i; 2] {
    // SAFETY: the caller's promise: 4 bytes each.
    let word = |p: *const u8| _mm256_set1_epi32(unsafe { p.cast::<i32>().read_unaligned() });
    let words = _mm256_blend_epi32::<0xf0>(word(p), word(q));
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201u64 as i64);
    array!(2, |i| {
        let first = 0x0202_0202_0202_0202 * i as i64;
        let spread = both(_mm_set_epi64x(first + 0x0101_0101_0101_0101, first));
        let set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(words, spread), bit), bit);
        _mm256_and_si256(set, _mm256_set1_epi8(16))
    })
}

/// The values of a table.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn table(values: &[i8; 16], codes: __m256i) -> __m256i {
    // SAFETY: the table has 16 bytes.
    _mm256_shuffle_epi8(both(unsafe { load128(values.as_ptr().cast()) }), codes)
}

/// A table with `by` added.
pub(super) const fn raised(mut values: [i8; 16], by: u8) -> [i8; 16] {
    let mut i = 0;
    while i < 16 {
        values[i] = values[i].wrapping_add(by.cast_signed());
        i += 1;
    }
    values
}

/// [`E2M1_DOUBLED`] with 12 added, so that none is negative.
pub(super) const E2M1_RAISED: [i8; 16] = raised(E2M1_DOUBLED, 12);

pub(in super::super) struct Q4_0;
pub(in super::super) struct Q4_1;
pub(in super::super) struct Q5_0;
pub(in super::super) struct Q5_1;
pub(in super::super) struct Q8_0;
pub(in super::super) struct Iq4Nl;
pub(in super::super) struct Mxfp4;

/// One format: its block, and the expression for values 0 .. 16 and 16 .. 32 of two blocks: `most`
/// is the largest of those, which have `offset` too much.
macro_rules! small {
    ($t:ident, $bytes:literal, $min:expr,
     most $most:literal, signed $signed:literal, offset $offset:literal, two |$a:ident, $b:ident| $two:expr $(, $more:item)*) => {
        impl Small for $t {
            const BYTES: usize = $bytes;
            const MIN: Option<usize> = $min;
            const OFFSET: i32 = $offset;
            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn sums(p: &[*const u8; 8], x: *const u8) -> __m256i {
                // SAFETY: the promise of the trait.
                unsafe {
                    let two = array!(4, |i| {
                        let ($a, $b) = (p[i], p[i + 4]);
                        $two
                    });
                    sums::of_halves::<$most, $signed>(two, sums::halves(x))
                }
            }
            $($more)*
        }
    };
}

small!(
    Q4_0, 18, None,
    most 15, signed false, offset 8, two |p, q| nibbles_of_two(p.add(2), q.add(2))
);
small!(
    Q4_1, 20, Some(2),
    most 15, signed false, offset 0, two |p, q| nibbles_of_two(p.add(4), q.add(4))
);
small!(
    Q5_0, 22, None,
    most 31, signed false, offset 16, two |p, q| {
        let (low, top) = (nibbles_of_two(p.add(6), q.add(6)), fifth_of_two(p.add(2), q.add(2)));
        array!(2, |i| _mm256_or_si256(low[i], top[i]))
    }
);
small!(
    Q5_1, 24, Some(2),
    most 31, signed false, offset 0, two |p, q| {
        let (low, top) = (nibbles_of_two(p.add(8), q.add(8)), fifth_of_two(p.add(4), q.add(4)));
        array!(2, |i| _mm256_or_si256(low[i], top[i]))
    }
);
small!(
    Iq4Nl, 18, None,
    most 127, signed true, offset 0, two |p, q| {
        let codes = nibbles_of_two(p.add(2), q.add(2));
        array!(2, |i| table(&IQ4_VALUES, codes[i]))
    }
);
small!(
    Mxfp4, 17, None,
    most 24, signed false, offset 12, two |p, q| {
        let codes = nibbles_of_two(p.add(1), q.add(1));
        array!(2, |i| table(&E2M1_RAISED, codes[i]))
    },
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scales(p: &[*const u8; 8]) -> __m256 {
        // SAFETY: the promise of the trait.
        e8m0_halves(u64::from_le_bytes(std::array::from_fn(|i| unsafe { *p[i] })))
    }
);

impl Small for Q8_0 {
    const BYTES: usize = 34;
    const MIN: Option<usize> = None;
    const X: usize = 64;
    const OFFSET: i32 = 0;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn sums(p: &[*const u8; 8], x: *const u8) -> __m256i {
        // SAFETY: the promise of the trait.
        unsafe {
            let x = [load256(x), load256(x.add(32))];
            hsum8(array!(8, |i| {
                let b = load256(p[i].add(2));
                let lo = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(b));
                let hi = _mm256_cvtepi8_epi16(_mm256_extracti128_si256::<1>(b));
                _mm256_add_epi32(_mm256_madd_epi16(lo, x[0]), _mm256_madd_epi16(hi, x[1]))
            }))
        }
    }
}

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
