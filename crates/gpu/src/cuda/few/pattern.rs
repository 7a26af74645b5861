//! Finds the ops of a plan that one node, or a few, can stand for: no other op reads what they pass on to each other.

use model::plan::{Access, Buf, GateFactor, Op, Plan};
use quant::WeightType;

use super::super::matmul;
use super::super::nodes::{Mat, Node};
use super::{Few, MAX_POST};

/// A router with its experts: indices of their ops.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moe {
    pub(super) linear: usize,
    /// Scales the logits, where there is one.
    pub(super) scale: Option<f32>,
    pub(super) route: usize,
    /// The norm between router and experts, where only the experts read it.
    pub(super) norm: Option<usize>,
    pub(super) experts: usize,
    pub(super) combine: usize,
    pub(super) shared: Option<Shared>,
    pub(super) dense: Option<Dense>,
}

impl Moe {
    pub(super) fn last(&self) -> usize {
        self.shared.map_or(0, |s| s.gate.unwrap_or(s.down)).max(self.combine)
    }

    fn has(&self, op: usize) -> bool {
        (self.linear..=self.last()).contains(&op)
    }
}

/// A dense feed-forward in front of the router, whose output only a later norm reads, and the norm in front of it,
/// which adds a normed row to its own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dense {
    /// The norm of the row that is added, right before `norm`.
    pub(super) added: usize,
    pub(super) norm: usize,
    pub(super) gated: usize,
    pub(super) down: usize,
}

/// A shared expert of the same shape, and the gate of its sum.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shared {
    pub(super) gated: usize,
    pub(super) down: usize,
    pub(super) gate: Option<usize>,
    /// Its matrices have another shape, or its last one another type.
    pub(super) is_other: bool,
}

/// Two rows that are normed, added, normed and added to a third: indices of their ops.
#[derive(Clone, Copy, Debug)]
pub(super) struct Post {
    /// The norm of a product's output.
    pub(super) first: usize,
    /// The experts' sum, and its norm.
    pub(super) combine: usize,
    pub(super) sum: usize,
    pub(super) add: usize,
    pub(super) scale: Option<usize>,
}

/// The ops behind `i` that read a buffer before it is overwritten.
pub(super) fn readers(plan: &Plan, buf: Buf, i: usize) -> Vec<usize> {
    let mut found = Vec::new();
    for (j, op) in plan.ops.iter().enumerate().skip(i + 1) {
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

/// Whether one op alone reads what op `i` put there.
pub(super) fn is_only_read_by(plan: &Plan, buf: Buf, i: usize, reader: usize) -> bool {
    readers(plan, buf, i) == [reader] && !plan.is_returned(buf)
}

/// Notes which experts on the device have outputs that only a weighted sum reads.
pub fn mark_summed(plan: &Plan, nodes: &mut [Vec<Node>]) {
    for (i, nodes) in nodes.iter_mut().enumerate() {
        let (&Op::Experts { out, .. }, [Node::Experts(experts)]) = (&plan.ops[i], nodes.as_mut_slice()) else {
            continue;
        };
        let sum = |j: &usize| matches!(plan.ops[*j], Op::Combine { x, y, .. } if y == out && x != out);
        experts.is_summed =
            readers(plan, out, i).first().filter(|j| sum(j)).is_some_and(|&j| is_only_read_by(plan, out, i, j));
    }
}

/// Notes which attention has an output that only the product after it reads.
pub fn mark_multiplied(plan: &Plan, nodes: &mut [Vec<Node>]) {
    for (i, nodes) in nodes.iter_mut().enumerate() {
        let (&Op::Attention { out, .. }, [Node::Attention(node)]) = (&plan.ops[i], nodes.as_mut_slice()) else {
            continue;
        };
        let is_product = matches!(plan.ops.get(i + 1), Some(Op::Linear { x, parts }) if *x == out && parts.len() == 1);
        node.is_multiplied = is_product && is_only_read_by(plan, out, i, i + 1);
    }
}

/// Notes which sums nothing reads but a norm with a residual.
pub fn mark_added(plan: &Plan, nodes: &mut [Vec<Node>]) {
    for (i, nodes) in nodes.iter_mut().enumerate() {
        let (&Op::AllReduce { x }, [Node::AllReduce(sum)]) = (&plan.ops[i], nodes.as_mut_slice()) else { continue };
        let adds = |&j: &usize| matches!(plan.ops[j], Op::RmsNorm { residual, .. } if residual == Some(x));
        let readers = readers(plan, x, i);
        sum.is_added = readers.len() == 1 && readers.iter().all(adds) && !plan.is_returned(x);
    }
}

impl Few<'_> {
    /// The ops behind `i` that read a buffer before it is overwritten.
    pub(super) fn readers(&self, buf: Buf, i: usize) -> Vec<usize> {
        readers(self.plan, buf, i)
    }

    pub(super) fn is_only_read_by(&self, buf: Buf, i: usize, reader: usize) -> bool {
        is_only_read_by(self.plan, buf, i, reader)
    }

    /// Whether every reader of a normed buffer can norm it itself, from a row that is still the same then.
    pub(super) fn is_absorbed(&self, normed: Buf, x: Buf, i: usize) -> bool {
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
        !self.plan.is_returned(normed) && readers.iter().all(fits) && is_same && is_alive
    }

    /// The router whose product is op `i`, with what follows it.
    pub(super) fn moe(&self, i: usize) -> Option<Moe> {
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

    /// The shared expert that begins with op `at`, where it can share the launches of op `experts`.
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
            Op::GateBy { x: y, gate, factor: GateFactor::Sigmoid }
                if *y == part.out && self.plan.buf(*gate).width == 1 =>
            {
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
            && !act.has_limit()
            && (is_same || is_other)
            && self.is_only_read_by(hidden, at, at + 1);
        fits.then_some(Shared { gated: at, down: at + 1, gate: gate_op, is_other: !is_same })
    }

    /// The dense feed-forward in front of a router that can share the experts' launches.
    pub(super) fn dense_beside(&self, moe: Moe) -> Option<Dense> {
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
            && !act.has_limit()
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
    pub(super) fn post(&self, i: usize) -> Option<Post> {
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
            Some(Op::ScaleBy { x, w }) if *x == to && self.plan.weight(*w).n_values() == 1 => Some(sum + 2),
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
}
