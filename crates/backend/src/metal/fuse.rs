//! Runs of ops that one dispatch does. Knows plans and no kernels.

use model::plan::{Access, Buf, Cache, Norm, Op, Plan, Rope, Rows, Weight};

/// Heads before attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Part {
    pub x: Buf,
    /// Whether they are normed, and with which weight.
    pub norm: Option<Option<Weight>>,
    pub is_rotated: bool,
}

/// Head norms, rotary embeddings and the append that they end in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    pub q: Option<Part>,
    pub k: Part,
    /// None where the cache finds values in the keys.
    pub v: Option<Part>,
    pub cache: Cache,
    pub rope: Option<Rope>,
    pub eps: f32,
}

/// The run that begins with op `i`, and its number of ops, which are two or more.
pub fn heads(plan: &Plan, i: usize) -> Option<(Heads, usize)> {
    let n = plan.ops[i..].iter().position(|op| !matches!(op, Op::HeadNorm { .. } | Op::Rope { .. }))?;
    let &Op::KvAppend { cache, k, v } = plan.ops.get(i + n)? else { return None };
    if n == 0 || v == Some(k) {
        return None;
    }
    let decl = plan.caches[cache.0 as usize];
    let new = |x: Buf| Part { x, norm: None, is_rotated: false };
    let (mut q, mut k, mut v) = (None, new(k), v.map(new));
    let (mut rope, mut eps) = (None, None);
    for op in &plan.ops[i..i + n] {
        let (x, n_head, d_head) = match *op {
            Op::HeadNorm { x, n_head, d_head, .. } | Op::Rope { x, n_head, d_head, .. } => (x, n_head, d_head),
            _ => return None,
        };
        let (part, is_whole) = match v.as_mut() {
            _ if x == k.x => (&mut k, (n_head, d_head) == (decl.n_kv, decl.d_k)),
            Some(v) if x == v.x => (v, (n_head, d_head) == (decl.n_kv, decl.d_v)),
            // One buffer more, of whole heads as wide as keys.
            _ => (q.get_or_insert(new(x)), d_head == decl.d_k && plan.buf(x).width == n_head * d_head),
        };
        let is_next = match *op {
            Op::HeadNorm { w, eps: own, .. } => {
                let is_next = part.norm.is_none() && !part.is_rotated && eps.is_none_or(|known| known == own);
                (part.norm, eps) = (Some(w), Some(own));
                is_next
            }
            Op::Rope { rope: own, .. } => {
                let is_next = !part.is_rotated && rope.is_none_or(|known| known == own);
                (part.is_rotated, rope) = (true, Some(own));
                is_next
            }
            _ => false,
        };
        let fits = part.x == x && is_whole && is_next && plan.buf(x).rows == Rows::Tokens;
        if !fits {
            return None;
        }
    }
    // A norm of v changes no buffer here, so nothing may read it behind the append.
    let v_is_done = v.is_none_or(|v| !v.is_rotated && (v.norm.is_none() || !is_read_behind(plan, v.x, i + n)));
    v_is_done.then_some((Heads { q, k, v, cache, rope, eps: eps.unwrap_or(0.0) }, n + 1))
}

/// The sum of experts' outputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sum {
    pub x: Buf,
    pub add: bool,
    pub weights: Buf,
    pub norm: Option<Norm>,
}

/// The sum behind the experts of op `i`, where it alone reads what they put out.
pub fn sum(plan: &Plan, i: usize) -> Option<Sum> {
    let Op::Experts { out, hidden, ids, .. } = plan.ops[i] else { return None };
    let &Op::Combine { x, add, y, weights, norm } = plan.ops.get(i + 1)? else { return None };
    let is_apart = ![out, hidden, ids].contains(&x);
    let fits = y == out && is_apart && !is_read_behind(plan, out, i + 1);
    fits.then_some(Sum { x, add, weights, norm })
}

/// Whether an op behind `i` reads what a buffer holds then.
fn is_read_behind(plan: &Plan, buf: Buf, i: usize) -> bool {
    for op in &plan.ops[i + 1..] {
        let bufs = op.bufs();
        let mut accesses = bufs.iter().filter(|(b, _)| *b == buf).map(|(_, access)| *access).peekable();
        if accesses.peek().is_some() {
            return accesses.any(|access| access != Access::Write);
        }
    }
    buf == plan.logits || plan.hidden() == Some(buf)
}
