//! How a simulated GPU runs, and how it fails on demand.

use std::path::PathBuf;

/// The order in which threads, simdgroups and threadgroups run. Right kernels give the same bits in all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// By their numbers.
    Forward,
    /// Against their numbers.
    Reverse,
    /// A simdgroup drawn at random makes a step; the threadgroups of an epoch are shuffled over all its dispatches.
    Random,
    /// Each simdgroup runs to its barrier before the next one starts.
    Ahead,
    /// Threads take turns at every access to memory.
    Lockstep,
    /// A thread is put off at some accesses, drawn at random.
    Preempt,
}

impl Schedule {
    /// All of them.
    pub const ALL: [Schedule; 6] =
        [Self::Forward, Self::Reverse, Self::Random, Self::Ahead, Self::Lockstep, Self::Preempt];
}

/// When a submitted list runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Inside `submit`: a host that writes too late is found by what kernels have read.
    Submit,
    /// Inside `wait`: a host that reads too early is found by what kernels have not written.
    Wait,
}

/// Calls that may be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// `alloc`: memory runs out.
    Alloc,
    /// `build`: the compiler fails.
    Build,
    /// `submit`: the GPU is lost.
    Submit,
    /// `wait`: the GPU is lost.
    Wait,
}

/// A call that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Which.
    pub call: Call,
    /// How many of them succeed before it.
    pub after: u32,
}

/// A simulated GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Folder of compiled kernels, kept from run to run.
    pub cache: PathBuf,
    /// Order of threads.
    pub schedule: Schedule,
    /// Of what is drawn at random.
    pub seed: u32,
    /// When lists run.
    pub moment: Moment,
    /// Order of the sums of `simd_sum`: 0 and 1 are butterflies from far to near and from near to far, 2 is one after
    /// the other.
    pub sum_order: u32,
    /// Units in the last place by which functions that Metal does not round correctly are off.
    pub ulp: u32,
    /// `maxTotalThreadsPerThreadgroup` of every pipeline.
    pub threads: u32,
    /// Apple's family.
    pub family: u32,
    /// Largest buffer, in bytes.
    pub max_buffer: u64,
    /// A call that fails.
    pub fault: Option<Fault>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            cache: std::env::temp_dir().join("moebius-metal-sim"),
            schedule: Schedule::Forward,
            seed: 1,
            moment: Moment::Submit,
            sum_order: 0,
            ulp: 0,
            threads: 1024,
            family: 7,
            max_buffer: 1 << 32,
            fault: None,
        }
    }
}
