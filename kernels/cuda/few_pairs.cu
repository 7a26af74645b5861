// few_pairs: for every pair (token, slot) of several rows the product of its chosen expert, weights through shared
// memory (`few.h`): few_pairs_gated act(gate) * up behind a norm, few_pairs a plain one. An expert's weights are read
// once for all of its pairs.
//
// grid (tiles of `warps * each` rows of weights for every FEW_SHARED_ROWS rows of the shared expert, then for every
// pair), block `32 * warps`. Blocks of an expert's first pair take all of its pairs, two columns at a time; those of
// its other pairs leave. A warp has `each` rows of weights, 4 or 8 lanes a row, so that lanes which read the same
// activations read them at once. few_pairs_gated launches the next kernel behind its wait, so that few_pairs knows its
// ids before it waits, and copies its weights.
#include "cuda/few.h"
#include WEIGHT_HEADER

extern __shared__ uint4 shared[];

// Maximum number of rows.
#define MAX_COLS 64u
// Rows that share a block of the shared expert.
#define FEW_SHARED_ROWS 4u

// The products of the warp's rows with COLS staged columns: `store(i, col, sum, sum_up)` gets each once.
template <class W, int PARTS, int COLS, class Store>
__device__ __forceinline__ void few_rows_of_pairs(const FewShared& s, u32 k, FewRows rows, u32 row_bytes,
                                                  const Store& store) {
    const u32 units = (k + W::UNIT - 1) / W::UNIT, runs = ((k + 15) / 16 + 31) / 32 * 32;
    const u32 lanes = units % 8 == 0 ? 8 : 4, lane = threadIdx.x % lanes, group = threadIdx.x % 32 / lanes;
    const Staged<W, COLS> staged = {s.staged, runs};
    const u8* first = s.weights + PARTS * rows.first * row_bytes;
    if (rows.n > 0) barrier_wait(s.barriers + threadIdx.x / 32 * 8, 0);
#pragma unroll 1
    for (u32 begin = 0; begin < rows.n; begin += 32 / lanes) {
        const u32 i = begin + group;
        const u8* row = first + min(i, rows.n - 1) * row_bytes;
        float sum[PARTS][COLS];
#pragma unroll
        for (int j = 0; j < PARTS * COLS; j++) sum[j / COLS][j % COLS] = 0.0f;
#pragma unroll 2
        for (u32 unit = lane; unit < units; unit += lanes) {
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                const u8* at = row + part * rows.n * row_bytes;
                typename W::Raw raw;
                W::load({at, at, at, k}, unit, raw);
                staged.dot(raw, unit, 0, sum[part]);
            }
        }
#pragma unroll
        for (int j = 0; j < PARTS * COLS; j++) {
            float& total = sum[j / COLS][j % COLS];
            for (u32 step = lanes / 2; step > 0; step /= 2) total += __shfl_xor_sync(FULL_MASK, total, step);
        }
#pragma unroll
        for (int col = 0; col < COLS; col++) {
            if (lane == col && i < rows.n) store(rows.first + i, col, sum[0][col], sum[PARTS - 1][col]);
        }
    }
}

template <int PARTS>
__device__ __forceinline__ void products(const FewPairs& f) {
    typedef VecOf<WEIGHT>::type W;
    __shared__ u32 pairs[MAX_COLS];
    const Experts& a = f.op;
    if (PARTS == 1) PDL_LAUNCH();
    const u32 n_pairs = a.rows * a.n_used, tile_rows = blockDim.x / 32 * f.each, lane = threadIdx.x % 32;
    const u32 tiles = (a.n + tile_rows - 1) / tile_rows, item = blockIdx.x / tiles;
    const u32 n_shared = a.n_shared ? (a.rows + FEW_SHARED_ROWS - 1) / FEW_SHARED_ROWS : 0;
    const bool is_shared = item < n_shared;
    const u32 pair = item - n_shared;
    const u32 first = (blockIdx.x - item * tiles) * tile_rows, count = min(tile_rows, a.n - first);
    const u32 runs = ((a.k + 15) / 16 + 31) / 32 * 32, row_bytes = a.k / W::BLOCK * W::BYTES;
    const FewShared s = few_shared<W>(shared, FEW_WARPS, 2, runs);
    const u32 of_warp = min(threadIdx.x / 32 * f.each, count);
    const FewRows rows = {of_warp, min(f.each, count - of_warp)};
    const auto copy = [&](u32 expert) {
        const Matrix &w = is_shared ? a.shared_w : a.w, &up = is_shared ? a.shared_up : a.up;
        const u64 at = ((u64)expert * a.n + first) * row_bytes;
        few_copy<PARTS>(s, rows, row_bytes, [&](u32 i, int part) { return (part ? up.q : w.q) + at + i * row_bytes; });
    };
    few_barrier(s);
    few_ahead(a.prologue, a.k);
    if (PARTS == 2) {
        if (is_shared) copy(0);
        PDL_WAIT();
        PDL_LAUNCH();
    }
    u32 expert = 0, n = min(FEW_SHARED_ROWS, a.rows - item * FEW_SHARED_ROWS);
    bool is_bad = false;
    if (!is_shared) {
        expert = a.ids[pair];
        // An id that names no expert never becomes an address: the pair's row is zero.
        is_bad = expert >= a.n_expert;
        n = 0;
        for (u32 from = 0; from < n_pairs; from += 32) {
            const u32 other = from + lane, id = other < n_pairs ? a.ids[other] : expert + 1;
            const u32 hits = __ballot_sync(FULL_MASK, id == expert);
            if (n == 0 && hits != 0 && from + __ffs(hits) - 1 != pair && !is_bad) {
                // A block of an earlier pair has it.
                if (PARTS == 1) PDL_WAIT();
                return;
            }
            const u32 place = n + __popc(hits & ((1u << lane) - 1));
            if (threadIdx.x < 32 && id == expert && place < MAX_COLS) pairs[place] = other;
            n += __popc(hits);
        }
        n = min(n, MAX_COLS);
    }
    if (!is_bad && (PARTS == 1 || !is_shared)) copy(expert);
    if (PARTS == 1) PDL_WAIT();
    if (is_bad) {
        for (u32 i = threadIdx.x; i < count; i += blockDim.x) a.out[(u64)pair * a.n + first + i] = 0.0f;
        return;
    }
    // The column's pair, or the shared expert's row.
    const auto pair_of = [&](u32 col) { return is_shared ? item * FEW_SHARED_ROWS + col : pairs[col]; };
    const auto x_of = [&](u32 col) {
        const u32 at = pair_of(col);
        const float* x = is_shared && PARTS == 1 ? f.shared_x : a.x;
        return x + (u64)(is_shared || a.x_per_pair ? at : at / a.n_used) * a.k;
    };
    float factor = 1.0f;
    const auto store = [&](u32 col, u32 i, float sum, float up) {
        const u64 at = (u64)expert * a.n + first + i;
        if (!is_shared && a.bias) sum += a.bias[at];
        if (PARTS == 2 && !is_shared && a.up_bias) up += a.up_bias[at];
        float* out = (is_shared ? a.shared_out : a.out) + (u64)pair_of(col) * a.n + first + i;
        *out = PARTS == 2 ? gated(a.act, sum, up, a.alpha, a.limit) : sum;
    };
#pragma unroll 1
    for (u32 col = 0; col < n; col += 2) {
        // The pairs are listed; whoever read the columns before has done so.
        __syncthreads();
        if (col + 1 == n) {
            const Staged<W, 1> staged = {s.staged, runs};
            float squares[1] = {};
            few_stage(staged, 0, x_of(col), a.prologue, a.k, threadIdx.x, blockDim.x, squares[0]);
            if (a.prologue.kind == NORMED) few_squares(squares, s.squares);
            __syncthreads();
            factor = few_factor(a.prologue, s.squares, 0, a.k);
            few_rows_of_pairs<W, PARTS, 1>(s, a.k, rows, row_bytes, [&](u32 i, int, float sum, float up) {
                store(col, i, sum * factor, up * factor);
            });
        } else {
            const Staged<W, 2> staged = {s.staged, runs};
            float squares[2] = {};
            few_stage(staged, 0, x_of(col), a.prologue, a.k, threadIdx.x, blockDim.x, squares[0]);
            few_stage(staged, 1, x_of(col + 1), a.prologue, a.k, threadIdx.x, blockDim.x, squares[1]);
            if (a.prologue.kind == NORMED) few_squares(squares, s.squares);
            __syncthreads();
            factor = few_factor(a.prologue, s.squares, 0, a.k);
            const float second = few_factor(a.prologue, s.squares, 1, a.k);
            few_rows_of_pairs<W, PARTS, 2>(s, a.k, rows, row_bytes, [&](u32 i, int j, float sum, float up) {
                const float r = j ? second : factor;
                store(col + j, i, sum * r, up * r);
            });
        }
    }
}

KERNEL __launch_bounds__(128, 5) few_pairs(const __grid_constant__ FewPairs f) { products<1>(f); }
KERNEL __launch_bounds__(128, 5) few_pairs_gated(const __grid_constant__ FewPairs f) { products<2>(f); }
