//! `route`: from router logits to experts and their weights.

use std::sync::atomic::Ordering::Relaxed;

use model::plan::validate::{MAX_EXPERTS, MAX_USED};
use model::plan::{Router, Rows};

use super::super::isa::on_isa;
use super::super::lanes::Lanes;
use super::super::math;
use super::super::mem::{View, over_rows};
use super::super::program::Run;

/// Chooses experts for every token. A row whose softmax is not finite is marked as a fault of `layer`, gets the ids
/// `0..n_used` and weights 0, so that what follows stays in range and adds nothing.
pub fn route(run: &mut Run, logits: View, router: Router, ids: View, weights: View, layer: u32) {
    let (isa, faults) = (run.isa, &run.step.fault_layer);
    let asked = (logits.rows == Rows::Outputs).then_some(&run.batch.rows);
    over_rows(run.pool, run.step.rows(logits.rows), 16 * logits.width, |_, rows| {
        for t in rows {
            // SAFETY: rows are disjoint between chunks; the validator keeps the buffers of an op apart.
            let (x, ids, weights) = unsafe { (logits.row(t), ids.ids_mut(t), weights.row_mut(t)) };
            let Router::Softmax { renormalise, scale } = router;
            let mut exps = [0.0; MAX_EXPERTS];
            let sum = softmax_parts(isa, x, &mut exps[..x.len()]);
            if !sum.is_finite() {
                let token = asked.map_or(t, |rows| rows[t] as usize);
                faults[token].fetch_min(layer, Relaxed);
                ids.iter_mut().enumerate().for_each(|(i, id)| *id = i as u32);
                weights.fill(0.0);
                continue;
            }
            best(x, ids);
            for (w, &id) in weights.iter_mut().zip(&*ids) {
                *w = exps[id as usize] / sum;
            }
            let total = if renormalise { weights.iter().fold(0.0, |sum, w| sum + w) } else { 1.0 };
            weights.iter_mut().for_each(|w| *w = *w / total * scale);
        }
    });
}

/// The ids of the largest values, best first, ties to the lower id. `x` holds no NaN and at least as many values.
fn best(x: &[f32], ids: &mut [u32]) {
    let k = ids.len();
    let mut top = [f32::NEG_INFINITY; MAX_USED];
    let mut n = 0;
    for (id, &v) in x.iter().enumerate() {
        if n == k && v <= top[k - 1] {
            continue;
        }
        let mut at = n.min(k - 1);
        while at > 0 && top[at - 1] < v {
            (top[at], ids[at]) = (top[at - 1], ids[at - 1]);
            at -= 1;
        }
        (top[at], ids[at]) = (v, id as u32);
        n = (n + 1).min(k);
    }
}

on_isa! {
    /// `exps = e^(x - max x)`; returns their sum, which is not finite when `x` holds NaN, +inf or nothing finite.
    fn softmax_parts(x: &[f32], exps: &mut [f32]) -> f32 = softmax_parts_lanes
}

#[inline(always)]
fn softmax_parts_lanes<L: Lanes>(x: &[f32], exps: &mut [f32]) -> f32 {
    let mut max = L::splat(f32::NEG_INFINITY);
    for i in (0..x.len()).step_by(16) {
        max = L::load_at(x, i, f32::NEG_INFINITY).max(max);
    }
    let max = L::splat(max.tree_max());
    let mut sum = L::splat(0.0);
    for i in (0..x.len()).step_by(16) {
        let e = math::exp(L::load_at(x, i, f32::NEG_INFINITY).sub(max));
        e.store_at(exps, i);
        sum = sum.add(e);
    }
    sum.tree_sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::Isa;

    #[test]
    fn the_best_come_first_and_ties_go_to_the_lower_id() {
        let x = [1.0, 3.0, f32::NEG_INFINITY, 3.0, -2.0, 7.0, 3.0];
        for (k, want) in [(1, &[5u32][..]), (3, &[5, 1, 3]), (7, &[5, 1, 3, 6, 0, 4, 2])] {
            let mut ids = vec![0; k];
            best(&x, &mut ids);
            assert_eq!(ids, want);
        }
    }

    #[test]
    fn rows_that_have_no_softmax_are_seen() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            for at in 0..20 {
                for (fill, bad) in [(0.0, nan), (0.0, inf), (-inf, -inf), (-inf, nan)] {
                    let mut x = [fill; 20];
                    x[at] = bad;
                    assert!(!softmax_parts(isa, &x, &mut [0.0; 20]).is_finite(), "{bad} at {at} on {isa}");
                }
            }
        }
    }
}
