//! Decoding allocates nothing once its vectors are warm.

mod toy;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use backend::Limits;
use engine::scheduler::{Events, Options, PromptLookup, Request};
use toy::*;

struct Counting;

thread_local! {
    /// Allocations of this thread; the test harness has other threads.
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system allocator unchanged; counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller keeps `realloc`'s contract.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps `dealloc`'s contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn decoding_allocates_nothing() {
    let cases = [
        ("greedy", 0.0, None, 0),
        ("at temperature 1", 1.0, None, 0),
        ("with log-probabilities", 1.0, Some(3), 0),
        ("with drafts", 1.0, Some(3), 2),
    ];
    let cases = KINDS.into_iter().flat_map(|kinds| cases.map(|case| (kinds, case)));
    for (kinds, (name, temperature, logprobs, max_draft)) in cases {
        let limits = Limits { max_draft, ..roomy() };
        let mut engine = engine_of(kinds, limits, Options::default(), Trouble::default());
        if max_draft > 0 {
            engine.set_drafter(Some(Box::new(PromptLookup { min: 1, max: 2, reach: 50 })));
        }
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
        let before = COUNT.get();
        // Twice over the edge of a page for every sequence.
        for _ in 0..80 {
            events.clear();
            assert!(engine.step(&mut events).unwrap());
            assert!(events.len() == 8 || (max_draft > 0 && events.len() > 8));
        }
        assert_eq!(COUNT.get() - before, 0, "{name}, {kinds:?}");
        assert_eq!(engine.stats().drafted > 100, max_draft > 0);
    }
}
