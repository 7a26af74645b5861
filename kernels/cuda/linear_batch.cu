// linear of 9 to 64 rows: out[t, n] (+)= sum_k w[n, k] * x[t, k] (+ bias[n]), for up to four matrices of one type that
// share x (`batch.h`).
//
// linear_batch<G>: grid (multiprocessors), items of 16 rows of weights and a tile of 8 G rows of x. Rows of all parts
// are numbered as one. Geometry: `batch.rs`.
#include "cuda/batch.h"
#include "cuda/linear.h"
#include WEIGHT_HEADER

extern __shared__ uint4 shared[];

template <int GROUPS>
__device__ __forceinline__ void linear_batch(const BatchLinear& a) {
    PDL_LAUNCH();
    typedef BatchOf<WEIGHT>::type Type;
    const Linear& op = a.op;
    const u32 n_rows = (u32)rows_of_parts(op), col_tiles = (op.rows + 8 * GROUPS - 1) / (8 * GROUPS);
    batch<Type, GROUPS, 1, false, true>(
        op.k, a.columns.n_split, (n_rows + 15) / 16 * col_tiles, (float*)shared,
        [&](u32 i) {
            const u32 begin = i % col_tiles * 8 * GROUPS;
            return BatchItem{i / col_tiles, 0, begin, min(op.rows - begin, 8u * GROUPS)};
        },
        [&](const BatchItem& item, int, int i) {
            return linear_row<Type>(op, min(item.group * 16 + threadIdx.x % 32 / 4 + 8 * i, n_rows - 1));
        },
        [&](const BatchItem& item, u32 col) {
            return a.columns.x + (u64)(item.begin + min(col, item.n_cols - 1)) * a.columns.stride;
        },
        [&](const BatchItem& item, u32, u32 i, u32 col, float sum, float) {
            const u32 row = item.group * 16 + i;
            if (row < n_rows && col < item.n_cols) linear_store(op, row, item.begin + col, sum);
        });
}

#define BATCH(G)                                                                                      \
    KERNEL __launch_bounds__(BATCH_THREADS(G), 1) linear_batch##G(const __grid_constant__ BatchLinear a) { \
        linear_batch<G>(a);                                                                           \
    }
BATCH(2)
BATCH(3)
BATCH(4)
