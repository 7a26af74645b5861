//! What a step computes: any mix of prefill chunks and decode tokens of several sequences.

use std::ops::Range;

use model::plan::{N_AXES, Plan};

use crate::{Kinds, Limits, StepError};

/// Positions in a cache page. Attention's tiles are pages, so this number is part of the CPU law.
pub const PAGE: usize = 32;

/// One step's work. The vectors are reused from step to step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// Token ids, `[T]`, chunk after chunk.
    pub tokens: Vec<u32>,
    /// One per sequence in the step.
    pub chunks: Vec<Chunk>,
    /// Page tables of the chunks, concatenated.
    pub pages: Vec<u32>,
    /// Window page tables of the chunks, concatenated.
    pub window_pages: Vec<u32>,
    /// Tokens (indices into `tokens`, strictly ascending) whose rows the step returns, `[R]`.
    pub rows: Vec<u32>,
    /// What the step returns of each row, `[R]`.
    pub asks: Vec<Ask>,
    /// Tokens that [`Ask::Best`] lists, row after row.
    pub listed: Vec<u32>,
    /// Bit sets of [`Ask::Best`].
    pub masks: Masks,
    /// Hidden states that the tokens come after, `[T, d_model]`: such a step runs the draft head
    /// ([`model::plan::DraftHead`]), and a step without any the model. A token is at the position of its hidden
    /// state. The step touches no recurrent state and has no drafts itself.
    pub hidden: Vec<f32>,
    /// Rows in place of embeddings, of the tokens of images.
    pub given: GivenRows,
}

/// Rows that a step is given ([`model::plan::Op::Input`]), and what their tokens differ by from tokens of text: their
/// positions in rotary embeddings, and what they see.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GivenRows {
    /// The rows, `[G, d_input]`.
    pub rows: Vec<f32>,
    /// Their tokens (indices into [`Batch::tokens`], strictly ascending), `[G]`.
    pub tokens: Vec<u32>,
    /// Positions of all tokens of the step in rotary embeddings, `[T]`; empty where they are those in the sequence.
    pub places: Vec<[u32; N_AXES]>,
    /// Tokens that see later ones of the same span, where layers heed spans ([`model::plan::Plan::sees_spans`]): ranges
    /// of indices into [`Batch::tokens`], ascending, each within a chunk.
    pub spans: Vec<Range<u32>>,
}

impl GivenRows {
    /// Whether the step is one of text alone.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.tokens.is_empty() && self.places.is_empty() && self.spans.is_empty()
    }

    /// Empties it and keeps its memory.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.tokens.clear();
        self.places.clear();
        self.spans.clear();
    }
}

/// What a program takes besides tokens of text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Takes {
    /// Width of the hidden states of its draft head ([`Batch::hidden`]).
    pub d_hidden: Option<usize>,
    /// Width of the rows that it can be given ([`Batch::given`]).
    pub d_input: Option<usize>,
    /// Every token has such a row: the program is an image encoder.
    pub is_encoder: bool,
    /// Rows from each of [`Batch::rows`] on that the step merges.
    pub n_merged: usize,
    /// Steps have whole texts ([`model::plan::Plan::whole`]).
    pub whole: bool,
    /// Rows of its tables of places, by axis, which places are below.
    pub n_places: [usize; N_AXES],
}

impl Takes {
    /// What programs of a plan take.
    pub fn of(plan: &Plan) -> Takes {
        Takes {
            d_hidden: plan.draft.as_ref().map(|_| plan.d_model),
            d_input: plan.d_input(),
            is_encoder: plan.is_encoder(),
            n_merged: plan.n_merged(),
            whole: plan.whole,
            n_places: plan.n_places(),
        }
    }
}

/// What a step returns of a row, besides its hidden state, which is always returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ask {
    /// All logits, `[n_vocab]`.
    #[default]
    Logits,
    /// The best logits, selected on the device so that the row need not be copied: see [`crate::Best`].
    Best {
        /// Number of logits, at least 1.
        n: u32,
        /// Index into [`Batch::listed`] of the first token whose logit is returned in any case: the sampler changes
        /// these by a penalty or a bias.
        first_listed: u32,
        /// Number of such tokens.
        n_listed: u32,
        /// Index of the bit set of allowed tokens in [`Batch::masks`]; all are allowed without one.
        mask: Option<u32>,
        /// Whether to return the log-sum-exp of the whole row.
        log_sum_exp: bool,
    },
    /// The hidden state only.
    Hidden,
}

/// Bit sets over the vocabulary: bit `id % 64` of word `id / 64` is set when the token is allowed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Masks {
    words: Vec<u64>,
    n_words: usize, // per set
    n: usize,
}

impl Masks {
    /// Appends a set over `n_vocab` tokens and returns its index; all sets of a batch are over the same vocabulary.
    pub fn push(&mut self, n_vocab: usize, is_allowed: impl Fn(u32) -> bool) -> u32 {
        self.n_words = n_vocab.div_ceil(64);
        let word = |w: usize| {
            let ids = 64 * w as u32..(64 * (w as u32 + 1)).min(n_vocab as u32);
            ids.filter(|&id| is_allowed(id)).fold(0u64, |word, id| word | 1 << (id % 64))
        };
        self.words.extend((0..self.n_words).map(word));
        self.n += 1;
        self.n as u32 - 1
    }

    /// The words of a set, `[n_vocab / 64]` rounded up.
    pub fn words(&self, mask: u32) -> &[u64] {
        &self.words[mask as usize * self.n_words..][..self.n_words]
    }

    /// Number of sets.
    pub fn len(&self) -> usize {
        self.n
    }

    /// Whether there are no sets.
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// Removes all sets and keeps their memory.
    pub fn clear(&mut self) {
        self.words.clear();
        self.n = 0;
    }
}

/// Consecutive tokens of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Index of the first token in [`Batch::tokens`]; chunks follow each other without gaps.
    pub first: u32,
    /// Number of tokens, at least 1.
    pub len: u32,
    /// Position of the first token; the cache holds all earlier positions of the sequence.
    pub pos: u32,
    /// Index of the sequence's first page in [`Batch::pages`]. Position `p` lies in page
    /// `pages[first_page + p / PAGE]`.
    pub first_page: u32,
    /// Number of pages, at least enough for `pos + len` positions.
    pub n_pages: u32,
    /// Index of the sequence's first window page in [`Batch::window_pages`]. Position `p` lies in page
    /// `window_pages[first_window_page + p / PAGE - first_window_block]`. The three window fields are ignored where no
    /// cache of the plan has a window.
    pub first_window_page: u32,
    /// Number of window pages, from the first position that the chunk's first token attends to up to the chunk's end.
    pub n_window_pages: u32,
    /// Block (of [`PAGE`] positions) of the first window page.
    pub first_window_block: u32,
    /// Slot of the sequence's recurrent state. It covers the positions before `pos`; the step advances it past the
    /// chunk. A chunk at position 0 starts from zeros. Ignored where the plan has no states.
    pub state: u32,
    /// Number of tokens at the chunk's end that are drafts: guesses of what follows, which are computed like all
    /// others, but leave the state where it stands before them until [`crate::Drafts::commit`] says how many were
    /// right. Fewer than `len`, at most [`Limits::max_draft`].
    pub n_draft: u32,
}

/// Memory of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tables<'a> {
    /// Pages of its positions, in order.
    pub pages: &'a [u32],
    /// Window pages, in order.
    pub window_pages: &'a [u32],
    /// Block of the first window page.
    pub first_window_block: usize,
    /// Slot of its recurrent state.
    pub state: u32,
}

impl Batch {
    /// An empty batch for steps within these limits. Filling it allocates only when sequences share very many pages.
    pub fn with_room(limits: Limits) -> Batch {
        Batch {
            tokens: Vec::with_capacity(limits.max_tokens),
            chunks: Vec::with_capacity(limits.max_tokens),
            pages: Vec::with_capacity(limits.n_pages),
            window_pages: Vec::with_capacity(limits.n_window_pages),
            rows: Vec::with_capacity(limits.max_outputs),
            asks: Vec::with_capacity(limits.max_outputs),
            ..Batch::default()
        }
    }

    /// Bytes that [`Batch::with_room`] allocates.
    pub fn bytes_of_room(limits: Limits) -> usize {
        let token = size_of::<u32>() + size_of::<Chunk>();
        let output = size_of::<u32>() + size_of::<Ask>();
        let pages = limits.n_pages.saturating_add(limits.n_window_pages).saturating_mul(size_of::<u32>());
        let rows = limits.max_tokens.saturating_mul(token).saturating_add(limits.max_outputs.saturating_mul(output));
        pages.saturating_add(rows)
    }

    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.chunks.clear();
        self.pages.clear();
        self.window_pages.clear();
        self.rows.clear();
        self.asks.clear();
        self.listed.clear();
        self.masks.clear();
        self.hidden.clear();
        self.given.clear();
    }

    /// Whether the step runs the draft head.
    pub fn is_draft(&self) -> bool {
        !self.hidden.is_empty()
    }

    /// Copies another batch and keeps the memory of this one.
    pub fn copy_from(&mut self, other: &Batch) {
        let Batch { tokens, chunks, pages, window_pages, rows, asks, listed, masks, hidden, given } = self;
        hidden.clone_from(&other.hidden);
        given.rows.clone_from(&other.given.rows);
        given.tokens.clone_from(&other.given.tokens);
        given.places.clone_from(&other.given.places);
        given.spans.clone_from(&other.given.spans);
        tokens.clone_from(&other.tokens);
        chunks.clone_from(&other.chunks);
        pages.clone_from(&other.pages);
        window_pages.clone_from(&other.window_pages);
        rows.clone_from(&other.rows);
        asks.clone_from(&other.asks);
        listed.clone_from(&other.listed);
        masks.words.clone_from(&other.masks.words);
        (masks.n_words, masks.n) = (other.masks.n_words, other.masks.n);
    }

    /// Appends a chunk of a sequence with its memory. `rows` are the returned rows as offsets into the chunk; they
    /// return logits unless the caller changes [`Batch::asks`] afterwards.
    pub fn push(&mut self, tokens: &[u32], pos: usize, tables: Tables<'_>, rows: impl IntoIterator<Item = usize>) {
        let Tables { pages, window_pages, first_window_block, state } = tables;
        let first = self.tokens.len() as u32;
        self.chunks.push(Chunk {
            first,
            len: tokens.len() as u32,
            pos: pos as u32,
            first_page: self.pages.len() as u32,
            n_pages: pages.len() as u32,
            first_window_page: self.window_pages.len() as u32,
            n_window_pages: window_pages.len() as u32,
            first_window_block: first_window_block as u32,
            state,
            n_draft: 0,
        });
        self.tokens.extend_from_slice(tokens);
        self.pages.extend_from_slice(pages);
        self.window_pages.extend_from_slice(window_pages);
        self.rows.extend(rows.into_iter().map(|r| first + r as u32));
        self.asks.resize(self.rows.len(), Ask::Logits);
    }

    /// Appends drafts to the last chunk, whose pages have room for them. The logits of all their rows are asked for.
    pub fn push_drafts(&mut self, drafts: &[u32]) {
        let Some(chunk) = self.chunks.last_mut() else { return };
        let first = chunk.first + chunk.len;
        chunk.len += drafts.len() as u32;
        chunk.n_draft += drafts.len() as u32;
        self.tokens.extend_from_slice(drafts);
        self.rows.extend((0..drafts.len() as u32).map(|i| first + i));
        self.asks.resize(self.rows.len(), Ask::Logits);
    }

    /// Position of every token in rotary embeddings.
    pub fn places(&self) -> impl Iterator<Item = [u32; N_AXES]> + '_ {
        let own = self.given.places.iter().copied();
        let is_said = !self.given.places.is_empty();
        let plain = self.chunks.iter().filter(move |_| !is_said).flat_map(|c| c.pos..c.pos + c.len);
        own.chain(plain.map(|pos| [pos; N_AXES]))
    }

    /// The position after the last that every token sees where spans are heeded: of its span, or its own.
    pub fn ends(&self) -> impl Iterator<Item = u32> + '_ {
        let spans = &self.given.spans;
        let end = |c: &Chunk, token: u32| {
            let at = spans.partition_point(|span| span.end <= token);
            let end = spans.get(at).filter(|span| span.contains(&token)).map_or(token + 1, |span| span.end);
            c.pos + end - c.first
        };
        self.chunks.iter().flat_map(move |c| (c.first..c.first + c.len).map(move |token| end(c, token)))
    }

    /// The page of a block of the chunk's sequence, in the caches with a window or in the others. The batch is checked,
    /// and the chunk's tokens attend to the block.
    pub fn page(&self, c: &Chunk, windowed: bool, block: usize) -> u32 {
        if windowed {
            self.window_pages[c.first_window_page as usize + block - c.first_window_block as usize]
        } else {
            self.pages[c.first_page as usize + block]
        }
    }

    /// The pages that a chunk writes, in order. The chunk's tables lie within the batch.
    fn written(&self, c: &Chunk, windowed: bool) -> &[u32] {
        let (first, end) = (c.pos as usize / PAGE, (c.pos as usize + c.len as usize).div_ceil(PAGE));
        if windowed {
            let block = c.first_window_block as usize;
            &self.window_pages[c.first_window_page as usize..][first - block..end - block]
        } else {
            &self.pages[c.first_page as usize..][first..end]
        }
    }

    /// The first page that the step writes at two places, with the two chunks. All pairs are compared: a step writes
    /// few pages.
    fn written_twice(&self, windowed: bool) -> Option<(u32, usize, usize)> {
        for (i, c) in self.chunks.iter().enumerate() {
            let mine = self.written(c, windowed);
            for (n, page) in mine.iter().enumerate() {
                let others = self.chunks[i + 1..].iter().position(|other| self.written(other, windowed).contains(page));
                let other = if mine[n + 1..].contains(page) { Some(i) } else { others.map(|j| i + 1 + j) };
                if let Some(other) = other {
                    return Some((*page, i, other));
                }
            }
        }
        None
    }

    /// Checks the batch against itself and the limits, once, before a backend computes. Allocates only on failure.
    ///
    /// # Errors
    /// [`StepError::TokenId`] for an id outside the vocabulary, [`StepError::Batch`] for anything else that is invalid.
    pub fn check(&self, limits: Limits, kinds: Kinds, n_vocab: usize) -> Result<(), StepError> {
        self.check_with(limits, kinds, n_vocab, Takes::default())
    }

    /// As [`Batch::check`], for a program that takes more than tokens of text.
    ///
    /// # Errors
    /// As [`Batch::check`].
    pub fn check_with(&self, limits: Limits, kinds: Kinds, n_vocab: usize, takes: Takes) -> Result<(), StepError> {
        let bad = |why: String| Err(StepError::Batch(why));
        let kinds = Kinds { state: kinds.state && !self.is_draft(), ..kinds };
        match takes.d_hidden {
            _ if !self.is_draft() => {}
            None => return bad("the batch has hidden states, and the program no draft head".into()),
            Some(d) if Some(self.hidden.len()) != self.tokens.len().checked_mul(d) => {
                let (n, tokens) = (self.hidden.len(), self.tokens.len());
                return bad(format!("the batch has {n} numbers of hidden states, {tokens} tokens have {d} each"));
            }
            Some(_) if self.chunks.iter().any(|c| c.n_draft > 0) => {
                return bad("a step of the draft head has drafts".into());
            }
            Some(_) => {}
        }
        if self.tokens.is_empty() {
            return bad("the batch is empty".into());
        }
        if self.tokens.len() > limits.max_tokens {
            return bad(format!("the batch has {} tokens, the limit is {}", self.tokens.len(), limits.max_tokens));
        }
        if self.rows.len() > limits.max_outputs {
            return bad(format!("the batch requests {} rows, the limit is {}", self.rows.len(), limits.max_outputs));
        }
        if let Some(token) = self.tokens.iter().position(|&id| id as usize >= n_vocab) {
            return Err(StepError::TokenId { token, id: self.tokens[token], n_vocab });
        }
        let mut next = 0usize;
        for (i, c) in self.chunks.iter().enumerate() {
            let end = c.pos as usize + c.len as usize;
            if c.first as usize != next || c.len == 0 {
                return bad(format!(
                    "chunk {i} starts at token {} with {} tokens, expected start {next}",
                    c.first, c.len
                ));
            }
            if c.n_draft >= c.len || c.n_draft as usize > limits.max_draft {
                let max = limits.max_draft;
                return bad(format!("chunk {i} has {} drafts among {} tokens, the limit is {max}", c.n_draft, c.len));
            }
            if end > limits.max_positions {
                return bad(format!("chunk {i} ends at position {end}, the limit is {}", limits.max_positions));
            }
            if (c.n_pages as usize) < end.div_ceil(PAGE) {
                return bad(format!("chunk {i} needs {} pages, it has {}", end.div_ceil(PAGE), c.n_pages));
            }
            let table = self.pages.get(c.first_page as usize..c.first_page as usize + c.n_pages as usize);
            let Some(table) = table else {
                return bad(format!("chunk {i}'s page table ends past the {} pages of the batch", self.pages.len()));
            };
            if let Some(&page) = table.iter().find(|&&p| p as usize >= limits.n_pages) {
                return bad(format!("chunk {i} names page {page}, the cache has {}", limits.n_pages));
            }
            self.check_window(i, c, limits, kinds)?;
            self.check_state(i, c, limits, kinds)?;
            next += c.len as usize;
        }
        if next != self.tokens.len() {
            return bad(format!("the chunks cover {next} of {} tokens", self.tokens.len()));
        }
        if self.rows.windows(2).any(|w| w[0] >= w[1]) || self.rows.last().is_some_and(|&r| r as usize >= next) {
            return bad("the requested rows are not ascending token indices".into());
        }
        self.check_asks(n_vocab)?;
        self.check_given(takes)?;
        // Two sequences writing one page would race, and each would attend to the other's positions.
        if let Some((page, a, b)) = self.written_twice(false) {
            return bad(format!("page {page} is written at two places, by chunks {a} and {b}"));
        }
        match kinds.window.and_then(|_| self.written_twice(true)) {
            Some((page, a, b)) => bad(format!("window page {page} is written at two places, by chunks {a} and {b}")),
            None => Ok(()),
        }
    }

    /// Checks a step of whole texts: each chunk is one, its tokens see each other, and have a place.
    fn check_whole(&self, takes: Takes) -> Result<(), StepError> {
        let bad = |why: String| Err(StepError::Batch(why));
        let GivenRows { rows, tokens, places, spans } = &self.given;
        if !rows.is_empty() || !tokens.is_empty() {
            return bad("the batch has rows of images, and the program takes none".into());
        }
        let is_whole = |(c, span): (&Chunk, &Range<u32>)| c.pos == 0 && *span == (c.first..c.first + c.len);
        if spans.len() != self.chunks.len() || !self.chunks.iter().zip(spans).all(is_whole) {
            return bad("the program takes whole texts, and the batch has parts of some".into());
        }
        if places.len() != self.tokens.len() {
            return bad(format!("{} tokens have {} places", self.tokens.len(), places.len()));
        }
        let is_known = |place: &[u32; N_AXES]| place.iter().zip(takes.n_places).all(|(&at, n)| (at as usize) < n);
        if let Some(place) = places.iter().find(|place| !is_known(place)) {
            return bad(format!("a token has place {place:?}, the model has {:?}", takes.n_places));
        }
        match self.asks.iter().all(|ask| *ask == Ask::Hidden) {
            true => Ok(()),
            false => bad("the batch asks for logits, and the program has none".into()),
        }
    }

    /// Checks rows that are given, positions and spans.
    fn check_given(&self, takes: Takes) -> Result<(), StepError> {
        let bad = |why: String| Err(StepError::Batch(why));
        let GivenRows { rows, tokens, places, spans } = &self.given;
        let n_tokens = self.tokens.len();
        if takes.whole {
            return self.check_whole(takes);
        }
        if takes.is_encoder && tokens.len() != n_tokens {
            return bad(format!("{} of {n_tokens} patches have rows", tokens.len()));
        }
        let n_merged = takes.n_merged.max(1);
        if self.rows.last().is_some_and(|&r| n_tokens - (r as usize) < n_merged) {
            return bad(format!("the last row to return is not followed by the {n_merged} that are merged"));
        }
        if self.given.is_empty() {
            return Ok(());
        }
        // A draft head is given positions alone.
        let is_refused = self.is_draft() && !(tokens.is_empty() && spans.is_empty());
        let Some(d_input) = takes.d_input.filter(|_| !is_refused) else {
            return bad("the batch has rows of images, and the program takes none".into());
        };
        if tokens.len().checked_mul(d_input) != Some(rows.len()) {
            return bad(format!("{} rows of images of {d_input} numbers have {}", tokens.len(), rows.len()));
        }
        let is_ascending = tokens.windows(2).all(|w| w[0] < w[1]);
        if !is_ascending || tokens.last().is_some_and(|&t| t as usize >= n_tokens) {
            return bad("the tokens of images are not ascending token indices".into());
        }
        if !places.is_empty() && places.len() != n_tokens {
            return bad(format!("{n_tokens} tokens have {} positions", places.len()));
        }
        let in_chunk = |span: &Range<u32>| {
            let at = self.chunks.partition_point(|c| c.first + c.len <= span.start);
            self.chunks.get(at).is_some_and(|c| c.first <= span.start && span.end <= c.first + c.len)
        };
        let is_apart = spans.windows(2).all(|w| w[0].end <= w[1].start);
        match spans.iter().find(|span| span.is_empty() || !in_chunk(span)) {
            Some(span) => bad(format!("tokens {span:?} that see each other are not of one chunk")),
            None if !is_apart => bad("the spans of tokens that see each other are not ascending".into()),
            None => Ok(()),
        }
    }

    /// Checks that the step can return what the rows request.
    fn check_asks(&self, n_vocab: usize) -> Result<(), StepError> {
        let bad = |why: String| Err(StepError::Batch(why));
        if self.asks.len() != self.rows.len() {
            return bad(format!("{} rows have {} requests", self.rows.len(), self.asks.len()));
        }
        if !self.masks.is_empty() && self.masks.n_words != n_vocab.div_ceil(64) {
            return bad(format!("masks have {} words, {} wanted", self.masks.n_words, n_vocab.div_ceil(64)));
        }
        if let Some(&id) = self.listed.iter().find(|&&id| id as usize >= n_vocab) {
            return bad(format!("token {id} is listed, the vocabulary has {n_vocab}"));
        }
        for (r, ask) in self.asks.iter().enumerate() {
            let Ask::Best { n, first_listed, n_listed, mask, .. } = *ask else { continue };
            if n == 0 || n as usize > n_vocab {
                return bad(format!("row {r} requests the best {n} of {n_vocab} logits"));
            }
            if first_listed as usize + n_listed as usize > self.listed.len() {
                return bad(format!("row {r} lists tokens past the {} of the batch", self.listed.len()));
            }
            if mask.is_some_and(|mask| mask as usize >= self.masks.len()) {
                return bad(format!("row {r} names mask {mask:?}, there are {}", self.masks.len()));
            }
        }
        Ok(())
    }

    /// The chunk's window pages cover all positions that its tokens attend to.
    fn check_window(&self, i: usize, c: &Chunk, limits: Limits, kinds: Kinds) -> Result<(), StepError> {
        let bad = |why: String| Err(StepError::Batch(why));
        if kinds.window.is_none() {
            return Ok(());
        }
        let (first, n) = (c.first_window_block as usize, c.n_window_pages as usize);
        let needed = kinds.first_window_block(c.pos as usize)..(c.pos as usize + c.len as usize).div_ceil(PAGE);
        if first > needed.start || first + n < needed.end {
            return bad(format!("chunk {i} needs window pages of blocks {needed:?}, it has {:?}", first..first + n));
        }
        let Some(table) = self.window_pages.get(c.first_window_page as usize..c.first_window_page as usize + n) else {
            return bad(format!(
                "chunk {i}'s window table ends past the {} window pages of the batch",
                self.window_pages.len()
            ));
        };
        match table.iter().find(|&&p| p as usize >= limits.n_window_pages) {
            Some(page) => bad(format!("chunk {i} names window page {page}, there are {}", limits.n_window_pages)),
            None => Ok(()),
        }
    }

    /// No earlier chunk has the chunk's state.
    fn check_state(&self, i: usize, c: &Chunk, limits: Limits, kinds: Kinds) -> Result<(), StepError> {
        if !kinds.state {
            return Ok(());
        }
        if c.state as usize >= limits.n_states {
            let why = format!("chunk {i} names state {}, there are {}", c.state, limits.n_states);
            return Err(StepError::Batch(why));
        }
        match self.chunks[..i].iter().position(|other| other.state == c.state) {
            Some(other) => Err(StepError::Batch(format!("chunks {other} and {i} both advance state {}", c.state))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        max_tokens: 200,
        max_outputs: 4,
        n_pages: 16,
        max_positions: 400,
        n_window_pages: 9,
        n_states: 3,
        max_draft: 2,
    };

    /// Chunks as (tokens, position, pages).
    fn check(chunks: &[(usize, usize, &[u32])]) -> Result<(), StepError> {
        let mut batch = Batch::default();
        for &(n, pos, pages) in chunks {
            batch.push(&vec![0; n], pos, Tables { pages, ..Tables::default() }, []);
        }
        batch.check(LIMITS, Kinds::default(), 1)
    }

    #[test]
    fn a_state_belongs_to_one_chunk() {
        let cases: &[(bool, &[u32], Option<&str>)] = &[
            (true, &[2, 0, 1], None),
            (true, &[2, 3], Some("chunk 1 names state 3, there are 3")),
            (true, &[1, 0, 1], Some("chunks 0 and 2 both advance state 1")),
            // Without states the slots are ignored.
            (false, &[7, 7], None),
        ];
        for &(state, slots, why) in cases {
            let mut batch = Batch::default();
            for (i, &state) in slots.iter().enumerate() {
                batch.push(&[0], 0, Tables { pages: &[i as u32], state, ..Tables::default() }, []);
            }
            let expected = why.map_or(Ok(()), |why| Err(StepError::Batch(why.into())));
            let kinds = Kinds { state, ..Kinds::default() };
            assert_eq!(batch.check(LIMITS, kinds, 1), expected, "{slots:?}");
        }
    }

    #[test]
    fn drafts_follow_a_token_and_are_few() {
        let cases: &[(usize, usize, Option<&str>)] = &[
            (1, 0, None),
            (1, 2, None),
            (2, 1, None),
            (1, 3, Some("chunk 0 has 3 drafts among 4 tokens, the limit is 2")),
            (0, 1, Some("chunk 0 has 1 drafts among 1 tokens, the limit is 2")),
        ];
        for &(n, n_draft, why) in cases {
            let mut batch = Batch::default();
            batch.push(&vec![0; n], 0, Tables { pages: &[0], ..Tables::default() }, n.checked_sub(1));
            batch.push_drafts(&vec![0; n_draft]);
            assert_eq!(batch.rows.len(), n.min(1) + n_draft);
            let expected = why.map_or(Ok(()), |why| Err(StepError::Batch(why.into())));
            assert_eq!(batch.check(LIMITS, Kinds::default(), 1), expected, "{n} tokens, {n_draft} drafts");
        }
    }

    #[test]
    fn window_pages_cover_what_the_chunk_looks_at() {
        // Two chunks as (tokens, position, first block, window pages), and what is wrong with the second.
        type Part<'a> = (usize, usize, usize, &'a [u32]);
        let cases: &[(Part, Option<&str>)] = &[
            ((1, 0, 0, &[0]), None),
            ((64, 0, 0, &[0, 1]), None),
            // With a window of 40, position 71 attends to 32 and later; position 70 to 31 and later.
            ((1, 71, 1, &[0, 1]), None),
            ((1, 71, 0, &[5, 0, 1]), None),
            ((1, 71, 1, &[0, 1, 2, 3]), None),
            ((1, 70, 1, &[0, 1]), Some("chunk 1 needs window pages of blocks 0..3, it has 1..3")),
            ((60, 71, 1, &[0, 1, 2]), Some("chunk 1 needs window pages of blocks 1..5, it has 1..4")),
            ((1, 71, 3, &[0]), Some("chunk 1 needs window pages of blocks 1..3, it has 3..4")),
            ((1, 71, 1, &[0, 9]), Some("chunk 1 names window page 9, there are 9")),
            // The first chunk only reads page 8, and writes page 7.
            ((1, 71, 1, &[8, 1]), None),
            ((1, 71, 1, &[0, 7]), Some("window page 7 is written at two places, by chunks 0 and 1")),
            ((64, 0, 0, &[3, 3]), Some("window page 3 is written at two places, by chunks 1 and 1")),
        ];
        for (second, why) in cases {
            let mut batch = Batch::default();
            for (i, &(n, pos, first_window_block, window_pages)) in
                [(1, 71, 1, &[8, 7][..]), *second].iter().enumerate()
            {
                let pages: Vec<u32> = (0..8).map(|p| 8 * i as u32 + p).collect();
                let tables = Tables { pages: &pages, window_pages, first_window_block, ..Tables::default() };
                batch.push(&vec![0; n], pos, tables, []);
            }
            let expected = why.map_or(Ok(()), |why| Err(StepError::Batch(why.into())));
            let kinds = Kinds { window: Some(40), ..Kinds::default() };
            assert_eq!(batch.check(LIMITS, kinds, 1), expected, "{second:?}");
            assert_eq!(batch.check(LIMITS, Kinds::default(), 1), Ok(()), "{second:?}");
        }
    }

    #[test]
    fn a_page_is_written_at_one_place() {
        let ok: &[&[(usize, usize, &[u32])]] = &[
            &[(1, 0, &[3]), (1, 0, &[4])],
            // Pages that are only read may be shared; pages behind the written ones are not touched.
            &[(1, 32, &[3, 4]), (1, 32, &[3, 5]), (40, 64, &[3, 3, 6, 7])],
            &[(32, 0, &[1, 2]), (32, 0, &[2, 1])],
            &[(64, 32, &[9, 8, 7, 7])],
        ];
        let twice: &[(&[(usize, usize, &[u32])], &str)] = &[
            (&[(1, 0, &[3]), (1, 0, &[3])], "page 3 is written at two places, by chunks 0 and 1"),
            (&[(1, 0, &[3]), (1, 5, &[4]), (1, 40, &[5, 4])], "page 4 is written at two places, by chunks 1 and 2"),
            (&[(33, 0, &[6, 7]), (100, 0, &[1, 2, 3, 7])], "page 7 is written at two places, by chunks 0 and 1"),
            (&[(64, 0, &[3, 3])], "page 3 is written at two places, by chunks 0 and 0"),
            (&[(1, 0, &[0]), (70, 40, &[9, 5, 6, 5])], "page 5 is written at two places, by chunks 1 and 1"),
        ];
        for chunks in ok {
            assert_eq!(check(chunks), Ok(()), "{chunks:?}");
        }
        for (chunks, why) in twice {
            assert_eq!(check(chunks), Err(StepError::Batch(why.to_string())), "{chunks:?}");
        }
    }
}
