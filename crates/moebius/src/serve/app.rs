//! A loaded model as its routes see it: its text side and the way to its engine.

use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use engine::formats::Format;
use engine::grammar::{self, Grammars};
use engine::sampler::SamplerParams;
use engine::scheduler::{Error, Pooling, Request};
use engine::template::ChatTemplate;
use engine::tokenizer::{Encode, Tokenizer};

use super::common::Common;
use super::error::ApiError;
use super::rerank::Reranker;
use super::worker::{Refusal, RequestRun, Worker};
use crate::load::{Eyes, Whole};

/// Threads that compute which tokens grammars allow, while the model computes.
const GRAMMAR_THREADS: usize = 2;

/// Code of the error of a prompt that the context has no room for.
pub const TOO_LONG: &str = "context_length_exceeded";

/// A loaded model and the server around it.
pub struct App {
    pub common: Arc<Common>,
    pub worker: Worker,
    pub tokenizer: Arc<Tokenizer>,
    pub template: Option<ChatTemplate>,
    /// How the model marks thoughts and calls.
    pub format: Format,
    /// The template writes tools; else the server puts them into the messages.
    pub template_knows_tools: bool,
    /// The template has a variable for the effort of reasoning; else the effort bounds thoughts.
    pub template_knows_effort: bool,
    pub model: ModelInfo,
    /// The model's own sampling.
    pub sampling: SamplerParams,
    /// How it makes one vector of a text.
    pub pooling: Pooling,
    /// What it makes of whole texts, where it writes none.
    pub whole: Option<Whole>,
    /// How the model sees images, where it does.
    pub eyes: Option<Eyes>,
    /// How it is asked whether a document answers a query, if it was trained for that.
    pub reranker: Option<Reranker>,
    /// Built at the first request that needs one: a large vocabulary takes a while.
    pub grammars: OnceLock<Result<Grammars, grammar::Error>>,
}

/// What lists say of a model, loaded or not.
#[derive(Clone, Debug, Default)]
pub struct ModelInfo {
    pub id: String,
    pub description: String,
    pub arch: String,
    /// `Q4_K_M`, or the weight type that most bytes are in.
    pub file_type: String,
    /// The one that comes with the program.
    pub embedded: bool,
    pub created: u64,
    pub n_params: u64,
    pub size_bytes: u64,
    pub n_vocab: usize,
    /// Tokens of a prompt and its answer: of a loaded model what it has, else what it was trained for.
    pub context: usize,
    pub has_template: bool,
    pub has_thoughts: bool,
    /// Known once it is loaded.
    pub sees_images: bool,
    pub sampling: SamplerParams,
}

impl App {
    /// Returns what compiles grammars for the model's vocabulary.
    pub fn grammars(&self) -> Result<&Grammars, grammar::Error> {
        let make = || {
            let grammars = Grammars::new(self.tokenizer.clone(), GRAMMAR_THREADS)?;
            Ok(match &self.common.trial {
                Some(trial) => grammars.with_trial(trial.clone()),
                None => grammars,
            })
        };
        let made = self.grammars.get_or_init(make);
        made.as_ref().map_err(Clone::clone)
    }

    /// Returns a request with the model's defaults and a fresh seed.
    pub fn request(&self, tokens: Vec<u32>) -> Request {
        let mut request = Request::new(tokens);
        request.sampling = self.sampling.clone();
        request.sampling.seed = random();
        request
    }

    /// Hands sequences to the engine.
    pub async fn submit(&self, requests: Vec<Request>) -> Result<RequestRun, ApiError> {
        if self.common.draining() {
            return Err(ApiError::stopping());
        }
        self.worker.submit(requests).await.map_err(|refusal| match refusal {
            Refusal::Full { retry_after } => {
                self.common.metrics.refused.add(1);
                ApiError::busy("as many requests as allowed are waiting; try again later", retry_after)
            }
            Refusal::Stopped => ApiError::stopping(),
            Refusal::Invalid(error) => invalid(&error),
        })
    }

    /// Refuses a prompt that is longer than the context, whatever it says, before it is cut into tokens.
    pub fn check_length(&self, prompt: &str) -> Result<(), ApiError> {
        let context = self.worker.context();
        match self.tokenizer.max_text_bytes(context) {
            Some(limit) if prompt.len() > limit => {
                // As many tokens as its bytes make at least.
                let n_tokens = (prompt.len() as u128 * context as u128).div_ceil(limit as u128) as usize;
                Err(too_long(n_tokens, "at least ", context))
            }
            _ => Ok(()),
        }
    }

    /// Tokens of text that a template or a client wrote for the model, special tokens included.
    pub fn encode_prompt(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
        let mut tokens = tokenizer.encode(text, Encode { add_special: true, parse_special: true });
        // Templates that write the begin-of-text token themselves would get it twice.
        if let Some(bos) = tokenizer.bos()
            && tokens.starts_with(&[bos, bos])
        {
            tokens.remove(0);
        }
        tokens
    }
}

/// Turns the engine's refusal of a request into the client's error.
fn invalid(error: &Error) -> ApiError {
    let text = error.to_string();
    let message = text.strip_prefix("failed to submit the request: ").unwrap_or(&text);
    match error {
        Error::PromptTooLong { n_tokens, context, .. } => too_long(*n_tokens, "", *context),
        _ => ApiError::bad(message),
    }
}

/// Returns the error of a prompt that the context has no room for, in the words by which agents know that they have to
/// compact a conversation: Anthropic's first, then OpenAI's.
pub fn too_long(n_tokens: usize, least: &str, context: usize) -> ApiError {
    let why = format!(
        "prompt is too long: {least}{n_tokens} tokens > {context} maximum; this model's maximum context length is \
         {context} tokens (server flag --ctx)"
    );
    ApiError { code: Some(TOO_LONG), ..ApiError::bad(why) }
}

/// Returns a random u64 for ids and seeds. Not cryptographic.
pub fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // Every state of the standard library's hasher has fresh keys.
    std::hash::RandomState::new().build_hasher().finish()
}

/// Returns an id with a prefix, as the APIs have them.
pub fn id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:08x}", random(), random() as u32)
}

/// Seconds since 1970.
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
