//! Tokens back to text as they come: never half a character.
//!
//! The bytes of a character may be spread over tokens, so an unfinished tail waits for the next one. What can never
//! become a character is U+FFFD at once, exactly as [`String::from_utf8_lossy`] has it for the whole.

use super::{Tokenizer, vocab::TokenKind};

/// How tokens become text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decode {
    /// Leave out control, unknown and unused tokens instead of writing their names.
    pub skip_special: bool,
    /// The text goes on from an earlier one (an answer after its prompt), so the space that a SentencePiece
    /// vocabulary puts before a text's first word is a space of the text and stays.
    pub continues: bool,
}

/// The state of one stream of tokens. The tokenizer is handed in with each token and must be the same one throughout.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    how: Decode,
    at_start: bool,   // no text has come yet
    pending: Vec<u8>, // at most three bytes between tokens: the start of a character
    out: String,
}

impl Detokenizer {
    /// A stream at its start.
    pub fn new(how: Decode) -> Self {
        Self { how, at_start: !how.continues, pending: Vec::new(), out: String::new() }
    }

    /// The characters that the token completes; often one word, sometimes none. An id past the vocabulary is no text.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> &str {
        self.out.clear();
        let bytes = tokenizer.shown(id, self.how.skip_special, self.at_start);
        self.at_start &= bytes.is_empty();
        self.pending.extend_from_slice(bytes);
        let mut rest = self.pending.as_slice();
        loop {
            match str::from_utf8(rest) {
                Ok(text) => {
                    self.out.push_str(text);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (text, tail) = rest.split_at(error.valid_up_to());
                    self.out.push_str(str::from_utf8(text).unwrap_or_default());
                    rest = tail;
                    let Some(n_bad) = error.error_len() else { break };
                    self.out.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[n_bad..];
                }
            }
        }
        let done = self.pending.len() - rest.len();
        self.pending.drain(..done);
        &self.out
    }

    /// Ends the stream: a character that never got its last bytes is U+FFFD.
    pub fn finish(&mut self) -> &str {
        self.out.clear();
        if !self.pending.is_empty() {
            self.out.push(char::REPLACEMENT_CHARACTER);
        }
        self.pending.clear();
        self.at_start = !self.how.continues;
        &self.out
    }
}

impl Tokenizer {
    /// The text of a whole sequence of tokens; bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32], how: Decode) -> String {
        let mut bytes = Vec::new();
        for &id in ids {
            bytes.extend_from_slice(self.shown(id, how.skip_special, bytes.is_empty() && !how.continues));
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes that a token shows at this place of a text.
    fn shown(&self, id: u32, skip_special: bool, at_start: bool) -> &[u8] {
        use TokenKind::*;
        let bytes = match self.kind(id) {
            Some(Control | Unknown | Unused) if skip_special => &[],
            Some(_) => self.token_bytes(id).unwrap_or_default(),
            None => &[],
        };
        if at_start && self.add_space_prefix { bytes.strip_prefix(b" ").unwrap_or(bytes) } else { bytes }
    }
}
