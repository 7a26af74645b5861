//! Text to token ids and back.
//!
//! A [`Tokenizer`] is made from a model's files alone: a GGUF file's metadata, or the `tokenizer.json` of a folder. It
//! must give exactly the ids that the model was trained on; llama.cpp and Hugging Face's tokenizers are the witnesses
//! in the tests. It knows nothing of chats or templates: a prompt arrives as text, and what in it may be a control
//! token the caller says ([`Encode::parse_special`]).

mod bpe;
mod charsmap;
mod detokenize;
mod export;
mod json;
mod load;
mod merge;
mod normalize;
mod pretokenize;
mod roles;
mod sentencepiece;
mod special;
mod spm;
mod stepper;
mod tiktoken;
mod unigram;
mod vocab;
mod wordpiece;

pub use detokenize::{Decode, Detokenizer};
pub use export::{FolderTexts, folder_texts};
pub use sentencepiece::sentencepiece_keys;
pub use vocab::TokenKind;

use checkpoint::{Checkpoint, Kind, SideFile};

use bpe::Bpe;
use normalize::Normalizer;
use special::{Part, Specials};
use spm::Spm;
use unigram::Unigram;
use vocab::Vocab;
use wordpiece::WordPiece;

/// How SentencePiece vocabularies write a space.
const SPACE: &str = "▁";

/// Why a vocabulary cannot be used. Each is a whole sentence.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // The messages say what each is.
pub enum Error {
    #[error(transparent)]
    Metadata(#[from] checkpoint::Error),
    #[error(transparent)]
    Folder(#[from] crate::folder::Error),
    #[error("failed to use tokenizer.ggml.model {found:?}: supported are gpt2, gemma4, llama, bert, t5")]
    Model { found: String },
    #[error("failed to use tokenizer.ggml.pre {found:?}: supported are {known}")]
    Pre { found: String, known: String },
    #[error("failed to use tokenizer.ggml.precompiled_charsmap: {what}")]
    Charsmap { what: String },
    #[error("failed to use tokenizer.ggml.tokens: the tokens have {found} bytes together, at most {most} are allowed")]
    Bytes { found: usize, most: usize },
    #[error("failed to write the tokenizer: it has {found} tokens, the model {n_vocab}")]
    Fewer { found: usize, n_vocab: usize },
    #[error("failed to write the tokenizer: {why}")]
    NoName { why: String },
    #[error("failed to compile the pre-tokenizer {name}")]
    Pattern { name: String, source: Box<regex::Error> },
    #[error("failed to use {key}: it has {found} values for {n_vocab} tokens")]
    Count { key: &'static str, found: usize, n_vocab: usize },
    #[error("failed to use tokenizer.ggml.tokens: it holds {n_vocab} tokens, expected 1 to {most}")]
    NoTokens { n_vocab: usize, most: usize },
    #[error("failed to use tokenizer.ggml.tokens: the tokens are longer than 4 GiB together")]
    TooLong,
    #[error("failed to use tokenizer.ggml.tokens: {token} is both token {first} and token {second}")]
    Duplicate { token: String, first: u32, second: u32 },
    #[error("failed to use tokenizer.ggml.token_type: token {id} is of type {found}, expected 0 to 6")]
    Kind { id: u32, found: i32 },
    #[error("failed to use token {id}, {token}: a byte token is written <0x00> to <0xFF>")]
    ByteToken { id: u32, token: String },
    #[error("failed to use tokenizer.ggml.scores: the score of token {id} is not a number")]
    Score { id: u32 },
    #[error("failed to use tokenizer.ggml.merges: merge {rank}, {merge}, {why}")]
    Merge { rank: usize, merge: String, why: String },
    #[error("failed to use {file}: {what}")]
    Json { file: String, what: String },
    #[error(
        "failed to find the tokenizer of {folder}: it has neither tokenizer.json nor tiktoken.model nor tokenizer.model"
    )]
    NoFile { folder: String },
    #[error("failed to use token {id}, {token}: it is special and has {bytes} bytes, at most 256 are allowed")]
    Special { id: u32, token: String, bytes: usize },
    #[error("failed to index the special tokens")]
    Specials(#[source] aho_corasick::BuildError),
    #[error("failed to use token {id}, {token}: it has {bytes} bytes, at most {most} are allowed")]
    LongToken { id: u32, token: String, bytes: usize, most: usize },
    #[error("failed to use {flag}: it is true, but {key} is missing")]
    MissingId { flag: &'static str, key: &'static str },
}

/// What is wrong with the file.
fn bad(file: &SideFile, what: impl Into<String>) -> Error {
    Error::Json { file: file.name().into(), what: what.into() }
}

/// How a text becomes tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Encode {
    /// Put BOS before and EOS after where the model wants them.
    pub add_special: bool,
    /// Take the names of control tokens in the text (`<|im_end|>`) for the tokens. For text that a template wrote;
    /// text of a user may name them without meaning them.
    pub parse_special: bool,
}

/// The rules by which text without special strings is cut.
enum Algorithm {
    Bpe(Bpe),
    Spm(Spm),
    WordPiece(WordPiece),
    Unigram(Unigram),
}

/// Tokens that have a role; `None` where the model has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Roles {
    bos: Option<u32>,
    eos: Option<u32>,
    eot: Option<u32>,
    eom: Option<u32>,
    pad: Option<u32>,
    unknown: Option<u32>,
    fill_in: [Option<u32>; 6], // as `roles::FILL_IN` has them
    ends: Vec<u32>,            // sorted: every token that ends a generation
    unusable: Vec<String>,     // ids that are none of the vocabulary's: a sentence each
}

/// A model's tokenizer. Immutable, so one serves any number of threads.
pub struct Tokenizer {
    vocab: Vocab,
    algorithm: Algorithm,
    specials: Specials,
    roles: Roles,
    normalizer: Normalizer,
    normalized: Option<Specials>, // strings that are looked for after the normalizer
    before: Vec<u32>,             // what `add_special` puts before a text
    after: Vec<u32>,              // and behind it
    pair: Option<[Vec<u32>; 3]>,  // before, between and after two texts that are one input
    add_space_prefix: bool,       // a text begins with a space that `spm` adds
    strips_space: bool,           // the first space of a text is not shown
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("n_vocab", &self.n_vocab())
            .field("roles", &self.roles)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads the tokenizer of a model, whatever kind of files it is in: [`Tokenizer::from_metadata`] of a GGUF file,
    /// `tokenizer.json` (or `tiktoken.model`, or SentencePiece's `tokenizer.model`) of a folder with what
    /// `tokenizer_config.json`, `generation_config.json` and `config.json` say of its tokens. Fails when a file cannot
    /// be read, or lies, or asks for what is not known; the error names the thing.
    pub fn load(checkpoint: &Checkpoint) -> Result<Self, Error> {
        match checkpoint.kind() {
            Kind::Gguf => Self::from_metadata(checkpoint.meta()),
            Kind::Mlx | Kind::Hf => json::load(checkpoint),
        }
    }

    /// Returns the longest text that may become `n_tokens` tokens, in bytes: a longer one becomes more, whatever it
    /// says, so that it can be refused unread. `None` where a part of a text may become no token, and there is no such
    /// bound.
    pub fn max_text_bytes(&self, n_tokens: usize) -> Option<usize> {
        let drops = match &self.algorithm {
            Algorithm::Bpe(bpe) => bpe.drops(),
            Algorithm::Spm(spm) => spm.drops(),
            // Control characters go, and what is unknown is one token.
            Algorithm::WordPiece(_) | Algorithm::Unigram(_) => true,
        };
        if drops || self.specials.strips() || self.normalized.as_ref().is_some_and(Specials::strips) {
            return None;
        }
        // A character of up to four bytes may become one unknown token.
        let longest = self.vocab.max_len().max(4).checked_mul(self.normalizer.shrink()?)?;
        n_tokens.checked_mul(longest)
    }

    /// Returns the tokens of a text.
    pub fn encode(&self, text: &str, how: Encode) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 2);
        self.encode_into(text, how, &mut ids);
        ids
    }

    /// Appends the tokens of a text. No text is refused.
    pub fn encode_into(&self, text: &str, how: Encode, ids: &mut Vec<u32>) {
        if how.add_special {
            ids.extend_from_slice(&self.before);
        }
        // A SentencePiece text starts with a space, and so does one that follows a special token.
        let mut prefix = self.add_space_prefix;
        let mut first = true;
        for part in self.specials.partition(text, how.parse_special) {
            match part {
                Part::Token(id) => {
                    ids.push(id);
                    prefix = self.add_space_prefix;
                }
                Part::Text(range) => {
                    match &self.algorithm {
                        Algorithm::Bpe(bpe) => {
                            let cut = |text: &str, ids: &mut Vec<u32>| bpe.encode(&self.vocab, text, ids);
                            self.encode_part(&text[range], first, how, ids, cut);
                        }
                        Algorithm::Unigram(unigram) => {
                            let cut = |text: &str, ids: &mut Vec<u32>| unigram.encode(text, ids);
                            self.encode_part(&text[range], first, how, ids, cut);
                        }
                        Algorithm::WordPiece(pieces) => {
                            let cut = |text: &str, ids: &mut Vec<u32>| pieces.encode(&self.vocab, text, ids);
                            self.encode_part(&text[range], first, how, ids, cut);
                        }
                        Algorithm::Spm(spm) => spm.encode(&self.vocab, &text[range], prefix, ids),
                    }
                    prefix = false;
                }
            }
            first = false;
        }
        if how.add_special {
            ids.extend_from_slice(&self.after);
        }
    }

    /// Returns the tokens of two texts that are one input, a question and its answer, and the index of the first token
    /// of the second; `None` where the model takes no such. Names of special tokens in them are text.
    pub fn encode_pair(&self, first: &str, second: &str) -> Option<(Vec<u32>, usize)> {
        let [before, between, after] = self.pair.as_ref()?;
        let mut ids = before.clone();
        self.encode_into(first, Encode::default(), &mut ids);
        ids.extend_from_slice(between);
        let at = ids.len();
        self.encode_into(second, Encode::default(), &mut ids);
        ids.extend_from_slice(after);
        Some((ids, at))
    }

    /// A text without the special strings that are looked for as it stands; `first`: it is the beginning of the whole.
    fn encode_part(&self, text: &str, first: bool, how: Encode, ids: &mut Vec<u32>, cut: impl Fn(&str, &mut Vec<u32>)) {
        let text = self.normalizer.apply(text, first);
        let Some(specials) = &self.normalized else { return cut(&text, ids) };
        for part in specials.partition(&text, how.parse_special) {
            match part {
                Part::Token(id) => ids.push(id),
                Part::Text(range) => cut(&text[range], ids),
            }
        }
    }

    /// Returns the bytes a token stands for, its name for a control token; `None` past the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.vocab.piece(id)
    }

    /// Returns the token whose text in the file is this one: `<|im_end|>`, or `Ġthe` in a byte-level vocabulary.
    pub fn token_to_id(&self, text: &str) -> Option<u32> {
        self.vocab.id(text.as_bytes())
    }

    /// Returns what a token is; `None` past the vocabulary.
    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.vocab.kind(id)
    }

    /// Returns whether a token carries no text: control and unknown tokens.
    pub fn is_special(&self, id: u32) -> bool {
        self.kind(id).is_some_and(TokenKind::is_special)
    }

    /// Returns whether an answer ends with this token: end of text, of turn, of message, or a token of a well-known
    /// such name.
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.roles.ends.binary_search(&id).is_ok()
    }

    /// Returns all tokens that end an answer, in rising order.
    pub fn ends_of_generation(&self) -> &[u32] {
        &self.roles.ends
    }

    /// Returns a sentence about each token that the files name and the vocabulary has not.
    pub fn unusable(&self) -> &[String] {
        &self.roles.unusable
    }

    /// Count of tokens; ids are below it.
    pub fn n_vocab(&self) -> usize {
        self.vocab.len()
    }

    /// Begin of text.
    pub fn bos(&self) -> Option<u32> {
        self.roles.bos
    }

    /// Returns the marks of models that fill gaps: of the text before the gap, of the text after it and of the gap;
    /// padding; of a repository's name and of a file's.
    pub fn fill_in(&self) -> [Option<u32>; 6] {
        self.roles.fill_in
    }

    /// End of text.
    pub fn eos(&self) -> Option<u32> {
        self.roles.eos
    }

    /// End of turn.
    pub fn eot(&self) -> Option<u32> {
        self.roles.eot
    }

    /// End of message: the model wants a tool's answer before it goes on.
    pub fn eom(&self) -> Option<u32> {
        self.roles.eom
    }

    /// Padding.
    pub fn pad(&self) -> Option<u32> {
        self.roles.pad
    }

    /// Stands for what no token covers.
    pub fn unknown(&self) -> Option<u32> {
        self.roles.unknown
    }

    /// Returns whether [`Encode::add_special`] puts BOS before a text.
    pub fn add_bos(&self) -> bool {
        self.bos().is_some_and(|bos| self.before.contains(&bos))
    }

    /// Returns whether a text gets a space before its first word.
    pub fn add_space_prefix(&self) -> bool {
        self.add_space_prefix
    }

    /// Returns whether [`Encode::add_special`] puts EOS after a text.
    pub fn add_eos(&self) -> bool {
        self.eos().is_some_and(|eos| self.after.contains(&eos))
    }
}
