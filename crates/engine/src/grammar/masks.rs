//! The threads that compute masks, in two ranks. A mask takes microseconds, as a rule, and its thread competes with
//! those of the model. One that has taken longer than a step waits for it is done by a thread that gives way: on cores
//! that the model leaves idle. As a thread cannot get its rank back, another takes its place, and it ends behind the
//! mask. So slow grammars hold up neither the model nor the masks of others.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use llguidance::Matcher;
use llguidance::api::StopReason;
use llguidance::toktrie::SimpleVob;
use sys::rank;

use super::{Delay, Error, first_line};

/// Time of the processor from which a mask counts as slow. Nearly all of those in use take less.
const QUICK: Duration = Duration::from_millis(5);
/// Masks of a sequence that are done by threads which give way, behind one that was slow.
const N_BEHIND: u32 = 16;

/// Time of the processor from which taking a token counts as slow: steps wait for it.
const QUICK_TAKE: Duration = Duration::from_millis(1);

/// A mask to be computed.
pub(super) struct Job {
    pub matcher: Box<Matcher>,
    /// A token to be taken before, and who hears whether nothing can follow.
    pub token: Option<(u32, SyncSender<Taken>)>,
    /// Who hears, before the mask is computed, which tokens must follow.
    pub forced: Option<SyncSender<Vec<u32>>>,
    pub reply: SyncSender<Mask>,
}

/// Whether nothing can follow a token, or why it cannot be taken.
pub(super) type Taken = Result<bool, String>;

/// A job on its way.
struct Begun {
    job: Job,
    progress: Arc<Progress>,
}

/// How far a mask is.
#[derive(Default)]
pub(super) struct Progress {
    /// When a thread took it.
    pub begun: OnceLock<Instant>,
    work: rank::Work,
}

impl Progress {
    /// Returns the time of the processor that it has taken up to now.
    pub fn took(&self) -> Duration {
        self.work.took().unwrap_or_default()
    }
}

/// What comes back.
pub(super) struct Mask {
    pub matcher: Box<Matcher>,
    pub finished: Instant,
    /// Time of the processor that it took.
    pub took: Duration,
    /// The tokens that are allowed, or why there are none.
    pub tokens: Result<SimpleVob, String>,
}

/// How the masks of one sequence have been.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Record {
    n_behind: u32,
    was_slow: bool,
}

impl Record {
    /// Of a sequence whose first mask is known to take so long.
    pub fn of_first(took: Duration) -> Record {
        let mut record = Record::default();
        record.add(took);
        record
    }

    /// Notes what a mask took.
    pub fn add(&mut self, took: Duration) {
        self.was_slow = took > QUICK;
        self.n_behind = if self.was_slow { N_BEHIND } else { self.n_behind.saturating_sub(1) };
    }

    /// Notes what taking a token took.
    pub fn add_taken(&mut self, took: Duration) {
        if took > QUICK_TAKE {
            self.n_behind = N_BEHIND;
        }
    }

    /// Returns whether its next mask is computed by a thread that gives way, after the token before.
    pub fn is_behind(self) -> bool {
        self.n_behind > 0
    }

    /// Returns whether others wait for its next mask, should it be late.
    pub fn is_waited_for(self) -> bool {
        !self.was_slow
    }
}

/// The way to the threads, which end when nobody has it any more.
#[derive(Clone)]
pub(super) struct Masks {
    quick: Sender<Begun>,
    slow: Sender<Begun>,
    threads: Arc<Threads>,
}

struct Threads {
    quick: Mutex<Receiver<Begun>>,
    slow: Mutex<Receiver<Begun>>,
    /// Threads of each rank; more have given way, each until its mask is done.
    n: usize,
    n_quick: AtomicUsize,
    /// Masks that those which do not give way are at.
    at_work: Mutex<Vec<Arc<Progress>>>,
    delay: Delay,
}

impl Masks {
    /// Starts `n` threads of each rank.
    pub fn start(n: usize, delay: Delay) -> Result<Masks, Error> {
        let ((quick, quick_jobs), (slow, slow_jobs)) = (channel(), channel());
        let threads = Arc::new(Threads {
            quick: Mutex::new(quick_jobs),
            slow: Mutex::new(slow_jobs),
            n,
            n_quick: AtomicUsize::new(0),
            at_work: Mutex::default(),
            delay,
        });
        let setup = |e: std::io::Error| Error::Setup(e.to_string());
        for i in 0..n {
            threads.start_quick().map_err(setup)?;
            let threads = threads.clone();
            let run = move || {
                rank::give_way();
                while let Some(job) = next(&threads.slow) {
                    threads.compute(job);
                }
            };
            std::thread::Builder::new().name(format!("slow mask {i}")).spawn(run).map_err(setup)?;
        }
        Ok(Masks { quick, slow, threads })
    }

    /// Sends a matcher away for its mask.
    pub fn begin(&self, job: Job, record: Record) -> Result<Arc<Progress>, Error> {
        let progress = Arc::new(Progress::default());
        let to = if record.is_behind() { &self.slow } else { &self.quick };
        match to.send(Begun { job, progress: progress.clone() }) {
            Ok(()) => Ok(progress),
            Err(_) => Err(Error::Setup("the threads that compute masks have ended".into())),
        }
    }

    /// For when a step has waited for a mask in vain: threads that are at one for long give way, be it this one or one
    /// that it waits for.
    pub fn let_by(&self) {
        for progress in self.threads.at_work().iter() {
            if progress.took() > QUICK && progress.work.give_way() {
                // Without another in its place it goes on behind this mask: there is always a thread.
                let _ = self.threads.start_quick();
            }
        }
    }
}

impl Threads {
    fn start_quick(self: &Arc<Threads>) -> std::io::Result<()> {
        let threads = self.clone();
        let run = move || {
            while let Some(job) = next(&threads.quick) {
                let progress = job.progress.clone();
                threads.at_work().push(progress.clone());
                threads.compute(job);
                threads.at_work().retain(|other| !Arc::ptr_eq(other, &progress));
                if progress.work.has_given_way() && threads.is_spare() {
                    return;
                }
            }
        };
        self.n_quick.fetch_add(1, Relaxed);
        let started = std::thread::Builder::new().name("mask".into()).spawn(run);
        if started.is_err() {
            self.n_quick.fetch_sub(1, Relaxed);
        }
        started.map(drop)
    }

    /// Takes a thread out of the count where there is one too many.
    fn is_spare(&self) -> bool {
        self.n_quick.fetch_update(Relaxed, Relaxed, |n| (n > self.n).then(|| n - 1)).is_ok()
    }

    fn at_work(&self) -> MutexGuard<'_, Vec<Arc<Progress>>> {
        self.at_work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn compute(&self, Begun { job, progress }: Begun) {
        let Job { mut matcher, token, forced, reply } = job;
        progress.begun.get_or_init(Instant::now);
        let (tokens, took) = progress.work.run(|| {
            (self.delay)();
            if let Some((token, taken)) = token {
                let outcome = take(&mut matcher, token);
                let goes_on = outcome == Ok(false);
                // Nobody waits for a request that ended, here and below.
                let _ = taken.send(outcome);
                if !goes_on {
                    return None;
                }
            }
            if let Some(forced) = forced {
                // The mask takes up what this found.
                let _ = forced.send(matcher.compute_ff_tokens());
            }
            Some(matcher.compute_mask().map_err(|e| first_line(&e)))
        });
        if let Some(tokens) = tokens {
            let _ = reply.send(Mask { matcher, finished: Instant::now(), took, tokens });
        }
    }
}

/// Takes a token.
pub(super) fn take(matcher: &mut Matcher, token: u32) -> Taken {
    matcher.consume_token(token).map_err(|e| first_line(&e))?;
    is_at_end(matcher)
}

/// Returns whether nothing can follow.
pub(super) fn is_at_end(matcher: &Matcher) -> Taken {
    match matcher.stop_reason() {
        StopReason::NotStopped => Ok(false),
        reason if reason.is_ok() => Ok(true),
        reason => Err(matcher.get_error().unwrap_or_else(|| reason.to_string())),
    }
}

/// Returns the next mask to be computed; `None` when there will be no more.
fn next(jobs: &Mutex<Receiver<Begun>>) -> Option<Begun> {
    jobs.lock().unwrap_or_else(PoisonError::into_inner).recv().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_mask_is_remembered_for_a_while() {
        let mut record = Record::default();
        assert!(record.is_waited_for() && record.n_behind == 0);
        record.add(QUICK * 2);
        assert!(!record.is_waited_for());
        for n in (0..N_BEHIND).rev() {
            record.add(QUICK);
            assert_eq!((record.n_behind, record.is_waited_for()), (n, true));
        }
        record.add(QUICK);
        assert_eq!(record.n_behind, 0);
        assert!(!Record::of_first(QUICK * 2).is_waited_for());
        record.add_taken(QUICK_TAKE);
        assert!(!record.is_behind());
        record.add_taken(QUICK_TAKE * 2);
        assert!(record.is_behind() && record.is_waited_for());
    }
}
