//! The table of weight types. A new type is a variant, a row of [`TABLE`] and its block in a family's file.

pub mod float;
pub mod iq;
pub mod k;
pub mod legacy;

use std::fmt;

use crate::act::ActKind;
use crate::block::{Ints32, Ints256};

/// A weight type. The names are GGUF's, in lower case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, non_camel_case_types)]
pub enum WeightType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
}

/// How the bytes of a block become numbers.
pub(crate) enum Codec {
    /// One value a block.
    Float { load: fn(&[u8]) -> f32 },
    /// 32 values a block; `has_min`: the format adds `m`.
    Small { unpack: fn(&[u8]) -> Ints32, has_min: bool },
    /// 256 values a block; `has_min`: the format subtracts `dmin·mins`.
    Super { unpack: fn(&[u8]) -> Ints256, has_min: bool },
}

struct Row {
    ty: WeightType,
    name: &'static str,
    ggml_id: u32,
    block_len: usize,
    block_bytes: usize,
    codec: Codec,
}

const fn float(ty: WeightType, name: &'static str, ggml_id: u32, block_bytes: usize, load: fn(&[u8]) -> f32) -> Row {
    Row { ty, name, ggml_id, block_len: 1, block_bytes, codec: Codec::Float { load } }
}

const fn small(
    ty: WeightType,
    name: &'static str,
    ggml_id: u32,
    block_bytes: usize,
    has_min: bool,
    unpack: fn(&[u8]) -> Ints32,
) -> Row {
    Row { ty, name, ggml_id, block_len: 32, block_bytes, codec: Codec::Small { unpack, has_min } }
}

const fn superb(
    ty: WeightType,
    name: &'static str,
    ggml_id: u32,
    block_bytes: usize,
    has_min: bool,
    unpack: fn(&[u8]) -> Ints256,
) -> Row {
    Row { ty, name, ggml_id, block_len: 256, block_bytes, codec: Codec::Super { unpack, has_min } }
}

/// One row a type, in the order of the enum.
#[rustfmt::skip]
static TABLE: [Row; 16] = [
    //     type                name    id  bytes  min
    float(WeightType::F32,    "f32",     0,   4,        |b| float::load_f32(arr(b))),
    float(WeightType::F16,    "f16",     1,   2,        |b| float::load_f16(arr(b))),
    float(WeightType::BF16,   "bf16",   30,   2,        |b| float::load_bf16(arr(b))),
    small(WeightType::Q4_0,   "q4_0",    2,  18, false, |b| legacy::unpack_q4_0(arr(b))),
    small(WeightType::Q4_1,   "q4_1",    3,  20, true,  |b| legacy::unpack_q4_1(arr(b))),
    small(WeightType::Q5_0,   "q5_0",    6,  22, false, |b| legacy::unpack_q5_0(arr(b))),
    small(WeightType::Q5_1,   "q5_1",    7,  24, true,  |b| legacy::unpack_q5_1(arr(b))),
    small(WeightType::Q8_0,   "q8_0",    8,  34, false, |b| legacy::unpack_q8_0(arr(b))),
    superb(WeightType::Q2_K,  "q2_k",   10,  84, true,  |b| k::unpack_q2_k(arr(b))),
    superb(WeightType::Q3_K,  "q3_k",   11, 110, false, |b| k::unpack_q3_k(arr(b))),
    superb(WeightType::Q4_K,  "q4_k",   12, 144, true,  |b| k::unpack_q4_k(arr(b))),
    superb(WeightType::Q5_K,  "q5_k",   13, 176, true,  |b| k::unpack_q5_k(arr(b))),
    superb(WeightType::Q6_K,  "q6_k",   14, 210, false, |b| k::unpack_q6_k(arr(b))),
    small(WeightType::IQ4_NL, "iq4_nl", 20,  18, false, |b| iq::unpack_iq4_nl(arr(b))),
    superb(WeightType::IQ4_XS, "iq4_xs", 23, 136, false, |b| iq::unpack_iq4_xs(arr(b))),
    small(WeightType::MXFP4,  "mxfp4",  39,  17, false, |b| iq::unpack_mxfp4(arr(b))),
];

impl WeightType {
    /// Every type, in the order of the table.
    pub const ALL: [Self; 16] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2_K,
        Self::Q3_K,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
        Self::IQ4_NL,
        Self::IQ4_XS,
        Self::MXFP4,
    ];

    /// The type with this number in a GGUF tensor header; `None` when it is not one of ours.
    pub fn from_ggml_id(id: u32) -> Option<Self> {
        TABLE.iter().find(|r| r.ggml_id == id).map(|r| r.ty)
    }

    /// The type of this name, in lower or upper case.
    pub fn from_name(name: &str) -> Option<Self> {
        TABLE.iter().find(|r| r.name.eq_ignore_ascii_case(name)).map(|r| r.ty)
    }

    /// Its number in a GGUF tensor header.
    pub fn ggml_id(self) -> u32 {
        self.entry().ggml_id
    }

    /// Its name, lower case.
    pub fn name(self) -> &'static str {
        self.entry().name
    }

    /// Values a block: 1, 32 or 256.
    pub fn block_len(self) -> usize {
        self.entry().block_len
    }

    /// Bytes a block.
    pub fn block_bytes(self) -> usize {
        self.entry().block_bytes
    }

    /// Bytes of a row of `n` values; `None` when blocks do not divide it or the number does not fit.
    pub fn row_bytes(self, n: usize) -> Option<usize> {
        let row = self.entry();
        n.is_multiple_of(row.block_len).then(|| (n / row.block_len).checked_mul(row.block_bytes))?
    }

    /// The form of the activations it meets.
    pub fn act(self) -> ActKind {
        match self.codec() {
            Codec::Float { .. } => ActKind::F32,
            Codec::Small { .. } => ActKind::Block32,
            Codec::Super { .. } => ActKind::Block256,
        }
    }

    /// Whether its blocks carry a minimum, so that a dot product takes the second multiply-add.
    pub fn has_min(self) -> bool {
        matches!(self.codec(), Codec::Small { has_min: true, .. } | Codec::Super { has_min: true, .. })
    }

    pub(crate) fn codec(self) -> &'static Codec {
        &self.entry().codec
    }

    fn entry(self) -> &'static Row {
        &TABLE[self as usize]
    }
}

impl fmt::Display for WeightType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The bytes of one block; the table's block size and the function's must be one number, which a test checks.
fn arr<const N: usize>(bytes: &[u8]) -> &[u8; N] {
    bytes.try_into().expect("a block is as long as the table says")
}

/// The f16 at `b[at..at + 2]`, exactly.
fn f16_at(b: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        for (i, t) in WeightType::ALL.into_iter().enumerate() {
            assert_eq!(t as usize, i);
            assert_eq!(TABLE[i].ty, t);
            assert_eq!(WeightType::from_ggml_id(t.ggml_id()), Some(t));
            assert_eq!(WeightType::from_name(t.name()), Some(t));
        }
        assert_eq!(WeightType::from_ggml_id(4), None);
    }

    #[test]
    fn rows_are_whole_blocks() {
        for (t, n, bytes) in [
            (WeightType::Q4_K, 2048, Some(1152)),
            (WeightType::Q4_K, 704, None),
            (WeightType::Q8_0, 704, Some(748)),
            (WeightType::F16, 3, Some(6)),
            (WeightType::F32, usize::MAX, None),
            (WeightType::MXFP4, 0, Some(0)),
        ] {
            assert_eq!(t.row_bytes(n), bytes, "{t} {n}");
        }
    }
}
