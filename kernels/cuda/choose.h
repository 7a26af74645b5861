// A row's experts by the logits of its router, found by every block that needs them: the case where weights are shares
// of the chosen alone (softmax, then renormalised), in which logits order experts as their scores do. Other routers
// choose once (`route.h`). Compiled for a number of experts: -DN_EXPERT.
#pragma once

#include "cuda/args.h"
#include "cuda/best.h"
#include "cuda/common.h"

// Most experts of a row.
#define MAX_CHOSEN 32

// By one warp: lane s gets the s-th expert and its logit, best first; `is_bad`: there is no answer.
__device__ __forceinline__ Best choose(const Route& a, u32 row, bool& is_bad) {
    const float* logits = a.logits + (u64)row * N_EXPERT;
    u32 key[(N_EXPERT + 31) / 32];
    float l[(N_EXPERT + 31) / 32];
#pragma unroll
    for (int j = 0; j < (N_EXPERT + 31) / 32; j++) {
        const u32 e = j * 32 + threadIdx.x % 32;
        l[j] = e < N_EXPERT ? __ldcg(logits + e) : -INF;
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
__device__ __forceinline__ void choose_weighed(const Route& a, u32 row, bool reports, u32* ids, float* weights) {
    const u32 lane = threadIdx.x % 32;
    const bool has_slot = lane < a.n_used;
    bool is_bad;
    const Best best = choose(a, row, is_bad);
    const float top = __shfl_sync(FULL_MASK, of_ordered(best.key), 0);
    const float share = has_slot ? expf(of_ordered(best.key) - top) : 0.0f;
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
