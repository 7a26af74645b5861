//! Steps of few sequences, one token each: a shorter list of nodes, each of which does what several ops do.
//!
//! A norm or a gate is repeated by the blocks of the product behind it, which is cheaper than a launch; a product
//! whose output is only added to a row adds it itself; a layer's head norms, ropes, append and attention are one
//! launch, and a router's product with its choice, and the experts' last product with their sum. What a node reads may
//! have been dead in the plan, so outputs that live beside it have scratch of their own.
//!
//! [`few`] goes through a plan's ops once and hands each to who knows it: `pattern.rs` finds ops that belong together,
//! the other files make nodes of them (`nodes/few.rs`), which `encode/few.rs` launches. Knows no counts of a step.

mod attend;
mod delta;
mod experts;
mod latent;
mod linear;
mod norm;
mod pattern;

use std::collections::{HashMap, HashSet};

use model::plan::{Buf, GateFactor, Op, Plan};

pub use self::attend::attend_singles;
pub use self::delta::{DeltaRoom, join_rules};
use self::pattern::{Moe, Post};
pub use self::pattern::{mark_added, mark_multiplied, mark_summed};
use super::args::{LogitSums, Prologue};
use super::driver::Ptr;
use super::few_launch::{self, Device};
use super::fuse::fuse;
use super::nodes::{DenseUp, FewLinearNode, ModuleId, Modules, Node, PostNormNode, View};

/// Maximum number of tokens of such a step.
pub const MAX_ROWS: usize = 8;

/// Widest row of `post_norm`.
const MAX_POST: usize = 8192;

/// Numbers of a block of `combine_sum`.
pub const SUM_THREADS: usize = 256;

pub const NORMED: u32 = 1;
const GATED: u32 = 2;
const GATED_NORM: u32 = 3;

/// Addresses of scratch for `rows` rows, beside the plan's own buffers.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Output of attention.
    pub attended: Ptr,
    /// Activations of a shared expert, or a product that a later norm reads.
    pub shared: Ptr,
    /// Inputs of a delta rule.
    pub delta: Ptr,
    /// Logits of a router, which the experts' blocks read while they write.
    pub logits: Ptr,
    /// Activations of a dense feed-forward beside the experts.
    pub dense: Ptr,
    /// Queries of latent attention, multiplied with W_uk.
    pub latent: Ptr,
    /// The same before that product.
    pub heads: Ptr,
    /// A row of the residual stream, for launches whose blocks still read the old one.
    pub sum: Ptr,
    /// Zero before and after a launch.
    pub counters: Ptr,
    /// Sums of the logits of each router, zero at the beginning of a step.
    pub sums: Ptr,
    /// Squares of the row that a router norms.
    pub squares: Ptr,
    /// Packed columns of what attention puts out.
    pub attended_columns: Ptr,
    /// Packed columns of the experts' sums behind a norm, and squares of their parts.
    pub normed_columns: Ptr,
    pub normed_squares: Ptr,
    /// Maximum number of rows of a step.
    pub rows: usize,
}

/// Sizes of [`Room`] for `rows` rows, in numbers of four bytes and in the order of its fields.
pub fn room(plan: &Plan, rows: usize) -> [usize; 14] {
    const COUNTERS: usize = 8;
    let mut need = [0; 14];
    let sums = plan.ops.iter().filter_map(|op| match *op {
        Op::Combine { x, .. } => Some(plan.buf(x).width),
        _ => None,
    });
    let widest = sums.max().unwrap_or(0);
    let columns = |k: usize| MAX_ROWS * few_launch::column_bytes(k) / 4;
    for op in &plan.ops {
        match *op {
            Op::Attention { out, n_head, .. } => {
                need[0] = need[0].max(rows * plan.buf(out).width);
                need[COUNTERS] = need[COUNTERS].max(rows * n_head);
                need[11] = need[11].max(columns(plan.buf(out).width));
            }
            Op::GatedLinear { out, .. } => {
                need[1] = need[1].max(rows * plan.buf(out).width);
                need[4] = need[4].max(rows * plan.buf(out).width);
            }
            Op::Combine { x, .. } => {
                need[1] = need[1].max(rows * plan.buf(x).width);
                need[5] = need[5].max(rows * plan.buf(x).width);
                need[12] = need[12].max(columns(plan.buf(x).width));
                need[13] = need[13].max(MAX_ROWS * plan.buf(x).width.div_ceil(SUM_THREADS));
            }
            Op::DeltaNet { heads, .. } => {
                let qk = heads.n_k_head * heads.d_k;
                need[2] = need[2].max(rows * (2 * qk + heads.n_v_head * (heads.d_v + 2)) + 5 * 64);
            }
            Op::HeadLinear { x, w, out, .. } => {
                // Queries have a rotated part besides, which is no wider than a row of the cache.
                let n_head = plan.weight(w).shape[0];
                let d_pe = plan.caches.iter().map(|cache| cache.d_k - cache.d_v.min(cache.d_k)).max().unwrap_or(0);
                let rows = rows.min(MAX_ROWS);
                need[6] = need[6].max(rows * (plan.buf(out).width + n_head * d_pe));
                need[7] = need[7].max(rows * (plan.buf(x).width + n_head * d_pe));
            }
            Op::Route { logits, .. } => {
                let n_expert = plan.buf(logits).width;
                need[3] = need[3].max(rows * n_expert);
                need[9] += 2 * few_launch::routed_sums(n_expert);
                need[10] = few_launch::routed_blocks(widest);
            }
            _ => {}
        }
    }
    need[COUNTERS] += 1;
    need
}

/// The row that a product reads in place of a buffer, and what it does to it first.
#[derive(Clone, Copy, Debug)]
struct Source {
    x: View,
    prologue: Prologue,
}

/// Heads inside a wider row.
#[derive(Clone, Copy, Debug)]
struct Strided {
    ptr: Ptr,
    d_head: usize,
    /// Stride of heads, in numbers.
    head: usize,
    /// Stride of rows.
    row: usize,
}

/// What a list is made for.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    pub room: Room,
    /// Attention reads f16: the cache itself, or what becomes of its blocks.
    pub is_f16: bool,
    /// None where devices have no bulk copies.
    pub device: Option<Device>,
    /// The module `qkv.cu`.
    pub qkv: ModuleId,
    /// Attention over latents takes kernels of its own, for at most [`MAX_ROWS`] rows.
    pub has_latents: bool,
}

/// A list in the making.
struct Few<'a> {
    plan: &'a Plan,
    /// Nodes of each op, as the list for any number of tokens has them.
    nodes: &'a [Vec<Node>],
    modules: &'a mut Modules,
    room: Room,
    is_f16: bool,
    device: Option<Device>,
    has_latents: bool,
    qkv: ModuleId,
    moes: Vec<Moe>,
    posts: Vec<Post>,
    /// The list so far.
    out: Vec<Node>,
    /// What products read in place of buffers that no node writes.
    sources: HashMap<Buf, Source>,
    /// Gates that are read where their split found them.
    strided: HashMap<Buf, Strided>,
    /// Residuals that a node has added to their row, so that the op that adds them has nothing to do.
    added: HashSet<Buf>,
    /// Rows that lie in scratch until the end of a layer.
    moved: HashMap<Buf, Ptr>,
    /// The normed row that the next router adds to its own first.
    of_router: Option<PostNormNode>,
    /// The dense feed-forward that goes with the next experts.
    dense: Option<(DenseUp, FewLinearNode)>,
    /// Where the next product with a router behind it adds up logits.
    sums: LogitSums,
}

/// The nodes of a step of at most `target.room.rows` single tokens, from those of each op in `nodes`.
pub fn few(plan: &Plan, nodes: &[Vec<Node>], modules: &mut Modules, target: Target) -> Vec<Node> {
    let Target { room, is_f16, device, qkv, has_latents } = target;
    let mut few = Few {
        plan,
        nodes,
        modules,
        room,
        is_f16,
        device,
        moes: Vec::new(),
        posts: Vec::new(),
        out: Vec::new(),
        sources: HashMap::new(),
        strided: HashMap::new(),
        added: HashSet::new(),
        moved: HashMap::new(),
        of_router: None,
        has_latents,
        qkv,
        dense: None,
        sums: LogitSums { of: room.sums, squares: room.squares },
    };
    few.moes = (0..plan.ops.len()).filter_map(|i| few.moe(i)).collect();
    few.posts = (0..plan.ops.len()).filter_map(|i| few.post(i)).collect();
    for at in 0..few.moes.len() {
        few.moes[at].dense = few.dense_beside(few.moes[at]);
    }
    let mut i = 0;
    while i < plan.ops.len() {
        i = few.op(i);
    }
    fuse(few.out, qkv)
}

impl Few<'_> {
    /// Makes nodes of op `i` and of the ops that go with it. Returns the next op.
    fn op(&mut self, i: usize) -> usize {
        if let Some(moe) = self.moes.iter().find(|moe| moe.linear == i).copied()
            && self.route(moe).is_some()
        {
            return moe.last() + 1;
        }
        if let Some(next) = self.dense(i).or_else(|| self.post_norm(i)).or_else(|| self.delta(i)) {
            return next;
        }
        if let Some(next) = self.latent(i) {
            return next;
        }
        let ops = &self.plan.ops;
        match (&ops[i], self.nodes[i].as_slice()) {
            (&Op::RmsNorm { x, residual, out, .. }, &[Node::RmsNorm { x: row, w, eps, out: to, residual: from }]) => {
                let row = self.row(x, row);
                let is_added = residual.is_none_or(|y| self.added.contains(&y));
                if is_added && self.is_absorbed(out, x, i) {
                    let prologue = Prologue { w, kind: NORMED, eps, ..Prologue::default() };
                    self.sources.insert(out, Source { x: row, prologue });
                } else {
                    let residual = if is_added { 0 } else { from };
                    self.out.push(Node::RmsNorm { x: row, residual, w, eps, out: to });
                }
            }
            (Op::Add { y, .. }, _) if self.added.contains(y) => {}
            (
                &Op::Combine { x, norm: Some(norm), .. },
                &[Node::Combine { x: row, add, y, weights, norm_w, eps, .. }],
            ) if self.is_absorbed(norm.out, x, i) => {
                self.out.push(Node::Combine { x: row, add, y, weights, norm_w: 0, eps, norm_out: 0 });
                let prologue = Prologue { w: norm_w, kind: NORMED, eps, ..Prologue::default() };
                self.sources.insert(norm.out, Source { x: row, prologue });
            }
            (&Op::Linear { x, .. }, nodes) => {
                self.linear(i, x, nodes);
                return self.attend(i).unwrap_or(i + 1);
            }
            (&Op::GatedLinear { x: buf, .. }, &[Node::GatedLinear { x, gate, up, act, out, .. }]) => {
                let Source { x, prologue } = self.source(buf, x);
                self.out.push(Node::GatedLinear { x, gate, up, act, out, prologue });
            }
            (&Op::Select { x: buf, .. }, &[Node::Select { x, out }]) => {
                let x = self.source(buf, x).x;
                self.out.push(Node::Select { x, out });
            }
            (&Op::GateBy { x, gate, factor }, &[Node::GateBy { x: row, gate: by, .. }]) => {
                let source = self.source(x, row);
                let flat = Strided { ptr: by.ptr, d_head: by.width, head: by.width, row: by.width };
                let at = self.strided.get(&gate).copied().unwrap_or(flat);
                let is_plain = factor == GateFactor::Sigmoid && by.width == row.width;
                let is_next = matches!(ops.get(i + 1), Some(Op::Linear { x: next, .. }) if *next == x);
                if is_plain && is_next && at.d_head % 8 == 0 && self.is_only_read_by(x, i, i + 1) {
                    let prologue = gate_of(GATED, 0, 0.0, at);
                    self.sources.insert(x, Source { prologue, ..source });
                } else {
                    self.out.push(Node::GateBy { x: source.x, gate: by, factor });
                }
            }
            (
                &Op::GatedNorm { x, gate_first: false, .. },
                &[Node::HeadNorm { x: row, w, eps, d_head, gate, n_w: 1, .. }],
            ) => {
                let fits = d_head.is_power_of_two() && (8..=256).contains(&d_head);
                let is_next = matches!(ops.get(i + 1), Some(Op::Linear { x: next, .. }) if *next == x);
                if fits && is_next && self.is_only_read_by(x, i, i + 1) {
                    let at = Strided { ptr: gate, d_head, head: d_head, row: row.width };
                    self.sources.insert(x, Source { x: row, prologue: gate_of(GATED_NORM, w, eps, at) });
                } else {
                    self.out.extend_from_slice(&self.nodes[i]);
                }
            }
            (_, nodes) => self.out.extend_from_slice(nodes),
        }
        i + 1
    }

    /// What a product reads in place of a buffer, whose own row is `x`.
    fn source(&self, buf: Buf, x: View) -> Source {
        self.sources.get(&buf).copied().unwrap_or(Source { x, prologue: Prologue::default() })
    }

    /// A buffer's rows, in scratch where they were moved there.
    fn row(&self, buf: Buf, row: View) -> View {
        View { ptr: self.moved.get(&buf).copied().unwrap_or(row.ptr), ..row }
    }
}

fn gate_of(kind: u32, w: Ptr, eps: f32, at: Strided) -> Prologue {
    let Strided { ptr, d_head, head, row } = at;
    let (d_head, gate_head, gate_row) = (d_head as u32, head as u32, row as u32);
    Prologue { w, gate: ptr, kind, d_head, gate_head, gate_row, eps, reserved: 0 }
}
