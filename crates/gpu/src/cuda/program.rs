//! A program on the device: a step copies its tables, queues the nodes (or replays the graph captured for its counts)
//! and copies back the rows that the batch requests.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use model::plan::Buf;

use super::args;
use super::drafts::Slots;
use super::driver::{Context, DriverError, Graph, Memory, Pinned, Stream};
use super::encode::{Ahead, Encoder, Kernels, RopeView, Scratch};
use super::few_launch::Half;
use super::gate::Gate;
use super::handover::{self, Lane};
use super::host::Host;
use super::hot::{self, Layout};
use super::lists::{Head, List, Lists, list};
use super::nodes::{ATTEND_PAGES, HostNode, MAX_SPLITS, Node, RouteNode, StateView, View};
use super::pick::Picker;
use super::tables::{Counts, Tables};
use super::times::Times;
use backend::inputs::{self, Inputs};
use backend::routing::RoutingTrace;
use backend::{
    Ask, Batch, Cause, Drafts, Failure, Fault, InputSums, InputTrace, Kinds, Limits, OpTime, Output, PAGE, Picks,
    Profile, Program, RouterInfo, Save, StepError, StreamStats, SumInputs, Takes,
};

/// Maximum number of tokens of a step that is captured: above, the device computes longer than the host queues.
const MAX_CAPTURED: usize = 64;
/// Maximum number of graphs: then all are made anew.
const MAX_GRAPHS: usize = 1024;

/// What a program is made of.
pub struct Parts {
    pub context: Arc<Context>,
    pub stream: Stream,
    pub kernels: Kernels,
    /// With whole layers of experts on the device, and with slots for single ones where there may be such.
    pub lists: Vec<Lists>,
    /// What steps take whose inputs are summed; none where the host computes some.
    pub plain: Option<Plain>,
    /// Layer of each router.
    pub routers: Vec<u32>,
    pub ropes: Vec<RopeView>,
    pub scratch: Scratch,
    pub states: Vec<StateView>,
    pub tables: Tables,
    pub logits: View,
    pub hidden: Option<View>,
    pub host_logits: Pinned,
    pub host_hidden: Pinned,
    pub host_faults: Pinned,
    /// Rows that the draft head is given, or that it may be given.
    pub host_rows: Pinned,
    /// Drafts of recurrent states.
    pub slots: Slots,
    pub head: Option<Head>,
    pub n_vocab: usize,
    pub limits: Limits,
    pub kinds: Kinds,
    pub takes: Takes,
    pub routing: RoutingTrace,
    pub picker: Picker,
    /// Where not all experts lie on the device.
    pub host: Option<Host>,
    /// Weights, caches, states, buffers and scratch, to be kept.
    pub _memory: Vec<Memory>,
}

/// A program op by op.
pub struct Plain {
    /// The nodes of each op.
    pub ops: Vec<Vec<Node>>,
    /// Each buffer.
    pub views: Vec<View>,
    pub inputs: Inputs,
}

/// What a step's launches depend on.
#[derive(Clone, Copy)]
struct Shape {
    counts: Counts,
    /// Longest chunk.
    longest: usize,
    /// Chunks of one token.
    singles: usize,
    most_pages: usize,
    list: List,
    drafting: Drafting,
    /// Its launches may become graphs.
    is_decode: bool,
}

/// What decides which launches a part of a step has: the step's counts, the bucket of its longest sequence, the part,
/// the layout of experts, and what else decides on kernels.
type GraphKey = (Counts, usize, usize, Layout, Drafting);

/// What a step has to do with drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Drafting {
    Nothing,
    /// Recurrent states see drafts, or move past accepted ones.
    States,
    /// The draft head runs.
    Head,
}

/// Whether a step was seen once, or its graph.
enum Seen {
    Once,
    Captured(Graph),
}

/// A compiled plan.
pub struct CudaProgram {
    // Graphs go before the modules and the memory that they point to.
    graphs: HashMap<GraphKey, Seen>,
    /// Places of the nodes of each list that the host computes, in each layout: they cut a step into parts.
    cuts: Vec<[Vec<usize>; 3]>,
    /// How experts lie on the device in the step under way.
    layout: Layout,
    /// When that began.
    begin: Instant,
    parts: Parts,
    faults: Vec<Fault>,
    picks: Picks,
    /// Of each layout.
    times: Vec<Times>,
    /// The step under way.
    batch: Batch,
    /// It has drafts of recurrent states, or moves states past accepted ones.
    has_drafts: bool,
    /// Its launches are graphs, where they become such.
    is_settled: bool,
    /// What it picks, where kernels have something to pick.
    pick: Option<args::Pick>,
    /// Ids of all routers while the routing is traced, `[routers][max_tokens · n_used]`.
    trace: Option<(Memory, Pinned)>,
    is_traced: bool,
    /// Where inputs that are summed come to.
    landing: Option<Pinned>,
    early: bool,
    /// The first error of the device: nothing runs after it.
    broken: Option<DriverError>,
}

impl CudaProgram {
    /// From its parts.
    pub fn new(parts: Parts) -> Result<CudaProgram, DriverError> {
        let early = parts.context.arch >= 90;
        let cuts = |lists: &Lists| {
            lists.all().map(|nodes| {
                let is_host = |&i: &usize| matches!(nodes[i], Node::HostExperts(_));
                (0..nodes.len()).filter(is_host).collect()
            })
        };
        Ok(CudaProgram {
            graphs: HashMap::new(),
            cuts: parts.lists.iter().map(cuts).collect(),
            layout: Layout::Layers,
            begin: Instant::now(),
            faults: Vec::with_capacity(parts.limits.max_tokens),
            picks: Picks::default(),
            times: parts.lists.iter().map(|lists| Times::new(&parts.context, lists.all())).collect(),
            batch: Batch::default(),
            has_drafts: false,
            is_settled: true,
            parts,
            trace: None,
            is_traced: false,
            landing: None,
            early,
            broken: None,
            pick: None,
        })
    }

    /// The nodes in the layout of the step under way.
    fn lists(&self) -> &Lists {
        match self.head() {
            Some(head) => &head.lists,
            None => &self.parts.lists[self.layout as usize],
        }
    }

    /// The draft head, where the step in flight is one of it.
    fn head(&self) -> Option<&Head> {
        self.parts.head.as_ref().filter(|_| self.batch.is_draft())
    }

    /// Whether the host may have a share in the step in flight. The draft head's experts are on the device.
    fn has_host(&self) -> bool {
        self.parts.host.is_some() && !self.batch.is_draft()
    }

    /// Whether the routing of the step in flight is traced: the draft head's is not.
    fn traces_step(&self) -> bool {
        self.is_traced && !self.batch.is_draft()
    }

    fn cuts(&self, list: List) -> &[usize] {
        if self.batch.is_draft() { &[] } else { &self.cuts[self.layout as usize][list as usize] }
    }

    fn times(&self) -> &Times {
        &self.times[self.layout as usize]
    }

    fn list(&self, counts: Counts, longest: usize) -> List {
        let has_drafts = self.batch.is_draft() || self.batch.chunks.iter().any(|c| c.n_draft > 0);
        list(counts, longest, has_drafts, self.lists())
    }

    /// The shape of the step under way.
    fn shape(&self) -> Shape {
        let batch = &self.batch;
        let counts = Counts::of(batch);
        let longest = batch.chunks.iter().map(|c| c.len as usize).max().unwrap_or(0);
        let singles = batch.chunks.iter().filter(|c| c.len == 1).count();
        let pages = batch.chunks.iter().map(|c| (c.pos as usize + c.len as usize).div_ceil(PAGE)).max().unwrap_or(1);
        let most_pages = pages.next_power_of_two().min(ATTEND_PAGES * MAX_SPLITS);
        let is_watched = self.is_traced || self.times().is_on();
        let is_text = batch.given.tokens.is_empty() && batch.given.spans.is_empty();
        // All rows are asked for of tokens with drafts, as of single ones. Where others stand alongside them, their
        // number is anything.
        let list = self.list(counts, longest);
        let is_small = longest == 1 || (list != List::All && (counts.rows == counts.tokens || batch.is_draft()));
        let is_decode = is_small && counts.tokens <= MAX_CAPTURED && !is_watched && is_text;
        let drafting = match batch.is_draft() {
            true => Drafting::Head,
            false if self.has_drafts => Drafting::States,
            false => Drafting::Nothing,
        };
        Shape { counts, longest, singles, most_pages, list, drafting, is_decode }
    }

    /// Queues the step: all of it, or what comes before the host's first share.
    fn queue(&mut self) -> Result<(), DriverError> {
        self.parts.context.enter()?;
        if self.parts.tables.fill(&self.batch, &self.parts.slots, &self.parts.stream)? {
            self.graphs.clear();
        }
        self.begin = Instant::now();
        if let (Parts { host: Some(host), stream, .. }, false) = (&mut self.parts, self.batch.is_draft()) {
            host.start_step(self.batch.chunks.iter().map(|c| c.len as usize).sum());
            self.layout = host.settle(stream)?;
        }
        if let Parts { head: Some(head), host_rows, stream, .. } = &mut self.parts
            && self.batch.is_draft()
        {
            let rows = &self.batch.hidden;
            host_rows.words_mut::<f32>()[..rows.len()].copy_from_slice(rows);
            // SAFETY: a checked batch has at most the rows of the limits, and no step begins before the last one has
            // ended.
            unsafe { stream.upload(head.input.ptr, host_rows, 4 * rows.len())? };
        }
        // Before the nodes, since a copy between kernels would hold them up.
        self.pick = self.parts.picker.fill(&self.batch, &self.parts.stream, self.logits().ptr)?;
        let shape = self.shape();
        let is_captured = |part| matches!(self.graphs.get(&self.graph_key(shape, part)), Some(Seen::Captured(_)));
        self.is_settled = !shape.is_decode || (0..=self.cuts(shape.list).len()).all(is_captured);
        if self.parts.plain.as_ref().is_some_and(|plain| plain.inputs.is_on()) && !self.batch.is_draft() {
            self.run_plain(shape)?;
            return self.queue_output(shape);
        }
        if self.has_host() {
            return Shared { program: self, shape }.queue(0);
        }
        self.queue_part(shape, 0)?;
        self.queue_output(shape)
    }

    /// Runs the step op by op and sums the inputs of its products.
    fn run_plain(&mut self, shape: Shape) -> Result<(), DriverError> {
        let (Some(mut plain), Some(landing)) = (self.parts.plain.take(), self.landing.take()) else { return Ok(()) };
        let Plain { ops, views, inputs } = &mut plain;
        let counts = inputs::Counts { tokens: shape.counts.tokens, outputs: shape.counts.rows };
        let mut taps = Taps { encoder: Encoder { is_plain: true, ..self.encoder(shape) }, views, landing };
        let mut run = || {
            taps.encoder.begin()?;
            ops.iter().enumerate().try_for_each(|(i, nodes)| {
                inputs.run(i, counts, &mut taps, |taps| {
                    // A kernel that is launched first may have to be given memory.
                    let _alone = self.parts.context.gate.alone();
                    nodes.iter().try_for_each(|node| taps.encoder.node(node))
                })
            })
        };
        let done = run();
        let Taps { landing, .. } = taps;
        (self.landing, self.parts.plain) = (Some(landing), Some(plain));
        done
    }

    fn graph_key(&self, shape: Shape, part: usize) -> GraphKey {
        (shape.counts, shape.most_pages, part, self.layout, shape.drafting)
    }

    /// Queues the nodes between the cuts `part - 1` and `part`, as a graph where they were seen before.
    fn queue_part(&mut self, shape: Shape, part: usize) -> Result<(), DriverError> {
        let key = self.graph_key(shape, part);
        if self.graphs.len() >= MAX_GRAPHS {
            self.graphs.clear();
        }
        let seen = if shape.is_decode { self.graphs.get(&key) } else { None };
        match seen {
            Some(Seen::Captured(graph)) => self.parts.stream.replay(graph)?,
            Some(Seen::Once) => {
                // A graph takes memory when it is made and when it is queued first.
                let _alone = self.parts.context.gate.alone();
                let graph = self.parts.stream.capture(|| self.encode(shape, part))?;
                self.parts.stream.replay(&graph)?;
                self.graphs.insert(key, Seen::Captured(graph));
            }
            None => {
                // A kernel that is launched first may have to be given memory.
                let _alone = self.parts.context.gate.alone();
                self.encode(shape, part)?;
                if shape.is_decode {
                    self.graphs.insert(key, Seen::Once);
                }
            }
        }
        Ok(())
    }

    /// Queues what picks and copies the rows that the step returns.
    fn queue_output(&mut self, shape: Shape) -> Result<(), DriverError> {
        if let Some(args) = self.pick {
            self.encoder(shape).pick(&args)?;
        }
        self.fetch(shape.counts)
    }

    /// Runs the host's share of the step.
    fn share(&mut self) -> Result<(), DriverError> {
        if !self.has_host() {
            return Ok(());
        }
        let shape = self.shape();
        let n = self.cuts(shape.list).len();
        let shared = handover::run(&mut Shared { program: self, shape }, n).and_then(|()| self.queue_output(shape));
        if let (Err(_), Some(host)) = (&shared, &mut self.parts.host) {
            host.release();
        }
        shared
    }

    fn encoder(&self, shape: Shape) -> Encoder<'_> {
        let parts = &self.parts;
        Encoder {
            stream: &parts.stream,
            kernels: &parts.kernels,
            ropes: &parts.ropes,
            scratch: parts.scratch,
            step: parts.tables.step(shape.counts),
            given: parts.tables.given(&self.batch),
            counts: shape.counts,
            most_pages: shape.most_pages,
            longest: shape.longest,
            singles: if shape.list == List::All { shape.singles } else { shape.counts.chunks },
            max_draft: parts.limits.max_draft,
            has_drafts: shape.drafting == Drafting::States,
            sms: parts.context.sms,
            max_shared: parts.context.max_shared,
            half: Half::Registers,
            is_traced: self.is_traced,
            early: self.early,
            n_launches: 0,
            normed: None,
            listed: None,
            is_plain: false,
            next: &[],
            ahead: Ahead::default(),
            unsummed: [None; 2],
        }
    }

    /// Queues the nodes of a part one by one.
    fn encode(&self, shape: Shape, part: usize) -> Result<(), DriverError> {
        let parts = &self.parts;
        let mut encoder = self.encoder(shape);
        let (nodes, cuts) = (self.lists().nodes(shape.list), self.cuts(shape.list));
        let first = match part.checked_sub(1) {
            Some(before) => cuts[before] + 1,
            None => {
                encoder.begin()?;
                self.mark(0)?;
                0
            }
        };
        let end = cuts.get(part).copied().unwrap_or(nodes.len());
        for (i, node) in nodes.iter().enumerate().take(end).skip(first) {
            encoder.next = nodes.get(i + 1..end).unwrap_or_default();
            encoder.node(node)?;
            self.mark(i + 1)?;
            if let (Some(route), Some((trace, _)), true) = (node.route(), &self.trace, self.traces_step()) {
                let (at, len) = self.trace_place(route, shape.counts);
                // SAFETY: the ids were just queued, and the trace has room for every router's at the limits.
                unsafe { parts.stream.copy(trace.ptr() + at as u64, route.ids.ptr, len)? };
            }
        }
        Ok(())
    }

    /// Marks the time, but of the draft head, which is no part of the model's.
    fn mark(&self, i: usize) -> Result<(), DriverError> {
        if self.batch.is_draft() { Ok(()) } else { self.times().mark(i, &self.parts.stream) }
    }

    /// The logits of the step in flight.
    fn logits(&self) -> View {
        self.head().map_or(self.parts.logits, |head| head.logits)
    }

    /// The hidden states that it returns: of the rows that are asked for, and of all tokens.
    fn hidden(&self) -> [Option<View>; 2] {
        match self.head() {
            Some(head) => [head.hidden, None],
            None => [self.parts.hidden, self.parts.head.as_ref().map(|head| head.source)],
        }
    }

    /// Where a router's ids go in the trace, and how many bytes they are.
    fn trace_place(&self, route: &RouteNode, counts: Counts) -> (usize, usize) {
        let before: usize = self.parts.routing.routers()[..route.index].iter().map(|router| router.n_used).sum();
        let rows = route.ids.rows.count(counts.tokens, counts.rows);
        (4 * before * self.parts.limits.max_tokens, 4 * rows * route.n_used)
    }

    /// Queues the copies of what a step returns.
    fn fetch(&mut self, counts: Counts) -> Result<(), DriverError> {
        let (logits, [hidden, all_hidden]) = (self.logits(), self.hidden());
        let is_traced = self.traces_step();
        let parts = &mut self.parts;
        let faults = parts.tables.step(counts).faults;
        // SAFETY: the views lie in the program's arena with at least so many rows; the host reads after it has waited.
        unsafe {
            parts.stream.download(&mut parts.host_faults, 0, faults, 4 * counts.chunks)?;
            parts.picker.fetch(&parts.stream)?;
            // Rows travel one by one where others need not: `wanted` says which.
            let row_bytes = 4 * parts.n_vocab;
            for row in (0..counts.rows).filter(|&row| parts.picker.is_row_wanted(row)) {
                let at = row * row_bytes;
                parts.stream.download(&mut parts.host_logits, at, logits.ptr + at as u64, row_bytes)?;
            }
            if let (Some(hidden), true) = (hidden, counts.rows > 0) {
                let bytes = 4 * counts.rows * hidden.width;
                parts.stream.download(&mut parts.host_hidden, 0, hidden.ptr, bytes)?;
            }
            if let Some(rows) = all_hidden {
                parts.stream.download(&mut parts.host_rows, 0, rows.ptr, 4 * counts.tokens * rows.width)?;
            }
            if let (Some((device, host)), true) = (&mut self.trace, is_traced) {
                parts.stream.download(host, 0, device.ptr(), device.bytes())?;
            }
        }
        Ok(())
    }

    /// Reads the smallest (router, token) that every chunk reported.
    fn read_faults(&mut self, n_chunks: usize) {
        self.faults.clear();
        let words = &self.parts.host_faults.words::<u32>()[..n_chunks];
        let mut found: Vec<(u32, u32)> =
            words.iter().zip(0..).filter(|&(&word, _)| word != u32::MAX).map(|(&word, chunk)| (word, chunk)).collect();
        found.sort_unstable();
        self.faults.extend(found.into_iter().map(|(word, chunk)| Fault {
            chunk,
            layer: self.parts.routers.get((word >> 20) as usize).copied().unwrap_or(0),
            token: word & 0xf_ffff,
        }));
    }

    fn read_routing(&mut self) {
        let counts = Counts::of(&self.batch);
        self.parts.routing.start(&self.batch);
        let Some((_, host)) = &self.trace else { return };
        let ids = host.words::<u32>();
        let places: Vec<_> = self
            .lists()
            .nodes
            .iter()
            .filter_map(|node| match node {
                Node::Route(route) => Some((route.ids.rows, self.trace_place(route, counts))),
                _ => None,
            })
            .collect();
        for (rows, (at, len)) in places {
            self.parts.routing.record(rows, &ids[at / 4..][..len / 4], &self.batch);
        }
    }

    fn device_error(&mut self, e: DriverError) -> StepError {
        let device = self.parts.context.name.clone();
        let DriverError { call, why, .. } = e.clone();
        self.broken = Some(e);
        Failure::all(Cause::Device { device, op: call, why }).into()
    }
}

/// The memory of a step that runs op by op.
struct Taps<'a> {
    encoder: Encoder<'a>,
    views: &'a [View],
    landing: Pinned,
}

impl Taps<'_> {
    /// Copies the first `n` words of a buffer to the landing.
    fn fetch(&mut self, buf: Buf, n: usize) -> Result<(), DriverError> {
        // SAFETY: the buffer has so many words at the limits, and the host reads after it has waited.
        unsafe { self.encoder.stream.download(&mut self.landing, 0, self.views[buf.0 as usize].ptr, 4 * n)? };
        self.encoder.stream.wait()
    }
}

impl inputs::Memory for Taps<'_> {
    type Error = DriverError;

    fn numbers(&mut self, buf: Buf, n: usize) -> Result<Cow<'_, [f32]>, DriverError> {
        self.fetch(buf, n)?;
        Ok(Cow::Borrowed(&self.landing.words()[..n]))
    }

    fn ids(&mut self, buf: Buf, n: usize) -> Result<Vec<u32>, DriverError> {
        self.fetch(buf, n)?;
        Ok(self.landing.words()[..n].to_vec())
    }

    fn put_ids(&mut self, buf: Buf, ids: &[u32]) -> Result<(), DriverError> {
        self.landing.words_mut()[..ids.len()].copy_from_slice(ids);
        // SAFETY: the buffer has so many ids at the limits, and the landing stays as it is until the copy is done.
        unsafe { self.encoder.stream.upload(self.views[buf.0 as usize].ptr, &self.landing, 4 * ids.len())? };
        self.encoder.stream.wait()
    }
}

/// A step that the host has a share in.
struct Shared<'a> {
    program: &'a mut CudaProgram,
    shape: Shape,
}

impl Shared<'_> {
    /// For launches among copies and waits, which each begins behind.
    fn behind(&self) -> Encoder<'_> {
        Encoder { early: false, ..self.program.encoder(self.shape) }
    }

    /// Whether part `i` is a graph.
    fn is_captured(&self, i: usize) -> bool {
        let key = self.program.graph_key(self.shape, i);
        self.shape.is_decode && matches!(self.program.graphs.get(&key), Some(Seen::Captured(_)))
    }

    /// Handover `i`, and its rows in this step.
    fn node(&self, i: usize) -> Option<(HostNode, usize)> {
        let cuts = self.program.cuts(self.shape.list);
        match self.program.lists().nodes(self.shape.list)[*cuts.get(i)?] {
            Node::HostExperts(node) => {
                Some((node, node.experts.x.rows.count(self.shape.counts.tokens, self.shape.counts.rows)))
            }
            _ => None,
        }
    }
}

impl Lane for Shared<'_> {
    type Error = DriverError;

    fn waits(&self, i: usize) -> bool {
        self.is_captured(i + 1) && self.program.parts.host.as_ref().is_some_and(Host::waits)
    }

    /// Without rows there is nothing to compute.
    fn is_computed(&self, i: usize) -> bool {
        let host = self.program.parts.host.as_ref();
        host.zip(self.node(i)).is_some_and(|(host, (_, rows))| rows > 0 && host.is_computed(rows))
    }

    fn queue(&mut self, i: usize) -> Result<(), DriverError> {
        // Kernels beside a part that is no graph yet may be launched for the first time.
        let gate = (!self.is_captured(i)).then(|| Arc::clone(&self.program.parts.context.gate));
        let alone = || gate.as_deref().map(Gate::alone);
        if let Some((before, (node, rows))) = i.checked_sub(1).and_then(|before| Some((before, self.node(before)?))) {
            let is_computed = self.is_computed(before);
            let Parts { host: Some(host), stream, .. } = &mut self.program.parts else { return Ok(()) };
            if is_computed {
                host.take_back(stream, &node, rows)?;
                let from = host.rows();
                if let Some(hot) = &node.hot {
                    let _alone = alone();
                    self.behind().hot_merge(hot, from, rows)?;
                }
            } else if rows > 0 {
                host.stage(stream, node.index)?;
                let _alone = alone();
                self.program.encoder(self.shape).node(&Node::HostExperts(node))?;
                let Parts { host: Some(host), stream, .. } = &self.program.parts else { return Ok(()) };
                host.unstage(stream)?;
            }
            let at = self.program.cuts(self.shape.list)[before];
            self.program.times().mark(at + 1, &self.program.parts.stream)?;
        }
        self.program.queue_part(self.shape, i)?;
        match self.node(i).filter(|_| self.is_computed(i)) {
            Some((node, rows)) => {
                let Parts { host: Some(host), stream, .. } = &mut self.program.parts else { return Ok(()) };
                host.hand_over(stream, &node, rows)?;
                // The device computes its share beside the host.
                let ids = node.experts.ids.ptr;
                let _alone = alone();
                node.hot.map_or(Ok(()), |hot| self.behind().hot_experts(&hot, ids, rows))
            }
            None => Ok(()),
        }
    }

    fn reach(&mut self, _: usize) -> Result<(), DriverError> {
        let Parts { host: Some(host), stream, .. } = &mut self.program.parts else { return Ok(()) };
        host.reach(stream)
    }

    fn compute(&mut self, i: usize) -> Result<(), DriverError> {
        if let (Some((node, rows)), Some(host)) = (self.node(i), &mut self.program.parts.host) {
            host.compute(&node, rows);
        }
        Ok(())
    }
}

impl Program for CudaProgram {
    fn limits(&self) -> Limits {
        self.parts.limits
    }

    fn kinds(&self) -> Kinds {
        self.parts.kinds
    }

    fn n_vocab(&self) -> usize {
        self.parts.n_vocab
    }

    fn d_input(&self) -> Option<usize> {
        self.parts.takes.d_input
    }

    fn draft_width(&self) -> Option<usize> {
        self.parts.takes.d_hidden
    }

    fn submit(&mut self, batch: &Batch) -> Result<(), StepError> {
        batch.check_with(self.parts.limits, self.parts.kinds, self.parts.n_vocab, self.parts.takes)?;
        self.parts.slots.check(batch)?;
        if let Some(e) = self.broken.clone() {
            return Err(self.device_error(e));
        }
        self.batch.copy_from(batch);
        self.has_drafts = self.parts.slots.are_in(batch);
        self.queue().map_err(|e| self.device_error(e))?;
        self.parts.slots.computed(batch);
        Ok(())
    }

    fn is_lost(&self) -> bool {
        self.broken.is_some()
    }

    fn wait(&mut self) -> Result<Output<'_>, StepError> {
        let shared = self.parts.context.enter().and_then(|()| self.share());
        let waited = shared.and_then(|()| self.parts.stream.wait()).and_then(|()| {
            let longest = self.batch.chunks.iter().map(|c| c.len as usize).max().unwrap_or(0);
            let list = self.list(Counts::of(&self.batch), longest) as usize;
            if self.batch.is_draft() {
                return Ok(());
            }
            self.times[self.layout as usize].add(list)?;
            let Parts { host: Some(host), stream, .. } = &mut self.parts else { return Ok(()) };
            // A step that is watched takes longer.
            let is_watched = self.is_traced || self.times[self.layout as usize].is_on();
            let tokens = self.batch.chunks.iter().map(|c| c.len as usize).sum();
            let step = hot::Step { tokens, is_single: longest == 1, time: self.begin.elapsed() };
            if is_watched { Ok(()) } else { host.over(stream, step) }
        });
        if let Err(e) = waited {
            return Err(self.device_error(e));
        }
        if let (Some(host), false) = (&mut self.parts.host, self.batch.is_draft()) {
            host.finish_step()?;
        }
        self.read_faults(self.batch.chunks.len());
        if self.traces_step() {
            self.read_routing();
        }
        let n_rows = self.batch.rows.len();
        let [hidden, all_hidden] = self.hidden().map(|view| view.map_or(0, |view| view.width));
        let last = (0..n_rows).rev().find(|&row| matches!(self.batch.asks[row], Ask::Logits));
        self.parts.picker.read(&self.batch, self.parts.host_logits.words(), &mut self.picks);
        Ok(Output {
            logits: &self.parts.host_logits.words()[..last.map_or(0, |row| row + 1) * self.parts.n_vocab],
            picks: &self.picks,
            hidden: &self.parts.host_hidden.words()[..n_rows * hidden],
            all_hidden: &self.parts.host_rows.words()[..self.batch.tokens.len() * all_hidden],
            faults: &self.faults,
            routing: self.parts.routing.ids().filter(|_| !self.batch.is_draft()),
        })
    }

    fn routers(&self) -> &[RouterInfo] {
        self.parts.routing.routers()
    }

    fn trace_routing(&mut self, is_on: bool) {
        if is_on && self.trace.is_none() {
            let numbers: usize = self.parts.routing.routers().iter().map(|router| router.n_used).sum();
            let bytes = 4 * numbers * self.parts.limits.max_tokens;
            let context = &self.parts.context;
            let memory = context.enter().and_then(|()| Memory::new(context, bytes));
            self.trace = memory.and_then(|memory| Ok((memory, Pinned::new(context, bytes)?))).ok();
        }
        // Without memory for it nothing is traced.
        self.is_traced = is_on && self.trace.is_some();
        self.parts.routing.turn(self.is_traced, self.parts.limits.max_outputs);
    }

    fn stream_stats(&self) -> Option<StreamStats> {
        self.parts.host.as_ref().and_then(Host::stream_stats)
    }

    fn set_interrupt(&mut self, flag: Arc<AtomicBool>) {
        if let Some(host) = &mut self.parts.host {
            host.set_interrupt(flag);
        }
    }

    fn copy_state(&mut self, from: u32, to: u32) {
        let n_states = self.parts.limits.n_states;
        assert!((from.max(to) as usize) < n_states, "states {from} and {to} of {n_states}");
        if from == to || self.broken.is_some() {
            return;
        }
        self.parts.slots.copied(from, to);
        let copy = || {
            self.parts.context.enter()?;
            for state in &self.parts.states {
                let slot = |i: u32| state.ptr + 4 * u64::from(i) * state.len as u64;
                // SAFETY: both slots lie inside the state's memory and are not the same.
                unsafe { self.parts.stream.copy(slot(to), slot(from), 4 * state.len)? };
            }
            Ok(())
        };
        if let Err(e) = copy() {
            // The next step reports it.
            self.broken = Some(e);
        }
    }

    fn saver(&mut self) -> Option<&mut dyn Save> {
        None
    }

    fn drafts(&mut self) -> Option<&mut dyn Drafts> {
        Some(self)
    }

    fn profiler(&mut self) -> Option<&mut dyn Profile> {
        Some(self)
    }

    fn input_sums(&mut self) -> Option<&mut dyn SumInputs> {
        if self.parts.plain.is_some() { Some(self) } else { None }
    }
}

impl Drafts for CudaProgram {
    fn commit(&mut self, slot: u32, n_accepted: usize) {
        self.parts.slots.commit(slot, n_accepted);
    }

    fn is_settled(&mut self) -> bool {
        self.is_settled
    }
}

impl Profile for CudaProgram {
    fn set_enabled(&mut self, is_on: bool) {
        let mut turn = |is_on| self.times.iter_mut().try_for_each(|times| times.turn(is_on));
        let turned = self.parts.context.enter().and_then(|()| turn(is_on));
        if turned.is_err() {
            // Without events nothing is timed.
            let _ = turn(false);
        }
    }

    fn times(&self) -> &[OpTime] {
        self.times[self.layout as usize].rows()
    }
}

impl SumInputs for CudaProgram {
    fn trace(&mut self, trace: InputTrace) {
        let (limits, context) = (self.parts.limits, &self.parts.context);
        let Some(Plain { inputs, .. }) = &mut self.parts.plain else { return };
        if trace != InputTrace::Off && self.landing.is_none() {
            let most = inputs.most_numbers(inputs::Counts { tokens: limits.max_tokens, outputs: limits.max_outputs });
            self.landing = context.enter().and_then(|()| Pinned::new(context, most.saturating_mul(4))).ok();
        }
        // Without memory for it nothing is traced.
        if self.landing.is_some() {
            inputs.turn(trace);
        }
    }

    fn sums(&self) -> &[InputSums] {
        let plain = self.parts.plain.as_ref().filter(|_| self.landing.is_some());
        plain.map_or(&[], |plain| plain.inputs.sums())
    }
}

impl Drop for CudaProgram {
    fn drop(&mut self) {
        if let Some(host) = &mut self.parts.host {
            host.release();
        }
        // What runs still reads the memory that goes now.
        if self.parts.context.enter().is_ok() {
            let _ = self.parts.stream.wait();
        }
    }
}
