//! The cores that this process may use, and where its threads run: Windows has groups of at most 64 processors, and a
//! thread runs in one of them.

/// Cores that this process may use, at least one.
pub fn count() -> usize {
    #[cfg(windows)]
    return crate::windows::processor_groups().iter().sum::<usize>().max(1);
    #[cfg(not(windows))]
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Lets the calling thread, number `worker` of `threads`, run in its group where there are several, which threads fill
/// evenly. Elsewhere nothing changes.
pub fn settle(worker: usize, threads: usize) {
    #[cfg(windows)]
    if let groups = crate::windows::processor_groups()
        && groups.len() > 1
    {
        // One that the system refuses runs where the process began.
        let _ = crate::windows::run_in_group(group_of(worker, threads, &groups) as u16);
    }
    #[cfg(not(windows))]
    let _ = (worker, threads);
}

/// The group of a thread, by the number of processors of each.
#[cfg(any(windows, test))]
fn group_of(worker: usize, threads: usize, processors: &[usize]) -> usize {
    let mut place = worker % threads.max(1) * processors.iter().sum::<usize>() / threads.max(1);
    for (group, &n) in processors.iter().enumerate() {
        if place < n {
            return group;
        }
        place -= n;
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_fill_evenly() {
        assert!(count() >= 1);
        for (threads, processors, expected) in [
            (1, &[64, 64][..], vec![1, 0]),
            (2, &[64, 64], vec![1, 1]),
            (128, &[64, 64], vec![64, 64]),
            (96, &[64, 32], vec![64, 32]),
            (48, &[64, 32], vec![32, 16]),
            (200, &[64, 36], vec![128, 72]),
            (3, &[2], vec![3]),
        ] {
            let mut counts = vec![0; processors.len()];
            (0..threads).for_each(|worker| counts[group_of(worker, threads, processors)] += 1);
            assert_eq!(counts, expected, "{threads} threads on {processors:?}");
        }
        assert_eq!(group_of(0, 0, &[]), 0);
    }
}
