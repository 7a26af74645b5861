//! Geometry of products of many rows on Hopper's warpgroup products: `kernels/cuda/wide.h`, whose names are repeated
//! here. Knows no driver.

use model::plan::{Op, Plan};
use quant::WeightType;

use super::batch::Order;
use super::launch::Launch;
use super::matmul::unit;
use backend::Limits;

/// Number of rows from which a product takes these kernels, where the device has them.
pub const FROM: usize = 25;
/// Rows of a block of weights, half of them gate's in gated products.
const ROWS: usize = 128;
/// Blocks that a multiprocessor holds.
const RESIDENT: usize = 2;
/// Chunks of activations in shared memory, of tiles of any width and of narrow ones.
const RING: usize = 6;
const NARROW_RING: usize = 12;

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

/// Bytes of shared memory of a block whose tiles have up to `cols` columns, for `ring` chunks in pieces of `each`.
fn shared(w: WeightType, each: usize, cols: usize, ring: usize) -> u32 {
    ((ring / each).max(2) * each * cols * 128 * panels(w) + 1024 + 256) as u32
}

/// Bytes of the packed activations of `rows` rows of `k`, and what the last tile reads behind them.
pub fn packed_bytes(w: WeightType, rows: usize, k: usize) -> usize {
    bytes_in_order(Order::of_units(w), panels(w), rows, k)
}

/// As [`packed_bytes`], in any order.
pub fn bytes_in_order(order: Order, panels: usize, rows: usize, k: usize) -> usize {
    let bytes = (order.stride(k) / 64 * panels).saturating_mul(rows.div_ceil(8)).saturating_add(16);
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
            let [n_expert, .., k] = plan.weight(gate).shape[..] else { return 0 };
            let bytes = byte_columns(pairs.min(MOST_NARROW * n_expert), n_expert, k);
            packed(gate, pairs).max(packed(up, pairs)).max(packed(down, pairs)).max(bytes)
        }
        _ => 0,
    };
    if limits.max_tokens < FROM { 0 } else { plan.ops.iter().map(of_op).max().unwrap_or(0) }
}

/// Numbers of a list of the tiles that experts have in addition to one each.
pub fn most_further(pairs: usize, n_expert: usize) -> usize {
    1 + (pairs + 7 * n_expert) / BYTES_WIDTH
}

/// The launches of a product, the width of its tiles, and the order of its activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wide {
    /// None where `expert_lists` packs.
    pub pack: Option<Launch>,
    pub product: Launch,
    /// Adds the sums of the shares of k, where there are several.
    pub sum: Option<Launch>,
    pub n_groups: u32,
    pub width: u32,
    pub order: Order,
}

fn wide(w: WeightType, entries: [&'static str; 2], rows: usize, width: usize, grid: [usize; 2]) -> Wide {
    let n_groups = rows.div_ceil(8) as u32;
    let shared = shared(w, (unit(w) / 16).min(2), cols(w), RING);
    let [x, y] = grid.map(|n| n as u32);
    Wide {
        // Of few groups several blocks share the numbers of a row.
        pack: Some(Launch {
            entry: entries[0],
            grid: [n_groups, (256 / n_groups).clamp(1, 4), 1],
            block: 256,
            shared: 0,
        }),
        product: Launch { entry: entries[1], grid: [x, y, 1], block: 256, shared },
        sum: None,
        n_groups,
        width: width as u32,
        order: Order::of_units(w),
    }
}

/// Maximum number of shares of k that blocks take of a product.
const MAX_SHARES: usize = 16;

/// Bytes of the sums of shares, of the op of a plan that has most, on a device of N multiprocessors.
pub fn most_sums(plan: &Plan, limits: Limits, sms: usize) -> usize {
    let of_op = |op: &Op| match *op {
        Op::Linear { x, ref parts } => {
            let rows = plan.buf(x).rows.count(limits.max_tokens, limits.max_outputs.min(limits.max_tokens));
            let n = parts.iter().map(|part| plan.buf(part.out).width).sum();
            let shape = Shape { rows, k: plan.buf(x).width, n };
            let shares = parts.iter().map(|part| shape.most_shares(plan.weight(part.w).dtype, sms)).max().unwrap_or(1);
            // Blocks of one wave, with a tile each.
            let wave = RESIDENT * sms * ROWS * 128;
            if shares > 1 { rows.saturating_mul(n).saturating_mul(shares).min(wave) } else { 0 }
        }
        _ => 0,
    };
    if limits.max_tokens < FROM { 0 } else { 4 * plan.ops.iter().map(of_op).max().unwrap_or(0) }
}

/// A product of `rows` rows of `k` numbers with `n` rows of weights.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub rows: usize,
    pub k: usize,
    pub n: usize,
}

impl Shape {
    /// Maximum number of shares of k: of a step each, where rows of weights alone do not fill half of the device.
    fn most_shares(&self, w: WeightType, sms: usize) -> usize {
        let blocks = self.n.div_ceil(ROWS).max(1);
        if 2 * blocks > sms { 1 } else { self.k.div_ceil(4 * unit(w)).clamp(1, MAX_SHARES) }
    }

    /// Cycles that a product takes with tiles of `width` columns and N shares of k: blocks go in waves, alone on a
    /// multiprocessor or two together. Fitted to an H200: unpacking takes most of a chunk's time.
    fn cycles(&self, w: WeightType, sms: usize, width: usize, shares: usize) -> usize {
        let Shape { rows, k, n } = *self;
        let (unpacking, products) = match unit(w) {
            _ if w == WeightType::F32 => (2300, 3),
            64 => (1900, 1),
            _ => (1275, 1),
        };
        let chunks = k.div_ceil(4 * unit(w)).div_ceil(shares) * unit(w) / 16;
        let blocks = n.div_ceil(ROWS) * rows.div_ceil(width) * shares;
        let chunk = unpacking + 5 * width * products;
        let chunk = if blocks <= sms { chunk * 3 / 5 } else { chunk };
        let waves = blocks.div_ceil((sms * RESIDENT).max(1));
        // Sums are written and read at some 2,500 bytes a cycle, by a launch more.
        let sums = if shares > 1 { 3500 + 8 * shares * rows * n / 2500 } else { 0 };
        waves * (chunks * chunk + 5000) + sums
    }
}

/// `linear` or `gated_linear`, of which the rows of gate and up are counted together, with room for N sums of shares of
/// k: none where k is not shared.
pub fn dense(w: WeightType, entries: [&'static str; 2], shape: Shape, room: usize, sms: usize) -> Wide {
    let Shape { rows, n, .. } = shape;
    // Wider tiles, where many blocks have some each.
    if room > 0 && rows > cols(w) && 3 * cols(w) < 2 * queue_cols(w) && n.div_ceil(QUEUE_ROWS) >= 2 * sms {
        let width = rows.div_ceil(rows.div_ceil(queue_cols(w))).next_multiple_of(16);
        let of = wide(w, [entries[0], "linear_queue"], rows, width, [sms, 1]);
        let shared = queue_shared(w) as u32;
        return Wide { product: Launch { block: 384, shared, ..of.product }, ..of };
    }
    let most = shape.most_shares(w, sms).min(room / (rows * n).max(1)).max(1);
    let shares = [1, 2, 3, 4, 6, 8, 12, 16].into_iter().filter(|&shares| shares <= most);
    let widths = (1..=cols(w) / 16).rev().map(|i| 16 * i);
    let all = widths.flat_map(|width| shares.clone().map(move |shares| (width, shares)));
    // Shares of a product are in one wave.
    let blocks = |width: usize| n.div_ceil(ROWS) * rows.div_ceil(width);
    let all = all.filter(|&(width, shares)| shares == 1 || blocks(width) * shares <= RESIDENT * sms);
    let (width, shares) = all.min_by_key(|&(width, shares)| shape.cycles(w, sms, width, shares)).unwrap_or((16, 1));
    let of = wide(w, entries, rows, width, [n.div_ceil(ROWS), rows.div_ceil(width)]);
    let [x, y, _] = of.product.grid;
    let grid = [n.div_ceil(256) as u32, rows as u32, 1];
    let sum = Launch { entry: "linear_wide_sum", grid, block: 256, shared: 0 };
    // Few blocks take all registers of a multiprocessor each.
    let is_alone = room > 0 && (x * y) as usize * shares <= sms;
    let entry = if is_alone { "linear_wide_alone" } else { of.product.entry };
    let product = Launch { entry, grid: [x, y, shares as u32], ..of.product };
    Wide { product, sum: Some(sum).filter(|_| shares > 1), ..of }
}

/// Chunks in shared memory of `wide_queue.h`, whose tiles are wider.
const QUEUE_RING: usize = 8;

/// Maximum number of columns of a tile there.
fn queue_cols(w: WeightType) -> usize {
    match w {
        WeightType::F32 => 48,
        _ if unit(w) == 64 => 128,
        _ => 144,
    }
}

/// Maximum number of columns of a narrow tile, and pairs of an expert on average up to which most find room in one: it
/// begins up to 7 pairs early.
const NARROW: usize = 32;
const MOST_NARROW: usize = 20;
/// The same of middle tiles.
const MIDDLE: usize = 64;
const MIDDLE_RING: usize = 8;
const MOST_MIDDLE: usize = 52;

/// Pieces of 16 bytes of a step of a row, a block of it, where weights come through shared memory (`wide_staged.h`).
fn staged_pieces(w: WeightType, cols: usize) -> Option<usize> {
    match w {
        _ if cols != NARROW => None,
        WeightType::Q4_K => Some(9),
        WeightType::Q6_K => Some(14),
        _ => None,
    }
}

/// Blocks of rows of weights that a block takes one after the other, so that those of all experts are about one wave:
/// they all take as many.
fn blocks_of_one(blocks: usize, n_expert: usize, sms: usize) -> usize {
    let most = blocks * n_expert / (RESIDENT * sms).max(1);
    (1..=most.max(1)).rev().find(|&per| blocks.is_multiple_of(per)).unwrap_or(1)
}

/// Bytes of shared memory of a block whose tiles have few columns. Staged weights are there for two steps.
fn few_columns(w: WeightType, cols: usize, ring: usize) -> u32 {
    let Some(pieces) = staged_pieces(w, cols) else { return shared(w, Order::of(w).runs, cols, ring) };
    (ring * cols * 128 + ROWS * 2 * 16 * pieces + 1024 + 256) as u32
}

/// Rows of weights of a block there, and its bytes of shared memory.
const QUEUE_ROWS: usize = 192;
fn queue_shared(w: WeightType) -> usize {
    QUEUE_RING * queue_cols(w) * 128 * panels(w) + 1024 + 512
}

/// Numbers of `kernels/cuda/experts_bytes.h`: rows of weights of gate of a block and as many of up, bytes of a step of
/// eight columns, and of a block's shared memory.
const BYTES_ROWS: usize = 64;
const BYTE_COLUMNS: usize = 2432;
const BYTES_SHARED: u32 = 6 * BYTE_COLUMNS as u32 + 8 * 3 * 16 * 160 + 96;
/// Maximum number of columns of a tile.
const BYTES_WIDTH: usize = 24;

/// Groups of eight columns, of which each expert's begin with one.
fn byte_groups(pairs: usize, n_expert: usize) -> usize {
    pairs / 8 + n_expert + 1
}

/// Bytes of the columns of `pairs` pairs of `k` numbers.
fn byte_columns(pairs: usize, n_expert: usize, k: usize) -> usize {
    byte_groups(pairs, n_expert).saturating_mul(k.div_ceil(256)).saturating_mul(BYTE_COLUMNS)
}

/// Gate and up in integers, of `n` rows of weights an expert each: where the type has them and experts have few pairs.
pub fn gated_bytes(w: WeightType, pairs: usize, n_expert: usize, n: usize) -> Option<Wide> {
    if w != WeightType::Q4_K || pairs > MOST_NARROW * n_expert {
        return None;
    }
    let tiles = (pairs + 7 * n_expert.min(pairs)) / BYTES_WIDTH + n_expert;
    let grid = [n.div_ceil(BYTES_ROWS) as u32, tiles as u32, 1];
    Some(Wide {
        pack: None,
        product: Launch { entry: "experts_gated_bytes", grid, block: 256, shared: BYTES_SHARED },
        sum: None,
        n_groups: byte_groups(pairs, n_expert) as u32,
        width: BYTES_WIDTH as u32,
        order: Order::of(w),
    })
}

/// `experts` over `pairs` pairs with `n` rows of weights an expert, of gate and of up where it is gated.
/// Alternating tiles (`wide_queue.h`) pay where experts have more pairs than a tile, narrow ones where they have few.
pub fn experts(w: WeightType, is_gated: bool, pairs: usize, n_expert: usize, n: usize, sms: usize) -> Wide {
    let pack = "experts_pack";
    let ([narrow, middle, product, queue], n) = match is_gated {
        true => (["experts_gated_narrow", "experts_gated_middle", "experts_gated_wide", "experts_gated_queue"], 2 * n),
        false => (["experts_narrow", "experts_middle", "experts_wide", "experts_queue"], n),
    };
    let width = cols(w);
    if pairs > n_expert * width * 3 / 4 {
        let wide = wide(w, [pack, queue], pairs, queue_cols(w), [sms, 1]);
        let shared = queue_shared(w) + 4 * (n_expert + 1);
        return Wide { product: Launch { block: 384, shared: shared as u32, ..wide.product }, ..wide };
    }
    // A tile for each expert, and as many more as there can be, where each expert's begins up to 7 pairs early; those
    // that find no pairs leave.
    let grid = |width: usize| [n.div_ceil(ROWS), (pairs + 7 * n_expert.min(pairs)) / width + n_expert];
    for (most, cols, ring, product) in
        [(MOST_NARROW, NARROW, NARROW_RING, narrow), (MOST_MIDDLE, MIDDLE, MIDDLE_RING, middle)]
    {
        if pairs <= most * n_expert && cols < width {
            let [mut blocks, tiles] = grid(cols);
            if staged_pieces(w, cols).is_some() && !is_gated && n.is_multiple_of(ROWS) {
                blocks /= blocks_of_one(blocks, n_expert, sms);
            }
            let of = wide(w, ["experts_narrow_pack", product], pairs, cols, [blocks, tiles]);
            let shared = few_columns(w, cols, ring);
            return Wide { product: Launch { shared, ..of.product }, order: Order::of(w), ..of };
        }
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
        let shape = |rows, k, n| Shape { rows, k, n };
        let of = |wide: Wide| (wide.product.grid, wide.width, wide.product.shared);
        assert_eq!(
            of(dense(WeightType::Q4_K, names, shape(2048, 2048, 5120), 1 << 22, 132)),
            ([40, 19, 1], 112, 99584)
        );
        assert_eq!(of(dense(WeightType::Q4_K, names, shape(512, 2048, 5120), 1 << 22, 132)), ([40, 6, 1], 96, 99584));
        assert_eq!(of(dense(WeightType::F32, names, shape(2048, 2048, 128), 1 << 22, 132)), ([1, 43, 3], 48, 75008));
        // Few blocks share k, and have a multiprocessor each.
        let few = dense(WeightType::Q4_K, names, shape(256, 4096, 2048), 1 << 22, 132);
        assert_eq!((few.product.entry, of(few)), ("linear_wide_alone", ([16, 2, 4], 128, 99584)));
        assert_eq!(few.sum.map(|sum| sum.grid), Some([8, 256, 1]));
        let experts = |w, pairs| experts(w, false, pairs, 128, 2048, 132);
        let narrow = experts(WeightType::Q4_K, 2048);
        assert_eq!((narrow.product.entry, of(narrow)), ("experts_narrow", ([4, 220, 1], 32, 87296)));
        let middle = experts(WeightType::Q4_K, 4096);
        assert_eq!((middle.product.entry, of(middle)), ("experts_middle", ([16, 206, 1], 64, 66816)));
        // Its tiles have no more than 64 columns.
        let wide = experts(WeightType::Q6_K, 4096);
        assert_eq!((wide.product.entry, of(wide)), ("experts_wide", ([16, 206, 1], 64, 50432)));
        assert_eq!(of(experts(WeightType::Q6_K, 16384)), ([132, 1, 1], 128, 133124));
        let queue = experts(WeightType::Q4_K, 16384).product;
        assert_eq!((queue.entry, queue.block, queue.shared), ("experts_queue", 384, 149508));
        // The output matrix of many sequences has wider tiles, and Q6_K's few columns come with weights in shared memory.
        let heads = dense(WeightType::Q6_K, names, shape(256, 2048, 151_936), 1 << 22, 132);
        assert_eq!((heads.product.entry, of(heads)), ("linear_queue", ([132, 1, 1], 128, 132608)));
        let heads = dense(WeightType::Q6_K, names, shape(64, 2048, 151_936), 1 << 22, 132);
        assert_eq!((heads.product.entry, heads.width), ("linear_wide", 64));
        assert_eq!(of(experts(WeightType::Q6_K, 2048)), ([4, 220, 1], 32, 107776));
        let bytes = |pairs| gated_bytes(WeightType::Q4_K, pairs, 128, 768);
        assert_eq!(bytes(512).map(of), Some(([12, 186, 1], 24, 76128)));
        assert_eq!(bytes(512).map(|bytes| (bytes.n_groups, bytes.pack)), Some((193, None)));
        assert_eq!(bytes(2561), None);
        let pack = dense(WeightType::Q6_K, names, shape(65, 256, 1), 1 << 22, 132).pack;
        assert_eq!(pack.map(|pack| (pack.entry, pack.grid)), Some(("linear_pack", [9, 4, 1])));
        // Chunks of 64 numbers in whole steps: 704 numbers of Q5_0 are 12, of 32 in a unit.
        assert_eq!(packed_bytes(WeightType::Q5_0, 9, 704), (12 * 2 + 16) << 10);
        assert_eq!(packed_bytes(WeightType::F32, 8, 37), (2 + 16) << 10);
    }
}
