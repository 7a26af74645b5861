//! Cost of a plan in memory traffic and space: bytes of weights by kind, bytes per decoded token, bytes of cache.
//!
//! Kinds follow from the ops that read a weight, never from its name.

use std::collections::HashSet;

use quant::{PlaneBytes, WeightType};

use super::{Buf, CacheDecl, Op, Plan, Weight, WeightDecl};

/// Purpose of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// The embedding table, also when it is the output matrix too.
    Embed,
    /// Projections into and out of attention of any kind, with their norms and small parameters.
    Attention,
    /// Dense feed-forward projections.
    FeedForward,
    /// Routers.
    Router,
    /// Stacked experts.
    Experts,
    /// The output matrix, when it is a separate tensor.
    Output,
    /// Norms over the residual stream.
    Norm,
}

impl Kind {
    /// All kinds, in printing order.
    pub const ALL: [Self; 7] =
        [Self::Embed, Self::Attention, Self::FeedForward, Self::Router, Self::Experts, Self::Output, Self::Norm];

    /// Name for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Embed => "embed",
            Self::Attention => "attention",
            Self::FeedForward => "feed-forward",
            Self::Router => "router",
            Self::Experts => "experts",
            Self::Output => "output",
            Self::Norm => "norm",
        }
    }
}

/// Bytes of a row in all its planes.
fn total_row_bytes(dtype: WeightType, n: usize) -> usize {
    dtype.plane_bytes(n).map_or(0, PlaneBytes::total)
}

impl WeightDecl {
    /// Bytes of the whole tensor in all its planes. 0 for a shape that blocks do not divide, which no valid plan has.
    pub fn bytes(&self) -> usize {
        let Some((&row, outer)) = self.shape.split_last() else { return 0 };
        outer.iter().fold(total_row_bytes(self.dtype, row), |n, &axis| n.saturating_mul(axis))
    }

    /// Number of values.
    pub fn n_values(&self) -> usize {
        self.shape.iter().fold(1, |n, &axis| n.saturating_mul(axis))
    }
}

impl CacheDecl {
    /// Numbers that one position takes.
    pub fn numbers(&self) -> usize {
        self.n_kv * (self.d_k + if self.v_in_k { 0 } else { self.d_v })
    }
}

impl Plan {
    /// Returns the kind of each weight, `[weights]`.
    pub fn kinds(&self) -> Vec<Kind> {
        let mut kinds = vec![Kind::Norm; self.weights.len()];
        let fed = self.fed_by_attention();
        let feeds = self.feeds_attention(&fed);
        let mut routed_bufs = Vec::new();
        for op in self.all_ops() {
            if let Op::Route { logits, .. } = op {
                routed_bufs.push(*logits);
            }
        }
        routed_bufs.sort_unstable();
        let outputs = [Some(self.logits), self.draft.as_ref().map(|draft| draft.logits)];
        let mut set = |w: Weight, kind| kinds[w.0 as usize] = kind;
        for op in self.all_ops() {
            match op {
                Op::Linear { x, parts } => {
                    for part in parts {
                        let kind = if outputs.contains(&Some(part.out)) {
                            Kind::Output
                        } else if fed.contains(x) || feeds.contains(&part.out) {
                            Kind::Attention
                        } else if routed_bufs.binary_search(&part.out).is_ok() {
                            Kind::Router
                        } else {
                            Kind::FeedForward
                        };
                        set(part.w, kind);
                        part.bias.iter().for_each(|&bias| set(bias, kind));
                    }
                }
                Op::HeadNorm { w: Some(w), .. } | Op::HeadLinear { w, .. } | Op::GatedNorm { w, .. } => {
                    set(*w, Kind::Attention)
                }
                Op::CausalConv { .. } => op.weights().into_iter().for_each(|w| set(w, Kind::Attention)),
                Op::DecayBeta { a_log, dt_bias, .. } => {
                    [*a_log, *dt_bias].into_iter().for_each(|w| set(w, Kind::Attention))
                }
                Op::RmsNorm { x, w, .. } if feeds.contains(x) => set(*w, Kind::Attention),
                Op::GatedLinear { gate, up, .. } => [*gate, *up].into_iter().for_each(|w| set(w, Kind::FeedForward)),
                Op::Attention { sinks: Some(sinks), .. } => set(*sinks, Kind::Attention),
                Op::DeltaNet { .. } => op.weights().into_iter().for_each(|w| set(w, Kind::Attention)),
                Op::Experts { .. } => op.weights().into_iter().for_each(|w| set(w, Kind::Experts)),
                Op::Route { .. } => op.weights().into_iter().for_each(|w| set(w, Kind::Router)),
                // Norms of the residual stream, and scales beside them. The table of embeddings comes below.
                Op::RmsNorm { .. }
                | Op::Combine { .. }
                | Op::ScaleBy { .. }
                | Op::AddBias { .. }
                | Op::Embed { .. }
                | Op::EmbedPlace { .. }
                | Op::Input { .. } => {}
                Op::HeadNorm { w: None, .. }
                | Op::Center { .. }
                | Op::Attention { sinks: None, .. }
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
                | Op::Gelu { .. }
                | Op::Clamp { .. }
                | Op::Constant { .. }
                | Op::Softcap { .. }
                | Op::AllReduce { .. } => {}
            }
        }
        // Last, so that a tied table counts as embeddings.
        for op in self.all_ops() {
            if let Op::Embed { table, .. } | Op::EmbedPlace { table, .. } = op {
                set(*table, Kind::Embed);
            }
        }
        kinds
    }

    /// Buffers on the path from the residual stream into attention, its gates included.
    fn feeds_attention(&self, fed: &HashSet<Buf>) -> HashSet<Buf> {
        let mut feeds = HashSet::new();
        // Backwards, so that one pass sees the last writer of a buffer first.
        for op in self.all_ops().rev() {
            match op {
                Op::KvAppend { k, v, .. } => feeds.extend([Some(*k), *v].into_iter().flatten()),
                Op::Attention { q, .. } => feeds.extend([*q]),
                Op::Choose { q, weights, .. } => feeds.extend([*q, *weights]),
                Op::Center { x, out } if feeds.contains(out) && !self.is_stream(*x) => feeds.extend([*x]),
                Op::GateBy { x, gate, .. } if fed.contains(x) || feeds.contains(x) => feeds.extend([*gate]),
                Op::GatedAct { gate, up, .. } if fed.contains(up) => feeds.extend([*gate]),
                Op::DeltaNet { q, k, v, .. } => feeds.extend([*q, *k, *v]),
                Op::CausalConv { x, .. } => feeds.extend([*x]),
                Op::GatedNorm { gate, .. } => feeds.extend([*gate]),
                Op::DecayBeta { a, b, .. } => feeds.extend([Some(*a), *b].into_iter().flatten()),
                Op::Linear { x, parts } if parts.iter().any(|part| feeds.contains(&part.out)) => feeds.extend([*x]),
                Op::SplitHeads { x, parts, .. } if parts.iter().any(|(_, part)| feeds.contains(part)) => {
                    feeds.extend([*x]);
                }
                Op::JoinHeads { parts, out, .. } if feeds.contains(out) => {
                    feeds.extend(parts.iter().map(|(_, part)| *part));
                }
                Op::HeadLinear { x, out, .. } if feeds.contains(out) => feeds.extend([*x]),
                Op::RmsNorm { x, residual: None, out, .. } if feeds.contains(out) && !self.is_stream(*x) => {
                    feeds.extend([*x]);
                }
                // In place: the buffer feeds attention already, or is not on the path.
                Op::HeadNorm { .. }
                | Op::Rope { .. }
                | Op::Scale { .. }
                | Op::ScaleBy { .. }
                | Op::AddBias { .. }
                | Op::Gelu { .. }
                | Op::Clamp { .. }
                | Op::Constant { .. }
                | Op::Softcap { .. }
                | Op::AllReduce { .. } => {}
                Op::GateBy { .. }
                | Op::Linear { .. }
                | Op::SplitHeads { .. }
                | Op::JoinHeads { .. }
                | Op::HeadLinear { .. }
                | Op::RmsNorm { .. }
                | Op::Center { .. }
                | Op::Embed { .. }
                | Op::EmbedPlace { .. }
                | Op::Input { .. }
                | Op::GatedLinear { .. }
                | Op::GatedAct { .. }
                | Op::Add { .. }
                | Op::Route { .. }
                | Op::Experts { .. }
                | Op::Combine { .. }
                | Op::Select { .. } => {}
            }
        }
        feeds
    }

    /// Buffers on the path out of attention, up to the projection into the residual stream.
    fn fed_by_attention(&self) -> HashSet<Buf> {
        let mut fed = HashSet::new();
        for op in self.all_ops() {
            match op {
                Op::Attention { out, .. } | Op::DeltaNet { out, .. } | Op::CausalConv { out, .. } => fed.extend([*out]),
                Op::GatedAct { up, out, .. } if fed.contains(up) => fed.extend([*out]),
                Op::Select { x, out } | Op::HeadLinear { x, out, .. } if fed.contains(x) => fed.extend([*out]),
                // In place, or the end of the path: a projection into the residual stream. Others start no path.
                Op::GateBy { .. } | Op::GatedNorm { .. } | Op::HeadNorm { .. } | Op::Rope { .. } => {}
                Op::Select { .. }
                | Op::HeadLinear { .. }
                | Op::Embed { .. }
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
                | Op::SplitHeads { .. }
                | Op::JoinHeads { .. }
                | Op::GatedAct { .. }
                | Op::Add { .. }
                | Op::KvAppend { .. }
                | Op::Choose { .. }
                | Op::Route { .. }
                | Op::Experts { .. }
                | Op::Combine { .. }
                | Op::Scale { .. }
                | Op::ScaleBy { .. }
                | Op::DecayBeta { .. }
                | Op::Softcap { .. }
                | Op::AllReduce { .. } => {}
            }
        }
        fed
    }

    /// Returns whether a buffer is (part of) the residual stream: embeddings, and buffers that ops add to.
    fn is_stream(&self, buf: Buf) -> bool {
        self.all_ops().any(|op| match op {
            Op::Embed { out, .. } => *out == buf,
            Op::Add { x, .. } | Op::Combine { x, .. } | Op::RmsNorm { x, residual: Some(_), .. } => *x == buf,
            _ => false,
        })
    }

    /// Bytes of all weights by kind, in the order of [`Kind::ALL`], without kinds that have none.
    pub fn weight_bytes(&self) -> Vec<(Kind, usize)> {
        let kinds = self.kinds();
        let of = |kind| self.weights.iter().zip(&kinds).filter(|&(_, &k)| k == kind).map(|(w, _)| w.bytes()).sum();
        Kind::ALL.into_iter().map(|kind| (kind, of(kind))).filter(|&(_, bytes)| bytes > 0).collect()
    }

    /// Bytes of weights that decoding one token reads: only the used experts, and one row of the embeddings. What
    /// drafts read is left out.
    pub fn bytes_per_token(&self) -> usize {
        self.ops.iter().map(|op| self.bytes_of(op)).sum()
    }

    /// Returns the bytes of these that one op of the plan reads.
    pub fn bytes_of(&self, op: &Op) -> usize {
        self.active(op, WeightDecl::bytes, |w| total_row_bytes(w.dtype, w.shape[1]))
    }

    /// Parameters that decoding one token uses, counted as [`Plan::bytes_per_token`] counts.
    pub fn active_params(&self) -> usize {
        self.ops.iter().map(|op| self.active(op, WeightDecl::n_values, |w| w.shape[1])).sum()
    }

    /// Returns all parameters.
    pub fn n_params(&self) -> usize {
        self.weights.iter().map(WeightDecl::n_values).sum()
    }

    /// Returns the widest window of the caches that keep one.
    pub fn window(&self) -> Option<usize> {
        self.caches.iter().filter_map(|c| c.window).max()
    }

    fn active(&self, op: &Op, all: impl Fn(&WeightDecl) -> usize, row: impl Fn(&WeightDecl) -> usize) -> usize {
        match op {
            Op::Embed { table, .. } | Op::EmbedPlace { table, .. } => row(self.weight(*table)),
            Op::Experts { ids, .. } => {
                let n_used = self.buf(*ids).width;
                let mut stacks = op.weights();
                // Experts without a gate name one stack twice.
                stacks.dedup();
                stacks.into_iter().map(|w| all(self.weight(w)) / self.weight(w).shape[0] * n_used).sum()
            }
            other => other.weights().into_iter().map(|w| all(self.weight(w))).sum(),
        }
    }
}
