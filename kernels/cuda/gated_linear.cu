// gated_linear: out[t, n] = act(sum_k gate[n, k] * x[t, k]) * sum_k up[n, k] * x[t, k], gate and up of one type.
//
// gated_linear_vec<C>: at most C = 1, 2, 4, 8 rows of x (`vec.h`). gated_linear_tile<C>: tiles of C = 16 .. 64 rows of
// x in the grid's x, rows of weights in its y (`tile.h`). Shared memory and grids: `matmul.rs`.
#include "cuda/tile.h"
#include "cuda/vec.h"
#include WEIGHT_HEADER

extern __shared__ uint4 shared[];

__device__ __forceinline__ Row gated_row(const GatedLinear& a, u64 i, bool up) {
    const Matrix& w = up ? a.up : a.gate;
    return row_of<WEIGHT>(w.q, w.scales, w.biases, i, a.k);
}

__device__ __forceinline__ void gated_store(const GatedLinear& a, u64 i, u64 row, float gate, float up) {
    a.out[row * a.n + i] = gated(a.act, gate, up, a.alpha, a.limit);
}

template <int COLS>
__device__ __forceinline__ void gated_vec(const GatedLinear& a) {
    PDL_LAUNCH();
    vec<WEIGHT, COLS, true, false>(
        a.x, a.k, a.prologue, a.rows, a.k, a.n, blockIdx.x, gridDim.x, shared, true,
        [&](u64 i, bool up) { return gated_row(a, i, up); },
        [&](u64 i, u32 col, float gate, float up) { gated_store(a, i, col, gate, up); });
}

template <int COLS>
__device__ __forceinline__ void gated_tile(const GatedLinear& a) {
    PDL_LAUNCH();
    const u64 first = (u64)blockIdx.x * COLS;
    tile<WEIGHT, COLS, true, true>(
        a.k, a.n, shared, [&](u64 i, bool up) { return gated_row(a, i, up); },
        [&](u32 col) { return first + col < a.rows ? a.x + (first + col) * a.k : nullptr; },
        [&](u64 i, u32 col, float gate, float up) {
            if (first + col < a.rows) gated_store(a, i, first + col, gate, up);
        });
}

#define VEC(C)                                                       \
    KERNEL __launch_bounds__(VEC_THREADS)         \
        gated_linear_vec##C(const __grid_constant__ GatedLinear a) { \
        gated_vec<C>(a);                                             \
    }
#define TILE(C)                                                       \
    KERNEL __launch_bounds__(256, Tile<WEIGHT>::blocks(C, 2))         \
        gated_linear_tile##C(const __grid_constant__ GatedLinear a) { \
        gated_tile<C>(a);                                             \
    }
VEC(1)
VEC(2)
VEC(4)
VEC(8)
TILE(16)
TILE(32)
TILE(64)
