// rms_norm, head_norm, gated_norm: x * rsqrt(mean(x^2) + eps) * w over rows of any width.
//
// rms_norm: a block a row, which it reads twice (the second time from L1); with a residual it first adds that to x.
// head_norm, gated_norm: a warp a head. Sums in f32, lanes and warps in a fixed order.
#include "cuda/common.h"
#include "cuda/args.h"

// grid (rows), block 32..1024 threads
KERNEL __launch_bounds__(1024) rms_norm(const __grid_constant__ RmsNorm a) {
    PDL_LAUNCH();
    PDL_WAIT();
    __shared__ float scratch[33];
    const u64 at = (u64)blockIdx.x * a.d;
    float* x = a.x + at;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < a.d; i += blockDim.x) {
        float v = x[i];
        if (a.residual) {
            v += a.residual[at + i];
            x[i] = v;
        }
        sum += v * v;
    }
    sum = block_sum(sum, scratch);
    const float r = 1.0f / sqrtf(sum / (float)a.d + a.eps);
    for (u32 i = threadIdx.x; i < a.d; i += blockDim.x) a.out[at + i] = x[i] * r * a.w[i];
}

// One head by a warp, in place.
__device__ __forceinline__ void norm_head(const HeadNorm& a, const float* gate) {
    const u32 lane = threadIdx.x % 32;
    const u64 head = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (head >= a.n) return;
    float* x = a.x + head * a.d;
    float sum = 0.0f;
    for (u32 i = lane; i < a.d; i += 32) sum += x[i] * x[i];
    const float r = 1.0f / sqrtf(warp_sum(sum) / (float)a.d + a.eps);
    for (u32 i = lane; i < a.d; i += 32) {
        float y = x[i] * r * (a.w ? a.w[i] : 1.0f);
        if (gate) {
            const float g = gate[head * a.d + i];
            y *= g * sigmoid(g);
        }
        x[i] = y;
    }
}

// grid (heads of all rows / 4), block 128
KERNEL __launch_bounds__(128) head_norm(const __grid_constant__ HeadNorm a) {
    PDL_LAUNCH();
    PDL_WAIT();
    norm_head(a, nullptr);
}

KERNEL __launch_bounds__(128) gated_norm(const __grid_constant__ HeadNorm a) {
    PDL_LAUNCH();
    PDL_WAIT();
    norm_head(a, a.gate);
}
