// gelu: x *= Phi(x), with TANH its approximation by tanh. A thread a number. Compiled with TANH 0 or 1.
// grid (ceil(n / 64)), 64 threads
#include "metal/common.h"

struct Params {
    uint n;
};

kernel void gelu(device float* x [[buffer(0)]], constant Params& a [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
    if (i >= a.n) return;
    x[i] = TANH ? gelu_tanh(x[i]) : gelu_erf(x[i]);
}
