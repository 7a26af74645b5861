// Q3_K: 256 values, x = (d * (sc[g] - 32)) * q for each 16-group g, q in -4..=3.
//   0  hmask [32] | 32  qs [64] | 96  scales [12] | 108  d f16
// qs lies as in Q2_K; bit `j` of byte `i % 32` of hmask is the third bit of value `i` of 32-group j, clear below zero.
// The low four bits of scale g are the low (g < 8) or high half of byte g % 8, its high two are bits 2 * (g / 4)
// of byte
// 8 + g % 4.
#pragma once

#include "quant/unit.h"

struct q3_k {
    enum { BLOCK = 256, BYTES = 110, SCALE_BYTES = 0, BIAS_BYTES = 0 };
    enum { UNIT = 64, RUNS = 4, PAIRED = 1, IS_FLOAT = 0 };
    enum { SIGNED = 0, OFFSET = -4, HAS_MIN = 0, WIDE = 0, SMALL = 1 };
    struct Raw {
        Words<16, 2> hmask;
        Words<16, 2> qs;
        Words<14, 2> scales;
        u32 shift;
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        QUANT_PTR block = row.q + (u64)(unit / 4) * BYTES;
        raw.shift = misalignment<2>(block);
        raw.hmask.load(block + 16 * (unit % 2));
        raw.qs.load(block + 32 + 16 * (unit % 4));
        raw.scales.load(block + 96);
    }

    static QUANT_FN void run(const QUANT_LOCAL Raw& raw, u32 unit, int r, QUANT_LOCAL u32* w, QUANT_LOCAL float& scale,
                             QUANT_LOCAL float& min) {
        const u32 half = unit % 4 / 2, g = 2 * r + unit % 2;  // the group's number in its half
        const u32 low = raw.scales.get(r < 2 ? 0 : 4, raw.shift) >> (8 * (g % 4) + 4 * half) & 15;
        const u32 high = raw.scales.get(8, raw.shift) >> (8 * (g % 4) + 2 * (2 * half + r / 2)) & 3;
        scale = float_of_f16(raw.scales.get(12, raw.shift)) * (float)((i32)(high << 4 | low) - 32);
        min = 0.0f;
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            w[i] = (raw.qs.get(4 * i, raw.shift) >> (2 * r) & 0x03030303u) |
                   (raw.hmask.get(4 * i, raw.shift) >> (4 * half + r) & 0x01010101u) << 2;
        }
    }
};
