// The instructions of the matrix products that have no name in CUDA C++.
#pragma once

#include "quant/ints.h"

// sum + the four products of signed (unsigned) bytes of `w` with signed bytes of `x`.
__device__ __forceinline__ u32 dp4a_signed(u32 w, u32 x, u32 sum) { return (u32)__dp4a((int)w, (int)x, (int)sum); }
__device__ __forceinline__ u32 dp4a_unsigned(u32 w, u32 x, u32 sum) {
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(w), "r"(x));
    return sum;
}

// The lower two bytes of `bytes` times a pair of 16-bit numbers.
__device__ __forceinline__ int dp2a_signed(u32 pair, u32 bytes) {
    int sum;
    asm("dp2a.lo.s32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(pair), "r"(bytes), "r"(0));
    return sum;
}

// Two floats rounded to bf16, the first in the low half.
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// The same of f16.
__device__ __forceinline__ u32 f16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// a * b + c of two bf16 numbers each, rounded once.
__device__ __forceinline__ u32 bf16_fma(u32 a, u32 b, u32 c) {
    u32 out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}

// c += a * b: a is 16 x 16, row g = lane / 4 in a0 and a2, row g + 8 in a1 and a3; b is 16 x 8, column g in b0 and b1.
// With t = lane % 4, pairs 2t, 2t + 1 of the 16 lie in a0, a1 and b0, pairs 2t + 8, 2t + 9 in a2, a3 and b1. c0, c1 are
// row g, c2, c3 row g + 8, columns 2t, 2t + 1.
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
        "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same of f16.
__device__ __forceinline__ void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
        "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c += a * b of bytes, unsigned in a, signed in b: a is 16 x 32, b 32 x 8; with t = lane % 4, bytes 4t to 4t + 3 of
// row g lie in a0, 16 + 4t to 16 + 4t + 3 in a2, those of row g + 8 in a1 and a3, those of column g of b in b0 and b1.
// Sums lie as those of `mma`.
__device__ __forceinline__ void mma_bytes(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, "
        "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same where both have signs and b has 16 rows: a0, a1 and b0 are all there is.
__device__ __forceinline__ void mma_short(int (&c)[4], u32 a0, u32 a1, u32 b0) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, "
        "{%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
}

// As `mma_bytes` without sums before.
__device__ __forceinline__ void mma_bytes_of(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, "
        "{%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
}

// The transpose of an 8 x 8 matrix of 16 bits, of which a lane has two numbers of row lane / 4.
__device__ __forceinline__ u32 transpose(u32 pair) {
    u32 out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}

// Four such matrices in shared memory, transposed: lanes 8 i to 8 i + 7 have the addresses of the rows of matrix i.
__device__ __forceinline__ void load_transposed(u32 (&v)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"((u32)__cvta_generic_to_shared(row))
                 : "memory");
}

// The same as they lie.
__device__ __forceinline__ void load_matrices(u32 (&v)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"((u32)__cvta_generic_to_shared(row))
                 : "memory");
}

// The larger number, or NaN where one is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float x;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
    return x;
}
