//! Patterns that files bring along, run a byte at a time, so that what they read is counted. Knows nothing of words or
//! tokens.
//!
//! A search may read far beyond the match that it settles on: `a*b|a` reads a run of `a` to its end, once for each of
//! them. Patterns in use read a few bytes too many. So each text has an allowance for what is read beyond matches, some
//! times its length; once that is used up, a search looks [`LOOKAHEAD`] bytes beyond its last match and no further, and
//! the whole stays linear in the text whatever the pattern.

use std::sync::{Mutex, PoisonError};

use regex_automata::hybrid::dfa::{Cache, DFA};
use regex_automata::nfa::thompson;
use regex_automata::util::syntax;
use regex_automata::{Anchored, Input, MatchKind};

/// Bytes that may be read beyond matches, for each byte of a text.
const ALLOWANCE: usize = 8;
/// The same for a text of any length.
const SPARE: usize = 256;
/// What a search may read beyond its last match when the allowance is used up, in bytes.
const LOOKAHEAD: usize = 64;
/// Largest pattern when compiled, in bytes; the largest in use takes a third.
const MAX_COMPILED: usize = 2 << 20;
/// States of a search that are kept for the next one.
const MAX_CACHES: usize = 4;

/// One or more patterns; of those that match at a place the first one wins.
pub struct Stepper {
    dfa: Box<DFA>,
    caches: Mutex<Vec<Cache>>,
}

/// A match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    pub start: usize,
    pub end: usize,
    /// Which pattern.
    pub pattern: usize,
}

/// A search through one text.
pub struct Scan<'s> {
    stepper: &'s Stepper,
    cache: Option<Box<Cache>>,
    allowance: usize,
    /// Bytes read.
    pub steps: usize,
}

impl Stepper {
    /// Compiles patterns in the `regex` crate's syntax, in which `^` and `$` are those of lines; `Err` says what is
    /// wrong.
    pub fn new(patterns: &[&str]) -> Result<Self, String> {
        let config = DFA::config().match_kind(MatchKind::LeftmostFirst).skip_cache_capacity_check(true);
        let dfa = DFA::builder()
            .configure(config)
            .syntax(syntax::Config::new().multi_line(true))
            .thompson(thompson::Config::new().nfa_size_limit(Some(MAX_COMPILED)))
            .build_many(patterns);
        let dfa = dfa.map_err(|error| {
            let mut innermost: &dyn std::error::Error = &error;
            while let Some(source) = innermost.source() {
                innermost = source;
            }
            // The last line says what is wrong, those before it draw where.
            innermost.to_string().lines().last().unwrap_or_default().trim_start_matches("error: ").to_string()
        })?;
        Ok(Self { dfa: Box::new(dfa), caches: Mutex::default() })
    }

    /// Returns a search through a text of this length.
    pub fn scan(&self, bytes: usize) -> Scan<'_> {
        let kept = self.caches.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let cache = Some(Box::new(kept.unwrap_or_else(|| self.dfa.create_cache())));
        Scan { stepper: self, cache, allowance: ALLOWANCE.saturating_mul(bytes).saturating_add(SPARE), steps: 0 }
    }

    /// Returns how many patterns there are.
    pub fn n_patterns(&self) -> usize {
        self.dfa.pattern_len()
    }

    /// Returns the text with every match as `to`.
    pub fn replace(&self, text: &str, to: &str) -> Option<String> {
        let mut scan = self.scan(text.len());
        let (mut out, mut done, mut from, mut last) = (String::new(), 0, 0, None);
        let mut any = false;
        while let Some(Found { start, end, .. }) = scan.find(text, from) {
            // An empty match right behind another one is none.
            if !(start == end && last == Some(end)) {
                any = true;
                out.push_str(&text[done..start]);
                out.push_str(to);
                (done, last) = (end, Some(end));
            }
            from = match end > start {
                true => end,
                false => match text[end..].chars().next() {
                    Some(c) => end + c.len_utf8(),
                    None => break,
                },
            };
        }
        out.push_str(&text[done..]);
        any.then_some(out)
    }

    /// Returns whether an empty text matches; a pattern that may match nothing elsewhere does so here.
    pub fn matches_nothing(&self) -> bool {
        self.scan(0).find("", 0).is_some()
    }
}

impl Scan<'_> {
    /// Returns the leftmost match that starts at `from` or after it; `from` is a character's boundary.
    pub fn find(&mut self, text: &str, from: usize) -> Option<Found> {
        let mut at = from;
        loop {
            if let Some(found) = self.at(text, at) {
                return Some(found);
            }
            at += text[at..].chars().next()?.len_utf8();
        }
    }

    /// Returns the match that starts at `at`.
    fn at(&mut self, text: &str, at: usize) -> Option<Found> {
        let (dfa, cache) = (&self.stepper.dfa, self.cache.as_deref_mut()?);
        let bytes = text.as_bytes();
        let input = Input::new(text).span(at..bytes.len()).anchored(Anchored::Yes);
        let mut state = dfa.start_state_forward(cache, &input).ok()?;
        let mut found: Option<Found> = None;
        let (mut i, mut settled) = (at, at); // what is read up to now, and up to the last match
        loop {
            // A match shows a byte late.
            state = match bytes.get(i) {
                Some(&byte) => dfa.next_state(cache, state, byte).ok()?,
                None => dfa.next_eoi_state(cache, state).ok()?,
            };
            if state.is_tagged() {
                if state.is_match() {
                    found = Some(Found { start: at, end: i, pattern: dfa.match_pattern(cache, state, 0).as_usize() });
                    settled = i;
                } else if state.is_dead() || state.is_quit() {
                    break;
                }
            }
            if i >= bytes.len() || (i - settled >= LOOKAHEAD && i - settled >= self.allowance) {
                break;
            }
            i += 1;
        }
        self.steps += i + 1 - at;
        self.allowance = self.allowance.saturating_sub(i - settled);
        found
    }
}

impl Drop for Scan<'_> {
    fn drop(&mut self) {
        let mut caches = self.stepper.caches.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cache) = self.cache.take().filter(|_| caches.len() < MAX_CACHES) {
            caches.push(*cache);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(pattern: &str, text: &str) -> (Vec<(usize, usize)>, usize) {
        let stepper = Stepper::new(&[pattern]).unwrap();
        let mut scan = stepper.scan(text.len());
        let (mut found, mut at) = (Vec::new(), 0);
        while let Some(one) = scan.find(text, at) {
            found.push((one.start, one.end));
            at = one.end + usize::from(one.end == one.start);
            if at > text.len() {
                break;
            }
        }
        (found, scan.steps)
    }

    #[test]
    fn matches_are_those_of_the_regex_crate() {
        let texts = ["", "a", "aab aab", "x1y22 z333", "  a  \n\n b\r\n", "aaaaaaab", "ZaZ bZ", "日本 é1"];
        let patterns = [
            "a*b|a",
            "[^Z]*Z|.",
            r"\p{N}{1,3}",
            r"\s+$|\s+",
            r"^\w+",
            "(?i:'s|A+)",
            "aa|a",
            "a|aa",
            r" ?\p{L}+| ?\p{N}+|\s+",
            r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
        ];
        for pattern in patterns {
            let regex = regex::RegexBuilder::new(pattern).multi_line(true).build().unwrap();
            for text in texts {
                let expected: Vec<_> = regex.find_iter(text).map(|m| (m.start(), m.end())).collect();
                assert_eq!(all(pattern, text).0, expected, "{pattern} in {text:?}");
            }
        }
    }

    #[test]
    fn what_is_read_is_linear_in_the_text() {
        let patterns = [
            "a*b|a",
            "[^Z]*Z|.",
            "(?:a{1000}){10}|a",
            ".*.*.*=|a",
            "(?:a|aa)*b|a",
            r"\p{L}*\d|\p{L}",
            "a{1,500}b|a",
            "a*",
        ];
        for pattern in patterns {
            for n in [1 << 12, 1 << 16, 1 << 20] {
                let (_, steps) = all(pattern, &"a".repeat(n));
                let most = (ALLOWANCE + LOOKAHEAD + 3) * n + SPARE + 100_000;
                assert!(steps <= most, "{pattern}: {steps} steps for {n} bytes");
            }
        }
        // Patterns in use read each byte about twice.
        let text = "The quick brown fox, 1234567890 times;\n\n   jumped.  ".repeat(1000);
        let (_, steps) = all(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+", &text);
        assert!(steps < 3 * text.len(), "{steps} for {}", text.len());
    }

    #[test]
    fn large_patterns_are_refused() {
        for pattern in [r"\p{L}{500}", r"(\p{L}{40}){40}"] {
            assert!(Stepper::new(&[pattern]).err().unwrap().contains("limit"), "{pattern}");
        }
    }
}
