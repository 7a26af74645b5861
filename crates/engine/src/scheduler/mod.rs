//! Continuous batching over a paged cache with shared prefixes: the engine's synchronous core.
//!
//! [`Engine::step`] runs one model step over all runnable sequences: the next token of every running request first,
//! then chunks of prompts, as many tokens as the program takes and the time of a step allows. One thread, no network,
//! no waiting: requests and events are values, and the caller decides when. [`Engine::begin`] and [`Engine::finish`]
//! are the halves of a step: between them a device computes while the caller delivers the events of the step before.
//!
//! # Drafts
//! A [`Drafter`] guesses tokens after the last of a sequence that decodes; where its grammar forces tokens, these take
//! the place of guesses. The step computes them with it, and the sampler works through their rows as long as it chooses
//! what was guessed. So random numbers, grammars and texts move on token by token as they do without drafts, and
//! nothing of them is taken back. What is taken back is memory: only the positions of accepted tokens count as
//! computed, and [`backend::Drafts::commit`] moves the recurrent states past those. The model's own head drafts, too,
//! where it has one ([`Engine::set_head`]), and so may a smaller model
//! ([`Engine::set_draft_model`]). How many drafts a step has is fixed, or decided by what they gain
//! ([`Engine::set_adaptive`]).
//!
//! # Late masks
//! Where the mask of a grammar has not come when the row has, the sequence keeps the row and its memory and sits out
//! the steps of the others until the mask is there. A step waits only when no other sequence has anything to compute,
//! and then not for long, so that commands reach the engine. A sequence whose last mask was slow is not waited for, and
//! where masks have been slow, the grammar takes tokens beside the steps, too: the row is kept until that is done. How
//! late masks may be is bounded ([`crate::grammar`]).
//!
//! # Prompts in company
//! While answers run, each step is a gap between their tokens. Steps are timed ([`Options::step_time`]), and a step has
//! as many prompt tokens as its time allows. Prompts share them: half for the highest in rank, the rest for those that
//! have the fewest left.
//!
//! # Failed steps
//! A step that fails ([`backend::StepError::Failed`]) ends the requests whose chunks are lost, with the cause. Those
//! whose recurrent states are dirty roll back to a checkpoint, the others to their last computed position; both are
//! computed again.
//!
//! # The law
//! The tokens of a request depend on its prompt, its parameters and the model alone: not on what else is in the batch,
//! how its prompt is cut into chunks, what the prefix cache holds, or how often it lost its pages. The program's side
//! of that is the CPU law; this side is that a sequence's tokens, sampler and text never learn of the schedule.
//!
//! # Memory
//! A sequence takes pages as it grows, window pages that it gives back as its window moves on, and a slot of recurrent
//! state, as the model needs them. When none is left, the lowest in rank (lower priority, then later submission) that
//! is not yet part of the step gives its pages up, waits at the front, and is computed again, mostly from the prefix
//! cache. Only full pages are shared and full pages are never written, so no page is ever copied. States are: a
//! checkpoint is a copy of a state at a page boundary, hung on the page that ends there.
//!
//! A request is admitted when there are pages for its whole prompt beyond what running prompts still need. The highest
//! in rank can always take pages from everyone else, and the context is never longer than the cache: so every step that
//! finds work computes something, and every request ends.

mod ahead;
mod checkpoints;
mod drafts;
mod failures;
mod head;
mod memory;
mod model;
mod pace;
mod pages;
mod payoff;
mod planning;
mod request;
mod ring;
mod sequence;
mod stop;
mod store;
mod vocabulary;
mod windows;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use backend::{Ask, Batch, Kinds, OpTime, Output, PAGE, Program, RouterInfo, StepError, StreamStats};

pub use drafts::{Drafter, PromptLookup};
pub use pages::{CacheChange, PageCounts, Parent};
pub use request::{
    Error, Event, EventKind, Events, FinishReason, Logprobs, Pooling, Request, RequestId, Timings, Usage,
};
pub use stop::{MAX_STOP_BYTES, MAX_STOP_STRINGS};
pub use store::{Key, Part, PromptStore, secret};
pub use vocabulary::{TextStream, Vocabulary};

use head::Head;
use memory::Memory;
use model::DraftModel;
use pace::Pace;
use payoff::{Candidate, Payoff};
use sequence::{Row, Sequence};

use crate::images::Pictures;

/// Maximum number of log-probabilities a request may ask for per token.
pub const MAX_LOGPROBS: usize = 128;

/// How long a step waits in all for masks that are not there when its rows are, where they are quick as a rule.
const PATIENCE: Duration = Duration::from_millis(2);
/// How long a step waits for a mask when there is nothing else to do.
const IDLE_PATIENCE: Duration = Duration::from_millis(20);

/// How an engine schedules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Maximum number of tokens of one prompt in a step. Below the program's limit, several prompts progress in a step.
    pub chunk: usize,
    /// Maximum number of requests that run at a time; the program's limits on tokens and outputs bound it too.
    pub max_running: usize,
    /// Keep full pages and share them between requests that begin alike.
    pub prefix_cache: bool,
    /// Target for the time of a step that computes prompts while answers run; [`Duration::MAX`] is none. Prompts that
    /// only other prompts wait for have 5 times as long, and a prompt by itself 10 times.
    pub step_time: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options { chunk: usize::MAX, max_running: usize::MAX, prefix_cache: true, step_time: Duration::MAX }
    }
}

/// What an engine is busy with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests that hold pages or get them in the next steps.
    pub running: usize,
    /// Those of them that sit out steps until the mask of their next token has come.
    pub late: usize,
    /// Requests that wait for admission.
    pub waiting: usize,
    /// The cache.
    pub pages: PageCounts,
    /// The part of the cache that layers with a window have to themselves.
    pub window_pages: PageCounts,
    /// Slots of recurrent state; `cached` are the checkpoints.
    pub states: PageCounts,
    /// Steps computed.
    pub steps: u64,
    /// Tokens computed, in prompts and answers.
    pub tokens: u64,
    /// Experts that are streamed from disk; `None` where none are.
    pub streamed: Option<StreamStats>,
    /// Times that a request gave its pages to others.
    pub preemptions: u64,
    /// Draft tokens computed.
    pub drafted: u64,
    /// Those of them that became part of an answer with another token behind them.
    pub accepted: u64,
}

/// What tells the time.
pub type Clock = Arc<dyn Fn() -> Instant + Send + Sync>;

/// A program with the requests that it serves.
pub struct Engine {
    program: Box<dyn Program>,
    vocabulary: Arc<dyn Vocabulary>,
    options: Options,
    /// Maximum number of tokens of a step.
    budget: usize,
    /// Maximum number of tokens of a sequence.
    context: usize,
    /// Maximum number of rows of a step.
    max_outputs: usize,
    drafter: Option<Box<dyn Drafter>>,
    /// The model's own head, where it drafts.
    head: Option<Head>,
    /// Another model, where that drafts.
    model: Option<Box<DraftModel>>,
    /// Maximum number of drafts of a sequence in a step.
    max_draft: usize,
    /// Decides how many drafts a step has, where that is not fixed.
    payoff: Option<Box<Payoff>>,
    /// The sequences that it decides about, of the step that is being made.
    candidates: Vec<Candidate>,
    /// Seconds that the drafts of the step in flight took.
    drafting: f64,
    /// Slots whose drafts the step has judged, with the number that stands.
    commits: Vec<(u32, usize)>,
    n_vocab: usize,
    /// Whether the program reports its routing.
    is_tracing: bool,
    kinds: Kinds,
    memory: Memory,
    /// Keeps prompt caches beyond the life of the engine.
    store: Option<Box<dyn PromptStore>>,
    /// Bytes of a piece on their way from it.
    buffer: Vec<u8>,
    /// A waiting prompt gets its pages back from the store, and more are to come.
    is_restoring: bool,
    batch: Batch,
    /// What steps cost.
    pace: Pace,
    clock: Clock,
    /// When the step in flight was submitted.
    began: Option<Instant>,
    /// Both in order of rank, highest first.
    running: Vec<Sequence>,
    waiting: VecDeque<Sequence>,
    /// Cancelled requests whose event the next step delivers.
    cancelled: Vec<(RequestId, Usage)>,
    next_id: u64,
    /// A step is under way.
    is_busy: bool,
    /// Failed steps since the last one that was finished.
    n_failures: usize,
    steps: u64,
    tokens: u64,
    preemptions: u64,
    drafted: u64,
    accepted: u64,
}

impl Engine {
    /// Returns an engine over a compiled program. The whole cache of the program is the engine's.
    pub fn new(program: Box<dyn Program>, vocabulary: Arc<dyn Vocabulary>, options: Options) -> Result<Engine, Error> {
        let limits = program.limits();
        let (n_vocab, kinds) = (program.n_vocab(), program.kinds());
        let mut context = limits.max_positions.min(limits.n_pages.saturating_mul(PAGE));
        let mut options = options;
        if kinds.whole {
            // A step has a text whole, which nothing that was computed before is a part of.
            context = context.min(limits.max_tokens).min(limits.max_outputs);
            options.prefix_cache = false;
        }
        for (what, value, least) in [
            ("most tokens of a step", limits.max_tokens, 1),
            ("most outputs of a step", limits.max_outputs, 1),
            ("pages of the cache", limits.n_pages, 1),
            ("window pages", limits.n_window_pages, kinds.window_blocks().min(context.div_ceil(PAGE))),
            ("slots of recurrent state", limits.n_states, usize::from(kinds.state)),
            ("the context", limits.max_positions, 1),
            ("the vocabulary", n_vocab, 1),
            ("chunk", options.chunk, 1),
            ("most running requests", options.max_running, 1),
        ] {
            if value < least {
                return Err(Error::Limit { what, value, least });
            }
        }
        let slots = if kinds.state { limits.n_states } else { usize::MAX };
        let max_running = options.max_running.min(limits.max_tokens).min(limits.max_outputs).min(slots);
        Ok(Engine {
            program,
            vocabulary,
            options: Options { max_running, ..options },
            budget: limits.max_tokens,
            context,
            max_outputs: limits.max_outputs,
            drafter: None,
            head: None,
            model: None,
            max_draft: limits.max_draft,
            payoff: None,
            candidates: Vec::new(),
            drafting: 0.0,
            commits: Vec::with_capacity(if limits.max_draft > 0 { max_running } else { 0 }),
            n_vocab,
            is_tracing: false,
            kinds,
            memory: Memory::new(limits, kinds, max_running, context),
            store: None,
            buffer: Vec::new(),
            is_restoring: false,
            batch: Batch::with_room(limits),
            pace: Pace::new(options.step_time),
            clock: Arc::new(Instant::now),
            began: None,
            running: Vec::with_capacity(max_running),
            waiting: VecDeque::new(),
            cancelled: Vec::new(),
            next_id: 0,
            is_busy: false,
            n_failures: 0,
            steps: 0,
            tokens: 0,
            preemptions: 0,
            drafted: 0,
            accepted: 0,
        })
    }

    /// Sets what guesses the tokens of answers from the next step on; nothing does at first. Answers are the same with
    /// any drafter; good guesses make them take fewer steps. Without effect where the program was compiled for no
    /// drafts ([`backend::Limits::max_draft`]). Each draft takes a row of [`backend::Limits::max_outputs`] that no
    /// sequence needs.
    pub fn set_drafter(&mut self, drafter: Option<Box<dyn Drafter>>) {
        self.drafter = drafter.filter(|_| !self.kinds.whole);
    }

    /// Lets the model's own head draft up to `n` tokens of each answer from the next step on, in place of a drafter; 0
    /// ends that. Returns whether it does: not where the program has no head ([`Program::draft_width`]) or was compiled
    /// for no drafts, nor where layers see a window. As with any drafter, answers are the same.
    pub fn set_head(&mut self, n: usize) -> bool {
        let n = n.min(self.max_draft);
        let width = self.program.draft_width().filter(|_| n > 0 && self.kinds.window.is_none());
        self.head = width.map(|d_model| Head::new(n, d_model, self.program.limits()));
        self.running.iter_mut().for_each(|sequence| sequence.ahead.clear());
        self.head.is_some()
    }

    /// Lets the number of drafts of each step be decided by what they cost and gain, as measured, in place of the
    /// largest possible one: few or none where they lose time, where prompts are computed, or where many sequences
    /// share steps. At most 8 of a sequence. Where steps are timed exactly, no answer takes 2% longer over any 200
    /// tokens than it does without drafts. Its prompt may: a head computes its own layer of the prompt, and a draft
    /// model all of it. What that took is made up for, by a hundredth of the time of all steps and by what drafts save,
    /// before a draft model begins the next one.
    pub fn set_adaptive(&mut self, is_on: bool) {
        self.payoff = is_on.then(|| Box::new(Payoff::new()));
        self.candidates.reserve_exact(if is_on { self.options.max_running } else { 0 });
    }

    /// Notes from now on what changes in the prefix cache, for [`Engine::cache_changes`].
    pub fn watch_cache(&mut self) {
        self.memory.watch();
    }

    /// Returns what has changed in the prefix cache since the last call, in order; nothing where that is not watched.
    /// They are kept until they are taken, so that a watcher takes them after each step.
    pub fn cache_changes(&mut self) -> impl Iterator<Item = CacheChange> + '_ {
        self.memory.changes()
    }

    /// Most tokens of a step.
    pub fn max_step_tokens(&self) -> usize {
        self.budget
    }

    /// Sets what times steps, for tests: the system's clock does at first.
    pub fn set_clock(&mut self, clock: Clock) {
        self.clock = clock;
    }

    /// Maximum number of tokens that a prompt and its answer have together.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Returns the routers of the model, in order of layers; none where no layer has experts.
    pub fn routers(&self) -> &[RouterInfo] {
        self.program.routers()
    }

    /// Switches timing of ops on or off, where the program can; see [`backend::Profile`].
    pub fn trace_times(&mut self, is_on: bool) {
        if let Some(profiler) = self.program.profiler() {
            profiler.set_enabled(is_on);
        }
    }

    /// Returns the time per op, summed over layers; empty where the program cannot measure.
    pub fn times(&mut self) -> &[OpTime] {
        self.program.profiler().map_or(&[], |profiler| profiler.times())
    }

    /// Returns what the engine is busy with.
    pub fn stats(&self) -> Stats {
        Stats {
            running: self.running.len(),
            late: self.running.iter().filter(|s| s.is_late()).count(),
            waiting: self.waiting.len(),
            pages: self.memory.pages(),
            window_pages: self.memory.window_pages(),
            states: self.memory.slots(),
            steps: self.steps,
            tokens: self.tokens,
            streamed: self.program.stream_stats(),
            preemptions: self.preemptions,
            drafted: self.drafted,
            accepted: self.accepted,
        }
    }

    /// Gives the program a flag that ends a long step while it is set; its requests are computed again, unless they are
    /// cancelled before the next step.
    pub fn set_interrupt(&mut self, flag: Arc<AtomicBool>) {
        self.model.iter_mut().for_each(|model| model.program().set_interrupt(flag.clone()));
        self.program.set_interrupt(flag);
    }

    /// Returns whether the program's device is lost: every further step fails as the last one did.
    pub fn is_lost(&self) -> bool {
        self.program.is_lost()
    }

    /// Returns whether a step has something to do or to report.
    pub fn has_work(&self) -> bool {
        !(self.running.is_empty() && self.waiting.is_empty() && self.cancelled.is_empty())
    }

    /// Accepts a request, or says what is wrong with it. Nothing is computed yet.
    pub fn submit(&mut self, request: Request) -> Result<RequestId, Error> {
        self.check(&request)?;
        let id = RequestId(self.next_id);
        let mut request = request;
        if request.min_new_tokens > 0 && !request.ignore_eos {
            let ends = (0..self.n_vocab as u32).filter(|&token| self.vocabulary.is_end_of_generation(token));
            request.stop_tokens.extend(ends);
        }
        let mut sequence = Sequence::new(id, request, self.vocabulary.clone(), self.context, &self.memory)?;
        if self.drafter.is_some() && self.max_draft > 0 {
            sequence.find_forced();
        }
        if self.drafter.is_some() || self.head.is_some() || self.model.is_some() {
            sequence.reserve_drafts(self.max_draft);
            sequence.ahead.reserve(self.max_draft, self.head.as_ref().map_or(0, Head::d_model));
        }
        if let Some(payoff) = &self.payoff {
            sequence.account = payoff.open();
        }
        self.next_id += 1;
        self.enqueue(sequence);
        Ok(id)
    }

    /// Ends a request and frees its pages; the next step, or the one that is under way, reports it as done. False when
    /// no such request is under way.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        // The device works on its memory until the step is finished.
        if let Some(sequence) = self.running.iter_mut().find(|s| s.id == id && self.is_busy && s.planned > 0) {
            return !std::mem::replace(&mut sequence.is_cancelled, true);
        }
        let sequence = if let Some(i) = self.running.iter().position(|s| s.id == id) {
            Some(self.running.remove(i))
        } else {
            self.waiting.iter().position(|s| s.id == id).and_then(|i| self.waiting.remove(i))
        };
        let Some(mut sequence) = sequence else { return false };
        sequence.release(&mut self.memory);
        self.cancelled.push((id, sequence.usage()));
        true
    }

    /// Forgets every cached prefix that no running request uses.
    pub fn clear_cache(&mut self) {
        self.memory.clear_cached();
        self.model.iter_mut().for_each(|model| model.clear_cached());
    }

    /// Runs one step and appends what happened to `events`. Returns whether there is more to do.
    ///
    /// # Errors
    /// As [`Engine::begin`] and [`Engine::finish`].
    pub fn step(&mut self, events: &mut Events) -> Result<bool, Error> {
        if self.begin(events)? {
            self.finish(events)?;
        }
        Ok(self.has_work())
    }

    /// Plans a step and starts it. Returns whether one is under way; [`Engine::finish`] must follow then. Until it has,
    /// requests may be submitted and cancelled. None is where every sequence waits for the mask of its grammar.
    ///
    /// # Errors
    /// The program's refusal of the whole batch, or a cache that no sequence fits: nothing was computed, no request
    /// ended, no page is lost.
    pub fn begin(&mut self, events: &mut Events) -> Result<bool, Error> {
        let begun = self.submit_step(events);
        if !matches!(begun, Ok(true)) {
            self.settle_drafts();
        }
        begun
    }

    fn submit_step(&mut self, events: &mut Events) -> Result<bool, Error> {
        for (id, usage) in self.cancelled.drain(..) {
            events.done(id, FinishReason::Cancelled, usage);
        }
        self.sample_late(Duration::ZERO, events);
        self.decide_drafts();
        self.draft_ahead()?;
        self.draft_by_model()?;
        self.save_some();
        self.plan();
        if !self.fill_batch() {
            return match self.has_work() {
                true if self.is_restoring => Ok(false),
                true if self.running.iter().any(Sequence::is_late) => {
                    self.sample_late(IDLE_PATIENCE, events);
                    Ok(false)
                }
                true => Err(Error::Stalled {
                    running: self.running.len(),
                    waiting: self.waiting.len(),
                    n_pages: self.memory.pages().total,
                }),
                false => Ok(false),
            };
        }
        let traces = self.running.iter().any(|s| s.planned > 0 && s.routing);
        if traces != self.is_tracing {
            self.program.trace_routing(traces);
            self.is_tracing = traces;
        }
        self.began = Some((self.clock)());
        match self.program.submit(&self.batch) {
            Ok(()) => {
                self.is_busy = true;
                Ok(true)
            }
            Err(StepError::TokenId { token, id, n_vocab }) => {
                self.refuse(token, id, n_vocab, events)?;
                Ok(false)
            }
            Err(StepError::Failed(failure)) => {
                self.roll_back(&failure, events);
                Ok(false)
            }
            Err(error @ StepError::Batch(_)) => {
                self.unplan();
                Err(error.into())
            }
        }
    }

    /// Finishes the step that is under way and appends what happened to `events`.
    ///
    /// # Errors
    /// The program returned other rows than were asked for, or refused the batch late: nothing of the step counts, no
    /// request ended, no page is lost.
    pub fn finish(&mut self, events: &mut Events) -> Result<(), Error> {
        let finished = self.finish_step(events);
        self.settle_drafts();
        finished
    }

    fn finish_step(&mut self, events: &mut Events) -> Result<(), Error> {
        if !std::mem::take(&mut self.is_busy) {
            return Ok(());
        }
        match self.compute(events) {
            Ok(()) => self.n_failures = 0,
            Err(Error::Step(StepError::TokenId { token, id, n_vocab })) => self.refuse(token, id, n_vocab, events)?,
            Err(Error::Step(StepError::Failed(failure))) => self.roll_back(&failure, events),
            Err(error) => {
                self.abandon(&error);
                return Err(error);
            }
        }
        // Requests cancelled during the step that did not end by themselves.
        while let Some(i) = self.running.iter().position(|s| s.is_cancelled) {
            let mut sequence = self.running.remove(i);
            sequence.release(&mut self.memory);
            events.done(sequence.id, FinishReason::Cancelled, sequence.usage());
        }
        while let Some(i) = self.waiting.iter().position(|s| s.is_cancelled) {
            let Some(sequence) = self.waiting.remove(i) else { break };
            events.done(sequence.id, FinishReason::Cancelled, sequence.usage());
        }
        Ok(())
    }

    /// Counts all memory again, the slow way, and says what does not add up: for tests and bug reports.
    pub fn audit(&self) -> Result<(), String> {
        self.running.iter().try_for_each(Sequence::audit)?;
        if self.waiting.iter().any(|s| !s.held.is_empty()) {
            return Err("a waiting request holds memory".into());
        }
        self.model.as_ref().map_or(Ok(()), |model| model.audit())?;
        self.memory.audit(self.running.iter().map(|s| &s.held))
    }

    /// Everything about a request that needs no more than the limits to be judged.
    /// What [`Engine::submit`] would say of a request, without taking it.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self, request: &Request) -> Result<(), Error> {
        let n_vocab = self.n_vocab;
        let n_tokens = request.tokens.len();
        if n_tokens == 0 {
            return Err(Error::EmptyPrompt);
        }
        let n_answer = usize::from(!self.kinds.whole);
        if n_tokens + n_answer > self.context {
            return Err(Error::PromptTooLong { n_tokens, needed: n_tokens + n_answer, context: self.context });
        }
        self.check_whole(request)?;
        let biased = request.sampling.logit_bias.iter().map(|&(id, _)| id);
        let (prompt, stops) = (request.tokens.iter().copied(), request.stop_tokens.iter().copied());
        check_ids("prompt token", prompt, n_vocab)?;
        check_ids("stop token", stops, n_vocab)?;
        check_ids("logit bias", biased, n_vocab)?;
        if let Some(pictures) = &request.pictures {
            self.check_pictures(pictures, request)?;
        }
        match request.logprobs.max(request.prompt_logprobs) {
            Some(asked) if asked > MAX_LOGPROBS => Err(Error::Logprobs { asked, limit: MAX_LOGPROBS }),
            _ => Ok(()),
        }
    }

    /// Checks that a model of whole texts is asked for a vector of one, and others for no pair.
    fn check_whole(&self, request: &Request) -> Result<(), Error> {
        let is_pair = request.second.is_some();
        match (self.kinds.whole, request.embedding) {
            (true, None) => Err(Error::NoText { routes: "/v1/embeddings or /v1/rerank" }),
            (false, _) if is_pair => Err(Error::Embedding("the model takes no pairs of texts")),
            _ => Ok(()),
        }
    }

    /// Checks that the images of a prompt are such as the program takes, in steps that hold one where it must be whole.
    fn check_pictures(&self, pictures: &Pictures, request: &Request) -> Result<(), Error> {
        let refuse = |why: String| Err(Error::Images(why));
        if self.program.d_input() != Some(pictures.d_features()) {
            return refuse("the model sees no images as it runs here".into());
        }
        if request.prompt_logprobs.is_some() {
            return refuse("tokens of images have no log-probabilities".into());
        }
        let end = pictures.images().last().map_or(0, |image| image.first + image.features.len());
        if end > request.tokens.len() {
            return refuse("an image ends after the prompt".into());
        }
        let most = self.budget.saturating_sub(self.options.max_running - 1).min(self.options.chunk);
        match pictures.longest_whole() {
            n if n > most => refuse(format!("an image has {n} tokens, a step has room for {most} (--batch)")),
            _ => Ok(()),
        }
    }

    /// Puts a sequence into its place among the waiting ones.
    fn enqueue(&mut self, sequence: Sequence) {
        let at = self.waiting.partition_point(|s| ranks_before(s, &sequence));
        self.waiting.insert(at, sequence);
    }

    /// Chooses the next tokens of sequences whose masks were late and have come. Waits up to `patience` for the first.
    fn sample_late(&mut self, patience: Duration, events: &mut Events) {
        let Engine { running, memory, vocabulary, .. } = self;
        let n_late = running.iter().filter(|s| s.is_late()).count();
        let end = Instant::now() + patience;
        let mut moment = Duration::ZERO;
        if n_late == 0 {
            return;
        }
        loop {
            running.retain_mut(|sequence| {
                let outcome = sequence.sample_late(&**vocabulary, &mut moment, events);
                conclude(sequence, outcome, memory, events)
            });
            // The others are looked at every millisecond while one is waited for.
            moment = end.saturating_duration_since(Instant::now()).min(Duration::from_millis(1));
            if moment.is_zero() || running.iter().filter(|s| s.is_late()).count() < n_late {
                break;
            }
        }
    }

    /// Waits for the step and gives every sequence its row. An error means that no sequence was changed.
    fn compute(&mut self, events: &mut Events) -> Result<(), Error> {
        let Engine { program, batch, running, memory, vocabulary, n_vocab, options, kinds, commits, head, .. } = self;
        let n_vocab = *n_vocab;
        let width = program.routers().iter().map(|router| router.n_used).sum::<usize>().max(1);
        let is_settled = program.drafts().is_none_or(|drafts| drafts.is_settled());
        let output = program.wait()?;
        let mut bill = None;
        if let Some(began) = self.began.take() {
            let time = (self.clock)().saturating_duration_since(began);
            self.pace.observe(batch.tokens.len(), time);
            if let Some(payoff) = &mut self.payoff
                && is_settled
                && batch.chunks.iter().all(|chunk| chunk.len == chunk.n_draft + 1 && chunk.pos > 0)
            {
                let (n, n_drafts) = (batch.chunks.len(), batch.chunks.iter().map(|chunk| chunk.n_draft as usize).sum());
                bill = Some(payoff.observe(n, n_drafts, time.as_secs_f64(), self.drafting));
            }
        }
        check_rows(batch, &output, n_vocab)?;
        if let Some(head) = head {
            head.take(output.all_hidden);
        }
        self.steps += 1;
        self.tokens += batch.tokens.len() as u64;
        let now = Instant::now();
        let d_hidden = output.hidden.len() / batch.rows.len().max(1);
        let hidden = |r: usize| output.hidden.get(r * d_hidden..(r + 1) * d_hidden).filter(|row| !row.is_empty());
        let chosen = |r: usize| output.routing.and_then(|ids| ids.get(r * width..(r + 1) * width));
        let (mut chunk, mut next_row) = (0, 0);
        let mut patience = PATIENCE;
        running.retain_mut(|sequence| {
            if sequence.planned == 0 {
                return true;
            }
            let rows = next_row..next_row + sequence.n_rows();
            next_row = rows.end;
            let fault = output.faults.iter().find(|f| f.chunk == chunk);
            let first = batch.chunks[chunk as usize];
            let end = first.first + first.len;
            chunk += 1;
            let outcome = match fault {
                Some(fault) if first.n_draft == 0 || fault.token < end - first.n_draft => Err(Error::Fault {
                    position: (first.pos + fault.token.saturating_sub(first.first)) as usize,
                    layer: fault.layer,
                }),
                fault => {
                    // A draft whose numbers broke down is no draft; should it be right, the next step says so.
                    let n_void = fault.map_or(0, |fault| end.saturating_sub(fault.token) as usize);
                    let scoring = rows.start..rows.start + sequence.n_scoring();
                    let rows = scoring.end..rows.end - n_void;
                    let scored = match sequence.is_cancelled {
                        true => Ok(()),
                        false if sequence.wants_embedding() => sequence.pool(scoring.map(hidden)),
                        false => sequence.score(scoring.map(|r| row(batch, &output, n_vocab, r)), events),
                    };
                    let outcome = match rows.start {
                        _ if scored.is_err() => scored.map(|()| None),
                        _ if sequence.is_cancelled || rows.is_empty() => Ok(None),
                        r if sequence.wants_embedding() => sequence.embed(hidden(r), events),
                        _ => {
                            let rows = rows.map(|r| (row(batch, &output, n_vocab, r), chosen(r)));
                            sequence.sample(rows, &**vocabulary, n_vocab, now, &mut patience, events)
                        }
                    };
                    let n_accepted = sequence.computed(memory, options.prefix_cache);
                    if head.is_some() && sequence.is_answered() {
                        let n = (first.len - first.n_draft) as usize + n_accepted;
                        sequence.ahead.computed(first.first as usize, first.pos as usize, n);
                    }
                    match (&mut self.payoff, bill) {
                        (Some(payoff), Some(bill)) => {
                            // Tokens that were forced say nothing of guesses.
                            let n_drafted = if sequence.is_forced() { 0 } else { first.n_draft as usize };
                            payoff.charge(&mut sequence.account, bill, n_drafted, n_accepted)
                        }
                        _ => sequence.account.rest(),
                    }
                    if first.n_draft > 0 {
                        self.drafted += u64::from(first.n_draft);
                        self.accepted += n_accepted as u64;
                        commits.extend(kinds.state.then_some((first.state, n_accepted)));
                    }
                    let is_prompt = !sequence.is_cancelled && sequence.is_prompt_only();
                    outcome.map(|reason| reason.or(is_prompt.then_some(FinishReason::Length)))
                }
            };
            conclude(sequence, outcome, memory, events)
        });
        if let Some(drafts) = program.drafts() {
            commits.drain(..).for_each(|(slot, n_accepted)| drafts.commit(slot, n_accepted));
        }
        memory.copies().for_each(|(from, to)| program.copy_state(from, to));
        Ok(())
    }
}

/// Ends a request that is finished or has failed; whether it runs on.
fn conclude(
    sequence: &mut Sequence,
    outcome: Result<Option<FinishReason>, Error>,
    memory: &mut Memory,
    events: &mut Events,
) -> bool {
    match outcome {
        Ok(None) => return true,
        Ok(Some(reason)) => {
            sequence.release(memory);
            events.done(sequence.id, reason, sequence.usage());
        }
        Err(error) => {
            sequence.discard(memory);
            events.failed(sequence.id, error);
        }
    }
    false
}

/// A program must return what it was asked for.
fn check_rows(batch: &Batch, output: &Output<'_>, n_vocab: usize) -> Result<(), Error> {
    for (r, ask) in batch.asks.iter().enumerate() {
        let (got, expected) = match ask {
            Ask::Logits => (output.logits.len(), (r + 1) * n_vocab),
            Ask::Best { .. } => (usize::from(output.picks.get(r).is_some()), 1),
            Ask::Hidden => continue,
        };
        if got < expected {
            return Err(Error::Logits { got, expected });
        }
    }
    Ok(())
}

/// Returns what the step returned of an asked row, which is there.
fn row<'a>(batch: &'a Batch, output: &Output<'a>, n_vocab: usize, r: usize) -> Row<'a> {
    match batch.asks[r] {
        Ask::Logits => Row::Logits(&output.logits[r * n_vocab..][..n_vocab]),
        Ask::Hidden => Row::Hidden,
        Ask::Best { first_listed, n_listed, .. } => match output.picks.get(r) {
            Some(best) => Row::Best(best, &batch.listed[first_listed as usize..][..n_listed as usize]),
            None => Row::Hidden,
        },
    }
}

/// Refuses ids outside the vocabulary.
fn check_ids(what: &'static str, ids: impl Iterator<Item = u32>, n_vocab: usize) -> Result<(), Error> {
    let mut ids = ids.zip(0..);
    match ids.find(|&(id, _)| id as usize >= n_vocab) {
        Some((id, index)) => Err(Error::TokenId { what, index, id, n_vocab }),
        None => Ok(()),
    }
}

/// Returns whether `a` is admitted before `b` and preempted after it.
fn ranks_before(a: &Sequence, b: &Sequence) -> bool {
    (b.priority, a.id) < (a.priority, b.id)
}
