// gated_linear: out[t, n] = act(sum_k gate[n, k] * x[t, k]) * sum_k up[n, k] * x[t, k]. A simdgroup an output.
// Compiled for the type of both matrices: WEIGHT, PLANES; ACT as in common.h.
// grid (ceil(n / 2), T), 64 threads
#include WEIGHT_HEADER
#include "metal/weight.h"

struct GatedLinear {
    uint n;
    uint k;
    float alpha;
    float limit;
};

kernel void gated_linear(PLANE_PARAMS(gate, 0, 1, 2), PLANE_PARAMS(up, 3, 4, 5), device const float* x [[buffer(6)]],
                         device float* out [[buffer(7)]], constant GatedLinear& a [[buffer(8)]],
                         uint2 group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]]) {
    const uint i = 2 * group.x + sg;
    if (i >= a.n) return;
    device const float* from = x + (ulong)group.y * a.k;
    const Row gate_row = ROW_OF(WEIGHT, gate, i, a.k), up_row = ROW_OF(WEIGHT, up, i, a.k);
    const float g = row_dot<WEIGHT>(gate_row, from, lane), u = row_dot<WEIGHT>(up_row, from, lane);
    if (lane == 0) out[(ulong)group.y * a.n + i] = gated(ACT, g, u, a.alpha, a.limit);
}
