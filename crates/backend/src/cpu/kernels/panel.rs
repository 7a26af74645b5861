//! The integer panel: 16 rows by up to 256 values of any quantised type, unpacked once and used for all columns.
//!
//! Sub-scales are folded into the integers (`q·sc` fits i16 for every type), so from here on all types of one block
//! length are alike and one micro-kernel an instruction set serves them all.

use quant::WeightType;
use quant::block::{Ints32, Ints256};
use quant::types::{iq, k, legacy};

/// Rows of a tile: lanes of the micro-kernels.
pub(super) const ROWS: usize = 16;
/// Values of a row that a panel holds: one super-block or eight 32-blocks.
pub(super) const CHUNK: usize = 256;

/// `w` is `[CHUNK/2][ROWS][2]`: pair `2i` holds values `4i, 4i + 2` of every row, pair `2i + 1` holds `4i + 1, 4i + 3`,
/// the order of the wide activations.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(super) struct Panel {
    pub w: [i16; ROWS * CHUNK],
    /// Scale of each block (one of eight 32-blocks, or the super-block at 0), `[block][row]`.
    pub d: [[f32; ROWS]; 8],
    /// What multiplies the second sum, sign included (`-dmin`, or `+m` for 32-blocks), `[block][row]`.
    pub m: [[f32; ROWS]; 8],
    /// Integer minimums of a super-block's 16-groups in pairs, `[8][row][2]`.
    pub mins: [[[i16; 2]; ROWS]; 8],
}

impl Panel {
    pub fn new() -> Box<Panel> {
        Box::new(Panel { w: [0; ROWS * CHUNK], d: [[0.0; ROWS]; 8], m: [[0.0; ROWS]; 8], mins: [[[0; 2]; ROWS]; 8] })
    }
}

/// Unpacks `blocks` blocks (at most eight 32-blocks or one super-block) of 16 rows; `rows` point at the first of them.
/// The rows that come after these lie `next` bytes on and may be asked for ahead.
///
/// # Safety
/// Every pointer of `rows` is readable for `blocks` blocks of the function's type, and the machine has the
/// instruction set that the function is written for.
pub(super) type UnpackFn = unsafe fn(rows: &[*const u8; ROWS], blocks: usize, next: usize, panel: &mut Panel);

/// Index in [`Panel::w`] of value `i` of row `r`.
fn at(i: usize, r: usize) -> usize {
    let pair = i / 4 * 2 + i % 2;
    (pair * ROWS + r) * 2 + i % 4 / 2
}

/// Unpacks through the reference decoders; for the types without a kernel of their own.
pub(super) fn plain(t: WeightType) -> UnpackFn {
    match t {
        WeightType::Q4_0 => |r, n, _, p| small(r, n, p, legacy::unpack_q4_0),
        WeightType::Q4_1 => |r, n, _, p| small(r, n, p, legacy::unpack_q4_1),
        WeightType::Q5_0 => |r, n, _, p| small(r, n, p, legacy::unpack_q5_0),
        WeightType::Q5_1 => |r, n, _, p| small(r, n, p, legacy::unpack_q5_1),
        WeightType::Q8_0 => |r, n, _, p| small(r, n, p, legacy::unpack_q8_0),
        WeightType::IQ4_NL => |r, n, _, p| small(r, n, p, iq::unpack_iq4_nl),
        WeightType::MXFP4 => |r, n, _, p| small(r, n, p, iq::unpack_mxfp4),
        WeightType::Q2_K => |r, _, _, p| large(r, p, k::unpack_q2_k),
        WeightType::Q3_K => |r, _, _, p| large(r, p, k::unpack_q3_k),
        WeightType::Q4_K => |r, _, _, p| large(r, p, k::unpack_q4_k),
        WeightType::Q5_K => |r, _, _, p| large(r, p, k::unpack_q5_k),
        WeightType::Q6_K => |r, _, _, p| large(r, p, k::unpack_q6_k),
        WeightType::IQ4_XS => |r, _, _, p| large(r, p, iq::unpack_iq4_xs),
        _ => unreachable!("floats have no integer panel, planar types none yet"),
    }
}

fn small<const N: usize>(rows: &[*const u8; ROWS], blocks: usize, panel: &mut Panel, unpack: fn(&[u8; N]) -> Ints32) {
    for (r, &row) in rows.iter().enumerate() {
        for b in 0..blocks {
            // SAFETY: `UnpackFn`: the row has `blocks` blocks of N bytes.
            let ints = unpack(unsafe { &*row.add(b * N).cast::<[u8; N]>() });
            panel.d[b][r] = ints.d;
            panel.m[b][r] = ints.m;
            for (i, &q) in ints.q.iter().enumerate() {
                panel.w[at(32 * b + i, r)] = i16::from(q);
            }
        }
    }
}

fn large<const N: usize>(rows: &[*const u8; ROWS], panel: &mut Panel, unpack: fn(&[u8; N]) -> Ints256) {
    for (r, &row) in rows.iter().enumerate() {
        // SAFETY: `UnpackFn`: the row has a super-block of N bytes.
        let ints = unpack(unsafe { &*row.cast::<[u8; N]>() });
        panel.d[0][r] = ints.d;
        panel.m[0][r] = -ints.dmin;
        for (i, &q) in ints.q.iter().enumerate() {
            panel.w[at(i, r)] = i16::from(q) * i16::from(ints.sc[i / 16]);
        }
        for g in 0..16 {
            panel.mins[g / 2][r][g % 2] = i16::from(ints.mins[g]);
        }
    }
}
