//! Trying a grammar where it may use up what it likes: in a process of its own.
//!
//! The fuel of llguidance counts steps and not their size, and what it compiles cannot be stopped. So whoever has
//! processes at hand gives [`super::Grammars::with_trial`] a [`Trial`], which calls [`attempt`] in a process with
//! limits on time and memory: what a grammar costs depends hardly on the vocabulary, and what passed there is compiled
//! here. Knows nothing of processes.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use serde::{Deserialize, Serialize};
use sys::rank;

use super::{Error, LOOK, STACK_BYTES, factory, let_by, matcher};

/// Longest list of marks in a message, in bytes.
const MAX_MARK_BYTES: usize = 1 << 20;

/// Where grammars are tried.
pub trait Trial: Send + Sync {
    /// Calls [`attempt`] with a message where that may fail in any way, run for ever or take all memory; gives up when
    /// `stopped` says so.
    ///
    /// # Errors
    /// What [`attempt`] said, or [`Error::TooCostly`].
    fn attempt(&self, message: &str, stopped: &dyn Fn() -> bool) -> Result<(), Error>;
}

/// A grammar and the names of special tokens that it may name.
#[derive(Serialize, Deserialize)]
struct Message {
    grammar: TopLevelGrammar,
    marks: Vec<String>,
}

/// Returns a grammar as a text.
pub(super) fn message(grammar: &TopLevelGrammar, marks: &[String]) -> Result<String, Error> {
    let mut bytes = 0;
    let fits = |mark: &&String| {
        bytes += mark.len();
        bytes <= MAX_MARK_BYTES
    };
    let message = Message { grammar: grammar.clone(), marks: marks.iter().take_while(fits).cloned().collect() };
    serde_json::to_string(&message).map_err(|e| Error::Setup(format!("write a grammar: {e}")))
}

/// Compiles the grammar of a message, over a vocabulary of bytes and special tokens, and computes its first mask.
///
/// # Errors
/// As [`super::Grammars::compile`].
pub fn attempt(message: &str) -> Result<(), Error> {
    let bad = |e: &dyn std::fmt::Display| Error::Setup(format!("read a grammar: {e}"));
    let Message { grammar, marks } = serde_json::from_str(message).map_err(|e| bad(&e))?;
    let (work, (ended, has_ended)) = (Arc::new(rank::Work::default()), sync_channel::<()>(0));
    let worker = work.clone();
    let compile = move || {
        // Dropped at the end, however it comes.
        let _ended = ended;
        let (begun, _handle) = sync_channel(1);
        let environment: TokEnv = Arc::new(Bytes::new(&marks));
        worker.run(|| matcher(&factory(&environment)?, grammar, &begun).map(drop)).0
    };
    let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(compile);
    let thread = thread.map_err(|e| Error::Setup(format!("start a thread: {e}")))?;
    while has_ended.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
        let_by(&work);
    }
    thread.join().unwrap_or_else(|_| Err(Error::Rule("the compiler failed".into())))
}

/// A vocabulary of bytes, an end and special tokens.
struct Bytes(TokTrie);

impl Bytes {
    fn new(marks: &[String]) -> Bytes {
        let bytes = (0..=u8::MAX).map(|byte| vec![byte]);
        // The byte that marks special tokens stands in no text.
        let bytes = bytes.map(|word| if word == [TokTrie::SPECIAL_TOKEN_MARKER] { Vec::new() } else { word });
        let special = |name: &str| [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat();
        let end = "<|end of text|>";
        let words: Vec<Vec<u8>> =
            bytes.chain(std::iter::once(special(end))).chain(marks.iter().map(|m| special(m))).collect();
        let info = TokRxInfo { tok_unk: Some(INVALID_TOKEN), ..TokRxInfo::new(words.len() as u32, 256) };
        Bytes(TokTrie::from(&info, &words))
    }
}

impl TokenizerEnv for Bytes {
    fn tok_trie(&self) -> &TokTrie {
        &self.0
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.0.greedy_tokenize(bytes)
    }
}
