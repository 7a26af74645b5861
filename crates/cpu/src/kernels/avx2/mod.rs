//! Kernels for AVX2 with FMA and F16C.
//!
//! A format says how its bytes become integers, scales and minimums: [`small`] (32-blocks), [`large`] (super-blocks)
//! and [`planar`] (the planes of MLX files). [`mod@vec`] multiplies rows with one column ([`large_vec`] the
//! super-blocks), [`panel`] unpacks 16 rows ([`panel_words`] says how a format does it), and [`mod@tile`] multiplies
//! panels with many columns ([`small_tile`] and [`large_tile`] those of bytes). `types.rs` beside this module is the
//! table of types for all three.

mod grid;
mod large;
mod large_tile;
mod large_vec;
mod panel;
mod panel_words;
mod planar;
pub(super) mod quantise;
mod small;
mod small_tile;
mod sums;
mod tile;
mod vec;

/// The formats under the names of `types.rs`.
pub(super) mod formats {
    pub(in super::super) use super::super::grid::{Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs};
    pub(in super::super) use super::large::{Iq4Xs, Q2K, Q3K, Q4K, Q5K, Q6K, Tq1, Tq2};
    pub(in super::super) use super::panel_words::{IQ4_WITH_OFFSET, PanelLarge};
    pub(super) use super::planar::{BF16, Bits, E8m0, F16, F32, Fp4};
    pub(super) use super::small::{Iq4Nl, Mxfp4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
}

use std::arch::x86_64::*;

use super::panel::ROWS;

pub(super) use grid::words;
pub(super) use panel::{headers, prefetch_next_rows, unpack, unpack_bytes};
pub(super) use tile::tile;
pub(super) use vec::{one, one_avx512};

/// The same pointer, whose origin the compiler cannot see. Loads through it stay operands of their instructions: shared
/// loads would be hoisted, and with sixteen registers that means into a spill slot. Nor does the compiler keep a
/// running pointer for each of several rows.
#[inline(always)]
#[allow(clippy::pointers_in_nomem_asm_block)] // The block is empty: it reads and writes nothing.
pub(super) fn hide(mut p: *const u8) -> *const u8 {
    // SAFETY: no instruction is emitted.
    unsafe { std::arch::asm!("/* {0} */", inout(reg) p, options(nomem, nostack, preserves_flags)) };
    p
}

/// The same register, computed in source order. The compiler would go column by column through the unrolled code, for
/// which sixteen registers are too few.
#[inline]
#[target_feature(enable = "avx2")]
fn keep_order(mut v: __m256i) -> __m256i {
    // SAFETY: no instruction is emitted. Not `pure`, so that it is not moved.
    unsafe { std::arch::asm!("/* {0} */", inout(ymm_reg) v, options(nomem, nostack, preserves_flags)) };
    v
}

/// Eight rows at a time of a set of `n`: the first row and the distance to the next, 1.
///
/// Where eight does not divide `n`, the last octet overlaps the one before. Fewer than eight rows go one by one, each
/// in all lanes: distance 0. With equal distances four registers hold the addresses of all rows.
fn row_octets(n: usize) -> impl Iterator<Item = (usize, usize)> {
    let (rows, step) = if n < 8 { (1, 0) } else { (8, 1) };
    (0..n).step_by(rows).map(move |first| (first.min(n - rows), step))
}

/// Stores the results of one of [`row_octets`].
#[inline]
#[target_feature(enable = "avx2")]
fn store_octet(out: &mut [f32; ROWS], first: usize, step: usize, y: __m256) {
    match out[first..].first_chunk_mut::<8>() {
        // SAFETY: the array has eight places.
        Some(out) if step == 1 => unsafe { _mm256_storeu_ps(out.as_mut_ptr(), y) },
        _ => out[first] = _mm256_cvtss_f32(y),
    }
}

/// Adds up the lanes of the halves of four vectors: lane `i` of each half is the sum of that half of vector `i`.
///
/// Two unpacks and an addition; `vphaddd` takes four micro-operations (Zen 4).
#[inline]
#[target_feature(enable = "avx2")]
fn hsum4_halves(a: [__m256i; 4]) -> __m256i {
    let pair = |a, b| _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let (t, u) = (pair(a[0], a[1]), pair(a[2], a[3]));
    _mm256_add_epi32(_mm256_unpacklo_epi64(t, u), _mm256_unpackhi_epi64(t, u))
}

/// Adds up the lanes of eight vectors: lane `i` of the result is the sum of vector `i`.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn hsum8(a: [__m256i; 8]) -> __m256i {
    let lo = hsum4_halves([a[0], a[1], a[2], a[3]]);
    let hi = hsum4_halves([a[4], a[5], a[6], a[7]]);
    _mm256_add_epi32(_mm256_permute2x128_si256::<0x20>(lo, hi), _mm256_permute2x128_si256::<0x31>(lo, hi))
}

/// Transposes 8 rows of 8 words of 32 bits.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn transpose8(r: [__m256i; 8]) -> [__m256i; 8] {
    let t0 = _mm256_unpacklo_epi32(r[0], r[1]);
    let t1 = _mm256_unpackhi_epi32(r[0], r[1]);
    let t2 = _mm256_unpacklo_epi32(r[2], r[3]);
    let t3 = _mm256_unpackhi_epi32(r[2], r[3]);
    let t4 = _mm256_unpacklo_epi32(r[4], r[5]);
    let t5 = _mm256_unpackhi_epi32(r[4], r[5]);
    let t6 = _mm256_unpacklo_epi32(r[6], r[7]);
    let t7 = _mm256_unpackhi_epi32(r[6], r[7]);
    let u0 = _mm256_unpacklo_epi64(t0, t2);
    let u1 = _mm256_unpackhi_epi64(t0, t2);
    let u2 = _mm256_unpacklo_epi64(t1, t3);
    let u3 = _mm256_unpackhi_epi64(t1, t3);
    let u4 = _mm256_unpacklo_epi64(t4, t6);
    let u5 = _mm256_unpackhi_epi64(t4, t6);
    let u6 = _mm256_unpacklo_epi64(t5, t7);
    let u7 = _mm256_unpackhi_epi64(t5, t7);
    [
        _mm256_permute2x128_si256::<0x20>(u0, u4),
        _mm256_permute2x128_si256::<0x20>(u1, u5),
        _mm256_permute2x128_si256::<0x20>(u2, u6),
        _mm256_permute2x128_si256::<0x20>(u3, u7),
        _mm256_permute2x128_si256::<0x31>(u0, u4),
        _mm256_permute2x128_si256::<0x31>(u1, u5),
        _mm256_permute2x128_si256::<0x31>(u2, u6),
        _mm256_permute2x128_si256::<0x31>(u3, u7),
    ]
}

/// Loads and transposes eight words of 16 bits at each of eight addresses.
///
/// # Safety
/// They are readable.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn load_transposed_words(p: &[*const u8; 8]) -> [__m128i; 8] {
    // SAFETY: the caller's promise.
    let r = unsafe { array!(8, |i| load128(p[i])) };
    let (a0, a1) = (_mm_unpacklo_epi16(r[0], r[1]), _mm_unpackhi_epi16(r[0], r[1]));
    let (a2, a3) = (_mm_unpacklo_epi16(r[2], r[3]), _mm_unpackhi_epi16(r[2], r[3]));
    let (a4, a5) = (_mm_unpacklo_epi16(r[4], r[5]), _mm_unpackhi_epi16(r[4], r[5]));
    let (a6, a7) = (_mm_unpacklo_epi16(r[6], r[7]), _mm_unpackhi_epi16(r[6], r[7]));
    let (b0, b1) = (_mm_unpacklo_epi32(a0, a2), _mm_unpackhi_epi32(a0, a2));
    let (b2, b3) = (_mm_unpacklo_epi32(a1, a3), _mm_unpackhi_epi32(a1, a3));
    let (b4, b5) = (_mm_unpacklo_epi32(a4, a6), _mm_unpackhi_epi32(a4, a6));
    let (b6, b7) = (_mm_unpacklo_epi32(a5, a7), _mm_unpackhi_epi32(a5, a7));
    [
        _mm_unpacklo_epi64(b0, b4),
        _mm_unpackhi_epi64(b0, b4),
        _mm_unpacklo_epi64(b1, b5),
        _mm_unpackhi_epi64(b1, b5),
        _mm_unpacklo_epi64(b2, b6),
        _mm_unpackhi_epi64(b2, b6),
        _mm_unpacklo_epi64(b3, b7),
        _mm_unpackhi_epi64(b3, b7),
    ]
}

/// The same 128 bits in both halves.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn both(x: __m128i) -> __m256i {
    _mm256_broadcastsi128_si256(x)
}

/// # Safety
/// `p` is readable for 32 bytes.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn load256(p: *const u8) -> __m256i {
    // SAFETY: the caller's promise; unaligned.
    unsafe { _mm256_loadu_si256(p.cast()) }
}

/// # Safety
/// `p` is readable for 16 bytes.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn load128(p: *const u8) -> __m128i {
    // SAFETY: the caller's promise; unaligned.
    unsafe { _mm_loadu_si128(p.cast()) }
}

/// # Safety
/// `p` is readable for 8 bytes.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn load64(p: *const u8) -> __m128i {
    // SAFETY: the caller's promise; unaligned.
    unsafe { _mm_loadl_epi64(p.cast()) }
}

/// The f16 at byte `at` of each of eight blocks, as f32.
///
/// # Safety
/// The two bytes are readable in every block.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn load_f16x8(p: &[*const u8; 8], at: usize) -> __m256 {
    // SAFETY: the caller's promise.
    let h = |i: usize| u64::from(unsafe { p[i].add(at).cast::<u16>().read_unaligned() });
    let lo = h(0) | h(1) << 16 | h(2) << 32 | h(3) << 48;
    let hi = h(4) | h(5) << 16 | h(6) << 32 | h(7) << 48;
    _mm256_cvtph_ps(_mm_set_epi64x(hi as i64, lo as i64))
}
