//! Geometry of the kernels that read weights: which of a module's entry points runs an op, and over how many blocks.
//!
//! `kernels/cuda/vec.h` takes one to eight columns (rows of activations), `tile.h` tiles of 8 to 64. What a kernel
//! derives from its type (units, lanes a row, bytes of shared memory) is repeated here under the same names.
//! Knows no driver.

use quant::WeightType;
use quant::act::ActKind;

use super::launch::Launch;

/// Threads of a block of every kernel but `embed` and those of `vec.h`.
const BLOCK: usize = 256;
/// Threads of a block of `vec.h` (`VEC_THREADS`).
const VEC_BLOCK: usize = 512;
/// Warps of a block of `tile.h`.
const TILE_WARPS: usize = 8;
/// Maximum number of columns of `vec.h`.
const VEC_COLS: usize = 8;

/// Number of rows from which [`experts`] wants expert lists.
pub fn lists_from() -> usize {
    VEC_COLS + 1
}

/// `linear`: up to four matrices `[n, k]` of one type that share `rows` rows of activations.
pub fn linear(w: WeightType, rows: usize, k: usize, n: &[usize], sms: usize) -> Launch {
    let n = n.iter().sum();
    if rows <= VEC_COLS {
        let (cols, entry) =
            by_cols(rows, &[(1, "linear_vec1"), (2, "linear_vec2"), (4, "linear_vec4"), (8, "linear_vec8")]);
        return Launch { grid: [vec_blocks(w, n, k, 1, sms), 1, 1], ..vec_launch(entry, w, cols, k) };
    }
    let (cols, entry) = by_cols(rows, &[(16, "linear_tile16"), (32, "linear_tile32"), (64, "linear_tile64")]);
    let tiles = rows.div_ceil(cols);
    tile_launch(entry, [tiles as u32, row_blocks(n, tiles, sms), 1])
}

/// `gated_linear`: gate and up `[n, k]` of one type.
pub fn gated_linear(w: WeightType, rows: usize, k: usize, n: usize, sms: usize) -> Launch {
    if rows <= VEC_COLS {
        let names =
            [(1, "gated_linear_vec1"), (2, "gated_linear_vec2"), (4, "gated_linear_vec4"), (8, "gated_linear_vec8")];
        let (cols, entry) = by_cols(rows, &names);
        return Launch { grid: [vec_blocks(w, n, k, 1, sms), 1, 1], ..vec_launch(entry, w, cols, k) };
    }
    let names = [(16, "gated_linear_tile16"), (32, "gated_linear_tile32"), (64, "gated_linear_tile64")];
    let (cols, entry) = by_cols(rows, &names);
    let tiles = rows.div_ceil(cols);
    tile_launch(entry, [tiles as u32, row_blocks(n, tiles, sms), 1])
}

/// `experts`: a projection of every pair's expert, or gate and up with their activation, `[n_expert, n, k]` of one
/// type.
#[allow(clippy::too_many_arguments)]
pub fn experts(
    w: WeightType,
    rows: usize,
    n_used: usize,
    n_expert: usize,
    n: usize,
    k: usize,
    is_gated: bool,
    sms: usize,
) -> Launch {
    let pairs = rows * n_used;
    if rows < lists_from() {
        let entry = if is_gated { "experts_gated_vec" } else { "experts_vec" };
        return Launch { grid: [vec_blocks(w, n, k, pairs, sms), pairs as u32, 1], ..vec_launch(entry, w, 1, k) };
    }
    // A tile has room for somewhat more pairs than an expert has on average.
    let wanted = (pairs / n_expert.max(1)) * 5 / 4;
    let names: &[(usize, &'static str)] = if is_gated {
        &[
            (8, "experts_gated_tile8"),
            (16, "experts_gated_tile16"),
            (32, "experts_gated_tile32"),
            (64, "experts_gated_tile64"),
        ]
    } else {
        &[(8, "experts_tile8"), (16, "experts_tile16"), (32, "experts_tile32"), (64, "experts_tile64")]
    };
    let (cols, entry) = by_cols(wanted, names);
    // As many tiles as there can be; those that find no pairs leave at once.
    let experts = n_expert.min(pairs);
    let tiles = (pairs - experts) / cols + experts;
    tile_launch(entry, [tiles as u32, row_blocks(n, experts, sms), 1])
}

/// `expert_lists`, of tiles too, and with this many pairs that are packed.
pub fn expert_lists(n_expert: usize, with_tiles: bool, packed: usize) -> Launch {
    let blocks = n_expert + usize::from(with_tiles) + packed;
    Launch { entry: "expert_lists", grid: [blocks as u32, 1, 1], block: BLOCK as u32, shared: 4 * n_expert as u32 }
}

/// `embed`: rows of a table `[n_vocab, d]`.
pub fn embed(w: WeightType, rows: usize, d: usize) -> Launch {
    let block = 128;
    Launch {
        entry: "embed",
        grid: [rows as u32, units(w, d).div_ceil(block) as u32, 1],
        block: block as u32,
        shared: 0,
    }
}

/// `head_linear`: matrices `[n_head, n, k]`, transposed `[n_head, k, n]`.
pub fn head_linear(w: WeightType, transposed: bool, rows: usize, n_head: usize, n: usize, k: usize) -> Launch {
    if transposed {
        let units = units(w, n);
        let lanes = units.next_power_of_two().min(32);
        let tile_rows = 4 / (unit(w) / 16);
        let grid = [units.div_ceil(lanes) as u32, n_head as u32, rows.div_ceil(tile_rows) as u32];
        return Launch { entry: "head_linear_t", grid, block: BLOCK as u32, shared: 0 };
    }
    // Heads are many and their matrices small: blocks for a large device do no harm to a small one.
    let sms = 132;
    if rows <= VEC_COLS {
        let names =
            [(1, "head_linear_vec1"), (2, "head_linear_vec2"), (4, "head_linear_vec4"), (8, "head_linear_vec8")];
        let (cols, entry) = by_cols(rows, &names);
        return Launch { grid: [vec_blocks(w, n, k, n_head, sms), n_head as u32, 1], ..vec_launch(entry, w, cols, k) };
    }
    let names = [(16, "head_linear_tile16"), (32, "head_linear_tile32"), (64, "head_linear_tile64")];
    let (cols, entry) = by_cols(rows, &names);
    let tiles = rows.div_ceil(cols);
    tile_launch(entry, [tiles as u32, row_blocks(n, tiles * n_head, sms), n_head as u32])
}

/// The narrowest entry point that takes this number of columns, else the widest.
fn by_cols(cols: usize, entries: &[(usize, &'static str)]) -> (usize, &'static str) {
    let fits = entries.iter().find(|(width, _)| cols <= *width);
    fits.or(entries.last()).copied().unwrap_or((1, ""))
}

/// Values of a unit: what a lane decodes at a time (`UNIT` of the type's header).
pub fn unit(w: WeightType) -> usize {
    match w {
        WeightType::Q2_K | WeightType::Q3_K | WeightType::Q6_K | WeightType::TQ2_0 => 64,
        _ if w.act() == ActKind::F32 => 16,
        _ => 32,
    }
}

/// Threads of a block of `router`, which has a row of weights: a unit each, as far as they go, or two halves of 128.
pub fn router_threads(w: WeightType, k: usize) -> u32 {
    match units(w, k) {
        ..=128 => 256,
        units => units.next_multiple_of(32).min(256) as u32,
    }
}

/// Units of a row.
fn units(w: WeightType, k: usize) -> usize {
    k.div_ceil(unit(w))
}

/// Values of a unit as `vec.h` reads the type (`VecOf`).
pub fn vec_unit(w: WeightType) -> usize {
    if w == WeightType::Q4_K { 64 } else { unit(w) }
}

/// Rows of a tile of `vec.h`.
fn tile_rows(w: WeightType, k: usize) -> usize {
    let units = k.div_ceil(vec_unit(w));
    VEC_BLOCK / [32, 16, 8].into_iter().find(|lanes| units >= *lanes).unwrap_or(4)
}

/// Blocks over the `n` rows of one of `copies` products: one a multiprocessor, each with as many tiles. More blocks
/// would stage the activations more often, and leave no room for those of the next kernel.
fn vec_blocks(w: WeightType, n: usize, k: usize, copies: usize, sms: usize) -> u32 {
    let tiles = n.div_ceil(tile_rows(w, k)).max(1);
    let waves = (tiles * copies).div_ceil(sms.max(1));
    tiles.div_ceil(waves.max(1)) as u32
}

/// A launch of `vec.h` for `cols` columns: shared memory holds a chunk of a row, or all of it.
fn vec_launch(entry: &'static str, w: WeightType, cols: usize, k: usize) -> Launch {
    let (run_bytes, runs) = match w.act() {
        ActKind::F32 => (run_bytes(w), 512),
        ActKind::Block32 => (run_bytes(w), 1024),
        ActKind::Byte32 | ActKind::Block256 => (run_bytes(w), 2048),
    };
    let runs = k.div_ceil(16).next_multiple_of(32).min(runs / cols);
    Launch { entry, grid: [1, 1, 1], block: VEC_BLOCK as u32, shared: (runs * cols * run_bytes + 64 * cols) as u32 }
}

/// Bytes that a run of 16 staged activations takes (`RUN_BYTES` of `vec.h`).
fn run_bytes(w: WeightType) -> usize {
    match w.act() {
        ActKind::F32 => 64,
        ActKind::Block32 => 40,
        ActKind::Byte32 | ActKind::Block256 => 24,
    }
}

/// `linear_pair`: matrices of two types that share up to [`VEC_COLS`] rows; also the blocks of the first type.
pub fn linear_pair(w: [WeightType; 2], rows: usize, k: usize, n: [usize; 2], sms: usize) -> (Launch, u32) {
    let names = [(1, "linear_pair_vec1"), (2, "linear_pair_vec2"), (4, "linear_pair_vec4"), (8, "linear_pair_vec8")];
    let (cols, entry) = by_cols(rows, &names);
    let tiles = [0, 1].map(|i| n[i].div_ceil(tile_rows(w[i], k)).max(1));
    let waves = (tiles[0] + tiles[1]).div_ceil(sms.max(1));
    let blocks = tiles.map(|tiles| tiles.div_ceil(waves.max(1)) as u32);
    let shared = vec_launch(entry, w[0], cols, k).shared.max(vec_launch(entry, w[1], cols, k).shared);
    (Launch { entry, grid: [blocks[0] + blocks[1], 1, 1], block: VEC_BLOCK as u32, shared }, blocks[0])
}

/// `experts_down`: a warp a row of the sum, with a shared expert of a type and a number of columns where there is one.
pub fn experts_down(
    w: WeightType,
    rows: usize,
    n_used: usize,
    shared: Option<(WeightType, usize)>,
    n: usize,
    k: usize,
) -> Launch {
    let runs = |k: usize| k.div_ceil(16).next_multiple_of(32);
    let bytes = runs(n_used * k) * run_bytes(w) + shared.map_or(0, |(w, k)| runs(k) * run_bytes(w));
    let grid = [n.div_ceil(VEC_BLOCK / 32) as u32, rows as u32, 1];
    Launch { entry: "experts_down", grid, block: VEC_BLOCK as u32, shared: bytes as u32 }
}

/// `latent_q`: queries of `n_head` heads `[d_latent, d_nope]` with matrices of type `w` for `rows` rows, `d_pe` numbers
/// of each rotated, behind a product with a type and a number of columns, where it is one launch with it; also the
/// blocks of a head, and where queries begin in shared memory.
pub fn latent_q(
    w: WeightType,
    product: Option<(WeightType, usize)>,
    rows: usize,
    n_head: usize,
    [d_latent, d_nope, d_pe]: [usize; 3],
    sms: usize,
) -> (Launch, u32, u32) {
    let (cols, entry) = by_cols(rows, &[(1, "latent_q1"), (2, "latent_q2"), (4, "latent_q4"), (8, "latent_q8")]);
    let d = d_nope + d_pe;
    let n = if product.is_some() { d } else { d_latent };
    let each = n.div_ceil((sms / n_head.max(1)).clamp(1, n));
    let blocks = n.div_ceil(each);
    let of_heads = vec_launch(entry, w, cols, d_nope).shared;
    let of_product = product.map_or(0, |(w, k)| vec_launch(entry, w, cols, k).shared);
    // A transposed matrix wants 17 numbers a thread.
    let at = of_heads.max(of_product).max(17 * 4 * VEC_BLOCK as u32).next_multiple_of(16);
    let shared = at + (4 * rows * d.next_multiple_of(4)) as u32;
    let launch = Launch { entry, grid: [(n_head * blocks + rows) as u32, 1, 1], block: VEC_BLOCK as u32, shared };
    (launch, blocks as u32, at)
}

/// `latent_out`: matrices `[n_head, n, k]`; also where merged rows begin in shared memory.
pub fn latent_out(w: WeightType, rows: usize, n_head: usize, n: usize, k: usize, sms: usize) -> (Launch, u32) {
    let names = [(1, "latent_out1"), (2, "latent_out2"), (4, "latent_out4"), (8, "latent_out8")];
    let (cols, entry) = by_cols(rows, &names);
    let launch = vec_launch(entry, w, cols, k);
    let at = launch.shared.next_multiple_of(16);
    let shared = at + (4 * rows * k.next_multiple_of(4)) as u32;
    (Launch { grid: [vec_blocks(w, n, k, n_head, sms), n_head as u32, 1], shared, ..launch }, at)
}

/// A launch of `tile.h`.
fn tile_launch(entry: &'static str, grid: [u32; 3]) -> Launch {
    Launch { entry, grid, block: (32 * TILE_WARPS) as u32, shared: 32 << 10 }
}

/// Row blocks of `n` rows, where `copies` blocks run beside each: as many rows a block as still leave every
/// multiprocessor two blocks; warps without rows of their own share those of others (`tile_split`).
fn row_blocks(n: usize, copies: usize, sms: usize) -> u32 {
    let groups = n.div_ceil(16);
    let fills = |per_block: &usize| groups.div_ceil(*per_block) * copies >= 2 * sms;
    groups.div_ceil([8, 4, 2].into_iter().find(fills).unwrap_or(1)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Entry points, grids and shared memory of shapes that users have.
    #[test]
    fn geometry() {
        let q4 = WeightType::Q4_K;
        for (launch, entry, grid, shared) in [
            (linear(q4, 1, 2048, &[4096, 512, 512], 132), "linear_vec1", [107, 1, 1], 3136),
            (linear(q4, 3, 2048, &[8], 132), "linear_vec4", [1, 1, 1], 12544),
            (linear(WeightType::F32, 8, 2880, &[32], 132), "linear_vec8", [2, 1, 1], 33280),
            (linear(q4, 9, 2048, &[2048], 132), "linear_tile16", [1, 128, 1], 32768),
            (linear(q4, 2048, 2048, &[5120], 132), "linear_tile64", [32, 40, 1], 32768),
            (experts(q4, 1, 8, 128, 768, 2048, true, 132), "experts_gated_vec", [16, 8, 1], 3136),
            (experts(q4, 16, 8, 128, 768, 2048, true, 132), "experts_gated_tile8", [128, 6, 1], 32768),
            (experts(q4, 2048, 8, 128, 2048, 768, false, 132), "experts_tile64", [382, 16, 1], 32768),
            (head_linear(q4, true, 1, 16, 512, 128), "head_linear_t", [1, 16, 1], 0),
            (embed(WeightType::Q6_K, 5, 2048), "embed", [5, 1, 1], 0),
        ] {
            assert_eq!((launch.entry, launch.grid, launch.shared), (entry, grid, shared));
        }
    }

    /// The widths of units that the kernels' headers state.
    #[test]
    fn units_are_those_of_the_headers() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels/quant");
        for t in WeightType::ALL {
            let file = if matches!(t, WeightType::Affine(_)) { "affine" } else { t.name() };
            let text = std::fs::read_to_string(dir.join(file).with_extension("h")).unwrap();
            let number = |name: &str| {
                let at = text.find(&format!("{name} = ")).unwrap() + name.len() + 3;
                text[at..].chars().take_while(char::is_ascii_digit).collect::<String>()
            };
            assert_eq!((number("UNIT"), number("RUNS")), (unit(t).to_string(), (unit(t) / 16).to_string()), "{t}");
        }
    }
}
