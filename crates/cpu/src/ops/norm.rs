//! `center`: `x - mean(x)`. `rms_norm`, `head_norm` and `gated_norm`: `x · rsqrt(mean(x²) + eps) · w`, the sum of squares
//! on 16 lanes.

use super::super::isa::on_isa;
use super::super::lanes::Lanes;
use super::super::math;
use super::super::mem::{View, over_rows};
use super::super::program::Run;

/// `x += residual` when there is one, then `out = norm(x)`.
pub fn rms_norm(run: &mut Run, x: View, residual: Option<View>, w: &[f32], eps: f32, out: View) {
    let isa = run.isa;
    over_rows(run.pool, run.step.rows(out.rows), 2 * x.width, |_, rows| {
        for r in rows {
            // SAFETY: rows are disjoint between chunks; the validator keeps the buffers of an op apart.
            unsafe {
                if let Some(y) = residual {
                    x.row_mut(r).iter_mut().zip(y.row(r)).for_each(|(x, y)| *x += y);
                }
                norm_row(isa, x.row(r), w, eps, out.row_mut(r));
            }
        }
    });
}

/// `out = x - mean(x)`.
pub fn center(run: &mut Run, x: View, out: View) {
    let isa = run.isa;
    over_rows(run.pool, run.step.rows(out.rows), 2 * x.width, |_, rows| {
        for r in rows {
            // SAFETY: rows are disjoint between chunks; x and out are different buffers.
            unsafe { center_row(isa, x.row(r), out.row_mut(r)) };
        }
    });
}

/// The norm of each head's slice, in place.
pub fn head_norm(run: &mut Run, x: View, w: Option<&[f32]>, eps: f32, d_head: usize) {
    let isa = run.isa;
    over_rows(run.pool, run.step.rows(x.rows), 2 * x.width, |_, rows| {
        for r in rows {
            // SAFETY: rows are disjoint between chunks.
            unsafe { x.row_mut(r) }.chunks_exact_mut(d_head).for_each(|head| norm_in_place(isa, head, w, eps));
        }
    });
}

/// What a gated norm takes besides its rows.
pub struct GatedNormStep {
    pub w: Vec<f32>, // [d_head], or [n_head, d_head]
    pub d_head: usize,
    pub gate_first: bool,
    pub eps: f32,
}

/// `x = norm(x) ⊙ silu(gate)` of each head's slice, with the gate first `norm(x ⊙ silu(gate))`, in place.
pub fn gated_norm(run: &mut Run, x: View, gate: View, s: &GatedNormStep) {
    let isa = run.isa;
    over_rows(run.pool, run.step.rows(x.rows), 4 * x.width, |_, rows| {
        for r in rows {
            // SAFETY: rows are disjoint between chunks; x and gate are different buffers.
            let (x, gate) = unsafe { (x.row_mut(r), gate.row(r)) };
            let heads = x.chunks_exact_mut(s.d_head).zip(gate.chunks_exact(s.d_head));
            for ((head, gate), w) in heads.zip(s.w.chunks_exact(s.d_head).cycle()) {
                if s.gate_first {
                    gate_head(isa, head, gate);
                    norm_in_place(isa, head, Some(w), s.eps);
                } else {
                    gated_norm_head(isa, head, gate, w, s.eps);
                }
            }
        }
    });
}

on_isa! {
    /// `out = x · rsqrt(mean(x²) + eps) · w` of one row.
    pub fn norm_row(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) = norm_lanes
}
on_isa! { fn center_row(x: &[f32], out: &mut [f32]) = center_lanes }
on_isa! { fn gated_norm_head(x: &mut [f32], gate: &[f32], w: &[f32], eps: f32) = gated_norm_lanes }
on_isa! { fn gate_head(x: &mut [f32], gate: &[f32]) = gate_lanes }
on_isa! { fn norm_in_place(x: &mut [f32], w: Option<&[f32]>, eps: f32) = norm_in_place_lanes }

#[inline(always)]
fn rsqrt_mean_square<L: Lanes>(x: &[f32], eps: f32) -> f32 {
    let mut sum = L::splat(0.0);
    for i in (0..x.len()).step_by(16) {
        let v = L::load_at(x, i, 0.0);
        sum = v.fma(v, sum);
    }
    1.0 / (sum.tree_sum() / x.len() as f32 + eps).sqrt()
}

#[inline(always)]
fn center_lanes<L: Lanes>(x: &[f32], out: &mut [f32]) {
    let mut sum = L::splat(0.0);
    for i in (0..x.len()).step_by(16) {
        sum = sum.add(L::load_at(x, i, 0.0));
    }
    let mean = L::splat(-sum.tree_sum() / x.len() as f32);
    for i in (0..x.len()).step_by(16) {
        L::load_at(x, i, 0.0).add(mean).store_at(out, i);
    }
}

#[inline(always)]
fn norm_lanes<L: Lanes>(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    let inv = L::splat(rsqrt_mean_square::<L>(x, eps));
    for i in (0..x.len()).step_by(16) {
        L::load_at(x, i, 0.0).mul(inv).mul(L::load_at(w, i, 0.0)).store_at(out, i);
    }
}

#[inline(always)]
fn norm_in_place_lanes<L: Lanes>(x: &mut [f32], w: Option<&[f32]>, eps: f32) {
    let inv = L::splat(rsqrt_mean_square::<L>(x, eps));
    for i in (0..x.len()).step_by(16) {
        let v = L::load_at(x, i, 0.0).mul(inv);
        let v = if let Some(w) = w { v.mul(L::load_at(w, i, 0.0)) } else { v };
        v.store_at(x, i);
    }
}

#[inline(always)]
fn gate_lanes<L: Lanes>(x: &mut [f32], gate: &[f32]) {
    for i in (0..x.len()).step_by(16) {
        L::load_at(x, i, 0.0).mul(math::silu(L::load_at(gate, i, 0.0))).store_at(x, i);
    }
}

#[inline(always)]
fn gated_norm_lanes<L: Lanes>(x: &mut [f32], gate: &[f32], w: &[f32], eps: f32) {
    let inv = L::splat(rsqrt_mean_square::<L>(x, eps));
    for i in (0..x.len()).step_by(16) {
        let normed = L::load_at(x, i, 0.0).mul(inv).mul(L::load_at(w, i, 0.0));
        normed.mul(math::silu(L::load_at(gate, i, 0.0))).store_at(x, i);
    }
}
