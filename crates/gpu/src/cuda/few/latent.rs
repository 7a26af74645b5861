//! Attention over latents: queries, a row of the cache, attention, and the product of its sums.

use model::plan::{Buf, Op};
use quant::WeightType;

use super::super::driver::Ptr;
use super::super::nodes::{AttentionNode, LatentOutNode, LatentQNode, Mat, Node, Part, View};
use super::super::sources::{self, Key};
use super::{Few, Source};

/// Queries of latents, a row of their cache, and attention over them.
#[derive(Clone, Copy, Debug)]
struct Latents {
    heads: View,
    kv: View,
    norm_w: Ptr,
    eps: f32,
    w: Mat,
    transposed: bool,
    rope: usize,
    n_head: usize,
    /// Of the latent, of a head's query without rotation and with it.
    widths: [usize; 3],
    attention: AttentionNode,
}

impl Few<'_> {
    /// Whether an op is the product of queries of latent attention, which then lie in scratch.
    pub(super) fn is_latent_product(&self, i: usize) -> bool {
        let ops = &self.plan.ops;
        let (Op::Linear { parts, .. }, Some(Op::SplitHeads { x, .. })) = (&ops[i], ops.get(i + 1)) else {
            return false;
        };
        let fits = parts.len() == 1 && parts[0].out == *x && parts[0].bias.is_none();
        let is_plain = |t: WeightType| !matches!(t, WeightType::Affine(_));
        let fits = fits && is_plain(self.plan.weight(parts[0].w).dtype);
        fits && self.latents(i + 1).is_some_and(|latents| is_plain(latents.w.dtype))
    }

    /// Latent attention whose ops, from the split of the queries on, begin with op `i`.
    fn latents(&self, i: usize) -> Option<Latents> {
        if !self.has_latents {
            return None;
        }
        let [
            Op::SplitHeads { x: q, n_head, parts: of_q },
            Op::SplitHeads { x: kv, n_head: 1, parts: of_kv },
            Op::RmsNorm { x: c, residual: None, out: latent, .. },
            Op::Rope { x: q_pe, rope, n_head: n_rope, d_head: d_pe },
            Op::Rope { x: k_pe, rope: k_rope, n_head: 1, d_head: k_d_pe },
            Op::HeadLinear { x: q_nope, transposed, out: q_latent, .. },
            Op::JoinHeads { parts: to_q, n_head: n_join, out: joined },
            Op::JoinHeads { parts: to_k, n_head: 1, out: k },
            Op::KvAppend { k: appended, v: None, .. },
            Op::Attention { q: asked, .. },
        ] = self.plan.ops.get(i..i + 10)?
        else {
            return None;
        };
        let nodes = |at: usize| self.nodes[i + at].as_slice();
        let (&[Node::RmsNorm { w: norm_w, eps, .. }], &[Node::HeadLinear { w, .. }], &[Node::Attention(attention)]) =
            (nodes(2), nodes(5), nodes(9))
        else {
            return None;
        };
        let (&[Node::Heads { whole: heads, .. }, ..], &[Node::Heads { whole: of_cache, .. }, ..]) =
            (nodes(0), nodes(1))
        else {
            return None;
        };
        let width = |buf: Buf| self.plan.buf(buf).width;
        let (d_latent, d_nope) = (width(*latent), width(*q_nope) / n_head);
        let cache = attention.cache;
        let fits = !cache.types.has_blocks()
            && *of_q == [(d_nope, *q_nope), (*d_pe, *q_pe)]
            && *of_kv == [(d_latent, *c), (*d_pe, *k_pe)]
            && *to_q == [(d_latent, *q_latent), (*d_pe, *q_pe)]
            && *to_k == [(d_latent, *latent), (*d_pe, *k_pe)]
            && [n_rope, n_join] == [n_head; 2]
            && (rope, d_pe) == (k_rope, k_d_pe)
            && appended == k
            && asked == joined
            && attention.v_in_k
            && (cache.n_kv, cache.d_k, cache.d_v) == (1, d_latent + d_pe, d_latent)
            && attention.n_head == *n_head
            && attention.sinks == 0
            && self.is_only_read_by(*q, i.saturating_sub(1), i)
            && self.is_only_read_by(*joined, i + 6, i + 9);
        let _ = kv;
        fits.then_some(Latents {
            heads,
            kv: of_cache,
            norm_w,
            eps,
            w,
            transposed: *transposed,
            rope: rope.0 as usize,
            n_head: *n_head,
            widths: [d_latent, d_nope, *d_pe],
            attention,
        })
    }

    /// Nodes of latent attention that begins with op `i`: the product of its queries, or their split. Returns the next
    /// op.
    pub(super) fn latent(&mut self, i: usize) -> Option<usize> {
        let ops = &self.plan.ops;
        let has_product = self.is_latent_product(i);
        let first = if has_product { i + 1 } else { i };
        let latents = self.latents(first)?;
        let Latents { mut heads, kv, norm_w, eps, w, transposed, rope, n_head, widths, attention } = latents;
        let mut product = None;
        if let (true, Op::Linear { x: buf, .. }, [Node::Linear { x, parts }]) =
            (has_product, &ops[i], self.nodes[i].as_slice())
        {
            let Source { x, prologue } = self.source(*buf, *x);
            heads.ptr = self.room.heads;
            product = Some((x, Part { out: heads, ..parts[0] }, prologue));
        }
        let of_product = product.as_ref().map(|(_, part, _)| part.w.dtype);
        let module = self.modules.id(Key::latent(w.dtype, self.is_f16, of_product));
        let (out, counters, cache) = (self.room.latent, self.room.counters + 4, attention.cache);
        self.out.push(Node::LatentQ(LatentQNode {
            module,
            product,
            heads,
            w,
            transposed,
            n_head,
            widths,
            out,
            kv,
            norm_w,
            eps,
            cache,
            rope,
            counters,
        }));
        let at = first + 9;
        let attention = AttentionNode { q: View { ptr: out, ..attention.q }, ..attention };
        let behind = match (&ops[at], ops.get(at + 1), self.nodes.get(at + 1).map(Vec::as_slice)) {
            (
                &Op::Attention { out: summed, .. },
                Some(Op::HeadLinear { x, transposed: false, .. }),
                Some(&[Node::HeadLinear { w, out, .. }]),
            ) if *x == summed && self.is_only_read_by(summed, at, at + 1) => Some((w, out)),
            _ => None,
        };
        match behind {
            Some((w, out)) => {
                let module = self.modules.id(Key::typed(sources::LATENT_OUT, w.dtype));
                self.out.push(Node::LatentOut(LatentOutNode { module, attention, w, out }));
                Some(at + 2)
            }
            None => {
                self.out.push(Node::Attention(attention));
                Some(at + 1)
            }
        }
    }
}
