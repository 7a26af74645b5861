//! exp, tanh, sigmoid, softplus, silu and gelu for every instruction set: one source over [`Float`], so that all have
//! the same bits.
//!
//! Accuracy (tests): exp within 1.5 units in the last place, tanh and sigmoid within 3, softplus and silu within 4,
//! gelu within 12 on
//! |x| < 2 (its argument carries one rounding into the exponent); infinities and NaN as IEEE says.

use super::isa::on_isa;
use super::lanes::{Float, Lanes};
use model::plan::Gate;

/// Adding and subtracting 1.5 · 2^23 rounds a small f32 to a whole number, ties to even.
const ROUND: f32 = 12_582_912.0;

/// `e^x`. Below -104 it is 0, above 88.73 infinity, NaN stays NaN; subnormal results are rounded once.
#[inline(always)]
pub fn exp<F: Float>(x: F) -> F {
    // NaN passes both clamps: they return their second operand when either is NaN.
    let x = F::splat(-104.0).max(F::splat(89.0).min(x));
    let n = x.fma(F::splat(std::f32::consts::LOG2_E), F::splat(ROUND)).sub(F::splat(ROUND));
    // ln 2 in two parts: the product with the first is exact inside the fma, the second adds the bits that f32 cut off.
    let r = n.fma(F::splat(-std::f32::consts::LN_2), x);
    let r = n.fma(F::splat(1.904_654_2e-9), r);
    // Minimax of (e^r - 1 - r) / r² on |r| <= ln 2 / 2.
    let mut q = F::splat(0.001_381_459_6);
    for c in [0.008_368_717_5, 0.041_668_39, 0.166_665_21, 0.499_999_94] {
        q = q.fma(r, F::splat(c));
    }
    let p = q.fma(r.mul(r), r).add(F::splat(1.0));
    p.scale2(n)
}

/// `tanh x`.
#[inline(always)]
pub fn tanh<F: Float>(x: F) -> F {
    let a = x.abs();
    // Large: 1 - 2 / (e^2a + 1).
    let e = exp(a.add(a));
    let large = F::splat(1.0).sub(F::splat(2.0).div(e.add(F::splat(1.0))));
    // Small: minimax of (tanh(a) / a - 1) / a² in a².
    let z = a.mul(a);
    let mut q = F::splat(-0.005_717_032_6);
    for c in [0.020_650_575, -0.053_743_493, 0.133_314_91, -0.333_332_84] {
        q = q.fma(z, F::splat(c));
    }
    let small = q.fma(z.mul(a), a);
    a.select_lt(F::splat(0.625), small, large).copysign(x)
}

/// `σ(x) = 1 / (1 + e^-x)`; below about -88.7 it is 0.
#[inline(always)]
pub fn sigmoid<F: Float>(x: F) -> F {
    let e = exp(F::splat(0.0).sub(x));
    F::splat(1.0).div(e.add(F::splat(1.0)))
}

/// `ln(1 + e^x)`, as `max(x, 0) + ln(1 + e^-|x|)`, so that nothing overflows.
#[inline(always)]
pub fn softplus<F: Float>(x: F) -> F {
    let u = exp(F::splat(0.0).sub(x.abs()));
    // ln(1 + u) = 2 artanh(s) with s = u / (2 + u) <= 1/3: the series in s²; the first omitted term is below 2^-26.
    let s = u.div(u.add(F::splat(2.0)));
    let z = s.mul(s);
    let mut q = F::splat(1.0 / 13.0);
    for c in [1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0, 1.0] {
        q = q.fma(z, F::splat(c));
    }
    q.fma(s.add(s), x.max(F::splat(0.0)))
}

/// `x · σ(x) = x / (1 + e^-x)`. At -inf it is NaN, as the formula has it; below about -88.7 it is -0.
#[inline(always)]
pub fn silu<F: Float>(x: F) -> F {
    let e = exp(F::splat(0.0).sub(x));
    x.div(e.add(F::splat(1.0)))
}

/// `x/2 · (1 + tanh(√(2/π)·(x + 0.044715·x³)))`, computed as `x · σ(2·(..))`, which needs no tanh.
#[inline(always)]
pub fn gelu_tanh<F: Float>(x: F) -> F {
    // -2·√(2/π), times 1 and times 0.044715.
    const A: f32 = -1.595_769;
    const B: f32 = -0.071_354_814;
    let u = x.mul(x).fma(F::splat(B), F::splat(A)).mul(x);
    x.div(exp(u).add(F::splat(1.0)))
}

/// `x · Φ(x)` by the error function, in f64: `libm` gives the same bits everywhere.
pub fn gelu_erf(x: f32) -> f32 {
    let x = f64::from(x);
    (x * 0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2)) as f32
}

/// `g' · σ(alpha · g') · (u' + 1)`, both cut off at `limit`; NaN in either stays NaN.
#[inline(always)]
pub fn clamped_swiglu<F: Float>(g: F, u: F, alpha: f32, limit: f32) -> F {
    let (low, high) = (F::splat(-limit), F::splat(limit));
    // `min` and `max` return their second operand when either is NaN.
    let (g, u) = (high.min(g), low.max(high.min(u)));
    let e = exp(g.mul(F::splat(-alpha)));
    g.div(e.add(F::splat(1.0))).mul(u.add(F::splat(1.0)))
}

/// `silu(g)' · u'`, both cut off at `limit`; NaN in either stays NaN.
#[inline(always)]
fn clamped_silu<F: Float>(g: F, u: F, limit: f32) -> F {
    let (low, high) = (F::splat(-limit), F::splat(limit));
    high.min(silu(g)).mul(low.max(high.min(u)))
}

/// `act(g) · u` of a gated activation.
#[inline(always)]
pub fn gated<F: Float>(act: Gate, g: F, u: F) -> F {
    match act {
        Gate::Silu => silu(g).mul(u),
        Gate::GeluTanh => gelu_tanh(g).mul(u),
        // `max` returns its second operand when either is NaN.
        Gate::Relu => F::splat(0.0).max(g).mul(u),
        Gate::ClampedSwiglu { alpha, limit } => clamped_swiglu(g, u, alpha, limit),
        Gate::ClampedSilu { limit } => clamped_silu(g, u, limit),
    }
}

/// `out = act(gate) ⊙ up`, slices of one length.
#[inline(always)]
fn gated_lanes<L: Lanes>(act: Gate, gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert!(gate.len() == out.len() && up.len() == out.len());
    for i in (0..out.len()).step_by(16) {
        gated(act, L::load_at(gate, i, 0.0), L::load_at(up, i, 0.0)).store_at(out, i);
    }
}

on_isa! {
    /// `out = act(gate) ⊙ up`, slices of one length.
    pub fn gated_slice(act: Gate, gate: &[f32], up: &[f32], out: &mut [f32]) = gated_lanes
}

#[inline(always)]
fn gate_in_place_lanes<L: Lanes>(act: Gate, gate: &mut [f32], up: &[f32]) {
    assert!(gate.len() == up.len());
    for i in (0..up.len()).step_by(16) {
        gated(act, L::load_at(gate, i, 0.0), L::load_at(up, i, 0.0)).store_at(gate, i);
    }
}

on_isa! {
    /// `gate = act(gate) ⊙ up`, slices of one length.
    pub fn gate_in_place(act: Gate, gate: &mut [f32], up: &[f32]) = gate_in_place_lanes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::CheckedIsa;

    fn exp_lanes<L: Lanes>(x: &mut [f32]) {
        for i in (0..x.len()).step_by(16) {
            exp(L::load_at(x, i, 0.0)).store_at(x, i);
        }
    }
    fn tanh_lanes<L: Lanes>(x: &mut [f32]) {
        for i in (0..x.len()).step_by(16) {
            tanh(L::load_at(x, i, 0.0)).store_at(x, i);
        }
    }
    fn silu_lanes<L: Lanes>(x: &mut [f32]) {
        for i in (0..x.len()).step_by(16) {
            silu(L::load_at(x, i, 0.0)).store_at(x, i);
        }
    }
    fn sigmoid_lanes<L: Lanes>(x: &mut [f32]) {
        for i in (0..x.len()).step_by(16) {
            sigmoid(L::load_at(x, i, 0.0)).store_at(x, i);
        }
    }
    fn softplus_lanes<L: Lanes>(x: &mut [f32]) {
        for i in (0..x.len()).step_by(16) {
            softplus(L::load_at(x, i, 0.0)).store_at(x, i);
        }
    }
    fn gelu_lanes<L: Lanes>(x: &mut [f32]) {
        for i in (0..x.len()).step_by(16) {
            gelu_tanh(L::load_at(x, i, 0.0)).store_at(x, i);
        }
    }
    on_isa! { fn exp_on(x: &mut [f32]) = exp_lanes }
    on_isa! { fn tanh_on(x: &mut [f32]) = tanh_lanes }
    on_isa! { fn silu_on(x: &mut [f32]) = silu_lanes }
    on_isa! { fn sigmoid_on(x: &mut [f32]) = sigmoid_lanes }
    on_isa! { fn softplus_on(x: &mut [f32]) = softplus_lanes }
    on_isa! { fn gelu_on(x: &mut [f32]) = gelu_lanes }

    /// Every 9973rd f32 bit pattern, all special values among them, and a fine grid around zero.
    fn inputs() -> Vec<f32> {
        let mut x: Vec<f32> = (0..=u32::MAX).step_by(9973).map(f32::from_bits).collect();
        x.extend((-120_000..120_000).map(|i| i as f32 * 1e-3));
        x.extend([0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MIN_POSITIVE, 1e-45, -1e-45]);
        x
    }

    /// Distance in units in the last place of the exact value.
    fn ulps(got: f32, exact: f64) -> f64 {
        if got as f64 == exact || got.is_nan() && exact.is_nan() {
            return 0.0;
        }
        let near = exact as f32;
        if near.is_infinite() || got.is_infinite() || got.is_nan() {
            return if near == got { 0.0 } else { f64::INFINITY };
        }
        let ulp = (f32::from_bits(near.abs().to_bits() + 1) as f64 - near.abs() as f64).max(1e-45);
        (got as f64 - exact).abs() / ulp
    }

    #[test]
    fn functions_are_accurate_and_equal_on_every_instruction_set() {
        type OnIsa = fn(CheckedIsa, &mut [f32]);
        // Past these limits silu and sigmoid underflow early (their denominator is infinite) and gelu's argument
        // carries its rounding.
        let cases: [(&str, OnIsa, fn(f32) -> f32, fn(f64) -> f64, f64, f64); 6] = [
            ("exp", exp_on, exp::<f32>, f64::exp, f64::INFINITY, 1.5),
            ("tanh", tanh_on, tanh::<f32>, f64::tanh, f64::INFINITY, 3.0),
            ("sigmoid", sigmoid_on, sigmoid::<f32>, |x| 1.0 / (1.0 + (-x).exp()), 80.0, 3.0),
            ("softplus", softplus_on, softplus::<f32>, |x| x.max(0.0) + (-x.abs()).exp().ln_1p(), f64::INFINITY, 4.0),
            ("silu", silu_on, silu::<f32>, |x| x / (1.0 + (-x).exp()), 80.0, 4.0),
            (
                "gelu_tanh",
                gelu_on,
                gelu_tanh::<f32>,
                |x| x / (1.0 + (-2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).exp()),
                2.0,
                12.0,
            ),
        ];
        let x = inputs();
        for (name, on_isa, one, exact, limit, max_ulps) in cases {
            let mut scalar = x.clone();
            on_isa(CheckedIsa::SCALAR, &mut scalar);
            let mut worst = (0.0, 0.0);
            for (&x, &y) in x.iter().zip(&scalar) {
                assert_eq!(one(x).to_bits() & !0x40_0000, y.to_bits() & !0x40_0000, "{name}({x}) of one lane");
                if (x as f64).abs() < limit || limit.is_infinite() {
                    let e = ulps(y, exact(x as f64));
                    if e > worst.0 {
                        worst = (e, x);
                    }
                }
            }
            println!("{name}: {:.2} ulp at {}", worst.0, worst.1);
            assert!(worst.0 <= max_ulps, "{name}({}) is off by {} ulp", worst.1, worst.0);
            for isa in CheckedIsa::all() {
                let mut y = x.clone();
                on_isa(isa, &mut y);
                for i in 0..x.len() {
                    assert!(
                        y[i].to_bits() == scalar[i].to_bits() || y[i].is_nan() && scalar[i].is_nan(),
                        "{name}({}) on {isa}: {} and scalar {}",
                        x[i],
                        y[i],
                        scalar[i]
                    );
                }
            }
        }
    }

    /// As a function of the gate; the gate's product with alpha carries one rounding into the exponent.
    #[test]
    fn clamped_swiglu_is_accurate_and_equal_on_every_instruction_set() {
        let act = Gate::ClampedSwiglu { alpha: 1.702, limit: 7.0 };
        let g: Vec<f32> = (-60_000..60_000).map(|i| i as f32 * 1.7e-4).collect();
        let u: Vec<f32> = g.iter().rev().map(|g| 0.9 * g).collect();
        let mut scalar = vec![0.0; g.len()];
        gated_slice(CheckedIsa::SCALAR, act, &g, &u, &mut scalar);
        for i in 0..g.len() {
            let (x, y) = (f64::from(g[i]).min(7.0), f64::from(u[i]).clamp(-7.0, 7.0) + 1.0);
            // The sum with 1 is exact to half a unit of the larger term.
            let exact = x / (1.0 + (-1.702f32 as f64 * x).exp()) * y;
            let unit = f64::from(f32::EPSILON) * (exact.abs() + (exact / y).abs());
            assert!((f64::from(scalar[i]) - exact).abs() <= 12.0 * unit, "{} {}: {} {exact}", g[i], u[i], scalar[i]);
        }
        for isa in CheckedIsa::all() {
            let mut y = vec![0.0; g.len()];
            gated_slice(isa, act, &g, &u, &mut y);
            assert!(y.iter().zip(&scalar).all(|(a, b)| a.to_bits() == b.to_bits()), "{isa}");
        }
    }

    #[test]
    fn large_arguments_end_as_ieee_says() {
        let inf = f32::INFINITY;
        assert_eq!([exp(inf), exp(-inf), exp(89.0), exp(-104.0)], [inf, 0.0, inf, 0.0]);
        assert_eq!(
            [tanh(inf), tanh(-inf), tanh(1e30), tanh(-0.0f32).to_bits() as f32],
            [1.0, -1.0, 1.0, 0x8000_0000u32 as f32]
        );
        assert_eq!([silu(inf), silu(-1000.0f32), gelu_tanh(inf), gelu_tanh(-1e20f32)], [inf, 0.0, inf, 0.0]);
        assert_eq!([sigmoid(inf), sigmoid(-inf), softplus(inf), softplus(-inf)], [1.0, 0.0, inf, 0.0]);
        assert!(sigmoid(f32::NAN).is_nan() && softplus(f32::NAN).is_nan());
        let clamped = |g: f32, u: f32| clamped_swiglu(g, u, 1.702, 7.0);
        assert_eq!([clamped(inf, inf), clamped(0.0, -inf), clamped(-1000.0, 1.0)], [clamped(7.0, 7.0), 0.0, 0.0]);
        assert!(clamped(f32::NAN, 1.0).is_nan() && clamped(1.0, f32::NAN).is_nan());
        assert!(silu(-inf).is_nan() && gelu_tanh(f32::NAN).is_nan() && exp(f32::NAN).is_nan());
    }
}
