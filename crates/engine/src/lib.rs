//! Tokens in, text out: tokenizer, chat template, sampler, scheduler. One thread, no network; requests and events are
//! plain values.
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

#[cfg(test)]
#[path = "../../../tests/fixtures.rs"]
mod fixtures;
pub mod folder;
pub mod formats;
pub mod grammar;
pub mod sampler;
pub mod scheduler;
pub mod template;
pub mod tokenizer;

pub use scheduler::{Engine, Error, Event, EventKind, Events, FinishReason, Options, Request, RequestId, Stats, Usage};
