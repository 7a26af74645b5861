//! The smallest file whose divergence is within a target: a search over sizes. Knows no models and no files.

use std::ops::RangeInclusive;

use anyhow::{Result, ensure};
use serde::Serialize;

use crate::machine;

/// Files that are tried at most.
const MAX_TRIALS: usize = 8;
/// The search ends when the file that will do is larger by less than this share than one that will not.
const PRECISION: f64 = 0.01;

/// A file that was tried.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Trial {
    pub bytes: usize,
    /// Mean KL divergence, in nats.
    pub kl: f64,
}

/// Searches sizes for the smallest file with a KL of at most `target`. `attempt` makes the best file of a size that has
/// more bytes than another, or finds that there is none. The last of its files that has at most the target is the one
/// wanted.
///
/// # Errors
/// The largest file misses the target; an attempt fails.
pub fn smallest(
    sizes: RangeInclusive<usize>,
    target: f64,
    mut attempt: impl FnMut(usize, usize) -> Result<Option<Trial>>,
) -> Result<()> {
    let (least, most) = sizes.into_inner();
    let Some(mut high) = attempt(most, 0)? else { return Ok(()) };
    ensure!(
        high.kl <= target,
        "failed to reach a mean KL of {target}: the largest mix, {}, has {:.6}",
        machine::bytes(high.bytes as u64),
        high.kl
    );
    if least >= high.bytes {
        return Ok(());
    }
    let Some(mut low) = attempt(least, 0)? else { return Ok(()) };
    let mut n_trials = 2;
    // No file between `low` and this size is known of.
    let mut floor = low.bytes;
    while low.kl > target && n_trials < MAX_TRIALS && (high.bytes - floor) as f64 > PRECISION * high.bytes as f64 {
        // Halves, as little is known of the way from sizes to KL: it has flat parts, and noise.
        let size = floor + (high.bytes - floor) / 2;
        match attempt(size, low.bytes)? {
            None => floor = size,
            Some(trial) if trial.kl <= target => (high, n_trials) = (trial, n_trials + 1),
            Some(trial) => (low, floor, n_trials) = (trial, size, n_trials + 1),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Searches among files of these sizes, of which one of 1000 bytes has a KL of 0.01, and one of half the size ten
    /// times that; the files that were tried.
    fn tried(sizes: &[usize], target: f64) -> Result<Vec<Trial>> {
        let mut found = Vec::new();
        smallest(sizes[0]..=sizes[sizes.len() - 1], target, |size, above| {
            let bytes = *sizes.iter().rfind(|&&s| s <= size).expect("a size");
            let trial = Trial { bytes, kl: 0.01 * 10f64.powf((1000.0 - bytes as f64) / 500.0) };
            Ok((bytes > above).then(|| found.push(trial)).map(|()| trial))
        })?;
        Ok(found)
    }

    fn best(trials: &[Trial], target: f64) -> usize {
        trials.iter().rfind(|t| t.kl <= target).expect("one will do").bytes
    }

    #[test]
    fn the_smallest_that_will_do_is_found() {
        let all: Vec<usize> = (300..=1000).collect();
        for target in [0.01, 0.011, 0.02, 0.05, 0.1, 0.2, 0.25] {
            let trials = tried(&all, target).expect("found");
            let least = 1000.0 - 500.0 * (target / 0.01f64).log10();
            let found = best(&trials, target) as f64;
            assert!(
                found >= least - 1e-6 && found <= least + 700.0 / 64.0 + 1.0,
                "{target}: {found} {least} {trials:?}"
            );
            assert!(trials.len() <= MAX_TRIALS, "{trials:?}");
        }
        // The smallest will do; few steps; one file only.
        assert_eq!(best(&tried(&all, 9.0).expect("found"), 9.0), 300);
        assert_eq!(best(&tried(&[300, 700, 1000], 0.05).expect("found"), 0.05), 700);
        assert_eq!(best(&tried(&[300, 310, 1000], 0.02).expect("found"), 0.02), 1000);
        assert_eq!(tried(&[1000], 0.02).expect("found").len(), 1);
    }

    #[test]
    fn a_target_that_the_largest_misses_is_an_error() {
        let said = tried(&[300, 1000], 0.009).expect_err("missed").to_string();
        assert_eq!(said, "failed to reach a mean KL of 0.009: the largest mix, 1.00 kB, has 0.010000");
    }
}
