//! Rows that a launch puts out packed for the wide products right after it, instead of a launch that packs them.

use super::super::args::{self, PackTo, Prologue};
use super::super::batch::Order;
use super::super::driver::{DriverError, Ptr};
use super::super::few;
use super::super::nodes::{Mat, Modules, Node, View};
use super::super::wide;
use super::Encoder;
use quant::WeightType;

/// The forms of rows in scratch; the second may be none.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ahead {
    /// The rows' own address, or that of rows before a norm with these weights.
    x: Ptr,
    norm: Ptr,
    forms: [PackTo; 2],
}

/// How a type's wide products read `rows` rows, at `out`.
pub(super) fn form(w: WeightType, rows: usize, k: usize, out: Ptr) -> PackTo {
    let order = Order::of_units(w);
    let (stride, runs, paired) = (order.stride(k) as u32, order.runs as u32, u32::from(order.is_paired));
    let split = u32::from(w == WeightType::F32);
    PackTo { out, stride, runs, paired, n_groups: rows.div_ceil(8) as u32, split, reserved: 0 }
}

fn is_same(a: &PackTo, b: &PackTo) -> bool {
    (a.runs, a.paired, a.split) == (b.runs, b.paired, b.split)
}

impl Encoder<'_> {
    /// The forms in which the next nodes read these rows, where they are wide products; of those after the first, as
    /// many as have room.
    pub(super) fn forms_ahead(&self, x: &View) -> Option<[PackTo; 2]> {
        let (rows, k) = (self.rows(x), x.width);
        if self.is_plain || rows < wide::FROM {
            return None;
        }
        let weights = self.next.iter().map_while(|node| match *node {
            Node::Linear { x: of, ref parts } if of == *x => Some(parts[0].w),
            Node::GatedLinear { x: of, gate, prologue, .. } if of == *x && prologue.kind == 0 => Some(gate),
            _ => None,
        });
        self.forms_of(weights, rows, k)
    }

    /// The forms in which the next node's products read these rows after a norm, and the norm, where they are wide
    /// products of few tokens.
    pub(super) fn forms_after_norm(&self, x: &View) -> Option<(Prologue, [PackTo; 2])> {
        let (rows, k) = (self.rows(x), x.width);
        let Some(Node::FewLinear(next)) = self.next.first().filter(|_| !self.is_plain && rows >= wide::FROM) else {
            return None;
        };
        let weights = || next.parts.iter().filter_map(|parts| parts.first().map(|part| part.w));
        let forms = self.forms_of(weights(), rows, k).filter(|_| next.x == *x && next.prologue.kind == few::NORMED)?;
        let has = |w: Mat| forms.iter().any(|of| of.out != 0 && is_same(of, &form(w.dtype, rows, k, 0)));
        weights().all(has).then_some((next.prologue, forms))
    }

    /// The forms in which these weights read rows; of those after the first, as many as have room.
    fn forms_of(&self, weights: impl Iterator<Item = Mat>, rows: usize, k: usize) -> Option<[PackTo; 2]> {
        let (mut at, end) = (self.scratch.packed, self.scratch.packed + self.scratch.packed_bytes as Ptr);
        let mut forms = [PackTo::default(); 2];
        for w in weights {
            let form = form(w.dtype, rows, k, at);
            if w.wide.is_none() || form.stride as usize != k {
                break;
            }
            if forms.iter().any(|of| of.out != 0 && is_same(of, &form)) {
                continue;
            }
            let Some(free) = forms.iter_mut().find(|of| of.out == 0) else { break };
            at += wide::packed_bytes(w.dtype, rows, k) as Ptr;
            if at > end {
                break;
            }
            *free = form;
        }
        (forms[0].out != 0).then_some(forms)
    }

    /// Rows at `x`, after a norm with these weights where there is one, are now in scratch in these forms too.
    pub(super) fn set_ahead(&mut self, x: Ptr, norm: Ptr, forms: [PackTo; 2]) {
        self.ahead = Ahead { x, norm, forms };
    }

    /// Forgets forms that the node does not read.
    pub(super) fn keep_ahead(&mut self, node: &Node) {
        let reads = match node {
            Node::Linear { x, .. } | Node::GatedLinear { x, .. } => (x.ptr, 0),
            Node::FewLinear(node) if node.prologue.kind == few::NORMED => (node.x.ptr, node.prologue.w),
            _ => (0, 0),
        };
        if reads != (self.ahead.x, self.ahead.norm) {
            self.ahead = Ahead::default();
        }
    }

    /// The address of rows, after a norm or as they are, as these weights read them; 0 without such a form.
    pub(super) fn packed_ahead(&self, x: Ptr, norm: Ptr, w: Mat, rows: usize) -> Ptr {
        let form = form(w.dtype, rows, w.k, 0);
        let is_its = (self.ahead.x, self.ahead.norm) == (x, norm);
        let found = self.ahead.forms.iter().find(|of| is_its && of.out != 0 && is_same(of, &form));
        found.map_or(0, |of| of.out)
    }

    /// A norm whose rows are put out in these forms too.
    pub(super) fn norm_ahead(
        &mut self,
        x: &View,
        residual: Ptr,
        [w, out]: [Ptr; 2],
        eps: f32,
        forms: [PackTo; 2],
    ) -> Result<(), DriverError> {
        let (rows, k) = (self.rows(x), x.width);
        let plain = PackTo { out, stride: k as u32, ..Default::default() };
        let prologue = Prologue { w, kind: few::NORMED, eps, ..Default::default() };
        let to = [forms[0], forms[1], plain];
        let args = args::Pack { x: x.ptr, residual, prologue, to, rows: rows as u32, k: k as u32 };
        self.run(Modules::PACK, super::super::batch::pack(rows, k), &args)?;
        self.set_ahead(out, 0, forms);
        Ok(())
    }
}
