//! Finding the strings of control and user-defined tokens in a text.
//!
//! For GGUF files a longer string wins over a shorter one wherever they overlap, even one that starts earlier: that is
//! llama.cpp's order and the files are made for it. For `tokenizer.json` the leftmost wins, and of those the longest,
//! as in Hugging Face's tokenizers. Knows nothing of what becomes of the text between.

use std::collections::BTreeMap;
use std::ops::Range;

use aho_corasick::{AhoCorasick, BuildError, Input, MatchKind};

use super::Error;
use super::vocab::{TokenKind, Vocab, show};

/// Longest string that is looked for, in bytes; those in use have some thirty. It bounds what is read for each byte of
/// a text.
const MAX_BYTES: usize = 256;

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

/// The special strings of a vocabulary.
pub struct Specials {
    list: Vec<Special>,
    order: Order,
    /// For all of them, and for those that are looked for in any text.
    all: Search,
    user_defined: Search,
}

/// The automata that find some of the strings.
#[derive(Default)]
struct Search {
    which: Vec<usize>, // places in `list`, in the order of the automaton's patterns
    any: Option<AhoCorasick>,
    /// Where a longer string wins, those of each length, longest first.
    by_length: Vec<Class>,
}

/// The strings of one length.
struct Class {
    which: Vec<usize>, // places in `list`
    automaton: AhoCorasick,
}

impl Specials {
    /// Control, unknown and user-defined tokens, and `also`, which is looked for as if it were a control token;
    /// `strips_right` tells which swallow the blanks after them.
    pub fn new(vocab: &Vocab, also: Option<u32>, strips_right: impl Fn(&[u8]) -> bool) -> Result<Self, Error> {
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
    pub fn leftmost(specials: Vec<Special>) -> Result<Self, Error> {
        Self::of(specials, Order::Leftmost)
    }

    fn of(list: Vec<Special>, order: Order) -> Result<Self, Error> {
        if let Some(special) = list.iter().find(|s| s.text.len() > MAX_BYTES) {
            return Err(Error::Special { id: special.id, token: show(&special.text), bytes: special.text.len() });
        }
        let search = |wanted: &dyn Fn(&Special) -> bool| {
            let which = list.iter().enumerate().filter(|(_, special)| wanted(special)).map(|(i, _)| i).collect();
            Search::new(&list, which, order).map_err(Error::Specials)
        };
        let (all, user_defined) = (search(&|_| true)?, search(&|special| special.user_defined)?);
        Ok(Self { list, order, all, user_defined })
    }

    /// Returns whether a string may swallow what follows or precedes it.
    pub fn strips(&self) -> bool {
        self.list.iter().any(|special| special.strips_left || special.strips_right)
    }

    /// Cuts a text at its special strings; `parse` takes control tokens for what they are, too.
    pub fn partition(&self, text: &str, parse: bool) -> Vec<Part> {
        let search = if parse { &self.all } else { &self.user_defined };
        match (&search.any, self.order) {
            _ if text.is_empty() => Vec::new(),
            (None, _) => vec![Part::Text(0..text.len())],
            (Some(any), Order::Leftmost) => self.leftmost_parts(text, &search.which, any),
            (Some(any), Order::Longest) => self.longest_parts(text, search, any),
        }
    }

    /// Returns the parts where longer strings are cut out before shorter ones, and of equally long ones those of lower
    /// ids.
    fn longest_parts(&self, text: &str, search: &Search, any: &AhoCorasick) -> Vec<Part> {
        let mut lengths = [false; MAX_BYTES + 1];
        any.find_overlapping_iter(text).for_each(|found| lengths[found.len()] = true);
        let mut parts = vec![Part::Text(0..text.len())];
        for class in &search.by_length {
            let special = |i: usize| &self.list[class.which[i]];
            if !class.which.first().is_some_and(|&i| lengths[self.list[i].text.len()]) {
                continue;
            }
            let mut cut = Vec::with_capacity(parts.len());
            for part in parts {
                let Part::Text(range) = part else {
                    cut.push(part);
                    continue;
                };
                let found = class.automaton.find_overlapping_iter(&text[range.clone()]);
                let mut found: Vec<(usize, usize)> =
                    found.map(|found| (range.start + found.start(), found.pattern().as_usize())).collect();
                self.keep_apart(&mut found, class);
                let mut rest = range;
                for (at, i) in found {
                    // Blanks that a string swallowed may hold the beginning of the next.
                    if at > rest.start {
                        cut.push(Part::Text(rest.start..at));
                    }
                    cut.push(Part::Token(special(i).id));
                    rest.start = rest.start.max(at + special(i).text.len());
                    if special(i).strips_right {
                        let blank = |b: &u8| b.is_ascii_whitespace() || *b == 0x0B;
                        rest.start += text.as_bytes()[rest.clone()].iter().take_while(|b| blank(b)).count();
                    }
                }
                if !rest.is_empty() {
                    cut.push(Part::Text(rest));
                }
            }
            parts = cut;
        }
        parts
    }

    /// Of places of equally long strings, in rising order, those that stand apart: lower ids first, then from the left.
    fn keep_apart(&self, found: &mut Vec<(usize, usize)>, class: &Class) {
        let bytes = class.which.first().map_or(0, |&i| self.list[i].text.len());
        let overlap = |a: (usize, usize), b: (usize, usize)| b.0 < a.0 + bytes;
        if !found.windows(2).any(|pair| overlap(pair[0], pair[1])) {
            return;
        }
        let mut order: Vec<usize> = (0..found.len()).collect();
        order.sort_by_key(|&i| (self.list[class.which[found[i].1]].id, i));
        let mut state = vec![None; found.len()]; // kept, dropped, or not decided
        for i in order {
            if state[i].is_some() {
                continue;
            }
            state[i] = Some(true);
            let behind = (i + 1..found.len()).take_while(|&j| overlap(found[i], found[j]));
            let before = (0..i).rev().take_while(|&j| overlap(found[j], found[i]));
            for j in behind.chain(before) {
                state[j] = Some(false);
            }
        }
        let mut kept = state.into_iter();
        found.retain(|_| kept.next().flatten() == Some(true));
    }

    /// Returns the parts where the leftmost string wins, and of those that start there the longest.
    fn leftmost_parts(&self, text: &str, which: &[usize], any: &AhoCorasick) -> Vec<Part> {
        let (mut parts, mut done, mut at) = (Vec::new(), 0, 0);
        while let Some(found) = any.find(Input::new(text).span(at..text.len())) {
            let special = &self.list[which[found.pattern().as_usize()]];
            let (mut start, mut end) = (found.start(), found.end());
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
}

impl Search {
    fn new(list: &[Special], which: Vec<usize>, order: Order) -> Result<Self, BuildError> {
        if which.is_empty() {
            return Ok(Self::default());
        }
        let automaton = |which: &[usize], kind: MatchKind| {
            AhoCorasick::builder().match_kind(kind).build(which.iter().map(|&i| &list[i].text))
        };
        if order == Order::Leftmost {
            let any = Some(automaton(&which, MatchKind::LeftmostLongest)?);
            return Ok(Self { which, any, by_length: Vec::new() });
        }
        let any = Some(automaton(&which, MatchKind::Standard)?);
        let mut classes: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        which.iter().for_each(|&i| classes.entry(list[i].text.len()).or_default().push(i));
        let class = |which: Vec<usize>| Ok(Class { automaton: automaton(&which, MatchKind::Standard)?, which });
        let by_length = classes.into_values().rev().map(class).collect::<Result<_, BuildError>>()?;
        Ok(Self { which, any, by_length })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cuts out one string after the other, longest first, as llama.cpp does: the order in other words.
    fn one_after_the_other(list: &[Special], text: &str, parse: bool) -> Vec<Part> {
        let mut sorted: Vec<&Special> = list.iter().filter(|s| parse || s.user_defined).collect();
        sorted.sort_by_key(|s| (std::cmp::Reverse(s.text.len()), s.id));
        let mut parts = vec![Part::Text(0..text.len())];
        for special in sorted {
            let pattern = str::from_utf8(&special.text).unwrap();
            let mut cut = Vec::new();
            for part in parts {
                let Part::Text(mut rest) = part else {
                    cut.push(part);
                    continue;
                };
                let from = rest.start;
                for (at, _) in text[rest.clone()].match_indices(pattern) {
                    if from + at > rest.start {
                        cut.push(Part::Text(rest.start..from + at));
                    }
                    cut.push(Part::Token(special.id));
                    rest.start = from + at + pattern.len();
                    if special.strips_right {
                        rest.start += text[rest.clone()].bytes().take_while(u8::is_ascii_whitespace).count();
                    }
                }
                if !rest.is_empty() {
                    cut.push(Part::Text(rest));
                }
            }
            parts = cut;
        }
        parts
    }

    #[test]
    fn longer_strings_win_as_if_cut_out_one_after_the_other() {
        let mut seed = 1u64;
        let mut random = |n: u64| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) % n
        };
        for round in 0..3000 {
            let mut word =
                |most: u64| -> String { (0..1 + random(most)).map(|_| ["a", "b", "é"][random(3) as usize]).collect() };
            let mut texts: Vec<String> = (0..1 + round % 9).map(|_| word(5)).collect();
            texts.sort();
            texts.dedup();
            let text: String = (0..4).map(|i| if i % 2 == 1 { word(30) } else { word(9) + " " }).collect();
            let special = |(id, text): (usize, &String)| Special {
                id: (id as u32 * 7) % 11,
                text: text.clone().into_bytes(),
                user_defined: id % 2 == 0,
                strips_right: id % 3 == 0,
                ..Special::default()
            };
            let list: Vec<Special> = texts.iter().enumerate().map(special).collect();
            let specials = Specials::of(list.clone(), Order::Longest).unwrap();
            for parse in [false, true] {
                let expected = if list.is_empty() { Vec::new() } else { one_after_the_other(&list, &text, parse) };
                assert_eq!(specials.partition(&text, parse), expected, "{texts:?} in {text:?}");
            }
        }
    }

    /// What took hours: one long string of which the text is made but for its end, and thousands that all occur.
    #[test]
    fn many_and_long_strings_are_found_in_one_pass() {
        let special =
            |(id, text): (usize, String)| Special { id: id as u32, text: text.into_bytes(), ..Special::default() };
        let long = Special { id: 0, text: format!("{}b", "a".repeat(200_000)).into_bytes(), ..Special::default() };
        assert!(matches!(Specials::leftmost(vec![long.clone()]), Err(Error::Special { bytes: 200_001, .. })));
        assert!(Specials::of(vec![long], Order::Longest).is_err());
        let many: Vec<String> = (0..60_000).map(|i| format!("<|{i}|>")).collect();
        let text = many.concat();
        for order in [Order::Longest, Order::Leftmost] {
            let specials = Specials::of(many.iter().cloned().enumerate().map(special).collect(), order).unwrap();
            assert!(specials.partition(&text, true).iter().zip(0..).all(|(part, id)| *part == Part::Token(id)));
        }
        let nested: Vec<String> = (1..=MAX_BYTES).map(|n| "a".repeat(n)).collect();
        let specials = Specials::of(nested.into_iter().enumerate().map(special).collect(), Order::Longest).unwrap();
        assert_eq!(specials.partition(&"a".repeat(100 * MAX_BYTES), true).len(), 100);
    }
}
