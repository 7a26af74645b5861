//! The engine as Dynamo's worker drives it: start, answers, metrics, health, and an end that lets answers finish.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use dynamo_backend_common::{
    BackendError, CompletionUsage, ComponentSnapshot, DynamoError, EngineConfig, ErrorType, GenerateContext,
    KvEventPublisher, KvEventSource, LLMEngine, LLMEngineOutput, LLMEngineOutputExt, LlmRegistration, MetricsBindings,
    MetricsCtx, PreprocessedRequest, PromptTokensDetails, SnapshotPublisher, StopReason, TopLogprob, usage,
};
use futures::FutureExt;
use futures::stream::BoxStream;
use moebius::local::Local;
use moebius::local::tokens::{Answer, FinishReason, Refused, Step, Usage};
use serde_json::{Value, json};

use crate::args::Args;
use crate::cache::{Blocks, Namespaces};
use crate::{error, request};

/// The one rank of a worker.
const RANK: u32 = 0;
/// Pause between reports of the load.
const REPORT: Duration = Duration::from_millis(100);
/// Time after which an unchanged load is reported again, to routers that have come since.
const REPORT_AGAIN: Duration = Duration::from_secs(2);
/// Pause between looks at whether all answers are complete.
const LOOK: Duration = Duration::from_millis(20);

/// A worker's engine.
pub struct Moebius {
    args: Args,
    /// From its start to its end.
    local: Mutex<Option<Handle>>,
    namespaces: Arc<Mutex<Namespaces>>,
}

impl Moebius {
    /// Returns an engine that has loaded nothing yet.
    pub fn new(args: Args) -> Moebius {
        Moebius { args, local: Mutex::new(None), namespaces: Arc::default() }
    }

    fn local(&self) -> Result<Handle, DynamoError> {
        let closed = || error(BackendError::EngineShutdown, "failed to use the model: it is not loaded");
        lock(&self.local).clone().ok_or_else(closed)
    }
}

#[async_trait]
impl LLMEngine for Moebius {
    async fn start(&self, _worker_id: u64) -> Result<EngineConfig, DynamoError> {
        let flags = self.args.engine_flags();
        // It starts a runtime for its own routes, which may not happen on a thread of this one.
        let opened = tokio::task::spawn_blocking(move || Local::open(flags)).await;
        let opened = opened.map_err(|why| error(BackendError::Unknown, format!("failed to load the model: {why}")))?;
        let local = Handle(Some(opened.map_err(|why| error(BackendError::Unknown, moebius::causes(&why)))?));
        let (about, room) = (local.about(), local.room());
        local.notes.iter().for_each(|note| tracing::info!("{note}"));
        tracing::info!(
            model = about.name,
            context = room.context,
            pages = room.pages,
            parallel = room.parallel,
            "{} on {}",
            about.description,
            local.backend
        );
        *lock(&self.local) = Some(local);
        Ok(EngineConfig {
            model: about.name,
            served_model_name: self.args.name.clone(),
            llm: Some(LlmRegistration {
                context_length: u32::try_from(room.context).ok(),
                kv_cache_block_size: u32::try_from(room.page).ok(),
                total_kv_blocks: Some(room.pages as u64),
                max_num_seqs: Some(room.parallel as u64),
                max_num_batched_tokens: Some(room.step as u64),
                ..LlmRegistration::default()
            }),
            ..EngineConfig::default()
        })
    }

    async fn generate(
        &self,
        from: PreprocessedRequest,
        ctx: GenerateContext,
    ) -> Result<BoxStream<'static, Result<LLMEngineOutput, DynamoError>>, DynamoError> {
        let local = self.local()?;
        let n_prompt = from.token_ids.len();
        let mut to = local.request(from.token_ids.to_vec());
        request::apply(&from, &mut to)?;
        let namespace = from.routing.as_ref().and_then(|routing| routing.cache_namespace.as_deref());
        to.cache_salt = lock(&self.namespaces).salt(namespace);
        let rule = request::rule(&from.sampling_options)?;
        let most_thought = from.stop_conditions.max_thinking_tokens.map(|n| n as usize);
        if rule.is_some() || most_thought.is_some() {
            let thinks = from.require_reasoning || most_thought.is_some();
            let made = local.constraint(rule, thinks, most_thought, &from.token_ids);
            to.constraint = tokio::select! {
                made = made => made.map_err(refused)?,
                () = ctx.stopped() => return Ok(cancelled_at_once(n_prompt)),
            };
        }
        let ends = Ends {
            max_tokens: to.max_new_tokens.min(local.room().context.saturating_sub(n_prompt)),
            tokens: to.stop_tokens.clone(),
            own: from.stop_conditions.stop_token_ids.unwrap_or_default(),
        };
        let answer = local.submit(to).await.map_err(refused)?;
        Ok(stream(answer, ctx, n_prompt, ends))
    }

    async fn cleanup(&self) -> Result<(), DynamoError> {
        let Some(local) = lock(&self.local).take() else { return Ok(()) };
        // The frontend knows by now that this worker goes, and sends nothing new.
        let start = Instant::now();
        let patience = Duration::from_secs(self.args.drain);
        if !local.is_idle() {
            tracing::info!(seconds = self.args.drain, "waiting for running answers to finish");
        }
        while !local.is_idle() && local.is_alive() && start.elapsed() < patience {
            tokio::time::sleep(LOOK).await;
        }
        if !local.is_idle() {
            tracing::warn!("the time for running answers is over: cutting them off");
        }
        let closed = tokio::task::spawn_blocking(move || local.close()).await;
        match closed {
            Ok(Ok(())) => Ok(()),
            Ok(Err(why)) => Err(error(BackendError::EngineShutdown, moebius::causes(&why))),
            Err(why) => Err(error(BackendError::EngineShutdown, format!("failed to close the model: {why}"))),
        }
    }

    async fn kv_event_sources(&self) -> Result<Vec<KvEventSource>, DynamoError> {
        if self.args.no_kv_events {
            return Ok(Vec::new());
        }
        let (local, namespaces) = (self.local()?, self.namespaces.clone());
        let on_ready = move |publisher: Arc<KvEventPublisher>| {
            let mut blocks = Blocks::default();
            local.watch_cache(move |changes| {
                let events = blocks.events(changes, &lock(&namespaces), || publisher.next_event_id());
                // The publisher is gone when the worker ends.
                let _ = publisher.publish_batch(events);
            });
            Ok(())
        };
        Ok(vec![KvEventSource::Push { on_ready: Box::new(on_ready), dp_rank: RANK }])
    }

    async fn setup_metrics(&self, ctx: MetricsCtx<'_>) -> Result<MetricsBindings, DynamoError> {
        let local = self.local()?;
        let weak = local.downgrade();
        ctx.metrics.add_expfmt_callback(Arc::new(move || Ok(weak.upgrade().map_or(String::new(), |l| l.metrics()))));
        let weak = local.downgrade();
        let on_publisher_ready = move |publisher: Arc<SnapshotPublisher>| {
            tokio::spawn(report(weak, publisher));
            Ok(())
        };
        Ok(MetricsBindings { dp_ranks: vec![RANK], on_publisher_ready: Some(Box::new(on_publisher_ready)) })
    }

    async fn health_check_payload(&self) -> Result<Option<Value>, DynamoError> {
        let first = self.local()?.encode("a").first().copied().unwrap_or(0);
        Ok(Some(json!({
            "token_ids": [first],
            "stop_conditions": {"max_tokens": 1},
            "sampling_options": {"temperature": 0.0},
            "output_options": {},
        })))
    }
}

/// A loaded model. What drops it last may not wait, as dropping a runtime does, so that another thread does it.
#[derive(Clone)]
struct Handle(Option<Arc<Local>>);

impl Handle {
    fn downgrade(&self) -> WeakHandle {
        WeakHandle(self.0.as_ref().map(Arc::downgrade).unwrap_or_default())
    }
}

impl std::ops::Deref for Handle {
    type Target = Local;
    fn deref(&self) -> &Local {
        match &self.0 {
            Some(local) => local,
            None => unreachable!("it is taken by dropping alone"),
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Some(local) = self.0.take().and_then(Arc::into_inner) {
            std::thread::spawn(move || drop(local));
        }
    }
}

/// The same, which keeps nothing loaded.
struct WeakHandle(Weak<Local>);

impl WeakHandle {
    fn upgrade(&self) -> Option<Handle> {
        self.0.upgrade().map(|local| Handle(Some(local)))
    }
}

/// Tells the router how full the cache is, until the model is closed.
async fn report(weak: WeakHandle, publisher: Arc<SnapshotPublisher>) {
    let (mut last, mut told) = (None, Instant::now());
    while let Some(local) = weak.upgrade() {
        let pages = local.stats().pages;
        drop(local);
        if last != Some(pages) || told.elapsed() > REPORT_AGAIN {
            (last, told) = (Some(pages), Instant::now());
            let share = if pages.total == 0 { 0.0 } else { pages.used as f32 / pages.total as f32 };
            let snapshot = ComponentSnapshot {
                kv_used_blocks: pages.used as u64,
                kv_total_blocks: pages.total as u64,
                gpu_cache_usage: share,
                kv_cache_hit_rate: None,
                dp_rank: RANK,
            };
            publisher.publish(RANK, snapshot);
        }
        tokio::time::sleep(REPORT).await;
    }
}

/// Returns what the frontend is told of a request that is not taken.
fn refused(why: Refused) -> DynamoError {
    match why {
        Refused::Invalid(why) => error(BackendError::InvalidArgument, why),
        Refused::Closed => error(BackendError::EngineShutdown, why),
        Refused::Busy { .. } => {
            DynamoError::builder().error_type(ErrorType::WorkerOverloaded).message(why.to_string()).build()
        }
        Refused::Failed(why) => error(BackendError::Unknown, why),
    }
}

/// A stream of an answer that was cancelled before it began.
fn cancelled_at_once(n_prompt: usize) -> BoxStream<'static, Result<LLMEngineOutput, DynamoError>> {
    let end = LLMEngineOutput::cancelled().with_usage(usage(n_prompt as u32, 0));
    Box::pin(futures::stream::iter([Ok(end)]))
}

/// What the frontend takes for the end of an answer. It then reads no further, so that the end, which says what was
/// cached, must come with the last token.
struct Ends {
    /// Number of tokens.
    max_tokens: usize,
    /// Tokens that end it.
    tokens: Vec<u32>,
    /// Those of them that the client has listed, which the end names.
    own: Vec<u32>,
}

/// Turns an answer into what the frontend reads: tokens as they come, and one end. Dropping the stream cancels the
/// request.
fn stream(
    mut answer: Answer,
    ctx: GenerateContext,
    n_prompt: usize,
    ends: Ends,
) -> BoxStream<'static, Result<LLMEngineOutput, DynamoError>> {
    Box::pin(async_stream::stream! {
        let mut piece = Piece::default();
        loop {
            let step = tokio::select! {
                biased;
                () = ctx.stopped() => {
                    drop(answer);
                    yield Ok(LLMEngineOutput::cancelled().with_usage(usage(n_prompt as u32, piece.n_sent)));
                    return;
                }
                step = answer.next() => step,
            };
            // What has come meanwhile goes along, the end in particular.
            let mut next = Some(step);
            let mut end = None;
            while let Some(step) = next.take() {
                match step {
                    Some(Step::Token { token, logprob, top }) => {
                        piece.push(token, logprob, top);
                        next = match piece.len() >= ends.max_tokens || ends.tokens.contains(&token) {
                            true => Some(answer.next().await),
                            false => answer.next().now_or_never(),
                        };
                    }
                    step => end = Some(step),
                }
            }
            let Some(end) = end else {
                yield Ok(piece.take());
                continue;
            };
            // Only tokens of a complete answer go with its end.
            let outcome = match end {
                Some(Step::Done { reason, usage }) => Ok((reason, usage)),
                Some(Step::Unheld(why)) => Err(error(BackendError::InvalidArgument, why)),
                Some(Step::Failed(why)) => Err(error(BackendError::Unknown, why)),
                Some(Step::Closed) => {
                    Err(error(BackendError::EngineShutdown, "failed to finish the answer: the worker stops"))
                }
                Some(Step::Token { .. }) | None => {
                    Err(error(BackendError::StreamIncomplete, "failed to finish the answer: its end is missing"))
                }
            };
            match outcome {
                Ok((reason, usage)) => yield Ok(finish(piece, reason, &usage, &ends.own)),
                Err(why) => {
                    if !piece.output.token_ids.is_empty() {
                        yield Ok(piece.take());
                    }
                    yield Err(why);
                }
            }
            return;
        }
    })
}

/// Tokens that are not sent yet.
#[derive(Default)]
struct Piece {
    output: LLMEngineOutput,
    /// Tokens that were.
    n_sent: u32,
    last: Option<u32>,
}

impl Piece {
    fn push(&mut self, token: u32, logprob: Option<f32>, top: Vec<(u32, f32)>) {
        self.output.token_ids.push(token);
        self.last = Some(token);
        let Some(logprob) = logprob else { return };
        self.output.log_probs.get_or_insert_default().push(f64::from(logprob));
        let top = top.into_iter().zip(1..).map(|((token_id, logprob), rank)| TopLogprob {
            rank,
            token_id,
            token: None,
            logprob: f64::from(logprob),
            bytes: None,
        });
        self.output.top_logprobs.get_or_insert_default().push(top.collect());
    }

    /// Tokens of the answer so far.
    fn len(&self) -> usize {
        self.n_sent as usize + self.output.token_ids.len()
    }

    fn take(&mut self) -> LLMEngineOutput {
        self.n_sent += self.output.token_ids.len() as u32;
        std::mem::take(&mut self.output)
    }
}

/// Returns the end of a complete answer, with its last tokens.
fn finish(mut piece: Piece, reason: FinishReason, counts: &Usage, stops: &[u32]) -> LLMEngineOutput {
    let last = piece.take();
    let end = match reason {
        FinishReason::Stop | FinishReason::StopString(_) => LLMEngineOutput::stop(),
        FinishReason::Length | FinishReason::ContextFull => LLMEngineOutput::length(),
        FinishReason::Cancelled => LLMEngineOutput::cancelled(),
    };
    let by = piece.last.filter(|token| reason == FinishReason::Stop && stops.contains(token));
    let cached = PromptTokensDetails { cached_tokens: Some(counts.cached_tokens as u32), ..Default::default() };
    LLMEngineOutput {
        finish_reason: end.finish_reason,
        stop_reason: by.map(|token| StopReason::Int(token.into())),
        completion_usage: Some(CompletionUsage {
            prompt_tokens_details: Some(cached),
            ..usage(counts.prompt_tokens as u32, counts.generated as u32)
        }),
        ..last
    }
}

/// Locks what a panic elsewhere has not broken.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
