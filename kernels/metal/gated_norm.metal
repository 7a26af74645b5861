// gated_norm: x = x * rsqrt(mean(x^2) + eps) * w * silu(gate) of each head's numbers, in place; with GATE_FIRST
// x = x * silu(gate) before its norm. w has numbers for n_w heads. A simdgroup a head. Compiled with GATE_FIRST 0 or 1.
// grid (ceil(heads of all rows / 2)), 64 threads
#include "metal/common.h"

struct GatedNorm {
    uint n;
    uint d;
    float eps;
    uint n_w;
};

kernel void gated_norm(device float* x [[buffer(0)]], device const float* gate [[buffer(1)]],
                       device const float* w [[buffer(2)]], constant GatedNorm& a [[buffer(3)]],
                       uint group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]]) {
    const uint head = 2 * group + sg;
    if (head >= a.n) return;
    device float* row = x + (ulong)head * a.d;
    device const float* by = gate + (ulong)head * a.d;
    device const float* scale = w + (ulong)(head % a.n_w) * a.d;
    float sum = 0.0f;
    for (uint i = lane; i < a.d; i += 32) {
#if GATE_FIRST
        row[i] *= by[i] * sigmoid(by[i]);
#endif
        sum += row[i] * row[i];
    }
    const float r = 1.0f / precise::sqrt(simd_sum(sum) / float(a.d) + a.eps);
    for (uint i = lane; i < a.d; i += 32) {
#if GATE_FIRST
        row[i] = row[i] * r * scale[i];
#else
        row[i] = row[i] * r * scale[i] * (by[i] * sigmoid(by[i]));
#endif
    }
}
