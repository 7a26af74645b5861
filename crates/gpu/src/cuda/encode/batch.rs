//! Launches of steps of 9 single tokens and more: columns are packed after their norm or gate, then multiplied
//! (`batch.rs`).

use quant::WeightType;

use super::super::args;
use super::super::batch::{self, Batch, Order};
use super::super::driver::{DriverError, Ptr};
use super::super::few;
use super::super::few_launch;
use super::super::launch::Launch;
use super::super::matmul;
use super::super::nodes::{
    DownNode, ExpertsNode, FewLinearNode, Mat, ModuleId, Modules, Node, PackedNode, PairsNode, Part, RouterNode,
    UpNode, View,
};
use super::super::wide;
use super::ahead::form;
use super::{Encoder, gated_args, linear_args};

/// Scratch of these steps.
#[derive(Clone, Copy, Debug, Default)]
pub struct BatchScratch {
    /// Packed columns: two halves.
    pub x: Ptr,
    /// Bytes of both.
    pub x_bytes: usize,
    /// The experts' activations.
    pub hidden: Ptr,
    /// What the shared expert puts out.
    pub shared: Ptr,
}

/// Whether a list of nodes made for few rows can run for more.
pub fn fits(nodes: &[Node]) -> bool {
    nodes.iter().all(|node| match node {
        Node::GatedLinear { gate, .. } => gate.batch.is_some(),
        Node::ExpertsUp(UpNode { dense: Some(dense), .. }) if dense.gate.batch.is_none() => false,
        Node::ExpertsUp(UpNode { experts, .. }) | Node::ExpertsDown(DownNode { experts, .. }) => {
            has_experts(experts).is_some()
        }
        _ => true,
    })
}

/// The modules of the experts' products, where both have kernels for such steps.
fn has_experts(node: &ExpertsNode) -> Option<[ModuleId; 2]> {
    let same = node.gate.dtype == node.up.dtype;
    node.gate.batch.zip(node.down.batch).filter(|_| same).map(|(gate, down)| [gate, down])
}

/// The arguments that all kernels of gate, up and activation share.
pub(super) fn up_args(node: &UpNode, rows: usize) -> args::Experts {
    let ExpertsNode { x, ids, gate, up, biases: [bias, up_bias, _], act, n_expert, n_used, .. } = node.experts;
    let (shared_w, shared_up) = node.shared.map_or_else(Default::default, |(w, up, _)| (w.data, up.data));
    args::Experts {
        x: x.ptr,
        ids: ids.ptr,
        w: gate.data,
        up: up.data,
        bias,
        up_bias,
        rows: rows as u32,
        n_used: n_used as u32,
        n_expert: n_expert as u32,
        n: gate.n as u32,
        k: gate.k as u32,
        act: act.kind,
        alpha: act.alpha,
        limit: act.limit,
        n_shared: u32::from(node.shared.is_some()),
        shared_n: node.shared.map_or(0, |(w, ..)| w.n as u32),
        shared_w,
        shared_up,
        ..Default::default()
    }
}

/// The arguments that kernels of the last product share which put out a row a pair.
fn down_args(node: &ExpertsNode, shared: Option<args::Matrix>, rows: usize) -> args::Experts {
    let ExpertsNode { ids, down, biases: [_, _, bias], n_expert, n_used, out, .. } = *node;
    args::Experts {
        ids: ids.ptr,
        w: down.data,
        bias,
        out: out.ptr,
        rows: rows as u32,
        n_used: n_used as u32,
        n_expert: n_expert as u32,
        n: down.n as u32,
        k: down.k as u32,
        x_per_pair: 1,
        n_shared: u32::from(shared.is_some()),
        shared_w: shared.unwrap_or_default(),
        ..Default::default()
    }
}

impl Encoder<'_> {
    /// Whether products of so many rows take these kernels.
    pub fn is_batch(rows: usize) -> bool {
        batch::ROWS.contains(&rows)
    }

    /// Whether a step of so few rows, `from` and up, may take these kernels or those for pairs: there is scratch.
    pub fn is_few_batch(&self, rows: usize, from: usize) -> bool {
        (from..=few::MAX_ROWS).contains(&rows) && self.scratch.batch.x_bytes > 0
    }

    /// Packs rows in the orders of up to two types: columns for each.
    fn pack(
        &mut self,
        x: Ptr,
        prologue: args::Prologue,
        rows: usize,
        k: usize,
        orders: &[Order],
    ) -> Result<[args::Batched; 2], DriverError> {
        let BatchScratch { x: first, x_bytes, .. } = self.scratch.batch;
        self.normed = None;
        let mut columns = [args::Batched::default(); 2];
        let mut to = [args::PackTo::default(); 3];
        let mut n = 0;
        for (i, &order) in orders.iter().enumerate() {
            if i > 0 && order == orders[0] {
                columns[i] = columns[0];
                continue;
            }
            let out = first + (n * x_bytes / 2) as Ptr;
            let stride = order.stride(k) as u32;
            to[n] = args::PackTo {
                out,
                stride,
                runs: order.runs as u32,
                paired: u32::from(order.is_paired),
                ..Default::default()
            };
            columns[i] = args::Batched { x: out, stride, n_split: 1 };
            n += 1;
        }
        let args = args::Pack { x, residual: 0, prologue, to, rows: rows as u32, k: k as u32 };
        self.run(Modules::PACK, batch::pack(rows, k), &args)?;
        Ok(columns)
    }

    /// Packs rows after their prologue for the wide products of up to two types, a place for each; for one type leaves
    /// them in f32 too. None where scratch has no room.
    fn pack_wide(
        &mut self,
        x: Ptr,
        prologue: args::Prologue,
        rows: usize,
        k: usize,
        types: &[WeightType],
    ) -> Result<Option<[Ptr; 2]>, DriverError> {
        let (mut at, end) = (self.scratch.packed, self.scratch.packed + self.scratch.packed_bytes as Ptr);
        let (mut places, mut to) = ([0; 2], [args::PackTo::default(); 3]);
        for (i, &w) in types.iter().enumerate() {
            (places[i], to[i]) = (at, form(w, rows, k, at));
            at += wide::packed_bytes(w, rows, k) as Ptr;
        }
        if at > end {
            return Ok(None);
        }
        self.normed = None;
        if types.len() == 1 {
            let out = self.scratch.batch.x;
            to[1] = args::PackTo { out, stride: k as u32, ..Default::default() };
            self.normed = (prologue.kind == few::NORMED).then_some((x, prologue.w));
        }
        let args = args::Pack { x, residual: 0, prologue, to, rows: rows as u32, k: k as u32 };
        self.run(Modules::PACK, batch::pack(rows, k), &args)?;
        Ok(Some(places))
    }

    /// Rows behind their prologue, in f32, for products without these kernels.
    fn unfold(&mut self, x: Ptr, prologue: args::Prologue, rows: usize, k: usize) -> Result<Ptr, DriverError> {
        let out = self.scratch.batch.x;
        let plain = args::PackTo { out, stride: k as u32, ..Default::default() };
        let to = [plain, Default::default(), Default::default()];
        let args = args::Pack { x, residual: 0, prologue, to, rows: rows as u32, k: k as u32 };
        self.run(Modules::PACK, batch::pack(rows, k), &args)?;
        Ok(out)
    }

    /// Rows after their prologue, where there is one.
    pub(super) fn after_prologue(
        &mut self,
        x: Ptr,
        prologue: args::Prologue,
        rows: usize,
        k: usize,
    ) -> Result<Ptr, DriverError> {
        if prologue.kind == 0 {
            return Ok(x);
        }
        if self.normed == Some((x, prologue.w)) {
            return Ok(self.scratch.batch.x);
        }
        let out = self.unfold(x, prologue, rows, k)?;
        self.normed = (prologue.kind == few::NORMED).then_some((x, prologue.w));
        Ok(out)
    }

    /// Products of 9 rows and more with matrices of up to two types, after a norm or a gate. `is_left`: the launch
    /// after them may add up shares of k.
    pub fn linear_batch(
        &mut self,
        x: &View,
        rows: usize,
        groups: [&[Part]; 2],
        prologue: args::Prologue,
        [add, is_left]: [bool; 2],
    ) -> Result<(), DriverError> {
        let groups: Vec<&[Part]> = groups.into_iter().filter(|parts| !parts.is_empty()).collect();
        let k = groups[0][0].w.k;
        let sms = self.sms;
        let is_wide = rows >= wide::FROM && groups.iter().all(|parts| parts[0].w.wide.is_some());
        if is_wide {
            let ahead = |parts: &&[Part]| self.packed_ahead(x.ptr, prologue.w, parts[0].w, rows);
            let mut packed: Option<Vec<Ptr>> =
                groups.iter().map(|parts| Some(ahead(parts)).filter(|&at| at != 0)).collect();
            if packed.is_none() && prologue.kind != 0 {
                let types: Vec<WeightType> = groups.iter().map(|parts| parts[0].w.dtype).collect();
                packed = self.pack_wide(x.ptr, prologue, rows, k, &types)?.map(Vec::from);
            }
            if let Some(packed) = packed {
                for (parts, packed) in groups.into_iter().zip(packed) {
                    let (args, n) = linear_args(x, rows, parts);
                    let args = args::Linear { add: u32::from(add), ..args };
                    self.linear_wide(parts[0].w, args, n.iter().sum(), packed, is_left)?;
                }
                return Ok(());
            }
        }
        if is_wide || rows > *batch::ROWS.end() || groups.iter().any(|parts| parts[0].w.batch.is_none()) {
            let x = View { ptr: self.after_prologue(x.ptr, prologue, rows, k)?, ..*x };
            for parts in groups {
                let (w, (args, n)) = (parts[0].w, linear_args(&x, rows, parts));
                let args = args::Linear { add: u32::from(add), ..args };
                if self.linear_wide(w, args, n.iter().sum(), 0, false)? {
                    continue;
                }
                self.run(w.module, matmul::linear(w.dtype, rows, k, &n[..parts.len()], sms), &args)?;
            }
            return Ok(());
        }
        let orders: Vec<Order> = groups.iter().map(|parts| Order::of(parts[0].w.dtype)).collect();
        let columns = self.pack(x.ptr, prologue, rows, k, &orders)?;
        for (parts, columns) in groups.into_iter().zip(columns) {
            let (w, (op, n)) = (parts[0].w, linear_args(x, rows, parts));
            let Batch { launch, n_split } = batch::linear(w.dtype, rows, k, n.iter().sum(), sms);
            let op = args::Linear { add: u32::from(add), ..op };
            let args = args::BatchLinear { op, columns: args::Batched { n_split, ..columns } };
            self.run(w.batch.unwrap_or(w.module), launch, &args)?;
        }
        Ok(())
    }

    /// [`Encoder::linear_batch`] for a node of few rows.
    pub fn few_linear_batch(&mut self, node: &FewLinearNode, rows: usize) -> Result<(), DriverError> {
        let [first, second] = &node.parts;
        self.linear_batch(&node.x, rows, [first, second], node.prologue, [node.add, self.next_adds_up()])
    }

    /// Gate, up and activation of 9 to 64 rows.
    pub fn gated_linear_batch(&mut self, module: ModuleId, w: Mat, op: args::GatedLinear) -> Result<(), DriverError> {
        let rows = op.rows as usize;
        let [columns, _] = self.pack(op.x, op.prologue, rows, w.k, &[Order::of(w.dtype)])?;
        let Batch { launch, n_split } = batch::gated_linear(w.dtype, rows, w.k, w.n, self.sms);
        let args = args::BatchGatedLinear { op, columns: args::Batched { n_split, ..columns } };
        self.run(module, launch, &args)
    }

    /// A router's product and its choice.
    pub fn router_batch(&mut self, node: &RouterNode, rows: usize) -> Result<(), DriverError> {
        let is_wide = rows >= wide::FROM && node.parts[0].w.wide.is_some();
        if let Some(module) = node.logits.filter(|_| !is_wide) {
            let (linear, n) = linear_args(&node.x, rows, &node.parts);
            let linear = args::Linear { prologue: node.prologue, ..linear };
            let route = self.route_args(&node.route);
            let args = args::Router { linear, route, counter: node.counter, scale: node.scale, ..Default::default() };
            self.run(module, batch::logits(rows, n.iter().sum()), &args)?;
        } else {
            self.linear_batch(&node.x, rows, [&node.parts, &[]], node.prologue, [false, true])?;
            if node.scale != 1.0 {
                self.node(&Node::Scale { x: node.parts[0].out, scale: node.scale })?;
            }
        }
        self.route_shares(&node.route, &node.parts)
    }

    /// Gate, up and activation of the chosen experts, and of a shared one.
    pub fn experts_up_batch(&mut self, node: &UpNode, rows: usize) -> Result<(), DriverError> {
        let ExpertsNode { x, gate, down, n_expert, n_used, .. } = node.experts;
        let Some([module, _]) = has_experts(&node.experts) else { return Ok(()) };
        if self.has_wide_experts(&node.experts, rows) {
            return self.experts_up_wide(node, rows);
        }
        self.expert_lists(&node.experts, x.ptr, rows)?;
        let [columns, _] = self.pack(x.ptr, node.prologue, rows, gate.k, &[Order::of(gate.dtype)])?;
        let op = args::Experts { first: self.scratch.first, pairs: self.scratch.pairs, ..up_args(node, rows) };
        let order = Order::of(down.dtype);
        let Batch { launch, n_split } =
            batch::experts(gate.dtype, rows, n_used, n_expert, gate.n, gate.k, true, [self.sms, self.max_shared]);
        let args = args::BatchExperts {
            op,
            columns: args::Batched { n_split, ..columns },
            hidden: self.scratch.batch.hidden,
            hidden_stride: order.stride(down.k) as u32,
            hidden_runs: order.runs as u32,
            hidden_paired: u32::from(order.is_paired),
            reserved: 0,
        };
        self.run(module, launch, &args)
    }

    /// Whether experts take the kernels of `wide.rs`.
    fn has_wide_experts(&self, of: &ExpertsNode, rows: usize) -> bool {
        let is_wide = rows >= wide::FROM && of.gate.wide.is_some() && of.down.wide.is_some();
        is_wide && batch::has_wide_experts(rows * of.n_used, of.n_expert)
    }

    /// As [`Encoder::experts_up_batch`], with wide kernels.
    fn experts_up_wide(&mut self, node: &UpNode, rows: usize) -> Result<(), DriverError> {
        let of = &node.experts;
        let x = self.after_prologue(of.x.ptr, node.prologue, rows, of.gate.k)?;
        if let Some((gate, up, out)) = node.shared {
            let args = gated_args(x, rows, [gate, up], of.act, out, args::Prologue::default());
            self.gated_linear(gate, args, usize::MAX)?;
        }
        self.expert_lists(of, x, rows)?;
        self.experts_up_of(of, x, rows, true)
    }

    /// The experts' last product, a row a pair.
    fn experts_last_batch(
        &mut self,
        node: &ExpertsNode,
        shared: Option<args::Matrix>,
        rows: usize,
    ) -> Result<(), DriverError> {
        let ExpertsNode { down, n_expert, n_used, .. } = *node;
        let Some([_, module]) = has_experts(node) else { return Ok(()) };
        let op = args::Experts {
            first: self.scratch.first,
            pairs: self.scratch.pairs,
            shared_out: self.scratch.batch.shared,
            ..down_args(node, shared, rows)
        };
        let Batch { launch, n_split } =
            batch::experts(down.dtype, rows, n_used, n_expert, down.n, down.k, false, [self.sms, self.max_shared]);
        let stride = Order::of(down.dtype).stride(down.k) as u32;
        let columns = args::Batched { x: self.scratch.batch.hidden, stride, n_split };
        self.run(module, launch, &args::BatchExperts { op, columns, ..Default::default() })
    }

    /// The experts' last product and its weighted sum.
    pub fn experts_down_batch(&mut self, node: &DownNode, rows: usize) -> Result<(), DriverError> {
        if self.has_wide_experts(&node.experts, rows) {
            if let Some((w, h)) = node.shared {
                let out = View { ptr: self.scratch.batch.shared, ..node.x };
                self.linear(&h, rows, &[Part { w, bias: 0, out }])?;
            }
            self.experts_down_of(&node.experts, rows, true)?;
        } else {
            self.experts_last_batch(&node.experts, node.shared.map(|(w, _)| w.data), rows)?;
        }
        self.sum_experts(node, rows)
    }

    /// The weighted sum of what the experts put out, a row a pair.
    fn sum_experts(&mut self, node: &DownNode, rows: usize) -> Result<(), DriverError> {
        let args = args::Combine {
            x: node.x.ptr,
            y: node.experts.out.ptr,
            weights: node.weights.ptr,
            shared_y: if node.shared.is_some() { self.scratch.batch.shared } else { 0 },
            share: node.share,
            rows: rows as u32,
            n_used: node.experts.n_used as u32,
            d: node.x.width as u32,
            add: u32::from(node.add),
            ..Default::default()
        };
        let is_listed = self.listed == Some(args.y);
        let args = match (self.columns(node.columns, rows), self.forms_after_norm(&node.x)) {
            (Some(PackedNode { of: columns, norm: Some((next_w, squares)), .. }), _) => {
                args::Combine { next_w, columns, squares, ..args }
            }
            (_, Some((norm, packed))) if is_listed => args::Combine { norm_w: norm.w, eps: norm.eps, packed, ..args },
            _ => args,
        };
        self.combine(rows, args)
    }

    /// The kernels for pairs, where experts of so many rows take them: with more than three pairs an expert tensor
    /// cores are faster, wide kernels from fewer on.
    pub fn pairs(&self, pairs: Option<PairsNode>, of: &ExpertsNode, rows: usize) -> Option<PairsNode> {
        let most = (3 * of.n_expert / of.n_used.max(1)).clamp(few::MAX_ROWS, *batch::ROWS.end());
        let are_few = (2..=most).contains(&rows) && !self.has_wide_experts(of, rows);
        pairs.filter(|_| are_few && self.scratch.batch.x_bytes > 0)
    }

    /// How the rows that these experts read are packed.
    pub fn pack_args(&self, of: &ExpertsNode, prologue: args::Prologue) -> args::PackColumns {
        let is_wide = u32::from(of.gate.dtype == WeightType::Q4_K);
        args::PackColumns { x: of.x.ptr, prologue, out: self.scratch.batch.x, k: of.gate.k as u32, is_wide }
    }

    /// Gate, up and activation of the experts of several rows, weights through shared memory.
    pub fn experts_up_pairs(&mut self, pairs: PairsNode, node: &UpNode, rows: usize) -> Result<(), DriverError> {
        let ExpertsNode { gate, n_used, .. } = node.experts;
        let (module, shared_rows) = (pairs.modules[0], if node.shared.is_some() { rows } else { 0 });
        let launch = few_launch::pairs(gate.dtype, true, rows * n_used, shared_rows, gate.n, gate.k, self.device());
        let Some((launch, each)) = launch else { return Ok(()) };
        let pack = self.pack_args(&node.experts, node.prologue);
        if !pairs.is_packed || Self::is_batch(rows) {
            let grid = [rows as u32, 1, 1];
            self.run(module, Launch { entry: "pack_columns", grid, block: 256, shared: 0 }, &pack)?;
        }
        let (packed, shared_packed) = self.packed_pairs(&node.experts, rows);
        let args = args::FewPairs {
            op: up_args(node, rows),
            columns: pack.out,
            packed,
            shared_packed,
            each,
            ..Default::default()
        };
        self.run(module, launch, &args)
    }

    /// Where the packed activations of all pairs lie, and those of the shared expert.
    fn packed_pairs(&self, of: &ExpertsNode, rows: usize) -> (Ptr, Ptr) {
        let at = self.scratch.batch.hidden;
        (at, at + (rows * of.n_used * few_launch::column_bytes(of.down.k)) as Ptr)
    }

    /// The experts' last product and its weighted sum, of several rows.
    pub fn experts_down_pairs(&mut self, pairs: PairsNode, node: &DownNode, rows: usize) -> Result<(), DriverError> {
        let ExpertsNode { down, n_used, .. } = node.experts;
        let shared_rows = if node.shared.is_some() { rows } else { 0 };
        let launch = few_launch::pairs(down.dtype, false, rows * n_used, shared_rows, down.n, down.k, self.device());
        let Some((launch, each)) = launch else { return Ok(()) };
        let shared = node.shared.map(|(w, _)| w.data);
        let op = args::Experts { shared_out: self.scratch.batch.shared, ..down_args(&node.experts, shared, rows) };
        let (columns, shared_columns) = self.packed_pairs(&node.experts, rows);
        let args = args::FewPairs { op, columns, shared_columns, each, ..Default::default() };
        self.run(pairs.modules[1], launch, &args)?;
        self.sum_experts(node, rows)
    }

    /// The three products of the chosen experts, where they have these kernels.
    pub fn experts_batch(&mut self, node: &ExpertsNode, rows: usize) -> Result<bool, DriverError> {
        if !Self::is_batch(rows) || has_experts(node).is_none() || self.has_wide_experts(node, rows) {
            return Ok(false);
        }
        let prologue = args::Prologue::default();
        let up = UpNode { experts: *node, shared: None, dense: None, prologue, late: None, pairs: None };
        self.experts_up_batch(&up, rows)?;
        self.experts_last_batch(node, None, rows)?;
        Ok(true)
    }
}
