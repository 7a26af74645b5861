//! IQ1, IQ2, IQ3: entries of code books, eight or four values an entry, with signs or an offset beside them.
//!
//! Drawn after the decoders of gguf-py, which defines the formats together with ggml. Scales have a constant factor of
//! 1/8 or 1/4, which [`WeightType::factor`](super::WeightType::factor) names: it is a power of two, so that every
//! value here is exactly theirs.

use super::grid_tables as tables;
use super::{f16_at, layout};
use crate::block::Ints256;

/// Magnitudes of IQ2.
pub(crate) const IQ2_LEVELS: [i8; 4] = [8, 25, 43, 0];
/// Eight times the values of IQ1, which are -1, 0 and 1.
pub(crate) const IQ1_LEVELS: [i8; 4] = [-8, 0, 8, 0];
/// Magnitudes of IQ3_XXS.
pub(crate) const IQ3_XXS_LEVELS: [i8; 8] = [4, 12, 20, 28, 36, 44, 52, 62];
/// Magnitudes of IQ3_S.
pub(crate) const IQ3_S_LEVELS: [i8; 8] = [1, 3, 5, 7, 9, 11, 13, 15];

/// Entries of eight values.
const fn eights<const N: usize>(codes: &[u16; N], levels: [i8; 4]) -> [[i8; 8]; N] {
    let mut entries = [[0; 8]; N];
    let mut n = 0;
    while n < N {
        let mut i = 0;
        while i < 8 {
            entries[n][i] = levels[(codes[n] >> (2 * i) & 3) as usize];
            i += 1;
        }
        n += 1;
    }
    entries
}

/// Entries of four values.
const fn fours<const N: usize>(codes: &[u16; N], levels: [i8; 8]) -> [[i8; 4]; N] {
    let mut entries = [[0; 4]; N];
    let mut n = 0;
    while n < N {
        let mut i = 0;
        while i < 4 {
            entries[n][i] = levels[(codes[n] >> (3 * i) & 7) as usize];
            i += 1;
        }
        n += 1;
    }
    entries
}

/// Magnitudes of IQ2_XXS.
pub static IQ2_XXS: [[i8; 8]; 256] = eights(&tables::IQ2_XXS, IQ2_LEVELS);
/// Magnitudes of IQ2_XS.
pub static IQ2_XS: [[i8; 8]; 512] = eights(&tables::IQ2_XS, IQ2_LEVELS);
/// Magnitudes of IQ2_S.
pub static IQ2_S: [[i8; 8]; 1024] = eights(&tables::IQ2_S, IQ2_LEVELS);
/// Eight times the values of IQ1_S and IQ1_M, without the offset of 1 or -1 of the result.
pub static IQ1: [[i8; 8]; 2048] = eights(&tables::IQ1, IQ1_LEVELS);
/// Magnitudes of IQ3_XXS.
pub static IQ3_XXS: [[i8; 4]; 256] = fours(&tables::IQ3_XXS, IQ3_XXS_LEVELS);
/// Magnitudes of IQ3_S.
pub static IQ3_S: [[i8; 4]; 512] = fours(&tables::IQ3_S, IQ3_S_LEVELS);

/// Eight signs from seven: the eighth makes the number of minus signs even.
pub const fn signs(seven: u8) -> u8 {
    seven | ((seven.count_ones() & 1) as u8) << 7
}

/// `entry`, minus where `signs` has a bit.
fn signed<const N: usize>(entry: &[i8; N], signs: u8) -> [i8; N] {
    std::array::from_fn(|i| if signs >> i & 1 == 1 { -entry[i] } else { entry[i] })
}

fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// Returns a block from its scale, its sub-scales and its eights of values.
fn block(d: f32, sc: impl Fn(usize) -> u8, eight: impl Fn(usize) -> [i8; 8]) -> Ints256 {
    let mut w = Ints256 { d, ..Ints256::ZERO };
    for (i, q) in w.q.as_chunks_mut().0.iter_mut().enumerate() {
        *q = eight(i);
    }
    w.sc = std::array::from_fn(|g| sc(g) as i8);
    w
}

/// Two fours.
fn pair(a: [i8; 4], b: [i8; 4]) -> [i8; 8] {
    std::array::from_fn(|i| if i < 4 { a[i] } else { b[i - 4] })
}

/// `x = (d/8·(2·s + 1))·q`, s in 0..=15 per 32 values.
/// ```text
/// 0    2                                  66
/// | d  | entries [4], signs and s u32 ... |    8 bytes a 32-group
/// ```
/// Of the 32 bits: four times seven signs ([`signs`]), then `s`.
pub fn unpack_iq2_xxs(b: &[u8; layout::IQ2_XXS.bytes]) -> Ints256 {
    let bits = |g: usize| u32_at(b, 6 + 8 * g);
    block(
        f16_at(b, layout::IQ2_XXS.d) / 8.0,
        |g| 2 * (bits(g / 2) >> 28) as u8 + 1,
        |i| signed(&IQ2_XXS[usize::from(b[2 + i / 4 * 8 + i % 4])], signs((bits(i / 4) >> (7 * (i % 4)) & 127) as u8)),
    )
}

/// `x = (d/8·(2·s + 1))·q`, s in 0..=15 per 16 values.
/// ```text
/// 0    2               66            74
/// | d  | qs u16 [32]   | scales [8]  |    scales: the low half of a byte first
/// ```
/// Of 16 bits: nine of the entry, then seven signs ([`signs`]).
pub fn unpack_iq2_xs(b: &[u8; layout::IQ2_XS.bytes]) -> Ints256 {
    block(
        f16_at(b, layout::IQ2_XS.d) / 8.0,
        |g| 2 * (b[66 + g / 2] >> (4 * (g % 2)) & 15) + 1,
        |i| {
            let bits = u16_at(b, 2 + 2 * i);
            signed(&IQ2_XS[usize::from(bits & 511)], signs((bits >> 9) as u8))
        },
    )
}

/// `x = (d/8·(2·s + 1))·q`, s in 0..=15 per 16 values.
/// ```text
/// 0    2            34            66         74            82
/// | d  | qs [32]    | signs [32]  | qh [8]   | scales [8]  |
/// ```
/// `qs`: the low bits of entries. `qh`: the two high bits of four of them, the first lowest.
pub fn unpack_iq2_s(b: &[u8; layout::IQ2_S.bytes]) -> Ints256 {
    block(
        f16_at(b, layout::IQ2_S.d) / 8.0,
        |g| 2 * (b[74 + g / 2] >> (4 * (g % 2)) & 15) + 1,
        |i| {
            let high = usize::from(b[66 + i / 4] >> (2 * (i % 4)) & 3);
            signed(&IQ2_S[high << 8 | usize::from(b[2 + i])], b[34 + i])
        },
    )
}

/// `x = (d/4·(2·s + 1))·q`, s in 0..=15 per 32 values.
/// ```text
/// 0    2            66                         98
/// | d  | qs [64]    | signs and s, u32 [8]     |    as in IQ2_XXS
/// ```
/// A byte of `qs` is an entry of four values.
pub fn unpack_iq3_xxs(b: &[u8; layout::IQ3_XXS.bytes]) -> Ints256 {
    let bits = |g: usize| u32_at(b, 66 + 4 * g);
    let four = |i: usize, signs: u8| signed(&IQ3_XXS[usize::from(b[2 + i])], signs);
    block(
        f16_at(b, layout::IQ3_XXS.d) / 4.0,
        |g| 2 * (bits(g / 2) >> 28) as u8 + 1,
        |i| {
            let signs = signs((bits(i / 4) >> (7 * (i % 4)) & 127) as u8);
            pair(four(2 * i, signs), four(2 * i + 1, signs >> 4))
        },
    )
}

/// `x = (d·(2·s + 1))·q`, s in 0..=15 per 32 values.
/// ```text
/// 0    2            66        74            106           110
/// | d  | qs [64]    | qh [8]  | signs [32]  | scales [4]  |    scales: the low half of a byte first
/// ```
/// A byte of `qs` is the low part of an entry of four values, bit `i` of `qh[g]` the high part of the `i`th of group g.
pub fn unpack_iq3_s(b: &[u8; layout::IQ3_S.bytes]) -> Ints256 {
    let four = |i: usize, signs: u8| {
        let high = usize::from(b[66 + i / 8] >> (i % 8) & 1);
        signed(&IQ3_S[high << 8 | usize::from(b[2 + i])], signs)
    };
    block(
        f16_at(b, layout::IQ3_S.d),
        |g| 2 * (b[106 + g / 4] >> (4 * (g / 2 % 2)) & 15) + 1,
        |i| pair(four(2 * i, b[74 + i]), four(2 * i + 1, b[74 + i] >> 4)),
    )
}

/// `x = (d/8·(2·s + 1))·(8·entry ± 1)`, s in 0..=7 and the sign per 32 values.
/// ```text
/// 0    2            34            50
/// | d  | qs [32]    | qh u16 [8]  |
/// ```
/// Of `qh`: four times three high bits of entries, `s`, and a bit that is set where 1 is taken off.
pub fn unpack_iq1_s(b: &[u8; layout::IQ1_S.bytes]) -> Ints256 {
    let high = |g: usize| u16_at(b, 34 + 2 * g);
    block(
        f16_at(b, layout::IQ1_S.d) / 8.0,
        |g| 2 * (high(g / 2) >> 12 & 7) as u8 + 1,
        |i| {
            let top = usize::from(high(i / 4) >> (3 * (i % 4)) & 7);
            let offset = if high(i / 4) >> 15 == 1 { -1 } else { 1 };
            IQ1[top << 8 | usize::from(b[i + 2])].map(|q| q + offset)
        },
    )
}

/// `x = (d/8·(2·s + 1))·(8·entry ± 1)`, s in 0..=7 per 16 values, the sign per 8.
/// ```text
/// 0          32         48              56
/// | qs [32]  | qh [16]  | scales u16 [4]|
/// ```
/// Half a byte of `qh`, the low one first: three high bits of an entry, and a bit that is set where 1 is taken off. Of
/// `scales`: four times `s`, then four bits of `d`, the lowest first.
pub fn unpack_iq1_m(b: &[u8; layout::IQ1_M.bytes]) -> Ints256 {
    block(
        half::f16::from_bits(iq1_m_scale(b)).to_f32_const() / 8.0,
        |g| 2 * (u16_at(b, 48 + 2 * (g / 4)) >> (3 * (g % 4)) & 7) as u8 + 1,
        |i| {
            let high = b[32 + i / 2] >> (4 * (i % 2));
            let offset = if high & 8 == 0 { 1 } else { -1 };
            IQ1[usize::from(high & 7) << 8 | usize::from(b[i])].map(|q| q + offset)
        },
    )
}

/// Returns the bits of the f16 scale of IQ1_M.
pub fn iq1_m_scale(b: &[u8; layout::IQ1_M.bytes]) -> u16 {
    (0..4).map(|i| (u16_at(b, layout::IQ1_M.d + 2 * i) >> 12) << (4 * i)).fold(0, |bits, part| bits | part)
}

/// `x = d·(q - 1)`: five digits of base three a byte, as a fraction of 256.
/// ```text
/// 0          48        52   54
/// | qs [48]  | qh [4]  | d  |
/// ```
/// The first 32 bytes hold digit by digit 32 values each, the next 16 bytes 16 each, those of `qh` four digits.
pub fn unpack_tq1_0(b: &[u8; layout::TQ1_0.bytes]) -> Ints256 {
    let digit = |byte: u8, n: usize| {
        const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
        ((u16::from(byte.wrapping_mul(POWERS[n])) * 3) >> 8) as i8 - 1
    };
    let value = |i: usize| match i {
        0..160 => digit(b[i % 32], i / 32),
        160..240 => digit(b[32 + (i - 160) % 16], (i - 160) / 16),
        _ => digit(b[48 + (i - 240) % 4], (i - 240) / 4),
    };
    Ints256 { q: std::array::from_fn(value), sc: [1; 16], d: f16_at(b, layout::TQ1_0.d), ..Ints256::ZERO }
}

/// `x = d·(q - 1)`, q in 0..=3.
/// ```text
/// 0          64   66
/// | qs [64]  | d  |    two bits a value, as in Q2_K
/// ```
pub fn unpack_tq2_0(b: &[u8; layout::TQ2_0.bytes]) -> Ints256 {
    let value = |i: usize| (b[i / 128 * 32 + i % 32] >> (2 * (i / 32 % 4)) & 3) as i8 - 1;
    Ints256 { q: std::array::from_fn(value), sc: [1; 16], d: f16_at(b, layout::TQ2_0.d), ..Ints256::ZERO }
}
