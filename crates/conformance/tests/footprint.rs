//! What a program of the CPU says it takes is what compiling allocates. Alone in its file, because it counts for the
//! whole process.
#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use backend::residency::Policy;
use backend::{Backend, CacheType, KvType, Limits};
use conformance::{PLAIN, Shape, model};
use cpu::{Cpu, Isa};
use model::plan::{DeltaHeads, DeltaRule, Sharing, ValidPlan};
use quant::WeightType::*;

/// Bytes allocated and not freed.
static LIVE: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What the lists of ops, names and threads take, which the footprint leaves out.
const LISTS: usize = 64 << 10;
/// The same of two whole layers with sparse attention; ranks of 1,024 positions for three threads are 24 kB.
const LISTS_OF_LAYERS: usize = 108 << 10;
/// Longer pieces are mapped and not counted here (`LARGE` in `cpu/mem.rs`).
const LARGE: usize = 4 << 20;

/// One test: allocations of others at the same time would be counted.
#[test]
fn the_footprint_is_what_compiling_allocates() {
    limits_that_cannot_be_saturate();
    let delta = Some((
        4,
        DeltaHeads { n_k_head: 2, n_v_head: 4, d_k: 64, d_v: 64, sharing: Sharing::Grouped, rule: DeltaRule::Delta },
    ));
    let quantised = Shape { d_model: 256, d_ff: 512, types: [Q4_K, Q8_0, Q4_K, Q8_0, Q5_K], ..PLAIN };
    let shapes = [
        ("plain", PLAIN),
        ("quantised", quantised),
        ("padded heads", Shape { d_k: 40, d_v: 24, ..PLAIN }),
        ("windows", Shape { window: Some(64), forgets: true, ..quantised }),
        ("biases and sinks", Shape { biases: true, sinks: true, ..PLAIN }),
        ("states", Shape { delta, ..quantised }),
    ];
    let small = Limits {
        max_tokens: 8,
        max_outputs: 2,
        n_pages: 8,
        max_positions: 256,
        n_window_pages: 6,
        n_states: 2,
        max_draft: 0,
    };
    let limits = [
        small,
        Limits { max_tokens: 256, max_outputs: 16, ..small },
        Limits { max_draft: 3, ..small },
        Limits { n_pages: 60, n_window_pages: 40, n_states: 20, max_positions: 1024, ..small },
    ];
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/published/deepseek_v32/hf");
    let checkpoint = checkpoint::open(folder.as_ref()).unwrap();
    let sparse = (model::build(&checkpoint).unwrap().into_plan(), Arc::new(checkpoint));
    let models = shapes.into_iter().map(|(name, shape)| (name, model(shape)));
    for (name, (plan, checkpoint)) in models.chain([("sparse attention", sparse)]) {
        let plan = ValidPlan::new(plan).unwrap();
        let lists = if name == "sparse attention" { LISTS_OF_LAYERS } else { LISTS };
        for limits in limits {
            for (cache, threads, residency) in [
                (CacheType::F16, 1, Policy::Mapped),
                (CacheType::F32, 3, Policy::CopyDense),
                (CacheType::F16, 2, Policy::CopyAll),
                (CacheType::Q8_0, 2, Policy::Mapped),
                (CacheType { k: KvType::Q8_0, v: KvType::Q4_0 }, 1, Policy::Mapped),
                (CacheType::F16, 2, Policy::Stream { slabs: 1 << 20 }),
            ] {
                if cache.misfit(&plan).is_some() {
                    continue;
                }
                let cpu = Cpu { isa: Isa::best(), threads, cache, residency };
                let footprint = cpu.footprint(&plan, limits);
                assert!(footprint.parts().iter().all(|&(_, bytes)| bytes < LARGE), "{footprint:?}");
                let before = LIVE.load(Relaxed);
                let program = cpu.compile(&plan, Arc::clone(&checkpoint), limits).unwrap();
                let allocated = LIVE.load(Relaxed) - before;
                drop(program);
                let said = footprint.allocated();
                let case = format!("{name} {limits:?} {cache:?} {residency:?}: {footprint:?}");
                assert!(allocated >= said, "{allocated} bytes allocated, {said} said: {case}");
                assert!(allocated - said < lists, "{allocated} bytes allocated, {said} said: {case}");
            }
        }
    }
}

fn limits_that_cannot_be_saturate() {
    let plan = ValidPlan::new(model(PLAIN).0).unwrap();
    let limits = Limits {
        max_tokens: usize::MAX,
        max_outputs: usize::MAX,
        n_pages: usize::MAX,
        max_positions: usize::MAX,
        n_window_pages: usize::MAX,
        n_states: usize::MAX,
        max_draft: usize::MAX,
    };
    assert_eq!(Cpu::default().footprint(&plan, limits).total(), usize::MAX);
}
