// Sums of shares of k that a wide product has left to the launch after it, added up in the order of the shares. A
// thread asks for ASKED shares at a time.
#pragma once

#include "cuda/args.h"
#include "cuda/common.h"

// Numbers `first[STEP * i]` of a row, where the first share has it.
template <int STEP, int ASKED, int N>
__device__ __forceinline__ void add_shares(const Shares& s, const float* first, float (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = 0.0f;
#pragma unroll 1
    for (u32 begin = 0; begin < s.n; begin += ASKED) {
        float of[ASKED][N];
#pragma unroll
        for (u32 j = 0; j < ASKED; j++) {
#pragma unroll
            for (int i = 0; i < N; i++) of[j][i] = begin + j < s.n ? first[(begin + j) * s.share + STEP * i] : 0.0f;
        }
#pragma unroll
        for (u32 j = 0; j < ASKED; j++) {
#pragma unroll
            for (int i = 0; i < N; i++) v[i] += of[j][i];
        }
    }
}

// Eight numbers that follow each other, at a multiple of 16 bytes.
template <int ASKED>
__device__ __forceinline__ void add_eight(const Shares& s, const float* first, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = 0.0f;
#pragma unroll 1
    for (u32 begin = 0; begin < s.n; begin += ASKED) {
        float4 of[ASKED][2] = {};
#pragma unroll
        for (u32 j = 0; j < ASKED; j++) {
            const float4* from = (const float4*)(first + (begin + j) * s.share);
            if (begin + j < s.n) of[j][0] = from[0], of[j][1] = from[1];
        }
#pragma unroll
        for (u32 j = 0; j < ASKED; j++) {
            v[0] += of[j][0].x, v[1] += of[j][0].y, v[2] += of[j][0].z, v[3] += of[j][0].w;
            v[4] += of[j][1].x, v[5] += of[j][1].y, v[6] += of[j][1].z, v[7] += of[j][1].w;
        }
    }
}
