//! What the scheduler asks of a tokenizer. The real one answers in text; tests bring vocabularies of their own.

use std::sync::Arc;

use crate::tokenizer::{Decode, Detokenizer, Tokenizer};

/// Ids and their text.
pub trait Vocabulary: Send + Sync {
    /// Number of ids that have a text; a program's logits may be wider, where a model is padded.
    fn n_vocab(&self) -> usize;

    /// Whether a model says with this token that it is finished.
    fn is_end_of_generation(&self, id: u32) -> bool;

    /// Starts the text of an answer. The names of the special tokens `shown` are part of it, even where `how` leaves out
    /// the others'.
    fn text(self: Arc<Self>, how: Decode, shown: &[u32]) -> Box<dyn TextStream>;
}

/// The text of one answer, token after token.
pub trait TextStream: Send {
    /// Appends the characters that are complete with this token; the first bytes of a character wait for the rest.
    fn push(&mut self, id: u32, out: &mut String);

    /// Appends what still waits: bytes that never became a character become U+FFFD.
    fn finish(&mut self, out: &mut String);
}

impl Vocabulary for Tokenizer {
    fn n_vocab(&self) -> usize {
        self.n_vocab()
    }

    fn is_end_of_generation(&self, id: u32) -> bool {
        self.is_end_of_generation(id)
    }

    fn text(self: Arc<Self>, how: Decode, shown: &[u32]) -> Box<dyn TextStream> {
        Box::new(Stream { tokenizer: self, detokenizer: Detokenizer::showing(how, shown) })
    }
}

/// A detokenizer with the tokenizer it belongs to.
struct Stream {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
}

impl TextStream for Stream {
    fn push(&mut self, id: u32, out: &mut String) {
        self.detokenizer.push(&self.tokenizer, id, out);
    }

    fn finish(&mut self, out: &mut String) {
        self.detokenizer.finish(out);
    }
}
