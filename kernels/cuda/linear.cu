// linear: out[t, n] = sum_k w[n, k] * x[t, k] (+ bias[n]), for up to four matrices of one type that share x.
//
// linear_vec<C>: at most C = 1, 2, 4, 8 rows of x; blocks of 256 threads take tiles of rows of weights in turn
// (`vec.h`). linear_tile<C>: tiles of C = 16 .. 64 rows of x in the grid's x, rows of weights in its y (`tile.h`). Rows
// of all parts are numbered as one. Shared memory and grids: `matmul.rs`.
#include "cuda/tile.h"
#include "cuda/vec.h"
#include WEIGHT_HEADER

extern __shared__ uint4 shared[];

__device__ __forceinline__ u64 rows_of_parts(const Linear& a) {
    u64 n = 0;
    for (u32 part = 0; part < a.n_parts; part++) n += a.parts[part].n;
    return n;
}

// The part of row `i` of all parts; `i` becomes the row's number there.
__device__ __forceinline__ const LinearPart& part_of(const Linear& a, u64& i) {
    u32 part = 0;
    while (part + 1 < a.n_parts && i >= a.parts[part].n) i -= a.parts[part++].n;
    return a.parts[part];
}

__device__ __forceinline__ Row linear_row(const Linear& a, u64 i) {
    const Matrix& w = part_of(a, i).w;
    return row_of<WEIGHT>(w.q, w.scales, w.biases, i, a.k);
}

__device__ __forceinline__ void linear_store(const Linear& a, u64 i, u64 row, float sum) {
    const LinearPart& part = part_of(a, i);
    part.out[row * part.n + i] = part.bias ? sum + part.bias[i] : sum;
}

template <int COLS>
__device__ __forceinline__ void linear_vec(const Linear& a) {
    PDL_LAUNCH();
    vec<WEIGHT, COLS, false, true>(
        a.x, a.k, a.rows, a.k, rows_of_parts(a), blockIdx.x, gridDim.x, shared,
        [&](u64 i, bool) { return linear_row(a, i); },
        [&](u64 i, u32 col, float sum, float) { linear_store(a, i, col, sum); });
}

template <int COLS>
__device__ __forceinline__ void linear_tile(const Linear& a) {
    PDL_LAUNCH();
    const u64 first = (u64)blockIdx.x * COLS;
    tile<WEIGHT, COLS, false, true>(
        a.k, rows_of_parts(a), shared, [&](u64 i, bool) { return linear_row(a, i); },
        [&](u32 col) { return first + col < a.rows ? a.x + (first + col) * a.k : nullptr; },
        [&](u64 i, u32 col, float sum, float) {
            if (first + col < a.rows) linear_store(a, i, first + col, sum);
        });
}

#define VEC(C)                                                                                                 \
    KERNEL __launch_bounds__(256, Vec<WEIGHT>::blocks(C, 1)) linear_vec##C(const __grid_constant__ Linear a) { \
        linear_vec<C>(a);                                                                                      \
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
