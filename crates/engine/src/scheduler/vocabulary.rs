//! The scheduler's interface to a tokenizer, which tests replace by small vocabularies.

use std::sync::Arc;

use crate::tokenizer::{Decode, Detokenizer, Tokenizer};

/// Ids and their text.
pub trait Vocabulary: Send + Sync {
    /// Number of ids that have a text; a padded model's logits are wider.
    fn n_vocab(&self) -> usize;

    /// Returns whether this token ends a generation.
    fn is_end_of_generation(&self, id: u32) -> bool;

    /// Starts the text of an answer. It includes the names of the special tokens `shown`, even where `decode` omits
    /// those of others.
    fn text(self: Arc<Self>, decode: Decode, shown: &[u32]) -> Box<dyn TextStream>;
}

/// The text of one answer, token after token.
pub trait TextStream: Send {
    /// Appends the characters that this token completes; incomplete characters wait for the next tokens.
    fn push(&mut self, id: u32, out: &mut String);

    /// Ends the text. A character that is incomplete is dropped.
    fn finish(&mut self, out: &mut String);
}

impl Vocabulary for Tokenizer {
    fn n_vocab(&self) -> usize {
        self.n_vocab()
    }

    fn is_end_of_generation(&self, id: u32) -> bool {
        self.is_end_of_generation(id)
    }

    fn text(self: Arc<Self>, decode: Decode, shown: &[u32]) -> Box<dyn TextStream> {
        Box::new(Stream { tokenizer: self, detokenizer: Detokenizer::showing(decode, shown) })
    }
}

/// A detokenizer and its tokenizer.
struct Stream {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
}

impl TextStream for Stream {
    fn push(&mut self, id: u32, out: &mut String) {
        self.detokenizer.push(&self.tokenizer, id, out);
    }

    fn finish(&mut self, _: &mut String) {
        // What is left of a character that a limit cut off is no text.
        self.detokenizer.finish(&mut String::new());
    }
}
