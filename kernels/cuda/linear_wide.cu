// linear of many rows: out[t, n] = sum_k w[n, k] * x[t, k] (+ bias[n]), for up to four matrices of one type that share
// x (`wide.h`). Rows of all parts are numbered as one.
//
// linear_pack: grid (groups of 8 rows of x), block 256. linear_wide: grid (blocks of 128 rows of weights, tiles of
// `width` rows of x), block 256.
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

KERNEL __launch_bounds__(WIDE_THREADS, WIDE_BLOCKS) linear_wide(const __grid_constant__ WideLinear a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const Linear& op = a.op;
    const u32 begin = blockIdx.y * a.wide.width;
    wide<Wide<WEIGHT>>(
        op.k, a.wide.packed, a.wide.n_groups, begin / 8, min(a.wide.width, op.rows - begin), (u8*)shared,
        [&](int i) {
            const PartRow at(op, threadIdx.x, i);
            const Matrix& w = at.part->w;
            return row_of<WEIGHT>(w.q, w.scales, w.biases, at.row, op.k);
        },
        [&](u32 thread) {
            const PartRow at(op, thread, 0), second(op, thread, 1);
            const LinearPart &p = *at.part, &p2 = *second.part;
            float* out = p.out + (u64)begin * p.n + at.row;
            float* out2 = p2.out + (u64)begin * p2.n + second.row;
            const float bias = p.bias ? p.bias[at.row] : 0.0f, bias2 = p2.bias ? p2.bias[second.row] : 0.0f;
            const bool is_pair = &p == &p2 && p.n % 2 == 0 && second.is_real && (u64)out % 8 == 0;
            const u64 n = p.n, n2 = p2.n;
            const bool is_real = at.is_real, is_second = second.is_real, add = op.add;
            return [=](u32 col, float sum, float sum2) {
                sum += bias, sum2 += bias2;
                if (is_pair) {
                    float2* const to = (float2*)(out + col * n);
                    const float2 before = add ? *to : make_float2(0.0f, 0.0f);
                    *to = make_float2(before.x + sum, before.y + sum2);
                    return;
                }
                if (is_real) out[col * n] = add ? out[col * n] + sum : sum;
                if (is_second) out2[col * n2] = add ? out2[col * n2] + sum2 : sum2;
            };
        });
}
#endif
