//! `combine`: adds the experts' outputs to the residual stream; a fused one also writes the next norm.

use super::super::isa::on_isa;
use super::super::lanes::Lanes;
use super::super::mem::{View, over_rows};
use super::super::program::{NormStep, Run};
use super::norm::norm_row;

/// `x[t] += Σ_s weights[t,s] · y[t,s]`, slots in order, or from zeros without `add`. A slot of weight 0 contributes
/// nothing, whatever it holds.
pub fn combine(run: &mut Run, x: View, add: bool, y: View, weights: View, norm: Option<&NormStep>) {
    let isa = run.isa;
    let n_used = weights.width;
    over_rows(run.pool, run.step.rows(x.rows), (n_used + 2) * x.width, |_, rows| {
        for t in rows {
            // SAFETY: rows are disjoint between chunks; the validator keeps the buffers of an op apart.
            unsafe {
                let row = x.row_mut(t);
                if !add {
                    row.fill(0.0);
                }
                for (s, &w) in weights.row(t).iter().enumerate() {
                    if w != 0.0 {
                        axpy(isa, w, y.row(t * n_used + s), row);
                    }
                }
                if let Some(norm) = norm {
                    norm_row(isa, row, &norm.w, norm.eps, norm.out.row_mut(t));
                }
            }
        }
    });
}

on_isa! { fn axpy(w: f32, y: &[f32], x: &mut [f32]) = axpy_lanes }

#[inline(always)]
fn axpy_lanes<L: Lanes>(w: f32, y: &[f32], x: &mut [f32]) {
    for i in (0..x.len()).step_by(16) {
        L::splat(w).fma(L::load_at(y, i, 0.0), L::load_at(x, i, 0.0)).store_at(x, i);
    }
}
