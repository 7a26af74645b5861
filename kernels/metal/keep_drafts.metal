// keep_drafts: what drafts move a delta rule's state by, in their slots: of each a row k, v, g, beta after the state.
// A thread a number.
// grid (ceil(row / 64), maximum number of drafts, chunks), 64 threads
#include "metal/common.h"
#include "metal/chunk.h"

struct KeepDrafts {
    uint n_k; // numbers of a token
    uint n_v;
    uint n_g;
    uint n_beta;
    uint slot; // numbers of a slot of states, and those before what it keeps
    uint first;
};

kernel void keep_drafts(device const float* k [[buffer(0)]], device const float* v [[buffer(1)]],
                        device const float* g [[buffer(2)]], device const float* beta [[buffer(3)]],
                        device float* states [[buffer(4)]], constant KeepDrafts& a [[buffer(5)]],
                        device const Chunk* chunks [[buffer(6)]], uint3 group [[threadgroup_position_in_grid]],
                        uint thread_idx [[thread_index_in_threadgroup]]) {
    device const Chunk& c = chunks[group.z];
    const uint row = a.n_k + a.n_v + a.n_g + a.n_beta, i = group.y;
    uint at = 64 * group.x + thread_idx;
    if (at >= row || i >= c.n_draft) return;
    const ulong token = c.first + c.len - c.n_draft + i;
    device float* to = states + (ulong)c.state * a.slot + a.first + (ulong)i * row + at;
    device const float* from = k;
    uint n = a.n_k;
    if (at >= n) {
        at -= n;
        from = v;
        n = a.n_v;
        if (at >= n) {
            at -= n;
            from = g;
            n = a.n_g;
            if (at >= n) {
                at -= n;
                from = beta;
                n = a.n_beta;
            }
        }
    }
    *to = from[token * n + at];
}
