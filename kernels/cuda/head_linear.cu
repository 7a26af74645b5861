// head_linear: a matrix a head, out[t, h, n] = sum_k w[h, n, k] * x[t, h, k]; head_linear_t: matrices that lie as w[h,
// k, n].
//
// head_linear_vec<C>: at most C = 1, 2, 4, 8 rows, tiles of a head's rows of weights in the grid's x, heads in its y
// (`vec.h`). head_linear_tile<C>: tiles of rows of x in the grid's x, rows of weights in its y, heads in its z
// (`tile.h`). head_linear_t: units of n in the grid's x, heads in its y, tiles of rows of x in its z. Threads are units
// of n times slices of k; a thread adds up its unit's values over the k of its slice, and slices are added in order.
// Sums in f32 of f32 activations.
#include "cuda/tile.h"
#include "cuda/vec.h"
#include WEIGHT_HEADER

extern __shared__ uint4 shared[];

__device__ __forceinline__ Row head_row(const HeadLinear& a, u32 head, u64 i) {
    return row_of<WEIGHT>(a.w.q, a.w.scales, a.w.biases, (u64)head * a.n + i, a.k);
}

template <int COLS>
__device__ __forceinline__ void head_vec(const HeadLinear& a) {
    PDL_LAUNCH();
    const u32 head = blockIdx.y;
    vec<WEIGHT, COLS, false, false>(
        a.x + (u64)head * a.k, (u64)a.n_head * a.k, Prologue{}, a.rows, a.k, a.n, blockIdx.x, gridDim.x, shared, true,
        [&](u64 i, bool) { return head_row(a, head, i); },
        [&](u64 i, u32 col, float sum, float) { a.out[((u64)col * a.n_head + head) * a.n + i] = sum; });
}

template <int COLS>
__device__ __forceinline__ void head_tile(const HeadLinear& a) {
    PDL_LAUNCH();
    const u32 head = blockIdx.z;
    const u64 first = (u64)blockIdx.x * COLS;
    tile<WEIGHT, COLS, false, true>(
        a.k, a.n, shared, [&](u64 i, bool) { return head_row(a, head, i); },
        [&](u32 col) { return first + col < a.rows ? a.x + ((first + col) * a.n_head + head) * a.k : nullptr; },
        [&](u64 i, u32 col, float sum, float) {
            if (first + col < a.rows) a.out[((first + col) * a.n_head + head) * a.n + i] = sum;
        });
}

#define VEC(C)                                                     \
    KERNEL __launch_bounds__(VEC_THREADS)       \
        head_linear_vec##C(const __grid_constant__ HeadLinear a) { \
        head_vec<C>(a);                                            \
    }
#define TILE(C)                                                     \
    KERNEL __launch_bounds__(256, Tile<WEIGHT>::blocks(C, 1))       \
        head_linear_tile##C(const __grid_constant__ HeadLinear a) { \
        head_tile<C>(a);                                            \
    }
VEC(1)
VEC(2)
VEC(4)
VEC(8)
TILE(16)
TILE(32)
TILE(64)

// Rows of x a thread holds sums for: at most 64 sums.
constexpr int T_ROWS = 4 / WEIGHT::RUNS;

// Units of n side by side in a block: a power of two up to 32.
__device__ __forceinline__ u32 unit_lanes(u32 units) {
    u32 lanes = 1;
    while (lanes < 32 && lanes < units) lanes *= 2;
    return lanes;
}

KERNEL __launch_bounds__(256) head_linear_t(const __grid_constant__ HeadLinear a) {
    PDL_LAUNCH();
    PDL_WAIT();
    __shared__ float sums[256][17];
    const u32 units = (a.n + WEIGHT::UNIT - 1) / WEIGHT::UNIT, lanes = unit_lanes(units), slices = blockDim.x / lanes;
    const u32 slice = threadIdx.x / lanes, unit = blockIdx.x * lanes + threadIdx.x % lanes, head = blockIdx.y;
    const u64 first = (u64)blockIdx.z * T_ROWS;
    float acc[T_ROWS][WEIGHT::RUNS][16];
#pragma unroll
    for (int i = 0; i < T_ROWS * WEIGHT::RUNS * 16; i++)
        acc[i / 16 / WEIGHT::RUNS][i / 16 % WEIGHT::RUNS][i % 16] = 0.0f;
    if (unit < units) {
        for (u32 i = slice; i < a.k; i += slices) {
            WEIGHT::Raw raw;
            WEIGHT::load(row_of<WEIGHT>(a.w.q, a.w.scales, a.w.biases, (u64)head * a.k + i, a.n), unit, raw);
            float x[T_ROWS];
#pragma unroll
            for (int t = 0; t < T_ROWS; t++) {
                x[t] = first + t < a.rows ? a.x[((first + t) * a.n_head + head) * a.k + i] : 0.0f;
            }
#pragma unroll
            for (int r = 0; r < WEIGHT::RUNS; r++) {
                float v[16];
                decode_run<WEIGHT>(raw, unit, r, v);
#pragma unroll
                for (int j = 0; j < T_ROWS * 16; j++)
                    acc[j / 16][r][j % 16] = fmaf(v[j % 16], x[j / 16], acc[j / 16][r][j % 16]);
            }
        }
    }
#pragma unroll
    for (int t = 0; t < T_ROWS; t++) {
#pragma unroll
        for (int r = 0; r < WEIGHT::RUNS; r++) {
            __syncthreads();
#pragma unroll
            for (int i = 0; i < 16; i++) sums[threadIdx.x][i] = acc[t][r][i];
            __syncthreads();
            for (u32 i = threadIdx.x; i < lanes * 16; i += blockDim.x) {
                const u32 of_unit = blockIdx.x * lanes + i / 16, n = 16 * run_index<WEIGHT>(of_unit, r) + i % 16;
                float sum = 0.0f;
                for (u32 from = 0; from < slices; from++) sum += sums[from * lanes + i / 16][i % 16];
                if (of_unit < units && n < a.n && first + t < a.rows) {
                    a.out[((first + t) * a.n_head + head) * a.n + n] = sum;
                }
            }
        }
    }
}
