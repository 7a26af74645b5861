//! The scalar dot products: the reference of the CPU law.
//!
//! # Where each type's sub-scales go, and why i32 cannot overflow
//! A 32-block gives `isum = Σ q_w·q_x` with `|q_x| <= 127`, or `|q_x| <= 32767` for 8-bit weights; a super-block gives
//! `isum = Σ_j u_j · Σ_{g in j} sc_g · Σ_{i in g} q_w·q_x` with `|q_x| <= 127` and `u <= 15`, and where there is a
//! minimum `msum = Σ_g mins_g · sums_g` with `|sums_g| <= 30480`. Weight sub-scales and activation sub-scales are thus
//! integers inside `isum`; only `d_w·d_x` and `dmin·d_x` are floats. The bound of `|isum|`, for every bit pattern of
//! the weights:
//!
//! | type | q_w | sc | bound of isum | mins | bound of msum |
//! |---|---|---|---|---|---|
//! | Q4_0 | -8..=7 | | 32·8·127 = 32 512 | | |
//! | Q4_1 | 0..=15 | | 32·15·127 = 60 960 | | Σ q_x: 4064 |
//! | Q5_0 | -16..=15 | | 32·16·127 = 65 024 | | |
//! | Q5_1 | 0..=31 | | 32·31·127 = 125 984 | | Σ q_x: 4064 |
//! | IQ4_NL | -127..=113 | | 32·127·127 = 516 128 | | |
//! | MXFP4, planar too | -12..=12 | | 32·12·127 = 48 768 | | |
//! | affine, b <= 6 bits | 0..=2^b - 1 | | 32·63·127 = 256 032 | | Σ q_x: 4064 |
//! | Q8_0 | -128..=127 | | 32·128·32767 = 1.3e8 | | |
//! | affine, 8 bits | 0..=255 | | 32·255·32767 = 2.7e8 | | Σ q_x: 1.0e6 |
//! | Q2_K | 0..=3 | 0..=15 | 256·3·15·1905 = 2.2e7 | 0..=15 | 16·15·30480 = 7.3e6 |
//! | Q3_K | -4..=3 | -32..=31 | 256·4·32·1905 = 6.2e7 | | |
//! | Q4_K | 0..=15 | 0..=63 | 256·15·63·1905 = 4.6e8 | 0..=63 | 16·63·30480 = 3.1e7 |
//! | Q5_K | 0..=31 | 0..=63 | 256·31·63·1905 = 9.5e8 | 0..=63 | 3.1e7 |
//! | Q6_K | -32..=31 | -128..=127 | 256·32·128·1905 = 1 997 537 280 | | |
//! | IQ4_XS | -127..=113 | -32..=31 | 256·127·32·1905 = 1 981 931 520 | | |
//! | IQ2_XXS, IQ2_XS, IQ2_S | -43..=43 | 1..=31 | 256·43·31·1905 = 6.5e8 | | |
//! | IQ3_XXS | -62..=62 | 1..=31 | 256·62·31·1905 = 9.4e8 | | |
//! | IQ3_S | -15..=15 | 1..=31 | 256·15·31·1905 = 2.3e8 | | |
//! | IQ1_S, IQ1_M | -9..=9 | 1..=15 | 256·9·15·1905 = 6.6e7 | | |
//! | TQ1_0; TQ2_0 | -1..=1; -1..=2 | 1 | 256·2·1905 = 9.8e5 | | |
//!
//! `i32` holds 2 147 483 647. Since these bound the sum of magnitudes, any order of summation is safe. A kernel that
//! keeps the offset apart (`Σ q·q_x - 8·Σ q_x`) computes the same integer; should its halves overflow (Q6_K with
//! q in 0..=63 may), wrapping addition still ends at the right number.
//!
//! `isum as f32` rounds to nearest even, as `cvtdq2ps` does. The result is the f32 accumulator after the last block.

use crate::act::{Act32, Act256, ActKind, ActRow};
use crate::block::{Ints32, Ints256};
use crate::decode::decode_row;
use crate::planes::Planes;
use crate::types::{Codec, WeightType, planar};

/// Returns the dot product of a row of weights and a row of activations of the same length, by the law of the crate.
///
/// # Panics
/// When the activations are not of the kind `t.act()`, or the rows differ in length.
pub fn dot_row<'a>(t: WeightType, w: impl Into<Planes<'a>>, x: ActRow<'_>) -> f32 {
    let w = w.into();
    let n = match x {
        ActRow::F32(x) => x.len(),
        ActRow::Block32(x) => x.q.len(),
        ActRow::Byte32(x) => x.q.len(),
        ActRow::Block256(x) => x.q.len(),
    };
    assert_eq!(Some(w.len()), t.plane_bytes(n), "bytes of a {t} row of {n} values");
    match x {
        ActRow::F32(x) if t.act() == ActKind::F32 => dot_float(t, w, x),
        ActRow::Block32(x) if t.act() == ActKind::Block32 => dot_blocks32(t, w, x),
        ActRow::Byte32(x) if t.act() == ActKind::Byte32 => dot_blocks32(t, w, x),
        ActRow::Block256(x) if t.act() == ActKind::Block256 => dot_super(t, w.q, x),
        _ => panic!("{t} weights meet {:?} activations", t.act()),
    }
}

/// Element `i` goes to lane `i % 16`; a tail fills the lanes it has.
fn dot_float(t: WeightType, w: Planes<'_>, x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    let mut values = vec![0.0; x.len()];
    decode_row(t, w, &mut values);
    for (w, x) in values.chunks(16).zip(x.chunks(16)) {
        for i in 0..x.len() {
            lanes[i] = w[i].mul_add(x[i], lanes[i]);
        }
    }
    tree_sum(&lanes)
}

fn dot_blocks32<X: Copy + Into<i32>>(t: WeightType, w: Planes<'_>, x: Act32<'_, X>) -> f32 {
    let blocks = 0..x.q.len() / 32;
    match t.codec() {
        Codec::Small { unpack, has_min, .. } => dot_small(w.q.chunks_exact(t.block_bytes()).map(unpack), has_min, x),
        Codec::Mxfp4Planar => dot_small(blocks.map(|b| planar::unpack_mxfp4(w, b)), false, x),
        Codec::Affine(a) => dot_small(blocks.map(|b| a.unpack(w, b)), true, x),
        _ => unreachable!("{t} has no 32-blocks"),
    }
}

fn dot_small<Q: Copy + Into<i32>, X: Copy + Into<i32>>(
    w: impl Iterator<Item = Ints32<Q>>,
    has_min: bool,
    x: Act32<'_, X>,
) -> f32 {
    let mut acc = 0.0f32;
    for (b, (w, q)) in w.zip(x.q.as_chunks().0).enumerate() {
        acc = (w.d * x.d[b]).mul_add(isum32(&w.q, q) as f32, acc);
        if has_min {
            acc = (w.m * x.d[b]).mul_add(x.sums[b] as f32, acc);
        }
    }
    acc
}

fn dot_super(t: WeightType, w: &[u8], x: Act256<'_>) -> f32 {
    let (unpack, has_min) = match t.codec() {
        Codec::Super { unpack, has_min, .. } => (unpack, has_min),
        Codec::Grid { unpack, .. } => (unpack, false),
        _ => unreachable!("{t} has super-blocks"),
    };
    let (q, u, sums) = (x.q.as_chunks().0, x.u.as_chunks().0, x.sums.as_chunks().0);
    let mut acc = 0.0f32;
    for (b, w) in w.chunks_exact(t.block_bytes()).map(unpack).enumerate() {
        acc = (w.d * x.d[b]).mul_add(isum256(&w, &q[b], &u[b]) as f32, acc);
        if has_min {
            acc = (-(w.dmin * x.d[b])).mul_add(msum256(&w.mins, &sums[b]) as f32, acc);
        }
    }
    acc
}

/// `Σ q_w·q_x`.
fn isum32<Q: Copy + Into<i32>, X: Copy + Into<i32>>(w: &[Q; 32], x: &[X; 32]) -> i32 {
    w.iter().zip(x).map(|(&w, &x)| w.into() * x.into()).sum()
}

/// `Σ_j u_j · Σ_{g in j} sc_g · Σ q_w·q_x`.
fn isum256(w: &Ints256, x: &[i8; 256], u: &[u8; 8]) -> i32 {
    let mut isum = 0;
    for (g, (w16, x16)) in w.q.as_chunks::<16>().0.iter().zip(x.as_chunks::<16>().0).enumerate() {
        let group: i32 = w16.iter().zip(x16).map(|(&w, &x)| i32::from(w) * i32::from(x)).sum();
        isum += i32::from(u[g / 2]) * i32::from(w.sc[g]) * group;
    }
    isum
}

/// `Σ_g mins_g · sums_g`.
fn msum256(mins: &[u8; 16], sums: &[i16; 16]) -> i32 {
    mins.iter().zip(sums).map(|(&m, &s)| i32::from(m) * i32::from(s)).sum()
}

/// Sums 16 lanes by the fixed tree: lane `i` takes lane `i + 8`, then `i + 4`, `i + 2`, `i + 1`.
///
/// This is the order in which a 512-bit register folds onto its own halves, and two 256-bit registers onto one.
pub fn tree_sum(lanes: &[f32; 16]) -> f32 {
    let mut s = *lanes;
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            s[i] += s[i + half];
        }
    }
    s[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Largest |q|, |sc| and mins of each type that has integers, as the module's table says.
    const BOUNDS: [(WeightType, i32, i32, i32); 22] = [
        (WeightType::Q4_0, 8, 1, 0),
        (WeightType::Q4_1, 15, 1, 0),
        (WeightType::Q5_0, 16, 1, 0),
        (WeightType::Q5_1, 31, 1, 0),
        (WeightType::Q8_0, 128, 1, 0),
        (WeightType::IQ4_NL, 127, 1, 0),
        (WeightType::MXFP4, 12, 1, 0),
        (WeightType::Q2_K, 3, 15, 15),
        (WeightType::Q3_K, 4, 32, 0),
        (WeightType::Q4_K, 15, 63, 63),
        (WeightType::Q5_K, 31, 63, 63),
        (WeightType::Q6_K, 32, 128, 0),
        (WeightType::IQ4_XS, 127, 32, 0),
        (WeightType::IQ2_XXS, 43, 31, 0),
        (WeightType::IQ2_XS, 43, 31, 0),
        (WeightType::IQ2_S, 43, 31, 0),
        (WeightType::IQ3_XXS, 62, 31, 0),
        (WeightType::IQ3_S, 15, 31, 0),
        (WeightType::IQ1_S, 9, 15, 0),
        (WeightType::IQ1_M, 9, 15, 0),
        (WeightType::TQ1_0, 1, 1, 0),
        (WeightType::TQ2_0, 2, 1, 0),
    ];

    /// Bytes from a small generator, with runs of the extreme bytes among them.
    fn bytes(n: usize, seed: u32) -> Vec<u8> {
        let mut s = seed.wrapping_mul(2_654_435_761) | 1;
        let mut next = || {
            s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (s >> 24) as u8
        };
        match seed {
            0..=7 => vec![[0, 0xff, 0x80, 0x7f, 0x0f, 0xf0, 0x3f, 0xc0][seed as usize]; n],
            _ => (0..n).map(|_| next()).collect(),
        }
    }

    #[test]
    fn no_bit_pattern_leaves_the_bounds_and_each_bound_is_met() {
        for (t, q, sc, mins) in BOUNDS {
            let mut max = (0, 0, 0);
            let mut see = |q: &[i8], sc: &[i8], mins: &[u8]| {
                let largest = |v: &[i8]| v.iter().map(|&v| i32::from(v).abs()).max().unwrap_or(1);
                max.0 = max.0.max(largest(q));
                max.1 = max.1.max(largest(sc));
                max.2 = max.2.max(mins.iter().map(|&m| i32::from(m)).max().unwrap_or(0));
            };
            for seed in 0..200 {
                let b = bytes(t.block_bytes(), seed);
                match t.codec() {
                    Codec::Small { unpack, .. } => see(&unpack(&b).q, &[], &[]),
                    Codec::Super { unpack, .. } | Codec::Grid { unpack, .. } => {
                        see(&unpack(&b).q, &unpack(&b).sc, &unpack(&b).mins)
                    }
                    _ => unreachable!("neither floats nor planar types in the table"),
                }
            }
            assert_eq!(max, (q, sc, mins), "{t}");
            let of = match t.act() {
                ActKind::Block32 => 32 * 32767,
                ActKind::Byte32 => 32 * 127,
                _ => 256 * 127 * 15,
            };
            assert!(i64::from(of) * i64::from(q) * i64::from(sc) <= i64::from(i32::MAX), "{t}");
        }
    }

    /// The sums at their bounds, where overflow would panic: the tests are built with overflow checks.
    #[test]
    fn extremes_do_not_overflow() {
        for (t, q, sc, mins) in BOUNDS {
            for sign in [-1, 1] {
                let w = [(-q).max(-128) as i8; 32];
                if t.act() == ActKind::Block32 {
                    let want = i64::from(sign * -q) * 32 * 32767;
                    assert_eq!(i64::from(isum32(&w, &[(sign * 32767) as i16; 32])), want, "{t}");
                } else if t.act() == ActKind::Byte32 {
                    assert_eq!(isum32(&w, &[(sign * 127) as i8; 32]), sign * -q * 32 * 127, "{t}");
                } else {
                    let (q8, sc8) = (-q as i8, -sc as i8);
                    let w = Ints256 { q: [q8; 256], sc: [sc8; 16], mins: [mins as u8; 16], d: 1.0, dmin: 1.0 };
                    let want = i64::from(sign * q * sc) * 256 * 127 * 15;
                    assert_eq!(i64::from(isum256(&w, &[(sign * 127) as i8; 256], &[15; 8])), want, "{t}");
                    let want = i64::from(sign * mins) * 16 * 30480;
                    assert_eq!(i64::from(msum256(&w.mins, &[(sign * 30480) as i16; 16])), want, "{t}");
                }
            }
        }
    }

    #[test]
    fn extremes_of_affine_types_do_not_overflow() {
        for x in [i16::MAX, -i16::MAX] {
            assert_eq!(i64::from(isum32(&[255u8; 32], &[x; 32])), 32 * 255 * i64::from(x));
        }
    }

    #[test]
    fn tree_sum_adds_in_its_order() {
        let lanes: [f32; 16] = std::array::from_fn(|i| 1.0 / (3 * i + 1) as f32);
        let s = |i: usize| lanes[i] + lanes[i + 8];
        let t = |i: usize| s(i) + s(i + 4);
        assert_eq!(tree_sum(&lanes).to_bits(), ((t(0) + t(2)) + (t(1) + t(3))).to_bits());
        // Lanes 0 and 8 meet first; from left to right the ones before lane 8 would be lost in 1e8.
        let mut lanes = [1.0; 16];
        (lanes[0], lanes[8]) = (1e8, -1e8);
        assert_eq!(tree_sum(&lanes), 14.0);
    }
}
