//! Geometry of products of few rows whose weights go through shared memory: `kernels/cuda/few.h`, whose names are
//! repeated here. Knows no driver.

use quant::WeightType;
use quant::act::ActKind;

use super::launch::Launch;
use super::matmul::vec_unit;

/// Registers of a thread of the kernels for one row.
const REGISTERS: usize = 56;
/// Most warps of a block.
const FEW_WARPS: usize = 20;
/// Bytes of the barriers, in front of all else.
const BARRIERS: usize = FEW_WARPS * 8;
/// Bytes of squares of a column.
const SQUARES: usize = FEW_WARPS * 4;
/// Shared memory that the driver takes of each block, and what a kernel may have beside what is counted here.
const RESERVED: usize = 1024 + 512;

/// Multiprocessors of a device, and shared memory that a block may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// Multiprocessors.
    pub sms: usize,
    /// Bytes.
    pub max_shared: usize,
}

/// Whether devices of this compute capability copy in bulk.
pub fn fits(arch: u32) -> bool {
    arch >= 90
}

/// Which half of a multiprocessor the blocks of a launch take, so that a block of the next one fits beside each and no
/// second one of the same: launches take turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// More than half of the shared memory.
    Shared,
    /// More than half of the registers.
    Registers,
}

impl Half {
    /// That of the next launch.
    pub fn next(self) -> Half {
        match self {
            Half::Shared => Half::Registers,
            Half::Registers => Half::Shared,
        }
    }

    /// Threads of a block: 16 warps, or 20, so that one of the four schedulers' registers do not hold 5 of two blocks.
    fn block(self) -> u32 {
        const _: () = assert!((4 + 5) * REGISTERS <= 512 && (5 + 5) * REGISTERS > 512);
        match self {
            Half::Shared => 512,
            Half::Registers => 640,
        }
    }
}

impl Device {
    /// Shared memory of a block where two share a multiprocessor.
    fn half(self) -> usize {
        (self.max_shared / 2).saturating_sub(RESERVED)
    }

    /// A launch of a kernel for one row, on its half.
    fn paired(self, entry: &'static str, grid: [u32; 3], shared: usize, half: Half) -> Launch {
        let shared = match half {
            // Two of these are more than there is.
            Half::Shared => shared.max((self.max_shared / 2).saturating_sub(384)),
            Half::Registers => shared,
        };
        Launch { entry, grid, block: half.block(), shared: shared as u32 }
    }

    /// A launch of more blocks than there are multiprocessors, two of which share one: all their weights are under way
    /// at once.
    fn doubled(self, entry: &'static str, grid: [u32; 3], shared: usize) -> Launch {
        const _: () = assert!((4 + 4) * REGISTERS <= 512);
        Launch { entry, grid, block: Half::Shared.block(), shared: shared as u32 }
    }

    /// A launch whose blocks fit in half of a multiprocessor: one for each multiprocessor, or more.
    fn in_waves(self, waves: usize, entry: &'static str, grid: [u32; 3], shared: usize, half: Half) -> Launch {
        if waves == 1 { self.paired(entry, grid, shared, half) } else { self.doubled(entry, grid, shared) }
    }

    /// A launch whose blocks may take all of a multiprocessor's memory.
    fn whole(self, entry: &'static str, grid: [u32; 3], shared: usize) -> Option<Launch> {
        (shared + 512 <= self.max_shared).then_some(Launch { entry, grid, block: 512, shared: shared as u32 })
    }
}

/// Bytes that a run of 16 staged activations takes, for types whose activations have 8 bits (`RUN_BYTES`).
fn run_bytes(w: WeightType) -> usize {
    match w.act() {
        ActKind::F32 => 64,
        ActKind::Block32 => 40,
        ActKind::Byte32 | ActKind::Block256 => 24,
    }
}

/// Shared memory for activations of `runs` runs in `cols` columns and `weights` bytes, which begin at a line.
fn shared(w: WeightType, cols: usize, runs: usize, weights: usize) -> usize {
    // Packed columns have a separate barrier.
    let barriers = BARRIERS + if cols > 1 { 16 } else { 0 };
    let before = barriers + SQUARES * cols + cols * runs * run_bytes(w);
    before + weights + 128 + 16
}

fn runs(k: usize) -> usize {
    k.div_ceil(16).next_multiple_of(32)
}

/// Bytes of a row, of types that lie in one plane.
fn row_bytes(w: WeightType, k: usize) -> Option<usize> {
    WeightType::GGUF.contains(&w).then(|| w.row_bytes(k)).flatten()
}

/// Bytes of a row that is copied by itself and meets activations of 8 bits.
fn whole_row(w: WeightType, k: usize) -> Option<usize> {
    let fits = matches!(w.act(), ActKind::Byte32 | ActKind::Block256);
    row_bytes(w, k).filter(|bytes| fits && bytes.is_multiple_of(16))
}

/// Most rows of weights of a block that meet columns on tensor cores.
const MMA_ROWS: usize = 48;

/// Whether rows of weights meet `cols` columns on tensor cores.
fn is_mma(w: WeightType, cols: usize, has_gate: bool) -> bool {
    matches!(w, WeightType::Q4_K | WeightType::Q6_K) && cols >= 4 && !has_gate
}

/// Bytes of shared memory for `each` rows of weights of `row` bytes where they meet `cols` columns. Those that meet
/// them on tensor cores lie apart, of a number of rows that sums of all warps have room for.
fn weights(w: WeightType, cols: usize, has_gate: bool, each: usize, row: usize) -> Option<usize> {
    /// Bytes for a column that lies apart.
    const APART: usize = 2 * 24;
    if !is_mma(w, cols, has_gate) {
        return Some(each * row);
    }
    // Blocks of eight columns have 16 warps.
    let sums = if cols <= PAIRED_COLS { FEW_WARPS } else { 16 } * MMA_ROWS * cols * 4;
    (each <= MMA_ROWS).then(|| (each * (row | 16)).max(sums) + APART * cols)
}

/// Most waves of blocks that meet columns on tensor cores.
fn waves_of(w: WeightType, cols: usize, has_gate: bool) -> usize {
    if is_mma(w, cols, has_gate) { 4 } else { 1 }
}

/// Most columns of kernels whose registers let two launches share a multiprocessor.
const PAIRED_COLS: usize = 4;

/// Numbers of rows that are packed after a gate, before the product.
pub const PACKED_GATES: std::ops::RangeInclusive<usize> = 3..=4;

/// A launch, and the rows of weights of a block.
pub type Each = (Launch, u32);

/// Columns of the kernels that take `rows` rows, by their place.
fn width(rows: usize) -> (usize, usize) {
    let at = [1, 2, 4, 8].iter().position(|cols| rows <= *cols).unwrap_or(3);
    (at, 1 << at)
}

/// `few_linear`, and `few_gated` behind a gate: `n` rows of weights of one type.
pub fn linear(
    w: WeightType,
    rows: usize,
    k: usize,
    n: usize,
    has_gate: bool,
    device: Device,
    half: Half,
) -> Option<Each> {
    const NAMES: [[&str; 4]; 2] = [
        ["few_linear1", "few_linear2", "few_linear4", "few_linear8"],
        ["few_gated1", "few_gated2", "few_gated4", "few_gated8"],
    ];
    let (at, cols) = width(rows);
    let row = whole_row(w, k)?;
    let name = NAMES[usize::from(has_gate)][at];
    let of = |waves: usize| {
        let each = n.div_ceil(waves * device.sms).max(1);
        let bytes = shared(w, cols, runs(k), weights(w, cols, has_gate, each, row)?);
        Some((each, bytes, [n.div_ceil(each) as u32, 1, 1]))
    };
    if cols <= PAIRED_COLS {
        // One row that needs two waves has `linear_twice`.
        let most = if cols == 1 { 1 } else { 2 };
        let paired = (1..=most).find_map(|waves| {
            let (each, bytes, grid) = of(waves).filter(|&(_, bytes, _)| bytes <= device.half())?;
            Some((device.in_waves(waves, name, grid, bytes, half), each as u32))
        });
        if paired.is_some() || cols == 1 {
            return paired;
        }
    }
    let most = waves_of(w, cols, has_gate);
    (1..=most).find_map(|waves| {
        let (each, bytes, grid) = of(waves)?;
        device.whole(name, grid, bytes).map(|launch| (launch, each as u32))
    })
}

/// As [`linear`] for one row, in twice as many blocks as there are multiprocessors: for matrices that do not fit at
/// once.
pub fn linear_twice(w: WeightType, k: usize, n: usize, device: Device) -> Option<Each> {
    let each = n.div_ceil(2 * device.sms).max(1);
    let bytes = shared(w, 1, runs(k), each * whole_row(w, k)?);
    let grid = [n.div_ceil(each) as u32, 1, 1];
    (bytes <= device.half()).then(|| (device.doubled("few_linear1", grid, bytes), each as u32))
}

/// Rows of weights of a block of `few_routed`, and most of its blocks: sums of more parts could be too large.
const ROUTED_ROWS: usize = 16;
const MOST_ROUTED: usize = 256;
/// Copies of the sums of logits (`choose.h`).
const LOGIT_COPIES: usize = 4;

/// `few_routed`: a product of `n` rows of weights of `k` numbers for one row, with a router of `n_expert` experts.
pub fn routed(w: WeightType, k: usize, n: usize, n_expert: usize, device: Device, half: Half) -> Option<Launch> {
    let blocks = n / ROUTED_ROWS;
    let fits = n.is_multiple_of(ROUTED_ROWS)
        && blocks <= device.sms.min(MOST_ROUTED)
        && 4 * blocks > 3 * device.sms
        && n_expert.is_multiple_of(16)
        && n_expert <= 512;
    let columns = 4 * ROUTED_ROWS * n_expert;
    let bytes = shared(w, 1, runs(k), ROUTED_ROWS * whole_row(w, k).filter(|_| fits)?) + columns;
    (bytes <= device.half()).then(|| device.paired("few_routed", [blocks as u32, 1, 1], bytes, half))
}

/// Blocks of `few_routed` for `n` rows of weights.
pub fn routed_blocks(n: usize) -> usize {
    n / ROUTED_ROWS
}

/// Numbers of eight bytes that it adds to (`LogitSums`), for a router of `n_expert` experts.
pub fn routed_sums(n_expert: usize) -> usize {
    LOGIT_COPIES * n_expert + 1
}

/// Most rows of `few_long`.
pub const LONG_ROWS: usize = 4;

/// `few_long` for up to [`LONG_ROWS`] rows: `n` rows of weights of one matrix, more than a block holds; also its rows
/// of weights of a block, and the pairs of rows that a warp has in flight.
pub fn long(w: WeightType, rows: usize, k: usize, n: usize, device: Device) -> Option<(Launch, u32, u32)> {
    const WARPS: usize = 16;
    const NAMES: [&str; 3] = ["few_long1", "few_long2", "few_long4"];
    let (at, cols) = width(rows);
    let has_bytes = matches!(w.act(), ActKind::Byte32 | ActKind::Block256);
    let row = row_bytes(w, k).filter(|row| has_bytes && (n * row).is_multiple_of(16))?;
    let slot = (2 * row + 30) / 16 * 16;
    let fixed = shared(w, cols, runs(k), 0);
    let bytes = |stages: usize| fixed + (stages - 1) * BARRIERS + WARPS * stages * slot;
    let stages = (2..=4).rev().find(|&stages| bytes(stages) <= device.half());
    // Where not even two pairs fit in half of the memory, all of it is taken by matrices that run so long that nothing
    // beside them counts.
    let is_large = n * row >= 64 << 20;
    let whole = |stages: &usize| is_large && bytes(*stages) + RESERVED <= device.max_shared;
    let stages = stages.or_else(|| (2..=3).rev().find(whole))?;
    let each = n.div_ceil(device.sms).next_multiple_of(2);
    let grid = [n.div_ceil(each) as u32, 1, 1];
    let entry = *NAMES.get(at)?;
    let launch = Launch { entry, grid, block: 32 * WARPS as u32, shared: bytes(stages) as u32 };
    Some((launch, each as u32, stages as u32))
}

/// `few_pair`: matrices of two types; also the blocks of the first, and each one's rows of weights of a block.
pub fn pair(
    w: [WeightType; 2],
    rows: usize,
    k: usize,
    n: [usize; 2],
    device: Device,
    half: Half,
) -> Option<(Launch, u32, [u32; 2])> {
    const NAMES: [&str; 4] = ["few_pair1", "few_pair2", "few_pair4", "few_pair8"];
    let (at, cols) = width(rows);
    let row = [whole_row(w[0], k)?, whole_row(w[1], k)?];
    // Blocks by bytes, since these are also the work, but for rows on tensor cores, which take little: one for each
    // multiprocessor, or two where these are too long.
    let total = n[0] * row[0] + n[1] * row[1];
    let are_mma = w.map(|w| is_mma(w, cols, false));
    let least = [0, 1].map(|i| if are_mma[i] { n[i].div_ceil(MMA_ROWS) } else { 1 });
    let of = |waves: usize| {
        let all = waves * device.sms;
        let most = all.checked_sub(least[0]).filter(|most| *most >= least[1])?;
        let b = if are_mma == [true, false] { most } else { (n[1] * row[1] * all / total).clamp(least[1], most) };
        let blocks = [all.saturating_sub(b).max(1), b];
        let each = [0, 1].map(|i| n[i].div_ceil(blocks[i]).max(1));
        let counts = [0, 1].map(|i| n[i].div_ceil(each[i]) as u32);
        let of = |i: usize| Some(shared(w[i], cols, runs(k), weights(w[i], cols, false, each[i], row[i])?));
        let bytes = of(0)?.max(of(1)?);
        Some(([counts[0] + counts[1], 1, 1], bytes, counts[0], each.map(|n| n as u32)))
    };
    if cols <= PAIRED_COLS {
        let paired = (1..=2).find_map(|waves| {
            let (grid, bytes, count, each) = of(waves).filter(|&(_, bytes, ..)| bytes <= device.half())?;
            Some((device.in_waves(waves, NAMES[at], grid, bytes, half), count, each))
        });
        if paired.is_some() || cols == 1 {
            return paired;
        }
    }
    (1..=waves_of(w[0], cols, false)).find_map(|waves| {
        let (grid, bytes, count, each) = of(waves)?;
        device.whole(NAMES[at], grid, bytes).map(|launch| (launch, count, each))
    })
}

/// Most rows whose experts choose in the blocks of `few_experts` and `few_down`: an expert that several rows chose is
/// read for each of them.
pub const LATE_ROWS: usize = 4;

/// `few_experts` for one row: `pairs` experts of `n` rows of weights of gate and of up, and a shared one of `n_shared`.
pub fn experts(
    w: WeightType,
    pairs: usize,
    n_shared: usize,
    [n, k]: [usize; 2],
    device: Device,
    half: Half,
) -> Option<Each> {
    let row = 2 * whole_row(w, k)?;
    let blocks = |each: usize| n.div_ceil(each) * pairs + n_shared.div_ceil(each);
    // As many blocks as fill the device once, or twice where these are too long.
    let each = [1, 2, 3].into_iter().filter_map(|waves| {
        let most = waves * device.sms;
        let least = (pairs * n + n_shared).div_ceil(most).max(1);
        (least..=n.max(n_shared).max(least)).find(|&each| blocks(each) <= most)
    });
    let (each, bytes) =
        each.map(|each| (each, shared(w, 1, runs(k), each * row))).find(|(_, bytes)| *bytes <= device.half())?;
    let (entry, grid) = ("few_experts", [blocks(each) as u32, 1, 1]);
    let launch = match blocks(each) <= device.sms {
        true => device.paired(entry, grid, bytes, half),
        false => device.doubled(entry, grid, bytes),
    };
    Some((launch, each as u32))
}

/// `few_experts_rows` for `rows` rows: `n_experts` experts, shared ones counted, of `n` rows of weights of gate and of
/// up for each; also the rows of weights of a warp, and those in flight.
pub fn experts_rows(
    w: WeightType,
    rows: usize,
    n_experts: usize,
    [n, k]: [usize; 2],
    device: Device,
    half: Half,
) -> Option<(Launch, u32, u32)> {
    let row = 2 * whole_row(w, k)?;
    let warps = half.block() as usize / 32;
    let bytes = |stages: usize| shared(w, rows, runs(k), warps * stages * row) + (stages - 1) * BARRIERS;
    let stages = (2..=4).rev().find(|&stages| bytes(stages) <= device.half())?;
    let each = (rows * n_experts * n).div_ceil(device.sms * warps);
    let blocks = (rows * n_experts * n).div_ceil(each * warps);
    let launch = device.paired("few_experts_rows", [blocks as u32, 1, 1], bytes(stages), half);
    Some((launch, each as u32, stages as u32))
}

/// `few_down` for one row: `n` rows of weights of `k` numbers for each of `n_used` slots, and of `k_shared` for a
/// shared expert.
pub fn down(
    w: WeightType,
    n_used: usize,
    k_shared: Option<usize>,
    [n, k]: [usize; 2],
    device: Device,
    half: Half,
) -> Option<Each> {
    let row = row_bytes(w, k)?;
    let row_shared = k_shared.map_or(Some(0), |k| row_bytes(w, k))?;
    // A tile of a slot is one piece.
    let is_whole = |rows: usize| (rows * row).is_multiple_of(16) && (rows * row_shared).is_multiple_of(16);
    let step = (1..=16).find(|&rows| is_whole(rows))?;
    let runs = runs(n_used * k) + k_shared.map_or(0, runs);
    // Blocks that fill the device once, or twice where these are too long.
    let each = [1, 2, 3].into_iter().map(|waves| n.div_ceil(waves * device.sms).next_multiple_of(step));
    let (each, bytes) = each
        .map(|each| (each, shared(w, 1, runs, each * (n_used * row + row_shared))))
        .find(|(_, bytes)| *bytes <= device.half())?;
    let fits = is_whole(n) && k.is_multiple_of(16) && k_shared.is_none_or(|k| k.is_multiple_of(16));
    let entry = if k_shared.is_some() { "few_down_shared" } else { "few_down" };
    let grid = [n.div_ceil(each) as u32, 1, 1];
    fits.then(|| match n.div_ceil(each) <= device.sms {
        true => (device.paired(entry, grid, bytes, half), each as u32),
        false => (device.doubled(entry, grid, bytes), each as u32),
    })
}

/// `few_down_rows` for `rows` rows: `n` rows of weights of `k` numbers for each of `n_used` slots, and of a shared
/// expert where there is one; also the rows of weights of a block, and the tiles that a warp has in flight.
pub fn down_rows(
    w: WeightType,
    rows: usize,
    n_used: usize,
    has_shared: bool,
    [n, k]: [usize; 2],
    device: Device,
    half: Half,
) -> Option<(Launch, u32, u32)> {
    let has_bytes = matches!(w.act(), ActKind::Byte32 | ActKind::Block256);
    let row = row_bytes(w, k).filter(|_| has_bytes && k.is_multiple_of(256))?;
    let lanes = if (k / vec_unit(w)).is_multiple_of(8) { 8 } else { 4 };
    let tile = 32 / lanes;
    // A block for each multiprocessor.
    let each = n.div_ceil((device.sms / rows).max(1)).next_multiple_of(tile);
    let slots = n_used + usize::from(has_shared);
    let fits = n.is_multiple_of(tile) && (tile * row).is_multiple_of(16);
    let bytes = |warps: usize, stages: usize| {
        shared(w, slots, k / 16, warps * stages * tile * row) + 4 * slots * each + (stages - 1) * BARRIERS
    };
    let entry = if has_shared { "few_down_rows_shared" } else { "few_down_rows" };
    let grid = [n.div_ceil(each) as u32, rows as u32, 1];
    let launch = |stages: usize| {
        let bytes = Some(bytes(half.block() as usize / 32, stages)).filter(|bytes| *bytes <= device.half())?;
        Some((device.paired(entry, grid, bytes, half), stages))
    };
    let (launch, stages) = (2..=4).rev().find_map(launch).filter(|_| fits)?;
    Some((launch, each as u32, stages as u32))
}

/// Warps of a block of `few_pairs`, rows that share its blocks of a shared expert, and most rows of weights of a block
/// whose sums are packed.
const PAIR_WARPS: usize = 4;
const SHARED_ROWS: usize = 4;
const PACKED_ROWS: usize = 128;

/// Bytes of a packed column of `k` numbers (`columns.h`).
pub fn column_bytes(k: usize) -> usize {
    24 * runs(k)
}

/// `few_pairs_gated`, or `few_pairs` without an activation: `pairs` experts of several rows, a shared one of `shared`
/// rows with them, of `n` rows of weights each; also the rows of weights of a warp.
pub fn pairs(
    w: WeightType,
    is_gated: bool,
    pairs: usize,
    shared_rows: usize,
    n: usize,
    k: usize,
    device: Device,
) -> Option<Each> {
    /// Weights of a block: several blocks share a multiprocessor.
    const BYTES: usize = 40 << 10;
    let has_bytes = matches!(w.act(), ActKind::Byte32 | ActKind::Block256);
    let row = row_bytes(w, k).filter(|_| has_bytes && k.is_multiple_of(16))?;
    // A warp's rows are one piece, and whole groups of the rows that it has at a time.
    let step = (1..=16).find(|rows| (rows * row).is_multiple_of(16)).filter(|step| n.is_multiple_of(*step))?;
    let group = if k.div_ceil(vec_unit(w)).is_multiple_of(8) { 4 } else { 8 };
    let least = step.max(group);
    let of_row = PAIR_WARPS * row * if is_gated { 2 } else { 1 };
    let each = (BYTES / of_row / least * least).clamp(least, n.div_ceil(PAIR_WARPS).next_multiple_of(least));
    // What is gated goes out in packed runs.
    let fits = !is_gated || (n.is_multiple_of(16) && PAIR_WARPS * each <= PACKED_ROWS);
    let bytes = shared(w, 2, runs(k), each * of_row);
    let items = pairs + shared_rows.div_ceil(SHARED_ROWS);
    let grid = [(n.div_ceil(PAIR_WARPS * each) * items) as u32, 1, 1];
    let entry = if is_gated { "few_pairs_gated" } else { "few_pairs" };
    let launch = Launch { entry, grid, block: 32 * PAIR_WARPS as u32, shared: bytes as u32 };
    (fits && bytes + RESERVED <= device.max_shared).then_some((launch, each as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Device = Device { sms: 132, max_shared: 227 << 10 };

    /// Blocks, rows and shared memory of the layers of Qwen3-30B-A3B.
    #[test]
    fn geometry() {
        let (q4, q6) = (WeightType::Q4_K, WeightType::Q6_K);
        let (of_pair, blocks, each) = pair([q4, q6], 1, 2048, [4608, 512], H200, Half::Registers).unwrap();
        assert_eq!((of_pair.grid, of_pair.block, blocks, each), ([131, 1, 1], 640, 113, [41, 29]));
        let (o, each) = linear(q4, 1, 4096, 2048, false, H200, Half::Shared).unwrap();
        assert_eq!((o.entry, o.grid, o.block, o.shared, each), ("few_linear1", [128, 1, 1], 512, 115_840, 16));
        let routed = |n| routed(q4, 4096, n, 128, H200, Half::Shared).map(|l| (l.grid, l.block, l.shared));
        assert_eq!((routed(2048), routed_blocks(2048)), (Some(([128, 1, 1], 512, 115_840)), 128));
        // Blocks that do not fit at once, and too few of them.
        assert_eq!((routed(2880), routed(1024)), (None, None));
        let (of_pair, blocks, each) = pair([q4, q6], 8, 2048, [4608, 512], H200, Half::Shared).unwrap();
        assert_eq!((of_pair.entry, of_pair.grid, blocks, each), ("few_pair8", [131, 1, 1], 113, [41, 29]));
        // Eight columns: rows lie apart.
        let (eight, each) = linear(q4, 8, 4096, 2048, false, H200, Half::Shared).unwrap();
        assert_eq!((eight.entry, eight.grid, eight.shared, each), ("few_linear8", [128, 1, 1], 87_616, 16));
        let (up, each) = experts(q4, 8, 0, [768, 2048], H200, Half::Registers).unwrap();
        assert_eq!((up.grid, up.shared, each), ([128, 1, 1], 114_048, 48));
        let (of_down, each) = down(q6, 8, None, [2048, 768], H200, Half::Shared).unwrap();
        assert_eq!((of_down.entry, of_down.grid, each), ("few_down", [128, 1, 1], 16));
        // The product behind the last layer is too long for one wave.
        assert_eq!(linear(q6, 1, 2048, 151_936, false, H200, Half::Shared), None);
        let (output, each, stages) = long(q6, 1, 2048, 151_936, H200).unwrap();
        assert_eq!((output.grid, output.shared, each, stages), ([132, 1, 1], 111_648, 1152, 2));
        // Two pairs of these rows for each warp are more than half of the memory.
        let (output, each, stages) = long(q6, 1, 2816, 262_144, H200).unwrap();
        assert_eq!((output.grid, output.shared, each, stages), ([132, 1, 1], 228_032, 1986, 3));
        // Experts of Gemma 4 26B-A4B, and the dense matrices beside them, take two waves.
        let (up, each) = experts(q4, 8, 2112, [704, 2816], H200, Half::Registers).unwrap();
        assert_eq!((up.grid, up.shared, each), ([263, 1, 1], 100_032, 30));
        let (of_down, each) = down(WeightType::Q8_0, 8, Some(2112), [2816, 704], H200, Half::Shared).unwrap();
        assert_eq!((of_down.entry, of_down.grid, each), ("few_down_shared", [352, 1, 1], 8));
        assert_eq!(long(q6, 1, 2816, 2048, H200), None);
        // Experts of eight rows: tiles of 16 rows of weights and of 64.
        let (of_pairs, each) = pairs(q4, true, 64, 0, 768, 2048, H200).unwrap();
        assert_eq!((of_pairs.grid, of_pairs.block, of_pairs.shared, each), ([48 * 64, 1, 1], 128, 43_488, 4));
        let (of_pairs, each) = pairs(q6, false, 64, 8, 2048, 768, H200).unwrap();
        assert_eq!((of_pairs.entry, of_pairs.grid, each), ("few_pairs", [32 * 66, 1, 1], 16));
        assert_eq!(linear(WeightType::F32, 1, 2048, 128, false, H200, Half::Shared), None);
    }

    /// Blocks, rows and shared memory of layers of Qwen3.5-35B-A3B for two to four rows.
    #[test]
    fn geometry_of_rows() {
        let (q4, q6) = (WeightType::Q4_K, WeightType::Q6_K);
        let up = |rows, half| experts_rows(q4, rows, 9, [512, 2048], H200, half).unwrap();
        let (two, four) = (up(2, Half::Registers), up(4, Half::Registers));
        // A stretch for each of 20 warps, rounded up.
        assert_eq!((two.0.grid, two.0.block, two.1, two.2), ([116, 1, 1], 640, 4, 2));
        assert_eq!((four.0.grid, four.0.block, four.1, four.2), ([132, 1, 1], 640, 7, 2));
        for half in [Half::Shared, Half::Registers] {
            for rows in 2..=LATE_ROWS {
                let launch = up(rows, half).0;
                assert!(launch.grid[0] as usize <= H200.sms && launch.shared as usize <= H200.max_shared / 2);
                for w in [q4, q6] {
                    let (launch, each, stages) = down_rows(w, rows, 8, true, [2048, 512], H200, half).unwrap();
                    let blocks = launch.grid[0] * launch.grid[1];
                    assert!(
                        blocks <= 132 && blocks > 120 && each * launch.grid[0] >= 2048 && stages >= 2,
                        "{launch:?}"
                    );
                    assert!(launch.shared as usize <= H200.max_shared / 2);
                }
            }
        }
        // Tiles of Qwen3-30B-A3B do not fit twice for each warp; others are no whole pieces or no whole warps.
        assert_eq!(down_rows(q4, 2, 8, false, [2048, 768], H200, Half::Registers), None);
        assert_eq!(down_rows(q4, 2, 8, false, [2050, 768], H200, Half::Shared), None);
        assert_eq!(down_rows(WeightType::Q8_0, 2, 8, false, [2048, 704], H200, Half::Shared), None);
        // Two columns share multiprocessors with the next launch, in one round or two; eight do not.
        let of = |rows, n| linear(q4, rows, 2048, n, false, H200, Half::Registers).unwrap().0;
        assert_eq!((of(2, 9216).block, of(2, 9216).grid), (640, [132, 1, 1]));
        assert_eq!((of(4, 12_352).block, of(4, 12_352).grid), (512, [263, 1, 1]));
        assert_eq!(long(q6, 4, 2048, 151_936, H200).unwrap().0.entry, "few_long4");
        assert_eq!(long(q6, 5, 2048, 151_936, H200), None);
    }

    /// Two blocks of a launch never fit on a multiprocessor, one of each of two launches always do.
    #[test]
    fn halves_pair() {
        let all = 228 << 10;
        for bytes in [1000, H200.half()] {
            let [a, b] = [Half::Shared, Half::Registers].map(|half| H200.paired("few_down", [1; 3], bytes, half));
            assert!(2 * (a.shared as usize + 1024) > all, "{a:?}");
            assert!(a.shared as usize + b.shared as usize + 2 * 1024 + 400 <= all, "{a:?} {b:?}");
            assert_eq!((a.block / 128, b.block / 128), (4, 5));
        }
    }
}
