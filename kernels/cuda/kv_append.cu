// kv_append: writes the keys and values of the step's tokens at their positions of the paged cache.
// grid (T), block 256: a block a token. The batch's check has found every position inside the tables.
#include "cuda/kv_blocks.h"

__device__ __forceinline__ void append(const float* from, void* to, u32 page, u32 offset, u32 n_kv, u32 d,
                                       bool is_blocks) {
    if (is_blocks) {
        for (u32 i = threadIdx.x / 32; i < n_kv * d / 32; i += blockDim.x / 32) {
            const u32 head = 32 * i / d, b = i % (d / 32);
            block_store(blocks_of(to, (u64)page * n_kv + head, d), d, offset, b, from[32 * i + threadIdx.x % 32]);
        }
        return;
    }
    Kv* cache = (Kv*)to;
    for (u32 i = threadIdx.x; i < n_kv * d; i += blockDim.x) {
        const u32 head = i / d;
        cache[(((u64)page * n_kv + head) * PAGE + offset) * d + i % d] = kv_store(from[i]);
    }
}

KERNEL __launch_bounds__(256) kv_append(const __grid_constant__ KvAppend a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const u32 token = blockIdx.x;
    const u32 pos = a.step.positions[token];
    const Chunk& c = a.step.chunks[a.step.chunk_of[token]];
    const u32 page = page_of(a.step, c, a.windowed, pos / PAGE);
    append(a.k + (u64)token * a.n_kv * a.d_k, a.k_cache, page, pos % PAGE, a.n_kv, a.d_k, a.blocks & 1);
    if (a.v) append(a.v + (u64)token * a.n_kv * a.d_v, a.v_cache, page, pos % PAGE, a.n_kv, a.d_v, a.blocks >> 1);
}
