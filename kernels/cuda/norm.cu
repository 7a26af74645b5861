// center: x - mean(x). rms_norm, head_norm, gated_norm: x * rsqrt(mean(x^2) + eps) * w over rows of any width.
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

// Sums over the block, all at once; every thread gets them.
template <int N>
__device__ __forceinline__ void block_sums(float (&x)[N], float (*scratch)[32]) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = warp_sum(x[i]);
        if (lane == 0) scratch[i][warp] = x[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = warp_sum(lane < n_warps ? scratch[i][lane] : 0.0f);
}

// grid (rows), block 32..1024 threads; rows of at most KEPT * 1024 numbers. The mean square of the sum of two normed
// rows comes from sums of products that are found with those of the rows, so that there is one round.
KERNEL __launch_bounds__(1024) post_norm(const __grid_constant__ PostNorm a) {
    PDL_LAUNCH();
    __shared__ float scratch[5][32];
    for (u32 i = 32 * threadIdx.x; i < a.d; i += 32 * blockDim.x) {
        prefetch(a.w_a + i);
        if (a.b) prefetch(a.w_b + i);
        if (a.w) prefetch(a.w + i);
    }
    const float scale = a.scale ? a.scale[0] : 1.0f;
    PDL_WAIT();
    const u64 at = (u64)blockIdx.x * a.d;
    float x[KEPT], y[KEPT], z[KEPT], sums[5] = {};
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const u32 i = j * blockDim.x + threadIdx.x;
        x[j] = i < a.d ? a.x[at + i] : 0.0f;
        y[j] = i < a.d ? a.a[at + i] : 0.0f;
        z[j] = a.b && i < a.d ? a.b[at + i] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const u32 i = j * blockDim.x + threadIdx.x;
        sums[0] += y[j] * y[j];
        sums[1] += z[j] * z[j];
        y[j] *= i < a.d ? a.w_a[i] : 0.0f;
        z[j] *= a.b && i < a.d ? a.w_b[i] : 0.0f;
        sums[2] += y[j] * y[j];
        sums[3] += y[j] * z[j];
        sums[4] += z[j] * z[j];
    }
    block_sums(sums, scratch);
    const float d = (float)a.d;
    const float r_y = 1.0f / sqrtf(sums[0] / d + a.eps_a), r_z = a.b ? 1.0f / sqrtf(sums[1] / d + a.eps_b) : 0.0f;
    const float squares = r_y * r_y * sums[2] + 2.0f * r_y * r_z * sums[3] + r_z * r_z * sums[4];
    const float r = a.w ? 1.0f / sqrtf(fmaxf(squares, 0.0f) / d + a.eps) : 1.0f;
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const u32 i = j * blockDim.x + threadIdx.x;
        const float sum = y[j] * r_y + z[j] * r_z;
        if (i < a.d) a.out[at + i] = (x[j] + (a.w ? sum * r * a.w[i] : sum)) * scale;
    }
}

// One head by a warp, in place.
__device__ __forceinline__ void norm_head(const HeadNorm& a, const float* gate) {
    const u32 lane = threadIdx.x % 32;
    const u64 head = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (head >= a.n) return;
    float* x = a.x + head * a.d;
    const float* w = a.w ? a.w + head % a.n_w * a.d : nullptr;
    float sum = 0.0f;
    for (u32 i = lane; i < a.d; i += 32) {
        if (gate && a.gate_first) {
            const float g = gate[head * a.d + i];
            x[i] *= g * sigmoid(g);
        }
        sum += x[i] * x[i];
    }
    const float r = 1.0f / sqrtf(warp_sum(sum) / (float)a.d + a.eps);
    for (u32 i = lane; i < a.d; i += 32) {
        float y = x[i] * r * (w ? w[i] : 1.0f);
        if (gate && !a.gate_first) {
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

// out = x - mean(x), a warp a row. grid (rows / 4), block 128
KERNEL __launch_bounds__(128) center(const __grid_constant__ Center a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const u64 row = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const u32 lane = threadIdx.x % 32;
    if (row >= a.rows) return;
    const float* x = a.x + row * a.d;
    float* out = a.out + row * a.d;
    float sum = 0.0f;
    for (u32 i = lane; i < a.d; i += 32) sum += x[i];
    const float mean = warp_sum(sum) / (float)a.d;
    for (u32 i = lane; i < a.d; i += 32) out[i] = x[i] - mean;
}
