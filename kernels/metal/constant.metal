// constant: out[t, :] = values, rows of `d`. A thread a number.
// grid (ceil(n / 64)), 64 threads
#include "metal/common.h"

struct Params {
    uint n;
    uint d;
};

kernel void fill_rows(device const float* values [[buffer(0)]], device float* out [[buffer(1)]],
                      constant Params& a [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    if (i >= a.n) return;
    out[i] = values[i % a.d];
}
