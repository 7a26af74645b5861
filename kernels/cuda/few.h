// Products with one to eight columns on Hopper and later: a block copies its rows of weights to shared memory whole,
// by bulk copies, which take neither registers nor threads. So blocks are small, those of the next kernel fit beside
// them, and weights that are known before the kernels ahead are done come while these work.
//
// Rows of weights are multiples of 16 bytes. Activations and sums are those of `vec.h`.
#pragma once

// As weights are read here.
#define WEIGHTS_IN_SHARED 1

#include "cuda/vec.h"
#include "cuda/wgmma.h"

// Two launches, one after the other, share a multiprocessor, a block each: that of one takes more than half of the
// shared memory, that of the other more than half of the registers, so that no two of the same launch fit and all
// multiprocessors have work. Threads of the two kinds, and registers of a thread.
#define FEW_THREADS 640
#define FEW_REGISTERS 56

// Most warps of a block, rounded up to a multiple of 4.
#define FEW_WARPS (FEW_THREADS / 32)

// Shared memory of a block: barriers, what it saw of each column, staged activations, weights.
struct FewShared {
    float* squares; // [columns][FEW_WARPS]
    uint4* staged;
    u8* weights;
    u32 barriers, at; // addresses of barriers and weights in shared memory
};

// For `n_barriers` copies and the staged activations of `n_cols` columns in `runs` runs.
template <class W>
__device__ __forceinline__ FewShared few_shared(uint4* shared, u32 n_barriers, u32 n_cols, u32 runs) {
    FewShared out;
    u32 words = (n_barriers + 1) / 2;
    out.barriers = address_in_shared(shared);
    out.squares = (float*)(shared + words);
    words += FEW_WARPS / 4 * n_cols;
    out.staged = shared + words;
    words += n_cols * runs * Vec<W>::RUN_BYTES / 16;
    // Whole lines.
    words += (128 - (out.barriers + 16 * words) % 128) % 128 / 16;
    out.weights = (u8*)(shared + words);
    out.at = address_in_shared(shared + words);
    return out;
}

// Sums of what the warps saw of each column; those that saw nothing add zeros.
template <int COLS>
__device__ __forceinline__ void few_squares(const float (&squares)[COLS], float* shared) {
#pragma unroll
    for (int col = 0; col < COLS; col++) {
        const float sum = warp_sum(squares[col]);
        if (threadIdx.x % 32 == 0) shared[FEW_WARPS * col + threadIdx.x / 32] = sum;
    }
}

// What a column's sums are multiplied by, for a norm over its row. Called by whole warps.
__device__ __forceinline__ float few_factor(const Prologue& p, const float* squares, u32 col, u32 k) {
    if (p.kind != NORMED) return 1.0f;
    const u32 lane = threadIdx.x % 32;
    const float total = warp_sum(lane < blockDim.x / 32 ? squares[FEW_WARPS * col + lane] : 0.0f);
    return rsqrtf(__fdividef(total, (float)k) + p.eps);
}

// Packed columns come to shared memory: words of a column `words` pieces of 16 bytes behind those of the one before,
// then scales, `scales` pieces of 8; and what their rows' parts saw, as few_squares leaves it. Called by a block, whose
// thread 0 has begun the barrier, which is not waited for here.
__device__ __forceinline__ void few_take(const FewShared& s, const Columns& c, u32 n_cols, u32 k, u32 cols, u32 words,
                                         u32 scales, u32 barrier) {
    const u32 runs = ((k + 15) / 16 + 31) / 32 * 32;
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0) barrier_expect(barrier, n_cols * runs * 24);
        __syncwarp();
        if (threadIdx.x < n_cols) {
            const u8* from = c.of + (u64)threadIdx.x * runs * 24;
            const u32 to = address_in_shared(s.staged);
            bulk_copy(to + 16 * threadIdx.x * words, from, 16 * runs, barrier);
            bulk_copy(to + 16 * cols * words + 8 * threadIdx.x * scales, from + 16 * runs, 8 * runs, barrier);
        }
    }
    if (c.squares == nullptr) return;
    // A thread for each warp and column: there are more.
    const u32 warps = blockDim.x / 32, col = threadIdx.x % cols, first = threadIdx.x / cols;
    if (first >= warps) return;
    float sum = 0.0f;
#pragma unroll 1
    for (u32 part = first; col < n_cols && part < c.n_squares; part += warps) {
        sum += c.squares[col * c.n_squares + part];
    }
    s.squares[FEW_WARPS * col + first] = sum;
}

// Brings the norm's weights near.
__device__ __forceinline__ void few_ahead(const Prologue& p, u32 k) {
    if (p.kind == NORMED) prefetch(p.w + 8 * min(threadIdx.x, (k - 1) / 8));
}

// Stages a row as column `col`, plain or normed, by `threads` threads in whole warps, of which this is number `thread`.
// `squares` gets what the thread saw.
template <class W, int COLS>
__device__ __forceinline__ void few_stage(const Staged<W, COLS>& staged, u32 col, const float* x, const Prologue& p,
                                          u32 k, u32 thread, u32 threads, float& squares) {
    const u32 n = ((k + 15) / 16 + 31) / 32 * 64;
#pragma unroll 1
    for (u32 i = thread; i < n; i += threads) {
        float v[8], w[8];
        load8<8>(x, true, k, 8 * i, v);
        if (p.kind == NORMED) {
            load8<8>(p.w, true, k, 8 * i, w);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                squares += v[j] * v[j];
                v[j] *= w[j];
            }
        }
        staged.put(col, i / 2, i % 2, v);
    }
}

// The calling warp saw nothing of `cols` columns yet.
__device__ __forceinline__ void few_saw_nothing(const FewShared& s, u32 cols) {
    if (threadIdx.x % 32 < cols) s.squares[FEW_WARPS * (threadIdx.x % 32) + threadIdx.x / 32] = 0.0f;
    __syncwarp();
}

// Stages `cols` columns: `n_cols` rows, `stride` apart, after their prologue, then zeros. A thread takes eight numbers
// of a row at a time, which `put(col, run, half, v)` gets; called by `threads` threads in whole warps, of which this is
// number `thread`. What each warp saw of a normed row is added in `s.squares`.
template <class W, bool HAS_GATES, class Put>
__device__ __forceinline__ void few_stage_rows(const FewShared& s, const float* x, u64 stride, const Prologue& p,
                                               u32 n_cols, u32 cols, u32 k, u32 thread, u32 threads, const Put& put) {
    const u32 n = ((k + 15) / 16 + 31) / 32 * 64, warp = threadIdx.x / 32;
    // `n` is a multiple of 64, so that a warp is here as a whole, with one row.
#pragma unroll 1
    for (u32 at = thread; at < cols * n; at += threads) {
        const u32 col = at / n, i = at - col * n;
        const bool is_there = col < n_cols;
        float v[8];
        load8<8>(x + col * stride, true, is_there ? k : 0, 8 * i, v);
        if (p.kind == NORMED) {
            float w[8], sum = 0.0f;
            load8<8>(p.w, true, k, 8 * i, w);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                sum += v[j] * v[j];
                v[j] *= w[j];
            }
            sum = warp_sum(sum);
            if (threadIdx.x % 32 == 0) s.squares[FEW_WARPS * col + warp] += sum;
        } else if (HAS_GATES && p.kind != PLAIN) {
            Staged<W, 1>::gate(p, col, is_there && 8 * i < k, 8 * i, v);
        }
        put(col, i / 2, i % 2, v);
    }
}

// The rows of a warp: `n` from `first` on, of those of the block.
struct FewRows {
    u32 first, n;
};
__device__ __forceinline__ FewRows few_rows_of_warp(u32 count) {
    const u32 warps = blockDim.x / 32, each = (count + warps - 1) / warps, first = min(threadIdx.x / 32 * each, count);
    return {first, min(each, count - first)};
}

// The warp's rows, of PARTS matrices each, come to shared memory, one matrix after the other. `is_piece`: its rows of a
// matrix are part of one tensor. Those of two are never one copy, even where the tensors are neighbors.
__device__ __forceinline__ void few_barrier(const FewShared& s) {
    if (threadIdx.x % 32 == 0) {
        barrier_init(s.barriers + threadIdx.x / 32 * 8, 1);
        fence_async();
    }
}
template <int PARTS, class From>
__device__ __forceinline__ void few_copy(const FewShared& s, FewRows rows, u32 row_bytes, bool is_piece,
                                         const From& from) {
    const u32 barrier = s.barriers + threadIdx.x / 32 * 8, lane = threadIdx.x % 32;
    if (rows.n == 0) return;
    if (lane == 0) barrier_expect(barrier, PARTS * rows.n * row_bytes);
    __syncwarp();
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const u32 to = s.at + (PARTS * rows.first + part * rows.n) * row_bytes;
        if (is_piece) {
            if (lane == 0) bulk_copy(to, from(rows.first, part), rows.n * row_bytes, barrier);
        } else if (lane < rows.n) {
            bulk_copy(to + lane * row_bytes, from(rows.first + lane, part), row_bytes, barrier);
        }
    }
}

// The products of the warp's rows with one staged column: two rows at a time, or one of each of two matrices. Where
// rows are short a lane keeps its activations. Lane i gets the sums of the warp's row i, of which there are at most 32.
template <class W, int PARTS>
__device__ __forceinline__ void few_rows_of_one(const FewShared& s, u32 k, FewRows rows, u32 row_bytes, float& sum,
                                                float& sum_up) {
    const u32 units = (k + W::UNIT - 1) / W::UNIT, runs = ((k + 15) / 16 + 31) / 32 * 32;
    const u32 lane = threadIdx.x % 32, n = rows.n;
    const Staged<W, 1> staged = {s.staged, runs};
    constexpr bool HOLDS = VecOf<W>::IS_GROUPED;
    typename Staged<W, 1>::Held x;
    if (HOLDS && lane < units) staged.hold(lane, x);
    if (n > 0) barrier_wait(s.barriers + threadIdx.x / 32 * 8, 0);
    const u8* at = s.weights + PARTS * rows.first * row_bytes;
    const u32 to_second = (PARTS == 2 ? rows.n : 1) * row_bytes;
#pragma unroll 1
    for (u32 i = 0; i < n; i += PARTS == 2 ? 1 : 2) {
        float sums[2][1] = {};
#pragma unroll 1
        for (u32 unit = lane; unit < units; unit += 32) {
            if (HOLDS && units > 32) staged.hold(unit, x);
            // What is executed once or twice waits for its instructions: half of them takes less time.
#pragma unroll PARTS
            for (int j = 0; j < 2; j++) {
                if (PARTS == 1 && i + j >= n) break;
                typename W::Raw raw;
                W::load({at + j * to_second, at, at, k}, unit, raw);
                float part[1] = {0.0f};
                if constexpr (HOLDS) {
                    Staged<W, 1>::dot_held(raw, unit, x, part[0]);
                } else {
                    staged.dot(raw, unit, 0, part);
                }
                if (j == 0) sums[0][0] += part[0];
                if (j == 1) sums[1][0] += part[0];
            }
        }
        float a = sums[0][0], b = sums[1][0];
        // The lower half of the warp adds up the first, the upper half the second.
        const bool is_upper = lane >= 16;
        float half = (is_upper ? b : a) + __shfl_xor_sync(FULL_MASK, is_upper ? a : b, 16);
#pragma unroll
        for (int step = 8; step > 0; step /= 2) half += __shfl_xor_sync(FULL_MASK, half, step);
        const float other = __shfl_xor_sync(FULL_MASK, half, 16);
        a = is_upper ? other : half, b = is_upper ? half : other;
        if (lane == i) sum = a, sum_up = b;
        if (PARTS == 1 && lane == i + 1) sum = b;
        at += (PARTS == 2 ? 1 : 2) * row_bytes;
    }
}

// The sums of N values over a warp, N a power of two: a lane gets that of value lane / (32 / N).
template <int N>
__device__ __forceinline__ float few_sums(float (&value)[N]) {
    const u32 lane = threadIdx.x % 32;
    // Half of the lanes go on with one half of the values, the others with the other.
#pragma unroll
    for (int n = N / 2, step = 16; n > 0; n /= 2, step /= 2) {
        const bool is_upper = lane & step;
#pragma unroll
        for (int j = 0; j < n; j++) {
            const float own = is_upper ? value[n + j] : value[j], other = is_upper ? value[j] : value[n + j];
            value[j] = own + __shfl_xor_sync(FULL_MASK, other, step);
        }
    }
    float sum = value[0];
#pragma unroll
    for (int step = 16 / N; step > 0; step /= 2) sum += __shfl_xor_sync(FULL_MASK, sum, step);
    return sum;
}

// The products of the warp's rows with `n_cols` staged columns; `store(i, col, sum)` gets each once.
template <class W, int COLS, class Store>
__device__ __forceinline__ void few_rows(const FewShared& s, const Prologue& prologue, u32 n_cols, u32 k, FewRows rows,
                                         u32 row_bytes, const Store& store) {
    const u32 units = (k + W::UNIT - 1) / W::UNIT, runs = ((k + 15) / 16 + 31) / 32 * 32, lane = threadIdx.x % 32;
    // Of the lane's column.
    constexpr u32 LANES = 32 / COLS;
    const u32 own = lane / LANES;
    float r = 0.0f;
#pragma unroll
    for (int col = 0; col < COLS; col++) {
        const float factor = few_factor(prologue, s.squares, col, k);
        if (own == col) r = factor;
    }
    if (rows.n > 0) barrier_wait(s.barriers + threadIdx.x / 32 * 8, 0);
    const u8* at = s.weights + rows.first * row_bytes;
#pragma unroll 1
    for (u32 i = rows.first, end = rows.first + rows.n; i < end; i++, at += row_bytes) {
        float sum[COLS];
#pragma unroll
        for (int col = 0; col < COLS; col++) sum[col] = 0.0f;
#pragma unroll 1
        for (u32 unit = lane; unit < units; unit += 32) {
            typename W::Raw raw;
            W::load({at, at, at, k}, unit, raw);
            // Columns' addresses are found anew, which takes fewer registers than it takes to keep them.
            u32 now = runs;
            asm volatile("" : "+r"(now));
            Staged<W, COLS>{s.staged, now}.dot(raw, unit, 0, sum);
        }
        const float mine = few_sums(sum);
        if (lane % LANES == 0 && own < n_cols) store(i, own, mine * r);
    }
}
