// scale_by: x[t, :] *= w, rows of `d`; with `d` 1 the same number scales all. A thread a number.
// grid (ceil(n / 64)), 64 threads
#include "metal/common.h"

struct Params {
    uint n;
    uint d;
};

kernel void scale_by(device float* x [[buffer(0)]], device const float* w [[buffer(1)]],
                     constant Params& a [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    if (i >= a.n) return;
    x[i] *= w[i % a.d];
}
