//! From ops to nodes: finds addresses, modules and dimensions.

use checkpoint::Checkpoint;
use model::plan::{
    Buf, ExpertBiases, InputMode, Norm, Op, Plan, RopePairing, Sharing, State, Weight, memory::Placement,
};

use super::super::args::{Matrix, Prologue};
use super::super::chosen::{self, Choice};
use super::super::delta;
use super::super::driver::Ptr;
use super::super::sources::{self, Key};
use super::super::split::{Split, plane_lens, plane_starts};
use super::super::upload::Weights;
use super::attention::{AttentionNode, attention_tile, attention_wide, heads_of_block};
use super::experts::{ExpertsNode, HostNode, HotNode, RouteNode, SlotPlaces};
use super::modules::Modules;
use super::{CacheView, ChooseNode, Chosen, DeltaTiles, Link, Mat, Node, Part, ReduceNode, StateView, View};
use backend::CompileError;

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
    pub max_tokens: usize,
    pub max_positions: usize,
    /// What delta rules of many tokens pass on.
    pub delta: Ptr,
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
    /// What adds up over the parts of a plan, where this is one.
    pub link: Option<Link>,
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
            experts: ExpertsNode {
                ids,
                n_expert: slots.n,
                gate: mats[0],
                up: mats[1],
                down: mats[2],
                is_summed: false,
                ..*experts
            },
        };
        let experts = ExpertsNode { gate, up, down, is_summed: false, ..*experts };
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
                Node::Embed { table: self.mat(sources::EMBED, table)?, axis: None, scale, out: self.view(out) }
            }
            Op::EmbedPlace { table, axis, out } => {
                let table = self.mat(sources::EMBED, table)?;
                Node::Embed { table, axis: Some(axis), scale: 1.0, out: self.view(out) }
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
            Op::Center { x, out } => Node::Center { x: self.view(x), out: self.view(out) },
            Op::HeadNorm { x, w, eps, d_head, .. } => {
                let w = self.vector_or_null(w)?;
                Node::HeadNorm { x: self.view(x), w, eps, d_head, gate: 0, n_w: 1, gate_first: false }
            }
            Op::GatedNorm { x, gate, w, gate_first, eps, d_head, .. } => {
                let (gate, n_w) = (self.view(gate).ptr, self.plan.weight(w).n_values() / d_head);
                Node::HeadNorm { x: self.view(x), w: self.vector(w)?, eps, d_head, gate, n_w, gate_first }
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
            Op::Attention { cache, q, n_head, scale, window, chunked, softcap, chosen, sinks, out } => {
                let decl = self.plan.cache(cache);
                let heads = heads_of_block(n_head / decl.n_kv, decl.d_k, decl.d_v).ok_or_else(|| {
                    let what = format!("attend over heads of {} numbers", decl.d_k.max(decl.d_v));
                    CompileError::Unsupported { backend: "cuda", what }
                })?;
                let (is_f16, max_shared, modules) = (self.is_f16, self.max_shared, &mut *self.modules);
                let module = modules.id(Key::attention(sources::ATTENTION, decl, is_f16, heads));
                let view = self.caches[cache.0 as usize];
                let widen = view.types.has_blocks().then(|| modules.id(Key::plain(sources::KV_WIDEN)));
                let of_chosen = Key::attention(sources::ATTENTION_CHOSEN, decl, is_f16, heads);
                let of_chosen = chosen.map(|list| (list, modules.id(of_chosen)));
                let wide = || modules.id(Key::attention(sources::ATTENTION_WIDE, decl, is_f16, heads));
                let wide = if self.is_wide { attention_wide(wide, decl, n_head, is_f16, max_shared) } else { None };
                Node::Attention(AttentionNode {
                    module,
                    cache: view,
                    q: self.view(q),
                    out: self.view(out),
                    sinks: self.vector_or_null(sinks)?,
                    n_head,
                    heads,
                    tile: attention_tile(module, decl, n_head, is_f16, max_shared),
                    wide,
                    v_in_k: decl.v_in_k,
                    scale,
                    window: crate::window_word(window, chunked) as usize,
                    softcap: softcap.unwrap_or(0.0),
                    sees_spans: crate::heeds_spans(self.plan, window),
                    reach: Some(self.plan.reach(window)).filter(|&reach| reach != usize::MAX).unwrap_or(0),
                    chosen: of_chosen.map(|(list, module)| {
                        let list = self.view(list);
                        let choice = Choice { n: list.width, most: self.max_positions };
                        Chosen { module, list, choice, tile: chosen::latent_tile(decl, n_head, is_f16, max_shared) }
                    }),
                    singles: None,
                    widen,
                    is_multiplied: false,
                })
            }
            Op::CausalConv { x, w, bias, silu, state, out } => {
                let width = self.plan.weight(w).shape[1];
                if width > 64 {
                    let what = format!("run a causal convolution of width {width}, at most 64");
                    return Err(CompileError::Unsupported { backend: "cuda", what });
                }
                let module = self.modules.id(Key::sized(sources::CAUSAL_CONV, "WIDTH", width));
                let (x, out) = (self.view(x), self.view(out));
                let (w, bias) = (self.vector(w)?, self.vector_or_null(bias)?);
                Node::CausalConv { module, x, w, bias, silu, width, state: self.state(state), out }
            }
            Op::DeltaNet { q, k, v, g, beta, skip, state, heads, out } => {
                if heads.d_k > 512 {
                    let what = format!("run a delta rule on keys of {} numbers, at most 512", heads.d_k);
                    return Err(CompileError::Unsupported { backend: "cuda", what });
                }
                let module = self.modules.id(Key::sized(sources::DELTA_NET, "D_K", heads.d_k));
                let inputs = [q, k, v, g, beta].map(|buf| self.view(buf));
                let is_plain = skip.is_none() && self.plan.buf(g).width == heads.n_v_head;
                let fits = is_plain && self.max_tokens >= delta::FROM && delta::fits(heads, self.max_shared);
                let tiles = fits.then(|| {
                    let (places, _) = delta::places(heads, self.max_tokens, self.delta as usize);
                    let delta::Places { keys, shares, gates, .. } = places;
                    let module = self.modules.id(Key::sized(sources::DELTA_CHUNKS, "D_K", heads.d_k));
                    DeltaTiles { module, keys, shares, gates }
                });
                let skip = self.vector_or_null(skip)?;
                Node::DeltaNet { module, tiles, inputs, skip, heads, state: self.state(state), out: self.view(out) }
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
                    is_summed: false,
                };
                match layer.filter(|_| is_host) {
                    Some(layer) => {
                        let index = if self.places.is_some() { layer } else { self.split.hosts_before(layer) };
                        Node::HostExperts(HostNode { index, experts, hot: None })
                    }
                    None => Node::Experts(experts),
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
            Op::ScaleBy { x, w } => {
                Node::ScaleBy { x: self.view(x), w: self.vector(w)?, n: self.plan.weight(w).n_values() }
            }
            Op::AddBias { x, w } => Node::AddBias { x: self.view(x), w: self.vector(w)? },
            Op::Gelu { x, form } => Node::Gelu { x: self.view(x), form },
            Op::Clamp { x, low, high } => {
                Node::Clamp { x: self.view(x), low: self.vector(low)?, high: self.vector(high)? }
            }
            Op::Constant { ref values, out } => {
                let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                Node::Constant { values: self.weights.bytes("constants", bytes)?, out: self.view(out) }
            }
            Op::GateBy { x, gate, factor } => Node::GateBy { x: self.view(x), gate: self.view(gate), factor },
            Op::DecayBeta { a, b, a_log, dt_bias, bound, g_out, beta_out } => Node::DecayBeta {
                a: self.view(a),
                b: b.map_or(0, |b| self.view(b).ptr),
                a_log: self.vector(a_log)?,
                dt_bias: self.vector(dt_bias)?,
                bound: bound.unwrap_or(0.0),
                g: self.view(g_out),
                beta: self.view(beta_out),
            },
            Op::Choose { cache, q, weights, out } => {
                let (d, view) = (self.plan.cache(cache).d_k, self.caches[cache.0 as usize]);
                let (q, weights, out) = (self.view(q), self.view(weights), self.view(out));
                Node::Choose(ChooseNode {
                    module: self.modules.id(Key::choose(d, view.types)),
                    cache: view,
                    q,
                    weights,
                    out,
                    choice: Choice { n: out.width, most: self.max_positions },
                    per: chosen::tokens_of_block(weights.width, d, self.is_f16, self.max_shared),
                })
            }
            // Where all tokens have rows, they take the places of all.
            Op::Input { x, first, mode } => Node::Input { x: self.view(x), first, add: mode == InputMode::Add },
            Op::Softcap { x, cap } => Node::Softcap { x: self.view(x), cap },
            Op::AllReduce { x } => {
                let x = self.view(x);
                let Some(link) = self.link.filter(|_| x.width.is_multiple_of(8)) else {
                    let what = format!("add up rows of {} numbers over parts of a plan", x.width);
                    return Err(CompileError::Unsupported { backend: "cuda", what });
                };
                let module = self.modules.id(Key::plain(sources::ALL_REDUCE));
                Node::AllReduce(ReduceNode { module, x, link, norm: None, is_added: false })
            }
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
