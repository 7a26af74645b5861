//! The table of weight types. A new type is a variant, a row of `TABLE` and its block in a family's file.

pub mod float;
pub mod grid;
mod grid_tables;
pub mod iq;
pub mod k;
pub mod layout;
pub mod legacy;
pub mod planar;
pub mod small_float;

use std::fmt;

use crate::act::ActKind;
use crate::block::{Ints32, Ints256};
use crate::encode;
use crate::planes::PlaneBytes;
use Levels::{PowerOfTwo, Range, Table};
use WeightType as T;
use planar::Affine;

/// A weight type. The names of GGUF's types are GGUF's, in lower case.
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
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    IQ1_S,
    IQ1_M,
    TQ1_0,
    TQ2_0,
    NVFP4,
    /// MXFP4 as MLX files and the original gpt-oss hold it: codes in one plane, scales in another.
    MXFP4_PLANAR,
    /// 8-bit floats with a scale for each 128 values of a row: codes in one plane, scales in another.
    F8_E4M3,
    /// NVFP4 whose matrix has a scale besides, which is stored for each block in a plane.
    NVFP4_SCALED,
    /// The affine types of MLX files.
    Affine(Affine),
}

/// How the bytes of a block become numbers, and how an encoder chooses them.
#[derive(Clone, Copy)]
pub(crate) enum Codec {
    /// One value a block; both take any number of values.
    Float { load: fn(&[u8], &mut [f32]), store: fn(&[f32], &mut [u8]) },
    /// 32 values a block; `has_min`: the format adds `m`.
    Small { unpack: fn(&[u8]) -> Ints32, pack: fn(&Ints32, &mut [u8]), levels: Levels, has_min: bool },
    /// 256 values a block; `has_min`: the format subtracts `dmin·mins`.
    Super { unpack: fn(&[u8]) -> Ints256, pack: fn(&Ints256, &mut [u8]), levels: Levels, sub: Sub, has_min: bool },
    /// 256 values a block, with sub-scales: code books and ternary digits.
    Grid { unpack: fn(&[u8]) -> Ints256, encode: fn(&encode::Block<256>, &mut encode::Room, &mut [u8]) },
    /// 64 values a block, which are numbers exact in f32; an encoder is given the weights of errors too.
    Fp4 { decode: fn(&[u8], &mut [f32; 64]), encode: fn(&[f32; 64], &[f32; 64], &mut [u8]) },
    /// MXFP4 in planes.
    Mxfp4Planar,
    /// 8-bit floats in planes.
    Float8,
    /// NVFP4 and scales in planes.
    Fp4Scaled,
    /// Groups in planes.
    Affine(Affine),
}

/// The integers that a value can become.
#[derive(Clone, Copy)]
pub(crate) enum Levels {
    /// Every integer from the first to the second.
    Range(i16, i16),
    /// The values of a table.
    Table(&'static Nearest),
    /// The values of a table, and the scale is e8m0.
    PowerOfTwo(&'static Nearest),
}

/// The values of a table of sixteen, by what they are nearest to.
pub(crate) struct Nearest {
    /// The smallest.
    pub lo: f32,
    /// The largest.
    pub hi: f32,
    /// Distance of the two that lie outermost.
    pub outer_gap: f32,
    /// The value nearest to the numbers from `i / 2 - 128` on, half a step far: the middle of two integers is a
    /// multiple of a half, so that all numbers of a cell have the same.
    pub of: [f32; 512],
}

impl Nearest {
    pub const fn new(values: &[i8; 16]) -> Self {
        let mut of = [0.0; 512];
        let mut i = 0;
        while i < 512 {
            // Twice the middle of the cell, doubled once more to stay an integer.
            let at = 2 * (i as i32 - 256) + 1;
            let (mut best, mut k) = (i32::MAX, 0);
            while k < 16 {
                let far = (at - 4 * values[k] as i32).abs();
                if far < best {
                    (best, of[i]) = (far, values[k] as f32);
                }
                k += 1;
            }
            i += 1;
        }
        let (mut outer_gap, mut k) = (0.0, 1);
        while k < 512 {
            if of[k] - of[k - 1] > outer_gap {
                outer_gap = of[k] - of[k - 1];
            }
            k += 1;
        }
        Self { lo: of[0], hi: of[511], outer_gap, of }
    }
}

/// The integer sub-scales of a super-block: one per `len` values, in `lo..=hi`. Minimums are in `0..=hi`.
#[derive(Clone, Copy)]
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

/// Makes a codec's slices of one block into the typed arrays of the format's own functions. Of a format with integers
/// then come its levels, of a super-block its sub-scales, and whether it has a minimum.
macro_rules! codec {
    (Float, $load:path, $store:path) => {
        Codec::Float {
            load: |b, x| b.as_chunks().0.iter().zip(x).for_each(|(b, x)| *x = $load(b)),
            store: |x, b| b.as_chunks_mut().0.iter_mut().zip(x).for_each(|(b, &x)| *b = $store(x)),
        }
    };
    (Grid, $unpack:path, $encode:path) => {
        Codec::Grid {
            unpack: |b| $unpack(arr(b)),
            encode: |x, room, b| $encode(x, room, b.try_into().expect("a block is as long as the table says")),
        }
    };
    (Fp4, $decode:path, $encode:path) => {
        Codec::Fp4 {
            decode: |b, x| $decode(arr(b), x),
            encode: |x, w, b| $encode(x, w, b.try_into().expect("a block is as long as the table says")),
        }
    };
    ($unpack:path, $pack:path, $levels:expr, $has_min:literal) => {
        Codec::Small {
            unpack: |b| $unpack(arr(b)),
            pack: |w, b| b.copy_from_slice(&$pack(w)),
            levels: $levels,
            has_min: $has_min,
        }
    };
    ($unpack:path, $pack:path, $levels:expr, ($len:literal, $lo:literal, $hi:literal), $has_min:literal) => {
        Codec::Super {
            unpack: |b| $unpack(arr(b)),
            pack: |w, b| b.copy_from_slice(&$pack(w)),
            levels: $levels,
            sub: Sub { len: $len, lo: $lo, hi: $hi },
            has_min: $has_min,
        }
    };
}

const fn row(ty: WeightType, name: &'static str, ggml_id: u32, block_bytes: usize, codec: Codec) -> Row {
    let block_len = match codec {
        Codec::Float { .. } => 1,
        Codec::Small { .. } => 32,
        Codec::Super { .. } | Codec::Grid { .. } => 256,
        Codec::Fp4 { .. } => 64,
        Codec::Mxfp4Planar | Codec::Float8 | Codec::Fp4Scaled | Codec::Affine(_) => panic!("planar types have no row"),
    };
    Row { ty, name, ggml_id, block_len, block_bytes, codec }
}

/// One row per type of GGUF files, in the order of the enum.
#[rustfmt::skip]
static TABLE: [Row; 26] = [
    //  type       name     id bytes
    row(T::F32,    "f32",    0,   4, codec!(Float, float::load_f32, float::store_f32)),
    row(T::F16,    "f16",    1,   2, Codec::Float { load: float::load_f16s, store: float::store_f16s }),
    row(T::BF16,   "bf16",  30,   2, codec!(Float, float::load_bf16, float::store_bf16)),
    row(T::Q4_0,   "q4_0",   2,  18, codec!(legacy::unpack_q4_0, legacy::pack_q4_0, Range(-8, 7), false)),
    row(T::Q4_1,   "q4_1",   3,  20, codec!(legacy::unpack_q4_1, legacy::pack_q4_1, Range(0, 15), true)),
    row(T::Q5_0,   "q5_0",   6,  22, codec!(legacy::unpack_q5_0, legacy::pack_q5_0, Range(-16, 15), false)),
    row(T::Q5_1,   "q5_1",   7,  24, codec!(legacy::unpack_q5_1, legacy::pack_q5_1, Range(0, 31), true)),
    row(T::Q8_0,   "q8_0",   8,  34, codec!(legacy::unpack_q8_0, legacy::pack_q8_0, Range(-127, 127), false)),
    row(T::Q2_K,   "q2_k",  10,  layout::Q2_K.bytes, codec!(k::unpack_q2_k, k::pack_q2_k, Range(0, 3), (16, 0, 15), true)),
    row(T::Q3_K,   "q3_k",  11, layout::Q3_K.bytes, codec!(k::unpack_q3_k, k::pack_q3_k, Range(-4, 3), (16, -32, 31), false)),
    row(T::Q4_K,   "q4_k",  12, layout::Q4_K.bytes, codec!(k::unpack_q4_k, k::pack_q4_k, Range(0, 15), (32, 0, 63), true)),
    row(T::Q5_K,   "q5_k",  13, layout::Q5_K.bytes, codec!(k::unpack_q5_k, k::pack_q5_k, Range(0, 31), (32, 0, 63), true)),
    row(T::Q6_K,   "q6_k",  14, layout::Q6_K.bytes, codec!(k::unpack_q6_k, k::pack_q6_k, Range(-32, 31), (16, -128, 127), false)),
    row(T::IQ4_NL, "iq4_nl", 20, 18, codec!(iq::unpack_iq4_nl, iq::pack_iq4_nl, Table(&iq::IQ4_NEAREST), false)),
    row(T::IQ4_XS, "iq4_xs", 23, layout::IQ4_XS.bytes, codec!(iq::unpack_iq4_xs, iq::pack_iq4_xs, Table(&iq::IQ4_NEAREST),
        (32, -32, 31), false)),
    row(T::MXFP4,  "mxfp4", 39,  17, codec!(iq::unpack_mxfp4, iq::pack_mxfp4, PowerOfTwo(&iq::E2M1_NEAREST), false)),
    row(T::IQ2_XXS, "iq2_xxs", 16,  layout::IQ2_XXS.bytes, codec!(Grid, grid::unpack_iq2_xxs, encode::grid::iq2_xxs)),
    row(T::IQ2_XS,  "iq2_xs",  17,  layout::IQ2_XS.bytes, codec!(Grid, grid::unpack_iq2_xs, encode::grid::iq2_xs)),
    row(T::IQ2_S,   "iq2_s",   22,  layout::IQ2_S.bytes, codec!(Grid, grid::unpack_iq2_s, encode::grid::iq2_s)),
    row(T::IQ3_XXS, "iq3_xxs", 18,  layout::IQ3_XXS.bytes, codec!(Grid, grid::unpack_iq3_xxs, encode::grid::iq3_xxs)),
    row(T::IQ3_S,   "iq3_s",   21, layout::IQ3_S.bytes, codec!(Grid, grid::unpack_iq3_s, encode::grid::iq3_s)),
    row(T::IQ1_S,   "iq1_s",   19,  layout::IQ1_S.bytes, codec!(Grid, grid::unpack_iq1_s, encode::grid::iq1_s)),
    row(T::IQ1_M,   "iq1_m",   29,  layout::IQ1_M.bytes, codec!(Grid, grid::unpack_iq1_m, encode::grid::iq1_m)),
    row(T::TQ1_0,   "tq1_0",   34,  layout::TQ1_0.bytes, codec!(Grid, grid::unpack_tq1_0, encode::grid::tq1_0)),
    row(T::TQ2_0,   "tq2_0",   35,  layout::TQ2_0.bytes, codec!(Grid, grid::unpack_tq2_0, encode::grid::tq2_0)),
    row(T::NVFP4,  "nvfp4",   40,  36, codec!(Fp4, small_float::decode_nvfp4, small_float::encode_nvfp4)),
];

impl WeightType {
    /// The types that GGUF files can hold, in the order of the table.
    pub const GGUF: [Self; TABLE.len()] = [
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
        Self::IQ2_XXS,
        Self::IQ2_XS,
        Self::IQ2_S,
        Self::IQ3_XXS,
        Self::IQ3_S,
        Self::IQ1_S,
        Self::IQ1_M,
        Self::TQ1_0,
        Self::TQ2_0,
        Self::NVFP4,
    ];

    /// Every type: those of GGUF files, then those of folders.
    pub const ALL: [Self; Self::GGUF.len() + 3 + Affine::COUNT] = {
        let mut all = [Self::MXFP4_PLANAR; _];
        let mut i = 0;
        while i < all.len() {
            if i < Self::GGUF.len() {
                all[i] = Self::GGUF[i];
            } else if i == Self::GGUF.len() + 1 {
                all[i] = Self::F8_E4M3;
            } else if i == Self::GGUF.len() + 2 {
                all[i] = Self::NVFP4_SCALED;
            } else if i > Self::GGUF.len() {
                all[i] = Self::Affine(Affine::nth(i - Self::GGUF.len() - 3));
            }
            i += 1;
        }
        all
    };

    /// Returns its index in [`WeightType::ALL`].
    pub fn index(self) -> usize {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::BF16 => 2,
            Self::Q4_0 => 3,
            Self::Q4_1 => 4,
            Self::Q5_0 => 5,
            Self::Q5_1 => 6,
            Self::Q8_0 => 7,
            Self::Q2_K => 8,
            Self::Q3_K => 9,
            Self::Q4_K => 10,
            Self::Q5_K => 11,
            Self::Q6_K => 12,
            Self::IQ4_NL => 13,
            Self::IQ4_XS => 14,
            Self::MXFP4 => 15,
            Self::IQ2_XXS => 16,
            Self::IQ2_XS => 17,
            Self::IQ2_S => 18,
            Self::IQ3_XXS => 19,
            Self::IQ3_S => 20,
            Self::IQ1_S => 21,
            Self::IQ1_M => 22,
            Self::TQ1_0 => 23,
            Self::TQ2_0 => 24,
            Self::NVFP4 => 25,
            Self::MXFP4_PLANAR => 26,
            Self::F8_E4M3 => 27,
            Self::NVFP4_SCALED => 28,
            Self::Affine(a) => 29 + a.place(),
        }
    }

    /// Returns the type with this number in a GGUF tensor header; `None` when it is not one of ours.
    pub fn from_ggml_id(id: u32) -> Option<Self> {
        TABLE.iter().find(|r| r.ggml_id == id).map(|r| r.ty)
    }

    /// Returns its number in a GGUF tensor header; `None` for a planar type, which a GGUF file cannot hold.
    pub fn ggml_id(self) -> Option<u32> {
        self.entry().map(|row| row.ggml_id)
    }

    /// Returns its name, lower case.
    pub fn name(self) -> &'static str {
        match self {
            Self::Affine(a) => a.name(),
            Self::F8_E4M3 => "f8_e4m3",
            Self::NVFP4_SCALED => "nvfp4_scaled",
            _ => self.entry().map_or("mxfp4_planar", |row| row.name),
        }
    }

    /// Values of a block (1, 32, 64, 128 or 256), or of a group of an affine type; a row is whole blocks.
    pub fn block_len(self) -> usize {
        match self {
            Self::Affine(a) => a.group(),
            Self::F8_E4M3 => small_float::F8_GROUP,
            Self::NVFP4_SCALED => 64,
            _ => self.entry().map_or(32, |row| row.block_len),
        }
    }

    /// Bytes of a block in plane `q`.
    pub fn block_bytes(self) -> usize {
        self.block_planes().q
    }

    fn block_planes(self) -> PlaneBytes {
        match self {
            Self::Affine(a) => a.group_bytes(),
            Self::F8_E4M3 => small_float::F8_BYTES,
            Self::NVFP4_SCALED => small_float::NVFP4_SCALED_BYTES,
            _ => {
                self.entry().map_or(planar::MXFP4_BYTES, |row| PlaneBytes { q: row.block_bytes, ..Default::default() })
            }
        }
    }

    /// Bytes of a row of `n` values in plane `q`, which is all of it but for planar types; `None` when blocks (or
    /// groups) do not divide it or the number does not fit.
    pub fn row_bytes(self, n: usize) -> Option<usize> {
        Some(self.plane_bytes(n)?.q)
    }

    /// Bytes of a row of `n` values in every plane; `None` when blocks (or groups) do not divide it or their sum does
    /// not fit.
    pub fn plane_bytes(self, n: usize) -> Option<PlaneBytes> {
        n.is_multiple_of(self.block_len()).then(|| self.block_planes().times(n / self.block_len()))?
    }

    /// Returns the form of the activations it is multiplied with.
    pub fn act(self) -> ActKind {
        match self.codec() {
            Codec::Float { .. } | Codec::Fp4 { .. } | Codec::Fp4Scaled | Codec::Float8 => ActKind::F32,
            Codec::Small { .. } if self == Self::Q8_0 => ActKind::Block32,
            Codec::Affine(a) if a.bits() == 8 => ActKind::Block32,
            Codec::Small { .. } | Codec::Mxfp4Planar | Codec::Affine(_) => ActKind::Byte32,
            Codec::Super { .. } | Codec::Grid { .. } => ActKind::Block256,
        }
    }

    /// Returns whether its blocks carry a minimum, so that a dot product takes the second multiply-add.
    pub fn has_min(self) -> bool {
        match self.codec() {
            Codec::Small { has_min, .. } | Codec::Super { has_min, .. } => has_min,
            Codec::Affine(_) => true,
            Codec::Float { .. } | Codec::Fp4 { .. } | Codec::Grid { .. } => false,
            Codec::Mxfp4Planar | Codec::Float8 | Codec::Fp4Scaled => false,
        }
    }

    /// Returns a power of two that its scales are multiplied with: 1, but for types with code books.
    pub const fn factor(self) -> f32 {
        match self {
            Self::IQ2_XXS | Self::IQ2_XS | Self::IQ2_S | Self::IQ1_S | Self::IQ1_M => 0.125,
            Self::IQ3_XXS => 0.25,
            _ => 1.0,
        }
    }

    pub(crate) fn codec(self) -> Codec {
        match self {
            Self::Affine(a) => Codec::Affine(a),
            Self::F8_E4M3 => Codec::Float8,
            Self::NVFP4_SCALED => Codec::Fp4Scaled,
            _ => self.entry().map_or(Codec::Mxfp4Planar, |row| row.codec),
        }
    }

    /// Returns its row of the table; planar types have none.
    fn entry(self) -> Option<&'static Row> {
        TABLE.get(self.index())
    }
}

impl fmt::Display for WeightType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Returns the bytes of one block; a test checks that the block sizes of the table and of the functions agree.
fn arr<const N: usize>(bytes: &[u8]) -> &[u8; N] {
    bytes.try_into().expect("a block is as long as the table says")
}

/// Returns the f16 at `b[at..at + 2]`, exactly.
fn f16_at(b: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([b[at], b[at + 1]]).to_f32_const()
}

/// Puts the f16 `d` at `b[at..at + 2]`; a `d` that no f16 equals is rounded.
pub(crate) fn put_f16(b: &mut [u8], at: usize, d: f32) {
    b[at..at + 2].copy_from_slice(&half::f16::from_f32(d).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::planar::ScaleType;
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        for (i, t) in WeightType::ALL.into_iter().enumerate() {
            assert_eq!(t.index(), i);
            if let Some(id) = t.ggml_id() {
                assert_eq!((TABLE[i].ty, WeightType::from_ggml_id(id)), (t, Some(t)));
            }
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
        let planes = |bits, group, scales, n| WeightType::Affine(Affine::new(bits, group, scales)?).plane_bytes(n);
        for (planes, want) in [
            (planes(4, 64, ScaleType::BF16, 704), Some((352, 22, 22))),
            (planes(3, 128, ScaleType::F32, 256), Some((96, 8, 8))),
            (planes(8, 128, ScaleType::F16, 192), None),
            (planes(8, 32, ScaleType::F16, usize::MAX / 32 * 32), None),
            (WeightType::MXFP4_PLANAR.plane_bytes(96), Some((48, 3, 0))),
            (WeightType::MXFP4_PLANAR.plane_bytes(48), None),
        ] {
            assert_eq!(planes.map(|p| (p.q, p.scales, p.biases)), want);
        }
    }
}
