// combine: x[t] (+)= sum_s weights[t, s] * y[t, s], slots in order; with a norm it also emits the next rms_norm.
// grid (rows), block 32..1024: a block a row.
#include "cuda/common.h"
#include "cuda/args.h"

KERNEL __launch_bounds__(1024) combine(const __grid_constant__ Combine a) {
    __shared__ float scratch[33], weights[32];
    PDL_LAUNCH();
    PDL_WAIT();
    const u64 row = blockIdx.x;
    if (threadIdx.x < a.n_used) weights[threadIdx.x] = a.weights[row * a.n_used + threadIdx.x];
    __syncthreads();
    float* x = a.x + row * a.d;
    const float* y = a.y + row * a.n_used * a.d;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < a.d; i += blockDim.x) {
        float v = 0.0f;
        for (u32 s = 0; s < a.n_used; s++) v += weights[s] * y[(u64)s * a.d + i];
        if (a.add) v += x[i];
        x[i] = v;
        sum += v * v;
    }
    if (!a.norm_w) return;
    sum = block_sum(sum, scratch);
    const float r = 1.0f / sqrtf(sum / (float)a.d + a.eps);
    for (u32 i = threadIdx.x; i < a.d; i += blockDim.x) a.norm_out[row * a.d + i] = x[i] * r * a.norm_w[i];
}
