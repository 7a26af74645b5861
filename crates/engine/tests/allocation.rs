//! Decoding allocates nothing once its vectors are warm.

mod toy;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use engine::scheduler::{Events, Options, Request};
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
    let cases = [("greedy", 0.0, None), ("at temperature 1", 1.0, None), ("with log-probabilities", 1.0, Some(3))];
    let cases = KINDS.into_iter().flat_map(|kinds| cases.map(|case| (kinds, case)));
    for (kinds, (name, temperature, logprobs)) in cases {
        let mut engine = engine_of(kinds, roomy(), Options::default(), Trouble::default());
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
            assert_eq!(events.len(), 8);
        }
        assert_eq!(COUNT.get() - before, 0, "{name}, {kinds:?}");
    }
}
