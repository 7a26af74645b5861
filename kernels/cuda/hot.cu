// hot_ids, hot_merge: around the experts of a layer of which single ones have slots on the device, while the host
// computes the others.
//
// hot_ids: slots[pair] = table[ids[pair]]: the slot of the pair's expert, or no slot's number. A thread a pair.
// hot_merge: the rows of pairs without a slot come from the host's memory, over the link: out[pair] = host[pair]. A
// block a pair; those with a slot leave at once.
#include "cuda/args.h"
#include "cuda/common.h"

// grid (pairs / 256), block 256
KERNEL __launch_bounds__(256) hot_ids(const __grid_constant__ Hot a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const u32 pair = blockIdx.x * blockDim.x + threadIdx.x;
    if (pair >= a.n_pairs) return;
    // An id that names no expert never becomes an address: the host computes it, whatever it is worth.
    const u32 id = a.ids[pair];
    a.slots[pair] = id < a.n_expert ? a.table[id] : ~0u;
}

// grid (pairs), block 256
KERNEL __launch_bounds__(256) hot_merge(const __grid_constant__ Hot a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const u32 pair = blockIdx.x;
    if (a.slots[pair] < a.n_slots) return;
    const u64 at = (u64)pair * a.n;
    if (a.n % 4 == 0) {
        const float4* from = (const float4*)(a.host + at);
        float4* to = (float4*)(a.out + at);
        for (u32 i = threadIdx.x; i < a.n / 4; i += blockDim.x) to[i] = from[i];
    } else {
        for (u32 i = threadIdx.x; i < a.n; i += blockDim.x) a.out[at + i] = a.host[at + i];
    }
}
