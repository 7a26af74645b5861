// experts: products with the matrices of the chosen experts, for every (token, slot). A simdgroup an output.
// Compiled for the type of the matrices: WEIGHT, PLANES; BIAS is 1 with biases; ACT as in common.h.
//
// experts_gated: out[t, s, n] = act(gate[e] * x[t] (+ bias)) * (up[e] * x[t] (+ bias)), e = ids[t, s]
// experts: out[t, s, n] = w[e] * x[t] (+ bias), or of x[t, s] with x_per_slot
// grid (ceil(n / 2), n_used, T), 64 threads
#include WEIGHT_HEADER
#include "metal/weight.h"

struct Experts {
    uint n;
    uint k;
    uint n_used;
    uint x_per_slot;
    float alpha;
    float limit;
};

#if GATED
kernel void experts_gated(PLANE_PARAMS(gate, 0, 1, 2), PLANE_PARAMS(up, 3, 4, 5), device const float* x [[buffer(6)]],
                          device const uint* ids [[buffer(7)]], device float* out [[buffer(8)]],
                          constant Experts& a [[buffer(9)]],
#if BIAS
                          device const float* gate_bias [[buffer(10)]], device const float* up_bias [[buffer(11)]],
#endif
                          uint3 group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]]) {
    const uint i = 2 * group.x + sg, pair = group.z * a.n_used + group.y;
    if (i >= a.n) return;
    const ulong at = (ulong)ids[pair] * a.n + i; // among the rows of all experts
    device const float* from = x + (ulong)group.z * a.k;
    const Row gate_row = ROW_OF(WEIGHT, gate, at, a.k), up_row = ROW_OF(WEIGHT, up, at, a.k);
    float g = row_dot<WEIGHT>(gate_row, from, lane), u = row_dot<WEIGHT>(up_row, from, lane);
#if BIAS
    g += gate_bias[at];
    u += up_bias[at];
#endif
    if (lane == 0) out[(ulong)pair * a.n + i] = gated(ACT, g, u, a.alpha, a.limit);
}
#else
kernel void experts(PLANE_PARAMS(w, 0, 1, 2), device const float* x [[buffer(3)]],
                    device const uint* ids [[buffer(4)]], device float* out [[buffer(5)]],
                    constant Experts& a [[buffer(6)]],
#if BIAS
                    device const float* bias [[buffer(7)]],
#endif
                    uint3 group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]]) {
    const uint i = 2 * group.x + sg, pair = group.z * a.n_used + group.y;
    if (i >= a.n) return;
    const ulong at = (ulong)ids[pair] * a.n + i; // among the rows of all experts
    const Row row = ROW_OF(WEIGHT, w, at, a.k);
    float sum = row_dot<WEIGHT>(row, x + (ulong)(a.x_per_slot ? pair : group.z) * a.k, lane);
#if BIAS
    sum += bias[at];
#endif
    if (lane == 0) out[(ulong)pair * a.n + i] = sum;
}
#endif
