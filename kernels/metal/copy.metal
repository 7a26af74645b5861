// copy: to = from. A thread a number.
// grid (ceil(n / 64)), 64 threads
#include "metal/common.h"

struct Params {
    uint n;
};

kernel void copy(device const float* from [[buffer(0)]], device float* to [[buffer(1)]],
                 constant Params& a [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    if (i >= a.n) return;
    to[i] = from[i];
}
