// attention_chosen: softmax(q * kT * scale) * v over the positions of the paged cache that `choose` has listed, in
// their order. What `attention.cu` says of -DD_K -DD_V -DV_IN_K -DHEADS -DKV_F16 and of partial sums, which
// attention_merge puts together, holds here.
#include "cuda/async.h"
#include "cuda/kv.h"
#include "cuda/mma.h"

#define THREADS 128
#define N_WARPS (THREADS / 32)
// Values a thread sums, for each head.
#define COLUMNS ((D_V + THREADS - 1) / THREADS)
// Heads whose scores a warp finds.
#define EACH ((HEADS + N_WARPS - 1) / N_WARPS)

// Positions are taken PAGE at a time, whatever pages have them: the share of a split, of `n` listed ones.
struct Share {
    u32 n, begin, end;
};
__device__ __forceinline__ Share share_of(const AttentionChosen& a, u32 token, u32 split) {
    const u32 n = min(a.op.step.positions[token] + 1, a.n), n_blocks = (n + PAGE - 1) / PAGE;
    const u32 each = (n_blocks + a.op.n_splits - 1) / a.op.n_splits;
    return {n, min(split * each, n_blocks), min((split + 1) * each, n_blocks)};
}

// The place of a lane's position of a block in the cache, in rows of one key-value head of all pages.
__device__ __forceinline__ u64 row_of(const AttentionChosen& a, const Chunk& c, u32 token, u32 kv_head, u32 at,
                                      bool is_there) {
    if (!is_there) return 0;
    const u32 p = a.chosen[(u64)token * a.n + at];
    return ((u64)page_of(a.op.step, c, 0, p / PAGE) * a.op.n_kv + kv_head) * PAGE + p % PAGE;
}

// grid (T * tiles of heads, n_kv, n_splits), block THREADS: for any dimensions. A lane finds the scores of its position
// with the heads of its warp, and then every thread sums its own numbers of the values for all heads.
KERNEL __launch_bounds__(THREADS) attention_chosen(const __grid_constant__ AttentionChosen a) {
    __shared__ __align__(16) float q[HEADS][D_K];
    __shared__ float share[HEADS][PAGE];
    __shared__ float rescale[HEADS], top[HEADS], total[HEADS];
    __shared__ u64 rows[PAGE];
    PDL_LAUNCH();
    PDL_WAIT();

    const Attention& op = a.op;
    const u32 group = op.n_head / op.n_kv, n_tiles = (group + HEADS - 1) / HEADS;
    const u32 token = blockIdx.x / n_tiles, tile = blockIdx.x % n_tiles, kv_head = blockIdx.y, split = blockIdx.z;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 first_head = kv_head * group + tile * HEADS, n_heads = min((u32)HEADS, group - tile * HEADS);
    const Chunk c = op.step.chunks[op.step.chunk_of[token]];
    const Share mine = share_of(a, token, split);

    const float* q_row = op.q + ((u64)token * op.n_head + first_head) * D_K;
    for (u32 i = threadIdx.x; i < HEADS * D_K; i += THREADS) q[i / D_K][i % D_K] = i / D_K < n_heads ? q_row[i] : 0.0f;
    // The same in all lanes of a warp.
    float its_top[EACH], its_total[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        its_top[e] = -INF;
        its_total[e] = 0.0f;
    }
    float acc[HEADS][COLUMNS] = {};
    __syncthreads();

    for (u32 block = mine.begin; block < mine.end; block++) {
        const u32 n_there = min(mine.n - block * PAGE, (u32)PAGE);
        const bool is_there = lane < n_there;
        const u64 row = row_of(a, c, token, kv_head, block * PAGE + lane, is_there);
        if (warp == 0) rows[lane] = row;
        const Kv* key = (const Kv*)op.k_cache + row * D_K;
        float sum[EACH] = {};
        if (is_there && warp < HEADS) {
#pragma unroll 8
            for (u32 i = 0; i < D_K; i++) {
                const float k = kv_load(key[i]);
#pragma unroll
                for (int e = 0; e < EACH; e++) sum[e] += k * q[min(warp + e * N_WARPS, (u32)HEADS - 1)][i];
            }
        }
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const u32 h = warp + e * N_WARPS;
            if (h >= HEADS) break; // the same for the whole warp
            float s = -INF;
            if (is_there) {
                s = sum[e] * op.scale;
                if (op.softcap != 0.0f) s = op.softcap * tanhf(s / op.softcap);
            }
            const float old = its_top[e], now = fmaxf(old, warp_max(s));
            const float x = is_there ? expf(s - now) : 0.0f;
            const float factor = old == -INF ? 0.0f : expf(old - now);
            its_total[e] = its_total[e] * factor + warp_sum(x);
            its_top[e] = now;
            share[h][lane] = x;
            if (lane == 0) rescale[h] = factor;
        }
        __syncthreads();
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) acc[h][j] *= rescale[h];
        }
        const Kv* values = (const Kv*)(V_IN_K ? op.k_cache : op.v_cache);
#pragma unroll 8
        for (u32 i = 0; i < n_there; i++) {
            const Kv* value = values + rows[i] * (V_IN_K ? D_K : D_V);
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                const u32 column = j * THREADS + threadIdx.x;
                const float v = column < D_V ? kv_load(value[column]) : 0.0f;
#pragma unroll
                for (int h = 0; h < HEADS; h++) acc[h][j] += share[h][i] * v;
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

#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        if (h >= n_heads) continue;
        const u64 row = (u64)token * op.n_head + first_head + h;
        float* out = op.out + row * D_V;
        float by = 1.0f;
        if (op.n_splits == 1) {
            float sum = total[h], factor = 1.0f;
            if (op.sinks) {
                const float sink = op.sinks[first_head + h], now = fmaxf(top[h], sink);
                factor = expf(top[h] - now);
                sum = sum * factor + expf(sink - now);
            }
            by = factor / sum;
        } else {
            out = op.partial + (row * op.n_splits + split) * (D_V + 2);
            if (threadIdx.x == 0) {
                out[D_V] = top[h];
                out[D_V + 1] = total[h];
            }
        }
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const u32 column = j * THREADS + threadIdx.x;
            if (column < D_V) out[column] = acc[h][j] * by;
        }
    }
}

// attention_chosen_tile: the same over latents, on tensor cores. grid (T * tiles of ROWS heads, 1, n_splits), block
// TILE_THREADS: four warps have 16 heads each; where values are wide, four more find the same scores and sum the other
// half of the values. Rows of the cache are gathered into shared memory while those before are multiplied; queries are
// scaled to at most 1 and rounded to f16, as shares are; sums are f32. Dynamic shared memory: `latent_tile` of
// `crates/gpu/src/cuda/chosen.rs`.
#if KV_F16 && V_IN_K && D_K % 32 == 0 && D_V % 32 == 0 && D_K <= 576 && D_V <= 512
#define ROWS 64
// Warps that share rows, and the values that each of them sums.
#define HALVES (D_V > 256 ? 2 : 1)
#define TILE_THREADS (128 * HALVES)
#define TILE_V (D_V / HALVES)
// A stride that spreads the eight rows of a matrix over all banks.
#define STRIDE (D_K + 8)

extern __shared__ uint4 shared[];

KERNEL __launch_bounds__(TILE_THREADS, 1) attention_chosen_tile(const __grid_constant__ AttentionChosen a) {
    u16* const keys = (u16*)shared;
    u16* const queries = keys + 2 * PAGE * STRIDE;
    PDL_LAUNCH();
    PDL_WAIT();

    const Attention& op = a.op;
    const u32 n_tiles = (op.n_head + ROWS - 1) / ROWS, split = blockIdx.z;
    const u32 token = blockIdx.x / n_tiles, first_head = blockIdx.x % n_tiles * ROWS;
    const u32 heads = min(op.n_head - first_head, (u32)ROWS);
    const u32 warp = threadIdx.x / 32 % 4, half = threadIdx.x / 128, lane = threadIdx.x % 32;
    const Chunk c = op.step.chunks[op.step.chunk_of[token]];
    const Share mine = share_of(a, token, split);

    // The row of a lane's position; a warp's rows of a block.
    const auto find = [&](u32 block) {
        const u32 at = block * PAGE + lane;
        return (u32)row_of(a, c, token, 0, at, block < mine.end && at < mine.n);
    };
    const auto fetch = [&](u32 block, u32 row) {
        u16* to = keys + block % 2 * PAGE * STRIDE;
#pragma unroll
        for (u32 i = threadIdx.x / 32; i < PAGE; i += TILE_THREADS / 32) {
            const u16* from = (const u16*)op.k_cache + (u64)__shfl_sync(FULL_MASK, row, i) * D_K;
            const bool is_there = block * PAGE + i < mine.n;
#pragma unroll
            for (u32 column = 8 * lane; column < D_K; column += 256) {
                copy_async_if(to + i * STRIDE + column, from + column, is_there);
            }
        }
        copy_async_commit();
    };
    u32 row = find(mine.begin);
    if (mine.begin < mine.end) fetch(mine.begin, row);

    // Queries of this thread's two heads, g and g + 8 of its warp, divided by their largest number: f16 holds them.
    float unit[2] = {0.0f, 0.0f};
    bool is_head[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 head = warp * 16 + lane / 4 + 8 * i;
        is_head[i] = head < heads;
        const float* from = op.q + ((u64)token * op.n_head + first_head + head) * D_K + lane % 4 * 2;
        const auto pair = [&](int j) { return is_head[i] ? *(const float2*)(from + 8 * j) : float2{0.0f, 0.0f}; };
#pragma unroll 12
        for (int j = 0; j < D_K / 8; j++) {
            const float2 x = pair(j);
            unit[i] = fmaxf(unit[i], fmaxf(fabsf(x.x), fabsf(x.y)));
        }
        unit[i] = fmaxf(unit[i], __shfl_xor_sync(FULL_MASK, unit[i], 1));
        unit[i] = fmaxf(unit[i], __shfl_xor_sync(FULL_MASK, unit[i], 2));
        const float inverse = unit[i] > 0.0f ? 1.0f / unit[i] : 0.0f;
        u16* to = queries + head * STRIDE + lane % 4 * 2;
        if (half == 0) {
#pragma unroll 12
            for (int j = 0; j < D_K / 8; j++) {
                const float2 x = pair(j);
                *(u32*)(to + 8 * j) = f16_pair(x.x * inverse, x.y * inverse);
            }
        }
    }
    constexpr float LOG2_E = 1.4426950408889634f;
    // Scores are powers of two.
    const float scale[2] = {unit[0] * op.scale, unit[1] * op.scale};
    float acc[TILE_V / 8][4] = {}, top[2] = {-INF, -INF}, total[2] = {0.0f, 0.0f};

    for (u32 block = mine.begin; block < mine.end; block++) {
        row = find(block + 1);
        copy_async_wait<0>();
        __syncthreads();
        if (block + 1 < mine.end) fetch(block + 1, row);
        // Heads that are not there have no products.
        if (warp * 16 >= heads) continue;

        const u16* rows = keys + block % 2 * PAGE * STRIDE;
        const u16* k_row = rows + lane % 8 * STRIDE + lane / 8 * 8;
        const u16* q_row = queries + (warp * 16 + lane % 16) * STRIDE + lane / 16 * 8;
        float s[PAGE / 8][4] = {};
#pragma unroll 4
        for (int kk = 0; kk < D_K / 32; kk++) {
            u32 x[2][4];
            load_matrices(x[0], q_row + 32 * kk);
            load_matrices(x[1], q_row + 32 * kk + 16);
#pragma unroll
            for (int n = 0; n < PAGE / 8; n++) {
                u32 b[4];
                load_matrices(b, k_row + 8 * n * STRIDE + 32 * kk);
                mma_f16(s[n], x[0][0], x[0][1], x[0][2], x[0][3], b[0], b[1]);
                mma_f16(s[n], x[1][0], x[1][1], x[1][2], x[1][3], b[2], b[3]);
            }
        }
        const u32 n_there = mine.n - block * PAGE;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float now = top[i];
#pragma unroll
            for (int n = 0; n < PAGE / 8; n++) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float x = s[n][2 * i + j] * scale[i];
                    if (op.softcap != 0.0f) x = op.softcap * tanhf(x / op.softcap);
                    x *= LOG2_E;
                    if (8 * n + lane % 4 * 2 + j >= n_there) x = -INF;
                    s[n][2 * i + j] = x;
                    now = fmaxf(now, x);
                }
            }
            now = fmaxf(now, __shfl_xor_sync(FULL_MASK, now, 1));
            now = fmaxf(now, __shfl_xor_sync(FULL_MASK, now, 2));
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
#pragma unroll
        for (int kk = 0; kk < PAGE / 16; kk++) {
            const float(&low)[4] = s[2 * kk], (&high)[4] = s[2 * kk + 1];
            const u32 p[4] = {f16_pair(low[0], low[1]), f16_pair(low[2], low[3]), f16_pair(high[0], high[1]),
                              f16_pair(high[2], high[3])};
            const u16* v_row = rows + (16 * kk + lane / 8 % 2 * 8 + lane % 8) * STRIDE + lane / 16 * 8 + half * TILE_V;
#pragma unroll
            for (int n = 0; n < TILE_V / 16; n++) {
                u32 b[4];
                load_transposed(b, v_row + 16 * n);
                mma_f16(acc[2 * n], p[0], p[1], p[2], p[3], b[0], b[1]);
                mma_f16(acc[2 * n + 1], p[0], p[1], p[2], p[3], b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        total[i] += __shfl_xor_sync(FULL_MASK, total[i], 1);
        total[i] += __shfl_xor_sync(FULL_MASK, total[i], 2);
        if (!is_head[i]) continue;
        const u32 head = first_head + warp * 16 + lane / 4 + 8 * i;
        const u64 at = (u64)token * op.n_head + head;
        float* out = op.out + at * D_V;
        float by = 1.0f;
        if (op.n_splits == 1) {
            float sum = total[i], factor = 1.0f;
            if (op.sinks) {
                const float sink = op.sinks[head] * LOG2_E, now = fmaxf(top[i], sink);
                factor = exp2_near(top[i] - now);
                sum = sum * factor + exp2_near(sink - now);
            }
            by = factor / sum;
        } else {
            out = op.partial + (at * op.n_splits + split) * (D_V + 2);
            if (half == 0 && lane % 4 == 0) {
                out[D_V] = top[i] / LOG2_E;
                out[D_V + 1] = total[i];
            }
        }
        out += half * TILE_V + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < TILE_V / 8; n++) {
            *(float2*)(out + 8 * n) = float2{acc[n][2 * i] * by, acc[n][2 * i + 1] * by};
        }
    }
}
#endif
