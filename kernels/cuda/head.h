// The norm and the rope of a head.
#pragma once

#include "cuda/args.h"
#include "cuda/common.h"
#include "cuda/shares.h"

// Where the row of a token's head begins; with shares, that of the first one.
__device__ __forceinline__ const float* head_row(const QkvPart& part, u32 token, u32 head, u32 stride) {
    if (part.shares.n > 0) return part.shares.of + (u64)token * part.shares.row + head * stride;
    return part.x + ((u64)token * part.n_head + head) * stride;
}

// A head's row, normed and rotated, by a warp: `store(i, y)`. No lane reads what another has written. All that is read
// is asked for before the first use. `a`, a Qkv or an Attend, has the rope and the norm's eps. HAS_SHARES: x may be the
// first of several shares.
template <int WIDTH, bool HAS_SHARES, class Op, class Store>
__device__ __forceinline__ void head_of(const Op& a, const QkvPart& part, const float* x, u32 token,
                                        const Store& store) {
    constexpr int N = WIDTH / 32;
    const u32 lane = threadIdx.x % 32, half = part.is_rotated ? a.half : 0;
    const float* angles = a.table + 2 * (u64)token * a.half;
    // Both numbers of a pair are a lane's.
    const bool is_whole = 2 * half == WIDTH && !a.interleaved;
    float y[N];
    float2 angle[N / 2];
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (!HAS_SHARES || part.shares.n == 0) y[i] = x[32 * i + lane];
    }
    if (HAS_SHARES && part.shares.n > 0) add_shares<32, 4>(part.shares, x + lane, y);
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        angle[i] = make_float2(1.0f, 0.0f);
        if (is_whole) angle[i] = ((const float2*)angles)[32 * i + lane];
    }
    float r = 1.0f;
    if (part.is_normed) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < N; i++) sum += y[i] * y[i];
        r = rsqrtf(warp_sum(sum) / (float)WIDTH + a.eps);
    }
    if (half == 0 || is_whole) {
#pragma unroll
        for (int i = 0; i < N; i++) y[i] *= r * (part.w ? part.w[32 * i + lane] : 1.0f);
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const float u = y[i], v = y[i + N / 2];
            store(32 * i + lane, half == 0 ? u : u * angle[i].x - v * angle[i].y);
            store(32 * (i + N / 2) + lane, half == 0 ? v : u * angle[i].y + v * angle[i].x);
        }
        return;
    }
    const auto scaled = [&](u32 i) {
        float y[1] = {x[i]};
        if (HAS_SHARES && part.shares.n > 0) add_shares<1, 4>(part.shares, x + i, y);
        return y[0] * r * (part.w ? part.w[i] : 1.0f);
    };
    for (u32 i = lane; i < half; i += 32) {
        const u32 first = a.interleaved ? 2 * i : i, second = a.interleaved ? 2 * i + 1 : i + half;
        const float u = scaled(first), v = scaled(second), cosine = angles[2 * i], sine = angles[2 * i + 1];
        store(first, u * cosine - v * sine);
        store(second, u * sine + v * cosine);
    }
    for (u32 i = 2 * half + lane; i < WIDTH; i += 32) store(i, scaled(i));
}
