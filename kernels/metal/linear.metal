// linear: out[t, n] = sum_k w[n, k] * x[t, k] (+ bias[n]) for up to four matrices of one type.
// Compiled for the type of the matrices: WEIGHT, PLANES; for their number, N_PARTS; bit p of BIASES is set where matrix
// p has a bias.
//
// TILED 0: a simdgroup takes ROWS rows of weights and a row of x, see WIDE_X in weight.h.
// grid (sum of ceil(n / (2 * ROWS)), T), 64 threads
//
// TILED 1: a threadgroup takes 64 rows of weights and 32 rows of x, 32 numbers of both at a time, staged as floats.
// Each of its four simdgroups adds up 32 x 16 outputs in eight matrices. Rows behind the end repeat the last one and
// are not written. k is a multiple of 32.
// grid (sum of ceil(n / 64), ceil(T / 32)), 128 threads
#include WEIGHT_HEADER
#include "metal/weight.h"

#if TILED
#define PER 64
#define COLUMNS 32
#define STRIDE 36 // of a staged row of 32 numbers: banks
#define OUT_STRIDE 68
#define N_STAGED_W 2304 // 64 * STRIDE, and no less than COLUMNS * OUT_STRIDE
#define N_STAGED_X 288 // COLUMNS * STRIDE / 4
#else
#define PER (2 * ROWS)
#endif

struct Linear {
    uint k;
    uint n[4];
    uint rows; // of x
};

#if TILED
// Run `at` of a row as 16 floats: its unit and its place in that.
template <class W> inline void decode_run_at(const thread Row& row, uint at, thread float* v) {
    const uint pair = at / (2 * W::RUNS), in_pair = at % (2 * W::RUNS);
    const uint unit = W::PAIRED ? 2 * pair + in_pair % 2 : at / W::RUNS;
    const int r = W::PAIRED ? in_pair / 2 : at % W::RUNS;
    typename W::Raw raw;
    W::load(row, unit, raw);
    decode_run<W>(raw, unit, r, v);
}
#endif

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
    threadgroup float staged_w[N_STAGED_W];
    threadgroup float4 pieces[N_STAGED_X]; // written four numbers at a time
    threadgroup float* staged_x = (threadgroup float*)pieces;
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
    // A thread stages a run of a row of weights and two pieces of four numbers of x.
    const uint t = 32 * sg + lane, own = min(64 * tile + t / 2, n - 1);
    const Row row = row_of<WEIGHT>(first.q, first.scales, first.biases, own, a.k);
    const uint m = 32 * (sg / 2), c = 16 * (sg % 2); // of this simdgroup's outputs
    simdgroup_float8x8 sums[4][2];
    for (uint i = 0; i < 4; i++) {
        for (uint j = 0; j < 2; j++) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    for (uint k = 0; k < a.k; k += 32) {
        float v[16];
        decode_run_at<WEIGHT>(row, k / 16 + t % 2, v);
        for (uint i = 0; i < 16; i++) staged_w[t / 2 * STRIDE + 16 * (t % 2) + i] = v[i];
        for (uint i = t; i < COLUMNS * 8; i += 128) {
            const uint token = min(group.y * COLUMNS + i / 8, a.rows - 1);
            const float4 y = *(device const float4*)(x + (ulong)token * a.k + k + 4 * (i % 8));
            *(threadgroup float4*)(staged_x + i / 8 * STRIDE + 4 * (i % 8)) = y;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = 0; i < 32; i += 8) {
            simdgroup_float8x8 w[4], y[2];
            for (uint j = 0; j < 4; j++) simdgroup_load(w[j], staged_w + (m + 8 * j) * STRIDE + i, STRIDE);
            for (uint j = 0; j < 2; j++) {
                simdgroup_load(y[j], staged_x + (c + 8 * j) * STRIDE + i, STRIDE, ulong2(0), true);
            }
            for (uint j = 0; j < 8; j++) {
                simdgroup_multiply_accumulate(sums[j / 2][j % 2], w[j / 2], y[j % 2], sums[j / 2][j % 2]);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    // Outputs go through the memory of the weights, [COLUMNS][64], so that whole rows of an edge are left out.
    for (uint j = 0; j < 8; j++) {
        threadgroup float* to = staged_w + (c + 8 * (j % 2)) * OUT_STRIDE + m + 8 * (j / 2);
        simdgroup_store(sums[j / 2][j % 2], to, OUT_STRIDE, ulong2(0), true);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint j = t; j < COLUMNS * 64; j += 128) {
        const uint token = group.y * COLUMNS + j / 64, i = 64 * tile + j % 64;
        if (token >= a.rows || i >= n) continue;
        float y = staged_w[j / 64 * OUT_STRIDE + j % 64];
        if (bias != nullptr) y += bias[i];
        out[(ulong)token * n + i] = y;
    }
#else
    const uint begin = PER * tile + ROWS * sg;
    if (begin >= n) return;
    Row rows[ROWS];
    for (uint j = 0; j < ROWS; j++) {
        rows[j] = row_of<WEIGHT>(first.q, first.scales, first.biases, min(begin + j, n - 1), a.k);
    }
    float sums[ROWS];
    rows_dot<WEIGHT, ROWS>(rows, x + (ulong)group.y * a.k, lane, sums);
    for (uint j = 0; j < ROWS; j++) {
        const uint i = begin + j;
        if (lane != 0 || i >= n) continue;
        out[(ulong)group.y * n + i] = bias != nullptr ? sums[j] + bias[i] : sums[j];
    }
#endif
}
