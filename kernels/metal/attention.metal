// attention: softmax(q * kT * scale) * v over the paged cache, with windows, sinks and softcap. A threadgroup takes a
// token and a query head; its two simdgroups take pages of even and of odd blocks and keep an online softmax each,
// which are merged at the end. Blocks go by absolute position, so a token's numbers do not depend on its company.
//
// A lane is a position of the page: the score of its key is one chain of multiply-adds. For values it owns every 32nd
// column, or four side by side of 128, and takes each position's share from that position's lane. With SPLIT a
// threadgroup takes a part of the positions and leaves its sums, its largest score and its sum of shares in `out`, [T,
// n_head, n_parts, D_V + 2], to `attention_merge`, which makes of a single part the bits that SPLIT 0 makes. Compiled
// for a cache: D_K, D_V, K_TYPE, V_TYPE, V_IN_K (values are the first D_V numbers of the keys); SINKS 0 or 1; SPLIT;
// SPANS: 0, or a token sees what follows it up to the end of its span (1), no further than the window (2); CHOSEN 0 or
// 1: a token sees the positions of a list alone, which ascend, and uint max after them. grid (n_head, T), with SPLIT
// (n_head, T, parts of the longest context), 64 threads
#include "metal/common.h"
#include "metal/kv.h"

#define COLUMNS ((D_V + 31) / 32)
// Number j of a lane is column COLUMN(j): four side by side where every lane has as many.
#if D_V % 128 == 0 && !V_IN_K
#define FOUR 4
#define COLUMN(j) ((j) / 4 * 128 + 4 * lane + (j) % 4)
#else
#define FOUR 1
#define COLUMN(j) (32 * (j) + lane)
#endif

struct Attention {
    uint n_head;
    uint n_kv;
    uint window; // as first_seen takes it
    uint windowed;
    float scale;
    float softcap; // 0: none
#if SPLIT
    uint part; // positions of a part
    uint n_parts; // of the longest context that there may be
#endif
#if CHOSEN
    uint n_chosen;
#endif
};

kernel void attention(device const float* q [[buffer(0)]], device const Key* k_cache [[buffer(1)]],
#if !V_IN_K
                      device const Value* v_cache [[buffer(2)]],
#endif
                      device float* out [[buffer(3)]], constant Attention& a [[buffer(4)]],
                      device const uint* positions [[buffer(5)]], device const uint* chunk_of [[buffer(6)]],
                      device const Chunk* chunks [[buffer(7)]], device const uint* pages [[buffer(8)]],
#if SINKS
                      device const float* sinks [[buffer(9)]],
#endif
#if SPANS
                      device const uint* ends [[buffer(10)]],
#endif
#if CHOSEN
                      device const uint* chosen [[buffer(11)]],
#endif
                      uint3 group [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                      uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float4 pieces[(D_K + 3) / 4];
    threadgroup float* query = (threadgroup float*)pieces;
    threadgroup float other[D_V + 2]; // the sums of simdgroup 1, its largest score and its sum of shares
    const uint head = group.x, token = group.y, kv_head = head / (a.n_head / a.n_kv);
    const ulong row = (ulong)token * a.n_head + head;
    uint pos = positions[token];
    device const Chunk& c = chunks[chunk_of[token]];
    uint first_pos = first_seen(a.window, pos);
#if SPANS
    pos = span_end(ends[token], a.window, pos) - 1;
#endif
#if SPLIT
    if (a.part * group.z > pos) return;
    first_pos = max(first_pos, a.part * group.z);
    pos = min(pos, a.part * group.z + a.part - 1);
#endif
    for (uint i = t; i < D_K; i += 64) query[i] = q[row * D_K + i];
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float top = -INFINITY, total = 0.0f, acc[COLUMNS];
    for (uint j = 0; j < COLUMNS; j++) acc[j] = 0.0f;

#if CHOSEN
    // Blocks of the list of positions; each position has its own page.
    device const uint* list = chosen + (ulong)token * a.n_chosen;
    for (uint block = sg; block * PAGE < a.n_chosen && list[block * PAGE] <= pos; block += 2) {
        const uint p = block * PAGE + lane < a.n_chosen ? list[block * PAGE + lane] : 0xffffffffu;
        const bool is_seen = p >= first_pos && p <= pos;
        const ulong at = is_seen ? (ulong)page_of(pages, c, a.windowed, p / PAGE) * a.n_kv + kv_head : 0;
        device const Key* keys = k_cache + at * page_of_keys(D_K);
        const uint slot = p % PAGE;
#else
    for (uint block = first_pos / PAGE; block <= pos / PAGE; block++) {
        if (block % 2 != sg) continue;
        const ulong at = (ulong)page_of(pages, c, a.windowed, block) * a.n_kv + kv_head;
        device const Key* keys = k_cache + at * page_of_keys(D_K);
        const uint p = block * PAGE + lane, slot = lane;
        const bool is_seen = p >= first_pos && p <= pos;
#endif
        float s = -INFINITY;
        if (is_seen) {
            s = 0.0f;
            device const Key* own = keys + slot;
#if K_TYPE == 2
            device const half* scales = (device const half*)(keys + PAGE * D_K) + slot;
            for (uint b = 0; b < D_K / 32; b++, own += 32 * PAGE) {
                float sum = 0.0f;
                for (uint i = 0; i < 32; i++) sum += query[32 * b + i] * (float(own[i * PAGE]) - 128.0f);
                s += sum * float(scales[b * PAGE]);
            }
#else
#pragma unroll(4)
            for (uint i = 0; i < D_K / 4; i++, own += 4 * PAGE) {
                const float4 x = pieces[i];
                for (uint e = 0; e < 4; e++) s += x[e] * float(own[e * PAGE]);
            }
            for (uint i = D_K / 4 * 4; i < D_K; i++, own += PAGE) s += query[i] * float(*own);
#endif
            s *= a.scale;
            if (a.softcap != 0.0f) s = a.softcap * precise::tanh(s / a.softcap);
        }
        const float now = max(top, simd_max(s));
        // Every block has a position that is seen. Where no score is finite this is NaN, as the formula is.
        const float share = is_seen ? precise::exp(s - now) : 0.0f;
        const float rescale = top == -INFINITY ? 0.0f : precise::exp(top - now);
        total = total * rescale + simd_sum(share);
        top = now;
        for (uint j = 0; j < COLUMNS; j++) acc[j] *= rescale;
        // What was never written may be NaN, and is not read.
#if CHOSEN
        for (uint e = 0; e < PAGE; e++) {
            const uint other_p = simd_shuffle(p, ushort(e)), i = other_p % PAGE;
            if (other_p > pos) break;
            if (other_p < first_pos) continue;
            const ulong at = (ulong)page_of(pages, c, a.windowed, other_p / PAGE) * a.n_kv + kv_head;
            device const Key* keys = k_cache + at * page_of_keys(D_K);
#else
        const uint from = max(first_pos, block * PAGE) - block * PAGE;
        const uint to = min(pos, block * PAGE + PAGE - 1) - block * PAGE;
        for (uint i = from; i <= to; i++) {
            const uint e = i;
#endif
#if !V_IN_K
            device const Value* values = v_cache + at * page_of_values(D_V);
#endif
            const float x = simd_shuffle(share, ushort(e));
            for (uint j = 0; j < COLUMNS; j += FOUR) {
                const uint column = COLUMN(j);
                if (column >= D_V) continue;
#if V_IN_K
                acc[j] += x * key_at(keys, D_K, i, column);
#elif FOUR == 4
                const float4 v = values_at(values, D_V, i, column);
                for (uint e = 0; e < 4; e++) acc[j + e] += x * v[e];
#else
                acc[j] += x * value_at(values, D_V, i, column);
#endif
            }
        }
    }

    if (sg == 1) {
        for (uint j = 0; j < COLUMNS; j++) {
            if (COLUMN(j) < D_V) other[COLUMN(j)] = acc[j];
        }
        if (lane == 0) other[D_V] = top;
        if (lane == 0) other[D_V + 1] = total;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (sg == 1) return;
    const float now = max(top, other[D_V]);
    // A simdgroup without blocks has no share.
    const float mine = total == 0.0f ? 0.0f : precise::exp(top - now);
    const float its = other[D_V + 1] == 0.0f ? 0.0f : precise::exp(other[D_V] - now);
    float sum = total * mine + other[D_V + 1] * its;
#if SPLIT
    device float* to = out + (row * a.n_parts + group.z) * (D_V + 2);
    for (uint j = 0; j < COLUMNS; j++) {
        const uint column = COLUMN(j);
        if (column < D_V) to[column] = acc[j] * mine + other[column] * its;
    }
    if (lane == 0) to[D_V] = now;
    if (lane == 0) to[D_V + 1] = sum;
#else
    float share = 1.0f;
#if SINKS
    const float all = max(now, sinks[head]);
    share = precise::exp(now - all);
    sum = sum * share + precise::exp(sinks[head] - all);
#endif
    for (uint j = 0; j < COLUMNS; j++) {
        const uint column = COLUMN(j);
        if (column < D_V) out[row * D_V + column] = (acc[j] * mine + other[column] * its) * share / sum;
    }
#endif
}
