// Packed columns of `few_pairs`: a row of activations as `Staged` has one column in 8 bits, so that a block which needs
// it copies it and does nothing else. Runs of 16 bytes, then their scales, each with the scaled sum of its run. Where
// weights come through shared memory, `few.h` is included first.
#pragma once

#include "cuda/vec.h"

// Runs of a column of k numbers, and its bytes.
__device__ __forceinline__ u32 column_runs(u32 k) { return ((k + 15) / 16 + 31) / 32 * 32; }
__device__ __forceinline__ u32 column_bytes(u32 k) { return column_runs(k) * 24; }

// Half of a run of a column with a scale for 64 numbers, by eight lanes: beside it lie the sums of both halves.
__device__ __forceinline__ void put64(const Staged<q4_k_wide, 1>& column, u32 run, u32 half, const float (&v)[8]) {
    u32 words[2], sum;
    const float d = bytes64(v, words, sum);
    const u32 second = __shfl_xor_sync(FULL_MASK, sum, 4);
    ((uint2*)(column.words(0, 0) + column.slot(run)))[half] = make_uint2(words[0], words[1]);
    if (run % 4 == 0 && half == 0) {
        column.scales(0)[column.slot(run)] = make_float2(d, __uint_as_float((sum & 0xffffu) | second << 16));
    }
}

// Packs row `row` of x, a scale for 32 numbers or for 64. All threads of the block take part.
__device__ __forceinline__ void pack_row(const PackColumns& a, u32 row, float* scratch) {
    const float* x = a.x + (u64)row * a.k;
    const Staged<q4_k_wide, 1> column = {(uint4*)(a.out + (u64)row * column_bytes(a.k)), column_runs(a.k)};
    const u32 n = 2 * column_runs(a.k);
    const bool wide = a.k % 4 == 0;
    float factor = 1.0f;
    if (a.prologue.kind == NORMED) {
        float sum = 0.0f;
        for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
            float v[8];
            load8<1>(x, wide, a.k, 8 * i, v);
#pragma unroll
            for (int j = 0; j < 8; j++) sum += v[j] * v[j];
        }
        factor = rsqrtf(__fdividef(block_sum(sum, scratch), (float)a.k) + a.prologue.eps);
    }
    // `n` is a multiple of 64, so that a warp is here as a whole.
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
        float v[8], w[8];
        load8<1>(x, wide, a.k, 8 * i, v);
        if (a.prologue.kind == NORMED) {
            load8<1>(a.prologue.w, wide, a.k, 8 * i, w);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] *= factor * w[j];
        }
        if (a.is_wide) {
            put64(column, i / 2, i % 2, v);
        } else {
            column.put(0, i / 2, i % 2, v);
        }
    }
}

// Number `i` of a column of k, whose warp holds those of two runs: packed with one scale for both.
__device__ __forceinline__ void pack_two(float v, u8* column, u32 k, u32 i) {
    float amax = fabsf(v);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) amax = max_or_nan(amax, __shfl_xor_sync(FULL_MASK, amax, step));
    const ByteScale scale = byte_scale(amax);
    const u32 bits = __float_as_uint(fmaf(v, scale.inverse, 12582912.0f));
    int sum = (i8)bits;
#pragma unroll
    for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(FULL_MASK, sum, step);
    const u32 at = Staged<q4_k_wide, 1>::slot(i / 16);
    column[16 * at + i % 16] = (u8)bits;
    if (i % 16 == 0) ((float2*)(column + 16 * column_runs(k)))[at] = make_float2(scale.d, scale.d * (float)sum);
}

// The same for numbers `i .. i + 4`, of which eight neighbouring lanes have those of two runs. Called by whole warps.
__device__ __forceinline__ void pack_four(const float (&v)[4], u8* column, u32 k, u32 i, bool stores) {
    float amax = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) amax = max_or_nan(amax, fabsf(v[j]));
#pragma unroll
    for (int step = 4; step > 0; step /= 2) amax = max_or_nan(amax, __shfl_xor_sync(FULL_MASK, amax, step));
    const ByteScale scale = byte_scale(amax);
    u32 q[4];
#pragma unroll
    for (int j = 0; j < 4; j++) q[j] = __float_as_uint(fmaf(v[j], scale.inverse, 12582912.0f));
    const u32 word = low_bytes(q);
    u32 sum = dp4a_signed(word, 0x01010101u, 0);
    sum += __shfl_xor_sync(FULL_MASK, sum, 1);
    sum += __shfl_xor_sync(FULL_MASK, sum, 2);
    if (!stores) return;
    const u32 at = Staged<q4_k_wide, 1>::slot(i / 16);
    ((u32*)(column + 16 * at))[i % 16 / 4] = word;
    if (i % 16 == 0) ((float2*)(column + 16 * column_runs(k)))[at] = make_float2(scale.d, scale.d * (float)(int)sum);
}

// A number of a run whose 16 lanes hold the others: packed as number `lane` of run `run`.
__device__ __forceinline__ void pack_one(float v, u8* column, u32 k, u32 run, u32 lane, bool stores) {
    float amax = fabsf(v);
#pragma unroll
    for (int step = 8; step > 0; step /= 2) amax = max_or_nan(amax, __shfl_xor_sync(FULL_MASK, amax, step));
    const ByteScale scale = byte_scale(amax);
    const u32 bits = __float_as_uint(fmaf(v, scale.inverse, 12582912.0f));
    int sum = (i8)bits;
#pragma unroll
    for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(FULL_MASK, sum, step);
    if (!stores) return;
    const u32 at = Staged<q4_k_wide, 1>::slot(run);
    column[16 * at + lane] = (u8)bits;
    if (lane == 0) ((float2*)(column + 16 * column_runs(k)))[at] = make_float2(scale.d, scale.d * (float)sum);
}
