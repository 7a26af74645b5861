// select: out[r, :] = the `width` numbers of x from row rows[r] on, rows of `d`: that row, or several that follow each
// other. A thread a number.
// grid (ceil(n / 64)), 64 threads
#include "metal/common.h"

struct Params {
    uint n;
    uint d;
    uint width;
};

kernel void select_rows(device const float* x [[buffer(0)]], device const uint* rows [[buffer(1)]],
                   device float* out [[buffer(2)]], constant Params& a [[buffer(3)]],
                   uint i [[thread_position_in_grid]]) {
    if (i >= a.n) return;
    out[i] = x[(ulong)rows[i / a.width] * a.d + i % a.width];
}
