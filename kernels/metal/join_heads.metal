// join_heads: to[head, first[p] + :] = from[p][head, :], up to eight parts of heads of `d_head`. A thread a number.
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

kernel void join_heads(device float* to [[buffer(0)]],
                       constant Params& a [[buffer(1)]], device const float* from0 [[buffer(2)]],
#if N_PARTS > 1
                       device const float* from1 [[buffer(3)]],
#endif
#if N_PARTS > 2
                       device const float* from2 [[buffer(4)]],
#endif
#if N_PARTS > 3
                       device const float* from3 [[buffer(5)]],
#endif
#if N_PARTS > 4
                       device const float* from4 [[buffer(6)]],
#endif
#if N_PARTS > 5
                       device const float* from5 [[buffer(7)]],
#endif
#if N_PARTS > 6
                       device const float* from6 [[buffer(8)]],
#endif
#if N_PARTS > 7
                       device const float* from7 [[buffer(9)]],
#endif
                       uint i [[thread_position_in_grid]]) {
    if (i >= a.n) return;
    const uint head = i / a.width;
    uint part = 0, column = i % a.width;
    while (part + 1 < N_PARTS && column >= a.widths[part]) column -= a.widths[part++];
    device const float* at = from0;
#if N_PARTS > 1
    if (part == 1) at = from1;
#endif
#if N_PARTS > 2
    if (part == 2) at = from2;
#endif
#if N_PARTS > 3
    if (part == 3) at = from3;
#endif
#if N_PARTS > 4
    if (part == 4) at = from4;
#endif
#if N_PARTS > 5
    if (part == 5) at = from5;
#endif
#if N_PARTS > 6
    if (part == 6) at = from6;
#endif
#if N_PARTS > 7
    if (part == 7) at = from7;
#endif
    to[(ulong)head * a.d_head + a.first + i % a.width] = at[(ulong)head * a.widths[part] + column];
}
