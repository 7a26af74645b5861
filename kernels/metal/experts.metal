// experts: products with the matrices of the chosen experts. A simdgroup takes ROWS rows of a matrix, see WIDE_X in
// weight.h.
// Compiled for the type of the matrices: WEIGHT, PLANES; BIAS is 1 with biases; ACT as in common.h.
//
// experts_gated: out[t, s, n] = act(gate[e] * x[t] (+ bias)) * (up[e] * x[t] (+ bias)), e = ids[t, s]
// experts: out[t, s, n] = w[e] * x[t] (+ bias), or of x[t, s] with x_per_slot
// grid (ceil(n / (2 * ROWS)), n_used, T), 64 threads
// With SHARED experts_gated also multiplies with an expert that every token takes, in slots behind n_used, as many as
// cover its rows; and experts_sum adds it, before (1) or behind (2) the others, times sigmoid(share[t]) with SHARE.
// experts_sum: out[t, n] (+)= sum_s weights[t, s] * (w[e] * x[t, s] (+ bias)), slots in order; ADD 0 or 1
// grid (ceil(n / (2 * ROWS)), T), 64 threads
#include WEIGHT_HEADER
#include "metal/weight.h"

struct Experts {
    uint n;
    uint k;
    uint n_used;
    uint x_per_slot;
    float alpha;
    float limit;
#if SHARED
    uint of_shared; // its n in experts_gated, its k in experts_sum
#endif
};

#if FORM == 1
kernel void experts_gated(PLANE_PARAMS(gate, 0, 1, 2), PLANE_PARAMS(up, 3, 4, 5), device const float* x [[buffer(6)]],
                          device const uint* ids [[buffer(7)]], device float* out [[buffer(8)]],
                          constant Experts& a [[buffer(9)]],
#if BIAS
                          device const float* gate_bias [[buffer(10)]], device const float* up_bias [[buffer(11)]],
#endif
#if SHARED
                          PLANE_PARAMS(shared_gate, 12, 13, 14), PLANE_PARAMS(shared_up, 15, 16, 17),
                          device float* shared_out [[buffer(18)]],
#endif
                          uint3 group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]]) {
    uint begin = ROWS * (2 * group.x + sg), n = a.n;
    const uint pair = group.z * a.n_used + group.y;
#if SHARED
    const bool is_shared = group.y >= a.n_used;
    if (is_shared) {
        n = a.of_shared;
        begin += (group.y - a.n_used) * ((a.n + 2 * ROWS - 1) / (2 * ROWS) * (2 * ROWS));
    }
#else
    const bool is_shared = false;
#endif
    if (begin >= n) return;
    const ulong base = is_shared ? 0 : (ulong)ids[pair] * a.n; // among the rows of all experts
    device float* to = out + (ulong)pair * a.n;
    Row rows[2 * ROWS]; // gate and up in turn
    for (uint j = 0; j < ROWS; j++) {
        const ulong at = base + min(begin + j, n - 1);
        rows[2 * j] = ROW_OF(WEIGHT, gate, at, a.k);
        rows[2 * j + 1] = ROW_OF(WEIGHT, up, at, a.k);
#if SHARED
        if (!is_shared) continue;
        rows[2 * j] = ROW_OF(WEIGHT, shared_gate, at, a.k);
        rows[2 * j + 1] = ROW_OF(WEIGHT, shared_up, at, a.k);
#endif
    }
#if SHARED
    if (is_shared) to = shared_out + (ulong)group.z * n;
#endif
    float sums[2 * ROWS];
    rows_dot<WEIGHT, 2 * ROWS>(rows, x + (ulong)group.z * a.k, lane, sums);
    for (uint j = 0; j < ROWS; j++) {
        const uint i = begin + j;
        if (lane != 0 || i >= n) continue;
        float g = sums[2 * j], u = sums[2 * j + 1];
#if BIAS
        g += gate_bias[base + i];
        u += up_bias[base + i];
#endif
        to[i] = gated(ACT, g, u, a.alpha, a.limit);
    }
}
#elif FORM == 0
kernel void experts(PLANE_PARAMS(w, 0, 1, 2), device const float* x [[buffer(3)]],
                    device const uint* ids [[buffer(4)]], device float* out [[buffer(5)]],
                    constant Experts& a [[buffer(6)]],
#if BIAS
                    device const float* bias [[buffer(7)]],
#endif
                    uint3 group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]]) {
    const uint begin = ROWS * (2 * group.x + sg), pair = group.z * a.n_used + group.y;
    if (begin >= a.n) return;
    const ulong base = (ulong)ids[pair] * a.n; // among the rows of all experts
    Row rows[ROWS];
    for (uint j = 0; j < ROWS; j++) rows[j] = ROW_OF(WEIGHT, w, base + min(begin + j, a.n - 1), a.k);
    float sums[ROWS];
    rows_dot<WEIGHT, ROWS>(rows, x + (ulong)(a.x_per_slot ? pair : group.z) * a.k, lane, sums);
    for (uint j = 0; j < ROWS; j++) {
        const uint i = begin + j;
        if (lane != 0 || i >= a.n) continue;
#if BIAS
        sums[j] += bias[base + i];
#endif
        out[(ulong)pair * a.n + i] = sums[j];
    }
}
#else
kernel void experts_sum(PLANE_PARAMS(w, 0, 1, 2), device const float* x [[buffer(3)]],
                        device const uint* ids [[buffer(4)]], device float* out [[buffer(5)]],
                        constant Experts& a [[buffer(6)]], device const float* weights [[buffer(8)]],
#if BIAS
                        device const float* bias [[buffer(7)]],
#endif
#if SHARED
                        PLANE_PARAMS(shared, 9, 10, 11), device const float* shared_x [[buffer(12)]],
#endif
#if SHARE
                        device const float* share [[buffer(13)]],
#endif
                        uint2 group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]]) {
    const uint begin = ROWS * (2 * group.x + sg);
    if (begin >= a.n) return;
    float all[ROWS];
    for (uint j = 0; j < ROWS; j++) all[j] = 0.0f;
    for (uint s = 0; s < a.n_used; s++) {
        const uint pair = group.y * a.n_used + s;
        const ulong base = (ulong)ids[pair] * a.n; // among the rows of all experts
        Row rows[ROWS];
        for (uint j = 0; j < ROWS; j++) rows[j] = ROW_OF(WEIGHT, w, base + min(begin + j, a.n - 1), a.k);
        float sums[ROWS];
        rows_dot<WEIGHT, ROWS>(rows, x + (ulong)pair * a.k, lane, sums);
        for (uint j = 0; j < ROWS; j++) {
#if BIAS
            sums[j] += bias[base + min(begin + j, a.n - 1)];
#endif
            all[j] += weights[pair] * sums[j];
        }
    }
#if SHARED
    Row rows[ROWS];
    for (uint j = 0; j < ROWS; j++) rows[j] = ROW_OF(WEIGHT, shared, min(begin + j, a.n - 1), a.of_shared);
    float beside[ROWS];
    rows_dot<WEIGHT, ROWS>(rows, shared_x + (ulong)group.y * a.of_shared, lane, beside);
#if SHARE
    for (uint j = 0; j < ROWS; j++) beside[j] *= sigmoid(share[group.y]);
#endif
#endif
    for (uint j = 0; j < ROWS; j++) {
        if (lane != 0 || begin + j >= a.n) continue;
        device float* to = out + (ulong)group.y * a.n + begin + j;
#if SHARED == 1
        *to = (*to + beside[j]) + all[j];
#elif SHARED == 2
        *to = (*to + all[j]) + beside[j];
#elif ADD
        *to += all[j];
#else
        *to = all[j];
#endif
    }
}
#endif
