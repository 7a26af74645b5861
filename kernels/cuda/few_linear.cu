// few_linear: as `linear` for one to eight rows of x, weights through shared memory (`few.h`); matrices of one type, or
// of two, -DWEIGHT and -DWEIGHT_B, of which the first blocks take those of the first.
//
// grid (blocks of both), block up to 512: a block has `each` rows of weights of all parts.
//
// Where x comes as packed columns blocks copy these and round nothing.
//
// few_long: the same for up to four rows of x and one matrix with more rows than blocks can hold in shared memory.
// Warps alternate, two rows of the block at a time, each with `stages` such pairs in flight.
//
// few_pack: rows after a gate as packed columns, which otherwise every block would apply to all rows. grid (k / 1024,
// rounded up, rows), block 128: a thread eight numbers.
#include "cuda/few.h"
#include "cuda/columns.h"
#include "cuda/linear.h"
#include WEIGHT_HEADER
#ifdef WEIGHT_B
#include WEIGHT_HEADER_B
#endif

extern __shared__ uint4 shared[];

template <class T, int COLS, bool HAS_GATES>
__device__ __forceinline__ void few_linear(const Linear& a, const Columns& columns, u32 block, u32 each) {
    typedef typename VecOf<T>::type W;
    const u32 n = (u32)rows_of_parts(a), first = min(block * each, n), count = min(each, n - first);
    const u32 row_bytes = a.k / W::BLOCK * W::BYTES, runs = ((a.k + 15) / 16 + 31) / 32 * 32;
    // The last barrier is of packed columns.
    const FewShared s = few_shared<W>(shared, COLS > 1 ? FEW_WARPS + 1 : FEW_WARPS, COLS, runs);
    const FewRows rows = few_rows_of_warp(count);
    TRACE(0);
    const u32 of_columns = s.barriers + 8 * FEW_WARPS;
    if (COLS > 1 && threadIdx.x == 0) barrier_init(of_columns, 1);
    few_barrier(s);
    u64 from = first + rows.first, to = from + max(rows.n, 1u) - 1;
    const bool is_piece = &part_of(a, from) == &part_of(a, to);
    few_copy<1>(s, rows, row_bytes, is_piece, [&](u32 i, int) { return linear_row<W>(a, first + i).q; });
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
            few_stage(staged, 0, a.x, a.prologue, a.k, threadIdx.x, blockDim.x, squares[0]);
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
        const bool is_packed = !HAS_GATES && Vec<W>::FORM == FORM_I8 && columns.of != nullptr;
        if (is_packed) {
            few_take(s, columns, a.rows, a.k, COLS, runs, runs, of_columns);
        } else {
            if (a.prologue.kind == NORMED) few_saw_nothing(s, COLS);
            few_stage_rows<W, HAS_GATES>(
                s, a.x, a.k, a.prologue, a.rows, COLS, a.k, threadIdx.x, blockDim.x,
                [&](u32 col, u32 run, u32 half, const float (&v)[8]) { staged.put(col, run, half, v); });
        }
        __syncthreads();
        if (is_packed) barrier_wait(of_columns, 0);
        TRACE(3);
        few_rows<W, COLS>(s, a.prologue, a.rows, a.k, rows, row_bytes,
                          [&](u32 i, u32 col, float sum) { linear_store(a, block * each + i, col, sum); });
    }
    TRACE(4);
}

// Rows of weights of a tile, and most tiles of a block (`few_launch.rs`).
#define MMA_ROWS 16u
#define MMA_TILES 3

// What warps multiply on tensor cores: rows of weights, `stride` bytes apart, and staged columns, whose scales lie
// `scale_runs` apart.
template <int COLS>
struct MmaBlock {
    Staged<q4_k_wide, COLS> staged;
    const u8* weights;
    u32 stride, count, scale_runs;

    // Four bytes of column g, of the run at that place.
    __device__ __forceinline__ u32 x(u32 at) const {
        const u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        return ((const u32*)(staged.words(0, g % COLS) + at))[t];
    }
    // The scale of a run of column 2t or 2t + 1, and its scaled sum.
    __device__ __forceinline__ float2 scale(int col, u32 at) const {
        return staged.scales(0)[(2 * (threadIdx.x % 4) + col) % COLS * scale_runs + at];
    }
    // Row g or g + 8 of a tile. Rows that are not there repeat the last one.
    __device__ __forceinline__ const u8* row(int tile, int i) const {
        return weights + min(tile * MMA_ROWS + 8 * i + threadIdx.x % 32 / 4, count - 1) * stride;
    }
};

// Adds the products of a unit to the sums of its rows of weights and columns.
template <class W>
struct MmaUnit {
    enum { IS = 0, UNIT = 0 };
};
template <>
struct MmaUnit<q4_k_wide> {
    enum { IS = 1, UNIT = 64 };
    template <int COLS>
    static __device__ __forceinline__ void add(const MmaBlock<COLS>& s, u32 unit, float (&acc)[MMA_TILES][4]) {
        const u32 t = threadIdx.x % 4;
        // Two groups of 32 values: two runs, and scales and sums of two columns.
        u32 x[2][2];
        float scale[2][2], total[2][2];
#pragma unroll
        for (int group = 0; group < 2; group++) {
            const u32 at = s.staged.slot(4 * unit + 2 * group);
            x[group][0] = s.x(at);
            x[group][1] = s.x(at ^ 1);
#pragma unroll
            for (int col = 0; col < 2; col++) {
                const float2 one = s.scale(col, at), two = s.scale(col, at ^ 1);
                scale[group][col] = one.x;
                total[group][col] = one.y + two.y;
            }
        }
#pragma unroll
        for (int tile = 0; tile < MMA_TILES; tile++) {
            if (tile * MMA_ROWS >= s.count) break;
            u32 q[4], scales[2], mins[2], head[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u8* from = s.row(tile, i) + unit / 4 * q4_k_wide::BYTES;
                const uint4 words = *(const uint4*)from;
                const u32 rest[3] = {words.y, words.z, words.w};
                head[i] = words.x;
                scales_mins(rest, unit % 4, scales[i], mins[i]);
                q[i] = ((const u32*)(from + 16 + 32 * (unit % 4)))[t];
                q[2 + i] = ((const u32*)(from + 32 + 32 * (unit % 4)))[t];
            }
#pragma unroll
            for (int group = 0; group < 2; group++) {
                u32 w[4];
#pragma unroll
                for (int i = 0; i < 4; i++) w[i] = q[i] >> (4 * group) & 0x0f0f0f0fu;
                int sum[4] = {};
                mma_bytes(sum, w[0], w[1], w[2], w[3], x[group][0], x[group][1]);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float d = float_of_f16(head[i]) * float_of_byte(scales[i], group, 0);
                    const float m = float_of_f16(head[i] >> 16) * float_of_byte(mins[i], group, 0);
#pragma unroll
                    for (int col = 0; col < 2; col++) {
                        float& to = acc[tile][2 * i + col];
                        to = fmaf(d, scale[group][col] * (float)sum[2 * i + col], to);
                        to = fmaf(-m, total[group][col], to);
                    }
                }
            }
        }
    }
};
// A unit is half a block.
template <>
struct MmaUnit<struct q6_k> {
    enum { IS = 1, UNIT = 128 };
    template <int COLS>
    static __device__ __forceinline__ void add(const MmaBlock<COLS>& s, u32 unit, float (&acc)[MMA_TILES][4]) {
        const u32 t = threadIdx.x % 4, half = unit % 2;
        // Every other block begins in the middle of a word.
        const u32 at_block = unit / 2 * 210 / 4 * 4, shift = unit / 2 % 2 * 16;
        const auto word = [&](const u8* from) {
            return funnel(((const u32*)from)[0], ((const u32*)from)[1], shift);
        };
#pragma unroll
        for (int tile = 0; tile < MMA_TILES; tile++) {
            if (tile * MMA_ROWS >= s.count) break;
            // Columns are read anew for each tile: they take more registers than there are.
            u32 first_run = 8 * unit;
            asm volatile("" : "+r"(first_run));
            const u8* from[2];
#pragma unroll
            for (int i = 0; i < 2; i++) from[i] = s.row(tile, i) + at_block;
            // Groups of 32 values whose low halves are in the same words: 0 and 64 of the half, then 32 and 96.
#pragma unroll 1
            for (u32 pair = 0; pair < 2; pair++) {
                int sum[2][2][4] = {};
#pragma unroll
                for (int run = 0; run < 2; run++) {
                    u32 low[2], high[2];
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        low[i] = word(from[i] + 64 * half + 32 * pair + 16 * run + 4 * t);
                        high[i] = word(from[i] + 128 + 32 * half + 16 * run + 4 * t);
                    }
#pragma unroll
                    for (int upper = 0; upper < 2; upper++) {
                        const u32 group = 2 * upper + pair;
                        u32 w[2];
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            const u32 four = upper ? low[i] >> 2 : low[i] << 2;
                            const u32 two = high[i] << (6 - 2 * group);
                            w[i] = ((four & 0x3c3c3c3cu) | (two & 0xc0c0c0c0u)) ^ 0x80808080u;
                        }
                        mma_short(sum[upper][run], w[0], w[1], s.x(s.staged.slot(first_run + 2 * group) ^ run));
                    }
                }
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const u8* rest = from[i] + shift / 8 + 192;
                    // A quarter, since bytes are four times the values.
                    const float d = 0.25f * float_of_f16(*(const u16*)(rest + 16));
#pragma unroll
                    for (int upper = 0; upper < 2; upper++) {
                        const u32 both = *(const u16*)(rest + 8 * half + 4 * upper + 2 * pair);
                        const int one = (i8)both, two = (i8)(both >> 8);
#pragma unroll
                        for (int col = 0; col < 2; col++) {
                            const int total = sum[upper][0][2 * i + col] * one + sum[upper][1][2 * i + col] * two;
                            const float scale = s.scale(col, s.staged.slot(first_run + 4 * upper + 2 * pair)).x;
                            float& to = acc[tile][2 * i + col];
                            to = fmaf(d * scale, (float)total, to);
                        }
                    }
                }
            }
        }
    }
};

// Four or eight columns, on tensor cores in integers: warps alternate in units of all rows, and their sums meet at the
// end. Rows of weights, and columns, are padded into different banks. A product has eight columns: where there are
// four, it has each twice.
template <class W, int COLS>
__device__ __forceinline__ void few_linear_mma(const Linear& a, const Columns& columns, u32 block, u32 each) {
    const u32 warps = blockDim.x / 32;
    const u32 n = (u32)rows_of_parts(a), first = min(block * each, n), count = min(each, n - first);
    // An odd number of pieces of 16 bytes.
    const u32 row_bytes = a.k / W::BLOCK * W::BYTES, stride = row_bytes | 16;
    const u32 units = a.k / MmaUnit<W>::UNIT, runs = ((a.k + 15) / 16 + 31) / 32 * 32 + 1;
    const FewShared s = few_shared<q4_k_wide>(shared, FEW_WARPS, COLS, runs + 1);
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (warp == 0) {
        if (lane == 0) {
            barrier_init(s.barriers, 1);
            barrier_init(s.barriers + 8, 1);
            fence_async();
            barrier_expect(s.barriers, count * row_bytes);
        }
        __syncwarp();
        for (u32 i = lane; i < count; i += 32) {
            bulk_copy(s.at + i * stride, linear_row<W>(a, first + i).q, row_bytes, s.barriers);
        }
    }
    const Staged<q4_k_wide, COLS> staged = {s.staged, runs};
    few_ahead(a.prologue, a.k);
    PDL_WAIT();
    // Scales are copied in pieces of 16 bytes: an even number.
    const u32 scale_runs = columns.of ? runs + 1 : runs;
    if (columns.of) {
        few_take(s, columns, a.rows, a.k, COLS, runs, scale_runs, s.barriers + 8);
    } else if constexpr (COLS == 8) {
        float squares[COLS] = {};
        staged.template spread<false>(a.x, a.k, a.prologue, a.rows, a.k, 0, squares);
        if (a.prologue.kind == NORMED) few_squares(squares, s.squares);
    } else {
        // As above, in fewer registers.
        if (a.prologue.kind == NORMED) few_saw_nothing(s, COLS);
        few_stage_rows<q4_k_wide, false>(
            s, a.x, a.k, a.prologue, a.rows, COLS, a.k, threadIdx.x, blockDim.x,
            [&](u32 col, u32 run, u32 half, const float (&v)[8]) { staged.put(col, run, half, v); });
    }
    __syncthreads();
    if (columns.of) barrier_wait(s.barriers + 8, 0);
    barrier_wait(s.barriers, 0);

    const MmaBlock<COLS> all = {staged, s.weights, stride, count, scale_runs};
    float acc[MMA_TILES][4];
#pragma unroll
    for (int i = 0; i < 4 * MMA_TILES; i++) acc[i / 4][i % 4] = 0.0f;
#pragma unroll 1
    for (u32 unit = warp; unit < units; unit += warps) MmaUnit<W>::add(all, unit, acc);
    // Sums of all warps go where weights are.
    __syncthreads();
    float* sums = (float*)s.weights; // [warps, MMA_TILES * MMA_ROWS, COLS]
#pragma unroll
    for (int tile = 0; tile < MMA_TILES; tile++) {
        if (tile * MMA_ROWS >= count || 2 * t >= COLS) break;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 row = tile * MMA_ROWS + 8 * (i / 2) + g;
            sums[(warp * MMA_TILES * MMA_ROWS + row) * COLS + 2 * t + i % 2] = acc[tile][i];
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < count * COLS; i += blockDim.x) {
        const u32 row = i / COLS, col = i % COLS;
        if (col >= a.rows) continue;
        float sum = 0.0f, r = 1.0f;
#pragma unroll 4
        for (u32 w = 0; w < warps; w++) sum += sums[(w * MMA_TILES * MMA_ROWS + row) * COLS + col];
        if (a.prologue.kind == NORMED) {
            float squares_of = 0.0f;
#pragma unroll 4
            for (u32 w = 0; w < warps; w++) squares_of += s.squares[FEW_WARPS * col + w];
            r = rsqrtf(__fdividef(squares_of, (float)a.k) + a.prologue.eps);
        }
        linear_store(a, first + row, col, sum * r);
    }
}

// Which of both takes these columns.
template <class T, int COLS, bool HAS_GATES>
__device__ __forceinline__ void few_any(const Linear& a, const Columns& columns, u32 block, u32 each) {
    typedef typename VecOf<T>::type W;
    if constexpr (COLS >= 4 && !HAS_GATES && MmaUnit<W>::IS) {
        few_linear_mma<W, COLS>(a, columns, block, each);
    } else {
        few_linear<T, COLS, HAS_GATES>(a, columns, block, each);
    }
}

#ifndef WEIGHT_B
KERNEL __launch_bounds__(128) few_pack(const __grid_constant__ PackColumns a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const u32 row = blockIdx.y, i = blockIdx.x * 128 + threadIdx.x, runs = column_runs(a.k);
    const Staged<q4_k_wide, 1> column = {(uint4*)(a.out + (u64)row * column_bytes(a.k)), runs};
    // Runs are multiples of 32, so that a warp is here as a whole.
    if (i / 2 >= runs) return;
    float v[8];
    load8<8>(a.x + (u64)row * a.k, true, a.k, 8 * i, v);
    Staged<q4_k_wide, 1>::gate(a.prologue, row, 8 * i < a.k, 8 * i, v);
    column.put(0, i / 2, i % 2, v);
}

template <class T, int COLS>
__device__ __forceinline__ void long_linear(const FewLinear& f) {
    typedef typename VecOf<T>::type W;
    PDL_LAUNCH();
    const Linear& a = f.op;
    const u32 n = (u32)a.parts[0].n, first = min(blockIdx.x * f.each, n), count = min(f.each, n - first);
    const u32 units = (a.k + W::UNIT - 1) / W::UNIT, runs = ((a.k + 15) / 16 + 31) / 32 * 32;
    const u32 row_bytes = a.k / W::BLOCK * W::BYTES;
    const FewShared s = few_shared<W>(shared, FEW_WARPS * f.stages, COLS, runs);
    const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
    // Rows are copied with what lies around them up to multiples of 16 bytes.
    const u32 slot_bytes = (2 * row_bytes + 30) / 16 * 16, n_pairs = (count + 1) / 2;
    const auto begin = [&](u32 pair) { return (u64)(first + 2 * pair) * row_bytes; };
    const auto barrier = [&](u32 stage) { return s.barriers + 8 * (warp * f.stages + stage); };
    const auto slot = [&](u32 stage) { return (warp * f.stages + stage) * slot_bytes; };
    const auto copy = [&](u32 pair, u32 stage) {
        const u64 from = begin(pair) / 16 * 16, end = (u64)(first + min(2 * pair + 2, count)) * row_bytes;
        const u32 bytes = (u32)((end + 15) / 16 * 16 - from);
        barrier_expect(barrier(stage), bytes);
        bulk_copy(s.at + slot(stage), a.parts[0].w.q + from, bytes, barrier(stage));
    };
    if (lane == 0) {
        for (u32 stage = 0; stage < f.stages; stage++) barrier_init(barrier(stage), 1);
        fence_async();
        for (u32 stage = 0; stage < f.stages; stage++) {
            if (warp + stage * warps < n_pairs) copy(warp + stage * warps, stage);
        }
    }
    const Staged<W, COLS> staged = {s.staged, runs};
    few_ahead(a.prologue, a.k);
    PDL_WAIT();
    if (a.prologue.kind == NORMED) few_saw_nothing(s, COLS);
    few_stage_rows<W, false>(
        s, a.x, a.k, a.prologue, a.rows, COLS, a.k, threadIdx.x, blockDim.x,
        [&](u32 col, u32 run, u32 half, const float (&v)[8]) { staged.put(col, run, half, v); });
    __syncthreads();
    // The lane's row of the pair and column, and what its sum is multiplied by.
    constexpr u32 LANES = 16 / COLS;
    const u32 own_row = lane / 16, own_col = lane % 16 / LANES;
    float r = 0.0f;
#pragma unroll
    for (int col = 0; col < COLS; col++) {
        const float factor = few_factor(a.prologue, s.squares, col, a.k);
        if (own_col == col) r = factor;
    }
    // Where rows are short a lane keeps the activations of one column.
    typename Staged<W, 1>::Held x;
    const Staged<W, 1> first_column = {s.staged, runs};
    if (COLS == 1 && lane < units) first_column.hold(lane, x);
    u32 stage = 0, parity = 0;
#pragma unroll 1
    for (u32 pair = warp; pair < n_pairs; pair += warps) {
        barrier_wait(barrier(stage), parity);
        const u8* at = s.weights + slot(stage) + begin(pair) % 16;
        float sums[2 * COLS] = {};
#pragma unroll 1
        for (u32 unit = lane; unit < units; unit += 32) {
            if (COLS == 1 && units > 32) first_column.hold(unit, x);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                // Behind the block's last row lies what was copied before, which is not stored.
                const u8* row = at + j * row_bytes;
                typename W::Raw raw;
                W::load({row, row, row, a.k}, unit, raw);
                if constexpr (Vec<W>::FORM == FORM_I8 && COLS == 1) {
                    Staged<W, 1>::dot_held(raw, unit, x, sums[j]);
                } else if constexpr (Vec<W>::FORM == FORM_I8) {
                    float part[COLS] = {};
                    staged.dot(raw, unit, 0, part);
#pragma unroll
                    for (int col = 0; col < COLS; col++) sums[j * COLS + col] += part[col];
                }
            }
        }
        __syncwarp();
        if (lane == 0 && pair + f.stages * warps < n_pairs) copy(pair + f.stages * warps, stage);
        const float sum = few_sums(sums);
        const u32 i = 2 * pair + own_row;
        if (lane % LANES == 0 && i < count && own_col < a.rows) linear_store(a, first + i, own_col, sum * r);
        if (++stage == f.stages) stage = 0, parity ^= 1;
    }
}

KERNEL __launch_bounds__(512, 1) few_long1(const __grid_constant__ FewLinear f) { long_linear<WEIGHT, 1>(f); }
KERNEL __launch_bounds__(512, 1) few_long2(const __grid_constant__ FewLinear f) { long_linear<WEIGHT, 2>(f); }
KERNEL __launch_bounds__(512, 1) few_long4(const __grid_constant__ FewLinear f) { long_linear<WEIGHT, 4>(f); }
#endif

#ifdef WEIGHT_B
#define FEW(BOUNDS, C)                                                               \
    KERNEL BOUNDS few_pair##C(const __grid_constant__ FewPair a) {                   \
        PDL_LAUNCH();                                                                 \
        if (blockIdx.x < a.blocks_a) {                                               \
            few_any<WEIGHT, C, false>(a.a, a.columns, blockIdx.x, a.each_a);                        \
        } else {                                                                     \
            few_any<WEIGHT_B, C, false>(a.b, a.columns, blockIdx.x - a.blocks_a, a.each_b);         \
        }                                                                            \
    }
#else
#define KIND(BOUNDS, NAME, C, HAS_GATES)                             \
    KERNEL BOUNDS NAME##C(const __grid_constant__ FewLinear a) {     \
        PDL_LAUNCH();                                                 \
        few_any<WEIGHT, C, HAS_GATES>(a.op, a.columns, blockIdx.x, a.each); \
    }
#define FEW(BOUNDS, C) KIND(BOUNDS, few_linear, C, false) KIND(BOUNDS, few_gated, C, true)
#endif
FEW(__maxnreg__(FEW_REGISTERS), 1)
FEW(__maxnreg__(FEW_REGISTERS), 2)
FEW(__maxnreg__(FEW_REGISTERS), 4)
// Sums of many columns take registers.
FEW(__launch_bounds__(512, 1), 8)
