// The kernels of steps of 9 to 64 rows, for one type, against sums in double: emulated on this machine (`host/run.sh`).
#include "emulate.h"

#include "cuda/combine.cu"
#include "cuda/expert_lists.cu"
#include "cuda/experts_batch.cu"
#undef BATCH
#include "cuda/gated_linear_batch.cu"
#undef BATCH
#include "cuda/linear_batch.cu"
#include "cuda/logits.cu"
#define values pack_values
#include "cuda/pack.cu"
#undef values

alignas(16) uint4 shared[262144 / 16];

#include "weights.h"

typedef BatchOf<WEIGHT>::type Type;

static double sigma(double x) { return 1 / (1 + exp(-x)); }
static double silu(double g, double u) { return g / (1 + exp(-g)) * u; }

template <class T>
static u32 stride_of(u32 k) {
    const u32 units = (k + T::UNIT - 1) / T::UNIT;
    return (units + 3) / 4 * T::RUNS * 64;
}
// Not written where nothing is: whoever reads it gets NaN.
static Array<u16> packed_rows(u32 rows, u32 k) { return Array<u16>((size_t)rows * stride_of<Type>(k), 0x7fff); }

static Array<u16> packed(const Array<float>& x, u32 rows, u32 k, Prologue p, Array<float>* as_f32 = nullptr) {
    Array<u16> out = packed_rows(rows, k);
    Pack a = {(float*)x.data(), nullptr, p, {{out.data(), stride_of<Type>(k), Type::RUNS, Type::PAIRED}}, rows, k};
    if (as_f32) as_f32->assign(x.size(), NAN), a.to[1] = {as_f32->data(), k};
    launch<Pack>({rows, 1, 1}, 64, 0, pack, a);
    return out;
}

typedef void (*LinearKernel)(const BatchLinear);
static void test_linear(const char* name, LinearKernel kernel, u32 rows, u32 k, std::vector<u64> n, u32 blocks,
                        u32 n_split, u32 warps, bool add, u32 bad = ~0u) {
    Array<float> x = normals((size_t)rows * k), bias = normals(1000);
    if (bad < rows) x[(size_t)bad * k + k / 3] = NAN;
    const Array<u16> in = packed(x, rows, k, {});
    BatchLinear a = {{nullptr, rows, k, (u32)n.size(), add, {}, {}}, {in.data(), stride_of<Type>(k), n_split}};
    std::vector<Weights> w;
    std::vector<Array<float>> out;
    for (u64 n : n) w.emplace_back(n, k), out.emplace_back(rows * n, add ? 0.5f : NAN);
    for (size_t i = 0; i < n.size(); i++)
        a.op.parts[i] = {w[i].matrix, i % 2 ? bias.data() : nullptr, out[i].data(), n[i]};
    launch({blocks, 1, 1}, 32 * warps, SHARED, kernel, a);
    Array<float> got;
    std::vector<double> want;
    for (size_t i = 0; i < n.size(); i++) {
        for (u32 t = 0; t < rows; t++) {
            for (u64 j = 0; j < n[i]; j++) {
                const float y = out[i][t * n[i] + j];
                if (t == bad) {
                    failures += std::isfinite(y);
                    continue;
                }
                got.push_back(y);
                want.push_back(w[i].dot(j, &x[(size_t)t * k], k) + (i % 2 ? bias[j] : 0) + (add ? 0.5 : 0));
            }
        }
    }
    check(name, got, want, (k == WEIGHT::BLOCK ? 2 : 1) * TILE_LIMIT);
}

static void test_gated(u32 rows, u32 k, u32 n) {
    Array<float> x = normals((size_t)rows * k);
    const Weights gate(n, k), up(n, k);
    gate.level(x, k);
    const Array<u16> in = packed(x, rows, k, {});
    Array<float> out((size_t)rows * n, NAN);
    const BatchGatedLinear a = {{nullptr, gate.matrix, up.matrix, out.data(), rows, k, n, ACT_SILU, 0, 0, {}},
                                {in.data(), stride_of<Type>(k), 2}};
    launch({2, 1, 1}, 128, SHARED, gated_linear_batch2, a);
    std::vector<double> want;
    for (u32 t = 0; t < rows; t++) {
        for (u32 i = 0; i < n; i++)
            want.push_back(silu(gate.dot(i, &x[(size_t)t * k], k), up.dot(i, &x[(size_t)t * k], k)));
    }
    check("gated batch", out, want, 3 * TILE_LIMIT);
}

typedef void (*ExpertsKernel)(const BatchExperts);
static void test_experts(const char* name, ExpertsKernel first_kernel, ExpertsKernel last_kernel, u32 rows, u32 n_used,
                         u32 n_expert, u32 d, u32 d_ff, bool has_shared) {
    const u32 pairs = rows * n_used, all = pairs + (has_shared ? rows : 0);
    Array<float> x = normals((size_t)rows * d);
    const Weights gate((u64)n_expert * d_ff, d), up((u64)n_expert * d_ff, d), down((u64)n_expert * d, d_ff);
    const Weights sgate(d_ff, d), sup(d_ff, d), sdown(d, d_ff);
    gate.level(x, d);
    const Array<float> bias = normals((size_t)n_expert * d_ff), up_bias = normals((size_t)n_expert * d_ff);
    const Array<float> down_bias = normals((size_t)n_expert * d);
    Array<u32> ids, first(n_expert + 1), listed(pairs, ~0u), places(pairs);
    for (u32 i = 0; i < pairs; i++) ids.push_back((u32)(uniform() * uniform() * n_expert));
    launch({n_expert, 1, 1}, 256, SHARED, expert_lists,
           ExpertLists{ids.data(), first.data(), listed.data(), places.data(), {}, {}, pairs, n_expert});
    const Array<u16> in = packed(x, rows, d, {});
    Array<u16> hidden = packed_rows(all, d_ff);
    BatchExperts a = {};
    a.op.ids = ids.data(), a.op.w = gate.matrix, a.op.up = up.matrix, a.op.bias = bias.data();
    a.op.up_bias = up_bias.data(), a.op.first = first.data(), a.op.pairs = listed.data();
    a.op.rows = rows, a.op.n_used = n_used, a.op.n_expert = n_expert, a.op.n = d_ff, a.op.k = d;
    a.op.n_shared = has_shared, a.op.shared_w = sgate.matrix, a.op.shared_up = sup.matrix;
    a.columns = {in.data(), stride_of<Type>(d), 2};
    a.hidden = hidden.data(), a.hidden_stride = stride_of<Type>(d_ff);
    a.hidden_runs = Type::RUNS, a.hidden_paired = Type::PAIRED;
    launch({3, 1, 1}, 128, SHARED, first_kernel, a);
    // What the product wrote is what the next one reads, in double.
    Array<float> h((size_t)all * d_ff), out((size_t)pairs * d, NAN), shared_out((size_t)rows * d, NAN);
    std::vector<double> want;
    for (u32 pair = 0; pair < all; pair++) {
        const bool is_shared = pair >= pairs;
        const float* row = &x[(size_t)(is_shared ? pair - pairs : pair / n_used) * d];
        for (u32 i = 0; i < d_ff; i++) {
            const u64 at = is_shared ? i : (u64)ids[pair] * d_ff + i;
            const double g = is_shared ? sgate.dot(at, row, d) : gate.dot(at, row, d) + bias[at];
            want.push_back(silu(g, is_shared ? sup.dot(at, row, d) : up.dot(at, row, d) + up_bias[at]));
            const u16 bits = hidden[(size_t)pair * a.hidden_stride + packed_at(i, Type::RUNS, Type::PAIRED)];
            h[(size_t)pair * d_ff + i] = float_of_bf16(bits);
        }
    }
    char what[100];
    snprintf(what, sizeof what, "%s up", name);
    check(what, h, want, 3 * TILE_LIMIT + 4e-3);
    BatchExperts b = a;
    b.op.w = down.matrix, b.op.up = {}, b.op.bias = down_bias.data(), b.op.up_bias = nullptr, b.op.out = out.data();
    b.op.n = d, b.op.k = d_ff, b.op.x_per_pair = 1, b.op.shared_w = sdown.matrix, b.op.shared_out = shared_out.data();
    b.columns = {hidden.data(), a.hidden_stride, 1}, b.hidden = nullptr;
    launch({2, 1, 1}, 96, SHARED, last_kernel, b);
    want.clear();
    for (u32 pair = 0; pair < pairs; pair++) {
        for (u32 i = 0; i < d; i++) {
            const u64 at = (u64)ids[pair] * d + i;
            want.push_back(down.dot(at, &h[(size_t)pair * d_ff], d_ff) + down_bias[at]);
        }
    }
    snprintf(what, sizeof what, "%s down", name);
    check(what, out, want, (d_ff == WEIGHT::BLOCK ? 2 : 1) * TILE_LIMIT);
    if (!has_shared) return;
    const Array<float> share = normals(rows), weights = normals(pairs), before = normals((size_t)rows * d);
    Array<float> sum = before;
    Combine c = {};
    c.x = sum.data(), c.y = out.data(), c.weights = weights.data(), c.shared_y = shared_out.data();
    c.share = share.data(), c.rows = rows, c.n_used = n_used, c.d = d, c.add = 1;
    launch({rows, 1, 1}, 96, 0, combine, c);
    want.clear();
    for (u32 t = 0; t < rows; t++) {
        for (u32 i = 0; i < d; i++) {
            double y = before[(size_t)t * d + i];
            for (u32 s = 0; s < n_used; s++) y += weights[t * n_used + s] * out[(size_t)(t * n_used + s) * d + i];
            want.push_back(y + sigma(share[t]) * sdown.dot(i, &h[(size_t)(pairs + t) * d_ff], d_ff));
        }
    }
    check("shared, combined", sum, want, TILE_LIMIT);
    if (d % 8) return;
    // The same rows as bf16 in another order, and a norm.
    Array<u16> rounded((size_t)pairs * d);
    Array<u32> at(pairs);
    Array<float> again = before, normed((size_t)rows * d), norm = normals(d);
    for (u32 pair = 0; pair < pairs; pair++) {
        at[pair] = pairs - 1 - pair;
        for (u32 i = 0; i < d; i++) rounded[(size_t)at[pair] * d + i] = (u16)bf16_bits(out[(size_t)pair * d + i]);
    }
    c.x = again.data(), c.y = (const float*)rounded.data(), c.places = at.data();
    c.norm_w = norm.data(), c.norm_out = normed.data(), c.eps = 1e-5f;
    // In two forms besides, which are those that `pack` makes of the rows, after a norm of what is added up there.
    const u32 n_groups = (rows + 7) / 8;
    std::vector<Array<u32>> forms(4, Array<u32>((size_t)n_groups * 4 * d * 2, 0x7fff7fff));
    const auto form = [&](int i, u32 split) {
        return PackTo{forms[i].data(), d, split ? 1 : Type::RUNS, split ? 0 : Type::PAIRED, n_groups, split, 0};
    };
    const bool is_whole = stride_of<Type>(d) == d;
    if (is_whole) c.packed[0] = form(0, 0), c.packed[1] = form(1, 1);
    launch({rows, 1, 1}, 32, 0, combine_listed, c);
    check("listed, combined", again, want, TILE_LIMIT);
    if (is_whole) {
        Array<float> x = normals((size_t)rows * d), plain((size_t)rows * d, NAN), residual = again;
        for (size_t i = 0; i < x.size(); i++) residual[i] -= x[i];
        const Array<float> first = x;
        Pack p = {x.data(), residual.data(), {norm.data(), nullptr, NORMED, 0, 0, 0, 1e-5f}, {}, rows, d};
        p.to[0] = form(2, 0), p.to[1] = form(3, 1), p.to[2] = {plain.data(), d};
        launch<Pack>({rows, 1, 1}, 64, 0, pack, p);
        for (size_t i = 0; i < x.size(); i++) {
            failures += x[i] != first[i] + residual[i];
            failures += !(fabsf(plain[i] - normed[i]) < 1e-5f * (1 + fabsf(plain[i])));
        }
        // Numbers that differ in their last bits may round to neighbors.
        for (int split = 0; split < 2; split++) {
            size_t apart = 0;
            for (size_t i = 0; i < forms[split].size(); i++) {
                const u32 a = forms[split][i], b = forms[2 + split][i];
                apart += a != b;
                if (!split) failures += abs((int)(a & 0xffff) - (int)(b & 0xffff)) > 1;
            }
            failures += !split && apart > x.size() / 50;
            failures += split && apart == forms[split].size();
        }
    }
    for (u32 t = 0; t < rows; t++) {
        double squares = 0;
        for (u32 i = 0; i < d; i++) squares += want[(size_t)t * d + i] * want[(size_t)t * d + i];
        for (u32 i = 0; i < d; i++) want[(size_t)t * d + i] *= norm[i] / sqrt(squares / d + 1e-5);
    }
    check("listed, normed", normed, want, TILE_LIMIT);
}

static void test_logits(u32 rows, u32 k, u32 n) {
    const Array<float> x = normals((size_t)rows * k), gain = normals(k);
    Prologue p = {gain.data(), nullptr, NORMED, 0, 0, 0, 1e-2f};
    const Weights w(n, k), other(1, k);
    Array<float> out(rows * n, NAN), out_other(rows, NAN);
    Router a = {};
    a.linear = {x.data(), rows, k, 2, 0, p, {}};
    a.linear.parts[0] = {w.matrix, nullptr, out.data(), n};
    a.linear.parts[1] = {other.matrix, nullptr, out_other.data(), 1};
    a.scale = 0.5f;
    launch({(n + 2) / 2, (rows + 7) / 8, 1}, 128, 0, logits, a);
    std::vector<double> want, want_other;
    for (u32 t = 0; t < rows; t++) {
        double squares = 0;
        Array<float> row(k);
        for (u32 i = 0; i < k; i++) squares += (double)x[(size_t)t * k + i] * x[(size_t)t * k + i];
        for (u32 i = 0; i < k; i++) row[i] = (float)(x[(size_t)t * k + i] * gain[i] / sqrt(squares / k + 1e-2f));
        for (u32 j = 0; j < n; j++) want.push_back(0.5 * w.dot(j, row.data(), k));
        want_other.push_back(other.dot(0, row.data(), k));
    }
    check("logits", out, want, 1e-5);
    check("logits, other part", out_other, want_other, 1e-5);
}

// What `pack` does before it rounds.
static void test_pack(u32 rows, u32 k, Prologue p, const char* name) {
    const Array<float> x = normals((size_t)rows * k), gain = normals(k), gate = normals((size_t)rows * k * 2 + 64);
    p.eps = 1e-2f, p.w = gain.data(), p.gate = gate.data() + 8;
    Array<float> got;
    const Array<u16> in = packed(x, rows, k, p, &got);
    std::vector<double> want;
    const u32 d = p.kind == NORMED ? k : p.d_head;
    for (u32 t = 0; t < rows; t++) {
        for (u32 i = 0; i < k; i++) {
            double squares = 0;
            for (u32 j = i / d * d; j < i / d * d + d; j++) squares += (double)x[(size_t)t * k + j] * x[(size_t)t * k + j];
            const double r = 1 / sqrt(squares / d + p.eps), v = x[(size_t)t * k + i];
            const double g = p.gate[(u64)t * p.gate_row + i / d * p.gate_head + i % d];
            want.push_back(p.kind == NORMED  ? v * r * p.w[i]
                           : p.kind == GATED ? v * sigma(g)
                                             : v * r * p.w[i % d] * g * sigma(g));
            const u16 bits = in[(size_t)t * stride_of<Type>(k) + packed_at(i, Type::RUNS, Type::PAIRED)];
            failures += bits != to_bf16(got[(size_t)t * k + i]);
        }
    }
    check(name, got, want, 1e-6);
}

int main() {
    const u32 block = WEIGHT::BLOCK, k1 = block == 1 ? 37 : block;
    const u32 k3 = block == 1 ? 515 : (block < 256 ? 11 : 3) * block, k = block < 256 ? 128 : 256;
    for (int order = 0; order < 2; order++) {
        descending = order;
        test_pack(3, 1536, {nullptr, nullptr, NORMED}, "pack, norm");
        test_pack(2, 512, {nullptr, nullptr, GATED, 64, 128, 1024}, "pack, gate");
        test_pack(2, 1024, {nullptr, nullptr, GATED_NORM, 128, 128, 1024}, "pack, gated norm");
        test_logits(11, k3, 6);
        test_linear("batch2 one block", linear_batch2, 9, k1, {21}, 1, 1, 1, false);
        test_linear("batch2 split", linear_batch2, 13, k3, {37, 1, 4}, 2, 2, 4, true);
        test_linear("batch3 long", linear_batch3, 33, 4608, {33}, 2, 3, 6, false);
        test_linear("batch4 passes", linear_batch4, 27, 4608, {50}, 3, 2, 2, false);
        test_linear("batch2 nan", linear_batch2, 10, k3, {21}, 1, 2, 4, false, 3);
        test_gated(11, k3, 33);
        test_experts("experts batch1", experts_gated_batch1, experts_batch1, 11, 2, 5, k, k1, true);
        test_experts("experts batch2", experts_gated_batch2, experts_batch2, 40, 2, 35, k1, k, false);
        test_experts("experts batch4", experts_gated_batch4, experts_batch4, 40, 3, 3, k, 2 * k, true);
    }
    return failures != 0;
}
