// latent_in: what a latent cache keeps of a token: its latent, normed, and behind it the numbers that are rotated. A
// threadgroup a token. With HAS_Q another threadgroup norms the token's latent query: q_out = rms_norm(q).
// Compiled for a cache: D_K, K_TYPE, V_TYPE; HAS_Q 0 or 1.
// grid (1 + HAS_Q, T), 64 threads
#include "metal/common.h"
#include "metal/kv.h"
#include "metal/pair.h"
#include "metal/reduce.h"

struct LatentIn {
    uint n_latent;
    uint n_turned;
    uint half_width; // pairs that are rotated
    uint interleaved;
    uint windowed;
    float eps;
#if HAS_Q
    uint n_q;
    float q_eps;
#endif
};

kernel void latent_in(device const float* kv [[buffer(0)]], device const float* w [[buffer(1)]],
                      device Key* cache [[buffer(2)]], constant LatentIn& a [[buffer(3)]],
                      device const float* table [[buffer(4)]], device const uint* positions [[buffer(5)]],
                      device const uint* chunk_of [[buffer(6)]], device const Chunk* chunks [[buffer(7)]],
                      device const uint* pages [[buffer(8)]],
#if HAS_Q
                      device const float* q [[buffer(9)]], device const float* q_w [[buffer(10)]],
                      device float* q_out [[buffer(11)]],
#endif
                      uint2 group [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                      uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float part[2];
    const uint token = group.y;
    device const float* row = kv + (ulong)token * (a.n_latent + a.n_turned);
    uint n = a.n_latent;
    float eps = a.eps;
#if HAS_Q
    if (group.x == 1) {
        row = q + (ulong)token * a.n_q;
        n = a.n_q;
        eps = a.q_eps;
    }
#endif
    float sum = 0.0f;
    for (uint i = t; i < n; i += 64) sum += row[i] * row[i];
    sum = sum_of_64(sum, part, sg, lane);
    const float r = 1.0f / precise::sqrt(sum / float(n) + eps);
#if HAS_Q
    if (group.x == 1) {
        for (uint i = t; i < n; i += 64) q_out[(ulong)token * n + i] = row[i] * r * q_w[i];
        return;
    }
#endif
    const uint pos = positions[token];
    const ulong page = page_of(pages, chunks[chunk_of[token]], a.windowed, pos / PAGE);
    device Key* to = cache + page * page_of_keys(D_K);
#if K_TYPE == 2
    // Blocks are made of what all threads have put here.
    threadgroup float key[D_K];
#define PUT(i, x) key[i] = x
#else
#define PUT(i, x) store_key(to, D_K, pos % PAGE, i, x)
#endif
    for (uint i = t; i < n; i += 64) PUT(i, row[i] * r * w[i]);
    device const float* turned = row + n;
    device const float* angle = table + 2 * (ulong)token * a.half_width;
    for (uint i = t; i < a.n_turned - a.half_width; i += 64) {
        const Pair p = pair_of(i, a.half_width, a.interleaved);
        float x = turned[p.first];
        if (p.is_pair) {
            const float y = turned[p.second], c = angle[2 * i], s = angle[2 * i + 1];
            PUT(n + p.second, x * s + y * c);
            x = x * c - y * s;
        }
        PUT(n + p.first, x);
    }
#if K_TYPE == 2
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = t; i < D_K; i += 64) store_key(to, D_K, pos % PAGE, i, key[i]);
#endif
}
