// The paged cache: a page holds PAGE positions of each key-value head, `[n_pages, n_kv, PAGE, d]`, so that a head's
// keys of a page are one piece. Its numbers are f16 or f32 (-DKV_F16=1 or 0).
#pragma once

#include "cuda/common.h"
#include "cuda/args.h"
#include "quant/unit.h"

#define PAGE 32

#if KV_F16
typedef u16 Kv;
__device__ __forceinline__ float kv_load(u16 bits) { return float_of_f16(bits); }
__device__ __forceinline__ u16 kv_store(float x) {
    u16 bits;
#if defined(__CUDACC__)
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#else
    const _Float16 half = (_Float16)x;
    __builtin_memcpy(&bits, &half, 2);
#endif
    return bits;
}
#else
typedef float Kv;
__device__ __forceinline__ float kv_load(float x) { return x; }
__device__ __forceinline__ float kv_store(float x) { return x; }
#endif

// The first position that a query sees: of a window, 0 for none, or with the highest bit of a chunk of that length.
__device__ __forceinline__ u32 first_seen(u32 window, u32 pos) {
    if (window >> 31) return pos - pos % (window << 1 >> 1);
    return window != 0 && pos + 1 > window ? pos + 1 - window : 0;
}

// The last position that a token sees: its own, that of its span's end where the step has spans, up to `reach`
// positions from its own on.
__device__ __forceinline__ u32 last_seen(const Attention& a, u32 token, u32 pos) {
    if (!a.ends) return pos;
    const u32 last = a.ends[token] - 1;
    return a.reach != 0 && last - pos >= a.reach ? pos + a.reach - 1 : last;
}

// The page that holds a block of PAGE positions of a chunk's sequence.
__device__ __forceinline__ u32 page_of(const Step& step, const Chunk& c, u32 windowed, u32 block) {
    return windowed ? step.window_pages[c.first_window_page + block - c.first_window_block]
                    : step.pages[c.first_page + block];
}

// Where tile `tile` of a step begins: its chunk and the tile's number in it; false past the last one. A chunk of one
// token has none where `singles` are computed elsewhere. All lanes of a warp call it.
__device__ __forceinline__ bool find_tile(const Attention& a, u32 per_tile, u32& tile, u32& chunk) {
    constexpr u32 EACH = 4;
    const u32 lane = threadIdx.x % 32;
    for (u32 first = 0; first < a.n_splits; first += 32 * EACH) {
        u32 n[EACH], mine = 0;
#pragma unroll
        for (u32 i = 0; i < EACH; i++) {
            const u32 at = first + lane * EACH + i;
            const u32 len = at < a.n_splits ? a.step.chunks[at].len : 0;
            mine += n[i] = a.singles && len == 1 ? 0 : (len + per_tile - 1) / per_tile;
        }
        const u32 sum = sum_up_to(mine);
        const u32 hit = __ballot_sync(FULL_MASK, sum > tile);
        if (hit) {
            const u32 from = __ffs(hit) - 1;
            tile -= __shfl_sync(FULL_MASK, sum - mine, from);
            chunk = first + from * EACH;
#pragma unroll
            for (u32 i = 0; i + 1 < EACH; i++) {
                const u32 len = __shfl_sync(FULL_MASK, n[i], from);
                if (tile < len) return true;
                tile -= len;
                chunk++;
            }
            return true;
        }
        tile -= __shfl_sync(FULL_MASK, sum, 31);
    }
    return false;
}
