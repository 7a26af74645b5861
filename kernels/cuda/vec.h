// Products of a matrix with one to eight columns: rows of weights are read once, for all columns.
//
// A row belongs to a group of 4 to 32 lanes, which take its units in turn (`quant/unit.h`) and add up their parts by
// shuffles in a fixed order. Activations lie in shared memory: f32 for float weights; else integers of 8 bits (16 for
// 8-bit weights) with an f32 scale a run of 16 values, or two runs of grouped types, so that a run is four `dp4a`,
// exact, and two multiply-adds. Rows longer than a chunk of shared memory take several rounds. Activations may come
// through a norm or a gate, which every block repeats: cheaper than a launch. The factor of a norm over the whole row
// is applied to the sums.
#pragma once

#include "cuda/args.h"
#include "cuda/common.h"
#include "cuda/load8.h"
#include "cuda/mma.h"
#include "cuda/q4_k_wide.h"
#include "quant/unit.h"

// Threads of a block.
#define VEC_THREADS 512

enum Form { FORM_F32, FORM_I8, FORM_I16 };

// A type as it is read here.
template <class W>
struct VecOf {
    typedef W type;
    enum { IS_GROUPED = 0 };
};
template <>
struct VecOf<q4_k> {
    typedef q4_k_wide type;
};
template <>
struct VecOf<q4_k_wide> {
    enum { IS_GROUPED = 1 };
};

template <class W>
struct Vec {
    static constexpr int FORM = W::IS_FLOAT ? FORM_F32 : W::WIDE ? FORM_I16 : FORM_I8;
    static constexpr u32 RUN_BYTES = FORM == FORM_I8 ? 24 : FORM == FORM_I16 ? 40 : 64;
    static constexpr int RAW = sizeof(typename W::Raw) / 4;

    // Units of a row that a lane has in flight, of one matrix or of two.
    static __host__ __device__ constexpr int ahead(int cols, int parts) {
        return cols == 1 && RAW * parts <= 12 ? 4 : cols <= 2 && RAW * parts <= 24 ? 2 : 1;
    }

    // Runs of 16 values a chunk holds, for so many columns: at most 48 KiB, a multiple of 32.
    static __device__ constexpr u32 chunk_runs(u32 cols) {
        return (FORM == FORM_I8 ? 2048 : FORM == FORM_I16 ? 1024 : 512) / cols;
    }
};

// Staged activations of a chunk, `runs` (a multiple of 32) a column.
template <class W, int COLS>
struct Staged {
    uint4* base;
    u32 runs;

    // Where a run lies. The bits that neighbouring lanes differ in, in any order of units, choose the bank.
    static __device__ __forceinline__ u32 slot(u32 run) { return run ^ (run >> 3 & 1) * 3 ^ (run >> 4 & 1) * 5; }

    __device__ __forceinline__ uint4* words(u32 plane, u32 col) const {
        return base + ((u64)plane * COLS + col) * runs;
    }
    __device__ __forceinline__ float2* scales(u32 col) const {
        return (float2*)(base + (Vec<W>::FORM == FORM_I16 ? 2 : 1) * COLS * runs) + col * runs;
    }

    // Stages values `first ..` of `n_cols` rows of `k`; all threads of the block take part. Columns behind the last,
    // and values behind the row's end, are zero. `squares` gets what the thread saw of each row.
    template <bool HAS_GATES>
    __device__ __forceinline__ void fill(const float* x, u64 stride, const Prologue& p, u32 n_cols, u32 k, u32 first,
                                         float (&squares)[COLS]) const {
        // A thread takes 8 values of up to four columns, all loads before the first use.
        constexpr int GROUP = COLS < 4 ? COLS : 4;
        const u32 left = ((k - first + 15) / 16 + 31) / 32 * 32, n = (left < runs ? left : runs) * 2;
        const bool wide = k % 4 == 0 && stride % 4 == 0;
        // `n` is a multiple of 64, so that a warp is here as a whole.
#pragma unroll 1
        for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
            const u32 at = first + 8 * i;
#pragma unroll
            for (int group = 0; group < COLS; group += GROUP) {
                float v[GROUP][8];
#pragma unroll
                for (int j = 0; j < GROUP; j++) {
                    load8<W::BLOCK>(x + (group + j) * stride, wide, group + j < n_cols ? k : 0, at, v[j]);
                }
                if (p.kind == NORMED) {
                    float w[8];
                    load8<W::BLOCK>(p.w, k % 4 == 0, k, at, w);
#pragma unroll
                    for (int j = 0; j < 8 * GROUP; j++) {
                        squares[group + j / 8] += v[j / 8][j % 8] * v[j / 8][j % 8];
                        v[j / 8][j % 8] *= w[j % 8];
                    }
                } else if (HAS_GATES && p.kind != PLAIN) {
#pragma unroll
                    for (int j = 0; j < GROUP; j++) gate(p, group + j, group + j < n_cols && at < k, at, v[j]);
                }
#pragma unroll
                for (int j = 0; j < GROUP; j++) put(group + j, i / 2, i % 2, v[j]);
            }
        }
    }

    // As `fill`, where registers are there for it: with eight columns, a thread takes four, and another one the others.
    template <bool HAS_GATES>
    __device__ __forceinline__ void spread(const float* x, u64 stride, const Prologue& p, u32 n_cols, u32 k, u32 first,
                                           float (&squares)[COLS]) const {
        constexpr int GROUP = COLS < 4 ? COLS : 4, GROUPS = COLS / GROUP;
        const u32 left = ((k - first + 15) / 16 + 31) / 32 * 32, n = (left < runs ? left : runs) * 2;
        const bool wide = k % 4 == 0 && stride % 4 == 0;
        // `n` is a multiple of 64, so that a warp is here as a whole.
#pragma unroll 1
        for (u32 at_group = threadIdx.x; at_group < GROUPS * n; at_group += blockDim.x) {
            const u32 group = GROUPS > 1 && at_group >= n ? GROUP : 0, i = group ? at_group - n : at_group;
            const u32 at = first + 8 * i;
            float v[GROUP][8];
#pragma unroll
            for (int j = 0; j < GROUP; j++) {
                load8<W::BLOCK>(x + (group + j) * stride, wide, group + j < n_cols ? k : 0, at, v[j]);
            }
            if (p.kind == NORMED) {
                float w[8];
                load8<W::BLOCK>(p.w, k % 4 == 0, k, at, w);
#pragma unroll
                for (int j = 0; j < GROUP; j++) {
                    float sum = 0.0f;
#pragma unroll
                    for (int l = 0; l < 8; l++) {
                        sum += v[j][l] * v[j][l];
                        v[j][l] *= w[l];
                    }
#pragma unroll
                    for (int of = 0; of < COLS; of += GROUP) squares[of + j] += of == group ? sum : 0.0f;
                }
            } else if (HAS_GATES && p.kind != PLAIN) {
#pragma unroll
                for (int j = 0; j < GROUP; j++) gate(p, group + j, group + j < n_cols && at < k, at, v[j]);
            }
#pragma unroll
            for (int j = 0; j < GROUP; j++) put(group + j, i / 2, i % 2, v[j]);
        }
    }

    // The gate of 8 values, and the norm of their head, which neighbouring lanes hold: heads are powers of two of 8 to
    // 256 numbers.
    static __device__ __forceinline__ void gate(const Prologue& p, u32 row, bool is_there, u32 at, float (&v)[8]) {
        float r = 1.0f;
        const u32 in_head = at % p.d_head;
        if (p.kind == GATED_NORM) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; i++) sum += v[i] * v[i];
            for (u32 step = 1; step < p.d_head / 8; step *= 2) sum += __shfl_xor_sync(FULL_MASK, sum, step);
            r = 1.0f / sqrtf(sum / (float)p.d_head + p.eps);
        }
        if (!is_there) return;
        const float* gates = p.gate + (u64)row * p.gate_row + (u64)(at / p.d_head) * p.gate_head + in_head;
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const float4 four = *(const float4*)(gates + i);
            const float g[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 4; j++) v[i + j] *= sigmoid(g[j]);
            if (p.kind == GATED_NORM) {
                const float4 w = *(const float4*)(p.w + in_head + i);
                v[i] *= r * w.x * g[0], v[i + 1] *= r * w.y * g[1];
                v[i + 2] *= r * w.z * g[2], v[i + 3] *= r * w.w * g[3];
            }
        }
    }

    // Half of a run; two neighbouring lanes hold the run.
    __device__ __forceinline__ void put(u32 col, u32 run, u32 half, const float (&v)[8]) const {
        if constexpr (Vec<W>::FORM == FORM_F32) {
            float4* to = (float4*)base + ((u64)col * 4 + 2 * half) * runs + slot(run);
            to[0] = make_float4(v[0], v[1], v[2], v[3]);
            to[runs] = make_float4(v[4], v[5], v[6], v[7]);
        } else {
            float amax = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) amax = max_or_nan(amax, fabsf(v[j]));
            amax = max_or_nan(amax, __shfl_xor_sync(FULL_MASK, amax, 1));
            if (VecOf<W>::IS_GROUPED) amax = max_or_nan(amax, __shfl_xor_sync(FULL_MASK, amax, 2));
            const auto [inverse, d] = byte_scale<Vec<W>::FORM == FORM_I8 ? 127 : 16256>(amax);
            u32 high[2], low[2], sum = 0;
#pragma unroll
            for (int j = 0; j < 8; j += 4) {
                // Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low bits.
                u32 q[4], rest[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    q[i] = __float_as_uint(fmaf(v[j + i], inverse, 12582912.0f));
                    if (Vec<W>::FORM == FORM_I16) {
                        q[i] -= 0x4b400000u;
                        const u32 upper = (u32)(((int)q[i] + 64) >> 7);
                        rest[i] = q[i] - 128 * upper;
                        q[i] = upper;
                    }
                }
                high[j / 4] = low_bytes(q);
                sum = dp4a_signed(high[j / 4], 0x01010101u, sum);
                if (Vec<W>::FORM == FORM_I16) low[j / 4] = low_bytes(rest);
            }
            if (Vec<W>::FORM == FORM_I16) {
                sum = dp4a_signed(low[0], 0x01010101u, dp4a_signed(low[1], 0x01010101u, 128 * sum));
            }
            sum += __shfl_xor_sync(FULL_MASK, sum, 1);
            ((uint2*)(words(0, col) + slot(run)))[half] = make_uint2(high[0], high[1]);
            if (Vec<W>::FORM == FORM_I16) ((uint2*)(words(1, col) + slot(run)))[half] = make_uint2(low[0], low[1]);
            if (half == 0) scales(col)[slot(run)] = make_float2(d, d * (float)(int)sum);
        }
    }

    // acc[col] += the products of a unit, whose first run in this chunk is counted from `first_run`.
    __device__ __forceinline__ void dot(const typename W::Raw& raw, u32 unit, u32 first_run, float (&acc)[COLS]) const {
        // Runs of a unit differ in bits that are zero in its first, and `slot` is linear in bits.
        const u32 first = slot(run_index<W>(unit, 0) - first_run);
        if constexpr (VecOf<W>::IS_GROUPED) {
#pragma unroll
            for (int g = 0; g < W::RUNS / 2; g++) {
                const u32 at = first ^ slot(2 * g);
                u32 one[4], two[4];
                float scale, min;
                W::group(raw, unit, g, one, two, scale, min);
                // One run after the other, for want of registers.
                u32 sum[COLS];
#pragma unroll
                for (int col = 0; col < COLS; col++) sum[col] = dots(one, words(0, col)[at], 0);
#pragma unroll
                for (int col = 0; col < COLS; col++) sum[col] = dots(two, words(0, col)[at ^ 1], sum[col]);
#pragma unroll
                for (int col = 0; col < COLS; col++) {
                    // Both runs have the same scale.
                    const float4 d = *(const float4*)(scales(col) + (at & ~1u));
                    acc[col] = fmaf(scale, d.x * (float)(int)sum[col], acc[col]);
                    acc[col] = fmaf(-min, d.y + d.w, acc[col]);
                }
            }
        } else {
#pragma unroll
        for (int r = 0; r < W::RUNS; r++) {
            const u32 at = first ^ slot(W::PAIRED ? 2 * r : r);
            if constexpr (Vec<W>::FORM == FORM_F32) {
                float v[16];
                decode_run<W>(raw, unit, r, v);
#pragma unroll
                for (int col = 0; col < COLS; col++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float4 x = ((const float4*)base)[((u64)col * 4 + i) * runs + at];
                        acc[col] = fmaf(v[4 * i], x.x, acc[col]);
                        acc[col] = fmaf(v[4 * i + 1], x.y, acc[col]);
                        acc[col] = fmaf(v[4 * i + 2], x.z, acc[col]);
                        acc[col] = fmaf(v[4 * i + 3], x.w, acc[col]);
                    }
                }
            } else {
                u32 w[4];
                float scale, min;
                W::run(raw, unit, r, w, scale, min);
                if (W::OFFSET != 0) min = W::HAS_MIN ? fmaf((float)W::OFFSET, scale, min) : (float)W::OFFSET * scale;
#pragma unroll
                for (int col = 0; col < COLS; col++) {
                    const float2 d = scales(col)[at];
                    float sum = (float)(int)dots(w, words(0, col)[at], 0);
                    if (Vec<W>::FORM == FORM_I16) sum = fmaf(128.0f, sum, (float)(int)dots(w, words(1, col)[at], 0));
                    acc[col] = fmaf(scale, d.x * sum, acc[col]);
                    if (W::OFFSET != 0 || W::HAS_MIN) acc[col] = fmaf(min, d.y, acc[col]);
                }
            }
        }
        }
    }

    // Activations of a unit, of one column in 8 bits: integers, scales, and scales times sums.
    static constexpr int SCALES = VecOf<W>::IS_GROUPED ? W::RUNS / 2 : W::RUNS;
    struct Held {
        uint4 q[W::RUNS];
        float2 d[SCALES];
    };
    __device__ __forceinline__ void hold(u32 unit, Held& x) const {
        const u32 first = slot(run_index<W>(unit, 0));
#pragma unroll
        for (int r = 0; r < W::RUNS; r++) {
            const u32 at = first ^ slot(W::PAIRED ? 2 * r : r);
            x.q[r] = base[at];
            if (!VecOf<W>::IS_GROUPED) {
                x.d[r % SCALES] = scales(0)[at];
            } else if (r % 2 == 0) {
                const float4 d = *(const float4*)(scales(0) + (at & ~1u));
                x.d[r / 2] = make_float2(d.x, d.y + d.w);
            }
        }
    }

    // As `dot`, with activations that are held.
    static __device__ __forceinline__ void dot_held(const typename W::Raw& raw, u32 unit, const Held& x, float& acc) {
        if constexpr (VecOf<W>::IS_GROUPED) {
#pragma unroll
            for (int g = 0; g < W::RUNS / 2; g++) {
                u32 one[4], two[4];
                float scale, min;
                W::group(raw, unit, g, one, two, scale, min);
                const u32 sum = dots(two, x.q[2 * g + 1], dots(one, x.q[2 * g], 0));
                acc = fmaf(scale, x.d[g].x * (float)(int)sum, acc);
                acc = fmaf(-min, x.d[g].y, acc);
            }
        } else {
#pragma unroll
            for (int r = 0; r < W::RUNS; r++) {
                u32 w[4];
                float scale, min;
                W::run(raw, unit, r, w, scale, min);
                if (W::OFFSET != 0) min = W::HAS_MIN ? fmaf((float)W::OFFSET, scale, min) : (float)W::OFFSET * scale;
                acc = fmaf(scale, x.d[r].x * (float)(int)dots(w, x.q[r], 0), acc);
                if (W::OFFSET != 0 || W::HAS_MIN) acc = fmaf(min, x.d[r].y, acc);
            }
        }
    }

    static __device__ __forceinline__ u32 dots(const u32 (&w)[4], uint4 x, u32 sum) {
        if (W::SIGNED)
            return dp4a_signed(w[3], x.w, dp4a_signed(w[2], x.z, dp4a_signed(w[1], x.y, dp4a_signed(w[0], x.x, sum))));
        return dp4a_unsigned(w[3], x.w,
                             dp4a_unsigned(w[2], x.z, dp4a_unsigned(w[1], x.y, dp4a_unsigned(w[0], x.x, sum))));
    }
};

// Lanes that share a row of so many units: fewer, which have less to add up, where every block has many rows.
__device__ __forceinline__ u32 row_lanes(u32 units, u64 n_rows, u32 n_blocks) {
    u32 lanes = 32;
    while (lanes > 4 && units < lanes) lanes /= 2;
    while (lanes > 8 && n_rows * lanes >= 8ull * blockDim.x * n_blocks) lanes /= 2;
    return lanes;
}

// The products of rows `rows(i)`, i < n_rows, with `n_cols` columns; `store(i, col, sum, sum_up)` gets each once.
// IS_GATED: `rows(i, up)` names two rows, of gate and of up. HAS_GATES: the prologue may have a gate. `early`: weights
// are known before the kernels ahead are done; it then waits for them. Blocks of VEC_THREADS take tiles of rows in
// turn; a lane has the units of all its rows in flight one behind the other. `shared` holds 64 bytes a column, then
// `chunk_runs` runs a column, or as many as k has, rounded up to 32.
template <class T, int COLS, bool IS_GATED, bool HAS_GATES, class Rows, class Store>
__device__ __forceinline__ void vec(const float* x, u64 stride, const Prologue& prologue, u32 n_cols, u32 k, u64 n_rows,
                                    u32 block, u32 n_blocks, uint4* shared, bool early, const Rows& rows,
                                    const Store& store) {
    typedef typename VecOf<T>::type W;
    constexpr int PARTS = IS_GATED ? 2 : 1, AHEAD = Vec<W>::ahead(COLS, PARTS), WARPS = VEC_THREADS / 32;
    constexpr u32 CHUNK_RUNS = Vec<W>::chunk_runs(COLS), CHUNK_UNITS = CHUNK_RUNS / W::RUNS;
    const u32 k_runs = ((k + 15) / 16 + 31) / 32 * 32, units = (k + W::UNIT - 1) / W::UNIT;
    const u32 lanes = row_lanes(units, n_rows, n_blocks), lane = threadIdx.x % lanes;
    const u32 tile_rows = VEC_THREADS / lanes, n_rows32 = (u32)n_rows;
    float* squares_of = (float*)shared; // [COLS][WARPS]
    const Staged<W, COLS> staged = {shared + 4 * COLS, k_runs < CHUNK_RUNS ? k_runs : CHUNK_RUNS};

    typename W::Raw raw[AHEAD][PARTS];
    float sum[PARTS][COLS];
#pragma unroll
    for (int i = 0; i < PARTS * COLS; i++) sum[i / COLS][i % COLS] = 0.0f;
    // What a column's sums are multiplied by, for a norm over its row.
    const auto factor = [&](int col) {
        if (prologue.kind != NORMED) return 1.0f;
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) total += squares_of[WARPS * col + i];
        return rsqrtf(total / (float)k + prologue.eps);
    };
    float r_of_one = 1.0f;

    // A segment: all tiles of the block where rows are one chunk, else a chunk of one tile.
    const bool is_one = units <= CHUNK_UNITS;
    const u32 n_tiles = (n_rows32 + tile_rows - 1) / tile_rows;
    if (prologue.kind == NORMED) prefetch(prologue.w + 8 * min(threadIdx.x, (k - 1) / 8));
    u32 tile = block, first = 0;
#pragma unroll 1
    for (;;) {
        const u32 last = is_one ? units : min(units, first + CHUNK_UNITS), steps = (last - first + lanes - 1) / lanes;
        const u32 tiles = tile >= n_tiles ? 0 : is_one ? (n_tiles - tile + n_blocks - 1) / n_blocks : 1;
        const u32 total = tiles * steps;
        // Where the next load is.
        u32 row_at = tile * tile_rows + threadIdx.x / lanes, unit_at = first + lane;
        Row row[PARTS];
        const auto find = [&] {
            const u32 known = min(row_at, n_rows32 - 1);
            row[0] = rows(known, false);
            if (IS_GATED) row[PARTS - 1] = rows(known, true);
        };
        const auto load = [&](int i) {
            if (unit_at == first + lane) find();
            if (unit_at < last) {
#pragma unroll
                for (int part = 0; part < PARTS; part++) W::load(row[part], unit_at, raw[i][part]);
            }
            unit_at += lanes;
            if (unit_at - lane >= last) {
                unit_at = first + lane;
                row_at += n_blocks * tile_rows;
            }
        };
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (i < total) load(i);
        }
        const bool is_first = tile == block && first == 0;
        if (!is_first) {
            __syncthreads();
        } else if (early) {
            PDL_WAIT();
        }
        float squares[COLS] = {};
        staged.template fill<HAS_GATES>(x, stride, prologue, n_cols, k, first * W::UNIT, squares);
        if (prologue.kind == NORMED && tile == block) {
#pragma unroll
            for (int col = 0; col < COLS; col++) {
                const float sum_of_warp = warp_sum(squares[col]);
                float* of_warp = squares_of + WARPS * col + threadIdx.x / 32;
                if (threadIdx.x % 32 == 0) *of_warp = (first > 0 ? *of_warp : 0.0f) + sum_of_warp;
            }
        }
        __syncthreads();
        if (COLS == 1) r_of_one = factor(0);
        u32 row_idx = tile * tile_rows + threadIdx.x / lanes, unit = first + lane;
#pragma unroll 1
        for (u32 step = 0; step < total; step += AHEAD) {
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (step + i >= total) break;
                if (unit < last) {
#pragma unroll
                    for (int part = 0; part < PARTS; part++) {
                        staged.dot(raw[i][part], unit, first * W::RUNS, sum[part]);
                    }
                }
                if (step + i + AHEAD < total) load(i);
                unit += lanes;
                if (unit - lane < last) continue;
                unit = first + lane;
                if (last == units) {
#pragma unroll
                    for (int col = 0; col < COLS; col++) {
                        for (u32 by = lanes / 2; by > 0; by /= 2) {
#pragma unroll
                            for (int part = 0; part < PARTS; part++)
                                sum[part][col] += __shfl_xor_sync(FULL_MASK, sum[part][col], by);
                        }
                        if (lane == col % lanes && row_idx < n_rows32 && col < n_cols) {
                            const float r = COLS == 1 ? r_of_one : factor(col);
                            store(row_idx, (u32)col, sum[0][col] * r, sum[PARTS - 1][col] * r);
                        }
#pragma unroll
                        for (int part = 0; part < PARTS; part++) sum[part][col] = 0.0f;
                    }
                }
                row_idx += n_blocks * tile_rows;
            }
        }
        if (is_one) return;
        first = last;
        if (first == units) first = 0, tile += n_blocks;
        if (tile >= n_tiles) return;
    }
}
