//! The numbers past which a request is refused, and what decides them.

use std::time::Duration;

/// Longest body of a request in bytes.
pub const MAX_BODY_BYTES: usize = 8 << 20;
/// Bodies as far as they have arrived, and what is built of them, in bytes over all requests.
pub const MAX_BODIES_BYTES: usize = 256 << 20;
/// Answers that are collected or wait to be read, in bytes over all requests.
pub const MAX_ANSWERS_BYTES: usize = 256 << 20;
/// What the log-probabilities and experts of one request's tokens may take, in bytes.
pub const MAX_NUMBERS_BYTES: usize = 32 << 20;
/// Longest text that `/detokenize` gives, in bytes.
pub const MAX_TEXT_BYTES: usize = 32 << 20;
/// Bytes that each request has of either without being counted.
pub const FREE_BYTES: usize = 64 << 10;
/// Maximum number of values in a body, lists of token ids not counted.
pub const MAX_VALUES: usize = 100_000;
/// Maximum number of token ids in one list.
pub const MAX_IDS: usize = 1 << 20;
/// Bodies longer than this are parsed off the threads that serve connections; texts longer than this wait for each
/// other.
pub const LARGE_BODY_BYTES: usize = 64 << 10;
/// What `--memory` keeps for requests and connections: more than conversations take, less than [`MAX_BODIES_BYTES`],
/// which only bodies as long as books reach.
pub const REQUESTS_BYTES: usize = 32 << 20;
/// Time that any body has to arrive.
pub const BODY_TIME: Duration = Duration::from_secs(10);
/// Bytes a second at which the rest of a longer one must arrive.
pub const BODY_RATE: usize = 64 << 10;
/// Time for which the rest of a refused request's body is read, so that the client sees why.
pub const DRAIN_TIME: Duration = Duration::from_secs(5);
/// Time for the head of a request to arrive.
pub const HEAD_TIME: Duration = Duration::from_secs(20);
/// Longest head of a request in bytes.
pub const MAX_HEAD_BYTES: usize = 64 << 10;
/// Longest method in bytes.
pub const MAX_METHOD_BYTES: usize = 32;
/// Maximum number of header fields.
pub const MAX_HEADERS: usize = 100;
/// Time a client may leave its answer unread while the line is full.
pub const WRITE_TIME: Duration = Duration::from_secs(60);
/// How often a connection that waits for its answer is looked at, whether its client is still there.
pub const LOOK_TIME: Duration = Duration::from_millis(250);
/// Maximum number of open connections; fewer where the system allows fewer open files. Another one takes the place of
/// an idle one, or waits.
pub const MAX_CONNECTIONS: usize = 2048;
/// Open files that connections leave to all else: models, processes that try grammars, files of the system.
pub const KEPT_DESCRIPTORS: usize = 64;
/// A stream that has nothing to say for this long says so, so that proxies keep it.
pub const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Maximum number of messages of a conversation.
pub const MAX_MESSAGES: usize = 4096;
/// Maximum number of parts of one message.
pub const MAX_PARTS: usize = 1024;
/// Maximum number of tools of a request, and most calls in one message.
pub const MAX_TOOLS: usize = 128;
/// Maximum number of choices of a request.
pub const MAX_CHOICES: usize = 32;
/// Maximum number of prompts of a request.
pub const MAX_INPUTS: usize = 256;
/// Maximum number of texts to embed or rank: OpenAI's.
pub const MAX_TEXTS: usize = 2048;
/// Maximum number of tokens with a bias.
pub const MAX_BIASES: usize = 1024;
/// Maximum number of alternatives reported for a token.
pub const MAX_TOP_LOGPROBS: usize = 20;
