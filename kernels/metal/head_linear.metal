// head_linear: a matrix a head, out[t, h, n] = sum_k w[h, n, k] * x[t, h, k]. A simdgroup an output.
// head_linear_t: matrices that lie as w[h, k, n]. A thread takes a unit of n over a slice of k; slices are added up in
// their order.
// Compiled for the type of the matrices: WEIGHT, PLANES; TRANSPOSED 0 or 1.
// grid (ceil(n / 2), n_head, T), transposed (ceil(units of n / UNITS), n_head, T), 64 threads
#include WEIGHT_HEADER
#include "metal/weight.h"

struct HeadLinear {
    uint n;
    uint k;
    uint n_head;
};

#if TRANSPOSED
// Units of n of a threadgroup, and slices of k.
#define UNITS 16
#define SLICES (64 / UNITS)

kernel void head_linear_t(PLANE_PARAMS(w, 0, 1, 2), device const float* x [[buffer(3)]],
                          device float* out [[buffer(4)]], constant HeadLinear& a [[buffer(5)]],
                          uint3 group [[threadgroup_position_in_grid]],
                          uint t [[thread_index_in_threadgroup]]) {
    threadgroup float sums[64][17]; // a column more than a run: banks
    const uint slice = t / UNITS, unit = group.x * UNITS + t % UNITS, n_units = (a.n + WEIGHT::UNIT - 1) / WEIGHT::UNIT;
    const ulong row = (ulong)group.z * a.n_head + group.y;
    float acc[WEIGHT::RUNS][16];
    for (int r = 0; r < WEIGHT::RUNS; r++) {
        for (uint i = 0; i < 16; i++) acc[r][i] = 0.0f;
    }
    if (unit < n_units) {
        for (uint i = slice; i < a.k; i += SLICES) {
            const Row weights = ROW_OF(WEIGHT, w, (ulong)group.y * a.k + i, a.n);
            const float by = x[row * a.k + i];
            WEIGHT::Raw raw;
            WEIGHT::load(weights, unit, raw);
            for (int r = 0; r < WEIGHT::RUNS; r++) {
                float v[16];
                decode_run<WEIGHT>(raw, unit, r, v);
                for (uint j = 0; j < 16; j++) acc[r][j] += v[j] * by;
            }
        }
    }
    for (int r = 0; r < WEIGHT::RUNS; r++) {
        for (uint i = 0; i < 16; i++) sums[t][i] = acc[r][i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = t; i < UNITS * 16; i += 64) {
            const uint of = group.x * UNITS + i / 16, at = 16 * run_index<WEIGHT>(of, r) + i % 16;
            float sum = 0.0f;
            for (uint from = 0; from < SLICES; from++) sum += sums[from * UNITS + i / 16][i % 16];
            if (of < n_units && at < a.n) out[row * a.n + at] = sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}
#else
kernel void head_linear(PLANE_PARAMS(w, 0, 1, 2), device const float* x [[buffer(3)]],
                        device float* out [[buffer(4)]], constant HeadLinear& a [[buffer(5)]],
                        uint3 group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]]) {
    const uint i = 2 * group.x + sg;
    if (i >= a.n) return;
    const ulong row = (ulong)group.z * a.n_head + group.y;
    const Row weights = ROW_OF(WEIGHT, w, (ulong)group.y * a.n + i, a.k);
    const float sum = row_dot<WEIGHT>(weights, x + row * a.k, lane);
    if (lane == 0) out[row * a.n + i] = sum;
}
#endif
