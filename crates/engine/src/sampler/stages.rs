//! The candidates for the next token, and the steps that reweigh and drop them. Each step is short; [`super::Stage`]
//! cites its paper.

use std::cmp::Ordering;
use std::ops::Deref;

use backend::Best;
use backend::pick::scan;

use super::random::Pcg32;
use super::{Error, SamplerParams, Stage};

/// A token that may still be chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Token id.
    pub id: u32,
    /// Its logit; finite.
    pub logit: f64,
}

/// Order of the candidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Order {
    #[default]
    ById,
    BestFirst,
}

/// The remaining candidates, with buffers that are reused for every token. Never empty once loaded with a candidate.
#[derive(Debug, Clone, Default)]
pub struct Candidates {
    all: Vec<Candidate>,
    order: Order,
    p: Vec<f64>,
    scratch: Vec<(f64, Candidate)>,
    seen: Vec<u32>,
    counts: Vec<(u32, usize)>,
}

impl Deref for Candidates {
    type Target = [Candidate];

    fn deref(&self) -> &[Candidate] {
        &self.all
    }
}

/// Returns whether a step has an effect with these parameters.
pub fn acts(stage: Stage, p: &SamplerParams) -> bool {
    match stage {
        Stage::Penalties => p.penalizes(),
        Stage::Dry => p.dries(),
        Stage::TopNSigma => p.top_n_sigma > 0.0,
        Stage::TopK => p.top_k > 0,
        Stage::Typical => p.typical_p < 1.0,
        Stage::TopP => p.top_p < 1.0,
        Stage::MinP => p.min_p > 0.0,
        Stage::Xtc => p.xtc_probability > 0.0 && p.xtc_threshold <= 0.5,
        Stage::Temperature => p.temperature != 1.0 || p.dynatemp_range > 0.0,
    }
}

/// Returns the largest logit and its token, the lower id at a tie.
///
/// # Errors
/// The row holds NaN or plus infinity, or nothing but minus infinity.
pub fn argmax(logits: &[f32]) -> Result<(f32, u32), Error> {
    // One pass at memory speed; only the best block is searched for the index.
    const BLOCK: usize = 1024;
    let (mut best, mut best_block, mut is_bad) = (f32::NEG_INFINITY, 0, false);
    for (i, block) in logits.chunks(BLOCK).enumerate() {
        let (max, bad) = scan(block);
        is_bad |= bad;
        if max > best {
            (best, best_block) = (max, i * BLOCK);
        }
    }
    if is_bad && let Some(i) = logits.iter().position(|&l| l.is_nan() || l == f32::INFINITY) {
        return Err(Error::Logit { token: i as u32, value: logits[i] });
    }
    match logits[best_block..].iter().position(|&l| l == best) {
        Some(i) if best > f32::NEG_INFINITY => Ok((best, (best_block + i) as u32)),
        _ => Err(Error::Nothing { n_vocab: logits.len() }),
    }
}

fn best_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.id.cmp(&b.id))
}

impl Candidates {
    /// Loads a row, without tokens that are at minus infinity or forbidden by the bias.
    pub fn load(&mut self, logits: &[f32], bias: &[(u32, f32)]) {
        let row = logits.iter().enumerate();
        self.all.clear();
        self.all.extend(row.map(|(id, &l)| Candidate { id: id as u32, logit: f64::from(l) }));
        self.order = Order::ById;
        for &(id, bias) in bias {
            if let Some(c) = self.all.get_mut(id as usize) {
                c.logit += f64::from(bias);
            }
        }
        self.all.retain(|c| c.logit > f64::NEG_INFINITY);
    }

    /// Loads the best tokens of a row and the listed ones, in place of the whole row: see [`super::Sampler::needs`].
    /// `listed` is sorted.
    pub fn load_best(&mut self, row: &Best<'_>, listed: &[u32], bias: &[(u32, f32)]) {
        self.all.clear();
        let listed = listed.iter().copied().zip(row.listed.iter().copied());
        let found = row.best.iter().copied().chain(listed);
        self.all.extend(found.map(|(id, l)| Candidate { id, logit: f64::from(l) }));
        self.all.sort_unstable_by_key(|c| c.id);
        self.all.dedup_by_key(|c| c.id);
        self.order = Order::ById;
        for &(id, bias) in bias {
            if let Ok(at) = self.all.binary_search_by_key(&id, |c| c.id) {
                self.all[at].logit += f64::from(bias);
            }
        }
        self.all.retain(|c| c.logit > f64::NEG_INFINITY);
    }

    /// Returns the best candidate's token.
    pub fn best(&self) -> u32 {
        self.all.iter().min_by(|a, b| best_first(a, b)).map_or(0, |c| c.id)
    }

    /// Changes the logits of listed tokens; `list` is sorted by token and names each once.
    pub fn change(&mut self, list: &[(u32, usize)], f: impl Fn(f64, usize) -> f64) {
        for &(id, n) in list {
            let at = match self.order {
                Order::ById => self.all.binary_search_by_key(&id, |c| c.id).ok(),
                Order::BestFirst => self.all.iter().position(|c| c.id == id),
            };
            if let Some(at) = at {
                self.all[at].logit = f(self.all[at].logit, n);
            }
        }
        if self.order == Order::BestFirst {
            self.all.sort_unstable_by(best_first);
        }
    }

    /// Repetition, frequency and presence penalties for the tokens of `window`.
    pub fn penalties(&mut self, p: &SamplerParams, window: &[u32]) {
        self.seen.clear();
        self.seen.extend(window);
        self.seen.sort_unstable();
        self.counts.clear();
        self.counts.extend(self.seen.chunk_by(|a, b| a == b).map(|run| (run[0], run.len())));
        let (repeat, each, once) =
            (f64::from(p.penalty_repeat), f64::from(p.penalty_frequency), f64::from(p.penalty_presence));
        let counts = std::mem::take(&mut self.counts);
        self.change(&counts, |logit, n| {
            let logit = if logit <= 0.0 { logit * repeat } else { logit / repeat };
            logit - n as f64 * each - once
        });
        self.counts = counts;
    }

    /// Moves the `n` best to the front, in order; the others follow unordered. `n` is at most the length.
    fn sort_best(&mut self, n: usize) {
        if n < self.all.len() {
            self.all.select_nth_unstable_by(n, best_first);
        }
        self.all[..n].sort_unstable_by(best_first);
    }

    /// Orders all candidates, best first.
    pub fn sort_all(&mut self) {
        if self.order != Order::BestFirst {
            self.sort_best(self.all.len());
            self.order = Order::BestFirst;
        }
    }

    /// Keeps the `k` best, at least one.
    pub fn top_k(&mut self, k: usize) {
        let k = k.clamp(1, self.all.len().max(1));
        if self.order == Order::BestFirst {
            self.all.truncate(k);
            return;
        }
        // One pass: candidates above the k-th best so far move to the front; a front of 2k is cut back to k.
        let room = k.saturating_mul(2).max(k + 64);
        let (mut n, mut bound) = (0, f64::NEG_INFINITY);
        for i in 0..self.all.len() {
            let c = self.all[i];
            // Equal logits come in the order of their ids, so a later one never displaces an earlier one.
            if c.logit > bound || n < k {
                self.all[n] = c;
                n += 1;
                if n == room {
                    self.all[..n].select_nth_unstable_by(k - 1, best_first);
                    bound = self.all[k - 1].logit;
                    n = k;
                }
            }
        }
        self.all.truncate(n);
        self.sort_best(k.min(n));
        self.all.truncate(k);
        self.order = Order::BestFirst;
    }

    /// Fills `self.p` with exp(logit - max) and returns the sum.
    fn weigh(&mut self) -> f64 {
        let max = self.max();
        self.p.clear();
        self.p.extend(self.all.iter().map(|c| libm::exp(c.logit - max)));
        self.p.iter().sum()
    }

    fn max(&self) -> f64 {
        match self.order {
            Order::BestFirst => self.all[0].logit,
            Order::ById => self.all.iter().fold(f64::NEG_INFINITY, |m, c| if c.logit > m { c.logit } else { m }),
        }
    }

    /// Keeps logits at or above max - n * standard deviation.
    pub fn top_n_sigma(&mut self, p: &SamplerParams) {
        let n = self.all.len() as f64;
        let mean = self.all.iter().map(|c| c.logit).sum::<f64>() / n;
        let variance = self.all.iter().map(|c| (c.logit - mean) * (c.logit - mean)).sum::<f64>() / n;
        let bound = self.max() - f64::from(p.top_n_sigma) * variance.sqrt();
        self.keep_from(bound, p.min_keep);
    }

    /// Keeps logits at or above `bound`, and in any case the best `least`.
    fn keep_from(&mut self, bound: f64, least: usize) {
        if least > 1 && self.all.iter().filter(|c| c.logit >= bound).count() < least {
            self.top_k(least);
        } else {
            self.all.retain(|c| c.logit >= bound);
        }
    }

    /// Keeps probabilities of at least `min_p` times the best.
    pub fn min_p(&mut self, p: &SamplerParams) {
        self.keep_from(self.max() + libm::log(f64::from(p.min_p)), p.min_keep);
    }

    /// Keeps the smallest set of best tokens whose probabilities add up to `top_p`.
    pub fn top_p(&mut self, p: &SamplerParams) {
        let target = f64::from(p.top_p) * self.weigh();
        let max = self.max();
        // The nucleus is usually small: order a few, and more only when needed.
        let mut ordered = if self.order == Order::BestFirst { self.all.len() } else { 0 };
        let mut sum = 0.0;
        let mut keep = 0;
        while keep < self.all.len() {
            if keep == ordered {
                ordered = ordered.saturating_mul(8).max(256).min(self.all.len());
                self.sort_best(ordered);
            }
            sum += libm::exp(self.all[keep].logit - max);
            keep += 1;
            if sum >= target && keep >= p.min_keep {
                break;
            }
        }
        self.all.truncate(keep);
        self.order = Order::BestFirst;
    }

    /// Keeps tokens whose surprise is nearest to the expected one, until their probabilities add up to more than
    /// `typical_p`.
    pub fn typical(&mut self, p: &SamplerParams) {
        self.sort_all();
        let log_sum = libm::log(self.weigh());
        let max = self.max();
        let surprise = |c: &Candidate| log_sum - (c.logit - max);
        let entropy: f64 = self.all.iter().map(|c| libm::exp(-surprise(c)) * surprise(c)).sum();
        self.scratch.clear();
        self.scratch.extend(self.all.iter().map(|c| ((surprise(c) - entropy).abs(), *c)));
        self.scratch.sort_unstable_by(|a, b| {
            a.0.partial_cmp(&b.0).unwrap_or(Ordering::Equal).then_with(|| best_first(&a.1, &b.1))
        });
        let mut sum = 0.0;
        let mut keep = 0;
        for (_, c) in &self.scratch {
            sum += libm::exp(-surprise(c));
            keep += 1;
            if sum > f64::from(p.typical_p) && keep >= p.min_keep {
                break;
            }
        }
        self.all.clear();
        self.all.extend(self.scratch[..keep].iter().map(|(_, c)| *c));
        self.all.sort_unstable_by(best_first);
    }

    /// With the given probability, drops all candidates above the threshold except the least likely of them.
    pub fn xtc(&mut self, p: &SamplerParams, random: &mut Pcg32) {
        if self.all.len() < 2 || random.uniform() >= f64::from(p.xtc_probability) {
            return;
        }
        self.sort_all();
        let bound = f64::from(p.xtc_threshold) * self.weigh();
        let likely = self.p.iter().take_while(|p| **p >= bound).count();
        let drop = likely.saturating_sub(1);
        if drop > 0 && self.all.len() - drop >= p.min_keep {
            self.all.drain(..drop);
        }
    }

    /// Divides the logits by the temperature: fixed, or between temperature - range and temperature + range by the
    /// entropy relative to its maximum (the "dynamic temperature" of kalomaze, koboldcpp).
    pub fn temperature(&mut self, p: &SamplerParams) {
        let (mut t, range) = (f64::from(p.temperature), f64::from(p.dynatemp_range));
        if range > 0.0 {
            if self.all.len() < 2 {
                return;
            }
            let sum = self.weigh();
            let surprise = |w: f64| if w > 0.0 { w / sum * libm::log(sum / w) } else { 0.0 };
            let entropy: f64 = self.p.iter().map(|w| surprise(*w)).sum();
            let (low, high) = ((t - range).max(0.0), t + range);
            let share = (entropy / libm::log(self.all.len() as f64)).clamp(0.0, 1.0);
            t = low + (high - low) * libm::pow(share, f64::from(p.dynatemp_exponent));
        }
        if t <= 0.0 {
            return self.top_k(1);
        }
        // Divides distances to the best, not the logits: with a tiny temperature the best stays finite.
        let max = self.max();
        for c in &mut self.all {
            c.logit = (c.logit - max) / t;
        }
        self.all.retain(|c| c.logit > f64::NEG_INFINITY);
    }

    /// Keeps candidates whose surprise in bits is at most `mu`, and in any case the best. The candidates are best
    /// first.
    pub fn keep_surprise_below(&mut self, mu: f64) {
        let log_sum = libm::log2(self.weigh());
        let keep = self.p.iter().take_while(|w| log_sum - libm::log2(**w) <= mu).count();
        self.all.truncate(keep.max(1));
    }

    /// Draws a token by probability; returns it with its probability.
    pub fn draw(&mut self, random: &mut Pcg32) -> (u32, f64) {
        let sum = self.weigh();
        let target = random.uniform() * sum;
        let mut run = 0.0;
        let mut at = 0;
        for (i, w) in self.p.iter().enumerate() {
            if *w > 0.0 {
                run += w;
                at = i;
                if run > target {
                    break;
                }
            }
        }
        (self.all[at].id, self.p[at] / sum)
    }
}
