//! Plain encoders of the types with code books and of the ternary ones: a scale from each group's largest magnitude,
//! then the nearest entries.

use half::f16;

use crate::types::grid;

/// `x / d`, and 0 where `d` is.
fn over(x: f64, d: f64) -> f64 {
    if d == 0.0 { 0.0 } else { x / d }
}

/// The f16 scale of a block, and the scale that it and `s` make for each 16 values.
struct Scales {
    d: f16,
    s: [u8; 16],
    of: [f64; 16],
}

/// Sub-scales of `len` values each so that the largest of these becomes `level`: `x ≈ d·factor·(2·s + 1)·q`, s up to
/// `hi`.
fn scales(x: &[f32; 256], len: usize, level: f64, factor: f64, hi: u8) -> Scales {
    let want: [f64; 16] = std::array::from_fn(|g| {
        let first = 16 * g / len * len;
        f64::from(x[first..first + len].iter().fold(0.0f32, |a, x| a.max(x.abs()))) / level
    });
    let largest = want.iter().copied().fold(0.0, f64::max);
    let d = f16::from_f64((largest / factor / f64::from(2 * hi + 1)).min(65504.0));
    let unit = d.to_f64() * factor;
    let s = want.map(|want| ((over(want, unit) - 1.0) / 2.0).round().clamp(0.0, f64::from(hi)) as u8);
    Scales { d, s, of: s.map(|s| unit * f64::from(2 * s + 1)) }
}

/// The entry with the least squared distance, and that.
fn nearest<const N: usize>(book: &[[i8; N]], x: [f64; N]) -> (usize, f64) {
    let mut best = (0, f64::INFINITY);
    for (i, entry) in book.iter().enumerate() {
        let distance = entry.iter().zip(x).map(|(&q, x)| (x - f64::from(q)).powi(2)).sum();
        if distance < best.1 {
            best = (i, distance);
        }
    }
    best
}

/// Eight values over their scale, made positive, and their signs; `even`: with an even number of minus signs.
fn magnitudes(x: &[f32; 256], i: usize, scale: f64, even: bool) -> ([f64; 8], u8) {
    let x: [f64; 8] = std::array::from_fn(|k| over(f64::from(x[8 * i + k]), scale));
    let mut minus = (0..8).filter(|&k| x[k] < 0.0).fold(0u8, |bits, k| bits | 1 << k);
    if even && minus.count_ones() % 2 == 1 {
        let smallest = (0..8).fold(0, |a, k| if x[k].abs() < x[a].abs() { k } else { a });
        minus ^= 1 << smallest;
    }
    (std::array::from_fn(|k| if minus >> k & 1 == 1 { -x[k] } else { x[k] }), minus)
}

fn halves(x: [f64; 8]) -> [[f64; 4]; 2] {
    [[x[0], x[1], x[2], x[3]], [x[4], x[5], x[6], x[7]]]
}

pub(crate) fn iq2_xxs(x: &[f32; 256], b: &mut [u8; 66]) {
    let at = scales(x, 32, 43.0, 0.125, 15);
    b[..2].copy_from_slice(&at.d.to_le_bytes());
    for g in 0..8 {
        let mut bits = u32::from(at.s[2 * g]) << 28;
        for k in 0..4 {
            let (x, minus) = magnitudes(x, 4 * g + k, at.of[2 * g], true);
            b[2 + 8 * g + k] = nearest(&grid::IQ2_XXS, x).0 as u8;
            bits |= u32::from(minus & 127) << (7 * k);
        }
        b[6 + 8 * g..10 + 8 * g].copy_from_slice(&bits.to_le_bytes());
    }
}

pub(crate) fn iq2_xs(x: &[f32; 256], b: &mut [u8; 74]) {
    let at = scales(x, 16, 43.0, 0.125, 15);
    b[..2].copy_from_slice(&at.d.to_le_bytes());
    for i in 0..32 {
        let (x, minus) = magnitudes(x, i, at.of[i / 2], true);
        let bits = nearest(&grid::IQ2_XS, x).0 as u16 | u16::from(minus & 127) << 9;
        b[2 + 2 * i..4 + 2 * i].copy_from_slice(&bits.to_le_bytes());
    }
    (0..8).for_each(|g| b[66 + g] = at.s[2 * g] | at.s[2 * g + 1] << 4);
}

pub(crate) fn iq2_s(x: &[f32; 256], b: &mut [u8; 82]) {
    let at = scales(x, 16, 43.0, 0.125, 15);
    b[..2].copy_from_slice(&at.d.to_le_bytes());
    b[66..74].fill(0);
    for i in 0..32 {
        let (x, minus) = magnitudes(x, i, at.of[i / 2], false);
        let entry = nearest(&grid::IQ2_S, x).0;
        (b[2 + i], b[34 + i]) = (entry as u8, minus);
        b[66 + i / 4] |= (entry >> 8 << (2 * (i % 4))) as u8;
    }
    (0..8).for_each(|g| b[74 + g] = at.s[2 * g] | at.s[2 * g + 1] << 4);
}

pub(crate) fn iq3_xxs(x: &[f32; 256], b: &mut [u8; 98]) {
    let at = scales(x, 32, 62.0, 0.25, 15);
    b[..2].copy_from_slice(&at.d.to_le_bytes());
    for g in 0..8 {
        let mut bits = u32::from(at.s[2 * g]) << 28;
        for k in 0..4 {
            let (x, minus) = magnitudes(x, 4 * g + k, at.of[2 * g], true);
            for (half, x) in halves(x).into_iter().enumerate() {
                b[2 + 8 * g + 2 * k + half] = nearest(&grid::IQ3_XXS, x).0 as u8;
            }
            bits |= u32::from(minus & 127) << (7 * k);
        }
        b[66 + 4 * g..70 + 4 * g].copy_from_slice(&bits.to_le_bytes());
    }
}

pub(crate) fn iq3_s(x: &[f32; 256], b: &mut [u8; 110]) {
    let at = scales(x, 32, 15.0, 1.0, 15);
    b[..2].copy_from_slice(&at.d.to_le_bytes());
    b[66..74].fill(0);
    for i in 0..32 {
        let (x, minus) = magnitudes(x, i, at.of[i / 2], false);
        b[74 + i] = minus;
        for (half, x) in halves(x).into_iter().enumerate() {
            let (at, entry) = (2 * i + half, nearest(&grid::IQ3_S, x).0);
            b[2 + at] = entry as u8;
            b[66 + at / 8] |= ((entry >> 8) << (at % 8)) as u8;
        }
    }
    (0..4).for_each(|g| b[106 + g] = at.s[4 * g] | at.s[4 * g + 2] << 4);
}

/// The entry of IQ1 for eight values with `offset` added to each, and its squared distance.
fn ternary(x: &[f32; 256], i: usize, scale: f64, offset: f64) -> (usize, f64) {
    nearest(&grid::IQ1, std::array::from_fn(|k| over(f64::from(x[8 * i + k]), scale) - offset))
}

/// Of three levels the outer ones stand for the larger half of the values, and not for the largest.
const IQ1_LEVEL: f64 = 13.0;

pub(crate) fn iq1_s(x: &[f32; 256], b: &mut [u8; 50]) {
    let at = scales(x, 32, IQ1_LEVEL, 0.125, 7);
    b[..2].copy_from_slice(&at.d.to_le_bytes());
    for g in 0..8 {
        let entries = |offset| std::array::from_fn::<_, 4, _>(|k| ternary(x, 4 * g + k, at.of[2 * g], offset));
        let (plus, minus) = (entries(1.0), entries(-1.0));
        let cost = |of: &[(usize, f64); 4]| of.iter().map(|e| e.1).sum::<f64>();
        let takes_off = cost(&minus) < cost(&plus);
        let mut high = u16::from(at.s[2 * g]) << 12 | u16::from(takes_off) << 15;
        for (k, (entry, _)) in (if takes_off { minus } else { plus }).into_iter().enumerate() {
            b[2 + 4 * g + k] = entry as u8;
            high |= (entry as u16 >> 8) << (3 * k);
        }
        b[34 + 2 * g..36 + 2 * g].copy_from_slice(&high.to_le_bytes());
    }
}

pub(crate) fn iq1_m(x: &[f32; 256], b: &mut [u8; 56]) {
    let at = scales(x, 16, IQ1_LEVEL, 0.125, 7);
    b[32..48].fill(0);
    for i in 0..32 {
        let (plus, minus) = (ternary(x, i, at.of[i / 2], 1.0), ternary(x, i, at.of[i / 2], -1.0));
        let (entry, takes_off) = if minus.1 < plus.1 { (minus.0, 8) } else { (plus.0, 0) };
        b[i] = entry as u8;
        b[32 + i / 2] |= ((entry >> 8) as u8 | takes_off) << (4 * (i % 2));
    }
    for i in 0..4 {
        let s = (0..4).fold(0, |bits, k| bits | u16::from(at.s[4 * i + k]) << (3 * k));
        let bits = s | (at.d.to_bits() >> (4 * i)) << 12;
        b[48 + 2 * i..50 + 2 * i].copy_from_slice(&bits.to_le_bytes());
    }
}

/// Digits 0, 1, 2 of 256 values, and their scale: the mean magnitude, which halves the error that the largest leaves.
fn digits(x: &[f32; 256]) -> (f16, [u8; 256]) {
    let largest = x.iter().fold(0.0f32, |a, x| a.max(x.abs()));
    let mean = x.iter().map(|x| f64::from(x.abs())).sum::<f64>() / 256.0;
    // Ternary weights have one magnitude beside zero, which a mean would lose.
    let d = if x.iter().all(|x| *x == 0.0 || x.abs() == largest) { f64::from(largest) } else { 1.5 * mean };
    let d = f16::from_f64(d.min(65504.0));
    (d, x.map(|x| (over(f64::from(x), d.to_f64()).round().clamp(-1.0, 1.0) + 1.0) as u8))
}

pub(crate) fn tq1_0(x: &[f32; 256], b: &mut [u8; 54]) {
    let (d, q) = digits(x);
    // A fraction of 243 as one of 256, rounded up, so that its digits come out of products by three.
    let byte = |digit: &dyn Fn(usize) -> u8| {
        let number = (0..5).fold(0u16, |a, n| 3 * a + u16::from(digit(n)));
        (number * 256).div_ceil(243) as u8
    };
    (0..32).for_each(|i| b[i] = byte(&|n| q[32 * n + i]));
    (0..16).for_each(|i| b[32 + i] = byte(&|n| q[160 + 16 * n + i]));
    (0..4).for_each(|i| b[48 + i] = byte(&|n| if n < 4 { q[240 + 4 * n + i] } else { 0 }));
    b[52..].copy_from_slice(&d.to_le_bytes());
}

pub(crate) fn tq2_0(x: &[f32; 256], b: &mut [u8; 66]) {
    let (d, q) = digits(x);
    for i in 0..64 {
        b[i] = (0..4).fold(0, |byte, n| byte | q[i / 32 * 128 + 32 * n + i % 32] << (2 * n));
    }
    b[64..].copy_from_slice(&d.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use crate::types::grid::signs;

    #[test]
    fn signs_come_back() {
        for seven in 0..128 {
            assert_eq!(signs(seven).count_ones() % 2, 0);
            assert_eq!(signs(seven) & 127, seven);
        }
    }
}
