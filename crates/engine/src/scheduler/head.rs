//! Drafts of the model's own head (`DraftHead` of its plan).
//!
//! The head has separate keys and values for every position that the model has computed: a row of it takes the
//! model's hidden state of a position and the token after it. So before each step the head computes the positions of
//! the step before, of prompts as well; the last row of a sequence that decodes gives its first draft, and the head's
//! own hidden state and that draft the next one. A step of the model then writes over none of it: rows of drafts that
//! were not accepted are computed again, from the model's hidden states.
//!
//! Of images it has no features: their tokens are embedded as text is, at the places of the image.
//!
//! Rows may be missing: those of prefixes that the cache holds from a request without an answer, or of a last token
//! that was never followed by another. They make drafts worse, and never texts.

use backend::{Ask, Batch, Limits, PAGE, StepError};

use super::ahead::Fresh;
use super::payoff::MAX_COMPANY;
use super::sequence::Sequence;
use super::{Engine, Error};

/// What is asked of a row: the likeliest token.
pub(super) const LIKELIEST: Ask = Ask::Best { n: 1, first_listed: 0, n_listed: 0, mask: None, log_sum_exp: false };

/// The head's steps.
pub(super) struct Head {
    /// Maximum number of drafts of a sequence in a step.
    n: usize,
    d_model: usize,
    /// The model's hidden states of the last step, `[T, d_model]`.
    hidden: Vec<f32>,
    batch: Batch,
    /// A sequence for each row that is asked for.
    rows: Vec<Row>,
    /// The head's own hidden states of rows that drafts follow, `[rows, d_model]`.
    own: Vec<f32>,
    /// Full pages that the batch writes.
    full: Vec<u32>,
    /// The times of its steps are those of later ones.
    is_settled: bool,
    /// Some sequence has images: every token has a place on all axes.
    has_places: bool,
}

/// A row that gives a draft.
#[derive(Clone, Copy)]
struct Row {
    /// Index of its sequence among those that run.
    sequence: usize,
    /// Index of its chunk.
    chunk: u32,
    /// Drafts that the sequence is to have.
    n: usize,
}

impl Head {
    pub fn new(n: usize, d_model: usize, limits: Limits) -> Head {
        let room = |rows: usize| Vec::with_capacity(rows * d_model);
        Head {
            n,
            d_model,
            hidden: room(limits.max_tokens),
            batch: Batch { hidden: room(limits.max_tokens), ..Batch::with_room(limits) },
            rows: Vec::with_capacity(limits.max_outputs),
            own: room(limits.max_outputs),
            full: Vec::with_capacity(limits.max_tokens / PAGE + 1),
            is_settled: true,
            has_places: false,
        }
    }

    /// Takes the hidden states that a step of the model returned.
    pub fn take(&mut self, all_hidden: &[f32]) {
        self.hidden.clear();
        self.hidden.extend_from_slice(all_hidden);
    }

    /// Width of a hidden state.
    pub fn d_model(&self) -> usize {
        self.d_model
    }

    /// Adds up to `room` rows of a sequence whose next tokens are known; `n` drafts are to follow its last.
    fn push(&mut self, i: usize, sequence: &mut Sequence, room: usize, n: usize) -> Pushed {
        let d = self.d_model;
        let (at, n_tokens) = (sequence.held.computed, sequence.tokens().len());
        let ahead = &mut sequence.ahead;
        let (fresh, is_kept) = match ahead.fresh.take() {
            Some(fresh) => (fresh, false),
            None if ahead.kept.is_empty() => return Pushed::default(),
            None => (Fresh { row: 0, pos: at - 1, n: 1 }, true),
        };
        let rows = if is_kept { &ahead.kept[..] } else { &self.hidden[fresh.row * d..][..fresh.n * d] };
        let n_known = fresh.n.min(n_tokens.saturating_sub(fresh.pos + 1));
        let n_now = n_known.min(room);
        // Full pages may be others' prefixes, and of two that are alike one is gone: no step writes what another chunk
        // has.
        let pages = sequence.held.pages();
        let written = fresh.pos / PAGE..(fresh.pos + n_now).div_ceil(PAGE).min(at / PAGE);
        let full = &pages[written.start.min(written.end)..written.end];
        if full.iter().any(|page| self.batch.pages.contains(page)) || self.full.iter().any(|page| pages.contains(page))
        {
            ahead.fresh = Some(fresh);
            return Pushed { is_partial: true, is_asked: false };
        }
        self.full.extend_from_slice(full);
        self.batch.hidden.extend_from_slice(&rows[..n_now * d]);
        let is_partial = n_now < n_known;
        if is_partial {
            ahead.fresh = Some(Fresh { row: fresh.row + n_now, pos: fresh.pos + n_now, n: fresh.n - n_now });
        } else if !is_kept || n_now > 0 {
            ahead.kept.clear();
            // A page that is full may be another's prefix by the time that its last row can be computed.
            if n_known < fresh.n && !at.is_multiple_of(PAGE) {
                ahead.kept.extend_from_slice(&self.hidden[(fresh.row + fresh.n - 1) * d..][..d]);
            }
        }
        let is_asked = n_now == fresh.n && n > 0;
        if n_now > 0 {
            if is_asked {
                self.rows.push(Row { sequence: i, chunk: self.batch.chunks.len() as u32, n });
            }
            let asked = is_asked.then(|| n_now - 1);
            self.batch.push(&sequence.tokens()[fresh.pos + 1..][..n_now], fresh.pos, sequence.tables(), asked);
            if self.has_places {
                place(&mut self.batch, sequence, fresh.pos);
            }
        }
        Pushed { is_partial, is_asked }
    }
}

/// Says where the rows of a batch's last chunk are, whose first is at a position; the tokens of images become some of
/// the vocabulary.
fn place(batch: &mut Batch, sequence: &Sequence, pos: usize) {
    let Batch { tokens, chunks, given, .. } = batch;
    let Some(chunk) = chunks.last() else { return };
    if let Some(pictures) = sequence.pictures() {
        pictures.hide(pos + 1, &mut tokens[chunk.first as usize..]);
    }
    given.places.extend((pos..pos + chunk.len as usize).map(|pos| sequence.on_axes(pos)));
}

/// What became of the rows of a sequence.
#[derive(Default)]
struct Pushed {
    /// Rows are left for the next step of the head.
    is_partial: bool,
    /// Drafts follow the last.
    is_asked: bool,
}

impl Engine {
    /// Lets the head compute what the last step has left to it, and draft tokens for the next.
    ///
    /// # Errors
    /// The program refuses a step of the head. One that fails leaves no drafts.
    pub(super) fn draft_ahead(&mut self) -> Result<(), Error> {
        if self.head.is_none() {
            return Ok(());
        }
        let n_spare = self.spare_for_drafts();
        let Some(mut head) = self.head.take() else { return Ok(()) };
        let began = self.payoff.is_some().then(|| (self.clock)());
        let is_prompt = self.running.iter().any(|sequence| sequence.ahead.fresh.is_some_and(|f| self.is_of_prompt(f)));
        head.is_settled = true;
        let result = self.draft_with(&mut head, n_spare);
        if let (Some(began), Some(payoff), Ok(n_steps), false) = (began, &mut self.payoff, &result, is_prompt)
            && *n_steps > 0
            && head.is_settled
        {
            self.drafting = (self.clock)().saturating_duration_since(began).as_secs_f64();
            payoff.observe_head(*n_steps, self.drafting);
        }
        let result = result.map(|_| ());
        // The next step has other hidden states.
        self.running.iter_mut().for_each(|sequence| sequence.ahead.fresh = None);
        self.head = Some(head);
        result
    }

    /// Whether rows are more than a step has of a sequence that decodes.
    fn is_of_prompt(&self, fresh: Fresh) -> bool {
        fresh.n > 1 + self.max_draft
    }

    /// Whether the head leaves a sequence out: where the number of drafts is decided and none are to be made. Later
    /// drafts are worse for the rows that are missing then.
    fn is_left_out(&self, sequence: &Sequence) -> bool {
        let is_of_prompt = sequence.ahead.fresh.is_some_and(|fresh| self.is_of_prompt(fresh));
        let is_crowded = self.running.len() > MAX_COMPANY;
        self.payoff.is_some() && sequence.allowed == 0 && (is_crowded || !is_of_prompt)
    }

    /// `n_spare` is the most that all sequences have together. Returns the number of the head's steps.
    fn draft_with(&mut self, head: &mut Head, mut n_spare: usize) -> Result<usize, Error> {
        let mut n_steps = 0;
        head.has_places = self.running.iter().any(|sequence| sequence.pictures().is_some());
        self.running.iter_mut().for_each(|sequence| sequence.ahead.guesses.clear());
        let mut i = 0;
        while i < self.running.len() {
            head.batch.clear();
            head.rows.clear();
            head.full.clear();
            while i < self.running.len() && head.batch.tokens.len() < self.budget && head.rows.len() < self.max_outputs
            {
                if self.is_left_out(&self.running[i]) {
                    self.running[i].ahead.clear();
                    i += 1;
                    continue;
                }
                let most = if self.payoff.is_some() { self.running[i].allowed } else { head.n };
                let is_decoding = self.running[i].remaining() == 1;
                let n = if is_decoding { self.most_drafts(i, most.min(n_spare), true) } else { 0 };
                let room = self.budget - head.batch.tokens.len();
                let pushed = head.push(i, &mut self.running[i], room, n);
                n_spare -= if pushed.is_asked { n } else { 0 };
                if pushed.is_partial {
                    break;
                }
                i += 1;
            }
            while !head.batch.tokens.is_empty() {
                n_steps += 1;
                if !self.head_step(head)? {
                    return Ok(n_steps);
                }
                head.batch.clear();
                for (chunk, row) in (0..).zip(&mut head.rows) {
                    let sequence = &self.running[row.sequence];
                    let guesses = &sequence.ahead.guesses;
                    let (last, pos) = (guesses.len() - 1, sequence.held.computed + guesses.len() - 1);
                    row.chunk = chunk;
                    head.batch.push(&guesses[last..], pos, sequence.tables(), [0]);
                    if head.has_places {
                        place(&mut head.batch, sequence, pos);
                    }
                }
                head.batch.hidden.extend_from_slice(&head.own);
            }
        }
        Ok(n_steps)
    }

    /// Runs the head's batch and takes the drafts of its rows; those that further ones follow stay. Returns false where
    /// the step failed.
    fn head_step(&mut self, head: &mut Head) -> Result<bool, Error> {
        head.batch.asks.fill(LIKELIEST);
        let submitted = self.program.submit(&head.batch);
        head.is_settled &= self.program.drafts().is_none_or(|drafts| drafts.is_settled());
        let output = match submitted.and_then(|()| self.program.wait()) {
            Ok(output) => output,
            Err(StepError::Failed(_)) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let (d, mut r) = (head.d_model, 0);
        head.own.clear();
        head.rows.retain(|row| {
            let (best, hidden) = (output.picks.get(r), output.hidden.get(r * d..(r + 1) * d));
            r += 1;
            let is_lost = output.faults.iter().any(|fault| fault.chunk == row.chunk);
            let Some(&(id, _)) = best.filter(|_| !is_lost).and_then(|best| best.best.first()) else { return false };
            let guesses = &mut self.running[row.sequence].ahead.guesses;
            guesses.push(id);
            match hidden {
                Some(hidden) if guesses.len() < row.n => {
                    head.own.extend_from_slice(hidden);
                    true
                }
                _ => false,
            }
        });
        Ok(true)
    }

    /// Drafts that a sequence can use in its next step, at most `max`: those that its answer has room for, that lose no
    /// checkpoint, and that the head, where it drafts, computes in the pages that the sequence has, or the draft model
    /// in its context.
    pub(super) fn most_drafts(&self, i: usize, max: usize, has_head: bool) -> usize {
        let sequence = &self.running[i];
        let held = &sequence.held;
        let in_pages = if has_head { held.pages().len() * PAGE + 1 - held.computed } else { usize::MAX };
        let room = self.memory.draft_room(held, self.options.prefix_cache);
        let in_model = self.model.as_ref().map_or(usize::MAX, |model| model.room(sequence));
        max.min(sequence.room_for_drafts()).min(room).min(in_pages).min(in_model)
    }
}
