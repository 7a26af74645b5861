//! `causal_conv`: a weighted sum of each channel's last few positions, oldest first, then silu where the model has it.
//! Channels are lanes.

use std::ops::Range;

use super::super::isa::on_isa;
use super::super::lanes::Lanes;
use super::super::math;
use super::super::mem::{View, pieces};
use super::super::program::Run;
use super::super::states::StateView;
use backend::Chunk;

/// The op's buffers and weights.
pub struct CausalConvStep {
    pub x: View,
    pub w: Vec<f32>,            // [width, d]
    pub bias: Option<Vec<f32>>, // [d]
    pub silu: bool,
    pub state: StateView, // [width - 1, d]
    pub out: View,
}

impl CausalConvStep {
    /// Returns weights as the step reads them, from those that are stored, `[d, width]`.
    pub fn by_tap(w: &[f32], d: usize) -> Vec<f32> {
        let width = w.len() / d;
        (0..w.len()).map(|i| w[i % d * width + i / d]).collect()
    }
}

/// `out[t,c] = Σ_j w[c,j] · x[t - (width - 1) + j, c] (+ bias[c])`, then silu where it follows, a range of channels of
/// a chunk at a time.
pub fn causal_conv(run: &mut Run, s: &CausalConvStep) {
    let (d, chunks, accepted, isa) = (s.x.width, &run.batch.chunks, run.accepted, run.isa);
    let n_blocks = d.div_ceil(16);
    let n_ranges = pieces(run.pool, run.batch.tokens.len() * d * 8).div_ceil(chunks.len()).min(n_blocks);
    run.pool.run(chunks.len() * n_ranges, &|_, i| {
        let (chunk, i) = (chunks[i / n_ranges], i % n_ranges);
        let block = |i: usize| (i * n_blocks / n_ranges * 16).min(d);
        channels(isa, s, chunk, accepted[chunk.state as usize] as usize, block(i)..block(i + 1));
    });
}

on_isa! {
    fn channels(s: &CausalConvStep, chunk: Chunk, accepted: usize, channels: Range<usize>) = channels_lanes
}

#[inline(always)]
fn channels_lanes<L: Lanes>(s: &CausalConvStep, chunk: Chunk, accepted: usize, channels: Range<usize>) {
    let (d, n) = (s.x.width, chunk.len as usize);
    let old = s.w.len() / d - 1;
    let part = |row: usize| row * d + channels.start..row * d + channels.end;
    // The state moves past the accepted drafts: up, so what is read lies behind what is written.
    for i in 0..if accepted > 0 { old } else { 0 } {
        // SAFETY: the chunk's slot is in the batch and has kept this many drafts; these channels are this region's
        // alone.
        unsafe {
            let from = match (i + accepted).checked_sub(old) {
                Some(draft) => s.state.kept(chunk.state, part(draft)),
                None => s.state.part(chunk.state, part(i + accepted)),
            };
            s.state.part(chunk.state, part(i)).copy_from_slice(from);
        }
    }
    // Row `i` of the state followed by the chunk.
    let row = |i: usize| {
        // SAFETY: the chunk's slot and rows are in the batch, and these channels of them are this region's piece alone.
        unsafe {
            match i.checked_sub(old) {
                Some(t) => &s.x.row(chunk.first as usize + t)[channels.clone()],
                None => &*s.state.part(chunk.state, part(i)),
            }
        }
    };
    for t in 0..n {
        // SAFETY: as above; the validator keeps the output apart from the input.
        let y = unsafe { s.out.part_mut(chunk.first as usize + t, channels.clone()) };
        match &s.bias {
            Some(bias) => y.copy_from_slice(&bias[channels.clone()]),
            None => y.fill(0.0),
        }
        for j in 0..=old {
            let (x, w) = (row(t + j), &s.w[j * d..][channels.clone()]);
            for c in (0..y.len()).step_by(16) {
                L::load_at(x, c, 0.0).fma(L::load_at(w, c, 0.0), L::load_at(y, c, 0.0)).store_at(y, c);
            }
        }
        for c in (0..if s.silu { y.len() } else { 0 }).step_by(16) {
            math::silu(L::load_at(y, c, 0.0)).store_at(y, c);
        }
    }
    let n_draft = chunk.n_draft as usize;
    for draft in 0..n_draft {
        // SAFETY: as above; room is kept for so many drafts.
        unsafe { s.state.kept(chunk.state, part(draft)) }.copy_from_slice(row(old + n - n_draft + draft));
    }
    for i in 0..old {
        // SAFETY: as above. A short chunk moves rows of the state up; the source row lies behind the target.
        unsafe { s.state.part(chunk.state, part(i)) }.copy_from_slice(row(n - n_draft + i));
    }
}
