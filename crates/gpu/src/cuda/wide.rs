//! Geometry of products of many rows on Hopper's warpgroup products: `kernels/cuda/wide.h`, whose names are repeated
//! here. Knows no driver.

use model::plan::{Op, Plan};
use quant::WeightType;

use super::launch::Launch;
use super::matmul::unit;
use backend::Limits;

/// Number of rows from which a product takes these kernels, where the device has them.
pub const FROM: usize = 65;
/// Rows of a block of weights, half of them gate's in gated products.
const ROWS: usize = 128;
/// Blocks that a multiprocessor holds.
const RESIDENT: usize = 2;
/// Chunks of activations in shared memory.
const STAGES: usize = 6;

/// Whether devices of this compute capability have the instructions. Hopper's are in no other architecture.
pub fn fits(arch: u32) -> bool {
    arch == 90
}

/// Copies of the activations: F32 weights multiply two numbers of bf16 for each.
fn panels(w: WeightType) -> usize {
    if w == WeightType::F32 { 2 } else { 1 }
}

/// Maximum number of columns of a tile.
fn cols(w: WeightType) -> usize {
    match w {
        WeightType::F32 => 48,
        _ if unit(w) == 64 => 64,
        _ => 128,
    }
}

/// Bytes of the packed activations of `rows` rows of `k`, and what the last tile reads behind them.
pub fn packed_bytes(w: WeightType, rows: usize, k: usize) -> usize {
    let chunks = k.div_ceil(4 * unit(w)) * (unit(w) / 16);
    let bytes = (chunks * panels(w)).saturating_mul(rows.div_ceil(8)).saturating_add(16);
    bytes.saturating_mul(1024)
}

/// The most that an op of a plan packs.
pub fn most_packed(plan: &Plan, limits: Limits) -> usize {
    let packed = |w: model::plan::Weight, rows: usize| {
        let decl = plan.weight(w);
        packed_bytes(decl.dtype, rows, decl.shape.last().copied().unwrap_or(0))
    };
    let rows = |buf| plan.buf(buf).rows.count(limits.max_tokens, limits.max_outputs.min(limits.max_tokens));
    let of_op = |op: &Op| match *op {
        Op::Linear { x, ref parts } => parts.iter().map(|part| packed(part.w, rows(x))).max().unwrap_or(0),
        Op::GatedLinear { x, gate, up, .. } => packed(gate, rows(x)).max(packed(up, rows(x))),
        Op::Experts { x, ids, gate, up, down, .. } => {
            let pairs = rows(x).saturating_mul(plan.buf(ids).width);
            packed(gate, pairs).max(packed(up, pairs)).max(packed(down, pairs))
        }
        _ => 0,
    };
    if limits.max_tokens < FROM { 0 } else { plan.ops.iter().map(of_op).max().unwrap_or(0) }
}

/// The two launches of a product, and the width of its tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wide {
    pub pack: Launch,
    pub product: Launch,
    pub n_groups: u32,
    pub width: u32,
}

fn wide(w: WeightType, entries: [&'static str; 2], rows: usize, width: usize, grid: [usize; 2]) -> Wide {
    let n_groups = rows.div_ceil(8) as u32;
    let shared = STAGES * cols(w) * 128 * panels(w) + 1024 + 256;
    let [x, y] = grid.map(|n| n as u32);
    Wide {
        pack: Launch { entry: entries[0], grid: [n_groups, 1, 1], block: 256, shared: 0 },
        product: Launch { entry: entries[1], grid: [x, y, 1], block: 256, shared: shared as u32 },
        n_groups,
        width: width as u32,
    }
}

/// `linear` or `gated_linear` of `rows` rows with `n` rows of weights, those of gate and up together.
pub fn dense(w: WeightType, entries: [&'static str; 2], rows: usize, n: usize, sms: usize) -> Wide {
    let row_blocks = n.div_ceil(ROWS);
    // Unpacking a block's weights takes as long as multiplying them with some 48 columns; all blocks of a wave take as
    // long as the slowest.
    let time = |width: usize| {
        let blocks = row_blocks * rows.div_ceil(width);
        blocks.div_ceil((sms * RESIDENT).max(1)) * (width + 48)
    };
    let width = (1..=cols(w) / 16).rev().map(|n| 16 * n).min_by_key(|&width| time(width)).unwrap_or(16);
    wide(w, entries, rows, width, [row_blocks, rows.div_ceil(width)])
}

/// Stages of `wide_queue.h`, whose tiles are wider.
const QUEUE_STAGES: usize = 9;

/// Maximum number of columns of a tile there.
fn queue_cols(w: WeightType) -> usize {
    match w {
        WeightType::F32 => 48,
        _ if unit(w) == 64 => 128,
        _ => 160,
    }
}

/// Maximum number of columns of a narrow tile, and pairs of an expert on average up to which most find room in one: it
/// begins up to 7 pairs early.
const NARROW: usize = 32;
const MOST_NARROW: usize = 20;

/// `experts` over `pairs` pairs with `n` rows of weights an expert, of gate and of up where it is gated.
/// Alternating tiles (`wide_queue.h`) pay where experts have more pairs than a tile, narrow ones where they have few.
pub fn experts(w: WeightType, is_gated: bool, pairs: usize, n_expert: usize, n: usize, sms: usize) -> Wide {
    let (pack, [narrow, product, queue], n) = match is_gated {
        true => ("experts_pack", ["experts_gated_narrow", "experts_gated_wide", "experts_gated_queue"], 2 * n),
        false => ("experts_pack", ["experts_narrow", "experts_wide", "experts_queue"], n),
    };
    let width = cols(w);
    if pairs > n_expert * width * 3 / 4 {
        let wide = wide(w, [pack, queue], pairs, queue_cols(w), [sms, 1]);
        let shared = QUEUE_STAGES * queue_cols(w) * 128 * panels(w) + 1024 + 256 + 4 * (n_expert + 1);
        return Wide { product: Launch { block: 384, shared: shared as u32, ..wide.product }, ..wide };
    }
    // A tile for each expert, and as many more as there can be, where each expert's begins up to 7 pairs early; those
    // that find no pairs leave.
    let grid = |width: usize| [n.div_ceil(ROWS), (pairs + 7 * n_expert.min(pairs)) / width + n_expert];
    if pairs <= MOST_NARROW * n_expert {
        let of = wide(w, [pack, narrow], pairs, NARROW, grid(NARROW));
        let shared = (STAGES * NARROW * 128 * panels(w) + 1024 + 256) as u32;
        return Wide { product: Launch { shared, ..of.product }, ..of };
    }
    wide(w, [pack, product], pairs, width, grid(width))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Widths, grids and shared memory of shapes that users have.
    #[test]
    fn geometry() {
        let names = ["linear_pack", "linear_wide"];
        let of = |wide: Wide| (wide.product.grid, wide.width, wide.product.shared);
        assert_eq!(of(dense(WeightType::Q4_K, names, 2048, 5120, 132)), ([40, 19, 1], 112, 99584));
        assert_eq!(of(dense(WeightType::Q4_K, names, 512, 5120, 132)), ([40, 6, 1], 96, 99584));
        assert_eq!(of(dense(WeightType::F32, names, 2048, 128, 132)), ([1, 128, 1], 16, 75008));
        let experts = |w, pairs| experts(w, false, pairs, 128, 2048, 132);
        let narrow = experts(WeightType::Q4_K, 2048);
        assert_eq!((narrow.product.entry, of(narrow)), ("experts_narrow", ([16, 220, 1], 32, 25856)));
        assert_eq!(of(experts(WeightType::Q6_K, 4096)), ([16, 206, 1], 64, 50432));
        assert_eq!(of(experts(WeightType::Q6_K, 16384)), ([132, 1, 1], 128, 149252));
        let queue = experts(WeightType::Q4_K, 16384).product;
        assert_eq!((queue.entry, queue.block, queue.shared), ("experts_queue", 384, 186116));
        let pack = dense(WeightType::Q6_K, ["linear_pack", "linear_wide"], 65, 1, 132).pack;
        assert_eq!((pack.entry, pack.grid), ("linear_pack", [9, 1, 1]));
        // Chunks of 64 numbers in whole steps: 704 numbers of Q5_0 are 12, of 32 in a unit.
        assert_eq!(packed_bytes(WeightType::Q5_0, 9, 704), (12 * 2 + 16) << 10);
        assert_eq!(packed_bytes(WeightType::F32, 8, 37), (2 + 16) << 10);
    }
}
