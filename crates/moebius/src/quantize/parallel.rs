//! Work that threads do in any order and that is taken in one.

use std::collections::VecDeque;
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};

/// Pieces of work of a thread that are done before they are taken.
const HELD: usize = 8;

/// Does `work` on `0..n` on so many threads, each with room of its own, while this one takes the results in order.
/// Few results wait at a time, however many there are.
///
/// # Errors
/// The first of work or taking, or the system refuses even one thread. Work that is under way ends first.
pub fn in_order<R: Default, T: Send>(
    threads: usize,
    n: usize,
    work: impl Fn(usize, &mut R) -> Result<T> + Sync,
    mut take: impl FnMut(usize, T) -> Result<()>,
) -> Result<()> {
    let (asks, asked) = mpsc::channel::<(usize, SyncSender<Result<T>>)>();
    let asked = Mutex::new(asked);
    let one_by_one = || {
        let mut room = R::default();
        loop {
            let next = asked.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok((i, answer)) = next else { break };
            // Where taking has ended, nobody waits for the answer.
            if answer.send(work(i, &mut room)).is_err() {
                break;
            }
        }
    };
    std::thread::scope(|scope| {
        // Threads end when nobody can ask them any more.
        let asks = asks;
        for i in 0..threads.clamp(1, n.max(1)) {
            let started = std::thread::Builder::new().spawn_scoped(scope, one_by_one);
            // One that the system refuses leaves its work to the others.
            if i == 0 {
                started.context("failed to start a thread")?;
            }
        }
        let mut answers = VecDeque::new();
        let mut next = 0;
        for i in 0..n {
            while next < n.min(i + threads * HELD) {
                let (answer, answered) = mpsc::sync_channel(1);
                asks.send((next, answer)).ok().context("a thread stopped")?;
                answers.push_back(answered);
                next += 1;
            }
            let answered = answers.pop_front().context("a thread stopped")?;
            take(i, answered.recv().context("a thread stopped")??)?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn results_come_in_order_and_few_wait() {
        for (threads, n) in [(1, 0), (1, 5), (3, 100), (8, 3)] {
            let (begun, mut taken) = (AtomicUsize::new(0), Vec::new());
            let work = |i: usize, room: &mut usize| {
                begun.fetch_add(1, Ordering::SeqCst);
                *room += 1;
                // The last of every few is done first.
                std::thread::sleep(std::time::Duration::from_micros(200 * (3 - i as u64 % 4)));
                Ok(i * i)
            };
            let take = |i: usize, square: usize| {
                assert!(begun.load(Ordering::SeqCst) <= i + threads * HELD);
                assert_eq!(square, i * i);
                taken.push(i);
                Ok(())
            };
            in_order(threads, n, work, take).unwrap();
            assert_eq!(taken, (0..n).collect::<Vec<_>>());
            assert_eq!(begun.into_inner(), n);
        }
    }

    #[test]
    fn the_first_error_ends_the_work() {
        let begun = AtomicUsize::new(0);
        let work = |i: usize, _: &mut ()| {
            begun.fetch_add(1, Ordering::SeqCst);
            anyhow::ensure!(i != 7, "piece {i}");
            Ok(i)
        };
        let mut taken = Vec::new();
        let take = |i, _: usize| {
            taken.push(i);
            Ok(())
        };
        let error = in_order(2, 1000, work, take).unwrap_err();
        assert_eq!((error.to_string(), taken), ("piece 7".into(), (0..7).collect::<Vec<_>>()));
        assert!(begun.into_inner() < 100);

        let full = |i, _: usize| if i == 3 { anyhow::bail!("disk full") } else { Ok(()) };
        let error = in_order(2, 1000, |i, (): &mut ()| Ok(i), full).unwrap_err();
        assert_eq!(error.to_string(), "disk full");
    }
}
