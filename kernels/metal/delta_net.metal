// delta_net: for each head of v, position after position, S = g*S; S += k (x) beta*(v - S^T k); out = S^T q. A
// simdgroup takes 4 * FOURS columns of S of a head through a chunk, in registers: lane l has their numbers l, l + 32,
// ... Columns of S lie as rows, [n_v_head, d_v, D_K], so that a simdgroup reads them side by side. With NORM a
// threadgroup has all columns of a head, and out = rms_norm(out) * w * silu(gate). With SUM, S += k (x) beta*v; with
// SKIP, out += skip*v; with BY_ROW each row of S has its decay. The state is stored before a chunk's drafts. Compiled
// with D_K, FOURS, SIMDGROUPS of a threadgroup, NORM, SUM, SKIP and BY_ROW 0 or 1.
// grid (ceil(d_v / (4 * FOURS * SIMDGROUPS)), n_v_head, chunks), 32 * SIMDGROUPS threads
#include "metal/common.h"
#include "metal/chunk.h"

// Numbers of a column in a lane.
#define EACH ((D_K + 31) / 32)

struct DeltaNet {
    uint n_k_head;
    uint n_v_head;
    uint d_v;
    uint tiled; // heads of v that share a head of k are n_k_head apart, else side by side
    uint slot; // numbers of a slot of states
#if NORM
    float eps;
#endif
};

kernel void delta_net(device const float* q [[buffer(0)]], device const float* k [[buffer(1)]],
                      device const float* v [[buffer(2)]], device const float* g [[buffer(3)]],
                      device const float* beta [[buffer(4)]], device float* states [[buffer(5)]],
                      device float* out [[buffer(6)]], constant DeltaNet& a [[buffer(7)]],
                      device const Chunk* chunks [[buffer(8)]],
#if NORM
                      device const float* gate [[buffer(9)]], device const float* w [[buffer(10)]],
#endif
#if SKIP
                      device const float* skip [[buffer(11)]],
#endif
                      uint3 group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]]) {
    const uint head = group.y, begin = 4 * FOURS * (SIMDGROUPS * group.x + sg);
#if NORM
    threadgroup float parts[2][SIMDGROUPS]; // in turn, so that one barrier a position is enough
#else
    if (begin >= a.d_v) return;
#endif
    const uint k_head = a.tiled ? head % a.n_k_head : head / (a.n_v_head / a.n_k_head);
    device const Chunk& c = chunks[group.z];
    device float* state = states + (ulong)c.state * a.slot + (ulong)head * a.d_v * D_K;
    const uint own_end = c.first + c.len - c.n_draft;

    float4 s[FOURS][EACH];
    for (uint f = 0; f < FOURS; f++) {
        for (uint j = 0; j < EACH; j++) {
            const uint i = 32 * j + lane;
            s[f][j] = float4(0.0f);
            if (c.pos == 0 || i >= D_K) continue;
            for (uint column = 0; column < 4; column++) {
                const uint at = begin + 4 * f + column;
                if (at < a.d_v) s[f][j][column] = state[(ulong)at * D_K + i];
            }
        }
    }
    for (uint t = c.first; t < c.first + c.len; t++) {
        const ulong at = (ulong)t * a.n_v_head + head;
        device const float* keys = k + ((ulong)t * a.n_k_head + k_head) * D_K;
        device const float* query = q + ((ulong)t * a.n_k_head + k_head) * D_K;
        float key[EACH], asked[EACH];
        for (uint j = 0; j < EACH; j++) {
            key[j] = 32 * j + lane < D_K ? keys[32 * j + lane] : 0.0f;
            asked[j] = 32 * j + lane < D_K ? query[32 * j + lane] : 0.0f;
        }
        const float rate = beta[at];
#if BY_ROW
        float decays[EACH];
        for (uint j = 0; j < EACH; j++) decays[j] = 32 * j + lane < D_K ? g[at * D_K + 32 * j + lane] : 0.0f;
#define DECAY(j) decays[j]
#else
        const float decay = g[at];
#define DECAY(j) decay
#endif
        float4 found[FOURS];
        for (uint f = 0; f < FOURS; f++) {
            float4 known = float4(0.0f), value = float4(0.0f), y = float4(0.0f);
#if !SUM
            for (uint j = 0; j < EACH; j++) known += (BY_ROW ? DECAY(j) * s[f][j] : s[f][j]) * key[j];
#endif
            for (uint column = 0; column < 4; column++) {
                const uint i = begin + 4 * f + column;
                if (i < a.d_v) value[column] = v[at * a.d_v + i];
            }
#if SUM
            const float4 delta = rate * value;
#else
            const float4 delta = rate * (value - (BY_ROW ? simd_sum(known) : DECAY(0) * simd_sum(known)));
#endif
            for (uint j = 0; j < EACH; j++) {
                s[f][j] = DECAY(j) * s[f][j] + key[j] * delta;
                y += s[f][j] * asked[j];
            }
            found[f] = simd_sum(y);
#if SKIP
            found[f] += skip[head] * value;
#endif
        }
#if NORM
        float sum = 0.0f;
        for (uint f = 0; f < FOURS; f++) {
            for (uint column = 0; column < 4; column++) {
                const float y = found[f][column];
                if (begin + 4 * f + column < a.d_v) sum += y * y;
            }
        }
        threadgroup float* part = parts[t % 2];
        if (lane == 0) part[sg] = sum;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        sum = 0.0f;
        for (uint i = 0; i < SIMDGROUPS; i++) sum += part[i];
        const float r = 1.0f / precise::sqrt(sum / float(a.d_v) + a.eps);
#endif
        for (uint f = 0; f < FOURS; f++) {
            const uint i = begin + 4 * f + lane;
            if (lane >= 4 || i >= a.d_v) continue;
#if NORM
            const float z = gate[at * a.d_v + i];
            out[at * a.d_v + i] = found[f][lane] * r * w[i] * (z * sigmoid(z));
#else
            out[at * a.d_v + i] = found[f][lane];
#endif
        }
        if (t + 1 != own_end) continue;
        for (uint f = 0; f < FOURS; f++) {
            for (uint j = 0; j < EACH; j++) {
                const uint i = 32 * j + lane;
                if (i >= D_K) continue;
                for (uint column = 0; column < 4; column++) {
                    const uint own = begin + 4 * f + column;
                    if (own < a.d_v) state[(ulong)own * D_K + i] = s[f][j][column];
                }
            }
        }
    }
}
