// split_heads: to[head, :] = from[head, first + :], a part of `width` of heads of `d_head`. A thread a number.
// grid (ceil(n / 64)), 64 threads
#include "metal/common.h"

struct Params {
    uint n;
    uint width;
    uint d_head;
    uint first;
};

kernel void split_heads(device const float* from [[buffer(0)]], device float* to [[buffer(1)]],
                        constant Params& a [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    if (i >= a.n) return;
    to[i] = from[(ulong)(i / a.width) * a.d_head + a.first + i % a.width];
}
