//! A loaded model as its routes see it: its text side and the way to its engine. And the keys of a server.

use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::{HeaderMap, StatusCode, header};
use engine::formats::Format;
use engine::grammar::{self, Grammars};
use engine::sampler::SamplerParams;
use engine::scheduler::{Error, Pooling, Request};
use engine::template::ChatTemplate;
use engine::tokenizer::{Encode, Tokenizer};
use subtle::{Choice, ConstantTimeEq};

use super::common::Common;
use super::error::ApiError;
use super::rerank::Reranker;
use super::worker::{Refusal, Run, Worker};

/// Threads that compute which tokens grammars allow, while the model computes.
const GRAMMAR_THREADS: usize = 2;

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
    pub model: ModelInfo,
    /// The model's own sampling.
    pub sampling: SamplerParams,
    /// How it makes one vector of a text.
    pub pooling: Pooling,
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
    pub sampling: SamplerParams,
}

impl App {
    /// What compiles grammars for the model's vocabulary.
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

    /// A request with the model's defaults and a fresh seed.
    pub fn request(&self, tokens: Vec<u32>) -> Request {
        let mut request = Request::new(tokens);
        request.sampling = self.sampling.clone();
        request.sampling.seed = random();
        request
    }

    /// Hands sequences to the engine.
    pub async fn submit(&self, requests: Vec<Request>) -> Result<Run, ApiError> {
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
                let (code, n) = (Some("context_length_exceeded"), prompt.len());
                let why = format!("the prompt has {n} bytes, the context is {context} tokens: at most {limit} bytes");
                Err(ApiError { code, ..ApiError::bad(why) })
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

/// What the engine says about a request, as the client's fault.
fn invalid(error: &Error) -> ApiError {
    let text = error.to_string();
    let message = text.strip_prefix("submit request: ").unwrap_or(&text);
    let code = matches!(error, Error::PromptTooLong { .. }).then_some("context_length_exceeded");
    ApiError { code, ..ApiError::bad(message) }
}

/// The keys that open the server; none: it is open.
#[derive(Clone, Debug, Default)]
pub struct Keys(Vec<PaddedKey>);

/// Longest key in bytes.
pub const MAX_KEY_BYTES: usize = 512;

/// A key and its length, so that a comparison takes as long whatever is compared.
#[derive(Clone, Debug)]
struct PaddedKey([u8; MAX_KEY_BYTES], u64);

impl PaddedKey {
    fn new(key: &str) -> Option<PaddedKey> {
        let mut padded = [0; MAX_KEY_BYTES];
        padded.get_mut(..key.len())?.copy_from_slice(key.as_bytes());
        Some(PaddedKey(padded, key.len() as u64))
    }
}

impl Keys {
    /// One key a line; empty lines and those that begin with `#` are left out.
    pub fn parse(text: &str) -> Result<Keys, String> {
        // An editor's mark at the start is no part of the first key.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let keys: Option<Vec<_>> = lines.map(PaddedKey::new).collect();
        match keys {
            Some(keys) if keys.is_empty() => Err("it holds no key".into()),
            Some(keys) => Ok(Keys(keys)),
            None => Err(format!("a key has at most {MAX_KEY_BYTES} bytes")),
        }
    }

    /// Whether anyone may ask.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the request brings one of the keys, as a bearer token or as `x-api-key`.
    pub fn check(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        if self.0.is_empty() {
            return Ok(());
        }
        let bearer = |value: &str| {
            let (scheme, key) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| key.trim().to_string())
        };
        let header = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let given = header(header::AUTHORIZATION).and_then(bearer);
        let given = given.or_else(|| header(header::HeaderName::from_static("x-api-key")).map(String::from));
        let given = given.as_deref().and_then(PaddedKey::new);
        let matches = given.is_some_and(|given| {
            let equal = |key: &PaddedKey| key.0[..].ct_eq(&given.0[..]) & key.1.ct_eq(&given.1);
            self.0.iter().fold(Choice::from(0), |any, key| any | equal(key)).into()
        });
        if matches {
            return Ok(());
        }
        Err(ApiError {
            code: Some("invalid_api_key"),
            ..ApiError::new(
                StatusCode::UNAUTHORIZED,
                "a key is needed: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`",
            )
        })
    }
}

/// A random u64 for ids and seeds. Not cryptographic.
pub fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // Every state of the standard library's hasher has fresh keys.
    std::hash::RandomState::new().build_hasher().finish()
}

/// An id with a prefix, as the APIs have them.
pub fn id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:08x}", random(), random() as u32)
}

/// Seconds since 1970.
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_open_and_nothing_else_does() {
        let keys = Keys::parse("\u{feff}# ours\nalpha\n\n beta \n").unwrap();
        let cases = [
            (Some(("authorization", "Bearer alpha")), true),
            (Some(("authorization", "bearer beta")), true),
            (Some(("x-api-key", "beta")), true),
            (Some(("authorization", "Bearer alph")), false),
            (Some(("authorization", "Bearer alpha\u{0}")), false),
            (Some(("authorization", "Basic alpha")), false),
            (Some(("x-api-key", "")), false),
            (None, false),
        ];
        for (given, opens) in cases {
            let mut headers = HeaderMap::new();
            if let Some((name, value)) = given {
                let Ok(value) = value.parse() else { continue };
                headers.insert(header::HeaderName::from_static(name), value);
            }
            assert_eq!(keys.check(&headers).is_ok(), opens, "{given:?}");
        }
        let mut headers = HeaderMap::new();
        headers.insert("x-api-key", "first".parse().unwrap());
        assert!(Keys::parse("\u{feff}first\n").unwrap().check(&headers).is_ok());
        assert!(Keys::default().check(&HeaderMap::new()).is_ok());
        assert!(Keys::parse("# nothing\n").is_err());
        assert!(Keys::parse(&"x".repeat(MAX_KEY_BYTES + 1)).is_err());
    }
}
