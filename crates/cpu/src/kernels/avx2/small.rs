//! 32-block formats: how their bytes become integers, scales and minimums. [`quant::types::legacy`] and
//! [`quant::types::iq`] draw the layouts.

use std::arch::x86_64::*;

use quant::types::iq::{E2M1_DOUBLED, IQ4_VALUES};

use super::{both, hide, hsum8, load_f16x8, load128, load256, sums};

/// Products of eight blocks with one block of a column, a lane a block.
pub(super) struct Products {
    /// `Σ (q + OFFSET)·x`.
    pub isum: __m256i,
    /// The scales.
    pub d: __m256,
    /// The minimums; meaningless in formats without.
    pub m: __m256,
}

/// A 32-block format.
///
/// # Safety
/// Of every method: `p` points to readable blocks of the format, `x` to a readable block of activations, and the
/// machine has AVX2, FMA and F16C.
pub(super) trait Small {
    /// Bytes of a block.
    const BYTES: usize;
    /// Whether there is a minimum.
    const MIN: bool = false;
    /// Bytes of a block of activations.
    const X: usize = 32;
    /// Offset added to every integer of [`Products::isum`], so that none is negative.
    const OFFSET: i32 = 0;
    /// Its integers fit eight bits with a sign only: on AVX2 their panel has 16-bit integers.
    const SIGNED: bool = false;
    /// The products of eight blocks.
    unsafe fn products(p: &[*const u8; 8], x: *const u8) -> Products;
}

/// The low nibbles of 16 bytes at each of two addresses, then the high nibbles.
///
/// # Safety
/// 16 bytes are readable at `p` and at `q`.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn nibbles_of_two(p: *const u8, q: *const u8) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    let v = unsafe { _mm256_set_m128i(load128(q), load128(p)) };
    let mask = _mm256_set1_epi8(15);
    [_mm256_and_si256(v, mask), _mm256_and_si256(_mm256_srli_epi16::<4>(v), mask)]
}

/// The first 16 bytes of blocks `i` and `i + 4`, in the halves of register `i`.
///
/// # Safety
/// 16 bytes are readable at every address.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn headers(p: &[*const u8; 8]) -> [__m256i; 4] {
    // SAFETY: the caller's promise.
    array!(4, |i| unsafe { _mm256_set_m128i(load128(p[i + 4]), load128(p[i])) })
}

/// The first f16 of each of the [`headers`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn first_f16(h: &[__m256i; 4]) -> __m256 {
    let two = [_mm256_unpacklo_epi16(h[0], h[1]), _mm256_unpacklo_epi16(h[2], h[3])];
    let four = _mm256_unpacklo_epi32(two[0], two[1]);
    _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64::<0x08>(four)))
}

/// The first two f16 of each of the [`headers`].
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn first_two_f16(h: &[__m256i; 4]) -> [__m256; 2] {
    // Both of blocks 0, 1, 4, 5, then of 2, 3, 6, 7.
    let both = array!(2, |i| {
        let words = _mm256_unpacklo_epi32(h[2 * i], h[2 * i + 1]);
        _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64::<0x08>(words)))
    });
    [_mm256_shuffle_ps::<0x88>(both[0], both[1]), _mm256_shuffle_ps::<0xdd>(both[0], both[1])]
}

/// The fifth bits of two blocks as bit 4 of a byte: of values 0 .. 16, then of 16 .. 32. The bits begin at byte `at` of
/// each half of `header`.
#[inline]
#[target_feature(enable = "avx2")]
fn fifth_of_two(header: __m256i, at: i64) -> [__m256i; 2] {
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201u64 as i64);
    // `vpsignb` keeps 16 where the bit is set (bit 7 is negative, so that byte is -16) and gives 0 where it is not.
    let sixteen = _mm256_set1_epi64x(0xf010_1010_1010_1010u64 as i64);
    array!(2, |i| {
        let first = 0x0101_0101_0101_0101 * (at + 2 * i as i64);
        let spread = both(_mm_set_epi64x(first + 0x0101_0101_0101_0101, first));
        _mm256_sign_epi8(sixteen, _mm256_and_si256(_mm256_shuffle_epi8(header, spread), bit))
    })
}

/// The values of `codes` in a table.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn look_up(values: &[i8; 16], codes: __m256i) -> __m256i {
    // SAFETY: the table has 16 bytes.
    _mm256_shuffle_epi8(both(unsafe { load128(values.as_ptr().cast()) }), codes)
}

/// A table with an offset added.
pub(super) const fn with_offset(mut values: [i8; 16], offset: u8) -> [i8; 16] {
    let mut i = 0;
    while i < 16 {
        values[i] = values[i].wrapping_add(offset.cast_signed());
        i += 1;
    }
    values
}

/// [`E2M1_DOUBLED`] with an offset of 12, so that none is negative.
pub(super) const E2M1_WITH_OFFSET: [i8; 16] = with_offset(E2M1_DOUBLED, 12);

pub(super) struct Q4_0;
pub(super) struct Q4_1;
pub(super) struct Q5_0;
pub(super) struct Q5_1;
pub(super) struct Q8_0;
pub(super) struct Iq4Nl;
pub(super) struct Mxfp4;

/// One format: its block, the offset of its integers, and the expression for its products.
macro_rules! small {
    ($t:ident, $bytes:literal, min $min:literal, offset $offset:literal, |$p:ident, $x:ident| $products:expr
     $(, signed $signed:literal)?) => {
        impl Small for $t {
            const BYTES: usize = $bytes;
            const MIN: bool = $min;
            const OFFSET: i32 = $offset;
            $(const SIGNED: bool = $signed;)?
            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn products($p: &[*const u8; 8], x: *const u8) -> Products {
                // SAFETY: the promise of the trait.
                unsafe {
                    let $x = sums::halves(x);
                    let (isum, [d, m]) = $products;
                    Products { isum, d, m }
                }
            }
        }
    };
}

small!(Q4_0, 18, min false, offset 8, |p, x| {
    let two = array!(4, |i| nibbles_of_two(p[i].add(2), p[i + 4].add(2)));
    (sums::of_halves::<15, false>(two, x), [load_f16x8(p, 0); 2])
});
small!(Q4_1, 20, min true, offset 0, |p, x| {
    let two = array!(4, |i| nibbles_of_two(p[i].add(4), p[i + 4].add(4)));
    (sums::of_halves::<15, false>(two, x), [load_f16x8(p, 0), load_f16x8(p, 2)])
});
small!(Q5_0, 22, min false, offset 16, |p, x| {
    let headers = headers(p);
    let two = array!(4, |i| {
        let (low, top) = (nibbles_of_two(p[i].add(6), p[i + 4].add(6)), fifth_of_two(headers[i], 2));
        array!(2, |h| _mm256_or_si256(low[h], top[h]))
    });
    (sums::of_halves::<31, false>(two, x), [first_f16(&headers); 2])
});
small!(Q5_1, 24, min true, offset 0, |p, x| {
    let headers = headers(p);
    let two = array!(4, |i| {
        let (low, top) = (nibbles_of_two(p[i].add(8), p[i + 4].add(8)), fifth_of_two(headers[i], 4));
        array!(2, |h| _mm256_or_si256(low[h], top[h]))
    });
    (sums::of_halves::<31, false>(two, x), first_two_f16(&headers))
});
small!(Iq4Nl, 18, min false, offset 0, |p, x| {
    let two = array!(4, |i| {
        let codes = nibbles_of_two(p[i].add(2), p[i + 4].add(2));
        array!(2, |h| look_up(&IQ4_VALUES, codes[h]))
    });
    (sums::of_halves::<127, true>(two, x), [load_f16x8(p, 0); 2])
}, signed true);
small!(Mxfp4, 17, min false, offset 12, |p, x| {
    let two = array!(4, |i| {
        let codes = nibbles_of_two(p[i].add(1), p[i + 4].add(1));
        array!(2, |h| look_up(&E2M1_WITH_OFFSET, codes[h]))
    });
    (sums::of_halves::<24, false>(two, x), [load_e8m0x8(p); 2])
});

impl Small for Q8_0 {
    const BYTES: usize = 34;
    const X: usize = 64;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn products(p: &[*const u8; 8], x: *const u8) -> Products {
        // SAFETY: the promise of the trait.
        unsafe {
            let x = [load256(x), load256(x.add(32))];
            let isum = hsum8(array!(8, |i| {
                let b = load256(p[i].add(2));
                let lo = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(b));
                let hi = _mm256_cvtepi8_epi16(_mm256_extracti128_si256::<1>(b));
                _mm256_add_epi32(_mm256_madd_epi16(lo, x[0]), _mm256_madd_epi16(hi, x[1]))
            }));
            let d = load_f16x8(p, 0);
            Products { isum, d, m: d }
        }
    }
}

/// [`quant::types::iq::e8m0_half`] of the first eight bytes.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn e8m0(bytes: __m128i) -> __m256 {
    // 2^(e - 128): a power of two from e = 2 on; below it is subnormal, and the larger of the two numbers.
    let up = _mm256_slli_epi32::<23>(_mm256_cvtepu8_epi32(bytes));
    let normal = _mm256_sub_epi32(up, _mm256_set1_epi32(1 << 23));
    let tiny = _mm256_add_epi32(_mm256_srli_epi32::<2>(up), _mm256_set1_epi32(1 << 21));
    _mm256_castsi256_ps(_mm256_max_epi32(normal, tiny))
}

/// [`e8m0`] of the byte at each of eight addresses.
///
/// # Safety
/// They are readable; the machine has AVX2.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn load_e8m0x8(p: &[*const u8; 8]) -> __m256 {
    // SAFETY: the caller's promise.
    let e = |i: usize| u64::from(unsafe { *p[i] });
    let lo = e(0) | e(1) << 8 | e(2) << 16 | e(3) << 24;
    let hi = e(4) | e(5) << 8 | e(6) << 16 | e(7) << 24;
    // The compiler would insert byte after byte into a vector.
    let bytes = hide(std::ptr::without_provenance((lo | hi << 32) as usize)).addr();
    e8m0(_mm_cvtsi64_si128(bytes as i64))
}
