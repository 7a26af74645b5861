//! Keeps the process alive when a mapped file cannot be read: another program cut it, or the disk failed.
//!
//! The operating system answers such a read with SIGBUS. A handler, installed with the first mapping, looks the
//! address up in a table of our mappings. When it is ours, the rest of the mapping from that page on becomes zeros,
//! the mapping is marked, and the read goes on; whoever computed with it asks [`Watch::fault`] afterwards. Any other
//! SIGBUS goes to the handler that was there before. Reads cost nothing for it.
//!
//! Knows addresses only, no files. On systems other than Linux and Apple's nothing is guarded.

use std::io;

/// A range of mapped memory in the table, until it is dropped.
pub(crate) struct Watch {
    #[cfg(any(target_os = "linux", target_vendor = "apple"))]
    region: &'static unix::Region,
}

impl Watch {
    /// Guards `len` bytes at address `start`, a multiple of the page size.
    ///
    /// # Safety
    /// The range is one read-only mapping of the caller's, who alone looks at it, and stays mapped until the watch is
    /// dropped.
    ///
    /// # Errors
    /// The handler cannot be installed, or the table is full.
    pub(crate) unsafe fn new(start: usize, len: usize) -> io::Result<Self> {
        #[cfg(any(target_os = "linux", target_vendor = "apple"))]
        return Ok(Self { region: unix::claim(start, len)? });
        #[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
        {
            let _ = (start, len);
            Ok(Self {})
        }
    }

    /// Offset of the first page that could not be read, if there was one: from there on the range reads as zeros.
    pub(crate) fn fault(&self) -> Option<usize> {
        #[cfg(any(target_os = "linux", target_vendor = "apple"))]
        return self.region.fault();
        #[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
        None
    }
}

#[cfg(any(target_os = "linux", target_vendor = "apple"))]
impl Drop for Watch {
    fn drop(&mut self) {
        self.region.free();
    }
}

#[cfg(any(target_os = "linux", target_vendor = "apple"))]
mod unix {
    use std::io;
    use std::mem::MaybeUninit;
    use std::ptr;
    use std::sync::OnceLock;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::SeqCst;

    use libc::{c_int, c_void, siginfo_t};

    /// Most files that can be mapped at a time.
    const N_REGIONS: usize = 16384;

    /// One mapping. Fixed places and atomics, because the handler may neither lock nor allocate.
    pub(super) struct Region {
        /// Its first address; [`FREE`] or [`CLAIMED`] when there is none.
        start: AtomicUsize,
        len: AtomicUsize,
        /// Complement of the offset of the first page that could not be read; [`INTACT`] when all could: a table of
        /// zeros takes no room in the program.
        fault: AtomicUsize,
    }

    const FREE: usize = 0;
    const CLAIMED: usize = 1;
    const INTACT: usize = 0;

    static REGIONS: [Region; N_REGIONS] = [const { Region::new() }; N_REGIONS];
    /// Regions from here on were never used.
    static USED: AtomicUsize = AtomicUsize::new(0);
    static PAGE_BYTES: AtomicUsize = AtomicUsize::new(0);
    /// What handled SIGBUS before; set before our handler is installed.
    static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

    impl Region {
        const fn new() -> Self {
            Self { start: AtomicUsize::new(FREE), len: AtomicUsize::new(0), fault: AtomicUsize::new(INTACT) }
        }

        pub(super) fn fault(&self) -> Option<usize> {
            let fault = self.fault.load(SeqCst);
            (fault != INTACT).then_some(!fault)
        }

        pub(super) fn free(&self) {
            self.start.store(FREE, SeqCst);
        }

        /// Offset of an address in this region. Called by the handler, while other threads claim and free regions.
        fn offset_of(&self, addr: usize) -> Option<usize> {
            let start = self.start.load(SeqCst);
            let len = self.len.load(SeqCst);
            // Read again: a region that was claimed anew meanwhile has the length of another mapping.
            let is_whole = start != FREE && start != CLAIMED && self.start.load(SeqCst) == start;
            (is_whole && addr >= start && addr - start < len).then(|| addr - start)
        }
    }

    /// Enters a mapping into the table.
    pub(super) fn claim(start: usize, len: usize) -> io::Result<&'static Region> {
        install()?;
        let free = |r: &&Region| r.start.compare_exchange(FREE, CLAIMED, SeqCst, SeqCst).is_ok();
        let Some(i) = REGIONS.iter().position(|region| free(&region)) else {
            return Err(io::Error::other(format!("{N_REGIONS} files are mapped already")));
        };
        let region = &REGIONS[i];
        region.len.store(len, SeqCst);
        region.fault.store(INTACT, SeqCst);
        USED.fetch_max(i + 1, SeqCst);
        region.start.store(start, SeqCst);
        Ok(region)
    }

    /// Installs the handler, the first time.
    fn install() -> io::Result<()> {
        static RESULT: OnceLock<Result<(), i32>> = OnceLock::new();
        let install = || {
            PAGE_BYTES.store(crate::page_bytes(), SeqCst);
            let last_error = || io::Error::last_os_error().raw_os_error().unwrap_or(0);
            let mut previous = MaybeUninit::uninit();
            // SAFETY: a null action changes nothing, and `previous` has room for the current one.
            if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), previous.as_mut_ptr()) } != 0 {
                return Err(last_error());
            }
            // SAFETY: sigaction succeeded, so it has filled it in.
            let _ = PREVIOUS.set(unsafe { previous.assume_init() });
            // SAFETY: all bits 0 is a value of this struct of integers and function addresses that may be null.
            let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
            action.sa_sigaction = on_sigbus as *const () as usize;
            // The stack for signals, where a thread has one: the handler before us needs it for stack overflows.
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            // SAFETY: `action` is whole, and `on_sigbus` does only what a handler may do.
            match unsafe { libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()) } {
                0 => Ok(()),
                _ => Err(last_error()),
            }
        };
        RESULT.get_or_init(install).map_err(io::Error::from_raw_os_error)
    }

    /// The handler. It reads atomics and makes system calls; it neither locks nor allocates.
    ///
    /// # Safety
    /// Called by the operating system, with a signal, what is known of it, and the interrupted thread's state.
    unsafe extern "C" fn on_sigbus(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
        // SAFETY: SA_SIGINFO makes the system pass a whole `siginfo_t`, which holds an address for SIGBUS.
        let (code, addr) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
        if !(is_read_error(code) && zero_from(addr)) {
            // SAFETY: the arguments are those that the system gave us.
            unsafe { forward(signal, info, context) };
        }
    }

    /// Returns whether a code of SIGBUS says that memory could not be read in, rather than that an address is
    /// misaligned or that another process sent the signal. Apple's kernel does not tell them apart; the address is
    /// enough there.
    fn is_read_error(code: c_int) -> bool {
        cfg!(target_vendor = "apple") || code == libc::BUS_ADRERR
    }

    /// Makes the mapping that holds `addr` zeros from the page of `addr` on, and marks it first, so that whoever has
    /// read a zero can see the mark. Returns whether that was done; no mapping of ours holds the address otherwise.
    fn zero_from(addr: usize) -> bool {
        let regions = &REGIONS[..USED.load(SeqCst)];
        // The thread that faulted reads the mapping, so its region stays claimed while the handler runs.
        let Some((region, offset)) = regions.iter().find_map(|region| Some((region, region.offset_of(addr)?))) else {
            return false;
        };
        let page = addr & !(PAGE_BYTES.load(SeqCst) - 1);
        let page_offset = offset - (addr - page); // mappings begin with a page
        let rest = region.len.load(SeqCst) - page_offset;
        region.fault.fetch_max(!page_offset, SeqCst);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANON | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // POSIX does not list mmap among the functions that a handler may call. On Linux and Apple's systems it is a
        // system call with nothing around it; it may set errno, which the interrupted code may be about to read.
        // SAFETY: errno's address is valid in every thread.
        let before = unsafe { *errno() };
        // SAFETY: the pages lie in a mapping of ours that nobody writes to (`Watch::new`).
        let at = unsafe { libc::mmap(ptr::without_provenance_mut(page), rest, libc::PROT_READ, flags, -1, 0) };
        // SAFETY: as above.
        unsafe { *errno() = before };
        at != libc::MAP_FAILED
    }

    fn errno() -> *mut c_int {
        #[cfg(target_os = "linux")]
        // SAFETY: takes nothing and always succeeds.
        return unsafe { libc::__errno_location() };
        #[cfg(target_vendor = "apple")]
        // SAFETY: as above.
        return unsafe { libc::__error() };
    }

    /// Does what would have been done without us.
    ///
    /// # Safety
    /// Called by our handler with its own arguments.
    unsafe fn forward(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
        let previous =
            PREVIOUS.get().filter(|previous| ![libc::SIG_DFL, libc::SIG_IGN].contains(&previous.sa_sigaction));
        // SAFETY: SA_SIGINFO makes the system pass a whole `siginfo_t`.
        let is_sent = unsafe { (*info).si_code } <= 0; // by kill and the like
        match previous {
            Some(previous) if previous.sa_flags & libc::SA_SIGINFO != 0 => {
                // SAFETY: an action with SA_SIGINFO holds the address of a handler of this form.
                let handler: unsafe extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                    unsafe { std::mem::transmute(previous.sa_sigaction) };
                // SAFETY: the arguments are those that the system would give it.
                unsafe { handler(signal, info, context) };
            }
            Some(previous) => {
                // SAFETY: an action without SA_SIGINFO holds the address of a handler of this form.
                let handler: unsafe extern "C" fn(c_int) = unsafe { std::mem::transmute(previous.sa_sigaction) };
                // SAFETY: as above.
                unsafe { handler(signal) };
            }
            None if is_sent && PREVIOUS.get().is_some_and(|p| p.sa_sigaction == libc::SIG_IGN) => {}
            None => {
                // SAFETY: all bits 0 is the default action; sigaction and raise may be called in a handler. The
                // signal is blocked while we run: one that was sent comes again when we return, and so does a read
                // that faults.
                unsafe {
                    let default: libc::sigaction = MaybeUninit::zeroed().assume_init();
                    libc::sigaction(signal, &default, ptr::null_mut());
                    if is_sent {
                        libc::raise(signal);
                    }
                }
            }
        }
    }
}
