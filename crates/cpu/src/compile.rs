//! From a plan to a program: resolves buffers to places in an arena and weights to bytes of the checkpoint, and
//! allocates everything a step needs.

use std::sync::Arc;

use checkpoint::Checkpoint;
use model::plan::{Buf, Cache, CacheDecl, DraftHead, Elem, Norm, Op, Plan, State, ValidPlan, Weight, memory};

use super::Cpu;
use super::copies::Matrices;
use super::kernels::{ActsShared, Col, Kernels, Scratch};
use super::mem::{PerWorker, View};
use super::ops::attention::{AttentionScratch, AttentionStep, SplitStates, UNIT_ROWS};
use super::ops::causal_conv::CausalConvStep;
use super::ops::choose::{ChooseStep, n_ranks};
use super::ops::decay_beta::DecayBetaStep;
use super::ops::delta_net::{DeltaNetStep, kept_per_draft};
use super::ops::experts::{ExpertLists, ExpertMats, Extras};
use super::ops::experts_streamed::{LOOKAHEAD_ROWS, Lookahead, StreamedMats, Streaming, lookahead_values};
use super::ops::head_linear;
use super::ops::kv_append::CacheView;
use super::ops::linear::N_KINDS;
use super::ops::norm::GatedNormStep;
use super::ops::rope::RopeTable;
use super::ops::route::RouterStep;
use super::pool::Pool;
use super::program::{CpuProgram, DraftSteps, Mat, NormStep, OpStep, PartStep, StepTokens, Worker};
use super::states::States;
use super::times::Times;
use backend::experts::Streams;
use backend::experts::layout::{Layer, Layout};
use backend::experts::source::Source;
use backend::inputs::Inputs;
use backend::parts::End;
use backend::residency::Residencies;
use backend::routing::RoutingTrace;
use backend::{Batch, CacheType, CompileError, Kinds, Limits, Picks, Takes, weights};
use quant::act::ActKind;
use sys::arena::{Arena, zeroed};

/// Compiles `plan`; see [`backend::Backend::compile`]. Experts that are streamed come from `source`, or from the files of
/// the checkpoint. With a link it is a part of several.
pub fn compile(
    cpu: &Cpu,
    plan: &ValidPlan,
    weights: Arc<Checkpoint>,
    limits: Limits,
    source: Option<Arc<dyn Source>>,
    link: Option<End>,
) -> Result<CpuProgram, CompileError> {
    let unsupported = |what: String| CompileError::Unsupported { backend: "cpu", what };
    let isa = cpu.isa.check().map_err(|e| unsupported(format!("run on {}: {e}", cpu.isa)))?;
    if let Some(buf) = plan.bufs.iter().find(|buf| !matches!(buf.elem, Elem::F32 | Elem::U32)) {
        return Err(unsupported(format!("keep buffer {} in {:?}", buf.name, buf.elem)));
    }
    let kinds = Kinds::of(plan);
    kinds.check(limits)?;
    if limits.max_tokens == 0 || limits.max_tokens > u32::MAX as usize / 64 {
        return Err(unsupported(format!("run steps of {} tokens", limits.max_tokens)));
    }

    cpu.cache.check("cpu", plan)?;
    let needs = Needs::of(plan, limits, cpu.cache);
    let placement = memory::place(plan, limits.max_tokens, limits.max_outputs);
    let bufs = Arena::new("step buffers", placement.bytes)?;
    let spare = Arena::new("step buffers", needs.spare.saturating_mul(4))?;
    let (cache_arena, caches) = caches(plan, limits, cpu.cache)?;
    let states = States::new(&plan.states, &needs.kept, limits.n_states)?;

    let mut pool = Pool::new(cpu.threads.max(1))?;
    let residencies = Residencies::new(plan, cpu.residency);
    let matrices = Matrices::new(plan, &weights, &residencies, &mut pool)?;
    let layout = cpu.layout(plan);
    let lower = Lower {
        plan,
        weights: &weights,
        matrices: &matrices,
        bufs: &bufs,
        placement: &placement,
        spare: &spare,
        states: &states,
        layout: &layout,
        link,
    };
    let ops = plan
        .ops
        .iter()
        .enumerate()
        .map(|(i, op)| lower.op(op, plan.layers[i], Some(i)))
        .collect::<Result<Vec<_>, _>>()?;
    let draft = plan.draft.as_ref().map(|draft| lower.draft(draft)).transpose()?;
    let logits = lower.view(plan.logits);
    let hidden = plan.hidden().map(|hidden| lower.view(hidden));
    let inputs = Inputs::new(plan);
    let views = (0..plan.bufs.len()).map(|i| lower.view(Buf(i as u32))).collect();
    let streaming = streaming(plan, &weights, layout, &needs, source)?;
    let arenas = vec![bufs, spare, cache_arena, matrices.into_arena()];
    let n_hidden = if plan.draft.is_some() { limits.max_tokens.saturating_mul(plan.d_model) } else { 0 };
    let max_rows = limits.max_tokens.max(limits.max_outputs) as u32;
    Ok(CpuProgram {
        ops,
        caches,
        states,
        ropes: plan
            .ropes_for(limits.max_positions)
            .iter()
            .map(|decl| RopeTable::new(decl, limits.max_tokens))
            .collect::<Result<_, _>>()?,
        logits,
        hidden,
        draft,
        n_vocab: plan.n_vocab,
        takes: Takes::of(plan),
        limits,
        kinds,
        kernels: Kernels::new(isa),
        step: StepTokens::new(limits.max_tokens, needs.tile_tokens),
        acts: needs.acts()?,
        head_cols: zeroed("columns of heads", needs.head_cols)?,
        cols: (0..max_rows).map(|r| Col { act: r, out: r }).collect(),
        workers: PerWorker::new(pool.threads(), || {
            let attention = AttentionScratch::new(needs.unit_rows(), needs.d_k, needs.d_v)?;
            let rows = zeroed("rows of a head", needs.head_rows())?;
            let tried = zeroed("drafts of a delta net", needs.tried(limits))?;
            Ok::<_, CompileError>(Worker { kernel: Scratch::default(), attention, rows, tried })
        })?,
        lists: ExpertLists::new(needs.n_expert, needs.pairs),
        split: SplitStates::new(pool.threads(), needs.unit_rows(), needs.d_v)?,
        ranks: zeroed("ranks of positions", n_ranks(plan, limits, pool.threads()))?,
        routing: RoutingTrace::new(plan).with_weights(),
        streaming,
        faults: Vec::with_capacity(limits.max_tokens),
        batch: Batch { hidden: Vec::with_capacity(n_hidden), ..Batch::with_room(limits) },
        picks: Picks::default(),
        times: Times::new(plan),
        inputs,
        views,
        pool,
        _arenas: arenas,
        weights,
    })
}

/// Slabs and what goes with them, where a plan streams its experts.
pub fn streaming(
    plan: &Plan,
    weights: &Arc<Checkpoint>,
    layout: Layout,
    needs: &Needs,
    source: Option<Arc<dyn Source>>,
) -> Result<Option<Box<Streaming>>, CompileError> {
    let n_expert = layout.layers.iter().map(|layer| layer.n_expert).max().unwrap_or(0);
    let values = lookahead_values(&layout);
    let Some(streams) = Streams::new(plan, weights, layout, source)? else { return Ok(None) };
    let logits = LOOKAHEAD_ROWS * n_expert;
    Ok(Some(Box::new(Streaming {
        streams,
        hidden: ActsShared::new(1, acts_room(needs.hidden))?,
        logits: zeroed("logits of a router", logits)?,
        ids: vec![0; values - logits],
    })))
}

/// Type, rows and values in a row of stacks of matrices.
pub fn stack_shapes(plan: &Plan, stacks: [Weight; 3]) -> Result<[(quant::WeightType, usize, usize); 3], CompileError> {
    let shape = |w: Weight| {
        let decl = plan.weight(w);
        match *decl.shape {
            [_, n, k] => Ok((decl.dtype, n, k)),
            _ => {
                let why = format!("shape {:?} is no stack of matrices", decl.shape);
                Err(CompileError::Tensor { name: decl.name.clone(), why })
            }
        }
    };
    Ok([shape(stacks[0])?, shape(stacks[1])?, shape(stacks[2])?])
}

/// Sizes over all ops.
pub struct Needs {
    /// Values of quantised inputs by kind.
    acts: [usize; N_KINDS],
    pub n_expert: usize,
    pub pairs: usize,
    /// Values of the inputs of the experts' last product.
    hidden: usize,
    /// Values of the spare buffer.
    pub spare: usize,
    /// Columns of all heads of a `head_linear`.
    pub head_cols: usize,
    /// Longest row of a transposed one.
    head_row: usize,
    /// Numbers that each state keeps of a chunk's drafts, `[states]`.
    pub kept: Vec<usize>,
    /// Longest key of a delta net.
    d_key: usize,
    /// Most query heads of a kv head.
    group: usize,
    pub d_k: usize,
    pub d_v: usize,
    tile_tokens: usize,
}

impl Needs {
    pub fn of(plan: &Plan, limits: Limits, types: CacheType) -> Needs {
        let mut n = Needs {
            acts: [0; N_KINDS],
            n_expert: 0,
            pairs: 0,
            hidden: 0,
            spare: 0,
            head_cols: 0,
            head_row: 0,
            kept: vec![0; plan.states.len()],
            d_key: 0,
            group: 1,
            d_k: plan.caches.iter().map(|c| c.d_k).max().unwrap_or(0),
            d_v: plan.caches.iter().map(|c| c.d_v).max().unwrap_or(0),
            tile_tokens: 1,
        };
        let rows = |buf: Buf| plan.buf(buf).rows.count(limits.max_tokens, limits.max_outputs);
        for op in plan.all_ops() {
            match op {
                Op::Linear { x, parts } => parts.iter().for_each(|part| n.input(plan, *x, rows(*x), part.w)),
                Op::GatedLinear { x, gate, up, out, .. } => {
                    n.input(plan, *x, rows(*x), *gate);
                    n.input(plan, *x, rows(*x), *up);
                    if needs_spare(plan, *gate, *up) {
                        n.spare = n.spare.max(rows(*out).saturating_mul(plan.buf(*out).width));
                    }
                }
                Op::Experts { x, gate, up, down, hidden, .. } => {
                    n.input(plan, *x, rows(*x), *gate);
                    n.input(plan, *x, rows(*x), *up);
                    n.input(plan, *hidden, rows(*hidden), *down);
                    n.n_expert = n.n_expert.max(plan.weight(*gate).shape[0]);
                    n.pairs = n.pairs.max(rows(*hidden));
                    n.hidden = n.hidden.max(rows(*hidden).saturating_mul(plan.buf(*hidden).width));
                    if needs_spare(plan, *gate, *up) {
                        n.spare = n.spare.max(rows(*hidden).saturating_mul(plan.buf(*hidden).width));
                    }
                }
                Op::HeadLinear { w, transposed: true, .. } => {
                    n.head_row = n.head_row.max(plan.weight(*w).shape[2]);
                }
                Op::HeadLinear { x, w, transposed: false, .. } => {
                    n.input(plan, *x, rows(*x), *w);
                    n.head_cols = n.head_cols.max(rows(*x).saturating_mul(plan.weight(*w).shape[0]));
                }
                Op::CausalConv { x, state, .. } => n.keep(*state, plan.buf(*x).width, limits),
                Op::DeltaNet { g, state, heads, .. } => {
                    n.keep(*state, kept_per_draft(*heads, plan.buf(*g).width / heads.n_v_head), limits);
                    n.d_key = n.d_key.max(heads.d_k);
                }
                Op::Attention { cache, q, n_head, .. } => {
                    n.group = n.group.max(n_head / plan.cache(*cache).n_kv);
                    if types.k.block().is_some() {
                        n.quantized(plan, *q, rows(*q), ActKind::Block32);
                    }
                }
                Op::Embed { .. }
                | Op::EmbedPlace { .. }
                | Op::Input { .. }
                | Op::AddBias { .. }
                | Op::Gelu { .. }
                | Op::Clamp { .. }
                | Op::Constant { .. }
                | Op::RmsNorm { .. }
                | Op::Center { .. }
                | Op::HeadNorm { .. }
                | Op::Rope { .. }
                | Op::SplitHeads { .. }
                | Op::JoinHeads { .. }
                | Op::GatedAct { .. }
                | Op::Add { .. }
                | Op::KvAppend { .. }
                | Op::Choose { .. }
                | Op::Route { .. }
                | Op::Combine { .. }
                | Op::Select { .. }
                | Op::Scale { .. }
                | Op::ScaleBy { .. }
                | Op::GateBy { .. }
                | Op::DecayBeta { .. }
                | Op::GatedNorm { .. }
                | Op::Softcap { .. }
                | Op::AllReduce { .. } => {}
            }
        }
        n.tile_tokens = (UNIT_ROWS / n.group).max(1);
        n
    }

    /// Query rows of a unit of attention.
    pub fn unit_rows(&self) -> usize {
        self.tile_tokens * self.group.min(UNIT_ROWS)
    }

    /// Values of the decoded rows of a transposed head.
    pub fn head_rows(&self) -> usize {
        head_linear::ROWS.saturating_mul(head_linear::stride(self.head_row))
    }

    /// Bytes of the quantised inputs of all kinds.
    pub fn acts_bytes(&self) -> usize {
        self.acts.iter().map(|&n| ActsShared::bytes(1, acts_room(n))).fold(0, usize::saturating_add)
    }

    /// Bytes of the inputs of the experts' last product, where they have memory of their own.
    pub fn hidden_acts_bytes(&self) -> usize {
        ActsShared::bytes(1, acts_room(self.hidden))
    }

    pub fn acts(&self) -> Result<[ActsShared; N_KINDS], CompileError> {
        let acts = |n: usize| ActsShared::new(1, acts_room(n));
        Ok([acts(self.acts[0])?, acts(self.acts[1])?, acts(self.acts[2])?, acts(self.acts[3])?])
    }

    /// Numbers of the columns that drafts of a delta net advance, for each worker.
    pub fn tried(&self, limits: Limits) -> usize {
        if limits.max_draft > 0 { self.d_key.saturating_mul(16) } else { 0 }
    }

    fn keep(&mut self, state: State, per_draft: usize, limits: Limits) {
        self.kept[state.0 as usize] = per_draft.saturating_mul(limits.max_draft);
    }

    fn input(&mut self, plan: &Plan, x: Buf, rows: usize, w: Weight) {
        self.quantized(plan, x, rows, plan.weight(w).dtype.act());
    }

    fn quantized(&mut self, plan: &Plan, x: Buf, rows: usize, kind: ActKind) {
        let values = &mut self.acts[super::ops::linear::kind_index(kind)];
        *values = (*values).max(rows.saturating_mul(plan.buf(x).width));
    }
}

/// Room for so many values of inputs, whose rows are padded to blocks.
fn acts_room(n: usize) -> usize {
    n.checked_next_multiple_of(256).unwrap_or(usize::MAX / 16).saturating_add(1024)
}

/// Gate and up that want different kinds of activations cannot share a kernel.
fn needs_spare(plan: &Plan, gate: Weight, up: Weight) -> bool {
    plan.weight(gate).dtype.act() != plan.weight(up).dtype.act()
}

/// Bytes of the pages of a layer, or none when the number does not exist.
pub fn cache_bytes(decl: &CacheDecl, limits: Limits, types: CacheType) -> Option<usize> {
    let n_pages = if decl.window.is_some() { limits.n_window_pages } else { limits.n_pages };
    CacheView::page_bytes(decl, types)?.checked_mul(n_pages)?.checked_next_multiple_of(64)
}

/// The pages of all layers: `[layers][n_pages][n_kv]` tiles.
fn caches(plan: &Plan, limits: Limits, types: CacheType) -> Result<(Arena, Vec<CacheView>), CompileError> {
    let what = "the key-value cache";
    let layers: Option<Vec<usize>> = plan.caches.iter().map(|decl| cache_bytes(decl, limits, types)).collect();
    let total = layers.as_ref().and_then(|layers| layers.iter().try_fold(0usize, |sum, &n| sum.checked_add(n)));
    let (Some(layers), Some(total)) = (layers, total) else {
        return Err(CompileError::Memory { what, bytes: usize::MAX });
    };
    let arena = Arena::new(what, total)?;
    let mut at = 0;
    let views = plan.caches.iter().zip(layers).map(|(decl, bytes)| {
        at += bytes;
        // SAFETY: the arena is zeroed, holds all layers one after the other, and lives as long as the program.
        unsafe { CacheView::new(arena.ptr().add(at - bytes), decl, types) }
    });
    let views = views.collect();
    Ok((arena, views))
}

/// Resolves the parts of ops.
struct Lower<'a> {
    plan: &'a Plan,
    weights: &'a Checkpoint,
    matrices: &'a Matrices<'a>,
    bufs: &'a Arena,
    placement: &'a memory::Placement,
    spare: &'a Arena,
    states: &'a States,
    layout: &'a Layout,
    /// Where the program is a part of several.
    link: Option<End>,
}

impl Lower<'_> {
    fn view(&self, buf: Buf) -> View {
        let decl = self.plan.buf(buf);
        // SAFETY: the planner gave the buffer its place and length for the limits; the program keeps the arena.
        unsafe { View::new(self.bufs.ptr().add(self.placement.offset[buf.0 as usize]).cast(), decl.rows, decl.width) }
    }

    /// Parts of heads: width and buffer.
    fn parts(&self, parts: &[(usize, Buf)]) -> Vec<(usize, View)> {
        parts.iter().map(|&(width, part)| (width, self.view(part))).collect()
    }

    /// The spare buffer in the shape of `like`, when gate and up need it.
    fn spare(&self, gate: Weight, up: Weight, like: Buf) -> Option<View> {
        let decl = self.plan.buf(like);
        // SAFETY: `Needs` made the arena long enough for every buffer that asks; the program keeps it.
        needs_spare(self.plan, gate, up).then(|| unsafe { View::new(self.spare.ptr().cast(), decl.rows, decl.width) })
    }

    fn mat(&self, w: Weight) -> Result<Mat, CompileError> {
        let decl = self.plan.weight(w);
        let error = |why: String| CompileError::Tensor { name: decl.name.clone(), why };
        let (n, k) = match *decl.shape {
            [n, k] | [_, n, k] => (n, k),
            _ => return Err(error(format!("shape {:?} is no matrix and no stack of matrices", decl.shape))),
        };
        let slabs = self.matrices.planes(w)?;
        // SAFETY: these are slabs of `n` rows of whole blocks each; the program keeps the checkpoint and the copies.
        Ok(unsafe { Mat::new(decl.dtype, n, k, &slabs) })
    }

    /// A small vector as f32, whatever its type.
    fn vector(&self, w: Weight) -> Result<Vec<f32>, CompileError> {
        weights::vector(self.weights, self.plan.weight(w))
    }

    /// Experts that are streamed, the number of their layer among such.
    fn streamed(&self, layer: usize, stacks: [Weight; 3], extras: Extras) -> Result<StreamedMats, CompileError> {
        let shapes = stack_shapes(self.plan, stacks)?;
        let next = self.layout.layers.get(layer + 1).map(|next| self.lookahead(next, shapes[0].2)).transpose()?;
        Ok(StreamedMats { layer, shapes, n_expert: self.layout.layers[layer].n_expert, extras, next: next.flatten() })
    }

    /// The router of a layer whose experts are streamed, where it takes rows of `k` values.
    fn lookahead(&self, layer: &Layer, k: usize) -> Result<Option<Lookahead>, CompileError> {
        let Op::Experts { ids: experts, .. } = self.plan.ops[layer.op] else { return Ok(None) };
        let route = self.plan.ops[..layer.op].iter().rev().find_map(|op| match *op {
            Op::Route { logits, router, n_used, ids, .. } if ids == experts => Some((logits, router, n_used)),
            _ => None,
        });
        let Some((logits, router, n_used)) = route else { return Ok(None) };
        let part = self.plan.ops[..layer.op].iter().rev().find_map(|op| match op {
            Op::Linear { parts, .. } => parts.iter().find(|part| part.out == logits),
            _ => None,
        });
        let Some(part) = part.filter(|part| *self.plan.weight(part.w).shape == [layer.n_expert, k]) else {
            return Ok(None);
        };
        let bias = router.bias.map(|w| self.vector(w)).transpose()?;
        Ok(Some(Lookahead { router: self.mat(part.w)?, bias, n_used }))
    }

    fn norm(&self, norm: &Norm) -> Result<NormStep, CompileError> {
        Ok(NormStep { w: self.vector(norm.w)?, eps: norm.eps, out: self.view(norm.out) })
    }

    fn cache(&self, cache: Cache) -> usize {
        cache.0 as usize
    }

    fn draft(&self, draft: &DraftHead) -> Result<DraftSteps, CompileError> {
        Ok(DraftSteps {
            ops: draft
                .ops
                .iter()
                .zip(&draft.layers)
                .map(|(op, &layer)| self.op(op, layer, None))
                .collect::<Result<_, _>>()?,
            input: self.view(draft.input),
            source: self.view(draft.source),
            logits: self.view(draft.logits),
            hidden: self.plan.draft_hidden().map(|hidden| self.view(hidden)),
            d_model: self.plan.d_model,
        })
    }

    /// `i` is the op's index among those of the model, whose experts may be streamed.
    fn op(&self, op: &Op, layer: Option<u32>, i: Option<usize>) -> Result<OpStep, CompileError> {
        let view = |buf| self.view(buf);
        Ok(match *op {
            Op::Embed { table, scale, out } => OpStep::Embed { table: self.mat(table)?, scale, out: view(out) },
            Op::EmbedPlace { table, axis, out } => OpStep::EmbedPlace { table: self.mat(table)?, axis, out: view(out) },
            Op::Input { x, first, mode } => OpStep::Input { x: view(x), first, mode },
            Op::AddBias { x, w } => OpStep::AddBias { x: view(x), w: self.vector(w)? },
            Op::Clamp { x, low, high } => {
                OpStep::Clamp { x: view(x), low: self.vector(low)?[0], high: self.vector(high)?[0] }
            }
            Op::Constant { ref values, out } => OpStep::Constant { values: values.clone(), out: view(out) },
            Op::Gelu { x, form } => OpStep::Gelu { x: view(x), form },
            Op::Linear { x, ref parts } => {
                let part = |part: &model::plan::LinearPart| {
                    let bias = part.bias.map(|bias| self.vector(bias)).transpose()?;
                    Ok(PartStep { w: self.mat(part.w)?, bias, out: view(part.out) })
                };
                OpStep::Linear { x: view(x), parts: parts.iter().map(part).collect::<Result<_, CompileError>>()? }
            }
            Op::GatedLinear { x, gate, up, act, out } => OpStep::GatedLinear {
                x: view(x),
                gate: self.mat(gate)?,
                up: self.mat(up)?,
                act,
                out: view(out),
                spare: self.spare(gate, up, out),
            },
            Op::Center { x, out } => OpStep::Center { x: view(x), out: view(out) },
            Op::RmsNorm { x, residual, w, eps, out } => {
                OpStep::RmsNorm { x: view(x), residual: residual.map(view), w: self.vector(w)?, eps, out: view(out) }
            }
            Op::HeadNorm { x, w, eps, d_head, .. } => {
                OpStep::HeadNorm { x: view(x), w: w.map(|w| self.vector(w)).transpose()?, eps, d_head }
            }
            Op::Rope { x, rope, d_head, .. } => OpStep::Rope { x: view(x), rope: rope.0 as usize, d_head },
            Op::SplitHeads { x, ref parts, .. } => OpStep::SplitHeads { x: view(x), parts: self.parts(parts) },
            Op::JoinHeads { ref parts, out, .. } => OpStep::JoinHeads { parts: self.parts(parts), out: view(out) },
            Op::HeadLinear { x, w, transposed, out } => {
                OpStep::HeadLinear { x: view(x), w: self.mat(w)?, transposed, out: view(out) }
            }
            Op::GatedAct { gate, up, act, out } => {
                OpStep::GatedAct { gate: view(gate), up: view(up), act, out: view(out) }
            }
            Op::Add { x, y } => OpStep::Add { x: view(x), y: view(y) },
            Op::KvAppend { cache, k, v } => OpStep::KvAppend { cache: self.cache(cache), k: view(k), v: v.map(view) },
            Op::Choose { cache, q, weights, out } => {
                let cache = self.cache(cache);
                OpStep::Choose(ChooseStep { cache, q: view(q), weights: view(weights), out: view(out) })
            }
            Op::Attention { cache, q, n_head, scale, window, chunked, softcap, chosen, sinks, out } => {
                OpStep::Attention(AttentionStep {
                    cache: self.cache(cache),
                    q: view(q),
                    out: view(out),
                    n_head,
                    scale,
                    window,
                    chunked,
                    spans: self.plan.sees_spans(window),
                    reach: self.plan.reach(window),
                    softcap,
                    chosen: chosen.map(view),
                    sinks: sinks.map(|w| self.vector(w)).transpose()?,
                })
            }
            Op::Route { logits, router, ids, weights, .. } => OpStep::Route {
                logits: view(logits),
                router: RouterStep::new(
                    router,
                    router.bias.map(|w| self.vector(w)).transpose()?,
                    router.expert_scale.map(|w| self.vector(w)).transpose()?,
                ),
                ids: view(ids),
                weights: view(weights),
                layer: layer.unwrap_or(0),
            },
            Op::Experts { x, ids, gate, up, down, biases, act, hidden, out } => {
                let biases = match biases {
                    Some(b) => Some([self.vector(b.gate)?, self.vector(b.up)?, self.vector(b.down)?]),
                    None => None,
                };
                let (extras, spare) = (Extras { biases, act }, self.spare(gate, up, hidden));
                let (x, ids, hidden, out) = (view(x), view(ids), view(hidden), view(out));
                match self.layout.layers.iter().position(|layer| Some(layer.op) == i) {
                    Some(layer) => {
                        let mats = self.streamed(layer, [gate, up, down], extras)?;
                        OpStep::StreamedExperts { x, ids, mats, hidden, out, spare }
                    }
                    None => {
                        let (gate, up, down) = (self.mat(gate)?, self.mat(up)?, self.mat(down)?);
                        OpStep::Experts { x, ids, mats: ExpertMats { gate, up, down, extras }, hidden, out, spare }
                    }
                }
            }
            Op::Combine { x, add, y, weights, ref norm } => OpStep::Combine {
                x: view(x),
                add,
                y: view(y),
                weights: view(weights),
                norm: norm.as_ref().map(|norm| self.norm(norm)).transpose()?,
            },
            Op::Select { x, out } => OpStep::Select { x: view(x), out: view(out) },
            Op::Scale { x, scale } => OpStep::Scale { x: view(x), scale },
            Op::ScaleBy { x, w } => match *self.vector(w)? {
                [scale] => OpStep::Scale { x: view(x), scale },
                ref scales => OpStep::ScaleEach { x: view(x), w: scales.to_vec() },
            },
            Op::CausalConv { x, w, bias, silu, state, out } => OpStep::CausalConv(CausalConvStep {
                x: view(x),
                w: CausalConvStep::by_tap(&self.vector(w)?, self.plan.buf(x).width),
                bias: bias.map(|w| self.vector(w)).transpose()?,
                silu,
                state: self.states.views[state.0 as usize],
                out: view(out),
            }),
            Op::DeltaNet { q, k, v, g, beta, skip, state, heads, out } => OpStep::DeltaNet(DeltaNetStep {
                q: view(q),
                k: view(k),
                v: view(v),
                g: view(g),
                beta: view(beta),
                skip: skip.map(|w| self.vector(w)).transpose()?,
                state: self.states.views[state.0 as usize],
                heads,
                out: view(out),
            }),
            Op::GateBy { x, gate, factor } => OpStep::GateBy { x: view(x), gate: view(gate), factor },
            Op::DecayBeta { a, b, a_log, dt_bias, bound, g_out, beta_out } => OpStep::DecayBeta(DecayBetaStep {
                a: view(a),
                b: b.map(view),
                a_log: {
                    let each = (self.plan.buf(a).width / self.plan.weight(a_log).n_values()).max(1);
                    self.vector(a_log)?.into_iter().flat_map(|rate| std::iter::repeat_n(rate, each)).collect()
                },
                dt_bias: self.vector(dt_bias)?,
                bound,
                g_out: view(g_out),
                beta_out: view(beta_out),
            }),
            Op::GatedNorm { x, gate, w, gate_first, eps, d_head, .. } => OpStep::GatedNorm {
                x: view(x),
                gate: view(gate),
                norm: GatedNormStep { w: self.vector(w)?, d_head, gate_first, eps },
            },
            Op::Softcap { x, cap } => OpStep::Softcap { x: view(x), cap },
            Op::AllReduce { x } => {
                let lost =
                    || CompileError::Unsupported { backend: "cpu", what: "compute a part without others".into() };
                OpStep::AllReduce { x: view(x), link: self.link.clone().ok_or_else(lost)? }
            }
        })
    }
}
