// What comes before the delta rule: causal_conv of q, k and v, the norms of q and k with their scales, decay_beta.
// Compiled for a width: -DWIDTH.
//
// delta_in: few tokens a sequence, one after the other. grid (2 * n_k_head + n_v_head + 1, chunks), block 128: a block
// a head, a thread its channels; the last block has the gates.
// delta_in_rows: any number of tokens, of heads of at most 128 numbers, a width of at most 8. grid ((2 * n_k_head +
// n_v_head + 1) / 4, runs of RUN tokens, chunks), block 128: a warp a head, a lane its channels; the last warp has the
// gates. A chunk's first run alone sees the old state, since RUN >= WIDTH - 1, and writes the new one when it has read
// it.
#include "cuda/common.h"
#include "cuda/args.h"

#define THREADS 128
#define STATE_ROWS (WIDTH - 1)
// Channels of a thread: heads have at most 512.
#define CHANNELS 4

__device__ __forceinline__ void gates(const DecayBeta& g, u64 at, u32 head) {
    const float x = g.a[at] + g.dt_bias[head];
    // A comparison keeps NaN where fmaxf would lose it.
    const float softplus = (x < 0.0f ? 0.0f : x) + log1pf(expf(-fabsf(x)));
    g.g[at] = expf(g.a_log[head] * softplus);
    g.beta[at] = sigmoid(g.b[at]);
}

KERNEL __launch_bounds__(THREADS) delta_in(const __grid_constant__ DeltaIn a) {
    __shared__ float scratch[33];
    PDL_LAUNCH();
    const u32 head = blockIdx.x, n_k = a.n_k_head;
    const Chunk c = a.step.chunks[blockIdx.y];
    if (head == 2 * n_k + a.n_v_head) {
        PDL_WAIT();
        const u64 at = (u64)c.first * a.n_v_head;
        for (u32 i = threadIdx.x; i < c.len * a.n_v_head; i += THREADS) gates(a.gates, at + i, i % a.n_v_head);
        return;
    }
    const bool is_v = head >= 2 * n_k;
    const u32 width = is_v ? a.d_v : a.d_k;
    const u32 first = is_v ? 2 * n_k * a.d_k + (head - 2 * n_k) * a.d_v : head * a.d_k;
    const u32 in_part = is_v ? head - 2 * n_k : head % n_k, n_heads = is_v ? a.n_v_head : n_k;
    float* state = a.state + c.state * a.state_len;
    float w[CHANNELS][WIDTH], rows[CHANNELS][WIDTH];
    // The state is this kernel's alone, and older than the kernels ahead.
#pragma unroll
    for (int j = 0; j < CHANNELS; j++) {
        const u32 i = j * THREADS + threadIdx.x, channel = first + (i < width ? i : 0);
#pragma unroll
        for (int r = 0; r < WIDTH; r++) w[j][r] = a.w[(u64)channel * WIDTH + r];
#pragma unroll
        for (int r = 0; r < STATE_ROWS; r++) {
            rows[j][r] = c.pos == 0 ? 0.0f : state[(u64)(r + c.n_replay) * a.d + channel];
        }
    }
    PDL_WAIT();
    // Rows of [state | x] from this one on become the state, followed by those of drafts.
    const u32 kept = c.len - c.n_draft;
#pragma unroll
    for (int j = 0; j < CHANNELS; j++) {
        const u32 i = j * THREADS + threadIdx.x;
#pragma unroll
        for (int r = 0; r < STATE_ROWS; r++) {
            if (i < width && (u32)r >= kept) state[(u64)(r - kept) * a.d + first + i] = rows[j][r];
        }
    }
    float next[CHANNELS];
    const auto load = [&](u32 t) {
#pragma unroll
        for (int j = 0; j < CHANNELS; j++) {
            const u32 i = j * THREADS + threadIdx.x;
            next[j] = a.x[(u64)(c.first + t) * a.d + first + (i < width ? i : 0)];
        }
    };
    load(0);
#pragma unroll 1
    for (u32 t = 0; t < c.len; t++) {
        const u64 token = c.first + t;
        float y[CHANNELS], sum = 0.0f, x[CHANNELS];
#pragma unroll
        for (int j = 0; j < CHANNELS; j++) x[j] = next[j];
        if (t + 1 < c.len) load(t + 1);
#pragma unroll
        for (int j = 0; j < CHANNELS; j++) {
            const u32 i = j * THREADS + threadIdx.x, channel = first + (i < width ? i : 0);
            const float now = x[j];
            float v = w[j][STATE_ROWS] * now;
#pragma unroll
            for (int r = 0; r < STATE_ROWS; r++) v += w[j][r] * rows[j][r];
            y[j] = i < width ? v * sigmoid(v) : 0.0f;
            sum += y[j] * y[j];
            if (i < width && STATE_ROWS + t >= kept) state[(u64)(STATE_ROWS + t - kept) * a.d + channel] = now;
#pragma unroll
            for (int r = 0; r + 1 < STATE_ROWS; r++) rows[j][r] = rows[j][r + 1];
            rows[j][STATE_ROWS - 1] = now;
        }
        float by = 1.0f;
        if (!is_v) {
            const float r = 1.0f / sqrtf(block_sum(sum, scratch) / (float)width + a.eps);
            by = r * (head < n_k ? a.q_scale : a.k_scale);
        }
        float* out = (is_v ? a.v : head < n_k ? a.q : a.k) + (token * n_heads + in_part) * width;
#pragma unroll
        for (int j = 0; j < CHANNELS; j++) {
            const u32 i = j * THREADS + threadIdx.x;
            if (i < width) out[i] = y[j] * by;
        }
    }
}

#if WIDTH <= 8
#define RUN 16
#define LANE_CHANNELS 4
// Tokens that a lane asks for at once.
#define AHEAD 4

KERNEL __launch_bounds__(THREADS) delta_in_rows(const __grid_constant__ DeltaIn a) {
    PDL_LAUNCH();
    const u32 lane = threadIdx.x % 32, head = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, n_k = a.n_k_head;
    const u32 n_heads = 2 * n_k + a.n_v_head;
    const bool is_v = head >= 2 * n_k;
    const u32 width = head >= n_heads ? 0 : is_v ? a.d_v : a.d_k;
    const u32 begin = is_v ? 2 * n_k * a.d_k + (head - 2 * n_k) * a.d_v : head * a.d_k;
    float w[LANE_CHANNELS][WIDTH];
#pragma unroll
    for (int j = 0; j < LANE_CHANNELS; j++) {
        const u32 i = j * 32 + lane;
#pragma unroll
        for (int r = 0; r < WIDTH; r++) w[j][r] = i < width ? a.w[(u64)(begin + i) * WIDTH + r] : 0.0f;
    }
    PDL_WAIT();
    const Chunk c = a.step.chunks[blockIdx.z];
    const u32 first = blockIdx.y * RUN;
    if (head > n_heads || first >= c.len) return;
    const u32 n = min((u32)RUN, c.len - first);
    if (head == n_heads) {
        const u64 at = (u64)(c.first + first) * a.n_v_head;
        for (u32 i = lane; i < n * a.n_v_head; i += 32) gates(a.gates, at + i, i % a.n_v_head);
        return;
    }
    const float* x = a.x + (u64)c.first * a.d + begin;
    float* state = a.state + c.state * a.state_len + begin;
    // The rows before the next one, oldest first.
    float rows[LANE_CHANNELS][STATE_ROWS];
#pragma unroll
    for (int j = 0; j < LANE_CHANNELS; j++) {
        const u32 i = j * 32 + lane;
#pragma unroll
        for (int r = 0; r < STATE_ROWS; r++) {
            rows[j][r] = i >= width   ? 0.0f
                         : first > 0  ? x[(u64)(first - STATE_ROWS + r) * a.d + i]
                         : c.pos == 0 ? 0.0f
                                      : state[(u64)(r + c.n_replay) * a.d + i];
        }
        if (first > 0 || i >= width) continue;
        // The new state: the last rows of [state | x] before the drafts, and those of the drafts.
        for (u32 r = 0; r < STATE_ROWS + c.n_draft; r++) {
            const u32 row = c.len - c.n_draft + r; // of STATE_ROWS + len
            float v = 0.0f;
#pragma unroll
            for (int e = 0; e < STATE_ROWS; e++) v = row == e ? rows[j][e] : v;
            if (row >= STATE_ROWS) v = x[(u64)(row - STATE_ROWS) * a.d + i];
            state[(u64)r * a.d + i] = v;
        }
    }
    const u32 in_part = is_v ? head - 2 * n_k : head % n_k, of_part = is_v ? a.n_v_head : n_k;
    float* out = (is_v ? a.v : head < n_k ? a.q : a.k) + ((u64)(c.first + first) * of_part + in_part) * width;
    const float scale = is_v ? 1.0f : head < n_k ? a.q_scale : a.k_scale;
    for (u32 t = 0; t < n; t += AHEAD) {
        float now[AHEAD][LANE_CHANNELS];
#pragma unroll
        for (int e = 0; e < AHEAD; e++) {
#pragma unroll
            for (int j = 0; j < LANE_CHANNELS; j++) {
                const u32 i = j * 32 + lane;
                now[e][j] = i < width && t + e < n ? x[(u64)(first + t + e) * a.d + i] : 0.0f;
            }
        }
#pragma unroll
        for (int e = 0; e < AHEAD; e++) {
            float y[LANE_CHANNELS], sum = 0.0f;
#pragma unroll
            for (int j = 0; j < LANE_CHANNELS; j++) {
                float v = w[j][STATE_ROWS] * now[e][j];
#pragma unroll
                for (int r = 0; r < STATE_ROWS; r++) v += w[j][r] * rows[j][r];
                y[j] = v * sigmoid(v);
                sum += y[j] * y[j];
#pragma unroll
                for (int r = 0; r + 1 < STATE_ROWS; r++) rows[j][r] = rows[j][r + 1];
                rows[j][STATE_ROWS - 1] = now[e][j];
            }
            const float by = is_v ? 1.0f : 1.0f / sqrtf(warp_sum(sum) / (float)width + a.eps) * scale;
#pragma unroll
            for (int j = 0; j < LANE_CHANNELS; j++) {
                const u32 i = j * 32 + lane;
                if (i < width && t + e < n) out[(u64)(t + e) * of_part * width + i] = y[j] * by;
            }
        }
    }
}
#endif
