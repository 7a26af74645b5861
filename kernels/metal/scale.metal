// scale: x *= scale. A thread a number.
// grid (ceil(n / 64)), 64 threads
#include "metal/common.h"

struct Params {
    uint n;
    float scale;
};

kernel void scale(device float* x [[buffer(0)]], constant Params& a [[buffer(1)]], uint i [[thread_position_in_grid]]) {
    if (i >= a.n) return;
    x[i] *= a.scale;
}
