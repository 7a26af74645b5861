// Sums over a threadgroup of 64 threads.
#pragma once

// The same sum in all threads, in an order that depends on nothing. All threads reach it; `part` is of the threadgroup
// and not read again before the next barrier.
inline float sum_of_64(float x, threadgroup float* part, uint sg, uint lane) {
    x = simd_sum(x);
    if (lane == 0) part[sg] = x;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return part[0] + part[1];
}
