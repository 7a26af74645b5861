// causal_conv: out[t, c] = sum_j w[c, j] * row[t + j, c] (+ bias[c]) over the rows [state | x] of a chunk, then silu
// where the op has it; the last WIDTH - 1 of the rows become the state. Compiled for a width: -DWIDTH.
//
// grid (d / 128, tiles of TILE tokens, chunks), block 128: a thread a channel. A chunk's first tile alone sees the old
// state, since TILE >= WIDTH - 1, and writes the new one when it has read it.
#include "cuda/common.h"
#include "cuda/args.h"

#define STATE_ROWS (WIDTH - 1)
#define TILE (STATE_ROWS > 32 ? STATE_ROWS : 32)

KERNEL __launch_bounds__(128) causal_conv(const __grid_constant__ CausalConv a) {
    PDL_LAUNCH();
    const u32 channel = blockIdx.x * 128 + threadIdx.x;
    float w[WIDTH];
#pragma unroll
    for (int j = 0; j < WIDTH; j++) w[j] = channel < a.d ? a.w[(u64)channel * WIDTH + j] : 0.0f;
    const float bias = a.bias && channel < a.d ? a.bias[channel] : 0.0f;
    PDL_WAIT();
    const Chunk c = a.step.chunks[blockIdx.z];
    const u32 first = blockIdx.y * TILE;
    if (channel >= a.d || first >= c.len) return;

    const float* x = a.x + (u64)c.first * a.d + channel;
    float* out = a.out + (u64)c.first * a.d + channel;
    float* state = a.state + c.state * a.state_len + channel;
    const float* old = state + (u64)c.n_replay * a.d;
    // The rows before the next one, oldest first.
    float rows[STATE_ROWS];
#pragma unroll
    for (int j = 0; j < STATE_ROWS; j++) {
        if (first > 0) {
            rows[j] = x[(u64)(first - STATE_ROWS + j) * a.d];
        } else {
            rows[j] = c.pos == 0 ? 0.0f : old[(u64)j * a.d];
        }
    }
    if (first == 0) {
        // The new state: the last rows of [state | x] before the drafts, and those of the drafts.
        for (u32 j = 0; j < STATE_ROWS + c.n_draft; j++) {
            const u32 row = c.len - c.n_draft + j; // of STATE_ROWS + len
            float v = 0.0f;
#pragma unroll
            for (int i = 0; i < STATE_ROWS; i++) v = row == i ? rows[i] : v;
            if (row >= STATE_ROWS) v = x[(u64)(row - STATE_ROWS) * a.d];
            state[(u64)j * a.d] = v;
        }
    }
    const u32 end = min(first + TILE, c.len);
    for (u32 t = first; t < end; t++) {
        const float now = x[(u64)t * a.d];
        float sum = w[STATE_ROWS] * now;
#pragma unroll
        for (int j = 0; j < STATE_ROWS; j++) sum += w[j] * rows[j];
        sum += bias;
        out[(u64)t * a.d] = a.silu ? sum * sigmoid(sum) : sum;
#pragma unroll
        for (int j = 0; j + 1 < STATE_ROWS; j++) rows[j] = rows[j + 1];
        rows[STATE_ROWS - 1] = now;
    }
}
