//! The two integer forms that every quantized block unpacks to.
//!
//! The files of [`crate::types`] decode the bits of a format; from here on all formats of one block length are alike.
//! Knows no format.

/// A block of 32 values: `x[i] = d·q[i]`, or `d·q[i] + m` where the format has a minimum.
///
/// `Q` is i8, or u8 for affine types, which have integers up to 255.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ints32<Q = i8> {
    /// The integers, with the format's offset taken off (or its table looked up).
    pub q: [Q; 32],
    /// The scale.
    pub d: f32,
    /// The minimum, added. Zero where the format has none.
    pub m: f32,
}

/// A super-block of 256 values: `x[i] = (d·sc[i/16])·q[i]`, less `dmin·mins[i/16]` where the format has a minimum.
///
/// Formats with one sub-scale per 32 values hold it twice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ints256 {
    /// The integers, with the format's offset taken off (or its table looked up).
    pub q: [i8; 256],
    /// Integer sub-scale of each 16 values, with its offset taken off.
    pub sc: [i8; 16],
    /// Integer minimum of each 16 values. Zero where the format has none.
    pub mins: [u8; 16],
    /// The scale of the sub-scales.
    pub d: f32,
    /// The scale of the minimums. Zero where the format has none.
    pub dmin: f32,
}

impl Ints32 {
    /// All zero.
    pub const ZERO: Self = Self { q: [0; 32], d: 0.0, m: 0.0 };
}

impl Ints256 {
    /// All zero.
    pub const ZERO: Self = Self { q: [0; 256], sc: [0; 16], mins: [0; 16], d: 0.0, dmin: 0.0 };
}
