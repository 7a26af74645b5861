// delta_net: for each head of v, position after position, S = g*S; S += k (x) beta*(v - S^T k); out = S^T q (+ skip*v).
// With the rule of a sum, S += k (x) beta*v; by_row, each row of S has its decay. Compiled for -DD_K.
//
// grid (columns of d_v / 16, n_v_head, chunks), block 128: eight lanes hold a column of S in registers, D_K / 8 numbers
// each, from the chunk's first token to its last. Keys, queries, values and gates come through shared memory, TOKENS at
// a time, copied while the tokens before are computed: a token waits for no memory. Two tokens go together, so that
// the sums of both run side by side. Sums run over a lane's numbers, then over the eight lanes.
//
// delta_net_drafts: the same of steps with drafts. A chunk goes in three phases: drafts of the slot's last step that
// were accepted, from what that step kept of them in the slot; the chunk's tokens, after which the state is stored; its
// own drafts, of which k, v, g and beta are kept. What is kept has two sides: blocks may still read one while others
// write the other.
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
template <bool HAS_DRAFTS>
__device__ __forceinline__ void delta_net_of(const DeltaNet& a, Staged (&staged)[2]) {
    PDL_LAUNCH();
    const Chunk c = a.step.chunks[blockIdx.z];
    const u32 head = blockIdx.y, d_v = a.d_v;
    const u32 k_head = a.tiled ? head % a.n_k_head : head / (a.n_v_head / a.n_k_head);
    const u32 lane = threadIdx.x % LANES, own = threadIdx.x / LANES;
    const u32 column = blockIdx.x * COLUMNS + own;
    // Lanes without a column run along for the shuffles and write nothing.
    const bool is_real = column < d_v;

    // Numbers of a token's k, v and beta, and of g.
    const u32 n_k = a.n_k_head * D_K, n_v = a.n_v_head * d_v, n_g = a.by_row ? a.n_v_head * D_K : a.n_v_head;
    float* slot = a.state + c.state * a.state_len;
    // What the slot keeps of a draft: k, v, g and beta, from a multiple of four numbers on.
    const u32 kept_row = (n_k + n_v + n_g + a.n_v_head + 3) / 4 * 4;
    const auto kept_at = [&](u32 side) {
        return slot + (u64)a.n_v_head * D_K * d_v + (u64)side * a.most_drafts * kept_row;
    };
    // Where the tokens of a phase lie, and how many numbers from token to token.
    struct Source {
        const float *k, *v, *g, *beta;
        u32 k_row, v_row, g_row, beta_row;
    };
    const auto replayed = [&] {
        const float* at = kept_at(c.side);
        const float* g = at + n_k + n_v;
        return Source{at, at + n_k, g, g + n_g, kept_row, kept_row, kept_row, kept_row};
    };
    const auto given = [&](u32 first) {
        const u64 t = c.first + first;
        return Source{a.k + t * n_k, a.v + t * n_v, a.g + t * n_g, a.beta + t * a.n_v_head, n_k, n_v, n_g, a.n_v_head};
    };

    // Tokens first .. first + TOKENS of `n`; q: the queries of the first of them, null where none are asked.
    const auto fetch = [&](const Source& from, const float* q, u32 first, u32 n, Staged& to) {
        constexpr int N = D_K % 4 == 0 ? 4 : 1;
        n = min((u32)TOKENS, n - first);
        for (u32 i = threadIdx.x; i < n * (D_K / N); i += blockDim.x) {
            const u32 t = i / (D_K / N), at = i % (D_K / N) * N;
            const u32 of_head = k_head * D_K + at;
            copy_async<N>(&to.k[t][at], from.k + (u64)(first + t) * from.k_row + of_head);
            if (q) copy_async<N>(&to.q[t][at], q + (u64)(first + t) * n_k + of_head);
        }
        for (u32 i = threadIdx.x; i < n * COLUMNS; i += blockDim.x) {
            const u32 t = i / COLUMNS, at = blockIdx.x * COLUMNS + i % COLUMNS;
            const float* v = from.v + (u64)(first + t) * from.v_row + head * d_v;
            if (at < d_v) copy_async<1>(&to.v[t][i % COLUMNS], v + at);
        }
        for (u32 t = threadIdx.x; t < n; t += blockDim.x) {
            copy_async<1>(&to.g[t], from.g + (u64)(first + t) * from.g_row + head);
            copy_async<1>(&to.beta[t], from.beta + (u64)(first + t) * from.beta_row + head);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    if (ROW > D_K) {
        for (u32 i = threadIdx.x; i < 2 * TOKENS * (ROW - D_K); i += blockDim.x) {
            const u32 t = i / (ROW - D_K), at = D_K + i % (ROW - D_K);
            staged[t % 2].k[t / 2][at] = staged[t % 2].q[t / 2][at] = 0.0f;
        }
    }

    // Number 4 * (LANES * i + lane) + j of the column. The slot is this kernel's alone, and older than the kernels
    // ahead.
    float* state = slot + (u64)head * D_K * d_v + (is_real ? column : 0);
    const auto row_of = [&](int i, int j) { return 4 * (LANES * i + lane) + j; };
    float4 s[EACH];
    const auto stored = [&](int i, int j) {
        return c.pos != 0 && row_of(i, j) < D_K ? state[(u64)row_of(i, j) * d_v] : 0.0f;
    };
#pragma unroll
    for (int i = 0; i < EACH; i++) s[i] = {stored(i, 0), stored(i, 1), stored(i, 2), stored(i, 3)};
    float* out; // of the phase's first token
    bool is_read;
    const float skip = a.skip ? a.skip[head] : 0.0f;
    const auto store = [&](u32 t, float y, float v) {
        if (is_read && is_real && lane == 0) out[(u64)t * a.n_v_head * d_v] = a.skip ? y + skip * v : y;
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
    const auto by_row = [&](const Staged& now, const Source& from, u32 t, u32 first) {
        const float* g = from.g + (u64)(first + t) * from.g_row + head * D_K;
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
    // Keeps what token t of those staged moves the state by, as draft number `i`.
    const auto keep = [&](const Staged& now, const Source& from, u32 t, u32 i) {
        float* to = kept_at(c.side ^ 1) + (u64)i * kept_row;
        const bool is_first_column = blockIdx.x == 0;
        if (is_first_column && head == (a.tiled ? k_head : k_head * (a.n_v_head / a.n_k_head))) {
            for (u32 j = threadIdx.x; j < D_K; j += blockDim.x) to[k_head * D_K + j] = now.k[t][j];
        }
        to += n_k;
        if (is_real && lane == 0) to[head * d_v + column] = now.v[t][own];
        if (!is_first_column) return;
        to += n_v;
        const u32 of_head = a.by_row ? D_K : 1;
        for (u32 j = threadIdx.x; j < of_head; j += blockDim.x) {
            to[head * of_head + j] = from.g[(u64)i * from.g_row + head * of_head + j];
        }
        if (threadIdx.x == 0) to[n_g + head] = now.beta[t];
    };
    const auto store_state = [&] {
        const auto put = [&](int i, int j, float x) {
            if (is_real && row_of(i, j) < D_K) state[(u64)row_of(i, j) * d_v] = x;
        };
#pragma unroll
        for (int i = 0; i < EACH; i++) put(i, 0, s[i].x), put(i, 1, s[i].y), put(i, 2, s[i].z), put(i, 3, s[i].w);
    };
    // Alongside tiles, which begin with the state that this leaves, accepted drafts alone.
    const u32 n_replay = HAS_DRAFTS ? c.n_replay : 0, n_draft = HAS_DRAFTS ? c.n_draft : 0;
    const bool is_beside = HAS_DRAFTS && a.beside_tiles && n_draft == 0;
    const u32 n_own = is_beside ? 0 : c.len - n_draft;
    if (is_beside && n_replay == 0) {
        PDL_WAIT();
        return;
    }
#pragma unroll 1
    for (u32 phase = HAS_DRAFTS ? 0 : 1; phase < (HAS_DRAFTS ? 3 : 2); phase++) {
        const u32 n = phase == 0 ? n_replay : phase == 1 ? n_own : n_draft, of = phase == 2 ? n_own : 0;
        const Source from = phase == 0 ? replayed() : given(of);
        if (phase == 1) PDL_WAIT();
        is_read = phase > 0;
        out = a.out + ((u64)(c.first + of) * a.n_v_head + head) * d_v + column;
        const float* q = is_read ? a.q + (u64)(c.first + of) * n_k : nullptr;
        // What the phase before staged has been read.
        if (HAS_DRAFTS && n > 0) __syncthreads();
        if (n > 0) fetch(from, q, 0, n, staged[0]);
        for (u32 first = 0, turn = 0; first < n; first += TOKENS, turn ^= 1) {
            const Staged& now = staged[turn];
            asm volatile("cp.async.wait_group 0;" ::: "memory");
            __syncthreads();
            if (first + TOKENS < n) fetch(from, q, first + TOKENS, n, staged[turn ^ 1]);
            const u32 n_now = min((u32)TOKENS, n - first);
            u32 t = 0;
            for (; a.by_row && t < n_now; t++) by_row(now, from, t, first);
            for (; t + 2 <= n_now; t += 2) both(now, t, first);
            if (t < n_now) one(now, t, first);
            for (u32 i = 0; phase == 2 && i < n_now; i++) keep(now, from, i, first + i);
        }
        if (phase == 1) store_state();
    }
}

// Six blocks a multiprocessor, as many as shared memory holds.
KERNEL __launch_bounds__(128, ROW == 128 ? 6 : 1) delta_net(const __grid_constant__ DeltaNet a) {
    __shared__ __align__(16) Staged staged[2];
    delta_net_of<false>(a, staged);
}

KERNEL __launch_bounds__(128) delta_net_drafts(const __grid_constant__ DeltaNet a) {
    __shared__ __align__(16) Staged staged[2];
    delta_net_of<true>(a, staged);
}
