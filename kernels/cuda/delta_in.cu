// delta_in: what comes before the delta rule, for one token a sequence: causal_conv of q, k and v, the norms of q and k
// with their scales, decay_beta. Compiled for a width: -DWIDTH.
//
// grid (2 * n_k_head + n_v_head + 1, T), block 128: a block a head, a thread its channels; the last block has the
// gates.
#include "cuda/common.h"
#include "cuda/args.h"

#define THREADS 128
#define STATE_ROWS (WIDTH - 1)
// Channels of a thread: heads have at most 512.
#define CHANNELS 4

KERNEL __launch_bounds__(THREADS) delta_in(const __grid_constant__ DeltaIn a) {
    __shared__ float scratch[33];
    PDL_LAUNCH();
    const u32 token = blockIdx.y, head = blockIdx.x, n_k = a.n_k_head;
    const Chunk c = a.step.chunks[a.step.chunk_of[token]];
    if (head == 2 * n_k + a.n_v_head) {
        PDL_WAIT();
        const DecayBeta& g = a.gates;
        for (u32 i = threadIdx.x; i < a.n_v_head; i += THREADS) {
            const u64 at = (u64)token * a.n_v_head + i;
            const float x = g.a[at] + g.dt_bias[i];
            // A comparison keeps NaN where fmaxf would lose it.
            const float softplus = (x < 0.0f ? 0.0f : x) + log1pf(expf(-fabsf(x)));
            g.g[at] = expf(g.a_log[i] * softplus);
            g.beta[at] = sigmoid(g.b[at]);
        }
        return;
    }
    const bool is_v = head >= 2 * n_k;
    const u32 width = is_v ? a.d_v : a.d_k;
    const u32 first = is_v ? 2 * n_k * a.d_k + (head - 2 * n_k) * a.d_v : head * a.d_k;
    float* state = a.state + c.state * a.state_len;
    float w[CHANNELS][WIDTH], rows[CHANNELS][WIDTH];
    // The state is this kernel's alone, and older than the kernels ahead.
#pragma unroll
    for (int j = 0; j < CHANNELS; j++) {
        const u32 i = j * THREADS + threadIdx.x, channel = first + (i < width ? i : 0);
#pragma unroll
        for (int r = 0; r < WIDTH; r++) w[j][r] = a.w[(u64)channel * WIDTH + r];
#pragma unroll
        for (int r = 0; r < STATE_ROWS; r++) rows[j][r] = c.pos == 0 ? 0.0f : state[(u64)r * a.d + channel];
    }
    PDL_WAIT();
    float y[CHANNELS], sum = 0.0f;
#pragma unroll
    for (int j = 0; j < CHANNELS; j++) {
        const u32 i = j * THREADS + threadIdx.x, channel = first + (i < width ? i : 0);
        rows[j][STATE_ROWS] = a.x[(u64)token * a.d + channel];
        float v = w[j][STATE_ROWS] * rows[j][STATE_ROWS];
#pragma unroll
        for (int r = 0; r < STATE_ROWS; r++) v += w[j][r] * rows[j][r];
        y[j] = i < width ? v * sigmoid(v) : 0.0f;
        sum += y[j] * y[j];
        if (i < width) {
#pragma unroll
            for (int r = 0; r < STATE_ROWS; r++) state[(u64)r * a.d + channel] = rows[j][r + 1];
        }
    }
    float by = 1.0f;
    if (!is_v) {
        const float r = 1.0f / sqrtf(block_sum(sum, scratch) / (float)width + a.eps);
        by = r * (head < n_k ? a.q_scale : a.k_scale);
    }
    const u32 in_part = is_v ? head - 2 * n_k : head % n_k, n_heads = is_v ? a.n_v_head : n_k;
    float* out = (is_v ? a.v : head < n_k ? a.q : a.k) + ((u64)token * n_heads + in_part) * width;
#pragma unroll
    for (int j = 0; j < CHANNELS; j++) {
        const u32 i = j * THREADS + threadIdx.x;
        if (i < width) out[i] = y[j] * by;
    }
}
