// experts: for every pair (token, slot) a projection of the chosen expert, or act(gate) * up; each plus its bias.
//
// experts_vec, experts_gated_vec: few pairs. A pair in the grid's y, tiles of the expert's rows in its x (`vec.h`);
// experts that several pairs chose are read again, from the second cache. experts_tile<C>, experts_gated_tile<C>: pairs
// listed by expert (`expert_lists.cu`). A tile of up to C pairs of one expert in the grid's x, of which the last find
// no pairs and leave; rows of weights in its y (`tile.h`). An id that names no expert never becomes an address: such a
// pair's row is zero (vec) or is not written (tile).
#include "cuda/tile.h"
#include "cuda/vec.h"
#include WEIGHT_HEADER

extern __shared__ uint4 shared[];

__device__ __forceinline__ const float* pair_x(const Experts& a, u32 pair) {
    return a.x + (u64)(a.x_per_pair ? pair : pair / a.n_used) * a.k;
}

__device__ __forceinline__ Row expert_row(const Experts& a, u32 expert, u64 i, bool up) {
    const Matrix& w = up ? a.up : a.w;
    return row_of<WEIGHT>(w.q, w.scales, w.biases, (u64)expert * a.n + i, a.k);
}

template <bool GATED>
__device__ __forceinline__ void expert_store(const Experts& a, u32 expert, u32 pair, u64 i, float sum, float up) {
    const u64 bias = (u64)expert * a.n + i;
    if (a.bias) sum += a.bias[bias];
    if (GATED && a.up_bias) up += a.up_bias[bias];
    a.out[(u64)pair * a.n + i] = GATED ? gated(a.act, sum, up, a.alpha, a.limit) : sum;
}

// Launches the next kernel behind the wait: it may read ids and everything older before it waits itself.
template <bool GATED>
__device__ __forceinline__ void experts_vec(const Experts& a) {
    const u32 pair = blockIdx.y, n_pairs = a.rows * a.n_used;
    if (pair >= n_pairs) {
        PDL_LAUNCH();
        const u32 row = pair - n_pairs;
        vec<WEIGHT, 1, GATED, false>(
            a.x + (u64)row * a.k, a.k, a.prologue, 1, a.k, a.shared_n, blockIdx.x, gridDim.x, shared, true,
            [&](u64 i, bool up) {
                const Matrix& w = up ? a.shared_up : a.shared_w;
                return row_of<WEIGHT>(w.q, w.scales, w.biases, i, a.k);
            },
            [&](u64 i, u32, float sum, float up) {
                a.shared_out[(u64)row * a.shared_n + i] = GATED ? gated(a.act, sum, up, a.alpha, a.limit) : sum;
            });
        return;
    }
    if (a.prologue.kind == NORMED) prefetch(a.prologue.w + 8 * min(threadIdx.x, (a.k - 1) / 8));
    PDL_WAIT();
    PDL_LAUNCH();
    const u32 expert = a.ids[pair];
    if (expert >= a.n_expert) {
        for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < a.n; i += (u64)gridDim.x * blockDim.x) {
            a.out[(u64)pair * a.n + i] = 0.0f;
        }
        return;
    }
    vec<WEIGHT, 1, GATED, false>(
        pair_x(a, pair), a.k, a.prologue, 1, a.k, a.n, blockIdx.x, gridDim.x, shared, false,
        [&](u64 i, bool up) { return expert_row(a, expert, i, up); },
        [&](u64 i, u32, float sum, float up) { expert_store<GATED>(a, expert, pair, i, sum, up); });
}

// The expert of tile `tile` of at most `cols` pairs, and where its pairs begin and end; false behind the last tile.
// Called by a whole warp; tiles are numbered in the order of the experts.
__device__ __forceinline__ bool find_tile(const Experts& a, u32 tile, u32 cols, u32& expert, u32& begin, u32& end) {
    const u32 lane = threadIdx.x % 32;
    u32 before = 0;
    for (u32 e = 0; e < a.n_expert; e += 32) {
        const u32 mine = e + lane, first = mine < a.n_expert ? a.first[mine] : 0;
        const u32 last = mine < a.n_expert ? a.first[mine + 1] : 0;
        const u32 tiles = (last - first + cols - 1) / cols, sum = sum_up_to(tiles);
        const u32 hit = __ballot_sync(FULL_MASK, before + sum > tile);
        if (hit) {
            const u32 from = __ffs(hit) - 1;
            const u32 skipped = tile - (before + __shfl_sync(FULL_MASK, sum - tiles, from));
            expert = e + from;
            begin = __shfl_sync(FULL_MASK, first, from) + skipped * cols;
            end = min(__shfl_sync(FULL_MASK, last, from), begin + cols);
            return true;
        }
        before += __shfl_sync(FULL_MASK, sum, 31);
    }
    return false;
}

template <int COLS, bool GATED>
__device__ __forceinline__ void experts_tile(const Experts& a) {
    PDL_LAUNCH();
    PDL_WAIT();
    __shared__ u32 pairs[COLS], found[3];
    if (threadIdx.x < 32) {
        u32 expert = 0, begin = 0, end = 0;
        find_tile(a, blockIdx.x, COLS, expert, begin, end);
        if (threadIdx.x == 0) found[0] = expert, found[1] = begin, found[2] = end;
    }
    __syncthreads();
    const u32 expert = found[0], begin = found[1], n_cols = found[2] - begin;
    if (n_cols == 0) return;
    for (u32 col = threadIdx.x; col < n_cols; col += blockDim.x) pairs[col] = a.pairs[begin + col];
    __syncthreads();
    tile<WEIGHT, COLS, GATED, false>(
        a.k, a.n, shared, [&](u64 i, bool up) { return expert_row(a, expert, i, up); },
        [&](u32 col) { return col < n_cols ? pair_x(a, pairs[col]) : nullptr; },
        [&](u64 i, u32 col, float sum, float up) {
            if (col < n_cols) expert_store<GATED>(a, expert, pairs[col], i, sum, up);
        });
}

KERNEL __launch_bounds__(VEC_THREADS) experts_vec(const __grid_constant__ Experts a) {
    experts_vec<false>(a);
}
KERNEL __launch_bounds__(VEC_THREADS) experts_gated_vec(const __grid_constant__ Experts a) {
    experts_vec<true>(a);
}

#define TILE(C)                                                                                                    \
    KERNEL __launch_bounds__(256, Tile<WEIGHT>::blocks(C, 1)) experts_tile##C(const __grid_constant__ Experts a) { \
        experts_tile<C, false>(a);                                                                                 \
    }
#define GATED_TILE(C)                                              \
    KERNEL __launch_bounds__(256, Tile<WEIGHT>::blocks(C, 2))      \
        experts_gated_tile##C(const __grid_constant__ Experts a) { \
        experts_tile<C, true>(a);                                  \
    }
TILE(8)
TILE(16)
TILE(32)
TILE(64)
GATED_TILE(8)
GATED_TILE(16)
GATED_TILE(32)
GATED_TILE(64)
