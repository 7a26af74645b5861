// norms: norms of rows that follow each other, with r(v) = rsqrt(mean(v^2) + eps): v = from; for each link v = x + v *
// r(v) * w, times `scale` behind the last with SCALED, and x becomes v; then out = v * r(v) * w for each output. A
// threadgroup a row. A thread reads the numbers that it has written and no others.
// Compiled with LINKS 1 or 2, OUTS 0 to 3, SCALED 0 or 1.
// grid (rows), 64 threads
#include "metal/common.h"
#include "metal/reduce.h"

struct Norms {
    uint d;
    float eps;
};

kernel void norms(device const float* from [[buffer(0)]], constant Norms& a [[buffer(1)]],
                  device const float* w0 [[buffer(2)]], device float* x0 [[buffer(3)]],
#if LINKS > 1
                  device const float* w1 [[buffer(4)]], device float* x1 [[buffer(5)]],
#endif
#if OUTS > 0
                  device const float* out_w0 [[buffer(6)]], device float* out0 [[buffer(7)]],
#endif
#if OUTS > 1
                  device const float* out_w1 [[buffer(8)]], device float* out1 [[buffer(9)]],
#endif
#if OUTS > 2
                  device const float* out_w2 [[buffer(10)]], device float* out2 [[buffer(11)]],
#endif
#if SCALED
                  device const float* scale [[buffer(12)]],
#endif
                  uint row_idx [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                  uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float parts[3][2];
    const ulong at = (ulong)row_idx * a.d;
    float sum = 0.0f;
    for (uint i = t; i < a.d; i += 64) sum += from[at + i] * from[at + i];
    float r = 1.0f / precise::sqrt(sum_of_64(sum, parts[0], sg, lane) / float(a.d) + a.eps);
#if SCALED
    const float by = scale[0];
#else
    const float by = 1.0f;
#endif
    sum = 0.0f;
    for (uint i = t; i < a.d; i += 64) {
        const float v = (from[at + i] * r * w0[i] + x0[at + i]) * (LINKS == 1 ? by : 1.0f);
        x0[at + i] = v;
        sum += v * v;
    }
#if LINKS > 1
    r = 1.0f / precise::sqrt(sum_of_64(sum, parts[1], sg, lane) / float(a.d) + a.eps);
    sum = 0.0f;
    for (uint i = t; i < a.d; i += 64) {
        const float v = (x0[at + i] * r * w1[i] + x1[at + i]) * by;
        x1[at + i] = v;
        sum += v * v;
    }
    device const float* row = x1 + at;
#else
    device const float* row = x0 + at;
#endif
#if OUTS > 0
    r = 1.0f / precise::sqrt(sum_of_64(sum, parts[2], sg, lane) / float(a.d) + a.eps);
    for (uint i = t; i < a.d; i += 64) {
        const float v = row[i] * r;
        out0[at + i] = v * out_w0[i];
#if OUTS > 1
        out1[at + i] = v * out_w1[i];
#endif
#if OUTS > 2
        out2[at + i] = v * out_w2[i];
#endif
    }
#endif
}
