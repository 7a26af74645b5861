//! A plan's ops with everything resolved that does not change from step to step: addresses, modules, dimensions.
//!
//! `lower.rs` makes nodes of ops. Nodes of attention and experts have files of their own, and so have those that stand
//! for several ops (`few.rs`).

mod attention;
mod chosen;
mod experts;
mod few;
mod lower;
mod modules;
mod reduce;

use backend::CacheType;
use model::plan::{DeltaHeads, Gate, GateFactor, Gelu, Rows};
use quant::WeightType;

pub use self::attention::{ATTEND_PAGES, AttentionNode, MAX_SPLITS, QkvNode, QkvPartNode, Singles, Tile, WARPS};
pub use self::chosen::{ChooseNode, Chosen};
pub use self::experts::{ExpertsNode, HostNode, HotNode, RouteNode, SlotPlaces};
pub use self::few::{
    AttendNode, DeltaInNode, DenseUp, DownNode, FewLinearNode, Late, LatentOutNode, LatentQNode, PackedNode, PairsNode,
    PostNormNode, Routed, RouterNode, Sums, UpNode,
};
pub use self::lower::{Lower, is_interleaved, is_tiled};
pub use self::modules::Modules;
pub use self::reduce::{AddedNorm, Link, MOST_BLOCKS, MOST_SMALL, ReduceNode};
use super::args::{Matrix, Prologue};
use super::driver::Ptr;

/// A buffer: where it begins, its rows and its width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

impl Act {
    /// Returns whether it has numbers of its op, so that two of a kind may differ.
    pub fn has_limit(self) -> bool {
        self.kind >= 2
    }
}

impl From<Gate> for Act {
    fn from(gate: Gate) -> Act {
        match gate {
            Gate::Silu => Act { kind: 0, alpha: 0.0, limit: 0.0 },
            Gate::GeluTanh => Act { kind: 1, alpha: 0.0, limit: 0.0 },
            Gate::ClampedSwiglu { alpha, limit } => Act { kind: 2, alpha, limit },
            Gate::Relu => Act { kind: 4, alpha: 0.0, limit: 0.0 },
            Gate::ClampedSilu { limit } => Act { kind: 3, alpha: 0.0, limit },
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
    pub types: CacheType,
    /// The keys and values that kernels read which read floats alone: those above, or copies of blocks in f16.
    pub floats: [Ptr; 2],
}

impl CacheView {
    /// Keys are kept in blocks of 8 bits.
    pub fn has_key_blocks(&self) -> bool {
        self.types.k.block().is_some()
    }

    /// Values are kept in blocks of 8 bits.
    pub fn has_value_blocks(&self) -> bool {
        self.types.v.block().is_some()
    }
}

/// A recurrent state in all slots.
#[derive(Clone, Copy, Debug)]
pub struct StateView {
    pub ptr: Ptr,
    /// Numbers of a slot, with what it keeps of drafts.
    pub len: usize,
}

/// The kernels of a delta rule in tiles, and what they pass on.
#[derive(Clone, Copy, Debug)]
pub struct DeltaTiles {
    pub module: ModuleId,
    pub keys: Ptr,
    pub shares: Ptr,
    pub gates: Ptr,
}

/// How a node runs; one or a few launches each.
#[derive(Clone, Debug)]
pub enum Node {
    Embed {
        table: Mat,
        /// The axis of a token's place that the table is of; else it is of ids.
        axis: Option<usize>,
        scale: f32,
        out: View,
    },
    /// Rows that the step is given, the numbers from `first` on.
    Input {
        x: View,
        first: usize,
        /// To x; else in place of it.
        add: bool,
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
    Center {
        x: View,
        out: View,
    },
    HeadNorm {
        x: View,
        w: Ptr,
        eps: f32,
        d_head: usize,
        gate: Ptr,
        /// Heads of a row that `w` has numbers for each, 1 where all have the same.
        n_w: usize,
        gate_first: bool,
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
    AddBias {
        x: View,
        w: Ptr,
    },
    Gelu {
        x: View,
        form: Gelu,
    },
    Clamp {
        x: View,
        low: Ptr,
        high: Ptr,
    },
    /// The same numbers in all rows.
    Constant {
        values: Ptr,
        out: View,
    },
    Scale {
        x: View,
        scale: f32,
    },
    /// By a number, or one for each of a row.
    ScaleBy {
        x: View,
        w: Ptr,
        n: usize,
    },
    Softcap {
        x: View,
        cap: f32,
    },
    GateBy {
        x: View,
        gate: View,
        factor: GateFactor,
    },
    DecayBeta {
        a: View,
        /// Null where the rate is the step size.
        b: Ptr,
        a_log: Ptr,
        dt_bias: Ptr,
        /// Of the decays' exponents, or 0.
        bound: f32,
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
    Choose(ChooseNode),
    Attention(AttentionNode),
    CausalConv {
        module: ModuleId,
        x: View,
        w: Ptr,
        bias: Ptr,
        silu: bool,
        width: usize,
        state: StateView,
        out: View,
    },
    DeltaNet {
        module: ModuleId,
        /// Its kernels for many tokens, where the heads have them.
        tiles: Option<DeltaTiles>,
        inputs: [View; 5],
        skip: Ptr,
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
    AllReduce(ReduceNode),
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
            Node::Input { .. } => ("input".into(), 0),
            Node::RmsNorm { .. } => ("rms_norm".into(), 0),
            Node::Center { .. } => ("center".into(), 0),
            Node::HeadNorm { gate: 0, .. } => ("head_norm".into(), 0),
            Node::HeadNorm { .. } => ("gated_norm".into(), 0),
            Node::Rope { .. } => ("rope".into(), 0),
            Node::Heads { .. } => ("heads".into(), 0),
            Node::GatedAct { .. } => ("gated_act".into(), 0),
            Node::Add { .. } => ("add".into(), 0),
            Node::AddBias { .. } => ("add_bias".into(), 0),
            Node::Gelu { .. } => ("gelu".into(), 0),
            Node::Clamp { .. } => ("clamp".into(), 0),
            Node::Constant { .. } => ("constant".into(), 0),
            Node::Scale { .. } => ("scale".into(), 0),
            Node::ScaleBy { .. } => ("scale_by".into(), 0),
            Node::Softcap { .. } => ("softcap".into(), 0),
            Node::GateBy { .. } => ("gate_by".into(), 0),
            Node::DecayBeta { .. } => ("decay_beta".into(), 0),
            Node::KvAppend { .. } => ("kv_append".into(), 0),
            Node::Qkv(_) => ("qkv".into(), 0),
            Node::Choose(_) => ("choose".into(), 0),
            Node::Attention(_) => ("attention".into(), 0),
            Node::CausalConv { .. } => ("causal_conv".into(), 0),
            Node::DeltaNet { .. } => ("delta_net".into(), 0),
            Node::Route(_) => ("route".into(), 0),
            Node::Combine { .. } => ("combine".into(), 0),
            Node::Select { .. } => ("select".into(), 0),
            Node::AllReduce(_) => ("all_reduce".into(), 0),
        }
    }
}
