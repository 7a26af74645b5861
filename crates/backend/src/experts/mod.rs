//! Experts that do not fit: which of them are in memory, and how the others come there.
//!
//! The matrices of an expert (gate, up and down with their planes) are a *unit*, read as a whole into a *slab* of
//! memory. [`layout`] says from the plan how large slabs are and how many fit. [`store`] decides which expert has which
//! slab; it knows no bytes, so that it can be tested and simulated alone. [`reader`] fills slabs on threads of its own,
//! from a [`source`]. [`simulate`] says what all this will do. [`Streams`] joins them for a backend that computes in
//! host memory. Nothing here knows ops or kernels.

pub mod layout;
mod reader;
pub mod simulate;
pub mod source;
pub mod store;
mod streams;

pub use streams::{Streams, Waiting};

use std::ops::AddAssign;
use std::time::Duration;

/// What streaming has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamStats {
    /// Experts that are in memory at the same time, at most.
    pub n_slabs: usize,
    /// All routed experts.
    pub n_experts: usize,
    /// Experts that ops wanted, each once an op.
    pub wanted: u64,
    /// Those that were in memory.
    pub hits: u64,
    /// Those that a prefetch was reading.
    pub coming: u64,
    /// Experts whose prefetch was requested.
    pub prefetched: u64,
    /// Bytes read from files.
    pub bytes: u64,
    /// Time in which nothing could be computed, because an expert had not come.
    pub waited: Duration,
}

impl AddAssign for StreamStats {
    fn add_assign(&mut self, other: StreamStats) {
        // Every field by name: a new one is not forgotten.
        let StreamStats { n_slabs, n_experts, wanted, hits, coming, prefetched, bytes, waited } = other;
        self.n_slabs += n_slabs;
        self.n_experts += n_experts;
        self.wanted += wanted;
        self.hits += hits;
        self.coming += coming;
        self.prefetched += prefetched;
        self.bytes += bytes;
        self.waited += waited;
    }
}

impl StreamStats {
    /// What was done since `before`.
    pub fn since(self, before: StreamStats) -> StreamStats {
        StreamStats {
            wanted: self.wanted - before.wanted,
            hits: self.hits - before.hits,
            coming: self.coming - before.coming,
            prefetched: self.prefetched - before.prefetched,
            bytes: self.bytes - before.bytes,
            waited: self.waited - before.waited,
            ..self
        }
    }

    /// Share of the wanted experts that were in memory.
    pub fn hit_rate(self) -> f64 {
        self.hits as f64 / self.wanted.max(1) as f64
    }
}
