// few_pairs: for every pair (token, slot) of several rows the product of its chosen expert, weights through shared
// memory (`few.h`): few_pairs_gated act(gate) * up, few_pairs a plain one. An expert's weights are read once for all of
// its pairs. Activations come packed, behind their norm, and those of few_pairs_gated go out packed (`columns.h`): a
// block only copies them.
//
// grid (tiles of `warps * each` rows of weights for every FEW_SHARED_ROWS rows of the shared expert, then for every
// pair), block `32 * warps`. Blocks of an expert's first pair take all of its pairs, two columns at a time; those of
// its other pairs leave. A warp has `each` rows of weights, 4 or 8 lanes a row, so that lanes which read the same
// activations read them at once. few_pairs_gated launches the next kernel behind its wait, so that few_pairs knows its
// ids before it waits, and copies its weights.
#include "cuda/few.h"
#include "cuda/columns.h"
#include WEIGHT_HEADER

extern __shared__ uint4 shared[];

// Maximum number of rows.
#define MAX_COLS 64u
// Ids that a lane asks for at once.
#define IDS_AHEAD 4
// Rows that share a block of the shared expert.
#define FEW_SHARED_ROWS 4u
// Most rows of weights of a block of few_pairs_gated.
#define MAX_TILE 128u

// acc[col] += the products of a unit with columns whose runs each have a scale.
template <class W, int COLS>
__device__ __forceinline__ void dot_runs(const Staged<W, 1>& staged, u32 stride, const typename W::Raw& raw, u32 unit,
                                         float (&acc)[COLS]) {
    const u32 first = staged.slot(run_index<W>(unit, 0));
    if constexpr (VecOf<W>::IS_GROUPED) {
#pragma unroll
        for (int g = 0; g < W::RUNS / 2; g++) {
            const u32 at = first ^ staged.slot(2 * g);
            u32 one[4], two[4];
            float scale, min;
            W::group(raw, unit, g, one, two, scale, min);
#pragma unroll
            for (int col = 0; col < COLS; col++) {
                const Staged<W, 1> of = {staged.base + col * stride, staged.runs};
                const float2 d = of.scales(0)[at], e = of.scales(0)[at ^ 1];
                const float a = (float)(int)of.dots(one, of.base[at], 0);
                const float b = (float)(int)of.dots(two, of.base[at ^ 1], 0);
                acc[col] = fmaf(scale, fmaf(d.x, a, e.x * b), acc[col]);
                acc[col] = fmaf(-min, d.y + e.y, acc[col]);
            }
        }
    } else if constexpr (Vec<W>::FORM == FORM_I8) {
#pragma unroll
        for (int r = 0; r < W::RUNS; r++) {
            const u32 at = first ^ staged.slot(W::PAIRED ? 2 * r : r);
            u32 w[4];
            float scale, min;
            W::run(raw, unit, r, w, scale, min);
            if (W::OFFSET != 0) min = W::HAS_MIN ? fmaf((float)W::OFFSET, scale, min) : (float)W::OFFSET * scale;
#pragma unroll
            for (int col = 0; col < COLS; col++) {
                const Staged<W, 1> of = {staged.base + col * stride, staged.runs};
                const float2 d = of.scales(0)[at];
                acc[col] = fmaf(scale, d.x * (float)(int)of.dots(w, of.base[at], 0), acc[col]);
                if (W::OFFSET != 0 || W::HAS_MIN) acc[col] = fmaf(min, d.y, acc[col]);
            }
        }
    }
}

// acc[col] += the products of a unit of Q4_K with columns that have a scale for 64 numbers, in integers.
template <int COLS>
__device__ __forceinline__ void dot64(const Staged<q4_k_wide, 1>& staged, u32 stride, const q4_k_wide::Raw& raw,
                                      u32 unit, float (&acc)[COLS]) {
    const u32 at = staged.slot(4 * unit), next = at ^ staged.slot(2);
    u32 scales, mins;
    scales_mins(raw.head.a + 1, unit % 4, scales, mins);
    const float d = float_of_f16(raw.head.a[0]) * 0.0625f, m = -float_of_f16(raw.head.a[0] >> 16);
    u32 a[4], b[4], c[4], e[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a[i] = raw.first.a[i] & 0x0f0f0f0fu, b[i] = raw.second.a[i] & 0x0f0f0f0fu;
        c[i] = raw.first.a[i] & 0xf0f0f0f0u, e[i] = raw.second.a[i] & 0xf0f0f0f0u;
    }
    const int low = (int)(scales & 255u) << 4, high = (int)(scales >> 8 & 255u);
#pragma unroll
    for (int col = 0; col < COLS; col++) {
        const uint4* words = staged.base + col * stride;
        const float2 x = ((const float2*)(words + staged.runs))[at];
        const int first = (int)staged.dots(b, words[at ^ 1], staged.dots(a, words[at], 0));
        const int second = (int)staged.dots(e, words[next ^ 1], staged.dots(c, words[next], 0));
        acc[col] = fmaf(d * x.x, (float)(low * first + high * second), acc[col]);
        acc[col] = fmaf(m * x.x, (float)dp2a_signed(__float_as_uint(x.y), mins), acc[col]);
    }
}

// The products of the warp's rows with COLS packed columns: `store(i, col, sum, sum_up)` gets each once.
template <class W, int PARTS, int COLS, class Store>
__device__ __forceinline__ void few_rows_of_pairs(const FewShared& s, u32 k, FewRows rows, u32 row_bytes,
                                                  const Store& store) {
    const u32 units = (k + W::UNIT - 1) / W::UNIT, stride = column_bytes(k) / 16;
    const u32 lanes = units % 8 == 0 ? 8 : 4, lane = threadIdx.x % lanes, group = threadIdx.x % 32 / lanes;
    const Staged<W, 1> staged = {s.staged, column_runs(k)};
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
                if constexpr (PARTS == 2 && VecOf<W>::IS_GROUPED) {
                    dot64<COLS>(staged, stride, raw, unit, sum[part]);
                } else {
                    dot_runs<W, COLS>(staged, stride, raw, unit, sum[part]);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < PARTS * COLS; j++) {
            float& total = sum[j / COLS][j % COLS];
            total += __shfl_xor_sync(FULL_MASK, total, 1);
            total += __shfl_xor_sync(FULL_MASK, total, 2);
            if (lanes == 8) total += __shfl_xor_sync(FULL_MASK, total, 4);
        }
#pragma unroll
        for (int col = 0; col < COLS; col++) {
            if (lane == col && i < rows.n) store(rows.first + i, col, sum[0][col], sum[PARTS - 1][col]);
        }
    }
}

template <int PARTS>
__device__ __forceinline__ void products(const FewPairs& f) {
    typedef typename VecOf<WEIGHT>::type W;
    __shared__ u32 pairs[MAX_COLS];
    __shared__ float outs[PARTS == 2 ? 2 : 1][PARTS == 2 ? MAX_TILE : 1];
    const Experts& a = f.op;
    if (PARTS == 1) PDL_LAUNCH();
    const u32 warps = blockDim.x / 32, n_pairs = a.rows * a.n_used, tile_rows = warps * f.each;
    const u32 lane = threadIdx.x % 32, tiles = (a.n + tile_rows - 1) / tile_rows, item = blockIdx.x / tiles;
    const u32 n_shared = a.n_shared ? (a.rows + FEW_SHARED_ROWS - 1) / FEW_SHARED_ROWS : 0;
    const bool is_shared = item < n_shared;
    const u32 pair = item - n_shared;
    const u32 first = (blockIdx.x - item * tiles) * tile_rows, count = min(tile_rows, a.n - first);
    const u32 row_bytes = a.k / W::BLOCK * W::BYTES, bytes = column_bytes(a.k);
    // The last barrier is of the columns.
    const FewShared s = few_shared<W>(shared, FEW_WARPS, 2, column_runs(a.k));
    const u32 columns = s.barriers + warps * 8;
    const u32 of_warp = min(threadIdx.x / 32 * f.each, count);
    const FewRows rows = {of_warp, min(f.each, count - of_warp)};
    const auto copy = [&](u32 expert) {
        const Matrix &w = is_shared ? a.shared_w : a.w, &up = is_shared ? a.shared_up : a.up;
        if (rows.n == 0 || lane != 0) return;
        const u64 at = ((u64)expert * a.n + first + rows.first) * row_bytes;
        const u32 barrier = s.barriers + threadIdx.x / 32 * 8, size = rows.n * row_bytes;
        barrier_expect(barrier, PARTS * size);
        bulk_copy(s.at + PARTS * rows.first * row_bytes, w.q + at, size, barrier);
        if (PARTS == 2) bulk_copy(s.at + PARTS * rows.first * row_bytes + size, up.q + at, size, barrier);
    };
    if (threadIdx.x == 0) barrier_init(columns, 1);
    few_barrier(s);
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
        for (u32 from = 0; from < n_pairs; from += 32 * IDS_AHEAD) {
            u32 ids[IDS_AHEAD];
#pragma unroll
            for (u32 j = 0; j < IDS_AHEAD; j++) {
                const u32 other = from + 32 * j + lane;
                ids[j] = other < n_pairs ? a.ids[other] : ~0u;
            }
#pragma unroll
            for (u32 j = 0; j < IDS_AHEAD; j++) {
                const u32 first_of = from + 32 * j, hits = __ballot_sync(FULL_MASK, ids[j] == expert);
                if (n == 0 && hits != 0 && first_of + __ffs(hits) - 1 != pair && !is_bad) {
                    // A block of an earlier pair has it.
                    if (PARTS == 1) PDL_WAIT();
                    return;
                }
                const u32 place = n + __popc(hits & ((1u << lane) - 1));
                if (threadIdx.x < 32 && ids[j] == expert && place < MAX_COLS) pairs[place] = first_of + lane;
                n += __popc(hits);
            }
        }
        n = min(n, MAX_COLS);
    }
    if (!is_bad && (PARTS == 1 || !is_shared)) copy(expert);
    if (PARTS == 1) PDL_WAIT();
    if (is_bad) {
        // The one column that follows is zero.
        n = 1;
        if (threadIdx.x == 0) pairs[0] = pair;
    }
    // The column's pair, or the shared expert's row.
    const auto pair_of = [&](u32 col) { return is_shared ? item * FEW_SHARED_ROWS + col : pairs[col]; };
    u32 parity = 0;
#pragma unroll 1
    for (u32 col = 0; col < n; col += 2) {
        // The pairs are listed; whoever read the columns, and the sums, before has done so.
        __syncthreads();
        const u32 n_cols = min(n - col, 2u);
        const auto store = [&](u32 i, u32 j, float sum, float up) {
            const u64 at = (u64)expert * a.n + first + i;
            if (!is_shared && a.bias) sum += a.bias[at];
            if (PARTS == 2) {
                if (!is_shared && a.up_bias) up += a.up_bias[at];
                outs[j][i] = gated(a.act, sum, up, a.alpha, a.limit);
            } else {
                (is_shared ? a.shared_out : a.out)[(u64)pair_of(col + j) * a.n + first + i] = sum;
            }
        };
        if (is_bad) {
            for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
                if (PARTS == 2) {
                    outs[0][i] = 0.0f;
                } else {
                    a.out[(u64)pair * a.n + first + i] = 0.0f;
                }
            }
        } else {
            if (threadIdx.x == 0) {
                barrier_expect(columns, n_cols * bytes);
                for (u32 j = 0; j < n_cols; j++) {
                    const u32 at = pair_of(col + j);
                    const u8* from = is_shared && PARTS == 1 ? f.shared_columns : f.columns;
                    from += (u64)(is_shared || a.x_per_pair ? at : at / a.n_used) * bytes;
                    bulk_copy(address_in_shared(s.staged) + j * bytes, from, bytes, columns);
                }
            }
            barrier_wait(columns, parity);
            parity ^= 1;
            if (n_cols == 1) {
                few_rows_of_pairs<W, PARTS, 1>(s, a.k, rows, row_bytes, store);
            } else {
                few_rows_of_pairs<W, PARTS, 2>(s, a.k, rows, row_bytes, store);
            }
        }
        if (PARTS == 2) {
            __syncthreads();
            // 16 lanes a run.
            const u32 runs = count / 16;
            for (u32 from = threadIdx.x / 32 * 2; from < n_cols * runs; from += 2 * warps) {
                const u32 of = min(from + lane / 16, n_cols * runs - 1), j = of / runs, run = of - j * runs;
                u8* to = (is_shared ? f.shared_packed : f.packed) + (u64)pair_of(col + j) * column_bytes(a.n);
                pack_one(outs[j][16 * run + lane % 16], to, a.n, first / 16 + run, lane % 16,
                         from + lane / 16 < n_cols * runs);
            }
        }
    }
}

KERNEL __launch_bounds__(128, 6) few_pairs(const __grid_constant__ FewPairs f) { products<1>(f); }
KERNEL __launch_bounds__(128, 5) few_pairs_gated(const __grid_constant__ FewPairs f) { products<2>(f); }

// Rows of x behind a norm, packed. grid (rows), block 256.
KERNEL __launch_bounds__(256) pack_columns(const __grid_constant__ PackColumns a) {
    __shared__ float scratch[33];
    PDL_LAUNCH();
    PDL_WAIT();
    pack_row(a, blockIdx.x, scratch);
}
