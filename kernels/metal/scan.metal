// scan: delta_net for sums whose heads of v are one number wide and whose rows of S decay each by itself, as in
// Mamba-1. A thread takes a head through a chunk with its S, a column, in registers. Slots, parameters and the state
// are those of `delta_net`. Compiled with D_K, and SKIP 0 or 1.
// grid (ceil(n_v_head / 64), 1, chunks), 64 threads
#include "metal/common.h"
#include "metal/chunk.h"

struct DeltaNet {
    uint n_k_head;
    uint n_v_head;
    uint d_v; // 1
    uint tiled; // heads of v that share a head of k are n_k_head apart, else next to each other
    uint slot; // numbers of a slot of states
};

kernel void scan(device const float* q [[buffer(0)]], device const float* k [[buffer(1)]],
                 device const float* v [[buffer(2)]], device const float* g [[buffer(3)]],
                 device const float* beta [[buffer(4)]], device float* states [[buffer(5)]],
                 device float* out [[buffer(6)]], constant DeltaNet& a [[buffer(7)]],
                 device const Chunk* chunks [[buffer(8)]],
#if SKIP
                 device const float* skip [[buffer(11)]],
#endif
                 uint3 group [[threadgroup_position_in_grid]], uint thread_idx [[thread_index_in_threadgroup]]) {
    const uint head = 64 * group.x + thread_idx;
    if (head >= a.n_v_head) return;
    const uint k_head = a.tiled ? head % a.n_k_head : head / (a.n_v_head / a.n_k_head);
    device const Chunk& c = chunks[group.z];
    device float* state = states + (ulong)c.state * a.slot + (ulong)head * D_K;
    const uint own_end = c.first + c.len - c.n_draft;
    float s[D_K];
    for (uint i = 0; i < D_K; i++) s[i] = c.pos == 0 ? 0.0f : state[i];
    for (uint t = c.first; t < c.first + c.len; t++) {
        const ulong at = (ulong)t * a.n_v_head + head, shared = ((ulong)t * a.n_k_head + k_head) * D_K;
        const float value = v[at], delta = beta[at] * value;
        float y = 0.0f;
        for (uint i = 0; i < D_K; i++) {
            s[i] = g[at * D_K + i] * s[i] + k[shared + i] * delta;
            y += s[i] * q[shared + i];
        }
#if SKIP
        y += skip[head] * value;
#endif
        out[at] = y;
        if (t + 1 != own_end) continue;
        for (uint i = 0; i < D_K; i++) state[i] = s[i];
    }
}
