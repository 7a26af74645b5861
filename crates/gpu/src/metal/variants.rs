//! Which form of a product's kernel a shape takes: the first row of a table that fits. The last one, plain, fits all.

use quant::WeightType;

/// A product: rows of weights, their length, their type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub dtype: WeightType,
    pub n: usize,
    pub k: usize,
    /// [`Tuning::many`].
    pub many: usize,
}

/// What decides between forms besides the shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Every product takes the plain form.
    pub is_plain: bool,
    /// Outputs of a product under which more of them to a simdgroup leave cores without work.
    pub many: usize,
    /// What takes its plain kernels, each op by itself.
    pub off: Off,
    /// Positions of a part of attention, at least; a multiple of a page's. A token behind more of them is computed by
    /// a threadgroup for each part.
    pub part: usize,
}

/// Kinds of kernels of which the plain ones alone are used: on this GPU the others are wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Off {
    /// Attention in tiles and in parts; heads' norms, rotary embeddings and appends together.
    pub attention: bool,
    /// What comes before latent attention, together.
    pub latent: bool,
    /// Experts with their sum, sorted by expert, with one beside them.
    pub experts: bool,
    /// Norms that follow each other, together.
    pub norms: bool,
    /// What comes before a delta rule and the norm behind it, together.
    pub delta: bool,
}

impl Off {
    /// None.
    pub const NONE: Off = Off { attention: false, latent: false, experts: false, norms: false, delta: false };
    /// All: each op runs by itself.
    pub const ALL: Off = Off { attention: true, latent: true, experts: true, norms: true, delta: true };
}

impl Default for Tuning {
    /// 8 threadgroups of 4 outputs for each of 32 cores. No Mac was asked.
    fn default() -> Tuning {
        Tuning { is_plain: false, many: 1024, off: Off::NONE, part: 512 }
    }
}

/// How a product with few rows of x goes over the GPU: `rows` rows of weights to a simdgroup, two simdgroups to a
/// threadgroup.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// Rows of weights that share a load of x.
    pub rows: usize,
    /// Whether x is loaded four numbers at a time.
    pub is_wide: bool,
    fits: fn(&Shape) -> bool,
}

fn is_wide(shape: &Shape) -> bool {
    shape.k.is_multiple_of(16)
}

/// Types whose decoding takes few registers, after llama.cpp's table of rows by type (`ggml-metal-impl.h`); of Q8_0,
/// Q3_K and TQ1_0, which are not in it, four rows take fewer instructions too, and of IQ2_S, which is, more.
fn is_light(shape: &Shape) -> bool {
    use WeightType::{IQ1_M, IQ1_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, TQ1_0, TQ2_0};
    use WeightType::{Q2_K, Q3_K, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
    let is_block = matches!(shape.dtype, Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 | Q2_K | Q3_K);
    let is_iq = matches!(shape.dtype, IQ1_M | IQ1_S | IQ2_XS | IQ2_XXS | IQ3_XXS | IQ3_S);
    is_block || is_iq || matches!(shape.dtype, TQ1_0 | TQ2_0 | WeightType::Affine(_))
}

const TABLE: [Rows; 4] = [
    Rows { rows: 4, is_wide: true, fits: |s| is_wide(s) && is_light(s) && s.n >= 2 * s.many },
    Rows { rows: 2, is_wide: true, fits: |s| is_wide(s) && s.dtype != WeightType::Q5_K && s.n >= s.many },
    Rows { rows: 1, is_wide: true, fits: is_wide },
    PLAIN,
];

/// What every shape fits: a row of weights to a simdgroup, a number of x at a time.
pub const PLAIN: Rows = Rows { rows: 1, is_wide: false, fits: |_| true };

/// The form for few rows of x.
pub fn few(shape: Shape, tuning: Tuning) -> Rows {
    if tuning.is_plain {
        return PLAIN;
    }
    TABLE.into_iter().find(|row| (row.fits)(&shape)).unwrap_or(PLAIN)
}

/// Rows of x of the form that reads weights once for all of a few.
pub const COLUMNS: usize = LEAST_ROWS - 1;

/// Rows of weights to a simdgroup of that form.
pub fn rows_of_few(form: Rows) -> usize {
    form.rows.min(2)
}

/// Tokens from which pairs of tokens and experts are sorted by expert and multiplied in tiles: an expert then has two
/// pairs on average. A tile of up to eight pairs takes about as long as its weights take to be read, once or for each
/// pair: 64 x 8 multiply-adds a weight row against half a byte a weight, at 5 TFLOPS and 300 GB/s.
pub fn least_grouped(n_expert: usize, n_used: usize) -> usize {
    (2 * n_expert).div_ceil(n_used.max(1)).max(LEAST_ROWS)
}

/// Maximum number of parts of attention: what a token keeps of each is small beside its keys.
const MAX_PARTS: usize = 64;

/// Positions of a part of attention where sequences have as many as this, and the number of parts.
pub fn attention_parts(tuning: Tuning, max_positions: usize) -> (usize, usize) {
    let page = backend::PAGE;
    let part = max_positions.div_ceil(MAX_PARTS).max(tuning.part).next_multiple_of(page);
    (part, max_positions.div_ceil(part))
}

/// Rows of x from which a tile pays: it reads weights once for 32 of them, where each row of x alone reads them all.
/// MLX's limits lie at 6 to 18 rows on M1 and M2; no Mac was asked here.
pub const LEAST_ROWS: usize = 10;
/// Rows of weights and of x of a tile, and threads that compute it.
pub const TILE: [u32; 2] = [64, 32];
/// Forms besides tiles: rows of weights to a simdgroup, and whether x is loaded four numbers at a time.
pub fn forms() -> impl Iterator<Item = Rows> {
    TABLE.into_iter()
}

/// Threads of a tile.
pub const TILE_THREADS: u32 = 128;

/// Rows of weights of a tile that takes two matrices, of each.
pub const GATED_TILE: u32 = TILE[0] / 2;

/// Rows of a tile of attention, each a token and a head: the most whose queries, with a piece of keys or values and the
/// scores, fit in 32 KB of threadgroup memory, and whose sums take no more than 16 matrices of a simdgroup. `None` for
/// heads too large for eight.
pub fn attention_tile(d_k: usize, d_v: usize) -> Option<usize> {
    // As in `attention_tiles.metal`.
    let floats = |rows: usize| rows * (d_k.next_multiple_of(8) + 4) + 2304 + rows * 36 + rows + 4;
    let matrices = |rows: usize| rows / 8 * 2 * d_v.div_ceil(64);
    [32, 16, 8].into_iter().find(|&rows| 4 * floats(rows) <= 32768 && matrices(rows) <= 16)
}

/// How a delta rule's columns go over a threadgroup, many positions at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaTile {
    /// Eights of columns of a simdgroup.
    pub blocks: usize,
    /// Simdgroups of a threadgroup.
    pub simdgroups: usize,
}

/// Such a tile, whose keys and queries fit in 32 KB of threadgroup memory and whose state takes no more than 32
/// matrices of a simdgroup; with a norm it has all columns of a head. `None` for heads too large.
pub fn delta_tile(d_k: usize, d_v: usize, has_norm: bool) -> Option<DeltaTile> {
    let steps = d_k.div_ceil(8);
    let blocks = if 2 * steps <= 32 { 2 } else { 1 };
    let wanted = d_v.div_ceil(8 * blocks).max(2);
    let simdgroups = wanted.min(8);
    // As in `delta_chunks.metal`.
    let floats = 2 * 16 * (8 * steps + 4) + 4 * 16 * 20 + 16 + 17 * simdgroups;
    let fits = steps * blocks <= 32 && 4 * floats <= 32768 && (!has_norm || wanted <= 8);
    fits.then_some(DeltaTile { blocks, simdgroups })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_of_delta_rules_fit() {
        let tile = |blocks, simdgroups| Some(DeltaTile { blocks, simdgroups });
        for (d_k, d_v, has_norm, wanted) in [
            (128, 128, true, tile(2, 8)),
            (128, 256, true, None),
            (128, 256, false, tile(2, 8)),
            (20, 13, true, tile(2, 2)),
            (192, 64, true, tile(1, 8)),
            (192, 128, true, None),
            (256, 64, false, None),
        ] {
            assert_eq!(delta_tile(d_k, d_v, has_norm), wanted, "{d_k} {d_v}");
        }
    }

    #[test]
    fn contexts_have_few_parts() {
        for (max_positions, part, n) in
            [(100, 512, 1), (4096, 512, 8), (32_768, 512, 64), (40_000, 640, 63), (1 << 20, 16_384, 64)]
        {
            assert_eq!(attention_parts(Tuning::default(), max_positions), (part, n));
        }
    }

    #[test]
    fn tiles_of_attention_fit() {
        for (d_k, d_v, rows) in [
            (64, 64, Some(32)),
            (128, 128, Some(32)),
            (192, 128, Some(16)),
            (256, 256, Some(16)),
            (512, 512, Some(8)),
            (576, 512, Some(8)),
            (1024, 512, None),
        ] {
            assert_eq!(attention_tile(d_k, d_v), rows, "{d_k} {d_v}");
        }
    }

    #[test]
    fn shapes_take_the_first_row_that_fits() {
        use WeightType::{F32, Q4_0, Q4_K, Q5_K};
        for (dtype, n, k, form) in [
            (Q4_0, 4096, 4096, (4, true)),
            (Q4_0, 1500, 4096, (2, true)),
            (Q4_K, 4096, 2048, (2, true)),
            (Q5_K, 4096, 2048, (1, true)),
            (Q4_K, 512, 2048, (1, true)),
            (F32, 128, 48, (1, true)),
            (F32, 4096, 33, (1, false)),
        ] {
            let tuning = Tuning::default();
            let shape = Shape { dtype, n, k, many: tuning.many };
            let found = |tuning| (few(shape, tuning).rows, few(shape, tuning).is_wide);
            assert_eq!(found(tuning), form, "{shape:?}");
            let plain = Tuning { is_plain: true, ..tuning };
            assert_eq!(found(plain), (1, false), "{shape:?}");
        }
    }
}
