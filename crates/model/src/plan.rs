//! The plan: a closed list of operations (`Op`) over weights and virtual buffers.
//!
//! An architecture writes a plan once per model; passes fuse it; backends compile it. Dimensions are fixed numbers,
//! except the number of rows of a buffer, which is [`Rows`]. A plan holds no pointers and no device state, so that it
//! can be printed, compared with a snapshot and validated without weights.

pub mod build;
pub mod cost;
pub mod memory;
mod op;
pub mod partition;
pub mod passes;
mod print;
pub mod validate;

use quant::WeightType;

pub use op::{Access, ExpertBiases, LinearPart, Norm, Op, Product};
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

    /// Returns the same for the returned rows only.
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

    /// Returns whether the elements are numbers, not ids.
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
    /// Type that is computed with: the checkpoint's, but with [`Read::Floats`].
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

impl WeightDecl {
    /// Returns its type in the checkpoint.
    pub fn stored(&self) -> WeightType {
        match self.read {
            Read::Floats(stored) => stored,
            Read::Plain | Read::OnePlus | Read::NegExp | Read::Exp | Read::Neg => self.dtype,
        }
    }
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

/// Transformation of the stored numbers of a vector or of decay rates. Architectures read other matrices as they are,
/// [`Read::Plain`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// `w`.
    Plain,
    /// `1 + w`: norms that are stored centred on zero.
    OnePlus,
    /// `-exp(w)`: decay rates that are stored as logarithms.
    NegExp,
    /// `exp(w)`: the same of bounded decays.
    Exp,
    /// `-w`: means that are taken away.
    Neg,
    /// `w` as f32, of a matrix that is stored in this type.
    Floats(WeightType),
}

impl Read {
    /// Applies it to decoded numbers, in place.
    pub fn apply(self, values: &mut [f32]) {
        match self {
            Read::Plain | Read::Floats(_) => {}
            Read::OnePlus => values.iter_mut().for_each(|v| *v += 1.0),
            Read::Neg => values.iter_mut().for_each(|v| *v = -*v),
            Read::Exp => values.iter_mut().for_each(|v| *v = libm::exp(f64::from(*v)) as f32),
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

/// A rotary embedding: the angle of pair `i` at position `p` is `p · inv_freq[i]`. Tokens of images have a position on
/// several axes (time, height and width), and each pair turns with one of them.
///
/// All scaling variants (linear, Llama 3, YaRN) end in the table and the factor, so that a backend knows one form. With
/// frequencies of 0 it turns nothing and only applies its factor and growth.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeDecl {
    /// Inverse frequencies, `[rotary / 2]`.
    pub inv_freq: Vec<f64>,
    /// Factor on cosine and sine (YaRN's attention factor; 1 otherwise).
    pub factor: f32,
    /// Another factor on them, which depends on the position.
    pub growth: Option<Growth>,
    /// Pairing.
    pub pairing: RopePairing,
    /// The axis of each pair, `[rotary / 2]`; empty where all turn with the first.
    pub axes: Vec<u8>,
}

/// Number of axes of a position.
pub const N_AXES: usize = 3;

/// Rotary embeddings that replace a plan's own in longer contexts (LongRoPE, dynamic NTK). A sequence cannot change
/// them on its way, since the keys in its cache are rotated: the context that a program is compiled for decides.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRopes {
    /// The longest context of the plan's own.
    pub n_ctx: usize,
    /// The longest context that these are made for.
    pub n_ctx_max: usize,
    /// One for each of the plan's, of the same form.
    pub ropes: Vec<RopeDecl>,
}

/// A scale of queries that grows with the position (Llama 4, Mistral): `1 + beta · ln(1 + ⌊(p + offset) / step⌋)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Growth {
    /// Factor on the logarithm.
    pub beta: f32,
    /// Positions of one scale.
    pub step: u32,
    /// Added to the position.
    pub offset: u32,
}

impl Growth {
    /// Returns the scale of a position.
    pub fn at(self, pos: u32) -> f64 {
        let steps = (u64::from(pos) + u64::from(self.offset)) / u64::from(self.step.max(1));
        1.0 + f64::from(self.beta) * libm::log(1.0 + steps as f64)
    }
}

/// Heads of a delta net and their rule.
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
    /// What a position adds to the state.
    pub rule: DeltaRule,
}

/// What a position adds to the state of a delta net.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaRule {
    /// `k ⊗ beta·(v - Sᵀk)`: what the key found there gives way.
    Delta,
    /// `k ⊗ beta·v`: linear attention with decay. Mamba-2 (arXiv 2405.21060) is that, with its C as q, B as k, x as v
    /// and step size as beta.
    Sum,
}

/// Which heads of v share a head of k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Neighbors: `h` has `h / (n_v_head / n_k_head)`. The original order.
    Grouped,
    /// Every `n_k_head`-th: `h` has `h % n_k_head`. The order of GGUF files of Qwen3.5, whose v heads are permuted.
    Tiled,
}

impl DeltaHeads {
    /// Returns the head of k for a head of v.
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
    /// `max(g, 0) · u`; the square of a rectified number where both are one buffer (Arcee).
    Relu,
    /// `g' · σ(alpha · g') · (u' + 1)` with `g' = min(g, limit)` and `u' = clamp(u, -limit, limit)` (gpt-oss).
    ClampedSwiglu {
        /// Factor inside the sigmoid.
        alpha: f32,
        /// Limit of gate and up.
        limit: f32,
    },
    /// `min(silu(g), limit) · clamp(u, -limit, limit)` (Step-3.7).
    ClampedSilu {
        /// Limit of the activated gate and of up.
        limit: f32,
    },
}

/// What the rows that a step is given do to a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputMode {
    /// Every token has such a row, and it is written: the patches of an image.
    All,
    /// They replace the rows of their tokens: features in place of embeddings.
    Replace,
    /// They are added to the rows of their tokens (DeepStack, arXiv 2406.04334).
    Add,
}

/// The Gaussian error linear unit, `x · Φ(x)` (arXiv 1606.08415).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gelu {
    /// By the error function.
    Erf,
    /// Its approximation by tanh.
    Tanh,
}

/// The factor that a number of a gate becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateFactor {
    /// `σ(g)`.
    Sigmoid,
    /// `ln(1 + e^g)` (Laguna).
    Softplus,
    /// `g` (Llama 4: weights of experts on their input).
    Plain,
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
    /// The experts of this part of a partition, where it does not have all.
    pub local: Option<Local>,
}

/// The experts of one part of a partition: ids count from `first`, and a chosen expert of another part has the id
/// [`Local::ELSEWHERE`] and the weight 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Local {
    /// The first.
    pub first: usize,
    /// How many follow each other.
    pub n: usize,
}

impl Local {
    /// The id of an expert of another part. Its row of an [`Op::Experts`] is zero.
    pub const ELSEWHERE: u32 = u32::MAX;

    /// Makes the choice of all experts that of this part.
    pub fn apply(self, ids: &mut [u32], weights: &mut [f32]) {
        for (id, weight) in ids.iter_mut().zip(weights) {
            match (*id as usize).checked_sub(self.first).filter(|&own| own < self.n) {
                Some(own) => *id = own as u32,
                None => (*id, *weight) = (Local::ELSEWHERE, 0.0),
            }
        }
    }
}

/// From router logits to scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Score {
    /// Softmax over all experts (Qwen3-MoE, Mixtral, DeepSeek-V2).
    Softmax,
    /// Each expert by itself (DeepSeek-V3, GLM-4.5).
    Sigmoid,
    /// The logits themselves; the weights are the softmax over the chosen ones (gpt-oss).
    Raw,
    /// The logits themselves; the weight of each is its share of a softmax, over those not chosen before it whose logit
    /// is near its own: `(own - x) / max(|x|, own) <= margin` (SparseMixer, arXiv 2409.12136).
    Sparse {
        /// Twice the jitter of the router's training.
        margin: f32,
    },
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
        Self { score: Score::Softmax, bias: None, groups: None, renormalise, scale, expert_scale: None, local: None }
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
    /// Those of longer contexts, where the model has such.
    pub long_ropes: Option<LongRopes>,
    /// Operations in order.
    pub ops: Vec<Op>,
    /// Layer of each op, as long as `ops`; `None` before the first layer and after the last. For messages, faults and
    /// the printed form only.
    pub layers: Vec<Option<u32>>,
    /// The logits, `[R, n_vocab]`; of a plan of whole texts its rows, of any width.
    pub logits: Buf,
    /// Whether a step has whole texts, whose tokens see each other: an encoder of texts (BERT). Its rows are no logits
    /// but what it makes of a text, a vector or scores, which programs return as hidden states.
    pub whole: bool,
    /// The head that drafts further tokens, where it was asked for and the model has one.
    pub draft: Option<DraftHead>,
}

/// A layer after the model's last that predicts one token further (multi-token prediction), with separate ops over the
/// weights, buffers, caches and rotary embeddings of the plan. A step runs either the model or its draft head.
///
/// A row of the head has the model's hidden state of a position and the token after it; its logits are those of the
/// token after that. It is at the position of its hidden state, in the plan's page table: rotations are relative.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftHead {
    /// The model's hidden states after its last norm, `[T, d_model]`.
    pub source: Buf,
    /// The hidden states that a step of the head is given, `[T, d_model]`: the model's, or the head's own.
    pub input: Buf,
    /// Its operations in order. They keep no recurrent state.
    pub ops: Vec<Op>,
    /// As [`Plan::layers`].
    pub layers: Vec<Option<u32>>,
    /// Its logits, `[R, n_vocab]`.
    pub logits: Buf,
}

impl Plan {
    /// Returns a plan of nothing: its logits are no buffer yet.
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
            long_ropes: None,
            ops: Vec::new(),
            layers: Vec::new(),
            logits: Buf(u32::MAX),
            whole: false,
            draft: None,
        }
    }

    /// The ops of the model, then those of its draft head.
    pub fn all_ops(&self) -> impl DoubleEndedIterator<Item = &Op> + Clone {
        self.ops.iter().chain(self.draft.iter().flat_map(|draft| &draft.ops))
    }

    /// Declaration of a buffer of this plan.
    pub fn buf(&self, buf: Buf) -> &BufDecl {
        &self.bufs[buf.0 as usize]
    }

    /// Numbers in a row that a step can be given ([`Op::Input`]); `None` where the plan takes none.
    pub fn d_input(&self) -> Option<usize> {
        let end = |op: &Op| match *op {
            Op::Input { x, first, .. } => Some(first.saturating_add(self.buf(x).width)),
            _ => None,
        };
        self.ops.iter().filter_map(end).max()
    }

    /// Whether it computes the features of an image: all its rows are given, and a step is one image or several whole
    /// ones.
    pub fn is_encoder(&self) -> bool {
        self.ops.iter().any(|op| matches!(op, Op::Input { mode: InputMode::All, .. }))
    }

    /// Whether attention with this window sees the later tokens of a span. Layers without a window stay causal in
    /// models of text (Gemma 4).
    pub fn sees_spans(&self, window: Option<usize>) -> bool {
        window.is_some() || self.is_encoder() || self.whole
    }

    /// How many positions from its own on a token sees of its span at most: windows of whole texts reach both ways.
    pub fn reach(&self, window: Option<usize>) -> usize {
        window.filter(|_| self.whole).unwrap_or(usize::MAX)
    }

    /// Rows of the smallest table of each axis of places; `usize::MAX` for an axis without one.
    pub fn n_places(&self) -> [usize; N_AXES] {
        let mut n = [usize::MAX; N_AXES];
        for op in &self.ops {
            if let Op::EmbedPlace { table, axis, .. } = *op {
                n[axis] = n[axis].min(self.weight(table).shape[0]);
            }
        }
        n
    }

    /// Rows that follow each other in one row of a [`Op::Select`], the most of them; 1 in models of text.
    pub fn n_merged(&self) -> usize {
        let merged = |op: &Op| match *op {
            Op::Select { x, out } => Some(self.buf(out).width / self.buf(x).width),
            _ => None,
        };
        self.ops.iter().filter_map(merged).max().unwrap_or(1)
    }

    /// Returns whether it has routed experts.
    pub fn has_experts(&self) -> bool {
        self.ops.iter().any(|op| matches!(op, Op::Experts { .. }))
    }

    /// Input of the logits, `[R, d]`: the rows behind the last norm. `None` where no plain matrix makes the logits.
    pub fn hidden(&self) -> Option<Buf> {
        if self.whole {
            return Some(self.logits);
        }
        self.input_of(self.logits)
    }

    /// Whether programs return a buffer: logits, hidden states, or rows that a draft head is given.
    pub fn is_returned(&self, buf: Buf) -> bool {
        buf == self.logits || self.hidden() == Some(buf) || self.draft.as_ref().is_some_and(|draft| draft.source == buf)
    }

    /// The draft head as a separate plan, over the same weights, buffers and caches; `None` where there is none.
    pub fn draft_plan(&self) -> Option<Plan> {
        let DraftHead { ops, layers, logits, .. } = self.draft.clone()?;
        Some(Plan { ops, layers, logits, draft: None, ..self.clone() })
    }

    /// The same of the draft head: what its next step is given.
    pub fn draft_hidden(&self) -> Option<Buf> {
        self.input_of(self.draft.as_ref()?.logits)
    }

    fn input_of(&self, logits: Buf) -> Option<Buf> {
        let head = |op: &Op| match op {
            Op::Linear { x, parts } if parts.iter().any(|part| part.out == logits) => Some(*x),
            _ => None,
        };
        self.all_ops().find_map(head).filter(|&x| self.buf(x).rows == Rows::Outputs)
    }

    /// Declaration of a weight of this plan.
    pub fn weight(&self, weight: Weight) -> &WeightDecl {
        &self.weights[weight.0 as usize]
    }

    /// Rotary embeddings of a program for sequences of up to `max_positions`.
    pub fn ropes_for(&self, max_positions: usize) -> &[RopeDecl] {
        match &self.long_ropes {
            Some(long) if max_positions > long.n_ctx => &long.ropes,
            _ => &self.ropes,
        }
    }

    /// The longest context that the model is made for, by training or by its scaling rule.
    pub fn n_ctx_max(&self) -> usize {
        self.long_ropes.as_ref().map_or(0, |long| long.n_ctx_max).max(self.n_ctx_train)
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
