// attention: softmax(q * kT * scale) * v over the paged cache, with windows, sinks and softcap, for any dimensions.
//
// Compiled for one cache and group: -DD_K -DD_V -DV_IN_K (values are the first D_V numbers of the keys) -DHEADS (query
// heads of a block, which share the keys) -DKV_F16.
//
// grid (T * tiles of heads, n_kv, n_splits), block 128: a block takes one token, up to HEADS query heads of one
// key-value head and a share of the sequence's pages, page after page with an online softmax. A page has as many
// positions as a warp has lanes: each lane finds the scores of its position with the heads of its warp, and then every
// thread sums its own numbers of the values for all heads. With several splits each leaves its sums, and
// attention_merge puts them together.
#include "cuda/async.h"
#include "cuda/kv.h"
#include "cuda/mma.h"

#define THREADS 128
#define N_WARPS (THREADS / 32)
// As in `nodes/attention.rs`.
#define MAX_SPLITS 64
// Values a thread sums, for each head.
#define COLUMNS ((D_V + THREADS - 1) / THREADS)
// Positions whose values a thread asks for at a time.
#define BATCH (COLUMNS == 1 ? 32 : COLUMNS == 2 ? 16 : 8)
// Heads whose scores a warp finds: h = warp, warp + N_WARPS, ...
#define EACH ((HEADS + N_WARPS - 1) / N_WARPS)

// The dot products of a key with the queries of a warp's heads.
__device__ __forceinline__ void scores_of(const Kv* key, const float (*q)[D_K], u32 warp, float (&sum)[EACH]) {
#pragma unroll
    for (int e = 0; e < EACH; e++) sum[e] = 0.0f;
    const auto multiply = [&](const float (&k)[4], u32 i) {
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const float4 x = *(const float4*)(q[min(warp + e * N_WARPS, (u32)HEADS - 1)] + i);
            sum[e] += k[0] * x.x + k[1] * x.y + k[2] * x.z + k[3] * x.w;
        }
    };
#if KV_F16
    if constexpr (D_K % 8 == 0) {
#pragma unroll 16
        for (u32 i = 0; i < D_K; i += 8) {
            const uint4 raw = *(const uint4*)(key + i);
            const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                const float k[4] = {kv_load((u16)(words[j] & 0xffff)), kv_load((u16)(words[j] >> 16)),
                                    kv_load((u16)(words[j + 1] & 0xffff)), kv_load((u16)(words[j + 1] >> 16))};
                multiply(k, i + 2 * j);
            }
        }
    }
    constexpr bool is_done = D_K % 8 == 0;
#else
    if constexpr (D_K % 4 == 0) {
#pragma unroll 16
        for (u32 i = 0; i < D_K; i += 4) {
            const float4 raw = *(const float4*)(key + i);
            const float k[4] = {raw.x, raw.y, raw.z, raw.w};
            multiply(k, i);
        }
    }
    constexpr bool is_done = D_K % 4 == 0;
#endif
    if constexpr (!is_done) {
        for (u32 i = 0; i < D_K; i++) {
            const float k = kv_load(key[i]);
#pragma unroll
            for (int e = 0; e < EACH; e++) sum[e] += k * q[min(warp + e * N_WARPS, (u32)HEADS - 1)][i];
        }
    }
}

KERNEL __launch_bounds__(THREADS) attention(const __grid_constant__ Attention a) {
    __shared__ __align__(16) float q[HEADS][D_K];
    __shared__ float share[HEADS][PAGE];
    __shared__ float rescale[HEADS], top[HEADS], total[HEADS];
    PDL_LAUNCH();
    PDL_WAIT();

    const u32 group = a.n_head / a.n_kv, n_tiles = (group + HEADS - 1) / HEADS;
    const u32 place = blockIdx.x / n_tiles, tile = blockIdx.x % n_tiles;
    const u32 token = a.singles ? a.step.chunks[place].single : place;
    const u32 kv_head = blockIdx.y, split = blockIdx.z;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 first_head = kv_head * group + tile * HEADS;
    const u32 n_heads = min((u32)HEADS, group - tile * HEADS);

    const u32 pos = a.step.positions[token];
    const Chunk c = a.step.chunks[a.step.chunk_of[token]];
    const u32 first_pos = first_seen(a.window, pos);
    const u32 last = last_seen(a, token, pos);
    const u32 first_block = first_pos / PAGE, n_blocks = last / PAGE + 1 - first_block;
    // The splits' shares of the blocks, in order; late ones may be empty.
    const u32 each = (n_blocks + a.n_splits - 1) / a.n_splits;
    const u32 begin = first_block + min(split * each, n_blocks), end = first_block + min((split + 1) * each, n_blocks);

    const float* q_row = a.q + ((u64)token * a.n_head + first_head) * D_K;
    for (u32 i = threadIdx.x; i < HEADS * D_K; i += THREADS) q[i / D_K][i % D_K] = i / D_K < n_heads ? q_row[i] : 0.0f;
    // The same in all lanes of a warp.
    float its_top[EACH], its_total[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        its_top[e] = -INF;
        its_total[e] = 0.0f;
    }
    float acc[HEADS][COLUMNS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) acc[h][j] = 0.0f;
    }
    __syncthreads();

    for (u32 block = begin; block < end; block++) {
        const u64 page = page_of(a.step, c, a.windowed, block);
        const Kv* keys = (const Kv*)a.k_cache + (page * a.n_kv + kv_head) * PAGE * D_K;
        const u32 p = block * PAGE + lane;
        const bool is_seen = p >= first_pos && p <= last;
        float sum[EACH];
        if (is_seen && warp < HEADS) scores_of(keys + lane * D_K, q, warp, sum);
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const u32 h = warp + e * N_WARPS;
            if (h >= HEADS) break; // the same for the whole warp
            float s = -INF;
            if (is_seen) {
                s = sum[e] * a.scale;
                if (a.softcap != 0.0f) s = a.softcap * tanhf(s / a.softcap);
            }
            const float old = its_top[e], now = fmaxf(old, warp_max(s));
            // A block holds at least one position that is seen. Where no score is finite IEEE makes NaN, as the formula
            // does.
            const float x = !is_seen ? 0.0f : expf(s - now);
            const float factor = old == -INF ? 0.0f : expf(old - now);
            its_total[e] = its_total[e] * factor + warp_sum(x);
            its_top[e] = now;
            share[h][lane] = x;
            if (lane == 0) rescale[h] = factor;
        }
        __syncthreads();
#if V_IN_K
        const Kv* values = keys;
        constexpr u32 stride = D_K;
#else
        const Kv* values = (const Kv*)a.v_cache + (page * a.n_kv + kv_head) * PAGE * D_V;
        constexpr u32 stride = D_V;
#endif
        const u32 from = max(first_pos, block * PAGE) - block * PAGE, to = min(last, block * PAGE + PAGE - 1) - block * PAGE;
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) acc[h][j] *= rescale[h];
        }
        for (u32 first = from / BATCH * BATCH; first <= to; first += BATCH) {
            Kv v[BATCH][COLUMNS];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
#pragma unroll
                for (int j = 0; j < COLUMNS; j++) {
                    const u32 column = j * THREADS + threadIdx.x;
                    // What was never written may be NaN, and is not read.
                    const bool is_there = first + i >= from && first + i <= to && column < D_V;
                    v[i][j] = is_there ? values[(first + i) * stride + column] : Kv(0);
                }
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    const float x = share[h][first + i];
#pragma unroll
                    for (int j = 0; j < COLUMNS; j++) acc[h][j] += x * kv_load(v[i][j]);
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const u32 h = warp + e * N_WARPS;
        if (h < HEADS && lane == 0) {
            top[h] = its_top[e];
            total[h] = its_total[e];
        }
    }
    __syncthreads();

    if (a.n_splits == 1) {
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            if (h >= n_heads) continue;
            float sum = total[h], factor = 1.0f;
            if (a.sinks) {
                const float sink = a.sinks[first_head + h], now = fmaxf(top[h], sink);
                factor = top[h] == -INF ? 0.0f : expf(top[h] - now);
                sum = sum * factor + expf(sink - now);
            }
            float* out = a.out + ((u64)token * a.n_head + first_head + h) * D_V;
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                const u32 column = j * THREADS + threadIdx.x;
                if (column < D_V) out[column] = acc[h][j] * factor / sum;
            }
        }
        return;
    }

    // [T, n_head, n_splits, D_V + 2]: the sums, the top score and the sum of the shares.
    float* partial = a.partial + ((u64)place * a.n_head + first_head) * a.n_splits * (D_V + 2);
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        if (h >= n_heads) continue;
        float* mine = partial + ((u64)h * a.n_splits + split) * (D_V + 2);
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const u32 column = j * THREADS + threadIdx.x;
            if (column < D_V) mine[column] = acc[h][j];
        }
        if (threadIdx.x == 0) {
            mine[D_V] = top[h];
            mine[D_V + 1] = total[h];
        }
    }
}

// attention_tile: the same for prompts, on tensor cores. grid (n_kv, tiles, tiles of heads), block TILE_THREADS: a
// block takes ROWS rows, up to ROWS query heads of one key-value head for consecutive tokens of one chunk, and walks
// the pages that they attend to. The last tiles of a step see the most pages and come first. Four warps have 16 rows
// each; where values are wide, four more find the same scores and sum the other half of the values. Keys and values of
// a page are staged in shared memory while the page before is multiplied; queries are scaled to at most 1 and rounded
// to f16, as shares are; sums are f32. Pages run in order: same input, same bits. Dynamic shared memory:
// `attention_tile` of `nodes/attention.rs`.
#define TILED(d, most) ((d) % 32 == 0 ? (d) <= (most) : (d) % 8 == 0 && (d) <= 128)
#if KV_F16 && TILED(D_K, 576) && TILED(D_V, 512) && (!V_IN_K || D_K % 32 == 0)
#define ROWS 64
// Products of 16 numbers of keys and queries; the last one's half may be zeros.
#define K_STEPS ((D_K + 15) / 16)
// Warps that share rows, and the values that each of them sums.
#define HALVES (D_V > 256 ? 2 : 1)
#define TILE_THREADS (128 * HALVES)
#define TILE_V (D_V / HALVES)
// Strides that spread the eight rows of a matrix over all banks.
#define K_STRIDE (16 * K_STEPS + 8)
#define V_STRIDE (V_IN_K ? K_STRIDE : (D_V + 15) / 16 * 16 + 8)
// Queries of wide heads lie in shared memory.
#define Q_SHARED (D_K > 128)

extern __shared__ uint4 tile_memory[];

__device__ __forceinline__ void mma_rows(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    mma_f16(c, a[0], a[1], a[2], a[3], b0, b1);
}

// Copies a page's positions below `n_there` and clears the others, which may hold anything.
template <int D, int STRIDE>
__device__ __forceinline__ void stage(u16* to, const u16* from, u32 n_there) {
#pragma unroll 8
    for (u32 i = threadIdx.x; i < PAGE * D / 8; i += TILE_THREADS) {
        const u32 row = i / (D / 8), column = i % (D / 8) * 8;
        copy_async_if(to + row * STRIDE + column, from + row * D + column, row < n_there);
    }
}

KERNEL __launch_bounds__(TILE_THREADS, D_V <= 128 ? 3 : 1) attention_tile(const __grid_constant__ Attention a) {
    u16* const keys = (u16*)tile_memory;
    u16* const values = keys + 2 * PAGE * K_STRIDE;
    u16* const queries = V_IN_K ? values : values + 2 * PAGE * V_STRIDE;
    PDL_LAUNCH();
    PDL_WAIT();

    // Heads of a tile and its tokens.
    const u32 group = a.n_head / a.n_kv, first_head = blockIdx.z * ROWS, heads = min(group - first_head, (u32)ROWS);
    const u32 per_tile = group < ROWS ? ROWS / group : 1;
    const u32 kv_head = blockIdx.x, warp = threadIdx.x / 32 % 4, half = threadIdx.x / 128, lane = threadIdx.x % 32;
    u32 tile = gridDim.y - 1 - blockIdx.y, chunk = 0;
    if (!find_tile(a, per_tile, tile, chunk)) return;
    const Chunk c = a.step.chunks[chunk];
    const u32 begin = tile * per_tile, n_tokens = min(per_tile, c.len - begin); // of the chunk
    const u32 first_pos = c.pos + begin, last_pos = first_pos + n_tokens - 1;
    const u32 seen_from = first_seen(a.window, first_pos);
    const u32 seen_by_last = first_seen(a.window, last_pos);
    // What the first token sees at the end, and what the last one does.
    const u32 first_last = last_seen(a, c.first + begin, first_pos);
    const u32 last_last = last_seen(a, c.first + begin + n_tokens - 1, last_pos);
    const u32 first_block = seen_from / PAGE, end_block = last_last / PAGE + 1;

    const auto fetch = [&](u32 block, u32 slot) {
        const u64 page = (u64)page_of(a.step, c, a.windowed, block) * a.n_kv + kv_head;
        const u32 n_there = min((u32)PAGE, c.pos + c.len - block * PAGE);
        stage<D_K, K_STRIDE>(keys + slot * PAGE * K_STRIDE, (const u16*)a.k_cache + page * PAGE * D_K, n_there);
        if (!V_IN_K) {
            stage<D_V, V_STRIDE>(values + slot * PAGE * V_STRIDE, (const u16*)a.v_cache + page * PAGE * D_V, n_there);
        }
        copy_async_commit();
    };
    fetch(first_block, 0);
    if (D_K % 16 != 0) {
        for (u32 i = threadIdx.x; i < 2 * PAGE; i += TILE_THREADS) {
            *(uint4*)(keys + i * K_STRIDE + D_K) = make_uint4(0, 0, 0, 0);
        }
    }

    // This thread's two rows, g and g + 8 of its warp.
    u32 last[2], from[2], head[2];
    bool is_row[2];
    u64 at[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 row = warp * 16 + lane / 4 + 8 * i, token = row / heads;
        is_row[i] = row < per_tile * heads && token < n_tokens;
        const u32 pos = first_pos + token;
        last[i] = is_row[i] ? last_seen(a, c.first + begin + token, pos) : pos;
        from[i] = first_seen(a.window, pos);
        head[i] = kv_head * group + first_head + row % heads;
        at[i] = (u64)(c.first + begin + token) * a.n_head + head[i];
    }
    // Queries, divided by their largest number so that f16 holds them, whatever they are.
    u32 q[Q_SHARED ? 1 : K_STEPS][4];
    if (!Q_SHARED && D_K % 16 != 0) q[K_STEPS - 1][2] = q[K_STEPS - 1][3] = 0;
    float unit[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float* row = a.q + at[i] * D_K + lane % 4 * 2;
        const auto pair = [&](int j) { return is_row[i] ? *(const float2*)(row + 8 * j) : float2{0.0f, 0.0f}; };
#pragma unroll 16
        for (int j = 0; j < D_K / 8; j++) {
            const float2 x = pair(j);
            unit[i] = fmaxf(unit[i], fmaxf(fabsf(x.x), fabsf(x.y)));
        }
        unit[i] = fmaxf(unit[i], __shfl_xor_sync(FULL_MASK, unit[i], 1));
        unit[i] = fmaxf(unit[i], __shfl_xor_sync(FULL_MASK, unit[i], 2));
        const float inverse = unit[i] > 0.0f ? 1.0f / unit[i] : 0.0f;
        u16* to = queries + (warp * 16 + lane / 4 + 8 * i) * K_STRIDE + lane % 4 * 2;
#if Q_SHARED
        if (half == 0) {
#pragma unroll 16
            for (int j = 0; j < D_K / 8; j++) {
                const float2 x = pair(j);
                *(u32*)(to + 8 * j) = f16_pair(x.x * inverse, x.y * inverse);
            }
        }
#else
#pragma unroll
        for (int j = 0; j < D_K / 8; j++) {
            const float2 x = pair(j);
            q[j / 2][j % 2 * 2 + i] = f16_pair(x.x * inverse, x.y * inverse);
        }
#endif
    }
    constexpr float LOG2_E = 1.4426950408889634f;
    // Scores are powers of two.
    const float scale[2] = {unit[0] * a.scale, unit[1] * a.scale};
    float acc[TILE_V / 8][4] = {}, top[2] = {-INF, -INF}, total[2] = {0.0f, 0.0f};

    for (u32 block = first_block; block < end_block; block++) {
        const u32 slot = (block - first_block) % 2;
        copy_async_wait<0>();
        __syncthreads();
        if (block + 1 < end_block) fetch(block + 1, slot ^ 1);

        float s[PAGE / 8][4] = {};
        const u16* k_row = keys + slot * PAGE * K_STRIDE + lane % 8 * K_STRIDE + lane / 8 * 8;
#if Q_SHARED
        const u16* q_row = queries + (warp * 16 + lane % 16) * K_STRIDE + lane / 16 * 8;
#pragma unroll 4
        for (int kk = 0; kk < D_K / 32; kk++) {
            u32 x[2][4];
            load_matrices(x[0], q_row + 32 * kk);
            load_matrices(x[1], q_row + 32 * kk + 16);
#pragma unroll
            for (int n = 0; n < PAGE / 8; n++) {
                u32 b[4];
                load_matrices(b, k_row + 8 * n * K_STRIDE + 32 * kk);
                mma_rows(s[n], x[0], b[0], b[1]);
                mma_rows(s[n], x[1], b[2], b[3]);
            }
        }
#else
#pragma unroll
        for (int n = 0; n < PAGE / 8; n++) {
#pragma unroll
            for (int kk = 0; kk < K_STEPS; kk += 2) {
                u32 b[4];
                load_matrices(b, k_row + 8 * n * K_STRIDE + 16 * kk);
                mma_rows(s[n], q[kk], b[0], b[1]);
                if (kk + 1 < K_STEPS) mma_rows(s[n], q[kk + 1], b[2], b[3]);
            }
        }
#endif
        // Some row may not see all of the page.
        const bool is_edge = block * PAGE + PAGE - 1 > first_last || block * PAGE < seen_by_last;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float now = top[i];
#pragma unroll
            for (int n = 0; n < PAGE / 8; n++) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float x = s[n][2 * i + j] * scale[i];
                    if (a.softcap != 0.0f) x = a.softcap * tanhf(x / a.softcap);
                    x *= LOG2_E;
                    if (is_edge) {
                        const u32 p = block * PAGE + 8 * n + lane % 4 * 2 + j;
                        if (p < from[i] || p > last[i]) x = -INF;
                    }
                    s[n][2 * i + j] = x;
                    now = fmaxf(now, x);
                }
            }
            now = fmaxf(now, __shfl_xor_sync(FULL_MASK, now, 1));
            now = fmaxf(now, __shfl_xor_sync(FULL_MASK, now, 2));
            // Rows that have seen nothing yet stay at zero.
            const float origin = now == -INF ? 0.0f : now, factor = exp2_near(top[i] - origin);
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < PAGE / 8; n++) {
#pragma unroll
                for (int j = 0; j < 2; j++) sum += s[n][2 * i + j] = exp2_near(s[n][2 * i + j] - origin);
            }
            total[i] = total[i] * factor + sum;
            if (__any_sync(FULL_MASK, now != top[i])) {
#pragma unroll
                for (int n = 0; n < TILE_V / 8; n++) {
                    acc[n][2 * i] *= factor;
                    acc[n][2 * i + 1] *= factor;
                }
            }
            top[i] = now;
        }
        const u16* v_rows = V_IN_K ? keys + slot * PAGE * K_STRIDE : values + slot * PAGE * V_STRIDE;
#pragma unroll
        for (int kk = 0; kk < PAGE / 16; kk++) {
            const float(&low)[4] = s[2 * kk], (&high)[4] = s[2 * kk + 1];
            const u32 p[4] = {f16_pair(low[0], low[1]), f16_pair(low[2], low[3]), f16_pair(high[0], high[1]),
                              f16_pair(high[2], high[3])};
            const u32 first = 16 * kk + lane / 8 % 2 * 8 + lane % 8;
            const u16* row = v_rows + first * V_STRIDE + lane / 16 * 8 + half * TILE_V;
#pragma unroll
            for (int n = 0; n < TILE_V / 8; n += 2) {
                u32 b[4];
                load_transposed(b, row + 8 * n);
                mma_rows(acc[n], p, b[0], b[1]);
                if (n + 1 < TILE_V / 8) mma_rows(acc[n + 1], p, b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        total[i] += __shfl_xor_sync(FULL_MASK, total[i], 1);
        total[i] += __shfl_xor_sync(FULL_MASK, total[i], 2);
        if (!is_row[i]) continue;
        float sum = total[i], factor = 1.0f;
        if (a.sinks) {
            const float sink = a.sinks[head[i]] * LOG2_E, now = fmaxf(top[i], sink);
            factor = exp2_near(top[i] - now);
            sum = sum * factor + exp2_near(sink - now);
        }
        float* out = a.out + at[i] * D_V + half * TILE_V + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < TILE_V / 8; n++) {
            *(float2*)(out + 8 * n) = float2{acc[n][2 * i] * factor / sum, acc[n][2 * i + 1] * factor / sum};
        }
    }
}
#endif

// The splits of a head, merged in their order. grid (T, n_head), block 128.
KERNEL __launch_bounds__(THREADS) attention_merge(const __grid_constant__ Attention a) {
    __shared__ float factors[MAX_SPLITS];
    PDL_LAUNCH();
    PDL_WAIT();
    const u32 lane = threadIdx.x % 32, head = blockIdx.y;
    const u32 token = a.singles ? a.step.chunks[blockIdx.x].single : blockIdx.x;
    const u64 row = (u64)token * a.n_head + head;
    const float* splits = a.partial + ((u64)blockIdx.x * a.n_head + head) * a.n_splits * (D_V + 2);
    const float sink = a.sinks ? a.sinks[head] : -INF;

    // Every warp finds the same factors; the first one leaves them for all.
    float tops[MAX_SPLITS / 32], totals[MAX_SPLITS / 32], best = sink;
#pragma unroll
    for (int j = 0; j < MAX_SPLITS / 32; j++) {
        const u32 s = j * 32 + lane;
        tops[j] = s < a.n_splits ? splits[(u64)s * (D_V + 2) + D_V] : -INF;
        totals[j] = s < a.n_splits ? splits[(u64)s * (D_V + 2) + D_V + 1] : 0.0f;
        best = fmaxf(best, tops[j]);
    }
    best = warp_max(best);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < MAX_SPLITS / 32; j++) {
        // A split without positions adds nothing.
        const float factor = tops[j] == -INF && totals[j] == 0.0f ? 0.0f : expf(tops[j] - best);
        sum += totals[j] * factor;
        if (threadIdx.x < 32) factors[j * 32 + lane] = factor;
    }
    sum = warp_sum(sum) + (a.sinks ? expf(sink - best) : 0.0f);
    __syncthreads();

    for (u32 column = threadIdx.x; column < D_V; column += THREADS) {
        float y = 0.0f;
#pragma unroll 8
        for (u32 s = 0; s < a.n_splits; s++) y += factors[s] * splits[(u64)s * (D_V + 2) + column];
        a.out[row * D_V + column] = y / sum;
    }
}
