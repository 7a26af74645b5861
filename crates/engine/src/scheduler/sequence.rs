//! One request on its way: its tokens, the pages that hold them, its sampler and its text.
//! It knows nothing of other sequences.

use std::sync::Arc;
use std::time::Instant;

use backend::PAGE;

use super::pages::{PagePool, Parent};
use super::request::{Error, Events, FinishReason, Request, RequestId, Timings, Usage};
use super::stop::StopMatcher;
use super::vocabulary::{TextStream, Vocabulary};
use crate::grammar::Guard;
use crate::sampler::Sampler;

/// A request that was accepted.
///
/// Between steps `pages` are exactly the pages that `computed` positions need, and the first `n_registered` of them
/// can be found in the prefix cache. Everything that decides about the text (`tokens`, `sampler`, `guard`, `text`, `stop`) stays as
/// it is when the pages are taken away.
pub(super) struct Sequence {
    pub id: RequestId,
    pub priority: i32,
    /// Tokens of this sequence in the step that is being made; 0 when it is not part of it.
    pub planned: usize,
    /// Prompt and answer, `[n_prompt + generated]`.
    tokens: Vec<u32>,
    n_prompt: usize,
    max_new: usize,
    /// Most tokens it may have, by `max_new` or by the context.
    max_tokens: usize,
    /// Positions in the cache.
    computed: usize,
    pages: Vec<u32>,
    n_registered: usize,
    /// The last registered page.
    chain: Parent,
    root: Parent,
    sampler: Sampler,
    guard: Option<Box<Guard>>,
    text: Box<dyn TextStream>,
    stop: StopMatcher,
    stop_tokens: Vec<u32>,
    ignore_eos: bool,
    logprobs: Option<usize>,
    /// Whether it asks which experts were chosen.
    pub routing: bool,
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
    ) -> Result<Sequence, Error> {
        let stop = StopMatcher::new(request.stop_strings, request.include_stop_string)?;
        let mut sampler = Sampler::new(request.sampling)?;
        request.tokens.iter().for_each(|&token| sampler.accept(token));
        let guard = request.constraint.map(Guard::new).transpose()?.map(Box::new);
        let n_prompt = request.tokens.len();
        let max_tokens = n_prompt.saturating_add(request.max_new_tokens).min(context);
        // The answer's room is taken now, so that decoding allocates nothing.
        let mut tokens = request.tokens;
        tokens.reserve_exact(max_tokens - n_prompt);
        let root = Parent::Root(request.cache_salt);
        Ok(Sequence {
            id,
            priority: request.priority,
            planned: 0,
            tokens,
            n_prompt,
            max_new: request.max_new_tokens,
            max_tokens,
            computed: 0,
            pages: Vec::with_capacity(max_tokens.div_ceil(PAGE)),
            n_registered: 0,
            chain: root,
            root,
            sampler,
            guard,
            text: vocabulary.text(request.decode, &request.shown),
            stop,
            stop_tokens: request.stop_tokens,
            ignore_eos: request.ignore_eos,
            logprobs: request.logprobs,
            routing: request.routing,
            cached: 0,
            preemptions: 0,
            submitted: Instant::now(),
            admitted: None,
            first_token: None,
            last_token: None,
        })
    }

    /// Tokens whose positions are not in the cache yet, at least 1.
    pub fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Pages that the remaining tokens need beyond those it has.
    pub fn outstanding(&self) -> usize {
        self.tokens.len().div_ceil(PAGE).saturating_sub(self.pages.len())
    }

    /// Marks that it is in a step from now on.
    pub fn admit(&mut self) {
        self.admitted.get_or_insert_with(Instant::now);
    }

    /// Shares the cached pages that go on where the computed positions end. The last token is never among them: its
    /// logits are wanted.
    pub fn adopt(&mut self, pool: &mut PagePool) {
        while self.n_registered == self.pages.len() && self.computed == self.pages.len() * PAGE {
            let end = self.computed + PAGE;
            if end >= self.tokens.len() {
                return;
            }
            let Some((page, node)) = pool.lookup(self.chain, &self.tokens[self.computed..end]) else { return };
            pool.share(page);
            self.pages.push(page);
            self.n_registered += 1;
            self.chain = Parent::Node(node);
            self.computed = end;
            if self.preemptions == 0 && end <= self.n_prompt {
                self.cached += PAGE;
            }
        }
    }

    /// Takes pages for up to `want` more tokens; returns for how many there was room.
    pub fn extend(&mut self, want: usize, pool: &mut PagePool) -> usize {
        while self.pages.len() * PAGE < self.computed + want {
            let Some(page) = pool.alloc() else { break };
            self.pages.push(page);
        }
        want.min(self.pages.len() * PAGE - self.computed)
    }

    /// The planned tokens, the position of the first, the page table, and whether the last one's logits are wanted.
    pub fn chunk(&self) -> (&[u32], usize, &[u32], bool) {
        let end = self.computed + self.planned;
        (&self.tokens[self.computed..end], self.computed, &self.pages, self.wants_logits())
    }

    /// Whether the planned tokens end with the last one, and an answer is asked for.
    pub fn wants_logits(&self) -> bool {
        self.planned == self.remaining() && self.max_new > 0
    }

    /// Takes back what was planned, after a step that computed nothing.
    pub fn unplan(&mut self, pool: &mut PagePool) {
        self.planned = 0;
        while self.pages.len() > self.computed.div_ceil(PAGE) {
            self.pages.pop().into_iter().for_each(|page| pool.release(page));
        }
    }

    /// The planned tokens are in the cache. Full pages become findable when `cache` says so.
    pub fn computed(&mut self, pool: &mut PagePool, cache: bool) {
        self.computed += self.planned;
        self.planned = 0;
        while cache && (self.n_registered + 1) * PAGE <= self.computed {
            let i = self.n_registered;
            let tokens = &self.tokens[i * PAGE..(i + 1) * PAGE];
            let (page, node) = pool.register(self.pages[i], self.chain, tokens);
            self.pages[i] = page;
            self.chain = Parent::Node(node);
            self.n_registered += 1;
        }
    }

    /// Whether everything is computed and no answer is asked for.
    pub fn is_prompt_only(&self) -> bool {
        self.computed == self.tokens.len() && self.max_new == 0
    }

    /// Gives all pages back; the sequence starts again from its first token, and finds what is still cached.
    pub fn release(&mut self, pool: &mut PagePool) {
        while let Some(page) = self.pages.pop() {
            pool.release(page);
        }
        (self.computed, self.planned, self.n_registered, self.chain) = (0, 0, 0, self.root);
    }

    /// As [`Sequence::release`], after a look for shared pages that did not lead to admission.
    pub fn unadopt(&mut self, pool: &mut PagePool) {
        self.release(pool);
        if self.preemptions == 0 {
            self.cached = 0;
        }
    }

    /// As [`Sequence::release`], to make room for others.
    pub fn preempt(&mut self, pool: &mut PagePool) {
        self.release(pool);
        self.preemptions += 1;
    }

    /// As [`Sequence::release`]; nothing that was computed for it will be found again.
    pub fn discard(&mut self, pool: &mut PagePool) {
        self.pages.iter().for_each(|&page| pool.forget(page));
        self.release(pool);
    }

    /// Chooses the next token from the last position's logits, `[n_vocab]`, and reports it with the experts that made
    /// them. Returns why the request is finished when it is.
    pub fn sample(
        &mut self,
        logits: &[f32],
        routing: Option<&[u16]>,
        vocabulary: &dyn Vocabulary,
        now: Instant,
        events: &mut Events,
    ) -> Result<Option<FinishReason>, Error> {
        let mut event = events.token();
        let allowed = match &mut self.guard {
            Some(guard) => guard.mask(logits)?,
            None => logits,
        };
        let token = self.sampler.sample(allowed)?;
        let logprob = self.logprobs.map(|n| self.sampler.logprobs(logits, token, n, event.top())).transpose()?;
        self.sampler.accept(token);
        let is_finished = match &mut self.guard {
            Some(guard) => guard.accept(token)?,
            None => false,
        };
        self.tokens.push(token);
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
        Ok(reason)
    }

    /// What it took up to now.
    pub fn usage(&self) -> Usage {
        let since = |from: Option<Instant>, to: Option<Instant>| match (from, to) {
            (Some(from), Some(to)) => to.saturating_duration_since(from),
            _ => Default::default(),
        };
        Usage {
            prompt_tokens: self.n_prompt,
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

    /// Counts its pages in `users`, `[n_pages]`, and says what does not add up.
    pub fn audit(&self, users: &mut [u32]) -> Result<(), String> {
        let Sequence { id, computed, pages, n_registered, tokens, planned, .. } = self;
        if *planned != 0 || *computed >= tokens.len() {
            return Err(format!("request {}: {computed} of {} computed, {planned} planned", id.0, tokens.len()));
        }
        if pages.len() != computed.div_ceil(PAGE) || *n_registered > computed / PAGE {
            return Err(format!(
                "request {}: {computed} positions in {} pages, {n_registered} of them registered",
                id.0,
                pages.len()
            ));
        }
        pages.iter().for_each(|&page| users[page as usize] += 1);
        Ok(())
    }
}
