//! Rotary frequencies: from the keys of a scaling rule to the table and factor of a [`RopeDecl`].
//!
//! All in f64; backends apply the table to positions and heads. Sources: RoFormer (arXiv 2104.09864), linear
//! interpolation (arXiv 2306.15595), YaRN (arXiv 2309.00071), dynamic NTK (transformers), Gemma 4's own code. Llama 3's
//! rule comes as divisors in GGUF files.

use std::f64::consts::PI;

use crate::plan::{Growth, RopeDecl, RopePairing};

/// How a model's context was extended beyond its first training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    /// Not extended.
    None,
    /// All positions divided by `factor`.
    Linear {
        /// At least 1 in practice, but any positive value works.
        factor: f64,
    },
    /// Low frequencies interpolated, high ones unchanged, a ramp between them.
    Yarn(Yarn),
    /// The first pairs rotate at the frequencies of a fully rotated head, the others not at all (Gemma 4).
    Proportional {
        /// Number of rotated pairs.
        n_turning: usize,
        /// Divisor of the positions.
        factor: f64,
    },
    /// Llama 3.1's rule: wavelengths above `n_ctx_orig / low` interpolated, below `n_ctx_orig / high` unchanged, a ramp
    /// in the inverse of the wavelength between them.
    Llama3 {
        /// New context over old.
        factor: f64,
        /// Rotations over the old context below which a dimension is interpolated in full.
        low: f64,
        /// Rotations over the old context above which a dimension is unchanged.
        high: f64,
        /// Context before the extension.
        n_ctx_orig: usize,
    },
}

/// Parameters of YaRN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// New context over old.
    pub factor: f64,
    /// Context before the extension.
    pub n_ctx_orig: usize,
    /// Dimensions with more rotations than this over the old context are unchanged.
    pub beta_fast: f64,
    /// Dimensions with fewer rotations than this are interpolated in full.
    pub beta_slow: f64,
    /// Whether the ends of the ramp are rounded outwards to whole pairs, as the paper's authors do. gpt-oss does not.
    pub truncate: bool,
    /// Share of the ramp that is applied; 1 in the paper.
    pub ext_factor: f64,
    /// Factor on top of the paper's `0.1·ln(factor) + 1`.
    pub attn_factor: f64,
    /// Multiplies the logarithm in the paper's factor; 1 there, DeepSeek's `mscale`.
    pub mscale: f64,
    /// DeepSeek's `mscale_all_dim`, whose share of the factor is divided out; 0 for none.
    pub log_multiplier: f64,
    /// The factor on cosine and sine, where the model gives it explicitly.
    pub attention_factor: Option<f64>,
}

/// Returns the table for `rotary` dims over `base`; `divisors` (`[rotary / 2]`, Llama 3) divide the frequencies.
pub fn table(rotary: usize, base: f64, divisors: Option<&[f32]>, scaling: Scaling, pairing: RopePairing) -> RopeDecl {
    let plain = (0..rotary / 2).map(|i| {
        let divisor = divisors.map_or(1.0, |d| f64::from(d[i]));
        libm::pow(base, -2.0 * i as f64 / rotary as f64) / divisor
    });
    let (inv_freq, factor) = match scaling {
        Scaling::None => (plain.collect(), 1.0),
        Scaling::Linear { factor } => (plain.map(|f| f / factor).collect(), 1.0),
        Scaling::Proportional { n_turning, factor } => {
            (plain.enumerate().map(|(i, f)| if i < n_turning { f / factor } else { 0.0 }).collect(), 1.0)
        }
        Scaling::Yarn(yarn) => (yarn.stretch(plain, rotary, base), yarn.attention_factor()),
        Scaling::Llama3 { factor, low, high, n_ctx_orig } => {
            let stretch = |f: f64| {
                let turns = n_ctx_orig as f64 * f / (2.0 * PI);
                let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                f * keep + f / factor * (1.0 - keep)
            };
            (plain.map(stretch).collect(), 1.0)
        }
    };
    RopeDecl { inv_freq, factor: factor as f32, growth: None, pairing, axes: Vec::new() }
}

/// Returns a rotary embedding that turns nothing and scales heads of `d_head` numbers by the position; `None` where
/// these are not pairs.
pub fn growing(growth: Growth, d_head: usize) -> Option<RopeDecl> {
    let inv_freq = vec![0.0; d_head / 2];
    let is_whole = d_head > 0 && d_head.is_multiple_of(2);
    is_whole.then_some(RopeDecl {
        inv_freq,
        factor: 1.0,
        growth: Some(growth),
        pairing: RopePairing::Half,
        axes: Vec::new(),
    })
}

/// Returns the rotary embedding of dynamic NTK scaling at the longest context that it is made for, `factor` times the
/// first one. There the base is multiplied by `(factor² - (factor - 1))^(d / (d - 2))`, `d` dims being rotated.
pub fn dynamic(rope: &RopeDecl, factor: f64) -> RopeDecl {
    let (n_pairs, growth) = (rope.inv_freq.len(), factor * factor - (factor - 1.0));
    // Of one pair, which turns at speed 1 whatever the base, the share is 0 / 0.
    let fall = |i: usize| libm::pow(growth, -(i as f64) / (n_pairs.max(2) - 1) as f64);
    let inv_freq = rope.inv_freq.iter().enumerate().map(|(i, f)| f * fall(i)).collect();
    RopeDecl { inv_freq, ..rope.clone() }
}

/// Returns LongRoPE's factor on cosine and sine for a context that was stretched from `n_ctx_orig`.
pub fn long_rope_factor(stretch: f64, n_ctx_orig: usize) -> f64 {
    if stretch <= 1.0 { 1.0 } else { (1.0 + libm::log(stretch) / libm::log(n_ctx_orig as f64)).sqrt() }
}

impl Yarn {
    fn stretch(&self, plain: impl Iterator<Item = f64>, rotary: usize, base: f64) -> Vec<f64> {
        // The pair that rotates `turns` times over the old context.
        let pair = |turns: f64| {
            rotary as f64 * libm::log(self.n_ctx_orig as f64 / (turns * 2.0 * PI)) / (2.0 * libm::log(base))
        };
        let (low, high) = (pair(self.beta_fast), pair(self.beta_slow));
        let (low, high) = if self.truncate { (low.floor(), high.ceil()) } else { (low, high) };
        let (low, high) = (low.max(0.0), high.min(rotary as f64 - 1.0));
        let kept = |i: usize| 1.0 - ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
        plain
            .enumerate()
            .map(|(i, f)| {
                let keep = kept(i) * self.ext_factor;
                f / self.factor * (1.0 - keep) + f * keep
            })
            .collect()
    }

    /// `0.1 · multiplier · ln(factor) + 1`, the paper's factor for a multiplier of 1.
    fn magnitude(&self, multiplier: f64) -> f64 {
        if self.factor <= 1.0 { 1.0 } else { 0.1 * multiplier * libm::log(self.factor) + 1.0 }
    }

    /// Factor of DeepSeek's variant on all scores: what cosine and sine of the rotated dims are divided by, once for
    /// the query and once for the key.
    pub fn score_factor(&self) -> f64 {
        self.magnitude(self.log_multiplier).powi(2)
    }

    fn attention_factor(&self) -> f64 {
        if let Some(factor) = self.attention_factor {
            return factor;
        }
        // Without extrapolation YaRN is linear interpolation, whose factor is 1.
        let stretched = self.magnitude(self.mscale) / self.magnitude(self.log_multiplier);
        let own = if self.ext_factor == 0.0 { 1.0 } else { stretched };
        own * self.attn_factor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yarn() -> Yarn {
        Yarn {
            factor: 4.0,
            n_ctx_orig: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            ext_factor: 1.0,
            attn_factor: 1.0,
            mscale: 1.0,
            log_multiplier: 0.0,
            attention_factor: None,
        }
    }

    fn close(a: &[f64], b: &[f64]) {
        assert_eq!(a.len(), b.len());
        for (a, b) in a.iter().zip(b) {
            assert!((a - b).abs() <= 1e-12 * b.abs(), "{a} {b}");
        }
    }

    #[test]
    fn plain_linear_and_divided() {
        let at = |divisors, scaling| table(8, 10000.0, divisors, scaling, RopePairing::Half).inv_freq;
        close(&at(None, Scaling::None), &[1.0, 0.1, 0.01, 0.001]);
        close(&at(None, Scaling::Linear { factor: 4.0 }), &[0.25, 0.025, 0.0025, 0.00025]);
        close(&at(Some(&[1.0, 1.0, 4.0, 8.0]), Scaling::None), &[1.0, 0.1, 0.0025, 0.000125]);
        close(&at(None, Scaling::Proportional { n_turning: 2, factor: 2.0 }), &[0.5, 0.05, 0.0, 0.0]);
    }

    /// By hand from the paper's equations 22 to 24, with bounds rounded outwards as its authors' code does.
    #[test]
    fn yarn_ramps_between_fast_and_slow_dims() {
        let rope = table(16, 10000.0, None, Scaling::Yarn(yarn()), RopePairing::Half);
        // low = floor(16·ln(4096/(64π))/(2·ln 10000)) = 2, high = ceil(16·ln(4096/2π)/(2·ln 10000)) = 6.
        let plain: Vec<f64> = (0..8).map(|i| 10f64.powf(-0.5 * i as f64)).collect();
        let kept = [1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0];
        let wanted: Vec<f64> = plain.iter().zip(kept).map(|(f, k)| f * k + f / 4.0 * (1.0 - k)).collect();
        close(&rope.inv_freq, &wanted);
        assert!((f64::from(rope.factor) - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-7);
    }

    /// The same ramp with unrounded ends: 16·ln(4096/(64π))/(2·ln 10000) = 2.618.. and 5.628...
    #[test]
    fn yarn_may_keep_the_ends_of_its_ramp() {
        let rope = table(16, 10000.0, None, Scaling::Yarn(Yarn { truncate: false, ..yarn() }), RopePairing::Half);
        let pair = |turns: f64| 16.0 * (4096.0 / (turns * 2.0 * PI)).ln() / (2.0 * 10000f64.ln());
        let (low, high) = (pair(32.0), pair(1.0));
        assert!((low - 2.618).abs() < 1e-3 && (high - 5.628).abs() < 1e-3, "{low} {high}");
        let kept = |i: usize| 1.0 - ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        let plain: Vec<f64> = (0..8).map(|i| 10f64.powf(-0.5 * i as f64)).collect();
        let wanted: Vec<f64> = plain.iter().enumerate().map(|(i, f)| f * kept(i) + f / 4.0 * (1.0 - kept(i))).collect();
        close(&rope.inv_freq, &wanted);
    }

    /// Frequencies have the same bits on every platform: a flipped last bit changes cosines at large positions.
    #[test]
    fn frequencies_keep_their_bits() {
        let bits = |rotary, base, scaling| {
            let inv_freq = table(rotary, base, None, scaling, RopePairing::Half).inv_freq;
            inv_freq.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, f| {
                f.to_bits().to_le_bytes().iter().fold(hash, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
            })
        };
        let found = [
            bits(128, 1e6, Scaling::None),
            bits(64, 1e7, Scaling::None),
            bits(128, 500_000.0, Scaling::Yarn(yarn())),
            bits(64, 150_000.0, Scaling::Yarn(Yarn { truncate: false, ..yarn() })),
            bits(256, 1e6, Scaling::Proportional { n_turning: 32, factor: 1.0 }),
        ];
        let wanted: [u64; 5] = [
            0xda2d_1896_f09f_398b,
            0x9bc3_ff07_5a15_6a76,
            0x72b2_6e5b_e63c_d117,
            0x7419_514e_68dc_4833,
            0xd9cf_c3c7_13bb_665c,
        ];
        assert_eq!(found, wanted, "{found:x?}");
    }

    #[test]
    fn yarn_without_extrapolation_is_linear() {
        let flat = Yarn { ext_factor: 0.0, attn_factor: 1.5, ..yarn() };
        let rope = table(16, 10000.0, None, Scaling::Yarn(flat), RopePairing::Half);
        let linear = table(16, 10000.0, None, Scaling::Linear { factor: 4.0 }, RopePairing::Half);
        close(&rope.inv_freq, &linear.inv_freq);
        assert_eq!(rope.factor, 1.5);
    }
}
