//! The Metal backend: Apple GPUs of family 7 (M1) and up.
//!
//! Ops are lowered to dispatches ([`crate::commands`]), which a [`Gpu`] replays. There are two: `apple.rs`, on macOS,
//! which has never been run, and the simulator of `crates/metal-sim`, which runs the same kernels and checks every
//! access.

#[cfg(target_os = "macos")]
mod apple;
mod compile;
mod fuse;
mod lower;
pub mod outline;
mod self_test;
mod sources;
mod trials;
mod variants;

use std::fmt;
use std::sync::Arc;

use checkpoint::Checkpoint;
use model::plan::{Op, Plan, ValidPlan, WeightDecl, passes};
use quant::WeightType;

pub use compile::cache_misfit;
pub use variants::{Off, Tuning};

use crate::commands::{Gpu, GpuError};
use backend::CacheType;
use backend::{Backend, CompileError, Footprint, Limits, Program};

/// Opens a GPU.
pub type Open = dyn Fn() -> Result<Box<dyn Gpu>, GpuError> + Send + Sync;

/// What is known of the default GPU of a Mac.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Name for people.
    pub name: String,
    /// Apple's family, 7 for M1; 0 for a GPU of another maker.
    pub family: u32,
    /// Bytes that the GPU is meant to use at most, of the memory that it shares with the processor.
    pub budget_bytes: usize,
    /// Why it cannot be used.
    pub unusable: Option<String>,
}

/// The default GPU of the machine.
///
/// # Errors
/// A sentence that says why there is none.
pub fn device() -> Result<DeviceInfo, String> {
    #[cfg(target_os = "macos")]
    return apple::device().map_err(|e| e.to_string());
    #[cfg(not(target_os = "macos"))]
    Err(NO_METAL.into())
}

/// Names of the kinds of kernels, besides products, that [`Metal::self_test`] tries for a plan.
pub fn kinds(plan: &Plan) -> Vec<&'static str> {
    trials::Kind::of(plan).map(trials::Kind::name).collect()
}

#[cfg(not(target_os = "macos"))]
const NO_METAL: &str = "Metal is there on macOS alone";

/// An Apple GPU.
#[derive(Clone)]
pub struct Metal {
    /// Opens the GPU of a program; each has one to itself.
    pub open: Arc<Open>,
    /// Elements of the key-value cache.
    pub cache: CacheType,
    /// Matrices that lie aligned in mapped files are read there; else all weights are copied.
    pub maps_weights: bool,
    /// What forms of products are taken.
    pub tuning: Tuning,
}

impl Metal {
    /// The default GPU of the machine.
    pub fn system(cache: CacheType, maps_weights: bool) -> Metal {
        #[cfg(target_os = "macos")]
        let open = || Ok(Box::new(apple::Apple::open()?) as Box<dyn Gpu>);
        #[cfg(not(target_os = "macos"))]
        let open = || Err(GpuError::Lost(NO_METAL.into()));
        Metal { open: Arc::new(open), cache, maps_weights, tuning: Tuning::default() }
    }
}

impl Metal {
    /// Tries on this GPU every form of products with every matrix type of a plan, and every other kind of kernel that
    /// it has on tiny shapes against the CPU backend. Returns forms that are right, and a sentence for each that is
    /// left out.
    ///
    /// # Errors
    /// [`CompileError::Start`] where there is no GPU, or where plain kernels are wrong.
    pub fn self_test(&self, plan: &Plan) -> Result<(Tuning, Vec<String>), CompileError> {
        let is_matrix = |decl: &&WeightDecl| decl.shape.len() > 1;
        let mut types: Vec<WeightType> = plan.weights.iter().filter(is_matrix).map(|decl| decl.dtype).collect();
        types.sort_by_key(WeightType::to_string);
        types.dedup();
        let start = |why: String| CompileError::Start { what: "the GPU".into(), why };
        let failed = |e: GpuError| start(e.to_string());
        let mut gpu = (self.open)().map_err(failed)?;
        let products = self_test::products(&mut *gpu, &types).map_err(failed)?;
        drop(gpu);
        let mut tuning = self.tuning;
        tuning.is_plain |= !products.is_empty();
        let plain = |why: String| format!("{why}; plain kernels are used instead");
        let mut said: Vec<String> = products.into_iter().map(plain).collect();
        for kind in trials::Kind::of(plan) {
            let tried = |tuning| trials::run(&Metal { tuning, ..self.clone() }, kind);
            let Err(why) = tried(tuning) else { continue };
            kind.turn_off(&mut tuning.off);
            said.push(plain(format!("{}: {why}", kind.name())));
            tried(tuning).map_err(|why| start(format!("{}, with plain kernels: {why}", kind.name())))?;
        }
        Ok((tuning, said))
    }
}

/// Refuses plans with forms of ops that are not written for it, before anything is laid out.
fn refuse(plan: &Plan) -> Result<(), CompileError> {
    let is_both = |op: &Op| match *op {
        Op::Attention { chosen, window, .. } => chosen.is_some() && crate::heeds_spans(plan, window),
        _ => false,
    };
    match plan.all_ops().any(is_both) {
        true => Err(lower::unsupported("choose the positions that tokens of an image see".into())),
        false => Ok(()),
    }
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
        refuse(&plan)?;
        let passes = |plan: &mut Plan| {
            passes::fuse(plan);
            fuse::gather_norms(plan);
            passes::with_draft(plan, fuse::gather_norms);
        };
        Ok(plan.rewrite(passes)?)
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
        refuse(plan)?;
        Ok(Box::new(compile::compile(self, plan, &weights, limits)?))
    }
}
