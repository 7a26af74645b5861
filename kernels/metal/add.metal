// add: x += y. A thread a number.
// grid (ceil(n / 64)), 64 threads
#include "metal/common.h"

struct Params {
    uint n;
};

kernel void add(device float* x [[buffer(0)]], device const float* y [[buffer(1)]], constant Params& a [[buffer(2)]],
                uint i [[thread_position_in_grid]]) {
    if (i >= a.n) return;
    x[i] += y[i];
}
