//! A bound on the memory that one thread takes, for code whose own account of what it builds may have a hole.
//!
//! [`Meter`] is the system's allocator with a count for threads that are watched ([`watch`]); others pay one look at a
//! thread's own variable. What is watched looks at [`exceeded`] where it can end in order. An allocator cannot unwind
//! and must not abort: a thread that goes on to twice its limit stops there for ever, with what it holds, and whoever
//! waits for it gives it up.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::marker::PhantomData;
use std::time::Duration;

/// The system's allocator, counting on watched threads. A program installs it with `#[global_allocator]`; without it
/// nothing is ever exceeded.
pub struct Meter;

/// Not watched.
const FREE: isize = isize::MAX;

thread_local! {
    // Constants without destructors: they neither allocate nor end before the thread's last deallocation.
    static LIMIT: Cell<isize> = const { Cell::new(FREE) };
    static HELD: Cell<isize> = const { Cell::new(0) };
}

/// Counts what this thread takes from now on, from 0, until it is dropped. What the thread frees counts against it,
/// whoever allocated it.
#[derive(Debug)]
#[must_use]
pub struct Watch {
    /// It belongs to its thread.
    _thread: PhantomData<*const ()>,
}

/// Watches this thread: `limit` is in bytes.
pub fn watch(limit: usize) -> Watch {
    HELD.set(0);
    LIMIT.set(isize::try_from(limit).unwrap_or(FREE).min(FREE / 2));
    Watch { _thread: PhantomData }
}

impl Drop for Watch {
    fn drop(&mut self) {
        LIMIT.set(FREE);
    }
}

/// Whether this thread is watched and holds more than its limit.
pub fn exceeded() -> bool {
    HELD.get() > LIMIT.get()
}

/// Counts `bytes` that are about to be taken, or were given back.
fn count(bytes: isize) {
    // A thread that ends has no variables any more.
    let _ = LIMIT.try_with(|limit| {
        let limit = limit.get();
        if limit == FREE {
            return;
        }
        let held = HELD.get().saturating_add(bytes);
        HELD.set(held);
        // The caller is told nothing: it would abort the process.
        if bytes > 0 && held / 2 > limit {
            loop {
                std::thread::sleep(Duration::from_secs(3600));
            }
        }
    });
}

// SAFETY: every call goes to the system's allocator unchanged; counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for Meter {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller keeps `alloc_zeroed`'s contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        // SAFETY: the caller keeps `realloc`'s contract.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller keeps `dealloc`'s contract.
        unsafe { System.dealloc(at, layout) }
    }
}
