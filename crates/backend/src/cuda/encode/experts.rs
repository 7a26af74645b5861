//! Launches of a router's choice and of the chosen experts.

use super::super::args;
use super::super::driver::{DriverError, Ptr};
use super::super::launch::Launch;
use super::super::matmul;
use super::super::nodes::{ExpertsNode, HotNode, Mat, Modules, RouteNode};
use super::super::wide;
use super::{Encoder, Scratch};

impl Encoder<'_> {
    pub(super) fn route(&mut self, node: &RouteNode) -> Result<(), DriverError> {
        let rows = self.rows(&node.logits) as u32;
        let args = self.route_args(node);
        self.run(node.module, Launch { entry: "route", grid: [rows, 1, 1], block: 32, shared: 0 }, &args)
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
            n_squares: 0,
            k: 0,
            norm_eps: 0.0,
            sums: args::LogitSums::default(),
        }
    }

    pub(super) fn experts(&mut self, node: &ExpertsNode) -> Result<(), DriverError> {
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
