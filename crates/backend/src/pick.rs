//! `pick`: the best logits of a row, for samplers that need no more. Devices are tested against this host version.
//!
//! It knows no sampler: the caller lists the tokens that it needs besides the best.

use std::cmp::Ordering;

use crate::{Ask, Batch};

/// Result of a row of [`Ask::Best`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Best<'a> {
    /// The best allowed tokens above minus infinity with their logits, best first, the lower id at a tie; at most as
    /// many as requested.
    pub best: &'a [(u32, f32)],
    /// The listed tokens' logits, minus infinity where the mask forbids one; `[n_listed]`.
    pub listed: &'a [f32],
    /// Logarithm of the sum of the exponentials of the whole row, forbidden tokens included; NaN unless requested.
    pub log_sum_exp: f64,
    /// The first token whose logit is NaN, or plus infinity and allowed. Then the other fields are undefined.
    pub bad: Option<(u32, f32)>,
}

/// Results of the rows of a step.
#[derive(Clone, Debug, Default)]
pub struct Picks {
    rows: Vec<Row>,
    best: Vec<(u32, f32)>,
    listed: Vec<f32>,
}

/// Where the results of a row lie.
#[derive(Clone, Copy, Debug)]
struct Row {
    row: usize,
    first_best: usize,
    n_best: usize,
    first_listed: usize,
    n_listed: usize,
    log_sum_exp: f64,
    bad: Option<(u32, f32)>,
}

impl Picks {
    /// Result of the row at this index of [`Batch::rows`]; `None` unless it is a row of [`Ask::Best`].
    pub fn get(&self, row: usize) -> Option<Best<'_>> {
        let found = &self.rows[self.rows.binary_search_by_key(&row, |found| found.row).ok()?];
        Some(Best {
            best: &self.best[found.first_best..][..found.n_best],
            listed: &self.listed[found.first_listed..][..found.n_listed],
            log_sum_exp: found.log_sum_exp,
            bad: found.bad,
        })
    }

    /// Removes all results.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.best.clear();
        self.listed.clear();
    }

    /// Adds a device's result of a row; rows come in ascending order.
    pub fn push(&mut self, row: usize, found: Best<'_>) {
        let Best { best, listed, log_sum_exp, bad } = found;
        self.rows.push(Row {
            row,
            first_best: self.best.len(),
            n_best: best.len(),
            first_listed: self.listed.len(),
            n_listed: listed.len(),
            log_sum_exp,
            bad,
        });
        self.best.extend_from_slice(best);
        self.listed.extend_from_slice(listed);
    }

    /// Picks from all rows of a checked batch, whose logits are `[R, n_vocab]`.
    pub fn fill(&mut self, batch: &Batch, logits: &[f32], n_vocab: usize) {
        self.fill_rows(batch, logits, n_vocab, |_| true);
    }

    /// Picks from some rows: those that a device has not answered.
    pub fn fill_rows(&mut self, batch: &Batch, logits: &[f32], n_vocab: usize, is_wanted: impl Fn(usize) -> bool) {
        self.clear();
        for (row, ask) in batch.asks.iter().enumerate().filter(|&(row, _)| is_wanted(row)) {
            let Ask::Best { n, first_listed, n_listed, mask, log_sum_exp } = *ask else { continue };
            let logits = &logits[row * n_vocab..][..n_vocab];
            let mask = mask.map(|mask| batch.masks.words(mask));
            let allowed = |id: u32| mask.is_none_or(|words| words[id as usize / 64] >> (id % 64) & 1 == 1);
            let (first_best, first) = (self.best.len(), self.listed.len());
            let bad = best(logits, n as usize, allowed, &mut self.best);
            if bad.is_some() {
                self.best.truncate(first_best);
            }
            let listed = &batch.listed[first_listed as usize..][..n_listed as usize];
            let logit = |&id: &u32| if allowed(id) { logits[id as usize] } else { f32::NEG_INFINITY };
            self.listed.extend(listed.iter().map(logit));
            let sum = if log_sum_exp && bad.is_none() { log_sum_exp_of(logits) } else { f64::NAN };
            self.rows.push(Row {
                row,
                first_best,
                n_best: self.best.len() - first_best,
                first_listed: first,
                n_listed: listed.len(),
                log_sum_exp: sum,
                bad,
            });
        }
    }
}

/// Best first, the lower id at a tie.
fn order(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.partial_cmp(&a.1).unwrap_or(Ordering::Equal).then(a.0.cmp(&b.0))
}

/// Appends the `n` best allowed logits of a row to `out`, and returns the first bad one.
fn best(logits: &[f32], n: usize, allowed: impl Fn(u32) -> bool, out: &mut Vec<(u32, f32)>) -> Option<(u32, f32)> {
    // Blocks are compared at memory speed by branch-free lanes; few hold anything above the bound.
    const BLOCK: usize = 512;
    let first = out.len();
    // The candidates are cut back to `n` when there are `room` of them.
    let room = (2 * n).max(n + 64);
    let mut bound = f32::NEG_INFINITY;
    for (b, block) in logits.chunks(BLOCK).enumerate() {
        let (max, is_bad) = scan(block);
        let id = |i: usize| (b * BLOCK + i) as u32;
        if is_bad {
            let found =
                |(i, &l): (usize, &f32)| (l.is_nan() || (l == f32::INFINITY && allowed(id(i)))).then(|| (id(i), l));
            if let Some(bad) = block.iter().enumerate().find_map(found) {
                return Some(bad);
            }
        }
        // Equal logits come in the order of their ids, so a later one never displaces an earlier one.
        if max <= bound {
            continue;
        }
        for (i, &l) in block.iter().enumerate() {
            if l > bound && allowed(id(i)) && l < f32::INFINITY {
                out.push((id(i), l));
                if out.len() - first == room {
                    out[first..].select_nth_unstable_by(n - 1, order);
                    out.truncate(first + n);
                    bound = out[first + n - 1].1;
                }
            }
        }
    }
    if out.len() - first > n {
        out[first..].select_nth_unstable_by(n - 1, order);
        out.truncate(first + n);
    }
    out[first..].sort_unstable_by(order);
    None
}

/// The maximum of some logits, and whether NaN or plus infinity is among them: lanes without branches, at memory speed.
pub fn scan(block: &[f32]) -> (f32, bool) {
    const LANES: usize = 16;
    let (mut max, mut bad) = ([f32::NEG_INFINITY; LANES], [false; LANES]);
    let mut take = |lane: usize, l: f32| {
        max[lane] = if l > max[lane] { l } else { max[lane] };
        // True for NaN too.
        bad[lane] |= l.partial_cmp(&f32::INFINITY) != Some(Ordering::Less);
    };
    let (chunks, rest) = block.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            take(lane, chunk[lane]);
        }
    }
    rest.iter().enumerate().for_each(|(lane, &l)| take(lane, l));
    (max.into_iter().fold(f32::NEG_INFINITY, f32::max), bad.contains(&true))
}

/// Logarithm of the sum of the exponentials of a row without NaN; the same bits on every platform.
pub fn log_sum_exp_of(logits: &[f32]) -> f64 {
    let max = logits.iter().fold(f32::NEG_INFINITY, |m, &l| if l > m { l } else { m });
    const LANES: usize = 8;
    let mut sums = [0.0f64; LANES];
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        for (sum, &l) in sums.iter_mut().zip(chunk) {
            *sum += f64::from(exp_below_zero(l - max));
        }
    }
    let tail: f64 = rest.iter().map(|&l| f64::from(exp_below_zero(l - max))).sum();
    f64::from(max) + libm::log(sums.iter().sum::<f64>() + tail)
}

/// `exp(x)` for `x <= 0` with a relative error below 3e-7, 0 below -87. Additions and multiplications only, so that the
/// compiler can use vector instructions and the bits are the same everywhere. Range reduction by multiples of ln 2
/// after Cody and Waite 1980.
fn exp_below_zero(x: f32) -> f32 {
    let clamped = if x > -87.0 { x } else { -87.0 };
    let shifted = clamped * std::f32::consts::LOG2_E + 12_582_912.0; // rounds to a whole number in the low bits
    let n = shifted - 12_582_912.0;
    let r = (clamped - n * 0.693_359_4) - n * -2.121_944_4e-4;
    let poly = 1.0 + r * (1.0 + r * (0.5 + r * (1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0))))));
    // The low bits of `shifted` are n; moved into the exponent they make 2^n.
    let scale = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x > -87.0 { poly * scale } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Tables;

    const N_VOCAB: usize = 1500;

    fn picked(logits: &[f32], ask: Ask, listed: &[u32], mask: Option<&[bool]>) -> Picks {
        let mut batch = Batch::default();
        batch.push(&[0], 0, Tables::default(), [0]);
        batch.asks[0] = ask;
        batch.listed.extend_from_slice(listed);
        if let Some(mask) = mask {
            batch.masks.push(logits.len(), |id| mask[id as usize]);
        }
        let mut picks = Picks::default();
        picks.fill(&batch, logits, logits.len());
        picks
    }

    proptest! {
        /// Compares with a sort of the whole row, with ties, infinities and masks.
        #[test]
        fn the_best_are_the_best(
            seed in prop::collection::vec(-40i32..40, 1..N_VOCAB),
            n in 1u32..200,
            masked in any::<bool>(),
            infinite in any::<bool>(),
        ) {
            let logits: Vec<f32> = seed.iter().map(|&s| match s {
                -40 if infinite => f32::NEG_INFINITY,
                s => s as f32 / 8.0,
            }).collect();
            let mask: Vec<bool> = (0..logits.len()).map(|i| i % 3 != 1).collect();
            let mask = masked.then_some(&mask[..]);
            let n = n.min(logits.len() as u32);
            let listed = [0, logits.len() as u32 - 1];
            let ask = Ask::Best { n, first_listed: 0, n_listed: 2, mask: masked.then_some(0), log_sum_exp: true };
            let picks = picked(&logits, ask, &listed, mask);
            let found = picks.get(0).unwrap();
            let allowed = |id: usize| mask.is_none_or(|mask| mask[id]);
            let mut wanted: Vec<(u32, f32)> =
                (0..logits.len()).filter(|&i| allowed(i) && logits[i] > f32::NEG_INFINITY).map(|i| (i as u32, logits[i])).collect();
            wanted.sort_by(order);
            wanted.truncate(n as usize);
            prop_assert_eq!(found.best, &wanted[..]);
            let logit = |id: u32| if allowed(id as usize) { logits[id as usize] } else { f32::NEG_INFINITY };
            prop_assert_eq!(found.listed, &listed.map(logit)[..]);
            let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
            prop_assert!((found.log_sum_exp - sum.ln()).abs() < 1e-5 || sum == 0.0);
            prop_assert_eq!(found.bad, None);
        }
    }

    #[test]
    fn bad_logits_are_named() {
        let ask = |mask| Ask::Best { n: 3, first_listed: 0, n_listed: 0, mask, log_sum_exp: false };
        let mut row = vec![0.5f32; N_VOCAB];
        (row[700], row[900]) = (f32::INFINITY, f32::NAN);
        assert_eq!(picked(&row, ask(None), &[], None).get(0).unwrap().bad, Some((700, f32::INFINITY)));
        // A forbidden infinity is ignored, NaN is not.
        let mask: Vec<bool> = (0..N_VOCAB).map(|i| i != 700 && i != 900).collect();
        let picks = picked(&row, ask(Some(0)), &[], Some(&mask));
        assert!(matches!(picks.get(0).unwrap().bad, Some((900, l)) if l.is_nan()));
        row[900] = 0.0;
        let picks = picked(&row, ask(Some(0)), &[], Some(&mask));
        assert_eq!(picks.get(0).unwrap().best, [(0, 0.5), (1, 0.5), (2, 0.5)]);
        assert!(picked(&row, Ask::Logits, &[], None).get(0).is_none());
    }
}
