// attention_wide: attention of prompts by Hopper's warpgroup products, as FlashAttention-3 orders them (Shah et al.,
// 2024): scores of a block of positions are computed while the values of the block before are summed, and two
// warpgroups take turns, so that one multiplies while the other finds its softmax.
//
// Compiled for one cache, as attention.cu: -DD_K -DD_V -DV_IN_K -DKV_F16 (-DHEADS is not used). Heads of multiples of
// 64 numbers up to 256, in f16.
//
// grid (n_kv, tiles, tiles of heads), block WIDE_THREADS: a block takes ROWS rows, up to ROWS query heads of one
// key-value head for consecutive tokens of one chunk, and walks the pages that they attend to, BLOCK positions at a
// time. The last tiles of a step see the most pages and come first. Warpgroup 0 copies keys and values to a ring of two
// blocks each, swizzled as products read them; warpgroups 1 and 2 have 64 rows each. Queries are scaled to at most 1
// and rounded to f16, as shares are; sums are f32. Blocks run in order: same input, same bits. Dynamic shared memory:
// `attention_wide` of `nodes/attention.rs`.
#include "cuda/kv.h"
#include "cuda/async.h"
#include "cuda/mma.h"
#include "cuda/pack.h"
#include "cuda/wgmma.h"

#if HAS_WGMMA && KV_F16 && !V_IN_K && D_K % 64 == 0 && D_V % 64 == 0 && D_K <= 256 && D_V <= 256
#define WIDE_THREADS 384
#define ROWS 128
// Positions of a step.
#define BLOCK (D_K + D_V <= 256 ? 128 : 64)
#define PAGES (BLOCK / PAGE)
// Bytes of 64 numbers of every row, and of every position.
#define Q_PANEL (ROWS * 128)
#define KV_PANEL (BLOCK * 128)
#define KEYS (D_K / 64 * KV_PANEL)
#define VALUES (D_V / 64 * KV_PANEL)

extern __shared__ uint4 shared[];

// A number known when the kernel is compiled.
template <u32 VALUE>
struct Numbers {
    static constexpr u32 N = VALUE;
};

// c += p * values of 16 positions.
template <int N>
__device__ __forceinline__ void add_values(float* c, const u32 (&p)[4], u32 at) {
    constexpr int FIRST = N >= 128 ? 128 : 64;
    wgmma_values<FIRST>(c, p, wgmma_columns(at, KV_PANEL));
    if constexpr (N > FIRST) add_values<N - FIRST>(c + FIRST / 2, p, at + FIRST / 64 * KV_PANEL);
}

KERNEL __launch_bounds__(WIDE_THREADS, 1) attention_wide(const __grid_constant__ Attention a) {
    // Everything begins at multiples of 1024.
    const u32 base = (address_in_shared(shared) + 1023) / 1024 * 1024, origin = address_in_shared(shared);
    const u32 queries = base, keys = queries + D_K / 64 * Q_PANEL, values = keys + 2 * KEYS;
    // Barriers: keys and values of both places, full and empty.
    const u32 full = values + 2 * VALUES, empty = full + 4 * 8;
    const u32 group_of = threadIdx.x / 128, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < 4; i++) {
            barrier_init(full + 8 * i, 128);
            barrier_init(empty + 8 * i, 8);
        }
        fence_async();
    }
    __syncthreads();
    PDL_LAUNCH();
    PDL_WAIT();

    // Heads of a tile and its tokens.
    const u32 group = a.n_head / a.n_kv, first_head = blockIdx.z * ROWS, heads = min(group - first_head, (u32)ROWS);
    const u32 per_tile = group < ROWS ? ROWS / group : 1, kv_head = blockIdx.x;
    u32 tile = gridDim.y - 1 - blockIdx.y, chunk = 0;
    if (!find_tile(a, per_tile, tile, chunk)) return;
    const Chunk c = a.step.chunks[chunk];
    const u32 begin = tile * per_tile, n_tokens = min(per_tile, c.len - begin); // of the chunk
    const u32 first_pos = c.pos + begin, last_pos = first_pos + n_tokens - 1;
    const u32 seen_from = first_seen(a.window, first_pos), seen_by_last = first_seen(a.window, last_pos);
    const u32 first_page = seen_from / PAGE, last_page = last_pos / PAGE;
    const u32 n_blocks = (last_page - first_page) / PAGES + 1;

    if (group_of == 0) {
        give_registers<40>();
        // Copies D numbers of each position of a block's pages; clears what is past the chunk, which may hold anything.
        const auto copy = [&](const auto* cache, u32 to, u32 block, auto d) {
            constexpr u32 D = decltype(d)::N, PIECES = D / 8;
#pragma unroll
            for (u32 p = 0; p < PAGES; p++) {
                const u32 page = first_page + block * PAGES + p, known = min(page, last_page);
                const u32 end = c.pos + c.len, from = page * PAGE, n_there = end > from ? end - from : 0;
                const u16* rows = (const u16*)cache
                    + ((u64)page_of(a.step, c, a.windowed, known) * a.n_kv + kv_head) * PAGE * D;
#pragma unroll
                for (u32 i = 0; i < PAGE * PIECES / 128; i++) {
                    const u32 row = (threadIdx.x + 128 * i) / PIECES, piece = (threadIdx.x + 128 * i) % PIECES;
                    const u32 at = to + piece / 8 * KV_PANEL + (p * PAGE + row) * 128 + 16 * (piece % 8 ^ row % 8);
                    copy_async_if((u8*)shared + (at - origin), rows + row * D + piece * 8, row < n_there);
                }
            }
            copy_async_commit();
        };
        const auto arrive = [&](u32 item) {
            fence_async();
            barrier_arrive(full + 8 * (item % 4));
        };
        for (u32 block = 0; block < n_blocks; block++) {
            const u32 place = block % 2, parity = block / 2 % 2 ^ 1;
            if (block >= 2) barrier_wait(empty + 8 * (2 * place), parity);
            copy(a.k_cache, keys + place * KEYS, block, Numbers<D_K>());
            if (block > 0) {
                copy_async_wait<2>();
                arrive(2 * block - 2);
            }
            if (block >= 2) barrier_wait(empty + 8 * (2 * place + 1), parity);
            copy(a.v_cache, values + place * VALUES, block, Numbers<D_V>());
            if (block > 0) {
                copy_async_wait<2>();
                arrive(2 * block - 1);
            }
        }
        copy_async_wait<1>();
        arrive(2 * n_blocks - 2);
        copy_async_wait<0>();
        arrive(2 * n_blocks - 1);
        return;
    }
    take_registers<232>();

    // This thread's two rows, g and g + 8 of its warp's.
    const u32 wg = group_of - 1, first_row = wg * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    u32 pos[2], from[2], head[2];
    bool is_row[2];
    u64 at[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 row = first_row + 8 * i, token = row / heads;
        is_row[i] = row < per_tile * heads && token < n_tokens;
        pos[i] = first_pos + token;
        from[i] = first_seen(a.window, pos[i]);
        head[i] = kv_head * group + first_head + row % heads;
        at[i] = (u64)(c.first + begin + token) * a.n_head + head[i];
    }
    constexpr float LOG2_E = 1.4426950408889634f;
    // Queries, divided by their largest number so that f16 holds them, whatever they are. `scale` makes scores of
    // products, and powers of two of them where nothing caps them.
    float scale[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float* row = a.q + at[i] * D_K + lane % 4 * 2;
        float2 x[D_K / 8];
#pragma unroll
        for (int j = 0; j < D_K / 8; j++) x[j] = is_row[i] ? *(const float2*)(row + 8 * j) : float2{0.0f, 0.0f};
        float unit = 0.0f;
#pragma unroll
        for (int j = 0; j < D_K / 8; j++) unit = fmaxf(unit, fmaxf(fabsf(x[j].x), fabsf(x[j].y)));
        unit = fmaxf(unit, __shfl_xor_sync(FULL_MASK, unit, 1));
        unit = fmaxf(unit, __shfl_xor_sync(FULL_MASK, unit, 2));
        if (unit == 0.0f) unit = 1.0f;
        // Scores are not below zero times `scale`.
        const float inverse = copysignf(1.0f / unit, a.scale);
        scale[i] = fmaxf(unit * fabsf(a.scale), 1e-30f) * (a.softcap != 0.0f ? 1.0f : LOG2_E);
        const u32 r = first_row + 8 * i;
#pragma unroll
        for (int j = 0; j < D_K / 8; j++) {
            const u32 to = queries + j / 8 * Q_PANEL + r * 128 + 16 * (j % 8 ^ r % 8) + lane % 4 * 4;
            *(u32*)((u8*)shared + (to - origin)) = f16_pair(x[j].x * inverse, x[j].y * inverse);
        }
    }
    fence_async();
    group_sync(3 + wg, 128);

    float s[BLOCK / 2], acc[D_V / 2], top[2] = {-INF, -INF}, total[2] = {0.0f, 0.0f}, factor[2];
    u32 p[BLOCK / 16][4];
#pragma unroll
    for (int i = 0; i < D_V / 2; i++) acc[i] = 0.0f;
    const auto find_scores = [&](u32 block) {
        const u32 at = keys + block % 2 * KEYS, rows = queries + wg * 64 * 128;
        barrier_wait(full + 8 * (2 * (block % 2)), block / 2 % 2);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < D_K / 16; i++) {
            wgmma_scores<BLOCK>(s, wgmma_matrix(rows + i / 4 * Q_PANEL) + 2 * (i % 4),
                                wgmma_matrix(at + i / 4 * KV_PANEL) + 2 * (i % 4), i > 0);
        }
        wgmma_commit();
    };
    const auto sum_values = [&](u32 block) {
        const u32 at = values + block % 2 * VALUES;
        barrier_wait(full + 8 * (2 * (block % 2) + 1), block / 2 % 2);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BLOCK / 16; i++) add_values<D_V>(acc, p[i], at + i * 16 * 128);
        wgmma_commit();
    };
    const auto leave = [&](u32 block, u32 part) {
        if (lane == 0) barrier_arrive(empty + 8 * (2 * (block % 2) + part));
    };
    // Scores become shares, and `factor` what the sums so far are multiplied with.
    const auto softmax = [&](u32 block) {
        const u32 first = (first_page + block * PAGES) * PAGE;
        // Some row may not see all of the block.
        const bool is_edge = first + BLOCK - 1 > first_pos || first < seen_by_last;
        if (a.softcap != 0.0f) {
            // cap tanh(x / cap) = cap - 2 cap / (e^(2x / cap) + 1), right to a few units of cap's last place.
            const float cap = a.softcap * LOG2_E, twice = 2.0f * LOG2_E / a.softcap;
#pragma unroll
            for (int n = 0; n < BLOCK / 2; n++) {
                const float e = exp2_near(s[n] * (scale[n / 2 % 2] * twice));
                s[n] = fmaf(-2.0f * cap, __fdividef(1.0f, e + 1.0f), cap);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float unit = a.softcap != 0.0f ? 1.0f : scale[i];
            if (is_edge) {
#pragma unroll
                for (int n = 0; n < BLOCK / 4; n++) {
                    const u32 position = first + n / 2 * 8 + lane % 4 * 2 + n % 2;
                    if (position < from[i] || position > pos[i]) s[n / 2 * 4 + 2 * i + n % 2] = -INF;
                }
            }
            float now = top[i];
#pragma unroll
            for (int n = 0; n < BLOCK / 4; n++) now = fmaxf(now, s[n / 2 * 4 + 2 * i + n % 2]);
            now = fmaxf(now, __shfl_xor_sync(FULL_MASK, now, 1));
            now = fmaxf(now, __shfl_xor_sync(FULL_MASK, now, 2));
            // Rows that have seen nothing yet stay at zero.
            const float least = now == -INF ? 0.0f : now * unit;
            factor[i] = exp2_near(top[i] * unit - least);
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < BLOCK / 4; n++) {
                float& x = s[n / 2 * 4 + 2 * i + n % 2];
                sum += x = exp2_near(fmaf(x, unit, -least));
            }
            total[i] = total[i] * factor[i] + sum;
            top[i] = now;
        }
    };
    const auto pack = [&]() {
#pragma unroll
        for (int i = 0; i < BLOCK / 16; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) p[i][j] = f16_pair(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
        }
    };

    // The warpgroups take turns to issue products: 1 + wg is whose turn it is.
    if (wg == 1) group_arrive(1, 256);
    group_sync(1 + wg, 256);
    find_scores(0);
    group_arrive(2 - wg, 256);
    wgmma_wait();
    keep(s);
    leave(0, 0);
    softmax(0);
    pack();
#pragma unroll 1
    for (u32 block = 1; block < n_blocks; block++) {
        group_sync(1 + wg, 256);
        find_scores(block);
        sum_values(block - 1);
        group_arrive(2 - wg, 256);
        wgmma_wait_but<1>();
        keep(s);
        leave(block, 0);
        softmax(block);
        wgmma_wait();
        keep(acc);
        leave(block - 1, 1);
#pragma unroll
        for (int n = 0; n < D_V / 2; n++) acc[n] *= factor[n / 2 % 2];
        pack();
    }
    // The other warpgroup's last turn leaves this barrier as it was found.
    if (wg == 0) group_sync(1, 256);
    sum_values(n_blocks - 1);
    wgmma_wait();
    keep(acc);

#pragma unroll
    for (int i = 0; i < 2; i++) {
        total[i] += __shfl_xor_sync(FULL_MASK, total[i], 1);
        total[i] += __shfl_xor_sync(FULL_MASK, total[i], 2);
        if (!is_row[i]) continue;
        float sum = total[i], share = 1.0f;
        if (a.sinks) {
            const float unit = a.softcap != 0.0f ? 1.0f : scale[i], most = top[i] * unit;
            const float sink = a.sinks[head[i]] * LOG2_E, now = fmaxf(most, sink);
            share = exp2_near(most - now);
            sum = sum * share + exp2_near(sink - now);
        }
        share /= sum;
        // Where accumulators leave registers for it.
        if (D_V <= 128 && a.packed.out) {
            const u32 row = (u32)(at[i] / a.n_head), first = (u32)(at[i] % a.n_head) * D_V;
#pragma unroll
            for (int n = 0; n < D_V / 8; n++) {
                put_two(a.packed, packed_eight(a.packed, row, first + 8 * n), row, first + 8 * n + lane % 4 * 2,
                        acc[4 * n + 2 * i] * share, acc[4 * n + 2 * i + 1] * share);
            }
            continue;
        }
        float* out = a.out + at[i] * D_V + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < D_V / 8; n++) {
            *(float2*)(out + 8 * n) = float2{acc[4 * n + 2 * i] * share, acc[4 * n + 2 * i + 1] * share};
        }
    }
}
#endif
