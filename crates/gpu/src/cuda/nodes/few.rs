//! Nodes of the shorter list, for steps of few tokens (`cuda/few`): each does what several ops do.

use model::plan::DeltaHeads;

use super::super::args::{self, Prologue};
use super::super::driver::Ptr;
use super::attention::{ATTEND_PAGES, AttentionNode, MAX_SPLITS, QkvPartNode, WARPS};
use super::experts::{ExpertsNode, RouteNode};
use super::{Act, CacheView, Mat, ModuleId, Part, StateView, View};
use backend::PAGE;

/// Products of few rows, of one or two types, behind a norm or a gate.
#[derive(Clone, Debug)]
pub struct FewLinearNode {
    pub x: View,
    pub module: ModuleId,
    /// Of the first type, and of the second if there is one.
    pub parts: [Vec<Part>; 2],
    pub prologue: Prologue,
    /// Outputs are added to what is there.
    pub add: bool,
    /// The kernels that bring weights through shared memory.
    pub few: Option<ModuleId>,
    /// For one row: the router behind it, whose logits it adds up.
    pub routed: Option<Routed>,
    /// Packed columns of x, which the node before puts out for some numbers of rows.
    pub columns: Option<PackedNode>,
}

/// Packed columns of a row, by the node that makes it.
#[derive(Clone, Copy, Debug)]
pub struct PackedNode {
    pub of: Ptr,
    /// Fewest rows that it is made for.
    pub from: usize,
    /// Of a row behind a norm: its weights, and where squares of the row's parts are.
    pub norm: Option<(Ptr, Ptr)>,
}

/// A product with the router behind it.
#[derive(Clone, Copy, Debug)]
pub struct Routed {
    pub module: ModuleId,
    /// The router's matrix of f32, and the weights of the norm before it.
    pub router: Ptr,
    pub norm: Ptr,
    pub sums: args::LogitSums,
    pub n_expert: usize,
}

/// Head norms, ropes, append and attention of single tokens.
#[derive(Clone, Copy, Debug)]
pub struct AttendNode {
    /// The kernel for long contexts, with eight warps a block, and with four.
    pub modules: [ModuleId; 2],
    /// Query heads of a block.
    pub heads: usize,
    /// The kernels for short contexts, and their heads of a block, which are fewer, so that blocks fill the device: one
    /// for a token, two for several. Of caches with blocks they are those for long contexts.
    pub short: [(ModuleId, usize); 2],
    /// Of q, k and v.
    pub parts: [QkvPartNode; 3],
    /// Numbers from head to head of q.
    pub q_stride: usize,
    pub rope: Option<usize>,
    pub eps: f32,
    pub attention: AttentionNode,
    pub counters: Ptr,
    /// `qkv.cu`, for steps whose tokens may see each other.
    pub qkv: ModuleId,
    /// For the product behind it.
    pub columns: Option<PackedNode>,
}

impl AttendNode {
    /// As it runs for contexts of `most_pages`, and whether these are short: while blocks of two pages fit at once.
    pub fn sized(mut self, n_tokens: usize, most_pages: usize, sms: usize) -> (AttendNode, bool) {
        let n_kv = self.attention.cache.n_kv;
        let tiles = |heads| (self.attention.n_head / n_kv).div_ceil(heads);
        let fits = |&(_, heads): &(ModuleId, usize)| n_tokens * n_kv * tiles(heads) * most_pages.div_ceil(2) <= sms;
        let short = self.short.into_iter().skip(usize::from(n_tokens > 1)).find(fits);
        if let Some((module, heads)) = short {
            (self.modules, self.heads) = ([module; 2], heads);
        }
        (self, short.is_some())
    }

    /// Tiles of heads of a key-value head.
    pub fn tiles(&self) -> usize {
        (self.attention.n_head / self.attention.cache.n_kv).div_ceil(self.heads)
    }

    /// Blocks of tokens whose pages are not split.
    fn blocks(&self, n_tokens: usize) -> usize {
        n_tokens * self.attention.cache.n_kv * self.tiles()
    }

    /// Shares that the pages of a sequence are split into: enough to fill the device once, of four pages at least.
    pub fn splits(&self, n_tokens: usize, most_pages: usize, sms: usize) -> usize {
        (sms / self.blocks(n_tokens).max(1)).clamp(1, MAX_SPLITS).min(most_pages.div_ceil(ATTEND_PAGES).max(1))
    }

    /// Warps of a block that has pages, the half pages of each in shared memory, and bytes of all of these, for shares
    /// of `most_pages`; and which of [`WARPS`] a block has. Where a multiprocessor has several blocks, one copies while
    /// the other computes: warps have one half page each, and where it has more than two, or two would not fit, blocks
    /// are small, so that more of them hide what each waits for.
    pub fn staged(
        &self,
        n_tokens: usize,
        most_pages: usize,
        n_splits: usize,
        [sms, max_shared]: [usize; 2],
    ) -> ([usize; 3], usize) {
        const HALF: usize = PAGE / 2;
        // What the kernel has besides is less than 18 KiB.
        const REST: usize = 18 << 10;
        let halves = 2 * most_pages.div_ceil(n_splits.max(1));
        // Rows of f16, padded; or of bytes, with their scales.
        let (cache, d) = (self.attention.cache, self.attention.cache.d_k);
        let bytes = |is_blocks, padding| if is_blocks { HALF * (d + padding) + d } else { 2 * HALF * (d + 8) };
        let each = bytes(cache.has_key_blocks(), 32) + bytes(cache.has_value_blocks(), 16);
        let blocks = self.blocks(n_tokens);
        let workers = |warps: usize| halves.clamp(1, warps);
        let is_alone = blocks <= sms;
        let is_crowded = blocks > 2 * sms || !is_alone && 2 * (workers(WARPS[0]) * each + REST) > max_shared;
        let size = usize::from(is_crowded);
        let workers = workers(WARPS[size]);
        let stages = if is_alone && halves > workers && 2 * workers * each + REST <= max_shared { 2 } else { 1 };
        ([workers, stages, stages * workers * each], size)
    }

    /// Numbers of the partial sums of a step.
    pub fn partial(&self, n_tokens: usize, n_splits: usize) -> usize {
        self.blocks(n_tokens) * n_splits * self.heads * (self.attention.cache.d_k + 4)
    }
}

/// A router's product and its choice.
#[derive(Clone, Debug)]
pub struct RouterNode {
    pub module: ModuleId,
    pub x: View,
    pub prologue: Prologue,
    /// The logits, and what else is multiplied with x.
    pub parts: Vec<Part>,
    pub route: RouteNode,
    /// Its kernel for 9 to 64 rows, where the weights are of f32.
    pub logits: Option<ModuleId>,
    pub counter: Ptr,
    /// Of the logits.
    pub scale: f32,
    /// Most rows whose experts' blocks choose.
    pub late_rows: usize,
    /// The experts that read packed columns of x, and what is done to it first.
    pub packs: Option<(ExpertsNode, Prologue)>,
    /// What is added to x first: its `out` is the x of this node.
    pub added: Option<PostNormNode>,
    /// The product before it adds up the logits of one row, so that this node has no launch.
    pub is_routed: bool,
}

/// `out = (x + y) · scale`, where y is the sum of one or two normed rows, normed again where there is a norm.
#[derive(Clone, Copy, Debug)]
pub struct PostNormNode {
    pub x: View,
    pub out: Ptr,
    /// A row with the weights of its norm and what is added to its mean square.
    pub a: (View, Ptr, f32),
    pub b: Option<(View, Ptr, f32)>,
    pub norm: Option<(Ptr, f32)>,
    /// Null: none.
    pub scale: Ptr,
}

/// What comes before attention over latents, for single tokens; with the product that makes the queries, or behind it.
#[derive(Clone, Copy, Debug)]
pub struct LatentQNode {
    pub module: ModuleId,
    /// The row, the product's matrix and what is done to the row.
    pub product: Option<(View, Part, Prologue)>,
    /// Queries of all heads as the product puts them out.
    pub heads: View,
    /// A head's matrix, `[d_latent, d_nope]`.
    pub w: Mat,
    pub transposed: bool,
    pub n_head: usize,
    /// Of the latent, of a head's query without rotation and with it.
    pub widths: [usize; 3],
    /// What attention reads.
    pub out: Ptr,
    pub kv: View,
    pub norm_w: Ptr,
    pub eps: f32,
    pub cache: CacheView,
    pub rope: usize,
    pub counters: Ptr,
}

/// Attention over latents, with the merge of its splits and the heads' matrices behind it.
#[derive(Clone, Copy, Debug)]
pub struct LatentOutNode {
    pub module: ModuleId,
    pub attention: AttentionNode,
    pub w: Mat,
    pub out: View,
}

/// What comes before a delta rule.
#[derive(Clone, Copy, Debug)]
pub struct DeltaInNode {
    pub module: ModuleId,
    pub x: View,
    pub w: Ptr,
    /// Of the convolution.
    pub width: usize,
    pub state: StateView,
    pub heads: DeltaHeads,
    /// Of q, k, v, g and beta.
    pub out: [Ptr; 5],
    pub a: Ptr,
    pub b: Ptr,
    pub a_log: Ptr,
    pub dt_bias: Ptr,
    pub scales: [f32; 2],
    pub eps: f32,
    /// For steps of many tokens.
    pub has_rows: bool,
}

/// Gate, up and activation of the chosen experts, and of a shared one of the same shape.
#[derive(Clone, Copy, Debug)]
pub struct UpNode {
    pub experts: ExpertsNode,
    pub shared: Option<(Mat, Mat, View)>,
    /// A dense pair of matrices beside the experts, where there is no shared one.
    pub dense: Option<DenseUp>,
    pub prologue: Prologue,
    pub late: Option<Late>,
    /// The kernels of both products for several rows that bring weights through shared memory.
    pub pairs: Option<PairsNode>,
}

/// Gate, up and activation of a dense feed-forward over the row that the experts read, behind a norm of its own.
#[derive(Clone, Copy, Debug)]
pub struct DenseUp {
    pub gate: Mat,
    pub up: Mat,
    pub act: Act,
    pub out: View,
    pub prologue: Prologue,
    /// A shared expert of another shape, which is behind the experts' own norm.
    pub is_shared: bool,
}

impl DenseUp {
    /// The arguments of the experts with it as their shared one.
    pub fn beside(&self, args: args::Experts) -> args::Experts {
        args::Experts {
            n_shared: 1,
            shared_n: self.gate.n as u32,
            shared_w: self.gate.data,
            shared_up: self.up.data,
            shared_out: self.out.ptr,
            ..args
        }
    }
}

/// Kernels of gate and up, and of down, for the pairs of several rows.
#[derive(Clone, Copy, Debug)]
pub struct PairsNode {
    pub modules: [ModuleId; 2],
    /// A router of up to eight rows packs them.
    pub is_packed: bool,
}

/// Kernels for few rows that choose experts by the logits of a router themselves, so that the router need not.
#[derive(Clone, Copy, Debug)]
pub struct Late {
    pub module: ModuleId,
    pub route: RouteNode,
    /// Most rows.
    pub rows: usize,
    /// Where the product before the router has added up the logits of one row.
    pub sums: Option<Sums>,
}

/// Sums of logits, without the factor of the norm before the router.
#[derive(Clone, Copy, Debug)]
pub struct Sums {
    pub of: args::LogitSums,
    pub n_squares: usize,
    /// Numbers of the normed row.
    pub k: usize,
    /// Of the norm.
    pub eps: f32,
}

/// The experts' last product and their sum.
#[derive(Clone, Debug)]
pub struct DownNode {
    pub module: ModuleId,
    pub experts: ExpertsNode,
    pub x: View,
    pub add: bool,
    pub weights: View,
    /// The shared expert's matrix and its activations.
    pub shared: Option<(Mat, View)>,
    /// The gate of the shared expert; null where it counts in full.
    pub share: Ptr,
    /// The last product of the dense feed-forward beside the experts, to a row of its own or added to the sum.
    pub dense: Option<FewLinearNode>,
    /// The kernel for the experts' type and that of a dense product that is added.
    pub other: Option<ModuleId>,
    pub late: Option<Late>,
    /// As of [`UpNode`].
    pub pairs: Option<PairsNode>,
    /// For the products behind the next norm.
    pub columns: Option<PackedNode>,
}
