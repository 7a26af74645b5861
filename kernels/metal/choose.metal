// choose: the n positions that attention sees, the best of a token's own and all before it by
// sum_h weights[t, h] * max(q[t, h] . key, 0); ties to the earlier, NaN last. Ascending, then uint max; all of them
// where they are no more than n.
//
// A step goes in slices of tokens. `choose_scores` makes ranks of their scores, uint [tokens of a slice, stride]: a
// simdgroup takes a page, a lane a position, and eight heads go together, so that keys are read once for them.
// `choose_best` finds the rank of the last that is chosen, two bits at a time, and lists what is better and the first
// of what is equal; a thread counts, and then lists, positions that follow each other. Compiled for one cache, of one
// head that has keys alone: D, K_TYPE, V_TYPE; THREADS of choose_best.
// choose_scores: grid (positions of the longest sequence / 64, T), 64 threads; choose_best: grid (T), THREADS
#include "metal/common.h"
#include "metal/kv.h"

struct Choose {
    uint n_tokens; // of the step
    uint first; // token of the slice
    uint most; // tokens of a slice
    uint stride;
    uint n;
    uint n_head;
};

// A score as a number that grows with it; NaN is the least that there is, with -inf.
inline uint rank_of(float score) {
    const uint bits = as_type<uint>(isnan(score) ? -INFINITY : score + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

kernel void choose_scores(device const float* q [[buffer(0)]], device const Key* k_cache [[buffer(1)]],
                          device const float* weights [[buffer(2)]], device uint* ranks [[buffer(3)]],
                          constant Choose& a [[buffer(4)]], device const uint* positions [[buffer(5)]],
                          device const uint* chunk_of [[buffer(6)]], device const Chunk* chunks [[buffer(7)]],
                          device const uint* pages [[buffer(8)]], uint2 group [[threadgroup_position_in_grid]],
                          uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint token = a.first + group.y, p = 64 * group.x + t;
    if (group.y >= a.most || token >= a.n_tokens) return;
    const uint pos = positions[token];
    if (p > pos || pos < a.n) return;
    device const Key* keys = k_cache + (ulong)page_of(pages, chunks[chunk_of[token]], 0, p / PAGE) * page_of_keys(D);
    float score = 0.0f;
    for (uint h = 0; h < a.n_head; h += 8) {
        device const float* heads = q + ((ulong)token * a.n_head + h) * D;
        const uint n = min(8u, a.n_head - h);
        float dots[8] = {};
        for (uint i = 0; i < D; i++) {
            const float key = key_at(keys, D, lane, i);
            for (uint e = 0; e < 8; e++) dots[e] += e < n ? heads[e * D + i] * key : 0.0f;
        }
        for (uint e = 0; e < n; e++) score += weights[(ulong)token * a.n_head + h + e] * fmax(dots[e], 0.0f);
    }
    ranks[(ulong)group.y * a.stride + p] = rank_of(score);
}

kernel void choose_best(device const uint* ranks [[buffer(0)]], device uint* out [[buffer(1)]],
                        constant Choose& a [[buffer(4)]], device const uint* positions [[buffer(5)]],
                        uint group [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup uint better[THREADS], equal[THREADS]; // positions of a thread's, then of all threads before it
    threadgroup uint3 parts[2][THREADS / 32]; // alternating, so that one barrier a pass is enough
    const uint token = a.first + group;
    if (group >= a.most || token >= a.n_tokens) return;
    const uint n_seen = positions[token] + 1;
    device uint* to = out + (ulong)token * a.n;
    if (n_seen <= a.n) {
        for (uint i = t; i < a.n; i += THREADS) to[i] = i < n_seen ? i : 0xffffffffu;
        return;
    }
    device const uint* row = ranks + (ulong)group * a.stride;
    uint last = 0, left = a.n; // the rank of the last that is chosen, as far as it is known, and how many have it
    for (uint pass = 0; pass < 16; pass++) {
        // Of ranks that begin as it does: how many have 1, 2 and 3 or more in the next two bits.
        const uint shift = 30 - 2 * pass;
        uint3 n = uint3(0);
        for (uint p = t; p < n_seen; p += THREADS) {
            const uint rank = row[p], bits = rank >> shift & 3;
            if (rank >> shift >> 2 != last >> shift >> 2) continue;
            n += uint3(bits > 0 ? 1 : 0, bits > 1 ? 1 : 0, bits > 2 ? 1 : 0);
        }
        n = uint3(simd_sum(n.x), simd_sum(n.y), simd_sum(n.z));
        threadgroup uint3* part = parts[pass % 2];
        if (t % 32 == 0) part[t / 32] = n;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        n = uint3(0);
        for (uint i = 0; i < THREADS / 32; i++) n += part[i];
        const uint bits = n.z >= left ? 3 : n.y >= left ? 2 : n.x >= left ? 1 : 0;
        left -= bits == 3 ? 0 : bits == 2 ? n.z : bits == 1 ? n.y : n.x;
        last |= bits << shift;
    }
    const uint each = (n_seen + THREADS - 1) / THREADS, begin = min(each * t, n_seen), end = min(begin + each, n_seen);
    uint n_better = 0, n_equal = 0;
    for (uint p = begin; p < end; p++) {
        n_better += row[p] > last ? 1 : 0;
        n_equal += row[p] == last ? 1 : 0;
    }
    better[t] = n_better;
    equal[t] = n_equal;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t == 0) {
        uint b = 0, e = 0;
        for (uint i = 0; i < THREADS; i++) {
            const uint of_better = better[i], of_equal = equal[i];
            better[i] = b;
            equal[i] = e;
            b += of_better;
            e += of_equal;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint n_before = equal[t], at = better[t] + min(n_before, left);
    for (uint p = begin; p < end; p++) {
        const uint rank = row[p];
        if (rank > last || (rank == last && n_before < left)) to[at++] = p;
        n_before += rank == last ? 1 : 0;
    }
}
