//! Programs as the tests drive them. All that the tests of plans know of the backends' API is in this file.

use std::sync::Arc;

use backend::footprint::Footprint;
use backend::{
    Backend, Batch, CompileError, Drafts, Kinds, Limits, Output, PAGE, Profile, Program, RouterInfo, Save, StepError,
    StreamStats, SumInputs, Tables,
};
use checkpoint::Checkpoint;
use model::plan::{Plan, ValidPlan};
use std::sync::atomic::AtomicBool;

use crate::Random;

/// Maximum number of drafts in a chunk.
pub const MAX_DRAFT: usize = 5;

/// Slots of recurrent state in a session: one a sequence, and spare ones for copies.
const N_STATES: usize = 5;

/// Up to three sequences in one program, each with scattered pages.
pub struct Session {
    pub program: Box<dyn Program>,
    pub pages: Vec<Vec<u32>>,
    ring: usize,
    window_pages: Vec<u32>,
    pub n_past: [usize; 3],
    /// Slot of each sequence's recurrent state.
    pub slots: [u32; 3],
    pub batch: Batch,
}

impl Session {
    pub fn new(backend: &dyn Backend, model: &(Plan, Arc<Checkpoint>), max_positions: usize) -> Session {
        Session::with(backend, model, max_positions, max_positions.min(2000))
    }

    /// With window pages for steps of at most `max_tokens`: each sequence has a ring of them, used again and again.
    pub fn with(
        backend: &dyn Backend,
        model: &(Plan, Arc<Checkpoint>),
        max_positions: usize,
        max_tokens: usize,
    ) -> Session {
        Session::compile(backend, model, max_positions, max_tokens).unwrap()
    }

    /// The same, for plans that a backend may refuse.
    pub fn compile(
        backend: &dyn Backend,
        (plan, weights): &(Plan, Arc<Checkpoint>),
        max_positions: usize,
        max_tokens: usize,
    ) -> Result<Session, CompileError> {
        let each = max_positions.div_ceil(PAGE) as u32;
        let ring = Kinds::of(plan).window_blocks() + max_tokens.div_ceil(PAGE);
        let limits = Limits {
            max_tokens,
            max_outputs: max_tokens,
            n_pages: 3 * each as usize,
            max_positions,
            n_window_pages: 3 * ring,
            n_states: N_STATES,
            max_draft: MAX_DRAFT,
        };
        let program = backend.compile(&ValidPlan::new(plan.clone())?, weights.clone(), limits)?;
        let pages = (0..3).map(|s| (0..each).rev().map(|p| 3 * p + s).collect()).collect();
        Ok(Session {
            program,
            pages,
            ring,
            window_pages: Vec::with_capacity(each as usize),
            n_past: [0; 3],
            slots: [0, 1, 2],
            batch: Batch::default(),
        })
    }

    /// Runs one step of `(sequence, tokens)` and returns the logits of all tokens.
    pub fn step(&mut self, parts: &[(usize, &[u32])]) -> &[f32] {
        let out = self.step_with_faults(parts);
        assert!(out.faults.is_empty());
        out.logits
    }

    /// The same, whatever sequences break down.
    pub fn step_with_faults(&mut self, parts: &[(usize, &[u32])]) -> Output<'_> {
        self.step_rows(parts, |_| true)
    }

    /// Returns the logits of those tokens of the step that are wanted, by their index in the step.
    pub fn step_rows(&mut self, parts: &[(usize, &[u32])], wanted: impl Fn(usize) -> bool) -> Output<'_> {
        self.try_rows(parts, wanted).unwrap()
    }

    /// The same of a program that may fail.
    pub fn try_rows(
        &mut self,
        parts: &[(usize, &[u32])],
        wanted: impl Fn(usize) -> bool,
    ) -> Result<Output<'_>, StepError> {
        self.batch.clear();
        for &(s, tokens) in parts {
            self.push(s, tokens, tokens.len(), &wanted);
            self.n_past[s] += tokens.len();
        }
        if let Some(d_input) = self.program.d_input() {
            self.give(d_input);
        }
        self.program.step(&self.batch)
    }

    /// Gives two of three tokens a row, whose numbers follow from the token.
    fn give(&mut self, d_input: usize) {
        let Batch { tokens, given, .. } = &mut self.batch;
        for (t, &token) in tokens.iter().enumerate().filter(|(t, _)| t % 3 > 0) {
            let mut random = Random((u64::from(token) << 20 | t as u64) * 2 + 1);
            given.tokens.push(t as u32);
            given.rows.extend((0..d_input).map(|_| random.float()));
        }
    }

    /// Runs one step of `(sequence, tokens, drafts)`, commits the drafts that are to be accepted, and returns the
    /// logits of all tokens and drafts, one sequence after the other.
    pub fn step_with_drafts(&mut self, parts: &[(usize, &[u32], &[u32])], accepted: &[usize]) -> Vec<f32> {
        self.batch.clear();
        for &(s, tokens, drafts) in parts {
            self.push(s, tokens, tokens.len() + drafts.len(), &|_| true);
            self.batch.push_drafts(drafts);
        }
        let out = self.program.step(&self.batch).unwrap();
        assert!(out.faults.is_empty());
        let logits = out.logits.to_vec();
        for (&(s, tokens, drafts), &n) in parts.iter().zip(accepted) {
            self.n_past[s] += tokens.len() + n;
            if !drafts.is_empty() && self.program.kinds().state {
                self.program.drafts().expect("a program that takes drafts").commit(self.slots[s], n);
            }
        }
        logits
    }

    /// Computes `tokens` of sequence 0, and the logits of the `n`th draft of the draft head after each but the first:
    /// the first follows from the hidden state before the token and the token, further ones from the head's own hidden
    /// state and the likeliest token. The head's steps have up to `cut` tokens where nothing follows from their rows.
    pub fn drafts(&mut self, tokens: &[u32], n: usize, cut: usize) -> Vec<f32> {
        let d = self.program.draft_width().expect("a program with a draft head");
        let hidden = self.step_rows(&[(0, tokens)], |_| false).all_hidden.to_vec();
        let mut logits = Vec::new();
        let cut = if n == 1 { cut } else { 1 };
        for (i, ids) in tokens[1..].chunks(cut).enumerate() {
            let at = i * cut;
            let (mut ids, mut given) = (ids.to_vec(), hidden[at * d..][..ids.len() * d].to_vec());
            for j in 0..n {
                self.batch.clear();
                let tables = Tables { pages: &self.pages[0], state: self.slots[0], ..Tables::default() };
                self.batch.push(&ids, at + j, tables, 0..ids.len());
                self.batch.hidden.extend_from_slice(&given);
                let out = self.program.step(&self.batch).unwrap();
                assert!(out.faults.is_empty() && out.all_hidden.is_empty());
                if j + 1 == n {
                    logits.extend_from_slice(out.logits);
                } else {
                    let best = (0..out.logits.len()).rev().max_by(|&a, &b| out.logits[a].total_cmp(&out.logits[b]));
                    (ids, given) = (vec![best.unwrap() as u32], out.hidden.to_vec());
                }
            }
        }
        logits
    }

    /// Adds a chunk of a sequence with window pages for `n` tokens.
    fn push(&mut self, s: usize, tokens: &[u32], n: usize, wanted: &dyn Fn(usize) -> bool) {
        let pos = self.n_past[s];
        let first_window_block = self.program.kinds().first_window_block(pos);
        self.window_pages.clear();
        let blocks = first_window_block..(pos + n).div_ceil(PAGE);
        self.window_pages.extend(blocks.map(|block| (3 * (block % self.ring) + s) as u32));
        let (pages, window_pages) = (&self.pages[s][..], &self.window_pages[..]);
        let tables = Tables { pages, window_pages, first_window_block, state: self.slots[s] };
        let first = self.batch.tokens.len();
        self.batch.push(tokens, pos, tables, (0..tokens.len()).filter(|i| wanted(first + i)));
    }
}

/// A backend that is wrong in one way.
#[derive(Clone)]
pub struct Sabotage {
    pub inner: Arc<dyn Backend + Send + Sync>,
    /// Changes the plan before it is compiled.
    pub plan: fn(&mut Plan),
    /// Changes the batch of a step.
    pub batch: fn(&mut Batch),
    /// Changes the logits `[R, n_vocab]`.
    pub logits: fn(&mut [f32], usize),
    pub copies_states: bool,
    pub reports_faults: bool,
}

impl Sabotage {
    /// One that is right so far.
    pub fn of(inner: Arc<dyn Backend + Send + Sync>) -> Self {
        Self { inner, plan: |_| {}, batch: |_| {}, logits: |_, _| {}, copies_states: true, reports_faults: true }
    }
}

impl Backend for Sabotage {
    fn name(&self) -> &'static str {
        "sabotage"
    }

    fn lower(&self, plan: ValidPlan) -> Result<ValidPlan, CompileError> {
        self.inner.lower(plan)
    }

    fn footprint(&self, plan: &ValidPlan, limits: Limits) -> Footprint {
        self.inner.footprint(plan, limits)
    }

    fn compile(
        &self,
        plan: &ValidPlan,
        weights: Arc<Checkpoint>,
        limits: Limits,
    ) -> Result<Box<dyn Program>, CompileError> {
        let inner = self.inner.compile(&plan.clone().rewrite(self.plan)?, weights, limits)?;
        Ok(Box::new(Sabotaged { inner, how: self.clone(), logits: Vec::new() }))
    }
}

struct Sabotaged {
    inner: Box<dyn Program>,
    how: Sabotage,
    logits: Vec<f32>,
}

impl Program for Sabotaged {
    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn kinds(&self) -> Kinds {
        self.inner.kinds()
    }

    fn n_vocab(&self) -> usize {
        self.inner.n_vocab()
    }

    fn submit(&mut self, batch: &Batch) -> Result<(), StepError> {
        let mut batch = batch.clone();
        (self.how.batch)(&mut batch);
        self.inner.submit(&batch)
    }

    fn wait(&mut self) -> Result<Output<'_>, StepError> {
        let n_vocab = self.inner.n_vocab();
        let out = self.inner.wait()?;
        self.logits.clear();
        self.logits.extend_from_slice(out.logits);
        (self.how.logits)(&mut self.logits, n_vocab);
        let faults = if self.how.reports_faults { out.faults } else { &[] };
        Ok(Output { logits: &self.logits, faults, ..out })
    }

    fn draft_width(&self) -> Option<usize> {
        self.inner.draft_width()
    }

    fn copy_state(&mut self, from: u32, to: u32) {
        if self.how.copies_states {
            self.inner.copy_state(from, to);
        }
    }

    fn routers(&self) -> &[RouterInfo] {
        self.inner.routers()
    }

    fn expert_weights(&self) -> Option<&[f32]> {
        self.inner.expert_weights()
    }

    fn trace_routing(&mut self, is_on: bool) {
        self.inner.trace_routing(is_on);
    }

    fn stream_stats(&self) -> Option<StreamStats> {
        self.inner.stream_stats()
    }

    fn set_interrupt(&mut self, flag: Arc<AtomicBool>) {
        self.inner.set_interrupt(flag);
    }

    fn is_lost(&self) -> bool {
        self.inner.is_lost()
    }

    fn saver(&mut self) -> Option<&mut dyn Save> {
        self.inner.saver()
    }

    fn drafts(&mut self) -> Option<&mut dyn Drafts> {
        self.inner.drafts()
    }

    fn profiler(&mut self) -> Option<&mut dyn Profile> {
        self.inner.profiler()
    }

    fn input_sums(&mut self) -> Option<&mut dyn SumInputs> {
        self.inner.input_sums()
    }
}
