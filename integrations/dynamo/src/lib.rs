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

/// Returns an error that the frontend knows the kind of. Clients are told what is wrong with a request of theirs, and
/// nothing of what is wrong here.
pub fn error(kind: BackendError, message: impl Display) -> DynamoError {
    let (message, is_theirs) = (message.to_string(), kind == BackendError::InvalidArgument);
    let error = DynamoError::builder().error_type(ErrorType::Backend(kind)).message(message.clone());
    if is_theirs { error.public_message(message).build() } else { error.build() }
}
