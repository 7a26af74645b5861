//! From f32 to bytes: a plain encoder per type, which searches a little for the scale with the least squared error.
//!
//! It makes test models and small tools; its files are good, but not those of an encoder that knows which weights
//! matter.

pub(crate) mod grid;

use half::f16;

use crate::block::{Ints32, Ints256};
use crate::planes::PlanesMut;
use crate::types::planar::Affine;
use crate::types::{Codec, Levels, Sub, WeightType, iq, planar};

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
    let mut row = row.into();
    assert_eq!(Some(row.len()), t.plane_bytes(x.len()), "bytes of a {t} row of {} values", x.len());
    match t.codec() {
        Codec::Float { store, .. } => store(x, row.q),
        Codec::Small { pack, levels, has_min, .. } => {
            for (b, x) in row.q.chunks_exact_mut(t.block_bytes()).zip(x.as_chunks().0) {
                pack(&encode32(&finite(x), &levels, has_min), b);
            }
        }
        Codec::Super { pack, levels, sub, has_min, .. } => {
            for (b, x) in row.q.chunks_exact_mut(t.block_bytes()).zip(x.as_chunks().0) {
                let x = finite(x);
                pack(&if has_min { encode256_min(&x, &levels, &sub) } else { encode256(&x, &levels, &sub) }, b);
            }
        }
        Codec::Grid { encode, .. } => {
            for (b, x) in row.q.chunks_exact_mut(t.block_bytes()).zip(x.as_chunks().0) {
                encode(&finite(x), b);
            }
        }
        Codec::Mxfp4Planar => {
            let levels = Levels::PowerOfTwo(&iq::E2M1_DOUBLED);
            for (b, x) in x.as_chunks().0.iter().enumerate() {
                planar::pack_mxfp4(&encode32(&finite(x), &levels, false), &mut row, b);
            }
        }
        Codec::Affine(a) => {
            for (g, x) in x.chunks_exact(a.group()).enumerate() {
                encode_group(a, x, &mut row, g);
            }
        }
    }
}

fn finite<const N: usize>(x: &[f32; N]) -> [f32; N] {
    x.map(|x| if x.is_nan() { 0.0 } else { x.clamp(f32::MIN, f32::MAX) })
}

impl Levels {
    fn lo(&self) -> i16 {
        match self {
            Levels::Range(lo, _) => *lo,
            Levels::Table(t) | Levels::PowerOfTwo(t) => t.iter().copied().fold(i8::MAX, i8::min).into(),
        }
    }

    fn hi(&self) -> i16 {
        match self {
            Levels::Range(_, hi) => *hi,
            Levels::Table(t) | Levels::PowerOfTwo(t) => t.iter().copied().fold(i8::MIN, i8::max).into(),
        }
    }

    /// The distance of the outermost levels: scales are tried about that far around the plain one.
    fn outer_gap(&self) -> f64 {
        match self {
            Levels::Range(..) => 1.0,
            Levels::Table(_) | Levels::PowerOfTwo(_) => 20.0,
        }
    }

    /// The level nearest to `v`; past the ends, the end.
    fn nearest(&self, v: f64) -> i16 {
        match self {
            Levels::Range(lo, hi) => v.round_ties_even().clamp(f64::from(*lo), f64::from(*hi)) as i16,
            Levels::Table(t) | Levels::PowerOfTwo(t) => {
                let mut best = (f64::INFINITY, 0);
                for &level in t.iter() {
                    let err = (v - f64::from(level)).abs();
                    if err < best.0 {
                        best = (err, level);
                    }
                }
                best.1.into()
            }
        }
    }

    /// The level nearest to `v` of levels that are bytes, as all but those of affine types are.
    fn nearest_byte(&self, v: f64) -> i8 {
        self.nearest(v) as i8
    }
}

/// The f16 nearest to `d`, as f32; never infinite.
fn to_f16(d: f64) -> f32 {
    f16::from_f64(d.clamp(-65504.0, 65504.0)).to_f32()
}

/// `x / d`, and 0 where `d` is: nothing can be said with a scale of zero.
fn over(x: f64, d: f64) -> f64 {
    if d == 0.0 { 0.0 } else { x / d }
}

fn encode32(x: &[f32; 32], levels: &Levels, has_min: bool) -> Ints32 {
    let (d, m) = match levels {
        Levels::PowerOfTwo(_) => (power_of_two(x, levels), 0.0),
        _ if has_min => {
            let (d, m) = fit_min(x, levels, f64::INFINITY);
            (to_f16(d), to_f16(m))
        }
        _ => (to_f16(fit(x, levels)), 0.0),
    };
    let q = x.map(|x| levels.nearest_byte(over(f64::from(x) - f64::from(m), f64::from(d))));
    Ints32 { q, d, m }
}

/// A group of an affine type: `x ≈ d·q + m`.
fn encode_group(a: Affine, x: &[f32], row: &mut PlanesMut<'_>, g: usize) {
    let levels = Levels::Range(0, (1 << a.bits()) - 1);
    // Far enough below the largest f32 that `d·q` alone, before the bias is added, is no infinity.
    let x: Vec<f32> = x.iter().map(|x| if x.is_nan() { 0.0 } else { x.clamp(-1e38, 1e38) }).collect();
    let (d, m) = fit_min(&x, &levels, f64::INFINITY);
    let (d, m) = (a.scales().nearest(d), a.scales().nearest(m));
    for (b, x) in x.as_chunks::<32>().0.iter().enumerate() {
        let q = x.map(|x| levels.nearest(over(f64::from(x) - f64::from(m), f64::from(d))) as u8);
        a.pack(&Ints32 { q, d, m }, row, g * a.group() / 32 + b);
    }
}

/// A super-block without minimums: `x ≈ d·sc·q`.
fn encode256(x: &[f32; 256], levels: &Levels, sub: &Sub) -> Ints256 {
    let mut w = Ints256::ZERO;
    let scales: Vec<f64> = x.chunks_exact(sub.len).map(|x| fit(x, levels)).collect();
    let peak = scales.iter().copied().fold(0.0, |a: f64, s| if s.abs() > a.abs() { s } else { a });
    // The largest sub-scale takes the end of the range that reaches furthest, the negative one.
    w.d = to_f16(peak / f64::from(sub.lo));
    for g in 0..16 {
        let scale = scales[16 * g / sub.len];
        w.sc[g] = over(scale, f64::from(w.d)).round().clamp(f64::from(sub.lo), f64::from(sub.hi)) as i8;
        let d = f64::from(w.d) * f64::from(w.sc[g]);
        for i in 16 * g..16 * g + 16 {
            w.q[i] = levels.nearest_byte(over(f64::from(x[i]), d));
        }
    }
    w
}

/// A super-block with minimums: `x ≈ d·sc·q - dmin·min`, all factors at least zero.
fn encode256_min(x: &[f32; 256], levels: &Levels, sub: &Sub) -> Ints256 {
    let mut w = Ints256::ZERO;
    let fits: Vec<(f64, f64)> = x.chunks_exact(sub.len).map(|x| fit_min(x, levels, 0.0)).collect();
    let hi = f64::from(sub.hi);
    w.d = to_f16(fits.iter().map(|f| f.0).fold(0.0, f64::max) / hi);
    w.dmin = to_f16(fits.iter().map(|f| -f.1).fold(0.0, f64::max) / hi);
    for g in 0..16 {
        let (d, m) = fits[16 * g / sub.len];
        w.sc[g] = over(d, f64::from(w.d)).round().clamp(0.0, hi) as i8;
        w.mins[g] = over(-m, f64::from(w.dmin)).round().clamp(0.0, hi) as u8;
        let d = f64::from(w.d) * f64::from(w.sc[g]);
        let m = f64::from(w.dmin) * f64::from(w.mins[g]);
        for i in 16 * g..16 * g + 16 {
            w.q[i] = levels.nearest_byte(over(f64::from(x[i]) + m, d));
        }
    }
    w
}

/// The scale `d` with the least `Σ (x - d·q)²` among those tried.
///
/// The value of largest magnitude is put on either end of the levels and a little beside it; for the integers that
/// gives, the best scale is `Σ x·q / Σ q²`, and what it leaves of `Σ x²` is least where `(Σ x·q)² / Σ q²` is largest.
fn fit(x: &[f32], levels: &Levels) -> f64 {
    let peak = x.iter().copied().fold(0.0f32, |a, x| if x.abs() > a.abs() { x } else { a });
    let mut best = (0.0, 0.0);
    if peak == 0.0 {
        return best.1;
    }
    for end in [levels.lo(), levels.hi()] {
        for step in -4..=4 {
            let inv = (f64::from(end) + 0.2 * f64::from(step) * levels.outer_gap()) / f64::from(peak);
            let (mut xq, mut qq) = (0.0, 0.0);
            for &x in x {
                let q = f64::from(levels.nearest(f64::from(x) * inv));
                xq += f64::from(x) * q;
                qq += q * q;
            }
            if qq > 0.0 && xq * xq / qq > best.0 {
                best = (xq * xq / qq, xq / qq);
            }
        }
    }
    best.1
}

/// Scale `d >= 0` and minimum `m <= m_max` with the least `Σ (x - d·q - m)²` among those tried.
///
/// The range of `x` is laid on the levels `0..=hi` and a little beside; for the integers that gives, `d` and `m` come
/// from the two linear equations of least squares.
fn fit_min(x: &[f32], levels: &Levels, m_max: f64) -> (f64, f64) {
    let n = x.len() as f64;
    let low = x.iter().map(|&x| f64::from(x)).fold(m_max, f64::min);
    let high = x.iter().map(|&x| f64::from(x)).fold(low, f64::max);
    let hi = f64::from(levels.hi());
    let mut best = (f64::INFINITY, (0.0, low));
    for step in -4..=8 {
        let inv = over(hi + 0.1 * f64::from(step), high - low);
        let q = |x: f32| f64::from(levels.nearest((f64::from(x) - low) * inv));
        let (mut s_x, mut s_q, mut s_xq, mut s_qq) = (0.0, 0.0, 0.0, 0.0);
        for &x in x {
            s_x += f64::from(x);
            s_q += q(x);
            s_xq += f64::from(x) * q(x);
            s_qq += q(x) * q(x);
        }
        let det = n * s_qq - s_q * s_q;
        let (mut d, mut m) = ((high - low) / hi, low);
        if det > 0.0 {
            (d, m) = ((n * s_xq - s_x * s_q) / det, (s_qq * s_x - s_q * s_xq) / det);
            if m > m_max {
                (d, m) = (over(s_xq, s_qq), m_max);
            }
        }
        let err: f64 = x.iter().map(|&x| (f64::from(x) - d * q(x) - m).powi(2)).sum();
        if err < best.0 {
            best = (err, (d.max(0.0), m));
        }
    }
    best.1
}

/// The e8m0 half with the least error: that which puts the largest magnitude's power of two on the table's, or the
/// next, which clips nothing.
fn power_of_two(x: &[f32; 32], levels: &Levels) -> f32 {
    let exponent = (crate::act::amax(x).to_bits() >> 23) as u8;
    let mut best = (f64::INFINITY, 0.0);
    for e in [exponent.saturating_sub(2), exponent.saturating_sub(1)] {
        // Past 252 the table's largest value is no f32.
        let d = iq::e8m0_half(e.min(252));
        let err = |x: f32| f64::from(x) - f64::from(d) * f64::from(levels.nearest(f64::from(x) / f64::from(d)));
        let err: f64 = x.iter().map(|&x| err(x).powi(2)).sum();
        if err < best.0 {
            best = (err, d);
        }
    }
    best.1
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
    const COSTS: [(WeightType, f64); 35] = [
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
        (WeightType::IQ2_XXS, 0.364),
        (WeightType::IQ2_XS, 0.313),
        (WeightType::IQ2_S, 0.262),
        (WeightType::IQ3_XXS, 0.194),
        (WeightType::IQ3_S, 0.138),
        (WeightType::IQ1_S, 0.475),
        (WeightType::IQ1_M, 0.435),
        (WeightType::TQ1_0, 0.443),
        (WeightType::TQ2_0, 0.443),
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
                    Codec::Grid { .. } => continue,
                    Codec::Mxfp4Planar | Codec::Affine(_) => unreachable!("not in GGUF files"),
                };
                assert!(is_nan || block == back, "{t}: {block:?} became {back:?}");
            }
        }
    }

    #[test]
    fn packing_undoes_unpacking_in_planes() {
        let mut next = uniform(4);
        for t in WeightType::ALL.into_iter().filter(|t| t.ggml_id().is_none()) {
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
