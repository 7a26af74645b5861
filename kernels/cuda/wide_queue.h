// The products of `wide.h` by one block a multiprocessor, which goes from tile to tile: for experts with more columns
// than a tile of `wide.h`, since every tile unpacks its weights again. Three warpgroups of 64 rows each share up to 160
// columns; the ring goes on from a tile to the next, so that a warpgroup may store while the others multiply. With 168
// registers a run is unpacked while the run before is multiplied.
#pragma once

#include "cuda/wide.h"

#if HAS_WGMMA
constexpr u32 QUEUE_THREADS = 384, QUEUE_ROWS = QUEUE_THREADS / 2;

template <class W>
struct WideQueue {
    static constexpr u32 PANELS = Wide<W>::PANELS;
    static constexpr int COLS = Wide<W>::SPLIT ? 48 : W::UNIT == 64 ? 128 : 160;
    static constexpr u32 STAGE = COLS * 128 * PANELS;
    static constexpr u32 STAGES = 9;
    // The ring begins at a multiple of 1024; barriers and what is filled next lie behind it.
    static constexpr u32 SHARED = STAGES * STAGE + 1024 + 256;
};

// A block of rows of weights, and columns from the packed row 8 * group on; what else it is, `find` and `finish` know.
struct WideTile {
    u32 row_block, group, n_cols, expert, begin;
};

// What the filling thread copies next.
struct WideFill {
    u64 from, stride;
    u32 index, chunk, bytes, filled;
};

// A block takes tiles blockIdx.x, blockIdx.x + gridDim.x, ... below n_tiles. `find(index)` returns a tile, `rows(tile,
// i)` row i of the two of this thread, as operand rows g and g + 8, and `finish(tile, thread, sums)` stores what the
// thread has. Dynamic shared memory: SHARED bytes. All threads have waited for the grids before.
template <class W, class Find, class Rows, class Finish>
__device__ __forceinline__ void wide_queue(u32 k, const uint4* packed, u32 n_groups, u32 n_tiles, u8* shared,
                                           const Find& find, const Rows& rows, const Finish& finish) {
    typedef WideQueue<W> T;
    // With an even number of runs their operands take turns, and one is unpacked while the other is multiplied.
    constexpr bool LATE = W::RUNS % 2 == 0;
    const u32 ring = (address_in_shared(shared) + 1023) / 1024 * 1024, full = ring + T::STAGES * T::STAGE;
    const u32 empty = full + 8 * T::STAGES;
    volatile WideFill* next = (WideFill*)(shared + (empty + 8 * T::STAGES - address_in_shared(shared)));
    const u32 units = (k + W::UNIT - 1) / W::UNIT, steps = (units + 3) / 4, t = threadIdx.x % 4;
    if (blockIdx.x >= n_tiles) return;

    // One thread fills the ring, from tile to tile; its state lies in shared memory, since registers are few.
    const auto aim = [&](u32 index) {
        next->index = index, next->chunk = 0;
        if (index >= n_tiles) return;
        const WideTile tile = find(index);
        next->from = (u64)packed + (u64)tile.group * 1024;
        next->bytes = (tile.n_cols + 15) / 16 * 2048;
    };
    const auto fill = [&]() {
        if (next->index >= n_tiles) return;
        const u32 filled = next->filled, stage = filled % T::STAGES, bytes = next->bytes, chunk = next->chunk;
        const u64 from = next->from, stride = next->stride;
        if (filled >= T::STAGES) barrier_wait(empty + 8 * stage, filled / T::STAGES % 2 ^ 1);
        barrier_expect(full + 8 * stage, bytes * T::PANELS);
#pragma unroll
        for (u32 panel = 0; panel < T::PANELS; panel++) {
            bulk_copy(ring + stage * T::STAGE + panel * (T::STAGE / T::PANELS),
                      (const u8*)(from + (chunk * T::PANELS + panel) * stride), bytes, full + 8 * stage);
        }
        next->filled = filled + 1;
        if (chunk + 1 < Wide<W>::chunks(k)) {
            next->chunk = chunk + 1;
        } else {
            aim(next->index + gridDim.x);
        }
    };
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < T::STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, QUEUE_THREADS / 32);
        }
        fence_async();
        next->stride = (u64)n_groups * 1024, next->filled = 0;
        aim(blockIdx.x);
        for (u32 i = 0; i + 2 < T::STAGES; i++) fill();
    }
    __syncthreads();

    u32 stage = 0, parity = 0;
    WideTile tile = find(blockIdx.x);
    Row row[2] = {rows(tile, 0), rows(tile, 1)};
    typename W::Raw raw[2];
    const auto load = [&](u32 step) {
        const u32 unit = min(4 * step + t, units - 1);
#pragma unroll
        for (int i = 0; i < 2; i++) W::load(row[i], unit, raw[i]);
    };
    const auto leave = [&](u32 stage) {
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * stage);
    };
    load(0);
#pragma unroll 1
    for (u32 index = blockIdx.x; index < n_tiles; index += gridDim.x) {
        const u32 n_wide = (tile.n_cols + 15) / 16;
        float acc[T::COLS / 2];
#pragma unroll
        for (int i = 0; i < T::COLS / 2; i++) acc[i] = 0.0f;
        u32 a[2][2][8], rest[2][8];
#pragma unroll 1
        for (u32 step = 0; step < steps; step++) {
            const u32 unit = 4 * step + t;
#pragma unroll
            for (int r = 0; r < W::RUNS; r++) {
#pragma unroll
                for (int i = 0; i < 2; i++) wide_operands<W>(raw[i], unit < units, unit, r, a[r % 2][i], rest[i]);
                if (r == W::RUNS - 1 && step + 1 < steps) load(step + 1);
                if (LATE) {
                    wgmma_wait();
                    if (step > 0 || r > 0) leave(stage == 0 ? T::STAGES - 1 : stage - 1);
                }
                if (threadIdx.x == 0) fill();
                __syncwarp();
                barrier_wait(full + 8 * stage, parity);
                const u64 b = wgmma_matrix(ring + stage * T::STAGE);
                const u64 b_rest = wgmma_matrix(ring + stage * T::STAGE + T::STAGE / T::PANELS);
                switch (n_wide) {
#define WIDTH(N)                                                                               \
    case N / 16:                                                                               \
        if constexpr (N <= T::COLS) wide_chunks<W, N>(acc, a[r % 2], rest, b, b_rest);         \
        break;
                    WIDTH(16)
                    WIDTH(32)
                    WIDTH(48)
                    WIDTH(64)
                    WIDTH(80)
                    WIDTH(96)
                    WIDTH(112)
                    WIDTH(128)
                    WIDTH(144)
                    WIDTH(160)
#undef WIDTH
                }
                if (!LATE) {
                    wgmma_wait();
                    leave(stage);
                }
                if (++stage == T::STAGES) stage = 0, parity ^= 1;
            }
        }
        const WideTile now = tile;
        if (index + gridDim.x < n_tiles) {
            tile = find(index + gridDim.x);
            row[0] = rows(tile, 0), row[1] = rows(tile, 1);
            load(0);
        }
        if (LATE) {
            wgmma_wait();
            leave(stage == 0 ? T::STAGES - 1 : stage - 1);
        }
        keep(acc);
        finish(now, thread_anew(), acc);
    }
}
#endif
