// expert_lists: which pairs (token * n_used + slot) chose each expert, ascending; first[e] is where those of expert e
// begin.
//
// A warp an expert, which goes through all ids twice: it counts the pairs of lower experts, then writes its own in
// order. Memory is O(pairs + experts), no atomics, so the order is always the same. Ids that name no expert are in no
// list.
#include "cuda/args.h"
#include "cuda/common.h"

// grid (ceil(n_expert / 8)), block 256
KERNEL __launch_bounds__(256) expert_lists(const __grid_constant__ ExpertLists a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const u32 expert = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (expert >= a.n_expert) return;
    u32 below = 0, own = 0;
#pragma unroll 8
    for (u32 i = lane; i < a.n_pairs; i += 32) {
        const u32 id = a.ids[i];
        below += id < expert;
        own += id == expert;
    }
#pragma unroll
    for (u32 step = 16; step > 0; step /= 2) {
        below += __shfl_xor_sync(FULL_MASK, below, step);
        own += __shfl_xor_sync(FULL_MASK, own, step);
    }
    if (lane == 0) {
        a.first[expert] = below;
        if (expert == a.n_expert - 1) a.first[a.n_expert] = below + own;
    }
    u32 at = below;
#pragma unroll 4
    for (u32 i = 0; i < a.n_pairs; i += 32) {
        const bool is_own = i + lane < a.n_pairs && a.ids[i + lane] == expert;
        const u32 hits = __ballot_sync(FULL_MASK, is_own);
        if (is_own) a.pairs[at + __popc(hits & ((1u << lane) - 1))] = i + lane;
        at += __popc(hits);
    }
}
