// attention_tiles: attention for prompts. A threadgroup takes a tile of ROWS rows, which are consecutive tokens of a
// chunk with all heads that share a head of keys, and goes over the pages that any of them sees: keys and values are
// read once for all rows, staged 64 of their numbers at a time as floats, and multiplied on simdgroup matrices.
//
// Of a page's 32 positions each of the four simdgroups scores eight for all rows; of 32 rows it scores 16 for 16 of
// them. Lane p of a simdgroup then takes position p in the softmax of a quarter of the rows; scores in memory become
// shares. Of 64 columns of values each simdgroup owns 16, for all rows, and keeps their sums in matrices. Where a lane
// holds which numbers of a matrix is `row_of_lane` and `column_of_lane`, as MLX relies on.
//
// Positions that no row sees are staged as zeros: what was never written may be NaN. Where values are not finite, which
// a product with a share of zero would spread to rows that do not see them, each row adds up what it sees by itself.
// Compiled for a cache: D_K, D_V, K_TYPE, V_TYPE, V_IN_K (values are the first D_V numbers of the keys); SINKS 0 or 1;
// ROWS: 8, 16 or 32; SPANS as `attention.metal` has it: ends of spans ascend in a chunk.
// grid (ceil(tokens of the longest chunk * heads of a group / ROWS), n_kv, chunks), 128 threads
#include "metal/common.h"
#include "metal/kv.h"
#include "metal/matrix.h"

#define Q_STRIDE (K_UP + 4)
#define K_UP ((D_K + 7) / 8 * 8)
#define V_SLICES ((D_V + 63) / 64)
#define S_STRIDE 36 // of a row of scores, and of a number of 32 keys: banks
#define V_STRIDE 68
#define N_STAGED 2304 // 64 * S_STRIDE, and no less than 32 * V_STRIDE
#define BLOCKS (ROWS / 8)
#define PER_ROW (128 / ROWS) // threads
// What a simdgroup scores of a page, in blocks of eight rows and eight positions: square where there is enough.
#define S_ROWS (ROWS == 32 ? 2 : BLOCKS)
#define S_POSITIONS (ROWS == 32 ? 2 : 1)

// The position of a row's token, and the position after the last that it sees.
#define POS_OF(r) (c.pos + (begin + (r)) / n_shared)
#if SPANS
#define END_OF(r) span_end(span_ends[c.first + (begin + (r)) / n_shared], window, POS_OF(r))
#else
#define END_OF(r) (POS_OF(r) + 1)
#endif

struct AttentionTiles {
    uint n_head;
    uint n_kv;
    uint window; // as first_seen takes it
    uint windowed;
    float scale;
    float softcap; // 0: none
};

// Number i of keys at four positions from p on, of which those of `from..=to` are loaded; the others are zero.
inline float4 keys_between(device const Key* keys, uint i, uint p, uint from, uint to) {
    if (p >= from && p + 3 <= to) return keys_at(keys, D_K, p, i);
    float4 v = float4(0.0f);
    for (uint e = 0; e < 4; e++) {
        if (p + e >= from && p + e <= to) v[e] = key_at(keys, D_K, p + e, i);
    }
    return v;
}

// Numbers first..first + 64 of a page's 32 keys, [64][S_STRIDE]; those behind D_K, and positions outside, are zero.
// Whether all that this thread has staged are finite.
inline bool stage_keys(device const Key* keys, uint first, uint from, uint to, threadgroup float4* staged, uint t) {
    float4 none = float4(0.0f); // stays so
    for (uint i = t / 8; i < 64; i += 16) {
        float4 v = float4(0.0f);
        if (first + i < D_K) v = keys_between(keys, first + i, 4 * (t % 8), from, to);
        staged[i * (S_STRIDE / 4) + t % 8] = v;
        none = fma(v, float4(0.0f), none);
    }
    return none.x + none.y + none.z + none.w == 0.0f;
}

#if !V_IN_K
// Columns first..first + 64 of a page's 32 values, [32][V_STRIDE]; the same of them.
inline bool stage_values(device const Value* values, uint first, uint from, uint to, threadgroup float4* staged,
                         uint t) {
    const uint d = first + 4 * (t % 16);
    const bool is_whole = from == 0 && to == PAGE - 1;
    float4 none = float4(0.0f);
    for (uint p = t / 16; p < PAGE; p += 8) {
        float4 v = float4(0.0f);
        if (is_whole || (p >= from && p <= to)) {
#if D_V % 4 == 0
            if (d < D_V) v = values_at(values, D_V, p, d);
#else
            for (uint i = 0; i < 4; i++) {
                if (d + i < D_V) v[i] = value_at(values, D_V, p, d + i);
            }
#endif
        }
        staged[p * (V_STRIDE / 4) + t % 16] = v;
        none = fma(v, float4(0.0f), none);
    }
    return none.x + none.y + none.z + none.w == 0.0f;
}
#endif

kernel void attention_tiles(device const float* q [[buffer(0)]], device const Key* k_cache [[buffer(1)]],
#if !V_IN_K
                            device const Value* v_cache [[buffer(2)]],
#endif
                            device float* out [[buffer(3)]], constant AttentionTiles& a [[buffer(4)]],
                            device const Chunk* chunks [[buffer(7)]], device const uint* pages [[buffer(8)]],
#if SINKS
                            device const float* sinks [[buffer(9)]],
#endif
#if SPANS
                            device const uint* span_ends [[buffer(10)]],
#endif
                            uint3 group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float4 queries[ROWS * Q_STRIDE / 4];
    threadgroup float* query = (threadgroup float*)queries; // written four numbers at a time
    threadgroup float4 pieces[N_STAGED / 4];
    threadgroup float* staged = (threadgroup float*)pieces; // written four numbers at a time
    threadgroup float scores[ROWS * S_STRIDE];
    threadgroup float factors[ROWS]; // what the sums of a row are multiplied with
    threadgroup uint is_wild[4];     // whether a simdgroup has staged values that are not finite
    device const Chunk& c = chunks[group.z];
    const uint n_shared = a.n_head / a.n_kv, kv_head = group.y, begin = ROWS * group.x;
    if (begin >= c.len * n_shared) return;
    const uint n_rows = min((uint)ROWS, c.len * n_shared - begin), t = 32 * sg + lane;
    // A row of queries is loaded by as many threads as there are for each.
    threadgroup float* own = query + t / PER_ROW * Q_STRIDE;
    const uint row = begin + t / PER_ROW;
    const ulong head = (ulong)(c.first + row / n_shared) * a.n_head + kv_head * n_shared + row % n_shared;
    for (uint d = 4 * (t % PER_ROW); d < K_UP; d += 4 * PER_ROW) {
        float4 v = float4(0.0f);
        if (t / PER_ROW < n_rows) {
#if D_K % 4 == 0
            if (d < D_K) v = *(device const float4*)(q + head * D_K + d);
#else
            for (uint i = 0; i < 4; i++) {
                if (d + i < D_K) v[i] = q[head * D_K + d + i];
            }
#endif
        }
        *(threadgroup float4*)(own + d) = v;
    }
    const float scale = a.scale, softcap = a.softcap;
    const uint window = a.window, first = first_seen(window, POS_OF(0)), last = END_OF(n_rows - 1) - 1;

    // Of rows sg, sg + 4, ...: `ends` is the number of positions that a row sees, 0 behind the last row.
    float top[ROWS / 4], total[ROWS / 4];
    uint ends[ROWS / 4];
#pragma unroll
    for (uint j = 0; j < ROWS / 4; j++) {
        const uint r = 4 * j + sg;
        top[j] = -INFINITY, total[j] = 0.0f;
        ends[j] = r < n_rows ? END_OF(r) : 0;
    }
    simdgroup_float8x8 sums[V_SLICES][BLOCKS][2];
#pragma unroll
    for (uint i = 0; i < V_SLICES; i++) {
#pragma unroll
        for (uint j = 0; j < 2 * BLOCKS; j++) sums[i][j / 2][j % 2] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }

    const uint first_row = ROWS == 32 ? 16 * (sg / 2) : 0, first_position = ROWS == 32 ? 16 * (sg % 2) : 8 * sg;
    for (uint block = first / PAGE; block <= last / PAGE; block++) {
        const ulong at = (ulong)page_of(pages, c, a.windowed, block) * a.n_kv + kv_head;
        device const Key* keys = k_cache + at * page_of_keys(D_K);
        const uint from = max(first, block * PAGE) - block * PAGE;
        const uint to = min(last, block * PAGE + PAGE - 1) - block * PAGE;
        simdgroup_float8x8 s[S_ROWS][S_POSITIONS];
        for (uint j = 0; j < S_ROWS; j++) {
            for (uint h = 0; h < S_POSITIONS; h++) s[j][h] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        }
        for (uint d = 0; d < D_K; d += 64) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
            stage_keys(keys, d, from, to, pieces, t);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint i = 0; i < 64 && d + i < D_K; i += 8) {
                simdgroup_float8x8 k[S_POSITIONS], x;
                for (uint h = 0; h < S_POSITIONS; h++) {
                    simdgroup_load(k[h], staged + i * S_STRIDE + first_position + 8 * h, S_STRIDE);
                }
                for (uint j = 0; j < S_ROWS; j++) {
                    simdgroup_load(x, query + (first_row + 8 * j) * Q_STRIDE + d + i, Q_STRIDE);
                    for (uint h = 0; h < S_POSITIONS; h++) simdgroup_multiply_accumulate(s[j][h], x, k[h], s[j][h]);
                }
            }
        }
        for (uint j = 0; j < S_ROWS; j++) {
            for (uint h = 0; h < S_POSITIONS; h++) {
                simdgroup_store(s[j][h], scores + (first_row + 8 * j) * S_STRIDE + first_position + 8 * h, S_STRIDE);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
        for (uint j = 0; j < ROWS / 4; j++) {
            const uint r = 4 * j + sg, p = block * PAGE + lane;
            const bool is_seen = p < ends[j] && p >= first_seen(window, POS_OF(r));
            float x = scores[r * S_STRIDE + lane] * scale;
            if (softcap != 0.0f) x = softcap * precise::tanh(x / softcap);
            const float now = max(top[j], simd_max(is_seen ? x : -INFINITY));
            // Where no score is finite this is NaN, as the formula is.
            const float share = is_seen ? precise::exp(x - now) : 0.0f;
            const float factor = top[j] == -INFINITY ? 0.0f : precise::exp(top[j] - now);
            total[j] = total[j] * factor + simd_sum(share);
            top[j] = now;
            scores[r * S_STRIDE + lane] = share;
            if (lane == 0) factors[r] = factor;
        }
        // Unrolled, so that sums stay in registers.
#pragma unroll
        for (uint i = 0; i < V_SLICES; i++) {
            if (i > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
#if V_IN_K
            const bool is_finite = stage_keys(keys, 64 * i, from, to, pieces, t);
#else
            const bool is_finite = stage_values(v_cache + at * page_of_values(D_V), 64 * i, from, to, pieces, t);
#endif
            const bool is_tame = simd_all(is_finite);
            if (lane == 0) is_wild[sg] = is_tame ? 0 : 1;
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint j = 0; j < BLOCKS; j++) {
                const float by = factors[8 * j + row_of_lane(lane)];
                for (uint h = 0; h < 2; h++) sums[i][j][h].thread_elements() *= by;
            }
            if ((is_wild[0] | is_wild[1] | is_wild[2] | is_wild[3]) != 0) {
#pragma unroll
                for (uint j = 0; j < 2 * BLOCKS; j++) {
                    const uint r = 8 * (j / 2) + row_of_lane(lane);
                    const uint column = 16 * sg + 8 * (j % 2) + column_of_lane(lane);
                    float2 y = sums[i][j / 2][j % 2].thread_elements();
                    for (uint slot = 0; slot < PAGE; slot++) {
                        const uint p = block * PAGE + slot;
                        if (r >= n_rows || p >= END_OF(r) || p < first_seen(window, POS_OF(r))) continue;
                        const float share = scores[r * S_STRIDE + slot];
#if V_IN_K
                        y.x += share * staged[column * S_STRIDE + slot];
                        y.y += share * staged[(column + 1) * S_STRIDE + slot];
#else
                        y.x += share * staged[slot * V_STRIDE + column];
                        y.y += share * staged[slot * V_STRIDE + column + 1];
#endif
                    }
                    sums[i][j / 2][j % 2].thread_elements() = y;
                }
                continue;
            }
            for (uint p = 0; p < PAGE; p += 8) {
                simdgroup_float8x8 v[2], x;
                for (uint h = 0; h < 2; h++) {
#if V_IN_K
                    threadgroup const float* columns = staged + (16 * sg + 8 * h) * S_STRIDE + p;
                    simdgroup_load(v[h], columns, S_STRIDE, ulong2(0), true);
#else
                    simdgroup_load(v[h], staged + p * V_STRIDE + 16 * sg + 8 * h, V_STRIDE);
#endif
                }
                for (uint j = 0; j < BLOCKS; j++) {
                    simdgroup_load(x, scores + 8 * j * S_STRIDE + p, S_STRIDE);
                    for (uint h = 0; h < 2; h++) {
                        simdgroup_multiply_accumulate(sums[i][j][h], x, v[h], sums[i][j][h]);
                    }
                }
            }
        }
        // The next page's scores take the place of these shares, behind a barrier of its keys.
    }

    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint j = 0; j < ROWS / 4; j++) {
        const uint r = 4 * j + sg;
        if (r >= n_rows) continue;
#if SINKS
        const float sink = sinks[kv_head * n_shared + (begin + r) % n_shared], now = max(top[j], sink);
        const float mine = precise::exp(top[j] - now);
        if (lane == 0) factors[r] = mine / (total[j] * mine + precise::exp(sink - now));
#else
        if (lane == 0) factors[r] = 1.0f / total[j];
#endif
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (uint j = 0; j < BLOCKS; j++) {
        const uint r = 8 * j + row_of_lane(lane), row = begin + r;
        if (r >= n_rows) continue;
        const ulong head = (ulong)(c.first + row / n_shared) * a.n_head + kv_head * n_shared + row % n_shared;
#pragma unroll
        for (uint i = 0; i < V_SLICES; i++) {
            for (uint h = 0; h < 2; h++) {
                const float2 y = sums[i][j][h].thread_elements() * factors[r];
                const uint column = 64 * i + 16 * sg + 8 * h + column_of_lane(lane);
                if (column < D_V) out[head * D_V + column] = y.x;
                if (column + 1 < D_V) out[head * D_V + column + 1] = y.y;
            }
        }
    }
}
