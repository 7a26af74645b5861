//! Every kind of kernel besides products on a GPU that nobody has tried: tiny plans, run through the host code of a
//! program, against the CPU backend.

use std::sync::Arc;

use checkpoint::Checkpoint;
use checkpoint::gguf::Writer;
use model::plan::{
    Buf, BufDecl, Cache, CacheDecl, DeltaHeads, DeltaRule, Elem, Gate, LinearPart, N_AXES, Op, Plan, Read, Rope,
    RopeDecl, RopePairing, Router, Rows, Sharing, Source, State, StateDecl, ValidPlan, Weight, WeightDecl,
};
use quant::WeightType::F32;

use super::Metal;
use super::variants::Off;
use backend::CacheType;
use backend::residency::Policy;
use backend::{Ask, Backend, Batch, Limits, Tables};
use cpu::{Cpu, Isa};

/// The most that logits may be off, as the norm of all; sums of f32 in another order are off by less than 1e-5.
const TOLERANCE: f64 = 1e-3;

/// What is tried together and falls back together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Norms of heads, rotary embeddings, appends, attention by rows and in tiles.
    Attention,
    /// Attention over spans, whose tokens see each other.
    Spans,
    /// Choices of positions, and attention over them.
    Chosen,
    /// The same of latent attention.
    Latent,
    /// Routers, experts by pairs and sorted, one beside them.
    Experts,
    /// Norms of rows that follow each other.
    Norms,
    /// Convolutions, gates and delta rules.
    Delta,
}

impl Kind {
    /// The kinds that a plan has.
    pub fn of(plan: &Plan) -> impl Iterator<Item = Kind> {
        let has = |is_meant: fn(&Op) -> bool| plan.ops.iter().any(is_meant);
        let kinds = [
            (Kind::Attention, plan.caches.iter().any(|cache| !cache.v_in_k)),
            (Kind::Spans, plan.whole || plan.d_input().is_some()),
            (Kind::Chosen, has(|op| matches!(op, Op::Choose { .. }))),
            (Kind::Latent, plan.caches.iter().any(|cache| cache.v_in_k)),
            (Kind::Experts, has(|op| matches!(op, Op::Experts { .. }))),
            (Kind::Norms, has(|op| matches!(op, Op::RmsNorm { .. }))),
            (Kind::Delta, !plan.states.is_empty()),
        ];
        kinds.into_iter().filter_map(|(kind, is_there)| is_there.then_some(kind))
    }

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Attention => "attention",
            Kind::Spans => "attention over spans",
            Kind::Chosen => "chosen positions",
            Kind::Latent => "latent attention",
            Kind::Experts => "experts",
            Kind::Norms => "norms",
            Kind::Delta => "delta rules",
        }
    }

    /// Turns the kind's forms besides the plain ones off.
    pub fn turn_off(self, off: &mut Off) {
        match self {
            Kind::Attention | Kind::Spans | Kind::Chosen => off.attention = true,
            Kind::Latent => off.latent = true,
            Kind::Experts => off.experts = true,
            Kind::Norms => off.norms = true,
            Kind::Delta => off.delta = true,
        }
    }
}

/// Runs a tiny plan of a kind.
///
/// # Errors
/// How it is wrong, or what failed.
pub fn run(metal: &Metal, kind: Kind) -> Result<(), String> {
    let mut metal = Metal { cache: CacheType::F32, maps_weights: false, ..metal.clone() };
    // Short contexts have parts too.
    metal.tuning.part = backend::PAGE;
    let cpu = Cpu { isa: Isa::Scalar, threads: 1, cache: CacheType::F32, residency: Policy::CopyAll };
    let (plan, checkpoint) = build(kind)?;
    let exact = logits(&cpu, &plan, &checkpoint)?;
    let found = [logits(&metal, &plan, &checkpoint)?, logits(&metal, &plan, &checkpoint)?];
    if found[0].iter().zip(&found[1]).any(|(a, b)| a.to_bits() != b.to_bits()) {
        return Err("other numbers each time".into());
    }
    let square = |x: f64| x * x;
    let error: f64 = found[0].iter().zip(&exact).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
    let error = (error / exact.iter().map(|&x| square(f64::from(x))).sum::<f64>()).sqrt();
    // NaN is wrong too.
    match error <= TOLERANCE {
        true => Ok(()),
        false => Err(format!("off by {error:.1e}")),
    }
}

/// Logits of a prompt long enough for tiles, of a token after it, of a few, and of one after drafts.
fn logits(backend: &dyn Backend, plan: &ValidPlan, checkpoint: &Arc<Checkpoint>) -> Result<Vec<f32>, String> {
    let limits = Limits {
        max_tokens: 40,
        max_outputs: 40,
        n_pages: 3,
        max_positions: 96,
        n_window_pages: 0,
        n_states: 1,
        max_draft: 2,
    };
    let plan = backend.lower(plan.clone()).map_err(|e| e.to_string())?;
    let mut program = backend.compile(&plan, Arc::clone(checkpoint), limits).map_err(|e| e.to_string())?;
    let (mut batch, mut all, mut pos) = (Batch::default(), Vec::new(), 0);
    // Of two drafts the first is accepted.
    for (n, n_draft) in [(37, 0), (1, 0), (3, if plan.whole { 0 } else { 2 }), (1, 0)] {
        let tokens: Vec<u32> = (pos..pos + n).map(|i| (7 * i % N_VOCAB) as u32).collect();
        batch.clear();
        let first = if plan.whole { 0 } else { pos };
        let (own, drafts) = tokens.split_at(n - n_draft);
        batch.push(own, first, Tables { pages: &[2, 0, 1], ..Tables::default() }, 0..own.len());
        batch.push_drafts(drafts);
        if plan.whole {
            batch.asks.fill(Ask::Hidden);
            batch.given.spans.push(0..n as u32);
            batch.given.places.extend((0..n as u32).map(|i| [i; N_AXES]));
        }
        let out = program.step(&batch).map_err(|e| e.to_string())?;
        if !out.faults.is_empty() {
            return Err("a router saw NaN".into());
        }
        all.extend_from_slice(if plan.whole { out.hidden } else { out.logits });
        if let (true, Some(drafts)) = (program.kinds().state && n_draft > 0, program.drafts()) {
            drafts.commit(0, 1);
        }
        pos += n - n_draft / 2;
    }
    Ok(all)
}

const N_VOCAB: usize = 29;
/// What no tile divides, and a multiple of 16, as forms for large matrices want it.
const D: usize = 48;
const EPS: f32 = 1e-5;
const T: Rows = Rows::Tokens;

/// A plan under construction, with its weights.
struct Maker {
    plan: Plan,
    weights: Vec<(String, Vec<usize>, Vec<u8>)>,
    seed: u64,
}

impl Maker {
    fn random(&mut self) -> f32 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        (self.seed >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    fn weight(&mut self, shape: &[usize]) -> Weight {
        let k = shape.last().copied().unwrap_or(1);
        let size = if shape.len() == 1 { 1.0 } else { (3.0 / k as f32).sqrt() };
        let n: usize = shape.iter().product();
        let bytes = (0..n).flat_map(|_| (self.random() * size).to_le_bytes()).collect();
        let name = format!("w{}", self.weights.len());
        self.weights.push((name.clone(), shape.to_vec(), bytes));
        let source = Source::Tensor(name.clone());
        self.plan.weights.push(WeightDecl {
            name,
            dtype: F32,
            shape: shape.to_vec(),
            source,
            read: Read::Plain,
            is_repacked: false,
        });
        Weight(self.plan.weights.len() as u32 - 1)
    }

    fn buf(&mut self, rows: Rows, width: usize) -> Buf {
        let name = format!("b{}", self.plan.bufs.len());
        self.plan.bufs.push(BufDecl { name, rows, width, elem: Elem::F32 });
        Buf(self.plan.bufs.len() as u32 - 1)
    }

    fn state(&mut self, what: &'static str, n: usize) -> State {
        self.plan.states.push(StateDecl { what, n });
        State(self.plan.states.len() as u32 - 1)
    }

    fn op(&mut self, op: Op) {
        self.plan.ops.push(op);
        self.plan.layers.push(Some(0));
    }

    fn linear(&mut self, x: Buf, n: usize) -> Buf {
        let decl = self.plan.buf(x);
        let (rows, k) = (decl.rows, decl.width);
        let (w, out) = (self.weight(&[n, k]), self.buf(rows, n));
        self.op(Op::Linear { x, parts: vec![LinearPart { w, bias: None, out }] });
        out
    }

    fn norm(&mut self, x: Buf) -> Buf {
        let decl = self.plan.buf(x);
        let (rows, d) = (decl.rows, decl.width);
        let (w, out) = (self.weight(&[d]), self.buf(rows, d));
        self.op(Op::RmsNorm { x, residual: None, w, eps: EPS, out });
        out
    }

    fn gated(&mut self, x: Buf, n: usize) -> Buf {
        let (gate, up) = (self.linear(x, n), self.linear(x, n));
        let out = self.buf(T, n);
        self.op(Op::GatedAct { gate, up, act: Gate::Silu, out });
        self.linear(out, D)
    }

    fn chosen(&mut self, x: Buf) {
        let (n_head, d, n) = (3, 20, 8);
        self.plan.caches.push(CacheDecl { n_kv: 1, d_k: d, d_v: d, v_in_k: true, window: None });
        let (cache, h) = (self.last_cache(), self.norm(x));
        let [q, k, weights] = [n_head * d, d, n_head].map(|n| self.linear(h, n));
        self.op(Op::KvAppend { cache, k, v: None });
        let out = self.buf(T, n);
        self.plan.bufs[out.0 as usize].elem = Elem::U32;
        self.op(Op::Choose { cache, q, weights, out });
        self.attention(x, None, Some(out));
    }

    fn attention(&mut self, x: Buf, window: Option<usize>, chosen: Option<Buf>) {
        let (n_head, n_kv, d) = (4, 2, 20);
        self.plan.caches.push(CacheDecl { n_kv, d_k: d, d_v: d, v_in_k: false, window: None });
        let rope = self.rope(6);
        let h = self.norm(x);
        let [q, k, v] = [n_head, n_kv, n_kv].map(|n| self.linear(h, n * d));
        for (x, n_head) in [(q, n_head), (k, n_kv)] {
            let w = Some(self.weight(&[d]));
            self.op(Op::HeadNorm { x, w, eps: EPS, n_head, d_head: d });
            self.op(Op::Rope { x, rope, n_head, d_head: d });
        }
        let cache = self.last_cache();
        self.op(Op::KvAppend { cache, k, v: Some(v) });
        self.attend(x, q, [n_head, d], window, chosen);
    }

    fn last_cache(&self) -> Cache {
        Cache(self.plan.caches.len() as u32 - 1)
    }

    fn attend(&mut self, x: Buf, q: Buf, [n_head, d_v]: [usize; 2], window: Option<usize>, chosen: Option<Buf>) {
        let out = self.buf(T, n_head * d_v);
        let (scale, softcap, sinks) = (0.4, None, None);
        let (cache, chunked) = (self.last_cache(), false);
        self.op(Op::Attention { cache, q, n_head, scale, window, chunked, softcap, chosen, sinks, out });
        let y = self.linear(out, D);
        self.op(Op::Add { x, y });
    }

    fn rope(&mut self, n_pairs: usize) -> Rope {
        let inv_freq = (0..n_pairs).map(|i| 100f64.powf(-(i as f64) / n_pairs as f64)).collect();
        self.plan.ropes.push(RopeDecl {
            inv_freq,
            factor: 1.0,
            growth: None,
            pairing: RopePairing::Half,
            axes: Vec::new(),
        });
        Rope(self.plan.ropes.len() as u32 - 1)
    }

    fn latent(&mut self, x: Buf) {
        let (n_head, d_nope, d_pe, d_latent) = (3, 10, 6, 20);
        self.plan.caches.push(CacheDecl { n_kv: 1, d_k: d_latent + d_pe, d_v: d_latent, v_in_k: true, window: None });
        let rope = self.rope(d_pe / 2);
        let h = self.norm(x);
        let (low, kv) = (self.linear(h, 24), self.linear(h, d_latent + d_pe));
        let low = self.norm(low);
        let heads = self.linear(low, n_head * (d_nope + d_pe));
        let [nope, pe] = [d_nope, d_pe].map(|d| self.buf(T, n_head * d));
        self.op(Op::SplitHeads { x: heads, n_head, parts: vec![(d_nope, nope), (d_pe, pe)] });
        let [c, k_pe] = [d_latent, d_pe].map(|d| self.buf(T, d));
        self.op(Op::SplitHeads { x: kv, n_head: 1, parts: vec![(d_latent, c), (d_pe, k_pe)] });
        let latent = self.norm(c);
        self.op(Op::Rope { x: pe, rope, n_head, d_head: d_pe });
        self.op(Op::Rope { x: k_pe, rope, n_head: 1, d_head: d_pe });
        let (w, out) = (self.weight(&[n_head, d_nope, d_latent]), self.buf(T, n_head * d_latent));
        self.op(Op::HeadLinear { x: nope, w, transposed: true, out });
        let q = self.buf(T, n_head * (d_latent + d_pe));
        self.op(Op::JoinHeads { parts: vec![(d_latent, out), (d_pe, pe)], n_head, out: q });
        let k = self.buf(T, d_latent + d_pe);
        self.op(Op::JoinHeads { parts: vec![(d_latent, latent), (d_pe, k_pe)], n_head: 1, out: k });
        self.op(Op::KvAppend { cache: Cache(0), k, v: None });
        self.attend(x, q, [n_head, d_latent], None, None);
    }

    fn experts(&mut self, x: Buf) {
        let (n_expert, n_used, d_ff) = (7, 3, 32);
        let h = self.norm(x);
        let logits = self.linear(h, n_expert);
        let (ids, weights) = (self.buf(T, n_used), self.buf(T, n_used));
        self.plan.bufs[ids.0 as usize].elem = Elem::U32;
        self.op(Op::Route { logits, router: Router::softmax(true, 1.5), n_used, ids, weights });
        let [gate, up] = [0, 1].map(|_| self.weight(&[n_expert, d_ff, D]));
        let down = self.weight(&[n_expert, D, d_ff]);
        let (hidden, out) = (self.buf(Rows::Slots(n_used), d_ff), self.buf(Rows::Slots(n_used), D));
        self.op(Op::Experts { x: h, ids, gate, up, down, biases: None, act: Gate::Silu, hidden, out });
        let y = self.gated(h, 2 * d_ff);
        self.op(Op::Add { x, y });
        self.op(Op::Combine { x, add: true, y: out, weights, norm: None });
    }

    fn norms(&mut self, x: Buf) {
        let centered = self.buf(T, D);
        self.op(Op::Center { x, out: centered });
        let h = self.norm(centered);
        let w = self.weight(&[D]);
        self.op(Op::AddBias { x: h, w });
        let y = self.linear(h, D);
        let y = self.norm(y);
        self.op(Op::Add { x, y });
        let f = self.norm(x);
        let y = self.gated(f, 32);
        let y = self.norm(y);
        self.op(Op::Add { x, y });
        let w = self.weight(&[1]);
        self.op(Op::ScaleBy { x, w });
        let h = self.norm(x);
        let y = self.linear(h, D);
        self.op(Op::Add { x, y });
    }

    fn delta(&mut self, x: Buf) {
        let heads = DeltaHeads {
            n_k_head: 2,
            n_v_head: 4,
            d_k: 20,
            d_v: 13,
            sharing: Sharing::Grouped,
            rule: DeltaRule::Delta,
        };
        let DeltaHeads { n_k_head, n_v_head, d_k, d_v, .. } = heads;
        let (k_row, v_row, width) = (n_k_head * d_k, n_v_head * d_v, 4);
        let channels = 2 * k_row + v_row;
        let h = self.norm(x);
        let (mixed, z) = (self.linear(h, channels), self.linear(h, v_row));
        let [a, b] = [0, 1].map(|_| self.linear(h, n_v_head));
        let (w, out) = (self.weight(&[channels, width]), self.buf(T, channels));
        let state = self.state("conv", (width - 1) * channels);
        self.op(Op::CausalConv { x: mixed, w, bias: None, silu: true, state, out });
        let [q, k, v] = [k_row, k_row, v_row].map(|width| self.buf(T, width));
        self.op(Op::SplitHeads { x: out, n_head: 1, parts: vec![(k_row, q), (k_row, k), (v_row, v)] });
        for x in [q, k] {
            self.op(Op::HeadNorm { x, w: None, eps: EPS, n_head: n_k_head, d_head: d_k });
            self.op(Op::Scale { x, scale: 0.25 });
        }
        let [g, beta] = [0, 1].map(|_| self.buf(T, n_v_head));
        let (a_log, dt_bias) = (self.weight(&[n_v_head]), self.weight(&[n_v_head]));
        self.plan.weights[a_log.0 as usize].read = Read::NegExp;
        self.op(Op::DecayBeta { a, b: Some(b), a_log, dt_bias, bound: None, g_out: g, beta_out: beta });
        let out = self.buf(T, v_row);
        let state = self.state("delta", n_v_head * d_k * d_v);
        self.op(Op::DeltaNet { q, k, v, g, beta, skip: None, state, heads, out });
        let w = self.weight(&[d_v]);
        self.op(Op::GatedNorm { x: out, gate: z, w, gate_first: false, eps: EPS, n_head: n_v_head, d_head: d_v });
        let y = self.linear(out, D);
        self.op(Op::Add { x, y });
    }
}

fn build(kind: Kind) -> Result<(ValidPlan, Arc<Checkpoint>), String> {
    let plan = Plan::new(kind.name(), N_VOCAB, D, 96);
    let mut m = Maker { plan, weights: Vec::new(), seed: 0x9e37_79b9_7f4a_7c15 };
    let (table, x) = (m.weight(&[N_VOCAB, D]), m.buf(T, D));
    m.op(Op::Embed { table, scale: 2.0, out: x });
    match kind {
        Kind::Attention => m.attention(x, None, None),
        Kind::Chosen => m.chosen(x),
        Kind::Spans => {
            m.plan.whole = true;
            [None, Some(16)].into_iter().for_each(|window| m.attention(x, window, None));
        }
        Kind::Latent => m.latent(x),
        Kind::Experts => m.experts(x),
        Kind::Norms => m.norms(x),
        Kind::Delta => m.delta(x),
    }
    let picked = m.buf(Rows::Outputs, D);
    let last = m.norm(x);
    m.op(Op::Select { x: last, out: picked });
    m.plan.logits = if m.plan.whole { picked } else { m.linear(picked, N_VOCAB) };
    let mut writer = Writer::new();
    for (name, shape, bytes) in &m.weights {
        writer.tensor(name, shape, F32, bytes);
    }
    let mut file = Vec::new();
    writer.write(&mut file).map_err(|e| e.to_string())?;
    let checkpoint = checkpoint::from_bytes("a trial", file).map_err(|e| e.to_string())?;
    Ok((ValidPlan::new(m.plan).map_err(|e| e.to_string())?, Arc::new(checkpoint)))
}
