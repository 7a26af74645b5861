//! The read bandwidth that this machine has right now, found by the best reader that can be written: what decode is held
//! against.
//!
//! It knows nothing of models. Whatever helps a stream helps here: large pages, wide loads, the distance and the hint at
//! which bytes are asked for ahead; the fastest of several ways counts, so that shares of it do not look too good.

use std::time::Instant;

use super::isa::{Isa, on_isa};
use super::kernels::{prefetch, prefetch_near};
use super::lanes::Lanes;
use super::mem::{Arena, zeroed};
use super::pool::Pool;
use crate::CompileError;

/// Bytes read in a pass: several times any cache.
const BYTES: usize = 256 << 20;
/// Bytes that a thread claims at a time.
const CHUNK: usize = 2 << 20;
/// Passes in each way.
const ROUNDS: usize = 3;

/// How far ahead bytes are asked for, and whether past the outer caches; 0 leaves it to the machine.
const WAYS: [(usize, bool); 6] = [(0, false), (2048, true), (6656, true), (12288, true), (4096, false), (8192, false)];

/// Bytes a second that `threads` threads read together, in the best of several ways, each the best of some passes.
pub fn read_bandwidth(threads: usize) -> Result<f64, CompileError> {
    let what = "the buffer that bandwidth is measured on";
    let buffer = Arena::new(what, BYTES)?;
    let sums = zeroed::<f32>(what, BYTES / CHUNK * 16)?;
    let (isa, mut pool) = (Isa::best(), Pool::new(threads.max(1))?);
    let whole = Share { data: buffer.ptr(), sums: sums.as_ptr().cast_mut() };
    let whole = &whole;
    // Written first: what nobody has written is one page of zeros.
    pool.run(BYTES / CHUNK, &|_, chunk| {
        // SAFETY: chunks are disjoint parts of the buffer.
        unsafe { whole.data.add(chunk * CHUNK).write_bytes(1, CHUNK) }
    });
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        for (ahead, once) in WAYS {
            let start = Instant::now();
            pool.run(BYTES / CHUNK, &|_, chunk| {
                // SAFETY: the buffer holds the chunk, and 16 sums belong to each.
                unsafe { read(isa, whole.data.add(chunk * CHUNK), ahead, once, whole.sums.add(16 * chunk)) }
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

on_isa! { fn read(data: *const u8, ahead: usize, once: bool, sums: *mut f32) = read_lanes }

/// Adds up the numbers of a chunk, as loads that nobody uses are not done.
#[inline(always)]
fn read_lanes<L: Lanes>(data: *const u8, ahead: usize, once: bool, sums: *mut f32) {
    let mut sum = [L::splat(0.0); 4];
    for at in (0..CHUNK).step_by(256) {
        if ahead > 0 {
            let p = data.wrapping_add(at + ahead);
            if once { prefetch(p, 256) } else { prefetch_near(p, 256) }
        }
        for (i, sum) in sum.iter_mut().enumerate() {
            // SAFETY: the chunk holds these 64 bytes, by the promise of who calls.
            *sum = sum.add(unsafe { L::load(data.add(at + 64 * i).cast()) });
        }
    }
    // SAFETY: the promise of who calls: the 16 sums are this chunk's.
    unsafe { sum[0].add(sum[1]).add(sum[2].add(sum[3])).store(sums) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_machine_has_bandwidth() {
        assert!(super::read_bandwidth(2).is_ok_and(|bytes| bytes > 1e8));
    }
}
