// What both kernels of attention for single tokens share (`attend.cu`, `attend_long.cu`), compiled for -DD, the width
// of keys and of values, and -DHEADS, query heads of a block.
#pragma once

#define KV_F16 1
#include "cuda/columns.h"
#include "cuda/head.h"
#include "cuda/kv.h"

// As in `nodes/attention.rs`.
#define MAX_SPLITS 64

// Number `i` of a token's row goes out, and packed where the next product wants it so. Called by whole warps, which
// have 32 neighbours.
__device__ __forceinline__ void attend_store(const Attend& a, u32 token, u32 i, float y) {
    const u32 width = a.q.n_head * D;
    a.out[(u64)token * width + i] = y;
    if (a.columns) pack_two(y, a.columns + (u64)token * column_bytes(width), width, i);
}

// What the splits' sums of a head are multiplied by, in their order: a lane has that of every 32nd. `by` divides the
// whole. Called by a warp.
struct SplitFactors {
    float of[MAX_SPLITS / 32], by;
};
__device__ __forceinline__ SplitFactors split_factors(const float* stats, u32 n_splits, u32 h, const float* sink) {
    const u32 lane = threadIdx.x % 32;
    SplitFactors out;
    float totals[MAX_SPLITS / 32], best = sink ? *sink : -INF;
#pragma unroll
    for (int j = 0; j < MAX_SPLITS / 32; j++) {
        const u32 s = j * 32 + lane;
        out.of[j] = s < n_splits ? __ldcg(stats + (s * HEADS + h) * 2) : -INF;
        totals[j] = s < n_splits ? __ldcg(stats + (s * HEADS + h) * 2 + 1) : 0.0f;
        best = fmaxf(best, out.of[j]);
    }
    best = warp_max(best);
    out.by = 0.0f;
#pragma unroll
    for (int j = 0; j < MAX_SPLITS / 32; j++) {
        // A split without positions adds nothing.
        out.of[j] = out.of[j] == -INF && totals[j] == 0.0f ? 0.0f : expf(out.of[j] - best);
        out.by += totals[j] * out.of[j];
    }
    out.by = warp_sum(out.by) + (sink ? expf(*sink - best) : 0.0f);
    return out;
}

// Stores what a split puts out besides its sums. Where there are counters, the block of a token and a key-value head
// that ends last merges the splits in their order: `out` are its heads' rows. Called by the block;
// `factors` and `is_last` are shared memory.
template <int THREADS>
__device__ __forceinline__ void end_split(const Attend& a, u64 place, u32 split, u32 n_heads, u32 first_head,
                                          const float* top, const float* total, float* out,
                                          float (&factors)[MAX_SPLITS][HEADS], u32& is_last) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* partial = a.partial + place * a.n_splits * HEADS * (D + 4);
    float* stats = partial + (u64)a.n_splits * HEADS * D; // [n_splits, HEADS, 2]
    if (threadIdx.x < HEADS) {
        stats[(split * HEADS + threadIdx.x) * 2] = top[threadIdx.x];
        stats[(split * HEADS + threadIdx.x) * 2 + 1] = total[threadIdx.x];
    }
    if (a.counters == nullptr) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(a.counters + place, 1) == a.n_splits - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (threadIdx.x == 0) a.counters[place] = 0;

    // A warp finds a head's factors, divided by their sum.
    if (warp < n_heads) {
        const SplitFactors f = split_factors(stats, a.n_splits, warp, a.sinks ? a.sinks + first_head + warp : nullptr);
#pragma unroll
        for (int j = 0; j < MAX_SPLITS / 32; j++) factors[j * 32 + lane][warp] = f.of[j] / f.by;
    }
    __syncthreads();
    // Whole warps, which may pack.
    for (u32 i = threadIdx.x; i < (n_heads * (D / 4) + 31) / 32 * 32; i += THREADS) {
        const u32 h = i / (D / 4), at = i % (D / 4) * 4;
        const bool is_there = h < n_heads;
        float4 y = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 16
        for (u32 s = 0; s < (is_there ? a.n_splits : 0); s++) {
            const float4 x = __ldcg((const float4*)(partial + ((u64)s * HEADS + h) * D + at));
            const float factor = factors[s][h];
            y.x += factor * x.x, y.y += factor * x.y, y.z += factor * x.z, y.w += factor * x.w;
        }
        if (is_there) *(float4*)(out + h * D + at) = y;
        if (a.columns) {
            const float v[4] = {y.x, y.y, y.z, y.w};
            const u32 width = a.q.n_head * D, token = (u32)((out - a.out) / width);
            pack_four(v, a.columns + (u64)token * column_bytes(width), width, (first_head + h) * D + at, is_there);
        }
    }
}

// Threads of attend_merge, and groups of them that have a number of four columns each.
#define MERGE_THREADS 256
#define MERGE_GROUPS (MERGE_THREADS / (D / 4))

// Merges many splits: grid (T * heads), block MERGE_THREADS: groups take splits in turn and are added up in order. A
// warp finds the splits' factors while its sums come.
KERNEL __launch_bounds__(MERGE_THREADS) attend_merge(const __grid_constant__ Attend a) {
    __shared__ __align__(16) float sums[MERGE_GROUPS][D];
    __shared__ float factors[MAX_SPLITS];
    const u32 row = blockIdx.x / a.q.n_head, head = blockIdx.x % a.q.n_head;
    const u32 group = a.q.n_head / a.n_kv, kv_head = head / group, tile = head % group / HEADS;
    const u32 h = head % group % HEADS, lane = threadIdx.x % 32;
    const u64 place = (u64)(row * a.n_tiles + tile) * a.n_kv + kv_head;
    const float* partial = a.partial + place * a.n_splits * HEADS * (D + 4);
    const float* stats = partial + (u64)a.n_splits * HEADS * D;
    // Splits of a thread.
    constexpr u32 MOST = (MAX_SPLITS + MERGE_GROUPS - 1) / MERGE_GROUPS;
    const u32 mine = threadIdx.x / (D / 4), column = threadIdx.x % (D / 4) * 4;
    PDL_WAIT();
    PDL_LAUNCH();
    float4 x[MOST];
#pragma unroll
    for (u32 i = 0; i < MOST; i++) {
        const u32 s = i * MERGE_GROUPS + mine;
        x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (s < a.n_splits) x[i] = __ldcg((const float4*)(partial + ((u64)s * HEADS + h) * D + column));
    }
    if (threadIdx.x < 32) {
        const SplitFactors f = split_factors(stats, a.n_splits, h, a.sinks ? a.sinks + head : nullptr);
#pragma unroll
        for (int j = 0; j < MAX_SPLITS / 32; j++) factors[j * 32 + lane] = f.of[j] / f.by;
    }
    __syncthreads();
    float4 y = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (u32 i = 0; i < MOST; i++) {
        const u32 s = i * MERGE_GROUPS + mine;
        if (s >= a.n_splits) break;
        const float factor = factors[s];
        y.x += factor * x[i].x, y.y += factor * x[i].y, y.z += factor * x[i].z, y.w += factor * x[i].w;
    }
    *(float4*)(sums[mine] + column) = y;
    __syncthreads();
    if (threadIdx.x < D) {
        float sum = sums[0][threadIdx.x];
#pragma unroll
        for (u32 i = 1; i < MERGE_GROUPS; i++) sum += sums[i][threadIdx.x];
        const u32 token = a.singles ? a.step.chunks[row].single : row;
        attend_store(a, token, head * D + threadIdx.x, sum);
    }
}
