//! The reference interpreter: plans in plain f32, from dequantised weights.
//!
//! It is the definition of each op, to be read beside `model::plan::Op`, and the oracle of every backend's tests. Sums
//! run in f64 and round to f32 once; activations are f32 between ops. Unlike a production backend it allocates in a
//! step, decodes weights again each time, and has no threads, tiles or instruction sets.

mod delta;
mod kv;
mod ops;

use std::ops::Range;
use std::sync::Arc;

use checkpoint::Checkpoint;
use model::plan::{Access, Buf, Elem, InputMode, LinearPart, Norm, Op, Rows, State, ValidPlan, Weight};

use crate::drafts::Uncommitted;
use crate::parts;
use crate::residency::Residency;
use crate::routing::RoutingTrace;
use crate::{
    Backend, Batch, CacheType, Cause, Chunk, CompileError, Drafts, Failure, Fault, Footprint, Kinds, Limits, Output,
    PAGE, Part, Picks, Profile, Program, RouterInfo, Save, StepError, StreamStats, SumInputs, Takes, weights,
};
use kv::Kv;
use ops::Matrix;
use std::sync::atomic::AtomicBool;

/// The backend.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference;

/// The reference with a cache whose numbers are rounded to these types: what a backend that stores such a cache is held
/// to.
#[derive(Clone, Copy, Debug)]
pub struct Rounded(pub CacheType);

/// The parts of a plan, this many, each by an interpreter on its thread.
#[derive(Clone, Copy, Debug)]
pub struct Parted(pub usize);

impl Backend for Reference {
    fn name(&self) -> &'static str {
        "reference"
    }

    /// No passes: the plain form of an op is its definition.
    fn lower(&self, plan: ValidPlan) -> Result<ValidPlan, CompileError> {
        Ok(plan)
    }

    fn footprint(&self, plan: &ValidPlan, limits: Limits) -> Footprint {
        let mut sum = Footprint::new("host memory");
        for (decl, kind) in plan.weights.iter().zip(plan.kinds()) {
            sum.add(Part::Weights(kind, Residency::Mapped), decl.bytes());
        }
        for decl in &plan.caches {
            let (part, n_pages) = match decl.window {
                Some(_) => (Part::Windows, limits.n_window_pages),
                None => (Part::Cache, limits.n_pages),
            };
            sum.add(part, n_pages.saturating_mul(PAGE).saturating_mul(4 * decl.numbers()));
        }
        plan.states.iter().for_each(|s| sum.add(Part::States, s.n.saturating_mul(limits.n_states).saturating_mul(4)));
        for decl in &plan.bufs {
            let rows = decl.rows.count(limits.max_tokens, limits.max_outputs);
            sum.add(Part::Activations, rows.saturating_mul(decl.width).saturating_mul(4));
        }
        sum
    }

    fn compile(
        &self,
        plan: &ValidPlan,
        checkpoint: Arc<Checkpoint>,
        limits: Limits,
    ) -> Result<Box<dyn Program>, CompileError> {
        Rounded(CacheType::F32).compile(plan, checkpoint, limits)
    }
}

impl Backend for Rounded {
    fn name(&self) -> &'static str {
        Reference.name()
    }

    fn lower(&self, plan: ValidPlan) -> Result<ValidPlan, CompileError> {
        Reference.lower(plan)
    }

    /// As that of [`Reference`], since rounded numbers are kept in f32.
    fn footprint(&self, plan: &ValidPlan, limits: Limits) -> Footprint {
        Reference.footprint(plan, limits)
    }

    fn compile(
        &self,
        plan: &ValidPlan,
        checkpoint: Arc<Checkpoint>,
        limits: Limits,
    ) -> Result<Box<dyn Program>, CompileError> {
        Ok(Box::new(interpreter(self.0, None, plan, checkpoint, limits)?))
    }
}

impl Backend for Parted {
    fn name(&self) -> &'static str {
        Reference.name()
    }

    fn lower(&self, plan: ValidPlan) -> Result<ValidPlan, CompileError> {
        Reference.lower(plan)
    }

    /// As that of [`Reference`]: what the parts have twice is little.
    fn footprint(&self, plan: &ValidPlan, limits: Limits) -> Footprint {
        Reference.footprint(plan, limits)
    }

    fn compile(
        &self,
        plan: &ValidPlan,
        checkpoint: Arc<Checkpoint>,
        limits: Limits,
    ) -> Result<Box<dyn Program>, CompileError> {
        let parts = parts::on_host(self.name(), self.0, plan, &checkpoint, |plan, checkpoint, end| {
            Ok(Box::new(interpreter(CacheType::F32, Some(end), &plan, checkpoint, limits)?))
        })?;
        Ok(Box::new(parts))
    }
}

fn interpreter(
    cache: CacheType,
    link: Option<parts::End>,
    plan: &ValidPlan,
    checkpoint: Arc<Checkpoint>,
    limits: Limits,
) -> Result<Interpreter, CompileError> {
    Kinds::of(plan).check(limits)?;
    cache.check(Reference.name(), plan)?;
    checkpoint.hold_repacked()?;
    plan.weights.iter().try_for_each(|decl| weights::slabs(&checkpoint, decl).map(drop))?;
    let kv = plan.caches.iter().map(|decl| Kv::new(*decl, cache, limits)).collect::<Result<_, _>>()?;
    let rooms = plan.states.iter().map(|state| room(state.n, limits.n_states));
    let states = rooms.collect::<Result<Vec<_>, _>>()?;
    let values = plan.bufs.iter().map(|_| Values::default()).collect();
    Ok(Interpreter {
        plan: plan.clone(),
        checkpoint,
        limits,
        kv,
        uncommitted: Uncommitted::new(if states.is_empty() { 0 } else { limits.n_states }),
        tried: vec![vec![Vec::new(); limits.n_states]; states.len()],
        states,
        values,
        link,
        batch: Batch::default(),
        picks: Picks::default(),
        faults: Vec::new(),
        routing: RoutingTrace::new(plan).with_weights(),
    })
}

/// One recurrent state in all slots, `[n_states, n]`.
fn room(n: usize, n_states: usize) -> Result<Vec<f32>, CompileError> {
    let n = n.saturating_mul(n_states);
    let mut values = Vec::new();
    let error = CompileError::Memory { what: "recurrent states", bytes: n.saturating_mul(4) };
    values.try_reserve_exact(n).map_err(|_| error)?;
    values.resize(n, f32::NAN);
    Ok(values)
}

/// Contents of a buffer: numbers or ids.
#[derive(Clone, Default)]
struct Values {
    floats: Vec<f32>,
    ids: Vec<u32>,
}

struct Interpreter {
    plan: ValidPlan,
    checkpoint: Arc<Checkpoint>,
    limits: Limits,
    kv: Vec<Kv>,           // [caches]
    states: Vec<Vec<f32>>, // [states][n_states, n]
    /// Each state after each of the drafts of its slot's last step, `[states][n_states][n_draft, n]`.
    tried: Vec<Vec<Vec<f32>>>,
    uncommitted: Uncommitted,
    values: Vec<Values>, // [bufs]
    /// What adds up over the parts of a plan, where this is one.
    link: Option<parts::End>,
    /// The submitted step.
    batch: Batch,
    picks: Picks,
    faults: Vec<Fault>,
    routing: RoutingTrace,
}

impl Program for Interpreter {
    fn limits(&self) -> Limits {
        self.limits
    }

    fn kinds(&self) -> Kinds {
        Kinds::of(&self.plan)
    }

    fn n_vocab(&self) -> usize {
        self.plan.n_vocab
    }

    fn submit(&mut self, batch: &Batch) -> Result<(), StepError> {
        batch.check_with(self.limits, self.kinds(), self.plan.n_vocab, Takes::of(&self.plan))?;
        if !batch.is_draft() {
            self.uncommitted.check(batch)?;
        }
        self.batch.copy_from(batch);
        Ok(())
    }

    fn wait(&mut self) -> Result<Output<'_>, StepError> {
        let batch = std::mem::take(&mut self.batch);
        self.faults.clear();
        self.routing.start(&batch);
        self.poison(&batch);
        let draft = if batch.is_draft() { self.plan.draft.clone() } else { None };
        if let Some(draft) = &draft {
            self.floats_mut(draft.input).copy_from_slice(&batch.hidden);
        } else {
            for chunk in batch.chunks.iter().filter(|chunk| chunk.pos == 0) {
                (0..self.states.len()).for_each(|i| self.state(State(i as u32), chunk.state).fill(0.0));
            }
        }
        let n_ops = draft.as_ref().map_or(self.plan.ops.len(), |draft| draft.ops.len());
        for i in 0..n_ops {
            let (op, layer) = match &draft {
                Some(draft) => (draft.ops[i].clone(), draft.layers[i]),
                None => (self.plan.ops[i].clone(), self.plan.layers[i]),
            };
            self.run(&op, layer.unwrap_or(0), &batch);
            self.narrow(&op);
        }
        // What was computed with zeros in place of weights is nobody's answer.
        self.checkpoint.intact().map_err(|error| Failure::all(Cause::lost(error)))?;
        if draft.is_none() {
            self.uncommitted.computed(&batch);
        }
        let (logits, hidden, source) = match &draft {
            Some(draft) => (draft.logits, self.plan.draft_hidden(), None),
            None => (self.plan.logits, self.plan.hidden(), self.plan.draft.as_ref().map(|draft| draft.source)),
        };
        let logits = &self.values[logits.0 as usize].floats;
        self.picks.fill(&batch, logits, self.plan.n_vocab);
        self.batch = batch;
        let rows = |buf: Option<Buf>| buf.map_or(&[][..], |buf| &self.values[buf.0 as usize].floats);
        Ok(Output {
            logits,
            picks: &self.picks,
            hidden: rows(hidden),
            all_hidden: rows(source),
            faults: &self.faults,
            routing: self.routing.ids(),
        })
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

    fn draft_width(&self) -> Option<usize> {
        self.plan.draft.as_ref().map(|_| self.plan.d_model)
    }

    fn d_input(&self) -> Option<usize> {
        self.plan.d_input()
    }

    fn copy_state(&mut self, from: u32, to: u32) {
        self.uncommitted.copied(from, to);
        for (state, decl) in self.states.iter_mut().zip(&self.plan.states) {
            let from = from as usize * decl.n;
            state.copy_within(from..from + decl.n, to as usize * decl.n);
        }
    }

    fn stream_stats(&self) -> Option<StreamStats> {
        None
    }

    fn set_interrupt(&mut self, _: Arc<AtomicBool>) {}

    fn is_lost(&self) -> bool {
        false
    }

    fn saver(&mut self) -> Option<&mut dyn Save> {
        None
    }

    fn drafts(&mut self) -> Option<&mut dyn Drafts> {
        Some(self)
    }

    fn profiler(&mut self) -> Option<&mut dyn Profile> {
        None
    }

    fn input_sums(&mut self) -> Option<&mut dyn SumInputs> {
        None
    }
}

impl Drafts for Interpreter {
    fn commit(&mut self, slot: u32, n_accepted: usize) {
        if !self.uncommitted.commit(slot, n_accepted) || n_accepted == 0 {
            return;
        }
        for ((state, tried), decl) in self.states.iter_mut().zip(&self.tried).zip(&self.plan.states) {
            let accepted = &tried[slot as usize][(n_accepted - 1) * decl.n..][..decl.n];
            state[slot as usize * decl.n..][..decl.n].copy_from_slice(accepted);
        }
    }

    fn is_settled(&mut self) -> bool {
        true
    }
}

impl Interpreter {
    /// Sizes every buffer for this step and fills it with NaN: a read of an unwritten value shows in the logits.
    fn poison(&mut self, batch: &Batch) {
        for (decl, values) in self.plan.bufs.iter().zip(&mut self.values) {
            let n_rows = decl.rows.count(batch.tokens.len(), batch.rows.len());
            values.floats.clear();
            values.ids.clear();
            match decl.elem {
                Elem::F32 | Elem::F16 | Elem::BF16 => values.floats.resize(n_rows * decl.width, f32::NAN),
                Elem::U32 => values.ids.resize(n_rows * decl.width, u32::MAX),
            }
        }
    }

    /// Rounds what an op wrote to the element type of its buffer.
    fn narrow(&mut self, op: &Op) {
        for (buf, _) in op.bufs().into_iter().filter(|(_, access)| *access != Access::Read) {
            let round: fn(f32) -> f32 = match self.plan.buf(buf).elem {
                Elem::F32 | Elem::U32 => continue,
                Elem::F16 => |v| half::f16::from_f32(v).to_f32(),
                Elem::BF16 => |v| half::bf16::from_f32(v).to_f32(),
            };
            self.floats_mut(buf).iter_mut().for_each(|v| *v = round(*v));
        }
    }

    fn floats(&self, buf: Buf) -> &[f32] {
        &self.values[buf.0 as usize].floats
    }

    fn floats_mut(&mut self, buf: Buf) -> &mut Vec<f32> {
        &mut self.values[buf.0 as usize].floats
    }

    /// The numbers of a recurrent state in a slot, `[n]`.
    fn state(&mut self, state: State, slot: u32) -> &mut [f32] {
        let n = self.plan.state(state).n;
        &mut self.states[state.0 as usize][slot as usize * n..][..n]
    }

    /// Computes a chunk by `step`, which takes some of the step's tokens and moves a state past them. Drafts move a
    /// copy, which is kept after each of them.
    fn over_state(&mut self, state: State, c: &Chunk, step: impl Fn(Range<usize>, &mut [f32]) -> Vec<f32>) -> Vec<f32> {
        let (first, end) = (c.first as usize, (c.first + c.len) as usize);
        let drafts = end - c.n_draft as usize;
        let mut y = step(first..drafts, self.state(state, c.state));
        let mut moved = self.state(state, c.state).to_vec();
        let mut tried = Vec::new();
        for token in drafts..end {
            y.extend(step(token..token + 1, &mut moved));
            tried.extend_from_slice(&moved);
        }
        self.tried[state.0 as usize][c.state as usize] = tried;
        y
    }

    fn width(&self, buf: Buf) -> usize {
        self.plan.buf(buf).width
    }

    /// The matrices of a stack.
    fn stack(&self, w: Weight) -> Vec<Matrix<'_>> {
        let decl = self.plan.weight(w);
        let slabs = weights::matrices(&self.checkpoint, decl).expect("compile has looked every weight up");
        let n_cols = decl.shape[decl.shape.len() - 1];
        slabs.into_iter().map(|planes| Matrix { dtype: decl.dtype, planes, n_cols }).collect()
    }

    fn matrix(&self, w: Weight) -> Matrix<'_> {
        self.stack(w)[0]
    }

    fn vector(&self, w: Weight) -> Vec<f32> {
        let decl = self.plan.weight(w);
        let slabs = weights::slabs(&self.checkpoint, decl).expect("compile has looked every weight up");
        weights::decode(decl, &slabs)
    }

    fn norm(&mut self, x: Buf, norm: Norm) {
        *self.floats_mut(norm.out) = ops::rms_norm(self.floats(x), &self.vector(norm.w), norm.eps);
    }

    fn run(&mut self, op: &Op, layer: u32, batch: &Batch) {
        match *op {
            Op::Embed { table, scale, out } => {
                let table = self.matrix(table);
                let rows = batch.tokens.iter().flat_map(|&id| table.row(id as usize));
                *self.floats_mut(out) = rows.map(|v| v * scale).collect();
            }
            Op::EmbedPlace { table, axis, out } => {
                let table = self.matrix(table);
                let rows = batch.places().flat_map(|place| table.row(place[axis] as usize));
                *self.floats_mut(out) = rows.collect();
            }
            Op::Input { x, first, mode } => {
                let (d, d_input) = (self.width(x), self.plan.d_input().unwrap_or(0));
                for (&token, row) in batch.given.tokens.iter().zip(batch.given.rows.chunks_exact(d_input)) {
                    let (x, row) = (&mut self.floats_mut(x)[token as usize * d..][..d], &row[first..first + d]);
                    match mode {
                        InputMode::All | InputMode::Replace => x.copy_from_slice(row),
                        InputMode::Add => x.iter_mut().zip(row).for_each(|(x, given)| *x += given),
                    }
                }
            }
            Op::AddBias { x, w } => {
                let w = self.vector(w);
                ops::add_to_rows(self.floats_mut(x), &w);
            }
            Op::Clamp { x, low, high } => {
                let [low, high] = [low, high].map(|w| self.vector(w)[0]);
                self.floats_mut(x).iter_mut().for_each(|v| *v = v.max(low).min(high));
            }
            Op::Constant { ref values, out } => {
                self.floats_mut(out).chunks_exact_mut(values.len()).for_each(|row| row.copy_from_slice(values));
            }
            Op::Gelu { x, form } => self.floats_mut(x).iter_mut().for_each(|v| *v = ops::gelu(*v, form)),
            Op::Linear { x, ref parts } => {
                for &LinearPart { w, bias, out } in parts {
                    let mut y = ops::linear(self.matrix(w), self.floats(x));
                    if let Some(bias) = bias {
                        ops::add_to_rows(&mut y, &self.vector(bias));
                    }
                    *self.floats_mut(out) = y;
                }
            }
            Op::GatedLinear { x, gate, up, act, out } => {
                let gate = ops::linear(self.matrix(gate), self.floats(x));
                let up = ops::linear(self.matrix(up), self.floats(x));
                *self.floats_mut(out) = ops::gated_act(&gate, &up, act);
            }
            Op::RmsNorm { x, residual, w, eps, out } => {
                if let Some(residual) = residual {
                    self.add(x, residual);
                }
                self.norm(x, Norm { w, eps, out });
            }
            Op::Center { x, out } => *self.floats_mut(out) = ops::center(self.floats(x), self.width(x)),
            Op::HeadNorm { x, w, eps, d_head, .. } => {
                let w = w.map_or(vec![1.0; d_head], |w| self.vector(w));
                *self.floats_mut(x) = ops::rms_norm(self.floats(x), &w, eps);
            }
            Op::Rope { x, rope, d_head, .. } => {
                let rope = self.plan.ropes_for(self.limits.max_positions)[rope.0 as usize].clone();
                let width = self.width(x);
                for (row, place) in self.floats_mut(x).chunks_exact_mut(width).zip(batch.places()) {
                    row.chunks_exact_mut(d_head).for_each(|head| ops::rope(head, &rope, place));
                }
            }
            Op::SplitHeads { x, n_head, ref parts } => {
                let d_head = self.width(x) / n_head;
                let mut first = 0;
                for &(width, part) in parts {
                    let heads = self.floats(x).chunks_exact(d_head);
                    *self.floats_mut(part) = heads.flat_map(|head| &head[first..first + width]).copied().collect();
                    first += width;
                }
            }
            Op::JoinHeads { ref parts, n_head, out } => {
                let d_head = self.width(out) / n_head;
                let mut first = 0;
                for &(width, part) in parts {
                    let part = self.floats(part).to_vec();
                    let heads = self.floats_mut(out).chunks_exact_mut(d_head);
                    let parts = part.chunks_exact(width);
                    heads.zip(parts).for_each(|(head, part)| head[first..first + width].copy_from_slice(part));
                    first += width;
                }
            }
            Op::HeadLinear { x, w, transposed, out } => {
                *self.floats_mut(out) = ops::head_linear(self.floats(x), &self.stack(w), transposed, self.width(out));
            }
            Op::GatedAct { gate, up, act, out } => {
                *self.floats_mut(out) = ops::gated_act(self.floats(gate), self.floats(up), act);
            }
            Op::Add { x, y } => self.add(x, y),
            Op::KvAppend { cache, k, v } => {
                let (k, v) = (self.floats(k).to_vec(), v.map(|v| self.floats(v).to_vec()));
                self.kv[cache.0 as usize].append(batch, &k, v.as_deref());
            }
            Op::Choose { cache, q, weights, out } => {
                let (q, weights) = (self.floats(q), self.floats(weights));
                let chosen = self.kv[cache.0 as usize].choose(batch, q, weights, self.width(out));
                self.values[out.0 as usize].ids = chosen;
            }
            Op::Attention { cache, q, n_head, scale, window, chunked, softcap, chosen, sinks, out } => {
                let (sinks, spans) = (sinks.map(|w| self.vector(w)), self.plan.sees_spans(window));
                let chosen = chosen.map(|buf| (&self.values[buf.0 as usize].ids[..], self.width(buf)));
                let reach = self.plan.reach(window);
                let rule = kv::Scores { n_head, scale, window, chunked, softcap, chosen, spans, reach, sinks };
                *self.floats_mut(out) = self.kv[cache.0 as usize].attention(batch, self.floats(q), rule);
            }
            Op::Route { logits, router, n_used, ids, weights } => {
                let n_expert = self.width(logits);
                let (mut chosen, mut shares) = (Vec::new(), Vec::new());
                let [bias, expert_scale] = [router.bias, router.expert_scale].map(|w| w.map(|w| self.vector(w)));
                let of_outputs = self.plan.buf(logits).rows == Rows::Outputs;
                for (i, row) in self.floats(logits).to_vec().chunks_exact(n_expert).enumerate() {
                    let routed = ops::route(row, &router, bias.as_deref(), expert_scale.as_deref(), n_used);
                    if routed.is_none() {
                        let token = if of_outputs { batch.rows[i] as usize } else { i };
                        self.fault(batch, token, layer);
                    }
                    // A row that cannot be routed takes the first experts, so that ids stay valid; its sequence is
                    // lost.
                    let (mut ids, mut weights) =
                        routed.unwrap_or_else(|| ((0..n_used as u32).collect(), vec![f32::NAN; n_used]));
                    if let Some(local) = router.local {
                        local.apply(&mut ids, &mut weights);
                    }
                    chosen.extend(ids);
                    shares.extend(weights);
                }
                self.routing.record_weights(self.plan.buf(ids).rows, &shares, batch);
                self.routing.record(self.plan.buf(ids).rows, &chosen, batch);
                self.values[ids.0 as usize].ids = chosen;
                *self.floats_mut(weights) = shares;
            }
            Op::Experts { x, ids, gate, up, down, biases, act, out, .. } => {
                let weights = [gate, up, down].map(|w| self.stack(w));
                let biases = biases.map(|b| [b.gate, b.up, b.down].map(|w| self.vector(w)));
                let stack = ops::ExpertStack { weights, biases, d_out: self.width(out), act };
                let n_used = self.width(ids);
                let ids = &self.values[ids.0 as usize].ids;
                *self.floats_mut(out) = ops::experts(self.floats(x), ids, n_used, &stack);
            }
            Op::Combine { x, add, y, weights, norm } => {
                let (n_used, d) = (self.width(weights), self.width(x));
                if !add {
                    self.floats_mut(x).fill(0.0);
                }
                *self.floats_mut(x) = ops::combine(self.floats(x), self.floats(y), self.floats(weights), n_used, d);
                if let Some(norm) = norm {
                    self.norm(x, norm);
                }
            }
            Op::Select { x, out } => {
                let (d, n) = (self.width(x), self.width(out));
                let rows = batch.rows.iter().flat_map(|&row| &self.floats(x)[row as usize * d..][..n]);
                *self.floats_mut(out) = rows.copied().collect();
            }
            Op::Scale { x, scale } => self.floats_mut(x).iter_mut().for_each(|v| *v *= scale),
            Op::ScaleBy { x, w } => {
                let w = self.vector(w);
                self.floats_mut(x).iter_mut().zip(w.iter().cycle()).for_each(|(x, w)| *x *= w);
            }
            Op::CausalConv { x, w, bias, silu, state, out } => {
                let conv = delta::Conv { w: self.vector(w), bias: bias.map(|w| self.vector(w)), silu };
                let (x, d) = (self.floats(x).to_vec(), self.width(x));
                let mut y = Vec::with_capacity(x.len());
                for c in &batch.chunks {
                    y.extend(self.over_state(state, c, |at, state| {
                        delta::causal_conv(&x[at.start * d..at.end * d], &conv, d, state)
                    }));
                }
                *self.floats_mut(out) = y;
            }
            Op::DeltaNet { q, k, v, g, beta, skip, state, heads, out } => {
                let inputs = [q, k, v, g, beta].map(|buf| self.floats(buf).to_vec());
                let rows = delta::Rows::new(heads, inputs.each_ref().map(Vec::as_slice));
                let skip = skip.map(|w| self.vector(w));
                let mut y = Vec::with_capacity(inputs[2].len());
                for c in &batch.chunks {
                    y.extend(
                        self.over_state(state, c, |at, state| delta::delta_net(rows.range(at), skip.as_deref(), state)),
                    );
                }
                *self.floats_mut(out) = y;
            }
            Op::GateBy { x, gate, factor } => {
                let each = self.width(x) / self.width(gate);
                *self.floats_mut(x) = ops::gate_by(self.floats(x), self.floats(gate), factor, each);
            }
            Op::DecayBeta { a, b, a_log, dt_bias, bound, g_out, beta_out } => {
                let (a_log, dt_bias) = (self.vector(a_log), self.vector(dt_bias));
                let (a, b) = (self.floats(a), b.map(|b| self.floats(b)));
                let (g, beta) = delta::decay_beta(a, b, &a_log, &dt_bias, bound);
                *self.floats_mut(g_out) = g;
                *self.floats_mut(beta_out) = beta;
            }
            Op::GatedNorm { x, gate, w, gate_first, eps, d_head, .. } => {
                let (w, gate) = (self.vector(w), self.floats(gate));
                *self.floats_mut(x) = delta::gated_norm(self.floats(x), gate, &w, d_head, gate_first, eps);
            }
            Op::Softcap { x, cap } => self.floats_mut(x).iter_mut().for_each(|v| *v = ops::softcap(*v, cap)),
            Op::AllReduce { x } => {
                if let Some(link) = self.link.clone() {
                    link.all_reduce(self.floats_mut(x));
                }
            }
        }
    }

    fn add(&mut self, x: Buf, y: Buf) {
        let sum = self.floats(x).iter().zip(self.floats(y)).map(|(x, y)| x + y).collect();
        *self.floats_mut(x) = sum;
    }

    /// Reports a sequence once, at the first of its tokens that broke down and there at the first layer.
    fn fault(&mut self, batch: &Batch, token: usize, layer: u32) {
        let token = token as u32;
        let chunk = batch.chunks.partition_point(|c| c.first + c.len <= token) as u32;
        match self.faults.iter_mut().find(|fault| fault.chunk == chunk) {
            Some(fault) if token < fault.token => *fault = Fault { chunk, layer, token },
            Some(_) => {}
            None => self.faults.push(Fault { chunk, layer, token }),
        }
    }
}
