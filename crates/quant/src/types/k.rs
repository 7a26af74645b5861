//! Q2_K, Q3_K, Q4_K, Q5_K, Q6_K: super-blocks of 256 values with integer sub-scales.
//!
//! Numbering in this file: value `i` of 256; `g = i / 16` and `j = i / 32` are its 16-group and 32-group.
//! Two-bit fields have one layout: a half of 128 values takes 32 bytes, and value `32·s + l` of the half is
//! bits `2s, 2s + 1` of byte `l`. Kernels thus get 32 values of one group from one load and one shift.

use super::layout::{Q2_K, Q3_K, Q4_K, Q5_K, Q6_K};
use crate::block::Ints256;

/// `x = (d·sc[g])·q - dmin·m[g]`, q in 0..=3, sc and m in 0..=15.
/// ```text
/// 0                 16                80   82     84
/// | scales (m << 4 | sc) [16] | qs [64] | d  | dmin |
/// ```
pub fn unpack_q2_k(b: &[u8; Q2_K.bytes]) -> Ints256 {
    let (d, dmin) = Q2_K.scales(b);
    let (scales, qs) = (&b[..16], &b[16..80]);
    Ints256 {
        q: std::array::from_fn(|i| two_bits(qs, i)),
        sc: std::array::from_fn(|g| (scales[g] & 15) as i8),
        mins: std::array::from_fn(|g| scales[g] >> 4),
        d,
        dmin,
    }
}

/// `x = (d·(sc[g] - 32))·q`, q in -4..=3 (two low bits, less 4 when the bit in `hmask` is *clear*), sc in 0..=63.
/// ```text
/// 0            32        96            108  110
/// | hmask [32] | qs [64] | scales [12] | d  |
/// ```
/// `hmask`: bit `j` of byte `i % 32`. `scales`: 16 six-bit numbers; group `g`'s low four bits are the low (g < 8) or
/// high half of byte `g % 8`, its two high bits are bits `2·(g / 4)` of byte `8 + g % 4`.
pub fn unpack_q3_k(b: &[u8; Q3_K.bytes]) -> Ints256 {
    let (d, dmin) = Q3_K.scales(b);
    let (hmask, qs, scales) = (&b[..32], &b[32..96], &b[96..108]);
    Ints256 {
        q: std::array::from_fn(|i| two_bits(qs, i) - if hmask[i % 32] >> (i / 32) & 1 == 1 { 0 } else { 4 }),
        sc: std::array::from_fn(|g| {
            let low = scales[g % 8] >> (4 * (g / 8)) & 15;
            let high = scales[8 + g % 4] >> (2 * (g / 4)) & 3;
            (high << 4 | low) as i8 - 32
        }),
        mins: [0; 16],
        d,
        dmin,
    }
}

/// `x = (d·sc[j])·q - dmin·m[j]`, q in 0..=15, sc and m in 0..=63.
/// ```text
/// 0    2      4             16          144
/// | d  | dmin | scales [12] | qs [128]  |
/// ```
/// `scales`: see [`scale_min`]. `qs`: 64 values take 32 bytes, the low halves are the first 32 values.
pub fn unpack_q4_k(b: &[u8; Q4_K.bytes]) -> Ints256 {
    let (d, dmin) = Q4_K.scales(b);
    let (scales, qs) = (arr12(&b[4..16]), &b[16..]);
    Ints256 {
        q: std::array::from_fn(|i| four_bits(qs, i)),
        sc: std::array::from_fn(|g| scale_min(scales, g / 2).0 as i8),
        mins: std::array::from_fn(|g| scale_min(scales, g / 2).1),
        d,
        dmin,
    }
}

/// `x = (d·sc[j])·q - dmin·m[j]`, q in 0..=31, sc and m in 0..=63: Q4_K with a fifth bit.
/// ```text
/// 0    2      4             16        48          176
/// | d  | dmin | scales [12] | qh [32] | qs [128]  |
/// ```
/// `qh`: bit `j` of byte `i % 32` is bit 4 of value `i`.
pub fn unpack_q5_k(b: &[u8; Q5_K.bytes]) -> Ints256 {
    let (d, dmin) = Q5_K.scales(b);
    let (scales, qh, qs) = (arr12(&b[4..16]), &b[16..48], &b[48..]);
    Ints256 {
        q: std::array::from_fn(|i| four_bits(qs, i) | ((qh[i % 32] >> (i / 32) & 1) << 4) as i8),
        sc: std::array::from_fn(|g| scale_min(scales, g / 2).0 as i8),
        mins: std::array::from_fn(|g| scale_min(scales, g / 2).1),
        d,
        dmin,
    }
}

/// `x = (d·sc[g])·(q - 32)`, q in 0..=63, sc in -128..=127.
/// ```text
/// 0          128       192                  208  210
/// | ql [128] | qh [64] | scales [16] signed | d  |
/// ```
/// `ql`: a half of 128 values takes 64 bytes, the low nibbles are its first 64 values. `qh`: two-bit fields.
pub fn unpack_q6_k(b: &[u8; Q6_K.bytes]) -> Ints256 {
    let (d, dmin) = Q6_K.scales(b);
    let (ql, qh, scales) = (&b[..128], &b[128..192], &b[192..208]);
    Ints256 {
        q: std::array::from_fn(|i| {
            let (h, r) = (i / 128, i % 128);
            let low = (ql[64 * h + r % 64] >> (4 * (r / 64)) & 15) as i8;
            (low | two_bits(qh, i) << 4) - 32
        }),
        sc: std::array::from_fn(|g| scales[g] as i8),
        mins: [0; 16],
        d,
        dmin,
    }
}

/// Returns the inverse of [`unpack_q2_k`].
pub fn pack_q2_k(w: &Ints256) -> [u8; Q2_K.bytes] {
    let mut b = [0; Q2_K.bytes];
    Q2_K.put_scales(&mut b, w.d, w.dmin);
    for g in 0..16 {
        b[g] = w.mins[g] << 4 | w.sc[g] as u8;
    }
    put_two_bits(&mut b[16..80], |i| w.q[i]);
    b
}

/// Returns the inverse of [`unpack_q3_k`].
pub fn pack_q3_k(w: &Ints256) -> [u8; Q3_K.bytes] {
    let mut b = [0; Q3_K.bytes];
    Q3_K.put_scales(&mut b, w.d, w.dmin);
    for i in 0..256 {
        b[i % 32] |= u8::from(w.q[i] >= 0) << (i / 32);
    }
    // q and q + 4 have the same low two bits.
    put_two_bits(&mut b[32..96], |i| w.q[i]);
    for g in 0..16 {
        let sc = (w.sc[g] + 32) as u8;
        b[96 + g % 8] |= (sc & 15) << (4 * (g / 8));
        b[104 + g % 4] |= (sc >> 4) << (2 * (g / 4));
    }
    b
}

/// Returns the inverse of [`unpack_q4_k`].
pub fn pack_q4_k(w: &Ints256) -> [u8; Q4_K.bytes] {
    let mut b = [0; Q4_K.bytes];
    Q4_K.put_scales(&mut b, w.d, w.dmin);
    b[4..16].copy_from_slice(&pack_scale_min(w));
    put_four_bits(&mut b[16..], |i| w.q[i]);
    b
}

/// Returns the inverse of [`unpack_q5_k`].
pub fn pack_q5_k(w: &Ints256) -> [u8; Q5_K.bytes] {
    let mut b = [0; Q5_K.bytes];
    Q5_K.put_scales(&mut b, w.d, w.dmin);
    b[4..16].copy_from_slice(&pack_scale_min(w));
    for i in 0..256 {
        b[16 + i % 32] |= (w.q[i] as u8 >> 4) << (i / 32);
    }
    put_four_bits(&mut b[48..], |i| w.q[i]);
    b
}

/// Returns the inverse of [`unpack_q6_k`].
pub fn pack_q6_k(w: &Ints256) -> [u8; Q6_K.bytes] {
    let mut b = [0; Q6_K.bytes];
    Q6_K.put_scales(&mut b, w.d, w.dmin);
    for i in 0..256 {
        let (h, r) = (i / 128, i % 128);
        b[64 * h + r % 64] |= ((w.q[i] + 32) as u8 & 15) << (4 * (r / 64));
    }
    put_two_bits(&mut b[128..192], |i| (w.q[i] + 32) >> 4);
    for g in 0..16 {
        b[192 + g] = w.sc[g] as u8;
    }
    b
}

/// Scale and minimum of 32-group `j` of Q4_K and Q5_K: sixteen six-bit numbers in twelve bytes.
/// ```text
/// byte 0..4    S4hh S0.....   low six bits: scale j = 0..4;    top two: bits 4, 5 of scale j = 4..8
/// byte 4..8    M4hh M0.....   low six bits: minimum j = 0..4;  top two: bits 4, 5 of minimum j = 4..8
/// byte 8..12   M4ll S4ll      low nibble: scale j = 4..8;      high nibble: minimum j = 4..8
/// ```
pub fn scale_min(s: &[u8; 12], j: usize) -> (u8, u8) {
    if j < 4 {
        (s[j] & 63, s[j + 4] & 63)
    } else {
        (s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4)
    }
}

/// Returns the inverse of [`scale_min`], from the first of each two 16-groups.
fn pack_scale_min(w: &Ints256) -> [u8; 12] {
    let mut s = [0; 12];
    for j in 0..4 {
        s[j] = w.sc[2 * j] as u8;
        s[j + 4] = w.mins[2 * j];
    }
    for j in 4..8 {
        let (sc, m) = (w.sc[2 * j] as u8, w.mins[2 * j]);
        s[j + 4] = m << 4 | sc & 15;
        s[j - 4] |= sc >> 4 << 6;
        s[j] |= m >> 4 << 6;
    }
    s
}

fn two_bits(qs: &[u8], i: usize) -> i8 {
    let (h, s, l) = (i / 128, i % 128 / 32, i % 32);
    (qs[32 * h + l] >> (2 * s) & 3) as i8
}

fn four_bits(qs: &[u8], i: usize) -> i8 {
    let (c, s, l) = (i / 64, i % 64 / 32, i % 32);
    (qs[32 * c + l] >> (4 * s) & 15) as i8
}

fn put_two_bits(qs: &mut [u8], q: impl Fn(usize) -> i8) {
    for (h, qs) in qs.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (l, byte) in qs.iter_mut().enumerate() {
            let bits = |s: usize| (q(128 * h + 32 * s + l) as u8 & 3) << (2 * s);
            *byte = bits(0) | bits(1) | bits(2) | bits(3);
        }
    }
}

fn put_four_bits(qs: &mut [u8], q: impl Fn(usize) -> i8) {
    for (c, qs) in qs.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (l, byte) in qs.iter_mut().enumerate() {
            *byte = q(64 * c + l) as u8 & 15 | (q(64 * c + 32 + l) as u8) << 4;
        }
    }
}

fn arr12(b: &[u8]) -> &[u8; 12] {
    b.try_into().expect("twelve bytes of scales")
}
