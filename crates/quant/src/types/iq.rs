//! IQ4_NL, IQ4_XS, MXFP4: four-bit codes that index a table of integers.

use super::layout::IQ4_XS;
use super::legacy::{nibble, put_nibbles};
use super::{Nearest, f16_at, put_f16};
use crate::block::{Ints32, Ints256};

/// Values of the sixteen codes of IQ4_NL and IQ4_XS: dense near zero, as weights are.
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Values of the sixteen e2m1 codes of MXFP4 (OCP Microscaling Formats 1.0), doubled so that they are integers.
/// Code 8 is minus zero there and zero here.
pub const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// [`IQ4_VALUES`] by what they are nearest to.
pub(crate) static IQ4_NEAREST: Nearest = Nearest::new(&IQ4_VALUES);

/// [`E2M1_DOUBLED`] by what they are nearest to.
pub(crate) static E2M1_NEAREST: Nearest = Nearest::new(&E2M1_DOUBLED);

/// `x = d·table[q]`.
/// ```text
/// 0    2                 18
/// | d  | qs (16 bytes)   |    nibbles as in Q4_0
/// ```
pub fn unpack_iq4_nl(b: &[u8; 18]) -> Ints32 {
    let d = f16_at(b, 0);
    Ints32 { q: std::array::from_fn(|i| IQ4_VALUES[nibble(&b[2..], i) as usize]), d, m: 0.0 }
}

/// `x = (d·(sc[j] - 32))·table[q]`, sc in 0..=63 per 32 values.
/// ```text
/// 0    2              4              8           136
/// | d  | scales_h u16 | scales_l [4] | qs [128]  |
/// ```
/// Scale `j`: low four bits are half `j % 2` of `scales_l[j / 2]`, high two are bits `2j, 2j + 1` of `scales_h`.
/// `qs`: 16 bytes per 32 values, nibbles as in Q4_0.
pub fn unpack_iq4_xs(b: &[u8; IQ4_XS.bytes]) -> Ints256 {
    let (d, dmin) = IQ4_XS.scales(b);
    let scales_h = u16::from_le_bytes([b[2], b[3]]);
    let (scales_l, qs) = (&b[4..8], &b[8..]);
    Ints256 {
        q: std::array::from_fn(|i| IQ4_VALUES[nibble(&qs[i / 32 * 16..], i % 32) as usize]),
        sc: std::array::from_fn(|g| {
            let j = g / 2;
            let low = scales_l[j / 2] >> (4 * (j % 2)) & 15;
            let high = (scales_h >> (2 * j) & 3) as u8;
            (high << 4 | low) as i8 - 32
        }),
        mins: [0; 16],
        d,
        dmin,
    }
}

/// `x = (2^(e - 127) / 2)·doubled[q]`.
/// ```text
/// 0   1                 17
/// | e | qs (16 bytes)   |    nibbles as in Q4_0
/// ```
pub fn unpack_mxfp4(b: &[u8; 17]) -> Ints32 {
    let q = std::array::from_fn(|i| E2M1_DOUBLED[nibble(&b[1..], i) as usize]);
    Ints32 { q, d: e8m0_half(b[0]), m: 0.0 }
}

/// Half of the e8m0 number `2^(e - 127)`: `2^(e - 128)`.
///
/// The halves of the two smallest, `e = 0` and `e = 1`, are subnormal in f32 and exact. `e = 255` is NaN in the OCP
/// text; GGUF files read it as the next power of two, and so does this.
pub fn e8m0_half(e: u8) -> f32 {
    f32::from_bits(match e {
        0 | 1 => 0x0020_0000 << e,
        _ => u32::from(e - 1) << 23,
    })
}

/// Returns the inverse of [`e8m0_half`], for a `d` that it gives.
pub(super) fn e8m0_of_half(d: f32) -> u8 {
    // The exponent field of 2^(e - 128) is e - 1, and 0 for both subnormals: of those, the larger is e = 1.
    match d.to_bits() {
        0x0020_0000 => 0,
        bits => (bits >> 23) as u8 + 1,
    }
}

/// Returns the inverse of [`unpack_iq4_nl`].
pub fn pack_iq4_nl(w: &Ints32) -> [u8; 18] {
    let mut b = [0; 18];
    put_f16(&mut b, 0, w.d);
    put_nibbles(&mut b[2..], |i| code(&IQ4_VALUES, w.q[i]));
    b
}

/// Returns the inverse of [`unpack_iq4_xs`].
pub fn pack_iq4_xs(w: &Ints256) -> [u8; IQ4_XS.bytes] {
    let mut b = [0; IQ4_XS.bytes];
    let mut scales_h = 0u16;
    IQ4_XS.put_scales(&mut b, w.d, w.dmin);
    for j in 0..8 {
        let sc = (w.sc[2 * j] + 32) as u8;
        scales_h |= u16::from(sc >> 4) << (2 * j);
        b[4 + j / 2] |= (sc & 15) << (4 * (j % 2));
        put_nibbles(&mut b[8 + 16 * j..24 + 16 * j], |i| code(&IQ4_VALUES, w.q[32 * j + i]));
    }
    b[2..4].copy_from_slice(&scales_h.to_le_bytes());
    b
}

/// Returns the inverse of [`unpack_mxfp4`], for a `d` that is an e8m0 half; zeros get code 0.
pub fn pack_mxfp4(w: &Ints32) -> [u8; 17] {
    let mut b = [0; 17];
    b[0] = e8m0_of_half(w.d);
    put_nibbles(&mut b[1..], |i| code(&E2M1_DOUBLED, w.q[i]));
    b
}

/// Returns the first code that stands for `value`; 0 when none does.
pub(super) fn code(table: &[i8; 16], value: i8) -> i8 {
    table.iter().position(|&v| v == value).unwrap_or(0) as i8
}
