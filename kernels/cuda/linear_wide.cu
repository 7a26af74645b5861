// linear of many rows: out[t, n] = sum_k w[n, k] * x[t, k] (+ bias[n]), for up to four matrices of one type that share
// x (`wide.h`). Rows of all parts are numbered as one.
//
// linear_pack: grid (groups of 8 rows of x, shares of k), block 256. linear_wide: grid (blocks of 128 rows of weights,
// tiles of `width` rows of x, shares of k), block 256; linear_wide_alone is the same for few blocks. linear_wide_sum
// adds the shares' sums in order: grid (rows of weights / 256, rows of x), block 256.
#include "cuda/linear.h"
#include "cuda/wide.h"
#include WEIGHT_HEADER

extern __shared__ uint4 shared[];

KERNEL __launch_bounds__(256) linear_pack(const __grid_constant__ WideLinear a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const Linear& op = a.op;
    pack<WEIGHT>(op.k, blockIdx.x, a.wide.n_groups, a.wide.packed,
                 [&](u32 i) { return i < op.rows ? op.x + (u64)i * op.k : nullptr; });
}

#if HAS_WGMMA
// The row of a thread's two: neighbouring lanes have neighbouring rows, two each. Those behind the last are the last.
struct PartRow {
    const LinearPart* part;
    u64 row;
    bool is_real;
    __device__ __forceinline__ PartRow(const Linear& op, u32 thread, int i) {
        const u64 wanted = (u64)blockIdx.x * WIDE_ROWS + thread / 32 * 16 + thread % 32 / 4 * 2 + i;
        u64 n_rows = 0;
        for (u32 p = 0; p < op.n_parts; p++) n_rows += op.parts[p].n;
        u32 p = 0;
        is_real = wanted < n_rows, row = is_real ? wanted : n_rows - 1;
        while (p + 1 < op.n_parts && row >= op.parts[p].n) row -= op.parts[p++].n;
        part = &op.parts[p];
    }
};

template <class Shape>
__device__ __forceinline__ void linear_wide_of(const WideLinear& a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const Linear& op = a.op;
    const u32 begin = blockIdx.y * a.wide.width, n_cols = min(a.wide.width, op.rows - begin);
    const u32 steps = Shape::steps(op.k), share = blockIdx.z, n_shares = gridDim.z;
    wide<Shape>(
        op.k, steps * share / n_shares, steps * (share + 1) / n_shares, a.wide.packed, a.wide.n_groups, begin / 8,
        n_cols, (u8*)shared,
        [&](int i) {
            const PartRow at(op, threadIdx.x, i);
            const Matrix& w = at.part->w;
            return row_of<WEIGHT>(w.q, w.scales, w.biases, at.row, op.k);
        },
        [&](u32 thread, const auto& sums) {
            const PartRow at(op, thread, 0), second(op, thread, 1);
            const LinearPart &p = *at.part, &p2 = *second.part;
            // A share's sums have rows of all parts.
            const bool is_share = gridDim.z > 1;
            const u64 n_all = rows_of_parts(op), of_share = ((u64)blockIdx.z * op.rows + begin) * n_all;
            const u64 wanted = (u64)blockIdx.x * WIDE_ROWS + thread / 32 * 16 + thread % 32 / 4 * 2;
            float* out = is_share ? a.sums + of_share + wanted : p.out + (u64)begin * p.n + at.row;
            float* out2 = is_share ? out + 1 : p2.out + (u64)begin * p2.n + second.row;
            const float bias = p.bias && !is_share ? p.bias[at.row] : 0.0f;
            const float bias2 = p2.bias && !is_share ? p2.bias[second.row] : 0.0f;
            const u64 n = is_share ? n_all : p.n, n2 = is_share ? n_all : p2.n;
            const bool is_pair = (is_share || &p == &p2) && n % 2 == 0 && second.is_real && (u64)out % 8 == 0;
            const bool is_real = at.is_real, is_second = second.is_real, add = op.add && !is_share;
            each_column(sums, thread, n_cols, [=](u32 col, float sum, float sum2) {
                sum += bias, sum2 += bias2;
                if (is_pair) {
                    float2* const to = (float2*)(out + col * n);
                    const float2 before = add ? *to : make_float2(0.0f, 0.0f);
                    *to = make_float2(before.x + sum, before.y + sum2);
                    return;
                }
                if (is_real) out[col * n] = add ? out[col * n] + sum : sum;
                if (is_second) out2[col * n2] = add ? out2[col * n2] + sum2 : sum2;
            });
        });
}

KERNEL __launch_bounds__(WIDE_THREADS, WIDE_BLOCKS) linear_wide(const __grid_constant__ WideLinear a) {
    linear_wide_of<Wide<WEIGHT>>(a);
}

// Alone on a multiprocessor, where rows and columns are few. What rounding left of F32 has no second set of registers.
KERNEL __launch_bounds__(WIDE_THREADS, 1) linear_wide_alone(const __grid_constant__ WideLinear a) {
    linear_wide_of<Wide<WEIGHT, WideCols<WEIGHT>::OF, 6, false, !Tile<WEIGHT>::SPLIT>>(a);
}

KERNEL __launch_bounds__(256) linear_wide_sum(const __grid_constant__ WideLinear a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const Linear& op = a.op;
    const u64 n_all = rows_of_parts(op), i = (u64)blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    if (i >= n_all) return;
    const float* sums = a.sums + row * n_all + i;
    const u64 stride = op.rows * n_all;
    float sum = 0.0f;
    for (u32 first = 0; first < a.n_shares; first += 4) {
        float v[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) v[j] = first + j < a.n_shares ? sums[(first + j) * stride] : 0.0f;
#pragma unroll
        for (u32 j = 0; j < 4; j++) sum += v[j];
    }
    linear_store(op, i, row, sum);
}
#endif
