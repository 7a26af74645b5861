// linear of many rows: out[t, n] = sum_k w[n, k] * x[t, k] (+ bias[n]), for up to four matrices of one type that share
// x (`wide.h`). Rows of all parts are numbered as one.
//
// linear_pack: grid (groups of 8 rows of x, shares of k), block 256. linear_wide: grid (blocks of 128 rows of weights,
// tiles of `width` rows of x, shares of k), block 256; linear_wide_alone is the same for few blocks. linear_wide_sum
// adds the shares' sums in order: grid (rows of weights / 256, rows of x), block 256. linear_queue: grid
// (multiprocessors), block 384 (`wide_queue.h`).
#include "cuda/linear.h"
#include "cuda/shares.h"
#include "cuda/wide_queue.h"
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
// The row of a thread's two, of rows numbered from `first` on: neighbouring lanes have neighbouring rows, two each.
// Those after the last are the last.
struct PartRow {
    const LinearPart* part;
    u32 row;
    bool is_real;
    __device__ __forceinline__ PartRow(const Linear& op, u32 first, u32 thread, int i) {
        const u32 wanted = first + thread / 32 * 16 + thread % 32 / 4 * 2 + i, n_rows = (u32)rows_of_parts(op);
        u32 p = 0;
        is_real = wanted < n_rows, row = is_real ? wanted : n_rows - 1;
        while (p + 1 < op.n_parts && row >= (u32)op.parts[p].n) row -= (u32)op.parts[p++].n;
        part = &op.parts[p];
    }
    __device__ __forceinline__ Row weights(u32 k) const {
        return row_of<WEIGHT>(part->w.q, part->w.scales, part->w.biases, row, k);
    }
};

// Stores a thread's sums of `n_cols` columns from `begin` on and of rows of weights from `first` on.
template <int N>
__device__ __forceinline__ void store_tile(const Linear& op, u32 first, u32 begin, u32 n_cols, u32 thread,
                                           const float (&sums)[N]) {
    const PartRow at(op, first, thread, 0), second(op, first, thread, 1);
    const LinearPart &p = *at.part, &p2 = *second.part;
    float* out = p.out + (u64)begin * p.n + at.row;
    float* out2 = p2.out + (u64)begin * p2.n + second.row;
    const float bias = p.bias ? p.bias[at.row] : 0.0f, bias2 = p2.bias ? p2.bias[second.row] : 0.0f;
    const u64 n = p.n, n2 = p2.n;
    const bool is_pair = &p == &p2 && n % 2 == 0 && second.is_real && (u64)out % 8 == 0;
    const bool is_real = at.is_real, is_second = second.is_real, add = op.add;
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
}

// The same of a share of k, whose sums have rows of all parts.
template <int N>
__device__ __forceinline__ void store_share(const WideLinear& a, u32 begin, u32 n_cols, u32 thread,
                                            const float (&sums)[N]) {
    const u32 n = (u32)rows_of_parts(a.op), row = blockIdx.x * WIDE_ROWS + thread / 32 * 16 + thread % 32 / 4 * 2;
    float* const out = a.sums + ((u64)blockIdx.z * a.op.rows + begin) * n + row;
    const bool is_pair = n % 2 == 0 && row + 1 < n;
    each_column(sums, thread, n_cols, [=](u32 col, float sum, float sum2) {
        float* const to = out + (u64)col * n;
        if (is_pair) {
            *(float2*)to = make_float2(sum, sum2);
            return;
        }
        if (row < n) to[0] = sum;
        if (row + 1 < n) to[1] = sum2;
    });
}

template <class Shape>
__device__ __forceinline__ void linear_wide_of(const WideLinear& a) {
    PDL_LAUNCH();
    const Linear& op = a.op;
    const u32 begin = blockIdx.y * a.wide.width, n_cols = min(a.wide.width, op.rows - begin);
    const u32 steps = Shape::steps(op.k), share = blockIdx.z, n_shares = gridDim.z;
    const u32 first = blockIdx.x * WIDE_ROWS;
    wide<Shape>(
        op.k, steps * share / n_shares, steps * (share + 1) / n_shares, a.wide.packed, a.wide.n_groups, (u8*)shared,
        [&](int i) { return PartRow(op, first, threadIdx.x, i).weights(op.k); },
        [&] {
            PDL_WAIT();
            return WideColumns{begin / 8, n_cols};
        },
        [&](u32 thread, const auto& sums) {
            if (gridDim.z > 1) {
                store_share(a, begin, n_cols, thread, sums);
            } else {
                store_tile(op, first, begin, n_cols, thread, sums);
            }
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
    float sum[1];
    add_shares<1, 4>({a.sums, op.rows * n_all, (u32)n_all, a.n_shares}, a.sums + row * n_all + i, sum);
    linear_store(op, i, row, sum[0]);
}

// Blocks that go from tile to tile, those of the same rows of weights one after the other: wider tiles for types whose
// units take many registers.
KERNEL __launch_bounds__(QUEUE_THREADS, 1) linear_queue(const __grid_constant__ WideLinear a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const Linear& op = a.op;
    const u32 width = a.wide.width, n_tiles = (op.rows + width - 1) / width;
    const u32 row_blocks = (u32)((rows_of_parts(op) + QUEUE_ROWS - 1) / QUEUE_ROWS);
    const auto first_of = [](const WideTile& tile) { return tile.row_block * QUEUE_ROWS; };
    wide_queue<WEIGHT>(
        op.k, a.wide.packed, a.wide.n_groups, row_blocks * n_tiles, (u8*)shared,
        [&](u32 index) {
            const u32 begin = index % n_tiles * width;
            return WideTile{index / n_tiles, begin / 8, min(width, op.rows - begin), 0, begin};
        },
        [&](const WideTile& tile, int i) { return PartRow(op, first_of(tile), threadIdx.x, i).weights(op.k); },
        [&](const WideTile& tile, u32 thread, const auto& sums) {
            store_tile(op, first_of(tile), tile.begin, tile.n_cols, thread, sums);
        });
}
#endif
