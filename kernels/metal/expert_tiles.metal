// expert_tiles: products of many tokens with the matrices of their experts, in tiles of up to 32 pairs of one expert
// (expert_groups.metal), see tile.h.
// Compiled for the type of the matrices: WEIGHT, PLANES; BIAS is 1 with biases; ACT as in common.h.
//
// GATED 1: out[t, s, n] = act(gate[e] * x[t] (+ bias)) * (up[e] * x[t] (+ bias)), 32 rows of both matrices in a tile
// GATED 0: out[t, s, n] = w[e] * x[t] (+ bias), or of x[t, s] with x_per_slot, 64 rows in a tile
// grid (ceil(n / rows), slots of tiles), 128 threads
#include WEIGHT_HEADER
#include "metal/tile.h"

#define PER (GATED ? 32 : 64)

struct ExpertTiles {
    uint n;
    uint k;
    uint n_used;
    uint x_per_slot;
    float alpha;
    float limit;
};

kernel void expert_tiles(PLANE_PARAMS(w, 0, 1, 2),
#if GATED
                         PLANE_PARAMS(up, 3, 4, 5),
#endif
                         device const float* x [[buffer(6)]], device const uint* order [[buffer(7)]],
                         device const uint* tiles [[buffer(8)]], device float* out [[buffer(9)]],
                         constant ExpertTiles& a [[buffer(10)]],
#if BIAS
                         device const float* bias [[buffer(11)]],
#endif
#if BIAS && GATED
                         device const float* up_bias [[buffer(12)]],
#endif
                         uint2 group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float4 staged[N_TILE_W / 4];
    threadgroup float* staged_w = (threadgroup float*)staged; // written four numbers at a time
    threadgroup float4 pieces[N_TILE_X];
    const uint n_pairs = tiles[3 * group.y + 2];
    if (n_pairs == 0) return;
    const ulong base = (ulong)tiles[3 * group.y] * a.n; // among the rows of all experts
    device const uint* pairs = order + tiles[3 * group.y + 1];
    const uint t = 32 * sg + lane, begin = PER * group.x;
#if GATED
    // Rows 0..32 of the tile are the gate's, the others the other matrix's.
    const ulong own = base + min(begin + t / 2 % 32, a.n - 1);
    Row row = ROW_OF(WEIGHT, w, own, a.k);
    if (t >= 64) row = ROW_OF(WEIGHT, up, own, a.k);
#else
    const Row row = ROW_OF(WEIGHT, w, base + min(begin + t / 2, a.n - 1), a.k);
#endif
    // Columns behind the last pair repeat it.
    const uint pair0 = pairs[min(t / 8, n_pairs - 1)], pair1 = pairs[min(t / 8 + 16, n_pairs - 1)];
    const uint per = a.x_per_slot ? 1 : a.n_used;
    tile_product<WEIGHT>(row, x + (ulong)(pair0 / per) * a.k, x + (ulong)(pair1 / per) * a.k, n_pairs, staged_w, pieces,
                         sg, lane);
    const uint i = begin + t % PER;
    if (i >= a.n) return;
    for (uint column = t / PER; column < n_pairs; column += 128 / PER) {
        float y = staged_w[column * TILE_OUT_STRIDE + t % PER];
#if BIAS
        y += bias[base + i];
#endif
#if GATED
        float u = staged_w[column * TILE_OUT_STRIDE + 32 + t % PER];
#if BIAS
        u += up_bias[base + i];
#endif
        y = gated(ACT, y, u, a.alpha, a.limit);
#endif
        out[(ulong)pairs[column] * a.n + i] = y;
    }
}
