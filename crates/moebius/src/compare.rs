//! Figures that say how far two sets of logits are apart, and the mean negative log-likelihood of a text.

use engine::tokenizer::Tokenizer;
use serde::Serialize;

/// A text's tokens, cut into windows of `n_ctx` as llama-perplexity does: what is left at the end is not used, and a
/// begin-of-text token, where the model wants one, takes the place of each window's first token.
#[derive(Debug)]
pub struct Windows {
    tokens: Vec<u32>,
    n_ctx: usize,
    n: usize,
    bos: Option<u32>,
}

impl Windows {
    /// Up to `max` windows; there may be none.
    pub fn new(tokens: Vec<u32>, tokenizer: &Tokenizer, n_ctx: usize, max: Option<usize>) -> Windows {
        Windows::with_bos(tokens, tokenizer.bos().filter(|_| tokenizer.add_bos()), n_ctx, max)
    }

    fn with_bos(tokens: Vec<u32>, bos: Option<u32>, n_ctx: usize, max: Option<usize>) -> Windows {
        let n = (tokens.len() / n_ctx).min(max.unwrap_or(usize::MAX));
        Windows { tokens, n_ctx, n, bos }
    }

    /// Their number.
    pub fn len(&self) -> usize {
        self.n
    }

    /// Tokens of the whole text.
    pub fn n_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the first position of a window that is scored: those of its second half are.
    pub fn first_scored(&self) -> usize {
        self.n_ctx / 2
    }

    /// The windows in order, each `[n_ctx]`.
    pub fn iter(&mut self) -> impl Iterator<Item = &[u32]> {
        let bos = self.bos;
        self.tokens.chunks_exact_mut(self.n_ctx).take(self.n).map(move |window| {
            window.iter_mut().zip(bos).for_each(|(first, bos)| *first = bos);
            &*window
        })
    }
}

/// How far logits are from golden ones.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Agreement {
    /// Positions compared.
    pub positions: usize,
    /// Root mean square of the error over the standard deviation of the golden logits.
    pub rms_over_std: f64,
    /// Share of positions whose largest logit is the same token.
    pub argmax_agree: f64,
    /// Mean over positions of KL(golden ‖ ours), in nats.
    pub kl_mean: f64,
    /// Largest KL of a position.
    pub kl_max: f64,
    /// Share of the golden greedy continuation that ours follows from its start; absent when there is none to compare.
    pub greedy_agree: Option<f64>,
}

/// Compares `ours` with `golden`, both `[positions, n_vocab]`.
pub fn logits(ours: &[f32], golden: &[f32], n_vocab: usize) -> Agreement {
    assert_eq!(ours.len(), golden.len());
    let n = golden.len() as f64;
    let mean = golden.iter().map(|&g| f64::from(g)).sum::<f64>() / n;
    let variance = golden.iter().map(|&g| (f64::from(g) - mean).powi(2)).sum::<f64>() / n;
    let error = ours.iter().zip(golden).map(|(&o, &g)| (f64::from(o) - f64::from(g)).powi(2)).sum::<f64>() / n;
    let positions = golden.len() / n_vocab;
    let mut agree = 0usize;
    let mut kl_sum = 0f64;
    let mut kl_max = 0f64;
    for (o, g) in ours.chunks_exact(n_vocab).zip(golden.chunks_exact(n_vocab)) {
        let (kl, is_same) = row_distance(o, g);
        agree += usize::from(is_same);
        kl_sum += kl;
        kl_max = kl_max.max(kl);
    }
    Agreement {
        positions,
        rms_over_std: (error / variance).sqrt(),
        argmax_agree: agree as f64 / positions as f64,
        kl_mean: kl_sum / positions as f64,
        kl_max,
        greedy_agree: None,
    }
}

/// KL(golden ‖ ours) of a row of logits in nats, and whether both have the same largest logit.
pub fn row_distance(ours: &[f32], golden: &[f32]) -> (f64, bool) {
    let (log_o, log_g) = (log_sum_exp(ours), log_sum_exp(golden));
    let term = |(&o, &g): (&f32, &f32)| {
        let log_p = f64::from(g) - log_g;
        log_p.exp() * (log_p - (f64::from(o) - log_o))
    };
    (ours.iter().zip(golden).map(term).sum(), argmax(ours) == argmax(golden))
}

/// Index of the largest logit, the lower one on ties.
pub fn argmax(row: &[f32]) -> usize {
    let mut best = 0;
    for (i, &v) in row.iter().enumerate() {
        if v > row[best] {
            best = i;
        }
    }
    best
}

/// `ln Σ exp(row)`, shifted by the maximum.
fn log_sum_exp(row: &[f32]) -> f64 {
    let max = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + row.iter().map(|&v| (f64::from(v) - max).exp()).sum::<f64>().ln()
}

/// Negative log-likelihood of `target`, in nats.
pub fn nll(row: &[f32], target: u32) -> f64 {
    log_sum_exp(row) - f64::from(row[target as usize])
}

/// Mean and standard deviation of a sample (n − 1 in the denominator; 0 for one value).
pub fn mean_and_deviation(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    if values.len() < 2 {
        return (mean, 0.0);
    }
    let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0);
    (mean, variance.sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_whole_and_begin_with_the_mark() {
        let windows = |bos, max| {
            let mut windows = Windows::with_bos((0..11).collect(), bos, 4, max);
            let found: Vec<Vec<u32>> = windows.iter().map(<[u32]>::to_vec).collect();
            assert_eq!((windows.len(), windows.n_tokens(), windows.first_scored()), (found.len(), 11, 2));
            found
        };
        assert_eq!(windows(None, None), [[0, 1, 2, 3], [4, 5, 6, 7]]);
        assert_eq!(windows(Some(99), Some(9)), [[99, 1, 2, 3], [99, 5, 6, 7]]);
        assert_eq!(windows(Some(99), Some(1)), [[99, 1, 2, 3]]);
        assert!(windows(None, Some(0)).is_empty());
    }

    #[test]
    fn equal_logits_agree() {
        let golden: Vec<f32> = (0..24).map(|i| (i * 7 % 11) as f32).collect();
        let a = logits(&golden, &golden, 8);
        assert_eq!((a.positions, a.rms_over_std, a.argmax_agree, a.kl_mean), (3, 0.0, 1.0, 0.0));
    }

    #[test]
    fn known_distance() {
        // Golden is ±1, ours is off by 0.5 everywhere: the shift leaves every probability as it is.
        let golden = [1.0, -1.0, -1.0, 1.0];
        let ours = golden.map(|v| v + 0.5);
        let a = logits(&ours, &golden, 2);
        assert!((a.rms_over_std - 0.5).abs() < 1e-12);
        assert!(a.kl_mean.abs() < 1e-12);
        // Swapping the tokens of one row: KL = Σ p (ln p − ln q) with p = σ(±2), which is 2·tanh(1).
        let swapped = [-1.0, 1.0, -1.0, 1.0];
        let a = logits(&swapped, &golden, 2);
        assert_eq!(a.argmax_agree, 0.5);
        assert!((a.kl_mean - 1f64.tanh()).abs() < 1e-9);
    }

    #[test]
    fn likelihood_of_a_uniform_row() {
        assert!((nll(&[3.0; 16], 5) - 16f64.ln()).abs() < 1e-12);
    }
}
