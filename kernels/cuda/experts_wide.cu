// experts of many rows: a projection of every pair's expert, or act(gate) * up, each plus its bias (`wide.h`).
//
// Activations are packed in the order of the lists (`expert_lists.cu`). A tile begins at a multiple of 8 of that order
// and leaves out columns of other experts. experts_pack: grid (groups of 8 pairs, shares of k), block 256; for narrow
// and middle tiles experts_narrow_pack. experts_wide, experts_gated_wide: grid (blocks of 128 or 64 rows of weights,
// tiles of up to `width` pairs of one expert, of which some find none and leave), block 256. experts_narrow,
// experts_gated_narrow: the same with tiles of up to 32 pairs, which take fewer registers, so that more weights are in
// flight; experts_middle, experts_gated_middle: of up to 64. experts_queue, experts_gated_queue: grid
// (multiprocessors), block 384 (`wide_queue.h`). experts_gated_bytes: grid (blocks of 64 rows of weights of gate, tiles
// of up to 24 pairs), block 256 (`experts_bytes.h`); `expert_lists` has packed its columns.
#include "cuda/batch_of.h"
#include "cuda/experts_bytes.h"
#include "cuda/wide_queue.h"
#include WEIGHT_HEADER

extern __shared__ uint4 shared[];

template <class W>
__device__ __forceinline__ void experts_pack_for(const WideExperts& a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const Experts& op = a.op;
    // Pairs without an expert are in no list.
    const u32 n_listed = op.first[op.n_expert];
    pack<W>(op.k, blockIdx.x, a.wide.n_groups, a.wide.packed, [&](u32 i) -> const float* {
        if (i >= n_listed) return nullptr;
        const u32 pair = op.pairs[i];
        return op.x + (u64)(op.x_per_pair ? pair : pair / op.n_used) * op.k;
    });
}

KERNEL __launch_bounds__(256) experts_pack(const __grid_constant__ WideExperts a) { experts_pack_for<WEIGHT>(a); }
KERNEL __launch_bounds__(256) experts_narrow_pack(const __grid_constant__ WideExperts a) {
    experts_pack_for<BatchOf<WEIGHT>::type>(a);
}

#if HAS_WGMMA
// Where a tile, which is number `skipped` of its expert's, begins and ends; these are all of one width.
__device__ __forceinline__ bool place_wide(u32 width, u32 first, u32 last, u32 skipped, u32& start, u32& begin,
                                           u32& end) {
    if (last <= first) return false;
    const u32 own = last - first / 8 * 8, n_tiles = (own + width - 1) / width;
    const u32 step = ((own + n_tiles - 1) / n_tiles + 7) / 8 * 8;
    start = first / 8 * 8 + skipped * step;
    begin = max(start, first);
    end = min(start + step, last);
    return begin < end;
}

// A thread's first row of weights, in the warp with this number of all that share a matrix. Gated ones have a row of
// gate and of up, others the row and the next one. Where activations are packed a warp has a piece of eight of a chunk.
template <bool GATED>
__device__ __forceinline__ u32 row_of_warp(const PackedHidden& to, u32 warp, u32 thread) {
    const u32 g = thread % 32 / 4;
    if (!GATED) return 16 * warp + 2 * g;
    if (!to.packed) return 8 * warp + g;
    const u32 chunk = warp / 8, unit = 4 * (chunk / to.runs) + g / 2, r = chunk % to.runs;
    const u32 run = to.paired ? 2 * to.runs * (unit / 2) + 2 * r + unit % 2 : to.runs * unit + r;
    return 16 * run + 2 * (warp % 8) + g % 2;
}

// Pairs of a tile in the order of the lists: its first column, and its own from `begin` on below `end`.
struct WidePairs {
    u32 expert, start, begin, end;
};

// Puts a thread's two rows of sums out packed. ALIGNED: the tile begins with a group of eight pairs.
template <bool SILU, bool ALIGNED, int N>
__device__ __forceinline__ void put_packed(const WideExperts& a, const WidePairs& tile, u32 warp, u32 thread,
                                           bool is_real, const float (&bias)[2], const float (&sums)[N]) {
    const Experts& op = a.op;
    const PackedHidden& to = a.hidden;
    // Two threads, one apart in g, have the two numbers of a word: one stores the first column's, the other the
    // second's.
    const u32 g = thread % 32 / 4, second = g % 2, r8 = thread % 4 * 2 + second, piece = warp % 8;
    uint4* const chunk = to.packed + (u64)(warp / 8) * to.n_groups * 64;
    u32* const out = (u32*)(chunk + tile.start / 8 * 64 + 8 * r8 + (piece ^ r8));
    const auto act = [&](float gate, float up) {
        gate += bias[0], up += bias[1];
        if (!is_real) return 0.0f;
        return SILU ? silu(gate) * up : gated(op.act, gate, up, op.alpha, op.limit);
    };
#pragma unroll
    for (int n = 0; n < N / 4; n++) {
        if (tile.start + 8 * n >= tile.end) break;
        const float v = act(sums[4 * n], sums[4 * n + 2]), v2 = act(sums[4 * n + 1], sums[4 * n + 3]);
        const float other = __shfl_xor_sync(FULL_MASK, second ? v : v2, 4);
        const u32 col = tile.start + 8 * n + r8;
        if (col < tile.begin || col >= tile.end) continue;
        u32* const words = ALIGNED ? out + 256 * n : (u32*)(chunk + col / 8 * 64 + 8 * (col % 8) + (piece ^ col % 8));
        words[g / 2] = second ? bf16_pair(other, v2) : bf16_pair(v, other);
    }
}

// Puts a thread's sums out: the warp with this number of those that share a matrix.
template <bool GATED, bool ALIGNED = true, int N>
__device__ __forceinline__ void put_out(const WideExperts& a, const WidePairs& tile, u32 warp, u32 thread,
                                        const float (&sums)[N]) {
    const Experts& op = a.op;
    const u32 row = row_of_warp<GATED>(a.hidden, warp, thread), second = GATED ? row : row + 1;
    const u64 first = (u64)tile.expert * op.n;
    const float* of_second = GATED ? op.up_bias : op.bias;
    const float bias[2] = {op.bias && row < op.n ? op.bias[first + row] : 0.0f,
                           of_second && second < op.n ? of_second[first + second] : 0.0f};
    if (GATED && a.hidden.packed) {
        if (8 * warp >= a.hidden.n) return;
        if (op.act == ACT_SILU) {
            put_packed<true, ALIGNED>(a, tile, warp, thread, row < op.n, bias, sums);
        } else {
            put_packed<false, ALIGNED>(a, tile, warp, thread, row < op.n, bias, sums);
        }
        return;
    }
    if (row >= op.n) return;
    const u32 n_cols = tile.end - tile.start, skipped = tile.begin - tile.start;
    if (!GATED && a.listed) {
        u16* const out = (u16*)op.out + (u64)tile.start * op.n + row;
        each_column(sums, thread, n_cols, [&](u32 col, float sum, float sum2) {
            if (col >= skipped) *(u32*)(out + (u64)col * op.n) = bf16_pair(sum + bias[0], sum2 + bias[1]);
        });
        return;
    }
    each_column(sums, thread, n_cols, [&](u32 col, float sum, float sum2) {
        if (col < skipped) return;
        float* out = op.out + (u64)op.pairs[tile.start + col] * op.n + row;
        sum += bias[0], sum2 += bias[1];
        if (GATED) {
            *out = gated(op.act, sum, sum2, op.alpha, op.limit);
        } else if (op.n % 2 == 0) {
            *(float2*)out = make_float2(sum, sum2);
        } else {
            out[0] = sum;
            if (second < op.n) out[1] = sum2;
        }
    });
}

// The expert of a block's tile, and how many of its tiles come before: every expert has the tile of its number, and
// those of more pairs have some after these. False where there is no such tile. The first tiles are named before the
// wait, as most experts have pairs, so that their weights can be asked for; only `further` ones have waited.
__device__ __forceinline__ bool tile_of_block(const WideExperts& a, u32& expert, u32& skipped, bool& has_waited) {
    expert = blockIdx.y, skipped = 0, has_waited = expert >= a.op.n_expert;
    if (!has_waited) return true;
    PDL_WAIT();
    const u32 further = expert - a.op.n_expert;
    if (further >= a.further[0]) return false;
    const u32 tile = a.further[1 + further];
    expert = tile >> 16, skipped = tile & 0xffff;
    return true;
}

template <bool GATED, class Shape>
__device__ __forceinline__ void experts_wide_of(const WideExperts& a) {
    PDL_LAUNCH();
    const Experts& op = a.op;
    __shared__ u32 found[3];
    u32 expert, skipped;
    bool has_waited;
    if (!tile_of_block(a, expert, skipped, has_waited)) return;
    // A block may have several blocks of rows, where these are all whole.
    const u32 n_blocks = Shape::IS_STAGED && !GATED ? (op.n + WIDE_ROWS - 1) / WIDE_ROWS / gridDim.x : 1;
    const u32 first_warp = blockIdx.x * n_blocks * (WIDE_THREADS / 32);
    const auto rows = [&](int i) {
        const Matrix& w = GATED && i ? op.up : op.w;
        const u32 of_warp = row_of_warp<GATED>(a.hidden, first_warp + threadIdx.x / 32, threadIdx.x);
        const u64 row = min(of_warp + (GATED ? 0 : i), op.n - 1);
        return row_of<WEIGHT>(w.q, w.scales, w.biases, (u64)expert * op.n + row, op.k);
    };
    const auto columns = [&] {
        if (!has_waited) PDL_WAIT();
        if (threadIdx.x == 0) {
            u32 start = 0, begin = 0, end = 0;
            place_wide(a.wide.width, op.first[expert], op.first[expert + 1], skipped, start, begin, end);
            found[0] = start, found[1] = begin, found[2] = end;
        }
        __syncthreads();
        return WideColumns{found[0] / 8, found[1] < found[2] ? found[2] - found[0] : 0};
    };
    const auto finish_block = [&](u32 thread, u32 block, const auto& sums) {
        const WidePairs tile = {expert, found[0], found[1], found[2]};
        put_out<GATED>(a, tile, first_warp + block * (WIDE_THREADS / 32) + thread / 32, thread, sums);
    };
    if constexpr (Shape::IS_STAGED) {
        const u64 stride = (u64)WIDE_ROWS * (op.k / Shape::W::BLOCK) * Shape::W::BYTES;
        wide_staged<Shape>(op.k, n_blocks, stride, a.wide.packed, a.wide.n_groups, (u8*)shared, rows, columns,
                           finish_block);
    } else {
        const auto finish = [&](u32 thread, const auto& sums) { finish_block(thread, 0, sums); };
        wide<Shape>(op.k, 0, Shape::steps(op.k), a.wide.packed, a.wide.n_groups, (u8*)shared, rows, columns, finish);
    }
}

KERNEL __launch_bounds__(WIDE_THREADS, WIDE_BLOCKS) experts_wide(const __grid_constant__ WideExperts a) {
    experts_wide_of<false, Wide<WEIGHT>>(a);
}
KERNEL __launch_bounds__(WIDE_THREADS, WIDE_BLOCKS) experts_gated_wide(const __grid_constant__ WideExperts a) {
    experts_wide_of<true, Wide<WEIGHT>>(a);
}

// Tiles of up to 32 columns, staged where the type is and shared memory has room, else in registers, of which three
// blocks hold units of 32 values; and of up to 64.
template <class W, bool IS_STAGED = StagedOf<W>::IS>
struct NarrowOf {
    typedef Wide<W, 32, 12, true> type;
    static constexpr u32 BLOCKS = sizeof(typename W::Raw) <= 48 && !type::SPLIT ? 3 : 2;
};
template <class W>
struct NarrowOf<W, true> {
    typedef WideStaged<W, 32, 12> type;
    static constexpr u32 BLOCKS = 2;
};
typedef NarrowOf<BatchOf<WEIGHT>::type> NarrowKind;
typedef NarrowKind::type Narrow;
typedef Wide<BatchOf<WEIGHT>::type, 64, 8, true> Middle;

KERNEL __launch_bounds__(WIDE_THREADS, NarrowKind::BLOCKS) experts_narrow(const __grid_constant__ WideExperts a) {
    experts_wide_of<false, Narrow>(a);
}
KERNEL __launch_bounds__(WIDE_THREADS, NarrowKind::BLOCKS) experts_gated_narrow(const __grid_constant__ WideExperts a) {
    experts_wide_of<true, Narrow>(a);
}
KERNEL __launch_bounds__(WIDE_THREADS, WIDE_BLOCKS) experts_middle(const __grid_constant__ WideExperts a) {
    experts_wide_of<false, Middle>(a);
}
KERNEL __launch_bounds__(WIDE_THREADS, WIDE_BLOCKS) experts_gated_middle(const __grid_constant__ WideExperts a) {
    experts_wide_of<true, Middle>(a);
}

// Of Q4_K alone.
KERNEL __launch_bounds__(BYTES_THREADS, 3) experts_gated_bytes(const __grid_constant__ WideExperts a) {
    bytes_begin((u8*)shared);
    PDL_LAUNCH();
    const Experts& op = a.op;
    u32 expert, skipped;
    bool has_waited;
    if (!tile_of_block(a, expert, skipped, has_waited)) return;
    const u32 first_warp = blockIdx.x * (BYTES_THREADS / 32);
    const u32 of_warp = row_of_warp<true>(a.hidden, first_warp + threadIdx.x / 32, threadIdx.x);
    const u64 at = ((u64)expert * op.n + min(of_warp, op.n - 1)) * (op.k / 256 * 144);
    const u8* rows[2] = {op.w.q + at, op.up.q + at};
#pragma unroll
    for (u32 i = 0; i < BYTES_AHEAD; i++) {
        bytes_copy(rows, bytes_copies((u8*)shared), threadIdx.x % 4, i, i < op.k / 256);
    }
    if (!has_waited) PDL_WAIT();
    const u32 first = op.first[expert], last = op.first[expert + 1];
    const u32 n_tiles = (last - first + 8 * BYTES_GROUPS - 1) / (8 * BYTES_GROUPS);
    const u32 groups = n_tiles == 0 ? 0 : ((last - first + 7) / 8 + n_tiles - 1) / n_tiles;
    const u32 begin = first + 8 * groups * skipped;
    const WidePairs tile = {expert, begin, begin, min(begin + 8 * groups, last)};
    if (tile.begin >= tile.end) {
        copy_async_wait<0>();
        return;
    }
    const ByteColumns* columns = (const ByteColumns*)a.wide.packed + bytes_group(first, expert) + groups * skipped;
    float acc[4 * BYTES_GROUPS];
#pragma unroll
    for (int i = 0; i < 4 * BYTES_GROUPS; i++) acc[i] = 0.0f;
    switch ((tile.end - tile.begin + 7) / 8) {
        case 1: bytes_tile<1>(op.k, rows, columns, a.wide.n_groups, (u8*)shared, acc); break;
        case 2: bytes_tile<2>(op.k, rows, columns, a.wide.n_groups, (u8*)shared, acc); break;
        default: bytes_tile<3>(op.k, rows, columns, a.wide.n_groups, (u8*)shared, acc);
    }
    const u32 thread = thread_anew();
    put_out<true, false>(a, tile, first_warp + thread / 32, thread, acc);
}

template <bool GATED>
__device__ __forceinline__ void experts_queue_of(const WideExperts& a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const Experts& op = a.op;
    const u32 width = a.wide.width, n_expert = op.n_expert;
    const u32 n_rows = GATED ? 2 * (a.hidden.packed ? a.hidden.n : op.n) : op.n;
    const u32 row_blocks = (n_rows + QUEUE_ROWS - 1) / QUEUE_ROWS;
    // Tiles of all experts before each, behind the ring; an expert's begin at a multiple of 8 and are of one width.
    u32* const before = (u32*)((u8*)shared + WideQueue<WEIGHT>::SHARED);
    const auto tiles_of = [&](u32 first, u32 last) {
        return last > first ? (last - first / 8 * 8 + width - 1) / width : 0;
    };
    if (threadIdx.x < 32) {
        u32 sum = 0;
#pragma unroll 4
        for (u32 e = 0; e < n_expert; e += 32) {
            const u32 mine = e + threadIdx.x;
            const u32 tiles = mine < n_expert ? tiles_of(op.first[mine], op.first[mine + 1]) : 0;
            const u32 to = sum_up_to(tiles);
            if (mine < n_expert) before[mine] = sum + to - tiles;
            sum += __shfl_sync(FULL_MASK, to, 31);
        }
        if (threadIdx.x == 0) before[n_expert] = sum;
    }
    __syncthreads();
    wide_queue<WEIGHT>(
        op.k, a.wide.packed, a.wide.n_groups, row_blocks * before[n_expert], (u8*)shared,
        [&](u32 index) {
            const u32 number = index / row_blocks;
            u32 expert = 0;
            // The last expert with no more than `number` tiles before it.
            for (u32 left = n_expert; left > 1;) {
                const u32 half = left / 2;
                if (before[expert + half] <= number) expert += half;
                left -= half;
            }
            const u32 first = op.first[expert], last = op.first[expert + 1], start = first / 8 * 8;
            const u32 n_tiles = before[expert + 1] - before[expert];
            const u32 each = ((last - start + n_tiles - 1) / n_tiles + 7) / 8 * 8;
            const u32 from = start + (number - before[expert]) * each, to = min(from + each, last);
            return WideTile{index % row_blocks, from / 8, to > from ? to - from : 1, expert, max(first, from)};
        },
        [&](const WideTile& tile, int i) {
            const Matrix& w = GATED && i ? op.up : op.w;
            const u32 warp = tile.row_block * (QUEUE_THREADS / 32) + threadIdx.x / 32;
            const u64 row = min(row_of_warp<GATED>(a.hidden, warp, threadIdx.x) + (GATED ? 0 : i), op.n - 1);
            return row_of<WEIGHT>(w.q, w.scales, w.biases, (u64)tile.expert * op.n + row, op.k);
        },
        [&](const WideTile& tile, u32 thread, const auto& sums) {
            const u32 start = tile.group * 8, end = min(start + tile.n_cols, op.first[tile.expert + 1]);
            // A tile without pairs has a column that is another expert's.
            if (end <= tile.begin) return;
            const u32 warp = tile.row_block * (QUEUE_THREADS / 32) + thread / 32;
            put_out<GATED>(a, WidePairs{tile.expert, start, tile.begin, end}, warp, thread, sums);
        });
}

KERNEL __launch_bounds__(QUEUE_THREADS, 1) experts_queue(const __grid_constant__ WideExperts a) {
    experts_queue_of<false>(a);
}
KERNEL __launch_bounds__(QUEUE_THREADS, 1) experts_gated_queue(const __grid_constant__ WideExperts a) {
    experts_queue_of<true>(a);
}
#endif
