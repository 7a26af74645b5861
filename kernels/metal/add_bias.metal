// add_bias: x[t, :] += w, rows of `d`. A thread a number.
// grid (ceil(n / 64)), 64 threads
#include "metal/common.h"

struct Params {
    uint n;
    uint d;
};

kernel void add_bias(device float* x [[buffer(0)]], device const float* w [[buffer(1)]],
                     constant Params& a [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    if (i >= a.n) return;
    x[i] += w[i % a.d];
}
