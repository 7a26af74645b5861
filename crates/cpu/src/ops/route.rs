//! `route`: from router logits to experts and their weights.

use std::sync::atomic::Ordering::Relaxed;

use model::plan::validate::{MAX_EXPERTS, MAX_USED};
use model::plan::{GroupScore, Groups, Router, Rows, Score};

use super::super::isa::{CheckedIsa, on_isa};
use super::super::lanes::Lanes;
use super::super::math;
use super::super::mem::{View, over_rows};
use super::super::program::Run;

/// A router with its vectors at hand.
pub struct RouterStep {
    router: Router,
    bias: Option<Vec<f32>>,         // [n_expert]
    expert_scale: Option<Vec<f32>>, // [n_expert]
}

impl RouterStep {
    /// `bias` and `expert_scale` are the router's weights.
    pub fn new(router: Router, bias: Option<Vec<f32>>, expert_scale: Option<Vec<f32>>) -> RouterStep {
        RouterStep { router, bias, expert_scale }
    }
}

/// Chooses experts for every token. A row without an answer is marked as a fault of `layer`, gets the ids `0..n_used`
/// and weights 0, so that the next ops stay in range and add nothing.
pub fn route(run: &mut Run, logits: View, router: &RouterStep, ids: View, weights: View, layer: u32) {
    let (isa, faults) = (run.isa, &run.step.fault_layer);
    let asked = (logits.rows == Rows::Outputs).then_some(&run.batch.rows);
    over_rows(run.pool, run.step.rows(logits.rows), 64 * logits.width, |_, rows| {
        for t in rows {
            // SAFETY: rows are disjoint between chunks; the validator keeps the buffers of an op apart.
            let (x, ids, weights) = unsafe { (logits.row(t), ids.ids_mut(t), weights.row_mut(t)) };
            if !route_row(isa, x, router, ids, weights) {
                let token = asked.map_or(t, |rows| rows[t] as usize);
                faults[token].fetch_min(layer, Relaxed);
                ids.iter_mut().enumerate().for_each(|(i, id)| *id = i as u32);
                weights.fill(0.0);
            }
            if let Some(local) = router.router.local {
                local.apply(ids, weights);
            }
        }
    });
}

/// The experts of one row of logits, best first, and their weights; false when it has no answer: a NaN, no finite
/// softmax, no finite weights.
fn route_row(isa: CheckedIsa, x: &[f32], router: &RouterStep, ids: &mut [u32], weights: &mut [f32]) -> bool {
    let RouterStep { router, bias, expert_scale } = router;
    let mut scores = [0.0; MAX_EXPERTS];
    let scores = &mut scores[..x.len()];
    // Where the sum is needed, softmax is divided by it below.
    let sum = match router.score {
        Score::Softmax => softmax_parts(isa, x, scores),
        Score::Sigmoid => {
            sigmoids(isa, x, scores);
            1.0
        }
        Score::Raw | Score::Sparse { .. } => {
            scores.copy_from_slice(x);
            1.0
        }
    };
    if !sum.is_finite() {
        return false;
    }
    // Without a bias the logits order experts as their scores do, also where scores round to the same number.
    let sums = matches!(router.groups, Some(Groups { score: GroupScore::TopTwo, .. }));
    let mut choice = [0.0; MAX_EXPERTS];
    let choice = &mut choice[..x.len()];
    match bias {
        None if !sums => choice.copy_from_slice(x),
        None => choice.iter_mut().zip(&*scores).for_each(|(c, s)| *c = s / sum),
        Some(bias) => choice.iter_mut().zip(&*scores).zip(bias).for_each(|((c, s), b)| *c = s / sum + b),
    }
    if choice.iter().any(|c| c.is_nan()) {
        return false;
    }
    if let Some(groups) = router.groups {
        close_groups(choice, groups);
    }
    best(choice, ids);
    for (w, &id) in weights.iter_mut().zip(&*ids) {
        *w = scores[id as usize] / sum;
    }
    match router.score {
        Score::Raw => {
            let mut exps = [0.0; MAX_USED];
            let sum = softmax_parts(isa, weights, &mut exps[..weights.len()]);
            weights.iter_mut().zip(exps).for_each(|(w, e)| *w = e / sum);
        }
        Score::Sparse { margin } => sparse(isa, x, margin, ids, weights),
        Score::Softmax | Score::Sigmoid => {}
    }
    let total = router.renormalise.map_or(1.0, |eps| weights.iter().fold(0.0, |sum, w| sum + w) + eps);
    for (w, &id) in weights.iter_mut().zip(&*ids) {
        *w = *w / total * router.scale;
        if let Some(scale) = expert_scale {
            *w *= scale[id as usize];
        }
    }
    weights.iter().all(|w| w.is_finite())
}

/// The share of each chosen expert among those near it that are not chosen before it ([`Score::Sparse`]).
fn sparse(isa: CheckedIsa, x: &[f32], margin: f32, ids: &[u32], weights: &mut [f32]) {
    let (mut left, mut exps) = ([0.0; MAX_EXPERTS], [0.0; MAX_EXPERTS]);
    let (left, exps) = (&mut left[..x.len()], &mut exps[..x.len()]);
    left.copy_from_slice(x);
    for (&id, weight) in ids.iter().zip(weights) {
        let own = x[id as usize];
        // Where both are 0 the quotient is none, and they are near.
        let is_far = |x: f32| (own - x) / x.abs().max(own) > margin;
        let mut near = [f32::NEG_INFINITY; MAX_EXPERTS];
        let near = &mut near[..x.len()];
        near.iter_mut().zip(&*left).filter(|(_, x)| !is_far(**x)).for_each(|(near, &x)| *near = x);
        let sum = softmax_parts(isa, near, exps);
        *weight = exps[id as usize] / sum;
        left[id as usize] = f32::NEG_INFINITY;
    }
}

/// Sets the experts of all but the best groups to -inf.
fn close_groups(choice: &mut [f32], groups: Groups) {
    let size = choice.len() / groups.n_group;
    let mut group_score = [0.0; MAX_EXPERTS];
    for (group_score, group) in group_score.iter_mut().zip(choice.chunks_exact(size)) {
        let mut top = [0; 2];
        *group_score = match groups.score {
            GroupScore::Max => {
                best(group, &mut top[..1]);
                group[top[0] as usize]
            }
            GroupScore::TopTwo => {
                best(group, &mut top);
                group[top[0] as usize] + group[top[1] as usize]
            }
        };
    }
    let mut open = [0; MAX_USED];
    let open = &mut open[..groups.n_used];
    best(&group_score[..groups.n_group], open);
    for (g, group) in choice.chunks_exact_mut(size).enumerate() {
        if !open.contains(&(g as u32)) {
            group.fill(f32::NEG_INFINITY);
        }
    }
}

/// The ids of the largest values, best first, ties to the lower id. `x` holds no NaN and at least as many values.
pub fn best(x: &[f32], ids: &mut [u32]) {
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

on_isa! { fn sigmoids(x: &[f32], out: &mut [f32]) = sigmoid_lanes }

#[inline(always)]
fn sigmoid_lanes<L: Lanes>(x: &[f32], out: &mut [f32]) {
    let (zero, one) = (L::splat(0.0), L::splat(1.0));
    for i in (0..x.len()).step_by(16) {
        one.div(math::exp(zero.sub(L::load_at(x, i, 0.0))).add(one)).store_at(out, i);
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
#[allow(clippy::unwrap_used)]
#[path = "../../../conformance/src/router_cases.rs"]
mod router_cases;

#[cfg(test)]
mod tests {
    use super::*;

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
    fn routers_choose_what_the_original_code_chooses() {
        let mut step: Option<RouterStep> = None;
        router_cases::check(1e-6, &mut |x, router, bias, scale, ids, weights| {
            if step.as_ref().is_none_or(|step| step.router != *router) {
                step = Some(RouterStep::new(*router, bias.map(<[f32]>::to_vec), scale.map(<[f32]>::to_vec)));
            }
            step.as_ref().is_some_and(|step| route_row(CheckedIsa::best(), x, step, ids, weights))
        });
    }

    /// Instruction sets agree to the bit, and rows without an answer are faults, whatever the choices.
    #[test]
    fn every_router_gives_the_same_bits_and_sees_nan() {
        let v3 = Router { score: Score::Sigmoid, renormalise: Some(1e-20), ..Router::softmax(false, 2.5) };
        let groups = |score| Some(Groups { n_group: 5, n_used: 2, score });
        let raw = Router { score: Score::Raw, ..Router::softmax(false, 1.0) };
        let biased = (0..35).map(|i| (i % 4) as f32 / 8.0 - 0.2).collect::<Vec<_>>();
        for router in [
            Router::softmax(true, 1.0),
            raw,
            v3,
            Router { groups: groups(GroupScore::Max), ..Router::softmax(false, 1.0) },
            Router { groups: groups(GroupScore::TopTwo), ..v3 },
        ] {
            for bias in [None, Some(biased.clone())] {
                let step = RouterStep::new(router, bias, Some(biased.clone()));
                let x: Vec<f32> = (0..35).map(|i| ((i * 7919) % 41) as f32 / 8.0 - 2.0).collect();
                let on = |isa, x: &[f32]| {
                    let (mut ids, mut weights) = ([0; 6], [0.0; 6]);
                    route_row(isa, x, &step, &mut ids, &mut weights).then(|| (ids, weights.map(f32::to_bits)))
                };
                let wanted = on(CheckedIsa::SCALAR, &x);
                assert!(wanted.is_some_and(|(ids, _)| (1..6).all(|i| !ids[..i].contains(&ids[i]))), "{router:?}");
                for isa in CheckedIsa::all() {
                    assert_eq!(on(isa, &x), wanted, "{router:?} on {isa}");
                    for at in [0, 17, 34] {
                        let mut bad = x.clone();
                        bad[at] = f32::NAN;
                        assert_eq!(on(isa, &bad), None, "{router:?} on {isa}, NaN at {at}");
                    }
                }
            }
        }
    }

    #[test]
    fn rows_that_have_no_softmax_are_seen() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        for isa in CheckedIsa::all() {
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
