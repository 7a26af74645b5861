//! What all models of a server share: budgets of memory for requests, few threads for heavy work, numbers.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use engine::grammar::Trial;
use tokio::sync::{Semaphore, watch};

use super::error::ApiError;
use super::limits::{LARGE_BODY_BYTES, MAX_ANSWERS_BYTES, MAX_BODIES_BYTES};
use super::metrics::Metrics;
use super::room::Budget;
use super::stored::Stored;
use super::worker::lock;
use crate::args::{OnFull, ServeArgs};

/// What a server does with conversations that say nothing of it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Conversations {
    /// Maximum number of tokens of a thought.
    pub most_thought: Option<usize>,
    /// Oldest turns are left out of conversations that do not fit the context.
    pub trims: bool,
    /// Bytes for responses that are stored; none are where it is 0.
    pub stored_bytes: usize,
}

impl Conversations {
    /// Of the flags of `moebius serve`.
    pub fn of(args: &ServeArgs) -> Conversations {
        let most_thought = args.think_budget.and_then(|n| usize::try_from(n).ok());
        Conversations {
            most_thought,
            trims: args.on_full == OnFull::Trim,
            stored_bytes: args.store_responses.unwrap_or(0),
        }
    }
}

/// The state of a server beside its models.
pub struct Common {
    pub metrics: Arc<Metrics>,
    /// For bodies and what is built of them.
    pub bodies: Budget,
    /// For answers that are collected or wait to be read.
    pub answers: Budget,
    /// What requests leave open of conversations.
    pub conversations: Conversations,
    /// Responses by whose ids conversations go on, where they are stored.
    pub responses: Option<Arc<Stored>>,
    /// Where grammars are tried before they are compiled.
    pub trial: Option<Arc<dyn Trial>>,
    /// Large bodies are parsed beside the threads that serve connections.
    parsing: Arc<Semaphore>,
    /// Templates and tokenizers run on few threads: they must not take the engine's cores.
    heavy: Arc<Semaphore>,
    /// Long texts have a thread of their own.
    heaviest: Arc<Semaphore>,
    /// Encoders see one image at a time; texts do not wait for images.
    images: Arc<Semaphore>,
    /// Grammars are compiled beside them: requests without a form do not wait for those that have one.
    forms: Arc<Semaphore>,
    draining: watch::Sender<bool>,
    /// How long models stay after their last request, where one said so; none where models stay whatever is said.
    kept: Mutex<Option<HashMap<String, Duration>>>,
}

impl Common {
    pub fn new(trial: Option<Arc<dyn Trial>>, conversations: Conversations) -> Common {
        Common {
            conversations,
            responses: (conversations.stored_bytes > 0).then(|| Stored::new(conversations.stored_bytes)),
            metrics: Arc::default(),
            bodies: Budget::new(MAX_BODIES_BYTES),
            answers: Budget::new(MAX_ANSWERS_BYTES),
            trial,
            parsing: Arc::new(Semaphore::new(2)),
            heavy: Arc::new(Semaphore::new(2)),
            heaviest: Arc::new(Semaphore::new(1)),
            images: Arc::new(Semaphore::new(1)),
            forms: Arc::new(Semaphore::new(2)),
            draining: watch::Sender::new(false),
            kept: Mutex::new(None),
        }
    }

    /// Models are unloaded from now on when their time is over.
    pub fn unloads(&self) {
        lock(&self.kept).get_or_insert_default();
    }

    /// Keeps a model for so long after its last request, [`Duration::MAX`] for good; false where models stay anyway.
    pub fn keep(&self, id: &str, time: Duration) -> bool {
        lock(&self.kept).as_mut().map(|kept| kept.insert(id.into(), time)).is_some()
    }

    /// Returns what was said last of a model.
    pub fn kept(&self, id: &str) -> Option<Duration> {
        lock(&self.kept).as_ref()?.get(id).copied()
    }

    /// A model is unloaded: what was said of it holds no longer.
    pub fn forget(&self, id: &str) {
        lock(&self.kept).as_mut().map(|kept| kept.remove(id));
    }

    /// Returns whether new requests are turned away.
    pub fn draining(&self) -> bool {
        *self.draining.borrow()
    }

    /// From now on new requests are turned away.
    pub fn drain(&self) {
        self.draining.send_replace(true);
    }

    /// Returns when new requests are turned away.
    pub async fn drained(&self) {
        // The sender is part of `self`.
        let _ = self.draining.subscribe().wait_for(|&draining| draining).await;
    }

    /// Work on a text of `n_bytes` that waits for nothing, off the threads that serve connections. Short texts do not
    /// wait for long ones.
    pub async fn heavy<T: Send + 'static>(
        &self,
        n_bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        blocking(if n_bytes > LARGE_BODY_BYTES { &self.heaviest } else { &self.heavy }, work).await
    }

    /// As [`Common::heavy`], for large bodies.
    pub async fn parse<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        blocking(&self.parsing, work).await
    }

    /// As [`Common::heavy`], for what compiles grammars. The flag that `work` gets is set when the client has left.
    pub async fn form<T: Send + 'static>(
        &self,
        work: impl FnOnce(Arc<AtomicBool>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        until_left(&self.forms, work).await
    }

    /// As [`Common::form`], for texts with images where there are some.
    pub async fn see<T: Send + 'static>(
        &self,
        n_images: usize,
        n_bytes: usize,
        work: impl FnOnce(Arc<AtomicBool>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        match n_images {
            0 => self.heavy(n_bytes, move || work(Arc::default())).await,
            _ => until_left(&self.images, work).await,
        }
    }
}

async fn until_left<T: Send + 'static>(
    permits: &Arc<Semaphore>,
    work: impl FnOnce(Arc<AtomicBool>) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let left = Left(Arc::default());
    let flag = left.0.clone();
    blocking(permits, move || work(flag)).await
}

/// Set when it is dropped: whoever waited has left.
struct Left(Arc<AtomicBool>);

impl Drop for Left {
    fn drop(&mut self) {
        self.0.store(true, std::sync::atomic::Ordering::Relaxed);
    }
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
        Err(error) => Err(ApiError::internal(format!("failed to prepare the request: {error}"))),
    }
}
