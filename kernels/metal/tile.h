// Products in tiles on simdgroup matrices: 64 rows of weights times up to 32 rows of x, 32 numbers of both at a time,
// staged as floats. A threadgroup has 128 threads; each of its four simdgroups adds up 16 x 32 outputs in eight
// matrices, and leaves out the columns of eight that the tile does not have.
#pragma once

#include "metal/weight.h"

#define TILE_ROWS 64
#define TILE_COLUMNS 32
#define TILE_STRIDE 36 // of a staged row of 32 numbers: banks
#define TILE_OUT_STRIDE 68
#define N_TILE_W 2304 // 64 * TILE_STRIDE, and no less than 32 * TILE_OUT_STRIDE
#define N_TILE_X 288  // 32 * TILE_STRIDE / 4

// Run `r` of a unit as 16 floats, by how its type stores them: `decode` of its own, floats, or bytes with a scale.
template <class W, bool HAS_DECODE, bool IS_FLOAT> struct RunOf {
    static inline void decode(const thread Row& row, uint unit, int r, thread float* v) {
        typename W::Raw raw;
        W::load(row, unit, raw);
        u32 w[4];
        float scale, min;
        W::run(raw, unit, r, w, scale, min);
        decode_bytes(w, scale, min, v);
    }
    // Bytes stay where they lie in their words, and scales are divided by what their places are worth.
    static inline void decode_bytes(const thread u32* w, float scale, float min, thread float* v) {
        const u32 flip = W::SIGNED ? 0x80808080u : 0;
        const float least = min + scale * float(W::OFFSET - (W::SIGNED ? 128 : 0));
        const float4 by = scale * byte_places();
        for (uint i = 0; i < 4; i++) {
            const u32 four = w[i] ^ flip;
            v[4 * i] = fma(masked(four, 0xff), by.x, least);
            v[4 * i + 1] = fma(masked(four, 0xff00), by.y, least);
            v[4 * i + 2] = fma(masked(four, 0xff0000), by.z, least);
            v[4 * i + 3] = fma(masked(four, 0xff000000), by.w, least);
        }
    }
};
template <class W> struct RunOf<W, false, true> {
    static inline void decode(const thread Row& row, uint unit, int r, thread float* v) {
        typename W::Raw raw;
        W::load(row, unit, raw);
        W::values(raw, unit, r, v);
    }
};
template <class W, bool IS_FLOAT> struct RunOf<W, true, IS_FLOAT> {
    static inline void decode(const thread Row& row, uint unit, int r, thread float* v) {
        InPlace<W>::decode(row, unit, r, v);
    }
};

// Run `at` of a row as 16 floats: its unit and its place in that.
template <class W> inline void decode_run_at(const thread Row& row, uint at, thread float* v) {
    const uint pair = at / (2 * W::RUNS), in_pair = at % (2 * W::RUNS);
    const uint unit = W::PAIRED ? 2 * pair + in_pair % 2 : at / W::RUNS;
    const int r = W::PAIRED ? in_pair / 2 : at % W::RUNS;
    RunOf<W, InPlace<W>::HAS_DECODE != 0, W::IS_FLOAT != 0>::decode(row, unit, r, v);
}

// Four numbers of a row of `k`; those behind its end are zero.
inline float4 four_of(device const float* row, uint at, uint k) {
    if (k % 4 == 0 && at < k) return *(device const float4*)(row + at);
    float4 v = float4(0.0f);
    for (uint i = 0; i < 4; i++) {
        if (at + i < k) v[i] = row[at + i];
    }
    return v;
}

// Row r of weights times column c, for c < n_columns, to staged_w[c * TILE_OUT_STRIDE + r]. Thread t stages run t % 2
// of `row`, which is row t / 2 of the tile, and numbers of `x0` and `x1`, which are rows t / 8 and t / 8 + 16 of x.
// Ends with a barrier.
template <class W>
inline void tile_product(const thread Row& row, device const float* x0, device const float* x1, uint n_columns,
                         threadgroup float* staged_w, threadgroup float4* pieces, uint sg, uint lane) {
    threadgroup float* staged_x = (threadgroup float*)pieces; // written four numbers at a time
    const uint t = 32 * sg + lane;
    simdgroup_float8x8 sums[2][4];
    for (uint i = 0; i < 2; i++) {
        for (uint j = 0; j < 4; j++) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    threadgroup float4* to_w = (threadgroup float4*)(staged_w + t / 2 * TILE_STRIDE + 16 * (t % 2));
    const uint piece = t / 8 * (TILE_STRIDE / 4) + t % 8, first = 4 * (t % 8);
    const uint whole = row.n % 4 == 0 ? row.n / 32 * 32 : 0; // numbers of x that are loaded without a look at the end
    for (uint k = 0; k < row.n; k += 32) {
        float v[16];
        decode_run_at<W>(row, k / 16 + t % 2, v);
        for (uint i = 0; i < 4; i++) to_w[i] = float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
        if (k < whole) {
            pieces[piece] = *(device const float4*)(x0 + first + k);
            pieces[piece + 16 * (TILE_STRIDE / 4)] = *(device const float4*)(x1 + first + k);
        } else {
            pieces[piece] = four_of(x0, k + first, row.n);
            pieces[piece + 16 * (TILE_STRIDE / 4)] = four_of(x1, k + first, row.n);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
        for (uint i = 0; i < 32; i += 8) {
            simdgroup_float8x8 w[2];
            for (uint j = 0; j < 2; j++) {
                simdgroup_load(w[j], staged_w + (16 * sg + 8 * j) * TILE_STRIDE + i, TILE_STRIDE);
            }
            for (uint j = 0; j < 4; j++) {
                if (8 * j >= n_columns) continue;
                simdgroup_float8x8 y;
                simdgroup_load(y, staged_x + 8 * j * TILE_STRIDE + i, TILE_STRIDE, ulong2(0), true);
                simdgroup_multiply_accumulate(sums[0][j], w[0], y, sums[0][j]);
                simdgroup_multiply_accumulate(sums[1][j], w[1], y, sums[1][j]);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    // Outputs take the place of the weights, so that what lies behind an edge is left out by whole numbers.
    for (uint i = 0; i < 2; i++) {
        for (uint j = 0; j < 4; j++) {
            if (8 * j >= n_columns) continue;
            threadgroup float* to = staged_w + 8 * j * TILE_OUT_STRIDE + 16 * sg + 8 * i;
            simdgroup_store(sums[i][j], to, TILE_OUT_STRIDE, ulong2(0), true);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}
