//! Fusion: replaces neighboring ops by one op that does the same with less memory traffic.
//!
//! Architectures write plain ops; a pass finds a pattern of adjacent ops. The numbers are bit-identical on a backend
//! that computes both forms by the same rules.

use quant::WeightType;

use super::{Access, Buf, DraftHead, Norm, Op, Plan, Read, Rows, Weight};

/// All passes, in the required order.
pub fn fuse(plan: &mut Plan) {
    fuse_ops(plan);
    with_draft(plan, fuse_ops);
    drop_unused_buffers(plan);
}

fn fuse_ops(plan: &mut Plan) {
    select_early(plan);
    gate_linears(plan);
    join_linears(plan);
    norm_after_add(plan);
    norm_after_combine(plan);
}

/// Lets the matrices of routers, with rows that share their launch, be read as f32, for backends that compute others in
/// fewer bits: what is rounded there chooses other experts.
pub fn routers_as_floats(plan: &mut Plan) {
    float_routers(plan);
    with_draft(plan, float_routers);
}

fn float_routers(plan: &mut Plan) {
    let routers = plan.ops.iter().filter_map(|op| match op {
        Op::Route { logits, .. } => Some(*logits),
        _ => None,
    });
    let routers: Vec<Buf> = routers.collect();
    for i in 0..plan.ops.len() {
        let Op::Linear { parts, .. } = &plan.ops[i] else { continue };
        let Some(n) = parts.iter().find(|p| routers.contains(&p.out)).map(|p| plan.buf(p.out).width) else { continue };
        let small: Vec<Weight> = parts.iter().filter(|p| plan.buf(p.out).width <= n).map(|p| p.w).collect();
        for w in small {
            let decl = &mut plan.weights[w.0 as usize];
            if decl.dtype != WeightType::F32 && decl.read == Read::Plain && !decl.is_repacked {
                (decl.read, decl.dtype) = (Read::Floats(decl.dtype), WeightType::F32);
            }
        }
    }
}

/// Applies a pass to the ops of the draft head, as if they were the model's.
pub fn with_draft(plan: &mut Plan, pass: impl FnOnce(&mut Plan)) {
    let Some(mut draft) = plan.draft.take() else { return };
    let mut swap = |plan: &mut Plan| {
        std::mem::swap(&mut plan.ops, &mut draft.ops);
        std::mem::swap(&mut plan.layers, &mut draft.layers);
        std::mem::swap(&mut plan.logits, &mut draft.logits);
    };
    swap(plan);
    pass(plan);
    swap(plan);
    plan.draft = Some(draft);
}

/// Moves `select` up to the last attention or recurrence. Behind it rows are independent, so only the returned rows
/// need the rest of the last layer: of a long prompt, one. A draft head needs all of the model's.
pub fn select_early(plan: &mut Plan) {
    if plan.draft.is_some() {
        return;
    }
    let mixes = |op: &Op| matches!(op, Op::Attention { .. } | Op::Choose { .. }) || op.state().is_some();
    let Some(first) = plan.ops.iter().rposition(mixes).map(|i| i + 1) else { return };
    let Some(last) = plan.ops.iter().position(|op| matches!(op, Op::Select { .. })) else { return };
    let Op::Select { x, out } = plan.ops[last] else { return };
    if plan.buf(x).width != plan.buf(out).width {
        return;
    }
    let between = first..last.max(first);
    let of_tokens = |op: &Op| {
        matches!(
            op,
            Op::Embed { .. }
                | Op::EmbedPlace { .. }
                | Op::Input { .. }
                | Op::KvAppend { .. }
                | Op::HeadNorm { .. }
                | Op::Rope { .. }
        )
    };
    if plan.ops[between.clone()].iter().any(of_tokens) {
        return;
    }
    // Every buffer of these ops gets a twin with the returned rows; those with an earlier value are selected.
    let mut twins: Vec<(Buf, Buf)> = Vec::new();
    let mut selects = Vec::new();
    for (buf, access) in plan.ops[between.clone()].iter().flat_map(Op::bufs).collect::<Vec<_>>() {
        if twins.iter().any(|&(old, _)| old == buf) {
            continue;
        }
        let new = Buf((plan.bufs.len() + twins.len()) as u32);
        if access != Access::Write {
            let decl = plan.buf(buf);
            if decl.rows != Rows::Tokens || !decl.elem.is_float() {
                return;
            }
            selects.push(Op::Select { x: buf, out: new });
        }
        twins.push((buf, new));
    }
    let twin = |buf: Buf| twins.iter().find(|&&(old, _)| old == buf).map(|&(_, new)| new);
    let later_reads = plan.ops[last + 1..].iter().flat_map(Op::bufs).any(|(buf, _)| twin(buf).is_some());
    let (Some(selected), false) = (twin(x), later_reads) else { return };
    for &(old, _) in &twins {
        let mut decl = plan.buf(old).clone();
        decl.rows = decl.rows.of_outputs();
        decl.name.push_str(".asked");
        plan.bufs.push(decl);
    }
    for op in &mut plan.ops[between] {
        op.for_each_buf_mut(|buf, _| *buf = twin(*buf).unwrap_or(*buf));
    }
    for op in &mut plan.ops[last..] {
        op.for_each_buf_mut(|buf, _| *buf = if *buf == out { selected } else { *buf });
    }
    // Rows of an encoder are what is selected, and nothing reads them further.
    plan.logits = if plan.logits == out { selected } else { plan.logits };
    plan.ops.remove(last);
    plan.layers.remove(last);
    let layer = plan.layers[first - 1];
    plan.layers.splice(first..first, selects.iter().map(|_| layer));
    plan.ops.splice(first..first, selects);
}

/// `gate = linear x; up = linear x; out = gated_act gate, up` becomes `out = gated_linear x`, when nothing else reads
/// the two and neither has a bias.
pub fn gate_linears(plan: &mut Plan) {
    rewrite::<3>(plan, |plan, ops| {
        let [Op::Linear { x, parts: gate }, Op::Linear { x: x2, parts: up }, Op::GatedAct { gate: g, up: u, act, out }] =
            ops
        else {
            return None;
        };
        let ([gate], [up]) = (gate.as_slice(), up.as_slice()) else { return None };
        let private = |buf: Buf| n_uses(plan, buf) == 2;
        let plain = gate.bias.is_none() && up.bias.is_none();
        let chained = x == x2 && gate.out == *g && up.out == *u && g != u && private(*g) && private(*u);
        (plain && chained).then(|| vec![Op::GatedLinear { x: *x, gate: gate.w, up: up.w, act: *act, out: *out }])
    });
}

/// Linears that share their input become one with several parts, so that the input is quantized once.
pub fn join_linears(plan: &mut Plan) {
    rewrite::<2>(plan, |_, ops| {
        let [Op::Linear { x, parts }, Op::Linear { x: x2, parts: more }] = ops else { return None };
        let rewritten = parts.iter().any(|a| a.out == *x || more.iter().any(|b| a.out == b.out));
        (x == x2 && !rewritten).then(|| vec![Op::Linear { x: *x, parts: [parts.as_slice(), more].concat() }])
    });
}

/// `add x, y; out = rms_norm x` becomes `rms_norm` with a residual.
pub fn norm_after_add(plan: &mut Plan) {
    rewrite::<2>(plan, |_, ops| match ops {
        [Op::Add { x, y }, Op::RmsNorm { x: x2, residual: None, w, eps, out }] if x == x2 && out != y => {
            Some(vec![Op::RmsNorm { x: *x, residual: Some(*y), w: *w, eps: *eps, out: *out }])
        }
        _ => None,
    });
}

/// `combine x, ..; out = rms_norm x` becomes `combine` with a norm.
pub fn norm_after_combine(plan: &mut Plan) {
    rewrite::<2>(plan, |_, ops| match ops {
        [Op::Combine { x, add, y, weights, norm: None }, Op::RmsNorm { x: x2, residual: None, w, eps, out }]
            if x == x2 && out != y && out != weights =>
        {
            let norm = Some(Norm { w: *w, eps: *eps, out: *out });
            Some(vec![Op::Combine { x: *x, add: *add, y: *y, weights: *weights, norm }])
        }
        _ => None,
    });
}

/// Drops unused buffers, and renumbers the rest.
pub fn drop_unused_buffers(plan: &mut Plan) {
    let mut used = vec![false; plan.bufs.len()];
    used[plan.logits.0 as usize] = true;
    let of_draft = plan.draft.iter().flat_map(|draft| [draft.source, draft.input, draft.logits]);
    for buf in plan.all_ops().flat_map(Op::bufs).map(|(buf, _)| buf).chain(of_draft) {
        used[buf.0 as usize] = true;
    }
    let mut kept = 0;
    let new: Vec<Buf> = used
        .iter()
        .map(|&used| {
            let buf = Buf(kept);
            kept += u32::from(used);
            buf
        })
        .collect();
    let mut i = 0;
    plan.bufs.retain(|_| {
        i += 1;
        used[i - 1]
    });
    let ops = plan.ops.iter_mut().chain(plan.draft.iter_mut().flat_map(|draft| &mut draft.ops));
    for op in ops {
        op.for_each_buf_mut(|buf, _| *buf = new[buf.0 as usize]);
    }
    plan.logits = new[plan.logits.0 as usize];
    if let Some(DraftHead { source, input, logits, .. }) = &mut plan.draft {
        [source, input, logits].into_iter().for_each(|buf| *buf = new[buf.0 as usize]);
    }
}

/// Replaces every run of `N` ops that `rule` accepts, and retries at the same place: a result may match with the ops
/// that follow. A fused op belongs to the layer of the first op it replaces.
fn rewrite<const N: usize>(plan: &mut Plan, rule: impl Fn(&Plan, &[Op; N]) -> Option<Vec<Op>>) {
    let mut at = 0;
    while let Some(run) = plan.ops.get(at..at + N).and_then(<[Op]>::first_chunk) {
        match rule(plan, run) {
            Some(new) => {
                let layer = plan.layers[at];
                plan.layers.splice(at..at + N, new.iter().map(|_| layer));
                plan.ops.splice(at..at + N, new);
            }
            None => at += 1,
        }
    }
}

/// Number of times that ops name a buffer; a write and a read make two.
fn n_uses(plan: &Plan, buf: Buf) -> usize {
    let uses = plan.ops.iter().flat_map(Op::bufs).filter(|&(b, _)| b == buf);
    uses.map(|(_, access)| if access == Access::Update { 2 } else { 1 }).sum::<usize>()
        + usize::from(plan.logits == buf)
        + usize::from(plan.draft.as_ref().is_some_and(|draft| draft.source == buf))
}
