// Q6_K: 256 values, x = (d * sc[g]) * (q - 32) for each 16-group g, sc signed.
//   0  ql [128] | 128  qh [64] | 192  scales [16] | 208  d f16
// A half of 128 values takes 64 bytes of ql, the low halves are its first 64 values, and 32 bytes of qh, whose bits
// 2s, 2s + 1 of byte l are the high bits of value 32 * s + l. A unit is 16 bytes of qh and twice 16 of ql.
#pragma once

#include "quant/unit.h"

struct q6_k {
    enum { BLOCK = 256, BYTES = 210, SCALE_BYTES = 0, BIAS_BYTES = 0 };
    enum { UNIT = 64, RUNS = 4, PAIRED = 1, IS_FLOAT = 0 };
    enum { SIGNED = 0, OFFSET = -32, HAS_MIN = 0, WIDE = 0, SMALL = 1 };
    struct Raw {
        Words<16, 2> ql[2];
        Words<16, 2> qh;
        Words<8, 2> scales;
        Words<2, 2> d;
        u32 shift;
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        QUANT_PTR block = row.q + (u64)(unit / 4) * BYTES;
        const u32 half = unit % 4 / 2;
        raw.shift = misalignment<2>(block);
        raw.ql[0].load(block + 64 * half + 16 * (unit % 2));
        raw.ql[1].load(block + 64 * half + 16 * (unit % 2) + 32);
        raw.qh.load(block + 128 + 16 * (unit % 4));
        raw.scales.load(block + 192 + 8 * half);
        raw.d.load(block + 208);
    }

    static QUANT_FN void run(const QUANT_LOCAL Raw& raw, u32 unit, int r, QUANT_LOCAL u32* w, QUANT_LOCAL float& scale,
                             QUANT_LOCAL float& min) {
        const u32 sc = raw.scales.get(r < 2 ? 0 : 4, raw.shift) >> (8 * (2 * r % 4 + unit % 2));
        scale = float_of_f16(raw.d.get(0, raw.shift)) * (float)(i8)(sc & 255);
        min = 0.0f;
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            w[i] = (raw.ql[r % 2].get(4 * i, raw.shift) >> (4 * (r / 2)) & 0x0f0f0f0fu) |
                   (raw.qh.get(4 * i, raw.shift) >> (2 * r) & 0x03030303u) << 4;
        }
    }
};
