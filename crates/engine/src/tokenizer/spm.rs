//! SentencePiece-style vocabularies with scores and no merges (`tokenizer.ggml.model` = `llama`).
//!
//! Characters join wherever their text together is a token, best score first; what stays no token falls to bytes.
//! The `unigram` kind of SentencePiece, which weighs whole segmentations, is another one (`t5`) and not read.

use super::merge::{Join, Merger, NONE, words};
use super::vocab::{TokenKind, Vocab, show};
use super::{Error, SPACE};

/// Longest token that text may become, in bytes; those in use have a hundred. It bounds what a join reads.
const MAX_TOKEN: usize = 512;

/// Scores and byte tokens of such a vocabulary.
pub struct Spm {
    orders: Vec<u32>, // [n_vocab], lowest for the best score; NONE for a token that text must not become
    byte_tokens: Box<[u32; 256]>,
}

impl Spm {
    /// `scores` has one value a token; NaN is an error. A byte without a token becomes `unknown`.
    pub fn new(vocab: &Vocab, scores: &[f32], unknown: Option<u32>) -> Result<Self, Error> {
        let order = |(id, &score): (usize, &f32)| {
            let id = id as u32;
            if score.is_nan() {
                return Err(Error::Score { id });
            }
            // Plain text never joins into a control token, as in SentencePiece, whatever its score.
            let text = vocab.text(id).unwrap_or_default();
            match vocab.kind(id).is_some_and(TokenKind::is_special) {
                true => Ok(NONE),
                false if text.len() > MAX_TOKEN => {
                    Err(Error::LongToken { id, token: show(text), bytes: text.len(), most: MAX_TOKEN })
                }
                false => Ok(descending(score)),
            }
        };
        let orders = scores.iter().enumerate().map(order).collect::<Result<_, _>>()?;
        let mut byte_tokens = Box::new([NONE; 256]);
        for byte in 0..=255u8 {
            byte_tokens[byte as usize] = vocab.byte_token(byte).or(unknown).unwrap_or(NONE);
        }
        Ok(Self { orders, byte_tokens })
    }

    /// Returns whether a part of a text may become no token.
    pub fn drops(&self) -> bool {
        self.byte_tokens.contains(&NONE)
    }

    /// Returns the place of a token among those that text joins into, the best first; `None` for a control token.
    pub fn order(&self, id: u32) -> Option<u32> {
        self.orders.get(id as usize).copied().filter(|&order| order != NONE)
    }

    /// Appends the tokens of a text without special strings in it; `prefix` puts a space before it.
    pub fn encode(&self, vocab: &Vocab, text: &str, prefix: bool, out: &mut Vec<u32>) {
        let mut written = String::with_capacity(text.len() + text.len() / 2 + SPACE.len());
        if prefix {
            written.push_str(SPACE);
        }
        for (i, run) in text.split(' ').enumerate() {
            if i > 0 {
                written.push_str(SPACE);
            }
            written.push_str(run);
        }
        let mut merger = Merger::default();
        for word in vocab.words(&written).flat_map(words) {
            self.word(vocab, &mut merger, word.as_bytes(), word, out);
        }
    }

    fn word(&self, vocab: &Vocab, merger: &mut Merger, bytes: &[u8], word: &str, out: &mut Vec<u32>) {
        merger.clear();
        for c in word.chars() {
            let id = self.token(vocab, c.encode_utf8(&mut [0; 4]).as_bytes());
            merger.push(c.len_utf8(), id.map_or(NONE, |join| join.id));
        }
        merger.run(
            |left, right| {
                let text = &bytes[left.start as usize..][..(left.len + right.len) as usize];
                self.token(vocab, text)
            },
            |symbol| match symbol.id {
                NONE => {
                    let bytes = &bytes[symbol.start as usize..][..symbol.len as usize];
                    out.extend(bytes.iter().map(|&b| self.byte_tokens[b as usize]).filter(|&id| id != NONE));
                }
                id => out.push(id),
            },
        );
    }

    /// Returns the token of a text, if text may become it.
    fn token(&self, vocab: &Vocab, text: &[u8]) -> Option<Join> {
        let id = if text.len() <= vocab.max_len().min(MAX_TOKEN) { vocab.id(text)? } else { return None };
        Some(self.orders[id as usize]).filter(|&order| order != NONE).map(|order| Join { order, id })
    }
}

/// Maps scores to integers that sort the other way round; never [`NONE`], which only a NaN would reach.
fn descending(score: f32) -> u32 {
    // Adding zero makes the two zeros one.
    let bits = (score + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    !ascending
}
