//! In which pages the system has mapped files, as far as it says so: Linux does, in /proc.
//!
//! Knows nothing of what is in the files.

use std::fs;

/// Places that are sampled to learn how files are mapped.
const SAMPLES: usize = 16;
const LARGE_PAGE: usize = 2 << 20;

/// Returns whether most of these parts of mapped files are in small pages, while memory of a process is available in
/// pages of 2 MB. Reads a byte of some of the parts that are long enough for large pages, as only what was read is
/// mapped; `false` where the system does not say, and where no part is long enough.
pub(crate) fn are_small<'a>(parts: impl Iterator<Item = &'a [u8]>) -> bool {
    let enabled = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if enabled.is_empty() || enabled.contains("[never]") {
        return false;
    }
    let large: Vec<&[u8]> = parts.filter(|part| part.len() >= 2 * LARGE_PAGE).collect();
    let samples = large.iter().step_by(large.len().div_ceil(SAMPLES).max(1));
    let read: Vec<usize> = samples
        .map(|part| {
            // The middle lies in a page of 2 MB that is the part's alone, or nearly.
            let byte = &part[part.len() / 2];
            std::hint::black_box(*byte);
            std::ptr::from_ref(byte).addr()
        })
        .collect();
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    large_pages_around(&smaps, &read).is_some_and(|n| 2 * n < read.len())
}

/// Returns how many pages of 2 MB of files are mapped in the areas of `smaps` that hold one of the addresses; `None`
/// when no area does.
fn large_pages_around(smaps: &str, addresses: &[usize]) -> Option<usize> {
    let (mut found, mut inside, mut pages) = (false, false, 0);
    for line in smaps.lines() {
        let (first, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        if let Some((start, end)) = first.split_once('-') {
            let hex = |n| usize::from_str_radix(n, 16).unwrap_or(0);
            let area = hex(start)..hex(end);
            inside = addresses.iter().any(|address| area.contains(address));
            found |= inside;
        } else if inside && first == "FilePmdMapped:" {
            pages += rest.trim().trim_end_matches(" kB").parse::<usize>().unwrap_or(0) * 1024 / LARGE_PAGE;
        }
    }
    found.then_some(pages)
}

/// Bytes of mapped files that are resident in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResidentFiles {
    /// In all; the program itself is one of the files.
    pub bytes: usize,
    /// Of those, in pages of 2 MB.
    pub in_large_pages: usize,
}

/// Returns how much of all mapped files is resident; `None` where the system does not say.
pub fn resident_files() -> Option<ResidentFiles> {
    Some(ResidentFiles {
        bytes: kilobytes("/proc/self/status", "RssFile:")?,
        in_large_pages: kilobytes("/proc/self/smaps_rollup", "FilePmdMapped:")?,
    })
}

fn kilobytes(file: &str, field: &str) -> Option<usize> {
    let text = fs::read_to_string(file).ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(field))?;
    value.trim().trim_end_matches(" kB").trim().parse::<usize>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_of_smaps() {
        let smaps = "7f0000000000-7f0000800000 r--p 00000000 08:01 7 /models/a.gguf\n\
            Size:               8192 kB\nFilePmdMapped:      4096 kB\nVmFlags: rd mr\n\
            7f0000800000-7f0000801000 r--p 00800000 08:01 7 /models/a.gguf\nFilePmdMapped:         0 kB\n\
            7f0001000000-7f0001400000 r--p 00000000 08:01 8 /models/b.gguf\nFilePmdMapped:      2048 kB\n";
        for (addresses, wanted) in [
            (&[0x7f0000000000][..], Some(2)),
            (&[0x7f00007fffff, 0x7f0001000000], Some(3)),
            (&[0x7f0000800000], Some(0)),
            (&[0x7f0000801000], None),
            (&[], None),
        ] {
            assert_eq!(large_pages_around(smaps, addresses), wanted, "{addresses:x?}");
        }
        assert_eq!(large_pages_around("", &[1]), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_program_is_a_mapped_file() {
        assert!(resident_files().is_some_and(|files| files.bytes > 4096 && files.in_large_pages <= files.bytes));
    }
}
