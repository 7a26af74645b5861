// delta_net: for each head of v, position after position, S = g*S; S += k (x) beta*(v - S^T k); out = S^T q (+ skip*v).
// With the rule of a sum, S += k (x) beta*v; by_row, each row of S has its decay. Compiled for -DD_K.
//
// grid (columns of d_v / 16, n_v_head, chunks), block 128: eight lanes hold a column of S in registers, D_K / 8 numbers
// each, from the chunk's first token to its last. Keys, queries, values and gates come through shared memory, TOKENS at
// a time, copied while the tokens before are computed: a token waits for no memory. Two tokens go together, so that
// the sums of both run side by side. Sums run over a lane's numbers, then over the eight lanes.
#include "cuda/common.h"
#include "cuda/args.h"

#define LANES 8
// Groups of four numbers of a lane, and numbers of a row with zeros behind it.
#define EACH ((D_K + 4 * LANES - 1) / (4 * LANES))
#define ROW (4 * LANES * EACH)
#define COLUMNS (128 / LANES)
#define TOKENS (ROW <= 64 ? 32 : ROW <= 512 ? 2048 / ROW : 1)

struct Staged {
    float k[TOKENS][ROW], q[TOKENS][ROW];
    float v[TOKENS][COLUMNS];
    float g[TOKENS], beta[TOKENS];
};

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step >>= 1) x += __shfl_xor_sync(FULL_MASK, x, step);
    return x;
}

__device__ __forceinline__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + (a.z * b.z + a.w * b.w); }

// Copies N * 4 bytes to shared memory, behind the thread's back.
template <int N>
__device__ __forceinline__ void copy_async(float* to, const float* from) {
    const u32 at = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(4 * N) : "memory");
}

// v holds the width of a head of v: d_v is no constant, since nothing is unrolled over it.
KERNEL __launch_bounds__(128) delta_net(const __grid_constant__ DeltaNet a) {
    __shared__ __align__(16) Staged staged[2];
    PDL_LAUNCH();
    PDL_WAIT();
    const Chunk c = a.step.chunks[blockIdx.z];
    const u32 head = blockIdx.y, d_v = a.d_v;
    const u32 k_head = a.tiled ? head % a.n_k_head : head / (a.n_v_head / a.n_k_head);
    const u32 lane = threadIdx.x % LANES, own = threadIdx.x / LANES;
    const u32 column = blockIdx.x * COLUMNS + own;
    // Lanes without a column run along for the shuffles and write nothing.
    const bool is_real = column < d_v;

    // Tokens first .. first + TOKENS of the chunk, as far as it has them.
    const auto fetch = [&](u32 first, Staged& to) {
        constexpr int N = D_K % 4 == 0 ? 4 : 1;
        const u32 n = min((u32)TOKENS, c.len - first);
        for (u32 i = threadIdx.x; i < n * (D_K / N); i += blockDim.x) {
            const u32 t = i / (D_K / N), at = i % (D_K / N) * N;
            const u64 row = ((u64)(c.first + first + t) * a.n_k_head + k_head) * D_K + at;
            copy_async<N>(&to.k[t][at], a.k + row);
            copy_async<N>(&to.q[t][at], a.q + row);
        }
        for (u32 i = threadIdx.x; i < n * COLUMNS; i += blockDim.x) {
            const u32 t = i / COLUMNS, at = blockIdx.x * COLUMNS + i % COLUMNS;
            const u64 gate = (u64)(c.first + first + t) * a.n_v_head + head;
            if (at < d_v) copy_async<1>(&to.v[t][i % COLUMNS], a.v + gate * d_v + at);
        }
        for (u32 t = threadIdx.x; t < n; t += blockDim.x) {
            const u64 gate = (u64)(c.first + first + t) * a.n_v_head + head;
            copy_async<1>(&to.g[t], a.g + gate);
            copy_async<1>(&to.beta[t], a.beta + gate);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    if (ROW > D_K) {
        for (u32 i = threadIdx.x; i < 2 * TOKENS * (ROW - D_K); i += blockDim.x) {
            const u32 t = i / (ROW - D_K), at = D_K + i % (ROW - D_K);
            staged[t % 2].k[t / 2][at] = staged[t % 2].q[t / 2][at] = 0.0f;
        }
    }
    fetch(0, staged[0]);

    // Number 4 * (LANES * i + lane) + j of the column.
    float* state = a.state + c.state * a.state_len + (u64)head * D_K * d_v + (is_real ? column : 0);
    const auto row_of = [&](int i, int j) { return 4 * (LANES * i + lane) + j; };
    float4 s[EACH];
    const auto kept = [&](int i, int j) {
        return c.pos != 0 && row_of(i, j) < D_K ? state[(u64)row_of(i, j) * d_v] : 0.0f;
    };
#pragma unroll
    for (int i = 0; i < EACH; i++) s[i] = {kept(i, 0), kept(i, 1), kept(i, 2), kept(i, 3)};
    float* out = a.out + ((u64)c.first * a.n_v_head + head) * d_v + column;
    const float skip = a.skip ? a.skip[head] : 0.0f;
    const auto store = [&](u32 t, float y, float v) {
        if (is_real && lane == 0) out[(u64)t * a.n_v_head * d_v] = a.skip ? y + skip * v : y;
    };
    // What the key found, which a sum does not take away.
    const auto found = [&](float x) { return a.is_sum ? 0.0f : x; };
    const auto one = [&](const Staged& now, u32 t, u32 first) {
        const float g = now.g[t], v = is_real ? now.v[t][own] : 0.0f;
        float4 k[EACH];
        float known = 0.0f, y = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            k[i] = *(const float4*)&now.k[t][row_of(i, 0)];
            known += dot(s[i], k[i]);
        }
        const float delta = now.beta[t] * (v - found(g * sum_of_lanes(known)));
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            s[i] = {g * s[i].x + k[i].x * delta, g * s[i].y + k[i].y * delta, g * s[i].z + k[i].z * delta,
                    g * s[i].w + k[i].w * delta};
            y += dot(s[i], *(const float4*)&now.q[t][row_of(i, 0)]);
        }
        store(first + t, sum_of_lanes(y), v);
    };
    // A token whose rows of S decay by themselves.
    const auto by_row = [&](const Staged& now, u32 t, u32 first) {
        const float* g = a.g + ((u64)(c.first + first + t) * a.n_v_head + head) * D_K;
        const auto decay = [&](int i, int j) { return row_of(i, j) < D_K ? g[row_of(i, j)] : 0.0f; };
        const float v = is_real ? now.v[t][own] : 0.0f;
        float known = 0.0f, y = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            s[i] = {decay(i, 0) * s[i].x, decay(i, 1) * s[i].y, decay(i, 2) * s[i].z, decay(i, 3) * s[i].w};
            known += dot(s[i], *(const float4*)&now.k[t][row_of(i, 0)]);
        }
        const float delta = now.beta[t] * (v - found(sum_of_lanes(known)));
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float4 k = *(const float4*)&now.k[t][row_of(i, 0)];
            s[i] = {s[i].x + k.x * delta, s[i].y + k.y * delta, s[i].z + k.z * delta, s[i].w + k.w * delta};
            y += dot(s[i], *(const float4*)&now.q[t][row_of(i, 0)]);
        }
        store(first + t, sum_of_lanes(y), v);
    };
    // Two tokens with the sums of both over S as it was before: what the first adds is known from k and q alone.
    const auto both = [&](const Staged& now, u32 t, u32 first) {
        const float g1 = now.g[t], g2 = now.g[t + 1];
        const float v1 = is_real ? now.v[t][own] : 0.0f, v2 = is_real ? now.v[t + 1][own] : 0.0f;
        float4 k1[EACH], k2[EACH];
        float s_k1 = 0.0f, s_k2 = 0.0f, s_q1 = 0.0f, s_q2 = 0.0f;
        float k1_k2 = 0.0f, k1_q1 = 0.0f, k1_q2 = 0.0f, k2_q2 = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            k1[i] = *(const float4*)&now.k[t][row_of(i, 0)], k2[i] = *(const float4*)&now.k[t + 1][row_of(i, 0)];
            const float4 q1 = *(const float4*)&now.q[t][row_of(i, 0)];
            const float4 q2 = *(const float4*)&now.q[t + 1][row_of(i, 0)];
            s_k1 += dot(s[i], k1[i]), s_k2 += dot(s[i], k2[i]), s_q1 += dot(s[i], q1), s_q2 += dot(s[i], q2);
            k1_k2 += dot(k1[i], k2[i]), k1_q1 += dot(k1[i], q1), k1_q2 += dot(k1[i], q2), k2_q2 += dot(k2[i], q2);
        }
        s_k1 = sum_of_lanes(s_k1), s_k2 = sum_of_lanes(s_k2), s_q1 = sum_of_lanes(s_q1), s_q2 = sum_of_lanes(s_q2);
        k1_k2 = sum_of_lanes(k1_k2), k1_q1 = sum_of_lanes(k1_q1), k1_q2 = sum_of_lanes(k1_q2);
        k2_q2 = sum_of_lanes(k2_q2);
        const float delta1 = now.beta[t] * (v1 - found(g1 * s_k1));
        const float delta2 = now.beta[t + 1] * (v2 - found(g2 * (g1 * s_k2 + k1_k2 * delta1)));
        const float g = g1 * g2, d1 = g2 * delta1;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            s[i] = {g * s[i].x + k1[i].x * d1 + k2[i].x * delta2, g * s[i].y + k1[i].y * d1 + k2[i].y * delta2,
                    g * s[i].z + k1[i].z * d1 + k2[i].z * delta2, g * s[i].w + k1[i].w * d1 + k2[i].w * delta2};
        }
        store(first + t, g1 * s_q1 + k1_q1 * delta1, v1);
        store(first + t + 1, g2 * (g1 * s_q2 + k1_q2 * delta1) + k2_q2 * delta2, v2);
    };
    for (u32 first = 0, turn = 0; first < c.len; first += TOKENS, turn ^= 1) {
        const Staged& now = staged[turn];
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
        if (first + TOKENS < c.len) fetch(first + TOKENS, staged[turn ^ 1]);
        const u32 n = min((u32)TOKENS, c.len - first);
        u32 t = 0;
        for (; a.by_row && t < n; t++) by_row(now, t, first);
        for (; t + 2 <= n; t += 2) both(now, t, first);
        if (t < n) one(now, t, first);
    }
    if (!is_real) return;
    const auto keep = [&](int i, int j, float x) {
        if (row_of(i, j) < D_K) state[(u64)row_of(i, j) * d_v] = x;
    };
#pragma unroll
    for (int i = 0; i < EACH; i++) keep(i, 0, s[i].x), keep(i, 1, s[i].y), keep(i, 2, s[i].z), keep(i, 3, s[i].w);
}
