//! A step of the CPU backend allocates nothing. Alone in its file, because it counts for the whole process.
#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use backend::CacheType;
use backend::residency::Policy;
use conformance::{PLAIN, Session, Shape, model, tokens};
use cpu::{Cpu, Isa};
use quant::WeightType::*;

static COUNT: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNT.fetch_add(1, Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn steps_allocate_nothing() {
    for types in [[F32; 5], [Q4_K, Q8_0, Q4_K, Q8_0, Q5_K]] {
        let model = model(Shape { d_model: 256, d_ff: 256, types, ..PLAIN });
        for (residency, cache) in [
            (Policy::Mapped, CacheType::F16),
            (Policy::Stream { slabs: 0 }, CacheType::F16),
            (Policy::Mapped, CacheType::Q8_0),
            (Policy::Mapped, CacheType::Q4_0),
        ] {
            let mut session = Session::new(&Cpu { isa: Isa::best(), threads: 2, cache, residency }, &model, 1024);
            let prompt = tokens(600, 1);
            // The batch's own vectors grow to their size here; its page tables grow with the positions as well.
            session.batch.pages.reserve(1024);
            session.batch.window_pages.reserve(1024);
            session.step(&[(0, &prompt), (2, &prompt[..9])]);
            // A thread allocates when it starts, which may be during a later step. Steps that allocate do so each time.
            let mut counts = [0; 4];
            for count in &mut counts {
                let before = COUNT.load(Relaxed);
                for i in 0..50 {
                    session.step(&[(0, &prompt[i..i + 1])]);
                }
                session.step(&[(1, &prompt[..100]), (0, &prompt[..3])]);
                *count = COUNT.load(Relaxed) - before;
            }
            assert!(counts.contains(&0), "{residency:?}, {cache} cache: {counts:?} allocations");
        }
    }
}
