//! F32, F16, BF16: one value a block, little endian.

/// IEEE single.
pub fn load_f32(b: &[u8; 4]) -> f32 {
    f32::from_le_bytes(*b)
}

/// IEEE half: 1 sign, 5 exponent, 10 mantissa bits.
pub fn load_f16(b: &[u8; 2]) -> f32 {
    half::f16::from_le_bytes(*b).to_f32()
}

/// The upper half of a single.
pub fn load_bf16(b: &[u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16)
}
