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

// A gated activation: ACT is 0 for silu, 1 for gelu (tanh form), 2 for the clamped swiglu of gpt-oss, 3 for silu that
// is clamped after it, 4 for a rectified gate.
inline float gated(uint act, float g, float u, float alpha, float limit) {
    if (act == 0) return g * sigmoid(g) * u;
    if (act == 1) {
        // (1 + tanh(y)) / 2 as a sigmoid, which cancels nothing where y is far below zero.
        return g * sigmoid(1.5957691216f * (g + 0.044715f * g * g * g)) * u;
    }
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
