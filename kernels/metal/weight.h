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

// A run of 16 weights times 16 numbers, whose sum is `total`. The scale is applied once.
template <class W, bool IS_FLOAT> struct RunDot {
    static inline float of(const thread typename W::Raw& raw, uint unit, int r, const thread float4* x, float total) {
        u32 w[4];
        float scale, min;
        W::run(raw, unit, r, w, scale, min);
        const u32 flip = W::SIGNED ? 0x80808080u : 0;
        const int offset = W::OFFSET - (W::SIGNED ? 128 : 0);
        float sum = 0.0f;
        for (uint i = 0; i < 4; i++) {
            const u32 word = w[i] ^ flip;
            sum += float_of_byte(word, 0, offset) * x[i].x + float_of_byte(word, 1, offset) * x[i].y +
                   float_of_byte(word, 2, offset) * x[i].z + float_of_byte(word, 3, offset) * x[i].w;
        }
        return W::HAS_MIN ? scale * sum + min * total : scale * sum;
    }
};
template <class W> struct RunDot<W, true> {
    static inline float of(const thread typename W::Raw& raw, uint unit, int r, const thread float4* x, float) {
        float v[16], sum = 0.0f;
        W::values(raw, unit, r, v);
        for (uint i = 0; i < 4; i++) {
            sum += v[4 * i] * x[i].x + v[4 * i + 1] * x[i].y + v[4 * i + 2] * x[i].z + v[4 * i + 3] * x[i].w;
        }
        return sum;
    }
};

// N rows times a row of numbers, the same sums in all lanes. WIDE_X: numbers are loaded four at a time, once for all
// rows, and their count is a multiple of 16; else each row goes by itself.
template <class W, int N>
inline void rows_dot(const thread Row* rows, device const float* x, uint lane, thread float* sums) {
#if WIDE_X
    const uint n_units = rows[0].n / W::UNIT;
    for (int j = 0; j < N; j++) sums[j] = 0.0f;
    for (uint unit = lane; unit < n_units; unit += 32) {
        typename W::Raw raw[N];
        for (int j = 0; j < N; j++) W::load(rows[j], unit, raw[j]);
        for (int r = 0; r < W::RUNS; r++) {
            device const float4* from = (device const float4*)(x + 16 * run_index<W>(unit, r));
            float4 v[4];
            for (uint i = 0; i < 4; i++) v[i] = from[i];
            const float4 all = v[0] + v[1] + v[2] + v[3];
            const float total = all.x + all.y + all.z + all.w;
            for (int j = 0; j < N; j++) sums[j] += RunDot<W, W::IS_FLOAT != 0>::of(raw[j], unit, r, v, total);
        }
    }
    for (int j = 0; j < N; j++) sums[j] = simd_sum(sums[j]);
#else
    for (int j = 0; j < N; j++) sums[j] = row_dot<W>(rows[j], x, lane);
#endif
}
