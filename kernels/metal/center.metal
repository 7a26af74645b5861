// center: out = x - mean(x) of each row. A simdgroup a row.
// grid (ceil(rows / 2)), 64 threads
#include "metal/common.h"

struct Center {
    uint n;
    uint d;
};

kernel void center(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                   constant Center& a [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
                   uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint row = 2 * group + sg;
    if (row >= a.n) return;
    device const float* from = x + (ulong)row * a.d;
    device float* to = out + (ulong)row * a.d;
    float sum = 0.0f;
    for (uint i = lane; i < a.d; i += 32) sum += from[i];
    const float mean = simd_sum(sum) / float(a.d);
    for (uint i = lane; i < a.d; i += 32) to[i] = from[i] - mean;
}
