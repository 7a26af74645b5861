//! Nodes of attention, of what comes before it, and how their work is cut into blocks.

use model::plan::CacheDecl;

use super::super::driver::Ptr;
use super::{AttendNode, CacheView, Chosen, ModuleId, View};
use backend::PAGE;

/// Heads of q, k or v: what is done to them, in the order of the fields.
#[derive(Clone, Copy, Debug)]
pub struct QkvPartNode {
    pub x: View,
    pub n_head: usize,
    pub d_head: usize,
    pub is_normed: bool,
    /// Of the norm; null where it has none.
    pub w: Ptr,
    pub is_rotated: bool,
    /// Where they are stored; null where they are not.
    pub cache: Ptr,
    /// The cache has blocks of 8 bits.
    pub is_blocks: bool,
}

/// Head norms, ropes and the append of a layer.
#[derive(Clone, Debug)]
pub struct QkvNode {
    pub module: ModuleId,
    /// Three at most.
    pub parts: Vec<QkvPartNode>,
    pub rope: Option<usize>,
    pub eps: f32,
    /// The cache keeps a window.
    pub windowed: bool,
}

/// Attention over a cache.
#[derive(Clone, Copy, Debug)]
pub struct AttentionNode {
    pub module: ModuleId,
    pub cache: CacheView,
    pub q: View,
    pub out: View,
    pub sinks: Ptr,
    pub n_head: usize,
    /// Query heads of a block.
    pub heads: usize,
    /// The kernel for prompts, where it takes these dimensions.
    pub tile: Option<Tile>,
    /// The same by warpgroup products, for prompts with rows enough.
    pub wide: Option<Tile>,
    /// Values are the first numbers of the keys.
    pub v_in_k: bool,
    pub scale: f32,
    /// As [`crate::window_word`] has it.
    pub window: usize,
    pub softcap: f32,
    /// Tokens of a span see each other.
    pub sees_spans: bool,
    /// Positions from its own on that a token sees of its span at most; 0 for all.
    pub reach: usize,
    /// It sees these positions alone.
    pub chosen: Option<Chosen>,
    /// For single tokens alongside prompts.
    pub singles: Option<Singles>,
    /// Makes floats of the blocks of a cache.
    pub widen: Option<ModuleId>,
    /// Only the product after it reads its output.
    pub is_multiplied: bool,
}

/// `attend_long` of single tokens whose keys and values are in the cache.
#[derive(Clone, Copy, Debug)]
pub struct Singles {
    /// With eight warps a block, and with four.
    pub modules: [ModuleId; 2],
    /// Query heads of a block.
    pub heads: usize,
    pub counters: Ptr,
    /// Maximum number of tokens.
    pub most: usize,
}

impl AttentionNode {
    /// Tiles of heads of a key-value head.
    pub fn tiles(&self) -> usize {
        (self.n_head / self.cache.n_kv).div_ceil(self.heads)
    }

    /// How single tokens alongside prompts are computed, where they have such a kernel.
    pub fn singles(&self) -> Option<AttendNode> {
        let Singles { modules, heads, counters, .. } = self.singles?;
        let (x, n_head, d_head) = (self.q, self.n_head, self.cache.d_k);
        let q =
            QkvPartNode { x, n_head, d_head, is_normed: false, w: 0, is_rotated: false, cache: 0, is_blocks: false };
        Some(AttendNode {
            modules,
            heads,
            short: [(modules[0], heads); 2],
            // Keys and values are read from the cache.
            parts: [q; 3],
            q_stride: d_head,
            rope: None,
            eps: 0.0,
            attention: *self,
            counters,
            qkv: modules[0],
            columns: None,
        })
    }

    /// Shares that the pages of a sequence are split into: as many as fill the device twice, and no more than pages.
    pub fn splits(&self, n_tokens: usize, most_pages: usize, sms: usize) -> usize {
        let blocks = n_tokens * self.cache.n_kv * self.tiles();
        (2 * sms).div_ceil(blocks.max(1)).clamp(1, MAX_SPLITS).min(most_pages.next_power_of_two())
    }
}

/// The kernel for prompts, `attention_tile`: where it is compiled, by the condition in `attention.cu`, and a block's
/// shared memory holds its pages.
pub(super) fn attention_tile(
    module: ModuleId,
    cache: &CacheDecl,
    n_head: usize,
    is_f16: bool,
    max_shared: usize,
) -> Option<Tile> {
    const ROWS: usize = 64;
    let CacheDecl { n_kv, d_k, d_v, v_in_k, .. } = *cache;
    let is_tiled = |d: usize, most| if d.is_multiple_of(32) { d <= most } else { d.is_multiple_of(8) && d <= 128 };
    let has_kernel = is_f16 && is_tiled(d_k, 576) && is_tiled(d_v, 512) && (!v_in_k || d_k.is_multiple_of(32));
    // Pages of keys and values in f16, padded, two of each, and the queries of wide heads.
    let [k_stride, v_stride] = [d_k, d_v].map(|d| d.next_multiple_of(16) + 8);
    let values = if v_in_k { 0 } else { 2 * PAGE * v_stride };
    let queries = if d_k > 128 { ROWS * k_stride } else { 0 };
    let shared = 2 * (2 * PAGE * k_stride + values + queries);
    let group = n_head / n_kv;
    let block = if d_v > 256 { 256 } else { 128 };
    let (tokens, heads) = ((ROWS / group).max(1), group.div_ceil(ROWS));
    let entry = "attention_tile";
    (has_kernel && shared <= max_shared).then_some(Tile { module, entry, tokens, heads, block, shared })
}

/// The kernel for prompts on Hopper, `attention_wide`: as [`attention_tile`], by the condition in `attention_wide.cu`.
pub(super) fn attention_wide(
    module: impl FnOnce() -> ModuleId,
    cache: &CacheDecl,
    n_head: usize,
    is_f16: bool,
    max_shared: usize,
) -> Option<Tile> {
    const ROWS: usize = 128;
    let CacheDecl { n_kv, d_k, d_v, v_in_k, .. } = *cache;
    let has_kernel = is_f16 && !v_in_k && [d_k, d_v].iter().all(|d| d.is_multiple_of(64) && *d <= 256);
    // Queries, two blocks of keys and of values, all in f16 from a multiple of 1024 on, and barriers.
    let positions = if d_k + d_v <= 256 { 128 } else { 64 };
    let shared = 1024 + 2 * ROWS * d_k + 2 * 2 * positions * (d_k + d_v) + 64;
    let group = n_head / n_kv;
    let (tokens, heads) = ((ROWS / group).max(1), group.div_ceil(ROWS));
    (has_kernel && shared <= max_shared).then(|| Tile {
        module: module(),
        entry: "attention_wide",
        tokens,
        heads,
        block: 384,
        shared,
    })
}

/// Blocks of a kernel for prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Where the kernel is.
    pub module: ModuleId,
    /// Its name.
    pub entry: &'static str,
    /// Tokens whose query heads fill its rows.
    pub tokens: usize,
    /// Tiles of the heads that share keys.
    pub heads: usize,
    /// Threads.
    pub block: usize,
    /// Bytes of shared memory.
    pub shared: usize,
}

/// Maximum number of shares of a sequence: the merge walks them one by one.
pub const MAX_SPLITS: usize = 64;

/// Pages that a block of `attend_long` has at a time, half a page a warp.
pub const ATTEND_PAGES: usize = 4;

/// Warps of a block of `attend_long`, alone on a multiprocessor and with others.
pub const WARPS: [usize; 2] = [2 * ATTEND_PAGES, 4];

/// Query heads of an attention block: as many of a group as registers and shared memory hold; `None` when not one.
pub(super) fn heads_of_block(group: usize, d_k: usize, d_v: usize) -> Option<usize> {
    let in_registers = 32 / d_v.div_ceil(128);
    let in_shared = 40 * 1024 / (4 * d_k + 256);
    (1..=group.min(8)).rev().find(|&heads| heads <= in_registers && heads <= in_shared)
}
