// delta_replay: moves states past accepted drafts, as delta_net would: S = g*S; S += k (x) beta*(v - S^T k) for each
// row k, v, g, beta that a slot keeps after its states (`keep_drafts`). A simdgroup takes four columns of S of a head,
// in registers. With SUM, S += k (x) beta*v; with BY_ROW each row of S has its decay. Compiled with D_K, SUM and
// BY_ROW.
// grid (ceil(d_v / 8), n_v_head, chunks), 64 threads
#include "metal/common.h"
#include "metal/chunk.h"

// Numbers of a column in a lane.
#define EACH ((D_K + 31) / 32)

struct DeltaReplay {
    uint n_k_head;
    uint n_v_head;
    uint d_v;
    uint tiled; // heads of v that share a head of k are n_k_head apart, else side by side
    uint slot; // numbers of a slot of states
};

kernel void delta_replay(device float* states [[buffer(0)]], constant DeltaReplay& a [[buffer(1)]],
                         device const Chunk* chunks [[buffer(2)]], uint3 group [[threadgroup_position_in_grid]],
                         uint sg [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    device const Chunk& c = chunks[group.z];
    const uint head = group.y, begin = 4 * (2 * group.x + sg);
    if (begin >= a.d_v || c.n_replay == 0) return;
    const uint k_head = a.tiled ? head % a.n_k_head : head / (a.n_v_head / a.n_k_head);
    const uint n_k = a.n_k_head * D_K, n_v = a.n_v_head * a.d_v, n_g = BY_ROW ? a.n_v_head * D_K : a.n_v_head;
    device float* slot = states + (ulong)c.state * a.slot;
    device float* state = slot + (ulong)head * a.d_v * D_K;
    float4 s[EACH];
    for (uint j = 0; j < EACH; j++) {
        const uint i = 32 * j + lane;
        s[j] = float4(0.0f);
        for (uint column = 0; column < 4 && i < D_K; column++) {
            if (begin + column < a.d_v) s[j][column] = state[(ulong)(begin + column) * D_K + i];
        }
    }
    for (uint t = 0; t < c.n_replay; t++) {
        device const float* k = slot + (ulong)n_v * D_K + (ulong)t * (n_k + n_v + n_g + a.n_v_head);
        device const float *v = k + n_k, *g = v + n_v, *beta = g + n_g;
        float4 value = float4(0.0f), known = float4(0.0f);
        for (uint column = 0; column < 4; column++) {
            if (begin + column < a.d_v) value[column] = v[head * a.d_v + begin + column];
        }
        float key[EACH], decays[EACH];
        for (uint j = 0; j < EACH; j++) {
            const uint i = 32 * j + lane;
            key[j] = i < D_K ? k[k_head * D_K + i] : 0.0f;
            decays[j] = !BY_ROW ? g[head] : i < D_K ? g[head * D_K + i] : 0.0f;
            if (!SUM) known += (BY_ROW ? decays[j] * s[j] : s[j]) * key[j];
        }
        float4 taken = float4(0.0f);
        if (!SUM) taken = BY_ROW ? simd_sum(known) : decays[0] * simd_sum(known);
        const float4 delta = beta[head] * (value - taken);
        for (uint j = 0; j < EACH; j++) s[j] = decays[j] * s[j] + key[j] * delta;
    }
    for (uint j = 0; j < EACH; j++) {
        const uint i = 32 * j + lane;
        for (uint column = 0; column < 4 && i < D_K; column++) {
            if (begin + column < a.d_v) state[(ulong)(begin + column) * D_K + i] = s[j][column];
        }
    }
}
