// What every Metal kernel starts from. Sources are compiled as one string: the host joins the headers that a source
// names, each once. Functions that Metal may compute in fast math are called by their exact names.
#pragma once

#include "quant/ints.h"

// 1 / (1 + e^-x)
inline float sigmoid(float x) { return 1.0f / (1.0f + precise::exp(-x)); }

// exp(a_log * log(1 + e^x)), the decay of a delta rule. Metal has no log1p: below 1/64 three terms of its series are
// off by less than 1e-6 of it. A comparison keeps NaN where max would lose it.
inline float decay(float x, float a_log) {
    const float y = precise::exp(-fabs(x));
    const float tail = y < 0.015625f ? y * (1.0f - y * (0.5f - y * 0.33333334f)) : precise::log(1.0f + y);
    return precise::exp(a_log * ((x < 0.0f ? 0.0f : x) + tail));
}

// A gated activation: ACT is 0 for silu, 1 for gelu (tanh form), 2 for the clamped swiglu of gpt-oss.
inline float gated(uint act, float g, float u, float alpha, float limit) {
    if (act == 0) return g * sigmoid(g) * u;
    if (act == 1) {
        // (1 + tanh(y)) / 2 as a sigmoid, which cancels nothing where y is far below zero.
        return g * sigmoid(1.5957691216f * (g + 0.044715f * g * g * g)) * u;
    }
    // Comparisons keep NaN where min and max would lose it.
    g = g > limit ? limit : g;
    u = u > limit ? limit : u < -limit ? -limit : u;
    return g * sigmoid(alpha * g) * (u + 1.0f);
}
