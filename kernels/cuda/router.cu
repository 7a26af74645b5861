// router: the norm of x, its product with the router's matrix, and the choice of experts (`route.h`), for at most 8
// rows. Compiled for a weight type and a number of experts: -DWEIGHT, -DN_EXPERT.
//
// grid (rows of all parts), block 256: a block a row of weights, which it reads before it waits; its halves take pairs
// of rows in turn. Sums in f32: a thread's values, then lanes, then warps. The block that ends last chooses for all
// rows, a warp a row.
#include "cuda/route.h"
#include "quant/unit.h"
#include WEIGHT_HEADER

// Threads that share a row, and halves of the block.
#define THREADS 128
#define N_WARPS (THREADS / 32)
#define HALVES 2
// Rows of x.
#define MAX_ROWS 8
// Warps that have memory to choose with.
#define N_CHOOSING (N_EXPERT <= 256 ? HALVES * N_WARPS : N_EXPERT <= 512 ? N_WARPS : 2)

// Values `first ..` of a row of k, zero behind its end.
__device__ __forceinline__ void load16(const float* row, u32 k, u32 first, float (&v)[16]) {
    if (k % 4 == 0 && first + 16 <= k) {
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            const float4 x = *(const float4*)(row + first + i);
            v[i] = x.x, v[i + 1] = x.y, v[i + 2] = x.z, v[i + 3] = x.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 16; i++) v[i] = first + i < k ? row[first + i] : 0.0f;
    }
}

// Every row of x with the block's row of weights.
template <int ROWS>
__device__ __forceinline__ void multiply(const Router& a, const WEIGHT::Raw& raw, const Row& row, u32 units,
                                         float (*sums)[2 * MAX_ROWS], u32 first_row) {
    const Linear& l = a.linear;
    float dot[ROWS] = {}, squares[ROWS] = {};
#pragma unroll 1
    for (u32 unit = threadIdx.x % THREADS; unit < units; unit += THREADS) {
        WEIGHT::Raw now = raw;
        if (unit >= THREADS) WEIGHT::load(row, unit, now);
#pragma unroll
        for (int r = 0; r < WEIGHT::RUNS; r++) {
            float w[16], norm[16];
            decode_run<WEIGHT>(now, unit, r, w);
            const u32 first = 16 * run_index<WEIGHT>(unit, r);
            if (l.prologue.kind == NORMED) {
                load16(l.prologue.w, l.k, first, norm);
#pragma unroll
                for (int i = 0; i < 16; i++) w[i] *= norm[i];
            }
#pragma unroll
            for (int j = 0; j < ROWS; j++) {
                float x[16];
                load16(l.x + (u64)(first_row + j < l.rows ? first_row + j : 0) * l.k, l.k, first, x);
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    dot[j] += w[i] * x[i];
                    squares[j] += x[i] * x[i];
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
        const float d = warp_sum(dot[j]), q = warp_sum(squares[j]);
        if (threadIdx.x % 32 == 0) {
            sums[threadIdx.x % THREADS / 32][first_row + j] = d;
            sums[threadIdx.x % THREADS / 32][MAX_ROWS + first_row + j] = q;
        }
    }
}

KERNEL __launch_bounds__(HALVES * THREADS) router(const __grid_constant__ Router a) {
    __shared__ RouteScratch scratch[N_CHOOSING];
    __shared__ float sums[N_WARPS][2 * MAX_ROWS];
    __shared__ u32 is_last;
    PDL_LAUNCH();
    TRACE(0);
    const Linear& l = a.linear;
    u64 i = blockIdx.x;
    u32 part = 0;
    while (part + 1 < l.n_parts && i >= l.parts[part].n) i -= l.parts[part++].n;
    const LinearPart& of = l.parts[part];
    const Row row = row_of<WEIGHT>(of.w.q, of.w.scales, of.w.biases, i, l.k);
    const u32 units = (l.k + WEIGHT::UNIT - 1) / WEIGHT::UNIT;
    WEIGHT::Raw raw;
    const u32 half = threadIdx.x / THREADS, thread = threadIdx.x % THREADS;
    if (thread < units) WEIGHT::load(row, thread, raw);
    if (l.prologue.kind == NORMED) prefetch(l.prologue.w + 16 * min(threadIdx.x, (l.k - 1) / 16));
    TRACE(1);
    PDL_WAIT();
    TRACE(2);
    if (l.rows == 1) {
        if (half == 0) multiply<1>(a, raw, row, units, sums, 0);
    } else {
        for (u32 first = 2 * half; first < l.rows; first += 2 * HALVES) multiply<2>(a, raw, row, units, sums, first);
    }
    __syncthreads();
    if (threadIdx.x < l.rows) {
        float dot = 0.0f, squares = 0.0f;
#pragma unroll
        for (int w = 0; w < N_WARPS; w++) {
            dot += sums[w][threadIdx.x];
            squares += sums[w][MAX_ROWS + threadIdx.x];
        }
        if (l.prologue.kind == NORMED) dot *= 1.0f / sqrtf(squares / (float)l.k + l.prologue.eps);
        if (of.bias) dot += of.bias[i];
        if (part == 0) dot *= a.scale;
        of.out[threadIdx.x * of.n + i] = dot;
        if (a.counter) __threadfence();
    }
    TRACE(4);
    // Those who read the logits choose.
    if (a.counter == nullptr) return;
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(a.counter, 1) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (threadIdx.x == 0) *a.counter = 0;
    if (threadIdx.x / 32 >= N_CHOOSING) return;
    for (u32 token = threadIdx.x / 32; token < l.rows; token += N_CHOOSING) {
        route_row(a.route, token, l.parts[0].out + (u64)token * N_EXPERT, scratch[threadIdx.x / 32]);
        __syncwarp();
    }
}
