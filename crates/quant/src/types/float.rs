//! F32, F16, BF16: one value a block, little endian.

use half::f16;
use half::slice::HalfFloatSliceExt;

/// IEEE single.
pub fn load_f32(b: &[u8; 4]) -> f32 {
    f32::from_le_bytes(*b)
}

/// IEEE half: 1 sign, 5 exponent, 10 mantissa bits.
pub fn load_f16(b: &[u8; 2]) -> f32 {
    // The form that does not ask the processor's features at every value.
    f16::from_le_bytes(*b).to_f32_const()
}

/// [`load_f16`] of many: in groups, by the processor's own instruction where it has one.
pub(super) fn load_f16s(b: &[u8], x: &mut [f32]) {
    let (groups, rest) = x.as_chunks_mut::<32>();
    for (b, x) in b.as_chunks::<64>().0.iter().zip(groups.iter_mut()) {
        let b = b.as_chunks().0;
        let halves: [f16; 32] = std::array::from_fn(|i| f16::from_le_bytes(b[i]));
        halves.convert_to_f32_slice(x);
    }
    let b = b[64 * groups.len()..].as_chunks().0;
    b.iter().zip(rest).for_each(|(b, x)| *x = load_f16(b));
}

/// [`store_f16`] of many, as [`load_f16s`].
pub(super) fn store_f16s(x: &[f32], b: &mut [u8]) {
    let (groups, rest) = x.as_chunks::<32>();
    let (b, b_rest) = b.split_at_mut(64 * groups.len());
    for (x, b) in groups.iter().zip(b.as_chunks_mut::<64>().0) {
        let mut halves = [f16::ZERO; 32];
        halves.convert_from_f32_slice(x);
        b.as_chunks_mut().0.iter_mut().zip(halves).for_each(|(b, half)| *b = half.to_le_bytes());
    }
    rest.iter().zip(b_rest.as_chunks_mut().0).for_each(|(x, b)| *b = store_f16(*x));
}

/// Returns the upper half of a single.
pub fn load_bf16(b: &[u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16)
}

/// IEEE single.
pub fn store_f32(x: f32) -> [u8; 4] {
    x.to_le_bytes()
}

/// Returns the nearest half, ties to even. Past 65504 (and half a step) it is infinite, as IEEE says.
pub fn store_f16(x: f32) -> [u8; 2] {
    f16::from_f32(x).to_le_bytes()
}

/// Returns the nearest of the singles whose lower half is zero, ties to even. A NaN stays a NaN and becomes quiet.
pub fn store_bf16(x: f32) -> [u8; 2] {
    let bits = x.to_bits();
    let upper = if x.is_nan() {
        // Rounding could carry a NaN's mantissa into inf, and truncation could leave none of it.
        bits >> 16 | 0x40
    } else {
        // Half of the lower part's range, one less when the upper part is even: a tie then stays.
        (bits + 0x7fff + (bits >> 16 & 1)) >> 16
    };
    (upper as u16).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_is_what_ieee_says() {
        for bits in 0..=u16::MAX {
            let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
            let magnitude = match exponent {
                0 => mantissa * 2f64.powi(-24),
                31 if mantissa == 0.0 => f64::INFINITY,
                31 => f64::NAN,
                _ => (1.0 + mantissa / 1024.0) * 2f64.powi(exponent - 15),
            };
            let want = if bits >> 15 == 1 { -magnitude } else { magnitude } as f32;
            let got = load_f16(&bits.to_le_bytes());
            assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{bits:#x}: {got}, not {want}");
            assert!(got.is_nan() || store_f16(got) == bits.to_le_bytes(), "{bits:#x} does not come back");
        }
    }

    #[test]
    fn many_halves_are_as_single_ones() {
        let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).chain([1, 2, 3, 4, 5, 6]).collect();
        let mut x = vec![0.0; bytes.len() / 2];
        load_f16s(&bytes, &mut x);
        let singles: Vec<f32> = bytes.as_chunks().0.iter().map(load_f16).collect();
        assert!(x.iter().zip(&singles).all(|(a, b)| a.to_bits() == b.to_bits()));
        // Between halves, where they are rounded, too.
        x.iter_mut().enumerate().for_each(|(i, x)| *x = f32::from_bits(x.to_bits() ^ (i as u32).wrapping_mul(77)));
        let mut many = vec![0; bytes.len()];
        store_f16s(&x, &mut many);
        for (i, (x, many)) in x.iter().zip(many.as_chunks().0).enumerate() {
            assert_eq!(store_f16(*x), *many, "{i}: {x}");
        }
    }

    #[test]
    fn bf16_rounds_to_nearest_even_and_keeps_nan() {
        for (from, to) in [
            (0x3f80_0000, 0x3f80), // 1
            (0x3f80_8000, 0x3f80), // a tie goes to the even neighbor below
            (0x3f80_8001, 0x3f81), // just above it goes up
            (0x3f81_8000, 0x3f82), // a tie goes to the even neighbor above
            (0x7f7f_ffff, 0x7f80), // the largest single rounds to inf
            (0x7f80_0000, 0x7f80), // inf
            (0x7f80_0001, 0x7fc0), // a NaN whose mantissa lies in the lower half
            (0xffff_ffff, 0xffff), // a NaN that a carry would turn into zero
            (0x8000_0000, 0x8000), // minus zero
        ] {
            assert_eq!(u16::from_le_bytes(store_bf16(f32::from_bits(from))), to, "{from:#x}");
        }
    }
}
