// few_linear: as `linear` for one to eight rows of x, weights through shared memory (`few.h`); matrices of one type, or
// of two, -DWEIGHT and -DWEIGHT_B, of which the first blocks take those of the first.
//
// grid (blocks of both), block up to 512: a block has `each` rows of weights of all parts.
#include "cuda/few.h"
#include "cuda/linear.h"
#include WEIGHT_HEADER
#ifdef WEIGHT_B
#include WEIGHT_HEADER_B
#endif

extern __shared__ uint4 shared[];

template <class T, int COLS, bool HAS_GATES>
__device__ __forceinline__ void few_linear(const Linear& a, u32 block, u32 each) {
    typedef typename VecOf<T>::type W;
    const u32 n = (u32)rows_of_parts(a), first = min(block * each, n), count = min(each, n - first);
    const u32 row_bytes = a.k / W::BLOCK * W::BYTES, runs = ((a.k + 15) / 16 + 31) / 32 * 32;
    const FewShared s = few_shared<W>(shared, FEW_WARPS, COLS, runs);
    const FewRows rows = few_rows_of_warp(count);
    TRACE(0);
    few_barrier(s);
    few_copy<1>(s, rows, row_bytes, [&](u32 i, int) { return linear_row<W>(a, first + i).q; });
    const Staged<W, COLS> staged = {s.staged, runs};
    few_ahead(a.prologue, a.k);
    if constexpr (COLS == 1) {
        // A lane stores a row of its warp.
        const u32 lane = threadIdx.x % 32;
        const bool has_row = lane < rows.n;
        float *out = nullptr, sum = 0.0f, up = 0.0f, before = 0.0f;
        if (has_row) {
            u64 i = first + rows.first + lane;
            const LinearPart& part = part_of(a, i);
            out = part.out + i;
            if (part.bias) before = part.bias[i];
        }
        TRACE(1);
        PDL_WAIT();
        TRACE(2);
        if (a.add && has_row) before += *out;
        float squares[1] = {};
        if (HAS_GATES) {
            staged.template fill<HAS_GATES>(a.x, a.k, a.prologue, 1, a.k, 0, squares);
        } else {
            few_stage<W>(staged, a.x, a.prologue, a.k, threadIdx.x, blockDim.x, squares[0]);
        }
        if (a.prologue.kind == NORMED) few_squares(squares, s.squares);
        __syncthreads();
        TRACE(3);
        few_rows_of_one<W, 1>(s, a.k, rows, row_bytes, sum, up);
        sum *= few_factor(a.prologue, s.squares, 0, a.k);
        if (has_row) *out = before + sum;
    } else {
        TRACE(1);
        PDL_WAIT();
        TRACE(2);
        float squares[COLS] = {};
        staged.template fill<HAS_GATES>(a.x, a.k, a.prologue, a.rows, a.k, 0, squares);
        if (a.prologue.kind == NORMED) few_squares(squares, s.squares);
        __syncthreads();
        TRACE(3);
        few_rows<W, COLS>(s, a.prologue, a.rows, a.k, rows, row_bytes,
                          [&](u32 i, u32 col, float sum) { linear_store(a, first + i, col, sum); });
    }
    TRACE(4);
}

#ifdef WEIGHT_B
#define FEW(BOUNDS, C)                                                               \
    KERNEL BOUNDS few_pair##C(const __grid_constant__ FewPair a) {                   \
        PDL_LAUNCH();                                                                 \
        if (blockIdx.x < a.blocks_a) {                                               \
            few_linear<WEIGHT, C, false>(a.a, blockIdx.x, a.each_a);                 \
        } else {                                                                     \
            few_linear<WEIGHT_B, C, false>(a.b, blockIdx.x - a.blocks_a, a.each_b);  \
        }                                                                            \
    }
#else
#define KIND(BOUNDS, NAME, C, HAS_GATES)                             \
    KERNEL BOUNDS NAME##C(const __grid_constant__ FewLinear a) {     \
        PDL_LAUNCH();                                                 \
        few_linear<WEIGHT, C, HAS_GATES>(a.op, blockIdx.x, a.each);  \
    }
#define FEW(BOUNDS, C) KIND(BOUNDS, few_linear, C, false) KIND(BOUNDS, few_gated, C, true)
#endif
FEW(__maxnreg__(FEW_REGISTERS), 1)
FEW(__launch_bounds__(512, 2), 2)
// Sums of many columns take registers.
FEW(__launch_bounds__(512, 1), 4)
FEW(__launch_bounds__(512, 1), 8)
