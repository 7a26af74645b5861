// delta_net: for each head of v, position after position, S = g*S; S += k (x) beta*(v - S^T k); out = S^T q. A
// simdgroup takes four columns of S of a head through a chunk, in registers: lane l has their numbers l, l + 32, ...
// Columns of S lie as rows, [n_v_head, d_v, D_K], so that a simdgroup reads them side by side.
// Compiled with D_K.
// grid (ceil(d_v / 8), n_v_head, chunks), 64 threads
#include "metal/common.h"
#include "metal/chunk.h"

// Numbers of a column in a lane.
#define EACH ((D_K + 31) / 32)

struct DeltaNet {
    uint n_k_head;
    uint n_v_head;
    uint d_v;
    uint tiled; // heads of v that share a head of k are n_k_head apart, else side by side
};

kernel void delta_net(device const float* q [[buffer(0)]], device const float* k [[buffer(1)]],
                      device const float* v [[buffer(2)]], device const float* g [[buffer(3)]],
                      device const float* beta [[buffer(4)]], device float* states [[buffer(5)]],
                      device float* out [[buffer(6)]], constant DeltaNet& a [[buffer(7)]],
                      device const Chunk* chunks [[buffer(8)]], uint3 group [[threadgroup_position_in_grid]],
                      uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    const uint head = group.y, first = 4 * (2 * group.x + sg);
    if (first >= a.d_v) return;
    const uint n = min(4u, a.d_v - first);
    const uint k_head = a.tiled ? head % a.n_k_head : head / (a.n_v_head / a.n_k_head);
    device const Chunk& c = chunks[group.z];
    device float* state = states + (((ulong)c.state * a.n_v_head + head) * a.d_v + first) * D_K;

    float4 s[EACH];
    for (uint j = 0; j < EACH; j++) {
        const uint i = 32 * j + lane;
        s[j] = float4(0.0f);
        if (c.pos == 0 || i >= D_K) continue;
        for (uint column = 0; column < n; column++) s[j][column] = state[column * D_K + i];
    }
    for (uint t = c.first; t < c.first + c.len; t++) {
        const ulong at = (ulong)t * a.n_v_head + head;
        device const float* keys = k + ((ulong)t * a.n_k_head + k_head) * D_K;
        device const float* query = q + ((ulong)t * a.n_k_head + k_head) * D_K;
        float key[EACH];
        float4 known = float4(0.0f), value = float4(0.0f), y = float4(0.0f);
        for (uint j = 0; j < EACH; j++) {
            key[j] = 32 * j + lane < D_K ? keys[32 * j + lane] : 0.0f;
            known += s[j] * key[j];
        }
        for (uint column = 0; column < n; column++) value[column] = v[at * a.d_v + first + column];
        const float decay = g[at];
        const float4 delta = beta[at] * (value - decay * simd_sum(known));
        for (uint j = 0; j < EACH; j++) {
            s[j] = decay * s[j] + key[j] * delta;
            y += s[j] * (32 * j + lane < D_K ? query[32 * j + lane] : 0.0f);
        }
        y = simd_sum(y);
        if (lane < n) out[at * a.d_v + first + lane] = y[lane];
    }
    for (uint j = 0; j < EACH; j++) {
        const uint i = 32 * j + lane;
        if (i >= D_K) continue;
        for (uint column = 0; column < n; column++) state[column * D_K + i] = s[j][column];
    }
}
