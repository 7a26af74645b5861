//! The scheduler's promises, one by one, on a toy program.

use backend::{Kinds, Limits, PAGE};
use engine::sampler::SamplerParams;
use engine::scheduler::{
    CacheChange, Engine, Error, EventKind, Events, FinishReason, MAX_LOGPROBS, Options, Parent, Request, RequestId,
};
use std::time::Duration;

use crate::toy::*;

/// A request that only its length ends.
fn long(seed: u64, n: usize, max_new: usize) -> Request {
    Request { ignore_eos: true, ..request(prompt(seed, n), seed, max_new) }
}

fn calm(limits: Limits) -> Engine {
    calm_of(Kinds::default(), limits)
}

fn calm_of(kinds: Kinds, limits: Limits) -> Engine {
    engine_of(kinds, limits, Options::default(), Trouble::default())
}

#[test]
fn greedy_tokens_are_the_programs_own() {
    for (kinds, n) in KINDS.into_iter().flat_map(|kinds| [1, 31, 32, 33, 64, 100].map(|n| (kinds, n))) {
        let greedy = Request { sampling: sampling(0.0, 0), ..long(5, n, 40) };
        let (got, usage) = run(&mut calm_of(kinds, roomy()), greedy);
        let mut tokens = prompt(5, n);
        for _ in 0..40 {
            let mut row = [0.0; N_VOCAB];
            logits(kinds, &tokens, &mut row);
            let best = (0..N_VOCAB).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
            tokens.push(best as u32);
        }
        assert_eq!(got.tokens, tokens[n..], "prompt of {n}, {kinds:?}");
        assert_eq!(got.end, Some(Ok(FinishReason::Length)));
        assert_eq!((usage.prompt_tokens, usage.generated, usage.cached_tokens), (n, 40, 0));
    }
}

#[test]
fn the_door_names_what_is_wrong() {
    let limits = Limits { n_pages: 3, ..roomy() };
    let n_vocab = N_VOCAB as u32;
    let base = || Request::new(prompt(1, 10));
    let cases = [
        (Request::new(vec![]), "the prompt is empty"),
        (Request::new(prompt(1, 96)), "prompt is too long: 96 tokens, context 96"),
        (Request::new(vec![1, n_vocab]), "prompt token 1 has id 30, the vocabulary has 30"),
        (Request { stop_tokens: vec![n_vocab + 7], ..base() }, "stop token 0 has id 37, the vocabulary has 30"),
        (Request { stop_strings: vec![String::new()], ..base() }, "stop string 0 is empty"),
        (Request { logprobs: Some(MAX_LOGPROBS + 1), ..base() }, "logprobs is 129, the maximum is 128"),
        (Request { sampling: sampling(f32::NAN, 0), ..base() }, "temperature is NaN"),
        (
            Request { sampling: SamplerParams { logit_bias: vec![(2, 1.0), (30, 1.0)], ..sampling(0.0, 0) }, ..base() },
            "logit bias 1 has id 30, the vocabulary has 30",
        ),
    ];
    let mut engine = calm(limits);
    for (request, expected) in cases {
        let error = engine.submit(request).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}\n{expected}");
    }
    assert!(!engine.has_work());
    assert!(!engine.step(&mut Events::new()).unwrap());
}

#[test]
fn answers_end_for_the_right_reason() {
    let tokens = prompt(2, 20);
    let free = run(&mut calm(roomy()), Request { ignore_eos: true, ..request(tokens.clone(), 9, 60) }).0;
    let cut = free.text.char_indices().nth(8).unwrap().0;
    let stop: String = free.text[cut..].chars().take(4).collect();
    let at = free.text.find(&stop).unwrap();
    let cases = [
        (Request { max_new_tokens: 0, ..request(tokens.clone(), 9, 0) }, FinishReason::Length, ""),
        (
            Request {
                stop_strings: vec!["@".into(), stop.clone()],
                ignore_eos: true,
                ..request(tokens.clone(), 9, 60)
            },
            FinishReason::StopString(1),
            &free.text[..at],
        ),
        (
            Request {
                stop_strings: vec![stop.clone()],
                include_stop_string: true,
                ignore_eos: true,
                ..request(tokens.clone(), 9, 60)
            },
            FinishReason::StopString(0),
            &free.text[..at + stop.len()],
        ),
        (Request { ignore_eos: true, ..request(tokens.clone(), 9, 60) }, FinishReason::Length, &free.text),
    ];
    for (request, reason, text) in cases {
        let got = run(&mut calm(roomy()), request).0;
        assert_eq!((got.end, got.text.as_str()), (Some(Ok(reason)), text));
    }

    // A stop token is reported, and is not text.
    let which = free.tokens[10];
    let n = free.tokens.iter().position(|&t| t == which).unwrap() + 1;
    let stopped = Request { stop_tokens: vec![which], ignore_eos: true, ..request(tokens.clone(), 9, 60) };
    let got = run(&mut calm(roomy()), stopped).0;
    assert_eq!((got.end, &got.tokens[..]), (Some(Ok(FinishReason::Stop)), &free.tokens[..n]));

    // Prompt and answer fill the context, and not one token more.
    for (max_positions, n_pages) in [(50, 64), (1024, 2)] {
        let context = max_positions.min(n_pages * PAGE);
        let mut engine = calm(Limits { max_positions, n_pages, ..roomy() });
        let got = run(&mut engine, Request { ignore_eos: true, ..request(tokens.clone(), 9, usize::MAX) }).0;
        assert_eq!((got.end, got.tokens.len()), (Some(Ok(FinishReason::ContextFull)), context - 20));
    }
}

#[test]
fn no_answer_ends_before_its_least_number_of_tokens() {
    const LEAST: usize = 50;
    let mut n_longer = 0;
    for (seed, temperature) in (0..40).flat_map(|seed| [(seed, 0.0), (seed, 1.0)]) {
        let base = || Request { sampling: sampling(temperature, seed), ..request(prompt(seed, 20), seed, 60) };
        let free = run(&mut calm(roomy()), base()).0;
        let held = run(&mut calm(roomy()), Request { min_new_tokens: LEAST, ..base() }).0;
        assert!(held.tokens.len() >= LEAST && !held.tokens[..LEAST].contains(&EOS), "{:?}", held.tokens);
        let n = free.tokens.len();
        n_longer += usize::from(n < LEAST);
        // The likeliest tokens are the same up to where the other one ends; from there on an end is an end again.
        if temperature == 0.0 {
            let n_same = if n > LEAST { n } else { n - 1 };
            assert_eq!(held.tokens[..n_same], free.tokens[..n_same]);
            assert!(n <= LEAST || held.tokens == free.tokens);
        }
        assert!(matches!(held.end, Some(Ok(FinishReason::Stop | FinishReason::Length))));
    }
    assert!(n_longer > 3, "{n_longer}");
    // Stop tokens of the request are held back too.
    let free = run(&mut calm(roomy()), long(9, 20, 60)).0;
    let stop = Request { stop_tokens: vec![free.tokens[3]], min_new_tokens: 30, ..long(9, 20, 60) };
    let held = run(&mut calm(roomy()), stop).0;
    assert!(!held.tokens[..30].contains(&free.tokens[3]));
}

#[test]
fn changes_of_the_prefix_cache_tell_what_can_be_found() {
    let mut engine = calm(Limits { n_pages: 8, ..roomy() });
    run(&mut engine, long(7, 70, 2));
    assert_eq!(engine.cache_changes().count(), 0, "it is not watched yet");
    engine.watch_cache();
    // Nodes of pages, with what precedes them and their tokens.
    let mut known = std::collections::HashMap::new();
    for seed in 0..12 {
        let salt = seed % 2;
        let tokens = [prompt(seed / 4, 64), prompt(seed, 40)].concat();
        run(&mut engine, Request { cache_salt: salt, ..request(tokens.clone(), seed, 3) });
        for change in engine.cache_changes() {
            match change {
                CacheChange::Stored { node, parent, tokens } => {
                    assert_eq!(known.insert(node, (parent, tokens)), None);
                }
                // Of the pages from before there is nothing to be known.
                CacheChange::Removed { node } => _ = known.remove(&node),
            }
        }
        let mut parent = Parent::Root(salt);
        for page in tokens.chunks_exact(PAGE) {
            let found = known.iter().find(|(_, of)| **of == (parent, page.try_into().unwrap()));
            parent = Parent::Node(*found.expect("the prompt's pages are in the cache").0);
        }
    }
    assert!(known.len() <= 8);
    engine.clear_cache();
    let n_removed = engine.cache_changes().filter(|change| matches!(change, CacheChange::Removed { .. })).count();
    assert!(n_removed >= known.len());
}

#[test]
fn prefixes_are_shared_and_leave_a_token_to_compute() {
    let cases = [
        // prompt before, prompt now, tokens found
        (prompt(1, 100), prompt(1, 100), 96),
        (prompt(1, 96), prompt(1, 96), 64),
        (prompt(1, 97), prompt(1, 97), 96),
        (prompt(1, 31), prompt(1, 31), 0),
        (prompt(1, 100), [prompt(1, 70), prompt(2, 30)].concat(), 64),
        (prompt(1, 100), prompt(2, 100), 0),
    ];
    for (before, now, found) in cases {
        let mut engine = calm(roomy());
        run(&mut engine, request(before, 1, 1));
        let expected = run(&mut calm(roomy()), request(now.clone(), 3, 20)).0;
        let (got, usage) = run(&mut engine, request(now, 3, 20));
        assert_eq!((got, usage.cached_tokens), (expected, found));
    }
}

#[test]
fn a_chats_next_turn_finds_the_answer_before() {
    let off = Options { prefix_cache: false, ..Options::default() };
    let mut without = engine(roomy(), off, Trouble::default());
    let mut engine = calm(roomy());
    let first = run(&mut engine, long(4, 40, 60)).0;
    let next = [prompt(4, 40), first.tokens, prompt(5, 10)].concat();
    // 40 + 60 tokens, the last of which was never computed: three full pages.
    assert_eq!(run(&mut engine, request(next.clone(), 5, 5)).1.cached_tokens, 96);
    // Another salt shares nothing.
    let salted = Request { cache_salt: 1, ..request(next.clone(), 5, 5) };
    assert_eq!(run(&mut engine, salted).1.cached_tokens, 0);
    engine.clear_cache();
    assert_eq!(run(&mut engine, request(next.clone(), 5, 5)).1.cached_tokens, 0);

    for _ in 0..2 {
        assert_eq!(run(&mut without, request(next.clone(), 5, 5)).1.cached_tokens, 0);
        assert_eq!(without.stats().pages.free, without.stats().pages.total);
    }
}

/// Two equal prompts at once: the second one waits for its turn and then finds the first one's pages.
#[test]
fn prompts_under_way_are_shared() {
    let mut engine = calm(Limits { max_tokens: 64, ..roomy() });
    let ids = [1, 2].map(|seed| engine.submit(request(prompt(7, 320), seed, 8)).unwrap());
    let events = drain(&mut engine);
    let usage = ids.map(|id| answer(&events, id).1);
    assert_eq!(usage[0].cached_tokens, 0);
    assert!(usage[1].cached_tokens >= 256, "{usage:?}");
    assert!(engine.stats().tokens < 320 + 64 + 16, "{:?}", engine.stats());
}

#[test]
fn decoding_goes_on_while_prompts_are_computed() {
    let mut engine = calm(Limits { max_tokens: 16, ..roomy() });
    let talker = engine.submit(long(1, 4, 30)).unwrap();
    let mut events = Events::new();
    engine.step(&mut events).unwrap();
    engine.submit(long(2, 300, 1)).unwrap();
    for _ in 0..15 {
        events.clear();
        engine.step(&mut events).unwrap();
        assert_eq!(events.iter().map(|e| e.id).collect::<Vec<_>>(), [talker]);
    }
    // 1 + 15 tokens a step: the long prompt used what was left of every step.
    assert_eq!(engine.stats().tokens, 4 + 15 * 16);
}

/// Recomputation finds the request's own pages, so that a preemption costs little more than what lies in the last one.
#[test]
fn a_preempted_request_finds_its_own_pages() {
    let mut engine = calm(Limits { n_pages: 11, ..roomy() });
    // By the time the second one needs 8 pages, the first one has 4.
    let ids = [engine.submit(long(1, 40, 100)).unwrap(), engine.submit(long(2, 180, 60)).unwrap()];
    let events = drain(&mut engine);
    let usage = ids.map(|id| answer(&events, id).1);
    assert_eq!((usage[0].preemptions, usage[1].preemptions), (0, 1));
    let needed = 40 + 99 + 180 + 59;
    assert!(engine.stats().tokens <= needed + 2 * PAGE as u64, "{} of {needed}", engine.stats().tokens);
}

/// Runs steps until all requests have ended. Returns when each token of each came, and how many tokens steps had.
fn timeline(
    engine: &mut Engine,
    costs: &Costs,
    mut submit: impl FnMut(&mut Engine, u64) -> Vec<RequestId>,
) -> Timeline {
    let (mut line, mut events) = (Timeline::default(), Events::new());
    for step in 0.. {
        line.submitted.extend(submit(engine, step).into_iter().map(|id| (id, costs.now())));
        events.clear();
        let before = costs.now();
        let is_more = engine.step(&mut events).unwrap();
        engine.audit().unwrap();
        line.steps.push(costs.now() - before);
        let tokens = events.iter().filter(|event| matches!(event.kind, EventKind::Token { .. }));
        line.tokens.extend(tokens.map(|event| (event.id, costs.now())));
        if !is_more {
            break;
        }
    }
    line
}

/// What happened when, by the clock of the toy.
#[derive(Default)]
struct Timeline {
    submitted: Vec<(RequestId, Duration)>,
    tokens: Vec<(RequestId, Duration)>,
    steps: Vec<Duration>,
}

impl Timeline {
    fn first_token(&self, id: RequestId) -> Duration {
        let of = |list: &[(RequestId, Duration)]| list.iter().find(|(of, _)| *of == id).unwrap().1;
        of(&self.tokens) - of(&self.submitted)
    }
}

/// The machine of the tests below: 5 ms a step and 7 ms a token; and a step's target.
fn slow() -> (Costs, Options) {
    let costs = Costs { now: Default::default(), step: 5_000, token: 7_000 };
    (costs, Options { step_time: Duration::from_millis(100), ..Options::default() })
}

/// While a long prompt is computed, answers go on at the target's pace, and short prompts come through.
#[test]
fn a_long_prompt_holds_up_no_answer() {
    let limits = Limits { n_pages: 512, max_positions: 8192, ..roomy() };
    let (costs, options) = slow();
    let mut engine = engine_at(&costs, limits, options);
    let (talker, reader, short) = (RequestId(0), RequestId(1), RequestId(2));
    let line = timeline(&mut engine, &costs, |engine, step| match step {
        0 => vec![engine.submit(long(1, 20, 600)).unwrap()],
        20 => vec![engine.submit(long(2, 3000, 4)).unwrap()],
        60 => vec![engine.submit(long(3, 30, 4)).unwrap()],
        _ => vec![],
    });
    let gaps = |from: usize| line.steps[from..].iter().max().unwrap().as_millis();
    // The first steps with a prompt find out what one costs.
    assert!(gaps(21) <= 200 && gaps(30) <= 115, "{} ms, {} ms", gaps(21), gaps(30));
    assert!(line.first_token(short) < Duration::from_secs(1), "{:?}", line.first_token(short));
    // At most a third slower than it would be by itself.
    let first = line.first_token(reader);
    assert!(first < Duration::from_millis(3000 * 7 * 4 / 3), "{first:?}");
    assert_eq!(line.tokens.iter().filter(|(id, _)| *id == talker).count(), 600);
}

/// A short prompt after a long one that is alone in the engine.
#[test]
fn a_long_prompt_holds_up_no_short_one() {
    let limits = Limits { n_pages: 512, max_positions: 8192, ..roomy() };
    let (costs, options) = slow();
    let mut engine = engine_at(&costs, limits, options);
    let line = timeline(&mut engine, &costs, |engine, step| match step {
        0 => vec![engine.submit(long(2, 7500, 2)).unwrap()],
        6 => vec![engine.submit(long(3, 30, 2)).unwrap()],
        _ => vec![],
    });
    assert!(line.first_token(RequestId(1)) < Duration::from_secs(2), "{:?}", line.first_token(RequestId(1)));
    // All but the first step, of which nothing is known, are bounded, and lose little by it.
    let most = line.steps[1..].iter().max().unwrap();
    assert!(*most <= Duration::from_millis(1100), "{most:?}");
    assert!(costs.now() < Duration::from_millis(7600 * 7 * 11 / 10), "{:?}", costs.now());
}

/// Short prompts without end do not starve a long one: it has half of each step.
#[test]
fn short_prompts_do_not_starve_a_long_one() {
    let limits = Limits { n_pages: 512, max_positions: 8192, max_tokens: 64, ..roomy() };
    for step_time in [Duration::MAX, Duration::from_millis(100)] {
        let (costs, options) = slow();
        let mut engine = engine_at(&costs, limits, Options { step_time, ..options });
        let mut n_steps = 0;
        let mut is_done = false;
        let mut events = Events::new();
        let reader = engine.submit(long(1, 1280, 1)).unwrap();
        for seed in 2.. {
            // As much as a whole step, again and again.
            while engine.stats().waiting + engine.stats().running < 8 {
                engine.submit(long(seed, 40, 1)).unwrap();
            }
            events.clear();
            engine.step(&mut events).unwrap();
            n_steps += 1;
            is_done |= events.iter().any(|event| event.id == reader);
            if is_done {
                break;
            }
            assert!(n_steps < 400);
        }
        // Half of 64 tokens, or of the fewest that a step has.
        let most = if step_time == Duration::MAX { 1280 / 32 + 1 } else { 1280 / 4 };
        assert!(n_steps <= most, "{n_steps} steps with {step_time:?}");
    }
}

/// Shares of a step: half to the first, the rest to the shortest; priorities go before lengths.
#[test]
fn prompts_share_steps() {
    let cases = [
        // prompts with their priorities, and the order of their first tokens
        (vec![(640, 0), (20, 0)], vec![1, 0]),
        (vec![(640, 0), (200, 0), (20, 0), (100, 0)], vec![2, 3, 1, 0]),
        (vec![(64, 0), (64, 0), (64, 0)], vec![0, 1, 2]),
        (vec![(640, 1), (20, 0)], vec![0, 1]),
        (vec![(640, 0), (200, 1), (20, 0)], vec![1, 2, 0]),
    ];
    for (prompts, expected) in cases {
        let mut engine = calm(Limits { max_tokens: 64, ..roomy() });
        for (seed, &(n, priority)) in (0..).zip(&prompts) {
            engine.submit(Request { priority, ..long(seed, n, 1) }).unwrap();
        }
        let events = drain(&mut engine);
        let firsts = events.iter().filter(|event| matches!(event.kind, EventKind::Token { .. }));
        assert_eq!(firsts.map(|event| event.id.0).collect::<Vec<_>>(), expected, "{prompts:?}");
    }
}

/// Prompts that begin alike compute the beginning once, though they are computed together, and a short one that waits
/// for its page does not wait for the rest of the long one.
#[test]
fn common_beginnings_are_computed_once() {
    let system = prompt(1, 256);
    let with = |seed, n| [&system[..], &prompt(seed, n)].concat();
    let mut engine = calm(Limits { max_tokens: 64, ..roomy() });
    let ids = [(2, 400), (3, 10), (4, 60)]
        .map(|(seed, n)| engine.submit(Request { ignore_eos: true, ..request(with(seed, n), seed, 1) }).unwrap());
    let mut events = Events::new();
    let mut n_steps = 0;
    while answer(&events, ids[1]).0.end.is_none() {
        engine.step(&mut events).unwrap();
        n_steps += 1;
    }
    assert!(n_steps <= 256 / 64 + 2, "{n_steps}");
    while engine.step(&mut events).unwrap() {}
    let least = 256 + 400 + 10 + 60;
    assert!(engine.stats().tokens < least + 2 * PAGE as u64, "{} of {least}", engine.stats().tokens);
}

#[test]
fn the_lowest_in_rank_is_preempted_and_answers_as_if_alone() {
    let small = Limits { n_pages: 8, ..roomy() };
    for priority in [0, 1] {
        let mut engine = calm(small);
        let requests = [0, 0, priority].map(|priority| Request { priority, ..long(11, 40, 100) });
        let requests: Vec<Request> = requests
            .into_iter()
            .enumerate()
            .map(|(i, r)| Request { sampling: sampling(1.0, i as u64), tokens: prompt(i as u64, 40), ..r })
            .collect();
        let ids: Vec<_> = requests.iter().map(|r| engine.submit(r.clone()).unwrap()).collect();
        let events = drain(&mut engine);
        let answers: Vec<_> = ids.iter().map(|&id| answer(&events, id)).collect();
        for (request, (got, _)) in requests.iter().zip(&answers) {
            assert_eq!(*got, run(&mut calm(roomy()), request.clone()).0);
        }
        let preempted: Vec<bool> = answers.iter().map(|a| a.1.preemptions > 0).collect();
        // The first in rank never gives way.
        assert!(!preempted[if priority == 1 { 2 } else { 0 }], "{preempted:?}");
        assert!(preempted.contains(&true) && engine.stats().preemptions > 0);
    }
}

#[test]
fn cancel_frees_the_pages_in_the_same_call() {
    let options = Options { prefix_cache: false, max_running: 1, ..Options::default() };
    let mut engine = engine(roomy(), options, Trouble::default());
    let ids = [1, 2].map(|seed| engine.submit(long(seed, 100, 50)).unwrap());
    let mut events = Events::new();
    for _ in 0..5 {
        engine.step(&mut events).unwrap();
    }
    assert_eq!((engine.stats().pages.used, engine.stats().waiting), (4, 1));
    assert!(engine.cancel(ids[0]));
    assert_eq!((engine.stats().pages.used, engine.stats().running), (0, 0));
    assert!(!engine.cancel(ids[0]));
    assert!(engine.cancel(ids[1]));
    assert!(engine.has_work());
    assert!(!engine.step(&mut events).unwrap());
    for (id, generated) in ids.into_iter().zip([5, 0]) {
        let (got, usage) = answer(&events, id);
        assert_eq!(
            (got.end, usage.generated, got.tokens.len()),
            (Some(Ok(FinishReason::Cancelled)), generated, generated)
        );
        // What was computed counts, though it is never read.
        assert_eq!((usage.prompt_tokens, usage.prompt_computed), (100, if generated > 0 { 100 } else { 0 }));
    }
    engine.audit().unwrap();
}

#[test]
fn trouble_ends_the_request_it_belongs_to() {
    let limits = Limits { max_tokens: 32, ..roomy() };
    let bad = 9;
    let cases = [
        (
            Trouble { fault: Some(bad), ..Trouble::default() },
            "failed to compute position 50: the router of layer 3 saw NaN",
        ),
        (
            Trouble { refuse: Some(bad), ..Trouble::default() },
            "failed to compute position 50: token id 9 is outside the program's vocabulary of 30",
        ),
        (Trouble { nan: Some(bad), ..Trouble::default() }, "NaN"),
    ];
    for (trouble, expected) in cases {
        let clean = |seed, n| prompt(seed, n).into_iter().map(|t| if t == bad { 1 } else { t }).collect::<Vec<_>>();
        let mut engine = engine(limits, Options::default(), trouble);
        let ids = [
            engine.submit(request(clean(1, 60), 1, 1)).unwrap(),
            engine.submit(request([clean(1, 50), vec![bad]].concat(), 2, 10)).unwrap(),
            engine.submit(request(clean(3, 60), 3, 1)).unwrap(),
        ];
        let events = drain(&mut engine);
        let ends = ids.map(|id| answer(&events, id).0.end.unwrap());
        assert!(ends[0].is_ok() && ends[2].is_ok(), "{ends:?}");
        let error = ends[1].clone().unwrap_err();
        assert!(error.contains(expected), "{error}");
        assert_eq!(engine.stats().pages.used, 0);

        // Nothing of what failed is found again.
        engine.clear_cache();
        run(&mut engine, request([clean(1, 50), vec![bad]].concat(), 2, 10));
        assert_eq!(engine.stats().pages.free, engine.stats().pages.total);
    }
}

#[test]
fn a_refused_step_loses_nothing() {
    let cases = [
        (
            Trouble { fail_every: Some(3), ..Trouble::default() },
            Error::Step(backend::StepError::Batch("trouble".into())),
        ),
        (Trouble { short_every: Some(3), ..Trouble::default() }, Error::Logits { got: N_VOCAB - 1, expected: N_VOCAB }),
    ];
    for (trouble, expected) in cases {
        let mut engine = engine(Limits { max_tokens: 40, ..roomy() }, Options::default(), trouble);
        let id = engine.submit(long(8, 50, 30)).unwrap();
        let (mut events, mut n_errors) = (Events::new(), 0);
        loop {
            match engine.step(&mut events) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    assert_eq!(error, expected);
                    n_errors += 1;
                }
            }
            engine.audit().unwrap();
        }
        assert!(n_errors >= 10);
        assert_eq!(answer(&events, id).0, run(&mut calm(roomy()), long(8, 50, 30)).0);
    }
}

#[test]
fn an_engine_without_room_does_not_start() {
    let cases = [
        (Limits { max_tokens: 0, ..roomy() }, Options::default(), "most tokens of a step is 0"),
        (Limits { n_pages: 0, ..roomy() }, Options::default(), "pages of the cache is 0"),
        (roomy(), Options { chunk: 0, ..Options::default() }, "chunk is 0"),
        (roomy(), Options { max_running: 0, ..Options::default() }, "most running requests is 0"),
    ];
    for (limits, options, expected) in cases {
        let program = Box::new(Toy::new(limits, Kinds::default(), Trouble::default()));
        let error = Engine::new(program, std::sync::Arc::new(Pieces), options).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// An engine may run on any thread.
#[test]
fn an_engine_can_be_sent() {
    let mut engine = calm(roomy());
    let expected = run(&mut calm(roomy()), long(1, 20, 20)).0;
    let got = std::thread::spawn(move || run(&mut engine, long(1, 20, 20)).0).join().unwrap();
    assert_eq!(got, expected);
}
