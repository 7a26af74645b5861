// Products of a matrix with tiles of up to 128 columns on Hopper's warpgroup products (bf16 with f32 sums).
//
// Two launches. The first (`pack`) rounds activations to bf16, once, in the order in which the second wants them.
// Weights go from memory through registers into the operands as in `tile.h`: lane (g, t) of a warp loads unit 4s + t of
// two rows, and run r of the four units are the 64 positions of a chunk, four products of 16. Activations come chunk
// by chunk, [chunk][group of 8 rows][8][64] bf16 swizzled for `wgmma_matrix`, so that a tile of a chunk is one piece
// of memory and one bulk copy. A ring of STAGES pieces of a few chunks is filled by one thread. A block
// has two warpgroups of 64 rows each, which share the columns; two blocks share a multiprocessor, so that one loads,
// unpacks and stores while the other multiplies.
//
// F32 weights are split into two bf16 numbers, as are their activations: three products, whose error is about 2^-16.
#pragma once

#include "cuda/tile.h"
#include "cuda/wgmma.h"

// Threads of a block, its rows of weights, and blocks of a multiprocessor.
constexpr u32 WIDE_THREADS = 256, WIDE_ROWS = WIDE_THREADS / 2, WIDE_BLOCKS = 2;

// Columns of a tile: sums, the words of two rows' units and one run's operands share 128 registers.
template <class W>
struct WideCols {
    static constexpr int OF = Tile<W>::SPLIT ? 48 : W::UNIT == 64 ? 64 : 128;
};

// RING: chunks in shared memory. A piece is a pair of chunks, or with WHOLE those of a step of four units. LATE: a run
// is unpacked while the one before is multiplied, and two steps of weights are on their way, which takes registers.
template <class Weight, int MOST = WideCols<Weight>::OF, int RING = 6, bool WHOLE = false, bool OVERLAP = false>
struct Wide {
    typedef Weight W;
    static constexpr bool SPLIT = Tile<W>::SPLIT, LATE = OVERLAP, IS_STAGED = false;
    static constexpr u32 PANELS = SPLIT ? 2 : 1;
    static constexpr int COLS = MOST, EACH = WHOLE || W::RUNS < 2 ? W::RUNS : 2, AHEAD = LATE ? 2 : 1;
    static constexpr u32 CHUNK = COLS * 128 * PANELS, STAGE = CHUNK * EACH;
    static constexpr u32 STAGES = RING / EACH > 2 ? RING / EACH : 2;
    // The ring begins at a multiple of 1024; barriers follow it.
    static constexpr u32 SHARED = STAGES * STAGE + 1024 + 256;
    // Runs of a row, in whole steps of four units: its chunks.
    static __host__ __device__ constexpr u32 chunks(u32 k) { return steps(k) * W::RUNS; }
    static __host__ __device__ constexpr u32 steps(u32 k) { return (k + 4 * W::UNIT - 1) / (4 * W::UNIT); }
};

// Rows 8 * group .. + 8 of x as bf16; `rows(i)`: row i or null, which is zeros. Blocks of 256 threads, a warp a chunk,
// which gridDim.y of them share.
template <class W, class Rows>
__device__ __forceinline__ void pack(u32 k, u32 group, u32 n_groups, uint4* packed, const Rows& rows) {
    const u32 lane = threadIdx.x % 32, piece = lane % 8, n_chunks = Wide<W>::chunks(k);
    const float* row[2] = {rows(8 * group + lane / 8), rows(8 * group + lane / 8 + 4)};
    for (u32 chunk = blockIdx.y * 8 + threadIdx.x / 32; chunk < n_chunks; chunk += gridDim.y * 8) {
        const u32 step = chunk / W::RUNS, r = chunk % W::RUNS;
        float v[2][8];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            // Values 4q, 4q + 1 of the run are positions 2t, 2t + 1 of product q, the two behind them 2t + 8, 2t + 9.
            const u32 at = 16 * run_index<W>(4 * step + t, r) + 2 * piece;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float2 pair = make_float2(0.0f, 0.0f);
                if (W::BLOCK > 1 ? row[i] && at < k : row[i] && k % 2 == 0 && at + 2 <= k) {
                    pair = *(const float2*)(row[i] + at);
                } else if (W::BLOCK == 1 && row[i]) {
                    if (at < k) pair.x = row[i][at];
                    if (at + 1 < k) pair.y = row[i][at + 1];
                }
                v[i][2 * t] = pair.x, v[i][2 * t + 1] = pair.y;
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 r8 = lane / 8 + 4 * i;
            u32 pairs[4], rest[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                pairs[j] = bf16_pair(v[i][2 * j], v[i][2 * j + 1]);
                rest[j] = Wide<W>::SPLIT ? bf16_rest(v[i][2 * j], v[i][2 * j + 1], pairs[j]) : 0;
            }
            uint4* to = packed + ((u64)chunk * Wide<W>::PANELS * n_groups + group) * 64 + 8 * r8 + (piece ^ r8);
            *to = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            if (Wide<W>::SPLIT) to[(u64)n_groups * 64] = make_uint4(rest[0], rest[1], rest[2], rest[3]);
        }
    }
}

#if HAS_WGMMA
// Run `r` of a unit as eight pairs of bf16, and what rounding left of F32.
template <class W>
__device__ __forceinline__ void wide_operands(const typename W::Raw& raw, bool is_there, u32 unit, int r, u32 (&a)[8],
                                              u32 (&rest)[8]) {
    if constexpr (!W::IS_FLOAT && W::SMALL) {
        operands<W>(raw, is_there, unit, r, a);
        return;
    }
    float v[16];
    decode_run<W>(raw, unit, r, v);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        a[j] = is_there ? bf16_pair(v[2 * j], v[2 * j + 1]) : 0;
        rest[j] = Wide<W>::SPLIT && is_there ? bf16_rest(v[2 * j], v[2 * j + 1], a[j]) : 0;
    }
}

template <int N>
__device__ __forceinline__ void wide_chunk(float* acc, const u32 (&a)[2][8], u64 b) {
#pragma unroll
    for (int q = 0; q < 4; q++) wgmma<N>(acc, a[0][2 * q], a[1][2 * q], a[0][2 * q + 1], a[1][2 * q + 1], b + 2 * q);
}

// The products of a chunk; `b` and `b_rest` are its panels.
template <class W, int N>
__device__ __forceinline__ void wide_chunks(float* acc, const u32 (&a)[2][8], const u32 (&rest)[2][8], u64 b,
                                            u64 b_rest) {
    wgmma_fence();
    wide_chunk<N>(acc, a, b);
    if (Wide<W>::SPLIT) {
        wide_chunk<N>(acc, a, b_rest);
        wide_chunk<N>(acc, rest, b);
    }
    wgmma_commit();
}

// `store(col, sum, sum_of_second)` for every column below n_cols of a thread's sums: columns 8n + 2t and 8n + 2t + 1 of
// its two rows are sums 4n .. 4n + 4.
template <int N, class Store>
__device__ __forceinline__ void each_column(const float (&sums)[N], u32 thread, u32 n_cols, const Store& store) {
#pragma unroll
    for (int n = 0; n < N / 4; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 col = 8 * n + thread % 4 * 2 + i;
            if (col < n_cols) store(col, sums[4 * n + i], sums[4 * n + 2 + i]);
        }
    }
}

// Columns of a tile, from `8 * group` on.
struct WideColumns {
    u32 group, n_cols;
};

// The products of a block's rows of weights with packed columns, over steps `first_step` to `end_step` of four units
// each. `rows(i)`: row i of the two of this thread, as operand rows g and g + 8. `columns()`: the tile's columns; all
// threads call it once, after the first weights have been asked for. It waits for the grids before, and without columns
// nothing is done. `finish(thread, sums)` stores what the thread has (`each_column`). Dynamic shared memory: SHARED
// bytes.
template <class T, class Rows, class Columns, class Finish>
__device__ __forceinline__ void wide(u32 k, u32 first_step, u32 end_step, const uint4* packed, u32 n_groups, u8* shared,
                                     const Rows& rows, const Columns& columns, const Finish& finish) {
    typedef typename T::W W;
    // Rows end with a step.
    constexpr bool WHOLE = W::BLOCK % (4 * W::UNIT) == 0;
    const u32 ring = (address_in_shared(shared) + 1023) / 1024 * 1024, full = ring + T::STAGES * T::STAGE;
    const u32 empty = full + 8 * T::STAGES;
    volatile u64* source = (u64*)(shared + (empty + 8 * T::STAGES - address_in_shared(shared)));
    const u32 units = (k + W::UNIT - 1) / W::UNIT, steps = end_step - first_step;
    const u32 t = threadIdx.x % 4;
    constexpr u32 PIECES = W::RUNS / T::EACH, STEP_BYTES = WHOLE ? 4 * W::UNIT / W::BLOCK * W::BYTES : 0;
    // Where few warps share a multiprocessor weights are asked for a step ahead.
    constexpr bool FAR = T::COLS > 32 && T::AHEAD == 1;
    const u32 n_pieces = steps * PIECES;
    const Row row[2] = {rows(0), rows(1)};
    typename W::Raw raw[T::AHEAD][2];
    const auto load = [&](u32 step, int slot) {
        const u32 wanted = 4 * (first_step + step) + t, unit = WHOLE ? wanted : min(wanted, units - 1);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            W::load(row[i], unit, raw[slot][i]);
            if (FAR && STEP_BYTES > 0 && step + 1 < steps) {
                prefetch(row[i].q + (u64)(first_step + step + 1) * STEP_BYTES + t * (STEP_BYTES / 4));
            }
        }
    };
    load(0, 0);
    if (T::AHEAD > 1 && steps > 1) load(1, T::AHEAD - 1);
    if (T::LATE) {
        // Few blocks read all weights at once.
        const u64 row_bytes = (u64)k / W::BLOCK * W::BYTES, n_steps = T::steps(k), end = row_bytes * end_step / n_steps;
        for (u64 at = row_bytes * (first_step + 2) / n_steps + 128 * t; at < end; at += 512) {
            prefetch_far(row[0].q + at), prefetch_far(row[1].q + at);
        }
    }
    const WideColumns of = columns();
    if (of.n_cols == 0) return;
    const u32 n_wide = (of.n_cols + 15) / 16;
    // One thread fills; the source is in shared memory, since registers are few.
    const auto fill = [&](u32 piece) {
        const u32 stage = piece % T::STAGES, bytes = n_wide * 2048;
        const u64 from = source[0], stride = source[1];
        barrier_expect(full + 8 * stage, bytes * T::PANELS * T::EACH);
#pragma unroll
        for (u32 i = 0; i < T::PANELS * T::EACH; i++) {
            bulk_copy(ring + stage * T::STAGE + i * (T::CHUNK / T::PANELS),
                      (const u8*)(from + (piece * T::PANELS * T::EACH + i) * stride), bytes, full + 8 * stage);
        }
    };
    if (threadIdx.x == 0) {
        const u64 stride = (u64)n_groups * 1024;
        source[0] = (u64)packed + (u64)of.group * 1024 + first_step * (T::PANELS * W::RUNS) * stride, source[1] = stride;
        for (u32 i = 0; i < T::STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, WIDE_THREADS / 32);
        }
        fence_async();
        if (FAR) {
            for (u32 i = 0; i < min(T::STAGES, n_pieces); i++) fill(i);
        }
    }
    __syncthreads();
    if (!FAR && threadIdx.x == 0) {
        for (u32 i = 0; i < min(T::STAGES, n_pieces); i++) fill(i);
    }

    float acc[T::COLS / 2];
#pragma unroll
    for (int i = 0; i < T::COLS / 2; i++) acc[i] = 0.0f;
    // A piece's stage and parity come from its number, since registers are few.
    u32 a[T::LATE ? 2 : 1][2][8];
    const auto enter = [&](u32 piece) {
        // One thread fills the stage that all warps left a piece ago.
        if (threadIdx.x == 0 && piece >= 1 && piece - 1 + T::STAGES < n_pieces) {
            const u32 left = piece - 1;
            barrier_wait(empty + 8 * (left % T::STAGES), left / T::STAGES % 2);
            fill(left + T::STAGES);
        }
        __syncwarp();
        barrier_wait(full + 8 * (piece % T::STAGES), piece / T::STAGES % 2);
    };
    const auto leave = [&](u32 piece) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * (piece % T::STAGES));
    };
#pragma unroll 1
    for (u32 two = 0; two < steps; two += T::AHEAD) {
#pragma unroll
        for (int flat = 0; flat < T::AHEAD * W::RUNS; flat++) {
            const int slot = flat / W::RUNS, r = flat % W::RUNS, turn = T::LATE ? flat % 2 : 0;
            const u32 step = two + slot, unit = 4 * (first_step + step) + t;
            if (T::AHEAD > 1 && step >= steps) break;
            const u32 piece = step * PIECES + r / T::EACH;
            if (!T::LATE && r % T::EACH == 0) enter(piece);
            u32 rest[2][8];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                wide_operands<W>(raw[slot][i], WHOLE || unit < units, unit, r, a[turn][i], rest[i]);
            }
            if (r == W::RUNS - 1 && step + T::AHEAD < steps) load(step + T::AHEAD, slot);
            if (T::LATE) {
                wgmma_wait();
                if (r % T::EACH == 0 && (step > 0 || r > 0)) leave(piece - 1);
            }
            if (T::LATE && r % T::EACH == 0) enter(piece);
            const u32 at = ring + piece % T::STAGES * T::STAGE + r % T::EACH * T::CHUNK;
            const u64 b = wgmma_matrix(at), b_rest = wgmma_matrix(at + T::CHUNK / T::PANELS);
            switch (n_wide) {
#define WIDTH(N)                                                                          \
    case N / 16:                                                                          \
        if constexpr (N <= T::COLS) wide_chunks<W, N>(acc, a[turn], rest, b, b_rest);     \
        break;
                WIDTH(16)
                WIDTH(32)
                WIDTH(48)
                WIDTH(64)
                WIDTH(80)
                WIDTH(96)
                WIDTH(112)
                WIDTH(128)
#undef WIDTH
            }
            if (!T::LATE) wgmma_wait();
            if (!T::LATE && r % T::EACH == T::EACH - 1) leave(piece);
        }
    }
    if (T::LATE) {
        wgmma_wait();
        keep(acc);
    }
    finish(thread_anew(), acc);
}
#endif
