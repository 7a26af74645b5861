//! The thread pool under schedules that a machine seldom shows: its source, with the locks and atomics of a scheduler
//! that decides who runs at every one of them (shuttle). A lost wake-up is a deadlock there, and reported with its
//! schedule. It explores sequentially consistent executions; `.ci/aarch64` runs the pool on a weaker memory.
#![allow(dead_code)]

#[path = "../src/pool.rs"]
mod pool;
#[path = "../src/wait.rs"]
mod wait;

/// What the pool synchronises with.
mod sync {
    pub use std::sync::PoisonError;

    pub use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};
    pub use shuttle::thread::{Builder, JoinHandle};
}

/// Where the pool's threads go: the scheduler's have no CPU.
mod numa {
    pub fn settle(_worker: usize, _threads: usize) {}
}

/// What the pool reports when a thread cannot be started.
#[derive(Debug)]
enum CompileError {
    Start { what: String, why: String },
}

use shuttle::sync::atomic::{AtomicU32, Ordering::Relaxed};
use sync::Builder;

/// Regions of few chunks, so that threads fall asleep, wake and end in every order; without spinning, each region
/// begins and ends with threads on their way to sleep.
fn regions() {
    let mut pool = pool::Pool::start(3, wait::Patience::NONE, |_| Builder::new()).expect("threads of the scheduler");
    for n in [2usize, 3, 1, 4] {
        let counts: Vec<AtomicU32> = (0..n).map(|_| AtomicU32::new(0)).collect();
        pool.run(n, &|_, chunk| {
            counts[chunk].fetch_add(1, Relaxed);
        });
        assert!(counts.iter().all(|count| count.load(Relaxed) == 1), "{n} chunks");
    }
}

#[test]
fn random_schedules() {
    shuttle::check_random(regions, 20_000);
}

/// Schedules with few changes of thread at the worst moments (Burckhardt et al. 2010).
#[test]
fn priority_schedules() {
    shuttle::check_pct(regions, 20_000, 4);
}
