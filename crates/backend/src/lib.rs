//! The contract of a backend: a [`Backend`] turns a plan and a checkpoint into a [`Program`]; a program computes one
//! step at a time.
//!
//! Here are also what every backend shares (where experts live, sums of inputs, drafts, routing traces) and the
//! [`mod@reference`] interpreter that all others are tested against. The crates `cpu` and `gpu` hold the backends. It
//! knows nothing of text, requests or sampling.
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod batch;
pub mod cache_type;
pub mod drafts;
pub mod experts;
pub mod footprint;
pub mod inputs;
pub mod parts;
pub mod pick;
pub mod reference;
pub mod residency;
pub mod rope;
pub mod routing;
pub mod weights;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use checkpoint::Checkpoint;
use model::plan::{Plan, ValidPlan, Weight};
use sys::arena::OutOfMemory;

pub use batch::{Ask, Batch, Chunk, GivenRows, Masks, PAGE, Tables, Takes};
pub use cache_type::{CacheType, KvType};
pub use experts::StreamStats;
pub use footprint::{Footprint, Part};
pub use pick::{Best, Picks};
pub use routing::RouterInfo;

/// Something that can run plans.
pub trait Backend {
    /// Its name in messages and tables.
    fn name(&self) -> &'static str;

    /// Rewrites a plan with the passes that help this backend. The result is for this backend only: it may hold fused
    /// ops and narrower buffers. A plan that was not lowered runs as the architecture wrote it.
    ///
    /// # Errors
    /// [`CompileError::Plan`] when a pass breaks a rule of an op.
    fn lower(&self, plan: ValidPlan) -> Result<ValidPlan, CompileError>;

    /// What the program of a plan takes of this backend's memory: what [`Backend::compile`] would allocate, and the
    /// weights that stay in their files. Allocates nothing.
    fn footprint(&self, plan: &ValidPlan, limits: Limits) -> Footprint;

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

/// Sizes that a program is compiled for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of tokens in a step.
    pub max_tokens: usize,
    /// Maximum number of rows that a step returns.
    pub max_outputs: usize,
    /// Pages of [`PAGE`] positions in the caches that keep every position, over all sequences.
    pub n_pages: usize,
    /// Maximum number of positions of a sequence.
    pub max_positions: usize,
    /// Pages of [`PAGE`] positions in the caches that keep a window, over all sequences.
    pub n_window_pages: usize,
    /// Slots for recurrent states, of running sequences and of checkpoints.
    pub n_states: usize,
    /// Maximum number of draft tokens in a chunk ([`Chunk::n_draft`]). 0 costs nothing; more make a slot larger where a
    /// plan has states, and each of the drafts wants a row of `max_outputs`.
    pub max_draft: usize,
}

/// The kinds of memory that a sequence of a plan takes, besides the pages that hold all its positions.
///
/// Every sequence has those pages; where no layer keeps all positions, they are only numbers and take no memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kinds {
    /// Window pages: the widest window of the layers that keep one, in positions.
    pub window: Option<usize>,
    /// Recurrent state: a slot.
    pub state: bool,
    /// No kind of memory: a step has whole sequences, whose tokens see each other ([`Plan::whole`]).
    pub whole: bool,
}

impl Kinds {
    /// The kinds that sequences of `plan` take.
    pub fn of(plan: &Plan) -> Kinds {
        Kinds { window: plan.window(), state: !plan.states.is_empty(), whole: plan.whole }
    }

    /// First block (of [`PAGE`] positions) that a token at `pos` attends to in the layers with a window.
    pub fn first_window_block(self, pos: usize) -> usize {
        self.window.map_or(0, |window| (pos + 1).saturating_sub(window) / PAGE)
    }

    /// Maximum number of window pages that a sequence needs at once while it decodes one token at a time.
    pub fn window_blocks(self) -> usize {
        self.window.map_or(0, |window| (window - 1).div_ceil(PAGE) + 1)
    }

    /// Checks that the limits leave room for one sequence.
    ///
    /// # Errors
    /// [`CompileError::Limit`] names the first that does not.
    pub fn check(self, limits: Limits) -> Result<(), CompileError> {
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

/// A piece of a program's memory of sequences that can be saved and restored ([`Save`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// A page of the layers that keep all positions.
    Page(u32),
    /// A page of the layers that keep a window.
    WindowPage(u32),
    /// A slot of recurrent states.
    State(u32),
}

/// Bytes of each kind of [`Piece`], 0 where a plan has no such memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PieceBytes {
    /// Of [`Piece::Page`].
    pub page: usize,
    /// Of [`Piece::WindowPage`].
    pub window_page: usize,
    /// Of [`Piece::State`].
    pub state: usize,
}

impl PieceBytes {
    /// Of a piece.
    pub fn of(self, piece: Piece) -> usize {
        match piece {
            Piece::Page(_) => self.page,
            Piece::WindowPage(_) => self.window_page,
            Piece::State(_) => self.state,
        }
    }
}

/// A compiled plan with its weights, buffers and cache.
///
/// A step is [`Program::submit`] and [`Program::wait`]: between the two, a device computes while the host does other
/// work. One step is in flight at a time. A step allocates nothing.
///
/// # Errors of a step
/// A refused batch ([`StepError::TokenId`], [`StepError::Batch`]) changes nothing. A failed step
/// ([`StepError::Failed`]) changes only cache positions of its own chunks and the recurrent states of its dirty chunks.
pub trait Program: Send {
    /// The limits it was compiled for.
    fn limits(&self) -> Limits;

    /// The kinds of memory that a sequence takes.
    fn kinds(&self) -> Kinds;

    /// Vocabulary size, the width of a logits row.
    fn n_vocab(&self) -> usize;

    /// Checks a batch and starts its step. The batch may be changed as soon as the call returns.
    ///
    /// # Errors
    /// A refused batch; then no step is in flight. A device may fail here as well.
    ///
    /// # Panics
    /// May panic when a step is in flight: a mistake of the caller.
    fn submit(&mut self, batch: &Batch) -> Result<(), StepError>;

    /// Finishes the step that [`Program::submit`] started: its tokens are in the cache, and its output rows are
    /// returned.
    ///
    /// # Errors
    /// [`StepError::Failed`].
    ///
    /// # Panics
    /// May panic when no step is in flight.
    fn wait(&mut self) -> Result<Output<'_>, StepError>;

    /// [`Program::submit`] and [`Program::wait`].
    ///
    /// # Errors
    /// As those two.
    fn step(&mut self, batch: &Batch) -> Result<Output<'_>, StepError> {
        self.submit(batch)?;
        self.wait()
    }

    /// Width of the hidden states that steps of the draft head are given ([`Batch::hidden`]); `None` where the program
    /// has no draft head.
    fn draft_width(&self) -> Option<usize> {
        None
    }

    /// Width of the rows that steps can be given in place of embeddings ([`Batch::given`]); `None` where the program
    /// takes none.
    fn d_input(&self) -> Option<usize> {
        None
    }

    /// Copies all recurrent states of one slot to another: saves or restores a checkpoint.
    ///
    /// # Panics
    /// When a slot is not below [`Limits::n_states`].
    fn copy_state(&mut self, from: u32, to: u32);

    /// The routers of the plan, in order of layers; none where no layer has experts.
    fn routers(&self) -> &[RouterInfo];

    /// Switches reports of the routers' choices on or off from the next step on; off at first. Results do not change.
    fn trace_routing(&mut self, is_on: bool);

    /// Weights of the last step's experts, in the order of [`Output::routing`]: what the outputs of the experts are
    /// multiplied with. `None` unless [`Program::trace_routing`] is on, and where a program does not report them.
    fn expert_weights(&self) -> Option<&[f32]> {
        None
    }

    /// What streaming experts from disk has done so far; `None` where nothing is streamed.
    fn stream_stats(&self) -> Option<StreamStats>;

    /// Gives the program a flag that ends a step early while it is set ([`Cause::Interrupted`]), where steps can be
    /// long because they wait for a disk.
    fn set_interrupt(&mut self, flag: Arc<AtomicBool>);

    /// Whether the device is lost to the program, so that every further step fails as the last one did.
    fn is_lost(&self) -> bool;

    /// Saves and restores the memory of sequences, where the program can.
    fn saver(&mut self) -> Option<&mut dyn Save>;

    /// Moves recurrent states past accepted drafts, where the program takes drafts of a plan with states.
    fn drafts(&mut self) -> Option<&mut dyn Drafts>;

    /// Measures the time of ops, where the program can.
    fn profiler(&mut self) -> Option<&mut dyn Profile>;

    /// Sums the inputs of products, where the program can.
    fn input_sums(&mut self) -> Option<&mut dyn SumInputs>;
}

/// Saves and restores a program's memory of sequences. No step is in flight.
pub trait Save {
    /// Sizes of the pieces that [`Save::save`] reads.
    fn piece_bytes(&self) -> PieceBytes;

    /// Appends the bytes of a piece to `out`. They mean something to a program of the same plan, limits on drafts and
    /// cache type alone.
    ///
    /// # Panics
    /// When the piece is beyond the limits, or a state has uncommitted drafts.
    fn save(&self, piece: Piece, out: &mut Vec<u8>);

    /// Restores a piece from what [`Save::save`] wrote. Other bytes of the same length are numbers like any; returns
    /// false, and changes nothing, where the length differs.
    ///
    /// # Panics
    /// When the piece is beyond the limits.
    fn restore(&mut self, piece: Piece, bytes: &[u8]) -> bool;
}

/// Steps with drafts, and those of plans with recurrent states.
pub trait Drafts {
    /// Moves the recurrent states of a slot past the first `n_accepted` drafts of its last step, to the bits that a
    /// step of these tokens without drafts leaves; the other drafts are forgotten. It costs next to nothing: a program
    /// may do the work as part of the slot's next step.
    ///
    /// A step with drafts must be followed by this call, with 0 too, before the slot is read again: a step that resumes
    /// from it is refused until then. Chunks at position 0 and copies to the slot start it anew and need no call.
    /// Caches need none either: later steps overwrite the positions of drafts that were not accepted.
    ///
    /// # Panics
    /// When the slot has no uncommitted drafts or fewer than `n_accepted`: a mistake of the caller. So is a call to a
    /// program that was compiled for no drafts.
    fn commit(&mut self, slot: u32, n_accepted: usize);

    /// Whether the step that was submitted last takes the time of later ones of its kind. The first ones may take longer
    /// on a device that records launches: they say nothing of what drafts cost.
    fn is_settled(&mut self) -> bool;
}

/// Times of ops. Results of steps do not change.
pub trait Profile {
    /// Switches timing on, from zero, or off, keeping the counts; off at first.
    fn set_enabled(&mut self, is_on: bool);

    /// Time per op, summed over layers.
    fn times(&self) -> &[OpTime];
}

/// Sums over the inputs of products. Results of steps change by rounding at most.
pub trait SumInputs {
    /// Chooses which inputs the next steps sum; none at first.
    fn trace(&mut self, trace: InputTrace);

    /// The sums of matrices and stacks, in the order of the plan that was compiled.
    fn sums(&self) -> &[InputSums];
}

/// Which inputs of products are summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InputTrace {
    /// None; sums stay.
    #[default]
    Off,
    /// All, from zero.
    All,
    /// On top of the sums so far those of experts that have none when this is switched on. Every token is sent through
    /// as many of them as it has experts, in turn, beside those that its router chose.
    Unreached,
}

/// Sums over the inputs of a matrix, or of each matrix of a stack, over all traced steps: how much a column matters.
#[derive(Clone, Debug, PartialEq)]
pub struct InputSums {
    /// The matrices or stacks that have this input, in the plan that was compiled.
    pub weights: Vec<Weight>,
    /// Sums of the squares of each column, `[n_mat, n_cols]`.
    pub squares: Vec<f64>,
    /// Rows that were summed, `[n_mat]`.
    pub counts: Vec<u64>,
    /// Those of them that no router chose ([`InputTrace::Unreached`]), `[n_mat]`; empty where matrices are no experts.
    pub forced: Vec<u64>,
}

impl InputSums {
    /// No sums yet, for the matrices or stacks that have this input.
    pub fn new(weights: Vec<Weight>) -> InputSums {
        InputSums { weights, squares: Vec::new(), counts: Vec::new(), forced: Vec::new() }
    }

    /// Columns of the input.
    pub fn n_cols(&self) -> usize {
        self.squares.len() / self.counts.len()
    }

    /// Adds an input of matrix `i`.
    pub fn add(&mut self, i: usize, x: &[f32]) {
        let squares = &mut self.squares[i * x.len()..][..x.len()];
        squares.iter_mut().zip(x).for_each(|(sum, &x)| *sum += f64::from(x) * f64::from(x));
        self.counts[i] += 1;
    }
}

/// Time of one kind of op, over all traced steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpTime {
    /// The op and the weights it multiplies by, or a name for what a step does around its ops.
    pub name: String,
    /// Bytes of weights that it reads per token.
    pub bytes: usize,
    /// Number of traced steps.
    pub steps: u64,
    /// Parallel regions of a thread pool, or kernels launched on a device.
    pub launches: u64,
    /// Total time.
    pub time: Duration,
    /// Time outside the launches, while one thread works and the rest of the device is idle.
    pub serial: Duration,
    /// Time in the chunks of parallel regions, summed over threads; zero where launches have none.
    pub busy: Duration,
}

/// Results of a step.
#[derive(Clone, Copy, Debug)]
pub struct Output<'a> {
    /// `[R, n_vocab]`, in the order of [`Batch::rows`]. Only the rows of [`Ask::Logits`] are defined; the slice ends
    /// with the last of them.
    pub logits: &'a [f32],
    /// Results of the rows of [`Ask::Best`], by their index in [`Batch::rows`].
    pub picks: &'a Picks,
    /// The output rows behind the last norm ([`Plan::hidden`]), `[R, d_model]`. Empty where a plan has no such rows.
    pub hidden: &'a [f32],
    /// The rows of all tokens after the last norm, `[T, d_model]`, which the draft head is given. Empty where the
    /// program has none, and after its own steps.
    pub all_hidden: &'a [f32],
    /// Sequences whose routers saw NaN; all others are valid.
    pub faults: &'a [Fault],
    /// Experts chosen for the tokens of the output rows, `[R, Σ n_used]`: for every router of [`Program::routers`] its
    /// ids, best first. `None` unless [`Program::trace_routing`] is on.
    pub routing: Option<&'a [u16]>,
}

/// A sequence that cannot continue.
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
    /// The checkpoint could not be read.
    #[error("compile plan: {0}")]
    Read(#[from] checkpoint::Error),
    /// The plan needs more than the limits give.
    #[error("compile plan: {what}: the limits have {value}, one sequence needs {least}")]
    Limit {
        /// The resource.
        what: &'static str,
        /// Its limit.
        value: usize,
        /// The smallest limit that works.
        least: usize,
    },
    /// Memory that the limits require could not be allocated.
    #[error("compile plan: {what} needs {bytes} bytes, which could not be allocated; lower the context or the batch")]
    Memory {
        /// Its purpose.
        what: &'static str,
        /// Its size.
        bytes: usize,
    },
    /// The backend could not start its threads or its device.
    #[error("compile plan: start {what}: {why}")]
    Start {
        /// The thread or device, with its number.
        what: String,
        /// The system's message, and a remedy.
        why: String,
    },
    /// This backend lacks something that the plan needs.
    #[error("compile plan: backend {backend} cannot {what}")]
    Unsupported {
        /// Backend.
        backend: &'static str,
        /// What is missing.
        what: String,
    },
}

impl From<OutOfMemory> for CompileError {
    fn from(OutOfMemory { what, bytes }: OutOfMemory) -> CompileError {
        CompileError::Memory { what, bytes }
    }
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
    /// The step started and could not finish.
    #[error(transparent)]
    Failed(#[from] Failure),
}

/// A step that started and could not finish.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("run step: {cause}")]
pub struct Failure {
    /// The cause.
    pub cause: Cause,
    /// Chunks that would fail again because data they need is lost. The others may be retried.
    pub lost: Chunks,
    /// Chunks whose recurrent states are neither those before the step nor those after it.
    pub dirty: Chunks,
}

impl Failure {
    /// A failure of every chunk of the step.
    pub fn all(cause: Cause) -> Failure {
        Failure { cause, lost: Chunks::All, dirty: Chunks::All }
    }
}

/// Cause of a failed step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    /// The device failed: a kernel faulted, memory ran out, the device was lost.
    #[error("{device}: {op}: {why}")]
    Device {
        /// The device.
        device: String,
        /// The op that was running, where known.
        op: String,
        /// The driver's message.
        why: String,
    },
    /// Bytes of a weight could not be read.
    #[error("read {file} at byte {offset}: {why}")]
    Io {
        /// The file.
        file: String,
        /// Offset in the file.
        offset: u64,
        /// The system's message.
        why: String,
    },
    /// The caller has set the flag of [`Program::set_interrupt`].
    #[error("interrupted")]
    Interrupted,
}

impl Cause {
    /// What a mapped file says that could not be read.
    pub fn lost(error: checkpoint::Error) -> Cause {
        match error {
            checkpoint::Error::Lost { file, offset, why } => Cause::Io { file, offset: offset as u64, why },
            other => Cause::Io { file: String::new(), offset: 0, why: other.to_string() },
        }
    }
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
