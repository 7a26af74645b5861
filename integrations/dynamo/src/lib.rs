//! A worker of NVIDIA Dynamo over Moebius: tokens in, tokens out. The frontend does the rest: HTTP, tokens, templates,
//! parsing of answers, and the choice of a worker.
//!
//! ```text
//! frontend ─ PreprocessedRequest ─ request ─ Local ─ Answer ─ engine ─ LLMEngineOutput ─ frontend
//!     router ◄─ stored and removed blocks ─ cache ◄─ changes of the prefix cache ─┘
//! ```

pub mod args;
pub mod cache;
pub mod engine;
pub mod request;
pub mod texts;

use std::fmt::Display;

use dynamo_backend_common::{BackendError, DynamoError, ErrorType};

/// Returns an error that the frontend knows the kind of.
pub fn error(kind: BackendError, message: impl Display) -> DynamoError {
    DynamoError::builder().error_type(ErrorType::Backend(kind)).message(message.to_string()).build()
}
