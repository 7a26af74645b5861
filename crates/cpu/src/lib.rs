//! The CPU backend: an op loop on a thread pool, kernels for every instruction set, a paged key-value cache.
//!
//! It obeys the CPU law (see [`quant`]): the logits are the same bits whatever the instruction set, the number of
//! threads, the batch, and the way a prompt was cut into chunks.
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod apart;
mod bandwidth;
mod compile;
mod copies;
mod footprint;
pub mod isa;
pub mod kernels;
mod lanes;
mod math;
mod mem;
pub mod numa;
mod ops;
pub mod pool;
#[cfg(test)]
mod pool_tests;
mod program;
mod states;
mod times;
mod wait;

/// What the pool synchronises with: `tests/pool_schedules.rs` puts a scheduler's own in its place.
mod sync {
    pub use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, atomic};
    pub use std::thread::{Builder, JoinHandle};
}

use std::sync::Arc;

use checkpoint::Checkpoint;
use model::plan::{Plan, ValidPlan, passes};

pub use bandwidth::read_bandwidth;
pub use isa::{CheckedIsa, Isa, IsaError};

use backend::experts::layout::Layout;
use backend::experts::source::Source;
use backend::footprint::Footprint;
use backend::parts;
use backend::residency::{Policy, Residencies};
use backend::{Backend, CacheType, CompileError, Limits, Program};

/// The CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// Instruction set of the kernels.
    pub isa: Isa,
    /// Threads, the caller's included.
    pub threads: usize,
    /// Elements of the cache.
    pub cache: CacheType,
    /// Which weights a program copies to memory that it owns.
    pub residency: Policy,
}

impl Default for Cpu {
    /// The best instruction set, a thread for every core the process may use, an f16 cache, no copies.
    fn default() -> Cpu {
        let threads = sys::cores::count();
        Cpu { isa: Isa::best(), threads, cache: CacheType::F16, residency: Policy::Mapped }
    }
}

impl Cpu {
    /// The slabs of a plan's program: as many as the policy has room for, none where it streams nothing.
    pub fn layout(&self, plan: &Plan) -> Layout {
        match self.residency {
            Policy::Stream { slabs } => Layout::new(plan, &Residencies::new(plan, self.residency), slabs),
            Policy::Mapped | Policy::CopyDense | Policy::CopyAll => Layout::default(),
        }
    }

    /// Compiles as [`Backend::compile`] does, with streamed experts from a source that is not the checkpoint's files.
    ///
    /// # Errors
    /// As [`Backend::compile`].
    pub fn compile_from(
        &self,
        plan: &ValidPlan,
        weights: Arc<Checkpoint>,
        limits: Limits,
        source: Arc<dyn Source>,
    ) -> Result<Box<dyn Program>, CompileError> {
        Ok(Box::new(compile::compile(self, plan, weights, limits, Some(source), None)?))
    }
}

/// The parts of a plan, each on threads of one CPU: what several devices compute, without them.
#[derive(Clone, Copy, Debug)]
pub struct Parted {
    /// Of each part.
    pub cpu: Cpu,
    /// How many there are.
    pub n_parts: usize,
}

impl Backend for Parted {
    fn name(&self) -> &'static str {
        self.cpu.name()
    }

    /// The plan as it is: its parts are lowered when they are compiled.
    fn lower(&self, plan: ValidPlan) -> Result<ValidPlan, CompileError> {
        Ok(plan)
    }

    /// As that of one program: what the parts have twice is little.
    fn footprint(&self, plan: &ValidPlan, limits: Limits) -> Footprint {
        self.cpu.footprint(plan, limits)
    }

    fn compile(
        &self,
        plan: &ValidPlan,
        weights: Arc<Checkpoint>,
        limits: Limits,
    ) -> Result<Box<dyn Program>, CompileError> {
        let parts = parts::on_host(self.name(), self.n_parts, plan, &weights, |plan, weights, end| {
            let plan = self.cpu.lower(plan)?;
            weights.hold_repacked()?;
            Ok(Box::new(compile::compile(&self.cpu, &plan, weights, limits, None, Some(end))?))
        })?;
        Ok(Box::new(parts))
    }
}

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn lower(&self, plan: ValidPlan) -> Result<ValidPlan, CompileError> {
        Ok(plan.rewrite(passes::fuse)?)
    }

    fn footprint(&self, plan: &ValidPlan, limits: Limits) -> Footprint {
        footprint::footprint(self, plan, limits)
    }

    fn compile(
        &self,
        plan: &ValidPlan,
        weights: Arc<Checkpoint>,
        limits: Limits,
    ) -> Result<Box<dyn Program>, CompileError> {
        Ok(Box::new(compile::compile(self, plan, weights, limits, None, None)?))
    }
}
