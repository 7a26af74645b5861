//! The CUDA backend against the reference: random models of one layer in many shapes and every weight type. Golden
//! logits are in `golden.rs`. Without a GPU each test says so and ends.
use std::collections::HashSet;
use std::process::Command;
use std::sync::Arc;
use std::thread;

use backend::reference::{Reference, Rounded};
use backend::{Ask, Backend, Batch, Fault, Limits, PAGE, Picks, Tables};
use backend::{CacheType, KvType};
use checkpoint::Checkpoint;
use conformance::backends::{self, gpu};
use conformance::{BAD, MAX_DRAFT, N_VOCAB, PLAIN, Session, Shape, model, relative, tokens};
use gpu::cuda::Cuda;
use model::plan::{DeltaHeads, DeltaRule, Gate, Plan, RopePairing, Sharing, ValidPlan};
use quant::WeightType::{self, *};
use quant::act::ActKind;

const CLAMPED: Gate = Gate::ClampedSwiglu { alpha: 1.702, limit: 7.0 };

const fn heads(n_k_head: usize, n_v_head: usize, d_k: usize, d_v: usize, sharing: Sharing) -> DeltaHeads {
    DeltaHeads { n_k_head, n_v_head, d_k, d_v, sharing, rule: DeltaRule::Delta }
}

/// The most that logits may be off where every matrix is of floats: products of many rows round activations to bf16
/// beside weights of 16 bits, as the matrix of the logits is.
const FLOATS_OFF: f64 = 5e-3;

/// Shapes in floats.
const FLOATS: &[Shape] = &[
    PLAIN,
    Shape { n_head: 8, n_kv: 1, d_k: 128, d_v: 128, pairing: RopePairing::Interleaved, fused: false, ..PLAIN },
    Shape { n_head: 3, n_kv: 3, d_k: 80, d_v: 80, window: Some(40), act: Gate::GeluTanh, n_used: 8, ..PLAIN },
    Shape { n_head: 3, n_kv: 3, d_k: 80, d_v: 80, window: Some(40), forgets: true, ..PLAIN },
    Shape { d_model: 52, n_head: 10, n_kv: 2, d_k: 20, d_v: 24, softcap: Some(4.0), n_expert: 19, d_ff: 33, ..PLAIN },
    Shape { n_head: 6, n_kv: 2, window: Some(513), types: [F32, BF16, F16, F32, BF16], n_used: 1, ..PLAIN },
    Shape { n_head: 2, n_kv: 1, d_k: 512, d_v: 512, sinks: true, act: Gate::GeluTanh, fused: false, ..PLAIN },
    Shape { n_head: 22, n_kv: 2, d_k: 33, d_v: 7, biases: true, act: CLAMPED, n_expert: 130, n_used: 12, ..PLAIN },
    Shape { delta: Some((4, heads(2, 4, 128, 128, Sharing::Grouped))), ..PLAIN },
    Shape { delta: Some((2, heads(3, 3, 20, 24, Sharing::Tiled))), fused: false, ..PLAIN },
    Shape { delta: Some((5, heads(2, 6, 7, 57, Sharing::Tiled))), ..PLAIN },
];

/// [`relative`] over rows of `width`, without the worst eighth: a near tie among random routers sends a token to other
/// experts.
pub fn relative_of_most(found: &[f32], exact: &[f32], width: usize) -> f64 {
    let rows = found.chunks_exact(width).zip(exact.chunks_exact(width));
    let mut rows: Vec<_> = rows.map(|(a, b)| (relative(a, b), a, b)).collect();
    rows.sort_by(|a, b| a.0.total_cmp(&b.0));
    let kept = rows.len() - rows.len() / 8;
    if rows.iter().any(|row| row.0.is_nan()) {
        return f64::NAN;
    }
    let join = |pick: fn(&(f64, &[f32], &[f32])) -> Vec<f32>| rows[..kept].iter().flat_map(pick).collect::<Vec<_>>();
    relative(&join(|row| row.1.to_vec()), &join(|row| row.2.to_vec()))
}

/// Prompts whole, in pieces, side by side, and token by token.
fn run(backend: &dyn Backend, shape: Shape) -> Vec<f32> {
    let mut session = Session::new(backend, &model(shape), 160);
    let (a, b, c) = (tokens(70, 1), tokens(40, 2), tokens(12, 3));
    let mut all = session.step(&[(0, &a)]).to_vec();
    all.extend_from_slice(session.step(&[(1, &b[..7]), (0, &a[..1])]));
    all.extend_from_slice(session.step(&[(2, &c), (1, &b[7..])]));
    for i in 0..6 {
        let next = [(0, &a[i..=i]), (1, &b[i..=i]), (2, &c[i..=i])];
        all.extend_from_slice(session.step(&next[..1 + i % 3]));
    }
    all
}

#[test]
fn every_op_agrees_with_the_reference() {
    let Some(gpu) = gpu(CacheType::F32) else { return };
    let mut failed = Vec::new();
    for &shape in FLOATS {
        let (found, exact) = (run(&gpu, shape), run(&Reference, shape));
        let error = relative(&found, &exact);
        println!("{error:.2e} {shape:?}");
        if error.is_nan() || error > FLOATS_OFF {
            failed.push((error, shape));
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

/// The types of one process in so many.
const SHARE: &str = "MOEBIUS_SHARE_OF_TYPES";

/// Processes side by side, each with its share of the types: what takes long is to compile their kernels, which is work
/// of the host, and a process compiles one at a time.
#[test]
fn every_weight_type_agrees_with_the_reference() {
    let Some(gpu) = gpu(CacheType::F32) else { return };
    if let Ok(share) = std::env::var(SHARE) {
        let (i, n) = share.split_once('/').unwrap();
        return agree(&gpu, backends::types().skip(i.parse().unwrap()).step_by(n.parse().unwrap()));
    }
    let n = thread::available_parallelism().map_or(1, usize::from).min(16);
    let own = std::env::current_exe().unwrap();
    let start = |i| {
        let mut command = Command::new(&own);
        command.args(["--exact", "every_weight_type_agrees_with_the_reference", "--nocapture"]);
        command.env(SHARE, format!("{i}/{n}")).spawn().unwrap()
    };
    let processes: Vec<_> = (0..n).map(start).collect();
    let failed = processes.into_iter().filter_map(|mut process| (!process.wait().unwrap().success()).then_some(()));
    assert_eq!(failed.count(), 0, "processes say above which types are off");
}

/// Runs a model of each type, and says how far it is off.
fn agree(gpu: &Cuda, types: impl Iterator<Item = WeightType>) {
    let mut failed = Vec::new();
    for w in types {
        let shape = Shape { d_model: 256, d_ff: 256, types: [w; 5], ..PLAIN };
        let (found, exact) = (run(gpu, shape), run(&Reference, shape));
        let error = relative_of_most(&found, &exact, N_VOCAB);
        // Activations may be rounded to 8 bits where weights have fewer than 16.
        let most = if w.act() == ActKind::F32 { FLOATS_OFF } else { 3e-2 };
        println!("{w:<16} {error:.2e} (at most {most:.0e})");
        if error.is_nan() || error > most {
            failed.push((w, error));
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

#[test]
fn types_may_differ_inside_an_op() {
    let Some(gpu) = gpu(CacheType::F16) else { return };
    for types in [[Q4_K, Q6_K, Q4_K, Q8_0, Q6_K], [Q8_0, BF16, Q5_0, MXFP4, Q4_1]] {
        let shape = Shape { d_model: 256, d_ff: 256, types, biases: true, act: CLAMPED, ..PLAIN };
        let error = relative_of_most(&run(&gpu, shape), &run(&Reference, shape), N_VOCAB);
        println!("{types:?} {error:.2e}");
        assert!(error <= 3e-2, "{types:?}: {error:e}");
    }
}

#[test]
fn ten_runs_give_the_same_bits() {
    let Some(gpu) = gpu(CacheType::F16) else { return };
    let shape = Shape {
        d_model: 256,
        d_ff: 256,
        n_head: 8,
        n_kv: 1,
        types: [Q4_K, Q6_K, Q4_K, Q4_K, Q6_K],
        delta: Some((4, heads(2, 4, 32, 64, Sharing::Grouped))),
        ..PLAIN
    };
    let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    let first = bits(run(&gpu, shape));
    for i in 1..10 {
        assert!(bits(run(&gpu, shape)) == first, "run {i} gives other bits");
    }
    for n in [1, 8, 32] {
        let first = bits(crowd(&gpu, &model(shape), n, 4));
        for i in 1..10 {
            assert!(bits(crowd(&gpu, &model(shape), n, 4)) == first, "run {i} of {n} sequences gives other bits");
        }
    }
}

/// The embedded model, greedily: `n` sequences side by side decode 300 tokens each, ten times to the same bits.
#[test]
fn ten_answers_of_the_embedded_model_are_the_same_bits() {
    let Some(gpu) = gpu(CacheType::F16) else { return };
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/fable-29m-a10m-q4_k_m.gguf");
    let checkpoint = Arc::new(checkpoint::open(path.as_ref()).unwrap());
    let plan = gpu.lower(model::build(&checkpoint).unwrap()).unwrap();
    for n in [1, 8, 32] {
        let mut answers = (0..10).map(|_| answers(&gpu, &plan, &checkpoint, n));
        let first = answers.next().unwrap();
        let texts: HashSet<&[u32]> = first.0.iter().map(Vec::as_slice).collect();
        println!("{n} sequences: {} texts, sum of all logits' bits {:016x}", texts.len(), first.1);
        assert_eq!(texts.len(), n, "each sequence has a prompt of its own");
        for (i, again) in answers.enumerate() {
            assert!(again == first, "run {} of {n} sequences gives other bits", i + 1);
        }
    }
}

/// 300 greedy tokens of each of `n` sequences, and a sum over the bits of all logits.
fn answers(backend: &dyn Backend, plan: &ValidPlan, checkpoint: &Arc<Checkpoint>, n: usize) -> (Vec<Vec<u32>>, u64) {
    const N_TOKENS: usize = 300;
    let n_pages = (12 + N_TOKENS).div_ceil(PAGE);
    let limits = Limits {
        max_tokens: 12 * n,
        max_outputs: n,
        n_pages: n * n_pages,
        max_positions: n_pages * PAGE,
        n_window_pages: 0,
        n_states: 0,
        max_draft: 0,
    };
    let mut program = backend.compile(plan, Arc::clone(checkpoint), limits).unwrap();
    let mut texts: Vec<Vec<u32>> = (0..n).map(|s| tokens(12, s as u64)).collect();
    let (mut batch, mut sum) = (Batch::default(), 0u64);
    for step in 0..N_TOKENS {
        batch.clear();
        for (s, text) in texts.iter().enumerate() {
            let pages: Vec<u32> = (0..n_pages).map(|i| (s * n_pages + i) as u32).collect();
            let first = if step == 0 { 0 } else { text.len() - 1 };
            let tables = Tables { pages: &pages, ..Tables::default() };
            batch.push(&text[first..], first, tables, [text.len() - first - 1]);
        }
        let logits = program.step(&batch).unwrap().logits;
        sum = logits.iter().fold(sum, |sum, x| sum.wrapping_mul(31).wrapping_add(u64::from(x.to_bits())));
        for (text, row) in texts.iter_mut().zip(logits.chunks_exact(plan.n_vocab)) {
            text.push((0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as u32);
        }
    }
    (texts, sum)
}

/// A state that was copied away and back goes on as if nothing had happened in between.
#[test]
fn states_are_copied() {
    let Some(gpu) = gpu(CacheType::F32) else { return };
    let shape = Shape { delta: Some((4, heads(2, 4, 32, 32, Sharing::Grouped))), ..PLAIN };
    let mut session = Session::new(&gpu, &model(shape), 96);
    let prompt = tokens(40, 1);
    session.step(&[(0, &prompt)]);
    session.program.copy_state(0, 2);
    let first = session.step(&[(0, &prompt[..5])]).to_vec();
    session.program.copy_state(2, 0);
    session.n_past[0] = 40;
    let again = session.step(&[(0, &prompt[..5])]).to_vec();
    assert!(first.iter().map(|x| x.to_bits()).eq(again.iter().map(|x| x.to_bits())));
}

/// Drafts that are right, wrong and right up to a point, among another sequence's and after prompts: whatever was
/// accepted, later tokens see the texts without drafts.
#[test]
fn drafts_agree_with_the_reference() {
    let Some(gpu) = gpu(CacheType::F16) else { return };
    let large = Shape { d_model: 256, d_ff: 256, n_head: 4, n_kv: 2, d_k: 64, d_v: 64, ..PLAIN };
    let delta = |shape, width, heads| Shape { delta: Some((width, heads)), ..shape };
    for (shape, most) in [
        (PLAIN, FLOATS_OFF),
        (delta(PLAIN, 4, heads(2, 4, 128, 128, Sharing::Grouped)), FLOATS_OFF),
        (delta(PLAIN, 2, heads(3, 3, 20, 24, Sharing::Tiled)), FLOATS_OFF),
        (delta(PLAIN, 5, heads(2, 6, 7, 57, Sharing::Tiled)), FLOATS_OFF),
        (delta(Shape { types: [Q4_K; 5], ..large }, 4, heads(2, 4, 64, 64, Sharing::Tiled)), 3e-2),
        (Shape { types: [Q4_K, Q6_K, Q4_K, Q4_K, Q6_K], n_expert: 19, n_used: 4, ..large }, 3e-2),
        (Shape { types: [BF16; 5], sinks: true, window: Some(40), forgets: true, ..large }, 1e-2),
    ] {
        let run = |backend: &dyn Backend| with_drafts(backend, &model(shape), BAD);
        let error = relative_of_most(&run(&gpu), &run(&Reference), N_VOCAB);
        println!("{error:.2e} (at most {most:.0e}) {shape:?}");
        assert!(error <= most, "{error:e} of at most {most:e}, {shape:?}");
    }
    // Short convolutions, Mamba-2, gates by key: families as they are published.
    for name in ["lfm2", "nemotron_h", "falcon_h1", "kimi_linear", "qwen3_vl", "gemma4_e2b", "mistral4"] {
        let folder = format!("{}/tests/data/published/{name}/hf", env!("CARGO_MANIFEST_DIR"));
        let checkpoint = Arc::new(checkpoint::open(std::path::Path::new(&folder)).unwrap());
        let plan = model::build(&checkpoint).unwrap();
        let run = |backend: &dyn Backend| {
            let plan = Plan::clone(&backend.lower(plan.clone()).unwrap());
            with_drafts(backend, &(plan, checkpoint.clone()), 40)
        };
        let error = relative_of_most(&run(&gpu), &run(&Reference), plan.n_vocab);
        println!("{error:.2e} {name}");
        assert!(error <= 3e-2, "{name}: {error:e}");
    }
}

/// The logits of the rows of two sequences that are right: one in chunks of few tokens and of many with drafts, the
/// other with a draft that is never accepted.
pub fn with_drafts(backend: &dyn Backend, model: &(Plan, Arc<Checkpoint>), n_ids: u32) -> Vec<f32> {
    let n_vocab = model.0.n_vocab;
    let mut session = Session::new(backend, model, 300);
    let ids = |n, seed| tokens(n, seed).into_iter().map(|id| id % n_ids).collect::<Vec<u32>>();
    let (text, other) = (ids(280, 9), ids(60, 10));
    let (mut at, mut other_at, mut round) = (0, 0, 0);
    let mut all = Vec::new();
    while at + 120 < text.len() {
        // Some prompts are long enough for kernels of many tokens, after accepted drafts.
        let n = [1, 1, 4, 1, 2, 7, 1, 90][round % 8];
        let n_draft = [3, 0, MAX_DRAFT, 1, 2, 4, 3][round % 7];
        let n_right = [0, 2, MAX_DRAFT, 1, 3, 1, 4, 3][round % 8].min(n_draft);
        let mut drafts = text[at + n..at + n + n_draft].to_vec();
        drafts[n_right..].iter_mut().for_each(|id| *id = (*id + 1) % n_ids);
        let (is_with, wrong) = (other_at + 1 < other.len() && round % 3 > 0, [(other[other_at + 1] + 1) % n_ids]);
        let parts: [(usize, &[u32], &[u32]); 2] =
            [(1, &other[other_at..other_at + 1], &wrong), (0, &text[at..at + n], &drafts)];
        let (parts, accepted) = if is_with { (&parts[..], &[0, n_right][..]) } else { (&parts[1..], &[n_right][..]) };
        let logits = session.step_with_drafts(parts, accepted);
        let skip = if is_with { 2 * n_vocab } else { 0 };
        if is_with {
            all.extend_from_slice(&logits[..n_vocab]);
            other_at += 1;
        }
        all.extend_from_slice(&logits[skip..][..(n + n_right) * n_vocab]);
        at += n + n_right;
        if round % 5 == 2 {
            // Away and back: a copy takes the accepted drafts along.
            session.program.copy_state(0, 3);
            session.program.copy_state(2, 0);
            session.program.copy_state(3, 0);
        }
        round += 1;
    }
    assert!(round > 8 && other_at > 4, "{round} rounds, {other_at}");
    all
}

/// Single tokens of several sequences: the kernels for up to 8 rows, for 9 to 64 and for more, and the graphs of such
/// steps.
#[test]
fn many_sequences_agree_with_the_reference() {
    let Some(gpu) = gpu(CacheType::F16) else { return };
    let delta = Some((4, heads(2, 4, 64, 64, Sharing::Grouped)));
    let large = Shape { d_model: 256, d_ff: 256, n_head: 4, n_kv: 2, d_k: 64, d_v: 64, ..PLAIN };
    for (shape, most) in [
        (PLAIN, FLOATS_OFF),
        (Shape { types: [Q4_K, Q6_K, Q4_K, Q4_K, Q6_K], n_expert: 19, n_used: 4, ..large }, 3e-2),
        (Shape { types: [Q4_K, Q4_K, Q6_K, Q6_K, Q4_K], biases: true, act: CLAMPED, n_expert: 3, ..large }, 3e-2),
        (Shape { types: [BF16, F16, BF16, BF16, F16], d_ff: 52, delta, ..large }, 1e-2),
        (Shape { types: [Q8_0, Q5_0, Q5_1, Q4_0, MXFP4], sinks: true, window: Some(40), ..large }, 3e-2),
        (Shape { types: [Q5_K, Q3_K, Q2_K, IQ4_XS, Q4_K], fused: false, delta, ..large }, 3e-2),
        (Shape { types: [Q4_K, Q4_K, Q4_K, Q4_K, Q6_K], n_expert: 48, n_used: 4, ..large }, 3e-2),
    ] {
        for n in [2, 3, 5, 8, 9, 16, 33, 64, 65, 100, 129, 300] {
            let (found, exact) = (crowd(&gpu, &model(shape), n, 4), crowd(&Reference, &model(shape), n, 4));
            let error = relative_of_most(&found, &exact, N_VOCAB);
            println!("{n} sequences {error:.2e} (at most {most:.0e}) {:?}", shape.types);
            assert!(error <= most, "{n} sequences: {error:e} of at most {most:e}, {shape:?}");
        }
    }
}

/// Models of every family, quantised: what stands beside experts, gates and norms differ.
#[test]
fn many_sequences_of_every_family_agree_with_the_reference() {
    let Some(gpu) = gpu(CacheType::F16) else { return };
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data");
    let mut n_files = 0;
    for folder in std::fs::read_dir(data).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()) {
        for file in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            let name = file.strip_prefix(data).unwrap().to_string_lossy().into_owned();
            if !name.ends_with(".gguf") || name.contains("bf16") {
                continue;
            }
            let checkpoint = Arc::new(checkpoint::open(&file).unwrap());
            let model = (Plan::clone(&model::build(&checkpoint).unwrap()), checkpoint);
            for n in [2, 5, 8, 70] {
                let (found, exact) = (crowd(&gpu, &model, n, 8), crowd(&Reference, &model, n, 8));
                let error = relative_of_most(&found, &exact, model.0.n_vocab);
                println!("{n} sequences {error:.2e} {name}");
                assert!(error <= 3e-2, "{n} sequences of {name}: {error:e}");
            }
            n_files += 1;
        }
    }
    assert!(n_files >= 12, "{n_files} files");
}

/// Steps of single tokens with prompts among them: attention takes either by a separate kernel.
#[test]
fn prompts_among_sequences_agree_with_the_reference() {
    let Some(gpu) = gpu(CacheType::F16) else { return };
    let large = Shape { d_model: 256, d_ff: 256, n_head: 8, n_kv: 2, d_k: 64, d_v: 64, ..PLAIN };
    for shape in [
        Shape { types: [Q4_K, Q6_K, Q4_K, Q4_K, Q6_K], n_expert: 19, n_used: 4, ..large },
        Shape { types: [BF16; 5], sinks: true, window: Some(9), ..large },
        Shape { types: [BF16; 5], softcap: Some(4.0), d_k: 96, n_kv: 1, ..large },
    ] {
        for n in [2, 9, 40, 100, 170] {
            // Every 37th sequence has a prompt in the second step.
            let len = |step: usize, s: usize| if step == 1 && s % 37 == 1 { 20 } else { 1 };
            let run = |backend: &dyn Backend| crowd_of(backend, &model(shape), n, 4, len);
            let error = relative_of_most(&run(&gpu), &run(&Reference), N_VOCAB);
            println!("{n} sequences {error:.2e} {shape:?}");
            assert!(error <= 3e-2, "{n} sequences: {error:e}, {shape:?}");
        }
        // Contexts long enough for splits.
        let run = |backend: &dyn Backend| {
            let mut session = Session::with(backend, &model(shape), 900, 700);
            let mut all = session.step(&[(0, &tokens(300, 5)), (1, &tokens(33, 6))]).to_vec();
            all.extend_from_slice(session.step(&[(0, &tokens(1, 7)), (2, &tokens(90, 8)), (1, &tokens(1, 9))]));
            all.extend_from_slice(session.step(&[(2, &tokens(40, 10)), (1, &tokens(1, 11))]));
            all
        };
        let error = relative_of_most(&run(&gpu), &run(&Reference), N_VOCAB);
        println!("{error:.2e} {shape:?}");
        assert!(error <= 3e-2, "{error:e}, {shape:?}");
    }
}

/// The logits of the first tokens of `n` sequences side by side.
fn crowd(backend: &dyn Backend, model: &(Plan, Arc<Checkpoint>), n: usize, n_tokens: usize) -> Vec<f32> {
    crowd_of(backend, model, n, n_tokens, |_, _| 1)
}

/// The logits of the last token that each of `n` sequences has in each step, in which they have `len(step, sequence)`.
fn crowd_of(
    backend: &dyn Backend,
    (plan, weights): &(Plan, Arc<Checkpoint>),
    n: usize,
    n_steps: usize,
    len: impl Fn(usize, usize) -> usize,
) -> Vec<f32> {
    let most = (0..n_steps).map(|step| (0..n).map(|s| len(step, s)).sum::<usize>()).max().unwrap_or(0);
    let limits = Limits {
        max_tokens: most.max(9),
        max_outputs: n.max(9),
        n_pages: n,
        max_positions: PAGE,
        n_window_pages: 2 * n,
        n_states: n,
        max_draft: 0,
    };
    let plan = backend.lower(ValidPlan::new(plan.clone()).unwrap()).unwrap();
    let mut program = backend.compile(&plan, weights.clone(), limits).unwrap();
    let n_vocab = plan.n_vocab as u32;
    let text = |s: usize| tokens(PAGE, s as u64).into_iter().map(|token| token % n_vocab).collect();
    let texts: Vec<Vec<u32>> = (0..n).map(text).collect();
    let mut all = Vec::new();
    let mut batch = Batch::default();
    let mut n_past = vec![0; n];
    for step in 0..n_steps {
        batch.clear();
        for (s, text) in texts.iter().enumerate() {
            let page = [s as u32];
            let tables = Tables { pages: &page, window_pages: &page, first_window_block: 0, state: s as u32 };
            let (pos, len) = (n_past[s], len(step, s));
            batch.push(&text[pos..pos + len], pos, tables, [len - 1]);
            n_past[s] += len;
        }
        all.extend_from_slice(program.step(&batch).unwrap().logits);
    }
    all
}

/// Long contexts: many splits, merged in order; prefill in large steps and decode see the same.
#[test]
fn long_contexts_agree_with_the_reference() {
    let Some(gpu) = gpu(CacheType::F32) else { return };
    let shape = Shape { n_head: 8, n_kv: 2, sinks: true, ..PLAIN };
    let run = |backend: &dyn Backend| {
        let mut session = Session::with(backend, &model(shape), 1400, 600);
        let prompt = tokens(1300, 5);
        let mut all = Vec::new();
        for chunk in prompt.chunks(600) {
            let logits = session.step(&[(0, chunk)]);
            all.extend_from_slice(&logits[logits.len() - N_VOCAB..]);
        }
        for i in 0..4 {
            all.extend_from_slice(session.step(&[(0, &prompt[i..=i])]));
        }
        all
    };
    let error = relative(&run(&gpu), &run(&Reference));
    println!("{error:.2e}");
    assert!(error <= FLOATS_OFF, "{error:e}");
}

/// Prompts of hundreds of rows, beside which experts have more pairs than a tile; heads of all widths.
#[test]
fn long_prompts_agree_with_the_reference() {
    let Some(gpu) = gpu(CacheType::F16) else { return };
    let few = Shape { d_model: 256, d_ff: 288, n_expert: 3, ..PLAIN };
    let wide = |d_k, d_v| Shape { n_head: 6, n_kv: 2, d_k, d_v, ..PLAIN };
    for (shape, most) in [
        (Shape { types: [Q4_K, Q6_K, Q4_K, Q4_K, Q8_0], biases: true, act: CLAMPED, d_ff: 256, ..few }, 3e-2),
        (Shape { types: [Q8_0, Q4_0, Q5_0, Q5_0, MXFP4], fused: false, ..few }, 3e-2),
        (Shape { types: [BF16, Q3_K, Q6_K, Q6_K, IQ4_NL], ..few }, 3e-2),
        (few, 1e-2),
        (Shape { window: Some(70), ..wide(128, 128) }, 1e-2),
        (Shape { window: Some(33), forgets: true, ..wide(256, 256) }, 1e-2),
        (Shape { softcap: Some(4.0), sinks: true, ..wide(512, 512) }, 1e-2),
        (Shape { n_head: 70, n_kv: 1, ..wide(96, 64) }, 1e-2),
    ] {
        let run = |backend: &dyn Backend| {
            let mut session = Session::with(backend, &model(shape), 500, 400);
            let mut all = session.step(&[(0, &tokens(301, 5)), (1, &tokens(99, 6))]).to_vec();
            all.extend_from_slice(session.step(&[(0, &tokens(90, 7))]));
            all
        };
        let error = relative_of_most(&run(&gpu), &run(&Reference), N_VOCAB);
        println!("{error:.2e} {shape:?}");
        assert!(error <= most, "{error:e} {shape:?}");
    }
}

/// Caches in blocks of 8 bits: prompts, which read floats, alone and alongside single tokens, and single tokens after
/// contexts of one page and of many.
#[test]
fn caches_of_blocks_agree_with_the_reference() {
    let of = |k, v| CacheType { k, v };
    let wide = |d| Shape { n_head: 6, n_kv: 2, d_k: d, d_v: d, ..PLAIN };
    for (cache, shape) in [
        (CacheType::Q8_0, wide(64)),
        (CacheType::Q8_0, Shape { n_head: 8, n_kv: 1, sinks: true, ..wide(128) }),
        (CacheType::Q8_0, Shape { window: Some(70), softcap: Some(4.0), ..wide(256) }),
        (CacheType::Q8_0, Shape { window: Some(33), forgets: true, ..wide(128) }),
        (CacheType::Q8_0, Shape { d_v: 64, ..wide(96) }),
        (of(KvType::Q8_0, KvType::F16), wide(128)),
        (of(KvType::F16, KvType::Q8_0), wide(64)),
    ] {
        let Some(gpu) = gpu(cache) else { return };
        let run = |backend: &dyn Backend| {
            let mut session = Session::with(backend, &model(shape), 1000, 400);
            let short = tokens(30, 9);
            let mut all = Vec::new();
            for i in 0..3 {
                all.extend_from_slice(session.step(&[(2, &short[i..=i])]));
            }
            all.extend_from_slice(session.step(&[(0, &tokens(301, 5)), (1, &tokens(99, 6))]));
            for i in 3..6 {
                let one = &short[i..=i];
                all.extend_from_slice(session.step(&[(0, one), (1, one), (2, one)]));
                all.extend_from_slice(session.step(&[(0, one)]));
            }
            all.extend_from_slice(session.step(&[(0, &tokens(333, 7)), (1, &short[..1]), (2, &short[1..2])]));
            for i in 6..9 {
                all.extend_from_slice(session.step(&[(0, &short[i..=i])]));
            }
            all
        };
        let error = relative_of_most(&run(&gpu), &run(&Rounded(cache)), N_VOCAB);
        println!("{error:.2e} {cache} {shape:?}");
        assert!(error <= 1e-2, "{error:e} {cache} {shape:?}");
    }
}

/// A token whose embedding is NaN loses its own sequence and no other.
#[test]
fn a_broken_sequence_leaves_the_others_alone() {
    let Some(gpu) = gpu(CacheType::F32) else { return };
    for types in [[F32; 5], [Q8_0, Q4_0, Q4_1, Q5_0, Q8_0]] {
        let shape = Shape { types, ..PLAIN };
        let (good, mut bad) = (tokens(9, 1), tokens(7, 2));
        bad[4] = BAD;
        let mut session = Session::new(&gpu, &model(shape), 64);
        let out = session.step_with_faults(&[(0, &good), (1, &bad)]);
        assert_eq!(out.faults, [Fault { chunk: 1, layer: 0, token: 13 }]);
        let beside = out.logits[..9 * N_VOCAB].to_vec();
        let mut session = Session::new(&gpu, &model(shape), 64);
        let alone = session.step(&[(0, &good)]).to_vec();
        let error = relative(&beside, &alone);
        assert!(error <= 1e-2, "{types:?}: {error:e}");
    }
}

/// Traced routing is what the reference chose.
#[test]
fn routing_is_traced() {
    let Some(gpu) = gpu(CacheType::F32) else { return };
    let run = |backend: &dyn Backend| {
        let mut session = Session::new(backend, &model(PLAIN), 64);
        session.program.trace_routing(true);
        let mut all = session.step_with_faults(&[(0, &tokens(9, 1)), (1, &tokens(4, 2))]).routing.unwrap().to_vec();
        all.extend_from_slice(session.step_with_faults(&[(1, &tokens(1, 3))]).routing.unwrap());
        all
    };
    assert_eq!(run(&gpu), run(&Reference));
}

#[test]
fn what_the_device_cannot_hold_is_an_error_that_says_so() {
    let Some(gpu) = gpu(CacheType::F32) else { return };
    let (plan, weights) = model(PLAIN);
    let plan = ValidPlan::new(plan).unwrap();
    let limits = Limits {
        max_tokens: 32,
        max_outputs: 1,
        n_pages: 1 << 31,
        max_positions: 64,
        n_window_pages: 4,
        n_states: 1,
        max_draft: 0,
    };
    let error = gpu.compile(&plan, weights, limits).map(drop).unwrap_err().to_string();
    assert!(error.contains("key-value cache") && error.contains("free"), "{error}");
}

/// Steps refuse what the batch's check refuses, and go on afterwards.
#[test]
fn a_refused_batch_changes_nothing() {
    let Some(gpu) = gpu(CacheType::F32) else { return };
    let mut session = Session::new(&gpu, &model(PLAIN), 64);
    let first = session.step(&[(0, &[1, 2, 3])]).to_vec();
    let mut batch = Batch::default();
    batch.push(&[1], 0, Tables { pages: &[9999], ..Tables::default() }, 0..1);
    assert!(session.program.step(&batch).is_err());
    session.n_past[0] = 0;
    assert_eq!(session.step(&[(0, &[1, 2, 3])]), first);
    assert_eq!(PAGE, 32);
}

/// What the device picks from a row is what the host picks from its logits.
#[test]
fn picks_are_those_of_the_row() {
    let Some(gpu) = gpu(CacheType::F32) else { return };
    let batch = |asks: &[Ask]| {
        let mut batch = Batch::default();
        let tables = Tables { pages: &[0, 1], ..Tables::default() };
        batch.push(&tokens(asks.len(), 1), 0, tables, 0..asks.len());
        batch.asks.copy_from_slice(asks);
        batch.listed.extend([5, 96, 0, 5]);
        batch
    };
    let best = |n, first_listed, n_listed| Ask::Best { n, first_listed, n_listed, mask: None, log_sum_exp: true };
    let asks = [best(1, 0, 4), Ask::Logits, best(40, 1, 2), Ask::Hidden, best(64, 0, 0), best(97, 2, 1), best(1, 0, 0)];
    let run = |asks: &[Ask]| {
        let mut session = Session::new(&gpu, &model(PLAIN), 64);
        let out = session.program.step(&batch(asks)).unwrap();
        (out.logits.to_vec(), out.picks.clone())
    };
    let (logits, _) = run(&[Ask::Logits; 7]);
    let mut wanted = Picks::default();
    wanted.fill(&batch(&asks), &logits, N_VOCAB);
    let (row, found) = run(&asks);
    assert_eq!(row[N_VOCAB..2 * N_VOCAB], logits[N_VOCAB..2 * N_VOCAB]);
    for i in 0..asks.len() {
        let (Some(found), Some(wanted)) = (found.get(i), wanted.get(i)) else {
            assert!(found.get(i).is_none() && wanted.get(i).is_none(), "row {i}");
            continue;
        };
        assert_eq!((found.best, found.listed, found.bad), (wanted.best, wanted.listed, wanted.bad), "row {i}");
        assert!((found.log_sum_exp - wanted.log_sum_exp).abs() < 1e-5, "row {i}: {found:?} {wanted:?}");
    }
}
