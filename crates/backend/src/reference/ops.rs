//! The ops that see rows of numbers alone, each as its formula. Rows lie one after the other.

use std::cmp::Ordering;

use model::plan::{Gate, GateFactor, Gelu, GroupScore, N_AXES, RopeDecl, RopePairing, Router, Score};
use quant::{PlaneBytes, Planes, WeightType};

/// Encoded rows of a matrix, one after the other.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    pub dtype: WeightType,
    pub planes: Planes<'a>,
    pub n_cols: usize,
}

impl<'a> Matrix<'a> {
    fn row_bytes(&self) -> PlaneBytes {
        self.dtype.plane_bytes(self.n_cols).expect("the plan's shapes were validated")
    }

    fn n_rows(&self) -> usize {
        self.planes.q.len() / self.row_bytes().q
    }

    /// A row, decoded.
    pub fn row(&self, i: usize) -> Vec<f32> {
        let mut out = vec![0.0; self.n_cols];
        quant::decode_row(self.dtype, self.planes.row(self.row_bytes(), i), &mut out);
        out
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

/// `y[t, n] = Σ_k w[n, k]·x[t, k]`.
pub fn linear(w: Matrix, x: &[f32]) -> Vec<f32> {
    product(w.n_rows(), w.n_cols, |i| w.row(i), x)
}

/// `y[t, h, n] = Σ_k w[h][n, k]·x[t, h, k]`, transposed `Σ_k w[h][k, n]·x[t, h, k]`; rows of `y` are `width` long.
pub fn head_linear(x: &[f32], w: &[Matrix], transposed: bool, width: usize) -> Vec<f32> {
    let (n, n_head) = (width / w.len(), w.len());
    let k = if transposed { w[0].n_rows() } else { w[0].n_cols };
    let mut y = vec![0.0; x.len() / k * n];
    for (h, w) in w.iter().enumerate() {
        let rows: Vec<Vec<f32>> = (0..w.n_rows()).map(|i| w.row(i)).collect();
        let column = |i: usize| rows.iter().map(|row| row[i]).collect();
        let x: Vec<f32> = x.chunks_exact(k).skip(h).step_by(n_head).flatten().copied().collect();
        let found = product(n, k, |i| if transposed { column(i) } else { rows[i].clone() }, &x);
        let heads = y.chunks_exact_mut(n).skip(h).step_by(n_head);
        heads.zip(found.chunks_exact(n)).for_each(|(y, found)| y.copy_from_slice(found));
    }
    y
}

/// `y[t, n] = Σ_k row(n)[k]·x[t, k]`. Each sum runs in order; some run next to each other, as none waits for another.
fn product(n: usize, k: usize, row: impl Fn(usize) -> Vec<f32>, x: &[f32]) -> Vec<f32> {
    const TOGETHER: usize = 8;
    let mut y = vec![0.0; x.len() / k * n];
    let mut columns = vec![[0.0; TOGETHER]; k];
    for first in (0..n).step_by(TOGETHER) {
        for i in first..n.min(first + TOGETHER) {
            columns.iter_mut().zip(row(i)).for_each(|(column, w)| column[i - first] = f64::from(w));
        }
        for (x, y) in x.chunks_exact(k).zip(y.chunks_exact_mut(n)) {
            let mut sums = [0.0; TOGETHER];
            for (column, &x) in columns.iter().zip(x) {
                sums.iter_mut().zip(column).for_each(|(sum, w)| *sum += w * f64::from(x));
            }
            y[first..].iter_mut().zip(sums).for_each(|(y, sum)| *y = sum as f32);
        }
    }
    y
}

/// `y[t, :] += bias`.
pub fn add_to_rows(y: &mut [f32], bias: &[f32]) {
    for row in y.chunks_exact_mut(bias.len()) {
        row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
    }
}

/// `x · rsqrt(mean(x²) + eps) · w`, for every row as long as `w`.
pub fn rms_norm(x: &[f32], w: &[f32], eps: f32) -> Vec<f32> {
    let rows = x.chunks_exact(w.len()).flat_map(|x| {
        let mean = dot(x, x) / w.len() as f64;
        let r = 1.0 / (mean + f64::from(eps)).sqrt();
        x.iter().zip(w).map(move |(&x, &w)| (f64::from(x) * r * f64::from(w)) as f32)
    });
    rows.collect()
}

/// `x - mean(x)` of each row of `d` numbers.
pub fn center(x: &[f32], d: usize) -> Vec<f32> {
    let row = |x: &[f32]| {
        let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / d as f64;
        x.iter().map(|&v| (f64::from(v) - mean) as f32).collect::<Vec<_>>()
    };
    x.chunks_exact(d).flat_map(row).collect()
}

/// `act(gate) ⊙ up`.
pub fn gated_act(gate: &[f32], up: &[f32], act: Gate) -> Vec<f32> {
    let apply = |g: f64, u: f64| match act {
        Gate::Silu => g / (1.0 + libm::exp(-g)) * u,
        Gate::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g * g * g);
            0.5 * g * (1.0 + libm::tanh(inner)) * u
        }
        Gate::Relu => (if g < 0.0 { 0.0 } else { g }) * u,
        Gate::ClampedSwiglu { alpha, limit } => {
            let limit = f64::from(limit);
            // Comparisons and not `min` and `max`, which would lose a NaN.
            let g = if g > limit { limit } else { g };
            g / (1.0 + libm::exp(-f64::from(alpha) * g)) * (u.clamp(-limit, limit) + 1.0)
        }
        Gate::ClampedSilu { limit } => {
            let (limit, g) = (f64::from(limit), g / (1.0 + libm::exp(-g)));
            let g = if g > limit { limit } else { g };
            g * u.clamp(-limit, limit)
        }
    };
    gate.iter().zip(up).map(|(&g, &u)| apply(f64::from(g), f64::from(u)) as f32).collect()
}

/// Rotates pair `i` of a head by `inv_freq[i]` times the position on its axis; dims after the last pair are unchanged.
/// `libm` reduces the angle.
pub fn rope(head: &mut [f32], rope: &RopeDecl, place: [u32; N_AXES]) {
    let half = rope.inv_freq.len();
    let factor = f64::from(rope.factor) * rope.growth.map_or(1.0, |growth| growth.at(place[0]));
    for (i, freq) in rope.inv_freq.iter().enumerate() {
        let (sin, cos) = libm::sincos(f64::from(place[axis(rope, i)]) * freq);
        let (a, b) = match rope.pairing {
            RopePairing::Half => (i, i + half),
            RopePairing::Interleaved => (2 * i, 2 * i + 1),
        };
        let (x, y) = (f64::from(head[a]), f64::from(head[b]));
        head[a] = ((x * cos - y * sin) * factor) as f32;
        head[b] = ((x * sin + y * cos) * factor) as f32;
    }
}

fn axis(rope: &RopeDecl, pair: usize) -> usize {
    rope.axes.get(pair).map_or(0, |&axis| usize::from(axis))
}

/// `x · Φ(x)`.
pub fn gelu(x: f32, form: Gelu) -> f32 {
    let x = f64::from(x);
    let share = match form {
        Gelu::Erf => 0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2),
        Gelu::Tanh => 0.5 * (1.0 + libm::tanh((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x))),
    };
    (x * share) as f32
}

/// The experts of a token and their weights, best first, ties to the lower id. `None` when the row cannot be routed: a
/// NaN among the logits, no finite softmax, no finite weights.
pub fn route(
    logits: &[f32],
    router: &Router,
    bias: Option<&[f32]>,
    expert_scale: Option<&[f32]>,
    n_used: usize,
) -> Option<(Vec<u32>, Vec<f32>)> {
    let scores: Vec<f64> = match router.score {
        Score::Softmax => softmax(logits)?,
        Score::Sigmoid => logits.iter().map(|&l| 1.0 / (1.0 + libm::exp(-f64::from(l)))).collect(),
        Score::Raw | Score::Sparse { .. } => logits.iter().map(|&l| f64::from(l)).collect(),
    };
    let mut choice = choice(logits, &scores, router, bias);
    if choice.iter().any(|c| c.is_nan()) {
        return None;
    }
    if let Some(groups) = router.groups {
        let size = logits.len() / groups.n_group;
        let group_scores: Vec<f32> = choice.chunks_exact(size).map(|group| group_score(group, groups.score)).collect();
        let open = best(&group_scores, groups.n_used);
        for group in (0..groups.n_group).filter(|&g| !open.contains(&(g as u32))) {
            choice[group * size..][..size].fill(f32::NEG_INFINITY);
        }
    }
    let ids = best(&choice, n_used);
    let mut weights: Vec<f64> = ids.iter().map(|&id| scores[id as usize]).collect();
    match router.score {
        Score::Raw => weights = softmax(&weights.iter().map(|&w| w as f32).collect::<Vec<_>>())?,
        Score::Sparse { margin } => weights = sparse(logits, &ids, margin),
        Score::Softmax | Score::Sigmoid => {}
    }
    let total = router.renormalise.map_or(1.0, |eps| weights.iter().sum::<f64>() + f64::from(eps));
    let weights: Vec<f32> = weights
        .iter()
        .zip(&ids)
        .map(|(w, &id)| {
            let own = expert_scale.map_or(1.0, |scale| f64::from(scale[id as usize]));
            (w / total * f64::from(router.scale) * own) as f32
        })
        .collect();
    weights.iter().all(|w| w.is_finite()).then_some((ids, weights))
}

/// The share of each chosen expert among those near it that are not chosen before it ([`Score::Sparse`]). What is near
/// is told in the f32 of the original code.
fn sparse(logits: &[f32], ids: &[u32], margin: f32) -> Vec<f64> {
    let share = |(i, &id): (usize, &u32)| {
        let own = logits[id as usize];
        // Where both are 0 the quotient is none, and they are near.
        let is_far = |x: f32| (own - x) / x.abs().max(own) > margin;
        let left = logits.iter().enumerate().filter(|(other, _)| !ids[..i].contains(&(*other as u32)));
        let near = left.filter(|&(_, &x)| !is_far(x));
        1.0 / near.map(|(_, &x)| libm::exp(f64::from(x) - f64::from(own))).sum::<f64>()
    };
    ids.iter().enumerate().map(share).collect()
}

/// Ranking values of the experts: scores plus bias, in the f32 of the original code; without a bias the logits, which
/// rank experts as their scores do even where scores round to the same number.
fn choice(logits: &[f32], scores: &[f64], router: &Router, bias: Option<&[f32]>) -> Vec<f32> {
    let sums = matches!(router.groups, Some(groups) if groups.score == GroupScore::TopTwo);
    match bias {
        None if !sums => logits.to_vec(),
        None => scores.iter().map(|&s| s as f32).collect(),
        Some(bias) => scores.iter().zip(bias).map(|(&s, b)| s as f32 + b).collect(),
    }
}

/// Score of a group of experts.
fn group_score(group: &[f32], score: GroupScore) -> f32 {
    let best = best(group, if score == GroupScore::Max { 1 } else { 2 });
    best.iter().map(|&i| group[i as usize]).sum()
}

/// Indices of the `n` largest, largest first, ties to the lower index.
fn best(x: &[f32], n: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..x.len() as u32).collect();
    ids.sort_by(|&a, &b| x[b as usize].partial_cmp(&x[a as usize]).unwrap_or(Ordering::Equal)); // stable
    ids.truncate(n);
    ids
}

/// `None` when it is not finite.
fn softmax(x: &[f32]) -> Option<Vec<f64>> {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if !max.is_finite() || x.iter().any(|x| x.is_nan()) {
        return None;
    }
    let shares: Vec<f64> = x.iter().map(|&x| libm::exp(f64::from(x) - f64::from(max))).collect();
    let total: f64 = shares.iter().sum();
    Some(shares.iter().map(|s| s / total).collect())
}

/// The experts of a layer: gate, up and down, one matrix per expert, and their biases, one row per expert.
pub struct ExpertStack<'a> {
    pub weights: [Vec<Matrix<'a>>; 3],
    pub biases: Option<[Vec<f32>; 3]>,
    pub d_out: usize,
    pub act: Gate,
}

/// For every (token, slot): `(act(x·gateᵀ) ⊙ (x·upᵀ))·downᵀ` with the slot's expert; `y` is `[T · n_used, d_out]`.
pub fn experts(x: &[f32], ids: &[u32], n_used: usize, stack: &ExpertStack) -> Vec<f32> {
    let &ExpertStack { ref weights, ref biases, d_out, act } = stack;
    let d_in = weights[0][0].n_cols;
    // Product `i` of the three, with one expert's weights.
    let product = |i: usize, expert: usize, x: &[f32]| {
        let w = weights[i][expert];
        let mut y = linear(w, x);
        if let Some(biases) = biases {
            add_to_rows(&mut y, &biases[i][expert * w.n_rows()..][..w.n_rows()]);
        }
        y
    };
    let n_expert = weights[0].len();
    // Slots of no expert count as zeros.
    let start = |id: u32| if (id as usize) < n_expert { f32::NAN } else { 0.0 };
    let mut y: Vec<f32> = ids.iter().flat_map(|&id| std::iter::repeat_n(start(id), d_out)).collect();
    for expert in 0..n_expert {
        let pairs: Vec<usize> = (0..ids.len()).filter(|&pair| ids[pair] as usize == expert).collect();
        let x: Vec<f32> = pairs.iter().flat_map(|&pair| &x[pair / n_used * d_in..][..d_in]).copied().collect();
        let hidden = gated_act(&product(0, expert, &x), &product(1, expert, &x), act);
        let rows = product(2, expert, &hidden);
        for (&pair, row) in pairs.iter().zip(rows.chunks_exact(d_out)) {
            y[pair * d_out..][..d_out].copy_from_slice(row);
        }
    }
    y
}

/// `x[t] + Σ_s weights[t, s]·y[t, s]`, slots in order.
pub fn combine(x: &[f32], y: &[f32], weights: &[f32], n_used: usize, d: usize) -> Vec<f32> {
    let sum = |t: usize, i: usize| {
        let slots = (t * n_used..(t + 1) * n_used).map(|s| f64::from(weights[s]) * f64::from(y[s * d + i]));
        (f64::from(x[t * d + i]) + slots.sum::<f64>()) as f32
    };
    (0..x.len()).map(|at| sum(at / d, at % d)).collect()
}

/// `σ(x)`.
pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + libm::exp(-x))
}

/// `x ⊙ factor(gate)`; a number of the gate is for `each` neighbors of `x`.
pub fn gate_by(x: &[f32], gate: &[f32], factor: GateFactor, each: usize) -> Vec<f32> {
    let factor = |g: f64| match factor {
        GateFactor::Sigmoid => sigmoid(g),
        GateFactor::Plain => g,
        GateFactor::Softplus => (if g < 0.0 { 0.0 } else { g }) + libm::log1p(libm::exp(-g.abs())),
    };
    (0..x.len()).map(|i| (f64::from(x[i]) * factor(f64::from(gate[i / each]))) as f32).collect()
}

/// `cap · tanh(x / cap)`.
pub fn softcap(x: f32, cap: f32) -> f32 {
    (f64::from(cap) * libm::tanh(f64::from(x) / f64::from(cap))) as f32
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
#[path = "../../../conformance/src/router_cases.rs"]
mod router_cases;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routing() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        for (logits, n_used, wanted) in [
            (&[0.0, 2.0, 1.0, 2.0][..], 3, Some(&[1, 3, 2][..])),
            (&[-0.0, 0.0, -0.0], 2, Some(&[0, 1])),
            (&[5.0; 4], 2, Some(&[0, 1])),
            (&[1.0, -inf, 0.0], 2, Some(&[0, 2])),
            (&[1.0, nan, 0.0], 2, None),
            (&[1.0, inf, 0.0], 2, None),
            (&[-inf, -inf], 1, None),
        ] {
            let routed = route(logits, &Router::softmax(true, 1.0), None, None, n_used);
            assert_eq!(routed.as_ref().map(|(ids, _)| ids.as_slice()), wanted, "{logits:?}");
            if let Some((_, weights)) = routed {
                assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6, "{logits:?}: {weights:?}");
            }
        }
        let (_, weights) = route(&[0.0, 0.0, 0.0, 0.0], &Router::softmax(false, 1.0), None, None, 2).unwrap();
        assert_eq!(weights, [0.25, 0.25]);
    }

    /// Computed by hand from gpt-oss's own code.
    #[test]
    fn clamped_swiglu() {
        let act = Gate::ClampedSwiglu { alpha: 1.702, limit: 7.0 };
        let cases = [(1.0, 2.0, 2.537_387_3), (9.0, -9.0, -41.999_718), (-9.0, 9.0, -1.602_542_4e-5), (0.0, 5.0, 0.0)];
        for (g, u, wanted) in cases {
            let found = gated_act(&[g], &[u], act)[0];
            assert!((found - wanted).abs() <= 1e-5 * wanted.abs(), "{g} {u}: {found}, {wanted} wanted");
        }
        assert!(gated_act(&[f32::NAN, 1.0], &[1.0, f32::NAN], act).iter().all(|y| y.is_nan()));
    }

    #[test]
    fn routers_choose_what_the_original_code_chooses() {
        router_cases::check(1e-6, &mut |x, router, bias, scale, ids, weights| {
            let Some((found, shares)) = route(x, router, bias, scale, ids.len()) else { return false };
            ids.copy_from_slice(&found);
            weights.copy_from_slice(&shares);
            true
        });
    }

    #[test]
    fn rope_keeps_its_angle_at_far_positions() {
        let decl =
            |pairing| RopeDecl { inv_freq: vec![1.0, 0.5], factor: 2.0, growth: None, pairing, axes: Vec::new() };
        for (pos, sin1, cos1) in [(0, 0.0, 1.0), (262_144, -0.084_107_03, -0.996_456_7)] {
            let mut half = [1.0, 0.0, 0.0, 0.0, 7.0];
            rope(&mut half, &decl(RopePairing::Half), [pos; N_AXES]);
            let mut inter = [1.0, 0.0, 0.0, 0.0, 7.0];
            rope(&mut inter, &decl(RopePairing::Interleaved), [pos; N_AXES]);
            let (sin, cos): (f32, f32) = (half[2] / 2.0, half[0] / 2.0);
            assert!((sin * sin + cos * cos - 1.0).abs() < 1e-6);
            assert_eq!((inter[0], inter[1], inter[4]), (half[0], half[2], 7.0));
            assert!((sin - sin1).abs() < 1e-6 && (cos - cos1).abs() < 1e-6, "{pos}: {sin} {cos}");
        }
    }
}
