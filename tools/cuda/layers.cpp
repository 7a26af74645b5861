// Times of the launches of a step of one to eight sequences, on a GPU: a graph of layers of Qwen3-30B-A3B's shape
// (Q4_K_M), random weights, each layer its own; and a timeline of a layer's blocks by the marks of `TRACE`. The kernels
// are cubins, so that variants can be compared in one run (`layers.sh`).
// usage: layers CUBINS OLD|NEW [sequences] [depth] [layers]; ROUTED=0 launches routers
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cuda/args.h"

#define CHECK(call)                                                                                       \
    do {                                                                                                  \
        const int error = (int)(call);                                                                    \
        if (error) fprintf(stderr, "%s:%d: error %d of %s\n", __FILE__, __LINE__, error, #call), exit(1); \
    } while (0)

static const u32 SMS = 132, D = 2048, N_HEAD = 32, N_KV = 4, D_HEAD = 128, N_EXPERT = 128, N_USED = 8, FF = 768;
static std::string folder;
static u32 cols = 1, depth = 1, n_layers = 48;
static CUstream stream;

static u32 env(const char* name, u32 otherwise) { return getenv(name) ? atoi(getenv(name)) : otherwise; }

static std::map<std::string, CUmodule> modules;
static CUfunction function(const std::string& module, const char* entry) {
    if (!modules.count(module)) {
        CUmodule m;
        const int error = cuModuleLoad(&m, (folder + "/" + module + ".cubin").c_str());
        if (error) fprintf(stderr, "no module %s: %d\n", module.c_str(), error), exit(1);
        modules[module] = m;
    }
    CUfunction f;
    const int error = cuModuleGetFunction(&f, modules[module], entry);
    if (error) fprintf(stderr, "no %s in %s\n", entry, module.c_str()), exit(1);
    return f;
}

template <class A>
static void queue(const std::string& module, const char* entry, dim3 grid, u32 block, u32 shared, const A& args) {
    const CUfunction f = function(module, entry);
    CHECK(cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared));
    // Multiprocessors that share memory differently for a kernel must be idle first.
    if (env("CARVED", 1)) CHECK(cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100));
    CUlaunchAttribute attribute = {};
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config = {};
    config.gridDimX = grid.x, config.gridDimY = grid.y, config.gridDimZ = grid.z;
    config.blockDimX = block, config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = shared, config.hStream = stream, config.attrs = &attribute, config.numAttrs = 1;
    void* list[] = {(void*)&args};
    const int error = cuLaunchKernelEx(&config, f, list, nullptr);
    if (error)
        fprintf(stderr, "launch of %s (%u %u %u) x %u, %u bytes: %d\n", entry, grid.x, grid.y, grid.z, block, shared,
                error),
            exit(1);
}

template <class T>
static T* device(size_t n) {
    void* p;
    CHECK(cudaMalloc(&p, n * sizeof(T) + 256));
    CHECK(cudaMemset(p, 0, n * sizeof(T) + 256));
    return (T*)p;
}
template <class T>
static T* device(const std::vector<T>& v) {
    T* p = device<T>(v.size());
    CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

__device__ u32 hashed(u64 i) {
    i *= 0x9E3779B97F4A7C15ull;
    i ^= i >> 29, i *= 0xBF58476D1CE4E5B9ull, i ^= i >> 32;
    return (u32)i;
}
__global__ void fill_words(u32* p, u64 n, u64 seed) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)
        p[i] = hashed(i + seed);
}
__global__ void fill_floats(float* p, u64 n, u64 seed, float scale, float mean) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        float sum = 0;
        for (int j = 0; j < 4; j++) sum += hashed(4 * i + j + seed) * (1.0f / 4294967296.0f) - 0.5f;
        p[i] = mean + scale * 1.7f * sum;
    }
}
__global__ void fill_f16(u8* p, u64 n, u32 stride, u32 at, u16 value) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)
        *(u16*)(p + i * stride + at) = value;
}
static u64 seed = 1;
static u8* quantised(u64 rows, u32 k, bool is_q6) {
    const u32 bytes = is_q6 ? 210 : 144;
    const u64 blocks = rows * k / 256;
    u8* p = device<u8>(blocks * bytes);
    fill_words<<<1024, 256>>>((u32*)p, blocks * bytes / 4, seed += 1ull << 33);
    if (is_q6) {
        fill_f16<<<1024, 256>>>(p, blocks, bytes, 208, 0x0110);  // 1.6e-5
    } else {
        fill_f16<<<1024, 256>>>(p, blocks, bytes, 0, 0x0a00);  // 1.8e-4
        fill_f16<<<1024, 256>>>(p, blocks, bytes, 2, 0x1620);  // 1.5e-3
    }
    return p;
}
static float* floats(u64 n, float scale, float mean) {
    float* p = device<float>(n);
    fill_floats<<<1024, 256>>>(p, n, seed += 1ull << 33, scale, mean);
    return p;
}

struct Layer {
    u8 *q, *k, *v, *o, *gate, *up, *down;
    float *norm, *router, *norm_ff, *q_norm, *k_norm;
    u16 *keys, *values;
    bool is_q6;
};
static std::vector<Layer> layers;
static float *x, *q, *k, *v, *attended, *logits, *weights, *hidden, *partial, *table;
static u32 *ids, *counters;
static i64* sums; // of every layer
static float* squares;
static Step step;

static u32 ceil_div(u64 a, u64 b) { return (u32)((a + b - 1) / b); }
static Prologue normed(const float* w) { return {w, nullptr, NORMED, 0, 0, 0, 1e-6f, 0}; }
static std::string number(const char* name, u32 n) { return name + std::to_string(n); }
static u32 wide() { return cols <= 1 ? 1 : cols <= 2 ? 2 : cols <= 4 ? 4 : 8; }

static Linear linear(const float* in, u32 k_, std::vector<LinearPart> parts, Prologue p, bool add) {
    Linear a = {in, cols, k_, (u32)parts.size(), add, p, {}};
    for (size_t i = 0; i < parts.size(); i++) a.parts[i] = parts[i];
    return a;
}
// Geometry as in `matmul.rs`.
static u32 tile_rows(u32 k_) { return 512 / (k_ / 64 >= 32 ? 32 : k_ / 64 >= 16 ? 16 : 8); }
static u32 vec_shared(u32 k_) { return std::min(k_ / 16, 2048 / wide()) * wide() * 24 + 64 * wide(); }
static u32 blocks_of(u32 n, u32 k_, u32 copies) {
    const u32 tiles = ceil_div(n, tile_rows(k_));
    return ceil_div(tiles, ceil_div((u64)tiles * copies, SMS));
}
static u32 few_shared(u32 copies, u32 n, u32 runs, u32 bytes) {
    // Eight columns lie apart on tensor cores, and rows of weights too.
    return ((copies + 1) / 2 + 5 * n) * 16 + n * runs * 24 + bytes + 128 + 16 + (n == 8 ? 4096 : 0);
}
// One of the two kinds of blocks that share a multiprocessor.
static u32 threads(const char* name, bool is_tall) { return env(name, cols > 1 ? 512 : is_tall ? 640 : 512); }
static u32 padded(u32 shared, bool is_tall) {
    return is_tall || cols > 1 || env("UNPADDED", 0) ? shared : std::max(shared, 115728u);
}

static bool is_new;
// At least a block a multiprocessor.
static u32 filled(u32 blocks) { return env("FILLED", 0) ? std::max(blocks, SMS) : blocks; }
static void qkv(const Layer& l) {
    const LinearPart pq = {{l.q}, nullptr, q, 4096}, pk = {{l.k}, nullptr, k, 512}, pv = {{l.v}, nullptr, v, 512};
    const u32 row4 = 1152, row6 = 1680;
    if (l.is_q6) {
        const Linear a = linear(x, D, {pq, pk}, normed(l.norm), false), b = linear(x, D, {pv}, normed(l.norm), false);
        if (is_new) {
            const u32 each_a = env("QKV_A", 41), each_b = env("QKV_B", 28), blocks = ceil_div(4608, each_a);
            const u32 bytes = std::max(each_a * row4, each_b * row6);
            const FewPair f = {a, b, blocks, each_a, each_b, 0};
            queue("few_pair", number("few_pair", wide()).c_str(), {filled(blocks + ceil_div(512, each_b)), 1, 1},
                  threads("QKV_T", true), padded(few_shared(20, wide(), 128, bytes), true), f);
        } else {
            const u32 ta = ceil_div(4608, tile_rows(D)), tb = ceil_div(512, tile_rows(D)),
                      waves = ceil_div(ta + tb, SMS);
            const LinearPair p = {a, b, ceil_div(ta, waves), 0};
            queue("linear_pair", number("linear_pair_vec", wide()).c_str(), {p.blocks_a + ceil_div(tb, waves), 1, 1},
                  512, vec_shared(D), p);
        }
        return;
    }
    const Linear a = linear(x, D, {pq, pk, pv}, normed(l.norm), false);
    if (is_new) {
        const u32 each = env("QKV", 39);
        queue("few_linear", number("few_linear", wide()).c_str(), {filled(ceil_div(5120, each)), 1, 1},
              threads("QKV_T", true), padded(few_shared(20, wide(), 128, each * row4), true), FewLinear{a, each, 0});
    } else {
        queue("linear", number("linear_vec", wide()).c_str(), {blocks_of(5120, D, 1), 1, 1}, 512, vec_shared(D), a);
    }
}
// As `AttendNode::sized`.
static bool is_long() { return cols * N_KV * 4 * ceil_div(ceil_div(depth, 32), 2) > SMS; }
static u32 heads_of_block() {
    return env("HEADS", cols == 1 && N_HEAD * ceil_div(ceil_div(depth, 32), 2) <= SMS ? 1 : 2);
}
static void attend(const Layer& l) {
    const u32 heads = is_long() ? 8 : heads_of_block(), tiles = 8 / heads, pages = ceil_div(depth, 32);
    const u32 most = std::max(1u, SMS / (cols * N_KV * tiles)), least = env("LEAST", heads == 1 ? 8 : 4);
    const u32 splits = std::min(std::min(64u, most), std::max(1u, ceil_div(pages, least)));
    Attend a = {};
    a.step = step;
    a.q = {q, l.q_norm, nullptr, N_HEAD, D_HEAD, 1, 1}, a.k = {k, l.k_norm, l.keys, N_KV, D_HEAD, 1, 1};
    a.v = {v, nullptr, l.values, N_KV, D_HEAD, 0, 0};
    a.table = table, a.k_cache = l.keys, a.v_cache = l.values, a.out = attended, a.partial = partial,
    a.counters = counters + 8;
    a.rows = cols, a.n_kv = N_KV, a.n_splits = splits, a.half = 64, a.q_stride = D_HEAD, a.n_tiles = tiles,
    a.scale = 0.0883883f, a.eps = 1e-6f;
    if (splits > 4) a.counters = nullptr;
    const u32 halves = 2 * ceil_div(pages, splits), bytes = 2 * 2 * 16 * (D_HEAD + 8);
    a.workers = std::min(8u, halves), a.stages = env("STAGES", halves > a.workers ? 2 : 1);
    const std::string module = is_long() ? "attend_long" : number("attend", heads);
    queue(module, is_long() ? "attend_long" : "attend", {cols * tiles * N_KV * splits, 1, 1}, env("LONG_T", 256),
          is_long() ? a.stages * a.workers * bytes : 0, a);
    if (splits > 4) queue(module, "attend_merge", {cols * N_HEAD, 1, 1}, env("MERGE_T", 256), 0, a);
}
// The router's logits come from the output product.
static bool is_routed() { return is_new && cols == 1 && env("ROUTED", 1); }
// As `LOGIT_COPIES` of `choose.h`.
static const u32 COPIES = env("COPIES", 4), SUMS = COPIES * N_EXPERT + 1;
static LogitSums sums_of(const Layer& l) { return {sums + (&l - layers.data()) * SUMS, squares}; }
static void output(const Layer& l) {
    const Linear a = linear(attended, 4096, {{{l.o}, nullptr, x, D}}, {}, true);
    if (is_routed()) {
        const FewRouted f = {a, l.router, l.norm_ff, sums_of(l)};
        queue("few_routed", "few_routed", {D / 16, 1, 1}, threads("O_T", false),
              padded(few_shared(20, 1, 256, 16 * 2304) + 64 * N_EXPERT, false), f);
    } else if (is_new) {
        const u32 each = env("O", 16);
        queue("few_linear", number("few_linear", wide()).c_str(), {filled(ceil_div(D, each)), 1, 1},
              threads("O_T", false), padded(few_shared(20, wide(), 256, each * 2304), false), FewLinear{a, each, 0});
    } else {
        queue("linear", number("linear_vec", wide()).c_str(), {blocks_of(D, 4096, 1), 1, 1}, 512, vec_shared(4096), a);
    }
}
static Route routing(const Layer& l) {
    Route r = {};
    r.step = step, r.logits = env("FIXED", 0) ? nullptr : logits, r.ids = ids, r.weights = weights, r.rows = cols,
    r.n_used = N_USED, r.renormalise = 1, r.scale = 1;
    if (is_routed()) r.n_squares = D / 16, r.k = D, r.norm_eps = 1e-6f, r.sums = sums_of(l);
    return r;
}
static void router(const Layer& l) {
    if (is_routed()) return;
    Router a = {};
    a.linear = linear(x, D, {{{(u8*)l.router}, nullptr, logits, N_EXPERT}}, normed(l.norm_ff), false);
    a.route = routing(l), a.counter = is_new ? nullptr : counters, a.scale = 1;
    queue("router", "router", {N_EXPERT, 1, 1}, env("ROUTER_T", 256), 0, a);
}
static void experts_up(const Layer& l) {
    Experts a = {};
    a.x = x, a.ids = ids, a.w = {l.gate}, a.up = {l.up}, a.out = hidden, a.rows = cols, a.n_used = N_USED;
    a.n_expert = N_EXPERT, a.n = FF, a.k = D, a.prologue = normed(l.norm_ff);
    const u32 pairs = cols * N_USED;
    if (is_new) {
        const u32 each = env("UP", cols == 1 ? 48 : 16);
        FewExperts f = {a, routing(l), each, 0, nullptr};
        queue("few_experts", "few_experts", {filled(ceil_div(FF, each) * pairs), 1, 1},
              env("UP_T", cols == 1 ? 640 : 256), few_shared(20, 1, 128, each * 2304), f);
    } else {
        queue("experts", "experts_gated_vec", {blocks_of(FF, D, pairs), pairs, 1}, 512, 3136, a);
    }
}
static void experts_down(const Layer& l) {
    const ExpertsDown a = {hidden, nullptr, nullptr, ids,      weights, {l.down}, {}, nullptr,
                           x,      cols,    N_USED,  N_EXPERT, D,       FF,       1};
    if (is_new) {
        const u32 each = env("DOWN", 16), runs = N_USED * FF / 16;
        const u32 shared = few_shared(1, 1, runs, N_USED * each * (FF / 256 * (l.is_q6 ? 210 : 144)));
        const FewDown f = {a, routing(l), each, 0, nullptr};
        queue(l.is_q6 ? "few_down_q6" : "few_down_q4", "few_down",
              {cols == 1 ? filled(ceil_div(D, each)) : ceil_div(D, each), cols, 1}, threads("DOWN_T", false),
              padded(shared, false), f);
    } else {
        queue(l.is_q6 ? "experts_down_q6" : "experts_down_q4", "experts_down", {ceil_div(D, 16), cols, 1}, 512,
              N_USED * FF / 16 * 24, a);
    }
}

typedef std::function<void(const Layer&)> Queue;
static const std::vector<std::pair<const char*, Queue>> KINDS = {
    {"qkv", qkv}, {"attend", attend}, {"o", output}, {"router", router}, {"up", experts_up}, {"down", experts_down}};

static CUgraphExec captured(const std::function<void()>& body) {
    CUgraph graph;
    CUgraphExec exec;
    CHECK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    CHECK(cudaMemsetAsync(sums, 0, n_layers * SUMS * 8, stream));
    body();
    CHECK(cuStreamEndCapture(stream, &graph));
    CHECK(cuGraphInstantiate(&exec, graph, 0));
    return exec;
}
// Microseconds of a replay, the median.
static double timed(CUgraphExec exec, int n = 15) {
    CUevent a, b;
    CHECK(cuEventCreate(&a, 0));
    CHECK(cuEventCreate(&b, 0));
    std::vector<float> times;
    for (int i = 0; i < n + 3; i++) {
        float ms;
        CHECK(cuEventRecord(a, stream));
        CHECK(cuGraphLaunch(exec, stream));
        CHECK(cuEventRecord(b, stream));
        CHECK(cuStreamSynchronize(stream));
        CHECK(cuEventElapsedTime(&ms, a, b));
        if (i >= 3) times.push_back(ms * 1e3f);
    }
    std::sort(times.begin(), times.end());
    return times[n / 2];
}

// Every multiprocessor's clock at the same ticks of the timer that all share.
__global__ void clocks(u64* out) {
    u64 first, now, clock;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(first));
    // Long enough for a block on every multiprocessor, then a tick.
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now < first + 50000);
    first = now;
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now == first);
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(clock));
    u32 sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    if (threadIdx.x == 0) out[2 * sm] = now, out[2 * sm + 1] = clock;
}
static std::vector<u64> read_clocks() {
    u64* p = device<u64>(2 * 256);
    clocks<<<SMS, 1024, 200000>>>(p);
    CHECK(cudaDeviceSynchronize());
    std::vector<u64> v(512);
    CHECK(cudaMemcpy(v.data(), p, 512 * 8, cudaMemcpyDeviceToHost));
    return v;
}

static void timeline(CUgraphExec exec) {
    CHECK(cudaFuncSetAttribute((const void*)clocks, cudaFuncAttributeMaxDynamicSharedMemorySize, 200000));
    read_clocks();
    for (int i = 0; i < 3; i++) CHECK(cuGraphLaunch(exec, stream));
    const auto before = read_clocks();
    CHECK(cuGraphLaunch(exec, stream));
    CHECK(cuStreamSynchronize(stream));
    const auto after = read_clocks();
    const bool q6 = layers.back().is_q6;
    const std::vector<std::pair<const char*, std::string>> of = {
        {"qkv", is_new ? (q6 ? "few_pair" : "") : ""},
        {"attend", is_long() ? "attend_long" : number("attend", heads_of_block())},
        {"o", is_routed() ? "few_routed" : is_new ? "few_linear" : ""},
        {"router", is_routed() ? "" : "router"},
        {"up", is_new ? "few_experts" : ""},
        {"down", is_new ? (q6 ? "few_down_q6" : "few_down_q4") : ""}};
    double zero = 0, last = 0;
    printf("clock %.3f GHz\n", double(after[1] - before[1]) / double(after[0] - before[0]));
    for (const auto& kind : of) {
        if (kind.second.empty()) continue;
        CUdeviceptr marks, sms;
        size_t size;
        if (cuModuleGetGlobal(&marks, &size, modules[kind.second], "trace_marks")) continue;
        CHECK(cuModuleGetGlobal(&sms, nullptr, modules[kind.second], "trace_sm"));
        std::vector<u64> m(2048 * 8);
        std::vector<u32> sm(2048);
        CHECK(cuMemcpyDtoH(m.data(), marks, m.size() * 8));
        CHECK(cuMemcpyDtoH(sm.data(), sms, sm.size() * 4));
        const auto ns = [&](u32 block, int mark) {
            const u32 s = sm[block];
            const double rate = double(after[2 * s + 1] - before[2 * s + 1]) / double(after[2 * s] - before[2 * s]);
            return double((long long)(after[2 * s] - after[0])) +
                   ((double)m[8 * block + mark] - (double)after[2 * s + 1]) / rate;
        };
        std::map<u32, int> of_sm;
        int doubled = 0;
        for (u32 b = 0; b < 2048; b++)
            if (m[8 * b]) doubled += ++of_sm[sm[b]] == 2;
        printf("%-7s %zu multiprocessors, %d with several;", kind.first, of_sm.size(), doubled);
        double end = 0;
        const char* names[8] = {"start", "asked", "waited", "staged", "done", "extra", "again", ""};
        for (int mark : {0, 1, 2, 3, 5, 6, 4}) {
            std::vector<double> t;
            for (u32 b = 0; b < 2048; b++)
                if (m[8 * b + mark]) t.push_back(ns(b, mark));
            if (t.empty()) continue;
            std::sort(t.begin(), t.end());
            if (zero == 0) zero = t[0], last = t[0];
            printf(" %s %6.0f %6.0f %6.0f %6.0f |", names[mark], t[0] - zero, t[t.size() / 2] - zero,
                   t[t.size() * 9 / 10] - zero, t.back() - zero);
            if (mark == 4) end = t.back();
        }
        printf(" +%.0f\n", end - last);
        last = end;
    }
}

int main(int argc, char** argv) {
    CHECK(cudaSetDevice(0));
    CHECK(cudaFree(nullptr));
    folder = argv[1];
    const std::string which = argv[2];
    if (argc > 3) cols = atoi(argv[3]);
    if (argc > 4) depth = std::max(1, atoi(argv[4]));
    if (argc > 5) n_layers = atoi(argv[5]);
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    const u32 pages = ceil_div(depth, 32) + 1, n_pages = pages * cols;
    for (u32 i = 0; i < n_layers; i++) {
        Layer l = {};
        l.is_q6 = (n_layers - 1 - i) % 2 == 0;
        l.q = quantised(4096, D, false), l.k = quantised(512, D, false), l.v = quantised(512, D, l.is_q6);
        l.o = quantised(D, 4096, false), l.gate = quantised((u64)N_EXPERT * FF, D, false),
        l.up = quantised((u64)N_EXPERT * FF, D, false);
        l.down = quantised((u64)N_EXPERT * D, FF, l.is_q6), l.router = floats((u64)N_EXPERT * D, 0.02f, 0);
        l.norm = floats(D, 0.1f, 1), l.norm_ff = floats(D, 0.1f, 1), l.q_norm = floats(D_HEAD, 0.1f, 1),
        l.k_norm = floats(D_HEAD, 0.1f, 1);
        l.keys = device<u16>((u64)n_pages * N_KV * 32 * D_HEAD),
        l.values = device<u16>((u64)n_pages * N_KV * 32 * D_HEAD);
        layers.push_back(l);
    }
    x = device<float>(8 * D), q = device<float>(8 * 4096), k = device<float>(8 * 512), v = device<float>(8 * 512),
    attended = device<float>(8 * 4096);
    logits = device<float>(8 * N_EXPERT), weights = device<float>(8 * N_USED);
    sums = device<i64>(n_layers * SUMS), squares = device<float>(D / 16);
    hidden = device<float>(64 * FF), ids = device<u32>(64), counters = device<u32>(4096);
    partial = device<float>((u64)8 * N_HEAD * 64 * 132), table = floats(8 * 128, 0.7f, 0);
    std::vector<u32> positions, chunk_of, page_list;
    std::vector<Chunk> chunks;
    for (u32 t = 0; t < cols; t++) {
        positions.push_back(depth - 1), chunk_of.push_back(t);
        chunks.push_back({t, 1, depth - 1, t * pages, 0, 0, 0, 0});
        for (u32 i = 0; i < pages; i++) page_list.push_back(t * pages + i);
    }
    step = {device<u32>(8), device(positions), device(chunk_of), device<u32>(8),
            device(chunks), device(page_list), nullptr,          device(std::vector<u32>(8, ~0u))};
    const float* start = floats(8 * D, 1, 0);
    CHECK(cudaDeviceSynchronize());
    const auto all = [&](u32 n) {
        return captured([&] {
            for (u32 i = n_layers - n; i < n_layers; i++)
                for (const auto& kind : KINDS) kind.second(layers[i]);
        });
    };
    const auto result = [&](u32 n) {
        CHECK(cudaMemcpy(x, start, 8 * D * 4, cudaMemcpyDeviceToDevice));
        const auto exec = all(n);
        CHECK(cuGraphLaunch(exec, stream));
        CHECK(cuStreamSynchronize(stream));
        std::vector<float> y(cols * D);
        CHECK(cudaMemcpy(y.data(), x, y.size() * 4, cudaMemcpyDeviceToHost));
        return y;
    };
    if (env("FIXED", 0)) {
        std::vector<u32> fixed;
        for (u32 i = 0; i < 64; i++) fixed.push_back(i * env("FIXED", 0) % N_EXPERT);
        CHECK(cudaMemcpy(ids, fixed.data(), 256, cudaMemcpyHostToDevice));
    }
    // Modules load outside of captures.
    const auto warm = [&] {
        for (const auto& kind : KINDS) kind.second(layers[0]), kind.second(layers.back());
        CHECK(cuStreamSynchronize(stream));
    };
    is_new = which == "NEW";
    warm();
    if (is_new && !getenv("TIMELINE") && !getenv("TIMED_ONLY")) {
        is_new = false, warm(), is_new = true;
        for (u32 n : {1u, 2u, n_layers}) {
            is_new = false;
            const auto a = result(n);
            is_new = true;
            const auto b = result(n), c = result(n);
            double d = 0, s = 0;
            for (size_t i = 0; i < a.size(); i++) d += (a[i] - b[i]) * (a[i] - b[i]), s += a[i] * a[i];
            printf("%u layers: new against old %.2e, rms %.3f, same again %d\n", n, sqrt(d / s), sqrt(s / a.size()),
                   b == c);
        }
    }
    if (getenv("TIMED_ONLY")) {
        for (u32 n : {1u, 2u, n_layers}) {
            const auto a = result(n), b = result(n);
            double s = 0;
            for (float v : a) s += (double)v * v;
            printf("%u layers: %.6f %.6f %.6f, rms %.6f, same again %d\n", n, a[0], a[1], a[2],
                   sqrt(s / a.size()), a == b);
        }
    }
    const auto exec = all(n_layers);
    CHECK(cudaMemcpy(x, start, 8 * D * 4, cudaMemcpyDeviceToDevice));
    const double us = timed(exec);
    printf("%s, %u sequences, depth %u: %.1f us, %.2f us a layer;", which.c_str(), cols, depth, us, us / n_layers);
    for (const auto& kind : KINDS) {
        const auto one = captured([&] {
            for (const auto& l : layers) kind.second(l);
        });
        printf(" %s %.2f", kind.first, timed(one, 7) / n_layers);
    }
    printf("\n");
    if (getenv("TIMELINE")) {
        CHECK(cudaMemcpy(x, start, 8 * D * 4, cudaMemcpyDeviceToDevice));
        timeline(exec);
    }
}
