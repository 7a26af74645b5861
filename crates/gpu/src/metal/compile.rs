//! From a plan to a program: lays out its memory, copies weights, builds kernels and fixes the barriers.

use std::sync::Arc;

use checkpoint::Checkpoint;
use model::plan::{Buf, CacheDecl, Elem, Op, Plan, StateDecl, ValidPlan, memory};

use super::fuse;
use super::lower::{CacheView, Lower, Places, Ranks, StateView, unsupported};
use super::variants;
use super::{Metal, Tuning};
use crate::commands::layout::Layout;
use crate::commands::node::{Counts, Node, Schedule, THREADS};
use crate::commands::program::{CommandProgram, Half, Head, Parts, Plain};
use crate::commands::tables::{self, Kept, Tables};
use crate::commands::weights::{self, Weights};
use crate::commands::{Gpu, GpuError, Span};
use backend::inputs::Inputs;
use backend::residency::Residency;
use backend::rope::Angles;
use backend::routing::RoutingTrace;
use backend::{CacheType, CompileError, Footprint, Kinds, KvType, Limits, PAGE, Part, Takes};

/// Ranks of positions that there is room for, unless a step is to have more slices than these.
const MOST_RANKS: usize = 1 << 20;
const MAX_SLICES: usize = 8;

/// The oldest family whose GPUs have what the kernels use.
const LEAST_FAMILY: u32 = 7;

/// Compiles `plan`; see [`backend::Backend::compile`].
pub fn compile(
    metal: &Metal,
    plan: &ValidPlan,
    checkpoint: &Arc<Checkpoint>,
    limits: Limits,
) -> Result<CommandProgram, CompileError> {
    let start = |e: GpuError| CompileError::Start { what: "the GPU".into(), why: e.to_string() };
    let gpu = (metal.open)().map_err(start)?;
    Ok(CommandProgram::new(lay(metal, gpu, plan, checkpoint, limits)?.0))
}

/// All of a program on this GPU, and the kernels of its pipes.
pub fn lay(
    metal: &Metal,
    mut gpu: Box<dyn Gpu>,
    plan: &Plan,
    checkpoint: &Arc<Checkpoint>,
    limits: Limits,
) -> Result<(Parts, Vec<&'static str>), CompileError> {
    let kinds = Kinds::of(plan);
    kinds.check(limits)?;
    if let Some(buf) = plan.bufs.iter().find(|buf| !matches!(buf.elem, Elem::F32 | Elem::U32)) {
        return Err(unsupported(format!("keep {} in {:?}", buf.name, buf.elem)));
    }
    if let Some(what) = cache_misfit(metal.cache, plan) {
        return Err(unsupported(what));
    }
    let limits = Limits { max_outputs: limits.max_outputs.min(limits.max_tokens), ..limits };
    let (family, max_buffer) = (gpu.caps().family, gpu.caps().max_buffer);
    check_family(family).map_err(unsupported)?;

    let memory = Memory::new(metal, plan, limits, max_buffer);
    let views = match metal.maps_weights {
        true => weights::map(&mut *gpu, plan, checkpoint, max_buffer, failed)?,
        false => vec![None; plan.weights.len()],
    };
    let weights = Weights::new(plan, &views, max_buffer).upload(&mut *gpu, plan, checkpoint, &views, failed)?;
    let arena = memory.arena.allocate(&mut *gpu, "step buffers").map_err(failed)?;
    let own = memory.own.allocate(&mut *gpu, "routes and scratch").map_err(failed)?;
    let caches = caches(plan, &memory.caches.allocate(&mut *gpu, "cache").map_err(failed)?);
    let states = memory.states.allocate(&mut *gpu, "recurrent states").map_err(failed)?;
    let states = plan.states.iter().zip(states).zip(kept(plan));
    let view = |((decl, span), kept): ((&StateDecl, Span), usize)| StateView { span, n: decl.n, kept };
    let states: Vec<StateView> = states.map(view).collect();
    let tables = memory.tables.allocate(&mut *gpu, "inputs of a step").map_err(failed)?;
    let bufs: Vec<Span> = (0..plan.bufs.len())
        .map(|i| match memory.routed.iter().position(|&buf| buf.0 as usize == i) {
            Some(router) => own[router],
            None => arena[0].part(memory.placement.offset[i] as u64, memory.placement.len[i] as u64),
        })
        .collect();
    let n_routers = memory.routed.len();
    let faults = &own[n_routers..2 * n_routers];
    let pair = |pieces: Option<[usize; 2]>| pieces.map(|pieces| pieces.map(|piece| own[piece]));
    let filled: Vec<(usize, Span)> = memory.constants.iter().map(|&(op, piece)| (op, own[piece])).collect();
    for ((_, values), &(_, span)) in constants(plan).zip(&filled) {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        gpu.write(span, &bytes).map_err(failed)?;
    }
    let places = Places {
        bufs: &bufs,
        weights: &weights,
        caches: &caches,
        cache: metal.cache,
        states: &states,
        max_draft: limits.max_draft,
        apart: pair(memory.apart),
        groups: pair(memory.groups),
        parts: memory.parts.map(|(piece, part, n)| (own[piece], part, n)),
        ranks: memory.ranks.map(|(piece, stride, tokens)| Ranks {
            span: own[piece],
            stride,
            tokens,
            slices: limits.max_tokens.div_ceil(tokens),
        }),
        faults,
        constants: &filled,
        tuning: metal.tuning,
    };
    let n = limits.max_tokens;
    let positions = limits.max_positions;
    let outputs = limits.max_outputs;
    let most = Counts { tokens: n, outputs, chunks: n, longest: n, positions, given: n, ..Counts::default() };
    let head_plan = plan.draft_plan();
    let mut build = |tuning: Tuning| {
        let mut lower = Lower::new(plan, Places { tuning, ..places });
        lower.ops()?;
        let (n_own, ends) = (lower.nodes.len(), std::mem::take(&mut lower.ends));
        if let Some(head) = &head_plan {
            lower.start_head(head);
            lower.ops()?;
        }
        let copies: Vec<_> = states.iter().map(|&state| lower.copy(state)).collect();
        let (units, mut nodes) = (lower.units, lower.nodes);
        if let Some(node) = nodes.iter().find(|node| node.largest(most) > u64::from(u32::MAX)) {
            return Err(unsupported(format!("run {} on {} tokens at once", node.op, limits.max_tokens)));
        }
        let pipes = gpu.build(&units).map_err(failed)?;
        let threads = |node: &Node| {
            let forms = node.forms.iter().map(|form| (form.unit, form.threads));
            forms.chain([(node.unit, node.threads)]).all(|(unit, threads)| gpu.threads(pipes[unit]) >= threads)
        };
        let is_fit = nodes.iter().all(threads);
        let of_head = nodes.split_off(n_own);
        Ok((units, [nodes, of_head], pipes, (copies, ends), is_fit))
    };
    // A GPU that gives a kernel fewer threads than its tile wants takes the plain ones.
    let mut built = build(metal.tuning)?;
    if !built.4 && !metal.tuning.is_plain {
        built = build(Tuning { is_plain: true, ..metal.tuning })?;
    }
    let (units, [nodes, of_head], pipes, (copies, ends), _) = built;
    if let Some((pipe, unit)) = pipes.iter().zip(&units).find(|(pipe, _)| gpu.threads(**pipe) < THREADS) {
        let found = gpu.threads(*pipe);
        return Err(unsupported(format!("run {} in threadgroups of {found} threads, {THREADS} are wanted", unit.name)));
    }
    let layers = head_plan.iter().flat_map(|head| head.ops.iter().zip(&head.layers));
    let layers = plan.ops.iter().zip(&plan.layers).chain(layers).filter(|(op, _)| matches!(op, Op::Route { .. }));
    let n_own = plan.ops.iter().filter_map(ids).count();
    let span = |buf: Buf| (bufs[buf.0 as usize], plan.buf(buf).width);
    let kernels = units.iter().map(|unit| unit.kernel).collect();
    // Runs of several ops keep some of their inputs to themselves.
    let plain = (ends.len() == plan.ops.len()).then(|| Plain { ends, bufs: bufs.clone(), inputs: Inputs::new(plan) });
    let half = |nodes, logits, hidden: Option<Buf>, routers| {
        let (schedule, logits, hidden) = (Schedule::new(nodes), span(logits).0, hidden.map(span));
        Half { schedule, logits, hidden, routers }
    };
    let head = plan.draft.as_ref().map(|draft| Head {
        half: half(of_head, draft.logits, plan.draft_hidden(), n_own..n_routers),
        source: span(draft.source).0,
        input: span(draft.input).0,
        width: plan.d_model,
    });
    let parts = Parts {
        gpu,
        plain,
        model: half(nodes, plan.logits, plan.hidden(), 0..n_own),
        head,
        copies,
        pipes,
        tables: Tables::new(tables, angles(plan, limits), Kept::of(plan)),
        takes: Takes::of(plan),
        faults: faults.to_vec(),
        routes: memory.routed.iter().map(|&buf| span(buf).0).collect(),
        router_rows: memory.routed.iter().map(|&buf| plan.buf(buf).rows).collect(),
        router_layers: layers.map(|(_, layer)| layer.unwrap_or(0)).collect(),
        routing: RoutingTrace::new(plan),
        n_vocab: plan.n_vocab,
        n_layers: plan.layers.iter().flatten().max().map_or(1, |layer| *layer as usize + 1),
        limits,
        kinds,
    };
    Ok((parts, kernels))
}

/// Refuses a GPU that is too old, or no Apple GPU.
pub fn check_family(family: u32) -> Result<(), String> {
    match family < LEAST_FAMILY {
        true => Err(format!("use a GPU of Apple's family {family}; M1 and later are of family 7 and up")),
        false => Ok(()),
    }
}

fn failed(e: GpuError) -> CompileError {
    match e {
        GpuError::Memory { what, bytes } => {
            CompileError::Memory { what, bytes: usize::try_from(bytes).unwrap_or(usize::MAX) }
        }
        e => unsupported(format!("compile a plan: {e}")),
    }
}

/// What a program takes of the GPU's memory; see [`backend::Backend::footprint`].
pub fn footprint(metal: &Metal, plan: &Plan, limits: Limits) -> Footprint {
    let limits = Limits { max_outputs: limits.max_outputs.min(limits.max_tokens), ..limits };
    // Where the buffers end does not matter but for the gaps.
    let memory = Memory::new(metal, plan, limits, u64::MAX);
    let mut sum = Footprint::new("GPU memory");
    let kinds = plan.kinds();
    let weights = Weights::new(plan, &[], u64::MAX);
    for (i, (kind, bytes)) in kinds.into_iter().zip(weights.bytes_of()).enumerate() {
        // Whether a matrix lies aligned is known once its file is.
        let is_mapped = metal.maps_weights && weights.is_matrix(i);
        sum.add(Part::Weights(kind, if is_mapped { Residency::Mapped } else { Residency::Copied }), bytes);
    }
    for decl in &plan.caches {
        let part = if decl.window.is_some() { Part::Windows } else { Part::Cache };
        planes(decl, limits, metal.cache).into_iter().for_each(|bytes| sum.add(part, bytes));
    }
    sum.add(Part::States, memory.states.bytes());
    sum.add(Part::Activations, memory.arena.bytes());
    sum.add(Part::Scratch, memory.own.bytes().saturating_add(memory.tables.bytes()));
    sum
}

/// The memory of a program, laid out.
struct Memory {
    placement: memory::Placement,
    /// One piece.
    arena: Layout,
    /// Ids that routers write, by router; a word for each row of each router; scratch.
    own: Layout,
    /// Pieces of `own` for gate and up of different types.
    apart: Option<[usize; 2]>,
    /// Pieces of `own` for pairs in the order of their experts, and for tiles of them.
    groups: Option<[usize; 2]>,
    /// The piece of `own` for parts of attention, positions of a part, and the number of parts.
    parts: Option<(usize, usize, usize)>,
    /// The piece of `own` for ranks of positions, ranks of a token, and tokens of a slice.
    ranks: Option<(usize, usize, usize)>,
    /// Pieces of `own` for the values of each op that fills rows with them, by the op's index.
    constants: Vec<(usize, usize)>,
    /// Buffers of ids.
    routed: Vec<Buf>,
    caches: Layout,
    /// A piece a state, for all slots.
    states: Layout,
    tables: Layout,
}

impl Memory {
    fn new(metal: &Metal, plan: &Plan, limits: Limits, max_buffer: u64) -> Memory {
        let Limits { max_tokens, max_outputs, .. } = limits;
        let lives = fuse::lifetimes(plan, metal.tuning.off);
        let placement = memory::place_lives(plan, &lives, max_tokens, max_outputs);
        let bytes = |buf: Buf| {
            let decl = plan.buf(buf);
            decl.rows.count(max_tokens, max_outputs).saturating_mul(decl.width).saturating_mul(4)
        };
        let one = |len: usize| {
            let mut layout = Layout::default();
            layout.add(len, max_buffer);
            layout
        };
        // Ids outlive their layer: reports of routing read them after the step.
        let routed: Vec<Buf> = plan.all_ops().filter_map(ids).collect();
        let mut own = Layout::default();
        for &buf in &routed {
            own.add(bytes(buf), max_buffer);
        }
        for &buf in &routed {
            let rows = plan.buf(buf).rows.count(max_tokens, max_outputs);
            own.add(rows.saturating_mul(4), max_buffer);
        }
        let apart = plan.all_ops().filter_map(|op| apart(plan, op)).map(bytes).max();
        let apart = apart.map(|bytes| [own.add(bytes, max_buffer), own.add(bytes, max_buffer)]);
        let experts = plan.all_ops().filter_map(|op| match *op {
            Op::Experts { ids, gate, .. } => Some((bytes(ids), plan.weight(gate).shape[0])),
            _ => None,
        });
        // Slots of tiles: one for each 32 pairs, and one for each expert.
        let groups = experts.map(|(pairs, kinds)| [pairs, (pairs / 128).saturating_add(kinds).saturating_mul(12)]);
        let groups = groups.reduce(|a, b| [a[0].max(b[0]), a[1].max(b[1])]);
        let groups = groups.filter(|_| !metal.tuning.is_plain).map(|bytes| bytes.map(|len| own.add(len, max_buffer)));
        // Few rows alone are split: of each head the sums of a part, its largest score and its sum of shares.
        let (part, n_parts) = variants::attention_parts(metal.tuning, limits.max_positions);
        let widths = plan.all_ops().filter_map(|op| match *op {
            Op::Attention { cache, n_head, window: None, chosen: None, .. } if !plan.sees_spans(None) => {
                Some(n_head.saturating_mul(plan.caches[cache.0 as usize].d_v + 2))
            }
            _ => None,
        });
        let n_rows = max_tokens.min(variants::LEAST_ROWS - 1);
        let bytes = widths.max().map(|width| width.saturating_mul(4 * n_rows).saturating_mul(n_parts));
        let parts = bytes.filter(|_| n_parts > 1).map(|bytes| (own.add(bytes, max_buffer), part, n_parts));
        let chooses = |op: &Op| matches!(op, Op::Choose { out, .. } if limits.max_positions > plan.buf(*out).width);
        let ranks = plan.all_ops().any(chooses).then(|| {
            let stride = limits.max_positions.next_multiple_of(PAGE);
            let tokens = (MOST_RANKS / stride).max(max_tokens.div_ceil(MAX_SLICES)).clamp(1, max_tokens.max(1));
            let piece = own.add(tokens.saturating_mul(stride).saturating_mul(4), max_buffer);
            (piece, stride, tokens)
        });
        let mut caches = Layout::default();
        for decl in &plan.caches {
            for bytes in planes(decl, limits, metal.cache) {
                caches.add(bytes, max_buffer);
            }
        }
        let mut states = Layout::default();
        for (decl, kept) in plan.states.iter().zip(kept(plan)) {
            let slot = decl.n.saturating_add(kept.saturating_mul(limits.max_draft));
            states.add(slot.saturating_mul(4).saturating_mul(limits.n_states), max_buffer);
        }
        // Values that ops fill rows with.
        let mut piece = |values: &[f32]| own.add(values.len().saturating_mul(4), max_buffer);
        let constants = constants(plan).map(|(op, values)| (op, piece(values))).collect();
        Memory {
            arena: one(placement.bytes),
            placement,
            own,
            apart,
            groups,
            parts,
            ranks,
            constants,
            routed,
            caches,
            states,
            tables: tables::layout(limits, &angles(plan, limits), Kept::of(plan), max_buffer),
        }
    }
}

fn angles(plan: &Plan, limits: Limits) -> Vec<Angles> {
    plan.ropes_for(limits.max_positions).iter().map(Angles::new).collect()
}

/// Where a router writes ids.
fn ids(op: &Op) -> Option<Buf> {
    match op {
        Op::Route { ids, .. } => Some(*ids),
        _ => None,
    }
}

/// Values that ops fill rows with, by the op's index among all.
fn constants(plan: &Plan) -> impl Iterator<Item = (usize, &[f32])> {
    plan.all_ops().enumerate().filter_map(|(i, op)| match op {
        Op::Constant { values, .. } => Some((i, &values[..])),
        _ => None,
    })
}

/// What an op with gate and up of different types writes: as large as each of the two products.
fn apart(plan: &Plan, op: &Op) -> Option<Buf> {
    let (gate, up, out) = match *op {
        Op::GatedLinear { gate, up, out, .. } => (gate, up, out),
        Op::Experts { gate, up, hidden, .. } => (gate, up, hidden),
        _ => return None,
    };
    (plan.weight(gate).dtype != plan.weight(up).dtype).then_some(out)
}

/// Bytes of a layer's keys and values; those have no place of their own where they are found in the keys.
fn planes(decl: &CacheDecl, limits: Limits, cache: CacheType) -> Vec<usize> {
    let n_pages = if decl.window.is_some() { limits.n_window_pages } else { limits.n_pages };
    let plane = |t: KvType, d: usize| {
        n_pages.saturating_mul(PAGE).saturating_mul(decl.n_kv).saturating_mul(t.bytes(d).unwrap_or(usize::MAX))
    };
    match decl.v_in_k {
        true => vec![plane(cache.k, decl.d_k)],
        false => vec![plane(cache.k, decl.d_k), plane(cache.v, decl.d_v)],
    }
}

/// Numbers that a slot of each state keeps of a draft, after the state: the row of a convolution, or k, v, g and beta
/// of a delta rule (`kernels/metal/keep_drafts.metal`).
fn kept(plan: &Plan) -> Vec<usize> {
    let mut kept = vec![0; plan.states.len()];
    for op in &plan.ops {
        let numbers = |bufs: &[_]| bufs.iter().fold(0, |sum: usize, &buf| sum.saturating_add(plan.buf(buf).width));
        match *op {
            Op::CausalConv { x, state, .. } => kept[state.0 as usize] = numbers(&[x]),
            Op::DeltaNet { k, v, g, beta, state, .. } => kept[state.0 as usize] = numbers(&[k, v, g, beta]),
            _ => {}
        }
    }
    kept
}

/// Why a plan's caches cannot be kept in these types; `None` where they can.
pub fn cache_misfit(cache: CacheType, plan: &Plan) -> Option<String> {
    cache.misfit(plan).or_else(|| crate::unread("Metal", cache))
}

fn caches(plan: &Plan, spans: &[Span]) -> Vec<CacheView> {
    let mut spans = spans.iter().copied();
    let view = |decl: &CacheDecl| {
        let k = spans.next()?;
        let v = if decl.v_in_k { None } else { Some(spans.next()?) };
        Some(CacheView { k, v, decl: *decl })
    };
    plan.caches.iter().map_while(view).collect()
}
