// split_heads: to[p][head, :] = from[head, first[p] + :], up to eight parts of heads of `d_head`. A thread a number.
// Compiled with N_PARTS.
// grid (ceil(n / 64)), 64 threads
#include "metal/common.h"

struct Params {
    uint n; // of all parts
    uint d_head;
    uint first; // of the first part
    uint width; // of all parts
    uint widths[8];
};

kernel void split_heads(device const float* from [[buffer(0)]],
                        constant Params& a [[buffer(1)]], device float* to0 [[buffer(2)]],
#if N_PARTS > 1
                        device float* to1 [[buffer(3)]],
#endif
#if N_PARTS > 2
                        device float* to2 [[buffer(4)]],
#endif
#if N_PARTS > 3
                        device float* to3 [[buffer(5)]],
#endif
#if N_PARTS > 4
                        device float* to4 [[buffer(6)]],
#endif
#if N_PARTS > 5
                        device float* to5 [[buffer(7)]],
#endif
#if N_PARTS > 6
                        device float* to6 [[buffer(8)]],
#endif
#if N_PARTS > 7
                        device float* to7 [[buffer(9)]],
#endif
                        uint i [[thread_position_in_grid]]) {
    if (i >= a.n) return;
    const uint head = i / a.width;
    uint part = 0, column = i % a.width;
    while (part + 1 < N_PARTS && column >= a.widths[part]) column -= a.widths[part++];
    device float* at = to0;
#if N_PARTS > 1
    if (part == 1) at = to1;
#endif
#if N_PARTS > 2
    if (part == 2) at = to2;
#endif
#if N_PARTS > 3
    if (part == 3) at = to3;
#endif
#if N_PARTS > 4
    if (part == 4) at = to4;
#endif
#if N_PARTS > 5
    if (part == 5) at = to5;
#endif
#if N_PARTS > 6
    if (part == 6) at = to6;
#endif
#if N_PARTS > 7
    if (part == 7) at = to7;
#endif
    at[(ulong)head * a.widths[part] + column] = from[(ulong)head * a.d_head + a.first + i % a.width];
}
