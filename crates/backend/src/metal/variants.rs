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
}

impl Default for Tuning {
    /// 8 threadgroups of 4 outputs for each of 32 cores. No Mac was asked.
    fn default() -> Tuning {
        Tuning { is_plain: false, many: 1024 }
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

/// Types whose decoding takes few registers, after llama.cpp's table of rows by type (`ggml-metal-impl.h`).
fn is_light(shape: &Shape) -> bool {
    use WeightType::{Q2_K, Q4_0, Q4_1, Q5_0, Q5_1};
    matches!(shape.dtype, Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q2_K | WeightType::Affine(_))
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

/// Whether many rows of x are multiplied in tiles.
pub fn has_tiles(shape: Shape, tuning: Tuning) -> bool {
    !tuning.is_plain && shape.k.is_multiple_of(32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_take_the_first_row_that_fits() {
        use WeightType::{F32, Q4_0, Q4_K, Q5_K};
        for (dtype, n, k, form, tiles) in [
            (Q4_0, 4096, 4096, (4, true), true),
            (Q4_0, 1500, 4096, (2, true), true),
            (Q4_K, 4096, 2048, (2, true), true),
            (Q5_K, 4096, 2048, (1, true), true),
            (Q4_K, 512, 2048, (1, true), true),
            (F32, 128, 48, (1, true), false),
            (F32, 4096, 33, (1, false), false),
        ] {
            let tuning = Tuning::default();
            let shape = Shape { dtype, n, k, many: tuning.many };
            let found = |tuning| (few(shape, tuning).rows, few(shape, tuning).is_wide);
            assert_eq!((found(tuning), has_tiles(shape, tuning)), (form, tiles), "{shape:?}");
            let plain = Tuning { is_plain: true, ..tuning };
            assert_eq!((found(plain), has_tiles(shape, plain)), ((1, false), false), "{shape:?}");
        }
    }
}
