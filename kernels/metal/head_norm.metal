// head_norm: x = x * rsqrt(mean(x^2) + eps) * w of each head's numbers, in place. A simdgroup a head.
// Compiled with HAS_W 0 or 1.
// grid (ceil(heads of all rows / 2)), 64 threads
#include "metal/common.h"

struct HeadNorm {
    uint n;
    uint d;
    float eps;
};

kernel void head_norm(device float* x [[buffer(0)]], constant HeadNorm& a [[buffer(1)]],
#if HAS_W
                      device const float* w [[buffer(2)]],
#endif
                      uint group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]]) {
    const uint head = 2 * group + sg;
    if (head >= a.n) return;
    device float* row = x + (ulong)head * a.d;
    float sum = 0.0f;
    for (uint i = lane; i < a.d; i += 32) sum += row[i] * row[i];
    const float r = 1.0f / precise::sqrt(simd_sum(sum) / float(a.d) + a.eps);
    for (uint i = lane; i < a.d; i += 32) {
#if HAS_W
        row[i] = row[i] * r * w[i];
#else
        row[i] = row[i] * r;
#endif
    }
}
