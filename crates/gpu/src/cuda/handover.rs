//! The order of a step that the host shares with a device: parts of the step run on the device, and between two of
//! them the host computes what the device has no weights for, or copies the weights over.
//!
//! A part is queued before the host answers the one ahead of it, where the device can wait by itself: then nothing of
//! queueing shows. Knows no driver.

/// A device, and the host's work for it.
pub trait Lane {
    /// Why a call failed.
    type Error;

    /// Whether the device waits for answer `i` by itself, and what follows can be queued before that: nothing in it is
    /// loaded or compiled, which would wait for the device in turn.
    fn waits(&self, i: usize) -> bool;

    /// Whether the host computes handover `i`; otherwise the next part begins with copies of weights.
    fn is_computed(&self, i: usize) -> bool;

    /// Queues part `i`: it takes the answer of handover `i - 1`, and ends by handing over `i`, where there is one.
    ///
    /// # Errors
    /// The device refused.
    fn queue(&mut self, i: usize) -> Result<(), Self::Error>;

    /// Waits until the device has handed over `i`.
    ///
    /// # Errors
    /// The device failed.
    fn reach(&mut self, i: usize) -> Result<(), Self::Error>;

    /// Computes handover `i` and answers it.
    ///
    /// # Errors
    /// It cannot be computed.
    fn compute(&mut self, i: usize) -> Result<(), Self::Error>;
}

/// Runs a step of `n` handovers whose part 0 has been queued.
///
/// # Errors
/// The first error of the device or of the host.
pub fn run<L: Lane>(lane: &mut L, n: usize) -> Result<(), L::Error> {
    for i in 0..n {
        if !lane.is_computed(i) {
            lane.queue(i + 1)?;
            continue;
        }
        let waits = lane.waits(i);
        if waits {
            lane.queue(i + 1)?;
        }
        lane.reach(i)?;
        lane.compute(i)?;
        if !waits {
            lane.queue(i + 1)?;
        }
    }
    Ok(())
}

/// What copies of a layer's experts, and computing them on the host, take on this machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// Seconds to copy a layer.
    pub copy: f64,
    /// Rows and seconds of two steps on the host, the shorter first.
    pub few: (usize, f64),
    pub many: (usize, f64),
}

impl Costs {
    /// Number of rows from which copies pay: a power of two, at most `most`, so that noise seldom changes it.
    pub fn threshold(&self, most: usize) -> usize {
        let Costs { copy, few: (few, fast), many: (many, slow) } = *self;
        let each = ((slow - fast) / many.saturating_sub(few).max(1) as f64).max(0.0);
        let takes = |rows: usize| fast + each * (rows as f64 - few as f64);
        let mut rows = 2;
        while rows < most && takes(rows).is_finite() && takes(rows) < copy {
            rows *= 2;
        }
        rows.min(most)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::*};
    use std::sync::{Arc, mpsc};
    use std::thread;

    use super::*;

    /// A device that works its queue off on a thread of its own, adding one to a number in each part; the host doubles
    /// it at each handover.
    struct Fake {
        queue: mpsc::Sender<usize>,
        shared: Arc<Shared>,
        waits: fn(usize) -> bool,
        computed: Vec<bool>,
        fails_at: Option<usize>,
        queued: usize,
    }

    #[derive(Default)]
    struct Shared {
        number: AtomicUsize,
        reached: AtomicUsize,
        answered: AtomicUsize,
    }

    impl Fake {
        fn start(
            waits: fn(usize) -> bool,
            computed: Vec<bool>,
            fails_at: Option<usize>,
        ) -> (Fake, thread::JoinHandle<()>) {
            let (queue, parts) = mpsc::channel();
            let shared = Arc::new(Shared::default());
            let (device, of_device) = (Arc::clone(&shared), computed.clone());
            let worker = thread::spawn(move || {
                for part in parts {
                    if part > 0 && of_device[part - 1] {
                        while device.answered.load(Acquire) < part {
                            thread::yield_now();
                        }
                    }
                    // Long enough that a host that does not wait would double the wrong number.
                    (0..part % 3 * 50).for_each(|_| thread::yield_now());
                    device.number.store(device.number.load(Acquire) + 1, Release);
                    device.reached.store(part + 1, Release);
                }
            });
            (Fake { queue, shared, waits, computed, fails_at, queued: 0 }, worker)
        }
    }

    impl Lane for Fake {
        type Error = &'static str;

        fn waits(&self, i: usize) -> bool {
            (self.waits)(i)
        }

        fn is_computed(&self, i: usize) -> bool {
            self.computed[i]
        }

        fn queue(&mut self, i: usize) -> Result<(), Self::Error> {
            assert_eq!(i, self.queued, "parts in order");
            self.queued += 1;
            if i > 0 && self.computed[i - 1] && !(self.waits)(i - 1) {
                assert_eq!(self.shared.answered.load(Acquire), i, "a device that does not wait is answered first");
            }
            self.queue.send(i).map_err(|_| "gone")
        }

        fn reach(&mut self, i: usize) -> Result<(), Self::Error> {
            while self.shared.reached.load(Acquire) <= i {
                thread::yield_now();
            }
            Ok(())
        }

        fn compute(&mut self, i: usize) -> Result<(), Self::Error> {
            if self.fails_at == Some(i) {
                // As a program does: what the device waits for comes, whatever it is worth.
                self.shared.answered.store(usize::MAX, Release);
                return Err("failed");
            }
            let number = &self.shared.number;
            number.store(2 * number.load(Acquire), Release);
            self.shared.answered.store(i + 1, Release);
            Ok(())
        }
    }

    /// Devices that wait for every answer, for none, and for some.
    const WAITS: [fn(usize) -> bool; 3] = [|_| true, |_| false, |i| i % 2 == 1];

    #[test]
    fn every_part_sees_the_answer_before_it() {
        for waits in WAITS {
            for pattern in 0..64u32 {
                let computed: Vec<bool> = (0..6).map(|i| pattern >> i & 1 == 1).collect();
                let (mut fake, worker) = Fake::start(waits, computed.clone(), None);
                fake.queue(0).unwrap();
                run(&mut fake, 6).unwrap();
                let shared = Arc::clone(&fake.shared);
                drop(fake);
                worker.join().unwrap();
                let wanted = computed.iter().fold(1, |n, &is_computed| if is_computed { 2 * n + 1 } else { n + 1 });
                assert_eq!(shared.number.load(Acquire), wanted, "{computed:?}, waits: {:?}", [0, 1].map(waits));
            }
        }
    }

    #[test]
    fn a_host_that_fails_leaves_no_device_waiting() {
        for waits in WAITS {
            for at in 0..6 {
                let (mut fake, worker) = Fake::start(waits, vec![true; 6], Some(at));
                fake.queue(0).unwrap();
                assert_eq!(run(&mut fake, 6), Err("failed"));
                drop(fake);
                worker.join().unwrap();
            }
        }
    }

    #[test]
    fn copies_pay_from_where_the_host_takes_longer() {
        let costs = |copy, few, many| Costs { copy, few: (32, few), many: (128, many) };
        for (costs, most, wanted) in [
            // 1 ms for 32 rows and 4 ms for 128: 8 ms are 256 rows.
            (costs(8e-3, 1e-3, 4e-3), 512, 256),
            (costs(8e-3, 1e-3, 4e-3), 100, 100),
            // The link is so slow that it never pays, or so fast that it always does.
            (costs(1.0, 1e-3, 4e-3), 512, 512),
            (costs(1e-6, 1e-3, 4e-3), 512, 2),
            // Noise: more rows took less time.
            (costs(8e-3, 2e-3, 1e-3), 512, 512),
            (costs(f64::NAN, 1e-3, 2e-3), 512, 2),
        ] {
            assert_eq!(costs.threshold(most), wanted, "{costs:?} {most}");
        }
    }
}
