// route: the experts of each row, best first, ties to the lower id, and their weights. A simdgroup a row.
// Compiled for a number of experts, N_EXPERT, and for what the router does: SCORE 0 softmax, 1 sigmoid, 2 raw, 3
// sparse; HAS_BIAS, HAS_SCALE 0 or 1. With SCORE 3 the weight of an expert is its share of a softmax over those that
// are not chosen before it and whose logit is near its own: (own - x) / max(|x|, own) <= margin.
//
// A row without an answer (NaN among the logits, no finite weights) takes the first experts with weights of NaN and
// leaves 1 in `faults`.
// grid (ceil(rows / 2)), 64 threads
#include "metal/common.h"

// Experts of a lane: lane, lane + 32, ...
#define EACH ((N_EXPERT + 31) / 32)

struct Route {
    uint rows;
    uint n_used; // 32 at most
    uint n_group; // 0: no groups
    uint n_group_used;
    uint group_sums; // a group is worth the sum of its two best
    uint renormalise;
    float eps;
    float scale;
    float logit_scale;
    float margin;
};

// A number whose order as an integer is that of the float; both zeros are the same. No float but NaN gives 0.
inline uint ordered(float x) {
    const uint bits = as_type<uint>(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The index of the best of the simdgroup's keys, the lower one at a tie; it is taken out.
inline uint take_best(thread uint* key, uint lane) {
    uint top = 0, at = 0;
    for (uint j = 0; j < EACH; j++) {
        if (key[j] > top) {
            top = key[j];
            at = j;
        }
    }
    const uint all = simd_max(top);
    const uint index = simd_min(top == all ? at * 32 + lane : 0xffffffffu);
    for (uint j = 0; j < EACH; j++) {
        if (j * 32 + lane == index) key[j] = 0;
    }
    return index;
}

kernel void route(device const float* logits [[buffer(0)]], device uint* ids [[buffer(1)]],
                  device float* weights [[buffer(2)]], device uint* faults [[buffer(3)]],
                  constant Route& a [[buffer(4)]],
#if HAS_BIAS
                  device const float* bias [[buffer(5)]],
#endif
#if HAS_SCALE
                  device const float* expert_scale [[buffer(6)]],
#endif
                  uint group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                  uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float scores[2][N_EXPERT];
    threadgroup float choices[2][N_EXPERT];
    const uint row = 2 * group + sg;
    if (row >= a.rows) return;
    threadgroup float* score = scores[sg];
    threadgroup float* choice = choices[sg];
    device const float* l = logits + (ulong)row * N_EXPERT;

    bool is_bad = false;
    float top = -INFINITY;
    for (uint e = lane; e < N_EXPERT; e += 32) {
        const float x = l[e] * a.logit_scale;
        is_bad = is_bad || isnan(x);
        top = max(top, x);
    }
    top = simd_max(top);
#if SCORE == 0
    is_bad = is_bad || !isfinite(top);
    float sum = 0.0f;
    for (uint e = lane; e < N_EXPERT; e += 32) sum += precise::exp(l[e] * a.logit_scale - top);
    sum = simd_sum(sum);
#endif
    // Without a bias the logits order experts as their scores do, also where scores round to the same number.
    for (uint e = lane; e < N_EXPERT; e += 32) {
        const float x = l[e] * a.logit_scale;
#if SCORE == 0
        const float s = precise::exp(x - top) / sum;
#elif SCORE == 1
        const float s = sigmoid(x);
#else
        const float s = x;
#endif
        score[e] = s;
#if HAS_BIAS
        const float v = s + bias[e];
#else
        const float v = a.group_sums ? s : x;
#endif
        is_bad = is_bad || isnan(v);
        choice[e] = v;
    }
    is_bad = simd_any(is_bad);
    simdgroup_barrier(mem_flags::mem_threadgroup);

    if (!is_bad && a.n_group > 0) {
        const uint size = N_EXPERT / a.n_group;
        uint worth[EACH];
        for (uint j = 0; j < EACH; j++) {
            const uint g = j * 32 + lane;
            worth[j] = 0;
            if (g >= a.n_group) continue;
            float first = -INFINITY, second = -INFINITY;
            for (uint e = g * size; e < (g + 1) * size; e++) {
                const float v = choice[e];
                if (v > first) {
                    second = first;
                    first = v;
                } else if (v > second) {
                    second = v;
                }
            }
            worth[j] = ordered(a.group_sums ? first + second : first);
        }
        uint open[EACH]; // bit g % 32 of open[g / 32]
        for (uint j = 0; j < EACH; j++) open[j] = 0;
        for (uint b = 0; b < a.n_group_used; b++) {
            const uint g = take_best(worth, lane);
            for (uint j = 0; j < EACH; j++) open[j] |= j == g / 32 ? 1u << (g % 32) : 0u;
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint e = lane; e < N_EXPERT; e += 32) {
            uint word = 0;
            for (uint j = 0; j < EACH; j++) word = j == e / size / 32 ? open[j] : word;
            if (!(word >> (e / size % 32) & 1)) choice[e] = -INFINITY;
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }

    // Lane s has slot s.
    const bool has_slot = lane < a.n_used;
    uint id = lane;
    float weight = NAN;
    if (!is_bad) {
        uint key[EACH];
        for (uint j = 0; j < EACH; j++) {
            const uint e = j * 32 + lane;
            key[j] = e < N_EXPERT ? ordered(choice[e]) : 0;
        }
#if SCORE == 3
        float w = 0.0f;
#endif
        for (uint b = 0; b < a.n_used; b++) {
            const uint index = take_best(key, lane);
            if (lane == b) id = index;
#if SCORE == 3
            // Those that are left have keys, and the one that was just taken counts too.
            const float own = score[index];
            float near = 0.0f;
            for (uint j = 0; j < EACH; j++) {
                const uint e = j * 32 + lane;
                if (key[j] == 0 && e != index) continue;
                const float x = score[e];
                // Where both are 0 the quotient is NaN, and they are near.
                const bool is_far = (own - x) / max(fabs(x), own) > a.margin;
                if (!is_far) near += precise::exp(x - own);
            }
            near = simd_sum(near);
            if (lane == b) w = 1.0f / near;
#endif
        }
#if SCORE != 3
        float w = has_slot ? score[id] : 0.0f;
#endif
#if SCORE == 2
        const float best = simd_max(has_slot ? w : -INFINITY);
        is_bad = !isfinite(best);
        w = has_slot ? precise::exp(w - best) : 0.0f;
        w /= simd_sum(w);
#endif
        const float all = simd_sum(w);
        if (a.renormalise) w /= all + a.eps;
        w *= a.scale;
#if HAS_SCALE
        if (has_slot) w *= expert_scale[id];
#endif
        is_bad = simd_any(is_bad || (has_slot && !isfinite(w)));
        weight = w;
    }
    if (has_slot) {
        ids[(ulong)row * a.n_used + lane] = is_bad ? lane : id;
        weights[(ulong)row * a.n_used + lane] = is_bad ? NAN : weight;
    }
    if (lane == 0) faults[row] = is_bad ? 1 : 0;
}
