//! Multi-head latent attention: heads taken apart and put together, one matrix a head, the latent cache. The absorbed
//! form is held against the expanded one, the CPU against the reference, and the CPU against itself (the law).
use std::sync::Arc;

use backend::CacheType;
use backend::reference::Reference;
use checkpoint::Checkpoint;
use conformance::{Maker, N_VOCAB, Random, Session, tokens};
use cpu::{Cpu, Isa};
use model::plan::*;
use quant::WeightType::{self, *};

/// How the keys and values of a head come from the latent.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    /// Keys and values of every head are computed and cached.
    Expanded,
    /// The latent is cached; both matrices of a head lie in one tensor, the keys' transposed.
    Whole,
    /// The latent is cached; the matrices lie in two tensors, each as it is used.
    Split,
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    n_head: usize,
    d_nope: usize,
    d_pe: usize,
    d_latent: usize,
    d_v: usize,
    /// Of the matrices of the heads.
    dtype: WeightType,
    /// Also selects the asked rows behind attention.
    fused: bool,
}

const SMALL: Shape = Shape { n_head: 4, d_nope: 32, d_pe: 16, d_latent: 64, d_v: 32, dtype: F32, fused: true };

/// Shapes that differ from each other in every field: odd head counts, rows that end inside a lane, the real widths.
const SHAPES: [Shape; 5] = [
    SMALL,
    Shape { n_head: 5, d_nope: 24, d_pe: 10, d_latent: 40, d_v: 17, fused: false, ..SMALL },
    Shape { n_head: 1, d_nope: 7, d_pe: 2, d_latent: 9, d_v: 3, dtype: BF16, ..SMALL },
    Shape { n_head: 70, d_nope: 32, d_pe: 8, d_latent: 32, d_v: 64, dtype: Q8_0, ..SMALL },
    Shape { n_head: 18, d_nope: 128, d_pe: 64, d_latent: 512, d_v: 128, dtype: F16, fused: false },
];

/// A model whose latents are whole blocks of a cache.
pub fn of_blocks() -> (Plan, Arc<Checkpoint>) {
    model(Shape { n_head: 3, d_nope: 10, d_pe: 32, d_latent: 32, ..SMALL }, Form::Split)
}

const D_MODEL: usize = 48;
const EPS: f32 = 1e-6;

/// A model of one layer: embedding, latent attention, logits. In the first two forms, one shape has the same weights.
fn model(s: Shape, form: Form) -> (Plan, Arc<Checkpoint>) {
    let (n_head, d_k) = (s.n_head, s.d_latent + s.d_pe);
    let cache = match form {
        Form::Expanded => CacheDecl { n_kv: n_head, d_k: s.d_nope + s.d_pe, d_v: s.d_v, v_in_k: false, window: None },
        _ => CacheDecl { n_kv: 1, d_k, d_v: s.d_latent, v_in_k: true, window: None },
    };
    let plan = Plan {
        caches: vec![cache],
        ropes: vec![RopeDecl {
            inv_freq: (0..s.d_pe / 2).map(|i| 10_000f64.powf(-2.0 * i as f64 / s.d_pe as f64)).collect(),
            factor: 1.1,
            growth: None,
            pairing: RopePairing::Interleaved,
            axes: Vec::new(),
        }],
        ..Plan::new("random", N_VOCAB, D_MODEL, 1 << 20)
    };
    let mut m = Maker { plan, tensors: Vec::new(), random: Random(0x1234_5678_9abc_def1) };
    let t = Rows::Tokens;

    let x = m.buf(t, D_MODEL);
    let table = m.weight(&[N_VOCAB, D_MODEL], BF16);
    m.op(Op::Embed { table, scale: 1.5, out: x });
    let h = norm(&mut m, x);
    let q = m.linear(h, t, n_head * (s.d_nope + s.d_pe), F32, false);
    let (q_nope, q_pe) = (m.buf(t, n_head * s.d_nope), m.buf(t, n_head * s.d_pe));
    m.op(Op::SplitHeads { x: q, n_head, parts: vec![(s.d_nope, q_nope), (s.d_pe, q_pe)] });
    let kv = m.linear(h, t, d_k, F32, false);
    let (latent, k_pe) = (m.buf(t, s.d_latent), m.buf(t, s.d_pe));
    m.op(Op::SplitHeads { x: kv, n_head: 1, parts: vec![(s.d_latent, latent), (s.d_pe, k_pe)] });
    let latent = norm(&mut m, latent);
    m.op(Op::Rope { x: q_pe, rope: Rope(0), n_head, d_head: s.d_pe });
    m.op(Op::Rope { x: k_pe, rope: Rope(0), n_head: 1, d_head: s.d_pe });
    let scale = 2.0 / ((s.d_nope + s.d_pe) as f32).sqrt();

    let a = if form == Form::Expanded {
        expanded(&mut m, s, (q_nope, q_pe), (latent, k_pe), scale)
    } else {
        absorbed(&mut m, s, form, (q_nope, q_pe), (latent, k_pe), scale)
    };
    let y = m.linear(a, t, D_MODEL, F32, false);
    m.op(Op::Add { x, y });
    let picked = m.buf(Rows::Outputs, D_MODEL);
    m.op(Op::Select { x, out: picked });
    let normed = norm(&mut m, picked);
    m.plan.logits = m.linear(normed, Rows::Outputs, N_VOCAB, F32, false);
    m.finish(s.fused)
}

fn norm(m: &mut Maker, x: Buf) -> Buf {
    let decl = m.plan.buf(x).clone();
    let (w, out) = (m.weight(&[decl.width], F32), m.buf(decl.rows, decl.width));
    m.op(Op::RmsNorm { x, residual: None, w, eps: EPS, out });
    out
}

fn attention(m: &mut Maker, q: Buf, k: Buf, v: Option<Buf>, n_head: usize, scale: f32) -> Buf {
    m.op(Op::KvAppend { cache: Cache(0), k, v });
    let out = m.buf(Rows::Tokens, n_head * m.plan.caches[0].d_v);
    m.op(Op::Attention {
        cache: Cache(0),
        q,
        n_head,
        scale,
        window: None,
        chunked: false,
        softcap: None,
        chosen: None,
        sinks: None,
        out,
    });
    out
}

/// `[n_head, d_nope + d_v, d_latent]`.
fn both_matrices(m: &mut Maker, s: Shape) -> Weight {
    m.weight(&[s.n_head * (s.d_nope + s.d_v), s.d_latent], s.dtype)
}

fn expanded(m: &mut Maker, s: Shape, q: (Buf, Buf), (latent, k_pe): (Buf, Buf), scale: f32) -> Buf {
    let (t, n_head) = (Rows::Tokens, s.n_head);
    let (w, kv) = (both_matrices(m, s), m.buf(t, n_head * (s.d_nope + s.d_v)));
    m.op(Op::Linear { x: latent, parts: vec![LinearPart { w, bias: None, out: kv }] });
    let (k_nope, v) = (m.buf(t, n_head * s.d_nope), m.buf(t, n_head * s.d_v));
    m.op(Op::SplitHeads { x: kv, n_head, parts: vec![(s.d_nope, k_nope), (s.d_v, v)] });
    let k_pes = m.buf(t, n_head * s.d_pe);
    m.op(Op::JoinHeads { parts: vec![(s.d_pe, k_pe); n_head], n_head: 1, out: k_pes });
    let [q, k] = [(q.0, q.1), (k_nope, k_pes)].map(|(nope, pe)| {
        let out = m.buf(t, n_head * (s.d_nope + s.d_pe));
        m.op(Op::JoinHeads { parts: vec![(s.d_nope, nope), (s.d_pe, pe)], n_head, out });
        out
    });
    attention(m, q, k, Some(v), n_head, scale)
}

fn absorbed(m: &mut Maker, s: Shape, form: Form, q: (Buf, Buf), (latent, k_pe): (Buf, Buf), scale: f32) -> Buf {
    let (t, n_head) = (Rows::Tokens, s.n_head);
    let (w_uk, w_uv) = if form == Form::Whole {
        let both = both_matrices(m, s);
        let part = |m: &mut Maker, first: usize, rows: usize| {
            let mut decl = m.plan.weight(both).clone();
            let Source::Tensor(tensor) = decl.source else { unreachable!() };
            let slab = |h| Slab { tensor: tensor.clone(), first_row: h * (s.d_nope + s.d_v) + first };
            decl.source = Source::Slabs((0..n_head).map(slab).collect());
            decl.shape = vec![n_head, rows, s.d_latent];
            decl.name += &format!(" rows {first}");
            m.plan.weights.push(decl);
            Weight(m.plan.weights.len() as u32 - 1)
        };
        (part(m, 0, s.d_nope), part(m, s.d_nope, s.d_v))
    } else {
        (m.weight(&[n_head, s.d_latent, s.d_nope], s.dtype), m.weight(&[n_head, s.d_v, s.d_latent], s.dtype))
    };
    let absorbed = m.buf(t, n_head * s.d_latent);
    m.op(Op::HeadLinear { x: q.0, w: w_uk, transposed: form == Form::Whole, out: absorbed });
    let (joined, k) = (m.buf(t, n_head * (s.d_latent + s.d_pe)), m.buf(t, s.d_latent + s.d_pe));
    m.op(Op::JoinHeads { parts: vec![(s.d_latent, absorbed), (s.d_pe, q.1)], n_head, out: joined });
    m.op(Op::JoinHeads { parts: vec![(s.d_latent, latent), (s.d_pe, k_pe)], n_head: 1, out: k });
    let a = attention(m, joined, k, None, n_head, scale);
    let out = m.buf(t, n_head * s.d_v);
    m.op(Op::HeadLinear { x: a, w: w_uv, transposed: false, out });
    out
}

/// RMS of the difference over RMS of the exact values.
fn error(found: &[f32], exact: &[f32]) -> f64 {
    assert_eq!(found.len(), exact.len());
    let error = exact.iter().zip(found).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
    (error / exact.iter().map(|a| f64::from(*a).powi(2)).sum::<f64>()).sqrt()
}

fn cpu(isa: Isa, threads: usize, cache: CacheType) -> Cpu {
    Cpu { isa, threads, cache, ..Cpu::default() }
}

#[test]
fn absorbed_and_expanded_forms_agree() {
    for shape in SHAPES {
        let [expanded, absorbed] = [Form::Expanded, Form::Whole].map(|form| {
            let mut session = Session::new(&Reference, &model(shape, form), 40);
            let mut logits = session.step(&[(0, &tokens(11, 1)), (1, &tokens(3, 2))]).to_vec();
            logits.extend_from_slice(session.step(&[(0, &tokens(5, 3))]));
            logits
        });
        let error = error(&absorbed, &expanded);
        assert!(error < 1e-5, "{shape:?}: {error:e}");
    }
}

#[test]
fn the_cpu_agrees_with_the_reference() {
    for shape in SHAPES {
        for form in [Form::Whole, Form::Split] {
            if form == Form::Split && shape.dtype.row_bytes(shape.d_nope).is_none() {
                continue;
            }
            let model = model(shape, form);
            for n in [1, 2, 33, 60] {
                let prompts: Vec<Vec<u32>> = (0..3).map(|s| tokens(n + 5 * s, s as u64)).collect();
                let parts: Vec<(usize, &[u32])> = prompts.iter().enumerate().map(|(s, t)| (s, &t[..])).collect();
                let exact = Session::new(&Reference, &model, 400).step(&parts).to_vec();
                let mut found = Session::new(&cpu(Isa::best(), 2, CacheType::F32), &model, 400);
                let error = error(found.step(&parts), &exact);
                // Blocks of 32 meet 16-bit activations.
                let most = if shape.dtype == Q8_0 { 2e-4 } else { 2e-5 };
                assert!(error < most, "{n} tokens, {form:?}, {shape:?}: {error:e}");
            }
        }
    }
}

/// The same bits for every instruction set, number of threads, chunking of the prompt and batch.
#[test]
fn the_law_holds() {
    let caches = [CacheType::F16, CacheType::F32, CacheType::F32, CacheType::F16];
    // Heads of whole blocks.
    let blocks = [Shape { d_pe: 32, ..SMALL }, Shape { n_head: 3, d_pe: 64, d_latent: 512, ..SMALL }];
    let ways = [CacheType::Q8_0, CacheType::Q4_0]
        .map(|cache| blocks.map(|shape| (shape, [(Form::Whole, cache), (Form::Split, cache)])));
    let floats = SHAPES
        .into_iter()
        .zip(caches)
        .map(|(shape, cache)| (shape, [(Form::Whole, cache), (Form::Split, caches[usize::from(cache == caches[0])])]));
    for (shape, ways) in floats.chain(ways.into_iter().flatten()) {
        for (form, cache) in ways {
            let model = model(shape, form);
            let prompt = tokens(50, 9);
            let whole = Session::new(&cpu(Isa::Scalar, 1, cache), &model, 128).step(&[(0, &prompt)]).to_vec();
            assert!(whole.iter().all(|x| x.is_finite()));
            for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
                for (threads, chunks) in [(1, &[50][..]), (2, &[1, 30, 1, 1, 17]), (3, &[33, 12, 5])] {
                    let mut session = Session::new(&cpu(isa, threads, cache), &model, 128);
                    let (mut at, mut logits) = (0, Vec::new());
                    for (i, &n) in chunks.iter().enumerate() {
                        let others = [tokens(1 + i * 7, 1), tokens(3, 2)];
                        let own = (0, &prompt[at..at + n]);
                        let all = session.step(&[(1, &others[0]), own, (2, &others[1])]);
                        logits.extend_from_slice(&all[others[0].len() * N_VOCAB..][..n * N_VOCAB]);
                        at += n;
                    }
                    let same = logits.iter().zip(&whole).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{isa}, {threads} threads, chunks {chunks:?}, {cache:?}, {form:?}, {shape:?}");
                }
            }
        }
    }
}

/// Segments of 512 positions merge alike in prefill and decode, on one thread and on several.
#[test]
fn long_contexts_give_the_same_bits() {
    let model = model(Shape { n_head: 20, ..SMALL }, Form::Split);
    let prompt = tokens(1030, 4);
    let whole = Session::new(&cpu(Isa::best(), 1, CacheType::F16), &model, 1056).step(&[(0, &prompt)]).to_vec();
    for threads in [2, 5] {
        let mut session = Session::new(&cpu(Isa::best(), threads, CacheType::F16), &model, 1056);
        let mut at = 0;
        for n in [511, 1, 1, 1, 510, 1, 1, 4] {
            let logits = session.step(&[(0, &prompt[at..at + n])]);
            let wanted = &whole[at * N_VOCAB..(at + n) * N_VOCAB];
            assert!(
                logits.iter().zip(wanted).all(|(a, b)| a.to_bits() == b.to_bits()),
                "{threads} threads, token {at}"
            );
            at += n;
        }
    }
}
