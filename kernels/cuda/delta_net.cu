// delta_net: for each head of v, position after position, S = g*S; S += k (x) beta*(v - S^T k); out = S^T q.
// Compiled for -DD_K.
//
// grid (columns of d_v / 16, n_v_head, chunks), block 128: eight lanes hold a column of S in registers, D_K / 8 numbers
// each, from the chunk's first token to its last. Sums run over a lane's numbers, then over the eight lanes.
#include "cuda/common.h"
#include "cuda/args.h"

#define LANES 8
#define EACH ((D_K + LANES - 1) / LANES)

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step >>= 1) x += __shfl_xor_sync(FULL_MASK, x, step);
    return x;
}

// v holds the width of a head of v: d_v is no constant, since nothing is unrolled over it.
KERNEL __launch_bounds__(128) delta_net(const __grid_constant__ DeltaNet a) {
    PDL_LAUNCH();
    PDL_WAIT();
    const Chunk c = a.step.chunks[blockIdx.z];
    const u32 head = blockIdx.y, d_v = a.d_v;
    const u32 k_head = a.tiled ? head % a.n_k_head : head / (a.n_v_head / a.n_k_head);
    const u32 lane = threadIdx.x % LANES;
    const u32 column = blockIdx.x * (128 / LANES) + threadIdx.x / LANES;
    // Lanes without a column run along for the shuffles and write nothing.
    const bool is_real = column < d_v;
    const u32 read_column = is_real ? column : 0;

    float* state = a.state + c.state * a.state_len + (u64)head * D_K * d_v + read_column;
    float s[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const u32 row = i * LANES + lane;
        s[i] = c.pos != 0 && row < D_K ? state[(u64)row * d_v] : 0.0f;
    }
    for (u32 t = c.first; t < c.first + c.len; t++) {
        const float* k = a.k + ((u64)t * a.n_k_head + k_head) * D_K;
        const float* q = a.q + ((u64)t * a.n_k_head + k_head) * D_K;
        const u64 gate = (u64)t * a.n_v_head + head;
        const float g = a.g[gate], beta = a.beta[gate], v = a.v[gate * d_v + read_column];
        float ks[EACH], qs[EACH], known = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const u32 row = i * LANES + lane;
            ks[i] = row < D_K ? k[row] : 0.0f;
            qs[i] = row < D_K ? q[row] : 0.0f;
            known += s[i] * ks[i];
        }
        const float delta = beta * (v - g * sum_of_lanes(known));
        float y = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            s[i] = g * s[i] + ks[i] * delta;
            y += s[i] * qs[i];
        }
        y = sum_of_lanes(y);
        if (is_real && lane == 0) a.out[gate * d_v + column] = y;
    }
    if (!is_real) return;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const u32 row = i * LANES + lane;
        if (row < D_K) state[(u64)row * d_v] = s[i];
    }
}
