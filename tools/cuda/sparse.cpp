// Choosing positions and attention over them, emulated on this machine (`host/run.sh`), against sums in double: several
// chunks of a step, contexts below and above n, ties, NaN and infinity, slices of a step, splits. -DD: numbers of an
// index key, -DK_BLOCKS=1 of blocks; -DD_K -DD_V -DV_IN_K -DHEADS -DKV_F16: those of attention.
#include "emulate.h"

#include "cuda/choose.cu"
#undef EACH
#undef COLUMNS
#undef N_WARPS
#include "cuda/attention_chosen.cu"

alignas(128) uint4 shared[228 * 1024 / 16];

static unsigned seed = 1;
static u32 random_bits() {
    seed = seed * 1664525u + 1013904223u;
    return seed >> 8;
}
static float random_number() { return (float)(int)random_bits() / (1 << 23) - 1.0f; }
static double value(Kv x) { return kv_load(x); }

// A step's tables: chunks of which len and pos are given, pages in any order.
struct Tables {
    std::vector<Chunk> chunks;
    std::vector<u32> pages, positions, chunk_of;
    u32 n_pages = 1;

    Tables(const std::vector<std::pair<u32, u32>>& of) {
        for (const auto& [len, pos] : of) {
            Chunk c = {};
            c.first = (u32)positions.size(), c.len = len, c.pos = pos, c.first_page = (u32)pages.size();
            for (u32 t = 0; t < len; t++) positions.push_back(pos + t), chunk_of.push_back((u32)chunks.size());
            for (u32 p = 0; p < (pos + len + PAGE - 1) / PAGE; p++) pages.push_back(n_pages++);
            chunks.push_back(c);
        }
        for (size_t i = pages.size(); i > 1; i--) std::swap(pages[i - 1], pages[random_bits() % i]);
    }
    u32 rows() const { return (u32)positions.size(); }
    size_t at(const Chunk& c, u32 pos) const { return (size_t)pages[c.first_page + pos / PAGE] * PAGE + pos % PAGE; }
    Step step() const {
        Step s = {};
        s.positions = positions.data(), s.chunk_of = chunk_of.data(), s.chunks = chunks.data(), s.pages = pages.data();
        return s;
    }
};

struct Choice {
    const char* name;
    std::vector<std::pair<u32, u32>> chunks; // len and pos of each
    u32 n_head, n, slice, per, shares;
    bool is_tile, is_exact; // numbers of few bits: sums are exact in f32, and many tie
    bool is_odd;            // NaN and infinity among them
};

static int test(const Choice& of) {
    const Tables tables(of.chunks);
    const u32 rows = tables.rows();
    u32 longest = 0;
    for (const Chunk& c : tables.chunks) longest = std::max(longest, c.pos + c.len);
    const auto number = [&](float step) {
        return of.is_exact ? step * (float)((int)(random_bits() % 9) - 4) : random_number();
    };
#if K_BLOCKS
    constexpr u32 page_bytes = PAGE * (D + D / 16);
    std::vector<u8> keys((size_t)tables.n_pages * page_bytes, 0xff);  // scales of NaN
    const auto key = [&](size_t row) { return &keys[row / PAGE * page_bytes]; };
    for (const Chunk& c : tables.chunks) {
        for (u32 p = 0; p < c.pos + c.len; p++) {
            u8* page = key(tables.at(c, p));
            for (u32 i = 0; i < D; i++) {
                page[p % PAGE * D + i] = of.is_exact ? 124 + random_bits() % 9 : 1 + random_bits() % 255;
            }
            for (u32 i = 0; i < D; i += 32) {
                const float scale = of.is_exact ? 0.25f + 0.25f * (random_bits() % 2) : 1 + random_number();
                const bool is_nan = of.is_odd && random_bits() % 16 == 0;
                ((u16*)(page + PAGE * D))[i / 32 * PAGE + p % PAGE] = kv_store(is_nan ? NAN : scale);
            }
        }
    }
#else
    std::vector<Kv> keys((size_t)tables.n_pages * PAGE * D, kv_store(NAN));
    const auto key = [&](size_t row) { return &keys[row / PAGE * PAGE * D]; };
    for (const Chunk& c : tables.chunks) {
        for (u32 p = 0; p < c.pos + c.len; p++) {
            const bool is_nan = of.is_odd && random_bits() % 16 == 0;
            for (u32 i = 0; i < D; i++) {
                key(tables.at(c, p))[p % PAGE * D + i] = kv_store(is_nan && i == 3 ? NAN : number(0.5f));
            }
        }
    }
#endif
    std::vector<float> q((size_t)rows * of.n_head * D), weights((size_t)rows * of.n_head);
    for (float& x : q) x = number(0.25f);
    for (float& x : weights) x = number(0.25f);
    for (u32 t = 0; t < rows; t++) {
        // Queries that f16 does not hold, and none at all.
        float* row = &q[((size_t)t * of.n_head + t % of.n_head) * D];
        for (u32 i = 0; i < D; i++) row[i] *= t % 3 == 0 ? 0.0f : t % 3 == 1 ? 1048576.0f : 1.0f;
        if (of.is_odd && t % 4 < 2) weights[(size_t)t * of.n_head] = t % 4 == 0 ? INFINITY : NAN;
    }
    const u32 stride = (longest + PAGE - 1) / PAGE * PAGE;
    std::vector<u32> out((size_t)rows * of.n, 12345);
    Choose a = {};
    a.step = tables.step(), a.q = q.data(), a.weights = weights.data(), a.k_cache = keys.data(), a.out = out.data();
    a.n_head = of.n_head, a.n = of.n, a.stride = stride, a.per = of.per;
    for (u32 first = 0; first < rows; first += of.slice) {
        const u32 n_tokens = std::min(of.slice, rows - first);
        // A read of what no score was written to finds the largest.
        std::vector<u32> ranks((size_t)n_tokens * stride, ~0u);
        a.ranks = ranks.data(), a.first = first, a.n_tokens = n_tokens;
#if KV_F16 && D % 32 == 0 && D <= 128
        const u32 bytes = of.per * ((of.n_head + 15) / 16) * (64 * D + 64);
        if (of.is_tile) {
            launch({of.shares, (n_tokens + of.per - 1) / of.per, 1}, SCORE_THREADS, bytes, choose_scores_tile, a);
        }
#endif
        if (!of.is_tile) launch({of.shares, n_tokens, 1}, SCORE_THREADS, 0, choose_scores, a);
        launch({n_tokens, 1, 1}, BEST_THREADS, 0, choose_best, a);
    }

    u32 n_wrong = 0;
    double worst = 0;
    for (const Chunk& c : tables.chunks) {
        for (u32 t = c.first; t < c.first + c.len; t++) {
            const u32 n_seen = tables.positions[t] + 1;
            std::vector<double> scores;
            for (u32 p = 0; p < n_seen; p++) {
                double sum = 0;
                for (u32 h = 0; h < of.n_head; h++) {
                    double dot = 0;
                    const float* query = &q[((size_t)t * of.n_head + h) * D];
                    for (u32 i = 0; i < D; i++) dot += query[i] * (double)key_at(key(tables.at(c, p)), p % PAGE, i);
                    sum += weights[(size_t)t * of.n_head + h] * fmax(dot, 0.0);
                }
                scores.push_back(sum == sum ? sum + 0.0 : -INFINITY);
            }
            std::vector<u32> order(n_seen);
            for (u32 p = 0; p < n_seen; p++) order[p] = p;
            std::stable_sort(order.begin(), order.end(), [&](u32 x, u32 y) { return scores[x] > scores[y]; });
            order.resize(std::min(of.n, n_seen));
            const double least = scores[order.back()];
            std::sort(order.begin(), order.end());
            order.resize(of.n, ~0u);
            const u32* found = &out[(size_t)t * of.n];
            if (of.is_exact || n_seen <= of.n) {
                n_wrong += !std::equal(order.begin(), order.end(), found);
                continue;
            }
            double most = 0;
            for (double score : scores) most = std::max(most, fabs(score));
            for (u32 i = 0; i < of.n; i++) {
                const bool is_there = found[i] < n_seen && (i == 0 || found[i - 1] < found[i]);
                n_wrong += !is_there;
                if (is_there) worst = std::max(worst, (least - scores[found[i]]) / most);
            }
        }
    }
    printf("  %-44s %u wrong, %.1e below\n", of.name, n_wrong, worst);
    return n_wrong != 0 || !(worst <= 1e-6);
}

struct Sums {
    const char* name;
    std::vector<std::pair<u32, u32>> chunks;
    u32 n_kv, group, n, n_splits;
    float softcap;
    bool has_sinks, is_tile;
};

static int test(const Sums& of) {
    const Tables tables(of.chunks);
    const u32 rows = tables.rows(), n_head = of.n_kv * of.group;
    constexpr u32 stride = V_IN_K ? D_K : D_V;
    const size_t n_rows = (size_t)tables.n_pages * of.n_kv * PAGE;
    std::vector<Kv> keys(n_rows * D_K, kv_store(NAN)), values(n_rows * D_V, kv_store(NAN));
    const auto at = [&](const Chunk& c, u32 kv, u32 pos) {
        return ((size_t)tables.pages[c.first_page + pos / PAGE] * of.n_kv + kv) * PAGE + pos % PAGE;
    };
    std::vector<u32> chosen((size_t)rows * of.n, ~0u);
    for (const Chunk& c : tables.chunks) {
        for (u32 t = 0; t < c.len; t++) {
            // A number of positions, what is left of them not written: nothing else is read.
            const u32 n_seen = c.pos + t + 1, n = std::min(of.n, n_seen);
            u32* list = &chosen[(size_t)(c.first + t) * of.n];
            for (u32 p = 0, i = 0; p < n_seen && i < n; p++) {
                if (random_bits() % (n_seen - p) < n - i) list[i++] = p;
            }
            for (u32 i = 0; i < n; i++) {
                for (u32 kv = 0; kv < of.n_kv; kv++) {
                    for (u32 j = 0; j < D_K; j++) keys[at(c, kv, list[i]) * D_K + j] = kv_store(random_number());
                    for (u32 j = 0; j < D_V; j++) values[at(c, kv, list[i]) * D_V + j] = kv_store(random_number());
                }
            }
        }
    }
    std::vector<float> q((size_t)rows * n_head * D_K), sinks(n_head), out((size_t)rows * n_head * D_V, NAN);
    std::vector<float> partial((size_t)rows * n_head * of.n_splits * (D_V + 2), NAN);
    for (float& x : q) x = 4 * random_number();
    for (float& x : sinks) x = random_number();
    AttentionChosen a = {};
    a.op.step = tables.step(), a.op.q = q.data(), a.op.k_cache = keys.data(), a.op.v_cache = values.data();
    a.op.sinks = of.has_sinks ? sinks.data() : nullptr, a.op.out = out.data(), a.op.partial = partial.data();
    a.op.rows = rows, a.op.n_head = n_head, a.op.n_kv = of.n_kv, a.op.n_splits = of.n_splits;
    a.op.scale = 1.0f / sqrtf(D_K), a.op.softcap = of.softcap, a.chosen = chosen.data(), a.n = of.n;
#if KV_F16 && V_IN_K && D_K % 32 == 0 && D_V % 32 == 0
    if (of.is_tile) {
        const u32 bytes = 2 * (2 * PAGE + ROWS) * STRIDE;
        launch({rows * ((n_head + ROWS - 1) / ROWS), 1, of.n_splits}, TILE_THREADS, bytes, attention_chosen_tile, a);
    }
#endif
    if (!of.is_tile) {
        launch({rows * ((of.group + HEADS - 1) / HEADS), of.n_kv, of.n_splits}, THREADS, 0, attention_chosen, a);
    }
    if (of.n_splits > 1) {
        // As attention_merge does.
        for (size_t row = 0; row < (size_t)rows * n_head; row++) {
            const float* splits = &partial[row * of.n_splits * (D_V + 2)];
            double best = of.has_sinks ? sinks[row % n_head] : -INFINITY, sum = 0, y[D_V] = {};
            for (u32 s = 0; s < of.n_splits; s++) best = fmax(best, splits[s * (D_V + 2) + D_V]);
            for (u32 s = 0; s < of.n_splits; s++) {
                const float *split = splits + s * (D_V + 2), top = split[D_V], total = split[D_V + 1];
                const double factor = top == -INFINITY && total == 0 ? 0 : exp(top - best);
                sum += total * factor;
                for (u32 i = 0; i < D_V; i++) y[i] += split[i] * factor;
            }
            if (of.has_sinks) sum += exp(sinks[row % n_head] - best);
            for (u32 i = 0; i < D_V; i++) out[row * D_V + i] = (float)(y[i] / sum);
        }
    }

    double worst = 0;
    for (const Chunk& c : tables.chunks) {
        for (u32 t = c.first; t < c.first + c.len; t++) {
            for (u32 h = 0; h < n_head; h++) {
                std::vector<double> scores, y(D_V);
                double total = 0, most = of.has_sinks ? sinks[h] : -INFINITY;
                const u32* list = &chosen[(size_t)t * of.n];
                for (u32 i = 0; i < of.n && list[i] != ~0u; i++) {
                    double s = 0;
                    const Kv* key = &keys[at(c, h / of.group, list[i]) * D_K];
                    for (u32 j = 0; j < D_K; j++) s += q[((size_t)t * n_head + h) * D_K + j] * value(key[j]);
                    s *= a.op.scale;
                    if (of.softcap != 0) s = of.softcap * tanh(s / of.softcap);
                    scores.push_back(s), most = std::max(most, s);
                }
                if (of.has_sinks) total = exp(sinks[h] - most);
                for (size_t i = 0; i < scores.size(); i++) {
                    const double share = exp(scores[i] - most);
                    const size_t row = at(c, h / of.group, list[i]);
                    total += share;
                    for (u32 j = 0; j < D_V; j++) y[j] += share * value((V_IN_K ? keys : values)[row * stride + j]);
                }
                for (u32 j = 0; j < D_V; j++) {
                    const double off = fabs(out[((size_t)t * n_head + h) * D_V + j] - y[j] / total);
                    worst = off <= worst ? worst : off == off ? off : INFINITY;
                }
            }
        }
    }
    printf("  %-44s %.1e\n", of.name, worst);
    return !(worst <= (of.is_tile ? 2e-3 : 1e-5));
}

int main() {
    int failed = 0;
    constexpr bool has_tile = KV_F16 && D % 32 == 0 && D <= 128;
    for (int order = 0; order < 2; order++) {
        descending = order;
        const std::vector<std::pair<u32, u32>> mixed = {{1, 9}, {5, 0}, {1, 100}, {3, 60}, {1, 39}, {4, 36}};
        for (int tile = 0; tile <= has_tile; tile++) {
            printf(tile ? "choose, tiles\n" : "choose\n");
            failed += test(Choice{"several chunks", mixed, 5, 40, 7, 3, 2, tile, false, false});
            failed += test(Choice{"ties", mixed, 17, 33, 6, 2, 1, tile, true, false});
            failed += test(Choice{"one position", mixed, 3, 1, 100, 4, 3, tile, true, false});
            failed += test(Choice{"NaN and infinity", mixed, 2, 20, 5, 2, 2, tile, true, true});
            failed += test(Choice{"a long context, ties", {{1, 9000}}, 1, 2048, 1, 1, 5, tile, true, false});
            if (tile) failed += test(Choice{"near ties", {{12, 4000}}, 1, 1999, 12, 4, 16, tile, false, false});
            if (D >= 64) failed += test(Choice{"64 heads", {{2, 700}, {1, 600}}, 64, 512, 3, 2, 4, tile, false, false});
        }
        constexpr bool has_sums_tile = KV_F16 && V_IN_K && D_K % 32 == 0 && D_V % 32 == 0;
        for (int tile = 0; tile <= has_sums_tile; tile++) {
            printf(tile ? "attention, tiles\n" : "attention\n");
            const u32 n_kv = V_IN_K ? 1 : 3;
            failed += test(Sums{"several chunks", mixed, n_kv, 5, 40, 1, 0, false, tile});
            failed += test(Sums{"sinks, a cap", mixed, n_kv, 3, 7, 1, 5, true, tile});
            failed += test(Sums{"splits", {{1, 300}, {1, 0}, {2, 90}}, n_kv, 9, 100, 3, 0, false, tile});
            failed += test(Sums{"splits, sinks, empty ones", {{1, 40}, {1, 500}}, n_kv, 2, 260, 6, 0, true, tile});
            if (V_IN_K) failed += test(Sums{"many heads", {{2, 70}}, 1, 80, 50, 1, 0, false, tile});
        }
    }
    return failed != 0;
}
