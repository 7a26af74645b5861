// rope: rotates pair i of each head by the angle of its position, in place. Cosines and sines come from the host, which
// has f64: table [T, half, 2]. A thread a pair.
// grid (ceil(T * n_head * half / 64)), 64 threads
#include "metal/common.h"

struct Rope {
    uint n; // pairs of all heads and rows
    uint n_head;
    uint d_head;
    uint half_width; // pairs of a head
    uint interleaved;
};

kernel void rope(device float* x [[buffer(0)]], device const float* table [[buffer(1)]], constant Rope& a [[buffer(2)]],
                 uint at [[thread_position_in_grid]]) {
    if (at >= a.n) return;
    const uint head = at / a.half_width, i = at % a.half_width;
    device float* row = x + (ulong)head * a.d_head;
    device const float* angle = table + 2 * ((ulong)(head / a.n_head) * a.half_width + i);
    const uint first = a.interleaved ? 2 * i : i, second = a.interleaved ? 2 * i + 1 : i + a.half_width;
    const float u = row[first], v = row[second], c = angle[0], s = angle[1];
    row[first] = u * c - v * s;
    row[second] = u * s + v * c;
}
