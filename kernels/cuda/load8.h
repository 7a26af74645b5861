// Activations as the weight kernels read them.
#pragma once

#include "cuda/common.h"
#include "cuda/mma.h"
#include "quant/unit.h"

// Values `at .. at + 8` of a row of `n`; those behind its end are zero. `wide`: rows begin at multiples of 16 bytes. A
// row of whole BLOCKs ends at none of the eight, and is wide.
template <int BLOCK>
__device__ __forceinline__ void load8(const float* row, bool wide, u32 n, u32 at, float (&v)[8]) {
    if (BLOCK > 1 ? at < n : wide && at + 8 <= n) {
        const float4 a = *(const float4*)(row + at), b = *(const float4*)(row + at + 4);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = BLOCK == 1 && at + i < n ? row[at + i] : 0.0f;
    }
}

// What numbers of at most `amax` are multiplied with to become integers of at most LEVELS, and what takes them back.
// Numbers below 1e-30 are zero, since the inverse of their scale could be infinite. A scale of NaN keeps NaN and
// infinities, whatever the integers are.
struct ByteScale {
    float inverse, d;
};
template <int LEVELS = 127>
__device__ __forceinline__ ByteScale byte_scale(float amax) {
    return {amax > 1e-30f ? __fdividef(LEVELS * 0.0625f, amax * 0.0625f) : 0.0f,
            !(amax < INF) ? QNAN : amax > 1e-30f ? amax * (1.0f / LEVELS) : 0.0f};
}

// The low bytes of four words.
__device__ __forceinline__ u32 low_bytes(const u32 (&q)[4]) {
    return permute(permute(q[0], q[1], 0x0040), permute(q[2], q[3], 0x0040), 0x5410);
}

// A lane's eight values as bytes, with one scale for the 64 of eight neighbouring lanes, which it returns; `sum` is
// that of the bytes of four lanes.
__device__ __forceinline__ float bytes64(const float (&v)[8], u32 (&words)[2], u32& sum) {
    float amax = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) amax = max_or_nan(amax, fabsf(v[j]));
#pragma unroll
    for (int step = 1; step < 8; step *= 2) amax = max_or_nan(amax, __shfl_xor_sync(FULL_MASK, amax, step));
    const ByteScale scale = byte_scale(amax);
    sum = 0;
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
        u32 q[4];
#pragma unroll
        for (int i = 0; i < 4; i++) q[i] = __float_as_uint(fmaf(v[j + i], scale.inverse, 12582912.0f));
        words[j / 4] = low_bytes(q);
        sum = dp4a_signed(words[j / 4], 0x01010101u, sum);
    }
    sum += __shfl_xor_sync(FULL_MASK, sum, 1);
    sum += __shfl_xor_sync(FULL_MASK, sum, 2);
    return scale.d;
}
