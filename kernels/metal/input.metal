// input: rows that the step is given, `d` numbers of each from number `first` on: in place of those of x, or added to
// them. A thread a number.
// grid (ceil(n / 64)), 64 threads
#include "metal/common.h"

struct Params {
    uint n;
    uint d;
    uint d_input;
    uint first;
    uint add;
};

kernel void input_rows(device float* x [[buffer(0)]], device const float* given [[buffer(1)]],
                       device const uint* tokens [[buffer(2)]], constant Params& a [[buffer(3)]],
                       uint i [[thread_position_in_grid]]) {
    if (i >= a.n) return;
    const float own = given[(ulong)(i / a.d) * a.d_input + a.first + i % a.d];
    device float* to = x + (ulong)tokens[i / a.d] * a.d + i % a.d;
    *to = a.add ? *to + own : own;
}
