//! The thread pool: one parallel region at a time, the caller working too. The chunks of a region are cut into shares
//! of neighbours, one for each thread. A thread claims its own share in order, which is one long stream of weights, and
//! its claims touch no cache line that others write. Then it takes what is left of the other shares.
//!
//! Claims from one counter for all threads had cost, on 16 cores of a Xeon of the Sapphire Rapids class and
//! Qwen3-30B-A3B's shape: decode 35.3 tok/s -> 39.4, 8 sequences together 72.7 -> 77.8.
//!
//! A region never waits for a thread that has not started a chunk. A thread that loses its core delays the others by
//! its own chunk at most, so the pool degrades gently when other programs use the cores. Waiting threads spin (the
//! regions of a step follow each other within microseconds), yield, and then sleep ([`super::wait`]). The pool knows
//! nothing of the work in the chunks.
//!
//! A thread sets its sleeping flag, then re-checks for work; a producer publishes work (or the end of it), then checks
//! the flags. One of the two must see the other. Sequentially consistent stores and loads would suffice by the
//! language, but QEMU 7.2 puts no barrier between Arm's `stlr` and `ldar` on x86, and wake-ups were lost there: all
//! four flags are written by a read-modify-write.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use super::numa;
use super::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use super::sync::{Arc, Builder, Condvar, JoinHandle, Mutex, MutexGuard, PoisonError};
use super::wait::{Patience, Waits};
use backend::CompileError;

/// A fixed set of threads.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    regions: u64,
    /// Time in regions, while they are timed.
    timed: Option<Duration>,
    /// The caller's waits.
    waits: Waits,
}

/// A parallel region. In a word it is what threads wait for; the word of a share has the same form, with the next chunk
/// in place of their number.
#[derive(Clone, Copy, Debug)]
pub(super) struct Region {
    pub generation: u32,
    pub n_chunks: u32,
}

impl Region {
    fn of(word: u64) -> Region {
        Region { generation: (word >> 32) as u32, n_chunks: word as u32 }
    }

    fn word(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.n_chunks)
    }

    /// The chunks of share `i` of `n`. Of fewer chunks than shares, the caller's share, the first, has one.
    pub fn share(self, i: usize, n: usize) -> Range<u32> {
        let bound = |i: usize| (i as u64 * u64::from(self.n_chunks)).div_ceil(n as u64) as u32;
        bound(i)..bound(i + 1)
    }
}

/// A value alone on its cache lines.
#[repr(align(128))]
struct Alone<T>(T);

/// State that the threads share.
struct Shared {
    job: Alone<Job>,
    /// Chunks finished.
    done: Alone<AtomicU32>,
    /// Of each share, the generation that it was last claimed in and the next chunk to claim there, `[threads]`.
    shares: Vec<Alone<AtomicU64>>,
    /// Workers that sleep or are about to.
    sleepers: Alone<AtomicUsize>,
    /// How long a thread waits before it sleeps.
    patience: Patience,
    caller_sleeps: AtomicBool,
    stop: AtomicBool,
    panicked: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// Time in chunks in nanoseconds, of all threads, while regions are timed.
    is_timed: AtomicBool,
    busy: Alone<AtomicU64>,
    lock: Mutex<()>,
    work: Condvar,
    finished: Condvar,
}

/// The region to work on; published last, behind its closure. The closure changes only while no chunk is claimed and
/// unfinished.
struct Job {
    region: AtomicU64,
    /// The closure, type erased, and the function that knows its type.
    closure: AtomicPtr<()>,
    call: AtomicPtr<()>,
}

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
        Pool::start(threads, Patience::STEP, |worker| Builder::new().name(format!("cpu-{worker}")))
    }

    pub(super) fn start(
        threads: usize,
        patience: Patience,
        builder: impl Fn(usize) -> Builder,
    ) -> Result<Pool, CompileError> {
        let shared = Arc::new(Shared {
            job: Alone(Job {
                region: AtomicU64::new(0),
                closure: AtomicPtr::new(std::ptr::null_mut()),
                call: AtomicPtr::new(std::ptr::null_mut()),
            }),
            done: Alone(AtomicU32::new(0)),
            shares: (0..threads.max(1)).map(|_| Alone(AtomicU64::new(0))).collect(),
            sleepers: Alone(AtomicUsize::new(0)),
            patience,
            caller_sleeps: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            panic: Mutex::new(None),
            is_timed: AtomicBool::new(false),
            busy: Alone(AtomicU64::new(0)),
            lock: Mutex::new(()),
            work: Condvar::new(),
            finished: Condvar::new(),
        });
        let mut pool = Pool { shared, workers: Vec::new(), regions: 0, timed: None, waits: Waits::default() };
        for worker in 1..threads {
            let shared = pool.shared.clone();
            let spawned = builder(worker).spawn(move || {
                numa::settle(worker, shared.shares.len());
                shared.worker_loop(worker);
            });
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
        self.shared.is_timed.store(is_on, Relaxed);
        self.shared.busy.0.store(0, Relaxed);
    }

    /// Time in parallel regions since they are timed.
    pub fn time_in_regions(&self) -> Duration {
        self.timed.unwrap_or_default()
    }

    /// Time in chunks of parallel regions since they are timed, summed over threads.
    pub fn time_in_chunks(&self) -> Duration {
        Duration::from_nanos(self.shared.busy.0.load(Relaxed))
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
        let last = Region::of(s.job.0.region.load(Relaxed));
        s.job.0.closure.store(std::ptr::from_ref(f).cast_mut().cast(), Relaxed);
        s.job.0.call.store(call::<F> as Call as *mut (), Relaxed);
        s.done.0.store(0, Relaxed);
        let region = Region { generation: last.generation.wrapping_add(1), n_chunks: n_chunks as u32 };
        s.job.0.region.swap(region.word(), SeqCst);
        if s.sleepers.0.load(SeqCst) > 0 {
            let _guard = s.locked();
            s.work.notify_all();
        }
        s.work_on(region, 0);
        s.wait_until_done(n_chunks as u32, &mut self.waits);
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

    /// Runs chunks of `region` until all are claimed.
    fn work_on(&self, region: Region, worker: usize) {
        let n = self.shares.len();
        let mut finished = 0;
        while let Some(chunk) = self.claim(region, worker) {
            self.run_chunk(worker, chunk);
            finished += 1;
        }
        self.finish(region, finished);
        for share in (worker + 1..n).chain(0..worker) {
            while let Some(chunk) = self.claim(region, share) {
                self.run_chunk(worker, chunk);
                self.finish(region, 1);
            }
        }
    }

    /// Claims the next chunk of a share; `None` when all of `region` are claimed.
    ///
    /// A region ends when all its chunks are claimed and finished: every share that had chunks then says so, or is in a
    /// later region. So a thread that still holds the word of a region that has ended claims nothing, and one that
    /// claimed a chunk knows that its region has not ended.
    fn claim(&self, region: Region, share: usize) -> Option<u32> {
        let Range { start, end } = region.share(share, self.shares.len());
        let word = &self.shares[share].0;
        let mut seen = word.load(Acquire);
        loop {
            let Region { generation, n_chunks: mut chunk } = Region::of(seen);
            if generation != region.generation {
                // A later one, which this thread has not seen yet, or an earlier one.
                if self.job.0.region.load(Acquire) != region.word() {
                    return None;
                }
                chunk = start;
            }
            if chunk >= end {
                return None;
            }
            let next = Region { n_chunks: chunk + 1, ..region }.word();
            match word.compare_exchange_weak(seen, next, AcqRel, Acquire) {
                Ok(_) => return Some(chunk),
                Err(now) => seen = now,
            }
        }
    }

    /// Runs a chunk that this thread has claimed.
    fn run_chunk(&self, worker: usize, chunk: u32) {
        if self.panicked.load(Relaxed) {
            return;
        }
        // The claim proves that the region has not ended, so that these are its closure.
        let (closure, call) = (self.job.0.closure.load(Relaxed), self.job.0.call.load(Relaxed));
        let start = self.is_timed.load(Relaxed).then(Instant::now);
        let result = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: `run` stored a function pointer of this type together with the closure it is for, and does not
            // return before this claimed chunk is counted as done, so the closure lives.
            unsafe { std::mem::transmute::<*mut (), Call>(call)(closure, worker, chunk as usize) }
        }));
        if let Some(start) = start {
            self.busy.0.fetch_add(start.elapsed().as_nanos() as u64, Relaxed);
        }
        if let Err(payload) = result {
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(payload);
            self.panicked.store(true, Relaxed);
        }
    }

    /// Counts `n` chunks as done.
    fn finish(&self, region: Region, n: u32) {
        if n > 0 && self.done.0.fetch_add(n, SeqCst) + n == region.n_chunks && self.caller_sleeps.load(SeqCst) {
            let _guard = self.locked();
            self.finished.notify_one();
        }
    }

    fn wait_until_done(&self, n_chunks: u32, waits: &mut Waits) {
        waits.end();
        while self.done.0.load(Acquire) != n_chunks {
            if waits.turn(self.patience) {
                continue;
            }
            return self.sleep_until_done(n_chunks);
        }
    }

    fn sleep_until_done(&self, n_chunks: u32) {
        let mut guard = self.locked();
        self.caller_sleeps.swap(true, SeqCst);
        while self.done.0.load(SeqCst) != n_chunks {
            guard = self.finished.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.caller_sleeps.store(false, SeqCst);
    }

    fn worker_loop(&self, worker: usize) {
        let (mut waits, mut last) = (Waits::default(), 0);
        while !self.stop.load(Relaxed) {
            let word = self.job.0.region.load(Acquire);
            if word != last {
                self.work_on(Region::of(word), worker);
                last = word;
                waits.end();
            } else if !waits.turn(self.patience) {
                waits.end();
                let mut guard = self.locked();
                self.sleepers.0.fetch_add(1, SeqCst);
                while self.job.0.region.load(SeqCst) == last && !self.stop.load(SeqCst) {
                    guard = self.work.wait(guard).unwrap_or_else(PoisonError::into_inner);
                }
                self.sleepers.0.fetch_sub(1, SeqCst);
            }
        }
    }
}
