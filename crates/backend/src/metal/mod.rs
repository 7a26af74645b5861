//! The Metal backend: Apple GPUs of family 7 (M1) and up.
//!
//! A plan becomes dispatches that are plain data ([`node`]), ordered in levels with barriers between them when it is
//! compiled. A step fills a list of commands with its numbers of rows, and a [`gpu::Gpu`] replays it. The one there is
//! today is the simulator of `crates/metal-sim`, which runs the same kernels and checks every access.

mod compile;
pub mod gpu;
mod layout;
mod lower;
mod node;
mod program;
mod sources;
mod tables;
mod weights;

use std::fmt;
use std::sync::Arc;

use checkpoint::Checkpoint;
use model::plan::{ValidPlan, passes};

use crate::cpu::CacheType;
use crate::{Backend, CompileError, Footprint, Limits, Program};

/// Opens a GPU.
pub type Open = dyn Fn() -> Result<Box<dyn gpu::Gpu>, gpu::GpuError> + Send + Sync;

/// An Apple GPU.
#[derive(Clone)]
pub struct Metal {
    /// Opens the GPU of a program; each has one to itself.
    pub open: Arc<Open>,
    /// Elements of the key-value cache.
    pub cache: CacheType,
}

impl fmt::Debug for Metal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metal").field("cache", &self.cache).finish_non_exhaustive()
    }
}

impl Backend for Metal {
    fn name(&self) -> &'static str {
        "metal"
    }

    fn lower(&self, plan: ValidPlan) -> Result<ValidPlan, CompileError> {
        Ok(plan.rewrite(passes::fuse)?)
    }

    fn footprint(&self, plan: &ValidPlan, limits: Limits) -> Footprint {
        compile::footprint(self, plan, limits)
    }

    fn compile(
        &self,
        plan: &ValidPlan,
        weights: Arc<Checkpoint>,
        limits: Limits,
    ) -> Result<Box<dyn Program>, CompileError> {
        Ok(Box::new(compile::compile(self, plan, &weights, limits)?))
    }
}
