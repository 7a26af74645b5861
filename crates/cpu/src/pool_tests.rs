//! Tests of the pool on the threads of this machine; `tests/pool_schedules.rs` explores schedules.
#![allow(clippy::unwrap_used)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::*};
use std::thread::Builder;
use std::time::{Duration, Instant};

use super::pool::{Pool, Region};
use super::wait::Patience;

#[test]
fn every_chunk_runs_once_whatever_the_sizes() {
    // Without patience every region ends and begins with threads on their way to sleep.
    let (step, none) = (Patience::STEP, Patience::NONE);
    for (threads, patience) in [(1, step), (2, step), (3, step), (5, step), (2, none), (4, none)] {
        let mut pool = Pool::start(threads, patience, |_| Builder::new()).unwrap();
        let counts: Vec<AtomicU32> = (0..257).map(|_| AtomicU32::new(0)).collect();
        let mut expected = vec![0u32; 257];
        for round in 0..3000usize {
            let n = round * 7 % 258;
            pool.run(n, &|worker, chunk| {
                assert!(worker < threads);
                counts[chunk].fetch_add(1, Relaxed);
            });
            expected[..n].iter_mut().for_each(|e| *e += 1);
            if round % 1000 == 0 {
                // Long enough for the workers to fall asleep.
                std::thread::sleep(Duration::from_millis(30));
            }
        }
        assert_eq!(counts.iter().map(|c| c.load(Relaxed)).collect::<Vec<_>>(), expected);
        assert_eq!(pool.regions() > 0, threads > 1);
    }
}

#[test]
fn shares_are_all_chunks_in_order_and_the_caller_has_one() {
    for threads in [1, 2, 3, 7, 16, 128] {
        for n_chunks in [1, 2, 5, 16, 63, 1000, u32::MAX - 1] {
            let region = Region { generation: 9, n_chunks };
            let mut next = 0;
            for i in 0..threads {
                let share = region.share(i, threads);
                assert_eq!(share.start, next, "share {i} of {threads}, {n_chunks} chunks");
                assert!(share.len() as u64 <= u64::from(n_chunks).div_ceil(threads as u64));
                assert!(i > 0 || !share.is_empty());
                next = share.end;
            }
            assert_eq!(next, n_chunks);
        }
    }
}

#[test]
fn a_thread_that_cannot_start_is_an_error() {
    // The third thread wants a stack that no machine has.
    let result =
        Pool::start(4, Patience::STEP, |worker| Builder::new().stack_size(if worker == 2 { 1 << 60 } else { 1 << 20 }));
    let error = result.err().unwrap().to_string();
    assert!(error.starts_with("compile plan: start 4 threads: the system gave 2"), "{error}");
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
    let mut pool = Pool::new(3).unwrap();
    for bad in 0..20usize {
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.run(20, &|_, chunk| {
                if chunk == bad {
                    panic!("chunk {chunk}");
                }
            })
        }));
        let payload = result.unwrap_err();
        assert_eq!(payload.downcast_ref::<String>().unwrap(), &format!("chunk {bad}"));
        let sum = AtomicUsize::new(0);
        pool.run(20, &|_, chunk| {
            sum.fetch_add(chunk, Relaxed);
        });
        assert_eq!(sum.into_inner(), 190);
    }
}

#[test]
fn a_slow_thread_holds_up_its_own_chunk_only() {
    let mut pool = Pool::new(4).unwrap();
    let slow = Duration::from_millis(50);
    let start = Instant::now();
    let done = AtomicUsize::new(0);
    pool.run(64, &|_, chunk| {
        // One chunk simulates a thread that lost its core; the other 63 are left to the others.
        if chunk == 0 {
            std::thread::sleep(slow);
        }
        done.fetch_add(1, Relaxed);
    });
    let took = start.elapsed();
    assert_eq!(done.into_inner(), 64);
    assert!(took < slow * 4, "{took:?} for one chunk of {slow:?}");
}
