// router: the norm of x, its product with the router's matrix, and the choice of experts (`route.h`), for at most 8
// rows. Compiled for a weight type and a number of experts: -DWEIGHT, -DN_EXPERT. router_added: a normed row is added
// to x first; every block does it for itself, and the first one stores the sum. Where the experts read packed columns,
// blocks behind all others pack those of x.
//
// grid (rows of all parts, then rows of x to pack), block 160 to 256: a block a row of weights, which it reads before
// it waits, a thread for each unit as far as they go. Where half of the block is enough, its halves take pairs of rows
// in turn. Sums in f32: a thread's values, then lanes, then warps. The block that ends last chooses for all rows, a
// warp a row.
#include "cuda/columns.h"
#include "cuda/route.h"
#include "quant/unit.h"
#include WEIGHT_HEADER

#define MAX_THREADS 256
#define N_WARPS (MAX_THREADS / 32)
// Rows of x.
#define MAX_ROWS 8
// Warps that have memory to choose with.
#define N_CHOOSING (N_EXPERT <= 256 ? 8 : N_EXPERT <= 512 ? 4 : 2)

// Threads that share a row of x: half of the block, or all of it.
__device__ __forceinline__ u32 threads_of(u32 units) { return units <= MAX_THREADS / 2 ? MAX_THREADS / 2 : blockDim.x; }

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

// What the row that is added to a row of x is multiplied by. Called by the block.
__device__ __forceinline__ float factor_of_added(const Router& a, u32 row, float (&scratch)[33]) {
    const u32 k = a.linear.k;
    const float* added = a.added + (u64)row * k;
    float sum = 0.0f;
    for (u32 first = 16 * threadIdx.x; first < k; first += 16 * blockDim.x) {
        float y[16];
        load16(added, k, first, y);
#pragma unroll
        for (int i = 0; i < 16; i++) sum += y[i] * y[i];
    }
    return 1.0f / sqrtf(block_sum(sum, scratch) / (float)k + a.eps);
}

// The sum of x and the added row, stored by one block.
__device__ __forceinline__ void store_sum(const Router& a, const float* factors) {
    const u32 k = a.linear.k;
    for (u32 i = threadIdx.x; i < a.linear.rows * k; i += blockDim.x) {
        a.sum[i] = a.linear.x[i] + a.added[i] * factors[i / k] * a.added_w[i % k];
    }
}

// Every row of x with the block's row of weights.
template <int ROWS, bool ADDS>
__device__ __forceinline__ void multiply(const Router& a, const WEIGHT::Raw& raw, const Row& row, u32 units,
                                         float (*sums)[2 * MAX_ROWS], const float* factors, u32 first_row) {
    const Linear& l = a.linear;
    float dot[ROWS] = {}, squares[ROWS] = {};
    const u32 threads = threads_of(units);
#pragma unroll 1
    for (u32 unit = threadIdx.x % threads; unit < units; unit += threads) {
        WEIGHT::Raw now = raw;
        if (unit >= threads) WEIGHT::load(row, unit, now);
#pragma unroll
        for (int r = 0; r < WEIGHT::RUNS; r++) {
            float w[16], norm[16], added_w[16];
            decode_run<WEIGHT>(now, unit, r, w);
            const u32 first = 16 * run_index<WEIGHT>(unit, r);
            if (ADDS) load16(a.added_w, l.k, first, added_w);
            if (l.prologue.kind == NORMED) {
                load16(l.prologue.w, l.k, first, norm);
#pragma unroll
                for (int i = 0; i < 16; i++) w[i] *= norm[i];
            }
#pragma unroll
            for (int j = 0; j < ROWS; j++) {
                float x[16];
                const u32 row_of_x = first_row + j < l.rows ? first_row + j : 0;
                load16(l.x + (u64)row_of_x * l.k, l.k, first, x);
                if (ADDS) {
                    float y[16];
                    load16(a.added + (u64)row_of_x * l.k, l.k, first, y);
#pragma unroll
                    for (int i = 0; i < 16; i++) x[i] += y[i] * factors[row_of_x] * added_w[i];
                }
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
            sums[threadIdx.x % threads / 32][first_row + j] = d;
            sums[threadIdx.x % threads / 32][MAX_ROWS + first_row + j] = q;
        }
    }
}

template <bool ADDS>
__device__ __forceinline__ void multiply_all(const Router& a, const WEIGHT::Raw& raw, const Row& row, u32 units,
                                             float (*sums)[2 * MAX_ROWS], const float* factors) {
    const u32 rows = a.linear.rows, threads = threads_of(units);
    const u32 half = threadIdx.x / threads, halves = blockDim.x / threads;
    if (rows == 1) {
        if (half == 0) multiply<1, ADDS>(a, raw, row, units, sums, factors, 0);
    } else {
        for (u32 first = 2 * half; first < rows; first += 2 * halves) {
            multiply<2, ADDS>(a, raw, row, units, sums, factors, first);
        }
    }
}

template <bool ADDS>
__device__ __forceinline__ void route_all(const Router& a) {
    __shared__ RouteScratch scratch[N_CHOOSING];
    __shared__ float block_scratch[33], factors[MAX_ROWS];
    __shared__ float sums[N_WARPS][2 * MAX_ROWS];
    __shared__ u32 is_last;
    PDL_LAUNCH();
    TRACE(0);
    const Linear& l = a.linear;
    const u32 n_blocks = gridDim.x - (a.pack.out ? l.rows : 0);
    if (blockIdx.x >= n_blocks) {
        PDL_WAIT();
        pack_row(a.pack, blockIdx.x - n_blocks, block_scratch);
        return;
    }
    u64 i = blockIdx.x;
    u32 part = 0;
    while (part + 1 < l.n_parts && i >= l.parts[part].n) i -= l.parts[part++].n;
    const LinearPart& of = l.parts[part];
    const Row row = row_of<WEIGHT>(of.w.q, of.w.scales, of.w.biases, i, l.k);
    const u32 units = (l.k + WEIGHT::UNIT - 1) / WEIGHT::UNIT;
    WEIGHT::Raw raw;
    const u32 threads = threads_of(units), thread = threadIdx.x % threads;
    if (thread < units) WEIGHT::load(row, thread, raw);
    if (l.prologue.kind == NORMED) prefetch(l.prologue.w + 16 * min(threadIdx.x, (l.k - 1) / 16));
    TRACE(1);
    PDL_WAIT();
    TRACE(2);
    if (ADDS) {
        for (u32 of_row = 0; of_row < l.rows; of_row++) {
            const float factor = factor_of_added(a, of_row, block_scratch);
            if (threadIdx.x == 0) factors[of_row] = factor;
        }
        __syncthreads();
        if (blockIdx.x == 0) store_sum(a, factors);
    }
    multiply_all<ADDS>(a, raw, row, units, sums, factors);
    __syncthreads();
    if (threadIdx.x < l.rows) {
        float dot = 0.0f, squares = 0.0f;
        for (u32 w = 0; w < threads / 32; w++) {
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
    if (threadIdx.x == 0) is_last = atomicAdd(a.counter, 1) == n_blocks - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (threadIdx.x == 0) *a.counter = 0;
    const u32 warps = min((u32)N_CHOOSING, blockDim.x / 32);
    if (threadIdx.x / 32 >= warps) return;
    for (u32 token = threadIdx.x / 32; token < l.rows; token += warps) {
        const float* logits = l.parts[0].out + (u64)token * N_EXPERT;
        route_row(a.route, token, [&](u32 e) { return __ldcg(logits + e); }, scratch[threadIdx.x / 32]);
        __syncwarp();
    }
}

KERNEL __launch_bounds__(MAX_THREADS) router(const __grid_constant__ Router a) { route_all<false>(a); }
KERNEL __launch_bounds__(MAX_THREADS) router_added(const __grid_constant__ Router a) { route_all<true>(a); }
