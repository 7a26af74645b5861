// rms_norm: x += residual where there is one, then out = x * rsqrt(mean(x^2) + eps) * w. A threadgroup a row.
// Compiled with RESIDUAL 0 or 1.
// grid (rows), 64 threads
#include "metal/common.h"
#include "metal/reduce.h"

struct RmsNorm {
    uint d;
    float eps;
};

#if RESIDUAL
#define X device float*
#else
#define X device const float*
#endif

kernel void rms_norm(X x [[buffer(0)]], device const float* w [[buffer(1)]], device float* out [[buffer(2)]],
                     constant RmsNorm& a [[buffer(3)]],
#if RESIDUAL
                     device const float* residual [[buffer(4)]],
#endif
                     uint row_idx [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                     uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float part[2];
    const ulong at = (ulong)row_idx * a.d;
    X row = x + at;
    float sum = 0.0f;
    for (uint i = t; i < a.d; i += 64) {
        float v = row[i];
#if RESIDUAL
        v += residual[at + i];
        row[i] = v;
#endif
        sum += v * v;
    }
    sum = sum_of_64(sum, part, sg, lane);
    const float r = 1.0f / precise::sqrt(sum / float(a.d) + a.eps);
    for (uint i = t; i < a.d; i += 64) out[at + i] = row[i] * r * w[i];
}
