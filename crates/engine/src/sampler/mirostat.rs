//! Mirostat 1 and 2 (Basu et al. 2020, arXiv:2007.14966).

use super::SamplerParams;
use super::random::Pcg32;
use super::stages::Candidates;

/// Number of best tokens used to estimate the Zipf exponent.
const ESTIMATED_FROM: usize = 100;

/// Version 1: estimates the Zipf exponent s of the row, and from it the k whose top-k has the target surprise.
pub fn v1(c: &mut Candidates, p: &SamplerParams, mu: &mut f64, n_vocab: usize, random: &mut Pcg32) -> u32 {
    c.sort_all();
    let (mut tb, mut tt) = (0.0, 0.0);
    let best: &[_] = c;
    for (i, pair) in best.windows(2).take(ESTIMATED_FROM - 1).enumerate() {
        let t = libm::log((i + 2) as f64 / (i + 1) as f64);
        tb += t * (pair[0].logit - pair[1].logit);
        tt += t * t;
    }
    let s = if tt > 0.0 { tb / tt } else { 0.0 };
    let epsilon = s - 1.0;
    let scale = epsilon * libm::exp2(*mu) / (1.0 - libm::pow(n_vocab as f64, -epsilon));
    let k = libm::pow(scale, 1.0 / s);
    // A flat row has no exponent; the cast takes NaN to 0 and a huge k to the whole row.
    c.top_k((k as usize).max(1));
    draw(c, p, mu, random)
}

/// Version 2: drops candidates with a surprise above `mu`.
pub fn v2(c: &mut Candidates, p: &SamplerParams, mu: &mut f64, random: &mut Pcg32) -> u32 {
    c.sort_all();
    c.keep_surprise_below(*mu);
    draw(c, p, mu, random)
}

fn draw(c: &mut Candidates, p: &SamplerParams, mu: &mut f64, random: &mut Pcg32) -> u32 {
    let (token, probability) = c.draw(random);
    let surprise = -libm::log2(probability);
    *mu -= f64::from(p.mirostat_eta) * (surprise - f64::from(p.mirostat_tau));
    token
}
