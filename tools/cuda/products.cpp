// The kernels that read weights, for one type, against sums in double of the decoded weights: emulated on this machine
// (`host/run.sh`), or on a GPU (`products.sh`), which with an argument also measures.
#ifdef __CUDACC__
#include "device.h"
#else
#include "emulate.h"
#endif

#include "cuda/linear.cu"
#undef VEC
#undef TILE
#include "cuda/gated_linear.cu"
#undef VEC
#undef TILE
#include "cuda/experts.cu"
#undef TILE
#undef GATED_TILE
#include "cuda/embed.cu"
#include "cuda/expert_lists.cu"
#include "cuda/head_linear.cu"
#undef VEC
#undef TILE
#include "cuda/linear_wide.cu"
#include "cuda/pack.cu"
#include "cuda/gated_linear_wide.cu"
#include "cuda/experts_wide.cu"

#ifndef __CUDACC__
alignas(1024) uint4 shared[262144 / 16];
#endif

#include "weights.h"

typedef void (*LinearKernel)(const Linear);
typedef void (*GatedKernel)(const GatedLinear);
typedef void (*HeadKernel)(const HeadLinear);
typedef void (*ExpertsKernel)(const Experts);

static void test_linear(const char* name, LinearKernel kernel, u32 rows, u32 k, std::vector<u64> n, dim3 grid,
                        bool tiled) {
    const Array<float> x = normals((size_t)rows * k);
    std::vector<Weights> w;
    std::vector<Array<float>> out;
    const Array<float> bias = normals(1000);
    Linear a = {x.data(), rows, k, (u32)n.size(), 0, {}, {}};
    for (u64 n : n) w.emplace_back(n, k), out.emplace_back(rows * n, NAN);
    for (size_t i = 0; i < n.size(); i++)
        a.parts[i] = {w[i].matrix, i % 2 ? bias.data() : nullptr, out[i].data(), n[i]};
    launch(grid, strstr(name, "vec") ? VEC_THREADS : 256, SHARED, kernel, a);
    Array<float> got;
    std::vector<double> want;
    for (size_t i = 0; i < n.size(); i++) {
        got.insert(got.end(), out[i].begin(), out[i].end());
        for (u32 t = 0; t < rows; t++) {
            for (u64 j = 0; j < n[i]; j++) want.push_back(w[i].dot(j, &x[(size_t)t * k], k) + (i % 2 ? bias[j] : 0));
        }
    }
    // Sums over one block of types with minimums can cancel.
    check(name, got, want, (k == WEIGHT::BLOCK ? 2 : 1) * (tiled ? TILE_LIMIT : VEC_LIMIT));
}

// A column with NaN or infinity is NaN or infinite and leaves the others the same bits.
static void test_spread(const char* name, LinearKernel kernel, u32 rows, u32 k, dim3 grid, float bad) {
    const u64 n = 21;
    Array<float> x = normals((size_t)rows * k);
    const Weights w(n, k);
    Array<float> out[2] = {Array<float>(rows * n, NAN), Array<float>(rows * n, NAN)};
    for (int i = 0; i < 2; i++) {
        Linear a = {x.data(), rows, k, 1, 0, {}, {}};
        a.parts[0] = {w.matrix, nullptr, out[i].data(), n};
        launch(grid, strstr(name, "vec") ? VEC_THREADS : 256, SHARED, kernel, a);
        x[(size_t)k + k / 3] = bad;
    }
    int wrong = 0;
    for (u32 t = 0; t < rows; t++) {
        for (u64 i = t * n; i < (t + 1) * n; i++) {
            wrong += t == 1 ? std::isfinite(out[1][i]) : memcmp(&out[0][i], &out[1][i], 4) != 0;
        }
    }
    failures += wrong != 0;
    printf("  %-28s %s\n", name, wrong ? "TOO FAR" : "stays in its row");
}

static double act(u32 kind, double g, double u) {
    if (kind == ACT_SILU) return g / (1 + exp(-g)) * u;
    if (kind == ACT_GELU_TANH) return 0.5 * g * (1 + tanh(0.7978845608028654 * (g + 0.044715 * g * g * g))) * u;
    g = g > 7 ? 7 : g, u = u > 7 ? 7 : u < -7 ? -7 : u;
    return g / (1 + exp(-1.702 * g)) * (u + 1);
}

static void test_gated(const char* name, GatedKernel kernel, u32 rows, u32 k, u32 n, u32 kind, dim3 grid, bool tiled) {
    Array<float> x = normals((size_t)rows * k);
    const Weights gate(n, k), up(n, k);
    gate.level(x, k);
    Array<float> out((size_t)rows * n, NAN);
    const GatedLinear a = {x.data(), gate.matrix, up.matrix, out.data(), rows, k, n, kind, 1.702f, 7.0f, {}};
    launch(grid, strstr(name, "vec") ? VEC_THREADS : 256, SHARED, kernel, a);
    std::vector<double> want;
    for (u32 t = 0; t < rows; t++) {
        for (u32 i = 0; i < n; i++)
            want.push_back(act(kind, gate.dot(i, &x[(size_t)t * k], k), up.dot(i, &x[(size_t)t * k], k)));
    }
    check(name, out, want, 3 * (tiled ? TILE_LIMIT : VEC_LIMIT));
}

static void test_experts(const char* name, ExpertsKernel kernel, u32 rows, u32 n_used, u32 n_expert, u32 n, u32 k,
                         bool is_gated, bool per_pair, u32 cols, u32 row_blocks) {
    const u32 pairs = rows * n_used;
    Array<float> x = normals((size_t)(per_pair ? pairs : rows) * k);
    const Weights w((u64)n_expert * n, k), up((u64)n_expert * n, k);
    w.level(x, k);
    const Array<float> bias = normals((size_t)n_expert * n), up_bias = normals((size_t)n_expert * n);
    Array<u32> ids, first(n_expert + 1), listed(pairs, ~0u), places(pairs);
    for (u32 i = 0; i < pairs; i++) ids.push_back((u32)(uniform() * uniform() * n_expert));
    Array<float> out((size_t)pairs * n, NAN);
    const ExpertLists lists = {ids.data(), first.data(), listed.data(), places.data(), {}, {}, pairs, n_expert};
    launch({n_expert, 1, 1}, 256, SHARED, expert_lists, lists);
    for (u32 e = 0, at = 0; e < n_expert; e++) {
        failures += first[e] != at;
        for (u32 i = 0; i < pairs; i++) {
            if (ids[i] == e) failures += listed[at++] != i;
        }
    }
    const Experts a = {x.data(),
                       ids.data(),
                       w.matrix,
                       is_gated ? up.matrix : Matrix{},
                       bias.data(),
                       is_gated ? up_bias.data() : nullptr,
                       out.data(),
                       cols ? first.data() : nullptr,
                       cols ? listed.data() : nullptr,
                       rows,
                       n_used,
                       n_expert,
                       n,
                       k,
                       per_pair,
                       ACT_SWIGLU,
                       1.702f,
                       7.0f,
                       0};
    const u32 experts = n_expert < pairs ? n_expert : pairs;
    launch(cols ? dim3{(pairs - experts) / cols + experts, row_blocks, 1} : dim3{row_blocks, pairs, 1},
           cols ? 256 : VEC_THREADS, SHARED, kernel, a);
    std::vector<double> want;
    for (u32 pair = 0; pair < pairs; pair++) {
        const float* row = &x[(size_t)(per_pair ? pair : pair / n_used) * k];
        for (u32 i = 0; i < n; i++) {
            const u64 at = (u64)ids[pair] * n + i;
            const double sum = w.dot(at, row, k) + bias[at];
            want.push_back(is_gated ? act(ACT_SWIGLU, sum, up.dot(at, row, k) + up_bias[at]) : sum);
        }
    }
    check(name, out, want, (is_gated ? 3 : 1) * (cols ? TILE_LIMIT : VEC_LIMIT));
}

static void test_heads(const char* name, HeadKernel kernel, u32 rows, u32 heads, u32 n, u32 k, bool transposed,
                       dim3 grid, double limit) {
    const Array<float> x = normals((size_t)rows * heads * k);
    const Weights w((u64)heads * (transposed ? k : n), transposed ? n : k);
    Array<float> out((size_t)rows * heads * n, NAN);
    const HeadLinear a = {x.data(), w.matrix, out.data(), rows, heads, n, k};
    launch(grid, strstr(name, "vec") ? VEC_THREADS : 256, SHARED, kernel, a);
    std::vector<double> want;
    for (u32 t = 0; t < rows * heads; t++) {
        for (u32 i = 0; i < n; i++) {
            double sum = 0;
            for (u32 j = 0; j < k; j++) {
                const u64 at = transposed ? ((u64)(t % heads) * k + j) * n + i : ((u64)(t % heads) * n + i) * k + j;
                sum += (double)w.values[at] * x[(size_t)t * k + j];
            }
            want.push_back(sum);
        }
    }
    check(name, out, want, limit);
}

// Room for the packed rows of a product: whole groups, and what the last tile reads behind them.
static Array<uint4> packed_rows(u32 rows, u32 k) {
    return Array<uint4>((size_t)((rows + 7) / 8 + 16) * 64 * (k / 64 + 5) * Wide<WEIGHT>::PANELS);
}
static const u32 WIDE_SHARED = Wide<WEIGHT>::SHARED;

static void test_linear_wide(const char* name, u32 rows, u32 k, std::vector<u64> n, u32 width, bool is_queue = false) {
    const Array<float> x = normals((size_t)rows * k), bias = normals(1000);
    Array<uint4> packed = packed_rows(rows, k);
    std::vector<Weights> w;
    std::vector<Array<float>> out;
    WideLinear a = {{x.data(), rows, k, (u32)n.size(), 0, {}}, {packed.data(), (rows + 7) / 8, width}};
    u64 n_rows = 0;
    for (u64 n : n) w.emplace_back(n, k), out.emplace_back(rows * n, NAN), n_rows += n;
    for (size_t i = 0; i < n.size(); i++)
        a.op.parts[i] = {w[i].matrix, i % 2 ? bias.data() : nullptr, out[i].data(), n[i]};
    launch({(rows + 7) / 8, 1, 1}, 256, 0, linear_pack, a);
    if (is_queue) {
        launch({3, 1, 1}, QUEUE_THREADS, WideQueue<WEIGHT>::SHARED, linear_queue, a);
    } else {
        launch({(u32)(n_rows + 127) / 128, (rows + width - 1) / width, 1}, 256, WIDE_SHARED, linear_wide, a);
    }
    Array<float> got;
    std::vector<double> want;
    for (size_t i = 0; i < n.size(); i++) {
        got.insert(got.end(), out[i].begin(), out[i].end());
        for (u32 t = 0; t < rows; t++) {
            for (u64 j = 0; j < n[i]; j++) want.push_back(w[i].dot(j, &x[(size_t)t * k], k) + (i % 2 ? bias[j] : 0));
        }
    }
    check(name, got, want, (k == WEIGHT::BLOCK ? 2 : 1) * TILE_LIMIT);
}

static void test_gated_wide(const char* name, u32 rows, u32 k, u32 n, u32 kind, u32 width) {
    Array<float> x = normals((size_t)rows * k);
    const Weights gate(n, k), up(n, k);
    gate.level(x, k);
    Array<float> out((size_t)rows * n, NAN);
    Array<uint4> packed = packed_rows(rows, k);
    const WideGatedLinear a = {{x.data(), gate.matrix, up.matrix, out.data(), rows, k, n, kind, 1.702f, 7.0f},
                               {packed.data(), (rows + 7) / 8, width}};
    launch({(rows + 7) / 8, 1, 1}, 256, 0, gated_linear_pack, a);
    launch({(n + 63) / 64, (rows + width - 1) / width, 1}, 256, WIDE_SHARED, gated_linear_wide, a);
    std::vector<double> want;
    for (u32 t = 0; t < rows; t++) {
        for (u32 i = 0; i < n; i++)
            want.push_back(act(kind, gate.dot(i, &x[(size_t)t * k], k), up.dot(i, &x[(size_t)t * k], k)));
    }
    check(name, out, want, 3 * TILE_LIMIT);
}

const bool IS_Q4_K = !strcmp(WEIGHT_HEADER, "quant/q4_k.h");

// How experts of many rows are multiplied: tiles, tiles by blocks that stay, and tiles of few columns.
enum WideForm { TILES, QUEUE, NARROW, MIDDLE, BYTES };

static void test_experts_wide(const char* name, u32 rows, u32 n_used, u32 n_expert, u32 n, u32 k, bool is_gated,
                              u32 width, WideForm form = TILES) {
    const u32 pairs = rows * n_used;
    Array<float> x = normals((size_t)(is_gated ? rows : pairs) * k);
    const Weights w((u64)n_expert * n, k), up((u64)n_expert * n, k);
    w.level(x, k);
    const Array<float> bias = normals((size_t)n_expert * n), up_bias = normals((size_t)n_expert * n);
    Array<u32> ids, first(n_expert + 1), listed(pairs, ~0u), places(pairs), further(pairs + n_expert);
    for (u32 i = 0; i < pairs; i++) ids.push_back((u32)(uniform() * uniform() * n_expert));
    ids[pairs / 2] = n_expert + 7;  // names no expert
    Array<float> out((size_t)pairs * n, 0.25f);
    Array<uint4> packed = packed_rows(pairs, k);
    const u32 n_groups = (pairs + 7) / 8;
    Array<ByteColumns> bytes(form == BYTES ? (n_groups + n_expert + 1) * (k / 256) : 0);
    const bool packs = form == BYTES;
    launch({n_expert + 1 + (packs ? pairs : 0), 1, 1}, 256, SHARED, expert_lists,
           ExpertLists{ids.data(), first.data(), listed.data(), places.data(), {further.data()}, {width}, pairs,
                       n_expert, n_groups + n_expert + 1, x.data(), (uint4*)bytes.data(), k, n_used});
    const WideExperts a = {{x.data(), ids.data(), w.matrix, is_gated ? up.matrix : Matrix{}, bias.data(),
                            is_gated ? up_bias.data() : nullptr, out.data(), first.data(), listed.data(), rows, n_used,
                            n_expert, n, k, !is_gated, ACT_SWIGLU, 1.702f, 7.0f, 0},
                           packs ? Packed{(uint4*)bytes.data(), n_groups + n_expert + 1, width}
                                         : Packed{packed.data(), n_groups, width},
                           {},
                           further.data()};
    const u32 experts = n_expert < pairs ? n_expert : pairs;
    const u32 n_tiles = (pairs + 7 * experts) / width + experts;
    const auto blocks = [&](u32 n_rows, u32 rows) { return (n_rows * (is_gated ? 2 : 1) + rows - 1) / rows; };
    if (!packs) {
        launch({n_groups, 1, 1}, 256, 0, form == NARROW || form == MIDDLE ? experts_narrow_pack : experts_pack, a);
    }
    const auto run = [&](const WideExperts& b, u32 n_rows) {
        if (form == BYTES) {
            launch({(n_rows + BYTES_ROWS - 1) / BYTES_ROWS, n_tiles, 1}, BYTES_THREADS, BYTES_SHARED,
                   experts_gated_bytes, b);
        } else if (form == NARROW) {
            // Two blocks of rows a block, where it can have several.
            const u32 per = Narrow::IS_STAGED && !is_gated && n_rows % (2 * WIDE_ROWS) == 0 ? 2 : 1;
            launch({blocks(n_rows, WIDE_ROWS) / per, n_tiles, 1}, WIDE_THREADS, Narrow::SHARED,
                   is_gated ? experts_gated_narrow : experts_narrow, b);
        } else if (form == MIDDLE) {
            launch({blocks(n_rows, WIDE_ROWS), n_tiles, 1}, WIDE_THREADS, Middle::SHARED,
                   is_gated ? experts_gated_middle : experts_middle, b);
        } else if (form == QUEUE) {
            launch({3, 1, 1}, QUEUE_THREADS, WideQueue<WEIGHT>::SHARED + 4 * (n_expert + 1),
                   is_gated ? experts_gated_queue : experts_queue, b);
        } else {
            launch({blocks(n_rows, WIDE_ROWS), n_tiles, 1}, WIDE_THREADS, WIDE_SHARED,
                   is_gated ? experts_gated_wide : experts_wide, b);
        }
    };
    run(a, n);
    std::vector<double> want;
    for (u32 pair = 0; pair < pairs; pair++) {
        const float* row = &x[(size_t)(is_gated ? pair / n_used : pair) * k];
        for (u32 i = 0; i < n; i++) {
            const u64 at = (u64)ids[pair] * n + i;
            if (ids[pair] >= n_expert) {
                want.push_back(0.25);
                continue;
            }
            const double sum = w.dot(at, row, k) + bias[at];
            want.push_back(is_gated ? act(ACT_SWIGLU, sum, up.dot(at, row, k) + up_bias[at]) : sum);
        }
    }
    check(name, out, want, (is_gated ? 3 : 1) * TILE_LIMIT);

    // In the other forms the same bits come, rounded to bf16.
    if (!is_gated && n % 2 == 0) {
        WideExperts b = a;
        Array<u32> rounded((size_t)pairs * n / 2, 0x3e803e80u);
        b.op.out = (float*)rounded.data(), b.listed = 1;
        run(b, n);
        for (u32 pair = 0; pair < pairs; pair++) {
            if (ids[pair] >= n_expert) continue;
            for (u32 i = 0; i < n; i += 2) {
                const float* sums = &out[(size_t)pair * n + i];
                const u32 wanted = bf16_bits(sums[0]) | bf16_bits(sums[1]) << 16;
                failures += rounded[((size_t)places[pair] * n + i) / 2] != wanted;
            }
        }
        for (size_t i = (size_t)first[n_expert] * n / 2; i < rounded.size(); i++) failures += rounded[i] != 0x3e803e80u;
    }
    if (is_gated && !Wide<WEIGHT>::SPLIT && n % WEIGHT::BLOCK == 0) {
        typedef BatchOf<WEIGHT>::type InBatch;
        const u32 orders[2][2] = {{WEIGHT::RUNS, WEIGHT::PAIRED}, {InBatch::RUNS, InBatch::PAIRED}};
        for (u32 i = 0; i < 2; i++) {
            WideExperts b = a, c = a;
            Array<uint4> hidden = packed_rows(pairs, n), expected = hidden;
            const u32 whole = (n + 64 * orders[i][0] - 1) / (64 * orders[i][0]) * 64 * orders[i][0];
            b.hidden = {hidden.data(), n_groups, orders[i][0], orders[i][1], whole};
            run(b, whole);
            c.op.x = out.data(), c.op.k = n, c.op.x_per_pair = 1, c.wide = {expected.data(), n_groups, width};
            launch({n_groups, 1, 1}, 256, 0, i ? experts_narrow_pack : experts_pack, c);
            failures += memcmp(hidden.data(), expected.data(), hidden.size() * sizeof(uint4)) != 0;
        }
    }
    if (failures) printf("%s: %d failures so far\n", name, (int)failures);
}

// `pack` puts rows out as the wide products' own first launch does.
static void test_wide_pack(u32 rows, u32 k) {
    const Array<float> x = normals((size_t)rows * k);
    Array<uint4> expected = packed_rows(rows, k), got = expected;
    const u32 n_groups = (rows + 7) / 8, whole = Wide<WEIGHT>::chunks(k) * 64;
    const WideLinear a = {{x.data(), rows, k, 1, 0, {}}, {expected.data(), n_groups, 16}};
    launch({n_groups, 1, 1}, 256, 0, linear_pack, a);
    const PackTo to = {got.data(), whole, WEIGHT::RUNS, WEIGHT::PAIRED, n_groups, Wide<WEIGHT>::SPLIT, 0};
    launch<Pack>({rows, 1, 1}, 64, 0, pack, Pack{(float*)x.data(), nullptr, {}, {to}, rows, k});
    const bool is_same = memcmp(got.data(), expected.data(), got.size() * sizeof(uint4)) == 0;
    printf("  %-28s %s\n", "wide pack", is_same ? "same bits" : "DIFFERS");
    failures += !is_same;
}

static void test_wide(u32 k1, u32 k3, u32 long_k) {
    test_linear_wide("wide one block", 17, k1, {21}, 16);
    test_linear_wide("wide", 65, k3, {37, 1, 4}, 32);
    test_linear_wide("wide long", 70, long_k, {129}, (u32)Wide<WEIGHT>::COLS);
    test_linear_wide("wide queue", 65, k3, {370, 1, 4, 250}, 48, true);
    test_gated_wide("gated wide", 40, k3, 33, ACT_SILU, 48);
    test_wide_pack(19, k3);
    test_experts_wide("experts wide", 30, 3, 7, 131, k3, false, 16);
    test_experts_wide("experts wide, even", 9, 2, 3, 16, k1, false, 48);
    test_experts_wide("experts gated wide", 40, 2, 35, 65, k1, true, 32);
    test_experts_wide("experts gated wide, packed", 19, 2, 5, WEIGHT::BLOCK > 1 ? k3 : 96, k1, true, 32);
    test_experts_wide("experts queue", 30, 3, 7, 131, k3, false, 32, QUEUE);
    test_experts_wide("experts queue, listed", 30, 3, 7, 130, k1, false, 32, QUEUE);
    test_experts_wide("experts gated queue", 40, 2, 35, 65, k1, true, 48, QUEUE);
    test_experts_wide("experts gated queue, packed", 40, 2, 35, WEIGHT::BLOCK > 1 ? k1 : 160, k1, true, 48, QUEUE);
    test_experts_wide("experts narrow", 30, 3, 7, 131, k3, false, 32, NARROW);
    test_experts_wide("experts narrow, two blocks", 30, 3, 7, 256, k3, false, 32, NARROW);
    test_experts_wide("experts narrow, listed", 90, 3, 7, 130, long_k, false, 32, NARROW);
    test_experts_wide("experts gated narrow, packed", 40, 2, 35, WEIGHT::BLOCK > 1 ? k3 : 96, k1, true, 32, NARROW);
    test_experts_wide("experts middle", 90, 3, 7, 130, k3, false, 64, MIDDLE);
    test_experts_wide("experts gated middle, packed", 80, 2, 5, WEIGHT::BLOCK > 1 ? k3 : 96, long_k, true, 64, MIDDLE);
    if (IS_Q4_K) test_experts_wide("experts gated bytes", 70, 2, 5, 131, k3, true, 24, BYTES);
    if (IS_Q4_K) test_experts_wide("experts gated bytes, packed", 40, 2, 11, k1, long_k, true, 24, BYTES);
}

#ifdef __CUDACC__
#include "bench.h"
#else
static void bench() {}
#endif

int main(int argc, char**) {
    const u32 block = WEIGHT::BLOCK;
    // Row lengths: one block, odd numbers of blocks, more than a chunk of shared memory.
    const u32 k1 = block == 1 ? 37 : block, k3 = block == 1 ? 515 : (block < 256 ? 11 : 3) * block,
              long_k = block == 1 ? 2049 : 4608;
    for (int order = 0; order < 2; order++) {
        descending = order;
        test_linear("vec1 one block", linear_vec1, 1, k1, {45}, {1, 1, 1}, false);
        test_linear("vec1", linear_vec1, 1, k3, {33, 1, 7, 9}, {2, 1, 1}, false);
        test_linear("vec4, 3 columns", linear_vec4, 3, k3, {19, 3}, {1, 1, 1}, false);
        test_linear("vec8 long", linear_vec8, 8, long_k, {9}, {1, 1, 1}, false);
        test_linear("tile16 one block", linear_tile16, 16, k1, {16}, {1, 1, 1}, true);
        test_linear("tile16 long, split", linear_tile16, 9, long_k, {21}, {1, 2, 1}, true);
        test_linear("tile32", linear_tile32, 40, k3, {37, 1}, {2, 1, 1}, true);
        test_linear("tile64", linear_tile64, 65, k3, {70}, {2, 1, 1}, true);
        test_spread("vec4 nan", linear_vec4, 3, k3, {1, 1, 1}, NAN);
        test_spread("vec4 inf", linear_vec4, 3, k3, {1, 1, 1}, INFINITY);
        test_spread("tile16 nan", linear_tile16, 9, k3, {1, 2, 1}, NAN);
        test_spread("tile16 inf", linear_tile16, 9, k3, {1, 2, 1}, -INFINITY);
        test_gated("gated vec1 silu", gated_linear_vec1, 1, k3, 33, ACT_SILU, {2, 1, 1}, false);
        test_gated("gated vec2 gelu", gated_linear_vec2, 2, k3, 33, ACT_GELU_TANH, {1, 1, 1}, false);
        test_gated("gated tile16 swiglu", gated_linear_tile16, 11, k3, 33, ACT_SWIGLU, {1, 2, 1}, true);
        test_gated("gated tile64", gated_linear_tile64, 50, k3, 16, ACT_SILU, {1, 1, 1}, true);
        test_experts("experts vec", experts_vec, 2, 3, 5, 9, k3, false, true, 0, 1);
        test_experts("experts gated vec", experts_gated_vec, 3, 2, 40, 9, k1, true, false, 0, 1);
        test_experts("experts tile8", experts_tile8, 9, 3, 35, 17, k1, false, true, 8, 1);
        test_experts("experts gated tile16", experts_gated_tile16, 40, 2, 7, 17, k1, true, false, 16, 2);
        test_heads("head vec4", head_linear_vec4, 3, 2, 19, k3, false, {1, 2, 1}, VEC_LIMIT);
        test_heads("head tile16", head_linear_tile16, 9, 2, 19, k1, false, {1, 2, 2}, TILE_LIMIT);
#if HAS_WGMMA
        test_wide(k1, k3, long_k);
#endif
        const u32 units = (k3 + WEIGHT::UNIT - 1) / WEIGHT::UNIT;
        u32 lanes = 1;
        while (lanes < 32 && lanes < units) lanes *= 2;
        test_heads("head transposed", head_linear_t, 3, 2, k3, 21, true,
                   {(units + lanes - 1) / lanes, 2, (3 + T_ROWS - 1) / T_ROWS}, 1e-6);
        Weights table(7, k3);
        Array<float> out(2 * k3, NAN);
        const Array<u32> ids = {6, 2};
        launch({2, (units + 127) / 128, 1}, 128, 0, embed, Embed{ids.data(), table.matrix, out.data(), 2, k3, 0.5f, 1});
        std::vector<double> want;
        for (u32 id : ids) {
            for (u32 i = 0; i < k3; i++) want.push_back(0.5 * table.values[(size_t)id * k3 + i]);
        }
        check("embed", out, want, 1e-7);
    }
    if (failures == 0 && argc > 1) bench();
    return failures != 0;
}
