// The delta rule in tiles, and what comes before it, against sums in double: emulated on this machine (`host/run.sh`),
// or on a GPU, where with an argument it is also measured beside the walk, in the shape of Qwen3.5-35B-A3B:
// nvcc -x cu -std=c++17 -O3 -w -arch=sm_90a -DD_K=128 -I tools/cuda -I kernels -o OUT tools/cuda/delta.cpp && OUT bench
#ifdef __CUDACC__
#include "device.h"
#include "cuda/delta_net.cu"
#undef COLUMNS
#undef LANES
#undef ROW
#else
#include "emulate.h"
#endif

#include <algorithm>

#define WIDTH 4
#include "cuda/delta_in.cu"
#undef AHEAD
#undef THREADS
#include "cuda/delta_chunks.cu"

#ifndef __CUDACC__
alignas(1024) uint4 shared[262144 / 16];
#endif

static u64 seed = 1;
static double uniform() {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (double)(seed >> 11) / 9007199254740992.0;
}

static u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }

// Chunks side by side, each with a state of its own.
struct Problem {
    u32 n_k, n_v, d_v, tiled, tokens;
    Array<float> q, k, v, g, beta, state, out;
    Array<Chunk> chunks;
    Array<u16> keys, shares;
    Array<float> gates;
    u32 longest = 0;

    // `slow`: decays near 1, as trained models have; else gates anywhere from 0 to 1.
    Problem(u32 n_k, u32 n_v, u32 d_v, u32 tiled, std::vector<u32> lens, u32 pos, bool slow)
        : n_k(n_k), n_v(n_v), d_v(d_v), tiled(tiled), tokens(0) {
        for (u32 len : lens) {
            chunks.push_back({tokens, len, pos, 0, 0, 0, (u32)(lens.size() - 1 - chunks.size()), 0});
            tokens += len, longest = std::max(longest, len);
        }
        const auto rows = [&](Array<float>& x, u32 heads, float size) {
            x.resize((size_t)tokens * heads * D_K);
            for (size_t i = 0; i < x.size(); i += D_K) {
                double sum = 0;
                for (u32 j = 0; j < D_K; j++) x[i + j] = (float)(uniform() - 0.5), sum += (double)x[i + j] * x[i + j];
                for (u32 j = 0; j < D_K; j++) x[i + j] *= size / (float)sqrt(sum);
            }
        };
        rows(q, n_k, 0.1f), rows(k, n_k, 1.0f);
        v.resize((size_t)tokens * n_v * d_v), g.resize(tokens * n_v), beta.resize(tokens * n_v);
        for (float& x : v) x = (float)(2 * uniform() - 1);
        for (float& x : g) {
            const double p = uniform();
            x = slow ? (float)exp(-0.05 * p) : p < 0.1 ? 0.0f : p > 0.9 ? 1.0f : (float)uniform();
        }
        for (float& x : beta) x = (float)uniform();
        state.resize(lens.size() * n_v * D_K * d_v), out.resize(v.size());
        for (float& x : state) x = (float)(uniform() - 0.5);
        for (float& x : out) x = NAN;
        const size_t tiles = tokens / TILE + lens.size();
        keys.resize(tiles * n_k * 4 * TILE * D_K), shares.resize(tiles * n_v * 4 * TILE * TILE);
        gates.resize(tiles * n_v * GATES * TILE);
    }

    DeltaChunks args() {
        DeltaChunks a = {};
        a.op.step.chunks = chunks.data();
        a.op.q = q.data(), a.op.k = k.data(), a.op.v = v.data(), a.op.g = g.data(), a.op.beta = beta.data();
        a.op.state = state.data(), a.op.out = out.data(), a.op.state_len = (u64)n_v * D_K * d_v;
        a.op.n_k_head = n_k, a.op.n_v_head = n_v, a.op.d_v = d_v, a.op.tiled = tiled;
        a.keys = keys.data(), a.shares = shares.data(), a.gates = gates.data();
        return a;
    }

    // The largest relative distance of a row of a head's outputs, and of its state. Rows that nearly cancel are
    // measured against the middle one.
    void compare(const char* name, const Array<float>& before, double limit) {
        std::vector<double> offs, norms;
        double worst_state = 0;
        u64 n_bad = 0;
        for (const Chunk& c : chunks) {
            for (u32 h = 0; h < n_v; h++) {
                const u32 kh = tiled ? h % n_k : h / (n_v / n_k);
                const size_t at = ((size_t)c.state * n_v + h) * D_K * d_v;
                std::vector<double> s(D_K * d_v, 0.0), known(d_v), y(d_v);
                if (c.pos) std::copy(&before[at], &before[at] + s.size(), s.begin());
                for (u32 i = c.first; i < c.first + c.len; i++) {
                    const float *key = &k[((size_t)i * n_k + kh) * D_K], *query = &q[((size_t)i * n_k + kh) * D_K];
                    const double decay = g[i * n_v + h], rate = beta[i * n_v + h];
                    std::fill(known.begin(), known.end(), 0.0), std::fill(y.begin(), y.end(), 0.0);
                    for (u32 d = 0; d < D_K; d++) {
                        for (u32 e = 0; e < d_v; e++) known[e] += decay * s[d * d_v + e] * key[d];
                    }
                    for (u32 e = 0; e < d_v; e++) known[e] = rate * (v[((size_t)i * n_v + h) * d_v + e] - known[e]);
                    for (u32 d = 0; d < D_K; d++) {
                        for (u32 e = 0; e < d_v; e++) {
                            double& x = s[d * d_v + e];
                            x = decay * x + key[d] * known[e], y[e] += x * query[d];
                        }
                    }
                    double off = 0, norm = 0;
                    for (u32 e = 0; e < d_v; e++) {
                        const double got = out[((size_t)i * n_v + h) * d_v + e];
                        n_bad += std::isnan(y[e]) != std::isnan(got);
                        if (std::isnan(y[e]) || std::isnan(got)) continue;
                        off += (got - y[e]) * (got - y[e]), norm += y[e] * y[e];
                    }
                    offs.push_back(sqrt(off)), norms.push_back(sqrt(norm));
                }
                double off = 0, norm = 0;
                for (size_t i = 0; i < s.size(); i++) {
                    n_bad += std::isnan(s[i]) != std::isnan(state[at + i]);
                    if (std::isnan(s[i])) continue;
                    off += (state[at + i] - s[i]) * (state[at + i] - s[i]), norm += s[i] * s[i];
                }
                if (norm > 0) worst_state = std::max(worst_state, sqrt(off / norm));
            }
        }
        std::vector<double> sorted = norms;
        std::sort(sorted.begin(), sorted.end());
        double worst = 0, sum = 0;
        for (size_t i = 0; i < offs.size(); i++) {
            const double x = offs[i] / std::max(norms[i], sorted[sorted.size() / 2]);
            worst = std::max(worst, x), sum += x / offs.size();
        }
        const bool is_bad = !(worst <= limit) || !(worst_state <= limit) || n_bad;
        printf("  %-30s out %.2e (mean %.2e) state %.2e%s\n", name, worst, sum, worst_state, is_bad ? " TOO FAR" : "");
        if (n_bad) printf("  %llu numbers are NaN where they should not be, or not where they should\n", n_bad);
        fflush(stdout);
        failures += is_bad;
    }
    static int failures;
};
int Problem::failures = 0;

static const u32 SHARED = STAGES * sizeof(Stage) + PARTS * sizeof(Exchange);

static void run(Problem& p) {
    const u32 n = p.chunks.size();
    launch({ceil_div(p.longest, TILE), p.n_k, n}, 128, 0, delta_tiles, p.args());
    launch({ceil_div(p.d_v, COLUMNS), p.n_v, n}, THREADS, SHARED, delta_chunks, p.args());
}

static void test(const char* name, Problem p, double limit = 4e-6) {
    const Array<float> before = p.state;
    run(p);
    p.compare(name, before, limit);
}

// What comes before the rule, for several tokens a chunk.
static void test_in(const char* name, u32 n_k, u32 n_v, u32 d_k, u32 d_v, std::vector<u32> lens, u32 pos) {
    const u32 d = 2 * n_k * d_k + n_v * d_v;
    Array<Chunk> chunks;
    u32 tokens = 0, longest = 0;
    for (u32 len : lens) {
        chunks.push_back({tokens, len, pos, 0, 0, 0, (u32)(lens.size() - 1 - chunks.size()), 0});
        tokens += len, longest = std::max(longest, len);
    }
    const auto random = [](size_t n, double size) {
        Array<float> x(n);
        for (float& v : x) v = (float)(size * (2 * uniform() - 1));
        return x;
    };
    Array<float> x = random((size_t)tokens * d, 2), w = random((size_t)d * WIDTH, 1);
    Array<float> state = random(lens.size() * 3 * d, 1), a_log = random(n_v, 1), bias = random(n_v, 1);
    Array<float> ga = random(tokens * n_v, 3), gb = random(tokens * n_v, 3);
    for (float& v : a_log) v = -fabsf(v);
    Array<float> out[5];
    const size_t widths[5] = {n_k * d_k, n_k * d_k, n_v * d_v, n_v, n_v};
    for (int i = 0; i < 5; i++) out[i].assign(tokens * widths[i], NAN);
    const Array<float> before = state;
    DeltaIn a = {};
    a.step.chunks = chunks.data(), a.x = x.data(), a.w = w.data(), a.state = state.data();
    a.q = out[0].data(), a.k = out[1].data(), a.v = out[2].data();
    a.gates = {ga.data(), gb.data(), a_log.data(), bias.data(), out[3].data(), out[4].data(), tokens * n_v, n_v};
    a.state_len = 3 * d, a.d = d, a.n_k_head = n_k, a.n_v_head = n_v, a.d_k = d_k, a.d_v = d_v;
    a.q_scale = 0.25f, a.k_scale = 0.5f, a.eps = 1e-6f;
    launch({ceil_div(2 * n_k + n_v + 1, 4), ceil_div(longest, RUN), (u32)lens.size()}, 128, 0, delta_in_rows, a);
    double worst = 0;
    const auto near = [&](double got, double want) {
        const double off = fabs(got - want) / std::max(1.0, fabs(want));
        worst = std::isnan(off) ? INFINITY : std::max(worst, off);
    };
    for (const Chunk& c : chunks) {
        const float* old = &before[(size_t)c.state * 3 * d];
        const auto row = [&](int t, u32 i) -> double {
            return t >= 0 ? x[(size_t)(c.first + t) * d + i] : pos ? old[(3 + t) * d + i] : 0;
        };
        for (u32 t = 0; t < c.len; t++) {
            std::vector<double> y(d);
            for (u32 i = 0; i < d; i++) {
                double sum = 0;
                for (int r = 0; r < WIDTH; r++) sum += w[i * WIDTH + r] * row((int)t - 3 + r, i);
                y[i] = sum / (1 + exp(-sum));
            }
            for (u32 h = 0; h < 2 * n_k; h++) {
                double sum = 0;
                for (u32 i = 0; i < d_k; i++) sum += y[h * d_k + i] * y[h * d_k + i];
                const double by = (h < n_k ? 0.25 : 0.5) / sqrt(sum / d_k + 1e-6);
                for (u32 i = 0; i < d_k; i++) {
                    near(out[h / n_k][((size_t)(c.first + t) * n_k + h % n_k) * d_k + i], by * y[h * d_k + i]);
                }
            }
            for (u32 i = 0; i < n_v * d_v; i++) {
                near(out[2][(size_t)(c.first + t) * n_v * d_v + i], y[2 * n_k * d_k + i]);
            }
            for (u32 i = 0; i < n_v; i++) {
                const u32 at = (c.first + t) * n_v + i;
                near(out[3][at], exp(a_log[i] * log1p(exp((double)ga[at] + bias[i]))));
                near(out[4][at], 1 / (1 + exp(-(double)gb[at])));
            }
        }
        for (u32 i = 0; i < d; i++) {
            for (int r = 0; r < 3; r++) near(state[((size_t)c.state * 3 + r) * d + i], row((int)c.len - 3 + r, i));
        }
    }
    const bool is_bad = !(worst < 2e-6);
    printf("  %-30s %.2e%s\n", name, worst, is_bad ? " TOO FAR" : "");
    Problem::failures += is_bad;
}

#ifdef __CUDACC__
template <class F>
static double timed(const char* name, const F& each) {
    cudaEvent_t from, to;
    CHECK(cudaEventCreate(&from));
    CHECK(cudaEventCreate(&to));
    std::vector<float> times;
    for (int i = 0; i < 7; i++) {
        float ms = 0;
        CHECK(cudaEventRecord(from));
        for (int j = 0; j < 10; j++) each();
        CHECK(cudaEventRecord(to));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaEventElapsedTime(&ms, from, to));
        if (i > 1) times.push_back(ms * 100);
    }
    std::sort(times.begin(), times.end());
    printf("  %-40s %8.1f us (%.1f to %.1f)\n", name, times[times.size() / 2], times[0], times.back());
    fflush(stdout);
    return times[times.size() / 2];
}

template <class T>
static T* on_device(const Array<T>& x) {
    T* p;
    CHECK(cudaMalloc(&p, x.size() * sizeof(T) + 256));
    CHECK(cudaMemcpy(p, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

static void bench(u32 n_sequences, u32 len) {
    Problem p(16, 32, 128, 1, std::vector<u32>(n_sequences, len), 0, true);
    DeltaChunks a = p.args();
    a.op.step.chunks = on_device(p.chunks);
    a.op.q = on_device(p.q), a.op.k = on_device(p.k), a.op.v = on_device(p.v), a.op.g = on_device(p.g);
    a.op.beta = on_device(p.beta), a.op.state = on_device(p.state), a.op.out = on_device(p.out);
    a.keys = on_device(p.keys), a.shares = on_device(p.shares), a.gates = on_device(p.gates);
    printf(" %u sequences of %u\n", n_sequences, len);
    const auto tiles = [&] { queue({ceil_div(len, TILE), p.n_k, n_sequences}, 128, 0, delta_tiles, a, nullptr); };
    const auto chunks = [&] {
        queue({ceil_div(p.d_v, COLUMNS), p.n_v, n_sequences}, THREADS, SHARED, delta_chunks, a, nullptr);
    };
    timed("walk", [&] { queue({8, p.n_v, n_sequences}, 128, 0, delta_net, a.op, nullptr); });
    timed("tiles", tiles);
    timed("chunks", chunks);
    timed("tiles, chunks", [&] { tiles(), chunks(); });
    const u32 d = 64 * 128, tokens = n_sequences * len;
    DeltaIn in = {};
    in.step.chunks = a.op.step.chunks, in.x = on_device(Array<float>((size_t)tokens * d, 0.5f));
    in.w = on_device(Array<float>(d * WIDTH, 0.5f)), in.state = on_device(Array<float>(n_sequences * 3 * d, 0.5f));
    in.q = (float*)a.op.q, in.k = (float*)a.op.k, in.v = (float*)a.op.v;
    float* const gates = on_device(Array<float>(tokens * 32, 0.5f));
    in.gates = {gates, gates, gates, gates, (float*)a.op.g, (float*)a.op.beta, tokens * 32, 32};
    in.state_len = 3 * d, in.d = d, in.n_k_head = 16, in.n_v_head = 32, in.d_k = in.d_v = 128;
    in.q_scale = in.k_scale = 0.1f, in.eps = 1e-6f;
    timed("what comes before",
          [&] { queue({17, ceil_div(len, RUN), n_sequences}, 128, 0, delta_in_rows, in, nullptr); });
}
#endif

int main(int argc, char**) {
    printf("heads of %d, %d parts, %d stages, %u bytes\n", D_K, PARTS, STAGES, SHARED);
    for (int order = 0; order < 2; order++) {
        descending = order;
        test_in("rows", 2, 4, 128, 128, {70, 1, 33, 2}, 9);
        test_in("rows from nothing", 3, 3, 20, 24, {1, 2, 35, 64}, 0);
        test("one tile", Problem(1, 1, 32, 0, {32}, 0, false));
        test("short", Problem(1, 2, 36, 0, {7}, 5, false));
        test("many, grouped", Problem(2, 4, 128, 0, {70, 1, 33}, 9, false));
        test("many, tiled, slow", Problem(2, 4, 64, 1, {64, 100}, 9, true));
        Problem wild(1, 2, 36, 0, {70}, 9, true);
        wild.k[40 * D_K + 3] = NAN;
        test("a key of NaN", wild);
        Problem gate(1, 2, 36, 0, {70}, 9, true);
        gate.g[2 * 40] = NAN, gate.beta[2 * 67 + 1] = NAN, gate.q[3 * D_K] = NAN;
        test("gates and queries of NaN", gate);
        Problem value(1, 2, 36, 0, {70}, 9, true);
        value.v[(2 * 44 + 1) * 36 + 35] = NAN, value.v[2 * 10 * 36 + 9] = NAN;
        test("values of NaN", value);
        Problem small(1, 1, 32, 0, {70}, 9, true);
        for (float& x : small.v) x *= 1e-20f;
        for (float& x : small.state) x *= 1e-20f;
        for (float& x : small.k) x *= 1e-3f;
        for (float& x : small.q) x *= 1e12f;
        test("far from 1", small);
        Problem jump(1, 1, 32, 0, {70}, 9, true);
        for (u32 i = 0; i < 32; i++) jump.v[50 * 32 + i] *= 1e5f;
        test("a large value", jump, 3e-5);
    }
#ifdef __CUDACC__
    if (argc > 1) {
        Problem prompt(2, 4, 128, 1, {2048}, 0, true);
        test("a prompt", prompt);
        Problem anywhere(2, 4, 128, 1, {2048}, 0, false);
        test("a prompt, gates anywhere", anywhere);
        const Array<float> before = prompt.state;
        launch({8, prompt.n_v, 1}, 128, 0, delta_net, prompt.args().op);
        prompt.compare("a prompt, walk", before, 1e-5);
        bench(1, 2048), bench(1, 512), bench(4, 512), bench(1, 128), bench(1, 64), bench(8, 64), bench(1, 32);
    }
#endif
    return Problem::failures != 0;
}
