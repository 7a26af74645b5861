// Up to four matrices of one type that share x: rows of all parts are numbered as one.
#pragma once

#include "cuda/vec.h"

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

template <class W>
__device__ __forceinline__ Row linear_row(const Linear& a, u64 i) {
    const Matrix& w = part_of(a, i).w;
    return row_of<W>(w.q, w.scales, w.biases, i, a.k);
}

__device__ __forceinline__ void linear_store(const Linear& a, u64 i, u64 row, float sum) {
    const LinearPart& part = part_of(a, i);
    float* out = part.out + row * part.n + i;
    if (part.bias) sum += part.bias[i];
    *out = a.add ? *out + sum : sum;
}

// The products of one block of `n_blocks` with at most COLS rows of x.
template <class W, int COLS>
__device__ __forceinline__ void linear_vec(const Linear& a, u32 block, u32 n_blocks, uint4* shared) {
    vec<W, COLS, false, true>(
        a.x, a.k, a.prologue, a.rows, a.k, rows_of_parts(a), block, n_blocks, shared, true,
        [&](u64 i, bool) { return linear_row<W>(a, i); },
        [&](u64 i, u32 col, float sum, float) { linear_store(a, i, col, sum); });
}
