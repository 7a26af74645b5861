// gated_linear of many rows: out[t, n] = act(sum_k gate[n, k] * x[t, k]) * sum_k up[n, k] * x[t, k] (`wide.h`).
//
// gated_linear_pack: grid (groups of 8 rows of x, shares of k), block 256. gated_linear_wide: grid (blocks of 64 rows
// of weights, tiles of `width` rows of x), block 256; the operand's rows g are gate's, rows g + 8 up's.
#include "cuda/wide.h"
#include WEIGHT_HEADER

extern __shared__ uint4 shared[];

KERNEL __launch_bounds__(256) gated_linear_pack(const __grid_constant__ WideGatedLinear a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const GatedLinear& op = a.op;
    pack<WEIGHT>(op.k, blockIdx.x, a.wide.n_groups, a.wide.packed,
                 [&](u32 i) { return i < op.rows ? op.x + (u64)i * op.k : nullptr; });
}

#if HAS_WGMMA
KERNEL __launch_bounds__(WIDE_THREADS, WIDE_BLOCKS) gated_linear_wide(const __grid_constant__ WideGatedLinear a) {
    PDL_LAUNCH();
    const GatedLinear& op = a.op;
    const u32 begin = blockIdx.y * a.wide.width, n_cols = min(a.wide.width, op.rows - begin);
    const auto row_of_thread = [](u32 thread) {
        return blockIdx.x * (WIDE_ROWS / 2) + thread / 32 * 8 + thread % 32 / 4;
    };
    wide<Wide<WEIGHT>>(
        op.k, 0, Wide<WEIGHT>::steps(op.k), a.wide.packed, a.wide.n_groups, (u8*)shared,
        [&](int i) {
            const Matrix& w = i ? op.up : op.gate;
            return row_of<WEIGHT>(w.q, w.scales, w.biases, min(row_of_thread(threadIdx.x), op.n - 1), op.k);
        },
        [&] {
            PDL_WAIT();
            return WideColumns{begin / 8, n_cols};
        },
        [&](u32 thread, const auto& sums) {
            const u32 row = row_of_thread(thread);
            float* out = op.out + (u64)begin * op.n + row;
            if (row >= op.n) return;
            each_column(sums, thread, n_cols, [=, &op](u32 col, float sum, float up) {
                out[(u64)col * op.n] = gated(op.act, sum, up, op.alpha, op.limit);
            });
        });
}
#endif
