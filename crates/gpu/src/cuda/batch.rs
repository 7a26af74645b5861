//! Geometry of products of 9 to 64 rows, and some of fewer and of more, on tensor cores: `kernels/cuda/batch.h`, whose
//! names are repeated here. Knows no driver.

use model::plan::{Op, Plan};
use quant::WeightType;

use super::few_launch;
use super::launch::Launch;
use super::matmul::unit;
use backend::Limits;

/// Numbers of rows that all products take these kernels for.
pub const ROWS: std::ops::RangeInclusive<usize> = 9..=64;

/// Numbers of rows from which products of a step of few rows are faster with these kernels too: of columns behind a
/// gate, which every block of the others applies for itself, and of all others.
pub const FROM_GATED: usize = 4;
pub const FROM: usize = 5;

/// Most rows of weights of such a product: the output matrix is as fast with the others.
const MAX_FROM_FEW: usize = 1 << 15;

/// Whether a product of a step of few rows takes these kernels: of `n` rows of weights of the types `w`, the second of
/// none where there is one type. `is_packed`: its columns come packed from the sum before.
pub fn is_from_few(w: [WeightType; 2], n: [usize; 2], rows: usize, has_gate: bool, is_packed: bool) -> bool {
    let from = if has_gate { FROM_GATED } else { FROM };
    // Packed columns meet Q4_K on tensor cores in the other kernels too.
    let is_quick = is_packed && w[0] == WeightType::Q4_K && 4 * n[1] <= n[0];
    rows >= from && !is_quick && n[0] + n[1] <= MAX_FROM_FEW
}

/// Most rows of a step that takes the list for these kernels, where products of more rows than [`ROWS`] have wide
/// ones, and where they have none.
pub fn most_rows(is_wide: bool) -> usize {
    if is_wide { MAX_ROWS } else { *ROWS.end() }
}

/// Most rows of such a step.
pub const MAX_ROWS: usize = 512;

/// Whether experts take wide kernels, where rows are enough: with fewer pairs an expert those for pairs are faster.
pub fn has_wide_experts(pairs: usize, n_expert: usize) -> bool {
    4 * pairs >= 7 * n_expert
}

/// Whether a type has these kernels: bf16 is coarser than f32.
pub fn fits(w: WeightType) -> bool {
    w != WeightType::F32
}

/// The order of packed columns that the weights of a type want.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// Runs of 16 values of a unit.
    pub runs: usize,
    /// A unit's runs lie 32 values apart.
    pub is_paired: bool,
}

impl Order {
    /// Of a type as `batch.h` reads it.
    pub fn of(w: WeightType) -> Order {
        match w {
            WeightType::Q4_K => Order { runs: 4, is_paired: false },
            _ => Order::of_units(w),
        }
    }

    /// Of the units of a type's own header.
    pub fn of_units(w: WeightType) -> Order {
        let is_paired = matches!(
            w,
            WeightType::Q2_K
                | WeightType::Q3_K
                | WeightType::Q4_K
                | WeightType::Q5_K
                | WeightType::Q6_K
                | WeightType::TQ2_0
        );
        Order { runs: unit(w) / 16, is_paired }
    }

    /// Numbers from row to row of `k` values: whole steps of four units.
    pub fn stride(self, k: usize) -> usize {
        k.next_multiple_of(64 * self.runs)
    }
}

/// Widest row of `k` values in any order.
fn widest(k: usize) -> usize {
    k.next_multiple_of(256)
}

/// Scratch of such steps in bytes: two packed copies of x (or one in f32), the experts' packed activations, and what a
/// shared expert puts out.
pub fn scratch(plan: &Plan, limits: Limits) -> [usize; 3] {
    let rows = limits.max_tokens.min(MAX_ROWS);
    let mut need = [0; 3];
    if !has_steps(limits) {
        return need;
    }
    let packed = |k| (2 * widest(k)).max(few_launch::column_bytes(k));
    for op in &plan.ops {
        let (x, hidden, out) = match *op {
            Op::Linear { x, .. } | Op::GatedLinear { x, .. } => (plan.buf(x).width, 0, 0),
            Op::Experts { x, ids, hidden, out, .. } => {
                (plan.buf(x).width, (plan.buf(ids).width + 1) * packed(plan.buf(hidden).width), plan.buf(out).width)
            }
            _ => continue,
        };
        for (need, bytes) in need.iter_mut().zip([4 * widest(x), hidden, 4 * out]) {
            *need = (*need).max(rows.saturating_mul(bytes));
        }
    }
    need
}

/// Whether a program has such steps.
pub fn has_steps(limits: Limits) -> bool {
    limits.max_tokens >= *ROWS.start()
}

/// A launch and the warps that share rows of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    pub launch: Launch,
    pub n_split: u32,
}

/// Words of a unit that a lane loads, with what lies around it.
fn raw(w: WeightType) -> usize {
    match w {
        WeightType::Q4_K => 12,
        _ => w.plane_bytes(256).map_or(16, |b| b.total() * unit(w) / 256 / 4 + 5),
    }
}

/// Bytes of shared memory in which a warp of experts' products copies blocks of a type before it unpacks them
/// (`StagedOf`); 0: it loads them to registers.
fn staged(w: WeightType) -> usize {
    match w {
        WeightType::Q4_K => 3 * 16 * 144,
        WeightType::Q6_K => 2 * 16 * 224,
        _ => 0,
    }
}

/// What decides the geometry of a launch.
struct Work {
    w: WeightType,
    /// Groups of 8 columns of a tile.
    groups: usize,
    /// Matrices of which a team has 16 rows each.
    parts: usize,
    k: usize,
    n_items: usize,
    /// Most warps of a block.
    warps: usize,
    /// Shared memory of a warp besides its sums.
    staged: usize,
}

impl Work {
    /// As many warps share rows as make the slowest team's work least, and more where that is the same.
    fn launch(&self, entry: &'static str, sms: usize) -> Batch {
        let Work { w, groups, parts, k, n_items, warps, staged } = *self;
        let steps = k.div_ceil(64 * Order::of(w).runs);
        let of_warp = if staged > 0 { 1 } else { [4, 2].into_iter().find(|n| raw(w) * 2 * n <= 80).unwrap_or(1) };
        let time = |share: usize| n_items.div_ceil(sms * (warps / (share * parts))) * steps.div_ceil(share * of_warp);
        let share = (1..=warps / parts).rev().min_by_key(|&share| time(share)).unwrap_or(1);
        let n_split = share * parts;
        let used = warps / n_split * n_split;
        let shared = used * (2 * groups * 4 * 128 + staged);
        let launch = Launch { entry, grid: [sms as u32, 1, 1], block: 32 * used as u32, shared: shared as u32 };
        Batch { launch, n_split: n_split as u32 }
    }
}

/// Most warps of a block whose warps hold units in registers.
fn most_warps(groups: usize) -> usize {
    if groups > 2 { 8 } else { 12 }
}

/// Groups of 8 columns of a tile for so many rows.
fn groups(rows: usize, widths: &[usize]) -> usize {
    let most = widths.last().copied().unwrap_or(1);
    let each = rows.div_ceil(rows.div_ceil(8 * most));
    widths.iter().copied().find(|n| each <= 8 * n).unwrap_or(most)
}

/// `linear` with `n` rows of weights in all parts.
pub fn linear(w: WeightType, rows: usize, k: usize, n: usize, sms: usize) -> Batch {
    let groups = groups(rows, &[2, 3, 4]);
    let entry = ["linear_batch2", "linear_batch3", "linear_batch4"][groups - 2];
    let n_items = n.div_ceil(16) * rows.div_ceil(8 * groups);
    Work { w, groups, parts: 1, k, n_items, warps: most_warps(groups), staged: 0 }.launch(entry, sms)
}

/// `gated_linear`, `n` rows of gate and of up.
pub fn gated_linear(w: WeightType, rows: usize, k: usize, n: usize, sms: usize) -> Batch {
    let groups = groups(rows, &[2, 4]);
    let entry = if groups == 2 { "gated_linear_batch2" } else { "gated_linear_batch4" };
    let n_items = n.div_ceil(16) * rows.div_ceil(8 * groups);
    Work { w, groups, parts: 2, k, n_items, warps: most_warps(groups), staged: 0 }.launch(entry, sms)
}

/// `experts`: `n_expert` experts, with a shared one one more for all rows, on a device of so many multiprocessors whose
/// blocks may have so many bytes of shared memory.
#[allow(clippy::too_many_arguments)]
pub fn experts(
    w: WeightType,
    rows: usize,
    n_used: usize,
    n_expert: usize,
    n: usize,
    k: usize,
    is_gated: bool,
    [sms, max_shared]: [usize; 2],
) -> Batch {
    let pairs = rows * n_used;
    // Most experts find room in one tile.
    let wanted = pairs.div_ceil(n_expert.max(1)) * 3 / 2;
    let groups = [1, 2].into_iter().find(|n| wanted <= 8 * n).unwrap_or(4);
    let entry = match (groups, is_gated) {
        (1, true) => "experts_gated_batch1",
        (2, true) => "experts_gated_batch2",
        (_, true) => "experts_gated_batch4",
        (1, false) => "experts_batch1",
        (2, false) => "experts_batch2",
        (_, false) => "experts_batch4",
    };
    // Tiles before each expert lie behind the sums.
    let lists = (4 * (n_expert + 2)).next_multiple_of(16);
    let staged = staged(w);
    let most = match groups {
        _ if staged == 0 => most_warps(groups),
        1 => 20,
        2 => 16,
        _ => 12,
    };
    let warps = most.min((max_shared - lists) / (2 * groups * 4 * 128 + staged)).max(2);
    let n_items = n.div_ceil(16) * n_expert.min(pairs);
    let batch = Work { w, groups, parts: 1 + usize::from(is_gated), k, n_items, warps, staged }.launch(entry, sms);
    let shared = batch.launch.shared + lists as u32;
    Batch { launch: Launch { shared, ..batch.launch }, ..batch }
}

/// `pack`: a thread takes 8 values.
pub fn pack(rows: usize, k: usize) -> Launch {
    let block = k.div_ceil(8).next_multiple_of(32).clamp(64, 1024) as u32;
    Launch { entry: "pack", grid: [rows as u32, 1, 1], block, shared: 0 }
}

/// `logits`, with `n` rows of weights in all parts.
pub fn logits(rows: usize, n: usize) -> Launch {
    let grid = [n.div_ceil(2) as u32, rows.div_ceil(8) as u32, 1];
    Launch { entry: "logits", grid, block: 128, shared: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Entry points, warps that share rows, threads and shared memory of shapes that users have.
    #[test]
    fn geometry() {
        let q4 = WeightType::Q4_K;
        let h200 = [132, 232_448];
        for (batch, entry, n_split, block, shared) in [
            (linear(q4, 16, 2048, 5120, 132), "linear_batch2", 4, 384, 24576),
            (linear(q4, 16, 4096, 2048, 132), "linear_batch2", 12, 384, 24576),
            (linear(q4, 33, 2048, 5120, 132), "linear_batch3", 4, 256, 24576),
            (linear(WeightType::Q6_K, 64, 2048, 151936, 132), "linear_batch4", 4, 256, 32768),
            (experts(q4, 16, 8, 128, 768, 2048, true, h200), "experts_gated_batch1", 4, 640, 159248),
            (experts(q4, 64, 8, 128, 2048, 768, false, h200), "experts_batch1", 3, 576, 143376),
            (experts(q4, 64, 2, 8, 14336, 4096, true, h200), "experts_gated_batch4", 4, 384, 132144),
        ] {
            let Launch { entry: found, grid, block: threads, shared: bytes } = batch.launch;
            assert_eq!((found, batch.n_split, threads, bytes, grid[0]), (entry, n_split, block, shared, 132));
        }
    }

    /// Products of 8 rows of Qwen3-30B-A3B, Qwen3.5-35B-A3B and Gemma 4 26B-A4B.
    #[test]
    fn products_of_few_rows_that_tensor_cores_take() {
        let (q4, q6) = (WeightType::Q4_K, WeightType::Q6_K);
        for (w, n, has_gate, is_packed, expected) in [
            // Queries, keys and values behind the sum of experts.
            ([q4, q6], [4608, 512], false, true, [false, false, false]),
            ([q4, q4], [5120, 0], false, true, [false, false, false]),
            // Of a delta net.
            ([q6, q4], [8192, 4160], false, true, [false, false, true]),
            // Behind a norm of the sum.
            ([q4, q6], [6144, 2048], false, false, [false, false, true]),
            // Of attention's output, behind a gate and without.
            ([q4, q4], [2048, 0], true, false, [false, true, true]),
            ([q4, q4], [2048, 0], false, false, [false, false, true]),
            ([q6, q6], [151_936, 0], false, false, [false, false, false]),
        ] {
            let found = [3, 4, 5].map(|rows| is_from_few(w, n, rows, has_gate, is_packed));
            assert_eq!(found, expected, "{w:?} {n:?}");
        }
    }

    /// No number of rows takes more tiles of columns than it needs.
    #[test]
    fn tiles_grow_with_rows() {
        let widths = ROWS.map(|rows| groups(rows, &[2, 3, 4])).collect::<Vec<_>>();
        assert_eq!([widths[0], widths[7], widths[8], widths[16], widths[24], widths[40]], [2, 2, 3, 4, 3, 4]);
        assert_eq!(groups(64, &[2, 4]), 4);
    }

    /// What the kernels' headers state.
    #[test]
    fn orders_are_those_of_the_headers() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels");
        for t in WeightType::ALL {
            let file = match t {
                WeightType::Affine(_) => "quant/affine",
                WeightType::Q4_K => "cuda/q4_k_batch",
                t => &format!("quant/{}", t.name()),
            };
            let text = std::fs::read_to_string(dir.join(file).with_extension("h")).unwrap();
            let number = |name: &str| {
                let at = text.find(&format!("{name} = ")).unwrap() + name.len() + 3;
                text[at..].chars().take_while(char::is_ascii_digit).collect::<String>()
            };
            let Order { runs, is_paired } = Order::of(t);
            let expected = (runs.to_string(), u32::from(is_paired).to_string());
            assert_eq!((number("RUNS"), number("PAIRED")), expected, "{t}");
        }
    }
}
