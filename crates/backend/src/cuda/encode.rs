//! From nodes to launches: fills the arguments of each kernel for the counts of a step and queues it.

use std::cell::RefCell;
use std::collections::HashMap;

use super::args;
use super::driver::{DriverError, Function, Geometry, Module, Ptr, Stream};
use super::encode_batch::{BatchScratch, up_args};
use super::few;
use super::few_launch::{self, Device, Half};
use super::launch::Launch;
use super::matmul;
use super::nodes::{
    Act, AttendNode, AttentionNode, DeltaInNode, DenseUp, DownNode, ExpertsNode, FewLinearNode, HotNode, Late,
    LatentOutNode, LatentQNode, LogitParts, Mat, ModuleId, Modules, Node, Part, PostNormNode, QkvNode, QkvPartNode,
    RouteNode, RouterNode, UpNode, View, is_tiled,
};
use super::tables::Counts;
use super::wide::{self, Wide};

/// The modules of a program on the device, and the entry points that were asked for.
pub struct Kernels {
    modules: Vec<Module>,
    functions: RefCell<HashMap<(ModuleId, &'static str), Function>>,
}

impl Kernels {
    /// From modules by their index.
    pub fn new(modules: Vec<Module>) -> Kernels {
        Kernels { modules, functions: RefCell::default() }
    }

    fn get(&self, module: ModuleId, entry: &'static str) -> Result<Function, DriverError> {
        if let Some(function) = self.functions.borrow().get(&(module, entry)) {
            return Ok(*function);
        }
        let function = self.modules[module].function(entry, has_all_shared(entry))?;
        self.functions.borrow_mut().insert((module, entry), function);
        Ok(function)
    }
}

/// Whether a kernel runs beside those whose weights go through shared memory.
fn has_all_shared(entry: &str) -> bool {
    entry.starts_with("few_")
        || matches!(
            entry,
            "attend"
                | "attend_long"
                | "attend_merge"
                | "router"
                | "router_added"
                | "post_norm"
                | "delta_in"
                | "delta_net"
        )
}

/// Shares of a row of logits, as `pick.cu` has it.
pub const PICK_PARTS: usize = 64;

/// A rotary embedding on the device.
#[derive(Clone, Copy, Debug)]
pub struct RopeView {
    pub inv_freq: Ptr,
    pub table: Ptr,
    pub half: usize,
    pub factor: f32,
    pub interleaved: bool,
}

/// Scratch that ops share.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scratch {
    /// A product that has no buffer in the plan.
    pub apart: Ptr,
    pub partial: Ptr,
    pub first: Ptr,
    pub pairs: Ptr,
    /// Activations of a product of many rows.
    pub packed: Ptr,
    pub batch: BatchScratch,
}

/// What is the same for all launches of a step.
pub struct Encoder<'a> {
    pub stream: &'a Stream,
    pub kernels: &'a Kernels,
    pub ropes: &'a [RopeView],
    pub scratch: Scratch,
    pub step: args::Step,
    pub counts: Counts,
    /// Maximum number of pages that a sequence of the step has, rounded up to a bucket.
    pub most_pages: usize,
    /// Longest chunk.
    pub longest: usize,
    pub sms: usize,
    /// Bytes of shared memory that a block may have.
    pub max_shared: usize,
    /// What the next launch whose weights go through shared memory takes of a multiprocessor.
    pub half: Half,
    /// The router's choice is read between launches.
    pub is_traced: bool,
    /// Programmatic dependent launch.
    pub early: bool,
    /// Launches so far.
    pub n_launches: usize,
}

impl Encoder<'_> {
    fn rows(&self, view: &View) -> usize {
        view.rows.count(self.counts.tokens, self.counts.rows)
    }

    pub(super) fn run<A>(&mut self, module: ModuleId, launch: Launch, args: &A) -> Result<(), DriverError> {
        let Launch { entry, grid, block, shared } = launch;
        if grid.contains(&0) {
            return Ok(());
        }
        let function = self.kernels.get(module, entry)?;
        let geometry = Geometry { grid, block, shared };
        self.n_launches += 1;
        // SAFETY: `args` is the struct of this kernel; its addresses are the program's own, of the lengths that the
        // plan and the limits give, and live as long as it.
        unsafe { self.stream.launch(&function, geometry, args, self.early) }.map_err(|e| DriverError {
            call: format!("{} of {entry}, {grid:?} blocks of {block} threads, {shared} bytes shared", e.call),
            ..e
        })
    }

    /// What comes before the first op: the angles of this step's positions.
    pub fn begin(&mut self) -> Result<(), DriverError> {
        for i in 0..self.ropes.len() {
            let RopeView { inv_freq, table, half, factor, .. } = self.ropes[i];
            let rows = self.counts.tokens;
            let positions = self.step.positions;
            let (rows_, half_) = (rows as u32, half as u32);
            let args = args::RopeTable { positions, inv_freq, table, rows: rows_, half: half_, factor, reserved: 0 };
            self.run(Modules::ROPE, Launch::each("rope_table", rows * half, 128), &args)?;
        }
        Ok(())
    }

    /// Queues a node.
    pub fn node(&mut self, node: &Node) -> Result<(), DriverError> {
        match *node {
            Node::Embed { table, scale, out } => {
                let rows = self.rows(&out);
                let args = args::Embed {
                    ids: self.step.ids,
                    table: table.data,
                    out: out.ptr,
                    rows: rows as u32,
                    d: out.width as u32,
                    scale,
                    reserved: 0,
                };
                self.run_some(rows, table.module, |rows| matmul::embed(table.dtype, rows, out.width), &args)
            }
            Node::Linear { x, ref parts } => self.linear(&x, self.rows(&x), parts),
            Node::GatedLinear { x, gate, up, act, out, prologue } => {
                let (rows, sms) = (self.rows(&x), self.sms);
                let args = args::GatedLinear {
                    x: x.ptr,
                    gate: gate.data,
                    up: up.data,
                    out: out.ptr,
                    rows: rows as u32,
                    k: gate.k as u32,
                    n: gate.n as u32,
                    act: act.kind,
                    alpha: act.alpha,
                    limit: act.limit,
                    prologue,
                };
                if let Some(module) = gate.batch.filter(|_| Self::is_batch(rows)) {
                    return self.gated_linear_batch(module, gate, args);
                }
                if let Some(module) = gate.wide.filter(|_| rows >= wide::FROM) {
                    let entries = ["gated_linear_pack", "gated_linear_wide"];
                    let wide = wide::dense(gate.dtype, entries, rows, 2 * gate.n, sms);
                    return self.wide(module, wide, |wide| args::WideGatedLinear { op: args, wide });
                }
                let launch = |rows| matmul::gated_linear(gate.dtype, rows, gate.k, gate.n, sms);
                self.run_some(rows, gate.module, launch, &args)
            }
            Node::GatedLinearApart { x, gate, up, act, out } => {
                let apart = View { ptr: self.scratch.apart, ..out };
                let rows = self.rows(&x);
                self.linear(&x, rows, &[Part { w: gate, bias: 0, out }])?;
                self.linear(&x, rows, &[Part { w: up, bias: 0, out: apart }])?;
                self.gated_act(&out, apart.ptr, act, &out)
            }
            Node::RmsNorm { x, residual, w, eps, out } => {
                let rows = self.rows(&x);
                let d = x.width as u32;
                let args =
                    args::RmsNorm { x: x.ptr, residual, w, out: out.ptr, rows: rows as u32, d, eps, reserved: 0 };
                self.run(Modules::NORM, Launch::rows("rms_norm", rows, x.width), &args)
            }
            Node::HeadNorm { x, w, eps, d_head, gate } => {
                let n = self.rows(&x) * (x.width / d_head);
                let args = args::HeadNorm { x: x.ptr, w, gate, n: n as u64, d: d_head as u32, eps };
                let entry = if gate == 0 { "head_norm" } else { "gated_norm" };
                self.run(Modules::NORM, Launch::each(entry, n * 32, 128), &args)
            }
            Node::Rope { x, rope, n_head, d_head } => {
                let RopeView { table, half, interleaved, .. } = self.ropes[rope];
                let rows = self.rows(&x);
                let args = args::Rope {
                    x: x.ptr,
                    table,
                    rows: rows as u32,
                    n_head: n_head as u32,
                    d_head: d_head as u32,
                    half: half as u32,
                    interleaved: u32::from(interleaved),
                    reserved: 0,
                };
                self.run(Modules::ROPE, Launch::each("rope", rows * n_head * half, 128), &args)
            }
            Node::Heads { whole, part, first, width, d_head, is_split } => {
                let n = self.rows(&whole) * (whole.width / d_head);
                let (from, to) = if is_split { (whole.ptr, part.ptr) } else { (part.ptr, whole.ptr) };
                let args = args::Heads {
                    from,
                    to,
                    n: n as u64,
                    width: width as u32,
                    d_head: d_head as u32,
                    first: first as u32,
                    is_split: u32::from(is_split),
                };
                self.run(Modules::ELEMENTWISE, Launch::each("heads", n * width, 256), &args)
            }
            Node::HeadLinear { x, w, transposed, out, n_head } => {
                let rows = self.rows(&x);
                let (n, k) = (out.width / n_head, x.width / n_head);
                let args = args::HeadLinear {
                    x: x.ptr,
                    w: w.data,
                    out: out.ptr,
                    rows: rows as u32,
                    n_head: n_head as u32,
                    n: n as u32,
                    k: k as u32,
                };
                let launch = |rows| matmul::head_linear(w.dtype, transposed, rows, n_head, n, k);
                self.run_some(rows, w.module, launch, &args)
            }
            Node::GatedAct { gate, up, act, out } => self.gated_act(&gate, up.ptr, act, &out),
            Node::Add { x, y } => self.elementwise("add", &x, |args| args.y = y.ptr),
            Node::Scale { x, scale } => self.elementwise("scale", &x, |args| args.a = scale),
            Node::ScaleBy { x, w } => self.elementwise("scale_by", &x, |args| args.y = w),
            Node::Softcap { x, cap } => self.elementwise("softcap", &x, |args| args.a = cap),
            Node::SigmoidGate { x, gate } => self.elementwise("sigmoid_gate", &x, |args| {
                args.y = gate.ptr;
                args.width = x.width as u32;
                args.per_row = u32::from(gate.width == 1);
            }),
            Node::DecayBeta { a, b, a_log, dt_bias, g, beta } => {
                let n = a.width;
                let len = self.rows(&a) * n;
                let (g, beta) = (g.ptr, beta.ptr);
                let (a, b, len_, n) = (a.ptr, b.ptr, len as u64, n as u64);
                let args = args::DecayBeta { a, b, a_log, dt_bias, g, beta, len: len_, n };
                self.run(Modules::ELEMENTWISE, Launch::each("decay_beta", len, 256), &args)
            }
            Node::KvAppend { module, cache, k, v } => {
                let rows = self.counts.tokens;
                let args = args::KvAppend {
                    step: self.step,
                    k: k.ptr,
                    v,
                    k_cache: cache.k,
                    v_cache: cache.v,
                    rows: rows as u32,
                    n_kv: cache.n_kv as u32,
                    d_k: cache.d_k as u32,
                    d_v: cache.d_v as u32,
                    windowed: u32::from(cache.windowed),
                    reserved: 0,
                };
                let launch = Launch { entry: "kv_append", grid: [rows as u32, 1, 1], block: 256, shared: 0 };
                self.run(module, launch, &args)
            }
            Node::Qkv(ref node) => self.qkv(node),
            Node::Attention(ref node) => self.attention(node),
            Node::CausalConv { module, x, w, width, state, out } => {
                let args = args::CausalConv {
                    step: self.step,
                    x: x.ptr,
                    w,
                    state: state.ptr,
                    out: out.ptr,
                    state_len: state.len as u64,
                    d: x.width as u32,
                    reserved: 0,
                };
                let tile = (width - 1).max(32);
                let grid = [x.width.div_ceil(128), self.longest.div_ceil(tile), self.counts.chunks].map(|n| n as u32);
                self.run(module, Launch { entry: "causal_conv", grid, block: 128, shared: 0 }, &args)
            }
            Node::DeltaNet { module, inputs: [q, k, v, g, beta], heads, state, out } => {
                let args = args::DeltaNet {
                    step: self.step,
                    q: q.ptr,
                    k: k.ptr,
                    v: v.ptr,
                    g: g.ptr,
                    beta: beta.ptr,
                    state: state.ptr,
                    out: out.ptr,
                    state_len: state.len as u64,
                    n_k_head: heads.n_k_head as u32,
                    n_v_head: heads.n_v_head as u32,
                    d_v: heads.d_v as u32,
                    tiled: u32::from(is_tiled(heads.sharing)),
                };
                let grid = [heads.d_v.div_ceil(16), heads.n_v_head, self.counts.chunks].map(|n| n as u32);
                self.run(module, Launch { entry: "delta_net", grid, block: 128, shared: 0 }, &args)
            }
            Node::Route(ref node) => self.route(node),
            Node::Experts(ref node) => self.experts(node),
            Node::HostExperts(ref node) => self.experts(&node.experts),
            Node::FewLinear(ref node) => self.few_linear(node),
            Node::Attend(ref node) => self.attend(node),
            Node::Router(ref node) => self.router(node),
            Node::ExpertsUp(ref node) => self.experts_up(node),
            Node::ExpertsDown(ref node) => self.experts_down(node),
            Node::PostNorm(ref node) => self.post_norm(node),
            Node::DeltaIn(ref node) => self.delta_in(node),
            Node::LatentQ(ref node) => self.latent_q(node),
            Node::LatentOut(ref node) => self.latent_out(node),
            Node::Combine { x, add, y, weights, norm_w, eps, norm_out } => {
                let rows = self.rows(&x);
                let args = args::Combine {
                    x: x.ptr,
                    y: y.ptr,
                    weights: weights.ptr,
                    norm_w,
                    norm_out,
                    rows: rows as u32,
                    n_used: weights.width as u32,
                    d: x.width as u32,
                    add: u32::from(add),
                    eps,
                    ..Default::default()
                };
                self.combine(rows, &args)
            }
            Node::Select { x, out } => {
                let n_rows = self.counts.rows as u32;
                let args = args::Select { x: x.ptr, rows: self.step.rows, out: out.ptr, n_rows, d: x.width as u32 };
                let n = self.counts.rows * x.width;
                self.run(Modules::ELEMENTWISE, Launch::each("select_rows", n, 256), &args)
            }
        }
    }

    /// A launch for rows, of which there may be none.
    fn run_some<A>(
        &mut self,
        rows: usize,
        module: ModuleId,
        launch: impl FnOnce(usize) -> Launch,
        args: &A,
    ) -> Result<(), DriverError> {
        if rows == 0 { Ok(()) } else { self.run(module, launch(rows), args) }
    }

    pub(super) fn combine(&mut self, rows: usize, args: &args::Combine) -> Result<(), DriverError> {
        self.run(Modules::COMBINE, Launch::rows("combine", rows, args.d as usize), args)
    }

    /// The two launches of a product of many rows.
    fn wide<A>(
        &mut self,
        module: ModuleId,
        wide: Wide,
        args: impl FnOnce(args::Packed) -> A,
    ) -> Result<(), DriverError> {
        let Wide { pack, product, n_groups, width } = wide;
        let args = args(args::Packed { packed: self.scratch.packed, n_groups, width });
        self.run(module, pack, &args)?;
        self.run(module, product, &args)
    }

    fn linear(&mut self, x: &View, rows: usize, parts: &[Part]) -> Result<(), DriverError> {
        let w = parts[0].w;
        if w.batch.is_some() && Self::is_batch(rows) {
            return self.linear_batch(x, rows, [parts, &[]], args::Prologue::default(), false);
        }
        let (args, n) = linear_args(x, rows, parts);
        let sms = self.sms;
        if let Some(module) = w.wide.filter(|_| rows >= wide::FROM) {
            let wide = wide::dense(w.dtype, ["linear_pack", "linear_wide"], rows, n.iter().sum(), sms);
            return self.wide(module, wide, |wide| args::WideLinear { op: args, wide });
        }
        self.run_some(rows, w.module, |rows| matmul::linear(w.dtype, rows, w.k, &n[..parts.len()], sms), &args)
    }

    pub(super) fn device(&self) -> Device {
        Device { sms: self.sms, max_shared: self.max_shared }
    }

    fn few_linear(&mut self, node: &FewLinearNode) -> Result<(), DriverError> {
        let rows = self.rows(&node.x);
        if Self::is_batch(rows) {
            return self.few_linear_batch(node, rows);
        }
        let [first, second] = &node.parts;
        let linear = |parts: &[Part]| {
            let (args, n) = linear_args(&node.x, rows, parts);
            (args::Linear { prologue: node.prologue, add: u32::from(node.add), ..args }, n)
        };
        let (w, sms) = (first[0].w, self.sms);
        let (a, n) = linear(first);
        let (device, half, total) = (self.device(), self.half, n.iter().sum());
        let few = node.few.filter(|_| (1..=few::MAX_ROWS).contains(&rows));
        if let Some(routed) = node.routed.filter(|_| self.is_late(rows))
            && let Some(launch) = few_launch::routed(w.dtype, w.k, w.n, routed.n_expert, device, half)
        {
            self.half = half.next();
            let args =
                args::FewRouted { op: a, router: routed.router, norm: routed.norm, parts: routed.parts, reserved: 0 };
            return self.run(routed.module, launch, &args);
        }
        if let (Some(module), None) = (few, second.first())
            && let Some((launch, each)) =
                few_launch::linear(w.dtype, rows, w.k, total, node.prologue.kind > 1, device, half)
        {
            self.half = half.next();
            return self.run(module, launch, &args::FewLinear { op: a, each, stages: 0 });
        }
        if let (Some(module), None, [part], 1) = (few, second.first(), first.as_slice(), rows)
            && node.prologue.kind <= 1
            && let Some((launch, each, stages)) = few_launch::long(w.dtype, w.k, part.w.n, device)
        {
            return self.run(module, launch, &args::FewLinear { op: a, each, stages });
        }
        if let (Some(module), None, 1) = (few, second.first(), rows)
            && node.prologue.kind <= 1
            && let Some((launch, each)) = few_launch::linear_twice(w.dtype, w.k, total, device)
        {
            self.half = half.next();
            return self.run(module, launch, &args::FewLinear { op: a, each, stages: 0 });
        }
        let Some(other) = second.first() else {
            let launch = |rows| matmul::linear(w.dtype, rows, w.k, &n[..first.len()], sms);
            return self.run_some(rows, node.module, launch, &a);
        };
        let (b, n_other) = linear(second);
        let n = [total, n_other.iter().sum()];
        if let Some(module) = few
            && let Some((launch, blocks_a, [each_a, each_b])) =
                few_launch::pair([w.dtype, other.w.dtype], rows, w.k, n, device, half)
        {
            self.half = half.next();
            return self.run(module, launch, &args::FewPair { a, b, blocks_a, each_a, each_b, reserved: 0 });
        }
        let (launch, blocks_a) = matmul::linear_pair([w.dtype, other.w.dtype], rows, w.k, n, sms);
        self.run_some(rows, node.module, |_| launch, &args::LinearPair { a, b, blocks_a, reserved: 0 })
    }

    fn attend(&mut self, node: &AttendNode) -> Result<(), DriverError> {
        let n_tokens = self.counts.tokens;
        let (node, is_short) = &node.sized(n_tokens, self.most_pages, self.sms);
        let AttentionNode { cache, sinks, out, window, scale, softcap, .. } = node.attention;
        let n_splits = node.splits(n_tokens, self.most_pages, self.sms);
        let [workers, stages, bytes] = node.staged(self.most_pages, n_splits, self.max_shared);
        // One block would take longer than a launch.
        let merges = n_splits > 4;
        let rope = node.rope.map(|rope| self.ropes[rope]);
        let [q, k, v] = node.parts.map(|part| qkv_part(&part));
        let args = args::Attend {
            step: self.step,
            q,
            k,
            v,
            table: rope.map_or(0, |rope| rope.table),
            k_cache: cache.k,
            v_cache: cache.v,
            sinks,
            out: out.ptr,
            partial: self.scratch.partial,
            counters: if merges { 0 } else { node.counters },
            n_kv: cache.n_kv as u32,
            n_splits: n_splits as u32,
            window: window.min(u32::MAX as usize) as u32,
            windowed: u32::from(cache.windowed),
            half: rope.map_or(0, |rope| rope.half as u32),
            interleaved: u32::from(rope.is_some_and(|rope| rope.interleaved)),
            q_stride: node.q_stride as u32,
            n_tiles: node.tiles() as u32,
            scale,
            softcap,
            eps: node.eps,
            rows: n_tokens as u32,
            workers: workers as u32,
            stages: stages as u32,
        };
        let grid = [(n_tokens * node.tiles() * cache.n_kv * n_splits) as u32, 1, 1];
        let launch = if *is_short {
            Launch { entry: "attend", grid, block: 256, shared: 0 }
        } else {
            Launch { entry: "attend_long", grid, block: 256, shared: bytes as u32 }
        };
        self.run(node.module, launch, &args)?;
        if !merges {
            return Ok(());
        }
        let grid = [(n_tokens * node.attention.n_head) as u32, 1, 1];
        self.run(node.module, Launch { entry: "attend_merge", grid, block: 256, shared: 0 }, &args)
    }

    fn router(&mut self, node: &RouterNode) -> Result<(), DriverError> {
        let rows = self.rows(&node.x);
        if Self::is_batch(rows) {
            if let Some(added) = &node.added {
                self.post_norm(added)?;
            }
            return self.router_batch(node, rows);
        }
        if node.is_routed && self.is_late(rows) {
            return Ok(());
        }
        let (linear, n) = linear_args(&node.x, rows, &node.parts);
        let linear = args::Linear { prologue: node.prologue, ..linear };
        let args = args::Router {
            linear,
            route: self.route_args(&node.route),
            counter: if node.is_late && self.is_late(rows) { 0 } else { node.counter },
            scale: node.scale,
            ..Default::default()
        };
        let args = match node.added {
            Some(PostNormNode { x, out, a: (added, added_w, eps), .. }) => {
                let linear = args::Linear { x: x.ptr, ..args.linear };
                args::Router { linear, eps, added: added.ptr, added_w, sum: out, ..args }
            }
            None => args,
        };
        let blocks = n.iter().sum::<usize>() as u32;
        let entry = if node.added.is_some() { "router_added" } else { "router" };
        let w = node.parts[0].w;
        let block = matmul::router_threads(w.dtype, w.k);
        let launch = Launch { entry, grid: [blocks, 1, 1], block, shared: 0 };
        self.run_some(rows, node.module, |_| launch, &args)
    }

    /// Whether experts are chosen by those who read the logits.
    fn is_late(&self, rows: usize) -> bool {
        rows == 1 && !self.is_traced
    }

    fn post_norm(&mut self, node: &PostNormNode) -> Result<(), DriverError> {
        let rows = self.rows(&node.x);
        let (a, w_a, eps_a) = node.a;
        let (b, w_b, eps_b) = node.b.map_or((0, 0, 0.0), |(b, w, eps)| (b.ptr, w, eps));
        let (w, eps) = node.norm.unwrap_or((0, 0.0));
        let d = node.x.width;
        let args = args::PostNorm {
            x: node.x.ptr,
            out: node.out,
            a: a.ptr,
            w_a,
            b,
            w_b,
            w,
            scale: node.scale,
            rows: rows as u32,
            d: d as u32,
            eps_a,
            eps_b,
            eps,
            reserved: 0,
        };
        self.run(Modules::NORM, Launch::rows("post_norm", rows, d), &args)
    }

    fn latent_q(&mut self, node: &LatentQNode) -> Result<(), DriverError> {
        let rows = self.rows(&node.heads);
        if rows == 0 {
            return Ok(());
        }
        let RopeView { table, half, interleaved, .. } = self.ropes[node.rope];
        let product = node.product.map(|(_, part, _)| (part.w.dtype, part.w.k));
        let (launch, blocks, queries_at) =
            matmul::latent_q(node.w.dtype, product, rows, node.n_head, node.widths, self.sms);
        let q = node.product.map_or_else(Default::default, |(x, part, prologue)| {
            let (args, _) = linear_args(&x, rows, &[part]);
            args::Linear { prologue, ..args }
        });
        let [d_latent, d_nope, d_pe] = node.widths;
        let w = args::HeadLinear {
            x: 0,
            w: node.w.data,
            out: node.out,
            rows: rows as u32,
            n_head: node.n_head as u32,
            n: d_latent as u32,
            k: d_nope as u32,
        };
        let args = args::LatentQ {
            step: self.step,
            q,
            w,
            heads: node.heads.ptr,
            kv: node.kv.ptr,
            norm_w: node.norm_w,
            cache: node.cache.k,
            table,
            counters: node.counters,
            d_pe: d_pe as u32,
            half: half as u32,
            interleaved: u32::from(interleaved),
            windowed: u32::from(node.cache.windowed),
            transposed: u32::from(node.transposed),
            blocks,
            queries_at,
            eps: node.eps,
        };
        self.run(node.module, launch, &args)
    }

    fn latent_out(&mut self, node: &LatentOutNode) -> Result<(), DriverError> {
        let rows = self.rows(&node.out);
        if rows == 0 {
            return Ok(());
        }
        let n_splits = self.attention_sums(&node.attention)?;
        let (n_head, n, k) = (node.attention.n_head, node.w.n, node.w.k);
        let (launch, merged_at) = matmul::latent_out(node.w.dtype, rows, n_head, n, k, self.sms);
        let w = args::HeadLinear {
            x: node.attention.out.ptr,
            w: node.w.data,
            out: node.out.ptr,
            rows: rows as u32,
            n_head: n_head as u32,
            n: n as u32,
            k: k as u32,
        };
        let args = args::LatentOut { w, partial: self.scratch.partial, n_splits: n_splits as u32, merged_at };
        self.run(node.module, launch, &args)
    }

    fn delta_in(&mut self, node: &DeltaInNode) -> Result<(), DriverError> {
        let rows = self.counts.tokens;
        let [q, k, v, g, beta] = node.out;
        let heads = node.heads;
        let n = heads.n_v_head as u64;
        let gates = args::DecayBeta {
            a: node.a,
            b: node.b,
            a_log: node.a_log,
            dt_bias: node.dt_bias,
            g,
            beta,
            len: rows as u64 * n,
            n,
        };
        let args = args::DeltaIn {
            step: self.step,
            x: node.x.ptr,
            w: node.w,
            state: node.state.ptr,
            q,
            k,
            v,
            gates,
            state_len: node.state.len as u64,
            d: node.x.width as u32,
            n_k_head: heads.n_k_head as u32,
            n_v_head: heads.n_v_head as u32,
            d_k: heads.d_k as u32,
            d_v: heads.d_v as u32,
            q_scale: node.scales[0],
            k_scale: node.scales[1],
            eps: node.eps,
        };
        let grid = [(2 * heads.n_k_head + heads.n_v_head + 1) as u32, rows as u32, 1];
        self.run(node.module, Launch { entry: "delta_in", grid, block: 128, shared: 0 }, &args)
    }

    fn experts_up(&mut self, node: &UpNode) -> Result<(), DriverError> {
        let rows = self.rows(&node.experts.x);
        let (sms, device, half) = (self.sms, self.device(), self.half);
        let ExpertsNode { gate, n_expert, n_used, hidden, .. } = node.experts;
        if let (Some(dense), Some(late), true) = (node.dense, node.late, self.is_late(rows)) {
            let shape = [gate.n, gate.k];
            if let Some((launch, each)) = few_launch::experts(gate.dtype, n_used, dense.gate.n, shape, device, half) {
                self.half = half.next();
                let op =
                    args::Experts { out: hidden.ptr, prologue: node.prologue, ..dense.beside(up_args(node, rows)) };
                let route = self.late_args(&late);
                let args = args::FewExperts { op, route, each, reserved: 0, shared_norm: dense.prologue.w };
                return self.run(late.module, launch, &args);
            }
        }
        // The other kernels for few rows have no second norm.
        let is_beside = |dense: &DenseUp| dense.is_shared && !Self::is_batch(rows) && !self.is_paired(rows);
        let beside = node.dense.filter(is_beside);
        if let (Some(DenseUp { gate, up, act, out, prologue, .. }), None) = (node.dense, beside) {
            self.node(&Node::GatedLinear { x: node.experts.x, gate, up, act, out, prologue })?;
        }
        if let Some([module, _]) = node.pairs.filter(|_| self.is_paired(rows)) {
            return self.experts_up_pairs(module, node, rows);
        }
        if Self::is_batch(rows) {
            return self.experts_up_batch(node, rows);
        }
        let shared_out = node.shared.map_or(0, |(_, _, out)| out.ptr);
        let args = args::Experts { out: hidden.ptr, shared_out, prologue: node.prologue, ..up_args(node, rows) };
        let args = beside.map_or(args, |dense| dense.beside(args));
        let each = n_used + usize::from(args.n_shared > 0);
        let shared_n = if node.shared.is_some() { gate.n } else { 0 };
        if let Some(late) = node.late.filter(|_| self.is_late(rows))
            && let Some((launch, each)) =
                few_launch::experts(gate.dtype, n_used, shared_n, [gate.n, gate.k], device, half)
        {
            self.half = half.next();
            let route = self.late_args(&late);
            let args = args::FewExperts { op: args, route, each, reserved: 0, shared_norm: 0 };
            return self.run(late.module, launch, &args);
        }
        let launch = |rows| matmul::experts(gate.dtype, rows, each, n_expert, gate.n, gate.k, true, sms);
        self.run_some(rows, gate.module, launch, &args)
    }

    fn experts_down(&mut self, node: &DownNode) -> Result<(), DriverError> {
        let rows = self.rows(&node.x);
        let late = node.late.filter(|_| self.is_late(rows));
        // A dense product that has no place in the launch.
        let is_late = late.is_some() && self.down_with(node).is_some();
        let is_other = node.other.is_some() && !Self::is_batch(rows) && !self.is_paired(rows);
        let apart = node.dense.as_ref().filter(|_| !is_late && !is_other);
        if let Some(dense) = apart {
            self.few_linear(dense)?;
        }
        if let Some([_, module]) = node.pairs.filter(|_| self.is_paired(rows)) {
            return self.experts_down_pairs(module, node, rows);
        }
        if Self::is_batch(rows) {
            return self.experts_down_batch(node, rows);
        }
        let ExpertsNode { ids, down, biases: [_, _, bias], n_expert, n_used, hidden, .. } = node.experts;
        let dense = node.dense.as_ref().filter(|_| apart.is_none());
        let beside = node.shared.or(dense.map(|dense| (dense.parts[0][0].w, dense.x)));
        let (shared_w, shared_h) = beside.map_or_else(Default::default, |(w, h)| (w.data, h.ptr));
        let args = args::ExpertsDown {
            h: hidden.ptr,
            shared_h,
            share: node.share,
            ids: ids.ptr,
            weights: node.weights.ptr,
            w: down.data,
            shared_w,
            bias,
            x: node.x.ptr,
            rows: rows as u32,
            n_used: n_used as u32,
            n_expert: n_expert as u32,
            n: down.n as u32,
            k: down.k as u32,
            add: u32::from(node.add),
            shared_k: beside.map_or(0, |(w, _)| w.k as u32),
            reserved: 0,
        };
        let (device, half, k_shared) = (self.device(), self.half, beside.map(|(w, _)| w.k));
        if let Some(late) = late
            && let Some((launch, each)) = few_launch::down(down.dtype, n_used, k_shared, [down.n, down.k], device, half)
        {
            self.half = half.next();
            let route = self.late_args(&late);
            let shared_out = dense.filter(|dense| !dense.add).map_or(0, |dense| dense.parts[0][0].out.ptr);
            return self.run(late.module, launch, &args::FewDown { op: args, route, each, reserved: 0, shared_out });
        }
        let beside = beside.map(|(w, _)| (w.dtype, w.k));
        let module = node.other.filter(|_| node.dense.is_some()).unwrap_or(node.module);
        let launch = |rows| matmul::experts_down(down.dtype, rows, n_used, beside, down.n, down.k);
        self.run_some(rows, module, launch, &args)
    }

    /// The launch of the last product of the experts with the dense one of the same type beside them.
    fn down_with(&self, node: &DownNode) -> Option<few_launch::Each> {
        let ExpertsNode { down, n_used, .. } = node.experts;
        let of_dense = node.dense.as_ref().map(|dense| dense.parts[0][0].w);
        if of_dense.is_some_and(|w| w.dtype != down.dtype) {
            return None;
        }
        let k_shared = of_dense.map(|w| w.k);
        few_launch::down(down.dtype, n_used, k_shared, [down.n, down.k], self.device(), self.half)
    }

    fn elementwise(
        &mut self,
        entry: &'static str,
        x: &View,
        fill: impl FnOnce(&mut args::Elementwise),
    ) -> Result<(), DriverError> {
        let n = self.rows(x) * x.width;
        let mut args = args::Elementwise { x: x.ptr, n: n as u64, width: 1, ..Default::default() };
        fill(&mut args);
        self.run(Modules::ELEMENTWISE, Launch::each(entry, n, 256), &args)
    }

    fn gated_act(&mut self, gate: &View, up: Ptr, act: Act, out: &View) -> Result<(), DriverError> {
        self.elementwise("gated_act", gate, |args| {
            (args.y, args.out) = (up, out.ptr);
            (args.act, args.a, args.b) = (act.kind, act.alpha, act.limit);
        })
    }

    fn qkv(&mut self, node: &QkvNode) -> Result<(), DriverError> {
        let rows = self.counts.tokens;
        let n_heads: usize = node.parts.iter().map(|part| part.n_head).sum();
        let rope = node.rope.map(|rope| self.ropes[rope]);
        let mut args = args::Qkv {
            step: self.step,
            table: rope.map_or(0, |rope| rope.table),
            rows: rows as u32,
            n_heads: n_heads as u32,
            half: rope.map_or(0, |rope| rope.half as u32),
            interleaved: u32::from(rope.is_some_and(|rope| rope.interleaved)),
            windowed: u32::from(node.windowed),
            eps: node.eps,
            ..Default::default()
        };
        for (to, part) in args.parts.iter_mut().zip(&node.parts) {
            *to = qkv_part(part);
        }
        self.run(node.module, Launch::each("qkv", rows * n_heads * 32, 128), &args)
    }

    /// Picks from rows of logits, `asks` in device memory.
    pub fn pick(&mut self, args: &args::Pick) -> Result<(), DriverError> {
        let share = (args.n_vocab as usize).div_ceil(PICK_PARTS);
        let grid = [PICK_PARTS as u32, args.rows, 1];
        let shared = 4 * share as u32;
        self.run(Modules::PICK, Launch { entry: "pick_parts", grid, block: 256, shared }, args)?;
        let grid = [args.rows, 1, 1];
        self.run(Modules::PICK, Launch { entry: "pick_merge", grid, block: 256, shared: 0 }, args)
    }

    /// The arguments of attention with so many splits.
    fn attention_args(&self, node: &AttentionNode, n_splits: usize) -> args::Attention {
        args::Attention {
            step: self.step,
            q: node.q.ptr,
            k_cache: node.cache.k,
            v_cache: node.cache.v,
            sinks: node.sinks,
            out: node.out.ptr,
            partial: self.scratch.partial,
            rows: self.counts.tokens as u32,
            n_head: node.n_head as u32,
            n_kv: node.cache.n_kv as u32,
            n_splits: n_splits as u32,
            window: node.window.min(u32::MAX as usize) as u32,
            windowed: u32::from(node.cache.windowed),
            scale: node.scale,
            softcap: node.softcap,
        }
    }

    /// Attention up to the sums of its splits, or to its output where there is one; how many there are.
    fn attention_sums(&mut self, node: &AttentionNode) -> Result<usize, DriverError> {
        let n_tokens = self.counts.tokens;
        let n_splits = node.splits(n_tokens, self.most_pages, self.sms);
        let args = self.attention_args(node, n_splits);
        let grid = [n_tokens * node.tiles(), node.cache.n_kv, n_splits].map(|n| n as u32);
        self.run(node.module, Launch { entry: "attention", grid, block: 128, shared: 0 }, &args)?;
        Ok(n_splits)
    }

    fn attention(&mut self, node: &AttentionNode) -> Result<(), DriverError> {
        let (n_tokens, n_chunks) = (self.counts.tokens, self.counts.chunks);
        // Prompts: tiles of tokens of one chunk each.
        if let Some(tile) = node.tile.filter(|_| n_tokens >= 16 * n_chunks) {
            let args = self.attention_args(node, n_chunks);
            let grid = [n_tokens / tile.tokens + n_chunks, node.cache.n_kv, tile.heads].map(|n| n as u32);
            let (block, shared) = (tile.block as u32, tile.shared as u32);
            return self.run(node.module, Launch { entry: "attention_tile", grid, block, shared }, &args);
        }
        let n_splits = self.attention_sums(node)?;
        if n_splits == 1 {
            return Ok(());
        }
        let args = self.attention_args(node, n_splits);
        let grid = [n_tokens, node.n_head, 1].map(|n| n as u32);
        self.run(node.module, Launch { entry: "attention_merge", grid, block: 128, shared: 0 }, &args)
    }

    pub(super) fn route(&mut self, node: &RouteNode) -> Result<(), DriverError> {
        let rows = self.rows(&node.logits) as u32;
        let args = self.route_args(node);
        self.run(node.module, Launch { entry: "route", grid: [rows, 1, 1], block: 32, shared: 0 }, &args)
    }

    fn late_args(&self, late: &Late) -> args::Route {
        let args = self.route_args(&late.route);
        match late.parts {
            Some(LogitParts { n, k, eps }) => args::Route { n_parts: n as u32, k: k as u32, norm_eps: eps, ..args },
            None => args,
        }
    }

    pub(super) fn route_args(&self, node: &RouteNode) -> args::Route {
        let rows = self.rows(&node.logits);
        let [n_group, n_group_used, group_sums] = node.groups();
        args::Route {
            step: self.step,
            logits: node.logits.ptr,
            bias: node.bias,
            expert_scale: node.expert_scale,
            ids: node.ids.ptr,
            weights: node.weights.ptr,
            rows: rows as u32,
            n_used: node.n_used as u32,
            score: node.score(),
            n_group,
            n_group_used,
            group_sums,
            renormalise: u32::from(node.router.renormalise.is_some()),
            of_outputs: u32::from(node.logits.rows == model::plan::Rows::Outputs),
            router: node.index as u32,
            eps: node.router.renormalise.unwrap_or(0.0),
            scale: node.router.scale,
            n_parts: 0,
            k: 0,
            norm_eps: 0.0,
        }
    }

    /// The experts of a layer that have slots on the device.
    pub fn hot_experts(&mut self, hot: &HotNode, ids: Ptr, rows: usize) -> Result<(), DriverError> {
        let n_pairs = rows * hot.experts.n_used;
        let args = args::Hot {
            ids,
            table: hot.table,
            slots: hot.experts.ids.ptr,
            n_pairs: n_pairs as u32,
            n_expert: hot.n_expert as u32,
            ..Default::default()
        };
        self.run(hot.module, Launch::each("hot_ids", n_pairs, 256), &args)?;
        self.experts(&hot.experts)
    }

    /// Takes the rows of the other pairs from `host`, memory of the host as the device sees it.
    pub fn hot_merge(&mut self, hot: &HotNode, host: Ptr, rows: usize) -> Result<(), DriverError> {
        let ExpertsNode { ids, out, n_expert, n_used, .. } = hot.experts;
        let n_pairs = rows * n_used;
        let args = args::Hot {
            slots: ids.ptr,
            host,
            out: out.ptr,
            n_pairs: n_pairs as u32,
            n_slots: n_expert as u32,
            n: out.width as u32,
            ..Default::default()
        };
        let launch = Launch { entry: "hot_merge", grid: [n_pairs as u32, 1, 1], block: 256, shared: 0 };
        self.run(hot.module, launch, &args)
    }

    fn experts(&mut self, node: &ExpertsNode) -> Result<(), DriverError> {
        let rows = self.rows(&node.x);
        if rows == 0 || self.experts_batch(node, rows)? {
            return Ok(());
        }
        let ExpertsNode { gate, up, down, n_used, n_expert, act, .. } = *node;
        let with_lists = rows >= matmul::lists_from();
        let n_pairs = rows * n_used;
        let Scratch { first, pairs, apart, .. } = self.scratch;
        if with_lists {
            let (n_pairs_, n_expert_) = (n_pairs as u32, n_expert as u32);
            let args = args::ExpertLists { ids: node.ids.ptr, first, pairs, n_pairs: n_pairs_, n_expert: n_expert_ };
            self.run(Modules::EXPERT_LISTS, matmul::expert_lists(n_pairs, n_expert), &args)?;
        }
        let args = |x: Ptr, w: Mat, bias: Ptr, out: Ptr| args::Experts {
            x,
            ids: node.ids.ptr,
            w: w.data,
            bias,
            out,
            first: if with_lists { first } else { 0 },
            pairs: if with_lists { pairs } else { 0 },
            rows: rows as u32,
            n_used: n_used as u32,
            n_expert: n_expert as u32,
            n: w.n as u32,
            k: w.k as u32,
            act: act.kind,
            alpha: act.alpha,
            limit: act.limit,
            ..Default::default()
        };
        let sms = self.sms;
        let is_wide = rows >= wide::FROM;
        let project = |this: &mut Self, w: Mat, is_gated: bool, args: &args::Experts| {
            let Some(module) = w.wide.filter(|_| is_wide) else {
                let launch = matmul::experts(w.dtype, rows, n_used, n_expert, w.n, w.k, is_gated, sms);
                return this.run(w.module, launch, args);
            };
            let (entries, n) = if is_gated {
                (["experts_pack", "experts_gated_wide", "experts_gated_queue"], 2 * w.n)
            } else {
                (["experts_pack", "experts_wide", "experts_queue"], w.n)
            };
            let wide = wide::experts(w.dtype, entries, n_pairs, n_expert, n, sms);
            this.wide(module, wide, |wide| args::WideExperts { op: *args, wide })
        };
        let [gate_bias, up_bias, down_bias] = node.biases;
        let hidden = node.hidden;
        if gate.dtype == up.dtype {
            let both = args::Experts { up: up.data, up_bias, ..args(node.x.ptr, gate, gate_bias, hidden.ptr) };
            project(self, gate, true, &both)?;
        } else {
            project(self, gate, false, &args(node.x.ptr, gate, gate_bias, hidden.ptr))?;
            project(self, up, false, &args(node.x.ptr, up, up_bias, apart))?;
            self.gated_act(&hidden, apart, act, &hidden)?;
        }
        let last = args::Experts { x_per_pair: 1, ..args(hidden.ptr, down, down_bias, node.out.ptr) };
        project(self, down, false, &last)
    }
}

/// The arguments of products that share x, and the rows of each.
pub(super) fn linear_args(x: &View, rows: usize, parts: &[Part]) -> (args::Linear, [usize; 4]) {
    let mut args = args::Linear {
        x: x.ptr,
        rows: rows as u32,
        k: parts[0].w.k as u32,
        n_parts: parts.len() as u32,
        ..Default::default()
    };
    let mut n = [0; 4];
    for (i, part) in parts.iter().enumerate() {
        n[i] = part.w.n;
        args.parts[i] = args::LinearPart { w: part.w.data, bias: part.bias, out: part.out.ptr, n: part.w.n as u64 };
    }
    (args, n)
}

fn qkv_part(part: &QkvPartNode) -> args::QkvPart {
    args::QkvPart {
        x: part.x.ptr,
        w: part.w,
        cache: part.cache,
        n_head: part.n_head as u32,
        d_head: part.d_head as u32,
        is_normed: u32::from(part.is_normed),
        is_rotated: u32::from(part.is_rotated),
    }
}
