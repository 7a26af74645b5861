//! What a program takes of a device's memory, before it is compiled: the one account that limits, budgets and tables
//! read.
//!
//! Knows kinds of memory, and nothing of how a backend comes by it.

use model::plan::cost::Kind;

use crate::residency::Residency;

/// What a part of the memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// Weights of a kind, where they are kept.
    Weights(Kind, Residency),
    /// Pages of the layers that keep every position.
    Cache,
    /// Pages of the layers that keep a window.
    Windows,
    /// Slots of recurrent state.
    States,
    /// Buffers of a step.
    Activations,
    /// Inputs of matrix products in the form that the kernels read.
    Inputs,
    /// What a step keeps of its tokens: positions, angles, lists of experts, tables of pages.
    Scratch,
    /// What each thread has to itself.
    Workers,
}

impl Part {
    /// Its name, for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weights(..) => "weights",
            Self::Cache => "cache",
            Self::Windows => "windows",
            Self::States => "states",
            Self::Activations => "activations",
            Self::Inputs => "inputs",
            Self::Scratch => "scratch",
            Self::Workers => "workers",
        }
    }

    /// Whether the program allocates it, and so holds it as long as it lives.
    pub fn is_allocated(self) -> bool {
        match self {
            Self::Weights(_, Residency::Mapped) => false,
            Self::Weights(_, Residency::Copied | Residency::Streamed) => true,
            Self::Cache | Self::Windows | Self::States => true,
            Self::Activations | Self::Inputs | Self::Scratch | Self::Workers => true,
        }
    }
}

/// The memory of a program, in bytes by part. Sums saturate: limits that cannot be take more than there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Whose memory it is.
    pub device: &'static str,
    parts: Vec<(Part, usize)>, // ascending, none of 0 bytes
}

impl Footprint {
    /// Nothing yet.
    pub fn new(device: &'static str) -> Self {
        Self { device, parts: Vec::new() }
    }

    /// Adds bytes to a part.
    pub fn add(&mut self, part: Part, bytes: usize) {
        match self.parts.binary_search_by_key(&part, |&(part, _)| part) {
            Ok(i) => self.parts[i].1 = self.parts[i].1.saturating_add(bytes),
            Err(i) if bytes > 0 => self.parts.insert(i, (part, bytes)),
            Err(_) => {}
        }
    }

    /// The parts, weights first, none of 0 bytes.
    pub fn parts(&self) -> &[(Part, usize)] {
        &self.parts
    }

    /// Bytes of the parts for which `is_meant` holds.
    pub fn bytes(&self, is_meant: impl Fn(Part) -> bool) -> usize {
        let meant = self.parts.iter().filter(|&&(part, _)| is_meant(part));
        meant.fold(0, |sum: usize, &(_, bytes)| sum.saturating_add(bytes))
    }

    /// Bytes of weights, wherever they are.
    pub fn weights(&self) -> usize {
        self.bytes(|part| matches!(part, Part::Weights(..)))
    }

    /// Bytes that the program allocates when it is compiled.
    pub fn allocated(&self) -> usize {
        self.bytes(Part::is_allocated)
    }

    /// Bytes of weights that are read where their files are mapped: resident once all were read, unless the system
    /// evicts them.
    pub fn mapped(&self) -> usize {
        self.bytes(|part| !part.is_allocated())
    }

    /// All of it.
    pub fn total(&self) -> usize {
        self.bytes(|_| true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up() {
        let mut footprint = Footprint::new("host");
        let mapped = Part::Weights(Kind::Experts, Residency::Mapped);
        for (part, bytes) in [
            (Part::Cache, 5),
            (mapped, 100),
            (Part::Weights(Kind::Norm, Residency::Copied), 7),
            (Part::Cache, 6),
            (Part::States, 0),
        ] {
            footprint.add(part, bytes);
        }
        let norm = Part::Weights(Kind::Norm, Residency::Copied);
        assert_eq!(footprint.parts(), [(mapped, 100), (norm, 7), (Part::Cache, 11)]);
        assert_eq!((footprint.allocated(), footprint.mapped(), footprint.total()), (18, 100, 118));
        footprint.add(Part::Windows, usize::MAX);
        assert_eq!(footprint.total(), usize::MAX);
    }
}
