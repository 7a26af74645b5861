//! The table of weight types. A new type is a variant, a row of `TABLE` and its block in a family's file.

pub mod float;
pub mod iq;
pub mod k;
pub mod legacy;

use std::fmt;

use crate::act::ActKind;
use crate::block::{Ints32, Ints256};
use Levels::{PowerOfTwo, Range, Table};
use WeightType as T;

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

/// How the bytes of a block become numbers, and how an encoder chooses them.
pub(crate) enum Codec {
    /// One value a block; both take any number of values.
    Float { load: fn(&[u8], &mut [f32]), store: fn(&[f32], &mut [u8]) },
    /// 32 values a block; `has_min`: the format adds `m`.
    Small { unpack: fn(&[u8]) -> Ints32, pack: fn(&Ints32, &mut [u8]), levels: Levels, has_min: bool },
    /// 256 values a block; `has_min`: the format subtracts `dmin·mins`.
    Super { unpack: fn(&[u8]) -> Ints256, pack: fn(&Ints256, &mut [u8]), levels: Levels, sub: Sub, has_min: bool },
}

/// The integers that a value can become.
pub(crate) enum Levels {
    /// Every integer from the first to the second.
    Range(i8, i8),
    /// The values of a table.
    Table(&'static [i8; 16]),
    /// The values of a table, and the scale is e8m0.
    PowerOfTwo(&'static [i8; 16]),
}

/// The integer sub-scales of a super-block: one per `len` values, in `lo..=hi`. Minimums are in `0..=hi`.
pub(crate) struct Sub {
    pub len: usize,
    pub lo: i8,
    pub hi: i8,
}

struct Row {
    ty: WeightType,
    name: &'static str,
    ggml_id: u32,
    block_len: usize,
    block_bytes: usize,
    codec: Codec,
}

/// Makes a codec's slices of one block into the typed arrays of the format's own functions.
macro_rules! codec {
    (Float, $load:path, $store:path) => {
        Codec::Float {
            load: |b, x| b.as_chunks().0.iter().zip(x).for_each(|(b, x)| *x = $load(b)),
            store: |x, b| b.as_chunks_mut().0.iter_mut().zip(x).for_each(|(b, &x)| *b = $store(x)),
        }
    };
    ($shape:ident, $unpack:path, $pack:path, $($choice:tt)*) => {
        Codec::$shape { unpack: |b| $unpack(arr(b)), pack: |w, b| b.copy_from_slice(&$pack(w)), $($choice)* }
    };
}

const fn row(ty: WeightType, name: &'static str, ggml_id: u32, block_bytes: usize, codec: Codec) -> Row {
    let block_len = match codec {
        Codec::Float { .. } => 1,
        Codec::Small { .. } => 32,
        Codec::Super { .. } => 256,
    };
    Row { ty, name, ggml_id, block_len, block_bytes, codec }
}

/// One row a type, in the order of the enum.
#[rustfmt::skip]
static TABLE: [Row; 16] = [
    //  type       name     id bytes
    row(T::F32,    "f32",    0,   4, codec!(Float, float::load_f32, float::store_f32)),
    row(T::F16,    "f16",    1,   2, codec!(Float, float::load_f16, float::store_f16)),
    row(T::BF16,   "bf16",  30,   2, codec!(Float, float::load_bf16, float::store_bf16)),
    row(T::Q4_0,   "q4_0",   2,  18, codec!(Small, legacy::unpack_q4_0, legacy::pack_q4_0, levels: Range(-8, 7), has_min: false)),
    row(T::Q4_1,   "q4_1",   3,  20, codec!(Small, legacy::unpack_q4_1, legacy::pack_q4_1, levels: Range(0, 15), has_min: true)),
    row(T::Q5_0,   "q5_0",   6,  22, codec!(Small, legacy::unpack_q5_0, legacy::pack_q5_0, levels: Range(-16, 15), has_min: false)),
    row(T::Q5_1,   "q5_1",   7,  24, codec!(Small, legacy::unpack_q5_1, legacy::pack_q5_1, levels: Range(0, 31), has_min: true)),
    row(T::Q8_0,   "q8_0",   8,  34, codec!(Small, legacy::unpack_q8_0, legacy::pack_q8_0, levels: Range(-127, 127), has_min: false)),
    row(T::Q2_K,   "q2_k",  10,  84, codec!(Super, k::unpack_q2_k, k::pack_q2_k, levels: Range(0, 3), sub: Sub { len: 16, lo: 0, hi: 15 }, has_min: true)),
    row(T::Q3_K,   "q3_k",  11, 110, codec!(Super, k::unpack_q3_k, k::pack_q3_k, levels: Range(-4, 3), sub: Sub { len: 16, lo: -32, hi: 31 }, has_min: false)),
    row(T::Q4_K,   "q4_k",  12, 144, codec!(Super, k::unpack_q4_k, k::pack_q4_k, levels: Range(0, 15), sub: Sub { len: 32, lo: 0, hi: 63 }, has_min: true)),
    row(T::Q5_K,   "q5_k",  13, 176, codec!(Super, k::unpack_q5_k, k::pack_q5_k, levels: Range(0, 31), sub: Sub { len: 32, lo: 0, hi: 63 }, has_min: true)),
    row(T::Q6_K,   "q6_k",  14, 210, codec!(Super, k::unpack_q6_k, k::pack_q6_k, levels: Range(-32, 31), sub: Sub { len: 16, lo: -128, hi: 127 }, has_min: false)),
    row(T::IQ4_NL, "iq4_nl", 20, 18, codec!(Small, iq::unpack_iq4_nl, iq::pack_iq4_nl, levels: Table(&iq::IQ4_VALUES), has_min: false)),
    row(T::IQ4_XS, "iq4_xs", 23, 136, codec!(Super, iq::unpack_iq4_xs, iq::pack_iq4_xs, levels: Table(&iq::IQ4_VALUES), sub: Sub { len: 32, lo: -32, hi: 31 }, has_min: false)),
    row(T::MXFP4,  "mxfp4", 39,  17, codec!(Small, iq::unpack_mxfp4, iq::pack_mxfp4, levels: PowerOfTwo(&iq::E2M1_DOUBLED), has_min: false)),
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
    half::f16::from_le_bytes([b[at], b[at + 1]]).to_f32_const()
}

/// Puts the f16 `d` at `b[at..at + 2]`; a `d` that no f16 equals is rounded.
fn put_f16(b: &mut [u8], at: usize, d: f32) {
    b[at..at + 2].copy_from_slice(&half::f16::from_f32(d).to_le_bytes());
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
