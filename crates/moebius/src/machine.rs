//! What the machine has: cores, free memory, peak memory of this process, read bandwidth, a terminal to show progress on.

use std::io::IsTerminal;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget};

/// Cores this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Bytes of memory that can be had without swapping, where the system says so.
pub fn free_memory() -> Option<usize> {
    kilobytes("/proc/meminfo", "MemAvailable:")
}

/// Most memory this process has had resident, in bytes, where the system says so.
pub fn peak_resident() -> Option<usize> {
    kilobytes("/proc/self/status", "VmHWM:")
}

fn kilobytes(file: &str, field: &str) -> Option<usize> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find(|l| l.starts_with(field))?;
    line[field.len()..].trim().trim_end_matches(" kB").trim().parse::<usize>().ok()?.checked_mul(1024)
}

/// Name of the processor, where the system says so.
pub fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_string(), |(_, name)| name.trim().to_string())
}

/// Read bandwidth of `threads` threads in bytes per second: the best of several passes over a buffer far larger than
/// any cache, each thread summing its own part.
pub fn read_bandwidth(threads: usize) -> f64 {
    const WORDS: usize = 64 << 20; // 512 MiB
    let buffer: Vec<u64> = vec![1; WORDS];
    let part = WORDS / threads.max(1);
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for words in buffer.chunks(part.max(1)) {
                scope.spawn(move || std::hint::black_box(sum(words)));
            }
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    (WORDS * 8) as f64 / best
}

/// Sums with eight independent accumulators, so that loads and not additions are the limit.
fn sum(words: &[u64]) -> u64 {
    let mut acc = [0u64; 16];
    let (chunks, rest) = words.as_chunks::<16>();
    for chunk in chunks {
        for i in 0..16 {
            acc[i] = acc[i].wrapping_add(chunk[i]);
        }
    }
    acc.iter().chain(rest).fold(0, |a, b| a.wrapping_add(*b))
}

/// Progress of long work, on a terminal only; a bar of `len` steps, or a spinner.
pub fn progress(len: Option<u64>) -> ProgressBar {
    let terminal = std::io::stderr().is_terminal();
    ProgressBar::with_draw_target(
        len,
        if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() },
    )
}

/// `1.9 GB`-like text for a number of bytes (powers of ten, as bandwidth and disks are counted).
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "kB", "MB", "GB", "TB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    match unit {
        0 => format!("{n} B"),
        _ if value < 10.0 => format!("{value:.2} {}", UNITS[unit]),
        _ => format!("{value:.1} {}", UNITS[unit]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_read_well() {
        for (n, text) in
            [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (18_309_536, "18.3 MB"), (1_940_000_000, "1.94 GB")]
        {
            assert_eq!(bytes(n), text);
        }
    }

    #[test]
    fn the_machine_has_bandwidth() {
        assert!(read_bandwidth(1) > 1e8);
    }
}
