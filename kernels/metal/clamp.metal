// clamp: x = min(max(x, low), high). NaN becomes `low`, as the maximum of NaN and a number is the number. A thread a
// number.
// grid (ceil(n / 64)), 64 threads
#include "metal/common.h"

struct Params {
    uint n;
};

kernel void clamp_rows(device float* x [[buffer(0)]], device const float* low [[buffer(1)]],
                       device const float* high [[buffer(2)]], constant Params& a [[buffer(3)]],
                       uint i [[thread_position_in_grid]]) {
    if (i >= a.n) return;
    const float v = x[i] > low[0] ? x[i] : low[0];
    x[i] = v < high[0] ? v : high[0];
}
