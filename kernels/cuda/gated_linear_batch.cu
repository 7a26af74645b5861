// gated_linear of 9 to 64 rows: out[t, n] = act(sum_k gate[n, k] * x[t, k]) * sum_k up[n, k] * x[t, k] (`batch.h`).
//
// gated_linear_batch<G>: grid (multiprocessors), items of 16 rows of gate and of up and a tile of 8 G rows of x.
// Geometry: `batch.rs`.
#include "cuda/batch.h"
#include WEIGHT_HEADER

extern __shared__ uint4 shared[];

template <int GROUPS>
__device__ __forceinline__ void gated_batch(const BatchGatedLinear& a) {
    PDL_LAUNCH();
    typedef BatchOf<WEIGHT>::type Type;
    const GatedLinear& op = a.op;
    const u32 col_tiles = (op.rows + 8 * GROUPS - 1) / (8 * GROUPS);
    batch<Type, GROUPS, 1, true, true>(
        op.k, a.columns.n_split, (op.n + 15) / 16 * col_tiles, (float*)shared,
        [&](u32 i) {
            const u32 begin = i % col_tiles * 8 * GROUPS;
            return BatchItem{i / col_tiles, 0, begin, min(op.rows - begin, 8u * GROUPS)};
        },
        [&](const BatchItem& item, int tile, int i) {
            const Matrix& w = tile ? op.up : op.gate;
            const u32 row = min(item.group * 16 + threadIdx.x % 32 / 4 + 8 * i, op.n - 1);
            return row_of<Type>(w.q, w.scales, w.biases, row, op.k);
        },
        [&](const BatchItem& item, u32 col) {
            return a.columns.x + (u64)(item.begin + min(col, item.n_cols - 1)) * a.columns.stride;
        },
        [&](const BatchItem& item, u32, u32 i, u32 col, float gate, float up) {
            const u32 row = item.group * 16 + i;
            if (row >= op.n || col >= item.n_cols) return;
            op.out[(u64)(item.begin + col) * op.n + row] = gated(op.act, gate, up, op.alpha, op.limit);
        });
}

#define BATCH(G)                                                                                                 \
    KERNEL __launch_bounds__(BATCH_THREADS(G), 1) gated_linear_batch##G(const __grid_constant__ BatchGatedLinear a) { \
        gated_batch<G>(a);                                                                                       \
    }
BATCH(2)
BATCH(4)
