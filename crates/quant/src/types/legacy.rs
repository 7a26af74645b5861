//! Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: 32 values, f16 scale, no sub-scales.
//!
//! Nibbles: byte `i` of `qs` holds value `i` in its low half and value `i + 16` in its high half.
//! Fifth bits: bit `i` of the little-endian word `qh` is bit 4 of value `i`.

use super::{f16_at, put_f16};
use crate::block::Ints32;

/// `x = d·(q - 8)`, q in 0..=15.
/// ```text
/// 0    2                 18
/// | d  | qs (16 bytes)   |
/// ```
pub fn unpack_q4_0(b: &[u8; 18]) -> Ints32 {
    let d = f16_at(b, 0);
    Ints32 { q: std::array::from_fn(|i| nibble(&b[2..], i) - 8), d, m: 0.0 }
}

/// `x = d·q + m`, q in 0..=15.
/// ```text
/// 0    2    4                 20
/// | d  | m  | qs (16 bytes)   |
/// ```
pub fn unpack_q4_1(b: &[u8; 20]) -> Ints32 {
    Ints32 { q: std::array::from_fn(|i| nibble(&b[4..], i)), d: f16_at(b, 0), m: f16_at(b, 2) }
}

/// `x = d·(q - 16)`, q in 0..=31.
/// ```text
/// 0    2        6                 22
/// | d  | qh u32 | qs (16 bytes)   |
/// ```
pub fn unpack_q5_0(b: &[u8; 22]) -> Ints32 {
    let d = f16_at(b, 0);
    Ints32 { q: std::array::from_fn(|i| (nibble(&b[6..], i) | fifth(&b[2..6], i)) - 16), d, m: 0.0 }
}

/// `x = d·q + m`, q in 0..=31.
/// ```text
/// 0    2    4        8                 24
/// | d  | m  | qh u32 | qs (16 bytes)   |
/// ```
pub fn unpack_q5_1(b: &[u8; 24]) -> Ints32 {
    let q = std::array::from_fn(|i| nibble(&b[8..], i) | fifth(&b[4..8], i));
    Ints32 { q, d: f16_at(b, 0), m: f16_at(b, 2) }
}

/// `x = d·q`, q in -128..=127.
/// ```text
/// 0    2                    34
/// | d  | q (32 signed bytes)|
/// ```
pub fn unpack_q8_0(b: &[u8; 34]) -> Ints32 {
    Ints32 { q: std::array::from_fn(|i| b[2 + i] as i8), d: f16_at(b, 0), m: 0.0 }
}

/// Returns the inverse of [`unpack_q4_0`].
pub fn pack_q4_0(w: &Ints32) -> [u8; 18] {
    let mut b = [0; 18];
    put_f16(&mut b, 0, w.d);
    put_nibbles(&mut b[2..], |i| w.q[i] + 8);
    b
}

/// Returns the inverse of [`unpack_q4_1`].
pub fn pack_q4_1(w: &Ints32) -> [u8; 20] {
    let mut b = [0; 20];
    put_f16(&mut b, 0, w.d);
    put_f16(&mut b, 2, w.m);
    put_nibbles(&mut b[4..], |i| w.q[i]);
    b
}

/// Returns the inverse of [`unpack_q5_0`].
pub fn pack_q5_0(w: &Ints32) -> [u8; 22] {
    let mut b = [0; 22];
    put_f16(&mut b, 0, w.d);
    put_fifths(&mut b[2..6], |i| w.q[i] + 16);
    put_nibbles(&mut b[6..], |i| w.q[i] + 16);
    b
}

/// Returns the inverse of [`unpack_q5_1`].
pub fn pack_q5_1(w: &Ints32) -> [u8; 24] {
    let mut b = [0; 24];
    put_f16(&mut b, 0, w.d);
    put_f16(&mut b, 2, w.m);
    put_fifths(&mut b[4..8], |i| w.q[i]);
    put_nibbles(&mut b[8..], |i| w.q[i]);
    b
}

/// Returns the inverse of [`unpack_q8_0`].
pub fn pack_q8_0(w: &Ints32) -> [u8; 34] {
    let mut b = [0; 34];
    put_f16(&mut b, 0, w.d);
    for i in 0..32 {
        b[2 + i] = w.q[i] as u8;
    }
    b
}

/// Value `i` of 32 nibbles in 16 bytes, `0..=15`.
pub(super) fn nibble(qs: &[u8], i: usize) -> i8 {
    (qs[i % 16] >> (4 * (i / 16)) & 15) as i8
}

/// Writes the low four bits of 32 values into 16 bytes.
pub(super) fn put_nibbles(qs: &mut [u8], q: impl Fn(usize) -> i8) {
    for (i, byte) in qs[..16].iter_mut().enumerate() {
        *byte = q(i) as u8 & 15 | (q(i + 16) as u8) << 4;
    }
}

/// Writes bit 4 of 32 values into 4 zero bytes.
fn put_fifths(qh: &mut [u8], q: impl Fn(usize) -> i8) {
    for i in 0..32 {
        qh[i / 8] |= (q(i) as u8 >> 4 & 1) << (i % 8);
    }
}

/// Bit `i` of `qh`, at the place of bit 4.
fn fifth(qh: &[u8], i: usize) -> i8 {
    ((qh[i / 8] >> (i % 8) & 1) << 4) as i8
}
