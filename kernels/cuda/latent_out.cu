// latent_out: what attention summed over latents, times the head's matrix, for one to eight rows; the splits of
// attention are merged first, in their order, by every block that needs them. Compiled for a weight type: -DWEIGHT.
//
// grid (blocks of a head, heads), block VEC_THREADS. Shared memory: what `vec.h` wants, then a head's merged latents of
// all rows from `merged_at` on.
#include "cuda/vec.h"
#include WEIGHT_HEADER

// As in `nodes/attention.rs`.
#define MAX_SPLITS 64

extern __shared__ uint4 shared[];

// A head's row, merged by the block.
__device__ __forceinline__ void merge(const LatentOut& a, u32 row, u32 head, float* to) {
    const u32 k = a.w.k, lane = threadIdx.x % 32;
    const float* splits = a.partial + ((u64)row * a.w.n_head + head) * a.n_splits * (k + 2);
    float factors[MAX_SPLITS / 32], totals[MAX_SPLITS / 32], best = -INF, sum = 0.0f;
#pragma unroll
    for (int j = 0; j < MAX_SPLITS / 32; j++) {
        const u32 s = j * 32 + lane;
        factors[j] = s < a.n_splits ? splits[(u64)s * (k + 2) + k] : -INF;
        totals[j] = s < a.n_splits ? splits[(u64)s * (k + 2) + k + 1] : 0.0f;
        best = fmaxf(best, factors[j]);
    }
    best = warp_max(best);
#pragma unroll
    for (int j = 0; j < MAX_SPLITS / 32; j++) {
        // A split without positions adds nothing.
        factors[j] = factors[j] == -INF && totals[j] == 0.0f ? 0.0f : expf(factors[j] - best);
        sum += totals[j] * factors[j];
    }
    sum = warp_sum(sum);
    // Whole warps, whose lanes hold the factors.
    for (u32 first = threadIdx.x - lane; first < k; first += blockDim.x) {
        const u32 column = first + lane;
        float y = 0.0f;
#pragma unroll
        for (int j = 0; j < MAX_SPLITS / 32; j++) {
            const u32 end = min(a.n_splits, (u32)(32 * j + 32));
#pragma unroll 8
            for (u32 s = 32 * j; s < end; s++) {
                const float factor = __shfl_sync(FULL_MASK, factors[j], s % 32);
                if (column < k) y += factor * splits[(u64)s * (k + 2) + column];
            }
        }
        if (column < k) to[column] = y / sum;
    }
}

template <int COLS>
__device__ __forceinline__ void latent_out(const LatentOut& a) {
    PDL_LAUNCH();
    const HeadLinear& w = a.w;
    const u32 head = blockIdx.y, stride = (w.k + 3) / 4 * 4;
    const bool merges = a.n_splits > 1;
    float* merged = (float*)((u8*)shared + a.merged_at);
    if (merges) {
        PDL_WAIT();
        for (u32 row = 0; row < w.rows; row++) merge(a, row, head, merged + row * stride);
        __syncthreads();
    }
    vec<WEIGHT, COLS, false, false>(
        merges ? merged : w.x + (u64)head * w.k, merges ? stride : (u64)w.n_head * w.k, Prologue{}, w.rows, w.k, w.n,
        blockIdx.x, gridDim.x, shared, !merges,
        [&](u64 i, bool) { return row_of<WEIGHT>(w.w.q, w.w.scales, w.w.biases, (u64)head * w.n + i, w.k); },
        [&](u64 i, u32 col, float sum, float) { w.out[((u64)col * w.n_head + head) * w.n + i] = sum; });
}

#define LATENT(C) \
    KERNEL __launch_bounds__(VEC_THREADS) latent_out##C(const __grid_constant__ LatentOut a) { latent_out<C>(a); }
LATENT(1)
LATENT(2)
LATENT(4)
LATENT(8)
