// The best of some numbers, found by one warp.
#pragma once

#include "cuda/common.h"

// A number whose order as an integer is the order of the float; both zeros are the same. No float but NaN gives 0.
__device__ __forceinline__ u32 ordered(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The `n_best` best of numbers by their `key`, best first, ties to the lower index; lane s gets the s-th. A lane holds
// the numbers lane, lane + 32, ...; those taken become 0, which is below every number.
struct Best {
    u32 index, key;
};
template <int EACH_LANE>
__device__ __forceinline__ Best best_of_keys(u32 (&key)[EACH_LANE], u32 n_best) {
    const u32 lane = threadIdx.x % 32;
    Best best = {0, 0};
#pragma unroll 1
    for (u32 b = 0; b < n_best; b++) {
        u32 top = key[0], at = 0;
#pragma unroll
        for (int j = 1; j < EACH_LANE; j++) {
            if (key[j] > top) {
                top = key[j];
                at = j;
            }
        }
        const u32 all = __reduce_max_sync(FULL_MASK, top);
        const u32 index = __reduce_min_sync(FULL_MASK, top == all ? at * 32 + lane : ~0u);
        if (lane == b) best = {index, all};
#pragma unroll
        for (int j = 0; j < EACH_LANE; j++) {
            if (j * 32 + lane == index) key[j] = 0;
        }
    }
    return best;
}

// The float of a key.
__device__ __forceinline__ float of_ordered(u32 key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// Indices of the `n_best` best of values[0..n] into `best`.
template <int EACH_LANE>
__device__ __forceinline__ void best_of(const float* values, u32 n, u32 n_best, u32* best) {
    const u32 lane = threadIdx.x % 32;
    u32 key[EACH_LANE];
#pragma unroll
    for (int j = 0; j < EACH_LANE; j++) {
        const u32 i = j * 32 + lane;
        key[j] = i < n ? ordered(values[i]) : 0;
    }
    const Best mine = best_of_keys<EACH_LANE>(key, n_best);
    if (lane < n_best) best[lane] = mine.index;
    __syncwarp();
}
