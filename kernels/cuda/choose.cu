// choose: the n positions that attention sees, the best of a token's own and all before it by
// sum_h weights[t, h] * max(q[t, h] . key, 0); ties to the earlier, NaN last. Ascending, then u32 max; all of them
// where they are no more than n.
//
// Compiled for one cache, of one head that has keys alone: -DD -DKV_F16, with -DK_BLOCKS=1 for blocks of 8 bits. A step
// goes in slices of tokens: their scores become ranks, u32 [n_tokens, stride], and of these each token's are chosen.
// Every order is fixed: same input, same bits. Products are as exact as in f32: keys of f16, or integers of blocks,
// meet queries of two f16 numbers each.
#include "cuda/kv_blocks.h"
#include "cuda/mma.h"

// As in `crates/gpu/src/cuda/chosen.rs`.
#define SCORE_THREADS 256
#define BEST_THREADS 1024
#define N_WARPS (SCORE_THREADS / 32)
#define BINS 2048

// A score as a number that grows with it; NaN is the least that there is, with -inf.
__device__ __forceinline__ u32 rank_of(float score) {
    const u32 bits = __float_as_uint(score == score ? score + 0.0f : -INF);
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

#if K_BLOCKS
typedef u8 Key;
__device__ __forceinline__ const u8* keys_of(const Choose& a, const Chunk& c, u32 block) {
    return blocks_of(a.k_cache, page_of(a.step, c, 0, block), D);
}
__device__ __forceinline__ const u16* scales_of(const u8* keys) { return (const u16*)(keys + PAGE * D); }
// Number i of a row.
__device__ __forceinline__ float key_at(const u8* keys, u32 row, u32 i) {
    return ((float)keys[row * D + i] - 128.0f) * float_of_f16(scales_of(keys)[i / 32 * PAGE + row]);
}
#else
typedef Kv Key;
__device__ __forceinline__ const Kv* keys_of(const Choose& a, const Chunk& c, u32 block) {
    return (const Kv*)a.k_cache + (u64)page_of(a.step, c, 0, block) * PAGE * D;
}
__device__ __forceinline__ float key_at(const Kv* keys, u32 row, u32 i) { return kv_load(keys[row * D + i]); }
#endif

// choose_scores: of any width and cache. grid (shares of the positions, tokens), block SCORE_THREADS: a warp takes EACH
// positions at a time, its lanes numbers of the keys.
#define EACH 4
#define COLUMNS ((D + 31) / 32)
KERNEL __launch_bounds__(SCORE_THREADS) choose_scores(const __grid_constant__ Choose a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const u32 token = a.first + blockIdx.y, pos = a.step.positions[token];
    if (pos < a.n) return;
    const u32 lane = threadIdx.x % 32;
    const Chunk& c = a.step.chunks[a.step.chunk_of[token]];
    u32* ranks = a.ranks + (u64)blockIdx.y * a.stride;
    for (u32 p = EACH * (blockIdx.x * N_WARPS + threadIdx.x / 32); p <= pos; p += EACH * N_WARPS * gridDim.x) {
        const Key* keys = keys_of(a, c, p / PAGE);
        float sum[EACH] = {};
        for (u32 h = 0; h < a.n_head; h++) {
            const float* q = a.q + ((u64)token * a.n_head + h) * D;
            float dot[EACH] = {};
#pragma unroll 4
            for (u32 i = lane; i < D; i += 32) {
                const float x = q[i];
#pragma unroll
                for (u32 e = 0; e < EACH; e++) dot[e] += x * key_at(keys, p % PAGE + e, i);
            }
            const float weight = a.weights[(u64)token * a.n_head + h];
#pragma unroll
            for (u32 e = 0; e < EACH; e++) sum[e] += weight * fmaxf(warp_sum(dot[e]), 0.0f);
        }
#pragma unroll
        for (u32 e = 0; e < EACH; e++) {
            if (lane == e && p + e <= pos) ranks[p + e] = rank_of(sum[e]);
        }
    }
}

// choose_scores_tile: the same on tensor cores. grid (shares of the pages, tiles of `per` tokens), block SCORE_THREADS.
// Dynamic shared memory: of each token the queries of 16 heads at a time in the order in which lanes multiply them, as
// f16 and what that leaves, then a weight for each head. A warp has the keys of a page in registers, a quarter of a row
// of eight numbers of 32 in each lane, and multiplies them with the heads of all tokens that share the sequence.
#if KV_F16 && D % 32 == 0 && D <= 128
#define STEPS (D / 16)
extern __shared__ uint4 shared[];

// The queries of 16 heads of a token, and their weights; a warp at a time.
__device__ __forceinline__ void stage_heads(const Choose& a, u32 token, u32 first, uint4* to, float* weights) {
    const u32 lane = threadIdx.x % 32;
    float x[2][D / 4];
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const u32 h = first + lane / 4 + 8 * i;
        const float* row = a.q + ((u64)token * a.n_head + h) * D + lane % 4 * 8;
        float most = 0.0f;
#pragma unroll
        for (u32 j = 0; j < D / 4; j++) {
            x[i][j] = h < a.n_head ? row[j / 8 * 32 + j % 8] : 0.0f;
            most = fmaxf(most, fabsf(x[i][j]));
        }
        most = fmaxf(most, __shfl_xor_sync(FULL_MASK, most, 1));
        most = fmaxf(most, __shfl_xor_sync(FULL_MASK, most, 2));
        // A power of two, so that f16 holds the queries, whatever they are, and nothing is rounded for it.
        const float unit = __uint_as_float(__float_as_uint(most) & 0x7f800000);
        const float inverse = unit > 0.0f ? 1.0f / unit : 0.0f;
#pragma unroll
        for (u32 j = 0; j < D / 4; j++) x[i][j] *= inverse;
        if (lane % 4 == 0) {
            weights[lane / 4 + 8 * i] = h < a.n_head ? a.weights[(u64)token * a.n_head + h] * unit : 0.0f;
        }
    }
#pragma unroll
    for (u32 s = 0; s < STEPS; s++) {
        u32 high[4], low[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            const float* pair = x[j % 2] + 4 * s + j / 2 * 2;
            high[j] = f16_pair(pair[0], pair[1]);
            low[j] = f16_pair(pair[0] - float_of_f16(high[j] & 0xffff), pair[1] - float_of_f16(high[j] >> 16));
        }
        to[2 * s * 32 + lane] = make_uint4(high[0], high[1], high[2], high[3]);
        to[(2 * s + 1) * 32 + lane] = make_uint4(low[0], low[1], low[2], low[3]);
    }
}

KERNEL __launch_bounds__(SCORE_THREADS, K_BLOCKS ? 1 : 2) choose_scores_tile(const __grid_constant__ Choose a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_groups = (a.n_head + 15) / 16;
    const u32 of_token = n_groups * 2 * STEPS * 32;
    float* weights = (float*)(shared + a.per * of_token);
    const u32 end = min(a.first + (blockIdx.y + 1) * a.per, a.first + a.n_tokens);
    for (u32 begin = a.first + blockIdx.y * a.per, next; begin < end; begin = next) {
        // Tokens of one sequence.
        const u32 chunk = a.step.chunk_of[begin];
        for (next = begin + 1; next < end && a.step.chunk_of[next] == chunk; next++) {}
        const u32 first_pos = a.step.positions[begin], last_pos = first_pos + next - begin - 1;
        if (last_pos < a.n) continue;
        const Chunk& c = a.step.chunks[chunk];
        for (u32 i = warp; i < (next - begin) * n_groups; i += N_WARPS) {
            stage_heads(a, begin + i / n_groups, i % n_groups * 16, shared + i * 2 * STEPS * 32, weights + 16 * i);
        }
        __syncthreads();
        for (u32 block = blockIdx.x * N_WARPS + warp; block <= last_pos / PAGE; block += N_WARPS * gridDim.x) {
            const Key* keys = keys_of(a, c, block);
            u32 k[PAGE / 8][STEPS][2];
#pragma unroll
            for (u32 n = 0; n < PAGE / 8; n++) {
#pragma unroll
                for (u32 s = 0; s < STEPS; s += 2) {
                    const Key* from = keys + (8 * n + lane / 4) * D + lane % 4 * 8 + 16 * s;
#if K_BLOCKS
                    const uint2 raw = *(const uint2*)from;
                    k[n][s][0] = pair_of_bytes(raw.x, 0x4140), k[n][s][1] = pair_of_bytes(raw.x, 0x4342);
                    k[n][s + 1][0] = pair_of_bytes(raw.y, 0x4140), k[n][s + 1][1] = pair_of_bytes(raw.y, 0x4342);
#else
                    const uint4 raw = *(const uint4*)from;
                    k[n][s][0] = raw.x, k[n][s][1] = raw.y;
                    k[n][s + 1][0] = raw.z, k[n][s + 1][1] = raw.w;
#endif
                }
            }
            for (u32 t = 0; t < next - begin; t++) {
                float sum[PAGE / 4] = {};
                for (u32 group = t * n_groups; group < (t + 1) * n_groups; group++) {
                    const uint4* q = shared + group * 2 * STEPS * 32 + lane;
                    float dot[PAGE / 8][4] = {};
                    const auto multiply = [&](u32 s, float (&sums)[PAGE / 8][4]) {
                        const uint4 high = q[2 * s * 32], low = q[(2 * s + 1) * 32];
#pragma unroll
                        for (u32 n = 0; n < PAGE / 8; n++) {
                            mma_f16(sums[n], low.x, low.y, low.z, low.w, k[n][s][0], k[n][s][1]);
                            mma_f16(sums[n], high.x, high.y, high.z, high.w, k[n][s][0], k[n][s][1]);
                        }
                    };
#if K_BLOCKS
#pragma unroll
                    for (u32 s = 0; s < STEPS; s += 2) {
                        float sums[PAGE / 8][4] = {};
                        multiply(s, sums);
                        multiply(s + 1, sums);
#pragma unroll
                        for (u32 n = 0; n < PAGE / 8; n++) {
                            const u32 pair = *(const u32*)(scales_of(keys) + s / 2 * PAGE + 8 * n + lane % 4 * 2);
#pragma unroll
                            for (u32 i = 0; i < 4; i++) {
                                dot[n][i] += sums[n][i] * float_of_f16(pair >> i % 2 * 16 & 0xffff);
                            }
                        }
                    }
#else
#pragma unroll
                    for (u32 s = 0; s < STEPS; s++) multiply(s, dot);
#endif
                    const float above = weights[16 * group + lane / 4], below = weights[16 * group + lane / 4 + 8];
#pragma unroll
                    for (u32 i = 0; i < PAGE / 4; i++) {
                        sum[i] += above * fmaxf(dot[i / 2][i % 2], 0.0f) + below * fmaxf(dot[i / 2][i % 2 + 2], 0.0f);
                    }
                }
                // Over the heads, which are eight lanes' rows: a lane is left with one of the eight positions.
#pragma unroll
                for (u32 half = PAGE / 8; half > 0; half /= 2) {
                    const bool is_upper = lane / 4 & half;
#pragma unroll
                    for (u32 i = 0; i < half; i++) {
                        const float mine = is_upper ? sum[i + half] : sum[i], other = is_upper ? sum[i] : sum[i + half];
                        sum[i] = mine + __shfl_xor_sync(FULL_MASK, other, 4 * half);
                    }
                }
                const u32 i = lane / 4, p = block * PAGE + i / 2 * 8 + lane % 4 * 2 + i % 2;
                if (p <= first_pos + t) a.ranks[(u64)(begin - a.first + t) * a.stride + p] = rank_of(sum[0]);
            }
        }
        __syncthreads();
    }
}
#endif

// Counts numbers in bins; lanes whose numbers share one count once.
__device__ __forceinline__ void count(u32* bins, u32 bin, bool is_counted) {
    if (!__any_sync(FULL_MASK, is_counted)) return;
    const u32 same = __match_any_sync(FULL_MASK, is_counted ? bin : BINS);
    if (is_counted && threadIdx.x % 32 == __ffs(same) - 1) atomicAdd(bins + bin, __popc(same));
}

// choose_best: the n largest ranks of each token. grid (n_tokens), block BEST_THREADS. Three counts of 11, 11 and 10
// bits find the n-th largest; then what is larger, and the first ones that equal it, are written in order.
KERNEL __launch_bounds__(BEST_THREADS) choose_best(const __grid_constant__ Choose a) {
    __shared__ u32 bins[BINS];
    __shared__ u32 sums[2][32];
    __shared__ u32 found[2];
    PDL_LAUNCH();
    PDL_WAIT();
    const u32 token = a.first + blockIdx.x, n_seen = a.step.positions[token] + 1;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32* out = a.out + (u64)token * a.n;
    if (n_seen <= a.n) {
        for (u32 i = threadIdx.x; i < a.n; i += BEST_THREADS) out[i] = i < n_seen ? i : ~0u;
        return;
    }
    const u32* ranks = a.ranks + (u64)blockIdx.x * a.stride;
    // The same for all threads, so that whole warps count.
    const u32 n_rounds = (n_seen + 4 * BEST_THREADS - 1) / (4 * BEST_THREADS);
    const auto load = [&](u32 round) {
        const u32 at = 4 * (round * BEST_THREADS + threadIdx.x);
        return at < n_seen ? *(const uint4*)(ranks + at) : make_uint4(0, 0, 0, 0);
    };

    // What the n-th largest begins with, and how many of those that do are chosen.
    u32 known = 0, wanted = a.n;
#pragma unroll
    for (u32 pass = 0; pass < 3; pass++) {
        const u32 shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, n_bits = pass == 2 ? 10 : 11;
        const u32 mask = pass == 0 ? 0 : ~0u << (shift + n_bits);
        for (u32 i = threadIdx.x; i < BINS; i += BEST_THREADS) bins[i] = 0;
        __syncthreads();
        uint4 ahead = load(0);
        for (u32 round = 0; round < n_rounds; round++) {
            const uint4 raw = ahead;
            if (round + 1 < n_rounds) ahead = load(round + 1);
            const u32 x[4] = {raw.x, raw.y, raw.z, raw.w};
            const u32 at = 4 * (round * BEST_THREADS + threadIdx.x);
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                count(bins, x[j] >> shift & ((1u << n_bits) - 1), at + j < n_seen && (x[j] & mask) == known);
            }
        }
        __syncthreads();
        // From the largest bin down, two a thread.
        const u32 bin = BINS - 1 - 2 * threadIdx.x, upper = bins[bin], lower = bins[bin - 1];
        u32 above = sum_up_to(upper + lower);
        if (lane == 31) sums[0][warp] = above;
        __syncthreads();
        const u32 before = sum_up_to(sums[0][lane]) - sums[0][lane];
        above += __shfl_sync(FULL_MASK, before, warp) - upper - lower;
        if (above < wanted && wanted <= above + upper + lower) {
            const bool is_upper = wanted <= above + upper;
            found[0] = is_upper ? bin : bin - 1;
            found[1] = is_upper ? above : above + upper;
        }
        __syncthreads();
        known |= found[0] << shift;
        wanted -= found[1];
        // Before the next pass finds another.
        __syncthreads();
    }

    // Of all threads so far: what is larger, and what is equal.
    u32 n_larger = 0, n_equal = 0;
    uint4 ahead = load(0);
    for (u32 round = 0; round < n_rounds && n_larger + min(n_equal, wanted) < a.n; round++) {
        const uint4 raw = ahead;
        if (round + 1 < n_rounds) ahead = load(round + 1);
        const u32 x[4] = {raw.x, raw.y, raw.z, raw.w};
        const u32 at = 4 * (round * BEST_THREADS + threadIdx.x);
        u32 mine = 0;
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            if (at + j < n_seen) mine += x[j] > known ? 1 : x[j] == known ? 1 << 16 : 0;
        }
        const u32 up_to = sum_up_to(mine);
        if (lane == 31) sums[round % 2][warp] = up_to;
        __syncthreads();
        const u32 of_warp = sums[round % 2][lane], of_warps = sum_up_to(of_warp);
        const u32 before = __shfl_sync(FULL_MASK, of_warps - of_warp, warp) + up_to - mine;
        const u32 all = __shfl_sync(FULL_MASK, of_warps, 31);
        u32 larger = n_larger + (before & 0xffff), equal = n_equal + (before >> 16);
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            if (at + j >= n_seen) continue;
            const bool is_larger = x[j] > known, is_equal = x[j] == known;
            if (is_larger || is_equal && equal < wanted) out[larger + min(equal, wanted)] = at + j;
            larger += is_larger;
            equal += is_equal;
        }
        n_larger += all & 0xffff;
        n_equal += all >> 16;
    }
}
