// Activations as the weight kernels read them.
#pragma once

#include "quant/ints.h"

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
