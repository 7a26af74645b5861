// The kernels around attention over latents, for one type, against sums in double: emulated on this machine
// (`host/run.sh`). -DPRODUCT=1: the product of the queries goes with the rest.
#include "emulate.h"

#define KV_F16 1
#if PRODUCT
#define WEIGHT_HEADER_B WEIGHT_HEADER
#define WEIGHT_B WEIGHT
#endif

#include "cuda/latent_q.cu"
#undef LATENT
#include "cuda/latent_out.cu"

alignas(128) uint4 shared[131072 / 16];

#include "weights.h"

typedef void (*LatentKernel)(const LatentQ);
typedef void (*OutKernel)(const LatentOut);

// Heads of `nope` numbers and `pe` that are rotated, over latents of `n`; `k` columns of the product.
static void test_q(LatentKernel kernel, u32 rows, u32 n_head, u32 n, u32 nope, u32 pe, u32 k, bool transposed,
                   u32 blocks) {
    const u32 d = nope + pe, width = n + pe, half = pe / 2 - 1, per = 3;
    const Array<float> x = normals((size_t)rows * k), gain = normals(k), norm_w = normals(n);
    const Array<float> kv = normals((size_t)rows * width);
    const Weights w(transposed ? n_head * nope : n_head * n, transposed ? n : nope);
#if PRODUCT
    Weights wq(n_head * d, k);
    Array<float> heads((size_t)rows * n_head * d, NAN);
#else
    Array<float> heads = normals((size_t)rows * n_head * d);
#endif
    Array<float> out((size_t)rows * n_head * width, NAN), table(rows * half * 2);
    for (u32 i = 0; i < rows * half; i++) {
        const double angle = uniform() * 6;
        table[2 * i] = (float)cos(angle), table[2 * i + 1] = (float)sin(angle);
    }
    Array<u16> cache((size_t)rows * per * PAGE * width, 0x7e00);
    Array<u32> pos, chunk_of, pages, counters(n_head, 0);
    Array<Chunk> chunks;
    for (u32 t = 0; t < rows; t++) {
        pos.push_back(31 + 3 * t), chunk_of.push_back(t);
        chunks.push_back({t, 1, 31 + 3 * t, t * per, 0, 0, 0, 0});
        for (u32 i = 0; i < per; i++) pages.push_back(t * per + i);
    }
    LatentQ a = {};
    a.step.positions = pos.data(), a.step.chunk_of = chunk_of.data(), a.step.chunks = chunks.data();
    a.step.pages = pages.data();
    a.w = {nullptr, w.matrix, out.data(), rows, n_head, n, nope};
    a.heads = heads.data(), a.kv = kv.data(), a.norm_w = norm_w.data(), a.cache = cache.data();
    a.table = table.data(), a.counters = counters.data(), a.d_pe = pe, a.half = half, a.interleaved = rows % 2;
    a.transposed = transposed, a.blocks = blocks, a.queries_at = SHARED, a.eps = 1e-3f;
    std::vector<double> want, want_heads;
#if PRODUCT
    a.q = {x.data(), rows, k, 1, 0, {}, {}};
    a.q.prologue.kind = NORMED, a.q.prologue.w = gain.data(), a.q.prologue.eps = 1e-2f;
    a.q.parts[0] = {wq.matrix, nullptr, heads.data(), n_head * d};
    for (u32 t = 0; t < rows; t++) {
        double squares = 0;
        for (u32 i = 0; i < k; i++) squares += (double)x[t * k + i] * x[t * k + i];
        Array<float> in(k);
        for (u32 i = 0; i < k; i++) in[i] = (float)(x[t * k + i] / sqrt(squares / k + 1e-2) * gain[i]);
        for (u32 i = 0; i < n_head * d; i++) want_heads.push_back(wq.dot(i, in.data(), k));
    }
#endif
    launch({n_head * blocks + rows, 1, 1}, VEC_THREADS, 131072, kernel, a);
    if (PRODUCT) check("latent heads", heads, want_heads, 2 * VEC_LIMIT);
    const auto turned = [&](const float* from, u32 t) {
        std::vector<double> y(from, from + pe);
        for (u32 i = 0; i < half; i++) {
            const u32 first = a.interleaved ? 2 * i : i, second = a.interleaved ? 2 * i + 1 : i + half;
            const double u = from[first], v = from[second], c = table[2 * (t * half + i)], s = table[2 * (t * half + i) + 1];
            y[first] = u * c - v * s, y[second] = u * s + v * c;
        }
        return y;
    };
    Array<float> found_pe;
    std::vector<double> want_pe;
    Array<float> found;
    for (u32 t = 0; t < rows; t++) {
        for (u32 h = 0; h < n_head; h++) {
            const float* q = &heads[((size_t)t * n_head + h) * d];
            for (u32 i = 0; i < n; i++) {
                double sum = 0;
                for (u32 j = 0; j < nope; j++)
                    sum += (double)q[j] * (transposed ? w.values[((size_t)h * nope + j) * n + i]
                                                      : w.values[((size_t)h * n + i) * nope + j]);
                want.push_back(sum), found.push_back(out[((size_t)t * n_head + h) * width + i]);
            }
            const auto y = turned(q + nope, t);
            for (u32 i = 0; i < pe; i++)
                want_pe.push_back(y[i]), found_pe.push_back(out[((size_t)t * n_head + h) * width + n + i]);
        }
        const float* row = &kv[(size_t)t * width];
        double squares = 0;
        for (u32 i = 0; i < n; i++) squares += (double)row[i] * row[i];
        const auto y = turned(row + n, t);
        const u32 p = pos[t];
        for (u32 i = 0; i < width; i++) {
            const u16 got = cache[((size_t)(t * per + p / PAGE) * PAGE + p % PAGE) * width + i];
            const double wanted = i < n ? row[i] / sqrt(squares / n + 1e-3) * norm_w[i] : y[i - n];
            failures += got == 0x7e00 || fabs((double)float_of_f16(got) - wanted) > 4e-3 * (1 + fabs(wanted));
        }
    }
    for (u32 c : counters) failures += c != 0;
    check(transposed ? "latent queries, transposed" : "latent queries", found, want, transposed ? 1e-5 : 2 * VEC_LIMIT);
    check("latent rotated", found_pe, want_pe, 1e-6);
}

static void test_out(OutKernel kernel, u32 rows, u32 n_head, u32 n, u32 k, u32 n_splits, u32 blocks) {
    const Weights w(n_head * n, k);
    Array<float> x = normals((size_t)rows * n_head * k), partial = normals((size_t)rows * n_head * n_splits * (k + 2));
    Array<float> out((size_t)rows * n_head * n, NAN);
    for (u32 i = 0; n_splits > 1 && i < rows * n_head; i++) {
        float* splits = &partial[(size_t)i * n_splits * (k + 2)];
        std::vector<double> row(k);
        double best = -1e9, total = 0;
        for (u32 s = 0; s < n_splits; s++) {
            float* split = splits + (size_t)s * (k + 2);
            split[k + 1] = 1 + (float)uniform();
            // The last one has no positions.
            if (s + 1 == n_splits) {
                for (u32 j = 0; j < k; j++) split[j] = 0;
                split[k] = -INF, split[k + 1] = 0;
            } else {
                best = std::max(best, (double)split[k]);
            }
        }
        for (u32 s = 0; s + 1 < n_splits; s++) {
            const float* split = splits + (size_t)s * (k + 2);
            const double by = exp(split[k] - best);
            total += by * split[k + 1];
            for (u32 j = 0; j < k; j++) row[j] += by * split[j];
        }
        for (u32 j = 0; j < k; j++) x[(size_t)i * k + j] = (float)(row[j] / total);
    }
    const Array<float> given = n_splits > 1 ? Array<float>(x.size(), NAN) : x;
    LatentOut a = {{given.data(), w.matrix, out.data(), rows, n_head, n, k}, partial.data(), n_splits, SHARED};
    launch({blocks, n_head, 1}, VEC_THREADS, 131072, kernel, a);
    std::vector<double> want;
    for (u32 i = 0; i < rows * n_head; i++) {
        for (u32 j = 0; j < n; j++) want.push_back(w.dot((u64)(i % n_head) * n + j, &x[(size_t)i * k], k));
    }
    check("latent out", out, want, 2 * VEC_LIMIT);
}

int main() {
    const u32 block = WEIGHT::BLOCK, odd = block == 1 ? 23 : block, whole = block == 1 ? 96 : 2 * block;
    for (int order = 0; order < 2; order++) {
        descending = order;
        test_q(latent_q1, 1, 3, 40, odd, 10, odd, false, 2);
        test_q(latent_q4, 3, 2, 17, whole, 8, whole, false, 3);
        test_q(latent_q8, 6, 2, whole, 24, 6, whole, true, 2);
        test_q(latent_q1, 1, 2, odd, 30, 6, odd, true, 1);
        test_out(latent_out1, 1, 3, 33, whole, 1, 2);
        test_out(latent_out1, 1, 2, 9, odd, 5, 1);
        test_out(latent_out8, 5, 2, 20, whole, 40, 1);
    }
    return failures != 0;
}
