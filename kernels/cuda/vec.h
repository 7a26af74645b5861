// Products of a matrix with one to eight columns: rows of weights are read once, for all columns.
//
// A row belongs to a group of 4 to 32 lanes, which take its units in turn (`quant/unit.h`) and add up their parts by
// shuffles in a fixed order. Activations lie in shared memory: f32 for float weights; else integers of 8 bits (16 for
// 8-bit weights) with an f32 scale a run of 16 values, so that a run is four `dp4a`, exact, and two multiply-adds.
// Rows longer than a chunk of shared memory take several rounds.
#pragma once

#include "cuda/args.h"
#include "cuda/common.h"
#include "cuda/load8.h"
#include "cuda/mma.h"
#include "quant/unit.h"

enum Form { FORM_F32, FORM_I8, FORM_I16 };

template <class W>
struct Vec {
    static constexpr int FORM = W::IS_FLOAT ? FORM_F32 : W::WIDE ? FORM_I16 : FORM_I8;
    static constexpr u32 RUN_BYTES = FORM == FORM_I8 ? 24 : FORM == FORM_I16 ? 40 : 64;
    static constexpr int RAW = sizeof(typename W::Raw) / 4;

    // Units of a row that a lane has in flight, of one matrix or of two.
    static __host__ __device__ constexpr int ahead(int parts) { return RAW * parts > 24 ? 1 : 2; }

    // Blocks of 256 threads that a multiprocessor shall have registers for.
    static __host__ __device__ constexpr int blocks(int cols, int parts) {
        const int registers = RAW * parts * ahead(parts) + 4 * cols * parts + (FORM == FORM_I8 ? 44 : 56);
        return registers <= 64 ? 4 : registers <= 80 ? 3 : registers <= 128 ? 2 : 1;
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
    static __device__ __forceinline__ u32 slot(u32 run) { return run ^ (run >> 3 & 1) * 3 ^ (run >> 2 & 4); }

    __device__ __forceinline__ uint4* words(u32 plane, u32 col) const {
        return base + ((u64)plane * COLS + col) * runs;
    }
    __device__ __forceinline__ float2* scales(u32 col) const {
        return (float2*)(base + (Vec<W>::FORM == FORM_I16 ? 2 : 1) * COLS * runs) + col * runs;
    }

    // Stages values `first ..` of `n_cols` rows of `k`; all threads of the block take part. Columns behind the last,
    // and values behind the row's end, are zero.
    __device__ __forceinline__ void fill(const float* x, u64 stride, u32 n_cols, u32 k, u32 first) const {
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
#pragma unroll
                for (int j = 0; j < GROUP; j++) put(group + j, i / 2, i % 2, v[j]);
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
            // The order of bits is that of magnitudes, with NaN above all.
            u32 top = 0;
#pragma unroll
            for (int j = 0; j < 8; j++) top = max(top, __float_as_uint(v[j]) & 0x7fffffffu);
            top = max(top, __shfl_xor_sync(FULL_MASK, top, 1));
            const float amax = __uint_as_float(top), levels = Vec<W>::FORM == FORM_I8 ? 127.0f : 16256.0f;
            // A run below 1e-30 is zero, since the inverse of its scale could be infinite. A scale of NaN keeps NaN and
            // infinities, whatever the integers are.
            const bool is_zero = !(amax > 1e-30f) && top <= 0x7f800000u;
            const float inverse = is_zero ? 0.0f : levels * __frcp_rn(amax);
            const float d = top >= 0x7f800000u ? QNAN : is_zero ? 0.0f : amax * (1.0f / levels);
            int sum = 0;
            u32 high[2], low[2];
#pragma unroll
            for (int j = 0; j < 8; j += 4) {
                // Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low bits.
                u32 q[4], rest[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    q[i] = __float_as_uint(fmaf(v[j + i], inverse, 12582912.0f)) - 0x4b400000u;
                    sum += (int)q[i];
                    if (Vec<W>::FORM == FORM_I16) {
                        const u32 upper = (u32)(((int)q[i] + 64) >> 7);
                        rest[i] = q[i] - 128 * upper;
                        q[i] = upper;
                    }
                }
                high[j / 4] = low_bytes(q);
                if (Vec<W>::FORM == FORM_I16) low[j / 4] = low_bytes(rest);
            }
            sum += __shfl_xor_sync(FULL_MASK, sum, 1);
            ((uint2*)(words(0, col) + slot(run)))[half] = make_uint2(high[0], high[1]);
            if (Vec<W>::FORM == FORM_I16) ((uint2*)(words(1, col) + slot(run)))[half] = make_uint2(low[0], low[1]);
            if (half == 0) scales(col)[slot(run)] = make_float2(d, d * (float)sum);
        }
    }

    // The low bytes of four words.
    static __device__ __forceinline__ u32 low_bytes(const u32 (&q)[4]) {
        return permute(permute(q[0], q[1], 0x0040), permute(q[2], q[3], 0x0040), 0x5410);
    }

    // acc[col] += the products of a unit, whose first run in this chunk is counted from `first_run`.
    __device__ __forceinline__ void dot(const typename W::Raw& raw, u32 unit, u32 first_run, float (&acc)[COLS]) const {
        // Runs of a unit differ in bits that are zero in its first, and `slot` is linear in bits.
        const u32 first = slot(run_index<W>(unit, 0) - first_run);
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
                    float sum = (float)(int)dots(w, words(0, col)[at]);
                    if (Vec<W>::FORM == FORM_I16) sum = fmaf(128.0f, sum, (float)(int)dots(w, words(1, col)[at]));
                    acc[col] = fmaf(scale, d.x * sum, acc[col]);
                    if (W::OFFSET != 0 || W::HAS_MIN) acc[col] = fmaf(min, d.y, acc[col]);
                }
            }
        }
    }

    static __device__ __forceinline__ u32 dots(const u32 (&w)[4], uint4 x) {
        if (W::SIGNED)
            return dp4a_signed(w[3], x.w, dp4a_signed(w[2], x.z, dp4a_signed(w[1], x.y, dp4a_signed(w[0], x.x, 0))));
        return dp4a_unsigned(w[3], x.w,
                             dp4a_unsigned(w[2], x.z, dp4a_unsigned(w[1], x.y, dp4a_unsigned(w[0], x.x, 0))));
    }
};

// Units `begin`, `begin + step`, .. below `end` of a row, the first few in flight.
template <class W, int AHEAD>
struct Stream {
    typename W::Raw ahead[AHEAD];

    __device__ __forceinline__ void start(const Row& row, u32 begin, u32 end, u32 step) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (begin + i * step < end) W::load(row, begin + i * step, ahead[i]);
        }
    }

    template <int COLS>
    __device__ __forceinline__ void dot(const Row& row, u32 begin, u32 end, u32 step, const Staged<W, COLS>& x,
                                        u32 first_run, float (&acc)[COLS]) {
#pragma unroll 1
        for (u32 unit = begin; unit < end; unit += AHEAD * step) {
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const u32 now = unit + i * step, next = now + AHEAD * step;
                if (now < end) x.dot(ahead[i], now, first_run, acc);
                if (next < end) W::load(row, next, ahead[i]);
            }
        }
    }
};

// Lanes that share a row of so many units: at least two units each where a row has them, and fewer lanes, which have
// less to add up, where every block has many rows.
__device__ __forceinline__ u32 row_lanes(u32 units, u64 n_rows, u32 n_blocks) {
    u32 lanes = 32;
    while (lanes > 4 && units < 2 * lanes) lanes /= 2;
    while (lanes > 8 && n_rows * lanes >= 4ull * blockDim.x * n_blocks) lanes /= 2;
    return lanes;
}

// The products of rows `rows(i)`, i < n_rows, with `n_cols` columns; `store(i, col, sum, sum_up)` gets each once.
// GATED: `rows(i, up)` names two rows, of gate and of up. EARLY: weights are known before the kernels ahead are done;
// it then waits for them. Blocks take tiles of rows in turn. `shared` holds `chunk_runs` runs a column, or as many as k
// has, rounded up to 32.
template <class W, int COLS, bool GATED, bool EARLY, class Rows, class Store>
__device__ __forceinline__ void vec(const float* x, u64 stride, u32 n_cols, u32 k, u64 n_rows, u32 block, u32 n_blocks,
                                    uint4* shared, const Rows& rows, const Store& store) {
    constexpr u32 CHUNK_RUNS = Vec<W>::chunk_runs(COLS), CHUNK_UNITS = CHUNK_RUNS / W::RUNS;
    const u32 k_runs = ((k + 15) / 16 + 31) / 32 * 32, units = (k + W::UNIT - 1) / W::UNIT;
    const u32 lanes = row_lanes(units, n_rows, n_blocks), lane = threadIdx.x % lanes;
    const u32 tile_rows = blockDim.x / lanes;
    const Staged<W, COLS> staged = {shared, k_runs < CHUNK_RUNS ? k_runs : CHUNK_RUNS};
    const bool one_chunk = units <= CHUNK_UNITS;
    Row row, row_up;
    Stream<W, Vec<W>::ahead(GATED ? 2 : 1)> stream, stream_up;
    const auto start = [&](u32 first) {
        const u32 end = min(units, first + CHUNK_UNITS);
        stream.start(row, first + lane, end, lanes);
        if (GATED) stream_up.start(row_up, first + lane, end, lanes);
    };
    const auto start_tile = [&](u64 tile) {
        const u64 row_idx = tile * tile_rows + threadIdx.x / lanes, known = row_idx < n_rows ? row_idx : n_rows - 1;
        row = rows(known, false);
        if (GATED) row_up = rows(known, true);
        start(0);
    };
    start_tile(block);
    if (EARLY) PDL_WAIT();
    bool is_staged = false;
#pragma unroll 1
    for (u64 tile = block; tile * tile_rows < n_rows; tile += n_blocks) {
        float sum[COLS], sum_up[COLS];
#pragma unroll
        for (int col = 0; col < COLS; col++) sum[col] = sum_up[col] = 0.0f;
#pragma unroll 1
        for (u32 first = 0; first < units; first += CHUNK_UNITS) {
            if (first > 0) start(first);
            if (!is_staged || !one_chunk) {
                if (is_staged) __syncthreads();
                staged.fill(x, stride, n_cols, k, first * W::UNIT);
                __syncthreads();
                is_staged = true;
            }
            const u32 end = min(units, first + CHUNK_UNITS), begin = first + lane;
            stream.dot(row, begin, end, lanes, staged, first * W::RUNS, sum);
            if (GATED) stream_up.dot(row_up, begin, end, lanes, staged, first * W::RUNS, sum_up);
        }
        // The next tile's first bytes come while this one's sums are added up.
        if ((tile + n_blocks) * tile_rows < n_rows) start_tile(tile + n_blocks);
        const u64 row_idx = tile * tile_rows + threadIdx.x / lanes;
#pragma unroll
        for (int col = 0; col < COLS; col++) {
            for (u32 step = lanes / 2; step > 0; step /= 2) {
                sum[col] += __shfl_xor_sync(FULL_MASK, sum[col], step);
                if (GATED) sum_up[col] += __shfl_xor_sync(FULL_MASK, sum_up[col], step);
            }
            if (lane == col % lanes && row_idx < n_rows && col < n_cols) {
                store(row_idx, (u32)col, sum[col], sum_up[col]);
            }
        }
    }
}
