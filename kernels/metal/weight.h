// Rows of weights of any type of `kernels/quant`. A weight has one to three planes, each bound to a slot of its own:
// PLANE_PARAMS are a kernel's parameters for them, ROW_OF is row `i` of such a weight.
#pragma once

#include "metal/common.h"
#include "metal/in_place.h"

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

// A run of 16 weights. `dot` gives them times 16 numbers, whose sum is `total`, and applies a scale once; the numbers
// are multiplied with `places()` ahead. IS_MASKED: bytes are multiplied where they lie, which pays for one row of x.
template <class W, bool IS_FLOAT, bool IS_MASKED> struct Run {
    float v[16];
    float scale, min;
    inline void load(const thread typename W::Raw& raw, uint unit, int r) {
        u32 w[4];
        W::run(raw, unit, r, w, scale, min);
        const u32 flip = W::SIGNED ? 0x80808080u : 0;
        const int offset = W::OFFSET - (W::SIGNED ? 128 : 0);
        for (uint i = 0; i < 16; i++) v[i] = float_of_byte(w[i / 4] ^ flip, i % 4, offset);
    }
    static inline float4 places() { return float4(1.0f); }
    inline float dot(const thread float4* x, float total) const {
        float sum = 0.0f;
        for (uint i = 0; i < 4; i++) {
            sum += v[4 * i] * x[i].x + v[4 * i + 1] * x[i].y + v[4 * i + 2] * x[i].z + v[4 * i + 3] * x[i].w;
        }
        return W::HAS_MIN ? scale * sum + min * total : scale * sum;
    }
};
template <class W> struct Run<W, false, true> {
    u32 w[4];
    float scale, least; // what a byte of zeros stands for
    inline void load(const thread typename W::Raw& raw, uint unit, int r) {
        float min;
        W::run(raw, unit, r, w, scale, min);
        if (W::SIGNED) {
            for (uint i = 0; i < 4; i++) w[i] ^= 0x80808080u;
        }
        least = min + scale * float(W::OFFSET - (W::SIGNED ? 128 : 0));
    }
    static inline float4 places() { return byte_places(); }
    inline float dot(const thread float4* x, float total) const {
        return scale * sixteen_bytes(w, 0xff, x) + least * total;
    }
};
template <class W, bool IS_MASKED> struct Run<W, true, IS_MASKED> {
    float v[16];
    inline void load(const thread typename W::Raw& raw, uint unit, int r) { W::values(raw, unit, r, v); }
    static inline float4 places() { return float4(1.0f); }
    inline float dot(const thread float4* x, float) const {
        float sum = 0.0f;
        for (uint i = 0; i < 4; i++) {
            sum += v[4 * i] * x[i].x + v[4 * i + 1] * x[i].y + v[4 * i + 2] * x[i].z + v[4 * i + 3] * x[i].w;
        }
        return sum;
    }
};
// N rows times the first n_x <= C rows of x, the same sums in all lanes. WIDE_X: weights are read once for all rows of
// x, whose numbers are loaded four at a time, once for all rows of weights, and their count is a multiple of 16; else
// each goes by itself.
#if WIDE_X
template <class W, int N, int C, int IN_PLACE> struct Sums {
    static inline void add(const thread Row* rows, device const float* x, uint n_x, uint lane,
                           thread float (&sums)[N][C]) {
        const uint k = rows[0].n, n_units = k / W::UNIT;
        for (uint unit = lane; unit < n_units; unit += 32) {
            typename W::Raw raw[N];
            for (int j = 0; j < N; j++) W::load(rows[j], unit, raw[j]);
#pragma unroll
            for (int r = 0; r < W::RUNS; r++) {
                typedef Run<W, W::IS_FLOAT != 0, C == 1> Of;
                Of run[N];
                for (int j = 0; j < N; j++) run[j].load(raw[j], unit, r);
                device const float4* from = (device const float4*)(x + 16 * run_index<W>(unit, r));
                for (int c = 0; c < C; c++) {
                    if (uint(c) >= n_x) continue;
                    float4 v[4];
                    for (uint i = 0; i < 4; i++) v[i] = from[(ulong)c * (k / 4) + i];
                    const float4 all = v[0] + v[1] + v[2] + v[3];
                    const float total = all.x + all.y + all.z + all.w;
                    for (uint i = 0; i < 4; i++) v[i] *= Of::places();
                    for (int j = 0; j < N; j++) sums[j][c] += run[j].dot(v, total);
                }
            }
        }
    }
};
// One row of x.
template <class W, int N> struct Sums<W, N, 1, 1> {
    static inline void add(const thread Row* rows, device const float* x, uint, uint lane,
                           thread float (&sums)[N][1]) {
        const uint n_units = rows[0].n / 32;
        for (uint unit = lane; unit < n_units; unit += 32) {
            float4 v[8];
            for (uint r = 0; r < 2; r++) {
                device const float4* from = (device const float4*)(x + 16 * run_index<W>(unit, r));
                for (uint i = 0; i < 4; i++) v[4 * r + i] = from[i];
            }
            enum { FOURS = Totals<W>::OF / 4 };
            float total[8 / FOURS];
            for (uint i = 0; i < 8; i += FOURS) {
                float4 all = v[i];
                for (uint j = 1; j < FOURS; j++) all += v[i + j];
                total[i / FOURS] = all.x + all.y + all.z + all.w;
            }
            for (uint i = 0; i < 8; i++) v[i] *= InPlace<W>::places();
#pragma unroll
            for (int j = 0; j < N; j++) {
                InPlace<W> w;
                w.load(rows[j], unit);
                sums[j][0] += w.dot(v, total);
            }
        }
    }
};
template <class W, int N> struct Sums<W, N, 1, 2> {
    static inline void add(const thread Row* rows, device const float* x, uint, uint lane,
                           thread float (&sums)[N][1]) {
        const uint n_units = rows[0].n / W::UNIT;
        for (uint unit = lane; unit < n_units; unit += 32) {
            InPlace<W> w[N];
            float of_runs[N], total = 0.0f;
            for (int j = 0; j < N; j++) w[j].load(rows[j], unit), of_runs[j] = 0.0f;
#pragma unroll
            for (int r = 0; r < W::RUNS; r++) {
                device const float4* from = (device const float4*)(x + 16 * run_index<W>(unit, r));
                float4 v[4];
                for (uint i = 0; i < 4; i++) v[i] = from[i];
                const float4 all = v[0] + v[1] + v[2] + v[3];
                total += all.x + all.y + all.z + all.w;
#pragma unroll
                for (int j = 0; j < N; j++) of_runs[j] += w[j].run(r, v);
            }
            for (int j = 0; j < N; j++) sums[j][0] += w[j].dot(of_runs[j], total);
        }
    }
};
#endif
template <class W, int N, int C>
inline void rows_dot(const thread Row* rows, device const float* x, uint n_x, uint lane, thread float (&sums)[N][C]) {
    for (int j = 0; j < N; j++) {
        for (int c = 0; c < C; c++) sums[j][c] = 0.0f;
    }
#if WIDE_X
    Sums<W, N, C, InPlace<W>::IS>::add(rows, x, n_x, lane, sums);
    for (int j = 0; j < N; j++) {
        for (int c = 0; c < C; c++) {
            if (uint(c) < n_x) sums[j][c] = simd_sum(sums[j][c]);
        }
    }
#else
    for (int j = 0; j < N; j++) {
        for (int c = 0; c < C; c++) {
            if (uint(c) < n_x) sums[j][c] = row_dot<W>(rows[j], x + (ulong)c * rows[0].n, lane);
        }
    }
#endif
}

// N rows times one row of x.
template <class W, int N>
inline void rows_dot(const thread Row* rows, device const float* x, uint lane, thread float* out) {
    float sums[N][1];
    rows_dot<W, N, 1>(rows, x, 1, lane, sums);
    for (int j = 0; j < N; j++) out[j] = sums[j][0];
}
