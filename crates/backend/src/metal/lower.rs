//! From an op of a plan to its dispatches. An op that is not written yet is refused by its name.

use std::collections::HashMap;

use model::plan::{
    Access, Buf, Cache, CacheDecl, DeltaHeads, ExpertBiases, Gate, GroupScore, LinearPart, Norm, Op, Plan, RopePairing,
    Router, Rows, Score, Sharing, State, Weight,
};

use super::fuse;
use super::gpu::{Span, Unit, Use};
use super::node::{CopySlot, Extent, Many, Node, Place, THREADS, Word};
use super::sources::{self, Defines, Source};
use super::tables::Table;
use super::variants;
use super::weights::Planes;
use crate::CompileError;

/// Maximum number of experts that a row may use: a lane each.
const MAX_USED: usize = 32;
/// Matrices of a dispatch, and parts of heads.
const MAX_PARTS: usize = 4;
const MAX_HEAD_PARTS: usize = 8;
/// As TILE of `causal_conv.metal`: also the maximum width of a convolution less one.
const CONV_TILE: u32 = 32;

/// A cache in the GPU's memory.
#[derive(Clone, Copy, Debug)]
pub struct CacheView {
    pub k: Span,
    /// None where values are found in the keys.
    pub v: Option<Span>,
    pub decl: CacheDecl,
}

/// Where a plan's data lies in the GPU's memory.
#[derive(Clone, Copy)]
pub struct Places<'a> {
    /// Buffers, `[bufs]`.
    pub bufs: &'a [Span],
    pub weights: &'a [Planes],
    pub caches: &'a [CacheView],
    pub is_f16: bool,
    /// Each state of the plan in all slots, one slot after the other.
    pub states: &'a [Span],
    /// Two pieces of scratch for gate and up of different types.
    pub apart: [Option<Span>; 2],
    /// A word for each row of each router.
    pub faults: &'a [Span],
    pub tuning: variants::Tuning,
}

/// What resolves a plan.
pub struct Lower<'a> {
    pub plan: &'a Plan,
    at: Places<'a>,
    pub units: Vec<Unit>,
    pub nodes: Vec<Node>,
    n_routers: usize,
    /// Uses of the buffers of the op at hand.
    uses: HashMap<Buf, Use>,
    op: &'static str,
}

/// A dispatch under construction.
#[derive(Clone)]
struct Draft {
    source: Source,
    kernel: &'static str,
    defines: Defines,
    binds: Vec<(u8, Place, Use)>,
    params_slot: u8,
    params: Vec<Word>,
    grid: [Extent; 3],
}

impl Draft {
    fn new(source: Source, kernel: &'static str) -> Draft {
        let grid = [Extent::Is(1); 3];
        Draft { source, kernel, defines: Vec::new(), binds: Vec::new(), params_slot: 0, params: Vec::new(), grid }
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

    /// Binds the planes of a matrix to three slots from `slot` on, as far as it has them.
    fn planes(mut self, slot: u8, planes: Planes) -> Draft {
        for (i, plane) in planes.into_iter().enumerate() {
            self.binds.extend(plane.map(|span| (slot + i as u8, Place::Fixed(span), Use::Read)));
        }
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
    }
}

impl<'a> Lower<'a> {
    /// For a plan whose memory is laid out.
    pub fn new(plan: &'a Plan, at: Places<'a>) -> Lower<'a> {
        let (units, nodes) = (Vec::new(), Vec::new());
        Lower { plan, at, units, nodes, n_routers: 0, uses: HashMap::new(), op: "" }
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
        let unit = self.unit(&draft);
        let Draft { binds, params_slot, params, grid, .. } = draft;
        self.nodes.push(Node { op: self.op, unit, binds, params_slot, params, grid, many: None });
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

    /// What copies a slot of `n` numbers of a state to another.
    pub fn copy(&mut self, slots: Span, n: usize) -> CopySlot {
        CopySlot { unit: self.unit(&Draft::new(sources::COPY, "copy")), slots, n: n as u32 }
    }

    /// Appends the dispatches of all ops.
    ///
    /// # Errors
    /// What an op, or one of its forms, is not written for.
    pub fn ops(&mut self) -> Result<(), CompileError> {
        let plan = self.plan;
        let mut i = 0;
        while i < plan.ops.len() {
            if let Some((run, n)) = fuse::heads(plan, i) {
                self.op = "heads";
                self.heads_in(&run);
                i += n;
            } else if let Some(sum) = fuse::sum(plan, i).filter(|sum| self.is_apart(&plan.ops[i], sum)) {
                self.op(&plan.ops[i], Some(&sum))?;
                i += 2;
            } else {
                self.op(&plan.ops[i], None)?;
                i += 1;
            }
        }
        Ok(())
    }

    /// Whether a sum lies nowhere where its experts' other buffers do: what the plan has dead by then is still read.
    fn is_apart(&self, experts: &Op, sum: &fuse::Sum) -> bool {
        let span = |buf: Buf| self.at.bufs[buf.0 as usize];
        let others = experts.bufs().into_iter().map(|(buf, _)| buf).filter(|&buf| buf != sum.x);
        others.chain([sum.weights]).all(|other| !span(other).overlaps(span(sum.x)))
    }

    /// Appends the dispatches of an op; `sum` is the one behind experts that goes with them.
    fn op(&mut self, op: &Op, sum: Option<&fuse::Sum>) -> Result<(), CompileError> {
        self.op = op.name();
        self.uses = op
            .bufs()
            .into_iter()
            .map(|(buf, access)| {
                let used = match access {
                    Access::Read => Use::Read,
                    Access::Write => Use::Write,
                    Access::Update => Use::Update,
                };
                (buf, used)
            })
            .collect();
        match *op {
            Op::Embed { table, scale, out } => self.embed(table, scale, out),
            Op::Linear { x, ref parts } => self.linear(x, parts),
            Op::GatedLinear { x, gate, up, act, out } => self.gated_linear(x, gate, up, act, out),
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
            Op::Add { x, y } => {
                let each = self.width(x);
                let draft = Draft::new(sources::ADD, "add").bind(0, self.buf(x)).bind(1, self.buf(y));
                self.elementwise(draft, 2, self.rows(x), each, &[]);
            }
            Op::Scale { x, scale } => {
                let draft = Draft::new(sources::SCALE, "scale").bind(0, self.buf(x));
                self.elementwise(draft, 1, self.rows(x), self.width(x), &[float(scale)]);
            }
            Op::ScaleBy { x, w } => {
                let draft = Draft::new(sources::SCALE_BY, "scale_by").bind(0, self.buf(x)).bind(1, self.vector(w));
                self.elementwise(draft, 2, self.rows(x), self.width(x), &[]);
            }
            Op::Softcap { x, cap } => {
                let draft = Draft::new(sources::SOFTCAP, "softcap").bind(0, self.buf(x));
                self.elementwise(draft, 1, self.rows(x), self.width(x), &[float(cap)]);
            }
            Op::SigmoidGate { x, gate } => {
                // A gate of width 1 is for its whole row.
                let width = self.width(x) / self.width(gate);
                let draft =
                    Draft::new(sources::SIGMOID_GATE, "sigmoid_gate").bind(0, self.buf(x)).bind(1, self.buf(gate));
                self.elementwise(draft, 2, self.rows(x), self.width(x), &[is(width)]);
            }
            Op::Select { x, out } => {
                let draft = Draft::new(sources::SELECT, "select_rows").bind(0, self.buf(x)).table(1, Table::Rows);
                let draft = draft.bind(2, self.buf(out));
                self.elementwise(draft, 3, self.rows(out), self.width(out), &[is(self.width(out))]);
            }
            Op::KvAppend { cache, k, v } => self.kv_append(cache, k, v),
            Op::Attention { cache, q, n_head, scale, window, softcap, sinks, out } => {
                self.attention(cache, q, n_head, [scale, softcap.unwrap_or(0.0)], window, sinks, out);
            }
            Op::Route { logits, ref router, n_used, ids, weights } => {
                return self.route(logits, router, n_used, ids, weights);
            }
            Op::Experts { x, ids, gate, up, down, biases, act, hidden, out } => {
                self.experts(x, ids, [gate, up, down], biases, act, hidden, out, sum);
            }
            Op::Combine { x, add, y, weights, norm } => self.combine(x, add, y, weights, norm),
            Op::HeadLinear { x, w, transposed, out } => self.head_linear(x, w, transposed, out),
            Op::CausalConv { x, w, state, out } => return self.causal_conv(x, w, state, out),
            Op::DeltaNet { q, k, v, g, beta, state, heads, out } => {
                self.delta_net([q, k, v, g, beta], state, heads, out);
            }
            Op::DecayBeta { a, b, a_log, dt_bias, g_out, beta_out } => {
                let draft = Draft::new(sources::DECAY_BETA, "decay_beta")
                    .bind(0, self.buf(a))
                    .bind(1, self.buf(b))
                    .bind(2, self.vector(a_log))
                    .bind(3, self.vector(dt_bias))
                    .bind(4, self.buf(g_out))
                    .bind(5, self.buf(beta_out));
                self.elementwise(draft, 6, self.rows(a), self.width(a), &[is(self.width(a))]);
            }
            Op::GatedNorm { x, gate, w, eps, n_head, d_head } => {
                let (rows, each) = (self.rows(x), n_head as u32);
                self.push(
                    Draft::new(sources::GATED_NORM, "gated_norm")
                        .bind(0, self.buf(x))
                        .bind(1, self.buf(gate))
                        .bind(2, self.vector(w))
                        .params(3, [Word::Each(rows, each), is(d_head), float(eps)])
                        .grid([Extent::Of { rows, each, per: 2 }, Extent::Is(1), Extent::Is(1)]),
                );
            }
        }
        Ok(())
    }

    /// A thread a number; the number of numbers is the first parameter.
    fn elementwise(&mut self, draft: Draft, params_slot: u8, rows: Rows, each: usize, words: &[Word]) {
        let words = [Word::Each(rows, each as u32)].into_iter().chain(words.iter().copied());
        let grid = [threads(rows, each), Extent::Is(1), Extent::Is(1)];
        self.push(draft.params(params_slot, words).grid(grid));
    }

    fn embed(&mut self, table: Weight, scale: f32, out: Buf) {
        let (_, d) = self.shape(table);
        // Units have 16 numbers or more.
        let groups = d.div_ceil(16).div_ceil(THREADS as usize);
        self.push(
            self.typed(sources::EMBED, "embed", table)
                .planes(0, self.planes(table))
                .table(3, Table::Ids)
                .bind(4, self.buf(out))
                .params(5, [is(d), float(scale)])
                .grid([Extent::Is(groups as u32), per_row(self.rows(out)), Extent::Is(1)]),
        );
    }

    /// Matrices of one type go together.
    fn linear(&mut self, x: Buf, parts: &[LinearPart]) {
        let mut rest: Vec<&LinearPart> = parts.iter().collect();
        while let Some(first) = rest.first() {
            let dtype = self.plan.weight(first.w).dtype;
            let fits = |part: &&LinearPart| self.plan.weight(part.w).dtype == dtype;
            let (same, other): (Vec<&LinearPart>, Vec<&LinearPart>) = rest.into_iter().partition(fits);
            for parts in same.chunks(MAX_PARTS) {
                let parts: Vec<_> = parts.iter().map(|part| (part.w, part.bias, self.buf(part.out))).collect();
                self.products(x, &parts);
            }
            rest = other;
        }
    }

    /// Up to [`MAX_PARTS`] matrices of one type times the rows of `x`, each with its bias and output.
    fn products(&mut self, x: Buf, parts: &[(Weight, Option<Weight>, (Place, Use))]) {
        let (_, k) = self.shape(parts[0].0);
        let biases = parts.iter().enumerate().map(|(i, part)| usize::from(part.1.is_some()) << i).sum();
        let longest = parts.iter().map(|part| self.shape(part.0).0).max().unwrap_or(0);
        let shape = variants::Shape { n: longest, ..self.product(parts[0].0) };
        let form = variants::few(shape, self.at.tuning);
        let mut draft = self
            .typed(sources::LINEAR, "linear", parts[0].0)
            .define("N_PARTS", parts.len())
            .define("BIASES", biases)
            .bind(12, self.buf_as(x, Use::Read));
        let (mut widths, mut groups, mut tiles) = ([0; MAX_PARTS], 0, 0);
        for (i, &(w, bias, out)) in parts.iter().enumerate() {
            let (n, _) = self.shape(w);
            draft = draft.planes(3 * i as u8, self.planes(w)).bind(14 + i as u8, out);
            if let Some(bias) = bias {
                draft = draft.bind(18 + i as u8, self.vector(bias));
            }
            widths[i] = n;
            groups += n.div_ceil(2 * form.rows);
            tiles += n.div_ceil(variants::TILE[0] as usize);
        }
        let rows = self.rows(x);
        let words = [k].into_iter().chain(widths).map(is).chain([Word::Each(rows, 1)]);
        let grid = [Extent::Is(groups as u32), per_row(rows), Extent::Is(1)];
        let draft = draft.params(13, words).grid(grid);
        let many = variants::has_tiles(shape, self.at.tuning).then(|| Many {
            rows,
            from: variants::LEAST_ROWS,
            unit: self.unit(&draft.clone().define("TILED", 1)),
            grid: [Extent::Is(tiles as u32), Extent::Of { rows, each: 1, per: variants::TILE[1] }, Extent::Is(1)],
            threads: variants::TILE_THREADS,
        });
        self.push(draft.define("TILED", 0).form(form));
        if let Some(node) = self.nodes.last_mut() {
            node.many = many;
        }
    }

    /// The part of scratch `i` that has a number for each of `out`.
    fn scratch(&self, i: usize, out: Buf, used: Use) -> (Place, Use) {
        match self.at.apart[i] {
            Some(span) => (Place::Rows(span, self.rows(out), 4 * self.width(out) as u64), used),
            None => unreachable!("scratch is laid out where gate and up differ"),
        }
    }

    fn gated_linear(&mut self, x: Buf, gate: Weight, up: Weight, act: Gate, out: Buf) {
        if self.plan.weight(gate).dtype != self.plan.weight(up).dtype {
            self.products(x, &[(gate, None, self.scratch(0, out, Use::Write))]);
            self.products(x, &[(up, None, self.scratch(1, out, Use::Write))]);
            return self.gated_act(self.scratch(0, out, Use::Read), self.scratch(1, out, Use::Read), act, out);
        }
        let ((n, k), form) = (self.shape(gate), self.form(gate));
        let (kind, numbers) = activation(act);
        self.push(
            self.typed(sources::GATED_LINEAR, "gated_linear", gate)
                .form(form)
                .define("ACT", kind)
                .planes(0, self.planes(gate))
                .planes(3, self.planes(up))
                .bind(6, self.buf(x))
                .bind(7, self.buf(out))
                .params(8, [is(n), is(k)].into_iter().chain(numbers))
                .grid([simdgroups_of(n, form), per_row(self.rows(x)), Extent::Is(1)]),
        );
    }

    fn gated_act(&mut self, gate: (Place, Use), up: (Place, Use), act: Gate, out: Buf) {
        let (kind, numbers) = activation(act);
        let draft = Draft::new(sources::GATED_ACT, "gated_act").define("ACT", kind);
        let draft = draft.bind(0, gate).bind(1, up).bind(2, self.buf_as(out, Use::Write));
        self.elementwise(draft, 3, self.rows(out), self.width(out), &numbers);
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

    /// Norms of heads, rotary embeddings and the append behind them.
    fn heads_in(&mut self, run: &fuse::Heads) {
        let (view, pages) = self.cache(run.cache);
        let CacheDecl { n_kv, d_k, d_v, window, .. } = view.decl;
        let norm = |part: Option<fuse::Part>| match part.and_then(|part| part.norm) {
            None => 0,
            Some(None) => 1,
            Some(Some(_)) => 2,
        };
        let is_turned = |part: Option<fuse::Part>| usize::from(part.is_some_and(|part| part.is_rotated));
        let (k, parts) = (Some(run.k), [run.q, Some(run.k), run.v]);
        let mut draft = Draft::new(sources::HEADS, "heads")
            .define("D_K", d_k)
            .define("D_V", d_v)
            .define("KV_F16", usize::from(self.at.is_f16))
            .define("HAS_Q", usize::from(run.q.is_some()))
            .define("HAS_V", usize::from(run.v.is_some()))
            .define("Q_NORM", norm(run.q))
            .define("K_NORM", norm(k))
            .define("V_NORM", norm(run.v))
            .define("Q_ROPE", is_turned(run.q))
            .define("K_ROPE", is_turned(k))
            .bind(2, self.buf_as(run.k.x, Use::Update))
            .bind(3, (Place::Fixed(view.k), Use::Update));
        if let Some(q) = run.q {
            draft = draft.bind(1, self.buf_as(q.x, Use::Update));
        }
        if let (Some(v), Some(cache)) = (run.v, view.v) {
            draft = draft.bind(4, self.buf_as(v.x, Use::Read)).bind(5, (Place::Fixed(cache), Use::Update));
        }
        for (slot, part) in (6..).zip(parts) {
            if let Some(w) = part.and_then(|part| part.norm).flatten() {
                draft = draft.bind(slot, self.vector(w));
            }
        }
        let (mut half, mut interleaved) = (0, false);
        if let Some(rope) = run.rope {
            let decl = self.plan.rope(rope);
            (half, interleaved) = (decl.inv_freq.len(), decl.pairing == RopePairing::Interleaved);
            draft = draft.table(9, Table::Angles(rope.0 as usize));
        }
        let n_q = run.q.map_or(0, |q| self.width(q.x) / d_k);
        let n_heads = n_q + n_kv * (1 + usize::from(run.v.is_some()));
        let words = [n_q, n_kv, usize::from(window.is_some()), half, usize::from(interleaved)];
        self.push(
            draft
                .params(0, words.into_iter().map(is).chain([float(run.eps)]))
                .table(10, Table::Positions)
                .table(11, Table::ChunkOf)
                .table(12, Table::Chunks)
                .table(13, pages)
                .grid([simdgroups(n_heads), per_row(Rows::Tokens), Extent::Is(1)]),
        );
    }

    fn cache(&self, cache: Cache) -> (CacheView, Table) {
        let view = self.at.caches[cache.0 as usize];
        (view, if view.decl.window.is_some() { Table::WindowPages } else { Table::Pages })
    }

    fn head_linear(&mut self, x: Buf, w: Weight, transposed: bool, out: Buf) {
        let (first, second) = self.shape(w);
        let (n, k) = if transposed { (second, first) } else { (first, second) };
        let n_head = self.width(out) / n;
        let kernel = if transposed { "head_linear_t" } else { "head_linear" };
        // Units have 16 numbers or more, and a threadgroup takes 16 of them.
        let groups = if transposed { Extent::Is(n.div_ceil(256) as u32) } else { simdgroups(n) };
        self.push(
            self.typed(sources::HEAD_LINEAR, kernel, w)
                .define("TRANSPOSED", usize::from(transposed))
                .planes(0, self.planes(w))
                .bind(3, self.buf(x))
                .bind(4, self.buf(out))
                .params(5, [n, k, n_head].map(is))
                .grid([groups, Extent::Is(n_head as u32), per_row(self.rows(x))]),
        );
    }

    fn state(&self, state: State) -> (Place, Use) {
        (Place::Fixed(self.at.states[state.0 as usize]), Use::Update)
    }

    fn causal_conv(&mut self, x: Buf, w: Weight, state: State, out: Buf) -> Result<(), CompileError> {
        let (d, width) = self.shape(w);
        if !(2..=CONV_TILE as usize + 1).contains(&width) {
            return Err(unsupported(format!("run causal_conv over {width} positions, 2 to {}", CONV_TILE + 1)));
        }
        self.push(
            Draft::new(sources::CAUSAL_CONV, "causal_conv")
                .define("WIDTH", width)
                .bind(0, self.buf(x))
                .bind(1, self.vector(w))
                .bind(2, self.state(state))
                .bind(3, self.buf(out))
                .params(4, [is(d)])
                .table(5, Table::Chunks)
                .grid([Extent::Is((d as u32).div_ceil(THREADS)), Extent::Longest(CONV_TILE), Extent::Chunks]),
        );
        Ok(())
    }

    fn delta_net(&mut self, inputs: [Buf; 5], state: State, heads: DeltaHeads, out: Buf) {
        let DeltaHeads { n_k_head, n_v_head, d_k, d_v, sharing } = heads;
        let mut draft = Draft::new(sources::DELTA_NET, "delta_net").define("D_K", d_k);
        for (slot, buf) in (0..).zip(inputs) {
            draft = draft.bind(slot, self.buf(buf));
        }
        self.push(
            draft
                .bind(5, self.state(state))
                .bind(6, self.buf(out))
                .params(7, [n_k_head, n_v_head, d_v, usize::from(sharing == Sharing::Tiled)].map(is))
                .table(8, Table::Chunks)
                .grid([Extent::Is(d_v.div_ceil(8) as u32), Extent::Is(n_v_head as u32), Extent::Chunks]),
        );
    }

    fn kv_append(&mut self, cache: Cache, k: Buf, v: Option<Buf>) {
        let (view, pages) = self.cache(cache);
        let CacheDecl { n_kv, d_k, d_v, window, .. } = view.decl;
        let mut draft = Draft::new(sources::KV_APPEND, "kv_append")
            .define("KV_F16", usize::from(self.at.is_f16))
            .define("HAS_V", usize::from(v.is_some()))
            .bind(0, self.buf(k))
            .bind(1, (Place::Fixed(view.k), Use::Update));
        if let (Some(v), Some(cache)) = (v, view.v) {
            draft = draft.bind(2, self.buf(v)).bind(3, (Place::Fixed(cache), Use::Update));
        }
        self.push(
            draft
                .params(4, [is(n_kv), is(d_k), is(d_v), is(usize::from(window.is_some()))])
                .table(5, Table::Positions)
                .table(6, Table::ChunkOf)
                .table(7, Table::Chunks)
                .table(8, pages)
                .grid([per_row(Rows::Tokens), Extent::Is(1), Extent::Is(1)]),
        );
    }

    fn attention(
        &mut self,
        cache: Cache,
        q: Buf,
        n_head: usize,
        [scale, softcap]: [f32; 2],
        window: Option<usize>,
        sinks: Option<Weight>,
        out: Buf,
    ) {
        let (view, pages) = self.cache(cache);
        let CacheDecl { n_kv, d_k, d_v, v_in_k, window: kept } = view.decl;
        let words = [n_head, n_kv, window.map_or(0, |n| n.min(u32::MAX as usize)), usize::from(kept.is_some())];
        let mut draft = Draft::new(sources::ATTENTION, "attention")
            .define("D_K", d_k)
            .define("D_V", d_v)
            .define("KV_F16", usize::from(self.at.is_f16))
            .define("V_IN_K", usize::from(v_in_k))
            .define("SINKS", usize::from(sinks.is_some()))
            .bind(0, self.buf(q))
            .bind(1, (Place::Fixed(view.k), Use::Read));
        if let Some(v) = view.v {
            draft = draft.bind(2, (Place::Fixed(v), Use::Read));
        }
        if let Some(sinks) = sinks {
            draft = draft.bind(9, self.vector(sinks));
        }
        self.push(
            draft
                .bind(3, self.buf(out))
                .params(4, words.into_iter().map(is).chain([float(scale), float(softcap)]))
                .table(5, Table::Positions)
                .table(6, Table::ChunkOf)
                .table(7, Table::Chunks)
                .table(8, pages)
                .grid([Extent::Is(n_head as u32), per_row(Rows::Tokens), Extent::Is(1)]),
        );
    }

    fn route(
        &mut self,
        logits: Buf,
        router: &Router,
        n_used: usize,
        ids: Buf,
        weights: Buf,
    ) -> Result<(), CompileError> {
        if n_used > MAX_USED {
            return Err(unsupported(format!("use {n_used} experts a token, at most {MAX_USED}")));
        }
        let rows = self.rows(logits);
        let score = match router.score {
            Score::Softmax => 0,
            Score::Sigmoid => 1,
            Score::Raw => 2,
        };
        let [n_group, n_group_used, sums] =
            router.groups.map_or([0; 3], |g| [g.n_group, g.n_used, usize::from(g.score == GroupScore::TopTwo)]);
        let renormalise = usize::from(router.renormalise.is_some());
        let counts = [n_used, n_group, n_group_used, sums, renormalise].map(is);
        let numbers = [float(router.renormalise.unwrap_or(0.0)), float(router.scale)];
        let faults = Place::Rows(self.at.faults[self.n_routers], rows, 4);
        self.n_routers += 1;
        let mut draft = Draft::new(sources::ROUTE, "route")
            .define("N_EXPERT", self.width(logits))
            .define("SCORE", score)
            .define("HAS_BIAS", usize::from(router.bias.is_some()))
            .define("HAS_SCALE", usize::from(router.expert_scale.is_some()))
            .bind(0, self.buf(logits))
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

    /// All that experts do; their sum instead of their outputs where `sum` is the op behind them.
    fn experts(
        &mut self,
        x: Buf,
        ids: Buf,
        [gate, up, down]: [Weight; 3],
        biases: Option<ExpertBiases>,
        act: Gate,
        hidden: Buf,
        out: Buf,
        sum: Option<&fuse::Sum>,
    ) {
        let x_place = self.buf(x);
        let [gate_bias, up_bias, down_bias] = biases.map_or([None; 3], |b| [Some(b.gate), Some(b.up), Some(b.down)]);
        if self.plan.weight(gate).dtype == self.plan.weight(up).dtype {
            let ((n, k), form) = (self.shape(gate), self.form(gate));
            let (kind, numbers) = activation(act);
            let mut draft = self
                .typed(sources::EXPERTS, "experts_gated", gate)
                .form(form)
                .define("FORM", 1)
                .define("ACT", kind)
                .define("BIAS", usize::from(gate_bias.is_some()))
                .planes(0, self.planes(gate))
                .planes(3, self.planes(up))
                .bind(6, x_place)
                .bind(7, self.buf(ids))
                .bind(8, self.buf(hidden))
                .params(9, [n, k, self.width(ids), 0].into_iter().map(is).chain(numbers))
                .grid([simdgroups_of(n, form), Extent::Is(self.width(ids) as u32), per_row(self.rows(x))]);
            if let (Some(gate_bias), Some(up_bias)) = (gate_bias, up_bias) {
                draft = draft.bind(10, self.vector(gate_bias)).bind(11, self.vector(up_bias));
            }
            self.push(draft);
        } else {
            self.chosen(x_place, false, x, ids, gate, gate_bias, self.scratch(0, hidden, Use::Write));
            self.chosen(x_place, false, x, ids, up, up_bias, self.scratch(1, hidden, Use::Write));
            self.gated_act(self.scratch(0, hidden, Use::Read), self.scratch(1, hidden, Use::Read), act, hidden);
        }
        match sum {
            Some(sum) => self.experts_sum(hidden, ids, down, down_bias, sum),
            None => self.chosen(self.buf_as(hidden, Use::Read), true, x, ids, down, down_bias, self.buf(out)),
        }
    }

    /// The last product of the chosen experts, weighted and added up.
    fn experts_sum(&mut self, hidden: Buf, ids: Buf, w: Weight, bias: Option<Weight>, sum: &fuse::Sum) {
        let ((n, k), n_used, form) = (self.shape(w), self.width(ids), self.form(w));
        let used = if sum.add { Use::Update } else { Use::Write };
        let mut draft = self
            .typed(sources::EXPERTS, "experts_sum", w)
            .form(form)
            .define("FORM", 2)
            .define("ADD", usize::from(sum.add))
            .define("BIAS", usize::from(bias.is_some()))
            .planes(0, self.planes(w))
            .bind(3, self.buf_as(hidden, Use::Read))
            .bind(4, self.buf_as(ids, Use::Read))
            .bind(5, self.buf_as(sum.x, used))
            .bind(8, self.buf_as(sum.weights, Use::Read))
            .params(6, [n, k, n_used, 1].into_iter().map(is).chain([float(0.0); 2]))
            .grid([simdgroups_of(n, form), per_row(self.rows(sum.x)), Extent::Is(1)]);
        if let Some(bias) = bias {
            draft = draft.bind(7, self.vector(bias));
        }
        self.push(draft);
        if let Some(Norm { w, eps, out }) = sum.norm {
            self.uses.insert(sum.x, Use::Read);
            self.uses.insert(out, Use::Write);
            self.rms_norm(sum.x, None, w, eps, out);
        }
    }

    /// One matrix of each chosen expert, times its token's row or its slot's own.
    fn chosen(
        &mut self,
        from: (Place, Use),
        x_per_slot: bool,
        x: Buf,
        ids: Buf,
        w: Weight,
        bias: Option<Weight>,
        out: (Place, Use),
    ) {
        let ((n, k), form) = (self.shape(w), self.form(w));
        let n_used = self.width(ids);
        let mut draft = self
            .typed(sources::EXPERTS, "experts", w)
            .form(form)
            .define("FORM", 0)
            .define("BIAS", usize::from(bias.is_some()))
            .planes(0, self.planes(w))
            .bind(3, from)
            .bind(4, self.buf(ids))
            .bind(5, out)
            .params(6, [n, k, n_used, usize::from(x_per_slot)].into_iter().map(is).chain([float(0.0); 2]))
            .grid([simdgroups_of(n, form), Extent::Is(n_used as u32), per_row(self.rows(x))]);
        if let Some(bias) = bias {
            draft = draft.bind(7, self.vector(bias));
        }
        self.push(draft);
    }

    fn combine(&mut self, x: Buf, add: bool, y: Buf, weights: Buf, norm: Option<Norm>) {
        let mut draft = Draft::new(sources::COMBINE, "combine")
            .define("ADD", usize::from(add))
            .define("NORM", usize::from(norm.is_some()))
            .bind(0, self.buf(x))
            .bind(1, self.buf(y))
            .bind(2, self.buf(weights))
            .params(3, [is(self.width(x)), is(self.width(weights)), float(norm.map_or(0.0, |norm| norm.eps))])
            .grid([per_row(self.rows(x)), Extent::Is(1), Extent::Is(1)]);
        if let Some(norm) = norm {
            draft = draft.bind(4, self.vector(norm.w)).bind(5, self.buf(norm.out));
        }
        self.push(draft);
    }
}

/// What the backend cannot do.
pub fn unsupported(what: String) -> CompileError {
    CompileError::Unsupported { backend: "metal", what }
}
