//! A delta rule with what comes before it: a convolution, norms and gates.

use model::plan::Op;

use super::super::driver::Ptr;
use super::super::nodes::{DeltaInNode, Node, View};
use super::super::sources::{self, Key};
use super::Few;

impl Few<'_> {
    /// What comes before a delta rule, and the rule. Returns the next op.
    pub(super) fn delta(&mut self, i: usize) -> Option<usize> {
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
}
