//! Measures the read bandwidth of the machine, the upper bound of decode. Knows nothing of models.
//!
//! Whatever speeds a stream up is used: large pages, wide loads, several prefetch distances and hints. The fastest way
//! counts, so that shares of it do not look too good.

use std::time::Instant;

use super::isa::{CheckedIsa, on_isa};
use super::kernels::{Hint, prefetch};
use super::lanes::Lanes;
use super::pool::Pool;
use backend::CompileError;
use sys::arena::{Arena, zeroed};

/// Bytes read in a pass: more than most caches hold. Servers have larger ones, so that a pass begins with [`evict`].
const BYTES: usize = 256 << 20;
/// Bytes that a thread claims at a time.
const CHUNK: usize = 2 << 20;
/// Passes of each way.
const ROUNDS: usize = 3;

/// Prefetch distances in bytes and hints; 0 leaves it to the hardware.
const WAYS: [(usize, Hint); 6] =
    [(0, Hint::L1), (2048, Hint::Once), (6656, Hint::Once), (12288, Hint::Once), (4096, Hint::L1), (8192, Hint::L1)];

/// Bytes per second that `threads` threads read together: the fastest pass of the fastest way.
///
/// # Errors
/// [`CompileError::Memory`] when the buffer cannot be allocated, [`CompileError::Start`] when a thread cannot start.
pub fn read_bandwidth(threads: usize) -> Result<f64, CompileError> {
    let what = "the buffer that bandwidth is measured on";
    let buffer = Arena::new(what, BYTES)?;
    let sums = zeroed::<f32>(what, BYTES / CHUNK * 16)?;
    let (isa, mut pool) = (CheckedIsa::best(), Pool::new(threads.max(1))?);
    let whole = &Share { data: buffer.ptr(), sums: sums.as_ptr().cast_mut() };
    // Written first: untouched memory is one page of zeros.
    pool.run(BYTES / CHUNK, &|_, chunk| {
        // SAFETY: chunks are disjoint parts of the buffer.
        unsafe { whole.data.add(chunk * CHUNK).write_bytes(1, CHUNK) }
    });
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        for (distance, hint) in WAYS {
            pool.run(BYTES / CHUNK, &|_, chunk| {
                // SAFETY: the buffer holds the chunk.
                evict(unsafe { std::slice::from_raw_parts(whole.data.add(chunk * CHUNK), CHUNK) });
            });
            let start = Instant::now();
            pool.run(BYTES / CHUNK, &|_, chunk| {
                // SAFETY: the buffer holds the chunk, and 16 sums belong to each.
                let (data, sums) = unsafe {
                    let data = std::slice::from_raw_parts(whole.data.add(chunk * CHUNK), CHUNK);
                    (data, &mut *whole.sums.add(16 * chunk).cast::<[f32; 16]>())
                };
                read(isa, data, distance, hint, sums);
            });
            best = best.min(start.elapsed().as_secs_f64());
        }
    }
    std::hint::black_box(&sums);
    Ok(BYTES as f64 / best)
}

/// The buffer and the sums of its chunks.
struct Share {
    data: *mut u8,
    sums: *mut f32,
}

// SAFETY: chunks are read and written by one thread each.
unsafe impl Sync for Share {}

/// Takes `data` out of all caches, where the processor has an instruction that is fast enough (2.5 ns a line).
fn evict(data: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::x86_64::__cpuid(0).eax >= 7 && std::arch::x86_64::__cpuid_count(7, 0).ebx >> 23 & 1 == 1 {
        for line in data.chunks(64) {
            // SAFETY: the processor has `clflushopt`, which changes no data.
            unsafe { std::arch::asm!("clflushopt [{}]", in(reg) line.as_ptr(), options(nostack, preserves_flags)) }
        }
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = data;
}

on_isa! { fn read(data: &[u8], distance: usize, hint: Hint, sums: &mut [f32; 16]) = read_lanes }

/// Adds up the numbers of a chunk, as the compiler drops loads without a use.
#[inline(always)]
fn read_lanes<L: Lanes>(data: &[u8], distance: usize, hint: Hint, sums: &mut [f32; 16]) {
    let mut sum = [L::splat(0.0); 4];
    for data in data.as_chunks::<256>().0 {
        if distance > 0 {
            prefetch(data.as_ptr().wrapping_add(distance), 256, hint);
        }
        for (i, sum) in sum.iter_mut().enumerate() {
            // SAFETY: 64 of the 256 bytes.
            *sum = sum.add(unsafe { L::load(data.as_ptr().add(64 * i).cast()) });
        }
    }
    sum[0].add(sum[1]).add(sum[2].add(sum[3])).store_at(sums, 0);
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_machine_has_bandwidth() {
        assert!(super::read_bandwidth(2).is_ok_and(|bytes| bytes > 1e8));
    }
}
