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
