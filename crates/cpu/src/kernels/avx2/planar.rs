//! The formats of MLX files, whose scales and biases lie in separate planes. [`quant::types::planar`] draws the
//! layouts.
//!
//! A row's scales are contiguous: those of eight groups of eight rows are loaded and transposed together.

use std::arch::x86_64::*;

use super::super::acts::RowPtr;
use super::super::bit_stream::BitStream;
use super::panel_words::{self, transpose4, words4};
use super::small::{E2M1_WITH_OFFSET, e8m0, load_e8m0x8, look_up, nibbles_of_two};
use super::{both, hsum8, load64, load128, load256, sums, transpose8};

/// The layout of 32 integers in plane `q`.
///
/// # Safety
/// Of every method: `4·BITS` bytes are readable at `p`, the column has the block, and the machine has AVX2, FMA and
/// F16C.
pub(super) trait Ints {
    /// Bits of a value.
    const BITS: usize;
    /// Offset added to every integer of [`Ints::sums`], so that none is negative.
    const OFFSET: i32 = 0;
    /// The integers of eight rows in the panel's words of four, a lane a row.
    unsafe fn words(p: &[*const u8; 8]) -> [__m256i; 8];
    /// `Σ (q + OFFSET)·x` of eight rows, a lane a row, for block `b` of the column.
    unsafe fn sums(p: &[*const u8; 8], x: &RowPtr, b: usize) -> __m256i;
}

pub(super) struct Bits<const B: usize>;
pub(super) struct Fp4;

impl Ints for Bits<8> {
    const BITS: usize = 8;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn words(p: &[*const u8; 8]) -> [__m256i; 8] {
        // SAFETY: the promise of the trait.
        let (a, b) = unsafe { (words4(p, 0), words4(p, 16)) };
        [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn sums(p: &[*const u8; 8], x: &RowPtr, b: usize) -> __m256i {
        // SAFETY: the promise of the trait.
        unsafe {
            let x = split(x.wide.add(32 * b).cast());
            hsum8(array!(8, |r| {
                let v = load256(p[r]);
                let (even, odd) = (_mm256_and_si256(v, _mm256_set1_epi16(0xff)), _mm256_srli_epi16::<8>(v));
                _mm256_add_epi32(_mm256_madd_epi16(even, x[0]), _mm256_madd_epi16(odd, x[1]))
            }))
        }
    }
}

/// Low and high nibbles of 16 bytes of eight rows, alternating.
///
/// # Safety
/// The bytes are readable at every address.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn nibbles(p: &[*const u8; 8]) -> [__m256i; 8] {
    // SAFETY: the caller's promise.
    let w = unsafe { words4(p, 0) };
    let lane = both(_mm_setr_epi32(0, 0x0004_0004, 0x0008_0008, 0x000c_000c));
    array!(8, |i| {
        // Two bytes become 16 bits each.
        let two = _mm256_set1_epi32(if i.is_multiple_of(2) { 0x8001_8000u32 } else { 0x8003_8002 }.cast_signed());
        let v = _mm256_shuffle_epi8(w[i / 2], _mm256_add_epi8(two, lane));
        _mm256_and_si256(_mm256_or_si256(v, _mm256_slli_epi16::<4>(v)), _mm256_set1_epi8(15))
    })
}

impl Ints for Bits<4> {
    const BITS: usize = 4;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn words(p: &[*const u8; 8]) -> [__m256i; 8] {
        // SAFETY: the promise of the trait.
        unsafe { nibbles(p) }
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn sums(p: &[*const u8; 8], x: &RowPtr, b: usize) -> __m256i {
        // SAFETY: the promise of the trait.
        unsafe {
            let x = sums::even_odd(x.q.add(32 * b));
            sums::of_halves::<15, false>(array!(4, |i| nibbles_of_two(p[i], p[i + 4])), x)
        }
    }
}

impl Ints for Fp4 {
    const BITS: usize = 4;
    const OFFSET: i32 = 12;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn words(p: &[*const u8; 8]) -> [__m256i; 8] {
        // SAFETY: the promise of the trait.
        let codes = unsafe { nibbles(p) };
        array!(8, |i| look_up(&panel_words::E2M1_WITH_OFFSET, codes[i]))
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn sums(p: &[*const u8; 8], x: &RowPtr, b: usize) -> __m256i {
        // SAFETY: the promise of the trait; the table has 16 bytes.
        unsafe {
            let x = sums::even_odd(x.q.add(32 * b));
            let values = both(load128(E2M1_WITH_OFFSET.as_ptr().cast()));
            let two = array!(4, |i| {
                let codes = nibbles_of_two(p[i], p[i + 4]);
                array!(2, |h| _mm256_shuffle_epi8(values, codes[h]))
            });
            sums::of_halves::<24, false>(two, x)
        }
    }
}

/// Values 0 .. 16 (`half` 0) or 16 .. 32 of the streams in both halves of `v`, as bytes in order. `LOW` is the bit of a
/// lane to which its pair is shifted.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn stream<const B: usize, const LOW: i32>(v: __m256i, s: &BitStream, half: usize) -> __m256i {
    // SAFETY: a half of both tables has 16 bytes.
    let (bytes, shift) =
        unsafe { (both(load128(s.bytes[half].as_ptr())), both(load128(s.shift[half].as_ptr().cast()))) };
    let t = _mm256_mullo_epi16(_mm256_shuffle_epi8(v, bytes), shift);
    let mask = (1 << B) - 1;
    let even = _mm256_and_si256(_mm256_srli_epi16::<LOW>(t), _mm256_set1_epi16(mask));
    // The odd value goes from bit LOW + B to bit 8.
    let odd = match LOW as usize + B {
        6 => _mm256_slli_epi16::<2>(t),
        9 => _mm256_srli_epi16::<1>(t),
        10 => _mm256_srli_epi16::<2>(t),
        _ => _mm256_srli_epi16::<3>(t),
    };
    _mm256_or_si256(even, _mm256_and_si256(odd, _mm256_set1_epi16(mask << 8)))
}

macro_rules! stream {
    ($bits:literal, $low:literal, $load:path) => {
        impl Bits<$bits> {
            /// Values 0 .. 16 of two rows, then values 16 .. 32.
            ///
            /// # Safety
            /// As in [`Ints`].
            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn of_two(p: *const u8, q: *const u8) -> [__m256i; 2] {
                static STREAM: BitStream = BitStream::left($bits, $low);
                array!(2, |h| {
                    let at = h * BitStream::upper($bits);
                    // SAFETY: the caller's promise; no load ends past the bytes of the values.
                    let v = unsafe { _mm256_set_m128i($load(q.add(at)), $load(p.add(at))) };
                    stream::<$bits, $low>(v, &STREAM, h)
                })
            }
        }

        impl Ints for Bits<$bits> {
            const BITS: usize = $bits;
            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn words(p: &[*const u8; 8]) -> [__m256i; 8] {
                // SAFETY: the promise of the trait.
                let two = unsafe { array!(4, |i| Self::of_two(p[i], p[i + 4])) };
                let (a, b) = (array!(4, |i| two[i][0]), array!(4, |i| two[i][1]));
                let (a, b) = (transpose4(a), transpose4(b));
                [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]
            }
            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn sums(p: &[*const u8; 8], x: &RowPtr, b: usize) -> __m256i {
                // SAFETY: the promise of the trait.
                unsafe {
                    let x = sums::halves(x.q.add(32 * b));
                    sums::of_halves::<{ (1 << $bits) - 1 }, false>(array!(4, |i| Self::of_two(p[i], p[i + 4])), x)
                }
            }
        }
    };
}

stream!(2, 4, load64);
stream!(3, 6, load64);
stream!(5, 6, load128);
stream!(6, 4, load128);

/// The layout of numbers in the planes of scales and biases.
///
/// # Safety
/// Of every method: the numbers are readable at every address, and the machine has AVX2, FMA and F16C.
pub(super) trait Scale {
    /// Bytes of a number.
    const BYTES: usize;
    /// The number at each of eight addresses.
    unsafe fn one(p: &[*const u8; 8]) -> __m256;
    /// Numbers 0 .. 8 at each of eight addresses: `[number]`, a lane an address.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn eight(p: &[*const u8; 8]) -> [__m256; 8] {
        // SAFETY: the promise of the trait.
        unsafe { array!(8, |i| Self::one(&p.map(|p| p.wrapping_add(i * Self::BYTES)))) }
    }
}

pub(super) struct F16;
pub(super) struct BF16;
pub(super) struct F32;
pub(super) struct E8m0;

/// The 16-bit word at each of eight addresses.
///
/// # Safety
/// They are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn words(p: &[*const u8; 8]) -> __m128i {
    // SAFETY: the caller's promise.
    let h = |i: usize| u64::from(unsafe { p[i].cast::<u16>().read_unaligned() });
    let lo = h(0) | h(1) << 16 | h(2) << 32 | h(3) << 48;
    let hi = h(4) | h(5) << 16 | h(6) << 32 | h(7) << 48;
    _mm_set_epi64x(hi as i64, lo as i64)
}

/// Words 2i and 2i + 1 of the eight 16-bit words at each of eight addresses: in each half those of four addresses.
///
/// # Safety
/// They are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn two_words(p: &[*const u8; 8]) -> [__m256i; 4] {
    // SAFETY: the caller's promise.
    let t = array!(4, |i| unsafe { _mm256_set_m128i(load128(p[i + 4]), load128(p[i])) });
    let (a, b) = (_mm256_unpacklo_epi16(t[0], t[1]), _mm256_unpackhi_epi16(t[0], t[1]));
    let (c, d) = (_mm256_unpacklo_epi16(t[2], t[3]), _mm256_unpackhi_epi16(t[2], t[3]));
    [_mm256_unpacklo_epi32(a, c), _mm256_unpackhi_epi32(a, c), _mm256_unpacklo_epi32(b, d), _mm256_unpackhi_epi32(b, d)]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn bf16(x: __m128i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(x)))
}

impl Scale for F16 {
    const BYTES: usize = 2;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn one(p: &[*const u8; 8]) -> __m256 {
        // SAFETY: the promise of the trait.
        _mm256_cvtph_ps(unsafe { words(p) })
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn eight(p: &[*const u8; 8]) -> [__m256; 8] {
        // SAFETY: the promise of the trait.
        let t = unsafe { two_words(p) };
        let t = array!(4, |i| _mm256_permute4x64_epi64::<0xd8>(t[i]));
        array!(8, |i| _mm256_cvtph_ps(if i.is_multiple_of(2) {
            _mm256_castsi256_si128(t[i / 2])
        } else {
            _mm256_extracti128_si256::<1>(t[i / 2])
        }))
    }
}

impl Scale for BF16 {
    const BYTES: usize = 2;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn one(p: &[*const u8; 8]) -> __m256 {
        // SAFETY: the promise of the trait.
        bf16(unsafe { words(p) })
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn eight(p: &[*const u8; 8]) -> [__m256; 8] {
        // SAFETY: the promise of the trait.
        let (t, zero) = (unsafe { two_words(p) }, _mm256_setzero_si256());
        array!(8, |i| _mm256_castsi256_ps(if i.is_multiple_of(2) {
            _mm256_unpacklo_epi16(zero, t[i / 2])
        } else {
            _mm256_unpackhi_epi16(zero, t[i / 2])
        }))
    }
}

impl Scale for F32 {
    const BYTES: usize = 4;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn one(p: &[*const u8; 8]) -> __m256 {
        // SAFETY: the promise of the trait.
        let x = |i: usize| unsafe { p[i].cast::<f32>().read_unaligned() };
        _mm256_setr_ps(x(0), x(1), x(2), x(3), x(4), x(5), x(6), x(7))
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn eight(p: &[*const u8; 8]) -> [__m256; 8] {
        // SAFETY: the promise of the trait.
        let t = transpose8(unsafe { array!(8, |i| load256(p[i])) });
        array!(8, |i| _mm256_castsi256_ps(t[i]))
    }
}

impl Scale for E8m0 {
    const BYTES: usize = 1;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn one(p: &[*const u8; 8]) -> __m256 {
        // SAFETY: the promise of the trait.
        unsafe { load_e8m0x8(p) }
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn eight(p: &[*const u8; 8]) -> [__m256; 8] {
        // SAFETY: the promise of the trait.
        let r = unsafe { array!(8, |i| load64(p[i])) };
        let a = array!(4, |i| _mm_unpacklo_epi8(r[2 * i], r[2 * i + 1]));
        let (b, c) = (_mm_unpacklo_epi16(a[0], a[1]), _mm_unpackhi_epi16(a[0], a[1]));
        let (d, e) = (_mm_unpacklo_epi16(a[2], a[3]), _mm_unpackhi_epi16(a[2], a[3]));
        // Two numbers of all places.
        let t =
            [_mm_unpacklo_epi32(b, d), _mm_unpackhi_epi32(b, d), _mm_unpacklo_epi32(c, e), _mm_unpackhi_epi32(c, e)];
        array!(8, |i| e8m0(if i.is_multiple_of(2) { t[i / 2] } else { _mm_unpackhi_epi64(t[i / 2], t[i / 2]) }))
    }
}

/// Scales and biases of eight groups, `[group]`, a lane a row.
pub(super) struct Groups {
    pub d: [__m256; 8],
    pub m: [__m256; 8],
}

impl Groups {
    /// # Safety
    /// The machine has AVX.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        // SAFETY: the caller's promise.
        let zero = unsafe { [_mm256_setzero_ps(); 8] };
        Self { d: zero, m: zero }
    }

    /// Loads `n` groups (at most eight) of eight rows; the first of every row is at these addresses.
    ///
    /// # Safety
    /// The rows have these groups; the machine has AVX2, FMA and F16C.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub unsafe fn load<S: Scale, const MIN: bool>(&mut self, scales: [*const u8; 8], biases: [*const u8; 8], n: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            if n == 8 {
                self.d = S::eight(&scales);
                if MIN {
                    self.m = S::eight(&biases);
                }
                return;
            }
            for g in 0..n {
                self.d[g] = S::one(&scales.map(|p| p.wrapping_add(g * S::BYTES)));
                if MIN {
                    self.m[g] = S::one(&biases.map(|p| p.wrapping_add(g * S::BYTES)));
                }
            }
        }
    }
}

/// Even and odd values of a block of activations from their wide form, in which every four values have the order 0, 2,
/// 1, 3.
///
/// # Safety
/// `wide` is readable for 32 values; the machine has AVX2.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn split(wide: *const u8) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    let (a, b) = unsafe { (load256(wide), load256(wide.add(32))) };
    let (a, b) = (_mm256_castsi256_ps(a), _mm256_castsi256_ps(b));
    let even = _mm256_castps_si256(_mm256_shuffle_ps::<0x88>(a, b));
    let odd = _mm256_castps_si256(_mm256_shuffle_ps::<0xdd>(a, b));
    [_mm256_permute4x64_epi64::<0xd8>(even), _mm256_permute4x64_epi64::<0xd8>(odd)]
}
