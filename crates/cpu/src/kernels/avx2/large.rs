//! Super-block formats: how their bytes become eight groups of 32 bytes, sub-scales and minimums. [`quant::types::k`]
//! and [`quant::types::iq`] draw the layouts.

use std::arch::x86_64::*;

use quant::types::iq::IQ4_VALUES;
use quant::types::layout::{self, SuperBlock};

use super::small::look_up;
use super::{both, load128, load256};

/// A super-block format.
///
/// # Safety
/// Of every method: `p` and `q` point to readable blocks of the format, and the machine has AVX2, FMA and F16C.
pub(in super::super) trait Large {
    /// Where a block has its parts.
    const LAYOUT: SuperBlock;
    /// Bytes of a block.
    const BYTES: usize = Self::LAYOUT.bytes;
    /// Byte of the f16 scale of the minimums, when there is one.
    const DMIN: Option<usize> = Self::LAYOUT.dmin;
    /// What the scale is multiplied with, a power of two.
    const FACTOR: f32 = 1.0;
    /// Bits of an integer of [`Large::group`], or 8 when integers are signed.
    const BITS: usize;
    /// The groups hold no negative number.
    const UNSIGNED: bool = Self::BITS < 8;
    /// Offset added to every integer of [`Large::group`], so that none is negative.
    const OFFSET: i16 = 0;
    /// Offset of the bytes of a panel.
    const PANEL_OFFSET: i16 = if Self::UNSIGNED { Self::OFFSET } else { 128 };
    /// Neighbouring 16-groups share their sub-scale.
    const WIDE_SCALES: bool = Self::LAYOUT.sub == 32;
    /// Of types that are [`Large::UNSIGNED`]: the integers of 32-group `j`, plus [`Large::OFFSET`]. Group by group, so
    /// that few registers are live at once; `j` is a constant, and the compiler merges loads that groups share.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn group(p: *const u8, j: usize) -> __m256i {
        unreachable!("block {p:p} is of a signed type, group {j}")
    }
    /// Of signed types: the integers of 32-groups `2·j` and `2·j + 1`, the first halves of both, then the second
    /// halves.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn pair(p: *const u8, j: usize) -> [__m256i; 2] {
        unreachable!("block {p:p} is of an unsigned type, pair {j}")
    }
    /// Of two blocks with [`Large::WIDE_SCALES`]: the eight sub-scales of each as 16-bit words, and the eight minimums.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scale_words(p: *const u8, q: *const u8) -> [__m256i; 2] {
        unreachable!("blocks {p:p} and {q:p} have a sub-scale for every 16-group")
    }
    /// Of types without [`Large::WIDE_SCALES`]: the sub-scales of the sixteen 16-groups, signed bytes.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scales(p: *const u8) -> __m128i {
        unreachable!("block {p:p} has a sub-scale for every 32-group")
    }
    /// The bits of the f16 scale.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn d(p: *const u8) -> u16 {
        // SAFETY: the promise of the trait.
        unsafe { p.add(Self::LAYOUT.d).cast::<u16>().read_unaligned() }
    }
    /// The minimums of the sixteen 16-groups where there are any, unsigned bytes.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn mins(p: *const u8) -> __m128i {
        unreachable!("block {p:p} has no minimum for every 16-group")
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

macro_rules! shr {
    ($v:expr, $n:literal, $mask:expr) => {
        _mm256_and_si256(_mm256_srli_epi16::<$n>($v), _mm256_set1_epi8($mask))
    };
}
macro_rules! shl {
    ($v:expr, $n:literal, $mask:expr) => {
        _mm256_and_si256(_mm256_slli_epi16::<$n>($v), _mm256_set1_epi8($mask))
    };
}

/// Two-bit fields: 32 bytes hold four groups.
///
/// # Safety
/// 64 bytes are readable at `p`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn two_bits(p: *const u8, j: usize) -> __m256i {
    // SAFETY: the caller's promise.
    let v = unsafe { load256(p.add(j / 4 * 32)) };
    match j % 4 {
        0 => shr!(v, 0, 3),
        1 => shr!(v, 2, 3),
        2 => shr!(v, 4, 3),
        _ => shr!(v, 6, 3),
    }
}

/// Four-bit fields: 32 bytes hold two groups.
///
/// # Safety
/// 128 bytes are readable at `p`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn four_bits(p: *const u8, j: usize) -> __m256i {
    // SAFETY: the caller's promise.
    let v = unsafe { load256(p.add(j / 2 * 32)) };
    if j.is_multiple_of(2) { shr!(v, 0, 15) } else { shr!(v, 4, 15) }
}

/// Scales and minimums of two blocks of Q4_K or Q5_K, a block in each half: words
/// `[scales 0..4, scales 4..8, minimums 0..4, minimums 4..8]` from the twelve bytes that follow `d` and `dmin`.
///
/// # Safety
/// 16 bytes are readable at `p` and at `q`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn scale_min_of_two(p: *const u8, q: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    let head = unsafe { _mm256_set_m128i(load128(q), load128(p)) };
    // Words of `head`: 1 is bytes 0..4 of the scales, 2 is 4..8, 3 is 8..12.
    let low = _mm256_srlv_epi32(_mm256_shuffle_epi32::<0xed>(head), both(_mm_setr_epi32(0, 0, 0, 4)));
    let low = _mm256_and_si256(low, both(_mm_setr_epi32(0x3f3f_3f3f, 0x0f0f_0f0f, 0x3f3f_3f3f, 0x0f0f_0f0f)));
    let top = _mm256_srli_epi32::<2>(_mm256_shuffle_epi32::<0xa5>(head));
    _mm256_or_si256(low, _mm256_and_si256(top, both(_mm_setr_epi32(0, 0x3030_3030, 0, 0x3030_3030))))
}

/// [`Large::scale_words`] of Q4_K and Q5_K.
///
/// # Safety
/// 16 bytes are readable at `p` and at `q`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn scale_min_words(p: *const u8, q: *const u8) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    let bytes = unsafe { scale_min_of_two(p, q) };
    let zero = _mm256_setzero_si256();
    [_mm256_unpacklo_epi8(bytes, zero), _mm256_unpackhi_epi8(bytes, zero)]
}

/// The eight sub-scales of a block of IQ4_XS.
///
/// # Safety
/// A block is readable at `p`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn iq4_xs_scales(p: *const u8) -> __m128i {
    // SAFETY: the caller's promise.
    let (word, high) = unsafe { (p.add(4).cast::<u32>().read_unaligned(), p.add(2).cast::<u16>().read_unaligned()) };
    // Eight low halves from four bytes, high bits from sixteen bits.
    let low = _mm_unpacklo_epi8(_mm_cvtsi32_si128(word as i32), _mm_cvtsi32_si128((word >> 4) as i32));
    let low = _mm_and_si128(low, _mm_set1_epi8(15));
    // Bits 2j, 2j + 1 move to bits 4, 5 of byte j.
    let high = u64::from(high);
    let high = (high & 0xff) | (high & 0xff00) << 24;
    let high = (high & 0x0000_000f_0000_000f) | (high & 0x0000_00f0_0000_00f0) << 12;
    let high = (high & 0x0003_0003_0003_0003) | (high & 0x000c_000c_000c_000c) << 6;
    _mm_sub_epi8(_mm_or_si128(low, _mm_cvtsi64_si128((high << 4) as i64)), _mm_set1_epi8(32))
}

/// One format: its block, and the expressions for the parts that it has.
macro_rules! large {
    ($t:ident, $layout:ident, bits $bits:literal, offset $offset:literal,
     $($name:ident |$($arg:ident),+| $e:expr),+) => {
        impl Large for $t {
            const LAYOUT: SuperBlock = layout::$layout;
            const BITS: usize = $bits;
            const OFFSET: i16 = $offset;
            $(large!(@ $name |$($arg),+| $e);)+
        }
    };
    (@ group |$p:ident, $j:ident| $e:expr) => { large!(@@ group($p: *const u8, $j: usize) -> __m256i, $e); };
    (@ pair |$p:ident, $j:ident| $e:expr) => { large!(@@ pair($p: *const u8, $j: usize) -> [__m256i; 2], $e); };
    (@ scale_words |$p:ident, $q:ident| $e:expr) => {
        large!(@@ scale_words($p: *const u8, $q: *const u8) -> [__m256i; 2], $e);
    };
    (@ scales |$p:ident| $e:expr) => { large!(@@ scales($p: *const u8) -> __m128i, $e); };
    (@ mins |$p:ident| $e:expr) => { large!(@@ mins($p: *const u8) -> __m128i, $e); };
    (@@ $name:ident($($arg:ident: $t:ty),+) -> $of:ty, $e:expr) => {
        #[inline]
        #[target_feature(enable = "avx2,fma,f16c")]
        #[allow(unused_unsafe, reason = "scales of one read nothing")]
        unsafe fn $name($($arg: $t),+) -> $of {
            // SAFETY: the promise of the trait: whole blocks are readable.
            unsafe { $e }
        }
    };
}

large!(
    Q2K, Q2_K, bits 2, offset 0,
    group |p, j| two_bits(p.add(16), j),
    scales |p| _mm_and_si128(load128(p), _mm_set1_epi8(15)),
    mins |p| _mm_and_si128(_mm_srli_epi16::<4>(load128(p)), _mm_set1_epi8(15))
);

large!(
    Q3K, Q3_K, bits 3, offset 4,
    group |p, j| {
        let (q, h) = (two_bits(p.add(32), j), load256(p));
        let bit = match j {
            0 => shl!(h, 2, 4),
            1 => shl!(h, 1, 4),
            2 => shl!(h, 0, 4),
            3 => shr!(h, 1, 4),
            4 => shr!(h, 2, 4),
            5 => shr!(h, 3, 4),
            6 => shr!(h, 4, 4),
            _ => shr!(h, 5, 4),
        };
        _mm256_or_si256(q, bit)
    },
    scales |p| {
        // Sixteen low halves from eight bytes; two high bits each from four bytes.
        let low = super::load64(p.add(96));
        let low = _mm_and_si128(_mm_unpacklo_epi64(low, _mm_srli_epi16::<4>(low)), _mm_set1_epi8(15));
        let high = _mm_set1_epi32(p.add(104).cast::<i32>().read_unaligned());
        let high = _mm_srlv_epi32(high, _mm_setr_epi32(0, 2, 4, 6));
        let high = _mm_slli_epi16::<4>(_mm_and_si128(high, _mm_set1_epi8(3)));
        _mm_sub_epi8(_mm_or_si128(low, high), _mm_set1_epi8(32))
    }
);

large!(
    Q4K, Q4_K, bits 4, offset 0,
    group |p, j| four_bits(p.add(16), j),
    scale_words |p, q| scale_min_words(p, q)
);

large!(
    Q5K, Q5_K, bits 5, offset 0,
    group |p, j| {
        let (q, h) = (four_bits(p.add(48), j), load256(p.add(16)));
        let bit = match j {
            0 => shl!(h, 4, 16),
            1 => shl!(h, 3, 16),
            2 => shl!(h, 2, 16),
            3 => shl!(h, 1, 16),
            4 => shl!(h, 0, 16),
            5 => shr!(h, 1, 16),
            6 => shr!(h, 2, 16),
            _ => shr!(h, 3, 16),
        };
        _mm256_or_si256(q, bit)
    },
    scale_words |p, q| scale_min_words(p, q)
);

large!(
    Q6K, Q6_K, bits 6, offset 32,
    group |p, j| {
        let low = load256(p.add(64 * (j / 4) + 32 * (j % 2)));
        let high = load256(p.add(128 + 32 * (j / 4)));
        let low = if j % 4 < 2 { shr!(low, 0, 15) } else { shr!(low, 4, 15) };
        let high = match j % 4 {
            0 => shl!(high, 4, 48),
            1 => shl!(high, 2, 48),
            2 => shl!(high, 0, 48),
            _ => shr!(high, 2, 48),
        };
        _mm256_or_si256(low, high)
    },
    scales |p| load128(p.add(192))
);

large!(
    Iq4Xs, IQ4_XS, bits 8, offset 0,
    pair |p, j| {
        let v = load256(p.add(8 + 32 * j));
        [look_up(&IQ4_VALUES, shr!(v, 0, 15)), look_up(&IQ4_VALUES, shr!(v, 4, 15))]
    },
    scale_words |p, q| {
        let scales = _mm_unpacklo_epi64(iq4_xs_scales(p), iq4_xs_scales(q));
        [_mm256_cvtepi8_epi16(scales), _mm256_setzero_si256()]
    }
);

/// Digit of base three that bytes begin with, as a fraction of 256, plus three: the value plus its offset of four.
#[inline]
#[target_feature(enable = "avx2")]
fn first_digit(v: __m256i) -> __m256i {
    let above = |n: i8| _mm256_min_epu8(_mm256_subs_epu8(v, _mm256_set1_epi8(n)), _mm256_set1_epi8(1));
    _mm256_add_epi8(_mm256_add_epi8(above(85), above(170u8.cast_signed())), _mm256_set1_epi8(3))
}

/// The low bytes of bytes times the 16-bit numbers that they are in.
#[inline]
#[target_feature(enable = "avx2")]
fn times(v: __m256i, by: __m256i) -> __m256i {
    let low = _mm256_and_si256(_mm256_mullo_epi16(v, by), _mm256_set1_epi16(0xff));
    _mm256_or_si256(low, _mm256_slli_epi16::<8>(_mm256_mullo_epi16(_mm256_srli_epi16::<8>(v), by)))
}

large!(
    Tq1, TQ1_0, bits 3, offset 4,
    group |p, j| {
        const POWERS: [i16; 5] = [1, 3, 9, 27, 81];
        let halves = |low: i16, high: i16| _mm256_set_m128i(_mm_set1_epi16(high), _mm_set1_epi16(low));
        first_digit(match j {
            0..5 => times(load256(p), _mm256_set1_epi16(POWERS[j])),
            5 => times(both(load128(p.add(32))), halves(1, 3)),
            6 => times(both(load128(p.add(32))), halves(9, 27)),
            _ => {
                let last = _mm_set1_epi32(p.add(48).cast::<i32>().read_unaligned());
                let powers = _mm_setr_epi16(1, 1, 3, 3, 9, 9, 27, 27);
                let powers = _mm256_set_m128i(powers, _mm_set1_epi16(81));
                times(_mm256_set_m128i(last, load128(p.add(32))), powers)
            }
        })
    },
    scales |_p| _mm_set1_epi8(1)
);

large!(
    Tq2, TQ2_0, bits 3, offset 4,
    group |p, j| _mm256_add_epi8(two_bits(p, j), _mm256_set1_epi8(3)),
    scales |_p| _mm_set1_epi8(1)
);
