// What every Metal kernel starts from. Sources are compiled as one string: the host joins the headers that a source
// names, each once. Functions that Metal may compute in fast math are called by their exact names.
#pragma once

#include "quant/ints.h"

// 1 / (1 + e^-x)
inline float sigmoid(float x) { return 1.0f / (1.0f + precise::exp(-x)); }

// log(1 + e^x). Metal has no log1p: below 1/64 three terms of its series are off by less than 1e-6 of it. A comparison
// keeps NaN where max would lose it.
inline float softplus(float x) {
    const float y = precise::exp(-fabs(x));
    const float tail = y < 0.015625f ? y * (1.0f - y * (0.5f - y * 0.33333334f)) : precise::log(1.0f + y);
    return (x < 0.0f ? 0.0f : x) + tail;
}

// The decay of a delta rule.
inline float decay(float x, float a_log) { return precise::exp(a_log * softplus(x)); }

// x * Phi(x) by the approximation by tanh, (1 + tanh(y)) / 2 as a sigmoid, which cancels nothing where y is far below
// zero.
inline float gelu_tanh(float x) { return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x)); }

// x * Phi(x), where Phi(x) is half of erfc(-x / sqrt(2)). Metal has no erfc: for z >= 0 it is t * e^(p(t) - z^2) with
// t = 1 / (1 + z / 2) to 1.2e-7 of itself, with a polynomial p by Chebyshev's fit (Press et al.: "Numerical Recipes",
// 6.2), so that far below zero nothing cancels.
inline float gelu_erf(float x) {
    const float z = fabs(x) * 0.70710678f, t = 1.0f / (1.0f + 0.5f * z);
    float p = 0.17087277f;
    p = p * t - 0.82215223f;
    p = p * t + 1.48851587f;
    p = p * t - 1.13520398f;
    p = p * t + 0.27886807f;
    p = p * t - 0.18628806f;
    p = p * t + 0.09678418f;
    p = p * t + 0.37409196f;
    p = p * t + 1.00002368f;
    const float tail = 0.5f * t * precise::exp(p * t - 1.26551223f - z * z);
    return x * (x < 0.0f ? tail : 1.0f - tail);
}

// A gated activation: ACT is 0 for silu, 1 for gelu (tanh form), 2 for the clamped swiglu of gpt-oss, 3 for silu that
// is clamped after it, 4 for a rectified gate.
inline float gated(uint act, float g, float u, float alpha, float limit) {
    if (act == 0) return g * sigmoid(g) * u;
    if (act == 1) return gelu_tanh(g) * u;
    if (act == 4) return (g < 0.0f ? 0.0f : g) * u;
    // Comparisons keep NaN where min and max would lose it.
    u = u > limit ? limit : u < -limit ? -limit : u;
    if (act == 3) {
        g = g * sigmoid(g);
        return (g > limit ? limit : g) * u;
    }
    g = g > limit ? limit : g;
    return g * sigmoid(alpha * g) * (u + 1.0f);
}
