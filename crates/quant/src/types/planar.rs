//! The types of MLX files, whose rows lie in planes: affine groups of 2, 3, 4, 5, 6 and 8 bits, and MXFP4.
//!
//! Plane `q` of a row is a stream of bits in little-endian order: value `i` is bits `i·bits .. (i + 1)·bits`, bit `j`
//! of the stream being bit `j % 8` of byte `j / 8`. MLX stores it as u32 words, which is the same on disk; values of 3,
//! 5 and 6 bits straddle words. 32 values take `4·bits` bytes, so that every 32-block begins at a whole word.

use super::float::{load_bf16, load_f16, load_f32, store_bf16, store_f16, store_f32};
use super::iq::{E2M1_DOUBLED, code, e8m0_half, e8m0_of_half};
use crate::block::Ints32;
use crate::planes::{PlaneBytes, Planes, PlanesMut};

/// The type of an affine type's scales and biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum ScaleType {
    F16,
    BF16,
    F32,
}

impl ScaleType {
    /// Every type.
    pub const ALL: [Self; 3] = [Self::F16, Self::BF16, Self::F32];

    /// Bytes of a number.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::BF16 => 2,
            Self::F32 => 4,
        }
    }

    /// Number `i` of a plane.
    pub(crate) fn get(self, plane: &[u8], i: usize) -> f32 {
        match self {
            Self::F16 => load_f16(&plane.as_chunks().0[i]),
            Self::BF16 => load_bf16(&plane.as_chunks().0[i]),
            Self::F32 => load_f32(&plane.as_chunks().0[i]),
        }
    }

    /// Writes number `i` of a plane, rounded.
    pub(crate) fn put(self, plane: &mut [u8], i: usize, x: f32) {
        match self {
            Self::F16 => plane.as_chunks_mut().0[i] = store_f16(x),
            Self::BF16 => plane.as_chunks_mut().0[i] = store_bf16(x),
            Self::F32 => plane.as_chunks_mut().0[i] = store_f32(x),
        }
    }

    /// Returns the number of this type nearest to `x`, as f32; never infinite.
    pub(crate) fn nearest(self, x: f64) -> f32 {
        let max = match self {
            Self::F16 => 65504.0,
            Self::BF16 => f64::from(f32::from_bits(0x7f7f_0000)),
            Self::F32 => f64::from(f32::MAX),
        };
        let mut bytes = [0; 4];
        self.put(&mut bytes, 0, x.clamp(-max, max) as f32);
        self.get(&bytes, 0)
    }
}

/// An affine type: `x = scale·q + bias`, q in `0..2^bits`, one scale and one bias a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Affine {
    bits: u8,
    group: u8,
    scales: ScaleType,
}

/// Bits of a value in files of MLX.
const BITS: [u8; 6] = [2, 3, 4, 5, 6, 8];
/// Values of a group in files of MLX.
const GROUPS: [u8; 3] = [32, 64, 128];

impl Affine {
    /// Number of affine types.
    pub(super) const COUNT: usize = BITS.len() * GROUPS.len() * ScaleType::ALL.len();

    /// Returns the type of `bits` bits (2, 3, 4, 5, 6 or 8), groups of `group` values (32, 64 or 128) and scales and
    /// biases of `scales`; `None` when there is none.
    pub const fn new(bits: usize, group: usize, scales: ScaleType) -> Option<Self> {
        match (bits, group) {
            (2..=6 | 8, 32 | 64 | 128) => Some(Self { bits: bits as u8, group: group as u8, scales }),
            _ => None,
        }
    }

    /// Bits of a value.
    pub const fn bits(self) -> usize {
        self.bits as usize
    }

    /// Values of a group; a row is whole groups.
    pub const fn group(self) -> usize {
        self.group as usize
    }

    /// Returns the type of scales and biases.
    pub const fn scales(self) -> ScaleType {
        self.scales
    }

    /// Type `i` of [`Affine::COUNT`].
    pub(super) const fn nth(i: usize) -> Self {
        Self { bits: BITS[i / 9], group: GROUPS[i / 3 % 3], scales: ScaleType::ALL[i % 3] }
    }

    /// Returns its index, the inverse of [`Affine::nth`].
    pub(super) fn place(self) -> usize {
        let of = |list: &[u8], x| list.iter().position(|&y| x == y).expect("`new` looked it up in the list");
        of(&BITS, self.bits) * 9 + of(&GROUPS, self.group) * 3 + self.scales as usize
    }

    pub(super) fn name(self) -> &'static str {
        NAMES[self.place()]
    }

    /// Bytes that a group takes in each plane.
    pub(super) fn group_bytes(self) -> PlaneBytes {
        let scale = self.scales.bytes();
        PlaneBytes { q: self.group() / 8 * self.bits(), scales: scale, biases: scale }
    }

    /// Block `b` of a row: 32 values, with the scale and bias of their group.
    pub fn unpack(self, row: Planes<'_>, b: usize) -> Ints32<u8> {
        let (bits, g) = (self.bits(), 32 * b / self.group());
        let q = &row.q[4 * bits * b..][..4 * bits];
        Ints32 {
            q: std::array::from_fn(|i| field(q, i * bits, bits)),
            d: self.scales.get(row.scales, g),
            m: self.scales.get(row.biases, g),
        }
    }

    /// The inverse of [`Affine::unpack`]; blocks of a group carry the same scale and bias.
    pub fn pack(self, w: &Ints32<u8>, row: &mut PlanesMut<'_>, b: usize) {
        let (bits, g) = (self.bits(), 32 * b / self.group());
        put_fields(&mut row.q[4 * bits * b..][..4 * bits], bits, |i| w.q[i]);
        self.scales.put(row.scales, g, w.d);
        self.scales.put(row.biases, g, w.m);
    }
}

/// Bytes that 32 values of planar MXFP4 take in each plane.
pub(super) const MXFP4_BYTES: PlaneBytes = PlaneBytes { q: 16, scales: 1, biases: 0 };

/// Block `b` of a row of planar MXFP4: `x = (2^(e - 127) / 2)·doubled[q]`, codes of 4 bits in order, `e` a byte of the
/// plane of scales.
pub fn unpack_mxfp4(row: Planes<'_>, b: usize) -> Ints32 {
    let q = &row.q[16 * b..][..16];
    let q = std::array::from_fn(|i| E2M1_DOUBLED[usize::from(field(q, 4 * i, 4))]);
    Ints32 { q, d: e8m0_half(row.scales[b]), m: 0.0 }
}

/// The inverse of [`unpack_mxfp4`], for a `d` that is an e8m0 half; zeros get code 0.
pub fn pack_mxfp4(w: &Ints32, row: &mut PlanesMut<'_>, b: usize) {
    put_fields(&mut row.q[16 * b..][..16], 4, |i| code(&E2M1_DOUBLED, w.q[i]) as u8);
    row.scales[b] = e8m0_of_half(w.d);
}

/// `bits` bits (at most 8) from bit `at` on.
fn field(stream: &[u8], at: usize, bits: usize) -> u8 {
    let byte = |i: usize| u16::from(stream.get(i).copied().unwrap_or(0));
    let two = byte(at / 8) | byte(at / 8 + 1) << 8;
    (two >> (at % 8)) as u8 & (0xff >> (8 - bits))
}

/// Overwrites the bytes with 32 fields of `bits` bits.
fn put_fields(stream: &mut [u8], bits: usize, q: impl Fn(usize) -> u8) {
    stream.fill(0);
    for i in 0..32 {
        let (at, two) = (i * bits, u16::from(q(i)) << (i * bits % 8));
        stream[at / 8] |= two as u8;
        if two > 0xff {
            stream[at / 8 + 1] |= (two >> 8) as u8;
        }
    }
}

/// Names, in the order of [`Affine::nth`].
static NAMES: [&str; Affine::COUNT] = {
    macro_rules! names {
        ($($bits:literal)*) => {
            [$(
                concat!("affine", $bits, "_g32_f16"),
                concat!("affine", $bits, "_g32_bf16"),
                concat!("affine", $bits, "_g32_f32"),
                concat!("affine", $bits, "_g64_f16"),
                concat!("affine", $bits, "_g64_bf16"),
                concat!("affine", $bits, "_g64_f32"),
                concat!("affine", $bits, "_g128_f16"),
                concat!("affine", $bits, "_g128_bf16"),
                concat!("affine", $bits, "_g128_f32"),
            )*]
        };
    }
    names!(2 3 4 5 6 8)
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_the_types_are() {
        for i in 0..Affine::COUNT {
            let a = Affine::nth(i);
            assert_eq!(a.place(), i);
            assert_eq!(Affine::new(a.bits(), a.group(), a.scales()), Some(a));
            let scales = format!("{:?}", a.scales()).to_lowercase();
            assert_eq!(a.name(), format!("affine{}_g{}_{scales}", a.bits(), a.group()));
        }
        for (bits, group) in [(1, 64), (7, 64), (4, 16), (4, 256), (260, 64), (4, 320)] {
            assert_eq!(Affine::new(bits, group, ScaleType::F16), None, "{bits} {group}");
        }
    }
}
