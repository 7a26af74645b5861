//! Gated DeltaNet (Yang, Kautz, Hatamizadeh: "Gated Delta Networks", arXiv 2412.06464): its gates and its norm, each as
//! its formula. Rows lie one after the other.

use super::ops;

/// `exp(a_log · softplus(a + dt_bias))` and `σ(b)`, for rows as long as `a_log`.
pub fn decay_beta(a: &[f32], b: &[f32], a_log: &[f32], dt_bias: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let weights = a_log.iter().zip(dt_bias).cycle();
    let decay = |(&a, (&a_log, &dt_bias)): (&f32, (&f32, &f32))| {
        let x = f64::from(a) + f64::from(dt_bias);
        let softplus = x.max(0.0) + libm::log1p(libm::exp(-x.abs()));
        libm::exp(f64::from(a_log) * softplus) as f32
    };
    (a.iter().zip(weights).map(decay).collect(), b.iter().map(|&b| ops::sigmoid(f64::from(b)) as f32).collect())
}

/// `rms_norm(x) ⊙ w ⊙ silu(gate)`, for every row as long as `w`.
pub fn gated_norm(x: &[f32], gate: &[f32], w: &[f32], eps: f32) -> Vec<f32> {
    let silu = |g: f64| g * ops::sigmoid(g);
    let normed = ops::rms_norm(x, w, eps);
    normed.iter().zip(gate).map(|(&x, &g)| (f64::from(x) * silu(f64::from(g))) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_hold_at_their_ends() {
        let inf = f32::INFINITY;
        // (a, dt_bias, a_log, g): a softplus of 0, of ln 2, of its argument, and one that would overflow as ln(1 + e^x).
        for (a, dt_bias, a_log, g) in [
            (-200.0, 0.0, -1.0, 1.0),
            (0.5, -0.5, -1.0, 0.5),
            (30.0, 1.0, -0.01, 0.733_447),
            (1000.0, 0.0, -1.0, 0.0),
            (inf, 0.0, -1.0, 0.0),
            (5.0, 0.0, 0.0, 1.0),
        ] {
            let (found, beta) = decay_beta(&[a], &[0.0], &[a_log], &[dt_bias]);
            assert!((found[0] - g).abs() < 1e-6 && beta == [0.5], "{a} + {dt_bias}, {a_log}: {found:?} {beta:?}");
        }
        assert_eq!(decay_beta(&[0.0; 2], &[-200.0, inf], &[0.0; 2], &[0.0; 2]).1[1], 1.0);
        // Of x = (3, 4) the mean square is 12.5; silu(0) is 0.
        let y = gated_norm(&[3.0, 4.0], &[20.0, 0.0], &[2.0, 5.0], 0.0);
        assert!((y[0] - 20.0 * 6.0 / 12.5f32.sqrt()).abs() < 1e-5 && y[1] == 0.0, "{y:?}");
    }
}
