//! What a backend needs of a GPU, as plain data: buffers, pipelines, and lists of commands.
//!
//! A [`Gpu`] replays lists. It knows no op and no model. The simulator (`crates/metal-sim`) is one.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use checkpoint::Checkpoint;

/// A buffer of a [`Gpu`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Buf(pub u32);

/// A compiled kernel of a [`Gpu`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pipe(pub u32);

/// A submitted list; later ones compare greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// Part of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// The buffer.
    pub buf: Buf,
    /// First byte.
    pub at: u64,
    /// Number of bytes.
    pub len: u64,
}

impl Span {
    /// `len` bytes of the span from byte `at` of it.
    ///
    /// # Panics
    /// When they are not inside.
    pub fn part(self, at: u64, len: u64) -> Span {
        assert!(at <= self.len && len <= self.len - at, "bytes {at}..+{len} of a span of {}", self.len);
        Span { at: self.at + at, len, ..self }
    }

    /// Whether two spans share a byte.
    pub fn overlaps(self, other: Span) -> bool {
        self.buf == other.buf && self.at < other.at + other.len && other.at < self.at + self.len
    }
}

/// What a dispatch does with a bound span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Use {
    /// Reads it.
    Read,
    /// Writes every byte of it and reads none that it has not written.
    Write,
    /// Reads and writes some of it.
    Update,
}

/// A command of a [`List`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cmd {
    /// Chooses the kernel of the next dispatch; all its slots are bound after this command.
    Pipe(Pipe),
    /// Binds a span to a slot.
    Bind {
        /// Its number: `[[buffer(slot)]]` in Metal, a binding elsewhere.
        slot: u8,
        /// What is bound.
        span: Span,
        /// What the dispatch does with it.
        used: Use,
    },
    /// Binds a copy of bytes of the list to a slot: a kernel's parameters.
    Bytes {
        /// Its number: `[[buffer(slot)]]` in Metal, a binding elsewhere.
        slot: u8,
        /// First byte in [`List::bytes`].
        at: u32,
        /// Number of bytes, at most 4096.
        len: u32,
    },
    /// Dispatches a grid of threadgroups, each of so many threads in one dimension.
    Groups {
        /// Threadgroups in x, y and z.
        grid: [u32; 3],
        /// Threads of a threadgroup.
        threads: u32,
    },
    /// Later dispatches see what earlier ones wrote, and write after earlier ones have read.
    Barrier,
}

/// Commands of a step, in order. Between two barriers dispatches run in any order or at once. Lists are reused, so
/// that filling one allocates nothing once it was full.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct List {
    /// The commands.
    pub cmds: Vec<Cmd>,
    /// What [`Cmd::Bytes`] refers to.
    pub bytes: Vec<u8>,
}

impl List {
    /// Removes all commands and keeps their memory.
    pub fn clear(&mut self) {
        self.cmds.clear();
        self.bytes.clear();
    }

    /// Binds parameters, words of four bytes.
    pub fn params(&mut self, slot: u8, words: &[u32]) {
        let at = self.bytes.len() as u32;
        words.iter().for_each(|word| self.bytes.extend(word.to_le_bytes()));
        self.cmds.push(Cmd::Bytes { slot, at, len: 4 * words.len() as u32 });
    }

    /// Number of dispatches and of barriers.
    pub fn counts(&self) -> (usize, usize) {
        let count = |is_meant: fn(&Cmd) -> bool| self.cmds.iter().filter(|cmd| is_meant(cmd)).count();
        (count(|cmd| matches!(cmd, Cmd::Groups { .. })), count(|cmd| *cmd == Cmd::Barrier))
    }
}

/// A kernel to compile.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Unit {
    /// Its name in messages: the kernel and what it is compiled for.
    pub name: String,
    /// The whole source: strings are compiled without an include path, so headers are joined into it.
    pub source: String,
    /// The kernel's function in the source.
    pub kernel: &'static str,
}

/// Whole pages of a file that is mapped, and what keeps them so.
#[derive(Clone)]
pub struct Mapped {
    /// Whose files they are.
    pub checkpoint: Arc<Checkpoint>,
    /// Which file.
    pub file: usize,
    /// First byte, a multiple of [`checkpoint::page_bytes`].
    pub from: usize,
    /// Number of bytes, a multiple of it too; those past the file's end are zeros.
    pub len: usize,
}

impl Mapped {
    /// Where they are in memory; `None` where the file is not mapped or has no such pages.
    pub fn pages(&self) -> Option<(NonNull<u8>, usize)> {
        let pages = self.checkpoint.files().get(self.file)?.pages()?;
        let page = checkpoint::page_bytes();
        let is_whole = self.from.is_multiple_of(page) && self.len.is_multiple_of(page);
        if !is_whole || self.from.checked_add(self.len)? > pages.len {
            return None;
        }
        let base = pages.base.as_ptr().wrapping_add(self.from);
        Some((NonNull::new(base)?, self.len))
    }

    /// The file's bytes among them; `None` where [`Mapped::pages`] is.
    pub fn bytes(&self) -> Option<&[u8]> {
        self.pages()?;
        let all = self.checkpoint.files()[self.file].bytes()?;
        all.get(self.from.min(all.len())..self.from.saturating_add(self.len).min(all.len()))
    }
}

impl fmt::Debug for Mapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "bytes {}..+{} of file {}", self.from, self.len, self.file)
    }
}

/// Limits of a [`Gpu`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Name for people.
    pub name: String,
    /// Generation of the device, by which variants of kernels are chosen: Apple's family, 7 for M1.
    pub family: u32,
    /// Largest buffer in bytes.
    pub max_buffer: u64,
}

/// What a finished list took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// From the GPU's start to its end.
    pub gpu: Duration,
}

/// An error of a [`Gpu`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GpuError {
    /// Memory ran out.
    #[error("{bytes} bytes for {what} cannot be had")]
    Memory {
        /// What for.
        what: &'static str,
        /// How many.
        bytes: u64,
    },
    /// A kernel does not compile.
    #[error("kernel {name}: {why}")]
    Build {
        /// Name of the unit.
        name: String,
        /// The compiler's message.
        why: String,
    },
    /// A list, or a kernel that ran, broke a rule. The simulator's word; a device tells less.
    #[error("{0}")]
    Rule(String),
    /// A list did not finish in time.
    #[error("the GPU did not finish within {0:?}")]
    Late(Duration),
    /// The GPU failed or was lost.
    #[error("{0}")]
    Lost(String),
}

/// A GPU. After an error of [`Gpu::submit`] or [`Gpu::wait`] it runs nothing more.
pub trait Gpu: Send {
    /// Its limits.
    fn caps(&self) -> &Caps;

    /// Allocates a buffer; what it holds is undefined.
    ///
    /// # Errors
    /// [`GpuError::Memory`].
    fn alloc(&mut self, bytes: u64, what: &'static str) -> Result<Buf, GpuError>;

    /// A buffer that is the pages of a file, without a copy; it is only read. `None` where this GPU, or this file,
    /// allows no such buffer.
    ///
    /// # Errors
    /// [`GpuError::Memory`].
    fn map(&mut self, mapped: &Mapped) -> Result<Option<Buf>, GpuError>;

    /// Writes to a buffer that no unfinished list uses; as many bytes as the span has.
    ///
    /// # Errors
    /// [`GpuError::Rule`], [`GpuError::Lost`].
    fn write(&mut self, to: Span, bytes: &[u8]) -> Result<(), GpuError>;

    /// Reads from a buffer that no unfinished list uses; as many bytes as the span has.
    ///
    /// # Errors
    /// [`GpuError::Rule`], [`GpuError::Lost`].
    fn read(&mut self, from: Span, out: &mut [u8]) -> Result<(), GpuError>;

    /// Compiles kernels, in parallel where that pays; one pipe a unit.
    ///
    /// # Errors
    /// [`GpuError::Build`].
    fn build(&mut self, units: &[Unit]) -> Result<Vec<Pipe>, GpuError>;

    /// Maximum number of threads of a threadgroup of a kernel.
    fn threads(&self, pipe: Pipe) -> u32;

    /// Starts a list behind the lists before it. It may be changed as soon as the call returns.
    ///
    /// # Errors
    /// [`GpuError::Rule`], [`GpuError::Lost`].
    fn submit(&mut self, list: &List) -> Result<Ticket, GpuError>;

    /// Waits until a list and all before it have finished.
    ///
    /// # Errors
    /// [`GpuError::Rule`], [`GpuError::Late`], [`GpuError::Lost`].
    fn wait(&mut self, ticket: Ticket, limit: Duration) -> Result<Times, GpuError>;
}
