// attend: attention of one new position a sequence behind a short context (`attend_long.cu` has long ones), with what
// comes before it: head norms and ropes of q and k, and the append of k and v. The last block of a token and a
// key-value head merges the splits, in their order; where they are many, a second launch does (attend_merge).
//
// Compiled for a cache of f16: -DD, the width of keys and of values, a power of two of 64 to 256, and -DHEADS, query
// heads of a block, a power of two up to 8.
//
// grid (T * tiles of heads * n_kv * n_splits), block 256: a block walks a share of the sequence's pages. D / 8 lanes
// hold a row of a page, 8 numbers each, so that a warp reads whole rows; they multiply it with all heads, whose sums
// meet in a butterfly, and have a softmax of the rows that they saw: no thread waits for others before the end. The
// next page comes meanwhile, and the first one before the wait, without the position that this step adds.
#include "cuda/attend.h"

#define THREADS 256
#define N_WARPS (THREADS / 32)
// Lanes of a row, rows that a block holds at a time, and how often that is for a page.
#define LANES (D / 8)
#define ROWS (THREADS / LANES)
#define PASSES (PAGE / ROWS)
// Heads whose sums are added over the warps at a time: 32 KiB.
#define TOGETHER (HEADS * D <= 1024 ? HEADS : 1024 / D)

__device__ __forceinline__ void unpack(uint4 raw, float (&v)[8]) {
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[2 * i] = kv_load((u16)(words[i] & 0xffff));
        v[2 * i + 1] = kv_load((u16)(words[i] >> 16));
    }
}

// Few enough registers to run beside the product ahead.
KERNEL __maxnreg__(HEADS <= 2 ? 112 : 255) attend(const __grid_constant__ Attend a) {
    __shared__ __align__(16) float q_rows[HEADS][D];
    __shared__ float factors[MAX_SPLITS][HEADS];
    __shared__ u32 is_last;
    __shared__ __align__(16) Kv fresh[2][D];
    __shared__ __align__(16) float sums[N_WARPS][TOGETHER][D];
    __shared__ __align__(16) float tops[HEADS][ROWS];
    __shared__ float totals[HEADS][N_WARPS], top[HEADS], total[HEADS];
    PDL_LAUNCH();
    TRACE(0);

    const u32 place_of = blockIdx.x / a.n_splits, split = blockIdx.x % a.n_splits, kv_head = place_of % a.n_kv;
    const u32 tile = place_of / a.n_kv % a.n_tiles, token = place_of / a.n_kv / a.n_tiles;
    if (token >= a.rows) {
        PDL_WAIT();
        return;
    }
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 group = a.q.n_head / a.n_kv, first_head = kv_head * group + tile * HEADS;
    const u32 n_heads = min((u32)HEADS, group - tile * HEADS);
    // What the host sent is there before the first kernel of the step.
    const u32 pos = a.step.positions[token];
    const Chunk c = a.step.chunks[a.step.chunk_of[token]];
    const u32 first_pos = first_seen(a.window, pos);
    const u32 first_block = first_pos / PAGE, end_block = pos / PAGE + 1, n_blocks = end_block - first_block;
    // The splits' shares of the blocks, in order; late ones may be empty.
    const u32 each = (n_blocks + a.n_splits - 1) / a.n_splits;
    const u32 begin = first_block + min(split * each, n_blocks), end = first_block + min((split + 1) * each, n_blocks);
    const bool has_new = begin < end && end == end_block;

    const u32 row = threadIdx.x / LANES, column = threadIdx.x % LANES * 8;
    uint4 keys[PASSES], values[PASSES];
    const auto load = [&](u32 block) {
        const u64 page = ((u64)page_of(a.step, c, a.windowed, block) * a.n_kv + kv_head) * PAGE;
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            const u32 p = block * PAGE + i * ROWS + row;
            // What was never written may be NaN, and is not read; the new position comes from this launch.
            const bool is_seen = p >= first_pos && p < pos;
            const u64 at = (page + i * ROWS + row) * D + column;
            keys[i] = is_seen ? *(const uint4*)((const Kv*)a.k_cache + at) : make_uint4(0, 0, 0, 0);
            values[i] = is_seen ? *(const uint4*)((const Kv*)a.v_cache + at) : make_uint4(0, 0, 0, 0);
        }
    };
    if (begin < end) load(begin);
    // The others come to the L2: a thread has a line or two of each.
    for (u32 block = begin + 1; block < end; block++) {
        const u64 page = ((u64)page_of(a.step, c, a.windowed, block) * a.n_kv + kv_head) * PAGE * D;
        for (u32 i = threadIdx.x * 64; i < 2 * PAGE * D; i += THREADS * 64) {
            prefetch_far((i < PAGE * D ? (const Kv*)a.k_cache : (const Kv*)a.v_cache - PAGE * D) + page + i);
        }
    }
    if (threadIdx.x < D / 8 && a.q.w) prefetch(a.q.w + 8 * threadIdx.x);
    if (threadIdx.x < D / 8 && a.k.w) prefetch(a.k.w + 8 * threadIdx.x);
    TRACE(1);
    PDL_WAIT();
    TRACE(2);

    // A warp a head of q, then the new k and v.
#pragma unroll 1
    for (u32 h = warp; h < (has_new ? HEADS + 2 : HEADS); h += N_WARPS) {
        const u32 is_new = h < HEADS ? 0 : h - HEADS + 1;
        const QkvPart& part = is_new == 0 ? a.q : is_new == 1 ? a.k : a.v;
        // Heads that are not there repeat the last one.
        const u32 head = is_new ? kv_head : first_head + min(h, n_heads - 1);
        const float* x = head_row(part, token, head, is_new ? D : a.q_stride);
        // Blocks of other heads store the same bits.
        Kv* cache = nullptr;
        if (is_new) {
            const u64 page = ((u64)page_of(a.step, c, a.windowed, pos / PAGE) * a.n_kv + kv_head) * PAGE + pos % PAGE;
            cache = (Kv*)(is_new == 1 ? a.k_cache : a.v_cache) + page * D;
        }
        head_of<D, true>(a, part, x, token, [&](u32 i, float y) {
            if (is_new) {
                cache[i] = fresh[is_new - 1][i] = kv_store(y);
            } else {
                q_rows[h][i] = y;
            }
        });
    }
    __syncthreads();
    TRACE(3);
    float q[HEADS][8], acc[HEADS][8];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            q[h][i] = q_rows[h][column + i];
            acc[h][i] = 0.0f;
        }
    }
    // Of the rows that these lanes saw.
    float its_top[HEADS], its_total[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        its_top[h] = -INF;
        its_total[h] = 0.0f;
    }

#pragma unroll 1
    for (u32 block = begin; block < end; block++) {
        uint4 page_values[PASSES];
        float s[PASSES][HEADS];
        bool is_seen[PASSES];
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            const u32 p = block * PAGE + i * ROWS + row;
            is_seen[i] = p >= first_pos && p <= pos;
            float k[8];
            if (p == pos) {
                keys[i] = *(const uint4*)(fresh[0] + column);
                values[i] = *(const uint4*)(fresh[1] + column);
            }
            unpack(keys[i], k);
            page_values[i] = values[i];
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                s[i][h] = 0.0f;
#pragma unroll
                for (int j = 0; j < 8; j++) s[i][h] += k[j] * q[h][j];
            }
        }
        if (block + 1 < end) load(block + 1);
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) {
#pragma unroll
            for (int i = 0; i < PASSES * HEADS; i++) {
                s[i / HEADS][i % HEADS] += __shfl_xor_sync(FULL_MASK, s[i / HEADS][i % HEADS], step);
            }
        }
        if (a.softcap != 0.0f) {
#pragma unroll 1
            for (int turn = 0; turn < PASSES * HEADS; turn++) {
                // Every turn caps the first and moves the others up.
                const float first = a.softcap * tanhf(s[0][0] * a.scale / a.softcap);
#pragma unroll
                for (int i = 1; i < PASSES * HEADS; i++) s[(i - 1) / HEADS][(i - 1) % HEADS] = s[i / HEADS][i % HEADS];
                s[PASSES - 1][HEADS - 1] = first;
            }
        } else {
#pragma unroll
            for (int i = 0; i < PASSES * HEADS; i++) s[i / HEADS][i % HEADS] *= a.scale;
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            const float old = its_top[h];
            float now = old;
#pragma unroll
            for (int i = 0; i < PASSES; i++) {
                if (is_seen[i]) now = fmaxf(now, s[i][h]);
            }
            const float factor = old == -INF ? 0.0f : __expf(old - now);
            its_total[h] *= factor;
            its_top[h] = now;
#pragma unroll
            for (int j = 0; j < 8; j++) acc[h][j] *= factor;
            // Where no score is finite IEEE makes NaN, as the formula does.
#pragma unroll
            for (int i = 0; i < PASSES; i++) {
                s[i][h] = is_seen[i] ? __expf(s[i][h] - now) : 0.0f;
                its_total[h] += s[i][h];
            }
        }
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            float v[8];
            unpack(page_values[i], v);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
#pragma unroll
                for (int j = 0; j < 8; j++) acc[h][j] += s[i][h] * v[j];
            }
        }
    }

    TRACE(5);
    if (threadIdx.x % LANES == 0) {
#pragma unroll
        for (int h = 0; h < HEADS; h++) tops[h][row] = its_top[h];
    }
    __syncthreads();
    // Rows of a warp, then warps.
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        float best = -INF;
#pragma unroll
        for (int i = 0; i < ROWS; i += 4) {
            const float4 x = *(const float4*)(tops[h] + i);
            best = fmaxf(best, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
        }
        // Lanes without positions add nothing.
        const float by = its_top[h] == -INF && its_total[h] == 0.0f ? 0.0f : __expf(its_top[h] - best);
        its_total[h] *= by;
#pragma unroll
        for (int j = 0; j < 8; j++) acc[h][j] *= by;
#pragma unroll
        for (int step = LANES; step < 32; step *= 2) {
            its_total[h] += __shfl_xor_sync(FULL_MASK, its_total[h], step);
#pragma unroll
            for (int j = 0; j < 8; j++) acc[h][j] += __shfl_xor_sync(FULL_MASK, acc[h][j], step);
        }
        if (lane == 0) totals[h][warp] = its_total[h];
        if (threadIdx.x == h) top[h] = best;
    }
    const auto total_of = [&](u32 h) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < N_WARPS; w++) sum += totals[h][w];
        return sum;
    };
    const u64 place = (u64)(token * a.n_tiles + tile) * a.n_kv + kv_head;
    float* partial = a.partial + place * a.n_splits * HEADS * (D + 4);
    float* out = a.out + ((u64)token * a.q.n_head + first_head) * D;
#pragma unroll
    for (int first = 0; first < HEADS; first += TOGETHER) {
        if (first > 0) __syncthreads();
        if (lane < LANES) {
#pragma unroll
            for (int i = 0; i < TOGETHER * 8; i++) sums[warp][i / 8][column + i % 8] = acc[first + i / 8][i % 8];
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < TOGETHER * D; i += THREADS) {
            const u32 h = first + i / D;
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < N_WARPS; w++) sum += sums[w][i / D][i % D];
            if (a.n_splits > 1) {
                partial[((u64)split * HEADS + h) * D + i % D] = sum;
            } else if (h < n_heads) {
                float by = total_of(h), factor = 1.0f;
                if (a.sinks) {
                    const float sink = a.sinks[first_head + h], now = fmaxf(top[h], sink);
                    factor = top[h] == -INF ? 0.0f : __expf(top[h] - now);
                    by = by * factor + __expf(sink - now);
                }
                attend_store(a, token, (first_head + h) * D + i % D, __fdividef(sum * factor, by));
            }
        }
    }
    TRACE(4);
    if (a.n_splits == 1) return;
    if (threadIdx.x < HEADS) total[threadIdx.x] = total_of(threadIdx.x);
    end_split<THREADS>(a, place, split, n_heads, first_head, top, total, out, factors, is_last);
}
