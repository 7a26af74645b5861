// logits: the product of a router's matrix with normed rows of x, for 9 to 64 rows, in f32. Compiled for a weight type.
//
// grid (pairs of rows of all parts, rows of x / 8), block 128: a thread holds the units that it takes of two rows of
// weights, times the norm's, and multiplies them with 8 rows of x. Sums: a thread's values, then lanes, then warps.
#include "cuda/args.h"
#include "cuda/common.h"
#include "cuda/load8.h"
#include "quant/unit.h"
#include WEIGHT_HEADER

#define THREADS 128
#define N_WARPS (THREADS / 32)
#define ROWS 8

// Values `first .. + 16` of a row of k, zero behind its end.
__device__ __forceinline__ void sixteen(const float* row, u32 k, u32 first, float (&v)[16]) {
    float half[2][8];
    const bool is_whole = k % 4 == 0 && first + 16 <= k;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (is_whole) {
            load8<8>(row, true, k, first + 8 * h, half[h]);
        } else {
            load8<1>(row, false, k, first + 8 * h, half[h]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) v[8 * h + i] = half[h][i];
    }
}

KERNEL __launch_bounds__(THREADS) logits(const __grid_constant__ Router a) {
    __shared__ float sums[N_WARPS][3 * ROWS];
    PDL_LAUNCH();
    const Linear& l = a.linear;
    // Rows of all parts are numbered as one.
    u64 at[2];
    const LinearPart* of[2];
    Row row[2];
    u64 n_all = 0;
    for (u32 part = 0; part < l.n_parts; part++) n_all += l.parts[part].n;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        at[j] = min((u64)blockIdx.x * 2 + j, n_all - 1);
        u32 part = 0;
        while (part + 1 < l.n_parts && at[j] >= l.parts[part].n) at[j] -= l.parts[part++].n;
        of[j] = &l.parts[part];
        row[j] = row_of<WEIGHT>(of[j]->w.q, of[j]->w.scales, of[j]->w.biases, at[j], l.k);
    }
    const u32 units = (l.k + WEIGHT::UNIT - 1) / WEIGHT::UNIT, first_row = blockIdx.y * ROWS;
    WEIGHT::Raw raw[2];
    if (threadIdx.x < units) WEIGHT::load(row[0], threadIdx.x, raw[0]), WEIGHT::load(row[1], threadIdx.x, raw[1]);
    if (l.prologue.kind == NORMED) prefetch(l.prologue.w + 16 * min(threadIdx.x, (l.k - 1) / 16));
    PDL_WAIT();
    float dot[2][ROWS] = {}, squares[ROWS] = {};
#pragma unroll 1
    for (u32 unit = threadIdx.x; unit < units; unit += THREADS) {
        if (unit >= THREADS) WEIGHT::load(row[0], unit, raw[0]), WEIGHT::load(row[1], unit, raw[1]);
#pragma unroll
        for (int r = 0; r < WEIGHT::RUNS; r++) {
            float w[2][16], norm[16];
            decode_run<WEIGHT>(raw[0], unit, r, w[0]);
            decode_run<WEIGHT>(raw[1], unit, r, w[1]);
            const u32 first = 16 * run_index<WEIGHT>(unit, r);
            if (l.prologue.kind == NORMED) {
                sixteen(l.prologue.w, l.k, first, norm);
#pragma unroll
                for (int i = 0; i < 32; i++) w[i / 16][i % 16] *= norm[i % 16];
            }
#pragma unroll
            for (int j = 0; j < ROWS; j++) {
                float x[16];
                sixteen(l.x + (u64)min(first_row + j, l.rows - 1) * l.k, l.k, first, x);
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    dot[0][j] += w[0][i] * x[i];
                    dot[1][j] += w[1][i] * x[i];
                    squares[j] += x[i] * x[i];
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
        const float first = warp_sum(dot[0][j]), second = warp_sum(dot[1][j]), square = warp_sum(squares[j]);
        if (threadIdx.x % 32 == 0) {
            float* of_warp = sums[threadIdx.x / 32];
            of_warp[j] = first, of_warp[ROWS + j] = second, of_warp[2 * ROWS + j] = square;
        }
    }
    __syncthreads();
    const u32 j = threadIdx.x % ROWS, which = threadIdx.x / ROWS, x_row = first_row + j;
    if (which >= 2 || x_row >= l.rows || (u64)blockIdx.x * 2 + which >= n_all) return;
    float total = 0.0f, square = 0.0f;
#pragma unroll
    for (int w = 0; w < N_WARPS; w++) total += sums[w][which * ROWS + j], square += sums[w][2 * ROWS + j];
    if (l.prologue.kind == NORMED) total *= 1.0f / sqrtf(square / (float)l.k + l.prologue.eps);
    const LinearPart& part = *of[which];
    if (part.bias) total += part.bias[at[which]];
    if (of[which] == &l.parts[0]) total *= a.scale;
    part.out[(u64)x_row * part.n + at[which]] = total;
}
