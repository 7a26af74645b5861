//! What a thread takes of the processor, and how it gives way to others. Linux and Windows tell and rank threads here:
//! elsewhere time is that of the clock, and threads that give way keep their rank.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Work that is watched while a thread is at it.
#[derive(Debug, Default)]
pub struct Work(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The thread that is at it, and its time when it began.
    running: Option<(Thread, Duration)>,
    has_given_way: bool,
}

impl Work {
    /// Does it on this thread. Returns the time of the processor that it took, too.
    pub fn run<T>(&self, work: impl FnOnce() -> T) -> (T, Duration) {
        let thread = Thread::current();
        let since = thread.time();
        self.state().running = Some((thread, since));
        let end = End(self);
        let result = work();
        let took = self.took().unwrap_or_default();
        drop(end);
        (result, took)
    }

    /// The time of the processor that it has taken up to now, where a thread is at it.
    pub fn took(&self) -> Option<Duration> {
        let state = self.state();
        state.running.as_ref().map(|(thread, since)| thread.time().saturating_sub(*since))
    }

    /// Where a thread is at it: from now on, and for good, that thread runs where no other wants the core, and leaves
    /// it as soon as one does (`SCHED_IDLE`). A nice value does not do that: who wakes up waits for the slice of a
    /// thread that is nice. There is no way back: the system allows it to the privileged alone. Returns whether the
    /// thread was told so just now.
    pub fn give_way(&self) -> bool {
        let mut state = self.state();
        let State { running: Some((thread, _)), has_given_way: false } = &*state else { return false };
        thread.give_way();
        state.has_given_way = true;
        true
    }

    /// Whether its thread was told to give way.
    pub fn has_given_way(&self) -> bool {
        self.state().has_given_way
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The end of work, however it comes: its thread may end then, and its name go to another.
struct End<'a>(&'a Work);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.state().running = None;
    }
}

/// As [`Work::give_way`], for the thread that calls.
pub fn give_way() {
    Thread::current().give_way();
}

/// A thread of this process that is alive, as the system names it.
#[derive(Debug)]
struct Thread {
    #[cfg(target_os = "linux")]
    id: libc::pid_t,
    /// Its clock of the processor's time.
    #[cfg(target_os = "linux")]
    clock: Option<libc::clockid_t>,
    #[cfg(windows)]
    handle: Option<crate::windows::Thread>,
    begin: Instant,
}

impl Thread {
    /// The thread that calls.
    #[cfg(target_os = "linux")]
    fn current() -> Thread {
        let mut clock = 0;
        // SAFETY: `gettid` and `pthread_self` take nothing and always succeed; the thread is alive, as it calls, and
        // the third call writes one number, which is there.
        let (id, failed) =
            unsafe { (libc::gettid(), libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut clock)) };
        Thread { id, clock: (failed == 0).then_some(clock), begin: Instant::now() }
    }

    #[cfg(not(target_os = "linux"))]
    fn current() -> Thread {
        Thread {
            #[cfg(windows)]
            handle: crate::windows::Thread::current().ok(),
            begin: Instant::now(),
        }
    }

    /// The time of the processor that it has taken; where nobody tells, the time since it was named.
    fn time(&self) -> Duration {
        #[cfg(target_os = "linux")]
        if let Some(clock) = self.clock {
            let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: the call writes one `timespec`, which is there. The clock is that of a thread that is alive.
            if unsafe { libc::clock_gettime(clock, &raw mut time) } == 0 {
                return Duration::new(time.tv_sec as u64, time.tv_nsec as u32);
            }
        }
        #[cfg(windows)]
        if let Some(Ok(time)) = self.handle.as_ref().map(crate::windows::Thread::time) {
            return time;
        }
        self.begin.elapsed()
    }

    /// Gives it the lowest rank. A system that refuses is left as it is.
    fn give_way(&self) {
        #[cfg(target_os = "linux")]
        // SAFETY: the call reads a `sched_param`, which is plain numbers and lives until it returns, and changes no
        // memory. The C library's function of this name would do, but musl's refuses.
        unsafe {
            let param: libc::sched_param = std::mem::zeroed();
            libc::syscall(libc::SYS_sched_setscheduler, self.id, libc::SCHED_IDLE, &raw const param);
        }
        #[cfg(windows)]
        let _ = self.handle.as_ref().map(crate::windows::Thread::give_way);
    }
}

#[cfg(all(test, any(target_os = "linux", windows)))]
mod tests {
    use std::sync::Barrier;

    use super::*;

    /// The policy of a thread that gives way.
    const IDLE: i32 = if cfg!(windows) { -15 } else { 5 };

    /// The policy of the calling thread, as the system tells it.
    #[cfg(windows)]
    fn policy() -> Option<i32> {
        Some(crate::windows::Thread::current().ok()?.rank())
    }

    #[cfg(target_os = "linux")]
    fn policy() -> Option<i32> {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").ok()?;
        stat.rsplit(')').next()?.split_whitespace().nth(38)?.parse().ok()
    }

    #[test]
    fn a_thread_gives_way_while_it_works() {
        let work = Work::default();
        assert!(!work.give_way() && !work.has_given_way() && work.took().is_none());
        let (begun, told) = (Barrier::new(2), Barrier::new(2));
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let during = work.run(|| {
                    begun.wait();
                    told.wait();
                    policy()
                });
                // It keeps its rank; other work of its own has not been told.
                let next = Work::default();
                (during.0, policy(), next.run(|| next.has_given_way()).0)
            });
            begun.wait();
            assert!(work.give_way() && !work.give_way());
            told.wait();
            assert_eq!(thread.join().unwrap(), (Some(IDLE), Some(IDLE), false));
        });
        assert!(work.has_given_way() && !work.give_way());
        assert_eq!(policy(), Some(0));
    }

    #[test]
    fn time_is_the_processors() {
        let work = Work::default();
        let begin = Instant::now();
        let (_, took) = work.run(|| std::thread::sleep(Duration::from_millis(30)));
        assert!(took < Duration::from_millis(20), "{took:?}");
        let until = Duration::from_millis(20);
        let (_, took) = work.run(|| while work.took().unwrap() < until && begin.elapsed() < Duration::from_secs(20) {});
        assert!(took >= until, "{took:?}");
    }

    #[test]
    fn work_that_panics_is_at_an_end() {
        let work = Work::default();
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work.run(|| panic!("on purpose")))).unwrap_err();
        assert!(work.took().is_none() && !work.give_way());
    }
}
