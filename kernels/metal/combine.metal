// combine: x[t] (+)= sum_s weights[t, s] * y[t, s], slots in order; with a norm also out = rms_norm(x). A threadgroup a
// row.
// Compiled with ADD 0 or 1 and NORM 0 or 1.
// grid (rows), 64 threads
#include "metal/common.h"
#include "metal/reduce.h"

struct Combine {
    uint d;
    uint n_used;
    float eps;
};

kernel void combine(device float* x [[buffer(0)]], device const float* y [[buffer(1)]],
                    device const float* weights [[buffer(2)]], constant Combine& a [[buffer(3)]],
#if NORM
                    device const float* w [[buffer(4)]], device float* out [[buffer(5)]],
                    uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
#endif
                    uint row_idx [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
    device float* row = x + (ulong)row_idx * a.d;
    device const float* slots = y + (ulong)row_idx * a.n_used * a.d;
    device const float* weight = weights + (ulong)row_idx * a.n_used;
    float sum = 0.0f;
    for (uint i = t; i < a.d; i += 64) {
        float v = 0.0f;
        for (uint s = 0; s < a.n_used; s++) v += weight[s] * slots[(ulong)s * a.d + i];
#if ADD
        v += row[i];
#endif
        row[i] = v;
        sum += v * v;
    }
#if NORM
    threadgroup float part[2];
    sum = sum_of_64(sum, part, sg, lane);
    const float r = 1.0f / precise::sqrt(sum / float(a.d) + a.eps);
    for (uint i = t; i < a.d; i += 64) out[(ulong)row_idx * a.d + i] = row[i] * r * w[i];
#endif
}
