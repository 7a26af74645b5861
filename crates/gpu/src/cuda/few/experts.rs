//! A router with its experts and their sum, the shared expert, and a dense feed-forward beside them.

use model::plan::Op;
use quant::WeightType;

use super::super::args::Prologue;
use super::super::few_launch::{self, Half};
use super::super::nodes::{
    DenseUp, DownNode, ExpertsNode, FewLinearNode, Late, ModuleId, Node, PairsNode, Part, PostNormNode, RouteNode,
    Routed, RouterNode, Sums, UpNode, View,
};
use super::super::sources::{self, Key};
use super::pattern::{Dense, Moe, Shared};
use super::{Few, NORMED, Source};

impl Few<'_> {
    /// A router with its experts and their sum.
    pub(super) fn route(&mut self, moe: Moe) -> Option<()> {
        let ops = &self.plan.ops;
        let (&Op::Linear { x: f, .. }, &Op::Experts { x: g, .. }) = (&ops[moe.linear], &ops[moe.experts]) else {
            return None;
        };
        let [Node::Linear { x, parts }] = self.nodes[moe.linear].as_slice() else { return None };
        let [Node::Route(route)] = self.nodes[moe.route].as_slice() else { return None };
        let [Node::Experts(experts)] = self.nodes[moe.experts].as_slice() else { return None };
        let [Node::Combine { x: row, add, weights, .. }] = self.nodes[moe.combine].as_slice() else { return None };
        let (mut route, mut experts, row) = (*route, *experts, *row);
        route.logits.ptr = self.room.logits;
        let of_router = self.source(f, *x);
        let dtype = parts[0].w.dtype;
        let module = self.modules.id(Key::routed(sources::ROUTER, dtype, route.logits.width));
        let mut own_parts = parts.clone();
        own_parts[0].out = route.logits;
        let added = self.of_router.take();
        let is_one = added.is_some() || self.dense.is_some() || moe.shared.is_some_and(|shared| shared.is_other);
        let most_rows = if is_one { 1 } else { few_launch::LATE_ROWS };
        let mut late = self.late(&route, &experts, moe.shared.is_some_and(|shared| !shared.is_other), most_rows);
        let sums = match &mut late {
            Some(late) if moe.scale.is_none() && added.is_none() => {
                self.routed(&of_router, parts, &route).inspect(|sums| {
                    for of in late {
                        of.sums = Some(*sums);
                    }
                })
            }
            _ => None,
        };
        if let Some(&[Node::RmsNorm { x, w, eps, .. }]) = moe.norm.map(|at| self.nodes[at].as_slice()) {
            let prologue = Prologue { w, kind: NORMED, eps, ..Prologue::default() };
            let x = match ops[moe.norm.unwrap_or(moe.route)] {
                Op::RmsNorm { x: buf, .. } => self.row(buf, x),
                _ => x,
            };
            self.sources.insert(g, Source { x, prologue });
        }
        let of_experts = self.source(g, experts.x);
        experts.x = of_experts.x;
        let pairs = self.pairs(&experts, added.is_none());
        let node = RouterNode {
            module,
            x: of_router.x,
            prologue: of_router.prologue,
            parts: own_parts,
            route,
            logits: (dtype == WeightType::F32).then(|| self.modules.id(Key::typed(sources::LOGITS, dtype))),
            counter: self.room.counters,
            scale: moe.scale.unwrap_or(1.0),
            late_rows: late.map_or(0, |[up, _]| up.rows),
            packs: pairs.filter(|pairs| pairs.is_packed).map(|_| (experts, of_experts.prologue)),
            added,
            is_routed: sums.is_some(),
        };
        self.out.push(Node::Router(node));
        let prologue = of_experts.prologue;
        let (late_up, late_down) = late.map(|[up, down]| (up, down)).unzip();
        let (mut dense_up, mut dense_down) = self.dense.take().unzip();
        let mut other = None;
        if let Some(shared) = moe.shared.filter(|shared| shared.is_other)
            && let Some((up, down, module)) = self.shared_of_another_shape(shared, &experts, prologue, row)
        {
            (dense_up, dense_down, other) = (Some(up), Some(down), Some(module));
        }
        let mut up = UpNode { experts, shared: None, dense: dense_up, prologue, late: late_up, pairs };
        let mut down = DownNode {
            module: self.modules.id(Key::typed(sources::EXPERTS_DOWN, experts.down.dtype)),
            experts,
            x: row,
            add: *add,
            weights: *weights,
            shared: None,
            share: 0,
            dense: dense_down,
            other,
            late: late_down,
            pairs,
            columns: None,
        };
        if let Some(shared) = moe.shared {
            if !shared.is_other {
                self.shared_of_the_same_shape(shared, &mut up, &mut down);
            }
            if let Op::Linear { parts, .. } = &ops[shared.down] {
                self.added.insert(parts[0].out);
            }
        }
        self.out.push(Node::ExpertsUp(up));
        self.out.push(Node::ExpertsDown(down));
        self.norm_of_sum(moe.combine, row);
        Some(())
    }

    /// Adds a shared expert to the nodes of the others, whose launches it shares.
    fn shared_of_the_same_shape(&self, shared: Shared, up: &mut UpNode, down: &mut DownNode) {
        let ExpertsNode { x, gate, .. } = down.experts;
        let hidden = View { ptr: self.room.shared, rows: x.rows, width: gate.n };
        if let ([Node::GatedLinear { gate, up: of_up, .. }], [Node::Linear { parts, .. }]) =
            (self.nodes[shared.gated].as_slice(), self.nodes[shared.down].as_slice())
        {
            up.shared = Some((*gate, *of_up, hidden));
            down.shared = Some((parts[0].w, hidden));
        }
        if let Some([Node::GateBy { gate, .. }]) = shared.gate.map(|at| self.nodes[at].as_slice()) {
            down.share = gate.ptr;
        }
    }

    /// A shared expert of another shape as a dense feed-forward beside the others, added to `row`; with the module for
    /// both last products.
    fn shared_of_another_shape(
        &mut self,
        shared: Shared,
        experts: &ExpertsNode,
        prologue: Prologue,
        row: View,
    ) -> Option<(DenseUp, FewLinearNode, ModuleId)> {
        let ([Node::GatedLinear { gate, up, act, .. }], [Node::Linear { parts, .. }]) =
            (self.nodes[shared.gated].as_slice(), self.nodes[shared.down].as_slice())
        else {
            return None;
        };
        let hidden = View { ptr: self.room.dense, rows: experts.x.rows, width: gate.n };
        let up = DenseUp { gate: *gate, up: *up, act: *act, out: hidden, prologue, is_shared: true };
        let part = Part { out: row, ..parts[0] };
        let few = self.through_shared(&[part], &[], 0);
        let down = FewLinearNode {
            x: hidden,
            module: part.w.module,
            parts: [vec![part], Vec::new()],
            prologue: Prologue::default(),
            add: true,
            few,
            routed: None,
            columns: None,
        };
        let types = [experts.down.dtype, part.w.dtype];
        let key = match types[0] == types[1] {
            true => Key::typed(sources::EXPERTS_DOWN, types[0]),
            false => Key::pair(sources::EXPERTS_DOWN, types[0], types[1]),
        };
        Some((up, down, self.modules.id(key)))
    }

    /// The norm of the experts' sum `row`, where op `combine` has one: its readers', a node's own, or with a later sum.
    fn norm_of_sum(&mut self, combine: usize, row: View) {
        let (&Op::Combine { x, norm: Some(norm), .. }, &[Node::Combine { norm_w: w, norm_out, eps, .. }]) =
            (&self.plan.ops[combine], self.nodes[combine].as_slice())
        else {
            return;
        };
        if self.is_absorbed(norm.out, x, combine) {
            let prologue = Prologue { w, kind: NORMED, eps, ..Prologue::default() };
            self.sources.insert(norm.out, Source { x: row, prologue });
        } else if !self.posts.iter().any(|post| post.combine == combine) {
            self.out.push(Node::RmsNorm { x: row, residual: 0, w, eps, out: View { ptr: norm_out, ..row } });
        }
    }

    /// Keeps the dense feed-forward that begins with op `i` for the nodes of the router and the experts behind it.
    /// Returns the next op.
    pub(super) fn dense(&mut self, i: usize) -> Option<usize> {
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
            columns: None,
        };
        self.dense = Some((dense_up, dense_down));
        // The norm of its product comes with the experts' sum.
        Some(down + 1)
    }

    /// Kernels for one row, or up to `most_rows`, that choose its experts, where weights are shares of the chosen
    /// alone and matrices fit in shared memory: of gate and up, and of down.
    fn late(
        &mut self,
        route: &RouteNode,
        experts: &ExpertsNode,
        has_shared: bool,
        most_rows: usize,
    ) -> Option<[Late; 2]> {
        let device = self.device?;
        let ExpertsNode { gate, down, n_used, .. } = *experts;
        let (n_shared, k_shared) = if has_shared { (gate.n, Some(down.k)) } else { (0, None) };
        let is_plain = route.score() == 0
            && route.router.renormalise == Some(0.0)
            && route.router.groups.is_none()
            && route.bias == 0
            && n_used <= 31;
        let [up_shape, down_shape] = [gate, down].map(|w| [w.n, w.k]);
        let fits = |rows: &usize| match *rows {
            1 => {
                few_launch::experts(gate.dtype, n_used, n_shared, up_shape, device, Half::Shared).is_some()
                    && few_launch::down(down.dtype, n_used, k_shared, down_shape, device, Half::Shared).is_some()
            }
            rows => [Half::Shared, Half::Registers].into_iter().all(|half| {
                let n_experts = n_used + usize::from(has_shared);
                few_launch::experts_rows(gate.dtype, rows, n_experts, up_shape, device, half).is_some()
                    && few_launch::down_rows(down.dtype, rows, n_used, has_shared, down_shape, device, half).is_some()
            }),
        };
        let rows = (1..=most_rows).take_while(fits).last().filter(|_| is_plain)?;
        let n_expert = route.logits.width;
        let sources = [(sources::FEW_EXPERTS, gate.dtype), (sources::FEW_DOWN, down.dtype)];
        Some(sources.map(|(source, w)| Late {
            module: self.modules.id(Key::routed(source, w, n_expert)),
            route: *route,
            rows,
            sums: None,
        }))
    }

    /// Gives the product before a router, which adds to the row that it norms, the router's product too; for one row.
    fn routed(&mut self, source: &Source, parts: &[Part], route: &RouteNode) -> Option<Sums> {
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
        let module = self.modules.id(Key::routed(sources::FEW_ROUTED, w.dtype, n_expert));
        let (router, norm) = (router.data.q, prologue.w);
        let sums = self.sums;
        self.sums.of += 8 * few_launch::routed_sums(n_expert) as u64;
        node.routed = Some(Routed { module, router, norm, sums, n_expert });
        Some(Sums { of: sums, n_squares: few_launch::routed_blocks(w.n), k: w.n, eps: prologue.eps })
    }

    /// Kernels for the pairs of several rows, where weights of both products go through shared memory.
    fn pairs(&mut self, experts: &ExpertsNode, is_packed: bool) -> Option<PairsNode> {
        let (device, ExpertsNode { gate, down, .. }) = (self.device?, *experts);
        few_launch::pairs(gate.dtype, true, 1, 0, gate.n, gate.k, device)?;
        few_launch::pairs(down.dtype, false, 1, 0, down.n, down.k, device)?;
        let modules = [gate.dtype, down.dtype].map(|w| self.modules.id(Key::typed(sources::FEW_PAIRS, w)));
        Some(PairsNode { modules, is_packed })
    }
}
