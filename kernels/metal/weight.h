// Rows of weights of any type of `kernels/quant`. A weight has one to three planes, each bound to a slot of its own:
// PLANE_PARAMS are a kernel's parameters for them, ROW_OF is row `i` of such a weight.
#pragma once

#include "metal/common.h"

#define PLANES_1(w, a, b, c) device const uchar* w##_q [[buffer(a)]]
#define PLANES_2(w, a, b, c) PLANES_1(w, a, b, c), device const uchar* w##_scales [[buffer(b)]]
#define PLANES_3(w, a, b, c) PLANES_2(w, a, b, c), device const uchar* w##_biases [[buffer(c)]]
#define ROW_1(W, w, i, n) row_of<W>(w##_q, w##_q, w##_q, i, n)
#define ROW_2(W, w, i, n) row_of<W>(w##_q, w##_scales, w##_scales, i, n)
#define ROW_3(W, w, i, n) row_of<W>(w##_q, w##_scales, w##_biases, i, n)
#define PASTE(a, b) a##b
#define EXPAND_PASTE(a, b) PASTE(a, b)
#define PLANE_PARAMS EXPAND_PASTE(PLANES_, PLANES)
#define ROW_OF EXPAND_PASTE(ROW_, PLANES)

// A row times a row of numbers, the same sum in all lanes of a simdgroup: lane l takes units l, l + 32, ...
template <class W> inline float row_dot(const thread Row& row, device const float* x, uint lane) {
    const uint n_units = (row.n + W::UNIT - 1) / W::UNIT;
    float sum = 0.0f;
    for (uint unit = lane; unit < n_units; unit += 32) {
        typename W::Raw raw;
        W::load(row, unit, raw);
        for (int r = 0; r < W::RUNS; r++) {
            float v[16];
            decode_run<W>(raw, unit, r, v);
            const uint first = 16 * run_index<W>(unit, r);
            for (uint i = 0; i < 16; i++) {
                if (first + i < row.n) sum += v[i] * x[first + i];
            }
        }
    }
    return simd_sum(sum);
}
