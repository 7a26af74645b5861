// gated_linear: out[t, n] = act(sum_k gate[n, k] * x[t, k]) * sum_k up[n, k] * x[t, k].
// Compiled for the type of both matrices: WEIGHT, PLANES; ACT as in common.h.
//
// TILED 0: a simdgroup takes ROWS rows of both matrices and up to COLUMNS rows of x, see WIDE_X in weight.h.
// grid (ceil(n / (2 * ROWS)), ceil(T / COLUMNS)), 64 threads
//
// TILED 1: a threadgroup takes 32 rows of both matrices and 32 rows of x, see tile.h.
// grid (ceil(n / 32), ceil(T / 32)), 128 threads
#include WEIGHT_HEADER
#include "metal/tile.h"

struct GatedLinear {
    uint n;
    uint k;
    uint rows; // of x
    float alpha;
    float limit;
};

kernel void gated_linear(PLANE_PARAMS(gate, 0, 1, 2), PLANE_PARAMS(up, 3, 4, 5), device const float* x [[buffer(6)]],
                         device float* out [[buffer(7)]], constant GatedLinear& a [[buffer(8)]],
                         uint2 group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]]) {
#if TILED
    threadgroup float4 staged[N_TILE_W / 4];
    threadgroup float* staged_w = (threadgroup float*)staged; // written four numbers at a time
    threadgroup float4 pieces[N_TILE_X];
    const uint t = 32 * sg + lane, begin = 32 * group.x, first_x = TILE_COLUMNS * group.y;
    const uint n_x = min(a.rows - first_x, (uint)TILE_COLUMNS);
    // Rows 0..32 of the tile are the gate's, the others the other matrix's.
    const uint own = min(begin + t / 2 % 32, a.n - 1);
    Row row = ROW_OF(WEIGHT, gate, own, a.k);
    if (t >= 64) row = ROW_OF(WEIGHT, up, own, a.k);
    device const float* x0 = x + (ulong)(first_x + min(t / 8, n_x - 1)) * a.k;
    device const float* x1 = x + (ulong)(first_x + min(t / 8 + 16, n_x - 1)) * a.k;
    tile_product<WEIGHT>(row, x0, x1, n_x, staged_w, pieces, sg, lane);
    const uint i = begin + t % 32;
    if (i >= a.n) return;
    for (uint c = t / 32; c < n_x; c += 4) {
        threadgroup const float* sums = staged_w + c * TILE_OUT_STRIDE + t % 32;
        out[(ulong)(first_x + c) * a.n + i] = gated(ACT, sums[0], sums[32], a.alpha, a.limit);
    }
#else
    const uint begin = ROWS * (2 * group.x + sg);
    if (begin >= a.n) return;
    Row rows[2 * ROWS]; // gate and up in turn
    for (uint j = 0; j < ROWS; j++) {
        const uint i = min(begin + j, a.n - 1);
        rows[2 * j] = ROW_OF(WEIGHT, gate, i, a.k);
        rows[2 * j + 1] = ROW_OF(WEIGHT, up, i, a.k);
    }
    const uint first_x = COLUMNS * group.y, n_x = min(a.rows - first_x, (uint)COLUMNS);
    float sums[2 * ROWS][COLUMNS];
    rows_dot<WEIGHT, 2 * ROWS, COLUMNS>(rows, x + (ulong)first_x * a.k, n_x, lane, sums);
    for (uint j = 0; j < ROWS; j++) {
        if (begin + j >= a.n) continue;
        for (uint c = 0; c < COLUMNS; c++) {
            if (lane != c || c >= n_x) continue;
            device float* to = out + (ulong)(first_x + c) * a.n + begin + j;
            *to = gated(ACT, sums[2 * j][c], sums[2 * j + 1][c], a.alpha, a.limit);
        }
    }
#endif
}
