//! What runs of ops look like, and what they are together.

use model::plan::{Buf, Cache, DeltaRule, Gate, GateFactor, LinearPart, Norm, Op, Plan, Rope, Rows, State, Weight};

use super::is_read_behind;

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

/// An expert that every token takes, beside the routed ones and on the same input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shared {
    pub gate: Weight,
    pub up: Weight,
    pub down: Weight,
    pub act: Gate,
    pub hidden: Buf,
    pub out: Buf,
    /// A number a row: its sigmoid is the expert's weight.
    pub share: Option<Buf>,
    /// Whether it is added before the sum of the routed ones.
    pub is_first: bool,
}

/// Experts, the sum behind them, which alone reads what they put out, and an expert beside them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mixture {
    /// [`Op::Experts`].
    pub experts: usize,
    pub sum: Sum,
    pub shared: Option<Shared>,
}

/// The mixture that begins with op `i`, and its number of ops.
pub fn mixture(plan: &Plan, i: usize) -> Option<(Mixture, usize)> {
    let Op::Experts { x: from, out, hidden, ids, .. } = plan.ops[i] else { return None };
    let sum = |i: usize| match plan.ops.get(i) {
        Some(&Op::Combine { x, add, y, weights, norm }) => {
            let fits = y == out && ![out, hidden, ids].contains(&x) && !is_read_behind(plan, out, i);
            fits.then_some(Sum { x, add, weights, norm })
        }
        _ => None,
    };
    let shared = |i: usize| match (plan.ops.get(i), plan.ops.get(i + 1)) {
        (Some(&Op::GatedLinear { x, gate, up, act, out }), Some(Op::Linear { x: hidden, parts })) => {
            let &[LinearPart { w: down, bias: None, out: y }] = parts.as_slice() else { return None };
            let fits = x == from && out == *hidden && !is_read_behind(plan, out, i + 1);
            let (share, is_first) = (None, true);
            fits.then_some(Shared { gate, up, down, act, hidden: out, out: y, share, is_first })
        }
        _ => None,
    };
    if let Some(shared) = shared(i + 1) {
        let (Some(&Op::Add { x, y }), Some(sum)) = (plan.ops.get(i + 3), sum(i + 4)) else { return None };
        let fits = sum.add && sum.x == x && y == shared.out && !is_read_behind(plan, y, i + 3);
        return fits.then_some((Mixture { experts: i, sum, shared: Some(shared) }, 5));
    }
    let sum = sum(i + 1)?;
    let alone = Some((Mixture { experts: i, sum, shared: None }, 2));
    let Some(mut shared) = shared(i + 2).filter(|_| sum.add && sum.norm.is_none()) else { return alone };
    let mut next = i + 4;
    if let Some(&Op::GateBy { x, gate, factor: GateFactor::Sigmoid }) = plan.ops.get(next)
        && x == shared.out
        && plan.buf(gate).width == 1
    {
        shared.share = Some(gate);
        next += 1;
    }
    shared.is_first = false;
    match plan.ops.get(next) {
        Some(&Op::RmsNorm { x, residual: Some(y), w, eps, out })
            if x == sum.x && y == shared.out && !is_read_behind(plan, y, next) =>
        {
            let sum = Sum { norm: Some(Norm { w, eps, out }), ..sum };
            Some((Mixture { experts: i, sum, shared: Some(shared) }, next + 1 - i))
        }
        _ => alone,
    }
}

/// What latent attention does between its first products and the attention: norms, rotary embeddings, the keys of the
/// cache, and queries in the latent's terms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latent {
    /// A latent query: its norm, and the matrix that makes heads of it.
    pub low: Option<(Norm, Buf, LinearPart)>,
    /// Heads of queries, each with a part for the latent and one that is rotated.
    pub heads: Buf,
    pub n_head: usize,
    /// Widths of these parts.
    pub d_query: [usize; 2],
    /// The latent, with what is rotated behind it.
    pub kv: Buf,
    pub d_kv: [usize; 2],
    pub norm_w: Weight,
    pub eps: f32,
    pub rope: Rope,
    /// A matrix a head.
    pub w: Weight,
    pub transposed: bool,
    /// Queries as the cache's keys are.
    pub q: Buf,
    pub cache: Cache,
}

/// The run that begins with op `i`, and its number of ops.
pub fn latent(plan: &Plan, i: usize) -> Option<(Latent, usize)> {
    let (low, at) = match (&plan.ops[i], plan.ops.get(i + 1)) {
        (&Op::RmsNorm { x, residual: None, w, eps, out }, Some(Op::Linear { x: y, parts })) if out == *y => {
            (Some((Norm { w, eps, out }, x, *parts.first().filter(|_| parts.len() == 1)?)), i + 2)
        }
        _ => (None, i),
    };
    let [
        Op::SplitHeads { x: heads, n_head, parts: query },
        Op::SplitHeads { x: kv, n_head: 1, parts: key },
        Op::RmsNorm { x: c, residual: None, w: norm_w, eps, out: normed },
        Op::Rope { x: first, rope, n_head: n_first, d_head: d_first },
        Op::Rope { x: second, rope: same, n_head: 1, d_head: d_second },
        Op::HeadLinear { x: from, w, transposed, out: product },
        Op::JoinHeads { parts: queries, n_head: n_joined, out: q },
        Op::JoinHeads { parts: keys, n_head: 1, out: k },
        Op::KvAppend { cache, k: appended, v: None },
    ] = plan.ops.get(at..at + 9)?
    else {
        return None;
    };
    let (&[(d_nope, nope), (d_pe, pe)], &[(d_c, own), (d_kpe, kpe)]) = (query.as_slice(), key.as_slice()) else {
        return None;
    };
    let decl = plan.caches[cache.0 as usize];
    let d_latent = plan.buf(*product).width / n_head;
    let is_chained = (own, pe, kpe, nope) == (*c, *first, *second, *from)
        && queries.as_slice() == [(d_latent, *product), (d_pe, pe)]
        && keys.as_slice() == [(d_c, *normed), (d_kpe, kpe)]
        && appended == k
        && low.is_none_or(|(.., part)| part.out == *heads);
    let is_whole = (d_pe, d_kpe, *n_head, *n_head, *rope) == (*d_first, *d_second, *n_first, *n_joined, *same)
        && (decl.n_kv, decl.d_k) == (1, d_c + d_kpe)
        && [*heads, *kv, *q].into_iter().all(|buf| plan.buf(buf).rows == Rows::Tokens);
    let end = at + 8;
    let dead = [nope, pe, own, kpe, *normed, *product, *k].into_iter().chain(low.map(|(norm, ..)| norm.out));
    let is_private = dead.into_iter().all(|buf| !is_read_behind(plan, buf, end));
    let run = Latent {
        low,
        heads: *heads,
        n_head: *n_head,
        d_query: [d_nope, d_pe],
        kv: *kv,
        d_kv: [d_c, d_kpe],
        norm_w: *norm_w,
        eps: *eps,
        rope: *rope,
        w: *w,
        transposed: *transposed,
        q: *q,
        cache: *cache,
    };
    (is_chained && is_whole && is_private).then_some((run, end + 1 - i))
}

/// What a delta rule reads: convolved heads of q, k and v, those of q and k normed and scaled, and its gates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaIn {
    pub x: Buf,
    pub w: Weight,
    pub state: State,
    pub outs: [Buf; 3],
    pub n_k_head: usize,
    pub d_k: usize,
    /// Epsilons and scales of q and k.
    pub norms: [(f32, f32); 2],
    /// Where the gates' numbers are: their buffer, and the first of a group.
    pub a: (Buf, usize),
    pub b: (Buf, usize),
    /// Numbers of a group, and from one group to the next.
    pub group: [usize; 2],
    pub a_log: Weight,
    pub dt_bias: Weight,
    pub g: Buf,
    pub beta: Buf,
}

/// The run that begins with op `i`, and its number of ops.
pub fn delta_in(plan: &Plan, i: usize) -> Option<(DeltaIn, usize)> {
    let (split, at) = match &plan.ops[i] {
        Op::SplitHeads { x, n_head, parts } => (Some((*x, *n_head, parts.as_slice())), i + 1),
        _ => (None, i),
    };
    let [
        Op::CausalConv { x, w, bias: None, silu: true, state, out: conv },
        Op::SplitHeads { x: whole, n_head: 1, parts },
        Op::HeadNorm { x: q, w: None, eps: q_eps, n_head: n_q, d_head: d_q },
        Op::Scale { x: q_scaled, scale: q_scale },
        Op::HeadNorm { x: k, w: None, eps: k_eps, n_head: n_k, d_head: d_k },
        Op::Scale { x: k_scaled, scale: k_scale },
        Op::DecayBeta { a, b: Some(b), a_log, dt_bias, bound: None, g_out, beta_out },
    ] = plan.ops.get(at..at + 7)?
    else {
        return None;
    };
    let &[(w_q, out_q), (w_k, out_k), (_, out_v)] = parts.as_slice() else { return None };
    let is_chained = whole == conv && (out_q, out_q, out_k, out_k) == (*q, *q_scaled, *k, *k_scaled);
    let n = plan.buf(*a).width;
    let is_whole = (n_q, d_q) == (n_k, d_k) && (w_q, w_k) == (n_q * d_q, n_k * d_k) && n == plan.buf(*b).width;
    let (a_at, b_at, group) = match split {
        None => ((*a, 0), (*b, 0), [n, n]),
        Some((x, n_head, &[(w_first, first), (w_second, second)])) if w_first == w_second => {
            let group = [w_first, 2 * w_first];
            let is_split = n == n_head * w_first && plan.buf(x).width == n_head * group[1];
            match (first == *b && second == *a, first == *a && second == *b) {
                (true, _) if is_split => ((x, w_first), (x, 0), group),
                (_, true) if is_split => ((x, 0), (x, w_first), group),
                _ => return None,
            }
        }
        Some(_) => return None,
    };
    let dead = split.iter().flat_map(|split| split.2).map(|part| part.1).chain([*conv]);
    let is_private = dead.into_iter().all(|buf| !is_read_behind(plan, buf, at + 6));
    let run = DeltaIn {
        x: *x,
        w: *w,
        state: *state,
        outs: [out_q, out_k, out_v],
        n_k_head: *n_k,
        d_k: *d_k,
        norms: [(*q_eps, *q_scale), (*k_eps, *k_scale)],
        a: a_at,
        b: b_at,
        group,
        a_log: *a_log,
        dt_bias: *dt_bias,
        g: *g_out,
        beta: *beta_out,
    };
    (is_chained && is_whole && is_private).then_some((run, at + 7 - i))
}

/// The norm of a delta rule's heads, behind it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaNorm {
    /// [`Op::DeltaNet`].
    pub delta: usize,
    pub gate: Buf,
    pub w: Weight,
    pub eps: f32,
}

/// The run that begins with op `i`, of two ops.
pub fn delta_norm(plan: &Plan, i: usize) -> Option<(DeltaNorm, usize)> {
    match plan.ops.get(i..i + 2)? {
        &[
            Op::DeltaNet { skip: None, heads, out, .. },
            Op::GatedNorm { x, gate, w, gate_first: false, eps, n_head, d_head },
        ] if x == out
            && (n_head, d_head) == (heads.n_v_head, heads.d_v)
            && plan.weight(w).shape.len() == 1
            && heads.rule == DeltaRule::Delta =>
        {
            Some((DeltaNorm { delta: i, gate, w, eps }, 2))
        }
        _ => None,
    }
}

/// A sum in a [`Chain`]: `v` is added to a row, which keeps it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// The weight of the norm of `v` before.
    pub w: Weight,
    pub x: Buf,
    /// What the sum is multiplied with.
    pub scale: Option<Weight>,
}

/// Norms of rows that follow each other: `v = from`, for each link `v = x += norm(v) * w`, and then norms of the last.
#[derive(Clone, Debug, PartialEq)]
pub struct Chain {
    pub from: Buf,
    pub links: Vec<Link>,
    pub outs: Vec<(Weight, Buf)>,
    pub eps: f32,
}

/// Outputs and links that a chain may have.
const MAX_OUTS: usize = 3;
const MAX_LINKS: usize = 2;

/// The run that begins with op `i`, and its number of ops, which are two or more. `first` is a norm that an op before
/// leaves to it.
pub fn chain(plan: &Plan, i: usize, first: Option<(Buf, Norm)>) -> Option<(Chain, usize)> {
    let (from, Norm { w, eps, out: mut normed }, mut at) = match (first, plan.ops.get(i)?) {
        (Some((from, norm)), _) => (from, norm, i),
        (None, &Op::RmsNorm { x, residual: None, w, eps, out }) if x != out => (x, Norm { w, eps, out }, i + 1),
        _ => return None,
    };
    let (mut links, mut outs, mut dead) = (Vec::new(), Vec::new(), vec![normed]);
    let mut next_w = w;
    // Links: an addition with the norm behind it, or alone with a scale.
    while links.len() < MAX_LINKS {
        match *plan.ops.get(at)? {
            Op::RmsNorm { x, residual: Some(y), w, eps: own, out } if y == normed && own == eps => {
                links.push(Link { w: next_w, x, scale: None });
                (next_w, normed) = (w, out);
                at += 1;
                // Another link takes this norm, or it is an output.
                let is_linked = match plan.ops.get(at) {
                    Some(&Op::Add { y, .. } | &Op::RmsNorm { residual: Some(y), .. }) => y == out,
                    _ => false,
                };
                if !is_linked || links.len() == MAX_LINKS {
                    outs.push((w, out));
                    break;
                }
                dead.push(out);
            }
            Op::Add { x, y } if y == normed => {
                at += 1;
                let scale = match plan.ops.get(at) {
                    Some(&Op::ScaleBy { x: scaled, w }) if scaled == x && plan.weight(w).n_values() == 1 => {
                        at += 1;
                        Some(w)
                    }
                    _ => None,
                };
                links.push(Link { w: next_w, x, scale });
                break;
            }
            _ => return None,
        }
    }
    let last = links.last()?.x;
    while let Some(&Op::RmsNorm { x, residual: None, w, eps: own, out }) = plan.ops.get(at)
        && (x, own) == (last, eps)
        && outs.len() < MAX_OUTS
    {
        outs.push((w, out));
        at += 1;
    }
    let bufs: Vec<Buf> = links.iter().map(|link| link.x).chain(outs.iter().map(|out| out.1)).chain([from]).collect();
    let is_apart = (1..bufs.len()).all(|i| !bufs[..i].contains(&bufs[i]));
    let is_private = dead.iter().all(|&buf| !is_read_behind(plan, buf, at - 1));
    let rows = plan.buf(from).rows;
    let fits = is_apart && is_private && bufs.iter().all(|&buf| plan.buf(buf).rows == rows);
    fits.then_some((Chain { from, links, outs, eps }, at - i))
}

/// A row without its mean, its norm, and a bias where there is one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerNorm {
    pub x: Buf,
    pub w: Weight,
    pub bias: Option<Weight>,
    pub eps: f32,
    pub out: Buf,
}

/// The run that begins with op `i`, and its number of ops.
pub fn layer_norm(plan: &Plan, i: usize) -> Option<(LayerNorm, usize)> {
    let &[Op::Center { x, out: centered }, Op::RmsNorm { x: same, residual: None, w, eps, out }] =
        plan.ops.get(i..i + 2)?
    else {
        return None;
    };
    let bias = match plan.ops.get(i + 2) {
        Some(&Op::AddBias { x, w }) if x == out => Some(w),
        _ => None,
    };
    let fits = centered == same && x != out && !is_read_behind(plan, centered, i + 1);
    fits.then_some((LayerNorm { x, w, bias, eps, out }, 2 + usize::from(bias.is_some())))
}

/// Logits that are scaled before their experts are chosen.
pub fn scaled_route(plan: &Plan, i: usize) -> Option<f32> {
    match plan.ops.get(i..i + 2)? {
        &[Op::Scale { x, scale }, Op::Route { logits, .. }] if x == logits && !is_read_behind(plan, x, i + 1) => {
            Some(scale)
        }
        _ => None,
    }
}

/// Heads of queries that lie beside those of a gate, with what comes before attention.
pub fn split_heads(plan: &Plan, i: usize) -> Option<(Split, Heads, usize)> {
    let Op::SplitHeads { x, n_head, parts } = &plan.ops[i] else { return None };
    let &[(d_q, q), (d_gate, gate)] = parts.as_slice() else { return None };
    let (run, n) = heads(plan, i + 1)?;
    let is_q = run.q.is_some_and(|part| part.x == q) && d_q == d_gate && plan.buf(q).width == n_head * d_q;
    let fits = is_q && ![run.k.x, q].contains(&gate) && plan.caches[run.cache.0 as usize].d_k == d_q;
    fits.then_some((Split { x: *x, gate }, run, n + 1))
}

/// Where queries and gates come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Split {
    pub x: Buf,
    pub gate: Buf,
}
