// pack: rows of x behind a norm or a gate, rounded to bf16 in the order in which products of 9 to 64 rows read them
// (`batch.h`) or those of more (`wide.h`), or as f32; a residual is added to x first. grid (rows), block 64..1024: a
// thread takes 8 values at a time.
#include "cuda/common.h"
#include "cuda/load8.h"
#include "cuda/pack.h"

// Values `at .. at + 8`, zero behind the row's end.
__device__ __forceinline__ void values(const Pack& a, const float* row, u32 at, float (&v)[8]) {
    if (a.k % 4 == 0 && at + 8 <= a.k) {
        load8<8>(row, true, a.k, at, v);
    } else {
        load8<1>(row, false, a.k, at, v);
    }
}

// The gate of 8 values, and the norm of their head, which neighbouring lanes hold: heads are powers of two of 8 to 256
// numbers.
__device__ __forceinline__ void gate(const Prologue& p, u32 row, bool is_there, u32 at, float (&v)[8]) {
    float r = 1.0f;
    if (p.kind == GATED_NORM) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) sum += v[i] * v[i];
        for (u32 step = 1; step < p.d_head / 8; step *= 2) sum += __shfl_xor_sync(FULL_MASK, sum, step);
        r = 1.0f / sqrtf(sum / (float)p.d_head + p.eps);
    }
    if (!is_there) return;
    const u32 in_head = at % p.d_head;
    const float* gates = p.gate + (u64)row * p.gate_row + (u64)(at / p.d_head) * p.gate_head + in_head;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float g = gates[i];
        v[i] *= sigmoid(g);
        if (p.kind == GATED_NORM) v[i] *= g * r * p.w[in_head + i];
    }
}

__device__ __forceinline__ void put(const PackTo& to, u32 row, u32 k, u32 at, const float (&v)[8]) {
    if (to.n_groups > 0) {
        put_wide(to, row, at, v);
    } else if (to.runs == 0) {
        float* out = (float*)to.out + (u64)row * to.stride + at;
        if (to.stride % 4 == 0 && at + 8 <= k) {
            *(float4*)out = make_float4(v[0], v[1], v[2], v[3]);
            *(float4*)(out + 4) = make_float4(v[4], v[5], v[6], v[7]);
            return;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (at + i < k) out[i] = v[i];
        }
    } else if (at < to.stride) {
        u16* out = (u16*)to.out + (u64)row * to.stride + packed_at(at, to.runs, to.paired);
        *(uint4*)out = make_uint4(bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]), bf16_pair(v[4], v[5]),
                                  bf16_pair(v[6], v[7]));
    }
}

KERNEL __launch_bounds__(1024) pack(const __grid_constant__ Pack a) {
    __shared__ float scratch[33];
    PDL_LAUNCH();
    const u32 row = blockIdx.x, at = 8 * threadIdx.x;
    float w[8] = {};
    if (a.prologue.kind == NORMED) values(a, a.prologue.w, at, w);
    PDL_WAIT();
    float* const x = a.x + (u64)row * a.k;
    const float* const residual = a.residual ? a.residual + (u64)row * a.k : nullptr;
    // A row and what is added to it are of multiples of 8 numbers.
    const auto added = [&](u32 i, float (&v)[8]) {
        values(a, x, i, v);
        if (!residual || i >= a.k) return;
        float y[8];
        load8<8>(residual, true, a.k, i, y);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] += y[j];
        *(float4*)(x + i) = make_float4(v[0], v[1], v[2], v[3]);
        *(float4*)(x + i + 4) = make_float4(v[4], v[5], v[6], v[7]);
    };
    float v[8], r = 1.0f;
    added(at, v);
    if (a.prologue.kind == NORMED) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) sum += v[i] * v[i];
        for (u32 more = at + 8 * blockDim.x; more < a.k; more += 8 * blockDim.x) {
            float u[8];
            added(more, u);
#pragma unroll
            for (int i = 0; i < 8; i++) sum += u[i] * u[i];
        }
        r = 1.0f / sqrtf(block_sum(sum, scratch) / (float)a.k + a.prologue.eps);
    }
    u32 end = a.k;
#pragma unroll
    for (int i = 0; i < 3; i++) {
        if (a.to[i].out && a.to[i].runs) end = max(end, a.to[i].stride);
    }
    // A block goes on as a whole, since lanes share heads.
    for (u32 first = 0; first < end; first += 8 * blockDim.x) {
        const u32 i = first + at;
        if (first > 0) {
            values(a, x, i, v);
            if (a.prologue.kind == NORMED) values(a, a.prologue.w, i, w);
        }
        if (a.prologue.kind == NORMED) {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] *= r * w[j];
        } else if (a.prologue.kind != PLAIN) {
            gate(a.prologue, row, i < a.k, i, v);
        }
        put(a.to[0], row, a.k, i, v);
#pragma unroll
        for (int other = 1; other < 3; other++) {
            if (a.to[other].out) put(a.to[other], row, a.k, i, v);
        }
    }
}
