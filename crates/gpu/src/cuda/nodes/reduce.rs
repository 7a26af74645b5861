//! Nodes of sums over the parts of a plan.

use model::plan::partition::MAX_PARTS;

use super::super::driver::Ptr;
use super::{ModuleId, View};

/// Maximum number of blocks of a launch: each has a flag.
pub const MOST_BLOCKS: usize = 256;

/// Maximum number of values that travel together with their call. More are worth a flag and half the bytes.
pub const MOST_SMALL: usize = 128 << 10;

/// Where the parts of a plan write to, and which of them this is.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    pub part: usize,
    pub n_parts: usize,
    /// The room of each.
    pub rooms: [Ptr; MAX_PARTS],
    /// Numbers of a turn, of few rows and of many.
    pub numbers: [usize; 2],
}

impl Link {
    /// Between parts that are not there, to see what a step would queue.
    pub fn blank() -> Link {
        Link { part: 0, n_parts: 2, rooms: [0; MAX_PARTS], numbers: [MOST_SMALL; 2] }
    }
}

/// A sum over the parts of a plan.
#[derive(Clone, Copy, Debug)]
pub struct ReduceNode {
    pub module: ModuleId,
    pub x: View,
    pub link: Link,
    /// The row that it is added to, and the norm of that.
    pub norm: Option<AddedNorm>,
    /// Nothing else reads the sum.
    pub is_added: bool,
}

/// A row with a residual, as [`Node::RmsNorm`](super::Node::RmsNorm) has it.
#[derive(Clone, Copy, Debug)]
pub struct AddedNorm {
    pub x: View,
    pub w: Ptr,
    pub eps: f32,
    pub out: View,
}
