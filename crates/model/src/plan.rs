//! The plan: a closed list of operations (`Op`) over weights and virtual buffers.
//!
//! An architecture writes a plan once per model; passes fuse it; backends compile it. Dimensions are fixed numbers,
//! except the number of rows of a buffer, which is [`Rows`]. A plan holds no pointers and no device state, so that it
//! can be printed, compared with a snapshot and validated without weights.

pub mod build;
pub mod cost;
pub mod memory;
pub mod passes;
mod print;
pub mod validate;

use quant::WeightType;

pub use validate::ValidPlan;

/// Index into [`Plan::bufs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Buf(pub u32);

/// Index into [`Plan::weights`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Weight(pub u32);

/// Index into [`Plan::caches`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Cache(pub u32);

/// Index into [`Plan::states`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct State(pub u32);

/// Index into [`Plan::ropes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rope(pub u32);

/// How many rows a buffer has in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rows {
    /// One per token of the step, `T`.
    Tokens,
    /// One per (token, expert slot) pair, `T · n_used`; row `t · n_used + s`.
    Slots(usize),
    /// One per row that the step returns, `R`.
    Outputs,
    /// One per (returned row, expert slot) pair, `R · n_used`.
    OutputSlots(usize),
}

impl Rows {
    /// Number of rows in a step with this many tokens and returned rows; saturates.
    pub fn count(self, n_tokens: usize, n_outputs: usize) -> usize {
        match self {
            Rows::Tokens => n_tokens,
            Rows::Slots(n_used) => n_tokens.saturating_mul(n_used),
            Rows::Outputs => n_outputs,
            Rows::OutputSlots(n_used) => n_outputs.saturating_mul(n_used),
        }
    }

    /// Rows of the expert slots of these rows; `None` for rows that are slots already.
    pub fn slots(self, n_used: usize) -> Option<Rows> {
        match self {
            Rows::Tokens => Some(Rows::Slots(n_used)),
            Rows::Outputs => Some(Rows::OutputSlots(n_used)),
            Rows::Slots(_) | Rows::OutputSlots(_) => None,
        }
    }

    /// The same for the returned rows only.
    pub fn of_outputs(self) -> Rows {
        match self {
            Rows::Tokens | Rows::Outputs => Rows::Outputs,
            Rows::Slots(n_used) | Rows::OutputSlots(n_used) => Rows::OutputSlots(n_used),
        }
    }
}

/// Element type of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Elem {
    /// Activations. Architectures write no others; a backend's passes may narrow them.
    F32,
    /// Activations in half precision.
    F16,
    /// Activations in bfloat16.
    BF16,
    /// Expert ids.
    U32,
}

impl Elem {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Elem::F32 | Elem::U32 => 4,
            Elem::F16 | Elem::BF16 => 2,
        }
    }

    /// Whether the elements are numbers, not ids.
    pub fn is_float(self) -> bool {
        self != Elem::U32
    }
}

/// A virtual buffer `[rows, width]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufDecl {
    /// Name for people, e.g. `q.3`.
    pub name: String,
    /// Number of rows.
    pub rows: Rows,
    /// Elements in a row.
    pub width: usize,
    /// Element type.
    pub elem: Elem,
}

/// A tensor the plan reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightDecl {
    /// Name for people, GGUF's for every file kind: e.g. `blk.3.ffn_up_exps.weight`.
    pub name: String,
    /// Type in the checkpoint.
    pub dtype: WeightType,
    /// Shape, slowest axis first.
    pub shape: Vec<usize>,
    /// Where its rows lie.
    pub source: Source,
    /// Transformation of the numbers when a backend reads them.
    pub read: Read,
    /// Whether its bytes lie in no file but are computed when they are read: it can be copied, and not mapped.
    pub is_repacked: bool,
}

/// Where the rows of a weight lie in the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A tensor with this many values, by its name in the checkpoint.
    Tensor(String),
    /// One piece of a tensor for each matrix of a stack (a single piece for a plain matrix): files with one tensor per
    /// expert, or two matrices in one tensor.
    Slabs(Vec<Slab>),
}

impl Source {
    /// Names of the tensors that hold it, in order.
    pub fn tensors(&self) -> impl Iterator<Item = &str> {
        let (one, many) = match self {
            Source::Tensor(name) => (Some(name), [].as_slice()),
            Source::Slabs(slabs) => (None, slabs.as_slice()),
        };
        one.into_iter().chain(many.iter().map(|slab| &slab.tensor)).map(String::as_str)
    }
}

/// Consecutive rows of a tensor: one matrix of a weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slab {
    /// Name in the checkpoint.
    pub tensor: String,
    /// First row, counted over all axes but the last.
    pub first_row: usize,
}

/// Transformation of the stored numbers of a vector. Matrices are always [`Read::Plain`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// `w`.
    Plain,
    /// `1 + w`: norms that are stored centred on zero.
    OnePlus,
    /// `-exp(w)`: decay rates that are stored as logarithms.
    NegExp,
}

impl Read {
    /// Applies it to decoded numbers, in place.
    pub fn apply(self, values: &mut [f32]) {
        match self {
            Read::Plain => {}
            Read::OnePlus => values.iter_mut().for_each(|v| *v += 1.0),
            Read::NegExp => values.iter_mut().for_each(|v| *v = -libm::exp(f64::from(*v)) as f32),
        }
    }
}

/// A paged key-value cache, one per attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheDecl {
    /// Key-value heads.
    pub n_kv: usize,
    /// Width of a key head.
    pub d_k: usize,
    /// Width of a value head.
    pub d_v: usize,
    /// The values are the first `d_v` numbers of the keys and are not stored separately: the latent cache of multi-head
    /// latent attention (DeepSeek-V2, arXiv 2405.04434).
    pub v_in_k: bool,
    /// Sliding-window attention: only the last `window` positions are kept. Window pages are counted apart from the
    /// pages that hold all positions.
    pub window: Option<usize>,
}

/// Recurrent state: fixed-size data that one op carries from one position to the next.
///
/// It is zero before position 0. A step advances it past the chunk's tokens, so that it covers all computed positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateDecl {
    /// What it holds, for people: `conv`, `delta`.
    pub what: &'static str,
    /// Numbers (f32) for each sequence.
    pub n: usize,
}

/// Which dimensions of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairing {
    /// `(i, i + rotary/2)`: GPT-NeoX, Qwen, HF Llama.
    Half,
    /// `(2i, 2i + 1)`: GGUF files of arch `llama`, whose q and k rows are permuted for it.
    Interleaved,
}

/// A rotary embedding: the angle of pair `i` at position `p` is `p · inv_freq[i]`.
///
/// All scaling variants (linear, Llama 3, YaRN) end in the table and the factor, so that a backend knows one form.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeDecl {
    /// Inverse frequencies, `[rotary / 2]`.
    pub inv_freq: Vec<f64>,
    /// Factor on cosine and sine (YaRN's attention factor; 1 otherwise).
    pub factor: f32,
    /// Pairing.
    pub pairing: RopePairing,
}

/// Heads of a delta rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaHeads {
    /// Heads of q and k.
    pub n_k_head: usize,
    /// Heads of v, of the gates and of the output; a multiple of `n_k_head`.
    pub n_v_head: usize,
    /// Width of a head of q and k.
    pub d_k: usize,
    /// Width of a head of v.
    pub d_v: usize,
    /// Which heads of v share a head of k.
    pub sharing: Sharing,
}

/// Which heads of v share a head of k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Neighbours: `h` has `h / (n_v_head / n_k_head)`. The original order.
    Grouped,
    /// Every `n_k_head`-th: `h` has `h % n_k_head`. The order of GGUF files of Qwen3.5, whose v heads are permuted.
    Tiled,
}

impl DeltaHeads {
    /// The head of k for a head of v.
    pub fn k_head(&self, v_head: usize) -> usize {
        match self.sharing {
            Sharing::Grouped => v_head / (self.n_v_head / self.n_k_head),
            Sharing::Tiled => v_head % self.n_k_head,
        }
    }
}

/// Gated activation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gate {
    /// `silu(g) · u`.
    Silu,
    /// `gelu_tanh(g) · u`.
    GeluTanh,
    /// `g' · σ(alpha · g') · (u' + 1)` with `g' = min(g, limit)` and `u' = clamp(u, -limit, limit)` (gpt-oss).
    ClampedSwiglu {
        /// Factor inside the sigmoid.
        alpha: f32,
        /// Limit of gate and up.
        limit: f32,
    },
}

/// How a router turns logits into experts and their weights, as independent choices.
///
/// Every expert has a score; the best `n_used` by score plus bias, among the open groups, are chosen; their weights
/// come from the scores without the bias.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Router {
    /// From logits to scores.
    pub score: Score,
    /// `[n_expert]`, f32: added to the scores for choosing only (DeepSeek-V3, GLM-4.5).
    pub bias: Option<Weight>,
    /// Only experts of the best groups may be chosen; all others are ranked -inf.
    pub groups: Option<Groups>,
    /// Divide the chosen weights by their sum plus this epsilon of the original code (0 where it has none).
    pub renormalise: Option<f32>,
    /// Factor on the final weights.
    pub scale: f32,
    /// `[n_expert]`, f32: factor on the final weight of each expert (Gemma 4).
    pub expert_scale: Option<Weight>,
}

/// From router logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Score {
    /// Softmax over all experts (Qwen3-MoE, Mixtral, DeepSeek-V2).
    Softmax,
    /// Each expert by itself (DeepSeek-V3, GLM-4.5).
    Sigmoid,
    /// The logits themselves; the weights are the softmax over the chosen ones (gpt-oss).
    Raw,
}

/// Experts in groups of equal size; only the best groups are open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Number of groups; group `g` holds the experts from `g · n_expert / n_group` on.
    pub n_group: usize,
    /// Number of open groups.
    pub n_used: usize,
    /// Score of a group.
    pub score: GroupScore,
}

/// Score of a group, from its experts' scores with bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupScore {
    /// Its best expert (DeepSeek-V2).
    Max,
    /// The sum of its two best experts (DeepSeek-V3).
    TopTwo,
}

impl Router {
    /// Softmax over all experts, times `scale`; divided by the sum of the chosen when `renormalise`.
    pub fn softmax(renormalise: bool, scale: f32) -> Self {
        let renormalise = renormalise.then_some(0.0);
        Self { score: Score::Softmax, bias: None, groups: None, renormalise, scale, expert_scale: None }
    }
}

/// One operation. Field names: `x` is the input, `out` the output; shapes are in the comments.
#[allow(missing_docs)]
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// `out[t,:] = dequant(table[id[t],:]) · scale`.
    Embed {
        table: Weight, // [n_vocab, d_model]
        scale: f32,
        out: Buf, // [T, d_model]
    },
    /// `out[t,n] = Σ_k w[n,k]·x[t,k] (+ bias[n])` for every part; parts share the input, so it is quantised once.
    Linear {
        x: Buf, // [T, k]
        parts: Vec<LinearPart>,
    },
    /// `out = act(x·gateᵀ) ⊙ (x·upᵀ)`: the fused form of two linears and a gated activation.
    GatedLinear {
        x: Buf,       // [T, k]
        gate: Weight, // [n, k]
        up: Weight,   // [n, k]
        act: Gate,
        out: Buf, // [T, n]
    },
    /// `x += residual` when there is one, then `out = x · rsqrt(mean(x²) + eps) · w`.
    RmsNorm {
        x: Buf,                // [T, d], updated in place when there is a residual
        residual: Option<Buf>, // [T, d]
        w: Weight,             // [d]
        eps: f32,
        out: Buf, // [T, d]
    },
    /// `rms_norm` of each head's slice, in place.
    HeadNorm {
        x: Buf,            // [T, n_head · d_head]
        w: Option<Weight>, // [d_head]
        eps: f32,
        n_head: usize,
        d_head: usize,
    },
    /// Rotary embedding of each head's first `rotary` dims, in place.
    Rope {
        x: Buf, // [T, n_head · d_head]
        rope: Rope,
        n_head: usize,
        d_head: usize,
    },
    /// Splits every head's row: part `i` gets the next `parts[i].0` numbers of each head.
    SplitHeads {
        x: Buf, // [T, n_head · Σ width]
        n_head: usize,
        parts: Vec<(usize, Buf)>, // width, [T, n_head · width]
    },
    /// Concatenates the parts of every head's row, the inverse of `SplitHeads`.
    JoinHeads {
        parts: Vec<(usize, Buf)>, // width, [T, n_head · width]
        n_head: usize,
        out: Buf, // [T, n_head · Σ width]
    },
    /// One matrix a head: `out[t,h,n] = Σ_k w[h,n,k]·x[t,h,k]`; transposed, the matrices lie as `w[h,k,n]`.
    HeadLinear {
        x: Buf,    // [T, n_head · k]
        w: Weight, // [n_head, n, k], transposed [n_head, k, n]
        transposed: bool,
        out: Buf, // [T, n_head · n]
    },
    /// `out = act(gate) ⊙ up`.
    GatedAct {
        gate: Buf, // [T, n]
        up: Buf,   // [T, n]
        act: Gate,
        out: Buf, // [T, n]
    },
    /// `x += y`, in place.
    Add {
        x: Buf, // [T, d]
        y: Buf, // [T, d]
    },
    /// Writes the step's keys and values into the paged cache.
    KvAppend {
        cache: Cache,
        k: Buf,         // [T, n_kv · d_k]
        v: Option<Buf>, // [T, n_kv · d_v]; none when the cache finds values in the keys
    },
    /// Causal attention over the cache: `out = softmax(q·kᵀ·scale)·v`, grouped heads.
    Attention {
        cache: Cache,
        q: Buf, // [T, n_head · d_k]
        n_head: usize,
        scale: f32,
        /// Sees only the last `window` positions, itself included.
        window: Option<usize>,
        /// `softcap · tanh(s / softcap)` on the scores.
        softcap: Option<f32>,
        /// Attention sinks, `[n_head]`: one extra logit per head in the softmax's denominator, without a value
        /// (gpt-oss).
        sinks: Option<Weight>,
        out: Buf, // [T, n_head · d_v]
    },
    /// Depthwise causal convolution, then silu: `out[t,c] = silu(Σ_j w[c,j] · x[t - (width - 1) + j, c])`. Earlier
    /// positions come from the state, the sequence's last `width - 1` rows of `x`.
    CausalConv {
        x: Buf,    // [T, d]
        w: Weight, // [d, width]
        state: State,
        out: Buf, // [T, d]
    },
    /// The gated delta rule (arXiv 2412.06464), for every head of v and its head of k, one position after the other:
    /// `S = g·S; S += k ⊗ beta·(v - Sᵀk); out = Sᵀq`. The state holds `S`, `n_v_head · d_k · d_v` numbers.
    DeltaNet {
        q: Buf,    // [T, n_k_head · d_k]
        k: Buf,    // [T, n_k_head · d_k]
        v: Buf,    // [T, n_v_head · d_v]
        g: Buf,    // [T, n_v_head]
        beta: Buf, // [T, n_v_head]
        state: State,
        heads: DeltaHeads,
        out: Buf, // [T, n_v_head · d_v]
    },
    /// Chooses `n_used` experts per token, best first, ties to the lower id, and their weights.
    Route {
        logits: Buf, // [T, n_expert]
        router: Router,
        n_used: usize,
        ids: Buf,     // u32 [T, n_used]
        weights: Buf, // [T, n_used]
    },
    /// For every (token, slot): `y = (act(x·gateᵀ) ⊙ (x·upᵀ))·downᵀ` with that expert's weights, each of the three
    /// products plus its bias where there are biases.
    Experts {
        x: Buf,       // [T, d_model]
        ids: Buf,     // u32 [T, n_used]
        gate: Weight, // [n_expert, d_ff, d_model]
        up: Weight,   // [n_expert, d_ff, d_model]
        down: Weight, // [n_expert, d_model, d_ff]
        biases: Option<ExpertBiases>,
        act: Gate,
        hidden: Buf, // [T · n_used, d_ff], scratch
        out: Buf,    // [T · n_used, d_model]
    },
    /// `x[t] += Σ_s weights[t,s] · y[t,s]`, slots in order; with `norm` it also emits the next `rms_norm`.
    Combine {
        x: Buf, // [T, d_model], updated in place
        /// If false, the sum overwrites `x`.
        add: bool,
        y: Buf,       // [T · n_used, d_model]
        weights: Buf, // [T, n_used]
        norm: Option<Norm>,
    },
    /// Copies the rows that the step returns: `out[r] = x[row[r]]`.
    Select {
        x: Buf,   // [T, d]
        out: Buf, // [R, d]
    },
    /// `x = x · scale`, in place.
    Scale { x: Buf, scale: f32 },
    /// `x = x · w[0]`, in place: a learned scale of a layer's output (Gemma 4).
    ScaleBy {
        x: Buf,
        w: Weight, // [1]
    },
    /// `x = x ⊙ σ(gate)`, in place; a gate of width 1 applies to its whole row.
    SigmoidGate {
        x: Buf,    // [T, d]
        gate: Buf, // [T, d] or [T, 1]
    },
    /// The gates of a gated delta rule: `g = exp(a_log · softplus(a + dt_bias))`, `beta = σ(b)`.
    DecayBeta {
        a: Buf,          // [T, n]
        b: Buf,          // [T, n]
        a_log: Weight,   // [n], -exp of what models call A_log
        dt_bias: Weight, // [n]
        g_out: Buf,      // [T, n], 0 to 1
        beta_out: Buf,   // [T, n]
    },
    /// `x = rms_norm(x) ⊙ w ⊙ silu(gate)` of each head's slice, in place.
    GatedNorm {
        x: Buf,    // [T, n_head · d_head]
        gate: Buf, // [T, n_head · d_head]
        w: Weight, // [d_head]
        eps: f32,
        n_head: usize,
        d_head: usize,
    },
    /// `x = cap · tanh(x / cap)`, in place.
    Softcap { x: Buf, cap: f32 },
}

/// One matrix of a [`Op::Linear`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearPart {
    /// `[n, k]`.
    pub w: Weight,
    /// `[n]`, f32.
    pub bias: Option<Weight>,
    /// `[T, n]`.
    pub out: Buf,
}

/// Biases of the experts' three products; f32, f16 or bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertBiases {
    /// `[n_expert, d_ff]`.
    pub gate: Weight,
    /// `[n_expert, d_ff]`.
    pub up: Weight,
    /// `[n_expert, d_model]`.
    pub down: Weight,
}

/// The norm that a fused op emits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// `[d]`.
    pub w: Weight,
    /// Added to the mean square.
    pub eps: f32,
    /// `[T, d]`.
    pub out: Buf,
}

/// What an op does with a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads it.
    Read,
    /// Overwrites all of it.
    Write,
    /// Reads it and writes it in place.
    Update,
}

impl Op {
    /// Its name in printed plans, kernels, tests and traces.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Embed { .. } => "embed",
            Op::Linear { .. } => "linear",
            Op::GatedLinear { .. } => "gated_linear",
            Op::RmsNorm { .. } => "rms_norm",
            Op::HeadNorm { .. } => "head_norm",
            Op::Rope { .. } => "rope",
            Op::SplitHeads { .. } => "split_heads",
            Op::JoinHeads { .. } => "join_heads",
            Op::HeadLinear { .. } => "head_linear",
            Op::GatedAct { .. } => "gated_act",
            Op::Add { .. } => "add",
            Op::KvAppend { .. } => "kv_append",
            Op::Attention { .. } => "attention",
            Op::CausalConv { .. } => "causal_conv",
            Op::DeltaNet { .. } => "delta_net",
            Op::Route { .. } => "route",
            Op::Experts { .. } => "experts",
            Op::Combine { .. } => "combine",
            Op::Select { .. } => "select",
            Op::Scale { .. } => "scale",
            Op::ScaleBy { .. } => "scale_by",
            Op::SigmoidGate { .. } => "sigmoid_gate",
            Op::DecayBeta { .. } => "decay_beta",
            Op::GatedNorm { .. } => "gated_norm",
            Op::Softcap { .. } => "softcap",
        }
    }

    /// Calls `f` with every buffer of the op and its access. The validator, the memory planner and the passes learn
    /// accesses only here.
    pub fn for_each_buf_mut(&mut self, mut f: impl FnMut(&mut Buf, Access)) {
        use Access::{Read, Update, Write};
        match self {
            Op::Embed { out, .. } => f(out, Write),
            Op::Linear { x, parts } => {
                f(x, Read);
                parts.iter_mut().for_each(|part| f(&mut part.out, Write));
            }
            Op::GatedLinear { x, out, .. } | Op::HeadLinear { x, out, .. } | Op::Select { x, out } => {
                f(x, Read);
                f(out, Write);
            }
            Op::RmsNorm { x, residual, out, .. } => {
                f(x, if residual.is_some() { Update } else { Read });
                residual.iter_mut().for_each(|r| f(r, Read));
                f(out, Write);
            }
            Op::HeadNorm { x, .. }
            | Op::Rope { x, .. }
            | Op::Scale { x, .. }
            | Op::ScaleBy { x, .. }
            | Op::Softcap { x, .. } => f(x, Update),
            Op::SplitHeads { x, parts, .. } => {
                f(x, Read);
                parts.iter_mut().for_each(|(_, part)| f(part, Write));
            }
            Op::JoinHeads { parts, out, .. } => {
                parts.iter_mut().for_each(|(_, part)| f(part, Read));
                f(out, Write);
            }
            Op::GatedAct { gate, up, out, .. } => {
                f(gate, Read);
                f(up, Read);
                f(out, Write);
            }
            Op::Add { x, y } => {
                f(x, Update);
                f(y, Read);
            }
            Op::SigmoidGate { x, gate } | Op::GatedNorm { x, gate, .. } => {
                f(x, Update);
                f(gate, Read);
            }
            Op::DecayBeta { a, b, g_out, beta_out, .. } => {
                f(a, Read);
                f(b, Read);
                f(g_out, Write);
                f(beta_out, Write);
            }
            Op::KvAppend { k, v, .. } => {
                f(k, Read);
                v.iter_mut().for_each(|v| f(v, Read));
            }
            Op::Attention { q, out, .. } => {
                f(q, Read);
                f(out, Write);
            }
            Op::CausalConv { x, out, .. } => {
                f(x, Read);
                f(out, Write);
            }
            Op::DeltaNet { q, k, v, g, beta, out, .. } => {
                [q, k, v, g, beta].into_iter().for_each(|buf| f(buf, Read));
                f(out, Write);
            }
            Op::Route { logits, ids, weights, .. } => {
                f(logits, Read);
                f(ids, Write);
                f(weights, Write);
            }
            Op::Experts { x, ids, hidden, out, .. } => {
                f(x, Read);
                f(ids, Read);
                f(hidden, Write);
                f(out, Write);
            }
            Op::Combine { x, add, y, weights, norm } => {
                f(x, if *add { Update } else { Write });
                f(y, Read);
                f(weights, Read);
                norm.iter_mut().for_each(|norm| f(&mut norm.out, Write));
            }
        }
    }

    /// Every buffer of the op and its access, in the order of its fields.
    pub fn bufs(&self) -> Vec<(Buf, Access)> {
        let mut out = Vec::new();
        self.clone().for_each_buf_mut(|buf, access| out.push((*buf, access)));
        out
    }

    /// The recurrent state that the op reads and updates. Such an op mixes the rows of a sequence, as attention does.
    pub fn state(&self) -> Option<State> {
        match self {
            Op::CausalConv { state, .. } | Op::DeltaNet { state, .. } => Some(*state),
            Op::Embed { .. }
            | Op::Linear { .. }
            | Op::GatedLinear { .. }
            | Op::RmsNorm { .. }
            | Op::HeadNorm { .. }
            | Op::Rope { .. }
            | Op::SplitHeads { .. }
            | Op::JoinHeads { .. }
            | Op::HeadLinear { .. }
            | Op::GatedAct { .. }
            | Op::Add { .. }
            | Op::KvAppend { .. }
            | Op::Attention { .. }
            | Op::Route { .. }
            | Op::Experts { .. }
            | Op::Combine { .. }
            | Op::Select { .. }
            | Op::Scale { .. }
            | Op::ScaleBy { .. }
            | Op::SigmoidGate { .. }
            | Op::DecayBeta { .. }
            | Op::GatedNorm { .. }
            | Op::Softcap { .. } => None,
        }
    }

    /// Every weight of the op, in the order of its fields.
    pub fn weights(&self) -> Vec<Weight> {
        match self {
            Op::Embed { table, .. } => vec![*table],
            Op::Linear { parts, .. } => parts.iter().flat_map(|part| [Some(part.w), part.bias]).flatten().collect(),
            Op::GatedLinear { gate, up, .. } => vec![*gate, *up],
            Op::RmsNorm { w, .. } | Op::GatedNorm { w, .. } | Op::CausalConv { w, .. } => vec![*w],
            Op::DecayBeta { a_log, dt_bias, .. } => vec![*a_log, *dt_bias],
            Op::HeadNorm { w, .. } => w.iter().copied().collect(),
            Op::HeadLinear { w, .. } => vec![*w],
            Op::Route { router, .. } => [router.bias, router.expert_scale].into_iter().flatten().collect(),
            Op::Experts { gate, up, down, biases, .. } => {
                let biases = biases.iter().flat_map(|b| [b.gate, b.up, b.down]);
                [*gate, *up, *down].into_iter().chain(biases).collect()
            }
            Op::Attention { sinks, .. } => sinks.iter().copied().collect(),
            Op::ScaleBy { w, .. } => vec![*w],
            Op::Combine { norm, .. } => norm.iter().map(|norm| norm.w).collect(),
            Op::Rope { .. }
            | Op::SplitHeads { .. }
            | Op::JoinHeads { .. }
            | Op::GatedAct { .. }
            | Op::Add { .. }
            | Op::KvAppend { .. }
            | Op::Select { .. }
            | Op::Scale { .. }
            | Op::DeltaNet { .. }
            | Op::SigmoidGate { .. }
            | Op::Softcap { .. } => Vec::new(),
        }
    }
}

/// What a model computes in a step: from token ids to the logits of the returned rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Architecture, e.g. `qwen3moe`.
    pub arch: String,
    /// Vocabulary size: ids at or above it are refused.
    pub n_vocab: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Positions the model was trained for.
    pub n_ctx_train: usize,
    /// Tensors.
    pub weights: Vec<WeightDecl>,
    /// Virtual buffers.
    pub bufs: Vec<BufDecl>,
    /// Caches, one per attention layer.
    pub caches: Vec<CacheDecl>,
    /// Recurrent states, each of one op.
    pub states: Vec<StateDecl>,
    /// Rotary embeddings.
    pub ropes: Vec<RopeDecl>,
    /// Operations in order.
    pub ops: Vec<Op>,
    /// Layer of each op, as long as `ops`; `None` before the first layer and after the last. For messages, faults and
    /// the printed form only.
    pub layers: Vec<Option<u32>>,
    /// The logits, `[R, n_vocab]`.
    pub logits: Buf,
}

impl Plan {
    /// A plan of nothing: its logits are no buffer yet.
    pub fn new(arch: &str, n_vocab: usize, d_model: usize, n_ctx_train: usize) -> Plan {
        Plan {
            arch: arch.into(),
            n_vocab,
            d_model,
            n_ctx_train,
            weights: Vec::new(),
            bufs: Vec::new(),
            caches: Vec::new(),
            states: Vec::new(),
            ropes: Vec::new(),
            ops: Vec::new(),
            layers: Vec::new(),
            logits: Buf(u32::MAX),
        }
    }

    /// Declaration of a buffer of this plan.
    pub fn buf(&self, buf: Buf) -> &BufDecl {
        &self.bufs[buf.0 as usize]
    }

    /// Whether it has routed experts.
    pub fn has_experts(&self) -> bool {
        self.ops.iter().any(|op| matches!(op, Op::Experts { .. }))
    }

    /// Input of the logits, `[R, d]`: the rows behind the last norm. `None` where no plain matrix makes the logits.
    pub fn hidden(&self) -> Option<Buf> {
        let head = |op: &Op| match op {
            Op::Linear { x, parts } if parts.iter().any(|part| part.out == self.logits) => Some(*x),
            _ => None,
        };
        self.ops.iter().find_map(head).filter(|&x| self.buf(x).rows == Rows::Outputs)
    }

    /// Declaration of a weight of this plan.
    pub fn weight(&self, weight: Weight) -> &WeightDecl {
        &self.weights[weight.0 as usize]
    }

    /// Declaration of a cache of this plan.
    pub fn cache(&self, cache: Cache) -> &CacheDecl {
        &self.caches[cache.0 as usize]
    }

    /// Declaration of a recurrent state of this plan.
    pub fn state(&self, state: State) -> &StateDecl {
        &self.states[state.0 as usize]
    }

    /// Declaration of a rotary embedding of this plan.
    pub fn rope(&self, rope: Rope) -> &RopeDecl {
        &self.ropes[rope.0 as usize]
    }
}
