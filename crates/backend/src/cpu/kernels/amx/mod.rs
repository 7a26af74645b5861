//! Kernels for AMX: 16 rows times many columns by the matrix products of bytes. All else is AVX-512's.
//!
//! An instruction takes 16 rows of up to 64 bytes of activations (`A`) and as many of weights in words of four (`B`,
//! which is the order of [`Panel::bytes`]) and adds 16 × 16 sums of 32 bits (`C`) in 16 cycles, however many of the
//! bytes are used (10 cycles where `A` has 8 rows, 9 where it has 4 to 6). Loading a tile takes 8 cycles and some 7 of
//! the slots that vector operations have meanwhile, storing one 15 and 20. So the exact integers of the law take these
//! forms:
//! * Super-blocks: sub-scales of weights and of activations are multiplied in, `(sc·q)·(u·x)`, and both factors, of 11
//!   to 13 bits, are split into two bytes. Products then run over the whole super-block, and a super-block of 16 rows
//!   by 16 columns costs 16 instructions. With a product for each sub-scale, 8 or 16 of them, as many sums of 16 × 16
//!   would each have to be stored, loaded and multiplied by both sub-scales: 3 instructions of AVX-512 for 16 sums
//!   where the product takes one cycle. Both bytes of a column are rows of one `A`, eight columns an instruction.
//! * 32-blocks, whose scales are floats: a product of 32 bytes for each block, 16 columns an instruction; activations
//!   of 16 bits are two products.

mod fold;
pub(super) mod quantise;
mod session;
mod tile;

use std::arch::x86_64::*;

use quant::WeightType;
use quant::act::ActKind;

use super::avx2::formats::{Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, Iq4Xs, Q2K, Q3K, Q4K, Q5K, Q6K, Tq1, Tq2};
use super::avx512::PartFn;
use super::panel::{CHUNK, Panel, ROWS, UnpackFn, offset};
use super::{COLS, ColPtr, RowSet, avx2};
use fold::{SmallScales, SplitProducts, SplitScales, part};

pub(super) use session::Session;

/// Makes of a panel's bytes the bytes that [`TileFn`] multiplies.
///
/// # Safety
/// The panel holds `blocks` blocks of the function's type, and the machine has AVX-512.
type FoldFn = unsafe fn(panel: &mut Panel, blocks: usize);

/// Columns of a panel: adds to `acc` the products of its `blocks` blocks.
///
/// # Safety
/// There is a [`Session`] for the kind of activations of the function's type, `columns` holds these blocks of `cols`,
/// and `acc` is as long as `cols`.
///
/// `next` is called with 0 to 3 while the first products run. The tiles are a unit of their own, which works while
/// AVX-512 does something else, but no farther ahead of a waiting instruction than the processor's window: so the two
/// kinds of work are interleaved.
type TileFn = unsafe fn(
    panel: &Panel,
    columns: &mut Columns,
    blocks: usize,
    cols: &[ColPtr],
    acc: &mut [[f32; ROWS]],
    next: &mut dyn FnMut(usize),
);

/// How a panel is made, in quarters.
#[derive(Clone, Copy, Debug)]
pub(super) enum Unpack {
    /// Quarter after quarter of a super-block.
    Parts(PartFn),
    /// All blocks with the first quarter, the bytes that are multiplied with the second.
    Whole(UnpackFn, Option<FoldFn>),
}

impl Unpack {
    /// Quarter `part` of a panel of `blocks` blocks from value `chunk` on.
    ///
    /// # Safety
    /// As [`UnpackFn`]; `panel` is the same for all quarters.
    pub unsafe fn part(self, set: &RowSet, chunk: usize, blocks: usize, part: usize, panel: &mut Panel) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Unpack::Parts(f) => f(set, chunk, part, panel),
                Unpack::Whole(f, _) if part == 0 => f(set, chunk, blocks, panel),
                Unpack::Whole(_, Some(fold)) if part == 1 => fold(panel, blocks),
                Unpack::Whole(..) => {}
            }
        }
    }
}

/// The kernels of a weight type, for `from` columns and more.
#[derive(Clone, Copy, Debug)]
pub(super) struct TilesFns {
    pub unpack: Unpack,
    pub tile: TileFn,
    pub from: usize,
}

/// The kernels of a type. Products of few columns take as long as those of 16, and below 8 to 12 columns AVX-512 is
/// faster ([768, 2048], one core of a Xeon of the Sapphire Rapids class).
pub(super) fn tiles(t: WeightType) -> TilesFns {
    let whole = |fold| Unpack::Whole(avx2::unpack_all_bytes(t), fold);
    let (unpack, tile): (Unpack, TileFn) = match (t, t.act()) {
        (WeightType::Q2_K, _) => (Unpack::Parts(part::<Q2K, SmallScales>), tile::large::<1, 0, true>),
        (WeightType::Q3_K, _) => (Unpack::Parts(part::<Q3K, SplitProducts<false, 4>>), tile::large::<2, 8, false>),
        (WeightType::Q4_K, _) => (Unpack::Parts(part::<Q4K, SplitScales>), tile::large::<2, 3, true>),
        (WeightType::Q5_K, _) => (Unpack::Parts(part::<Q5K, SplitScales>), tile::large::<2, 3, true>),
        (WeightType::Q6_K, _) => (Unpack::Parts(part::<Q6K, SplitProducts<false, 32>>), tile::large::<2, 8, false>),
        (WeightType::IQ4_XS, _) => (Unpack::Parts(part::<Iq4Xs, SplitProducts<true, 128>>), tile::large::<2, 8, false>),
        (WeightType::IQ2_XXS, _) => {
            (Unpack::Parts(part::<Iq2Xxs, SplitProducts<false, 128>>), tile::large::<2, 8, false>)
        }
        (WeightType::IQ2_XS, _) => {
            (Unpack::Parts(part::<Iq2Xs, SplitProducts<false, 128>>), tile::large::<2, 8, false>)
        }
        (WeightType::IQ2_S, _) => (Unpack::Parts(part::<Iq2S, SplitProducts<false, 128>>), tile::large::<2, 8, false>),
        (WeightType::IQ3_XXS, _) => {
            (Unpack::Parts(part::<Iq3Xxs, SplitProducts<false, 128>>), tile::large::<2, 8, false>)
        }
        (WeightType::IQ3_S, _) => (Unpack::Parts(part::<Iq3S, SplitProducts<false, 16>>), tile::large::<2, 8, false>),
        (WeightType::IQ1_S, _) => (Unpack::Parts(part::<Iq1S, SplitProducts<false, 16>>), tile::large::<2, 8, false>),
        (WeightType::IQ1_M, _) => (Unpack::Parts(part::<Iq1M, SplitProducts<false, 16>>), tile::large::<2, 8, false>),
        (WeightType::TQ1_0, _) => (Unpack::Parts(part::<Tq1, SplitProducts<false, 4>>), tile::large::<2, 8, false>),
        (WeightType::TQ2_0, _) => (Unpack::Parts(part::<Tq2, SplitProducts<false, 4>>), tile::large::<2, 8, false>),
        (_, ActKind::Byte32) if t.has_min() => (whole(None), tile::bytes::<false, true>),
        (_, ActKind::Byte32) if offset(t) == 16 => (whole(Some(fold::offset::<16>)), tile::bytes::<true, false>),
        (_, ActKind::Byte32) => (whole(Some(fold::offset::<128>)), tile::bytes::<true, false>),
        (_, ActKind::Block32) if t.has_min() => (whole(None), tile::wide::<false, true>),
        (_, ActKind::Block32) => (whole(None), tile::wide::<true, false>),
        (_, ActKind::F32 | ActKind::Block256) => unreachable!("{t} has no panel of bytes"),
    };
    TilesFns { unpack, tile, from: if t.act() == ActKind::Block256 { 12 } else { 8 } }
}

/// Bytes of 16 rows of `A`, [`CHUNK`] each.
const UNIT: usize = 16 * CHUNK;
/// Units of [`COLS`] columns with two bytes a value.
const UNITS: usize = 2 * COLS / 16;

/// A part of the columns' rows as `A`, and sums before they get their scales.
///
/// A unit of a super-block is eight columns, their low bytes, then their high bytes. Of 32-blocks it is 16 columns;
/// where they have 16 bits, a unit of their low bytes, then one of their high bytes.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(super) struct Columns {
    bytes: [[u8; UNIT]; UNITS],
    /// Scales of the 32-blocks, `[column][block]`, and the sums of their integers.
    d: [[f32; 8]; COLS],
    sums: [[f32; 8]; COLS],
    /// Scales of super-blocks.
    scale: [f32; COLS],
    /// Sums of the 16-groups of super-blocks as `A`, low bytes and high bytes of eight columns as in `bytes`, with 16
    /// bytes a row; a product reads 64 of each, of which the rest meet zeros.
    group_sums: [[[u8; 16]; 16]; COLS / 8 + 1],
    /// Sums of two groups of 16 columns, of eight blocks each; or of one, the four products of two units, then those
    /// with minimums.
    c: [[[[i32; ROWS]; 16]; 8]; 2],
}

impl Columns {
    /// Bytes that [`Columns::new`] allocates.
    pub const BYTES: usize = size_of::<Columns>();

    pub fn new() -> Box<Columns> {
        let (d, sums) = ([[0.0; 8]; COLS], [[0.0; 8]; COLS]);
        let (bytes, c) = ([[0; UNIT]; UNITS], [[[[0; ROWS]; 16]; 8]; 2]);
        Box::new(Columns { bytes, d, sums, scale: [0.0; COLS], group_sums: [[[0; 16]; 16]; COLS / 8 + 1], c })
    }

    /// Copies `blocks` blocks of `cols`, which begin at value `chunk`.
    ///
    /// # Safety
    /// Every column has the blocks, in the kind that `session` is for; the session proves the instruction set.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub unsafe fn copy(&mut self, session: &Session, cols: &[ColPtr], chunk: usize, blocks: usize) {
        match session.kind() {
            ActKind::Block256 => {
                for (c, col) in cols.iter().enumerate() {
                    let unit = &mut self.bytes[c / 8];
                    // SAFETY: the row has the super-block, its low bytes before its high ones.
                    unsafe {
                        copy_row(unit, c % 8, col.row.digits.add(2 * chunk), CHUNK);
                        copy_row(unit, 8 + c % 8, col.row.digits.add(2 * chunk + CHUNK), CHUNK);
                        self.scale[c] = *col.row.d.add(chunk / CHUNK);
                        // 16 bits as a signed low byte and what is left.
                        let sums = _mm256_loadu_si256(col.row.sums.add(chunk / 8).cast());
                        let above = _mm256_srai_epi16::<8>(_mm256_add_epi16(sums, _mm256_set1_epi16(128)));
                        let [low, high] = [sums, above].map(|v| _mm256_cvtepi16_epi8(v));
                        let to = &mut self.group_sums[c / 8];
                        _mm_storeu_si128(to[c % 8].as_mut_ptr().cast(), low);
                        _mm_storeu_si128(to[8 + c % 8].as_mut_ptr().cast(), high);
                    }
                }
            }
            ActKind::Byte32 | ActKind::Block32 => {
                let n = 32 * blocks;
                for (c, col) in cols.iter().enumerate() {
                    // SAFETY: the row has the blocks, and one scale and one sum for each.
                    unsafe {
                        if session.kind() == ActKind::Byte32 {
                            copy_row(&mut self.bytes[c / 16], c % 16, col.row.q.add(chunk), n);
                        } else {
                            copy_row(&mut self.bytes[c / 16 * 2], c % 16, col.row.digits.add(2 * chunk), n);
                            copy_row(&mut self.bytes[c / 16 * 2 + 1], c % 16, col.row.digits.add(2 * chunk + n), n);
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

/// Copies `n` bytes, a multiple of 32, into row `r` of a unit. Calls of `memcpy` would cost as much again.
///
/// # Safety
/// They are readable, and the machine has AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn copy_row(unit: &mut [u8; UNIT], r: usize, from: *const u8, n: usize) {
    let to = unit[r * CHUNK..][..n].as_mut_ptr();
    // SAFETY: the caller's promise; the slice has n bytes.
    unsafe {
        if n == CHUNK {
            for i in 0..4 {
                _mm512_storeu_si512(to.cast::<__m512i>().add(i), _mm512_loadu_si512(from.cast::<__m512i>().add(i)));
            }
        } else {
            for i in 0..n / 32 {
                _mm256_storeu_si256(to.cast::<__m256i>().add(i), _mm256_loadu_si256(from.cast::<__m256i>().add(i)));
            }
        }
    }
}
