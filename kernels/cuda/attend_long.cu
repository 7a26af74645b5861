// attend_long: as `attend`, on tensor cores, which takes a little longer where contexts are short. The last block of a
// token and a key-value head merges the splits, in their order; where they are many, a second launch does
// (attend_merge). Where keys and values are `cached` they are there already; alongside prompts (`singles`) queries
// come normed and rotated.
//
// Compiled for a cache of f16, or of blocks of 8 bits in its keys (-DK_BLOCKS=1) or its values (-DV_BLOCKS=1): -DD, the
// width of keys and of values, a power of two of 64 to 256, and -DHEADS, query heads of a block, a power of two up to
// 8. Integers of blocks become f16, which holds them exactly, on their way into products; scales of keys multiply the
// sums over a block, those of values the integers.
//
// -DWORKERS: warps of a block (`nodes/few.rs`), eight, two for each scheduler, so that their registers fit with those
// of the product ahead, or four, of which more blocks share a multiprocessor where there are many.
//
// grid (T * tiles of heads * n_kv * n_splits), block 32 * WORKERS: a block walks a share of the sequence's pages. A
// warp takes half pages by itself, on tensor cores: 16 positions times the heads, whose query, and whose shares of the
// softmax, are two numbers of f16 each, so that products are those of f32. Half pages are copied to shared memory, the
// first ones before the wait, without positions that this step adds. At the end the warps' sums are added in their
// order. Shared memory holds `stages` half pages of `workers` warps.
#include "cuda/async.h"
#include "cuda/attend.h"
#include "cuda/kv_blocks.h"
#include "cuda/mma.h"

extern __shared__ uint4 shared[];

#define THREADS (32 * WORKERS)
// Positions that a warp takes at a time.
#define HALF 16
// Of keys and of values: pieces of 16 bytes of a row, bytes from row to row in shared memory, where rows begin in
// different banks, and bytes of all rows and of the scales after them, [D / 32][HALF].
#define K_PIECES (K_BLOCKS ? D / 16 : D / 8)
#define V_PIECES (V_BLOCKS ? D / 16 : D / 8)
#define K_STRIDE (K_BLOCKS ? D + 32 : 2 * (D + 8))
#define V_STRIDE (V_BLOCKS ? D + 16 : 2 * (D + 8))
#define K_BYTES (HALF * K_STRIDE + (K_BLOCKS ? D : 0))
#define V_BYTES (HALF * V_STRIDE + (V_BLOCKS ? D : 0))
// Numbers from head to head of a warp's sums.
#define SUMS (D + 4)

// Two numbers of f16 each whose sums are x and y: the first, and the rest.
__device__ __forceinline__ void split_pair(float x, float y, u32& first, u32& rest) {
    const u16 a = kv_store(x), b = kv_store(y);
    first = a | (u32)b << 16;
    rest = kv_store(x - kv_load(a)) | (u32)kv_store(y - kv_load(b)) << 16;
}

// The new row of keys or of values: its bytes as they are stored, and scales.
struct Fresh {
    __align__(16) u8 row[2 * D];
    u16 scales[D / 32];
};

// Half a page of keys or of values on its way to shared memory, whatever its positions hold: keys that are not seen,
// and values or their scales, are left out where they are used. `head` counts the key-value heads of all pages.
template <bool IS_BLOCKS, int PIECES, int STRIDE>
__device__ __forceinline__ void load_half(u8* to, const void* cache, u64 head, u32 half) {
    const u32 lane = threadIdx.x % 32, row_of_page = half * HALF % PAGE;
    const u8* rows = IS_BLOCKS ? blocks_of(cache, head, D) : (const u8*)cache + head * (PAGE * D * 2);
    const u8* from = rows + row_of_page * PIECES * 16 + lane * 16;
    u8* row = to + lane / PIECES * STRIDE + lane % PIECES * 16;
#pragma unroll 2
    for (int i = 0; i < HALF * PIECES / 32; i++) copy_async(row + i * (32 / PIECES * STRIDE), from + i * 512);
    // Eight scales a piece.
    if (IS_BLOCKS && lane < D / 16) {
        const u8* scales = rows + PAGE * D + (lane / 2 * PAGE + row_of_page) * 2;
        copy_async(to + HALF * STRIDE + lane * 16, scales + lane % 2 * 16);
    }
}

// The half page of the new position or the first that is seen: the new rows join it, and values that are not seen,
// whose shares are zero, become zero, since what was never written may be NaN.
__device__ __forceinline__ void complete(u8* keys, u32 half, u32 first_pos, u32 pos, const Fresh* fresh) {
    u8* const values = keys + K_BYTES;
    const u32 lane = threadIdx.x % 32, row = pos % HALF;
    if (half == pos / HALF) {
        for (u32 i = lane; i < K_PIECES; i += 32) {
            *(uint4*)(keys + row * K_STRIDE + 16 * i) = ((const uint4*)fresh[0].row)[i];
        }
        for (u32 i = lane; i < V_PIECES; i += 32) {
            *(uint4*)(values + row * V_STRIDE + 16 * i) = ((const uint4*)fresh[1].row)[i];
        }
        if (lane < D / 32) {
            if (K_BLOCKS) ((u16*)(keys + HALF * K_STRIDE))[lane * HALF + row] = fresh[0].scales[lane];
            if (V_BLOCKS) ((u16*)(values + HALF * V_STRIDE))[lane * HALF + row] = fresh[1].scales[lane];
        }
    }
    for (u32 i = lane; !V_BLOCKS && i < HALF * V_PIECES; i += 32) {
        const u32 p = half * HALF + i / V_PIECES;
        if (p < first_pos || p > pos) *(uint4*)(values + i / V_PIECES * V_STRIDE + i % V_PIECES * 16) = uint4{};
    }
}

KERNEL __maxnreg__(D <= 128 ? 112 : 168) attend_long(const __grid_constant__ Attend a) {
    __shared__ __align__(16) float q_rows[HEADS][D];
    __shared__ float factors[MAX_SPLITS][HEADS];
    __shared__ u32 is_last;
    __shared__ Fresh fresh[2];
#if K_BLOCKS || V_BLOCKS
    __shared__ float fresh_row[2][D];
#endif
    __shared__ uint4 q_rest[D / 32][32];
    __shared__ float tops[WORKERS][8], top[8], total[8];
    TRACE(0);

    const u32 place_of = blockIdx.x / a.n_splits, split = blockIdx.x % a.n_splits, kv_head = place_of % a.n_kv;
    const u32 tile = place_of / a.n_kv % a.n_tiles, row = place_of / a.n_kv / a.n_tiles;
    if (row >= a.rows) {
        PDL_WAIT();
        return;
    }
    const u32 token = a.singles ? a.step.chunks[row].single : row;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const u32 group = a.q.n_head / a.n_kv, first_head = kv_head * group + tile * HEADS;
    const u32 n_heads = min((u32)HEADS, group - tile * HEADS);
    // What the host sent is there before the first kernel of the step.
    const u32 pos = a.step.positions[token];
    const Chunk chunk = a.step.chunks[a.step.chunk_of[token]];
    const u32 first_pos = first_seen(a.window, pos);
    const u32 first_block = first_pos / PAGE, end_block = pos / PAGE + 1, n_blocks = end_block - first_block;
    // The splits' shares of the pages, in order; late ones may be empty.
    const u32 each = (n_blocks + a.n_splits - 1) / a.n_splits;
    const u32 begin = first_block + min(split * each, n_blocks), end = first_block + min((split + 1) * each, n_blocks);
    const bool has_new = begin < end && end == end_block;
    // The warp's half pages.
    const u32 end_half = warp < a.workers ? min(2 * end, pos / HALF + 1) : 0;
    u32 half = max(2 * begin, first_pos / HALF) + warp;

    const auto slot = [&](u32 stage) { return (u8*)shared + (stage * a.workers + warp) * (K_BYTES + V_BYTES); };
    const auto load = [&](u32 half, u32 stage) {
        const u64 head = (u64)page_of(a.step, chunk, a.windowed, half / 2) * a.n_kv + kv_head;
        u8* to = slot(stage);
        load_half<K_BLOCKS, K_PIECES, K_STRIDE>(to, a.k_cache, head, half);
        load_half<V_BLOCKS, V_PIECES, V_STRIDE>(to + K_BYTES, a.v_cache, head, half);
    };
    // Half pages from this one on have rows of this step before the token's own, which come from a launch before.
    const u32 first_late = pos > chunk.pos ? chunk.pos / HALF : ~0u;
    // One copy of the code for both: what a launch runs once comes from the L2, line by line.
#pragma unroll 1
    for (u32 turn = 0; turn < 2; turn++) {
        if (turn == 1) {
            if (threadIdx.x < D / 8 && a.q.w) prefetch(a.q.w + 8 * threadIdx.x);
            if (threadIdx.x < D / 8 && a.k.w) prefetch(a.k.w + 8 * threadIdx.x);
            TRACE(1);
            PDL_WAIT();
            // Not earlier: blocks that wait would take the place of those that work.
            PDL_LAUNCH();
            if (first_late == ~0u) break;
        }
#pragma unroll 1
        for (u32 stage = 0; stage < a.stages; stage++) {
            const u32 its = half + stage * a.workers;
            if (its < end_half && (its >= first_late) == (turn == 1)) load(its, stage);
            copy_async_commit();
        }
    }
    TRACE(2);

    // A warp a head of q, then the new k and v.
#pragma unroll 1
    for (u32 h = warp; h < (has_new ? HEADS + 2 : HEADS); h += THREADS / 32) {
        const u32 is_new = h < HEADS ? 0 : h - HEADS + 1;
        const QkvPart& part = is_new == 0 ? a.q : is_new == 1 ? a.k : a.v;
        // Heads that are not there repeat the last one.
        const u32 head = is_new ? kv_head : first_head + min(h, n_heads - 1);
        const float* x = head_row(part, token, head, is_new ? D : a.q_stride);
        // Blocks of other heads store the same bits.
        void* cache = is_new == 1 ? a.k_cache : a.v_cache;
        const u64 head_of_page = (u64)page_of(a.step, chunk, a.windowed, pos / PAGE) * a.n_kv + kv_head;
        const bool is_blocks = is_new == 1 ? K_BLOCKS : is_new == 2 && V_BLOCKS;
        u8* rows = is_blocks ? blocks_of(cache, head_of_page, D) : (u8*)cache + head_of_page * (PAGE * D * 2);
        u8* row_of = rows + pos % PAGE * (is_blocks ? D : 2 * D);
        Fresh& its = fresh[is_new == 2];
        if (is_new && a.cached) {
            // Rows of k and v may be gone: the plan has no reader of theirs.
            if (lane < (is_blocks ? D / 16 : D / 8)) ((uint4*)its.row)[lane] = __ldcg((const uint4*)row_of + lane);
            if (is_blocks && lane < D / 32) {
                its.scales[lane] = ((const u16*)(rows + PAGE * D))[lane * PAGE + pos % PAGE];
            }
            continue;
        }
        head_of<D, true>(a, part, x, token, [&](u32 i, float y) {
            if (is_new == 0) {
                q_rows[h][i] = y * a.scale;
#if K_BLOCKS || V_BLOCKS
            } else if (is_blocks) {
                fresh_row[is_new - 1][i] = y;
#endif
            } else {
                ((Kv*)row_of)[i] = ((Kv*)its.row)[i] = kv_store(y);
            }
        });
#if K_BLOCKS || V_BLOCKS
        if (is_blocks) {
            __syncwarp();
#pragma unroll 1
            for (u32 b = 0; b < D / 32; b++) {
                u16 scale;
                const u32 i = 32 * b + lane;
                row_of[i] = its.row[i] = block_encode(fresh_row[is_new - 1][i], scale);
                if (lane == 0) ((u16*)(rows + PAGE * D))[b * PAGE + pos % PAGE] = its.scales[b] = scale;
            }
        }
#endif
    }
    if (first_late != ~0u) copy_async_wait<0>();
    __syncthreads();
    TRACE(3);
    // The lane's part of the queries, of head g: of every 32 numbers the 8 from 8c on, as its part of the keys. What is
    // left of them is read anew each time.
    u32 q[D / 32][4];
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
        u32 rest[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float* x = q_rows[g % HEADS] + 32 * i + 8 * c + 2 * j;
            split_pair(x[0], x[1], q[i][j], rest[j]);
            if (g >= HEADS) q[i][j] = rest[j] = 0;
        }
        if (warp == 0) q_rest[i][lane] = make_uint4(rest[0], rest[1], rest[2], rest[3]);
    }
    __syncthreads();
    // Of heads 2c and 2c + 1: sums over two numbers of every 16, the top, and the lane's share of the total.
    float acc[D / 16][4], its_top[2] = {-INF, -INF}, its_total[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < D / 16 * 4; i++) acc[i / 4][i % 4] = 0.0f;

#pragma unroll 1
    for (u32 stage = 0; half < end_half; half += a.workers) {
        if (a.stages == 1) {
            copy_async_wait<0>();
        } else {
            copy_async_wait<1>();
        }
        __syncwarp();
        u8 *const keys = slot(stage), *const values = keys + K_BYTES;
        if (half == pos / HALF || half * HALF < first_pos) {
            complete(keys, half, first_pos, pos, fresh);
            __syncwarp();
        }
        float s[4] = {}, s_rest[4] = {};
#pragma unroll
        for (int j = 0; j < D / 32; j++) {
            const uint4 rest = q_rest[j][lane];
#if K_BLOCKS
            const uint2 k = *(const uint2*)(keys + g * K_STRIDE + 32 * j + 8 * c);
            const uint2 k8 = *(const uint2*)(keys + (g + 8) * K_STRIDE + 32 * j + 8 * c);
            const u16* scales = (const u16*)(keys + HALF * K_STRIDE) + j * HALF + g;
            float of_block[4] = {}, of_rest[4] = {};
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 word = i == 0 ? k.x : k.y, word8 = i == 0 ? k8.x : k8.y;
                const u32 x[4] = {pair_of_bytes(word, 0x4140), pair_of_bytes(word8, 0x4140),
                                  pair_of_bytes(word, 0x4342), pair_of_bytes(word8, 0x4342)};
                mma_f16(of_block, x[0], x[1], x[2], x[3], q[j][2 * i], q[j][2 * i + 1]);
                mma_f16(of_rest, x[0], x[1], x[2], x[3], i == 0 ? rest.x : rest.z, i == 0 ? rest.y : rest.w);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) s[i] += float_of_f16(scales[i / 2 * 8]) * (of_block[i] + of_rest[i]);
#else
            const uint4 k = *(const uint4*)(keys + g * K_STRIDE + 64 * j + 16 * c);
            const uint4 k8 = *(const uint4*)(keys + (g + 8) * K_STRIDE + 64 * j + 16 * c);
            mma_f16(s, k.x, k8.x, k.y, k8.y, q[j][0], q[j][1]);
            mma_f16(s_rest, k.x, k8.x, k.y, k8.y, rest.x, rest.y);
            mma_f16(s, k.z, k8.z, k.w, k8.w, q[j][2], q[j][3]);
            mma_f16(s_rest, k.z, k8.z, k.w, k8.w, rest.z, rest.w);
#endif
        }
        // Scores of position g in the first two, of g + 8 in the others.
        const u32 p = half * HALF + g;
        const bool is_seen[2] = {p >= first_pos && p <= pos, p + 8 >= first_pos && p + 8 <= pos};
        float x[4], factor[2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = s[i] + s_rest[i];
        }
        if (a.softcap != 0.0f) {
            // Every turn caps the first and moves the others up.
#pragma unroll 1
            for (int turn = 0; turn < 4; turn++) {
                const float first = a.softcap * tanhf(x[0] / a.softcap);
                x[0] = x[1], x[1] = x[2], x[2] = x[3], x[3] = first;
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (!is_seen[i / 2]) x[i] = -INF;
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float old = its_top[e];
            float now = fmaxf(x[e], x[2 + e]);
#pragma unroll
            for (int step = 4; step < 32; step *= 2) now = fmaxf(now, __shfl_xor_sync(FULL_MASK, now, step));
            now = fmaxf(old, now);
            // Where no score is finite IEEE makes NaN, as the formula does.
            factor[e] = old == -INF ? 0.0f : __expf(old - now);
#pragma unroll
            for (int i = e; i < 4; i += 2) x[i] = is_seen[i / 2] ? __expf(x[i] - now) : 0.0f;
            its_total[e] = its_total[e] * factor[e] + (x[e] + x[2 + e]);
            its_top[e] = now;
        }
        // Shares by position become shares by head.
        u32 share[2], share_rest[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            split_pair(x[2 * i], x[2 * i + 1], share[i], share_rest[i]);
            share[i] = transpose(share[i]), share_rest[i] = transpose(share_rest[i]);
        }
#if V_BLOCKS
        // Of positions 2c and 2c + 1, and of the same 8 on: whether they are seen, and their scales.
        u32 seen[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 at = half * HALF + 8 * i + 2 * c;
            const auto is_in = [&](u32 p) { return p >= first_pos && p <= pos; };
            seen[i] = (is_in(at) ? 0xffff : 0) | (is_in(at + 1) ? 0xffff0000 : 0);
        }
#pragma unroll
        for (int j = 0; j < D / 32; j++) {
            // Numbers of two bytes that are two integers, transposed: rows of even and of odd numbers.
            u32 v[4], scales[2];
            load_transposed(v, values + lane % 16 * V_STRIDE + 32 * j + lane / 16 * 16);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                scales[i] = ((const u32*)(values + HALF * V_STRIDE))[j * (HALF / 2) + 4 * i + c] & seen[i];
            }
#pragma unroll
            for (int u = 0; u < 2; u++) {
                float (&sum)[4] = acc[2 * j + u];
                u32 x[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u32 pair = pair_of_bytes(v[2 * u + i / 2], i % 2 == 0 ? 0x4240 : 0x4341);
                    x[i] = multiply_pairs(pair, scales[i / 2]);
                    sum[i] *= factor[i % 2];
                }
                mma_f16(sum, x[0], x[1], x[2], x[3], share[0], share[1]);
                mma_f16(sum, x[0], x[1], x[2], x[3], share_rest[0], share_rest[1]);
            }
        }
#else
#pragma unroll
        for (int t = 0; t < D / 16; t++) {
            u32 v[4];
            load_transposed(v, values + (lane % 8 + lane / 16 * 8) * V_STRIDE + 32 * t + lane / 8 % 2 * 16);
#pragma unroll
            for (int i = 0; i < 4; i++) acc[t][i] *= factor[i % 2];
            mma_f16(acc[t], v[0], v[1], v[2], v[3], share[0], share[1]);
            mma_f16(acc[t], v[0], v[1], v[2], v[3], share_rest[0], share_rest[1]);
        }
#endif
        __syncwarp();
        if (half + a.stages * a.workers < end_half) load(half + a.stages * a.workers, stage);
        copy_async_commit();
        stage = a.stages == 1 ? 0 : stage ^ 1;
    }

    TRACE(5);
#pragma unroll
    for (int e = 0; e < 2; e++) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) its_total[e] += __shfl_xor_sync(FULL_MASK, its_total[e], step);
        if (warp < a.workers && g == 0) tops[warp][2 * c + e] = its_top[e];
    }
    // Sums go where half pages are.
    copy_async_wait<0>();
    __syncthreads();
    float* sums = (float*)shared; // [workers, HEADS, SUMS]
    if (warp < a.workers) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const u32 h = 2 * c + e;
            if (h >= HEADS) break;
            float best = -INF;
#pragma unroll
            for (int w = 0; w < WORKERS; w++) best = fmaxf(best, w < a.workers ? tops[w][h] : -INF);
            // A warp without positions adds nothing.
            const float by = its_top[e] == -INF && its_total[e] == 0.0f ? 0.0f : __expf(its_top[e] - best);
            float* to = sums + (warp * HEADS + h) * SUMS;
#pragma unroll
            for (int t = 0; t < D / 16; t++) {
                // Even and odd numbers, or those of the two halves.
                to[16 * t + (V_BLOCKS ? 2 * g : g)] = acc[t][e] * by;
                to[16 * t + (V_BLOCKS ? 2 * g + 1 : g + 8)] = acc[t][2 + e] * by;
            }
            if (g == 0) to[D] = its_total[e] * by;
            if (warp == 0 && g == 0) top[h] = best;
        }
    }
    __syncthreads();
    // The warps' sums of column i of a head, its total behind the last.
    const auto sum_of = [&](u32 h, u32 i) {
        float sum = 0.0f;
#pragma unroll 2
        for (u32 w = 0; w < a.workers; w++) sum += sums[(w * HEADS + h) * SUMS + i];
        return sum;
    };
    if (a.n_splits > 1 && threadIdx.x < HEADS) total[threadIdx.x] = sum_of(threadIdx.x, D);
    const u64 place = (u64)(row * a.n_tiles + tile) * a.n_kv + kv_head;
    float* partial = a.partial + place * a.n_splits * HEADS * (D + 4);
    float* out = a.out + ((u64)token * a.q.n_head + first_head) * D;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < HEADS * D; i += THREADS) {
        const u32 h = i / D;
        const float sum = sum_of(h, i % D);
        if (a.n_splits > 1) {
            partial[((u64)split * HEADS + h) * D + i % D] = sum;
        } else if (h < n_heads) {
            float by = sum_of(h, D), factor = 1.0f;
            if (a.sinks) {
                const float sink = a.sinks[first_head + h], now = fmaxf(top[h], sink);
                factor = top[h] == -INF ? 0.0f : __expf(top[h] - now);
                by = by * factor + __expf(sink - now);
            }
            attend_store(a, token, first_head * D + i, __fdividef(sum * factor, by));
        }
    }
    TRACE(4);
    if (a.n_splits == 1) return;
    end_split<THREADS>(a, place, split, n_heads, first_head, top, total, out, factors, is_last);
}
