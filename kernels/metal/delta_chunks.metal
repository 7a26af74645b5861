// delta_chunks: delta_net for prompts, TILE positions at a time on simdgroup matrices. With G[t, j] the product of the
// decays after j up to t, G[t] that of all up to t, and S the state before the tile, position t writes
//     delta[t] = r[t] - sum_{j<t} A[t, j] * delta[j],  r[t] = beta[t] * (v[t] - G[t] * S^T k[t])
//     A[t, j] = beta[t] * G[t, j] * k[j].k[t] for j < t,  P[t, j] = G[t, j] * k[j].q[t] for j <= t
//     delta = (1 + A)^-1 r,  out = G * S^T q + P * delta,  S = G[TILE - 1] * S + K^T (G[TILE - 1, t] * delta[t])
// (Yang, Kautz, Hatamizadeh: "Gated Delta Networks", arXiv 2412.06464). Decays are multiplied and never divided, so
// that they may be 0. Positions behind the chunk's end have keys of 0, no decay and no rate.
//
// A simdgroup keeps 8 * BLOCKS columns of S of a head in matrices through the chunk. All share K, A, P and the inverse,
// which the first makes while the others multiply. Where a key, a value or a gate is not finite, which products with 0
// would spread to positions before it, the tile goes position by position on the state in memory. The state lies as
// `delta_net` has it, and slots and parameters are its own. No step of it has drafts. Compiled with D_K, BLOCKS,
// SIMDGROUPS, NORM 0 or 1, with which a threadgroup has all columns of a head.
// grid (ceil(d_v / (8 * BLOCKS * SIMDGROUPS)), n_v_head, chunks), 32 * SIMDGROUPS threads
#include "metal/common.h"
#include "metal/chunk.h"
#include "metal/matrix.h"

#define TILE 16
#define K_STEPS ((D_K + 7) / 8)
#define K_STRIDE (8 * K_STEPS + 4) // of a row of keys: banks
#define A_STRIDE (TILE + 4)
#define COLUMNS (8 * BLOCKS)
#define THREADS (32 * SIMDGROUPS)

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

kernel void delta_chunks(device const float* q [[buffer(0)]], device const float* k [[buffer(1)]],
                         device const float* v [[buffer(2)]], device const float* g [[buffer(3)]],
                         device const float* beta [[buffer(4)]], device float* states [[buffer(5)]],
                         device float* out [[buffer(6)]], constant DeltaNet& a [[buffer(7)]],
                         device const Chunk* chunks [[buffer(8)]],
#if NORM
                         device const float* gate [[buffer(9)]], device const float* w [[buffer(10)]],
#endif
                         uint3 group [[threadgroup_position_in_grid]], uint sg [[simdgroup_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float keys[TILE * K_STRIDE];
    threadgroup float queries[TILE * K_STRIDE];
    threadgroup float mixed[TILE * A_STRIDE];   // A
    threadgroup float shares[TILE * A_STRIDE];  // P
    threadgroup float inverse[TILE * A_STRIDE]; // of 1 + A, its lower half
    threadgroup float decays[TILE * A_STRIDE];  // [t][j]: the product of the decays from j to t
    threadgroup float rates[TILE];
    threadgroup uint is_wild[SIMDGROUPS]; // whether a simdgroup has seen what is not finite
#if NORM
    threadgroup float squares[SIMDGROUPS * TILE];
#endif
    const uint head = group.y, begin = COLUMNS * (SIMDGROUPS * group.x + sg), t = 32 * sg + lane;
    const uint k_head = a.tiled ? head % a.n_k_head : head / (a.n_v_head / a.n_k_head);
    const uint row = row_of_lane(lane), column = column_of_lane(lane);
    device const Chunk& c = chunks[group.z];
    device float* state = states + (ulong)c.state * a.slot + (ulong)head * a.d_v * D_K;

    simdgroup_float8x8 s[K_STEPS][BLOCKS]; // [i, column]
    for (uint j = 0; j < K_STEPS; j++) {
        for (uint b = 0; b < BLOCKS; b++) {
            for (uint e = 0; e < 2; e++) {
                const uint i = 8 * j + row, at = begin + 8 * b + column + e;
                const bool is_there = c.pos != 0 && i < D_K && at < a.d_v;
                s[j][b].thread_elements()[e] = is_there ? state[(ulong)at * D_K + i] : 0.0f;
            }
        }
    }
    for (uint first = 0; first < c.len; first += TILE) {
        const uint n = min((uint)TILE, c.len - first);
        const ulong token = c.first + first;
        bool is_finite = true;
#if !NORM
        // With a norm all have read the tile before when they meet for its sums.
        threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
        for (uint i = t; i < TILE * 8 * K_STEPS; i += THREADS) {
            const uint r = i / (8 * K_STEPS), d = i % (8 * K_STEPS);
            const ulong at = ((token + r) * a.n_k_head + k_head) * D_K + d;
            const bool is_there = r < n && d < D_K;
            const float key = is_there ? k[at] : 0.0f;
            keys[r * K_STRIDE + d] = key;
            queries[r * K_STRIDE + d] = is_there ? q[at] : 0.0f;
            is_finite = is_finite && isfinite(key);
        }
        for (uint r = lane / COLUMNS; r < n; r += 32 / COLUMNS) {
            const uint at = begin + lane % COLUMNS;
            if (at < a.d_v) is_finite = is_finite && isfinite(v[((token + r) * a.n_v_head + head) * a.d_v + at]);
        }
        if (t < TILE) {
            const float rate = t < n ? beta[(token + t) * a.n_v_head + head] : 0.0f;
            rates[t] = rate;
            float decay = 1.0f;
            for (uint r = t; r < TILE; r++) {
                if (r < n) decay *= g[(token + r) * a.n_v_head + head];
                decays[r * A_STRIDE + t] = decay;
            }
            is_finite = is_finite && isfinite(rate) && isfinite(decay);
        }
        const bool is_tame = simd_all(is_finite);
        if (lane == 0) is_wild[sg] = is_tame ? 0 : 1;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint wild = 0;
        for (uint i = 0; i < SIMDGROUPS; i++) wild |= is_wild[i];

        simdgroup_float8x8 y[TILE / 8][BLOCKS]; // [t, column]
        for (uint i = 0; i < TILE / 8; i++) {
            for (uint b = 0; b < BLOCKS; b++) y[i][b] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        }
        if (wild != 0) {
            // The same for all simdgroups of this threadgroup, but their states are each its own.
            for (uint j = 0; j < K_STEPS; j++) {
                for (uint b = 0; b < BLOCKS; b++) {
                    for (uint e = 0; e < 2; e++) {
                        const uint i = 8 * j + row, at = begin + 8 * b + column + e;
                        if (i < D_K && at < a.d_v) state[(ulong)at * D_K + i] = s[j][b].thread_elements()[e];
                    }
                }
            }
            simdgroup_barrier(mem_flags::mem_device);
            for (uint r = 0; r < n; r++) {
                const float decay = decays[r * A_STRIDE + r], rate = rates[r];
                for (uint b = 0; b < COLUMNS && begin + b < a.d_v; b++) {
                    device float* own = state + (ulong)(begin + b) * D_K;
                    float known = 0.0f, found = 0.0f;
                    for (uint i = lane; i < D_K; i += 32) known += own[i] * keys[r * K_STRIDE + i];
                    const float value = v[((token + r) * a.n_v_head + head) * a.d_v + begin + b];
                    const float delta = rate * (value - decay * simd_sum(known));
                    for (uint i = lane; i < D_K; i += 32) {
                        const float x = decay * own[i] + keys[r * K_STRIDE + i] * delta;
                        own[i] = x;
                        found += x * queries[r * K_STRIDE + i];
                    }
                    found = simd_sum(found);
                    for (uint i = 0; i < TILE / 8; i++) {
                        for (uint e = 0; e < 2 * BLOCKS; e++) {
                            const bool is_mine = 8 * i + row == r && 8 * (e / 2) + column + e % 2 == b;
                            if (is_mine) y[i][e / 2].thread_elements()[e % 2] = found;
                        }
                    }
                }
            }
            simdgroup_barrier(mem_flags::mem_device);
            for (uint j = 0; j < K_STEPS; j++) {
                for (uint b = 0; b < BLOCKS; b++) {
                    for (uint e = 0; e < 2; e++) {
                        const uint i = 8 * j + row, at = begin + 8 * b + column + e;
                        if (i < D_K && at < a.d_v) s[j][b].thread_elements()[e] = state[(ulong)at * D_K + i];
                    }
                }
            }
        } else {
            // The three lower blocks of A and those of P, one after the other to each simdgroup.
            for (uint block = sg; block < 6; block += SIMDGROUPS) {
                const uint lower = block % 3, i = lower == 0 ? 0 : 1, j = lower == 2 ? 1 : 0;
                threadgroup const float* left = (block < 3 ? keys : queries) + 8 * i * K_STRIDE;
                simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f), x, z;
                for (uint d = 0; d < 8 * K_STEPS; d += 8) {
                    simdgroup_load(x, left + d, K_STRIDE);
                    simdgroup_load(z, keys + 8 * j * K_STRIDE + d, K_STRIDE, ulong2(0), true);
                    simdgroup_multiply_accumulate(sum, x, z, sum);
                }
                const uint r = 8 * i + row;
                for (uint e = 0; e < 2; e++) {
                    const uint from = 8 * j + column + e;
                    const float between = from < r ? decays[r * A_STRIDE + from + 1] : 1.0f;
                    const bool is_in = block < 3 ? from < r : from <= r;
                    const float by = block < 3 ? rates[r] * between : between;
                    sum.thread_elements()[e] = is_in ? by * sum.thread_elements()[e] : 0.0f;
                }
                simdgroup_store(sum, (block < 3 ? mixed : shares) + 8 * i * A_STRIDE + 8 * j, A_STRIDE);
            }
            simdgroup_float8x8 r[TILE / 8][BLOCKS], x;
            for (uint i = 0; i < TILE / 8; i++) {
                for (uint b = 0; b < BLOCKS; b++) r[i][b] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
                for (uint j = 0; j < K_STEPS; j++) {
                    simdgroup_load(x, keys + 8 * i * K_STRIDE + 8 * j, K_STRIDE);
                    for (uint b = 0; b < BLOCKS; b++) simdgroup_multiply_accumulate(r[i][b], x, s[j][b], r[i][b]);
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (sg == 0 && lane < TILE) {
                for (uint i = 0; i < TILE; i++) {
                    float sum = i == lane ? 1.0f : 0.0f;
                    for (uint j = 0; j < i; j++) sum -= mixed[i * A_STRIDE + j] * inverse[j * A_STRIDE + lane];
                    inverse[i * A_STRIDE + lane] = sum;
                }
            }
            for (uint i = 0; i < TILE / 8; i++) {
                for (uint j = 0; j < K_STEPS; j++) {
                    simdgroup_load(x, queries + 8 * i * K_STRIDE + 8 * j, K_STRIDE);
                    for (uint b = 0; b < BLOCKS; b++) simdgroup_multiply_accumulate(y[i][b], x, s[j][b], y[i][b]);
                }
            }
            for (uint i = 0; i < TILE / 8; i++) {
                const uint at = 8 * i + row;
                const float decay = decays[at * A_STRIDE], rate = rates[at];
                for (uint e = 0; e < 2 * BLOCKS; e++) {
                    const uint own = begin + 8 * (e / 2) + column + e % 2;
                    const bool is_there = at < n && own < a.d_v;
                    const float value = is_there ? v[((token + at) * a.n_v_head + head) * a.d_v + own] : 0.0f;
                    const float known = r[i][e / 2].thread_elements()[e % 2];
                    r[i][e / 2].thread_elements()[e % 2] = rate * (value - decay * known);
                    y[i][e / 2].thread_elements()[e % 2] *= decay;
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            simdgroup_float8x8 delta[TILE / 8][BLOCKS];
            for (uint i = 0; i < TILE / 8; i++) {
                for (uint b = 0; b < BLOCKS; b++) delta[i][b] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
                for (uint j = 0; j <= i; j++) {
                    simdgroup_load(x, inverse + 8 * i * A_STRIDE + 8 * j, A_STRIDE);
                    for (uint b = 0; b < BLOCKS; b++) {
                        simdgroup_multiply_accumulate(delta[i][b], x, r[j][b], delta[i][b]);
                    }
                }
            }
            for (uint i = 0; i < TILE / 8; i++) {
                for (uint j = 0; j <= i; j++) {
                    simdgroup_load(x, shares + 8 * i * A_STRIDE + 8 * j, A_STRIDE);
                    for (uint b = 0; b < BLOCKS; b++) simdgroup_multiply_accumulate(y[i][b], x, delta[j][b], y[i][b]);
                }
            }
            const float all = decays[(TILE - 1) * A_STRIDE];
            for (uint i = 0; i < TILE / 8; i++) {
                const uint at = 8 * i + row;
                const float left = at + 1 < TILE ? decays[(TILE - 1) * A_STRIDE + at + 1] : 1.0f;
                for (uint b = 0; b < BLOCKS; b++) delta[i][b].thread_elements() *= left;
            }
            for (uint j = 0; j < K_STEPS; j++) {
                for (uint b = 0; b < BLOCKS; b++) s[j][b].thread_elements() *= all;
                for (uint i = 0; i < TILE / 8; i++) {
                    simdgroup_load(x, keys + 8 * i * K_STRIDE + 8 * j, K_STRIDE, ulong2(0), true);
                    for (uint b = 0; b < BLOCKS; b++) simdgroup_multiply_accumulate(s[j][b], x, delta[i][b], s[j][b]);
                }
            }
        }
#if NORM
        for (uint i = 0; i < TILE / 8; i++) {
            float sum = 0.0f;
            for (uint b = 0; b < BLOCKS; b++) {
                const float2 x = y[i][b].thread_elements();
                sum += x.x * x.x + x.y * x.y;
            }
            // Of the four lanes that have a row.
            sum += simd_shuffle_xor(sum, ushort(1));
            sum += simd_shuffle_xor(sum, ushort(8));
            if ((lane & 9) == 0) squares[sg * TILE + 8 * i + row] = sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
        for (uint i = 0; i < TILE / 8; i++) {
            const uint at = 8 * i + row;
#if NORM
            float sum = 0.0f;
            for (uint j = 0; j < SIMDGROUPS; j++) sum += squares[j * TILE + at];
            const float by = 1.0f / precise::sqrt(sum / float(a.d_v) + a.eps);
#endif
            for (uint e = 0; e < 2 * BLOCKS; e++) {
                const uint own = begin + 8 * (e / 2) + column + e % 2;
                if (at >= n || own >= a.d_v) continue;
                const ulong to = ((token + at) * a.n_v_head + head) * a.d_v + own;
                const float x = y[i][e / 2].thread_elements()[e % 2];
#if NORM
                const float z = gate[to];
                out[to] = x * by * w[own] * (z * sigmoid(z));
#else
                out[to] = x;
#endif
            }
        }
    }
    for (uint j = 0; j < K_STEPS; j++) {
        for (uint b = 0; b < BLOCKS; b++) {
            for (uint e = 0; e < 2; e++) {
                const uint i = 8 * j + row, at = begin + 8 * b + column + e;
                if (i < D_K && at < a.d_v) state[(ulong)at * D_K + i] = s[j][b].thread_elements()[e];
            }
        }
    }
}
