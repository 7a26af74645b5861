// sigmoid_gate: x *= sigmoid(y), y a number for each of x or for each row of `width`. A thread a number.
// grid (ceil(n / 64)), 64 threads
#include "metal/common.h"

struct Params {
    uint n;
    uint width; // 1: a number for each
};

kernel void sigmoid_gate(device float* x [[buffer(0)]], device const float* y [[buffer(1)]],
                         constant Params& a [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    if (i >= a.n) return;
    x[i] *= sigmoid(y[i / a.width]);
}
