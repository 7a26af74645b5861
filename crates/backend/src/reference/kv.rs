//! The paged cache and attention over it. A page is found by its block of positions in the sequence's table.

use model::plan::CacheDecl;

use super::ops::softcap;
use crate::{Batch, CacheType, Chunk, CompileError, KvType, Limits, PAGE};

/// Keys and values of one layer, f32.
pub struct Kv {
    decl: CacheDecl,
    /// What its numbers are rounded to.
    rounds: CacheType,
    k: Vec<f32>, // [n_pages, PAGE, n_kv, d_k]
    v: Vec<f32>, // [n_pages, PAGE, n_kv, d_v]; empty when values are a part of the keys
}

/// Parameters of the scores.
pub struct Scores<'a> {
    pub n_head: usize,
    pub scale: f32,
    pub window: Option<usize>,
    /// The window begins at a multiple of its length.
    pub chunked: bool,
    pub softcap: Option<f32>,
    /// Positions that are seen, u32 `[T, n]`; all of them without.
    pub chosen: Option<(&'a [u32], usize)>,
    /// Whether tokens see the later ones of their span.
    pub spans: bool,
    /// How many positions from its own on a token sees at most.
    pub reach: usize,
    /// `[n_head]`.
    pub sinks: Option<Vec<f32>>,
}

impl Kv {
    pub fn new(decl: CacheDecl, rounds: CacheType, limits: Limits) -> Result<Self, CompileError> {
        let n_pages = if decl.window.is_some() { limits.n_window_pages } else { limits.n_pages };
        let room = |d: usize| -> Result<Vec<f32>, CompileError> {
            let n = n_pages.saturating_mul(PAGE).saturating_mul(decl.n_kv * d);
            let mut values = Vec::new();
            let error = CompileError::Memory { what: "the cache of a layer", bytes: n.saturating_mul(4) };
            values.try_reserve_exact(n).map_err(|_| error)?;
            values.resize(n, f32::NAN);
            Ok(values)
        };
        Ok(Self { decl, rounds, k: room(decl.d_k)?, v: room(if decl.v_in_k { 0 } else { decl.d_v })? })
    }

    /// Writes the keys `[T, n_kv · d_k]` and values `[T, n_kv · d_v]` of the step's tokens at their positions.
    pub fn append(&mut self, batch: &Batch, k: &[f32], v: Option<&[f32]>) {
        let (k_row, v_row) = (self.decl.n_kv * self.decl.d_k, self.decl.n_kv * self.decl.d_v);
        for (chunk, token, pos) in tokens(batch) {
            let slot = self.slot(batch, chunk, pos);
            let CacheType { k: of_k, v: of_v } = self.rounds;
            let [k_rotation, v_rotation] = self.rounds.rotations(&self.decl);
            let write = |t: KvType, rotation: usize, width: usize, x: &[f32], out: &mut [f32]| {
                out.copy_from_slice(x);
                out.chunks_exact_mut(width).for_each(|head| t.round(rotation, head));
            };
            let (k, k_out) = (&k[token * k_row..][..k_row], &mut self.k[slot * k_row..][..k_row]);
            write(of_k, k_rotation, self.decl.d_k, k, k_out);
            if let Some(v) = v {
                let (v, v_out) = (&v[token * v_row..][..v_row], &mut self.v[slot * v_row..][..v_row]);
                write(of_v, v_rotation, self.decl.d_v, v, v_out);
            }
        }
    }

    /// `softmax(q·kᵀ·scale)·v` over the positions each token sees; `[T, n_head · d_v]`. A token of a span also sees
    /// the later ones of it, where such are seen.
    pub fn attention(&self, batch: &Batch, q: &[f32], params: Scores) -> Vec<f32> {
        let CacheDecl { n_kv, d_k, d_v, v_in_k, .. } = self.decl;
        let (values, v_stride) = if v_in_k { (&self.k, d_k) } else { (&self.v, d_v) };
        let mut out = Vec::with_capacity(batch.tokens.len() * params.n_head * d_v);
        for (chunk, token, pos) in tokens(batch) {
            let first = match params.window {
                Some(chunk) if params.chunked => pos - pos % chunk,
                window => window.map_or(0, |window| (pos + 1).saturating_sub(window)),
            };
            let mut spans = batch.given.spans.iter().filter(|_| params.spans);
            let span = spans.find(|span| span.contains(&(token as u32)));
            let end = span.map_or(pos + 1, |span| (chunk.pos + span.end - chunk.first) as usize);
            let end = end.min(pos.saturating_add(params.reach));
            let seen: Vec<usize> = match params.chosen {
                Some((all, n)) => all[token * n..][..n].iter().map(|&p| p as usize).filter(|p| *p < end).collect(),
                None => (first..end).collect(),
            };
            let slots: Vec<usize> = seen.into_iter().map(|p| self.slot(batch, chunk, p)).collect();
            for head in 0..params.n_head {
                let kv_head = head / (params.n_head / n_kv);
                let q = &q[(token * params.n_head + head) * d_k..][..d_k];
                let scores: Vec<f64> = slots
                    .iter()
                    .map(|slot| {
                        let k = &self.k[(slot * n_kv + kv_head) * d_k..][..d_k];
                        let dot: f64 = q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
                        let score = dot * f64::from(params.scale);
                        params.softcap.map_or(score, |cap| f64::from(softcap(score as f32, cap)))
                    })
                    .collect();
                let sink = params.sinks.as_ref().map(|sinks| f64::from(sinks[head]));
                let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
                let shares: Vec<f64> = scores.iter().map(|s| libm::exp(s - max)).collect();
                let total = shares.iter().sum::<f64>() + sink.map_or(0.0, |sink| libm::exp(sink - max));
                let mut sums = vec![0.0; d_v];
                for (&slot, share) in slots.iter().zip(&shares) {
                    let v = &values[(slot * n_kv + kv_head) * v_stride..][..d_v];
                    sums.iter_mut().zip(v).for_each(|(sum, &v)| *sum += share * f64::from(v));
                }
                out.extend(sums.into_iter().map(|sum| (sum / total) as f32));
            }
        }
        out
    }

    /// The best `n` positions of each token by `Σ_h weights[t,h] · max(q[t,h]·k, 0)`, ascending, then `u32::MAX`;
    /// u32 `[T, n]`.
    pub fn choose(&self, batch: &Batch, q: &[f32], weights: &[f32], n: usize) -> Vec<u32> {
        let (d, n_head) = (self.decl.d_k, weights.len() / batch.tokens.len().max(1));
        let mut out = Vec::with_capacity(batch.tokens.len() * n);
        for (chunk, token, pos) in tokens(batch) {
            let score = |p: usize| -> f64 {
                let k = &self.k[self.slot(batch, chunk, p) * d..][..d];
                let heads = q[token * n_head * d..].chunks_exact(d).zip(&weights[token * n_head..][..n_head]);
                let dot = |q: &[f32]| -> f64 { q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum() };
                let sum: f64 = heads.map(|(q, &weight)| f64::from(weight) * dot(q).max(0.0)).sum();
                if sum.is_nan() { f64::NEG_INFINITY } else { sum + 0.0 }
            };
            let mut ranked: Vec<(f64, u32)> = (0..=pos).map(|p| (score(p), p as u32)).collect();
            // Stable: ties stay with the earlier position.
            ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
            let mut best: Vec<u32> = ranked.into_iter().map(|(_, p)| p).take(n).collect();
            best.sort_unstable();
            best.resize(n, u32::MAX);
            out.extend(best);
        }
        out
    }

    /// Index of a position of a sequence in the cache.
    fn slot(&self, batch: &Batch, chunk: &Chunk, pos: usize) -> usize {
        batch.page(chunk, self.decl.window.is_some(), pos / PAGE) as usize * PAGE + pos % PAGE
    }
}

/// Chunk, index in the step and position of every token of the step.
fn tokens(batch: &Batch) -> impl Iterator<Item = (&Chunk, usize, usize)> {
    batch.chunks.iter().flat_map(|chunk| {
        (0..chunk.len as usize).map(move |i| (chunk, chunk.first as usize + i, chunk.pos as usize + i))
    })
}
