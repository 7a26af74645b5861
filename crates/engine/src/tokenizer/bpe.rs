//! Byte-level BPE (`tokenizer.ggml.model` = `gpt2`) and Gemma 4's kind of it on characters (`gemma4`).
//!
//! A word starts as its bytes (characters) and pairs join in the order of the file's merges. The `tokenizers` crate
//! would do the same from a `tokenizer.json`; GGUF carries tokens and merges as arrays, so it would have to be fed
//! through JSON or maps of owned strings, several times slower than the model opens, and it has no SentencePiece
//! vocabulary without merges. This file and `merge.rs` are what is left of it.

use std::hash::{BuildHasher, Hasher, RandomState};

use super::Error;
use super::merge::{Join, Merger, NONE, words};
use super::pretokenize::{PreTokenizer, Whole};
use super::vocab::{SPREAD, Vocab, fold, show};

/// What the smallest units of a word are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Units {
    /// Bytes, each written as the character that GPT-2 gave it.
    Bytes,
    /// Characters, with `<0xNN>` tokens for those that have no token.
    Chars,
}

/// What becomes of characters that no token covers, in vocabularies of characters.
#[derive(Clone, Copy, Debug, Default)]
pub struct Uncovered {
    /// Where not all bytes of a character have a `<0xNN>` token.
    pub unknown: Option<u32>,
    /// Several side by side are one unknown token.
    pub fused: bool,
    /// Byte tokens are not asked for.
    pub no_bytes: bool,
}

/// A BPE vocabulary's merges and rules.
pub struct Bpe {
    units: Units,
    pre: PreTokenizer,
    merges: Merges,
    byte_tokens: Box<[u32; 256]>, // NONE for a byte that no token covers
    uncovered: Uncovered,
}

/// Returns the two sides of a merge written "left right", where the left side may itself start with a space.
pub fn two_sides(merge: &[u8]) -> Option<(&[u8], &[u8])> {
    let space = merge.iter().skip(1).position(|&b| b == b' ')? + 1;
    Some((&merge[..space], &merge[space + 1..]))
}

impl Bpe {
    /// Reads `merges` (left and right side, best first) against the vocabulary.
    pub fn new(
        vocab: &Vocab,
        units: Units,
        pre: PreTokenizer,
        merges: &[(&[u8], &[u8])],
        uncovered: Uncovered,
    ) -> Result<Self, Error> {
        let mut byte_tokens = Box::new([NONE; 256]);
        for byte in 0..=255u8 {
            let token = match units {
                Units::Bytes => vocab.id(byte_char(byte).encode_utf8(&mut [0; 4]).as_bytes()),
                Units::Chars if uncovered.no_bytes => None,
                Units::Chars => vocab.byte_token(byte),
            };
            byte_tokens[byte as usize] = token.unwrap_or(NONE);
        }
        Ok(Self { units, pre, merges: Merges::new(vocab, merges)?, byte_tokens, uncovered })
    }

    /// Returns what the smallest units of a word are.
    pub fn units(&self) -> Units {
        self.units
    }

    /// Returns how texts are cut into words.
    pub fn pre(&self) -> &PreTokenizer {
        &self.pre
    }

    /// The merges, best first: left and right side, and what they become.
    pub fn merges(&self) -> impl Iterator<Item = (u32, u32, u32)> + use<> {
        let mut merges: Vec<Merge> = self.merges.slots.iter().filter(|merge| merge.left != NONE).copied().collect();
        merges.sort_unstable_by_key(|merge| merge.rank);
        merges.into_iter().map(|merge| (merge.left, merge.right, merge.id))
    }

    /// Returns whether a part of a text may become no token, or any length of it one.
    pub fn drops(&self) -> bool {
        let uncovered = self.byte_tokens.contains(&NONE) && (self.uncovered.unknown.is_none() || self.uncovered.fused);
        uncovered || self.pre.removes()
    }

    /// Appends the tokens of a text without special strings in it.
    pub fn encode(&self, vocab: &Vocab, text: &str, out: &mut Vec<u32>) {
        let mut merger = Merger::default();
        let mut written = String::new();
        let is_whole = |word: &str| match self.pre.whole {
            Whole::No => false,
            Whole::Any => true,
            Whole::LineEnds => word.starts_with('\n'),
        };
        match self.units {
            Units::Bytes => self.pre.split(text, &mut |word| {
                if is_whole(word) {
                    written.clear();
                    written.extend(word.bytes().map(byte_char));
                    if let Some(id) = vocab.id(written.as_bytes()) {
                        return out.push(id);
                    }
                }
                words(word).for_each(|word| self.bytes(&mut merger, word.as_bytes(), out));
            }),
            Units::Chars => self.pre.split(text, &mut |word| {
                if let Some(id) = vocab.id(word.as_bytes()).filter(|_| is_whole(word)) {
                    return out.push(id);
                }
                let mut fusing = false;
                let parts = vocab.words(word).flat_map(words);
                parts.for_each(|word| self.chars(vocab, &mut merger, word, &mut fusing, out));
            }),
        }
    }

    fn bytes(&self, merger: &mut Merger, word: &[u8], out: &mut Vec<u32>) {
        merger.clear();
        word.iter().for_each(|&byte| merger.push(1, self.byte_tokens[byte as usize]));
        merger.run(
            |left, right| self.merges.get(left.id, right.id),
            // A byte without a token is left out: no vocabulary of this kind has a way to write it.
            |symbol| out.extend((symbol.id != NONE).then_some(symbol.id)),
        );
    }

    /// `fusing`: the last character before the word was an unknown one.
    fn chars(&self, vocab: &Vocab, merger: &mut Merger, word: &str, fusing: &mut bool, out: &mut Vec<u32>) {
        merger.clear();
        for c in word.chars() {
            let id = vocab.id(c.encode_utf8(&mut [0; 4]).as_bytes());
            merger.push(c.len_utf8(), id.unwrap_or(NONE));
        }
        merger.run(
            |left, right| self.merges.get(left.id, right.id),
            |symbol| {
                let fused = std::mem::take(fusing) && self.uncovered.fused;
                if symbol.id != NONE {
                    return out.push(symbol.id);
                }
                let bytes = &word.as_bytes()[symbol.start as usize..][..symbol.len as usize];
                let tokens = || bytes.iter().map(|&b| self.byte_tokens[b as usize]);
                match self.uncovered.unknown.filter(|_| tokens().any(|id| id == NONE)) {
                    None => out.extend(tokens().filter(|&id| id != NONE)),
                    Some(id) => {
                        *fusing = true;
                        out.extend((!fused).then_some(id));
                    }
                }
            },
        );
    }
}

/// The merges by pair: a flat table, as a hundred thousand of them are read before the first text comes.
struct Merges {
    slots: Vec<Merge>, // a power of two of them, at least half empty
    seed: u64,
}

#[derive(Clone, Copy)]
struct Merge {
    left: u32, // NONE in an empty slot
    right: u32,
    rank: u32,
    id: u32,
}

impl Merges {
    fn new(vocab: &Vocab, merges: &[(&[u8], &[u8])]) -> Result<Self, Error> {
        let empty = Merge { left: NONE, right: NONE, rank: 0, id: NONE };
        let slots = vec![empty; (merges.len() * 2).next_power_of_two().max(2)];
        let mut table = Self { slots, seed: RandomState::new().build_hasher().finish() };
        let mut joined = Vec::new();
        for (rank, &(left, right)) in merges.iter().enumerate() {
            let bad = |why| Error::Merge { rank, merge: show(&[left, b" ", right].concat()), why };
            joined.clear();
            joined.extend_from_slice(left);
            joined.extend_from_slice(right);
            let find =
                |text: &[u8]| vocab.id(text).ok_or_else(|| bad(format!("names {}, which is no token", show(text))));
            let merge = Merge { left: find(left)?, right: find(right)?, rank: rank as u32, id: find(&joined)? };
            let place = table.place(merge.left, merge.right);
            // Of merges that stand twice, the better rank counts.
            if table.slots[place].left == NONE {
                table.slots[place] = merge;
            }
        }
        Ok(table)
    }

    fn get(&self, left: u32, right: u32) -> Option<Join> {
        if left == NONE || right == NONE {
            return None;
        }
        let merge = self.slots[self.place(left, right)];
        (merge.left != NONE).then_some(Join { order: merge.rank, id: merge.id })
    }

    /// Returns where the pair stands or would stand.
    fn place(&self, left: u32, right: u32) -> usize {
        let mask = self.slots.len() - 1;
        let mut place = fold(self.seed ^ (u64::from(left) << 32 | u64::from(right)), SPREAD) as usize & mask;
        loop {
            let slot = &self.slots[place];
            if slot.left == NONE || (slot.left == left && slot.right == right) {
                return place;
            }
            place = (place + 1) & mask;
        }
    }
}

/// Returns the printable character that GPT-2's vocabulary writes for a byte.
pub fn byte_char(byte: u8) -> char {
    let code = u32::from(byte);
    let code = match byte {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => code,
        // The others follow from 256 on, in their own order.
        0..=b' ' => code + 256,
        0x7F..=0xA0 => code - 0x7F + 289,
        0xAD => 323,
    };
    char::from_u32(code).unwrap_or_default()
}

/// Returns the byte that a character of such a vocabulary stands for.
pub fn char_byte(c: char) -> Option<u8> {
    Some(match u32::from(c) {
        code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => code as u8,
        code @ 256..=288 => (code - 256) as u8,
        code @ 289..=322 => (code - 289 + 0x7F) as u8,
        323 => 0xAD,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_their_characters_are_one_to_one() {
        for byte in 0..=255u8 {
            assert_eq!(char_byte(byte_char(byte)), Some(byte));
        }
        let known = [(b' ', 'Ġ'), (b'\n', 'Ċ'), (b'a', 'a'), (0x7F, 'ġ'), (0xA0, 'ł'), (0xAD, 'Ń'), (0xFF, 'ÿ')];
        assert_eq!(known.map(|(byte, _)| byte_char(byte)), known.map(|(_, c)| c));
        assert_eq!([' ', '\u{ad}', 'ń', '中'].map(char_byte), [None; 4]);
    }
}
