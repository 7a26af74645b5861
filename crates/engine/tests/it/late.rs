//! Grammars whose masks come late: the text is what it is without lateness, the others go on, no page is lost, and what
//! comes too late ends.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, LazyLock, Mutex};
use std::time::{Duration, Instant};

use backend::Limits;
use checkpoint::gguf::Writer;
use engine::grammar::{Constraint, Delay, Grammars, Lead, Rule};
use engine::scheduler::{Engine, Events, FinishReason, Options, Request};
use engine::tokenizer::Tokenizer;

use crate::toy::*;

/// The toy's pieces as a byte-level vocabulary.
static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    // GPT-2's alphabet: bytes that do not print are characters from 256 on.
    let prints = |b: u32| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let moved: Vec<u32> = (0..256).filter(|&b| !prints(b)).collect();
    let letter = |&byte: &u8| match moved.iter().position(|&b| b == u32::from(byte)) {
        Some(n) => char::from_u32(256 + n as u32).unwrap(),
        None => char::from(byte),
    };
    let mut tokens: Vec<String> = PIECES.iter().map(|piece| piece.iter().map(letter).collect()).collect();
    tokens[EOS as usize] = "<end>".into();
    tokens.extend((PIECES.len()..N_VOCAB).map(|id| format!("<{id}>")));
    let types: Vec<i32> =
        (0..N_VOCAB).map(|id| if id == 0 { 3 } else { 1 + 4 * i32::from(id >= PIECES.len()) }).collect();
    let mut file = Writer::new();
    file.meta("tokenizer.ggml.model", "gpt2").meta("tokenizer.ggml.pre", "gpt-2");
    file.meta("tokenizer.ggml.tokens", tokens.iter().map(String::as_str).collect::<Vec<_>>());
    file.meta("tokenizer.ggml.token_type", types).meta("tokenizer.ggml.merges", Vec::<&str>::new());
    file.meta("tokenizer.ggml.eos_token_id", EOS);
    let mut bytes = Vec::new();
    file.write(&mut bytes).unwrap();
    let checkpoint = checkpoint::from_bytes("toy", bytes).unwrap();
    Arc::new(Tokenizer::from_metadata(checkpoint.meta()).unwrap())
});

const RULES: [&str; 4] = ["[ab ]{3,40}", "(the|E|N|D|[abc\\n]){20,60}", "(é|日|😀|x)*", "a{0,5}b{1,9}END"];

fn constrained(grammars: &Grammars, seed: u64, n: usize, max_new: usize) -> Request {
    let rule = Rule::Regex(RULES[seed as usize % RULES.len()].into());
    let constraint = Constraint::new(grammars.compile(&rule, Lead::None).unwrap());
    Request { constraint: Some(constraint), logprobs: Some(2), ..request(prompt(seed, n), seed, max_new) }
}

fn free(seed: u64, n: usize, max_new: usize) -> Request {
    Request { ignore_eos: true, ..request(prompt(seed, n), seed, max_new) }
}

/// Takes the processor's time until `is_over` says so.
fn spin(is_over: impl Fn() -> bool) {
    while !is_over() {
        std::hint::spin_loop();
    }
}

/// Masks wait at a gate.
#[derive(Default)]
struct Gate(Mutex<bool>, Condvar);

impl Gate {
    fn open(&self, is_open: bool) {
        *self.0.lock().unwrap() = is_open;
        self.1.notify_all();
    }

    fn grammars(self: &Arc<Gate>) -> Grammars {
        let gate = self.clone();
        let delay: Delay = Arc::new(move || drop(gate.1.wait_while(gate.0.lock().unwrap(), |open| !*open).unwrap()));
        Grammars::with_delay(TOKENIZER.clone(), 1, delay).unwrap()
    }
}

/// One sequence's mask does not come: the others get a token a step; cancels and preemptions leave nothing behind.
#[test]
fn others_go_on_while_one_is_late() {
    let prompt_grammars = Grammars::new(TOKENIZER.clone(), 1).unwrap();
    let alone = |request| run(&mut engine(roomy(), Options::default(), Trouble::default()), request).0;
    // With room for all, and with pages for the others only when the late one gives its own up.
    for (kinds, n_pages) in KINDS.into_iter().flat_map(|kinds| [(kinds, 64), (kinds, 5)]) {
        let gate = Arc::new(Gate::default());
        let grammars = gate.grammars();
        let alone = |request| match kinds == KINDS[0] {
            true => alone(request),
            false => run(&mut engine_of(kinds, roomy(), Options::default(), Trouble::default()), request).0,
        };
        let limits = Limits { n_pages, ..roomy() };
        let mut engine = engine_of(kinds, limits, Options::default(), Trouble::default());
        let mut events = Events::new();
        let others = [free(1, 20, 50), free(2, 10, 50)];
        let ids = others.clone().map(|request| engine.submit(request).unwrap());
        // Later than the others, so that it is the one that loses its pages.
        let late = engine.submit(constrained(&grammars, 1, 40, 70)).unwrap();
        let gone = engine.submit(constrained(&grammars, 2, 5, 70)).unwrap();
        for _ in 0..20 {
            engine.step(&mut events).unwrap();
            engine.audit().unwrap();
        }
        assert_eq!(engine.stats().late, if n_pages == 64 { 2 } else { engine.stats().late });
        assert!(engine.cancel(gone));
        // One step for the prompts, and one a token: nobody has waited for the mask.
        let begin = Instant::now();
        while engine.stats().running > 1 || ids.iter().any(|&id| answer(&events, id).0.end.is_none()) {
            engine.step(&mut events).unwrap();
            engine.audit().unwrap();
        }
        assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
        if n_pages == 64 {
            assert!(engine.stats().steps <= 53, "{:?}", engine.stats());
        }
        assert!(answer(&events, late).0.tokens.is_empty());
        gate.open(true);
        while engine.step(&mut events).unwrap() {
            engine.audit().unwrap();
        }
        let stats = engine.stats();
        assert_eq!((stats.pages.used, stats.window_pages.used, stats.states.used, stats.late), (0, 0, 0, 0));
        for (id, request) in ids.into_iter().zip(others) {
            assert_eq!(answer(&events, id).0, alone(request), "{kinds:?}");
        }
        assert_eq!(answer(&events, gone).0.end, Some(Ok(FinishReason::Cancelled)));
        assert_eq!(answer(&events, late).0, alone(constrained(&prompt_grammars, 1, 40, 70)), "{kinds:?} {n_pages}");
    }
}

/// A mask without end, and one thread for masks: it gives way to another, and sequences with quick masks go on.
#[test]
fn quick_masks_do_not_wait_for_slow_ones() {
    let calm = Grammars::new(TOKENIZER.clone(), 1).unwrap();
    let alone =
        |seed| run(&mut engine(roomy(), Options::default(), Trouble::default()), constrained(&calm, seed, 5, 30)).0;
    let (n_begun, is_open) = (AtomicU64::new(0), Arc::new(AtomicBool::new(false)));
    let opened = is_open.clone();
    let delay: Delay = Arc::new(move || {
        if n_begun.fetch_add(1, Relaxed) == 0 {
            spin(|| opened.load(Relaxed));
        }
    });
    let grammars = Grammars::with_delay(TOKENIZER.clone(), 1, delay).unwrap();
    let mut engine = engine(roomy(), Options::default(), Trouble::default());
    let mut events = Events::new();
    let slow = engine.submit(constrained(&grammars, 1, 5, 30)).unwrap();
    let quick = [2, 3, 5].map(|seed| (seed, engine.submit(constrained(&grammars, seed, 5, 30)).unwrap()));
    let begin = Instant::now();
    while quick.iter().any(|&(_, id)| answer(&events, id).0.end.is_none()) {
        engine.step(&mut events).unwrap();
        assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", engine.stats());
    }
    assert_eq!((answer(&events, slow).0.tokens.len(), answer(&events, slow).0.end), (0, None));
    is_open.store(true, Relaxed);
    while engine.step(&mut events).unwrap() {}
    for (seed, id) in quick.into_iter().chain([(1, slow)]) {
        assert_eq!(answer(&events, id).0, alone(seed), "{seed}");
    }
}

/// What does not come at all ends its answer, alone and in company, and a step never waits long.
#[test]
fn what_comes_too_late_ends() {
    for company in [false, true] {
        let is_open = Arc::new(AtomicBool::new(false));
        let opened = is_open.clone();
        let delay: Delay = Arc::new(move || spin(|| opened.load(Relaxed)));
        let grammars = Grammars::with_delay(TOKENIZER.clone(), 1, delay).unwrap();
        let mut engine = engine(roomy(), Options::default(), Trouble::default());
        let mut events = Events::new();
        if company {
            engine.submit(free(1, 5, 1000)).unwrap();
        }
        let late = engine.submit(constrained(&grammars, 1, 10, 40)).unwrap();
        let (begin, mut longest) = (Instant::now(), Duration::ZERO);
        while answer(&events, late).0.end.is_none() {
            let step = Instant::now();
            if !engine.step(&mut events).unwrap() {
                engine.submit(free(1, 5, 1000)).unwrap();
            }
            longest = longest.max(step.elapsed());
            assert!(begin.elapsed() < Duration::from_secs(40), "{:?}", engine.stats());
        }
        let end = answer(&events, late).0.end;
        assert!(matches!(&end, Some(Err(error)) if error.contains("a step of it takes longer than")), "{end:?}");
        assert!(longest < Duration::from_millis(500), "a step of {longest:?}");
        is_open.store(true, Relaxed);
    }
}

/// What is slow now and then is not taken for a grammar that is slow: every second mask is late, by more in all than a
/// grammar may be.
#[test]
fn single_delays_end_nothing() {
    let turn = AtomicU64::new(0);
    let delay: Delay = Arc::new(move || {
        if turn.fetch_add(1, Relaxed).is_multiple_of(2) {
            let begin = Instant::now();
            spin(|| begin.elapsed() > Duration::from_millis(450));
        }
    });
    let slow = Grammars::with_delay(TOKENIZER.clone(), 1, delay).unwrap();
    let calm = Grammars::new(TOKENIZER.clone(), 1).unwrap();
    let [slow, calm] = [slow, calm].map(|grammars| {
        let rule = Rule::Regex("[ab ]{60}".into());
        let constraint = Some(Constraint::new(grammars.compile(&rule, Lead::None).unwrap()));
        let request = Request { constraint, ..request(prompt(3, 5), 3, 24) };
        run(&mut engine(roomy(), Options::default(), Trouble::default()), request).0
    });
    assert_eq!(slow, calm);
    assert_eq!((slow.tokens.len(), slow.end), (24, Some(Ok(FinishReason::Length))));
}

/// Random schedules: masks late now and then, few pages, cancels, drafts. Texts are those of solo runs.
#[test]
fn lateness_changes_no_text() {
    let calm = Grammars::new(TOKENIZER.clone(), 1).unwrap();
    let turn = Arc::new(AtomicU64::new(0));
    let counter = turn.clone();
    let delay: Delay = Arc::new(move || {
        let h = mix(77, counter.fetch_add(1, Relaxed));
        // Late, and by the processor's time: slow.
        if h.is_multiple_of(8) {
            std::thread::sleep(Duration::from_micros(2_000 + (h >> 32) % 4_000));
        } else if h.is_multiple_of(61) {
            let begin = Instant::now();
            spin(|| begin.elapsed() > Duration::from_millis(12));
        }
    });
    let slow = Grammars::with_delay(TOKENIZER.clone(), 2, delay).unwrap();
    let (mut n_late, mut n_preempted, mut n_accepted, mut n_cancelled) = (0, 0, 0, 0);
    for seed in 0..120u64 {
        let pick = |what: u64, n: u64| mix(mix(seed, what), 5) % n;
        let kinds = KINDS[pick(0, 6) as usize];
        let max_draft = pick(1, 2) as usize * 4;
        let limits =
            Limits { max_tokens: 8 + pick(2, 60) as usize, n_pages: 5 + pick(3, 2) as usize, max_draft, ..roomy() };
        let options =
            Options { chunk: 5 + pick(4, 40) as usize, max_running: 2 + pick(5, 5) as usize, ..Options::default() };
        let any = |i: u64, grammars: &Grammars| {
            let (n, max_new) = (1 + mix(seed, i) as usize % 40, 10 + mix(seed, i + 50) as usize % 100);
            let request = match i % 3 {
                0 => free(i % 2, n, max_new),
                _ => constrained(grammars, mix(seed, i + 99) % 40, n, max_new),
            };
            Request { priority: (mix(seed, i + 7) % 3) as i32, ..request }
        };
        let alone: Vec<(Request, Answer)> = (0..6)
            .map(|i| {
                let request = any(i, &calm);
                (
                    request.clone(),
                    run(&mut engine_of(kinds, roomy(), Options::default(), Trouble::default()), request).0,
                )
            })
            .collect();
        let mut engine = engine_of(kinds, limits, options, Trouble::default());
        let known = alone.iter().map(|(request, answer)| [&request.tokens[..], &answer.tokens].concat());
        let known = Known::new(known.collect::<Vec<_>>().into());
        engine.set_drafter(Some(Box::new(Guesses { known, seed, n_vocab: N_VOCAB, never: None, wrong: 5 })));
        let mut events = Events::new();
        let ids: Vec<_> = (0..6).map(|i| engine.submit(any(i, &slow)).unwrap()).collect();
        let mut cancelled = Vec::new();
        for n in 0..20_000u64 {
            let more = engine.step(&mut events).unwrap();
            engine.audit().unwrap();
            n_late += engine.stats().late;
            let victim = ids[mix(seed, n) as usize % ids.len()];
            if mix(n, seed).is_multiple_of(40) && engine.cancel(victim) {
                cancelled.push(victim);
                engine.audit().unwrap();
            }
            if !more {
                break;
            }
        }
        assert!(!engine.has_work(), "{:?}", engine.stats());
        check(&engine, &events, &ids, &alone, &cancelled);
        n_preempted += engine.stats().preemptions;
        n_accepted += engine.stats().accepted;
        n_cancelled += cancelled.len();
    }
    println!("late {n_late}, preempted {n_preempted}, drafts {n_accepted}, cancelled {n_cancelled}");
    assert!(n_late > 500 && n_preempted > 10 && n_accepted > 500 && n_cancelled > 20);
}

fn check(
    engine: &Engine,
    events: &Events,
    ids: &[engine::scheduler::RequestId],
    alone: &[(Request, Answer)],
    cancelled: &[engine::scheduler::RequestId],
) {
    let stats = engine.stats();
    assert_eq!((stats.pages.used, stats.window_pages.used, stats.states.used), (0, 0, 0));
    for (&id, (_, expected)) in ids.iter().zip(alone) {
        let got = answer(events, id).0;
        match cancelled.contains(&id) {
            true => assert!(expected.tokens.starts_with(&got.tokens) && expected.text.starts_with(&got.text)),
            false => assert_eq!(got, *expected),
        }
    }
}
