//! From an op of a plan to its dispatches. An op that is not written yet is refused by its name.

mod attention;
mod delta;
mod elementwise;
mod products;

use std::collections::HashMap;

use model::plan::{
    Access, Buf, CacheDecl, Gate, GroupScore, N_AXES, Op, Plan, RopePairing, Router, Rows, Score, Weight,
};

use self::products::Experts;
use super::fuse::{self, Run};
use super::sources::{self, Defines, Source};
use super::variants;
use crate::commands::node::{CopySlot, Extent, Form, Node, Place, THREADS, When, Word};
use crate::commands::tables::Table;
use crate::commands::weights::Planes;
use crate::commands::{Span, Unit, Use};
use backend::{CacheType, CompileError};

/// Maximum number of experts that a row may use: a lane each.
const MAX_USED: usize = 32;
/// Matrices of a dispatch, and parts of heads.
const MAX_PARTS: usize = 4;
const MAX_HEAD_PARTS: usize = 8;

/// A cache in the GPU's memory.
#[derive(Clone, Copy, Debug)]
pub struct CacheView {
    pub k: Span,
    /// None where values are found in the keys.
    pub v: Option<Span>,
    pub decl: CacheDecl,
}

/// A recurrent state in the GPU's memory: all slots, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct StateView {
    pub span: Span,
    /// Its numbers, and those that a slot keeps of a draft after them.
    pub n: usize,
    pub kept: usize,
}

/// Scratch for the choice of positions: ranks of a slice of a step's tokens.
#[derive(Clone, Copy, Debug)]
pub struct Ranks {
    pub span: Span,
    /// Ranks of a token.
    pub stride: usize,
    /// Tokens of a slice, and slices of the longest step.
    pub tokens: usize,
    pub slices: usize,
}

/// Where a plan's data lies in the GPU's memory.
#[derive(Clone, Copy)]
pub struct Places<'a> {
    /// Buffers, `[bufs]`.
    pub bufs: &'a [Span],
    pub weights: &'a [Planes],
    pub caches: &'a [CacheView],
    pub cache: CacheType,
    pub states: &'a [StateView],
    pub max_draft: usize,
    /// Two pieces of scratch for gate and up of different types.
    pub apart: Option<[Span; 2]>,
    /// Pairs in the order of their experts, and tiles of them.
    pub groups: Option<[Span; 2]>,
    /// Scratch for parts of attention, positions of a part, and the number of parts.
    pub parts: Option<(Span, usize, usize)>,
    /// Scratch for the choice of positions, where sequences may have more than are chosen.
    pub ranks: Option<Ranks>,
    /// A word for each row of each router.
    pub faults: &'a [Span],
    /// Values that ops fill rows with, by the op's index.
    pub constants: &'a [(usize, Span)],
    pub tuning: variants::Tuning,
}

/// What resolves a plan.
pub struct Lower<'a> {
    pub plan: &'a Plan,
    at: Places<'a>,
    pub units: Vec<Unit>,
    pub nodes: Vec<Node>,
    /// First op of each run, and the place behind its dispatches.
    pub ends: Vec<(usize, usize)>,
    n_routers: usize,
    /// Number of ops before those of the plan: a draft head's follow the model's.
    n_before: usize,
    /// Index of the first op at hand.
    first: usize,
    /// Uses of the buffers of the op at hand.
    uses: HashMap<Buf, Use>,
    op: &'static str,
    layer: Option<u32>,
    /// In which steps the dispatches at hand run.
    when: Option<When>,
    unless: Option<When>,
}

/// A dispatch under construction.
#[derive(Clone)]
struct Draft {
    source: Source,
    kernel: &'static str,
    defines: Defines,
    binds: Vec<(u8, Place, Use)>,
    /// Bytes of matrices that a row reads.
    bytes: u64,
    params_slot: u8,
    params: Vec<Word>,
    grid: [Extent; 3],
    threads: u32,
}

impl Draft {
    fn new(source: Source, kernel: &'static str) -> Draft {
        let grid = [Extent::Is(1); 3];
        let (defines, binds, params) = (Vec::new(), Vec::new(), Vec::new());
        Draft { source, kernel, defines, binds, bytes: 0, params_slot: 0, params, grid, threads: THREADS }
    }

    fn define(mut self, name: &'static str, value: usize) -> Draft {
        self.defines.push((name, value.to_string()));
        self
    }

    fn bind(mut self, slot: u8, (place, used): (Place, Use)) -> Draft {
        self.binds.push((slot, place, used));
        self
    }

    fn table(self, slot: u8, table: Table) -> Draft {
        self.bind(slot, (Place::Table(table), Use::Read))
    }

    fn params(mut self, slot: u8, params: impl IntoIterator<Item = Word>) -> Draft {
        self.params_slot = slot;
        self.params = params.into_iter().collect();
        self
    }

    fn form(self, form: variants::Rows) -> Draft {
        self.define("ROWS", form.rows).define("WIDE_X", usize::from(form.is_wide))
    }

    fn grid(mut self, grid: [Extent; 3]) -> Draft {
        self.grid = grid;
        self
    }

    fn threads(mut self, threads: u32) -> Draft {
        self.threads = threads;
        self
    }

    /// Binds the planes of a matrix to three slots from `slot` on, as far as it has them. What is bound twice is read
    /// once.
    fn planes(mut self, slot: u8, planes: Planes) -> Draft {
        for (i, plane) in planes.into_iter().enumerate() {
            let is_new = |span: &Span| self.binds.iter().all(|bind| bind.1 != Place::Fixed(*span));
            self.bytes += plane.filter(is_new).map_or(0, |span| span.len);
            self.binds.extend(plane.map(|span| (slot + i as u8, Place::Fixed(span), Use::Read)));
        }
        self
    }

    /// A row reads `n` of each `of` matrices, or rows of one, that were bound so far.
    fn share(mut self, n: usize, of: usize) -> Draft {
        self.bytes = self.bytes * n as u64 / (of as u64).max(1);
        self
    }
}

fn float(x: f32) -> Word {
    Word::Is(x.to_bits())
}

fn is(n: usize) -> Word {
    Word::Is(n as u32)
}

/// A thread for each of a row's `each` numbers.
fn threads(rows: Rows, each: usize) -> Extent {
    Extent::Of { rows, each: each as u32, per: THREADS }
}

/// A threadgroup for each row.
fn per_row(rows: Rows) -> Extent {
    Extent::Of { rows, each: 1, per: 1 }
}

/// A simdgroup for each of `n` outputs, two a threadgroup.
fn simdgroups(n: usize) -> Extent {
    Extent::Is(n.div_ceil(2) as u32)
}

/// A simdgroup for each `rows` of `n` outputs, two a threadgroup.
fn simdgroups_of(n: usize, form: variants::Rows) -> Extent {
    Extent::Is(n.div_ceil(2 * form.rows) as u32)
}

/// The activation as kernels take it, and its two numbers.
fn activation(act: Gate) -> (usize, [Word; 2]) {
    match act {
        Gate::Silu => (0, [float(0.0); 2]),
        Gate::GeluTanh => (1, [float(0.0); 2]),
        Gate::ClampedSwiglu { alpha, limit } => (2, [float(alpha), float(limit)]),
        Gate::Relu => (4, [float(0.0); 2]),
        Gate::ClampedSilu { limit } => (3, [float(0.0), float(limit)]),
    }
}

impl<'a> Lower<'a> {
    /// For a plan whose memory is laid out.
    pub fn new(plan: &'a Plan, at: Places<'a>) -> Lower<'a> {
        let (units, nodes) = (Vec::new(), Vec::new());
        Lower {
            plan,
            at,
            units,
            nodes,
            ends: Vec::new(),
            n_routers: 0,
            n_before: 0,
            first: 0,
            uses: HashMap::new(),
            op: "",
            layer: None,
            when: None,
            unless: None,
        }
    }

    fn rows(&self, buf: Buf) -> Rows {
        self.plan.buf(buf).rows
    }

    fn width(&self, buf: Buf) -> usize {
        self.plan.buf(buf).width
    }

    /// A buffer of the op, used as the op says.
    fn buf(&self, buf: Buf) -> (Place, Use) {
        self.buf_as(buf, self.uses.get(&buf).copied().unwrap_or(Use::Update))
    }

    /// A buffer, used by this dispatch as `used`: one of several dispatches of an op.
    fn buf_as(&self, buf: Buf, used: Use) -> (Place, Use) {
        let decl = self.plan.buf(buf);
        let bytes = (decl.width * decl.elem.bytes()) as u64;
        (Place::Rows(self.at.bufs[buf.0 as usize], decl.rows, bytes), used)
    }

    fn vector(&self, w: Weight) -> (Place, Use) {
        match self.at.weights[w.0 as usize][0] {
            Some(span) => (Place::Fixed(span), Use::Read),
            None => unreachable!("validated plans have no empty weights"),
        }
    }

    fn planes(&self, w: Weight) -> Planes {
        self.at.weights[w.0 as usize]
    }

    /// Rows and columns of a matrix, or of each of a stack.
    fn shape(&self, w: Weight) -> (usize, usize) {
        match self.plan.weight(w).shape[..] {
            [.., n, k] => (n, k),
            _ => unreachable!("validated plans multiply with matrices"),
        }
    }

    fn typed(&self, source: Source, kernel: &'static str, w: Weight) -> Draft {
        Draft { defines: sources::of_type(self.plan.weight(w).dtype), ..Draft::new(source, kernel) }
    }

    fn push(&mut self, draft: Draft) {
        self.push_with(draft, Vec::new());
    }

    /// A dispatch and the kernels that take its place in some steps.
    fn push_with(&mut self, draft: Draft, forms: Vec<Form>) {
        let unit = self.unit(&draft);
        let Draft { binds, bytes, params_slot, params, grid, threads, .. } = draft;
        let (op, layer, when, unless) = (self.op, self.layer, self.when, self.unless);
        self.nodes.push(Node {
            op,
            layer,
            bytes,
            unit,
            binds,
            params_slot,
            params,
            grid,
            threads,
            when,
            unless,
            forms,
        });
    }

    /// A product with this matrix.
    fn product(&self, w: Weight) -> variants::Shape {
        let (n, k) = self.shape(w);
        variants::Shape { dtype: self.plan.weight(w).dtype, n, k, many: self.at.tuning.many }
    }

    /// The form for few rows of a product with this matrix.
    fn form(&self, w: Weight) -> variants::Rows {
        variants::few(self.product(w), self.at.tuning)
    }

    /// Index of the unit of a dispatch.
    fn unit(&mut self, draft: &Draft) -> usize {
        let unit = sources::unit(draft.source, draft.kernel, &draft.defines);
        let known = self.units.iter().position(|known| *known == unit);
        known.unwrap_or_else(|| {
            self.units.push(unit);
            self.units.len() - 1
        })
    }

    /// What copies a slot of a state to another.
    pub fn copy(&mut self, state: StateView) -> CopySlot {
        let numbers = [state.n, state.kept, self.slot_len(state)].map(|n| n as u32);
        CopySlot { unit: self.unit(&Draft::new(sources::COPY, "copy")), slots: state.span, numbers }
    }

    /// Numbers of a slot of a state.
    fn slot_len(&self, state: StateView) -> usize {
        state.n.saturating_add(state.kept.saturating_mul(self.at.max_draft))
    }

    /// The next ops are those of the plan's draft head.
    pub fn start_head(&mut self, head: &'a Plan) {
        (self.n_before, self.plan) = (self.plan.ops.len(), head);
    }

    /// Appends the dispatches of all ops.
    ///
    /// # Errors
    /// What an op, or one of its forms, is not written for.
    pub fn ops(&mut self) -> Result<(), CompileError> {
        let plan = self.plan;
        for fuse::Step { first, n, run, .. } in fuse::steps(plan, self.at.tuning.off) {
            (self.first, self.layer) = (first, plan.layers[first]);
            let ops = &plan.ops[first..first + n];
            self.op = ops[0].name();
            self.uses_of(ops);
            match &run {
                Run::Op => self.op(&ops[0])?,
                Run::Heads(heads, split) => self.heads_in(heads, *split),
                Run::Mixture(mixture) => self.mixture(mixture, ops),
                Run::MixtureChain(mixture, chain) => {
                    self.mixture(&fuse::Mixture { sum: fuse::Sum { norm: None, ..mixture.sum }, ..*mixture }, ops);
                    self.op = "norms";
                    self.chain(chain);
                }
                Run::Latent(latent) => self.latent(latent),
                Run::DeltaIn(delta) => self.delta_in(delta, ops)?,
                Run::DeltaNorm(norm) => self.delta_norm(norm, ops)?,
                Run::Chain(chain) => {
                    self.op = "norms";
                    self.chain(chain);
                }
                Run::LayerNorm(norm) => {
                    self.op = "layer_norm";
                    self.layer_norm(norm);
                }
                Run::Route(scale) => match ops[1] {
                    Op::Route { logits, ref router, n_used, ids, weights } => {
                        self.op = ops[1].name();
                        self.route(logits, *scale, router, n_used, ids, weights)?;
                    }
                    _ => unreachable!("a scale is joined with a router"),
                },
            }
            self.ends.push((first, self.nodes.len()));
        }
        Ok(())
    }

    /// What ops do with their buffers, all of them together: what one of them writes first, all of them write.
    fn uses_of(&mut self, ops: &[Op]) {
        self.uses.clear();
        for (buf, access) in ops.iter().flat_map(Op::bufs) {
            let used = match access {
                Access::Read => Use::Read,
                Access::Write => Use::Write,
                Access::Update => Use::Update,
            };
            self.uses.entry(buf).or_insert(used);
        }
    }

    /// Appends the dispatches of an op by itself.
    fn op(&mut self, op: &Op) -> Result<(), CompileError> {
        match *op {
            Op::Embed { table, scale, out } => self.embed(table, scale, (Table::Ids, [1, 0]), out),
            Op::EmbedPlace { table, axis, out } => self.embed(table, 1.0, (Table::Places, [N_AXES, axis]), out),
            Op::Linear { x, ref parts } => self.linear(x, parts),
            Op::GatedLinear { x, gate, up, act, out } => self.gated_linear(x, gate, up, act, out),
            Op::Center { x, out } => self.center(x, out),
            Op::RmsNorm { x, residual, w, eps, out } => self.rms_norm(x, residual, w, eps, out),
            Op::HeadNorm { x, w, eps, n_head, d_head } => self.head_norm(x, w, eps, n_head, d_head),
            Op::Rope { x, rope, n_head, d_head } => {
                let decl = self.plan.rope(rope);
                let half = decl.inv_freq.len();
                let interleaved = u32::from(decl.pairing == RopePairing::Interleaved);
                let words = [is(n_head), is(d_head), is(half), Word::Is(interleaved)];
                let each = n_head * half;
                self.push(
                    Draft::new(sources::ROPE, "rope")
                        .bind(0, self.buf(x))
                        .table(1, Table::Angles(rope.0 as usize))
                        .params(2, [Word::Each(self.rows(x), each as u32)].into_iter().chain(words))
                        .grid([threads(self.rows(x), each), Extent::Is(1), Extent::Is(1)]),
                );
            }
            Op::SplitHeads { x, n_head, ref parts } => self.heads(x, n_head, parts, true),
            Op::JoinHeads { ref parts, n_head, out } => self.heads(out, n_head, parts, false),
            Op::GatedAct { gate, up, act, out } => {
                let (gate, up) = (self.buf(gate), self.buf(up));
                self.gated_act(gate, up, act, out);
            }
            Op::Add { x, y } => self.add(x, y),
            Op::AddBias { x, w } => self.by_vector(sources::ADD_BIAS, "add_bias", x, w),
            Op::Scale { x, scale } => self.scale(x, scale),
            Op::ScaleBy { x, w } => self.by_vector(sources::SCALE_BY, "scale_by", x, w),
            Op::Gelu { x, form } => self.gelu(x, form),
            Op::Clamp { x, low, high } => self.clamp(x, [low, high]),
            Op::Constant { ref values, out } => self.constant(values.len(), out),
            Op::Choose { cache, q, weights, out } => self.choose(cache, [q, weights], out),
            Op::AllReduce { .. } => return Err(unsupported("compute a part of a plan".into())),
            Op::Input { x, first, mode } => self.input(x, first, mode),
            Op::Softcap { x, cap } => self.softcap(x, cap),
            Op::GateBy { x, gate, factor } => self.gate_by(x, gate, factor),
            Op::Select { x, out } => self.select(x, out),
            Op::KvAppend { cache, k, v } => self.kv_append(cache, k, v),
            Op::Attention { cache, q, n_head, scale, window, chunked, softcap, chosen, sinks, out } => {
                let numbers = [scale, softcap.unwrap_or(0.0)];
                self.attention(cache, q, n_head, numbers, (window, chunked), chosen, sinks, out);
            }
            Op::Route { logits, ref router, n_used, ids, weights } => {
                return self.route(logits, 1.0, router, n_used, ids, weights);
            }
            Op::Experts { x, ids, gate, up, down, biases, act, hidden, out } => {
                self.experts(&Experts { x, ids, gate, up, down, biases, act, hidden, out }, None);
            }
            Op::Combine { x, add, y, weights, norm } => self.combine(x, add, y, weights, norm),
            Op::HeadLinear { x, w, transposed, out } => self.head_linear(x, w, transposed, out, None),
            Op::CausalConv { x, w, bias, silu, state, out } => {
                return self.causal_conv((x, out), (w, bias), silu, state);
            }
            Op::DeltaNet { q, k, v, g, beta, skip, state, heads, out } => {
                self.delta_net([q, k, v, g, beta], skip, state, heads, out);
            }
            Op::DecayBeta { a, b, a_log, dt_bias, bound, g_out, beta_out } => {
                self.decay_beta((a, b), (a_log, dt_bias), bound, (g_out, beta_out));
            }
            Op::GatedNorm { x, gate, w, gate_first, eps, n_head, d_head } => {
                let (rows, each) = (self.rows(x), n_head as u32);
                let n_w = self.plan.weight(w).n_values() / d_head;
                self.push(
                    Draft::new(sources::GATED_NORM, "gated_norm")
                        .define("GATE_FIRST", usize::from(gate_first))
                        .bind(0, self.buf(x))
                        .bind(1, self.buf(gate))
                        .bind(2, self.vector(w))
                        .params(3, [Word::Each(rows, each), is(d_head), float(eps), is(n_w)])
                        .grid([Extent::Of { rows, each, per: 2 }, Extent::Is(1), Extent::Is(1)]),
                );
            }
        }
        Ok(())
    }

    /// Rows of a table, at indices from a table of the step: from one index to the next, and the first of them.
    fn embed(&mut self, table: Weight, scale: f32, (ids, [stride, first]): (Table, [usize; 2]), out: Buf) {
        let (n, d) = self.shape(table);
        // Units have 16 numbers or more.
        let groups = d.div_ceil(16).div_ceil(THREADS as usize);
        self.push(
            self.typed(sources::EMBED, "embed", table)
                .planes(0, self.planes(table))
                .share(1, n)
                .table(3, ids)
                .bind(4, self.buf(out))
                .params(5, [is(d), float(scale), is(stride), is(first)])
                .grid([Extent::Is(groups as u32), per_row(self.rows(out)), Extent::Is(1)]),
        );
    }

    fn rms_norm(&mut self, x: Buf, residual: Option<Buf>, w: Weight, eps: f32, out: Buf) {
        let mut draft = Draft::new(sources::RMS_NORM, "rms_norm")
            .define("RESIDUAL", usize::from(residual.is_some()))
            .bind(0, self.buf(x))
            .bind(1, self.vector(w))
            .bind(2, self.buf(out))
            .params(3, [is(self.width(x)), float(eps)])
            .grid([per_row(self.rows(x)), Extent::Is(1), Extent::Is(1)]);
        if let Some(residual) = residual {
            draft = draft.bind(4, self.buf(residual));
        }
        self.push(draft);
    }

    /// Norms of rows that follow each other.
    fn chain(&mut self, chain: &fuse::Chain) {
        let fuse::Chain { from, ref links, ref outs, eps } = *chain;
        let scaled = links.last().and_then(|link| link.scale);
        let mut draft = Draft::new(sources::NORMS, "norms")
            .define("LINKS", links.len())
            .define("OUTS", outs.len())
            .define("SCALED", usize::from(scaled.is_some()))
            .bind(0, self.buf_as(from, Use::Read))
            .params(1, [is(self.width(from)), float(eps)])
            .grid([per_row(self.rows(from)), Extent::Is(1), Extent::Is(1)]);
        for (i, link) in (0..).zip(links) {
            draft = draft.bind(2 + 2 * i, self.vector(link.w)).bind(3 + 2 * i, self.buf_as(link.x, Use::Update));
        }
        for (i, &(w, out)) in (0..).zip(outs) {
            draft = draft.bind(6 + 2 * i, self.vector(w)).bind(7 + 2 * i, self.buf_as(out, Use::Write));
        }
        let draft = scaled.into_iter().fold(draft, |draft, w| draft.bind(12, self.vector(w)));
        self.push(draft);
    }

    fn layer_norm(&mut self, norm: &fuse::LayerNorm) {
        let fuse::LayerNorm { x, w, bias, eps, out } = *norm;
        let draft = Draft::new(sources::LAYER_NORM, "layer_norm")
            .define("BIAS", usize::from(bias.is_some()))
            .bind(0, self.buf_as(x, Use::Read))
            .bind(1, self.vector(w))
            .bind(2, self.buf_as(out, Use::Write))
            .params(3, [is(self.width(x)), float(eps)])
            .grid([per_row(self.rows(x)), Extent::Is(1), Extent::Is(1)]);
        let draft = bias.into_iter().fold(draft, |draft, bias| draft.bind(4, self.vector(bias)));
        self.push(draft);
    }

    fn center(&mut self, x: Buf, out: Buf) {
        let rows = self.rows(x);
        self.push(
            Draft::new(sources::CENTER, "center")
                .bind(0, self.buf(x))
                .bind(1, self.buf(out))
                .params(2, [Word::Each(rows, 1), is(self.width(x))])
                .grid([Extent::Of { rows, each: 1, per: 2 }, Extent::Is(1), Extent::Is(1)]),
        );
    }

    fn head_norm(&mut self, x: Buf, w: Option<Weight>, eps: f32, n_head: usize, d_head: usize) {
        let (rows, each) = (self.rows(x), n_head as u32);
        let mut draft = Draft::new(sources::HEAD_NORM, "head_norm")
            .define("HAS_W", usize::from(w.is_some()))
            .bind(0, self.buf(x))
            .params(1, [Word::Each(rows, each), is(d_head), float(eps)])
            .grid([Extent::Of { rows, each, per: 2 }, Extent::Is(1), Extent::Is(1)]);
        if let Some(w) = w {
            draft = draft.bind(2, self.vector(w));
        }
        self.push(draft);
    }

    /// Splits a whole into parts, or joins them to it.
    fn heads(&mut self, whole: Buf, n_head: usize, parts: &[(usize, Buf)], is_split: bool) {
        let (rows, d_head) = (self.rows(whole), parts.iter().map(|part| part.0).sum());
        let mut first = 0;
        for some in parts.chunks(MAX_HEAD_PARTS) {
            let mut draft = match is_split {
                true => Draft::new(sources::SPLIT_HEADS, "split_heads").bind(0, self.buf(whole)),
                false if some.len() == parts.len() => {
                    Draft::new(sources::JOIN_HEADS, "join_heads").bind(0, self.buf(whole))
                }
                // Each dispatch writes some of the whole.
                false => Draft::new(sources::JOIN_HEADS, "join_heads").bind(0, self.buf_as(whole, Use::Update)),
            };
            let mut widths = [0; MAX_HEAD_PARTS];
            for (i, &(width, part)) in some.iter().enumerate() {
                draft = draft.bind(2 + i as u8, self.buf(part));
                widths[i] = width;
            }
            let width: usize = widths.iter().sum();
            let words: Vec<Word> = [d_head, first, width].into_iter().chain(widths).map(is).collect();
            self.elementwise(draft.define("N_PARTS", some.len()), 1, rows, n_head * width, &words);
            first += width;
        }
    }

    fn route(
        &mut self,
        logits: Buf,
        logit_scale: f32,
        router: &Router,
        n_used: usize,
        ids: Buf,
        weights: Buf,
    ) -> Result<(), CompileError> {
        if n_used > MAX_USED {
            return Err(unsupported(format!("use {n_used} experts a token, at most {MAX_USED}")));
        }
        let rows = self.rows(logits);
        let (score, margin) = match router.score {
            Score::Softmax => (0, 0.0),
            Score::Sigmoid => (1, 0.0),
            Score::Raw => (2, 0.0),
            Score::Sparse { margin } => (3, margin),
        };
        let [n_group, n_group_used, sums] =
            router.groups.map_or([0; 3], |g| [g.n_group, g.n_used, usize::from(g.score == GroupScore::TopTwo)]);
        let renormalise = usize::from(router.renormalise.is_some());
        let counts = [n_used, n_group, n_group_used, sums, renormalise].map(is);
        let numbers = [router.renormalise.unwrap_or(0.0), router.scale, logit_scale, margin].map(float);
        let faults = Place::Rows(self.at.faults[self.n_routers], rows, 4);
        self.n_routers += 1;
        let mut draft = Draft::new(sources::ROUTE, "route")
            .define("N_EXPERT", self.width(logits))
            .define("SCORE", score)
            .define("HAS_BIAS", usize::from(router.bias.is_some()))
            .define("HAS_SCALE", usize::from(router.expert_scale.is_some()))
            .bind(0, self.buf_as(logits, Use::Read))
            .bind(1, self.buf(ids))
            .bind(2, self.buf(weights))
            .bind(3, (faults, Use::Write))
            .params(4, [Word::Each(rows, 1)].into_iter().chain(counts).chain(numbers))
            .grid([Extent::Of { rows, each: 1, per: 2 }, Extent::Is(1), Extent::Is(1)]);
        if let Some(bias) = router.bias {
            draft = draft.bind(5, self.vector(bias));
        }
        if let Some(scale) = router.expert_scale {
            draft = draft.bind(6, self.vector(scale));
        }
        self.push(draft);
        Ok(())
    }
}

/// What the backend cannot do.
pub fn unsupported(what: String) -> CompileError {
    CompileError::Unsupported { backend: "metal", what }
}
