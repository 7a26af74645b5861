//! Attention with what comes before it: head norms, ropes and the append to the cache.

use model::plan::{GateFactor, Op, Rows};

use super::super::args::Prologue;
use super::super::driver::Ptr;
use super::super::fuse::qkv_of;
use super::super::nodes::{AttendNode, AttentionNode, CacheView, Modules, Node, QkvPartNode, Singles, View, WARPS};
use super::super::sources::Key;
use super::{Few, Room, Source, Strided};

/// Whether the kernels of attention for single tokens take these dimensions.
fn fits(node: &AttentionNode, is_f16: bool) -> bool {
    let CacheView { d_k, d_v, v, .. } = node.cache;
    is_f16 && v != 0 && !node.v_in_k && node.chosen.is_none() && d_v == d_k && matches!(d_k, 64 | 128 | 256)
}

/// Query heads of a block of `attend_long`.
fn heads_of_block(node: &AttentionNode) -> usize {
    (node.n_head / node.cache.n_kv).next_power_of_two().min(8)
}

/// Gives attention of a list for prompts the kernel for single tokens, for those alongside them.
pub fn attend_singles(nodes: &mut [Node], modules: &mut Modules, room: &Room, is_f16: bool) {
    for node in nodes {
        let Node::Attention(node) = node else { continue };
        if fits(node, is_f16) {
            let (d, heads) = (node.cache.d_k, heads_of_block(node));
            let modules = WARPS.map(|warps| modules.id(Key::attend_long(d, heads, node.cache.types, warps)));
            node.singles = Some(Singles { modules, heads, counters: room.counters + 4, most: room.rows });
        }
    }
}

impl Few<'_> {
    /// Head norms, ropes, append and attention behind the product of op `i`. Returns the next op.
    pub(super) fn attend(&mut self, i: usize) -> Option<usize> {
        let ops = &self.plan.ops;
        let end = (i + 1..ops.len()).find(|&j| {
            !matches!(ops[j], Op::SplitHeads { .. } | Op::HeadNorm { .. } | Op::Rope { .. } | Op::KvAppend { .. })
        })?;
        let (&Op::Attention { q, out, .. }, &[Node::Attention(node)]) = (&ops[end], self.nodes[end].as_slice()) else {
            return None;
        };
        let AttentionNode { cache, q: q_view, n_head, .. } = node;
        let d = cache.d_k;
        let fits = fits(&node, self.is_f16);
        let moves = self.readers(out, end).iter().all(|&j| {
            matches!(ops[j], Op::Linear { .. } | Op::Select { .. })
                || matches!(ops[j], Op::GateBy { x, .. } if x == out)
        });
        if !fits || !moves {
            return None;
        }
        let mut heads = Vec::new();
        let mut small = Vec::new();
        for j in i + 1..end {
            match ops[j] {
                Op::SplitHeads { .. } => heads.extend(self.nodes[j].iter().cloned()),
                _ => small.extend(self.nodes[j].iter().cloned()),
            }
        }
        let qkv = qkv_of(&small)?;
        let part = |view: View, n_head: usize, cache: Ptr| {
            let found = qkv.parts.iter().find(|part| part.x.ptr == view.ptr).copied();
            found.unwrap_or(QkvPartNode {
                x: view,
                n_head,
                d_head: d,
                w: 0,
                cache,
                is_blocks: false,
                is_normed: false,
                is_rotated: false,
            })
        };
        let mut q_part = part(q_view, n_head, 0);
        let k_part = *qkv.parts.iter().find(|part| part.cache == cache.k)?;
        let v_part = *qkv.parts.iter().find(|part| part.cache == cache.v)?;
        let others = qkv.parts.iter().any(|p| ![q_view.ptr, k_part.x.ptr, v_part.x.ptr].contains(&p.x.ptr));
        if q_part.cache != 0 || others || [q_part, k_part, v_part].iter().any(|p| p.d_head != d) {
            return None;
        }
        let mut q_stride = d;
        let mut rest = Vec::new();
        for node in heads {
            let Node::Heads { whole, part, first, width, d_head, is_split: true } = node else { return None };
            let ptr = whole.ptr + 4 * first as Ptr;
            if part.ptr == q_view.ptr {
                q_part.x.ptr = ptr;
                q_stride = d_head;
            } else {
                rest.push((part, Strided { ptr, d_head: width, head: d_head, row: whole.width }, node));
            }
        }
        // Gates of the same split are read where they lie.
        for (view, strided, node) in rest {
            let split = (i + 1..end).find_map(|j| match &ops[j] {
                Op::SplitHeads { parts, .. } => {
                    let nodes = &self.nodes[j];
                    let at =
                        nodes.iter().position(|n| matches!(n, Node::Heads { part, .. } if part.ptr == view.ptr))?;
                    Some((j, parts[at].1))
                }
                _ => None,
            });
            let (j, buf) = split?;
            let readers = self.readers(buf, j);
            let is_gate = readers.len() == 1
                && matches!(
                    ops[readers[0]],
                    Op::GateBy { x, gate, factor: GateFactor::Sigmoid } if gate == buf && x == out
                )
                && matches!(ops.get(readers[0] + 1), Some(Op::Linear { x, .. }) if *x == out)
                && strided.d_head % 8 == 0
                && self.is_only_read_by(out, readers[0], readers[0] + 1);
            if is_gate {
                self.strided.insert(buf, strided);
            } else {
                self.out.push(node);
            }
        }
        let heads = heads_of_block(&node);
        let to = View { ptr: self.room.attended, rows: Rows::Tokens, width: n_head * d };
        let modules = WARPS.map(|warps| self.modules.id(Key::attend_long(d, heads, cache.types, warps)));
        let short = [1, heads.min(2)].map(|heads| {
            let key = match cache.types.has_blocks() {
                true => Key::attend_long(d, heads, cache.types, WARPS[0]),
                false => Key::attend(d, heads),
            };
            (self.modules.id(key), heads)
        });
        self.out.push(Node::Attend(AttendNode {
            modules,
            heads,
            short,
            parts: [q_part, k_part, v_part],
            q_stride,
            rope: qkv.rope,
            eps: qkv.eps,
            attention: AttentionNode { out: to, ..node },
            counters: self.room.counters + 4,
            qkv: self.qkv,
            columns: None,
        }));
        self.sources.insert(out, Source { x: to, prologue: Prologue::default() });
        let _ = q;
        Some(end + 1)
    }
}
