// expert_lists: which pairs (token * n_used + slot) chose each expert, ascending; first[e] is where those of expert e
// begin, places[pair] where a pair stands.
//
// A block an expert, of which each thread goes through a piece of all ids twice: it counts the pairs of lower experts
// and its own, then writes its own behind those of the threads before. Memory is O(pairs + experts), no atomics, so the
// order is always the same. Ids that name no expert are in no list. Where a product reads columns of bytes next, more
// blocks pack a pair each, whose place they find by themselves.
#include "cuda/args.h"
#include "cuda/common.h"
#include "cuda/experts_bytes.h"

// Calls `each(i, id)` for the ids of this thread.
template <class Each>
__device__ __forceinline__ void ids_of_thread(const ExpertLists& a, const Each& each) {
    const u32 per_thread = (a.n_pairs + 4 * blockDim.x - 1) / (4 * blockDim.x) * 4;
    const u32 begin = min(threadIdx.x * per_thread, a.n_pairs), end = min(begin + per_thread, a.n_pairs);
#pragma unroll 4
    for (u32 i = begin; i < end; i += 4) {
        if (i + 4 <= end) {
            const uint4 ids = *(const uint4*)(a.ids + i);
            each(i, ids.x), each(i + 1, ids.y), each(i + 2, ids.z), each(i + 3, ids.w);
        } else {
            for (u32 j = i; j < end; j++) each(j, a.ids[j]);
        }
    }
}

// Lists the tiles in addition to one an expert: `counts` holds the experts' pairs. A warp.
__device__ __forceinline__ void list_further(const u32* counts, u32 n_expert, u32 width, u32* further) {
    u32 pairs = 0, tiles = 0;
    for (u32 e = 0; e < n_expert; e += 32) {
        const u32 mine = e + threadIdx.x % 32, own = mine < n_expert ? counts[mine] : 0;
        const u32 last = pairs + sum_up_to(own), first = last - own, span = own ? last - first / 8 * 8 : 0;
        const u32 more = span > width ? (span - 1) / width : 0, listed = tiles + sum_up_to(more);
        for (u32 i = 0; i < more; i++) further[1 + listed - more + i] = mine << 16 | (i + 1);
        pairs = __shfl_sync(FULL_MASK, last, 31), tiles = __shfl_sync(FULL_MASK, listed, 31);
    }
    if (threadIdx.x % 32 == 0) further[0] = tiles;
}

// Packs the row of a pair after those of its expert's pairs before it.
__device__ __forceinline__ void pack_pair(const ExpertLists& a, u32 pair, u32 (&belows)[8], u32 (&owns)[8]) {
    const float* x = a.x + (u64)(pair / a.n_used) * a.k;
    if (8 * threadIdx.x < a.k) prefetch(x + 8 * threadIdx.x);
    const u32 expert = a.ids[pair];
    if (expert >= a.n_expert) return;
    u32 below = 0, own = 0;
    for (u32 i = threadIdx.x; i < a.n_pairs; i += blockDim.x) {
        const u32 id = a.ids[i];
        below += id < expert, own += id == expert && i < pair;
    }
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        below += __shfl_xor_sync(FULL_MASK, below, step), own += __shfl_xor_sync(FULL_MASK, own, step);
    }
    if (threadIdx.x % 32 == 0) belows[threadIdx.x / 32] = below, owns[threadIdx.x / 32] = own;
    __syncthreads();
    below = 0, own = 0;
#pragma unroll
    for (u32 w = 0; w < 8; w++) below += belows[w], own += owns[w];
    bytes_pack(x, a.k, (ByteColumns*)a.columns, a.n_groups, bytes_group(below, expert) + own / 8, own % 8);
}

// grid (n_expert, one where tiles are listed, pairs that are packed), block 256; dynamic shared memory: a word for each
// expert
extern __shared__ uint4 shared[];
KERNEL __launch_bounds__(256) expert_lists(const __grid_constant__ ExpertLists a) {
    __shared__ u32 belows[8], owns[8];
    PDL_LAUNCH();
    PDL_WAIT();
    const u32 expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (expert > a.n_expert) {
        pack_pair(a, expert - a.n_expert - 1, belows, owns);
        return;
    }
    if (expert == a.n_expert) {
        u32* const counts = (u32*)shared;
        for (u32 e = threadIdx.x; e < a.n_expert; e += blockDim.x) counts[e] = 0;
        __syncthreads();
        ids_of_thread(a, [&](u32, u32 id) {
            if (id < a.n_expert) atomicAdd(counts + id, 1u);
        });
        __syncthreads();
        if (warp < 3 && a.further[warp]) {
            list_further(counts, a.n_expert, a.width[warp], a.further[warp]);
        }
        return;
    }
    u32 below = 0, own = 0;
    ids_of_thread(a, [&](u32, u32 id) { below += id < expert, own += id == expert; });
    const u32 before = sum_up_to(own);
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) below += __shfl_xor_sync(FULL_MASK, below, step);
    if (lane == 31) belows[warp] = below, owns[warp] = before;
    __syncthreads();
    u32 first = 0, total = 0, at = before - own;
    for (u32 w = 0; w < 8; w++) {
        if (w < warp) at += owns[w];
        first += belows[w], total += owns[w];
    }
    at += first;
    if (threadIdx.x == 0) {
        a.first[expert] = first;
        if (expert == a.n_expert - 1) a.first[a.n_expert] = first + total;
    }
    ids_of_thread(a, [&](u32 i, u32 id) {
        if (id == expert) a.places[i] = at, a.pairs[at++] = i;
    });
}
