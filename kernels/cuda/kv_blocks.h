// Keys or values in blocks of 32 integers with an f16 scale, the type q8_0: a page holds of each key-value head
// [PAGE][d] integers, 128 added to each, then the scales, [d / 32][PAGE]. The integers and scales are those of
// `encode_block` in backend/cache_type.rs.
#pragma once

#include "cuda/kv.h"

// The integers of a key-value head, `head` counted over all pages. The scales follow.
__device__ __forceinline__ u8* blocks_of(const void* cache, u64 head, u32 d) {
    return (u8*)cache + head * (PAGE * (d + d / 16));
}

// The integer that a number becomes, as it is stored, one of a block that the lanes of a warp have, and the block's
// scale.
__device__ __forceinline__ u8 block_encode(float x, u16& scale) {
    // As integers NaN is the largest.
    const u32 most = __reduce_max_sync(FULL_MASK, __float_as_uint(x) & 0x7fffffff);
    float d = __fdiv_rn(__uint_as_float(most), 127.0f);
    if (d > 65504.0f) d = 65504.0f;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(scale) : "f"(d));
    d = float_of_f16(scale);
    const float by = d == 0.0f ? 0.0f : __fdiv_rn(1.0f, d);
    return (u8)(__float2int_rn(fminf(fmaxf(x * by, -127.0f), 127.0f)) + 128);
}

// Stores block `b` of row `row` of a head, of which each lane has a number.
__device__ __forceinline__ void block_store(u8* head, u32 d, u32 row, u32 b, float x) {
    u16 scale;
    head[row * d + 32 * b + threadIdx.x % 32] = block_encode(x, scale);
    if (threadIdx.x % 32 == 0) ((u16*)(head + PAGE * d))[b * PAGE + row] = scale;
}

// A pair of f16 from two stored integers of `x`: those that the selector names, as __byte_perm takes it with 0x64 as byte
// 4, which makes 1024 and a byte of one.
__device__ __forceinline__ u32 pair_of_bytes(u32 x, u32 selector) {
    u32 out = __byte_perm(x, 0x64646464, selector);
#if defined(__CUDACC__)
    asm("sub.f16x2 %0, %0, %1;" : "+r"(out) : "r"(0x64806480));
#else
    _Float16 pair[2];
    __builtin_memcpy(pair, &out, 4);
    pair[0] -= 1152, pair[1] -= 1152;
    __builtin_memcpy(&out, pair, 4);
#endif
    return out;
}

// Products of two pairs of f16.
__device__ __forceinline__ u32 multiply_pairs(u32 x, u32 y) {
    u32 out;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(out) : "r"(x), "r"(y));
    return out;
}
