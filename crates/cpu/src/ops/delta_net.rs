//! `delta_net`: the gated delta rule, one position after the other in every step, so that cutting a prompt changes
//! nothing.
//!
//! The plainer rule of a sum leaves out what the key found; all else is the same.
//!
//! Columns of a head's state are independent of each other and are the lanes; sums over `d_k` are four chains, of every
//! fourth row each, which keeps the multipliers busy. A piece of work is one head of one sequence. It takes 16
//! columns through all positions of the chunk before the next 16, so that their state (8 KiB for heads of 128) stays in
//! the first cache; for that, 16 columns lie together: a head's state is `[d_v / 16][d_k][16]`, columns past the last
//! 16 as `[d_k][d_v % 16]` behind.
//!
//! Drafts advance a copy of such columns, and their k, v, g and beta are kept. Accepted drafts are the first positions
//! of the slot's next step: the same code in the same order gives the same bits.

use model::plan::{DeltaHeads, DeltaRule};

use super::super::isa::on_isa;
use super::super::lanes::Lanes;
use super::super::mem::View;
use super::super::program::Run;
use super::super::states::StateView;
use backend::{Batch, Chunk};

/// The op's buffers and weights.
pub struct DeltaNetStep {
    pub q: View,
    pub k: View,
    pub v: View,
    pub g: View,
    pub beta: View,
    pub skip: Option<Vec<f32>>, // [n_v_head]
    pub state: StateView,
    pub heads: DeltaHeads,
    pub out: View,
}

/// Numbers that are kept of a draft: k, v, g and beta of all heads, one after the other. A head has `n_decay` of g.
pub fn kept_per_draft(heads: DeltaHeads, n_decay: usize) -> usize {
    let DeltaHeads { n_k_head, n_v_head, d_k, d_v, .. } = heads;
    n_k_head * d_k + n_v_head * (d_v + n_decay + 1)
}

impl DeltaNetStep {
    fn kept_per_draft(&self) -> usize {
        kept_per_draft(self.heads, self.g.width / self.heads.n_v_head)
    }
}

/// A chunk with what its piece of work has to itself.
struct Piece<'a> {
    chunk: Chunk,
    head: usize,
    /// Drafts of the step before that were accepted.
    accepted: usize,
    /// The head's state, `[d_v / 16][d_k][16]` and the rest.
    state: &'a mut [f32],
    /// Room for the columns that drafts move, `[d_k][16]`; empty where a program takes no drafts.
    tried: &'a mut [f32],
}

/// `S = g·S; S += k ⊗ beta·(v - Sᵀk); out = Sᵀq (+ skip·v)` for every head and position.
pub fn delta_net(run: &mut Run, s: &DeltaNetStep) {
    let (chunks, isa, n_head) = (&run.batch.chunks, run.isa, s.heads.n_v_head);
    let (accepted, workers) = (run.accepted, run.workers);
    run.pool.run(chunks.len() * n_head, &|worker, i| {
        let (chunk, head) = (chunks[i / n_head], i % n_head);
        let n = s.heads.d_k * s.heads.d_v;
        // SAFETY: the chunk's slot is in the batch and no other chunk's; the head's part of it is this piece's alone.
        let state = unsafe { s.state.part(chunk.state, head * n..(head + 1) * n) };
        // SAFETY: the piece's own worker.
        let tried = unsafe { &mut workers.get(worker).tried };
        one_head(isa, s, Piece { chunk, head, accepted: accepted[chunk.state as usize] as usize, state, tried });
    });
    // When all pieces are done with the drafts that were kept before.
    let max_draft = chunks.iter().map(|chunk| chunk.n_draft as usize).max().unwrap_or(0);
    if max_draft > 0 {
        let batch = run.batch;
        run.pool.run(chunks.len() * max_draft, &|_, i| keep(batch, s, i / max_draft, i % max_draft));
    }
}

/// Keeps what moves the state past a draft of a chunk.
fn keep(batch: &Batch, s: &DeltaNetStep, chunk: usize, draft: usize) {
    let c = batch.chunks[chunk];
    if draft >= c.n_draft as usize {
        return;
    }
    let (token, n) = ((c.first + c.len - c.n_draft) as usize + draft, s.kept_per_draft());
    // SAFETY: room is kept for all drafts of a chunk, and this one's is written here alone.
    let mut kept = unsafe { s.state.kept(c.state, draft * n..(draft + 1) * n) };
    for view in [s.k, s.v, s.g, s.beta] {
        let (to, rest) = kept.split_at_mut(view.width);
        // SAFETY: a row of the step, which nobody writes during this op.
        to.copy_from_slice(unsafe { view.row(token) });
        kept = rest;
    }
}

on_isa! { fn one_head(s: &DeltaNetStep, piece: Piece<'_>) = one_head_lanes }

#[inline(always)]
fn one_head_lanes<L: Lanes>(s: &DeltaNetStep, mut piece: Piece<'_>) {
    let d_v = s.heads.d_v;
    let by_row = s.g.width != s.heads.n_v_head;
    let mut c = 0;
    while c + 16 <= d_v {
        match by_row {
            false => columns::<L, true, false>(s, &mut piece, c, 16),
            true => columns::<L, true, true>(s, &mut piece, c, 16),
        }
        c += 16;
    }
    if c < d_v {
        match by_row {
            false => columns::<L, false, false>(s, &mut piece, c, d_v - c),
            true => columns::<L, false, true>(s, &mut piece, c, d_v - c),
        }
    }
}

/// `Σ_i` over the rows of the state, in four chains. A macro, because the body must be in the caller for its
/// instruction set to hold.
macro_rules! sum_rows {
    ($L:ty, $d_k:expr, |$i:ident, $sum:ident| $body:expr) => {{
        let mut sums = [<$L>::splat(0.0); 4];
        let mut first = 0;
        while first + 4 <= $d_k {
            sum_rows!(@one sums, 0, first, $i, $sum, $body);
            sum_rows!(@one sums, 1, first, $i, $sum, $body);
            sum_rows!(@one sums, 2, first, $i, $sum, $body);
            sum_rows!(@one sums, 3, first, $i, $sum, $body);
            first += 4;
        }
        if first < $d_k {
            sum_rows!(@one sums, 0, first, $i, $sum, $body);
        }
        if first + 1 < $d_k {
            sum_rows!(@one sums, 1, first, $i, $sum, $body);
        }
        if first + 2 < $d_k {
            sum_rows!(@one sums, 2, first, $i, $sum, $body);
        }
        sums[0].add(sums[2]).add(sums[1].add(sums[3]))
    }};
    (@one $sums:ident, $chain:literal, $first:ident, $i:ident, $sum:ident, $body:expr) => {
        $sums[$chain] = {
            let ($i, $sum) = ($first + $chain, $sums[$chain]);
            $body
        }
    };
}

/// All positions for `width` columns from `c` on, whose state is `[d_k][width]`; 16 of them when they are whole lanes.
/// `BY_ROW`: each row of the state has its decay.
#[inline(always)]
fn columns<L: Lanes, const WHOLE: bool, const BY_ROW: bool>(
    s: &DeltaNetStep,
    piece: &mut Piece<'_>,
    c: usize,
    width: usize,
) {
    let DeltaHeads { d_k, d_v, .. } = s.heads;
    let width = if WHOLE { 16 } else { width };
    let &mut Piece { chunk, head, accepted, ref mut state, ref mut tried } = piece;
    let whole = &mut state[c * d_k..][..d_k * width];
    let mut state = whole.as_mut_ptr();
    let k_at = s.heads.k_head(head) * d_k;
    let (n, n_kept) = (chunk.len as usize, s.kept_per_draft());
    let first_draft = accepted + n - chunk.n_draft as usize;
    for t in 0..accepted + n {
        if t == first_draft {
            let tried = &mut tried[..d_k * width];
            tried.copy_from_slice(whole);
            state = tried.as_mut_ptr();
        }
        // SAFETY: rows of the step and accepted drafts of the slot, which nobody writes meanwhile. Every `i` is below
        // `d_k`, the length of q and k and of the state, whose rows are this piece's; the columns of the output are
        // too.
        unsafe {
            let (k, v, g, beta) = match t.checked_sub(accepted) {
                None => split(s, s.state.kept(chunk.state, t * n_kept..(t + 1) * n_kept)),
                Some(t) => {
                    let t = chunk.first as usize + t;
                    (s.k.row(t), s.v.row(t), s.g.row(t), s.beta.row(t))
                }
            };
            let (k, beta) = (k[k_at..][..d_k].as_ptr(), beta[head]);
            let n_decay = if BY_ROW { d_k } else { 1 };
            let decays = g[head * n_decay..][..n_decay].as_ptr();
            // An accepted draft's output was the step's before.
            let q = match t.checked_sub(accepted) {
                None => k,
                Some(t) => s.q.row(chunk.first as usize + t)[k_at..][..d_k].as_ptr(),
            };
            let g = L::splat(*decays);
            let decay = |i: usize| if BY_ROW { L::splat(*decays.add(i)) } else { g };
            let v = L::load_at(&v[head * d_v..][..d_v], c, 0.0);
            let new = match s.heads.rule {
                DeltaRule::Delta => {
                    let known = sum_rows!(L, d_k, |i, sum| {
                        let row = load::<L, WHOLE>(state.add(i * width), width);
                        let row = if BY_ROW { decay(i).mul(row) } else { row };
                        row.fma(L::splat(*k.add(i)), sum)
                    });
                    v.sub(if BY_ROW { known } else { g.mul(known) })
                }
                DeltaRule::Sum => v,
            };
            let delta = new.mul(L::splat(beta));
            let y = sum_rows!(L, d_k, |i, sum| {
                let row = state.add(i * width);
                let new = delta.fma(L::splat(*k.add(i)), decay(i).mul(load::<L, WHOLE>(row, width)));
                store::<L, WHOLE>(new, row, width);
                new.fma(L::splat(*q.add(i)), sum)
            });
            let y = match &s.skip {
                Some(skip) => v.fma(L::splat(skip[head]), y),
                None => y,
            };
            if let Some(t) = t.checked_sub(accepted) {
                y.store_at(s.out.part_mut(chunk.first as usize + t, head * d_v + c..head * d_v + c + width), 0);
            }
        }
    }
}

/// k, v, g and beta of a kept draft.
#[inline(always)]
fn split<'a>(s: &DeltaNetStep, kept: &'a [f32]) -> (&'a [f32], &'a [f32], &'a [f32], &'a [f32]) {
    let (k, kept) = kept.split_at(s.k.width);
    let (v, kept) = kept.split_at(s.v.width);
    let (g, beta) = kept.split_at(s.g.width);
    (k, v, g, beta)
}

/// A row of the state: 16 columns, or fewer and zeros.
///
/// # Safety
/// `p` points to `width` numbers, 16 when `WHOLE`.
#[inline(always)]
unsafe fn load<L: Lanes, const WHOLE: bool>(p: *const f32, width: usize) -> L {
    // SAFETY: the caller's promise.
    unsafe { if WHOLE { L::load(p) } else { L::load_at(std::slice::from_raw_parts(p, width), 0, 0.0) } }
}

/// Writes a row of the state.
///
/// # Safety
/// As [`load`], for writing.
#[inline(always)]
unsafe fn store<L: Lanes, const WHOLE: bool>(x: L, p: *mut f32, width: usize) {
    // SAFETY: the caller's promise.
    unsafe { if WHOLE { x.store(p) } else { x.store_at(std::slice::from_raw_parts_mut(p, width), 0) } }
}
