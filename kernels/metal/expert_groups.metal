// expert_groups: pairs of a token and a slot, in the order of their experts and in their own among one expert's, and
// the tiles of up to 32 pairs that they make. No atomics: the same order each time.
//
// Tiles of expert e begin in slot first / 32 + e of the list, where `first` is how many pairs lower experts have: there
// is room for all of them up to where the next expert's begin. A slot that is left over has no pairs.
// A threadgroup an expert, which reads all ids twice.
// grid (n_expert), 64 threads
#include "metal/common.h"

struct ExpertGroups {
    uint n; // pairs
};

kernel void expert_groups(device const uint* ids [[buffer(0)]], device uint* order [[buffer(1)]],
                          device uint* tiles [[buffer(2)]], constant ExpertGroups& a [[buffer(3)]],
                          uint expert [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]]) {
    threadgroup uint counts[4]; // of each simdgroup's pairs: those of lower experts, those of this one
    const uint middle = min((a.n + 63) / 64 * 32, a.n);
    const uint from = sg == 0 ? 0 : middle, to = sg == 0 ? middle : a.n;
    uint lower = 0, own = 0;
    for (uint i = from + lane; i < to; i += 32) {
        const uint id = ids[i];
        lower += id < expert ? 1 : 0;
        own += id == expert ? 1 : 0;
    }
    lower = simd_sum(lower);
    own = simd_sum(own);
    if (lane == 0) counts[2 * sg] = lower, counts[2 * sg + 1] = own;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint first = counts[0] + counts[2], n = counts[1] + counts[3];
    uint at = first + (sg == 0 ? 0 : counts[1]);
    for (uint i = from; i < to; i += 32) {
        const uint is_own = i + lane < to && ids[i + lane] == expert ? 1 : 0;
        const uint before = simd_prefix_exclusive_sum(is_own);
        if (is_own) order[at + before] = i + lane;
        at += simd_sum(is_own);
    }
    const uint begin = first / 32 + expert, end = (first + n) / 32 + expert + 1;
    for (uint i = begin + 32 * sg + lane; i < end; i += 64) {
        const uint done = 32 * (i - begin);
        tiles[3 * i] = expert;
        tiles[3 * i + 1] = first + done;
        tiles[3 * i + 2] = done < n ? min(n - done, 32u) : 0;
    }
}
