// kv_append: writes the keys and values of the step's tokens at their positions of the paged cache.
// grid (T), block 256: a block a token. The batch's check has found every position inside the tables.
#include "cuda/kv.h"

__device__ __forceinline__ void append(const float* from, Kv* cache, u32 page, u32 offset, u32 n_kv, u32 d) {
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
    append(a.k + (u64)token * a.n_kv * a.d_k, (Kv*)a.k_cache, page, pos % PAGE, a.n_kv, a.d_k);
    if (a.v) append(a.v + (u64)token * a.n_kv * a.d_v, (Kv*)a.v_cache, page, pos % PAGE, a.n_kv, a.d_v);
}
