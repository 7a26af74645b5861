//! Sizes: what an expert's unit is, where its planes lie in a slab, and how many slabs fit.
//!
//! Units differ in size between layers (quantisers give some layers more bits), so slabs come in *classes* of one size,
//! and memory is shared out among the classes by the bytes of their experts.

use checkpoint::BLOCK;
use model::plan::{Op, Plan, Weight, WeightDecl};

use crate::residency::{Residencies, Residency};

/// Planes of this many bytes and more are read directly, in whole blocks; smaller ones would read more than they need.
const DIRECT_FROM: usize = 128 << 10;
/// Planes that are not read directly begin on a cache line.
const ALIGN: usize = 64;
/// Fewest slabs of a class: one under computation, the others under way.
const LEAST_SLABS: usize = 4;

/// Where a plane of a matrix lies in a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// First byte.
    pub at: usize,
    /// Bytes set aside.
    pub len: usize,
    /// Whether it is read directly: then the plane begins as far behind `at` as it begins behind a block of its file.
    pub is_direct: bool,
}

impl Room {
    /// Where a plane that lies at `offset` of its file begins in the slab.
    pub fn begin(&self, offset: usize) -> usize {
        if self.is_direct { self.at + offset % BLOCK } else { self.at }
    }
}

/// The experts of one op.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Index of the op in the plan.
    pub op: usize,
    /// Gate, up and down.
    pub weights: [Weight; 3],
    /// Number of experts.
    pub n_expert: usize,
    /// Experts that a token chooses.
    pub n_used: usize,
    /// Class of its slabs.
    pub class: usize,
    /// Planes of gate, up and down: values, scales, biases.
    pub rooms: [[Room; 3]; 3],
    /// Bytes of a unit in its files.
    pub unit_bytes: usize,
}

/// Slabs of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Class {
    /// Bytes of a slab.
    pub slab_bytes: usize,
    /// Number of slabs.
    pub n_slabs: usize,
    /// Number of experts that share them.
    pub n_experts: usize,
}

/// The slabs of a program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Ops whose experts are streamed, in the order of the plan.
    pub layers: Vec<Layer>,
    /// Classes of slabs.
    pub classes: Vec<Class>,
}

impl Layout {
    /// As many slabs for the streamed experts of a plan as `bytes` hold, and a few where that is less.
    pub fn new(plan: &Plan, residencies: &Residencies, bytes: usize) -> Layout {
        let mut layout = Layout::default();
        for (i, op) in plan.ops.iter().enumerate() {
            let Op::Experts { ids, gate, up, down, .. } = *op else { continue };
            if [gate, up, down].into_iter().all(|w| residencies.of(w) == Residency::Streamed) {
                layout.push(plan, i, [gate, up, down], plan.buf(ids).width);
            }
        }
        layout.share(bytes);
        layout
    }

    fn push(&mut self, plan: &Plan, op: usize, weights: [Weight; 3], n_used: usize) {
        let n_expert = plan.weight(weights[0]).shape.first().copied().unwrap_or(0);
        let (mut at, mut unit_bytes) = (0usize, 0usize);
        let rooms = weights.map(|w| {
            plane_lens(plan.weight(w)).map(|len| {
                unit_bytes = unit_bytes.saturating_add(len);
                let is_direct = len >= DIRECT_FROM;
                let (align, around) = if is_direct { (BLOCK, BLOCK) } else { (ALIGN, 0) };
                let room = Room {
                    at: at.next_multiple_of(align),
                    len: if len > 0 { len.next_multiple_of(align) + around } else { 0 },
                    is_direct,
                };
                at = room.at + room.len;
                room
            })
        });
        let slab_bytes = at.next_multiple_of(BLOCK);
        let class = self.classes.iter().position(|class| class.slab_bytes == slab_bytes).unwrap_or_else(|| {
            self.classes.push(Class { slab_bytes, n_slabs: 0, n_experts: 0 });
            self.classes.len() - 1
        });
        self.classes[class].n_experts += n_expert;
        self.layers.push(Layer { op, weights, n_expert, n_used, class, rooms, unit_bytes });
    }

    /// Shares `bytes` out among the classes.
    fn share(&mut self, bytes: usize) {
        let all: usize = self.classes.iter().fold(0, |sum: usize, class| sum.saturating_add(class.full_bytes()));
        let share = bytes as f64 / all.max(1) as f64;
        for class in &mut self.classes {
            let n = (class.n_experts as f64 * share) as usize;
            class.n_slabs = n.clamp(LEAST_SLABS.min(class.n_experts), class.n_experts);
        }
    }

    /// The same experts with as many slabs as `bytes` hold.
    pub fn resized(&self, bytes: usize) -> Layout {
        let mut layout = self.clone();
        layout.share(bytes);
        layout
    }

    /// Bytes of all slabs.
    pub fn slab_bytes(&self) -> usize {
        self.classes.iter().fold(0, |sum: usize, c| sum.saturating_add(c.slab_bytes.saturating_mul(c.n_slabs)))
    }

    /// Bytes of slabs that hold every expert.
    pub fn full_bytes(&self) -> usize {
        self.classes.iter().fold(0, |sum: usize, class| sum.saturating_add(class.full_bytes()))
    }

    /// Number of slabs.
    pub fn n_slabs(&self) -> usize {
        self.classes.iter().map(|class| class.n_slabs).sum()
    }

    /// Number of experts.
    pub fn n_experts(&self) -> usize {
        self.classes.iter().map(|class| class.n_experts).sum()
    }
}

impl Class {
    fn full_bytes(&self) -> usize {
        self.slab_bytes.saturating_mul(self.n_experts)
    }
}

/// Bytes of the planes of one matrix of a stack.
fn plane_lens(decl: &WeightDecl) -> [usize; 3] {
    let [_, n, k] = *decl.shape else { return [0; 3] };
    match decl.dtype.plane_bytes(k).and_then(|row| row.times(n)) {
        Some(len) => [len.q, len.scales, len.biases],
        None => [0; 3],
    }
}
