//! Zeroed memory of a size that a model file decides: a lack of it is an error, not an abort.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use memmap2::{MmapMut, MmapOptions};

/// Memory that could not be allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("failed to allocate {bytes} bytes for {what}")]
pub struct OutOfMemory {
    /// Its purpose.
    pub what: &'static str,
    /// Its size.
    pub bytes: usize,
}

/// Zeroed memory on cache-line bounds. Large pieces are mapped, so that the system zeroes pages at first use, and
/// request pages of 2 MB: streaming from small pages waits for address translation.
pub struct Arena(Memory);

enum Memory {
    Small { ptr: NonNull<u8>, layout: Layout },
    Large { ptr: NonNull<u8>, _map: MmapMut },
}

// SAFETY: an Arena is plain owned memory.
unsafe impl Send for Arena {}
// SAFETY: shared access goes through raw pointers, whose users promise disjointness.
unsafe impl Sync for Arena {}

/// From this many bytes on, memory is mapped by itself.
const LARGE: usize = 4 << 20;

impl Arena {
    /// `bytes` zero bytes for `what`.
    ///
    /// # Errors
    /// When they cannot be allocated.
    pub fn new(what: &'static str, bytes: usize) -> Result<Arena, OutOfMemory> {
        let error = OutOfMemory { what, bytes };
        if bytes >= LARGE {
            let Ok(mut map) = MmapOptions::new().len(bytes).map_anon() else { return Err(error) };
            #[cfg(target_os = "linux")]
            // A kernel that refuses leaves small pages, which only cost speed.
            let _ = map.advise(memmap2::Advice::HugePage);
            let Some(ptr) = NonNull::new(map.as_mut_ptr()) else { return Err(error) };
            return Ok(Arena(Memory::Large { ptr, _map: map }));
        }
        let Ok(layout) = Layout::from_size_align(bytes.max(64), 64) else { return Err(error) };
        // SAFETY: the layout's size is not zero.
        let Some(ptr) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { return Err(error) };
        Ok(Arena(Memory::Small { ptr, layout }))
    }

    /// First byte.
    pub fn ptr(&self) -> *mut u8 {
        match self.0 {
            Memory::Small { ptr, .. } | Memory::Large { ptr, .. } => ptr.as_ptr(),
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if let Memory::Small { ptr, layout } = self.0 {
            // SAFETY: allocated in `new` with this layout.
            unsafe { dealloc(ptr.as_ptr(), layout) }
        }
    }
}

/// Types for which zero bytes are a value.
///
/// # Safety
/// Zero bytes are a valid value of the type, and it needs no drop.
pub unsafe trait Zero: Copy {}

// SAFETY: a number.
unsafe impl Zero for f32 {}
// SAFETY: as above.
unsafe impl Zero for i16 {}
// SAFETY: as above.
unsafe impl Zero for u64 {}
// SAFETY: three numbers.
unsafe impl Zero for (u8, u8, u32) {}

/// `n` zeros for `what`. Allocations whose size a model file decides are made here: `vec![0.0; n]` would abort the
/// process.
///
/// # Errors
/// When they cannot be allocated.
pub fn zeroed<T: Zero>(what: &'static str, n: usize) -> Result<Vec<T>, OutOfMemory> {
    let error = || OutOfMemory { what, bytes: n.saturating_mul(size_of::<T>()) };
    let layout = Layout::array::<T>(n).map_err(|_| error())?;
    if layout.size() == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: the layout's size is not zero.
    let ptr = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(error)?;
    // SAFETY: allocated as a Vec of `n` does it, and zeros are values.
    Ok(unsafe { Vec::from_raw_parts(ptr.as_ptr().cast(), n, n) })
}
