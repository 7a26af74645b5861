// The order of packed columns (`batch.h`).
#pragma once

#include "quant/ints.h"

// Where value `i` of a row lies, for weights of `runs` runs a unit, 1, 2 or 4: runs r of four units are a chunk of 64
// values, of which each half of a run of the four units is a piece, so that the lanes that hold the units read 64
// bytes.
__device__ __forceinline__ u32 packed_at(u32 i, u32 runs, u32 paired) {
    const u32 run = i / 16, shift = (u32)__ffs(runs) - 1;
    const u32 unit = paired ? run >> (shift + 1) << 1 | (run & 1) : run >> shift;
    const u32 r = paired ? (run & (2 * runs - 1)) >> 1 : run & (runs - 1);
    return ((unit / 4 << shift) + r) * 64 + i / 8 % 2 * 32 + unit % 4 * 8 + i % 8;
}
