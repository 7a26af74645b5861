// IQ3_XXS: 256 values, x = (d / 4 * (2 * s + 1)) * q for each 32-group.
//   0  d f16 | 2  entries [64] of four values | 66  u32 [8]: four times seven signs, and s
#pragma once

#include "quant/grid.h"

struct iq3_xxs {
    enum { BLOCK = 256, BYTES = 98, SCALE_BYTES = 0, BIAS_BYTES = 0 };
    enum { UNIT = 32, RUNS = 2, PAIRED = 0, IS_FLOAT = 0 };
    enum { SIGNED = ENTRIES_SIGNED, OFFSET = ENTRIES_OFFSET, HAS_MIN = 0, WIDE = 0, SMALL = 1 };
    struct Raw {
        Words<2, 2> d;
        Words<8, 2> qs;
        Words<4, 2> bits;
        u32 shift, qs_shift;
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        QUANT_PTR block = row.q + (u64)(unit / 8) * BYTES;
        const u32 j = unit % 8;
        raw.shift = misalignment<2>(block);
        raw.qs_shift = misalignment<2>(block + 2);
        raw.d.load(block);
        raw.qs.load(block + 2 + 8 * j);
        raw.bits.load(block + 66 + 4 * j);
    }

    static QUANT_FN void run(const QUANT_LOCAL Raw& raw, u32, int r, QUANT_LOCAL u32* w, QUANT_LOCAL float& scale,
                             QUANT_LOCAL float& min) {
        const u32 bits = raw.bits.get(0, raw.qs_shift), entries = raw.qs.get(4 * r, raw.qs_shift);
        scale = float_of_f16(raw.d.get(0, raw.shift)) * 0.25f * (float)(2 * (bits >> 28) + 1);
        min = 0.0f;
        #pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const u32 two = entries >> (8 * i);
            const Eight plain = Eight{iq3_xxs_entry(two & 255), iq3_xxs_entry(two >> 8 & 255)};
            const Eight x = with_even_signs(plain, bits >> (7 * (2 * r + i / 2)) & 127);
            w[i] = x.low, w[i + 1] = x.high;
        }
    }
};
