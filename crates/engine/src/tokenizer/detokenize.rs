//! Tokens back to text as they come: never half a character.
//!
//! The bytes of a character may be spread over tokens, so an unfinished tail waits for the next one. What can never
//! become a character is U+FFFD at once, exactly as [`String::from_utf8_lossy`] has it for the whole.

use super::{TokenKind, Tokenizer};

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
    shown: Box<[u32]>, // special tokens that are not left out
    at_start: bool,    // no text has come yet
    pending: Vec<u8>,  // at most three bytes between tokens: the start of a character
}

impl Detokenizer {
    /// Returns a stream at its start.
    pub fn new(how: Decode) -> Self {
        Self::showing(how, &[])
    }

    /// Returns a stream at its start, with the names of these special tokens in its text whatever `how` says.
    pub fn showing(how: Decode, shown: &[u32]) -> Self {
        // Room for the longest tokens of today's vocabularies, so that a stream allocates once.
        Self { how, shown: shown.into(), at_start: !how.continues, pending: Vec::with_capacity(256) }
    }

    /// Appends the characters that the token completes; often one word, sometimes none. An id past the vocabulary is
    /// no text.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32, out: &mut String) {
        let skip_special = self.how.skip_special && !self.shown.contains(&id);
        let bytes = tokenizer.shown(id, skip_special, &mut self.at_start);
        self.pending.extend_from_slice(bytes);
        let mut done = 0;
        loop {
            let rest = &self.pending[done..];
            let Err(error) = str::from_utf8(rest).map(|text| out.push_str(text)) else {
                return self.pending.clear();
            };
            out.push_str(str::from_utf8(&rest[..error.valid_up_to()]).unwrap_or_default());
            done += error.valid_up_to();
            let Some(n_bad) = error.error_len() else { break };
            out.push(char::REPLACEMENT_CHARACTER);
            done += n_bad;
        }
        self.pending.drain(..done);
    }

    /// Ends the stream: a character that never got its last bytes is U+FFFD. What comes after is a new one.
    pub fn finish(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            out.push(char::REPLACEMENT_CHARACTER);
        }
        self.pending.clear();
        self.at_start = !self.how.continues;
    }
}

impl Tokenizer {
    /// Returns the text of a whole sequence of tokens, names of control tokens included; what is no UTF-8 becomes
    /// U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.decode_as(ids, Decode::default())
    }

    /// Returns the text of a whole sequence of tokens; what is no UTF-8 becomes U+FFFD.
    pub fn decode_as(&self, ids: &[u32], how: Decode) -> String {
        let mut bytes = Vec::new();
        let mut at_start = !how.continues;
        for &id in ids {
            bytes.extend_from_slice(self.shown(id, how.skip_special, &mut at_start));
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Returns the bytes that a token shows at this place of a text; `at_start` until one has shown some.
    fn shown(&self, id: u32, skip_special: bool, at_start: &mut bool) -> &[u8] {
        use TokenKind::*;
        let bytes = match self.kind(id) {
            Some(Control | Unknown | Unused) if skip_special => &[],
            Some(_) => self.token_bytes(id).unwrap_or_default(),
            None => &[],
        };
        let first = std::mem::replace(at_start, *at_start && bytes.is_empty());
        if first && self.strips_space { bytes.strip_prefix(b" ").unwrap_or(bytes) } else { bytes }
    }
}
