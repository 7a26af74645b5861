// Times of the kernels that read weights, on a GPU: graphs of many launches, each with other weights, so that nothing
// comes from the second cache. Geometry as in `crates/gpu/src/cuda/matmul.rs`.
#pragma once

#include <algorithm>

static const u32 SMS = [] {
    cudaDeviceProp device;
    CHECK(cudaGetDeviceProperties(&device, 0));
    return (u32)device.multiProcessorCount;
}();
static u8* pool;
static const u64 POOL = 3ull << 30;
static float *x_pool, *out_pool;

static u32 ceil_div(u64 a, u64 b) { return (u32)((a + b - 1) / b); }

static u32 vec_blocks(u64 n, u32 k, u32 copies) {
    u32 lanes = 32;
    while (lanes > 4 && ceil_div(k, WEIGHT::UNIT) < 2 * lanes) lanes /= 2;
    const u32 tiles = ceil_div(n, 256 / lanes), waves = ceil_div((u64)tiles * copies, SMS * 4);
    return ceil_div(tiles, waves);
}
static u32 vec_shared(u32 cols, u32 k) {
    const u32 runs = ceil_div(ceil_div(k, 16), 32) * 32;
    return std::min(runs, Vec<WEIGHT>::chunk_runs(cols)) * cols * Vec<WEIGHT>::RUN_BYTES;
}
static u32 row_blocks(u64 n, u32 copies) {
    const u32 groups = ceil_div(n, 16);
    for (u32 per : {8, 4, 2}) {
        if (ceil_div(groups, per) * copies >= 2 * SMS) return ceil_div(groups, per);
    }
    return groups;
}
static u32 tile_shared(u32) { return 32768; }

static Matrix weights(u64 at) {
    // Planes of types that have several lie far from each other.
    return {pool + at, pool + (at / 8 & ~255ull), pool + (at / 8 & ~255ull) + (POOL >> 2)};
}
static u64 bytes_of(u64 n, u32 k) {
    return n * (k / WEIGHT::BLOCK) * (WEIGHT::BYTES + WEIGHT::SCALE_BYTES + WEIGHT::BIAS_BYTES);
}

// `each(at, stream)` queues one launch with weights at `at`; `bytes` of weights and `products` it has.
template <class F>
static void measure(const char* what, u64 bytes, u64 q_bytes, double products, const F& each) {
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    const int n = products > 1e10 ? 10 : 200;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    u64 at = 0;
    for (int i = 0; i < n; i++) {
        each(at, stream);
        at += (q_bytes + 255) / 256 * 256;
        if (at + q_bytes > POOL / 2) at = 0;
    }
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t from, to;
    CHECK(cudaEventCreate(&from));
    CHECK(cudaEventCreate(&to));
    std::vector<float> times;
    for (int i = 0; i < 6; i++) {
        float ms = 0;
        CHECK(cudaEventRecord(from, stream));
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaEventRecord(to, stream));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaEventElapsedTime(&ms, from, to));
        if (i > 0) times.push_back(ms / n * 1e3f);
    }
    std::sort(times.begin(), times.end());
    const double us = times[times.size() / 2];
    printf("  %-44s %9.2f us %7.0f GB/s %7.1f TFLOP/s\n", what, us, bytes / us / 1e3, 2 * products / us / 1e6);
    fflush(stdout);
    cudaGraphExecDestroy(exec), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
}

static void bench_linear(const char* name, LinearKernel kernel, u32 cols, u32 rows, u64 n, u32 k, bool tiled,
                         u32 grid_y = 0) {
    char what[100];
    const u32 tiles = ceil_div(rows, cols), y = grid_y ? grid_y : row_blocks(n, tiles);
    snprintf(what, sizeof what, "%s rows %u n %llu k %u (y %u)", name, rows, n, k, tiled ? y : vec_blocks(n, k, 1));
    measure(what, bytes_of(n, k), n * (k / WEIGHT::BLOCK) * WEIGHT::BYTES, (double)rows * n * k,
            [&](u64 at, cudaStream_t stream) {
                Linear a = {x_pool, rows, k, 1, 0, {}};
                a.parts[0] = {weights(at), nullptr, out_pool, n};
                if (tiled) {
                    queue({tiles, y, 1}, 256, tile_shared(cols), kernel, a, stream);
                } else {
                    queue({vec_blocks(n, k, 1), 1, 1}, 256, vec_shared(cols, k), kernel, a, stream);
                }
            });
}

static void bench_experts(const char* name, ExpertsKernel kernel, u32 cols, u32 rows, u32 n, u32 k, bool is_gated,
                          bool per_pair, u32 grid_y = 0) {
    const u32 n_used = 8, n_expert = 128, pairs = rows * n_used;
    Array<u32> ids, first(n_expert + 1), listed(pairs), places(pairs);
    std::vector<bool> seen(n_expert);
    for (u32 i = 0; i < pairs; i++) {
        u32 id = (u32)(uniform() * n_expert);
        for (u32 j = i / n_used * n_used; j < i; j++) {
            if (ids[j] == id) id = (id + 1) % n_expert, j = i / n_used * n_used - 1;
        }
        ids.push_back(id), seen[id] = true;
    }
    launch({n_expert, 1, 1}, 256, 0, expert_lists,
           ExpertLists{ids.data(), first.data(), listed.data(), places.data(), {}, {}, pairs, n_expert});
    const u32 used = std::count(seen.begin(), seen.end(), true), experts = std::min(n_expert, pairs),
              parts = is_gated ? 2 : 1;
    const u32 tiles = cols ? (pairs - experts) / cols + experts : 0, y = grid_y ? grid_y : row_blocks(n, experts);
    char what[100];
    snprintf(what, sizeof what, "%s rows %u n %u k %u, %u experts (y %u)", name, rows, n, k, used, y);
    const u64 slab = (u64)n_expert * n * (k / WEIGHT::BLOCK) * WEIGHT::BYTES;
    measure(what, parts * used * bytes_of(n, k), parts * slab, (double)parts * pairs * n * k,
            [&](u64 at, cudaStream_t stream) {
                const Experts a = {x_pool,
                                   ids.data(),
                                   weights(at),
                                   is_gated ? weights(at + slab) : Matrix{},
                                   nullptr,
                                   nullptr,
                                   out_pool,
                                   first.data(),
                                   listed.data(),
                                   rows,
                                   n_used,
                                   n_expert,
                                   n,
                                   k,
                                   per_pair,
                                   ACT_SILU,
                                   0,
                                   0,
                                   0};
                if (cols) {
                    queue({tiles, y, 1}, 256, tile_shared(cols), kernel, a, stream);
                } else {
                    queue({vec_blocks(n, k, pairs), pairs, 1}, 256, vec_shared(1, k), kernel, a, stream);
                }
            });
}

static void bench() {
    CHECK(cudaMalloc(&pool, POOL));
    CHECK(cudaMalloc(&x_pool, 256 << 20));
    CHECK(cudaMalloc(&out_pool, 1 << 30));
    CHECK(cudaMemset(pool, 0x3a, POOL));
    CHECK(cudaMemset(x_pool, 0x3a, 256 << 20));
    const struct {
        u64 n;
        u32 k;
    } shapes[] = {{5120, 2048}, {2048, 4096}, {24576, 2048}, {151936, 2048}};
    for (const auto& s : shapes) {
        bench_linear("vec1", linear_vec1, 1, 1, s.n, s.k, false);
        if (s.n == 24576) continue;
        bench_linear("vec2", linear_vec2, 2, 2, s.n, s.k, false);
        bench_linear("vec4", linear_vec4, 4, 4, s.n, s.k, false);
        bench_linear("vec8", linear_vec8, 8, 8, s.n, s.k, false);
        bench_linear("tile16", linear_tile16, 16, 16, s.n, s.k, true);
        bench_linear("tile32", linear_tile32, 32, 32, s.n, s.k, true);
        bench_linear("tile64", linear_tile64, 64, 64, s.n, s.k, true);
    }
    for (u32 y : {128u, 64u, 32u, 16u}) bench_linear("tile16 split", linear_tile16, 16, 16, 2048, 4096, true, y);
    bench_linear("tile64", linear_tile64, 64, 2048, 5120, 2048, true);
    bench_experts("experts gated vec", experts_gated_vec, 0, 1, 768, 2048, true, false);
    bench_experts("experts vec", experts_vec, 0, 1, 2048, 768, false, true);
    for (u32 rows : {4u, 8u}) {
        bench_experts("experts gated vec", experts_gated_vec, 0, rows, 768, 2048, true, false);
        bench_experts("experts gated tile8", experts_gated_tile8, 8, rows, 768, 2048, true, false);
        bench_experts("experts vec", experts_vec, 0, rows, 2048, 768, false, true);
        bench_experts("experts tile8", experts_tile8, 8, rows, 2048, 768, false, true);
    }
    for (u32 rows : {16u, 32u, 64u}) {
        for (u32 y : {6u, 12u, 24u})
            bench_experts("experts gated tile8", experts_gated_tile8, 8, rows, 768, 2048, true, false, y);
        bench_experts("experts gated tile16", experts_gated_tile16, 16, rows, 768, 2048, true, false);
        bench_experts("experts tile8", experts_tile8, 8, rows, 2048, 768, false, true);
        bench_experts("experts tile16", experts_tile16, 16, rows, 2048, 768, false, true);
    }
    bench_experts("experts gated tile32", experts_gated_tile32, 32, 2048, 768, 2048, true, false);
    bench_experts("experts gated tile64", experts_gated_tile64, 64, 2048, 768, 2048, true, false);
    bench_experts("experts tile64", experts_tile64, 64, 2048, 2048, 768, false, true);
}
