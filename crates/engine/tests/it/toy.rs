//! A program and a vocabulary that show every mistake of a scheduler as wrong text.
//!
//! The program keeps the tokens themselves in its cache, in the pages it is told to use, and its logits are a hash of
//! everything it reads back through the page tables and of its recurrent state. A wrong page, a stale page, a wrong
//! position, a state that missed a token or saw one twice, or a swapped row gives other tokens.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use backend::{
    Batch, Cause, Chunk, Chunks, Drafts, Failure, Fault, Kinds, Limits, Output, PAGE, Picks, Piece, PieceBytes,
    Profile, Program, RouterInfo, Save, StepError, StreamStats, SumInputs, Takes,
};
use engine::sampler::SamplerParams;
use engine::scheduler::{
    Drafter, Engine, EventKind, Events, FinishReason, Key, Options, Part, PromptStore, Request, RequestId, TextStream,
    Usage, Vocabulary,
};
use engine::tokenizer::Decode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The vocabulary's texts. Several are parts of characters, and many join to stop strings.
pub const PIECES: &[&[u8]] = &[
    b"",
    b"a",
    b"b",
    b"ab",
    b"ba",
    b"aab",
    b" ",
    b"\n",
    b"\n\n",
    b"END",
    b"E",
    b"N",
    b"D",
    b"\xc3",
    b"\xa9",
    b"\xc3\xa9",
    b"\xe6",
    b"\x97",
    b"\xa5",
    b"\xf0\x9f",
    b"\x98\x80",
    b"\xff",
    b"c",
    b"abc",
    b"the",
    b"x\xc3",
    b"\xa9y",
    b"bE",
];
/// Ends of generation.
pub const EOS: u32 = 0;
/// Width of the logits; the ids beyond the pieces have no text.
pub const N_VOCAB: usize = PIECES.len() + 2;

/// Mixes a number into a hash (splitmix64's finaliser).
pub fn mix(h: u64, x: u64) -> u64 {
    let mut z = (h ^ x.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Every mix of memories: none but pages, state, windows narrower and wider than a page, both.
pub const KINDS: [Kinds; 6] = [
    Kinds { window: None, state: false, whole: false },
    Kinds { window: None, state: true, whole: false },
    Kinds { window: Some(1), state: false, whole: false },
    Kinds { window: Some(40), state: false, whole: false },
    Kinds { window: Some(33), state: true, whole: false },
    Kinds { window: Some(100), state: true, whole: false },
];

/// Moves a state past a token.
fn recur(state: u64, token: u32, pos: usize) -> u64 {
    mix(mix(state ^ 0x55, token.into()), pos as u64)
}

/// The state before the first token.
const START: u64 = 17;

/// The logits after a sequence of `(token, position)` as they were found: all of them, those of the window, and the
/// state.
fn logits_of(
    found: impl Iterator<Item = (u32, u32)>,
    window: impl Iterator<Item = (u32, u32)>,
    state: u64,
    out: &mut [f32],
) {
    logits_at(window.fold(found.fold(1, hash), hash), state, out);
}

/// Takes one more token into a hash.
fn hash(h: u64, (token, pos): (u32, u32)) -> u64 {
    mix(mix(h, token as u64), pos as u64)
}

/// The logits of what was found, as a hash, and a state.
fn logits_at(found: u64, state: u64, out: &mut [f32]) {
    let h = mix(found, state);
    for (id, logit) in out.iter_mut().enumerate() {
        *logit = (mix(h, id as u64) >> 40) as f32 / (1u64 << 24) as f32 * 8.0 - 4.0;
    }
    // Answers of some length.
    out[EOS as usize] -= 2.0;
}

/// The logits after `tokens`.
pub fn logits(kinds: Kinds, tokens: &[u32], out: &mut [f32]) {
    let found = || tokens.iter().zip(0..).map(|(&token, pos)| (token, pos));
    let n_seen = kinds.window.map_or(0, |window| window.min(tokens.len()));
    let state = tokens.iter().enumerate().fold(START, |state, (pos, &token)| recur(state, token, pos));
    logits_of(found(), found().skip(tokens.len() - n_seen), if kinds.state { state } else { 0 }, out);
}

/// What goes wrong on purpose.
#[derive(Clone, Copy, Debug, Default)]
pub struct Trouble {
    /// A chunk that holds this token is reported as a fault.
    pub fault: Option<u32>,
    /// A batch that holds this token is refused by its id.
    pub refuse: Option<u32>,
    /// The logits after this token are NaN.
    pub nan: Option<u32>,
    /// Every so many steps a batch is refused as a whole, after its own positions were overwritten.
    pub fail_every: Option<u64>,
    /// Every so many steps there are too few logits.
    pub short_every: Option<u64>,
    /// One step in so many fails, half done, by a seed: some chunks are lost, more states are dirty.
    pub failures: Option<(u64, u64)>,
}

pub struct Toy {
    limits: Limits,
    kinds: Kinds,
    trouble: Trouble,
    /// `[n_pages · PAGE]`, token and position.
    cache: Vec<(u32, u32)>,
    /// `[n_window_pages · PAGE]`, the same.
    window_cache: Vec<(u32, u32)>,
    /// `[n_states]`, with the position where each stands.
    states: Vec<(u64, usize)>,
    /// The same after each of the drafts of a slot's last step, until they are committed.
    tried: Vec<Vec<(u64, usize)>>,
    logits: Vec<f32>,
    faults: Vec<Fault>,
    steps: u64,
    /// The submitted step, while it is under way.
    batch: Batch,
    is_busy: bool,
    picks: Picks,
    /// What steps take.
    costs: Option<Costs>,
    /// A head that drafts.
    head: Option<Head>,
}

/// A head that drafts: it knows what the model will say, and says something else at times. It checks what it is given.
pub struct Head {
    /// One row in this number is wrong; none when it is 0.
    wrong: u64,
    /// `[n_pages · PAGE]`: the position of the row at each place.
    cache: Vec<u32>,
    /// Rows that a step returns.
    hidden: Vec<f32>,
    all_hidden: Vec<f32>,
    seen: Arc<Seen>,
}

/// What a head has seen.
#[derive(Debug, Default)]
pub struct Seen {
    pub rows: AtomicU64,
    /// Positions that it should have computed before others, and has not.
    pub holes: AtomicU64,
}

/// Numbers of a hidden state: a hash of the tokens up to a position, the state there, the position, and whether the
/// head made it.
const D_HIDDEN: usize = 10;

fn hidden_of(found: u64, state: u64, pos: u32, is_own: bool) -> [f32; D_HIDDEN] {
    let part = |i: usize| ([found, state][i / 4] >> (16 * (i % 4))) as u16;
    std::array::from_fn(|i| match i {
        8 => pos as f32,
        9 => f32::from(u8::from(is_own)),
        i => f32::from(part(i)),
    })
}

fn of_hidden(row: &[f32]) -> (u64, u64, u32, bool) {
    let number = |from: usize| (0..4).fold(0, |n, i| n | (row[from + i] as u64) << (16 * i));
    (number(0), number(4), row[8] as u32, row[9] != 0.0)
}

/// A clock that only steps move: microseconds since the start, and those of a step and of each of its tokens.
#[derive(Clone, Debug)]
pub struct Costs {
    pub now: Arc<AtomicU64>,
    pub step: u64,
    pub token: u64,
}

impl Costs {
    /// Time since the start.
    pub fn now(&self) -> Duration {
        Duration::from_micros(self.now.load(Ordering::Relaxed))
    }
}

/// An engine whose steps cost time; tests read its clock.
pub fn engine_at(costs: &Costs, limits: Limits, options: Options) -> Engine {
    let toy = Toy::new(limits, Kinds::default(), Trouble::default()).at(costs);
    let mut engine = Engine::new(Box::new(toy), Arc::new(Pieces), options).unwrap();
    let (start, clock) = (Instant::now(), costs.clone());
    engine.set_clock(Arc::new(move || start + clock.now()));
    engine
}

impl Toy {
    pub fn new(limits: Limits, kinds: Kinds, trouble: Trouble) -> Toy {
        Toy {
            limits,
            kinds,
            trouble,
            cache: vec![(u32::MAX, u32::MAX); limits.n_pages * PAGE],
            window_cache: vec![(u32::MAX, u32::MAX); limits.n_window_pages * PAGE],
            states: vec![(u64::MAX, usize::MAX); limits.n_states],
            tried: (0..limits.n_states).map(|_| Vec::with_capacity(limits.max_draft)).collect(),
            logits: Vec::with_capacity(limits.max_outputs * N_VOCAB),
            faults: Vec::with_capacity(limits.max_tokens),
            steps: 0,
            batch: Batch::with_room(limits),
            is_busy: false,
            picks: Picks::default(),
            costs: None,
            head: None,
        }
    }

    /// Returns the same, with steps that cost time.
    pub fn at(self, costs: &Costs) -> Toy {
        Toy { costs: Some(costs.clone()), ..self }
    }

    /// Returns the same with a head whose rows are wrong one time in `wrong`, and what it sees.
    pub fn with_head(self, wrong: u64) -> (Toy, Arc<Seen>) {
        let seen = Arc::new(Seen::default());
        let cache = vec![u32::MAX; self.limits.n_pages * PAGE];
        let head = Head { wrong, cache, hidden: Vec::new(), all_hidden: Vec::new(), seen: seen.clone() };
        (Toy { head: Some(head), ..self }, seen)
    }

    /// Computes a step of the head.
    fn compute_head(&mut self, batch: &Batch) -> Result<(), StepError> {
        Toy::check_writers(batch, Kinds::default());
        self.steps += 1;
        if let Some(failure) = self.failure(0x4ead) {
            return Err(failure.into());
        }
        if self.trouble.fail_every.is_some_and(|n| self.steps.is_multiple_of(n)) {
            return Err(StepError::Batch("trouble".into()));
        }
        let head = self.head.as_mut().unwrap();
        self.logits.clear();
        self.faults.clear();
        head.hidden.clear();
        head.all_hidden.clear();
        let mut rows = batch.rows.iter().peekable();
        for chunk in &batch.chunks {
            let slot = |pos: u32| batch.page(chunk, false, pos as usize / PAGE) as usize * PAGE + pos as usize % PAGE;
            for i in 0..chunk.len {
                let (index, pos) = ((chunk.first + i) as usize, chunk.pos + i);
                let token = batch.tokens[index];
                let (found, state, at, is_own) = of_hidden(&batch.hidden[index * D_HIDDEN..][..D_HIDDEN]);
                assert_eq!(at, pos, "the hidden state is that of another position");
                if !is_own {
                    let computed = (0..=pos).map(|p| self.cache[slot(p)]).fold(1, hash);
                    assert_eq!(found, computed, "the hidden state is that of another text");
                }
                head.cache[slot(pos)] = pos;
                let holes = (0..pos).filter(|&p| head.cache[slot(p)] != p).count();
                head.seen.holes.fetch_add(holes as u64, Ordering::Relaxed);
                head.seen.rows.fetch_add(1, Ordering::Relaxed);
                if rows.next_if_eq(&&(index as u32)).is_none() {
                    continue;
                }
                let (found, state) = (hash(found, (token, pos + 1)), recur(state, token, pos as usize + 1));
                let start = self.logits.len();
                self.logits.resize(start + N_VOCAB, 0.0);
                logits_at(found, if self.kinds.state { state } else { 0 }, &mut self.logits[start..]);
                let h = mix(found, 0x77);
                if head.wrong > 0 && h.is_multiple_of(head.wrong) {
                    self.logits[start + (h >> 32) as usize % N_VOCAB] = 100.0;
                }
                // A draft that is refused refuses the step; programs refuse nothing in their vocabulary.
                if let Some(never) = self.trouble.refuse {
                    self.logits[start + never as usize] = f32::NEG_INFINITY;
                }
                if Some(token) == self.trouble.nan {
                    self.logits[start..].fill(f32::NAN);
                }
                if Some(token) == self.trouble.fault {
                    let chunk = batch.chunks.iter().position(|c| c.first == chunk.first).unwrap() as u32;
                    self.faults.push(Fault { chunk, layer: 9, token: index as u32 });
                }
                head.hidden.extend(hidden_of(found, state, pos + 1, true));
            }
        }
        self.picks.fill(batch, &self.logits, N_VOCAB);
        Ok(())
    }

    /// Whether the step fails, and how.
    fn failure(&self, salt: u64) -> Option<Failure> {
        let (seed, every) = self.trouble.failures?;
        let h = mix(mix(seed, self.steps), salt);
        let some = |h: u64| match h % 4 {
            0 => Chunks::NONE,
            1 => Chunks::All,
            _ => Chunks::These((0..64).filter(|i| mix(h, *i) & 3 == 0).map(|i| i as u32).collect()),
        };
        let why = "it is a toy".to_string();
        let cause = match h & 256 {
            0 => Cause::Device { device: "toy".into(), op: "attention".into(), why },
            _ => Cause::Io { file: "toy.gguf".into(), offset: 4096, why },
        };
        h.is_multiple_of(every).then(|| Failure { cause, lost: some(h >> 20), dirty: some(h >> 40) })
    }

    /// Leaves behind what a failed step may: anything in its own positions, and in dirty states.
    fn spoil(&mut self, batch: &Batch, failure: &Failure) {
        for (index, chunk) in (0..).zip(&batch.chunks) {
            for pos in chunk.pos..chunk.pos + chunk.len {
                let page = batch.page(chunk, false, pos as usize / PAGE);
                self.cache[page as usize * PAGE + pos as usize % PAGE] = (u32::MAX, pos);
                if self.kinds.window.is_some() {
                    let page = batch.page(chunk, true, pos as usize / PAGE);
                    self.window_cache[page as usize * PAGE + pos as usize % PAGE] = (u32::MAX, pos);
                }
            }
            if self.kinds.state && failure.dirty.contains(index) {
                self.states[chunk.state as usize] = (u64::MAX, usize::MAX);
            }
        }
    }

    /// Nobody may read a page in the step that someone else writes it.
    fn check_writers(batch: &Batch, kinds: Kinds) {
        let has = |chunk: &Chunk, windowed: bool| match windowed {
            false => &batch.pages[chunk.first_page as usize..][..chunk.n_pages as usize],
            true => &batch.window_pages[chunk.first_window_page as usize..][..chunk.n_window_pages as usize],
        };
        for windowed in if kinds.window.is_some() { &[false, true][..] } else { &[false] } {
            for (i, a) in batch.chunks.iter().enumerate() {
                for block in a.pos as usize / PAGE..(a.pos + a.len).div_ceil(PAGE as u32) as usize {
                    let page = batch.page(a, *windowed, block);
                    for (j, b) in batch.chunks.iter().enumerate() {
                        let shared = i != j && has(b, *windowed).contains(&page);
                        assert!(!shared, "chunk {i} writes page {page}, chunk {j} has it (windowed: {windowed})");
                    }
                }
            }
        }
    }

    /// Computes the submitted step.
    fn compute(&mut self, batch: &Batch) -> Result<(), StepError> {
        Toy::check_writers(batch, self.kinds);
        self.steps += 1;
        if let Some(costs) = &self.costs {
            costs.now.fetch_add(costs.step + costs.token * batch.tokens.len() as u64, Ordering::Relaxed);
        }
        let every = |n: Option<u64>, steps: u64| n.is_some_and(|n| steps.is_multiple_of(n));
        let fail = every(self.trouble.fail_every, self.steps);
        if let Some(failure) = self.failure(0xfa) {
            self.spoil(batch, &failure);
            return Err(failure.into());
        }
        self.logits.clear();
        self.faults.clear();
        let mut rows = batch.rows.iter().peekable();
        for chunk in &batch.chunks {
            for i in 0..chunk.len {
                let pos = chunk.pos + i;
                let at = |windowed| {
                    let page = batch.page(chunk, windowed, pos as usize / PAGE);
                    page as usize * PAGE + pos as usize % PAGE
                };
                let token = if fail { u32::MAX } else { batch.tokens[(chunk.first + i) as usize] };
                self.cache[at(false)] = (token, pos);
                if self.kinds.window.is_some() {
                    self.window_cache[at(true)] = (token, pos);
                }
            }
        }
        if fail {
            return Err(StepError::Batch("trouble".into()));
        }
        if let Some(head) = &mut self.head {
            head.all_hidden.clear();
        }
        for (index, chunk) in batch.chunks.iter().enumerate() {
            let mut state = 0;
            if self.kinds.state {
                let (found, at) = if chunk.pos == 0 { (START, 0) } else { self.states[chunk.state as usize] };
                assert_eq!(at, chunk.pos as usize, "the state of chunk {index} stands elsewhere");
                let tried = &mut self.tried[chunk.state as usize];
                assert!(chunk.pos == 0 || tried.is_empty(), "the drafts of chunk {index}'s state are not committed");
                tried.clear();
                state = found;
            }
            for i in 0..chunk.len {
                let token = chunk.first + i;
                if self.kinds.state {
                    let end = (chunk.pos + i) as usize;
                    state = recur(state, batch.tokens[token as usize], end);
                    match i < chunk.len - chunk.n_draft {
                        true => self.states[chunk.state as usize] = (state, end + 1),
                        false => self.tried[chunk.state as usize].push((state, end + 1)),
                    }
                }
                if Some(batch.tokens[token as usize]) == self.trouble.fault {
                    self.faults.push(Fault { chunk: index as u32, layer: 3, token });
                }
                if let Some(head) = &mut self.head {
                    let at = |p: usize| batch.page(chunk, false, p / PAGE) as usize * PAGE + p % PAGE;
                    let pos = chunk.pos + i;
                    let found = (0..=pos as usize).map(|p| self.cache[at(p)]).fold(1, hash);
                    head.all_hidden.extend(hidden_of(found, state, pos, false));
                }
                if rows.next_if_eq(&&token).is_none() {
                    continue;
                }
                let (cache, window_cache, last) = (&self.cache, &self.window_cache, (chunk.pos + i) as usize);
                let at = |windowed, p| batch.page(chunk, windowed, p / PAGE) as usize * PAGE + p % PAGE;
                let found = (0..=last).map(|p| cache[at(false, p)]);
                let seen = self.kinds.window.map_or(last + 1, |window| (last + 1).saturating_sub(window));
                let window = (seen..=last).map(|p| window_cache[at(true, p)]);
                let start = self.logits.len();
                self.logits.resize(start + N_VOCAB, 0.0);
                logits_of(found, window, state, &mut self.logits[start..]);
                if Some(batch.tokens[token as usize]) == self.trouble.nan {
                    self.logits[start..].fill(f32::NAN);
                }
            }
        }
        self.picks.fill(batch, &self.logits, N_VOCAB);
        if every(self.trouble.short_every, self.steps) {
            self.logits.pop();
            self.picks.clear();
        }
        Ok(())
    }
}

impl Program for Toy {
    fn limits(&self) -> Limits {
        self.limits
    }

    fn kinds(&self) -> Kinds {
        self.kinds
    }

    fn n_vocab(&self) -> usize {
        N_VOCAB
    }

    fn submit(&mut self, batch: &Batch) -> Result<(), StepError> {
        let takes = Takes { d_hidden: self.draft_width(), ..Takes::default() };
        batch.check_with(self.limits, self.kinds(), N_VOCAB, takes)?;
        if batch.is_draft() {
            assert!(!std::mem::replace(&mut self.is_busy, true), "a step is in flight");
            self.batch.copy_from(batch);
            return Ok(());
        }
        if let Some(token) = batch.tokens.iter().position(|&id| Some(id) == self.trouble.refuse) {
            return Err(StepError::TokenId { token, id: batch.tokens[token], n_vocab: N_VOCAB });
        }
        assert!(!std::mem::replace(&mut self.is_busy, true), "a step is under way");
        self.batch.copy_from(batch);
        // Devices may fail before they begin; then nothing is dirty.
        match self.failure(0x5b) {
            Some(failure) if failure.dirty == Chunks::NONE => {
                self.is_busy = false;
                self.steps += 1;
                Err(failure.into())
            }
            _ => Ok(()),
        }
    }

    fn wait(&mut self) -> Result<Output<'_>, StepError> {
        assert!(std::mem::take(&mut self.is_busy), "no step is under way");
        // The batch keeps its memory: a step allocates nothing.
        let batch = std::mem::take(&mut self.batch);
        let computed = if batch.is_draft() { self.compute_head(&batch) } else { self.compute(&batch) };
        self.batch = batch;
        computed?;
        let [hidden, all_hidden] = match &self.head {
            Some(head) if self.batch.is_draft() => [&head.hidden[..], &[]],
            Some(head) => [&[], &head.all_hidden[..]],
            None => [&[][..]; 2],
        };
        Ok(Output { logits: &self.logits, picks: &self.picks, hidden, all_hidden, faults: &self.faults, routing: None })
    }

    fn draft_width(&self) -> Option<usize> {
        self.head.as_ref().map(|_| D_HIDDEN)
    }

    fn copy_state(&mut self, from: u32, to: u32) {
        assert!(self.kinds.state && self.tried[from as usize].is_empty(), "{from} to {to}");
        self.states[to as usize] = self.states[from as usize];
        self.tried[to as usize].clear();
    }

    fn routers(&self) -> &[RouterInfo] {
        &[]
    }

    fn trace_routing(&mut self, _: bool) {}

    fn stream_stats(&self) -> Option<StreamStats> {
        None
    }

    fn set_interrupt(&mut self, _: Arc<AtomicBool>) {}

    fn is_lost(&self) -> bool {
        false
    }

    fn saver(&mut self) -> Option<&mut dyn Save> {
        Some(self)
    }

    fn drafts(&mut self) -> Option<&mut dyn Drafts> {
        Some(self)
    }

    fn profiler(&mut self) -> Option<&mut dyn Profile> {
        None
    }

    fn input_sums(&mut self) -> Option<&mut dyn SumInputs> {
        None
    }
}

impl Save for Toy {
    fn piece_bytes(&self) -> PieceBytes {
        let bytes = |is_there: bool, n| if is_there { n } else { 0 };
        let window_page = bytes(self.kinds.window.is_some(), 8 * PAGE);
        PieceBytes { page: 8 * PAGE, window_page, state: bytes(self.kinds.state, 16) }
    }

    fn save(&self, piece: Piece, out: &mut Vec<u8>) {
        assert!(!self.is_busy, "a step is under way");
        let both = |found: &[(u32, u32)]| -> Vec<u8> {
            found.iter().flat_map(|&(token, pos)| [token, pos]).flat_map(u32::to_le_bytes).collect()
        };
        match piece {
            Piece::Page(page) => out.extend(both(&self.cache[page as usize * PAGE..][..PAGE])),
            Piece::WindowPage(page) => out.extend(both(&self.window_cache[page as usize * PAGE..][..PAGE])),
            Piece::State(slot) => {
                assert!(self.tried[slot as usize].is_empty(), "the drafts of state {slot} are not committed");
                let (state, at) = self.states[slot as usize];
                out.extend([state, at as u64].into_iter().flat_map(u64::to_le_bytes));
            }
        }
    }

    fn restore(&mut self, piece: Piece, bytes: &[u8]) -> bool {
        assert!(!self.is_busy, "a step is under way");
        assert_eq!(bytes.len(), self.piece_bytes().of(piece));
        let number = |at: usize| u64::from_le_bytes(bytes[8 * at..][..8].try_into().unwrap());
        let both = |at: usize| (number(at) as u32, (number(at) >> 32) as u32);
        match piece {
            Piece::Page(page) => (0..PAGE).for_each(|i| self.cache[page as usize * PAGE + i] = both(i)),
            Piece::WindowPage(page) => (0..PAGE).for_each(|i| self.window_cache[page as usize * PAGE + i] = both(i)),
            Piece::State(slot) => {
                self.states[slot as usize] = (number(0), number(1) as usize);
                self.tried[slot as usize].clear();
            }
        }
        true
    }
}

impl Drafts for Toy {
    fn commit(&mut self, slot: u32, n_accepted: usize) {
        let tried = &mut self.tried[slot as usize];
        assert!(self.kinds.state && n_accepted <= tried.len() && !tried.is_empty());
        if let Some(last) = n_accepted.checked_sub(1) {
            self.states[slot as usize] = tried[last];
        }
        tried.clear();
    }

    fn is_settled(&mut self) -> bool {
        true
    }
}

/// What stores keep, shared by the engines of a test.
pub type Shelf = Arc<Mutex<HashMap<(Key, Part), Vec<u8>>>>;

/// A store in memory. Of `seed`, if it is not 0, some of what is there cannot be loaded, and at times there is no room.
pub struct Store {
    pub shelf: Shelf,
    pub seed: u64,
    pub used: Arc<Mutex<Vec<Vec<Key>>>>,
}

impl Store {
    /// One that works.
    pub fn of(shelf: &Shelf) -> Box<Store> {
        Box::new(Store { shelf: shelf.clone(), seed: 0, used: Arc::default() })
    }

    fn fails(&mut self, one_in: u64) -> bool {
        self.seed = if self.seed == 0 { 0 } else { mix(self.seed, 1) };
        self.seed != 0 && (self.seed >> 30).is_multiple_of(one_in)
    }
}

impl PromptStore for Store {
    fn has(&mut self, key: &Key, part: Part) -> bool {
        self.shelf.lock().unwrap().contains_key(&(*key, part))
    }

    fn load(&mut self, key: &Key, part: Part, n_bytes: usize, out: &mut Vec<u8>) -> bool {
        assert!(out.is_empty());
        if self.fails(20) {
            self.shelf.lock().unwrap().remove(&(*key, part));
        }
        let shelf = self.shelf.lock().unwrap();
        let Some(bytes) = shelf.get(&(*key, part)) else { return false };
        out.extend(bytes);
        bytes.len() == n_bytes
    }

    fn buffer(&mut self) -> Option<Vec<u8>> {
        (!self.fails(2)).then(Vec::new)
    }

    fn store(&mut self, key: Key, part: Part, bytes: Vec<u8>) {
        let old = self.shelf.lock().unwrap().insert((key, part), bytes.clone());
        assert!(old.is_none_or(|old| old == bytes), "{part:?} of {key:?} has two contents");
    }

    fn secret(&mut self) -> [u8; 32] {
        [7; 32]
    }

    fn used(&mut self, keys: Vec<Key>) {
        self.used.lock().unwrap().push(keys);
    }
}

/// Saves until nothing is left.
pub fn save_all(engine: &mut Engine) {
    while engine.has_unsaved() {
        engine.save(Duration::from_secs(1));
        engine.audit().unwrap();
    }
}

/// Texts as they will be: prompts with their answers.
pub type Known = Arc<Mutex<Vec<Vec<u32>>>>;

/// Drafts that are right, wrong, and right up to a point; sometimes none, too many, or outside the vocabulary.
pub struct Guesses {
    pub known: Known,
    pub seed: u64,
    pub n_vocab: usize,
    /// A token that is never drafted.
    pub never: Option<u32>,
    /// One draft in so many is wrong; none when it is 0.
    pub wrong: u64,
}

impl Drafter for Guesses {
    fn draft(&mut self, tokens: &[u32], max: usize, out: &mut Vec<u32>) {
        assert!(max > 0 && out.is_empty());
        self.seed = mix(self.seed, 1);
        let known = self.known.lock().unwrap();
        let fits: Vec<&Vec<u32>> = known.iter().filter(|text| text.starts_with(tokens)).collect();
        let text = fits.get(self.seed as usize % fits.len().max(1)).map_or(&[][..], |text| &text[tokens.len()..]);
        let n = if self.wrong == 0 { max.min(text.len()) } else { (self.seed >> 32) as usize % (max + 3) };
        for i in 0..n {
            let h = mix(self.seed, i as u64 + 2);
            let id = match text.get(i) {
                Some(&id) if self.wrong == 0 || !h.is_multiple_of(self.wrong) => id,
                _ => ((h >> 32) % (self.n_vocab as u64 + 1)) as u32,
            };
            if Some(id) == self.never {
                break;
            }
            out.push(id);
        }
    }
}

/// [`PIECES`] as a vocabulary.
pub struct Pieces;

impl Vocabulary for Pieces {
    fn n_vocab(&self) -> usize {
        PIECES.len()
    }

    fn is_end_of_generation(&self, id: u32) -> bool {
        id == EOS
    }

    fn text(self: Arc<Self>, _: Decode, _: &[u32]) -> Box<dyn TextStream> {
        Box::new(Utf8(Vec::with_capacity(64)))
    }
}

/// Bytes that are not a whole character yet.
struct Utf8(Vec<u8>);

impl TextStream for Utf8 {
    fn push(&mut self, id: u32, out: &mut String) {
        self.0.extend_from_slice(PIECES.get(id as usize).copied().unwrap_or_default());
        loop {
            match std::str::from_utf8(&self.0) {
                Ok(text) => {
                    out.push_str(text);
                    self.0.clear();
                    return;
                }
                Err(error) => {
                    let valid = error.valid_up_to();
                    out.push_str(std::str::from_utf8(&self.0[..valid]).unwrap());
                    let bad = error.error_len();
                    self.0.drain(..valid + bad.unwrap_or(0));
                    match bad {
                        Some(_) => out.push('\u{fffd}'),
                        None => return,
                    }
                }
            }
        }
    }

    fn finish(&mut self, out: &mut String) {
        if !self.0.is_empty() {
            out.push('\u{fffd}');
            self.0.clear();
        }
    }
}

/// An engine over a toy that has pages only.
pub fn engine(limits: Limits, options: Options, trouble: Trouble) -> Engine {
    engine_of(Kinds::default(), limits, options, trouble)
}

/// An engine over a toy.
pub fn engine_of(kinds: Kinds, limits: Limits, options: Options, trouble: Trouble) -> Engine {
    Engine::new(Box::new(Toy::new(limits, kinds, trouble)), Arc::new(Pieces), options).unwrap()
}

/// An engine over a toy whose head drafts up to `n` tokens, wrong one time in `wrong`.
pub fn engine_with_head(
    kinds: Kinds,
    limits: Limits,
    options: Options,
    trouble: Trouble,
    (n, wrong): (usize, u64),
) -> (Engine, Arc<Seen>) {
    let (toy, seen) = Toy::new(limits, kinds, trouble).with_head(wrong);
    let mut engine = Engine::new(Box::new(toy), Arc::new(Pieces), options).unwrap();
    let drafts = engine.set_head(n);
    assert_eq!(drafts, n > 0 && limits.max_draft > 0 && kinds.window.is_none());
    (engine, seen)
}

/// Limits with room for everything.
pub fn roomy() -> Limits {
    Limits {
        max_tokens: 512,
        max_outputs: 16,
        n_pages: 64,
        max_positions: 1024,
        n_window_pages: 64,
        n_states: 32,
        max_draft: 0,
    }
}

/// Steps until nothing is left, and audits after every step; returns all events.
pub fn drain(engine: &mut Engine) -> Events {
    let mut events = Events::new();
    for _ in 0..100_000 {
        let more = engine.step(&mut events).unwrap();
        engine.audit().unwrap();
        if !more {
            return events;
        }
    }
    panic!("the requests do not end: {:?}", engine.stats());
}

/// What a request came to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub tokens: Vec<u32>,
    pub text: String,
    /// Bits of the log-probabilities, so that they compare exactly.
    pub logprobs: Vec<(u32, Vec<(u32, u32)>)>,
    /// Of the prompt's tokens, the same.
    pub scores: Vec<(u32, u32, Vec<(u32, u32)>)>,
    /// Why it ended; of an error the words, since an error that holds NaN equals nothing.
    pub end: Option<Result<FinishReason, String>>,
}

/// Gathers a request's events; it must not go on after its end.
pub fn answer(events: &Events, id: RequestId) -> (Answer, Usage) {
    let (mut answer, mut used) = (Answer::default(), Usage::default());
    for event in events.iter().filter(|e| e.id == id) {
        assert_eq!(answer.end, None, "request {} goes on after its end", id.0);
        match event.kind {
            EventKind::Token { token, text, logprobs, .. } => {
                answer.tokens.push(token);
                answer.text.push_str(text);
                answer.logprobs.extend(
                    logprobs.map(|l| (l.token.to_bits(), l.top.iter().map(|&(id, p)| (id, p.to_bits())).collect())),
                );
            }
            EventKind::Prompt { token, logprobs } => {
                let top = logprobs.top.iter().map(|&(id, p)| (id, p.to_bits())).collect();
                answer.scores.push((token, logprobs.token.to_bits(), top));
            }
            EventKind::Done { reason, usage } => {
                answer.end = Some(Ok(reason));
                used = usage;
            }
            EventKind::Embedding(_) => panic!("the toy has no hidden rows"),
            EventKind::Failed(error) => answer.end = Some(Err(error.to_string())),
        }
    }
    (answer, used)
}

/// Submits a request and steps until nothing is left.
pub fn run(engine: &mut Engine, request: Request) -> (Answer, Usage) {
    let id = engine.submit(request).unwrap();
    answer(&drain(engine), id)
}

/// A prompt of `n` tokens that differs from those of other seeds everywhere, without ends of generation.
pub fn prompt(seed: u64, n: usize) -> Vec<u32> {
    (0..n as u64).map(|i| (mix(seed, i) % (N_VOCAB as u64 - 1)) as u32 + 1).collect()
}

/// A request at temperature 1.
pub fn request(tokens: Vec<u32>, seed: u64, max_new: usize) -> Request {
    Request { max_new_tokens: max_new, sampling: sampling(1.0, seed), ..Request::new(tokens) }
}

pub fn sampling(temperature: f32, seed: u64) -> SamplerParams {
    SamplerParams { temperature, seed, top_k: 0, top_p: 1.0, min_p: 0.0, ..SamplerParams::default() }
}
