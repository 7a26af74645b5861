//! From a plan to a program: compiles the modules it needs, copies weights to the device and allocates everything a
//! step needs.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use checkpoint::Checkpoint;
use model::plan::{Buf, CacheDecl, Elem, Op, Plan, ValidPlan, Weight, memory};

use super::Cuda;
use super::batch;
use super::chosen;
use super::delta;
use super::drafts::{self, Slots as DraftSlots};
use super::driver::{self, Context, DriverError, Memory, Module, Pinned, Stream};
use super::encode::{self, Kernels, RopeView, Scratch, batch::BatchScratch};
use super::few::DeltaRoom;
use super::fuse::{fuse, with_norms};
use super::host::{Host, HotPlaces};
use super::lists::{Head, Lists};
use super::nodes::{
    ATTEND_PAGES, AttendNode, AttentionNode, CacheView, HostNode, LatentOutNode, Link, Lower, MAX_SPLITS, Modules,
    Node, SlotPlaces, StateView, View, is_interleaved,
};
use super::nvrtc::{self, Target};
use super::pick::Picker;
use super::program::{CudaProgram, Parts, Plain};
use super::sources::{self, Key, Texts};
use super::split::{Slots, Split};
use super::tables::{Given, Tables};
use super::upload::Weights;
use super::wide;
use super::{few, few_launch};
use backend::inputs::Inputs;
use backend::residency::{Policy, Residencies, Residency};
use backend::routing::RoutingTrace;
use backend::{CacheType, KvType};
use backend::{CompileError, Footprint, Kinds, Limits, PAGE, Part, Takes};

/// Tokens of a step: where one goes in 20 bits of a fault, with its router in the other 12.
const MAX_TOKENS: usize = 1 << 20;
const MAX_ROUTERS: usize = 1 << 12;

/// A driver error while compiling.
pub trait Failed<T> {
    /// Says what for.
    fn failed(self, what: &'static str) -> Result<T, CompileError>;
}

impl<T> Failed<T> for Result<T, DriverError> {
    fn failed(self, what: &'static str) -> Result<T, CompileError> {
        self.map_err(|e| unsupported(format!("get {what}: {e}")))
    }
}

fn unsupported(what: String) -> CompileError {
    CompileError::Unsupported { backend: "cuda", what }
}

/// Device memory; where it runs out, the error says how much was wanted and how much is free.
pub fn allocate(context: &Arc<Context>, what: &'static str, bytes: usize) -> Result<Memory, CompileError> {
    Memory::new(context, bytes).map_err(|e| {
        if !e.is_memory {
            return unsupported(format!("get {what}: {e}"));
        }
        let free = context.memory().map_or(0, |(free, _)| free);
        unsupported(format!(
            "hold {what}: {bytes} bytes are wanted, {free} bytes are free on {}; lower the context or the batch",
            context.name
        ))
    })
}

/// A plan laid out on a device: its lists of nodes, the modules that they want, and memory with an address for each
/// thing in it. Nothing is compiled or copied yet.
pub struct Laid<'a> {
    /// With whole layers of experts on the device.
    pub lists: Lists,
    plain: Option<Plain>,
    /// With slots for single ones.
    slotted: Option<(Lists, HotPlaces)>,
    pub modules: Modules,
    pub weights: Weights<'a>,
    pub ropes: Vec<RopeView>,
    pub scratch: Scratch,
    /// Which routed experts lie on the device, and where the others come to when it computes them.
    split: Split,
    stage: Memory,
    memory: Vec<Memory>,
    states: Vec<StateView>,
    logits: View,
    hidden: Option<View>,
    /// The draft head.
    pub head: Option<Head>,
}

/// Lays out `plan` on a device.
pub fn lay<'a>(
    cuda: &Cuda,
    plan: &Plan,
    checkpoint: &'a Checkpoint,
    limits: Limits,
    context: &Arc<Context>,
    stream: &Stream,
    link: Option<Link>,
) -> Result<Laid<'a>, CompileError> {
    Kinds::of(plan).check(limits)?;
    if let Some(buf) = plan.bufs.iter().find(|buf| !matches!(buf.elem, Elem::F32 | Elem::U32)) {
        return Err(unsupported(format!("keep {} in {:?}", buf.name, buf.elem)));
    }
    if limits.max_tokens == 0 || limits.max_tokens > MAX_TOKENS {
        return Err(unsupported(format!("run steps of {} tokens, at most {MAX_TOKENS}", limits.max_tokens)));
    }
    let n_routers = plan.all_ops().filter(|op| matches!(op, Op::Route { .. })).count();
    if n_routers > MAX_ROUTERS {
        return Err(unsupported(format!("run {n_routers} routers, at most {MAX_ROUTERS}")));
    }
    if let Some(what) = cache_misfit(cuda.cache, plan) {
        return Err(unsupported(what));
    }
    // Blocks become f16 for the kernels that read floats.
    let is_f16 = cuda.cache.k != KvType::F32;
    let max_tokens = limits.max_tokens;
    let is_wide = wide::fits(context.arch) && max_tokens >= wide::FROM;
    let is_batch = batch::has_steps(limits);
    let max_outputs = limits.max_outputs.min(max_tokens);

    let placement = memory::place(plan, max_tokens, max_outputs);
    let arena = allocate(context, "step buffers", placement.bytes)?;
    let (cache_memory, caches) = caches(context, plan, limits, cuda.cache)?;
    let (state_memory, states) = states(context, plan, limits, stream)?;
    let split = cuda.split(plan);
    let slots = cuda.slots(plan, &split);
    let stage = allocate(context, "experts on their way", cuda.stage_bytes(&split, &slots))?;
    let [shared_bytes, table_bytes, pair_bytes] = slot_bytes(&slots, plan, &split, limits);
    let hot = match slots.is_empty() {
        true => None,
        false => {
            let memory = allocate(context, "experts", shared_bytes)?;
            Some((memory, allocate(context, "tables of experts", table_bytes + pair_bytes)?))
        }
    };
    let head_plan = plan.draft_plan();
    let delta = allocate(context, "delta rules", delta::bytes(plan, limits))?;
    let mut weights = Weights::new(context);
    let mut modules = Modules::new();
    let mut lower = Lower {
        plan,
        checkpoint,
        weights: &mut weights,
        modules: &mut modules,
        placement: &placement,
        arena: arena.ptr(),
        caches: &caches,
        states: &states,
        is_f16,
        max_tokens,
        max_positions: limits.max_positions,
        delta: delta.ptr(),
        max_shared: context.max_shared,
        is_wide,
        is_batch,
        n_routers: 0,
        split: &split,
        stage: stage.ptr(),
        link,
        places: hot.as_ref().map(|(memory, tables)| SlotPlaces {
            memory: memory.ptr(),
            slots: &slots,
            tables: tables.ptr(),
            ids: tables.ptr() + table_bytes as u64,
        }),
    };
    let mut of_ops = plan.ops.iter().map(|op| lower.op(op)).collect::<Result<Vec<_>, _>>()?;
    let qkv = lower.modules.id(Key::cached(sources::QKV, is_f16));
    let mut room_bytes = 0;
    let most = batch::most_rows(is_wide).min(max_tokens.max(few::MAX_ROWS));
    let room_rows = if is_batch { most } else { few::MAX_ROWS };
    let places = most_of(plan, head_plan.as_ref(), |plan| few::room(plan, room_rows)).map(|numbers| {
        let at = room_bytes;
        room_bytes += (4 * numbers).next_multiple_of(256);
        at as u64
    });
    let room = allocate(context, "step buffers", room_bytes)?;
    // SAFETY: just allocated with this length.
    unsafe { stream.fill(room.ptr(), 0, room_bytes) }.failed("step buffers")?;
    let n_sums = (places[10] - places[9]) as usize / 8;
    let places = places.map(|at| room.ptr() + at);
    let [attended, shared, delta_, logits, dense, sum, latent, heads, counters, sums, squares, ..] = places;
    let [.., attended_columns, normed_columns, normed_squares] = places;
    let (rows, zeroed) = (room_rows, (sums, n_sums));
    let places = few::Room {
        attended,
        shared,
        delta: delta_,
        logits,
        dense,
        sum,
        latent,
        heads,
        counters,
        sums,
        squares,
        attended_columns,
        normed_columns,
        normed_squares,
        rows,
    };
    let device = few_launch::Device { sms: context.sms, max_shared: context.max_shared };
    let device = few_launch::fits(context.arch).then_some(device);
    few::mark_summed(plan, &mut of_ops);
    few::mark_multiplied(plan, &mut of_ops);
    few::mark_added(plan, &mut of_ops);
    let mut head_ops = |head: &Plan| {
        let mut ops = head.ops.iter().map(|op| lower.op(op)).collect::<Result<Vec<_>, _>>()?;
        few::mark_summed(head, &mut ops);
        few::mark_multiplied(head, &mut ops);
        Ok::<_, CompileError>(ops)
    };
    let head_ops = head_plan.as_ref().map(&mut head_ops).transpose()?;
    let mut slotted = of_ops.clone();
    for (op, nodes) in plan.ops.iter().zip(&mut slotted) {
        if let Some(node) = nodes.first().map(|node| lower.slotted(op, node)).transpose()?.flatten() {
            *nodes = vec![node];
        }
    }
    let target = few::Target { room: places, is_f16, device, qkv, has_latents: true };
    let mut lists = |plan: &Plan, of_ops: Vec<Vec<Node>>| {
        let few = few::few(plan, &of_ops, lower.modules, target);
        let batch = match is_batch && encode::batch::fits(&few) {
            true => few::few(plan, &of_ops, lower.modules, few::Target { has_latents: false, ..target }),
            false => Vec::new(),
        };
        let room = DeltaRoom { at: delta.ptr(), rows: max_tokens };
        let joined = (max_tokens >= delta::FROM).then(|| few::join_rules(plan, &of_ops, lower.modules, room));
        let most = if batch.is_empty() { 0 } else { most };
        let mut nodes = fuse(joined.unwrap_or_else(|| of_ops.into_iter().flatten().collect()), qkv);
        few::attend_singles(&mut nodes, lower.modules, &places, is_f16);
        let [few, batch, nodes] = [few, batch, nodes].map(with_norms);
        Lists { few, batch, most, nodes }
    };
    let is_whole = split.host().next().is_none();
    let plain = is_whole.then(|| of_ops.clone());
    let slotted = hot.as_ref().map(|_| lists(plan, slotted));
    let head_lists = head_plan.as_ref().zip(head_ops).map(|(head, ops)| lists(head, ops));
    let lists = lists(plan, of_ops);
    let plain = plain.map(|ops| Plain {
        ops,
        views: (0..plan.bufs.len()).map(|i| lower.view(Buf(i as u32))).collect(),
        inputs: Inputs::new(plan),
    });
    let logits = lower.view(plan.logits);
    let hidden = plan.hidden().map(|hidden| lower.view(hidden));
    let head = plan.draft.as_ref().zip(head_lists).map(|(draft, lists)| Head {
        lists,
        source: lower.view(draft.source),
        input: lower.view(draft.input),
        logits: lower.view(draft.logits),
        hidden: plan.draft_hidden().map(|hidden| lower.view(hidden)),
    });

    let all = slotted.iter().chain([&lists]).chain(head.iter().map(|head| &head.lists));
    let all = all.flat_map(|lists| lists.nodes.iter().chain(&lists.few));
    let needs = Needs::of(all, limits, context.sms);
    let mut memory = vec![arena, cache_memory, state_memory, room, delta];
    let slotted = slotted.zip(hot).map(|(lists, (experts, tables))| {
        let places = HotPlaces { base: experts.ptr(), slots, tables: tables.ptr() };
        memory.extend([experts, tables]);
        (lists, places)
    });
    let mut scratch = |what, numbers: usize| {
        let memory_ = allocate(context, what, numbers.saturating_mul(4))?;
        let ptr = memory_.ptr();
        memory.push(memory_);
        Ok::<_, CompileError>(ptr)
    };
    let [x_bytes, hidden_bytes, shared_bytes] = most_of(plan, head_plan.as_ref(), |plan| batch::scratch(plan, limits));
    let batch = BatchScratch {
        x: scratch("packed activations", x_bytes / 4)?,
        x_bytes,
        hidden: scratch("packed activations", hidden_bytes / 4)?,
        shared: scratch("scratch of products", shared_bytes / 4)?,
    };
    let wide = |plan: &Plan| [wide::most_packed(plan, limits), wide::most_sums(plan, limits, context.sms) / 4];
    let [packed_bytes, n_wide_sums] = if is_wide { most_of(plan, head_plan.as_ref(), wide) } else { [0; 2] };
    let n_ranks = chosen::n_ranks(plan, limits);
    let n_further = wide::most_further(needs.pairs, needs.n_expert);
    let further = scratch("expert lists", 3 * n_further)?;
    let scratch = Scratch {
        batch,
        zeroed,
        ranks: scratch("ranks of positions", n_ranks)?,
        n_ranks,
        apart: scratch("scratch of products", needs.apart)?,
        partial: scratch("partial sums of attention", needs.partial)?,
        first: scratch("expert lists", needs.n_expert + 1)?,
        pairs: scratch("expert lists", needs.pairs)?,
        places: scratch("expert lists", needs.pairs)?,
        further: [0, 1, 2].map(|i| further + (4 * i * n_further) as driver::Ptr),
        packed: scratch("packed activations", packed_bytes / 4)?,
        packed_bytes,
        sums: scratch("sums of products", n_wide_sums)?,
        n_sums: n_wide_sums,
    };
    let mut ropes = Vec::with_capacity(plan.ropes.len());
    for decl in plan.ropes_for(limits.max_positions) {
        let half = decl.inv_freq.len();
        let bytes: Vec<u8> = decl.inv_freq.iter().flat_map(|f| f.to_le_bytes()).collect();
        let inv_freq = weights.bytes("frequencies", bytes)?;
        let axes: Vec<u8> = decl.axes.iter().flat_map(|&axis| u32::from(axis).to_le_bytes()).collect();
        let axes = if axes.is_empty() { 0 } else { weights.bytes("axes", axes)? };
        let table = allocate(context, "angles", max_tokens.saturating_mul(8 * half))?;
        let view = RopeView {
            inv_freq,
            axes,
            table: table.ptr(),
            half,
            factor: decl.factor,
            growth: decl.growth,
            interleaved: is_interleaved(decl.pairing),
        };
        memory.push(table);
        ropes.push(view);
    }
    Ok(Laid {
        lists,
        plain,
        slotted,
        modules,
        weights,
        ropes,
        scratch,
        split,
        stage,
        memory,
        states,
        logits,
        hidden,
        head,
    })
}

/// Compiles `plan`; see [`backend::Backend::compile`].
pub fn compile(
    cuda: &Cuda,
    plan: &ValidPlan,
    checkpoint: &Arc<Checkpoint>,
    limits: Limits,
    room: Option<(Link, Memory)>,
) -> Result<CudaProgram, CompileError> {
    let start = |why: String| CompileError::Start { what: format!("CUDA device {}", cuda.device), why };
    driver::init().map_err(|e| start(e.to_string()))?;
    let plan: &Plan = plan;
    let context = Context::new(cuda.device).failed("the device")?;
    let target = nvrtc::target(context.arch, cuda.ahead.is_some()).map_err(start)?;
    let stream = Stream::new(&context).failed("a stream")?;
    let (link, room) = room.unzip();
    let laid = lay(cuda, plan, checkpoint, limits, &context, &stream, link)?;
    let Laid {
        lists,
        plain,
        slotted,
        modules,
        weights,
        ropes,
        scratch,
        split,
        stage,
        mut memory,
        states,
        logits,
        hidden,
        head,
    } = laid;
    let (slotted, places) = slotted.unzip();
    // Weights are copied while kernels are compiled.
    let (loaded, copied) = std::thread::scope(|scope| {
        let copying = scope.spawn(|| weights.finish());
        let loaded = load(&context, modules.keys(), target, cuda);
        (loaded, copying.join().unwrap_or_else(|e| std::panic::resume_unwind(e)))
    });
    memory.extend(copied?);
    memory.extend(room);
    let kernels = Kernels::new(loaded?);
    stream.wait().failed("initial memory")?;
    let host = match cuda.host.filter(|_| split.host().next().is_some()) {
        Some(host) => {
            let mut host = Host::new(&context, &stream, host, plan, &split, checkpoint, limits, stage, places)?;
            host.measure(&stream).failed("what copies of experts take")?;
            Some(host)
        }
        None => None,
    };

    let (kinds, takes, max_tokens) = (Kinds::of(plan), Takes::of(plan), limits.max_tokens);
    let max_outputs = limits.max_outputs.min(max_tokens);
    let d_hidden = hidden.map_or(0, |hidden| hidden.width);
    let d_head = head.as_ref().map_or(0, |head| head.input.width);
    let pinned = |numbers: usize| Pinned::new(&context, numbers.saturating_mul(4)).failed("memory for outputs");
    let n_pages = [limits.n_pages, limits.n_window_pages];
    CudaProgram::new(Parts {
        tables: Tables::new(&context, max_tokens, n_pages, kinds.window.is_some(), given_row(&takes))
            .failed("page tables")?,
        host_logits: pinned(max_outputs.saturating_mul(plan.n_vocab))?,
        host_hidden: pinned(max_outputs.saturating_mul(d_hidden))?,
        host_faults: pinned(max_tokens)?,
        host_rows: pinned(max_tokens.saturating_mul(d_head))?,
        slots: DraftSlots::new(if kinds.state { limits.n_states } else { 0 }),
        head,
        picker: Picker::new(&context, plan.n_vocab),
        context,
        stream,
        kernels,
        lists: [Some(lists), slotted].into_iter().flatten().collect(),
        plain,
        routers: router_layers(plan),
        ropes,
        scratch,
        states,
        logits,
        hidden,
        n_vocab: plan.n_vocab,
        limits: Limits { max_outputs, ..limits },
        kinds,
        takes,
        routing: RoutingTrace::new(plan),
        host,
        _memory: memory,
    })
    .failed("a program")
}

/// What a program takes of the device's memory; see [`backend::Backend::footprint`].
pub fn footprint(cuda: &Cuda, plan: &Plan, limits: Limits) -> Footprint {
    /// Multiprocessors of the largest device: the splits of attention grow with them.
    const SMS: usize = 192;
    let mut sum = Footprint::new(super::MEMORY);
    let kinds = plan.kinds();
    let residencies = Residencies::new(plan, Policy::CopyAll);
    let split = cuda.split(plan);
    let in_host_memory: HashSet<Weight> = split.host().flat_map(|layer| plan.ops[layer.op].weights()).collect();
    for i in 0..plan.weights.len() {
        if in_host_memory.contains(&Weight(i as u32)) && residencies.is_matrix(Weight(i as u32)) {
            continue;
        }
        let (decl, is_matrix) = (&plan.weights[i], residencies.is_matrix(Weight(i as u32)));
        let bytes = if is_matrix { decl.bytes() } else { decl.n_values().saturating_mul(4) };
        sum.add(Part::Weights(kinds[i], Residency::Copied), bytes);
    }
    sum.add(Part::Scratch, floats(plan, limits, cuda.cache).iter().sum());
    for decl in &plan.caches {
        let part = if decl.window.is_some() { Part::Windows } else { Part::Cache };
        let [k, v] = planes(decl, limits, cuda.cache);
        sum.add(part, k.saturating_add(v));
    }
    drafts::slot_lens(plan, limits).into_iter().for_each(|n| sum.add(Part::States, state_bytes(n, limits)));
    let max_outputs = limits.max_outputs.min(limits.max_tokens);
    sum.add(Part::Activations, memory::place(plan, limits.max_tokens, max_outputs).bytes);
    plan.ropes.iter().for_each(|r| sum.add(Part::Scratch, limits.max_tokens.saturating_mul(8 * r.inv_freq.len())));
    let given =
        given_row(&Takes::of(plan)).map_or(0, |d_input| Given::words(limits.max_tokens, d_input).saturating_mul(4));
    sum.add(Part::Scratch, given);
    let attention = plan.all_ops().filter_map(|op| match *op {
        Op::Attention { cache, n_head, .. } => {
            let decl = plan.cache(cache);
            Some((4 * SMS / decl.n_kv.max(1) + 1).saturating_mul(n_head * (decl.d_v + 2) * 4))
        }
        _ => None,
    });
    sum.add(Part::Scratch, attention.max().unwrap_or(0));
    // Devices without these kernels need none of it.
    let head = plan.draft_plan();
    let wide = |plan: &Plan| [wide::most_packed(plan, limits), wide::most_sums(plan, limits, SMS)];
    sum.add(Part::Scratch, most_of(plan, head.as_ref(), wide).iter().sum());
    sum.add(Part::Scratch, most_of(plan, head.as_ref(), |plan| batch::scratch(plan, limits)).iter().sum());
    sum.add(Part::Scratch, delta::bytes(plan, limits));
    sum.add(Part::Scratch, chosen::n_ranks(plan, limits).saturating_mul(4));
    let slots = cuda.slots(plan, &split);
    sum.add(Part::Scratch, cuda.stage_bytes(&split, &slots));
    let [_, tables, pairs] = slot_bytes(&slots, plan, &split, limits);
    sum.add(Part::Scratch, tables + pairs);
    sum
}

/// Bytes of the memory that layers and slots of experts take in turn, of the tables of slots, and of the slots of a
/// step's pairs; zero without slots.
fn slot_bytes(slots: &[Slots], plan: &Plan, split: &Split, limits: Limits) -> [usize; 3] {
    if slots.is_empty() {
        return [0; 3];
    }
    let tables: usize = slots.iter().map(|layer| 4 * layer.n_expert).sum();
    let pairs = slots.iter().map(|layer| match plan.ops[layer.op] {
        Op::Experts { ids, .. } => limits.max_tokens.saturating_mul(4 * plan.buf(ids).width),
        _ => 0,
    });
    [split.bytes()[0], tables.next_multiple_of(256), pairs.max().unwrap_or(0)]
}

/// Sizes of a plan and of its draft head, the larger of each.
fn most_of<const N: usize>(plan: &Plan, head: Option<&Plan>, sizes: impl Fn(&Plan) -> [usize; N]) -> [usize; N] {
    let (own, of_head) = (sizes(plan), head.map_or([0; N], &sizes));
    std::array::from_fn(|i| own[i].max(of_head[i]))
}

/// The layer of each router, in the order of ops, the draft head's last.
fn router_layers(plan: &Plan) -> Vec<u32> {
    let of_head = plan.draft.iter().flat_map(|draft| draft.ops.iter().zip(&draft.layers));
    let layers = plan.ops.iter().zip(&plan.layers).chain(of_head);
    layers.filter(|(op, _)| matches!(op, Op::Route { .. })).map(|(_, layer)| layer.unwrap_or(0)).collect()
}

/// Scratch over all nodes, in numbers of four bytes.
#[derive(Default)]
struct Needs {
    apart: usize,
    partial: usize,
    n_expert: usize,
    pairs: usize,
}

impl Needs {
    fn of<'a>(nodes: impl Iterator<Item = &'a Node>, limits: Limits, sms: usize) -> Needs {
        let mut needs = Needs::default();
        let most_pages = limits.max_positions.div_ceil(PAGE).max(1);
        for node in nodes {
            match node {
                Node::GatedLinearApart { out, .. } => {
                    let rows = out.rows.count(limits.max_tokens, limits.max_outputs);
                    needs.apart = needs.apart.max(rows.saturating_mul(out.width));
                }
                Node::Attention(node) | Node::LatentOut(LatentOutNode { attention: node, .. }) => {
                    // Splits shrink as tokens grow, so the most of their product stands at some number of tokens.
                    for n_tokens in 1..=limits.max_tokens {
                        let n_splits = node.splits(n_tokens, most_pages.max(MAX_SPLITS), sms);
                        if n_splits == 1 {
                            break;
                        }
                        let row = node.n_head * (node.cache.d_v + 2);
                        needs.partial = needs.partial.max(n_tokens.saturating_mul(n_splits).saturating_mul(row));
                    }
                    needs.chosen(node, limits, sms);
                    if let Some(node) = node.singles() {
                        needs.attend(&node, limits, sms);
                    }
                }
                Node::Attend(node) => needs.attend(node, limits, sms),
                Node::Experts(node) | Node::HostExperts(HostNode { experts: node, .. }) => {
                    needs.n_expert = needs.n_expert.max(node.n_expert);
                    let rows = node.x.rows.count(limits.max_tokens, limits.max_outputs);
                    needs.pairs = needs.pairs.max(rows.saturating_mul(node.n_used));
                    if node.gate.dtype != node.up.dtype {
                        needs.apart = needs.apart.max(rows.saturating_mul(node.n_used * node.hidden.width));
                    }
                }
                _ => {}
            }
        }
        needs
    }

    /// For the splits of chosen positions.
    fn chosen(&mut self, node: &AttentionNode, limits: Limits, sms: usize) {
        let Some(chosen) = node.chosen else { return };
        for n_tokens in 1..=limits.max_tokens {
            let n_splits = node.chosen_splits(&chosen, n_tokens, usize::MAX, sms);
            if n_splits == 1 {
                break;
            }
            let row = node.n_head * (node.cache.d_v + 2);
            self.partial = self.partial.max(n_tokens.saturating_mul(n_splits).saturating_mul(row));
        }
    }

    /// For the splits of single tokens.
    fn attend(&mut self, node: &AttendNode, limits: Limits, sms: usize) {
        let most_pages = limits.max_positions.div_ceil(PAGE).max(ATTEND_PAGES * MAX_SPLITS);
        for n_tokens in 1..=limits.max_tokens.min(batch::MAX_ROWS) {
            self.partial = self.partial.max(node.partial(n_tokens, node.splits(n_tokens, most_pages, sms)));
        }
    }
}

/// Numbers of a row that steps are given; whole texts have places and spans alone.
fn given_row(takes: &Takes) -> Option<usize> {
    takes.d_input.or(takes.whole.then_some(0))
}

/// Why a plan's caches cannot be kept in these types; `None` where they can.
pub fn cache_misfit(cache: CacheType, plan: &Plan) -> Option<String> {
    let is_mixed = (cache.k == KvType::F32) != (cache.v == KvType::F32);
    let mixed = || is_mixed.then(|| format!("keep a cache of type {cache}: f32 goes with f32 alone"));
    cache.misfit(plan).or_else(mixed).or_else(|| crate::unread("CUDA", cache))
}

/// Bytes of a layer's keys and values.
fn planes(decl: &CacheDecl, limits: Limits, types: CacheType) -> [usize; 2] {
    let plane = |t: KvType, d: usize| {
        let n_pages = if decl.window.is_some() { limits.n_window_pages } else { limits.n_pages };
        let rows = n_pages.saturating_mul(PAGE).saturating_mul(decl.n_kv);
        t.bytes(d).map_or(usize::MAX, |bytes| rows.saturating_mul(bytes)).saturating_add(255) & !255
    };
    [plane(types.k, decl.d_k), if decl.v_in_k { 0 } else { plane(types.v, decl.d_v) }]
}

/// Bytes of the copies of a layer's keys and values in f16, one layer after the other, where they are kept in blocks.
fn floats(plan: &Plan, limits: Limits, types: CacheType) -> [usize; 2] {
    let most = |i: usize, t: KvType| match t.block() {
        Some(_) => plan.caches.iter().map(|decl| planes(decl, limits, CacheType::F16)[i]).max().unwrap_or(0),
        None => 0,
    };
    [most(0, types.k), most(1, types.v)]
}

/// Bytes of a state of `n` numbers in all slots.
fn state_bytes(n: usize, limits: Limits) -> usize {
    n.saturating_mul(limits.n_states).saturating_mul(4).saturating_add(255) & !255
}

/// The pages of all layers, one layer after the other, and after them the copies of blocks.
fn caches(
    context: &Arc<Context>,
    plan: &Plan,
    limits: Limits,
    types: CacheType,
) -> Result<(Memory, Vec<CacheView>), CompileError> {
    let planes = |decl: &CacheDecl| planes(decl, limits, types);
    let sum = |sum: usize, [k, v]: [usize; 2]| sum.saturating_add(k).saturating_add(v);
    let (cached, copied) = (plan.caches.iter().map(planes).fold(0, sum), floats(plan, limits, types));
    let memory = allocate(context, "the key-value cache", sum(cached, copied))?;
    let mut at = memory.ptr();
    let copies = [at + cached as u64, at + (cached + copied[0]) as u64];
    let view = |decl: &CacheDecl| {
        let [k, v] = planes(decl);
        let (keys, values) = (at, at + k as u64);
        at += (k + v) as u64;
        let float = |t: KvType, plane, copy| if t.block().is_some() { copy } else { plane };
        CacheView {
            k: keys,
            v: values,
            n_kv: decl.n_kv,
            d_k: decl.d_k,
            d_v: decl.d_v,
            windowed: decl.window.is_some(),
            types,
            floats: [float(types.k, keys, copies[0]), float(types.v, values, copies[1])],
        }
    };
    let views = plan.caches.iter().map(view).collect();
    Ok((memory, views))
}

/// The recurrent states of all slots, one state after the other, zero.
fn states(
    context: &Arc<Context>,
    plan: &Plan,
    limits: Limits,
    stream: &Stream,
) -> Result<(Memory, Vec<StateView>), CompileError> {
    let lens = drafts::slot_lens(plan, limits);
    let bytes = |n: usize| state_bytes(n, limits);
    let total = lens.iter().fold(0usize, |sum, &n| sum.saturating_add(bytes(n)));
    let memory = allocate(context, "recurrent states", total)?;
    if total > 0 {
        // SAFETY: just allocated with this length.
        unsafe { stream.fill(memory.ptr(), 0, total) }.failed("recurrent states")?;
    }
    let mut at = memory.ptr();
    let view = |len: usize| {
        at += bytes(len) as u64;
        StateView { ptr: at - bytes(len) as u64, len }
    };
    let views = lens.into_iter().map(view).collect();
    Ok((memory, views))
}

/// Loads modules, and compiles those that are kept nowhere, several at a time.
fn load(context: &Arc<Context>, keys: &[Key], target: Target, cuda: &Cuda) -> Result<Vec<Module>, CompileError> {
    let texts = Texts::new(cuda.kernels.as_deref());
    let (ahead, cache) = (cuda.ahead.as_deref(), cuda.cubins.as_deref());
    let mut images: Vec<Option<Vec<u8>>> =
        keys.iter().map(|key| nvrtc::find(key, &texts, target, ahead, cache)).collect();
    let missing: Vec<usize> = (0..keys.len()).filter(|&i| images[i].is_none()).collect();
    let report = |done: usize| {
        if let Some(progress) = &cuda.progress {
            (progress.0)(done, missing.len());
        }
    };
    if !missing.is_empty() {
        report(0);
    }
    let (next, done) = (AtomicUsize::new(0), Mutex::new((0, Vec::with_capacity(missing.len()))));
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(missing.len());
    std::thread::scope(|scope| {
        let work = || {
            while let Some(&i) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                let compiled = nvrtc::compile(&keys[i], &texts, target, cache);
                let mut done = done.lock().unwrap_or_else(|e| e.into_inner());
                done.0 += 1;
                done.1.push((i, compiled));
                report(done.0);
            }
        };
        for _ in 1..threads {
            // Where the system gives no more threads, this one does it all.
            let _ = std::thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    for (i, compiled) in done.into_inner().unwrap_or_else(|e| e.into_inner()).1 {
        let without = |why: String| match &cuda.ahead {
            Some(folder) if nvrtc::version().is_err() => unsupported(format!(
                "run kernels/cuda/{} on compute capability {}.{}: it is not among the kernels in {}, and {why}",
                keys[i].file,
                context.arch / 10,
                context.arch % 10,
                folder.display()
            )),
            _ => unsupported(why),
        };
        images[i] = Some(compiled.map_err(without)?.image);
    }
    images.into_iter().map(|image| Module::load(context, &image.unwrap_or_default()).failed("a module")).collect()
}
