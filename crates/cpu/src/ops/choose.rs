//! `choose`: the positions that attention sees, the best by the scores of a few light heads.
//!
//! The law: a dot product runs on 16 lanes and the fixed tree, heads are added in order, and ties go to the earlier
//! position; so the choice depends on nothing but the token's query and the cache.
//!
//! A token's scores are computed in pieces of some pages, by as many threads as there are; in a second region each
//! token's are ranked. A token that sees no more positions than it may choose takes them all, without a score.

use super::super::isa::on_isa;
use super::super::lanes::{Float, Lanes};
use super::super::mem::{View, over_rows};
use super::super::program::Run;
use super::attention_tile::{unpack, unpack_blocks};
use super::kv_append::CacheView;
use backend::cache_type::rotate;
use backend::{KvType, Limits, PAGE};
use model::plan::{Op, Plan};

/// Pages of a piece of work.
const PIECE: usize = 8;
/// Heads that share the loads of a key.
const HEADS: usize = 4;

/// The op's buffers.
pub struct ChooseStep {
    pub cache: usize,
    pub q: View,
    pub weights: View,
    pub out: View,
}

/// Number of ranks that a program has room for: those of all positions, for a token of every thread.
pub fn n_ranks(plan: &Plan, limits: Limits, threads: usize) -> usize {
    match plan.all_ops().any(|op| matches!(op, Op::Choose { .. })) {
        true => limits.max_positions.saturating_mul(threads),
        false => 0,
    }
}

/// A score as a number that grows with it, and that is larger for the earlier of two positions that tie.
fn rank(score: f32, pos: usize) -> u64 {
    let bits = if score.is_nan() { f32::NEG_INFINITY } else { score }.to_bits();
    let ordered = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(ordered) << 32 | u64::from(!(pos as u32))
}

/// Ranks of a step's tokens, `[tokens][max_positions]`.
struct Ranks(*mut u64);

// SAFETY: an address; each access states its own promise.
unsafe impl Sync for Ranks {}

impl Ranks {
    /// # Safety
    /// The range is inside, and no other code uses these ranks while the slice lives.
    #[allow(clippy::mut_from_ref)]
    unsafe fn part(&self, first: usize, n: usize) -> &mut [u64] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(first), n) }
    }
}

/// Runs the op.
pub fn choose(run: &mut Run, step: &ChooseStep, cache: &CacheView) {
    let (pos, n, max_positions) = (&run.step.pos[..], step.out.width, run.max_positions);
    let n_seen = |token: usize| pos[token] as usize + 1;
    over_rows(run.pool, pos.len(), n, |_, rows| {
        for token in rows.filter(|&token| n_seen(token) <= n) {
            // SAFETY: rows are disjoint between chunks, and nothing else writes them.
            let out = unsafe { step.out.ids_mut(token) };
            out.iter_mut().zip(0..).for_each(|(out, p)| *out = if p < n_seen(token) as u32 { p } else { u32::MAX });
        }
    });
    let (isa, batch, chunk_of, workers) = (run.isa, run.batch, &run.step.chunk_of[..], run.workers);
    let ranks = Ranks(run.ranks.as_mut_ptr());
    let at_once = (run.ranks.len() / max_positions.max(1)).max(1);
    for first in (0..pos.len()).step_by(at_once) {
        let n_tokens = at_once.min(pos.len() - first);
        let most = (first..first + n_tokens).map(n_seen).max().unwrap_or(0);
        if most <= n {
            continue;
        }
        let pieces = most.div_ceil(PIECE * PAGE);
        run.pool.run(n_tokens * pieces, &|worker, i| {
            let (row, piece) = (i / pieces, i % pieces);
            let (token, seen) = (first + row, n_seen(first + row));
            if seen <= n {
                return;
            }
            // SAFETY: the worker index is ours; queries and weights are not written during this op.
            let (tile, q, weights) =
                unsafe { (workers.get(worker).attention.tile(), step.q.row(token), step.weights.row(token)) };
            for page in piece * PIECE..seen.div_ceil(PAGE).min((piece + 1) * PIECE) {
                let len = (seen - page * PAGE).min(PAGE);
                let stride = cache.v_stride();
                // SAFETY: `Batch::check` saw the pages of the token's positions; their first `len` rows were written
                // and are not during this op. The piece alone writes its ranks.
                let (keys, ranks) = unsafe {
                    let bytes = cache.tile(batch.page(&batch.chunks[chunk_of[token] as usize], false, page), 0);
                    let keys = match cache.types.k {
                        KvType::F32 => std::slice::from_raw_parts(bytes.cast_const().cast::<f32>(), len * stride),
                        KvType::F16 => {
                            unpack(isa, std::slice::from_raw_parts(bytes.cast_const().cast(), len * stride), tile);
                            &*tile
                        }
                        t @ (KvType::Q8_0 | KvType::Q4_0) => {
                            unpack_blocks(isa, t, bytes.cast_const(), cache.d_k, len, tile);
                            rotate(&mut tile[..len * cache.d_k], cache.rotations[0]);
                            &*tile
                        }
                    };
                    (keys, ranks.part(row * max_positions + page * PAGE, len))
                };
                let mut scores = [0.0; PAGE];
                scores_on(isa, q, weights, keys, stride, &mut scores[..len]);
                let positions = page * PAGE..;
                ranks.iter_mut().zip(scores).zip(positions).for_each(|((r, score), pos)| *r = rank(score, pos));
            }
        });
        run.pool.run(n_tokens, &|_, row| {
            let seen = n_seen(first + row);
            if seen <= n {
                return;
            }
            // SAFETY: the token's ranks and its row are this chunk's alone.
            let (ranks, out) = unsafe { (ranks.part(row * max_positions, seen), step.out.ids_mut(first + row)) };
            ranks.select_nth_unstable_by(n - 1, |a, b| b.cmp(a));
            out.iter_mut().zip(ranks).for_each(|(out, rank)| *out = !(*rank as u32));
            out.sort_unstable();
        });
    }
}

on_isa! {
    /// `scores[p] = Σ_h weights[h] · max(q[h]·keys[p], 0)`; keys are rows `stride` apart, with zeros after their end.
    fn scores_on(q: &[f32], weights: &[f32], keys: &[f32], stride: usize, scores: &mut [f32]) = scores_lanes
}

#[inline(always)]
fn scores_lanes<L: Lanes>(q: &[f32], weights: &[f32], keys: &[f32], stride: usize, scores: &mut [f32]) {
    let d = q.len() / weights.len();
    for (key, score) in keys.chunks_exact(stride).zip(scores) {
        let mut sum = 0.0;
        for (q, weights) in q.chunks(HEADS * d).zip(weights.chunks(HEADS)) {
            let mut dots = [L::splat(0.0); HEADS];
            for at in (0..d).step_by(16) {
                let key = L::load_at(key, at, 0.0);
                for (dot, q) in dots.iter_mut().zip(q.chunks_exact(d)) {
                    *dot = L::load_at(q, at, 0.0).fma(key, *dot);
                }
            }
            for (dot, &weight) in dots.iter().zip(weights) {
                sum = Float::fma(weight, Float::max(dot.tree_sum(), 0.0), sum);
            }
        }
        *score = sum;
    }
}

#[cfg(test)]
mod tests {
    use super::rank;

    #[test]
    fn ranks_order_scores_and_then_positions() {
        let scores = [f32::INFINITY, 3.0, 1e-40, 0.0, -1e-40, -2.5, f32::NEG_INFINITY];
        assert!(scores.windows(2).all(|pair| rank(pair[0], 9) > rank(pair[1], 1)));
        assert!(rank(1.0, 4) > rank(1.0, 5) && rank(f32::NAN, 7) == rank(f32::NEG_INFINITY, 7));
    }
}
