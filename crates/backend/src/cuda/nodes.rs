//! A plan's ops with everything resolved that does not change from step to step: addresses, modules, dimensions.

use std::collections::HashMap;

use checkpoint::Checkpoint;
use model::plan::{
    Buf, CacheDecl, DeltaHeads, ExpertBiases, Gate, GroupScore, Norm, Op, Plan, RopePairing, Router, Rows, Score,
    Sharing, State, Weight, memory::Placement,
};
use quant::WeightType;

use super::args::{self, Matrix, Prologue};
use super::driver::Ptr;
use super::sources::{self, Key};
use super::split::{Slots, Split, plane_lens, plane_starts};
use super::upload::Weights;
use crate::{CompileError, PAGE};

/// A buffer: where it begins, its rows and its width.
#[derive(Clone, Copy, Debug)]
pub struct View {
    pub ptr: Ptr,
    pub rows: Rows,
    pub width: usize,
}

/// Index of a module.
pub type ModuleId = usize;

/// A matrix, or a stack of matrices, and the module for its type.
#[derive(Clone, Copy, Debug)]
pub struct Mat {
    pub data: Matrix,
    pub dtype: WeightType,
    pub module: ModuleId,
    /// Its kernels for many rows, where the device and the op have them.
    pub wide: Option<ModuleId>,
    /// Its kernels for 9 to 64 rows, where the type and the op have them.
    pub batch: Option<ModuleId>,
    pub n: usize,
    pub k: usize,
}

/// One matrix of a linear.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    pub w: Mat,
    pub bias: Ptr,
    pub out: View,
}

/// A gated activation as kernels take it.
#[derive(Clone, Copy, Debug)]
pub struct Act {
    pub kind: u32,
    pub alpha: f32,
    pub limit: f32,
}

impl From<Gate> for Act {
    fn from(gate: Gate) -> Act {
        match gate {
            Gate::Silu => Act { kind: 0, alpha: 0.0, limit: 0.0 },
            Gate::GeluTanh => Act { kind: 1, alpha: 0.0, limit: 0.0 },
            Gate::ClampedSwiglu { alpha, limit } => Act { kind: 2, alpha, limit },
        }
    }
}

/// A cache in device memory.
#[derive(Clone, Copy, Debug)]
pub struct CacheView {
    pub k: Ptr,
    pub v: Ptr,
    pub n_kv: usize,
    pub d_k: usize,
    pub d_v: usize,
    pub windowed: bool,
}

/// A recurrent state in all slots.
#[derive(Clone, Copy, Debug)]
pub struct StateView {
    pub ptr: Ptr,
    /// Numbers of a slot.
    pub len: usize,
}

/// How a node runs; one or a few launches each.
#[derive(Clone, Debug)]
pub enum Node {
    Embed {
        table: Mat,
        scale: f32,
        out: View,
    },
    /// Parts of one weight type, four at most.
    Linear {
        x: View,
        parts: Vec<Part>,
    },
    GatedLinear {
        x: View,
        gate: Mat,
        up: Mat,
        act: Act,
        out: View,
        /// For few rows only.
        prologue: Prologue,
    },
    /// Gate and up of different types: two products and the activation.
    GatedLinearApart {
        x: View,
        gate: Mat,
        up: Mat,
        act: Act,
        out: View,
    },
    RmsNorm {
        x: View,
        residual: Ptr,
        w: Ptr,
        eps: f32,
        out: View,
    },
    HeadNorm {
        x: View,
        w: Ptr,
        eps: f32,
        d_head: usize,
        gate: Ptr,
    },
    Rope {
        x: View,
        rope: usize,
        n_head: usize,
        d_head: usize,
    },
    Heads {
        whole: View,
        part: View,
        first: usize,
        width: usize,
        d_head: usize,
        is_split: bool,
    },
    HeadLinear {
        x: View,
        w: Mat,
        transposed: bool,
        out: View,
        n_head: usize,
    },
    GatedAct {
        gate: View,
        up: View,
        act: Act,
        out: View,
    },
    Add {
        x: View,
        y: View,
    },
    Scale {
        x: View,
        scale: f32,
    },
    ScaleBy {
        x: View,
        w: Ptr,
    },
    Softcap {
        x: View,
        cap: f32,
    },
    SigmoidGate {
        x: View,
        gate: View,
    },
    DecayBeta {
        a: View,
        b: View,
        a_log: Ptr,
        dt_bias: Ptr,
        g: View,
        beta: View,
    },
    KvAppend {
        module: ModuleId,
        cache: CacheView,
        k: View,
        v: Ptr,
    },
    Qkv(QkvNode),
    Attention(AttentionNode),
    CausalConv {
        module: ModuleId,
        x: View,
        w: Ptr,
        width: usize,
        state: StateView,
        out: View,
    },
    DeltaNet {
        module: ModuleId,
        inputs: [View; 5],
        heads: DeltaHeads,
        state: StateView,
        out: View,
    },
    Route(RouteNode),
    Experts(ExpertsNode),
    /// Experts in host memory.
    HostExperts(HostNode),
    FewLinear(FewLinearNode),
    Attend(AttendNode),
    Router(RouterNode),
    ExpertsUp(UpNode),
    ExpertsDown(DownNode),
    PostNorm(PostNormNode),
    DeltaIn(DeltaInNode),
    LatentQ(LatentQNode),
    LatentOut(LatentOutNode),
    Combine {
        x: View,
        add: bool,
        y: View,
        weights: View,
        norm_w: Ptr,
        eps: f32,
        norm_out: Ptr,
    },
    Select {
        x: View,
        out: View,
    },
}

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
    /// For one row: leaves the logits of the router behind it, in parts.
    pub routed: Option<Routed>,
}

/// A product with the router behind it.
#[derive(Clone, Copy, Debug)]
pub struct Routed {
    pub module: ModuleId,
    /// The router's matrix of f32, and the weights of the norm before it.
    pub router: Ptr,
    pub norm: Ptr,
    /// Parts of the logits.
    pub parts: Ptr,
    pub n_expert: usize,
}

/// Head norms, ropes, append and attention of single tokens.
#[derive(Clone, Copy, Debug)]
pub struct AttendNode {
    /// The kernel for long contexts.
    pub module: ModuleId,
    /// Query heads of a block.
    pub heads: usize,
    /// The kernel for short contexts, and its heads of a block, which are fewer, so that blocks fill the device. None
    /// where a node was sized for them.
    pub short: Option<(ModuleId, usize)>,
    /// Of q, k and v.
    pub parts: [QkvPartNode; 3],
    /// Numbers from head to head of q.
    pub q_stride: usize,
    pub rope: Option<usize>,
    pub eps: f32,
    pub attention: AttentionNode,
    pub counters: Ptr,
}

impl AttendNode {
    /// As it runs for contexts of `most_pages`, and whether these are short: while blocks of two pages fit at once.
    pub fn sized(mut self, n_tokens: usize, most_pages: usize, sms: usize) -> (AttendNode, bool) {
        let Some((module, heads)) = self.short else { return (self, false) };
        let tiles = (self.attention.n_head / self.attention.cache.n_kv).div_ceil(heads);
        let is_short = n_tokens * self.attention.cache.n_kv * tiles * most_pages.div_ceil(2) <= sms;
        if is_short {
            (self.module, self.heads) = (module, heads);
        } else {
            self.short = None;
        }
        (self, is_short)
    }

    /// Tiles of heads of a key-value head.
    pub fn tiles(&self) -> usize {
        (self.attention.n_head / self.attention.cache.n_kv).div_ceil(self.heads)
    }

    /// Shares that the pages of a sequence are split into: enough to fill the device once, of four pages at least.
    pub fn splits(&self, n_tokens: usize, most_pages: usize, sms: usize) -> usize {
        let blocks = n_tokens * self.attention.cache.n_kv * self.tiles();
        (sms / blocks.max(1)).clamp(1, MAX_SPLITS).min(most_pages.div_ceil(ATTEND_PAGES).max(1))
    }

    /// Warps of a block that have pages, half pages of each in shared memory, and bytes of all of these, for shares of
    /// `most_pages`.
    pub fn staged(&self, most_pages: usize, n_splits: usize, max_shared: usize) -> [usize; 3] {
        const HALF: usize = PAGE / 2;
        let halves = 2 * most_pages.div_ceil(n_splits.max(1));
        let workers = halves.clamp(1, 2 * ATTEND_PAGES);
        // Keys and values in f16, padded.
        let bytes = 2 * 2 * HALF * (self.attention.cache.d_k + 8) * workers;
        // What the kernel has besides is less than 16 KiB.
        let stages = if halves > workers && 2 * bytes + (16 << 10) <= max_shared { 2 } else { 1 };
        [workers, stages, stages * bytes]
    }

    /// Numbers of the partial sums of a step.
    pub fn partial(&self, n_tokens: usize, n_splits: usize) -> usize {
        n_tokens * self.attention.cache.n_kv * self.tiles() * n_splits * self.heads * (self.attention.cache.d_k + 4)
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
    /// Those who read the logits of one row choose.
    pub is_late: bool,
    /// What is added to x first: its `out` is the x of this node.
    pub added: Option<PostNormNode>,
    /// The product before it leaves the logits of one row, in parts.
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

/// What comes before a delta rule, for single tokens.
#[derive(Clone, Copy, Debug)]
pub struct DeltaInNode {
    pub module: ModuleId,
    pub x: View,
    pub w: Ptr,
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
    pub pairs: Option<[ModuleId; 2]>,
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

/// Kernels for one row that choose experts by the logits of a router themselves, so that the router need not.
#[derive(Clone, Copy, Debug)]
pub struct Late {
    pub module: ModuleId,
    pub route: RouteNode,
    /// Of logits in parts.
    pub parts: Option<LogitParts>,
}

/// Logits that come in parts, without the factor of the norm before the router.
#[derive(Clone, Copy, Debug)]
pub struct LogitParts {
    pub n: usize,
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
    pub pairs: Option<[ModuleId; 2]>,
}

impl Node {
    /// The router that it runs.
    pub fn route(&self) -> Option<&RouteNode> {
        match self {
            Node::Route(route) | Node::Router(RouterNode { route, .. }) => Some(route),
            _ => None,
        }
    }

    /// Its name with the weights that it multiplies with, and the bytes of those that a token reads.
    pub fn describe(&self) -> (String, usize) {
        let bytes = |w: &Mat| w.dtype.plane_bytes(w.k).map_or(0, |row| row.total()) * w.n;
        let shape = |w: &Mat| format!("{} {}x{}", w.dtype, w.n, w.k);
        match self {
            Node::Embed { table, .. } => (format!("embed {}", table.dtype), 0),
            Node::Linear { parts, .. } => {
                let n: Vec<String> = parts.iter().map(|part| part.w.n.to_string()).collect();
                let w = parts[0].w;
                let name = format!("linear {} {}x{}", w.dtype, n.join("+"), w.k);
                (name, parts.iter().map(|part| bytes(&part.w)).sum())
            }
            Node::GatedLinear { gate, up, .. } | Node::GatedLinearApart { gate, up, .. } => {
                (format!("gated_linear {}", shape(gate)), bytes(gate) + bytes(up))
            }
            Node::HeadLinear { w, n_head, .. } => (format!("head_linear {n_head} {}", shape(w)), n_head * bytes(w)),
            Node::Experts(node) => {
                let all = bytes(&node.gate) + bytes(&node.up) + bytes(&node.down);
                (format!("experts {}, down {}", shape(&node.gate), node.down.dtype), node.n_used * all)
            }
            Node::HostExperts(HostNode { experts, .. }) => {
                (format!("experts on the host {}, down {}", shape(&experts.gate), experts.down.dtype), 0)
            }
            Node::FewLinear(FewLinearNode { parts: [first, second], add, .. }) => {
                let name = |parts: &[Part]| {
                    let n: Vec<String> = parts.iter().map(|part| part.w.n.to_string()).collect();
                    parts.first().map(|part| format!(" {} {}x{}", part.w.dtype, n.join("+"), part.w.k))
                };
                let all = [first, second].into_iter().filter_map(|parts| name(parts)).collect::<Vec<_>>().join(",");
                let what = if *add { "few linear, add" } else { "few linear" };
                (format!("{what}{all}"), first.iter().chain(second).map(|part| bytes(&part.w)).sum())
            }
            Node::Attend(_) => ("attend".into(), 0),
            Node::PostNorm(_) => ("post_norm".into(), 0),
            Node::DeltaIn(_) => ("delta_in".into(), 0),
            Node::LatentQ(LatentQNode { product, w, n_head, .. }) => {
                let own = n_head * bytes(w);
                match product {
                    Some((_, part, _)) => {
                        let name = format!("latent q {}, heads {n_head} {}", shape(&part.w), shape(w));
                        (name, own + bytes(&part.w))
                    }
                    None => (format!("latent q, heads {n_head} {}", shape(w)), own),
                }
            }
            Node::LatentOut(LatentOutNode { attention, w, .. }) => {
                let n_head = attention.n_head;
                (format!("latent attention, heads {n_head} {}", shape(w)), n_head * bytes(w))
            }
            Node::Router(RouterNode { parts, .. }) => {
                (format!("router {}", shape(&parts[0].w)), parts.iter().map(|part| bytes(&part.w)).sum())
            }
            Node::ExpertsUp(UpNode { experts, shared, dense, .. }) => {
                let all = bytes(&experts.gate) + bytes(&experts.up);
                let n = experts.n_used + usize::from(shared.is_some());
                let name = format!("experts up {}", shape(&experts.gate));
                match dense {
                    Some(dense) => {
                        let own = bytes(&dense.gate) + bytes(&dense.up);
                        (format!("{name}, dense up {}", shape(&dense.gate)), n * all + own)
                    }
                    None => (name, n * all),
                }
            }
            Node::ExpertsDown(DownNode { experts, shared, dense, .. }) => {
                let n = experts.n_used + usize::from(shared.is_some());
                let name = format!("experts down {}", shape(&experts.down));
                match dense.as_ref().map(|dense| dense.parts[0][0].w) {
                    Some(w) => (format!("{name}, dense down {}", shape(&w)), n * bytes(&experts.down) + bytes(&w)),
                    None => (name, n * bytes(&experts.down)),
                }
            }
            Node::RmsNorm { .. } => ("rms_norm".into(), 0),
            Node::HeadNorm { gate: 0, .. } => ("head_norm".into(), 0),
            Node::HeadNorm { .. } => ("gated_norm".into(), 0),
            Node::Rope { .. } => ("rope".into(), 0),
            Node::Heads { .. } => ("heads".into(), 0),
            Node::GatedAct { .. } => ("gated_act".into(), 0),
            Node::Add { .. } => ("add".into(), 0),
            Node::Scale { .. } => ("scale".into(), 0),
            Node::ScaleBy { .. } => ("scale_by".into(), 0),
            Node::Softcap { .. } => ("softcap".into(), 0),
            Node::SigmoidGate { .. } => ("sigmoid_gate".into(), 0),
            Node::DecayBeta { .. } => ("decay_beta".into(), 0),
            Node::KvAppend { .. } => ("kv_append".into(), 0),
            Node::Qkv(_) => ("qkv".into(), 0),
            Node::Attention(_) => ("attention".into(), 0),
            Node::CausalConv { .. } => ("causal_conv".into(), 0),
            Node::DeltaNet { .. } => ("delta_net".into(), 0),
            Node::Route(_) => ("route".into(), 0),
            Node::Combine { .. } => ("combine".into(), 0),
            Node::Select { .. } => ("select".into(), 0),
        }
    }
}

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
    /// Values are the first numbers of the keys.
    pub v_in_k: bool,
    pub scale: f32,
    pub window: usize,
    pub softcap: f32,
}

impl AttentionNode {
    /// Tiles of heads of a key-value head.
    pub fn tiles(&self) -> usize {
        (self.n_head / self.cache.n_kv).div_ceil(self.heads)
    }

    /// Shares that the pages of a sequence are split into: as many as fill the device twice, and no more than pages.
    pub fn splits(&self, n_tokens: usize, most_pages: usize, sms: usize) -> usize {
        let blocks = n_tokens * self.cache.n_kv * self.tiles();
        (2 * sms).div_ceil(blocks.max(1)).clamp(1, MAX_SPLITS).min(most_pages.next_power_of_two())
    }
}

/// The kernel for prompts, `attention_tile`: where it is compiled, by the condition in `attention.cu`, and a block's
/// shared memory holds its pages.
fn attention_tile(cache: &CacheDecl, n_head: usize, is_f16: bool, max_shared: usize) -> Option<Tile> {
    const ROWS: usize = 64;
    let CacheDecl { n_kv, d_k, d_v, v_in_k, .. } = *cache;
    let has_kernel = is_f16 && d_k.is_multiple_of(32) && d_v.is_multiple_of(32) && d_k <= 576 && d_v <= 512;
    // Pages of keys and values in f16, padded, two of each, and the queries of wide heads.
    let values = if v_in_k { 0 } else { 2 * PAGE * (d_v + 8) };
    let queries = if d_k > 128 { ROWS * (d_k + 8) } else { 0 };
    let shared = 2 * (2 * PAGE * (d_k + 8) + values + queries);
    let group = n_head / n_kv;
    let block = if d_v > 256 { 256 } else { 128 };
    let (tokens, heads) = ((ROWS / group).max(1), group.div_ceil(ROWS));
    (has_kernel && shared <= max_shared).then_some(Tile { tokens, heads, block, shared })
}

/// Blocks of `attention_tile`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
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

/// Modules that a plan needs, each once.
#[derive(Default)]
pub struct Modules {
    keys: Vec<Key>,
    index: HashMap<Key, ModuleId>,
}

impl Modules {
    /// Every program needs these.
    pub const NORM: ModuleId = 0;
    pub const ROPE: ModuleId = 1;
    pub const ELEMENTWISE: ModuleId = 2;
    pub const COMBINE: ModuleId = 3;
    pub const EXPERT_LISTS: ModuleId = 4;
    pub const PICK: ModuleId = 5;
    pub const PACK: ModuleId = 6;

    /// With the modules that every program needs.
    pub fn new() -> Modules {
        let mut modules = Modules::default();
        for source in [
            sources::NORM,
            sources::ROPE,
            sources::ELEMENTWISE,
            sources::COMBINE,
            sources::EXPERT_LISTS,
            sources::PICK,
            sources::PACK,
        ] {
            modules.id(Key::plain(source));
        }
        modules
    }

    /// The module of a key.
    pub fn id(&mut self, key: Key) -> ModuleId {
        let next = self.keys.len();
        *self.index.entry(key).or_insert_with_key(|key| {
            self.keys.push(key.clone());
            next
        })
    }

    /// All of them, by their index.
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }
}

/// What resolves a plan.
pub struct Lower<'a, 'w> {
    pub plan: &'a Plan,
    pub checkpoint: &'w Checkpoint,
    pub weights: &'a mut Weights<'w>,
    pub modules: &'a mut Modules,
    pub placement: &'a Placement,
    pub arena: Ptr,
    pub caches: &'a [CacheView],
    pub states: &'a [StateView],
    pub is_f16: bool,
    /// Bytes of shared memory that a block may have.
    pub max_shared: usize,
    /// The device has the kernels for many rows, and steps may have so many.
    pub is_wide: bool,
    /// Steps may have rows enough for the kernels of `batch.rs`.
    pub is_batch: bool,
    pub n_routers: usize,
    /// Which experts lie in host memory.
    pub split: &'a Split,
    /// Where their weights come in device memory.
    pub stage: Ptr,
    pub n_hosts: usize,
    /// Where single experts may have slots.
    pub places: Option<SlotPlaces<'a>>,
}

impl Lower<'_, '_> {
    /// A buffer.
    pub fn view(&self, buf: Buf) -> View {
        let decl = self.plan.buf(buf);
        let ptr = self.arena + self.placement.offset[buf.0 as usize] as Ptr;
        View { ptr, rows: decl.rows, width: decl.width }
    }

    fn mat(&mut self, source: sources::Source, w: Weight) -> Result<Mat, CompileError> {
        let data = self.weights.matrix(self.plan, self.checkpoint, w)?;
        self.mat_of(source, w, data)
    }

    /// A matrix whose planes lie there.
    fn mat_of(&mut self, source: sources::Source, w: Weight, data: Matrix) -> Result<Mat, CompileError> {
        let decl = self.plan.weight(w);
        let error = |why: String| CompileError::Tensor { name: decl.name.clone(), why };
        let (n, k) = match *decl.shape {
            [n, k] | [_, n, k] => (n, k),
            _ => return Err(error(format!("shape {:?} is no matrix and no stack of matrices", decl.shape))),
        };
        if n > u32::MAX as usize || k > u32::MAX as usize {
            return Err(error(format!("shape {:?} has an axis past 2^32", decl.shape)));
        }
        let dtype = decl.dtype;
        let module = self.modules.id(Key::typed(source, dtype));
        let wide = sources::wide(source).filter(|_| self.is_wide);
        let wide = wide.map(|source| self.modules.id(Key::typed(source, dtype)));
        let batch = sources::batch(source, dtype).filter(|_| self.is_batch);
        let batch = batch.map(|source| self.modules.id(Key::typed(source, dtype)));
        Ok(Mat { data, dtype, module, wide, batch, n, k })
    }

    /// Stacks of experts one behind the other from `at` on, filled at the start or by whoever stages them.
    fn placed(&mut self, stacks: [Weight; 3], mut at: Ptr, is_filled: bool) -> Result<[Mat; 3], CompileError> {
        let mut mats = Vec::with_capacity(3);
        for w in stacks {
            let decl = self.plan.weight(w);
            let error = || CompileError::Tensor { name: decl.name.clone(), why: "rows are not whole blocks".into() };
            let lens = plane_lens(decl).ok_or_else(error)?;
            let (starts, bytes) = plane_starts(lens);
            let data = match is_filled {
                true => self.weights.matrix_at(self.plan, self.checkpoint, w, Some(at))?,
                false => planes_at(at, starts, lens),
            };
            mats.push(self.mat_of(sources::EXPERTS, w, data)?);
            at += bytes as Ptr;
        }
        Ok([mats[0], mats[1], mats[2]])
    }

    /// The experts of an op, resolved to `node`, with slots on the device for some and the host for the others; none
    /// where all of a layer's experts have to be in one place.
    pub fn slotted(&mut self, op: &Op, node: &Node) -> Result<Option<Node>, CompileError> {
        let (&Op::Experts { gate, up, down, .. }, Some(places)) = (op, self.places) else { return Ok(None) };
        let (Node::Experts(experts) | Node::HostExperts(HostNode { experts, .. })) = node else { return Ok(None) };
        let Some(index) = self.split.position(gate) else { return Ok(None) };
        let stacks = [gate, up, down];
        let [gate, up, down] = self.placed(stacks, self.stage, false)?;
        let slots = places.slots[index];
        let mut mats = [gate, up, down];
        for (stack, mat) in mats.iter_mut().enumerate() {
            mat.data = planes_at(places.memory, slots.planes(stack), slots.lens[stack]);
        }
        let ids = View { ptr: places.ids, ..experts.ids };
        let tables: usize = places.slots[..index].iter().map(|slots| 4 * slots.n_expert).sum();
        let hot = HotNode {
            module: self.modules.id(Key::plain(sources::HOT)),
            table: places.tables + tables as Ptr,
            n_expert: slots.n_expert,
            experts: ExpertsNode { ids, n_expert: slots.n, gate: mats[0], up: mats[1], down: mats[2], ..*experts },
        };
        let experts = ExpertsNode { gate, up, down, ..*experts };
        Ok(Some(Node::HostExperts(HostNode { index, experts, hot: Some(hot) })))
    }

    fn vector(&mut self, w: Weight) -> Result<Ptr, CompileError> {
        self.weights.vector(self.plan, self.checkpoint, w)
    }

    fn vector_or_null(&mut self, w: Option<Weight>) -> Result<Ptr, CompileError> {
        w.map_or(Ok(0), |w| self.vector(w))
    }

    fn state(&self, state: State) -> StateView {
        self.states[state.0 as usize]
    }

    /// The nodes of an op, in order.
    pub fn op(&mut self, op: &Op) -> Result<Vec<Node>, CompileError> {
        Ok(vec![match *op {
            Op::Embed { table, scale, out } => {
                Node::Embed { table: self.mat(sources::EMBED, table)?, scale, out: self.view(out) }
            }
            Op::Linear { x, ref parts } => return self.linear(self.view(x), parts),
            Op::GatedLinear { x, gate, up, act, out } => {
                let same = self.plan.weight(gate).dtype == self.plan.weight(up).dtype;
                let (x, out, act) = (self.view(x), self.view(out), act.into());
                if same {
                    let [gate, up] = [self.mat(sources::GATED_LINEAR, gate)?, self.mat(sources::GATED_LINEAR, up)?];
                    Node::GatedLinear { x, gate, up, act, out, prologue: Prologue::default() }
                } else {
                    let [gate, up] = [self.mat(sources::LINEAR, gate)?, self.mat(sources::LINEAR, up)?];
                    Node::GatedLinearApart { x, gate, up, act, out }
                }
            }
            Op::RmsNorm { x, residual, w, eps, out } => {
                let residual = residual.map_or(0, |residual| self.view(residual).ptr);
                Node::RmsNorm { x: self.view(x), residual, w: self.vector(w)?, eps, out: self.view(out) }
            }
            Op::HeadNorm { x, w, eps, d_head, .. } => {
                Node::HeadNorm { x: self.view(x), w: self.vector_or_null(w)?, eps, d_head, gate: 0 }
            }
            Op::GatedNorm { x, gate, w, eps, d_head, .. } => {
                let gate = self.view(gate).ptr;
                Node::HeadNorm { x: self.view(x), w: self.vector(w)?, eps, d_head, gate }
            }
            Op::Rope { x, rope, n_head, d_head } => {
                Node::Rope { x: self.view(x), rope: rope.0 as usize, n_head, d_head }
            }
            Op::SplitHeads { x, n_head, ref parts } => return Ok(self.heads(x, n_head, parts, true)),
            Op::JoinHeads { ref parts, n_head, out } => return Ok(self.heads(out, n_head, parts, false)),
            Op::HeadLinear { x, w, transposed, out } => {
                let n_head = self.plan.weight(w).shape[0];
                let w = self.mat(sources::HEAD_LINEAR, w)?;
                Node::HeadLinear { x: self.view(x), w, transposed, out: self.view(out), n_head }
            }
            Op::GatedAct { gate, up, act, out } => {
                Node::GatedAct { gate: self.view(gate), up: self.view(up), act: act.into(), out: self.view(out) }
            }
            Op::Add { x, y } => Node::Add { x: self.view(x), y: self.view(y) },
            Op::KvAppend { cache, k, v } => {
                let module = self.modules.id(Key::cached(sources::KV_APPEND, self.is_f16));
                let cache = self.caches[cache.0 as usize];
                Node::KvAppend { module, cache, k: self.view(k), v: v.map_or(0, |v| self.view(v).ptr) }
            }
            Op::Attention { cache, q, n_head, scale, window, softcap, sinks, out } => {
                let decl = self.plan.cache(cache);
                let heads = heads_of_block(n_head / decl.n_kv, decl.d_k, decl.d_v).ok_or_else(|| {
                    let what = format!("attend over heads of {} numbers", decl.d_k.max(decl.d_v));
                    CompileError::Unsupported { backend: "cuda", what }
                })?;
                Node::Attention(AttentionNode {
                    module: self.modules.id(Key::attention(decl, self.is_f16, heads)),
                    cache: self.caches[cache.0 as usize],
                    q: self.view(q),
                    out: self.view(out),
                    sinks: self.vector_or_null(sinks)?,
                    n_head,
                    heads,
                    tile: attention_tile(decl, n_head, self.is_f16, self.max_shared),
                    v_in_k: decl.v_in_k,
                    scale,
                    window: window.unwrap_or(0),
                    softcap: softcap.unwrap_or(0.0),
                })
            }
            Op::CausalConv { x, w, state, out } => {
                let width = self.plan.weight(w).shape[1];
                if width > 64 {
                    let what = format!("run a causal convolution of width {width}, at most 64");
                    return Err(CompileError::Unsupported { backend: "cuda", what });
                }
                let module = self.modules.id(Key::sized(sources::CAUSAL_CONV, "WIDTH", width));
                let (x, out) = (self.view(x), self.view(out));
                Node::CausalConv { module, x, w: self.vector(w)?, width, state: self.state(state), out }
            }
            Op::DeltaNet { q, k, v, g, beta, state, heads, out } => {
                if heads.d_k > 512 {
                    let what = format!("run a delta rule on keys of {} numbers, at most 512", heads.d_k);
                    return Err(CompileError::Unsupported { backend: "cuda", what });
                }
                let module = self.modules.id(Key::sized(sources::DELTA_NET, "D_K", heads.d_k));
                let inputs = [q, k, v, g, beta].map(|buf| self.view(buf));
                Node::DeltaNet { module, inputs, heads, state: self.state(state), out: self.view(out) }
            }
            Op::Route { logits, router, n_used, ids, weights } => {
                self.n_routers += 1;
                let logits = self.view(logits);
                Node::Route(RouteNode {
                    module: self.modules.id(Key::sized(sources::ROUTE, "N_EXPERT", logits.width)),
                    index: self.n_routers - 1,
                    logits,
                    router,
                    bias: self.vector_or_null(router.bias)?,
                    expert_scale: self.vector_or_null(router.expert_scale)?,
                    n_used,
                    ids: self.view(ids),
                    weights: self.view(weights),
                })
            }
            Op::Experts { x, ids, gate, up, down, biases, act, hidden, out } => {
                let biases = match biases {
                    Some(ExpertBiases { gate, up, down }) => [self.vector(gate)?, self.vector(up)?, self.vector(down)?],
                    None => [0; 3],
                };
                let is_host = self.split.is_host(gate);
                let n_expert = self.plan.weight(gate).shape[0];
                let layer = self.split.position(gate);
                let place = layer.zip(self.places).map(|(layer, p)| p.memory + self.split.offset(layer) as Ptr);
                let [gate, up, down] = match (is_host, place) {
                    (true, _) => self.placed([gate, up, down], self.stage, false)?,
                    (false, Some(at)) => self.placed([gate, up, down], at, true)?,
                    (false, None) => {
                        let mut mat = |w| self.mat(sources::EXPERTS, w);
                        [mat(gate)?, mat(up)?, mat(down)?]
                    }
                };
                let experts = ExpertsNode {
                    x: self.view(x),
                    ids: self.view(ids),
                    n_expert,
                    n_used: self.plan.buf(ids).width,
                    gate,
                    up,
                    down,
                    biases,
                    act: act.into(),
                    hidden: self.view(hidden),
                    out: self.view(out),
                };
                if is_host {
                    self.n_hosts += 1;
                    let index = layer.filter(|_| self.places.is_some()).unwrap_or(self.n_hosts - 1);
                    Node::HostExperts(HostNode { index, experts, hot: None })
                } else {
                    Node::Experts(experts)
                }
            }
            Op::Combine { x, add, y, weights, ref norm } => {
                let (norm_w, eps, norm_out) = match *norm {
                    Some(Norm { w, eps, out }) => (self.vector(w)?, eps, self.view(out).ptr),
                    None => (0, 0.0, 0),
                };
                let (x, y, weights) = (self.view(x), self.view(y), self.view(weights));
                Node::Combine { x, add, y, weights, norm_w, eps, norm_out }
            }
            Op::Select { x, out } => Node::Select { x: self.view(x), out: self.view(out) },
            Op::Scale { x, scale } => Node::Scale { x: self.view(x), scale },
            Op::ScaleBy { x, w } => Node::ScaleBy { x: self.view(x), w: self.vector(w)? },
            Op::SigmoidGate { x, gate } => Node::SigmoidGate { x: self.view(x), gate: self.view(gate) },
            Op::DecayBeta { a, b, a_log, dt_bias, g_out, beta_out } => Node::DecayBeta {
                a: self.view(a),
                b: self.view(b),
                a_log: self.vector(a_log)?,
                dt_bias: self.vector(dt_bias)?,
                g: self.view(g_out),
                beta: self.view(beta_out),
            },
            Op::Softcap { x, cap } => Node::Softcap { x: self.view(x), cap },
        }])
    }

    /// Parts of the same type go into one launch, four at most.
    fn linear(&mut self, x: View, parts: &[model::plan::LinearPart]) -> Result<Vec<Node>, CompileError> {
        let mut groups: Vec<Vec<Part>> = Vec::new();
        for part in parts {
            let w = self.mat(sources::LINEAR, part.w)?;
            let part = Part { w, bias: self.vector_or_null(part.bias)?, out: self.view(part.out) };
            match groups.iter_mut().find(|group| group[0].w.dtype == w.dtype && group.len() < 4) {
                Some(group) => group.push(part),
                None => groups.push(vec![part]),
            }
        }
        Ok(groups.into_iter().map(|parts| Node::Linear { x, parts }).collect())
    }

    fn heads(&self, whole: Buf, n_head: usize, parts: &[(usize, Buf)], is_split: bool) -> Vec<Node> {
        let whole = self.view(whole);
        let mut first = 0;
        let node = |&(width, part): &(usize, Buf)| {
            first += width;
            let (part, d_head) = (self.view(part), whole.width / n_head);
            Node::Heads { whole, part, first: first - width, width, d_head, is_split }
        };
        parts.iter().map(node).collect()
    }
}

/// Planes that begin so far behind `at`; null where there are none.
fn planes_at(at: Ptr, starts: [usize; 3], lens: [usize; 3]) -> Matrix {
    let place = |i: usize| if lens[i] > 0 { at + starts[i] as Ptr } else { 0 };
    Matrix { q: place(0), scales: place(1), biases: place(2) }
}

/// Whether a rope turns neighbours.
pub fn is_interleaved(pairing: RopePairing) -> bool {
    pairing == RopePairing::Interleaved
}

/// Whether v heads that share a k head are every `n_k_head`-th.
pub fn is_tiled(sharing: Sharing) -> bool {
    sharing == Sharing::Tiled
}

/// Query heads of an attention block: as many of a group as registers and shared memory hold; `None` when not one.
fn heads_of_block(group: usize, d_k: usize, d_v: usize) -> Option<usize> {
    let in_registers = 32 / d_v.div_ceil(128);
    let in_shared = 40 * 1024 / (4 * d_k + 256);
    (1..=group.min(8)).rev().find(|&heads| heads <= in_registers && heads <= in_shared)
}
