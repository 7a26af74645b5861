//! Backends: a [`Backend`] turns a plan and a checkpoint into a [`Program`]; a program computes one step at a time.
//!
//! Almost all unsafe code of the project is in this crate. It knows nothing of text, requests or sampling.

pub mod batch;
pub mod cpu;
pub mod cuda;
pub mod reference;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod router_cases;
mod routing;
mod weights;

use std::sync::Arc;
use std::time::Duration;

use checkpoint::Checkpoint;
use model::plan::Plan;

pub use batch::{Batch, Chunk, PAGE, Tables};
pub use routing::RouterInfo;

/// Something that can run plans.
pub trait Backend {
    /// Name for people and for `--backend`.
    fn name(&self) -> &'static str;

    /// Binds a plan to its weights and allocates everything a step needs.
    fn compile(&self, plan: &Plan, weights: Arc<Checkpoint>, limits: Limits) -> Result<Box<dyn Program>, CompileError>;
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
/// A step allocates nothing. A step that returns an error has changed nothing that a later step can see,
/// except cache positions that the failed batch itself was to write; recurrent states stand where they stood.
pub trait Program: Send {
    /// What it was compiled for.
    fn limits(&self) -> Limits;

    /// What memory a sequence takes.
    fn kinds(&self) -> Kinds;

    /// Vocabulary size, the width of a logits row.
    fn n_vocab(&self) -> usize;

    /// Runs a step: appends the batch's tokens to the cache and returns the logits of the asked rows.
    fn step(&mut self, batch: &Batch) -> Result<Output<'_>, StepError>;

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

    /// Whether steps from now on count what their ops take, from zero; they do not at first, and what was counted stays. The numbers stay the same.
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
    /// Parallel regions.
    pub regions: u64,
    /// Time in all.
    pub time: Duration,
    /// Time outside parallel regions, with one thread at work.
    pub alone: Duration,
}

/// What a step returns.
#[derive(Clone, Copy, Debug)]
pub struct Output<'a> {
    /// `[R, n_vocab]`, in the order of [`Batch::rows`].
    pub logits: &'a [f32],
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
    /// The system does not give as many threads as were asked for.
    #[error("compile plan: start {threads} threads: the system gave {started}: {source}; ask for fewer")]
    Threads {
        /// Asked for, the caller's own included.
        threads: usize,
        /// How many there are, the caller's own included.
        started: usize,
        /// What the system says.
        source: std::io::Error,
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

/// Why a batch was refused; nothing was computed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    /// Token id outside the vocabulary.
    #[error("run step: token {token} has id {id}, the vocabulary has {n_vocab}")]
    TokenId {
        /// Index of the token in the step.
        token: usize,
        /// Its id.
        id: u32,
        /// Vocabulary size.
        n_vocab: usize,
    },
    /// The batch does not fit the limits or contradicts itself.
    #[error("run step: {0}")]
    Batch(String),
    /// The device failed: nothing runs on it any more.
    #[error("run step: {0}")]
    Device(String),
}
