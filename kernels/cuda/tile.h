// Products of a matrix with tiles of 8 to 64 columns on tensor cores (mma.sync m16n8k16, bf16 with f32 sums).
//
// Weights go from memory through registers into the operands, without shared memory: lane (g, t) of a warp loads unit
// 4s + t of rows g and g + 8, decodes its runs of 16 values and gives four values to each product. The 16 positions of
// a product are thus four values of four units, in whatever order; activations, bf16 in shared memory, are read in the
// same order. A warp has 16 rows; where rows are few, `n_split` warps share them and take steps of 4 units in turn, and
// their sums are added in order.
// F32 weights are split into two bf16 numbers, as are their activations: three products, whose error is about 2^-16.
#pragma once

#include "cuda/args.h"
#include "cuda/common.h"
#include "cuda/load8.h"
#include "cuda/mma.h"
#include "quant/unit.h"

constexpr u32 TILE_WARPS = 8;

// F32 alone is finer than the activations' bf16.
template <class W>
struct Tile {
    static constexpr bool SPLIT = W::IS_FLOAT && W::BYTES == 4;
    // Values of a column in shared memory, 32 KiB in all.
    static __host__ __device__ constexpr u32 chunk(u32 cols) { return 16384 / cols / (SPLIT ? 2 : 1); }

    // Words of the units that a lane loads for a step of `parts` matrices.
    static __host__ __device__ constexpr int raw(int parts) { return sizeof(typename W::Raw) / 4 * 2 * parts; }

    // Whether there are registers for the next step's bytes too.
    static __host__ __device__ constexpr bool prefetches(int cols, int parts) {
        return raw(parts) + cols / 2 * parts <= 80;
    }

    // Blocks of 256 threads that a multiprocessor shall have registers for.
    static __host__ __device__ constexpr int blocks(int cols, int parts) {
        return raw(parts) * (prefetches(cols, parts) ? 2 : 1) + cols / 2 * parts + 64 <= 128 ? 2 : 1;
    }
};

// What rounding to bf16 left of a pair.
__device__ __forceinline__ u32 bf16_rest(float low, float high, u32 pair) {
    return bf16_pair(low - __uint_as_float(pair << 16), high - __uint_as_float(pair & 0xffff0000u));
}

// Activations of a chunk, as pieces of 8 values: piece p of column c lies at p * COLS + (c ^ swizzle), so that eight
// lanes that read two columns at the runs of four units meet eight banks of 16 bytes.
template <class W, int COLS>
struct Panel {
    static constexpr u32 CHUNK = Tile<W>::chunk(COLS);
    uint4* base;

    static __device__ __forceinline__ u32 swizzle(u32 run) {
        return ((run & 1) ^ (run & 2) ^ (run >> 2 & 1) * 3 ^ (run >> 2 & 2)) * 2;
    }

    // Values `first ..` of the columns' rows, `rows(col)`, null for columns that are not there. All threads take part.
    template <class Rows>
    __device__ __forceinline__ void fill(u32 k, u32 first, const Rows& rows) const {
        const u32 lane = threadIdx.x % 32, left = (k - first + 4 * W::UNIT - 1) / (4 * W::UNIT) * (4 * W::UNIT);
        const u32 n_pieces = (left < CHUNK ? left : CHUNK) / 8;
        const u32 n_items = n_pieces / 4 * (COLS / 8), n_warps = blockDim.x / 32;
        // Several pieces of 8 values a lane: all loads before the first use.
        constexpr int AHEAD = COLS < 64 ? 4 : 2;
#pragma unroll 1
        for (u32 first_item = threadIdx.x / 32; first_item < n_items; first_item += AHEAD * n_warps) {
            float v[AHEAD][8];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const u32 item = first_item + i * n_warps;
                const u32 col = item % (COLS / 8) * 8 + lane % 8, piece = item / (COLS / 8) * 4 + lane / 8;
                const float* row = item < n_items ? rows(col) : nullptr;
                load8<W::BLOCK>(row, k % 4 == 0, row ? k : 0, first + 8 * piece, v[i]);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const u32 item = first_item + i * n_warps;
                const u32 col = item % (COLS / 8) * 8 + lane % 8, piece = item / (COLS / 8) * 4 + lane / 8;
                if (item < n_items) put(col, piece, v[i]);
            }
        }
    }

    __device__ __forceinline__ void put(u32 col, u32 piece, const float (&v)[8]) const {
        uint4* to = base + (u64)piece * COLS + (col ^ swizzle(piece / 2));
        u32 pair[4], rest[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            pair[i] = bf16_pair(v[2 * i], v[2 * i + 1]);
            rest[i] = Tile<W>::SPLIT ? bf16_rest(v[2 * i], v[2 * i + 1], pair[i]) : 0;
        }
        *to = make_uint4(pair[0], pair[1], pair[2], pair[3]);
        if (Tile<W>::SPLIT) to[CHUNK / 8 * COLS] = make_uint4(rest[0], rest[1], rest[2], rest[3]);
    }
};

// Half of how many values the integers of a type with a minimum have; its blocks have scale and minimum in four bytes,
// or in planes of their own.
template <class W>
__host__ __device__ constexpr int middle() {
    return W::HAS_MIN ? 1 << ((W::BYTES - (W::BIAS_BYTES > 0 ? 0 : 4)) * 8 / W::BLOCK - 1) : 0;
}

// Run `r` of a unit as eight pairs of bf16; zeros where the unit is not there.
template <class W>
__device__ __forceinline__ void operands(const typename W::Raw& raw, bool is_there, u32 unit, int r, u32 (&a)[8]) {
    u32 w[4];
    float scale, min;
    W::run(raw, unit, r, w, scale, min);
    // Integers of a type with a minimum are counted from their middle: (q - MIDDLE) scale + (min + MIDDLE scale). That
    // minimum is small, and so is what rounding it and the scale to bf16 costs; of q scale and min little is left.
    constexpr int MIDDLE = middle<W>();
    min = fmaf((float)MIDDLE, scale, min);
    const u32 scales = is_there ? bf16_pair(scale, scale) : 0;
    const u32 mins = !W::HAS_MIN ? 0x80008000u : is_there ? bf16_pair(min, min) : 0;
    // Bytes below 128 become bf16 numbers behind a byte 0x43, which stands for 128: the difference is exact.
    constexpr int OFFSET = W::OFFSET - (W::SIGNED ? 64 : 0) - 128 - MIDDLE;
    constexpr u32 MINUS = 0xc300u + (-OFFSET - 128);
    static_assert(OFFSET <= -128 && OFFSET >= -255, "bf16 has eight bits");
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 bytes = W::SIGNED ? (w[i] ^ 0x80808080u) - 0x40404040u : w[i];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const u32 pair = permute(bytes, 0x43434343u, j == 0 ? 0x4140 : 0x4342);
            a[2 * i + j] = bf16_fma(bf16_fma(pair, 0x3f803f80u, MINUS << 16 | MINUS), scales, mins);
        }
    }
}

// acc += the products of the warp's 16 rows over one step: `raw` holds this lane's unit of rows g and g + 8.
template <class W, int COLS>
__device__ __forceinline__ void tile_step(const typename W::Raw (&raw)[2], bool is_there, u32 unit, u32 first_run,
                                          const Panel<W, COLS>& panel, float (&acc)[COLS / 8][4]) {
    const u32 g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int r = 0; r < W::RUNS; r++) {
        u32 a[2][8], rest[2][8];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if constexpr (!W::IS_FLOAT && W::SMALL) {
                operands<W>(raw[i], is_there, unit, r, a[i]);
                continue;
            }
            float v[16];
            decode_run<W>(raw[i], unit, r, v);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                a[i][j] = is_there ? bf16_pair(v[2 * j], v[2 * j + 1]) : 0;
                rest[i][j] = Tile<W>::SPLIT && is_there ? bf16_rest(v[2 * j], v[2 * j + 1], a[i][j]) : 0;
            }
        }
        const u32 run = run_index<W>(unit, r) - first_run;
        const uint4* x = panel.base + 2 * run * COLS + (g ^ Panel<W, COLS>::swizzle(run));
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int n = 0; n < COLS / 8; n++) {
                const uint4 b = x[h * COLS + 8 * n];
                const int s = 4 * h;
                mma(acc[n], a[0][s], a[1][s], a[0][s + 1], a[1][s + 1], b.x, b.y);
                mma(acc[n], a[0][s + 2], a[1][s + 2], a[0][s + 3], a[1][s + 3], b.z, b.w);
                if (Tile<W>::SPLIT) {
                    const uint4 c = x[h * COLS + 8 * n + Panel<W, COLS>::CHUNK / 8 * COLS];
                    mma(acc[n], a[0][s], a[1][s], a[0][s + 1], a[1][s + 1], c.x, c.y);
                    mma(acc[n], a[0][s + 2], a[1][s + 2], a[0][s + 3], a[1][s + 3], c.z, c.w);
                    mma(acc[n], rest[0][s], rest[1][s], rest[0][s + 1], rest[1][s + 1], b.x, b.y);
                    mma(acc[n], rest[0][s + 2], rest[1][s + 2], rest[0][s + 3], rest[1][s + 3], b.z, b.w);
                }
            }
        }
    }
}

// Warps that share rows: the grid's rows of blocks tell how many row groups a block has (`matmul.rs`).
__device__ __forceinline__ u32 tile_split(u64 n_rows, u32 n_blocks) {
    u32 groups = 1;
    while (groups < TILE_WARPS && (u64)n_blocks * groups * 16 < n_rows) groups *= 2;
    return TILE_WARPS / groups;
}

// The products of a block's rows of weights with COLS columns. `rows(i, up)`: row i < n_rows of gate (or the only
// matrix) and of up; `columns(col)`: a column's activations or null; `store(i, col, sum, sum_up)` gets every sum, of
// columns that are not there too. EARLY as in `vec`. Blocks of 256 threads; row blocks are blockIdx.y of gridDim.y.
template <class W, int COLS, bool GATED, bool EARLY, class Rows, class Columns, class Store>
__device__ __forceinline__ void tile(u32 k, u64 n_rows, uint4* shared, const Rows& rows, const Columns& columns,
                                     const Store& store) {
    constexpr int PARTS = GATED ? 2 : 1, NB = COLS / 8;
    constexpr bool PREFETCH = Tile<W>::prefetches(COLS, PARTS);
    constexpr u32 CHUNK_UNITS = Tile<W>::chunk(COLS) / W::UNIT, CHUNK_STEPS = CHUNK_UNITS / 4;
    const u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const u32 n_split = tile_split(n_rows, gridDim.y), split = warp % n_split, groups = TILE_WARPS / n_split;
    const u64 first_row = ((u64)blockIdx.y * groups + warp / n_split) * 16;
    const u32 units = (k + W::UNIT - 1) / W::UNIT, steps = (units + 3) / 4;
    const Panel<W, COLS> panel = {shared};

    Row row[PARTS][2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u64 wanted = first_row + 8 * i + g, known = wanted < n_rows ? wanted : n_rows - 1;
        row[0][i] = rows(known, false);
        if (GATED) row[PARTS - 1][i] = rows(known, true);
    }
    typename W::Raw raw[PARTS][2];
    const auto load = [&](u32 step, int part) {
        const u32 unit = min(4 * step + t, units - 1);
#pragma unroll
        for (int i = 0; i < 2; i++) W::load(row[part][i], unit, raw[part][i]);
    };
    const auto load_all = [&](u32 step) {
        if (step >= steps) return;
#pragma unroll
        for (int part = 0; part < PARTS; part++) load(step, part);
    };
    float acc[PARTS][NB][4];
#pragma unroll
    for (int i = 0; i < PARTS * NB * 4; i++) acc[i / (NB * 4)][i / 4 % NB][i % 4] = 0.0f;

    u32 step = split;
    if (PREFETCH) load_all(step);
    if (EARLY) PDL_WAIT();
#pragma unroll 1
    for (u32 chunk = 0; chunk * CHUNK_STEPS < steps; chunk++) {
        if (chunk > 0) __syncthreads();
        panel.fill(k, chunk * CHUNK_STEPS * 4 * W::UNIT, columns);
        __syncthreads();
        const u32 end = min(steps, (chunk + 1) * CHUNK_STEPS);
#pragma unroll 1
        for (; step < end; step += n_split) {
            const u32 unit = 4 * step + t;
            typename W::Raw now[PARTS][2];
            if (PREFETCH) {
#pragma unroll
                for (int i = 0; i < PARTS * 2; i++) now[i / 2][i % 2] = raw[i / 2][i % 2];
                load_all(step + n_split);
            }
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                if (!PREFETCH) load(step, part);
                tile_step<W, COLS>(PREFETCH ? now[part] : raw[part], unit < units, unit, chunk * CHUNK_UNITS * W::RUNS,
                                   panel, acc[part]);
            }
        }
    }

    if (n_split > 1) {
        // The first warp of a group adds the sums of the others, in order.
        constexpr u32 N = PARTS * NB * 4;
        float* mine = (float*)shared + (u64)(warp / n_split) * N * 32 + threadIdx.x % 32;
        for (u32 from = 1; from < n_split; from++) {
            __syncthreads();
            if (split == from) {
#pragma unroll
                for (int i = 0; i < N; i++) mine[32 * i] = acc[i / (NB * 4)][i / 4 % NB][i % 4];
            }
            __syncthreads();
            if (split == 0) {
#pragma unroll
                for (int i = 0; i < N; i++) acc[i / (NB * 4)][i / 4 % NB][i % 4] += mine[32 * i];
            }
        }
        if (split != 0) return;
    }
#pragma unroll
    for (int n = 0; n < NB; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u64 at = first_row + 8 * (i / 2) + g;
            if (at < n_rows) store(at, 8 * n + 2 * t + i % 2, acc[0][n][i], acc[PARTS - 1][n][i]);
        }
    }
}
