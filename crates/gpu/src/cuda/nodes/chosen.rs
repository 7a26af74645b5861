//! Nodes of sparse attention: the choice of positions, and what attention needs to see those alone.

use super::super::chosen::{Choice, splits};
use super::super::launch::Launch;
use super::{AttentionNode, CacheView, ModuleId, View};

/// The choice of the positions that attention sees.
#[derive(Clone, Copy, Debug)]
pub struct ChooseNode {
    pub module: ModuleId,
    pub cache: CacheView,
    pub q: View,
    pub weights: View,
    pub out: View,
    pub choice: Choice,
    /// Most tokens of a block of the kernel on tensor cores, where it takes these dimensions.
    pub per: Option<usize>,
}

/// The positions that attention sees.
#[derive(Clone, Copy, Debug)]
pub struct Chosen {
    pub module: ModuleId,
    pub list: View,
    pub choice: Choice,
    /// Blocks of a token's heads on tensor cores and the launch of one, where that kernel takes these dimensions.
    pub tile: Option<(usize, Launch)>,
}

impl AttentionNode {
    /// The positions that it sees, in steps where they are not all.
    pub fn chosen(&self, most_pages: usize) -> Option<Chosen> {
        self.chosen.filter(|chosen| !chosen.choice.is_all(most_pages))
    }

    /// Blocks of a token that take one share of the chosen positions.
    pub fn chosen_blocks(&self, chosen: &Chosen) -> usize {
        chosen.tile.map_or(self.cache.n_kv * self.tiles(), |(tiles, _)| tiles)
    }

    /// Shares that the chosen positions of a token are split into.
    pub fn chosen_splits(&self, chosen: &Chosen, n_tokens: usize, most_pages: usize, sms: usize) -> usize {
        splits(chosen.choice, n_tokens * self.chosen_blocks(chosen), most_pages, sms)
    }
}
