//! WordPiece (BERT): what it makes of a text before it is cut, how that is cut into words, and words into the longest
//! pieces that are tokens. After `BertNormalizer`, `BertPreTokenizer` and `WordPiece` of Hugging Face's library.

use std::ops::RangeInclusive;

use regex_syntax::hir::{Class, Hir, HirKind};
use unicode_normalization::UnicodeNormalization;

use super::vocab::Vocab;

/// Most characters of a word where a file does not say; longer ones are unknown.
pub const MAX_CHARS: usize = 100;
/// Most that a file may say: cutting a word costs its square.
pub const MAX_MAX_CHARS: usize = 1000;

/// Blocks whose characters are words each, as the original code lists them.
#[rustfmt::skip]
const CJK: &[RangeInclusive<char>] = &[
    '\u{3400}'..='\u{4dbf}', '\u{4e00}'..='\u{9fff}', '\u{f900}'..='\u{faff}', '\u{20000}'..='\u{2a6df}',
    '\u{2a700}'..='\u{2b81f}', '\u{2b920}'..='\u{2ceaf}', '\u{2f800}'..='\u{2fa1f}',
];

/// Characters of some general categories, as ranges in order: those of Unicode 8, which the original code knows.
struct Chars(Vec<(char, char)>);

impl Chars {
    fn of(categories: &str) -> Chars {
        let parsed = regex_syntax::parse(&format!("[[{categories}]&&\\p{{age=8.0}}]"));
        let Ok(HirKind::Class(Class::Unicode(class))) = parsed.map(Hir::into_kind) else { return Chars(Vec::new()) };
        Chars(class.ranges().iter().map(|range| (range.start(), range.end())).collect())
    }

    fn contains(&self, c: char) -> bool {
        let at = self.0.partition_point(|&(_, last)| last < c);
        self.0.get(at).is_some_and(|&(first, _)| first <= c)
    }
}

/// What becomes of a text before it is cut.
pub struct Cleaner {
    /// Control characters are left out, blanks become spaces.
    cleans: bool,
    /// Spaces around Chinese characters.
    parts_cjk: bool,
    /// Accents are left out.
    strips_accents: bool,
    lowercases: bool,
    controls: Chars,
    marks: Chars,
}

impl Cleaner {
    /// `BertNormalizer` with its four settings.
    pub fn new(cleans: bool, parts_cjk: bool, strips_accents: bool, lowercases: bool) -> Cleaner {
        let (controls, marks) = (Chars::of(r"\p{Cc}\p{Cf}\p{Co}"), Chars::of(r"\p{Mn}"));
        Cleaner { cleans, parts_cjk, strips_accents, lowercases, controls, marks }
    }

    /// Returns the changed text.
    pub fn apply(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        for c in text.chars() {
            let is_blank = matches!(c, '\t' | '\n' | '\r');
            if self.cleans && !is_blank && (c == '\u{fffd}' || self.controls.contains(c)) {
                continue;
            }
            match c {
                _ if self.cleans && c.is_whitespace() => out.push(' '),
                _ if self.parts_cjk && CJK.iter().any(|range| range.contains(&c)) => out.extend([' ', c, ' ']),
                _ => out.push(c),
            }
        }
        if self.strips_accents {
            out = out.nfd().filter(|&c| !self.marks.contains(c)).collect();
        }
        match self.lowercases {
            true => out.chars().flat_map(char::to_lowercase).collect(),
            false => out,
        }
    }
}

/// How words become tokens.
pub struct WordPiece {
    /// In front of a token that begins a word, and of one that continues it.
    marks: [&'static str; 2],
    unknown: u32,
    max_chars: usize,
    punctuation: Chars,
}

impl WordPiece {
    /// A word of more than `max_chars` characters, or with a part that no token covers, becomes `unknown`.
    pub fn new(marks: [&'static str; 2], unknown: u32, max_chars: usize) -> WordPiece {
        WordPiece { marks, unknown, max_chars, punctuation: Chars::of(r"\p{P}") }
    }

    /// Appends the tokens of a text.
    pub fn encode(&self, vocab: &Vocab, text: &str, out: &mut Vec<u32>) {
        let is_mark = |c: char| c.is_ascii_punctuation() || !c.is_ascii() && self.punctuation.contains(c);
        let mut piece = String::new();
        for word in text.split_whitespace() {
            let mut rest = word;
            while let Some(c) = rest.chars().next() {
                let end = if is_mark(c) { c.len_utf8() } else { rest.find(is_mark).unwrap_or(rest.len()) };
                let (word, after) = rest.split_at(end);
                self.cut(vocab, word, &mut piece, out);
                rest = after;
            }
        }
    }

    /// Cuts a word, the longest token first.
    fn cut(&self, vocab: &Vocab, word: &str, piece: &mut String, out: &mut Vec<u32>) {
        let n_before = out.len();
        let mut rest = word;
        let mut mark = self.marks[0];
        if word.chars().nth(self.max_chars).is_some() {
            return out.push(self.unknown);
        }
        while !rest.is_empty() {
            piece.clear();
            piece.push_str(mark);
            piece.push_str(&rest[..rest.floor_char_boundary(vocab.max_len().min(rest.len()))]);
            let id = loop {
                if piece.len() == mark.len() {
                    break None;
                }
                match vocab.id(piece.as_bytes()) {
                    Some(id) => break Some(id),
                    None => piece.pop(),
                };
            };
            let Some(id) = id else {
                out.truncate(n_before);
                return out.push(self.unknown);
            };
            out.push(id);
            rest = &rest[piece.len() - mark.len()..];
            mark = self.marks[1];
        }
    }
}
