// IQ2_XXS: 256 values, x = (d / 8 * (2 * s + 1)) * q for each 32-group.
//   0  d f16 | 2  eight times: entries [4], u32 of four times seven signs and s
#pragma once

#include "quant/grid.h"

struct iq2_xxs {
    enum { BLOCK = 256, BYTES = 66, SCALE_BYTES = 0, BIAS_BYTES = 0 };
    enum { UNIT = 32, RUNS = 2, PAIRED = 0, IS_FLOAT = 0 };
    enum { SIGNED = ENTRIES_SIGNED, OFFSET = ENTRIES_OFFSET, HAS_MIN = 0, WIDE = 0, SMALL = 1 };
    struct Raw {
        Words<2, 2> d;
        Words<8, 2> group;
        u32 shift, group_shift;
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        QUANT_PTR block = row.q + (u64)(unit / 8) * BYTES;
        const u32 j = unit % 8;
        raw.shift = misalignment<2>(block);
        raw.group_shift = misalignment<2>(block + 2);
        raw.d.load(block);
        raw.group.load(block + 2 + 8 * j);
    }

    static QUANT_FN void run(const QUANT_LOCAL Raw& raw, u32, int r, QUANT_LOCAL u32* w, QUANT_LOCAL float& scale,
                             QUANT_LOCAL float& min) {
        const u32 entries = raw.group.get(0, raw.group_shift), bits = raw.group.get(4, raw.group_shift);
        scale = float_of_f16(raw.d.get(0, raw.shift)) * 0.125f * (float)(2 * (bits >> 28) + 1);
        min = 0.0f;
        #pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const int k = 2 * r + i / 2;
            const Eight x = with_even_signs(iq2_xxs_entry(entries >> (8 * k) & 255), bits >> (7 * k) & 127);
            w[i] = x.low, w[i + 1] = x.high;
        }
    }
};
