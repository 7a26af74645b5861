// head_linear: a matrix a head, out[t, h, n] = sum_k w[h, n, k] * x[t, h, k]. A simdgroup an output. head_linear_t:
// matrices that lie as w[h, k, n]. A thread takes a unit of n over a slice of k; slices are added up in their order.
// With TURNED each head of x has so many numbers behind those that are multiplied; they are rotated (see rope.metal)
// and stand behind the products of the head, by a threadgroup more. Compiled for the type of the matrices: WEIGHT,
// PLANES; TRANSPOSED 0 or 1; TURNED. grid (ceil(n / 2), n_head, T), transposed (ceil(units of n / UNITS), n_head, T),
// one more in x with TURNED, 64 threads
#include WEIGHT_HEADER
#include "metal/pair.h"
#include "metal/weight.h"

struct HeadLinear {
    uint n;
    uint k;
    uint n_head;
    uint half_width; // pairs that are rotated
    uint interleaved;
};

#if TURNED
#define ANGLES device const float* table [[buffer(6)]], uint3 groups [[threadgroups_per_grid]],
#else
#define ANGLES
#endif

#if TURNED
// The numbers of a head behind its products.
inline void turn(device const float* x, device float* out, device const float* angle, constant HeadLinear& a, uint t) {
    for (uint i = t; i < TURNED - a.half_width; i += 64) {
        const Pair p = pair_of(i, a.half_width, a.interleaved);
        float y = x[p.first];
        if (p.is_pair) {
            const float z = x[p.second], c = angle[2 * i], s = angle[2 * i + 1];
            out[p.second] = y * s + z * c;
            y = y * c - z * s;
        }
        out[p.first] = y;
    }
}
#endif

#if TRANSPOSED
// Units of n of a threadgroup, and slices of k.
#define UNITS 16
#define SLICES (64 / UNITS)

kernel void head_linear_t(PLANE_PARAMS(w, 0, 1, 2), device const float* x [[buffer(3)]],
                          device float* out [[buffer(4)]], constant HeadLinear& a [[buffer(5)]], ANGLES
                          uint3 group [[threadgroup_position_in_grid]],
                          uint t [[thread_index_in_threadgroup]]) {
    threadgroup float sums[64][17]; // a column more than a run: banks
    const uint slice = t / UNITS, unit = group.x * UNITS + t % UNITS, n_units = (a.n + WEIGHT::UNIT - 1) / WEIGHT::UNIT;
    const ulong row = (ulong)group.z * a.n_head + group.y;
    x += row * (a.k + TURNED);
    out += row * (a.n + TURNED);
#if TURNED
    if (group.x == groups.x - 1) {
        turn(x + a.k, out + a.n, table + 2 * (ulong)group.z * a.half_width, a, t);
        return;
    }
#endif
    float acc[WEIGHT::RUNS][16];
    for (int r = 0; r < WEIGHT::RUNS; r++) {
        for (uint i = 0; i < 16; i++) acc[r][i] = 0.0f;
    }
    if (unit < n_units) {
        for (uint i = slice; i < a.k; i += SLICES) {
            const Row weights = ROW_OF(WEIGHT, w, (ulong)group.y * a.k + i, a.n);
            const float by = x[i];
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
            if (of < n_units && at < a.n) out[at] = sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}
#else
kernel void head_linear(PLANE_PARAMS(w, 0, 1, 2), device const float* x [[buffer(3)]],
                        device float* out [[buffer(4)]], constant HeadLinear& a [[buffer(5)]], ANGLES
                        uint3 group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]]) {
    const uint i = 2 * group.x + sg;
    const ulong row = (ulong)group.z * a.n_head + group.y;
    x += row * (a.k + TURNED);
    out += row * (a.n + TURNED);
#if TURNED
    if (group.x == groups.x - 1) {
        turn(x + a.k, out + a.n, table + 2 * (ulong)group.z * a.half_width, a, 32 * sg + lane);
        return;
    }
#endif
    if (i >= a.n) return;
    const Row weights = ROW_OF(WEIGHT, w, (ulong)group.y * a.n + i, a.k);
    const float sum = row_dot<WEIGHT>(weights, x, lane);
    if (lane == 0) out[i] = sum;
}
#endif
