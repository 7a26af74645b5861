// linear: out[t, n] = sum_k w[n, k] * x[t, k] (+ bias[n]), for up to four matrices of one type that share x.
//
// linear_vec<C>: at most C = 1, 2, 4, 8 rows of x; blocks take tiles of rows of weights in turn
// (`vec.h`). linear_tile<C>: tiles of C = 16 .. 64 rows of x in the grid's x, rows of weights in its y (`tile.h`). Rows
// of all parts are numbered as one. Shared memory and grids: `matmul.rs`.
#include "cuda/linear.h"
#include "cuda/tile.h"
#include WEIGHT_HEADER

extern __shared__ uint4 shared[];

template <int COLS>
__device__ __forceinline__ void linear_tile(const Linear& a) {
    PDL_LAUNCH();
    const u64 first = (u64)blockIdx.x * COLS;
    tile<WEIGHT, COLS, false, true>(
        a.k, rows_of_parts(a), shared, [&](u64 i, bool) { return linear_row<WEIGHT>(a, i); },
        [&](u32 col) { return first + col < a.rows ? a.x + (first + col) * a.k : nullptr; },
        [&](u64 i, u32 col, float sum, float) {
            if (first + col < a.rows) linear_store(a, i, first + col, sum);
        });
}

#define VEC(C)                                                                                                 \
    KERNEL __launch_bounds__(VEC_THREADS) linear_vec##C(const __grid_constant__ Linear a) { \
        PDL_LAUNCH();                                                                                          \
        linear_vec<WEIGHT, C>(a, blockIdx.x, gridDim.x, shared);                                               \
    }
#define TILE(C)                                                                                                  \
    KERNEL __launch_bounds__(256, Tile<WEIGHT>::blocks(C, 1)) linear_tile##C(const __grid_constant__ Linear a) { \
        linear_tile<C>(a);                                                                                       \
    }
VEC(1)
VEC(2)
VEC(4)
VEC(8)
TILE(16)
TILE(32)
TILE(64)
