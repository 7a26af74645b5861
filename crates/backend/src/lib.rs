//! Backends: a [`Backend`] turns a plan and a checkpoint into a [`Program`]; a program computes one step at a time.
//!
//! Almost all unsafe code of the project is in this crate. It knows nothing of text, requests or sampling.

pub mod batch;
pub mod cpu;
pub mod cuda;
pub mod pick;
pub mod reference;
mod rope;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod router_cases;
mod routing;
mod weights;

use std::sync::Arc;
use std::time::Duration;

use checkpoint::Checkpoint;
use model::plan::{Plan, ValidPlan};

pub use batch::{Ask, Batch, Chunk, Masks, PAGE, Tables};
pub use pick::{Best, Picks};
pub use routing::RouterInfo;

/// Something that can run plans.
pub trait Backend {
    /// Its name in messages and tables.
    fn name(&self) -> &'static str;

    /// Rewrites a plan with the passes that pay for this backend. The result is for this backend alone: it may hold fused
    /// ops and narrower buffers. Without a call of it a plan runs as the architecture wrote it.
    ///
    /// # Errors
    /// [`CompileError::Plan`] when a pass breaks a rule of an op.
    fn lower(&self, plan: ValidPlan) -> Result<ValidPlan, CompileError>;

    /// Binds a plan to its weights and allocates everything a step needs.
    ///
    /// # Errors
    /// See [`CompileError`]. Nothing stays allocated.
    fn compile(
        &self,
        plan: &ValidPlan,
        weights: Arc<Checkpoint>,
        limits: Limits,
    ) -> Result<Box<dyn Program>, CompileError>;
}

/// What a program must be able to hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Most tokens in a step.
    pub max_tokens: usize,
    /// Most rows whose logits a step returns.
    pub max_outputs: usize,
    /// Pages of [`PAGE`] positions in the caches that keep every position, over all sequences.
    pub n_pages: usize,
    /// Most positions a sequence may have.
    pub max_positions: usize,
    /// Pages of [`PAGE`] positions in the caches that keep a window, over all sequences.
    pub n_window_pages: usize,
    /// Slots for recurrent states, of running sequences and of checkpoints.
    pub n_states: usize,
}

/// Which kinds of memory a sequence of a plan takes, beside the pages that hold all its positions.
///
/// Those every sequence has; where no layer keeps all positions, they are numbers only and take no memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kinds {
    /// Layers that keep a window, of at most so many positions: window pages.
    pub window: Option<usize>,
    /// Recurrent state: a slot.
    pub state: bool,
}

impl Kinds {
    /// What sequences of `plan` take.
    pub fn of(plan: &Plan) -> Kinds {
        Kinds { window: plan.window(), state: !plan.states.is_empty() }
    }

    /// First block (of [`PAGE`] positions) that a token at `pos` may look at in the layers with a window.
    pub fn first_window_block(self, pos: usize) -> usize {
        self.window.map_or(0, |window| (pos + 1).saturating_sub(window) / PAGE)
    }

    /// Most window pages that a sequence needs at once when it goes on token by token: what any position looks at.
    pub fn window_blocks(self) -> usize {
        self.window.map_or(0, |window| (window - 1).div_ceil(PAGE) + 1)
    }

    /// Whether limits leave room for one sequence.
    fn check(self, limits: Limits) -> Result<(), CompileError> {
        let least = [
            ("window pages", limits.n_window_pages, self.window_blocks().min(limits.max_positions.div_ceil(PAGE))),
            ("slots for recurrent states", limits.n_states, usize::from(self.state)),
        ];
        match least.into_iter().find(|(_, value, least)| value < least) {
            Some((what, value, least)) => Err(CompileError::Limit { what, value, least }),
            None => Ok(()),
        }
    }
}

/// A compiled plan with its weights, buffers and cache.
///
/// A step is [`Program::submit`] and [`Program::wait`]: a device computes between the two while the host does something
/// else. One step is under way at a time. A step allocates nothing.
///
/// # Errors of a step
/// A refused batch ([`StepError::TokenId`], [`StepError::Batch`]) has changed nothing. A failed step
/// ([`StepError::Failed`]) has written nothing that a later step can see but cache positions of its own chunks, and the
/// recurrent states of the chunks that it calls dirty.
pub trait Program: Send {
    /// What it was compiled for.
    fn limits(&self) -> Limits;

    /// What memory a sequence takes.
    fn kinds(&self) -> Kinds;

    /// Vocabulary size, the width of a logits row.
    fn n_vocab(&self) -> usize;

    /// Checks a batch and starts its step. The batch may be changed as soon as the call returns.
    ///
    /// # Errors
    /// A refused batch; then no step is under way. A device may fail here as well.
    ///
    /// # Panics
    /// May panic when a step is under way: a mistake of the caller.
    fn submit(&mut self, batch: &Batch) -> Result<(), StepError>;

    /// Finishes the step that [`Program::submit`] started: its tokens are in the cache, and the asked rows are returned.
    ///
    /// # Errors
    /// [`StepError::Failed`].
    ///
    /// # Panics
    /// May panic when no step is under way.
    fn wait(&mut self) -> Result<Output<'_>, StepError>;

    /// [`Program::submit`] and [`Program::wait`].
    ///
    /// # Errors
    /// As those two.
    fn step(&mut self, batch: &Batch) -> Result<Output<'_>, StepError> {
        self.submit(batch)?;
        self.wait()
    }

    /// Copies all recurrent states of a slot to another: a checkpoint is made, or gone back to. Both slots are below
    /// [`Limits::n_states`]; anything else is a mistake of the caller, and panics.
    fn copy_state(&mut self, from: u32, to: u32);

    /// The routers of the plan, in order of layers; none where no layer has experts.
    fn routers(&self) -> &[RouterInfo] {
        &[]
    }

    /// Whether steps from now on report what the routers chose; they do not at first. The numbers stay the same.
    fn trace_routing(&mut self, is_on: bool) {
        let _ = is_on;
    }

    /// Whether steps from now on count what their ops take, from zero; they do not at first, and what was counted stays.
    /// The numbers stay the same.
    fn trace_times(&mut self, is_on: bool) {
        let _ = is_on;
    }

    /// What was counted, ops that do the same in several layers together; empty where a program cannot tell.
    fn times(&self) -> &[OpTime] {
        &[]
    }
}

/// What ops of one kind took, in all steps that were traced.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpTime {
    /// The op and the weights that it multiplies with; without an op, what a step does around its ops.
    pub name: String,
    /// Bytes of weights that they read for one token.
    pub bytes: usize,
    /// Steps that were traced.
    pub steps: u64,
    /// Pieces of work handed out: parallel regions of a thread pool, kernels launched on a device.
    pub launches: u64,
    /// Time in all.
    pub time: Duration,
    /// Time outside of them, in which one thread works and the rest of the device is idle.
    pub serial: Duration,
}

/// What a step returns.
#[derive(Clone, Copy, Debug)]
pub struct Output<'a> {
    /// `[R, n_vocab]`, in the order of [`Batch::rows`]. A row is there when it was asked for as [`Ask::Logits`]; others may
    /// hold anything, and the slice ends with the last row that is there.
    pub logits: &'a [f32],
    /// The rows that were asked for as [`Ask::Best`], by their index in [`Batch::rows`].
    pub picks: &'a Picks,
    /// What the logits were made of, `[R, d_model]`: the asked rows behind the last norm ([`Plan::hidden`]). Empty where a
    /// plan has no such rows.
    pub hidden: &'a [f32],
    /// Sequences whose numbers broke down; the others are whole.
    pub faults: &'a [Fault],
    /// Experts that were chosen for the tokens of the asked rows, `[R, Σ n_used]`: for every router of
    /// [`Program::routers`] its ids, best first. `None` unless [`Program::trace_routing`] asked for it.
    pub routing: Option<&'a [u16]>,
}

/// A sequence that cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("sequence {chunk}: router of layer {layer} saw NaN at token {token} of the step")]
pub struct Fault {
    /// Index into [`Batch::chunks`].
    pub chunk: u32,
    /// Layer whose router saw NaN.
    pub layer: u32,
    /// Index of the token in the step.
    pub token: u32,
}

/// Why a plan could not be compiled.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// The plan breaks a rule of an op.
    #[error(transparent)]
    Plan(#[from] model::Error),
    /// A tensor that the plan names is not in the checkpoint, or is not what the plan says.
    #[error("compile plan: tensor {name}: {why}")]
    Tensor {
        /// Its name.
        name: String,
        /// What disagrees.
        why: String,
    },
    /// The plan needs more than the limits give.
    #[error("compile plan: {what}: the limits have {value}, one sequence needs {least}")]
    Limit {
        /// Of what.
        what: &'static str,
        /// What the limits say.
        value: usize,
        /// The smallest number that works.
        least: usize,
    },
    /// Memory that the limits ask for cannot be had.
    #[error("compile plan: {what} needs {bytes} bytes, which could not be allocated; lower the context or the batch")]
    Memory {
        /// What for.
        what: &'static str,
        /// How much.
        bytes: usize,
    },
    /// What the backend computes with could not be started: threads, a device.
    #[error("compile plan: start {what}: {why}")]
    Start {
        /// What, with its number.
        what: String,
        /// What the system says, and what helps.
        why: String,
    },
    /// This backend lacks something the plan needs.
    #[error("compile plan: backend {backend} cannot {what}")]
    Unsupported {
        /// Backend.
        backend: &'static str,
        /// What is missing.
        what: String,
    },
}

/// Why a step was refused or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    /// Token id outside the vocabulary. Nothing was computed.
    #[error("run step: token {token} has id {id}, the vocabulary has {n_vocab}")]
    TokenId {
        /// Index of the token in the step.
        token: usize,
        /// Its id.
        id: u32,
        /// Vocabulary size.
        n_vocab: usize,
    },
    /// The batch does not fit the limits or contradicts itself. Nothing was computed.
    #[error("run step: {0}")]
    Batch(String),
    /// The step began and could not be finished.
    #[error(transparent)]
    Failed(#[from] Failure),
}

/// A step that began and could not be finished.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("run step: {cause}")]
pub struct Failure {
    /// What happened.
    pub cause: Cause,
    /// Chunks that would fail again: what they need is lost. The others may be tried once more.
    pub lost: Chunks,
    /// Chunks whose recurrent states stand neither where they stood nor past the chunk.
    pub dirty: Chunks,
}

impl Failure {
    /// A failure that touches every chunk of the step.
    pub fn all(cause: Cause) -> Failure {
        Failure { cause, lost: Chunks::All, dirty: Chunks::All }
    }
}

/// What went wrong in a step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    /// The device failed: a kernel that faulted, memory that ran out, a device that is gone.
    #[error("{device}: {op}: {why}")]
    Device {
        /// The device.
        device: String,
        /// The op that was running, as far as it is known.
        op: String,
        /// What the driver says.
        why: String,
    },
    /// Bytes of a weight could not be read.
    #[error("read {file} at byte {offset}: {why}")]
    Io {
        /// The file.
        file: String,
        /// Offset in the file.
        offset: u64,
        /// What the system says.
        why: String,
    },
}

/// Some of the chunks of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Chunks {
    /// Every chunk.
    All,
    /// Those at these indices into [`Batch::chunks`]; may be empty.
    These(Vec<u32>),
}

impl Chunks {
    /// No chunk.
    pub const NONE: Chunks = Chunks::These(Vec::new());

    /// Whether a chunk is one of them.
    pub fn contains(&self, chunk: u32) -> bool {
        match self {
            Chunks::All => true,
            Chunks::These(these) => these.contains(&chunk),
        }
    }
}
