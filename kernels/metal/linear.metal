// linear: out[t, n] = sum_k w[n, k] * x[t, k] (+ bias[n]) for up to four matrices of one type.
// Compiled for the type of the matrices: WEIGHT, PLANES; for their number, N_PARTS; bit p of BIASES is set where matrix
// p has a bias.
//
// TILED 0: a simdgroup takes ROWS rows of weights and up to COLUMNS rows of x, see WIDE_X in weight.h.
// grid (sum of ceil(n / (2 * ROWS)), ceil(T / COLUMNS)), 64 threads
//
// TILED 1: a threadgroup takes 64 rows of weights and 32 rows of x, see tile.h. Rows behind the end repeat the last one
// and are not written.
// grid (sum of ceil(n / 64), ceil(T / 32)), 128 threads
#include WEIGHT_HEADER
#include "metal/tile.h"

#if TILED
#define PER TILE_ROWS
#else
#define PER (2 * ROWS)
#endif

struct Linear {
    uint k;
    uint n[4];
    uint rows; // of x
};

kernel void linear(PLANE_PARAMS(w0, 0, 1, 2), device const float* x [[buffer(12)]],
                   constant Linear& a [[buffer(13)]], device float* out0 [[buffer(14)]],
#if BIASES & 1
                   device const float* bias0 [[buffer(18)]],
#endif
#if N_PARTS > 1
                   PLANE_PARAMS(w1, 3, 4, 5), device float* out1 [[buffer(15)]],
#endif
#if BIASES & 2
                   device const float* bias1 [[buffer(19)]],
#endif
#if N_PARTS > 2
                   PLANE_PARAMS(w2, 6, 7, 8), device float* out2 [[buffer(16)]],
#endif
#if BIASES & 4
                   device const float* bias2 [[buffer(20)]],
#endif
#if N_PARTS > 3
                   PLANE_PARAMS(w3, 9, 10, 11), device float* out3 [[buffer(17)]],
#endif
#if BIASES & 8
                   device const float* bias3 [[buffer(21)]],
#endif
                   uint2 group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]]) {
#if TILED
    threadgroup float4 staged[N_TILE_W / 4];
    threadgroup float* staged_w = (threadgroup float*)staged; // written four numbers at a time
    threadgroup float4 pieces[N_TILE_X];
#endif
    uint part = 0, tile = group.x;
    while (part + 1 < N_PARTS && tile >= (a.n[part] + PER - 1) / PER) {
        tile -= (a.n[part] + PER - 1) / PER;
        part++;
    }
    const uint n = a.n[part];
    Row first = ROW_OF(WEIGHT, w0, 0, a.k);
    device float* out = out0;
#if N_PARTS > 1
    if (part == 1) first = ROW_OF(WEIGHT, w1, 0, a.k), out = out1;
#endif
#if N_PARTS > 2
    if (part == 2) first = ROW_OF(WEIGHT, w2, 0, a.k), out = out2;
#endif
#if N_PARTS > 3
    if (part == 3) first = ROW_OF(WEIGHT, w3, 0, a.k), out = out3;
#endif
    device const float* bias = nullptr;
#if BIASES & 1
    if (part == 0) bias = bias0;
#endif
#if BIASES & 2
    if (part == 1) bias = bias1;
#endif
#if BIASES & 4
    if (part == 2) bias = bias2;
#endif
#if BIASES & 8
    if (part == 3) bias = bias3;
#endif

#if TILED
    const uint t = 32 * sg + lane, begin = TILE_ROWS * tile, first_x = TILE_COLUMNS * group.y;
    const uint n_x = min(a.rows - first_x, (uint)TILE_COLUMNS);
    const Row row = row_of<WEIGHT>(first.q, first.scales, first.biases, min(begin + t / 2, n - 1), a.k);
    device const float* x0 = x + (ulong)(first_x + min(t / 8, n_x - 1)) * a.k;
    device const float* x1 = x + (ulong)(first_x + min(t / 8 + 16, n_x - 1)) * a.k;
    tile_product<WEIGHT>(row, x0, x1, n_x, staged_w, pieces, sg, lane);
    const uint i = begin + t % TILE_ROWS;
    if (i >= n) return;
    for (uint c = t / TILE_ROWS; c < n_x; c += 128 / TILE_ROWS) {
        float y = staged_w[c * TILE_OUT_STRIDE + t % TILE_ROWS];
        if (bias != nullptr) y += bias[i];
        out[(ulong)(first_x + c) * n + i] = y;
    }
#else
    const uint begin = PER * tile + ROWS * sg;
    if (begin >= n) return;
    Row rows[ROWS];
    for (uint j = 0; j < ROWS; j++) {
        rows[j] = row_of<WEIGHT>(first.q, first.scales, first.biases, min(begin + j, n - 1), a.k);
    }
    const uint first_x = COLUMNS * group.y, n_x = min(a.rows - first_x, (uint)COLUMNS);
    float sums[ROWS][COLUMNS];
    rows_dot<WEIGHT, ROWS, COLUMNS>(rows, x + (ulong)first_x * a.k, n_x, lane, sums);
    for (uint j = 0; j < ROWS; j++) {
        const uint i = begin + j;
        if (i >= n) continue;
        for (uint c = 0; c < COLUMNS; c++) {
            if (lane != c || c >= n_x) continue;
            out[(ulong)(first_x + c) * n + i] = bias != nullptr ? sums[j][c] + bias[i] : sums[j][c];
        }
    }
#endif
}
