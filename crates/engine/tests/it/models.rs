//! Draft models: toys that show every mistake as a wrong draft, and random models and schedules, whose texts are those
//! without drafts, to the bit.

use std::sync::Arc;

use backend::{Backend, CacheType, Kinds, Limits, PAGE, Program, reference::Reference};
use checkpoint::Checkpoint;
use cpu::Cpu;
use engine::scheduler::{Engine, Events, Options, Request};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::drafts::long;
use crate::heads;
use crate::toy::*;

/// Limits of a toy that drafts, for up to `n` sequences.
fn drafting(n: usize, limits: Limits) -> Limits {
    Limits { n_states: 2 * n + 4, max_draft: 0, ..limits }
}

/// An engine over a toy for which another drafts up to `n` tokens.
fn engine_with(kinds: [Kinds; 2], limits: [Limits; 2], options: Options, trouble: [Trouble; 2], n: usize) -> Engine {
    let mut engine = engine_of(kinds[0], limits[0], options, trouble[0]);
    engine.set_draft_model(Box::new(Toy::new(limits[1], kinds[1], trouble[1])), n).unwrap();
    engine
}

/// What requests come to by themselves, without drafts.
fn alone(kinds: Kinds, requests: &[Request]) -> Vec<Answer> {
    let plain = || engine_of(kinds, roomy(), Options::default(), Trouble::default());
    requests.iter().map(|r| run(&mut plain(), r.clone()).0).collect()
}

fn greedy(request: Request) -> Request {
    Request { sampling: sampling(0.0, 1), ignore_eos: true, ..request }
}

/// A model like the one that it drafts for is always right, whatever its memory: each step gives a token more than it
/// has drafts.
#[test]
fn a_model_like_it_is_right() {
    for kinds in KINDS {
        for (n, max_tokens) in [(1, 40), (3, 512), (7, 40)] {
            let request = greedy(long(1, 150, 100));
            let alone = alone(kinds, std::slice::from_ref(&request));
            let limits = Limits { max_draft: 7, ..roomy() };
            let options = Options { max_running: 4, ..Options::default() };
            let small = Limits { max_tokens, ..drafting(4, roomy()) };
            let mut engine = engine_with([kinds; 2], [limits, small], options, Default::default(), n as usize);
            let id = engine.submit(request).unwrap();
            assert_eq!(answer(&drain(&mut engine), id).0, alone[0], "{kinds:?}");
            let stats = engine.stats();
            assert_eq!(stats.drafted, stats.accepted, "{kinds:?}");
            // A step of the prompt, and those of the first tokens, while the small one reads it in pieces; at the ends
            // of pages there are fewer drafts.
            let pieces = 150u64.div_ceil(max_tokens as u64) + 2;
            let (least, pages) = (1 + 99u64.div_ceil(n + 1), 2 * (250 / PAGE as u64 + 1));
            assert!((least..=least + pages + pieces).contains(&stats.steps), "{} steps of {n}, {kinds:?}", stats.steps);
        }
    }
}

/// Likeliest token after a text.
fn likeliest(kinds: Kinds, tokens: &[u32]) -> u32 {
    let mut row = [0.0; N_VOCAB];
    logits(kinds, tokens, &mut row);
    (0..N_VOCAB as u32).max_by(|&a, &b| row[a as usize].total_cmp(&row[b as usize])).unwrap()
}

/// Drafts that a model like it makes of a text whose answer begins at `n_prompt`, up to `n` a step, and those that are
/// right.
fn expected_drafts(kinds: Kinds, text: &[u32], n_prompt: usize, n: usize) -> (u64, u64) {
    let (mut drafted, mut accepted, mut known) = (0, 0, n_prompt + 1);
    while known < text.len() {
        let mut drafts = text[..known].to_vec();
        (0..n.min(text.len() - known - 1)).for_each(|_| drafts.push(likeliest(kinds, &drafts)));
        let n_right = drafts[known..].iter().zip(&text[known..]).take_while(|(draft, token)| draft == token).count();
        drafted += (drafts.len() - known) as u64;
        accepted += n_right as u64;
        known += n_right + 1;
    }
    (drafted, accepted)
}

/// After drafts that were wrong, in full or from some on, it continues the text: where tokens are drawn, exactly
/// those drafts are right that are what was drawn.
#[test]
fn wrong_drafts_are_taken_back() {
    let (mut drafted, mut accepted) = (0, 0);
    for kinds in KINDS {
        for (seed, n) in [(1, 1), (2, 2), (3, 3), (4, 7)] {
            let request = Request { sampling: sampling(0.4, seed), ..long(seed, 20, 300) };
            let alone = alone(kinds, std::slice::from_ref(&request));
            let options = Options { max_running: 4, prefix_cache: false, ..Options::default() };
            let limits = [Limits { max_draft: 7, ..roomy() }, drafting(4, roomy())];
            let mut engine = engine_with([kinds; 2], limits, options, Default::default(), n);
            let id = engine.submit(request.clone()).unwrap();
            assert_eq!(answer(&drain(&mut engine), id).0, alone[0], "{kinds:?}");
            let text = [&request.tokens[..], &alone[0].tokens].concat();
            let stats = engine.stats();
            assert_eq!((stats.drafted, stats.accepted), expected_drafts(kinds, &text, 20, n), "{kinds:?} {n}");
            (drafted, accepted) = (drafted + stats.drafted, accepted + stats.accepted);
        }
    }
    assert!(accepted > drafted / 10 && accepted < drafted * 9 / 10, "{accepted} of {drafted}");
}

/// Models with any memory draft for models with any, next to each other, in few pages, with cached prefixes, wrong
/// drafts, and steps of either that fail.
#[test]
fn any_model_drafts_for_any() {
    for (i, kinds) in (0..).zip(KINDS) {
        for (j, own) in (0..).zip(KINDS) {
            let requests: Vec<Request> = (0..7)
                .map(|seed| (seed, long(seed % 3, 40 + 15 * seed as usize, 60)))
                .map(|(seed, request)| if seed % 3 > 0 { greedy(request) } else { request })
                .collect();
            let alone = alone(kinds, &requests);
            let limits = Limits { max_draft: 4, n_pages: 24, max_tokens: 50, ..roomy() };
            let small = Limits { n_pages: 16, max_tokens: 45, max_positions: 180, ..drafting(5, roomy()) };
            let trouble =
                |fails: bool, every| Trouble { failures: fails.then_some((7 + i, every)), ..Trouble::default() };
            let trouble = [trouble((i + j) % 5 == 1, 20), trouble(i == j, 60)];
            let options = Options { max_running: 5, ..Options::default() };
            let mut engine = engine_with([kinds, own], [limits, small], options, trouble, 4);
            let ids: Vec<_> = requests.iter().chain(&requests).map(|r| engine.submit(r.clone()).unwrap()).collect();
            let events = drain(&mut engine);
            for (k, &id) in ids.iter().enumerate() {
                let (found, expected) = (answer(&events, id).0, &alone[k % alone.len()]);
                let is_lost = matches!(found.end, Some(Err(_))) && trouble[0].failures.is_some();
                let is_same = found == *expected || (is_lost && expected.tokens.starts_with(&found.tokens));
                assert!(is_same, "{kinds:?} {own:?} {k}: {found:?}");
            }
            let stats = engine.stats();
            assert!(stats.drafted > 50, "{kinds:?} {own:?}: {stats:?}");
            assert!(kinds != own || stats.accepted > 10, "{kinds:?}: {stats:?}");
        }
    }
}

/// A prefix that the engine has cached and the draft model has not is computed by that in pieces, between the tokens of
/// others; one that both have is not computed again.
#[test]
fn cached_prefixes_are_computed_in_pieces() {
    for kinds in KINDS {
        // It counts tokens.
        let costs = Costs { now: Default::default(), step: 0, token: 1 };
        let limits = Limits { max_draft: 3, ..roomy() };
        let options = Options { max_running: 4, ..Options::default() };
        let mut engine = engine_of(kinds, limits, options, Trouble::default());
        let first = greedy(long(1, 500, 40));
        run(&mut engine, first.clone());
        let small = Limits { max_tokens: 100, ..drafting(4, roomy()) };
        let toy = Toy::new(small, kinds, Trouble::default()).at(&costs);
        engine.set_draft_model(Box::new(toy), 3).unwrap();
        let mut n_tokens = [0; 2];
        for n in &mut n_tokens {
            let before = costs.now();
            let (answer, usage) = run(&mut engine, first.clone());
            assert_eq!(answer, alone(kinds, std::slice::from_ref(&first))[0]);
            assert!(usage.cached_tokens >= 400, "{kinds:?}: {usage:?}");
            *n = (costs.now() - before).as_micros();
        }
        assert!(n_tokens[0] >= n_tokens[1] + 400, "{kinds:?}: {n_tokens:?}");
        assert_eq!(engine.stats().accepted, engine.stats().drafted);
    }
}

/// A text beyond the draft model's context goes on without drafts.
#[test]
fn texts_go_on_beyond_a_models_context() {
    let limits = Limits { max_draft: 3, ..roomy() };
    let short = Limits { max_positions: 64, ..drafting(4, roomy()) };
    let options = Options { max_running: 4, ..Options::default() };
    let mut engine = engine_with(Default::default(), [limits, short], options, Default::default(), 3);
    let request = greedy(long(1, 40, 100));
    assert_eq!(run(&mut engine, request.clone()).0, alone(Kinds::default(), &[request])[0]);
    let stats = engine.stats();
    assert!((10..=24).contains(&stats.drafted) && stats.accepted == stats.drafted, "{stats:?}");
    assert!(stats.steps > 70, "{stats:?}");
}

/// Few slots of states are refused, and so is a model without positions.
#[test]
fn a_model_without_room_is_refused() {
    let mut engine = engine(
        Limits { max_draft: 3, ..roomy() },
        Options { max_running: 4, ..Options::default() },
        Trouble::default(),
    );
    for (kinds, limits) in [(KINDS[1], Limits { n_states: 7, ..roomy() }), (KINDS[0], Limits { n_pages: 0, ..roomy() })]
    {
        let refused = engine.set_draft_model(Box::new(Toy::new(limits, kinds, Trouble::default())), 3);
        assert!(refused.is_err_and(|error| error.to_string().contains("draft model")));
    }
}

/// With costs, the number of drafts is as pays: answers of a model that is right come sooner, and with one that is
/// always wrong they take no longer in the long run, prompts included.
#[test]
fn draft_models_pay_or_rest() {
    for (own, max_share) in [(KINDS[0], 0.55), (KINDS[3], 1.02)] {
        let costs = Costs { now: Default::default(), step: 9000, token: 100 };
        let small = Costs { step: 700, token: 10, ..costs.clone() };
        let options = Options { max_running: 4, ..Options::default() };
        let requests: Vec<Request> = (0..12).map(|seed| greedy(long(seed, 300, 400))).collect();
        let expected = alone(Kinds::default(), &requests);
        let mut times = Vec::new();
        for drafts in [false, true] {
            let mut engine = engine_at(&costs, Limits { max_draft: 8, ..roomy() }, options);
            if drafts {
                let toy = Toy::new(drafting(4, roomy()), own, Trouble::default()).at(&small);
                engine.set_draft_model(Box::new(toy), 8).unwrap();
                engine.set_adaptive(true);
            }
            let began = costs.now();
            for (request, expected) in requests.iter().zip(&expected) {
                assert_eq!(run(&mut engine, request.clone()).0, *expected);
            }
            times.push((costs.now() - began).as_secs_f64());
            assert_eq!(engine.stats().drafted > 0, drafts);
        }
        assert!(times[1] < times[0] * max_share, "{own:?}: {times:?}");
    }
}

/// A program of a random model.
fn program(backend: &dyn Backend, model: &Arc<Checkpoint>, limits: Limits) -> Box<dyn Program> {
    let plan = backend.lower(model::build(model).unwrap()).unwrap();
    backend.compile(&plan, model.clone(), limits).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn models_of_any_kind_change_no_text(
        seed in any::<u64>(),
        (n, half, is_adaptive, is_same) in (1..6usize, any::<bool>(), any::<bool>(), any::<bool>()),
        (max_tokens, spare, n_pages, n_states) in (1..60usize, 0..12usize, 5..14usize, 1..8usize),
        (own_tokens, own_pages, own_positions, n_cached) in (1..60usize, 1..14usize, 1..200usize, 0..5usize),
        (chunk, max_running, prefix_cache) in (1..50usize, 1..5usize, any::<bool>()),
        shapes in vec((0..70usize, 1..30usize, 1..60usize, any::<u64>()), 1..6),
        cancels in vec((0..6usize, 1..40usize), 0..3),
    ) {
        let cache = if half { CacheType::F16 } else { CacheType::F32 };
        let cpu = Cpu { threads: 1 + (seed % 2) as usize, cache, ..Cpu::default() };
        let (model, small) = (heads::random_model(seed), heads::random_model(if is_same { seed } else { !seed }));
        let requests: Vec<Request> =
            shapes.iter().map(|&(shared, own, max_new, seed)| heads::request(shared, own, max_new, seed)).collect();
        let expected = heads::alone(&cpu, &model, &requests);
        let limits = Limits { max_tokens, max_outputs: 1 + spare, n_pages, n_states, max_draft: n, ..heads::ROOMY };
        let options = Options { chunk, max_running, prefix_cache, ..Options::default() };
        let mut engine = Engine::new(program(&cpu, &model, limits), Arc::new(Pieces), options).unwrap();
        let own = Limits {
            max_tokens: own_tokens,
            n_pages: own_pages,
            max_positions: own_positions,
            n_states: 2 * max_running + n_cached,
            ..heads::ROOMY
        };
        engine.set_draft_model(program(&cpu, &small, own), n).unwrap();
        engine.set_adaptive(is_adaptive);
        let ids: Vec<_> = requests.iter().map(|r| engine.submit(r.clone())).collect();
        let mut events = Events::new();
        let mut cancelled = Vec::new();
        for (which, n_steps) in cancels {
            for _ in 0..n_steps {
                engine.step(&mut events).unwrap();
                engine.audit().unwrap();
            }
            if let Some(Ok(id)) = ids.get(which)
                && engine.cancel(*id)
            {
                cancelled.push(*id);
            }
        }
        while engine.step(&mut events).unwrap() {
            engine.audit().unwrap();
        }
        for ((id, request), expected) in ids.into_iter().zip(&requests).zip(&expected) {
            match id {
                // The context may be less than alone.
                Ok(id) => {
                    let found = answer(&events, id).0;
                    let is_full = found.tokens.len() + request.tokens.len() >= engine.context();
                    let is_cut = is_full || cancelled.contains(&id);
                    prop_assert!(found == *expected || (is_cut && expected.tokens.starts_with(&found.tokens)));
                }
                Err(error) => prop_assert!(request.tokens.len() >= engine.context(), "{error}"),
            }
        }
    }
}

/// The model itself, as a draft model, is right wherever its random numbers are not asked: greedy answers, with states
/// and without, in company.
#[test]
fn the_same_model_drafts_its_own_text() {
    let (mut drafted, mut accepted) = (0, 0);
    let one = greedy(heads::request(40, 5, 50, 1));
    let model = heads::random_model(0);
    let engine = |limits, small: Option<Limits>| {
        let mut engine = Engine::new(
            program(&Reference, &model, limits),
            Arc::new(Pieces),
            Options { max_running: 4, ..Options::default() },
        )
        .unwrap();
        small.iter().for_each(|&small| engine.set_draft_model(program(&Reference, &model, small), 3).unwrap());
        engine
    };
    let mut with = engine(Limits { max_draft: 3, ..heads::ROOMY }, Some(heads::ROOMY));
    assert_eq!(run(&mut with, one.clone()).0, run(&mut engine(heads::ROOMY, None), one).0);
    assert!(with.stats().drafted > 10 && with.stats().accepted > with.stats().drafted * 9 / 10);
    for seed in 0..8 {
        let cpu = Cpu { threads: 2, cache: CacheType::F32, ..Cpu::default() };
        let (model, small) = (heads::random_model(seed), heads::random_model(if seed < 6 { seed } else { !seed }));
        let requests: Vec<Request> = (0..3).map(|i| greedy(heads::request(40, 5, 50, 12 * seed + i))).collect();
        let expected = heads::alone(&cpu, &model, &requests);
        let options = Options { max_running: 4, ..Options::default() };
        let limits = Limits { max_draft: 3, ..heads::ROOMY };
        let mut engine = Engine::new(program(&cpu, &model, limits), Arc::new(Pieces), options).unwrap();
        engine.set_draft_model(program(&cpu, &small, heads::ROOMY), 3).unwrap();
        let ids: Vec<_> = requests.iter().map(|r| engine.submit(r.clone()).unwrap()).collect();
        let events = drain(&mut engine);
        ids.iter().zip(&expected).for_each(|(&id, expected)| assert_eq!(answer(&events, id).0, *expected));
        let stats = engine.stats();
        assert!(stats.drafted > 30, "{seed}: {stats:?}");
        match seed {
            0..6 => (drafted, accepted) = (drafted + stats.drafted, accepted + stats.accepted),
            _ => assert!(stats.accepted < stats.drafted, "{seed}: {stats:?}"),
        }
    }
    assert!(accepted > drafted * 9 / 10, "{accepted} of {drafted}");
}
