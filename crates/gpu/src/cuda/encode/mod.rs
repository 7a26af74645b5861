//! From nodes to launches: fills the arguments of each kernel for the counts of a step and queues it.
//!
//! Launches of attention and experts have files of their own, and so have those of steps of few tokens (`few.rs`) and
//! of 9 to 64 (`batch.rs`).

mod ahead;
mod attention;
pub mod batch;
mod chosen;
mod experts;
mod few;
mod reduce;
mod shares;

use std::cell::RefCell;
use std::collections::HashMap;

use model::plan::{DeltaRule, GateFactor, Gelu, Growth, N_AXES};

pub use self::ahead::Ahead;
use self::batch::BatchScratch;
pub use self::shares::Unsummed;
use super::args;
use super::delta;
use super::driver::{DriverError, Function, Geometry, Module, Ptr, Stream};
use super::few_launch::{Device, Half};
use super::launch::Launch;
use super::matmul;
use super::nodes::{Act, DeltaTiles, Mat, ModuleId, Modules, Node, Part, View, is_tiled};
use super::tables::{Counts, Given};
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
            "all_reduce_rows"
                | "attend"
                | "attend_long"
                | "attend_merge"
                | "router"
                | "router_added"
                | "post_norm"
                | "delta_in"
                | "delta_net"
                | "delta_net_drafts"
        )
}

/// What a gate's number becomes, as `gate_by` has it.
fn factor_kind(factor: GateFactor) -> u32 {
    match factor {
        GateFactor::Sigmoid => 0,
        GateFactor::Softplus => 1,
        GateFactor::Plain => 2,
    }
}

/// Shares of a row of logits, as `pick.cu` has it.
pub const PICK_PARTS: usize = 64;

/// A rotary embedding on the device.
#[derive(Clone, Copy, Debug)]
pub struct RopeView {
    pub inv_freq: Ptr,
    /// Null where all pairs turn with one axis.
    pub axes: Ptr,
    pub table: Ptr,
    pub half: usize,
    pub factor: f32,
    pub growth: Option<Growth>,
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
    pub places: Ptr,
    /// Tiles of the experts' products in addition to one an expert: of gate, up and down.
    pub further: [Ptr; 3],
    /// Activations of a product of many rows, and sums of shares of k.
    pub packed: Ptr,
    pub packed_bytes: usize,
    pub sums: Ptr,
    /// How many sums there is room for.
    pub n_sums: usize,
    /// Ranks of positions that are chosen among, and how many there is room for.
    pub ranks: Ptr,
    pub n_ranks: usize,
    /// Numbers of eight bytes that are zero at the beginning of a step, and how many.
    pub zeroed: (Ptr, usize),
    pub batch: BatchScratch,
}

/// What is the same for all launches of a step.
pub struct Encoder<'a> {
    pub stream: &'a Stream,
    pub kernels: &'a Kernels,
    pub ropes: &'a [RopeView],
    pub scratch: Scratch,
    pub step: args::Step,
    pub given: Given,
    pub counts: Counts,
    /// Maximum number of pages that a sequence of the step has, rounded up to a bucket.
    pub most_pages: usize,
    /// Longest chunk.
    pub longest: usize,
    /// Chunks of one token, or all where tokens are computed by themselves.
    pub singles: usize,
    /// Maximum number of drafts of a chunk.
    pub max_draft: usize,
    /// Chunks have drafts, or states that have to move past accepted ones.
    pub has_drafts: bool,
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
    /// Rows of x after a norm by its weights, which the node before has left in scratch.
    pub normed: Option<(Ptr, Ptr)>,
    /// The experts' output that is in the order of their lists, as bf16.
    pub listed: Option<Ptr>,
    /// Buffers hold what the plan says, as f32: the host reads them between nodes.
    pub is_plain: bool,
    /// The nodes after the one that is queued.
    pub next: &'a [Node],
    /// Rows that the launch before has packed.
    pub ahead: Ahead,
    /// Products whose shares of k are not added up yet.
    pub unsummed: [Option<Unsummed>; 2],
}

impl Encoder<'_> {
    fn rows(&self, view: &View) -> usize {
        view.rows.count(self.counts.tokens, self.counts.rows)
    }

    fn run<A>(&mut self, module: ModuleId, launch: Launch, args: &A) -> Result<(), DriverError> {
        self.add_up()?;
        self.launch(module, launch, args)
    }

    /// A launch that reads nothing of what is not added up yet.
    fn launch<A>(&mut self, module: ModuleId, launch: Launch, args: &A) -> Result<(), DriverError> {
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

    /// What comes before the first op: the angles of this step's positions, and sums that begin with zero.
    pub fn begin(&mut self) -> Result<(), DriverError> {
        let (mut zeroed, mut n_zeroed) = self.scratch.zeroed;
        if self.counts.tokens > 1 {
            n_zeroed = 0;
        }
        if self.ropes.is_empty() && n_zeroed > 0 {
            // SAFETY: the program's own memory, of this length.
            unsafe { self.stream.fill(zeroed, 0, 8 * n_zeroed)? };
        }
        for i in 0..self.ropes.len() {
            let RopeView { inv_freq, axes, table, half, factor, growth, .. } = self.ropes[i];
            let Growth { beta, step, offset } = growth.unwrap_or(Growth { beta: 0.0, step: 0, offset: 0 });
            let rows = self.counts.tokens;
            let positions = self.step.positions;
            let (rows_, half_) = (rows as u32, half as u32);
            let args = args::RopeTable {
                positions,
                places: self.given.places,
                axes,
                inv_freq,
                table,
                zeroed,
                rows: rows_,
                half: half_,
                factor,
                n_zeroed: n_zeroed as u32,
                beta,
                step,
                offset,
                reserved: 0,
            };
            self.run(Modules::ROPE, Launch::each("rope_table", (rows * half).max(n_zeroed), 128), &args)?;
            (zeroed, n_zeroed) = (0, 0);
        }
        Ok(())
    }

    /// Queues a node.
    pub fn node(&mut self, node: &Node) -> Result<(), DriverError> {
        // Experts read the rows that their router has normed.
        if !matches!(node, Node::ExpertsUp(_)) {
            self.normed = None;
        }
        self.keep_ahead(node);
        match *node {
            Node::Embed { table, axis, scale, out } => {
                let rows = self.rows(&out);
                let ids = axis.map_or(self.step.ids, |axis| self.given.places + 4 * axis as Ptr);
                let args = args::Embed {
                    ids,
                    table: table.data,
                    out: out.ptr,
                    rows: rows as u32,
                    d: out.width as u32,
                    scale,
                    stride: if axis.is_some() { N_AXES as u32 } else { 1 },
                };
                self.run_some(rows, table.module, |rows| matmul::embed(table.dtype, rows, out.width), &args)
            }
            Node::Input { x, first, add } => {
                let Given { tokens, rows, n, d_input, .. } = self.given;
                let n = n * x.width;
                let args = args::Input {
                    x: x.ptr,
                    rows,
                    tokens,
                    n: n as u64,
                    d: x.width as u32,
                    d_input: d_input as u32,
                    first: first as u32,
                    add: u32::from(add),
                };
                self.run(Modules::ELEMENTWISE, Launch::each("input_rows", n, 256), &args)
            }
            Node::Linear { x, ref parts } => self.linear(&x, self.rows(&x), parts),
            Node::GatedLinear { x, gate, up, act, out, prologue } => {
                let args = gated_args(x.ptr, self.rows(&x), [gate, up], act, out, prologue);
                self.gated_linear(gate, args, super::batch::FROM)
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
                if let Some(forms) = self.forms_ahead(&out).filter(|_| d.is_multiple_of(8)) {
                    return self.norm_ahead(&x, residual, [w, out.ptr], eps, forms);
                }
                let args =
                    args::RmsNorm { x: x.ptr, residual, w, out: out.ptr, rows: rows as u32, d, eps, reserved: 0 };
                self.run(Modules::NORM, Launch::many_rows("rms_norm", rows, x.width, 8), &args)
            }
            Node::Center { x, out } => {
                let rows = self.rows(&x);
                let args = args::Center { x: x.ptr, out: out.ptr, rows: rows as u64, d: x.width as u32, reserved: 0 };
                self.run(Modules::NORM, Launch::each("center", rows * 32, 128), &args)
            }
            Node::HeadNorm { x, w, eps, d_head, gate, n_w, gate_first } => {
                let n = self.rows(&x) * (x.width / d_head);
                let args = args::HeadNorm {
                    x: x.ptr,
                    w,
                    gate,
                    n: n as u64,
                    d: d_head as u32,
                    eps,
                    n_w: n_w as u32,
                    gate_first: u32::from(gate_first),
                };
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
            Node::AddBias { x, w } => {
                self.elementwise("add_bias", &x, |args| (args.y, args.width) = (w, x.width as u32))
            }
            Node::Gelu { x, form } => self.elementwise("gelu", &x, |args| args.act = u32::from(form == Gelu::Tanh)),
            Node::Clamp { x, low, high } => self.elementwise("clamp", &x, |args| (args.y, args.out) = (low, high)),
            Node::Constant { values, out } => {
                self.elementwise("fill_rows", &out, |args| (args.y, args.width) = (values, out.width as u32))
            }
            Node::ScaleBy { x, w, n } => self.elementwise("scale_by", &x, |args| (args.y, args.width) = (w, n as u32)),
            Node::Softcap { x, cap } => self.elementwise("softcap", &x, |args| args.a = cap),
            Node::GateBy { x, gate, factor } => self.elementwise("gate_by", &x, |args| {
                args.y = gate.ptr;
                args.width = (x.width / gate.width) as u32;
                args.act = factor_kind(factor);
            }),
            Node::DecayBeta { a, b, a_log, dt_bias, bound, g, beta } => {
                let n = a.width;
                let len = self.rows(&a) * n;
                let args = args::DecayBeta {
                    a: a.ptr,
                    b,
                    a_log,
                    dt_bias,
                    g: g.ptr,
                    beta: beta.ptr,
                    len: len as u64,
                    n: n as u64,
                    each: (n / beta.width) as u32,
                    rates: (g.width / n) as u32,
                    bound,
                    reserved: 0,
                };
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
                    blocks: u32::from(cache.has_key_blocks()) | u32::from(cache.has_value_blocks()) << 1,
                };
                let launch = Launch { entry: "kv_append", grid: [rows as u32, 1, 1], block: 256, shared: 0 };
                self.run(module, launch, &args)
            }
            Node::AllReduce(ref node) => self.all_reduce(node),
            Node::Qkv(ref node) => self.qkv(node),
            Node::Choose(ref node) => self.choose(node),
            Node::Attention(ref node) => self.attention(node),
            Node::CausalConv { module, x, w, bias, silu, width, state, out } => {
                let args = args::CausalConv {
                    step: self.step,
                    x: x.ptr,
                    w,
                    bias,
                    state: state.ptr,
                    out: out.ptr,
                    state_len: state.len as u64,
                    d: x.width as u32,
                    silu: u32::from(silu),
                };
                let tile = (width - 1).max(32);
                let grid = [x.width.div_ceil(128), self.longest.div_ceil(tile), self.counts.chunks].map(|n| n as u32);
                self.run(module, Launch { entry: "causal_conv", grid, block: 128, shared: 0 }, &args)
            }
            Node::DeltaNet { module, tiles, inputs: [q, k, v, g, beta], skip, heads, state, out } => {
                let args = args::DeltaNet {
                    step: self.step,
                    q: q.ptr,
                    k: k.ptr,
                    v: v.ptr,
                    g: g.ptr,
                    beta: beta.ptr,
                    skip,
                    state: state.ptr,
                    out: out.ptr,
                    state_len: state.len as u64,
                    n_k_head: heads.n_k_head as u32,
                    n_v_head: heads.n_v_head as u32,
                    d_v: heads.d_v as u32,
                    tiled: u32::from(is_tiled(heads.sharing)),
                    is_sum: u32::from(heads.rule == DeltaRule::Sum),
                    by_row: u32::from(g.width != heads.n_v_head),
                    most_drafts: self.max_draft as u32,
                    beside_tiles: 0,
                };
                let chunks = self.counts.chunks;
                let grid = [heads.d_v.div_ceil(16), heads.n_v_head, chunks].map(|n| n as u32);
                let entry = if self.has_drafts { "delta_net_drafts" } else { "delta_net" };
                let rule = Launch { entry, grid, block: 128, shared: 0 };
                if let Some(tiles) = tiles.filter(|_| self.counts.tokens >= delta::FROM * chunks) {
                    if self.has_drafts {
                        self.run(module, rule, &args::DeltaNet { beside_tiles: 1, ..args })?;
                    }
                    let DeltaTiles { module, keys, shares, gates } = tiles;
                    let args = args::DeltaChunks { op: args, keys, shares, gates };
                    let [tiles, rule] = delta::tiles(heads, self.longest, chunks);
                    self.run(module, tiles, &args)?;
                    return self.run(module, rule, &args);
                }
                self.run(module, rule, &args)
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
                    packed: match norm_w {
                        0 => Default::default(),
                        _ => self.forms_ahead(&View { ptr: norm_out, ..x }).unwrap_or_default(),
                    },
                    ..Default::default()
                };
                self.combine(rows, args)
            }
            Node::Select { x, out } => {
                let n_rows = self.counts.rows as u32;
                let (d, d_out) = (x.width as u32, out.width as u32);
                let args = args::Select { x: x.ptr, rows: self.step.rows, out: out.ptr, n_rows, d, d_out, reserved: 0 };
                let n = self.counts.rows * out.width;
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

    fn combine(&mut self, rows: usize, args: args::Combine) -> Result<(), DriverError> {
        let is_listed = self.listed.take() == Some(args.y);
        let places = if is_listed { self.scratch.places } else { 0 };
        let packed = if is_listed { args.packed } else { Default::default() };
        let args = args::Combine { places, packed, ..args };
        let d = args.d as usize;
        let launch = match args.norm_w {
            _ if is_listed => {
                let block = (d / 8).next_multiple_of(32).min(256) as u32;
                Launch { entry: "combine_listed", grid: [rows as u32, 1, 1], block, shared: 0 }
            }
            0 => Launch { entry: "combine_sum", grid: [rows as u32, d.div_ceil(256) as u32, 1], block: 256, shared: 0 },
            _ => Launch::many_rows("combine", rows, d, 4),
        };
        self.run(Modules::COMBINE, launch, &args)?;
        // Rows after a norm that are put out in no other form are known by what it norms.
        match args.norm_out {
            0 => self.set_ahead(args.x, args.norm_w, packed),
            out => self.set_ahead(out, 0, packed),
        }
        Ok(())
    }

    /// The launches of a product of many rows, whose activations may lie `packed` already.
    fn wide<A>(
        &mut self,
        module: ModuleId,
        wide: Wide,
        packed: Ptr,
        args: impl FnOnce(args::Packed) -> A,
    ) -> Result<(), DriverError> {
        let Wide { pack, product, sum, n_groups, width, .. } = wide;
        let is_packed = packed != 0;
        let packed = if is_packed { packed } else { self.scratch.packed };
        let args = args(args::Packed { packed, n_groups, width });
        if let Some(pack) = pack.filter(|_| !is_packed) {
            self.run(module, pack, &args)?;
        }
        self.run(module, product, &args)?;
        sum.map_or(Ok(()), |sum| self.run(module, sum, &args))
    }

    /// `linear` of many rows, where its weights have these kernels; false where they do not. Activations may lie
    /// `packed` already. `is_left`: the launch after it may add up its shares of k.
    fn linear_wide(
        &mut self,
        w: Mat,
        op: args::Linear,
        n: usize,
        packed: Ptr,
        is_left: bool,
    ) -> Result<bool, DriverError> {
        let rows = op.rows as usize;
        let Some(module) = w.wide.filter(|_| rows >= wide::FROM) else { return Ok(false) };
        let shape = wide::Shape { rows, k: w.k, n };
        let wide = wide::dense(w.dtype, ["linear_pack", "linear_wide"], shape, self.scratch.n_sums, self.sms);
        let (sums, n_shares) = (self.scratch.sums, wide.product.grid[2]);
        let used = self.n_unsummed();
        let fits = used + n_shares as usize * rows * n <= self.scratch.n_sums;
        let free = self.unsummed.iter().position(Option::is_none);
        if let (Some(sum), Some(free), true) = (wide.sum, free, is_left && fits && packed != 0) {
            let of = args::Packed { packed, n_groups: wide.n_groups, width: wide.width };
            let args = args::WideLinear { op, wide: of, sums: sums + 4 * used as Ptr, n_shares, reserved: 0 };
            self.launch(module, wide.product, &args)?;
            self.unsummed[free] = Some(Unsummed { module, sum, args });
            return Ok(true);
        }
        self.wide(module, wide, packed, |wide| args::WideLinear { op, wide, sums, n_shares, reserved: 0 })?;
        Ok(true)
    }

    /// Gate, up and activation; of steps of few rows from `from` rows on with the kernels for more.
    fn gated_linear(&mut self, gate: Mat, args: args::GatedLinear, from: usize) -> Result<(), DriverError> {
        let (rows, sms) = (args.rows as usize, self.sms);
        let wide = gate.wide.filter(|_| rows >= wide::FROM);
        let is_batch = wide.is_none() && Self::is_batch(rows) || self.is_few_batch(rows, from);
        if let Some(module) = gate.batch.filter(|_| is_batch) {
            return self.gated_linear_batch(module, gate, args);
        }
        if let Some(module) = wide {
            let x = self.after_prologue(args.x, args.prologue, rows, gate.k)?;
            let args = args::GatedLinear { x, prologue: args::Prologue::default(), ..args };
            let entries = ["gated_linear_pack", "gated_linear_wide"];
            let shape = wide::Shape { rows, k: gate.k, n: 2 * gate.n };
            let wide = wide::dense(gate.dtype, entries, shape, 0, sms);
            let packed = self.packed_ahead(x, 0, gate, rows);
            return self.wide(module, wide, packed, |wide| args::WideGatedLinear { op: args, wide });
        }
        let launch = |rows| matmul::gated_linear(gate.dtype, rows, gate.k, gate.n, sms);
        self.run_some(rows, gate.module, launch, &args)
    }

    fn linear(&mut self, x: &View, rows: usize, parts: &[Part]) -> Result<(), DriverError> {
        let w = parts[0].w;
        let is_wide = w.wide.is_some() && rows >= wide::FROM;
        if w.batch.is_some() && Self::is_batch(rows) && !is_wide {
            return self.linear_batch(x, rows, [parts, &[]], args::Prologue::default(), [false; 2]);
        }
        let (args, n) = linear_args(x, rows, parts);
        let sms = self.sms;
        if self.linear_wide(w, args, n.iter().sum(), self.packed_ahead(x.ptr, 0, w, rows), false)? {
            return Ok(());
        }
        self.run_some(rows, w.module, |rows| matmul::linear(w.dtype, rows, w.k, &n[..parts.len()], sms), &args)
    }

    fn device(&self) -> Device {
        Device { sms: self.sms, max_shared: self.max_shared }
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

    /// Picks from rows of logits, `asks` in device memory.
    pub fn pick(&mut self, args: &args::Pick) -> Result<(), DriverError> {
        let share = (args.n_vocab as usize).div_ceil(PICK_PARTS);
        let grid = [PICK_PARTS as u32, args.rows, 1];
        let shared = 4 * share as u32;
        self.run(Modules::PICK, Launch { entry: "pick_parts", grid, block: 256, shared }, args)?;
        let grid = [args.rows, 1, 1];
        self.run(Modules::PICK, Launch { entry: "pick_merge", grid, block: 256, shared: 0 }, args)
    }
}

/// The arguments of gate, up and activation of so many rows.
fn gated_args(
    x: Ptr,
    rows: usize,
    [gate, up]: [Mat; 2],
    act: Act,
    out: View,
    prologue: args::Prologue,
) -> args::GatedLinear {
    args::GatedLinear {
        x,
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
    }
}

/// The arguments of products that share x, and the rows of each.
fn linear_args(x: &View, rows: usize, parts: &[Part]) -> (args::Linear, [usize; 4]) {
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
