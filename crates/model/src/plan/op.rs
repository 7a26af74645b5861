//! The operations of a plan, and what each reads and writes.
//!
//! Knows no plan: indices into one are all that an operation has.

use super::{Buf, Cache, DeltaHeads, Gate, GateFactor, Gelu, InputMode, Rope, Router, State, Weight};

/// One operation. Field names: `x` is the input, `out` the output; shapes are in the comments.
#[allow(missing_docs)]
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// `out[t,:] = dequant(table[id[t],:]) · scale`.
    Embed {
        table: Weight, // [n_vocab, d]
        scale: f32,
        out: Buf, // [T, d]
    },
    /// `out[t,:] = dequant(table[place[t][axis],:])`: learned positions, and rows for the first and second text of a
    /// pair, which are axes of a token's place.
    EmbedPlace {
        table: Weight, // [n, d]
        axis: usize,
        out: Buf, // [T, d]
    },
    /// Rows that the step is given, the numbers from `first` on: in place of the rows of `x`, or added to them.
    Input {
        x: Buf, // [T, d]
        first: usize,
        mode: InputMode,
    },
    /// `out[t,n] = Σ_k w[n,k]·x[t,k] (+ bias[n])` for every part; parts share the input, so it is quantized once.
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
    /// `out = x - mean(x)` of each row: what a layer norm does before it is an `rms_norm`.
    Center {
        x: Buf,   // [T, d]
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
    /// `x[t,:] += w`, in place: the bias of a layer norm.
    AddBias {
        x: Buf,    // [T, d]
        w: Weight, // [d]
    },
    /// `x = gelu(x)`, in place.
    Gelu { x: Buf, form: Gelu },
    /// `x = min(max(x, low), high)`, in place: the limits of a clipped linear (Gemma 4's image encoders).
    Clamp {
        x: Buf,       // [T, d]
        low: Weight,  // [1]
        high: Weight, // [1]
    },
    /// `out[t,:] = values`: decays that no token changes (lightning attention).
    Constant {
        values: Vec<f32>, // [d]
        out: Buf,         // [T, d]
    },
    /// Writes the step's keys and values into the paged cache.
    KvAppend {
        cache: Cache,
        k: Buf,         // [T, n_kv · d_k]
        v: Option<Buf>, // [T, n_kv · d_v]; none when the cache finds values in the keys
    },
    /// Chooses the positions that attention sees (DeepSeek's sparse attention, arXiv 2512.02556): of a token's own and
    /// all before it the `n` best by `Σ_h weights[t,h] · max(q[t,h]·k, 0)`, ties to the earlier and NaN last. All of
    /// them where they are no more than `n`. They ascend in a row, and `u32::MAX` fills it up.
    Choose {
        cache: Cache, // of one head whose values are a part of its keys: nothing but keys
        q: Buf,       // [T, n_head · d_k]
        weights: Buf, // [T, n_head]
        out: Buf,     // u32 [T, n]
    },
    /// Causal attention over the cache: `out = softmax(q·kᵀ·scale)·v`, grouped heads. A token of a span that the step
    /// names sees the later ones of it too: in encoders, and in layers with a window ([`super::Plan::sees_spans`]).
    Attention {
        cache: Cache,
        q: Buf, // [T, n_head · d_k]
        n_head: usize,
        scale: f32,
        /// Sees only the last `window` positions, itself included; in plans of whole texts those before and after it
        /// that are less than `window` away ([`super::Plan::reach`]).
        window: Option<usize>,
        /// Sees the positions since the last multiple of the window instead, its own included (Llama 4).
        chunked: bool,
        /// `softcap · tanh(s / softcap)` on the scores.
        softcap: Option<f32>,
        /// Sees no more than these positions of `choose`, which may be those of an earlier layer; u32 `[T, n]`.
        chosen: Option<Buf>,
        /// Attention sinks, `[n_head]`: one extra logit per head in the softmax's denominator, without a value
        /// (gpt-oss).
        sinks: Option<Weight>,
        out: Buf, // [T, n_head · d_v]
    },
    /// Depthwise causal convolution: `out[t,c] = Σ_j w[c,j] · x[t - (width - 1) + j, c] (+ bias[c])`, then silu where
    /// the model has it. Earlier positions come from the state, the sequence's last `width - 1` rows of `x`.
    CausalConv {
        x: Buf,               // [T, d]
        w: Weight,            // [d, width]
        bias: Option<Weight>, // [d]
        silu: bool,
        state: State,
        out: Buf, // [T, d]
    },
    /// The gated delta rule (arXiv 2412.06464), for every head of v and its head of k, one position after the other:
    /// `S = g·S; S += k ⊗ beta·(v - Sᵀk); out = Sᵀq (+ skip·v)`, or the plainer rule that
    /// [`DeltaRule`](super::DeltaRule) names. The state holds `S`, `n_v_head · d_k · d_v` numbers.
    DeltaNet {
        q: Buf,               // [T, n_k_head · d_k]
        k: Buf,               // [T, n_k_head · d_k]
        v: Buf,               // [T, n_v_head · d_v]
        g: Buf,               // [T, n_v_head], or [T, n_v_head · d_k]: a decay for each row of S
        beta: Buf,            // [T, n_v_head]
        skip: Option<Weight>, // [n_v_head]
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
    /// products plus its bias where there are biases. A slot of no expert ([`super::Local::ELSEWHERE`]) counts as zeros:
    /// backends may leave its row unwritten where they keep [`Op::Combine`] from reading it.
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
    /// Copies the rows that the step returns: `out[r] = x[row[r]]`. A wider `out` has the rows that follow as well, `n`
    /// side by side: how an image encoder merges neighboring patches.
    Select {
        x: Buf,   // [T, d]
        out: Buf, // [R, n · d]
    },
    /// `x = x · scale`, in place.
    Scale { x: Buf, scale: f32 },
    /// `x = x ⊙ w`, in place: a learned scale of a layer's output (Gemma 4), or one for each number.
    ScaleBy {
        x: Buf,    // [T, d]
        w: Weight, // [1] or [d]
    },
    /// `x = x ⊙ factor(gate)`, in place; a number of the gate is for `d / n` neighbors: one for its whole row, one a
    /// head, or one for each.
    GateBy {
        x: Buf,    // [T, d]
        gate: Buf, // [T, n], where n divides d
        factor: GateFactor,
    },
    /// The gates of a gated delta rule: `g = exp(a_log · softplus(a + dt_bias))`, `beta = σ(b)`. Without `b` they are
    /// those of Mamba, whose rate is the step size that its decay has too: `beta = softplus(a + dt_bias)`. With it a
    /// head may have several decays (Kimi Linear), `m / n` that follow each other, and they may be bounded (Ling 3.0):
    /// `g = exp(bound · σ(a_log · (a + dt_bias)))`. Without it a step size may have several rates (Mamba-1), and `g` is
    /// as wide as these.
    DecayBeta {
        a: Buf,          // [T, m]
        b: Option<Buf>,  // [T, n]
        a_log: Weight,   // [n] or [n, k], -exp of what models call A_log; exp of it where there is a bound
        dt_bias: Weight, // [m]
        bound: Option<f32>,
        g_out: Buf,    // [T, m] or [T, n · k], 0 to 1
        beta_out: Buf, // [T, n]
    },
    /// `x = rms_norm(x) ⊙ w ⊙ silu(gate)` of each head's slice, in place; with the gate first
    /// `x = rms_norm(x ⊙ silu(gate)) ⊙ w` (Mamba-2).
    GatedNorm {
        x: Buf,    // [T, n_head · d_head]
        gate: Buf, // [T, n_head · d_head]
        w: Weight, // [d_head], or [n_head, d_head]
        gate_first: bool,
        eps: f32,
        n_head: usize,
        d_head: usize,
    },
    /// `x = cap · tanh(x / cap)`, in place.
    Softcap { x: Buf, cap: f32 },
    /// `x = Σ x` over all parts of a partition ([`super::partition`]), in place: in the order of the parts, so that each
    /// has the same bits.
    AllReduce { x: Buf },
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

/// Matrices, or stacks of them, of one op that are multiplied with rows of one buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Product {
    /// The matrices or stacks, all with rows as long as those of `x`.
    pub weights: Vec<Weight>,
    /// The buffer that they are multiplied with.
    pub x: Buf,
    /// The buffer whose ids choose matrices of the stacks for each row of `x`.
    pub ids: Option<Buf>,
    /// Whether the columns of the file are rows of the product.
    pub transposed: bool,
}

impl Op {
    /// Returns its name in printed plans, kernels, tests and traces.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Embed { .. } => "embed",
            Op::EmbedPlace { .. } => "embed_place",
            Op::Input { .. } => "input",
            Op::Linear { .. } => "linear",
            Op::GatedLinear { .. } => "gated_linear",
            Op::RmsNorm { .. } => "rms_norm",
            Op::Center { .. } => "center",
            Op::HeadNorm { .. } => "head_norm",
            Op::Rope { .. } => "rope",
            Op::SplitHeads { .. } => "split_heads",
            Op::JoinHeads { .. } => "join_heads",
            Op::HeadLinear { .. } => "head_linear",
            Op::GatedAct { .. } => "gated_act",
            Op::Add { .. } => "add",
            Op::AddBias { .. } => "add_bias",
            Op::Gelu { .. } => "gelu",
            Op::Clamp { .. } => "clamp",
            Op::Constant { .. } => "constant",
            Op::KvAppend { .. } => "kv_append",
            Op::Choose { .. } => "choose",
            Op::Attention { .. } => "attention",
            Op::CausalConv { .. } => "causal_conv",
            Op::DeltaNet { .. } => "delta_net",
            Op::Route { .. } => "route",
            Op::Experts { .. } => "experts",
            Op::Combine { .. } => "combine",
            Op::Select { .. } => "select",
            Op::Scale { .. } => "scale",
            Op::ScaleBy { .. } => "scale_by",
            Op::GateBy { .. } => "gate_by",
            Op::DecayBeta { .. } => "decay_beta",
            Op::GatedNorm { .. } => "gated_norm",
            Op::Softcap { .. } => "softcap",
            Op::AllReduce { .. } => "all_reduce",
        }
    }

    /// Calls `f` with every buffer of the op and its access. The validator, the memory planner and the passes learn
    /// accesses only here.
    pub fn for_each_buf_mut(&mut self, mut f: impl FnMut(&mut Buf, Access)) {
        use Access::{Read, Update, Write};
        match self {
            Op::Embed { out, .. } | Op::EmbedPlace { out, .. } | Op::Constant { out, .. } => f(out, Write),
            Op::Input { x, mode, .. } => f(x, if *mode == InputMode::All { Write } else { Update }),
            Op::Linear { x, parts } => {
                f(x, Read);
                parts.iter_mut().for_each(|part| f(&mut part.out, Write));
            }
            Op::GatedLinear { x, out, .. }
            | Op::Center { x, out }
            | Op::HeadLinear { x, out, .. }
            | Op::Select { x, out } => {
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
            | Op::AddBias { x, .. }
            | Op::Gelu { x, .. }
            | Op::Clamp { x, .. }
            | Op::Softcap { x, .. }
            | Op::AllReduce { x } => f(x, Update),
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
            Op::GateBy { x, gate, .. } | Op::GatedNorm { x, gate, .. } => {
                f(x, Update);
                f(gate, Read);
            }
            Op::DecayBeta { a, b, g_out, beta_out, .. } => {
                f(a, Read);
                b.iter_mut().for_each(|b| f(b, Read));
                f(g_out, Write);
                f(beta_out, Write);
            }
            Op::KvAppend { k, v, .. } => {
                f(k, Read);
                v.iter_mut().for_each(|v| f(v, Read));
            }
            Op::Choose { q, weights, out, .. } => {
                f(q, Read);
                f(weights, Read);
                f(out, Write);
            }
            Op::Attention { q, chosen, out, .. } => {
                f(q, Read);
                chosen.iter_mut().for_each(|chosen| f(chosen, Read));
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

    /// Returns the recurrent state that the op reads and updates. Such an op mixes the rows of a sequence, as attention
    /// does.
    pub fn state(&self) -> Option<State> {
        match self {
            Op::CausalConv { state, .. } | Op::DeltaNet { state, .. } => Some(*state),
            Op::Embed { .. }
            | Op::EmbedPlace { .. }
            | Op::Input { .. }
            | Op::AddBias { .. }
            | Op::Gelu { .. }
            | Op::Clamp { .. }
            | Op::Constant { .. }
            | Op::Linear { .. }
            | Op::GatedLinear { .. }
            | Op::RmsNorm { .. }
            | Op::Center { .. }
            | Op::HeadNorm { .. }
            | Op::Rope { .. }
            | Op::SplitHeads { .. }
            | Op::JoinHeads { .. }
            | Op::HeadLinear { .. }
            | Op::GatedAct { .. }
            | Op::Add { .. }
            | Op::KvAppend { .. }
            | Op::Choose { .. }
            | Op::Attention { .. }
            | Op::Route { .. }
            | Op::Experts { .. }
            | Op::Combine { .. }
            | Op::Select { .. }
            | Op::Scale { .. }
            | Op::ScaleBy { .. }
            | Op::GateBy { .. }
            | Op::DecayBeta { .. }
            | Op::GatedNorm { .. }
            | Op::Softcap { .. }
            | Op::AllReduce { .. } => None,
        }
    }

    /// The products of matrices in the op; none where it multiplies with vectors alone, or looks rows up.
    pub fn products(&self) -> Vec<Product> {
        let whole = |weights, x| vec![Product { weights, x, ids: None, transposed: false }];
        match *self {
            Op::Linear { x, ref parts } => whole(parts.iter().map(|part| part.w).collect(), x),
            Op::GatedLinear { x, gate, up, .. } => whole(vec![gate, up], x),
            Op::HeadLinear { x, w, transposed, .. } => vec![Product { weights: vec![w], x, ids: None, transposed }],
            Op::Experts { x, ids, gate, up, down, hidden, .. } => vec![
                Product { weights: vec![gate, up], x, ids: Some(ids), transposed: false },
                Product { weights: vec![down], x: hidden, ids: Some(ids), transposed: false },
            ],
            Op::Embed { .. }
            | Op::EmbedPlace { .. }
            | Op::Input { .. }
            | Op::AddBias { .. }
            | Op::Gelu { .. }
            | Op::Clamp { .. }
            | Op::Constant { .. }
            | Op::RmsNorm { .. }
            | Op::Center { .. }
            | Op::HeadNorm { .. }
            | Op::Rope { .. }
            | Op::SplitHeads { .. }
            | Op::JoinHeads { .. }
            | Op::GatedAct { .. }
            | Op::Add { .. }
            | Op::KvAppend { .. }
            | Op::Choose { .. }
            | Op::Attention { .. }
            | Op::CausalConv { .. }
            | Op::DeltaNet { .. }
            | Op::Route { .. }
            | Op::Combine { .. }
            | Op::Select { .. }
            | Op::Scale { .. }
            | Op::ScaleBy { .. }
            | Op::GateBy { .. }
            | Op::DecayBeta { .. }
            | Op::GatedNorm { .. }
            | Op::Softcap { .. }
            | Op::AllReduce { .. } => Vec::new(),
        }
    }

    /// Every weight of the op, in the order of its fields.
    pub fn weights(&self) -> Vec<Weight> {
        match self {
            Op::Embed { table, .. } | Op::EmbedPlace { table, .. } => vec![*table],
            Op::Linear { parts, .. } => parts.iter().flat_map(|part| [Some(part.w), part.bias]).flatten().collect(),
            Op::GatedLinear { gate, up, .. } => vec![*gate, *up],
            Op::RmsNorm { w, .. } | Op::GatedNorm { w, .. } => vec![*w],
            Op::CausalConv { w, bias, .. } => [Some(*w), *bias].into_iter().flatten().collect(),
            Op::DecayBeta { a_log, dt_bias, .. } => vec![*a_log, *dt_bias],
            Op::HeadNorm { w, .. } => w.iter().copied().collect(),
            Op::HeadLinear { w, .. } => vec![*w],
            Op::Route { router, .. } => [router.bias, router.expert_scale].into_iter().flatten().collect(),
            Op::Experts { gate, up, down, biases, .. } => {
                let biases = biases.iter().flat_map(|b| [b.gate, b.up, b.down]);
                [*gate, *up, *down].into_iter().chain(biases).collect()
            }
            Op::Attention { sinks, .. } => sinks.iter().copied().collect(),
            Op::ScaleBy { w, .. } | Op::AddBias { w, .. } => vec![*w],
            Op::Clamp { low, high, .. } => vec![*low, *high],
            Op::DeltaNet { skip, .. } => skip.iter().copied().collect(),
            Op::Combine { norm, .. } => norm.iter().map(|norm| norm.w).collect(),
            Op::Input { .. }
            | Op::Gelu { .. }
            | Op::Constant { .. }
            | Op::Center { .. }
            | Op::Rope { .. }
            | Op::SplitHeads { .. }
            | Op::JoinHeads { .. }
            | Op::GatedAct { .. }
            | Op::Add { .. }
            | Op::KvAppend { .. }
            | Op::Choose { .. }
            | Op::Select { .. }
            | Op::Scale { .. }
            | Op::GateBy { .. }
            | Op::Softcap { .. }
            | Op::AllReduce { .. } => Vec::new(),
        }
    }
}
