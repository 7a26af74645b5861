//! The engine's thread: it alone owns the [`Engine`], takes commands between steps and hands every event to the channel
//! of its request. Knows no HTTP and no JSON.
//!
//! A channel has room for everything its request can produce, so that sending never waits: a slow reader costs the
//! bytes of its answer and delays no other request. Dropping a [`RequestRun`] cancels it: the engine frees its pages
//! before its next step.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc as std_mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine::grammar;
use engine::scheduler::{
    CacheChange, Engine, Error, EventKind, Events, FinishReason, PageCounts, Request, RequestId, Stats, Usage,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use super::metrics::ModelMetrics;
use super::routing::Routing;

/// What happened to one sequence of a [`RequestRun`].
#[derive(Clone, Debug)]
pub enum Update {
    /// A token, and the text that is certain with it.
    Token { token: u32, text: String, logprobs: Option<TokenLogprobs>, routing: Option<Box<[u16]>> },
    /// A token of its prompt.
    Prompt { token: u32, logprobs: TokenLogprobs },
    /// The hidden state of its prompt.
    Embedding(Vec<f32>),
    /// It is complete.
    Done { reason: FinishReason, usage: Usage },
    /// It failed.
    Failed(String),
    /// It cannot go on by the grammar that its client gave.
    Unheld(String),
    /// The server stops, and its time to finish is over.
    Stopped,
}

impl Update {
    /// Whether nothing follows for its sequence.
    fn is_end(&self) -> bool {
        matches!(self, Update::Done { .. } | Update::Failed(_) | Update::Unheld(_) | Update::Stopped)
    }
}

/// Log-probabilities of a token and of the likeliest ones in its place.
#[derive(Clone, Debug)]
pub struct TokenLogprobs {
    pub token: f32,
    pub top: Vec<(u32, f32)>,
}

/// Why requests were not taken.
#[derive(Debug)]
pub enum Refusal {
    /// The queue is full; retry after this many seconds.
    Full { retry_after: u64 },
    /// Something is wrong with the request.
    Invalid(Error),
    /// The engine takes no more requests.
    Stopped,
}

/// Pause between looks at whether a store has room, while nothing else is to do.
const SAVE_AGAIN: Duration = Duration::from_millis(2);
/// Time that an engine has to save its prompt caches at its end.
const SAVE_AT_END: Duration = Duration::from_secs(5);

/// What is told after each step what has changed in the prefix cache.
pub type Watcher = Box<dyn FnMut(&[CacheChange]) + Send>;

/// Names a [`RequestRun`].
type RunId = u64;

enum Command {
    Submit {
        run: RunId,
        requests: Vec<Request>,
        /// How many of them the engine has at a time.
        at_once: usize,
        updates: mpsc::Sender<(usize, Update)>,
        reply: oneshot::Sender<Result<(), Error>>,
    },
    Cancel(RunId),
    Watch(Watcher),
    /// Drop all cached prefixes; tests count pages after it.
    #[cfg(test)]
    Audit(oneshot::Sender<Result<Stats, String>>),
    Stop,
}

/// The way to the engine's thread.
#[derive(Clone)]
pub struct Worker {
    commands: std_mpsc::Sender<Command>,
    slots: Arc<Semaphore>,
    n_slots: usize,
    shared: Arc<WorkerShared>,
}

struct WorkerShared {
    stats: Mutex<Stats>,
    /// Smoothed time a sequence spends in the engine, for the advice in a refusal.
    typical: Mutex<Duration>,
    max_running: usize,
    context: usize,
    step_tokens: usize,
    routing: Routing,
    alive: AtomicBool,
    n_runs: AtomicU64,
}

/// Tells the rest of the server that the engine's thread ended, however it ended.
struct Ending {
    shared: Arc<WorkerShared>,
    ended: Option<oneshot::Sender<()>>,
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.shared.alive.store(false, Ordering::Release);
        self.ended.take().map(|ended| ended.send(()));
    }
}

impl Worker {
    /// Starts the thread. `max_running` sequences are computed at a time, `max_waiting` more wait. With
    /// `counts_all` the experts of all answers are counted. The receiver hears when the thread has ended.
    pub fn start(
        engine: Engine,
        max_running: usize,
        max_waiting: usize,
        metrics: Arc<ModelMetrics>,
        counts_all: bool,
    ) -> std::io::Result<(Worker, JoinHandle<()>, oneshot::Receiver<()>)> {
        let (commands, inbox) = std_mpsc::channel();
        let shared = Arc::new(WorkerShared {
            stats: Mutex::new(engine.stats()),
            typical: Mutex::new(Duration::from_secs(1)),
            max_running,
            context: engine.context(),
            step_tokens: engine.max_step_tokens(),
            routing: Routing::new(engine.routers(), counts_all),
            alive: AtomicBool::new(true),
            n_runs: AtomicU64::new(0),
        });
        let (ended, has_ended) = oneshot::channel();
        let ending = Ending { shared: shared.clone(), ended: Some(ended) };
        let thread = std::thread::Builder::new().name("engine".into()).spawn(move || {
            let (open, queues) = (Vec::new(), HashMap::new());
            Thread { engine, open, queues, inbox, metrics, ending, watcher: None, changes: Vec::new() }.run();
        })?;
        let n_slots = max_running.saturating_add(max_waiting).min(Semaphore::MAX_PERMITS);
        let slots = Arc::new(Semaphore::new(n_slots));
        Ok((Worker { commands, slots, n_slots, shared }, thread, has_ended))
    }

    /// Hands sequences to the engine, all or none. Of more than are computed at a time, the rest follows as those end,
    /// so that one client's many prompts leave the queue to others.
    pub async fn submit(&self, requests: Vec<Request>) -> Result<RequestRun, Refusal> {
        let n = requests.len();
        let at_once = n.min(self.shared.max_running);
        let slots = self.slots.clone().try_acquire_many_owned(at_once as u32);
        let slots = slots.map_err(|_| Refusal::Full { retry_after: self.retry_after() })?;
        // One event a token, and its end; one a token of a prompt that is scored.
        let scored = |r: &Request| if r.prompt_logprobs.is_some() { r.tokens.len() } else { 0 };
        let room = requests.iter().map(|request| self.room_for(request) + scored(request) + 2).sum::<usize>();
        let (updates, receiver) = mpsc::channel(room.max(1));
        let (reply, answer) = oneshot::channel();
        let id = self.shared.n_runs.fetch_add(1, Ordering::Relaxed);
        let submit = Command::Submit { run: id, requests, at_once, updates, reply };
        self.commands.send(submit).map_err(|_| Refusal::Stopped)?;
        // When the receiver is dropped, the engine's thread sees a closed channel and cancels.
        answer.await.map_err(|_| Refusal::Stopped)?.map_err(Refusal::Invalid)?;
        Ok(RequestRun { id, open: vec![true; n], updates: receiver, commands: self.commands.clone(), _slots: slots })
    }

    /// Returns what the engine was busy with after its last step.
    pub fn stats(&self) -> Stats {
        *lock(&self.shared.stats)
    }

    /// Returns what the routers chose.
    pub fn routing(&self) -> &Routing {
        &self.shared.routing
    }

    /// Maximum number of tokens of the answer to a request.
    pub fn room_for(&self, request: &Request) -> usize {
        request.max_new_tokens.min(self.shared.context.saturating_sub(request.tokens.len()))
    }

    /// Maximum number of tokens of a prompt and its answer.
    pub fn context(&self) -> usize {
        self.shared.context
    }

    /// Maximum number of tokens of a step.
    pub fn step_tokens(&self) -> usize {
        self.shared.step_tokens
    }

    /// Tells `watcher` from now on what changes in the prefix cache.
    pub fn watch(&self, watcher: Watcher) {
        // A thread that has ended changes nothing.
        let _ = self.commands.send(Command::Watch(watcher));
    }

    /// Returns whether no request has a place, running or waiting.
    pub fn is_idle(&self) -> bool {
        self.slots.available_permits() == self.n_slots
    }

    /// Returns whether the thread lives.
    pub fn alive(&self) -> bool {
        self.shared.alive.load(Ordering::Acquire)
    }

    /// Ends the thread; what runs is cut off.
    pub fn stop(&self) {
        // A thread that ended already needs no telling.
        let _ = self.commands.send(Command::Stop);
    }

    /// Stats and the outcome of the engine's audit.
    #[cfg(test)]
    pub async fn audit(&self) -> Result<Stats, String> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Audit(reply)).map_err(|_| "the engine's thread is gone")?;
        answer.await.map_err(|_| "the engine's thread is gone")?
    }

    /// Estimated seconds until a place is free, from the queue's length and recent requests.
    fn retry_after(&self) -> u64 {
        let waiting = self.stats().waiting;
        let rounds = waiting / self.shared.max_running.max(1) + 1;
        let seconds = lock(&self.shared.typical).as_secs_f64() * rounds as f64;
        seconds.ceil().clamp(1.0, 60.0) as u64
    }
}

/// Sequences under way. Dropping it cancels those that are not complete.
pub struct RequestRun {
    id: RunId,
    open: Vec<bool>,
    updates: mpsc::Receiver<(usize, Update)>,
    commands: std_mpsc::Sender<Command>,
    _slots: OwnedSemaphorePermit,
}

impl RequestRun {
    /// Returns the next thing that happened, with the sequence it happened to; `None` when all are complete. Safe to
    /// drop half way.
    pub async fn next(&mut self) -> Option<(usize, Update)> {
        if !self.open.contains(&true) {
            return None;
        }
        match self.updates.recv().await {
            Some((i, update)) => {
                if update.is_end() {
                    self.open[i] = false;
                }
                Some((i, update))
            }
            None => {
                let i = self.open.iter().position(|&open| open)?;
                self.open[i] = false;
                Some((i, Update::Failed("failed to run the request: the engine has stopped".into())))
            }
        }
    }
}

impl Drop for RequestRun {
    fn drop(&mut self) {
        if self.open.contains(&true) {
            // A thread that has ended holds no pages either.
            let _ = self.commands.send(Command::Cancel(self.id));
        }
    }
}

/// A sequence in the engine and where its events go.
struct Open {
    id: RequestId,
    run: RunId,
    index: usize,
    updates: mpsc::Sender<(usize, Update)>,
    /// The client wants to see the experts of each token.
    routing: bool,
    started: Instant,
    last_token: Option<Instant>,
}

/// What is left of a run, in order.
struct Queue {
    requests: VecDeque<Request>,
    /// Index of the next one.
    index: usize,
    updates: mpsc::Sender<(usize, Update)>,
    started: Instant,
}

struct Thread {
    engine: Engine,
    /// In order of their ids.
    open: Vec<Open>,
    /// Runs, not all of whose sequences are in the engine yet.
    queues: HashMap<RunId, Queue>,
    inbox: std_mpsc::Receiver<Command>,
    metrics: Arc<ModelMetrics>,
    ending: Ending,
    watcher: Option<Watcher>,
    /// Of the last step.
    changes: Vec<CacheChange>,
}

impl Thread {
    fn run(mut self) {
        self.serve();
        let start = Instant::now();
        while self.engine.has_unsaved() && start.elapsed() < SAVE_AT_END {
            self.engine.save(SAVE_AT_END);
            std::thread::sleep(SAVE_AGAIN);
        }
    }

    /// Waits for a command; meanwhile prompt caches go to their store, as fast as that takes them.
    fn next_command(&mut self) -> Option<Command> {
        while self.engine.has_unsaved() {
            match self.inbox.recv_timeout(SAVE_AGAIN) {
                Ok(command) => return Some(command),
                Err(std_mpsc::RecvTimeoutError::Timeout) => self.engine.save(SAVE_AGAIN),
                Err(std_mpsc::RecvTimeoutError::Disconnected) => return None,
            }
        }
        self.inbox.recv().ok()
    }

    fn serve(&mut self) {
        // Of the step before, to be delivered while the next one computes, and of the step that is under way.
        let (mut before, mut events) = (Events::new(), Events::new());
        loop {
            if !self.engine.has_work() {
                // What ends may let in what waits behind it.
                self.deliver(&mut before);
            }
            if !self.engine.has_work() {
                let Some(command) = self.next_command() else { return };
                if !self.take(command) {
                    return;
                }
            }
            while let Ok(command) = self.inbox.try_recv() {
                if !self.take(command) {
                    return;
                }
            }
            if self.engine.has_work() {
                self.step(&mut before, &mut events);
                std::mem::swap(&mut before, &mut events);
            }
            if self.engine.is_lost() {
                // A new context is needed for the device: the thread ends, and with it a server of one model.
                let cause = before.iter().find_map(|event| match &event.kind {
                    EventKind::Failed(error) => Some(error.to_string()),
                    _ => None,
                });
                let cause = cause.unwrap_or_else(|| "failed to run the step: the device is lost".into());
                tracing::error!("{cause}: the engine stops");
                self.deliver(&mut before);
                self.fail_all(&cause);
                return;
            }
            self.publish();
        }
    }

    /// Does what a command says; false when it says stop.
    fn take(&mut self, command: Command) -> bool {
        match command {
            Command::Submit { run, requests, at_once, updates, reply } => {
                let checked = requests.iter().try_for_each(|request| self.engine.check(request));
                if checked.is_ok() {
                    let (requests, started) = (requests.into(), Instant::now());
                    self.queues.insert(run, Queue { requests, index: 0, updates, started });
                    (0..at_once).for_each(|_| self.feed(run));
                }
                if reply.send(checked).is_err() {
                    self.cancel_run(run);
                }
            }
            Command::Cancel(run) => self.cancel_run(run),
            Command::Watch(watcher) => {
                self.engine.watch_cache();
                self.watcher = Some(watcher);
            }
            #[cfg(test)]
            Command::Audit(reply) => {
                let _ = reply.send(self.engine.audit().map(|()| self.engine.stats()));
            }
            Command::Stop => {
                self.end_all(&Update::Stopped);
                return false;
            }
        }
        true
    }

    /// Hands the next sequence of a run to the engine, if there is one.
    fn feed(&mut self, run: RunId) {
        let Some(queue) = self.queues.get_mut(&run) else { return };
        while let Some(mut request) = queue.requests.pop_front() {
            let index = queue.index;
            queue.index += 1;
            let routing = request.routing;
            request.routing |= self.ending.shared.routing.counts_all();
            match self.engine.submit(request) {
                Ok(id) => {
                    let (updates, started) = (queue.updates.clone(), queue.started);
                    self.open.push(Open { id, run, index, updates, routing, started, last_token: None });
                    break;
                }
                // It was in order when it was checked, so that this one is the server's.
                Err(error) => {
                    self.metrics.failed.add(1);
                    let _ = queue.updates.try_send((index, Update::Failed(error.to_string())));
                }
            }
        }
        if queue.requests.is_empty() {
            self.queues.remove(&run);
        }
    }

    fn cancel_run(&mut self, run: RunId) {
        self.queues.remove(&run);
        let ids: Vec<_> = self.open.iter().filter(|open| open.run == run).map(|open| open.id).collect();
        ids.into_iter().for_each(|id| self.cancel(id));
    }

    fn cancel(&mut self, id: RequestId) {
        if self.engine.cancel(id) {
            self.metrics.cancelled.add(1);
        }
        if let Ok(i) = self.open.binary_search_by_key(&id, |open| open.id) {
            self.open.remove(i);
        }
    }

    /// Makes a step, and delivers the events of the step before while it is under way.
    fn step(&mut self, before: &mut Events, events: &mut Events) {
        let start = Instant::now();
        events.clear();
        let begun = self.engine.begin(events);
        self.deliver(before);
        let step = begun.and_then(|_| self.engine.finish(events));
        if let Err(error) = step {
            // A refused batch would be refused again, and its cause is not known.
            tracing::error!(%error, "a step was refused; ending all requests");
            self.deliver(events);
            self.fail_all(&error.to_string());
            return;
        }
        self.metrics.step_seconds.observe(start.elapsed());
    }

    /// Ends all requests with an error.
    fn fail_all(&mut self, why: &str) {
        self.end_all(&Update::Failed(why.into()));
    }

    /// Ends all requests, and tells them why.
    fn end_all(&mut self, why: &Update) {
        for open in std::mem::take(&mut self.open) {
            self.engine.cancel(open.id);
            let _ = open.updates.try_send((open.index, why.clone()));
        }
        for (_, queue) in self.queues.drain() {
            for index in queue.index..queue.index + queue.requests.len() {
                let _ = queue.updates.try_send((index, why.clone()));
            }
        }
    }

    /// Counts the tokens of a sequence that has ended, cancelled ones as far as they came.
    fn count(&self, usage: &Usage) {
        self.metrics.prompt_tokens.add(usage.prompt_computed as u64);
        self.metrics.cached_tokens.add(usage.cached_tokens.min(usage.prompt_computed) as u64);
        self.metrics.generated_tokens.add(usage.generated as u64);
    }

    /// Sends the events of a step to their requests.
    fn deliver(&mut self, events: &mut Events) {
        let now = Instant::now();
        for event in events.iter() {
            if let EventKind::Done { usage, .. } = &event.kind {
                self.count(usage);
            }
            let Ok(i) = self.open.binary_search_by_key(&event.id, |open| open.id) else { continue };
            let open = &mut self.open[i];
            let update = match event.kind {
                EventKind::Token { token, text, logprobs, routing } => {
                    match open.last_token.replace(now) {
                        None => self.metrics.first_token_seconds.observe(now - open.started),
                        Some(last) => self.metrics.between_tokens_seconds.observe(now - last),
                    }
                    let logprobs = logprobs.map(|l| TokenLogprobs { token: l.token, top: l.top.to_vec() });
                    routing.into_iter().for_each(|ids| self.ending.shared.routing.count(ids));
                    Update::Token {
                        token,
                        text: text.to_string(),
                        logprobs,
                        routing: routing.filter(|_| open.routing).map(Box::from),
                    }
                }
                EventKind::Prompt { token, logprobs } => {
                    let logprobs = TokenLogprobs { token: logprobs.token, top: logprobs.top.to_vec() };
                    Update::Prompt { token, logprobs }
                }
                EventKind::Embedding(row) => Update::Embedding(row.to_vec()),
                EventKind::Done { reason, usage } => {
                    let mut typical = lock(&self.ending.shared.typical);
                    *typical = typical.mul_f64(0.9) + (now - open.started).mul_f64(0.1);
                    Update::Done { reason, usage }
                }
                EventKind::Failed(error) => {
                    self.metrics.failed.add(1);
                    tracing::warn!(%error, "a request failed");
                    match error {
                        Error::Grammar(grammar::Error::Broken(_)) => Update::Unheld(error.to_string()),
                        error => Update::Failed(error.to_string()),
                    }
                }
            };
            let ends = update.is_end();
            // The channel has room for all events, so an error means that the receiver is gone.
            let gone = open.updates.try_send((open.index, update)).is_err();
            let run = open.run;
            if ends {
                self.open.remove(i);
                self.feed(run);
            } else if gone {
                self.cancel_run(run);
            }
        }
        events.clear();
    }

    fn publish(&mut self) {
        if let Some(watcher) = &mut self.watcher {
            self.changes.clear();
            self.changes.extend(self.engine.cache_changes());
            if !self.changes.is_empty() {
                watcher(&self.changes);
            }
        }
        *lock(&self.ending.shared.stats) = self.engine.stats();
    }
}

/// Pages in use, as a share of all.
pub fn usage_share(pages: PageCounts) -> f64 {
    if pages.total == 0 { 0.0 } else { pages.used as f64 / pages.total as f64 }
}

/// Locks plain numbers, which a panic elsewhere has not broken.
pub fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
