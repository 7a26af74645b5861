//! F32, F16, BF16: one value a block, little endian.

/// IEEE single.
pub fn load_f32(b: &[u8; 4]) -> f32 {
    f32::from_le_bytes(*b)
}

/// IEEE half: 1 sign, 5 exponent, 10 mantissa bits.
pub fn load_f16(b: &[u8; 2]) -> f32 {
    // The form that does not ask the processor's features at every value.
    half::f16::from_le_bytes(*b).to_f32_const()
}

/// The upper half of a single.
pub fn load_bf16(b: &[u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16)
}

/// IEEE single.
pub fn store_f32(x: f32) -> [u8; 4] {
    x.to_le_bytes()
}

/// The nearest half, ties to even. Past 65504 (and half a step) it is infinite, as IEEE says.
pub fn store_f16(x: f32) -> [u8; 2] {
    half::f16::from_f32(x).to_le_bytes()
}

/// The nearest of the singles whose lower half is zero, ties to even. A NaN stays a NaN and becomes quiet.
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
    fn bf16_rounds_to_nearest_even_and_keeps_nan() {
        for (from, to) in [
            (0x3f80_0000, 0x3f80), // 1
            (0x3f80_8000, 0x3f80), // a tie goes to the even neighbour below
            (0x3f80_8001, 0x3f81), // just above it goes up
            (0x3f81_8000, 0x3f82), // a tie goes to the even neighbour above
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
