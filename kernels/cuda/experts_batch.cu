// experts of 9 to 64 rows: for every pair (token, slot) a projection of the chosen expert, or act(gate) * up, each plus
// its bias; and the same of a shared expert for every token (`batch.h`).
//
// experts_batch<G>, experts_gated_batch<G>: grid (multiprocessors). Pairs are listed by expert (`expert_lists.cu`); a
// tile is up to 8 G pairs of one expert, and the shared expert's tiles come last. Items are 16 rows of weights of a
// tile, of gated products 16 of gate and of up, all items of a tile in a row. Outputs go to `hidden`, packed for the
// next product, or to `out`. The gated kernel launches the next one behind its own wait, so that the lists are there
// before the wait of the other. Geometry: `batch.rs`.
#include "cuda/batch.h"
#include WEIGHT_HEADER

extern __shared__ uint4 shared[];

template <int GROUPS, bool GATED>
__device__ __forceinline__ void experts_batch(const BatchExperts& a) {
    typedef BatchOf<WEIGHT>::type Type;
    constexpr u32 COLS = 8 * GROUPS, ROWS = 16;
    const Experts& op = a.op;
    if (GATED) PDL_WAIT();
    PDL_LAUNCH();
    const u32 n_expert = op.n_expert, n_all = n_expert + op.n_shared, n_pairs = op.rows * op.n_used;
    // Tiles of all experts before each, behind the sums.
    u32* const before = (u32*)((u8*)shared + batch_shared(blockDim.x / 32, GROUPS, 1));
    if (threadIdx.x < 32) {
        u32 sum = 0;
#pragma unroll 4
        for (u32 e = 0; e < n_all; e += 32) {
            const u32 mine = e + threadIdx.x;
            u32 tiles = mine < n_expert ? (op.first[mine + 1] - op.first[mine] + COLS - 1) / COLS : 0;
            if (mine >= n_expert && mine < n_all) tiles = (op.rows + COLS - 1) / COLS;
            u32 to = tiles;
#pragma unroll
            for (u32 step = 1; step < 32; step *= 2) {
                const u32 other = __shfl_up_sync(FULL_MASK, to, step);
                if (threadIdx.x >= step) to += other;
            }
            if (mine < n_all) before[mine] = sum + to - tiles;
            sum += __shfl_sync(FULL_MASK, to, 31);
        }
        if (threadIdx.x == 0) before[n_all] = sum;
    }
    __syncthreads();
    const u32 groups = (op.n + ROWS - 1) / ROWS;
    // The first item of the tile that was asked for last.
    u32 start = ~0u - groups;
    BatchItem last = {};
    // Pairs of the shared expert follow those of the others.
    const auto pair_of = [&](const BatchItem& item, u32 col) {
        const u32 at = item.begin + min(col, item.n_cols - 1);
        return item.expert < n_expert ? op.pairs[at] : n_pairs + at;
    };
    const auto find = [&](u32 i) {
        if (i - start >= groups) {
            const u32 tile = i / groups;
            start = tile * groups;
            // The last expert with no more than `tile` tiles before it.
            u32 expert = 0;
            for (u32 left = n_all; left > 1;) {
                const u32 half = left / 2;
                if (before[expert + half] <= tile) expert += half;
                left -= half;
            }
            const u32 skipped = (tile - before[expert]) * COLS, is_shared = expert == n_expert;
            const u32 first = is_shared ? 0 : op.first[expert], end = is_shared ? op.rows : op.first[expert + 1];
            last = {0, expert, first + skipped, min(end - first - skipped, COLS)};
        }
        last.group = i - start;
        return last;
    };
    const auto row_at = [&](const BatchItem& item, u32 part, u32 row) {
        const bool is_shared = item.expert == n_expert, is_up = GATED && part;
        const Matrix& w = is_shared ? (is_up ? op.shared_up : op.shared_w) : is_up ? op.up : op.w;
        const u64 from = is_shared ? 0 : (u64)item.expert * op.n;
        return row_of<Type>(w.q, w.scales, w.biases, from + min(row, op.n - 1), op.k);
    };
    const auto column = [&](const BatchItem& item, u32 col) {
        const u32 pair = pair_of(item, col);
        const u32 row = op.x_per_pair ? pair : pair < n_pairs ? pair / op.n_used : pair - n_pairs;
        return a.columns.x + (u64)row * a.columns.stride;
    };
    const auto store = [&](const BatchItem& item, u32 i, u32 col, float sum, float up) {
        const u32 row = item.group * ROWS + i;
        if (row >= op.n || col >= item.n_cols) return;
        const u32 pair = pair_of(item, col);
        if (item.expert < n_expert) {
            const u64 bias = (u64)item.expert * op.n + row;
            if (op.bias) sum += op.bias[bias];
            if (GATED && op.up_bias) up += op.up_bias[bias];
        }
        if (GATED) sum = gated(op.act, sum, up, op.alpha, op.limit);
        if (!a.hidden) {
            float* out = pair < n_pairs ? op.out + (u64)pair * op.n : op.shared_out + (u64)(pair - n_pairs) * op.n;
            out[row] = sum;
            return;
        }
        u16* out = a.hidden + (u64)pair * a.hidden_stride;
        out[packed_at(row, a.hidden_runs, a.hidden_paired)] = (u16)bf16_pair(sum, 0.0f);
        if (row + 1 != op.n) return;
        // What a last unit has behind the row is multiplied with zeros, and must be none of NaN.
        for (u32 pad = op.n; pad < a.hidden_stride && pad % 64 != 0; pad++) {
            out[packed_at(pad, a.hidden_runs, a.hidden_paired)] = 0;
        }
    };
    const u32 n_items = groups * before[n_all];
    if constexpr (StagedOf<Type>::IS) {
        u8* staged = (u8*)shared + (batch_shared(blockDim.x / 32, GROUPS, 1) + 4 * (n_all + 1) + 15) / 16 * 16;
        batch_staged<Type, GROUPS, GATED, !GATED>(
            op.k, a.columns.n_split, n_items, (float*)shared, staged, find,
            [&](const BatchItem& item, u32 part, u32& n_rows) {
                n_rows = min(op.n - item.group * ROWS, ROWS);
                return row_at(item, part, item.group * ROWS).q;
            },
            column, store);
    } else {
        batch<Type, GROUPS, 1, GATED, !GATED>(
            op.k, a.columns.n_split, n_items, (float*)shared, find,
            [&](const BatchItem& item, int part, int i) {
                return row_at(item, part, item.group * ROWS + threadIdx.x % 32 / 4 + 8 * i);
            },
            column,
            [&](const BatchItem& item, u32, u32 i, u32 col, float sum, float up) { store(item, i, col, sum, up); });
    }
}

#define THREADS(G) (StagedOf<BatchOf<WEIGHT>::type>::IS ? STAGED_THREADS(G) : BATCH_THREADS(G))
#define BATCH(G)                                                                                               \
    KERNEL __launch_bounds__(THREADS(G), 1) experts_batch##G(const __grid_constant__ BatchExperts a) {         \
        experts_batch<G, false>(a);                                                                            \
    }                                                                                                          \
    KERNEL __launch_bounds__(THREADS(G), 1) experts_gated_batch##G(const __grid_constant__ BatchExperts a) {   \
        experts_batch<G, true>(a);                                                                             \
    }
BATCH(1)
BATCH(2)
BATCH(4)
