// combine: x[t] (+)= sum_s weights[t, s] * y[t, s] (+ sigmoid(share[t]) * shared_y[t]), slots in order; with a norm it
// also emits the next rms_norm.
// grid (rows), block 32..1024: a block a row. combine_sum, without a norm: grid (rows, d / 256), block 256; it packs
// what the products behind the next norm read (`columns.h`) where d is a multiple of 256.
#include "cuda/columns.h"
#include "cuda/common.h"
#include "cuda/args.h"

// Slots that a thread asks for at a time.
#define SLOTS 8

// The row of y of a pair; lists of a step without such a pair leave a place of one before.
__device__ __forceinline__ u64 row_of_pair(const Combine& a, u64 pair) {
    return a.places ? min(a.places[pair], a.rows * a.n_used - 1) : pair;
}

// Four numbers of y from number `i` of a row on; rows of f32 begin at multiples of 16 bytes, those of bf16 of 8.
__device__ __forceinline__ float4 four_of(const Combine& a, u64 row, u32 i) {
    const u64 at = row * a.d + i;
    if (!a.places) return __ldcs((const float4*)(a.y + at));
    const uint2 v = __ldcs((const uint2*)((const u16*)a.y + at));
    return make_float4(float_of_bf16(v.x & 0xffff), float_of_bits(v.x & 0xffff0000u), float_of_bf16(v.y & 0xffff),
                       float_of_bits(v.y & 0xffff0000u));
}
__device__ __forceinline__ float one_of(const Combine& a, u64 row, u32 i) {
    const u64 at = row * a.d + i;
    return a.places ? float_of_bf16(((const u16*)a.y)[at]) : a.y[at];
}

// The number of a row behind its slots, whose rows of y `row_of(slot)` knows.
template <class RowOf>
__device__ __forceinline__ float combined(const Combine& a, const float* weights, const float* x,
                                          const float* shared_y, const float& share, u32 i, const RowOf& row_of) {
    float v = 0.0f;
    for (u32 first = 0; first < a.n_used; first += SLOTS) {
        float slot[SLOTS];
#pragma unroll
        for (int s = 0; s < SLOTS; s++) slot[s] = first + s < a.n_used ? one_of(a, row_of(first + s), i) : 0.0f;
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            if (first + s < a.n_used) v += weights[first + s] * slot[s];
        }
    }
    if (shared_y) v += share * shared_y[i];
    return a.add ? v + x[i] : v;
}

// Four numbers of a row after its slots, from number `i` on.
__device__ __forceinline__ float4 combined_four(const Combine& a, const float* weights, const u32* rows, const float* x,
                                                const float* shared_y, float share, u32 i) {
    float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
    const auto add = [&](float by, float4 z) { v.x += by * z.x, v.y += by * z.y, v.z += by * z.z, v.w += by * z.w; };
    for (u32 first = 0; first < a.n_used; first += SLOTS) {
        float4 slot[SLOTS];
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            if (first + s < a.n_used) slot[s] = four_of(a, rows[first + s], i);
        }
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            if (first + s < a.n_used) add(weights[first + s], slot[s]);
        }
    }
    if (shared_y) add(share, *(const float4*)(shared_y + i));
    if (a.add) add(1.0f, *(const float4*)(x + i));
    return v;
}

KERNEL __launch_bounds__(1024) combine(const __grid_constant__ Combine a) {
    __shared__ float scratch[33], weights[32], share; // `share` is the shared expert's weight
    __shared__ u32 rows[32];
    PDL_LAUNCH();
    PDL_WAIT();
    const u64 row = blockIdx.x;
    if (threadIdx.x < a.n_used) {
        const u64 pair = row * a.n_used + threadIdx.x;
        weights[threadIdx.x] = a.weights[pair], rows[threadIdx.x] = row_of_pair(a, pair);
    }
    if (threadIdx.x == 0) share = a.share ? sigmoid(a.share[row]) : 1.0f;
    __syncthreads();
    float* x = a.x + row * a.d;
    const float* shared_y = a.shared_y ? a.shared_y + row * a.d : nullptr;
    float* out = a.norm_out + row * a.d;
    if (a.d % 4 == 0) {
        const u32 i = 4 * threadIdx.x;
        float4 kept = {0.0f, 0.0f, 0.0f, 0.0f};
        float sum = 0.0f;
        for (u32 at = i; at < a.d; at += 4 * blockDim.x) {
            const float4 v = combined_four(a, weights, rows, x, shared_y, share, at);
            *(float4*)(x + at) = v;
            if (at == i) kept = v;
            sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
        if (!a.norm_w) return;
        sum = block_sum(sum, scratch);
        const float r = 1.0f / sqrtf(sum / (float)a.d + a.eps);
        for (u32 at = i; at < a.d; at += 4 * blockDim.x) {
            const float4 v = at == i ? kept : *(const float4*)(x + at), w = *(const float4*)(a.norm_w + at);
            *(float4*)(out + at) = make_float4(v.x * r * w.x, v.y * r * w.y, v.z * r * w.z, v.w * r * w.w);
        }
        return;
    }
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < a.d; i += blockDim.x) {
        const float v = combined(a, weights, x, shared_y, share, i, [&](u32 slot) { return rows[slot]; });
        x[i] = v;
        sum += v * v;
    }
    if (!a.norm_w) return;
    sum = block_sum(sum, scratch);
    const float r = 1.0f / sqrtf(sum / (float)a.d + a.eps);
    for (u32 i = threadIdx.x; i < a.d; i += blockDim.x) out[i] = x[i] * r * a.norm_w[i];
}

// Without a norm: a thread a number.
KERNEL __launch_bounds__(256) combine_sum(const __grid_constant__ Combine a) {
    __shared__ float scratch[33];
    PDL_LAUNCH();
    const u64 row = blockIdx.x;
    const u32 i = blockIdx.y * blockDim.x + threadIdx.x;
    const float w = a.columns ? a.next_w[i] : 0.0f;
    PDL_WAIT();
    if (i >= a.d) return;
    float* x = a.x + row * a.d;
    const float* shared_y = a.shared_y ? a.shared_y + row * a.d : nullptr;
    const float share = a.share ? sigmoid(a.share[row]) : 1.0f;
    const u64 first = row * a.n_used;
    const auto row_of = [&](u32 slot) { return row_of_pair(a, first + slot); };
    const float v = combined(a, a.weights + first, x, shared_y, share, i, row_of);
    x[i] = v;
    if (!a.columns) return;
    pack_two(v * w, a.columns + row * column_bytes(a.d), a.d, i);
    const float squares = block_sum(v * v, scratch);
    if (threadIdx.x == 0) a.squares[row * gridDim.y + blockIdx.y] = squares;
}
