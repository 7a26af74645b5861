//! Drafts: how many steps they save, what they may take, and what becomes of those that cannot be computed.

use backend::{Kinds, Limits, PAGE};
use engine::scheduler::{Engine, Options, PromptLookup, Request};

use crate::toy::*;

/// An engine whose drafts are the true texts of these requests, wrong one time in `wrong`, and what they come to
/// without.
fn drafting(kinds: Kinds, limits: Limits, trouble: Trouble, wrong: u64, requests: &[Request]) -> (Engine, Vec<Answer>) {
    let engine = |limits| engine_of(kinds, limits, Options::default(), trouble);
    let plain = Limits { max_draft: 0, ..limits };
    let alone: Vec<Answer> = requests.iter().map(|r| run(&mut engine(plain), r.clone()).0).collect();
    let texts = requests.iter().zip(&alone).map(|(r, a)| [&r.tokens[..], &a.tokens].concat());
    let known = Known::new(texts.collect::<Vec<_>>().into());
    let mut engine = engine(limits);
    engine.set_drafter(Some(Box::new(Guesses { known, seed: 3, n_vocab: N_VOCAB, never: None, wrong })));
    (engine, alone)
}

pub fn long(seed: u64, n: usize, max_new: usize) -> Request {
    Request { ignore_eos: true, logprobs: Some(2), ..request(prompt(seed, n), seed, max_new) }
}

#[test]
fn right_drafts_save_steps() {
    for kinds in KINDS {
        for max_draft in [0, 1, 4, 7] {
            let limits = Limits { max_draft, ..roomy() };
            let (mut engine, alone) = drafting(kinds, limits, Trouble::default(), 0, &[long(1, 10, 100)]);
            assert_eq!(run(&mut engine, long(1, 10, 100)).0, alone[0], "{kinds:?}");
            let stats = engine.stats();
            assert_eq!(stats.drafted, stats.accepted);
            // The prompt's step gives the first of a hundred tokens; where states are copied, no step goes past a
            // page's end.
            let per_step = max_draft as u64 + 1;
            let (least, pages) = (1 + 99u64.div_ceil(per_step), 110 / PAGE as u64 + 1);
            let most = if kinds.state && max_draft > 0 { least + pages } else { least };
            assert!((least..=most).contains(&stats.steps), "{} steps of {max_draft}, {kinds:?}", stats.steps);
            assert_eq!(stats.steps + stats.accepted, 100);
        }
    }
}

/// A program that takes drafts and gets none does what it did.
#[test]
fn without_a_drafter_nothing_is_drafted() {
    let mut engine = engine(Limits { max_draft: 4, ..roomy() }, Options::default(), Trouble::default());
    run(&mut engine, long(1, 10, 50));
    assert_eq!((engine.stats().steps, engine.stats().drafted), (50, 0));
}

/// Rows and tokens that no sequence needs are all that drafts get, and prompts go on beside them.
#[test]
fn drafts_take_what_is_left() {
    for (max_outputs, max_tokens, n_running, max_drafted) in
        [(4, 64, 4, 0), (5, 64, 4, 1), (16, 5, 4, 0), (16, 12, 4, 4)]
    {
        let limits = Limits { max_outputs, max_tokens, max_draft: 3, ..roomy() };
        let requests: Vec<Request> = (0..n_running).map(|seed| long(seed, 5, 40)).collect();
        let (mut engine, alone) = drafting(Kinds::default(), limits, Trouble::default(), 0, &requests);
        let ids: Vec<_> = requests.iter().map(|r| engine.submit(r.clone()).unwrap()).collect();
        let mut events = engine::scheduler::Events::new();
        // Until all decode.
        while ids.iter().any(|&id| answer(&events, id).0.tokens.is_empty()) {
            engine.step(&mut events).unwrap();
        }
        let before = engine.stats();
        engine.step(&mut events).unwrap();
        let drafted = engine.stats().drafted - before.drafted;
        assert_eq!(drafted, max_drafted, "{max_outputs} rows, {max_tokens} tokens");
        while engine.step(&mut events).unwrap() {}
        ids.iter().zip(&alone).for_each(|(&id, alone)| assert_eq!(answer(&events, id).0, *alone));
    }
}

/// A wrong draft whose numbers break down ends nothing; a right one ends its request as it does without drafts.
#[test]
fn drafts_that_break_down_are_dropped() {
    for kinds in KINDS {
        let mut ended = [0, 0];
        for bad in 1..N_VOCAB as u32 {
            for trouble in
                [Trouble { fault: Some(bad), ..Trouble::default() }, Trouble { nan: Some(bad), ..Trouble::default() }]
            {
                let clean = |t| if t == bad { EOS } else { t };
                let tokens: Vec<u32> = prompt(4, 20).into_iter().map(clean).collect();
                let request = Request { ignore_eos: true, ..request(tokens, 2, 12) };
                let limits = Limits { max_draft: 6, ..roomy() };
                let (mut engine, alone) = drafting(kinds, limits, trouble, 2, std::slice::from_ref(&request));
                assert_eq!(run(&mut engine, request).0, alone[0], "{trouble:?}, {kinds:?}");
                ended[usize::from(alone[0].end.clone().unwrap().is_ok())] += 1;
            }
        }
        assert!(ended.iter().all(|&n| n > 5), "{ended:?}");
    }
}

/// Checkpoints stand where they would without drafts: the next turn finds as much.
#[test]
fn drafts_lose_no_checkpoint() {
    for kinds in KINDS {
        for wrong in [0, 2, 5] {
            let first = long(1, 70, 60);
            let limits = Limits { max_draft: 6, ..roomy() };
            let (mut engine, alone) = drafting(kinds, limits, Trouble::default(), wrong, std::slice::from_ref(&first));
            let next = [&first.tokens[..], &alone[0].tokens, &prompt(9, 5)].concat();
            let mut plain = engine_of(kinds, roomy(), Options::default(), Trouble::default());
            let found = [&mut engine, &mut plain].map(|engine| {
                run(engine, first.clone());
                run(engine, request(next.clone(), 1, 3))
            });
            assert_eq!(found[0].0, found[1].0, "{kinds:?}");
            assert_eq!(found[0].1.cached_tokens, found[1].1.cached_tokens, "{kinds:?}");
            assert!(found[0].1.cached_tokens >= 96 && engine.stats().drafted > 30);
        }
    }
}

/// A text that repeats itself: the lookup finds what follows.
#[test]
fn prompt_lookup_shortens_repetitions() {
    let mut request = long(1, 40, 60);
    // One token is by far the best, so the answer repeats it.
    request.sampling.logit_bias = vec![(5, 50.0)];
    let alone = run(&mut engine(roomy(), Options::default(), Trouble::default()), request.clone()).0;
    assert_eq!(alone.tokens, [5; 60]);
    let mut engine = engine(Limits { max_draft: 4, ..roomy() }, Options::default(), Trouble::default());
    engine.set_drafter(Some(Box::new(PromptLookup::default())));
    assert_eq!(run(&mut engine, request).0, alone);
    let stats = engine.stats();
    assert!(stats.steps < 40 && stats.accepted == stats.drafted, "{stats:?}");
}

/// Right drafts of the program's own head save as many steps as those of any drafter, and the head computes every
/// position once, in order.
#[test]
fn a_head_saves_steps() {
    for kinds in KINDS.into_iter().filter(|kinds| kinds.window.is_none()) {
        for n in [1, 3, 7] {
            let request = || Request { sampling: sampling(0.0, 1), ..long(1, 70, 100) };
            let alone = run(&mut engine_of(kinds, roomy(), Options::default(), Trouble::default()), request()).0;
            let limits = Limits { max_draft: 7, max_tokens: 40, ..roomy() };
            let (mut engine, seen) =
                engine_with_head(kinds, limits, Options::default(), Trouble::default(), (n as usize, 0));
            assert_eq!(run(&mut engine, request()).0, alone, "{kinds:?}");
            let stats = engine.stats();
            assert_eq!((stats.drafted, seen.holes.load(std::sync::atomic::Ordering::Relaxed)), (stats.accepted, 0));
            // Two steps of the prompt; at the ends of pages there are fewer drafts.
            let (least, pages) = (2 + 99u64.div_ceil(n + 1), 2 * (170 / PAGE as u64 + 1));
            assert!((least..=least + pages).contains(&stats.steps), "{} steps of {n}, {kinds:?}", stats.steps);
        }
    }
}

/// What a head drafts is as wrong as it likes, next to other requests, with prefixes of others.
#[test]
fn a_head_changes_no_text() {
    for kinds in KINDS.into_iter().filter(|kinds| kinds.window.is_none()) {
        for wrong in [1, 2, 5] {
            let requests: Vec<Request> = (0..6).map(|seed| long(seed % 2, 40 + 5 * seed as usize, 60)).collect();
            let plain = || engine_of(kinds, roomy(), Options::default(), Trouble::default());
            let alone: Vec<Answer> = requests.iter().map(|r| run(&mut plain(), r.clone()).0).collect();
            let limits = Limits { max_draft: 4, n_pages: 20, max_tokens: 50, ..roomy() };
            let (mut engine, seen) =
                engine_with_head(kinds, limits, Options::default(), Trouble::default(), (4, wrong));
            let ids: Vec<_> = requests.iter().map(|r| engine.submit(r.clone()).unwrap()).collect();
            let events = drain(&mut engine);
            ids.iter().zip(&alone).for_each(|(&id, alone)| assert_eq!(answer(&events, id).0, *alone, "{kinds:?}"));
            let stats = engine.stats();
            assert!(stats.drafted > 100 && seen.rows.load(std::sync::atomic::Ordering::Relaxed) > 400, "{stats:?}");
        }
    }
}

/// A program without a head, one for no drafts, and one whose layers see a window draft nothing.
#[test]
fn no_head_drafts_nothing() {
    let limits = Limits { max_draft: 3, ..roomy() };
    assert!(!engine(limits, Options::default(), Trouble::default()).set_head(3));
    for kinds in KINDS {
        for (n, max_draft) in [(0, 3), (3, 0), (3, 3)] {
            let limits = Limits { max_draft, ..roomy() };
            // The answer of `set_head` is looked at inside.
            engine_with_head(kinds, limits, Options::default(), Trouble::default(), (n, 0));
        }
    }
}

/// An engine with a clock that decides how many drafts it computes, of which one in `wrong` is wrong, and what the
/// requests come to without.
fn adaptive(costs: &Costs, limits: Limits, wrong: u64, requests: &[Request]) -> (Engine, Vec<Answer>) {
    let alone: Vec<Answer> = requests
        .iter()
        .map(|r| run(&mut engine(roomy(), Options::default(), Trouble::default()), r.clone()).0)
        .collect();
    let texts = requests.iter().zip(&alone).map(|(r, a)| [&r.tokens[..], &a.tokens].concat());
    let known = Known::new(texts.collect::<Vec<_>>().into());
    let mut engine = engine_at(costs, limits, Options::default());
    engine.set_drafter(Some(Box::new(Guesses { known, seed: 3, n_vocab: N_VOCAB, never: None, wrong })));
    engine.set_adaptive(true);
    (engine, alone)
}

/// Where drafts are cheap and right, the engine takes them; where they are dear or wrong, an answer takes no longer
/// than without: 2% of 200 tokens.
#[test]
fn drafts_that_do_not_pay_are_not_made() {
    let limits = Limits { max_draft: 4, ..roomy() };
    for (step, token, wrong, max_share) in
        [(9000, 1000, 0, 0.45), (1000, 9000, 0, 1.02), (9000, 1000, 1, 1.02), (1, 9000, 1, 1.02)]
    {
        let costs = Costs { now: Default::default(), step, token };
        let requests = [long(1, 10, 400), long(2, 10, 400)];
        let (mut engine, alone) = adaptive(&costs, limits, wrong, &requests);
        for (request, alone) in requests.iter().zip(&alone) {
            let began = costs.now();
            assert_eq!(run(&mut engine, request.clone()).0, *alone);
            let plain = (9 + 400) * token + 400 * step;
            let share = (costs.now() - began).as_micros() as f64 / plain as f64;
            assert!(share < max_share, "{step} + {token} n, {wrong}: {share}");
        }
        let stats = engine.stats();
        assert!(stats.drafted > 0 && (max_share > 1.0 || stats.accepted > 500), "{stats:?}");
    }
}

/// Sequences that share steps have drafts as long as there are few, and none next to prompts.
#[test]
fn crowds_have_no_drafts() {
    for n_running in [3usize, 9] {
        let costs = Costs { now: Default::default(), step: 9000, token: 10 };
        let limits = Limits { max_draft: 4, max_outputs: 64, n_pages: 128, ..roomy() };
        let requests: Vec<Request> = (0..n_running as u64).map(|seed| long(seed, 5, 200)).collect();
        let (mut engine, alone) = adaptive(&costs, limits, 0, &requests);
        let ids: Vec<_> = requests.iter().map(|r| engine.submit(r.clone()).unwrap()).collect();
        let mut events = engine::scheduler::Events::new();
        for _ in 0..20 {
            engine.step(&mut events).unwrap();
        }
        assert_eq!(engine.stats().drafted > 0, n_running < 9);
        let prompt = engine.submit(long(77, 600, 1)).unwrap();
        let before = engine.stats().drafted;
        while answer(&events, prompt).0.end.is_none() {
            engine.step(&mut events).unwrap();
        }
        assert_eq!(engine.stats().drafted, before);
        while engine.step(&mut events).unwrap() {}
        ids.iter().zip(&alone).for_each(|(&id, alone)| assert_eq!(answer(&events, id).0, *alone));
        assert!(n_running > 8 || engine.stats().accepted > 100);
    }
}
