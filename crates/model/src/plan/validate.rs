//! The rules of every op: shapes, types, aliasing, order. Backends need not check a valid plan again.

use std::ops::Deref;

use super::{
    Access, Buf, DeltaHeads, DraftHead, Elem, Gate, GroupScore, Local, N_AXES, Norm, Op, Plan, RopeDecl, Router, Rows,
    Score, Weight,
};
use crate::Error;

/// Maximum number of experts that a router may choose from.
pub const MAX_EXPERTS: usize = 1024;
/// Maximum number of experts that a token may use.
pub const MAX_USED: usize = 32;

type Check = Result<(), String>;

/// A plan that keeps the rules of all its ops. Only the validator makes one, so backends need not check it again.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidPlan(Plan);

impl ValidPlan {
    /// Validates a plan.
    ///
    /// # Errors
    /// [`Error::Op`] names the first op that breaks a rule, [`Error::Plan`] a declaration, with both numbers.
    pub fn new(plan: Plan) -> Result<ValidPlan, Error> {
        validate(&plan)?;
        Ok(ValidPlan(plan))
    }

    /// Applies passes and validates the result.
    ///
    /// # Errors
    /// As [`ValidPlan::new`], when a pass breaks a rule.
    pub fn rewrite(self, passes: impl FnOnce(&mut Plan)) -> Result<ValidPlan, Error> {
        let mut plan = self.0;
        passes(&mut plan);
        ValidPlan::new(plan)
    }

    /// Returns the plan, mutable again.
    pub fn into_plan(self) -> Plan {
        self.0
    }
}

impl Deref for ValidPlan {
    type Target = Plan;

    fn deref(&self) -> &Plan {
        &self.0
    }
}

/// Checks a plan against the rules of its ops; the error names the op and the numbers that disagree.
fn validate(plan: &Plan) -> Result<(), Error> {
    let v = Validator { plan };
    v.declarations().map_err(Error::Plan)?;
    let mut state = State {
        written: vec![false; plan.bufs.len()],
        appended: vec![false; plan.caches.len()],
        moved: vec![false; plan.states.len()],
        routed: vec![None; plan.bufs.len()],
        chosen: vec![false; plan.bufs.len()],
    };
    v.ops(&plan.ops, 0, &mut state)?;
    v.states(&state).and_then(|()| v.logits("logits", plan.logits, &state)).map_err(Error::Plan)?;
    let Some(draft) = &plan.draft else { return Ok(()) };
    v.draft(draft, &state).map_err(Error::Plan)?;
    // A step of the head sees nothing of the model's buffers but what it is given. All states are the model's.
    let mut own = State {
        written: vec![false; plan.bufs.len()],
        appended: vec![false; plan.caches.len()],
        routed: vec![None; plan.bufs.len()],
        chosen: vec![false; plan.bufs.len()],
        ..state.clone()
    };
    own.written[draft.input.0 as usize] = true;
    v.ops(&draft.ops, plan.ops.len(), &mut own)?;
    let both = state.appended.iter().zip(&own.appended).position(|(&model, &head)| model && head);
    let shared = both.map_or(Ok(()), |i| Err(format!("the draft head appends to cache {i} of the model")));
    shared.and_then(|()| v.logits("draft head's logits", draft.logits, &own)).map_err(Error::Plan)
}

/// Effects of the ops so far.
#[derive(Clone)]
struct State {
    written: Vec<bool>,         // [bufs]
    appended: Vec<bool>,        // [caches]
    moved: Vec<bool>,           // [states]
    routed: Vec<Option<usize>>, // [bufs]: ids below this number of experts
    chosen: Vec<bool>,          // [bufs]: positions that attention may see
}

struct Validator<'a> {
    plan: &'a Plan,
}

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Check {
    if holds { Ok(()) } else { Err(what()) }
}

fn same(what: &str, found: usize, wanted: usize) -> Check {
    ensure(found == wanted, || format!("{what} is {found}, expected {wanted}"))
}

impl Validator<'_> {
    fn declarations(&self) -> Check {
        let plan = self.plan;
        same("number of layer marks", plan.layers.len(), plan.ops.len())?;
        plan.draft.iter().try_for_each(|draft| same("number of layer marks", draft.layers.len(), draft.ops.len()))?;
        ensure(plan.n_vocab > 0 && plan.d_model > 0 && plan.n_ctx_train > 0, || {
            let (v, d, n) = (plan.n_vocab, plan.d_model, plan.n_ctx_train);
            format!("n_vocab {v}, d_model {d}, n_ctx_train {n}: none may be 0")
        })?;
        for buf in &plan.bufs {
            ensure(buf.width > 0, || format!("buffer {} has width 0", buf.name))?;
            if let Rows::Slots(n) | Rows::OutputSlots(n) = buf.rows {
                ensure((1..=MAX_USED).contains(&n), || {
                    format!("buffer {} has {n} slots, 1 to {MAX_USED} allowed", buf.name)
                })?;
            }
        }
        for w in &plan.weights {
            let bytes = w.shape.split_last().and_then(|(&row, outer)| {
                outer.iter().try_fold(w.dtype.plane_bytes(row)?.total(), |n, &axis| n.checked_mul(axis))
            });
            ensure(bytes.is_some_and(|n| n > 0), || {
                let block = w.dtype.block_len();
                format!("weight {}: {} {:?} cannot be: rows are whole blocks of {block}", w.name, w.dtype, w.shape)
            })?;
        }
        for (i, c) in plan.caches.iter().enumerate() {
            ensure(c.n_kv > 0 && c.d_k > 0 && c.d_v > 0 && c.window != Some(0), || {
                format!("cache {i}: {c:?} has a dimension of 0")
            })?;
            ensure(!c.v_in_k || c.d_v <= c.d_k, || {
                format!("cache {i}: values of {} cannot be a part of keys of {}", c.d_v, c.d_k)
            })?;
        }
        let is_part = plan.draft.is_some() || plan.is_encoder() || !plan.states.is_empty() || plan.window().is_some();
        ensure(!plan.whole || !is_part, || {
            "a plan of whole texts has a draft head, images, recurrent states or a cache with a window".into()
        })?;
        for (i, s) in plan.states.iter().enumerate() {
            ensure(s.n > 0, || format!("state {i} ({}) has no numbers", s.what))?;
        }
        if let Some(long) = &plan.long_ropes {
            let of = |r: &RopeDecl| (r.inv_freq.len(), r.pairing, r.axes.clone());
            let form = |ropes: &[RopeDecl]| ropes.iter().map(of).collect::<Vec<_>>();
            ensure(form(&long.ropes) == form(&plan.ropes), || {
                format!("ropes beyond {} positions are of another form", long.n_ctx)
            })?;
        }
        let long = plan.long_ropes.iter().flat_map(|long| &long.ropes);
        for (i, r) in plan.ropes.iter().chain(long).enumerate() {
            ensure(!r.inv_freq.is_empty() && r.factor.is_finite(), || {
                format!("rope {i} has {} frequencies and factor {}", r.inv_freq.len(), r.factor)
            })?;
            let is_axis = |&axis: &u8| usize::from(axis) < N_AXES;
            ensure(r.axes.is_empty() || r.axes.len() == r.inv_freq.len() && r.axes.iter().all(is_axis), || {
                format!("rope {i} has {} frequencies on axes {:?}", r.inv_freq.len(), r.axes)
            })?;
            let bad = r.inv_freq.iter().find(|f| !f.is_finite());
            ensure(bad.is_none(), || format!("rope {i} has a frequency {bad:?}"))?;
            ensure(r.growth.is_none_or(|growth| growth.step > 0 && growth.beta.is_finite()), || {
                format!("rope {i} grows by {:?}", r.growth)
            })?;
        }
        Ok(())
    }

    /// The rules of ops in order; `first` is the number of the first in messages.
    fn ops(&self, ops: &[Op], first: usize, state: &mut State) -> Result<(), Error> {
        for (i, op) in ops.iter().enumerate() {
            let rules = self.indices(op).and_then(|()| self.order(op, state)).and_then(|()| self.shapes(op, state));
            rules.map_err(|what| Error::Op { op: first + i, name: op.name(), what })?;
        }
        Ok(())
    }

    /// What a draft head is given is there and as wide as the residual stream; `state` is that after the model's ops.
    fn draft(&self, draft: &DraftHead, state: &State) -> Check {
        for buf in [draft.source, draft.input] {
            let known = (buf.0 as usize) < self.plan.bufs.len();
            ensure(known, || format!("hidden states are buffer {} of {}", buf.0, self.plan.bufs.len()))?;
            self.buffer(buf, Rows::Tokens, self.plan.d_model, Elem::F32)?;
        }
        ensure(state.written[draft.source.0 as usize], || "no op writes the draft head's hidden states".into())?;
        ensure(!state.written[draft.input.0 as usize], || "an op writes the draft head's input".into())
    }

    /// Every index points into its table; later checks rely on it.
    fn indices(&self, op: &Op) -> Check {
        let inside = |what: &str, i: u32, n: usize| ensure((i as usize) < n, || format!("{what} {i} of {n}"));
        for (buf, _) in op.bufs() {
            inside("buffer", buf.0, self.plan.bufs.len())?;
        }
        for w in op.weights() {
            inside("weight", w.0, self.plan.weights.len())?;
        }
        if let Some(state) = op.state() {
            inside("state", state.0, self.plan.states.len())?;
        }
        match op {
            Op::Rope { rope, .. } => inside("rope", rope.0, self.plan.ropes.len()),
            Op::KvAppend { cache, .. } | Op::Choose { cache, .. } | Op::Attention { cache, .. } => {
                inside("cache", cache.0, self.plan.caches.len())
            }
            Op::Embed { .. }
            | Op::EmbedPlace { .. }
            | Op::Input { .. }
            | Op::AddBias { .. }
            | Op::Gelu { .. }
            | Op::Clamp { .. }
            | Op::Constant { .. }
            | Op::Linear { .. }
            | Op::GatedLinear { .. }
            | Op::RmsNorm { .. }
            | Op::Center { .. }
            | Op::HeadNorm { .. }
            | Op::SplitHeads { .. }
            | Op::JoinHeads { .. }
            | Op::HeadLinear { .. }
            | Op::GatedAct { .. }
            | Op::Add { .. }
            | Op::CausalConv { .. }
            | Op::DeltaNet { .. }
            | Op::Route { .. }
            | Op::Experts { .. }
            | Op::Combine { .. }
            | Op::Select { .. }
            | Op::Scale { .. }
            | Op::ScaleBy { .. }
            | Op::GateBy { .. }
            | Op::DecayBeta { .. }
            | Op::GatedNorm { .. }
            | Op::Softcap { .. }
            | Op::AllReduce { .. } => Ok(()),
        }
    }

    /// Buffers are written before they are read, and an op names a buffer that it writes only once.
    fn order(&self, op: &Op, state: &mut State) -> Check {
        let bufs = op.bufs();
        for (i, &(buf, access)) in bufs.iter().enumerate() {
            let name = &self.plan.buf(buf).name;
            let written = &mut state.written[buf.0 as usize];
            ensure(access == Access::Write || *written, || format!("reads {name}, which no op has written"))?;
            let alias = access != Access::Read && bufs.iter().enumerate().any(|(j, &(b, _))| i != j && b == buf);
            ensure(!alias, || format!("writes {name} and names it twice"))?;
        }
        if let Some(at) = op.state() {
            let moved = &mut state.moved[at.0 as usize];
            ensure(!*moved, || format!("updates state {}, which an earlier op updates", at.0))?;
            *moved = true;
        }
        for (buf, access) in bufs {
            if access != Access::Read {
                state.written[buf.0 as usize] = true;
                state.routed[buf.0 as usize] = None;
                state.chosen[buf.0 as usize] = false;
            }
        }
        Ok(())
    }

    fn shapes(&self, op: &Op, state: &mut State) -> Check {
        let plan = self.plan;
        let width = |buf: Buf| plan.buf(buf).width;
        match *op {
            Op::Embed { table, scale, out } => {
                finite("scale", scale)?;
                let width = plan.buf(out).width;
                self.floats(out, Rows::Tokens, width)?;
                self.shape("table", table, &[plan.n_vocab, width])
            }
            Op::EmbedPlace { table, axis, out } => {
                // Other steps say no places of their tokens, or such as no table has rows for.
                ensure(plan.whole, || "has tables of places, and steps of parts of texts".into())?;
                ensure(axis < N_AXES, || format!("places have {N_AXES} axes, this is {axis}"))?;
                self.floats(out, Rows::Tokens, width(out))?;
                match *plan.weight(table).shape.as_slice() {
                    [n, d] if n > 0 && d == width(out) => Ok(()),
                    ref shape => Err(format!("table has shape {shape:?}, expected rows of {}", width(out))),
                }
            }
            Op::Input { x, first, .. } => {
                self.floats(x, Rows::Tokens, width(x))?;
                ensure(first.checked_add(width(x)).is_some(), || format!("rows begin at {first}"))
            }
            Op::AddBias { x, w } => {
                self.free_rows(x)?;
                self.vector("w", w, width(x))
            }
            Op::Gelu { x, .. } => self.free_rows(x).map(drop),
            Op::Clamp { x, low, high } => {
                self.free_rows(x)?;
                self.vector("low", low, 1)?;
                self.vector("high", high, 1)
            }
            Op::Constant { ref values, out } => {
                let rows = self.free_rows(out)?;
                self.floats(out, rows, values.len())?;
                ensure(values.iter().all(|x| x.is_finite()), || "has a value that is not finite".into())
            }
            Op::Linear { x, ref parts } => {
                ensure(!parts.is_empty(), || "has no parts".into())?;
                let rows = self.free_rows(x)?;
                for part in parts {
                    self.floats(part.out, rows, width(part.out))?;
                    self.shape("w", part.w, &[width(part.out), width(x)])?;
                    part.bias.map_or(Ok(()), |bias| self.vector("bias", bias, width(part.out)))?;
                }
                Ok(())
            }
            Op::GatedLinear { x, gate, up, act, out } => {
                activation(act)?;
                let rows = self.free_rows(x)?;
                self.floats(out, rows, width(out))?;
                self.shape("gate", gate, &[width(out), width(x)])?;
                self.shape("up", up, &[width(out), width(x)])
            }
            Op::RmsNorm { x, residual, w, eps, out } => {
                let rows = self.free_rows(x)?;
                residual.map_or(Ok(()), |residual| self.floats(residual, rows, width(x)))?;
                self.norm(Norm { w, eps, out }, rows, width(x))
            }
            Op::Center { x, out } => {
                let rows = self.free_rows(x)?;
                self.floats(out, rows, width(x))
            }
            Op::HeadNorm { x, w, eps, n_head, d_head } => {
                epsilon(eps)?;
                self.free_rows(x)?;
                self.head_width(x, n_head, d_head)?;
                w.map_or(Ok(()), |w| self.vector("w", w, d_head))
            }
            Op::Rope { x, rope, n_head, d_head } => {
                self.heads(x, n_head, d_head)?;
                let rotary = 2 * plan.rope(rope).inv_freq.len();
                ensure(rotary <= d_head, || format!("rotates {rotary} dims of heads of {d_head}"))
            }
            Op::SplitHeads { x, n_head, ref parts } | Op::JoinHeads { out: x, n_head, ref parts } => {
                let rows = self.free_rows(x)?;
                let mut d_head = 0usize;
                for &(width, part) in parts {
                    ensure(width > 0, || format!("a part of 0 numbers in {}", plan.buf(part).name))?;
                    self.floats(part, rows, n_head.saturating_mul(width))?;
                    d_head = d_head.saturating_add(width);
                }
                self.floats(x, rows, n_head.saturating_mul(d_head))
            }
            Op::HeadLinear { x, w, transposed, out } => {
                let &[n_head, rows, cols] = plan.weight(w).shape.as_slice() else {
                    return Err(format!("w has shape {:?}, expected three axes", plan.weight(w).shape));
                };
                let (n, k) = if transposed { (cols, rows) } else { (rows, cols) };
                let rows = self.free_rows(x)?;
                self.floats(x, rows, n_head.saturating_mul(k))?;
                self.floats(out, rows, n_head.saturating_mul(n))
            }
            Op::GatedAct { gate, up, act, out } => {
                activation(act)?;
                let rows = self.free_rows(gate)?;
                self.floats(up, rows, width(gate))?;
                self.floats(out, rows, width(gate))
            }
            Op::Add { x, y } => {
                let rows = self.free_rows(x)?;
                self.floats(y, rows, width(x))
            }
            Op::KvAppend { cache, k, v } => {
                let c = plan.cache(cache);
                // Where steps are whole images or texts, layers may share one.
                let again = state.appended[cache.0 as usize] && !plan.is_encoder() && !plan.whole;
                ensure(!again, || format!("cache {} is appended to twice", cache.0))?;
                state.appended[cache.0 as usize] = true;
                self.floats(k, Rows::Tokens, c.n_kv * c.d_k)?;
                match (v, c.v_in_k) {
                    (Some(v), false) => self.floats(v, Rows::Tokens, c.n_kv * c.d_v),
                    (None, true) => Ok(()),
                    (Some(_), true) => Err(format!("gives values to cache {}, which has them in its keys", cache.0)),
                    (None, false) => Err(format!("gives no values to cache {}", cache.0)),
                }
            }
            Op::Choose { cache, q, weights, out } => {
                let c = plan.cache(cache);
                self.appended(cache, state)?;
                let has_keys_alone = c.n_kv == 1 && c.v_in_k && c.window.is_none();
                ensure(has_keys_alone, || format!("cache {} is {c:?}, expected the keys of one head", cache.0))?;
                ensure(!plan.whole && !plan.is_encoder(), || "is in an encoder, whose tokens see later ones".into())?;
                let n_head = width(weights);
                self.floats(q, Rows::Tokens, n_head.saturating_mul(c.d_k))?;
                self.floats(weights, Rows::Tokens, n_head)?;
                self.buffer(out, Rows::Tokens, width(out), Elem::U32)?;
                state.chosen[out.0 as usize] = true;
                Ok(())
            }
            Op::Attention { cache, q, n_head, scale, window, chunked, softcap, chosen, sinks, out } => {
                let c = plan.cache(cache);
                self.appended(cache, state)?;
                if let Some(chosen) = chosen {
                    let name = &plan.buf(chosen).name;
                    ensure(state.chosen[chosen.0 as usize], || format!("{name} holds no chosen positions"))?;
                    ensure(window.is_none(), || format!("sees a window besides the positions of {name}"))?;
                }
                ensure(n_head > 0 && n_head.is_multiple_of(c.n_kv), || {
                    format!("{n_head} heads cannot share {} key-value heads", c.n_kv)
                })?;
                finite("scale", scale)?;
                ensure(window != Some(0), || "window is 0".into())?;
                ensure(!chunked || window.is_some(), || "has chunks of no length".into())?;
                ensure(!chunked || !plan.whole, || "has chunks of whole texts".into())?;
                ensure(c.window.is_none_or(|kept| window.is_some_and(|seen| seen <= kept)), || {
                    format!("sees a window of {window:?} positions, cache {} keeps {:?}", cache.0, c.window)
                })?;
                softcap.map_or(Ok(()), |cap| positive("softcap", cap))?;
                sinks.map_or(Ok(()), |sinks| self.vector("sinks", sinks, n_head))?;
                self.floats(q, Rows::Tokens, n_head * c.d_k)?;
                self.floats(out, Rows::Tokens, n_head * c.d_v)
            }
            Op::Route { logits, router, n_used, ids, weights } => {
                let n_expert = width(logits);
                ensure(n_expert <= MAX_EXPERTS, || format!("{n_expert} experts, at most {MAX_EXPERTS} allowed"))?;
                ensure((1..=MAX_USED.min(n_expert)).contains(&n_used), || {
                    format!("uses {n_used} of {n_expert} experts, 1 to {} allowed", MAX_USED.min(n_expert))
                })?;
                self.router(router, n_expert, n_used)?;
                let rows = self.rows_with_slots(logits, n_used)?.0;
                self.floats(logits, rows, n_expert)?;
                self.buffer(ids, rows, n_used, Elem::U32)?;
                self.floats(weights, rows, n_used)?;
                state.routed[ids.0 as usize] = Some(router.local.map_or(n_expert, |local| local.n));
                Ok(())
            }
            Op::Experts { x, ids, gate, up, down, biases, act, hidden, out } => {
                activation(act)?;
                let &[n_expert, d_ff, d_in] = plan.weight(gate).shape.as_slice() else {
                    return Err(format!("gate has shape {:?}, expected three axes", plan.weight(gate).shape));
                };
                let n_used = width(ids);
                let (rows, slots) = self.rows_with_slots(x, n_used)?;
                self.buffer(ids, rows, n_used, Elem::U32)?;
                ensure(state.routed[ids.0 as usize] == Some(n_expert), || {
                    let routed = state.routed[ids.0 as usize];
                    format!("has {n_expert} experts, the ids were routed over {routed:?}")
                })?;
                self.floats(x, rows, d_in)?;
                self.shape("up", up, &[n_expert, d_ff, d_in])?;
                self.shape("down", down, &[n_expert, width(out), d_ff])?;
                if let Some(biases) = biases {
                    self.numbers("gate bias", biases.gate, &[n_expert, d_ff])?;
                    self.numbers("up bias", biases.up, &[n_expert, d_ff])?;
                    self.numbers("down bias", biases.down, &[n_expert, width(out)])?;
                }
                self.floats(hidden, slots, d_ff)?;
                self.floats(out, slots, width(out))
            }
            Op::Combine { x, y, weights, norm, .. } => {
                let n_used = width(weights);
                let (rows, slots) = self.rows_with_slots(x, n_used)?;
                self.floats(y, slots, width(x))?;
                self.floats(weights, rows, n_used)?;
                norm.map_or(Ok(()), |norm| self.norm(norm, rows, width(x)))
            }
            Op::Select { x, out } => {
                self.floats(x, Rows::Tokens, width(x))?;
                ensure(width(out).is_multiple_of(width(x)), || {
                    format!("{} of {} is no whole number of rows of {}", plan.buf(out).name, width(out), width(x))
                })?;
                self.floats(out, Rows::Outputs, width(out))
            }
            Op::Scale { x, scale } => {
                finite("scale", scale)?;
                self.free_rows(x).map(drop)
            }
            Op::ScaleBy { x, w } => {
                self.free_rows(x)?;
                let is_one = plan.weight(w).shape == [1];
                self.vector("w", w, if is_one { 1 } else { width(x) })
            }
            Op::CausalConv { x, w, bias, silu: _, state: moved, out } => {
                let d = width(x);
                let &[_, taps] = plan.weight(w).shape.as_slice() else {
                    return Err(format!("w has shape {:?}, expected two axes", plan.weight(w).shape));
                };
                ensure(taps > 1, || format!("w is {taps} wide, expected 2 or more"))?;
                self.numbers("w", w, &[d, taps])?;
                bias.map_or(Ok(()), |bias| self.vector("bias", bias, d))?;
                self.floats(x, Rows::Tokens, d)?;
                self.floats(out, Rows::Tokens, d)?;
                self.state_len(moved, [taps - 1, d, 1])
            }
            Op::DeltaNet { q, k, v, g, beta, skip, state: moved, heads, out } => {
                let DeltaHeads { n_k_head, n_v_head, d_k, d_v, .. } = heads;
                ensure(n_k_head > 0 && n_v_head > 0 && n_v_head.is_multiple_of(n_k_head), || {
                    format!("{n_v_head} heads of v cannot share {n_k_head} of k")
                })?;
                [q, k].into_iter().try_for_each(|buf| self.heads(buf, n_k_head, d_k))?;
                [v, out].into_iter().try_for_each(|buf| self.heads(buf, n_v_head, d_v))?;
                self.floats(beta, Rows::Tokens, n_v_head)?;
                let by_row = n_v_head.saturating_mul(d_k);
                self.floats(g, Rows::Tokens, if width(g) == by_row { by_row } else { n_v_head })?;
                skip.map_or(Ok(()), |skip| self.vector("skip", skip, n_v_head))?;
                self.state_len(moved, [n_v_head, d_k, d_v])
            }
            Op::GateBy { x, gate, factor: _ } => {
                let rows = self.free_rows(x)?;
                let n = width(gate);
                self.floats(gate, rows, if n > 0 && width(x).is_multiple_of(n) { n } else { width(x) })
            }
            Op::DecayBeta { a, b, a_log, dt_bias, bound, g_out, beta_out } => {
                let (rows, m, n) = (self.free_rows(a)?, width(a), b.map_or(width(a), width));
                ensure(m.is_multiple_of(n), || format!("{m} decays cannot be those of {n} heads"))?;
                let is_bound = |bound: f32| b.is_some() && bound.is_finite() && bound < 0.0;
                ensure(bound.is_none_or(is_bound), || format!("bounds decays by {bound:?}, expected less than 0"))?;
                match plan.weight(a_log).shape.as_slice() {
                    &[steps, k] if b.is_none() && steps == n => {
                        self.numbers("a_log", a_log, &[n, k])?;
                        self.floats(g_out, rows, n.saturating_mul(k))?;
                    }
                    _ => {
                        self.vector("a_log", a_log, n)?;
                        self.floats(g_out, rows, m)?;
                    }
                }
                b.into_iter().chain([beta_out]).try_for_each(|buf| self.floats(buf, rows, n))?;
                self.vector("dt_bias", dt_bias, m)
            }
            Op::GatedNorm { x, gate, w, gate_first: _, eps, n_head, d_head } => {
                epsilon(eps)?;
                let rows = self.free_rows(x)?;
                self.head_width(x, n_head, d_head)?;
                self.floats(gate, rows, width(x))?;
                match plan.weight(w).shape.len() {
                    2 => self.numbers("w", w, &[n_head, d_head]),
                    _ => self.vector("w", w, d_head),
                }
            }
            Op::Softcap { x, cap } => {
                positive("cap", cap)?;
                self.free_rows(x).map(drop)
            }
            Op::AllReduce { x } => self.free_rows(x).map(drop),
        }
    }

    /// A step appends to a cache before it reads it.
    fn appended(&self, cache: super::Cache, state: &State) -> Check {
        let is_early = !state.appended[cache.0 as usize];
        ensure(!is_early, || format!("reads cache {}, which this step has not appended to", cache.0))
    }

    /// Every state is used: an unused one would only waste memory.
    fn states(&self, state: &State) -> Check {
        let unused = state.moved.iter().position(|&moved| !moved);
        unused.map_or(Ok(()), |i| Err(format!("no op uses state {i} ({})", self.plan.states[i].what)))
    }

    fn router(&self, router: Router, n_expert: usize, n_used: usize) -> Check {
        finite("scale", router.scale)?;
        if let Score::Sparse { margin } = router.score {
            finite("margin", margin)?;
            let is_plain = router.bias.is_none() && router.groups.is_none() && margin >= 0.0;
            ensure(is_plain, || format!("{:?} goes with no bias and no groups", router.score))?;
        }
        router.renormalise.map_or(Ok(()), epsilon)?;
        router.bias.map_or(Ok(()), |w| self.vector("bias", w, n_expert))?;
        router.expert_scale.map_or(Ok(()), |w| self.vector("expert_scale", w, n_expert))?;
        let is_inside =
            |local: Local| local.n > 0 && local.first.checked_add(local.n).is_some_and(|end| end <= n_expert);
        ensure(router.local.is_none_or(is_inside), || format!("has {:?} of {n_expert} experts", router.local))?;
        let Some(groups) = router.groups else { return Ok(()) };
        let n_group = groups.n_group;
        ensure(n_group > 0 && n_expert.is_multiple_of(n_group), || {
            format!("{n_expert} experts cannot be {n_group} groups of equal size")
        })?;
        ensure((1..=MAX_USED.min(n_group)).contains(&groups.n_used), || {
            format!("uses {} of {n_group} groups, 1 to {} allowed", groups.n_used, MAX_USED.min(n_group))
        })?;
        let size = n_expert / n_group;
        ensure(groups.score == GroupScore::Max || size >= 2, || {
            format!("{n_group} groups of {size} experts have no two best")
        })?;
        ensure(n_used <= groups.n_used * size, || {
            format!("uses {n_used} experts of {} groups of {size}", groups.n_used)
        })
    }

    /// Checks that the state of an op has the size that these axes give.
    fn state_len(&self, state: super::State, axes: [usize; 3]) -> Check {
        let found = self.plan.state(state);
        let wanted = axes.iter().try_fold(1usize, |n, &axis| n.checked_mul(axis));
        ensure(wanted == Some(found.n), || {
            format!("state {} ({}) has {} numbers, expected {axes:?}", state.0, found.what, found.n)
        })
    }

    fn logits(&self, what: &str, logits: Buf, state: &State) -> Check {
        let known = (logits.0 as usize) < self.plan.bufs.len();
        ensure(known, || format!("{what} are buffer {} of {}", logits.0, self.plan.bufs.len()))?;
        ensure(state.written[logits.0 as usize], || format!("no op writes the {what}"))?;
        let width = if self.plan.whole { self.plan.buf(logits).width } else { self.plan.n_vocab };
        self.buffer(logits, Rows::Outputs, width, Elem::F32)
    }

    fn buffer(&self, buf: Buf, rows: Rows, width: usize, elem: Elem) -> Check {
        let found = self.plan.buf(buf);
        ensure((found.rows, found.width, found.elem) == (rows, width, elem), || {
            let (fr, fw, fe) = (found.rows, found.width, found.elem);
            format!("{} is {fe:?} [{fr:?}, {fw}], expected {elem:?} [{rows:?}, {width}]", found.name)
        })
    }

    /// Numbers of any float type: a backend's passes may narrow them.
    fn floats(&self, buf: Buf, rows: Rows, width: usize) -> Check {
        let elem = self.plan.buf(buf).elem;
        self.buffer(buf, rows, width, if elem.is_float() { elem } else { Elem::F32 })
    }

    /// Returns the rows of a buffer of numbers that may have rows of any kind.
    fn free_rows(&self, buf: Buf) -> Result<Rows, String> {
        let found = self.plan.buf(buf);
        ensure(found.elem.is_float(), || format!("{} holds ids, expected numbers", found.name))?;
        Ok(found.rows)
    }

    /// Returns the rows of a buffer of numbers, either tokens or outputs, and those of their expert slots.
    fn rows_with_slots(&self, buf: Buf, n_used: usize) -> Result<(Rows, Rows), String> {
        let rows = self.free_rows(buf)?;
        let slots = rows.slots(n_used);
        slots
            .map(|slots| (rows, slots))
            .ok_or_else(|| format!("{} has rows {rows:?}, expected tokens or outputs", self.plan.buf(buf).name))
    }

    fn heads(&self, x: Buf, n_head: usize, d_head: usize) -> Check {
        self.head_width(x, n_head, d_head)?;
        self.floats(x, Rows::Tokens, n_head * d_head)
    }

    /// Checks that a row holds this many heads.
    fn head_width(&self, x: Buf, n_head: usize, d_head: usize) -> Check {
        ensure(n_head > 0 && d_head > 0, || format!("{n_head} heads of {d_head}"))?;
        let wanted = n_head.checked_mul(d_head);
        ensure(wanted == Some(self.plan.buf(x).width), || {
            let buf = self.plan.buf(x);
            format!("{} has width {}, expected {n_head} heads of {d_head}", buf.name, buf.width)
        })
    }

    fn norm(&self, norm: Norm, rows: Rows, d: usize) -> Check {
        epsilon(norm.eps)?;
        self.vector("w", norm.w, d)?;
        self.floats(norm.out, rows, d)
    }

    fn shape(&self, what: &str, w: Weight, wanted: &[usize]) -> Check {
        let found = self.plan.weight(w);
        ensure(found.shape == wanted, || {
            format!("{what} {} has shape {:?}, expected {wanted:?}", found.name, found.shape)
        })
    }

    /// Returns a vector of plain numbers: norms and biases are never quantized.
    fn vector(&self, what: &str, w: Weight, n: usize) -> Check {
        self.numbers(what, w, &[n])
    }

    /// Plain numbers in any shape.
    fn numbers(&self, what: &str, w: Weight, shape: &[usize]) -> Check {
        self.shape(what, w, shape)?;
        let found = self.plan.weight(w);
        ensure(found.dtype.act() == quant::act::ActKind::F32, || {
            format!("{what} {} is {}, expected f32, f16 or bf16", found.name, found.dtype)
        })
    }
}

fn activation(act: Gate) -> Check {
    match act {
        Gate::Silu | Gate::GeluTanh | Gate::Relu => Ok(()),
        Gate::ClampedSwiglu { alpha, limit } => finite("alpha", alpha).and_then(|()| positive("limit", limit)),
        Gate::ClampedSilu { limit } => positive("limit", limit),
    }
}

fn finite(what: &str, x: f32) -> Check {
    ensure(x.is_finite(), || format!("{what} is {x}"))
}

fn positive(what: &str, x: f32) -> Check {
    ensure(x.is_finite() && x > 0.0, || format!("{what} is {x}, expected more than 0"))
}

fn epsilon(eps: f32) -> Check {
    ensure(eps.is_finite() && eps >= 0.0, || format!("eps is {eps}, expected 0 or more"))
}
