// causal_conv: out[t, c] = sum_j w[c, j] * row[t + j, c] (+ bias[c]) over the rows [state | x] of a chunk, then silu
// with SILU; the last WIDTH - 1 of the rows become the state, with those of drafts after them. A thread a channel of
// TILE tokens of a chunk.
//
// A chunk's first tile alone reads the old state, since TILE >= WIDTH - 1, and writes the new one when it has read it.
// Compiled with WIDTH, BIAS and SILU 0 or 1.
// grid (ceil(d / 64), ceil(tokens of the longest chunk / TILE), chunks), 64 threads
#include "metal/common.h"
#include "metal/chunk.h"

#define STATE_ROWS (WIDTH - 1)
#define TILE 32
static_assert(STATE_ROWS <= TILE, "a tile holds a state");

struct CausalConv {
    uint d;
    uint slot; // numbers of a slot of states
};

kernel void causal_conv(device const float* x [[buffer(0)]], device const float* w [[buffer(1)]],
                        device float* states [[buffer(2)]], device float* out [[buffer(3)]],
                        constant CausalConv& a [[buffer(4)]], device const Chunk* chunks [[buffer(5)]],
#if BIAS
                        device const float* bias [[buffer(6)]],
#endif
                        uint3 group [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
    const uint channel = group.x * 64 + t, begin = group.y * TILE;
    device const Chunk& c = chunks[group.z];
    if (channel >= a.d || begin >= c.len) return;
    device const float* from = x + (ulong)c.first * a.d + channel;
    device float* state = states + (ulong)c.state * a.slot + channel;
    device const float* old = state + (ulong)c.n_replay * a.d;
    // The rows before the next one, oldest first, and what they are multiplied with.
    float taps[WIDTH], rows[WIDTH];
    for (uint j = 0; j < WIDTH; j++) taps[j] = w[(ulong)channel * WIDTH + j];
    for (uint j = 0; j < STATE_ROWS; j++) {
        if (begin > 0) {
            rows[j] = from[(ulong)(begin - STATE_ROWS + j) * a.d];
        } else {
            rows[j] = c.pos == 0 ? 0.0f : old[(ulong)j * a.d];
        }
    }
    if (begin == 0) {
        // The last rows before the drafts, and those of the drafts.
        for (uint j = 0; j < STATE_ROWS + c.n_draft; j++) {
            const uint row = c.len - c.n_draft + j; // of STATE_ROWS + len
            float v = 0.0f;
            for (uint i = 0; i < STATE_ROWS; i++) v = row == i ? rows[i] : v;
            if (row >= STATE_ROWS) v = from[(ulong)(row - STATE_ROWS) * a.d];
            state[(ulong)j * a.d] = v;
        }
    }
    const uint end = min(begin + TILE, c.len);
    for (uint i = begin; i < end; i++) {
        rows[STATE_ROWS] = from[(ulong)i * a.d];
        float sum = 0.0f;
        for (uint j = 0; j < WIDTH; j++) sum += taps[j] * rows[j];
#if BIAS
        sum += bias[channel];
#endif
        out[(ulong)(c.first + i) * a.d + channel] = SILU ? sum * sigmoid(sum) : sum;
        for (uint j = 0; j < STATE_ROWS; j++) rows[j] = rows[j + 1];
    }
}
