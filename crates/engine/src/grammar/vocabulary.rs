//! A tokenizer in the form that grammars want: a trie of what its tokens stand for.

use std::sync::Arc;

use llguidance::toktrie::{INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use crate::tokenizer::{Encode, TokenKind, Tokenizer};

/// Marks the name of a special token, so that no text is taken for it. No UTF-8 text holds this byte.
const SPECIAL: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

struct Environment {
    tokenizer: Arc<Tokenizer>,
    trie: TokTrie,
    canonical: bool,
}

/// Returns the trie of a vocabulary.
pub(super) fn environment(tokenizer: Arc<Tokenizer>) -> TokEnv {
    let word = |id: u32| match (tokenizer.kind(id), tokenizer.token_bytes(id).unwrap_or_default()) {
        (Some(TokenKind::Unused) | None, _) | (_, []) => Vec::new(),
        (Some(TokenKind::Control | TokenKind::Unknown), name) => [&[SPECIAL], name].concat(),
        // A byte that stands in no text.
        (_, [SPECIAL, ..]) => Vec::new(),
        (_, text) => text.to_vec(),
    };
    let words: Vec<Vec<u8>> = (0..tokenizer.n_vocab() as u32).map(word).collect();
    let ends = tokenizer.ends_of_generation();
    let info = TokRxInfo {
        tok_bos: tokenizer.bos(),
        tok_pad: tokenizer.pad(),
        tok_unk: tokenizer.unknown(),
        tok_end_of_turn: tokenizer.eot(),
        ..TokRxInfo::new(words.len() as u32, ends.first().copied().unwrap_or(INVALID_TOKEN))
    };
    let mut trie = TokTrie::from(&info, &words);
    if !ends.is_empty() {
        trie = trie.with_eos_tokens(ends);
    }
    // Where a text gets a space before its first word, its tokens are not those that it has behind other text.
    let canonical = !tokenizer.add_space_prefix();
    Arc::new(Environment { tokenizer, trie, canonical })
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let encode = |text: &str| self.tokenizer.encode(text, Encode::default());
        self.trie.tokenize_with_greedy_fallback(bytes, encode)
    }

    fn tokenize_is_canonical(&self) -> bool {
        self.canonical
    }
}

/// Returns the bytes of a token as a reader sees them; a special token's are its name.
pub(super) fn text(trie: &TokTrie, id: u32) -> &[u8] {
    if id as usize >= trie.vocab_size() {
        return &[];
    }
    let bytes = trie.token(id);
    bytes.strip_prefix(&[SPECIAL]).unwrap_or(bytes)
}

/// Returns whether a token is special.
pub(super) fn is_mark(trie: &TokTrie, id: u32) -> bool {
    (id as usize) < trie.vocab_size() && trie.token(id).first() == Some(&SPECIAL)
}

/// Returns the names of the special tokens.
pub(super) fn marks(trie: &TokTrie) -> Vec<String> {
    let special = |id| trie.token(id).strip_prefix(&[SPECIAL]).and_then(|name| String::from_utf8(name.to_vec()).ok());
    (0..trie.vocab_size() as u32).filter_map(special).collect()
}

/// Returns the token that shows as this text.
pub(super) fn token(trie: &TokTrie, text: &str) -> Option<u32> {
    trie.get_special_token(text).or_else(|| trie.token_id(text.as_bytes()))
}
