//! What an encoder lost.

use fearless_simd::Level;

use crate::level::at_level;

/// Lanes of the sums: a fixed order that compilers turn into vectors.
const LANES: usize = 4;

/// `Σ w·x²` and `Σ w·(x - y)²` of values `y` which stand for `x`, with weights of 1 where there are none.
///
/// # Panics
/// When there are neither as many weights as values nor none.
pub fn square_sums(x: &[f32], y: &[f32], w: &[f32]) -> (f64, f64) {
    at_level!(Level::new(), _ => sums(x, y, w))
}

#[inline(always)]
fn sums(x: &[f32], y: &[f32], w: &[f32]) -> (f64, f64) {
    let (mut power, mut error) = ([0.0; LANES], [0.0; LANES]);
    let (whole, rest) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    let n = x.len() - whole.1.len();
    let ones = [1.0; LANES];
    for (i, (x, y)) in whole.0.iter().zip(rest.0).enumerate() {
        let w = if w.is_empty() { &ones } else { &w.as_chunks().0[i] };
        add(x, y, w, &mut power, &mut error);
    }
    let mut last = [[0.0; LANES]; 3];
    let many = whole.1.len();
    last[0][..many].copy_from_slice(whole.1);
    last[1][..many].copy_from_slice(rest.1);
    last[2][..many].copy_from_slice(if w.is_empty() { &ones[..many] } else { &w[n..] });
    add(&last[0], &last[1], &last[2], &mut power, &mut error);
    (power.iter().sum(), error.iter().sum())
}

#[inline(always)]
fn add(x: &[f32; LANES], y: &[f32; LANES], w: &[f32; LANES], power: &mut [f64; LANES], error: &mut [f64; LANES]) {
    for i in 0..LANES {
        let (x, y, w) = (f64::from(x[i]), f64::from(y[i]), f64::from(w[i]));
        power[i] += w * x * x;
        error[i] += w * (x - y) * (x - y);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_single_values() {
        for n in [0, 1, 3, 4, 5, 31, 64] {
            let x: Vec<f32> = (0..n).map(|i| i as f32 - 7.5).collect();
            let (y, w): (Vec<f32>, Vec<f32>) = (0..n).map(|i| ((i % 5) as f32, 0.25 * (i % 3) as f32)).unzip();
            for w in [&w[..], &[]] {
                let of = |i: usize| f64::from(w.get(i).copied().unwrap_or(1.0));
                let sum = |of: &dyn Fn(usize) -> f64| (0..n).map(of).sum::<f64>();
                let power = sum(&|i| of(i) * f64::from(x[i]).powi(2));
                let error = sum(&|i| of(i) * f64::from(x[i] - y[i]).powi(2));
                assert_eq!(square_sums(&x, &y, w), (power, error), "{n} values, {} weights", w.len());
            }
        }
    }
}
