// head_norm, rope and kv_append of a layer's q, k and v in one launch: each part of heads is normed, rotated and
// stored, as far as it asks for it. Compiled for the elements of the cache (-DKV_F16).
//
// grid (heads of all parts and tokens / 4), block 128: a warp a head. A lane owns pairs (i, i + half) or (2i, 2i + 1),
// and dimensions behind the last pair, so no lane reads what another has written.
#include "cuda/head.h"
#include "cuda/kv_blocks.h"

// A head of any width.
template <class Store>
__device__ __forceinline__ void head_of_any(const Qkv& a, const QkvPart& part, const float* x, u32 token,
                                            const Store& store) {
    const u32 lane = threadIdx.x % 32, d = part.d_head, half = part.is_rotated ? a.half : 0;
    const float* angles = a.table + 2 * (u64)token * a.half;
    float r = 1.0f;
    if (part.is_normed) {
        float sum = 0.0f;
        for (u32 i = lane; i < d; i += 32) sum += x[i] * x[i];
        r = 1.0f / sqrtf(warp_sum(sum) / (float)d + a.eps);
    }
    const auto scaled = [&](u32 i) { return x[i] * r * (part.w ? part.w[i] : 1.0f); };
    for (u32 i = lane; i < half; i += 32) {
        const u32 first = a.interleaved ? 2 * i : i, second = a.interleaved ? 2 * i + 1 : i + half;
        const float u = scaled(first), v = scaled(second), cosine = angles[2 * i], sine = angles[2 * i + 1];
        store(first, u * cosine - v * sine);
        store(second, u * sine + v * cosine);
    }
    for (u32 i = 2 * half + lane; i < d; i += 32) store(i, scaled(i));
}

KERNEL __launch_bounds__(128) qkv(const __grid_constant__ Qkv a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const u32 lane = threadIdx.x % 32;
    const u64 warp = (u64)blockIdx.x * 4 + threadIdx.x / 32;
    const u32 token = warp / a.n_heads;
    u32 head = warp % a.n_heads;
    if (token >= a.rows) return;
    u32 p = 0;
    while (head >= a.parts[p].n_head) head -= a.parts[p++].n_head;
    const QkvPart& part = a.parts[p];
    const u32 d = part.d_head;
    float* x = part.x + ((u64)token * part.n_head + head) * d;

    Kv* cache = nullptr;
    u8* blocks = nullptr;
    u32 at = 0;
    if (part.cache) {
        const u32 pos = a.step.positions[token];
        const Chunk& c = a.step.chunks[a.step.chunk_of[token]];
        const u32 page = page_of(a.step, c, a.windowed, pos / PAGE);
        const u64 of_head = (u64)page * part.n_head + head;
        at = pos % PAGE;
        if (part.is_blocks) {
            blocks = blocks_of(part.cache, of_head, d);
        } else {
            cache = (Kv*)part.cache + (of_head * PAGE + at) * d;
        }
    }
    const auto store = [&](u32 i, float y) {
        if (part.is_normed || part.is_rotated) x[i] = y;
        if (cache) cache[i] = kv_store(y);
    };
    if (d == 64) {
        head_of<64, false>(a, part, x, token, store);
    } else if (d == 128) {
        head_of<128, false>(a, part, x, token, store);
    } else if (d == 256) {
        head_of<256, false>(a, part, x, token, store);
    } else {
        head_of_any(a, part, x, token, store);
    }
    if (blocks == nullptr) return;
    __syncwarp();
    for (u32 b = 0; b < d / 32; b++) block_store(blocks, d, at, b, x[32 * b + lane]);
}
