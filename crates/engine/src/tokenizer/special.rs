//! Finding the strings of control and user-defined tokens in a text.
//!
//! For GGUF files a longer string wins over a shorter one wherever they overlap, even one that starts earlier: that is
//! llama.cpp's order and the files are made for it. For `tokenizer.json` the leftmost wins, and of those the longest, as in
//! Hugging Face's tokenizers. Knows nothing of what becomes of the text between.

use std::ops::Range;

use super::vocab::{TokenKind, Vocab};

/// A part of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Bytes of the text that hold no special string.
    Text(Range<usize>),
    /// A special string, as its token.
    Token(u32),
}

/// A token that is looked for.
#[derive(Clone, Debug, Default)]
pub struct Special {
    pub id: u32,
    /// UTF-8, and not empty.
    pub text: Vec<u8>,
    /// Looked for even where special strings are plain text.
    pub user_defined: bool,
    /// Swallows the blanks that follow.
    pub strips_right: bool,
    /// Swallows the blanks before it. Where the leftmost wins only, as is the next.
    pub strips_left: bool,
    /// Is none where a letter, a digit or `_` stands beside it.
    pub single_word: bool,
}

/// Which string wins where they overlap.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Longest,
    Leftmost,
}

/// The special strings of a vocabulary, sorted by text.
pub struct Specials {
    sorted: Vec<Special>,
    first: Box<[bool; 256]>, // whether a string starts with this byte
    order: Order,
}

impl Specials {
    /// Control, unknown and user-defined tokens, and `also`, which is looked for as if it were a control token;
    /// `strips_right` tells which swallow the blanks after them.
    pub fn new(vocab: &Vocab, also: Option<u32>, strips_right: impl Fn(&[u8]) -> bool) -> Self {
        let mut sorted = Vec::new();
        for id in 0..vocab.len() as u32 {
            let user_defined = match vocab.kind(id) {
                Some(TokenKind::UserDefined) => true,
                Some(TokenKind::Control | TokenKind::Unknown) => false,
                _ if also == Some(id) => false,
                _ => continue,
            };
            // A string that is no text can stand in none.
            let Some(text) = vocab.text(id).filter(|text| str::from_utf8(text).is_ok_and(|text| !text.is_empty()))
            else {
                continue;
            };
            let strips_right = strips_right(text);
            sorted.push(Special { id, text: text.to_vec(), user_defined, strips_right, ..Special::default() });
        }
        Self::of(sorted, Order::Longest)
    }

    /// These, of which the leftmost wins.
    pub fn leftmost(specials: Vec<Special>) -> Self {
        Self::of(specials, Order::Leftmost)
    }

    fn of(mut sorted: Vec<Special>, order: Order) -> Self {
        let mut first = Box::new([false; 256]);
        sorted.iter().filter_map(|special| special.text.first()).for_each(|&byte| first[byte as usize] = true);
        sorted.sort_unstable_by(|a, b| a.text.cmp(&b.text));
        Self { sorted, first, order }
    }

    /// Cuts a text at its special strings; `parse` takes control tokens for what they are, too.
    pub fn partition(&self, text: &str, parse: bool) -> Vec<Part> {
        let mut parts = Vec::new();
        if text.is_empty() {
            return parts;
        }
        if self.order == Order::Leftmost {
            return self.leftmost_parts(text, parse);
        }
        parts.push(Part::Text(0..text.len()));
        for special in self.present(text, parse) {
            let cut = parts.into_iter().flat_map(|part| match part {
                Part::Text(range) => special.cut(text, range),
                token => vec![token],
            });
            parts = cut.collect();
        }
        parts
    }

    /// Calls `each` with the places of the strings that a text begins with, shortest first.
    fn at(&self, text: &[u8], mut each: impl FnMut(usize)) {
        // The strings that share the first `depth` bytes with the text stand side by side.
        let mut range = 0..self.sorted.len();
        for (depth, &byte) in text.iter().enumerate() {
            let same = &self.sorted[range.clone()];
            let lo = same.partition_point(|s| s.text.get(depth) < Some(&byte));
            let hi = same.partition_point(|s| s.text.get(depth) <= Some(&byte));
            range = range.start + lo..range.start + hi;
            if range.is_empty() {
                break;
            }
            if self.sorted[range.start].text.len() == depth + 1 {
                each(range.start);
            }
        }
    }

    /// The parts where the leftmost string wins, and of those that start there the longest.
    fn leftmost_parts(&self, text: &str, parse: bool) -> Vec<Part> {
        let bytes = text.as_bytes();
        let (mut parts, mut done, mut at) = (Vec::new(), 0, 0);
        while at < bytes.len() {
            let mut longest = None;
            if self.first[bytes[at] as usize] {
                let wanted = |special: &Special| parse || special.user_defined;
                self.at(&bytes[at..], |i| longest = Some(&self.sorted[i]).filter(|s| wanted(s)).or(longest));
            }
            let Some(special) = longest else {
                at += 1;
                continue;
            };
            let (mut start, mut end) = (at, at + special.text.len());
            at = end;
            let is_word = |c: char| c.is_alphanumeric() || c == '_';
            let (before, after) = (&text[done..start], &text[end..]);
            if special.single_word
                && (text[..start].chars().next_back().is_some_and(is_word) || after.chars().next().is_some_and(is_word))
            {
                continue;
            }
            if special.strips_left {
                start = done + before.trim_end().len();
            }
            if special.strips_right {
                end = text.len() - after.trim_start().len();
                at = end;
            }
            if start > done {
                parts.push(Part::Text(done..start));
            }
            parts.push(Part::Token(special.id));
            done = end;
        }
        if done < text.len() {
            parts.push(Part::Text(done..text.len()));
        }
        parts
    }

    /// The strings that stand anywhere in the text, longest first.
    fn present(&self, text: &str, parse: bool) -> Vec<&Special> {
        let mut seen = vec![false; self.sorted.len()];
        let bytes = text.as_bytes();
        for start in (0..bytes.len()).filter(|&i| self.first[bytes[i] as usize]) {
            self.at(&bytes[start..], |i| seen[i] = true);
        }
        let mut present: Vec<_> = self.sorted.iter().zip(seen).filter(|(_, seen)| *seen).map(|(s, _)| s).collect();
        present.retain(|special| parse || special.user_defined);
        present.sort_by_key(|special| (std::cmp::Reverse(special.text.len()), special.id));
        present
    }
}

impl Special {
    /// Cuts one stretch of the text at every place where the string stands, from the left.
    fn cut(&self, text: &str, range: Range<usize>) -> Vec<Part> {
        let mut parts = Vec::new();
        let mut rest = range.clone();
        // Both are UTF-8, so a match begins and ends at character boundaries.
        let pattern = str::from_utf8(&self.text).unwrap_or_default();
        for (at, _) in text[range.clone()].match_indices(pattern) {
            let at = range.start + at;
            if at > rest.start {
                parts.push(Part::Text(rest.start..at));
            }
            parts.push(Part::Token(self.id));
            rest.start = at + pattern.len();
            if self.strips_right {
                let blank = |b: &u8| b.is_ascii_whitespace() || *b == 0x0B;
                rest.start += text.as_bytes()[rest.clone()].iter().take_while(|b| blank(b)).count();
            }
        }
        if !rest.is_empty() {
            parts.push(Part::Text(rest));
        }
        parts
    }
}
