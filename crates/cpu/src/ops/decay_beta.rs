//! `decay_beta`: the gates of a gated delta rule, one head a lane.

use super::super::isa::on_isa;
use super::super::lanes::Lanes;
use super::super::math;
use super::super::mem::{View, over_rows};
use super::super::program::Run;

/// The op's buffers and weights.
pub struct DecayBetaStep {
    pub a: View,
    pub b: Option<View>,
    pub a_log: Vec<f32>,   // of each decay: -exp of A_log, with a bound exp of it
    pub dt_bias: Vec<f32>, // [n]
    pub bound: Option<f32>,
    pub g_out: View,
    pub beta_out: View,
}

/// `g = exp(a_log · softplus(a + dt_bias))`, with a bound `exp(bound · σ(a_log · (a + dt_bias)))`, and `beta = σ(b)`,
/// without `b` that softplus, which may have several decays.
pub fn decay_beta(run: &mut Run, s: &DecayBetaStep) {
    let isa = run.isa;
    over_rows(run.pool, run.step.rows(s.a.rows), 16 * s.g_out.width, |_, rows| {
        for r in rows {
            // SAFETY: rows are disjoint between chunks; the validator keeps the outputs apart from the inputs.
            unsafe {
                let (a, g, beta) = (s.a.row(r), s.g_out.row_mut(r), s.beta_out.row_mut(r));
                match s.b {
                    Some(b) => beta_row(isa, b.row(r), beta),
                    None => step_row(isa, a, &s.dt_bias, beta),
                }
                match s.bound {
                    Some(bound) => bounded_row(isa, a, s, bound, g),
                    None if g.len() > a.len() => decays_row(isa, beta, &s.a_log, g),
                    None => decay_row(isa, a, &s.a_log, &s.dt_bias, g),
                }
            }
        }
    });
}

on_isa! { fn decay_row(a: &[f32], a_log: &[f32], dt_bias: &[f32], g: &mut [f32]) = decay_lanes }
on_isa! { fn bounded_row(a: &[f32], s: &DecayBetaStep, bound: f32, g: &mut [f32]) = bounded_lanes }
on_isa! { fn decays_row(steps: &[f32], a_log: &[f32], g: &mut [f32]) = decays_lanes }
on_isa! { fn step_row(a: &[f32], dt_bias: &[f32], beta: &mut [f32]) = step_lanes }
on_isa! { fn beta_row(b: &[f32], beta: &mut [f32]) = beta_lanes }

#[inline(always)]
fn decay_lanes<L: Lanes>(a: &[f32], a_log: &[f32], dt_bias: &[f32], g: &mut [f32]) {
    for i in (0..a.len()).step_by(16) {
        let x = L::load_at(a, i, 0.0).add(L::load_at(dt_bias, i, 0.0));
        math::exp(L::load_at(a_log, i, 0.0).mul(math::softplus(x))).store_at(g, i);
    }
}

#[inline(always)]
fn bounded_lanes<L: Lanes>(a: &[f32], s: &DecayBetaStep, bound: f32, g: &mut [f32]) {
    for i in (0..a.len()).step_by(16) {
        let x = L::load_at(a, i, 0.0).add(L::load_at(&s.dt_bias, i, 0.0));
        let share = math::sigmoid(L::load_at(&s.a_log, i, 0.0).mul(x));
        math::exp(L::splat(bound).mul(share)).store_at(g, i);
    }
}

/// The decays of each step size, which follow each other.
#[inline(always)]
fn decays_lanes<L: Lanes>(steps: &[f32], a_log: &[f32], g: &mut [f32]) {
    let each = g.len() / steps.len();
    for ((&step, a_log), g) in steps.iter().zip(a_log.chunks_exact(each)).zip(g.chunks_exact_mut(each)) {
        for i in (0..each).step_by(16) {
            math::exp(L::load_at(a_log, i, 0.0).mul(L::splat(step))).store_at(g, i);
        }
    }
}

#[inline(always)]
fn step_lanes<L: Lanes>(a: &[f32], dt_bias: &[f32], beta: &mut [f32]) {
    for i in (0..a.len()).step_by(16) {
        math::softplus(L::load_at(a, i, 0.0).add(L::load_at(dt_bias, i, 0.0))).store_at(beta, i);
    }
}

#[inline(always)]
fn beta_lanes<L: Lanes>(b: &[f32], beta: &mut [f32]) {
    for i in (0..b.len()).step_by(16) {
        math::sigmoid(L::load_at(b, i, 0.0)).store_at(beta, i);
    }
}
