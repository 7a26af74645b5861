//! Decoding allocates nothing once its vectors are warm.

use backend::Limits;
use engine::scheduler::{Events, Options, PromptLookup, Request};

use crate::heap;
use crate::toy::*;

#[test]
fn decoding_allocates_nothing() {
    let cases = [
        ("greedy", 0.0, None, 0, false),
        ("at temperature 1", 1.0, None, 0, false),
        ("with log-probabilities", 1.0, Some(3), 0, false),
        ("with drafts", 1.0, Some(3), 2, false),
        ("with as many drafts as pay", 1.0, Some(3), 2, true),
    ];
    let cases = KINDS.into_iter().flat_map(|kinds| cases.map(|case| (kinds, case)));
    for (kinds, (name, temperature, logprobs, max_draft, is_adaptive)) in cases {
        let limits = Limits { max_draft, ..roomy() };
        let mut engine = engine_of(kinds, limits, Options::default(), Trouble::default());
        if max_draft > 0 {
            engine.set_drafter(Some(Box::new(PromptLookup { min: 1, max: 2, reach: 50 })));
        }
        engine.set_adaptive(is_adaptive);
        for seed in 0..8 {
            let request = Request {
                ignore_eos: true,
                logprobs,
                stop_strings: vec!["never in it".into(), "END OF ALL".into()],
                sampling: sampling(temperature, seed),
                ..request(prompt(seed, 40), seed, 200)
            };
            engine.submit(request).unwrap();
        }
        let mut events = Events::new();
        for _ in 0..20 {
            engine.step(&mut events).unwrap();
        }
        // Several steps' events at once are more than any later step's.
        events.clear();
        let before = heap::count();
        // Twice over the edge of a page for every sequence.
        for _ in 0..80 {
            events.clear();
            assert!(engine.step(&mut events).unwrap());
            assert!(events.len() == 8 || (max_draft > 0 && events.len() > 8));
        }
        assert_eq!(heap::count() - before, 0, "{name}, {kinds:?}");
        // How many pay follows from measured times.
        assert_eq!(engine.stats().drafted > if is_adaptive { 0 } else { 100 }, max_draft > 0);
    }
}
