// `kernels/cuda/mma.h` for emulation.
#pragma once

#include "emulate.h"
#include "quant/ints.h"

inline u32 dp4a_signed(u32 w, u32 x, u32 sum) {
    for (int i = 0; i < 4; i++) sum += (int)(i8)(w >> (8 * i)) * (int)(i8)(x >> (8 * i));
    return sum;
}
inline u32 dp4a_unsigned(u32 w, u32 x, u32 sum) {
    for (int i = 0; i < 4; i++) sum += (int)(u8)(w >> (8 * i)) * (int)(i8)(x >> (8 * i));
    return sum;
}
inline int dp2a_signed(u32 pair, u32 bytes) {
    return (i16)pair * (i8)bytes + (i16)(pair >> 16) * (i8)(bytes >> 8);
}
inline float max_or_nan(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }
inline u32 to_bf16(float x) {
    const u32 bits = emulate::bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 bf16_pair(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }

inline u32 f16_pair(float low, float high) {
    const _Float16 x[2] = {(_Float16)low, (_Float16)high};
    u32 pair;
    memcpy(&pair, x, 4);
    return pair;
}

inline u32 bf16_fma(u32 a, u32 b, u32 c) {
    const auto half = [&](u32 shift) {
        const auto value = [&](u32 word) { return (double)emulate::number(word >> shift << 16); };
        return to_bf16((float)(value(a) * value(b) + value(c)));
    };
    return half(0) | half(16) << 16;
}

template <class Value>
void mma_of(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, const Value& value) {
    const auto all = emulate::exchange<6>({a0, a1, a2, a3, b0, b1});
    const u32 g = emulate::now % 32 / 4, t = emulate::now % 4;
    for (u32 i = 0; i < 4; i++) {
        double sum = c[i];
        for (u32 k = 0; k < 16; k++) {
            const u32 from = k % 8 / 2;  // the lane of four that holds it
            const u32 a = all[4 * g + from][2 * (k / 8) + i / 2], b = all[4 * (2 * t + i % 2) + from][4 + k / 8];
            sum += (double)value(a, k % 2) * (double)value(b, k % 2);
        }
        c[i] = (float)sum;
    }
}
inline void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_of(c, a0, a1, a2, a3, b0, b1,
           [](u32 word, u32 half) { return emulate::number(half ? word & 0xffff0000u : word << 16); });
}
inline void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_of(c, a0, a1, a2, a3, b0, b1, [](u32 word, u32 half) {
        const u16 bits = (u16)(word >> (16 * half));
        _Float16 x;
        memcpy(&x, &bits, 2);
        return (float)x;
    });
}

inline void mma_bytes(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const auto all = emulate::exchange<6>({a0, a1, a2, a3, b0, b1});
    const u32 g = emulate::now % 32 / 4, t = emulate::now % 4;
    for (u32 i = 0; i < 4; i++) {
        for (u32 k = 0; k < 32; k++) {
            const u32 from = k % 16 / 4, shift = 8 * (k % 4);
            const u32 a = all[4 * g + from][2 * (k / 16) + i / 2], b = all[4 * (2 * t + i % 2) + from][4 + k / 16];
            c[i] += (int)(u8)(a >> shift) * (int)(i8)(b >> shift);
        }
    }
}
inline void mma_short(int (&c)[4], u32 a0, u32 a1, u32 b0) {
    const auto all = emulate::exchange<3>({a0, a1, b0});
    const u32 g = emulate::now % 32 / 4, t = emulate::now % 4;
    for (u32 i = 0; i < 4; i++) {
        for (u32 k = 0; k < 16; k++) {
            const u32 a = all[4 * g + k / 4][i / 2], b = all[4 * (2 * t + i % 2) + k / 4][2];
            c[i] += (int)(i8)(a >> (8 * (k % 4))) * (int)(i8)(b >> (8 * (k % 4)));
        }
    }
}
inline void mma_bytes_of(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    c[0] = c[1] = c[2] = c[3] = 0;
    mma_bytes(c, a[0], a[1], a[2], a[3], b0, b1);
}

inline u32 transpose(u32 pair) {
    const auto all = emulate::exchange<1>({pair});
    const u32 g = emulate::now % 32 / 4, t = emulate::now % 4;
    const auto at = [&](u32 row) { return all[4 * row + g / 2][0] >> (16 * (g % 2)) & 0xffffu; };
    return at(2 * t) | at(2 * t + 1) << 16;
}
inline void load_transposed(u32 (&v)[4], const void* row) {
    const u64 mine = (u64)row;
    if (mine % 16) abort();
    const auto all = emulate::exchange<2>({(u32)mine, (u32)(mine >> 32)});
    const u32 g = emulate::now % 32 / 4, t = emulate::now % 4;
    for (u32 i = 0; i < 4; i++) {
        const auto at = [&](u32 r) { return (u32)((const u16*)((u64)all[8 * i + r][1] << 32 | all[8 * i + r][0]))[g]; };
        v[i] = at(2 * t) | at(2 * t + 1) << 16;
    }
}
inline void load_matrices(u32 (&v)[4], const void* row) {
    const u64 mine = (u64)row;
    if (mine % 16) abort();
    const auto all = emulate::exchange<2>({(u32)mine, (u32)(mine >> 32)});
    const u32 g = emulate::now % 32 / 4, t = emulate::now % 4;
    for (u32 i = 0; i < 4; i++) v[i] = ((const u32*)((u64)all[8 * i + g][1] << 32 | all[8 * i + g][0]))[t];
}
