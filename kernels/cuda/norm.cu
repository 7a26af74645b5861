// rms_norm, head_norm, gated_norm: x * rsqrt(mean(x^2) + eps) * w over rows of any width.
//
// rms_norm: a block a row; with a residual it first adds that to x. post_norm: out = (x + normed rows) * scale.
// head_norm, gated_norm: a warp a head. Sums in f32, lanes and warps in a fixed order.
#include "cuda/common.h"
#include "cuda/args.h"

// Numbers of a row that a thread keeps in registers; those of longer rows are read again.
#define KEPT 8

// grid (rows), block 32..1024 threads
KERNEL __launch_bounds__(1024) rms_norm(const __grid_constant__ RmsNorm a) {
    PDL_LAUNCH();
    __shared__ float scratch[33];
    float w[KEPT], x[KEPT];
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const u32 i = j * blockDim.x + threadIdx.x;
        w[j] = i < a.d ? a.w[i] : 0.0f;
    }
    PDL_WAIT();
    const u64 at = (u64)blockIdx.x * a.d;
    float* row = a.x + at;
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const u32 i = j * blockDim.x + threadIdx.x;
        x[j] = i < a.d ? row[i] : 0.0f;
    }
    float sum = 0.0f;
    if (a.residual) {
        float y[KEPT];
#pragma unroll
        for (int j = 0; j < KEPT; j++) {
            const u32 i = j * blockDim.x + threadIdx.x;
            y[j] = i < a.d ? a.residual[at + i] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < KEPT; j++) {
            const u32 i = j * blockDim.x + threadIdx.x;
            x[j] += y[j];
            if (i < a.d) row[i] = x[j];
        }
    }
#pragma unroll
    for (int j = 0; j < KEPT; j++) sum += x[j] * x[j];
    for (u32 i = KEPT * blockDim.x + threadIdx.x; i < a.d; i += blockDim.x) {
        float v = row[i];
        if (a.residual) {
            v += a.residual[at + i];
            row[i] = v;
        }
        sum += v * v;
    }
    sum = block_sum(sum, scratch);
    const float r = 1.0f / sqrtf(sum / (float)a.d + a.eps);
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const u32 i = j * blockDim.x + threadIdx.x;
        if (i < a.d) a.out[at + i] = x[j] * r * w[j];
    }
    for (u32 i = KEPT * blockDim.x + threadIdx.x; i < a.d; i += blockDim.x) a.out[at + i] = row[i] * r * a.w[i];
}

// grid (rows), block 32..1024 threads; rows of at most KEPT * 1024 numbers
KERNEL __launch_bounds__(1024) post_norm(const __grid_constant__ PostNorm a) {
    PDL_LAUNCH();
    PDL_WAIT();
    __shared__ float scratch[33];
    const u64 at = (u64)blockIdx.x * a.d;
    float x[KEPT], y[KEPT], z[KEPT], sum_y = 0.0f, sum_z = 0.0f;
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const u32 i = j * blockDim.x + threadIdx.x;
        x[j] = i < a.d ? a.x[at + i] : 0.0f;
        y[j] = i < a.d ? a.a[at + i] : 0.0f;
        z[j] = a.b && i < a.d ? a.b[at + i] : 0.0f;
        sum_y += y[j] * y[j];
        sum_z += z[j] * z[j];
    }
    const float r_y = 1.0f / sqrtf(block_sum(sum_y, scratch) / (float)a.d + a.eps_a);
    const float r_z = a.b ? 1.0f / sqrtf(block_sum(sum_z, scratch) / (float)a.d + a.eps_b) : 0.0f;
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const u32 i = j * blockDim.x + threadIdx.x;
        y[j] = i < a.d ? y[j] * r_y * a.w_a[i] : 0.0f;
        if (a.b && i < a.d) y[j] += z[j] * r_z * a.w_b[i];
        sum += y[j] * y[j];
    }
    const float r = a.w ? 1.0f / sqrtf(block_sum(sum, scratch) / (float)a.d + a.eps) : 1.0f;
    const float scale = a.scale ? a.scale[0] : 1.0f;
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const u32 i = j * blockDim.x + threadIdx.x;
        if (i < a.d) a.out[at + i] = (x[j] + (a.w ? y[j] * r * a.w[i] : y[j])) * scale;
    }
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
