// kv_append: writes the keys and values of the step's tokens at their positions of the paged cache. A threadgroup a
// token.
// Compiled with KV_F16, and HAS_V 0 where values are found in the keys.
// grid (T), 64 threads
#include "metal/common.h"
#include "metal/kv.h"

struct KvAppend {
    uint n_kv;
    uint d_k;
    uint d_v;
    uint windowed;
};

kernel void kv_append(device const float* k [[buffer(0)]], device Kv* k_cache [[buffer(1)]],
#if HAS_V
                      device const float* v [[buffer(2)]], device Kv* v_cache [[buffer(3)]],
#endif
                      constant KvAppend& a [[buffer(4)]], device const uint* positions [[buffer(5)]],
                      device const uint* chunk_of [[buffer(6)]], device const Chunk* chunks [[buffer(7)]],
                      device const uint* pages [[buffer(8)]], uint token [[threadgroup_position_in_grid]],
                      uint t [[thread_index_in_threadgroup]]) {
    const uint pos = positions[token], slot = pos % PAGE;
    const uint page = page_of(pages, chunks[chunk_of[token]], a.windowed, pos / PAGE);
    for (uint i = t; i < a.n_kv * a.d_k; i += 64) {
        // Element i is number i % d_k of head i / d_k.
        k_cache[((ulong)page * a.n_kv * a.d_k + i) * PAGE + slot] = kv_store(k[(ulong)token * a.n_kv * a.d_k + i]);
    }
#if HAS_V
    for (uint i = t; i < a.n_kv * a.d_v; i += 64) {
        const ulong head = (ulong)page * a.n_kv + i / a.d_v;
        v_cache[(head * PAGE + slot) * a.d_v + i % a.d_v] = kv_store(v[(ulong)token * a.n_kv * a.d_v + i]);
    }
#endif
}
