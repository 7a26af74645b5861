//! The vocabulary: for each token its text in the file, the bytes it stands for and its kind; and the way back from
//! text to id. Knows nothing of how text is cut into tokens.

use std::hash::{BuildHasher, Hasher, RandomState};

use super::merge::NONE;
use super::{Error, SPACE};

/// What a token is, with GGUF's numbers (`tokenizer.ggml.token_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum TokenKind {
    /// Nothing is said about it.
    Undefined = 0,
    /// A piece of text.
    Normal = 1,
    /// Stands for text that no token covers.
    Unknown = 2,
    /// Steers the model (`<|im_end|>`); text never becomes one unless special strings are parsed.
    Control = 3,
    /// A string that is one token wherever it stands in a text.
    UserDefined = 4,
    /// A place in the table that the model never uses.
    Unused = 5,
    /// One byte, written `<0xNN>`.
    Byte = 6,
}

impl TokenKind {
    /// Returns the kind of that number in a GGUF file.
    pub fn from_id(id: i32) -> Option<Self> {
        use TokenKind::*;
        [Undefined, Normal, Unknown, Control, UserDefined, Unused, Byte].into_iter().find(|&kind| kind as i32 == id)
    }

    /// Returns whether it carries no text: control and unknown tokens.
    pub fn is_special(self) -> bool {
        matches!(self, Self::Control | Self::Unknown)
    }
}

/// Strings end to end, one allocation for all.
#[derive(Default)]
struct Blob {
    data: Vec<u8>,
    ends: Vec<u32>, // [n], where each string ends in `data`
}

impl Blob {
    fn get(&self, i: usize) -> Option<&[u8]> {
        let end = *self.ends.get(i)? as usize;
        let start = if i == 0 { 0 } else { self.ends[i - 1] as usize };
        Some(&self.data[start..end])
    }

    /// Ends the string that was being appended to `data`.
    fn close(&mut self) -> Result<(), Error> {
        let end = u32::try_from(self.data.len()).map_err(|_| Error::TooLong)?;
        self.ends.push(end);
        Ok(())
    }
}

/// All tokens of a model.
pub struct Vocab {
    texts: Blob,  // [n_vocab], as the file writes them
    pieces: Blob, // [n_vocab], the bytes they stand for
    kinds: Vec<TokenKind>,
    slots: Vec<(u32, u32)>, // tag of the hash and id; a power of two of them, at least half empty
    seed: u64,
    max_len: usize,
    joins: Box<[bool; 256]>, // whether a token has a `▁` inside it right after this byte
}

impl Vocab {
    /// `piece` appends the bytes that a token's text stands for. A text that stands twice is an error.
    pub fn new(
        tokens: &[&[u8]],
        kinds: Vec<TokenKind>,
        piece: impl Fn(u32, &[u8], TokenKind, &mut Vec<u8>) -> Result<(), Error>,
    ) -> Result<Self, Error> {
        let n_bytes = tokens.iter().map(|token| token.len()).sum();
        let blob = || Blob { data: Vec::with_capacity(n_bytes), ends: Vec::with_capacity(tokens.len()) };
        let mut vocab = Self {
            texts: blob(),
            pieces: blob(),
            kinds,
            slots: vec![(0, NONE); (tokens.len() * 2).next_power_of_two().max(2)],
            // A file must not be able to choose strings that all fall into one place of the table.
            seed: RandomState::new().build_hasher().finish(),
            max_len: 0,
            joins: joins(tokens),
        };
        for (id, token) in tokens.iter().enumerate() {
            let id = id as u32;
            vocab.texts.data.extend_from_slice(token);
            vocab.texts.close()?;
            piece(id, token, vocab.kinds[id as usize], &mut vocab.pieces.data)?;
            vocab.pieces.close()?;
            vocab.max_len = vocab.max_len.max(token.len());
            // An empty token stands for no text and is never looked for.
            if !token.is_empty() {
                match vocab.slot(token) {
                    (_, Some(first)) => return Err(Error::Duplicate { token: show(token), first, second: id }),
                    (place, None) => vocab.slots[place] = (hash(vocab.seed, token) as u32, id),
                }
            }
        }
        Ok(vocab)
    }

    /// Count of tokens.
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Length of the longest token's text, in bytes.
    pub fn max_len(&self) -> usize {
        self.max_len
    }

    /// Cuts a text whose spaces are written `▁` before the spaces of each word, save where a token may reach across.
    /// A word at a time, the merge loop stays in cache.
    pub fn words<'t>(&self, text: &'t str) -> impl Iterator<Item = &'t str> {
        let mut spaces = text.match_indices(SPACE).map(|(at, _)| at);
        let mut start = 0;
        std::iter::from_fn(move || {
            let cuts = |&at: &usize| at > start && !self.joins[text.as_bytes()[at - 1] as usize];
            let end = spaces.by_ref().find(cuts).unwrap_or(text.len());
            let word = &text[start..end];
            start = end;
            (!word.is_empty()).then_some(word)
        })
    }

    /// Returns the token with this text in the file's own writing.
    pub fn id(&self, text: &[u8]) -> Option<u32> {
        self.slot(text).1
    }

    /// Returns a token's text in the file's own writing.
    pub fn text(&self, id: u32) -> Option<&[u8]> {
        self.texts.get(id as usize)
    }

    /// Returns the bytes a token stands for.
    pub fn piece(&self, id: u32) -> Option<&[u8]> {
        self.pieces.get(id as usize)
    }

    /// Returns a token's kind.
    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    /// Overrides a kind; the bytes the token stands for stay. `id` is a token's.
    pub fn set_kind(&mut self, id: u32, kind: TokenKind) {
        self.kinds[id as usize] = kind;
    }

    /// Returns the token `<0xNN>` of a byte, or the token whose text is that one byte.
    pub fn byte_token(&self, byte: u8) -> Option<u32> {
        self.id(format!("<0x{byte:02X}>").as_bytes()).or_else(|| self.id(&[byte]))
    }

    /// Returns the place where a text stands or would stand, and the token that is there.
    fn slot(&self, text: &[u8]) -> (usize, Option<u32>) {
        let hash = hash(self.seed, text);
        let mask = self.slots.len() - 1;
        let mut place = (hash >> 32) as usize & mask;
        loop {
            match self.slots[place] {
                (_, NONE) => return (place, None),
                (tag, id) if tag == hash as u32 && self.text(id) == Some(text) => return (place, Some(id)),
                _ => place = (place + 1) & mask,
            }
        }
    }
}

/// Returns the bytes after which a `▁` stands inside a token. Its own last byte is always one, so runs of spaces stay
/// whole.
fn joins(tokens: &[&[u8]]) -> Box<[bool; 256]> {
    let space = SPACE.as_bytes();
    let mut joins = Box::new([false; 256]);
    joins[space[space.len() - 1] as usize] = true;
    for token in tokens {
        for at in (1..token.len()).filter(|&at| token[at] == space[0] && token[at..].starts_with(space)) {
            joins[token[at - 1] as usize] = true;
        }
    }
    joins
}

/// One step of the hash: the two halves of a 128-bit product folded together.
pub fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

/// Odd, with bits well spread; the fractional part of the golden ratio.
pub const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

fn hash(seed: u64, bytes: &[u8]) -> u64 {
    let mut hash = fold(seed ^ bytes.len() as u64, SPREAD);
    let mut words = bytes.chunks_exact(8);
    for word in &mut words {
        let word = u64::from_le_bytes(word.try_into().unwrap_or_default());
        hash = fold(hash ^ word, SPREAD);
    }
    let tail = words.remainder().iter().fold(0, |tail, &byte| tail << 8 | u64::from(byte));
    fold(hash ^ tail, SPREAD ^ seed.rotate_left(32))
}

/// Returns a token or merge for a message: quoted, printable, cut to a line.
pub fn show(text: &[u8]) -> String {
    const MOST: usize = 60;
    let text = String::from_utf8_lossy(&text[..text.len().min(MOST * 4)]);
    let cut: String = text.chars().take(MOST).collect();
    format!("{cut:?}{}", if cut.len() < text.len() { "…" } else { "" })
}
