//! The integer panel: 16 rows by up to 256 values of any quantised type, unpacked once and used for all columns.
//!
//! It has two forms. Where activations have 8 bits it is *bytes*, those of super-blocks with their sub-scales beside
//! them: products of bytes are twice as fast as any others, and a panel takes half the work to make. Where activations
//! have 16 bits it is 16-bit integers, and on AVX2, whose products of bytes have no room for them, where weights have
//! 8. From here on types of one form are alike, and one micro-kernel of an instruction set serves them all.

use quant::act::ActKind;
use quant::block::{Ints32, Ints256};
use quant::types::{grid, iq, k, legacy, planar};
use quant::{Planes, WeightType};

use super::RowSet;

/// Rows of a tile: lanes of the micro-kernels.
pub(super) const ROWS: usize = 16;
/// Values of a row that a panel holds: one super-block or eight 32-blocks.
pub(super) const CHUNK: usize = 256;

/// Weights are in `bytes` and `scales`, or in `w`.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(super) struct Panel {
    /// `[CHUNK/4][ROWS][4]`: four values of a row make a word. [`offset`] is added, so that none is negative.
    pub bytes: [u8; ROWS * CHUNK],
    /// Sub-scale of each 16-group of `bytes`, twice, as a pair of sums is multiplied with it, `[16][row][2]`. Of types
    /// that have one for 32 values ([`scale_len`]) only the even ones are set.
    pub scales: [[[i16; 2]; ROWS]; 16],
    /// `[CHUNK/2][ROWS][2]`: pair `2i` holds values `4i, 4i + 2` of every row, pair `2i + 1` holds `4i + 1, 4i + 3`,
    /// the order of the wide activations. Sub-scales of super-blocks are multiplied in.
    pub w: [i16; ROWS * CHUNK],
    /// Scale of each block (one of eight 32-blocks, or the super-block at 0), `[block][row]`.
    pub d: [[f32; ROWS]; 8],
    /// Factor of the activations' sums: the minimum of each 32-block, or `-dmin`.
    pub m: [[f32; ROWS]; 8],
    /// Minimums of the 16-groups of a super-block in pairs, `[group/2][row][2]`.
    pub mins: [[[i16; 2]; ROWS]; 8],
    /// NEON's form of `bytes`, `scales`, `w` and `mins`.
    #[cfg(target_arch = "aarch64")]
    pub neon: super::neon::Bytes,
}

impl Panel {
    pub fn new() -> Box<Panel> {
        let (bytes, scales) = ([0; ROWS * CHUNK], [[[0; 2]; ROWS]; 16]);
        Box::new(Panel {
            bytes,
            scales,
            w: [0; ROWS * CHUNK],
            d: [[0.0; ROWS]; 8],
            m: [[0.0; ROWS]; 8],
            mins: [[[0; 2]; ROWS]; 8],
            #[cfg(target_arch = "aarch64")]
            neon: super::neon::Bytes::ZERO,
        })
    }
}

/// Unpacks `blocks` blocks (at most eight 32-blocks or one super-block) of 16 rows from value `chunk` on, a multiple of
/// [`CHUNK`].
///
/// # Safety
/// The rows are readable and have these blocks of the function's type, and the machine has the instruction set that the
/// function is written for.
pub(super) type UnpackFn = unsafe fn(set: &RowSet, chunk: usize, blocks: usize, panel: &mut Panel);

/// Offset added to every stored value of a type so that it fits an unsigned byte.
pub(super) const fn offset(t: WeightType) -> u8 {
    match t {
        WeightType::Q4_0 | WeightType::Q5_0 | WeightType::MXFP4 | WeightType::MXFP4_PLANAR => 16,
        WeightType::IQ4_NL => 128,
        WeightType::Q3_K => 4,
        WeightType::Q6_K => 32,
        WeightType::IQ4_XS => 128,
        WeightType::IQ2_XXS | WeightType::IQ2_XS | WeightType::IQ2_S | WeightType::IQ3_XXS => 128,
        WeightType::IQ3_S | WeightType::IQ1_S | WeightType::IQ1_M => 16,
        WeightType::TQ1_0 | WeightType::TQ2_0 => 4,
        _ => 0,
    }
}

/// Largest byte in the panel of a type of 32-blocks with minimums.
#[cfg(target_arch = "x86_64")]
pub(super) const fn max_byte(t: WeightType) -> u8 {
    match t {
        WeightType::Q4_1 => 15,
        WeightType::Q5_1 => 31,
        WeightType::Affine(a) => u8::MAX >> (8 - a.bits()),
        _ => u8::MAX,
    }
}

/// Values that share a sub-scale of a super-block, 16 or 32.
pub(super) const fn scale_len(t: WeightType) -> usize {
    if matches!(t, WeightType::Q4_K | WeightType::Q5_K | WeightType::IQ4_XS) { 32 } else { 16 }
}

/// Index in [`Panel::bytes`] of value `i` of row `r`.
pub(super) fn byte_at(i: usize, r: usize) -> usize {
    (i / 4 * ROWS + r) * 4 + i % 4
}

/// Index in [`Panel::w`] of value `i` of row `r`.
fn at(i: usize, r: usize) -> usize {
    let pair = i / 4 * 2 + i % 2;
    (pair * ROWS + r) * 2 + i % 4 / 2
}

/// Unpacks through the reference decoders, for plain Rust.
pub(super) fn plain(t: WeightType) -> UnpackFn {
    match t {
        WeightType::Q4_0 => |s, c, n, p| small(s, c, n, p, legacy::unpack_q4_0),
        WeightType::Q4_1 => |s, c, n, p| small(s, c, n, p, legacy::unpack_q4_1),
        WeightType::Q5_0 => |s, c, n, p| small(s, c, n, p, legacy::unpack_q5_0),
        WeightType::Q5_1 => |s, c, n, p| small(s, c, n, p, legacy::unpack_q5_1),
        WeightType::Q8_0 => |s, c, n, p| small(s, c, n, p, legacy::unpack_q8_0),
        WeightType::IQ4_NL => |s, c, n, p| small(s, c, n, p, iq::unpack_iq4_nl),
        WeightType::MXFP4 => |s, c, n, p| small(s, c, n, p, iq::unpack_mxfp4),
        WeightType::Q2_K => |s, c, _, p| large(s, c, p, k::unpack_q2_k),
        WeightType::Q3_K => |s, c, _, p| large(s, c, p, k::unpack_q3_k),
        WeightType::Q4_K => |s, c, _, p| large(s, c, p, k::unpack_q4_k),
        WeightType::Q5_K => |s, c, _, p| large(s, c, p, k::unpack_q5_k),
        WeightType::Q6_K => |s, c, _, p| large(s, c, p, k::unpack_q6_k),
        WeightType::IQ4_XS => |s, c, _, p| large(s, c, p, iq::unpack_iq4_xs),
        WeightType::IQ2_XXS => |s, c, _, p| large(s, c, p, grid::unpack_iq2_xxs),
        WeightType::IQ2_XS => |s, c, _, p| large(s, c, p, grid::unpack_iq2_xs),
        WeightType::IQ2_S => |s, c, _, p| large(s, c, p, grid::unpack_iq2_s),
        WeightType::IQ3_XXS => |s, c, _, p| large(s, c, p, grid::unpack_iq3_xxs),
        WeightType::IQ3_S => |s, c, _, p| large(s, c, p, grid::unpack_iq3_s),
        WeightType::IQ1_S => |s, c, _, p| large(s, c, p, grid::unpack_iq1_s),
        WeightType::IQ1_M => |s, c, _, p| large(s, c, p, grid::unpack_iq1_m),
        WeightType::TQ1_0 => |s, c, _, p| large(s, c, p, grid::unpack_tq1_0),
        WeightType::TQ2_0 => |s, c, _, p| large(s, c, p, grid::unpack_tq2_0),
        WeightType::MXFP4_PLANAR => |s, c, n, p| blocks32(s, c, n, p, planar::unpack_mxfp4),
        WeightType::Affine(_) => |s, c, n, p| {
            let WeightType::Affine(a) = s.dtype else { unreachable!("the table gave this function to affine types") };
            blocks32(s, c, n, p, |row, b| a.unpack(row, b));
        },
        WeightType::F32 | WeightType::F16 | WeightType::BF16 => unreachable!("floats have no integer panel"),
        WeightType::F8_E4M3 | WeightType::NVFP4 | WeightType::NVFP4_SCALED => {
            unreachable!("short floats have no integer panel")
        }
    }
}

fn small<const N: usize>(set: &RowSet, chunk: usize, blocks: usize, panel: &mut Panel, f: fn(&[u8; N]) -> Ints32) {
    blocks32(set, chunk, blocks, panel, |row, b| f(&row.q.as_chunks().0[b]));
}

/// Blocks of 32 values; `unpack` is given a row and the index of a block in it.
fn blocks32<Q: Copy + Into<i16>>(
    set: &RowSet,
    chunk: usize,
    blocks: usize,
    panel: &mut Panel,
    unpack: impl Fn(Planes<'_>, usize) -> Ints32<Q>,
) {
    let (is_bytes, offset) = (set.dtype.act() == ActKind::Byte32, i16::from(offset(set.dtype)));
    for r in 0..ROWS {
        let row = set.planes.row(set.bytes, r.min(set.n - 1));
        for b in 0..blocks {
            let ints = unpack(row, chunk / 32 + b);
            panel.d[b][r] = ints.d;
            panel.m[b][r] = ints.m;
            for (i, q) in (32 * b..).zip(ints.q) {
                if is_bytes {
                    panel.bytes[byte_at(i, r)] = (q.into() + offset) as u8;
                } else {
                    panel.w[at(i, r)] = q.into();
                }
            }
        }
    }
}

fn large<const N: usize>(set: &RowSet, chunk: usize, panel: &mut Panel, unpack: fn(&[u8; N]) -> Ints256) {
    for r in 0..ROWS {
        let row = set.planes.row(set.bytes, r.min(set.n - 1));
        let ints = unpack(&row.q.as_chunks().0[chunk / 256]);
        panel.d[0][r] = ints.d;
        panel.m[0][r] = -ints.dmin;
        for (i, &q) in ints.q.iter().enumerate() {
            panel.bytes[byte_at(i, r)] = (q as u8).wrapping_add(offset(set.dtype));
        }
        for g in 0..16 {
            panel.scales[g][r] = [i16::from(ints.sc[g]); 2];
            panel.mins[g / 2][r][g % 2] = i16::from(ints.mins[g]);
        }
    }
}
