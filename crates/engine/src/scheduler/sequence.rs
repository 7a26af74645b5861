//! One request on its way: its tokens, the memory it holds, its sampler and its text.
//! It knows nothing of other sequences.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use backend::{Ask, Best, PAGE, Tables};

use super::ahead::Ahead;
use super::drafts::Drafter;
use super::memory::{Held, Memory};
use super::payoff::Account;
use super::request::{Error, Events, FinishReason, Pooling, Request, RequestId, Timings, Usage};
use super::stop::StopMatcher;
use super::store::Restore;
use super::vocabulary::{TextStream, Vocabulary};
use crate::grammar::Guard;
use crate::images::Pictures;
use crate::sampler::Sampler;

/// Why a model has no embedding.
const NO_HIDDEN: &str = "the model's plan has no rows after a last norm";

/// What a step returned of a sequence's last position.
#[derive(Clone, Copy, Debug)]
pub(super) enum Row<'a> {
    /// All logits, `[n_vocab]`.
    Logits(&'a [f32]),
    /// The best, and the tokens that were listed for it.
    Best(Best<'a>, &'a [u32]),
    /// Its hidden state alone.
    Hidden,
}

/// A row that a step returned before its mask had come, or whose token is still being taken.
struct LateRow {
    /// `[n_vocab]`.
    logits: Vec<f32>,
    /// The experts that made it.
    routing: Option<Vec<u16>>,
}

/// What became of a row.
enum Outcome {
    /// Its token is reported; why the request is finished when it is.
    Token(Option<FinishReason>),
    /// The guard is not ready, or is taking the token.
    Late,
}

/// A request that was accepted.
///
/// Everything that decides about the text (`tokens`, `sampler`, `guard`, `chosen`, `text`, `stop`) stays as it is when
/// the memory is taken away.
pub(super) struct Sequence {
    pub id: RequestId,
    pub priority: i32,
    /// Tokens of this sequence in the step that is being made; 0 when it is not part of it.
    pub planned: usize,
    /// Its part of the step's prompt tokens.
    pub share: usize,
    /// Tokens that are left of its prompt, or of a shorter one that waits for it; 0 when it waits itself.
    pub urgency: usize,
    /// Drafts behind the planned tokens, which are computed with them.
    drafts: Vec<u32>,
    /// Tokens that its grammar forces next, as far as they are known; and whether its drafts are those.
    pub forced: Vec<u32>,
    is_forced: bool,
    /// What the model's own head or the draft model drafts of it.
    pub ahead: Ahead,
    /// What drafts have cost it, where their number is decided by that.
    pub account: Account,
    /// Drafts that its next step may have then.
    pub allowed: usize,
    /// It was cancelled while a step that it is part of was under way.
    pub is_cancelled: bool,
    /// Failed steps since its last token that left its state dirty.
    pub rollbacks: usize,
    /// Prompt and answer, `[n_prompt + generated]`.
    tokens: Vec<u32>,
    n_prompt: usize,
    max_new: usize,
    /// Number of tokens, prompt and answer, from which on it may end.
    min_tokens: usize,
    /// Maximum number of tokens it may have, by `max_new` or by the context.
    max_tokens: usize,
    /// Its pages, window pages and state.
    pub held: Held,
    /// What a store gives back of its prompt.
    pub restore: Restore,
    salt: u64,
    sampler: Sampler,
    guard: Option<Box<Guard>>,
    /// The row that the next token is chosen from when its mask has come.
    late: Option<Box<LateRow>>,
    /// The token that was chosen from the last row, while the guard takes it. It stays when the row goes.
    chosen: Option<u32>,
    text: Box<dyn TextStream>,
    stop: StopMatcher,
    stop_tokens: Vec<u32>,
    ignore_eos: bool,
    logprobs: Option<usize>,
    prompt_logprobs: Option<usize>,
    /// Prompt tokens whose log-probabilities are reported; the first has none.
    scored: usize,
    /// Whether it asks which experts were chosen.
    pub routing: bool,
    embedding: Option<Pooling>,
    second: Option<usize>,
    /// Images of its prompt.
    pictures: Option<Arc<Pictures>>,
    /// The sum of the hidden states up to `scored`, or the first one, where they are pooled, `[d_model]`.
    pooled: Vec<f64>,
    /// Prompt tokens that were in the cache at some time.
    prompt_computed: usize,
    cached: usize,
    preemptions: usize,
    submitted: Instant,
    admitted: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

impl Sequence {
    /// Takes a request whose tokens are checked; checks its sampling and its stop strings.
    pub fn new(
        id: RequestId,
        request: Request,
        vocabulary: Arc<dyn Vocabulary>,
        context: usize,
        memory: &Memory,
    ) -> Result<Sequence, Error> {
        let stop = StopMatcher::new(request.stop_strings, request.include_stop_string)?;
        let mut sampler = Sampler::new(request.sampling)?;
        request.tokens.iter().for_each(|&token| sampler.accept(token));
        let guard = request.constraint.map(Guard::new).transpose()?.map(Box::new);
        let n_prompt = request.tokens.len();
        // A grammar says itself where its text may end.
        let min_new = if guard.is_some() { 0 } else { request.min_new_tokens };
        if min_new > 0 {
            sampler.forbid(&request.stop_tokens);
        }
        let max_new = if request.embedding.is_some() { 0 } else { request.max_new_tokens };
        let max_tokens = n_prompt.saturating_add(max_new).min(context);
        // The answer's room is taken now, so that decoding allocates nothing.
        let mut tokens = request.tokens;
        tokens.reserve_exact(max_tokens - n_prompt);
        if let Some(pictures) = &request.pictures {
            pictures.mark(&mut tokens, memory.secret());
        }
        Ok(Sequence {
            id,
            priority: request.priority,
            planned: 0,
            share: 0,
            urgency: 0,
            drafts: Vec::new(),
            forced: Vec::new(),
            is_forced: false,
            ahead: Ahead::default(),
            account: Account::default(),
            allowed: 0,
            is_cancelled: false,
            rollbacks: 0,
            tokens,
            n_prompt,
            max_new,
            min_tokens: n_prompt.saturating_add(min_new),
            max_tokens,
            held: memory.hold(request.cache_salt, max_tokens),
            restore: Restore::Unknown,
            salt: request.cache_salt,
            sampler,
            guard,
            late: None,
            chosen: None,
            text: vocabulary.text(request.decode, &request.shown),
            stop,
            stop_tokens: request.stop_tokens,
            ignore_eos: request.ignore_eos,
            logprobs: request.logprobs,
            prompt_logprobs: request.prompt_logprobs,
            scored: 1,
            routing: request.routing,
            embedding: request.embedding,
            second: request.second,
            pictures: request.pictures,
            pooled: Vec::new(),
            prompt_computed: 0,
            cached: 0,
            preemptions: 0,
            submitted: Instant::now(),
            admitted: None,
            first_token: None,
            last_token: None,
        })
    }

    /// Tokens whose positions are not in the cache yet, at least 1 unless the sequence is late.
    pub fn remaining(&self) -> usize {
        self.tokens.len() - self.held.computed
    }

    /// Returns whether it has tokens to compute that are not in the step yet: after those that decode are, a prompt's.
    pub fn is_prompt(&self) -> bool {
        self.planned == 0 && !self.is_late()
    }

    /// Returns whether `other` computes the page that this sequence needs next, which it finds in the cache then.
    pub fn follows(&self, other: &Sequence) -> bool {
        let (mine, theirs) = (self.held.computed, other.held.computed);
        let start = mine / PAGE * PAGE;
        let end = start + PAGE;
        // Its last token is never found: its row is asked for. Most prompts differ in the page itself.
        let is_same = |from: usize| {
            let (mine, theirs) = (self.tokens.get(from..end), other.tokens.get(from..end));
            end < self.tokens.len() && mine.is_some() && mine == theirs
        };
        (mine..end).contains(&theirs)
            && self.salt == other.salt
            && self.restorable().is_some()
            && is_same(start)
            && is_same(0)
    }

    /// Pages that the remaining tokens need beyond those it has.
    pub fn outstanding(&self, memory: &Memory) -> usize {
        memory.outstanding(&self.held, self.tokens.len())
    }

    /// Window pages that it will need at a time beyond those it has.
    pub fn outstanding_window(&self, memory: &Memory) -> usize {
        memory.outstanding_window(&self.held, self.max_tokens)
    }

    /// It runs from now on.
    pub fn admit(&mut self, memory: &mut Memory) {
        memory.admit(&mut self.held);
        self.admitted.get_or_insert_with(Instant::now);
    }

    /// Returns the salt and the tokens whose cached prefix it can resume from; none where it needs the rows of all
    /// positions.
    pub fn restorable(&self) -> Option<(u64, &[u32])> {
        let computes_all = self.looks_at_all() && self.scored < self.n_prompt;
        (!computes_all).then_some((self.salt, &self.tokens))
    }

    /// Resumes from the cached prefix, where that reaches beyond the computed positions.
    pub fn adopt(&mut self, memory: &mut Memory) {
        if self.restorable().is_none() {
            return;
        }
        let saved = memory.adopt(&mut self.held, &self.tokens);
        if self.preemptions == 0 {
            self.cached += saved.min(self.n_prompt.saturating_sub(self.held.computed - saved));
        }
    }

    /// Takes room for so many drafts, so that decoding allocates nothing.
    pub fn reserve_drafts(&mut self, n: usize) {
        self.drafts.reserve_exact(n);
    }

    /// Has the tokens found that its grammar forces, for [`Sequence::look_ahead`].
    pub fn find_forced(&mut self) {
        self.guard.iter_mut().for_each(|guard| guard.find_forced());
    }

    /// Looks which tokens its grammar forces next; returns how many. Waits as long as `patience` lasts.
    pub fn look_ahead(&mut self, patience: &mut Duration) -> usize {
        self.forced = self.guard.as_mut().map_or_else(Vec::new, |guard| guard.forced(patience));
        self.forced.len()
    }

    /// Whether the drafts of its step are tokens that its grammar forces.
    pub fn is_forced(&self) -> bool {
        self.is_forced
    }

    /// Drafts that its answer has room for: its last token is never computed, and the step gives a token more than it
    /// has drafts.
    pub fn room_for_drafts(&self) -> usize {
        (self.max_tokens - self.tokens.len()).saturating_sub(1)
    }

    /// Takes up to `max` of the drafts that were made ahead; returns how many.
    pub fn take_guesses(&mut self, max: usize) -> usize {
        self.drafts.clear();
        let n = self.ahead.guesses.len().min(max).min(self.room_for_drafts());
        self.drafts.extend(self.ahead.guesses.drain(..).take(n));
        n
    }

    /// Guesses up to `max` of the tokens that follow, as drafts of the step: those that its grammar forces, else the
    /// drafter's. Returns how many.
    pub fn draft(&mut self, drafter: &mut dyn Drafter, max: usize, n_vocab: usize) -> usize {
        let max = max.min(self.room_for_drafts());
        self.is_forced = guess(&self.tokens, &self.forced, drafter, max, n_vocab, &mut self.drafts);
        self.forced.clear();
        self.drafts.len()
    }

    /// As [`Sequence::draft`], for [`Sequence::take_guesses`].
    pub fn draft_ahead(&mut self, drafter: &mut dyn Drafter, max: usize, n_vocab: usize) -> usize {
        let max = max.min(self.room_for_drafts());
        self.is_forced = guess(&self.tokens, &self.forced, drafter, max, n_vocab, &mut self.ahead.guesses);
        self.forced.clear();
        self.ahead.guesses.len()
    }

    /// Takes pages for up to `want` more tokens and the drafts behind them, and plans those for which there was room.
    pub fn plan(&mut self, want: usize, memory: &mut Memory) {
        let room = memory.extend(&mut self.held, want + self.drafts.len());
        self.planned = room.min(want);
        self.drafts.truncate(room - self.planned);
    }

    /// As [`Sequence::plan`], all of its tokens or none.
    pub fn plan_all(&mut self, memory: &mut Memory) {
        self.plan(self.remaining(), memory);
        if self.planned < self.remaining() {
            self.unplan(memory);
        }
    }

    /// Rows that a step of all its tokens returns.
    pub fn n_rows_of_all(&self) -> usize {
        self.scoring(self.remaining()).len() + 1
    }

    /// The place of a position in a model of whole texts: itself, and which text of a pair it is of.
    pub fn place(&self, position: usize) -> [u32; 3] {
        let is_second = self.second.is_some_and(|second| position >= second);
        [position as u32, u32::from(is_second), 0]
    }

    /// The images of its prompt.
    pub fn pictures(&self) -> Option<&Pictures> {
        self.pictures.as_deref()
    }

    /// The place of a position on all axes.
    pub fn on_axes(&self, pos: usize) -> [u32; 3] {
        self.pictures().map_or([pos as u32; 3], |pictures| pictures.place_of(pos))
    }

    /// Returns the longest chunk of about `want` tokens that cuts no image whose tokens see each other: shorter, or the
    /// whole image where it begins with one.
    pub fn whole(&self, want: usize) -> usize {
        self.pictures().map_or(want, |pictures| pictures.whole(self.held.computed, want))
    }

    /// Plans fewer tokens than there was room for, where these would cut an image.
    pub fn plan_whole(&mut self) {
        let whole = self.whole(self.planned);
        if whole != self.planned {
            self.planned = if whole < self.planned { whole } else { 0 };
            self.drafts.clear();
        }
    }

    /// Drafts behind the planned tokens.
    pub fn drafts(&self) -> &[u32] {
        &self.drafts
    }

    /// Prompt and answer.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Where its memory lies.
    pub fn tables(&self) -> Tables<'_> {
        self.held.tables()
    }

    /// Returns what it holds of another memory: nothing yet.
    pub fn hold(&self, memory: &Memory) -> Held {
        memory.hold(self.salt, self.max_tokens)
    }

    /// Returns the planned tokens and where their memory lies.
    pub fn chunk(&self) -> (&[u32], usize, Tables<'_>) {
        let (start, end) = (self.held.computed, self.held.computed + self.planned);
        (&self.tokens[start..end], start, self.tables())
    }

    /// Returns whether the rows of all positions of the prompt are requested.
    fn looks_at_all(&self) -> bool {
        self.prompt_logprobs.is_some() || matches!(self.embedding, Some(Pooling::First | Pooling::Mean))
    }

    /// Returns the planned positions whose rows give the log-probabilities of the prompt tokens after them, or are
    /// pooled.
    fn scoring(&self, planned: usize) -> Range<usize> {
        let first = self.held.computed;
        match self.looks_at_all() {
            // The row of the first position is all that is pooled.
            true if self.embedding == Some(Pooling::First) && self.scored > 1 => first..first,
            true if self.embedding == Some(Pooling::First) => 0..(first + planned).min(self.n_prompt - 1).min(1),
            true => first.max(self.scored - 1)..(first + planned).min(self.n_prompt - 1).max(self.scored - 1),
            false => first..first,
        }
    }

    /// Returns the longest chunk of at most `want` tokens that needs no more than `n_rows` rows besides one.
    pub fn limit_rows(&self, want: usize, n_rows: usize) -> usize {
        let scoring = self.scoring(want);
        let last = usize::from(want == self.remaining() && (self.max_new > 0 || self.embedding.is_some()));
        match scoring.len() + last <= n_rows + 1 {
            true => want,
            // It then ends before the last token.
            false => (scoring.start + n_rows + 1 - self.held.computed).max(1),
        }
    }

    /// Offsets into the planned tokens of the rows that the step returns, drafts' left out.
    pub fn rows(&self) -> impl Iterator<Item = usize> + use<> {
        let (first, planned) = (self.held.computed, self.planned);
        let last = self.wants_logits().then(|| planned - 1);
        self.scoring(planned).map(move |position| position - first).chain(last)
    }

    /// Rows beyond the one that every sequence may have, drafts' left out.
    pub fn n_extra_rows(&self) -> usize {
        (self.n_scoring() + usize::from(self.wants_logits())).saturating_sub(1)
    }

    /// Rows among them that score the prompt.
    pub fn n_scoring(&self) -> usize {
        self.scoring(self.planned).len()
    }

    /// Returns what is asked of the row at the offset `row` that scores a prompt token.
    pub fn ask_score(&self, row: usize, listed: &mut Vec<u32>) -> Ask {
        if self.embedding.is_some() {
            return Ask::Hidden;
        }
        let (n, first_listed) = (self.prompt_logprobs.unwrap_or(0), listed.len() as u32);
        listed.push(self.tokens[self.held.computed + row + 1]);
        Ask::Best { n: n.max(1) as u32, first_listed, n_listed: 1, mask: None, log_sum_exp: true }
    }

    /// Reports the prompt's tokens behind the rows that score them.
    pub fn score<'a>(&mut self, rows: impl Iterator<Item = Row<'a>>, events: &mut Events) -> Result<(), Error> {
        let n = self.prompt_logprobs.unwrap_or(0);
        for row in rows {
            let token = self.tokens[self.scored];
            events.prompt(self.id, token, |top| match row {
                Row::Logits(logits) => self.sampler.logprobs(logits, token, n, top),
                Row::Best(best, listed) => self.sampler.logprobs_best(&best, listed, token, n, top),
                Row::Hidden => Ok(0.0),
            })?;
            self.scored += 1;
        }
        Ok(())
    }

    /// Returns whether the planned tokens end with the last one, and an answer or the hidden state is requested.
    pub fn wants_logits(&self) -> bool {
        self.planned == self.remaining() && (self.max_new > 0 || self.embedding.is_some())
    }

    /// Rows that the step returns: those that score the prompt, the last position's, and those of its drafts.
    pub fn n_rows(&self) -> usize {
        self.n_scoring() + if self.wants_logits() { 1 + self.drafts.len() } else { 0 }
    }

    /// Returns what is asked of the row after the first `n_draft` drafts; tokens that belong to it are appended to
    /// `listed`.
    pub fn ask(&self, n_draft: usize, n_vocab: usize, listed: &mut Vec<u32>) -> Ask {
        if self.embedding.is_some() {
            return Ask::Hidden;
        }
        // A mask is not known yet: it is computed while the model computes. Drafts may begin what masks.
        if self.guard.as_ref().is_some_and(|guard| guard.masks() || n_draft > 0) {
            return Ask::Logits;
        }
        let first_listed = listed.len() as u32;
        match self.sampler.needs(&self.drafts[..n_draft], self.logprobs, n_vocab, listed) {
            None => Ask::Logits,
            Some(n) => Ask::Best {
                n: n as u32,
                first_listed,
                n_listed: listed.len() as u32 - first_listed,
                mask: None,
                log_sum_exp: self.logprobs.is_some(),
            },
        }
    }

    /// Takes back what was planned, after a step that computed nothing.
    pub fn unplan(&mut self, memory: &mut Memory) {
        self.planned = 0;
        self.drafts.clear();
        memory.unplan(&mut self.held);
    }

    /// Notes that the planned tokens are in the cache, and so are the drafts that have become tokens with another after
    /// them; returns how many those are. Full pages become findable when `cache` says so.
    pub fn computed(&mut self, memory: &mut Memory, cache: bool) -> usize {
        let end = self.held.computed + self.planned;
        let n_accepted = if self.drafts.is_empty() { 0 } else { self.tokens.len().saturating_sub(end + 1) };
        memory.advance(&mut self.held, &self.tokens, self.planned + n_accepted, cache);
        self.prompt_computed = self.prompt_computed.max(self.held.computed.min(self.n_prompt));
        self.planned = 0;
        self.drafts.clear();
        n_accepted
    }

    /// Returns whether the request asks for an answer.
    pub fn is_answered(&self) -> bool {
        self.max_new > 0
    }

    /// Returns whether everything is computed and the request wants no answer.
    pub fn is_prompt_only(&self) -> bool {
        self.held.computed == self.tokens.len() && self.max_new == 0
    }

    /// Adds the hidden states of positions before the last, each `[d_model]`, to what is pooled.
    pub fn pool<'a>(&mut self, rows: impl Iterator<Item = Option<&'a [f32]>>) -> Result<(), Error> {
        for row in rows {
            let row = row.ok_or(Error::Embedding(NO_HIDDEN))?;
            let is_first = self.scored == 1;
            self.scored += 1;
            match self.embedding {
                Some(Pooling::Mean) if !is_first => {
                    self.pooled.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x))
                }
                _ if is_first => self.pooled = row.iter().map(|&x| f64::from(x)).collect(),
                _ => {}
            }
        }
        Ok(())
    }

    /// Reports the prompt's hidden state, `[d_model]`, where the request wants it instead of an answer. Returns that
    /// the request is finished.
    pub fn embed(&self, row: Option<&[f32]>, events: &mut Events) -> Result<Option<FinishReason>, Error> {
        let row = row.ok_or(Error::Embedding(NO_HIDDEN))?;
        let pooled: Vec<f32> = match self.embedding {
            Some(Pooling::Mean) if self.n_prompt > 1 => {
                let n = self.n_prompt as f64;
                self.pooled.iter().zip(row).map(|(sum, &x)| ((sum + f64::from(x)) / n) as f32).collect()
            }
            Some(Pooling::First) if self.n_prompt > 1 => self.pooled.iter().map(|&x| x as f32).collect(),
            _ => row.to_vec(),
        };
        match pooled.iter().all(|x| x.is_finite()) {
            true => events.embedding(self.id, &pooled),
            false => return Err(Error::Embedding("it holds NaN or infinity")),
        }
        Ok(Some(FinishReason::Length))
    }

    /// Returns whether the prompt's hidden state is requested.
    pub fn wants_embedding(&self) -> bool {
        self.embedding.is_some()
    }

    /// Gives all memory back; the sequence starts again from its first token, and finds what is still cached.
    pub fn release(&mut self, memory: &mut Memory) {
        self.planned = 0;
        self.late = None;
        self.drafts.clear();
        self.ahead.clear();
        memory.release(&mut self.held);
    }

    /// As [`Sequence::release`], after a look for shared pages that did not lead to admission.
    pub fn unadopt(&mut self, memory: &mut Memory) {
        self.release(memory);
        if self.preemptions == 0 {
            self.cached = 0;
        }
    }

    /// As [`Sequence::release`], to make room for others.
    pub fn preempt(&mut self, memory: &mut Memory) {
        self.release(memory);
        self.preemptions += 1;
    }

    /// As [`Sequence::release`]; nothing that was computed for it will be found again.
    pub fn discard(&mut self, memory: &mut Memory) {
        memory.forget(&self.held);
        self.release(memory);
    }

    /// Returns whether it sits out steps until the mask of its next token has come.
    pub fn is_late(&self) -> bool {
        self.late.is_some()
    }

    /// Chooses tokens from the last position's row and those of its drafts, each with the experts that made it, as long
    /// as the drafts are what is chosen: the sampler, the guard and the text see what they would see without drafts.
    /// Returns why the request is finished when it is. `n_vocab` is the width of a row. Waits for masks as long as
    /// `patience` lasts, unless the last one was slow; then the sequence is late.
    pub fn sample<'a>(
        &mut self,
        rows: impl Iterator<Item = (Row<'a>, Option<&'a [u16]>)>,
        vocabulary: &dyn Vocabulary,
        n_vocab: usize,
        now: Instant,
        patience: &mut Duration,
        events: &mut Events,
    ) -> Result<Option<FinishReason>, Error> {
        let mut none = Duration::ZERO;
        for (i, (row, routing)) in rows.enumerate() {
            let is_waited_for = self.guard.as_ref().is_none_or(|guard| guard.is_waited_for());
            // The row of a draft is computed again by the next step, where its token may not be taken at once.
            let may_choose = i == 0 || self.guard.as_ref().is_none_or(|guard| !guard.takes_behind());
            let is_ready = may_choose && self.is_ready(if is_waited_for { patience } else { &mut none })?;
            let outcome = match is_ready {
                true => self.sample_row(row, routing, vocabulary, n_vocab, now, events)?,
                false => Outcome::Late,
            };
            match outcome {
                Outcome::Token(None) => {}
                Outcome::Token(reason) => return Ok(reason),
                Outcome::Late => {
                    if let (0, Row::Logits(logits)) = (i, row) {
                        let routing = routing.filter(|_| self.routing).map(<[u16]>::to_vec);
                        self.late = Some(Box::new(LateRow { logits: logits.to_vec(), routing }));
                    }
                    return Ok(None);
                }
            }
            if self.drafts.get(i) != self.tokens.last() {
                break;
            }
        }
        Ok(None)
    }

    /// As [`Sequence::sample`], from the row that it kept; nothing happens while the mask is still late.
    pub fn sample_late(
        &mut self,
        vocabulary: &dyn Vocabulary,
        patience: &mut Duration,
        events: &mut Events,
    ) -> Result<Option<FinishReason>, Error> {
        if self.late.is_none() || !self.is_ready(patience)? {
            return Ok(None);
        }
        let Some(late) = self.late.take() else { return Ok(None) };
        let (row, n_vocab, now) = (Row::Logits(&late.logits), late.logits.len(), Instant::now());
        match self.sample_row(row, late.routing.as_deref(), vocabulary, n_vocab, now, events)? {
            Outcome::Token(reason) => Ok(reason),
            Outcome::Late => {
                self.late = Some(late);
                Ok(None)
            }
        }
    }

    /// Returns whether the guard, if there is one, has the mask of the next token, or has taken the one that was
    /// chosen.
    fn is_ready(&mut self, patience: &mut Duration) -> Result<bool, Error> {
        Ok(match &mut self.guard {
            Some(guard) if self.chosen.is_some() => guard.taken(patience)?.is_some(),
            Some(guard) => guard.ready(patience)?,
            None => true,
        })
    }

    /// Chooses the next token from a row, unless it was chosen before, and reports it when the guard has taken it.
    fn sample_row(
        &mut self,
        row: Row<'_>,
        routing: Option<&[u16]>,
        vocabulary: &dyn Vocabulary,
        n_vocab: usize,
        now: Instant,
        events: &mut Events,
    ) -> Result<Outcome, Error> {
        let token = match (row, self.chosen) {
            (Row::Hidden, _) => return Ok(Outcome::Token(Some(FinishReason::Length))),
            (_, Some(token)) => token,
            (Row::Logits(logits), None) => {
                let allowed = match &mut self.guard {
                    Some(guard) => guard.mask(logits)?,
                    None => logits,
                };
                self.sampler.sample(allowed)?
            }
            (Row::Best(best, listed), None) => self.sampler.sample_best(&best, listed, n_vocab)?,
        };
        let mut none = Duration::ZERO;
        let taken = match &mut self.guard {
            Some(guard) if self.chosen.is_some() => guard.taken(&mut none)?,
            Some(guard) => guard.accept(token)?,
            None => Some(false),
        };
        let Some(is_finished) = taken else {
            self.chosen = Some(token);
            return Ok(Outcome::Late);
        };
        self.chosen = None;
        let mut event = events.token();
        let logprob = match (row, self.logprobs) {
            (Row::Logits(logits), Some(n)) => Some(self.sampler.logprobs(logits, token, n, event.top())?),
            (Row::Best(best, listed), Some(n)) => {
                Some(self.sampler.logprobs_best(&best, listed, token, n, event.top())?)
            }
            _ => None,
        };
        self.sampler.accept(token);
        self.tokens.push(token);
        if self.tokens.len() == self.min_tokens {
            self.sampler.allow_all();
        }
        self.rollbacks = 0;
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);

        let is_end = (!self.ignore_eos || is_finished) && vocabulary.is_end_of_generation(token);
        let is_stop = is_end || self.stop_tokens.contains(&token);
        let mut which = None;
        if !is_stop {
            self.text.push(token, self.stop.pending());
            which = self.stop.advance(event.text());
        }
        let mut reason = match which {
            Some(which) => Some(FinishReason::StopString(which)),
            None if is_stop || is_finished => Some(FinishReason::Stop),
            None if self.tokens.len() < self.max_tokens => None,
            None if self.tokens.len() - self.n_prompt == self.max_new => Some(FinishReason::Length),
            None => Some(FinishReason::ContextFull),
        };
        if reason.is_some() && which.is_none() {
            self.text.finish(self.stop.pending());
            match self.stop.advance(event.text()) {
                Some(which) => reason = Some(FinishReason::StopString(which)),
                None => self.stop.flush(event.text()),
            }
        }
        event.close(self.id, token, logprob, routing.filter(|_| self.routing));
        Ok(Outcome::Token(reason))
    }

    /// Returns what it took up to now.
    pub fn usage(&self) -> Usage {
        let since = |from: Option<Instant>, to: Option<Instant>| match (from, to) {
            (Some(from), Some(to)) => to.saturating_duration_since(from),
            _ => Default::default(),
        };
        Usage {
            prompt_tokens: self.n_prompt,
            prompt_computed: self.prompt_computed,
            cached_tokens: self.cached,
            generated: self.tokens.len() - self.n_prompt,
            preemptions: self.preemptions,
            timings: Timings {
                queued: since(Some(self.submitted), self.admitted),
                prompt: since(self.admitted, self.first_token),
                decode: since(self.first_token, self.last_token),
            },
        }
    }

    /// Says what does not add up between steps; the memory is counted elsewhere.
    pub fn audit(&self) -> Result<(), String> {
        let Sequence { id, held, tokens, planned, drafts, late, .. } = self;
        // The row of a late sequence is that of its last token.
        let computed = held.computed + usize::from(late.is_none());
        match *planned != 0 || !drafts.is_empty() || computed > tokens.len() {
            true => Err(format!("request {}: {} of {} computed, {planned} planned", id.0, held.computed, tokens.len())),
            false => Ok(()),
        }
    }
}

/// Has up to `max` of the tokens that follow `tokens` guessed, without what is outside the vocabulary; returns whether
/// they are `forced`, of which there may be none.
fn guess(
    tokens: &[u32],
    forced: &[u32],
    drafter: &mut dyn Drafter,
    max: usize,
    n_vocab: usize,
    out: &mut Vec<u32>,
) -> bool {
    out.clear();
    if max > 0 {
        match forced {
            [] => drafter.draft(tokens, max, out),
            forced => out.extend(forced.iter().take(max)),
        }
        let known = out.iter().take(max).take_while(|&&id| (id as usize) < n_vocab).count();
        out.truncate(known);
    }
    !forced.is_empty()
}
