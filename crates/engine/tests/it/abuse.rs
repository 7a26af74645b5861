//! Hours of abuse in miniature: random requests, cancels and failures through engines with hardly any pages.
//!
//! Whatever happens, no page is lost, every request ends once, and its text is the text it gets alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use backend::{Kinds, Limits, PAGE};
use engine::sampler::SamplerParams;
use engine::scheduler::{Engine, Events, FinishReason, Options, Request, RequestId};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use crate::toy::*;

#[derive(Clone, Debug)]
enum Action {
    Submit(Box<Request>),
    /// The n-th request so far, modulo their number, whether or not it has ended.
    Cancel(usize),
    Step(usize),
    ClearCache,
}

fn any_request() -> impl Strategy<Value = Request> {
    let stops = prop::sample::select(vec!["END", "ab", "\n\n", "é", "aaba", "bE", "日", "the", "\u{fffd}", "ba a"]);
    let shape = (0..3u64, 0..140usize, 0..50usize, 0..70usize, any::<u64>());
    let ends = (vec(stops, 0..3), any::<bool>(), vec(0..N_VOCAB as u32, 0..2), any::<bool>());
    let rest = (prop::sample::select(vec![0.0, 0.7, 1.5]), option::of(0..4usize), -1..2i32, 0..2u64);
    (shape, ends, rest).prop_map(
        |((base, shared, own, max_new, seed), ends, (temperature, logprobs, priority, salt))| {
            // The first part is common to all requests of a base, the second one is the request's own.
            // One base repeats a single page, so that only its place tells one page from the next.
            let period = if base == 0 { PAGE } else { usize::MAX };
            let mut tokens: Vec<u32> = prompt(base, shared.min(period)).into_iter().cycle().take(shared).collect();
            tokens.extend(prompt(seed, own.max(1)));
            let (stop_strings, include_stop_string, stop_tokens, ignore_eos) = ends;
            Request {
                stop_strings: stop_strings.into_iter().map(String::from).collect(),
                include_stop_string,
                stop_tokens,
                ignore_eos,
                logprobs,
                priority,
                cache_salt: salt,
                sampling: SamplerParams {
                    // Steps that remember the text, so that a lost or doubled token shows.
                    penalty_repeat: 1.2,
                    dry_multiplier: if seed % 2 == 0 { 0.8 } else { 0.0 },
                    ..sampling(temperature, seed)
                },
                ..request(tokens, seed, max_new)
            }
        },
    )
}

fn any_action() -> impl Strategy<Value = Action> {
    prop_oneof![
        6 => any_request().prop_map(|request| Action::Submit(Box::new(request))),
        2 => any::<usize>().prop_map(Action::Cancel),
        8 => (1..12usize).prop_map(Action::Step),
        1 => Just(Action::ClearCache),
    ]
}

fn any_kinds() -> impl Strategy<Value = Kinds> {
    let window = prop_oneof![Just(None), (1..120usize).prop_map(Some)];
    (window, any::<bool>()).prop_map(|(window, state)| Kinds { window, state, whole: false })
}

/// Window pages and states are as few as one sequence needs, or some more.
fn any_limits() -> impl Strategy<Value = Limits> {
    let tokens = prop_oneof![1..8usize, 8..100usize];
    (tokens, 1..12usize, 1..16usize, 40..300usize, 0..9usize, 1..12usize, 0..7usize).prop_map(
        |(max_tokens, max_outputs, n_pages, max_positions, n_window_pages, n_states, max_draft)| Limits {
            max_tokens,
            max_outputs,
            n_pages,
            max_positions,
            n_window_pages,
            n_states,
            max_draft,
        },
    )
}

fn any_options() -> impl Strategy<Value = Options> {
    let step_time = prop_oneof![Just(Duration::MAX), (0..40u64).prop_map(Duration::from_millis)];
    (prop_oneof![1..40usize, Just(usize::MAX)], 1..7usize, prop::bool::weighted(0.85), step_time).prop_map(
        |(chunk, max_running, prefix_cache, step_time)| Options { chunk, max_running, prefix_cache, step_time },
    )
}

fn any_trouble() -> impl Strategy<Value = Trouble> {
    let token = || option::weighted(0.15, 1..N_VOCAB as u32);
    let every = || option::weighted(0.2, 2..9u64);
    (token(), token(), token(), every(), every(), option::weighted(0.4, (any::<u64>(), 2..12u64))).prop_map(
        // A refusal comes before its whole chunk, a fault after it: with both, the chunk size would decide which.
        |(fault, refuse, nan, fail_every, short_every, failures)| Trouble {
            fault: fault.filter(|_| refuse.is_none()),
            refuse,
            nan,
            fail_every,
            short_every,
            failures,
        },
    )
}

/// The request's answer alone in an engine, its prompt in one piece, without a cache and with unlimited pages.
fn alone(request: Request, context: usize, kinds: Kinds, trouble: Trouble) -> Answer {
    let limits = Limits { max_positions: context, ..roomy() };
    let options = Options { prefix_cache: false, ..Options::default() };
    let trouble = Trouble { fail_every: None, short_every: None, failures: None, ..trouble };
    run(&mut engine_of(kinds, limits, options, trouble), request).0
}

/// The text of an answer's tokens, made from all of them at once.
fn text_by_hand(request: &Request, answer: &Answer) -> String {
    let is_stop = |id: &u32| request.stop_tokens.contains(id) || (*id == EOS && !request.ignore_eos);
    let n_text = answer.tokens.len() - answer.tokens.last().is_some_and(is_stop) as usize;
    let pieces = answer.tokens[..n_text].iter().map(|&id| PIECES.get(id as usize).copied().unwrap_or_default());
    let text = String::from_utf8_lossy(&pieces.collect::<Vec<_>>().concat()).into_owned();
    let found = request.stop_strings.iter().enumerate().filter_map(|(i, stop)| {
        let start = text.find(stop)?;
        Some((start + stop.len(), start, i))
    });
    match (found.min(), &answer.end) {
        (Some((end, start, i)), Some(Ok(FinishReason::StopString(which)))) => {
            assert_eq!(request.stop_strings[i], request.stop_strings[*which]);
            text[..if request.include_stop_string { end } else { start }].into()
        }
        (None, _) => text,
        (found, end) => panic!("{found:?} is a stop string's, but the answer ends with {end:?}: {text:?}"),
    }
}

/// One step, with the books checked after it; whether there is more to do.
fn step(engine: &mut Engine, events: &mut Events) -> bool {
    // A refused batch is an error of the step; the requests continue with the next one.
    let more = engine.step(events).unwrap_or(true);
    engine.audit().unwrap();
    let stats = engine.stats();
    for counts in [stats.pages, stats.window_pages, stats.states] {
        assert_eq!(counts.free + counts.cached + counts.used, counts.total);
    }
    more
}

/// `drafts` seeds the drafter, whose drafts are wrong at a rate; with `head`, a head of the program drafts in
/// its place. With every other seed the engine decides how many.
fn abuse(
    kinds: Kinds,
    limits: Limits,
    options: Options,
    trouble: Trouble,
    (drafts, head): (Option<(u64, u64)>, bool),
    actions: Vec<Action>,
) {
    let context = limits.max_positions.min(limits.n_pages * PAGE);
    let n_window_pages = kinds.window_blocks().min(context.div_ceil(PAGE)) + limits.n_window_pages;
    // A step that moved the states and then failed sends their sequences back to a checkpoint; with steps of a few
    // tokens that fail again and again they would never get past it.
    let short_every = trouble.short_every.filter(|_| !kinds.state);
    let trouble = Trouble { short_every, ..trouble };
    let limits = Limits { n_window_pages, ..limits };
    let mut engine = match drafts.filter(|_| head) {
        Some((seed, wrong)) => {
            engine_with_head(kinds, limits, options, trouble, (1 + seed as usize % limits.max_draft.max(1), wrong)).0
        }
        None => engine_of(kinds, limits, options, trouble),
    };
    engine.set_adaptive(drafts.is_some_and(|(seed, _)| seed.is_multiple_of(2)));
    // Each look at the clock is a millisecond after the last.
    let (start, looks) = (Instant::now(), AtomicU64::new(0));
    engine.set_clock(Arc::new(move || start + Duration::from_millis(looks.fetch_add(1, Ordering::Relaxed))));
    let known = Known::default();
    if let Some((seed, wrong)) = drafts.filter(|_| !head) {
        // A draft that is refused refuses the step; programs refuse nothing in their vocabulary.
        let guesses = Guesses { known: known.clone(), seed, n_vocab: N_VOCAB, never: trouble.refuse, wrong };
        engine.set_drafter(Some(Box::new(guesses)));
    }
    let (mut events, mut requests) = (Events::new(), Vec::<(RequestId, Request, Answer, bool)>::new());
    for action in actions {
        match action {
            Action::Submit(request) => match engine.submit(Request::clone(&request)) {
                Ok(id) => {
                    let expected = alone(Request::clone(&request), engine.context(), kinds, trouble);
                    known.lock().unwrap().push([&request.tokens[..], &expected.tokens].concat());
                    requests.push((id, *request, expected, false));
                }
                Err(error) => assert!(request.tokens.len() >= engine.context(), "{error}"),
            },
            Action::Cancel(n) => {
                let n = n % requests.len().max(1);
                if let Some((id, _, _, cancelled)) = requests.get_mut(n) {
                    let ended = answer(&events, *id).0.end.is_some();
                    assert_eq!(engine.cancel(*id), !ended && !*cancelled);
                    *cancelled |= !ended;
                    engine.audit().unwrap();
                }
            }
            Action::Step(n) => (0..n).for_each(|_| _ = step(&mut engine, &mut events)),
            Action::ClearCache => engine.clear_cache(),
        }
    }
    let mut n_steps = 0;
    while step(&mut engine, &mut events) {
        n_steps += 1;
        assert!(n_steps < 50_000, "the requests do not end: {:?}", engine.stats());
    }
    let stats = engine.stats();
    assert_eq!((stats.pages.used, stats.window_pages.used, stats.states.used), (0, 0, 0));
    for (id, request, expected, cancelled) in requests {
        let got = answer(&events, id).0;
        if matches!(got.end, Some(Ok(reason)) if reason != FinishReason::Cancelled) {
            assert_eq!(got.text, text_by_hand(&request, &got));
        }
        if cancelled {
            assert_eq!(got.end, Some(Ok(FinishReason::Cancelled)));
            assert!(expected.tokens.starts_with(&got.tokens) && expected.text.starts_with(&got.text));
            assert!(expected.logprobs.starts_with(&got.logprobs));
        } else if matches!(&got.end, Some(Err(error)) if error.contains("it is a toy")) {
            // A failed step ended it: what came before is right, and nothing came after.
            assert!(trouble.failures.is_some());
            assert!(expected.tokens.starts_with(&got.tokens) && expected.text.starts_with(&got.text));
            assert!(expected.logprobs.starts_with(&got.logprobs));
        } else {
            assert_eq!(got, expected);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 5_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_lost_page_and_no_wrong_text(
        kinds in any_kinds(),
        limits in any_limits(),
        options in any_options(),
        trouble in any_trouble(),
        drafts in option::weighted(0.7, (any::<u64>(), prop::sample::select(vec![0, 1, 2, 5, 20]))),
        head in any::<bool>(),
        actions in vec(any_action(), 1..40),
    ) {
        abuse(kinds, limits, options, trouble, (drafts, head), actions);
    }
}
