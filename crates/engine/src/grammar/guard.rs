//! A constraint at work in one sequence: what the next token may be, from the tokens up to now.
//! It knows no batch, no model and no sampler.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use llguidance::toktrie::{SimpleVob, TokTrie};
use llguidance::{CancellationHandle, Matcher};
use sys::rank;

use super::masks::{Job, Mask, Progress, Record, Taken, is_at_end, take};
use super::numbers::{Numbers, continues};
use super::{Constraint, Error, FreeThought, first_line, vocabulary};

/// Holds one answer to its constraint. It belongs to the sequence, and stays when the sequence loses its pages.
pub(crate) struct Guard {
    constraint: Constraint,
    state: State,
    /// The last bytes of the text, as many as a mark may begin in.
    tail: Vec<u8>,
    /// The logits with what is forbidden at minus infinity, `[n_vocab]`.
    row: Vec<f32>,
    /// The number that the text under the grammar ends in, where schemas are part of it.
    numbers: Option<Numbers>,
    /// Tokens that must follow, on their way, where they are asked for.
    forced: Option<Receiver<Vec<u32>>>,
    finds_forced: bool,
    /// What ends the work on its masks.
    handle: Option<CancellationHandle>,
    /// When the mask on its way was first needed.
    due: Option<Instant>,
    record: Record,
    /// Tokens of the thought up to now.
    n_thought: usize,
    /// What closes a thought that has become too long, and how much of it has been written.
    closing: Option<(Vec<u32>, usize)>,
    /// How late masks were in all, what taking tokens took, and for how many tokens.
    late: Spent,
    taking: Spent,
    n_tokens: u32,
}

/// How late the masks of a grammar may be in all, in time of the processor, and for each token beside that. Those in
/// use take well below a millisecond a token, beside the model's step.
pub const LATENESS: Duration = Duration::from_secs(3);
pub const LATENESS_PER_TOKEN: Duration = Duration::from_millis(50);
/// How long taking tokens may last in all, and for each: all sequences wait for it.
pub const TAKING: Duration = Duration::from_millis(200);
pub const TAKING_PER_TOKEN: Duration = Duration::from_millis(2);
/// How long one mask may take of the processor.
pub const MAX_MASK: Duration = Duration::from_secs(5);
/// How late it may be: its thread may have given way to others for most of the time.
pub const MAX_LATE: Duration = Duration::from_secs(30);

/// A sum of times, of which the least of any three in a row counts: on a busy machine a thread that waits for a core
/// takes long now and then, a costly grammar takes long each time.
#[derive(Default)]
struct Spent {
    sum: Duration,
    last: [Duration; 3],
}

impl Spent {
    fn add(&mut self, time: Duration) {
        self.last.rotate_left(1);
        self.last[2] = time;
        self.sum += self.last.iter().min().copied().unwrap_or_default();
    }
}

enum State {
    /// In a thought: free, but not to end.
    Thought,
    /// Before a trigger: free.
    Free,
    /// Under the grammar, with the mask of the next token on its way. `open`: instead of it, a thought may open.
    Waiting { mask: Receiver<Mask>, progress: Arc<Progress>, open: Option<u32> },
    /// The last token is taken by a thread that gives way; the mask of the next one follows, unless nothing does.
    Taking { taken: Receiver<Taken>, mask: Receiver<Mask>, progress: Arc<Progress> },
    /// Under the grammar, with the mask at hand.
    Masked { matcher: Box<Matcher>, mask: SimpleVob, open: Option<u32> },
    /// Under the grammar, about to get a token.
    Ready { matcher: Box<Matcher>, open: Option<u32> },
    /// Nothing can follow.
    Finished,
}

impl Guard {
    /// Returns a guard at the start of an answer; the first mask is begun.
    pub fn new(constraint: Constraint) -> Result<Guard, Error> {
        let mut guard = Guard {
            constraint,
            state: State::Free,
            tail: Vec::new(),
            row: Vec::new(),
            numbers: None,
            forced: None,
            finds_forced: false,
            handle: None,
            due: None,
            record: Record::default(),
            n_thought: 0,
            closing: None,
            late: Spent::default(),
            taking: Spent::default(),
            n_tokens: 0,
        };
        guard.numbers = guard.constraint.grammar.numbers;
        guard.record = Record::of_first(guard.constraint.grammar.compiled.first_took);
        let opened = guard.constraint.thought.as_ref().is_some_and(|t| t.opened);
        guard.state = match (opened, guard.holds_behind()) {
            (true, _) => State::Thought,
            (false, false) => State::Free,
            (false, true) => {
                let open = guard.constraint.thought.as_ref();
                let open = open.and_then(|t| vocabulary::token(guard.trie(), &t.open));
                guard.ask(Box::new(guard.constraint.grammar.matcher()?), open)?
            }
        };
        guard.bound_thought();
        Ok(guard)
    }

    /// Whether the grammar holds at once, or right after the thought.
    fn holds_behind(&self) -> bool {
        self.constraint.triggers.is_empty() && !self.constraint.grammar.is_free()
    }

    /// Closes a thought that has become too long.
    fn bound_thought(&mut self) {
        if let (State::Thought, Some(thought), None) = (&self.state, &self.constraint.thought, &self.closing)
            && thought.most_tokens.is_some_and(|most| self.n_thought >= most)
        {
            let close = match vocabulary::token(self.trie(), &thought.close) {
                Some(token) => vec![token],
                None => self.trie().greedy_tokenize(thought.close.as_bytes()),
            };
            self.closing = (!close.is_empty()).then_some((close, 0));
        }
    }

    /// Returns the next token of what closes the thought.
    fn next_of_closing(&self) -> Option<u32> {
        let (tokens, n) = self.closing.as_ref()?;
        tokens.get(*n).copied()
    }

    /// Returns whether [`Guard::mask`] may forbid something at the next token.
    pub fn masks(&self) -> bool {
        match self.state {
            State::Thought => self.holds_behind() || self.closing.is_some(),
            State::Waiting { .. } | State::Taking { .. } | State::Masked { .. } => true,
            State::Free | State::Ready { .. } | State::Finished => false,
        }
    }

    /// Has the tokens found that must follow, with each mask from the next one on.
    pub fn find_forced(&mut self) {
        self.finds_forced = true;
    }

    /// Returns the tokens that must follow as far as they are known, once for each mask; none where something else may.
    /// Waits as [`Guard::ready`], unless the last mask was slow. They are guesses: the masks decide.
    pub fn forced(&mut self, patience: &mut Duration) -> Vec<u32> {
        let Some(forced) = self.forced.take() else { return Vec::new() };
        if !self.is_waited_for() || !matches!(self.state, State::Waiting { open: None, .. }) {
            return Vec::new();
        }
        let asked = Instant::now();
        let found = forced.recv_timeout(*patience).unwrap_or_default();
        *patience = patience.saturating_sub(asked.elapsed());
        found
    }

    /// Returns whether a step that has other sequences waits for its mask: not when the last one was slow.
    pub fn is_waited_for(&self) -> bool {
        self.record.is_waited_for()
    }

    /// Returns whether the next token can be chosen: the mask has come, or none is needed. Waits for it as long as
    /// `patience` lasts, and takes from that what it has waited.
    ///
    /// # Errors
    /// [`Error::Broken`] when there is no mask, or it is too late.
    pub fn ready(&mut self, patience: &mut Duration) -> Result<bool, Error> {
        let State::Waiting { mask, progress, open } = &self.state else { return Ok(true) };
        let (asked, open) = (Instant::now(), *open);
        let answer = mask.recv_timeout(*patience);
        *patience = patience.saturating_sub(asked.elapsed());
        // A mask that waits for a thread is late by the fault of others.
        let due = *self.due.get_or_insert(asked);
        let begun = progress.begun.get();
        let late_at = |now: Instant| begun.map_or(Duration::ZERO, |&begun| now - now.min(due.max(begun)));
        match answer {
            Ok(Mask { matcher, finished, took, tokens }) => {
                // And so is one whose thread waits for a core.
                self.late.add(late_at(finished).min(took));
                self.record.add(took);
                self.due = None;
                self.state = State::Finished;
                self.check_costs()?;
                self.state = State::Masked { matcher, mask: tokens.map_err(Error::Broken)?, open };
                Ok(true)
            }
            Err(RecvTimeoutError::Timeout) => self.wait_on().map(|()| false),
            Err(RecvTimeoutError::Disconnected) => Err(self.gone()),
        }
    }

    /// Returns whether nothing can follow the token that [`Guard::accept`] sent away to be taken; `None` while that is
    /// not known. Waits as [`Guard::ready`].
    ///
    /// # Errors
    /// [`Error::Broken`] when the token cannot be taken, or it takes too long.
    pub fn taken(&mut self, patience: &mut Duration) -> Result<Option<bool>, Error> {
        let State::Taking { taken, .. } = &self.state else {
            return Ok(Some(matches!(self.state, State::Finished)));
        };
        let asked = Instant::now();
        let answer = taken.recv_timeout(*patience);
        *patience = patience.saturating_sub(asked.elapsed());
        self.due.get_or_insert(asked);
        match answer {
            Ok(outcome) => {
                if let State::Taking { mask, progress, .. } = std::mem::replace(&mut self.state, State::Finished)
                    && outcome == Ok(false)
                {
                    self.state = State::Waiting { mask, progress, open: None };
                }
                outcome.map(Some).map_err(Error::Broken)
            }
            Err(RecvTimeoutError::Timeout) => self.wait_on().map(|()| None),
            Err(RecvTimeoutError::Disconnected) => Err(self.gone()),
        }
    }

    /// Goes on without what is on its way, if it may still come.
    fn wait_on(&mut self) -> Result<(), Error> {
        let (State::Waiting { progress, .. } | State::Taking { progress, .. }) = &self.state else { return Ok(()) };
        let late = match (progress.begun.get(), self.due) {
            (Some(&begun), Some(due)) => due.max(begun).elapsed(),
            _ => Duration::ZERO,
        };
        let longest = match progress.took() > MAX_MASK {
            true => Some(MAX_MASK),
            false => (late > MAX_LATE).then_some(MAX_LATE),
        };
        self.constraint.grammar.masks.let_by();
        match longest {
            Some(longest) => {
                self.state = State::Finished;
                Err(Error::Broken(format!("a step of it takes longer than {longest:?}")))
            }
            None => Ok(()),
        }
    }

    fn gone(&mut self) -> Error {
        self.state = State::Finished;
        Error::Setup("the thread that computes masks has ended".into())
    }

    /// Returns the logits that the next token may be chosen from, once the guard is [`Guard::ready`].
    pub fn mask<'a>(&'a mut self, logits: &'a [f32]) -> Result<&'a [f32], Error> {
        match std::mem::replace(&mut self.state, State::Finished) {
            State::Masked { matcher, mask, open } => {
                self.state = State::Ready { matcher, open };
                let is_allowed = |id| allows(&mask, id) || open == Some(id);
                let trie = self.constraint.grammar.compiled.vocabulary.tok_trie();
                let goes_on = |id| vocabulary::text(trie, id).first().is_some_and(|&byte| continues(byte));
                let numbers = self.numbers.filter(Numbers::may_count);
                let is_long = self.numbers.as_ref().is_some_and(Numbers::is_long);
                let is_large = |id| {
                    let text = || vocabulary::text(trie, id);
                    is_long && goes_on(id) || numbers.is_some_and(|numbers| numbers.overflows(text()))
                };
                // A number that can end does; one that cannot, as its bounds ask for more digits, goes on.
                let bounds = is_long || numbers.is_some();
                let ends = bounds && (0..logits.len() as u32).any(|id| is_allowed(id) && !is_large(id));
                forbid(&mut self.row, logits, |id| !is_allowed(id) || ends && is_large(id));
                Ok(&self.row)
            }
            State::Waiting { .. } | State::Taking { .. } => Err(Error::Setup("its mask has not come".into())),
            State::Thought if self.closing.is_some() => {
                self.state = State::Thought;
                let next = self.next_of_closing();
                forbid(&mut self.row, logits, |id| next.is_some_and(|next| id != next));
                Ok(&self.row)
            }
            State::Thought if self.holds_behind() => {
                self.state = State::Thought;
                let ends = self.constraint.grammar.compiled.vocabulary.tok_trie().eos_tokens();
                forbid(&mut self.row, logits, |id| ends.contains(&id));
                Ok(&self.row)
            }
            state => {
                self.state = state;
                Ok(logits)
            }
        }
    }

    /// Takes the chosen token. Returns whether nothing can follow; else the next mask is begun. `None` where masks of
    /// the sequence have been slow: then a thread takes the token too, and [`Guard::taken`] tells.
    pub fn accept(&mut self, token: u32) -> Result<Option<bool>, Error> {
        self.n_tokens += 1;
        if self.takes_behind() && !matches!(&self.state, State::Ready { open, .. } if *open == Some(token)) {
            self.send(token)?;
            return Ok(None);
        }
        let (is_finished, took) = rank::Work::default().run(|| self.take(token));
        self.record.add_taken(took);
        self.taking.add(took);
        let is_finished = is_finished?;
        self.check_costs()?;
        Ok(Some(is_finished))
    }

    /// Returns whether [`Guard::accept`] may leave the next token to a thread.
    pub fn takes_behind(&self) -> bool {
        self.record.is_behind() && !matches!(self.state, State::Thought | State::Free | State::Finished)
    }

    /// Returns how late its masks were.
    #[cfg(test)]
    pub fn lateness(&self) -> Duration {
        self.late.sum
    }

    /// Sends a token away to be taken, and the next mask to be computed behind it.
    fn send(&mut self, token: u32) -> Result<(), Error> {
        if let State::Ready { matcher, .. } = std::mem::replace(&mut self.state, State::Finished) {
            self.follow(token);
            self.handle = matcher.cancellation_handle();
            self.forced = None;
            let ((tell, taken), (reply, mask)) = (sync_channel(1), sync_channel(1));
            let job = Job { matcher, token: Some((token, tell)), forced: None, reply };
            let progress = self.constraint.grammar.masks.begin(job, self.record)?;
            self.state = State::Taking { taken, mask, progress };
        }
        Ok(())
    }

    /// Follows the number that the text ends in.
    fn follow(&mut self, token: u32) {
        if let Some(numbers) = &mut self.numbers {
            let trie = self.constraint.grammar.compiled.vocabulary.tok_trie();
            match vocabulary::is_mark(trie, token) {
                true => numbers.mark(),
                false => numbers.push(vocabulary::text(trie, token)),
            }
        }
    }

    /// Whether the grammar may go on with what it has cost.
    fn check_costs(&self) -> Result<(), Error> {
        let n = self.n_tokens;
        let is_late = self.late.sum > LATENESS + LATENESS_PER_TOKEN * n;
        match is_late || self.taking.sum > TAKING + TAKING_PER_TOKEN * n {
            true => Err(Error::Broken("it takes too long to say what may follow".into())),
            false => Ok(()),
        }
    }

    fn take(&mut self, token: u32) -> Result<bool, Error> {
        match std::mem::replace(&mut self.state, State::Finished) {
            State::Ready { open: Some(open), .. } if open == token => {
                self.state = State::Thought;
                self.bound_thought();
            }
            State::Ready { mut matcher, .. } => {
                self.follow(token);
                let is_finished = take(&mut matcher, token).map_err(Error::Broken)?;
                self.go_on(matcher, is_finished)?;
            }
            State::Thought => {
                let close = self.constraint.thought.as_ref().map(|t| t.close.clone());
                self.state = State::Thought;
                self.n_thought += 1;
                if let Some((_, n)) = &mut self.closing {
                    *n += 1;
                }
                self.bound_thought();
                self.push(token);
                if let Some(end) = self.find(close.as_deref().into_iter()).map(|(end, _)| end) {
                    self.tail.drain(..end);
                    self.constraint.thought = None;
                    self.closing = None;
                    self.state = State::Free;
                    match self.holds_behind() {
                        true => self.begin()?,
                        false => self.watch()?,
                    }
                }
            }
            State::Free => {
                self.state = State::Free;
                self.push(token);
                self.watch()?;
            }
            state => self.state = state,
        }
        Ok(matches!(self.state, State::Finished))
    }

    /// Looks for a trigger, or for a thought that opens before one.
    fn watch(&mut self) -> Result<(), Error> {
        let open = self.constraint.thought.as_ref().map(|t| t.open.as_str());
        let triggers = self.constraint.triggers.iter().map(String::as_str);
        match self.find(open.into_iter().chain(triggers)) {
            Some((end, 0)) if open.is_some() => {
                self.tail.drain(..end);
                self.state = State::Thought;
                self.bound_thought();
                Ok(())
            }
            Some((end, _)) => {
                self.tail.drain(..end);
                self.begin()
            }
            None => Ok(()),
        }
    }

    /// Starts the grammar with what stands behind the mark in the mark's last token.
    fn begin(&mut self) -> Result<(), Error> {
        let mut matcher = Box::new(self.constraint.grammar.matcher()?);
        let rest = std::mem::take(&mut self.tail);
        let tokens = self.trie().greedy_tokenize(&rest);
        let n = matcher.try_consume_tokens(&tokens).map_err(|e| Error::Broken(first_line(&e)))?;
        if n == tokens.len() {
            let is_finished = is_at_end(&matcher).map_err(Error::Broken)?;
            return self.go_on(matcher, is_finished);
        }
        if self.constraint.triggers.is_empty() {
            let rest = String::from_utf8_lossy(&rest).into_owned();
            return Err(Error::Broken(format!(
                "the thought's end runs on as {rest:?}, which the grammar does not allow"
            )));
        }
        // What the model began is not what the trigger stands for: it is text.
        self.state = State::Free;
        Ok(())
    }

    fn go_on(&mut self, matcher: Box<Matcher>, is_finished: bool) -> Result<(), Error> {
        self.state = if is_finished { State::Finished } else { self.ask(matcher, None)? };
        Ok(())
    }

    /// Sends the matcher away for the next mask.
    fn ask(&mut self, matcher: Box<Matcher>, open: Option<u32>) -> Result<State, Error> {
        self.handle = matcher.cancellation_handle();
        let (reply, mask) = sync_channel(1);
        let (tell, forced) = sync_channel(1);
        self.forced = self.finds_forced.then_some(forced);
        let job = Job { matcher, token: None, forced: self.finds_forced.then_some(tell), reply };
        let progress = self.constraint.grammar.masks.begin(job, self.record)?;
        Ok(State::Waiting { mask, progress, open })
    }

    fn trie(&self) -> &TokTrie {
        self.constraint.grammar.compiled.vocabulary.tok_trie()
    }

    /// Appends a token's bytes to the tail, and drops what no mark can begin in any more.
    fn push(&mut self, token: u32) {
        let Constraint { grammar, thought, triggers } = &self.constraint;
        let longest = thought.iter().flat_map(|FreeThought { open, close, .. }| [open, close]).chain(triggers);
        let longest = longest.map(String::len).max().unwrap_or(0);
        self.tail.drain(..self.tail.len().saturating_sub(longest));
        self.tail.extend_from_slice(vocabulary::text(grammar.compiled.vocabulary.tok_trie(), token));
    }

    /// Returns the mark that ends first in the tail: its end, and which.
    fn find<'a>(&self, marks: impl Iterator<Item = &'a str>) -> Option<(usize, usize)> {
        let end = |mark: &str| self.tail.windows(mark.len().max(1)).position(|w| w == mark.as_bytes());
        marks.enumerate().filter_map(|(i, mark)| Some((end(mark)? + mark.len(), i))).min()
    }
}

impl Drop for Guard {
    /// Nobody waits for the mask of a request that ended.
    fn drop(&mut self) {
        self.handle.iter().for_each(CancellationHandle::cancel);
    }
}

fn allows(mask: &SimpleVob, id: u32) -> bool {
    (id as usize) < mask.len() && mask.is_allowed(id)
}

/// Returns the logits with the forbidden ones at minus infinity. What is not a number stays, so that the sampler sees
/// it.
fn forbid(row: &mut Vec<f32>, logits: &[f32], forbidden: impl Fn(u32) -> bool) {
    row.clear();
    let masked = |(id, &logit): (usize, &f32)| match forbidden(id as u32) && !logit.is_nan() {
        true => f32::NEG_INFINITY,
        false => logit,
    };
    row.extend(logits.iter().enumerate().map(masked));
}
