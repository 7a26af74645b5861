// pick: the best logits of a row, the logits of listed tokens, and the log-sum-exp of the whole row, so that a row need
// not travel to the host.
//
// pick_parts: grid (PARTS, rows), block 256: each block finds the best of its share of the row by n rounds of arg-max
// over shared memory. pick_merge: grid (rows), block 256: the best of the shares' best. Ties go to the lower id; minus
// infinity is never picked; the lowest id with NaN or plus infinity is reported.
#include "cuda/common.h"
#include "cuda/args.h"

#define PARTS 64
#define MOST 64
#define THREADS 256

struct Candidate {
    float value;
    u32 id; // ~0: none
};

__device__ __forceinline__ bool is_better(float v, u32 i, float value, u32 id) {
    return i != ~0u && (id == ~0u || v > value || (v == value && i < id));
}

// The best candidate of a block; every thread gets it. Shared memory is free again when the call returns.
__device__ __forceinline__ Candidate block_best(Candidate mine, Candidate* scratch) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        const float v = __shfl_xor_sync(FULL_MASK, mine.value, step);
        const u32 i = __shfl_xor_sync(FULL_MASK, mine.id, step);
        if (is_better(v, i, mine.value, mine.id)) mine = {v, i};
    }
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = mine;
    __syncthreads();
    Candidate best = scratch[0];
    for (int w = 1; w < THREADS / 32; w++) {
        const Candidate one = scratch[w];
        if (is_better(one.value, one.id, best.value, best.id)) best = one;
    }
    __syncthreads();
    return best;
}

KERNEL __launch_bounds__(THREADS) pick_parts(const __grid_constant__ Pick a) {
    __shared__ Candidate scratch[THREADS / 32];
    __shared__ float sums[33];
    __shared__ u32 first_bad;
    extern __shared__ float values[];
    PDL_LAUNCH();
    PDL_WAIT();
    const PickAsk ask = a.asks[blockIdx.y];
    const float* logits = a.logits + (u64)ask.row * a.n_vocab;
    const u32 share = (a.n_vocab + PARTS - 1) / PARTS;
    const u32 begin = min(blockIdx.x * share, a.n_vocab), end = min(begin + share, a.n_vocab);
    PickPart* part = a.parts + (u64)blockIdx.y * PARTS + blockIdx.x;
    Candidate* best = (Candidate*)a.candidates + ((u64)blockIdx.y * PARTS + blockIdx.x) * MOST;
    if (threadIdx.x == 0) first_bad = ~0u;
    __syncthreads();

    float top = -INF;
    Candidate mine = {0.0f, ~0u};
    for (u32 i = begin + threadIdx.x; i < end; i += THREADS) {
        const float l = logits[i];
        values[i - begin] = l;
        // True for NaN as well.
        if (!(l < INF)) atomicMin(&first_bad, i);
        top = fmaxf(top, l);
        if (l > -INF && is_better(l, i, mine.value, mine.id)) mine = {l, i};
    }
    // The sum relative to the share's largest number.
    __syncthreads();
    {
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        top = warp_max(top);
        if (lane == 0) sums[warp] = top;
        __syncthreads();
        for (int w = 0; w < THREADS / 32; w++) top = fmaxf(top, sums[w]);
        __syncthreads();
    }
    float sum = 0.0f;
    if (ask.log_sum_exp && top > -INF) {
        for (u32 i = threadIdx.x; i < end - begin; i += THREADS) sum += expf(values[i] - top);
    }
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) *part = {top, sum, first_bad, 0};

    for (u32 b = 0; b < ask.n; b++) {
        const Candidate found = block_best(mine, scratch);
        if (threadIdx.x == 0) best[b] = found;
        if (found.id == ~0u) {
            for (u32 rest = b + 1 + threadIdx.x; rest < ask.n; rest += THREADS) best[rest] = {0.0f, ~0u};
            break;
        }
        // The thread whose number was taken looks for its next one.
        if (b + 1 < ask.n && (found.id - begin) % THREADS == threadIdx.x) {
            values[found.id - begin] = -INF;
            mine = {0.0f, ~0u};
            for (u32 i = begin + threadIdx.x; i < end; i += THREADS) {
                const float l = values[i - begin];
                if (l > -INF && is_better(l, i, mine.value, mine.id)) mine = {l, i};
            }
        }
    }
}

KERNEL __launch_bounds__(THREADS) pick_merge(const __grid_constant__ Pick a) {
    __shared__ Candidate scratch[THREADS / 32];
    __shared__ u32 next[PARTS];
    PDL_LAUNCH();
    PDL_WAIT();
    const PickAsk ask = a.asks[blockIdx.x];
    const float* logits = a.logits + (u64)ask.row * a.n_vocab;
    const PickPart* parts = a.parts + (u64)blockIdx.x * PARTS;
    const Candidate* all = (const Candidate*)a.candidates + (u64)blockIdx.x * PARTS * MOST;
    Picked* out = a.out + blockIdx.x;
    for (u32 i = threadIdx.x; i < ask.n_listed; i += THREADS) {
        a.listed_out[ask.first_out + i] = logits[a.listed[ask.first_listed + i]];
    }
    if (threadIdx.x < PARTS) next[threadIdx.x] = 0;
    if (threadIdx.x < 32) {
        const PickPart a_part = parts[threadIdx.x], b_part = parts[threadIdx.x + 32];
        const float top = warp_max(fmaxf(a_part.top, b_part.top));
        const u32 bad = __reduce_min_sync(FULL_MASK, min(a_part.first_bad, b_part.first_bad));
        double sum = 0.0;
        if (ask.log_sum_exp) {
            const auto of = [&](const PickPart& part) {
                return part.top > -INF ? (double)part.sum * exp((double)part.top - (double)top) : 0.0;
            };
            sum = of(a_part) + of(b_part);
#pragma unroll
            for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(FULL_MASK, sum, step);
        }
        if (threadIdx.x == 0) {
            out->log_sum_exp = (double)top + log(sum);
            out->bad = bad;
            out->bad_value = bad == ~0u ? 0.0f : logits[bad];
        }
    }
    __syncthreads();
    // A thread a share: each round takes the best of the shares' next ones, which are in order.
    u32 n = 0;
    for (; n < ask.n; n++) {
        Candidate mine = {0.0f, ~0u};
        if (threadIdx.x < PARTS && next[threadIdx.x] < ask.n) mine = all[(u64)threadIdx.x * MOST + next[threadIdx.x]];
        const Candidate found = block_best(mine, scratch);
        if (found.id == ~0u) break;
        if (mine.id == found.id) next[threadIdx.x]++;
        if (threadIdx.x == 0) {
            out->ids[n] = found.id;
            out->values[n] = found.value;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) out->n = n;
}
