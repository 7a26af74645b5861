//! What the next step computes: how many tokens of which sequences, with which pages, and the batch of them.

use std::time::Duration;

use super::pace::Company;
use super::payoff::{Candidate, MAX_COMPANY};
use super::sequence::Sequence;
use super::{Engine, ranks_before};

/// How long a step waits in all for the tokens that grammars force. They take some microseconds, as masks do.
const FORCED_PATIENCE: Duration = Duration::from_millis(1);

impl Engine {
    /// Decides how many tokens of which sequences the step computes, and gives them pages.
    pub(super) fn plan(&mut self) {
        if self.kinds.whole {
            return self.plan_whole_texts();
        }
        let mut budget = self.budget;
        let mut n_spare = self.spare_for_drafts();
        let mut n_rows = self.spare_rows();
        let mut patience = FORCED_PATIENCE;
        self.is_restoring = false;
        let mut i = 0;
        while i < self.running.len() && budget > 0 {
            if self.running[i].remaining() == 1 {
                let n_drafts = self.draft(i, n_spare, &mut patience);
                n_spare -= n_drafts;
                n_rows -= n_drafts;
                budget -= self.plan_chunk(i, 1, &mut n_rows);
            }
            i += 1;
        }
        if budget == 0 {
            return;
        }
        while self.running.len() < self.options.max_running && self.admit() {}
        self.share(budget);
        let (mut i, mut unused) = (0, 0);
        while i < self.running.len() {
            if self.running[i].is_prompt() && self.running[i].share > 0 {
                let share = self.running[i].share + unused;
                unused = share.saturating_sub(self.plan_chunk(i, share, &mut n_rows));
            }
            i += 1;
        }
    }

    /// Plans as many whole texts as the step has room for, in order of rank; the first always fits.
    fn plan_whole_texts(&mut self) {
        while self.running.len() < self.options.max_running && self.admit() {}
        let (mut n_tokens, mut n_rows) = (self.budget, self.max_outputs);
        for sequence in &mut self.running {
            let (n, rows) = (sequence.remaining(), sequence.n_rows_of_all());
            if n <= n_tokens && rows <= n_rows {
                sequence.plan_all(&mut self.memory);
            }
            if sequence.planned == 0 {
                break;
            }
            n_tokens -= n;
            n_rows -= rows;
        }
    }

    /// Divides what is left of a step among the prompts that are not in it yet, as [`Sequence::share`].
    ///
    /// The highest in rank gets half, so that every prompt comes to its end; the rest goes to the prompts that have the
    /// fewest tokens left, of those with the highest priority. A prompt whose next page another one computes waits for
    /// that page, and lends the other its urgency.
    fn share(&mut self, budget: usize) {
        let (mut first, mut n_prompts) = (None, 0);
        for i in 0..self.running.len() {
            self.running[i].share = 0;
            if !self.running[i].is_prompt() {
                continue;
            }
            if self.options.prefix_cache {
                self.running[i].adopt(&mut self.memory);
                self.restore(i);
            }
            first = first.or(Some(i));
            n_prompts += 1;
            let urgency = self.running[i].remaining();
            let (before, rest) = self.running.split_at_mut(i);
            let leads = |other: &&mut Sequence| other.is_prompt() && other.urgency > 0 && rest[0].follows(other);
            rest[0].urgency = match before.iter_mut().filter(|_| self.options.prefix_cache).find(leads) {
                Some(leader) => {
                    leader.urgency = leader.urgency.min(urgency);
                    0
                }
                None => urgency,
            };
        }
        let Some(first) = first else { return };
        let company = match () {
            _ if self.running.iter().any(|s| !s.is_prompt()) => Company::Answers,
            _ if n_prompts > 1 || !self.waiting.is_empty() => Company::Prompts,
            _ => Company::Nothing,
        };
        let mut left = self.pace.prompt_tokens(self.budget - budget, budget, company);
        let (half, chunk) = (left.div_ceil(2), self.options.chunk);
        let mut give = |sequence: &mut Sequence, n: usize| {
            let n = n.min(left).min(sequence.remaining().min(chunk) - sequence.share);
            sequence.share += n;
            left -= n;
            left > 0
        };
        let mut is_more = give(&mut self.running[first], half);
        while is_more {
            let waits = self.running.iter_mut().filter(|s| s.is_prompt() && s.urgency > 0);
            let next = waits.min_by_key(|s| (std::cmp::Reverse(s.priority), s.urgency));
            let Some(next) = next else { break };
            next.urgency = 0;
            is_more = give(next, usize::MAX);
        }
    }

    /// Rows of a step beyond the one that each sequence may need.
    fn spare_rows(&self) -> usize {
        let n_running = (self.running.len() + self.waiting.len()).min(self.options.max_running);
        self.max_outputs - n_running
    }

    /// Whether drafts are made by steps of the model's head or of a draft model, before those of the model.
    fn has_ahead(&self) -> bool {
        self.head.is_some() || self.model.is_some()
    }

    /// Drafts that a step may have: each takes a row, and a token of those that decoding leaves. Half of these are the
    /// prompts'.
    pub(super) fn spare_for_drafts(&self) -> usize {
        if (self.drafter.is_none() && !self.has_ahead()) || self.max_draft == 0 {
            return 0;
        }
        let n_decoding = self.running.iter().filter(|s| s.remaining() == 1).count();
        self.spare_rows().min(self.budget.saturating_sub(n_decoding) / 2)
    }

    /// Guesses up to `max` tokens behind the last of a sequence; returns how many.
    fn draft(&mut self, i: usize, max: usize, patience: &mut Duration) -> usize {
        let has_ahead = self.has_ahead();
        let sequence = &mut self.running[i];
        let room = self.memory.draft_room(&sequence.held, self.options.prefix_cache);
        let max = max.min(self.max_draft).min(room);
        match &mut self.drafter {
            _ if has_ahead || self.payoff.is_some() => sequence.take_guesses(max),
            Some(drafter) if max > 0 => {
                sequence.look_ahead(patience);
                sequence.draft(&mut **drafter, max, self.n_vocab)
            }
            _ => sequence.take_guesses(0),
        }
    }

    /// Decides how many drafts each sequence may have in the next step, where that is not fixed, and takes those of a
    /// drafter. Prompts are computed without.
    pub(super) fn decide_drafts(&mut self) {
        let Some(payoff) = self.payoff.take() else { return };
        let (has_head, has_ahead) = (self.head.is_some(), self.has_ahead());
        self.drafting = 0.0;
        self.running.iter_mut().for_each(|sequence| {
            sequence.allowed = 0;
            sequence.ahead.guesses.clear();
            sequence.forced.clear();
        });
        let n_decoding = self.running.iter().filter(|s| s.remaining() == 1).count();
        let may_admit = !self.waiting.is_empty() && self.running.len() < self.options.max_running;
        let has_prompts = may_admit || self.running.iter().any(|s| s.remaining() > 1);
        let n_spare = self.spare_for_drafts();
        if n_decoding <= MAX_COMPANY && !has_prompts && n_spare > 0 {
            let mut candidates = std::mem::take(&mut self.candidates);
            let mut patience = FORCED_PATIENCE;
            candidates.clear();
            for i in 0..self.running.len() {
                if self.running[i].remaining() == 1 {
                    let max = self.most_drafts(i, self.max_draft.min(n_spare), has_head);
                    let mut candidate = Candidate::new(self.running[i].account, max);
                    // What looking costs is in the account, too.
                    if !has_ahead && max > 0 && candidate.account.is_sound() {
                        let began = (self.clock)();
                        candidate.n_sure = self.running[i].look_ahead(&mut patience);
                        self.drafting += (self.clock)().saturating_duration_since(began).as_secs_f64();
                    }
                    candidates.push(candidate);
                }
            }
            payoff.choose(&mut candidates, n_spare, has_ahead);
            let decoding = self.running.iter_mut().filter(|s| s.remaining() == 1);
            if let (false, Some(drafter)) = (has_ahead, &mut self.drafter)
                && candidates.iter().any(|candidate| candidate.n > 0)
            {
                let began = (self.clock)();
                for (sequence, candidate) in decoding.zip(&mut candidates) {
                    candidate.max = match candidate.n {
                        0 => 0,
                        _ => sequence.draft_ahead(&mut **drafter, candidate.max, self.n_vocab),
                    };
                }
                self.drafting += (self.clock)().saturating_duration_since(began).as_secs_f64();
                payoff.choose(&mut candidates, n_spare, false);
            }
            for (sequence, candidate) in self.running.iter_mut().filter(|s| s.remaining() == 1).zip(&candidates) {
                sequence.allowed = candidate.n;
                sequence.ahead.guesses.truncate(candidate.n);
            }
            self.candidates = candidates;
        }
        self.payoff = Some(payoff);
    }

    /// Plans up to `budget` tokens of a sequence that is not in the step yet, and its drafts; returns how many tokens
    /// the step has of it.
    ///
    /// Where pages lack, sequences of lower rank that are not in the step lose theirs. A sequence that gets none that
    /// way keeps what it has and waits: those above it continue, and end, or come back for its pages. Rows beyond one
    /// are taken from `n_rows`.
    fn plan_chunk(&mut self, i: usize, budget: usize, n_rows: &mut usize) -> usize {
        let sequence = &self.running[i];
        let mut want = sequence.remaining().min(self.options.chunk).min(budget);
        // A copy of the state is made where the chunk ends.
        if self.kinds.state
            && self.options.prefix_cache
            && let Some(cut) = sequence.held.next_cut()
        {
            want = want.min(cut - sequence.held.computed);
        }
        want = sequence.limit_rows(want, *n_rows);
        if sequence.pictures().is_some() {
            want = sequence.whole(want);
            let taken: usize = self.running.iter().map(|s| s.planned + s.drafts().len()).sum();
            if want + taken > self.budget {
                return 0;
            }
        }
        loop {
            self.running[i].plan(want, &mut self.memory);
            self.running[i].plan_whole();
            let planned = self.running[i].planned;
            if planned > 0 {
                *n_rows -= self.running[i].n_extra_rows();
                return planned + self.running[i].drafts().len();
            }
            let Some(victim) = (i + 1..self.running.len()).rev().find(|&j| self.running[j].planned == 0) else {
                return 0;
            };
            let mut sequence = self.running.remove(victim);
            sequence.preempt(&mut self.memory);
            self.preemptions += 1;
            self.enqueue(sequence);
        }
    }

    /// Moves the first waiting sequence to the running ones when there are pages for all its tokens; false when not.
    ///
    /// With nothing running there always are: then no page is in use, and no sequence is longer than the cache.
    fn admit(&mut self) -> bool {
        let (memory, running) = (&mut self.memory, &self.running);
        let Some(sequence) = self.waiting.front_mut() else { return false };
        // What running prompts still need, and a page more for each, so that the newcomer is not preempted at once.
        let reserved = running.iter().map(|s| s.outstanding(memory)).sum::<usize>() + running.len();
        let reserved_window = running.iter().map(|s| s.outstanding_window(memory)).sum::<usize>();
        // Its last token needs a page that is not shared: without it the search is pointless.
        if reserved + 1 > memory.available() {
            return false;
        }
        // A prompt that has no room yet is not restored: its pages would go again.
        let has_room = reserved + sequence.outstanding(memory) <= memory.available();
        if self.options.prefix_cache && has_room && !self.restore_front() {
            self.is_restoring = true;
            return false;
        }
        let memory = &mut self.memory;
        let Some(sequence) = self.waiting.front_mut() else { return false };
        if self.options.prefix_cache {
            sequence.adopt(memory);
        }
        if reserved + sequence.outstanding(memory) > memory.available()
            || reserved_window + sequence.outstanding_window(memory) > memory.available_window()
        {
            sequence.unadopt(memory);
            return false;
        }
        let Some(mut sequence) = self.waiting.pop_front() else { return false };
        sequence.admit(&mut self.memory);
        let at = self.running.partition_point(|s| ranks_before(s, &sequence));
        self.running.insert(at, sequence);
        self.restore(at);
        true
    }

    /// Restores the state of a sequence after it has adopted a prefix.
    pub(super) fn restore(&mut self, i: usize) {
        if let Some((from, to)) = self.running[i].held.take_restore() {
            self.program.copy_state(from, to);
        }
    }

    /// Writes the planned chunks into the batch, in the order of the running sequences; false when there are none.
    pub(super) fn fill_batch(&mut self) -> bool {
        let batch = &mut self.batch;
        batch.clear();
        let planned = || self.running.iter().filter(|s| s.planned > 0);
        let has_pictures = planned().any(|s| s.pictures().is_some());
        for sequence in self.running.iter().filter(|s| s.planned > 0) {
            let (tokens, pos, tables) = sequence.chunk();
            let first_row = batch.rows.len();
            batch.push(tokens, pos, tables, sequence.rows());
            if let (Some(pictures), Some(chunk)) = (sequence.pictures(), batch.chunks.last()) {
                let first = chunk.first as usize;
                pictures.fill(pos..pos + sequence.planned, first, &mut batch.tokens[first..], &mut batch.given);
            }
            batch.push_drafts(sequence.drafts());
            if let (true, Some(chunk)) = (self.kinds.whole, batch.chunks.last()) {
                batch.given.spans.push(chunk.first..chunk.first + chunk.len);
                batch.given.places.extend((0..chunk.len as usize).map(|position| sequence.place(position)));
            }
            if let (true, Some(chunk)) = (has_pictures, batch.chunks.last()) {
                let positions = chunk.pos as usize..(chunk.pos + chunk.len) as usize;
                batch.given.places.extend(positions.map(|pos| sequence.on_axes(pos)));
            }
            let (scoring, own) = batch.asks[first_row..].split_at_mut(sequence.n_scoring());
            for (row, ask) in sequence.rows().zip(scoring) {
                *ask = sequence.ask_score(row, &mut batch.listed);
            }
            for (n_draft, ask) in own.iter_mut().enumerate() {
                *ask = sequence.ask(n_draft, self.n_vocab, &mut batch.listed);
            }
        }
        !batch.chunks.is_empty()
    }

    /// Takes a plan back that was not computed.
    pub(super) fn unplan(&mut self) {
        self.running.iter_mut().for_each(|s| s.unplan(&mut self.memory));
    }
}
