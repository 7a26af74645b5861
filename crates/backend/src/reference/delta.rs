//! Gated DeltaNet (Yang, Kautz, Hatamizadeh: "Gated Delta Networks", arXiv 2412.06464), op by op in the order of a
//! layer. Rows lie one after the other.
//!
//! The reference computes the delta rule one position at a time: an f32 state between any two positions makes the
//! numbers independent of how a prompt is chunked. The tests compare it with the chunked form of backends built on
//! matrix products, which agrees within rounding.

use std::ops::Range;

use model::plan::{DeltaHeads, DeltaRule};

use super::ops;

/// What a convolution multiplies with: `w` is `[d, width]`, `bias` is `[d]` or nothing.
pub struct Conv {
    pub w: Vec<f32>,
    pub bias: Option<Vec<f32>>,
    /// Whether silu follows.
    pub silu: bool,
}

/// `Σ_j w[c, j] · x[t - (width - 1) + j, c] (+ bias[c])`, then silu where it follows, for the rows `[n, d]` of a chunk.
/// The state `[width - 1, d]` holds the rows before the chunk, and afterwards the last rows up to its end.
pub fn causal_conv(x: &[f32], conv: &Conv, d: usize, state: &mut [f32]) -> Vec<f32> {
    let Conv { w, bias, silu } = conv;
    let width = w.len() / d;
    let rows = [&*state, x].concat();
    let y = (0..x.len()).map(|i| {
        let taps = (0..width).map(|j| f64::from(w[i % d * width + j]) * f64::from(rows[i + j * d]));
        let sum = taps.sum::<f64>() + bias.as_ref().map_or(0.0, |bias| f64::from(bias[i % d]));
        (if *silu { sum * ops::sigmoid(sum) } else { sum }) as f32
    });
    let y = y.collect();
    state.copy_from_slice(&rows[x.len()..]);
    y
}

/// `exp(a_log · softplus(a + dt_bias))` and `σ(b)`, without `b` that softplus, for rows as long as `dt_bias`; with a
/// bound `exp(bound · σ(a_log · (a + dt_bias)))`. `a_log` has one number for some of a row, or some for each of them.
pub fn decay_beta(
    a: &[f32],
    b: Option<&[f32]>,
    a_log: &[f32],
    dt_bias: &[f32],
    bound: Option<f32>,
) -> (Vec<f32>, Vec<f32>) {
    let sums = a.iter().zip(dt_bias.iter().cycle()).map(|(&a, &dt_bias)| f64::from(a) + f64::from(dt_bias));
    let steps = sums.clone().map(|x| x.max(0.0) + libm::log1p(libm::exp(-x.abs())));
    let (each, rates) = ((dt_bias.len() / a_log.len()).max(1), (a_log.len() / dt_bias.len()).max(1));
    let a_log = a_log.iter().flat_map(|&a_log| std::iter::repeat_n(f64::from(a_log), each)).cycle();
    let g = match bound {
        Some(bound) => {
            sums.zip(a_log).map(|(x, rate)| libm::exp(f64::from(bound) * ops::sigmoid(rate * x)) as f32).collect()
        }
        None => steps
            .clone()
            .flat_map(|step| std::iter::repeat_n(step, rates))
            .zip(a_log)
            .map(|(step, rate)| libm::exp(rate * step) as f32)
            .collect(),
    };
    match b {
        Some(b) => (g, b.iter().map(|&b| ops::sigmoid(f64::from(b)) as f32).collect()),
        None => (g, steps.map(|step| step as f32).collect()),
    }
}

/// `rms_norm(x) ⊙ w ⊙ silu(gate)` for every `d_head` numbers, with the gate first `rms_norm(x ⊙ silu(gate)) ⊙ w`; `w`
/// is as long as one head or as a row.
pub fn gated_norm(x: &[f32], gate: &[f32], w: &[f32], d_head: usize, gate_first: bool, eps: f32) -> Vec<f32> {
    let gated = |x: &[f32]| -> Vec<f32> {
        let by = |(&x, &g): (&f32, &f32)| (f64::from(x) * f64::from(g) * ops::sigmoid(f64::from(g))) as f32;
        x.iter().zip(gate).map(by).collect()
    };
    let normed = |x: &[f32]| -> Vec<f32> {
        let heads = x.chunks_exact(d_head).zip(w.chunks_exact(d_head).cycle());
        heads.flat_map(|(head, w)| ops::rms_norm(head, w, eps)).collect()
    };
    if gate_first { normed(&gated(x)) } else { gated(&normed(x)) }
}

/// Inputs of the delta rule for consecutive positions of a sequence.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    heads: DeltaHeads,
    q: &'a [f32],    // [n, n_k_head, d_k]
    k: &'a [f32],    // [n, n_k_head, d_k]
    v: &'a [f32],    // [n, n_v_head, d_v]
    g: &'a [f32],    // [n, n_v_head], or [n, n_v_head, d_k]
    beta: &'a [f32], // [n, n_v_head]
}

impl<'a> Rows<'a> {
    /// q, k, v, g and beta, all of the same number of positions.
    pub fn new(heads: DeltaHeads, [q, k, v, g, beta]: [&'a [f32]; 5]) -> Self {
        Self { heads, q, k, v, g, beta }
    }

    /// A range of positions.
    pub fn range(self, positions: Range<usize>) -> Self {
        let DeltaHeads { n_k_head, n_v_head, d_k, d_v, .. } = self.heads;
        let part = |x: &'a [f32], row: usize| &x[positions.start * row..positions.end * row];
        let (k_row, v_row) = (n_k_head * d_k, n_v_head * d_v);
        let (q, k, v) = (part(self.q, k_row), part(self.k, k_row), part(self.v, v_row));
        let g_row = self.g.len() / self.n();
        Self { heads: self.heads, q, k, v, g: part(self.g, g_row), beta: part(self.beta, n_v_head) }
    }

    /// q and k, `[d_k]`, and v, `[d_v]`, of a head of v at position `t`.
    fn qkv(&self, t: usize, head: usize) -> [&'a [f32]; 3] {
        let DeltaHeads { n_k_head, n_v_head, d_k, d_v, .. } = self.heads;
        let k_at = (t * n_k_head + self.heads.k_head(head)) * d_k;
        [&self.q[k_at..][..d_k], &self.k[k_at..][..d_k], &self.v[(t * n_v_head + head) * d_v..][..d_v]]
    }

    /// Decay of a row of a head's state at position `t`.
    fn decay(&self, t: usize, head: usize, row: usize) -> f64 {
        let by_row = self.g.len() / self.beta.len();
        f64::from(self.g[(t * self.heads.n_v_head + head) * by_row + row % by_row])
    }

    /// Decay and rate of a head of v at position `t`, which has one decay.
    #[cfg(test)]
    fn gates(&self, t: usize, head: usize) -> [f64; 2] {
        let at = t * self.heads.n_v_head + head;
        [f64::from(self.g[at]), f64::from(self.beta[at])]
    }

    fn n(&self) -> usize {
        self.beta.len() / self.heads.n_v_head
    }
}

/// `Sᵀx` of a state `[d_k, d_v]`.
fn read(state: &[f32], x: &[f32], d_v: usize) -> Vec<f64> {
    let column = |i: usize| (0..x.len()).map(|j| f64::from(state[j * d_v + i]) * f64::from(x[j])).sum();
    (0..d_v).map(column).collect()
}

/// `S = g·S; S += k ⊗ beta·(v - Sᵀk); out = Sᵀq (+ skip·v)`, or the sum's rule, position after position; out is
/// `[n, n_v_head, d_v]`, the state `[n_v_head, d_k, d_v]`.
pub fn delta_net(rows: Rows, skip: Option<&[f32]>, state: &mut [f32]) -> Vec<f32> {
    let DeltaHeads { n_v_head, d_k, d_v, .. } = rows.heads;
    let mut out = Vec::with_capacity(rows.v.len());
    for t in 0..rows.n() {
        for (head, state) in state.chunks_exact_mut(d_k * d_v).enumerate().take(n_v_head) {
            let [q, k, v] = rows.qkv(t, head);
            let beta = f64::from(rows.beta[t * n_v_head + head]);
            let decayed: Vec<f64> =
                state.iter().enumerate().map(|(i, &s)| rows.decay(t, head, i / d_v) * f64::from(s)).collect();
            let known = |column: usize| match rows.heads.rule {
                DeltaRule::Delta => (0..d_k).map(|j| decayed[j * d_v + column] * f64::from(k[j])).sum(),
                DeltaRule::Sum => 0.0,
            };
            let delta: Vec<f64> = v.iter().enumerate().map(|(i, &v)| beta * (f64::from(v) - known(i))).collect();
            for (i, (s, decayed)) in state.iter_mut().zip(&decayed).enumerate() {
                *s = (decayed + f64::from(k[i / d_v]) * delta[i % d_v]) as f32;
            }
            let skip = skip.map_or(0.0, |skip| f64::from(skip[head]));
            out.extend(read(state, q, d_v).into_iter().zip(v).map(|(y, &v)| (y + skip * f64::from(v)) as f32));
        }
    }
    out
}

/// The same for a chunk at once. With `Γ[t, j]` the product of the decays after `j` up to `t` and `S` the state before
/// the chunk, what position `t` writes is
/// `delta[t] = beta[t]·(v[t] - Γ[t]·Sᵀk[t] - Σ_{j<t} Γ[t, j]·(k[j]·k[t])·delta[j])`: a triangular system, solved
/// forwards. Decays are multiplied and never divided, so that they may be 0.
#[cfg(test)]
fn chunked(rows: Rows, state: &mut [f32]) -> Vec<f32> {
    let DeltaHeads { n_v_head, d_k, d_v, .. } = rows.heads;
    let n = rows.n();
    let dot = |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum() };
    let mut out = vec![0.0; n * n_v_head * d_v];
    for (head, state) in state.chunks_exact_mut(d_k * d_v).enumerate() {
        // From the start of the chunk (column 0), and after each position.
        let decay = |t: usize, first: usize| (first..=t).map(|m| rows.gates(m, head)[0]).product::<f64>();
        let mut deltas: Vec<Vec<f64>> = Vec::with_capacity(n);
        for t in 0..n {
            let ([q, k, v], [_, beta]) = (rows.qkv(t, head), rows.gates(t, head));
            let old = decay(t, 0);
            let mut delta: Vec<f64> =
                v.iter().zip(read(state, k, d_v)).map(|(&v, known)| beta * (f64::from(v) - old * known)).collect();
            let mut y: Vec<f64> = read(state, q, d_v).into_iter().map(|y| old * y).collect();
            for (j, earlier) in deltas.iter().enumerate() {
                let (kj, decay) = (rows.qkv(j, head)[1], decay(t, j + 1));
                let (by_k, by_q) = (beta * decay * dot(kj, k), decay * dot(kj, q));
                delta.iter_mut().zip(earlier).for_each(|(d, e)| *d -= by_k * e);
                y.iter_mut().zip(earlier).for_each(|(y, e)| *y += by_q * e);
            }
            let own = dot(k, q);
            let out = &mut out[(t * n_v_head + head) * d_v..][..d_v];
            out.iter_mut().zip(y.iter().zip(&delta)).for_each(|(o, (y, d))| *o = (y + own * d) as f32);
            deltas.push(delta);
        }
        let decays: Vec<f64> = (0..=n).map(|first| if n == 0 { 1.0 } else { decay(n - 1, first) }).collect();
        for (i, s) in state.iter_mut().enumerate() {
            let new = (0..n).map(|t| decays[t + 1] * f64::from(rows.qkv(t, head)[1][i / d_v]) * deltas[t][i % d_v]);
            *s = (decays[0] * f64::from(*s) + new.sum::<f64>()) as f32;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use model::plan::Sharing;

    use super::*;

    /// A fixed stream of numbers in -1..1.
    fn random(n: usize, seed: u64) -> Vec<f32> {
        let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40) as f32 / (1u32 << 23) as f32 - 1.0
        };
        (0..n).map(|_| next()).collect()
    }

    /// q, k, v, g and beta as a layer makes them: keys of length 1, gates between 0 and 1, some decays 0 and some 1.
    fn inputs(heads: DeltaHeads, n: usize) -> [Vec<f32>; 5] {
        let DeltaHeads { n_k_head, n_v_head, d_k, d_v, .. } = heads;
        let mut qk = [1, 2].map(|seed| random(n * n_k_head * d_k, seed));
        for head in qk.iter_mut().flat_map(|x| x.chunks_exact_mut(d_k)) {
            let len = head.iter().map(|x| x * x).sum::<f32>().sqrt();
            head.iter_mut().for_each(|x| *x /= len);
        }
        let mut g: Vec<f32> = random(n * n_v_head, 4).iter().map(|x| (2.0 * x - 2.0).exp()).collect();
        (0..g.len()).filter(|i| i % 29 == 13).for_each(|i| g[i] = 0.0);
        (0..g.len()).filter(|i| i % 7 < 3).for_each(|i| g[i] = 1.0);
        let beta = random(n * n_v_head, 5).iter().map(|x| 0.5 + 0.5 * x).collect();
        let [q, k] = qk;
        [q, k, random(n * n_v_head * d_v, 3), g, beta]
    }

    fn relative(found: &[f32], wanted: &[f32]) -> f64 {
        let error: f64 = found.iter().zip(wanted).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum();
        let size: f64 = wanted.iter().map(|&b| f64::from(b).powi(2)).sum();
        (error / size).sqrt()
    }

    #[test]
    fn steps_and_chunks_agree_at_every_length() {
        let heads = |n_k_head, n_v_head, d_k, d_v, sharing| DeltaHeads {
            n_k_head,
            n_v_head,
            d_k,
            d_v,
            sharing,
            rule: DeltaRule::Delta,
        };
        for heads in [
            heads(1, 2, 8, 12, Sharing::Grouped),
            heads(2, 4, 12, 5, Sharing::Tiled),
            heads(3, 3, 4, 4, Sharing::Tiled),
        ] {
            let inputs = inputs(heads, 200);
            let rows = Rows::new(heads, inputs.each_ref().map(Vec::as_slice));
            let n_state = heads.n_v_head * heads.d_k * heads.d_v;
            let before = random(n_state, 6);
            for n in 1..=200 {
                let (mut steps, mut chunks) = (before.clone(), before.clone());
                let wanted = delta_net(rows.range(0..n), None, &mut steps);
                let found: Vec<f32> =
                    (0..n).step_by(64).flat_map(|t| chunked(rows.range(t..n.min(t + 64)), &mut chunks)).collect();
                let errors = [relative(&found, &wanted), relative(&chunks, &steps)];
                assert!(errors.iter().all(|&e| e < 1e-6), "{n} positions of {heads:?}: {errors:?}");
            }
        }
    }

    #[test]
    fn a_chunk_of_no_decay_and_full_rate_stores_what_it_is_told() {
        // Keys at right angles: each stores its value, and the query reads it back.
        let heads =
            DeltaHeads { n_k_head: 1, n_v_head: 2, d_k: 2, d_v: 1, sharing: Sharing::Grouped, rule: DeltaRule::Delta };
        let (k, v) = ([1.0, 0.0, 0.0, 1.0], [5.0, 6.0, 7.0, 8.0]);
        let q = [1.0, 0.0, 1.0, 1.0];
        let forms: [fn(Rows, &mut [f32]) -> Vec<f32>; 2] = [|rows, state| delta_net(rows, None, state), chunked];
        for form in forms {
            let mut state = [9.0, 0.0, 9.0, 1.0];
            let y = form(Rows::new(heads, [&q, &k, &v, &[1.0; 4], &[1.0; 4]]), &mut state);
            assert_eq!((y.as_slice(), state), (&[5.0, 6.0, 12.0, 14.0][..], [5.0, 7.0, 6.0, 8.0]));
        }
    }

    /// The recurrence of Mamba-2 as its paper has it: `S = a·S + Δ·x ⊗ B; y = S·C + D·x`.
    #[test]
    fn a_sum_is_the_state_space_of_mamba() {
        let heads =
            DeltaHeads { n_k_head: 2, n_v_head: 4, d_k: 6, d_v: 3, sharing: Sharing::Grouped, rule: DeltaRule::Sum };
        let n = 9;
        let [c, b] = [1, 2].map(|seed| random(n * 2 * 6, seed));
        let (x, d) = (random(n * 4 * 3, 3), random(4, 4));
        let (a, step) = (random(n * 4, 5).iter().map(|x| x.abs()).collect::<Vec<_>>(), random(n * 4, 6));
        let mut state = vec![0.0; 4 * 6 * 3];
        let found = delta_net(Rows::new(heads, [&c, &b, &x, &a, &step]), Some(&d), &mut state);
        for head in 0..4 {
            for column in 0..3 {
                let mut s = [0.0f64; 6];
                for t in 0..n {
                    let group = (t * 2 + head / 2) * 6;
                    let x = f64::from(x[(t * 4 + head) * 3 + column]);
                    let [a, step] = [&a, &step].map(|gate| f64::from(gate[t * 4 + head]));
                    let mut y = f64::from(d[head]) * x;
                    for (i, s) in s.iter_mut().enumerate() {
                        *s = a * *s + step * x * f64::from(b[group + i]);
                        y += *s * f64::from(c[group + i]);
                    }
                    let far = (f64::from(found[(t * 4 + head) * 3 + column]) - y).abs();
                    assert!(far < 1e-5, "position {t}, head {head}, column {column}: off by {far}");
                }
            }
        }
    }

    /// One decay for all rows of a state and the same for each of them are the same.
    #[test]
    fn rows_may_decay_by_themselves() {
        let heads =
            DeltaHeads { n_k_head: 1, n_v_head: 2, d_k: 3, d_v: 2, sharing: Sharing::Grouped, rule: DeltaRule::Delta };
        let [q, k, v, g, beta] = inputs(heads, 5);
        let by_row: Vec<f32> = g.iter().flat_map(|&g| [g; 3]).collect();
        let (mut one, mut each) = (random(12, 6), random(12, 6));
        let wanted = delta_net(Rows::new(heads, [&q, &k, &v, &g, &beta]), None, &mut one);
        assert_eq!(delta_net(Rows::new(heads, [&q, &k, &v, &by_row, &beta]), None, &mut each), wanted);
        assert_eq!(one, each);
        // A row that is forgotten at once, and nothing that is told: the others are left.
        let mut state = [1.0; 12];
        let (gone, none) = ([0.0, 1.0, 0.5, 1.0, 1.0, 1.0], [0.0; 2]);
        delta_net(Rows::new(heads, [&[0.0; 3], &[1.0; 3], &[0.0; 4], &gone, &none]), None, &mut state);
        assert_eq!(state, [0.0, 0.0, 1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn a_convolution_crosses_chunks_of_any_length() {
        let (d, width, n) = (5, 4, 23);
        let (x, w) = (random(n * d, 1), random(d * width, 2));
        let conv = Conv { w: w.clone(), bias: None, silu: true };
        let mut state = vec![0.0; (width - 1) * d];
        let whole = causal_conv(&x, &conv, d, &mut state);
        assert_eq!(state, x[(n - 3) * d..]);
        // By hand: position 1 of channel 2 sees positions 0 and 1.
        let sum = w[2 * width + 2] * x[2] + w[2 * width + 3] * x[d + 2];
        assert!((whole[d + 2] - sum / (1.0 + (-sum).exp())).abs() < 1e-6);
        for len in [1, 2, 3, 4, 7] {
            let mut state = vec![0.0; (width - 1) * d];
            let parts: Vec<f32> = x.chunks(len * d).flat_map(|x| causal_conv(x, &conv, d, &mut state)).collect();
            assert_eq!(parts, whole, "{len} positions a chunk");
        }
        let plain = Conv { bias: Some(vec![0.5; d]), silu: false, ..conv };
        let found = causal_conv(&x, &plain, d, &mut vec![0.0; (width - 1) * d]);
        assert!((found[d + 2] - (sum + 0.5)).abs() < 1e-6);
    }

    #[test]
    fn gates_hold_at_their_ends() {
        let inf = f32::INFINITY;
        // (a, dt_bias, a_log, g): a softplus of 0, of ln 2, of its argument, and one that would overflow as ln(1 +
        // e^x).
        for (a, dt_bias, a_log, g) in [
            (-200.0, 0.0, -1.0, 1.0),
            (0.5, -0.5, -1.0, 0.5),
            (30.0, 1.0, -0.01, 0.733_447),
            (1000.0, 0.0, -1.0, 0.0),
            (inf, 0.0, -1.0, 0.0),
            (5.0, 0.0, 0.0, 1.0),
        ] {
            let (found, beta) = decay_beta(&[a], Some(&[0.0]), &[a_log], &[dt_bias], None);
            assert!((found[0] - g).abs() < 1e-6 && beta == [0.5], "{a} + {dt_bias}, {a_log}: {found:?} {beta:?}");
        }
        assert_eq!(decay_beta(&[0.0; 2], Some(&[-200.0, inf]), &[0.0; 2], &[0.0; 2], None).1[1], 1.0);
        // A bound is reached, half reached, and not felt.
        let bounded = decay_beta(&[200.0, 0.5, -200.0], Some(&[0.0]), &[2.0], &[0.0, -0.5, 0.0], Some(-3.0)).0;
        let wanted = [-3.0f32, -1.5, 0.0].map(f32::exp);
        assert!(bounded.iter().zip(wanted).all(|(found, wanted)| (found - wanted).abs() < 1e-6), "{bounded:?}");
        // Two rates of each of two step sizes, ln 2 and 31.
        let several = decay_beta(&[0.5, 30.0], None, &[-1.0, -2.0, 0.0, -0.1], &[-0.5, 1.0], None).0;
        let wanted = [0.5, 0.25, 1.0, (-3.1f32).exp()];
        assert!(several.iter().zip(wanted).all(|(found, wanted)| (found - wanted).abs() < 1e-6), "{several:?}");
        let step = decay_beta(&[0.5, 30.0], None, &[-1.0; 2], &[-0.5, 1.0], None).1;
        assert!((step[0] - 2f32.ln()).abs() < 1e-6 && step[1] == 31.0, "{step:?}");
        // Of x = (3, 4) the mean square is 12.5; silu(0) is 0.
        let y = gated_norm(&[3.0, 4.0], &[20.0, 0.0], &[2.0, 5.0], 2, false, 0.0);
        assert!((y[0] - 20.0 * 6.0 / 12.5f32.sqrt()).abs() < 1e-5 && y[1] == 0.0, "{y:?}");
        // With the gate first nothing but the first number is left, of two heads each: the root of its mean square is
        // that of d_head times it.
        let y = gated_norm(&[3.0, 4.0, 1.0, 7.0], &[20.0, 0.0, 9.0, 0.0], &[2.0, 5.0, -1.0, 5.0], 2, true, 0.0);
        assert!((y[0] - 2.0 * 2f32.sqrt()).abs() < 1e-5 && (y[2] + 2f32.sqrt()).abs() < 1e-5, "{y:?}");
        assert!(y[1] == 0.0 && y[3] == 0.0, "{y:?}");
    }
}
