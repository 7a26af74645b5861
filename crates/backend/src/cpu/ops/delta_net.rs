//! `delta_net`: the gated delta rule, one position after the other in every step, so that cutting a prompt changes
//! nothing.
//!
//! Columns of a head's state are independent of each other and are the lanes; sums over `d_k` are four chains, of every
//! fourth row each, which keeps the multipliers busy. A piece of work is one head of one sequence. It takes 16
//! columns through all positions of the chunk before the next 16, so that their state (8 KiB for heads of 128) stays in
//! the first cache; for that, 16 columns lie together: a head's state is `[d_v / 16][d_k][16]`, columns past the last
//! 16 as `[d_k][d_v % 16]` behind.

use model::plan::DeltaHeads;

use super::super::isa::on_isa;
use super::super::lanes::Lanes;
use super::super::mem::View;
use super::super::program::Run;
use super::super::states::StateView;
use crate::Chunk;

/// The op's buffers and weights.
pub struct DeltaNetStep {
    pub q: View,
    pub k: View,
    pub v: View,
    pub g: View,
    pub beta: View,
    pub state: StateView,
    pub heads: DeltaHeads,
    pub out: View,
}

/// `S = g·S; S += k ⊗ beta·(v - Sᵀk); out = Sᵀq` for every head and position.
pub fn delta_net(run: &mut Run, s: &DeltaNetStep) {
    let (chunks, isa, n_head) = (&run.batch.chunks, run.isa, s.heads.n_v_head);
    run.pool.run(chunks.len() * n_head, &|_, i| {
        let (chunk, head) = (chunks[i / n_head], i % n_head);
        let n = s.heads.d_k * s.heads.d_v;
        // SAFETY: the chunk's slot is in the batch and no other chunk's; the head's part of it is this piece's alone.
        let state = unsafe { s.state.part(chunk.state, head * n..(head + 1) * n) };
        one_head(isa, s, chunk, head, state);
    });
}

on_isa! { fn one_head(s: &DeltaNetStep, chunk: Chunk, head: usize, state: &mut [f32]) = one_head_lanes }

#[inline(always)]
fn one_head_lanes<L: Lanes>(s: &DeltaNetStep, chunk: Chunk, head: usize, state: &mut [f32]) {
    let DeltaHeads { d_k, d_v, .. } = s.heads;
    let mut c = 0;
    while c + 16 <= d_v {
        columns::<L, true>(s, chunk, head, c, 16, &mut state[c * d_k..][..16 * d_k]);
        c += 16;
    }
    if c < d_v {
        columns::<L, false>(s, chunk, head, c, d_v - c, &mut state[c * d_k..]);
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
#[inline(always)]
fn columns<L: Lanes, const WHOLE: bool>(
    s: &DeltaNetStep,
    chunk: Chunk,
    head: usize,
    c: usize,
    width: usize,
    state: &mut [f32],
) {
    let DeltaHeads { d_k, d_v, .. } = s.heads;
    let width = if WHOLE { 16 } else { width };
    assert_eq!(state.len(), d_k * width);
    let state = state.as_mut_ptr();
    let k_at = s.heads.k_head(head) * d_k;
    for t in chunk.first as usize..(chunk.first + chunk.len) as usize {
        // SAFETY: rows of the step, which are not written during this op. Every `i` is below `d_k`, the length of q and
        // k and of the state, whose rows are this piece's; the columns of the output are too.
        unsafe {
            let (q, k) = (s.q.row(t)[k_at..][..d_k].as_ptr(), s.k.row(t)[k_at..][..d_k].as_ptr());
            let (g, beta) = (s.g.row(t)[head], s.beta.row(t)[head]);
            let g = L::splat(g);
            let known = sum_rows!(L, d_k, |i, sum| {
                load::<L, WHOLE>(state.add(i * width), width).fma(L::splat(*k.add(i)), sum)
            });
            let v = L::load_at(&s.v.row(t)[head * d_v..][..d_v], c, 0.0);
            let delta = v.sub(g.mul(known)).mul(L::splat(beta));
            let y = sum_rows!(L, d_k, |i, sum| {
                let row = state.add(i * width);
                let new = delta.fma(L::splat(*k.add(i)), g.mul(load::<L, WHOLE>(row, width)));
                store::<L, WHOLE>(new, row, width);
                new.fma(L::splat(*q.add(i)), sum)
            });
            y.store_at(s.out.part_mut(t, head * d_v + c..head * d_v + c + width), 0);
        }
    }
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
