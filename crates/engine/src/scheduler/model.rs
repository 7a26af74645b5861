//! Drafts of another model, a small one of the same vocabulary.
//!
//! It has a separate program and memory, and follows a sequence from the first token of its answer on. What it has
//! not seen of prompt and answer it computes in steps that take a part of the time of the engine's, all but the last
//! token. From that it drafts, one step for the next draft of every sequence. What it has computed of drafts that
//! became tokens stays in its cache; a recurrent state is copied, and drafts move the copy.
//!
//! Prefixes that its cache holds are not computed again. A sequence for which its memory has no room, or that has a
//! token or a position that it does not know, goes without drafts. None of this changes a text.

use std::time::Duration;

use backend::{Batch, Limits, PAGE, Program, StepError, Tables};

use super::head::LIKELIEST;
use super::memory::{Held, Memory};
use super::pace::{Company, Pace};
use super::payoff::MAX_COMPANY;
use super::request::RequestId;
use super::sequence::Sequence;
use super::{Engine, Error};

/// Tokens of a sequence up to which drafts follow at once: more are computed before.
const NEAR: usize = PAGE;
/// The part of a step's time that a step takes which computes what was not seen.
const PART: u32 = 4;

/// A model that drafts.
pub(super) struct DraftModel {
    program: Box<dyn Program>,
    memory: Memory,
    limits: Limits,
    has_state: bool,
    prefix_cache: bool,
    /// Maximum number of drafts of a sequence in a step.
    n: usize,
    /// Maximum number of sequences in a step with drafts.
    max_rows: usize,
    /// The first slot of states that drafts move, one for each of those.
    first_copy: u32,
    /// What its steps cost that compute what it has not seen.
    pace: Pace,
    followed: Vec<Followed>,
    batch: Batch,
    /// One for each chunk of the batch.
    rows: Vec<Row>,
}

/// A sequence as the model has it.
struct Followed {
    id: RequestId,
    held: Held,
    /// Drafts after the computed positions that are in its cache.
    drafts: Vec<u32>,
    /// What it has not seen is being computed.
    is_behind: bool,
    /// It is not followed further.
    is_over: bool,
}

/// A chunk of the batch.
struct Row {
    /// Index of its sequence among those that run.
    sequence: usize,
    /// Index among those that are followed.
    followed: usize,
    /// Tokens of the sequence that it computes.
    n_tokens: usize,
    /// Drafts that the sequence is to have.
    n: usize,
    /// Slot of the state that drafts move.
    copy: u32,
}

impl DraftModel {
    fn new(program: Box<dyn Program>, engine: &Engine, n: usize) -> Result<DraftModel, Error> {
        let (limits, kinds) = (program.limits(), program.kinds());
        let max_running = engine.options.max_running;
        let context = limits.max_positions.min(limits.n_pages.saturating_mul(PAGE));
        let n_window = kinds.window_blocks().min(context.div_ceil(PAGE));
        for (what, value, least) in [
            ("draft model's most tokens of a step", limits.max_tokens, 1),
            ("draft model's most outputs of a step", limits.max_outputs, 1),
            ("draft model's context", context, 1),
            ("draft model's window pages", limits.n_window_pages, n_window),
            ("draft model's slots of recurrent state", limits.n_states, usize::from(kinds.state) * 2 * max_running),
            ("draft model's rows of logits", usize::from(!kinds.whole), 1),
        ] {
            if value < least {
                return Err(Error::Limit { what, value, least });
            }
        }
        let max_rows = limits.max_outputs.min(limits.max_tokens).min(max_running);
        let n_copies = if kinds.state { max_running } else { 0 };
        let own = Limits { n_states: limits.n_states - n_copies, ..limits };
        let step_time = engine.options.step_time;
        let part = if step_time == Duration::MAX { step_time } else { step_time / PART };
        Ok(DraftModel {
            memory: Memory::new(own, kinds, max_running, context),
            has_state: kinds.state,
            prefix_cache: engine.options.prefix_cache,
            n: n.min(engine.max_draft),
            max_rows,
            first_copy: own.n_states as u32,
            pace: Pace::new(part),
            followed: Vec::with_capacity(max_running),
            batch: Batch::with_room(limits),
            rows: Vec::with_capacity(max_running),
            limits,
            program,
        })
    }

    /// The program.
    pub fn program(&mut self) -> &mut dyn Program {
        &mut *self.program
    }

    /// Drafts that a sequence may have now: none where the model is not near its end, or has drafted there.
    pub fn room(&self, sequence: &Sequence) -> usize {
        let followed = self.followed.iter().find(|followed| followed.id == sequence.id);
        let n_tokens = sequence.tokens().len();
        let n_new = n_tokens - followed.map_or(0, |followed| followed.held.computed);
        let is_over = followed.is_some_and(|followed| followed.is_over) || sequence.pictures().is_some();
        match is_over || !(1..=self.near()).contains(&n_new) {
            true => 0,
            false => (self.limits.max_positions + 1).saturating_sub(n_tokens),
        }
    }

    fn near(&self) -> usize {
        NEAR.min(self.limits.max_tokens)
    }

    /// Forgets every cached prefix that no sequence uses.
    pub fn clear_cached(&mut self) {
        self.memory.clear_cached();
    }

    /// Counts its memory again.
    pub fn audit(&self) -> Result<(), String> {
        let audited = self.memory.audit(self.followed.iter().map(|followed| &followed.held));
        audited.map_err(|what| format!("draft model: {what}"))
    }

    /// Takes what became of drafts: positions of those that are tokens now are computed. Memory of sequences that do
    /// not run is given back.
    fn settle(&mut self, running: &[Sequence]) {
        let DraftModel { memory, followed, .. } = self;
        followed.retain_mut(|followed| {
            let Some(sequence) = running.iter().find(|sequence| sequence.id == followed.id) else {
                memory.release(&mut followed.held);
                return false;
            };
            let (tokens, at) = (sequence.tokens(), followed.held.computed);
            // Drafts follow the row of the last token, which is computed with them.
            let new = tokens.get(at..tokens.len() - 1).unwrap_or_default();
            let n_right = new.iter().zip(&followed.drafts).take_while(|(token, draft)| token == draft).count();
            match n_right {
                1.. if !self.has_state => memory.advance(&mut followed.held, tokens, n_right, self.prefix_cache),
                _ => memory.unplan(&mut followed.held),
            }
            followed.drafts.clear();
            true
        });
    }

    /// Returns the index of a sequence among those that are followed, one of which it is from now on.
    fn follow(&mut self, sequence: &Sequence) -> usize {
        if let Some(i) = self.followed.iter().position(|followed| followed.id == sequence.id) {
            return i;
        }
        let mut held = sequence.hold(&self.memory);
        self.memory.admit(&mut held);
        let drafts = Vec::with_capacity(self.n);
        self.followed.push(Followed { id: sequence.id, held, drafts, is_behind: false, is_over: false });
        self.followed.len() - 1
    }

    /// Adds the next `n_tokens` of a sequence to the batch, or as many as its memory has room for and, where `n` drafts
    /// are to follow, all or none. Returns how many drafts do.
    fn push(&mut self, i: usize, sequence: &Sequence, n_tokens: usize, n: usize) -> usize {
        let f = self.follow(sequence);
        let Followed { held, is_over, .. } = &mut self.followed[f];
        let at = held.computed;
        let tokens = &sequence.tokens()[at..at + n_tokens];
        let n_vocab = self.program.n_vocab();
        if at + n_tokens > self.limits.max_positions || tokens.iter().any(|&id| id as usize >= n_vocab) {
            self.memory.release(held);
            *is_over = true;
            return 0;
        }
        let room = self.memory.extend(held, n_tokens);
        if room == 0 || (n > 0 && room < n_tokens) {
            self.memory.unplan(held);
            return 0;
        }
        if let Some((from, to)) = held.take_restore() {
            self.program.copy_state(from, to);
        }
        let asked = (n > 0).then(|| room - 1);
        self.batch.push(&tokens[..room], at, held.tables(), asked);
        self.rows.push(Row { sequence: i, followed: f, n_tokens: room, n, copy: 0 });
        n
    }

    /// Computes what was not seen of the `n_decoding` sequences that decode, but for their last tokens, as much as the
    /// time of a step allows; those that are not being computed only if they `may_begin`. Returns the number of tokens.
    fn catch_up(&mut self, running: &mut [Sequence], n_decoding: usize, may_begin: bool) -> Result<usize, Error> {
        self.batch.clear();
        self.rows.clear();
        // An answer that runs alone waits longer for its drafts to begin sooner.
        let company = if n_decoding > 1 { Company::Answers } else { Company::Prompts };
        let mut left = self.pace.prompt_tokens(0, self.limits.max_tokens, company);
        let may_have_drafts = |s: &&Sequence| s.remaining() == 1 && s.room_for_drafts() > 0 && s.pictures().is_none();
        for (i, sequence) in (0..).zip(&*running).filter(|(_, s)| may_have_drafts(s)) {
            let (near, f) = (self.near(), self.follow(sequence));
            let Followed { held, is_behind, is_over, .. } = &mut self.followed[f];
            let n_tokens = sequence.tokens().len();
            if *is_over || !(*is_behind || (may_begin && n_tokens - held.computed > near)) {
                continue;
            }
            if self.prefix_cache {
                self.memory.adopt(held, sequence.tokens());
            }
            let n_new = (n_tokens - 1).saturating_sub(held.computed);
            let mut want = n_new.min(left);
            // A copy of the state is made where the chunk ends.
            if let (true, Some(cut)) = (self.has_state && self.prefix_cache, held.next_cut()) {
                want = want.min(cut - held.computed);
            }
            *is_behind = want < n_new;
            if want > 0 {
                self.push(i, sequence, want, 0);
            }
            left -= want;
            if left == 0 {
                break;
            }
        }
        let n_tokens = self.batch.tokens.len();
        if n_tokens > 0 {
            self.step(running)?;
        }
        Ok(n_tokens)
    }

    /// Runs the batch, takes the drafts of its rows, and keeps the rows that further drafts follow.
    fn step(&mut self, running: &mut [Sequence]) -> Result<(), Error> {
        self.batch.asks.fill(LIKELIEST);
        let DraftModel { program, memory, followed, rows, batch, prefix_cache, .. } = self;
        let output = match program.submit(batch).and_then(|()| program.wait()) {
            Ok(output) => output,
            Err(StepError::Failed(_)) => {
                rows.drain(..).for_each(|row| followed[row.followed].end(memory));
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        let (mut chunk, mut n_picks) = (0, 0);
        rows.retain_mut(|row| {
            let (followed, sequence) = (&mut followed[row.followed], &mut running[row.sequence]);
            let is_lost = output.faults.iter().any(|fault| fault.chunk == chunk);
            chunk += 1;
            let best = (row.n > 0).then(|| output.picks.get(n_picks)).flatten();
            n_picks += usize::from(row.n > 0);
            if is_lost {
                followed.end(memory);
                return false;
            }
            if row.n_tokens > 0 {
                memory.advance(&mut followed.held, sequence.tokens(), row.n_tokens, *prefix_cache);
                row.n_tokens = 0;
            }
            let Some(&(id, _)) = best.and_then(|best| best.best.first()) else { return false };
            sequence.ahead.guesses.push(id);
            let want = followed.drafts.len() + 1;
            sequence.ahead.guesses.len() < row.n && memory.extend(&mut followed.held, want) == want
        });
        memory.copies().for_each(|(from, to)| program.copy_state(from, to));
        Ok(())
    }

    /// Makes a batch of the last drafts of the rows that are left.
    fn push_drafts(&mut self, running: &[Sequence]) {
        self.batch.clear();
        for (copy, row) in (self.first_copy..).zip(&mut self.rows) {
            let followed = &mut self.followed[row.followed];
            let tables = followed.held.tables();
            if self.has_state && followed.drafts.is_empty() {
                self.program.copy_state(tables.state, copy);
                row.copy = copy;
            }
            let Some(&id) = running[row.sequence].ahead.guesses.last() else { continue };
            let pos = followed.held.computed + followed.drafts.len();
            self.batch.push(&[id], pos, Tables { state: row.copy, ..tables }, [0]);
            followed.drafts.push(id);
        }
    }
}

impl Followed {
    /// Ends that it is followed: nothing that was computed for it is found again.
    fn end(&mut self, memory: &mut Memory) {
        memory.forget(&self.held);
        memory.release(&mut self.held);
        self.drafts.clear();
        self.is_over = true;
    }
}

impl Engine {
    /// Lets another model draft up to `n` tokens of each answer from the next step on, in place of a drafter or a head.
    /// It must have the same tokens; ids beyond its vocabulary end its drafts of a sequence. As with any drafter,
    /// answers are the same. A model with recurrent states requires two slots for each running sequence.
    ///
    /// # Errors
    /// A limit of the program is too small, or it is a model of whole texts.
    pub fn set_draft_model(&mut self, program: Box<dyn Program>, n: usize) -> Result<(), Error> {
        self.model = Some(Box::new(DraftModel::new(program, self, n)?));
        Ok(())
    }

    /// Lets the draft model compute what it has not seen, and draft tokens for the next step.
    ///
    /// # Errors
    /// The program refuses a step. One that fails leaves no drafts.
    pub(super) fn draft_by_model(&mut self) -> Result<(), Error> {
        self.settle_drafts();
        let n_spare = self.spare_for_drafts();
        if n_spare == 0 {
            return Ok(());
        }
        let Some(mut model) = self.model.take() else { return Ok(()) };
        let result = self.catch_up(&mut model).and_then(|()| self.draft_with_model(&mut model, n_spare));
        self.model = Some(model);
        result
    }

    /// Lets the draft model take what became of its drafts.
    pub(super) fn settle_drafts(&mut self) {
        if let Some(model) = &mut self.model {
            model.settle(&self.running);
        }
    }

    fn catch_up(&mut self, model: &mut DraftModel) -> Result<(), Error> {
        let n_decoding = self.running.iter().filter(|s| s.remaining() == 1).count();
        let is_crowded = self.payoff.is_some() && n_decoding > MAX_COMPANY;
        if model.program.is_lost() || is_crowded {
            return Ok(());
        }
        let began = (self.clock)();
        let may_begin = self.payoff.as_ref().is_none_or(|payoff| payoff.may_follow());
        let n_tokens = model.catch_up(&mut self.running, n_decoding, may_begin)?;
        if n_tokens > 0 {
            let time = (self.clock)().saturating_duration_since(began);
            model.pace.observe(n_tokens, time);
            self.payoff.iter_mut().for_each(|payoff| payoff.followed(time.as_secs_f64()));
        }
        Ok(())
    }

    /// `n_spare` is the most that all sequences have together.
    fn draft_with_model(&mut self, model: &mut DraftModel, mut n_spare: usize) -> Result<(), Error> {
        let began = (self.clock)();
        let (mut n_steps, mut i) = (0, 0);
        self.running.iter_mut().for_each(|sequence| sequence.ahead.guesses.clear());
        while i < self.running.len() && !model.program.is_lost() {
            model.batch.clear();
            model.rows.clear();
            let (near, max_tokens) = (model.near(), model.limits.max_tokens);
            while i < self.running.len()
                && model.rows.len() < model.max_rows
                && model.batch.tokens.len() + near <= max_tokens
            {
                let sequence = &self.running[i];
                let most = if self.payoff.is_some() { sequence.allowed } else { model.n };
                let n = match sequence.remaining() {
                    1 => self.most_drafts(i, most.min(n_spare), false).min(model.room(sequence)),
                    _ => 0,
                };
                if n > 0 {
                    let f = model.follow(sequence);
                    let n_tokens = sequence.tokens().len() - model.followed[f].held.computed;
                    n_spare -= model.push(i, sequence, n_tokens, n);
                }
                i += 1;
            }
            while !model.batch.tokens.is_empty() {
                n_steps += 1;
                model.step(&mut self.running)?;
                model.push_drafts(&self.running);
            }
        }
        if let (Some(payoff), true) = (&mut self.payoff, n_steps > 0) {
            self.drafting = (self.clock)().saturating_duration_since(began).as_secs_f64();
            payoff.observe_head(n_steps, self.drafting);
        }
        Ok(())
    }
}
