//! Geometry of delta rules of many tokens: `kernels/cuda/delta_chunks.cu`, whose names are repeated here, and where
//! what they pass on lies. Knows no driver.

use model::plan::{DeltaHeads, DeltaRule, Op, Plan};

use super::driver::Ptr;
use super::launch::Launch;
use backend::Limits;

/// Mean number of tokens of a step's chunks from which the rule goes in tiles.
pub const FROM: usize = 64;
/// Positions of a tile.
const TILE: usize = 32;
/// Warps that share 16 columns of a head, and such parts of a block.
const SPLIT: usize = TILE / 8;
const PARTS: usize = 2;
/// Tiles under way.
const STAGES: usize = 2;
/// Numbers of a position and head: products of decays, scales.
const GATES: usize = 8;
/// Positions that a warp takes of what comes before the rule (`delta_in.cu`).
const RUN: usize = 16;

/// Bytes of shared memory of a block.
fn shared(d_k: usize) -> usize {
    let stage = 2 * 4 * TILE * (d_k + TILE) + 4 * TILE * (16 * PARTS + 4 + GATES);
    let exchange = d_k / 16 * 2 * 512 + 2 * SPLIT * 512 + 4 * 16 * SPLIT;
    STAGES * stage + PARTS * exchange
}

/// Whether heads have these kernels on a device whose blocks may have so much shared memory.
pub fn fits(heads: DeltaHeads, max_shared: usize) -> bool {
    heads.rule == DeltaRule::Delta
        && matches!(heads.d_k, 64 | 128)
        && heads.d_v.is_multiple_of(4)
        && shared(heads.d_k) <= max_shared
}

/// Where the inputs of a rule lie, and what its tiles pass on.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// q, k, v, g and beta.
    pub inputs: [Ptr; 5],
    pub keys: Ptr,
    pub shares: Ptr,
    pub gates: Ptr,
}

/// The places of `rows` rows from `at` on, and the first byte behind them.
pub fn places(heads: DeltaHeads, rows: usize, mut at: usize) -> (Places, usize) {
    let (n_k, n_v) = (heads.n_k_head, heads.n_v_head);
    let mut next = |rows: usize, numbers: usize| {
        let from = at;
        at = at.saturating_add(rows.saturating_mul(4 * numbers)).next_multiple_of(256);
        from as Ptr
    };
    let inputs = [n_k * heads.d_k, n_k * heads.d_k, n_v * heads.d_v, n_v, n_v].map(|n| next(rows, n));
    // The last tile of each chunk may be short.
    let tiles = rows / TILE + rows / FROM + 1;
    let [keys, shares, gates] =
        [n_k * 2 * TILE * heads.d_k, n_v * 2 * TILE * TILE, n_v * TILE * GATES].map(|n| next(tiles, n));
    let places = Places { inputs, keys, shares, gates };
    (places, at)
}

/// Bytes of the places of all rules of a plan, which take turns.
pub fn bytes(plan: &Plan, limits: Limits) -> usize {
    let of_op = |op: &Op| match *op {
        Op::DeltaNet { heads, .. } => places(heads, limits.max_tokens.min(1 << 40), 0).1,
        _ => 0,
    };
    if limits.max_tokens < FROM { 0 } else { plan.ops.iter().map(of_op).max().unwrap_or(0) }
}

/// What comes before a rule, of chunks of at most `longest` tokens.
pub fn rows(heads: DeltaHeads, longest: usize, chunks: usize) -> Launch {
    let warps = 2 * heads.n_k_head + heads.n_v_head + 1;
    let grid = [warps.div_ceil(4), longest.div_ceil(RUN), chunks].map(|n| n as u32);
    Launch { entry: "delta_in_rows", grid, block: 128, shared: 0 }
}

/// The two launches of a rule in tiles.
pub fn tiles(heads: DeltaHeads, longest: usize, chunks: usize) -> [Launch; 2] {
    let before = [longest.div_ceil(TILE), heads.n_k_head, chunks].map(|n| n as u32);
    let grid = [heads.d_v.div_ceil(16 * PARTS), heads.n_v_head, chunks].map(|n| n as u32);
    let (block, shared) = ((32 * SPLIT * PARTS) as u32, shared(heads.d_k) as u32);
    [
        Launch { entry: "delta_tiles", grid: before, block: 128, shared: 0 },
        Launch { entry: "delta_chunks", grid, block, shared },
    ]
}

#[cfg(test)]
mod tests {
    use model::plan::Sharing;

    use super::*;

    const HEADS: DeltaHeads =
        DeltaHeads { n_k_head: 16, n_v_head: 32, d_k: 128, d_v: 128, sharing: Sharing::Tiled, rule: DeltaRule::Delta };

    /// Grids and shared memory of the heads of Qwen3.5-35B-A3B.
    #[test]
    fn geometry() {
        let [tiles, rule] = tiles(HEADS, 2048, 1);
        assert_eq!((tiles.grid, rule.grid, rule.block), ([64, 16, 1], [4, 32, 1], 256));
        assert_eq!(rule.shared, 118_272);
        assert_eq!(rows(HEADS, 100, 3).grid, [17, 7, 3]);
        assert!(fits(HEADS, 163 << 10) && !fits(HEADS, 99 << 10));
        assert!(fits(DeltaHeads { d_k: 64, ..HEADS }, 99 << 10));
        assert!(!fits(DeltaHeads { d_k: 96, ..HEADS }, 227 << 10) && !fits(DeltaHeads { d_v: 57, ..HEADS }, 227 << 10));
    }

    /// However a step of so many tokens is divided, its tiles have room: a chunk's are numbered from its first token's
    /// tile and its own number on.
    #[test]
    fn tiles_of_any_chunks_have_places() {
        let of = |rows| {
            let Places { keys, shares, .. } = places(HEADS, rows, 0).0;
            ((shares - keys) as usize) / (4 * HEADS.n_k_head * 2 * TILE * HEADS.d_k)
        };
        for len in FROM..300 {
            for chunks in 1..20 {
                let (rows, last) = (len * chunks, len * (chunks - 1));
                let end = last / TILE + (chunks - 1) + len.div_ceil(TILE);
                assert!(end <= of(rows), "{chunks} chunks of {len}");
            }
        }
    }
}
