// Rows in the form in which wide products read them (`pack` of `wide.h`), put out by the launch that makes them.
#pragma once

#include "cuda/args.h"
#include "cuda/batch_order.h"
#include "cuda/mma.h"
#include "cuda/tile.h"

// Where values `at .. at + 8` of a row lie, `at` a multiple of 8: four words, 4 * (at % 16 / 2 + j ^ row % 8) from
// there on. Both orders have the same chunks, and unit t of a chunk's four.
__device__ __forceinline__ u32* packed_eight(const PackTo& to, u32 row, u32 at) {
    const u32 place = packed_at(at, to.runs, to.paired), chunk = place / 64, t = place % 32 / 8;
    const u32 panels = to.split ? 2 : 1;
    return (u32*)to.out + ((u64)chunk * panels * to.n_groups + row / 8) * 256 + 32 * (row % 8) + t;
}

// Two of them, from number `at` on, which is even.
__device__ __forceinline__ void put_two(const PackTo& to, u32* eight, u32 row, u32 at, float x, float y) {
    const u32 word = 4 * ((at % 16 / 2) ^ row % 8), pair = bf16_pair(x, y);
    eight[word] = pair;
    if (to.split) eight[(u64)to.n_groups * 256 + word] = bf16_rest(x, y, pair);
}

__device__ __forceinline__ void put_wide(const PackTo& to, u32 row, u32 at, const float (&v)[8]) {
    if (at >= to.stride) return;
    u32* const eight = packed_eight(to, row, at);
#pragma unroll
    for (int j = 0; j < 8; j += 2) put_two(to, eight, row, at + j, v[j], v[j + 1]);
}
