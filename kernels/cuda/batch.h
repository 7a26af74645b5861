// Products of a matrix with 9 to 64 columns on tensor cores (mma.sync, bf16 with f32 sums), and of experts with the few
// columns that chose each.
//
// Columns are rows of bf16 that were packed once (`batch_order.h`), by `pack.cu` or by the product before. A team of
// `n_split` warps has TILES times 16 rows of weights, an item. Each warp has STEPS steps of four units of every row at
// a time: lane (g, t) holds unit 4s + t of rows g and g + 8, as it lies in memory. It unpacks a run of it into
// operands, and loads the unit of its next item there as soon as the last run is taken, so that the memory always has a
// whole item of every warp in flight. Sums of a team's warps are added in their order. Teams take items in turn, each
// one stretch of them, so that all are done at the same time.
#pragma once

#include "cuda/async.h"
#include "cuda/batch_order.h"
#include "quant/q6_k.h"
#include "cuda/batch_of.h"
#include "cuda/tile.h"

// Most threads of a block.
#define BATCH_THREADS(groups) ((groups) > 2 ? 256 : 384)

#define STAGED_THREADS(groups) ((groups) > 2 ? 384 : (groups) == 2 ? 512 : 640)

template <class W, int TILES>
struct BatchShape {
    static constexpr int RAW = sizeof(typename W::Raw) / 4;
    // Steps of a warp that are in registers: at most 80 words, or one step.
    static constexpr int STEPS = RAW * 2 * TILES * 4 <= 80 ? 4 : RAW * 2 * TILES * 2 <= 80 ? 2 : 1;
};

// Where the columns of an item are, and which rows of weights it has.
struct BatchItem {
    u32 group, expert, begin, n_cols;
};

template <class W>
__device__ __forceinline__ void batch_operands(const typename W::Raw& raw, bool is_there, u32 unit, int r,
                                               u32 (&a)[8]) {
    if constexpr (!W::IS_FLOAT && W::SMALL) {
        operands<W>(raw, is_there, unit, r, a);
    } else {
        float v[16];
        decode_run<W>(raw, unit, r, v);
#pragma unroll
        for (int j = 0; j < 8; j++) a[j] = is_there ? bf16_pair(v[2 * j], v[2 * j + 1]) : 0;
    }
}

// Q6_K with a block in shared memory, whose copy begins at a multiple of 16 bytes before it.
struct q6_k_staged : q6_k {
    template <int N>
    static QUANT_FN void words(QUANT_PTR p, u32 (&to)[N]) {
        const u32* from = (const u32*)((u64)p & ~3ull);
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = from[i];
    }
    static QUANT_FN void load_staged(QUANT_PTR block, u32 unit, q6_k::Raw& raw) {
        raw.shift = 8 * (u32)((u64)block & 3);
        words(block + 64 * (unit / 2) + 16 * (unit % 2), raw.ql[0].a);
        words(block + 64 * (unit / 2) + 16 * (unit % 2) + 32, raw.ql[1].a);
        words(block + 128 + 16 * unit, raw.qh.a);
        words(block + 192 + 8 * (unit / 2), raw.scales.a);
        words(block + 208, raw.d.a);
    }
};

// Types whose steps are a block of each row, which is copied to shared memory before it is unpacked: pieces of 16
// bytes, bytes from row to row, and copies that a warp has under way.
template <class W>
struct StagedOf {
    typedef W type;
    static constexpr bool IS = false;
    static constexpr u32 PIECES = 1, STAGES = 1, SHARED = 0;
};
template <>
struct StagedOf<q4_k_batch> {
    typedef q4_k_batch type;
    static constexpr bool IS = true;
    static constexpr u32 PIECES = 9, STAGES = 3, SHARED = STAGES * 16 * 16 * PIECES;
};
template <>
struct StagedOf<q6_k> {
    typedef q6_k_staged type;
    static constexpr bool IS = true;
    static constexpr u32 PIECES = 14, STAGES = 2, SHARED = STAGES * 16 * 16 * PIECES;
};

// Bytes of shared memory of a block of `warps`, for so many groups of 8 columns: sums of two items.
__host__ __device__ constexpr u32 batch_shared(u32 warps, u32 groups, u32 tiles) {
    return 2 * warps * tiles * groups * 4 * 128;
}

// `find(i)`: item `i` of `n_items`; `rows(item, tile, i)`: row g + 8i of a tile of 16 as a Row, past the last one any;
// `column(item, col)`: a packed row, past the last one any; `store(item, tile, i, col, sum, sum_up)` gets the sums of
// row i < 16 of a tile and a column < 8 GROUPS. GATED: tile 0 is gate's, tile 1 up's, stored together. EARLY: items and
// rows are known before the grids ahead are done. Blocks of whole teams.
template <class W, int GROUPS, int TILES, bool GATED, bool EARLY, class Find, class Rows, class Column, class Store>
__device__ __forceinline__ void batch(u32 k, u32 n_split, u32 n_items, float* shared, const Find& find,
                                      const Rows& rows, const Column& column, const Store& store) {
    constexpr int STEPS = BatchShape<W, TILES>::STEPS, SUMS = TILES * GROUPS * 4, RUNS = STEPS * W::RUNS;
    // Runs whose columns are loaded before they are multiplied.
    constexpr int AHEAD = 1;
    // Rows end with a step.
    constexpr bool WHOLE = W::BLOCK % (4 * W::UNIT) == 0;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, n_warps = blockDim.x / 32;
    // Of gated products half of a team's warps have gate's rows, the others up's.
    constexpr u32 PARTS = GATED ? 2 : 1;
    const u32 n_teams = n_warps / n_split, team = warp / n_split, n_share = n_split / PARTS;
    const u32 split = warp % n_split % n_share, part = warp % n_split / n_share;
    const u32 units = (k + W::UNIT - 1) / W::UNIT, steps = (units + 3) / 4;
    const u32 passes = (steps + n_share * STEPS - 1) / (n_share * STEPS);
    const u32 all_teams = n_teams * gridDim.x, me = blockIdx.x * n_teams + team;
    const u32 first_item = (u32)((u64)n_items * me / all_teams);
    const u32 n_mine = (u32)((u64)n_items * (me + 1) / all_teams) - first_item;
    const u32 rounds = (n_items + all_teams - 1) / all_teams;

    typename W::Raw raw[STEPS][TILES][2];
    Row row[TILES][2];
    BatchItem item = {}, next = {};
    const auto begin = [&](u32 i) {
        next = find(first_item + i);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) row[tile][0] = rows(next, tile + part, 0), row[tile][1] = rows(next, tile + part, 1);
    };
    const auto load = [&](u32 pass, int s) {
        const u32 step = (pass * n_share + split) * STEPS + s;
        if (step >= steps) return;
        const u32 unit = WHOLE ? 4 * step + t : min(4 * step + t, units - 1);
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) W::load(row[i / 2][i % 2], unit, raw[s][i / 2][i % 2]);
    };
    const auto start = [&] {
        if (n_mine == 0) return;
        begin(0);
#pragma unroll
        for (int s = 0; s < STEPS; s++) load(0, s);
    };
    start();
    if (EARLY) PDL_WAIT();
#pragma unroll 1
    for (u32 round = 0; round < rounds; round++) {
        float acc[TILES][GROUPS][4];
#pragma unroll
        for (int i = 0; i < SUMS; i++) acc[i / (4 * GROUPS)][i / 4 % GROUPS][i % 4] = 0.0f;
        item = next;
        if (round < n_mine) {
            const u16* x[GROUPS];
#pragma unroll
            for (int n = 0; n < GROUPS; n++) x[n] = column(item, 8 * n + g) + 8 * t;
#pragma unroll 1
            for (u32 pass = 0; pass < passes; pass++) {
                const u32 first_step = (pass * n_share + split) * STEPS;
                const bool is_last = pass + 1 == passes, has_next = !is_last || round + 1 < n_mine;
                if (is_last && has_next) begin(round + 1);
                uint4 b[AHEAD + 1][2][GROUPS];
                const auto load_columns = [&](int flat) {
                    const u32 step = first_step + flat / W::RUNS;
                    if (flat >= RUNS || step >= steps) return;
                    // Where a unit is not there, what lies in its place may be anything.
                    const bool is_there = WHOLE || 4 * step + t < units;
                    const u32 at = (step * W::RUNS + flat % W::RUNS) * 64;
#pragma unroll
                    for (int i = 0; i < 2 * GROUPS; i++) {
                        const uint4 v = *(const uint4*)(x[i / 2] + at + i % 2 * 32);
                        b[flat % (AHEAD + 1)][i % 2][i / 2] = is_there ? v : make_uint4(0, 0, 0, 0);
                    }
                };
#pragma unroll
                for (int i = 0; i < AHEAD; i++) load_columns(i);
#pragma unroll
                for (int s = 0; s < STEPS; s++) {
                    const u32 step = first_step + s, unit = 4 * step + t;
                    if (step < steps) {
#pragma unroll
                        for (int r = 0; r < W::RUNS; r++) {
                            const int flat = s * W::RUNS + r;
                            load_columns(flat + AHEAD);
#pragma unroll
                            for (int tile = 0; tile < TILES; tile++) {
                                u32 a[2][8];
#pragma unroll
                                for (int i = 0; i < 2; i++)
                                    batch_operands<W>(raw[s][tile][i], WHOLE || unit < units, unit, r, a[i]);
#pragma unroll
                                for (int h = 0; h < 2; h++) {
#pragma unroll
                                    for (int n = 0; n < GROUPS; n++) {
                                        const uint4 x4 = b[flat % (AHEAD + 1)][h][n];
                                        const int q = 4 * h;
                                        mma(acc[tile][n], a[0][q], a[1][q], a[0][q + 1], a[1][q + 1], x4.x, x4.y);
                                        mma(acc[tile][n], a[0][q + 2], a[1][q + 2], a[0][q + 3], a[1][q + 3], x4.z,
                                            x4.w);
                                    }
                                }
                            }
                        }
                    }
                    if (has_next) load(is_last ? 0 : pass + 1, s);
                }
            }
        }
        // Sums lie as [warp][sum][lane]; the other half is free again behind the barrier.
        float* sums = shared + (round % 2) * n_warps * SUMS * 32;
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            sums[(warp * SUMS + i) * 32 + lane] = acc[i / (4 * GROUPS)][i / 4 % GROUPS][i % 4];
        }
        __syncthreads();
        if (round >= n_mine) continue;
        const float* of_team = sums + team * n_split * SUMS * 32;
        constexpr u32 N = SUMS * 32;
        for (u32 at = warp % n_split * 32 + lane; at < N; at += n_split * 32) {
            float sum = 0.0f, up = 0.0f;
            for (u32 w = 0; w < n_share; w++) {
                sum += of_team[w * N + at];
                if (GATED) up += of_team[(n_share + w) * N + at];
            }
            const u32 i = at / 32 % 4, n = at / 128 % GROUPS, tile = at / (128 * GROUPS);
            store(item, tile, at % 32 / 4 + 8 * (i / 2), 8 * n + 2 * (at % 4) + i % 2, sum, up);
        }
    }
}

// As `batch`, of types that are staged: `first(item, part)` is the first of an item's 16 rows and how many there are.
// Behind the sums, `staged` holds SHARED bytes a warp.
template <class T, int GROUPS, bool GATED, bool EARLY, class Find, class First, class Column, class Store>
__device__ __forceinline__ void batch_staged(u32 k, u32 n_split, u32 n_items, float* shared, u8* staged,
                                             const Find& find, const First& first, const Column& column,
                                             const Store& store) {
    typedef StagedOf<T> Stage;
    typedef typename Stage::type W;
    constexpr u32 SUMS = GROUPS * 4, N = SUMS * 32, PITCH = 16 * Stage::PIECES, STAGES = Stage::STAGES;
    constexpr bool IS_ALIGNED = T::BYTES % 16 == 0;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, n_warps = blockDim.x / 32;
    constexpr u32 PARTS = GATED ? 2 : 1;
    const u32 n_teams = n_warps / n_split, team = warp / n_split, n_share = n_split / PARTS;
    const u32 split = warp % n_split % n_share, part = warp % n_split / n_share;
    const u32 steps = k / T::BLOCK, row_bytes = steps * T::BYTES, passes = (steps + n_share - 1) / n_share;
    const u32 all_teams = n_teams * gridDim.x, me = blockIdx.x * n_teams + team;
    const u32 first_item = (u32)((u64)n_items * me / all_teams);
    const u32 n_mine = (u32)((u64)n_items * (me + 1) / all_teams) - first_item;
    const u32 rounds = (n_items + all_teams - 1) / all_teams;
    u8* const mine = staged + warp * Stage::SHARED;

    // The copies run ahead: four lanes copy rows g and g + 8.
    u32 ahead_round = 0, ahead_pass = 0, ahead_stage = 0, second = 0;
    const u8* from = nullptr;
    const auto request = [&] {
        if (ahead_round < n_mine) {
            if (ahead_pass == 0) {
                u32 n_rows = 0;
                from = first(find(first_item + ahead_round), part, n_rows);
                from += (u64)min(g, n_rows - 1) * row_bytes;
                second = (min(g + 8, n_rows - 1) - min(g, n_rows - 1)) * row_bytes;
            }
            const u32 step = ahead_pass * n_share + split;
            if (step < steps) {
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    const u8* block = from + step * T::BYTES + i * second;
                    if (!IS_ALIGNED) block = (const u8*)((u64)block & ~15ull);
                    block += 16 * t;
                    u8* to = mine + (ahead_stage * 16 + g + 8 * i) * PITCH + 16 * t;
#pragma unroll
                    for (u32 piece = 0; piece < Stage::PIECES; piece += 4) {
                        if (piece + 4 <= Stage::PIECES || piece + t < Stage::PIECES) {
                            copy_async(to + 16 * piece, block + 16 * piece);
                        }
                    }
                }
            }
            if (++ahead_pass == passes) ahead_pass = 0, ahead_round++;
        }
        copy_async_commit();
        ahead_stage = ahead_stage + 1 == STAGES ? 0 : ahead_stage + 1;
    };
#pragma unroll
    for (u32 i = 0; i + 1 < STAGES; i++) request();
    if (EARLY) PDL_WAIT();
    u32 stage = 0;
#pragma unroll 1
    for (u32 round = 0; round < rounds; round++) {
        float acc[GROUPS][4];
#pragma unroll
        for (int i = 0; i < (int)SUMS; i++) acc[i / 4][i % 4] = 0.0f;
        BatchItem item = {};
        if (round < n_mine) {
            item = find(first_item + round);
            u32 n_rows = 0;
            const u64 base = IS_ALIGNED ? 0 : (u64)first(item, part, n_rows);
            const u16* x[GROUPS];
#pragma unroll
            for (int n = 0; n < GROUPS; n++) x[n] = column(item, 8 * n + g) + 8 * t;
#pragma unroll 1
            for (u32 pass = 0; pass < passes; pass++) {
                copy_async_wait<STAGES - 2>();
                __syncwarp();
                // Every lane has left the stage that this fills.
                request();
                const u32 step = pass * n_share + split;
                const u8* in = mine + stage * 16 * PITCH;
                stage = stage + 1 == STAGES ? 0 : stage + 1;
                if (step >= steps) continue;
                typename W::Raw raw[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const u32 row = g + 8 * i;
                    const u32 off = IS_ALIGNED ? 0 : (u32)(base + min(row, n_rows - 1) * row_bytes + step * T::BYTES) % 16;
                    W::load_staged(in + row * PITCH + off, t, raw[i]);
                }
                const u32 at = step * T::RUNS * 64;
                uint4 b[2][2][GROUPS];
                const auto load_columns = [&](int r) {
#pragma unroll
                    for (int i = 0; i < 2 * GROUPS; i++) {
                        b[r % 2][i % 2][i / 2] = *(const uint4*)(x[i / 2] + at + r * 64 + i % 2 * 32);
                    }
                };
                load_columns(0);
#pragma unroll
                for (int r = 0; r < T::RUNS; r++) {
                    if (r + 1 < T::RUNS) load_columns(r + 1);
                    u32 a[2][8];
#pragma unroll
                    for (int i = 0; i < 2; i++) batch_operands<W>(raw[i], true, t, r, a[i]);
#pragma unroll
                    for (int h = 0; h < 2; h++) {
#pragma unroll
                        for (int n = 0; n < GROUPS; n++) {
                            const uint4 x4 = b[r % 2][h][n];
                            const int q = 4 * h;
                            mma(acc[n], a[0][q], a[1][q], a[0][q + 1], a[1][q + 1], x4.x, x4.y);
                            mma(acc[n], a[0][q + 2], a[1][q + 2], a[0][q + 3], a[1][q + 3], x4.z, x4.w);
                        }
                    }
                }
            }
        }
        float* sums = shared + (round % 2) * n_warps * N;
#pragma unroll
        for (int i = 0; i < (int)SUMS; i++) sums[(warp * SUMS + i) * 32 + lane] = acc[i / 4][i % 4];
        __syncthreads();
        if (round >= n_mine) continue;
        const float* of_team = sums + team * n_split * N;
        for (u32 at = warp % n_split * 32 + lane; at < N; at += n_split * 32) {
            float sum = 0.0f, up = 0.0f;
            for (u32 w = 0; w < n_share; w++) {
                sum += of_team[w * N + at];
                if (GATED) up += of_team[(n_share + w) * N + at];
            }
            store(item, at % 32 / 4 + 8 * (at / 32 % 4 / 2), 8 * (at / 128) + 2 * (at % 4) + at / 32 % 2, sum, up);
        }
    }
}
