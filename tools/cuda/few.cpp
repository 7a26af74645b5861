// The kernels of steps of few tokens, for one type, against sums in double: emulated on this machine (`host/run.sh`).
#include "emulate.h"

#define WEIGHT_HEADER_B "quant/q8_0.h"
#define WEIGHT_B q8_0
#define N_EXPERT 40
#define D 64
#define HEADS 4

#include "cuda/attend.cu"
#undef THREADS
#undef N_WARPS
#undef ROWS
#undef LANES
#define K_BLOCKS 0
#define V_BLOCKS 0
#ifndef WORKERS
#define WORKERS 8
#endif
#include "cuda/attend_long.cu"
#undef THREADS
#undef HALF
#undef STRIDE
#undef SUMS
#include "cuda/experts.cu"
#undef TILE
#undef GATED_TILE
#undef WEIGHT_B
#include "cuda/experts_down.cu"
#undef WEIGHT_B
#define WEIGHT_B q8_0
#undef AHEAD
#undef WARPS
#undef EACH
#include "cuda/linear.cu"
#undef VEC
#undef TILE
#include "cuda/linear_pair.cu"
#include "cuda/combine.cu"
#include "cuda/router.cu"
#include "cuda/few_experts.cu"
#include "cuda/few_down.cu"
#include "cuda/few_pairs.cu"
#include "cuda/few_routed.cu"
#undef WEIGHT_B
#include "cuda/few_linear.cu"

alignas(128) uint4 shared[131072 / 16];

#include "weights.h"

static double sigma(double x) { return 1 / (1 + exp(-x)); }

// Rows as a prologue leaves them, in double, and rounded for `Weights::dot`.
static Array<float> after(const Prologue& p, const Array<float>& x, u32 rows, u32 k) {
    Array<float> out(x.size());
    for (u32 t = 0; t < rows; t++) {
        const u32 d = p.kind == NORMED ? k : p.d_head;
        for (u32 i = 0; i < k; i++) {
            const u64 at = (u64)t * k + i;
            if (p.kind == PLAIN) {
                out[at] = x[at];
                continue;
            }
            double squares = 0;
            for (u32 j = i / d * d; j < i / d * d + d; j++) squares += (double)x[(u64)t * k + j] * x[(u64)t * k + j];
            const double r = 1 / sqrt(squares / d + p.eps);
            const double g = p.gate ? p.gate[(u64)t * p.gate_row + i / d * p.gate_head + i % d] : 0;
            out[at] = (float)(p.kind == NORMED  ? x[at] * r * p.w[i]
                              : p.kind == GATED ? x[at] * sigma(g)
                                                : x[at] * r * p.w[i % d] * g * sigma(g));
        }
    }
    return out;
}

typedef void (*LinearKernel)(const Linear);
typedef void (*FewLinearKernel)(const FewLinear);

// Types whose weights go through shared memory.
static const bool IS_FEW = Vec<VecOf<WEIGHT>::type>::FORM == FORM_I8 && !WEIGHT::SCALE_BYTES && !WEIGHT::BIAS_BYTES;
static const u32 FEW_SHARED = 131072;

// Rows packed as `combine_sum` does it: without a norm's factor, with the squares of their parts. In the order of x.
static void pack_sums(const Array<float>& x, const Prologue& p, u32 rows, u32 k, Array<u8>& columns,
                      Array<float>& squares) {
    Array<float> ones(rows, 1.0f), w(k, 1.0f), sums((size_t)rows * k, NAN);
    columns = Array<u8>((size_t)rows * column_bytes(k) + 16), squares = Array<float>(rows * k / 256, NAN);
    Combine c = {};
    c.x = sums.data(), c.y = x.data(), c.weights = ones.data(), c.rows = rows, c.n_used = 1, c.d = k;
    c.next_w = p.kind == NORMED ? p.w : w.data(), c.columns = columns.data(), c.squares = squares.data();
    launch({rows, k / 256, 1}, 256, 0, combine_sum, c);
    failures += sums != x;
}

static void test_few_linear(const char* name, FewLinearKernel kernel, u32 rows, u32 k, u32 n, Prologue p, bool add,
                            u32 each, u32 threads, bool is_packed = false) {
    const Array<float> x = normals((size_t)rows * k), gain = normals(k), gate = normals((size_t)rows * k * 2 + 64);
    const Array<float> bias = normals(n);
    p.eps = 1e-2f;
    if (p.kind == NORMED || p.kind == GATED_NORM) p.w = gain.data();
    if (p.kind == GATED || p.kind == GATED_NORM) p.gate = gate.data() + 8;
    const u32 second = n / 3;
    const Weights w(n - second, k), other(second, k);
    Array<float> out = normals((size_t)rows * (n - second)), out_b = normals((size_t)rows * second);
    const Array<float> before = out, before_b = out_b, in = after(p, x, rows, k);
    FewLinear a = {{x.data(), rows, k, 2, add, p, {}}, each, 0, {}};
    Array<u8> columns;
    Array<float> squares;
    if (is_packed) {
        pack_sums(x, p, rows, k, columns, squares);
        a.columns = {columns.data(), p.kind == NORMED ? squares.data() : nullptr, k / 256, 0};
        a.op.x = nullptr;
    }
    a.op.parts[0] = {w.matrix, bias.data(), out.data(), n - second};
    a.op.parts[1] = {other.matrix, nullptr, out_b.data(), second};
    launch({(n + each - 1) / each, 1, 1}, threads, FEW_SHARED, kernel, a);
    std::vector<double> want, want_b;
    for (u32 t = 0; t < rows; t++) {
        const float* row = &in[(size_t)t * k];
        for (u32 j = 0; j < n - second; j++)
            want.push_back(w.dot(j, row, k) + bias[j] + (add ? before[t * (n - second) + j] : 0));
        for (u32 j = 0; j < second; j++)
            want_b.push_back(other.dot(j, row, k) + (add ? before_b[t * second + j] : 0));
    }
    check(name, out, want, 2 * VEC_LIMIT);
    check(name, out_b, want_b, 2 * VEC_LIMIT);
}

static void test_linear(const char* name, LinearKernel kernel, u32 rows, u32 k, u32 n, Prologue p, bool add,
                        u32 blocks) {
    const Array<float> x = normals((size_t)rows * k), gain = normals(k), gate = normals((size_t)rows * k * 2 + 64);
    p.eps = 1e-2f;
    if (p.kind == NORMED || p.kind == GATED_NORM) p.w = gain.data();
    if (p.kind == GATED || p.kind == GATED_NORM) p.gate = gate.data() + 8;
    const Weights w(n, k);
    Array<float> out = normals((size_t)rows * n);
    const Array<float> before = out, in = after(p, x, rows, k);
    Linear a = {x.data(), rows, k, 1, add, p, {}};
    a.parts[0] = {w.matrix, nullptr, out.data(), n};
    launch({blocks, 1, 1}, VEC_THREADS, SHARED, kernel, a);
    std::vector<double> want;
    for (u32 t = 0; t < rows; t++) {
        for (u32 j = 0; j < n; j++) want.push_back(w.dot(j, &in[(size_t)t * k], k) + (add ? before[t * n + j] : 0));
    }
    check(name, out, want, 2 * VEC_LIMIT);
}

// Rows packed behind a prologue.
static Array<u8> packed(const Array<float>& x, const Prologue& p, u32 rows, u32 k, bool is_wide = false) {
    Array<u8> out((size_t)rows * column_bytes(k) + 16);
    launch({rows, 1, 1}, 256, 0, pack_columns, PackColumns{x.data(), p, out.data(), k, is_wide});
    return out;
}
static Array<float> unpacked(const Array<u8>& columns, u32 rows, u32 k, bool is_wide = false) {
    Array<float> out;
    for (u32 i = 0; i < rows * k; i++) {
        const u8* column = &columns[(size_t)(i / k) * column_bytes(k)];
        const u32 run = i % k / 16, at = Staged<q4_k_wide, 1>::slot(run);
        const u32 of = is_wide ? Staged<q4_k_wide, 1>::slot(run / 4 * 4) : at;
        const float d = ((const float2*)(column + 16 * column_runs(k)))[of].x;
        out.push_back(d * (float)(i8)column[16 * at + i % k % 16]);
    }
    return out;
}

static void test_router(u32 rows, u32 k, bool adds) {
    Array<float> x = normals((size_t)rows * k);
    const Array<float> gain = normals(k), added = normals((size_t)rows * k), added_w = normals(k), given = x;
    Array<float> sum((size_t)rows * k, NAN);
    std::vector<double> want_sum;
    if (adds) {
        Prologue q = {};
        q.kind = NORMED, q.w = added_w.data(), q.eps = 1e-3f;
        const Array<float> normed = after(q, added, rows, k);
        for (size_t i = 0; i < x.size(); i++) want_sum.push_back(x[i] += normed[i]);
    }
    Prologue p = {};
    p.kind = NORMED, p.w = gain.data(), p.eps = 1e-2f;
    const Array<float> in = after(p, x, rows, k);
    const Weights w(N_EXPERT, k), share(1, k);
    Array<float> logits(rows * N_EXPERT, NAN), gate(rows, NAN), weights(rows * 4, NAN);
    Array<u32> ids(rows * 4, 99), faults(1, ~0u), chunk_of(rows, 0);
    u32 counter = 0;
    Router a = {};
    a.linear = {given.data(), rows, k, 2, 0, p, {}};
    if (adds) a.added = added.data(), a.added_w = added_w.data(), a.eps = 1e-3f, a.sum = sum.data();
    a.linear.parts[0] = {w.matrix, nullptr, logits.data(), N_EXPERT};
    a.linear.parts[1] = {share.matrix, nullptr, gate.data(), 1};
    a.route.ids = ids.data(), a.route.weights = weights.data(), a.route.rows = rows, a.route.n_used = 4;
    a.route.renormalise = 1, a.route.scale = 1, a.route.step.faults = faults.data();
    a.route.step.chunk_of = chunk_of.data();
    a.counter = &counter, a.scale = 1;
    Array<u8> columns((size_t)rows * column_bytes(k), 0xff);
    if (!adds) a.pack = {given.data(), p, columns.data(), k, rows % 2};
    launch({N_EXPERT + 1 + (adds ? 0 : rows), 1, 1}, 256, 0, adds ? router_added : router, a);
    if (!adds) check("router's columns", unpacked(columns, rows, k, rows % 2), {in.begin(), in.end()}, 1e-2);
    std::vector<double> want, want_gate, want_weights;
    for (u32 t = 0; t < rows; t++) {
        for (u32 e = 0; e < N_EXPERT; e++) want.push_back(w.dot(e, &in[(size_t)t * k], k));
        want_gate.push_back(share.dot(0, &in[(size_t)t * k], k));
        std::vector<u32> order(N_EXPERT);
        for (u32 e = 0; e < N_EXPERT; e++) order[e] = e;
        const float* row = &logits[t * N_EXPERT];
        std::stable_sort(order.begin(), order.end(), [&](u32 a, u32 b) { return row[a] > row[b]; });
        double sum = 0;
        for (u32 s = 0; s < 4; s++) sum += exp((double)row[order[s]] - row[order[0]]);
        for (u32 s = 0; s < 4; s++) {
            failures += ids[t * 4 + s] != order[s];
            want_weights.push_back(exp((double)row[order[s]] - row[order[0]]) / sum);
        }
    }
    failures += counter != 0;
    if (adds) check("router's sum", sum, want_sum, 1e-6);
    check("router logits", logits, want, 1e-5);
    check("router other part", gate, want_gate, 1e-5);
    check("router weights", weights, want_weights, 1e-6);
}

static double act(double g, double u) { return g / (1 + exp(-g)) * u; }

static void test_experts(u32 rows, u32 n_used, u32 d, u32 d_ff, bool has_shared, u32 ds) {
    const u32 n_expert = 5, pairs = rows * n_used;
    Array<float> x = normals((size_t)rows * d), gain = normals(d);
    Prologue p = {};
    p.kind = NORMED, p.w = gain.data(), p.eps = 1e-2f;
    const Weights gate((u64)n_expert * d_ff, d), up((u64)n_expert * d_ff, d), down((u64)n_expert * d, d_ff);
    const Weights sgate(ds, d), sup(ds, d), sdown(d, ds);
    gate.level(gain, d);
    const Array<float> in = after(p, x, rows, d);
    Array<u32> ids;
    for (u32 i = 0; i < pairs; i++) ids.push_back((u32)(uniform() * n_expert));
    Array<float> hidden((size_t)pairs * d_ff, NAN), shidden((size_t)rows * ds, NAN);
    Experts a = {};
    a.x = x.data(), a.ids = ids.data(), a.w = gate.matrix, a.up = up.matrix, a.out = hidden.data();
    a.rows = rows, a.n_used = n_used, a.n_expert = n_expert, a.n = d_ff, a.k = d, a.prologue = p;
    a.n_shared = has_shared, a.shared_n = ds, a.shared_w = sgate.matrix, a.shared_up = sup.matrix, a.shared_out = shidden.data();
    launch({2, pairs + (has_shared ? rows : 0), 1}, VEC_THREADS, SHARED, experts_gated_vec, a);
    std::vector<double> want;
    for (u32 pair = 0; pair < pairs; pair++) {
        const float* row = &in[(size_t)(pair / n_used) * d];
        for (u32 i = 0; i < d_ff; i++) {
            const u64 at = (u64)ids[pair] * d_ff + i;
            want.push_back(act(gate.dot(at, row, d), up.dot(at, row, d)));
        }
    }
    check("experts behind a norm", hidden, want, 4 * VEC_LIMIT);
    if (has_shared) {
        want.clear();
        for (u32 t = 0; t < rows; t++) {
            for (u32 i = 0; i < ds; i++)
                want.push_back(act(sgate.dot(i, &in[(size_t)t * d], d), sup.dot(i, &in[(size_t)t * d], d)));
        }
        check("shared expert behind a norm", shidden, want, 4 * VEC_LIMIT);
    }
    const Array<float> h = normals((size_t)pairs * d_ff), sh = normals((size_t)rows * ds), share = normals(rows);
    const Array<float> weights = normals(pairs), bias = normals((size_t)n_expert * d);
    const Array<float> before = x;
    const ExpertsDown b = {h.data(), has_shared ? sh.data() : nullptr, share.data(), ids.data(), weights.data(),
                           down.matrix, sdown.matrix, bias.data(), x.data(), rows, n_used, n_expert, d, d_ff, 1, ds};
    launch({(d + 15) / 16, rows, 1}, VEC_THREADS, SHARED, experts_down, b);
    want.clear();
    for (u32 t = 0; t < rows; t++) {
        for (u32 i = 0; i < d; i++) {
            double sum = before[(size_t)t * d + i];
            for (u32 s = 0; s < n_used; s++) {
                const u32 pair = t * n_used + s;
                const u64 at = (u64)ids[pair] * d + i;
                sum += weights[pair] * (down.dot(at, &h[(size_t)pair * d_ff], d_ff) + bias[at]);
            }
            if (has_shared) sum += sigma(share[t]) * sdown.dot(i, &sh[(size_t)t * ds], ds);
            want.push_back(sum);
        }
    }
    check(has_shared ? "experts down, shared" : "experts down", x, want, 2 * VEC_LIMIT);
}

// One row, experts chosen by logits or given. `dense`: the shared expert has so many rows, a norm of its own and an
// output of its own.
static void test_few_experts(u32 d, u32 d_ff, bool has_shared, bool chooses, u32 n_squares, u32 each, u32 each_down,
                             u32 dense = 0) {
    const u32 n_expert = 4, n_used = 3;
    Array<float> x = normals(d), gain = normals(d), logits = normals(N_EXPERT);
    // Experts without weights here are never the best.
    for (u32 e = n_expert; e < N_EXPERT; e++) logits[e] -= 20;
    Prologue p = {};
    p.kind = NORMED, p.w = gain.data(), p.eps = 1e-2f;
    const Weights gate((u64)n_expert * d_ff, d), up((u64)n_expert * d_ff, d), down((u64)n_expert * d, d_ff);
    const u32 ds = dense ? dense : d_ff;
    const Weights sgate(ds, d), sup(ds, d), sdown(d, ds);
    gate.level(gain, d);
    const Array<float> in = after(p, x, 1, d);
    Array<float> own_gain = normals(d);
    gate.level(own_gain, d);
    Prologue own = p;
    if (dense) own.w = own_gain.data();
    const Array<float> own_in = after(own, x, 1, d);
    std::vector<u32> order(n_expert);
    for (u32 e = 0; e < n_expert; e++) order[e] = e;
    std::stable_sort(order.begin(), order.end(), [&](u32 a, u32 b) { return logits[a] > logits[b]; });
    Array<u32> ids, faults(1, ~0u), chunk_of(1, 0);
    Array<float> weights = normals(n_used);
    for (u32 s = 0; s < n_used; s++) ids.push_back(chooses ? order[s] : (u32)(uniform() * n_expert));
    Array<float> hidden((size_t)n_used * d_ff, NAN), shidden(ds, NAN), dense_out(d, NAN);
    FewExperts a = {};
    a.op.x = x.data(), a.op.ids = ids.data(), a.op.w = gate.matrix, a.op.up = up.matrix, a.op.out = hidden.data();
    a.op.rows = 1, a.op.n_used = n_used, a.op.n_expert = n_expert, a.op.n = d_ff, a.op.k = d, a.op.prologue = p;
    a.op.n_shared = has_shared, a.op.shared_w = sgate.matrix, a.op.shared_up = sup.matrix;
    a.op.shared_out = shidden.data(), a.each = each;
    a.route.logits = chooses ? logits.data() : nullptr, a.route.n_used = n_used, a.route.scale = 1.5f;
    // Sums of the logits before the factor of a norm, and the row's squares.
    const double squares = 3.0, r = 1 / sqrt(squares / d + 0.5);
    Array<i64> sums(LOGIT_COPIES * N_EXPERT + 1);
    for (u32 e = 0; e < N_EXPERT; e++) {
        double rest = logits[e] / r;
        for (u32 copy = 1; copy < LOGIT_COPIES; copy++) {
            const double part = normal();
            sums[copy * N_EXPERT + e] = (i64)(part * LOGIT_UNIT), rest -= part;
        }
        sums[e] = (i64)(rest * LOGIT_UNIT);
    }
    Array<float> squares_of(n_squares);
    for (float& x : squares_of) x = (float)squares / n_squares;
    a.route.n_squares = n_squares, a.route.k = d, a.route.norm_eps = 0.5f;
    a.route.sums = {sums.data(), squares_of.data()};
    a.route.step.faults = faults.data(), a.route.step.chunk_of = chunk_of.data();
    a.op.shared_n = has_shared ? ds : 0, a.shared_norm = dense ? own_gain.data() : nullptr;
    const u32 tiles = (d_ff + each - 1) / each, shared_tiles = (a.op.shared_n + each - 1) / each;
    launch({tiles * n_used + shared_tiles, 1, 1}, 640, FEW_SHARED, few_experts, a);
    std::vector<double> want;
    for (u32 s = 0; s < n_used; s++) {
        for (u32 i = 0; i < d_ff; i++) {
            const u64 at = (u64)ids[s] * d_ff + i;
            want.push_back(act(gate.dot(at, in.data(), d), up.dot(at, in.data(), d)));
        }
    }
    check("few experts", hidden, want, 4 * VEC_LIMIT);
    if (has_shared) {
        want.clear();
        for (u32 i = 0; i < ds; i++) want.push_back(act(sgate.dot(i, own_in.data(), d), sup.dot(i, own_in.data(), d)));
        check(dense ? "few experts, dense" : "few experts, shared", shidden, want, 4 * VEC_LIMIT);
    }
    const Array<float> h = normals((size_t)n_used * d_ff), sh = normals(ds), share = normals(1), before = x;
    const Array<float> bias = normals((size_t)n_expert * d);
    FewDown b = {{h.data(), has_shared ? sh.data() : nullptr, share.data(), ids.data(), weights.data(), down.matrix,
                  sdown.matrix, bias.data(), x.data(), 1, n_used, n_expert, d, d_ff, 1, ds, 0},
                 a.route, each_down, 0, dense ? dense_out.data() : nullptr};
    double total = 0;
    for (u32 s = 0; s < n_used; s++) total += exp((double)logits[order[s]] - logits[order[0]]);
    launch({(d + each_down - 1) / each_down, 1, 1}, 512, FEW_SHARED, has_shared ? few_down_shared : few_down, b);
    want.clear();
    for (u32 i = 0; i < d; i++) {
        double sum = before[i];
        for (u32 s = 0; s < n_used; s++) {
            const u64 at = (u64)ids[s] * d + i;
            const double by = chooses ? exp((double)logits[ids[s]] - logits[order[0]]) / total * 1.5 : weights[s];
            sum += by * (down.dot(at, &h[(size_t)s * d_ff], d_ff) + bias[at]);
        }
        if (has_shared && !dense) sum += sigma(share[0]) * sdown.dot(i, sh.data(), d_ff);
        want.push_back(sum);
    }
    check(has_shared ? "few down, shared" : "few down", x, want, 2 * VEC_LIMIT);
    if (dense) {
        want.clear();
        for (u32 i = 0; i < d; i++) want.push_back(sdown.dot(i, sh.data(), ds));
        check("few down, dense", dense_out, want, 2 * VEC_LIMIT);
    }
    failures += faults[0] != ~0u;
    if (!chooses) return;
    // NaN among the logits: no answer, and it is said.
    logits[N_EXPERT - 1] = NAN;
    sums[LOGIT_COPIES * N_EXPERT] = 1;
    launch({(d + each_down - 1) / each_down, 1, 1}, 512, FEW_SHARED, has_shared ? few_down_shared : few_down, b);
    failures += faults[0] != 0 || x[0] == x[0];
}

// A product that is added to a row, and the logits behind it; what is no number is counted.
static void test_few_routed(u32 k, u32 n) {
    const Array<float> in = normals(k), norm = normals(n), router = normals((size_t)N_EXPERT * n);
    const Weights w(n, k);
    Array<float> x = normals(n), squares(n / ROUTED_ROWS, NAN);
    Array<i64> sums(LOGIT_COPIES * N_EXPERT + 1);
    const Array<float> before = x;
    FewRouted a = {{in.data(), 1, k, 1, 1, {}, {}}, router.data(), norm.data(), {sums.data(), squares.data()}};
    a.op.parts[0] = {w.matrix, nullptr, x.data(), n};
    launch({n / ROUTED_ROWS, 1, 1}, 512, FEW_SHARED, few_routed, a);
    std::vector<double> want, logits(N_EXPERT + 1);
    Array<float> got(N_EXPERT + 1);
    for (u32 i = 0; i < n; i++) want.push_back(w.dot(i, in.data(), k) + before[i]);
    check("few, routed", x, want, 2 * VEC_LIMIT);
    for (u32 i = 0; i < n; i++) {
        for (u32 e = 0; e < N_EXPERT; e++) logits[e] += (double)router[e * n + i] * norm[i] * x[i];
        logits[N_EXPERT] += (double)x[i] * x[i];
    }
    for (u32 i = 0; i < LOGIT_COPIES * N_EXPERT; i++) got[i % N_EXPERT] += (float)sums[i] / LOGIT_UNIT;
    for (float y : squares) got[N_EXPERT] += y;
    check("few, routed, logits", got, logits, 1e-5);
    failures += sums.back() != 0;
    x = before;
    x[0] = NAN, x[n - 1] = 1e30f;
    launch({n / ROUTED_ROWS, 1, 1}, 512, FEW_SHARED, few_routed, a);
    // Those of two blocks, and none of the others.
    failures += sums.back() != 2 * N_EXPERT || n < 2 * ROUTED_ROWS;
}

// Several rows: an expert's weights are read for all of its pairs.
static void test_few_pairs(u32 rows, u32 n_used, u32 d, u32 d_ff, bool has_shared, u32 each, u32 each_down) {
    const u32 n_expert = 5, pairs = rows * n_used;
    const Array<float> x = normals((size_t)rows * d);
    Array<float> gain = normals(d);
    Prologue p = {};
    p.kind = NORMED, p.w = gain.data(), p.eps = 1e-2f;
    const Weights gate((u64)n_expert * d_ff, d), up((u64)n_expert * d_ff, d), down((u64)n_expert * d, d_ff);
    const Weights sgate(d_ff, d), sup(d_ff, d), sdown(d, d_ff);
    gate.level(gain, d);
    const Array<float> in = after(p, x, rows, d), bias = normals((size_t)n_expert * d);
    Array<u32> ids;
    for (u32 i = 0; i < pairs; i++) ids.push_back((u32)(uniform() * n_expert));
    ids[pairs / 2] = n_expert + 3; // no expert
    const u32 shared_items = has_shared ? (rows + 3) / 4 : 0;
    const Array<u8> columns = packed(x, p, rows, d, VecOf<VecOf<WEIGHT>::type>::IS_GROUPED);
    Array<u8> hidden((size_t)pairs * column_bytes(d_ff), 0xff), shidden((size_t)rows * column_bytes(d_ff), 0xff);
    FewPairs f = {};
    Experts& a = f.op;
    a.ids = ids.data(), a.w = gate.matrix, a.up = up.matrix;
    a.rows = rows, a.n_used = n_used, a.n_expert = n_expert, a.n = d_ff, a.k = d;
    a.n_shared = has_shared, a.shared_w = sgate.matrix, a.shared_up = sup.matrix;
    f.columns = columns.data(), f.packed = hidden.data(), f.shared_packed = shidden.data(), f.each = each;
    const u32 tiles = (d_ff + 4 * each - 1) / (4 * each);
    launch({tiles * (pairs + shared_items), 1, 1}, 128, FEW_SHARED, few_pairs_gated, f);
    std::vector<double> want;
    for (u32 pair = 0; pair < pairs; pair++) {
        const float* row = &in[(size_t)(pair / n_used) * d];
        for (u32 i = 0; i < d_ff; i++) {
            const u64 at = (u64)ids[pair] * d_ff + i;
            want.push_back(ids[pair] < n_expert ? act(gate.dot(at, row, d), up.dot(at, row, d)) : 0);
        }
    }
    check("few pairs", unpacked(hidden, pairs, d_ff), want, 4 * VEC_LIMIT);
    if (has_shared) {
        want.clear();
        for (u32 t = 0; t < rows; t++) {
            for (u32 i = 0; i < d_ff; i++)
                want.push_back(act(sgate.dot(i, &in[(size_t)t * d], d), sup.dot(i, &in[(size_t)t * d], d)));
        }
        check("few pairs, shared", unpacked(shidden, rows, d_ff), want, 4 * VEC_LIMIT);
    }
    const Array<float> h = normals((size_t)pairs * d_ff), sh = normals((size_t)rows * d_ff);
    Array<float> out((size_t)pairs * d, NAN), sout((size_t)rows * d, NAN);
    const Array<u8> columns_h = packed(h, {}, pairs, d_ff), columns_sh = packed(sh, {}, rows, d_ff);
    a = {}, f.columns = columns_h.data(), f.shared_columns = columns_sh.data(), f.each = each_down;
    a.ids = ids.data(), a.w = down.matrix, a.out = out.data(), a.bias = bias.data();
    a.rows = rows, a.n_used = n_used, a.n_expert = n_expert, a.n = d, a.k = d_ff, a.x_per_pair = 1;
    a.n_shared = has_shared, a.shared_w = sdown.matrix, a.shared_out = sout.data();
    const u32 tiles_down = (d + 4 * each_down - 1) / (4 * each_down);
    launch({tiles_down * (pairs + shared_items), 1, 1}, 128, FEW_SHARED, few_pairs, f);
    want.clear();
    for (u32 pair = 0; pair < pairs; pair++) {
        for (u32 i = 0; i < d; i++) {
            const u64 at = (u64)ids[pair] * d + i;
            want.push_back(ids[pair] < n_expert ? down.dot(at, &h[(size_t)pair * d_ff], d_ff) + bias[at] : 0);
        }
    }
    check("few pairs down", out, want, 2 * VEC_LIMIT);
    if (!has_shared) return;
    want.clear();
    for (u32 t = 0; t < rows; t++) {
        for (u32 i = 0; i < d; i++) want.push_back(sdown.dot(i, &sh[(size_t)t * d_ff], d_ff));
    }
    check("few pairs down, shared", sout, want, 2 * VEC_LIMIT);
}

// Rows after a gate, packed.
static void test_few_pack(u32 rows, u32 k, u32 kind) {
    const Array<float> x = normals((size_t)rows * k), gates = normals((size_t)rows * k), gain = normals(128);
    Prologue p = {};
    p.kind = kind, p.w = gain.data(), p.gate = gates.data(), p.eps = 1e-2f;
    p.d_head = 128, p.gate_head = 128, p.gate_row = k;
    Array<u8> columns((size_t)rows * column_bytes(k));
    const PackColumns a = {x.data(), p, columns.data(), k, 0};
    launch({(k + 1023) / 1024, rows, 1}, 128, 0, few_pack, a);
    const Array<float> want = after(p, x, rows, k);
    check("few pack", unpacked(columns, rows, k), std::vector<double>(want.begin(), want.end()), 2e-2);
}

// One matrix of many rows.
static void test_few_long(u32 rows, u32 k, u32 n, u32 each, u32 stages, u32 threads) {
    const Array<float> x = normals((size_t)rows * k), gain = normals(k), bias = normals(n);
    Prologue p = {};
    p.kind = NORMED, p.w = gain.data(), p.eps = 1e-2f;
    const Weights w(n, k);
    const Array<float> in = after(p, x, rows, k);
    Array<float> out = normals((size_t)rows * n);
    FewLinear a = {{x.data(), rows, k, 1, 0, p, {}}, each, stages};
    a.op.parts[0] = {w.matrix, bias.data(), out.data(), n};
    const auto kernel = rows == 1 ? few_long1 : rows == 2 ? few_long2 : few_long4;
    launch({(n + each - 1) / each, 1, 1}, threads, FEW_SHARED, kernel, a);
    std::vector<double> want;
    for (u32 t = 0; t < rows; t++) {
        for (u32 j = 0; j < n; j++) want.push_back(w.dot(j, &in[(size_t)t * k], k) + bias[j]);
    }
    check("few long", out, want, 2 * VEC_LIMIT);
}

// Several rows, experts chosen by logits, each row its own; of the chosen, one that this part of a plan does not have.
static void test_few_experts_rows(u32 rows, u32 d, u32 d_ff, bool has_shared, u32 each, u32 stages, u32 each_down) {
    const u32 n_expert = 4, n_used = 3, pairs = rows * n_used, threads = 512;
    const Array<float> x = normals((size_t)rows * d), share = normals(rows);
    Array<float> gain = normals(d), logits = normals((size_t)rows * N_EXPERT);
    for (u32 i = 0; i < rows * N_EXPERT; i++) logits[i] -= i % N_EXPERT > n_expert ? 20 : 0;
    const Weights gate((u64)n_expert * d_ff, d), up((u64)n_expert * d_ff, d), down((u64)n_expert * d, d_ff);
    const Weights sgate(d_ff, d), sup(d_ff, d), sdown(d, d_ff);
    gate.level(gain, d);
    Prologue p = {};
    p.kind = NORMED, p.w = gain.data(), p.eps = 1e-2f;
    const Array<float> in = after(p, x, rows, d);
    const Array<float> gate_bias = normals((size_t)n_expert * d_ff);
    std::vector<u32> chosen;
    std::vector<double> worth;
    for (u32 t = 0; t < rows; t++) {
        std::vector<u32> order(n_expert + 1);
        for (u32 e = 0; e <= n_expert; e++) order[e] = e;
        const float* of = &logits[t * N_EXPERT];
        std::stable_sort(order.begin(), order.end(), [&](u32 a, u32 b) { return of[a] > of[b]; });
        double total = 0;
        for (u32 s = 0; s < n_used; s++) total += exp((double)of[order[s]] - of[order[0]]);
        for (u32 s = 0; s < n_used; s++) {
            chosen.push_back(order[s]), worth.push_back(exp((double)of[order[s]] - of[order[0]]) / total * 1.5);
        }
    }
    Array<float> hidden((size_t)pairs * d_ff, NAN), shidden((size_t)rows * d_ff, NAN);
    FewExperts a = {};
    a.op.x = x.data(), a.op.w = gate.matrix, a.op.up = up.matrix, a.op.bias = gate_bias.data();
    a.op.out = hidden.data(), a.op.rows = rows, a.op.n_used = n_used, a.op.n_expert = n_expert;
    a.op.n = d_ff, a.op.k = d, a.op.prologue = p;
    a.op.n_shared = has_shared, a.op.shared_n = has_shared ? d_ff : 0;
    a.op.shared_w = sgate.matrix, a.op.shared_up = sup.matrix, a.op.shared_out = shidden.data();
    a.route.logits = logits.data(), a.route.n_used = n_used, a.route.scale = 1.5f;
    a.route.n_local = n_expert;
    a.each = each, a.stages = stages;
    const u32 items = (pairs + (has_shared ? rows : 0)) * d_ff, of_block = each * threads / 32;
    launch({(items + of_block - 1) / of_block, 1, 1}, threads, FEW_SHARED, few_experts_rows, a);
    std::vector<double> want;
    for (u32 pair = 0; pair < pairs; pair++) {
        for (u32 i = 0; i < d_ff; i++) {
            const u64 at = (u64)chosen[pair] * d_ff + i;
            const float* const of = &in[(size_t)(pair / n_used) * d];
            want.push_back(chosen[pair] < n_expert ? act(gate.dot(at, of, d) + gate_bias[at], up.dot(at, of, d)) : 0);
        }
    }
    check("few experts, rows", hidden, want, 4 * VEC_LIMIT);
    if (has_shared) {
        want.clear();
        for (u32 t = 0; t < rows; t++) {
            const float* const of = &in[(size_t)t * d];
            for (u32 i = 0; i < d_ff; i++) want.push_back(act(sgate.dot(i, of, d), sup.dot(i, of, d)));
        }
        check("few experts, rows, shared", shidden, want, 4 * VEC_LIMIT);
    }
    const Array<float> h = normals((size_t)pairs * d_ff), sh = normals((size_t)rows * d_ff);
    Array<float> to = normals((size_t)rows * d);
    const Array<float> before = to;
    Array<u32> faults(1, ~0u), chunk_of(rows, 0);
    a.route.step.faults = faults.data(), a.route.step.chunk_of = chunk_of.data();
    FewDown b = {{h.data(), has_shared ? sh.data() : nullptr, share.data(), nullptr, nullptr, down.matrix, sdown.matrix,
                  nullptr, to.data(), rows, n_used, n_expert, d, d_ff, 1, d_ff, 0},
                 a.route, each_down, stages, nullptr};
    const auto kernel = has_shared ? few_down_rows_shared : few_down_rows;
    launch({(d + each_down - 1) / each_down, rows, 1}, threads, FEW_SHARED, kernel, b);
    want.clear();
    for (u32 t = 0; t < rows; t++) {
        for (u32 i = 0; i < d; i++) {
            double sum = before[(size_t)t * d + i];
            for (u32 pair = t * n_used; pair < (t + 1) * n_used; pair++) {
                if (chosen[pair] == n_expert) continue;
                sum += worth[pair] * down.dot((u64)chosen[pair] * d + i, &h[(size_t)pair * d_ff], d_ff);
            }
            if (has_shared) sum += sigma(share[t]) * sdown.dot(i, &sh[(size_t)t * d_ff], d_ff);
            want.push_back(sum);
        }
    }
    check("few down, rows", to, want, 2 * VEC_LIMIT);
    failures += faults[0] != ~0u;
}

static void test_pair() {
    const u32 rows = 2, k = 512, n = 19, n_b = 11;
    const Array<float> x = normals((size_t)rows * k);
    const Weights w(n, k);
    Array<u8> other((size_t)n_b * k / 32 * 34 + 16, 0);
    std::vector<float> values((size_t)n_b * k);
    for (size_t b = 0; b < (size_t)n_b * k / 32; b++) {
        other[b * 34 + 1] = 0x3c; // 1
        for (u32 i = 0; i < 32; i++) {
            other[b * 34 + 2 + i] = (u8)(i8)(uniform() * 255 - 127);
            values[b * 32 + i] = (i8)other[b * 34 + 2 + i];
        }
    }
    Array<float> out(rows * n, NAN), out_b(rows * n_b, NAN);
    LinearPair a = {};
    a.a = {x.data(), rows, k, 1, 0, {}, {}}, a.b = a.a, a.blocks_a = 2;
    a.a.parts[0] = {w.matrix, nullptr, out.data(), n};
    a.b.parts[0] = {{other.data()}, nullptr, out_b.data(), n_b};
    launch({5, 1, 1}, VEC_THREADS, SHARED, linear_pair_vec2, a);
    std::vector<double> want, want_b;
    for (u32 t = 0; t < rows; t++) {
        for (u32 j = 0; j < n; j++) want.push_back(w.dot(j, &x[(size_t)t * k], k));
        for (u32 j = 0; j < n_b; j++) {
            double sum = 0;
            for (u32 i = 0; i < k; i++) sum += (double)values[(size_t)j * k + i] * x[(size_t)t * k + i];
            want_b.push_back(sum);
        }
    }
    check("pair, first type", out, want, VEC_LIMIT);
    check("pair, second type", out_b, want_b, 2e-4);
}

// Adds to `want` what a head's query sees up to position `pos`; `at(p)`: where its keys and values of p begin; `total`
// begins the sum of the softmax.
template <class At>
static void attended(std::vector<double>& want, const Attend& a, const double* query, u32 pos, double total,
                     const Array<u16>& keys, const Array<u16>& values, const At& at) {
    std::vector<double> y(D);
    for (u32 p = a.window && pos + 1 > a.window ? pos + 1 - a.window : 0; p <= pos; p++) {
        double s = 0;
        for (u32 i = 0; i < D; i++) s += query[i] * float_of_f16(keys[at(p) + i]);
        const double e = exp(s * a.scale);
        total += e;
        for (u32 i = 0; i < D; i++) y[i] += e * float_of_f16(values[at(p) + i]);
    }
    for (u32 i = 0; i < D; i++) want.push_back(y[i] / total);
}

// One new position of each of several sequences; without `workers` by the kernel for short contexts.
// With shares, their sums are what products put out.
static void test_attend(u32 n_splits, u32 window, bool sinks, u32 group, u32 q_stride, u32 workers, u32 stages,
                        u32 n_shares = 0) {
    workers = std::min<u32>(workers, WORKERS);
    const u32 n_kv = 2, n_head = n_kv * group, tiles = (group + HEADS - 1) / HEADS, half = group == 3 ? D / 2 : 12;
    const std::vector<u32> positions = {70, 0, 31, 64};
    const u32 rows = positions.size(), per = 4;
    Array<float> q = normals((size_t)rows * n_head * q_stride), k = normals((size_t)rows * n_kv * D);
    Array<float> v = normals((size_t)rows * n_kv * D);
    const Array<float> wq = normals(D), wk = normals(D), sink = normals(n_head);
    const u32 width = (n_head + 2 * n_kv) * D;
    const Array<float> sums = normals((size_t)n_shares * rows * width);
    const auto shares = [&](Array<float>& whole, u32 first, u32 n) {
        for (size_t i = 0; n_shares > 0 && i < whole.size(); i++) {
            whole[i] = 0;
            for (u32 s = 0; s < n_shares; s++) whole[i] += sums[((size_t)s * rows + i / n) * width + first + i % n];
        }
        return Shares{sums.data() + first, (u64)rows * width, width, n_shares};
    };
    const Shares of[3] = {shares(q, 0, n_head * D), shares(k, n_head * D, n_kv * D),
                          shares(v, (n_head + n_kv) * D, n_kv * D)};
    Array<float> table(rows * half * 2), out((size_t)rows * n_head * D, NAN);
    for (u32 i = 0; i < rows * half; i++) {
        const double angle = uniform() * 6;
        table[2 * i] = (float)cos(angle), table[2 * i + 1] = (float)sin(angle);
    }
    const size_t plane = (size_t)rows * per * n_kv * PAGE * D;
    Array<u16> keys(plane, 0x7e00), values(plane, 0x7e00); // NaN where nothing was written
    const auto at = [&](u32 t, u32 head, u32 p) {
        return (((size_t)(t * per + p / PAGE) * n_kv + head) * PAGE + p % PAGE) * D;
    };
    for (u32 t = 0; t < rows; t++) {
        for (u32 h = 0; h < n_kv; h++) {
            for (u32 p = 0; p < positions[t]; p++) {
                for (u32 i = 0; i < D; i++)
                    keys[at(t, h, p) + i] = kv_store(normal()), values[at(t, h, p) + i] = kv_store(normal());
            }
        }
    }
    Array<u32> pos, chunk_of, pages;
    Array<Chunk> chunks;
    for (u32 t = 0; t < rows; t++) {
        pos.push_back(positions[t]), chunk_of.push_back(t);
        chunks.push_back({t, 1, positions[t], t * per, 0, 0, 0, 0});
        for (u32 i = 0; i < per; i++) pages.push_back(t * per + i);
    }
    Array<float> partial((size_t)rows * n_kv * tiles * n_splits * HEADS * (D + 4), NAN);
    Array<u32> counters(rows * n_kv * tiles, 0);
    Attend a = {};
    a.step.positions = pos.data(), a.step.chunk_of = chunk_of.data(), a.step.chunks = chunks.data();
    a.step.pages = pages.data();
    a.q = {(float*)q.data(), wq.data(), nullptr, n_head, D, 1, 1};
    a.k = {(float*)k.data(), wk.data(), keys.data(), n_kv, D, 1, 1};
    a.v = {(float*)v.data(), nullptr, values.data(), n_kv, D, 0, 0};
    a.q.shares = of[0], a.k.shares = of[1], a.v.shares = of[2];
    if (n_shares > 0) a.q.x = a.k.x = a.v.x = nullptr;
    a.table = table.data(), a.k_cache = keys.data(), a.v_cache = values.data();
    a.sinks = sinks ? sink.data() : nullptr, a.out = out.data(), a.partial = partial.data();
    a.counters = counters.data(), a.n_kv = n_kv, a.n_splits = n_splits, a.window = window;
    a.rows = rows, a.half = half, a.q_stride = q_stride, a.n_tiles = tiles, a.scale = 0.125f, a.eps = 1e-2f;
    if (n_splits == 3) a.counters = nullptr;
    a.workers = workers, a.stages = stages;
    Array<u8> columns((size_t)rows * column_bytes(n_head * D) + 16, 0xff);
    a.columns = columns.data();
    const u32 n_shared = workers * stages * 2 * 16 * (D + 8) * 2;
    const u32 blocks = rows * tiles * n_kv * n_splits + 2;
    if (workers > 0) {
        launch({blocks, 1, 1}, 32 * WORKERS, n_shared, attend_long, a);
    } else {
        launch({blocks, 1, 1}, 256, 0, attend, a);
    }
    if (n_splits == 3) launch({rows * n_head, 1, 1}, 256, 0, attend_merge, a);
    const auto turned = [&](const float* x, const float* w, u32 t) {
        std::vector<double> y(D);
        double squares = 0;
        for (u32 i = 0; i < D; i++) squares += (double)x[i] * x[i];
        for (u32 i = 0; i < D; i++) y[i] = x[i] / sqrt(squares / D + a.eps) * w[i];
        for (u32 i = 0; i < half; i++) {
            const double u = y[i], z = y[i + half], c = table[2 * (t * half + i)], s = table[2 * (t * half + i) + 1];
            y[i] = u * c - z * s, y[i + half] = u * s + z * c;
        }
        return y;
    };
    const auto half_of = [](u16 bits) { return (double)float_of_f16(bits); };
    std::vector<double> want;
    for (u32 t = 0; t < rows; t++) {
        for (u32 h = 0; h < n_head; h++) {
            const u32 g = h / group;
            const auto new_k = turned(&k[((size_t)t * n_kv + g) * D], wk.data(), t);
            const auto query = turned(&q[((size_t)t * n_head + h) * q_stride], wq.data(), t);
            for (u32 i = 0; i < D; i++) {
                failures += keys[at(t, g, positions[t]) + i] == 0x7e00;
                failures += fabs(half_of(keys[at(t, g, positions[t]) + i]) - new_k[i]) > 4e-3;
                failures += values[at(t, g, positions[t]) + i] != kv_store(v[((size_t)t * n_kv + g) * D + i]);
            }
            attended(want, a, query.data(), positions[t], sinks ? exp((double)sink[h]) : 0, keys, values,
                     [&](u32 p) { return at(t, g, p); });
        }
    }
    for (u32 c : counters) failures += c != 0;
    check(workers > 0 ? "attend, long" : n_splits > 1 ? "attend, splits" : "attend", out, want, 1e-5);
    check("attend, packed", unpacked(columns, rows, n_head * D), want, 1e-2);
    if (workers == 0) return;
    // Alongside prompts: every third token is a chunk of one, whose head rows are ready and whose keys and values are
    // in the cache alone.
    const u32 all = 3 * rows;
    Array<float> ready((size_t)all * n_head * D, NAN), among((size_t)all * n_head * D, NAN);
    Array<u32> pos3(all, ~0u), chunk_of3(all, ~0u);
    for (u32 t = 0; t < rows; t++) {
        const u32 token = 3 * t + 1, chunk = rows - 1 - t;
        pos3[token] = positions[t], chunk_of3[token] = chunk, chunks[t].single = token;
        for (u32 h = 0; h < n_head; h++) {
            const auto query = turned(&q[((size_t)t * n_head + h) * q_stride], wq.data(), t);
            for (u32 i = 0; i < D; i++) ready[((size_t)token * n_head + h) * D + i] = (float)query[i];
        }
    }
    for (u32 t = 0; t < rows; t++) chunks[rows - 1 - t].first_page = t * per;
    a.step.positions = pos3.data(), a.step.chunk_of = chunk_of3.data();
    a.q = {ready.data(), nullptr, nullptr, n_head, D, 0, 0}, a.k = a.v = {nullptr, nullptr, nullptr, n_kv, D, 0, 0};
    a.q_stride = D, a.out = among.data(), a.columns = nullptr, a.singles = 1, a.cached = 1;
    launch({blocks, 1, 1}, 32 * WORKERS, n_shared, attend_long, a);
    if (n_splits == 3) launch({rows * n_head, 1, 1}, 256, 0, attend_merge, a);
    Array<float> found;
    for (u32 token = 0; token < all; token++) {
        for (u32 i = 0; i < n_head * D; i++) {
            const float x = among[(size_t)token * n_head * D + i];
            if (token % 3 == 1) found.push_back(x); else failures += x == x;
        }
    }
    check("attend, alongside prompts", found, want, 1e-5);
}

// Tokens of one sequence, from a position on, which see each other: their keys and values come from a launch before.
static void test_attend_chunk(u32 rows, u32 pos, u32 n_splits, u32 window, u32 group, u32 workers, u32 stages) {
    workers = std::min<u32>(workers, WORKERS);
    const u32 n_kv = 2, n_head = n_kv * group, tiles = (group + HEADS - 1) / HEADS, per = (pos + rows) / PAGE + 1;
    const Array<float> q = normals((size_t)rows * n_head * D);
    Array<float> out((size_t)rows * n_head * D, NAN);
    const size_t plane = (size_t)per * n_kv * PAGE * D;
    Array<u16> keys(plane, 0x7e00), values(plane, 0x7e00); // NaN where nothing was written
    const auto at = [&](u32 head, u32 p) { return ((size_t)(p / PAGE * n_kv + head) * PAGE + p % PAGE) * D; };
    for (u32 h = 0; h < n_kv; h++) {
        for (u32 i = 0; i < (pos + rows) * D; i++) {
            keys[at(h, i / D) + i % D] = kv_store(normal()), values[at(h, i / D) + i % D] = kv_store(normal());
        }
    }
    const Array<u16> all_keys = keys, all_values = values;
    Array<u32> positions, pages, chunk_of(rows, 0);
    for (u32 t = 0; t < rows; t++) positions.push_back(pos + t);
    for (u32 i = 0; i < per; i++) pages.push_back(i);
    const Array<Chunk> chunks = {{0, rows, pos, 0, 0, 0, 0, 0}};
    Array<float> partial((size_t)rows * n_kv * tiles * n_splits * HEADS * (D + 4), NAN);
    Array<u32> counters(rows * n_kv * tiles, 0);
    Attend a = {};
    a.step.positions = positions.data(), a.step.chunk_of = chunk_of.data(), a.step.chunks = chunks.data();
    a.step.pages = pages.data();
    a.q = {(float*)q.data(), nullptr, nullptr, n_head, D, 0, 0}, a.k = a.v = {nullptr, nullptr, nullptr, n_kv, D, 0, 0};
    a.k_cache = keys.data(), a.v_cache = values.data(), a.out = out.data(), a.partial = partial.data();
    a.counters = counters.data(), a.n_kv = n_kv, a.n_splits = n_splits, a.window = window;
    a.rows = rows, a.q_stride = D, a.n_tiles = tiles, a.scale = 0.125f;
    a.workers = workers, a.stages = stages, a.cached = 1;
    emulate::earlier = [&](bool is_done) {
        for (u32 h = 0; h < n_kv; h++) {
            for (u32 i = pos * D; i < (pos + rows) * D; i++) {
                const size_t place = at(h, i / D) + i % D;
                keys[place] = is_done ? all_keys[place] : 0x7e00, values[place] = is_done ? all_values[place] : 0x7e00;
            }
        }
    };
    launch({rows * tiles * n_kv * n_splits, 1, 1}, 32 * WORKERS, workers * stages * 2 * 16 * (D + 8) * 2, attend_long,
           a);
    emulate::earlier = nullptr;
    std::vector<double> want;
    for (u32 t = 0; t < rows; t++) {
        for (u32 h = 0; h < n_head; h++) {
            const float* row = &q[((size_t)t * n_head + h) * D];
            attended(want, a, std::vector<double>(row, row + D).data(), pos + t, 0, all_keys, all_values,
                     [&](u32 p) { return at(h / group, p); });
        }
    }
    check("attend, tokens that see each other", out, want, 1e-5);
}

int main() {
    const u32 block = WEIGHT::BLOCK, k3 = block == 1 ? 515 : (block < 256 ? 11 : 3) * block;
    const u32 k = block < 256 ? 128 : 256;
    for (int order = 0; order < 2; order++) {
        descending = order;
        test_linear("normed vec1", linear_vec1, 1, k3, 33, {nullptr, nullptr, NORMED}, false, 2);
        test_linear("normed vec4, 3 columns", linear_vec4, 3, k3, 33, {nullptr, nullptr, NORMED}, false, 1);
        test_linear("normed vec8 long", linear_vec8, 7, 4608, 9, {nullptr, nullptr, NORMED}, false, 1);
        test_linear("normed vec8 long, tiles", linear_vec8, 8, 4608, 70, {nullptr, nullptr, NORMED}, true, 2);
        test_linear("gated, added", linear_vec2, 2, 512, 17, {nullptr, nullptr, GATED, 64, 128, 1024}, true, 1);
        test_linear("gated norm", linear_vec8, 5, 512, 9, {nullptr, nullptr, GATED_NORM, 128, 128, 512}, false, 1);
        test_linear("gated norm, small heads", linear_vec1, 1, 512, 9,
                    {nullptr, nullptr, GATED_NORM, 16, 32, 1024}, false, 1);
        test_pair();
        test_router(1, k3, false);
        test_router(7, k3, false);
        test_router(1, k3, true);
        test_router(5, block == 1 ? 132 : 4 * block, true);
        test_experts(1, 4, k, k, true, k);
        test_experts(3, 2, k, 2 * k, false, k);
        test_experts(2, 3, k, k, true, 3 * k);
        if constexpr (IS_FEW) {
            const u32 whole = WEIGHT::BYTES % 16 && block == 32 ? 256 : block == 32 ? 96 : 2048;
            test_few_linear("few", few_linear1, 1, whole, 70, {nullptr, nullptr, NORMED}, false, 23, 640);
            test_few_linear("few, added", few_linear1, 1, 2048, 40, {}, true, 40, 512);
            test_few_linear("few, 2 columns", few_linear2, 2, whole, 21, {nullptr, nullptr, NORMED}, true, 11, 512);
            test_few_linear("few, 3 columns", few_linear4, 3, whole, 21, {}, false, 8, 512);
            test_few_linear("few, 8 columns", few_linear8, 8, 2048, 9, {nullptr, nullptr, NORMED}, false, 5, 512);
            test_few_linear("few, 2 packed", few_linear2, 2, 2048, 21, {}, true, 11, 512, true);
            test_few_linear("few, 7 packed", few_linear8, 7, 2048, 9, {nullptr, nullptr, NORMED}, false, 5, 512, true);
            test_few_linear("few, 8 packed", few_linear8, 8, 4096, 9, {nullptr, nullptr, NORMED}, true, 9, 512, true);
            test_few_linear("few, gated", few_gated1, 1, 2048, 17, {nullptr, nullptr, GATED, 64, 128, 4096}, true, 9,
                            640);
            test_few_linear("few, gated norm", few_gated8, 5, 2048, 9,
                            {nullptr, nullptr, GATED_NORM, 128, 128, 2048}, false, 9, 512);
            test_few_experts(2048, 256, true, true, 0, 37, 16);
            test_few_experts(2048, 256, false, true, 5, 37, 16);
            test_few_routed(whole, 64);
            // A warp's rows begin where copies may, as in all launches.
            if (256 / WEIGHT::BLOCK * WEIGHT::BYTES % 16 == 0) {
                test_few_experts(256, 512, true, true, 64, 50, 24);
                test_few_experts(256, 512, false, false, 0, 50, 24);
            }
            test_few_experts(2048, 256, true, true, 0, 37, 16, 768);
            test_few_pairs(6, 2, 2048, 256, true, 8, 16);
            test_few_pairs(5, 3, 256, 768, false, 24, 8);
            if (whole == 2048 || block == 32) test_few_long(1, block == 32 ? 256 : 2816, 72, 22, 2, 64);
            test_few_long(1, 2048, 40, 20, 3, 96);
            test_few_long(2, 2048, 40, 20, 2, 96);
            test_few_pack(3, 2048, GATED_NORM);
            test_few_pack(2, 384, GATED);
            test_few_long(3, 2048, 24, 12, 2, 64);
            test_few_experts_rows(2, 2048, 256, true, 37, 2, 16);
            test_few_experts_rows(4, 2048, 256, false, 50, 2, 8);
            test_few_experts_rows(3, 2048, 512, true, 50, 2, 16);
            test_few_linear("few, 4 gated norm", few_gated4, 4, 2048, 9,
                            {nullptr, nullptr, GATED_NORM, 128, 128, 2048}, false, 9, 640);
            test_few_linear("few, 4 columns", few_linear4, 4, 2048, 70, {nullptr, nullptr, NORMED}, true, 41, 640);
            test_few_linear("few, 8 columns", few_linear8, 6, 512, 50, {}, true, 48, 512);
            test_few_linear("few, 3 packed", few_linear4, 3, 2048, 21, {nullptr, nullptr, NORMED}, true, 11, 640, true);
        }
    }
    if (block != 1) return failures != 0;
    for (int order = 0; order < 2; order++) {
        descending = order;
        test_attend(1, 0, false, 3, D, 0, 0);
        test_attend(2, 0, true, 6, 2 * D, 0, 0);
        test_attend(3, 40, true, 4, D, 0, 0);
        test_attend(1, 33, true, 1, D, 0, 0);
        test_attend(1, 0, false, 3, D, 8, 1);
        test_attend(2, 0, true, 6, 2 * D, 2, 2);
        test_attend(3, 40, true, 4, D, 4, 1);
        test_attend(1, 33, true, 1, D, 1, 2);
        test_attend(1, 0, false, 4, D, 3, 1);
        test_attend(1, 0, false, 4, D, 8, 1, 3);
        test_attend(1, 33, true, 8, D, 2, 2, 9);
        test_attend(1, 0, false, 3, D, 8, 1, 2);
        test_attend(1, 0, false, 4, D, 0, 0, 5);
        test_attend_chunk(4, 90, 1, 0, 4, 8, 1);
        test_attend_chunk(4, 30, 1, 0, 4, 1, 2);
        test_attend_chunk(20, 13, 2, 0, 3, 1, 2);
        test_attend_chunk(5, 96, 2, 40, 4, 2, 2);
        test_attend_chunk(3, 0, 1, 0, 4, 4, 1);
    }
    return failures != 0;
}
