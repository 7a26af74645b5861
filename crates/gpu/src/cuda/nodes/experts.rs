//! Nodes of a router's choice and of the experts, on the device or in host memory.

use model::plan::{GroupScore, Router, Score};

use super::super::driver::Ptr;
use super::super::split::Slots;
use super::{Act, Mat, ModuleId, View};

/// Experts chosen per row.
#[derive(Clone, Copy, Debug)]
pub struct RouteNode {
    pub module: ModuleId,
    /// Place among the plan's routers.
    pub index: usize,
    pub logits: View,
    pub router: Router,
    pub bias: Ptr,
    pub expert_scale: Ptr,
    pub n_used: usize,
    pub ids: View,
    pub weights: View,
}

impl RouteNode {
    /// The score as kernels take it.
    pub fn score(&self) -> u32 {
        match self.router.score {
            Score::Softmax => 0,
            Score::Sigmoid => 1,
            Score::Raw => 2,
            Score::Sparse { .. } => 3,
        }
    }

    /// The margin within which experts are near each other, of the score that asks.
    pub fn margin(&self) -> f32 {
        match self.router.score {
            Score::Sparse { margin } => margin,
            Score::Softmax | Score::Sigmoid | Score::Raw => 0.0,
        }
    }

    /// Groups, open groups, and whether a group is worth the sum of its two best.
    pub fn groups(&self) -> [u32; 3] {
        self.router
            .groups
            .map_or([0; 3], |g| [g.n_group as u32, g.n_used as u32, u32::from(g.score == GroupScore::TopTwo)])
    }
}

/// The three products of the chosen experts.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsNode {
    pub x: View,
    pub ids: View,
    pub gate: Mat,
    pub up: Mat,
    pub down: Mat,
    /// Of gate, up and down; null where there are none.
    pub biases: [Ptr; 3],
    pub act: Act,
    pub n_expert: usize,
    pub n_used: usize,
    pub hidden: View,
    pub out: View,
    /// Only a weighted sum reads `out`, which need not be f32 then, nor a row a pair.
    pub is_summed: bool,
}

/// Experts in host memory: what the host computes, or what the device does once their weights were copied.
#[derive(Clone, Copy, Debug)]
pub struct HostNode {
    /// Its place among such nodes.
    pub index: usize,
    /// As the device computes it, on weights in the staging buffer.
    pub experts: ExpertsNode,
    /// Where single experts have slots on the device.
    pub hot: Option<HotNode>,
}

/// The experts of a layer that have slots on the device.
#[derive(Clone, Copy, Debug)]
pub struct HotNode {
    pub module: ModuleId,
    /// Slot of each of `n_expert` experts, `u32::MAX` for none.
    pub table: Ptr,
    pub n_expert: usize,
    /// As the device computes them: its ids are slots.
    pub experts: ExpertsNode,
}

/// The memory of experts on the device, and what finds those with slots there.
#[derive(Clone, Copy)]
pub struct SlotPlaces<'a> {
    pub memory: Ptr,
    pub slots: &'a [Slots],
    /// Tables of all layers, one behind the other.
    pub tables: Ptr,
    /// Room for the slots of all pairs.
    pub ids: Ptr,
}
