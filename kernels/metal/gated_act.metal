// gated_act: out = act(x) * y, ACT as in common.h. A thread a number.
// grid (ceil(n / 64)), 64 threads
#include "metal/common.h"

struct Params {
    uint n;
    float alpha;
    float limit;
};

kernel void gated_act(device const float* x [[buffer(0)]], device const float* y [[buffer(1)]],
                      device float* out [[buffer(2)]], constant Params& a [[buffer(3)]],
                      uint i [[thread_position_in_grid]]) {
    if (i >= a.n) return;
    out[i] = gated(ACT, x[i], y[i], a.alpha, a.limit);
}
