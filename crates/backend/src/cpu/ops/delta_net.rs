//! `delta_net`: the gated delta rule, one position after the other in every step, so that cutting a prompt changes nothing.
//!
//! Columns of a head's state are independent of each other and are the lanes; sums over `d_k` are two chains, of the even
//! and the odd rows. A piece of work is one head of one sequence. It takes 32 columns through all positions of the chunk
//! before the next 32, so that their state (16 KiB for heads of 128) stays in the first cache; for that, 16 columns
//! lie together: a head's state is `[d_v / 16][d_k][16]`, columns past the last 16 as `[d_k][d_v % 16]` behind.

use model::plan::DeltaHeads;

use super::super::isa::on_isa;
use super::super::lanes::Lanes;
use super::super::mem::View;
use super::super::program::Run;
use super::super::states::StateView;
use crate::Chunk;

/// What the op reads and writes.
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
    while c + 32 <= d_v {
        columns::<L, 2>(s, chunk, head, c, 16, &mut state[c * d_k..][..32 * d_k]);
        c += 32;
    }
    if c + 16 <= d_v {
        columns::<L, 1>(s, chunk, head, c, 16, &mut state[c * d_k..][..16 * d_k]);
        c += 16;
    }
    if c < d_v {
        columns::<L, 1>(s, chunk, head, c, d_v - c, &mut state[c * d_k..]);
    }
}

/// All positions for the columns from `c` on: `C` blocks of `width` columns, whose states `[d_k][width]` follow each other.
#[inline(always)]
fn columns<L: Lanes, const C: usize>(
    s: &DeltaNetStep,
    chunk: Chunk,
    head: usize,
    c: usize,
    width: usize,
    state: &mut [f32],
) {
    let DeltaHeads { n_v_head, d_k, d_v, .. } = s.heads;
    assert_eq!(state.len(), C * d_k * width);
    let state = state.as_mut_ptr();
    // SAFETY: `i` is below `d_k` and `j` below `C`: a row of the state, whose length was just compared.
    let row = |i: usize, j: usize| unsafe { state.add((j * d_k + i) * width) };
    let k_at = s.heads.k_head(head) * d_k;
    for t in chunk.first as usize..(chunk.first + chunk.len) as usize {
        // SAFETY: rows of the step, which nobody writes during this op.
        let (q, k, v, at) =
            unsafe { (&s.q.row(t)[k_at..][..d_k], &s.k.row(t)[k_at..][..d_k], s.v.row(t), t * n_v_head + head) };
        // SAFETY: as above.
        let (g, beta) = unsafe { (L::splat(*s.g.ptr().add(at)), L::splat(*s.beta.ptr().add(at))) };
        let mut known = [[L::splat(0.0); C]; 2];
        for i in (0..d_k).step_by(2) {
            for p in 0..2 {
                if i + p < d_k {
                    let k = L::splat(k[i + p]);
                    for j in 0..C {
                        known[p][j] = load::<L>(row(i + p, j), width).fma(k, known[p][j]);
                    }
                }
            }
        }
        let mut delta = [L::splat(0.0); C];
        for j in 0..C {
            let known = known[0][j].add(known[1][j]);
            let v = L::load_at(&v[head * d_v..][..d_v], c + 16 * j, 0.0);
            delta[j] = v.sub(g.mul(known)).mul(beta);
        }
        let mut y = [[L::splat(0.0); C]; 2];
        for i in (0..d_k).step_by(2) {
            for p in 0..2 {
                if i + p < d_k {
                    let (q, k) = (L::splat(q[i + p]), L::splat(k[i + p]));
                    for j in 0..C {
                        let new = delta[j].fma(k, g.mul(load::<L>(row(i + p, j), width)));
                        store(new, row(i + p, j), width);
                        y[p][j] = new.fma(q, y[p][j]);
                    }
                }
            }
        }
        // SAFETY: these columns of the row are this piece's.
        let out = unsafe { s.out.part_mut(t, head * d_v + c..head * d_v + c + (C - 1) * 16 + width) };
        for j in 0..C {
            y[0][j].add(y[1][j]).store_at(out, 16 * j);
        }
    }
}

/// A row of the state: 16 columns, or fewer and zeros.
#[inline(always)]
fn load<L: Lanes>(p: *const f32, width: usize) -> L {
    // SAFETY: `columns` makes only pointers to rows of `width` numbers.
    unsafe { if width == 16 { L::load(p) } else { L::load_at(std::slice::from_raw_parts(p, width), 0, 0.0) } }
}

#[inline(always)]
fn store<L: Lanes>(x: L, p: *mut f32, width: usize) {
    // SAFETY: as in `load`; the rows are this piece's.
    unsafe { if width == 16 { x.store(p) } else { x.store_at(std::slice::from_raw_parts_mut(p, width), 0) } }
}
