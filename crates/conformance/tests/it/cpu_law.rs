//! Random whole models on every backend of the table: against the reference, and against themselves in other chunks and
//! other company. The CPU gives the same bits, also for every instruction set and number of threads.
use backend::Backend;
use backend::CacheType;
use backend::reference::Reference;
use conformance::backends::{self, BLOCKS, Row, cpu_with, isas};
use conformance::{BAD, MAX_DRAFT, N_VOCAB, PLAIN, Session, Shape, model, tokens};
use cpu::Isa;
use model::plan::{DeltaHeads, DeltaRule, Gate, RopePairing, Sharing};
use quant::WeightType::*;
use quant::{ScaleType, WeightType};

const CLAMPED: Gate = Gate::ClampedSwiglu { alpha: 1.702, limit: 1.0 };

/// Shapes that differ from each other in every field.
/// A cache of each kind of numbers.
const CACHES: [CacheType; 3] = [CacheType::F16, CacheType::Q8_0, CacheType::Q4_0];

const SHAPES: [Shape; 7] = [
    PLAIN,
    Shape { n_head: 8, n_kv: 1, d_k: 128, d_v: 128, pairing: RopePairing::Interleaved, fused: false, ..PLAIN },
    Shape { n_head: 3, n_kv: 3, d_k: 80, d_v: 80, window: Some(40), act: Gate::GeluTanh, n_used: 8, ..PLAIN },
    Shape { d_model: 52, n_head: 10, n_kv: 2, d_k: 20, d_v: 24, softcap: Some(4.0), n_expert: 19, d_ff: 33, ..PLAIN },
    Shape { n_head: 6, n_kv: 2, window: Some(513), types: [F32, BF16, F16, F32, BF16], n_used: 1, ..PLAIN },
    Shape {
        n_head: 5,
        n_kv: 1,
        d_k: 256,
        d_v: 256,
        window: Some(16),
        sinks: true,
        biases: true,
        act: CLAMPED,
        ..PLAIN
    },
    Shape { n_head: 2, n_kv: 1, d_k: 512, d_v: 512, sinks: true, act: Gate::GeluTanh, fused: false, ..PLAIN },
];

/// Quantized types: of one kind, of both kinds alongside each other, and gate and up of unlike kinds.
const QUANTIZED: [Shape; 3] = [
    Shape { types: [Q8_0, Q4_0, Q4_1, Q5_0, Q8_0], ..PLAIN },
    Shape { d_model: 256, d_ff: 256, types: [Q4_K, Q6_K, Q4_K, Q4_K, Q6_K], ..PLAIN },
    Shape { d_model: 256, d_ff: 256, types: [Q4_K, Q8_0, Q4_K, Q8_0, Q5_K], biases: true, act: CLAMPED, ..PLAIN },
];

/// Types of MLX folders: every width, group and type of scales.
const PLANAR: [Shape; 2] = [
    Shape {
        d_model: 128,
        d_ff: 128,
        types: [
            affine(4, 64, ScaleType::BF16),
            affine(8, 128, ScaleType::F16),
            affine(3, 32, ScaleType::F32),
            affine(6, 64, ScaleType::BF16),
            MXFP4_PLANAR,
        ],
        ..PLAIN
    },
    Shape {
        types: [
            affine(5, 32, ScaleType::F16),
            affine(2, 64, ScaleType::BF16),
            affine(8, 64, ScaleType::BF16),
            affine(4, 64, ScaleType::BF16),
            affine(4, 32, ScaleType::F16),
        ],
        fused: false,
        ..PLAIN
    },
];

const fn affine(bits: usize, group: usize, scales: ScaleType) -> WeightType {
    match quant::Affine::new(bits, group, scales) {
        Some(affine) => Affine(affine),
        None => panic!("no such type"),
    }
}

/// A delta rule before attention: heads in one block of 32 columns and in odd pieces, both ways to share keys.
const DELTA: [Shape; 6] = [
    Shape { delta: Some((4, heads(2, 4, 128, 128, Sharing::Grouped))), ..PLAIN },
    Shape { delta: Some((2, heads(3, 3, 20, 24, Sharing::Tiled))), fused: false, ..PLAIN },
    Shape { delta: Some((5, heads(2, 6, 7, 57, Sharing::Tiled))), ..PLAIN },
    Shape { delta: Some((4, heads(2, 4, 12, 37, Sharing::Grouped))), by_row: true, ..PLAIN },
    Shape { delta: Some((4, DeltaHeads { rule: DeltaRule::Sum, ..heads(2, 4, 24, 37, Sharing::Grouped) })), ..PLAIN },
    Shape {
        d_model: 256,
        delta: Some((3, heads(1, 4, 64, 64, Sharing::Grouped))),
        types: [Q4_K; 5],
        d_ff: 256,
        ..PLAIN
    },
];

const fn heads(n_k_head: usize, n_v_head: usize, d_k: usize, d_v: usize, sharing: Sharing) -> DeltaHeads {
    DeltaHeads { n_k_head, n_v_head, d_k, d_v, sharing, rule: DeltaRule::Delta }
}

fn same(found: &[f32], wanted: &[f32], what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    if let Some(i) = (0..found.len()).find(|&i| found[i].to_bits() != wanted[i].to_bits()) {
        panic!("{what}: row {} column {}: {} and {}", i / N_VOCAB, i % N_VOCAB, found[i], wanted[i]);
    }
}

/// Relative L2 distance, and where the two are furthest apart.
fn distance(found: &[f32], wanted: &[f32]) -> (f64, String) {
    assert_eq!(found.len(), wanted.len());
    let off = |i: usize| (f64::from(found[i]) - f64::from(wanted[i])).abs();
    let error = (0..found.len()).map(|i| off(i).powi(2)).sum::<f64>();
    let size = wanted.iter().map(|a| f64::from(*a).powi(2)).sum::<f64>();
    let at = (0..found.len()).max_by(|&a, &b| off(a).total_cmp(&off(b))).unwrap();
    let place = format!("row {} column {}: {} and {}", at / N_VOCAB, at % N_VOCAB, found[at], wanted[at]);
    ((error / size).sqrt(), place)
}

/// Logits are as near as the table says: 0 demands the same bits.
fn near(found: &[f32], wanted: &[f32], most: f64, what: &str) {
    if most == 0.0 {
        return same(found, wanted, what);
    }
    let (error, place) = distance(found, wanted);
    let passes = error <= most; // which NaN does not
    assert!(passes, "{what}: off by {error:e}, at most {most:e}; {place}");
}

#[test]
fn whole_models_agree_with_the_reference() {
    for shape in SHAPES.into_iter().chain(DELTA.into_iter().take(3)) {
        let model = model(shape);
        for n in [1, 2, 3, 31, 32, 33, 100] {
            let prompts: Vec<Vec<u32>> = (0..3).map(|s| tokens(n + 5 * s, s as u64)).collect();
            let parts: Vec<(usize, &[u32])> = prompts.iter().enumerate().map(|(s, t)| (s, &t[..])).collect();
            let exact = Session::new(&Reference, &model, 400).step(&parts).to_vec();
            for Row { name, backend, model: most, .. } in backends::distinct() {
                let Some(most) = most else { continue };
                let mut found = Session::new(&*backend, &model, 400);
                near(found.step(&parts), &exact, most, &format!("{name}, {n} tokens of {shape:?}"));
            }
        }
    }
}

/// On every backend: the same logits, to the bit where the table demands it, however a prompt is cut and whatever runs
/// beside it; and the bits of a backend's twin.
#[test]
fn chunks_and_company_change_nothing() {
    let shapes = SHAPES.iter().chain(&QUANTIZED).chain(&PLANAR).chain(&DELTA);
    for (i, shape) in shapes.enumerate() {
        let model = model(*shape);
        let prompt = tokens(70, 9);
        let rows: Vec<Row> = backends::rows().into_iter().filter(|row| row.fits(&model.0)).collect();
        let mut wholes: Vec<(&str, Vec<f32>)> = Vec::new();
        for (j, Row { name, backend, twin, cut, .. }) in rows.iter().enumerate() {
            let whole = Session::new(&**backend, &model, 128).step(&[(0, &prompt)]).to_vec();
            let twin = wholes.iter().find(|(other, _)| twin.as_deref() == Some(other));
            if let Some((other, twin)) = twin {
                same(&whole, twin, &format!("{name} and {other}, {shape:?}"));
            }
            let chunks = [&[1, 30, 1, 1, 37][..], &[33, 32, 5]][(i + j) % 2];
            let mut session = Session::new(&**backend, &model, 128);
            let (mut at, mut logits) = (0, Vec::new());
            for (i, &n) in chunks.iter().enumerate() {
                let others = [tokens(1 + i * 7, 1), tokens(3, 2)];
                let own = (0, &prompt[at..at + n]);
                let all = session.step(&[(1, &others[0]), own, (2, &others[1])]);
                logits.extend_from_slice(&all[others[0].len() * N_VOCAB..][..n * N_VOCAB]);
                at += n;
            }
            near(&logits, &whole, *cut, &format!("{name}, chunks {chunks:?}, {shape:?}"));
            wholes.push((name, whole));
        }
    }
}

/// The CPU's own part of the law: instruction sets and threads, in chunks and in company. `MOEBIUS_WITNESS` names the
/// instruction set that all others are held to, for emulators in which scalar code rounds otherwise.
#[test]
fn instruction_sets_and_threads_change_no_bit() {
    let named = std::env::var("MOEBIUS_WITNESS").ok();
    let witness: Isa = named.as_deref().map_or(Isa::Scalar, |isa| isa.parse().expect("an instruction set"));
    for (shape, cache) in SHAPES
        .iter()
        .chain(&QUANTIZED)
        .chain(&PLANAR)
        .chain(&DELTA)
        .zip([CacheType::F16, CacheType::F32].into_iter().chain(BLOCKS).cycle())
    {
        let model = model(*shape);
        let cache = if cache.misfit(&model.0).is_some() { CacheType::F16 } else { cache };
        let prompt = tokens(70, 9);
        let mut whole = Session::new(&cpu_with(witness, 1, cache), &model, 128);
        let whole = whole.step(&[(0, &prompt)]).to_vec();
        for isa in isas().filter(|&isa| named.is_none() || isa != Isa::Scalar) {
            for (threads, chunks) in [(1, &[70][..]), (2, &[1, 30, 1, 1, 37]), (3, &[33, 32, 5])] {
                let mut session = Session::new(&cpu_with(isa, threads, cache), &model, 128);
                let (mut at, mut logits) = (0, Vec::new());
                for (i, &n) in chunks.iter().enumerate() {
                    let others = [tokens(1 + i * 7, 1), tokens(3, 2)];
                    let own = (0, &prompt[at..at + n]);
                    let first = session.step(&[(1, &others[0]), own, (2, &others[1])]);
                    let skip = others[0].len() * N_VOCAB;
                    logits.extend_from_slice(&first[skip..skip + n * N_VOCAB]);
                    at += n;
                }
                same(&logits, &whole, &format!("{isa}, {threads} threads, chunks {chunks:?}, {shape:?}"));
            }
        }
    }
}

/// Drafts that are right, wrong and right up to a point, in chunks of one token and of many, across the ends of pages
/// and behind copies of states: whatever was accepted, every row has the bits of a run without drafts.
#[test]
fn drafts_change_no_bit() {
    let windowed = Shape { forgets: true, ..SHAPES[2] };
    for (i, shape) in DELTA.into_iter().chain([PLAIN, windowed]).enumerate() {
        let model = model(shape);
        let (prompt, other) = (tokens(150, 9), tokens(60, 10));
        let mut backends: Vec<Box<dyn Backend>> = vec![];
        for (isa, threads) in isas().zip(1..) {
            backends.push(Box::new(cpu_with(isa, 1 + (threads + i) % 3, CacheType::F16)));
        }
        if i < 2 {
            backends.push(Box::new(Reference));
        }
        for backend in backends {
            let mut plain = Session::new(&*backend, &model, 160);
            let whole = plain.step(&[(0, &prompt)]).to_vec();
            let other_whole = plain.step(&[(1, &other)]).to_vec();
            let mut session = Session::new(&*backend, &model, 160);
            let (mut at, mut other_at, mut round) = (0, 0, 0);
            while at < prompt.len() - 12 {
                let n = [1, 1, 4, 1, 2, 7][round % 6];
                let n_draft = [3, 0, MAX_DRAFT, 1, 2][round % 5];
                let n_right = [0, 2, MAX_DRAFT, 1, 3, 1, 4][round % 7].min(n_draft);
                // The sampler may stop before a draft that is right.
                let n_accepted = n_right.saturating_sub(usize::from(round % 4 == 3));
                let mut drafts = prompt[at + n..at + n + n_draft].to_vec();
                drafts[n_right..].iter_mut().for_each(|token| *token = (*token + 1) % BAD);
                let n_other = (other.len() - other_at - 1).min(2);
                let parts = [
                    (
                        1,
                        &other[other_at..other_at + 1 + n_other / 2],
                        &other[other_at + 1 + n_other / 2..][..n_other / 2],
                    ),
                    (0, &prompt[at..at + n], &drafts[..]),
                ];
                let is_with = other_at + 2 < other.len();
                let parts = if is_with { &parts[..] } else { &parts[1..] };
                let accepted = if is_with { &[0, n_accepted][..] } else { &[n_accepted] };
                let logits = session.step_with_drafts(parts, accepted);
                let what = format!("{}, round {round}, token {at}, {shape:?}", backend.name());
                let skip = if is_with { (1 + n_other / 2 * 2) * N_VOCAB } else { 0 };
                if is_with {
                    same(&logits[..skip], &other_whole[other_at * N_VOCAB..][..skip], &what);
                    other_at += 1 + n_other / 2;
                }
                // Rows up to the last right draft.
                let n_rows = n + n_right;
                same(&logits[skip..][..n_rows * N_VOCAB], &whole[at * N_VOCAB..][..n_rows * N_VOCAB], &what);
                at += n + n_accepted;
                if shape.delta.is_some() && round % 5 == 2 {
                    // Away and back: a copy takes the accepted drafts along.
                    session.program.copy_state(0, 3);
                    session.program.copy_state(2, 0);
                    session.program.copy_state(3, 0);
                }
                round += 1;
            }
            assert!(round > 20 && other_at > 20);
        }
    }
}

#[test]
fn states_wait_for_their_drafts() {
    let model = model(DELTA[1]);
    let backends: [&dyn Backend; 2] = [&cpu_with(Isa::best(), 2, CacheType::F32), &Reference];
    for backend in backends {
        let mut session = Session::new(backend, &model, 64);
        session.batch.clear();
        let tables = |state| backend::Tables { pages: &[0, 1], state, ..Default::default() };
        session.batch.push(&[1, 2], 0, tables(1), [1]);
        session.batch.push_drafts(&[3, 4]);
        session.program.step(&session.batch).unwrap();
        session.batch.clear();
        session.batch.push(&[3], 2, tables(1), [0]);
        let why = "chunk 0 goes on from state 1, whose drafts are not committed";
        let refused = session.program.step(&session.batch).err();
        assert_eq!(refused, Some(backend::StepError::Batch(why.into())), "{}", backend.name());
        session.program.drafts().unwrap().commit(1, 0);
        assert!(session.program.step(&session.batch).is_ok());
        // Nothing waits where a sequence starts anew.
        for pos in [3, 0, 1] {
            session.batch.clear();
            session.batch.push(&[5], pos, tables(1), [0]);
            if pos == 3 {
                session.batch.push_drafts(&[6]);
            }
            assert!(session.program.step(&session.batch).is_ok(), "{pos}");
        }
    }
}

#[test]
fn segments_merge_alike_in_prefill_and_decode() {
    let of = |i: usize, cache| (SHAPES[i], cache);
    let floats = [of(0, CacheType::F16), of(3, CacheType::F32), of(4, CacheType::F16), of(6, CacheType::F32)];
    let blocks = [of(0, CacheType::Q8_0), of(1, BLOCKS[1]), of(4, CacheType::Q8_0), of(5, BLOCKS[2])];
    let rotated = [of(0, CacheType::Q4_0), of(4, BLOCKS[4])];
    for (shape, cache) in floats.into_iter().chain(blocks).chain(rotated) {
        let model = model(shape);
        let prompt = tokens(1030, 4);
        let mut whole = Session::new(&cpu_with(Isa::best(), 1, cache), &model, 1056);
        let whole = whole.step(&[(0, &prompt)]).to_vec();
        for threads in [2, 3] {
            let mut session = Session::new(&cpu_with(Isa::best(), threads, cache), &model, 1056);
            let mut at = 0;
            for n in [511, 1, 1, 1, 510, 1, 1, 4] {
                let logits = session.step(&[(0, &prompt[at..at + n])]);
                same(logits, &whole[at * N_VOCAB..(at + n) * N_VOCAB], &format!("{threads} threads, token {at}"));
                at += n;
            }
        }
    }
}

/// With more threads than chunks of rows, threads divide the columns too.
#[test]
fn many_threads_give_the_same_bits() {
    let prompt = tokens(300, 5);
    for (i, shape) in SHAPES.into_iter().enumerate() {
        let model = model(shape);
        for cache in CACHES.into_iter().filter(|cache| cache.misfit(&model.0).is_none()) {
            let run = |threads| {
                let mut session = Session::new(&cpu_with(Isa::best(), threads, cache), &model, 320);
                session.step(&[(0, &prompt)]).to_vec()
            };
            same(&run(13), &run(1), &format!("shape {i}, {cache} cache"));
        }
    }
}

#[test]
fn contexts_longer_than_a_round_of_segments_give_the_same_bits() {
    let model = model(Shape { n_head: 8, n_kv: 4, ..PLAIN });
    let run = |isa, threads, cache| {
        let mut session = Session::new(&cpu_with(isa, threads, cache), &model, 21_000);
        session.step(&[(0, &tokens(300, 3))]);
        // What lies between is a cache of zeros.
        session.n_past[0] = 20_000;
        session.step(&[(0, &tokens(3, 5)), (1, &tokens(2, 6))]).to_vec()
    };
    for cache in CACHES {
        let wanted = run(Isa::best(), 1, cache);
        assert!(wanted.iter().all(|x| x.is_finite()));
        for threads in [2, 3] {
            same(&run(Isa::best(), threads, cache), &wanted, &format!("{threads} threads, {cache} cache"));
        }
    }
}

/// Windows whose edges lie on, before and behind the edges of pages and segments.
#[test]
fn windows_end_where_the_reference_ends_them() {
    let prompt = tokens(580, 3);
    for window in [1, 15, 16, 31, 32, 33, 64, 511, 512, 513, 579] {
        let model = model(Shape { n_head: 2, n_kv: 1, window: Some(window), sinks: window % 2 == 1, ..PLAIN });
        let mut exact = Session::new(&Reference, &model, 608);
        let rows: Vec<(Row, f64)> =
            backends::distinct().into_iter().filter_map(|row| row.model.map(|most| (row, most))).collect();
        let mut found: Vec<Session> = rows.iter().map(|(row, _)| Session::new(&*row.backend, &model, 608)).collect();
        let mut at = 0;
        for n in [31, 1, 1, 480, 1, 60, 1, 5] {
            let part = &[(0, &prompt[at..at + n])];
            let exact = exact.step(part);
            for ((row, most), found) in rows.iter().zip(&mut found) {
                let what = format!("{}, window {window}, tokens {at}..{}", row.name, at + n);
                near(found.step(part), exact, *most, &what);
            }
            at += n;
        }
    }
}

/// A page of NaN where the window does not reach leaves no trace, which it would if it were read.
#[test]
fn pages_outside_the_window_are_not_read() {
    for (window, past, first_seen) in [(16, 100, 2), (32, 96, 2), (33, 96, 1), (513, 1100, 18)] {
        let model = model(Shape { window: Some(window), sinks: true, ..PLAIN });
        // Blocks keep no NaN.
        for (i, (row, n)) in floats().iter().flat_map(|row| [(row, 1), (row, 21)]).enumerate() {
            if past > 1000 && i < 2 {
                continue; // The reference needs seconds for it.
            }
            let run = |spoil: bool| {
                let mut session = Session::new(&*row.backend, &model, 1152);
                session.step(&[(0, &tokens(past, 1))]);
                session.step_with_faults(&[(1, &[BAD; 32])]);
                if spoil {
                    let bad = session.pages[1][0];
                    session.pages[0][..first_seen].fill(bad);
                }
                session.step(&[(0, &tokens(n, 2))]).to_vec()
            };
            let (clean, spoilt) = (run(false), run(true));
            assert!(clean.iter().all(|x| x.is_finite()));
            same(&spoilt, &clean, &format!("{}, window {window} at {past}", row.name));
        }
    }
}

/// Rows whose caches are floats.
fn floats() -> Vec<Row> {
    backends::distinct().into_iter().filter(|row| row.blocks.is_none()).collect()
}

#[test]
fn what_lies_in_unwritten_positions_is_never_seen() {
    for (shape, Row { name, backend, .. }) in
        [PLAIN, DELTA[0]].into_iter().flat_map(|shape| backends::distinct().into_iter().map(move |row| (shape, row)))
    {
        let model = model(shape);
        let prompt = tokens(40, 7);
        let mut fresh = Session::new(&*backend, &model, 64);
        let wanted = fresh.step(&[(0, &prompt)]).to_vec();
        // The same pages and the same state, used before by a longer sequence.
        let mut used = Session::new(&*backend, &model, 64);
        used.step(&[(0, &tokens(64, 8))]);
        used.n_past[0] = 0;
        same(used.step(&[(0, &prompt)]), &wanted, &format!("{name}: memory used before"));
    }
}

/// A cache that keeps its window only, in pages that are used again and again, gives the bits of one that keeps
/// everything.
#[test]
fn windows_forget_nothing_that_is_seen() {
    for shape in [SHAPES[2], SHAPES[4]] {
        let (keeps, forgets) = (model(shape), model(Shape { forgets: true, ..shape }));
        let prompt = tokens(700, 11);
        for Row { name, backend, cut, .. } in backends::distinct().into_iter().filter(|row| row.fits(&keeps.0)) {
            let mut whole = Session::new(&*backend, &keeps, 704);
            let whole = whole.step(&[(0, &prompt)]).to_vec();
            let mut session = Session::with(&*backend, &forgets, 704, 64 + 20);
            let mut at = 0;
            for n in [64, 64, 64, 1, 1, 62, 7, 33, 64, 31, 64, 60, 1, 1, 1, 1, 64, 64, 50, 3] {
                let others = [tokens(1 + n % 11, 1), tokens(9, 2)];
                let logits = session.step(&[(1, &others[0]), (0, &prompt[at..at + n]), (2, &others[1])]);
                let skip = others[0].len() * N_VOCAB;
                let (found, wanted) = (&logits[skip..skip + n * N_VOCAB], &whole[at * N_VOCAB..(at + n) * N_VOCAB]);
                near(found, wanted, cut, &format!("{name}, token {at}, {shape:?}"));
                at += n;
            }
            assert_eq!(at, prompt.len());
        }
    }
}
