// attention_merge: the parts of `attention` with SPLIT as one, each by its largest score, in their order. A threadgroup
// a token and a head; it reads the parts that the token's position has. Compiled with D_V; SINKS 0 or 1. grid (n_head,
// T), 64 threads
#include "metal/common.h"

struct Merge {
    uint n_head;
    uint part; // positions of a part
    uint n_parts; // of the longest context that there may be
};

kernel void attention_merge(device const float* parts [[buffer(0)]], device float* out [[buffer(1)]],
                            constant Merge& a [[buffer(2)]], device const uint* positions [[buffer(3)]],
#if SINKS
                            device const float* sinks [[buffer(4)]],
#endif
                            uint2 group [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
    const ulong row = (ulong)group.y * a.n_head + group.x;
    device const float* from = parts + row * a.n_parts * (D_V + 2);
    const uint n = positions[group.y] / a.part + 1;
    float now = -INFINITY;
    for (uint p = 0; p < n; p++) now = max(now, from[p * (D_V + 2) + D_V]);
#if SINKS
    now = max(now, sinks[group.x]);
#endif
    float sum = 0.0f;
    for (uint p = 0; p < n; p++) {
        device const float* part = from + p * (D_V + 2);
        sum += part[D_V + 1] * precise::exp(part[D_V] - now);
    }
#if SINKS
    sum += precise::exp(sinks[group.x] - now);
#endif
    for (uint i = t; i < D_V; i += 64) {
        float v = 0.0f;
        for (uint p = 0; p < n; p++) v += from[p * (D_V + 2) + i] * precise::exp(from[p * (D_V + 2) + D_V] - now);
        out[row * D_V + i] = v / sum;
    }
}
