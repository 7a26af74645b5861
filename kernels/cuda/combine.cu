// combine: x[t] (+)= sum_s weights[t, s] * y[t, s] (+ sigmoid(share[t]) * shared_y[t]), slots in order; with a norm it
// also emits the next rms_norm.
// grid (rows), block 32..1024: a block a row. combine_sum, without a norm: grid (rows, d / 256), block 256; it packs
// what the products behind the next norm read (`columns.h`) where d is a multiple of 256.
#include "cuda/columns.h"
#include "cuda/common.h"
#include "cuda/pack.h"

// Slots that a thread asks for at a time.
#define SLOTS 8

// Whether a slot's row is read: where no expert of this part was chosen, none was written.
__device__ __forceinline__ bool counts(float weight) { return weight != 0.0f; }

// The number of a row after its slots.
__device__ __forceinline__ float combined(const Combine& a, const float* weights, const float* x, const float* y,
                                        const float* shared_y, const float& share, u32 i) {
    float v = 0.0f;
    for (u32 first = 0; first < a.n_used; first += SLOTS) {
        float slot[SLOTS];
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            slot[s] = first + s < a.n_used && counts(weights[first + s]) ? y[(u64)(first + s) * a.d + i] : 0.0f;
        }
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            if (first + s < a.n_used) v += weights[first + s] * slot[s];
        }
    }
    if (shared_y) v += share * shared_y[i];
    return a.add ? v + x[i] : v;
}

// Four numbers of a row after its slots, from number `i` on; rows begin at multiples of 16 bytes.
__device__ __forceinline__ float4 combined_four(const Combine& a, const float* weights, const float* x, const float* y,
                                                const float* shared_y, float share, u32 i) {
    float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
    const auto add = [&](float by, float4 z) { v.x += by * z.x, v.y += by * z.y, v.z += by * z.z, v.w += by * z.w; };
    for (u32 first = 0; first < a.n_used; first += SLOTS) {
        float4 slot[SLOTS];
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            if (first + s < a.n_used && counts(weights[first + s])) {
                slot[s] = __ldcs((const float4*)(y + (u64)(first + s) * a.d + i));
            }
        }
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            if (first + s < a.n_used && counts(weights[first + s])) add(weights[first + s], slot[s]);
        }
    }
    if (shared_y) add(share, *(const float4*)(shared_y + i));
    if (a.add) add(1.0f, *(const float4*)(x + i));
    return v;
}

KERNEL __launch_bounds__(1024) combine(const __grid_constant__ Combine a) {
    __shared__ float scratch[33], weights[32], share; // `share` is the shared expert's weight
    PDL_LAUNCH();
    PDL_WAIT();
    const u64 row = blockIdx.x;
    if (threadIdx.x < a.n_used) weights[threadIdx.x] = a.weights[row * a.n_used + threadIdx.x];
    if (threadIdx.x == 0) share = a.share ? sigmoid(a.share[row]) : 1.0f;
    __syncthreads();
    float* x = a.x + row * a.d;
    const float* y = a.y + row * a.n_used * a.d;
    const float* shared_y = a.shared_y ? a.shared_y + row * a.d : nullptr;
    float* out = a.norm_out + row * a.d;
    if (a.d % 4 == 0) {
        const u32 i = 4 * threadIdx.x;
        float4 kept = {0.0f, 0.0f, 0.0f, 0.0f};
        float sum = 0.0f;
        for (u32 at = i; at < a.d; at += 4 * blockDim.x) {
            const float4 v = combined_four(a, weights, x, y, shared_y, share, at);
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
        const float v = combined(a, weights, x, y, shared_y, share, i);
        x[i] = v;
        sum += v * v;
    }
    if (!a.norm_w) return;
    sum = block_sum(sum, scratch);
    const float r = 1.0f / sqrtf(sum / (float)a.d + a.eps);
    for (u32 i = threadIdx.x; i < a.d; i += blockDim.x) out[i] = x[i] * r * a.norm_w[i];
}

// The row of y of a pair; lists of a step without such a pair leave a place of one before.
__device__ __forceinline__ u32 row_of_pair(const Combine& a, u64 pair) {
    return min(a.places[pair], a.rows * a.n_used - 1);
}

// As `combine`, or without a norm, of rows in the order of the lists; d is a multiple of 8, `norm_out` may be null. A
// thread has eight numbers at a time: block d / 8 in whole warps, 256 at most.
KERNEL __launch_bounds__(256, 3) combine_listed(const __grid_constant__ Combine a) {
    __shared__ float scratch[33], weights[32], share;
    __shared__ u32 rows[32];
    PDL_LAUNCH();
    PDL_WAIT();
    const u64 row = blockIdx.x;
    float* const x = a.x + row * a.d;
    const u32 i = 8 * threadIdx.x;
    float4 before[2] = {};
    const auto load = [&](u32 at) {
        if (a.add && at < a.d) before[0] = *(const float4*)(x + at), before[1] = *(const float4*)(x + at + 4);
    };
    load(i);
    if (threadIdx.x < a.n_used) {
        const u64 pair = row * a.n_used + threadIdx.x;
        weights[threadIdx.x] = a.weights[pair], rows[threadIdx.x] = row_of_pair(a, pair);
    }
    if (threadIdx.x == 0) share = a.share ? sigmoid(a.share[row]) : 1.0f;
    __syncthreads();
    float kept[8], sum = 0.0f;
    for (u32 at = i; at < a.d; at += 8 * blockDim.x) {
        if (at > i) load(at);
        float v[8] = {};
        for (u32 first = 0; first < a.n_used; first += SLOTS) {
            uint4 slot[SLOTS];
#pragma unroll
            for (int s = 0; s < SLOTS; s++) {
                const u16* y = (const u16*)a.y + at;
                if (first + s < a.n_used && counts(weights[first + s])) {
                    slot[s] = __ldcs((const uint4*)(y + (u64)rows[first + s] * a.d));
                }
            }
#pragma unroll
            for (int s = 0; s < SLOTS; s++) {
                if (first + s >= a.n_used || !counts(weights[first + s])) continue;
                const float by = weights[first + s];
                const u32 words[4] = {slot[s].x, slot[s].y, slot[s].z, slot[s].w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    v[2 * j] += by * float_of_bf16(words[j] & 0xffff);
                    v[2 * j + 1] += by * float_of_bits(words[j] & 0xffff0000u);
                }
            }
        }
        if (a.shared_y) {
            const float* const y = a.shared_y + row * a.d + at;
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] += share * y[j];
        }
        v[0] += before[0].x, v[1] += before[0].y, v[2] += before[0].z, v[3] += before[0].w;
        v[4] += before[1].x, v[5] += before[1].y, v[6] += before[1].z, v[7] += before[1].w;
        *(float4*)(x + at) = make_float4(v[0], v[1], v[2], v[3]);
        *(float4*)(x + at + 4) = make_float4(v[4], v[5], v[6], v[7]);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            sum += v[j] * v[j];
            if (at == i) kept[j] = v[j];
        }
    }
    if (!a.norm_w) return;
    const float r = 1.0f / sqrtf(block_sum(sum, scratch) / (float)a.d + a.eps);
    for (u32 at = i; at < a.d; at += 8 * blockDim.x) {
        float y[8];
#pragma unroll
        for (int h = 0; h < 8; h += 4) {
            const float4 w = *(const float4*)(a.norm_w + at + h);
            const float4 v = at == i ? make_float4(kept[h], kept[h + 1], kept[h + 2], kept[h + 3])
                                     : *(const float4*)(x + at + h);
            y[h] = v.x * r * w.x, y[h + 1] = v.y * r * w.y, y[h + 2] = v.z * r * w.z, y[h + 3] = v.w * r * w.w;
            if (a.norm_out) {
                *(float4*)(a.norm_out + row * a.d + at + h) = make_float4(y[h], y[h + 1], y[h + 2], y[h + 3]);
            }
        }
#pragma unroll
        for (int form = 0; form < 2; form++) {
            if (a.packed[form].out) put_wide(a.packed[form], (u32)row, at, y);
        }
    }
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
    const float v = combined(a, a.weights + row * a.n_used, x, a.y + row * a.n_used * a.d, shared_y, share, i);
    x[i] = v;
    if (!a.columns) return;
    pack_two(v * w, a.columns + row * column_bytes(a.d), a.d, i);
    const float squares = block_sum(v * v, scratch);
    if (threadIdx.x == 0) a.squares[row * gridDim.y + blockIdx.y] = squares;
}
