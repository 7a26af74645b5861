//! Drafts: guesses of the tokens that follow, which the model checks several at a time.
//!
//! A drafter knows tokens alone. What it guesses decides how many steps an answer takes, and never what the answer is.

/// Guesses how texts continue.
pub trait Drafter: Send {
    /// Appends up to `max` tokens that may follow `tokens`, a prompt and its answer up to now, to `out`; none where it
    /// has no guess. Tokens past `max`, and those from the first that is outside the vocabulary, are ignored.
    fn draft(&mut self, tokens: &[u32], max: usize, out: &mut Vec<u32>);
}

/// Drafts what followed the last time that the text's last tokens stood in it (Saxena, "Prompt Lookup Decoding", 2023):
/// for answers that repeat their prompts, as edited code and summaries do. It needs no model and keeps nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptLookup {
    /// Least number of last tokens that must have matched there.
    pub min: usize,
    /// Number of last tokens beyond which a longer match is no better.
    pub max: usize,
    /// Number of tokens before the end that are searched.
    pub reach: usize,
}

impl Default for PromptLookup {
    fn default() -> PromptLookup {
        PromptLookup { min: 3, max: 8, reach: 16 << 10 }
    }
}

impl Drafter for PromptLookup {
    fn draft(&mut self, tokens: &[u32], max: usize, out: &mut Vec<u32>) {
        let n = tokens.len();
        // The longest match, and of equals the latest: its length and its end.
        let mut best = (0, 0);
        for end in (n.saturating_sub(self.reach).max(1)..n).rev() {
            let pairs = tokens[..end].iter().rev().zip(tokens.iter().rev());
            let len = pairs.take(self.max).take_while(|(a, b)| a == b).count();
            if len > best.0 {
                best = (len, end);
            }
            if len == self.max {
                break;
            }
        }
        if best.0 >= self.min.max(1) {
            // What follows may run into the draft itself: a text that repeats its last tokens continues to.
            out.extend(tokens[best.1..].iter().cycle().take(max));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_and_latest_match_is_drafted() {
        let cases: &[(&[u32], usize, &[u32])] = &[
            (&[], 4, &[]),
            (&[1], 4, &[]),
            (&[1, 2, 3, 9, 1, 2], 4, &[3, 9, 1, 2]),
            (&[1, 2, 3, 9, 1, 2], 2, &[3, 9]),
            // One token is no match.
            (&[1, 2, 3, 9, 2], 4, &[]),
            // The latest of equals.
            (&[1, 2, 5, 0, 1, 2, 6, 0, 7, 1, 2], 1, &[6]),
            // A longer match counts more than a later one, up to three tokens.
            (&[4, 1, 2, 5, 0, 1, 2, 6, 4, 1, 2], 1, &[5]),
            (&[3, 4, 1, 2, 5, 0, 4, 1, 2, 6, 3, 4, 1, 2], 1, &[6]),
            // A run continues.
            (&[8, 8, 8], 3, &[8, 8, 8]),
            (&[7, 8, 7, 8, 7], 3, &[8, 7, 8]),
            // Out of reach.
            (&[1, 2, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2], 1, &[]),
        ];
        for &(tokens, max, expected) in cases {
            let mut out = Vec::new();
            PromptLookup { min: 2, max: 3, reach: 12 }.draft(tokens, max, &mut out);
            assert_eq!(out, expected, "{tokens:?}");
        }
    }
}
