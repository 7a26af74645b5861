// Products of tiles of few columns (`wide.h`) for types whose steps are a block of each row: weights come through
// shared memory, copied two steps ahead, so that no register waits for memory.
//
// A warp copies the blocks of its 16 rows and waits for no other. Activations come in bulk copies, a step of four
// chunks at a time, a chunk by each of the first four warps, and only groups of 8 columns that a tile has. A product is
// in flight while the next operands are unpacked. A block may take several blocks of rows one after the other: the next
// one's weights are on their way while sums are stored, and activations that have room in the ring stay there.
#pragma once

#include "cuda/async.h"
#include "cuda/batch.h"
#include "cuda/wide.h"

// Tiles of up to MOST columns, of which shared memory has RING chunks.
template <class Weight, int MOST, int RING>
struct WideStaged {
    typedef StagedOf<Weight> Of;
    typedef typename Of::type W;
    static constexpr bool IS_STAGED = true;
    static constexpr int COLS = MOST, RUNS = W::RUNS;
    static constexpr u32 WARPS = WIDE_THREADS / 32;
    // Bytes of a warp's copies: two steps of 16 rows.
    static constexpr u32 PITCH = 16 * Of::PIECES, COPIES = 2 * 16 * PITCH;
    static constexpr u32 ACTIVATIONS = RING * MOST * 128;
    // The ring begins at a multiple of 1024; weights and barriers follow it.
    static constexpr u32 SHARED = ACTIVATIONS + WARPS * COPIES + 1024 + 256;
};

#if HAS_WGMMA
// Weights of a warp on their way.
template <class T>
struct StagedRows {
    typedef typename T::W W;
    const u8* row[2];    // of the step that is asked for next
    u8* copies;
    u32 steps, left;     // of a row, and of all rows those that are not asked for
    u32 step, stage;     // that are asked for next
    u64 skipped;         // from the end of a row to the block of rows after

    // Four lanes copy their two rows: whole fours of pieces, then what is left of both.
    __device__ __forceinline__ void copy() {
        const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        if (left > 0) {
            u8* const to = copies + stage * (16 * T::PITCH) + g * T::PITCH;
            const u8* from[2];
#pragma unroll
            for (int i = 0; i < 2; i++) from[i] = (const u8*)((u64)row[i] & ~15ull);
            constexpr u32 FOURS = T::Of::PIECES / 4, LEFT = T::Of::PIECES % 4;
#pragma unroll
            for (u32 i = 0; i < 2 * FOURS; i++) {
                const u32 at = 16 * (4 * (i / 2) + t);
                copy_async(to + i % 2 * 8 * T::PITCH + at, from[i % 2] + at);
            }
            static_assert(LEFT <= 2, "two rows' last pieces are four at most");
            if (t < 2 * LEFT) {
                const u32 i = t / LEFT, at = 16 * (4 * FOURS + t % LEFT);
                copy_async(to + i * 8 * T::PITCH + at, (i ? from[1] : from[0]) + at);
            }
            step++, left--, stage ^= 1;
            u64 on = W::BYTES;
            if (step == steps) step = 0, on += skipped;
            row[0] += on, row[1] += on;
        }
        copy_async_commit();
    }
};

// Two steps of weights have been asked for.
template <class T, int N, class Finish>
__device__ __forceinline__ void wide_staged_tile(StagedRows<T>& weights, u32 n_blocks, const u32 (&first)[2],
                                                 const uint4* packed, u32 n_groups, u32 group, u32 n_cols, u8* shared,
                                                 const Finish& finish) {
    typedef typename T::W W;
    constexpr u32 CHUNK = N * 128, STAGE = T::RUNS * CHUNK, STAGES = T::ACTIVATIONS / STAGE;
    static_assert(T::RUNS == 4 && W::UNIT == 64 && W::BLOCK == 256, "a step is a block");
    const u32 aligned = (address_in_shared(shared) + 1023) / 1024 * 1024;
    const u32 full = aligned + T::ACTIVATIONS + T::WARPS * T::COPIES, empty = full + 8 * STAGES;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u8* const copies = weights.copies;
    const u32 steps = weights.steps;
    // Where a row has no more steps than the ring, each stays where it is.
    const bool stays = steps <= STAGES;
    u32 unfilled = stays ? steps : steps * n_blocks, next = 0;

    // The first four warps have a chunk each.
    const auto fill = [&](u32 stage, bool is_used, u32 parity) {
        if (unfilled == 0) return;
        if (lane == 0 && warp < T::RUNS) {
            const u32 bytes = (n_cols + 7) / 8 * 1024;
            if (is_used) barrier_wait(empty + 8 * stage, parity);
            barrier_expect(full + 8 * stage, bytes);
            const uint4* from = packed + ((u64)(next * T::RUNS + warp) * n_groups + group) * 64;
            bulk_copy(aligned + stage * STAGE + warp * CHUNK, from, bytes, full + 8 * stage);
        }
        __syncwarp();
        next = next + 1 == steps ? 0 : next + 1, unfilled--;
    };
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, T::RUNS);
            barrier_init(empty + 8 * i, T::WARPS);
        }
        fence_async();
    }
    __syncthreads();
    for (u32 i = 0; i + 1 < STAGES; i++) fill(i, false, 0);

    u32 stage = 0, before = STAGES - 1, parity = 0, of_copies = 0;
    bool is_used = false;
#pragma unroll 1
    for (u32 block = 0; block < n_blocks; block++) {
        float acc[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; i++) acc[i] = 0.0f;
#pragma unroll 1
        for (u32 step = 0; step < steps; step++) {
            copy_async_wait<1>();
            __syncwarp();
            typename W::Raw raw[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 off = W::BYTES % 16 == 0 ? 0 : (first[i] + step * W::BYTES) % 16;
                W::load_staged(copies + of_copies * (16 * T::PITCH) + (g + 8 * i) * T::PITCH + off, t, raw[i]);
            }
            of_copies ^= 1;
            __syncwarp();
            weights.copy();
            barrier_wait(full + 8 * stage, parity);
            const u64 b = wgmma_matrix(aligned) + stage * (STAGE / 16);
#pragma unroll
            for (int r = 0; r < T::RUNS; r++) {
                u32 a[2][8];
#pragma unroll
                for (int i = 0; i < 2; i++) batch_operands<W>(raw[i], true, t, r, a[i]);
#pragma unroll
                for (int q = 0; q < 4; q += 2) {
                    wgmma_fence();
#pragma unroll
                    for (int p = q; p < q + 2; p++) {
                        wgmma<N>(acc, a[0][2 * p], a[1][2 * p], a[0][2 * p + 1], a[1][2 * p + 1],
                                 b + r * (CHUNK / 16) + 2 * p);
                    }
                    wgmma_commit();
                    // No products are in flight where code branches: the assembler would have each wait for the one
                    // before.
                    if ((r == 0 || r == T::RUNS - 1) && q == 2) {
                        wgmma_wait();
                    } else {
                        wgmma_wait_but<1>();
                    }
                }
                // The stage of the step before, in this turn of the ring or in the last one, which most warps left long
                // ago.
                if (r == 0) fill(before, is_used, stage == 0 ? parity ^ 1 : parity);
            }
            is_used = true;
            if (lane == 0) barrier_arrive(empty + 8 * stage);
            before = stage;
            stage = stage + 1 == STAGES || (stays && stage + 1 == steps) ? 0 : stage + 1;
            if (stage == 0 && !stays) parity ^= 1;
        }
        keep(acc);
        finish(thread_anew(), block, acc);
    }
}

// The products of a block's rows of weights with packed columns, as `wide` has them; k is a multiple of a block. Blocks
// of rows after the first lie `stride` bytes apart, a multiple of 16; `finish` is told which one it stores.
template <class T, class Rows, class Columns, class Finish>
__device__ __forceinline__ void wide_staged(u32 k, u32 n_blocks, u64 stride, const uint4* packed, u32 n_groups,
                                            u8* shared, const Rows& rows, const Columns& columns,
                                            const Finish& finish) {
    u8* const copies = shared + (1024 - address_in_shared(shared) % 1024) % 1024 + T::ACTIVATIONS;
    const u32 steps = k / (u32)T::W::BLOCK;
    StagedRows<T> weights = {{rows(0).q, rows(1).q}, copies + threadIdx.x / 32 * T::COPIES, steps, steps * n_blocks, 0,
                             0, stride - (u64)steps * T::W::BYTES};
    const u32 first[2] = {(u32)(u64)weights.row[0], (u32)(u64)weights.row[1]};
    weights.copy();
    weights.copy();
    const WideColumns of = columns();
    if (of.n_cols == 0) {
        copy_async_wait<0>();
    } else if (of.n_cols <= T::COLS / 2) {
        wide_staged_tile<T, T::COLS / 2>(weights, n_blocks, first, packed, n_groups, of.group, of.n_cols, shared,
                                         finish);
    } else {
        wide_staged_tile<T, T::COLS>(weights, n_blocks, first, packed, n_groups, of.group, of.n_cols, shared, finish);
    }
}
#endif
