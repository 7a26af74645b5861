// heads: what comes before attention: norms of the heads of q, k and v, rotary embeddings of q and k, and k and v into
// the paged cache. A simdgroup a head, with heads of q first, then of k, then of v.
//
// A lane reads the numbers that it writes and no others, so that nothing waits, but for keys in blocks. q and k are
// changed in place as well, as the plan has them. With HAS_GATE heads of q come from rows in which each has one of a
// gate after it; those are copied, by simdgroups after the ones of q. Compiled for a cache: D_K, D_V, K_TYPE, V_TYPE;
// HAS_Q, HAS_V 0 or 1; with HAS_Q also HAS_GATE 0 or 1; Q_NORM, K_NORM, V_NORM 0 without, 1 without a weight, 2 with
// one; Q_ROPE, K_ROPE 0 or 1. grid (ceil(heads / 2), T), 64 threads
#include "metal/common.h"
#include "metal/kv.h"
#include "metal/pair.h"

struct Heads {
    uint n_head; // of q
    uint n_kv;
    uint windowed;
    uint half_width; // pairs of a head that are rotated
    uint interleaved;
    float eps;
};

// 1 / rms of a head's numbers, of which a lane reads those that it may change later.
inline float scale_of(device const float* row, uint d, uint rotated, uint interleaved, float eps, uint lane) {
    float sum = 0.0f;
    for (uint i = lane; i < d - rotated; i += 32) {
        const Pair p = pair_of(i, rotated, interleaved);
        sum += row[p.first] * row[p.first];
        if (p.is_pair) sum += row[p.second] * row[p.second];
    }
    return 1.0f / precise::sqrt(simd_sum(sum) / float(d) + eps);
}

kernel void heads(constant Heads& a [[buffer(0)]],
#if HAS_Q
                  device float* q [[buffer(1)]],
#if HAS_GATE
                  device const float* whole [[buffer(14)]], device float* gate [[buffer(15)]],
#endif
#endif
                  device float* k [[buffer(2)]], device Key* k_cache [[buffer(3)]],
#if HAS_V
                  device const float* v [[buffer(4)]], device Value* v_cache [[buffer(5)]],
#endif
#if Q_NORM == 2
                  device const float* q_w [[buffer(6)]],
#endif
#if K_NORM == 2
                  device const float* k_w [[buffer(7)]],
#endif
#if V_NORM == 2
                  device const float* v_w [[buffer(8)]],
#endif
#if Q_ROPE || K_ROPE
                  device const float* table [[buffer(9)]],
#endif
                  device const uint* positions [[buffer(10)]], device const uint* chunk_of [[buffer(11)]],
                  device const Chunk* chunks [[buffer(12)]], device const uint* pages [[buffer(13)]],
                  uint2 group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                  uint lane [[thread_index_in_simdgroup]]) {
    const uint token = group.y, pos = positions[token], slot = pos % PAGE;
    const ulong page = page_of(pages, chunks[chunk_of[token]], a.windowed, pos / PAGE);
    uint head = 2 * group.x + sg;
#if Q_ROPE || K_ROPE
    device const float* angle = table + 2 * (ulong)token * a.half_width;
#endif
#if HAS_Q
    if (head < a.n_head) {
        device float* row = q + ((ulong)token * a.n_head + head) * D_K;
#if HAS_GATE
        device const float* from = whole + ((ulong)token * a.n_head + head) * 2 * D_K;
#else
        device const float* from = row;
#endif
#if Q_ROPE
        const uint rotated = a.half_width;
#else
        const uint rotated = 0;
#endif
#if Q_NORM
        const float by = scale_of(from, D_K, rotated, a.interleaved, a.eps, lane);
#endif
        for (uint i = lane; i < D_K - rotated; i += 32) {
            const Pair p = pair_of(i, rotated, a.interleaved);
            const uint first = p.first, second = p.second;
            float x = from[first], y = p.is_pair ? from[second] : 0.0f;
#if Q_NORM == 2
            x = x * by * q_w[first];
            if (p.is_pair) y = y * by * q_w[second];
#elif Q_NORM
            x = x * by;
            y = y * by;
#endif
#if Q_ROPE
            if (p.is_pair) {
                const float c = angle[2 * i], s = angle[2 * i + 1];
                row[second] = x * s + y * c;
                x = x * c - y * s;
            }
#endif
            row[first] = x;
        }
        return;
    }
    head -= a.n_head;
#if HAS_GATE
    if (head < a.n_head) {
        const ulong at = (ulong)token * a.n_head + head;
        for (uint i = lane; i < D_K; i += 32) gate[at * D_K + i] = whole[(2 * at + 1) * D_K + i];
        return;
    }
    head -= a.n_head;
#endif
#endif
    if (head < a.n_kv) {
        device float* row = k + ((ulong)token * a.n_kv + head) * D_K;
        device Key* to = k_cache + (page * a.n_kv + head) * page_of_keys(D_K);
#if K_ROPE
        const uint rotated = a.half_width;
#else
        const uint rotated = 0;
#endif
#if K_NORM
        const float by = scale_of(row, D_K, rotated, a.interleaved, a.eps, lane);
#endif
        for (uint i = lane; i < D_K - rotated; i += 32) {
            const Pair p = pair_of(i, rotated, a.interleaved);
            const uint first = p.first, second = p.second;
            float x = row[first], y = p.is_pair ? row[second] : 0.0f;
#if K_NORM == 2
            x = x * by * k_w[first];
            if (p.is_pair) y = y * by * k_w[second];
#elif K_NORM
            x = x * by;
            y = y * by;
#endif
#if K_ROPE
            if (p.is_pair) {
                const float c = angle[2 * i], s = angle[2 * i + 1], turned = x * s + y * c;
                row[second] = turned;
#if K_TYPE != 2
                store_key(to, D_K, slot, second, turned);
#endif
                x = x * c - y * s;
            }
#endif
            row[first] = x;
#if K_TYPE != 2
            store_key(to, D_K, slot, first, x);
#endif
        }
#if K_TYPE == 2
        // Blocks are made of what all lanes have written.
        simdgroup_barrier(mem_flags::mem_device);
        for (uint i = lane; i < D_K; i += 32) store_key(to, D_K, slot, i, row[i]);
#endif
        return;
    }
#if HAS_V
    head -= a.n_kv;
    if (head >= a.n_kv) return;
    device const float* row = v + ((ulong)token * a.n_kv + head) * D_V;
    device Value* to = v_cache + (page * a.n_kv + head) * page_of_values(D_V);
#if V_NORM
    const float by = scale_of(row, D_V, 0, 0, a.eps, lane);
#endif
    for (uint i = lane; i < D_V; i += 32) {
#if V_NORM == 2
        store_value(to, D_V, slot, i, row[i] * by * v_w[i]);
#elif V_NORM
        store_value(to, D_V, slot, i, row[i] * by);
#else
        store_value(to, D_V, slot, i, row[i]);
#endif
    }
#endif
}
