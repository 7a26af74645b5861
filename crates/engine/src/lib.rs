//! Tokens in, text out: tokenizer, chat template, sampler, scheduler. One thread, no network; requests and events are
//! plain values.
//!
//! ```text
//! messages ─ template ─ text ─ tokenizer ─ Request ─ Engine: scheduler ─ Batch ─ Program
//!                                          Event ◄─ text ◄─ sampler, grammar ◄─ rows ◄─┘
//! ```
//!
//! `examples/embed.rs` answers a prompt with all of it. Parts can be used by themselves:
//!
//! ```
//! use engine::tokenizer::{Encode, Tokenizer};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let checkpoint = checkpoint::open("../../models/fable-29m-a10m-q4_k_m.gguf".as_ref())?;
//! let tokenizer = Tokenizer::load(&checkpoint)?;
//! let ids = tokenizer.encode("Once upon a time", Encode { add_special: false, parse_special: false });
//! assert_eq!(tokenizer.decode(&ids), "Once upon a time");
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

#[cfg(test)]
#[path = "../../../tests/fixtures.rs"]
mod fixtures;
pub mod folder;
pub mod formats;
pub mod grammar;
pub mod images;
pub mod pooling;
pub mod sampler;
pub mod scheduler;
pub mod template;
pub mod tokenizer;

pub use scheduler::{Engine, Error, Event, EventKind, Events, FinishReason, Options, Request, RequestId, Stats, Usage};
