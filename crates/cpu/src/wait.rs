//! How a thread of the pool waits: it pauses, then it yields, then it is time to sleep.
//!
//! To sleep is to give the core back. Where this machine is a virtual one and its host is full, the host then gives the
//! core to others, and to be woken takes milliseconds. So a thread that has paused long enough, as one whose core was
//! taken holds up the region, yields to threads of this machine first, which keeps the core where there are none. Where
//! there are, the core comes back after their time slice only, though a sleeper would be woken at once: after that the
//! next waits end in sleep without it.

use std::time::{Duration, Instant};

/// Pauses before a waiting thread yields: 150 to 500 µs, longer than the serial parts between two regions of a step.
/// With a fifth of it the workers slept several times a token, and decode lost 3% (AMD EPYC 9004, 2 cores,
/// Qwen3-30B-A3B's shape).
const PAUSES: u32 = 10_000;
/// Yields before it sleeps: 5 to 20 ms where nothing else wants the core. Elsewhere than on Linux there is no telling
/// whether something does.
const YIELDS: u32 = if cfg!(target_os = "linux") { 20_000 } else { 0 };
/// A yield that lasts longer may have been another thread's time.
const LONG: Duration = Duration::from_micros(50);
/// Waits that do not yield after one that met another thread.
const SHY: u32 = 100;

/// How long a thread waits before it sleeps.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    pauses: u32,
    yields: u32,
}

impl Patience {
    /// As for the regions of a step.
    pub const STEP: Patience = Patience { pauses: PAUSES, yields: YIELDS };
    /// None: whoever waits sleeps.
    #[cfg(test)]
    pub const NONE: Patience = Patience { pauses: 0, yields: 0 };
}

/// The waits of one thread.
#[derive(Debug, Default)]
pub struct Waits {
    /// Turns of this wait.
    turns: u32,
    /// [`switches`] before the first yield of this wait.
    switches: i64,
    /// Waits left that do not yield.
    shy: u32,
}

impl Waits {
    /// What was waited for is there: the next wait begins.
    pub fn end(&mut self) {
        self.turns = 0;
    }

    /// Waits a little. Returns false when it is time to sleep.
    pub fn turn(&mut self, patience: Patience) -> bool {
        if self.turns < patience.pauses {
            self.turns += 1;
            std::hint::spin_loop();
            return true;
        }
        let yields = self.turns - patience.pauses;
        if yields == 0 && self.shy > 0 {
            self.shy -= 1;
            return false;
        }
        if yields >= patience.yields {
            return false;
        }
        if yields == 0 {
            self.switches = switches();
        }
        self.turns += 1;
        let start = Instant::now();
        std::thread::yield_now();
        if start.elapsed() > LONG && switches() != self.switches {
            self.shy = SHY;
            return false;
        }
        true
    }
}

/// How often this thread has left its core to another one.
#[cfg(target_os = "linux")]
fn switches() -> i64 {
    // SAFETY: all bits zero are such a struct, which the call fills in.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &mut usage);
        usage.ru_nivcsw
    }
}

#[cfg(not(target_os = "linux"))]
fn switches() -> i64 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_in_sleep_and_the_next_one_starts_anew() {
        let patience = Patience { pauses: 3, yields: YIELDS.min(4) };
        let mut waits = Waits::default();
        for _ in 0..2 {
            let turns = (0..).take_while(|_| waits.turn(patience)).count() as u32;
            assert!((patience.pauses..=patience.pauses + patience.yields).contains(&turns), "{turns}");
            waits.end();
        }
        assert!(!Waits::default().turn(Patience::NONE));
    }

    /// Two threads on one core: the one that waits meets the one that works, and sleeps at once from then on.
    #[cfg(target_os = "linux")]
    #[test]
    fn company_is_noticed() {
        use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

        let on_first = || {
            // SAFETY: an empty set is one, and the call reads it.
            unsafe {
                let (mut all, mut one): (libc::cpu_set_t, libc::cpu_set_t) = (std::mem::zeroed(), std::mem::zeroed());
                libc::sched_getaffinity(0, size_of_val(&all), &mut all);
                let first = (0..libc::CPU_SETSIZE as usize).find(|&i| libc::CPU_ISSET(i, &all)).unwrap_or(0);
                libc::CPU_SET(first, &mut one);
                assert_eq!(libc::sched_setaffinity(0, size_of_val(&one), &one), 0);
            }
        };
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                on_first();
                while !stop.load(Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let waiting = scope.spawn(|| {
                on_first();
                let patience = Patience { pauses: 0, yields: u32::MAX };
                let mut waits = Waits::default();
                let start = Instant::now();
                while waits.turn(patience) && start.elapsed() < Duration::from_secs(60) {}
                (waits.shy, waits.turns > 0)
            });
            let (shy, has_yielded) = waiting.join().expect("the waiting thread ends");
            stop.store(true, Relaxed);
            assert_eq!((shy, has_yielded), (SHY, true));
        });
    }
}
