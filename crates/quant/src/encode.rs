//! From f32 to bytes: an encoder for each type, which searches for the scales with the least weighted squared error.
//!
//! Which errors matter is said by the importance of each column: the mean square of what it is multiplied with. Scales
//! of least squares are then drawn out until nothing of a block is lost along its own direction (`Block::gain`). A row
//! depends on its own values alone, so that rows may be encoded in any order and on any thread. Knows no tensors; the
//! searches are in `search`.

mod book;
mod search;

pub(crate) mod grid;

use half::f16;

use crate::block::{Ints32, Ints256};
use crate::planes::PlanesMut;
use crate::types::planar::Affine;
use crate::types::{Codec, Levels, Sub, WeightType, iq, planar, small_float};
pub(crate) use book::Room;
use search::{Grid, Integers, Table};

/// Encodes a row of weights into `row`.
///
/// F32, F16 and BF16 round each value to the nearest, ties to even, and keep NaN and infinities. Quantised types take
/// NaN as 0 and an infinity as the largest f32 of its sign; values beyond what an f16 scale reaches saturate, as do
/// values past 1e38 in affine types, so what they decode to is always finite. Blocks of values below some 1e-7 become
/// zero, as f16 scales do.
///
/// # Panics
/// When the planes are not exactly `t.plane_bytes(x.len())` long.
pub fn encode_row<'a>(t: WeightType, x: &[f32], row: impl Into<PlanesMut<'a>>) {
    encode(t, x, None, row.into());
}

/// Encodes a row of weights as [`encode_row`] does, with errors counted by the importance of their column: the mean
/// square of the activations that it is multiplied with, or anything in proportion to it, for each value of `x`.
///
/// Importances that are negative or not finite count as 0, and no column counts less than a thousandth of the block's
/// mean: one that was never seen keeps a share. Large values count somewhat more, but for types of less than three
/// bits. Floats have no errors to weigh.
///
/// # Panics
/// As [`encode_row`], and when there is not one importance a value.
pub fn encode_row_weighted<'a>(t: WeightType, x: &[f32], importance: &[f32], row: impl Into<PlanesMut<'a>>) {
    assert_eq!(x.len(), importance.len(), "importances of a row of {} values", x.len());
    encode(t, x, Some(importance), row.into());
}

fn encode(t: WeightType, x: &[f32], importance: Option<&[f32]>, mut row: PlanesMut<'_>) {
    assert_eq!(Some(row.len()), t.plane_bytes(x.len()), "bytes of a {t} row of {} values", x.len());
    let of = |at: usize, len: usize| importance.map(|importance| &importance[at..at + len]);
    match t.codec() {
        Codec::Float { store, .. } => store(x, row.q),
        Codec::Small { pack, levels, has_min, .. } => {
            for (i, (b, x)) in row.q.chunks_exact_mut(t.block_bytes()).zip(x.as_chunks().0).enumerate() {
                pack(&encode32(&Block::new(x, of(32 * i, 32), true), &levels, has_min), b);
            }
        }
        Codec::Super { pack, levels, sub, has_min, .. } => {
            for (i, (b, x)) in row.q.chunks_exact_mut(t.block_bytes()).zip(x.as_chunks().0).enumerate() {
                let is_coarse = matches!(levels, Levels::Range(lo, hi) if hi - lo < 4);
                let x = Block::new(x, of(256 * i, 256), !is_coarse);
                let w = match levels {
                    Levels::Range(lo, hi) if has_min => encode256_min(&x, Integers::new(lo, hi), &sub),
                    Levels::Range(lo, hi) => encode256(&x, Integers::new(lo, hi), &sub),
                    Levels::Table(t) | Levels::PowerOfTwo(t) => encode256(&x, Table(t), &sub),
                };
                pack(&w, b);
            }
        }
        Codec::Grid { encode, .. } => {
            let mut room = Room::default();
            let is_fine = matches!(t, WeightType::IQ3_XXS | WeightType::IQ3_S);
            for (i, (b, x)) in row.q.chunks_exact_mut(t.block_bytes()).zip(x.as_chunks().0).enumerate() {
                encode(&Block::new(x, of(256 * i, 256), is_fine), &mut room, b);
            }
        }
        Codec::Fp4 { encode, .. } => {
            for (i, (b, x)) in row.q.chunks_exact_mut(t.block_bytes()).zip(x.as_chunks().0).enumerate() {
                encode(x, &Block::new(x, of(64 * i, 64), true).w, b);
            }
        }
        Codec::Float8 => {
            for (g, x) in x.as_chunks().0.iter().enumerate() {
                small_float::encode_f8(x, &mut row, g);
            }
        }
        Codec::Fp4Scaled => {
            for (b, x) in x.as_chunks().0.iter().enumerate() {
                small_float::encode_nvfp4_scaled(x, &Block::new(x, of(64 * b, 64), true).w, &mut row, b);
            }
        }
        Codec::Mxfp4Planar => {
            for (i, x) in x.as_chunks().0.iter().enumerate() {
                let w = power_of_two(&Block::<32>::new(x, of(32 * i, 32), true), Table(&iq::E2M1_NEAREST));
                planar::pack_mxfp4(&w, &mut row, i);
            }
        }
        Codec::Affine(a) => {
            for (g, x) in x.chunks_exact(a.group()).enumerate() {
                encode_group(a, x, of(g * a.group(), a.group()), &mut row, g);
            }
        }
    }
}

/// A block brought to magnitudes of about 1, and how much the error of each value counts.
pub(crate) struct Block<const N: usize> {
    /// Values, divided by `unit`; the largest magnitude is 1 to 2, or less where that is below 2^-100.
    x: [f32; N],
    /// A power of two.
    unit: f32,
    /// Weights of the squared errors, all above 0.
    w: [f32; N],
    /// Whether they are those of [`weigh_by_size`], which keep large values and need no [`Block::gain`].
    by_size: bool,
}

impl<const N: usize> Block<N> {
    fn new(x: &[f32; N], importance: Option<&[f32]>, by_size: bool) -> Self {
        let (mut scaled, mut w) = ([0.0; N], [1.0; N]);
        let unit = scale_down(x, &mut scaled);
        weigh(importance, &mut w);
        let by_size = by_size && importance.is_some();
        if by_size {
            weigh_by_size(&scaled, &mut w);
        }
        Self { x: scaled, unit, w, by_size }
    }

    /// What the values `y`, which stand for those of the block, are to be multiplied with to lose nothing of them along
    /// their own direction. Least squares draw what they fit towards zero, by the share that the error has; one block's
    /// shrinking is small beside its error, but all blocks shrink the same way, and layers multiply it.
    fn gain(&self, y: impl Iterator<Item = f32>) -> f32 {
        self.gain_by(self.x.iter().zip(&self.w).zip(y).map(|((x, w), y)| w * x * y).sum())
    }

    /// [`Block::gain`] by `Σ w·x·y`.
    fn gain_by(&self, xy: f32) -> f32 {
        if self.by_size {
            return 1.0;
        }
        let [xx] = search::sums(&self.x, &self.w, |x, w| [w * x * x]);
        if xy > 0.0 && xx < 2.0 * xy { xx / xy } else { 1.0 }
    }

    /// The f16 nearest to a scale, never infinite, as f32 and in units of the block.
    fn half(&self, d: f32) -> (f32, f32) {
        let half = f16::from_f64((f64::from(d) * f64::from(self.unit)).clamp(-65504.0, 65504.0)).to_f32();
        (half, half / self.unit)
    }
}

/// Divides values by a power of two, which brings the largest to 1 to 2, and returns it. What is not finite becomes so.
fn scale_down(x: &[f32], out: &mut [f32]) -> f32 {
    out.iter_mut().zip(x).for_each(|(y, &x)| *y = if x.is_nan() { 0.0 } else { x.clamp(f32::MIN, f32::MAX) });
    let exponent = (crate::act::amax(out).to_bits() >> 23).clamp(27, 253);
    let power = |exponent: u32| f32::from_bits(exponent << 23);
    out.iter_mut().for_each(|y| *y *= power(254 - exponent));
    power(exponent)
}

/// Weights of the squared errors: the importance of each column over the mean, 1 where it is not known.
fn weigh(importance: Option<&[f32]>, w: &mut [f32]) {
    w.fill(1.0);
    let Some(importance) = importance else { return };
    let known = |v: f32| if v.is_finite() && v > 0.0 { f64::from(v) } else { 0.0 };
    let mean = importance.iter().map(|&v| known(v)).sum::<f64>() / importance.len() as f64;
    if mean > 0.0 {
        w.iter_mut().zip(importance).for_each(|(w, &v)| *w = (known(v) / mean).max(1e-3) as f32);
    }
}

/// Multiplies the weights by `sqrt(2·m + x²)`, `m` the mean square of the values: importances are those of one text,
/// and large values are what columns add whatever the text. KL with importances, as `tools/kl_table.py` measures it,
/// against weights of importance alone and [`Block::gain`]: the embedded model in Q4_K_M 0.090 and 0.094, in Q3_K_M
/// 0.184 and 0.200, in IQ4_XS 0.129 and 0.136; SmolLM2-135M in Q3_K_M 0.090 and 0.096. Few levels lose by it (the
/// embedded model in Q2_K: 0.90 and 0.77, in IQ2_XXS 1.54 and 1.30).
fn weigh_by_size(x: &[f32], w: &mut [f32]) {
    let square = x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32;
    if square > 0.0 {
        w.iter_mut().zip(x).for_each(|(w, x)| *w *= (2.0 + x * x / square).sqrt());
    }
}

/// `x / d`, and 0 where `d` is: nothing can be said with a scale of zero.
fn over(x: f32, d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { x / d }
}

fn encode32(b: &Block<32>, levels: &Levels, has_min: bool) -> Ints32 {
    match *levels {
        Levels::Range(_, hi) if has_min => {
            let (d, m) = search::scale_and_min(f32::from(hi), &b.x, &b.w, f32::INFINITY);
            let (in_d, in_m) = (b.half(d).1, b.half(m).1);
            let grid = Integers::new(0, hi);
            let q = b.x.map(|x| grid.nearest(over(x - in_m, in_d)));
            let gain = b.gain(q.iter().map(|q| in_d * q + in_m));
            Ints32 { q: q.map(|q| q as i8), d: b.half(in_d * gain).0, m: b.half(in_m * gain).0 }
        }
        Levels::Range(lo, hi) => with_scale(b, Integers::new(lo, hi)),
        Levels::Table(t) => with_scale(b, Table(t)),
        Levels::PowerOfTwo(t) => power_of_two(b, Table(t)),
    }
}

fn with_scale(b: &Block<32>, grid: impl Grid) -> Ints32 {
    let in_d = b.half(search::scale(grid, &b.x, &b.w)).1;
    let q = b.x.map(|x| grid.nearest(over(x, in_d)));
    let gain = b.gain(q.iter().map(|q| in_d * q));
    Ints32 { q: q.map(|q| q as i8), d: b.half(in_d * gain).0, m: 0.0 }
}

/// The e8m0 half with the least error: that which puts the largest magnitude's power of two on the table's, the next,
/// which clips nothing, or the one before.
fn power_of_two(b: &Block<32>, grid: Table) -> Ints32 {
    let exponent = (b.unit.to_bits() >> 23) as u8;
    let mut best = (f32::INFINITY, Ints32::ZERO);
    for back in [2, 1, 3] {
        // Past 252 the table's largest value is no f32.
        let d = iq::e8m0_half(exponent.saturating_sub(back).min(252));
        let in_d = d / b.unit;
        let err = search::error(grid, &b.x, &b.w, in_d);
        if err < best.0 {
            best = (err, Ints32 { q: b.x.map(|x| grid.nearest(over(x, in_d)) as i8), d, m: 0.0 });
        }
    }
    best.1
}

/// A group of an affine type: `x ≈ d·q + m`.
fn encode_group(a: Affine, x: &[f32], importance: Option<&[f32]>, row: &mut PlanesMut<'_>, g: usize) {
    let hi = f32::from((1u16 << a.bits()) - 1);
    let (mut held, mut w) = ([0.0; 128], [1.0; 128]);
    let (held, w) = (&mut held[..x.len()], &mut w[..x.len()]);
    // Far enough below the largest f32 that `d·q` alone, before the bias is added, is no infinity.
    held.iter_mut().zip(x).for_each(|(y, &x)| *y = if x.is_nan() { 0.0 } else { x.clamp(-1e38, 1e38) });
    let finite = held.to_vec();
    let unit = scale_down(&finite, held);
    weigh(importance, w);
    if importance.is_some() && a.bits() > 2 {
        weigh_by_size(held, w);
    }
    let (d, m) = search::scale_and_min(hi, held, w, f32::INFINITY);
    let [d, m] = [d, m].map(|v| a.scales().nearest(f64::from(v) * f64::from(unit)));
    let grid = Integers { lo: 0.0, hi };
    for (b, x) in held.as_chunks::<32>().0.iter().enumerate() {
        let q = x.map(|x| grid.nearest(over(x - m / unit, d / unit)) as u8);
        a.pack(&Ints32 { q, d, m }, row, g * a.group() / 32 + b);
    }
}

/// Rounds of a super-block's search: sub-scales for given scales, then scales for given sub-scales.
const ROUNDS: usize = 3;

/// A super-block without minimums: `x ≈ d·sc·q`.
fn encode256(b: &Block<256>, grid: impl Grid, sub: &Sub) -> Ints256 {
    let (x, w, n) = (&b.x, &b.w, 256 / sub.len);
    let of = |j: usize| (&x[j * sub.len..(j + 1) * sub.len], &w[j * sub.len..(j + 1) * sub.len]);
    let (lo, hi) = (f32::from(sub.lo), f32::from(sub.hi));
    let mut scales = [0.0; 16];
    for j in 0..n {
        scales[j] = search::scale(grid, of(j).0, of(j).1);
    }
    // The largest sub-scale takes the end of the range that reaches furthest, the negative one.
    let peak = scales.iter().copied().fold(0.0, |a: f32, s| if s.abs() > a.abs() { s } else { a });
    let mut in_d = b.half(peak / lo).1;
    let mut best = (f32::INFINITY, 0.0, [0.0; 16]);
    for _ in 0..ROUNDS {
        let (mut sum, mut sc) = (0.0, [0.0; 16]);
        for j in 0..n {
            let near = over(scales[j], in_d).round();
            let mut least = f32::INFINITY;
            for near in [near, near - 1.0, near + 1.0].map(|sc| sc.max(lo).min(hi)) {
                let err = search::error(grid, of(j).0, of(j).1, in_d * near);
                if err < least {
                    (least, sc[j]) = (err, near);
                }
            }
            sum += least;
        }
        if sum >= best.0 {
            break;
        }
        best = (sum, in_d, sc);
        let (mut xa, mut aa) = (0.0, 0.0);
        for j in 0..n {
            let [xq, qq] = search::moments(grid, of(j).0, of(j).1, in_d * sc[j]);
            xa += xq * sc[j];
            aa += qq * sc[j] * sc[j];
        }
        in_d = b.half(over(xa, aa)).1;
    }
    let (_, in_d, sc) = best;
    let mut out = Ints256::ZERO;
    for g in 0..16 {
        let sc = sc[16 * g / sub.len];
        out.sc[g] = sc as i8;
        for i in 16 * g..16 * g + 16 {
            out.q[i] = grid.nearest(over(x[i], in_d * sc)) as i8;
        }
    }
    let gain = b.gain((0..256).map(|i| in_d * f32::from(out.sc[i / 16]) * f32::from(out.q[i])));
    out.d = b.half(in_d * gain).0;
    out
}

/// A super-block with minimums: `x ≈ d·sc·q - dmin·min`, all factors at least zero.
fn encode256_min(b: &Block<256>, grid: Integers, sub: &Sub) -> Ints256 {
    let (x, w, n) = (&b.x, &b.w, 256 / sub.len);
    let of = |j: usize| (&x[j * sub.len..(j + 1) * sub.len], &w[j * sub.len..(j + 1) * sub.len]);
    let hi = f32::from(sub.hi);
    let (mut scales, mut mins) = ([0.0; 16], [0.0; 16]);
    for j in 0..n {
        let (d, m) = search::scale_and_min(grid.hi, of(j).0, of(j).1, 0.0);
        (scales[j], mins[j]) = (d, -m);
    }
    let largest = |of: &[f32; 16]| of.iter().copied().fold(0.0, f32::max) / hi;
    let mut d = b.half(largest(&scales));
    let mut dmin = b.half(largest(&mins));
    let mut best = (f32::INFINITY, d, dmin, [(0.0, 0.0); 16]);
    for _ in 0..ROUNDS {
        let (mut sum, mut subs) = (0.0, [(0.0, 0.0); 16]);
        for j in 0..n {
            let near = (over(scales[j], d.1).round(), over(mins[j], dmin.1).round());
            let (err, sub) = search::sub_scales(grid, of(j).0, of(j).1, (d.1, dmin.1), near, hi);
            sum += err;
            subs[j] = sub;
        }
        if sum >= best.0 {
            break;
        }
        best = (sum, d, dmin, subs);
        // Least squares over the whole super-block, with `a = sc·q` and `b = min`.
        let (mut aa, mut ab, mut bb, mut xa, mut xb) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for j in 0..n {
            let (sc, m) = subs[j];
            let [s_w, s_x, s_q, s_qq, s_xq] = search::moments_min(grid, of(j).0, of(j).1, d.1 * sc, dmin.1 * m);
            aa += s_qq * sc * sc;
            ab += s_q * sc * m;
            bb += s_w * m * m;
            xa += s_xq * sc;
            xb += s_x * m;
        }
        let det = aa * bb - ab * ab;
        if det > 1e-6 * aa * bb {
            d = b.half(((xa * bb - xb * ab) / det).max(0.0));
            dmin = b.half(((xa * ab - xb * aa) / det).max(0.0));
        } else {
            d = b.half(over(xa + dmin.1 * ab, aa).max(0.0));
        }
    }
    let (_, d, dmin, subs) = best;
    let mut out = Ints256::ZERO;
    for g in 0..16 {
        let (sc, m) = subs[16 * g / sub.len];
        (out.sc[g], out.mins[g]) = (sc as i8, m as u8);
        for i in 16 * g..16 * g + 16 {
            out.q[i] = grid.nearest(over(x[i] + dmin.1 * m, d.1 * sc)) as i8;
        }
    }
    let scaled = |i: usize| d.1 * f32::from(out.sc[i / 16]) * f32::from(out.q[i]);
    let gain = b.gain((0..256).map(|i| scaled(i) - dmin.1 * f32::from(out.mins[i / 16])));
    (out.d, out.dmin) = (b.half(d.1 * gain).0, b.half(dmin.1 * gain).0);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PlanesBuf, ScaleType, decode_row};

    fn round_trip(t: WeightType, x: &[f32]) -> Vec<f32> {
        let mut row = PlanesBuf::new(t.plane_bytes(x.len()).unwrap());
        row.q.fill(0xaa);
        encode_row(t, x, row.get_mut());
        let mut y = vec![0.0; x.len()];
        decode_row(t, row.get(), &mut y);
        y
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

    /// Errors of [`COSTS`] are unbiased: along its own direction a row keeps its length.
    #[test]
    fn rows_do_not_shrink() {
        let x = normal(32 * 256);
        let dot = |y: &[f32]| x.iter().zip(y).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum::<f64>();
        for t in WeightType::GGUF.into_iter().filter(|&t| t != WeightType::MXFP4 && is_searched(t)) {
            let gain = dot(&round_trip(t, &x)) / dot(&x);
            // Scales of Q6_K are so small here that f16 rounds them by a thousandth.
            assert!((gain - 1.0).abs() < 1e-3, "{t}: {gain}");
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
            let (mut row, mut y) = (PlanesBuf::new(t.plane_bytes(x.len()).unwrap()), vec![0.0; x.len()]);
            encode_row_weighted(t, &x, &importance, row.get_mut());
            decode_row(t, row.get(), &mut y);
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
            let weighed = |importance: &[f32]| {
                let mut row = PlanesBuf::new(t.plane_bytes(x.len()).unwrap());
                encode_row_weighted(t, &x, importance, row.get_mut());
                let mut y = vec![0.0; x.len()];
                decode_row(t, row.get(), &mut y);
                y
            };
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
