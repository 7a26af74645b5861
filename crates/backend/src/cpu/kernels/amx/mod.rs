//! Kernels for AMX: 16 rows times many columns by the matrix products of bytes. All else is AVX-512's.
//!
//! An instruction takes 16 rows of up to 64 bytes of activations (`A`) and as many of weights in words of four (`B`,
//! which is the order of [`Panel::bytes`]) and adds 16 × 16 sums of 32 bits (`C`) in 16 cycles, however many of the rows
//! and bytes are used. So the exact integers of the law take these forms:
//! * Super-blocks: sub-scales of weights and of activations are multiplied in, `(sc·q)·(u·x)`, and both factors, of 11
//!   to 13 bits, are split into two bytes. Products then run over the whole super-block, and a super-block of 16 rows by
//!   16 columns costs 16 instructions. With a product for each sub-scale, 8 or 16 of them, as many sums of 16 × 16 would
//!   each have to be stored, loaded and multiplied by both sub-scales: 3 instructions of AVX-512 for 16 sums where the
//!   product takes one cycle. Both bytes of a column are rows of one `A`, eight columns an instruction.
//! * 32-blocks, whose scales are floats: a product of 32 bytes for each block, 16 columns an instruction; activations
//!   of 16 bits are two products.

mod fold;
pub(super) mod quantise;
mod session;
mod tile;

use quant::WeightType;
use quant::act::ActKind;

use super::panel::{CHUNK, Panel, ROWS, UnpackFn, offset};
use super::{COLS, ColPtr, avx2};

pub(super) use session::Session;

/// Makes of a panel's bytes the bytes that [`TileFn`] multiplies.
///
/// # Safety
/// The panel holds `blocks` blocks of the function's type, and the machine has AVX-512.
type FoldFn = unsafe fn(panel: &mut Panel, blocks: usize);

/// Columns of a panel: adds to `acc` the products of `blocks` blocks, which begin at value `chunk` of the row.
///
/// # Safety
/// There is a [`Session`] for the kind of activations of the function's type, `columns` holds these blocks of `cols`,
/// and `acc` is as long as `cols`.
type TileFn = unsafe fn(
    panel: &Panel,
    columns: &mut Columns,
    blocks: usize,
    chunk: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
);

/// The kernels of a weight type, for `from` columns and more.
#[derive(Clone, Copy, Debug)]
pub(super) struct TilesFns {
    pub unpack: UnpackFn,
    pub fold: Option<FoldFn>,
    pub tile: TileFn,
    pub from: usize,
}

/// The kernels of a type.
pub(super) fn tiles(t: WeightType) -> TilesFns {
    let unpack = avx2::unpack_all_bytes(t);
    match (t.act(), t.has_min()) {
        (ActKind::Block256, _) => {
            let (fold, tile): (FoldFn, TileFn) = match t {
                WeightType::Q2_K => (fold::small_scales, tile::large::<1, 0, true>),
                WeightType::Q4_K | WeightType::Q5_K => (fold::split_scales, tile::large::<2, 3, true>),
                WeightType::Q3_K => (fold::split_products::<16, 4>, tile::large::<2, 8, false>),
                WeightType::Q6_K => (fold::split_products::<16, 32>, tile::large::<2, 8, false>),
                _ => (fold::split_products::<32, 128>, tile::large::<2, 8, false>),
            };
            TilesFns { unpack, fold: Some(fold), tile, from: 5 }
        }
        (ActKind::Byte32, true) => TilesFns { unpack, fold: None, tile: tile::bytes::<false, true>, from: 5 },
        (ActKind::Byte32, false) => {
            let fold: FoldFn = if offset(t) == 16 { fold::offset::<16> } else { fold::offset::<128> };
            TilesFns { unpack, fold: Some(fold), tile: tile::bytes::<true, false>, from: 5 }
        }
        (ActKind::Block32, true) => TilesFns { unpack, fold: None, tile: tile::wide::<false, true>, from: 5 },
        (ActKind::Block32, false) => TilesFns { unpack, fold: None, tile: tile::wide::<true, false>, from: 5 },
        (ActKind::F32, _) => unreachable!("floats have no integer panel"),
    }
}

/// Bytes of 16 rows of `A`, [`CHUNK`] each.
const UNIT: usize = 16 * CHUNK;
/// Units of [`COLS`] columns with two bytes a value.
const UNITS: usize = 2 * COLS / 16;

/// A part of the columns' rows as `A`, and sums before they get their scales.
///
/// A unit of a super-block is eight columns, their low bytes, then their high bytes. Of 32-blocks it is 16 columns; where
/// they have 16 bits, a unit of their low bytes, then one of their high bytes.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(super) struct Columns {
    bytes: [[u8; UNIT]; UNITS],
    /// Scales of the 32-blocks, `[column][block]`, and the sums of their integers.
    d: [[f32; 8]; COLS],
    sums: [[f32; 8]; COLS],
    /// Sums of two groups of 16 or of eight columns: `C` of eight blocks each, or of the four products of two units.
    c: [[[[i32; ROWS]; 16]; 8]; 2],
}

impl Columns {
    /// Bytes that [`Columns::new`] allocates.
    pub const BYTES: usize = size_of::<Columns>();

    pub fn new() -> Box<Columns> {
        let (d, sums) = ([[0.0; 8]; COLS], [[0.0; 8]; COLS]);
        Box::new(Columns { bytes: [[0; UNIT]; UNITS], d, sums, c: [[[[0; ROWS]; 16]; 8]; 2] })
    }

    /// Copies `blocks` blocks of `cols`, which begin at value `chunk`.
    ///
    /// # Safety
    /// Every column has the blocks, in the kind that `session` is for.
    pub unsafe fn copy(&mut self, session: &Session, cols: &[ColPtr], chunk: usize, blocks: usize) {
        match session.kind() {
            ActKind::Block256 => {
                for (c, col) in cols.iter().enumerate() {
                    let unit = &mut self.bytes[c / 8];
                    // SAFETY: the row has the super-block; its high bytes follow k low bytes.
                    unsafe { copy_rows(unit, [c % 8, 8 + c % 8], col.row.digits.add(chunk), col.k, CHUNK) }
                }
            }
            ActKind::Byte32 | ActKind::Block32 => {
                for (c, col) in cols.iter().enumerate() {
                    // SAFETY: the row has the blocks, and one scale and one sum for each.
                    unsafe {
                        if session.kind() == ActKind::Byte32 {
                            let unit = &mut self.bytes[c / 16];
                            copy_rows(unit, [c % 16], col.row.q.add(chunk), 0, 32 * blocks);
                        } else {
                            let at = c / 16 * 2;
                            copy_rows(&mut self.bytes[at], [c % 16], col.row.digits.add(chunk), 0, 32 * blocks);
                            let high = col.row.digits.add(col.k + chunk);
                            copy_rows(&mut self.bytes[at + 1], [c % 16], high, 0, 32 * blocks);
                        }
                        let (d, sums) = (col.row.d.add(chunk / 32), col.row.sums.cast::<i32>().add(chunk / 32));
                        for b in 0..blocks {
                            self.d[c][b] = *d.add(b);
                            self.sums[c][b] = *sums.add(b) as f32;
                        }
                    }
                }
            }
            ActKind::F32 => unreachable!("a session is for integers"),
        }
    }
}

/// Copies `n` bytes into each of `rows` of a unit, row `i` from `from + i·stride`.
///
/// # Safety
/// They are readable; `n` is at most [`CHUNK`].
#[inline(always)]
unsafe fn copy_rows<const N: usize>(unit: &mut [u8; UNIT], rows: [usize; N], from: *const u8, stride: usize, n: usize) {
    for (i, r) in rows.into_iter().enumerate() {
        let to = &mut unit[r * CHUNK..][..n];
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from.add(i * stride), to.as_mut_ptr(), n) }
    }
}
