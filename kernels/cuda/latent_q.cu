// latent_q: what comes before attention over latents, for one to eight single tokens: the product that makes the
// queries (-DWEIGHT_B, where it is here), a head's part without rotation times the head's matrix (-DWEIGHT), its other
// part rotated behind it; and the new row of the cache: the latent's norm, the rotated key (-DKV_F16).
//
// grid (blocks of a head * heads, then a block a token), block VEC_THREADS. With the product the blocks of a head share
// its rows, and the one that ends last goes on with the head's queries; without it they share the rows of the head's
// matrix. Shared memory: what `vec.h` wants, then a head's queries of all tokens from `queries_at` on.
#include "cuda/kv.h"
#include "cuda/linear.h"
#include "cuda/vec.h"
#include WEIGHT_HEADER
#ifdef WEIGHT_B
#include WEIGHT_HEADER_B
#endif

extern __shared__ uint4 shared[];

// The first `2 * half` numbers of a row are turned, the others stay: `store(i, y)`.
template <class Load, class Store>
__device__ __forceinline__ void rotate(const LatentQ& a, u32 token, const Load& load, const Store& store) {
    const float* angles = a.table + 2 * (u64)token * a.half;
    for (u32 i = threadIdx.x; i < a.half; i += blockDim.x) {
        const u32 first = a.interleaved ? 2 * i : i, second = a.interleaved ? 2 * i + 1 : i + a.half;
        const float u = load(first), v = load(second), cosine = angles[2 * i], sine = angles[2 * i + 1];
        store(first, u * cosine - v * sine);
        store(second, u * sine + v * cosine);
    }
    for (u32 i = 2 * a.half + threadIdx.x; i < a.d_pe; i += blockDim.x) store(i, load(i));
}

// The row that a token adds to the cache.
__device__ __forceinline__ void append(const LatentQ& a, u32 token) {
    __shared__ float scratch[33];
    const u32 n = a.w.n, d = n + a.d_pe;
    const float* row = a.kv + (u64)token * d;
    const u32 pos = a.step.positions[token];
    const Chunk& c = a.step.chunks[a.step.chunk_of[token]];
    Kv* cache = (Kv*)a.cache + ((u64)page_of(a.step, c, a.windowed, pos / PAGE) * PAGE + pos % PAGE) * d;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) sum += row[i] * row[i];
    const float r = 1.0f / sqrtf(block_sum(sum, scratch) / (float)n + a.eps);
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) cache[i] = kv_store(row[i] * r * a.norm_w[i]);
    rotate(a, token, [&](u32 i) { return row[n + i]; }, [&](u32 i, float y) { cache[n + i] = kv_store(y); });
}

// A head's matrix that lies transposed, [k, n], times a row of shared memory: threads are units of n times slices of k,
// as in `head_linear_t`. `sums` holds 17 numbers a thread.
__device__ __forceinline__ void transposed(const HeadLinear& w, u32 head, u32 block, u32 n_blocks, const float* x,
                                           float* out, float* sums) {
    const u32 units = (w.n + WEIGHT::UNIT - 1) / WEIGHT::UNIT;
    u32 lanes = 1;
    while (lanes < 32 && lanes < units) lanes *= 2;
    const u32 slices = blockDim.x / lanes, slice = threadIdx.x / lanes;
    for (u32 first = block * lanes; first < units; first += n_blocks * lanes) {
        const u32 unit = first + threadIdx.x % lanes;
        float acc[WEIGHT::RUNS][16];
#pragma unroll
        for (int i = 0; i < WEIGHT::RUNS * 16; i++) acc[i / 16][i % 16] = 0.0f;
        if (unit < units) {
            for (u32 i = slice; i < w.k; i += slices) {
                WEIGHT::Raw raw;
                WEIGHT::load(row_of<WEIGHT>(w.w.q, w.w.scales, w.w.biases, (u64)head * w.k + i, w.n), unit, raw);
#pragma unroll
                for (int r = 0; r < WEIGHT::RUNS; r++) {
                    float v[16];
                    decode_run<WEIGHT>(raw, unit, r, v);
#pragma unroll
                    for (int j = 0; j < 16; j++) acc[r][j] = fmaf(v[j], x[i], acc[r][j]);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < WEIGHT::RUNS; r++) {
            __syncthreads();
#pragma unroll
            for (int i = 0; i < 16; i++) sums[17 * threadIdx.x + i] = acc[r][i];
            __syncthreads();
            for (u32 i = threadIdx.x; i < lanes * 16; i += blockDim.x) {
                const u32 of_unit = first + i / 16, n = 16 * run_index<WEIGHT>(of_unit, r) + i % 16;
                float sum = 0.0f;
                for (u32 from = 0; from < slices; from++) sum += sums[17 * (from * lanes + i / 16) + i % 16];
                if (of_unit < units && n < w.n) out[n] = sum;
            }
        }
    }
}

template <int COLS>
__device__ __forceinline__ void latent_q(const LatentQ& a) {
    PDL_LAUNCH();
    const HeadLinear& w = a.w;
    const u32 head = blockIdx.x / a.blocks, block = blockIdx.x % a.blocks, d = w.k + a.d_pe, stride = (d + 3) / 4 * 4;
    if (head >= w.n_head) {
        PDL_WAIT();
        append(a, blockIdx.x - w.n_head * a.blocks);
        return;
    }
    float* queries = (float*)((u8*)shared + a.queries_at);
#ifdef WEIGHT_B
    // The block's rows of the product.
    const u32 each = (d + a.blocks - 1) / a.blocks, first = block * each, count = min(each, d - first);
    const LinearPart& part = a.q.parts[0];
    vec<WEIGHT_B, COLS, false, false>(
        a.q.x, a.q.k, a.q.prologue, w.rows, a.q.k, count, 0, 1, shared, true,
        [&](u64 i, bool) {
            return row_of<WEIGHT_B>(part.w.q, part.w.scales, part.w.biases, (u64)head * d + first + i, a.q.k);
        },
        [&](u64 i, u32 col, float sum, float) { a.heads[((u64)col * w.n_head + head) * d + first + i] = sum; });
    __threadfence();
    __syncthreads();
    __shared__ u32 is_last;
    if (threadIdx.x == 0) {
        is_last = a.blocks == 1 || atomicAdd(a.counters + head, 1) == a.blocks - 1;
        if (is_last && a.blocks > 1) a.counters[head] = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    const u32 own = 0, n_own = 1;
#else
    PDL_WAIT();
    const u32 own = block, n_own = a.blocks;
#endif
    for (u32 i = threadIdx.x; i < w.rows * d; i += blockDim.x) {
        const u32 token = i / d, column = i % d;
        queries[token * stride + column] = __ldcg(a.heads + ((u64)token * w.n_head + head) * d + column);
    }
    __syncthreads();
    const u32 width = w.n + a.d_pe;
    if (own == 0) {
        for (u32 token = 0; token < w.rows; token++) {
            float* out = w.out + ((u64)token * w.n_head + head) * width + w.n;
            const float* row = queries + token * stride + w.k;
            rotate(a, token, [&](u32 i) { return row[i]; }, [&](u32 i, float y) { out[i] = y; });
        }
    }
    if (a.transposed) {
        for (u32 token = 0; token < w.rows; token++) {
            transposed(w, head, own, n_own, queries + token * stride, w.out + ((u64)token * w.n_head + head) * width,
                       (float*)shared);
        }
        return;
    }
    const u32 rows_each = (w.n + n_own - 1) / n_own, first_row = min(own * rows_each, w.n);
    const u32 n_rows = min(rows_each, w.n - first_row);
    if (n_rows == 0) return;
    vec<WEIGHT, COLS, false, false>(
        queries, stride, Prologue{}, w.rows, w.k, n_rows, 0, 1, shared, false,
        [&](u64 i, bool) {
            return row_of<WEIGHT>(w.w.q, w.w.scales, w.w.biases, (u64)head * w.n + first_row + i, w.k);
        },
        [&](u64 i, u32 col, float sum, float) {
            w.out[((u64)col * w.n_head + head) * width + first_row + i] = sum;
        });
}

#define LATENT(C) \
    KERNEL __launch_bounds__(VEC_THREADS) latent_q##C(const __grid_constant__ LatentQ a) { latent_q<C>(a); }
LATENT(1)
LATENT(2)
LATENT(4)
LATENT(8)
