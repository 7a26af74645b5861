//! What all routes share: the model's text side, the way to the engine, limits and keys.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::{HeaderMap, StatusCode, header};
use engine::formats::Format;
use engine::grammar::{self, Grammars};
use engine::sampler::SamplerParams;
use engine::scheduler::{Error, Request};
use engine::template::ChatTemplate;
use engine::tokenizer::{Encode, Tokenizer};
use subtle::{Choice, ConstantTimeEq};
use tokio::sync::{Semaphore, oneshot};

use super::error::ApiError;
use super::guard::Guard;
use super::limits::{LARGE_BODY_BYTES, MAX_ANSWERS_BYTES, MAX_BODIES_BYTES};
use super::metrics::Metrics;
use super::room::Budget;
use super::worker::{Refusal, Run, Worker};

/// Threads that compute which tokens grammars allow, while the model computes.
const GRAMMAR_THREADS: usize = 2;

/// The state of the server.
pub struct App {
    pub worker: Worker,
    pub metrics: Arc<Metrics>,
    pub tokenizer: Arc<Tokenizer>,
    pub template: Option<ChatTemplate>,
    /// How the model marks thoughts and calls.
    pub format: Format,
    /// The template writes tools; else the server puts them into the messages.
    pub template_knows_tools: bool,
    pub model: ModelInfo,
    /// The model's own sampling.
    pub sampling: SamplerParams,
    pub keys: Keys,
    /// Built at the first request that needs one: a large vocabulary takes a while.
    grammars: OnceLock<Result<Grammars, grammar::Error>>,
    /// Who may ask.
    pub guard: Guard,
    /// For bodies and what is built of them.
    pub bodies: Budget,
    /// For answers that are collected or wait to be read.
    pub answers: Budget,
    /// Large bodies are parsed beside the threads that serve connections.
    parsing: Arc<Semaphore>,
    /// Templates and tokenizers run on few threads: they must not take the engine's cores.
    heavy: Arc<Semaphore>,
    /// Long texts have a thread of their own.
    heaviest: Arc<Semaphore>,
    /// Grammars are compiled beside them: requests without a form do not wait for those that have one.
    forms: Arc<Semaphore>,
    /// Where grammars are tried before.
    trial: Option<Arc<dyn grammar::Trial>>,
    draining: AtomicBool,
}

/// What `/v1/models` says.
#[derive(Clone, Debug)]
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
}

impl App {
    pub fn new(
        worker: Worker,
        metrics: Arc<Metrics>,
        tokenizer: Arc<Tokenizer>,
        template: Option<ChatTemplate>,
        format: Format,
        template_knows_tools: bool,
        model: ModelInfo,
        sampling: SamplerParams,
        keys: Keys,
        guard: Guard,
        trial: Option<Arc<dyn grammar::Trial>>,
    ) -> App {
        App {
            worker,
            metrics,
            tokenizer,
            template,
            format,
            template_knows_tools,
            model,
            sampling,
            keys,
            grammars: OnceLock::new(),
            guard,
            bodies: Budget::new(MAX_BODIES_BYTES),
            answers: Budget::new(MAX_ANSWERS_BYTES),
            parsing: Arc::new(Semaphore::new(2)),
            heavy: Arc::new(Semaphore::new(2)),
            heaviest: Arc::new(Semaphore::new(1)),
            forms: Arc::new(Semaphore::new(2)),
            trial,
            draining: AtomicBool::new(false),
        }
    }

    /// Whether new requests are turned away.
    pub fn draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// From now on new requests are turned away.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// What compiles grammars for the model's vocabulary.
    pub fn grammars(&self) -> Result<&Grammars, grammar::Error> {
        let make = || {
            let grammars = Grammars::new(self.tokenizer.clone(), GRAMMAR_THREADS)?;
            Ok(match &self.trial {
                Some(trial) => grammars.with_trial(trial.clone()),
                None => grammars,
            })
        };
        let made = self.grammars.get_or_init(make);
        made.as_ref().map_err(Clone::clone)
    }

    /// Work on a text of `n_bytes` that waits for nothing, off the threads that serve connections. Short texts do not
    /// wait for long ones.
    pub async fn heavy<T: Send + 'static>(
        &self,
        n_bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if n_bytes > LARGE_BODY_BYTES { behind(&self.heaviest, work).await } else { blocking(&self.heavy, work).await }
    }

    /// As [`App::heavy`], for large bodies.
    pub async fn parse<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        behind(&self.parsing, work).await
    }

    /// As [`App::heavy`], for what compiles grammars. The flag that `work` gets is set when the client has left.
    pub async fn form<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(Arc<AtomicBool>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let left = Left(Arc::default());
        let flag = left.0.clone();
        // The threads that compute masks begin here: at their usual priority, which a thread inherits.
        self.grammars_begin().await?;
        behind(&self.forms, move || work(flag)).await
    }

    async fn grammars_begin(self: &Arc<Self>) -> Result<(), ApiError> {
        if self.grammars.get().is_some() {
            return Ok(());
        }
        let app = self.clone();
        // What goes wrong is said where a grammar is compiled.
        let begin = move || {
            let _ = app.grammars();
            Ok(())
        };
        blocking(&self.heavy, begin).await
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
        if self.draining() {
            return Err(ApiError::stopping());
        }
        self.worker.submit(requests).await.map_err(|refusal| match refusal {
            Refusal::Full { retry_after } => {
                self.metrics.refused.add(1);
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

/// Set when it is dropped: whoever waited has left.
struct Left(Arc<AtomicBool>);

impl Drop for Left {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs long work on a thread of its own, which gives way to those that compute tokens. The permit is free when the
/// work has ended, not when nobody waits for it any more.
async fn behind<T: Send + 'static>(
    permits: &Arc<Semaphore>,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let permit = permits.clone().acquire_owned().await.map_err(|_| ApiError::stopping())?;
    let (reply, answer) = oneshot::channel();
    let work = move || {
        let _permit = permit;
        give_way();
        // Nobody waits for the answer of a client that left.
        let _ = reply.send(work());
    };
    let started = std::thread::Builder::new().name("behind".into()).spawn(work);
    started.map_err(|e| ApiError::internal(format!("start a thread: {e}")))?;
    answer.await.unwrap_or_else(|_| Err(ApiError::internal("prepare the request: it failed")))
}

/// Lowers the priority of this thread, and of those that it starts. Linux alone has priorities of threads here.
fn give_way() {
    #[cfg(target_os = "linux")]
    let _ = rustix::process::setpriority_process(None, 10);
}

/// Runs on a blocking thread. The permit is free when the work has ended, not when nobody waits for it any more.
async fn blocking<T: Send + 'static>(
    permits: &Arc<Semaphore>,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let permit = permits.clone().acquire_owned().await.map_err(|_| ApiError::stopping())?;
    let work = move || {
        let _permit = permit;
        work()
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(ApiError::internal(format!("prepare the request: {error}"))),
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
