// Q5_K: 256 values, x = (d * sc[j]) * q - dmin * m[j] for each 32-group j: Q4_K with a fifth bit.
//   0  d f16 | 2  dmin f16 | 4  scales [12] | 16  qh [32] | 48  qs [128]
// Bit `j` of byte `i % 32` of qh is bit 4 of value `i`.
// A unit is 16 bytes of qs: 16 values of one 32-group and 16 of the next.
#pragma once

#include "quant/unit.h"

struct q5_k {
    enum { BLOCK = 256, BYTES = 176, SCALE_BYTES = 0, BIAS_BYTES = 0 };
    enum { UNIT = 32, RUNS = 2, PAIRED = 1, IS_FLOAT = 0 };
    enum { SIGNED = 0, OFFSET = 0, HAS_MIN = 1, WIDE = 0, SMALL = 1 };
    struct Raw {
        Words<16, 16> head;
        Words<16, 16> qh;
        Words<16, 16> qs;
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        QUANT_PTR block = row.q + (u64)(unit / 8) * BYTES;
        raw.head.load(block);
        raw.qh.load(block + 16 + 16 * (unit % 2));
        raw.qs.load(block + 48 + 16 * (unit % 8));
    }

    static QUANT_FN void run(const QUANT_LOCAL Raw& raw, u32 unit, int r, QUANT_LOCAL u32* w, QUANT_LOCAL float& scale,
                             QUANT_LOCAL float& min) {
        const u32 j = 2 * (unit % 8 / 2) + r;
        u32 scales, mins;
        scales_mins(raw.head.a + 1, unit % 8 / 2, scales, mins);
        scale = float_of_f16(raw.head.a[0]) * float_of_byte(scales, r, 0);
        min = -(float_of_f16(raw.head.a[0] >> 16) * float_of_byte(mins, r, 0));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[i] = (raw.qs.a[i] >> (4 * r) & 0x0f0f0f0fu) | (raw.qh.a[i] >> j & 0x01010101u) << 4;
        }
    }
};
