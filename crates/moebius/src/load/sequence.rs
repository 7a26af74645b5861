//! A model without an engine, fed token by token.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use backend::batch::Ask;
use backend::{Batch, InputSums, InputTrace, Output, Program, RouterInfo, Tables};
use checkpoint::{Checkpoint, Kind};
use engine::images::Pictures;
use model::plan::ValidPlan;

use super::{EngineSetup, Model, Whole};
use crate::args::EngineArgs;
use crate::compare;
use crate::device::Prefer;
use crate::memory::{self, Budget};
use crate::out::note;
use crate::quantize::importance::Sums;

/// One sequence fed to a program token by token, for commands that want logits and not text.
pub struct Sequence {
    program: Box<dyn Program>,
    /// As the backend lowered it.
    plan: ValidPlan,
    batch: Batch,
    pages: Vec<u32>,
    position: usize,
    pictures: Option<Pictures>,
}

/// What [`Sequence::trace`] returns of each position.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wanted {
    /// Of the next token.
    pub logits: bool,
    /// The state after the last norm.
    pub hidden: bool,
    /// Which experts were chosen, with their weights.
    pub experts: bool,
}

/// What a model computed at positions, those of a kind one after the other. A kind that is not wanted is empty.
#[derive(Clone, Debug, Default)]
pub struct Traced {
    /// `[positions, n_vocab]`.
    pub logits: Vec<f32>,
    /// `[positions, d_model]`.
    pub hidden: Vec<f32>,
    /// `[positions, Σ n_used]`: ids of every router in order of layers, best first.
    pub experts: Vec<u16>,
    /// As many; empty where the backend does not report them.
    pub weights: Vec<f32>,
}

impl Sequence {
    /// Compiles the model for a sequence of at most `positions`.
    pub fn start(model: &Model, args: &EngineArgs, positions: usize) -> Result<Sequence> {
        Sequence::start_with(model, &EngineSetup::of(args, Prefer::Cpu)?, positions)
    }

    /// Returns the same, with a setup of the caller's.
    pub fn start_with(model: &Model, setup: &EngineSetup, positions: usize) -> Result<Sequence> {
        let (sequence, device) = match Sequence::start_here(model, setup, positions) {
            Err(why) if setup.may_fall_back() => {
                let setup = setup.on_cpu(&why);
                (Sequence::start_here(model, &setup, positions)?, setup.device)
            }
            started => (started?, setup.device.clone()),
        };
        device.note().iter().for_each(|line| note!("{line}"));
        Ok(sequence)
    }

    fn start_here(model: &Model, setup: &EngineSetup, positions: usize) -> Result<Sequence> {
        setup.check_cache(&model.plan)?;
        let parted = match setup.whole_split(model, positions)? {
            Some(split) => Some(split),
            None => setup.whole_streamed(model, positions)?,
        };
        Whole::refuse(Whole::of(&model.plan))?;
        let (backend, plan, limits) = match parted {
            Some(parted) => parted,
            None => {
                let (backend, _) = setup.backend(&model.checkpoint, &model.plan)?;
                let plan = backend.lower(model.plan.clone())?;
                let budget = Budget::new(setup.step.memory, &plan, 0, None);
                let limits = memory::fit_whole(&*backend, &plan, setup.kind().batch(&setup.step), positions, budget)?;
                (backend, plan, limits)
            }
        };
        let program = backend.compile(&plan, Arc::clone(&model.checkpoint), limits)?;
        Ok(Sequence {
            program,
            plan,
            batch: Batch::default(),
            pages: (0..limits.n_pages as u32).collect(),
            position: 0,
            pictures: None,
        })
    }

    /// Places images in what is fed from the start.
    ///
    /// # Errors
    /// The program takes no such rows: images require the CPU.
    pub fn show(&mut self, pictures: Pictures) -> Result<()> {
        ensure!(
            self.program.d_input() == Some(pictures.d_features()),
            "failed to place images: the backend computes no models that see (--backend cpu does)"
        );
        self.pictures = Some(pictures);
        Ok(())
    }

    /// Width of a logits row.
    pub fn n_vocab(&self) -> usize {
        self.program.n_vocab()
    }

    /// Returns the same, to sum the squares of what matrices are multiplied with from now on.
    ///
    /// # Errors
    /// As [`Sequence::start`], and where not all of a step is computed in one place, or nothing is kept of it.
    pub fn start_summing(model: &Model, args: &EngineArgs, positions: usize) -> Result<Sequence> {
        let setup = EngineSetup { sums_inputs: true, ..EngineSetup::of(args, Prefer::Cpu)? };
        let mut sequence = Sequence::start_with(model, &setup, positions)?;
        sequence.trace_inputs(InputTrace::All);
        ensure!(
            sequence.program.input_sums().is_some_and(|sums| !sums.sums().is_empty()),
            "failed to sum inputs: the reference and GPUs with experts in host memory lack it; try --backend cpu"
        );
        Ok(sequence)
    }

    /// Which inputs are summed from now on.
    pub fn trace_inputs(&mut self, trace: InputTrace) {
        if let Some(sums) = self.program.input_sums() {
            sums.trace(trace);
        }
    }

    /// Tokens of the expert that the fewest tokens were forced through, among those that no other token reached; `None`
    /// where every expert was chosen.
    pub fn fewest_forced(&mut self) -> Option<u64> {
        let of = |sums: &InputSums| {
            let unchosen = sums.counts.iter().zip(&sums.forced).filter(|(n, forced)| n == forced);
            unchosen.map(|(n, _)| *n).min()
        };
        self.program.input_sums()?.sums().iter().filter_map(of).min()
    }

    /// Those sums by the names of tensors in GGUF files, and the number of columns of each.
    ///
    /// # Errors
    /// A sum is not finite: the model broke down.
    pub fn inputs(&mut self, checkpoint: &Checkpoint) -> Result<BTreeMap<String, (Sums, usize)>> {
        let mut found = BTreeMap::new();
        let sums = self.program.input_sums().map_or(&[][..], |sums| sums.sums());
        let all = sums.iter().flat_map(|sums| sums.weights.iter().map(move |&w| (w, sums)));
        for (w, sums) in all {
            let decl = self.plan.weight(w);
            // Matrices that a file keeps in one tensor have one input.
            let mut tensors: Vec<&str> = decl.source.tensors().collect();
            tensors.dedup();
            let name = match *tensors.as_slice() {
                [one] if checkpoint.kind() == Kind::Gguf => one,
                _ => &decl.name,
            };
            let squares: Vec<f32> = sums.squares.iter().map(|&v| v as f32).collect();
            ensure!(squares.iter().all(|v| v.is_finite()), "failed to sum inputs of {name}: the sum is not finite");
            let [counts, forced] = [&sums.counts, &sums.forced].map(|all| all.iter().map(|&n| n as f32).collect());
            found.insert(name.to_string(), (Sums { squares, counts, forced }, decl.shape[decl.shape.len() - 1]));
        }
        Ok(found)
    }

    /// Starts over; what the cache holds is overwritten.
    pub fn rewind(&mut self) {
        self.position = 0;
    }

    /// Number of tokens that were fed.
    pub fn position(&self) -> usize {
        self.position
    }

    /// The routers of the model, in order of layers.
    pub fn routers(&self) -> &[RouterInfo] {
        self.program.routers()
    }

    /// Computes `tokens` after what was fed before, and returns what the caller requires of each.
    pub fn trace(&mut self, tokens: &[u32], wanted: Wanted) -> Result<Traced> {
        let mut traced = Traced::default();
        self.program.trace_routing(wanted.experts);
        for chunk in tokens.chunks(self.program.limits().max_tokens) {
            let tables = Tables { pages: &self.pages, window_pages: &self.pages, ..Tables::default() };
            self.batch.clear();
            self.batch.push(chunk, self.position, tables, 0..chunk.len());
            if !wanted.logits {
                self.batch.asks.fill(Ask::Hidden);
            }
            let output = self.program.step(&self.batch)?;
            if let Some(fault) = output.faults.first() {
                return Err((*fault).into());
            }
            if wanted.logits {
                traced.logits.extend_from_slice(output.logits);
            }
            if wanted.hidden {
                traced.hidden.extend_from_slice(output.hidden);
            }
            traced.experts.extend_from_slice(output.routing.unwrap_or_default());
            traced.weights.extend_from_slice(self.program.expert_weights().unwrap_or_default());
            self.position += chunk.len();
        }
        self.program.trace_routing(false);
        Ok(traced)
    }

    /// Computes `tokens`, and the logits of the draft head: `each` gets those of the `n`th draft after every token but
    /// the first. The first draft follows from the hidden state of the token before and the token itself; each further
    /// one from the head's own hidden state and the likeliest of its logits.
    ///
    /// # Errors
    /// The program has no draft head, or a step fails.
    pub fn drafts(&mut self, tokens: &[u32], n: usize, mut each: impl FnMut(&[f32]) -> Result<()>) -> Result<()> {
        let d = self.program.draft_width().context("failed to draft tokens: the program has no head for it")?;
        let mut hidden = Vec::with_capacity(tokens.len() * d);
        let max = self.program.limits().max_tokens;
        let mut step = |tokens: &[u32], at: usize, given: &[f32], take: &mut dyn FnMut(Output<'_>) -> Result<()>| {
            self.batch.clear();
            let tables = Tables { pages: &self.pages, window_pages: &self.pages, ..Tables::default() };
            self.batch.push(tokens, at, tables, [tokens.len() - 1]);
            self.batch.hidden.extend_from_slice(given);
            let output = self.program.step(&self.batch)?;
            match output.faults.first() {
                Some(fault) => Err((*fault).into()),
                None => take(output),
            }
        };
        for (i, chunk) in tokens.chunks(max).enumerate() {
            step(chunk, i * max, &[], &mut |output| {
                hidden.extend_from_slice(output.all_hidden);
                Ok(())
            })?;
        }
        for (t, &next) in tokens.iter().enumerate().skip(1) {
            let (mut token, mut given) = (next, hidden[(t - 1) * d..t * d].to_vec());
            for i in 0..n {
                step(&[token], t - 1 + i, &given.clone(), &mut |output| {
                    token = compare::argmax(output.logits) as u32;
                    given.clear();
                    given.extend_from_slice(output.hidden);
                    if i + 1 == n { each(output.logits) } else { Ok(()) }
                })?;
            }
        }
        Ok(())
    }

    /// Computes `tokens` after what was fed before; `each` gets every position's logits.
    pub fn feed(&mut self, tokens: &[u32], each: impl FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        self.feed_from(tokens, self.position, each)
    }

    /// The same, with logits only from position `from` on.
    pub fn feed_from(
        &mut self,
        tokens: &[u32],
        from: usize,
        mut each: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let n_vocab = self.n_vocab();
        let mut rest = tokens;
        while !rest.is_empty() {
            let start = self.position;
            let n = rest.len().min(self.program.limits().max_tokens);
            let n = self.pictures.as_ref().map_or(n, |pictures| pictures.whole(start, n));
            ensure!(n <= rest.len(), "failed to feed tokens: they end within an image");
            let (chunk, after) = rest.split_at(n);
            rest = after;
            let skip = from.saturating_sub(start).min(chunk.len());
            self.batch.clear();
            let tables = Tables { pages: &self.pages, window_pages: &self.pages, ..Tables::default() };
            self.batch.push(chunk, start, tables, skip..chunk.len());
            if let Some(pictures) = &self.pictures {
                let Batch { tokens, given, .. } = &mut self.batch;
                pictures.fill(start..start + n, 0, tokens, given);
                given.places.extend((start..start + n).map(|position| pictures.place_of(position)));
            }
            let output = self.program.step(&self.batch)?;
            if let Some(fault) = output.faults.first() {
                return Err((*fault).into());
            }
            for (i, row) in output.logits.chunks_exact(n_vocab).enumerate() {
                each(start + skip + i, row)?;
            }
            self.position += chunk.len();
        }
        Ok(())
    }
}
