//! The process's heap, where its allocator can be told what a server wants of it: that freed memory goes back to the
//! system. Only glibc keeps it without being told; elsewhere these functions do nothing.

/// Blocks of this size and above are mapped each by itself, and unmapped when they are freed.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MAPPED_BYTES: libc::c_int = 4 << 20;

/// Sets the allocator up. glibc raises the size from which it maps blocks when large ones are freed; from then on such
/// blocks lie between small ones, and stay.
pub fn set_up() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `mallopt` takes two numbers, may be called by any thread at any time, and refuses what it does not know.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES);
    }
}

/// Gives freed memory back to the system, also between blocks that are in use. Takes milliseconds for each 100 MB,
/// during which other threads may wait for memory.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `malloc_trim` locks each arena while it works on it, and leaves blocks in use alone.
    unsafe {
        libc::malloc_trim(0);
    }
}
