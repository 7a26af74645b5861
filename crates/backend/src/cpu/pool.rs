//! The thread pool: one parallel region at a time, its chunks claimed from an atomic, the caller working too.
//!
//! A region never waits for a thread that has not started a chunk. A thread that loses its core delays the others by
//! its own chunk at most, so the pool degrades gently when other programs use the cores. Waiting threads spin briefly
//! (the regions of a step follow each other within microseconds) and then sleep. The pool knows nothing of the work in
//! the chunks.
//!
//! A thread sets its sleeping flag, then re-checks for work; a producer publishes work (or the end of it), then checks
//! the flags. One of the two must see the other. Sequentially consistent stores and loads would suffice by the
//! language, but QEMU 7.2 puts no barrier between Arm's `stlr` and `ldar` on x86, and wake-ups were lost there: all
//! four flags are written by a read-modify-write.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use super::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use super::sync::{Arc, Builder, Condvar, JoinHandle, Mutex, MutexGuard, PoisonError};
use crate::CompileError;

/// Pauses before a waiting thread sleeps: 150 to 500 µs, longer than the serial parts between two regions of a step.
/// With a fifth of it the workers slept several times a token, and decode lost 3% (AMD EPYC 9004, 2 cores,
/// Qwen3-30B-A3B's shape).
pub(super) const SPINS: u32 = 10_000;

/// A fixed set of threads.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    regions: u64,
    /// Time in regions, while they are timed.
    timed: Option<Duration>,
}

/// A value alone on its cache lines.
#[repr(align(128))]
struct Alone<T>(T);

/// State that the threads share. The job's fields change only while no chunk is claimed and unfinished.
struct Shared {
    /// Generation of the job in the upper half, the next chunk to claim in the lower.
    ticket: Alone<AtomicU64>,
    /// Chunks finished.
    done: Alone<AtomicU32>,
    /// Number of chunks.
    n_chunks: AtomicU32,
    /// The closure, type erased, and the function that knows its type.
    closure: AtomicPtr<()>,
    call: AtomicPtr<()>,
    /// Workers that sleep or are about to.
    sleepers: AtomicUsize,
    /// Pauses before a waiting thread sleeps.
    spins: u32,
    caller_sleeps: AtomicBool,
    stop: AtomicBool,
    panicked: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    lock: Mutex<()>,
    work: Condvar,
    finished: Condvar,
}

/// Lower half of a ticket that is never claimable.
const CLOSED: u64 = u32::MAX as u64;

type Call = unsafe fn(*const (), usize, usize);

/// Calls the closure of type `F` behind `closure`.
///
/// # Safety
/// `closure` points to a live `F`.
unsafe fn call<F: Fn(usize, usize) + Sync>(closure: *const (), worker: usize, chunk: usize) {
    // SAFETY: the caller's promise.
    unsafe { (*closure.cast::<F>())(worker, chunk) }
}

impl Pool {
    /// Starts `threads - 1` workers; the caller of [`Pool::run`] is the last thread.
    ///
    /// # Errors
    /// [`CompileError::Start`] when the system refuses one: a smaller pool would pass for a slow model.
    pub fn new(threads: usize) -> Result<Pool, CompileError> {
        Pool::start(threads, SPINS, |worker| Builder::new().name(format!("cpu-{worker}")))
    }

    pub(super) fn start(threads: usize, spins: u32, builder: impl Fn(usize) -> Builder) -> Result<Pool, CompileError> {
        let shared = Arc::new(Shared {
            ticket: Alone(AtomicU64::new(0)),
            done: Alone(AtomicU32::new(0)),
            n_chunks: AtomicU32::new(0),
            closure: AtomicPtr::new(std::ptr::null_mut()),
            call: AtomicPtr::new(std::ptr::null_mut()),
            sleepers: AtomicUsize::new(0),
            spins,
            caller_sleeps: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            panic: Mutex::new(None),
            lock: Mutex::new(()),
            work: Condvar::new(),
            finished: Condvar::new(),
        });
        let mut pool = Pool { shared, workers: Vec::new(), regions: 0, timed: None };
        for worker in 1..threads {
            let shared = pool.shared.clone();
            let spawned = builder(worker).spawn(move || shared.worker_loop(worker));
            pool.workers.push(spawned.map_err(|error| CompileError::Start {
                what: format!("{threads} threads"),
                why: format!("the system gave {worker}: {error}; use fewer"),
            })?);
        }
        Ok(pool)
    }

    /// Number of threads, the caller included. Worker indices are below it.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Parallel regions so far, for tests and traces; those that ran on the caller alone are not counted.
    pub fn regions(&self) -> u64 {
        self.regions
    }

    /// Whether parallel regions are timed from now on, from zero.
    pub fn time_regions(&mut self, is_on: bool) {
        self.timed = is_on.then_some(Duration::ZERO);
    }

    /// Time in parallel regions since they are timed.
    pub fn time_in_regions(&self) -> Duration {
        self.timed.unwrap_or_default()
    }

    /// Runs `f(worker, chunk)` for every chunk below `n_chunks`, each once, and returns when all are done.
    ///
    /// Two chunks that run at the same time have different workers. A panic in a chunk becomes a panic of the caller
    /// after the last chunk; chunks that were not begun by then may be skipped.
    pub fn run<F: Fn(usize, usize) + Sync>(&mut self, n_chunks: usize, f: &F) {
        if n_chunks <= 1 || self.workers.is_empty() {
            return (0..n_chunks).for_each(|chunk| f(0, chunk));
        }
        assert!(n_chunks < u32::MAX as usize, "a parallel region has at most 2^32 - 2 chunks");
        self.regions += 1;
        let start = self.timed.is_some().then(Instant::now);
        let s = &*self.shared;
        // Close the old ticket before its fields change: a larger count would make it claimable again. A thread that
        // reads a new field (release, acquire) has the closed ticket behind it and cannot claim by the old one.
        let generation = (s.ticket.0.load(Relaxed) >> 32).wrapping_add(1);
        s.ticket.0.store(generation << 32 | CLOSED, SeqCst);
        s.closure.store(std::ptr::from_ref(f).cast_mut().cast(), Release);
        s.call.store(call::<F> as Call as *mut (), Release);
        s.n_chunks.store(n_chunks as u32, Release);
        s.done.0.store(0, Relaxed);
        s.ticket.0.swap(generation << 32, SeqCst);
        if s.sleepers.load(SeqCst) > 0 {
            let _guard = s.locked();
            s.work.notify_all();
        }
        while s.work_once(0) {}
        s.wait_until_done(n_chunks as u32);
        if let (Some(timed), Some(start)) = (&mut self.timed, start) {
            *timed += start.elapsed();
        }
        if s.panicked.swap(false, Relaxed) {
            let payload = s.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
            resume_unwind(payload.unwrap_or_else(|| Box::new("a chunk of a parallel region panicked")));
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        {
            let _guard = self.shared.locked();
            self.shared.work.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A worker's loop catches the panics of chunks, so there is nothing to pass on.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn locked(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a chunk seems to be left; the ticket corrects a stale answer.
    fn has_work(&self) -> bool {
        let ticket = self.ticket.0.load(SeqCst);
        (ticket as u32) < self.n_chunks.load(Relaxed)
    }

    /// Claims and runs one chunk; false when none is left.
    fn work_once(&self, worker: usize) -> bool {
        let mut ticket = self.ticket.0.load(Acquire);
        let (n_chunks, closure, call) = loop {
            let job = (self.n_chunks.load(Acquire), self.closure.load(Acquire), self.call.load(Acquire));
            if ticket as u32 >= job.0 {
                return false;
            }
            // Success proves that the ticket's job had an unclaimed chunk at that moment, so that its fields were not
            // being replaced while they were read above.
            match self.ticket.0.compare_exchange_weak(ticket, ticket + 1, AcqRel, Acquire) {
                Ok(_) => break job,
                Err(now) => ticket = now,
            }
        };
        let chunk = ticket as u32 as usize;
        if !self.panicked.load(Relaxed) {
            let result = catch_unwind(AssertUnwindSafe(|| {
                // SAFETY: `run` stored a function pointer of this type together with the closure it is for, and does
                // not return before this claimed chunk is counted as done, so the closure lives.
                unsafe { std::mem::transmute::<*mut (), Call>(call)(closure, worker, chunk) }
            }));
            if let Err(payload) = result {
                *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(payload);
                self.panicked.store(true, Relaxed);
            }
        }
        if self.done.0.fetch_add(1, SeqCst) + 1 == n_chunks && self.caller_sleeps.load(SeqCst) {
            let _guard = self.locked();
            self.finished.notify_one();
        }
        true
    }

    fn wait_until_done(&self, n_chunks: u32) {
        for _ in 0..self.spins {
            if self.done.0.load(Acquire) == n_chunks {
                return;
            }
            std::hint::spin_loop();
        }
        let mut guard = self.locked();
        self.caller_sleeps.swap(true, SeqCst);
        while self.done.0.load(SeqCst) != n_chunks {
            guard = self.finished.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.caller_sleeps.store(false, SeqCst);
    }

    fn worker_loop(&self, worker: usize) {
        let mut spins = 0;
        while !self.stop.load(Relaxed) {
            if self.work_once(worker) {
                spins = 0;
            } else if spins < self.spins {
                spins += 1;
                std::hint::spin_loop();
            } else {
                spins = 0;
                let mut guard = self.locked();
                self.sleepers.fetch_add(1, SeqCst);
                while !self.has_work() && !self.stop.load(SeqCst) {
                    guard = self.work.wait(guard).unwrap_or_else(PoisonError::into_inner);
                }
                self.sleepers.fetch_sub(1, SeqCst);
            }
        }
    }
}
