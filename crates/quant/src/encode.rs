//! From f32 to bytes: an encoder for each type, which searches for the scales with the least weighted squared error.
//!
//! Which errors matter is said by the importance of each column, the mean square of what it is multiplied with, and by
//! what becomes of the product ([`RowUse`]). Scales of least squares are then drawn out until nothing of a block is
//! lost along its own direction (`Block::gain`). A row depends on its own values alone, so that rows may be encoded in
//! any order and on any thread. Knows no tensors.
//!
//! Where things are: blocks as searches want them in `block`, eight of them side by side in `eight`, searches for
//! scales in `search`, what needs them twice in `super_block`, entries of code books in `book`.

mod block;
mod book;
mod eight;
mod loss;
mod search;
mod super_block;

pub(crate) mod grid;

use fearless_simd::{Level, f32x8, prelude::*};

use crate::block::Ints32;
use crate::level::at_level;
use crate::planes::PlanesMut;
use crate::types::planar::Affine;
use crate::types::{Codec, Levels, WeightType, iq, planar, small_float};
pub(crate) use block::Block;
use block::{Blocks, byte, over_each};
pub(crate) use book::Room;
pub use loss::square_sums;
use search::{Grid, Integers, Table};
use super_block::{encode256, encode256_min};

/// Encodes a row of weights into `row`.
///
/// F32, F16 and BF16 round each value to the nearest, ties to even, and keep NaN and infinities. Quantized types take
/// NaN as 0 and an infinity as the largest f32 of its sign; values beyond what an f16 scale reaches saturate, as do
/// values past 1e38 in affine types, so what they decode to is always finite. Blocks of values below some 1e-7 become
/// zero, as f16 scales do.
///
/// # Panics
/// When the planes are not exactly `t.plane_bytes(x.len())` long.
pub fn encode_row<'a>(t: WeightType, x: &[f32], row: impl Into<PlanesMut<'a>>) {
    encode(Level::new(), t, x, &RowUse::default(), row.into());
}

/// What a row of weights is used for, which says what errors of it matter.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowUse<'a> {
    /// For each value the mean square of the activations that it is multiplied with, or anything in proportion to it.
    /// Values that are negative or not finite count as 0, and no column counts less than a thousandth of the block's
    /// mean: one that was never seen keeps a share. Large weights count somewhat more, but for types of less than three
    /// bits. Floats have no errors to weigh.
    pub importance: Option<&'a [f32]>,
    /// Whether the products of the matrix are normalized, as Gemma does with what attention gives: what they lose in
    /// length is then restored, and scales stay those of least squares.
    pub is_normalised: bool,
}

impl<'a> RowUse<'a> {
    /// That of `len` values from `at` on.
    fn part(&self, at: usize, len: usize) -> RowUse<'a> {
        RowUse { importance: self.importance.map(|importance| &importance[at..at + len]), ..*self }
    }
}

/// Encodes a row of weights as [`encode_row`] does, with errors counted by what the row is used for.
///
/// # Panics
/// As [`encode_row`], and when there are importances, but not one a value.
pub fn encode_row_for<'a>(t: WeightType, x: &[f32], usage: &RowUse<'_>, row: impl Into<PlanesMut<'a>>) {
    encode(Level::new(), t, x, usage, row.into());
}

fn encode(level: Level, t: WeightType, x: &[f32], usage: &RowUse<'_>, mut row: PlanesMut<'_>) {
    if let Some(importance) = usage.importance {
        assert_eq!(x.len(), importance.len(), "importances of a row of {} values", x.len());
    }
    assert_eq!(Some(row.len()), t.plane_bytes(x.len()), "bytes of a {t} row of {} values", x.len());
    match t.codec() {
        Codec::Float { store, .. } => store(x, row.q),
        Codec::Small { pack, levels, has_min, .. } => {
            let put = |i: usize, w: &[Ints32]| {
                let bytes = row.q[8 * i * t.block_bytes()..].chunks_exact_mut(t.block_bytes());
                bytes.zip(w).for_each(|(b, w)| pack(w, b));
            };
            at_level!(level, simd => eights(x, usage.importance, put, #[inline(always)] |x, importance| {
                encode32(simd, &Blocks::new(simd, x, importance, usage.is_normalised), &levels, has_min)
            }));
        }
        Codec::Super { pack, levels, sub, has_min, .. } => {
            let is_coarse = matches!(levels, Levels::Range(lo, hi) if hi - lo < 4);
            for (i, (b, x)) in row.q.chunks_exact_mut(t.block_bytes()).zip(x.as_chunks().0).enumerate() {
                let w = at_level!(level, simd => {
                    let x = Block::new(x, usage.part(256 * i, 256), !is_coarse);
                    match levels {
                        Levels::Range(lo, hi) if has_min => match sub.len {
                            16 => encode256_min::<_, 16, 2>(simd, &x, Integers::new(lo, hi), &sub),
                            _ => encode256_min::<_, 32, 1>(simd, &x, Integers::new(lo, hi), &sub),
                        },
                        Levels::Range(lo, hi) => encode256::<_, 16, 2>(simd, &x, Integers::new(lo, hi), &sub),
                        Levels::Table(t) | Levels::PowerOfTwo(t) => encode256::<_, 32, 1>(simd, &x, Table(t), &sub),
                    }
                });
                pack(&w, b);
            }
        }
        Codec::Grid { encode, .. } => {
            let mut room = Room::new(level);
            let is_fine = matches!(t, WeightType::IQ3_XXS | WeightType::IQ3_S);
            for (i, (b, x)) in row.q.chunks_exact_mut(t.block_bytes()).zip(x.as_chunks().0).enumerate() {
                encode(&at_level!(level, _ => Block::new(x, usage.part(256 * i, 256), is_fine)), &mut room, b);
            }
        }
        Codec::Fp4 { encode, .. } => {
            for (i, (b, x)) in row.q.chunks_exact_mut(t.block_bytes()).zip(x.as_chunks().0).enumerate() {
                encode(x, &Block::new(x, usage.part(64 * i, 64), true).w, b);
            }
        }
        Codec::Float8 => {
            for (g, x) in x.as_chunks().0.iter().enumerate() {
                small_float::encode_f8(x, &mut row, g);
            }
        }
        Codec::Fp4Scaled => {
            for (b, x) in x.as_chunks().0.iter().enumerate() {
                small_float::encode_nvfp4_scaled(x, &Block::new(x, usage.part(64 * b, 64), true).w, &mut row, b);
            }
        }
        Codec::Mxfp4Planar => {
            let put = |i: usize, w: &[Ints32]| {
                w.iter().enumerate().for_each(|(k, w)| planar::pack_mxfp4(w, &mut row, 8 * i + k));
            };
            at_level!(level, simd => eights(x, usage.importance, put, #[inline(always)] |x, importance| {
                let blocks = Blocks::without_gain(simd, f32::MAX, x, importance, true);
                power_of_two(simd, &blocks, Table(&iq::E2M1_NEAREST))
            }));
        }
        Codec::Affine(a) => match a.group() {
            32 => encode_groups::<32>(level, a, x, usage.importance, &mut row),
            64 => encode_groups::<64>(level, a, x, usage.importance, &mut row),
            _ => encode_groups::<128>(level, a, x, usage.importance, &mut row),
        },
    }
}

/// Works on eight blocks at a time, the last of them filled up with zeros, and puts what they become: from block
/// `8·i` on the blocks of round `i`.
#[inline(always)]
fn eights<const N: usize, T>(
    x: &[f32],
    importance: Option<&[f32]>,
    mut put: impl FnMut(usize, &[T]),
    encode: impl Fn(&[[f32; N]; 8], Option<&[[f32; N]; 8]>) -> [T; 8],
) {
    let (mut last_x, mut last_importance) = ([[0.0; N]; 8], [[0.0; N]; 8]);
    for (i, x) in x.chunks(8 * N).enumerate() {
        let importance = importance.map(|importance| &importance[8 * N * i..][..x.len()]);
        put(i, &encode(eight_of(x, &mut last_x), importance.map(|w| eight_of(w, &mut last_importance)))[..x.len() / N]);
    }
}

/// Eight blocks; in `room`, where zeros are, if there are fewer.
#[inline(always)]
fn eight_of<'a, const N: usize>(blocks: &'a [f32], room: &'a mut [[f32; N]; 8]) -> &'a [[f32; N]; 8] {
    match blocks.as_chunks::<N>().0.as_chunks::<8>().0 {
        [eight] => eight,
        _ => {
            room.as_flattened_mut()[..blocks.len()].copy_from_slice(blocks);
            room
        }
    }
}

/// Eight 32-blocks.
#[inline(always)]
fn encode32<S: Simd>(simd: S, blocks: &Blocks<S, 32>, levels: &Levels, has_min: bool) -> [Ints32; 8] {
    match *levels {
        Levels::Range(_, hi) if has_min => {
            let (d, m) = search::scale_and_min(simd, f32::from(hi), &blocks.b, f32::INFINITY);
            let (in_d, in_m) = (blocks.half(d).1, blocks.half(m).1);
            let grid = Integers::new(0, hi);
            let mut q = blocks.b.x;
            for q in &mut q {
                *q = grid.nearest(over_each(*q - in_m, in_d));
            }
            let gain = blocks.gain(
                #[inline(always)]
                |i| in_d * q[i] + in_m,
            );
            ints(&q, blocks.half(in_d * gain).0, blocks.half(in_m * gain).0)
        }
        Levels::Range(lo, hi) => with_scale(simd, blocks, Integers::new(lo, hi)),
        Levels::Table(t) => with_scale(simd, blocks, Table(t)),
        Levels::PowerOfTwo(t) => power_of_two(simd, blocks, Table(t)),
    }
}

#[inline(always)]
fn with_scale<S: Simd>(simd: S, blocks: &Blocks<S, 32>, grid: impl Grid) -> [Ints32; 8] {
    let in_d = blocks.half(search::scale(simd, grid, &blocks.b)).1;
    let mut q = blocks.b.x;
    for q in &mut q {
        *q = grid.nearest(over_each(*q, in_d));
    }
    let gain = blocks.gain(
        #[inline(always)]
        |i| in_d * q[i],
    );
    ints(&q, blocks.half(in_d * gain).0, [0.0; 8])
}

#[inline(always)]
fn ints<S: Simd>(q: &[f32x8<S>; 32], d: [f32; 8], m: [f32; 8]) -> [Ints32; 8] {
    let mut ints = [Ints32::ZERO; 8];
    for (k, (ints, q)) in ints.iter_mut().zip(&eight::apart(q)).enumerate() {
        (ints.d, ints.m) = (d[k], m[k]);
        ints.q.iter_mut().zip(q).for_each(|(to, q)| *to = byte(*q) as i8);
    }
    ints
}

/// Returns the e8m0 half with the least error: that which puts the largest magnitude's power of two on the table's, the
/// next, which clips nothing, or the one before.
#[inline(always)]
fn power_of_two<S: Simd>(simd: S, blocks: &Blocks<S, 32>, grid: Table) -> [Ints32; 8] {
    let (mut least, mut d, mut in_d) = ([f32::INFINITY; 8], [0.0; 8], [0.0; 8]);
    for back in [2, 1, 3] {
        let (mut next, mut in_next) = ([0.0; 8], [0.0; 8]);
        for k in 0..8 {
            // Past 252 the table's largest value is no f32.
            let exponent = (blocks.unit[k].to_bits() >> 23) as u8;
            next[k] = iq::e8m0_half(exponent.saturating_sub(back).min(252));
            in_next[k] = next[k] / blocks.unit[k];
        }
        let err = search::error(grid, &blocks.b, f32x8::simd_from(simd, in_next));
        for k in 0..8 {
            if err[k] < least[k] {
                (least[k], d[k], in_d[k]) = (err[k], next[k], in_next[k]);
            }
        }
    }
    let (mut q, in_d) = (blocks.b.x, f32x8::simd_from(simd, in_d));
    for q in &mut q {
        *q = grid.nearest(over_each(*q, in_d));
    }
    ints(&q, d, [0.0; 8])
}

/// Groups of an affine type: `x ≈ d·q + m`.
fn encode_groups<const N: usize>(
    level: Level,
    a: Affine,
    x: &[f32],
    importance: Option<&[f32]>,
    row: &mut PlanesMut<'_>,
) {
    let hi = f32::from((1u16 << a.bits()) - 1);
    let put = |i: usize, groups: &[([u8; N], f32, f32)]| {
        for (k, (q, d, m)) in groups.iter().enumerate() {
            for (b, q) in q.as_chunks::<32>().0.iter().enumerate() {
                a.pack(&Ints32 { q: *q, d: *d, m: *m }, row, (8 * i + k) * (N / 32) + b);
            }
        }
    };
    at_level!(level, simd => eights(x, importance, put, #[inline(always)] |x, importance| {
        // Far enough below the largest f32 that `d·q` alone, before the bias is added, is no infinity.
        let blocks = Blocks::<_, N>::without_gain(simd, 1e38, x, importance, a.bits() > 2);
        let (in_d, in_m) = search::scale_and_min(simd, hi, &blocks.b, f32::INFINITY);
        let (mut d, mut m, mut in_units) = ([0.0; 8], [0.0; 8], [[0.0; 8]; 2]);
        for k in 0..8 {
            let nearest = |v: f32| a.scales().nearest(f64::from(v) * f64::from(blocks.unit[k]));
            (d[k], m[k]) = (nearest(in_d[k]), nearest(in_m[k]));
            (in_units[0][k], in_units[1][k]) = (d[k] / blocks.unit[k], m[k] / blocks.unit[k]);
        }
        let (grid, mut q) = (Integers { lo: 0.0, hi }, blocks.b.x);
        let (in_d, in_m) = (f32x8::simd_from(simd, in_units[0]), f32x8::simd_from(simd, in_units[1]));
        for q in &mut q {
            *q = grid.nearest(over_each(*q - in_m, in_d));
        }
        let mut groups = [([0; N], 0.0, 0.0); 8];
        for (k, (group, q)) in groups.iter_mut().zip(&eight::apart(&q)).enumerate() {
            (group.1, group.2) = (d[k], m[k]);
            group.0.iter_mut().zip(q).for_each(|(to, q)| *to = byte(*q));
        }
        groups
    }));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PlanesBuf, ScaleType, decode_row};

    fn round_trip(t: WeightType, x: &[f32]) -> Vec<f32> {
        round_trip_for(t, x, &RowUse::default())
    }

    fn round_trip_for(t: WeightType, x: &[f32], usage: &RowUse<'_>) -> Vec<f32> {
        let mut row = PlanesBuf::new(t.plane_bytes(x.len()).unwrap());
        row.q.fill(0xaa);
        encode_row_for(t, x, usage, row.get_mut());
        let mut y = vec![0.0; x.len()];
        decode_row(t, row.get(), &mut y);
        y
    }

    const fn by(importance: &[f32]) -> RowUse<'_> {
        RowUse { importance: Some(importance), is_normalised: false }
    }

    /// Numbers in -1..1, the same for the same seed.
    fn uniform(seed: u64) -> impl FnMut() -> f32 {
        let mut s = seed * 2 + 1;
        move || {
            s = s.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (s >> 32) as u32 as i32 as f32 / 2f32.powi(31)
        }
    }

    /// About normal, as weights are, with deviation 0.02.
    fn normal(n: usize) -> Vec<f32> {
        let mut next = uniform(5);
        (0..n).map(|_| (0..12).map(|_| next()).sum::<f32>() * 0.01).collect()
    }

    const fn affine(bits: usize, group: usize, scales: ScaleType) -> WeightType {
        match Affine::new(bits, group, scales) {
            Some(a) => WeightType::Affine(a),
            None => panic!("no such type"),
        }
    }

    /// Root mean square error over root mean square, in a row of normal weights: what the types cost.
    const COSTS: [(WeightType, f64); 37] = [
        (WeightType::F32, 0.0),
        (WeightType::F16, 0.00023),
        (WeightType::BF16, 0.0018),
        (WeightType::Q4_0, 0.083),
        (WeightType::Q4_1, 0.072),
        (WeightType::Q5_0, 0.041),
        (WeightType::Q5_1, 0.036),
        (WeightType::Q8_0, 0.0052),
        (WeightType::Q2_K, 0.28),
        (WeightType::Q3_K, 0.15),
        (WeightType::Q4_K, 0.074),
        (WeightType::Q5_K, 0.038),
        (WeightType::Q6_K, 0.018),
        (WeightType::IQ4_NL, 0.075),
        (WeightType::IQ4_XS, 0.076),
        (WeightType::MXFP4, 0.115),
        (WeightType::MXFP4_PLANAR, 0.115),
        (WeightType::IQ2_XXS, 0.348),
        (WeightType::IQ2_XS, 0.302),
        (WeightType::IQ2_S, 0.245),
        (WeightType::IQ3_XXS, 0.182),
        (WeightType::IQ3_S, 0.131),
        (WeightType::IQ1_S, 0.499),
        (WeightType::IQ1_M, 0.458),
        (WeightType::TQ1_0, 0.485),
        (WeightType::TQ2_0, 0.485),
        (WeightType::NVFP4_SCALED, 0.085),
        (WeightType::F8_E4M3, 0.028),
        (affine(2, 32, ScaleType::F16), 0.312),
        (affine(2, 64, ScaleType::BF16), 0.348),
        (affine(3, 64, ScaleType::F32), 0.172),
        (affine(4, 32, ScaleType::F16), 0.072),
        (affine(4, 64, ScaleType::BF16), 0.083),
        (affine(4, 128, ScaleType::F16), 0.094),
        (affine(5, 128, ScaleType::BF16), 0.047),
        (affine(6, 64, ScaleType::F16), 0.0202),
        (affine(8, 64, ScaleType::BF16), 0.0056),
    ];

    #[test]
    fn round_trips_of_normal_weights_cost_no_more_than() {
        let x = normal(32 * 256);
        let power: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
        for (t, most) in COSTS {
            for scale in [1.0, -40.0, 1e3] {
                let x: Vec<f32> = x.iter().map(|x| x * scale).collect();
                let y = round_trip(t, &x);
                let err: f64 = x.iter().zip(&y).map(|(&x, &y)| f64::from(x - y).powi(2)).sum();
                let err = (err / power).sqrt() / f64::from(scale.abs());
                assert!(err <= most, "{t} at {scale}: {err}");
            }
        }
    }

    /// Short floats have plain encoders.
    fn is_searched(t: WeightType) -> bool {
        !matches!(t.codec(), Codec::Fp4 { .. } | Codec::Fp4Scaled | Codec::Float8)
    }

    /// Errors of [`COSTS`] are unbiased: along its own direction a row keeps its length, but where the products are
    /// normalized and the least error counts alone.
    #[test]
    fn rows_do_not_shrink() {
        let x = normal(32 * 256);
        let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum::<f64>();
        for t in WeightType::GGUF.into_iter().filter(|&t| t != WeightType::MXFP4 && is_searched(t)) {
            let [(gain, error), (short, least)] = [false, true].map(|is_normalised| {
                let y = round_trip_for(t, &x, &RowUse { importance: None, is_normalised });
                let off: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x - y).collect();
                (dot(&x, &y) / dot(&x, &x), dot(&off, &off) / dot(&x, &x))
            });
            // Scales of Q6_K are so small here that f16 rounds them by a thousandth.
            assert!((gain - 1.0).abs() < 1e-3, "{t}: {gain}");
            if least > 0.002 && t != WeightType::NVFP4 {
                assert!(least < error && short < 1.0 - 0.5 * least, "{t}: {least} of {error}, {short} of {gain}");
            }
        }
    }

    /// Root mean square error over root mean square, both by importance, that ggml's encoders leave in the row of
    /// [`importance_moves_the_error_to_columns_that_matter_less`] (`ggml_quantize_chunk` of xllamacpp 2026.10.11549).
    const GGML: [(WeightType, f64); 17] = [
        (WeightType::IQ1_S, 0.3996),
        (WeightType::IQ1_M, 0.3294),
        (WeightType::IQ2_XXS, 0.3063),
        (WeightType::IQ2_XS, 0.2142),
        (WeightType::IQ2_S, 0.2010),
        (WeightType::IQ3_XXS, 0.1162),
        (WeightType::IQ3_S, 0.1002),
        (WeightType::TQ1_0, 0.8119),
        (WeightType::TQ2_0, 0.8119),
        (WeightType::Q2_K, 0.2014),
        (WeightType::Q3_K, 0.1226),
        (WeightType::Q4_K, 0.0585),
        (WeightType::Q5_K, 0.0303),
        (WeightType::Q4_0, 0.0726),
        (WeightType::Q5_0, 0.0360),
        (WeightType::IQ4_NL, 0.0644),
        (WeightType::IQ4_XS, 0.0654),
    ];

    /// Normal weights, and importances that span three powers of ten.
    fn weighed_row() -> (Vec<f32>, Vec<f32>) {
        let x = normal(32 * 256);
        let mut next = uniform(7);
        let importance = x.iter().map(|_| (4.0 * next()).exp()).collect();
        (x, importance)
    }

    #[test]
    fn errors_by_importance_are_at_most_ggmls() {
        let (x, importance) = weighed_row();
        for (t, most) in GGML {
            let y = round_trip_for(t, &x, &by(&importance));
            let sum = |of: &dyn Fn(usize) -> f32| -> f64 {
                (0..x.len()).map(|i| f64::from(importance[i]) * f64::from(of(i)).powi(2)).sum()
            };
            let err = (sum(&|i| x[i] - y[i]) / sum(&|i| x[i])).sqrt();
            println!("{t} {err:.4} {most}");
            assert!(err <= most, "{t}: {err}, ggml {most}");
        }
    }

    #[test]
    fn importance_moves_the_error_to_columns_that_matter_less() {
        let (x, importance) = weighed_row();
        let error = |y: &[f32]| -> f64 {
            let square = |(&x, &y): (&f32, &f32)| (f64::from(x) - f64::from(y)).powi(2);
            importance.iter().zip(x.iter().zip(y).map(square)).map(|(&w, e)| f64::from(w) * e).sum()
        };
        for (t, _) in COSTS.into_iter().filter(|&(t, _)| t.block_len() > 1 && is_searched(t)) {
            let weighed = |importance: &[f32]| round_trip_for(t, &x, &by(importance));
            let (plain, with) = (error(&round_trip(t, &x)), error(&weighed(&importance)));
            assert!(with < 0.99 * plain, "{t}: {with} of {plain}");
            // What is no number counts as 0, and only the ratios of the others count.
            for nothing in [f32::NAN, f32::INFINITY, -1.0] {
                assert_eq!(weighed(&vec![nothing; x.len()]), weighed(&vec![0.0; x.len()]), "{t} {nothing}");
            }
            assert_eq!(weighed(&vec![3.0; x.len()]), weighed(&vec![0.0; x.len()]), "{t}");
            let mut broken = importance.clone();
            broken.iter_mut().step_by(3).for_each(|v| *v = f32::NAN);
            assert!(weighed(&broken).iter().all(|y| y.is_finite()), "{t}");
        }
    }

    #[test]
    fn simple_rows_come_back() {
        let mut spike = vec![0.0; 256];
        spike[77] = -3.0;
        let rows = [vec![0.0; 256], vec![0.5; 256], vec![-0.5; 256], spike];
        for (t, _) in COSTS {
            // A code book does not have every row.
            let has_book = t.name().starts_with("iq") && matches!(t.codec(), Codec::Grid { .. });
            for (r, x) in rows.iter().enumerate().take(if has_book { 1 } else { 4 }) {
                // IQ4 has no zero: its level 1 is 1/127 of the end of its table.
                let most = 0.01 * crate::act::amax(x);
                for (i, (&x, y)) in x.iter().zip(round_trip(t, x)).enumerate() {
                    assert!((x - y).abs() <= most, "{t} row {r} value {i}: {x} became {y}");
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_never_panics_and_quantised_types_stay_finite() {
        let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 1e-40, -0.0, 7e4, -1e9];
        let mut next = uniform(9);
        for (t, _) in COSTS {
            for every in [1, 2, 7, 40] {
                for seed in 0..odd.len() {
                    let pick = |i: usize| odd[(seed + i / every) % odd.len()];
                    let x: Vec<f32> = (0..512).map(|i| if i % every == 0 { pick(i) } else { next() }).collect();
                    let y = round_trip(t, &x);
                    assert!(t.block_len() == 1 || y.iter().all(|y| y.is_finite()), "{t} {every} {seed}");
                }
            }
            // Floats keep what they are given.
            let y = round_trip(t, &[f32::NAN; 256]);
            assert!(y.iter().all(|y| if t.block_len() == 1 { y.is_nan() } else { *y == 0.0 }), "{t}");
        }
    }

    /// Vectors of any width, and blocks that are filled up, change no bit.
    #[test]
    fn levels_write_the_same_bytes() {
        let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 1e-40, -0.0, 0.0, 7e4, -1e9, 1e-20];
        let mut next = uniform(11);
        let mut row = |n: usize| -> Vec<f32> {
            let value = |i: usize| match i / 256 % 8 {
                0 if i.is_multiple_of(3) => odd[i / 3 % odd.len()],
                1 => odd[i / 7 % odd.len()],
                2 => next() * 10f32.powi((i / 32 % 8) as i32 * 5 - 20),
                3 => (4.0 * next()).round(),
                4 if i % 256 < 128 => -0.0,
                5 => next().abs() + 1.0,
                _ => next(),
            };
            (0..n).map(value).collect()
        };
        let types = WeightType::ALL.into_iter().filter(|t| !matches!(t.codec(), Codec::Affine(a) if a.bits() % 2 == 1));
        for t in types {
            for n in [t.block_len(), 3 * 256, 9 * 256] {
                let (x, importance) = (row(n), row(n));
                for importance in [None, Some(&importance[..])] {
                    let encoded = |level: Level, n: usize| {
                        let mut row = PlanesBuf::new(t.plane_bytes(n).unwrap());
                        encode(
                            level,
                            t,
                            &x[..n],
                            &RowUse { importance, is_normalised: false }.part(0, n),
                            row.get_mut(),
                        );
                        row
                    };
                    let best = encoded(Level::new(), n);
                    assert_eq!(encoded(Level::baseline(), n), best, "{t}, {n} values");
                    // The first block alone is as beside others.
                    let first = encoded(Level::new(), t.block_len());
                    assert_eq!(first.q, best.q[..first.q.len()], "{t}, a block of {n} values");
                }
            }
        }
    }

    #[test]
    fn packing_undoes_unpacking() {
        let mut next = uniform(3);
        for t in WeightType::GGUF {
            for round in 0..200 {
                let mut block: Vec<u8> = (0..t.block_bytes()).map(|_| (next() * 128.0) as i8 as u8).collect();
                if t == WeightType::MXFP4 {
                    // Every scale is met; minus zero, code 8, comes back as code 0 and is left out.
                    block[0] = [0, 1, 2, 3, 254, 255][round % 6];
                    block[1..].iter_mut().for_each(|b| *b = if *b & 15 == 8 || *b >> 4 == 8 { 0x7f } else { *b });
                }
                let mut back = vec![0xaa; block.len()];
                let is_nan = match t.codec() {
                    Codec::Float { load, store } => {
                        let mut x = [0.0];
                        load(&block, &mut x);
                        store(&x, &mut back);
                        x[0].is_nan()
                    }
                    Codec::Small { unpack, pack, .. } => {
                        pack(&unpack(&block), &mut back);
                        unpack(&block).d.is_nan() || unpack(&block).m.is_nan()
                    }
                    Codec::Super { unpack, pack, .. } => {
                        pack(&unpack(&block), &mut back);
                        unpack(&block).d.is_nan() || unpack(&block).dmin.is_nan()
                    }
                    // Their encoders search; what they cost is tested above.
                    Codec::Grid { .. } | Codec::Fp4 { .. } => continue,
                    Codec::Mxfp4Planar | Codec::Float8 | Codec::Fp4Scaled | Codec::Affine(_) => {
                        unreachable!("not in GGUF files")
                    }
                };
                assert!(is_nan || block == back, "{t}: {block:?} became {back:?}");
            }
        }
    }

    #[test]
    fn packing_undoes_unpacking_in_planes() {
        let mut next = uniform(4);
        for t in WeightType::ALL.into_iter().filter(|t| matches!(t.codec(), Codec::Mxfp4Planar | Codec::Affine(_))) {
            let mut row = PlanesBuf::new(t.plane_bytes(256).unwrap());
            row.q.iter_mut().for_each(|b| *b = (next() * 128.0) as i8 as u8);
            // Numbers of every scale type; as e8m0, the ends of its range among them.
            row.scales.iter_mut().enumerate().for_each(|(i, b)| *b = [0, 1, 254, 255, 60][i % 5]);
            row.biases.iter_mut().enumerate().for_each(|(i, b)| *b = (i * 7 % 120) as u8);
            let mut back = PlanesBuf::new(t.plane_bytes(256).unwrap());
            back.q.fill(0xaa);
            if t == WeightType::MXFP4_PLANAR {
                // Minus zero, code 8, comes back as code 0 and is left out.
                row.q.iter_mut().for_each(|b| *b = if *b & 15 == 8 || *b >> 4 == 8 { 0x7f } else { *b });
            }
            for b in 0..8 {
                match t.codec() {
                    Codec::Affine(a) => a.pack(&a.unpack(row.get(), b), &mut back.get_mut(), b),
                    _ => planar::pack_mxfp4(&planar::unpack_mxfp4(row.get(), b), &mut back.get_mut(), b),
                }
            }
            assert_eq!(row, back, "{t}");
        }
    }
}
