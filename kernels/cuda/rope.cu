// rope: rotates pair i of each head by position * inv_freq[i].
//
// The angle is a product in f64 that f64's own sine reduces: 1e-6 holds at any position. So it is found once a step and
// rope for all layers (rope_table), and read by each (rope). The first launch of a step also zeroes what a step begins
// with as zero.
#include "cuda/common.h"
#include "cuda/args.h"

// grid (max(T * half, n_zeroed) / 128), block 128
KERNEL __launch_bounds__(128) rope_table(const __grid_constant__ RopeTable a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < a.n_zeroed) a.zeroed[at] = 0;
    if (at >= (u64)a.rows * a.half) return;
    const u32* place = a.places ? a.places + at / a.half * 3 : a.positions + at / a.half;
    const double angle = (double)place[a.places && a.axes ? a.axes[at % a.half] : 0] * a.inv_freq[at % a.half];
    double sine, cosine;
    sincos(angle, &sine, &cosine);
    double factor = (double)a.factor;
    if (a.step) {
        const u64 steps = ((u64)*place + a.offset) / a.step;
        factor *= 1.0 + (double)a.beta * log(1.0 + (double)steps);
    }
    a.table[2 * at] = (float)(cosine * factor);
    a.table[2 * at + 1] = (float)(sine * factor);
}

// grid (T * n_head * half / 128), block 128: a thread a pair
KERNEL __launch_bounds__(128) rope(const __grid_constant__ Rope a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (u64)a.rows * a.n_head * a.half) return;
    const u64 head = at / a.half;
    const u32 i = at % a.half;
    float* x = a.x + head * a.d_head;
    const float* angle = a.table + 2 * (head / a.n_head * a.half + i);
    float* first = x + (a.interleaved ? 2 * i : i);
    float* second = x + (a.interleaved ? 2 * i + 1 : i + a.half);
    const float u = *first, v = *second, c = angle[0], s = angle[1];
    *first = u * c - v * s;
    *second = u * s + v * c;
}
