// delta_chunks: delta_net for prompts, TILE positions at a time on tensor cores. With G[t, j] the product of the decays
// after j up to t, G[t] that of all of the tile up to t, and S the state before the tile, position t writes
//     delta[t] = r[t] - sum_{j<t} A[t, j] * delta[j],  r[t] = beta[t] * (v[t] - G[t] * S^T k[t])
//     A[t, j] = beta[t] * G[t, j] * k[j].k[t] for j < t,  P[t, j] = G[t, j] * k[j].q[t] for j <= t
//     delta = (1 + A)^-1 r,  out = G * S^T q + P * delta,  S = G[TILE - 1] * S + K^T (G[TILE - 1, t] * delta[t])
// (Yang, Kautz, Hatamizadeh: "Gated Delta Networks", arXiv 2412.06464). Decays are multiplied and never divided, so
// that they may be 0. Compiled for -DD_K, 64 or 128; d_v is a multiple of 4.
//
// Every operand is two numbers of f16 whose sum it is, the product of the smaller ones is left out, and sums are f32:
// products of 22 bits. Rows of operands are scaled by powers of two to numbers below 2^15, so that f16 holds them.
//
// `delta_tiles` finds A's inverse, P, the products of decays and the parts of keys and queries, all tiles side by side.
// `delta_chunks` goes from tile to tile with S^T in registers: four warps share 16 columns of S, a quarter of its rows
// each. Each finds r, delta and out for 8 positions, and they tell each other what they found. A key, value or gate
// that is not finite makes NaN of its columns from its position on.
#include "cuda/common.h"
#include "cuda/args.h"
#include "cuda/async.h"
#include "cuda/mma.h"
#include "quant/unit.h"

#define TILE 32
// Pieces of 16 bytes of a row of keys, and of a row of A or P.
#define PIECES (D_K / 8)
#define SHARE_PIECES (TILE / 8)
// Numbers of a position and head of v: products of decays and of the inverses of rows' scales, by the sums that they
// scale; the rate; the product of all decays; positions before the first that is not finite.
enum { KNOWN, RATE, LEFT, FOUND, SHARE, ALL, TAME, INVERSE, GATES };

// Two parts of two numbers each.
__device__ __forceinline__ void split_pair(float x, float y, u32& first, u32& rest) {
    first = f16_pair(x, y);
    rest = f16_pair(x - float_of_f16(first & 0xffffu), y - float_of_f16(first >> 16));
}

// The power of two that brings numbers of at most `most` below 2^15, and its inverse.
__device__ __forceinline__ float scale_of(float most) {
    return __uint_as_float((268 - max(__float_as_uint(most) >> 23, 15u)) << 23);
}
__device__ __forceinline__ float inverse_of(float most) {
    return __uint_as_float((max(__float_as_uint(most) >> 23, 15u) - 14) << 23);
}

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < INF; }

// Numbers of shared memory where rows of 8 pieces and more, or of 4, meet no bank twice.
__device__ __forceinline__ u32 key_at(u32 row, u32 piece) { return (row * PIECES + (piece ^ row % 8)) * 8; }
__device__ __forceinline__ u32 share_at(u32 row, u32 piece) {
    return (row * SHARE_PIECES + (piece ^ row / 2 % SHARE_PIECES)) * 8;
}

// c += a * b, both in two parts; b: first and rest of b0, b1.
__device__ __forceinline__ void mma_split(float (&c)[4], const u32 (&a)[4], const u32 (&rest)[4], const u32 (&b)[4]) {
    mma_f16(c, a[0], a[1], a[2], a[3], b[0], b[1]);
    mma_f16(c, a[0], a[1], a[2], a[3], b[2], b[3]);
    mma_f16(c, rest[0], rest[1], rest[2], rest[3], b[0], b[1]);
}

// Sixteen columns of a as an operand of two parts, scaled row by row: x and y hold columns 0 to 7 and 8 to 15.
__device__ __forceinline__ void operand(u32 (&a)[4], u32 (&rest)[4], const float (&x)[4], const float (&y)[4],
                                        const float (&scale)[2]) {
    split_pair(x[0] * scale[0], x[1] * scale[0], a[0], rest[0]);
    split_pair(x[2] * scale[1], x[3] * scale[1], a[1], rest[1]);
    split_pair(y[0] * scale[0], y[1] * scale[0], a[2], rest[2]);
    split_pair(y[2] * scale[1], y[3] * scale[1], a[3], rest[3]);
}

// Maximum of four neighbours.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_MASK, x, 2));
}

// grid (tiles of the longest chunk, n_k_head, chunks), block 128
KERNEL __launch_bounds__(128, 4) delta_tiles(const __grid_constant__ DeltaChunks a) {
    __shared__ __align__(16) u16 planes[4][TILE * D_K]; // k and q, two parts each
    __shared__ __align__(16) float products[2][TILE][TILE + 1]; // of keys with keys, of queries with keys
    __shared__ float inverses[2][TILE];                         // of the rows' scales
    __shared__ u32 n_tame;                                      // positions before the first key that is not finite
    PDL_LAUNCH();
    PDL_WAIT();
    const Chunk c = a.op.step.chunks[blockIdx.z];
    const u32 first = blockIdx.x * TILE, k_head = blockIdx.y, n_k = a.op.n_k_head, n_v = a.op.n_v_head;
    if (first >= c.len || c.n_draft > 0) return;
    const u32 n = min((u32)TILE, c.len - first), token = c.first + first;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // A warp takes rows of k, then of q, AHEAD at a time; lanes have pairs of numbers.
    constexpr int AHEAD = 8;
    if (threadIdx.x == 0) n_tame = TILE;
    __syncthreads();
#pragma unroll
    for (u32 is_q = 0; is_q < 2; is_q++) {
        float2 x[AHEAD][D_K / 64];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const u32 row = 4 * i + warp;
            const float* from = (is_q ? a.op.q : a.op.k) + ((u64)(token + row) * n_k + k_head) * D_K + 2 * lane;
#pragma unroll
            for (int j = 0; j < D_K / 64; j++) x[i][j] = row < n ? *(const float2*)(from + 64 * j) : float2{0.0f, 0.0f};
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const u32 row = 4 * i + warp;
            float most = 0.0f;
#pragma unroll
            for (int j = 0; j < D_K / 64; j++) most = max_or_nan(most, max_or_nan(fabsf(x[i][j].x), fabsf(x[i][j].y)));
            most = __uint_as_float(__reduce_max_sync(FULL_MASK, __float_as_uint(most)));
            const bool is_wild = !is_finite(most);
            if (is_wild && !is_q && lane == 0) atomicMin(&n_tame, row);
            if (lane == 0) inverses[is_q][row] = inverse_of(most);
            const float scale = scale_of(most);
#pragma unroll
            for (int j = 0; j < D_K / 64; j++) {
                u32 part, rest;
                split_pair(x[i][j].x * scale, x[i][j].y * scale, part, rest);
                if (is_wild && !is_q) part = rest = 0;
                const u32 d = 64 * j + 2 * lane, at = key_at(row, d / 8) + d % 8;
                *(u32*)&planes[2 * is_q][at] = part;
                *(u32*)&planes[2 * is_q + 1][at] = rest;
            }
        }
    }
    __syncthreads();
    const u64 tile = c.first / TILE + blockIdx.z + blockIdx.x; // no two chunks share one
    uint4* keys = (uint4*)(a.keys + (tile * n_k + k_head) * 4 * TILE * D_K);
#pragma unroll 4
    for (u32 i = threadIdx.x; i < 4 * TILE * PIECES; i += 128) keys[i] = ((const uint4*)planes)[i];
    {
        // Warps 0 and 1 have rows of k, the others of q, sixteen each.
        const u32 is_q = warp / 2, row = 16 * (warp % 2), g = lane / 4, t = lane % 4;
        float sums[TILE / 8][4] = {};
        for (u32 d = 0; d < PIECES; d += 2) {
            u32 x[4], rest[4];
            const u32 at = key_at(row + lane % 16, d + lane / 16);
            load_matrices(x, &planes[2 * is_q][at]);
            load_matrices(rest, &planes[2 * is_q + 1][at]);
#pragma unroll
            for (int j = 0; j < TILE / 8; j++) {
                u32 b[4];
                load_matrices(b, &planes[lane / 16][key_at(8 * j + lane % 8, d + lane / 8 % 2)]);
                mma_split(sums[j], x, rest, b);
            }
        }
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const u32 r = row + g + e / 2 * 8, from = 8 * j + 2 * t + e % 2;
                products[is_q][r][from] = sums[j][e] * inverses[is_q][r] * inverses[0][from];
            }
        }
    }
    __syncthreads();
    // For each head of v one warp has A and its inverse, another P and the gates; a lane has a column.
    float(*mixed)[TILE] = (float(*)[TILE])planes[warp];
    for (u32 i = warp; i < 2 * (n_v / n_k); i += 4) {
        const u32 of_k = i / 2, head = a.op.tiled ? k_head + of_k * n_k : k_head * (n_v / n_k) + of_k;
        const u64 gate = (u64)(token + lane) * n_v + head;
        float g = lane < n ? a.op.g[gate] : 1.0f, beta = lane < n ? a.op.beta[gate] : 0.0f;
        const u32 wild = __ballot_sync(FULL_MASK, !is_finite(g) || !is_finite(beta));
        const u32 tame = min(n_tame, wild ? (u32)__ffs(wild) - 1 : (u32)TILE);
        if (lane >= tame) g = 1.0f, beta = 0.0f;
        const bool is_share = i % 2;
        u16* rows = a.shares + ((tile * n_v + head) * 4 + 2 * is_share) * TILE * TILE + lane % 8;
        float* gates = a.gates + (tile * n_v + head) * GATES * TILE + lane;
        // A row in two parts, scaled to its largest number; the inverse of the scale.
        const auto put = [&](u32 t, float x) {
            const float most = __uint_as_float(__reduce_max_sync(FULL_MASK, __float_as_uint(fabsf(x))));
            u32 part, rest;
            split_pair(x * scale_of(most), 0.0f, part, rest);
            u16* to = rows + share_at(t, lane / 8);
            to[0] = (u16)part, to[TILE * TILE] = (u16)rest;
            return inverse_of(most);
        };
        float decay = 1.0f, own = 1.0f;
        if (is_share) {
            float up_to = g, left = 1.0f;
#pragma unroll 8
            for (int t = 0; t < TILE; t++) {
                const float now = __shfl_sync(FULL_MASK, g, t);
                if (t > lane) decay *= now;
                const float inverse = put(t, lane <= t ? decay * products[1][t][lane] : 0.0f);
                if (lane == t) own = inverse;
            }
            left = decay;
#pragma unroll
            for (int step = 1; step < TILE; step *= 2) {
                const float before = __shfl_up_sync(FULL_MASK, up_to, step);
                if (lane >= step) up_to *= before;
            }
            gates[KNOWN * TILE] = up_to * inverses[0][lane];
            gates[RATE * TILE] = beta;
            gates[LEFT * TILE] = left * inverses[0][lane];
            gates[FOUND * TILE] = up_to * inverses[1][lane];
            gates[SHARE * TILE] = own;
            gates[ALL * TILE] = __shfl_sync(FULL_MASK, up_to, TILE - 1);
            gates[TAME * TILE] = (float)tame;
        } else {
#pragma unroll 4
            for (int t = 0; t < TILE; t++) {
                const float now = __shfl_sync(FULL_MASK, g, t), rate = __shfl_sync(FULL_MASK, beta, t);
                if (t > lane) decay *= now;
                mixed[t][lane] = lane < t ? rate * decay * products[0][t][lane] : 0.0f;
            }
            __syncwarp();
            float column[TILE];
#pragma unroll
            for (int t = 0; t < TILE; t++) {
                float4 sum = {t == lane ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int j = 0; j < t; j += 4) {
                    const float4 x = *(const float4*)&mixed[t][j];
                    sum.x -= x.x * column[j];
                    if (j + 1 < t) sum.y -= x.y * column[j + 1];
                    if (j + 2 < t) sum.z -= x.z * column[j + 2];
                    if (j + 3 < t) sum.w -= x.w * column[j + 3];
                }
                column[t] = (sum.x + sum.y) + (sum.z + sum.w);
            }
            __syncwarp();
#pragma unroll
            for (int t = 0; t < TILE; t++) mixed[t][lane] = column[t];
#pragma unroll 8
            for (int t = 0; t < TILE; t++) {
                const float inverse = put(t, mixed[t][lane]);
                if (lane == t) own = inverse;
            }
            gates[INVERSE * TILE] = own;
            __syncwarp();
        }
    }
}

// Parts of 16 columns that a block has, with SPLIT warps each: a warp has 8 positions and D_K / SPLIT rows of S.
#define SPLIT (TILE / 8)
#ifndef PARTS
#define PARTS 2
#endif
#ifndef STAGES
#define STAGES 2
#endif
#define COLUMNS (16 * PARTS)
#define V_STRIDE (COLUMNS + 4) // banks
#define THREADS (32 * SPLIT * PARTS)
#define N_ROWS (D_K / SPLIT) // of S

struct Stage {
    u16 planes[4][TILE * D_K];
    u16 shares[4][TILE * TILE];
    float v[TILE][V_STRIDE];
    float gates[GATES][TILE];
};

// What the warps of a part tell each other: S^T as operands, r and delta, maxima of their rows of S.
struct Exchange {
    uint4 state[D_K / 16][2][32];
    float4 r[SPLIT][32], delta[SPLIT][32];
    float tops[16][SPLIT];
};

// Waits for the warps of a part.
__device__ __forceinline__ void sync_part(u32 part) {
#if defined(__CUDA_ARCH__)
    asm volatile("bar.sync %0, %1;" ::"r"(1 + part), "n"(32 * SPLIT) : "memory");
#else
    __syncthreads();
#endif
}

// Sums of products in two parts, in three chains side by side.
struct Sums {
    float c[3][4];
    __device__ __forceinline__ Sums() : c{} {}
    __device__ __forceinline__ void add(const u32 (&a)[4], const u32 (&rest)[4], const u32 (&b)[4]) {
        mma_f16(c[0], a[0], a[1], a[2], a[3], b[0], b[1]);
        mma_f16(c[1], a[0], a[1], a[2], a[3], b[2], b[3]);
        mma_f16(c[2], rest[0], rest[1], rest[2], rest[3], b[0], b[1]);
    }
    __device__ __forceinline__ float operator[](int e) const { return c[0][e] + (c[1][e] + c[2][e]); }
};

__device__ __forceinline__ void to_array(u32 (&x)[4], const uint4& y) {
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}

// Of two rows with these largest numbers.
struct Scales {
    float scale[2], inverse[2];
    __device__ __forceinline__ Scales(const float (&most)[2]) {
#pragma unroll
        for (int e = 0; e < 2; e++) scale[e] = scale_of(most[e]), inverse[e] = inverse_of(most[e]);
    }
};
// The largest numbers of the two rows that four lanes share.
template <int N>
__device__ __forceinline__ void maxima(float (&most)[2], const float (&x)[N][4]) {
    most[0] = most[1] = 0.0f;
#pragma unroll
    for (int j = 0; j < N; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) most[e / 2] = fmaxf(most[e / 2], fabsf(x[j][e]));
    }
    most[0] = quad_max(most[0]), most[1] = quad_max(most[1]);
}

// grid (d_v / COLUMNS, n_v_head, chunks), block THREADS, STAGES * sizeof(Stage) and PARTS * sizeof(Exchange) in shared
// memory
extern __shared__ uint4 shared[];
KERNEL __launch_bounds__(THREADS, 1) delta_chunks(const __grid_constant__ DeltaChunks a) {
    Stage* staged = (Stage*)shared;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = warp % SPLIT, own = warp / SPLIT;
    Exchange& exchange = ((Exchange*)(staged + STAGES))[own];
    PDL_LAUNCH();
    PDL_WAIT();
    const Chunk c = a.op.step.chunks[blockIdx.z];
    if (c.n_draft > 0) return; // delta_net has it
    const u32 head = blockIdx.y, d_v = a.op.d_v, n_k = a.op.n_k_head, n_v = a.op.n_v_head;
    const u32 k_head = a.op.tiled ? head % n_k : head / (n_v / n_k);
    const u32 g = lane / 4, t = lane % 4;
    const u32 begin = blockIdx.x * COLUMNS;

    const auto fetch = [&](u32 first, Stage& to) {
        const u32 n = first < c.len ? min((u32)TILE, c.len - first) : 0;
        const u64 token = c.first + first;
        if (n > 0) {
            const u64 tile = c.first / TILE + blockIdx.z + first / TILE;
            const uint4* keys = (const uint4*)(a.keys + (tile * n_k + k_head) * 4 * TILE * D_K) + threadIdx.x;
            const uint4* shares = (const uint4*)(a.shares + (tile * n_v + head) * 4 * TILE * TILE) + threadIdx.x;
            const uint4* gates = (const uint4*)(a.gates + (tile * n_v + head) * GATES * TILE) + threadIdx.x;
#pragma unroll
            for (int i = 0; i < 4 * TILE * PIECES; i += THREADS) {
                copy_async((uint4*)to.planes + threadIdx.x + i, keys + i);
            }
#pragma unroll
            for (int i = 0; i < 4 * TILE * SHARE_PIECES; i += THREADS) {
                copy_async((uint4*)to.shares + threadIdx.x + i, shares + i);
            }
            if (threadIdx.x < GATES * TILE / 4) copy_async((uint4*)to.gates + threadIdx.x, gates);
        }
        for (u32 i = threadIdx.x; n > 0 && i < TILE * (COLUMNS / 4); i += THREADS) {
            const u32 row = i / (COLUMNS / 4), at = i % (COLUMNS / 4) * 4;
            const bool is_there = row < n && begin + at < d_v;
            const u64 from = ((token + (is_there ? row : 0)) * n_v + head) * d_v + (is_there ? begin + at : 0);
            copy_async_if(&to.v[row][at], a.op.v + from, is_there);
        }
        copy_async_commit();
    };
#pragma unroll
    for (int i = 0; i + 1 < STAGES; i++) fetch(i * TILE, staged[i]);

    // S^T: s[j] has rows 8 j to 8 j + 7 of this warp's, of columns g and g + 8.
    float* state = a.op.state + c.state * a.op.state_len + (u64)head * D_K * d_v;
    const u32 column = begin + 16 * own + g;
    const auto at = [&](int j, int e) {
        return (u64)(part * N_ROWS + 8 * j + 2 * t + e % 2) * d_v + column + e / 2 * 8;
    };
    float s[N_ROWS / 8][4];
#pragma unroll
    for (int j = 0; j < N_ROWS / 8; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) s[j][e] = c.pos != 0 && column + e / 2 * 8 < d_v ? state[at(j, e)] : 0.0f;
    }

    float most[2];
    maxima(most, s);
    if (t == 0) exchange.tops[g][part] = most[0], exchange.tops[g + 8][part] = most[1];

    u32 turn = 0;
    for (u32 first = 0; first < c.len; first += TILE) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        const Stage& now = staged[turn];
        fetch(first + (STAGES - 1) * TILE, staged[turn == 0 ? STAGES - 1 : turn - 1]);
        turn = turn + 1 == STAGES ? 0 : turn + 1;
        const u32 n = min((u32)TILE, c.len - first), row = 8 * part + 2 * t;

        // S^T as an operand, all of it.
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float4 x = *(const float4*)exchange.tops[g + 8 * e];
            most[e] = fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w));
        }
        const Scales of_state(most);
#pragma unroll
        for (int d = 0; d < N_ROWS / 16; d++) {
            u32 x[4], rest[4];
            operand(x, rest, s[2 * d], s[2 * d + 1], of_state.scale);
            exchange.state[part * (N_ROWS / 16) + d][0][lane] = {x[0], x[1], x[2], x[3]};
            exchange.state[part * (N_ROWS / 16) + d][1][lane] = {rest[0], rest[1], rest[2], rest[3]};
        }
        sync_part(own);
        u32 x[D_K / 16][4], rest[D_K / 16][4];
        Sums known, found;
        const auto multiply = [&](Sums& to, int plane, int from, int end) {
#pragma unroll
            for (int d = from; d < end; d++) {
                u32 b[4];
                load_matrices(b, &now.planes[plane + lane / 16][key_at(8 * part + lane % 8, 2 * d + lane / 8 % 2)]);
                to.add(x[d], rest[d], b);
            }
        };
#pragma unroll
        for (int d = 0; d < D_K / 16; d++) {
            to_array(x[d], exchange.state[d][0][lane]), to_array(rest[d], exchange.state[d][1][lane]);
        }
        multiply(known, 0, 0, D_K / 16);

        // r, of this warp's positions; then of all.
        {
            const float2 by = *(const float2*)&now.gates[KNOWN][row], rate = *(const float2*)&now.gates[RATE][row];
            float own_r[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float v = now.v[row + e % 2][16 * own + g + e / 2 * 8];
                own_r[e] = (e % 2 ? rate.y : rate.x) * (v - (e % 2 ? by.y : by.x) * of_state.inverse[e / 2] * known[e]);
            }
            exchange.r[part][lane] = {own_r[0], own_r[1], own_r[2], own_r[3]};
        }
        multiply(found, 2, 0, D_K / 32);
        sync_part(own);
        float r[SPLIT][4];
        const u32 tame = (u32)now.gates[TAME][0];
        u32 wild[2] = {tame, tame};
        most[0] = most[1] = 0.0f;
#pragma unroll
        for (int j = 0; j < SPLIT; j++) {
            const float4 y = exchange.r[j][lane];
            r[j][0] = y.x, r[j][1] = y.y, r[j][2] = y.z, r[j][3] = y.w;
#pragma unroll
            for (int e = 0; e < 4; e++) most[e / 2] = max_or_nan(most[e / 2], fabsf(r[j][e]));
        }
        if (__any_sync(FULL_MASK, !is_finite(most[0]) || !is_finite(most[1]))) {
            most[0] = most[1] = 0.0f;
#pragma unroll
            for (int j = 0; j < SPLIT; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if (!is_finite(r[j][e])) r[j][e] = 0.0f, wild[e / 2] = min(wild[e / 2], 8 * j + 2 * t + e % 2);
                    most[e / 2] = fmaxf(most[e / 2], fabsf(r[j][e]));
                }
            }
        }
        const bool is_wild = __any_sync(FULL_MASK, wild[0] < TILE || wild[1] < TILE);
        if (is_wild) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                wild[e] = min(wild[e], __shfl_xor_sync(FULL_MASK, wild[e], 1));
                wild[e] = min(wild[e], __shfl_xor_sync(FULL_MASK, wild[e], 2));
            }
        }
        most[0] = quad_max(most[0]), most[1] = quad_max(most[1]);

        // delta = inverse * r, of this warp's positions; then of all. Blocks above the diagonal are 0.
        {
            const Scales of_r(most);
            Sums sums;
#pragma unroll
            for (int k = 0; k < TILE / 16; k++) {
                u32 b[4], y[4], y_rest[4];
                if (part < 2 * k) continue;
                operand(y, y_rest, r[2 * k], r[2 * k + 1], of_r.scale);
                load_matrices(b, &now.shares[lane / 16][share_at(8 * part + lane % 8, 2 * k + lane / 8 % 2)]);
                sums.add(y, y_rest, b);
            }
            const float2 by = *(const float2*)&now.gates[INVERSE][row];
            exchange.delta[part][lane] = {by.x * of_r.inverse[0] * sums[0], by.y * of_r.inverse[0] * sums[1],
                                          by.x * of_r.inverse[1] * sums[2], by.y * of_r.inverse[1] * sums[3]};
        }
        multiply(found, 2, D_K / 32, D_K / 16);
        sync_part(own);
        float delta[SPLIT][4];
#pragma unroll
        for (int j = 0; j < SPLIT; j++) {
            const float4 y = exchange.delta[j][lane];
            delta[j][0] = y.x, delta[j][1] = y.y, delta[j][2] = y.z, delta[j][3] = y.w;
        }
        // What these positions give to this warp's outputs.
        maxima(most, delta);
        const Scales of_delta(most);
        Sums shares;
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
            u32 b[4], y[4], y_rest[4];
            if (part < 2 * k) continue;
            operand(y, y_rest, delta[2 * k], delta[2 * k + 1], of_delta.scale);
            load_matrices(b, &now.shares[2 + lane / 16][share_at(8 * part + lane % 8, 2 * k + lane / 8 % 2)]);
            shares.add(y, y_rest, b);
        }

        // S.
#pragma unroll
        for (int j = 0; j < SPLIT; j++) {
            const float2 left = *(const float2*)&now.gates[LEFT][8 * j + 2 * t];
#pragma unroll
            for (int e = 0; e < 4; e++) delta[j][e] *= e % 2 ? left.y : left.x;
        }
        maxima(most, delta);
        const Scales of_left(most);
        const float decay = now.gates[ALL][0];
        u32 y[TILE / 16][4], y_rest[TILE / 16][4];
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) operand(y[k], y_rest[k], delta[2 * k], delta[2 * k + 1], of_left.scale);
#pragma unroll
        for (int j = 0; j < N_ROWS / 8; j++) {
            Sums more;
#pragma unroll
            for (int k = 0; k < TILE / 16; k++) {
                u32 b[4];
                const u32 piece = part * (N_ROWS / 8) + j;
                load_transposed(b, &now.planes[lane / 16][key_at(16 * k + lane % 16, piece)]);
                more.add(y[k], y_rest[k], b);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[j][e] = decay * s[j][e] + of_left.inverse[e / 2] * more[e];
                if (is_wild && wild[e / 2] < TILE) s[j][e] = QNAN;
            }
        }
        maxima(most, s);
        if (t == 0) exchange.tops[g][part] = most[0], exchange.tops[g + 8][part] = most[1];

        // out.
        const float2 by = *(const float2*)&now.gates[FOUND][row], of_share = *(const float2*)&now.gates[SHARE][row];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const u32 to = column + e / 2 * 8;
            float out = (e % 2 ? by.y : by.x) * of_state.inverse[e / 2] * found[e] +
                        (e % 2 ? of_share.y : of_share.x) * of_delta.inverse[e / 2] * shares[e];
            if (is_wild && row + e % 2 >= wild[e / 2]) out = QNAN;
            if (row + e % 2 < n && to < d_v) {
                a.op.out[((u64)(c.first + first + row + e % 2) * n_v + head) * d_v + to] = out;
            }
        }
    }
#pragma unroll
    for (int j = 0; j < N_ROWS / 8; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (column + e / 2 * 8 < d_v) state[at(j, e)] = s[j][e];
        }
    }
}
