// layer_norm: out = (x - mean(x)) * rsqrt(variance(x) + eps) * w (+ bias). A threadgroup a row.
// Compiled with BIAS 0 or 1.
// grid (rows), 64 threads
#include "metal/common.h"
#include "metal/reduce.h"

struct LayerNorm {
    uint d;
    float eps;
};

kernel void layer_norm(device const float* x [[buffer(0)]], device const float* w [[buffer(1)]],
                       device float* out [[buffer(2)]], constant LayerNorm& a [[buffer(3)]],
#if BIAS
                       device const float* bias [[buffer(4)]],
#endif
                       uint row_idx [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                       uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float parts[2][2];
    device const float* row = x + (ulong)row_idx * a.d;
    device float* to = out + (ulong)row_idx * a.d;
    float sum = 0.0f;
    for (uint i = t; i < a.d; i += 64) sum += row[i];
    const float mean = sum_of_64(sum, parts[0], sg, lane) / float(a.d);
    sum = 0.0f;
    for (uint i = t; i < a.d; i += 64) {
        const float v = row[i] - mean;
        sum += v * v;
    }
    const float r = 1.0f / precise::sqrt(sum_of_64(sum, parts[1], sg, lane) / float(a.d) + a.eps);
    for (uint i = t; i < a.d; i += 64) {
        const float v = (row[i] - mean) * r * w[i];
#if BIAS
        to[i] = v + bias[i];
#else
        to[i] = v;
#endif
    }
}
