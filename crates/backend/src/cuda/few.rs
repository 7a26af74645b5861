//! Steps of few sequences, one token each: a shorter list of nodes, each of which does what several ops do.
//!
//! A norm or a gate is repeated by the blocks of the product behind it, which is cheaper than a launch; a product
//! whose output is only added to a row adds it itself; a layer's head norms, ropes, append and attention are one
//! launch, and a router's product with its choice, and the experts' last product with their sum. What a node reads may
//! have been dead in the plan, so outputs that live beside it have scratch of their own.

use std::collections::{HashMap, HashSet};

use model::plan::{Access, Buf, Op, Plan, Rows};
use quant::WeightType;

use super::args::Prologue;
use super::driver::Ptr;
use super::few_launch::{self, Device, Half};
use super::fuse::{fuse, qkv_of};
use super::matmul;
use super::nodes::{
    AttendNode, AttentionNode, DeltaInNode, DenseUp, DownNode, ExpertsNode, FewLinearNode, Late, LatentOutNode,
    LatentQNode, LogitParts, Mat, ModuleId, Modules, Node, Part, PostNormNode, QkvPartNode, RouteNode, Routed,
    RouterNode, UpNode, View,
};
use super::sources::{self, Key};

/// Maximum number of tokens of such a step.
pub const MAX_ROWS: usize = 8;

/// Widest row of `post_norm`.
const MAX_POST: usize = 8192;

const NORMED: u32 = 1;
const GATED: u32 = 2;
const GATED_NORM: u32 = 3;

/// Memory for `rows` rows that no buffer of the plan has.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// What attention puts out.
    pub attended: Ptr,
    /// What the shared expert's activation puts out, or a product that a later norm reads.
    pub shared: Ptr,
    /// Inputs of a delta rule.
    pub delta: Ptr,
    /// Logits of a router, which the experts' blocks read while they write.
    pub logits: Ptr,
    /// Activations of a dense feed-forward beside the experts.
    pub dense: Ptr,
    /// Queries that are multiplied with latents, and those of all heads before that.
    pub latent: Ptr,
    pub heads: Ptr,
    /// A row of the residual stream that blocks write while others read what it is made of.
    pub sum: Ptr,
    /// Zeros.
    pub counters: Ptr,
    /// Rows that all of these are for.
    pub rows: usize,
}

/// Numbers of four bytes that [`Room`] has for so many rows, in the order of its fields.
pub fn room(plan: &Plan, rows: usize) -> [usize; 9] {
    const COUNTERS: usize = 8;
    let mut need = [0; 9];
    let sums = plan.ops.iter().filter_map(|op| match *op {
        Op::Combine { x, .. } => Some(plan.buf(x).width),
        _ => None,
    });
    let widest = sums.max().unwrap_or(0);
    for op in &plan.ops {
        match *op {
            Op::Attention { out, n_head, .. } => {
                need[0] = need[0].max(rows * plan.buf(out).width);
                need[COUNTERS] = need[COUNTERS].max(rows * n_head);
            }
            Op::GatedLinear { out, .. } => {
                need[1] = need[1].max(rows * plan.buf(out).width);
                need[4] = need[4].max(rows * plan.buf(out).width);
            }
            Op::Combine { x, .. } => {
                need[1] = need[1].max(rows * plan.buf(x).width);
                need[5] = need[5].max(rows * plan.buf(x).width);
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
                let parts = few_launch::routed_parts(widest) * (n_expert + 4);
                need[3] = need[3].max(rows * n_expert).max(parts);
            }
            _ => {}
        }
    }
    need[COUNTERS] += 1;
    need
}

/// A router with its experts, by the places of their ops.
#[derive(Clone, Copy, Debug)]
struct Moe {
    linear: usize,
    /// Scales the logits, where there is one.
    scale: Option<f32>,
    route: usize,
    /// The norm that only the experts read, where it stands between.
    norm: Option<usize>,
    experts: usize,
    combine: usize,
    shared: Option<Shared>,
    dense: Option<Dense>,
}

/// A dense feed-forward in front of the router, whose output only a later norm reads, and the norm in front of it,
/// which adds a normed row to its own.
#[derive(Clone, Copy, Debug)]
struct Dense {
    /// The norm of the row that is added, right before `norm`.
    added: usize,
    norm: usize,
    gated: usize,
    down: usize,
}

/// Queries of latents, a row of their cache, and attention over them.
#[derive(Clone, Copy, Debug)]
struct Latents {
    heads: View,
    kv: View,
    norm_w: Ptr,
    eps: f32,
    w: Mat,
    transposed: bool,
    rope: usize,
    n_head: usize,
    /// Of the latent, of a head's query without rotation and with it.
    widths: [usize; 3],
    attention: AttentionNode,
}

/// A shared expert of the same shape, and the gate of its sum.
#[derive(Clone, Copy, Debug)]
struct Shared {
    gated: usize,
    down: usize,
    gate: Option<usize>,
    /// Its matrices have another shape, or its last one another type.
    is_other: bool,
}

impl Moe {
    fn last(&self) -> usize {
        self.shared.map_or(0, |s| s.gate.unwrap_or(s.down)).max(self.combine)
    }

    fn has(&self, op: usize) -> bool {
        (self.linear..=self.last()).contains(&op)
    }
}

/// Two rows that are normed, added, normed and added to a third, by the places of their ops.
#[derive(Clone, Copy, Debug)]
struct Post {
    /// The norm of a product's output.
    first: usize,
    /// The experts' sum, and its norm.
    combine: usize,
    sum: usize,
    add: usize,
    scale: Option<usize>,
}

/// A buffer's rows as a product reads them.
#[derive(Clone, Copy, Debug)]
struct Source {
    x: View,
    prologue: Prologue,
}

/// Where the heads of a part lie in the whole.
#[derive(Clone, Copy, Debug)]
struct Strided {
    ptr: Ptr,
    d_head: usize,
    head: usize,
    row: usize,
}

struct Few<'a> {
    plan: &'a Plan,
    /// Of each op.
    nodes: &'a [Vec<Node>],
    modules: &'a mut Modules,
    room: Room,
    is_f16: bool,
    /// Where it copies in bulk.
    device: Option<Device>,
    moes: Vec<Moe>,
    posts: Vec<Post>,
    out: Vec<Node>,
    /// Buffers that are not written: what stands for them.
    sources: HashMap<Buf, Source>,
    strided: HashMap<Buf, Strided>,
    /// Buffers that were added to the row that they are the residual of.
    added: HashSet<Buf>,
    /// Rows that lie elsewhere, until the end of a layer.
    moved: HashMap<Buf, Ptr>,
    /// The row that a router adds.
    of_router: Option<PostNormNode>,
    /// Whether attention over latents has nodes of its own, which take few rows alone.
    has_latents: bool,
    dense: Option<(DenseUp, FewLinearNode)>,
}

/// The nodes of a step of at most `room.rows` single tokens, of [`MAX_ROWS`] with `has_latents`; `qkv` is the module of
/// `qkv`, `device` is there where it copies in bulk.
#[allow(clippy::too_many_arguments)]
pub fn few(
    plan: &Plan,
    nodes: &[Vec<Node>],
    modules: &mut Modules,
    room: Room,
    is_f16: bool,
    device: Option<Device>,
    qkv: ModuleId,
    has_latents: bool,
) -> Vec<Node> {
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
        dense: None,
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
    /// The ops behind `i` that read a buffer before it is overwritten.
    fn readers(&self, buf: Buf, i: usize) -> Vec<usize> {
        let mut found = Vec::new();
        for (j, op) in self.plan.ops.iter().enumerate().skip(i + 1) {
            let accesses: Vec<Access> = op.bufs().iter().filter(|(b, _)| *b == buf).map(|(_, a)| *a).collect();
            if accesses.iter().any(|a| *a != Access::Write) {
                found.push(j);
            }
            if accesses.contains(&Access::Write) {
                break;
            }
        }
        found
    }

    fn is_only_read_by(&self, buf: Buf, i: usize, reader: usize) -> bool {
        self.readers(buf, i) == [reader] && buf != self.plan.logits && self.plan.hidden() != Some(buf)
    }

    /// Whether every reader of a normed buffer can norm it itself, from a row that is still the same then.
    fn is_absorbed(&self, normed: Buf, x: Buf, i: usize) -> bool {
        let readers = self.readers(normed, i);
        let fits = |&j: &usize| match self.plan.ops[j] {
            Op::Linear { .. } => true,
            Op::GatedLinear { .. } => matches!(self.nodes[j].as_slice(), [Node::GatedLinear { .. }]),
            Op::Experts { .. } => self.moes.iter().any(|moe| moe.experts == j),
            _ => false,
        };
        let last = readers.last().copied().unwrap_or(i);
        let is_same = (i + 1..last).all(|u| {
            let updates = self.plan.ops[u].bufs().iter().any(|&(b, a)| b == x && a != Access::Read);
            let later = readers.iter().filter(|&&j| j > u);
            !updates || later.clone().all(|&j| self.moes.iter().any(|moe| moe.has(u) && moe.has(j)))
        });
        // The readers' outputs could lie where a row is that nothing reads any more.
        let is_alive = !self.readers(x, last).is_empty() || self.is_latent_product(last);
        self.plan.hidden() != Some(normed) && readers.iter().all(fits) && is_same && is_alive
    }

    /// Whether an op is a product that goes with the queries of latents, which lie in scratch of their own.
    fn is_latent_product(&self, i: usize) -> bool {
        let ops = &self.plan.ops;
        let (Op::Linear { parts, .. }, Some(Op::SplitHeads { x, .. })) = (&ops[i], ops.get(i + 1)) else {
            return false;
        };
        let fits = parts.len() == 1 && parts[0].out == *x && parts[0].bias.is_none();
        let is_plain = |t: WeightType| !matches!(t, WeightType::Affine(_));
        let fits = fits && is_plain(self.plan.weight(parts[0].w).dtype);
        fits && self.latents(i + 1).is_some_and(|latents| is_plain(latents.w.dtype))
    }

    /// What makes queries of latents and a row of the cache, from op `i` to attention.
    fn latents(&self, i: usize) -> Option<Latents> {
        if !self.has_latents {
            return None;
        }
        let [
            Op::SplitHeads { x: q, n_head, parts: of_q },
            Op::SplitHeads { x: kv, n_head: 1, parts: of_kv },
            Op::RmsNorm { x: c, residual: None, out: latent, .. },
            Op::Rope { x: q_pe, rope, n_head: n_rope, d_head: d_pe },
            Op::Rope { x: k_pe, rope: k_rope, n_head: 1, d_head: k_d_pe },
            Op::HeadLinear { x: q_nope, transposed, out: q_latent, .. },
            Op::JoinHeads { parts: to_q, n_head: n_join, out: joined },
            Op::JoinHeads { parts: to_k, n_head: 1, out: k },
            Op::KvAppend { k: appended, v: None, .. },
            Op::Attention { q: asked, .. },
        ] = self.plan.ops.get(i..i + 10)?
        else {
            return None;
        };
        let nodes = |at: usize| self.nodes[i + at].as_slice();
        let (&[Node::RmsNorm { w: norm_w, eps, .. }], &[Node::HeadLinear { w, .. }], &[Node::Attention(attention)]) =
            (nodes(2), nodes(5), nodes(9))
        else {
            return None;
        };
        let (&[Node::Heads { whole: heads, .. }, ..], &[Node::Heads { whole: of_cache, .. }, ..]) =
            (nodes(0), nodes(1))
        else {
            return None;
        };
        let width = |buf: Buf| self.plan.buf(buf).width;
        let (d_latent, d_nope) = (width(*latent), width(*q_nope) / n_head);
        let cache = attention.cache;
        let fits = *of_q == [(d_nope, *q_nope), (*d_pe, *q_pe)]
            && *of_kv == [(d_latent, *c), (*d_pe, *k_pe)]
            && *to_q == [(d_latent, *q_latent), (*d_pe, *q_pe)]
            && *to_k == [(d_latent, *latent), (*d_pe, *k_pe)]
            && [n_rope, n_join] == [n_head; 2]
            && (rope, d_pe) == (k_rope, k_d_pe)
            && appended == k
            && asked == joined
            && attention.v_in_k
            && (cache.n_kv, cache.d_k, cache.d_v) == (1, d_latent + d_pe, d_latent)
            && attention.n_head == *n_head
            && attention.sinks == 0
            && self.is_only_read_by(*q, i.saturating_sub(1), i)
            && self.is_only_read_by(*joined, i + 6, i + 9);
        let _ = kv;
        fits.then_some(Latents {
            heads,
            kv: of_cache,
            norm_w,
            eps,
            w,
            transposed: *transposed,
            rope: rope.0 as usize,
            n_head: *n_head,
            widths: [d_latent, d_nope, *d_pe],
            attention,
        })
    }

    /// Attention over latents from op `i` on, which is the product of its queries or splits them; the next op.
    fn latent(&mut self, i: usize) -> Option<usize> {
        let ops = &self.plan.ops;
        let has_product = self.is_latent_product(i);
        let first = if has_product { i + 1 } else { i };
        let latents = self.latents(first)?;
        let Latents { mut heads, kv, norm_w, eps, w, transposed, rope, n_head, widths, attention } = latents;
        let mut product = None;
        if let (true, Op::Linear { x: buf, .. }, [Node::Linear { x, parts }]) =
            (has_product, &ops[i], self.nodes[i].as_slice())
        {
            let Source { x, prologue } = self.source(*buf, *x);
            heads.ptr = self.room.heads;
            product = Some((x, Part { out: heads, ..parts[0] }, prologue));
        }
        let of_product = product.as_ref().map(|(_, part, _)| part.w.dtype);
        let module = self.modules.id(Key::latent(w.dtype, self.is_f16, of_product));
        let (out, counters, cache) = (self.room.latent, self.room.counters + 4, attention.cache);
        self.out.push(Node::LatentQ(LatentQNode {
            module,
            product,
            heads,
            w,
            transposed,
            n_head,
            widths,
            out,
            kv,
            norm_w,
            eps,
            cache,
            rope,
            counters,
        }));
        let at = first + 9;
        let attention = AttentionNode { q: View { ptr: out, ..attention.q }, ..attention };
        let behind = match (&ops[at], ops.get(at + 1), self.nodes.get(at + 1).map(Vec::as_slice)) {
            (
                &Op::Attention { out: summed, .. },
                Some(Op::HeadLinear { x, transposed: false, .. }),
                Some(&[Node::HeadLinear { w, out, .. }]),
            ) if *x == summed && self.is_only_read_by(summed, at, at + 1) => Some((w, out)),
            _ => None,
        };
        match behind {
            Some((w, out)) => {
                let module = self.modules.id(Key::typed(sources::LATENT_OUT, w.dtype));
                self.out.push(Node::LatentOut(LatentOutNode { module, attention, w, out }));
                Some(at + 2)
            }
            None => {
                self.out.push(Node::Attention(attention));
                Some(at + 1)
            }
        }
    }

    /// The router whose product is op `i`, with what follows it.
    fn moe(&self, i: usize) -> Option<Moe> {
        let ops = &self.plan.ops;
        let Op::Linear { parts, .. } = &ops[i] else { return None };
        let (scale, route) = match ops.get(i + 1)? {
            Op::Scale { x, scale } if *x == parts[0].out => (Some(*scale), i + 2),
            _ => (None, i + 1),
        };
        let Op::Route { logits, ids, weights, n_used, .. } = ops.get(route)? else { return None };
        let (norm, e) = match ops.get(route + 1)? {
            &Op::RmsNorm { residual: None, out, .. } if self.is_only_read_by(out, route + 1, route + 2) => {
                (Some(route + 1), route + 2)
            }
            _ => (None, route + 1),
        };
        let &Op::Experts { ids: chosen, out: y, x: from, .. } = ops.get(e)? else { return None };
        // A shared expert may be added before the sum of the others.
        let next = ops.get(e + 1..e + 4).unwrap_or_default();
        let is_behind = matches!(next, [Op::GatedLinear { .. }, Op::Linear { .. }, Op::Add { .. }]);
        let combine = if is_behind { e + 4 } else { e + 1 };
        let &Op::Combine { x, y: summed, weights: by, .. } = ops.get(combine)? else { return None };
        let [Node::Linear { .. }] = self.nodes[i].as_slice() else { return None };
        let [Node::Experts(node)] = self.nodes[e].as_slice() else { return None };
        let own = Some((node.down.dtype, node.down.k));
        let reads_norm = norm.is_none_or(|at| matches!(ops[at], Op::RmsNorm { out, .. } if out == from));
        let fits = reads_norm
            && parts[0].out == *logits
            && chosen == *ids
            && summed == y
            && by == *weights
            && *n_used <= 31
            && node.gate.dtype == node.up.dtype
            && node.down.k.is_multiple_of(16)
            && self.is_only_read_by(y, e, combine)
            && self.is_only_read_by(*weights, route, combine)
            && matmul::experts_down(node.down.dtype, 1, *n_used, own, node.down.n, node.down.k).shared <= 48 << 10;
        if !fits {
            return None;
        }
        let shared = self.shared(e, if is_behind { e + 1 } else { e + 2 }, x);
        let moe = Moe { linear: i, scale, route, norm, experts: e, combine, shared, dense: None };
        (!is_behind || shared.is_some()).then_some(moe)
    }

    /// The dense feed-forward in front of a router that can go with its experts.
    fn dense_beside(&self, moe: Moe) -> Option<Dense> {
        let ops = &self.plan.ops;
        let post = self.posts.iter().find(|post| post.combine == moe.combine)?;
        let (down, gated) = (post.first.checked_sub(1)?, post.first.checked_sub(2)?);
        let (norm, added) = (gated.checked_sub(1)?, gated.checked_sub(2)?);
        let (&Op::GatedLinear { x: f, out: hidden, .. }, Op::Linear { x: from, parts }) = (&ops[gated], &ops[down])
        else {
            return None;
        };
        let [Node::GatedLinear { gate, up, act, .. }] = self.nodes[gated].as_slice() else { return None };
        let ([Node::Linear { .. }], [Node::Experts(experts)]) =
            (self.nodes[down].as_slice(), self.nodes[moe.experts].as_slice())
        else {
            return None;
        };
        // The row, with its own norm, that of the router and that of the experts.
        let &Op::RmsNorm { x, residual: Some(y), out, eps, .. } = &ops[norm] else { return None };
        let &Op::RmsNorm { x: first, residual: None, out: normed, .. } = &ops[added] else { return None };
        let reads_x = |at: usize| {
            matches!(ops[at], Op::RmsNorm { x: of, residual: None, eps: e, .. } if of == x && e == eps).then_some(())
        };
        reads_x(post.first + 1)?;
        reads_x(moe.norm?)?;
        let Op::Add { x: to, .. } = ops[post.add] else { return None };
        let fits = out == f
            && y == normed
            && to == x
            && first != x
            && *from == hidden
            && parts.len() == 1
            && parts[0].bias.is_none()
            && post.first + 2 == moe.linear
            && moe.shared.is_none()
            && act.kind == experts.act.kind
            && act.kind != 2
            && gate.dtype == experts.gate.dtype
            && up.dtype == experts.up.dtype
            && gate.k == experts.gate.k
            && self.plan.buf(x).width <= MAX_POST
            && self.is_only_read_by(normed, added, norm)
            && self.is_only_read_by(f, norm, gated)
            && self.is_only_read_by(hidden, gated, down)
            && self.is_absorbed(f, x, norm)
            // Until the end of the layer nothing else reads the row.
            && self.readers(x, norm).iter().all(|&at| {
                at > post.sum || at == post.first + 1 || Some(at) == moe.norm
            });
        fits.then_some(Dense { added, norm, gated, down })
    }

    /// The norms that begin with op `i` and end in a sum with the experts'.
    fn post(&self, i: usize) -> Option<Post> {
        let ops = &self.plan.ops;
        let &Op::RmsNorm { x: product, residual: None, out, .. } = &ops[i] else { return None };
        let Op::Linear { parts, .. } = &ops[i.checked_sub(1)?] else { return None };
        let &[sum] = self.readers(out, i).as_slice() else { return None };
        let &Op::RmsNorm { x, residual: Some(other), out: total, .. } = ops.get(sum)? else { return None };
        let combine = sum.checked_sub(1)?;
        let &Op::Combine { x: row, add: false, norm: Some(norm), .. } = &ops[combine] else { return None };
        let moe = self.moes.iter().find(|moe| moe.combine == combine)?;
        let &Op::Add { x: to, y } = ops.get(sum + 1)? else { return None };
        let scale = match ops.get(sum + 2) {
            Some(Op::ScaleBy { x, .. }) if *x == to => Some(sum + 2),
            _ => None,
        };
        let width = self.plan.buf(to).width;
        let fits = parts.len() == 1
            && parts[0].out == product
            && x == out
            && other == norm.out
            && y == total
            && moe.linear > i
            && width <= MAX_POST
            && self.plan.buf(product).width == width
            && self.is_only_read_by(product, i - 1, i)
            && self.is_only_read_by(norm.out, combine, sum)
            && self.readers(row, combine).is_empty()
            && self.is_only_read_by(total, sum, sum + 1);
        fits.then_some(Post { first: i, combine, sum, add: sum + 1, scale })
    }

    /// The shared expert that begins with op `at`, where it can go with those of op `experts`.
    fn shared(&self, experts: usize, at: usize, x: Buf) -> Option<Shared> {
        let ops = &self.plan.ops;
        let &Op::Experts { x: of_experts, .. } = &ops[experts] else { return None };
        let [Node::Experts(experts)] = self.nodes[experts].as_slice() else { return None };
        let &Op::GatedLinear { x: f, out: hidden, .. } = ops.get(at)? else { return None };
        let [Node::GatedLinear { gate, up, act, .. }] = self.nodes[at].as_slice() else { return None };
        let Op::Linear { x: from, parts } = ops.get(at + 1)? else { return None };
        let ([part], [Node::Linear { parts: down, .. }]) = (parts.as_slice(), self.nodes[at + 1].as_slice()) else {
            return None;
        };
        let (gate_op, next) = match ops.get(at + 2)? {
            Op::SigmoidGate { x: y, gate } if *y == part.out && self.plan.buf(*gate).width == 1 => {
                (Some(at + 2), ops.get(at + 3)?)
            }
            next => (None, next),
        };
        let is_added = match *next {
            Op::RmsNorm { x: to, residual: Some(y), .. } | Op::Add { x: to, y } => to == x && y == part.out,
            _ => false,
        };
        let same = |a: &Mat, b: &Mat| (a.dtype, a.n, a.k) == (b.dtype, b.n, b.k);
        let is_same = same(gate, &experts.gate) && same(up, &experts.up) && same(&down[0].w, &experts.down);
        let is_plain = |t: WeightType| !matches!(t, WeightType::Affine(_));
        let is_beside = |a: &Mat, b: &Mat| (a.dtype, a.k) == (b.dtype, b.k);
        let is_other = gate_op.is_none()
            && is_beside(gate, &experts.gate)
            && is_beside(up, &experts.up)
            && gate.n == up.n
            && down[0].w.n == experts.down.n
            && is_plain(experts.down.dtype)
            && is_plain(down[0].w.dtype)
            && down[0].w.k.is_multiple_of(16)
            && matmul::experts_down(
                experts.down.dtype,
                1,
                experts.n_used,
                Some((down[0].w.dtype, down[0].w.k)),
                experts.down.n,
                experts.down.k,
            )
            .shared
                <= 48 << 10;
        let fits = f == of_experts
            && *from == hidden
            && part.bias.is_none()
            && is_added
            && act.kind == experts.act.kind
            && act.kind != 2
            && (is_same || is_other)
            && self.is_only_read_by(hidden, at, at + 1);
        fits.then_some(Shared { gated: at, down: at + 1, gate: gate_op, is_other: !is_same })
    }

    /// How a product reads a buffer.
    fn source(&self, buf: Buf, x: View) -> Source {
        self.sources.get(&buf).copied().unwrap_or(Source { x, prologue: Prologue::default() })
    }

    /// Handles op `i` and what goes with it; the next op.
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
            (&Op::SigmoidGate { x, gate }, &[Node::SigmoidGate { x: row, gate: by }]) if by.width == row.width => {
                let source = self.source(x, row);
                let flat = Strided { ptr: by.ptr, d_head: by.width, head: by.width, row: by.width };
                let at = self.strided.get(&gate).copied().unwrap_or(flat);
                let is_next = matches!(ops.get(i + 1), Some(Op::Linear { x: next, .. }) if *next == x);
                if is_next && at.d_head % 8 == 0 && self.is_only_read_by(x, i, i + 1) {
                    let prologue = gate_of(GATED, 0, 0.0, at);
                    self.sources.insert(x, Source { prologue, ..source });
                } else {
                    self.out.push(Node::SigmoidGate { x: source.x, gate: by });
                }
            }
            (&Op::GatedNorm { x, .. }, &[Node::HeadNorm { x: row, w, eps, d_head, gate }]) => {
                let fits = d_head.is_power_of_two() && (8..=256).contains(&d_head);
                let is_next = matches!(ops.get(i + 1), Some(Op::Linear { x: next, .. }) if *next == x);
                if fits && is_next && self.is_only_read_by(x, i, i + 1) {
                    let at = Strided { ptr: gate, d_head, head: d_head, row: row.width };
                    self.sources.insert(x, Source { x: row, prologue: gate_of(GATED_NORM, w, eps, at) });
                } else {
                    self.out.push(Node::HeadNorm { x: row, w, eps, d_head, gate });
                }
            }
            (_, nodes) => self.out.extend_from_slice(nodes),
        }
        i + 1
    }

    /// A buffer's rows, where they lie now.
    fn row(&self, buf: Buf, row: View) -> View {
        View { ptr: self.moved.get(&buf).copied().unwrap_or(row.ptr), ..row }
    }

    /// The dense feed-forward beside experts, with the norms in front of it, which go to the router's node and to those
    /// of the experts; the next op.
    fn dense(&mut self, i: usize) -> Option<usize> {
        let moe = *self.moes.iter().find(|moe| moe.dense.is_some_and(|dense| dense.added == i))?;
        let Dense { added, norm, gated, down } = moe.dense?;
        let &[Node::RmsNorm { x: a, w, eps, .. }] = self.nodes[added].as_slice() else { return None };
        let &[Node::RmsNorm { x: row, w: norm_w, eps: norm_eps, .. }] = self.nodes[norm].as_slice() else {
            return None;
        };
        let &[Node::GatedLinear { gate, up, act, out, .. }] = self.nodes[gated].as_slice() else { return None };
        let [Node::Linear { parts, .. }] = self.nodes[down].as_slice() else { return None };
        let &Op::RmsNorm { x, .. } = &self.plan.ops[norm] else { return None };
        let &[mut part] = parts.as_slice() else { return None };
        let sum = View { ptr: self.room.sum, ..row };
        self.moved.insert(x, sum.ptr);
        self.of_router = Some(PostNormNode { x: row, out: sum.ptr, a: (a, w, eps), b: None, norm: None, scale: 0 });
        let hidden = View { ptr: self.room.dense, ..out };
        let prologue = Prologue { w: norm_w, kind: NORMED, eps: norm_eps, ..Prologue::default() };
        let dense_up = DenseUp { gate, up, act, out: hidden, prologue, is_shared: false };
        part.out.ptr = self.room.shared;
        let few = self.through_shared(&[part], &[], 0);
        let prologue = Prologue::default();
        let module = part.w.module;
        let dense_down = FewLinearNode {
            x: hidden,
            module,
            parts: [vec![part], Vec::new()],
            prologue,
            add: false,
            few,
            routed: None,
        };
        self.dense = Some((dense_up, dense_down));
        // The norm of its product comes with the experts' sum.
        Some(down + 1)
    }

    /// The norms of a row that is only added to another; the next op.
    fn post_norm(&mut self, i: usize) -> Option<usize> {
        let ops = &self.plan.ops;
        if self.posts.iter().any(|post| post.first == i) {
            // It is done with the experts' sum.
            return Some(i + 1);
        }
        let normed = |at: usize| match self.nodes[at].as_slice() {
            &[Node::RmsNorm { x, w, eps, .. }] => Some((x, w, eps)),
            _ => None,
        };
        if let Some(post) = self.posts.iter().find(|post| post.sum == i).copied() {
            let (product, w, eps) = normed(post.first)?;
            let [Node::Combine { x: row, norm_w, eps: eps_b, .. }] = self.nodes[post.combine].as_slice() else {
                return None;
            };
            let (_, w_sum, eps_sum) = normed(i)?;
            let [Node::Add { x, .. }] = self.nodes[post.add].as_slice() else { return None };
            let scale = match post.scale.map(|at| self.nodes[at].as_slice()) {
                Some([Node::ScaleBy { w, .. }]) => *w,
                _ => 0,
            };
            let a = (View { ptr: self.room.shared, ..product }, w, eps);
            let b = Some((*row, *norm_w, *eps_b));
            let (out, norm) = (x.ptr, Some((w_sum, eps_sum)));
            let Op::Add { x: to, .. } = ops[post.add] else { return None };
            let x = self.row(to, *x);
            self.moved.remove(&to);
            self.out.push(Node::PostNorm(PostNormNode { x, out, a, b, norm, scale }));
            return Some(post.scale.unwrap_or(post.add) + 1);
        }
        let (&Op::RmsNorm { x: from, residual: None, out, .. }, next) = (&ops[i], ops.get(i + 1)?) else {
            return None;
        };
        let (to, y) = match *next {
            Op::RmsNorm { x, residual: Some(y), .. } | Op::Add { x, y } => (x, y),
            _ => return None,
        };
        if y != out || to == from || !self.is_only_read_by(out, i, i + 1) || self.plan.buf(to).width > MAX_POST {
            return None;
        }
        let (a, w, eps) = normed(i)?;
        let row = match self.nodes[i + 1].as_slice() {
            [Node::RmsNorm { x, .. } | Node::Add { x, .. }] => *x,
            _ => return None,
        };
        self.added.insert(out);
        let out = row.ptr;
        self.out.push(Node::PostNorm(PostNormNode { x: row, out, a: (a, w, eps), b: None, norm: None, scale: 0 }));
        Some(i + 1)
    }

    /// What comes before a delta rule, and the rule; the next op.
    fn delta(&mut self, i: usize) -> Option<usize> {
        let ops = self.plan.ops.get(i..i + 8)?;
        let [
            Op::CausalConv { out: conv, .. },
            Op::SplitHeads { x: whole, n_head: 1, parts },
            Op::HeadNorm { x: q_normed, w: None, eps, .. },
            Op::Scale { x: q_scaled, scale: q_scale },
            Op::HeadNorm { x: k_normed, w: None, eps: k_eps, .. },
            Op::Scale { x: k_scaled, scale: k_scale },
            Op::DecayBeta { g_out, beta_out, .. },
            Op::DeltaNet { q, k, v, g, beta, heads, .. },
        ] = ops
        else {
            return None;
        };
        let (q, k, v, g, beta, heads) = (*q, *k, *v, *g, *beta, *heads);
        let (qk, vs) = (heads.n_k_head * heads.d_k, heads.n_v_head * heads.d_v);
        let fits = conv == whole
            && *parts == [(qk, q), (qk, k), (vs, v)]
            && [q_normed, q_scaled] == [&q; 2]
            && [k_normed, k_scaled] == [&k; 2]
            && eps == k_eps
            && (*g_out, *beta_out) == (g, beta)
            && heads.d_k.max(heads.d_v) <= 512
            && self.is_only_read_by(*conv, i, i + 1)
            && [q, k, v].iter().all(|&buf| self.readers(buf, i + 6) == [i + 7])
            && self.is_only_read_by(g, i + 6, i + 7)
            && self.is_only_read_by(beta, i + 6, i + 7);
        if !fits {
            return None;
        }
        let (&[Node::CausalConv { x, w, width, state, .. }], &[Node::DecayBeta { a, b, a_log, dt_bias, .. }]) =
            (self.nodes[i].as_slice(), self.nodes[i + 6].as_slice())
        else {
            return None;
        };
        let [Node::DeltaNet { module, inputs, heads, state: rule, out }] = self.nodes[i + 7].as_slice() else {
            return None;
        };
        // Every input begins at a multiple of 256 bytes.
        let mut at = self.room.delta;
        let inputs = inputs.map(|view| {
            let ptr = at;
            at += (4 * self.room.rows * view.width).next_multiple_of(256) as Ptr;
            View { ptr, ..view }
        });
        let node = DeltaInNode {
            module: self.modules.id(Key::sized(sources::DELTA_IN, "WIDTH", width)),
            x,
            w,
            state,
            heads: *heads,
            out: inputs.map(|view| view.ptr),
            a: a.ptr,
            b: b.ptr,
            a_log,
            dt_bias,
            scales: [*q_scale, *k_scale],
            eps: *eps,
        };
        self.out.push(Node::DeltaIn(node));
        let (module, heads, state, out) = (*module, *heads, *rule, *out);
        self.out.push(Node::DeltaNet { module, inputs, heads, state, out });
        Some(i + 8)
    }

    /// Products that share a row: matrices of two types a launch.
    fn linear(&mut self, i: usize, buf: Buf, nodes: &[Node]) {
        let ops = &self.plan.ops;
        let Op::Linear { parts, .. } = &ops[i] else { return };
        let mut groups: Vec<Vec<Part>> = Vec::new();
        let mut x = None;
        for node in nodes {
            let Node::Linear { x: row, parts } = node else { continue };
            x = Some(*row);
            groups.push(parts.clone());
        }
        let Some(x) = x else { return };
        let Source { x, prologue } = self.source(buf, x);
        // An output that is only added to a row.
        let next = match ops.get(i + 1) {
            Some(&Op::RmsNorm { x: to, residual: Some(y), .. } | &Op::Add { x: to, y }) => Some((to, y)),
            _ => None,
        };
        let mut add = false;
        if let (Some((_, y)), [part]) = (next, parts.as_slice()) {
            let row = match self.nodes[i + 1].as_slice() {
                [Node::RmsNorm { x, .. } | Node::Add { x, .. }] => *x,
                _ => return,
            };
            add = y == part.out && self.is_only_read_by(y, i, i + 1) && row.rows == x.rows;
            if add {
                groups[0][0].out = row;
                self.added.insert(y);
            }
        }
        if self.posts.iter().any(|post| post.first == i + 1) {
            groups[0][0].out.ptr = self.room.shared;
        }
        let is_affine = |t: WeightType| matches!(t, WeightType::Affine(_));
        while !groups.is_empty() {
            let first = groups.remove(0);
            let other = groups.iter().position(|g| !is_affine(g[0].w.dtype)).filter(|_| !is_affine(first[0].w.dtype));
            let second = other.map(|at| groups.remove(at)).unwrap_or_default();
            let module = match second.first() {
                Some(part) => self.modules.id(Key::pair(sources::LINEAR_PAIR, first[0].w.dtype, part.w.dtype)),
                None => first[0].w.module,
            };
            let few = self.through_shared(&first, &second, prologue.kind);
            self.out.push(Node::FewLinear(FewLinearNode {
                x,
                module,
                parts: [first, second],
                prologue,
                add,
                few,
                routed: None,
            }));
        }
    }

    /// The kernels of a product, or of a pair, whose weights go through shared memory.
    fn through_shared(&mut self, first: &[Part], second: &[Part], prologue: u32) -> Option<ModuleId> {
        let device = self.device?;
        let n = |parts: &[Part]| parts.iter().map(|part| part.w.n).sum::<usize>();
        let (w, half) = (first[0].w, Half::Shared);
        let has_gate = prologue > NORMED;
        if let Some(other) = second.first() {
            let types = [w.dtype, other.w.dtype];
            few_launch::pair(types, 1, w.k, [n(first), n(second)], device, half).filter(|_| !has_gate)?;
            return Some(self.modules.id(Key::pair(sources::FEW_LINEAR, types[0], types[1])));
        }
        let is_long = || first.len() == 1 && !has_gate && few_launch::long(w.dtype, w.k, w.n, device).is_some();
        let is_twice = || !has_gate && few_launch::linear_twice(w.dtype, w.k, n(first), device).is_some();
        let is_whole = few_launch::linear(w.dtype, 1, w.k, n(first), has_gate, device, half).is_some();
        if !is_whole && !is_long() && !is_twice() {
            return None;
        }
        Some(self.modules.id(Key::typed(sources::FEW_LINEAR, w.dtype)))
    }

    /// Kernels for one row that choose its experts, where shares of the chosen alone are wanted and weights fit in
    /// shared memory: of gate and up, and of down.
    fn late(&mut self, route: &RouteNode, experts: &ExpertsNode, has_shared: bool) -> Option<[Late; 2]> {
        let device = self.device?;
        let ExpertsNode { gate, down, n_used, .. } = *experts;
        let (n_shared, k_shared) = if has_shared { (gate.n, Some(down.k)) } else { (0, None) };
        let is_plain = route.score() == 0
            && route.router.renormalise == Some(0.0)
            && route.router.groups.is_none()
            && route.bias == 0
            && n_used <= 31;
        let shape = [gate.n, gate.k];
        few_launch::experts(gate.dtype, n_used, n_shared, shape, device, Half::Shared).filter(|_| is_plain)?;
        few_launch::down(down.dtype, n_used, k_shared, [down.n, down.k], device, Half::Shared)?;
        let n_expert = route.logits.width;
        let sources = [(sources::FEW_EXPERTS, gate.dtype), (sources::FEW_DOWN, down.dtype)];
        Some(sources.map(|(source, w)| Late {
            module: self.modules.id(Key::routed(source, w, n_expert)),
            route: *route,
            parts: None,
        }))
    }

    /// Gives the product before a router, which adds to the row that it norms, the router's product too; for one row.
    fn routed(&mut self, source: &Source, parts: &[Part], route: &RouteNode) -> Option<LogitParts> {
        let (device, Source { x, prologue }, n_expert) = (self.device?, *source, route.logits.width);
        let [Part { w: router, bias: 0, .. }] = parts else { return None };
        let Some(Node::FewLinear(node)) = self.out.last_mut() else { return None };
        let FewLinearNode { parts: [first, second], add: true, few: Some(_), .. } = node else { return None };
        let (&[Part { w, out, .. }], true) = (first.as_slice(), second.is_empty()) else { return None };
        let fits = router.dtype == WeightType::F32
            && prologue.kind == NORMED
            && node.prologue.kind == 0
            && (out.ptr, out.rows, out.width) == (x.ptr, x.rows, x.width)
            && (node.x.rows, route.logits.rows) == (x.rows, x.rows);
        few_launch::routed(w.dtype, w.k, w.n, n_expert, device, Half::Shared).filter(|_| fits)?;
        let key = Key::clustered(sources::FEW_ROUTED, w.dtype, n_expert, few_launch::ROUTED_CLUSTER);
        let module = self.modules.id(key);
        let (router, norm, parts) = (router.data.q, prologue.w, route.logits.ptr);
        node.routed = Some(Routed { module, router, norm, parts, n_expert });
        Some(LogitParts { n: few_launch::routed_parts(w.n), k: w.n, eps: prologue.eps })
    }

    /// Kernels for the pairs of several rows, where weights of both products go through shared memory.
    fn pairs(&mut self, experts: &ExpertsNode) -> Option<[ModuleId; 2]> {
        let (device, ExpertsNode { gate, down, .. }) = (self.device?, *experts);
        few_launch::pairs(gate.dtype, true, 1, 0, gate.n, gate.k, device)?;
        few_launch::pairs(down.dtype, false, 1, 0, down.n, down.k, device)?;
        Some([gate.dtype, down.dtype].map(|w| self.modules.id(Key::typed(sources::FEW_PAIRS, w))))
    }

    /// The head norms, ropes, append and attention behind the product of op `i`; the op behind them.
    fn attend(&mut self, i: usize) -> Option<usize> {
        let ops = &self.plan.ops;
        let end = (i + 1..ops.len()).find(|&j| {
            !matches!(ops[j], Op::SplitHeads { .. } | Op::HeadNorm { .. } | Op::Rope { .. } | Op::KvAppend { .. })
        })?;
        let (&Op::Attention { q, out, .. }, &[Node::Attention(node)]) = (&ops[end], self.nodes[end].as_slice()) else {
            return None;
        };
        let AttentionNode { cache, q: q_view, n_head, .. } = node;
        let d = cache.d_k;
        let fits = self.is_f16 && cache.v != 0 && !node.v_in_k && cache.d_v == d && matches!(d, 64 | 128 | 256);
        let moves = self.readers(out, end).iter().all(|&j| {
            matches!(ops[j], Op::Linear { .. } | Op::Select { .. })
                || matches!(ops[j], Op::SigmoidGate { x, .. } if x == out)
        });
        if !fits || !moves {
            return None;
        }
        let mut heads = Vec::new();
        let mut small = Vec::new();
        for j in i + 1..end {
            match ops[j] {
                Op::SplitHeads { .. } => heads.extend(self.nodes[j].iter().cloned()),
                _ => small.extend(self.nodes[j].iter().cloned()),
            }
        }
        let qkv = qkv_of(&small)?;
        let part = |view: View, n_head: usize, cache: Ptr| {
            let found = qkv.parts.iter().find(|part| part.x.ptr == view.ptr).copied();
            found.unwrap_or(QkvPartNode {
                x: view,
                n_head,
                d_head: d,
                w: 0,
                cache,
                is_normed: false,
                is_rotated: false,
            })
        };
        let mut q_part = part(q_view, n_head, 0);
        let k_part = *qkv.parts.iter().find(|part| part.cache == cache.k)?;
        let v_part = *qkv.parts.iter().find(|part| part.cache == cache.v)?;
        let others = qkv.parts.iter().any(|p| ![q_view.ptr, k_part.x.ptr, v_part.x.ptr].contains(&p.x.ptr));
        if q_part.cache != 0 || others || [q_part, k_part, v_part].iter().any(|p| p.d_head != d) {
            return None;
        }
        let mut q_stride = d;
        let mut rest = Vec::new();
        for node in heads {
            let Node::Heads { whole, part, first, width, d_head, is_split: true } = node else { return None };
            let ptr = whole.ptr + 4 * first as Ptr;
            if part.ptr == q_view.ptr {
                q_part.x.ptr = ptr;
                q_stride = d_head;
            } else {
                rest.push((part, Strided { ptr, d_head: width, head: d_head, row: whole.width }, node));
            }
        }
        // Gates of the same split are read where they lie.
        for (view, strided, node) in rest {
            let split = (i + 1..end).find_map(|j| match &ops[j] {
                Op::SplitHeads { parts, .. } => {
                    let nodes = &self.nodes[j];
                    let at =
                        nodes.iter().position(|n| matches!(n, Node::Heads { part, .. } if part.ptr == view.ptr))?;
                    Some((j, parts[at].1))
                }
                _ => None,
            });
            let (j, buf) = split?;
            let readers = self.readers(buf, j);
            let is_gate = readers.len() == 1
                && matches!(ops[readers[0]], Op::SigmoidGate { x, gate } if gate == buf && x == out)
                && matches!(ops.get(readers[0] + 1), Some(Op::Linear { x, .. }) if *x == out)
                && strided.d_head % 8 == 0
                && self.is_only_read_by(out, readers[0], readers[0] + 1);
            if is_gate {
                self.strided.insert(buf, strided);
            } else {
                self.out.push(node);
            }
        }
        let group = n_head / cache.n_kv;
        let heads = group.next_power_of_two().min(8);
        let to = View { ptr: self.room.attended, rows: Rows::Tokens, width: n_head * d };
        let module = self.modules.id(Key::attend(sources::ATTEND_LONG, d, heads));
        let few_heads = heads.min(2);
        let short = Some((self.modules.id(Key::attend(sources::ATTEND, d, few_heads)), few_heads));
        self.out.push(Node::Attend(AttendNode {
            module,
            heads,
            short,
            parts: [q_part, k_part, v_part],
            q_stride,
            rope: qkv.rope,
            eps: qkv.eps,
            attention: AttentionNode { out: to, ..node },
            counters: self.room.counters + 4,
        }));
        self.sources.insert(out, Source { x: to, prologue: Prologue::default() });
        let _ = q;
        Some(end + 1)
    }

    /// A router with its experts and their sum.
    fn route(&mut self, moe: Moe) -> Option<()> {
        let ops = &self.plan.ops;
        let (&Op::Linear { x: f, .. }, &Op::Experts { x: g, .. }) = (&ops[moe.linear], &ops[moe.experts]) else {
            return None;
        };
        let [Node::Linear { x, parts }] = self.nodes[moe.linear].as_slice() else { return None };
        let [Node::Route(route)] = self.nodes[moe.route].as_slice() else { return None };
        let [Node::Experts(experts)] = self.nodes[moe.experts].as_slice() else { return None };
        let [Node::Combine { x: row, add, weights, norm_w, eps, .. }] = self.nodes[moe.combine].as_slice() else {
            return None;
        };
        let (mut route, experts, row) = (*route, *experts, *row);
        route.logits.ptr = self.room.logits;
        let of_router = self.source(f, *x);
        let dtype = parts[0].w.dtype;
        let module = self.modules.id(Key::routed(sources::ROUTER, dtype, route.logits.width));
        let mut own_parts = parts.clone();
        own_parts[0].out = route.logits;
        let mut late = self.late(&route, &experts, moe.shared.is_some_and(|shared| !shared.is_other));
        let added = self.of_router.take();
        let logit_parts = match &mut late {
            Some(late) if moe.scale.is_none() && added.is_none() => {
                self.routed(&of_router, parts, &route).inspect(|parts| {
                    for of in late {
                        of.parts = Some(*parts);
                    }
                })
            }
            _ => None,
        };
        let node = RouterNode {
            module,
            x: of_router.x,
            prologue: of_router.prologue,
            parts: own_parts,
            route,
            logits: (dtype == WeightType::F32).then(|| self.modules.id(Key::typed(sources::LOGITS, dtype))),
            counter: self.room.counters,
            scale: moe.scale.unwrap_or(1.0),
            is_late: late.is_some(),
            added,
            is_routed: logit_parts.is_some(),
        };
        self.out.push(Node::Router(node));
        if let Some(&[Node::RmsNorm { x, w, eps, .. }]) = moe.norm.map(|at| self.nodes[at].as_slice()) {
            let prologue = Prologue { w, kind: NORMED, eps, ..Prologue::default() };
            let x = match ops[moe.norm.unwrap_or(moe.route)] {
                Op::RmsNorm { x: buf, .. } => self.row(buf, x),
                _ => x,
            };
            self.sources.insert(g, Source { x, prologue });
        }
        let of_experts = self.source(g, experts.x);
        let pairs = self.pairs(&experts);
        let prologue = of_experts.prologue;
        let (mut dense_up, mut dense_down) = self.dense.take().unzip();
        let mut other = None;
        if let Some(shared) = moe.shared.filter(|shared| shared.is_other)
            && let ([Node::GatedLinear { gate, up, act, .. }], [Node::Linear { parts, .. }]) =
                (self.nodes[shared.gated].as_slice(), self.nodes[shared.down].as_slice())
        {
            let out = View { ptr: self.room.dense, rows: experts.x.rows, width: gate.n };
            let prologue = of_experts.prologue;
            dense_up = Some(DenseUp { gate: *gate, up: *up, act: *act, out, prologue, is_shared: true });
            let part = Part { out: row, ..parts[0] };
            let few = self.through_shared(&[part], &[], 0);
            let (module, parts) = (part.w.module, [vec![part], Vec::new()]);
            let prologue = Prologue::default();
            dense_down = Some(FewLinearNode { x: out, module, parts, prologue, add: true, few, routed: None });
            let types = [experts.down.dtype, part.w.dtype];
            other = Some(match types[0] == types[1] {
                true => self.modules.id(Key::typed(sources::EXPERTS_DOWN, types[0])),
                false => self.modules.id(Key::pair(sources::EXPERTS_DOWN, types[0], types[1])),
            });
        }
        let late_up = late.map(|[up, _]| up);
        let mut up = UpNode { experts, shared: None, dense: dense_up, prologue, late: late_up, pairs };
        up.experts.x = of_experts.x;
        let module = self.modules.id(Key::typed(sources::EXPERTS_DOWN, experts.down.dtype));
        let late = late.map(|[_, down]| down);
        let (add, weights) = (*add, *weights);
        let mut down = DownNode {
            module,
            experts,
            x: row,
            add,
            weights,
            shared: None,
            share: 0,
            dense: dense_down,
            other,
            late,
            pairs,
        };
        if let Some(shared) = moe.shared.filter(|shared| shared.is_other)
            && let Op::Linear { parts, .. } = &ops[shared.down]
        {
            self.added.insert(parts[0].out);
        }
        if let Some(shared) = moe.shared.filter(|shared| !shared.is_other) {
            let hidden = View { ptr: self.room.shared, rows: experts.x.rows, width: experts.gate.n };
            if let ([Node::GatedLinear { gate, up: of_up, .. }], [Node::Linear { parts, .. }]) =
                (self.nodes[shared.gated].as_slice(), self.nodes[shared.down].as_slice())
            {
                up.shared = Some((*gate, *of_up, hidden));
                down.shared = Some((parts[0].w, hidden));
            }
            if let Some([Node::SigmoidGate { gate, .. }]) = shared.gate.map(|at| self.nodes[at].as_slice()) {
                down.share = gate.ptr;
            }
            if let Op::Linear { parts, .. } = &ops[shared.down] {
                self.added.insert(parts[0].out);
            }
        }
        self.out.push(Node::ExpertsUp(up));
        self.out.push(Node::ExpertsDown(down));
        if let &Op::Combine { x, norm: Some(norm), .. } = &ops[moe.combine] {
            if self.is_absorbed(norm.out, x, moe.combine) {
                let prologue = Prologue { w: *norm_w, kind: NORMED, eps: *eps, ..Prologue::default() };
                self.sources.insert(norm.out, Source { x: row, prologue });
            } else if self.posts.iter().any(|post| post.combine == moe.combine) {
                // Its norm comes with the sum.
            } else if let [Node::Combine { norm_out, .. }] = self.nodes[moe.combine].as_slice() {
                let out = View { ptr: *norm_out, ..row };
                self.out.push(Node::RmsNorm { x: row, residual: 0, w: *norm_w, eps: *eps, out });
            }
        }
        Some(())
    }
}

fn gate_of(kind: u32, w: Ptr, eps: f32, at: Strided) -> Prologue {
    let Strided { ptr, d_head, head, row } = at;
    let (d_head, gate_head, gate_row) = (d_head as u32, head as u32, row as u32);
    Prologue { w, gate: ptr, kind, d_head, gate_head, gate_row, eps, reserved: 0 }
}
