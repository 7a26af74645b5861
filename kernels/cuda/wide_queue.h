// The products of `wide.h` by one block a multiprocessor, which goes from tile to tile: for experts with more columns
// than a tile of `wide.h`, since every tile unpacks its weights again. Three warpgroups of 64 rows each share up to 144
// columns; the ring goes on from a tile to the next, so that a warpgroup may store while the others multiply. With 168
// registers a run is unpacked while the run before is multiplied.
#pragma once

#include "cuda/wide.h"

#if HAS_WGMMA
constexpr u32 QUEUE_THREADS = 384, QUEUE_ROWS = QUEUE_THREADS / 2;

template <class W>
struct WideQueue {
    static constexpr u32 PANELS = Wide<W>::PANELS;
    static constexpr int COLS = Wide<W>::SPLIT ? 48 : W::UNIT == 64 ? 128 : 144;
    static constexpr int EACH = W::RUNS % 2 == 0 ? 2 : 1; // chunks of a stage
    static constexpr u32 CHUNK = COLS * 128 * PANELS, STAGE = EACH * CHUNK, STAGES = 8 / EACH;
    // The ring begins at a multiple of 1024; barriers, what is filled next and the warps' tiles follow.
    static constexpr u32 SHARED = STAGES * STAGE + 1024 + 512;
};

// A block of rows of weights, and columns from the packed row 8 * group on; what else it is, `find` and `finish` know.
struct WideTile {
    u32 row_block, group, n_cols, expert, begin;
};

// A number that a generic lambda takes for a constant.
template <int N>
struct Constant {
    static constexpr int value = N;
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
    // A warp's tile, since registers are few.
    volatile WideTile* const mine = (WideTile*)(next + 1) + threadIdx.x / 32;
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
        barrier_expect(full + 8 * stage, bytes * T::PANELS * T::EACH);
#pragma unroll
        for (u32 panel = 0; panel < T::PANELS * T::EACH; panel++) {
            bulk_copy(ring + stage * T::STAGE + panel * (T::CHUNK / T::PANELS),
                      (const u8*)(from + (chunk * T::PANELS + panel) * stride), bytes, full + 8 * stage);
        }
        next->filled = filled + 1;
        if (chunk + T::EACH < Wide<W>::chunks(k)) {
            next->chunk = chunk + T::EACH;
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

    u32 entered = 0; // stages so far
    Row row[2];
    const auto turn_to = [&](u32 index) {
        const WideTile tile = find(index);
        row[0] = rows(tile, 0), row[1] = rows(tile, 1);
        mine->row_block = tile.row_block, mine->group = tile.group, mine->n_cols = tile.n_cols;
        mine->expert = tile.expert, mine->begin = tile.begin;
        __syncwarp();
        return tile.n_cols;
    };
    u32 n_cols = turn_to(blockIdx.x);
    typename W::Raw raw[2];
    const auto load = [&](u32 step) {
        const u32 unit = min(4 * step + t, units - 1);
#pragma unroll
        for (int i = 0; i < 2; i++) W::load(row[i], unit, raw[i]);
        // A step's bytes of a row are in a line or two.
        const u32 far = step + 4;
        if (t < 2 && far < steps) {
            prefetch_far((t ? row[1].q : row[0].q) + (u64)far * (4 * W::UNIT * W::BYTES / W::BLOCK));
        }
    };
    const auto leave = [&](u32 number) {
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * (number % T::STAGES));
    };
    load(0);
#pragma unroll 1
    for (u32 index = blockIdx.x; index < n_tiles; index += gridDim.x) {
        float acc[T::COLS / 2];
#pragma unroll
        for (int i = 0; i < T::COLS / 2; i++) acc[i] = 0.0f;
        u32 a[2][2][8], rest[2][8];
        // Products of `Width` columns, of which a tile may have fewer.
        const auto multiply = [&](auto width) {
            typedef decltype(width) Width;
#pragma unroll 1
            for (u32 step = 0; step < steps; step++) {
                const u32 unit = 4 * step + t;
#pragma unroll
                for (int r = 0; r < W::RUNS; r++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) wide_operands<W>(raw[i], unit < units, unit, r, a[r % 2][i], rest[i]);
                    if (r == W::RUNS - 1 && step + 1 < steps) load(step + 1);
                    if (LATE) wgmma_wait();
                    if (r % T::EACH == 0) {
                        if (LATE && (step > 0 || r > 0)) leave(entered - 1);
                        if (threadIdx.x == 0) fill();
                        __syncwarp();
                        barrier_wait(full + 8 * (entered % T::STAGES), entered / T::STAGES % 2);
                    }
                    const u32 at = ring + entered % T::STAGES * T::STAGE + r % T::EACH * T::CHUNK;
                    const u64 b = wgmma_matrix(at), b_rest = wgmma_matrix(at + T::CHUNK / T::PANELS);
                    wide_chunks<W, Width::value>(acc, a[r % 2], rest, b, b_rest);
                    if (!LATE) wgmma_wait();
                    if (r % T::EACH == T::EACH - 1) {
                        if (!LATE) leave(entered);
                        entered++;
                    }
                }
            }
            wgmma_wait();
        };
        // More widths than these two, and for wide units more than one, do not leave the registers that products in
        // flight need: the assembler would have each wait for the one before.
        constexpr int FEW = W::UNIT == 64 ? T::COLS : T::COLS * 3 / 4 / 16 * 16;
        if (FEW == T::COLS || n_cols > FEW) {
            multiply(Constant<T::COLS>());
        } else {
            multiply(Constant<FEW>());
        }
        if (LATE) leave(entered - 1);
        const WideTile now = {mine->row_block, mine->group, mine->n_cols, mine->expert, mine->begin};
        __syncwarp();
        if (index + gridDim.x < n_tiles) {
            n_cols = turn_to(index + gridDim.x);
            load(0);
        }
        keep(acc);
        finish(now, thread_anew(), acc);
    }
}
#endif
