// few_routed: as `few_linear` for one row of x that is added to a row, with the product of the router behind it. A
// block knows ROWS numbers of the sum; times the norm's weights it multiplies them with the same columns of the
// router's matrix (f32), and adds what they give to each expert's logit, as an integer, since sums of integers have no
// order. Those who choose read the sums (`choose.h`), so that no launch of a router stands between.
//
// grid (n / ROWS), at most 256 blocks of 512 or 640, compiled for a number of experts: -DN_EXPERT, a multiple of 16.
#include "cuda/async.h"
#include "cuda/few.h"
#include "cuda/choose.h"
#include "cuda/linear.h"
#include WEIGHT_HEADER

// Rows of weights of a block (`few_launch.rs`).
#define ROUTED_ROWS 16

extern __shared__ uint4 shared[];

KERNEL __maxnreg__(FEW_REGISTERS) few_routed(const __grid_constant__ FewRouted f) {
    typedef typename VecOf<WEIGHT>::type W;
    // Numbers of the sum times the norm's weights, and their squares.
    __shared__ __align__(16) float normed[ROUTED_ROWS];
    __shared__ float squared[ROUTED_ROWS];
    const Linear& a = f.op;
    const u32 n = (u32)a.parts[0].n, first = blockIdx.x * ROUTED_ROWS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 row_bytes = a.k / W::BLOCK * W::BYTES, runs = ((a.k + 15) / 16 + 31) / 32 * 32;
    const FewShared s = few_shared<W>(shared, FEW_WARPS, 1, runs);
    const FewRows rows = few_rows_of_warp(ROUTED_ROWS);
    TRACE(0);
    few_barrier(s);
    const auto row_at = [&](u32 i, int) { return a.parts[0].w.q + (u64)(first + i) * row_bytes; };
    few_copy<1>(s, rows, row_bytes, true, row_at);
    // Columns of the router lie behind the weights, four to a piece; who copied a piece reads it.
    float4* const columns = (float4*)(s.weights + ROUTED_ROWS * row_bytes);
    constexpr u32 QUADS = ROUTED_ROWS / 4, N_PIECES = N_EXPERT * QUADS;
    for (u32 i = threadIdx.x; i < N_PIECES; i += blockDim.x) {
        copy_async(columns + i, f.router + (u64)(i / QUADS) * n + first + i % QUADS * 4);
    }
    copy_async_commit();
    const Staged<W, 1> staged = {s.staged, runs};
    const bool has_row = lane < rows.n;
    const u32 row = rows.first + lane;
    // What a lane wants later waits where it will write.
    if (has_row) {
        normed[row] = f.norm[first + row];
        squared[row] = a.parts[0].bias ? a.parts[0].bias[first + row] : 0.0f;
    }
    TRACE(1);
    PDL_WAIT();
    // Later than others: blocks of the next launch, which wait long, hold up the end of the one before.
    PDL_LAUNCH();
    TRACE(2);
    if (has_row) squared[row] += a.parts[0].out[first + row];
    float none;
    few_stage(staged, 0, a.x, Prologue{}, a.k, threadIdx.x, blockDim.x, none);
    __syncthreads();
    TRACE(3);
    float sum = 0.0f, none_up = 0.0f;
    few_rows_of_one<W, 1>(s, a.k, rows, row_bytes, sum, none_up);
    if (has_row) {
        const float x = squared[row] + sum;
        a.parts[0].out[first + row] = x;
        normed[row] *= x;
        squared[row] = x * x;
    }
    __syncthreads();
    i64* const sums = f.sums.of + blockIdx.x % LOGIT_COPIES * N_EXPERT;
    copy_async_wait<0>();
    // Whole warps, as there are whole warps of pieces.
    for (u32 i = threadIdx.x; i < N_PIECES; i += blockDim.x) {
        const float4 x = *(const float4*)(normed + i % QUADS * 4), w = columns[i];
        float dot = w.x * x.x + w.y * x.y + (w.z * x.z + w.w * x.w);
#pragma unroll
        for (u32 step = 1; step < QUADS; step *= 2) dot += __shfl_xor_sync(FULL_MASK, dot, step);
        if (i % QUADS == 0) {
            const bool is_held = fabsf(dot) < LOGIT_MOST;
            i64* const to = is_held ? sums + i / QUADS : f.sums.of + LOGIT_COPIES * N_EXPERT;
            atomicAdd((unsigned long long*)to, is_held ? (unsigned long long)__float2ll_rn(dot * LOGIT_UNIT) : 1ull);
        }
    }
    if (warp == 0) {
        const float squares = warp_sum(lane < ROUTED_ROWS ? squared[lane] : 0.0f);
        if (lane == 0) f.sums.squares[blockIdx.x] = squares;
    }
    TRACE(4);
}
