// A row's experts by the logits of its router, found by every block that needs them: the case where weights are shares
// of the chosen alone (softmax, then renormalised), in which logits order experts as their scores do. Other routers
// choose once (`route.h`). Compiled for a number of experts: -DN_EXPERT.
#pragma once

#include "cuda/args.h"
#include "cuda/best.h"
#include "cuda/common.h"

// Most experts of a row.
#define MAX_CHOSEN 32

// Logits of a row, in as many shares as groups of a block's first 512 threads add up parts of them (`few_routed.cu`) in
// turn; so sums are the same whoever asks. Behind them the squares of the row that the router norms.
#define SUM_WIDTH ((N_EXPERT + 3) / 4 * 4 + 4)
#define SUM_GROUPS (512 / (SUM_WIDTH / 4) > 0 ? 512 / (SUM_WIDTH / 4) : 1)
typedef float Sums[SUM_GROUPS][SUM_WIDTH];

// By a block, of 512 threads at least where there are parts.
__device__ __forceinline__ void sum_parts(const Route& a, u32 row, Sums& sums) {
    if (a.n_parts == 0) {
        const float* logits = a.logits + (u64)row * N_EXPERT;
        for (u32 e = threadIdx.x; e < N_EXPERT; e += blockDim.x) sums[0][e] = __ldcg(logits + e);
        return;
    }
    const u32 group = threadIdx.x / (SUM_WIDTH / 4), at = threadIdx.x % (SUM_WIDTH / 4) * 4;
    if (group >= SUM_GROUPS) return;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
    for (u32 part = group; part < a.n_parts; part += SUM_GROUPS) {
        const float4 x = __ldcg((const float4*)(a.logits + (u64)part * SUM_WIDTH + at));
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    *(float4*)(sums[group] + at) = sum;
}
__device__ __forceinline__ float sum_of(const Route& a, const Sums& sums, u32 i) {
    float sum = sums[0][i];
    if (a.n_parts == 0) return sum;
#pragma unroll
    for (int group = 1; group < SUM_GROUPS; group++) sum += sums[group][i];
    return sum;
}

// By one warp: lane s gets the s-th expert and its logit, best first; `is_bad`: there is no answer. Logits in parts are
// not multiplied by the norm's factor.
__device__ __forceinline__ Best choose(const Route& a, const Sums& sums, bool& is_bad) {
    u32 key[(N_EXPERT + 31) / 32];
    float l[(N_EXPERT + 31) / 32];
#pragma unroll
    for (int j = 0; j < (N_EXPERT + 31) / 32; j++) {
        const u32 e = j * 32 + threadIdx.x % 32;
        l[j] = e < N_EXPERT ? sum_of(a, sums, e) : -INF;
    }
    is_bad = false;
#pragma unroll
    for (int j = 0; j < (N_EXPERT + 31) / 32; j++) {
        is_bad |= l[j] != l[j];
        key[j] = j * 32 + threadIdx.x % 32 < N_EXPERT ? ordered(l[j]) : 0;
    }
    return best_of_keys<(N_EXPERT + 31) / 32>(key, a.n_used);
}

// With the weights. A row without an answer takes the first experts with weights of NaN; one block `reports` it.
__device__ __forceinline__ void choose_weighed(const Route& a, u32 row, const Sums& sums, bool reports, u32* ids,
                                               float* weights) {
    const u32 lane = threadIdx.x % 32;
    const bool has_slot = lane < a.n_used;
    bool is_bad;
    const Best best = choose(a, sums, is_bad);
    float logit = of_ordered(best.key);
    if (a.n_parts > 0) logit *= rsqrtf(__fdividef(sum_of(a, sums, SUM_WIDTH - 4), (float)a.k) + a.norm_eps);
    const float top = __shfl_sync(FULL_MASK, logit, 0);
    const float share = has_slot ? expf(logit - top) : 0.0f;
    float weight = share / warp_sum(share) * a.scale;
    if (a.expert_scale && has_slot) weight *= a.expert_scale[best.index];
    is_bad = __any_sync(FULL_MASK, is_bad || !(fabsf(top) < INF) || (has_slot && !(fabsf(weight) < INF)));
    if (has_slot) {
        ids[lane] = is_bad ? lane : best.index;
        weights[lane] = is_bad ? QNAN : weight;
    }
    if (is_bad && reports && lane == 0) {
        const u32 token = a.of_outputs ? a.step.rows[row] : row;
        atomicMin(a.step.faults + a.step.chunk_of[token], a.router << 20 | token);
    }
    __syncwarp();
}
