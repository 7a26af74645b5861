// gate_by: x *= sigmoid(y), softplus(y) or y, y a number for each `width` of x. A thread a number.
// grid (ceil(n / 64)), 64 threads
#include "metal/common.h"

struct Params {
    uint n;
    uint width;
    uint factor; // 0: sigmoid, 1: softplus, 2: y
};

kernel void gate_by(device float* x [[buffer(0)]], device const float* y [[buffer(1)]],
                    constant Params& a [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    if (i >= a.n) return;
    const float gate = y[i / a.width];
    x[i] *= a.factor == 2 ? gate : a.factor ? softplus(gate) : sigmoid(gate);
}
