// Attention of prompts by tiles, or with -DWIDE=1 by warpgroup products, emulated on this machine (`host/run.sh`),
// against sums in double: several chunks of a step, pages in any order, windows, caps, sinks, and spans whose tokens
// see each other.
#include "emulate.h"

#define KV_F16 1
#define D_V D_K
#define V_IN_K 0
#define HEADS 8
#if WIDE
#include "cuda/attention_wide.cu"
#else
#define tile_memory shared
#include "cuda/attention.cu"
#define WIDE_THREADS TILE_THREADS
#define attention_wide attention_tile
#endif

alignas(1024) uint4 shared[210 * 1024 / 16];

static unsigned seed = 1;
static float random_number() {
    seed = seed * 1664525u + 1013904223u;
    return (float)(int)(seed >> 8) / (1 << 23) - 1.0f;
}

struct Case {
    const char* name;
    u32 n_kv, group;
    std::vector<Chunk> chunks;  // of them first, len and pos
    u32 window;
    float softcap;
    bool has_sinks, singles;
    u32 span, reach; // tokens of a span, of which every other one is one; how far into it they see, or 0
};

static int test(const Case& of) {
    const u32 n_head = of.n_kv * of.group, n_chunks = (u32)of.chunks.size();
    u32 rows = 0, n_pages = 1, n_prompt = 0, n_prompts = 0;
    std::vector<Chunk> chunks = of.chunks;
    std::vector<u32> pages;
    for (Chunk& c : chunks) {
        c.first = rows, c.first_page = (u32)pages.size();
        rows += c.len;
        if (!of.singles || c.len > 1) n_prompt += c.len, n_prompts++;
        for (u32 p = 0; p < (c.pos + c.len + PAGE - 1) / PAGE; p++) pages.push_back(n_pages++);
    }
    // In any order; no sequence has page 0.
    for (size_t i = pages.size(); i > 1; i--) std::swap(pages[i - 1], pages[(u32)(random_number() * 1e6f + 1e6f) % i]);
    const size_t n_cache = (size_t)n_pages * of.n_kv * PAGE * D_K;
    // What was never written is NaN.
    Array<u16> keys(n_cache, 0x7e00), values(n_cache, 0x7e00);
    Array<float> q((size_t)rows * n_head * D_K), sinks(n_head), out((size_t)rows * n_head * D_V, NAN);
    for (float& x : q) x = 4 * random_number();
    for (float& x : sinks) x = random_number();
    const auto at = [&](const Chunk& c, u32 kv, u32 pos) {
        return (((size_t)pages[c.first_page + pos / PAGE] * of.n_kv + kv) * PAGE + pos % PAGE) * D_K;
    };
    for (const Chunk& c : chunks) {
        for (u32 kv = 0; kv < of.n_kv; kv++) {
            for (u32 pos = 0; pos < c.pos + c.len; pos++) {
                for (u32 i = 0; i < D_K; i++) keys[at(c, kv, pos) + i] = kv_store(random_number());
                for (u32 i = 0; i < D_V; i++) values[at(c, kv, pos) + i] = kv_store(random_number());
            }
        }
    }
    std::vector<u32> ends;
    for (const Chunk& c : chunks) {
        for (u32 t = 0; t < c.len; t++) {
            const u32 span = of.span ? t / of.span : 1;
            ends.push_back(c.pos + (span % 2 ? t + 1 : std::min(c.len, (span + 1) * of.span)));
        }
    }
    Attention a = {};
    a.ends = of.span ? ends.data() : nullptr, a.reach = of.reach;
    a.step.chunks = chunks.data(), a.step.pages = pages.data();
    a.q = q.data(), a.k_cache = keys.data(), a.v_cache = values.data(), a.out = out.data();
    a.sinks = of.has_sinks ? sinks.data() : nullptr;
    a.rows = rows, a.n_head = n_head, a.n_kv = of.n_kv, a.n_splits = n_chunks, a.window = of.window;
    a.scale = 1.0f / sqrtf(D_K), a.softcap = of.softcap, a.singles = of.singles;
    const u32 tokens = of.group < ROWS ? ROWS / of.group : 1, tiles = n_prompt / tokens + n_prompts;
    launch({of.n_kv, tiles, (of.group + ROWS - 1) / ROWS}, WIDE_THREADS, sizeof shared, attention_wide, a);

#if WIDE
    if (D_V <= 128 && !of.singles) {
        // The same rows packed, in the order of units of one run.
        const u32 n_groups = (rows + 7) / 8, width = n_head * D_V;
        std::vector<u32> packed((size_t)n_groups * 8 * width / 2);
        a.packed = {packed.data(), width, 1, 0, n_groups, 0, 0};
        launch({of.n_kv, tiles, (of.group + ROWS - 1) / ROWS}, WIDE_THREADS, sizeof shared, attention_wide, a);
        for (u32 row = 0; row < rows; row++) {
            for (u32 i = 0; i < width; i += 2) {
                const u32 word = packed_eight(a.packed, row, i / 8 * 8)[4 * (i % 16 / 2 ^ row % 8)];
                const float* x = &out[(size_t)row * width + i];
                if (word != bf16_pair(x[0], x[1])) return printf("  %s: packed otherwise\n", of.name), 1;
            }
        }
    }
#endif

    double worst = 0;
    for (const Chunk& c : chunks) {
        for (u32 t = 0; t < c.len; t++) {
            for (u32 h = 0; h < n_head; h++) {
                const float* found = &out[((size_t)(c.first + t) * n_head + h) * D_V];
                if (of.singles && c.len == 1) {
                    if (found[0] == found[0]) worst = INFINITY;
                    continue;
                }
                const float* query = &q[((size_t)(c.first + t) * n_head + h) * D_K];
                const u32 pos = c.pos + t, from = first_seen(of.window, pos);
                std::vector<double> e, y(D_V);
                double total = 0, most = of.has_sinks ? sinks[h] : -INFINITY;
                u32 end = ends[c.first + t];
                if (of.reach) end = std::min(end, pos + of.reach);
                for (u32 p = from; p < end; p++) {
                    double s = 0;
                    const u16* key = &keys[at(c, h / of.group, p)];
                    for (u32 i = 0; i < D_K; i++) s += query[i] * (double)float_of_f16(key[i]);
                    s *= a.scale;
                    if (of.softcap != 0) s = of.softcap * tanh(s / of.softcap);
                    e.push_back(s), most = std::max(most, s);
                }
                if (of.has_sinks) total = exp(sinks[h] - most);
                for (u32 p = from; p < end; p++) {
                    const double share = exp(e[p - from] - most);
                    total += share;
                    for (u32 i = 0; i < D_V; i++) {
                        y[i] += share * (double)float_of_f16(values[at(c, h / of.group, p) + i]);
                    }
                }
                for (u32 i = 0; i < D_V; i++) {
                    const double off = fabs(found[i] - y[i] / total);
                    worst = off <= worst ? worst : off == off ? off : INFINITY;
                }
            }
        }
    }
    printf("  %-32s %.1e\n", of.name, worst);
    return worst <= 2e-3 ? 0 : 1;
}

int main() {
    const auto chunk = [](u32 len, u32 pos) {
        Chunk c = {};
        c.len = len, c.pos = pos;
        return c;
    };
    int failed = 0;
    for (int order = 0; order < 2; order++) {
        descending = order;
        failed += test({"one tile, one block", 1, 8, {chunk(5, 0)}, 0, 0, false, false});
        failed += test({"two heads, several blocks", 2, 8, {chunk(20, 250)}, 0, 0, false, false});
        failed += test({"chunks, sinks", 1, 6, {chunk(3, 0), chunk(33, 40), chunk(22, 300)}, 0, 0, true, false});
        failed += test({"a window", 1, 4, {chunk(40, 500)}, 100, 0, true, false});
        failed += test({"chunks of a window", 1, 4, {chunk(40, 180)}, 1u << 31 | 192, 0, false, false});
        failed += test({"a cap", 1, 2, {chunk(70, 100)}, 0, 5, false, false});
        failed += test({"no groups", 2, 1, {chunk(130, 3)}, 0, 0, false, false});
        failed += test({"more heads than rows", 1, 130, {chunk(2, 140)}, 0, 0, false, false});
        const std::vector<Chunk> mixed = {chunk(1, 9), chunk(9, 0), chunk(1, 100), chunk(1, 3), chunk(17, 128)};
        failed += test({"alongside single tokens", 1, 16, mixed, 0, 0, false, true});
#if !WIDE
        failed += test({"an image", 3, 1, {chunk(150, 0)}, 0, 0, false, false, 150});
        failed += test({"texts", 2, 1, {chunk(70, 0), chunk(3, 0), chunk(40, 0)}, 0, 0, false, false, 70});
        failed += test({"windows both ways", 1, 1, {chunk(150, 0), chunk(9, 0)}, 20, 0, false, false, 150, 20});
        failed += test({"a window of one", 1, 2, {chunk(40, 0)}, 1, 0, false, false, 40, 1});
        failed += test({"spans of a prompt", 1, 4, {chunk(90, 13), chunk(1, 4), chunk(30, 100)}, 50, 0, true, true, 7});
#endif
    }
    return failed != 0;
}
