// The choice of a row's experts, best first, ties to the lower id, and their weights, by one warp. Compiled for a
// number of experts: -DN_EXPERT.
//
// Scores are found in f64 and compared in f32, as the reference does, so that near ties fall the same way; where shares
// of the chosen experts alone are wanted, logits are compared. A row without an answer (NaN among the logits, no finite
// weights) takes the first experts with weights of NaN and leaves its token in `faults`, where the smallest (router,
// token) of a chunk stays.
#pragma once

#include "cuda/args.h"
#include "cuda/choose.h"
#include "cuda/common.h"

enum Score : u32 { SCORE_SOFTMAX = 0, SCORE_SIGMOID = 1, SCORE_RAW = 2, SCORE_SPARSE = 3 };

#define EACH ((N_EXPERT + 31) / 32)

__device__ __forceinline__ double warp_sum_f64(double x) {
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(FULL_MASK, x, step);
    return x;
}

// What a warp works with.
struct RouteScratch {
    double score[N_EXPERT];
    float choice[N_EXPERT], worth[N_EXPERT];
    u32 open[MAX_CHOSEN], ids[MAX_CHOSEN];
};

// Of the lane's slot.
__device__ __forceinline__ void store_choice(const Route& a, u64 row, u32 expert, float weight) {
    const u64 slot = row * a.n_used + threadIdx.x % 32;
    const u32 own = local_expert(a, expert);
    a.ids[slot] = own;
    a.weights[slot] = own == ELSEWHERE ? 0.0f : weight;
}

// The share of slot `slot`'s expert among those near it that no slot before it has (Phi-3.5-MoE). Where both logits are
// 0 the quotient is NaN, and they are near. Scores are logits.
__device__ __forceinline__ double share_of_near(const RouteScratch& s, u32 slot, float margin) {
    const float own = (float)s.score[s.ids[slot]];
    double sum = 0.0;
    // Rolled up, so that routers of many experts have registers enough.
#pragma unroll 1
    for (u32 e = 0; e < N_EXPERT; e++) {
        bool is_taken = false;
#pragma unroll 1
        for (u32 i = 0; i < slot; i++) is_taken |= s.ids[i] == e;
        const float x = (float)s.score[e];
        if (!is_taken && !((own - x) / fmaxf(fabsf(x), own) > margin)) sum += expf(x - own);
    }
    return 1.0 / sum;
}

// A whole warp takes row `row`, whose logits other blocks may just have written.
template <class Logits>
__device__ __forceinline__ void route_row(const Route& a, u64 row, const Logits& logits, RouteScratch& s) {
    const u32 lane = threadIdx.x % 32;
    bool is_bad = false;
    if (a.score == SCORE_SOFTMAX && a.renormalise && a.eps == 0.0f && !a.bias && a.n_group == 0) {
        // Shares of the chosen alone: logits order experts as their scores do.
        for (u32 e = lane; e < N_EXPERT; e += 32) {
            const float l = logits(e);
            is_bad |= !(fabsf(l) < INF);
            s.choice[e] = l;
        }
        __syncwarp();
        is_bad = __any_sync(FULL_MASK, is_bad);
        if (!is_bad) {
            best_of<EACH>(s.choice, N_EXPERT, a.n_used, s.ids);
            const bool has_slot = lane < a.n_used;
            const u32 id = has_slot ? s.ids[lane] : s.ids[0];
            const float share = has_slot ? expf(s.choice[id] - s.choice[s.ids[0]]) : 0.0f;
            float weight = share / warp_sum(share) * a.scale;
            if (a.expert_scale) weight *= a.expert_scale[id];
            if (!__any_sync(FULL_MASK, has_slot && !(fabsf(weight) < INF))) {
                if (has_slot) {
                    store_choice(a, row, id, weight);
                }
                return;
            }
        }
        is_bad = false;
    }

    float top = -INF;
    for (u32 e = lane; e < N_EXPERT; e += 32) {
        const float l = logits(e);
        is_bad |= l != l;
        top = fmaxf(top, l);
    }
    top = warp_max(top);
    double total = 1.0;
    if (a.score == SCORE_SOFTMAX) {
        is_bad |= !(top > -INF && top < INF);
        double sum = 0.0;
        for (u32 e = lane; e < N_EXPERT; e += 32) {
            const double worth = exp((double)logits(e) - (double)top);
            s.score[e] = worth;
            sum += worth;
        }
        total = warp_sum_f64(sum);
    } else {
        for (u32 e = lane; e < N_EXPERT; e += 32) {
            const double l = logits(e);
            s.score[e] = a.score == SCORE_SIGMOID ? 1.0 / (1.0 + exp(-l)) : l;
        }
    }
    // Without a bias the logits order experts as their scores do, also where scores round to the same number.
    for (u32 e = lane; e < N_EXPERT; e += 32) {
        if (a.score == SCORE_SOFTMAX) s.score[e] = s.score[e] / total;
        float v = logits(e);
        if (a.bias) {
            v = (float)s.score[e] + a.bias[e];
        } else if (a.group_sums) {
            v = (float)s.score[e];
        }
        is_bad |= v != v;
        s.choice[e] = v;
    }
    is_bad = __any_sync(FULL_MASK, is_bad);
    __syncwarp();

    if (!is_bad && a.n_group > 0) {
        const u32 size = N_EXPERT / a.n_group;
        for (u32 g = lane; g < a.n_group; g += 32) {
            float first = -INF, second = -INF;
            for (u32 e = g * size; e < (g + 1) * size; e++) {
                const float v = s.choice[e];
                if (v > first) {
                    second = first;
                    first = v;
                } else if (v > second) {
                    second = v;
                }
            }
            s.worth[g] = a.group_sums ? first + second : first;
        }
        __syncwarp();
        best_of<EACH>(s.worth, a.n_group, a.n_group_used, s.open);
        for (u32 e = lane; e < N_EXPERT; e += 32) {
            bool is_open = false;
            for (u32 i = 0; i < a.n_group_used; i++) is_open |= s.open[i] == e / size;
            if (!is_open) s.choice[e] = -INF;
        }
        __syncwarp();
    }

    float weight = 0.0f;
    if (!is_bad) {
        best_of<EACH>(s.choice, N_EXPERT, a.n_used, s.ids);
        // Lane s has slot s.
        const bool has_slot = lane < a.n_used;
        const u32 id = has_slot ? s.ids[lane] : 0;
        double w = !has_slot ? 0.0 : a.score == SCORE_SPARSE ? share_of_near(s, lane, a.margin) : s.score[id];
        if (a.score == SCORE_RAW) {
            float best = has_slot ? (float)w : -INF;
            best = warp_max(best);
            is_bad |= !(best > -INF && best < INF);
            w = has_slot ? exp((double)(float)w - (double)best) : 0.0;
            w /= warp_sum_f64(w);
        }
        if (a.renormalise) w /= warp_sum_f64(w) + (double)a.eps;
        w *= (double)a.scale;
        if (a.expert_scale) w *= (double)a.expert_scale[id];
        weight = (float)w;
        is_bad |= has_slot && !(fabsf(weight) < INF);
        is_bad = __any_sync(FULL_MASK, is_bad);
    }
    if (lane < a.n_used) {
        store_choice(a, row, is_bad ? lane : s.ids[lane], is_bad ? QNAN : weight);
    }
    if (is_bad && lane == 0) {
        const u32 token = a.of_outputs ? a.step.rows[row] : row;
        atomicMin(a.step.faults + a.step.chunk_of[token], a.router << 20 | token);
    }
}
