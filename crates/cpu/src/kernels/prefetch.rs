//! Prefetching of weights. Knows nothing of formats.
//!
//! Kernels that walk several rows side by side look to the hardware's prefetchers like short streams that end, where
//! the rows together are one long stream. They prefetch it themselves, in one of two ways: [`Near`] and [`Far`].

#[cfg(target_arch = "x86_64")]
use std::sync::OnceLock;

use super::RowSet;

/// Where a prefetched line goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hint {
    /// All levels of cache.
    L1,
    /// The second level and those behind it.
    L2,
    /// The first level alone, for bytes that are read once: they evict nothing from the outer caches. See [`once`].
    Once,
}

/// Where bytes go that are read once: [`Hint::Once`] where that pays (decode of Qwen3-30B-A3B's shape, 4 layers, 2
/// cores of AMD EPYC 9004: 58.7 tok/s with [`Hint::L1`] -> 62.3), and [`Hint::L2`] on Intel's processors, which bring
/// such lines in slowly (a stream of Q4_K, prefetched 2 kB ahead, on 2 and 16 cores of a Xeon of the Sapphire Rapids
/// class: 15.8 and 73 GB/s with [`Hint::Once`], 20.0 and 105 with [`Hint::L2`]).
pub(super) fn once() -> Hint {
    #[cfg(target_arch = "x86_64")]
    {
        static IS_INTEL: OnceLock<bool> = OnceLock::new();
        let is_intel = *IS_INTEL.get_or_init(|| {
            let leaf = std::arch::x86_64::__cpuid(0);
            [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
        });
        if is_intel {
            return Hint::L2;
        }
    }
    Hint::Once
}

/// Prefetches `bytes` bytes at `p`, which need not exist.
#[inline(always)]
pub(crate) fn prefetch<T>(p: *const T, bytes: usize, hint: Hint) {
    for line in 0..bytes.div_ceil(64) {
        let p = p.wrapping_byte_add(64 * line);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch never faults, whatever the address.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_NTA, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
            match hint {
                Hint::L1 => _mm_prefetch::<_MM_HINT_T0>(p.cast()),
                Hint::L2 => _mm_prefetch::<_MM_HINT_T1>(p.cast()),
                Hint::Once => _mm_prefetch::<_MM_HINT_NTA>(p.cast()),
            }
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        unsafe {
            use std::arch::asm;
            match hint {
                Hint::L1 => asm!("prfm pldl1keep, [{0}]", in(reg) p, options(nostack, preserves_flags, readonly)),
                Hint::L2 => asm!("prfm pldl2keep, [{0}]", in(reg) p, options(nostack, preserves_flags, readonly)),
                Hint::Once => asm!("prfm pldl1strm, [{0}]", in(reg) p, options(nostack, preserves_flags, readonly)),
            }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let _ = (p, hint);
    }
}

/// Prefetch distance of [`Near`] in bytes.
pub(super) const NEAR: usize = 6656;

/// Prefetch distance of [`Far`] in bytes; beyond 12 kB it makes no difference ([768, 2048] q6_k, one core of AMD EPYC
/// 9004 in a virtual machine: 14.8 GB/s at 4 kB, 18.9 at 9 kB, 20.5 from 12 kB to 128 kB).
const FAR: usize = 16384;

/// Prefetches into the first cache the rows behind those that a kernel walks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Near {
    first: *const u8,
    hint: Hint,
}

impl Near {
    /// For a walk over `rows` rows of `row_bytes` bytes side by side, the first of them at `row`.
    ///
    /// A prefetched line stays in the first cache until the walk is through the rows before it. Where both do not fit,
    /// it goes to the second as well: with [`Hint::Once`] it would come from memory twice ([768, 2048] q8_0, one core
    /// of AMD EPYC 9004: 9.4 -> 12.0 GB/s, with the stream no longer in bursts).
    pub(super) fn new(row: *const u8, rows: usize, row_bytes: usize) -> Near {
        let hint = if 2 * rows * row_bytes > 16 << 10 { Hint::L1 } else { once() };
        Near { first: row.wrapping_add(NEAR.max(rows * row_bytes)), hint }
    }

    /// Prefetches `bytes` bytes, once the walk is through the first `pos` bytes of its rows.
    #[inline(always)]
    pub(super) fn prefetch(self, pos: usize, bytes: usize) {
        prefetch(self.first.wrapping_add(pos), bytes, self.hint);
    }
}

/// Prefetches into the second cache what a worker reads after the bytes at hand, in the order of the work: the rest of
/// a tile, then the start of the next one, be it of another matrix. There the lines evict nothing that is at hand,
/// however far ahead they are.
///
/// It is for kernels that wait for memory: super-blocks, and types of 8 bits ([768, 2048] q8_0, one core of AMD EPYC
/// 9004: 13.9 GB/s with [`Near`] -> 23.2). 32-blocks of fewer bits compute more, and lose a tenth to the second cache's
/// latency.
#[derive(Clone, Copy, Debug)]
pub(super) struct Far {
    tile: *const u8,
    tile_bytes: usize,
    next: *const u8,
    distance: usize,
}

impl Far {
    /// For a walk over `set`, `rows` rows at a time. The distance is a multiple of them: while the walk takes `rows`
    /// rows, what it prefetches is contiguous too.
    pub(super) fn new(set: &RowSet, rows: usize) -> Far {
        let distance = FAR.next_multiple_of((rows * set.bytes.q).max(1));
        Far { tile: set.row(0), tile_bytes: set.n * set.bytes.q, next: set.next, distance }
    }

    /// The address to prefetch once a walk is through the first `pos` bytes of its tile. Prefetch a little at a time: a
    /// core keeps few requests in flight, and waits with the next.
    #[inline(always)]
    pub(super) fn address(&self, pos: usize) -> *const u8 {
        let pos = pos + self.distance;
        let (from, pos) = if pos < self.tile_bytes { (self.tile, pos) } else { (self.next, pos - self.tile_bytes) };
        from.wrapping_add(pos)
    }
}
