//! Products with what their outputs are added to, and whether their weights go through shared memory.

use model::plan::{Buf, Op};
use quant::WeightType;

use super::super::args::Prologue;
use super::super::few_launch::{self, Half};
use super::super::nodes::{FewLinearNode, ModuleId, Node, PackedNode, Part, View};
use super::super::sources::{self, Key};
use super::{Few, NORMED, Room, Source};

impl Few<'_> {
    /// Products that share a row: matrices of two types a launch.
    pub(super) fn linear(&mut self, i: usize, buf: Buf, nodes: &[Node]) {
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
        let columns = self.columns_of(&x, &prologue);
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
                columns: columns.filter(|_| few.is_some()),
            }));
        }
    }

    /// Packed columns of a row that the node before makes, for several rows, where there is no padding.
    fn columns_of(&mut self, x: &View, prologue: &Prologue) -> Option<PackedNode> {
        self.device?;
        let Room { attended_columns, normed_columns, normed_squares, .. } = self.room;
        let (columns, row, packed) = match (self.out.last_mut()?, prologue.kind) {
            (Node::Attend(node), 0) => {
                (&mut node.columns, node.attention.out, PackedNode { of: attended_columns, from: 2, norm: None })
            }
            (Node::ExpertsDown(node), NORMED) if node.pairs.is_some() => {
                let norm = Some((prologue.w, normed_squares));
                let from = node.late.map_or(0, |late| late.rows).max(1) + 1;
                (&mut node.columns, node.x, PackedNode { of: normed_columns, from, norm })
            }
            _ => return None,
        };
        let fits = (row.ptr, row.rows, row.width) == (x.ptr, x.rows, x.width) && x.width.is_multiple_of(256);
        *columns = Some(packed).filter(|_| fits);
        *columns
    }

    /// The kernels of a product, or of a pair, whose weights go through shared memory.
    pub(super) fn through_shared(&mut self, first: &[Part], second: &[Part], prologue: u32) -> Option<ModuleId> {
        let device = self.device?;
        let n = |parts: &[Part]| parts.iter().map(|part| part.w.n).sum::<usize>();
        let (w, half) = (first[0].w, Half::Shared);
        let has_gate = prologue > NORMED;
        if let Some(other) = second.first() {
            let types = [w.dtype, other.w.dtype];
            few_launch::pair(types, 1, w.k, [n(first), n(second)], device, half).filter(|_| !has_gate)?;
            return Some(self.modules.id(Key::pair(sources::FEW_LINEAR, types[0], types[1])));
        }
        let is_long = || first.len() == 1 && !has_gate && few_launch::long(w.dtype, 1, w.k, w.n, device).is_some();
        let is_twice = || !has_gate && few_launch::linear_twice(w.dtype, w.k, n(first), device).is_some();
        let is_whole = few_launch::linear(w.dtype, 1, w.k, n(first), has_gate, device, half).is_some();
        if !is_whole && !is_long() && !is_twice() {
            return None;
        }
        Some(self.modules.id(Key::typed(sources::FEW_LINEAR, w.dtype)))
    }
}
