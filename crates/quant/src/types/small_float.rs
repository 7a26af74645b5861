//! Floats of 8 and 4 bits with scales: E4M3 with one for each 128 values (FP8 as DeepSeek-V3 was published, its blocks'
//! scales given to every row), and NVFP4. Their values are exact in f32 and meet f32 activations.
//!
//! E4M3 and E2M1 are those of the OCP specifications (8-bit floating point 1.0, microscaling formats 1.0).

use crate::planes::{PlaneBytes, Planes, PlanesMut};

/// Values of a group of 8-bit floats.
pub const F8_GROUP: usize = 128;
/// Bytes that a group takes in each plane: a byte a value, an f32 as scale.
pub(super) const F8_BYTES: PlaneBytes = PlaneBytes { q: F8_GROUP, scales: 4, biases: 0 };
/// The largest number of E4M3.
const E4M3_MAX: f32 = 448.0;
/// The codes of E2M1; minus zero is zero, as GGUF files read it.
const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// E4M3: a sign, four bits of exponent with bias 7, three of mantissa, no infinities.
pub fn load_e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let value = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2.0f32.powi(-9),
        _ => (1.0 + mantissa / 8.0) * 2.0f32.powi(exponent - 7),
    };
    if byte & 0x80 == 0 { value } else { -value }
}

/// Returns the nearest number of E4M3, ties to even, past 448 that; NaN stays NaN.
pub fn store_e4m3(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7f;
    }
    let size = x.abs().min(E4M3_MAX);
    let code = if size < 2.0f32.powi(-6) {
        // Subnormal; 8 of its steps are the smallest normal number, whose code is 8.
        (size * 512.0).round_ties_even() as u32
    } else {
        let bits = size.to_bits();
        ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20) - (120 << 3)
    };
    code as u8 | if x.is_sign_negative() { 0x80 } else { 0 }
}

/// Group `g` of a row of 8-bit floats: `x = d·e4m3(q)`, `d` an f32 of the plane of scales.
pub fn decode_f8(row: Planes<'_>, g: usize, x: &mut [f32; F8_GROUP]) {
    let d = f32::from_le_bytes(row.scales.as_chunks().0[g]);
    for (x, &q) in x.iter_mut().zip(&row.q[F8_GROUP * g..]) {
        *x = load_e4m3(q) * d;
    }
}

/// Encodes a group with the scale that makes its largest value 448.
pub fn encode_f8(x: &[f32; F8_GROUP], row: &mut PlanesMut<'_>, g: usize) {
    let x = x.map(|x| if x.is_nan() { 0.0 } else { x.clamp(-1e38, 1e38) });
    let d = x.iter().fold(0.0f32, |max, x| max.max(x.abs())) / E4M3_MAX;
    row.scales.as_chunks_mut().0[g] = d.to_le_bytes();
    for (q, x) in row.q[F8_GROUP * g..].iter_mut().zip(x) {
        *q = if d > 0.0 { store_e4m3(x / d) } else { 0 };
    }
}

/// The scales of NVFP4 by their codes: E4M3 without a sign, in which 0x7f is 0 as GGUF files read it. Bit 7 counts for
/// nothing else.
pub static UE4M3: [f32; 256] = {
    let mut all = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = (code as u32 >> 3 & 15, code as u32 & 7);
        all[code] = match exponent {
            _ if code == 0x7f => 0.0,
            0 => mantissa as f32 / 512.0,
            _ => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
        };
        code += 1;
    }
    all
};

/// `x = ue4m3(d)·e2m1(q)`, 64 values in four runs of 16 with a scale each; byte `i` of a run's eight holds value `i` in
/// its low half and value `i + 8` in its high half.
/// ```text
/// 0       4                 36
/// | d [4] | qs (32 bytes)   |
/// ```
pub fn decode_nvfp4(b: &[u8; 36], x: &mut [f32; 64]) {
    for (s, (x, qs)) in x.as_chunks_mut::<16>().0.iter_mut().zip(b[4..].as_chunks::<8>().0).enumerate() {
        let d = UE4M3[usize::from(b[s])];
        for i in 0..16 {
            x[i] = d * E2M1[usize::from(qs[i % 8] >> (4 * (i / 8)) & 15)];
        }
    }
}

/// Bytes that a block of NVFP4 with a scale of its matrix takes in each plane: those of the type, and that scale.
pub(super) const NVFP4_SCALED_BYTES: PlaneBytes = PlaneBytes { q: 36, scales: 4, biases: 0 };

/// Block `b` of a row of NVFP4 with a scale of its matrix, an f32 of the plane of scales: each value times that.
pub fn decode_nvfp4_scaled(row: Planes<'_>, b: usize, x: &mut [f32; 64]) {
    let scale = f32::from_le_bytes(row.scales.as_chunks().0[b]);
    decode_nvfp4(&row.q.as_chunks().0[b], x);
    x.iter_mut().for_each(|x| *x *= scale);
}

/// Returns the scale of a matrix of NVFP4 whose largest magnitude is `max`: it makes that the largest number of the
/// type, so that scales of blocks use all of E4M3. 1 where nothing is to be scaled.
pub fn nvfp4_scale(max: f32) -> f32 {
    let scale = max / (E2M1[7] * E4M3_MAX);
    if scale >= f32::MIN_POSITIVE { scale } else { 1.0 }
}

/// Encodes a block with a scale that makes its largest value the largest of the type; errors count by the weights `w`.
pub fn encode_nvfp4_scaled(x: &[f32; 64], w: &[f32; 64], row: &mut PlanesMut<'_>, b: usize) {
    let x = x.map(|x| if x.is_nan() { 0.0 } else { x.clamp(-1e38, 1e38) });
    let scale = nvfp4_scale(x.iter().fold(0.0f32, |max, x| max.max(x.abs())));
    row.scales.as_chunks_mut().0[b] = scale.to_le_bytes();
    encode_nvfp4(&x.map(|x| x / scale), w, &mut row.q.as_chunks_mut().0[b]);
}

/// Encodes a block: of the scales around the one that makes the largest value 6, and on to the one that makes it 4, the
/// one with the least squared error, which counts by the weights `w`. Of normal values 0.0816 is lost so, 0.0860 with
/// the two neighbors on each side alone, 0.0954 with the first.
pub fn encode_nvfp4(x: &[f32; 64], w: &[f32; 64], b: &mut [u8; 36]) {
    for (s, (x, w)) in x.as_chunks::<16>().0.iter().zip(w.as_chunks::<16>().0).enumerate() {
        let x = x.map(|x| if x.is_nan() { 0.0 } else { x.clamp(-1e18, 1e18) });
        let max = x.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        let first = store_e4m3(max / E2M1[7]);
        let mut best = (f32::INFINITY, 0, [0; 16]);
        for code in first.saturating_sub(2)..=(first + 6).min(0x7e) {
            let d = UE4M3[usize::from(code)];
            let q = x.map(|x| if d > 0.0 { store_e2m1(x / d) } else { 0 });
            let errors = x.iter().zip(q).zip(w).map(|((x, q), w)| w * (x - d * E2M1[usize::from(q)]).powi(2));
            let error = errors.sum();
            if error < best.0 {
                best = (error, code, q);
            }
        }
        b[s] = best.1;
        for i in 0..8 {
            b[4 + 8 * s + i] = best.2[i] | best.2[i + 8] << 4;
        }
    }
}

/// Returns the code nearest to a number; zeros have no sign.
fn store_e2m1(x: f32) -> u8 {
    /// The middles between neighbors.
    const MIDDLES: [f32; 7] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
    let code = MIDDLES.iter().filter(|&&middle| x.abs() > middle).count() as u8;
    if x < 0.0 && code > 0 { code | 8 } else { code }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_bit_floats() {
        for (byte, value) in
            [(0x00, 0.0), (0x01, 2.0f32.powi(-9)), (0x08, 2.0f32.powi(-6)), (0x38, 1.0), (0xb9, -1.125), (0x7e, 448.0)]
        {
            assert_eq!(load_e4m3(byte), value, "{byte:#x}");
        }
        assert!(load_e4m3(0x7f).is_nan() && load_e4m3(0xff).is_nan());
    }

    #[test]
    fn every_eight_bit_float_comes_back_and_middles_go_to_even() {
        for code in (0..=255u8).filter(|code| code & 0x7f != 0x7f) {
            assert_eq!(store_e4m3(load_e4m3(code)), code, "{code:#x}");
            if code & 0x7f < 0x7e {
                let middle = (load_e4m3(code) + load_e4m3(code + 1)) / 2.0;
                assert_eq!(store_e4m3(middle), if code % 2 == 0 { code } else { code + 1 }, "{code:#x}");
            }
        }
        assert_eq!((store_e4m3(1e9), store_e4m3(f32::NEG_INFINITY)), (0x7e, 0xfe));
    }
}
