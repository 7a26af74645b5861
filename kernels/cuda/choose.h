// A row's experts by the logits of its router, found by every block that needs them: the case where weights are shares
// of the chosen alone (softmax, then renormalised), in which logits order experts as their scores do. Other routers
// choose once (`route.h`). Compiled for a number of experts: -DN_EXPERT.
#pragma once

#include "cuda/args.h"
#include "cuda/best.h"
#include "cuda/common.h"

// Most experts of a row, and most rows whose experts are chosen so.
#define MAX_CHOSEN 32
#define MAX_LATE_ROWS 8

// Sums of logits are integers in units of 2^-32, in copies (`few_launch.rs`), which blocks take in turn so that fewer
// of them meet. A part of a sum is below 2^23, and there are at most 256: a larger one, or NaN, counts as no number.
#define LOGIT_COPIES 4
#define LOGIT_UNIT 4294967296.0f
#define LOGIT_MOST 8388608.0f

// The name of experts of other parts.
#define ELSEWHERE 0xffffffffu

// What a chosen expert is called in this part of a plan: nothing names the experts of others.
__device__ __forceinline__ u32 local_expert(const Route& a, u32 expert) {
    return a.n_local == 0 ? expert : expert - a.first < a.n_local ? expert - a.first : ELSEWHERE;
}

// By one warp: lane s gets the s-th expert and its logit, best first; `is_bad`: there is no answer. Logits in sums are
// not multiplied by their unit and the norm's factor.
__device__ __forceinline__ Best choose(const Route& a, u32 row, bool& is_bad) {
    constexpr int EACH_LANE = (N_EXPERT + 31) / 32;
    u32 key[EACH_LANE];
    float l[EACH_LANE];
    const u32 lane = threadIdx.x % 32;
    if (a.n_squares > 0) {
        i64 sum[LOGIT_COPIES][EACH_LANE];
#pragma unroll
        for (int copy = 0; copy < LOGIT_COPIES; copy++) {
#pragma unroll
            for (int j = 0; j < EACH_LANE; j++) {
                const u32 e = j * 32 + lane;
                sum[copy][j] = e < N_EXPERT ? __ldcg(a.sums.of + copy * N_EXPERT + e) : 0;
            }
        }
#pragma unroll
        for (int j = 0; j < EACH_LANE; j++) {
            i64 all = sum[0][j];
#pragma unroll
            for (int copy = 1; copy < LOGIT_COPIES; copy++) all += sum[copy][j];
            l[j] = (float)all;
        }
    } else {
#pragma unroll
        for (int j = 0; j < EACH_LANE; j++) {
            const u32 e = j * 32 + lane;
            l[j] = e < N_EXPERT ? __ldcg(a.logits + (u64)row * N_EXPERT + e) : -INF;
        }
    }
    is_bad = false;
#pragma unroll
    for (int j = 0; j < EACH_LANE; j++) {
        is_bad |= l[j] != l[j];
        key[j] = j * 32 + lane < N_EXPERT ? ordered(l[j]) : 0;
    }
    return best_of_keys<EACH_LANE>(key, a.n_used);
}

// With the weights. A row without an answer takes the first experts with weights of NaN; one block `reports` it.
__device__ __forceinline__ void choose_weighed(const Route& a, u32 row, bool reports, u32* ids, float* weights) {
    const u32 lane = threadIdx.x % 32;
    const bool has_slot = lane < a.n_used;
    float squares = 0.0f;
    i64 n_bad = 0;
    if (a.n_squares > 0) {
        n_bad = __ldcg(a.sums.of + LOGIT_COPIES * N_EXPERT);
        for (u32 i = lane; i < a.n_squares; i += 32) squares += __ldcg(a.sums.squares + i);
    }
    bool is_bad;
    const Best best = choose(a, row, is_bad);
    is_bad |= n_bad != 0;
    float logit = of_ordered(best.key);
    if (a.n_squares > 0) {
        logit *= 1.0f / LOGIT_UNIT * rsqrtf(__fdividef(warp_sum(squares), (float)a.k) + a.norm_eps);
    }
    const float top = __shfl_sync(FULL_MASK, logit, 0);
    const float share = has_slot ? expf(logit - top) : 0.0f;
    float weight = share / warp_sum(share) * a.scale;
    if (a.expert_scale && has_slot) weight *= a.expert_scale[best.index];
    is_bad = __any_sync(FULL_MASK, is_bad || !(fabsf(top) < INF) || (has_slot && !(fabsf(weight) < INF)));
    if (has_slot) {
        ids[lane] = local_expert(a, is_bad ? lane : best.index);
        weights[lane] = ids[lane] == ELSEWHERE ? 0.0f : is_bad ? QNAN : weight;
    }
    if (is_bad && reports && lane == 0) {
        const u32 token = a.of_outputs ? a.step.rows[row] : row;
        atomicMin(a.step.faults + a.step.chunk_of[token], a.router << 20 | token);
    }
    __syncwarp();
}
