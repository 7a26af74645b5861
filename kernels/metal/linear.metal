// linear: out[t, n] = sum_k w[n, k] * x[t, k] (+ bias[n]). A simdgroup an output.
// Compiled for the type of the matrix: WEIGHT, PLANES; BIAS is 1 with a bias.
// grid (ceil(n / 2), T), 64 threads
#include WEIGHT_HEADER
#include "metal/weight.h"

struct Linear {
    uint n;
    uint k;
};

kernel void linear(PLANE_PARAMS(w, 0, 1, 2), device const float* x [[buffer(3)]], device float* out [[buffer(4)]],
                   constant Linear& a [[buffer(5)]],
#if BIAS
                   device const float* bias [[buffer(6)]],
#endif
                   uint2 group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]]) {
    const uint i = 2 * group.x + sg;
    if (i >= a.n) return;
    const Row row = ROW_OF(WEIGHT, w, i, a.k);
    float sum = row_dot<WEIGHT>(row, x + (ulong)group.y * a.k, lane);
#if BIAS
    sum += bias[i];
#endif
    if (lane == 0) out[(ulong)group.y * a.n + i] = sum;
}
