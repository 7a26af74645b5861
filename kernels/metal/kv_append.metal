// kv_append: writes the keys and values of the step's tokens at their positions of the paged cache. A threadgroup a
// token.
// Compiled with K_TYPE, V_TYPE, and HAS_V 0 where values are found in the keys.
// grid (T), 64 threads
#include "metal/common.h"
#include "metal/kv.h"

struct KvAppend {
    uint n_kv;
    uint d_k;
    uint d_v;
    uint windowed;
};

kernel void kv_append(device const float* k [[buffer(0)]], device Key* k_cache [[buffer(1)]],
#if HAS_V
                      device const float* v [[buffer(2)]], device Value* v_cache [[buffer(3)]],
#endif
                      constant KvAppend& a [[buffer(4)]], device const uint* positions [[buffer(5)]],
                      device const uint* chunk_of [[buffer(6)]], device const Chunk* chunks [[buffer(7)]],
                      device const uint* pages [[buffer(8)]], uint token [[threadgroup_position_in_grid]],
                      uint t [[thread_index_in_threadgroup]]) {
    const uint pos = positions[token], slot = pos % PAGE;
    const uint page = page_of(pages, chunks[chunk_of[token]], a.windowed, pos / PAGE);
    for (uint i = t; i < a.n_kv * a.d_k; i += 64) {
        device Key* head = k_cache + ((ulong)page * a.n_kv + i / a.d_k) * page_of_keys(a.d_k);
        store_key(head, a.d_k, slot, i % a.d_k, k[(ulong)token * a.n_kv * a.d_k + i]);
    }
#if HAS_V
    for (uint i = t; i < a.n_kv * a.d_v; i += 64) {
        device Value* head = v_cache + ((ulong)page * a.n_kv + i / a.d_v) * page_of_values(a.d_v);
        store_value(head, a.d_v, slot, i % a.d_v, v[(ulong)token * a.n_kv * a.d_v + i]);
    }
#endif
}
