//! Dot products by the law: against f64 over decoded weights, and over rows that are not numbers.

use proptest::prelude::*;
use quant::act::{Act32, Act256, ActKind, ActRow, quantise_byte32, quantise32, quantise256};
use quant::dot::dot_row;
use quant::{PlanesBuf, ScaleType, WeightType, decode_row};

/// A row of `n` weights of random bits whose scales are small numbers.
fn weights(t: WeightType, n: usize, next: &mut impl FnMut() -> u32) -> PlanesBuf {
    let mut row = PlanesBuf::new(t.plane_bytes(n).expect("whole blocks"));
    for byte in [&mut row.q, &mut row.scales, &mut row.biases].into_iter().flatten() {
        *byte = (next() >> 24) as u8;
    }
    if let WeightType::Affine(a) = t {
        // An exponent near 2^-3, sign and mantissa random, as below.
        for plane in [&mut row.scales, &mut row.biases] {
            for top in plane.iter_mut().skip(a.scales().bytes() - 1).step_by(a.scales().bytes()) {
                *top = if a.scales() == ScaleType::F16 { *top & 0x83 | 0x30 } else { *top & 0x80 | 0x3e };
            }
        }
        return row;
    }
    if t == WeightType::MXFP4_PLANAR {
        row.scales.iter_mut().for_each(|e| *e = 120 + *e % 4);
        return row;
    }
    if matches!(t, WeightType::F8_E4M3 | WeightType::NVFP4_SCALED) {
        // No NaN, and scales with an exponent near 2^-3.
        row.q.iter_mut().filter(|b| **b & 0x7f == 0x7f).for_each(|b| *b &= 0xf7);
        row.scales.iter_mut().skip(3).step_by(4).for_each(|top| *top = *top & 0x80 | 0x3e);
        return row;
    }
    let scales: &[usize] = match t {
        WeightType::Q2_K => &[80, 82],
        WeightType::Q3_K => &[108],
        WeightType::Q6_K => &[208],
        WeightType::TQ1_0 => &[52],
        WeightType::TQ2_0 => &[64],
        // The highest bits of its scale are those of the last of four words.
        WeightType::IQ1_M => &[54],
        WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4_K | WeightType::Q5_K => &[0, 2],
        _ => &[0],
    };
    for block in row.q.chunks_exact_mut(t.block_bytes()) {
        match t {
            // An exponent near one; sign and mantissa stay random.
            WeightType::F32 => block[3] = block[3] & 0x80 | 0x3e,
            WeightType::BF16 => block[1] = block[1] & 0x80 | 0x3e,
            WeightType::F16 => block[1] = block[1] & 0x83 | 0x30,
            WeightType::MXFP4 => block[0] = 120 + block[0] % 4,
            _ => scales.iter().for_each(|&at| block[at + 1] = block[at + 1] & 0x83 | 0x20),
        }
    }
    row
}

/// A generator of 32-bit numbers; the same seed gives the same numbers.
fn generator(seed: u32) -> impl FnMut() -> u32 {
    let mut s = u64::from(seed) * 2 + 1;
    move || {
        s = s.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (s >> 32) as u32
    }
}

/// Values in -1..1, with an outlier of 20 in every 97.
fn values(n: usize, next: &mut impl FnMut() -> u32) -> Vec<f32> {
    (0..n).map(|i| (next() as i32 as f32) / 2f32.powi(31) * if i % 97 == 5 { 20.0 } else { 1.0 }).collect()
}

/// A quantized row; the vectors of other kinds are empty.
#[derive(Default)]
struct Act {
    x: Vec<f32>,
    q16: Vec<i16>,
    q8: Vec<i8>,
    u: Vec<u8>,
    d: Vec<f32>,
    sums32: Vec<i32>,
    sums16: Vec<i16>,
}

impl Act {
    fn row(&self) -> ActRow<'_> {
        let Act { x, q16, q8, u, d, sums32, sums16 } = self;
        if !x.is_empty() {
            ActRow::F32(x)
        } else if !q16.is_empty() {
            ActRow::Block32(Act32 { q: q16, d, sums: sums32 })
        } else if !sums32.is_empty() {
            ActRow::Byte32(Act32 { q: q8, d, sums: sums32 })
        } else {
            ActRow::Block256(Act256 { q: q8, u, d, sums: sums16 })
        }
    }
}

fn act(kind: ActKind, x: &[f32]) -> Act {
    let (n, d) = (x.len(), vec![0.0; x.len() / kind.block_len()]);
    let mut to = Act { d, ..Act::default() };
    match kind {
        ActKind::F32 => to.x = x.to_vec(),
        ActKind::Block32 => {
            (to.q16, to.sums32) = (vec![0; n], vec![0; n / 32]);
            quantise32(x, &mut to.q16, &mut to.d, &mut to.sums32);
        }
        ActKind::Byte32 => {
            (to.q8, to.sums32) = (vec![0; n], vec![0; n / 32]);
            quantise_byte32(x, &mut to.q8, &mut to.d, &mut to.sums32);
        }
        ActKind::Block256 => {
            (to.q8, to.u, to.sums16) = (vec![0; n], vec![0; n / 32], vec![0; n / 16]);
            quantise256(x, &mut to.q8, &mut to.u, &mut to.d, &mut to.sums16);
        }
    }
    to
}

#[test]
fn dot_is_as_near_to_f64_as_the_activations_are() {
    for t in WeightType::ALL {
        for (seed, n) in [(1, 256), (2, 2048), (3, 768)] {
            let mut next = generator(seed);
            let (w, x) = (weights(t, n, &mut next), values(n, &mut next));
            let mut decoded = vec![0.0; n];
            decode_row(t, w.get(), &mut decoded);
            let buf = act(t.act(), &x);

            // Half a step of the activation's grid for each value; then every f32 operation of the sum may err by
            // 2^-24 of its result, which is at most the sum of magnitudes (twice that where there is a minimum).
            let step = |i: usize| match buf.row() {
                ActRow::F32(_) => 0.0,
                ActRow::Block32(a) => f64::from(a.d[i / 32]),
                ActRow::Byte32(a) => f64::from(a.d[i / 32]),
                ActRow::Block256(a) => f64::from(a.d[i / 256]) * f64::from(a.u[i / 32]),
            };
            let (mut want, mut bound, mut variance, mut magnitude) = (0.0f64, 0.0f64, 0.0f64, 0.0f64);
            for i in 0..n {
                let (w, x) = (f64::from(decoded[i]), f64::from(x[i]));
                want += w * x;
                bound += w.abs() * step(i) * 0.5001;
                variance += (w * step(i)).powi(2) / 12.0;
                magnitude += w.abs() * x.abs();
            }
            let n_ops = if t.act() == ActKind::F32 { n / 16 + 4 } else { 5 * n / t.act().block_len() };
            // Weights and minimums cancel in the decoded values; the terms themselves are larger by at most this.
            let cancel = if t.has_min() { 64.0 } else { 1.0 };
            let rounding = (n_ops + 8) as f64 * 2f64.powi(-24) * magnitude * cancel;
            // The bound is for errors that all point one way; these do not, so eight deviations hold as well.
            let bound = bound.min(8.0 * variance.sqrt()) + rounding;
            let got = f64::from(dot_row(t, w.get(), buf.row()));
            assert!((got - want).abs() <= bound, "{t} {n}: {got} is not {want} within {bound}");
        }
    }
}

#[test]
fn float_tails_fill_the_lanes_they_have() {
    for n in [1usize, 5, 16, 17, 31, 48, 53] {
        let mut next = generator(n as u32);
        let x = values(n, &mut next);
        let w: Vec<f32> = values(n, &mut next);
        let mut lanes = [0.0f32; 16];
        (0..n).for_each(|i| lanes[i % 16] = w[i].mul_add(x[i], lanes[i % 16]));
        let w: Vec<u8> = w.iter().flat_map(|w| w.to_le_bytes()).collect();
        let got = dot_row(WeightType::F32, &w, ActRow::F32(&x));
        assert_eq!(got.to_bits(), quant::dot::tree_sum(&lanes).to_bits(), "{n}");
    }
}

#[test]
fn activations_by_hand() {
    // The largest value is the scale's own: q = 32767; half of it lies on a tie of the grid, 16383.5, and goes to even.
    let mut x = vec![0.0f32; 256];
    (x[0], x[1], x[2], x[32], x[64]) = (2.0, -2.0, 1.0, 0.1, 1e-38);
    let buf = act(ActKind::Block32, &x);
    let ActRow::Block32(a) = buf.row() else { panic!("asked for 32-blocks") };
    assert_eq!((&a.q[..4], a.d[0], a.sums[0]), (&[32767, -32767, 16384, 0][..], 2.0 / 32767.0, 16384));
    assert_eq!((a.q[32], a.sums[1]), (32767, 32767));
    assert_eq!((a.q[64], a.d[2].to_bits(), a.sums[2]), (0, 0, 0), "below 1e-30 a block is zero");

    let buf = act(ActKind::Byte32, &x);
    let ActRow::Byte32(a) = buf.row() else { panic!("asked for 32-blocks of bytes") };
    assert_eq!((&a.q[..4], a.d[0], a.sums[0]), (&[127, -127, 64, 0][..], 2.0 / 127.0, 64), "63.5 goes to even");
    assert_eq!((a.q[32], a.sums[1]), (127, 127));
    assert_eq!((a.q[64], a.d[2].to_bits(), a.sums[2]), (0, 0, 0), "below 1e-30 a block is zero");

    let buf = act(ActKind::Block256, &x);
    let ActRow::Block256(a) = buf.row() else { panic!("asked for 256-blocks") };
    assert_eq!((a.u, a.d[0]), (&[15, 1, 1, 1, 1, 1, 1, 1][..], 2.0 / 1905.0));
    assert_eq!((a.q[0], a.q[1], a.q[2], a.q[32], a.q[64]), (127, -127, 64, 95, 0));
    assert_eq!(a.sums[..4], [15 * 64, 0, 95, 0]);
}

/// Any f32 at all, with NaN, inf, zeros, subnormals and the ends of the range made frequent.
fn any_f32() -> impl Strategy<Value = f32> {
    prop_oneof![
        4 => -1.0f32..1.0,
        2 => any::<u32>().prop_map(f32::from_bits),
        1 => prop::sample::select(vec![0.0, -0.0, f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY,
            f32::MAX, f32::MIN, f32::MIN_POSITIVE, 1e-40, 1e-30, 0.99e-30]),
    ]
}

/// A row that is wholly finite as often as not.
fn any_row() -> impl Strategy<Value = Vec<f32>> {
    prop_oneof![
        prop::collection::vec(any_f32(), 512),
        prop::collection::vec(any_f32().prop_map(|x| if x.is_finite() { x } else { 0.5 }), 512),
        prop::collection::vec((any_f32(), 0..40u32).prop_map(|(x, k)| if k == 0 { x } else { 0.0 }), 512),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn quantised_rows_are_near_or_nan(x in any_row()) {
        for kind in [ActKind::Block32, ActKind::Byte32, ActKind::Block256] {
            let buf = act(kind, &x);
            let len = kind.block_len();
            for (b, x) in x.chunks_exact(len).enumerate() {
                let approx: Vec<(f64, f64)> = match buf.row() {
                    ActRow::F32(_) => unreachable!("not asked for"),
                    ActRow::Block32(a) => {
                        let q = &a.q[32 * b..][..32];
                        prop_assert_eq!(a.sums[b], q.iter().map(|&q| i32::from(q)).sum::<i32>());
                        prop_assert!(q.iter().all(|&q| q != i16::MIN));
                        q.iter().map(|&q| (f64::from(q) * f64::from(a.d[b]), f64::from(a.d[b]))).collect()
                    }
                    ActRow::Byte32(a) => {
                        let q = &a.q[32 * b..][..32];
                        prop_assert_eq!(a.sums[b], q.iter().map(|&q| i32::from(q)).sum::<i32>());
                        prop_assert!(q.iter().all(|&q| q != i8::MIN));
                        q.iter().map(|&q| (f64::from(q) * f64::from(a.d[b]), f64::from(a.d[b]))).collect()
                    }
                    ActRow::Block256(a) => {
                        let q = &a.q[256 * b..][..256];
                        for g in 0..16 {
                            let sum: i32 = q[16 * g..][..16].iter().map(|&q| i32::from(q)).sum();
                            prop_assert_eq!(i32::from(a.sums[16 * b + g]), i32::from(a.u[8 * b + g / 2]) * sum);
                        }
                        prop_assert!(q.iter().all(|&q| q != i8::MIN));
                        prop_assert!(a.u.iter().all(|u| (1..=15).contains(u)));
                        let step = |i: usize| f64::from(a.d[b]) * f64::from(a.u[8 * b + i / 32]);
                        (0..256).map(|i| (f64::from(q[i]) * step(i), step(i))).collect()
                    }
                };
                let finite = x.iter().all(|x| x.is_finite());
                for (&x, (approx, step)) in x.iter().zip(approx) {
                    prop_assert_eq!(approx.is_nan(), !finite);
                    if finite {
                        let err = (f64::from(x) - approx).abs();
                        // Half a step, and the roundings of d, inv and their products with numbers up to 32767.
                        prop_assert!(err <= 0.507 * step + 1e-30, "{} became {}, step {}", x, approx, step);
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_that_is_not_finite_never_becomes_a_number(x in any_row(), seed in any::<u32>()) {
        let finite = x.iter().all(|x| x.is_finite());
        for t in WeightType::ALL.into_iter().filter(|t| t.act() != ActKind::F32) {
            let w = weights(t, x.len(), &mut generator(seed));
            let y = dot_row(t, w.get(), act(t.act(), &x).row());
            prop_assert!(finite || y.is_nan(), "{}: {}", t, y);
            let zero = dot_row(t, w.get(), act(t.act(), &vec![-0.0; x.len()]).row());
            prop_assert_eq!(zero, 0.0, "{}", t);
        }
    }
}
