// delta_in: what a gated delta rule reads. Heads of q, k and v are what causal_conv makes of the channels of a chunk;
// those of q and k are divided by their root mean square and scaled. The last threadgroup makes the gates: g =
// exp(a_log * softplus(a + dt_bias)), beta = sigmoid(b). A simdgroup a head of TILE tokens of a chunk, and lane l has
// its channels l, l + 32, ...; heads of q come first, then those of k, then those of v.
//
// A chunk's first tile alone reads the old state, since TILE >= WIDTH - 1, and writes the new one when it has read it.
// Compiled with WIDTH, and with EACH: channels of a lane.
// grid (ceil(heads / 2) + 1, ceil(tokens of the longest chunk / TILE), chunks), 64 threads
#include "metal/common.h"
#include "metal/chunk.h"

#define STATE_ROWS (WIDTH - 1)
#define TILE 32
static_assert(STATE_ROWS <= TILE, "a tile holds a state");

struct DeltaIn {
    uint d; // channels
    uint n_k_head; // of q, and of k
    uint d_k;
    uint n_v_head;
    uint d_v;
    uint a_width;
    uint b_width;
    uint group; // numbers of a group of gates, and from one to the next
    uint stride;
    uint first_a; // of a group
    uint first_b;
    float q_eps;
    float q_scale;
    float k_eps;
    float k_scale;
    uint slot; // numbers of a slot of states
};

kernel void delta_in(device const float* x [[buffer(0)]], device const float* w [[buffer(1)]],
                     device float* states [[buffer(2)]], constant DeltaIn& a [[buffer(3)]],
                     device const Chunk* chunks [[buffer(4)]], device float* q [[buffer(5)]],
                     device float* k [[buffer(6)]], device float* v [[buffer(7)]],
                     device const float* a_in [[buffer(8)]], device const float* b_in [[buffer(9)]],
                     device const float* a_log [[buffer(10)]], device const float* dt_bias [[buffer(11)]],
                     device float* g [[buffer(12)]], device float* beta [[buffer(13)]],
                     uint3 group [[threadgroup_position_in_grid]], uint3 groups [[threadgroups_per_grid]],
                     uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    device const Chunk& c = chunks[group.z];
    const uint begin = group.y * TILE, end = min(begin + TILE, c.len);
    if (begin >= c.len) return;
    if (group.x == groups.x - 1) {
        for (uint i = 32 * sg + lane; i < (end - begin) * a.n_v_head; i += 64) {
            const uint head = i % a.n_v_head;
            const ulong token = c.first + begin + i / a.n_v_head;
            const uint at = head / a.group * a.stride + head % a.group;
            g[token * a.n_v_head + head] =
                decay(a_in[token * a.a_width + at + a.first_a] + dt_bias[head], a_log[head]);
            beta[token * a.n_v_head + head] = sigmoid(b_in[token * a.b_width + at + a.first_b]);
        }
        return;
    }
    uint head = 2 * group.x + sg;
    if (head >= 2 * a.n_k_head + a.n_v_head) return;
    // Its first channel, where it goes, and what it is scaled with.
    uint first = 0, n = a.d_k, n_heads = a.n_k_head;
    device float* out = q;
    float eps = a.q_eps, scale = a.q_scale;
    bool is_normed = true;
    if (head >= 2 * a.n_k_head) {
        head -= 2 * a.n_k_head;
        first = 2 * a.n_k_head * a.d_k;
        n = a.d_v;
        n_heads = a.n_v_head;
        out = v;
        is_normed = false;
    } else if (head >= a.n_k_head) {
        head -= a.n_k_head;
        first = a.n_k_head * a.d_k;
        out = k;
        eps = a.k_eps;
        scale = a.k_scale;
    }
    first += head * n;
    device const float* from = x + (ulong)c.first * a.d + first;
    device float* state = states + (ulong)c.state * a.slot + first;
    device const float* old = state + (ulong)c.n_replay * a.d;
    // For each channel the rows before the next one, oldest first, and what they are multiplied with.
    float taps[EACH][WIDTH], rows[EACH][WIDTH];
    for (uint e = 0; e < EACH; e++) {
        const uint channel = 32 * e + lane;
        for (uint j = 0; j < WIDTH; j++) taps[e][j] = channel < n ? w[(ulong)(first + channel) * WIDTH + j] : 0.0f;
        for (uint j = 0; j < STATE_ROWS; j++) {
            rows[e][j] = 0.0f;
            if (channel >= n) continue;
            if (begin > 0) {
                rows[e][j] = from[(ulong)(begin - STATE_ROWS + j) * a.d + channel];
            } else if (c.pos != 0) {
                rows[e][j] = old[(ulong)j * a.d + channel];
            }
        }
        if (begin > 0 || channel >= n) continue;
        // The last rows before the drafts, and those of the drafts.
        for (uint j = 0; j < STATE_ROWS + c.n_draft; j++) {
            const uint row = c.len - c.n_draft + j; // of STATE_ROWS + len
            float next = 0.0f;
            for (uint i = 0; i < STATE_ROWS; i++) next = row == i ? rows[e][i] : next;
            if (row >= STATE_ROWS) next = from[(ulong)(row - STATE_ROWS) * a.d + channel];
            state[(ulong)j * a.d + channel] = next;
        }
    }
    for (uint i = begin; i < end; i++) {
        float found[EACH], squares = 0.0f;
        for (uint e = 0; e < EACH; e++) {
            const uint channel = 32 * e + lane;
            rows[e][STATE_ROWS] = channel < n ? from[(ulong)i * a.d + channel] : 0.0f;
            float sum = 0.0f;
            for (uint j = 0; j < WIDTH; j++) sum += taps[e][j] * rows[e][j];
            for (uint j = 0; j < STATE_ROWS; j++) rows[e][j] = rows[e][j + 1];
            found[e] = sum * sigmoid(sum);
            squares += found[e] * found[e];
        }
        const float r = 1.0f / precise::sqrt(simd_sum(squares) / float(n) + eps);
        device float* to = out + ((ulong)(c.first + i) * n_heads + head) * n;
        for (uint e = 0; e < EACH; e++) {
            const uint channel = 32 * e + lane;
            if (channel < n) to[channel] = is_normed ? found[e] * r * scale : found[e];
        }
    }
}
