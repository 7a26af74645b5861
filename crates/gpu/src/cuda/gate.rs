//! Turns of the programs of a process at one device. Knows no driver.
//!
//! A step that the host shares leaves a wait in the device's queue that the host's answer ends. Some calls of the
//! driver (to allocate and free memory, to load code, to make a graph) wait until the device is idle, under a lock that
//! every other call takes. Such a call of one program, made between the wait of another and its answer, would wait for
//! ever: the host that has to answer stands at the lock. So waits without an answer are held here, and these calls are
//! made alone, while none is held.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

#[derive(Debug, Default)]
struct State {
    /// Waits without an answer in the device's queues.
    held: usize,
    /// Who makes calls alone, and how many guards it has.
    owner: Option<ThreadId>,
    depth: usize,
    /// Threads that want to be alone: no wait begins before them.
    wanting: usize,
}

/// The turns at a device.
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

/// A wait without an answer.
#[derive(Debug)]
pub struct Held(Arc<Gate>);

/// No wait begins as long as this lives. It stays on its thread.
#[derive(Debug)]
pub struct Alone<'a> {
    gate: &'a Gate,
    _not_send: std::marker::PhantomData<*const ()>,
}

impl Gate {
    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Before a wait is queued; to be dropped when the host has answered. Until then its thread is never alone.
    pub fn hold(self: &Arc<Self>) -> Held {
        let mut state = self.locked();
        while state.owner.is_some() || state.wanting > 0 {
            state = self.wait(state);
        }
        state.held += 1;
        Held(Arc::clone(self))
    }

    /// Before calls for which the driver may wait until the device is idle. A thread that is alone may be so again.
    pub fn alone(&self) -> Alone<'_> {
        let own = thread::current().id();
        let mut state = self.locked();
        if state.owner != Some(own) {
            state.wanting += 1;
            while state.owner.is_some() || state.held > 0 {
                state = self.wait(state);
            }
            state.wanting -= 1;
            state.owner = Some(own);
        }
        state.depth += 1;
        Alone { gate: self, _not_send: std::marker::PhantomData }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut state = self.0.locked();
        state.held -= 1;
        if state.held == 0 && state.wanting > 0 {
            self.0.changed.notify_all();
        }
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        let mut state = self.gate.locked();
        state.depth -= 1;
        if state.depth == 0 {
            state.owner = None;
            self.gate.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// A driver as it is: every call takes its lock, and some wait under it until no wait is without an answer.
    #[derive(Default)]
    struct Driver {
        lock: Mutex<()>,
        unanswered: AtomicUsize,
    }

    impl Driver {
        fn call(&self) {
            let _lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        }

        fn call_that_waits(&self) {
            let _lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            while self.unanswered.load(SeqCst) > 0 {
                thread::yield_now();
            }
        }
    }

    #[test]
    fn programs_side_by_side_never_wait_for_each_other_for_ever() {
        let (gate, driver) = (Arc::new(Gate::default()), Arc::new(Driver::default()));
        let (done, ended) = mpsc::channel();
        for program in 0..4 {
            let (gate, driver, done) = (Arc::clone(&gate), Arc::clone(&driver), done.clone());
            thread::spawn(move || {
                for step in 0..300 {
                    let held = gate.hold();
                    driver.unanswered.fetch_add(1, SeqCst);
                    // What follows is queued behind the wait, and then the host answers.
                    driver.call();
                    thread::yield_now();
                    driver.call();
                    driver.unanswered.fetch_sub(1, SeqCst);
                    drop(held);
                    if (step + program) % 3 == 0 {
                        let _alone = gate.alone();
                        driver.call_that_waits();
                        let _again = gate.alone();
                        driver.call_that_waits();
                    }
                }
                done.send(()).ok();
            });
        }
        for _ in 0..4 {
            assert!(ended.recv_timeout(Duration::from_secs(60)).is_ok(), "programs wait for each other");
        }
    }

    #[test]
    fn one_that_is_alone_comes_before_waits_that_begin_later() {
        let gate = Arc::new(Gate::default());
        let first = gate.hold();
        let order = Mutex::new(Vec::new());
        let note = |what: &'static str| order.lock().unwrap_or_else(PoisonError::into_inner).push(what);
        thread::scope(|scope| {
            scope.spawn(|| {
                let _alone = gate.alone();
                note("alone");
            });
            while gate.locked().wanting == 0 {
                thread::yield_now();
            }
            scope.spawn(|| {
                let _held = gate.hold();
                note("later");
            });
            // A wait that does not queue up would come first in this time.
            thread::sleep(Duration::from_millis(20));
            drop(first);
        });
        assert_eq!(*order.lock().unwrap_or_else(PoisonError::into_inner), ["alone", "later"]);
    }
}
