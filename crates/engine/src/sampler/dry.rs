//! The DRY penalty (p-e-w, github.com/oobabooga/text-generation-webui/pull/5677): a token that would extend a
//! repetition of n tokens loses multiplier * base^(n - allowed_length).

use super::SamplerParams;
use super::stages::Candidates;

/// Breakers by their first token, and reused buffers.
#[derive(Debug, Clone, Default)]
pub struct Dry {
    /// Sorted; no empty ones.
    breakers: Vec<Vec<u32>>,
    /// The window, newest first.
    recent: Vec<u32>,
    /// `repeats[i]`: number of tokens before position i (newest first) that equal the newest tokens.
    repeats: Vec<usize>,
    /// Token and the longest repetition it would extend.
    longest: Vec<(u32, usize)>,
}

impl Dry {
    /// Returns a penalty with these breakers.
    pub fn new(breakers: &[Vec<u32>]) -> Dry {
        let mut breakers: Vec<_> = breakers.iter().filter(|b| !b.is_empty()).cloned().collect();
        breakers.sort();
        Dry { breakers, ..Dry::default() }
    }

    /// Lowers the logits of tokens that would extend a repetition at the end of `window` (oldest first).
    pub fn apply(&mut self, c: &mut Candidates, p: &SamplerParams, window: &[u32]) {
        let allowed = p.dry_allowed_length;
        if window.len() <= allowed {
            return;
        }
        self.recent.clear();
        self.recent.extend(window.iter().rev());
        let limit = self.since_breaker();
        if limit < allowed {
            return;
        }
        self.count_repeats();
        self.longest.clear();
        for i in 1..self.recent.len() {
            let n = self.repeats[i].min(limit);
            let token = self.recent[i - 1];
            if n >= allowed && !self.is_breaker(token) {
                self.longest.push((token, n));
            }
        }
        // The first entry of each token is its longest, and is kept.
        self.longest.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(&a.1)));
        self.longest.dedup_by_key(|l| l.0);

        let base = f64::from(p.dry_base);
        // Limited to the range of f32, so that the penalty stays finite.
        let max_exponent =
            if base > 1.000_001 { (libm::log(f64::from(f32::MAX)) / libm::log(base)) as usize } else { usize::MAX };
        c.change(&self.longest, |logit, n| {
            let exponent = (n - allowed).min(max_exponent);
            logit - f64::from(p.dry_multiplier) * libm::pow(base, exponent as f64)
        });
    }

    /// Number of tokens since the last complete breaker: the maximum length of a repetition.
    fn since_breaker(&self) -> usize {
        for (i, token) in self.recent.iter().enumerate() {
            let from = self.breakers.partition_point(|b| b[0] < *token);
            let longest = self.breakers[from..]
                .iter()
                .take_while(|b| b[0] == *token)
                .map(|b| &b[1..])
                .filter(|tail| tail.len() <= i && tail.iter().enumerate().all(|(n, t)| self.recent[i - 1 - n] == *t))
                .map(<[u32]>::len)
                .max();
            if let Some(tail) = longest {
                return i - tail;
            }
        }
        self.recent.len()
    }

    fn is_breaker(&self, token: u32) -> bool {
        self.breakers.iter().any(|b| b[..] == [token])
    }

    /// The Z function of the reversed window (Gusfield, "Algorithms on Strings, Trees, and Sequences", 1997, ch. 1).
    fn count_repeats(&mut self) {
        let (s, z) = (&self.recent, &mut self.repeats);
        z.clear();
        z.resize(s.len(), 0);
        let (mut left, mut right) = (0, 0); // the match that reaches furthest, [left, right)
        for i in 1..s.len() {
            let mut n = if i < right { z[i - left].min(right - i) } else { 0 };
            while i + n < s.len() && s[n] == s[i + n] {
                n += 1;
            }
            z[i] = n;
            if i + n > right {
                (left, right) = (i, i + n);
            }
        }
    }
}
