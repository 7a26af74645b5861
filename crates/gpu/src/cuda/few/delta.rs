//! A delta rule with what comes before it: a convolution, norms and gates. Steps of few tokens and of many have it
//! alike.

use model::plan::{Op, Plan};

use super::super::delta;
use super::super::driver::Ptr;
use super::super::nodes::{DeltaInNode, Modules, Node, View};
use super::super::sources::{self, Key};
use super::Few;
use super::pattern::{is_only_read_by, readers};

/// Heads have at most so many numbers in steps of single tokens, and of many.
const MAX_HEAD: usize = 512;
const MAX_HEAD_OF_ROWS: usize = 128;
/// Widest convolution of a step of many tokens.
const MAX_WIDTH_OF_ROWS: usize = 8;

/// Scratch for the inputs of rules in steps of at most so many tokens.
#[derive(Clone, Copy, Debug)]
pub struct DeltaRoom {
    pub at: Ptr,
    pub rows: usize,
}

impl Few<'_> {
    /// What comes before a delta rule, and the rule. Returns the next op.
    pub(super) fn delta(&mut self, i: usize) -> Option<usize> {
        let room = DeltaRoom { at: self.room.delta, rows: self.room.rows };
        let (before, rule) = joined(self.plan, self.nodes, self.modules, room, i)?;
        if before.heads.d_k.max(before.heads.d_v) > MAX_HEAD {
            return None;
        }
        self.out.extend([Node::DeltaIn(before), rule]);
        Some(i + 8)
    }
}

/// The nodes of a step of many tokens, from those of each op: what comes before a delta rule is one.
pub fn join_rules(plan: &Plan, nodes: &[Vec<Node>], modules: &mut Modules, room: DeltaRoom) -> Vec<Node> {
    let mut out = Vec::new();
    let mut i = 0;
    while i < plan.ops.len() {
        let fits = |before: &DeltaInNode| {
            before.heads.d_k.max(before.heads.d_v) <= MAX_HEAD_OF_ROWS && before.width <= MAX_WIDTH_OF_ROWS
        };
        match joined(plan, nodes, modules, room, i).filter(|(before, _)| fits(before)) {
            Some((before, rule)) => {
                out.extend([Node::DeltaIn(DeltaInNode { has_rows: true, ..before }), rule]);
                i += 8;
            }
            None => {
                out.extend_from_slice(&nodes[i]);
                i += 1;
            }
        }
    }
    out
}

/// The ops from `i` on as a convolution with what follows it, and a rule that reads what that puts into scratch.
fn joined(
    plan: &Plan,
    nodes: &[Vec<Node>],
    modules: &mut Modules,
    room: DeltaRoom,
    i: usize,
) -> Option<(DeltaInNode, Node)> {
    let [
        Op::CausalConv { bias: None, silu: true, out: conv, .. },
        Op::SplitHeads { x: whole, n_head: 1, parts },
        Op::HeadNorm { x: q_normed, w: None, eps, .. },
        Op::Scale { x: q_scaled, scale: q_scale },
        Op::HeadNorm { x: k_normed, w: None, eps: k_eps, .. },
        Op::Scale { x: k_scaled, scale: k_scale },
        Op::DecayBeta { b: Some(_), bound: None, g_out, beta_out, .. },
        Op::DeltaNet { q, k, v, g, beta, skip: None, heads, .. },
    ] = plan.ops.get(i..i + 8)?
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
        && plan.buf(g).width == heads.n_v_head
        && (*g_out, *beta_out) == (g, beta)
        && is_only_read_by(plan, *conv, i, i + 1)
        && [q, k, v].iter().all(|&buf| readers(plan, buf, i + 6) == [i + 7])
        && is_only_read_by(plan, g, i + 6, i + 7)
        && is_only_read_by(plan, beta, i + 6, i + 7);
    if !fits {
        return None;
    }
    let (&[Node::CausalConv { x, w, width, state, .. }], &[Node::DecayBeta { a, b, a_log, dt_bias, .. }]) =
        (nodes[i].as_slice(), nodes[i + 6].as_slice())
    else {
        return None;
    };
    let &[Node::DeltaNet { module, tiles, inputs, skip, state: rule, out, .. }] = nodes[i + 7].as_slice() else {
        return None;
    };
    let (places, _) = delta::places(heads, room.rows, room.at as usize);
    let before = DeltaInNode {
        module: modules.id(Key::sized(sources::DELTA_IN, "WIDTH", width)),
        x,
        w,
        width,
        state,
        heads,
        out: places.inputs,
        a: a.ptr,
        b,
        a_log,
        dt_bias,
        scales: [*q_scale, *k_scale],
        eps: *eps,
        has_rows: false,
    };
    let inputs = std::array::from_fn(|i| View { ptr: places.inputs[i], ..inputs[i] });
    Some((before, Node::DeltaNet { module, tiles, inputs, skip, heads, state: rule, out }))
}
