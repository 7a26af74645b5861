// attention: softmax(q * kT * scale) * v over the paged cache, with windows, sinks and softcap, for any dimensions.
//
// Compiled for one cache and group: -DD_K -DD_V -DV_IN_K (values are the first D_V numbers of the keys) -DHEADS (query
// heads of a block, which share the keys) -DKV_F16.
//
// grid (T * tiles of heads, n_kv, n_splits), block 128: a block takes one token, up to HEADS query heads of one key-value
// head and a share of the sequence's pages, page after page with an online softmax. A page has as many positions as a warp
// has lanes: each lane finds the scores of its position with the heads of its warp, and then every thread sums its own
// numbers of the values for all heads. With several splits each leaves its sums, and attention_merge puts them together.
#include "cuda/kv.h"

#define THREADS 128
#define N_WARPS (THREADS / 32)
// As in `nodes.rs`.
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
    const u32 token = blockIdx.x / n_tiles, tile = blockIdx.x % n_tiles;
    const u32 kv_head = blockIdx.y, split = blockIdx.z;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 first_head = kv_head * group + tile * HEADS;
    const u32 n_heads = min((u32)HEADS, group - tile * HEADS);

    const u32 pos = a.step.positions[token];
    const Chunk c = a.step.chunks[a.step.chunk_of[token]];
    const u32 first_pos = a.window != 0 && pos + 1 > a.window ? pos + 1 - a.window : 0;
    const u32 first_block = first_pos / PAGE, n_blocks = pos / PAGE + 1 - first_block;
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
        const bool is_seen = p >= first_pos && p <= pos;
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
            // A block holds at least one position that is seen. Where no score is finite IEEE makes NaN, as the formula does.
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
        const u32 from = max(first_pos, block * PAGE) - block * PAGE, to = min(pos, block * PAGE + PAGE - 1) - block * PAGE;
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
    float* partial = a.partial + ((u64)token * a.n_head + first_head) * a.n_splits * (D_V + 2);
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

// The splits of a head, merged in their order. grid (T, n_head), block 128.
KERNEL __launch_bounds__(THREADS) attention_merge(const __grid_constant__ Attention a) {
    __shared__ float factors[MAX_SPLITS];
    PDL_LAUNCH();
    PDL_WAIT();
    const u32 lane = threadIdx.x % 32, head = blockIdx.y;
    const u64 row = (u64)blockIdx.x * a.n_head + head;
    const float* splits = a.partial + row * a.n_splits * (D_V + 2);
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
