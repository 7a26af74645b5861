//! Helpers of the tests that every backend passes: a random model of one layer that holds every op, in any shape, the
//! table of backends, sessions, and the answers of original routers.
#![allow(clippy::unwrap_used, missing_docs)]

pub mod backends;
#[path = "../../../tests/fixtures.rs"]
pub mod fixtures;
pub mod router_cases;
mod session;

use std::sync::Arc;

use checkpoint::Checkpoint;
use checkpoint::gguf::Writer;
use model::plan::*;
use quant::{PlanesBuf, ScaleType, WeightType};
use safetensors::{Dtype, tensor::TensorView};

pub use session::{MAX_DRAFT, Sabotage, Session};

/// RMS of the difference over the standard deviation of the exact values. NaN never passes a comparison with it.
pub fn relative(found: &[f32], exact: &[f32]) -> f64 {
    assert_eq!(found.len(), exact.len());
    let n = exact.len() as f64;
    let mean = exact.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
    let variance = exact.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
    let error = found.iter().zip(exact).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum::<f64>() / n;
    (error / variance).sqrt()
}

/// What the model looks like.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub d_model: usize,
    pub n_head: usize,
    pub n_kv: usize,
    pub d_k: usize,
    pub d_v: usize,
    pub pairing: RopePairing,
    pub window: Option<usize>,
    /// The cache keeps the window only.
    pub forgets: bool,
    pub softcap: Option<f32>,
    pub sinks: bool,
    pub act: Gate,
    /// Of the experts.
    pub biases: bool,
    pub n_expert: usize,
    pub n_used: usize,
    pub d_ff: usize,
    /// Types of q, k, gate, up, down, in turn.
    pub types: [WeightType; 5],
    /// Width of the convolution and heads of a delta rule, in a layer before attention.
    pub delta: Option<(usize, DeltaHeads)>,
    /// Each row of its state has a decay.
    pub by_row: bool,
    pub fused: bool,
}

pub const N_VOCAB: usize = 97;

/// A token whose embedding is NaN; [`tokens`] never draws it.
pub const BAD: u32 = N_VOCAB as u32 - 1;

/// Small, whole lanes.
pub const PLAIN: Shape = Shape {
    d_model: 64,
    n_head: 4,
    n_kv: 2,
    d_k: 64,
    d_v: 64,
    pairing: RopePairing::Half,
    window: None,
    forgets: false,
    softcap: None,
    sinks: false,
    act: Gate::Silu,
    biases: false,
    n_expert: 8,
    n_used: 2,
    d_ff: 96,
    types: [WeightType::F32; 5],
    delta: None,
    by_row: false,
    fused: true,
};

/// A fixed stream of numbers in -1..1.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33
    }

    pub fn float(&mut self) -> f32 {
        self.bits() as f32 / (1u64 << 30) as f32 - 1.0
    }
}

/// Writes a plan and its random weights side by side.
pub struct Maker {
    pub plan: Plan,
    /// Name, shape, type and rows of each weight.
    pub tensors: Vec<(String, Vec<usize>, WeightType, PlanesBuf)>,
    pub random: Random,
}

impl Maker {
    pub fn weight(&mut self, shape: &[usize], dtype: WeightType) -> Weight {
        let k = *shape.last().unwrap();
        let size = if shape.len() == 1 { 1.0 } else { (3.0 / k as f32).sqrt() };
        self.weight_of(shape, dtype, |random, _| (0..k).map(|_| random.float() * size).collect())
    }

    /// A weight of these rows, in the order of the file.
    pub fn weight_of(
        &mut self,
        shape: &[usize],
        dtype: WeightType,
        mut row: impl FnMut(&mut Random, usize) -> Vec<f32>,
    ) -> Weight {
        let name = format!("w{}.weight", self.plan.weights.len());
        let n_rows: usize = shape[..shape.len() - 1].iter().product();
        let row_bytes = dtype.plane_bytes(*shape.last().unwrap()).unwrap();
        let mut planes = PlanesBuf::new(row_bytes.times(n_rows).unwrap());
        for i in 0..n_rows {
            let x = row(&mut self.random, i);
            quant::encode_row(dtype, &x, planes.get_mut().row_mut(row_bytes, i));
        }
        let n_matrices = if shape.len() == 3 { shape[0] } else { 1 };
        if dtype == WeightType::NVFP4_SCALED {
            // A matrix has one scale: of its blocks' own the first.
            for scales in planes.scales.chunks_mut(row_bytes.scales * n_rows / n_matrices) {
                let (first, rest) = scales.split_at_mut(4);
                rest.as_chunks_mut().0.fill([first[0], first[1], first[2], first[3]]);
            }
        }
        // Stacks of 8-bit floats are a tensor for each matrix.
        let slab = |i: usize| Slab { tensor: format!("{name}.{i}.weight"), first_row: 0 };
        let source = match dtype {
            WeightType::F8_E4M3 if shape.len() == 3 => Source::Slabs((0..n_matrices).map(slab).collect()),
            _ => Source::Tensor(name.clone()),
        };
        self.tensors.push((name.clone(), shape.to_vec(), dtype, planes));
        self.plan.weights.push(WeightDecl {
            source,
            name,
            dtype,
            shape: shape.to_vec(),
            read: Read::Plain,
            is_repacked: matches!(dtype, WeightType::F8_E4M3 | WeightType::NVFP4_SCALED),
        });
        Weight(self.plan.weights.len() as u32 - 1)
    }

    pub fn buf(&mut self, rows: Rows, width: usize) -> Buf {
        self.typed(rows, width, Elem::F32)
    }

    pub fn typed(&mut self, rows: Rows, width: usize, elem: Elem) -> Buf {
        self.plan.bufs.push(BufDecl { name: format!("b{}", self.plan.bufs.len()), rows, width, elem });
        Buf(self.plan.bufs.len() as u32 - 1)
    }

    pub fn op(&mut self, op: Op) {
        self.plan.ops.push(op);
        self.plan.layers.push(Some(0));
    }

    pub fn linear(&mut self, x: Buf, rows: Rows, n: usize, dtype: WeightType, bias: bool) -> Buf {
        let k = self.plan.buf(x).width;
        let w = self.weight(&[n, k], dtype);
        let bias = bias.then(|| self.weight(&[n], WeightType::F32));
        let out = self.buf(rows, n);
        self.op(Op::Linear { x, parts: vec![LinearPart { w, bias, out }] });
        out
    }

    /// The plan, fused or as it was written, and the weights.
    pub fn finish(self, fused: bool) -> (Plan, Arc<Checkpoint>) {
        let mut plan = self.plan;
        if fused {
            passes::fuse(&mut plan);
        }
        let is_scaled = |dtype: WeightType| dtype == WeightType::NVFP4_SCALED;
        let planar = self.tensors.iter().any(|&(_, _, dtype, _)| dtype.ggml_id().is_none() && !is_scaled(dtype));
        (plan, Arc::new(if planar { folder(&self.tensors) } else { file(&self.tensors) }))
    }
}

/// A GGUF file of these weights.
fn file(tensors: &[(String, Vec<usize>, WeightType, PlanesBuf)]) -> Checkpoint {
    let mut writer = Writer::new();
    for (name, shape, dtype, planes) in tensors {
        if *dtype != WeightType::NVFP4_SCALED {
            writer.tensor(name, shape, *dtype, &planes.q);
            continue;
        }
        let n_matrices = if shape.len() == 3 { shape[0] } else { 1 };
        let each = planes.scales.len() / n_matrices;
        let scales: Vec<u8> = planes.scales.chunks(each).flat_map(|scales| &scales[..4]).copied().collect();
        writer.tensor(name, shape, WeightType::NVFP4, &planes.q);
        writer.tensor(&name.replace(".weight", ".scale"), &[n_matrices], WeightType::F32, scales);
    }
    let mut bytes = Vec::new();
    writer.write(&mut bytes).unwrap();
    checkpoint::from_bytes("random", bytes).unwrap()
}

/// A folder of these weights, which are floats or planar: affine ones and MXFP4 as MLX writes them, 8-bit floats with a
/// scale for each 128 numbers of a row.
fn folder(tensors: &[(String, Vec<usize>, WeightType, PlanesBuf)]) -> Checkpoint {
    let (mut parts, mut quantization) = (Vec::new(), serde_json::Map::new());
    for (name, shape, dtype, planes) in tensors {
        let module = name.strip_suffix(".weight").unwrap();
        let k = shape[shape.len() - 1];
        if *dtype == WeightType::F8_E4M3 {
            let n_rows = shape[shape.len() - 2];
            let matrices = planes.q.chunks(n_rows * k).zip(planes.scales.chunks(n_rows * k / 32)).enumerate();
            for (i, (q, scales)) in matrices {
                let name = if shape.len() == 3 { format!("{name}.{i}.weight") } else { name.clone() };
                let scale = format!("{name}_scale_inv");
                parts.push((scale, TensorView::new(Dtype::F32, vec![n_rows, k / 128], scales).unwrap()));
                parts.push((name, TensorView::new(Dtype::F8_E4M3, vec![n_rows, k], q).unwrap()));
            }
            continue;
        }
        // Of packed words, what they hold: bits a value, values a group, type of the scales.
        let (outer, width, (bits, group, scales)) = match dtype {
            WeightType::Affine(a) => {
                let scales = match a.scales() {
                    ScaleType::F16 => Dtype::F16,
                    ScaleType::BF16 => Dtype::BF16,
                    ScaleType::F32 => Dtype::F32,
                };
                (Dtype::U32, k * a.bits() / 32, (a.bits(), a.group(), scales))
            }
            WeightType::MXFP4_PLANAR => (Dtype::U32, k / 8, (4, 32, Dtype::U8)),
            WeightType::BF16 => (Dtype::BF16, k, (0, 1, Dtype::U8)),
            WeightType::F16 => (Dtype::F16, k, (0, 1, Dtype::U8)),
            _ => (Dtype::F32, k, (0, 1, Dtype::U8)),
        };
        let last = |n: usize| [&shape[..shape.len() - 1], &[n]].concat();
        let mut part =
            |name: String, dtype, n, bytes| parts.push((name, TensorView::new(dtype, last(n), bytes).unwrap()));
        part(name.clone(), outer, width, &planes.q[..]);
        if dtype.ggml_id().is_none() {
            let mode = if planes.biases.is_empty() { "mxfp4" } else { "affine" };
            let how = serde_json::json!({"bits": bits, "group_size": group, "mode": mode});
            quantization.insert(module.into(), how);
            part(format!("{module}.scales"), scales, k / group, &planes.scales[..]);
        }
        if !planes.biases.is_empty() {
            part(format!("{module}.biases"), scales, k / group, &planes.biases[..]);
        }
    }
    quantization.extend([("bits".into(), 4.into()), ("group_size".into(), 64.into())]);
    let blocks = serde_json::json!({"weight_block_size": [1, 128]});
    let config =
        serde_json::json!({"model_type": "random", "quantization": quantization, "quantization_config": blocks});
    let weights = safetensors::serialize(parts, None).unwrap();
    let files = vec![("config.json", config.to_string().into_bytes()), ("model.safetensors", weights)];
    checkpoint::from_files("random", files).unwrap()
}

impl Maker {
    /// `x += gated_delta_net(norm(x))`, from q, k and v that go through one convolution; with the rule of a sum, and
    /// all else that Mamba-2 has differently.
    fn delta_net(&mut self, x: Buf, s: Shape, width: usize, heads: DeltaHeads) {
        let DeltaHeads { n_k_head, n_v_head, d_k, d_v, .. } = heads;
        let (t, [tq, tk, ..], eps) = (Rows::Tokens, s.types, 1e-6);
        let (k_row, v_row) = (n_k_head * d_k, n_v_head * d_v);
        let h = self.buf(t, s.d_model);
        let w = self.weight(&[s.d_model], WeightType::F32);
        self.op(Op::RmsNorm { x, residual: None, w, eps, out: h });
        let mixed = self.linear(h, t, 2 * k_row + v_row, tq, false);
        let z = self.linear(h, t, v_row, tk, false);
        let n_decay = n_v_head * if s.by_row { d_k } else { 1 };
        let [a, b] = [n_decay, n_v_head].map(|n| self.linear(h, t, n, WeightType::F32, false));
        let w = self.weight(&[2 * k_row + v_row, width], WeightType::BF16);
        let out = self.buf(t, 2 * k_row + v_row);
        let state = self.state("conv", (width - 1) * (2 * k_row + v_row));
        let is_sum = heads.rule == DeltaRule::Sum;
        let bias = is_sum.then(|| self.weight(&[2 * k_row + v_row], WeightType::F32));
        self.op(Op::CausalConv { x: mixed, w, bias, silu: true, state, out });
        let [q, k, v] = [k_row, k_row, v_row].map(|width| self.buf(t, width));
        self.op(Op::SplitHeads { x: out, n_head: 1, parts: vec![(k_row, q), (k_row, k), (v_row, v)] });
        for x in [q, k] {
            self.op(Op::HeadNorm { x, w: None, eps, n_head: n_k_head, d_head: d_k });
            self.op(Op::Scale { x, scale: 1.0 / (d_k as f32).sqrt() });
        }
        let [g, beta] = [n_decay, n_v_head].map(|n| self.buf(t, n));
        let (a_log, dt_bias) = (self.weight(&[n_v_head], WeightType::F32), self.weight(&[n_decay], WeightType::BF16));
        self.plan.weights[a_log.0 as usize].read = Read::NegExp;
        self.op(Op::DecayBeta { a, b: (!is_sum).then_some(b), a_log, dt_bias, bound: None, g_out: g, beta_out: beta });
        let out = self.buf(t, v_row);
        let state = self.state("delta", n_v_head * d_k * d_v);
        let skip = is_sum.then(|| self.weight(&[n_v_head], WeightType::F32));
        self.op(Op::DeltaNet { q, k, v, g, beta, skip, state, heads, out });
        let shape = [n_v_head, d_v];
        let w = self.weight(if is_sum { &shape } else { &shape[1..] }, WeightType::F16);
        self.op(Op::GatedNorm { x: out, gate: z, w, gate_first: is_sum, eps, n_head: n_v_head, d_head: d_v });
        let y = self.linear(out, t, s.d_model, tk, false);
        self.op(Op::Add { x, y });
    }

    fn state(&mut self, what: &'static str, n: usize) -> State {
        self.plan.states.push(StateDecl { what, n });
        State(self.plan.states.len() as u32 - 1)
    }
}

/// Makes the model.
pub fn model(s: Shape) -> (Plan, Arc<Checkpoint>) {
    let plan = Plan {
        caches: vec![CacheDecl {
            n_kv: s.n_kv,
            d_k: s.d_k,
            d_v: s.d_v,
            v_in_k: false,
            window: s.window.filter(|_| s.forgets),
        }],
        ropes: vec![RopeDecl {
            inv_freq: (0..s.d_k / 2 - 3).map(|i| 10_000f64.powf(-2.0 * i as f64 / s.d_k as f64)).collect(),
            factor: 1.1,
            growth: None,
            pairing: s.pairing,
            axes: Vec::new(),
        }],
        ..Plan::new("random", N_VOCAB, s.d_model, 1 << 20)
    };
    let mut m = Maker { plan, tensors: Vec::new(), random: Random(0x9e37_79b9_7f4a_7c15) };
    let (t, d, eps) = (Rows::Tokens, s.d_model, 1e-6);
    let [tq, tk, tg, tu, td] = s.types;

    let x = m.buf(t, d);
    let table = m.weight(&[N_VOCAB, d], WeightType::BF16);
    m.tensors[0].3.q[BAD as usize * 2 * d..][..2 * d].fill(0xff);
    m.op(Op::Embed { table, scale: 1.5, out: x });
    if let Some((width, heads)) = s.delta {
        m.delta_net(x, s, width, heads);
    }
    let h = m.buf(t, d);
    let w = m.weight(&[d], WeightType::F32);
    m.op(Op::RmsNorm { x, residual: None, w, eps, out: h });
    let q = m.linear(h, t, s.n_head * s.d_k, tq, true);
    let k = m.linear(h, t, s.n_kv * s.d_k, tk, false);
    let v = m.linear(h, t, s.n_kv * s.d_v, tq, false);
    let w = m.weight(&[s.d_k], WeightType::F32);
    for (x, n_head, w) in [(q, s.n_head, Some(w)), (k, s.n_kv, None)] {
        m.op(Op::HeadNorm { x, w, eps, n_head, d_head: s.d_k });
        m.op(Op::Rope { x, rope: Rope(0), n_head, d_head: s.d_k });
    }
    m.op(Op::KvAppend { cache: Cache(0), k, v: Some(v) });
    let o = m.buf(t, s.n_head * s.d_v);
    let sinks = s.sinks.then(|| m.weight(&[s.n_head], WeightType::F32));
    let (scale, window, softcap) = (3.0 / (s.d_k as f32).sqrt(), s.window, s.softcap);
    let (n_head, chunked, chosen) = (s.n_head, false, None);
    m.op(Op::Attention { cache: Cache(0), q, n_head, scale, window, chunked, softcap, chosen, sinks, out: o });
    let gate = m.linear(h, t, s.n_head * s.d_v, tk, false);
    m.op(Op::GateBy { x: o, gate, factor: GateFactor::Sigmoid });
    let y = m.linear(o, t, d, tk, false);
    m.op(Op::Add { x, y });
    let h = m.buf(t, d);
    let w = m.weight(&[d], WeightType::F32);
    m.op(Op::RmsNorm { x, residual: None, w, eps, out: h });

    let router = m.linear(h, t, s.n_expert, WeightType::F32, false);
    let ids = m.typed(t, s.n_used, Elem::U32);
    let weights = m.buf(t, s.n_used);
    let kind = Router::softmax(s.fused, 1.25);
    m.op(Op::Route { logits: router, router: kind, n_used: s.n_used, ids, weights });
    let [gate, up] = [tg, tu].map(|ty| m.weight(&[s.n_expert, s.d_ff, d], ty));
    let down = m.weight(&[s.n_expert, d, s.d_ff], td);
    let biases = s.biases.then(|| ExpertBiases {
        gate: m.weight(&[s.n_expert, s.d_ff], WeightType::BF16),
        up: m.weight(&[s.n_expert, s.d_ff], WeightType::F32),
        down: m.weight(&[s.n_expert, d], WeightType::F16),
    });
    let (hidden, out) = (m.buf(Rows::Slots(s.n_used), s.d_ff), m.buf(Rows::Slots(s.n_used), d));
    m.op(Op::Experts { x: h, ids, gate, up, down, biases, act: s.act, hidden, out });
    if s.fused {
        m.op(Op::Combine { x, add: true, y: out, weights, norm: None });
    } else {
        let sum = m.buf(t, d);
        m.op(Op::Combine { x: sum, add: false, y: out, weights, norm: None });
        let w = m.weight(&[1], WeightType::F32);
        m.op(Op::ScaleBy { x: sum, w });
        m.op(Op::Add { x, y: sum });
    }
    let h = m.buf(t, d);
    let w = m.weight(&[d], WeightType::F32);
    m.op(Op::RmsNorm { x, residual: None, w, eps, out: h });

    let gate = m.linear(h, t, s.d_ff, tg, false);
    let up = m.linear(h, t, s.d_ff, tu, false);
    let out = m.buf(t, s.d_ff);
    m.op(Op::GatedAct { gate, up, act: s.act, out });
    let y = m.linear(out, t, d, td, true);
    m.op(Op::Scale { x: y, scale: 0.7 });
    let gate = m.linear(h, t, 1, WeightType::F32, false);
    m.op(Op::GateBy { x: y, gate, factor: GateFactor::Sigmoid });
    m.op(Op::Add { x, y });
    let picked = m.buf(Rows::Outputs, d);
    m.op(Op::Select { x, out: picked });
    let normed = m.buf(Rows::Outputs, d);
    let w = m.weight(&[d], WeightType::F32);
    m.op(Op::RmsNorm { x: picked, residual: None, w, eps, out: normed });
    m.plan.logits = m.linear(normed, Rows::Outputs, N_VOCAB, WeightType::F16, false);
    m.op(Op::Softcap { x: m.plan.logits, cap: 5.0 });

    m.finish(s.fused)
}

/// Tokens of a prompt.
pub fn tokens(n: usize, seed: u64) -> Vec<u32> {
    let mut random = Random(seed * 0x1234_5677 + 1);
    (0..n).map(|_| (random.bits() % u64::from(BAD)) as u32).collect()
}

/// Methods of a `Gpu` that its field passes on to another. The caller imports the types of `gpu::commands`.
#[macro_export]
macro_rules! hand_on {
    ($to:tt: $($name:ident)+) => { $($crate::hand_on!(@ $to $name);)+ };
    (@ $to:tt caps) => {
        fn caps(&self) -> &Caps {
            self.$to.caps()
        }
    };
    (@ $to:tt alloc) => {
        fn alloc(&mut self, bytes: u64, what: &'static str) -> Result<Buf, GpuError> {
            self.$to.alloc(bytes, what)
        }
    };
    (@ $to:tt map) => {
        fn map(&mut self, mapped: &Mapped) -> Result<Option<Buf>, GpuError> {
            self.$to.map(mapped)
        }
    };
    (@ $to:tt write) => {
        fn write(&mut self, to: Span, bytes: &[u8]) -> Result<(), GpuError> {
            self.$to.write(to, bytes)
        }
    };
    (@ $to:tt read) => {
        fn read(&mut self, from: Span, out: &mut [u8]) -> Result<(), GpuError> {
            self.$to.read(from, out)
        }
    };
    (@ $to:tt build) => {
        fn build(&mut self, units: &[Unit]) -> Result<Vec<Pipe>, GpuError> {
            self.$to.build(units)
        }
    };
    (@ $to:tt threads) => {
        fn threads(&self, pipe: Pipe) -> u32 {
            self.$to.threads(pipe)
        }
    };
    (@ $to:tt submit) => {
        fn submit(&mut self, list: &List) -> Result<Ticket, GpuError> {
            self.$to.submit(list)
        }
    };
    (@ $to:tt wait) => {
        fn wait(&mut self, ticket: Ticket, limit: std::time::Duration) -> Result<Times, GpuError> {
            self.$to.wait(ticket, limit)
        }
    };
}
