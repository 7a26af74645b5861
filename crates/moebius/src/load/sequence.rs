//! A model without an engine, fed token by token.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Result, ensure};
use backend::{Batch, InputSums, InputTrace, Program, Tables};
use checkpoint::{Checkpoint, Kind};
use model::plan::ValidPlan;

use super::{EngineSetup, Model};
use crate::args::EngineArgs;
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
}

impl Sequence {
    /// Compiles the model for a sequence of at most `positions`.
    pub fn start(model: &Model, args: &EngineArgs, positions: usize) -> Result<Sequence> {
        Sequence::start_with(model, &EngineSetup::of(args, Prefer::Cpu)?, positions)
    }

    /// The same, with a setup of the caller's.
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
        let parted = match setup.whole_split(model, positions)? {
            Some(split) => Some(split),
            None => setup.whole_streamed(model, positions)?,
        };
        let (backend, plan, limits) = match parted {
            Some(parted) => parted,
            None => {
                let (backend, _) = setup.backend(&model.checkpoint, &model.plan)?;
                let plan = backend.lower(model.plan.clone())?;
                let budget = Budget::new(setup.step.memory, &plan, 0, None);
                let limits = memory::fit_whole(&*backend, &plan, setup.step.batch(setup.kind()), positions, budget)?;
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
        })
    }

    /// Width of a logits row.
    pub fn n_vocab(&self) -> usize {
        self.program.n_vocab()
    }

    /// The same, to sum the squares of what matrices are multiplied with from now on.
    ///
    /// # Errors
    /// As [`Sequence::start`], and where not all of a step is computed in one place, or nothing is kept of it.
    pub fn start_summing(model: &Model, args: &EngineArgs, positions: usize) -> Result<Sequence> {
        let setup = EngineSetup { sums_inputs: true, ..EngineSetup::of(args, Prefer::Cpu)? };
        let mut sequence = Sequence::start_with(model, &setup, positions)?;
        sequence.trace_inputs(InputTrace::All);
        ensure!(
            !sequence.program.inputs().is_empty(),
            "sum inputs: the reference does not, nor a GPU beside experts in host memory; try --backend cpu"
        );
        Ok(sequence)
    }

    /// Which inputs are summed from now on.
    pub fn trace_inputs(&mut self, trace: InputTrace) {
        self.program.trace_inputs(trace);
    }

    /// Tokens of the expert that the fewest tokens were forced through, among those that no other token reached; `None`
    /// where every expert was chosen.
    pub fn fewest_forced(&self) -> Option<u64> {
        let of = |sums: &InputSums| {
            let unchosen = sums.counts.iter().zip(&sums.forced).filter(|(n, forced)| n == forced);
            unchosen.map(|(n, _)| *n).min()
        };
        self.program.inputs().iter().filter_map(of).min()
    }

    /// Those sums by the names of tensors in GGUF files, and the number of columns of each.
    ///
    /// # Errors
    /// A sum is not finite: the model broke down.
    pub fn inputs(&self, checkpoint: &Checkpoint) -> Result<BTreeMap<String, (Sums, usize)>> {
        let mut found = BTreeMap::new();
        let all = self.program.inputs().iter().flat_map(|sums| sums.weights.iter().map(move |&w| (w, sums)));
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
            ensure!(squares.iter().all(|v| v.is_finite()), "sum inputs of {name}: the sum is not finite");
            let [counts, forced] = [&sums.counts, &sums.forced].map(|all| all.iter().map(|&n| n as f32).collect());
            found.insert(name.to_string(), (Sums { squares, counts, forced }, decl.shape[decl.shape.len() - 1]));
        }
        Ok(found)
    }

    /// Starts over; what the cache holds is overwritten.
    pub fn rewind(&mut self) {
        self.position = 0;
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
        for chunk in tokens.chunks(self.program.limits().max_tokens) {
            let start = self.position;
            let skip = from.saturating_sub(start).min(chunk.len());
            self.batch.clear();
            let tables = Tables { pages: &self.pages, window_pages: &self.pages, ..Tables::default() };
            self.batch.push(chunk, start, tables, skip..chunk.len());
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
