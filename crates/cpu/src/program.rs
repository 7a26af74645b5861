//! A compiled plan: the op loop.
//!
//! A step checks the batch, lays out its tokens once, and runs the ops one after the other, each as one or a few
//! parallel regions. Everything it needs was allocated when the plan was compiled.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use checkpoint::Checkpoint;
use model::plan::{Buf, Gate, GateFactor, Gelu, InputMode, N_AXES, Rows};
use quant::{Planes, WeightType};

use super::isa::CheckedIsa;
use super::kernels::{ActsShared, Col, Kernels, Matrix, Scratch};
use super::mem::{PerWorker, View};
use super::ops::attention::{AttentionScratch, AttentionStep, SplitStates};
use super::ops::causal_conv::CausalConvStep;
use super::ops::choose::ChooseStep;
use super::ops::decay_beta::DecayBetaStep;
use super::ops::delta_net::DeltaNetStep;
use super::ops::experts::{ExpertLists, ExpertMats};
use super::ops::experts_streamed::{StreamedMats, Streaming};
use super::ops::kv_append::CacheView;
use super::ops::linear::N_KINDS;
use super::ops::norm::GatedNormStep;
use super::ops::rope::RopeTable;
use super::ops::route::RouterStep;
use super::ops::{
    attention, causal_conv, choose, combine, decay_beta, delta_net, elementwise, embed, experts, experts_streamed,
    head_linear, heads, kv_append, linear, norm, rope, route,
};
use super::pool::Pool;
use super::states::States;
use super::times::Times;
use backend::inputs::{self, Inputs};
use backend::parts::End;
use backend::routing::RoutingTrace;
use backend::{
    Batch, Cause, Drafts, Failure, Fault, InputSums, InputTrace, Kinds, Limits, OpTime, Output, Picks, Piece,
    PieceBytes, Profile, Program, RouterInfo, Save, StepError, StreamStats, SumInputs, Takes,
};
use sys::arena::Arena;

/// A stack of matrices, each `[n, k]`, wherever each lies; a plain matrix is a stack of one.
pub struct Mat {
    pub dtype: WeightType,
    pub n: usize,
    pub k: usize,
    slabs: Vec<Slab>, // [n_stack]
}

/// The planes of one matrix.
struct Slab {
    q: *const [u8],
    scales: *const [u8],
    biases: *const [u8],
}

// SAFETY: read-only bytes of the checkpoint or of copies, which the program keeps alive.
unsafe impl Send for Mat {}
// SAFETY: as above.
unsafe impl Sync for Mat {}

impl Mat {
    /// # Safety
    /// Every slab is `n` rows of `k` values, which whole blocks make, and outlives the matrix.
    pub unsafe fn new(dtype: WeightType, n: usize, k: usize, slabs: &[Planes]) -> Mat {
        let slab = |s: &Planes| Slab { q: s.q, scales: s.scales, biases: s.biases };
        Mat { dtype, n, k, slabs: slabs.iter().map(slab).collect() }
    }

    /// Number of matrices.
    pub fn n_stack(&self) -> usize {
        self.slabs.len()
    }

    /// Matrix `i` of the stack.
    pub fn matrix(&self, i: usize) -> Matrix<'_> {
        let slab = &self.slabs[i];
        // SAFETY: the promise made to `new`.
        let planes = unsafe { Planes { q: &*slab.q, scales: &*slab.scales, biases: &*slab.biases } };
        Matrix { dtype: self.dtype, n: self.n, k: self.k, planes }
    }

    /// Row `i` of a plain matrix.
    pub fn row(&self, i: usize) -> Planes<'_> {
        self.row_of(0, i)
    }

    /// Row `i` of matrix `stack`.
    pub fn row_of(&self, stack: usize, i: usize) -> Planes<'_> {
        let row_bytes = self.dtype.plane_bytes(self.k).expect("`new` was promised whole blocks");
        self.matrix(stack).planes.row(row_bytes, i)
    }
}

/// One matrix of a linear.
pub struct PartStep {
    pub w: Mat,
    pub bias: Option<Vec<f32>>,
    pub out: View,
}

/// The norm that a fused op emits.
pub struct NormStep {
    pub w: Vec<f32>,
    pub eps: f32,
    pub out: View,
}

/// An op of the plan with its buffers and weights resolved.
pub enum OpStep {
    Embed { table: Mat, scale: f32, out: View },
    EmbedPlace { table: Mat, axis: usize, out: View },
    Input { x: View, first: usize, mode: InputMode },
    AddBias { x: View, w: Vec<f32> },
    Gelu { x: View, form: Gelu },
    Clamp { x: View, low: f32, high: f32 },
    Constant { values: Vec<f32>, out: View },
    Linear { x: View, parts: Vec<PartStep> },
    GatedLinear { x: View, gate: Mat, up: Mat, act: Gate, out: View, spare: Option<View> },
    Center { x: View, out: View },
    RmsNorm { x: View, residual: Option<View>, w: Vec<f32>, eps: f32, out: View },
    HeadNorm { x: View, w: Option<Vec<f32>>, eps: f32, d_head: usize },
    Rope { x: View, rope: usize, d_head: usize },
    SplitHeads { x: View, parts: Vec<(usize, View)> },
    JoinHeads { parts: Vec<(usize, View)>, out: View },
    HeadLinear { x: View, w: Mat, transposed: bool, out: View },
    GatedAct { gate: View, up: View, act: Gate, out: View },
    Add { x: View, y: View },
    KvAppend { cache: usize, k: View, v: Option<View> },
    Choose(ChooseStep),
    Attention(AttentionStep),
    CausalConv(CausalConvStep),
    DeltaNet(DeltaNetStep),
    Route { logits: View, router: RouterStep, ids: View, weights: View, layer: u32 },
    Experts { x: View, ids: View, mats: ExpertMats, hidden: View, out: View, spare: Option<View> },
    StreamedExperts { x: View, ids: View, mats: StreamedMats, hidden: View, out: View, spare: Option<View> },
    Combine { x: View, add: bool, y: View, weights: View, norm: Option<NormStep> },
    Select { x: View, out: View },
    Scale { x: View, scale: f32 },
    ScaleEach { x: View, w: Vec<f32> },
    Softcap { x: View, cap: f32 },
    AllReduce { x: View, link: End },
    GateBy { x: View, gate: View, factor: GateFactor },
    DecayBeta(DecayBetaStep),
    GatedNorm { x: View, gate: View, norm: GatedNormStep },
}

/// Consecutive tokens of a chunk that attention takes together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryTile {
    /// Index of the first token in the step.
    pub first: u32,
    /// Number of tokens.
    pub len: u32,
    /// Position of the first token.
    pub pos: u32,
    /// Index of the chunk.
    pub chunk: u32,
}

/// The tokens of a step, laid out once for all ops.
pub struct StepTokens {
    /// Position of each token.
    pub pos: Vec<u32>,
    /// Position of each in rotary embeddings.
    pub places: Vec<[u32; N_AXES]>,
    /// Position after the last that each sees: of its span, or its own.
    pub ends: Vec<u32>,
    /// Chunk of each token.
    pub chunk_of: Vec<u32>,
    /// Query tiles in order.
    pub tiles: Vec<QueryTile>,
    /// Most tokens of a query tile.
    pub tile_tokens: usize,
    /// First layer whose router saw no softmax in a token's row, `u32::MAX` when none did.
    pub fault_layer: Vec<AtomicU32>,
    n_outputs: usize,
}

impl StepTokens {
    /// Bytes that [`StepTokens::new`] allocates.
    pub fn bytes(max_tokens: usize) -> usize {
        max_tokens.saturating_mul((3 + N_AXES) * size_of::<u32>() + size_of::<QueryTile>() + size_of::<AtomicU32>())
    }

    /// For steps of up to `max_tokens` tokens.
    pub fn new(max_tokens: usize, tile_tokens: usize) -> StepTokens {
        StepTokens {
            pos: Vec::with_capacity(max_tokens),
            places: Vec::with_capacity(max_tokens),
            ends: Vec::with_capacity(max_tokens),
            chunk_of: Vec::with_capacity(max_tokens),
            tiles: Vec::with_capacity(max_tokens),
            tile_tokens,
            fault_layer: (0..max_tokens).map(|_| AtomicU32::new(u32::MAX)).collect(),
            n_outputs: 0,
        }
    }

    fn fill(&mut self, batch: &Batch) {
        self.pos.clear();
        self.chunk_of.clear();
        self.tiles.clear();
        self.n_outputs = batch.rows.len();
        for (i, c) in batch.chunks.iter().enumerate() {
            self.pos.extend(c.pos..c.pos + c.len);
            self.chunk_of.extend((0..c.len).map(|_| i as u32));
            for first in (0..c.len).step_by(self.tile_tokens) {
                let len = (c.len - first).min(self.tile_tokens as u32);
                self.tiles.push(QueryTile { first: c.first + first, len, pos: c.pos + first, chunk: i as u32 });
            }
        }
        self.places.clear();
        self.places.extend(batch.places());
        self.ends.clear();
        self.ends.extend(batch.ends());
        self.fault_layer[..self.pos.len()].iter().for_each(|f| f.store(u32::MAX, Relaxed));
    }

    /// A step of so many rows that belong to no batch.
    pub fn set_rows(&mut self, rows: usize) {
        self.pos.clear();
        self.pos.resize(rows, 0);
        self.chunk_of.clear();
        self.chunk_of.resize(rows, 0);
        self.n_outputs = rows;
    }

    /// Number of rows that a buffer has in this step.
    pub fn rows(&self, rows: Rows) -> usize {
        rows.count(self.pos.len(), self.n_outputs)
    }
}

/// What a worker has to itself.
pub struct Worker {
    pub kernel: Scratch,
    pub attention: AttentionScratch,
    /// Decoded rows of a transposed head.
    pub rows: Vec<f32>,
    /// Columns of a delta net's state that drafts move.
    pub tried: Vec<f32>,
}

/// What ops see of a program while it runs.
pub struct Run<'a> {
    pub pool: &'a mut Pool,
    pub isa: CheckedIsa,
    pub kernels: &'a Kernels,
    pub batch: &'a Batch,
    pub step: &'a StepTokens,
    /// Accepted drafts that the state of each slot is still to be moved past.
    pub accepted: &'a [u32],
    /// Quantized inputs by kind.
    pub acts: &'a mut [ActsShared; N_KINDS],
    /// Columns `r -> r`.
    pub cols: &'a [Col],
    /// Room for the columns of every head.
    pub head_cols: &'a mut [Col],
    pub workers: &'a PerWorker<Worker>,
    pub lists: &'a mut ExpertLists,
    pub split: &'a mut SplitStates,
    /// Room for ranks of positions, and for how many positions of a token.
    pub ranks: &'a mut [u64],
    pub max_positions: usize,
    pub routing: &'a mut RoutingTrace,
    /// What streamed experts need.
    pub streaming: Option<&'a mut Streaming>,
}

/// A draft head with its buffers resolved.
pub struct DraftSteps {
    pub ops: Vec<OpStep>,
    /// What it is given.
    pub input: View,
    /// The model's rows that it may be given.
    pub source: View,
    pub logits: View,
    pub hidden: Option<View>,
    pub d_model: usize,
}

/// A plan compiled for the CPU. Fields drop in order: what points into the arenas and the checkpoint goes first.
pub struct CpuProgram {
    pub ops: Vec<OpStep>,
    pub caches: Vec<CacheView>,
    pub states: States,
    pub ropes: Vec<RopeTable>,
    pub logits: View,
    pub hidden: Option<View>,
    pub draft: Option<DraftSteps>,
    pub n_vocab: usize,
    pub takes: Takes,
    pub limits: Limits,
    pub kinds: Kinds,
    pub pool: Pool,
    pub kernels: Kernels,
    pub step: StepTokens,
    pub acts: [ActsShared; N_KINDS],
    pub cols: Vec<Col>,
    pub head_cols: Vec<Col>,
    pub workers: PerWorker<Worker>,
    pub lists: ExpertLists,
    pub split: SplitStates,
    pub ranks: Vec<u64>,
    pub routing: RoutingTrace,
    pub streaming: Option<Box<Streaming>>,
    pub faults: Vec<Fault>,
    /// The submitted step.
    pub batch: Batch,
    pub picks: Picks,
    pub times: Times,
    pub inputs: Inputs,
    /// Of each buffer.
    pub views: Vec<View>,
    /// Memory of the buffers, the spare buffer and the cache, which views point into.
    pub _arenas: Vec<Arena>,
    /// Bytes of the weights, which matrices point into.
    pub weights: Arc<Checkpoint>,
}

/// The buffers of a program, by their numbers.
struct Views<'a>(&'a [View]);

impl inputs::Memory for Views<'_> {
    type Error = Failure;

    fn numbers(&mut self, buf: Buf, n: usize) -> Result<Cow<'_, [f32]>, Failure> {
        let view = &self.0[buf.0 as usize];
        // SAFETY: no op runs, and the rows are those of the step.
        Ok(Cow::Borrowed(unsafe { view.read(n / view.width) }))
    }

    fn ids(&mut self, buf: Buf, n: usize) -> Result<Vec<u32>, Failure> {
        let view = &self.0[buf.0 as usize];
        // SAFETY: as above; the ids stay until the next router writes them.
        Ok(unsafe { view.ids(n / view.width) }.to_vec())
    }

    fn put_ids(&mut self, buf: Buf, ids: &[u32]) -> Result<(), Failure> {
        let view = &self.0[buf.0 as usize];
        for (t, ids) in ids.chunks_exact(view.width).enumerate() {
            // SAFETY: as above.
            unsafe { view.ids_mut(t) }.copy_from_slice(ids);
        }
        Ok(())
    }
}

impl Program for CpuProgram {
    fn limits(&self) -> Limits {
        self.limits
    }

    fn kinds(&self) -> Kinds {
        self.kinds
    }

    fn n_vocab(&self) -> usize {
        self.n_vocab
    }

    /// The threads compute in [`Program::wait`]: the caller is one of them.
    fn submit(&mut self, batch: &Batch) -> Result<(), StepError> {
        batch.check_with(self.limits, self.kinds, self.n_vocab, self.takes)?;
        if !batch.is_draft() {
            self.states.check(batch)?;
        }
        self.batch.copy_from(batch);
        Ok(())
    }

    fn wait(&mut self) -> Result<Output<'_>, StepError> {
        let batch = &self.batch;
        let draft = self.draft.as_ref().filter(|_| batch.is_draft());
        self.step.fill(batch);
        self.routing.start(batch);
        match draft {
            Some(draft) => {
                for (t, row) in batch.hidden.chunks_exact(draft.d_model).enumerate() {
                    // SAFETY: the batch was checked, and no op runs.
                    unsafe { draft.input.row_mut(t) }.copy_from_slice(row);
                }
            }
            None => {
                self.times.start(&self.pool);
                self.states.start(&mut self.pool, batch);
                if let Some(streaming) = &mut self.streaming {
                    streaming.streams.start_step(self.step.pos.len());
                }
            }
        }
        for rope in &mut self.ropes {
            rope.fill(&mut self.pool, &self.step.places);
        }
        let mut run = Run {
            pool: &mut self.pool,
            isa: self.kernels.isa(),
            kernels: &self.kernels,
            batch,
            step: &self.step,
            accepted: &self.states.accepted,
            acts: &mut self.acts,
            cols: &self.cols,
            head_cols: &mut self.head_cols,
            workers: &self.workers,
            lists: &mut self.lists,
            split: &mut self.split,
            ranks: &mut self.ranks,
            max_positions: self.limits.max_positions,
            routing: &mut self.routing,
            streaming: self.streaming.as_deref_mut(),
        };
        if let Some(draft) = draft {
            draft.ops.iter().try_for_each(|op| run.op(op, &self.caches, &self.ropes))?;
        } else {
            self.times.lap(None, run.pool);
        }
        let counts = inputs::Counts { tokens: batch.tokens.len(), outputs: batch.rows.len() };
        for (i, op) in self.ops.iter().enumerate().filter(|_| draft.is_none()) {
            let mut compute = || run.op(op, &self.caches, &self.ropes);
            match self.inputs.is_on() {
                true => self.inputs.run(i, counts, &mut Views(&self.views), |_| compute())?,
                false => compute()?,
            }
            self.times.lap(Some(i), run.pool);
        }
        // What was computed with zeros in place of weights is nobody's answer.
        self.weights.intact().map_err(|error| Failure::all(Cause::lost(error)))?;
        if draft.is_none() {
            if let Some(streaming) = &mut self.streaming {
                streaming.streams.finish_step().map_err(Failure::all)?;
            }
            self.states.computed(batch);
        }
        collect_faults(&mut self.faults, batch, &self.step);
        let (logits, hidden, source) = match (draft, &self.draft) {
            (Some(draft), _) => (draft.logits, draft.hidden, None),
            (None, all) => (self.logits, self.hidden, all.as_ref().map(|draft| draft.source)),
        };
        let (n_tokens, n_rows) = (batch.tokens.len(), batch.rows.len());
        // SAFETY: the ops are done; the logits stay until the next step, which borrows the program.
        let logits = unsafe { logits.read(n_rows) };
        // SAFETY: as above; the plan's placement keeps these rows to the end as well.
        let rows = |view: Option<View>, n: usize| view.map_or(&[][..], |view| unsafe { view.read(n) });
        self.picks.fill(batch, logits, self.n_vocab);
        Ok(Output {
            logits,
            picks: &self.picks,
            hidden: rows(hidden, n_rows),
            all_hidden: rows(source, n_tokens),
            faults: &self.faults,
            routing: self.routing.ids(),
        })
    }

    fn draft_width(&self) -> Option<usize> {
        self.draft.as_ref().map(|draft| draft.d_model)
    }

    fn d_input(&self) -> Option<usize> {
        self.takes.d_input
    }

    fn routers(&self) -> &[RouterInfo] {
        self.routing.routers()
    }

    fn expert_weights(&self) -> Option<&[f32]> {
        self.routing.weights()
    }

    fn trace_routing(&mut self, is_on: bool) {
        self.routing.turn(is_on, self.limits.max_outputs);
    }

    fn stream_stats(&self) -> Option<StreamStats> {
        self.streaming.as_ref().map(|streaming| streaming.streams.stats())
    }

    fn set_interrupt(&mut self, flag: Arc<AtomicBool>) {
        if let Some(streaming) = &mut self.streaming {
            streaming.streams.set_interrupt(flag);
        }
    }

    fn copy_state(&mut self, from: u32, to: u32) {
        self.states.copy(&mut self.pool, from, to);
    }

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
        Some(self)
    }

    fn input_sums(&mut self) -> Option<&mut dyn SumInputs> {
        Some(self)
    }
}

impl Save for CpuProgram {
    fn piece_bytes(&self) -> PieceBytes {
        let bytes = |piece| self.layers(piece).map(|(cache, _)| cache.page_len()).sum();
        let (page, window_page) = (bytes(Piece::Page(0)), bytes(Piece::WindowPage(0)));
        PieceBytes { page, window_page, state: self.states.saved_bytes() }
    }

    fn save(&self, piece: Piece, out: &mut Vec<u8>) {
        match piece {
            Piece::State(slot) => self.states.save(slot, out),
            Piece::Page(page) | Piece::WindowPage(page) => self.layers(piece).for_each(|(cache, n_pages)| {
                assert!((page as usize) < n_pages, "{piece:?} of {n_pages}");
                // SAFETY: the page exists, and no step is in flight.
                out.extend_from_slice(unsafe { cache.page(page) });
            }),
        }
    }

    fn restore(&mut self, piece: Piece, bytes: &[u8]) -> bool {
        let page = match piece {
            Piece::State(slot) => return self.states.restore(slot, bytes, self.limits.max_draft),
            Piece::Page(page) | Piece::WindowPage(page) => page,
        };
        if self.piece_bytes().of(piece) != bytes.len() {
            return false;
        }
        let mut rest = bytes;
        for (cache, n_pages) in self.layers(piece) {
            assert!((page as usize) < n_pages, "{piece:?} of {n_pages}");
            // SAFETY: the page exists, and no step is in flight.
            let room = unsafe { cache.page(page) };
            let (mine, others) = rest.split_at(room.len());
            room.copy_from_slice(mine);
            rest = others;
        }
        true
    }
}

impl Drafts for CpuProgram {
    fn commit(&mut self, slot: u32, n_accepted: usize) {
        self.states.commit(slot, n_accepted);
    }

    fn is_settled(&mut self) -> bool {
        true
    }
}

impl Profile for CpuProgram {
    fn set_enabled(&mut self, is_on: bool) {
        self.pool.time_regions(is_on);
        self.times.turn(is_on);
    }

    fn times(&self) -> &[OpTime] {
        self.times.rows()
    }
}

impl SumInputs for CpuProgram {
    fn trace(&mut self, trace: InputTrace) {
        self.inputs.turn(trace);
    }

    fn sums(&self) -> &[InputSums] {
        self.inputs.sums()
    }
}

impl CpuProgram {
    /// The layers that a page is of, and how many pages they have.
    fn layers(&self, piece: Piece) -> impl Iterator<Item = (&CacheView, usize)> {
        let windowed = matches!(piece, Piece::WindowPage(_));
        let n_pages = if windowed { self.limits.n_window_pages } else { self.limits.n_pages };
        self.caches.iter().filter(move |cache| cache.windowed == windowed).map(move |cache| (cache, n_pages))
    }
}

/// One fault a chunk: its first token's.
fn collect_faults(faults: &mut Vec<Fault>, batch: &Batch, step: &StepTokens) {
    faults.clear();
    for (chunk, c) in batch.chunks.iter().enumerate() {
        let layer =
            |token: u32| Some(step.fault_layer[token as usize].load(Relaxed)).filter(|&layer| layer != u32::MAX);
        let mut tokens = c.first..c.first + c.len;
        if let Some((token, layer)) = tokens.find_map(|token| Some((token, layer(token)?))) {
            faults.push(Fault { chunk: chunk as u32, layer, token });
        }
    }
}

impl Run<'_> {
    fn op(&mut self, op: &OpStep, caches: &[CacheView], ropes: &[RopeTable]) -> Result<(), Failure> {
        match *op {
            OpStep::Embed { ref table, scale, out } => embed::embed(self, table, scale, out),
            OpStep::EmbedPlace { ref table, axis, out } => embed::embed_place(self, table, axis, out),
            OpStep::Input { x, first, mode } => embed::input(self, x, first, mode),
            OpStep::AddBias { x, ref w } => elementwise::add_bias(self, x, w),
            OpStep::Clamp { x, low, high } => elementwise::clamp(self, x, low, high),
            OpStep::Constant { ref values, out } => elementwise::constant(self, values, out),
            OpStep::Gelu { x, form } => elementwise::gelu(self, x, form),
            OpStep::Linear { x, ref parts } => linear::linear(self, x, parts),
            OpStep::GatedLinear { x, ref gate, ref up, act, out, spare } => {
                linear::gated_linear(self, x, gate, up, act, out, spare)
            }
            OpStep::Center { x, out } => norm::center(self, x, out),
            OpStep::RmsNorm { x, residual, ref w, eps, out } => norm::rms_norm(self, x, residual, w, eps, out),
            OpStep::HeadNorm { x, ref w, eps, d_head } => norm::head_norm(self, x, w.as_deref(), eps, d_head),
            OpStep::Rope { x, rope: table, d_head } => rope::rope(self, x, &ropes[table], d_head),
            OpStep::SplitHeads { x, ref parts } => heads::split_heads(self, x, parts),
            OpStep::JoinHeads { ref parts, out } => heads::join_heads(self, parts, out),
            OpStep::HeadLinear { x, ref w, transposed: false, out } => head_linear::head_linear(self, x, w, out),
            OpStep::HeadLinear { x, ref w, transposed: true, out } => {
                head_linear::head_linear_transposed(self, x, w, out)
            }
            OpStep::GatedAct { gate, up, act, out } => elementwise::gated_act(self, gate, up, act, out),
            OpStep::Add { x, y } => elementwise::add(self, x, y),
            OpStep::KvAppend { cache, k, v } => kv_append::kv_append(self, &caches[cache], k, v),
            OpStep::Choose(ref step) => choose::choose(self, step, &caches[step.cache]),
            OpStep::Attention(ref step) => attention::attention(self, step, &caches[step.cache]),
            OpStep::CausalConv(ref step) => causal_conv::causal_conv(self, step),
            OpStep::DeltaNet(ref step) => delta_net::delta_net(self, step),
            OpStep::Route { logits, ref router, ids, weights, layer } => {
                route::route(self, logits, router, ids, weights, layer);
                let n_rows = self.step.rows(ids.rows);
                // SAFETY: the op is done, and no other runs meanwhile.
                let (chosen, shares) = unsafe { (ids.ids(n_rows), weights.read(n_rows)) };
                self.routing.record_weights(ids.rows, shares, self.batch);
                self.routing.record(ids.rows, chosen, self.batch);
            }
            OpStep::Experts { x, ids, ref mats, hidden, out, spare } => {
                experts::experts(self, x, ids, mats, hidden, out, spare)
            }
            OpStep::StreamedExperts { x, ids, ref mats, hidden, out, spare } => {
                return experts_streamed::experts(self, x, ids, mats, hidden, out, spare);
            }
            OpStep::Combine { x, add, y, weights, ref norm } => {
                combine::combine(self, x, add, y, weights, norm.as_ref())
            }
            OpStep::Select { x, out } => embed::select(self, x, out),
            OpStep::Scale { x, scale } => elementwise::scale(self, x, scale),
            OpStep::ScaleEach { x, ref w } => elementwise::scale_each(self, x, w),
            OpStep::Softcap { x, cap } => elementwise::softcap(self, x, cap),
            OpStep::AllReduce { x, ref link } => {
                // SAFETY: rows follow each other, and nothing else uses them during the op.
                link.all_reduce(unsafe { x.rows_mut(self.step.rows(x.rows)) });
            }
            OpStep::GateBy { x, gate, factor } => elementwise::gate_by(self, x, gate, factor),
            OpStep::DecayBeta(ref step) => decay_beta::decay_beta(self, step),
            OpStep::GatedNorm { x, gate, ref norm } => norm::gated_norm(self, x, gate, norm),
        }
        Ok(())
    }
}
