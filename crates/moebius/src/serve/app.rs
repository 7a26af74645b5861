//! A loaded model as its routes see it: its text side and the way to its engine. And the keys of a server.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::{HeaderMap, StatusCode, header};
use engine::formats::Format;
use engine::grammar::{self, Grammars};
use engine::sampler::SamplerParams;
use engine::scheduler::{Error, Pooling, Request};
use engine::template::ChatTemplate;
use engine::tokenizer::{Encode, Tokenizer};
use subtle::{ConditionallySelectable, ConstantTimeEq};

use super::common::Common;
use super::error::ApiError;
use super::rerank::Reranker;
use super::worker::{Refusal, RequestRun, Worker, lock};
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
fn too_long(n_tokens: usize, least: &str, context: usize) -> ApiError {
    let why = format!(
        "prompt is too long: {least}{n_tokens} tokens > {context} maximum; this model's maximum context length is \
         {context} tokens (server flag --ctx)"
    );
    ApiError { code: Some(TOO_LONG), ..ApiError::bad(why) }
}

/// The keys that open the server; none: it is open. They can be replaced while it runs.
#[derive(Debug, Default)]
pub struct Keys(Mutex<Arc<[Key]>>);

/// Longest key in bytes.
pub const MAX_KEY_BYTES: usize = 512;
/// Longest name of a key in characters.
const MAX_KEY_NAME: usize = 64;

/// A key, and what the log calls it.
struct Key {
    /// Padded, with its length, so that a comparison takes as long whatever is compared.
    bytes: [u8; MAX_KEY_BYTES],
    len: u64,
    name: Arc<str>,
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

impl Key {
    fn new(key: &str, name: &str) -> Option<Key> {
        let mut bytes = [0; MAX_KEY_BYTES];
        bytes.get_mut(..key.len())?.copy_from_slice(key.as_bytes());
        Some(Key { bytes, len: key.len() as u64, name: name.into() })
    }
}

impl Keys {
    /// One key a line, and its name after `#` where it has one; empty lines and those that begin with `#` are left out.
    pub fn parse(text: &str) -> Result<Keys, String> {
        // An editor's mark at the start is no part of the first key.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let lines = text.lines().map(str::trim).zip(1..);
        let lines = lines.filter(|(line, _)| !line.is_empty() && !line.starts_with('#'));
        let key = |(line, number): (&str, usize)| {
            let (key, name) = line.split_once(" #").unwrap_or((line, ""));
            match super::log::cut(name.trim(), MAX_KEY_NAME) {
                "" => Key::new(key.trim(), &format!("line {number}")),
                name => Key::new(key.trim(), name),
            }
        };
        let keys: Option<Arc<[Key]>> = lines.map(key).collect();
        match keys {
            Some(keys) if keys.is_empty() => Err("it holds no key".into()),
            Some(keys) => Ok(Keys(Mutex::new(keys))),
            None => Err(format!("a key has at most {MAX_KEY_BYTES} bytes")),
        }
    }

    /// Returns whether anyone may ask.
    pub fn is_empty(&self) -> bool {
        self.all().is_empty()
    }

    /// Takes other keys from now on; how many those are.
    pub fn replace(&self, keys: &Keys) -> usize {
        let keys = keys.all();
        *lock(&self.0) = keys.clone();
        keys.len()
    }

    fn all(&self) -> Arc<[Key]> {
        lock(&self.0).clone()
    }

    /// Returns the name of the key that the request brings, as a bearer token or as `x-api-key`; none where it is open.
    ///
    /// # Errors
    /// It brings none of the keys.
    pub fn check(&self, headers: &HeaderMap) -> Result<Option<Arc<str>>, ApiError> {
        let keys = self.all();
        if keys.is_empty() {
            return Ok(None);
        }
        let bearer = |value: &str| {
            let (scheme, key) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| key.trim().to_string())
        };
        let header = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let given = header(header::AUTHORIZATION).and_then(bearer);
        let given = given.or_else(|| header(header::HeaderName::from_static("x-api-key")).map(String::from));
        let given = given.as_deref().and_then(|given| Key::new(given, ""));
        let found = given.and_then(|given| {
            // All are compared, whichever it is.
            let equal = |key: &Key| key.bytes[..].ct_eq(&given.bytes[..]) & key.len.ct_eq(&given.len);
            let pick = |found: u64, (key, i): (&Key, u64)| u64::conditional_select(&found, &i, equal(key));
            usize::try_from(keys.iter().zip(0..).fold(u64::MAX, pick)).ok()
        });
        match found.and_then(|i| keys.get(i)) {
            Some(key) => Ok(Some(key.name.clone())),
            None => Err(ApiError {
                code: Some("invalid_api_key"),
                ..ApiError::new(
                    StatusCode::UNAUTHORIZED,
                    "a key is needed: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`",
                )
            }),
        }
    }
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

        // Names are for the log; other keys may take their place.
        let keys = Keys::parse("# ours\nalpha # Alice's laptop\nbe#ta\n").unwrap();
        let name = |keys: &Keys, key: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("x-api-key", key.parse().unwrap());
            keys.check(&headers).ok().flatten().map(|name| name.to_string())
        };
        assert_eq!(name(&keys, "alpha").as_deref(), Some("Alice's laptop"));
        assert_eq!(name(&keys, "be#ta").as_deref(), Some("line 3"));
        assert_eq!(name(&keys, "be"), None);
        assert_eq!(keys.replace(&Keys::parse("gamma").unwrap()), 1);
        assert_eq!((name(&keys, "alpha"), name(&keys, "gamma").as_deref()), (None, Some("line 1")));
    }
}
