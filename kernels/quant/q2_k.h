// Q2_K: 256 values, x = (d * sc[g]) * q - dmin * m[g] for each 16-group g.
//   0  scales [16], m << 4 | sc | 16  qs [64] | 80  d f16 | 82  dmin f16
// A half of 128 values takes 32 bytes of qs; its value 32 * s + l is bits 2s, 2s + 1 of byte l. A unit is 16 bytes
// of qs.
#pragma once

#include "quant/unit.h"

struct q2_k {
    enum { BLOCK = 256, BYTES = 84, SCALE_BYTES = 0, BIAS_BYTES = 0 };
    enum { UNIT = 64, RUNS = 4, PAIRED = 1, IS_FLOAT = 0 };
    enum { SIGNED = 0, OFFSET = 0, HAS_MIN = 1, WIDE = 0, SMALL = 1 };
    struct Raw {
        Words<8, 4> scales;
        Words<16, 4> qs;
        Words<4, 4> d;
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        QUANT_PTR block = row.q + (u64)(unit / 4) * BYTES;
        raw.scales.load(block + 8 * (unit % 4 / 2));
        raw.qs.load(block + 16 + 16 * (unit % 4));
        raw.d.load(block + 80);
    }

    static QUANT_FN void run(const QUANT_LOCAL Raw& raw, u32 unit, int r, QUANT_LOCAL u32* w, QUANT_LOCAL float& scale,
                             QUANT_LOCAL float& min) {
        const u32 sc = raw.scales.a[r / 2] >> (8 * (2 * r % 4 + unit % 2));
        scale = float_of_f16(raw.d.a[0]) * (float)(sc & 15);
        min = -(float_of_f16(raw.d.a[0] >> 16) * (float)(sc >> 4 & 15));
        #pragma unroll
        for (int i = 0; i < 4; i++) w[i] = raw.qs.a[i] >> (2 * r) & 0x03030303u;
    }
};
