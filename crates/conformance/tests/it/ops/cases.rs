//! The cases of every op: data that says what is tried. Each value of each axis comes up, not each pair of values.

use model::plan::*;
use quant::WeightType::{self, *};

use super::case::{Build, Case, Fill, SPECIALS, Special, Step, Tokens};
use conformance::Random;

const UNIT: Fill = Fill::Uniform(1.0);
const ROWS: [Rows; 2] = [Rows::Tokens, Rows::Outputs];
const CLAMPED: Gate = Gate::ClampedSwiglu { alpha: 1.702, limit: 0.75 };
const GATES: [Gate; 5] = [Gate::Silu, Gate::GeluTanh, Gate::Relu, CLAMPED, Gate::ClampedSilu { limit: 0.75 }];
const FLOATS: [WeightType; 3] = [F32, F16, BF16];

/// Row lengths of a type: a block, and some that no tile divides.
fn lengths(t: WeightType) -> [usize; 3] {
    match t.block_len() {
        1 => [1, 33, 130],
        32 => [32, 96, 352],
        64 => [64, 192, 704],
        128 => [128, 384, 1152],
        len => [len, 3 * len, 2 * len],
    }
}

/// Every type that is tried with its place, or in a wide run each three times.
fn types() -> impl Iterator<Item = (usize, WeightType)> {
    let n = if wide() { 3 } else { 1 };
    (0..n).flat_map(|round| conformance::backends::types().enumerate().map(move |(i, t)| (i + round, t)))
}

pub use super::choosing::choose;
pub use conformance::backends::wide;

pub fn embed(seed: u64) -> Vec<Case> {
    types()
        .map(|(i, t)| {
            // The table under test stands behind the builder's own: its tokens choose rows of both.
            let (d, scale) = (lengths(t)[i % 3], [1.0, 0.37, -11.0][i % 3]);
            Build::table(seed, t, d, scale)
        })
        .collect()
}

pub fn linear(seed: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, t) in types() {
        for (j, n) in [[1, 33], [5, 67], [130, 16]][i % 3].into_iter().enumerate() {
            let k = lengths(t)[(i + j) % 3];
            cases.push(one_linear(seed, t, k, n, (i + j) % 2 == 1, ROWS[j], Tokens::counts));
        }
    }
    for t in [F32, F16, BF16, Q8_0, Q4_0, Q4_K] {
        cases.push(one_linear(seed, t, 4352, 3, false, Rows::Tokens, Tokens::few));
        let specials = |tokens: &mut Tokens| tokens.specials(&SPECIALS);
        cases.push(one_linear(seed, t, 512, 9, true, Rows::Tokens, specials));
    }
    // Several matrices share an input: of one kind of activations and of several.
    for types in [[F32, BF16, F16], [Q8_0, Q4_0, F32], [Q4_K, Q6_K, Q4_K], [Q4_K, Q8_0, Q5_1]] {
        let mut b = Build::new(seed);
        let x = b.input(512, UNIT);
        let mut parts = Vec::new();
        for (t, n) in types.into_iter().zip([40, 7, 19]) {
            let (w, out) = (b.weight(&[n, 512], t), b.buf(Rows::Tokens, n));
            parts.push(LinearPart { w, bias: (n == 7).then(|| b.vector(n)), out });
        }
        let outs = [("q", parts[0].out), ("k", parts[1].out), ("v", parts[2].out)];
        b.op(Op::Linear { x, parts });
        let coarse = if types[1] == BF16 { F32 } else { Q4_0 };
        cases.push(b.finish("linear", format!("parts {types:?}"), coarse, &outs, Tokens::counts));
    }
    cases
}

fn one_linear(
    seed: u64,
    t: WeightType,
    k: usize,
    n: usize,
    biased: bool,
    rows: Rows,
    script: fn(&mut Tokens) -> Vec<Step>,
) -> Case {
    let mut b = Build::new(seed);
    let (x, w, out) = (b.rows(rows, k, UNIT), b.weight(&[n, k], t), b.buf(rows, n));
    let bias = biased.then(|| b.vector(n));
    b.op(Op::Linear { x, parts: vec![LinearPart { w, bias, out }] });
    let mut outs = vec![("out", out)];
    if k < 200 {
        outs.push(("x", x));
    }
    // A row of few numbers is off by more than many are together.
    let slack = if n < 8 { 4.0 } else { 1.0 };
    Case { slack, ..b.finish("linear", format!("k {k}, n {n}, bias {biased}, {rows:?}"), t, &outs, script) }
}

pub fn gated_linear(seed: u64) -> Vec<Case> {
    types()
        .map(|(i, t)| {
            let (k, n, act, rows) =
                (lengths(t)[(i + 1) % 3], [33, 5, 66][i % 3], GATES[i / 2 % GATES.len()], ROWS[i % 2]);
            // Gate and up of two types, where another has the same blocks and meets the same activations.
            let fits = |u: &WeightType| {
                let is_planar = |t: WeightType| t.ggml_id().is_none();
                u.block_len() == t.block_len() && u.act() == t.act() && is_planar(*u) == is_planar(t)
            };
            let other = WeightType::ALL.into_iter().rfind(fits).unwrap();
            let up = if i % 4 == 0 { other } else { t };
            let mut b = Build::new(seed);
            let (x, out) = (b.rows(rows, k, UNIT), b.buf(rows, n));
            let (gate, up_w) = (b.weight(&[n, k], t), b.weight(&[n, k], up));
            b.op(Op::GatedLinear { x, gate, up: up_w, act, out });
            let shape = format!("up {up}, k {k}, n {n}, {act:?}, {rows:?}");
            Case { slack: 3.0, ..b.finish("gated_linear", shape, t, &[("out", out)], Tokens::counts) }
        })
        .collect()
}

pub fn rms_norm(seed: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, d) in [1, 7, 16, 33, 100, 768, 4097].into_iter().enumerate() {
        for fused in [false, true] {
            let mut b = Build::new(seed);
            let (rows, eps) = (ROWS[i % 2], [1e-6, 1e-2, 0.0][i % 3]);
            let (x, r) = (b.rows(rows, d, UNIT), b.rows(rows, d, UNIT));
            let (w, out) = (b.vector(d), b.buf(rows, d));
            if i % 2 == 1 {
                b.m.plan.weights[w.0 as usize].read = Read::OnePlus;
            }
            b.op(Op::RmsNorm { x, residual: fused.then_some(r), w, eps, out });
            let all = [("out", out), ("x", x), ("residual", r)];
            let shape = format!("d {d}, eps {eps}, residual {fused}, {rows:?}");
            let common = d > 1000 || eps == 0.0;
            cases.push(b.finish("rms_norm", shape, F32, &all[..if d > 1000 { 1 } else { 3 }], |t| {
                if common { t.counts() } else { [t.counts(), t.specials(&SPECIALS)].concat() }
            }));
        }
    }
    cases
}

pub fn center(seed: u64) -> Vec<Case> {
    let case = |(i, d): (usize, usize)| {
        let mut b = Build::new(seed);
        let rows = ROWS[i % 2];
        let (x, out) = (b.rows(rows, d, UNIT), b.buf(rows, d));
        b.op(Op::Center { x, out });
        b.finish("center", format!("d {d}, {rows:?}"), F32, &[("out", out), ("x", x)], |t| t.counts())
    };
    [1, 7, 16, 33, 100, 768, 4097].into_iter().enumerate().map(case).collect()
}

pub fn head_norm(seed: u64) -> Vec<Case> {
    let shapes = [(1, 1), (3, 20), (5, 33), (2, 128), (4, 256), (1, 513), (40, 8), (33, 1)];
    let case = |(i, &(n_head, d_head)): (usize, &(usize, usize))| {
        let mut b = Build::new(seed);
        let x = b.input(n_head * d_head, UNIT);
        let w = (i % 3 != 1).then(|| b.vector(d_head));
        b.op(Op::HeadNorm { x, w, eps: 1e-5, n_head, d_head });
        b.finish("head_norm", format!("{n_head} heads of {d_head}, w {}", w.is_some()), F32, &[("x", x)], mixed)
    };
    shapes.iter().enumerate().map(case).collect()
}

/// All counts of tokens, then special rows.
fn mixed(t: &mut Tokens) -> Vec<Step> {
    [t.counts(), t.specials(&SPECIALS)].concat()
}

pub fn rope(seed: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    for (n_head, d_head, n_freq) in [(1, 2, 1), (3, 20, 7), (5, 64, 16), (2, 128, 64), (1, 33, 16), (7, 96, 48)] {
        for pairing in [RopePairing::Half, RopePairing::Interleaved] {
            let mut b = Build::new(seed);
            let x = b.input(n_head * d_head, UNIT);
            let freq = |i: usize| 10_000f64.powf(-(i as f64) / n_freq as f64);
            let factor = if n_head == 5 { 1.3 } else { 1.0 };
            // A scale that changes within a step and is large at far positions.
            let growth = (d_head % 20 == 0).then_some(Growth { beta: 0.1, step: 4, offset: 1 });
            let rope = b.rope(RopeDecl {
                inv_freq: (0..n_freq).map(freq).collect(),
                factor,
                growth,
                pairing,
                axes: Vec::new(),
            });
            b.op(Op::Rope { x, rope, n_head, d_head });
            let shape = format!("{n_head} heads of {d_head}, {n_freq} pairs, {pairing:?}");
            // Far positions, whose angles single precision cannot reduce.
            cases.push(b.finish("rope", shape, F32, &[("x", x)], |t| {
                let mut steps = t.counts();
                for at in [131_071, 262_144, (1 << 20) - 9] {
                    let step = t.step(&[(1, 3), (0, 9), (2, 1)], 1);
                    let jump = vec![(0, at), (1, at / 3), (2, at / 7)];
                    steps.push(Step { jump, is_chosen: at > 262_144, ..step });
                }
                steps
            }));
        }
    }
    cases
}

/// Heads and the widths of their parts.
const PARTS: [(usize, &[usize]); 6] =
    [(1, &[1]), (1, &[7, 1, 30]), (3, &[5, 2, 8]), (7, &[64, 1]), (2, &[128, 64]), (33, &[1, 2])];

pub fn split_heads(seed: u64) -> Vec<Case> {
    let case = |(i, &(n_head, widths)): (usize, &(usize, &[usize]))| {
        let mut b = Build::new(seed);
        let x = b.rows(ROWS[i % 2], n_head * widths.iter().sum::<usize>(), UNIT);
        let parts: Vec<(usize, Buf)> = widths.iter().map(|&w| (w, b.buf(ROWS[i % 2], n_head * w))).collect();
        let outs: Vec<(&str, Buf)> =
            ["part 0", "part 1", "part 2"].into_iter().zip(parts.iter().map(|p| p.1)).collect();
        b.op(Op::SplitHeads { x, n_head, parts });
        b.finish("split_heads", format!("{n_head} heads of {widths:?}, {:?}", ROWS[i % 2]), F32, &outs, mixed)
    };
    PARTS.iter().enumerate().map(case).collect()
}

pub fn join_heads(seed: u64) -> Vec<Case> {
    let case = |(i, &(n_head, widths)): (usize, &(usize, &[usize]))| {
        let (mut b, rows) = (Build::new(seed), ROWS[i % 2]);
        let parts: Vec<(usize, Buf)> = widths.iter().map(|&w| (w, b.rows(rows, n_head * w, UNIT))).collect();
        let out = b.buf(rows, n_head * widths.iter().sum::<usize>());
        b.op(Op::JoinHeads { parts, n_head, out });
        b.finish("join_heads", format!("{n_head} heads of {widths:?}, {rows:?}"), F32, &[("out", out)], mixed)
    };
    PARTS.iter().enumerate().map(case).collect()
}

pub fn head_linear(seed: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, t) in types() {
        for transposed in [false, true] {
            let (n_head, rows) = ([3, 1, 5][(i + usize::from(transposed)) % 3], ROWS[i % 2]);
            // Blocks lie along the last axis, whichever that is.
            let (blocked, free) = (lengths(t)[i % 2], [7, 33, 16][i % 3]);
            let (k, n) = if transposed { (free, blocked) } else { (blocked, free) };
            let mut b = Build::new(seed);
            let (x, out) = (b.rows(rows, n_head * k, UNIT), b.buf(rows, n_head * n));
            let w = b.weight(&if transposed { [n_head, k, n] } else { [n_head, n, k] }, t);
            b.op(Op::HeadLinear { x, w, transposed, out });
            let shape = format!("{n_head} heads, k {k}, n {n}, transposed {transposed}, {rows:?}");
            let case = b.finish("head_linear", shape, t, &[("out", out)], Tokens::counts);
            cases.push(Case { plain: transposed, ..case });
        }
    }
    // Both matrices of a head in one tensor, row ranges of it.
    for t in [F32, Q8_0] {
        let (n_head, first, second, k) = (3, 5, 9, 64);
        let mut b = Build::new(seed);
        let x = b.input(n_head * k, UNIT);
        let whole = b.weight(&[n_head * (first + second), k], t);
        let mut outs = Vec::new();
        for (name, skip, n) in [("first", 0, first), ("second", first, second)] {
            let mut decl = b.m.plan.weight(whole).clone();
            let slab = |h: usize| Slab { tensor: decl.name.clone(), first_row: h * (first + second) + skip };
            decl.source = Source::Slabs((0..n_head).map(slab).collect());
            decl.shape = vec![n_head, n, k];
            b.m.plan.weights.push(decl);
            let (w, out) = (Weight(b.m.plan.weights.len() as u32 - 1), b.buf(Rows::Tokens, n_head * n));
            b.op(Op::HeadLinear { x, w, transposed: false, out });
            outs.push((name, out));
        }
        cases.push(b.finish("head_linear", "slabs of one tensor", t, &outs, Tokens::counts));
    }
    cases
}

pub fn gated_act(seed: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, n) in [1, 15, 33, 130].into_iter().enumerate() {
        for act in GATES {
            let (mut b, rows) = (Build::new(seed), ROWS[i % 2]);
            let (gate, up) = (b.rows(rows, n, Fill::Uniform(20.0)), b.rows(rows, n, Fill::Uniform(2.0)));
            let out = b.buf(rows, n);
            b.op(Op::GatedAct { gate, up, act, out });
            let outs = [("out", out), ("gate", gate), ("up", up)];
            cases.push(b.finish("gated_act", format!("n {n}, {act:?}, {rows:?}"), F32, &outs, mixed));
        }
    }
    cases
}

/// Widths of ops that go number by number.
const WIDTHS: [usize; 5] = [1, 7, 16, 33, 770];

/// An op in place on `x`, in every width, on tokens and on asked rows.
fn in_place(
    seed: u64,
    name: &'static str,
    mut op: impl FnMut(&mut Build, usize, Rows, Buf) -> (Op, String),
) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, d) in WIDTHS.into_iter().enumerate() {
        let (mut b, rows) = (Build::new(seed), ROWS[i % 2]);
        let x = b.rows(rows, d, UNIT);
        let (op, what) = op(&mut b, i, rows, x);
        let read = op.bufs().into_iter().filter(|&(_, access)| access == Access::Read);
        let outs: Vec<(&str, Buf)> = [("x", x)].into_iter().chain(read.map(|(buf, _)| ("read", buf))).collect();
        b.op(op);
        cases.push(b.finish(name, format!("d {d}, {what}{rows:?}"), F32, &outs, mixed));
    }
    cases
}

pub fn add(seed: u64) -> Vec<Case> {
    let mut cases = in_place(seed, "add", |b, i, rows, x| {
        let y = b.rows(rows, WIDTHS[i], UNIT);
        (Op::Add { x, y }, String::new())
    });
    // More tokens than 15 bits count.
    let mut b = Build::new(seed);
    let (x, y) = (b.input(3, UNIT), b.input(3, UNIT));
    b.op(Op::Add { x, y });
    cases.push(b.finish("add", "33000 tokens", F32, &[("x", x)], |t| vec![t.step(&[(0, 32_990), (1, 10)], 1)]));
    cases
}

pub fn scale(seed: u64) -> Vec<Case> {
    in_place(seed, "scale", |_, i, _, x| {
        let scale = [0.7, -3.0, 1.0, 0.0, 1e-3][i];
        (Op::Scale { x, scale }, format!("by {scale}, "))
    })
}

pub fn scale_by(seed: u64) -> Vec<Case> {
    let of = |is_whole: bool| {
        in_place(seed, "scale_by", move |b, i, _, x| {
            let n = if is_whole { WIDTHS[i] } else { 1 };
            (Op::ScaleBy { x, w: b.vector(n) }, format!("{n} scales, "))
        })
    };
    [false, true].into_iter().flat_map(of).collect()
}

pub fn add_bias(seed: u64) -> Vec<Case> {
    in_place(seed, "add_bias", |b, i, _, x| (Op::AddBias { x, w: b.vector(WIDTHS[i]) }, String::new()))
}

pub fn gelu(seed: u64) -> Vec<Case> {
    let of = |form| in_place(seed, "gelu", move |_, _, _, x| (Op::Gelu { x, form }, format!("{form:?}, ")));
    [Gelu::Erf, Gelu::Tanh].into_iter().flat_map(of).collect()
}

pub fn clamp(seed: u64) -> Vec<Case> {
    in_place(seed, "clamp", |b, _, _, x| (Op::Clamp { x, low: b.vector(1), high: b.vector(1) }, String::new()))
}

pub fn constant(seed: u64) -> Vec<Case> {
    in_place(seed, "constant", |b, i, _, out| {
        (Op::Constant { values: (0..WIDTHS[i]).map(|_| b.m.random.float()).collect(), out }, String::new())
    })
}

/// Rows for some of the tokens: see `Session::try_rows`.
pub fn input(seed: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, d) in WIDTHS.into_iter().enumerate() {
        for mode in [InputMode::Replace, InputMode::Add] {
            let mut b = Build::new(seed);
            let x = b.input(d, UNIT);
            let first = 3 * i;
            b.op(Op::Input { x, first, mode });
            cases.push(b.finish("input", format!("d {d} from {first}, {mode:?}"), F32, &[("x", x)], mixed));
        }
    }
    cases
}

pub fn softcap(seed: u64) -> Vec<Case> {
    in_place(seed, "softcap", |_, i, _, x| {
        let cap = [0.3, 5.0, 0.9, 30.0, 1.0][i];
        (Op::Softcap { x, cap }, format!("cap {cap}, "))
    })
}

pub fn gate_by(seed: u64) -> Vec<Case> {
    // Numbers of x that share one of the gate: one, all, or as many as the least factor of the width says.
    let shares: [fn(usize) -> usize; 3] = [|_| 1, |d| d, |d| (2..=d).find(|n| d.is_multiple_of(*n)).unwrap_or(1)];
    let of = |(share, factor): (fn(usize) -> usize, GateFactor)| {
        in_place(seed, "gate_by", move |b, i, rows, x| {
            let each = share(WIDTHS[i]);
            let gate = b.rows(rows, WIDTHS[i] / each, Fill::Uniform(30.0));
            (Op::GateBy { x, gate, factor }, format!("{factor:?} for {each}, "))
        })
    };
    let factors = [GateFactor::Sigmoid, GateFactor::Softplus, GateFactor::Plain];
    factors.into_iter().flat_map(|factor| shares.map(|share| (share, factor))).flat_map(of).collect()
}

/// Caches: key-value heads, queries a head, widths, and what is done to scores.
#[derive(Clone, Copy, Debug)]
struct Attend {
    n_kv: usize,
    group: usize,
    d_k: usize,
    d_v: usize,
    v_in_k: bool,
    window: Option<usize>,
    /// The window begins at a multiple of its length.
    chunked: bool,
    /// The cache keeps no more than the window.
    forgets: bool,
    softcap: Option<f32>,
    sinks: bool,
}

const ATTEND: Attend = Attend {
    n_kv: 2,
    group: 2,
    d_k: 64,
    d_v: 64,
    v_in_k: false,
    window: None,
    chunked: false,
    forgets: false,
    softcap: None,
    sinks: false,
};

const ATTENDS: [Attend; 20] = [
    ATTEND,
    Attend { n_kv: 1, group: 1, d_k: 1, d_v: 1, ..ATTEND },
    Attend { n_kv: 3, group: 1, d_k: 80, d_v: 80, sinks: true, ..ATTEND },
    Attend { group: 5, d_k: 20, d_v: 24, softcap: Some(4.0), ..ATTEND },
    Attend { n_kv: 1, group: 8, d_k: 128, d_v: 128, window: Some(33), ..ATTEND },
    Attend { n_kv: 1, group: 5, d_k: 33, d_v: 17, window: Some(1), ..ATTEND },
    Attend { n_kv: 1, group: 2, d_k: 256, d_v: 256, window: Some(31), forgets: true, ..ATTEND },
    Attend { n_kv: 1, group: 2, d_k: 513, d_v: 513, ..ATTEND },
    Attend { n_kv: 3, group: 7, d_k: 16, d_v: 48, window: Some(32), forgets: true, sinks: true, ..ATTEND },
    Attend { n_kv: 2, group: 3, d_k: 40, d_v: 8, window: Some(5), softcap: Some(1.5), sinks: true, ..ATTEND },
    Attend { window: Some(64), forgets: true, softcap: Some(2.0), ..ATTEND },
    Attend { n_kv: 9, group: 1, d_k: 7, d_v: 5, window: Some(100), sinks: true, ..ATTEND },
    Attend { n_kv: 1, group: 5, d_k: 50, d_v: 40, v_in_k: true, ..ATTEND },
    Attend { n_kv: 1, group: 16, d_k: 576, d_v: 512, v_in_k: true, ..ATTEND },
    Attend { n_kv: 1, group: 3, d_k: 9, d_v: 9, v_in_k: true, sinks: true, ..ATTEND },
    Attend { n_kv: 2, group: 2, d_k: 33, d_v: 32, v_in_k: true, window: Some(40), softcap: Some(3.0), ..ATTEND },
    Attend { n_kv: 1, group: 33, d_k: 24, d_v: 16, v_in_k: true, window: Some(17), forgets: true, ..ATTEND },
    Attend { n_kv: 1, group: 5, d_k: 128, d_v: 128, window: Some(33), chunked: true, forgets: true, ..ATTEND },
    Attend { window: Some(7), chunked: true, ..ATTEND },
    Attend { n_kv: 3, group: 2, d_k: 20, d_v: 24, window: Some(64), chunked: true, sinks: true, ..ATTEND },
];

fn attend(
    seed: u64,
    name: &'static str,
    a: Attend,
    q_size: f32,
    script: impl FnOnce(&mut Tokens) -> Vec<Step>,
) -> Case {
    let Attend { n_kv, group, d_k, d_v, v_in_k, window, chunked, forgets, softcap, sinks } = a;
    let (mut b, n_head) = (Build::new(seed), n_kv * group);
    let q = b.input(n_head * d_k, Fill::Uniform(q_size));
    let k = b.input(n_kv * d_k, UNIT);
    let v = (!v_in_k).then(|| b.input(n_kv * d_v, UNIT));
    let cache = b.cache(CacheDecl { n_kv, d_k, d_v, v_in_k, window: window.filter(|_| forgets) });
    b.op(Op::KvAppend { cache, k, v });
    let sinks = sinks.then(|| b.vector(n_head));
    let out = b.buf(Rows::Tokens, n_head * d_v);
    let scale = 4.0 / (d_k as f32).sqrt();
    b.op(Op::Attention { cache, q, n_head, scale, window, chunked, softcap, chosen: None, sinks, out });
    b.finish(name, format!("{a:?}"), F32, &[("out", out)], script)
}

/// What is appended, seen through an attention that looks at one position, or at all of them alike.
pub fn kv_append(seed: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    for a in ATTENDS {
        let alone = Attend { window: Some(1), chunked: false, softcap: None, sinks: false, forgets: false, ..a };
        let alike = Attend { window: None, chunked: false, forgets: false, sinks: false, ..a };
        cases.push(attend(seed, "kv_append", alone, 1.0, Tokens::grow));
        cases.push(attend(seed, "kv_append", alike, 0.0, Tokens::grow));
    }
    cases
}

pub fn attention(seed: u64) -> Vec<Case> {
    let mut cases: Vec<Case> = ATTENDS.map(|a| attend(seed, "attention", a, 1.0, Tokens::grow)).into();
    // Every count of tokens in a step, from caches of some length.
    for a in [ATTENDS[3], ATTENDS[8], ATTENDS[12]] {
        cases.push(attend(seed, "attention", a, 1.0, Tokens::counts));
    }
    // Several segments of 512 positions, and windows that begin in one that is not the last.
    for (i, window) in [(3, None), (3, Some(513)), (11, Some(600)), (14, None)] {
        let a = Attend { window, ..ATTENDS[i] };
        cases.push(attend(seed, "attention", a, 1.0, |t| {
            let parts: [&[(usize, usize)]; 5] =
                [&[(0, 511), (1, 2)], &[(0, 1)], &[(0, 1), (1, 1)], &[(0, 530), (2, 3)], &[(1, 1), (0, 1)]];
            parts.iter().map(|parts| t.step(parts, if parts[0].1 > 9 { 29 } else { 1 })).collect()
        }));
    }
    // One sequence breaks down beside others. An f16 cache saturates, so that infinities are no case of this table.
    for a in [ATTENDS[0], ATTENDS[9], ATTENDS[12]] {
        let specials = [Special::AllNan, Special::OneNan, Special::Zero, Special::Tiny];
        cases.push(attend(seed, "attention", a, 1.0, |t| t.specials(&specials)));
    }
    // Rows of one tile that see different pages.
    for a in [ATTENDS[5], ATTENDS[9]] {
        let script = |t: &mut Tokens| vec![Step { is_chosen: true, ..t.step(&[(1, 3), (0, 45)], 3) }];
        cases.push(attend(seed, "attention", a, 1.0, script));
    }
    // Scores far apart: shares that underflow, and sinks that win.
    for a in [ATTENDS[0], ATTENDS[2], ATTENDS[14]] {
        cases.push(Case { slack: 8.0, ..attend(seed, "attention", a, 60.0, Tokens::grow) });
    }
    cases
}

/// Steps of recurrent sequences: growth, a copy resumed in another slot and in its own, and a slot used again from
/// nothing.
fn recurrent(t: &mut Tokens) -> Vec<Step> {
    let mut steps = t.grow();
    let copy = Step { copies: vec![(0, 3), (1, 4)], ..t.step(&[(0, 5), (1, 1), (2, 2)], 1) };
    let back = Step { copies: vec![(3, 0)], slots: vec![(1, 4)], ..t.step(&[(1, 2), (0, 3)], 1) };
    let anew = Step { jump: vec![(2, 0)], slots: vec![(2, 1)], ..t.step(&[(2, 2), (0, 1)], 1) };
    steps.extend([copy, back, anew, t.step(&[(0, 1), (1, 1), (2, 1)], 1)]);
    steps
}

/// Steps of chunks so long that a GPU takes them in tiles: a prompt, what follows it beside another, and NaN within one.
fn prompts(t: &mut Tokens) -> Vec<Step> {
    let first = Step { jump: vec![(0, 0), (1, 0)], ..t.step(&[(0, 130)], 1) };
    let next = t.step(&[(0, 97), (1, 64)], 1);
    let mut broken = Step { jump: vec![(0, 0)], ..t.step(&[(0, 66), (1, 100)], 1) };
    broken.parts[1].1[50] = t.special(Special::AllNan);
    vec![first, next, broken]
}

pub fn causal_conv(seed: u64) -> Vec<Case> {
    let case = |(i, &(d, width)): (usize, &(usize, usize))| {
        let mut b = Build::new(seed);
        let (x, w, out) = (b.input(d, UNIT), b.numbers(&[d, width]), b.buf(Rows::Tokens, d));
        let state = b.state("conv", (width - 1) * d);
        let (biased, silu) = [(false, true), (true, true), (false, false), (true, false)][i / 2];
        let bias = biased.then(|| b.vector(d));
        b.op(Op::CausalConv { x, w, bias, silu, state, out });
        let script = [Tokens::counts, recurrent][i % 2];
        let shape = format!("d {d}, width {width}, bias {biased}, silu {silu}");
        b.finish("causal_conv", shape, F32, &[("out", out), ("x", x)], |t| {
            [script(t), t.specials(&SPECIALS[..4])].concat()
        })
    };
    [(1, 2), (5, 4), (16, 3), (33, 4), (130, 4), (70, 5), (7, 9), (512, 4)].iter().enumerate().map(case).collect()
}

pub fn delta_net(seed: u64) -> Vec<Case> {
    let shapes = [(1, 1, 1, 1), (2, 4, 128, 128), (3, 3, 20, 24), (2, 6, 7, 57), (1, 4, 64, 64), (4, 8, 16, 33)];
    // Heads of v that are one number wide, as Mamba-1 has them.
    let narrow = [(1, 70, 16, 1), (3, 6, 65, 1), (2, 4, 5, 1)];
    let mut cases = Vec::new();
    for (i, (n_k_head, n_v_head, d_k, d_v)) in shapes.into_iter().chain(narrow).enumerate() {
        let of = |rule, sharing, has_skip, by_row| (rule, sharing, has_skip, by_row);
        let of_sum = if i == 8 { Sharing::Tiled } else { Sharing::Grouped };
        for (rule, sharing, has_skip, by_row) in [
            of(DeltaRule::Delta, Sharing::Grouped, i == 2, false),
            of(DeltaRule::Delta, Sharing::Tiled, false, false),
            // Skips of a sum in the cases that a sample has, which are every second one.
            of(DeltaRule::Sum, of_sum, i % 4 < 2, i == 4 || i > 5),
            of(DeltaRule::Delta, Sharing::Grouped, false, true),
        ]
        .into_iter()
        .filter(|form| i < 6 || form.0 == DeltaRule::Sum)
        {
            let heads = DeltaHeads { n_k_head, n_v_head, d_k, d_v, sharing, rule };
            let mut b = Build::new(seed);
            let [q, k] = [0, 1].map(|_| b.input(n_k_head * d_k, Fill::Unit(d_k)));
            let v = b.input(n_v_head * d_v, UNIT);
            let n_decay = if by_row { d_k } else { 1 };
            let [g, beta] = [n_decay, 1].map(|each| b.input(n_v_head * each, Fill::Gate));
            let (state, out) = (b.state("delta", n_v_head * d_k * d_v), b.buf(Rows::Tokens, n_v_head * d_v));
            let skip = has_skip.then(|| b.vector(n_v_head));
            b.op(Op::DeltaNet { q, k, v, g, beta, skip, state, heads, out });
            let is_counts = (i % 2 == 0) == (sharing == Sharing::Tiled);
            let shape = format!("{heads:?}, skip {has_skip}, by row {by_row}");
            cases.push(b.finish("delta_net", shape, F32, &[("out", out)], |t| {
                let steps = if is_counts { t.counts() } else { recurrent(t) };
                [steps, t.specials(&[Special::AllNan, Special::Zero]), prompts(t)].concat()
            }));
        }
    }
    cases
}

pub fn decay_beta(seed: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, n) in [1, 7, 32, 33, 70].into_iter().enumerate() {
        // Past 88 a softplus taken as it is written overflows, which shows where a decay is slow.
        for (size, is_slow, has_b) in [(1.0, false, true), (120.0, true, i % 2 == 0), (120.0, false, i % 2 == 1)] {
            let (mut b, rows) = (Build::new(seed), ROWS[i % 2]);
            let each = if has_b && n == 32 { 5 } else { 1 };
            let [a, beta] = [n * each, n].map(|n| b.rows(rows, n, Fill::Uniform(size)));
            let slow = |random: &mut Random, _| (0..n).map(|_| -8.0 + random.float()).collect();
            let a_log = if is_slow { b.m.weight_of(&[n], F32, slow) } else { b.vector(n) };
            let dt_bias = b.vector(n * each);
            b.m.plan.weights[a_log.0 as usize].read = Read::NegExp;
            let [g_out, beta_out] = [n * each, n].map(|n| b.buf(rows, n));
            b.op(Op::DecayBeta { a, b: has_b.then_some(beta), a_log, dt_bias, bound: None, g_out, beta_out });
            let outs = [("g", g_out), ("beta", beta_out), ("a", a), ("b", beta)];
            cases.push(b.finish(
                "decay_beta",
                format!("n {n} by {each}, to {size}, slow {is_slow}, b {has_b}, {rows:?}"),
                F32,
                &outs,
                mixed,
            ));
        }
    }
    cases.extend(other_decays(seed));
    cases
}

/// Bounded decays, and several of one step size.
fn other_decays(seed: u64) -> Vec<Case> {
    let case = |(i, (n, each)): (usize, (usize, usize))| {
        let (mut b, rows) = (Build::new(seed), ROWS[i % 2]);
        let is_bounded = i < 4;
        let width = if is_bounded { n * each } else { n };
        let [a, beta] = [width, n].map(|n| b.rows(rows, n, Fill::Uniform(4.0)));
        let (a_log, dt_bias) = (if is_bounded { b.vector(n) } else { b.numbers(&[n, each]) }, b.vector(width));
        b.m.plan.weights[a_log.0 as usize].read = if is_bounded { Read::Exp } else { Read::NegExp };
        let [g_out, beta_out] = [n * each, n].map(|n| b.buf(rows, n));
        let (rate, bound) = (is_bounded.then_some(beta), is_bounded.then_some(-4.5));
        b.op(Op::DecayBeta { a, b: rate, a_log, dt_bias, bound, g_out, beta_out });
        let outs = [("g", g_out), ("beta", beta_out), ("a", a), ("b", beta)];
        b.finish("decay_beta", format!("n {n} by {each}, bound {bound:?}, {rows:?}"), F32, &outs, mixed)
    };
    let shapes = [(1, 1), (3, 12), (7, 16), (33, 5), (1, 16), (9, 3), (5, 17), (2, 64)];
    shapes.into_iter().enumerate().map(case).collect()
}

pub fn gated_norm(seed: u64) -> Vec<Case> {
    let case = |(i, &(n_head, d_head)): (usize, &(usize, usize))| {
        let (mut b, rows) = (Build::new(seed), ROWS[i % 2]);
        let (x, gate) = (b.rows(rows, n_head * d_head, UNIT), b.rows(rows, n_head * d_head, Fill::Uniform(5.0)));
        let (is_own, gate_first) = [(false, false), (true, true), (false, true), (true, false)][i / 2 % 4];
        let w = if is_own { b.numbers(&[n_head, d_head]) } else { b.vector(d_head) };
        b.op(Op::GatedNorm { x, gate, w, gate_first, eps: 1e-6, n_head, d_head });
        let shape = format!("{n_head} heads of {d_head}, own {is_own}, gate first {gate_first}, {rows:?}");
        b.finish("gated_norm", shape, F32, &[("x", x), ("gate", gate)], mixed)
    };
    [(1, 1), (3, 20), (5, 33), (4, 128), (1, 513), (33, 2), (3, 100), (2, 48)].iter().enumerate().map(case).collect()
}

/// The forms of a router over `n` experts of which `k` are used, as far as the numbers allow them.
fn routers(b: &mut Build, n: usize) -> Vec<(&'static str, Router)> {
    let plain = Router::softmax(false, 1.0);
    let mut bias = || Some(b.weight(&[n], F32));
    let groups = |n_group: usize, n_used, score| Some(Groups { n_group, n_used, score });
    let mut all = vec![
        ("softmax", plain),
        ("softmax renormalised", Router::softmax(true, 1.25)),
        ("raw", Router { score: Score::Raw, ..plain }),
        (
            "sigmoid, bias",
            Router { score: Score::Sigmoid, bias: bias(), renormalise: Some(1e-20), scale: 2.5, ..plain },
        ),
        ("sparse", Router { score: Score::Sparse { margin: 0.3 }, ..plain }),
        ("sparse, scaled", Router { score: Score::Sparse { margin: 1.2 }, scale: 1.5, ..plain }),
        ("raw, bias", Router { score: Score::Raw, bias: bias(), ..plain }),
        ("scales of experts", Router { expert_scale: bias(), ..Router::softmax(true, 1.0) }),
    ];
    if n.is_multiple_of(4) && n >= 8 {
        let max = groups(4, 2, GroupScore::Max);
        let two = groups(4, 3, GroupScore::TopTwo);
        all.push(("groups by maximum", Router { groups: max, scale: 16.0, ..plain }));
        let sigmoid = Router { score: Score::Sigmoid, bias: bias(), renormalise: Some(1e-20), ..plain };
        all.push(("groups by two, bias", Router { groups: two, scale: 2.5, ..sigmoid }));
        all.push(("groups by two", Router { groups: two, score: Score::Sigmoid, ..plain }));
    }
    all
}

pub fn route(seed: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    let shapes = [(1, 1), (2, 1), (8, 2), (9, 9), (31, 5), (60, 10), (64, 16), (128, 8), (256, 32), (1024, 32)];
    for (i, (n_expert, n_used)) in shapes.into_iter().enumerate() {
        let n_forms = routers(&mut Build::new(seed), n_expert).len();
        for form in 0..n_forms {
            let (mut b, rows) = (Build::new(seed), ROWS[(i + form) % 2]);
            let (name, router) = routers(&mut b, n_expert)[form];
            let open = router.groups.map_or(n_expert, |g| g.n_used * n_expert / g.n_group);
            if n_used > open {
                continue;
            }
            let fill = if (i + form) % 3 == 0 && router.bias.is_none() { Fill::Ties } else { Fill::Uniform(4.0) };
            let logits = b.rows(rows, n_expert, fill);
            let (ids, weights) = (b.m.typed(rows, n_used, Elem::U32), b.buf(rows, n_used));
            b.op(Op::Route { logits, router, n_used, ids, weights });
            let mut outs = vec![("weights", weights)];
            // The ids show in what their experts compute: experts are plain numbers of their own.
            let y = experts_of(&mut b, rows, ids, n_expert, n_used);
            outs.push(("sum of experts", combined(&mut b, rows, y, weights, 1)));
            let ties = if matches!(fill, Fill::Ties) { ", ties" } else { "" };
            let shape = format!("{n_used} of {n_expert}, {name}{ties}, {rows:?}");
            // Not logits near 0: their sigmoids differ by less than two implementations do.
            let script = |t: &mut Tokens| [t.counts(), t.specials(&SPECIALS[..5])].concat();
            cases.push(Case { slack: 6.0, ..b.finish("route", shape, F32, &outs, script) });
        }
    }
    cases
}

/// One number for each slot, which tells its expert.
fn experts_of(b: &mut Build, rows: Rows, ids: Buf, n_expert: usize, n_used: usize) -> Buf {
    let x = b.rows(rows, 1, Fill::Gate);
    let up = b.m.weight_of(&[n_expert, 1, 1], F32, |_, i| vec![1.0 + (i as f32 * 0.618).fract()]);
    let gate = b.m.weight_of(&[n_expert, 1, 1], F32, |_, _| vec![1.0]);
    let down = b.m.weight_of(&[n_expert, 1, 1], F32, |_, i| vec![1.0 + i as f32 / 16.0]);
    let slots = rows.slots(n_used).unwrap();
    let (hidden, out) = (b.buf(slots, 1), b.buf(slots, 1));
    b.op(Op::Experts { x, ids, gate, up, down, biases: None, act: Gate::Silu, hidden, out });
    out
}

fn combined(b: &mut Build, rows: Rows, y: Buf, weights: Buf, d: usize) -> Buf {
    let x = b.buf(rows, d);
    b.op(Op::Combine { x, add: false, y, weights, norm: None });
    x
}

/// Experts in one shape.
#[derive(Clone, Copy, Debug)]
struct Moe {
    n_expert: usize,
    n_used: usize,
    d_in: usize,
    d_ff: usize,
    d_out: usize,
    types: [WeightType; 3],
    act: Gate,
    biased: bool,
    rows: Rows,
}

fn moe(seed: u64, m: Moe, script: fn(&mut Tokens) -> Vec<Step>) -> Case {
    let Moe { n_expert, n_used, d_in, d_ff, d_out, types: [tg, tu, td], act, biased, rows } = m;
    let mut b = Build::new(seed);
    let (x, logits) = (b.rows(rows, d_in, UNIT), b.rows(rows, n_expert, Fill::Uniform(3.0)));
    let (ids, weights) = (b.m.typed(rows, n_used, Elem::U32), b.buf(rows, n_used));
    b.op(Op::Route { logits, router: Router::softmax(true, 1.0), n_used, ids, weights });
    let (gate, up) = (b.weight(&[n_expert, d_ff, d_in], tg), b.weight(&[n_expert, d_ff, d_in], tu));
    let down = b.weight(&[n_expert, d_out, d_ff], td);
    let biases = biased.then(|| ExpertBiases {
        gate: b.numbers(&[n_expert, d_ff]),
        up: b.numbers(&[n_expert, d_ff]),
        down: b.numbers(&[n_expert, d_out]),
    });
    let slots = rows.slots(n_used).unwrap();
    let (hidden, y) = (b.buf(slots, d_ff), b.buf(slots, d_out));
    b.op(Op::Experts { x, ids, gate, up, down, biases, act, hidden, out: y });
    let out = combined(&mut b, rows, y, weights, d_out);
    let coarse = [tg, tu, td].into_iter().max_by_key(|t| t.act() as usize).unwrap();
    Case { slack: 4.0, ..b.finish("experts", format!("{m:?}"), coarse, &[("out", out)], script) }
}

pub fn experts(seed: u64) -> Vec<Case> {
    let plain = Moe {
        n_expert: 4,
        n_used: 2,
        d_in: 33,
        d_ff: 17,
        d_out: 33,
        types: [F32; 3],
        act: Gate::Silu,
        biased: false,
        rows: Rows::Tokens,
    };
    let mut cases = Vec::new();
    for (i, t) in types() {
        let (d_in, d_ff, d_out) = (lengths(t)[i % 2], lengths(t)[(i + 1) % 2], [33, 7, 16][i % 3]);
        let types = [t; 3];
        let m = Moe {
            d_in,
            d_ff,
            d_out,
            types,
            act: GATES[i % GATES.len()],
            biased: i % 2 == 1,
            rows: ROWS[i / 2 % 2],
            ..plain
        };
        cases.push(moe(seed, m, if i % 5 == 0 { Tokens::counts } else { Tokens::few }));
    }
    let sizes = [(1, 1), (2, 2), (3, 1), (8, 2), (19, 8), (32, 10), (60, 16), (128, 16), (128, 9), (300, 20)];
    for (i, (n_expert, n_used)) in sizes.into_iter().enumerate() {
        let m = Moe {
            n_expert,
            n_used,
            act: GATES[i % GATES.len()],
            biased: i % 2 == 0,
            types: [FLOATS[i % 3]; 3],
            ..plain
        };
        cases.push(moe(seed, Moe { rows: ROWS[i % 2], ..m }, Tokens::counts));
    }
    for types in [[Q4_K, Q4_K, Q6_K], [Q4_K, Q8_0, Q5_K], [Q8_0, Q4_0, F16]] {
        let m = Moe { n_expert: 40, n_used: 10, d_in: 256, d_ff: 256, d_out: 31, types, ..plain };
        cases.push(moe(seed, m, Tokens::counts));
    }
    cases
}

pub fn combine(seed: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, (d, n_used)) in [(1, 1), (7, 2), (33, 8), (130, 16), (20, 32), (770, 3)].into_iter().enumerate() {
        for (add, normed) in [(true, false), (false, false), (true, true), (false, true)] {
            let (mut b, rows, n_expert) = (Build::new(seed), ROWS[(i + usize::from(add)) % 2], n_used + 3);
            let logits = b.rows(rows, n_expert, Fill::Uniform(2.0));
            let (ids, weights) = (b.m.typed(rows, n_used, Elem::U32), b.buf(rows, n_used));
            b.op(Op::Route { logits, router: Router::softmax(false, 3.0), n_used, ids, weights });
            let h = b.rows(rows, 1, Fill::Uniform(2.0));
            let [gate, up] = [0, 1].map(|_| b.weight(&[n_expert, 1, 1], F32));
            let down = b.weight(&[n_expert, d, 1], F32);
            let slots = rows.slots(n_used).unwrap();
            let (hidden, y) = (b.buf(slots, 1), b.buf(slots, d));
            b.op(Op::Experts { x: h, ids, gate, up, down, biases: None, act: CLAMPED, hidden, out: y });
            let x = b.rows(rows, d, UNIT);
            let norm = normed.then(|| Norm { w: b.vector(d), eps: 1e-6, out: b.buf(rows, d) });
            b.op(Op::Combine { x, add, y, weights, norm });
            let outs: Vec<(&str, Buf)> = [("x", x)].into_iter().chain(norm.map(|norm| ("norm", norm.out))).collect();
            let shape = format!("d {d}, {n_used} slots, add {add}, norm {normed}, {rows:?}");
            cases.push(Case { slack: 2.0, ..b.finish("combine", shape, F32, &outs, Tokens::counts) });
        }
    }
    cases
}

pub fn select(seed: u64) -> Vec<Case> {
    let case = |d: usize| {
        let mut b = Build::new(seed);
        let x = b.input(d, UNIT);
        let out = b.buf(Rows::Outputs, d);
        b.op(Op::Select { x, out });
        b.finish("select", format!("d {d}"), F32, &[("out", out)], |t| {
            let far = Step { jump: vec![(0, 0), (1, 0), (2, 0)], ..t.step(&[(0, 200), (2, 33_000)], 997) };
            [mixed(t), if d == 7 { vec![far] } else { Vec::new() }].concat()
        })
    };
    WIDTHS.map(case).into()
}
