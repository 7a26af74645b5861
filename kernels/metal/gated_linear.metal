// gated_linear: out[t, n] = act(sum_k gate[n, k] * x[t, k]) * sum_k up[n, k] * x[t, k]. A simdgroup takes
// ROWS rows of both matrices, see WIDE_X in weight.h.
// Compiled for the type of both matrices: WEIGHT, PLANES; ACT as in common.h.
// grid (ceil(n / (2 * ROWS)), T), 64 threads
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
    const uint begin = ROWS * (2 * group.x + sg);
    if (begin >= a.n) return;
    Row rows[2 * ROWS]; // gate and up in turn
    for (uint j = 0; j < ROWS; j++) {
        const uint i = min(begin + j, a.n - 1);
        rows[2 * j] = ROW_OF(WEIGHT, gate, i, a.k);
        rows[2 * j + 1] = ROW_OF(WEIGHT, up, i, a.k);
    }
    float sums[2 * ROWS];
    rows_dot<WEIGHT, 2 * ROWS>(rows, x + (ulong)group.y * a.k, lane, sums);
    for (uint j = 0; j < ROWS; j++) {
        if (lane != 0 || begin + j >= a.n) continue;
        out[(ulong)group.y * a.n + begin + j] = gated(ACT, sums[2 * j], sums[2 * j + 1], a.alpha, a.limit);
    }
}
