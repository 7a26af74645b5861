//! The engine's input and output: values, no behavior.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use backend::StepError;

use crate::grammar::{self, Constraint};
use crate::images::Pictures;
use crate::sampler::{self, SamplerParams};
use crate::tokenizer::Decode;

/// Identifies a request as long as its engine lives; later requests have greater ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// A prompt and how to continue it.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt, at least one token and fewer than the context holds.
    pub tokens: Vec<u32>,
    /// Maximum number of generated tokens. With 0 the prompt is only computed and kept in the prefix cache.
    pub max_new_tokens: usize,
    /// Parameters of the sampler.
    pub sampling: SamplerParams,
    /// Required form of the answer.
    pub constraint: Option<Constraint>,
    /// Texts that end the answer, at most [`super::MAX_STOP_STRINGS`] of at most [`super::MAX_STOP_BYTES`] bytes.
    pub stop_strings: Vec<String>,
    /// Whether the stop string that ended the answer is part of its text.
    pub include_stop_string: bool,
    /// Tokens that end the answer, besides the vocabulary's own ends of generation.
    pub stop_tokens: Vec<u32>,
    /// Ignore the vocabulary's own ends of generation.
    pub ignore_eos: bool,
    /// Number of tokens before which no token that would end the answer is chosen; a constraint or a stop string may
    /// end it earlier.
    pub min_new_tokens: usize,
    /// How tokens become text; by default without special tokens, as a continuation of the prompt's text.
    pub decode: Decode,
    /// Special tokens whose names are part of the text even when others are omitted: the marks of a format
    /// ([`crate::formats::Format::shown`]).
    pub shown: Vec<u32>,
    /// Report the log-probability of each token and of this many most likely tokens.
    pub logprobs: Option<usize>,
    /// Report the log-probability of each prompt token but the first, and of this many most likely tokens in its place.
    /// The prompt is then computed and not taken from the prefix cache.
    pub prompt_logprobs: Option<usize>,
    /// Report which experts the model chose for each token.
    pub routing: bool,
    /// Report the hidden state of the prompt, and generate nothing. But for [`Pooling::Last`], the prompt is then
    /// computed and not taken from the prefix cache.
    pub embedding: Option<Pooling>,
    /// Index of the first token of the second text, where the prompt is a pair of texts for a model of whole texts
    /// ([`backend::Kinds::whole`]).
    pub second: Option<usize>,
    /// The images in the prompt, for a program that takes their features ([`backend::Program::d_input`]).
    pub pictures: Option<Arc<Pictures>>,
    /// Requests of higher priority are admitted first and preempted last.
    pub priority: i32,
    /// Requests share cached prefixes only with requests of the same salt.
    pub cache_salt: u64,
}

impl Request {
    /// Returns a request with the defaults: default sampling, no stop strings, no limit but the context.
    pub fn new(tokens: Vec<u32>) -> Request {
        Request {
            tokens,
            max_new_tokens: usize::MAX,
            sampling: SamplerParams::default(),
            constraint: None,
            stop_strings: Vec::new(),
            include_stop_string: false,
            stop_tokens: Vec::new(),
            ignore_eos: false,
            min_new_tokens: 0,
            decode: Decode { skip_special: true, continues: true },
            shown: Vec::new(),
            logprobs: None,
            prompt_logprobs: None,
            routing: false,
            embedding: None,
            second: None,
            pictures: None,
            priority: 0,
            cache_salt: 0,
        }
    }
}

/// How the hidden states of a prompt's tokens become one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pooling {
    /// The last token's, which has seen all others.
    #[default]
    Last,
    /// The first token's.
    First,
    /// The mean of all.
    Mean,
}

/// An event of a request. A request ends with exactly one `Done` or `Failed`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Event<'a> {
    /// The request.
    pub id: RequestId,
    /// The event.
    pub kind: EventKind<'a>,
}

/// Kind of an event.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EventKind<'a> {
    /// A token was generated, including a token that ends the answer.
    Token {
        /// Its id.
        token: u32,
        /// The text that is certain now: whole characters, never part of a stop string. It may be empty, and it may
        /// include text held back before. All texts of a request, concatenated, are its answer.
        text: &'a str,
        /// Set if the request enabled it.
        logprobs: Option<Logprobs<'a>>,
        /// The experts of the position before the token, whose output it was chosen from: for every router of
        /// [`super::Engine::routers`] its ids, best first. Set if the request enabled it.
        routing: Option<&'a [u16]>,
    },
    /// A token of the prompt, if requested: they come in order, before the first generated one.
    Prompt {
        /// Its id.
        token: u32,
        /// What the model thought of it behind the tokens before.
        logprobs: Logprobs<'a>,
    },
    /// The hidden state behind the last norm at the prompt's last token, `[d_model]`, if requested.
    Embedding(&'a [f32]),
    /// The request is finished.
    Done {
        /// The reason.
        reason: FinishReason,
        /// Its tokens and times.
        usage: Usage,
    },
    /// The request cannot continue; others are unaffected.
    Failed(&'a Error),
}

/// Natural logarithms of the model's token probabilities, before sampling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Logprobs<'a> {
    /// Of the generated token.
    pub token: f32,
    /// The most likely tokens, best first.
    pub top: &'a [(u32, f32)],
}

/// Why a request finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The last token is an end of generation or one of the request's stop tokens, or the request's grammar is
    /// complete.
    Stop,
    /// The text reached the stop string at this index of the request.
    StopString(usize),
    /// `max_new_tokens` tokens are generated.
    Length,
    /// Prompt and answer fill the context.
    ContextFull,
    /// [`super::Engine::cancel`] was called. Text held back is dropped.
    Cancelled,
}

/// Tokens and times of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those of them that were computed, or found in the prefix cache: all, unless the request ended before its answer.
    pub prompt_computed: usize,
    /// Those of them found in the prefix cache.
    pub cached_tokens: usize,
    /// Tokens generated, a stop token included.
    pub generated: usize,
    /// Number of preemptions, each of which freed its pages for others.
    pub preemptions: usize,
    /// Durations of its phases.
    pub timings: Timings,
}

/// Durations of a request's phases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// From submission to its admission: it takes part in steps from then on.
    pub queued: Duration,
    /// From there to the first token.
    pub prompt: Duration,
    /// From the first token to the last.
    pub decode: Duration,
}

/// Events with their texts in shared buffers, so that a step writes them without allocating. [`Events::clear`] keeps
/// the memory.
#[derive(Clone, Debug, Default)]
pub struct Events {
    list: Vec<(RequestId, Stored)>,
    text: String,
    top: Vec<(u32, f32)>,
    routing: Vec<u16>,
    hidden: Vec<f32>,
}

#[derive(Clone, Debug)]
enum Stored {
    Token { token: u32, text: Range<usize>, logprob: Option<f32>, top: Range<usize>, routing: Option<Range<usize>> },
    Prompt { token: u32, logprob: f32, top: Range<usize> },
    Embedding(Range<usize>),
    Done { reason: FinishReason, usage: Usage },
    Failed(Error),
}

impl Events {
    /// No events.
    pub fn new() -> Events {
        Events::default()
    }

    /// Removes the events and keeps their memory.
    pub fn clear(&mut self) {
        self.list.clear();
        self.text.clear();
        self.top.clear();
        self.routing.clear();
        self.hidden.clear();
    }

    /// Number of events.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Returns whether there are no events.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The events in the order in which they happened.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Event<'_>> {
        self.list.iter().map(|(id, stored)| {
            let kind = match stored {
                Stored::Token { token, text, logprob, top, routing } => EventKind::Token {
                    token: *token,
                    text: &self.text[text.clone()],
                    logprobs: logprob.map(|token| Logprobs { token, top: &self.top[top.clone()] }),
                    routing: routing.clone().map(|ids| &self.routing[ids]),
                },
                Stored::Prompt { token, logprob, top } => EventKind::Prompt {
                    token: *token,
                    logprobs: Logprobs { token: *logprob, top: &self.top[top.clone()] },
                },
                Stored::Embedding(row) => EventKind::Embedding(&self.hidden[row.clone()]),
                Stored::Done { reason, usage } => EventKind::Done { reason: *reason, usage: *usage },
                Stored::Failed(error) => EventKind::Failed(error),
            };
            Event { id: *id, kind }
        })
    }

    /// Opens a token event: the caller appends its text and top tokens before [`TokenEvent::close`].
    pub(super) fn token(&mut self) -> TokenEvent<'_> {
        TokenEvent { text_start: self.text.len(), top_start: self.top.len(), events: self }
    }

    /// A token of the prompt; `report` appends its most likely tokens and returns its own log-probability.
    pub(super) fn prompt<E>(
        &mut self,
        id: RequestId,
        token: u32,
        report: impl FnOnce(&mut Vec<(u32, f32)>) -> Result<f32, E>,
    ) -> Result<(), E> {
        let first = self.top.len();
        let logprob = report(&mut self.top)?;
        self.list.push((id, Stored::Prompt { token, logprob, top: first..self.top.len() }));
        Ok(())
    }

    pub(super) fn embedding(&mut self, id: RequestId, row: &[f32]) {
        self.hidden.extend_from_slice(row);
        self.list.push((id, Stored::Embedding(self.hidden.len() - row.len()..self.hidden.len())));
    }

    pub(super) fn done(&mut self, id: RequestId, reason: FinishReason, usage: Usage) {
        self.list.push((id, Stored::Done { reason, usage }));
    }

    pub(super) fn failed(&mut self, id: RequestId, error: Error) {
        self.list.push((id, Stored::Failed(error)));
    }
}

/// A token event under construction.
pub(super) struct TokenEvent<'a> {
    events: &'a mut Events,
    text_start: usize,
    top_start: usize,
}

impl TokenEvent<'_> {
    /// Buffer of its text.
    pub fn text(&mut self) -> &mut String {
        &mut self.events.text
    }

    /// Buffer of the most likely tokens.
    pub fn top(&mut self) -> &mut Vec<(u32, f32)> {
        &mut self.events.top
    }

    /// Adds the event.
    pub fn close(self, id: RequestId, token: u32, logprob: Option<f32>, routing: Option<&[u16]>) {
        let Events { list, text, top, routing: chosen, .. } = self.events;
        let (text, top) = (self.text_start..text.len(), self.top_start..top.len());
        let routing = routing.map(|ids| {
            chosen.extend_from_slice(ids);
            chosen.len() - ids.len()..chosen.len()
        });
        list.push((id, Stored::Token { token, text, logprob, top, routing }));
    }
}

/// Why a request was refused or failed, or a step could not be run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// A limit of the engine is invalid.
    #[error("failed to start the engine: {what} is {value}, it must be at least {least}")]
    Limit {
        /// The limit.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The smallest that works.
        least: usize,
    },
    /// The prompt is empty.
    #[error("failed to submit the request: the prompt is empty")]
    EmptyPrompt,
    /// The prompt can never have room for an answer.
    #[error("failed to submit the request: prompt is too long: {n_tokens} tokens, context {context}")]
    PromptTooLong {
        /// Tokens of the prompt.
        n_tokens: usize,
        /// The smallest context that works.
        needed: usize,
        /// The engine's context: positions of a sequence, or of the whole cache where that is less.
        context: usize,
    },
    /// The model writes no text.
    #[error("failed to submit the request: this is an embedding model and writes no text: use {routes}")]
    NoText {
        /// What it is for.
        routes: &'static str,
    },
    /// A token id outside the vocabulary.
    #[error("failed to submit the request: {what} {index} has id {id}, the vocabulary has {n_vocab}")]
    TokenId {
        /// `prompt token`, `stop token` or `logit bias`.
        what: &'static str,
        /// Index of the token in its list.
        index: usize,
        /// Its id.
        id: u32,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// Images that the program or the request cannot have.
    #[error("failed to submit the request: {0}")]
    Images(String),
    /// An invalid stop string.
    #[error("failed to submit the request: {0}")]
    StopStrings(String),
    /// More log-probabilities than allowed.
    #[error("failed to submit the request: logprobs is {asked}, the maximum is {limit}")]
    Logprobs {
        /// The requested number.
        asked: usize,
        /// [`super::MAX_LOGPROBS`].
        limit: usize,
    },
    /// The sampler refused a parameter, or the logits.
    #[error("{0}")]
    Sampler(#[from] sampler::Error),
    /// The grammar could not constrain the answer.
    #[error("{0}")]
    Grammar(#[from] grammar::Error),
    /// A router saw NaN.
    #[error("failed to compute position {position}: the router of layer {layer} saw NaN")]
    Fault {
        /// Position in the request's sequence.
        position: usize,
        /// Layer whose router saw it.
        layer: u32,
    },
    /// The model has no embedding, or it is invalid.
    #[error("failed to compute the embedding: {0}")]
    Embedding(&'static str),
    /// The program refused a token.
    #[error("failed to compute position {position}: token id {id} is outside the program's vocabulary of {n_vocab}")]
    Refused {
        /// Position in the request's sequence.
        position: usize,
        /// The token's id.
        id: u32,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// The program refused the step.
    #[error("{0}")]
    Step(#[from] StepError),
    /// The program returned another number of logits than requested.
    #[error("failed to run the step: the program returned {got} logits, expected {expected}")]
    Logits {
        /// Numbers returned.
        got: usize,
        /// Numbers expected.
        expected: usize,
    },
    /// No sequence could allocate a page.
    #[error(
        "failed to run the step: none of {running} running and {waiting} waiting requests got one of {n_pages} pages"
    )]
    Stalled {
        /// Running requests.
        running: usize,
        /// Waiting requests.
        waiting: usize,
        /// Pages of the cache.
        n_pages: usize,
    },
}
