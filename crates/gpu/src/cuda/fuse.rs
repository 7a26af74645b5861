//! Nodes that one launch can do: head norms, ropes and the append of a layer's q, k and v; a sum over parts and the
//! norm after it.

use super::driver::Ptr;
use super::nodes::{AddedNorm, CacheView, ModuleId, Node, QkvNode, QkvPartNode, View};

/// Joins runs of head norms, ropes and an append that touch at most three buffers, in the order norm, rope, append.
/// `module` is the one of `qkv`.
pub fn fuse(nodes: Vec<Node>, module: ModuleId) -> Vec<Node> {
    let mut out = Vec::with_capacity(nodes.len());
    let mut run = Run::default();
    for node in nodes {
        if !run.take(&node) {
            run.flush(module, &mut out);
            if !run.take(&node) {
                out.push(node);
            }
        }
    }
    run.flush(module, &mut out);
    out
}

/// Gives sums the norms that follow them.
pub fn with_norms(nodes: Vec<Node>) -> Vec<Node> {
    let mut joined: Vec<Node> = Vec::with_capacity(nodes.len());
    for node in nodes {
        match (joined.last_mut(), &node) {
            (Some(Node::AllReduce(sum)), &Node::RmsNorm { x, residual, w, eps, out })
                if sum.norm.is_none() && residual == sum.x.ptr && x.width == sum.x.width =>
            {
                sum.norm = Some(AddedNorm { x, w, eps, out });
            }
            _ => joined.push(node),
        }
    }
    joined
}

/// One node for these, if they are such a run.
pub fn qkv_of(nodes: &[Node]) -> Option<QkvNode> {
    let mut run = Run::default();
    let is_run = nodes.iter().all(|node| run.take(node));
    is_run.then(|| run.node(0))
}

/// A run so far.
#[derive(Default)]
struct Run {
    nodes: Vec<Node>,
    parts: Vec<QkvPartNode>,
    rope: Option<usize>,
    eps: Option<f32>,
    cache: Option<CacheView>,
}

impl Run {
    /// Adds a node where the run can hold it.
    fn take(&mut self, node: &Node) -> bool {
        let is_taken = match *node {
            Node::HeadNorm { x, w, eps, d_head, gate: 0, n_w: 1, .. } if self.eps.is_none_or(|known| known == eps) => {
                let fits = self.part(x, x.width / d_head, d_head, |part| {
                    let is_first = !part.is_normed && !part.is_rotated && part.cache == 0;
                    if is_first {
                        (part.is_normed, part.w) = (true, w);
                    }
                    is_first
                });
                if fits {
                    self.eps = Some(eps);
                }
                fits
            }
            Node::Rope { x, rope, n_head, d_head } if self.rope.is_none_or(|known| known == rope) => {
                let fits = self.part(x, n_head, d_head, |part| {
                    let is_next = !part.is_rotated && part.cache == 0;
                    part.is_rotated |= is_next;
                    is_next
                });
                if fits {
                    self.rope = Some(rope);
                }
                fits
            }
            Node::KvAppend { cache, k, v, .. } if self.cache.is_none() => {
                let view = |ptr: Ptr| self.parts.iter().find(|part| part.x.ptr == ptr).map(|part| part.x);
                let new = |ptr: Ptr, d: usize| View { ptr, width: cache.n_kv * d, ..k };
                // Both parts must find room, or neither is stored here.
                let v_part = (v != 0).then(|| view(v).unwrap_or(new(v, cache.d_v)));
                let n_new = [Some(k), v_part].into_iter().flatten().filter(|x| view(x.ptr).is_none()).count();
                let same = |x: View, d: usize| {
                    self.parts.iter().all(|part| part.x.ptr != x.ptr || (part.n_head, part.d_head) == (cache.n_kv, d))
                };
                if self.parts.is_empty()
                    || self.parts.len() + n_new > 3
                    || !same(k, cache.d_k)
                    || !v_part.is_none_or(|v| same(v, cache.d_v))
                    || v == k.ptr
                {
                    return false;
                }
                self.part(k, cache.n_kv, cache.d_k, |part| {
                    (part.cache, part.is_blocks) = (cache.k, cache.has_key_blocks());
                    true
                });
                if let Some(v) = v_part {
                    self.part(v, cache.n_kv, cache.d_v, |part| {
                        (part.cache, part.is_blocks) = (cache.v, cache.has_value_blocks());
                        true
                    });
                }
                self.cache = Some(cache);
                true
            }
            _ => false,
        };
        if is_taken {
            self.nodes.push(node.clone());
        }
        is_taken
    }

    /// Changes the part of a buffer, or a new one. Returns what `change` returns; false where there is no room.
    fn part(&mut self, x: View, n_head: usize, d_head: usize, change: impl FnOnce(&mut QkvPartNode) -> bool) -> bool {
        if x.rows != model::plan::Rows::Tokens {
            return false;
        }
        let new =
            QkvPartNode { x, n_head, d_head, w: 0, cache: 0, is_blocks: false, is_normed: false, is_rotated: false };
        let is_full = self.parts.len() == 3;
        match self.parts.iter_mut().find(|part| part.x.ptr == x.ptr) {
            Some(part) if (part.n_head, part.d_head) != (n_head, d_head) => false,
            Some(part) => change(part),
            None if is_full => false,
            None => {
                let mut part = new;
                let is_changed = change(&mut part);
                if is_changed {
                    self.parts.push(part);
                }
                is_changed
            }
        }
    }

    /// Ends the run: one node, or the node that it began with.
    fn flush(&mut self, module: ModuleId, out: &mut Vec<Node>) {
        let mut run = std::mem::take(self);
        if run.nodes.len() < 2 {
            out.append(&mut run.nodes);
            return;
        }
        out.push(Node::Qkv(run.node(module)));
    }

    fn node(self, module: ModuleId) -> QkvNode {
        let Run { parts, rope, eps, cache, .. } = self;
        let windowed = cache.is_some_and(|cache| cache.windowed);
        QkvNode { module, parts, rope, eps: eps.unwrap_or(0.0), windowed }
    }
}

#[cfg(test)]
mod tests {
    use backend::CacheType;
    use model::plan::Rows;

    use super::*;

    fn view(ptr: Ptr, width: usize) -> View {
        View { ptr, rows: Rows::Tokens, width }
    }

    fn norm(x: View) -> Node {
        Node::HeadNorm { x, w: 7, eps: 1e-6, d_head: 4, gate: 0, n_w: 1, gate_first: false }
    }

    fn rope(x: View) -> Node {
        Node::Rope { x, rope: 0, n_head: x.width / 4, d_head: 4 }
    }

    fn append(k: View, v: Ptr) -> Node {
        let (floats, types) = ([100, 200], CacheType::F16);
        let cache = CacheView { k: 100, v: 200, n_kv: 2, d_k: 4, d_v: 4, windowed: true, types, floats };
        Node::KvAppend { module: 0, cache, k, v }
    }

    #[test]
    fn a_layer_is_one_launch_in_any_order_of_its_parts() {
        let (q, k, v) = (view(1, 16), view(2, 8), view(3, 8));
        for nodes in [
            vec![norm(q), rope(q), norm(k), rope(k), append(k, 3)],
            vec![norm(q), norm(k), rope(k), rope(q), append(k, 3)],
            vec![rope(q), rope(k), append(k, 3)],
            vec![norm(q), norm(k), norm(v), rope(q), rope(k), append(k, 3)],
        ] {
            let fused = fuse(nodes, 9);
            let [Node::Qkv(node)] = fused.as_slice() else { panic!("{fused:?}") };
            assert_eq!((node.module, node.parts.len(), node.windowed), (9, 3, true));
            let of = |x: View| node.parts.iter().find(|part| part.x.ptr == x.ptr).copied().unwrap();
            assert_eq!((of(q).cache, of(k).cache, of(v).cache), (0, 100, 200));
            assert!(of(q).is_rotated && of(k).is_rotated && !of(v).is_rotated);
        }
    }

    /// As Hunyuan-A13B has them: a norm after the rope begins another run, and leaves nothing in the first.
    #[test]
    fn norms_may_follow_ropes() {
        let (q, k) = (view(1, 16), view(2, 8));
        let fused = fuse(vec![rope(q), rope(k), norm(q), norm(k), append(k, 3)], 9);
        let [Node::Qkv(first), Node::Qkv(second)] = fused.as_slice() else { panic!("{fused:?}") };
        assert!(first.parts.iter().all(|part| part.is_rotated && !part.is_normed && part.w == 0));
        assert!(second.parts[..2].iter().all(|part| !part.is_rotated && part.is_normed && part.w == 7));
    }

    #[test]
    fn what_does_not_fit_stays_apart() {
        let (q, k) = (view(1, 16), view(2, 8));
        // A norm behind the rope, another epsilon, one node alone, keys alone without what comes before.
        let other = Node::HeadNorm { x: k, w: 7, eps: 1e-5, d_head: 4, gate: 0, n_w: 1, gate_first: false };
        for (nodes, n) in [
            (vec![rope(q), norm(q)], 2),
            (vec![norm(q), other, append(k, 3)], 2),
            (vec![rope(q)], 1),
            (vec![append(k, 3)], 1),
        ] {
            assert_eq!(fuse(nodes.clone(), 9).len(), n, "{nodes:?}");
        }
    }
}
