// IQ2_XS: 256 values, x = (d / 8 * (2 * s + 1)) * q for each 16-group.
//   0  d f16 | 2  qs u16 [32]: nine bits of an entry, seven signs | 66  scales [8]: two halves
#pragma once

#include "quant/grid.h"

struct iq2_xs {
    enum { BLOCK = 256, BYTES = 74, SCALE_BYTES = 0, BIAS_BYTES = 0 };
    enum { UNIT = 32, RUNS = 2, PAIRED = 0, IS_FLOAT = 0 };
    enum { SIGNED = ENTRIES_SIGNED, OFFSET = ENTRIES_OFFSET, HAS_MIN = 0, WIDE = 0, SMALL = 1 };
    struct Raw {
        Words<2, 2> d;
        Words<8, 2> qs;
        Words<1, 1> scale;
        u32 shift, qs_shift, scale_shift;
    };

    static QUANT_FN void load(const QUANT_LOCAL Row& row, u32 unit, QUANT_LOCAL Raw& raw) {
        QUANT_PTR block = row.q + (u64)(unit / 8) * BYTES;
        const u32 j = unit % 8;
        raw.shift = misalignment<2>(block);
        raw.qs_shift = misalignment<2>(block + 2);
        raw.scale_shift = misalignment<1>(block + 66 + j);
        raw.d.load(block);
        raw.qs.load(block + 2 + 8 * j);
        raw.scale.load(block + 66 + j);
    }

    static QUANT_FN void run(const QUANT_LOCAL Raw& raw, u32, int r, QUANT_LOCAL u32* w, QUANT_LOCAL float& scale,
                             QUANT_LOCAL float& min) {
        const u32 s = raw.scale.get(0, raw.scale_shift) >> (4 * r) & 15;
        scale = float_of_f16(raw.d.get(0, raw.shift)) * 0.125f * (float)(2 * s + 1);
        min = 0.0f;
        const u32 two = raw.qs.get(4 * r, raw.qs_shift);
        #pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const u32 bits = two >> (8 * i);
            const Eight x = with_even_signs(iq2_xs_entry(bits & 511), bits >> 9 & 127);
            w[i] = x.low, w[i + 1] = x.high;
        }
    }
};
