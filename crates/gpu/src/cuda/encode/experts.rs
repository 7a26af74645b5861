//! Launches of a router's choice and of the chosen experts.

use quant::WeightType;

use super::super::args;
use super::super::driver::{DriverError, Ptr};
use super::super::launch::Launch;
use super::super::matmul;
use super::super::nodes::{ExpertsNode, HotNode, Mat, Modules, Part, RouteNode};
use super::super::wide::{self, Wide};
use super::{Encoder, Scratch};

impl Encoder<'_> {
    pub(super) fn route(&mut self, node: &RouteNode) -> Result<(), DriverError> {
        self.route_shares(node, &[])
    }

    /// A choice by the first of these outputs of a product, whose shares of k may not be added up yet.
    pub(super) fn route_shares(&mut self, node: &RouteNode, parts: &[Part]) -> Result<(), DriverError> {
        let rows = self.rows(&node.logits) as u32;
        let outs = [0, 1].map(|i| parts.get(i).map_or(0, |part| part.out.ptr));
        let [shares, _] = if node.logits.ptr == outs[0] { self.take_shares(outs) } else { Default::default() };
        let n_rest = parts.get(1).map_or(0, |part| part.w.n as u32);
        let args = args::RouteRows { op: self.route_args(node), shares, rest: outs[1], n_rest, reserved: 0 };
        // A thread adds up a number or two.
        let block = if shares.n > 0 { (shares.row.div_ceil(32) * 32).min(256) } else { 32 };
        self.run(node.module, Launch { entry: "route", grid: [rows, 1, 1], block, shared: 0 }, &args)
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
            margin: node.margin(),
            reserved: 0,
            n_group,
            n_group_used,
            group_sums,
            renormalise: u32::from(node.router.renormalise.is_some()),
            of_outputs: u32::from(node.logits.rows == model::plan::Rows::Outputs),
            router: node.index as u32,
            eps: node.router.renormalise.unwrap_or(0.0),
            scale: node.router.scale,
            n_squares: 0,
            k: 0,
            norm_eps: 0.0,
            sums: args::LogitSums::default(),
            first: node.router.local.map_or(0, |local| local.first as u32),
            n_local: node.router.local.map_or(0, |local| local.n as u32),
        }
    }

    pub(super) fn experts(&mut self, node: &ExpertsNode) -> Result<(), DriverError> {
        let rows = self.rows(&node.x);
        if rows == 0 || self.experts_batch(node, rows)? {
            return Ok(());
        }
        let with_lists = rows >= matmul::lists_from();
        if with_lists {
            self.expert_lists(node, node.x.ptr, rows)?;
        }
        self.experts_up_of(node, node.x.ptr, rows, with_lists)?;
        self.experts_down_of(node, rows, with_lists)
    }

    /// Gate, up and activation of every pair's expert, over rows at `x`.
    pub(super) fn experts_up_of(
        &mut self,
        node: &ExpertsNode,
        x: Ptr,
        rows: usize,
        with_lists: bool,
    ) -> Result<(), DriverError> {
        let ExpertsNode { gate, up, hidden, act, biases: [gate_bias, up_bias, _], .. } = *node;
        let of_gate = self.projection(node, rows, with_lists, [x, gate_bias, hidden.ptr], gate);
        if gate.dtype == up.dtype {
            let op = args::Experts { up: up.data, up_bias, ..of_gate };
            let hidden = self.packed_hidden(node, rows).unwrap_or_default();
            let further = self.scratch.further[0];
            let args = args::WideExperts { op, hidden, further, ..Default::default() };
            return match (self.gated_bytes(node, rows), gate.wide) {
                (Some(bytes), Some(module)) => self.wide(module, bytes, 0, |wide| args::WideExperts { wide, ..args }),
                _ => self.project(gate, &args),
            };
        }
        let apart = self.scratch.apart;
        let of_up = self.projection(node, rows, with_lists, [x, up_bias, apart], up);
        for (w, op, further) in [(gate, of_gate, self.scratch.further[0]), (up, of_up, self.scratch.further[1])] {
            self.project(w, &args::WideExperts { op, further, ..Default::default() })?;
        }
        self.gated_act(&hidden, apart, act, &hidden)
    }

    /// Where gate and up put activations out as the last product reads them, instead of f32: both have wide kernels.
    fn packed_hidden(&self, node: &ExpertsNode, rows: usize) -> Option<args::PackedHidden> {
        let ExpertsNode { gate, up, down, hidden, n_expert, n_used, .. } = *node;
        let is_wide = rows >= wide::FROM && gate.wide.is_some() && down.wide.is_some() && gate.dtype == up.dtype;
        if self.is_plain || !is_wide || down.dtype == WeightType::F32 {
            return None;
        }
        let pairs = rows * n_used;
        let Wide { order, n_groups, .. } = wide::experts(down.dtype, false, pairs, n_expert, down.n, self.sms);
        let fits = wide::bytes_in_order(order, 1, pairs, down.k) <= 4 * pairs * hidden.width;
        let (runs, paired, n) = (order.runs as u32, u32::from(order.is_paired), order.stride(down.k) as u32);
        fits.then_some(args::PackedHidden { packed: hidden.ptr, n_groups, runs, paired, n })
    }

    /// Gate and up in integers, where activations go out packed.
    fn gated_bytes(&self, node: &ExpertsNode, rows: usize) -> Option<Wide> {
        let hidden = self.packed_hidden(node, rows)?;
        wide::gated_bytes(node.gate.dtype, rows * node.n_used, node.n_expert, node.gate.n.max(hidden.n as usize))
    }

    /// The last product of every pair's expert.
    pub(super) fn experts_down_of(
        &mut self,
        node: &ExpertsNode,
        rows: usize,
        with_lists: bool,
    ) -> Result<(), DriverError> {
        let ExpertsNode { down, hidden, out, biases: [.., bias], .. } = *node;
        let args = self.projection(node, rows, with_lists, [hidden.ptr, bias, out.ptr], down);
        let op = args::Experts { x_per_pair: 1, ..args };
        let is_wide = rows >= wide::FROM && down.wide.is_some();
        let is_listed = node.is_summed && is_wide && !self.is_plain && down.n % 8 == 0;
        self.listed = is_listed.then_some(out.ptr);
        let packed = self.packed_hidden(node, rows).map_or(0, |hidden| hidden.packed);
        let wide = args::Packed { packed, ..Default::default() };
        let (further, listed) = (self.scratch.further[2], u32::from(is_listed));
        self.project(down, &args::WideExperts { op, wide, further, listed, ..Default::default() })
    }

    fn projection(
        &self,
        node: &ExpertsNode,
        rows: usize,
        with_lists: bool,
        [x, bias, out]: [Ptr; 3],
        w: Mat,
    ) -> args::Experts {
        let Scratch { first, pairs, .. } = self.scratch;
        args::Experts {
            x,
            ids: node.ids.ptr,
            w: w.data,
            bias,
            out,
            first: if with_lists { first } else { 0 },
            pairs: if with_lists { pairs } else { 0 },
            rows: rows as u32,
            n_used: node.n_used as u32,
            n_expert: node.n_expert as u32,
            n: w.n as u32,
            k: w.k as u32,
            act: node.act.kind,
            alpha: node.act.alpha,
            limit: node.act.limit,
            ..Default::default()
        }
    }

    /// A product of every pair's expert, of gate and up where `args` have both; activations may be packed already.
    fn project(&mut self, w: Mat, args: &args::WideExperts) -> Result<(), DriverError> {
        let args::WideExperts { op, wide: args::Packed { packed, .. }, hidden, .. } = args;
        let ([rows, n_used, n_expert], is_gated) =
            ([op.rows, op.n_used, op.n_expert].map(|n| n as usize), op.up.q != 0);
        let Some(module) = w.wide.filter(|_| rows >= wide::FROM) else {
            let launch = matmul::experts(w.dtype, rows, n_used, n_expert, w.n, w.k, is_gated, self.sms);
            return self.run(w.module, launch, op);
        };
        let n = w.n.max(hidden.n as usize);
        let wide = wide::experts(w.dtype, is_gated, rows * n_used, n_expert, n, self.sms);
        self.wide(module, wide, *packed, |wide| args::WideExperts { wide, ..*args })
    }

    /// Lists the pairs of each expert, and the tiles of products that have wide kernels. Packs rows at `x` where gate
    /// and up multiply bytes.
    pub(super) fn expert_lists(&mut self, node: &ExpertsNode, x: Ptr, rows: usize) -> Result<(), DriverError> {
        let ExpertsNode { ids, gate, up, down, n_expert, n_used, .. } = *node;
        let (Scratch { first, pairs, places, further, .. }, n_pairs) = (self.scratch, rows * n_used);
        let mut width = [gate, up, down].map(|w| {
            let is_wide = rows >= wide::FROM && w.wide.is_some();
            if is_wide { wide::experts(w.dtype, false, n_pairs, n_expert, w.n, self.sms).width } else { 0 }
        });
        let bytes = self.gated_bytes(node, rows);
        if let Some(bytes) = bytes {
            width[0] = bytes.width;
        }
        let args = args::ExpertLists {
            ids: ids.ptr,
            first,
            pairs,
            places,
            further: [0, 1, 2].map(|i| if width[i] > 0 { further[i] } else { 0 }),
            width,
            n_pairs: n_pairs as u32,
            n_expert: n_expert as u32,
            n_groups: bytes.map_or(0, |bytes| bytes.n_groups),
            x,
            columns: self.scratch.packed,
            k: gate.k as u32,
            n_used: n_used as u32,
        };
        let launch = matmul::expert_lists(n_expert, width != [0; 3], bytes.map_or(0, |_| n_pairs));
        self.run(Modules::EXPERT_LISTS, launch, &args)
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
}
