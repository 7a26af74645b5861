//! Norms of rows that are only added to another row.

use model::plan::Op;

use super::super::nodes::{Node, PostNormNode, View};
use super::{Few, MAX_POST};

impl Few<'_> {
    /// The norms of a row that is only added to another. Returns the next op.
    pub(super) fn post_norm(&mut self, i: usize) -> Option<usize> {
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
                Some([Node::ScaleBy { w, n: 1, .. }]) => *w,
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
}
