//! `gated_act`, `add`, `add_bias`, `scale`, `clamp`, `constant`, `softcap`, `gelu`, `gate_by`: one element at a time,
//! so that no order of sums matters.

use model::plan::{Gate, GateFactor, Gelu};

use super::super::isa::on_isa;
use super::super::lanes::{Float, Lanes};
use super::super::math;
use super::super::mem::{View, over_rows};
use super::super::program::Run;

/// `out = act(gate) ⊙ up`.
pub fn gated_act(run: &mut Run, gate: View, up: View, act: Gate, out: View) {
    let isa = run.isa;
    over_rows(run.pool, run.step.rows(out.rows), 4 * out.width, |_, rows| {
        for r in rows {
            // SAFETY: rows are disjoint between chunks; the validator keeps `out` apart from the inputs.
            unsafe { math::gated_slice(isa, act, gate.row(r), up.row(r), out.row_mut(r)) };
        }
    });
}

/// `x += y`.
pub fn add(run: &mut Run, x: View, y: View) {
    over_rows(run.pool, run.step.rows(x.rows), x.width, |_, rows| {
        for r in rows {
            // SAFETY: rows are disjoint between chunks; x and y are different buffers.
            let (x, y) = unsafe { (x.row_mut(r), y.row(r)) };
            x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
        }
    });
}

/// `x += w`.
pub fn add_bias(run: &mut Run, x: View, w: &[f32]) {
    over_rows(run.pool, run.step.rows(x.rows), x.width, |_, rows| {
        for r in rows {
            // SAFETY: rows are disjoint between chunks.
            unsafe { x.row_mut(r) }.iter_mut().zip(w).for_each(|(x, w)| *x += w);
        }
    });
}

/// `x = gelu(x)`.
pub fn gelu(run: &mut Run, x: View, form: Gelu) {
    let isa = run.isa;
    over_rows(run.pool, run.step.rows(x.rows), 8 * x.width, |_, rows| {
        for r in rows {
            // SAFETY: rows are disjoint between chunks.
            let x = unsafe { x.row_mut(r) };
            match form {
                Gelu::Tanh => gelu_row(isa, x),
                // Few rows: those of the mergers of image encoders.
                Gelu::Erf => x.iter_mut().for_each(|x| *x = math::gelu_erf(*x)),
            }
        }
    });
}

on_isa! { fn gelu_row(x: &mut [f32]) = gelu_lanes }

#[inline(always)]
fn gelu_lanes<L: Lanes>(x: &mut [f32]) {
    for i in (0..x.len()).step_by(16) {
        math::gelu_tanh(L::load_at(x, i, 0.0)).store_at(x, i);
    }
}

/// `x = x ⊙ w`.
pub fn scale_each(run: &mut Run, x: View, w: &[f32]) {
    over_rows(run.pool, run.step.rows(x.rows), x.width, |_, rows| {
        for r in rows {
            // SAFETY: rows are disjoint between chunks.
            unsafe { x.row_mut(r) }.iter_mut().zip(w).for_each(|(x, w)| *x *= w);
        }
    });
}

/// `x = x · scale`.
pub fn scale(run: &mut Run, x: View, scale: f32) {
    over_rows(run.pool, run.step.rows(x.rows), x.width, |_, rows| {
        for r in rows {
            // SAFETY: rows are disjoint between chunks.
            unsafe { x.row_mut(r) }.iter_mut().for_each(|v| *v *= scale);
        }
    });
}

/// `x = min(max(x, low), high)`.
pub fn clamp(run: &mut Run, x: View, low: f32, high: f32) {
    over_rows(run.pool, run.step.rows(x.rows), x.width, |_, rows| {
        for r in rows {
            // SAFETY: rows are disjoint between chunks.
            unsafe { x.row_mut(r) }.iter_mut().for_each(|v| *v = v.max(low).min(high));
        }
    });
}

/// `out = values` in each row.
pub fn constant(run: &mut Run, values: &[f32], out: View) {
    over_rows(run.pool, run.step.rows(out.rows), out.width, |_, rows| {
        for r in rows {
            // SAFETY: rows are disjoint between chunks.
            unsafe { out.row_mut(r) }.copy_from_slice(values);
        }
    });
}

/// `x = cap · tanh(x / cap)`.
pub fn softcap(run: &mut Run, x: View, cap: f32) {
    let isa = run.isa;
    over_rows(run.pool, run.step.rows(x.rows), 4 * x.width, |_, rows| {
        for r in rows {
            // SAFETY: rows are disjoint between chunks.
            softcap_row(isa, unsafe { x.row_mut(r) }, cap);
        }
    });
}

/// `x = x ⊙ factor(gate)`; a number of the gate is for as many neighbors of `x` as it has more numbers.
pub fn gate_by(run: &mut Run, x: View, gate: View, factor: GateFactor) {
    let isa = run.isa;
    let each = x.width / gate.width;
    over_rows(run.pool, run.step.rows(x.rows), 4 * x.width, |_, rows| {
        for r in rows {
            // SAFETY: rows are disjoint between chunks; x and gate are different buffers.
            let (x, gate) = unsafe { (x.row_mut(r), gate.row(r)) };
            if each == 1 {
                match factor {
                    GateFactor::Sigmoid => sigmoid_row(isa, x, gate),
                    GateFactor::Softplus => softplus_row(isa, x, gate),
                    GateFactor::Plain => x.iter_mut().zip(gate).for_each(|(x, &gate)| *x *= gate),
                }
                continue;
            }
            for (x, &gate) in x.chunks_exact_mut(each).zip(gate) {
                let gate = match factor {
                    GateFactor::Sigmoid => math::sigmoid(gate),
                    GateFactor::Softplus => math::softplus(gate),
                    GateFactor::Plain => gate,
                };
                x.iter_mut().for_each(|v| *v *= gate);
            }
        }
    });
}

on_isa! { fn sigmoid_row(x: &mut [f32], gate: &[f32]) = sigmoid_lanes }
on_isa! { fn softplus_row(x: &mut [f32], gate: &[f32]) = softplus_lanes }

#[inline(always)]
fn sigmoid_lanes<L: Lanes>(x: &mut [f32], gate: &[f32]) {
    for i in (0..x.len()).step_by(16) {
        L::load_at(x, i, 0.0).mul(math::sigmoid(L::load_at(gate, i, 0.0))).store_at(x, i);
    }
}

#[inline(always)]
fn softplus_lanes<L: Lanes>(x: &mut [f32], gate: &[f32]) {
    for i in (0..x.len()).step_by(16) {
        L::load_at(x, i, 0.0).mul(math::softplus(L::load_at(gate, i, 0.0))).store_at(x, i);
    }
}

on_isa! { fn softcap_row(x: &mut [f32], cap: f32) = softcap_lanes }

#[inline(always)]
fn softcap_lanes<L: Lanes>(x: &mut [f32], cap: f32) {
    for i in (0..x.len()).step_by(16) {
        capped(L::load_at(x, i, 0.0), cap).store_at(x, i);
    }
}

/// `cap · tanh(s / cap)`.
#[inline(always)]
pub fn capped<F: Float>(s: F, cap: f32) -> F {
    math::tanh(s.div(F::splat(cap))).mul(F::splat(cap))
}
