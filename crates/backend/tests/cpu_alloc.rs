//! A step of the CPU backend allocates nothing. Alone in its file, because it counts for the whole process.
#![allow(clippy::unwrap_used)]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use backend::cpu::{CacheType, Cpu, Isa};
use backend::residency::Policy;
use common::{PLAIN, Session, Shape, model, tokens};
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
        for residency in [Policy::Mapped, Policy::Stream { slabs: 0 }] {
            let mut session =
                Session::new(&Cpu { isa: Isa::best(), threads: 2, cache: CacheType::F16, residency }, &model, 1024);
            let prompt = tokens(600, 1);
            // The batch's own vectors grow to their size here; its page tables grow with the positions as well.
            session.batch.pages.reserve(1024);
            session.batch.window_pages.reserve(1024);
            session.step(&[(0, &prompt), (2, &prompt[..9])]);
            let before = COUNT.load(Relaxed);
            for i in 0..50 {
                session.step(&[(0, &prompt[i..i + 1])]);
            }
            session.step(&[(1, &prompt[..100]), (0, &prompt[..3])]);
            assert_eq!(COUNT.load(Relaxed) - before, 0, "{residency:?}");
        }
    }
}
